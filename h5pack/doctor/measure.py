"""Timing of stages: the order and duration of their repeats, and functions that measure reads, loaders and calls."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from h5pack.benchmark.ceilings import interleaved
from h5pack.data.dataset import H5Dataset
from h5pack.data.decoding import NO_KEY
from h5pack.monitor.bottleneck import MIN_REPEATS, NO_TIME, Rates, Stage, StageResult
from h5pack.monitor.monitor import FeedMonitor
from h5pack.monitor.probes import CpuTime

# Number of repeats of a stage if the time budget is large enough (see `repeats_within`).
MAX_REPEATS = 5
# Minimum number of batches in a repeat of a loader, if an epoch has as many. A single batch would mostly show how long
# the loader takes to start.
_MIN_BATCHES = 2
# Minimum duration of a repeat in seconds. A shorter one would mostly measure the clock and the scheduler.
MIN_SECONDS = 0.015
# The loader counts as slower than its consumer if the consumer spends at least this fraction of time waiting.
_STARVED = 0.5
# Maximum seconds of work that are queued on a device before the host waits for it.
_QUEUED_SECONDS = 0.1
# Maximum size of a block, the rows that a `ChunkReader` reads with one call. Blocks of encoded chunks may be larger.
_MAX_BLOCK_BYTES = 16 * 1024 * 1024
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class NotMeasured(Exception):
    """Raised if it turns out that a stage cannot be measured; the message gives the reason."""


@dataclass(frozen=True)
class Repeat:
    """The result of one repeat of a stage: `images` images were counted in `seconds` seconds."""

    images: int
    seconds: float
    cpu_seconds: float | None = None  # used by this process and its children; None if not known
    stall_seconds: float = 0.0  # seconds for which the step waited for data; 0 if not monitored
    normalize_seconds: float = 0.0  # seconds of normalizing in the step's thread; 0 if not monitored, or on a GPU
    total_images: int = 0  # all processed images, including those before counting began

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.images / max(self.seconds, 1e-9)


def min_total_seconds(runs: Iterable[StageRun]) -> float:
    """Return the shortest time, in seconds, in which all stages can be measured `MIN_REPEATS` times."""
    return MIN_REPEATS * sum(run.total_seconds for run in runs)


def repeats_within(runs: Sequence[StageRun], seconds: float) -> int:
    """Return the number of repeats of each stage: MAX_REPEATS if they fit into half of `seconds`, else MIN_REPEATS."""
    roomy = seconds >= 2 * MAX_REPEATS / MIN_REPEATS * min_total_seconds(runs)
    return MAX_REPEATS if roomy else MIN_REPEATS


def next_seconds(left: float, run: StageRun, others: Iterable[StageRun]) -> float | None:
    """Return the duration in seconds of the next repeat, which is one of `run`; None if even the shortest does not fit.

    `left` is the remaining time in seconds, and `others` are the repeats after the next one. The time that is left
    after the shortest possible repeats is divided equally among all these repeats.
    """
    if run.total_seconds > left:
        return None
    following = [other.total_seconds for other in others]
    return run.min_seconds + max(0.0, left - run.total_seconds - sum(following)) / (1 + len(following))


def measure_in_turns(
    runs: Sequence[StageRun], end: float, measure: Callable[[StageRun, float], bool], clock: Callable[[], float]
) -> None:
    """Measure the stages repeatedly, in alternating order (A, B, B, A), so that all repeats end by `end` on `clock`.

    `measure` measures one repeat of a stage for a number of seconds. It returns False if the repeat has failed.
    """
    failed: set[Stage] = set()
    order = list(interleaved(runs, repeats_within(runs, end - clock())))
    for number, run in enumerate(order):
        if run.stage in failed:
            continue
        others = [other for other in order[number + 1 :] if other.stage not in failed]
        seconds = next_seconds(end - clock(), run, others)
        if seconds is not None and not measure(run, seconds):
            failed.add(run.stage)


class Meter:
    """The waits of a loop so far, in seconds, as two monitors measure them. Read them before and after a measurement.

    The monitor `step` measures the wait for the normalized batches that the training step receives. The monitor
    `loader` measures the wait for the loader's batches, before they are normalized.

    On a GPU, the wait of the training step is the stall that `step` has measured. On a CPU, it is the wait that
    `loader` has measured, because the wait that `step` has measured includes normalizing. Without monitors, the
    training step counts as never waiting, and the loader's consumer counts as always waiting.

    Call `synchronize` before `waits`.
    """

    def __init__(
        self, device: torch.device | None = None, step: FeedMonitor | None = None, loader: FeedMonitor | None = None
    ) -> None:
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._step, self._loader = step, loader
        # Totals of earlier iterations, because a monitor restarts at 0 in each iteration.
        self._earlier = np.zeros(3)

    def begin(self) -> None:
        """Add the waits of the finished iteration to the totals. Call this before the monitors begin the next one."""
        self._earlier = self.waits()

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)

    def waits(self) -> npt.NDArray[np.float64]:
        """Return three sums over all iterations so far, in seconds, float64 (3,).

        - The time for which the training step waited for batches.
        - The time for which the training step's thread normalized images (0 on a GPU).
        - The time for which the loader's consumer waited for the loader. Without monitors, it counts as waiting all the
          time, so this is the time of the clock.
        """
        if self._step is None or self._loader is None:
            return np.array([0.0, 0.0, time.perf_counter()])
        # Read the loader's wait first. The step's wait includes the loader's wait, and can only grow between the two
        # readings, so their difference is not negative.
        loader, step = self._loader.report().wait_seconds, self._step.report()
        on_cpu = [loader, max(0.0, step.wait_seconds - loader), loader]
        waits = on_cpu if self._cuda is None else [step.stall_seconds, 0.0, loader]
        total: npt.NDArray[np.float64] = self._earlier + np.array(waits)
        return total


@dataclass(frozen=True)
class _Mark:
    """The clock and all counters at the start or the end of a measurement."""

    time: float
    images: int
    ready: int
    cpu: CpuTime
    waits: npt.NDArray[np.float64]  # see `Meter.waits`

    @classmethod
    def begin(cls, images: int, meter: Meter, ready: int = 0) -> _Mark:
        """Mark the start of a measurement. Read the clock last, so that reading the counters is not measured."""
        return replace(cls.end(images, meter, ready), time=time.perf_counter())

    @classmethod
    def end(cls, images: int, meter: Meter, ready: int = 0) -> _Mark:
        """Mark the end of a measurement. Read the clock first, so that reading the counters is not measured."""
        meter.synchronize()
        return cls(time.perf_counter(), images, ready, CpuTime.now(), meter.waits())

    def starves(self, end: _Mark) -> bool:
        """Return whether the consumer waited for the loader at least half of the time from this mark to `end`."""
        return bool((end.waits - self.waits)[2] >= _STARVED * (end.time - self.time))

    def until(self, end: _Mark) -> Repeat:
        images = end.images - self.images
        if self.starves(end):
            # Batches become ready many at a time and out of order, so images that are ready in the loader count as
            # loaded. If the consumer is slower than the loader, they do not count, because they were only prefetched.
            images += end.ready - self.ready
        stalled, normalized, _ = (end.waits - self.waits).tolist()
        cpu = end.cpu.since(self.cpu).total
        return Repeat(images, end.time - self.time, cpu, stalled, normalized, end.images)


def measure_epochs(
    loader: Iterable[Any],
    consume: Callable[[Any], int],
    seconds: float,
    *,
    prefetched: int = 0,
    meter: Meter | None = None,
    ready_images: Callable[[], int] = lambda: 0,
    once: bool = False,
) -> Repeat:
    """Measure a loader for about `seconds`, but for at least two batches or one epoch, whichever is shorter.

    `consume` processes a batch and returns its number of images. What counts depends on the first epoch:

    - If it is shorter than `seconds`, run as many whole epochs as fit, but only one if `once` is true. All batches
      count. The time to create the iterators counts, too, except for the first one.
    - If it is longer, stop it when the time is up. The first `prefetched` batches do not count, because the loader read
      them before they were requested. But all batches count if the first `prefetched` ones took more than half of the
      time, or if most of the later batches were ready before the first of them was requested. If all batches count, the
      time until the first batch counts only if the loader is slower than its consumer.

    `ready_images` returns how many images are ready in the loader. If the consumer waits at least half of the time, the
    images that the loader has completed count. Else the images that were consumed count.
    """
    meter = meter or Meter()
    start: _Mark | None = None
    images, longest = 0, 0.0
    while True:
        begun, before, batches = time.perf_counter(), images, 0
        meter.begin()
        iterator = iter(loader)
        if start is None:
            # Start the clock after iter(), in which persistent workers finish an epoch that was stopped earlier.
            start = at_first = settled = _Mark.begin(0, meter)
            deadline = start.time + seconds
        try:
            for batch in iterator:
                if not longest and not batches:
                    at_first = _Mark.begin(0, meter, ready_images())
                images += consume(batch)
                batches += 1
                if not longest and batches >= _MIN_BATCHES and time.perf_counter() >= deadline:
                    end = _Mark.end(images, meter, ready_images())
                    # Leave out the prefetched batches. But count them if the rest of the measurement is short, or if
                    # most images of the rest were ready before the rest began. That happens if other processes use all
                    # CPUs, so that the loader's threads hardly run.
                    rest, roomy = settled.until(end), 2 * (end.time - settled.time) >= end.time - start.time
                    if batches > prefetched > 0 and roomy and 2 * rest.images >= images - settled.images:
                        return rest
                    return (start if start.starves(end) else at_first).until(end)
                if not longest and batches == prefetched:
                    settled = _Mark.begin(images, meter, ready_images())
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
        now = time.perf_counter()
        longest = max(longest, now - begun)
        # Also stop after an epoch without images, because more epochs would give none either.
        if once or images == before or now + longest > deadline:
            return start.until(_Mark.end(images, meter))


def measure_calls(
    call: Callable[[], Any],
    images: int,
    seconds: float,
    meter: Meter | None = None,
    max_queued_calls: int = 1,
    warm_up: bool = False,
) -> Repeat:
    """Measure a function that processes `images` images; call it for `seconds`, and at least once.

    Synchronize the device after the first call, and then only after every few calls. If it were synchronized after
    every call, it would be idle while the next call is launched. The longer the calls take, the fewer are queued. With
    `warm_up`, the first third of the time is not counted, because an idle GPU lowers its clock and raises it only under
    load.
    """
    meter = meter or Meter()
    if warm_up:
        measure_calls(call, images, seconds / 3, meter, max_queued_calls)
        seconds -= seconds / 3
    start, calls, queued, passed = _Mark.begin(0, meter), 0, 1, 0.0
    while not calls or passed < seconds:
        for _ in range(queued):
            call()
        meter.synchronize()
        calls, passed = calls + queued, time.perf_counter() - start.time
        queued = max(1, min(max_queued_calls, int(_QUEUED_SECONDS * calls / max(passed, 1e-9))))
    return start.until(_Mark.end(calls * images, meter))


class ChunkReader:
    """A reader of images, whose threads read blocks of at most `block_rows` rows.

    If the rows of the split are consecutive in the file, each block is within one chunk group.
    """

    def __init__(self, dataset: H5Dataset) -> None:
        self._dataset = dataset
        self._index = index = dataset.engine.indexes[dataset.names[0]]
        # An encoded chunk has to be decoded completely even for a few of its rows, so it is never split.
        max_rows = index.group_rows if index.codec is not None else _MAX_BLOCK_BYTES // max(1, index.row_bytes)
        self.block_rows = max(1, min(index.group_rows, max_rows))

    def warm(self, seconds: float, min_rows: int) -> int:
        """Read rows in order until `seconds` have passed and at least `min_rows` rows are read, or until the last row.

        Return the number of rows read.
        """
        deadline = time.perf_counter() + seconds
        rows, out = len(self._dataset), self._buffer()
        for first, last in self._blocks(0, rows):
            self._read(first, last, out)
            if time.perf_counter() >= deadline and last >= min_rows:
                return last
        return rows

    def run(self, seconds: float, num_threads: int, rows: int, begin: float = 0.0, *, once: bool = False) -> Repeat:
        """Measure reading the first `rows` rows of the split, in `num_threads` threads, for `seconds`.

        Start at the fraction `begin` of the blocks, and continue at row 0 after the last row. If `once` is true, stop
        when all rows are read, even if there is time left.
        """
        blocks = list(self._blocks(0, rows))
        deadline, first_block = time.perf_counter() + seconds, int(begin * len(blocks))

        def work(thread: int) -> int:
            out, read, number = self._buffer(), 0, first_block + thread
            while True:
                first, last = blocks[number % len(blocks)]
                self._read(first, last, out)
                read, number = read + last - first, number + num_threads
                if time.perf_counter() >= deadline or (once and number >= first_block + len(blocks)):
                    return read

        meter = Meter()
        start = _Mark.begin(0, meter)
        with ThreadPoolExecutor(num_threads) as pool:
            images = sum(pool.map(work, range(num_threads)))
        return start.until(_Mark.end(images, meter))

    def busy_fraction(self, seconds: float, rows: int) -> float:
        """Read the first `rows` rows in this thread for `seconds`; return what the function `busy_fraction` returns."""
        blocks, out = itertools.cycle(self._blocks(0, rows)), self._buffer()
        return busy_fraction(lambda: self._read(*next(blocks), out), seconds)

    def _buffer(self) -> npt.NDArray[Any]:
        shape = self._dataset.row_shape(self._dataset.names[0])
        return np.empty((self.block_rows, *shape), self._index.native_dtype)

    def _read(self, first: int, last: int, out: npt.NDArray[Any]) -> None:
        rows = self._dataset.file_rows(np.arange(first, last))
        name = self._dataset.names[0]
        if self._dataset.decoder is None:
            self._dataset.engine.read(name, rows, out[: last - first])
        else:
            self._dataset.decode_rows(name, rows, list(out[: last - first]), NO_KEY)

    def _blocks(self, first: int, rows: int) -> Iterator[tuple[int, int]]:
        """Yield the blocks of the split's rows from `first` to `rows`, each as the indices (start, stop)."""
        unit = self._index.group_rows
        while first < rows:
            edge = first + unit - int(self._dataset.rows[first]) % unit
            last = min(rows, edge, first + self.block_rows)
            yield first, last
            first = last


