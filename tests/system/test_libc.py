"""Functions of the C library, and holding back standard error."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable

import pytest

from h5pack.system.libc import held_stderr, libc_function, raise_errno


def test_a_missing_function_is_none() -> None:
    assert libc_function("h5pack_has_no_such", ctypes.c_int) is None


def test_errno_becomes_an_oserror_with_the_path() -> None:
    close = libc_function("close", ctypes.c_int, ctypes.c_int)
    assert close(-1) == -1
    with pytest.raises(OSError, match="descriptor") as caught:
        raise_errno("x")
    assert (caught.value.errno, caught.value.filename) == (errno.EBADF, "x")


def no_memory_file(name: str) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # as on Linux before 3.17


@pytest.mark.parametrize("memfd_create", [getattr(os, "memfd_create", None), None, no_memory_file])
def test_threads_that_hold_standard_error_give_it_back(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, memfd_create: Callable[[str], int] | None
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    if memfd_create is not None:
        monkeypatch.setattr(os, "memfd_create", memfd_create, raising=False)
    descriptors = os.listdir("/dev/fd")
    before, held, left = os.fstat(2).st_ino, [], threading.Event()

    def hold() -> None:
        with held_stderr() as lines:
            os.write(2, b"second\n")
            left.wait()
        held.append(lines)

    thread = threading.Thread(target=hold)
    with held_stderr() as lines:
        os.write(2, b"first\n")
        thread.start()
        thread.join(0.2)  # Without a lock, the thread now redirects the redirection of this one.
    left.set()
    thread.join()
    assert os.fstat(2).st_ino == before
    assert (lines, held) == ([b"first\n"], [[b"second\n"]])
    assert os.listdir("/dev/fd") == descriptors
    os.write(2, b"visible\n")
    assert capfd.readouterr().err == "visible\n"
