"""Functions of the C library."""

from __future__ import annotations

import ctypes
import errno

import pytest

from h5pack.system.libc import libc_function, raise_errno, require_libc_function


def test_a_missing_function_is_none_or_an_error() -> None:
    assert libc_function("h5pack_has_no_such", ctypes.c_int) is None
    with pytest.raises(OSError, match="h5pack_has_no_such"):
        require_libc_function("h5pack_has_no_such", ctypes.c_int)


def test_errno_becomes_an_oserror_with_the_path() -> None:
    assert require_libc_function("close", ctypes.c_int, ctypes.c_int)(-1) == -1
    with pytest.raises(OSError, match="descriptor") as caught:
        raise_errno("x")
    assert (caught.value.errno, caught.value.filename) == (errno.EBADF, "x")
