"""Rows that are drawn by weight: systematic resampling, which no chunk is read twice for.

The weights are laid end to end in stored order. On that line lie as many points as an epoch has draws, equally far
apart, and shifted by an offset that each epoch draws anew; a row is drawn once for each point on its part. So the
copies of a row are its share, rounded down or up, and over the epochs their mean is the share.

All of it is done in whole numbers: a weight is a number of *units*, of which the line has some 2^60. Sums of them are
exact, in whatever order they are added up, so points and rows meet in the same way everywhere, and none is drawn twice
or lost by rounding.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.feed.row_set import RowSet, ranges

Rows = npt.NDArray[np.int64]

MOST_SAMPLES = 1 << 48
"""Up to here a quotient in floating point is off by less than one, which is then put right."""

_LINE_BITS = 60
_BLOCK_ROWS = 1 << 16


class WeightedRows:
    """Rows of which each epoch draws some: the more often, the more they weigh.

    Besides the units of each row, it holds their sums over the chunks.

    Parameters
    ----------
    rows : RowSet
        To draw from.
    weights : ndarray
        float64, (rows.count,), finite, none below 0 and some above: of the rows in stored order. It is not kept.
    samples : int
        Draws an epoch, up to `MOST_SAMPLES`.

    Attributes
    ----------
    count : int
        Draws an epoch.
    """

    def __init__(self, rows: RowSet, weights: npt.NDArray[np.float64], samples: int) -> None:
        self.rows, self.count, self.unit_rows = rows, samples, rows.unit_rows
        self._digest = 0
        for low in range(0, len(weights), _BLOCK_ROWS):
            self._digest = zlib.crc32(weights[low : low + _BLOCK_ROWS].astype("<f8").tobytes(), self._digest)
        self._units = _in_units(weights)
        sums = np.add.reduceat(self._units, rows.begins(np.arange(rows.chunks)))
        self._sums: Rows = np.concatenate(([0], np.cumsum(sums)))
        self._line = int(self._sums[-1])
        self._drawable = int(np.count_nonzero(self._units))

    def of_epoch(self, key: int) -> EpochDraws:
        """What an epoch draws; `key` has 64 random bits, of which 53 are the offset."""
        return EpochDraws(self, (key >> 11) * self._line >> 53)

    def most(self, chunks: int) -> int:
        """Draws from any `chunks` chunks in a row of any epoch, at most."""
        sums = np.diff(self._sums)
        others = min(chunks, len(sums)) - 1
        heaviest = sums if others == len(sums) else np.partition(sums, len(sums) - 1 - others)[-1 - others :]
        # Where a line begins again, the chunk at its end may follow itself.
        units = int(heaviest.sum()) + int(heaviest.max())
        return -(-self.count * units // self._line) + others + 1

    @property
    def distinct(self) -> int:
        """Rows of the file that some epoch may draw."""
        return self.rows.distinct if self._drawable == self.rows.count else len(self.stored())

    def stored(self) -> range | Rows:
        """All rows of the file that some epoch may draw, ascending, each once; a range, or int64, (n,)."""
        if self._drawable == self.rows.count:
            return self.rows.stored()
        return np.unique(self.rows.pick(np.flatnonzero(self._units))[0])

    def identity(self) -> dict[str, Any]:
        """By which two sets of draws are told apart."""
        return {**self.rows.identity(), "samples": self.count, "weights_digest": self._digest}

    def chunk_edges(self, offset: int) -> Rows:
        """Draws before each chunk, and all; int64, (chunks + 1,)."""
        return self._draws_before(self._sums, offset)

    def row_edges(self, chunks: Rows, offset: int) -> tuple[Rows, Rows, Rows]:
        """Draws up to each row of some chunks.

        Parameters
        ----------
        chunks : ndarray
            int64, (c,).
        offset : int
            Of the first point, in units.

        Returns
        -------
        places, edges, counts : ndarray
            int64, (n,), (n,) and (c,): the places of the chunks' rows in stored order, the draws from the line's
            beginning to each one's end, and rows in each chunk.
        """
        begins = self.rows.begins(chunks)
        counts = self.rows.begins(chunks + 1) - begins
        places = ranges(begins, counts)
        units = self._units[places]
        sums = np.cumsum(units)
        heads = np.cumsum(counts) - counts
        sums += np.repeat(self._sums[chunks] - (sums[heads] - units[heads]), counts)
        return places, self._draws_before(sums, offset), counts

    def _draws_before(self, units: Rows, offset: int) -> Rows:
        """Points below places of the line: point k is at (k x line + offset) / count."""
        # That is the floor of (count x units + line - 1 - offset) / line, whose parts have more than 64 bits. The
        # quotient in floating point is near. What it leaves is small: exact, where all is computed modulo 2^64.
        near = (units * (self.count / self._line)).astype(np.int64)
        rest = units.view(np.uint64) * np.uint64(self.count)
        rest += np.uint64(self._line - 1 - offset)
        rest -= near.view(np.uint64) * np.uint64(self._line)
        near += rest.view(np.int64) // self._line
        return near


class EpochDraws:
    """The rows that one epoch draws, chunk by chunk; chunks that it draws nothing from are not among them.

    Parameters
    ----------
    rows : WeightedRows
    offset : int
        Of the first point, in units.
    """

    def __init__(self, rows: WeightedRows, offset: int) -> None:
        self._weighted, self._offset = rows, offset
        self.count, self.unit_rows = rows.count, rows.unit_rows
        edges = rows.chunk_edges(offset)
        self._drawn = np.flatnonzero(np.diff(edges))
        self._edges = np.append(edges[self._drawn], self.count)
        self.chunks = len(self._drawn)

    def lengths(self) -> Rows:
        """Draws from each chunk, 1 or more; int64, (chunks,)."""
        return np.diff(self._edges)

    def take(self, chunks: Rows, firsts: Rows, lasts: Rows) -> tuple[Rows, Rows]:
        """Rows of the file, and their indices in the dataset, of draws ``firsts`` to ``lasts - 1`` of some chunks."""
        places, edges, counts = self._weighted.row_edges(self._drawn[chunks], self._offset)
        lows = self._edges[chunks] + firsts
        edges = np.clip(edges, np.repeat(lows, counts), np.repeat(self._edges[chunks] + lasts, counts))
        copies = np.diff(edges, prepend=0)
        heads = np.cumsum(counts) - counts
        copies[heads] = edges[heads] - lows
        return self._weighted.rows.pick(np.repeat(places, copies))

    def pick(self, places: Rows) -> tuple[Rows, Rows]:
        """Rows of the file, and their indices in the dataset, of draws counted in stored order."""
        order = np.argsort(places, kind="stable")
        draws = places[order]
        found = np.empty(len(draws), np.int64)
        for first, last, chunks in self._groups(np.searchsorted(self._edges, draws, "right") - 1):
            rows, edges, _ = self._weighted.row_edges(self._drawn[chunks], self._offset)
            found[order[first:last]] = rows[np.searchsorted(edges, draws[first:last], "right")]
        return self._weighted.rows.pick(found)

    def _groups(self, owners: Rows) -> Iterator[tuple[int, int, Rows]]:
        """Cut ascending chunk numbers, so that each part is of few chunks: its first, its end, and its chunks."""
        most = max(1, _BLOCK_ROWS // self.unit_rows)
        chunks, heads = np.unique(owners, return_index=True)
        heads = np.append(heads, len(owners))
        for low in range(0, len(chunks), most):
            high = min(low + most, len(chunks))
            yield int(heads[low]), int(heads[high]), chunks[low:high]


def _in_units(weights: npt.NDArray[np.float64]) -> Rows:
    """Weights as whole numbers, equal ones as equal ones, whose sum is some 2^60; int64, (n,)."""
    count = len(weights)
    # Powers of two leave the digits as they are. First one for which even a row of all that weight would do.
    power = _LINE_BITS - count.bit_length() - int(np.frexp(weights.max())[1])
    coarse = sum(int(part.sum()) for _, part in _scaled(weights, power))
    power += _LINE_BITS - (coarse + count).bit_length()
    units = np.empty(count, np.int64)
    for low, part in _scaled(weights, power):
        units[low : low + len(part)] = part
    return units


def _scaled(weights: npt.NDArray[np.float64], power: int) -> Iterator[tuple[int, Rows]]:
    """Weights times a power of two, rounded, a block at a time: where it begins, and int64, (n,)."""
    for low in range(0, len(weights), _BLOCK_ROWS):
        yield low, np.rint(np.ldexp(weights[low : low + _BLOCK_ROWS], power)).astype(np.int64)
