"""Index of a virtual dataset, whose rows are stored in source datasets, possibly in other files."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5pack.read.chunk_index import ChunkIndex, RowRanges, SourceDataset, contiguous_group_rows
from h5pack.read.storage import SourceFile
from h5pack.system.arrays import equal_runs
from h5pack.system.properties import cached_property

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MappedRows:
    """A mapping: rows `first` to `first + rows - 1` are stored in another dataset, from its row `start` on.

    `index` is the index of the other dataset, which may itself be virtual, and `file` is the other dataset's file.
    """

    first: int
    rows: int
    file: SourceFile
    index: ChunkIndex
    start: int


@dataclass(frozen=True, kw_only=True)
class VirtualIndex(ChunkIndex):
    """The locations of the rows of a virtual dataset.

    The rows are divided into ranges. A range is a run of rows within one chunk of one source (or about 4 MiB of a
    contiguous source). Ranges replace chunks in the methods and attributes of `ChunkIndex`:

    - `chunks_of` returns range numbers.
    - `addresses` holds the byte offset of each range's first row in the source's file. It is -1 if the range has no
      allocated storage or its rows cannot be read directly.
    - Fill values, and the row numbers in messages, are those of the sources.

    Rows that no mapping covers have a placeholder source. This source has no allocated storage, and the fill value of
    the virtual dataset.
    """

    starts: Integers  # first row of each range, ascending from 0
    source_ids: Integers  # index of each range's source in `sources`
    shifts: Integers  # for each range, a row's number in the source minus its number in this dataset
    sources: tuple[SourceDataset, ...]

    @cached_property
    def complete(self) -> bool:
        # Ranges that are not read directly also have address -1, so this can be False although all rows are stored.
        return bool((self.addresses >= 0).all())

    @cached_property
    def raw(self) -> bool:
        return all(source.index.raw for source in self.sources)

    @property
    def library_text(self) -> str | None:
        for source in self.sources:
            if source.index.library_reason is not None:
                return f"its source {source.index.name!r} in {source.file.path}: {source.index.library_reason}"
        return None

    @property
    def decoding_bytes(self) -> int:
        if self.raw:
            return 0
        return max(
            self.row_bytes * source.index.group_rows if source.index.codec is None else source.index.decoding_bytes
            for source in self.sources
            if not source.index.is_empty
        )

    @property
    def decoded_bytes(self) -> int:
        # A chunk is decoded as a whole, and only once, even if several ranges are parts of it.
        rows = np.array([0 if source.index.codec is None else source.index.chunk_rows for source in self.sources])
        decoded = rows[self.source_ids] > 0
        source_ids = self.source_ids[decoded]
        chunks = (self.starts + self.shifts)[decoded] // rows[source_ids]
        stride = chunks.max(initial=0) + 1
        return int(rows[np.unique(source_ids * stride + chunks) // stride].sum()) * self.row_bytes

    @cached_property
    def files(self) -> frozenset[SourceFile]:
        found = {source.file for source in self.sources if not source.index.is_empty}
        return frozenset(found).union(*(source.index.files for source in self.sources))

    def chunks_of(self, rows: Integers) -> Integers:
        return np.searchsorted(self.starts, rows, "right") - 1

    def groups_of(self, rows: Integers) -> Integers:
        # In a virtual dataset, the rows of one range are read together, rather than `group_rows` rows.
        return self.chunks_of(rows)

    def rows_in_chunk_of(self, row: int) -> int:
        number = int(np.searchsorted(self.starts, row, "right"))
        stop = self.rows if number == len(self.starts) else int(self.starts[number])
        return stop - int(self.starts[number - 1])

    def offsets_of(self, rows: Integers, chunks: Integers) -> Integers:
        begins = self.addresses[chunks]
        offsets = begins + (rows - self.starts[chunks]) * self.row_bytes
        if not self.complete:
            offsets[begins < 0] = -1
        return offsets

    def offset_of(self, row: int) -> int | None:
        return None  # The rows may be in other files.

    def split_by_source(self, rows: Integers) -> Iterator[tuple[SourceFile | None, ChunkIndex, Integers]]:
        numbers = self.chunks_of(rows)
        source_ids, there = self.source_ids[numbers], rows + self.shifts[numbers]
        for first, last in itertools.pairwise(equal_runs(source_ids).tolist()):
            source = self.sources[source_ids[first]]
            yield source.file, source.index, there[first:last]

    def ranges(self, start: int, stop: int) -> RowRanges:
        low, high = np.searchsorted(self.starts, start, "right") - 1, np.searchsorted(self.starts, stop, "left")
        firsts = np.maximum(self.starts[low:high], start)
        addresses = self.offsets_of(firsts, np.arange(low, high))
        return RowRanges(firsts, self.source_ids[low:high], self.shifts[low:high], addresses)

    def fill_of(self, row: int) -> bytes:
        _, source, _ = next(self.split_by_source(np.array([row])))
        return source.fill

    def describe(self, rows: Integers, position: int) -> str:
        _, index, there = next(self.split_by_source(rows[position:]))
        return index.describe(there, 0)


def join_rows(index: ChunkIndex, file: SourceFile, fill: bytes, parts: Sequence[MappedRows]) -> VirtualIndex:
    """Return a virtual index with the name, dtype and shape of `index`, whose rows are stored according to `parts`.

    `parts` must ascend and not overlap. `file` is the file of the virtual dataset. `fill` is one row of its fill
    values, as bytes.
    """
    columns: list[tuple[Integers, Integers, Integers, Integers]] = []
    found: dict[tuple[str, str | bytes], tuple[int, SourceDataset]] = {}
    rows_by_group: Counter[int] = Counter()
    for part in _with_holes(index, file, fill, parts):
        stop, shift = part.start + part.rows, part.start - part.first
        ranges = part.index.ranges(part.start, stop)
        sources = part.index.sources if isinstance(part.index, VirtualIndex) else [SourceDataset(part.file, part.index)]
        source_ids, counts = np.empty_like(ranges.source_ids), np.diff(np.append(ranges.firsts, stop))
        # If the source is itself virtual, the mapping may leave out some of the source's own sources.
        for number in np.unique(ranges.source_ids).tolist():
            own, source = ranges.source_ids == number, sources[number]
            # Sources without allocated storage differ only in their fill values, so one entry stands for all sources
            # of a file with the same fill value.
            key = source.file.path, source.index.fill if source.index.is_empty else source.index.name
            source_ids[own], _ = found.setdefault(key, (len(found), source))
            if not source.index.is_empty:
                rows_by_group[source.index.group_rows] += int(counts[own].sum())
        columns.append((ranges.firsts - shift, source_ids, ranges.shifts + shift, ranges.addresses))
    starts, source_ids, shifts, addresses = (np.concatenate(column) for column in zip(*columns, strict=True))
    group_rows = contiguous_group_rows(index.rows, index.row_bytes)
    if rows_by_group:
        ((group_rows, _),) = rows_by_group.most_common(1)
    return VirtualIndex(
        name=index.name,
        dtype=index.dtype,
        shape=index.shape,
        chunk_rows=group_rows,
        group_rows=group_rows,
        addresses=addresses,
        starts=starts,
        source_ids=source_ids,
        shifts=shifts,
        sources=tuple(source for _, source in found.values()),
    )


def _with_holes(index: ChunkIndex, file: SourceFile, fill: bytes, parts: Sequence[MappedRows]) -> Iterator[MappedRows]:
    """Yield `parts` in order. For rows that no part covers, yield an additional part without allocated storage."""
    at = 0
    for part in [*parts, None]:
        stop = index.rows if part is None else part.first
        if at < stop:
            hole = ChunkIndex(
                name=index.name,
                dtype=index.dtype,
                shape=(stop - at, *index.row_shape),
                chunk_rows=stop - at,
                group_rows=stop - at,
                addresses=np.full(1, -1, np.int64),
                fill=fill,
            )
            yield MappedRows(at, stop - at, file, hole, 0)
        if part is not None:
            yield part
            at = part.first + part.rows
