"""Processes that are killed at any change to a file, and file systems that are too small."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import pytest

import h5pack


def run_in_child(work: Callable[[], Any], kill_at: int | None) -> int:
    """Work in a forked child that dies by SIGKILL at its `kill_at`-th change to a file; gives how many it made."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            count = count_changes(kill_at)
            work()
            made = count()
            os.write(send, str(made).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(send)
    with os.fdopen(receive) as stream:
        told = stream.read()
    _, status = os.waitpid(child, 0)
    if told:
        return int(told)
    assert kill_at is not None
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    return 0


def convert_in_child(source: Path, out: Path, keywords: dict[str, Any], kill_at: int | None) -> int:
    """Convert in such a child."""
    return run_in_child(lambda: h5pack.convert(source, out, **keywords), kill_at)


def count_changes(kill_at: int | None) -> Callable[[], int]:
    """Make this process count its calls that change a file, and kill itself in one of them."""
    count = 0
    die = os.kill

    def wrapped(call: Callable[..., Any], halves: bool) -> Callable[..., Any]:
        def counting(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            if count == kill_at:
                if halves:
                    # The kernel may have taken a part.
                    descriptor, data, *offset = arguments
                    call(descriptor, memoryview(data)[: len(data) // 2], *offset)
                die(os.getpid(), signal.SIGKILL)
            count += 1
            return call(*arguments, **keywords)

        return counting

    for name in ("replace", "rename", "fsync", "ftruncate", "unlink", "mkdir", "rmdir"):
        setattr(os, name, wrapped(getattr(os, name), False))
    for name in ("pwrite", "write"):
        setattr(os, name, wrapped(getattr(os, name), True))
    h5py.h5f.create = wrapped(h5py.h5f.create, False)
    return lambda: count


def leftovers(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def children_of(process: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{process}/task").iterdir()
        return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())
    except OSError:
        return []


def gone(process: int, seconds: float = 20) -> bool:
    """Whether a process ends within some seconds; a zombie has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@contextmanager
def small_file_system(mount: Path, size: str) -> Iterator[Path]:
    """A file system of this size ("4m", "320k") at a new folder; skips the test where none can be made."""
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(mount)], capture_output=True)
    if made.returncode:
        pytest.skip("needs root, to run: mount -t tmpfs")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)
