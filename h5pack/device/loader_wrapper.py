"""`LoaderWrapper`, the base class of `DeviceFeed`, `EchoLoader` and `FeedMonitor`, which wrap any kind of loader."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from operator import index
from typing import Any

from torch.utils.data import RandomSampler

from h5pack.data.iteration import Closeable
from h5pack.data.samplers import BatchOrder, ChunkSampler
from h5pack.data.selection import resolve_ranks
from h5pack.errors import OptionsError, StateError
from h5pack.order.cursor import Resumable
from h5pack.system.parameters import refuse_path, whole_number


@dataclass
class FetchedBatch:
    """A batch that was fetched from a loader, with its epoch and position."""

    batch: Any
    epoch: int
    # The index of the batch in its epoch, from 0. If the loader's state does not say where in the epoch the iteration
    # began, the index in the iteration.
    number: int
    count: int  # How many batches have been fetched in this iteration, including this one.
    state: dict[str, Any] | None  # The loader's state right after it returned this batch; None if not recorded.


@dataclass
class DeliveryCursor:
    """The progress of the training step in an iteration. Batches that were only prefetched do not count."""

    iteration: int  # The number of the iteration, used as the epoch if the loader counts no epochs.
    delivered: int  # How many batches the step has received.
    state: dict[str, Any] | None  # The loader's state after the most recently delivered batch; None if not recorded.

    def advance(self, fetched: FetchedBatch) -> None:
        """Record that the step has received this batch."""
        self.delivered, self.state = fetched.count, fetched.state


class LoaderWrapper(Closeable):
    """A wrapper around a loader that offers the loader's length, dataset, epoch and state as its own.

    The state and the epoch come from the loader, or from its sampler if the loader is a DataLoader. If neither of them
    counts epochs, the wrapper counts iterations, from 0 or from the epoch of the last `set_epoch`, and uses that number
    as the epoch.
    """

    def __init__(self, loader: Any) -> None:
        refuse_path("loader", loader, "H5Loader(H5Dataset({}), batch_size=...)")
        is_iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
        if not is_iterable or getattr(loader, "ndim", None) == 0:  # An array without axes has `__iter__`, which fails.
            advice = "give an H5Loader, a DataLoader or another iterable of batches"
            raise OptionsError(f"the loader is a {type(loader).__name__}; {advice}", parameters=("loader",))
        self.loader = loader
        self._iteration = 0
        self._seen_epoch = _epoch_of(self.loader, counted=False)
        self._next_iteration = self._seen_epoch or 0
        # The progress of the current iteration. If it is None, `state_dict` describes the start of the next iteration.
        self._cursor: DeliveryCursor | None = None
        # The `PrefetchThread`s of this wrapper's iterations.
        self._threads: weakref.WeakSet[Any] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        # Threads belong to this process and cannot be pickled.
        return {**self.__dict__, "_threads": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._threads = weakref.WeakSet()

    def close(self) -> None:
        """Stop the threads of all iterations and wait until they have ended. The wrapped loader stays open."""
        for thread in list(self._threads):
            thread.stop()
            thread.join()

    def __len__(self) -> int:
        """Return the number of batches in an epoch. Raises TypeError if the loader has no length."""
        return len(self.loader)

    @property
    def dataset(self) -> Any:
        """The loader's dataset. Raises AttributeError if it has none."""
        found = first_attribute(layers_of(self.loader), "dataset")
        if found is None:
            raise AttributeError(f"a {type(self.loader).__name__} has no dataset")
        return found

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration, or of the last iteration if none is running."""
        known = _epoch_of(self.loader, counted=True)
        return self._iteration if known is None else known

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        epoch = whole_number("epoch", epoch, None)
        setter = next((one for one in with_samplers(self.loader) if callable(getattr(one, "set_epoch", None))), None)
        if setter is not None:
            setter.set_epoch(epoch)
        self._next_iteration = epoch
        self._cursor = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batch that the step received most recently, even if more were prefetched.

        The state comes from the loader, or from its sampler if the loader is a DataLoader. If neither of them counts
        epochs, the epoch is added. After a complete epoch, this is the state at the beginning of the next epoch.

        Raises
        ------
        StateError
            If the loader keeps no state.
        """
        cursor = self._cursor
        if hasattr(self.loader, "state_dict"):
            recorded = None if cursor is None else cursor.state
            state = self.loader.state_dict() if recorded is None else recorded
        else:
            sampler = self._stateful_sampler()
            state = sampler.state_dict() if cursor is None else sampler.state_dict(self._consumed(sampler, cursor))
        if _epoch_of(self.loader, counted=True) is None:
            state = {"epoch": self._next_iteration if cursor is None else cursor.iteration, "loader": state}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue where `state` was saved.

        Raises
        ------
        StateError
            If `state` belongs to another loader, or if the loader keeps no state.
        """
        epoch = None
        if _epoch_of(self.loader, counted=True) is None:
            try:
                epoch, state = index(state["epoch"]), state["loader"]
            except (LookupError, TypeError, ValueError) as error:
                raise StateError(
                    f"not a state of a {type(self.loader).__name__} ({error!r}); give what state_dict() returned"
                ) from error
        (self.loader if hasattr(self.loader, "load_state_dict") else self._stateful_sampler()).load_state_dict(state)
        if epoch is not None:
            self._next_iteration = epoch
        self._cursor = None

    def _begin(self, *, record: bool) -> tuple[DeliveryCursor, BatchFetcher]:
        """Begin an iteration of the loader; return its cursor and its fetcher.

        If `record` is true, store the loader's state with each batch. Wrappers that fetch batches before they deliver
        them need this.
        """
        sampler_epoch = _epoch_of(self.loader, counted=False)
        if sampler_epoch != self._seen_epoch and sampler_epoch is not None:
            # The user called the sampler's own set_epoch, so use that epoch. If users never call set_epoch, the
            # sampler repeats its order, and this wrapper counts the epochs.
            self._next_iteration = sampler_epoch
        self._seen_epoch = sampler_epoch
        # A DataLoader's `sampler` begins an iteration only when the first batch is requested. If the previous iteration
        # was left early, the sampler's state would describe the previous one until then.
        self._leave_epoch()
        iterator = iter(self.loader)
        self._iteration, self._next_iteration = self._next_iteration, self._next_iteration + 1
        self._cursor = DeliveryCursor(self._iteration, 0, self._loader_state() if record else None)
        # Only wrappers that record states use `FetchedBatch.number`.
        first = self._first_number() if record else 0
        return self._cursor, BatchFetcher(self, iterator, self._iteration, record, first)

    def _first_number(self) -> int:
        """Return the index within the epoch of the batch that the new iteration begins with; 0 if unknown."""
        if isinstance(self.loader, LoaderWrapper):
            return self.loader._first_number()
        state = self._loader_state() or {}
        if "rows" not in state and "batches" not in state:
            state = next((sampler.state_dict(0) for sampler in _resumable_samplers(self.loader)), {})
        if "rows" in state:
            return int(state["rows"]) // _batch_rows(self.loader)
        number = state.get("batches", 0)
        return number if isinstance(number, int) else 0

    def _finish(self, cursor: DeliveryCursor) -> None:
        """Move the state to the beginning of the next epoch. Called when an iteration has no more batches."""
        if self._cursor is cursor:
            self._cursor = None
            self._leave_epoch()

    def _leave_epoch(self) -> None:
        """End the running iterations of the samplers, so that their states describe the start of the next epoch."""
        if hasattr(self.loader, "state_dict"):
            return
        for sampler in _resumable_samplers(self.loader):
            sampler.cursor.finish(sampler.cursor.iteration)

    def _loader_state(self) -> dict[str, Any] | None:
        """Return the loader's own current state; None if it keeps no state."""
        if not hasattr(self.loader, "state_dict"):
            return None
        try:
            state: dict[str, Any] = self.loader.state_dict()
        except StateError:
            # The loader wraps a loader without state, which is an error only if the user asks for the state.
            return None
        return state

    def _stateful_sampler(self) -> BatchOrder | ChunkSampler:
        for sampler in _resumable_samplers(self.loader):
            return sampler
        raise StateError(
            f"neither the {type(self.loader).__name__} nor its sampler keeps a state; use an H5Loader, a "
            "StatefulDataLoader, or a DataLoader with batch_sampler=ChunkBatchSampler(...)"
        )

    def _consumed(self, sampler: BatchOrder | ChunkSampler, cursor: DeliveryCursor) -> int:
        """Return how many batches (for a `BatchOrder`) or rows (for a `ChunkSampler`) the step has received."""
        if isinstance(sampler, BatchOrder):
            return cursor.delivered
        rows = cursor.delivered * _batch_rows(self.loader)
        begun: int = sampler.state_dict(0)["rows"]
        return min(rows, len(sampler) - begun)


