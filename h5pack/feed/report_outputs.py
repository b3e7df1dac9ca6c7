"""Where a monitor's reports go: a progress line, lines of JSON, TensorBoard."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from tqdm import tqdm

from h5pack.errors import OptionsError
from h5pack.feed.feed_report import FeedReport

_log = logging.getLogger("h5pack")


class ReportOutputs:
    """Writes each report to wherever it was asked for.

    Parameters
    ----------
    name : str
        The monitor's; TensorBoard's tags are ``feed/NAME/KEY``.
    progress : bool
        Show a line on standard error.
    json_lines : path, optional
        Append an object for each report.
    tensorboard : SummaryWriter or path, optional
        A writer, or the folder for one.

    Raises
    ------
    OptionsError
        If the file cannot be written, or there is no TensorBoard.
    """

    def __init__(
        self,
        name: str,
        progress: bool = False,
        json_lines: str | os.PathLike[str] | None = None,
        tensorboard: Any = None,
    ) -> None:
        self._name, self._progress = name, progress
        self._bar: Any = None
        self._begun = 0
        self._path = None if json_lines is None else os.path.abspath(json_lines)
        if self._path is not None:
            try:
                with open(self._path, "a", encoding="utf-8"):
                    pass
            except OSError as error:
                raise OptionsError(f"json_lines: {error}; name a file that can be written") from error
        self._own_writer = isinstance(tensorboard, (str, os.PathLike))
        self._writer = _writer(tensorboard) if self._own_writer else tensorboard
        if self._writer is not None and not hasattr(self._writer, "add_scalar"):
            raise OptionsError(
                f"tensorboard is a {type(tensorboard).__name__}; give a SummaryWriter, or a folder for one"
            )

    @property
    def wanted(self) -> bool:
        """Whether anybody sees the reports."""
        return self._progress or self._path is not None or self._writer is not None

    def __getstate__(self) -> dict[str, Any]:
        # A bar, and a writer of its own, belong to this process.
        return {**self.__dict__, "_bar": None, "_writer": None if self._own_writer else self._writer}

    def begin(self, total: int | None, begun: int = 0) -> None:
        """An iteration of an epoch of so many batches begins, behind `begun` of them; None: nobody knows."""
        self._begun = begun
        if self._progress:
            # Its own thread would be one that a fork leaves behind.
            tqdm.monitor_interval = 0
            self._bar = tqdm(total=total, initial=begun, desc=self._name, unit=" batches")

    def interval(self, report: FeedReport, batches: int, step: int) -> None:
        """An interval is over.

        Parameters
        ----------
        report : FeedReport
            Of the interval.
        batches : int
            Of the epoch so far.
        step : int
            TensorBoard's.
        """
        if self._bar is not None:
            self._show(report, batches)
        self._append(report, "interval")
        if self._writer is not None:
            for key, value in report.scalars().items():
                self._writer.add_scalar(f"feed/{self._name}/{key}", value, step)
            self._writer.flush()

    def end(self, report: FeedReport) -> None:
        """An epoch is over."""
        self._append(report, "epoch")
        if self._bar is not None:
            self._show(report, report.batches)
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """Close a writer of its own."""
        if self._own_writer and self._writer is not None:
            self._writer.close()
            self._writer = None

    def _show(self, report: FeedReport, batches: int) -> None:
        title = self._name if report.epoch is None else f"{self._name} {report.epoch}"
        self._bar.set_description_str(title, refresh=False)
        self._bar.set_postfix_str(report.line(), refresh=False)
        self._bar.n = self._begun + batches
        self._bar.refresh()

    def _append(self, report: FeedReport, over: str) -> None:
        if self._path is None:
            return
        line = json.dumps(report.record(over), ensure_ascii=False) + "\n"
        try:
            # Opened each time: several processes may append, and the file may be moved away.
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            _log.warning("json_lines: %s; no more lines are written", error)
            self._path = None


def _writer(folder: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise OptionsError(f"tensorboard is not installed ({error}); pip install tensorboard") from error
    return SummaryWriter(os.fspath(folder))
