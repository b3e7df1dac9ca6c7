"""Where the rows of a dataset lie that is made of rows of others, which may be in other files."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from h5pack.read.chunk_index import ChunkIndex, contiguous_unit_rows
from h5pack.read.identity import SourceFile

Numbers = npt.NDArray[np.int64]


def _no_numbers() -> Numbers:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Source:
    """A dataset that rows come from.

    Attributes
    ----------
    file : SourceFile
    index : ChunkIndex
        Not itself a `VirtualIndex`.
    """

    file: SourceFile
    index: ChunkIndex


@dataclass(frozen=True)
class Part:
    """Consecutive rows that are consecutive rows of another dataset.

    Attributes
    ----------
    first, rows : int
        Where they begin, and how many they are.
    file : SourceFile
    index : ChunkIndex
        Of the other dataset; perhaps a `VirtualIndex`, and `file` is then the file of that.
    start : int
        The first of them there.
    """

    first: int
    rows: int
    file: SourceFile
    index: ChunkIndex
    start: int


@dataclass(frozen=True)
class VirtualIndex(ChunkIndex):
    """Where a dataset's rows lie, which are rows of others.

    Rows that lie in one chunk of one source make a *piece*; of a contiguous source, rows of about 4 MiB do. The pieces
    are to this dataset what chunks of one size are to others: `chunks_of` gives their numbers.

    Attributes
    ----------
    addresses : ndarray
        int64, (pieces,): byte offset of each piece's first row in its source's file; -1 where it has no storage, or its
        rows are not raw.
    starts : ndarray
        int64, (pieces,): first row of each piece, ascending from 0.
    owners : ndarray
        int64, (pieces,): number of the source of each.
    shifts : ndarray
        int64, (pieces,): to be added to a row, for its number in the source.
    sources : tuple of Source
        Rows that nobody maps are of a source without storage.
    """

    starts: Numbers = field(default_factory=_no_numbers)
    owners: Numbers = field(default_factory=_no_numbers)
    shifts: Numbers = field(default_factory=_no_numbers)
    sources: tuple[Source, ...] = ()

    @cached_property
    def complete(self) -> bool:
        """Whether every raw row has storage."""
        return bool((self.addresses >= 0).all())

    # Asked at each read, and there may be thousands of sources.
    @cached_property
    def raw(self) -> bool:
        """Whether every row's bytes lie in a file as they are."""
        return all(source.index.raw for source in self.sources)

    @property
    def warning(self) -> str | None:
        """Why some rows come through the HDF5 library; None: they are all read directly."""
        for source in self.sources:
            if source.index.reason is not None:
                return f"of its sources, {source.index.name!r} of {source.file.path}: {source.index.reason}"
        return None

    @property
    def decoding_bytes(self) -> int:
        """Memory that giving some rows of a piece takes, besides the rows' own places."""
        if self.raw:
            return 0
        return max(
            self.row_bytes * source.index.unit_rows if source.index.codec is None else source.index.decoding_bytes
            for source in self.sources
            if not is_empty(source.index)
        )

    def chunks_of(self, rows: Numbers) -> Numbers:
        """The number of the piece that each row lies in; int64, (n,)."""
        return np.searchsorted(self.starts, rows, "right") - 1

    def units_of(self, rows: Numbers) -> Numbers:
        """The number of the piece that each row lies in, since units may cut them; int64, (n,)."""
        return self.chunks_of(rows)

    def rows_beside(self, row: int) -> int:
        """Rows of the piece that a row lies in."""
        piece = int(np.searchsorted(self.starts, row, "right"))
        stop = self.rows if piece == len(self.starts) else int(self.starts[piece])
        return stop - int(self.starts[piece - 1])

    def offsets_of(self, rows: Numbers, chunks: Numbers) -> Numbers:
        """Byte offset of each row in its source's file, where rows are raw and `chunks` are their pieces; or -1."""
        begins = self.addresses[chunks]
        offsets = begins + (rows - self.starts[chunks]) * self.row_bytes
        if not self.complete:
            offsets[begins < 0] = -1
        return offsets

    def offset_of(self, row: int) -> int | None:
        """None: its rows lie in other files."""
        return None

    def owners_of(self, chunks: Numbers) -> Numbers:
        """The number of the source that each piece lies in."""
        return self.owners[chunks]

    def fill_of(self, row: int) -> bytes:
        """The fill value of a row that has no storage: that of its source, as stored."""
        return self.sources[self._owner(row)].index.fill

    def describe(self, rows: Numbers, place: int) -> str:
        """The consecutive rows from `place` on, in words, as their source knows them."""
        owner, there = next(self.deal(rows[place:]))
        return self.sources[owner].index.describe(there, 0)

    def deal(self, rows: Numbers) -> Iterator[tuple[int, Numbers]]:
        """Each source's number and its rows, in the order of `rows`, a source again when they come back to it."""
        pieces = self.chunks_of(rows)
        owners, there = self.owners[pieces], rows + self.shifts[pieces]
        edges = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(rows)]
        for first, last in itertools.pairwise(edges):
            if first < last:
                yield int(owners[first]), there[first:last]

    @cached_property
    def files(self) -> frozenset[SourceFile]:
        """The files that rows come from."""
        found = {source.file for source in self.sources if not is_empty(source.index)}
        return frozenset(found).union(*(source.index.files for source in self.sources))

    def _owner(self, row: int) -> int:
        return int(self.owners[self.chunks_of(np.array([row]))[0]])


