"""Rows in the page cache, read from shared mappings of their files instead of by system calls.

Copying rows from the mapping costs one copy and no private memory. It is used only for rows whose pages are in the page
cache and in the process's page table, because touching any other page of a mapping waits for the disk, and ends the
process with SIGBUS if the disk fails or the file was cut short. `FileMapping.ready` makes sure of both for whole
blocks, and checks each block again after a second.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.storage import CHECK_SECONDS, SourceFile, Storage
from h5pack.read.virtual_index import VirtualIndex
from h5pack.system.arrays import consecutive_runs, range_indices
from h5pack.system.libc import libc_function, raise_errno

_BLOCK = 2 << 20
"""Bytes of the file that are checked together; a multiple of the page size."""

_MAX_CALL_BLOCKS = 64
"""Maximum number of blocks that one system call checks, which bounds the time for which it holds kernel locks."""

_MAX_ABSENT = 1 / 16
"""Maximum share of pages of a block that are loaded into the page cache while it is checked. With more of them absent,
reading ahead and then reading with preadv is faster."""

_MAX_FILES = 1_024
"""Maximum number of files that are mapped together; a process may have 65,530 mappings by default."""
_MAX_STEP = 1 << 36
"""Maximum distance in bytes between mapped files."""

_MADV_POPULATE_READ = 22
_MAP_FIXED = 16
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_mmap = libc_function("mmap", _ADDRESS, _ADDRESS, _SIZE, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_mincore = libc_function("mincore", ctypes.c_int, _ADDRESS, _SIZE, _ADDRESS)
_madvise = libc_function("madvise", ctypes.c_int, _ADDRESS, _SIZE, ctypes.c_int)


class FileMapping:
    """Read-only shared mappings of whole files, one after the other in one range of addresses.

    `bytes` is uint8 (size,): byte i of file k is ``bytes[bases[k] + i]``. Touch only blocks that are ready. Between the
    files there may be gaps, which must not be touched.
    """

    def __init__(self, storages: Sequence[Storage], bases: Sequence[int]) -> None:
        sizes = [storage.identity.size for storage in storages]
        self.bases = np.array(bases, np.int64)
        self._storages, self._ends = storages, self.bases + sizes
        # Where the rows of each file begin and end. What is around them is often not in the page cache.
        self._begins, self._stops = self._ends.copy(), self.bases.copy()
        size = int(self._ends[-1])
        # Each mapping keeps its file, so closing the storage does not matter.
        if len(storages) == 1:
            self._map = mmap.mmap(storages[0].open(), size, mmap.MAP_SHARED, mmap.PROT_READ)
            self.bytes = np.frombuffer(self._map, np.uint8)
        else:
            # Reserve the addresses, then map each file to its part of them. The end of this object unmaps all of them.
            # The first one is a multiple of a block, at which the system can map many pages of a file by one entry of
            # the page table. At other addresses, copying rows of 3 KB takes 4% longer.
            self._map = mmap.mmap(-1, size + _BLOCK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0)
            reserved = np.frombuffer(self._map, np.uint8)
            self.bytes = reserved[-reserved.__array_interface__["data"][0] % _BLOCK :][:size]
        self._address: int = self.bytes.__array_interface__["data"][0]
        for storage, base, count in zip(storages, bases, sizes, strict=True):
            if len(storages) > 1:
                _map_at(self._address + base, count, storage.open())
        # The number of the file of each block, -1 in gaps.
        numbers = np.arange(-(-size // _BLOCK)) * _BLOCK
        owners = np.searchsorted(self.bases, numbers, "right") - 1
        self._owners = np.where(numbers < self._ends[owners], owners, -1)
        # Monotonic time of the last check of each block, -inf before the first one, and the process whose page table
        # it is about.
        self._checked = (os.getpid(), np.full(len(numbers), -np.inf))
        # For files of other users that this process cannot write, mincore reports all pages as cached.
        self._sees_cache = all(
            os.stat(one.open()).st_uid == os.geteuid() or os.access(one.path, os.W_OK) for one in storages
        )

    @classmethod
    def open(cls, storages: Sequence[Storage], bases: Sequence[int]) -> FileMapping | None:
        """Map the files of storages; return None where the system or a file system does not support it."""
        # Other systems cannot load the page table without the risk of a SIGBUS.
        if sys.platform != "linux" or None in (_mincore, _madvise, _mmap):
            return None
        if not all(storage.identity.size for storage in storages):
            return None
        try:
            return cls(storages, bases)
        except (OSError, ValueError, OverflowError):
            # mmap raises ValueError if the file is shorter than it was, which is for the reads to report.
            return None

    def add_rows(self, number: int, start: int, stop: int) -> None:
        """Announce that all rows of a dataset that are in this file lie in ``bytes[start:stop]``."""
        self._begins[number] = min(int(self._begins[number]), start // mmap.PAGESIZE * mmap.PAGESIZE)
        self._stops[number] = max(int(self._stops[number]), stop)
        self._checked[1][[start // _BLOCK, (stop - 1) // _BLOCK]] = -np.inf

    def ready(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> bool:
        """Make sure that extents can be read from `bytes` without waiting; False: use preadv for them.

        `starts` and `stops`, int64 (n,), are the indices of their first bytes and of the bytes after them. The answer
        holds for about a second.
        """
        wanted = _all_between(starts // _BLOCK, (np.minimum(stops, self._ends[-1]) - 1) // _BLOCK)
        process, checked = self._checked
        if process != os.getpid():
            process, checked = self._checked = (os.getpid(), np.full(len(checked), -np.inf))
        old = wanted[checked[wanted] < time.monotonic() - CHECK_SECONDS]
        owners = self._owners[old]
        edges = consecutive_runs(old, old + owners * len(checked)).tolist()
        for low, high in itertools.pairwise(edges):
            for start in range(low, high, _MAX_CALL_BLOCKS):
                first, last = int(old[start]), int(old[min(high, start + _MAX_CALL_BLOCKS) - 1])
                now = time.monotonic()
                loaded = bool(np.isfinite(checked[first : last + 1]).all())
                number = int(owners[start])
                begin = max(int(self._begins[number]), first * _BLOCK)
                if not self._load(number, begin, min(int(self._stops[number]), (last + 1) * _BLOCK), loaded):
                    return False
                checked[first : last + 1] = now
        return True

    def require_whole(self, numbers: Iterable[int]) -> None:
        """Raise PackChangedError if one of these files was cut short since it was opened.

        Call this before touching `bytes`, because touching bytes past the end of a file ends the process with SIGBUS.
        It takes half the time of `require_unchanged`.
        """
        for number in numbers:
            storage = self._storages[number]
            descriptor = storage.open()
            try:
                whole = os.lseek(descriptor, 0, os.SEEK_END) >= storage.identity.size
            except OSError:
                whole = False
            if not whole:
                storage.identity.require(storage.path, descriptor)

    def require_unchanged(self, numbers: Iterable[int]) -> None:
        """Raise PackChangedError if one of these files was cut short, rewritten or replaced since it was opened.

        Call this after touching `bytes`, because another program may have changed the bytes meanwhile.
        """
        for number in numbers:
            storage = self._storages[number]
            storage.identity.require(storage.path, storage.open())

    def _load(self, number: int, start: int, stop: int, loaded: bool) -> bool:
        """Load bytes that are in the page cache into the page table; return False if too few of them are, or none.

        `loaded` says that this was done before. It takes seven times as long as to ask what is in the page cache.
        """
        share = self._cached_share(number, start, stop)
        if share < 1 - _MAX_ABSENT:
            return False
        if loaded and share == 1 and self._sees_cache:
            return True
        assert _madvise is not None
        # On a failed read or beyond the end of the file this returns an error, where touching a page would be a SIGBUS.
        return not _madvise(self._address + start, stop - start, _MADV_POPULATE_READ)

    def _cached_share(self, number: int, start: int, stop: int) -> float:
        """Return the share of the pages that are in the page cache."""
        assert _mincore is not None
        if not self._sees_cache:
            storage, base = self._storages[number], int(self.bases[number])
            probes = range(start - base, stop - base, _BLOCK // 8)
            return sum(storage.is_cached(offset, unknown=False) for offset in probes) / len(probes)
        flags = np.empty(-(-(stop - start) // mmap.PAGESIZE), np.uint8)
        if _mincore(self._address + start, stop - start, flags.ctypes.data):
            return 0.0
        return float(np.count_nonzero(flags & 1) / len(flags))


def _map_at(address: int, size: int, descriptor: int) -> None:
    """Map a file to addresses that were reserved."""
    assert _mmap is not None
    found = _mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)
    if found != address:
        raise_errno()


def _all_between(first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers from ``first[i]`` to ``last[i]`` for all i, ascending and without repetitions."""
    counts = last - first + 1
    ends = np.cumsum(counts)
    numbers: npt.NDArray[np.int64] = np.repeat(last + 1 - ends, counts)
    numbers += np.arange(len(numbers))
    return np.unique(numbers)


