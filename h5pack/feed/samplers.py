"""`ChunkSampler` and `ChunkBatchSampler`: orders in which a chunk's rows come together, for torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from h5pack.feed.order import DEFAULT_WINDOW, OrderPlan
from h5pack.feed.progress import Progress, Resumable, Run
from h5pack.feed.selection import plan_batches, resolve_ranks, select_draws

_BLOCK_ROWS = 4_096
Item = TypeVar("Item")


def filled(plan: OrderPlan, epoch: int, first: int) -> Iterator[npt.NDArray[np.int64]]:
    """The indices of each batch of an epoch from `first` on, as soon as its last row is known; int64, (n,)."""
    open_batches: dict[int, npt.NDArray[np.int64]] = {}
    following = first
    for segment in plan.segments(epoch, first):
        # No later segment holds a row of a batch before this one's first.
        while following < segment.first:
            yield open_batches.pop(following)
            following += 1
        for (batch, slot, count), indices in segment.deal(segment.indices):
            if batch not in open_batches:
                open_batches[batch] = np.empty(plan.batch_rows(batch), np.int64)
            open_batches[batch][slot : slot + count] = indices
    for batch in range(following, plan.batches):
        yield open_batches.pop(batch)


class Iteration(Iterator[Item]):
    """One iteration, begun when its first item is asked for: DataLoaders also make some that they never use.

    torchdata's StatefulDataLoader saves and restores this one's state besides the sampler's. It needs it: the iteration
    that it restores at the end of an epoch is one that it never asks for an item, and yet that epoch must count as
    over.
    """

    def __init__(self, progress: Progress, items: Callable[[Run], Iterator[Item]]) -> None:
        progress.pause()
        self._progress, self._items = progress, items
        self._run: Run | None = None
        self._left: Iterator[Item] = iter(())

    def __next__(self) -> Item:
        run = self._run or self._begin()
        item = next(self._left)
        run.count += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """Where this iteration is."""
        return self._progress.state_of(self._run)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin this iteration where `state` was saved.

        Raises
        ------
        StateError
            If it belongs to another order.
        """
        self._progress.load(state)
        self._begin()

    def _begin(self) -> Run:
        self._run = run = self._progress.begin()
        self._left = self._items(run)
        return run


class ChunkSampler(Resumable, Sampler[int]):
    """Indices in an order that visits each chunk once an epoch; give it to a DataLoader as ``sampler``.

    Parameters
    ----------
    dataset : H5Dataset or Subset
        A torch `Subset` of an `H5Dataset` (``random_split`` gives some) is drawn from alone.
    shuffle : {"window", "full", "chunk", False}
        window: chunks permuted, and the rows of `window` chunks at a time among each other; full: rows permuted one by
        one; chunk: chunks permuted, their rows in stored order; False: stored order.
    seed : int
    window : int
        Chunks that are shuffled together.
    drop_last : bool
        With several ranks or streams: leave out the few rows that do not divide among them, instead of repeating a few;
        as torch's DistributedSampler counts them.
    rank, world_size : int, optional
        Both, or neither: then torch.distributed's, where that is initialised.
    streams : int, optional
        Cut the order into this many equal streams, so that it is the same for every number of ranks that divides it:
        at equal global batch, the rows of each step are. None: one a rank.
    rows : sequence of int, optional
        Draw from these indices of `dataset` only.
    weights : array-like or "balanced", optional
        Draw each row in proportion to its weight: numbers of 0 and above, one for each index of `dataset`, or of `rows`
        where they are given. An epoch's copies of a row are its share of the draws, rounded down or up. "balanced":
        each class of the dataset's labels has the same weight, shared equally by its rows. None: each row once.
    samples : int, optional
        Draws an epoch with `weights`, over all ranks. None: as many as there are rows.

    Raises
    ------
    OptionsError
        If a value makes no sense, or the dataset has no chunks.

    Notes
    -----
    The order is a pure function of `seed` and the epoch, and never changes between releases.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        shuffle: str | bool = "window",
        seed: int = 0,
        window: int = DEFAULT_WINDOW,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        streams: int | None = None,
        rows: Sequence[int] | npt.NDArray[np.int64] | None = None,
        weights: npt.ArrayLike | str | None = None,
        samples: int | None = None,
    ) -> None:
        rank, world_size = resolve_ranks(rank, world_size)
        own = max(1, (streams or 1) // max(1, world_size))
        plan = OrderPlan(
            select_draws(dataset, rows, weights, samples)[1],
            _BLOCK_ROWS * own,
            "window" if shuffle is True else shuffle,
            seed,
            window,
            drop_last,
            False,
            rank,
            world_size,
            world_size if streams is None else streams,
        )
        self.plan = plan
        super().__init__(Progress({**plan.identity(), "global_batch": None}, "rows", plan.rank_rows, world_size))

    def __len__(self) -> int:
        """Rows of this rank's epoch."""
        return self.plan.rank_rows

    def __iter__(self) -> Iterator[int]:
        return Iteration(self._progress, self._items)

    def _items(self, run: Run) -> Iterator[int]:
        first, skip = divmod(run.begun, self.plan.batch_size)
        for indices in filled(self.plan, run.epoch, first) if run.begun < len(self) else ():
            # A row of each stream in turns, so that a step's rows are the same for every number of ranks.
            turns = indices.reshape(self.plan.step_streams, -1).T.reshape(-1)
            yield from turns[skip:].tolist()
            skip = 0

    def state_dict(self, rows_consumed: int | None = None) -> dict[str, Any]:
        """Where the running iteration is, to give to `load_state_dict`.

        Parameters
        ----------
        rows_consumed : int, optional
            Rows that the training step received since the iteration began. None: those this sampler handed out, which
            is more than that where a DataLoader's workers run ahead.
        """
        return self._progress.state(rows_consumed)


