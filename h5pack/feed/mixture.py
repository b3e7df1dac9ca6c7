"""`MixtureSampler`: rows of several packs in fixed proportions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import OptionsError
from h5pack.feed.concat_pack import ConcatPack
from h5pack.feed.order import DEFAULT_WINDOW, OrderPlan, whole_number
from h5pack.feed.permutation import derive_key
from h5pack.feed.progress import Progress, Run
from h5pack.feed.row_set import SpanRows
from h5pack.feed.samplers import BatchOrder, filled
from h5pack.feed.selection import resolve_ranks

Rows = npt.NDArray[np.int64]

_VERSION = 1
_PERIOD = 10_000
_BLOCK_ROWS = 1_024


class MixtureSampler(BatchOrder):
    """Batches from several packs, in proportions that every batch has; a DataLoader's ``batch_sampler``.

    Each pack has a window-shuffled order of its own, and goes on into its next epoch when that is exhausted. So a small
    pack may come several times in the time in which a large one comes once.

    Parameters
    ----------
    dataset : ConcatPack
    batch_size : int
        Rows a batch of this rank.
    weights : sequence of float, optional
        Above 0, one for each pack: in which proportions they are drawn from, to 1 in 10,000. None: their lengths, and
        one that is tiny beside the others has 1 in 5,000.
    samples : int, optional
        Rows an epoch, over all ranks. None: as many as there are.
    shuffle : {"window", "full", "chunk", False}
        Of each pack, as for `ChunkBatchSampler`.
    seed : int
    window : int
        Chunks of a pack that are shuffled together.
    drop_last : bool
        Where `samples` is no multiple of the global batch: leave out the rest, instead of drawing some more.
    rank, world_size : int, optional
        Both, or neither: then torch.distributed's, where that is initialised.

    Raises
    ------
    OptionsError
        If a value makes no sense.

    Notes
    -----
    Of any n rows that follow each other in the order, a pack's are less than 2 + n / 10,000 off its share; with weights
    that are whole numbers of a small sum, less than 2. The order is endless, an epoch is a part of it, and all batches
    are full. At equal global batch the rows of each step are the same for every number of ranks.
    """

    def __init__(
        self,
        dataset: ConcatPack,
        batch_size: int,
        *,
        weights: Sequence[float] | None = None,
        samples: int | None = None,
        shuffle: str | bool = "window",
        seed: int = 0,
        window: int = DEFAULT_WINDOW,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not isinstance(dataset, ConcatPack):
            raise OptionsError(
                f"a mixture is of a ConcatPack, not of a {type(dataset).__name__}; make one of the packs"
            )
        rank, world_size = resolve_ranks(rank, world_size)
        self.plans = []
        for number, pack in enumerate(dataset.datasets):
            if not len(pack):
                raise OptionsError(f"{pack.path}: there are no rows in it; leave it out of the mixture")
            rows = SpanRows(pack.first_row, pack.first_row + len(pack), pack.unit_rows)
            key = derive_key(whole_number("seed", seed, None), number)
            self.plans.append(
                OrderPlan(rows, _BLOCK_ROWS, "window" if shuffle is True else shuffle, key, window, rank=0)
            )
        self.batch_size = whole_number("batch_size", batch_size, 1)
        # Refuses ranks that make no sense.
        ranks = OrderPlan(self.plans[0].rows, self.batch_size, rank=rank, world_size=world_size, streams=world_size)
        self.rank, self.global_batch = ranks.rank, self.batch_size * ranks.world_size
        self.samples = whole_number("samples", len(dataset) if samples is None else samples, 1)
        self.drop_last = drop_last
        self._batches = self.samples // self.global_batch if drop_last else -(-self.samples // self.global_batch)
        self._offsets = dataset.offsets
        self._counts = _in_counts(_lengths(dataset) if weights is None else weights, self.plans)
        self._owners = schedule(self._counts)
        super().__init__(Progress(self._identity(), "batches", self._batches))

    def _identity(self) -> dict[str, Any]:
        packs = [{**plan.identity(), "global_batch": None} for plan in self.plans]
        return {
            "mixture": _VERSION,
            "packs": packs,
            "counts": self._counts,
            "samples": self.samples,
            "drop_last": bool(self.drop_last),
            "global_batch": self.global_batch,
        }

    def __len__(self) -> int:
        """Batches of this rank's epoch."""
        return self._batches

    def _items(self, run: Run) -> Iterator[list[int]]:
        period = len(self._owners)
        first, last = (run.epoch * self._batches + count for count in (run.begun, self._batches))
        whole, rest = divmod(first * self.global_batch, period)
        before = np.bincount(self._owners[:rest], minlength=len(self.plans)).tolist()
        draws = [
            _Draws(plan, whole * count + done)
            for plan, count, done in zip(self.plans, self._counts, before, strict=True)
        ]
        for step in range(first, last):
            places = np.arange(self.global_batch) + step * self.global_batch % period
            owners = self._owners[places % period]
            indices = np.empty(self.global_batch, np.int64)
            for number, pack in enumerate(draws):
                mine = np.flatnonzero(owners == number)
                indices[mine] = pack.take(len(mine)) + self._offsets[number]
            yield indices[self.rank * self.batch_size : (self.rank + 1) * self.batch_size].tolist()


