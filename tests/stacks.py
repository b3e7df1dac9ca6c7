"""Stacks of threads that outlive the process they were taken in.

During a test standard error is a temporary file of pytest, which is lost when a worker of pytest-xdist dies. A worker
therefore writes stacks to a file of its own, and the controller, the process that started the workers, prints it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FOLDER = "H5PACK_TEST_STACKS"
_PYTEST = ("_pytest", "pluggy", "xdist", "execnet")
"""Frames of these packages are left out."""

_descriptor: int | None = None
_folder: str | None = None
_report: list[str] = []


def begin(*, is_worker: bool, is_controller: bool) -> None:
    """Open the file that stacks of this process are written to; to be called while nothing is captured."""
    global _descriptor, _folder
    if is_worker:
        name = os.environ["PYTEST_XDIST_WORKER"]
        _descriptor = os.open(Path(os.environ[_FOLDER]) / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        faulthandler.enable(_descriptor)
    else:
        _descriptor = os.dup(2)
    if is_controller:
        _folder = os.environ[_FOLDER] = tempfile.mkdtemp(prefix="h5pack-stacks-")


def end() -> None:
    """Remove the files of the workers that this process started."""
    if _folder is not None:
        shutil.rmtree(_folder, ignore_errors=True)


@contextlib.contextmanager
def watched(seconds: float = 180.0) -> Iterator[None]:
    """End the process, with every thread's stack, if the block takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2 if _descriptor is None else _descriptor)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def note_dead_worker(node: Any) -> None:
    """Note how a worker ended, and the stacks that it wrote."""
    name = node.gateway.id
    process = getattr(getattr(node.gateway, "_io", None), "popen", None)
    how = "ended in an unknown way"
    if process is not None:
        with contextlib.suppress(Exception):
            how = _ending(process.wait(5))
    path = Path(os.environ[_FOLDER]) / name
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    text = "\n".join(line for line in lines if not any(f"/{package}/" in line for package in _PYTEST)).strip()
    _report.append(f"{name} {how}; {'its stacks:' if text else 'it wrote no stacks'}\n{text}".strip())


def report() -> list[str]:
    """One text for each worker that died."""
    return _report


def _ending(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
