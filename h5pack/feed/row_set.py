"""The rows that an order draws from, by the chunks they lie in."""

from __future__ import annotations

import zlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


class EpochRows(Protocol):
    """The rows of one epoch, as an order lays them out."""

    count: int
    chunks: int
    unit_rows: int

    def lengths(self) -> Rows: ...

    def take(self, chunks: Rows, firsts: Rows, lasts: Rows) -> tuple[Rows, Rows]: ...

    def pick(self, places: Rows) -> tuple[Rows, Rows]: ...


class RowSource(Protocol):
    """What an order draws from: as many rows each epoch."""

    count: int
    unit_rows: int

    @property
    def distinct(self) -> int: ...

    def of_epoch(self, key: int) -> EpochRows: ...

    def most(self, chunks: int) -> int: ...

    def stored(self) -> range | Rows: ...

    def identity(self) -> dict[str, Any]: ...


def ranges(starts: Rows, counts: Rows) -> Rows:
    """``starts[i]``, ``starts[i] + 1``, ... ``counts[i]`` numbers each, end to end; int64, (n,)."""
    ends = np.cumsum(counts)
    numbers: Rows = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    return numbers


class SpanRows:
    """Consecutive rows of the file: a split, or all of it. Nothing of its size is held.

    Parameters
    ----------
    start, stop : int
        First row, and the row behind the last.
    unit_rows : int
        Rows a chunk.
    """

    def __init__(self, start: int, stop: int, unit_rows: int) -> None:
        self.start, self.stop, self.unit_rows = start, stop, unit_rows
        self.count = stop - start
        self._chunk = start // unit_rows
        self.chunks = (stop - 1) // unit_rows - self._chunk + 1 if self.count else 0
        self.longest = unit_rows
        # Rows that the first and the last chunk lack, as they belong to other splits or lie past the end.
        self.lacks = [(0, start - self._chunk * unit_rows)] if self.count else []
        if self.count:
            self.lacks.append((self.chunks - 1, (self._chunk + self.chunks) * unit_rows - stop))

    def of_epoch(self, key: int) -> SpanRows:
        """The rows of an epoch: in each the same."""
        return self

    def most(self, chunks: int) -> int:
        """Rows in any `chunks` chunks of an order, at most."""
        return chunks * self.longest

    def begins(self, chunks: Rows) -> Rows:
        """Where in stored order chunks begin, and the one behind the last would; int64, (n,)."""
        return np.clip((self._chunk + chunks) * self.unit_rows, self.start, self.stop) - self.start

    def lengths(self) -> Rows:
        """Rows in each chunk; int64, (chunks,)."""
        lengths = np.full(self.chunks, self.unit_rows, np.int64)
        for chunk, lack in self.lacks:
            lengths[chunk] -= lack
        return lengths

    def take(self, chunks: Rows, firsts: Rows, lasts: Rows) -> tuple[Rows, Rows]:
        """Rows of the file, and their indices in the dataset, of places ``firsts`` to ``lasts - 1`` of some chunks."""
        begins = np.maximum(self.start, (self._chunk + chunks) * self.unit_rows)
        rows = ranges(begins + firsts, lasts - firsts)
        return rows, rows - self.start

    def pick(self, places: Rows) -> tuple[Rows, Rows]:
        """Rows of the file, and their indices in the dataset, of places in stored order."""
        return places + self.start, places

    @property
    def distinct(self) -> int:
        """Rows of the file among them."""
        return self.count

    def stored(self) -> range:
        """All rows of the file, ascending, each once."""
        return range(self.start, self.stop)

    def identity(self) -> dict[str, Any]:
        """By which two sets of rows are told apart."""
        return {"start": self.start, "rows": self.count, "chunk_rows": self.unit_rows}


class ChosenRows:
    """Any rows of the file, in the order they are stored in.

    Parameters
    ----------
    rows : ndarray
        int64, (n,): rows of the file; repeats are allowed.
    indices : ndarray
        int64, (n,): what a sampler calls each of them.
    unit_rows : int
        Rows a chunk.
    """

    def __init__(self, rows: Rows, indices: Rows, unit_rows: int) -> None:
        order = np.argsort(rows, kind="stable")
        self._rows, self._indices, self.unit_rows = rows[order], indices[order], unit_rows
        self.count = len(rows)
        heads = np.flatnonzero(np.diff(self._rows // unit_rows)) + 1
        self._edges = np.concatenate(([0], heads, [self.count])) if self.count else np.zeros(1, np.int64)
        self.chunks = len(self._edges) - 1
        # Repeated rows make a chunk longer than it is in the file.
        self.longest = int(self.lengths().max(initial=0))

    def of_epoch(self, key: int) -> ChosenRows:
        """The rows of an epoch: in each the same."""
        return self

    def most(self, chunks: int) -> int:
        """Rows in any `chunks` chunks of an order, at most."""
        return chunks * self.longest

    def begins(self, chunks: Rows) -> Rows:
        """Where in stored order chunks begin, and the one behind the last would; int64, (n,)."""
        return self._edges[chunks]

    def lengths(self) -> Rows:
        """Rows in each chunk; int64, (chunks,)."""
        return np.diff(self._edges)

    def take(self, chunks: Rows, firsts: Rows, lasts: Rows) -> tuple[Rows, Rows]:
        """Rows of the file, and their indices in the dataset, of places ``firsts`` to ``lasts - 1`` of some chunks."""
        places = ranges(self._edges[chunks] + firsts, lasts - firsts)
        return self._rows[places], self._indices[places]

    def pick(self, places: Rows) -> tuple[Rows, Rows]:
        """Rows of the file, and their indices in the dataset, of places in stored order."""
        return self._rows[places], self._indices[places]

    @property
    def distinct(self) -> int:
        """Rows of the file among them."""
        return int(np.count_nonzero(np.diff(self._rows))) + 1 if self.count else 0

    def stored(self) -> Rows:
        """All rows of the file, ascending, each once; int64, (n,)."""
        return np.unique(self._rows)

    def identity(self) -> dict[str, Any]:
        """By which two sets of rows are told apart."""
        digest = zlib.crc32(self._indices.astype("<i8").tobytes(), zlib.crc32(self._rows.astype("<i8").tobytes()))
        return {"rows": self.count, "chunk_rows": self.unit_rows, "rows_digest": digest}


RowSet = SpanRows | ChosenRows
