"""Files of random rows for the reading benchmarks: a pack, and the same rows as other people store them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

import h5pack

_BLOCK = 64


@dataclass(frozen=True)
class RowSource:
    """A map-style dataset of images that differ, and cost nothing to make.

    Attributes
    ----------
    rows, height, width : int
    """

    rows: int
    height: int
    width: int

    def image(self, row: int) -> npt.NDArray[np.uint8]:
        """Image number `row`, uint8 (H, W, 3)."""
        image = np.resize(np.random.default_rng(row % _BLOCK).integers(0, 256, 4096, np.uint8), self.size)
        image[:8] = np.frombuffer(np.int64(row).tobytes(), np.uint8)
        return image.reshape(self.height, self.width, 3)

    @property
    def size(self) -> int:
        """Bytes an image."""
        return self.height * self.width * 3

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[npt.NDArray[np.uint8], int]:
        if row >= self.rows:
            raise IndexError(row)
        return self.image(row), row % 10


def make_pack(source: RowSource, path: Path) -> Path:
    """A pack of all rows with the default chunks."""
    h5pack.convert(source, path, h5pack.ConvertOptions(workers=1, overwrite=True))
    return path


def make_flat(pack: Path, path: Path) -> Path:
    """The rows of a pack as raw bytes, for np.memmap."""
    with h5py.File(pack) as file, path.open("wb") as flat:
        images = file["images"]
        for start in range(0, len(images), images.chunks[0]):
            flat.write(images[start : start + images.chunks[0]].tobytes())
    return path


def make_foreign(source: RowSource, path: Path, chunks: Any, rows: int) -> Path:
    """The first rows, channels first, with other chunks: True lets h5py guess."""
    with h5py.File(path, "w") as file:
        shape = (rows, 3, source.height, source.width)
        images = file.create_dataset("images", shape, np.uint8, chunks=chunks)
        for block in itertools.count():
            numbers = range(block * 100, min(rows, block * 100 + 100))
            if not numbers:
                break
            images[numbers.start : numbers.stop] = np.stack([source.image(row).transpose(2, 0, 1) for row in numbers])
        file["labels"] = np.arange(rows) % 10
    return path
