"""CPU time of this process and its children, waits of a CUDA stream, and the GPU's state from NVIDIA's driver."""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

_PROC = Path("/proc")
_ENDED = (FileNotFoundError, ProcessLookupError)
_log = logging.getLogger("h5pack")


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds that were used so far, or since an earlier reading."""

    own: float  # CPU seconds of this process, in all threads
    children: float | None  # CPU seconds of all descendants, including ended ones; None: not available

    @classmethod
    def now(cls) -> CpuTime:
        """Read the current CPU times."""
        return cls(time.process_time(), _children_seconds())

    def since(self, earlier: CpuTime) -> CpuTime:
        """Return the CPU seconds used since an earlier reading."""
        children = None
        if self.children is not None and earlier.children is not None:
            # A grandchild that outlives its parent is no longer counted, so the sum may decrease.
            children = max(0.0, self.children - earlier.children)
        return CpuTime(self.own - earlier.own, children)

    @property
    def total(self) -> float | None:
        """CPU seconds of this process and its descendants together; None if not available."""
        return None if self.children is None else self.own + self.children


def _children_seconds() -> float | None:
    """Return the CPU seconds of all descendants of this process; None if they are unknown."""
    ended = os.times()
    seconds = ended.children_user + ended.children_system
    own = str(os.getpid())
    if not (_PROC / own / "task" / own / "children").exists():
        # The system does not list child processes, so the CPU seconds of children that still run are not known.
        return None if multiprocessing.active_children() else seconds
    try:
        # The process name, in brackets, may contain brackets. Fields 11 to 14 after the last bracket, counted from 0,
        # are the user and system time of the process and of its ended children. If the process has ended, there are no
        # fields.
        stats = [_text(_PROC / child / "stat").rpartition(")")[2].split() for child in set(_descendants(own))]
        ticks = sum(int(ticks) for stat in stats for ticks in stat[11:15])
    except OSError:
        return None
    return seconds + ticks / os.sysconf("SC_CLK_TCK")


def _descendants(process: str) -> Iterator[str]:
    """Yield the process IDs of all descendants of a process; none if it has ended."""
    with contextlib.suppress(*_ENDED):
        for thread in (_PROC / process / "task").iterdir():
            for child in _text(thread / "children").split():
                yield child
                yield from _descendants(child)


def _text(path: Path) -> str:
    """Return the text of a file in /proc; "" if its process or thread has ended."""
    try:
        return path.read_text()
    except _ENDED:
        return ""


class DeviceWait:
    """A counter of the seconds during which the training step's CUDA stream waited for batches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[tuple[Any, Any]] = []
        self._pending: deque[tuple[Any, Any, float]] = deque()
        self._seconds = 0.0
        # Another thread may request a report. The lock is reentrant, because the garbage collector may end an iteration
        # in a thread that holds the lock.
        self._lock = threading.RLock()

    def begin(self) -> None:
        """Record that a batch is about to be requested."""
        event = partial(torch.cuda.Event, enable_timing=True)
        self._open = self._spare.pop() if self._spare else (event(), event())
        self._open[0].record(torch.cuda.current_stream(self._device))

    def end(self, host_seconds: float) -> None:
        """Record that a batch arrived, and how many seconds the process waited for it."""
        # The current stream waits for the copy and the transform, so it reaches this event when both are done.
        self._open[1].record(torch.cuda.current_stream(self._device))
        with self._lock:
            self._pending.append((*self._open, host_seconds))
            self._count_finished()

    @property
    def seconds(self) -> float:
        """The total seconds of all waits. If the device has not ended a wait yet, the process's wait is counted."""
        with self._lock:
            self._count_finished()
            return self._seconds + sum(host for _, _, host in self._pending)

    def _count_finished(self) -> None:
        while self._pending and self._pending[0][1].query():
            first, last, _ = self._pending.popleft()
            self._seconds += max(0.0, first.elapsed_time(last) / 1000)
            self._spare.append((first, last))


@dataclass(frozen=True)
class GpuStatus:
    """The state of a GPU at one time. None means not available."""

    name: str | None = None
    # Percentage of the driver's last sampling period (about 0.2 s to 1 s) during which at least one kernel was running,
    # 0 to 100. At 100 %, kernels may still use only a small part of the GPU.
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None  # used by all processes together
    memory_total_bytes: int | None = None


class GpuProbe:
    """A probe that queries the state of one CUDA device from NVML, the management library of NVIDIA's driver.

    NVML numbers GPUs by PCI bus, while torch's numbers depend on `CUDA_VISIBLE_DEVICES` and the GPUs' speed. The GPU is
    therefore identified by its UUID, which is the same in both.
    """

    def __init__(self, device: torch.device) -> None:
        self._card: Any = None
        try:
            self._nvml: Any = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._card = _find_card(self._nvml, device)
            self._name = self._nvml.nvmlDeviceGetName(self._card)
        except Exception as error:
            # A problem with the driver or its Python package must not stop the training; reports then have no `gpu`.
            self._card = None
            _log.info("reports have no GPU status, which needs NVIDIA's driver and nvidia-ml-py: %s", error)

    def sample(self) -> GpuStatus | None:
        """Return the GPU's current state; None if it cannot be queried."""
        if self._card is None:
            return None
        rates, memory = self._query("nvmlDeviceGetUtilizationRates"), self._query("nvmlDeviceGetMemoryInfo")
        return GpuStatus(
            self._name,
            None if rates is None else float(rates.gpu),
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
        )

    def _query(self, function: str) -> Any:
        try:
            return getattr(self._nvml, function)(self._card)
        except Exception:
            # The query is not supported or not permitted, or the package does not have this function.
            return None


def _find_card(nvml: Any, device: torch.device) -> Any:
    """Return NVML's handle of a torch device. Raise an error if the device cannot be identified with certainty."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is not None:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    # torch 2.4 does not report the UUID.
    if nvml.nvmlDeviceGetCount() > 1:
        raise LookupError(f"{device} cannot be identified among several GPUs")
    return nvml.nvmlDeviceGetHandleByIndex(0)
