"""h5pack's two cases: H5Loader as it comes, and H5Dataset in a DataLoader."""

from __future__ import annotations

from pathlib import Path

from torch.utils.data import DataLoader

from benchmarks.peer_cases.base import Case, ImageFolder, Opened, OpenedLoader, Reading
from h5pack import ChunkBatchSampler, H5Dataset, H5Loader, convert


class _Packed(Case):
    packages = ("h5pack", "h5py", "torch")

    def convert(self, source: ImageFolder, out: Path, workers: int) -> int:
        """``h5pack convert`` as it comes."""
        convert(source.folder, out / "pack.h5", num_workers=workers)
        return workers


class _OpenedH5Loader(OpenedLoader):
    def close(self) -> None:
        """Join its threads."""
        self.loader.close()
        super().close()


class LoaderWay(_Packed):
    """H5Loader."""

    settings = "As it comes: rows are read in every epoch, from the page cache if they are there."
    parallel = "threads"

    def open(self, out: Path, reading: Reading) -> Opened:
        """The loader over the pack."""
        dataset = H5Dataset(out / "pack.h5")
        return _OpenedH5Loader(H5Loader(dataset, reading.batch, num_threads=reading.workers, seed=reading.seed))


class DatasetWay(_Packed):
    """H5Dataset in a DataLoader."""

    settings = "ChunkBatchSampler, collate_fn=dataset.collate, workers that stay: as docs/loading.md has it."

    def open(self, out: Path, reading: Reading) -> Opened:
        """The DataLoader over the pack."""
        dataset = H5Dataset(out / "pack.h5")
        sampler = ChunkBatchSampler(dataset, reading.batch, seed=reading.seed)
        loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=dataset.collate,
            num_workers=reading.workers,
            persistent_workers=reading.workers > 0,
        )
        return OpenedLoader(loader)


CASES = {"h5loader": LoaderWay(), "h5dataset": DatasetWay()}
