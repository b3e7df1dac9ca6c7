"""NVIDIA DALI on the CPU."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from benchmarks.peer_cases.base import Batch, Case, ImageFolder, Opened, Reading


@pipeline_def
def _raw_files(folder: str, shape: list[int], seed: int):  # type: ignore[no-untyped-def]
    data, labels = fn.readers.file(
        file_root=folder,
        file_list=f"{folder}/files.txt",
        shuffle_after_epoch=True,
        shuffle_after_epoch_seed=seed,
        pad_last_batch=True,
        name="rows",
    )
    return fn.reshape(data, shape=shape), labels


class _OpenedDALI:
    def __init__(self, out: Path, reading: Reading) -> None:
        shape = [int(length) for length in (out / "shape.txt").read_text().split()]
        pipeline = _raw_files(
            str(out), shape, reading.seed, batch_size=reading.batch, num_threads=reading.workers, device_id=None
        )
        self.iterator = DALIGenericIterator(
            pipeline,
            ["images", "labels"],
            reader_name="rows",
            last_batch_policy=LastBatchPolicy.PARTIAL,
            auto_reset=True,
        )

    def epoch(self) -> Generator[Batch, None, None]:
        """Its next epoch."""
        for outputs in self.iterator:
            yield outputs[0]["images"], outputs[0]["labels"].reshape(-1)

    def close(self) -> None:
        """Let go of the pipeline."""
        del self.iterator


class DALICase(Case):
    """A file of raw pixels an image, and a list of files with labels."""

    settings = (
        "fn.readers.file over raw files with shuffle_after_epoch, which shuffles them all (random_shuffle draws from a "
        "buffer that outlasts the epoch, which is then not each image once), pad_last_batch=True and "
        "LastBatchPolicy.PARTIAL (without the padding, images of the next epoch were lost); device_id=None; "
        "DALIGenericIterator. The first epoch comes in stored order."
    )
    packages = ("nvidia-dali-cuda130", "nvidia-dali-cuda120", "torch")
    parallel = "threads"

    def convert(self, source: ImageFolder, out: Path, workers: int) -> int:
        """Files are written by this process; 2 others decode for it."""
        row = 0
        with (out / "files.txt").open("w") as names:
            for images, labels in source.decoded(workers):
                for image, label in zip(images, labels, strict=True):
                    name = f"{row // 1000:04d}/{row:08d}.raw"
                    if row % 1000 == 0:
                        (out / name).parent.mkdir()
                    (out / name).write_bytes(image.tobytes())
                    names.write(f"{name} {label}\n")
                    row += 1
        (out / "shape.txt").write_text(" ".join(map(str, source.shape)))
        return workers

    def open(self, out: Path, reading: Reading) -> Opened:
        """The pipeline in torch's iterator."""
        return _OpenedDALI(out, reading)


CASES = {"dali": DALICase()}
