"""h5py as most people use it: one index at a time, in a DataLoader; whole-image chunks, guessed ones, the recipe's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.peer_cases.base import Case, ImageFolder, Opened, Reading, shuffling


class OneIndex(Dataset[Any]):
    """Opens the file on first use in each process, and reads one index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: h5py.File | None = None
        with h5py.File(path) as file:
            self.rows = len(file["labels"])

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = h5py.File(self.path)
        return torch.from_numpy(self.file["images"][index]), int(self.file["labels"][index])


class H5pyCase(Case):
    """A file of one kind of chunks; with `channels_first`, of (N, 3, H, W).

    `chunks` gives the chunk shape for the shape of an image and the number of rows; True lets h5py guess.
    """

    packages = ("h5py", "torch")
    may_be_cut = True

    def __init__(self, settings: str, channels_first: bool, chunks: Callable[[tuple[int, ...], int], Any]) -> None:
        self.settings, self.channels_first, self.chunks = settings, channels_first, chunks

    def convert(self, source: ImageFolder, out: Path, workers: int) -> int:
        """Written in blocks of 64 rows by this process; 2 others decode for it."""
        height, width, channels = source.shape
        shape = (channels, height, width) if self.channels_first else source.shape
        with h5py.File(out / "images.h5", "w") as file:
            images = file.create_dataset(
                "images", (len(source), *shape), np.uint8, chunks=self.chunks(shape, len(source))
            )
            done = 0
            for block, _ in source.decoded(workers):
                images[done : done + len(block)] = block.transpose(0, 3, 1, 2) if self.channels_first else block
                done += len(block)
            file["labels"] = source.labels
        return workers

    def open(self, out: Path, reading: Reading) -> Opened:
        """The dataset in a DataLoader."""
        return shuffling(OneIndex(out / "images.h5"), reading)


CASES = {
    "h5py": H5pyCase(
        "Chunks of one whole image, (1, H, W, 3); opened once a worker, as h5py's users do.",
        False,
        lambda shape, rows: (1, *shape),
    ),
    "h5py-auto": H5pyCase("chunks=True: the shape that h5py guesses, channels first.", True, lambda shape, rows: True),
    "h5py-recipe": H5pyCase(
        "chunks=(100, 3, H - 1, W), channels first: the well-known CelebA recipe, whose chunks cut images.",
        True,
        lambda shape, rows: (min(100, rows), shape[0], shape[1] - 1, shape[2]),
    ),
}
