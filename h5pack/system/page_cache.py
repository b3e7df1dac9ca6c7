"""A file's pages in the operating system's page cache: count, drop and load them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from pathlib import Path

import numpy as np

from h5pack.system.libc import libc_function, raise_errno


def cached_pages(path: Path) -> int:
    """Return how many pages of a file are in the page cache. This uses mincore(2), so it does not read the file."""
    mincore = libc_function("mincore", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    if mincore is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), os.fspath(path))
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        failed = mincore(view.ctypes.data, size, flags.ctypes.data)
        # The memory map cannot be closed while an array refers to it.
        del view
        if failed:
            raise_errno(path)
        return int(np.count_nonzero(flags & 1))


def drop_cache(path: Path) -> int:
    """Drop a file's pages from the page cache, and return how many remain; 0 if none of the file is cached.

    If this machine is virtual, its host may still have the pages in a cache of its own.
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
    """Load all pages of a file into the page cache."""
    if cached_pages(path) < -(-path.stat().st_size // mmap.PAGESIZE):
        with path.open("rb", buffering=0) as file:
            block = bytearray(1 << 22)
            while file.readinto(block):
                pass
