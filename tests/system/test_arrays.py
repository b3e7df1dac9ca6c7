"""Runs of integers, and pinned shuffles."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5pack.system import arrays
from h5pack.system.arrays import (
    SPLITMIX64_GAMMA,
    RowNumbers,
    consecutive_runs,
    equal_runs,
    hash_sequence,
    limited_runs,
    limited_stops,
    moved_rows,
    row_array,
    shuffled,
    shuffled_split,
    splitmix64,
    splitmix64_array,
)


@pytest.mark.parametrize("rows", [range(4, 9), range(9, 2, -3), range(0), np.array([5, 2, 2])])
def test_row_numbers_as_an_array_and_moved(rows: RowNumbers) -> None:
    assert row_array(rows).tolist() == list(rows)
    assert row_array(rows).dtype == np.int64
    assert [*moved_rows(rows, 3)] == [row + 3 for row in rows]


SMALL = st.lists(st.integers(-2, 4), max_size=30)


def slow_edges(values: list[Any], joins: Callable[[Any, Any], bool]) -> list[int]:
    """Edges found one by one; `joins` says whether the second value continues the run of the first."""
    pairs = enumerate(itertools.pairwise(values), 1)
    return [0, *(place for place, pair in pairs if not joins(*pair)), len(values)] if values else [0]


@given(SMALL)
def test_runs_of_equal_values(values: list[int]) -> None:
    assert equal_runs(np.array(values, np.int64)).tolist() == slow_edges(values, operator.eq)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_runs_in_which_both_columns_count_up(pairs: list[tuple[int, int]]) -> None:
    found = consecutive_runs(*np.array(pairs, np.int64).reshape(-1, 2).T).tolist()
    assert found == slow_edges(pairs, lambda one, other: other == (one[0] + 1, one[1] + 1))


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=9)), st.integers(1, 20))
def test_limited_runs_are_as_long_as_they_may_be(runs: list[list[tuple[int, int]]], max_length: int) -> None:
    """Each run consists of ranges, given by the gap before them and their length."""
    starts, stops, expected = list[int](), list[int](), list[tuple[int, int]]()
    for run in runs:
        at, begin = 0, len(starts)
        for gap, length in run:
            starts.append(at + gap)
            stops.append(at := at + gap + length)
            if at - starts[begin] > max_length and begin < len(starts) - 1:
                expected.append((begin, len(starts) - 1))
                begin = len(starts) - 1
        expected.append((begin, len(starts)))
    edges = np.cumsum([0, *map(len, runs)])
    assert list(limited_runs(edges, np.array(starts, np.int64), np.array(stops, np.int64), max_length)) == expected


def test_the_hash_is_splitmix64_as_others_publish_it() -> None:
    # The first outputs of the generator for the seeds 0 and 1234567.
    assert hash_sequence(1, 0).tolist() == [0xE220A8397B1DCDAF]
    assert hash_sequence(2, 1234567).tolist() == [6457827717110365317, 3203168211198807973]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_the_hash_of_an_array_is_that_of_each_element(values: list[int]) -> None:
    hashed = splitmix64_array(np.array(values, np.uint64))
    assert hashed.tolist() == [splitmix64(value) for value in values]


def test_shuffles_are_pinned() -> None:
    assert shuffled(0, 1).tolist() == []
    assert shuffled(1, 1).tolist() == [0]
    assert shuffled(10, 2**64 - 1).tolist() == [7, 6, 5, 9, 4, 0, 8, 2, 1, 3]
    assert sorted(shuffled(1000, 7).tolist()) == list(range(1000))


@pytest.mark.parametrize("count", [1_999, 2_000, 12_480, 60_000, 60_001])
@pytest.mark.parametrize("bits", [8, 40, 64])
def test_a_shuffle_sorts_by_hash_then_number(count: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weak hashes, many are equal. `shuffled` drops the high bits, as many as `count` has."""

    def weak(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        splitmix64_array(values)
        values &= np.uint64((1 << bits) - 1)
        return values

    monkeypatch.setattr(arrays, "splitmix64_array", weak)
    kept = (1 << (64 - (count - 1).bit_length())) - 1
    hashes = [value & kept for value in hash_sequence(count, 3).tolist()]
    found = shuffled(count, 3)
    assert found.dtype == np.int64
    assert found.tolist() == sorted(range(count), key=hashes.__getitem__)


def slow_shuffled_split(count: int, seed: int, split: int) -> list[int]:
    """The positions, sorted by the whole hash of their number."""
    key = splitmix64((seed * SPLITMIX64_GAMMA + (split + 1) * 0xD1B54A32D192ED03) % 2**64)
    return sorted(range(count), key=hash_sequence(count, key).tolist().__getitem__)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 1000, 65_536, 140_000])
def test_a_split_is_shuffled_by_the_whole_hash(count: int) -> None:
    assert shuffled_split(8, 1, 1).tolist() == [7, 6, 3, 4, 1, 2, 5, 0]
    for seed, split in ((0, 0), (7, 1), (2**63 - 1, 2**32)):
        found = shuffled_split(count, seed, split)
        assert found.dtype == np.int64
        assert found.tolist() == slow_shuffled_split(count, seed, split)


def test_consecutive_items_are_divided_by_their_lengths() -> None:
    assert limited_stops(np.array([2, 3, 5, 1, 9, 0, 0]), 5) == [2, 3, 4, 5, 7]
    assert limited_stops(np.array([7]), 5) == [1]
