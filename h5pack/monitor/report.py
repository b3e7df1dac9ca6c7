"""The reports of a `FeedMonitor` and their outputs: a callable, a progress line, JSON lines, TensorBoard."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from h5pack.errors import OptionsError
from h5pack.monitor.probes import GpuStatus
from h5pack.system.files import absolute_path
from h5pack.system.parameters import flags, invalid, is_path, require_callable
from h5pack.system.progress import progress_bar

_log = logging.getLogger("h5pack")
_NOT_AVAILABLE = "not available"


@dataclass(frozen=True, kw_only=True)
class FeedReport:
    """A report on how long the training step waited for data during an interval or an epoch.

    None means not available, or not known yet. An epoch's report covers the time from the start of the iteration until
    now, or until the end of the epoch. The defaults are those of a report before the first iteration.
    """

    name: str  #: the monitor's name
    over: str  #: the period of the report: "interval" or "epoch"
    time: float  #: Unix time at the end of the period, in seconds
    epoch: int | None = None
    step: int = 0  #: batches delivered so far: in all epochs if the loader has a length, else by this monitor
    batches: int = 0  #: number of batches that the step received during the period
    images: int | None = None  #: number of images in these batches; None if no tensor or array in them has an axis
    seconds: float = 0.0  #: length of the period
    wait_seconds: float = 0.0  #: how long the process waited inside next(loader)
    #: How long the step waited. On a CPU, or if a DeviceFeed wraps the monitor: `wait_seconds`. On a CUDA device: how
    #: long the step's stream had no work left, because the process was waiting for the batch, or the device was still
    #: copying or transforming the batch.
    stall_seconds: float = 0.0
    stall_fraction: float = 0.0  #: `stall_seconds` divided by `seconds`, 0 to 1
    images_per_s: float | None = None
    bytes_per_s: float | None = None  #: bytes per second of all tensors and arrays in these batches
    queue_depth: int | None = None  #: batches ready in the loader at the end of the period
    #: CPU use of this process and its child processes, such as a DataLoader's workers; 100 is one CPU.
    cpu_percent: float | None = None
    children_cpu_percent: float | None = None  #: CPU use of the child processes alone
    freshness: float | None = None  #: with an EchoLoader: fraction of the delivered batches that were not repeats
    gpu: GpuStatus | None = None  #: state of the GPU, read at most `interval_seconds` before the end of the period
    interval: FeedReport | None = None  #: in an epoch's report: the report of the last completed interval

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict, without `interval`. The keys are stable across versions."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("gpu", "interval")}
        gpu = self.gpu or GpuStatus()
        return {**own, **{f"gpu_{one.name}": getattr(gpu, one.name) for one in fields(gpu)}}

    def to_text(self) -> str:
        """Return the report as one line of text."""
        megabytes = None if self.bytes_per_s is None else self.bytes_per_s / 1e6
        fresh = "" if self.freshness is None else f", fresh {100 * self.freshness:.0f} %"
        return (
            f"{self.name}: {self.batches:,} batches in {self.seconds:.1f} s, {self.summary()}{fresh}, "
            f"{_number_text(megabytes, ' MB/s')}, queue {_number_text(self.queue_depth)}, "
            f"CPU {_number_text(self.cpu_percent, ' %')}"
        )

    __str__ = to_text

    def summary(self) -> str:
        """Return speed, stall fraction and GPU utilization as a short text for a progress line."""
        gpu = None if self.gpu is None else self.gpu.utilization_percent
        speed, busy = _number_text(self.images_per_s, " images/s"), _number_text(gpu, " %")
        return f"{speed}, stall {100 * self.stall_fraction:.0f} %, GPU use {busy}"


def _number_text(value: float | None, unit: str = "") -> str:
    return _NOT_AVAILABLE if value is None else f"{value:,.0f}{unit}"


def _new_writer(folder: str | os.PathLike[str]) -> Any:
    """Return a new SummaryWriter; raise OptionsError if TensorBoard cannot be imported or cannot use the folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except Exception as error:  # A broken package may raise other errors than ImportError.
        text = f"tensorboard cannot be imported ({error}); run pip install tensorboard"
        raise OptionsError(text, parameters=("tensorboard",)) from error
    try:
        return SummaryWriter(os.fspath(folder))
    except (OSError, ValueError) as error:
        text = f"tensorboard: {error}; give a folder in which files can be created"
        raise OptionsError(text, parameters=("tensorboard",)) from error


