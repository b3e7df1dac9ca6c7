"""The rows that an epoch consists of, grouped by chunk: a range of the file's rows, or any subset of them."""

from __future__ import annotations

import zlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from h5pack.system.arrays import RowNumbers, equal_runs, range_indices, row_array

Rows = npt.NDArray[np.int64]
_BLOCK_ROWS = 1 << 16


class EpochRows(Protocol):
    """The rows of one epoch in the order in which the file stores them, divided into chunks.

    Chunks are numbered 0 to ``chunk_count - 1`` and rows have positions 0 to ``count - 1``, both in the file's order.
    """

    count: int  # number of rows; a row that is drawn several times counts each time
    chunk_count: int  # chunks that contain at least one row of the epoch
    chunk_rows: int  # rows per chunk of the file, or rows that are read together if the dataset is contiguous
    # Pairs (chunk number, number of rows that the chunk lacks to have `chunk_rows` rows). A pair may say 0 rows. If two
    # pairs have the same chunk, the chunk lacks the sum. All chunks without a pair have `chunk_rows` rows. None: chunks
    # may have any length, which `chunk_lengths` returns.
    short_chunks: list[tuple[int, int]] | None = None

    def chunk_lengths(self) -> Rows:
        """Return the number of rows in each chunk; int64, (chunk_count,)."""

    def rows_in_chunks(self, chunks: Rows, starts: Rows, stops: Rows) -> tuple[Rows, Rows]:
        """Return rows ``starts[i]`` to ``stops[i] - 1`` of each chunk ``chunks[i]``.

        The rows of a chunk that belong to the epoch are numbered from 0. The result is two arrays,
        int64 (n,): the rows of the file, and the dataset indices that a sampler yields for these rows.
        """

    def rows_at(self, positions: Rows) -> tuple[Rows, Rows]:
        """Return the rows of the file at the given positions, and their dataset indices; both int64, (n,)."""


class RowSampler(Protocol):
    """The choice of the rows of each epoch: all rows of a range or subset, or random draws by weight."""

    count: int  # rows per epoch
    chunk_rows: int  # rows per chunk of the file, or rows that are read together if the dataset is contiguous
    repeats_rows: bool  # whether an epoch may have several copies of a row

    @property
    def unique_count(self) -> int:
        """Number of distinct rows of the file that an epoch can contain."""
        return len(self.unique_rows())

    def epoch_rows(self, key: int) -> EpochRows:
        """Return the rows of the epoch whose 64-bit random key is `key`."""

    def max_rows(self, chunks: int) -> int:
        """Return an upper bound on the number of rows in `chunks` chunks that an epoch reads one after the other."""

    def unique_rows(self) -> range | Rows:
        """Return the distinct rows of the file that an epoch can contain, ascending; a range, or int64, (n,)."""

    def identity(self) -> dict[str, Any]:
        """Return values that are saved with a state. A state can be loaded only if its values equal these.

        The dict is JSON-serializable.
        """


class RowSet(RowSampler, EpochRows):
    """Rows of the file that are the same in every epoch: the base class of `RowRange` and `RowSubset`.

    `pack_digest` is a checksum of the pack. A saved state includes it, so that the state is not loaded for another pack
    with the same number of rows. None: the pack has no checksums.
    """

    def __init__(self, count: int, chunk_rows: int, pack_digest: int | None) -> None:
        self.count, self.chunk_rows, self._pack_digest = count, chunk_rows, pack_digest

    def epoch_rows(self, key: int) -> RowSet:
        return self

    def chunk_starts(self, chunks: Rows) -> Rows:
        """Return the position of each chunk's first row, int64 (n,); for chunk number `chunk_count`, return `count`."""
        raise NotImplementedError

    def chunk_lengths(self) -> Rows:
        return np.diff(self.chunk_starts(np.arange(self.chunk_count + 1)))

    def identity(self) -> dict[str, Any]:
        digests = {} if self._pack_digest is None else {"pack_digest": self._pack_digest}
        return {"rows": self.count, "chunk_rows": self.chunk_rows, **digests}