def busy_fraction(call: Callable[[], Any], seconds: float) -> float:
    """Call `call` for `seconds`; return the fraction (0 to 1) of time in which this thread ran or waited for a CPU."""
    ran, begun = _ready_seconds(), time.perf_counter()
    while True:
        call()
        wall = time.perf_counter() - begun
        if wall >= seconds:
            return min(1.0, (_ready_seconds() - ran) / max(wall, 1e-9))


def _ready_seconds() -> float:
    """Return this thread's CPU time in seconds, plus the time it waited for a CPU if the kernel reports that.

    The wait for a CPU is included because otherwise a busy machine would look like a slow disk.
    """
    try:
        ran, queued, _ = _SCHEDSTAT.read_text().split()
        return (int(ran) + int(queued)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()


def with_one_thread(run: Callable[[float], Repeat], seconds: float) -> Repeat:
    """Return ``run(seconds)``, called while PyTorch uses a single CPU thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run(seconds)
    finally:
        torch.set_num_threads(threads)


@dataclass
class StageRun:
    """A stage to measure, and the repeats measured so far."""

    stage: Stage
    run: Callable[[float], Repeat]  # measures the stage for the given seconds; 0: as briefly as possible
    prepare: Callable[[], None] | None = None  # called before each measurement, not measured
    note: str | None = None  # a remark for the report, such as which rows are measured
    repeats: list[Repeat] = field(default_factory=list)
    min_seconds: float = MIN_SECONDS  # duration of the measured part of the shortest possible repeat
    overhead_seconds: float = 0.0  # time that a repeat takes before and after the measured part

    @property
    def total_seconds(self) -> float:
        """Duration of the shortest possible repeat, with the overhead."""
        return self.min_seconds + self.overhead_seconds

    def try_out(self) -> None:
        """Measure as briefly as possible, to warm up and to learn how long a repeat takes."""
        took, measured = self._measure(0.0)
        self.min_seconds = max(MIN_SECONDS, measured.seconds)
        self.overhead_seconds = max(0.0, took - measured.seconds)

    def repeat(self, seconds: float) -> None:
        """Measure one more repeat, and expect that the next repeat exceeds its `seconds` by as much as this one did."""
        took, measured = self._measure(seconds)
        self.repeats.append(measured)
        self.overhead_seconds = max(0.0, took - max(seconds, self.min_seconds))

    def _measure(self, seconds: float) -> tuple[float, Repeat]:
        """Prepare and measure a repeat; return the seconds that this took in total, and the repeat."""
        begun = time.perf_counter()
        if self.prepare is not None:
            self.prepare()
        measured = self.run(seconds)
        return time.perf_counter() - begun, measured

    def result(self) -> StageResult:
        """Return the result of the stage: its rates, or the reason why there are none."""
        late = len(self.repeats) < MIN_REPEATS
        if not self.repeats:
            return StageResult(self.stage, reason=NO_TIME, late=late)
        if not all(one.images for one in self.repeats):
            return StageResult(self.stage, reason="the stage processed no images")
        known = [one.cpu_seconds for one in self.repeats if one.cpu_seconds is not None]
        seconds = sum(one.seconds for one in self.repeats)
        return StageResult(
            self.stage,
            Rates.of([one.rate for one in self.repeats]),
            late=late,
            cpus_used=sum(known) / seconds if len(known) == len(self.repeats) else None,
            images=sum(one.total_images for one in self.repeats),
            note=self.note,
        )
