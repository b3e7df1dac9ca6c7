"""A clock that the tests move, and a loader that moves it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from h5pack.monitor.monitor import FeedMonitor


class FakeClock:
    """Stands in for the module `time`, or for a function of it; each reading takes `tick` seconds."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 100.0, tick

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now

    __call__ = perf_counter

    def time(self) -> float:
        return self.now


class SlowLoader:
    """Yields batches of 4 images, each of which takes some seconds of a clock."""

    def __init__(self, clock: FakeClock, seconds: float, batches: int) -> None:
        self.clock, self.seconds, self.batches = clock, seconds, batches

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for number in range(self.batches):
            self.clock.now += self.seconds
            yield [torch.full((4, 2, 2, 3), number, dtype=torch.uint8), torch.arange(4)]


def run(monitor: FeedMonitor, clock: FakeClock, seconds: float) -> None:
    """An epoch of steps that take some seconds."""
    for _ in monitor:
        clock.now += seconds
