"""The ceiling of reading from a disk: a file from its beginning to its end."""

from __future__ import annotations

import math
import mmap
import os
import time
from pathlib import Path

_BLOCK_BYTES = 4 * 1024 * 1024


def sequential(path: Path, flags: int = 0, seconds: float = math.inf) -> float:
    """Bytes a second of reading a file.

    Parameters
    ----------
    path : Path
    flags : int
        For opening it, besides ``O_RDONLY``.
    seconds : float
        Stop after about so long.
    """
    descriptor = os.open(path, os.O_RDONLY | flags)
    block, done = mmap.mmap(-1, _BLOCK_BYTES), 0
    begin = time.perf_counter()
    try:
        while time.perf_counter() - begin < seconds and (got := os.preadv(descriptor, [block], done)):
            done += got
            # What O_DIRECT reads of a file's end leaves it no place to go on from.
            if got % mmap.PAGESIZE:
                break
    finally:
        os.close(descriptor)
    return done / (time.perf_counter() - begin)
