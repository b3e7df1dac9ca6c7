"""Permutations: each item once, the same in every release, in no memory where they are large."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5pack.order import permutation
from h5pack.order.permutation import TABLE_ROWS, Permutation, derive_key
from h5pack.system.arrays import shuffled


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Permutations of any size as a sorted table, or computed item by item."""
    monkeypatch.setattr(permutation, "TABLE_ROWS", {"table": 1 << 62, "computed": 0}[request.param])
    return str(request.param)


WAYS = pytest.mark.parametrize("way", ["table", "computed"], indirect=True)


def items(count: int, key: int) -> list[int]:
    return Permutation(count, key).items_at(np.arange(count)).tolist()


def splitmix64(state: int) -> int:
    """One output, as in Steele, Lea, Flood 2014."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@WAYS
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 1000, 4096, 4097, 70_001])
def test_each_item_once_and_where_is_the_inverse(way: str, count: int) -> None:
    numbers = np.arange(count)
    for key in (0, 1, 2**64 - 1, derive_key(count)):
        order = Permutation(count, key)
        found = order.items_at(numbers)
        assert found.dtype == np.int64
        assert np.array_equal(np.sort(found), numbers)
        assert np.array_equal(order.positions_of(found), numbers)
        assert np.array_equal(order.items_at(order.positions_of(numbers)), numbers)


@pytest.mark.parametrize("count", [10**9, 2**32 - 1, 2**32 + 1, 2**40, 10**12])
def test_huge_ones_can_be_asked_anywhere(count: int) -> None:
    order = Permutation(count, 3)
    places = np.concatenate((np.arange(2_000), np.arange(count - 2_000, count)))
    found = order.items_at(places)
    assert 0 <= found.min() <= found.max() < count
    assert np.array_equal(order.positions_of(found), places)
    # Single places, and places out of order, give the same items.
    assert [int(order.items_at(np.array([place]))[0]) for place in places[-3:]] == found[-3:].tolist()
    assert np.array_equal(order.items_at(places[::-1]), found[::-1])


@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_a_table_is_the_items_sorted_by_their_hashes(count: int, key: int) -> None:
    bits = (count - 1).bit_length()
    hashes = {n: splitmix64((n * 0x9E3779B97F4A7C15 + key) % 2**64) % 2 ** (64 - bits) for n in range(count)}
    assert shuffled(count, key).tolist() == sorted(range(count), key=lambda n: (hashes[n], n))


@WAYS
def test_every_key_is_another_order(way: str) -> None:
    assert len({tuple(items(50, key)) for key in (*range(300), *(1 << bit for bit in range(9, 64)))}) == 355


@WAYS
def test_any_item_may_land_anywhere(way: str) -> None:
    """Chi-square over (place, item), 12 x 12; 121 degrees of freedom."""
    tries, count = 1_500, 12
    table = np.zeros((count, count))
    for key in range(tries):
        table[np.arange(count), items(count, derive_key(9, key))] += 1
    assert ((table - tries / count) ** 2 / (tries / count)).sum() < 195
    # The same for places that follow each other: the next item cannot be predicted from this one.
    follows = Counter(
        (b - a) % 12 for key in range(tries) for a, b in zip(*[iter(items(count, derive_key(5, key)))] * 2, strict=True)
    )
    assert 0 not in follows
    expected = 6 * tries / 11
    assert sum((follows[step] - expected) ** 2 / expected for step in range(1, 12)) < 45


def test_no_items() -> None:
    assert shuffled(0, 5).tolist() == []
    assert Permutation(0, 5).items_at(np.arange(0)).tolist() == []


def test_keys_are_pinned() -> None:
    # The first outputs of splitmix64 for the seeds 0 and 1234567, as others publish them.
    assert derive_key(0) == 0xE220A8397B1DCDAF == splitmix64(0)
    assert derive_key(1234567) == 6457827717110365317
    assert (derive_key(), derive_key(1, 2, 3), derive_key(2, 1)) == (0, 15020427595393229491, 16171810823986729605)
    assert derive_key(-1) == derive_key(2**64 - 1) == 16490336266968443936
    assert derive_key(1, 2) == splitmix64(splitmix64(1) ^ 2)


@given(st.lists(st.integers(-(2**63), 2**63), min_size=1, max_size=4), st.data())
def test_each_part_changes_a_key(parts: list[int], data: st.DataObject) -> None:
    changed = list(parts)
    changed[data.draw(st.integers(0, len(parts) - 1))] ^= 1 << data.draw(st.integers(0, 62))
    assert derive_key(*changed) != derive_key(*parts)
    assert 0 <= derive_key(*parts) < 2**64
    assert derive_key(*parts, 0) != derive_key(*parts)


@pytest.mark.parametrize(
    ("way", "count", "key", "order"),
    [
        ("table", 1, 5, [0]),
        ("table", 2, 5, [1, 0]),
        ("table", 10, 0, [0, 9, 5, 7, 2, 3, 4, 6, 1, 8]),
        ("table", 10, 1, [6, 0, 4, 3, 5, 7, 2, 8, 9, 1]),
        ("table", 16, 2**64 - 1, [7, 6, 12, 5, 9, 10, 4, 0, 8, 14, 2, 1, 15, 3, 13, 11]),
        ("computed", 1, 5, [0]),
        ("computed", 2, 5, [0, 1]),
        ("computed", 10, 0, [8, 3, 1, 6, 5, 9, 0, 4, 2, 7]),
        ("computed", 10, 1, [4, 2, 9, 7, 1, 0, 3, 6, 8, 5]),
        ("computed", 17, 3, [14, 7, 16, 12, 8, 13, 11, 6, 10, 5, 2, 4, 15, 0, 3, 1, 9]),
    ],
    indirect=["way"],
)
def test_orders_are_pinned(way: str, count: int, key: int, order: list[int]) -> None:
    """These never change between releases: saved states point into them."""
    assert items(count, key) == order
    assert way == "computed" or shuffled(count, key).tolist() == order


@pytest.mark.parametrize(
    ("count", "key", "ends"),
    [
        (1_000_003, 7, [310242, 427325, 677300, 2340]),
        (TABLE_ROWS + 1, 0, [258995, 806929, 389199, 820977]),
        (10**9, 7, [54565902, 364705507, 208418194, 766552789]),
        (2**40 + 1, 123, [4175281818, 466592511964, 237804514901, 681559859658]),
    ],
)
def test_large_ones_are_pinned(count: int, key: int, ends: list[int]) -> None:
    assert TABLE_ROWS == 1 << 20, "where one way ends and the other begins is part of the order"
    assert Permutation(count, key).items_at(np.array([0, 1, 2, count - 1])).tolist() == ends
