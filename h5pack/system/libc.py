"""Functions of the C library that Python does not provide, or for which it does not release the GIL."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

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
