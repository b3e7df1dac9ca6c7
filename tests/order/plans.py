"""What the tests of orders share: random epochs and the batches of a plan."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from h5pack.order.row_ranges import Rows
from h5pack.order.window import ChunkGroup, OrderPlan

MANY = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
SHUFFLES: list[str | bool] = ["window", "full", "chunk", False]
EPOCHS = st.integers(0, 3)


def targets(group: ChunkGroup) -> tuple[Rows, Rows]:
    """Return the batch and the slot of each row of a group, counted out span by span."""
    slots = np.array([(batch, slot + number) for batch, slot, count in group.spans for number in range(count)])
    assert np.array_equal(np.sort(group.positions), np.arange(len(slots)))
    assert len(group.rows) == len(group.indices) == len(slots)
    batches, slots = slots[group.positions].T
    return batches, slots


def batches(plan: OrderPlan, epoch: int = 0, first: int = 0) -> list[list[int]]:
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
