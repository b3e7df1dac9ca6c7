"""Rows of several packs in fixed proportions."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.order.mixture import schedule


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any))
@settings(deadline=None, max_examples=50)
def test_every_prefix_of_a_schedule_is_within_one_row(counts: list[int]) -> None:
    order = schedule(counts).tolist()
    whole, seen = sum(counts), Counter[int]()
    assert len(order) == whole
    for done, number in enumerate(order, start=1):
        seen[number] += 1
        for other, count in enumerate(counts):
            assert abs(seen[other] - Fraction(done * count, whole)) < 1
    assert [seen[number] for number in range(len(counts))] == counts
