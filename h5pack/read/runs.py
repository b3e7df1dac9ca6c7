"""Which rows can be read in one go: pure arithmetic on a chunk index."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5pack.read.chunk_index import ChunkIndex


@dataclass(frozen=True)
class Runs:
    """Rows cut where their bytes do not follow each other in the file.

    Attributes
    ----------
    edges : ndarray
        int64, (runs + 1,): run i holds the rows ``edges[i]`` to ``edges[i + 1] - 1`` of those asked for.
    offsets : ndarray
        int64, (runs,): byte offset of each run's first row; negative for rows without storage.
    visits : ndarray
        int64, (runs,): chunks that each run visits anew, a chunk counted again when the rows come back to it.
    owners : ndarray or None
        int64, (runs,): the source that each run lies in, of a virtual dataset.
    """

    edges: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    visits: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64] | None = None


def plan_runs(index: ChunkIndex, rows: npt.NDArray[np.int64]) -> Runs:
    """Cut rows, in the order given, into runs.

    Parameters
    ----------
    index : ChunkIndex
        Of a dataset that can be read directly.
    rows : ndarray
        int64, (n,), within 0..N-1; ascending rows make the longest runs.
    """
    if not len(rows):
        return Runs(np.zeros(1, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))
    chunks = index.chunks_of(rows)
    offsets, owners = index.offsets_of(rows, chunks), index.owners_of(chunks)
    follows = np.diff(offsets) == index.row_bytes
    if not index.complete:
        absent = offsets < 0
        follows = follows & ~absent[1:] & ~absent[:-1] | (absent[1:] & absent[:-1])
    if owners is not None:
        follows &= owners[1:] == owners[:-1]
    breaks = np.flatnonzero(~follows) + 1
    edges = np.empty(len(breaks) + 2, np.int64)
    edges[0], edges[1:-1], edges[-1] = 0, breaks, len(rows)
    heads = np.ones(len(rows), np.int64)
    heads[1:] = np.diff(chunks) != 0
    begins = edges[:-1]
    return Runs(edges, offsets[begins], np.add.reduceat(heads, begins), None if owners is None else owners[begins])


def chunk_edges(index: ChunkIndex, rows: npt.NDArray[np.int64]) -> list[int]:
    """Places in `rows`, int64 (n,), at which those of another chunk begin; the first and the last are 0 and n."""
    return [0, *(np.flatnonzero(np.diff(index.chunks_of(rows))) + 1).tolist(), len(rows)]
