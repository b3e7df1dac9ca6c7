"""Small rows, read in spans to a staging buffer and sorted from there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.runs import plan_runs
from h5pack.read.storage import Storage

SPAN_GAP_BYTES = 4_096
"""Staged reads run over gaps of up to a page: the disk gives the page anyway, and a call costs more than copying it."""

SPAN_BYTES = 4 * 1024 * 1024
"""A span begins anew with each of these, so that gaps between many small rows do not add up in memory."""


def read_spans(
    index: ChunkIndex,
    rows: npt.NDArray[np.int64],
    flat: npt.NDArray[np.uint8],
    storage_of: Callable[[int | None], Storage],
) -> tuple[int, int, int]:
    """Read raw rows, as they are stored, to consecutive places.

    Parameters
    ----------
    index : ChunkIndex
        Whose rows are raw.
    rows : ndarray
        int64, (n,), not empty; ascending makes the fewest calls.
    flat : ndarray
        uint8, (n, row_bytes), C-contiguous: where they go.
    storage_of : callable
        The file of a source, by its number; of None, the dataset's own.

    Returns
    -------
    visits, size, calls : int
        Visits to a chunk, bytes that were read, and calls of the kernel.
    """
    runs = plan_runs(index, rows)
    starts, ends = runs.offsets, runs.offsets + np.diff(runs.edges) * index.row_bytes
    # Runs that lie close together become one span; rows without storage stay alone.
    apart = (starts[1:] - ends[:-1] > SPAN_GAP_BYTES) | (starts[1:] < ends[:-1]) | (starts[:-1] < 0)
    apart |= np.diff(starts // SPAN_BYTES) != 0
    if runs.owners is not None:
        apart |= np.diff(runs.owners) != 0
    heads = np.flatnonzero(np.concatenate(([True], apart)))
    tails = np.append(heads[1:], len(starts)) - 1
    total = calls = 0
    for head, tail in zip(heads.tolist(), tails.tolist(), strict=True):
        first, last = int(runs.edges[head]), int(runs.edges[tail + 1])
        start, size = int(starts[head]), int(ends[tail] - starts[head])
        if start < 0:
            # HDF5 gives rows without storage the fill value.
            flat[first:last] = np.frombuffer(index.fill_of(int(rows[first])), np.uint8)
            continue
        total += size
        direct = size == (last - first) * index.row_bytes
        staging = flat[first:last].reshape(-1) if direct else np.empty(size, np.uint8)
        pair = np.array([[staging.__array_interface__["data"][0], size]], np.uint64)
        storage = storage_of(None if runs.owners is None else int(runs.owners[head]))
        calls += storage.scatter(pair, (0, 1), (start,), partial(index.describe, rows[first:last]))
        if not direct:
            _pick(index.row_bytes, runs.edges[head : tail + 2], starts[head : tail + 1] - start, staging, flat)
    return int(runs.visits.sum()), total, calls


def _pick(
    size: int,
    edges: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    staging: npt.NDArray[np.uint8],
    flat: npt.NDArray[np.uint8],
) -> None:
    """Take the wanted rows, of `size` bytes, out of a span."""
    counts = np.diff(edges)
    within = np.arange(edges[-1] - edges[0]) - np.repeat(edges[:-1] - edges[0], counts)
    places = np.repeat(offsets, counts) + within * size
    windows = np.lib.stride_tricks.sliding_window_view(staging, size)
    flat[edges[0] : edges[-1]] = windows[places]