class RowRange(RowSet):
    """Consecutive rows of the file: a split, or all rows. The object takes the same memory for any number of rows.

    If `digested` is true, `identity` returns the same as for a `RowSubset` of these rows. Saved states of a
    `ConcatPack` have this form.
    """

    repeats_rows = False

    def __init__(
        self, start: int, stop: int, chunk_rows: int, pack_digest: int | None = None, *, digested: bool = False
    ) -> None:
        super().__init__(stop - start, chunk_rows, pack_digest)
        self.start, self.stop, self._digested = start, stop, digested
        self._chunk = start // chunk_rows
        self.chunk_count = (stop - 1) // chunk_rows - self._chunk + 1 if self.count else 0
        # In the first and the last chunk, some rows may belong to other splits or be past the end of the dataset.
        after = (self._chunk + self.chunk_count) * chunk_rows - stop
        ends = [(0, start - self._chunk * chunk_rows), (self.chunk_count - 1, after)]
        self.short_chunks = ends if self.count else []

    def max_rows(self, chunks: int) -> int:
        return chunks * self.chunk_rows

    def chunk_starts(self, chunks: Rows) -> Rows:
        return np.clip((self._chunk + chunks) * self.chunk_rows, self.start, self.stop) - self.start

    def rows_in_chunks(self, chunks: Rows, starts: Rows, stops: Rows) -> tuple[Rows, Rows]:
        heads = np.maximum(self.start, (self._chunk + chunks) * self.chunk_rows)
        rows = range_indices(heads + starts, stops - starts)
        return rows, rows - self.start

    def rows_at(self, positions: Rows) -> tuple[Rows, Rows]:
        return positions + self.start, positions

    def unique_rows(self) -> range:
        return range(self.start, self.stop)

    def identity(self) -> dict[str, Any]:
        if self._digested:
            return {**super().identity(), "rows_digest": _digest(self.unique_rows(), range(self.count))}
        return {"start": self.start, **super().identity()}


class RowSubset(RowSet):
    """Any rows of the file, in ascending order; a row may be repeated.

    `indices` are the dataset indices that a sampler yields for `rows`; both are int64, (n,).
    """

    def __init__(self, rows: Rows, indices: Rows, chunk_rows: int, pack_digest: int | None = None) -> None:
        super().__init__(len(rows), chunk_rows, pack_digest)
        self._rows, self._indices = rows, indices
        self.repeats_rows = bool((rows[1:] == rows[:-1]).any())
        self._edges = equal_runs(self._rows // chunk_rows)
        self.chunk_count = len(self._edges) - 1
        # Because rows may be repeated, a chunk can have more rows in this subset than in the file.
        self._longest = int(self.chunk_lengths().max(initial=0))

    def max_rows(self, chunks: int) -> int:
        return chunks * self._longest

    def chunk_starts(self, chunks: Rows) -> Rows:
        return self._edges[chunks]

    def rows_in_chunks(self, chunks: Rows, starts: Rows, stops: Rows) -> tuple[Rows, Rows]:
        return self.rows_at(range_indices(self._edges[chunks] + starts, stops - starts))

    def rows_at(self, positions: Rows) -> tuple[Rows, Rows]:
        return self._rows[positions], self._indices[positions]

    def unique_rows(self) -> Rows:
        found: Rows = self._rows[np.diff(self._rows, prepend=-1) != 0]  # np.unique would take longer.
        return found

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "rows_digest": _digest(self._rows, self._indices)}


def _digest(*columns: RowNumbers) -> int:
    """Return the CRC-32 of all numbers as little-endian int64, one column after the other."""
    digest = 0
    for numbers in columns:
        for low in range(0, len(numbers), _BLOCK_ROWS):
            digest = zlib.crc32(row_array(numbers[low : low + _BLOCK_ROWS]).astype("<i8").data, digest)
    return digest
