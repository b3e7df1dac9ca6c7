"""Rows on their way to places in memory."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.runs import plan_runs


class Stretch(NamedTuple):
    """Runs that are read from one file by one call.

    Attributes
    ----------
    first, last : int
        The runs `first` to `last` - 1.
    owner : int or None
        The source that they lie in, of a virtual dataset.
    absent : bool
        They have no storage.
    """

    first: int
    last: int
    owner: int | None
    absent: bool


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
    owners : list of int or None
        (runs,), of a virtual dataset.
    borders : list of int
        Runs with which another source begins, or rows without storage begin or end.
    """

    index: ChunkIndex
    rows: npt.NDArray[np.int64]
    buffers: npt.NDArray[np.uint64]
    edges: list[int]
    offsets: list[int]
    visits: list[int]
    owners: list[int] | None
    borders: list[int]

    def describe(self, place: int) -> str:
        """The rows from a place on, in words."""
        return self.index.describe(self.rows, place)

    def stretches(self, first: int = 0, last: int | None = None) -> Iterator[Stretch]:
        """The runs `first` to `last` - 1, cut at the borders."""
        last = len(self.offsets) if last is None else last
        if first == last:
            return
        if not self.borders:
            yield self._stretch(first, last)
            return
        inner = self.borders[bisect_right(self.borders, first) : bisect_left(self.borders, last)]
        for low, high in itertools.pairwise([first, *inner, last]):
            yield self._stretch(low, high)

    def _stretch(self, first: int, last: int) -> Stretch:
        return Stretch(first, last, None if self.owners is None else self.owners[first], self.offsets[first] < 0)


def plan_scatter(index: ChunkIndex, rows: npt.NDArray[np.int64]) -> Scatter:
    """Plan to read rows of raw datasets to places in memory.

    Parameters
    ----------
    index : ChunkIndex
        Whose rows are raw.
    rows : ndarray
        int64, (n,); ascending within each chunk makes the fewest calls.
    """
    runs = plan_runs(index, rows)
    buffers = np.empty((len(rows), 2), np.uint64)
    buffers[:, 1] = index.row_bytes
    borders: list[int] = []
    if runs.owners is not None or not index.complete:
        absent = runs.offsets < 0
        change = absent[1:] != absent[:-1]
        if runs.owners is not None:
            change |= runs.owners[1:] != runs.owners[:-1]
        borders = (np.flatnonzero(change) + 1).tolist()
    return Scatter(
        index,
        rows,
        buffers,
        runs.edges.tolist(),
        runs.offsets.tolist(),
        runs.visits.tolist(),
        None if runs.owners is None else runs.owners.tolist(),
        borders,
    )
