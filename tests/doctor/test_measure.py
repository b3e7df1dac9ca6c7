"""How the budget is shared, and what counts of the batches that pass."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from h5pack.doctor import measure
from h5pack.doctor.measure import (
    MAX_REPEATS,
    MIN_REPEATS,
    MIN_SECONDS,
    Meter,
    Repeat,
    StageCost,
    StageRun,
    measure_calls,
    measure_epochs,
    min_total_seconds,
    repeats_within,
    share_budget,
)
from h5pack.monitor.bottleneck import INTERRUPTED, Rates, Stage
from tests.monitor.fake_clock import FakeClock

QUICK, SLOW = Stage.STEP, Stage.LOADER
COSTS = {QUICK: StageCost(0.001), SLOW: StageCost(0.5, 0.1, 2)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(measure, "time", fake)
    return fake


def test_every_stage_gets_its_minimum_and_its_share_of_the_rest() -> None:
    needed = min_total_seconds(COSTS)
    assert needed == pytest.approx(MIN_REPEATS * (MIN_SECONDS + 2 * 0.5 + 0.1))
    assert share_budget(COSTS, needed, MIN_REPEATS) == pytest.approx({QUICK: MIN_SECONDS, SLOW: 1.0})
    assert share_budget(COSTS, needed + 6, MIN_REPEATS) == pytest.approx({QUICK: MIN_SECONDS + 1, SLOW: 1.0 + 1})
    assert repeats_within(COSTS, needed) == MIN_REPEATS
    # More repeats if there is room. All of the budget is used, and no more.
    assert repeats_within(COSTS, 4 * needed) == MAX_REPEATS
    given = share_budget(COSTS, 4 * needed, MAX_REPEATS)
    assert (sum(given.values()) + 0.1) * MAX_REPEATS == pytest.approx(4 * needed)


class Loader:
    """Epochs of batches of 10 images, each of which takes its time."""

    def __init__(self, clock: FakeClock, batches: int, seconds: float, begin: float = 0.0, closed: int = 0) -> None:
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


def test_short_epochs_run_to_their_ends(clock: FakeClock) -> None:
    found = measure_epochs(Loader(clock, 4, 0.1, begin=0.2), consume, 2.0)
    # The first begins before the clock does: 0.4 s, then 0.6 s each; a fourth would end at 2.2 s.
    assert found.images == found.total_images == 3 * 40
    assert found.seconds == pytest.approx(0.4 + 0.6 + 0.6)
    assert found.rate == pytest.approx(120 / 1.6)
    # Epochs without images end, too.
    assert measure_epochs(Loader(clock, 0, 0.1), consume, 5.0).rate == 0


@pytest.mark.parametrize(("seconds", "images"), [(2.5, 200), (0.0, 10)])
def test_a_long_epoch_is_stopped_but_not_before_its_first_batch(clock: FakeClock, seconds: float, images: int) -> None:
    loader = Loader(clock, 1_000, 0.125)
    found = measure_epochs(loader, consume, seconds)
    assert (found.images, found.total_images, loader.closed) == (images, images, 1)
    assert found.seconds == pytest.approx(images / 80)


def test_prefetched_batches_are_left_out(clock: FakeClock) -> None:
    loader = Loader(clock, 1_000, 0.125)

    def prefetch(batch: int) -> int:
        # The first five are there at once.
        if loader.ready < 5:
            clock.now -= 0.125
        loader.ready += 1
        return batch

    found = measure_epochs(loader, prefetch, 2.5, prefetched=5)
    assert found.rate == pytest.approx(80)
    assert found.images == 200
    assert found.total_images == 250
    # Too short to leave any out: all that came was there before.
    assert measure_epochs(Loader(clock, 1_000, 0.125), consume, 0.625, prefetched=5).images == 50


def test_images_that_were_ready_before_are_not_subtracted_if_nothing_else_counts(clock: FakeClock) -> None:
    ready = iter([0, 160, 0])
    # All batches were read in the first half of the time, and passed on in the second half.
    found = measure_epochs(Loader(clock, 1_000, 0.125), consume, 2.5, prefetched=12, ready_images=lambda: next(ready))
    assert (found.images, found.seconds) == (200, 2.5)


class Starved(Meter):
    """A consumer that waits for a fraction of the time; None: it does nothing else."""

    def __init__(self, clock: FakeClock, fraction: float | None) -> None:
        super().__init__()
        self.clock, self.fraction = clock, fraction

    def starved(self) -> float | None:
        return None if self.fraction is None else self.fraction * self.clock.now


@pytest.mark.parametrize(("starving", "images"), [(None, 190), (0.9, 190), (0.2, 150)])
def test_ready_images_count_only_if_the_loader_is_waited_for(
    clock: FakeClock, starving: float | None, images: int
) -> None:
    ready, loader = iter([0, 30, 70]), Loader(clock, 1_000, 0.125)
    usual = {"prefetched": 5, "meter": Starved(clock, starving), "ready_images": lambda: next(ready)}
    assert measure_epochs(loader, consume, 2.5, **usual).images == images


@pytest.mark.parametrize(("starving", "seconds"), [(0.9, 3.0), (0.2, 2.0)])
def test_the_start_of_a_loader_counts_only_if_it_is_waited_for(
    clock: FakeClock, starving: float, seconds: float
) -> None:
    def consume_slowly(batch: int) -> int:
        clock.now += 0.5
        return batch

    def epoch() -> Iterator[int]:
        clock.now += 1
        yield from Loader(clock, 1_000, 0.0)()

    found = measure_epochs(epoch, consume_slowly, 3.0, prefetched=50, meter=Starved(clock, starving))
    assert (found.images, found.seconds) == (40, seconds)


class Counting(Meter):
    """Says that the step waited a second for each reading, and counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.readings = self.synchronized = 0

    def stalled(self) -> float:
        self.readings += 1
        return float(self.readings)

    def synchronize(self) -> None:
        self.synchronized += 1


