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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.checksum import row_checksums
from h5pack.errors import DamagedRowsError
from h5pack.read.chunk_decoder import ChunkDecoder
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.identity import FileIdentity
from h5pack.read.reader import H5Reader
from h5pack.read.runs import chunk_edges, plan_runs
from h5pack.read.stats import ReadStats
from h5pack.read.storage import Storage

SCATTER_BYTES = 512
"""Rows of this many bytes or more are scattered. Measured: at 784 bytes scattering is even with staging, above it wins,
at 256 it loses."""

SPAN_GAP_BYTES = 4_096
"""Staged reads run over gaps of up to a page: the disk gives the page anyway, and a call costs more than copying it."""

SPAN_BYTES = 4 * 1024 * 1024
"""A span begins anew with each of these, so that gaps between many small rows do not add up in memory."""

_log = logging.getLogger("h5pack")


@dataclass(frozen=True)
class Scatter:
    """Rows on their way to places in memory.

    Attributes
    ----------
    index : ChunkIndex
    rows : ndarray
        int64, (n,).
    buffers : ndarray
        uint64, (n, 2): address and bytes of each row's place; the addresses are the reader's to fill in.
    edges, offsets : list of int
        Of the runs, as `Runs` has them.
    visits : list of int
        (runs,).
    """

    index: ChunkIndex
    rows: npt.NDArray[np.int64]
    buffers: npt.NDArray[np.uint64]
    edges: list[int]
    offsets: list[int]
    visits: list[int]

    def describe(self, place: int) -> str:
        """The rows from a place on, in words."""
        return describe_rows(self.index, self.rows, place)


def describe_rows(index: ChunkIndex, rows: npt.NDArray[np.int64], place: int) -> str:
    """The consecutive rows from `place` on, in words."""
    first = int(rows[place])
    steps = np.flatnonzero(np.diff(rows[place:]) != 1)
    last = int(rows[place + steps[0]] if len(steps) else rows[-1])
    return f"{index.name!r} row {first}" if first == last else f"{index.name!r} rows {first}-{last}"


