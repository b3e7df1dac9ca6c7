"""`EchoLoader`, which repeats each batch of a loader that is slower than the training step (data echoing)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from operator import index
from typing import Any

import torch

from h5pack.data.iteration import BatchIterator
from h5pack.data.selection import distributed_ranks
from h5pack.device.batch import mark_echoed, repeats_of
from h5pack.device.loader_wrapper import (
    BatchFetcher,
    DeliveryCursor,
    FetchedBatch,
    LoaderWrapper,
    first_attribute,
    layers_of,
)
from h5pack.device.prefetch import PrefetchThread
from h5pack.errors import OptionsError, StateError
from h5pack.system.parameters import invalid, real_number, whole_number

_AUTO = "auto"
_MAX_DENOMINATOR = 10_000
"""A factor is rounded to a fraction with at most this denominator, so that 2.3 becomes 23/10."""
_WAIT_SHARE = 0.05
"""With "auto": how long to wait for a batch that is expected soon, as a fraction of the duration of a step."""
_NEWEST_SHARE = 0.2
"""Weight of the newest duration in the moving averages of durations."""


@dataclass
class EchoState:
    """The progress of an iteration over repeated batches. It holds neither batches nor threads."""

    epoch: int = 0
    batch: int = 0  # The index of the current batch in the epoch. Repeats have the same index.
    showing: int = 0  # How many times the current batch has been delivered.
    shown: int = 0  # How many batches, including repeats, this iteration has delivered.
    fresh: int = 0  # How many of the `shown` batches were delivered for the first time.


class EchoLoader(LoaderWrapper):
    """A loader that delivers each batch of another loader several times (data echoing).

    The method is that of Choi, Passos, Shallue and Dahl 2019, arXiv:1907.05550. With ``DeviceFeed(EchoLoader(...))``
    raw batches are repeated, and each repeat is augmented differently. With ``EchoLoader(DeviceFeed(...))`` transformed
    batches are repeated. The first delivery of a batch is the loader's own object. Each repeat of a tensor, list, tuple
    or mapping is a copy with the attribute `repeats`, the number of earlier deliveries. The copies share the tensors,
    so in-place changes affect later repeats.

    Parameters
    ----------
    loader : iterable of batches
        An `H5Loader`, DataLoader, `DeviceFeed` or any other iterable of batches.
    factor : float or "auto"
        How many times each batch is delivered, at least 1, rounded to a fraction with a denominator of at most 10,000.
        With 2.5, batches are delivered 2 and 3 times in turn. "auto": repeat a batch until a thread has fetched the
        next batch. The number of repeats then depends on timing and differs between runs.
    max_factor : int
        Upper bound of `factor`. With "auto", the maximum number of times that a batch is delivered.

    Raises
    ------
    OptionsError
        If an option is invalid.

    Notes
    -----
    `loader`, `factor` (a Fraction or "auto") and `max_factor` are also attributes.

    All ranks of a distributed training must take the same number of steps, so "auto" raises `OptionsError`
    if there are several ranks.
    """

    def __init__(self, loader: Any, factor: float | str = 2, *, max_factor: int = 8) -> None:
        super().__init__(loader)
        self.max_factor = whole_number("max_factor", max_factor, 1)
        is_auto = isinstance(factor, str) and factor == _AUTO
        self.factor: Fraction | str = _AUTO if is_auto else _to_fraction(factor, self.max_factor)
        self._require_one_rank()
        # The state of the current iteration, or of the last iteration if none is running.
        self._state = EchoState()
        # The state at which the next iteration begins. None: it begins a new epoch.
        self._loaded: EchoState | None = None

    def __repr__(self) -> str:
        factor = f"{float(self.factor):g}" if isinstance(self.factor, Fraction) else repr(self.factor)
        return f"EchoLoader({self.loader!r}, factor={factor}, max_factor={self.max_factor})"

    @property
    def shown(self) -> int:
        """Number of batches, including repeats, that the current or last iteration delivered."""
        return self._state.shown

    @property
    def fresh(self) -> int:
        """How many of the `shown` batches were delivered for the first time."""
        return self._state.fresh

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. If a state of another epoch was loaded, it is dropped."""
        super().set_epoch(epoch)
        if self._loaded is not None and self._loaded.epoch != epoch:
            self._loaded = None

    def __len__(self) -> int:
        """Return the number of batches in an epoch, including repeats.

        Raises TypeError if `factor` is "auto", or if the loader has no length.
        """
        if not isinstance(self.factor, Fraction):
            raise TypeError("an EchoLoader with factor='auto' has no length, because repeats depend on timing")
        return math.floor(len(self.loader) * self.factor)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch. Raises OptionsError if `factor` is "auto" and there are several ranks."""
        self._require_one_rank()
        # A DataLoader with persistent workers has a single iterator, which the thread of the previous iteration may
        # still be using.
        self.close()
        cursor, fetcher = self._begin(record=True)
        state, self._loaded = self._loaded, None
        self._state = state or EchoState(self.epoch)
        if isinstance(self.factor, Fraction):
            return _FixedEcho(self, fetcher, cursor, math.ceil(self.factor))
        iterator = _AdaptiveEcho(self, fetcher, cursor, self.max_factor)
        self._threads.add(iterator.thread)
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the most recently delivered batch, including the state of the loader.

        After a complete epoch, this is the state at the beginning of the next epoch.

        Raises
        ------
        StateError
            If the loader keeps no state.
        """
        loader = super().state_dict()
        state = self._state if self._cursor is not None else self._loaded or EchoState(loader.get("epoch", 0))
        return {
            "echo": self._settings(),
            "loader": loader,
            "epoch": state.epoch,
            "batch": state.batch,
            "showing": state.showing,
            "sizes": [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue where `state` was saved.

        Raises
        ------
        StateError
            If `state` was saved with other settings or by another loader.
        """
        try:
            saved, loader = dict(state["echo"]), state["loader"]
            loaded = EchoState(*(index(state[name]) for name in ("epoch", "batch", "showing")))
            if min(loaded.batch, loaded.showing) < 0:
                raise ValueError(f"batch {loaded.batch}, showing {loaded.showing}")
        except (LookupError, TypeError, ValueError) as error:
            raise StateError(f"not a state of an EchoLoader ({error!r}); give what state_dict() returned") from error
        settings = self._settings()
        for name in {**settings, **saved}:
            if saved.get(name) != settings.get(name):
                shown = {"most": "max_factor"}.get(name, name)
                advice = "use the same value to resume, or start" if name in ("factor", "most") else "start"
                raise StateError(
                    f"the state was saved with {shown}={_setting_text(saved.get(name))}, but this EchoLoader has "
                    f"{shown}={_setting_text(settings.get(name))}; {advice} a new epoch"
                )
        super().load_state_dict(loader)
        self._loaded = loaded

    def _first_number(self) -> int:
        state = self._state
        factor = self.factor if isinstance(self.factor, Fraction) else self.max_factor
        return math.floor(state.batch * factor) + state.showing

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a saved state must have in common with this loader."""
        fixed = isinstance(self.factor, Fraction)
        return {
            "version": 1,
            "factor": [self.factor.numerator, self.factor.denominator] if isinstance(self.factor, Fraction) else _AUTO,
            "most": None if fixed else self.max_factor,
            # The shuffle buffer of earlier releases no longer exists, but states of version 1 still have its entries:
            # these two and "sizes".
            "shuffle_buffer": 0,
            "seed": None,
        }

    def _require_one_rank(self) -> None:
        if self.factor == _AUTO and (distributed_ranks() or (0, 1))[1] > 1:
            raise OptionsError(
                "factor='auto' would give each rank a different number of steps; give a number in distributed training",
                parameters=("factor='auto'",),
            )


def _setting_text(value: Any) -> str:
    """Return a setting as text for a message. A numeric factor is stored as [numerator, denominator]."""
    return "/".join(map(str, value)) if isinstance(value, list) else repr(value)


class _EchoIterator(BatchIterator):
    """An iterator over one epoch of an EchoLoader.

    It delivers each batch at most `max_showings` times. Each delivery updates the EchoLoader's state.
    """

    def __init__(self, loader: EchoLoader, fetcher: BatchFetcher, cursor: DeliveryCursor, max_showings: int) -> None:
        super().__init__()
        self._loader, self._fetcher, self._cursor = loader, fetcher, cursor
        self._state, self._max_showings = loader._state, max_showings
        self._current: FetchedBatch | None = None

    def _begin_batch(self, fetched: FetchedBatch) -> FetchedBatch:
        self._current, self._state.epoch = fetched, fetched.epoch
        return fetched

    def _show(self, fetched: FetchedBatch) -> Any:
        """Return the batch to deliver and count the delivery; a repeat gets the attribute `repeats`."""
        state, batch = self._state, fetched.batch
        before = repeats_of(batch)
        if state.showing or before:
            batch = mark_echoed(batch, before * self._max_showings + state.showing)
        state.shown += 1
        state.fresh += state.showing == 0
        state.showing += 1
        return batch

    def _end_batch(self, fetched: FetchedBatch) -> None:
        # Keep these updates together: after an interrupt, `_cursor` and `_state` must be at the same batch.
        self._cursor.advance(fetched)
        self._state.batch, self._state.showing = self._state.batch + 1, 0
        self._current = None

    def _release(self) -> None:
        self._current = None
        self._fetcher.close()

    def _finish(self) -> None:
        self._loader._finish(self._cursor)


class _FixedEcho(_EchoIterator):
    """An iterator that delivers each batch `factor` times on average."""

    def _next_batch(self) -> Any:
        fetched = self._current or self._begin_batch(self._fetcher.fetch())
        batch = self._show(fetched)
        assert isinstance(self._loader.factor, Fraction)
        # Do not use ``==``. After an interrupt just before this line, `showing` has already reached its full count, and
        # the next delivery increases it once more.
        if self._state.showing >= showings(self._loader.factor, self._state.batch):
            self._end_batch(fetched)
        return batch


def showings(factor: Fraction, batch: int) -> int:
    """Return how often a batch is delivered. Batches 0 to n - 1 together are delivered ``floor(factor * n)`` times."""
    return math.floor((batch + 1) * factor) - math.floor(batch * factor)


class _AdaptiveEcho(_EchoIterator):
    """An iterator that delivers each batch until the next one is ready, and at most `max_showings` times.

    A thread prefetches one batch. The thread stops at the end of the iteration, or when the iterator is
    garbage-collected.
    """

    def __init__(self, loader: EchoLoader, fetcher: BatchFetcher, cursor: DeliveryCursor, max_showings: int) -> None:
        super().__init__(loader, fetcher, cursor, max_showings)
        self._clock = _FetchClock(first_attribute(layers_of(loader), "device"))
        self.thread = PrefetchThread(fetcher, self._clock.enter, self._clock.prepare, 1, owner=self)
        self._delivered_at = 0.0
        self._step_seconds = 0.0

    def _next_batch(self) -> Any:
        if self._delivered_at:
            self._step_seconds = _moving_average(self._step_seconds, time.monotonic() - self._delivered_at)
        while True:
            fetched = self._get(wait=self._current is None or self._state.showing >= self._max_showings)
            if fetched is not None:
                if self._current is not None:
                    self._end_batch(self._current)
                self._begin_batch(fetched)
            if self._state.showing < self._max_showings:
                break
            # Repeat the loop, to wait for the next batch. This happens only after a resume: when the state was saved,
            # this batch had been delivered `max_showings` times.
        assert self._current is not None
        batch = self._show(self._current)
        self._delivered_at = time.monotonic()
        return batch

    def _get(self, *, wait: bool) -> FetchedBatch | None:
        """Return the loader's next batch; None if it is not ready. If `wait` is true, wait until it is ready.

        If `wait` is false, still wait briefly for a batch that is expected soon, because a repeat of the current batch
        would hardly save time. After the last batch, raise StopIteration, or the loader's error.
        """
        tolerance = _WAIT_SHARE * self._step_seconds
        soon = 0.0 < self._clock.begun + self._clock.seconds - time.monotonic() <= tolerance
        seconds = None if wait else tolerance if soon else 0.0
        item: FetchedBatch | BaseException | None = self.thread.get(seconds=seconds)
        if item is None:
            return None
        self.thread.release()
        if isinstance(item, BaseException):
            try:
                raise item
            finally:
                # The error's traceback refers to this frame, so the local variable would form a reference cycle.
                del item
        self._clock.begun = time.monotonic()
        return item

    def _release(self) -> None:
        # The thread closes the fetcher when it ends.
        self._current = None
        self.thread.stop()
        self.thread.join()


class _FetchClock:
    """A clock that measures how long a prefetch thread takes for a batch, to predict when the next one is ready.

    `device` is the attribute `device` of the wrapped loader. For a DeviceFeed, it is the device to which batches are
    copied. Other loaders may have any value there; None stands for no attribute.
    """

    def __init__(self, device: Any) -> None:
        # When the thread began to fetch its current batch, and how many seconds a batch takes on average.
        self.begun, self.seconds = time.monotonic(), 0.0
        # Each thread has its own current CUDA stream. If the wrapped loader is a DeviceFeed, it delivers batches in the
        # prefetch thread, and must make them ready for the stream of the consumer's thread.
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        # Each device has its own current stream. The feed's device may differ from the current device of the consumer's
        # thread, for which `current_stream` takes None.
        devices = [device, None] if isinstance(device, torch.device) and device.type == "cuda" else [None]
        self._streams = [torch.cuda.current_stream(one) for one in devices] if in_use else []

    def enter(self) -> None:
        """Make the consumer's CUDA streams and device the current ones. The prefetch thread calls this first."""
        for stream in self._streams:
            # This also makes the stream's device the current one.
            torch.cuda.set_stream(stream)

    def prepare(self, batch: Any) -> Any:
        """Record that a batch is ready, and return the batch unchanged."""
        self.seconds = _moving_average(self.seconds, time.monotonic() - self.begun)
        return batch


def _moving_average(average: float, seconds: float) -> float:
    return seconds if not average else average + _NEWEST_SHARE * (seconds - average)


def _to_fraction(factor: Any, max_factor: int) -> Fraction:
    number = real_number(factor)
    if not 1 <= number < math.inf:
        raise invalid("factor", factor, "give a number of at least 1, or 'auto'")
    exact = Fraction(factor if isinstance(factor, (int, Fraction)) else number).limit_denominator(_MAX_DENOMINATOR)
    # Convert NumPy integers in a Fraction to ints, because JSON cannot store NumPy integers.
    found = Fraction(int(exact.numerator), int(exact.denominator))
    if found > max_factor:
        raise OptionsError(
            f"factor is {factor}, above max_factor={max_factor}; give a lower factor or a higher max_factor",
            parameters=(f"max_factor={max_factor}", "max_factor", "factor"),
        )
    return found
