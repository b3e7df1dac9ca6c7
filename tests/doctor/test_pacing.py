"""How the budget is shared, and what is counted of the batches that pass."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from h5pack.doctor import pacing
from h5pack.doctor.pacing import (
    LEAST_SECONDS,
    MOST_REPEATS,
    REPEATS,
    Need,
    NoMeter,
    Slice,
    allot,
    calls_slice,
    epochs_slice,
    needed_seconds,
    repeats_within,
)

NEEDS = {"quick": Need(0.001), "slow": Need(0.5, 2.0, 0.1, 2)}


class Clock:
    """A clock that stands still unless it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(pacing.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_what_is_needed() -> None:
    assert needed_seconds(NEEDS) == pytest.approx(REPEATS * (LEAST_SECONDS + 2 * 0.5 + 0.1))
    assert needed_seconds({}) == 0


def test_every_stage_gets_its_least_and_its_share_of_the_rest() -> None:
    needed = needed_seconds(NEEDS)
    least = allot(NEEDS, needed, REPEATS)
    assert least == pytest.approx({"quick": LEAST_SECONDS, "slow": 1.0})
    more = allot(NEEDS, needed + 9, REPEATS)
    assert more == pytest.approx({"quick": LEAST_SECONDS + 1, "slow": 1.0 + 2})
    # All of it is used, and no more.
    assert sum(more.values()) * REPEATS + 0.1 * REPEATS == pytest.approx(needed + 9)


def test_a_roomy_budget_has_more_repeats() -> None:
    needed = needed_seconds(NEEDS)
    assert repeats_within(NEEDS, needed) == REPEATS
    assert repeats_within(NEEDS, 4 * needed) == MOST_REPEATS
    given = allot(NEEDS, 4 * needed, MOST_REPEATS)
    assert sum(given.values()) * MOST_REPEATS + 0.1 * MOST_REPEATS == pytest.approx(4 * needed)


class Loader:
    """Epochs of batches of 10 images, each of which takes its time."""

    def __init__(self, clock: Clock, batches: int, seconds: float, begin: float = 0.0, closed: int = 0) -> None:
        self.clock, self.batches, self.seconds, self.begin, self.closed = clock, batches, seconds, begin, closed
        self.ready = 0

    def __call__(self) -> Iterator[int]:
        self.clock.now += self.begin
        return self.epoch()

    def epoch(self) -> Iterator[int]:
        try:
            for _ in range(self.batches):
                self.clock.now += self.seconds
                yield 10
        finally:
            self.closed += 1


def consume(batch: int) -> int:
    return batch


def test_short_epochs_are_run_to_their_ends(clock: Clock) -> None:
    loader = Loader(clock, 4, 0.1, begin=0.2)
    found = epochs_slice(loader, consume, 2.0)
    # The first begins before the clock does: 0.4 s, then 0.6 s each; a fourth would end at 2.2 s.
    assert found.images == found.passed == 3 * 40
    assert found.seconds == pytest.approx(0.4 + 0.6 + 0.6)
    assert found.rate == pytest.approx(120 / 1.6)


def test_a_long_epoch_is_broken_off(clock: Clock) -> None:
    loader = Loader(clock, 1_000, 0.125)
    found = epochs_slice(loader, consume, 2.5)
    assert (found.images, found.passed) == (200, 200)
    assert found.seconds == pytest.approx(2.5)
    assert loader.closed == 1


def test_what_was_read_ahead_is_left_out(clock: Clock) -> None:
    loader = Loader(clock, 1_000, 0.125)

    def ahead(batch: int) -> int:
        # The first five are there at once.
        if loader.ready < 5:
            clock.now -= 0.125
        loader.ready += 1
        return batch

    found = epochs_slice(loader, ahead, 2.5, lead=5)
    assert found.rate == pytest.approx(80)
    assert found.images == 200
    assert found.passed == 250
    # Too short to leave any out: all that came was there before.
    assert epochs_slice(Loader(clock, 1_000, 0.125), consume, 0.625, lead=5).images == 50


def test_images_that_wait_in_a_loader_count(clock: Clock) -> None:
    waiting = iter([0, 30, 70])
    found = epochs_slice(Loader(clock, 1_000, 0.125), consume, 2.5, lead=5, waiting=lambda: next(waiting))
    assert found.images == 150 + 70 - 30


def test_what_waited_before_is_not_all_that_there_is_to_count(clock: Clock) -> None:
    waiting = iter([0, 160, 0])
    # All of the slice was read before its first half was over, and only handed on in its second.
    found = epochs_slice(Loader(clock, 1_000, 0.125), consume, 2.5, lead=12, waiting=lambda: next(waiting))
    assert found.images == 200
    assert found.seconds == 2.5


@pytest.mark.parametrize(("starving", "images"), [(0.9, 150 + 70 - 30), (0.2, 150)])
def test_what_was_read_ahead_of_a_slow_consumer_does_not(clock: Clock, starving: float, images: int) -> None:
    waiting = iter([0, 30, 70])

    class Starved(NoMeter):
        def starved(self) -> float:
            return starving * clock.now

    loader = Loader(clock, 1_000, 0.125)
    found = epochs_slice(loader, consume, 2.5, 5, Starved(), lambda: next(waiting))
    assert found.images == images


@pytest.mark.parametrize(("starving", "seconds"), [(0.9, 3.0), (0.2, 2.0)])
def test_filling_a_loader_that_is_the_faster_one_does_not_count(clock: Clock, starving: float, seconds: float) -> None:
    class Starved(NoMeter):
        def starved(self) -> float:
            return starving * clock.now

    loader = Loader(clock, 1_000, 0.0)

    def consume_slowly(batch: int) -> int:
        clock.now += 0.5
        return batch

    def epoch() -> Iterator[int]:
        clock.now += 1
        yield from loader()

    found = epochs_slice(epoch, consume_slowly, 3.0, 50, Starved())
    assert (found.images, found.seconds) == (40, seconds)


def test_a_first_look_is_one_batch(clock: Clock) -> None:
    loader = Loader(clock, 1_000, 0.1)
    assert epochs_slice(loader, consume, 0.0).images == 10
    assert loader.closed == 1


def test_epochs_without_images_end(clock: Clock) -> None:
    assert epochs_slice(Loader(clock, 0, 0.1), consume, 5.0).rate == 0


def test_an_error_ends_the_epoch(clock: Clock) -> None:
    loader = Loader(clock, 5, 0.1)

    def fail(batch: int) -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        epochs_slice(loader, fail, 1.0)
    assert loader.closed == 1


class Counting(NoMeter):
    """Says that the step waited a second for each look, and counts what it is told."""

    def __init__(self) -> None:
        self.looks = self.settled = self.epochs = 0

    def stalled(self) -> float:
        self.looks += 1
        return float(self.looks)

    def settle(self) -> None:
        self.settled += 1

    def epoch_over(self) -> None:
        self.epochs += 1


def test_the_meter_is_asked_at_both_ends(clock: Clock) -> None:
    meter = Counting()
    found = epochs_slice(Loader(clock, 4, 0.1), consume, 1.0, meter=meter)
    # At the beginning, when the first batch is there, and at the end.
    assert found.stall_seconds == 2.0
    assert (meter.settled, meter.epochs) == (3, 2)
    leading = epochs_slice(Loader(clock, 100, 0.1), consume, 2.0, lead=5, meter=meter)
    assert leading.stall_seconds == 1.0


def test_calls(clock: Clock) -> None:
    def call() -> int:
        clock.now += 0.25
        return 7

    meter = Counting()
    found = calls_slice(call, 1.0, meter)
    assert (found.images, found.seconds, meter.settled) == (28, 1.0, 6)
    assert calls_slice(call, 0.0).images == 7


def test_quick_calls_are_queued_and_slow_ones_are_not(clock: Clock) -> None:
    took = 0.03125

    def call() -> int:
        clock.now += took
        return 1

    meter = Counting()
    # One, then three at a time, which are the tenth of a second that may wait.
    assert calls_slice(call, 10 * took, meter, together=8).images == 10
    assert meter.settled == 1 + 1 + 3 + 1
    took = 1.0
    assert calls_slice(call, 2.5, together=8).images == 3


def test_cpu_seconds_are_those_of_the_slice() -> None:
    def burn() -> int:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        return 1

    found = calls_slice(burn, 0.1)
    assert found.cpu_seconds is not None
    assert found.cpu_seconds >= 0.05
    assert Slice(10, 0.0).rate > 0
