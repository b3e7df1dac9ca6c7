"""Functions of the C library that Python does not provide, or for which it does not release the GIL.

Also holds back what C libraries write to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

MADV_HUGEPAGE, MADV_POPULATE_READ = 14, 22
"""Values of madvise(2) on Linux: use huge pages; load pages into the page table, reading them from the disk."""


def libc_function(name: str, result: Any, *arguments: Any) -> Callable[..., Any] | None:
    """Return a function of the C library with these ctypes types, or None if the C library does not have it.

    Calls of the function release the GIL. After a failed call, `raise_errno` raises the corresponding OSError.
    """
    try:
        # A new CDLL has function objects of its own, so argument types set elsewhere are not overwritten.
        function = ctypes.CDLL(None, use_errno=True)[name]
    except (AttributeError, OSError):
        return None
    function.restype, function.argtypes = result, arguments
    return function


def raise_errno(path: str | os.PathLike[str] | None = None) -> None:
    """Raise an OSError about `path` with the errno of this thread's last call of a `libc_function`."""
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), None if path is None else os.fspath(path))


# Only one thread at a time may redirect standard error, and no thread may fork meanwhile. A second thread would later
# restore the first one's redirection instead of standard error, and a forked child would keep the redirection.
_stderr_lock = threading.RLock()
os.register_at_fork(
    before=_stderr_lock.acquire, after_in_parent=_stderr_lock.release, after_in_child=_stderr_lock.release
)


@contextlib.contextmanager
def held_stderr() -> Iterator[list[bytes]]:
    """Hold back what is written to the process's standard error; yield a list that gets these lines at the end.

    The lines are not written to standard error afterwards. While one thread holds standard error back, other threads
    that call this function wait, and so do threads that fork.
    """
    lines: list[bytes] = []
    with _stderr_lock, contextlib.ExitStack() as stack:
        try:
            original = os.dup(2)
            stack.callback(os.close, original)
            messages = stack.enter_context(_unnamed_file())
        except OSError:
            # Do not hold lines back: standard error is closed, as in some daemons, or no folder is writable.
            yield lines
            return
        os.dup2(messages.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(original, 2)
            lines += os.pread(messages.fileno(), os.fstat(messages.fileno()).st_size, 0).splitlines(keepends=True)


def _unnamed_file() -> IO[bytes]:
    """Open a file without a name, in memory if the system has such files (Linux since 3.17)."""
    try:
        return open(os.memfd_create("messages"), "w+b", buffering=0)
    except (OSError, AttributeError):
        return tempfile.TemporaryFile(buffering=0)
