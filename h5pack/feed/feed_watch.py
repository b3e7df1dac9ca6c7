"""What is measured while one iteration goes on."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from h5pack.feed.cpu_time import CpuTime
from h5pack.feed.device_wait import DeviceWait
from h5pack.feed.feed_report import FeedReport
from h5pack.feed.gpu_status import GpuStatus
from h5pack.feed.loader_layers import measure, told
from h5pack.feed.report_outputs import ReportOutputs
from h5pack.feed.stall_cause import Evidence, likely_cause

_warned: set[str] = set()
"""Names of the monitors that have warned in this process."""


@dataclass(frozen=True)
class WatchSettings:
    """What a monitor was told.

    Attributes
    ----------
    name : str
    every : float
        Seconds between reports.
    warn_stall : float or None
        The stall fraction above which to warn; None: never.
    warn_once : bool
        Once in this process, instead of once in each iteration.
    """

    name: str
    every: float
    warn_stall: float | None
    warn_once: bool


@dataclass(frozen=True)
class _Reading:
    """All counters at one time; those of an iteration begin at 0."""

    time: float
    batches: int
    images: int | None
    size: int
    wait: float
    stall: float
    cpu: CpuTime
    fresh: int | None
    shown: int | None
    transform: float | None


class FeedWatch:
    """Counts what one iteration hands out, and reports it after each interval.

    Parameters
    ----------
    settings : WatchSettings
    layers : list
        The loader, and those inside of it.
    outputs : ReportOutputs
    epoch : callable
        Tells the epoch that is running.
    gpu : callable
        Looks at the GPU.
    device_wait : DeviceWait or None
        On a CUDA device: counts there.
    begun : float
        On `time.perf_counter`: when the first batch was asked for.
    step : callable
        Turns a number of batches of this iteration into TensorBoard's step.
    """

    def __init__(
        self,
        settings: WatchSettings,
        layers: list[Any],
        outputs: ReportOutputs,
        epoch: Callable[[], int | None],
        gpu: Callable[[], GpuStatus | None],
        device_wait: DeviceWait | None,
        begun: float,
        step: Callable[[int], int],
    ) -> None:
        self._settings, self._layers, self._outputs = settings, layers, outputs
        self._epoch, self._look, self._step = epoch, gpu, step
        self._device_wait = device_wait
        self._gpu: GpuStatus | None = None
        self._looked = float("-inf")
        self.batches = 0
        self._images: int | None = None
        self._size = 0
        self._wait = 0.0
        self._unhidden = 0.0
        self._first = self._last = self._read(begun)
        self._interval: FeedReport | None = None
        self._warm = self._warned = False
        self._transform_seconds: float | None = None
        self._final: FeedReport | None = None
        self.due = begun + settings.every

    def waited(self, seconds: float) -> None:
        """The process waited for what was no batch in the end, or for the loader to begin."""
        self._wait += seconds
        self._unhidden += seconds

    def count(self, batch: Any, seconds: float) -> None:
        """A batch is about to be handed out, for which the process waited so long."""
        images, size = measure(batch)
        self.batches += 1
        self._wait += seconds
        self._size += size
        if images is not None:
            self._images = images + (self._images or 0)

    def tick(self) -> None:
        """An interval is over: report it, and warn if need be. Called in ``__next__`` of a monitor's iterator."""
        now = self._read(time.perf_counter())
        self.due = now.time + self._settings.every
        report = self._close_interval(now)
        limit = self._settings.warn_stall
        # The first interval is there for workers to start and caches to fill.
        warm, self._warm = self._warm, True
        if limit is None or not warm or report.stall_fraction <= limit or self._has_warned():
            return
        self._warned = True
        _warned.add(self._settings.name)
        layer = type(self._layers[-1]).__name__
        cause = likely_cause(Evidence.of(self._layers, report, self._transform_seconds))
        warnings.warn(
            f"h5pack {self._settings.name}: the step waited {100 * report.stall_fraction:.0f} % of the last "
            f"{report.seconds:.1f} s for {layer}: {cause}",
            stacklevel=3,
        )

    def finish(self) -> None:
        """The iteration has ended, by itself or early."""
        if self._final is not None:
            return
        now = self._read(time.perf_counter())
        if now.batches > self._last.batches or self._interval is None:
            self._close_interval(now)
        self._final = self._report(self._first, now, self._interval)
        self._outputs.end(self._final)

    def report(self) -> FeedReport:
        """Of the epoch so far, or of all of it once it is over."""
        if self._final is not None:
            return self._final
        return self._report(self._first, self._read(time.perf_counter()), self._interval)

    def _has_warned(self) -> bool:
        return self._warned or (self._settings.warn_once and self._settings.name in _warned)

    def _close_interval(self, now: _Reading) -> FeedReport:
        self._interval = report = self._report(self._last, now)
        before, after = self._last.transform, now.transform
        self._transform_seconds = None if before is None or after is None else after - before
        self._last = now
        self._outputs.interval(report, now.batches, self._step(now.batches))
        return report

    def _read(self, now: float) -> _Reading:
        device = self._device_wait
        return _Reading(
            now,
            self.batches,
            self._images,
            self._size,
            self._wait,
            self._wait if device is None else self._unhidden + device.seconds,
            CpuTime.now(),
            _number(told(self._layers, "fresh")),
            _number(told(self._layers, "shown")),
            _number(told(self._layers, "transform_seconds")),
        )

    def _report(self, first: _Reading, last: _Reading, interval: FeedReport | None = None) -> FeedReport:
        seconds = max(last.time - first.time, 1e-9)
        # What a device tells late may belong to an interval before.
        stall = min(max(0.0, last.stall - first.stall), seconds)
        images = None if last.images is None else last.images - (first.images or 0)
        cpu = last.cpu.since(first.cpu)
        return FeedReport(
            name=self._settings.name,
            epoch=self._epoch(),
            batches=last.batches - first.batches,
            images=images,
            seconds=seconds,
            wait_seconds=last.wait - first.wait,
            stall_seconds=stall,
            stall_fraction=stall / seconds,
            images_per_s=None if images is None else images / seconds,
            bytes_per_s=(last.size - first.size) / seconds if last.size else None,
            queue_depth=_number(told(self._layers, "queue_depth")),
            cpu_percent=None if cpu.total is None else 100 * cpu.total / seconds,
            children_cpu_percent=None if cpu.children is None else 100 * cpu.children / seconds,
            gpu=self._gpu_status(last.time),
            freshness=_freshness(first, last),
            interval=interval,
        )

    def _gpu_status(self, now: float) -> GpuStatus | None:
        """The GPU's status, looked at once an interval at most."""
        if now - self._looked >= self._settings.every:
            self._gpu, self._looked = self._look(), now
        return self._gpu


def _freshness(first: _Reading, last: _Reading) -> float | None:
    if last.shown is None or last.fresh is None:
        return None
    shown = last.shown - (first.shown or 0)
    return min(1.0, (last.fresh - (first.fresh or 0)) / shown) if shown > 0 else None


def _number(value: Any) -> Any:
    """What a loader tells, where that is a number: others may have methods of the name."""
    return value if isinstance(value, (int, float)) else None
