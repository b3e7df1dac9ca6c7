"""`FeedMonitor`, which measures how long a training step waits for data, and recommends what to do about it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from h5pack.data.dataset import H5Dataset
from h5pack.data.iteration import BatchIterator
from h5pack.data.loader import H5Loader
from h5pack.device.batch import batch_size_and_bytes
from h5pack.device.feed import resolve_device
from h5pack.device.loader_wrapper import (
    BatchFetcher,
    DeliveryCursor,
    LoaderWrapper,
    base_datasets,
    first_attribute,
    layers_of,
    with_samplers,
)
from h5pack.device.profiling import ProfilerRanges
from h5pack.monitor.advice import advise
from h5pack.monitor.bottleneck import Encoding, Evidence, judge
from h5pack.monitor.probes import CpuTime, DeviceWait, GpuProbe, GpuStatus
from h5pack.monitor.report import FeedReport, ReportOutputs
from h5pack.order.cursor import Resumable
from h5pack.system.machine import available_cpus
from h5pack.system.parameters import flags, invalid, real_number

# Names of the monitors that have warned in this process.
_warned: set[str] = set()


class MonitoredIterator(BatchIterator):
    """An iterator that returns a loader's batches unchanged, and measures how long the process waits for each batch."""

    def __init__(
        self,
        fetcher: BatchFetcher,
        cursor: DeliveryCursor,
        finish: Callable[[DeliveryCursor], None],
        recorder: FeedRecorder,
        labels: ProfilerRanges,
    ) -> None:
        super().__init__("monitor")
        self._fetcher, self._cursor, self._finish_epoch = fetcher, cursor, finish
        self._recorder, self._labels = recorder, labels
        self._thread = threading.get_ident()

    def __next__(self) -> Any:
        self._labels.end()
        if time.perf_counter() >= self._recorder.due:
            # Report before requesting the next batch, so that no batch is lost if the user turns warnings into errors
            # and `tick` raises.
            self._recorder.tick()
        return super().__next__()

    def _next_batch(self) -> Any:
        recorder = self._recorder
        if threading.get_ident() != self._thread:
            # A DeviceFeed around this monitor requests batches in its own thread. That thread's current stream is not
            # the step's, so count the waits of the process, not those of the stream.
            recorder.device_wait = None
        self._labels.begin("h5pack: wait")
        if recorder.device_wait is not None:
            recorder.device_wait.begin()
        before = time.perf_counter()
        try:
            batch = self._fetcher.fetch().batch
        except BaseException:
            recorder.waited(time.perf_counter() - before)
            raise
        recorder.count(batch, time.perf_counter() - before)
        self._cursor.delivered += 1
        self._labels.begin("h5pack: step")
        return batch

    def _release(self) -> None:
        self._labels.end()
        try:
            self._recorder.finish()
        finally:
            self._fetcher.close()

    def _finish(self) -> None:
        self._finish_epoch(self._cursor)

    def __del__(self) -> None:
        # If the user leaves the loop early, nothing closes the iterator, so report here. The wrapped loader's iterator
        # needs no call, because it cleans up when it is garbage-collected.
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self._labels.end()
                self._recorder.finish()


