"""Timing of work on a device: warmed up, on inputs that are not in its cache, in turns with a baseline.

Five calls of a kernel of 30 microseconds, one after another, measure how fast the host launches kernels, at the clock
of an idle GPU, on an input that stays in the L2 cache. So

- on CUDA, calls are captured in a graph, whose replay takes the host no time for each call;
- each call has inputs and results of its own, which together are several times as large as the cache;
- work runs until its time has settled, before anything counts;
- each measurement is between two of the baseline, so that a clock that still changes is seen, and cancels out.

Only `GraphTimer` needs CUDA; everything else is tested with a clock that a test sets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from h5pack.doctor import device_stages

Call = Callable[[], Any]
Run = Callable[[], float]
"""Does some work, and returns the seconds that the device needed for it."""

_OF_CACHE = 4
"""How many times as large as the cache the memory of all calls is, so that no call finds its own in the cache."""


class Timer(Protocol):
    """What measures the time of calls."""

    min_calls: int
    """How many calls a run should have at least."""

    def prepare(self, calls: Sequence[Call]) -> Run:
        """Return a function that makes these calls once, and returns their seconds."""


class HostTimer:
    """Measures calls that are done when they return."""

    min_calls = 1

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def prepare(self, calls: Sequence[Call]) -> Run:
        self.run(calls)
        return partial(self.run, calls)

    def run(self, calls: Sequence[Call]) -> float:
        """Make these calls, and return their seconds."""
        begin = self._clock()
        for call in calls:
            call()
        return self._clock() - begin


class GraphTimer:
    """Measures calls that queue work on a CUDA device, by replaying a graph of them between two events."""

    min_calls = 20

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def prepare(self, calls: Sequence[Call]) -> Run:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # Kernels are compiled and constants made here: neither can be captured.
            for call in calls:
                call()
        torch.cuda.synchronize(self._device)
        graph, results = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph, stream=stream):
            # Results that stay until the end of the capture do not share their memory.
            results.extend(call() for call in calls)
        results.clear()

        def run() -> float:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The first replay is not measured: it keeps the device busy while the host launches the second one.
            graph.replay()
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            return first.elapsed_time(last) / 1000

        return run


def timer_of(device: torch.device) -> Timer:
    """The timer for a device."""
    return GraphTimer(device) if device.type == "cuda" else HostTimer()


def cache_bytes_of(device: torch.device) -> int:
    """Bytes of the device's last cache; for a CPU more than most have."""
    return device_stages.cache_bytes_of(device) or 64 << 20


def copies_beyond_cache(call_bytes: int, cache_bytes: int) -> int:
    """How many calls need memory of their own, at least 2, where each reads and writes `call_bytes`."""
    return max(2, math.ceil(_OF_CACHE * cache_bytes / max(1, call_bytes)))


def enough_calls(calls: Sequence[Call], timer: Timer) -> list[Call]:
    """Repeat calls in turns until a run has as many as the timer needs."""
    return [*calls] * math.ceil(timer.min_calls / len(calls))


def settle(run: Run, *, tolerance: float = 0.03, agreeing: int = 5, min_seconds: float = 0.3) -> int:
    """Run until the last times differ by less than the tolerance, after `min_seconds` of work; return the runs made.

    A GPU raises its clock within a few tenths of a second of work. What never settles is given up after ten times
    `min_seconds`.
    """
    times: list[float] = []
    while sum(times) < 10 * min_seconds:
        times.append(run())
        last = times[-agreeing:]
        if len(last) == agreeing and max(last) <= min(last) * (1 + tolerance) and sum(times) >= min_seconds:
            break
    return len(times)


@dataclass(frozen=True)
class Turn:
    """Seconds of a run, and of the baseline before and after it."""

    seconds: float
    before: float
    after: float

    @property
    def of_baseline(self) -> float:
        """The speed of the run as a fraction of the baseline's, where both do the same amount of work."""
        return (self.before + self.after) / 2 / self.seconds

    @property
    def drift(self) -> float:
        """By which fraction the baseline changed from before to after."""
        return abs(self.after / self.before - 1)


def turns(run: Run, baseline: Run, repeats: int) -> list[Turn]:
    """Measure a run between two of its baseline, again and again, after both have settled."""
    settle(baseline)
    settle(run)
    found = []
    for _ in range(repeats):
        before, seconds, after = baseline(), run(), baseline()
        found.append(Turn(seconds, before, after))
    return found
