"""Drawing rows by class or row weights: systematic resampling, which keeps the draws of a chunk together.

The rows, in the file's order, are segments of a line. The length of a segment is the row's weight. An epoch with n
draws places n equally spaced points on the line, shifted by an offset that is random in each epoch. A row is drawn once
for each point on its segment. So the number of copies of a row is its share of the draws, rounded down or up, and the
mean of that number over many epochs is exactly the share.

All arithmetic is in integers: a weight is a number of *units*, and the line is about 2^60 units long. Sums of units are
exact in whatever order they are added, so the draws are the same on every machine, and rounding never repeats or loses
a row.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.order.row_ranges import EpochRows, Rows, RowSampler, RowSet
from h5pack.system.arrays import range_indices

MAX_SAMPLES = 1 << 48
"""Maximum draws per epoch. Up to this number, the floating-point quotient in `draws_before` is wrong by less than one,
so that the function can correct it."""

_LINE_BITS = 60
_BLOCK_ROWS = 1 << 16


def balanced_weights(labels: Rows, unlabeled: int | None) -> npt.NDArray[np.float64] | None:
    """Return weights, float64 (n,), with an equal sum for each class of `labels`, int64 (n,).

    Rows with the label `unlabeled` (None: no label is special) are in no class and get weight 0. Returns None if no
    row is in a class.
    """
    first = int(labels.min(initial=0))
    if int(labels.max(initial=0)) - first < max(len(labels), _BLOCK_ROWS):
        numbers = labels - first if first else labels  # For many labels, `np.unique` would take 20 times as long.
    else:
        numbers = np.unique(labels, return_inverse=True)[1]
    weights: npt.NDArray[np.float64] = (1 / np.maximum(np.bincount(numbers), 1))[numbers]
    if unlabeled is not None:
        weights[labels == unlabeled] = 0
    return weights if weights.any() else None


class WeightedRows(RowSampler):
    """A `RowSampler` that draws `num_samples` rows per epoch, at most `MAX_SAMPLES`, in proportion to their weights.

    `weights`, float64 (rows.count,), are in the file's order. Each must be finite and at least 0, and at least one must
    be above 0. The object does not keep a reference to the array.
    """

    repeats_rows = True

    def __init__(self, rows: RowSet, weights: npt.NDArray[np.float64], num_samples: int) -> None:
        self.rows, self.count, self.chunk_rows = rows, num_samples, rows.chunk_rows
        self._digest = zlib.crc32(np.ascontiguousarray(weights, "<f8").data)
        self._units = _in_units(weights)
        sums = np.add.reduceat(self._units, rows.chunk_starts(np.arange(rows.chunk_count)))
        self.sums: Rows = np.concatenate(([0], np.cumsum(sums)))  # units before each chunk, then the units of all rows
        self._line = int(self.sums[-1])
        self._drawable = int(np.count_nonzero(self._units))

    def epoch_rows(self, key: int) -> EpochDraws:
        """Return the draws of an epoch. The upper 53 bits of the random `key` determine the offset of its points."""
        return EpochDraws(self, (key >> 11) * self._line >> 53)

    def max_rows(self, chunks: int) -> int:
        """Return an upper bound on the rows drawn from `chunks` chunks that an epoch reads one after the other."""
        sums = np.diff(self.sums)
        others = min(chunks, len(sums)) - 1
        heaviest = np.partition(sums, len(sums) - 1 - others)[-1 - others :]
        # Padding repeats the beginning of the order at its end. So one of the chunks can occur twice, and the heaviest
        # chunk is counted twice.
        units = int(heaviest.sum()) + int(heaviest.max())
        return -(-self.count * units // self._line) + others + 1

    def unique_rows(self) -> range | Rows:
        """Return the distinct rows of the file that have at least one unit, ascending; a range, or int64, (n,)."""
        if self._drawable == self.rows.count:
            return self.rows.unique_rows()
        return np.unique(self.rows.rows_at(np.flatnonzero(self._units))[0])

    def identity(self) -> dict[str, Any]:
        return {**self.rows.identity(), "samples": self.count, "weights_digest": self._digest}

    def row_edges(self, chunks: Rows, offset: int) -> tuple[Rows, Rows, Rows]:
        """Return (positions, edges, counts) for the rows of `chunks`, int64 (c,).

        `positions`, (n,), are the positions of these rows in the `RowSet`. ``edges[i]`` is the number of the epoch's
        draws of all rows of the file up to and including the row at ``positions[i]``; the shape is (n,). `counts`,
        (c,), has the number of rows in each chunk. `offset` is the epoch's random offset: the first point on the line
        of weights is at ``offset / count`` units (see the module's docstring).
        """
        starts = self.rows.chunk_starts(chunks)
        counts = self.rows.chunk_starts(chunks + 1) - starts
        positions = range_indices(starts, counts)
        units = self._units[positions]
        sums = np.cumsum(units)
        heads = np.cumsum(counts) - counts
        sums += np.repeat(self.sums[chunks] - (sums[heads] - units[heads]), counts)
        return positions, self.draws_before(sums, offset), counts

    def draws_before(self, units: Rows, offset: int) -> Rows:
        """Return, for each position on the line of weights, the number of the epoch's draws before this position.

        `units` are the positions in units; they and the result are int64, (n,). The point of draw k is at
        (k x line + offset) / count, where `line` is the length of the line.
        """
        # The result is the floor of (count x units + line - 1 - offset) / line, but the product exceeds 64 bits. So
        # compute an approximate quotient in floating point, then correct it by the remainder. The remainder is small,
        # so it is exact although its terms are computed modulo 2^64.
        near = (units * (self.count / self._line)).astype(np.int64)
        rest = units.view(np.uint64) * np.uint64(self.count)
        rest += np.uint64(self._line - 1 - offset)
        rest -= near.view(np.uint64) * np.uint64(self._line)
        near += rest.view(np.int64) // self._line
        return near


class EpochDraws(EpochRows):
    """The rows that one epoch draws. Chunks without draws are left out; the others are numbered consecutively."""

    def __init__(self, rows: WeightedRows, offset: int) -> None:
        self._weighted, self._offset = rows, offset
        self.count, self.chunk_rows = rows.count, rows.chunk_rows
        edges = rows.draws_before(rows.sums, offset)
        self._drawn = np.flatnonzero(np.diff(edges))
        self._edges = np.append(edges[self._drawn], self.count)
        self.chunk_count = len(self._drawn)

    def chunk_lengths(self) -> Rows:
        return np.diff(self._edges)

    def rows_in_chunks(self, chunks: Rows, starts: Rows, stops: Rows) -> tuple[Rows, Rows]:
        positions, edges, counts = self._weighted.row_edges(self._drawn[chunks], self._offset)
        lows = self._edges[chunks] + starts
        edges = np.clip(edges, np.repeat(lows, counts), np.repeat(self._edges[chunks] + stops, counts))
        copies = np.diff(edges, prepend=0)
        heads = np.cumsum(counts) - counts
        copies[heads] = edges[heads] - lows
        return self._weighted.rows.rows_at(np.repeat(positions, copies))

    def rows_at(self, positions: Rows) -> tuple[Rows, Rows]:
        order = np.argsort(positions, kind="stable")
        draws = positions[order]
        found = np.empty(len(draws), np.int64)
        for first, last, chunks in self._groups(np.searchsorted(self._edges, draws, "right") - 1):
            rows, edges, _ = self._weighted.row_edges(self._drawn[chunks], self._offset)
            found[order[first:last]] = rows[np.searchsorted(edges, draws[first:last], "right")]
        return self._weighted.rows.rows_at(found)

    def _groups(self, owners: Rows) -> Iterator[tuple[int, int, Rows]]:
        """Divide ascending chunk numbers into slices; yield (start, stop, distinct numbers) of each slice.

        A slice has few distinct numbers, so that `row_edges` needs little memory.
        """
        max_chunks = max(1, _BLOCK_ROWS // self.chunk_rows)
        chunks, heads = np.unique(owners, return_index=True)
        heads = np.append(heads, len(owners))
        for low in range(0, len(chunks), max_chunks):
            high = min(low + max_chunks, len(chunks))
            yield int(heads[low]), int(heads[high]), chunks[low:high]


def _in_units(weights: npt.NDArray[np.float64]) -> Rows:
    """Scale weights to integers whose sum is about 2^60; int64 (n,). Equal weights stay equal."""
    count = len(weights)
    # Scaling by a power of two keeps all digits of a weight. First use a power with which the sum would not overflow
    # even if all rows had the largest weight. The sum of these scaled weights then determines the final power.
    power = _LINE_BITS - count.bit_length() - int(np.frexp(weights.max())[1])
    coarse = sum(int(part.sum()) for _, part in _scaled(weights, power))
    power += _LINE_BITS - (coarse + count).bit_length()
    units = np.empty(count, np.int64)
    for low, part in _scaled(weights, power):
        units[low : low + len(part)] = part
    return units


def _scaled(weights: npt.NDArray[np.float64], power: int) -> Iterator[tuple[int, Rows]]:
    """Multiply weights by 2**power and round them. Yield blocks: (index of the first weight, results as int64 (n,))."""
    for low in range(0, len(weights), _BLOCK_ROWS):
        yield low, np.rint(np.ldexp(weights[low : low + _BLOCK_ROWS], power)).astype(np.int64)
