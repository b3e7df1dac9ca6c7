"""How the budget is shared, what counts of the batches that pass, and reading chunks and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import h5pack
from h5pack.doctor import measure
from h5pack.doctor.measure import (
    MAX_REPEATS,
    MIN_SECONDS,
    ChunkReader,
    Meter,
    Repeat,
    StageRun,
    busy_fraction,
    measure_calls,
    measure_epochs,
    measure_in_turns,
    min_total_seconds,
    next_seconds,
    repeats_within,
    with_one_thread,
)
from h5pack.monitor.advice import Remedy
from h5pack.monitor.bottleneck import MIN_REPEATS, NO_TIME, Rates, Stage
from tests.data.packs import ROWS, converted, values, write
from tests.doctor.conftest import Machine
from tests.monitor.fake_clock import FakeClock

QUICK = StageRun(Stage.LOADER, lambda seconds: Repeat(1, seconds))
SLOW = replace(QUICK, min_seconds=1.0, overhead_seconds=0.1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(measure, "time", fake)
    return fake


def test_every_stage_gets_its_minimum_and_its_share_of_the_rest() -> None:
    needed = min_total_seconds([QUICK, SLOW])
    assert needed == pytest.approx(MIN_REPEATS * (MIN_SECONDS + 1.0 + 0.1))
    # More repeats if there is room.
    assert (repeats_within([QUICK, SLOW], needed), repeats_within([QUICK, SLOW], 4 * needed)) == (
        MIN_REPEATS, MAX_REPEATS
    )  # fmt: skip
    assert next_seconds(1.1, SLOW, []) == 1.0
    assert next_seconds(1.1 - 1e-9, SLOW, []) is None
    assert next_seconds(3.1, SLOW, [QUICK]) == pytest.approx(1.0 + (2.0 - MIN_SECONDS) / 2)
    # What comes later may not fit, but this does.
    assert next_seconds(1.5, SLOW, [SLOW]) == 1.0


@pytest.mark.parametrize("seed", range(40))
def test_turns_end_in_time_however_long_repeats_take(seed: int) -> None:
    random, clock = Random(seed), FakeClock()
    noise = random.choice((1.0, 1.5, 4.0))
    names = random.sample(list(Stage), random.randint(1, 6))
    runs = [StageRun(stage, lambda seconds: Repeat(1, seconds)) for stage in names]
    for run in runs:
        run.min_seconds, run.overhead_seconds = random.uniform(0.02, 0.5), random.uniform(0.0, 0.1)
    budget = random.choice((0.1, 0.5, 1.0, 1.2, 4.0)) * min_total_seconds(runs)
    end, longest, counts = clock.now + budget, 0.0, dict.fromkeys(names, 0)

    def measure(run: StageRun, seconds: float) -> bool:
        nonlocal longest
        took = (seconds + run.overhead_seconds) * random.uniform(1.0, noise)
        assert clock.now + run.total_seconds <= end
        clock.now += took
        longest = max(longest, took)
        counts[run.stage] += 1
        return True

    measure_in_turns(runs, end, measure, clock.perf_counter)
    # Only the last repeat can be late, by as much as the machine was slower than when it was tried out.
    assert clock.now <= end + (1 - 1 / noise) * longest + 1e-9
    if noise == 1.0 and budget >= min_total_seconds(runs) * (1 + 1e-9):
        assert min(counts.values()) >= MIN_REPEATS
        assert clock.now == pytest.approx(end)
    assert max(counts.values()) <= MAX_REPEATS


def test_a_stage_that_fails_is_not_measured_again_and_leaves_its_time_to_others() -> None:
    clock, measured = FakeClock(), list[tuple[Stage, float]]()
    runs = [StageRun(stage, lambda seconds: Repeat(1, seconds)) for stage in (Stage.LOADER, Stage.STEP)]

    def measure(run: StageRun, seconds: float) -> bool:
        measured.append((run.stage, seconds))
        clock.now += seconds
        return run.stage is not Stage.LOADER

    measure_in_turns(runs, clock.now + 1.0, measure, clock.perf_counter)
    assert [stage for stage, _ in measured] == [Stage.LOADER, *[Stage.STEP] * MAX_REPEATS]
    assert sum(seconds for _, seconds in measured) == pytest.approx(1.0)


class Loader:
    """Epochs of batches of 10 images, each of which takes its time."""

    def __init__(self, clock: FakeClock, batches: int, seconds: float, begin: float = 0.0) -> None:
        self.clock, self.batches, self.seconds, self.begin = clock, batches, seconds, begin
        self.closed = 0

    def __iter__(self) -> Iterator[int]:
        self.clock.now += self.begin
        return self.epoch()

    def epoch(self) -> Iterator[int]:
        try:
            for _ in range(self.batches):
                self.clock.now += self.seconds
                yield 10
        finally:
            self.closed += 1


def test_short_epochs_run_to_their_ends(clock: FakeClock) -> None:
    found = measure_epochs(Loader(clock, 4, 0.1, begin=0.2), int, 2.0)
    # The first begins before the clock does: 0.4 s, then 0.6 s each; a fourth would end at 2.2 s.
    assert found.images == found.total_images == 3 * 40
    assert found.rate == pytest.approx(120 / (0.4 + 0.6 + 0.6))
    # Epochs without images end, too.
    assert measure_epochs(Loader(clock, 0, 0.1), int, 5.0).rate == 0


@pytest.mark.parametrize(("seconds", "images"), [(2.5, 200), (0.0, 20)])
def test_a_long_epoch_is_stopped_but_not_before_two_batches(clock: FakeClock, seconds: float, images: int) -> None:
    loader = Loader(clock, 1_000, 0.125)
    found = measure_epochs(loader, int, seconds)
    assert (found.images, found.total_images, loader.closed) == (images, images, 1)
    assert found.seconds == pytest.approx(images / 80)


def test_prefetched_batches_are_left_out(clock: FakeClock) -> None:
    # The first five are there at once.
    early = iter([0.125] * 5)

    def prefetch(batch: int) -> int:
        clock.now -= next(early, 0.0)
        return batch

    found = measure_epochs(Loader(clock, 1_000, 0.125), prefetch, 2.5, prefetched=5)
    assert (found.images, found.total_images, found.rate) == (200, 250, pytest.approx(80))
    # Too short to leave any out: all that came was there before.
    assert measure_epochs(Loader(clock, 1_000, 0.125), int, 0.625, prefetched=5).images == 50


@pytest.mark.parametrize(("prefetched", "ready"), [(12, 160), (5, 150)])
def test_ready_images_are_not_subtracted_if_nothing_else_counts(clock: FakeClock, prefetched: int, ready: int) -> None:
    found = iter([0, ready, 0])
    # All batches were read at first, and passed on later: in the second half of the time, or in most of it.
    usual = {"prefetched": prefetched, "ready_images": lambda: next(found)}
    measured = measure_epochs(Loader(clock, 1_000, 0.125), int, 2.5, **usual)
    assert (measured.images, measured.seconds) == (200, 2.5)


class Starved(Meter):
    """A consumer that waits for a fraction of the time; None: it does nothing else."""

    def __init__(self, clock: FakeClock, fraction: float | None) -> None:
        super().__init__()
        self.clock, self.fraction = clock, fraction

    def waits(self) -> Any:
        return np.array([0.0, 0.0, self.clock.now if self.fraction is None else self.fraction * self.clock.now])


@pytest.mark.parametrize(("starving", "images"), [(None, 190), (0.9, 190), (0.2, 150)])
def test_ready_images_count_if_the_loader_is_waited_for(clock: FakeClock, starving: float | None, images: int) -> None:
    ready, loader = iter([0, 30, 70]), Loader(clock, 1_000, 0.125)
    usual = {"prefetched": 5, "meter": Starved(clock, starving), "ready_images": lambda: next(ready)}
    assert measure_epochs(loader, int, 2.5, **usual).images == images


@pytest.mark.parametrize(("starving", "seconds"), [(0.9, 3.0), (0.2, 2.0)])
def test_the_start_of_a_loader_counts_if_it_is_waited_for(clock: FakeClock, starving: float, seconds: float) -> None:
    def consume_slowly(batch: int) -> int:
        clock.now += 0.5
        return batch

    def epoch() -> Iterator[int]:
        clock.now += 1
        yield from Loader(clock, 1_000, 0.0)

    found = measure_epochs(epoch(), consume_slowly, 3.0, prefetched=50, meter=Starved(clock, starving))
    assert (found.images, found.seconds) == (40, seconds)


class Counting(Meter):
    """Says that the step waited a second for each reading, and counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.readings = self.synchronized = 0

    def begin(self) -> None:
        pass

    def waits(self) -> Any:
        self.readings += 1
        return super().waits() + np.array([self.readings, 0.0, 0.0])

    def synchronize(self) -> None:
        self.synchronized += 1


