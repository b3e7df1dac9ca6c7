"""Rows of a file's datasets at the speed of memory: read directly where possible, through the HDF5 library elsewhere.

Rows of `SCATTER_BYTES` and more go from the page cache straight to their places, wherever those are (`Storage`).
Smaller ones are read in spans into a staging buffer and sorted from there, since naming each place would cost more than
copying the row. What cannot be read directly goes through h5py with a cache that suits it (`H5Reader`); the bytes are
the same.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.checksum import row_checksums
from h5pack.errors import DamagedRowsError
from h5pack.read.chunk_decoder import ChunkDecoder
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.encoded import holds_encoded
from h5pack.read.identity import FileIdentity
from h5pack.read.reader import H5Reader
from h5pack.read.runs import chunk_edges
from h5pack.read.scatter import Scatter, plan_scatter
from h5pack.read.source_files import SourceFiles
from h5pack.read.spans import read_spans
from h5pack.read.stats import ReadStats
from h5pack.read.storage import Storage

SCATTER_BYTES = 512
"""Rows of this many bytes or more are scattered. Measured: at 784 bytes scattering is even with staging, above it wins,
at 256 it loses."""

_log = logging.getLogger("h5pack")


class Engine:
    """Reads rows of several datasets of one file, from any number of threads.

    Parameters
    ----------
    path : str
        Absolute.
    identity : FileIdentity
    indexes : dict of str to ChunkIndex
        The datasets; the first one's chunks are counted.
    warn : bool
        Log which of them come through the HDF5 library.
    """

    def __init__(self, path: str, identity: FileIdentity, indexes: dict[str, ChunkIndex], *, warn: bool = True) -> None:
        self.path = path
        self.indexes = indexes
        self.storage = Storage(path, identity)
        self.reader = H5Reader(path, identity)
        self.chunks = ChunkDecoder(self.storage, self.reader)
        self.files = SourceFiles(self.chunks)
        self.stats = ReadStats()
        self._main = next(iter(indexes), "")
        # A lock that another thread holds at a fork would stay locked in the child, so each process makes its own.
        self._lock = (os.getpid(), threading.Lock())
        for index in indexes.values():
            if warn and index.warning is not None and not index.name.startswith(f"{schema.CHECKSUMS}/"):
                _log.warning(
                    "%s: %r is read through the HDF5 library, which is slower: %s", path, index.name, index.warning
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "stats": ReadStats()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=(os.getpid(), threading.Lock()))

    def close(self) -> None:
        """Close all files in this process; the next read opens them again."""
        self.files.close()

    def look(self) -> None:
        """Make sure that the file, and those that its virtual datasets are made of, are still those that were indexed.

        Raises
        ------
        PackChangedError
        """
        self.storage.look()
        for index in self.indexes.values():
            self.files.look(index)

    def read(self, name: str, rows: Sequence[int] | npt.NDArray[np.int64], out: Any = None) -> npt.NDArray[Any]:
        """Rows of a dataset, in the order asked for.

        Parameters
        ----------
        name : str
            One of the datasets.
        rows : sequence of int
            (n,), within 0..N-1, in any order; repeats are allowed.
        out : ndarray, optional
            (n, ...) in the machine's byte order, C-contiguous: where they go.

        Returns
        -------
        ndarray
            (n, ...), in the machine's byte order; `out` where that was given.

        Raises
        ------
        PackChangedError
            If the file is no longer the one that was indexed.
        ReadError, DamagedRowsError, PackFormatError
            If the rows cannot be read.
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
        if self.scatters(index):
            places = np.arange(len(wanted)) if order is None else order
            start = out.__array_interface__["data"][0]
            plan = self.plan(name, wanted)
            plan.buffers[:, 0] = (places * index.row_bytes + start).view(np.uint64)
            self.scatter(plan)
            if not index.dtype.isnative:
                out.byteswap(inplace=True)
        elif order is None:
            self._stage(index, wanted, out)
        else:
            staged = np.empty_like(out)
            self._stage(index, wanted, staged)
            out[order] = staged
        return out  # type: ignore[no-any-return]

    def read_one(self, name: str, row: int) -> npt.NDArray[Any]:
        """One row, as `read` gives it: of raw rows, with little more work than the system's own.

        Parameters
        ----------
        name : str
            One of the datasets.
        row : int
            Within 0..N-1.
        """
        index = self.indexes[name]
        offset = index.offset_of(row)
        if offset is None:
            found: npt.NDArray[Any] = self.read(name, [row])[0]
            return found
        out = np.empty(index.row_shape, index.native_dtype)
        calls = self.storage.read_into(out, offset, lambda _: index.describe(np.array([row]), 0))
        if not index.dtype.isnative:
            out.byteswap(inplace=True)
        self._count(index, 1, 1, out.nbytes, calls)
        return out

    @staticmethod
    def scatters(index: ChunkIndex) -> bool:
        """Whether a dataset's rows are scattered, so that `scatter` may be called."""
        return index.raw and index.row_bytes >= SCATTER_BYTES

    @staticmethod
    def decodes(index: ChunkIndex) -> bool:
        """Whether a dataset's rows are copied out of decoded chunks to their places, so that `decode` may be called."""
        return index.reason is None and not index.raw and index.row_bytes >= SCATTER_BYTES

    def places(self, index: ChunkIndex) -> bool:
        """Whether a loader puts a dataset's rows to their places as they are stored, whatever their byte order."""
        return self.scatters(index) or self.decodes(index)

    def decoding_bytes(self, threads: int, *, keep: bool) -> int:
        """Memory that `decode` needs in so many threads, and to keep chunks."""
        most = max((index.decoding_bytes for index in self.indexes.values()), default=0)
        if not most:
            return 0
        return threads * most + (self.chunks.kept.capacity if keep else 0)

    def decode(
        self, name: str, rows: npt.NDArray[np.int64], *, keep: bool = False
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Read and decode the chunk that holds some rows; of a virtual dataset, rows of one piece, as they are.

        Parameters
        ----------
        name : str
            A dataset for which `decodes` holds, or would if its rows were larger.
        rows : ndarray
            int64, (n,): of one chunk; they are counted as read.
        keep : bool
            Keep it for the next one who asks, while there is room.

        Returns
        -------
        values : ndarray
            (m, ...): as stored, perhaps read-only.
        places : ndarray
            int64, (n,): where among them the rows are.

        Raises
        ------
        ReadError
            If it cannot be read.
        DamagedRowsError
            If it cannot be decoded.
        PackChangedError
        """
        index = self.indexes[name]
        values, places, read, calls = self.files.take(index, rows, keep=keep)
        self._count(index, len(rows), 1, read, calls)
        return values.view(index.dtype).reshape(-1, *index.row_shape), places

    def plan(self, name: str, rows: npt.NDArray[np.int64]) -> Scatter:
        """Plan to read rows, as they are stored, to places in memory that are named later.

        Parameters
        ----------
        name : str
            A dataset for which `scatters` holds.
        rows : ndarray
            int64, (n,); ascending within each chunk makes the fewest calls.
        """
        return plan_scatter(self.indexes[name], rows)

    def scatter(self, plan: Scatter, first: int = 0, last: int | None = None) -> None:
        """Read the runs `first` to `last` - 1 of a plan, to the addresses that were put into its `buffers`.

        The memory must stay where it is during the call.
        """
        last = len(plan.offsets) if last is None else last
        absent = calls = 0
        for stretch in plan.stretches(first, last):
            edges = plan.edges[stretch.first : stretch.last + 1]
            if stretch.absent:
                # HDF5 gives rows without storage the fill value.
                for start, end in itertools.pairwise(edges):
                    fill = plan.index.fill_of(int(plan.rows[start]))
                    for address in plan.buffers[start:end, 0].tolist():
                        ctypes.memmove(address, fill, len(fill))
                absent += edges[-1] - edges[0]
            else:
                storage = self.files.storage(plan.index, stretch.owner)
                calls += storage.scatter(plan.buffers, edges, plan.offsets[stretch.first : stretch.last], plan.describe)
        rows, visits = plan.edges[last] - plan.edges[first], sum(plan.visits[first:last])
        self._count(plan.index, rows, visits, (rows - absent) * plan.index.row_bytes, calls)

    def _stage(self, index: ChunkIndex, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Read ascending rows to consecutive places of `out`."""
        if index.reason is not None:
            self.storage.open()
            self.files.look_at_times(index)
            size = len(rows) * index.row_bytes
            if holds_encoded(index):
                size, calls = self.reader.read_images(index.name, rows, out)
            else:
                calls = self.reader.read(index.name, rows, out)
            chunks = int(np.count_nonzero(np.diff(rows // index.chunk_rows))) + 1
            self._count(index, len(rows), chunks, size, calls)
            return
        flat = out.reshape(len(rows), -1).view(np.uint8)
        if index.raw:
            visits, size, calls = read_spans(index, rows, flat, self.files.storage_of(index))
            self._count(index, len(rows), visits, size, calls)
        else:
            self._stage_decoded(index, rows, flat)
        if not index.dtype.isnative:
            out.byteswap(inplace=True)

    def _stage_decoded(self, index: ChunkIndex, rows: npt.NDArray[np.int64], flat: npt.NDArray[np.uint8]) -> None:
        for first, last in itertools.pairwise(chunk_edges(index, rows)):
            # Who takes all of a chunk will hardly come back to it.
            stored = index.rows_beside(int(rows[first]))
            values, places = self.decode(index.name, rows[first:last], keep=last - first < stored)
            np.take(values.reshape(len(values), -1).view(np.uint8), places, axis=0, out=flat[first:last], mode="clip")

    def snapshot(self) -> ReadStats:
        """What this process has read so far."""
        with self._own_lock():
            return replace(self.stats)

    def _own_lock(self) -> threading.Lock:
        process, lock = self._lock
        if process != os.getpid():
            lock = threading.Lock()
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

    def check(self, name: str, checksums: str, rows: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        """Compare rows that were read with their stored checksums.

        Parameters
        ----------
        name, checksums : str
            The dataset, and the dataset of its CRC-32s.
        rows : ndarray
            int64, (n,).
        values : ndarray
            (n, ...): what was read.

        Raises
        ------
        DamagedRowsError
        """
        stored = values.astype(self.indexes[name].dtype, copy=False)
        wrong = np.flatnonzero(row_checksums(stored) != self.read(checksums, rows))
        if len(wrong):
            damaged = sorted({int(rows[place]) for place in wrong})
            some = ", ".join(map(str, damaged[:8])) + (", ..." if len(damaged) > 8 else "")
            what = f"rows {some} differ" if len(damaged) > 1 else f"row {some} differs"
            raise DamagedRowsError(
                f"{self.path}: {name!r} {what} from the stored checksum; run 'h5pack verify' on it, then restore the "
                "file or convert again",
                tuple(damaged),
            )

    def advise(self, plan: Scatter) -> None:
        """Have a plan's bytes fetched from the disk meanwhile, where they are not in memory already."""
        size = plan.index.row_bytes
        for stretch in plan.stretches():
            if not stretch.absent:
                edges = plan.edges[stretch.first : stretch.last + 1]
                self.files.storage(plan.index, stretch.owner).fetch(
                    plan.offsets[stretch.first : stretch.last],
                    ((end - start) * size for start, end in itertools.pairwise(edges)),
                )

    def advise_chunks(self, name: str, rows: npt.NDArray[np.int64]) -> None:
        """Have the chunks that rows, int64 (n,), will be decoded from fetched from the disk meanwhile."""
        self.files.advise(self.indexes[name], rows)