class BatchFetcher:
    """Fetches the batches of one iteration from a wrapped loader. Only one thread at a time may use it."""

    def __init__(
        self, wrapper: LoaderWrapper, iterator: Iterator[Any], iteration: int, record: bool, first: int
    ) -> None:
        self._wrapper, self._iterator, self._iteration, self._record = wrapper, iterator, iteration, record
        self._first, self._count = first, 0
        self._epoch: int | None = None

    def fetch(self) -> FetchedBatch:
        """Return the next batch; raise StopIteration if there are no more."""
        batch = next(self._iterator)
        self._count += 1
        state = self._wrapper._loader_state() if self._record else None
        if self._epoch is None:
            # Keep the epoch of the first batch: a new iteration may change the loader's epoch before this one ends.
            known = _epoch_of(self._wrapper.loader, counted=True)
            self._epoch = self._iteration if known is None else known
        return FetchedBatch(batch, self._epoch, self._first + self._count - 1, self._count, state)

    def close(self) -> None:
        """Drop the loader's iterator, and call its `close`, so that its threads end, unless it is the loader itself."""
        iterator, self._iterator = self._iterator, iter(())
        close = getattr(iterator, "close", None)
        # A generator is its own iterator. Do not close it, because the user may continue it later.
        if close is not None and iterator is not self._wrapper.loader:
            close()


