"""Joined segments put the same rows to the same places, within their bounds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from h5pack.feed.joined_segments import join_segments
from h5pack.feed.order import OrderPlan, Segment
from h5pack.feed.row_set import SpanRows
from tests.feed.test_order import SOME, epochs, plans


def placed(segments: Iterable[Segment]) -> dict[tuple[int, int], tuple[int, int]]:
    """Row and index at each slot of each batch; a slot that is filled twice fails."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for segment in segments:
        assert sorted(segment.places.tolist()) == list(range(len(segment.rows)))
        owners, slots = segment.slots(segment.places)
        for owner, slot, row, index in zip(owners, slots, segment.rows, segment.indices, strict=True):
            key = segment.spans[owner][0], int(slot)
            assert key not in found
            found[key] = int(row), int(index)
    return found


@SOME
@given(plan=plans(), epoch=epochs, most_rows=st.integers(1, 60), most_batches=st.integers(1, 5))
def test_joined_segments_hold_the_same_rows_at_the_same_places(
    plan: OrderPlan, epoch: int, most_rows: int, most_batches: int
) -> None:
    before = list(plan.segments(epoch))
    after = list(join_segments(plan.segments(epoch), most_rows, most_batches))
    assert placed(after) == placed(before)
    assert len(after) <= len(before)
    lengths = {len(segment.rows) for segment in before}
    for segment in after:
        assert len(segment.rows) <= most_rows or len(segment.rows) in lengths
        assert segment.last - segment.first < max(most_batches, plan.span)
        batches = [span[0] for span in segment.spans]
        assert batches == sorted(batches)
    # What makes a pipeline never stand still: no segment goes back behind the first batch of one before it.
    firsts = [segment.first for segment in after]
    assert firsts == sorted(firsts)


def test_single_row_chunks_come_in_few_segments() -> None:
    plan = OrderPlan(SpanRows(0, 4_096, 1), 256, window=16)
    assert len(list(plan.segments(0))) == 256
    joined = list(join_segments(plan.segments(0), 144, plan.span))
    assert {len(segment.rows) for segment in joined[:-1]} == {144}
    assert np.array_equal(np.sort(np.concatenate([segment.rows for segment in joined])), np.arange(4_096))
