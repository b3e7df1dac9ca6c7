"""`ChunkSampler` and `ChunkBatchSampler`: DataLoader samplers that yield the rows of a chunk close together."""

from __future__ import annotations

import itertools
import logging
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DistributedSampler, Sampler

from h5pack.data.concat import ConcatPack
from h5pack.data.dataset import H5Dataset
from h5pack.data.decoding import DrawKey, DrawnIndex
from h5pack.data.draws import first_use
from h5pack.data.selection import plan_order, resolve_ranks, select_draws
from h5pack.errors import OptionsError
from h5pack.order.cursor import EpochCursor, IterationState, Resumable
from h5pack.order.window import DEFAULT_WINDOW, BatchPlan, OrderPlan

_PLANNED_ROWS = 4_096
"""Number of rows of each stream that a sampler of single rows plans at once."""

Item = TypeVar("Item")

_MAX_FRAMES = 12
_DIVIDING_CLASSES = ("BatchSamplerShard", "DataLoaderDispatcher")


def batch_indices(plan: BatchPlan, epoch: int, first: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the dataset indices, int64 (n,), of each batch of an epoch, starting with batch `first`."""
    open_batches: dict[int, npt.NDArray[np.int64]] = {}
    following = first
    for group in plan.chunk_groups(epoch, first):
        # This and later groups have no rows of batches before `group.first`, so those batches are complete.
        while following < group.first:
            yield open_batches.pop(following)
            following += 1
        for (batch, slot, count), indices in group.split_by_batch(group.indices):
            if batch not in open_batches:
                open_batches[batch] = np.empty(plan.batch_rows(batch), np.int64)
            open_batches[batch][slot : slot + count] = indices
    for batch in range(following, plan.num_batches):
        yield open_batches.pop(batch)


def _callers(module: str) -> Iterator[Any]:
    """Yield the `self` of the calls that run code of `module`, innermost first; None for functions.

    Only the innermost `_MAX_FRAMES` calls of the stack are searched.
    """
    for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(1)), _MAX_FRAMES):
        # Use `f_locals` only of frames of `module`: before Python 3.13, it keeps a frame's variables alive until the
        # frame returns.
        if frame.f_globals.get("__name__") == module:
            yield frame.f_locals.get("self")


def _watch_loop(iteration: IterationState, unit: str) -> None:
    """Set `iteration.received` and `iteration.in_order` if a DataLoader with workers runs the iteration.

    Such a DataLoader requests items before the training loop does. Only the DataLoader's iterator counts the batches
    that the loop received, so find that iterator on the stack. torchdata's StatefulDataLoader has other iterators, and
    counts by itself.
    """
    for found in _callers("torch.utils.data.dataloader"):
        if any(one.__name__ == "_MultiProcessingDataLoaderIter" for one in type(found).__mro__):
            iteration.received = partial(_received, weakref.ref(found), iteration, unit)
            # torch has no parameter in_order before version 2.6.
            iteration.in_order = getattr(found, "_in_order", True) or found._num_workers == 1
            return


def _received(loader: weakref.ref[Any], iteration: IterationState, unit: str) -> int | None:
    """Return how many of the sampler's batches or rows (`unit`) the loop has received; None if that is lost."""
    found = loader()
    batches = getattr(found, "_num_yielded", None)
    if batches is None and not iteration.exhausted:
        logging.getLogger("h5pack").warning(
            "state_dict() of a sampler counts batches that DataLoader workers had prefetched when the loop was left; "
            "give the number that the loop received (batches_consumed= or rows_consumed=)"
        )
    if batches is None:
        return None
    index_sampler = getattr(found, "_index_sampler", None)
    rows = 1 if unit == "batches" else getattr(index_sampler, "batch_size", 1)
    received = min(int(batches) * rows, iteration.count)
    # With `drop_last`, the loop never receives the rows of a smaller last batch.
    dropped = getattr(index_sampler, "drop_last", False) and iteration.count - received < rows
    return iteration.count if iteration.exhausted and dropped else received


def _require_undivided(num_replicas: int) -> None:
    """Raise an OptionsError if Accelerate would divide the rows of one rank, which a sampler yields, among all ranks.

    Each epoch would then lack rows, without any warning. `num_replicas` is the sampler's number of ranks.
    """
    for found in _callers("accelerate.data_loader") if num_replicas > 1 else ():
        if type(found).__name__ in _DIVIDING_CLASSES:
            raise OptionsError(
                "Accelerate divides the batches of a DataLoader that it prepares among the ranks, but this sampler "
                f"yields only the rows of its rank of {num_replicas}; give the sampler rank=0, num_replicas=1, or do "
                "not prepare the DataLoader",
                parameters=("rank=0, num_replicas=1", "rank", "num_replicas"),
            )


class SamplerIterator(Iterator[Item]):
    """One iteration over a sampler.

    An iteration starts when its first item is requested, not before: DataLoaders create iterators that they never use.
    `load_state_dict` starts it, too: torchdata's StatefulDataLoader saves and restores the state of this iterator along
    with the sampler's, but requests no item from an iterator that is restored at the end of an epoch. If such an
    iteration did not start, the sampler would repeat the epoch.
    """

    def __init__(self, cursor: EpochCursor, items: Callable[[IterationState], Iterator[Item]]) -> None:
        cursor.pause()
        self._cursor, self._items = cursor, items
        self._iteration: IterationState | None = None
        self._remaining: Iterator[Item] = iter(())

    def __next__(self) -> Item:
        iteration = self._iteration or self._begin()
        for item in self._remaining:
            iteration.count += 1
            return item
        iteration.exhausted = True
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the item that this iteration has just returned."""
        return self._cursor.state_of(self._iteration)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue this iteration where `state` was saved, or raise a StateError."""
        self._cursor.load(state)
        self._begin()

    def _begin(self) -> IterationState:
        self._iteration = iteration = self._cursor.begin()
        _watch_loop(iteration, self._cursor.unit)
        self._remaining = self._items(iteration)
        return iteration


class ChunkSampler(Resumable, Sampler[int]):
    """Sampler whose default order reads each chunk once per epoch; pass it to a DataLoader as ``sampler``.

    Parameters
    ----------
    dataset : H5Dataset, ConcatPack or Subset
        If it is a torch `Subset`, such as ``random_split`` returns, only the subset's rows are drawn.
    shuffle : {"window", "full", "chunk", False}
        "window": permute the chunks, then shuffle the rows of `window` chunks at a time. "full": permute all rows
        individually, so the rows of a chunk are read at different times. "chunk": permute the chunks, but keep the
        order of the rows within a chunk. False: the order of the file. True is the same as "window".
    seed : int
    window : int
        Number of chunks whose rows are shuffled together.
    drop_last : bool
        If the rows do not divide evenly among the ranks or streams: True leaves out the few extra rows, False repeats a
        few rows, as in torch's DistributedSampler.
    rank, num_replicas : int, optional
        Give both or neither. None: the values of torch.distributed if it is initialized, else a single rank.
    streams : int, optional
        Number of equal parts into which the order is divided; each rank gets the same number of them. For every number
        of ranks that divides `streams`, each training step has the same rows if the global batch (batch size x ranks)
        is the same. None: one stream per rank.
    indices : sequence of int, optional
        Use only these indices of `dataset`. None: all. With ``shuffle=False`` they are read in the order of the file.
    weights : array-like or "balanced", optional
        Draw each row in proportion to its weight. Give a number of at least 0 for each index of `dataset`, or for each
        of `indices` if given. The number of copies of a row in an epoch is its share of the draws, rounded down or up.
        "balanced": each class of the dataset's labels has the same total weight, shared equally by its rows. None: each
        row is drawn once.
    num_samples : int, optional
        Number of draws per epoch over all ranks; requires `weights`. None: the number of rows.

    Raises
    ------
    OptionsError
        If a value is invalid, if `dataset` is not based on an `H5Dataset`, or if `dataset` has random crops and is a
        `Subset` or `ConcatPack`.

    Notes
    -----
    For given parameters the order depends only on `seed` and the epoch, and never changes between releases.
    """

    plan: OrderPlan

    def __init__(
        self,
        dataset: Any,
        *,
        shuffle: str | bool = "window",
        seed: int = 0,
        window: int = DEFAULT_WINDOW,
        drop_last: bool = False,
        rank: int | None = None,
        num_replicas: int | None = None,
        streams: int | None = None,
        indices: Sequence[int] | npt.NDArray[np.int64] | None = None,
        weights: npt.ArrayLike | str | None = None,
        num_samples: int | None = None,
    ) -> None:
        self.dataset, ranks = dataset, resolve_ranks(rank, num_replicas)
        self._base, rows = select_draws(dataset, indices, weights, num_samples)
        _require_keys(dataset, self._base)
        self.plan = plan = plan_order(
            rows, _PLANNED_ROWS, shuffle, seed, window, drop_last, ranks=ranks, streams=streams, single_rows=True
        )
        identity = {**plan.identity(), "global_batch": None}
        self.rank, self.num_replicas = plan.rank, plan.num_replicas
        if self.num_replicas > 1 and type(self) is ChunkSampler:
            self.__class__ = _RankSampler
        super().__init__(EpochCursor(identity, "rows", plan.rank_rows, plan.num_replicas))

    def __repr__(self) -> str:
        return f"ChunkSampler({self.dataset!r}, {order_text(self.plan)})"

    def __iter__(self) -> Iterator[int]:
        _require_undivided(self.num_replicas)
        return SamplerIterator(self.cursor, self._items)

    def _items(self, iteration: IterationState) -> Iterator[int]:
        start, streams = iteration.start, self.plan.step_streams
        first, skip = divmod(start, self.plan.batch_size)
        for indices in batch_indices(self.plan, iteration.epoch, first):
            # Take one row from each stream in turn, so that a step has the same rows for every number of ranks.
            found = indices.reshape(streams, -1).T.reshape(-1)[skip:].tolist()
            if self._base.is_random:
                turns, slots = np.divmod(start + np.arange(len(found)), streams)
                found = DrawnIndex.of(found, draw_key(self.plan, iteration.epoch, turns, slots, rank_rows=streams))
            yield from found
            start, skip = start + len(found), 0

    def state_dict(self, rows_consumed: int | None = None) -> dict[str, Any]:
        """Return the state of the running iteration, for `load_state_dict`.

        Parameters
        ----------
        rows_consumed : int, optional
            Number of rows that the training loop received since the iteration started. None: as counted by the
            DataLoader's iterator; once a loop has been left early, that count is lost, and rows that workers had
            prefetched count as received.
        """
        return self.cursor.state(rows_consumed)


class _RankSampler(ChunkSampler, DistributedSampler[int]):  # type: ignore[override]
    """A `ChunkSampler` of one of several ranks.

    From its base class, Lightning, Fabric and Ignite know that it yields only the rows of its rank. They divide the
    rows of any other sampler among the ranks, even of a sampler that was created before torch.distributed was
    initialized. Instances of classes that users derive from ChunkSampler keep their class.
    """


class BatchOrder(Resumable, Sampler[list[int]]):
    """Base class of batch samplers: they yield the batches of a plan, and their states count batches.

    `base` is `dataset`, or the `H5Dataset` that it wraps. `rank` is what the user gave; None if `resolve_ranks` has
    found it.
    """

    def __init__(self, dataset: Any, base: Any, plan: BatchPlan, rank: int | None) -> None:
        _require_keys(dataset, base)
        super().__init__(EpochCursor(plan.identity(), "batches", plan.num_batches))
        self.dataset, self._base, self.plan = dataset, base, plan
        self.batch_size, self.drop_last = plan.batch_size, plan.drop_last
        self.rank, self.num_replicas = plan.rank, plan.num_replicas
        self.assumes_one_rank = rank is None and plan.num_replicas == 1

    def __iter__(self) -> Iterator[list[int]]:
        _require_undivided(self.num_replicas)
        return SamplerIterator(self.cursor, self._items)

    def _items(self, iteration: IterationState) -> Iterator[list[int]]:
        batches = batch_indices(self.plan, iteration.epoch, iteration.start)
        for batch, indices in enumerate(batches, iteration.start):
            found = indices.tolist()
            if self._base.is_random:
                found = DrawnIndex.of(found, draw_key(self.plan, iteration.epoch, batch, np.arange(len(found))))
            yield found

    def for_loader(self) -> tuple[H5Dataset, BatchPlan]:
        """Return an `H5Dataset` with the rows of `dataset`, and the plan by which a loader reads it."""
        return self._base, self.plan

    def state_dict(self, batches_consumed: int | None = None) -> dict[str, Any]:
        """Return the state of the running iteration, for `load_state_dict`.

        Parameters
        ----------
        batches_consumed : int, optional
            Number of batches that the training loop received since the iteration started. None: as counted by the
            DataLoader's iterator; once a loop has been left early, that count is lost, and batches that workers had
            prefetched count as received.
        """
        return self.cursor.state(batches_consumed)


class ChunkBatchSampler(BatchOrder):
    """Batch sampler whose default order reads each chunk once per epoch; a DataLoader's ``batch_sampler``.

    Parameters
    ----------
    dataset : H5Dataset, ConcatPack or Subset
    batch_size : int
        Rows per batch of this rank.
    shuffle, seed, window, rank, num_replicas, indices, weights, num_samples
        As for `ChunkSampler`.
    drop_last : bool
        True leaves out a last smaller batch, and the few rows that do not divide evenly among the ranks or streams.
        False keeps the smaller batch, and repeats a few rows to divide evenly.
    streams : int, optional
        As for `ChunkSampler`, but `streams` must be a multiple of the number of ranks x `lanes`. None: one stream per
        rank and lane.
    lanes : int
        Number of groups of streams that take turns: batch t has rows of group t mod `lanes` only. If the number of
        DataLoader workers divides `lanes`, each chunk is read by only one worker.

    Raises
    ------
    OptionsError
        If a value is invalid, if `dataset` is not based on an `H5Dataset`, or if `dataset` has random crops and is a
        `Subset` or `ConcatPack`.
    """

    plan: OrderPlan

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
        num_replicas: int | None = None,
        streams: int | None = None,
        lanes: int = 1,
        indices: Sequence[int] | npt.NDArray[np.int64] | None = None,
        weights: npt.ArrayLike | str | None = None,
        num_samples: int | None = None,
    ) -> None:
        base, rows = select_draws(dataset, indices, weights, num_samples)
        ranks = resolve_ranks(rank, num_replicas)
        plan = plan_order(rows, batch_size, shuffle, seed, window, drop_last, ranks=ranks, streams=streams, lanes=lanes)
        super().__init__(dataset, base, plan, rank)

    def __repr__(self) -> str:
        return f"ChunkBatchSampler({self.dataset!r}, batch_size={self.batch_size}, {order_text(self.plan)})"


