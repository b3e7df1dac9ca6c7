"""`MixtureSampler`: batches with rows of several packs in fixed proportions."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from h5pack.data.concat import ConcatPack
from h5pack.data.samplers import BatchOrder, batch_indices, order_text
from h5pack.data.selection import plan_order, select_draws
from h5pack.errors import OptionsError
from h5pack.order.cursor import EpochCursor, IterationState
from h5pack.order.permutation import derive_key
from h5pack.order.window import DEFAULT_WINDOW, OrderPlan
from h5pack.system.parameters import whole_number

Rows = npt.NDArray[np.int64]

_VERSION = 1
_PERIOD = 10_000
_BLOCK_ROWS = 1_024


class MixtureSampler(BatchOrder):
    """Batch sampler that mixes several packs in fixed proportions; a DataLoader's ``batch_sampler``.

    Each pack has a shuffled order of its own, which continues with its next epoch when it is exhausted. So a small pack
    may be repeated several times while a large one is read once.

    Parameters
    ----------
    dataset : ConcatPack
    batch_size : int
        Rows per batch of this rank.
    weights : sequence of float, optional
        Proportions of the packs, above 0. They are exact if they are proportional to integers with a sum of at most
        10,000, else rounded to 1/10,000 of their sum. None: the packs' lengths, but at least 1/5,000 for each.
    num_samples : int, optional
        Number of rows per epoch over all ranks. None: the total number of rows of the packs.
    shuffle : {"window", "full", "chunk", False}
        Order of each pack, as for `ChunkBatchSampler`.
    seed : int
    window : int
        Number of chunks of a pack whose rows are shuffled together.
    drop_last : bool
        If `num_samples` is not a multiple of the global batch (batch size x ranks): True leaves out the remaining rows,
        False draws more rows to fill the last batch.
    rank, num_replicas : int, optional
        As for `ChunkSampler`.

    Raises
    ------
    OptionsError
        If a value is invalid.

    Notes
    -----
    Among any n consecutive rows of the order, the number of rows of a pack differs from the pack's share of n by less
    than 2 + n / 10,000, or by less than 2 if the weights are exact. The order is endless and each epoch is a part of
    it, so all batches are full. If the global batch is the same, each step has the same rows for every number of ranks.
    """

    def __init__(
        self,
        dataset: ConcatPack,
        batch_size: int,
        *,
        weights: Sequence[float] | None = None,
        num_samples: int | None = None,
        shuffle: str | bool = "window",
        seed: int = 0,
        window: int = DEFAULT_WINDOW,
        drop_last: bool = False,
        rank: int | None = None,
        num_replicas: int | None = None,
    ) -> None:
        if not isinstance(dataset, ConcatPack):
            raise OptionsError(
                f"dataset is a {type(dataset).__name__}; give a ConcatPack of the packs", parameters=("dataset",)
            )
        packs = [select_draws(pack)[1] for pack in dataset.datasets]
        for pack, rows in zip(dataset.datasets, packs, strict=True):
            if not rows.count:
                raise OptionsError(f"{pack.path}: the pack has no rows; leave it out of the mixture", path=pack.path)
        # This plan validates the parameters. Each pack gets a copy for all ranks together, with its own rows and seed.
        plan = plan_order(packs[0], batch_size, shuffle, seed, window, False, ranks=(rank, num_replicas))
        whole = replace(plan, batch_size=_BLOCK_ROWS, rank=0, num_replicas=1, streams=1)
        self.plans = [replace(whole, rows=rows, seed=derive_key(plan.seed, n)) for n, rows in enumerate(packs)]
        self.batch_size, self.rank = plan.batch_size, plan.rank
        self.global_batch = plan.batch_size * plan.num_replicas
        self.num_samples = whole_number("num_samples", len(dataset) if num_samples is None else num_samples, 1)
        self.drop_last = drop_last
        self._batches = (self.num_samples + (0 if drop_last else self.global_batch - 1)) // self.global_batch
        self.dataset = dataset
        if weights is None:
            # At least 1/5,000 of the total for each pack, so that none is rounded to 0.
            weights = [max(len(pack), -(-len(dataset) // (_PERIOD // 2))) for pack in dataset.datasets]
        self._counts = _weight_counts(weights, self.plans)
        self._owners = schedule(self._counts)
        identity = {
            "mixture": _VERSION,
            "packs": [{**plan.identity(), "global_batch": None} for plan in self.plans],
            "counts": self._counts,
            "samples": self.num_samples,
            "drop_last": bool(drop_last),
            "global_batch": self.global_batch,
        }
        super().__init__(EpochCursor(identity, "batches", self._batches))

    def __len__(self) -> int:
        """Return the number of batches of this rank per epoch."""
        return self._batches

    def __repr__(self) -> str:
        settings = f"batch_size={self.batch_size}, num_samples={self.num_samples}, {order_text(self.plans[0])}"
        return f"MixtureSampler({self.dataset!r}, {settings})"

    def _items(self, iteration: IterationState) -> Iterator[list[int]]:
        period = len(self._owners)
        first, last = (iteration.epoch * self._batches + count for count in (iteration.start, self._batches))
        whole, rest = divmod(first * self.global_batch, period)
        before = np.bincount(self._owners[:rest], minlength=len(self.plans)).tolist()
        orders = [
            _endless_order(plan, whole * count + done)
            for plan, count, done in zip(self.plans, self._counts, before, strict=True)
        ]
        for step in range(first, last):
            offsets = np.arange(self.global_batch) + step * self.global_batch % period
            owners = self._owners[offsets % period]
            indices = np.empty(self.global_batch, np.int64)
            for number, order in enumerate(orders):
                mine = np.flatnonzero(owners == number)
                found = np.fromiter(itertools.islice(order, len(mine)), np.int64, len(mine))
                indices[mine] = found + self.dataset.offsets[number]
            yield indices[self.rank * self.batch_size : (self.rank + 1) * self.batch_size].tolist()


def _endless_order(plan: OrderPlan, first: int) -> Iterator[int]:
    """Yield the endless order of one pack: the indices of one epoch after the other, starting with row `first`."""
    epoch, row = divmod(first, plan.rows.count)
    block, skip = divmod(row, _BLOCK_ROWS)
    while True:
        for indices in batch_indices(plan, epoch, block):
            yield from indices[skip:].tolist()
            skip = 0
        epoch, block = epoch + 1, 0


def schedule(counts: Sequence[int]) -> Rows:
    """Return a sequence, int64 (sum of counts,), with ``counts[i]`` copies of each number i, spread evenly.

    Among the first n items, the number of copies of i differs from the share of i, ``n * counts[i] / sum(counts)``, by
    less than 1. Copy j (from 0) goes to one of the positions at which that share grows from j to j + 1. Of the copies
    that may come next, the one whose positions end first is chosen. This finds a position for every copy (Baruah,
    Cohen, Plaxton and Varvel 1996, "Proportionate progress").
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


