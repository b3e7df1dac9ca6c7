"""Rows in the page cache, read from a shared mapping of their file instead of by system calls.

Copying rows from the mapping costs one copy and no private memory. It is used only for rows whose pages are in the page
cache and in the process's page table, because touching any other page of a mapping waits for the disk, and ends the
process with SIGBUS if the disk fails or the file was cut short. `FileMapping.ready` makes sure of both for whole
blocks, and checks each block again after a second.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.storage import CHECK_SECONDS, Storage
from h5pack.system.arrays import consecutive_runs
from h5pack.system.libc import libc_function

_BLOCK = 2 << 20
"""Bytes of the file that are checked together; a multiple of the page size."""

_MAX_CALL_BLOCKS = 64
"""Maximum number of blocks that one system call checks, which bounds the time for which it holds kernel locks."""

_MAX_ABSENT = 1 / 16
"""Maximum share of pages of a block that are loaded into the page cache while it is checked. With more of them absent,
reading ahead and then reading with preadv is faster."""

_MADV_POPULATE_READ = 22
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_mincore = libc_function("mincore", ctypes.c_int, _ADDRESS, _SIZE, _ADDRESS)
_madvise = libc_function("madvise", ctypes.c_int, _ADDRESS, _SIZE, ctypes.c_int)


class FileMapping:
    """A read-only shared mapping of a whole file. `bytes` is uint8 (file size,); touch only blocks that are ready."""

    def __init__(self, storage: Storage) -> None:
        descriptor = storage.open()
        self._storage, self._size = storage, storage.identity.size
        # mmap duplicates the descriptor, so closing the storage does not matter.
        self._map = mmap.mmap(descriptor, self._size, mmap.MAP_SHARED, mmap.PROT_READ)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self._address: int = self.bytes.__array_interface__["data"][0]
        # Monotonic time of the last check of each block, -inf before the first one, and the process whose page table
        # it is about.
        self._checked = (os.getpid(), np.full(-(-self._size // _BLOCK), -np.inf))
        # For files of other users that this process cannot write, mincore reports all pages as cached.
        self._sees_cache = os.stat(descriptor).st_uid == os.geteuid() or os.access(storage.path, os.W_OK)

    @classmethod
    def open(cls, storage: Storage) -> FileMapping | None:
        """Map a storage's file; return None where the system or the file system does not support it."""
        # Other systems cannot load the page table without the risk of a SIGBUS.
        if sys.platform != "linux" or _mincore is None or _madvise is None or not storage.identity.size:
            return None
        try:
            return cls(storage)
        except (OSError, ValueError):
            # mmap raises ValueError if the file is shorter than it was, which is for the reads to report.
            return None

    def ready(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> bool:
        """Make sure that extents of the file can be read from `bytes` without waiting; False: use preadv for them.

        `starts` and `stops`, int64 (n,), are the offsets of their first bytes and of the bytes after them. The answer
        holds for about a second.
        """
        wanted = _all_between(starts // _BLOCK, (np.minimum(stops, self._size) - 1) // _BLOCK)
        process, checked = self._checked
        if process != os.getpid():
            process, checked = self._checked = (os.getpid(), np.full(len(checked), -np.inf))
        old = wanted[checked[wanted] < time.monotonic() - CHECK_SECONDS]
        edges = consecutive_runs(old).tolist()
        for low, high in itertools.pairwise(edges):
            for start in range(low, high, _MAX_CALL_BLOCKS):
                first, last = int(old[start]), int(old[min(high, start + _MAX_CALL_BLOCKS) - 1])
                now = time.monotonic()
                loaded = bool(np.isfinite(checked[first : last + 1]).all())
                if not self._load(first * _BLOCK, min(self._size, (last + 1) * _BLOCK), loaded):
                    return False
                checked[first : last + 1] = now
        return True

    def require_unchanged(self) -> None:
        """Raise PackChangedError if the file was cut short, rewritten or replaced since it was opened.

        Call this before touching `bytes`, because touching bytes past the end of the file ends the process with SIGBUS,
        and after it, because another program may have changed the bytes meanwhile.
        """
        self._storage.identity.require(self._storage.path, self._storage.open())

    def _load(self, start: int, stop: int, loaded: bool) -> bool:
        """Load bytes that are in the page cache into the page table; return False if too few of them are, or none.

        `loaded` says that this was done before. It takes seven times as long as to ask what is in the page cache.
        """
        share = self._cached_share(start, stop)
        if share < 1 - _MAX_ABSENT:
            return False
        if loaded and share == 1 and self._sees_cache:
            return True
        assert _madvise is not None
        # On a failed read or beyond the end of the file this returns an error, where touching a page would be a SIGBUS.
        return not _madvise(self._address + start, stop - start, _MADV_POPULATE_READ)

    def _cached_share(self, start: int, stop: int) -> float:
        """Return the share of the pages that are in the page cache."""
        assert _mincore is not None
        if not self._sees_cache:
            probes = range(start, stop, _BLOCK // 8)
            return sum(self._storage.is_cached(offset, unknown=False) for offset in probes) / len(probes)
        flags = np.empty(-(-(stop - start) // mmap.PAGESIZE), np.uint8)
        if _mincore(self._address + start, stop - start, flags.ctypes.data):
            return 0.0
        return float(np.count_nonzero(flags & 1) / len(flags))


def _all_between(first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers from ``first[i]`` to ``last[i]`` for all i, ascending and without repetitions."""
    counts = last - first + 1
    ends = np.cumsum(counts)
    numbers: npt.NDArray[np.int64] = np.repeat(last + 1 - ends, counts)
    numbers += np.arange(len(numbers))
    return np.unique(numbers)


@dataclass(frozen=True)
class MappedDataset:
    """The rows of a dataset in a mapping of its file, in stored byte order."""

    index: ChunkIndex
    mapping: FileMapping

    @staticmethod
    def is_supported(index: ChunkIndex) -> bool:
        """Return whether all rows of a dataset are stored unfiltered in its own file."""
        return index.raw and index.complete and index.in_own_file and index.rows * index.row_bytes > 0

    @cached_property
    def array(self) -> npt.NDArray[np.uint8] | None:
        """All rows, uint8 (N, row_bytes), if the chunks are adjacent in the file and in order; else None."""
        index, starts = self.index, self.index.addresses
        if (np.diff(starts) != index.chunk_rows * index.row_bytes).any():
            return None
        rows: npt.NDArray[np.uint8] = np.ndarray(
            (index.rows, index.row_bytes), np.uint8, self.mapping.bytes, int(starts[0])
        )
        return rows

    def ready(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> bool:
        """Make sure that rows can be copied without waiting for about a second; False: read them with preadv.

        `first` and `last`, int64 (n,), are the first and the last row of runs of consecutive rows.
        """
        index = self.index
        if self.array is not None:
            return self.mapping.ready(self.offsets(first), self.offsets(last) + index.row_bytes)
        # A run may go on in a chunk that is elsewhere, so check whole chunks.
        starts = index.addresses[_all_between(index.chunks_of(first), index.chunks_of(last))]
        return self.mapping.ready(starts, starts + index.chunk_rows * index.row_bytes)

    def offsets(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the index in the mapping's `bytes` at which each row starts; int64 (n,)."""
        return self.index.offsets_of(rows, self.index.chunks_of(rows))
