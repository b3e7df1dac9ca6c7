"""The counters that a `FeedMonitor` keeps during one iteration, and the reports and warnings made from them."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from h5pack.data.loader import H5Loader
from h5pack.device.batch import batch_size_and_bytes
from h5pack.device.loader_wrapper import base_datasets, first_attribute, with_samplers
from h5pack.monitor.advice import BOTTLENECK_WORDS, advise
from h5pack.monitor.bottleneck import Encoding, Evidence, judge
from h5pack.monitor.probes import CpuTime, GpuProbe, GpuStatus
from h5pack.monitor.report import FeedReport, ReportOutputs
from h5pack.system.machine import available_cpus


class DeviceWait:
    """A counter of the seconds during which the training step's CUDA stream waited for batches.

    `event` creates a timing `torch.cuda.Event`, and `stream` returns the current stream.
    """

    def __init__(self, event: Callable[[], Any], stream: Callable[[], Any]) -> None:
        self._event, self._stream = event, stream
        self._spare: list[tuple[Any, Any]] = []
        self._open: tuple[Any, Any] | None = None
        self._pending: deque[tuple[Any, Any, float]] = deque()
        self._seconds = 0.0

    @classmethod
    def on(cls, device: torch.device) -> DeviceWait:
        """Create a counter for a CUDA device."""
        return cls(partial(torch.cuda.Event, enable_timing=True), partial(torch.cuda.current_stream, device))

    def begin(self) -> None:
        """Record that a batch is about to be requested."""
        self._open = pair = self._spare.pop() if self._spare else (self._event(), self._event())
        pair[0].record(self._stream())

    def end(self, host_seconds: float) -> None:
        """Record that a batch arrived, and how many seconds the process waited for it."""
        if self._open is None:
            return
        pair, self._open = self._open, None
        # The current stream is the one that waits for the copy, so this event is reached when the copy is done.
        pair[1].record(self._stream())
        self._pending.append((*pair, host_seconds))
        self._harvest()

    @property
    def seconds(self) -> float:
        """The seconds so far. While the device has not reached the end of a wait, the process's own wait counts."""
        self._harvest()
        return self._seconds + sum(host for _, _, host in self._pending)

    def _harvest(self) -> None:
        while self._pending and self._pending[0][1].query():
            first, last, _ = self._pending.popleft()
            self._seconds += max(0.0, first.elapsed_time(last) / 1000)
            self._spare.append((first, last))


# Names of the monitors that have warned in this process.
_warned: set[str] = set()


@dataclass(frozen=True)
class MonitorSettings:
    """The parameters of `FeedMonitor` that a `FeedRecorder` needs."""

    name: str
    interval_seconds: float
    warn_stall: float | None
    warn_once: bool


@dataclass
class _Counters:
    """All counters of an iteration at one time. Reports are made from the differences between two copies."""

    time: float  # of `time.perf_counter`
    cpu: CpuTime = field(default_factory=CpuTime.now)
    batches: int = 0
    images: int | None = None
    size: int = 0  # bytes of all batches
    wait: float = 0.0  # seconds that the process waited
    stall: float = 0.0  # seconds that the step waited; `FeedRecorder._read` adds the waits measured by CUDA events
    fresh: int | None = None  # `EchoLoader.fresh`
    shown: int | None = None  # `EchoLoader.shown`
    transform: float | None = None  # seconds spent in a transform by a `DeviceFeed`