def draw_key(
    plan: BatchPlan, epoch: int, batches: Any, slots: npt.NDArray[np.int64], rank_rows: int | None = None
) -> DrawKey:
    """Return the key of the random crops of some rows.

    `slots`, int64 (n,), has the slot of each row in its batch. `batches` is the number of the batch of all rows, or a
    sequence with the batch number of each row. A batch has `rank_rows` rows; None: as many as in the plan. Slots and
    batches matter only if an epoch may have several copies of a row: each copy then gets a crop of its own.
    """
    if not plan.repeats_rows:
        return DrawKey(plan.seed, epoch)
    numbers = np.broadcast_to(batches, slots.shape).tolist()
    first = [first_use(batch, plan.rank, rank_rows or plan.batch_rows(batch)) for batch in numbers]
    return DrawKey(plan.seed, epoch, torch.from_numpy(np.array(first, np.int64) + slots))


def _require_keys(dataset: Any, base: H5Dataset) -> None:
    """Raise an OptionsError if crops are random, and `dataset` is a wrapper that loses the keys of `DrawnIndex`."""
    if base.is_random and dataset is not base:
        kind, parameters = "Subset", ["dataset", "indices="]
        advice = "give the H5Dataset to both the sampler and the DataLoader, and indices= to the sampler"
        if any(isinstance(one, ConcatPack) for one in (dataset, getattr(dataset, "dataset", None))):
            kind, parameters, advice = "ConcatPack", ["dataset"], "give one H5Dataset of a list of files"
        problem = f"this sampler does not draw random crops of a {kind}; give the {kind} to H5Loader, or "
        raise OptionsError(f"{problem}{advice}", parameters=parameters)


def order_text(plan: BatchPlan) -> str:
    """Return the part of a ``repr`` that describes an order."""
    return f"shuffle={plan.shuffle!r}, seed={plan.seed}, window={plan.window}, rank={plan.rank} of {plan.num_replicas}"
