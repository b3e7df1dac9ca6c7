"""Processes that are killed, or whose files are noted, at any change to a file; file systems that are too small."""

from __future__ import annotations

import bisect
import fcntl
import multiprocessing
import os
import pathlib
import pickle
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import h5py
import pytest

import h5pack

Files = dict[Path, "list[bytes] | None"]
_BLOCK = 16_384


class Change(str):
    """A call that changes a file, such as ``fsync o.h5.partial``.

    `files` has the watched files that a kill in it leaves: their blocks, None for a folder.
    """

    files: Files | None = None

    def leave_files(self, watched: Path) -> None:
        """Replace the files that match the pattern `watched` by those that a kill in this change leaves."""
        assert self.files is not None
        for path in watched.parent.glob(watched.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path, data in self.files.items():
            path.mkdir() if data is None else path.write_bytes(b"".join(data))


def convert_in_child(source: Path, out: Path, keywords: dict[str, Any], kill_at: int | None) -> list[Change]:
    """Convert in such a child; return its changes."""
    return changes_in_child(lambda: h5pack.convert(source, out, **keywords), kill_at, files_of(out))


def files_of(out: Path) -> Path:
    """A pattern for an output and the files beside it."""
    return out.with_name(f"{out.stem}*")


def distinct_steps(changes: list[Change], *, first: bool) -> list[int]:
    """Return where each kind of change occurs first, or else for the middle and the last time, in each phase.

    A phase lasts until a change that is not a write, so writing rows, moving them and copying tables are phases. Of
    steps where a kill leaves the same files, only the last is returned.
    """
    kinds: dict[tuple[str, str], list[int]] = {}
    phase = ""
    for position, change in enumerate(changes):
        kinds.setdefault((phase, change), []).append(position)
        phase = phase if change.startswith(("pwrite", "write")) else change
    chosen = (at for found in kinds.values() for at in (found[:1] if first else (found[len(found) // 2], found[-1])))
    steps = effective_steps(changes)
    return sorted({steps[bisect.bisect_left(steps, at)] for at in chosen})


def write_steps(changes: list[Change]) -> list[int]:
    """Return those of `distinct_steps` that write: for a source, whose other changes are those of every conversion."""
    return [step for step in distinct_steps(changes, first=False) if changes[step].startswith(("pwrite", "write"))]


def effective_steps(changes: list[Change]) -> list[int]:
    """Return all steps; of those where a kill leaves the same files, return the last."""
    after = [*(change.files for change in changes[1:]), None]
    return [at for at, change in enumerate(changes) if after[at] is None or change.files != after[at]]


def require_resumes(
    source: Path, out: Path, settings: dict[str, Any], choose: Callable[[list[Change]], Iterable[int]]
) -> bytes:
    """Resume a conversion from the files that a kill leaves, at the steps that `choose` selects from its changes.

    It must leave the files of an uninterrupted one. Return the bytes of the output.
    """
    changes = convert_in_child(source, out, settings, kill_at=None)
    whole, complete = _files_beside(out), h5pack.convert(source, out, **settings, resume=True)
    for step in choose(changes):
        changes[step].leave_files(files_of(out))
        # If the output exists, only cleaning up was left.
        assert not out.exists() or out.read_bytes() == whole[out.name]
        report = h5pack.convert(source, out, **settings, resume=True)
        assert (report.images, report.rejects) == (complete.images, complete.rejects)
        assert _files_beside(out) == whole, f"killed at step {step}: {changes[step]}"
    return whole[out.name]


def _files_beside(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.parent.glob(f"{out.name}*")}


def changes_in_child(work: Callable[[], Any], kill_at: int | None, watched: Path | None = None) -> list[Change]:
    """Work in such a child; return its changes, none if it was killed.

    They have the contents of the files that match the pattern `watched`.
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            made = note_changes(kill_at, watched)
            work()
            with os.fdopen(send, "wb") as stream:
                pickle.dump(made, stream)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(send)
    with os.fdopen(receive, "rb") as stream:
        data = stream.read()
    changes: list[Change] = pickle.loads(data) if data else []
    _, status = os.waitpid(child, 0)
    if not changes:
        assert kill_at is not None
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
    return changes


def note_changes(kill_at: int | None, watched: Path | None = None) -> list[Change]:
    """Make this process note its calls that change a file in a list, and kill itself in one of them."""
    changes: list[Change] = []
    lock = threading.Lock()
    die = os.kill

    def wrapped(name: str, call: Callable[..., Any], halves: bool) -> Callable[..., Any]:
        def noting(*arguments: Any, **keywords: Any) -> Any:
            with lock:
                change, done = Change(f"{name} {_file_of(arguments[0])}"), 0
                is_watched = watched is not None and kill_at is None
                if halves and (is_watched or len(changes) == kill_at):
                    # The kernel may have taken a part.
                    descriptor, data, *offset = arguments
                    done = call(descriptor, memoryview(data)[: len(data) // 2], *offset)
                    arguments = (descriptor, memoryview(data)[done:], *(start + done for start in offset))
                if len(changes) == kill_at:
                    die(os.getpid(), signal.SIGKILL)
                if watched is not None and is_watched:
                    change.files = _contents(watched, changes[-1].files if changes else None)
                changes.append(change)
            result = call(*arguments, **keywords)
            return done + result if halves else result

        return noting

    # Paths of Python 3.10 call the functions that this object holds.
    holders = [os, *filter(None, [getattr(pathlib, "_normal_accessor", None)])]
    for name in ("replace", "rename", "fsync", "ftruncate", "unlink", "mkdir", "rmdir"):
        noting = wrapped(name, getattr(os, name), False)
        for holder in holders:
            setattr(holder, name, noting)
    for name in ("pwrite", "write"):
        setattr(os, name, wrapped(name, getattr(os, name), True))
    h5py.h5f.create = wrapped("create", h5py.h5f.create, False)
    return changes


def _contents(watched: Path, before: Files | None) -> Files:
    """The blocks of all files, None of a folder; without files that another thread removes now.

    Blocks that did not change since `before` are the same objects, so that few bytes are kept and sent.
    """
    found: Files = {}
    for path in (path for top in watched.parent.glob(watched.name) for path in (top, *top.rglob("*"))):
        with suppress(FileNotFoundError):
            if path.is_dir():
                found[path] = None
                continue
            data, same = path.read_bytes(), (before or {}).get(path) or []
            blocks = [data[start : start + _BLOCK] for start in range(0, len(data), _BLOCK)]
            found[path] = [old if old == new else new for new, old in zip_longest(blocks, same[: len(blocks)])]
    return found


def _file_of(argument: Any) -> str:
    """The name of the file that a call changes, and whether it is open for direct writes."""
    way = ""
    if isinstance(argument, int):
        way = " directly" if fcntl.fcntl(argument, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0) else ""
        argument = os.readlink(f"/proc/self/fd/{argument}")
    return re.sub(r"rows-.*\.log", "rows.log", os.path.basename(os.fsdecode(argument))) + way


def kill_while_held(source: Path, out: Path, keywords: dict[str, Any], held: tuple[object, str], calls: int) -> None:
    """Convert in a forked child with 2 workers, each of which stops at its call of a function after `calls` calls.

    Kill the child when both of them wait there for a signal; the workers must end, too.
    """
    owner, name = held
    call = getattr(owner, name)
    folder = Path(tempfile.mkdtemp(dir=out.parent, prefix="held"))
    done = 0

    def holding(*arguments: Any) -> Any:
        nonlocal done
        while done == calls:
            (folder / str(os.getpid())).touch()
            signal.pause()
        done += 1
        return call(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, holding)
        settings = {**keywords, "num_workers": 2, "start_method": "fork"}
        child = multiprocessing.get_context("fork").Process(target=h5pack.convert, args=(source, out), kwargs=settings)
        child.start()
    wait_for(lambda: len(leftovers(folder)) == 2 or not child.is_alive())
    workers = [int(worker) for worker in leftovers(folder)]
    shutil.rmtree(folder)
    child.kill()
    child.join()
    assert [gone(worker) for worker in workers] == [True, True]


def interrupt(*_: object, **__: object) -> None:
    """What a patched function does that interrupts the work."""
    raise KeyboardInterrupt


def convert_until(target: str, source: Path, out: Path, settings: dict[str, Any]) -> None:
    """Convert until a function is called, such as ``h5pack.pack.finish.complete``, and interrupt the work there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, interrupt)
        with pytest.raises(KeyboardInterrupt):
            h5pack.convert(source, out, **settings)


def lose_pages(path: Path) -> None:
    """Zero some pages of a file, as a power cut may leave it."""
    data = bytearray(path.read_bytes())
    for start in range(70_000, len(data) - 5000, 90_000):
        data[start : start + 4096] = bytes(4096)
    path.write_bytes(data)


def leftovers(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def children_of(process: int) -> list[int]:
    """The children of a process, from all of /proc: the lists in /proc/PID/task vanish with threads that end."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(path.parent.name))
    return sorted(found)


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
