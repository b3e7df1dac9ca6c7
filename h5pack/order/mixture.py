"""The order of a mixture: rows of several packs in fixed proportions, each pack in an order of its own.

The order of a mixture is endless, and each epoch is a section of it. A *schedule* says which pack each row comes from;
it repeats after a *period* of rows. Each pack has a plan of its own (`OrderPlan`), whose epochs follow each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from h5pack.order.permutation import derive_key
from h5pack.order.row_ranges import Rows, RowSet
from h5pack.order.window import BatchPlan, ChunkGroup, OrderPlan
from h5pack.system.properties import cached_property

_VERSION = 1
_PACK_BATCH = 1_024
"""Batch size in the plans of the packs.

It does not affect the shuffle "window", for which each chunk group is a window. With the shuffle "full", a chunk group
has this many rows. Otherwise it is one chunk, or several smaller chunks with up to this many rows in all.
"""


@dataclass(frozen=True, kw_only=True)
class MixturePlan(BatchPlan):
    """The endless order of a mixture.

    Step s delivers the rows ``s * global_batch`` to ``(s + 1) * global_batch - 1`` of this order to all ranks together.
    An epoch consists of `num_batches` steps; s counts the steps of all epochs.

    Each `ChunkGroup` of this plan has the rows of one batch. If a pack has a small share, the rows of its shuffle
    window are spread over many batches, and filling all these batches together could take any amount of memory.
    Instead, the rows of a window are read into the page cache (see `ChunkGroup.upcoming`) when the first rows of the
    pack's previous window are needed.
    """

    packs: tuple[RowSet, ...]  # the rows of each pack
    counts: tuple[int, ...]  # rows of each pack in one period
    num_samples: int  # rows per epoch over all ranks
    # Returns the rows of the file for dataset indices; both int64, (n,). Samplers, which read no file, use the default.
    file_rows: Callable[[Rows], Rows] = np.asarray

    is_sequential = reads_again = repeats_rows = True

    @cached_property
    def plans(self) -> list[OrderPlan]:
        """The order of each pack for a single rank."""
        plan = OrderPlan(self.rows, _PACK_BATCH, shuffle=self.shuffle, window=self.window)
        return [replace(plan, rows=rows, seed=derive_key(self.seed, number)) for number, rows in enumerate(self.packs)]

    @cached_property
    def global_batch(self) -> int:
        """Number of rows per step over all ranks."""
        return self.batch_size * self.num_replicas

    @cached_property
    def num_batches(self) -> int:
        return (self.num_samples + (0 if self.drop_last else self.global_batch - 1)) // self.global_batch

    def batch_rows(self, batch: int) -> int:
        return self.batch_size

    @cached_property
    def max_group_batches(self) -> int:
        # Each group has one batch. With the bound of an ordinary order, `merge_groups` merges several of them: on warm
        # files, batches of 64 images of 3 KB were then read 5 times as fast.
        ordinary = OrderPlan(self.rows, self.batch_size, shuffle=self.shuffle, window=self.window)
        return min(self.num_batches, ordinary.max_group_batches)

    @cached_property
    def owners(self) -> Rows:
        """The index of the pack from which each row of a period comes; int64 (period,)."""
        return schedule(self.counts)

    @cached_property
    def places(self) -> list[Rows]:
        """For each pack, the positions in a period of the rows from this pack; ``places[i]`` is int64 (counts[i],)."""
        return [np.flatnonzero(self.owners == number) for number in range(len(self.packs))]

    def identity(self) -> dict[str, Any]:
        return {
            "mixture": _VERSION,
            "packs": [{**plan.identity(), "global_batch": None} for plan in self.plans],
            "counts": [*self.counts],
            "samples": self.num_samples,
            "drop_last": self.drop_last,
            "global_batch": self.global_batch,
        }

    def chunk_groups(self, epoch: int, first: int = 0) -> Iterator[ChunkGroup]:
        upcoming: list[Rows] = []

        def begun(number: int, start: int, indices: Rows) -> None:
            ranks = self.slots_of(number, start, len(indices)) // self.batch_size
            upcoming.append(np.sort(self.file_rows(indices[ranks == self.rank])))

        steps = self.steps(epoch * self.num_batches + first, begun)
        own = slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        for batch in range(first, self.num_batches):
            indices = next(steps)[own]
            rows = self.file_rows(indices)
            order = np.argsort(rows, kind="stable")
            read = tuple(part for part in upcoming if len(part))
            upcoming.clear()
            yield ChunkGroup(rows[order], indices[order], order, [(batch, 0, self.batch_size)], read)

    def steps(self, first: int, begun: Callable[[int, int, Rows], None]) -> Iterator[Rows]:
        """Yield the dataset indices, int64 (global_batch,), of each step from step `first` on, without an end.

        ``begun(number, start, indices)`` is called for each chunk group of pack `number`, one group before its rows are
        needed. `indices`, int64 (n,), are the dataset indices of rows `start` to ``start + n - 1`` of the pack's order,
        counted from the beginning of its first epoch.
        """
        period = len(self.owners)
        whole, rest = divmod(first * self.global_batch, period)
        before = np.bincount(self.owners[:rest], minlength=len(self.packs)).tolist()
        orders = [
            _PackOrder(_pack_groups(self, number, whole * count + done, begun))
            for number, (count, done) in enumerate(zip(self.counts, before, strict=True))
        ]
        offsets = np.arange(self.global_batch)
        while True:
            owners = self.owners[(first * self.global_batch + offsets) % period]
            indices = np.empty(self.global_batch, np.int64)
            for number, order in enumerate(orders):
                mine = np.flatnonzero(owners == number)
                indices[mine] = order.take(len(mine))
            yield indices
            first += 1

    def slots_of(self, number: int, start: int, count: int) -> Rows:
        """Return the slots (indices within a step) of rows `start` to ``start + count - 1`` in the order of a pack.

        `number` is the index of the pack. The result is int64, (count,).
        """
        whole, rest = np.divmod(start + np.arange(count), self.counts[number])
        slots: Rows = (whole * len(self.owners) + self.places[number][rest]) % self.global_batch
        return slots


class _PackOrder:
    """The endless order of a pack, whose chunk groups come from `groups` as arrays of dataset indices."""

    def __init__(self, groups: Iterator[Rows]) -> None:
        self._groups, self._rows = groups, np.empty(0, np.int64)
        # Begin each chunk group one group early, so that its rows can be read before they are needed.
        self._ahead = next(groups)

    def take(self, count: int) -> Rows:
        """Return the dataset indices of the next rows, int64 (count,)."""
        while len(self._rows) < count:
            self._rows, self._ahead = np.concatenate((self._rows, self._ahead)), next(self._groups)
        found, self._rows = self._rows[:count], self._rows[count:]
        return found


def _pack_groups(
    mixture: MixturePlan, number: int, first: int, begun: Callable[[int, int, Rows], None]
) -> Iterator[Rows]:
    """Yield the dataset indices of each chunk group of pack `number`, without an end.

    The first index is that of row `first` of the pack's order. Before indices are yielded, ``begun(number, start,
    indices)`` is called, where `start` is the number of their first row in the pack's order.
    """
    plan, start = mixture.plans[number], sum(rows.count for rows in mixture.packs[:number])
    epoch, row = divmod(first, plan.rows.count)
    batch, skipped = divmod(row, _PACK_BATCH)
    while True:
        for group in plan.chunk_groups(epoch, batch):
            indices = group.in_slot_order(group.indices)[skipped:] + start
            skipped = max(0, skipped - len(group.indices))
            if len(indices):
                begun(number, first, indices)
                first += len(indices)
                yield indices
        epoch, batch = epoch + 1, 0


def schedule(counts: Sequence[int]) -> Rows:
    """Return a sequence, int64 (sum of counts,), with ``counts[i]`` copies of each number i, spread evenly.

    Among the first n items, the number of copies of i differs from the share of i, ``n * counts[i] / sum(counts)``, by
    less than 1. For this, copy j (from 0) of i must be at one of the positions at which the share of i grows from j to
    j + 1. The last of these positions is the copy's deadline. Each position gets the copy with the earliest deadline
    among the copies allowed there. This finds a position for every copy (Baruah, Cohen, Plaxton and Varvel 1996,
    "Proportionate progress").
    """
    whole = sum(counts)
    later = [(0, number, 0) for number, count in enumerate(counts) if count]
    due: list[tuple[int, int, int]] = []
    order = np.empty(whole, np.int64)
    for position in range(whole):
        while later and later[0][0] <= position:
            _, number, row = heapq.heappop(later)
            heapq.heappush(due, (-(-(row + 1) * whole // counts[number]), number, row))
        _, number, row = heapq.heappop(due)
        order[position] = number
        if row + 1 < counts[number]:
            heapq.heappush(later, ((row + 1) * whole // counts[number], number, row + 1))
    return order
