"""The ceiling of reading from a disk: a file from its beginning to its end."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

_BLOCK_BYTES = 4 * 1024 * 1024


def sequential(path: Path, flags: int = 0) -> float:
    """Bytes a second of reading a file from its beginning to its end."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    block, done = mmap.mmap(-1, _BLOCK_BYTES), 0
    begin = time.perf_counter()
    try:
        while got := os.preadv(descriptor, [block], done):
            done += got
            if got % mmap.PAGESIZE:
                break
    finally:
        os.close(descriptor)
    return done / (time.perf_counter() - begin)