class MappedDataset:
    """The rows of a dataset in a mapping of the files that store them, in stored byte order.

    All rows of a virtual dataset form one array, too, if those of each of its files do: the files are mapped at such
    distances that all rows lie on one grid.

    Attributes
    ----------
    array : ndarray or None
        uint8 (M, row_bytes), which has row i of the dataset at ``positions([i])``; None if chunks are not adjacent.
    """

    def __init__(self, index: ChunkIndex, mapping: FileMapping, files: npt.NDArray[np.int64] | None) -> None:
        self.index, self.mapping = index, mapping
        self._files = files  # (chunks,): the number of the file of each chunk; None: all in the only file
        # Of each chunk, or range of a virtual dataset: index in `bytes` of the first row, and number of rows.
        self.starts = index.addresses if files is None else index.addresses + mapping.bases[files]
        self._rows = index.starts if isinstance(index, VirtualIndex) else np.arange(len(self.starts)) * index.chunk_rows
        self._counts = np.diff(np.append(self._rows, index.rows))
        size, self._first = index.row_bytes, int(self.starts.min())
        stops = self.starts + self._counts * size
        for number in range(len(mapping.bases)):
            own = slice(None) if files is None else files == number
            mapping.add_rows(number, int(self.starts[own].min()), int(stops[own].max()))
        self.array: npt.NDArray[np.uint8] | None = None
        on_grid = not ((self.starts - self._first) % size).any()
        adjacent = on_grid if isinstance(index, VirtualIndex) else bool((stops[:-1] == self.starts[1:]).all())
        if adjacent:
            count = (int(stops.max()) - self._first) // size
            self.array = np.ndarray((count, size), np.uint8, mapping.bytes, self._first)

    @staticmethod
    def is_supported(index: ChunkIndex) -> bool:
        """Return whether all rows of a dataset are stored unfiltered."""
        return index.raw and index.complete and index.rows * index.row_bytes > 0

    @classmethod
    def of_sources(cls, index: VirtualIndex, storage_of: Callable[[SourceFile], Storage]) -> MappedDataset | None:
        """Map the files that store the rows of a virtual dataset; None where that is not supported."""
        owners = [source.file for source in index.sources]
        found = list(dict.fromkeys(owners))
        files = np.array([found.index(file) for file in owners])[index.source_ids]
        mapping = None
        if len(found) <= _MAX_FILES:
            mapping = FileMapping.open([storage_of(file) for file in found], _grid_bases(found, files, index))
        return None if mapping is None else cls(index, mapping, files)

    def positions(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the position of each row in `array`, int64 (n,)."""
        return rows if self._files is None else (self.offsets(rows) - self._first) // self.index.row_bytes

    def files(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return the numbers of the files that have these rows, int64 (n,)."""
        if self._files is None:
            return [0]
        return list(set(self._files[self._chunks_of(rows)[0]].tolist()))

    def ready(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> bool:
        """Make sure that rows can be copied without waiting for about a second; False: read them with preadv.

        `first` and `last`, int64 (n,), are the first and the last row of runs of consecutive rows.
        """
        index = self.index
        if self.array is not None and self._files is None:
            return self.mapping.ready(self.offsets(first), self.offsets(last) + index.row_bytes)
        # A run may go on in a chunk that is elsewhere, so check whole chunks.
        chunks = _all_between(index.chunks_of(first), index.chunks_of(last))
        return self.mapping.ready(self.starts[chunks], self.starts[chunks] + self._counts[chunks] * index.row_bytes)

    def offsets(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the index in the mapping's `bytes` at which each row starts; int64 (n,)."""
        chunks, counts = self._chunks_of(rows)
        size = self.index.row_bytes
        offsets: npt.NDArray[np.int64] = rows * size
        offsets += np.repeat(self.starts[chunks] - self._rows[chunks] * size, counts)
        return offsets

    def _chunks_of(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the chunk of each run of consecutive rows within a chunk, and the number of rows, both int64 (runs,).

        To find the chunk of every row would take several times as long if rows ascend within chunks.
        """
        edges = consecutive_runs(rows)
        firsts, stops = rows[edges[:-1]], rows[edges[1:] - 1] + 1
        begins = self.index.chunks_of(firsts)
        spans = self.index.chunks_of(stops - 1) - begins + 1
        chunks = range_indices(begins, spans)
        starts = np.maximum(self._rows[chunks], np.repeat(firsts, spans))
        ends = np.minimum(self._rows[chunks] + self._counts[chunks], np.repeat(stops, spans))
        return chunks, ends - starts


def _grid_bases(found: Sequence[SourceFile], files: npt.NDArray[np.int64], index: VirtualIndex) -> list[int]:
    """Return where to map each file such that the distance of the first rows of two files is a multiple of a row.

    Each base is a multiple of a block. If there is no such place, or the files would be too far apart, they follow each
    other.
    """
    step = math.lcm(_BLOCK, index.row_bytes)
    bases, end, origin = [], 0, 0
    for number, file in enumerate(found):
        first = int(index.addresses[int((files == number).argmax())])
        base = -(-end // _BLOCK) * _BLOCK
        if not number:
            origin = first
        elif step <= _MAX_STEP:
            # Solve base + first = origin (mod row) for a multiple of a block.
            divisor = math.gcd(_BLOCK, index.row_bytes)
            distance, rest = divmod(origin - first - base, divisor)
            if not rest:
                modulus = index.row_bytes // divisor
                base += distance * pow(_BLOCK // divisor, -1, modulus) % modulus * _BLOCK
        bases.append(base)
        end = base + file.identity.size
    return bases
