"""CPU time of this process and of its children: a DataLoader's workers are among these."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path

BUSY = 0.8
"""The part of a CPU's time from which on it counts as busy."""

_PROC = Path("/proc")


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds used so far.

    Attributes
    ----------
    own : float
        By this process, all threads.
    children : float or None
        By its children and theirs, those that ended and were waited for included; None: not available.
    """

    own: float
    children: float | None

    @classmethod
    def now(cls, proc: Path = _PROC) -> CpuTime:
        """Read the clocks; `proc` is tests' own."""
        return cls(time.process_time(), _children_seconds(proc))

    def since(self, earlier: CpuTime) -> CpuTime:
        """What was used between two readings."""
        children = None
        if self.children is not None and earlier.children is not None:
            # A grandchild that outlives its parent is no longer ours, and takes its seconds along.
            children = max(0.0, self.children - earlier.children)
        return CpuTime(self.own - earlier.own, children)

    @property
    def total(self) -> float | None:
        """Of all; None: not available."""
        return None if self.children is None else self.own + self.children


def _children_seconds(proc: Path) -> float | None:
    ended = os.times()
    seconds = ended.children_user + ended.children_system
    if not (proc / "self" / "stat").exists():
        # Without /proc those that still run are not to be looked at.
        return None if multiprocessing.active_children() else seconds
    try:
        ticks = sum(_ticks(_stat(proc / child)) for child in _descendants(proc))
    except OSError:
        return None
    return seconds + ticks / os.sysconf("SC_CLK_TCK")


def _descendants(proc: Path) -> set[str]:
    """Numbers of the processes below this one."""
    own = str(os.getpid())
    if not (proc / own / "task" / own / "children").exists():
        # This kernel lists no children, but every process says whose child it is.
        return _by_parent(proc, own)
    found: set[str] = set()
    waiting = [own]
    while waiting:
        tasks = proc / waiting.pop() / "task"
        for thread in _entries(tasks):
            children = _text(tasks / thread / "children").split()
            waiting += [child for child in children if child not in found]
            found.update(children)
    return found


def _by_parent(proc: Path, own: str) -> set[str]:
    children: dict[str, list[str]] = {}
    for process in _entries(proc):
        fields = _stat(proc / process) if process.isdigit() else []
        if fields:
            children.setdefault(fields[1], []).append(process)
    found: set[str] = set()
    waiting = [own]
    while waiting:
        below = children.get(waiting.pop(), [])
        waiting += below
        found.update(below)
    return found


def _stat(folder: Path) -> list[str]:
    """Fields of a process from its state on; none where it has ended."""
    # The name before may hold spaces and brackets.
    return _text(folder / "stat").rpartition(")")[2].split()


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError):
        return []


def _text(path: Path) -> str:
    """What is in a file of /proc; nothing where its process or thread has ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _ticks(fields: list[str]) -> int:
    """Clock ticks of a process, and of those that it waited for."""
    return sum(map(int, fields[11:15]))