class FeedMonitor(LoaderWrapper):
    """A loader that returns the batches of another loader and measures how long the training step waits for them.

    If the step waits too long, a warning names the bottleneck and recommends what to do.

    Parameters
    ----------
    loader : iterable
        An H5Loader, DataLoader, DeviceFeed, EchoLoader or any other iterable of batches.
    interval_seconds : float
        Time between reports, in seconds.
    on_report : callable, optional
        Called with the `FeedReport` of each interval and of each epoch (see ``report.over``), in the thread that
        iterates over the monitor.
    progress : bool
        Whether to show a progress line on standard error.
    json_lines : path, optional
        A file to which a JSON object is appended for each report.
    tensorboard : SummaryWriter or path, optional
        A writer, or the folder for a new writer. Scalars are written after each interval.
    warn_stall : float or None
        Warn if the step waited for more than this fraction of an interval, 0 to 1. The first interval of an iteration
        never causes a warning, because workers start and caches fill then. None: never warn.
    warn_once : bool
        True: warn at most once in this process for this `name`. False: warn at most once in each iteration.
    device : device, optional
        The device on which the step runs. None: the device of a DeviceFeed among the wrapped loaders, else the current
        CUDA device if CUDA is in use when an iteration begins.
    name : str
        The monitor's name in reports and warnings.
    profiler_ranges : bool, optional
        Mark the ranges "h5pack: wait" and "h5pack: step" for profilers. True: always for torch's profiler, and for
        Nsight if the device is a CUDA device. None: the same, but for torch's profiler only while it is running. False:
        never.

    Raises
    ------
    OptionsError
        If a value is invalid, the device does not exist, `json_lines` cannot be written, or TensorBoard is not
        installed.
    """

    def __init__(
        self,
        loader: Any,
        *,
        interval_seconds: float = 1.0,
        on_report: Callable[[FeedReport], Any] | None = None,
        progress: bool = False,
        json_lines: str | os.PathLike[str] | None = None,
        tensorboard: Any = None,
        warn_stall: float | None = 0.1,
        warn_once: bool = True,
        device: torch.device | str | int | None = None,
        name: str = "train",
        profiler_ranges: bool | None = None,
    ) -> None:
        super().__init__(loader)
        if not real_number(interval_seconds) > 0:
            raise invalid("interval_seconds", interval_seconds, "give a number of seconds above 0")
        if warn_stall is not None and not 0 <= real_number(warn_stall) <= 1:
            raise invalid("warn_stall", warn_stall, "give a fraction from 0 to 1, or None")
        self._device = None if device is None else resolve_device(device)
        self._name, self._interval_seconds = name, float(interval_seconds)
        self._warn_stall, (self._warn_once,) = warn_stall, flags(warn_once=warn_once)
        self._outputs = ReportOutputs(name, on_report, progress, json_lines, tensorboard)
        self._profiler_ranges = None if profiler_ranges is None else flags(profiler_ranges=profiler_ranges)[0]
        self._recorder: FeedRecorder | None = None
        self._probe: GpuProbe | None = None
        self._earlier_batches = 0
        self._first_batch = 0

    def __getstate__(self) -> dict[str, Any]:
        # Do not pickle these objects, because they belong to this process or to a running iteration.
        return {**super().__getstate__(), "_recorder": None, "_probe": None, "_cursor": None}

    def __repr__(self) -> str:
        return f"FeedMonitor({self.loader!r}, name={self._name!r})"

    def report(self) -> FeedReport:
        """Return the report of the current epoch so far, or of the whole epoch once it has ended.

        The report's attribute `interval` is the report of the last completed interval, or None if there is none. Before
        the first iteration, the report counts no batches.
        """
        if self._recorder is not None:
            return self._recorder.report()
        return FeedReport(name=self._name, over="epoch", time=time.time())

    def close(self) -> None:
        """Close the TensorBoard writer if the monitor created it. A writer passed by the user stays open."""
        self._outputs.close()

    def __iter__(self) -> Iterator[Any]:
        """Begin an iteration of the loader and return an iterator that measures it."""
        layers = layers_of(self.loader)
        device = self._device or _device_of(layers)
        cuda = device if device is not None and device.type == "cuda" else None
        if cuda is not None and self._probe is None and torch.version.hip is None:
            # Do this before the clock starts, because NVIDIA's driver library takes long to initialize.
            self._probe = GpuProbe(cuda)
        if self._recorder is not None:
            # The previous iterator may still exist, and may not have reported. Report the previous iteration now, while
            # the loader's epoch and the progress bar still belong to it.
            self._recorder.finish()
        begun = time.perf_counter()
        cursor, fetcher = self._begin(record=False)
        if self._recorder is not None:
            self._earlier_batches += self._recorder.counters.batches
        # A resumed epoch does not begin at batch 0.
        self._first_batch = self._first_number()
        self._recorder = recorder = FeedRecorder(self, layers, begun, None if cuda is None else DeviceWait(cuda))
        # The step also waited while the loader started its workers.
        recorder.waited(time.perf_counter() - begun)
        self._outputs.begin(self._length(), self._first_batch)
        labels = ProfilerRanges(self._profiler_ranges, nvtx=cuda is not None)
        return MonitoredIterator(fetcher, cursor, self._finish, recorder, labels)

    def _length(self) -> int | None:
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None

    def _step(self, batches: int) -> int:
        """Return how many batches were delivered: in all epochs if the loader has a length, else by this monitor."""
        total = self._length()
        return self._earlier_batches + batches if total is None else self.epoch * total + self._first_batch + batches


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
    transform: float | None = None  # seconds that a `DeviceFeed` spent in its transform


