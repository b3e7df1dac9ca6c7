"""The files of one way: their size, and their pages in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

from h5pack.measure.page_cache import cached_pages, make_hot

_MADV_DONTNEED = 4
_TRIES = 4


class PeerFiles:
    """All files in a folder, following links.

    Parameters
    ----------
    folder : Path

    Attributes
    ----------
    paths : list of Path
        Those that hold something.
    """

    def __init__(self, folder: Path) -> None:
        found = (Path(root) / name for root, _, names in os.walk(folder, followlinks=True) for name in names)
        self.paths = [path for path in found if path.stat().st_size]

    def disk_bytes(self) -> int:
        """What they take on the disk, in whole blocks."""
        return sum(path.stat().st_blocks * 512 for path in self.paths)

    def flush(self) -> None:
        """Have them on the disk."""
        for path in self.paths:
            self._with_descriptor(path, os.fsync)

    def drop(self) -> int:
        """Have the system forget their pages; returns how many are there still, by mincore (0: all are cold).

        Files must have been flushed: dirty pages stay. Pages that a process maps stay, too; see `unmap`.
        """
        left = 0
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(0.1)
            for path in self.paths:
                self._with_descriptor(path, lambda file: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED))
            left = sum(cached_pages(path) for path in self.paths)
            if not left:
                break
        return left

    def heat(self) -> None:
        """Have all their pages in the page cache."""
        for path in self.paths:
            make_hot(path)

    def unmap(self) -> None:
        """Take their pages out of this process's read-only maps, so that they can be dropped; the next access faults.

        The maps stay valid. FFCV, for one, never closes its map.
        """
        names = {str(path.resolve()) for path in self.paths}
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] in names and "w" not in fields[1]:
                start, stop = (int(address, 16) for address in fields[0].split("-"))
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)

    def pages(self) -> int:
        """How many pages they fill."""
        return sum(-(-path.stat().st_size // mmap.PAGESIZE) for path in self.paths)

    @staticmethod
    def _with_descriptor(path: Path, act: object) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            act(descriptor)  # type: ignore[operator]
        finally:
            os.close(descriptor)
