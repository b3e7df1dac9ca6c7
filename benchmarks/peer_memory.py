"""Private memory of a process and all processes that it started, watched from outside."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

_INTERVAL_SECONDS = 0.02


def private_bytes(pids: Iterable[int]) -> int:
    """Anonymous and shared memory of processes, each page counted once between them.

    It is ``Pss_Anon`` and ``Pss_Shmem`` of ``/proc/PID/smaps_rollup``. Pages of mapped files are left out: they are the
    page cache's, and go when somebody else needs the memory. ``Rss`` would count them, and shared batches once for
    each process.
    """
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # It ended meanwhile.
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) * 1024
    return total


def session(leader: int) -> list[int]:
    """The processes of a session, whoever their parent is by now."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader:
                found.append(int(name))
    return found


class MemoryWatch:
    """Watches a session's private memory in a thread, as a context.

    Parameters
    ----------
    leader : int
        The process that leads the session.

    Attributes
    ----------
    peak : int
        Bytes, the most that was seen.
    """

    def __init__(self, leader: int) -> None:
        self.leader, self.peak = leader, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            self.peak = max(self.peak, private_bytes(session(self.leader)))