def test_the_meter_is_read_at_both_ends(clock: FakeClock) -> None:
    meter = Counting()
    found = measure_epochs(Loader(clock, 4, 0.1), consume, 1.0, meter=meter)
    # At the beginning, when the first batch is there, and at the end.
    assert found.stall_seconds == 2.0
    assert meter.synchronized == 3
    leading = measure_epochs(Loader(clock, 100, 0.1), consume, 2.0, prefetched=5, meter=meter)
    assert leading.stall_seconds == 1.0


def test_calls_are_repeated_until_the_time_is_up_and_quick_ones_are_queued(clock: FakeClock) -> None:
    took = 0.25

    def call() -> None:
        clock.now += took

    meter = Counting()
    found = measure_calls(call, 7, 1.0, meter, max_queued_calls=8)
    assert (found.images, found.seconds, meter.synchronized) == (28, 1.0, 6)
    assert measure_calls(call, 7, 0.0).images == 7
    took, meter = 0.03125, Counting()
    # One, then three at a time, which are the tenth of a second that may wait.
    assert measure_calls(call, 1, 10 * took, meter, max_queued_calls=8).images == 10
    assert meter.synchronized == 1 + 1 + 3 + 1


def test_cpu_seconds_are_those_of_the_repeat() -> None:
    def burn() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    assert measure_calls(burn, 1, 0.0).cpu_seconds >= 0.05
    assert Repeat(10, 0.0).rate > 0


@pytest.mark.parametrize(("last", "cpus"), [(1.0, 1.0), (None, None)])
def test_repeats_become_rates(last: float | None, cpus: float | None) -> None:
    repeats = iter([Repeat(10, 1.0, 0.5, 0.0, 12), Repeat(30, 1.0, 1.5, 0.0, 30), Repeat(20, 1.0, last, 0.0, 20)])
    run = StageRun(Stage.LOADER, lambda seconds: next(repeats), note="all of it")
    for _ in range(3):
        run.repeat(1.0)
    result = run.result()
    assert result.rates == Rates(20, 10, 30, 3)
    # Unknown if one repeat does not know it.
    assert (result.images, result.note, result.cpus_used) == (62, "all of it", cpus)


def test_a_stage_without_rates_has_a_reason() -> None:
    run = StageRun(Stage.LOADER, lambda seconds: Repeat(0, 1.0))
    assert run.result().reason == INTERRUPTED
    run.repeat(1.0)
    assert run.result().rates is None
    assert run.result().reason not in (None, INTERRUPTED)


def test_an_estimate_prepares_and_warms_up(clock: FakeClock) -> None:
    calls: list[str] = []

    def run(seconds: float) -> Repeat:
        calls.append(f"run {seconds:g}")
        clock.now += 0.25
        return Repeat(5, 0.25)

    def prepare() -> None:
        calls.append("prepare")
        clock.now += 0.125

    found = StageRun(Stage.EVERYTHING, run, prepare, warm_up=1, min_batches=2)
    assert found.estimate() == StageCost(0.25, 0.125, 2)
    assert calls == ["prepare", "run 0", "prepare", "run 0"]
    assert found.repeats == []
    found.repeat(2.0)
    assert calls[4:] == ["prepare", "run 2"]