class _Draws:
    """A pack's order without an end: from row `first` on, epoch after epoch."""

    def __init__(self, plan: OrderPlan, first: int) -> None:
        self._plan = plan
        self._epoch, place = divmod(first, plan.rows.count)
        block, skip = divmod(place, _BLOCK_ROWS)
        self._blocks = filled(plan, self._epoch, block)
        self._left: Rows = np.empty(0, np.int64)
        self._skip = skip

    def take(self, count: int) -> Rows:
        """The next indices of the pack; int64, (count,)."""
        parts = []
        while count:
            if not len(self._left):
                self._left = self._next()
            parts.append(self._left[:count])
            self._left = self._left[count:]
            count -= len(parts[-1])
        return np.concatenate(parts) if parts else self._left[:0]

    def _next(self) -> Rows:
        block = next(self._blocks, None)
        if block is None:
            self._epoch += 1
            self._blocks = filled(self._plan, self._epoch, 0)
            block = next(self._blocks)
        skip, self._skip = self._skip, 0
        return block[skip:]


def schedule(counts: Sequence[int]) -> Rows:
    """An order of ``counts[i]`` times each number i, in which all are spread evenly.

    Of the first n, every number's are less than 1 off its share. Row j of n rows of a number must come after its share
    has reached j, and before it is j + 1; whoever must come first comes first. That always works out (Baruah, Cohen,
    Plaxton and Varvel 1996, "Proportionate progress").

    Returns
    -------
    ndarray
        int64, (sum of counts,).
    """
    whole = sum(counts)
    later = [(0, number, 0) for number, count in enumerate(counts) if count]
    due: list[tuple[int, int, int]] = []
    order = np.empty(whole, np.int64)
    for place in range(whole):
        while later and later[0][0] <= place:
            _, number, row = heapq.heappop(later)
            heapq.heappush(due, (-(-(row + 1) * whole // counts[number]), number, row))
        _, number, row = heapq.heappop(due)
        order[place] = number
        if row + 1 < counts[number]:
            heapq.heappush(later, ((row + 1) * whole // counts[number], number, row + 1))
    return order


def _lengths(dataset: ConcatPack) -> list[int]:
    """The packs' lengths as weights; one that is tiny beside the others counts for the least that there is."""
    lengths = [len(pack) for pack in dataset.datasets]
    return [max(length, -(-sum(lengths) // (_PERIOD // 2))) for length in lengths]


def _in_counts(weights: Sequence[float], plans: Sequence[OrderPlan]) -> list[int]:
    """How many rows of each pack a period has."""
    try:
        given = [float(weight) for weight in weights]
    except (TypeError, ValueError) as error:
        raise OptionsError(f"weights are no numbers ({error}); give one for each pack") from error
    if len(given) != len(plans):
        raise OptionsError(f"{len(given)} weights for {len(plans)} packs; give one for each")
    for number, weight in enumerate(given):
        if not 0 < weight < math.inf:
            raise OptionsError(f"weights[{number}] is {weight}; it must be above 0 and finite, or leave the pack out")
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
            raise OptionsError(f"weights[{number}] is below 1 in {_PERIOD:,} of all; give more, or leave the pack out")
    return counts
