"""The engine that reads rows of a file's datasets, directly if possible, else through the HDF5 library.

Rows that are not encoded images take one of these paths:

- Rows in the page cache may be copied from a mapping of the file (`Engine.mapped`, `Engine.read_batch`).
- Unfiltered rows of at least `SCATTER_BYTES` bytes are scattered: read straight into their buffers, which may be
  anywhere in memory (`Storage`).
- Smaller unfiltered rows are read straight if they are consecutive, else into a staging buffer and copied from it.
  Copying a small row takes less time than passing its address to the system call.
- Rows in chunks that are filtered, or hold only parts of rows, are copied from the decoded chunks (`ChunkDecoder`).
- Rows that h5pack cannot read itself are read through h5py with a suitable chunk cache (`H5Reader`).
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import DamagedRowsError
from h5pack.format import schema
from h5pack.format.checksums import crc32, row_checksums
from h5pack.read.chunk_decoder import ChunkDecoder, DecodedDataset, SourceFiles
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.encoded import EncodedIndex, decode_rows, encoded_rows
from h5pack.read.hdf5 import VERIFY_ADVICE
from h5pack.read.hdf5_reader import H5Reader
from h5pack.read.mapping import FileMapping, MappedDataset
from h5pack.read.read_plan import ScatterPlan, plan_reads, plan_scatter
from h5pack.read.storage import FileIdentity, Storage
from h5pack.read.virtual_index import VirtualIndex
from h5pack.system.arrays import equal_runs
from h5pack.system.properties import cached_property
from h5pack.system.text import printable


@dataclass
class ReadStats:
    """Statistics of the reads in this process. The main dataset is the engine's first dataset, usually the images."""

    rows: int = 0  # number of rows read from the main dataset
    chunk_hits: int = 0  # rows read from the main dataset, except the first row of each visit to a chunk
    chunk_misses: int = 0  # visits to chunks of the main dataset
    bytes_wanted: int = 0  # total size of returned rows of all datasets; encoded images count with row 0's decoded size
    # Bytes read from files or copied from mappings. Can be less than `bytes_wanted`, e.g. if chunks are compressed.
    bytes_read: int = 0
    # Number of system calls and HDF5 library calls. Rows copied from memory add 0, rows read by `read_encoded` 1 each.
    reads: int = 0

    @property
    def amplification(self) -> float:
        """Ratio of `bytes_read` to `bytes_wanted`; 1.0 before the first read."""
        return self.bytes_read / self.bytes_wanted if self.bytes_wanted else 1.0


SCATTER_BYTES = 512
"""Minimum size in bytes of rows that are read straight into their buffers. In measurements, such reads were slower than
copying from a staging buffer for rows of 256 bytes, as fast at 784 bytes, and faster for larger rows."""

_MIN_CACHED_ROWS, _MAX_CACHED_ROW_BYTES = 16, 64 * 1024
"""`Engine.read_batch` copies rows from memory only if there are at least `_MIN_CACHED_ROWS`, and each has at most
`_MAX_CACHED_ROW_BYTES` bytes. For 256 rows, copying took 0.4 of the time of `Engine.read` if rows had 3 or 12 KB, 0.6
if they had 48 KB, and 1.0 if they had 116 KB."""
_MAX_CHECKED_BYTES = 4 << 30
"""Maximum total size in bytes of mapped files from which `Engine.read_batch` copies rows. Random rows are in all parts
of the files, and checking once a second that all parts are in the page cache takes 4 ms per GB."""


@cache
def _warn_once(text: str) -> None:
    logging.getLogger("h5pack").warning("%s", printable(text))


