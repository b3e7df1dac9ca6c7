"""Rows in the page cache, read from shared mappings of their files instead of by system calls.

A mapping takes no private memory, and reading a row from it is a single copy. Only rows whose pages are in both the
page cache and the process's page table are read from a mapping. Touching any other page waits for the disk, and ends
the process with SIGBUS if the disk fails or the file was cut short. `FileMapping.ready` makes sure that whole blocks of
pages can be touched, and checks each block again after a second.

If a file fits into memory, `FileMapping.load` reads missing blocks from the disk into the page cache. The mapping has
the advice MADV_HUGEPAGE, so on file systems with large folios, a block becomes one folio (a unit of the page cache) of
2 MiB. Loading a block takes a tenth of the CPU time of reading it with preadv (measured on ext4). As one entry of the
page table covers the block, an H5Loader copies shuffled rows of 3 KB 1.5 times (1 thread) or 1.2 times (2 threads) as
fast as from single pages.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.storage import CHECK_SECONDS, SourceFile, Storage
from h5pack.read.virtual_index import VirtualIndex
from h5pack.system.arrays import all_between, consecutive_runs, range_indices
from h5pack.system.files import file_system_type, max_open_files
from h5pack.system.libc import MADV_HUGEPAGE, MADV_POPULATE_READ, libc_function, raise_errno
from h5pack.system.machine import available_memory
from h5pack.system.properties import cached_property

_BLOCK = 2 << 20
"""Size in bytes of the parts of the mapping that are checked as a whole; a multiple of the page size."""

_MAX_CALL_BLOCKS = 64
"""Maximum number of blocks that one system call checks, which bounds the time for which the call holds kernel locks."""

_MAX_ABSENT = 1 / 16
"""`FileMapping.ready` loads missing pages into the page cache only if at most this share of the pages is missing."""

_MAX_FILES = 1_024
"""Maximum number of files that are mapped together. All of them stay open. The system allows a process 65,530 mappings
by default."""
_MAX_STEP = 1 << 36
"""Maximum gap in bytes that `_grid_bases` may leave between two mapped files."""

_SMALL_BYTES = 1 << 30
"""If files have at most this many bytes of rows, `FileMapping.load` also loads blocks of which few rows are wanted."""

_BLOCK_FILE_SYSTEMS = ("ext4", "xfs")
"""Local file systems with large folios. On network file systems, loading blocks one by one in one thread is slow."""

_MAP_FIXED = 16
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_mmap: Any = libc_function("mmap", _ADDRESS, _ADDRESS, _SIZE, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_mincore: Any = libc_function("mincore", ctypes.c_int, _ADDRESS, _SIZE, _ADDRESS)
_madvise: Any = libc_function("madvise", ctypes.c_int, _ADDRESS, _SIZE, ctypes.c_int)


class FileMapping:
    """Read-only shared mappings of whole files, one after the other in one range of addresses.

    `bytes` is uint8 (size,): byte i of file k is ``bytes[bases[k] + i]``. Touch only bytes for which `ready` has
    returned True. There may be gaps between the files, which must never be touched.
    """

    def __init__(self, storages: Sequence[Storage], bases: Sequence[int]) -> None:
        sizes = [storage.identity.size for storage in storages]
        self.bases = np.array(bases, np.int64)
        self._storages, self._ends, self.file_bytes = storages, self.bases + sizes, sum(sizes)
        # For each file, the range of `bytes` that holds rows, empty until `add_rows`. Only this range is loaded,
        # because the bytes around it are often not in the page cache.
        self._begins, self._stops = self._ends.copy(), self.bases.copy()
        self._opened: tuple[float, list[tuple[Storage, int, int]]] = (-math.inf, [])
        size = int(self._ends[-1])
        # Reserve addresses, then map each file to a part of them. Deleting `_map` unmaps all files. The first address
        # is a multiple of `_BLOCK`, so that the system can map many pages of a file by one entry of the page table. At
        # other addresses, copying rows of 3 KB takes 4% longer.
        self._map = mmap.mmap(-1, size + _BLOCK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0)
        reserved = np.frombuffer(self._map, np.uint8)
        self.bytes = reserved[-reserved.__array_interface__["data"][0] % _BLOCK :][:size]
        self._address: int = self.bytes.__array_interface__["data"][0]
        # A mapping stays valid after its storage closes the file.
        for storage, base, count in zip(storages, bases, sizes, strict=True):
            start = self._address + base
            if _mmap(start, count, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, storage.open(), 0) != start:
                raise_errno()
        # madvise fails on kernels without huge pages.
        self._has_advice = _kernel_reads_blocks() and not _madvise(self._address, len(self.bytes), MADV_HUGEPAGE)
        # For each block, the number of its file; -1 in gaps.
        numbers = np.arange(-(-size // _BLOCK)) * _BLOCK
        owners = np.searchsorted(self.bases, numbers, "right") - 1
        self._owners = np.where(numbers < self._ends[owners], owners, -1)
        # The process whose page table was checked, and the monotonic time of each block's last check (-inf if none).
        self._checked = (os.getpid(), np.full(len(numbers), -np.inf))
        # For files of other users that this process cannot write, mincore reports all pages as cached.
        self._sees_cache = all(
            os.stat(one.open()).st_uid == os.geteuid() or os.access(one.path, os.W_OK) for one in storages
        )

    @classmethod
    def open(cls, storages: Sequence[Storage], bases: Sequence[int]) -> FileMapping | None:
        """Map the files of `storages`; file k begins at ``bytes[bases[k]]``. Return None if they cannot be mapped."""
        # Only Linux can load pages into the page table without the risk of a SIGBUS.
        if sys.platform != "linux" or not all(storage.identity.size for storage in storages):
            return None
        try:
            return cls(storages, bases)
        except (OSError, OverflowError):
            return None

    @cached_property
    def _suits_blocks(self) -> bool:
        """Whether the kernel and the file systems of all files are known to load whole blocks well."""
        paths = {os.stat(one.open()).st_dev: one.path for one in self._storages}
        known = all(file_system_type(path) in _BLOCK_FILE_SYSTEMS for path in paths.values())
        return self._has_advice and known

    def add_rows(self, number: int, start: int, stop: int) -> None:
        """Record, for `ready`, that file `number` stores all its rows of a dataset within ``bytes[start:stop]``."""
        self._begins[number] = min(int(self._begins[number]), start // mmap.PAGESIZE * mmap.PAGESIZE)
        self._stops[number] = max(int(self._stops[number]), stop)
        self._checked[1][start // _BLOCK : -(-stop // _BLOCK)] = -np.inf

    def ready(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> bool:
        """Make sure that extents of `bytes` can be read without waiting; return False if preadv must be used instead.

        Extent i is ``bytes[starts[i]:stops[i]]``; both arrays are int64 (n,). The result holds for about a second.
        """
        return self._check(self._blocks_of(starts, stops), _MAX_ABSENT)

    def load(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> bool:
        """Like `ready`, but first read the extents from the disk into the page cache, in blocks of `_BLOCK` bytes.

        Return False if loading fails. Also return False in these cases, in which reading by preadv is better:

        - The rows of all files do not fit into half of the available memory.
        - The extents fill less than half of their blocks, and the files have more than `_SMALL_BYTES` bytes of rows.
        - The kernel, or the file system of a file, is not known to load whole blocks well.
        """
        blocks, size = self._blocks_of(starts, stops), int((self._stops - self._begins).sum())
        if not self._suits_blocks or size > available_memory() // 2:
            return False
        if size > _SMALL_BYTES and 2 * int((stops - starts).sum()) < len(blocks) * _BLOCK:
            return False
        return self._check(blocks, 1.0)

    def _blocks_of(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return all_between(starts // _BLOCK, (np.minimum(stops, self._ends[-1]) - 1) // _BLOCK)

    def _check(self, wanted: npt.NDArray[np.int64], max_absent: float) -> bool:
        """Make sure that the blocks `wanted` are in the page table. Load several consecutive blocks per system call.

        Skip the blocks that this process checked less than `CHECK_SECONDS` ago. Return False on an error, or if a
        larger share than `max_absent` of one call's pages is not in the page cache.
        """
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
                end = min(int(self._stops[number]), (last + 1) * _BLOCK)
                if not self._load(number, begin, end, loaded=loaded, max_absent=max_absent):
                    return False
                checked[first : last + 1] = now
        return True

    def require_whole(self, numbers: Iterable[int]) -> None:
        """Raise PackChangedError if one of the files `numbers` was cut short since it was opened.

        Call this before touching `bytes`, because a byte past the end of a file ends the process with SIGBUS. The
        check takes half the time of `require_unchanged`.
        """
        files, lseek, end = self._opened_files(), os.lseek, os.SEEK_END
        for number in numbers:
            storage, descriptor, size = files[number]
            try:
                whole = lseek(descriptor, 0, end) >= size
            except OSError:
                whole = False
            if not whole:
                storage.identity.require(storage.path, descriptor)

    def require_unchanged(self, numbers: Iterable[int]) -> None:
        """Raise PackChangedError if one of the files `numbers` was changed; call this after touching `bytes`."""
        files = self._opened_files()
        for number in numbers:
            storage, descriptor, _ = files[number]
            storage.identity.require(storage.path, descriptor)

    def _opened_files(self) -> list[tuple[Storage, int, int]]:
        """Return (storage, descriptor, size) of each file.

        At most once a second, `Storage.open` checks that the paths still lead to the files that were indexed.
        """
        checked, files = self._opened
        if time.monotonic() - checked > CHECK_SECONDS:
            files = [(storage, storage.open(), storage.identity.size) for storage in self._storages]
            self._opened = (min(storage.checked for storage in self._storages), files)
        return files

    def _load(self, number: int, start: int, stop: int, *, loaded: bool, max_absent: float) -> bool:
        """Load ``bytes[start:stop]``, which belong to file `number`, into the page table; return False on an error.

        Also return False if a larger share than `max_absent` of the pages is not in the page cache. If `loaded` is
        true, the bytes were loaded before. In this case, do not load them again if mincore shows that all of them are
        still in the page cache. This check is seven times as fast as loading them.
        """
        share = self._cached_share(number, start, stop)
        if share < 1 - max_absent:
            return False
        if loaded and share == 1 and self._sees_cache:
            return True
        # If a read fails or the file was cut short, madvise returns an error, whereas touching a page causes a SIGBUS.
        return not _madvise(self._address + start, stop - start, MADV_POPULATE_READ)

    def _cached_share(self, number: int, start: int, stop: int) -> float:
        """Return the share, 0 to 1, of the pages of ``bytes[start:stop]`` that are in the page cache.

        If mincore cannot see the page cache of the file, estimate the share from one byte per 256 KiB.
        """
        if not self._sees_cache:
            storage, base = self._storages[number], int(self.bases[number])
            probes = range(start - base, stop - base, _BLOCK // 8)
            return sum(storage.is_cached(offset, unknown=False) for offset in probes) / len(probes)
        flags = np.empty(-(-(stop - start) // mmap.PAGESIZE), np.uint8)
        if _mincore(self._address + start, stop - start, flags.ctypes.data):
            return 0.0
        return float(np.count_nonzero(flags & 1) / len(flags))


def _kernel_reads_blocks() -> bool:
    """Return whether the kernel reads 2 MiB at once when it loads a missing page of a mapping with MADV_HUGEPAGE.

    Before version 5.18, Linux reads as little as one page at a time, and waits for it. On ARM machines with larger
    pages, Linux reads far more than 2 MiB: 512 MiB with pages of 64 KiB.
    """
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return mmap.PAGESIZE == 4096 and release is not None and (int(release[1]), int(release[2])) >= (5, 18)


class MappedDataset:
    """The rows of a dataset in a mapping of the files that store them, in stored byte order.

    The rows form an array if the dataset's chunks are adjacent or, for a virtual dataset, if the distance between any
    two rows is a multiple of the row size. If possible, `of_sources` maps the files accordingly.

    Attributes
    ----------
    array : ndarray or None
        uint8 (M, row_bytes). Row i of the dataset is at ``positions([i])``. None if the rows do not form an array.
    """

    def __init__(self, index: ChunkIndex, mapping: FileMapping, files: npt.NDArray[np.int64] | None) -> None:
        self.index, self.mapping = index, mapping
        self._files = files  # (chunks,): the number of each chunk's file; None if the dataset is not virtual
        # For each chunk, or each range of a virtual dataset: index of its first byte in `bytes`, its first row, and its
        # number of rows.
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
        """Return whether a dataset is not empty and all its rows are stored unfiltered and can be read directly."""
        return index.raw and index.complete and index.rows * index.row_bytes > 0

    @classmethod
    def of_sources(cls, index: VirtualIndex, storage_of: Callable[[SourceFile], Storage]) -> MappedDataset | None:
        """Map the files that store the rows of a virtual dataset; return None if there are too many, or on failure."""
        numbers = {file: number for number, file in enumerate(dict.fromkeys(source.file for source in index.sources))}
        if len(numbers) > min(_MAX_FILES, max_open_files() // 2):
            return None
        files = np.array([numbers[source.file] for source in index.sources])[index.source_ids]
        mapping = FileMapping.open([storage_of(file) for file in numbers], _grid_bases(list(numbers), files, index))
        return None if mapping is None else cls(index, mapping, files)

    def positions(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the position of each row in `array`, int64 (n,)."""
        return rows if self._files is None else (self.offsets(rows) - self._first) // self.index.row_bytes

    def files(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return the numbers of the files in `mapping` that store `rows`, without repetitions."""
        if self._files is None:
            return [0]
        return list(set(self._files[self._chunks_of(rows)[0]].tolist()))

    def ready(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> bool:
        """Make sure that rows ``first[i]`` to ``last[i]``, int64 (n,), can be copied (see `FileMapping.ready`)."""
        return self.mapping.ready(*self._extents(first, last))

    def load(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> bool:
        """Like `ready`, but first load the rows from the disk. Return False in the cases of `FileMapping.load`."""
        return self.mapping.load(*self._extents(first, last))

    def _extents(
        self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return starts and stops, int64 (m,), of the extents of the mapping's `bytes` that contain the rows."""
        index = self.index
        if self.array is not None and self._files is None:
            return self.offsets(first), self.offsets(last) + index.row_bytes
        # Rows first[i] to last[i] may be in several chunks that are not adjacent in memory, so return whole chunks.
        chunks = all_between(index.chunks_of(first), index.chunks_of(last))
        return self.starts[chunks], self.starts[chunks] + self._counts[chunks] * index.row_bytes

    def offsets(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the index in the mapping's `bytes` at which each row starts; int64 (n,)."""
        chunks, counts = self._chunks_of(rows)
        size = self.index.row_bytes
        offsets: npt.NDArray[np.int64] = rows * size
        offsets += np.repeat(self.starts[chunks] - self._rows[chunks] * size, counts)
        return offsets

    def _chunks_of(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Split rows into runs of consecutive rows in one chunk; return chunk and length of each run, int64 (runs,).

        For many consecutive rows of a virtual dataset, this is several times as fast as looking up each row's chunk.
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
    """Return the index in `FileMapping.bytes` at which to map each file, a multiple of `_BLOCK`.

    If possible, the distance between the first rows of any two files is a multiple of the row size, so that the rows of
    all files can form one array. Where this is impossible, or gaps could exceed `_MAX_STEP`, a file begins at the next
    multiple of `_BLOCK` after the previous file.
    """
    step = math.lcm(_BLOCK, index.row_bytes)
    bases, end, origin = [], 0, 0
    for number, file in enumerate(found):
        first = int(index.addresses[int((files == number).argmax())])
        base = -(-end // _BLOCK) * _BLOCK
        if not number:
            origin = first
        elif step <= _MAX_STEP:
            # Increase `base` by the fewest blocks for which base + first equals origin modulo the row size.
            divisor = math.gcd(_BLOCK, index.row_bytes)
            distance, rest = divmod(origin - first - base, divisor)
            if not rest:
                modulus = index.row_bytes // divisor
                base += distance * pow(_BLOCK // divisor, -1, modulus) % modulus * _BLOCK
        bases.append(base)
        end = base + file.identity.size
    return bases
