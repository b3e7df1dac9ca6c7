"""`FeedMonitor`, which measures how long a training step waits for data, and recommends what to do about it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from h5pack.data.iteration import BatchIterator
from h5pack.device.feed import resolve_device
from h5pack.device.loader_wrapper import BatchFetcher, DeliveryCursor, LoaderWrapper, first_attribute, layers_of
from h5pack.device.profiling import ProfilerRanges
from h5pack.errors import OptionsError
from h5pack.monitor.probes import GpuProbe
from h5pack.monitor.recorder import DeviceWait, FeedRecorder, MonitorSettings
from h5pack.monitor.report import FeedReport, ReportOutputs


class MonitoredIterator(BatchIterator):
    """An iterator that returns a loader's batches unchanged, and measures how long the process waited for each."""

    def __init__(
        self,
        fetcher: BatchFetcher,
        cursor: DeliveryCursor,
        finish: Callable[[DeliveryCursor], None],
        recorder: FeedRecorder,
        labels: ProfilerRanges,
        device_wait: DeviceWait | None,
    ) -> None:
        super().__init__("monitor")
        self._fetcher, self._cursor, self._finish_epoch = fetcher, cursor, finish
        self._recorder, self._labels, self._device_wait = recorder, labels, device_wait

    def __next__(self) -> Any:
        self._labels.end()
        if time.perf_counter() >= self._recorder.due:
            # Report before the next batch is requested. If the user turns warnings into errors, the exception from
            # `tick` then loses no batch.
            self._recorder.tick()
        return super().__next__()

    def _next_batch(self) -> Any:
        recorder, device_wait = self._recorder, self._device_wait
        self._labels.begin("h5pack: wait")
        if device_wait is not None:
            device_wait.begin()
        before = time.perf_counter()
        try:
            batch = self._fetcher.fetch().batch
        except BaseException:
            recorder.waited(time.perf_counter() - before)
            raise
        seconds = time.perf_counter() - before
        if device_wait is not None:
            device_wait.end(seconds)
        recorder.count(batch, seconds)
        self._cursor.delivered += 1
        self._labels.begin("h5pack: step")
        return batch

    def _release(self) -> None:
        self._labels.end()
        self._recorder.finish()
        self._fetcher.close()

    def _finish(self) -> None:
        self._finish_epoch(self._cursor)

    def __del__(self) -> None:
        # If the user leaves the loop early, the iterator is only dropped, not closed. The wrapped loader's iterator
        # cleans up when it is garbage-collected.
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
        Called with the `FeedReport` of each interval and of each epoch (see ``report.over``), in the training loop's
        thread.
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
        if not _is_number(interval_seconds) or not interval_seconds > 0:
            text = f"interval_seconds is {interval_seconds!r}; give a number of seconds above 0"
            raise OptionsError(text, parameters=("interval_seconds",))
        if warn_stall is not None and not (_is_number(warn_stall) and 0 <= warn_stall <= 1):
            text = f"warn_stall is {warn_stall!r}; give a fraction from 0 to 1, or None"
            raise OptionsError(text, parameters=("warn_stall",))
        self._device = None if device is None else resolve_device(device)
        self._settings = MonitorSettings(name, float(interval_seconds), warn_stall, warn_once)
        self._outputs = ReportOutputs(name, on_report, progress, json_lines, tensorboard)
        self._profiler_ranges = profiler_ranges
        self._recorder: FeedRecorder | None = None
        self._probe: GpuProbe | None = None
        self._earlier_batches = 0
        self._first_batch = 0

    def __getstate__(self) -> dict[str, Any]:
        # These objects belong to this process and to an iteration, so they are not pickled.
        return {**self.__dict__, "_recorder": None, "_probe": None, "_cursor": None}

    def __repr__(self) -> str:
        return f"FeedMonitor({self.loader!r}, name={self._settings.name!r})"

    def report(self) -> FeedReport:
        """Return the report of the current epoch so far, or of the whole epoch once it has ended.

        The report's attribute `interval` is the report of the last completed interval.
        """
        if self._recorder is not None:
            return self._recorder.report()
        return FeedReport(self._settings.name, "epoch", time.time(), None, 0, 0, None, 0.0, 0.0, 0.0, 0.0, None, None)

    def close(self) -> None:
        """Close the TensorBoard writer if the monitor created it. A writer passed by the user stays open."""
        self._outputs.close()

    def __iter__(self) -> Iterator[Any]:
        """Begin an iteration of the loader and return an iterator that measures it."""
        layers = layers_of(self.loader)
        device = self._device or _device_of(layers)
        on_cuda = device is not None and device.type == "cuda"
        if device is not None and on_cuda and self._probe is None and torch.version.hip is None:
            # Do this before the clock starts, because NVIDIA's driver library takes long to initialize.
            self._probe = GpuProbe(device)
        if self._recorder is not None:
            self._earlier_batches += self._recorder.counters.batches
        begun = time.perf_counter()
        # A resumed epoch does not begin at batch 0, but at the batch in the loader's state.
        done = (self._loader_state() or {}).get("batches", 0)
        self._first_batch = done if isinstance(done, int) else 0
        cursor, fetcher = self._begin(record=False)
        device_wait = DeviceWait.on(device) if device is not None and on_cuda else None
        self._recorder = recorder = FeedRecorder(
            self._settings,
            layers,
            self._outputs,
            begun=begun,
            epoch=lambda: self.epoch,
            step=self._step,
            probe=self._probe,
            device_wait=device_wait,
        )
        # Count the time in which the loader started its workers as a wait of the step.
        recorder.waited(time.perf_counter() - begun)
        self._outputs.begin(_length(self.loader), self._first_batch)
        labels = ProfilerRanges(self._profiler_ranges, nvtx=on_cuda)
        return MonitoredIterator(fetcher, cursor, self._finish, recorder, labels, device_wait)

    def _step(self, batches: int) -> int:
        """Return how many batches were delivered: in all epochs if the loader has a length, else by this monitor."""
        total = _length(self.loader)
        return self._earlier_batches + batches if total is None else self.epoch * total + self._first_batch + batches


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _device_of(layers: list[Any]) -> torch.device | None:
    """Return the device on which the step probably runs; None if it is not known."""
    device = first_attribute(layers, "device")
    if isinstance(device, torch.device):
        return device
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if in_use else None