def layers_of(loader: Any) -> list[Any]:
    """Return a loader and all loaders that it wraps (found by the attribute ``loader``), outermost first."""
    layers = [loader]
    while (inner := getattr(layers[-1], "loader", None)) is not None and all(inner is not layer for layer in layers):
        layers.append(inner)
    return layers


def first_attribute(layers: list[Any], name: str) -> Any:
    """Return the attribute `name` of the first layer in which it is not None; None if no layer has it."""
    for layer in layers:
        value = getattr(layer, name, None)
        if value is not None:
            return value
    return None


def base_datasets(dataset: Any) -> list[Any]:
    """Return the datasets inside a subset or a concatenation, at any depth.

    Return [dataset] for any other dataset, and [] for None.
    """
    waiting, found = [dataset], []
    while waiting:
        dataset = waiting.pop(0)
        inner = getattr(dataset, "datasets", None) or getattr(dataset, "dataset", None)
        if isinstance(inner, (list, tuple)):
            waiting += inner
        elif inner is not None:
            waiting.append(inner)
        elif dataset is not None:
            found.append(dataset)
    return found


def with_samplers(loader: Any) -> list[Any]:
    """Return the loader, its batch sampler, its sampler, and its batch sampler's sampler, as far as they exist."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (batch_sampler, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))
    return [loader, *(sampler for sampler in samplers if sampler is not None)]


def _resumable_samplers(loader: Any) -> list[BatchOrder | ChunkSampler]:
    """Return the samplers of h5pack among `with_samplers(loader)`."""
    return [one for one in with_samplers(loader) if isinstance(one, (BatchOrder, ChunkSampler))]


def rank_of_copies(loader: Any) -> int | None:
    """Return the rank of a loader if its epochs may have several copies of a row, else None.

    The plans of h5pack's loaders and samplers say whether they repeat rows. Any other sampler counts as repeating rows
    if its attribute `replacement` is True, and so does torch's RandomSampler if it is longer than its dataset.
    """
    for one in (one for layer in layers_of(loader) for one in with_samplers(layer)):
        if isinstance(one, Resumable) and one.plan.repeats_rows:
            return one.plan.rank
        is_longer = isinstance(one, RandomSampler) and one.num_samples > len(one.data_source)
        if is_longer or getattr(one, "replacement", None) is True:
            return resolve_ranks(None, None)[0]
    return None


def _batch_rows(loader: Any) -> int:
    """Return how many of the sampler's rows make a batch; 1 if the loader does not make batches of rows."""
    # If a DataLoader was made with a batch sampler, its `batch_size` is None. A wrapper may have the sampler of its
    # loader, but no `batch_size`.
    layers = layers_of(loader)
    return first_attribute([*layers, *(getattr(one, "batch_sampler", None) for one in layers)], "batch_size") or 1


def _epoch_of(loader: Any, *, counted: bool) -> int | None:
    """Return the epoch of the loader or of its sampler, whichever counts epochs itself; None if neither does.

    With ``counted=False``, return instead the epoch of a sampler that does not count epochs, such as torch's
    DistributedSampler, on which users must call set_epoch; None if there is no such sampler.
    """
    for one in with_samplers(loader):
        counts = one is loader or isinstance(one, (BatchOrder, ChunkSampler))
        if counts is counted and isinstance(epoch := getattr(one, "epoch", None), int):
            return epoch
    return None
