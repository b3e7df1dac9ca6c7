"""What the tests of orders share: drawn epochs, drawn weights, and the batches of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from h5pack.order.row_ranges import RowRange, Rows, RowSet, RowSubset
from h5pack.order.weights import WeightedRows
from h5pack.order.window import BatchPlan, ChunkGroup

MANY = settings(max_examples=50)
SHUFFLES: list[str | bool] = ["window", "full", "chunk", False]
EPOCHS = st.integers(0, 3)

Drawn = tuple[RowSet, list[float], int]
"""Rows, their weights in stored order, and how many are drawn."""

_weights = st.integers(0, 9).map(float) | st.floats(0, 1) | st.sampled_from([1e-300, 5e-324, 1 / 3, 1e6, 1.7e308])


def subset(rows: Sequence[int], chunk_rows: int) -> RowSubset:
    """Return a subset whose index i is ``rows[i]``; `rows` may be in any order."""
    order = np.argsort(rows, kind="stable")
    return RowSubset(np.array(rows, np.int64)[order], order, chunk_rows)


@st.composite
def weighted(draw: st.DrawFn) -> Drawn:
    start, count, chunk_rows = draw(st.integers(0, 30)), draw(st.integers(1, 60)), draw(st.integers(1, 12))
    rows: RowSet = RowRange(start, start + count, chunk_rows)
    if not draw(st.integers(0, 2)):
        chosen = draw(st.lists(st.integers(0, 80), min_size=count, max_size=count))
        rows = subset(chosen, chunk_rows)
    weights = draw(st.lists(_weights, min_size=count, max_size=count))
    weights[draw(st.integers(0, count - 1))] = draw(_weights.filter(bool))
    return rows, weights, draw(st.integers(1, 150))


def weigh(rows: RowSet, weights: Sequence[float], samples: int) -> WeightedRows:
    return WeightedRows(rows, np.array(weights, np.float64), samples)


def targets(group: ChunkGroup) -> tuple[Rows, Rows]:
    """Return the batch and the slot of each row of a group, counted out span by span."""
    slots = np.array([(batch, slot + number) for batch, slot, count in group.spans for number in range(count)])
    assert np.array_equal(np.sort(group.positions), np.arange(len(slots)))
    assert len(group.rows) == len(group.indices) == len(slots)
    batches, slots = slots[group.positions].T
    return batches, slots


def require_groups(plan: BatchPlan, epoch: int, first: int) -> None:
    """Require that the chunk groups of any plan are as a loader needs them."""
    groups = list(plan.chunk_groups(epoch, first))
    for group in groups:
        numbers = [batch for batch, _, _ in group.spans]
        assert numbers == sorted(set(numbers))
        assert (group.first, group.last) == (numbers[0], numbers[-1])
        assert group.last - group.first < plan.max_group_batches
    assert [group.first for group in groups] == sorted(group.first for group in groups)
    assert plan.max_group_batches <= max(1, plan.num_batches)
    assert not plan.is_sequential or all(one.last <= two.first for one, two in itertools.pairwise(groups))


def batches(plan: BatchPlan, epoch: int = 0, first: int = 0) -> list[list[int]]:
    """Return the indices of each batch of a rank, from `first` on; each slot must be filled exactly once."""
    filled = [np.full(plan.batch_rows(batch), -1) for batch in range(plan.num_batches)]
    for group in plan.chunk_groups(epoch, first):
        for (batch, slot, count), indices in group.split_by_batch(group.indices):
            assert (filled[batch][slot : slot + count] == -1).all(), "two rows in one slot"
            assert len(indices) == count == len(filled[batch][slot : slot + count]), "past the batch's end"
            filled[batch][slot : slot + count] = indices
    assert all((batch == -1).all() for batch in filled[:first])
    assert all((batch != -1).all() for batch in filled[first:]), "a slot is empty"
    return [batch.tolist() for batch in filled[first:]]
