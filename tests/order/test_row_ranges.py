"""Rows by the chunks they lie in: consecutive ones by arithmetic, chosen ones by tables."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from h5pack.order.row_ranges import RowRange, RowSet, RowSubset


@dataclass(frozen=True)
class Slow:
    """A row set without arithmetic: for each chunk its (row, index) pairs."""

    chunks: list[list[tuple[int, int]]]

    @classmethod
    def of(cls, pairs: list[tuple[int, int]], chunk_rows: int) -> Slow:
        stored = sorted(pairs, key=lambda pair: pair[0])
        return cls([list(group) for _, group in itertools.groupby(stored, key=lambda pair: pair[0] // chunk_rows)])

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [pair for chunk in self.chunks for pair in chunk]


def zipped(found: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]) -> list[tuple[int, int]]:
    assert found[0].dtype == found[1].dtype == np.int64
    return list(zip(found[0].tolist(), found[1].tolist(), strict=True))


def require_equal(rows: RowSet, slow: Slow, data: st.DataObject) -> None:
    """Every answer of a row set is the slow one's."""
    assert rows.count == rows.identity()["rows"] == len(slow.pairs)
    assert rows.chunk_count == len(slow.chunks)
    assert rows.chunk_lengths().tolist() == [len(chunk) for chunk in slow.chunks]
    assert list(rows.unique_rows()) == sorted({row for row, _ in slow.pairs})
    assert rows.unique_count == len(rows.unique_rows())
    assert rows.repeats_rows == (rows.unique_count < rows.count)
    places = data.draw(st.lists(st.integers(0, max(0, rows.count - 1)), max_size=8 if rows.count else 0))
    assert zipped(rows.rows_at(np.array(places, np.int64))) == [slow.pairs[place] for place in places]
    if not rows.chunk_count:
        return
    assert rows.max_rows(2) >= 2 * max(len(chunk) for chunk in slow.chunks)
    everything = np.arange(rows.chunk_count)
    assert zipped(rows.rows_in_chunks(everything, np.zeros_like(everything), rows.chunk_lengths())) == slow.pairs
    numbers = data.draw(st.lists(st.integers(0, rows.chunk_count - 1), min_size=1, max_size=6))
    cuts = [sorted(data.draw(st.tuples(*[st.integers(0, len(slow.chunks[number]))] * 2))) for number in numbers]
    expected = [
        pair for number, (low, high) in zip(numbers, cuts, strict=True) for pair in slow.chunks[number][low:high]
    ]
    firsts, lasts = np.array(cuts, np.int64).T
    assert zipped(rows.rows_in_chunks(np.array(numbers), firsts, lasts)) == expected


@given(st.integers(0, 60), st.integers(0, 80), st.integers(1, 12), st.data())
def test_a_span_is_as_its_rows_one_by_one(start: int, count: int, chunk_rows: int, data: st.DataObject) -> None:
    slow = Slow.of([(start + index, index) for index in range(count)], chunk_rows)
    span = RowRange(start, start + count, chunk_rows)
    require_equal(span, slow, data)
    require_equal(RowSubset(np.arange(start, start + count), np.arange(count), chunk_rows), slow, data)
    lengths = np.full(span.chunk_count, chunk_rows)
    for chunk, missing in span.short_chunks or ():
        assert 0 <= missing < chunk_rows
        lengths[chunk] -= missing
    assert lengths.tolist() == span.chunk_lengths().tolist()


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 12), st.data())
def test_chosen_rows_with_repeats(chosen: list[int], chunk_rows: int, data: st.DataObject) -> None:
    indices = data.draw(st.permutations(range(len(chosen))))
    chosen.sort()
    slow = Slow.of(list(zip(chosen, indices, strict=True)), chunk_rows)
    rows = RowSubset(np.array(chosen, np.int64), np.array(indices, np.int64), chunk_rows)
    require_equal(rows, slow, data)
    assert rows.max_rows(1) == max((len(chunk) for chunk in slow.chunks), default=0)


def test_a_span_of_a_billion_rows_is_arithmetic() -> None:
    span = RowRange(10**9, 2 * 10**9 + 5, 1000)
    assert (span.count, span.chunk_count, span.max_rows(1)) == (10**9 + 5, 10**6 + 1, 1000)
    assert zipped(span.rows_in_chunks(np.array([10**6, 0]), np.array([3, 998]), np.array([5, 1000]))) == [
        *((2 * 10**9 + 3, 10**9 + 3), (2 * 10**9 + 4, 10**9 + 4)),
        *((10**9 + 998, 998), (10**9 + 999, 999)),
    ]


def test_identities_tell_row_sets_apart_and_are_numbers_and_texts() -> None:
    some, numbers = np.array([1, 3, 8]), np.array([1, 0, 2])
    sets = [
        *(RowRange(0, 9, 3), RowRange(1, 10, 3), RowRange(0, 10, 3), RowRange(0, 9, 2)),
        *(RowSubset(some, numbers, 3), RowSubset(some, numbers + 1, 3), RowSubset(some + 1, numbers, 3)),
        *(RowSubset(some, numbers, 2), RowSubset(some[:2], numbers[:2], 3), RowSubset(some, numbers[::-1], 3)),
    ]
    texts = [json.dumps(rows.identity(), sort_keys=True) for rows in sets]
    assert len(set(texts)) == len(sets)
    assert RowSubset(some, numbers, 3).identity() == sets[4].identity()
    # Pinned: states that were saved hold it.
    assert RowRange(2, 9, 3).identity() == {"start": 2, "rows": 7, "chunk_rows": 3}
    assert sets[4].identity() == {"rows": 3, "chunk_rows": 3, "rows_digest": 3314661839}
