"""`FeedMonitor`: how well a training step is fed, and what to do where it is not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from h5pack.errors import OptionsError
from h5pack.feed.device_feed import resolve_device
from h5pack.feed.device_wait import DeviceWait
from h5pack.feed.feed_report import FeedReport
from h5pack.feed.feed_watch import FeedWatch, WatchSettings
from h5pack.feed.gpu_probe import GpuIdentity, GpuProbe
from h5pack.feed.gpu_status import GpuStatus
from h5pack.feed.loader_layers import layers_of, told
from h5pack.feed.loader_wrapper import LoaderWrapper
from h5pack.feed.monitored_iterator import MonitoredIterator
from h5pack.feed.report_outputs import ReportOutputs
from h5pack.feed.stage_labels import StageLabels


class FeedMonitor(LoaderWrapper):
    """A loader that gives another one's batches as they are, and tells how long the step waited for them.

    Once in a process it warns where the step waits too long, with the likeliest cause and its cure.

    Parameters
    ----------
    loader : iterable
        Of batches: an H5Loader, a DataLoader, a DeviceFeed, an EchoLoader, or anything else.
    every : float
        Seconds between reports.
    progress : bool
        Show a line on standard error.
    json_lines : path, optional
        Append a JSON object for each interval and each epoch to this file.
    tensorboard : SummaryWriter or path, optional
        Write scalars after each interval, to a writer or into a folder.
    warn_stall : float or None
        Warn where the step waited for more than this part of an interval, 0 to 1; the first interval of an iteration is
        for warming up. None: never.
    device : device, optional
        Where the step runs. None: the loader's, where it is a DeviceFeed; else the current CUDA device, where CUDA is
        in use when an iteration begins.
    name : str
        In reports and warnings.
    warn_once : bool
        Warn once in this process for this name; False: once in each iteration.
    labels : bool, optional
        Label "h5pack: wait" and "h5pack: step" for torch's profiler and Nsight. None: for torch's profiler while one
        runs, and for Nsight on a CUDA device. False: never.

    Raises
    ------
    OptionsError
        If a value makes no sense, the device is not there, `json_lines` cannot be written, or TensorBoard is not
        installed.
    """

    def __init__(
        self,
        loader: Any,
        *,
        every: float = 1.0,
        progress: bool = False,
        json_lines: str | os.PathLike[str] | None = None,
        tensorboard: Any = None,
        warn_stall: float | None = 0.1,
        device: torch.device | str | int | None = None,
        name: str = "train",
        warn_once: bool = True,
        labels: bool | None = None,
    ) -> None:
        if not hasattr(loader, "__iter__"):
            raise OptionsError(f"a {type(loader).__name__} cannot be iterated; give a loader")
        if not _is_number(every) or not every > 0:
            raise OptionsError(f"every is {every!r}; give the seconds between reports, above 0")
        if warn_stall is not None and not (_is_number(warn_stall) and 0 <= warn_stall <= 1):
            raise OptionsError(f"warn_stall is {warn_stall!r}; give a fraction of 0 to 1, or None")
        super().__init__(loader)
        self._device = None if device is None else resolve_device(device)
        self._settings = WatchSettings(name, float(every), warn_stall, warn_once)
        self._outputs = ReportOutputs(name, progress, json_lines, tensorboard)
        self._labels = labels
        self._watch: FeedWatch | None = None
        self._probe: GpuProbe | None = None
        self._handed_out = 0
        self._begun = 0

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to this process, and to an iteration, stays here.
        return {**self.__dict__, "_watch": None, "_probe": None, "_position": None}

    @property
    def dataset(self) -> Any:
        """The loader's.

        Raises
        ------
        AttributeError
            If it has none.
        """
        found = told(layers_of(self.loader), "dataset")
        if found is None:
            raise AttributeError(f"a {type(self.loader).__name__} has no dataset")
        return found

    def report(self) -> FeedReport:
        """The figures of the epoch so far, or of the whole epoch once it is over; `interval` has those of the last
        interval."""
        if self._watch is None:
            return FeedReport(self._settings.name, None, 0, None, 0.0, 0.0, 0.0, 0.0, None, None)
        return self._watch.report()

    def close(self) -> None:
        """Close TensorBoard's writer, where it was made here."""
        self._outputs.close()

    def __iter__(self) -> Iterator[Any]:
        """Begin an iteration of the loader."""
        layers = layers_of(self.loader)
        device = self._device or _device_of(layers)
        on_cuda = device is not None and device.type == "cuda"
        if device is not None and on_cuda and self._probe is None and torch.version.hip is None:
            # Before the clock runs: the driver's library takes its time to begin.
            self._probe = GpuProbe(GpuIdentity.of(device))
        if self._watch is not None:
            self._handed_out += self._watch.batches
        begun = time.perf_counter()
        self._begun = _begun(self._upstream.record())
        self._position, pulling = self._upstream.begin(record=False)
        device_wait = DeviceWait.on(device) if device is not None and on_cuda else None
        self._watch = watch = FeedWatch(
            self._settings,
            layers,
            self._outputs,
            lambda: self.epoch,
            self._look,
            device_wait,
            begun,
            self._step,
        )
        # Starting workers is waiting.
        watch.waited(time.perf_counter() - begun)
        self._outputs.begin(_length(self.loader), self._begun)
        labels = StageLabels(self._labels, nvtx=on_cuda)
        return MonitoredIterator(pulling, self._position, self.finish, watch, labels, device_wait)

    def _look(self) -> GpuStatus | None:
        return None if self._probe is None else self._probe.sample()

    def _step(self, batches: int) -> int:
        """Batches of all epochs, where an epoch's number is known; else those that were handed out here."""
        total = _length(self.loader)
        return self._handed_out + batches if total is None else self.epoch * total + self._begun + batches


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _begun(state: dict[str, Any] | None) -> int:
    """The batch that an iteration begins with, where the loader's state tells."""
    begun = (state or {}).get("batches", 0)
    return begun if isinstance(begun, int) else 0


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _device_of(layers: list[Any]) -> torch.device | None:
    """Where the step runs."""
    device = told(layers, "device")
    if isinstance(device, torch.device):
        return device
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if in_use else None
