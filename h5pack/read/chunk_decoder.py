"""Read, decode and cache filtered (for example, compressed) chunks, and join chunks that hold only parts of rows.

Decoded chunks are cached because later batches of the same shuffle window need other rows of these chunks. Chunks are
read from the file of an `Engine`, or from the source files of its virtual datasets.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from h5pack.errors import DamagedRowsError
from h5pack.format.checksums import crc32
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.codecs import MallocBuffer
from h5pack.read.hdf5 import VERIFY_ADVICE
from h5pack.read.hdf5_reader import H5Reader
from h5pack.read.read_plan import plan_extents, plan_reads
from h5pack.read.storage import CHECK_SECONDS, SourceFile, Storage
from h5pack.read.virtual_index import VirtualIndex
from h5pack.system.arrays import all_between, equal_runs
from h5pack.system.files import max_open_files

DECODED_BYTES = 192 * 1024 * 1024
"""Default capacity of the cache: 48 chunks of 4 MiB, which are three shuffle windows of the default 16 chunks."""
_SPARSE_FACTOR = 4
"""If fewer than 1/4 of the rows of an unfiltered chunk are requested, only these rows are read, by the HDF5 library.

This is cheaper than reading the whole chunk.
"""
_MAX_FILES = 256
"""Maximum number of source files kept open. Each may use two descriptors, one of them inside the HDF5 library."""


class _CacheState:
    """The cached chunks of one process, least recently used first."""

    def __init__(self) -> None:
        self.process = os.getpid()
        # A lock that another thread holds during a fork would stay locked in the child, so each process creates a lock.
        self.lock = threading.Lock()
        self.chunks: OrderedDict[Hashable, npt.NDArray[np.uint8]] = OrderedDict()
        self.bytes = 0


class DecodedChunks:
    """A least-recently-used cache of decoded chunks. `capacity` is in bytes. Processes do not share the chunks."""

    def __init__(self, capacity: int = DECODED_BYTES) -> None:
        self.capacity = capacity
        self._state = _CacheState()

    def _own_state(self) -> _CacheState:
        state = self._state
        if state.process != os.getpid():
            # Assign a complete new state at once, so that no other thread sees a partly initialized state.
            state = self._state = _CacheState()
        return state

    def __reduce__(self) -> tuple[type[DecodedChunks], tuple[int]]:
        return DecodedChunks, (self.capacity,)

    @property
    def bytes(self) -> int:
        """Total size of the cached chunks, in bytes."""
        return self._own_state().bytes

    def __contains__(self, key: Hashable) -> bool:
        return key in self._own_state().chunks

    def get(self, key: Hashable, decode: Callable[[], npt.NDArray[np.uint8]], *, keep: bool) -> npt.NDArray[np.uint8]:
        """Return the chunk cached under `key`. If there is none, call `decode` and return the result.

        The result is cached if `keep` is true and the result is not larger than `capacity`. Two threads may decode the
        same chunk at once, which wastes time, but is correct.
        """
        state = self._own_state()
        with state.lock:
            found = state.chunks.get(key)
            if found is not None:
                state.chunks.move_to_end(key)
                return found
        found = decode()
        if keep and found.nbytes <= self.capacity:
            with state.lock:
                before = state.chunks.pop(key, None)
                state.bytes += found.nbytes - (0 if before is None else before.nbytes)
                state.chunks[key] = found
                while state.bytes > self.capacity:
                    _, oldest = state.chunks.popitem(last=False)
                    state.bytes -= oldest.nbytes
        return found

    def move(self, key: Hashable, out: npt.NDArray[np.uint8]) -> bool:
        """Fill `out` with the first bytes of the chunk cached under `key`, and cache `out` instead of that chunk.

        If no chunk is cached under `key`, do nothing and return False.
        """
        state = self._own_state()
        with state.lock:
            found = state.chunks.get(key)
        if found is None:
            return False
        out[...] = found[: len(out)]
        with state.lock:
            found = state.chunks.get(key)
            if found is not None:
                state.bytes += out.nbytes - found.nbytes
                state.chunks[key] = out
        return True

    def clear(self) -> None:
        """Remove all chunks from the cache."""
        self._state = _CacheState()


class ChunkRows(NamedTuple):
    """Rows of one chunk, or of one range of a virtual dataset (see `VirtualIndex`).

    `size` and `calls` are 0 if the chunk was cached or has no allocated storage.
    """

    values: npt.NDArray[np.uint8]  # 1-D: the bytes of whole rows, one after the other; may be read-only
    positions: npt.NDArray[np.int64]  # the index of each requested row among the rows in `values`
    size: int  # number of bytes read from the file
    calls: int  # number of system calls or HDF5 library calls; reading several chunks to join them counts as one


class ChunkDecoder:
    """Reads and decodes the chunks of one file. It is thread-safe, and several decoders may share one `cache`."""

    def __init__(self, storage: Storage, reader: H5Reader, cache: DecodedChunks | None = None) -> None:
        self.storage, self.reader = storage, reader
        self.cache = DecodedChunks() if cache is None else cache

    def rows_in_chunk(self, index: ChunkIndex, rows: npt.NDArray[np.int64], *, keep: bool) -> ChunkRows:
        """Return the decoded chunk that contains all `rows`, int64 (n,), or only these rows if that is cheaper.

        `index.codec` must not be None. If `keep` is true, a decoded chunk is cached if it fits into the cache.
        """
        assert index.codec is not None
        chunk = int(rows[0]) // index.chunk_rows
        key = (self.storage.path, index.name, chunk)
        if not index.codec.steps and len(rows) * _SPARSE_FACTOR < index.chunk_rows and key not in self.cache:
            # Without filters, HDF5 can read just the bytes of the requested rows.
            return self.read_through_library(index, rows)
        size = calls = 0

        def load() -> npt.NDArray[np.uint8]:
            nonlocal size, calls
            if (index.sizes[chunk] < 0).any():
                first = chunk * index.chunk_rows
                found = self.read_through_library(index, np.arange(first, min(index.rows, first + index.chunk_rows)))
                size, calls = found.size, found.calls
                return found.values
            size = int(index.sizes[chunk].sum())
            calls = int(size > 0)
            return self._load(index, chunk)

        values = self.cache.get(key, load, keep=keep)
        return ChunkRows(values, rows - chunk * index.chunk_rows, size, calls)

    def move(self, index: ChunkIndex, chunk: int, out: npt.NDArray[np.uint8]) -> bool:
        """Copy chunk number `chunk` from the cache to `out`; return False if it is not cached.

        `out` then replaces the chunk in the cache (see `DecodedChunks.move`).
        """
        return self.cache.move((self.storage.path, index.name, chunk), out)

    def _load(self, index: ChunkIndex, chunk: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of all rows of chunk number `chunk`, counted along axis 0.

        The last chunk may extend past the last row of the dataset. The bytes past that row are undefined.
        """
        if index.chunk_shape is None:
            offset = int(index.addresses[chunk])
            if offset < 0:
                return np.tile(np.frombuffer(index.fill, np.uint8), index.chunk_rows)
            return self._decode(index, chunk, offset, int(index.sizes[chunk]), int(index.filter_masks[chunk]))
        return self._assemble(index, chunk)

    def _assemble(self, index: ChunkIndex, chunk: int) -> npt.NDArray[np.uint8]:
        """Return the same rows as `_load`. This is for datasets whose chunks hold only parts of rows.

        All chunks at position `chunk` along axis 0 are decoded, and the parts are joined to whole rows.
        """
        assert index.chunk_shape is not None
        # Labels of shape (N, 1) have an index of shape (N,), but their chunks still have two axes.
        row_shape, inner = index.row_shape or (1,), index.chunk_shape[1:]
        rows = np.empty((index.chunk_rows, *row_shape), index.dtype)
        fill = np.frombuffer(index.fill, index.dtype).reshape(row_shape) if index.fill else None
        grid = [-(-size // length) for size, length in zip(row_shape, inner, strict=True)]
        addresses, sizes, masks = (
            column[chunk].reshape(-1).tolist() for column in (index.addresses, index.sizes, index.filter_masks)
        )
        for number, position in enumerate(np.ndindex(*grid)):
            # NumPy clips the slices at the end of the row.
            corner = [step * length for step, length in zip(position, inner, strict=True)]
            box = (slice(None), *(slice(begin, begin + length) for begin, length in zip(corner, inner, strict=True)))
            part = rows[box]
            if addresses[number] < 0:
                assert fill is not None
                part[...] = fill[box[1:]]
            else:
                data = self._decode(index, chunk, addresses[number], sizes[number], masks[number])
                part[...] = data.view(index.dtype).reshape(index.chunk_shape)[tuple(map(slice, part.shape))]
        return rows.reshape(-1).view(np.uint8)

    def _decode(self, index: ChunkIndex, chunk: int, offset: int, size: int, mask: int) -> npt.NDArray[np.uint8]:
        assert index.codec is not None
        first = chunk * index.chunk_rows
        stop = min(index.rows, first + index.chunk_rows)
        where = f"{index.name!r} rows {first}-{stop - 1}"
        encoded = MallocBuffer(size)
        self.storage.read_into(np.asarray(encoded), offset, lambda _: where)
        try:
            # If the data is damaged, a decoder may write past the end of its buffer. So compare the data with the
            # checksum, if there is one, before decoding.
            if index.stored_checksums is not None and crc32(np.asarray(encoded)) != index.stored_checksums[chunk]:
                raise ValueError("the chunk does not match its checksum")
            return index.codec.decode(encoded, mask, is_checked=index.stored_checksums is not None)
        except ValueError as error:
            self.storage.check_unchanged()
            path, problem = self.storage.path, f"{where} cannot be decoded ({error}); {VERIFY_ADVICE}"
            raise DamagedRowsError.at(path, problem, dataset=index.name, rows=range(first, stop)) from error

    def read_through_library(self, index: ChunkIndex, rows: npt.NDArray[np.int64]) -> ChunkRows:
        """Read exactly these rows through the HDF5 library, and return their bytes in stored byte order."""
        values = np.empty((len(rows), *index.row_shape), index.native_dtype)
        calls = self.reader.read(index.name, rows, values)
        stored = values.astype(index.dtype, copy=False).reshape(-1).view(np.uint8)
        return ChunkRows(stored, np.arange(len(rows)), stored.nbytes, calls)


class DecodedDataset:
    """All rows of a dataset that is not virtual, decoded and in one array in memory, so that one call copies a batch.

    Attributes
    ----------
    array : ndarray
        uint8 (N, row_bytes), in stored byte order. Rows are valid once `ready` has returned True for them.
    """

    def __init__(self, index: ChunkIndex, chunks: ChunkDecoder) -> None:
        self.index, self._chunks = index, chunks
        self.array = np.empty((index.rows, index.row_bytes), np.uint8)
        self._moved = np.zeros(-(-index.rows // index.chunk_rows), bool)

    def ready(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> bool:
        """Move the chunks that contain rows ``first[i]`` to ``last[i]``, int64 (n,), from the cache to `array`.

        Return True if `array` now contains all these rows. Stop and return False at the first chunk that is neither in
        `array` nor in the cache. `ChunkDecoder.rows_in_chunk` with ``keep=True`` decodes and caches such a chunk.
        """
        chunks = all_between(self.index.chunks_of(first), self.index.chunks_of(last))
        for chunk in chunks[~self._moved[chunks]].tolist():
            start = chunk * self.index.chunk_rows
            if not self._chunks.move(self.index, chunk, self.array[start : start + self.index.chunk_rows].reshape(-1)):
                return False
            self._moved[chunk] = True
        return True

    def copy(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy `rows`, int64 (n,), to `out`, (n, row_bytes), C-contiguous. `ready` must have returned True for them."""
        np.take(self.array, rows, axis=0, out=out, mode="clip")


class SourceFiles:
    """The source files of virtual datasets, opened on their first read; `own` reads the engine's own file.

    At most `max_open` source files stay open. The file that was opened first is closed first.
    """

    def __init__(self, own: ChunkDecoder) -> None:
        self.own = own
        self.max_open = max(1, min(_MAX_FILES, max_open_files() // 8))
        self._opened: dict[SourceFile, ChunkDecoder] = {}
        self._checked: dict[str, float] = {}

    def close(self) -> None:
        """Empty the cache, and close all files in this process once reads in progress have ended.

        The next read opens them again.
        """
        self.own.storage.close()
        self.own.reader.close()
        self.own.cache.clear()
        self._opened = {}
        self._checked.clear()

    def decoder(self, file: SourceFile | None) -> ChunkDecoder:
        """Return the decoder of a source file; None stands for the engine's own file."""
        if file is None or (file.path == self.own.storage.path and file.identity == self.own.storage.identity):
            return self.own
        opened = self._opened
        found = opened.get(file)
        if found is None:
            storage, reader = Storage(file.path, file.identity), H5Reader(file.path, file.identity)
            # `dict.setdefault` is atomic, so one of two racing threads wins. A lock is not used, because it
            # might stay locked in a forked child.
            found = opened.setdefault(file, ChunkDecoder(storage, reader, self.own.cache))
            while len(opened) > self.max_open:
                # Another thread may have removed the oldest entry in the meantime.
                with contextlib.suppress(KeyError, RuntimeError, StopIteration):
                    del opened[next(iter(opened))]
        return found

    def storage(self, index: ChunkIndex, source_id: int | None) -> Storage:
        """Return the storage of a source's file.

        `source_id` is an index in `VirtualIndex.sources`, or None for the dataset's own file.
        """
        file = index.sources[source_id].file if isinstance(index, VirtualIndex) and source_id is not None else None
        return self.decoder(file).storage

    def check_unchanged(self, index: ChunkIndex) -> None:
        """Raise PackChangedError if one of `index.files` was replaced, rewritten or removed since it was indexed."""
        for file in index.files:
            file.identity.require(file.path)

    def check_unchanged_throttled(self, index: ChunkIndex) -> None:
        """Call `check_unchanged`, at most once per second for each dataset.

        The HDF5 library itself would not notice that a source file was replaced.
        """
        if index.files and time.monotonic() - self._checked.get(index.name, 0.0) > CHECK_SECONDS:
            self.check_unchanged(index)
            self._checked[index.name] = time.monotonic()

    def rows_in_chunk(self, index: ChunkIndex, rows: npt.NDArray[np.int64], *, keep: bool) -> ChunkRows:
        """Return rows like `ChunkDecoder.rows_in_chunk`, but the dataset may be virtual, or have no codec.

        If the dataset is virtual, all `rows` must be in the same range (see `VirtualIndex`).
        """
        ((file, source, there),) = index.split_by_source(rows)
        decoder = self.decoder(file)
        if source.codec is not None:
            return decoder.rows_in_chunk(source, there, keep=keep)
        if source.library_reason is not None:
            return decoder.read_through_library(source, there)
        if source.is_empty:
            # Sources without storage share one index if their fill values are equal, so `there` is meaningless here.
            return ChunkRows(np.frombuffer(source.fill, np.uint8), np.zeros(len(rows), np.int64), 0, 0)
        values = np.empty((len(rows), index.row_bytes), np.uint8)
        _, size, calls = plan_reads(source, there).execute(values, lambda _: decoder.storage)
        return ChunkRows(values.reshape(-1), np.arange(len(rows)), size, calls)

    def prefetch(self, index: ChunkIndex, rows: npt.NDArray[np.int64]) -> None:
        """Start reading `rows`, int64 (n,), into the page cache, without waiting.

        Chunks that must be decoded are read as a whole. Rows that only the HDF5 library can read are skipped.
        """
        for file, source, there in index.split_by_source(rows):
            if source.codec is not None:
                numbers = source.chunks_of(there)
                chunks = numbers[equal_runs(numbers)[:-1]]
                offsets, sizes = source.addresses[chunks].reshape(-1), source.sizes[chunks].reshape(-1)
            elif source.raw and not source.is_empty:
                extents = plan_extents(source, there)
                offsets, sizes = extents.offsets, np.diff(extents.edges) * index.row_bytes
            else:
                continue
            stored = (offsets >= 0) & (sizes > 0)
            self.decoder(file).storage.prefetch(offsets[stored].tolist(), sizes[stored].tolist())
