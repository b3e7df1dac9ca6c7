"""`MixtureSampler`: batches with rows of several packs in fixed proportions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

import torch

from h5pack.data.concat import ConcatPack
from h5pack.data.dataset import H5Dataset
from h5pack.data.decoding import DrawKey, DrawnIndex
from h5pack.data.draws import first_use
from h5pack.data.samplers import BatchOrder, order_text
from h5pack.data.selection import plan_order, select_draws
from h5pack.errors import OptionsError
from h5pack.order.cursor import EpochCursor, IterationState
from h5pack.order.mixture import BLOCK_ROWS, Mixture, MixturePlan
from h5pack.order.permutation import derive_key
from h5pack.order.weights import MAX_SAMPLES
from h5pack.order.window import DEFAULT_WINDOW, OrderPlan
from h5pack.system.parameters import flags, real_number, refuse_path, whole_number

_PERIOD = 10_000


class MixtureSampler(BatchOrder):
    """Batch sampler that mixes several packs in fixed proportions; a DataLoader's ``batch_sampler``.

    Each pack has an order of its own. When all rows of a pack have been used, the pack's next epoch begins. So a
    small pack may be repeated several times while a large one is read once.

    Parameters
    ----------
    dataset : ConcatPack
    batch_size : int
        Rows per batch of this rank.
    weights : sequence of float, optional
        Proportions of the packs, above 0. They are exact if they are proportional to integers with a sum of at most
        10,000, else rounded to 1/10,000 of their sum. None: the packs' lengths, but at least 1/5,000 of their sum.
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
        refuse_path("dataset", dataset, "ConcatPack([H5Dataset({}), ...])")
        if not isinstance(dataset, ConcatPack):
            raise OptionsError(
                f"dataset is a {type(dataset).__name__}; give a ConcatPack of the packs", parameters=("dataset",)
            )
        packs = [select_draws(pack)[1] for pack in dataset.datasets]
        for pack, rows in zip(dataset.datasets, packs, strict=True):
            if not rows.count:
                raise OptionsError.at(pack.path, "the dataset has no rows; leave it out of the mixture")
        num_samples = whole_number("num_samples", len(dataset) if num_samples is None else num_samples, 1, MAX_SAMPLES)
        batch_size = whole_number("batch_size", batch_size, 1, MAX_SAMPLES)
        # This plan validates the others. Each pack gets a copy of it with its own rows and seed, for all ranks.
        plan = plan_order(packs[0], batch_size, shuffle, seed, window, False, ranks=(rank, num_replicas))
        whole = replace(plan, batch_size=BLOCK_ROWS, rank=0, num_replicas=1, streams=1)
        plans = tuple(replace(whole, rows=rows, seed=derive_key(plan.seed, n)) for n, rows in enumerate(packs))
        self.batch_size, self.rank, self.num_replicas = plan.batch_size, plan.rank, plan.num_replicas
        self.seed, self._order_text = plan.seed, order_text(plan)
        if weights is None:
            # At least 1/5,000 of the total for each pack, so that none is rounded to 0.
            weights = [max(len(pack), -(-len(dataset) // (_PERIOD // 2))) for pack in dataset.datasets]
        self.mixture = Mixture(
            plans,
            counts=tuple(_weight_counts(weights, plans)),
            starts=dataset.offsets[:-1],
            global_batch=plan.batch_size * plan.num_replicas,
            num_samples=num_samples,
            drop_last=flags(drop_last=drop_last)[0],
        )
        self.dataset, self.drop_last, self.num_samples = dataset, drop_last, self.mixture.num_samples
        super().__init__(EpochCursor(self.mixture.identity(), "batches", self.mixture.num_batches))

    def __repr__(self) -> str:
        settings = f"batch_size={self.batch_size}, num_samples={self.num_samples}, {self._order_text}"
        return f"MixtureSampler({self.dataset!r}, {settings})"

    @property
    def cursor(self) -> EpochCursor:
        """The cursor of this sampler. A loader with this `batch_sampler` uses the same cursor."""
        return self._cursor

    def plan(self) -> tuple[H5Dataset, MixturePlan]:
        """Return one dataset with the rows of all packs, and the order in which a loader reads it."""
        joined, rows = select_draws(self.dataset)
        first = self.mixture.plans[0]
        return joined, MixturePlan(
            rows,
            self.batch_size,
            shuffle=first.shuffle,
            seed=self.seed,
            window=first.window,
            rank=self.rank,
            num_replicas=self.num_replicas,
            streams=self.num_replicas,
            mixture=self.mixture,
            file_rows=joined.file_rows,
        )

    def _items(self, iteration: IterationState) -> Iterator[list[int]]:
        own = slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        steps = self.mixture.steps(iteration.epoch * len(self) + iteration.start)
        for batch in range(iteration.start, len(self)):
            found = next(steps)[own].tolist()
            if self.dataset.is_random:
                uses = first_use(batch, self.rank, self.batch_size) + torch.arange(self.batch_size, device="cpu")
                found = DrawnIndex.of(found, DrawKey(self.seed, iteration.epoch, uses))
            yield found


def _weight_counts(weights: Sequence[float], plans: Sequence[OrderPlan]) -> list[int]:
    """Return the number of rows of each pack in one period of the schedule, which has at most 10,000 rows."""
    error = partial(OptionsError, parameters=("weights",))
    try:
        given = [real_number(weight) for weight in weights]
    except TypeError as cause:
        raise error(f"weights are not numbers ({cause}); give a number for each pack") from cause
    if len(given) != len(plans):
        raise error(f"weights has {len(given)} numbers for {len(plans)} packs; give one per pack")
    for number, weight in enumerate(given):
        if not 0 < weight < math.inf:
            raise error(f"weights[{number}] is {weight}; give a finite number above 0, or leave the pack out")
    whole = sum(map(Fraction, given))
    shares = [Fraction(weight) / whole for weight in given]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _PERIOD:
        return [int(share * period) for share in shares]
    counts = [int(share * _PERIOD) for share in shares]
    largest = sorted(range(len(shares)), key=lambda number: (counts[number] - shares[number] * _PERIOD, number))
    for number in largest[: _PERIOD - sum(counts)]:
        counts[number] += 1
    if 0 in counts:
        problem = f"is less than 1/{_PERIOD:,} of the sum; give a larger one, or leave the pack out"
        raise error(f"weights[{counts.index(0)}] {problem}")
    return counts