def is_empty(index: ChunkIndex) -> bool:
    """Whether no row of a dataset has storage, so that nothing of it is ever read."""
    return index.raw and bool((index.addresses < 0).all())


def join_parts(index: ChunkIndex, file: SourceFile, fill: bytes, parts: Sequence[Part]) -> VirtualIndex:
    """The index of a dataset that is made of others' rows.

    Parameters
    ----------
    index : ChunkIndex
        Its name, dtype and shape; it has rows, and they have bytes.
    file : SourceFile
        Its own.
    fill : bytes
        One row of fill values, for rows that are in no part.
    parts : sequence of Part
        Ascending, none over another.
    """
    builder = _Builder(index.row_bytes)
    at = 0
    for part in [*parts, None]:
        stop = index.rows if part is None else part.first
        if at < stop:
            absent = np.full(1, -1, np.int64)
            shape = (stop - at, *index.row_shape)
            hole = ChunkIndex(index.name, index.dtype, shape, stop - at, stop - at, absent, fill)
            builder.add(Part(at, stop - at, file, hole, 0))
        if part is not None:
            builder.add(part)
            at = part.first + part.rows
    unit_rows = builder.unit_rows() or contiguous_unit_rows(index.rows, index.row_bytes)
    joined = [np.concatenate(column) for column in zip(*builder.pieces, strict=True)]
    return VirtualIndex(
        index.name,
        index.dtype,
        index.shape,
        unit_rows,
        unit_rows,
        joined[3],
        starts=joined[0],
        owners=joined[1],
        shifts=joined[2],
        sources=tuple(builder.sources),
    )


class _Builder:
    """Pieces of parts, one part after the other."""

    def __init__(self, row_bytes: int) -> None:
        self.pieces: list[tuple[Numbers, Numbers, Numbers, Numbers]] = []
        self.sources: list[Source] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._known: dict[int, tuple[ChunkIndex, int]] = {}
        self._row_bytes = row_bytes
        self._units: Counter[int] = Counter()

    def add(self, part: Part) -> None:
        """Cut a part into its pieces: first rows, owners, shifts, addresses."""
        index, start, stop, shift = part.index, part.start, part.start + part.rows, part.start - part.first
        if isinstance(index, VirtualIndex):
            low, high = np.searchsorted(index.starts, start, "right") - 1, np.searchsorted(index.starts, stop, "left")
            numbers = np.arange(low, high)
            firsts = np.maximum(index.starts[low:high], start)
            counts = np.diff(np.append(firsts, stop))
            known = np.array([self._number(source) for source in index.sources])
            owners, shifts = known[index.owners[low:high]], index.shifts[low:high] + shift
            for owner in np.unique(owners).tolist():
                self._weigh(self.sources[owner].index, int(counts[owners == owner].sum()))
            self.pieces.append((firsts - shift, owners, shifts, index.offsets_of(firsts, numbers)))
            return
        # Rows without storage may be any number, so they make one piece.
        unit = index.rows if is_empty(index) else index.unit_rows
        firsts = np.append(start, np.arange((start // unit + 1) * unit, stop, unit))
        owner = self._number(Source(part.file, index))
        self._weigh(index, part.rows)
        addresses = index.offsets_of(firsts, index.chunks_of(firsts)) if index.raw else np.full(len(firsts), -1)
        same = np.ones(len(firsts), np.int64)
        self.pieces.append((firsts - shift, owner * same, shift * same, addresses))

    def unit_rows(self) -> int:
        """Rows of the sources' chunks, of the size that most rows are in; 0 where no row has a source."""
        return self._units.most_common(1)[0][0] if self._units else 0

    def _weigh(self, index: ChunkIndex, rows: int) -> None:
        if not is_empty(index):
            self._units[index.unit_rows] += rows

    def _number(self, source: Source) -> int:
        known = self._known.get(id(source.index))
        if known is None:
            # Of rows without storage nothing but their fill value matters.
            what = f"\0{source.index.fill!r}" if is_empty(source.index) else source.index.name
            found = self._numbers.setdefault((source.file.path, what), len(self.sources))
            if found == len(self.sources):
                self.sources.append(source)
            # Together with the index, so that no other one is given its id.
            known = self._known[id(source.index)] = source.index, found
        return known[1]