def _weight_counts(weights: Sequence[float], plans: Sequence[OrderPlan]) -> list[int]:
    """Return the number of rows of each pack in one period of the schedule, which has at most 10,000 rows."""
    try:
        given = [float(weight) for weight in weights]
    except (TypeError, ValueError) as error:
        raise OptionsError(
            f"weights are not numbers ({error}); give a number for each pack", parameters=("weights",)
        ) from error
    if len(given) != len(plans):
        raise OptionsError(
            f"weights has {len(given)} numbers for {len(plans)} packs; give one per pack", parameters=("weights",)
        )
    for number, weight in enumerate(given):
        if not 0 < weight < math.inf:
            raise OptionsError(
                f"weights[{number}] is {weight}; give a finite number above 0, or leave the pack out",
                parameters=("weights",),
            )
    exact = [Fraction(weight) for weight in given]
    whole = sum(exact)
    common = math.lcm(*(weight.denominator for weight in exact))
    numbers = [int(weight * common) for weight in exact]
    divisor = math.gcd(*numbers)
    if sum(numbers) // divisor <= _PERIOD:
        return [number // divisor for number in numbers]
    shares = [weight * _PERIOD / whole for weight in exact]
    counts = [int(share) for share in shares]
    largest = sorted(range(len(shares)), key=lambda number: (counts[number] - shares[number], number))
    for number in largest[: _PERIOD - sum(counts)]:
        counts[number] += 1
    for number, count in enumerate(counts):
        if not count:
            raise OptionsError(
                f"weights[{number}] is less than 1/{_PERIOD:,} of the sum; give a larger one, or leave the pack out",
                parameters=("weights",),
            )
    return counts
