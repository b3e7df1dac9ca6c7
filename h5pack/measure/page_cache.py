"""A file's pages in the system's page cache: count them, drop them, load them."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np


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
    if not hasattr(os, "posix_fadvise"):
        return max(1, cached_pages(path))
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
