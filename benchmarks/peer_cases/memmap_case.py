"""np.memmap over a flat file."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np

from benchmarks.peer_cases.base import Batch, Case, ImageFolder, Opened, Reading


class _OpenedMap:
    def __init__(self, out: Path, reading: Reading) -> None:
        self.labels = np.load(out / "labels.npy")
        self.images = np.load(out / "images.npy", mmap_mode="r")
        self.batch, self.random = reading.batch, np.random.default_rng(reading.seed)

    def epoch(self) -> Generator[Batch, None, None]:
        """Its next epoch."""
        order = self.random.permutation(len(self.labels))
        for start in range(0, len(order), self.batch):
            rows = order[start : start + self.batch]
            yield self.images[rows], self.labels[rows]

    def close(self) -> None:
        """Let go of the map."""
        del self.images


class MemmapCase(Case):
    """An .npy file of images, mapped."""

    settings = (
        "np.load(mmap_mode='r') and a fancy index a batch, in this process, which is much faster than through the "
        "workers of a DataLoader. No read-ahead; labels are in memory."
    )
    packages = ("numpy",)
    parallel = "nothing"

    def convert(self, source: ImageFolder, out: Path, workers: int) -> int:
        """Written through a map by this process; 2 others decode for it."""
        images = np.lib.format.open_memmap(out / "images.npy", "w+", np.uint8, (len(source), *source.shape))
        done = 0
        for block, _ in source.decoded(workers):
            images[done : done + len(block)] = block
            done += len(block)
        images.flush()
        np.save(out / "labels.npy", source.labels)
        return workers

    def open(self, out: Path, reading: Reading) -> Opened:
        """The map."""
        return _OpenedMap(out, reading)


CASES = {"memmap": MemmapCase()}
