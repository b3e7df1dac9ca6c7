"""FFCV."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from ffcv.fields import IntField, RGBImageField
from ffcv.loader import Loader, OrderOption
from ffcv.writer import DatasetWriter

from benchmarks.peer_cases.base import Batch, Case, ImageFolder, Opened, Reading


class _OpenedFFCV:
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def epoch(self) -> Generator[Batch, None, None]:
        """Its next epoch."""
        iterator = iter(self.loader)
        try:
            for images, labels in iterator:
                yield images, labels.reshape(-1)
        finally:
            # Its thread holds the iterator, so that nothing else would stop it early.
            iterator.close()
            iterator.join()

    def close(self) -> None:
        """Let go of the map and the compiled pipeline."""
        del self.loader


class FFCVCase(Case):
    """A .beton file of raw pixels."""

    settings = (
        "write_mode='raw'; os_cache=True and OrderOption.RANDOM, which its tuning guide recommends where the data fits "
        "into memory; the default pipelines (SimpleRGBImageDecoder, ToTensor); drop_last=False."
    )
    packages = ("ffcv", "numba", "torch", "opencv-python-headless")
    compiles = True
    parallel = "threads"

    def convert(self, source: ImageFolder, out: Path, workers: int) -> int:
        """DatasetWriter with workers, from a dataset that decodes, as its documentation shows."""
        fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
        DatasetWriter(str(out / "images.beton"), fields, num_workers=workers).from_indexed_dataset(source)
        return workers

    def open(self, out: Path, reading: Reading) -> Opened:
        """The loader, which compiles its pipeline when the first batch is made."""
        return _OpenedFFCV(
            Loader(
                str(out / "images.beton"),
                reading.batch,
                num_workers=reading.workers,
                os_cache=True,
                order=OrderOption.RANDOM,
                seed=reading.seed,
                drop_last=False,
            )
        )


CASES = {"ffcv": FFCVCase()}
