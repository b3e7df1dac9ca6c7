"""`MixtureSampler`: batches with rows of several packs in fixed proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from h5pack.data.concat import ConcatPack
from h5pack.data.dataset import H5Dataset
from h5pack.data.samplers import BatchOrder, order_text
from h5pack.data.selection import resolve_ranks, select_rows
from h5pack.errors import OptionsError
from h5pack.order.mixture import MixturePlan
from h5pack.order.row_ranges import RowRange
from h5pack.order.weights import MAX_SAMPLES
from h5pack.order.window import DEFAULT_WINDOW
from h5pack.system.parameters import real_number, refuse_path, whole_number
from h5pack.system.text import short_repr

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

    plan: MixturePlan

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
        packs = tuple(select_rows(pack)[1] for pack in dataset.datasets)
        for pack, rows in zip(dataset.datasets, packs, strict=True):
            if not rows.count:
                raise OptionsError.at(pack.path, "the dataset has no rows; leave it out of the mixture")
        if weights is None:
            # At least 1/5,000 of the total for each pack, so that none is rounded to 0.
            weights = [max(len(pack), -(-len(dataset) // (_PERIOD // 2))) for pack in dataset.datasets]
        ranks = resolve_ranks(rank, num_replicas)
        num_samples = len(dataset) if num_samples is None else num_samples
        plan = MixturePlan(
            RowRange(0, len(dataset), 1),  # `for_loader` replaces these rows by those of the joined file.
            whole_number("batch_size", batch_size, 1, MAX_SAMPLES),
            shuffle=shuffle,
            seed=seed,
            window=window,
            drop_last=drop_last,
            rank=ranks[0],
            num_replicas=ranks[1],
            packs=packs,
            counts=tuple(_weight_counts(weights, len(packs))),
            num_samples=whole_number("num_samples", num_samples, 1, MAX_SAMPLES),
        )
        super().__init__(dataset, dataset, plan, rank)
        self.seed, self.num_samples = plan.seed, plan.num_samples

    def __repr__(self) -> str:
        settings = f"batch_size={self.batch_size}, num_samples={self.num_samples}, {order_text(self.plan)}"
        return f"MixtureSampler({self.dataset!r}, {settings})"

    def for_loader(self) -> tuple[H5Dataset, MixturePlan]:
        joined, rows, _ = select_rows(self.dataset)
        return joined, replace(self.plan, rows=rows, file_rows=joined.file_rows)


def _weight_counts(weights: Sequence[float], packs: int) -> list[int]:
    """Return the number of rows of each pack in one period of the schedule, which has at most 10,000 rows."""
    error = partial(OptionsError, parameters=("weights",))
    try:
        values = list(weights)
    except TypeError as cause:
        raise error(f"weights is no sequence ({cause}); give a number for each pack") from cause
    if len(values) != packs:
        raise error(f"weights has {len(values)} numbers for {packs} packs; give one per pack")
    given = [real_number(value) for value in values]
    for number, weight in enumerate(given):
        if not 0 < weight < math.inf:
            value = short_repr(values[number])
            raise error(f"weights[{number}] is {value}; give a finite number above 0, or leave the pack out")
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
