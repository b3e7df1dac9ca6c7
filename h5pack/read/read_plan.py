"""Plans of direct reads: which extents of a file hold which rows, and how to read them with few system calls.

An extent is a run of adjacent bytes of the file. Plans are computed without I/O. Large rows are scattered: they are
read straight into buffers anywhere in memory (`ScatterPlan`). Small rows are read into one array, and one read may
cover several extents and the small gaps between them (`ReadPlan`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.storage import Storage
from h5pack.read.virtual_index import VirtualIndex
from h5pack.system.arrays import limited_runs, run_edges

MAX_GAP_BYTES = 4_096
"""Maximum gap in bytes between two extents that one read covers together: one page. The system reads whole pages from
the disk anyway, and reading the gap is cheaper than another system call."""

MAX_EXTENT_BYTES = 4 * 1024 * 1024
"""Size in bytes of aligned blocks of a file. One read covers only extents that begin in the same block. This keeps the
buffer of the read small, which also holds the gaps between the extents."""


MAX_MERGED_BYTES = 8 * 1024 * 1024
"""Maximum size in bytes of a read of rows that differ in length. A row that is larger is read by itself."""


def merge_ranges(
    starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], item_bytes: int = 1
) -> Iterator[tuple[int, int]]:
    """Divide ascending ranges of items into reads, which may cover small gaps between ranges.

    Range i consists of the items ``starts[i]`` to ``stops[i] - 1``. For each read, yield (first, last): it covers the
    ranges `first` to `last` - 1.
    """
    if len(starts):
        edges = run_edges(starts[1:] - stops[:-1] > MAX_GAP_BYTES // item_bytes)
        yield from limited_runs(edges, starts, stops, max(1, MAX_MERGED_BYTES // item_bytes))


@dataclass(frozen=True)
class RowExtents:
    """Rows divided into extents: runs of rows whose bytes are adjacent in the file.

    Extent i consists of the requested rows at positions ``edges[i]`` to ``edges[i + 1] - 1``. All other arrays have the
    shape (extents,).
    """

    edges: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]  # byte offset of each extent; negative if its rows have no allocated storage
    # For each extent, how many of its rows begin a visit to a chunk. A row begins a visit if it is the first requested
    # row, or if the row requested before it is in another chunk.
    chunk_visits: npt.NDArray[np.int64]
    source_ids: npt.NDArray[np.int64] | None = None  # for each extent, the index of its source; None if not virtual


def plan_extents(index: ChunkIndex, rows: npt.NDArray[np.int64]) -> RowExtents:
    """Divide `rows`, int64 (n,), into extents in the given order. Ascending rows usually give the fewest extents."""
    if not len(rows):
        return RowExtents(np.zeros(1, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))
    chunks = index.chunks_of(rows)
    offsets = index.offsets_of(rows, chunks)
    source_ids = index.source_ids[chunks] if isinstance(index, VirtualIndex) else None
    breaks = np.diff(offsets) != index.row_bytes
    if not index.complete:
        absent = offsets < 0
        breaks = np.where(absent[1:] & absent[:-1], False, breaks | absent[1:] | absent[:-1])
    if source_ids is not None:
        breaks |= source_ids[1:] != source_ids[:-1]
    edges = run_edges(breaks)
    enters = np.ones(len(rows), np.int64)
    enters[1:] = np.diff(chunks) != 0
    begins = edges[:-1]
    visits = np.add.reduceat(enters, begins)
    return RowExtents(edges, offsets[begins], visits, None if source_ids is None else source_ids[begins])


@dataclass(frozen=True)
class ReadPlan:
    """Direct reads of rows into one array. Each read normally takes one system call.

    Read i covers the extents ``edges[i]`` to ``edges[i + 1] - 1``: ``sizes[i]`` bytes of the file at ``offsets[i]``. A
    negative offset means that the rows have no allocated storage.
    """

    index: ChunkIndex
    rows: npt.NDArray[np.int64]
    extents: RowExtents
    edges: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    def execute(self, out: npt.NDArray[np.uint8], storage_of: Callable[[int | None], Storage]) -> tuple[int, int, int]:
        """Read the rows into `out`, uint8 (n, row_bytes), C-contiguous.

        ``storage_of(source_id)`` must return the storage of a source's file; None stands for the dataset's own file.
        Returns the numbers of chunk visits (see `RowExtents`), bytes read, and system calls.
        """
        extents, row_bytes = self.extents, self.index.row_bytes
        row_edges = extents.edges[self.edges].tolist()
        total = calls = 0
        for (head, tail), (first, last), start, size in zip(
            itertools.pairwise(self.edges.tolist()),
            itertools.pairwise(row_edges),
            self.offsets.tolist(),
            self.sizes.tolist(),
            strict=True,
        ):
            if start < 0:
                # Like HDF5, return the fill value for rows without allocated storage.
                out[first:last] = np.frombuffer(self.index.fill_of(int(self.rows[first])), np.uint8)
                continue
            total += size
            direct = size == (last - first) * row_bytes
            staging = out[first:last].reshape(-1) if direct else np.empty(size, np.uint8)
            storage = storage_of(None if extents.source_ids is None else int(extents.source_ids[head]))
            calls += storage.read_into(staging, start, partial(self.index.describe, self.rows[first:last]))
            if not direct:
                _copy_rows(row_bytes, extents.edges[head : tail + 1], extents.offsets[head:tail] - start, staging, out)
        return int(extents.chunk_visits.sum()), total, calls


def plan_reads(index: ChunkIndex, rows: npt.NDArray[np.int64]) -> ReadPlan:
    """Plan direct reads of rows, int64 (n,) with n > 0, into one array.

    One read covers several extents if the gaps between them are small (`MAX_GAP_BYTES`) and they begin in the same
    block of the file (`MAX_EXTENT_BYTES`).
    """
    extents = plan_extents(index, rows)
    starts, ends = extents.offsets, extents.offsets + np.diff(extents.edges) * index.row_bytes
    # Do not merge an extent without allocated storage with other extents, because its rows are not read.
    apart = (starts[1:] - ends[:-1] > MAX_GAP_BYTES) | (starts[1:] < ends[:-1]) | (starts[:-1] < 0)
    apart |= np.diff(starts // MAX_EXTENT_BYTES) != 0
    if extents.source_ids is not None:
        apart |= np.diff(extents.source_ids) != 0
    edges = run_edges(apart)
    offsets = starts[edges[:-1]]
    return ReadPlan(index, rows, extents, edges, offsets, ends[edges[1:] - 1] - offsets)


def _copy_rows(
    size: int,
    edges: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    staging: npt.NDArray[np.uint8],
    out: npt.NDArray[np.uint8],
) -> None:
    """Copy extents of `size`-byte rows: extent i from ``staging[offsets[i]:]`` to ``out[edges[i]:edges[i + 1]]``."""
    counts = np.diff(edges)
    within = np.arange(edges[-1] - edges[0]) - np.repeat(edges[:-1] - edges[0], counts)
    positions = np.repeat(offsets, counts) + within * size
    windows = np.lib.stride_tricks.sliding_window_view(staging, size)
    out[edges[0] : edges[-1]] = windows[positions]


class FileExtents(NamedTuple):
    """Extents `first` to `last` - 1 of a `ScatterPlan`, all in one file."""

    first: int
    last: int
    source_id: int | None  # None for the dataset's own file
    absent: bool  # whether the rows have no allocated storage


@dataclass(frozen=True, kw_only=True)
class ScatterPlan:
    """Direct reads of rows into buffers anywhere in memory. For `edges` to `source_ids`, see `RowExtents`."""

    index: ChunkIndex
    rows: npt.NDArray[np.int64]
    buffers: npt.NDArray[np.uint64]  # (n, 2), address and size in bytes of each row's buffer; the caller sets addresses
    edges: list[int]
    offsets: list[int]
    chunk_visits: list[int]
    source_ids: list[int] | None
    borders: list[int]  # indices of extents that differ from the extent before in the source, or in having storage

    def by_file(self, first: int = 0, last: int | None = None) -> Iterator[FileExtents]:
        """Divide the extents `first` to `last` - 1 at `borders` into groups, each in one file; yield the groups."""
        last = len(self.offsets) if last is None else last
        if first == last:
            return
        inner = self.borders[bisect_right(self.borders, first) : bisect_left(self.borders, last)]
        for low, high in itertools.pairwise([first, *inner, last]):
            source_id = None if self.source_ids is None else self.source_ids[low]
            yield FileExtents(low, high, source_id, self.offsets[low] < 0)


def plan_scatter(index: ChunkIndex, rows: npt.NDArray[np.int64]) -> ScatterPlan:
    """Plan direct reads of rows, int64 (n,), which take the fewest system calls if rows ascend within each chunk."""
    extents = plan_extents(index, rows)
    buffers = np.empty((len(rows), 2), np.uint64)
    buffers[:, 1] = index.row_bytes
    borders: list[int] = []
    if extents.source_ids is not None or not index.complete:
        absent = extents.offsets < 0
        change = absent[1:] != absent[:-1]
        if extents.source_ids is not None:
            change |= extents.source_ids[1:] != extents.source_ids[:-1]
        borders = (np.flatnonzero(change) + 1).tolist()
    return ScatterPlan(
        index=index,
        rows=rows,
        buffers=buffers,
        edges=extents.edges.tolist(),
        offsets=extents.offsets.tolist(),
        chunk_visits=extents.chunk_visits.tolist(),
        source_ids=None if extents.source_ids is None else extents.source_ids.tolist(),
        borders=borders,
    )