def test_the_meter_is_read_at_both_ends(clock: FakeClock) -> None:
    meter = Counting()
    # At the beginning, when the first batch is there, and at the end.
    assert measure_epochs(Loader(clock, 4, 0.1), int, 1.0, meter=meter).stall_seconds == 2.0
    assert meter.synchronized == 3
    assert measure_epochs(Loader(clock, 100, 0.1), int, 2.0, prefetched=5, meter=meter).stall_seconds == 1.0


# Quick calls: one, then three at a time, which are the tenth of a second that may wait.
@pytest.mark.parametrize(("took", "seconds", "calls", "synchronized"), [(0.25, 1.0, 4, 6), (0.03125, 0.3125, 10, 6)])
def test_calls_are_repeated_until_the_time_is_up_and_quick_ones_are_queued(
    clock: FakeClock, took: float, seconds: float, calls: int, synchronized: int
) -> None:
    def call() -> None:
        clock.now += took

    meter = Counting()
    found = measure_calls(call, 7, seconds, meter, max_queued_calls=8)
    assert (found.images, found.seconds, meter.synchronized) == (7 * calls, seconds, synchronized)
    assert measure_calls(call, 7, 0.0).images == 7


@pytest.mark.parametrize("cuda", [False, True])
def test_normalizing_on_the_cpu_is_no_waiting(cuda: bool) -> None:
    """The loader takes 3 s, and the step's batch, which is normalized in its thread, 5 s; or 1 s on a GPU's stream."""

    class Monitor:
        def __init__(self, wait: float, stall: float) -> None:
            self.found = SimpleNamespace(wait_seconds=wait, stall_seconds=stall)

        def report(self) -> Any:
            return self.found

    meter = Meter(torch.device("cuda" if cuda else "cpu"), Monitor(5.0, 1.0), Monitor(3.0, 3.0))
    assert meter.waits().tolist() == ([1.0, 0.0, 3.0] if cuda else [3.0, 2.0, 3.0])
    meter.begin()
    # The totals of two iterations.
    assert meter.waits().tolist() == ([2.0, 0.0, 6.0] if cuda else [6.0, 4.0, 6.0])
    assert Meter().waits()[:2].tolist() == [0.0, 0.0]


