"""Functions of the C library."""

from __future__ import annotations

import ctypes
import errno

import pytest

from h5pack.system.libc import libc_function, raise_errno


def test_a_missing_function_is_none() -> None:
    assert libc_function("h5pack_has_no_such", ctypes.c_int) is None


def test_errno_becomes_an_oserror_with_the_path() -> None:
    close = libc_function("close", ctypes.c_int, ctypes.c_int)
    assert close(-1) == -1
    with pytest.raises(OSError, match="descriptor") as caught:
        raise_errno("x")
    assert (caught.value.errno, caught.value.filename) == (errno.EBADF, "x")