class BatchOrder(Resumable, Sampler[list[int]]):
    """What samplers of batches share: iterations that count batches."""

    def __iter__(self) -> Iterator[list[int]]:
        return Iteration(self._progress, self._items)

    def _items(self, run: Run) -> Iterator[list[int]]:
        raise NotImplementedError

    def state_dict(self, batches_consumed: int | None = None) -> dict[str, Any]:
        """Where the running iteration is, to give to `load_state_dict`.

        Parameters
        ----------
        batches_consumed : int, optional
            Batches that the training step received since the iteration began. None: those this sampler handed out,
            which is more than that where a DataLoader's workers run ahead.
        """
        return self._progress.state(batches_consumed)


class ChunkBatchSampler(BatchOrder):
    """Batches of indices in an order that visits each chunk once an epoch; a DataLoader's ``batch_sampler``.

    Parameters
    ----------
    dataset : H5Dataset or Subset
        A torch `Subset` of an `H5Dataset` (``random_split`` gives some) is drawn from alone.
    batch_size : int
        Rows a batch of this rank.
    shuffle : {"window", "full", "chunk", False}
        As for `ChunkSampler`.
    seed : int
    window : int
        Chunks that are shuffled together.
    drop_last : bool
        Leave out a last smaller batch, and the few rows that do not divide among ranks or streams, instead of repeating
        a few.
    rank, world_size : int, optional
        Both, or neither: then torch.distributed's, where that is initialised.
    streams : int, optional
        Cut the order into this many equal streams: the rows of each step are then the same for every number of ranks w
        with `streams` divisible by w x `lanes`, at equal global batch (batch_size x w). None: one a rank and lane.
    lanes : int
        Batches take turns among this many groups of streams. Where the number of a DataLoader's workers divides it, a
        chunk is read by one worker.
    rows : sequence of int, optional
        Draw from these indices of `dataset` only.
    weights : array-like or "balanced", optional
        Draw each row in proportion to its weight: numbers of 0 and above, one for each index of `dataset`, or of `rows`
        where they are given. An epoch's copies of a row are its share of the draws, rounded down or up. "balanced":
        each class of the dataset's labels has the same weight, shared equally by its rows. None: each row once.
    samples : int, optional
        Draws an epoch with `weights`, over all ranks. None: as many as there are rows.

    Raises
    ------
    OptionsError
        If a value makes no sense, or the dataset has no chunks.

    Notes
    -----
    The order is a pure function of `seed` and the epoch, and never changes between releases.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: str | bool = "window",
        seed: int = 0,
        window: int = DEFAULT_WINDOW,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        streams: int | None = None,
        lanes: int = 1,
        rows: Sequence[int] | npt.NDArray[np.int64] | None = None,
        weights: npt.ArrayLike | str | None = None,
        samples: int | None = None,
    ) -> None:
        rank, world_size = resolve_ranks(rank, world_size)
        row_set = select_draws(dataset, rows, weights, samples)[1]
        plan = plan_batches(row_set, batch_size, shuffle, seed, window, drop_last, rank, world_size, streams, lanes)
        self.plan = plan
        super().__init__(Progress(plan.identity(), "batches", plan.batches))
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __len__(self) -> int:
        """Batches of this rank's epoch."""
        return self.plan.batches

    def _items(self, run: Run) -> Iterator[list[int]]:
        for indices in filled(self.plan, run.epoch, run.begun) if run.begun < len(self) else ():
            yield indices.tolist()