def test_the_first_third_of_the_time_warms_a_device_up(clock: FakeClock) -> None:
    took: list[float] = []

    def call() -> None:
        # Four times as slow until the clock of the device has risen.
        took.append(0.25 if clock.now < 1.0 else 0.0625)
        clock.now += took[-1]

    start = clock.now = 0.0
    meter = Counting()
    found = measure_calls(call, 8, 3.0, meter, max_queued_calls=8, warm_up=True)
    assert (found.seconds, found.images, found.rate) == (2.0, 8 * 32, 128)
    assert (clock.now - start, took[:4], took[4]) == (3.0, [0.25] * 4, 0.0625)
    # At least one call of each kind.
    took.clear()
    assert measure_calls(call, 8, 0.0, warm_up=True).images == 8
    assert len(took) == 2


def test_cpu_seconds_are_those_of_the_repeat() -> None:
    def burn() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    assert measure_calls(burn, 1, 0.0).cpu_seconds >= 0.05
    assert Repeat(10, 0.0).rate > 0


@pytest.mark.parametrize(("last", "cpus"), [(1.0, 1.0), (None, None)])
def test_repeats_become_rates(last: float | None, cpus: float | None) -> None:
    values = [(10, 0.5, 12), (30, 1.5, 30), (20, last, 20)]
    repeats = iter([Repeat(images, 1.0, cpu, total_images=total) for images, cpu, total in values])
    run = StageRun(Stage.LOADER, lambda seconds: next(repeats), note="all of it")
    for late in (True, True, False):
        run.repeat(1.0)
        assert run.result().late == late
    result = run.result()
    assert result.rates == Rates(20, 10, 30, 3)
    # Unknown if one repeat does not know it.
    assert (result.images, result.note, result.cpus_used) == (62, "all of it", cpus)


def test_a_stage_without_rates_has_a_reason() -> None:
    run = StageRun(Stage.LOADER, lambda seconds: Repeat(0, 1.0))
    assert (run.result().reason, run.result().late) == (NO_TIME, True)
    run.repeat(1.0)
    assert run.result().rates is None
    assert run.result().reason not in (None, NO_TIME)


def test_a_trial_prepares_and_finds_the_cost(clock: FakeClock) -> None:
    calls: list[str] = []

    def run(seconds: float) -> Repeat:
        calls.append(f"run {seconds:g}")
        clock.now += 0.25
        return Repeat(5, 0.25)

    def prepare() -> None:
        calls.append("prepare")
        clock.now += 0.125

    found = StageRun(Stage.EVERYTHING, run, prepare)
    found.try_out()
    assert (found.min_seconds, found.overhead_seconds, found.repeats) == (0.25, 0.125, [])
    found.repeat(2.0)
    assert calls == ["prepare", "run 0", "prepare", "run 2"]