class Engine:
    """Reads rows of several datasets of one file, from any number of threads.

    The first of `indexes` belongs to the main dataset, whose rows and chunk reads are counted. If `warn` is true, the
    constructor logs a warning for each dataset that is read through the HDF5 library, except datasets of checksums, but
    only once per process. If several files are read as one, `files` has the path and the first row of each file (see
    `FileDescription`), for error messages.
    """

    def __init__(
        self,
        path: str,
        identity: FileIdentity,
        indexes: dict[str, ChunkIndex],
        *,
        warn: bool = True,
        files: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.path = path
        self._files = files or ((path, 0),)
        self.indexes = indexes
        self.storage = Storage(path, identity)
        self.reader = H5Reader(path, identity)
        self.chunks = ChunkDecoder(self.storage, self.reader)
        self.files = SourceFiles(self.chunks)
        self._mapped: dict[str, MappedDataset | None] = {}
        self._decoded: dict[str, DecodedDataset] = {}
        self.stats = ReadStats()
        self._main = next(iter(indexes), "")
        # A lock that another thread holds during a fork stays locked in the child, so each process creates a lock. The
        # lock is reentrant, because a signal handler may ask for the statistics while the same thread changes them.
        self._lock = (os.getpid(), threading.RLock())
        for index in indexes.values():
            if warn and index.library_text is not None and not index.name.startswith(f"{schema.CHECKSUMS}/"):
                problem = f"{index.name!r} is read through the HDF5 library, which is slower: {index.library_text}"
                _warn_once(f"{path}: {problem}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_mapped": {}, "_decoded": {}, "stats": ReadStats()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=(os.getpid(), threading.RLock()))

    def file_row(self, row: int) -> tuple[str, int]:
        """Return the path of the file that contains row number `row`, and the row's number in that file."""
        path, first = self._files[bisect.bisect_right(self._files, row, key=itemgetter(1)) - 1]
        return path, row - first

    def close(self) -> None:
        """Close all files in this process; the next read opens them again."""
        self._mapped, self._decoded = {}, {}
        self.files.close()

    def mapped(self, name: str) -> MappedDataset | None:
        """Return a dataset's rows in a mapping of the files that store them; None if they cannot be mapped.

        Copy rows only after `MappedDataset.ready` has returned True for them.
        """
        mapped = self._mapped  # Keep this dict, because `close` in another thread may replace the attribute.
        if name not in mapped:
            # `dict.setdefault` is atomic, so one of two racing threads wins.
            mapped.setdefault(name, self._map(self.indexes[name]))
        return mapped[name]

    def _map(self, index: ChunkIndex) -> MappedDataset | None:
        if not MappedDataset.is_supported(index):
            return None
        if isinstance(index, VirtualIndex):
            return MappedDataset.of_sources(index, lambda file: self.files.decoder(file).storage)
        # All datasets that are not virtual share one mapping of the file.
        others = [one for one in list(self._mapped.values()) if one and not isinstance(one.index, VirtualIndex)]
        mapping = others[0].mapping if others else FileMapping.open([self.storage], [0])
        return None if mapping is None else MappedDataset(index, mapping, None)

    def decoded(self, name: str) -> DecodedDataset | None:
        """Return the array of a dataset's decoded rows; copy only rows for which `DecodedDataset.ready` returned True.

        Return None if h5pack itself does not decode the dataset's chunks, or if the dataset is virtual, or if the cache
        cannot hold the decoded chunks of all datasets of this engine.
        """
        index, decoded = self.indexes[name], self._decoded
        if index.codec is None or index.library_reason is not None or not self.decoded_bytes():
            return None
        return decoded.get(name) or decoded.setdefault(name, DecodedDataset(index, self.chunks))

    def count_copied(self, name: str, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> None:
        """Add rows that were copied from memory to the statistics: the rows ``first[i]`` to ``last[i]`` for each i."""
        index = self.indexes[name]
        begins, ends = index.chunks_of(first), index.chunks_of(last)
        chunks = int((ends - begins + 1).sum()) - int(np.count_nonzero(begins[1:] == ends[:-1]))
        rows = int((last - first + 1).sum())
        self._count(index, rows, chunks, rows * index.row_bytes if index.raw else 0, 0)

    def check_unchanged(self) -> None:
        """Raise PackChangedError if the file or a source of its virtual datasets was replaced or rewritten."""
        self.storage.check_unchanged()
        for index in self.indexes.values():
            self.files.check_unchanged(index)

    def read(self, name: str, rows: Sequence[int] | npt.NDArray[np.int64], out: Any = None) -> npt.NDArray[Any]:
        """Return rows of a dataset in the given order. Row numbers must be from 0 to N - 1 and may repeat.

        The rows are written to `out`, by default a new array, which is returned. `out` must be (n, ...), C-contiguous,
        in native byte order. Raises PackChangedError if the file was replaced or rewritten since it was indexed, and
        ReadError, DamagedRowsError, SizesDifferError or PackFormatError if the rows cannot be read.
        """
        index = self.indexes[name]
        wanted = np.asarray(rows, np.int64)
        if out is None:
            out = np.empty((len(wanted), *index.row_shape), index.native_dtype)
        if not len(wanted) or not index.row_bytes:
            return out  # type: ignore[no-any-return]
        ascending = bool((np.diff(wanted) > 0).all())
        order = None if ascending else np.argsort(wanted, kind="stable")
        if order is not None:
            wanted = wanted[order]
        if self.can_scatter(index):
            positions = np.arange(len(wanted)) if order is None else order
            start = out.__array_interface__["data"][0]
            plan = plan_scatter(index, wanted)
            plan.buffers[:, 0] = (positions * index.row_bytes + start).view(np.uint64)
            self.execute(plan)
            if not index.dtype.isnative:
                out.byteswap(inplace=True)
        elif order is None:
            start = int(wanted[0])
            if int(wanted[-1]) - start >= len(wanted) or not self._read_consecutive(index, start, len(out), out):
                self._stage(index, wanted, out)
        else:
            staged = np.empty_like(out)
            self._stage(index, wanted, staged)
            out[order] = staged
        return out  # type: ignore[no-any-return]

    def read_batch(self, name: str, rows: npt.NDArray[np.int64], out: Any = None) -> npt.NDArray[Any]:
        """Return rows like `read`, but if possible, copy them from memory: from decoded chunks or from a mapping.

        This requires that all rows are in memory, that there are at least `_MIN_CACHED_ROWS` rows of at most
        `_MAX_CACHED_ROW_BYTES` bytes, and, for decoded chunks, that the cache can hold all chunks of the file.
        """
        found = self._copy_cached(name, rows, out)
        return self.read(name, rows, out) if found is None else found

    def _copy_cached(self, name: str, rows: npt.NDArray[np.int64], out: Any) -> npt.NDArray[Any] | None:
        """Return rows copied from memory; None if that is impossible, or not faster than `read`."""
        index = self.indexes[name]
        if len(rows) < _MIN_CACHED_ROWS or index.row_bytes > _MAX_CACHED_ROW_BYTES or not index.dtype.isnative:
            return None
        decoded, mapped = self.decoded(name), self.mapped(name)
        if mapped is not None and (mapped.array is None or mapped.mapping.file_bytes > _MAX_CHECKED_BYTES):
            return None
        found = decoded or mapped
        if found is None or not found.ready(rows, rows):
            return None
        copied = np.empty((len(rows), *index.row_shape), index.native_dtype) if out is None else out
        flat = copied.reshape(-1).view(np.uint8).reshape(len(rows), index.row_bytes)
        if decoded is not None:
            decoded.copy(rows, flat)
        elif mapped is not None and mapped.array is not None:
            files = mapped.files(rows)
            mapped.mapping.require_whole(files)
            np.take(mapped.array, mapped.positions(rows), axis=0, out=flat, mode="clip")
            mapped.mapping.require_unchanged(files)
        ascending = np.sort(rows)
        self.count_copied(name, ascending, ascending)
        return copied

    def read_one(self, name: str, row: int) -> npt.NDArray[Any]:
        """Return one row like `read`. A row that can be read directly takes little more time than the system call."""
        index = self.indexes[name]
        out = np.empty(index.row_shape, index.native_dtype)
        return out if self._read_consecutive(index, row, 1, out) else self.read(name, [row])[0]

    def read_range(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows `start` to `stop` - 1 (at least one) like `read`.

        If the rows are unfiltered and in one chunk, one direct read fetches them all.
        """
        index = self.indexes[name]
        out = np.empty((stop - start, *index.row_shape), index.native_dtype)
        is_read = self._read_consecutive(index, start, stop - start, out)
        return out if is_read else self.read(name, np.arange(start, stop), out)

    def _read_consecutive(self, index: ChunkIndex, start: int, count: int, out: npt.NDArray[Any]) -> bool:
        """Read `count` rows from row `start` on into `out`; return False if one direct read cannot fetch them all."""
        offset, stop = index.offset_of(start), start + count
        if offset is None or start % index.chunk_rows + count > index.chunk_rows:
            return False
        calls = self.storage.read_into(out, offset, lambda _: index.describe(np.arange(start, stop), 0))
        if not index.dtype.isnative:
            out.byteswap(inplace=True)
        self._count(index, count, 1, out.nbytes, calls)
        return True

    @staticmethod
    def can_scatter(index: ChunkIndex) -> bool:
        """Return whether rows should be read by `plan_scatter` and `execute`: rows are `raw`, and large enough."""
        return index.raw and index.row_bytes >= SCATTER_BYTES

    @staticmethod
    def can_decode(index: ChunkIndex) -> bool:
        """Return whether a dataset's rows should be copied from decoded chunks (`rows_in_chunk`).

        This is so if h5pack itself decodes at least some of the chunks, and the rows are large enough.
        """
        direct = index.library_reason is None and not index.raw and not index.is_encoded
        return direct and index.row_bytes >= SCATTER_BYTES

    def keeps_byte_order(self, index: ChunkIndex) -> bool:
        """Return whether loaders read a dataset's rows by `execute` or `rows_in_chunk`.

        Unlike `read`, these two methods do not convert rows to native byte order.
        """
        return self.can_scatter(index) or self.can_decode(index)

    def decoding_bytes(self, num_threads: int, *, keep: bool) -> int:
        """Return the maximum memory in bytes for `rows_in_chunk` in `num_threads` threads, with the cache if `keep`."""
        largest = max((index.decoding_bytes for index in self.indexes.values()), default=0)
        return num_threads * largest + (min(self._decoded_bytes, self.chunks.cache.capacity) if keep else 0)

    def decoded_bytes(self) -> int:
        """Return the total size in bytes of the decoded chunks of all datasets.

        Return 0 if no chunk must be decoded, or if the total size exceeds the capacity of the cache.
        """
        return self._decoded_bytes if self._decoded_bytes <= self.chunks.cache.capacity else 0

    @cached_property
    def _decoded_bytes(self) -> int:
        # Computed once, because it takes time proportional to the number of chunks.
        return sum(index.decoded_bytes for index in self.indexes.values())

    def rows_in_chunk(
        self, name: str, rows: npt.NDArray[np.int64], *, keep: bool = False
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Read and decode the chunk that contains `rows`, int64 (n,). With `keep`, cache the chunk.

        The rows must all be in one chunk, or in one range of a virtual dataset (see `VirtualIndex`). `can_decode` must
        be true, or false only because rows are small. Returns an array of rows of the chunk, (m, ...), in stored byte
        order, possibly read-only, and the index of each requested row in this array, int64 (n,).
        """
        index = self.indexes[name]
        found = self.files.rows_in_chunk(index, rows, keep=keep)
        if keep and found.calls and (decoded := self.decoded(name)) is not None:
            decoded.ready(rows[:1], rows[:1])  # Move the chunk now. Moving it in the next epoch would slow that epoch.
        self._count(index, len(rows), 1, found.size, found.calls)
        return found.values.view(index.dtype).reshape(-1, *index.row_shape), found.positions

    def execute(self, plan: ScatterPlan, first: int = 0, last: int | None = None) -> None:
        """Read extents `first` to `last` - 1 of `plan` into `plan.buffers`, whose memory must stay valid meanwhile."""
        last = len(plan.offsets) if last is None else last
        absent = calls = 0
        for extents in plan.by_file(first, last):
            edges = plan.edges[extents.first : extents.last + 1]
            if extents.absent:
                # Like HDF5, return the fill value for rows without allocated storage.
                for start, end in itertools.pairwise(edges):
                    fill = plan.index.fill_of(int(plan.rows[start]))
                    for address in plan.buffers[start:end, 0].tolist():
                        ctypes.memmove(address, fill, len(fill))
                absent += edges[-1] - edges[0]
            else:
                storage = self.files.storage(plan.index, extents.source_id)
                offsets, describe = plan.offsets[extents.first : extents.last], partial(plan.index.describe, plan.rows)
                calls += storage.scatter(plan.buffers, edges, offsets, describe)
        rows, visits = plan.edges[last] - plan.edges[first], sum(plan.chunk_visits[first:last])
        self._count(plan.index, rows, visits, (rows - absent) * plan.index.row_bytes, calls)

    def _stage(self, index: ChunkIndex, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Read ascending rows into consecutive rows of `out` without `plan_scatter` and `execute`."""
        if index.library_reason is not None or index.is_encoded:
            self.files.check_unchanged_throttled(index)
            size = len(rows) * index.row_bytes
            if index.is_encoded:
                size = calls = 0
                for part, encoded, count in encoded_rows(self.files, index, rows):
                    decode_rows(self.file_row, index, rows[part], encoded, out[part])
                    size, calls = size + sum(map(len, encoded)), calls + count
            else:
                calls = self.reader.read(index.name, rows, out)
            chunks = int(np.count_nonzero(np.diff(rows // index.chunk_rows))) + 1
            self._count(index, len(rows), chunks, size, calls)
            return
        flat = out.reshape(len(rows), -1).view(np.uint8)
        if index.raw:
            visits, size, calls = plan_reads(index, rows).execute(flat, partial(self.files.storage, index))
            self._count(index, len(rows), visits, size, calls)
        else:
            fits = self.decoded_bytes() > 0
            for first, last in itertools.pairwise(equal_runs(index.chunks_of(rows)).tolist()):
                # Do not cache a chunk of which all rows are read now: it will hardly be needed again soon. But if all
                # chunks fit into the cache, cache every chunk.
                keep = fits or last - first < index.rows_in_chunk_of(int(rows[first]))
                values, positions = self.rows_in_chunk(index.name, rows[first:last], keep=keep)
                values = values.reshape(len(values), -1).view(np.uint8)
                np.take(values, positions, axis=0, out=flat[first:last], mode="clip")
        if not index.dtype.isnative:
            out.byteswap(inplace=True)

    def read_bytes(self, name: str, rows: npt.NDArray[np.int64]) -> list[bytes]:
        """Return the bytes of encoded rows, int64 (n,), in the given order."""
        index = self.indexes[name]
        order = np.argsort(rows, kind="stable")
        found = [data for _, encoded, _ in encoded_rows(self.files, index, rows[order]) for data in encoded]
        return [found[position] for position in np.argsort(order).tolist()]

    def read_encoded(self, name: str, rows: npt.NDArray[np.int64]) -> list[bytes]:
        """Return the bytes of encoded rows like `read_bytes`, and add the reads to the statistics. Raises as `read`."""
        index = self.indexes[name]
        self.files.check_unchanged_throttled(index)
        found = self.read_bytes(name, rows)
        chunks = int(np.count_nonzero(np.diff(np.sort(rows) // index.chunk_rows))) + 1
        self._count(index, len(rows), chunks, sum(map(len, found)), len(rows))
        return found

    def snapshot(self) -> ReadStats:
        """Return a copy of this process's statistics."""
        self._own_lock()
        # Do not hold the lock while copying. Creating objects can start the garbage collector, which can join threads
        # that wait for the lock. That would be a deadlock.
        return ReadStats(**vars(self.stats))

    def _own_lock(self) -> Any:
        process, lock = self._lock
        if process != os.getpid():
            lock = threading.RLock()
            self._lock, self.stats = (os.getpid(), lock), ReadStats()
        return lock

    def _count(self, index: ChunkIndex, rows: int, chunks: int, bytes_read: int, calls: int) -> None:
        with self._own_lock():
            stats = self.stats
            if index.name == self._main:
                stats.rows += rows
                stats.chunk_misses += chunks
                stats.chunk_hits += rows - chunks
            stats.bytes_wanted += rows * index.row_bytes
            stats.bytes_read += bytes_read
            stats.reads += calls

    def check(self, name: str, rows: npt.NDArray[np.int64], values: npt.NDArray[Any] | list[bytes]) -> None:
        """Raise DamagedRowsError if `values`, which were read from `rows`, differ from the checksums in the file.

        If the dataset has no checksums, nothing is compared. The checksums of encoded rows are those of their bytes, so
        `values` may be a list of these bytes. If `values` are decoded images, the bytes are read again.
        """
        if schema.checksums_path(name) not in self.indexes:
            return
        if self.indexes[name].is_encoded and not isinstance(values, list):
            values = self.read_bytes(name, rows)
        if isinstance(values, list):
            found = np.array([crc32(data) for data in values], np.uint32)
        else:
            found = row_checksums(values.astype(self.indexes[name].dtype, copy=False))
        self.require_checksums(name, rows, found)

    def require_checksums(self, name: str, rows: npt.NDArray[np.int64], found: npt.NDArray[np.uint32]) -> None:
        """Raise DamagedRowsError if `found`, uint32 (n,), are not the stored checksums of `rows`.

        If rows of several files are damaged, the error names those of one file only.
        """
        wrong = np.flatnonzero(found != self.read(schema.checksums_path(name), rows))
        if len(wrong):
            found_in = sorted({self.file_row(int(rows[position])) for position in wrong})
            path = found_in[0][0]
            damaged = [row for file, row in found_in if file == path]
            some = ", ".join(map(str, damaged[:8])) + (", ..." if len(damaged) > 8 else "")
            what = f"rows {some} differ" if len(damaged) > 1 else f"row {some} differs"
            problem = f"{name!r} {what} from the stored checksum; {VERIFY_ADVICE}"
            raise DamagedRowsError.at(path, problem, dataset=name, rows=damaged)

    def prefetch(self, plan: ScatterPlan) -> None:
        """Start reading a plan's bytes into the page cache, without waiting. Skip bytes that seem to be there."""
        size = plan.index.row_bytes
        for extents in plan.by_file():
            if not extents.absent:
                edges = plan.edges[extents.first : extents.last + 1]
                self.files.storage(plan.index, extents.source_id).prefetch(
                    plan.offsets[extents.first : extents.last],
                    ((end - start) * size for start, end in itertools.pairwise(edges)),
                )

    def prefetch_encoded(self, name: str, rows: npt.NDArray[np.int64]) -> None:
        """Start reading rows, int64 (n,), into the page cache if they are encoded images that h5pack reads directly."""
        index = self.indexes[name]
        if isinstance(index, EncodedIndex) and index.library_reason is None:
            found: dict[int | None, list[tuple[int, int]]] = {}
            for _, start, stop in index.reads(np.sort(rows)):
                for source, offset, count in index.extents(start, stop):
                    found.setdefault(source, []).append((offset, count))
            for source, extents in found.items():
                offsets, counts = zip(*extents, strict=True)
                self.files.storage(index.data, source).prefetch(offsets, counts)