class Engine:
    """Reads rows of several datasets of one file, from any number of threads.

    Parameters
    ----------
    path : str
        Absolute.
    identity : FileIdentity
    indexes : dict of str to ChunkIndex
        The datasets; the first one's chunks are counted.
    """

    def __init__(self, path: str, identity: FileIdentity, indexes: dict[str, ChunkIndex]) -> None:
        self.path = path
        self.indexes = indexes
        self.storage = Storage(path, identity)
        self.reader = H5Reader(path, identity)
        self.chunks = ChunkDecoder(self.storage, self.reader)
        self.stats = ReadStats()
        self._main = next(iter(indexes), "")
        # A lock that another thread holds at a fork would stay locked in the child, so each process makes its own.
        self._lock = (os.getpid(), threading.Lock())
        for index in indexes.values():
            if index.reason is not None and not index.name.startswith(f"{schema.CHECKSUMS}/"):
                _log.warning(
                    "%s: %r is read through the HDF5 library, which is slower: %s", path, index.name, index.reason
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "stats": ReadStats()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=(os.getpid(), threading.Lock()))

    def close(self) -> None:
        """Close the file in this process; the next read opens it again."""
        self.storage.close()
        self.reader.close()
        self.chunks.kept.clear()

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
        ReadError, PackFormatError
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
            staged = np.empty((len(wanted), *index.row_shape), index.native_dtype)
            self._stage(index, wanted, staged)
            out[order] = staged
        return out  # type: ignore[no-any-return]

    @staticmethod
    def scatters(index: ChunkIndex) -> bool:
        """Whether a dataset's rows are scattered, so that `scatter` may be called."""
        return index.reason is None and index.codec is None and index.row_bytes >= SCATTER_BYTES

    @staticmethod
    def decodes(index: ChunkIndex) -> bool:
        """Whether a dataset's rows are copied out of decoded chunks to their places, so that `decode` may be called."""
        return index.reason is None and index.codec is not None and index.row_bytes >= SCATTER_BYTES

    def places(self, index: ChunkIndex) -> bool:
        """Whether a loader puts a dataset's rows to their places as they are stored, whatever their byte order."""
        return self.scatters(index) or self.decodes(index)

    def decoding_bytes(self, threads: int, *, keep: bool) -> int:
        """Memory that `decode` needs in so many threads, and to keep chunks."""
        coded = [index for index in self.indexes.values() if index.codec is not None]
        if not coded:
            return 0
        # A chunk as stored, decoded, and among its neighbours.
        most = max(2 * index.chunk_rows * index.row_bytes + int(index.sizes.max(initial=0)) for index in coded)
        return threads * most + (self.chunks.kept.capacity if keep else 0)

    def decode(
        self, name: str, rows: npt.NDArray[np.int64], *, keep: bool = False
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Read and decode the chunk that holds some rows.

        Parameters
        ----------
        name : str
            A dataset with a codec.
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
            If it cannot be read, or decoded.
        PackChangedError
        """
        index = self.indexes[name]
        values, places, read, calls = self.chunks.take(index, rows, keep=keep)
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
        index = self.indexes[name]
        runs = plan_runs(index, rows)
        buffers = np.empty((len(rows), 2), np.uint64)
        buffers[:, 1] = index.row_bytes
        return Scatter(index, rows, buffers, runs.edges.tolist(), runs.offsets.tolist(), runs.visits.tolist())

    def scatter(self, plan: Scatter, first: int = 0, last: int | None = None) -> None:
        """Read the runs `first` to `last` - 1 of a plan, to the addresses that were put into its `buffers`.

        The memory must stay where it is during the call.
        """
        last = len(plan.offsets) if last is None else last
        if first == last:
            return
        edges, offsets = plan.edges[first : last + 1], plan.offsets[first:last]
        absent = 0
        if plan.index.fill and min(offsets) < 0:
            calls = 0
            for start, end, offset in zip(edges, edges[1:], offsets, strict=False):
                if offset < 0:
                    # HDF5 gives rows without storage the fill value.
                    for address in plan.buffers[start:end, 0].tolist():
                        ctypes.memmove(address, plan.index.fill, len(plan.index.fill))
                    absent += end - start
                else:
                    calls += self.storage.scatter(plan.buffers, (start, end), (offset,), plan.describe)
        else:
            calls = self.storage.scatter(plan.buffers, edges, offsets, plan.describe)
        rows, visits = edges[-1] - edges[0], sum(plan.visits[first:last])
        self._count(plan.index, rows, visits, (rows - absent) * plan.index.row_bytes, calls)

    def _stage(self, index: ChunkIndex, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Read ascending rows to consecutive places of `out`."""
        if index.reason is not None:
            self.storage.open()
            calls = self.reader.read(index.name, rows, out)
            chunks = int(np.count_nonzero(np.diff(rows // index.chunk_rows))) + 1
            self._count(index, len(rows), chunks, len(rows) * index.row_bytes, calls)
            return
        flat = out.reshape(len(rows), -1).view(np.uint8)
        if index.codec is not None:
            self._stage_decoded(index, rows, flat)
            if not index.dtype.isnative:
                out.byteswap(inplace=True)
            return
        runs = plan_runs(index, rows)
        starts, ends = runs.offsets, runs.offsets + np.diff(runs.edges) * index.row_bytes
        # Runs that lie close together become one span; rows without storage stay alone.
        apart = (starts[1:] - ends[:-1] > SPAN_GAP_BYTES) | (starts[1:] < ends[:-1]) | (starts[:-1] < 0)
        apart |= np.diff(starts // SPAN_BYTES) != 0
        heads = np.flatnonzero(np.concatenate(([True], apart)))
        tails = np.append(heads[1:], len(starts)) - 1
        total = 0
        for head, tail in zip(heads.tolist(), tails.tolist(), strict=True):
            first, last = int(runs.edges[head]), int(runs.edges[tail + 1])
            start, size = int(starts[head]), int(ends[tail] - starts[head])
            if start < 0:
                flat[first:last] = np.frombuffer(index.fill, np.uint8)
                continue
            total += size
            direct = size == (last - first) * index.row_bytes
            staging = flat[first:last].reshape(-1) if direct else np.empty(size, np.uint8)
            pair = np.array([[staging.__array_interface__["data"][0], size]], np.uint64)
            self.storage.scatter(pair, (0, 1), (start,), partial(describe_rows, index, rows[first:last]))
            if not direct:
                self._pick(index, runs.edges[head : tail + 2], starts[head : tail + 1] - start, staging, flat)
        if not index.dtype.isnative:
            out.byteswap(inplace=True)
        self._count(index, len(rows), int(runs.visits.sum()), total, len(heads))

    def _stage_decoded(self, index: ChunkIndex, rows: npt.NDArray[np.int64], flat: npt.NDArray[np.uint8]) -> None:
        for first, last in itertools.pairwise(chunk_edges(rows, index.chunk_rows)):
            # Who takes all of a chunk will hardly come back to it.
            stored = min(index.chunk_rows, index.rows - int(rows[first]) // index.chunk_rows * index.chunk_rows)
            values, places = self.decode(index.name, rows[first:last], keep=last - first < stored)
            np.take(values.reshape(len(values), -1).view(np.uint8), places, axis=0, out=flat[first:last], mode="clip")

    @staticmethod
    def _pick(
        index: ChunkIndex,
        edges: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        staging: npt.NDArray[np.uint8],
        flat: npt.NDArray[np.uint8],
    ) -> None:
        """Take the wanted rows out of a span."""
        size = index.row_bytes
        counts = np.diff(edges)
        within = np.arange(edges[-1] - edges[0]) - np.repeat(edges[:-1] - edges[0], counts)
        places = np.repeat(offsets, counts) + within * size
        windows = np.lib.stride_tricks.sliding_window_view(staging, size)
        flat[edges[0] : edges[-1]] = windows[places]

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
        self.storage.fetch(plan.offsets, ((end - start) * size for start, end in itertools.pairwise(plan.edges)))
