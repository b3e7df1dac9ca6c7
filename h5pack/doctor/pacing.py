"""How long to measure a stage, and what the passing batches amount to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from h5pack.feed.cpu_time import CpuTime

REPEATS = 3
"""The least repeats that have a median and a spread."""
MOST_REPEATS = 5
LOADER_BATCHES = 2
"""Of a repeat of a loader at least: the first one tells of filling it only."""
LEAST_SECONDS = 0.015
"""Of a repeat: shorter ones measure the clock and the scheduler."""
_STARVED = 0.5
"""The part of the time from which on it is the loader that is waited for."""
_QUEUED_SECONDS = 0.1
"""Of work that waits on a device at a time."""


@dataclass(frozen=True)
class Slice:
    """One repeat of a stage.

    Attributes
    ----------
    images : int
        That were counted.
    seconds : float
        In which they passed.
    cpu_seconds : float or None
        Of this process and its children, meanwhile.
    stall_seconds : float
        In which the step waited, where that was watched.
    passed : int
        Images that passed in all, those before the counting included.
    """

    images: int
    seconds: float
    cpu_seconds: float | None = None
    stall_seconds: float = 0.0
    passed: int = 0

    @property
    def rate(self) -> float:
        """Images a second."""
        return self.images / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Need:
    """What a stage asks of the budget.

    Attributes
    ----------
    batch_seconds : float
        Of a batch, as a first look found it; of a loader, until the first batch is there.
    weight : float
        Its share of what is left when every stage has its least.
    beside_seconds : float
        Before and after each repeat, not measured.
    batches : int
        That a repeat takes at least.
    """

    batch_seconds: float
    weight: float = 1.0
    beside_seconds: float = 0.0
    batches: int = 1

    @property
    def least_seconds(self) -> float:
        """Of a repeat; a shorter one makes no sense."""
        return max(self.batches * self.batch_seconds, LEAST_SECONDS)


def needed_seconds(needs: Mapping[str, Need]) -> float:
    """The least that all stages take together."""
    return REPEATS * sum(need.least_seconds + need.beside_seconds for need in needs.values())


def repeats_within(needs: Mapping[str, Need], seconds: float) -> int:
    """How many repeats of each stage: more where the budget has room for them."""
    roomy = seconds >= 2 * MOST_REPEATS / REPEATS * needed_seconds(needs)
    return MOST_REPEATS if roomy else REPEATS


def allot(needs: Mapping[str, Need], seconds: float, repeats: int) -> dict[str, float]:
    """Seconds of a repeat of each stage: its least, and its share of what is left.

    Parameters
    ----------
    needs : mapping of str to Need
    seconds : float
        At least `needed_seconds`.
    repeats : int
        Of each stage.
    """
    least = sum(need.least_seconds + need.beside_seconds for need in needs.values())
    left = max(0.0, seconds - repeats * least)
    weights = sum(need.weight for need in needs.values())
    return {key: need.least_seconds + left * need.weight / weights / repeats for key, need in needs.items()}


class Meter(Protocol):
    """Counts what else happens while batches pass."""

    def stalled(self) -> float:
        """Seconds in which the step waited so far, of all epochs."""

    def starved(self) -> float | None:
        """Seconds in which the loader was waited for so far; None: it always is, as nothing else is done."""

    def settle(self) -> None:
        """Wait until the device has done what it was told."""

    def epoch_over(self) -> None:
        """An epoch's last batch has passed."""


class NoMeter:
    """Where there is nothing else to count, and no device to wait for."""

    def stalled(self) -> float:
        """None of it."""
        return 0.0

    def starved(self) -> float | None:
        """Nobody but the loader takes time."""
        return None

    def settle(self) -> None:
        """Nothing to wait for."""

    def epoch_over(self) -> None:
        """Nothing to note."""


