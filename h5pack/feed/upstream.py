"""A loader of any kind, seen from what wraps it: its iterations, its epochs, its state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from h5pack.errors import StateError
from h5pack.feed.samplers import BatchOrder, ChunkSampler


@dataclass
class Pulled:
    """A batch that came out of a loader.

    Attributes
    ----------
    batch : Any
    epoch : int
    number : int
        How many batches the iteration has given, this one included.
    state : dict or None
        The loader's state behind this batch, where it was recorded.
    """

    batch: Any
    epoch: int
    number: int
    state: dict[str, Any] | None = None


@dataclass
class Position:
    """How far the consumer of an iteration is.

    Attributes
    ----------
    counted : int
        The iteration's number, which is its epoch where the loader does not tell.
    handed : int
        Batches that it received.
    state : dict or None
        The loader's state behind the last of them, where it was recorded.
    """

    counted: int
    handed: int = 0
    state: dict[str, Any] | None = None


class Upstream:
    """What a wrapper asks of the loader that it wraps.

    Parameters
    ----------
    loader : iterable
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._counted = 0
        self._following = 0
        self._seen = self._foreign_epoch()

    @property
    def epoch(self) -> int:
        """Of the running or last iteration: the loader's, or its sampler's; else iterations are counted."""
        told = self.told_epoch()
        return self._counted if told is None else told

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is."""
        self._following = epoch
        setter = next((one for one in self._holders() if callable(getattr(one, "set_epoch", None))), None)
        if setter is not None:
            setter.set_epoch(epoch)

    def begin(self, *, record: bool) -> tuple[Position, Pulling]:
        """Begin an iteration.

        Parameters
        ----------
        record : bool
            Keep the loader's state beside each batch: for whoever pulls more than is handed out.
        """
        foreign = self._foreign_epoch()
        if foreign != self._seen and foreign is not None:
            # Somebody called the sampler's own set_epoch; who forgets it has the same order again, but no more.
            self._following = foreign
        self._seen = foreign
        iterator = iter(self.loader)
        self._counted, self._following = self._following, self._following + 1
        position = Position(self._counted, 0, self.record() if record else None)
        return position, Pulling(self, iterator, self._counted, record)

    def record(self) -> dict[str, Any] | None:
        """The loader's own state now; None where it has none."""
        if not hasattr(self.loader, "state_dict"):
            return None
        try:
            state: dict[str, Any] = self.loader.state_dict()
        except StateError:
            # It wraps one that has none. That is an error only for those who ask.
            return None
        return state

    def state_dict(self, position: Position | None) -> dict[str, Any]:
        """The state behind what the consumer received; None: where the next iteration begins.

        Raises
        ------
        StateError
            If the loader keeps no state.
        """
        if hasattr(self.loader, "state_dict"):
            recorded = None if position is None else position.state
            state = self.loader.state_dict() if recorded is None else recorded
        else:
            sampler = self._sampler()
            state = sampler.state_dict() if position is None else sampler.state_dict(self._consumed(sampler, position))
        if self.told_epoch() is None:
            state = {"epoch": self._following if position is None else position.counted, "loader": state}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on where `state` was saved.

        Raises
        ------
        StateError
            If the loader keeps no state, or it belongs to another loader.
        """
        epoch = None
        if self.told_epoch() is None:
            try:
                epoch, state = int(state["epoch"]), state["loader"]
            except (KeyError, TypeError, ValueError) as error:
                raise StateError(
                    f"not a state of a {type(self.loader).__name__} ({error!r}); give what state_dict() returned"
                ) from error
        (self.loader if hasattr(self.loader, "load_state_dict") else self._sampler()).load_state_dict(state)
        if epoch is not None:
            self._following = epoch

    def finish(self) -> None:
        """The consumer asked for more than the epoch has: the state is where the next one begins."""
        if hasattr(self.loader, "state_dict"):
            return
        for sampler in self._holders():
            # What a running iteration was given counts; nothing else does. Where somebody has set another epoch or
            # loaded a state since, there is none, and theirs stays.
            if isinstance(sampler, (BatchOrder, ChunkSampler)) and sampler.state_dict(0) != sampler.state_dict(1):
                sampler.set_epoch(sampler.epoch + 1)

    def _holders(self) -> Iterator[Any]:
        """The loader and its samplers: those of a DataLoader, and the one under its torch BatchSampler."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        for one in (
            self.loader,
            batch_sampler,
            getattr(self.loader, "sampler", None),
            getattr(batch_sampler, "sampler", None),
        ):
            if one is not None:
                yield one

    def told_epoch(self) -> int | None:
        """Of the running or last iteration, as the loader or its sampler tells; None where they do not."""
        told = (getattr(one, "epoch", None) for one in self._holders() if self._counts(one))
        return next((epoch for epoch in told if isinstance(epoch, int)), None)

    def _counts(self, one: Any) -> bool:
        """Whether a loader or sampler goes on to the next epoch by itself, as torch's DistributedSampler does not."""
        return one is self.loader or isinstance(one, (BatchOrder, ChunkSampler))

    def _foreign_epoch(self) -> int | None:
        """What a sampler says that has to be told."""
        found = (getattr(one, "epoch", None) for one in self._holders() if not self._counts(one))
        return next((epoch for epoch in found if isinstance(epoch, int)), None)

    def _sampler(self) -> BatchOrder | ChunkSampler:
        for one in self._holders():
            if isinstance(one, (BatchOrder, ChunkSampler)):
                return one
        raise StateError(
            f"a {type(self.loader).__name__} keeps no state, and has no sampler that does; use an H5Loader, a "
            "StatefulDataLoader, or a DataLoader with batch_sampler=ChunkBatchSampler(...)"
        )

    def _consumed(self, sampler: BatchOrder | ChunkSampler, position: Position) -> int:
        """What a sampler counts, after so many batches."""
        if isinstance(sampler, BatchOrder):
            return position.handed
        rows = position.handed * (getattr(self.loader, "batch_size", None) or 1)
        begun: int = sampler.state_dict(0)["rows"]
        return min(rows, len(sampler) - begun)


class Pulling:
    """One iteration of a loader, for one thread at a time.

    Parameters
    ----------
    upstream : Upstream
    iterator : iterator
        The loader's.
    counted : int
        The iteration's number, which is its epoch where the loader does not tell.
    record : bool
        Keep the loader's state beside each batch.
    """

    def __init__(self, upstream: Upstream, iterator: Iterator[Any], counted: int, record: bool) -> None:
        self._upstream, self._iterator, self._counted, self._record = upstream, iterator, counted, record
        self._number = 0
        self._epoch: int | None = None

    def pull(self) -> Pulled:
        """The next batch.

        Raises
        ------
        StopIteration
            If there is none.
        """
        batch = next(self._iterator)
        self._number += 1
        state = self._upstream.record() if self._record else None
        if self._epoch is None:
            # Of this iteration: another one may begin before it ends.
            told = self._upstream.told_epoch()
            self._epoch = self._counted if told is None else told
        return Pulled(batch, self._epoch, self._number, state)

    def close(self) -> None:
        """Let the loader's iterator go; where it can be closed, it is, so that its threads end."""
        iterator, self._iterator = self._iterator, iter(())
        close = getattr(iterator, "close", None)
        # An iterable that is its own iterator is the caller's, who may go on with it.
        if close is not None and iterator is not self._upstream.loader:
            close()