class FeedRecorder:
    """A recorder that counts the batches and waits of one iteration, and reports them after each interval.

    `layers` are the loader and all loaders that it wraps, outermost first. `begun` is when the iteration began, in
    seconds of `time.perf_counter`. `device_wait` is None if the step does not run on a CUDA device.
    """

    def __init__(
        self, monitor: FeedMonitor, layers: list[Any], begun: float, device_wait: DeviceWait | None = None
    ) -> None:
        self._monitor, self._layers, self.device_wait = monitor, layers, device_wait
        # A weak reference to the monitor. The thread that reports the iteration takes it, so the list is then empty.
        self._unreported: list[FeedMonitor] = [weakref.proxy(monitor)]
        self._gpu: GpuStatus | None = None
        self._gpu_time = float("-inf")
        self.counters = _Counters(begun)
        self._first = self._last = self._read(begun)
        self._interval: FeedReport | None = None
        self._warned = False
        self._final: FeedReport | None = None
        self.due = begun + monitor._interval_seconds

    def waited(self, seconds: float) -> None:
        """Count seconds of waiting that brought no batch: while the loader started, at its end, or before its error."""
        self.counters.wait += seconds
        self.counters.stall += seconds

    def count(self, batch: Any, seconds: float) -> None:
        """Count a batch and the seconds that the process waited for it."""
        counters = self.counters
        if self.device_wait is None:
            counters.stall += seconds
        else:
            self.device_wait.end(seconds)
        images, size = batch_size_and_bytes(batch)
        counters.batches += 1
        counters.size += size
        counters.wait += seconds
        if images is not None:
            counters.images = images + (counters.images or 0)

    def tick(self) -> None:
        """Report the interval that has ended, and warn if the step waited too long.

        Call this directly in ``__next__`` of the iterator: the warning's `stacklevel` then points to the user's loop.
        """
        before, now = self._last, self._read(time.perf_counter())
        # The first interval is not representative, because workers are still starting and caches are filling.
        warm = self._interval is not None
        self.due = now.time + self._monitor._interval_seconds
        report = self._close_interval(now)
        self._monitor._outputs.send(report, now.batches)
        limit, name = self._monitor._warn_stall, self._monitor._name
        has_warned = self._warned or (self._monitor._warn_once and name in _warned)
        if limit is not None and warm and report.stall_fraction > limit and not has_warned:
            self._warned = True
            _warned.add(name)
            transform = None if before.transform is None or now.transform is None else now.transform - before.transform
            warnings.warn(f"h5pack {name}: {stall_text(self._layers, report, transform)}", stacklevel=3)

    def finish(self) -> None:
        """Report the last interval and the epoch. Call this when the iteration has ended, completely or early."""
        try:
            # One thread may end the iteration while another begins the next. `list.pop` is atomic, so only one reports.
            weak_monitor = self._unreported.pop()
        except IndexError:
            return
        monitor, now = self._monitor, self._read(time.perf_counter())
        is_new = now.batches > self._last.batches or self._interval is None
        last = self._close_interval(now) if is_new else None
        self._final, self.due = self._report("epoch", self._first, now), float("inf")
        # Keep only a weak reference. The monitor refers to this recorder, so a strong reference would close a cycle.
        # Freeing a DataLoader in a reference cycle takes 5 seconds for each of its workers.
        self._monitor = weak_monitor
        try:
            if last is not None:
                monitor._outputs.send(last, now.batches)
        finally:
            monitor._outputs.send(self._final, now.batches)

    def report(self) -> FeedReport:
        """Return the report of the epoch so far, or of the whole epoch once it has ended."""
        return self._final or self._report("epoch", self._first, self._read(time.perf_counter()))

    def _close_interval(self, now: _Counters) -> FeedReport:
        self._interval = report = self._report("interval", self._last, now)
        self._last = now
        return report

    def _read(self, now: float) -> _Counters:
        """Return a copy of the counters at the time `now`, updated with the counts of the device and the loaders."""
        device_seconds = 0.0 if self.device_wait is None else self.device_wait.seconds
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
        """Return the attribute `name` of the loaders if it is a number, else None.

        Loaders of other libraries may have a method with this name.
        """
        value = first_attribute(self._layers, name)
        return value if isinstance(value, (int, float)) else None

    def _report(self, over: str, first: _Counters, last: _Counters) -> FeedReport:
        seconds = max(last.time - first.time, 1e-9)
        # A wait is counted when its CUDA events have completed, so part of it may belong to an earlier interval. The
        # sum of the waits may then exceed the length of this interval, so limit it.
        stall = min(max(0.0, last.stall - first.stall), seconds)
        images = None if last.images is None else last.images - (first.images or 0)
        cpu = last.cpu.since(first.cpu)
        monitor = self._monitor
        if last.time - self._gpu_time >= monitor._interval_seconds:
            self._gpu = None if monitor._probe is None else monitor._probe.sample()
            self._gpu_time = last.time
        return FeedReport(
            name=monitor._name,
            over=over,
            time=time.time(),
            epoch=monitor.epoch,
            step=monitor._step(last.batches),
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


def _device_of(layers: list[Any]) -> torch.device | None:
    """Return the device on which the step probably runs; None if it is not known."""
    device = first_attribute(layers, "device")
    if isinstance(device, torch.device):
        return device
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if in_use else None


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
        f"{type(layers[-1]).__name__}; the bottleneck is {verdict.bottlenecks[0].words}. {advice}"
    )