def test_every_row_is_read_once_a_round(dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    read = dataset.engine.read

    def recorded(name: str, rows: object, out: object = None) -> object:
        found = read(name, rows, out)
        seen.extend(np.asarray(rows).tolist())
        assert np.array_equal(found, values()[rows])
        return found

    monkeypatch.setattr(dataset.engine, "read", recorded)
    reader = ChunkReader(dataset)
    assert reader.block_rows == 10
    # Warming stops after the time and the minimum number of rows. Each thread reads at least one block.
    for call, rows in (
        (lambda: reader.warm(60.0, 0), range(ROWS)),
        (lambda: reader.warm(0.0, 0), range(10)),
        (lambda: reader.warm(0.0, 35), range(40)),
        (lambda: reader.run(0.0, 3, ROWS).images, range(30)),
        (lambda: reader.run(0.0, 1, ROWS, begin=0.999).images, range(100, 103)),
    ):
        seen.clear()
        assert (call(), sorted(seen)) == (len(rows), list(rows))


def test_a_split_may_begin_within_a_chunk_and_encoded_chunks_are_read_whole(tmp_path: Path) -> None:
    dataset = h5pack.H5Dataset(converted(tmp_path), split="test")
    assert (dataset.rows, dataset.group_rows) == (range(33, 45), 7)
    assert list(ChunkReader(dataset)._blocks(0, 12)) == [(0, 2), (2, 9), (9, 12)]
    path = write(tmp_path / "z.h5", chunks=50, compression="gzip", images=values())
    assert ChunkReader(h5pack.H5Dataset(path)).block_rows == 50


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_busy_fraction_is_0_of_reads_that_wait_and_1_of_reads_that_compute(
    dataset: h5pack.H5Dataset, machine: Machine, monkeypatch: pytest.MonkeyPatch, fraction: float
) -> None:
    spend: Callable[[float], None] = machine.work if fraction else machine.wait
    reader, read = ChunkReader(dataset), dataset.engine.read

    def slow(*arguments: Any) -> Any:
        spend(0.05)
        return read(*arguments)

    monkeypatch.setattr(dataset.engine, "read", slow)
    # A chunk of 10 rows every 50 ms.
    assert reader.run(1.0, 1, ROWS).rate == pytest.approx(10 / 0.05, rel=0.1)
    assert reader.busy_fraction(0.5, ROWS) == pytest.approx(fraction, abs=0.1)
    assert busy_fraction(lambda: spend(0.2), 0.5) == pytest.approx(fraction, abs=0.1)


def test_one_of_pytorchs_threads_is_used_during_the_call_only() -> None:
    before, used = torch.get_num_threads(), []

    def run(seconds: float) -> Repeat:
        used.append((torch.get_num_threads(), seconds))
        if seconds > 1:
            raise StopIteration
        return Repeat(100, seconds)

    torch.set_num_threads(3)
    try:
        assert with_one_thread(run, 0.5) == Repeat(100, 0.5)
        assert torch.get_num_threads() == 3
        with pytest.raises(StopIteration):
            with_one_thread(run, 2.0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert used == [(1, 0.5), (1, 2.0)]


@pytest.mark.parametrize("alone", [0.0025, 0.02, 0.036])
def test_the_time_that_is_named_is_enough_for_the_loop_with_one_thread(
    path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, alone: float
) -> None:
    """An image takes 0.02 s with all threads, and `alone` with one."""
    threads = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: threads.__setitem__(0, number))

    def step(images: torch.Tensor, labels: Any) -> None:
        machine.work(len(images) * (0.02 if threads[0] > 1 else alone))

    usual = {"model": lambda: step, "batch_size": 10, "window": 1, "num_workers": 0, "device": "cpu"}
    report = h5pack.diagnose(path, seconds=4.0, **usual)
    assert report.evidence.one_thread_ratio is None
    assert sum("PyTorch's 2 threads" in text for text in report.unknown) == 1
    assert report.parameters[0] == f"seconds={report.enough_seconds:g}"
    assert all(report.parameters[0] in text for text in report.unknown if "PyTorch's 2 threads" in text)
    report = h5pack.diagnose(path, seconds=report.enough_seconds, **usual)
    if alone == 0.0025:
        assert report.evidence.one_thread_ratio > 5, "the rest of the loop takes time, too"
    else:
        assert report.evidence.one_thread_ratio == pytest.approx(0.02 / alone, rel=0.1)
    assert not any("PyTorch's 2 threads" in text for text in report.unknown)
    assert any(one.remedy is Remedy.ONE_STEP_THREAD for one in report.advice) == (alone < 0.02)
