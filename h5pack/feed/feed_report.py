"""What a `FeedMonitor` found out."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import Any

from h5pack.feed.gpu_status import NOT_AVAILABLE, GpuStatus


@dataclass(frozen=True)
class FeedReport:
    """How a step was fed over some time. None: not available, or not known yet.

    Attributes
    ----------
    name : str
        The monitor's.
    epoch : int or None
    batches : int
        Handed out to the step.
    images : int or None
        In them; None where a batch holds no tensor to count.
    seconds : float
        From the first request for a batch to now, or to the epoch's end.
    wait_seconds : float
        In which the process waited inside ``next(loader)``.
    stall_seconds : float
        In which the step waited. On a CPU that is `wait_seconds`. On a CUDA device it is the time in which the stream
        had nothing to do but wait for the batch: the process's waiting that no queued work hides, and the rest of the
        copy.
    stall_fraction : float
        `stall_seconds` in `seconds`, 0 to 1.
    images_per_s, bytes_per_s : float or None
        Bytes of all tensors of a batch, as handed out.
    queue_depth : int or None
        Batches that were ready in the loader at the end of that time.
    cpu_percent, children_cpu_percent : float or None
        CPU use of this process and its children (a DataLoader's workers), and of the children alone; 100 is one CPU.
    gpu : GpuStatus or None
        At the end of that time.
    freshness : float or None
        With an `EchoLoader`: the part of what was shown that was shown for the first time, 0 to 1.
    interval : FeedReport or None
        In a report of an epoch: the last interval that was over.
    """

    name: str
    epoch: int | None
    batches: int
    images: int | None
    seconds: float
    wait_seconds: float
    stall_seconds: float
    stall_fraction: float
    images_per_s: float | None
    bytes_per_s: float | None
    queue_depth: int | None = None
    cpu_percent: float | None = None
    children_cpu_percent: float | None = None
    gpu: GpuStatus | None = None
    freshness: float | None = None
    interval: FeedReport | None = None

    def line(self) -> str:
        """The figures in a few words, for a progress line."""
        speed = NOT_AVAILABLE if self.images_per_s is None else f"{self.images_per_s:,.0f} images/s"
        busy = None if self.gpu is None else self.gpu.utilisation_percent
        gpu = NOT_AVAILABLE if busy is None else f"{busy:.0f} %"
        return f"{speed}, stall {100 * self.stall_fraction:.0f} %, GPU {gpu}"

    def __str__(self) -> str:
        megabytes = None if self.bytes_per_s is None else self.bytes_per_s / 1e6
        fresh = "" if self.freshness is None else f", fresh {100 * self.freshness:.0f} %"
        return (
            f"{self.name}: {self.batches:,} batches in {self.seconds:.1f} s, {self.line()}{fresh}, "
            f"{_number(megabytes, ' MB/s')}, queue {_number(self.queue_depth, '')}, "
            f"CPU {_number(self.cpu_percent, ' %')}"
        )

    def scalars(self) -> dict[str, float]:
        """The figures that are numbers, and that are known, by name."""
        return {
            name: float(value)
            for name, value in self.record("").items()
            if isinstance(value, (int, float)) and name not in ("time", "epoch")
        }

    def record(self, over: str) -> dict[str, Any]:
        """An object for a line of JSON; its keys stay as they are between releases.

        Parameters
        ----------
        over : {"interval", "epoch"}
            What the report is over.
        """
        gpu = self.gpu or GpuStatus()
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            "name": own.pop("name"),
            "over": over,
            "time": time.time(),
            **{name: value for name, value in own.items() if name not in ("gpu", "interval")},
            **{f"gpu_{field.name}": getattr(gpu, field.name) for field in fields(gpu)},
        }


def _number(value: float | None, unit: str) -> str:
    return NOT_AVAILABLE if value is None else f"{value:,.0f}{unit}"