def interval_evidence(layers: list[Any], report: FeedReport, transform_seconds: float | None = None) -> Evidence:
    """Collect the evidence about why the step waited, from the report of an interval and the loaders' options."""
    loader, wait_seconds = layers[-1], max(report.wait_seconds, 1e-9)
    num_workers = loader.num_workers if isinstance(loader, DataLoader) else None
    percent = report.cpu_percent if num_workers is None else report.children_cpu_percent
    encoding: Encoding | None = None
    decodes_once = isinstance(loader, H5Loader) and loader.decodes_once
    library_reason = None
    datasets = base_datasets(first_attribute(layers, "dataset"))
    for dataset in (one for one in datasets if isinstance(one, H5Dataset)):
        for index in (dataset.engine.indexes[name] for name in dataset.names):
            encoding = encoding or (None if decodes_once else Encoding.of(index))
            if index.library_reason is not None and not index.is_encoded:
                library_reason = f"{dataset.path}: {index.library_reason}"
    return Evidence(
        cpus=available_cpus(),
        machine_cpus=os.cpu_count(),
        gpus=torch.cuda.device_count(),
        num_threads=loader.num_threads if isinstance(loader, H5Loader) else None,
        num_workers=num_workers,
        encoding=encoding,
        library_reason=library_reason,
        full_shuffle=any(map(_is_full, with_samplers(loader))),
        stall_fraction=report.stall_fraction,
        wait_fraction=min(1.0, report.wait_seconds / max(report.stall_seconds, 1e-9)),
        transform_wait_fraction=None if transform_seconds is None else transform_seconds / wait_seconds,
        cpus_used=None if percent is None else percent / 100,
    )


def _is_full(order: Any) -> bool:
    """Return whether a loader or sampler shuffles rows individually, regardless of chunks."""
    return isinstance(order, RandomSampler) or (isinstance(order, Resumable) and order.plan.shuffle == "full")