class ReportOutputs:
    """The outputs to which a monitor sends its reports. The parameters are explained in `FeedMonitor`."""

    def __init__(
        self,
        name: str,
        on_report: Callable[[FeedReport], Any] | None = None,
        progress: bool = False,
        json_lines: str | os.PathLike[str] | None = None,
        tensorboard: Any = None,
    ) -> None:
        if not isinstance(name, str):
            raise invalid("name", name, "give a str")
        require_callable("on_report", on_report)
        self._name, self._on_report, (self._progress,) = name, on_report, flags(progress=progress)
        self._bar: Any = None
        self._first_batch = 0
        self._path: str | None = None
        try:
            if json_lines is not None:
                self._path = absolute_path(json_lines)
                open(self._path, "a", encoding="utf-8").close()
        except (OSError, TypeError, ValueError) as error:
            raise OptionsError(f"json_lines: {error}; give a writable file", parameters=("json_lines",)) from error
        self._own_writer = isinstance(tensorboard, (str, os.PathLike))
        creates = self._own_writer and is_path(os.fspath(tensorboard))  # SummaryWriter("") would write into "runs".
        self._writer = _new_writer(tensorboard) if creates else tensorboard
        if self._writer is not None and not hasattr(self._writer, "add_scalar"):
            raise invalid("tensorboard", tensorboard, "give a SummaryWriter, or the folder for a new one")

    def __getstate__(self) -> dict[str, Any]:
        # The progress bar and a TensorBoard writer that was created here cannot be used in another process.
        return {**self.__dict__, "_bar": None, "_writer": None if self._own_writer else self._writer}

    def begin(self, total: int | None, first_batch: int = 0) -> None:
        """Begin an epoch of `total` batches (None: not known) at the batch with index `first_batch`."""
        self._first_batch = first_batch
        if self._progress:
            self._bar = progress_bar(total, initial=first_batch, desc=self._name, unit=" batches")

    def send(self, report: FeedReport, batches: int) -> None:
        """Send a report to the outputs. The iteration has delivered `batches` batches so far.

        The report of an epoch closes the progress bar, and is not sent to TensorBoard.
        """
        is_last = report.over == "epoch"
        if self._bar is not None:
            self._show(report, batches)
            if is_last:
                self._bar.close()
                self._bar = None
        if self._path is not None:
            self._append(report, self._path)
        if self._writer is not None and not is_last:
            self._write_scalars(report)
        if self._on_report is not None:
            self._on_report(report)

    def close(self) -> None:
        """Close the TensorBoard writer if it was created here."""
        if self._own_writer and self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_scalars(self, report: FeedReport) -> None:
        name = self._name.encode("utf-8", "backslashreplace").decode()
        try:
            for key, value in report.to_json().items():
                if isinstance(value, (int, float)) and key not in ("time", "epoch", "step"):
                    self._writer.add_scalar(f"feed/{name}/{key}", float(value), report.step)
            self._writer.flush()
        except OSError as error:
            _log.warning("tensorboard: %s; no more scalars are written", error)
            self._writer = None

    def _show(self, report: FeedReport, batches: int) -> None:
        title = self._name if report.epoch is None else f"{self._name} {report.epoch}"
        self._bar.set_description_str(title, refresh=False)
        self._bar.set_postfix_str(report.summary(), refresh=False)
        self._bar.n = self._first_batch + batches
        self._bar.refresh()

    def _append(self, report: FeedReport, path: str) -> None:
        try:
            # Open the file again for each report, because other processes may append to the file or move it.
            # UTF-8 cannot encode surrogates; `backslashreplace` writes them as their escapes in JSON.
            with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(json.dumps(report.to_json(), ensure_ascii=False) + "\n")
        except OSError as error:
            _log.warning("json_lines: %s; no more lines are written", error)
            self._path = None