@dataclass(frozen=True)
class _Mark:
    time: float
    images: int
    waiting: int
    cpu: CpuTime
    stalled: float
    starved: float | None

    @classmethod
    def beginning(cls, images: int, meter: Meter, waiting: int = 0) -> _Mark:
        """From here on counts; the counters are read before the clock, as reading them takes time, too."""
        meter.settle()
        stalled, starved, cpu = meter.stalled(), meter.starved(), CpuTime.now()
        return cls(time.perf_counter(), images, waiting, cpu, stalled, starved)

    @classmethod
    def ending(cls, images: int, meter: Meter, waiting: int = 0) -> _Mark:
        """So far counts; the clock is read first."""
        meter.settle()
        return cls(time.perf_counter(), images, waiting, CpuTime.now(), meter.stalled(), meter.starved())

    def starves(self, end: _Mark) -> bool:
        """Whether it is the loader that was waited for until `end`."""
        if self.starved is None or end.starved is None:
            return True
        return end.starved - self.starved > _STARVED * (end.time - self.time)

    def until(self, end: _Mark) -> Slice:
        """From this mark to `end`."""
        seconds, images = end.time - self.time, end.images - self.images
        if self.starves(end):
            # What waits there cannot be had yet, or has come just now: batches become ready many at a time, and not in
            # order. Where the consumer is the slow one it is what was read ahead.
            images += end.waiting - self.waiting
        cpu = end.cpu.since(self.cpu).total
        return Slice(images, seconds, cpu, end.stalled - self.stalled, end.images)


def epochs_slice(
    begin: Callable[[], Iterator[Any]],
    consume: Callable[[Any], int],
    seconds: float,
    lead: int = 0,
    meter: Meter | None = None,
    waiting: Callable[[], int] = lambda: 0,
) -> Slice:
    """Run a loader for some time.

    Epochs that are shorter than that are run to their ends, as often as they fit, with all that beginning one takes.
    A longer one is broken off; its first `lead` batches, which a loader has read ahead before anybody asks, are then
    left out, where they took less than half of the time; else the time until the first one, where the loader is the
    faster one.

    Parameters
    ----------
    begin : callable
        Begins an epoch.
    consume : callable
        Is given each batch, and tells its images.
    seconds : float
        0: until the first batch has passed.
    lead : int
        Batches that wait ready in a loader that is faster than its consumer.
    meter : Meter, optional
    waiting : callable, optional
        Tells how many images wait ready in the loader. Where it is the loader that is waited for these count, too.
    """
    meter = meter or NoMeter()
    start: _Mark | None = None
    images, longest = 0, 0.0
    while True:
        begun, before, batches = time.perf_counter(), images, 0
        iterator = begin()
        if start is None:
            # Workers that stay first end what was broken off before, which is no part of this.
            start = filled = led = _Mark.beginning(0, meter)
            deadline = start.time + seconds
        try:
            for batch in iterator:
                if not longest and not batches:
                    filled = _Mark.beginning(0, meter, waiting())
                images += consume(batch)
                batches += 1
                if not longest and time.perf_counter() >= deadline:
                    end = _Mark.ending(images, meter, waiting())
                    # What came before, and waits no more, must not be all that there is to count.
                    if batches > lead > 0 and 2 * (end.time - led.time) >= end.time - start.time:
                        return led.until(end)
                    return (start if start.starves(end) else filled).until(end)
                if not longest and batches == lead:
                    led = _Mark.beginning(images, meter, waiting())
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
        meter.epoch_over()
        now = time.perf_counter()
        longest = max(longest, now - begun)
        # An epoch without images would go round for ever.
        if images == before or now + longest > deadline:
            return start.until(_Mark.ending(images, meter))


def calls_slice(call: Callable[[], int], seconds: float, meter: Meter | None = None, together: int = 1) -> Slice:
    """Call something for some time, at least once; it tells how many images it dealt with.

    Parameters
    ----------
    call : callable
    seconds : float
    meter : Meter, optional
        Whose device is waited for after the first call, then after several: a device that is waited for each time
        has nothing to do while the next call is launched.
    together : int
        How many at most; fewer where they take long, so that no queue outlives the slice.
    """
    meter = meter or NoMeter()
    start = _Mark.beginning(0, meter)
    images = call()
    meter.settle()
    passed = time.perf_counter() - start.time
    several = max(1, min(together, int(_QUEUED_SECONDS / max(passed, 1e-9))))
    while passed < seconds:
        for _ in range(several):
            images += call()
        meter.settle()
        passed = time.perf_counter() - start.time
    return start.until(_Mark.ending(images, meter))