class FeedRecorder:
    """A recorder that counts the batches and waits of one iteration, and reports them after each interval.

    `layers` are the loader and all loaders that it wraps, outermost first. `begun` is when the iteration began, in
    seconds of `time.perf_counter`. `step` converts a number of batches of this iteration to `FeedReport.step`.
    `probe` is None without a GPU. `device_wait` is None if the step does not run on a CUDA device.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        layers: list[Any],
        outputs: ReportOutputs,
        *,
        begun: float,
        epoch: Callable[[], int | None],
        step: Callable[[int], int],
        probe: GpuProbe | None,
        device_wait: DeviceWait | None,
    ) -> None:
        self._settings, self._layers, self._outputs = settings, layers, outputs
        self._epoch, self._step, self._probe = epoch, step, probe
        self._device_wait = device_wait
        self._gpu: GpuStatus | None = None
        self._gpu_time = float("-inf")
        self.counters = _Counters(begun)
        self._first = self._last = self._read(begun)
        self._interval: FeedReport | None = None
        self._warm = self._warned = False
        self._final: FeedReport | None = None
        self.due = begun + settings.interval_seconds

    def waited(self, seconds: float) -> None:
        """Count seconds of waiting in which no batch arrived: while the loader started, or at its end."""
        self.counters.wait += seconds
        self.counters.stall += seconds

    def count(self, batch: Any, seconds: float) -> None:
        """Count a batch and the seconds that the process waited for it."""
        counters = self.counters
        images, size = batch_size_and_bytes(batch)
        counters.batches += 1
        counters.size += size
        counters.wait += seconds
        if self._device_wait is None:
            counters.stall += seconds
        if images is not None:
            counters.images = images + (counters.images or 0)

    def tick(self) -> None:
        """Report the interval that has ended, and warn if the step waited too long.

        Call it directly in ``__next__`` of the monitor's iterator: the warning's `stacklevel` points to the loop.
        """
        before, now = self._last, self._read(time.perf_counter())
        self.due = now.time + self._settings.interval_seconds
        report = self._close_interval(now)
        limit, name = self._settings.warn_stall, self._settings.name
        # During the first interval, workers are still starting and caches are filling, so it is not representative.
        warm, self._warm = self._warm, True
        has_warned = self._warned or (self._settings.warn_once and name in _warned)
        if limit is not None and warm and report.stall_fraction > limit and not has_warned:
            self._warned = True
            _warned.add(name)
            transform = None if before.transform is None or now.transform is None else now.transform - before.transform
            warnings.warn(f"h5pack {name}: {stall_text(self._layers, report, transform)}", stacklevel=3)

    def finish(self) -> None:
        """Report the last interval and the epoch. Call this when the iteration has ended, completely or early."""
        if self._final is not None:
            return
        now = self._read(time.perf_counter())
        if now.batches > self._last.batches or self._interval is None:
            self._close_interval(now)
        self._final = self._report("epoch", self._first, now)
        self._outputs.end(self._final)

    def report(self) -> FeedReport:
        """Return the report of the epoch so far, or of the whole epoch once it has ended."""
        return self._final or self._report("epoch", self._first, self._read(time.perf_counter()))

    def _close_interval(self, now: _Counters) -> FeedReport:
        self._interval = report = self._report("interval", self._last, now)
        self._last = now
        self._outputs.interval(report, now.batches)
        return report

    def _read(self, now: float) -> _Counters:
        """Return a copy of the counters at the time `now`, including what the device and the loaders have counted."""
        device_seconds = 0.0 if self._device_wait is None else self._device_wait.seconds
        return replace(
            self.counters,
            time=now,
            cpu=CpuTime.now(),
            stall=self.counters.stall + device_seconds,
            fresh=self._attribute("fresh"),
            shown=self._attribute("shown"),
            transform=self._attribute("transform_seconds"),
        )

    def _attribute(self, name: str) -> Any:
        """Return a number that only h5pack's loaders have, or None. Other loaders may have a method of that name."""
        value = first_attribute(self._layers, name)
        return value if isinstance(value, (int, float)) else None

    def _report(self, over: str, first: _Counters, last: _Counters) -> FeedReport:
        seconds = max(last.time - first.time, 1e-9)
        # A wait is counted when its CUDA events are done, so part of it may belong to an earlier interval: limit it.
        stall = min(max(0.0, last.stall - first.stall), seconds)
        images = None if last.images is None else last.images - (first.images or 0)
        cpu = last.cpu.since(first.cpu)
        if last.time - self._gpu_time >= self._settings.interval_seconds:
            self._gpu = None if self._probe is None else self._probe.sample()
            self._gpu_time = last.time
        return FeedReport(
            name=self._settings.name,
            over=over,
            time=time.time(),
            epoch=self._epoch(),
            step=self._step(last.batches),
            batches=last.batches - first.batches,
            images=images,
            seconds=seconds,
            wait_seconds=last.wait - first.wait,
            stall_seconds=stall,
            stall_fraction=stall / seconds,
            images_per_s=None if images is None else images / seconds,
            bytes_per_s=(last.size - first.size) / seconds if last.size else None,
            queue_depth=self._attribute("queue_depth"),
            cpu_percent=None if cpu.total is None else 100 * cpu.total / seconds,
            children_cpu_percent=None if cpu.children is None else 100 * cpu.children / seconds,
            gpu=self._gpu,
            freshness=_freshness(first, last),
            interval=self._interval if over == "epoch" else None,
        )


def _freshness(first: _Counters, last: _Counters) -> float | None:
    if last.shown is None or last.fresh is None:
        return None
    shown = last.shown - (first.shown or 0)
    return min(1.0, (last.fresh - (first.fresh or 0)) / shown) if shown > 0 else None


def stall_text(layers: list[Any], report: FeedReport, transform_seconds: float | None = None) -> str:
    """Return the text of a warning: how long the step waited, for which loader, the bottleneck, and what to do."""
    evidence = interval_evidence(layers, report, transform_seconds)
    verdict = judge(evidence)
    advice = " ".join(one.text for one in advise(verdict, evidence) if one.moves)
    return (
        f"the step waited {100 * report.stall_fraction:.0f} % of the last {report.seconds:.1f} s for "
        f"{type(layers[-1]).__name__}; the bottleneck is {BOTTLENECK_WORDS[verdict.bottlenecks[0]]}. {advice}"
    )


def interval_evidence(layers: list[Any], report: FeedReport, transform_seconds: float | None = None) -> Evidence:
    """Collect the evidence about why the step waited, from the report of an interval and the loaders' options."""
    loader, wait_seconds = layers[-1], max(report.wait_seconds, 1e-9)
    num_workers = loader.num_workers if isinstance(loader, DataLoader) else None
    percent = report.cpu_percent if num_workers is None else report.children_cpu_percent
    encoding: Encoding | None = None
    library_reason = None
    for dataset in base_datasets(first_attribute(layers, "dataset")):
        indexes = getattr(getattr(dataset, "engine", None), "indexes", {})
        for index in (indexes[name] for name in getattr(dataset, "names", ()) if name in indexes):
            encoding = encoding or Encoding.of(index)
            if index.library_reason is not None and not index.is_encoded:
                library_reason = f"{dataset.path}: {index.library_reason}"
    return Evidence(
        cpus=available_cpus(),
        num_threads=loader.num_threads if isinstance(loader, H5Loader) else None,
        num_workers=num_workers,
        encoding=encoding,
        library_reason=library_reason,
        full_shuffle=any(map(_is_full, with_samplers(loader))),
        stall_fraction=report.stall_fraction,
        wait_fraction=report.wait_seconds / max(report.stall_seconds, 1e-9),
        transform_wait_fraction=None if transform_seconds is None else transform_seconds / wait_seconds,
        cpus_used=None if percent is None else percent / 100,
    )


def _is_full(order: Any) -> bool:
    """Return whether a loader or sampler shuffles rows individually, regardless of chunks."""
    return isinstance(order, RandomSampler) or getattr(getattr(order, "plan", None), "shuffle", "") == "full"
