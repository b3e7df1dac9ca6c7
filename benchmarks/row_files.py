"""Files of random rows for the reading benchmarks: a pack, and the same rows as other people store them."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import time
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


def cached_pages(path: Path) -> int:
    """How many pages of a file are in the page cache, by mincore(2), which reads nothing."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        addresses = [ctypes.c_void_p(array.__array_interface__["data"][0]) for array in (view, flags)]
        failed = ctypes.CDLL(None, use_errno=True).mincore(addresses[0], ctypes.c_size_t(size), addresses[1])
        # A map with an array over it cannot be closed.
        del view
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return int(np.count_nonzero(flags & 1))


def drop_cache(path: Path) -> int:
    """Have the system forget a file's pages; returns how many are there still (0: it is cold).

    The host of a virtual machine may still have them.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        for _ in range(5):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if not (cached := cached_pages(path)):
                break
            time.sleep(0.2)
        return cached
    finally:
        os.close(descriptor)


def make_hot(path: Path) -> None:
    """Have all pages of a file in the page cache."""
    if cached_pages(path) < -(-path.stat().st_size // mmap.PAGESIZE):
        with path.open("rb", buffering=0) as file:
            block = bytearray(1 << 22)
            while file.readinto(block):
                pass
