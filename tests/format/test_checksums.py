"""The CRC-32 of rows equals zlib's with every implementation."""

from __future__ import annotations

import runpy
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5pack.format import checksums
from h5pack.format.checksums import crc32, row_checksums


def slow_crc32(data: bytes) -> int:
    """Bit by bit, as in RFC 1952's appendix."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@given(st.binary(max_size=300), st.binary(max_size=50))
def test_every_implementation_agrees(data: bytes, more: bytes) -> None:
    assert slow_crc32(b"123456789") == 0xCBF43926, "the published check value"
    assert crc32(data) == zlib.crc32(data) == slow_crc32(data)
    assert crc32(more, crc32(data)) == zlib.crc32(data + more)


def test_without_isal_zlib_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    found = runpy.run_path(checksums.__file__)
    assert (found["fastest_zlib"], found["crc32"]) == (zlib, zlib.crc32)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32, ">i2", np.bool_])
@pytest.mark.parametrize("shape", [(5, 3, 4), (5,), (1, 7), (0, 3), (5, 0), (0,)])
def test_rows_of_any_dtype_and_rank(dtype: object, shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    found = row_checksums(rows)
    assert found.dtype == np.uint32
    assert found.tolist() == [zlib.crc32(rows[place : place + 1].tobytes()) for place in range(len(rows))]


def test_rows_that_are_not_contiguous_or_may_not_be_written() -> None:
    rows = np.frombuffer(bytes(range(240)) * 4, np.int32).reshape(6, 5, 8)
    for view in (rows, rows[::2], rows[:, ::-1], rows.transpose(2, 0, 1), rows[:, :, 3]):
        assert row_checksums(view).tolist() == [zlib.crc32(row.tobytes()) for row in view]


@pytest.mark.parametrize("dtype", ["u1", "<f4", ">i8", "<c16", "V3"])
def test_many_small_rows_have_the_checksums_of_few(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).bytes(500 * np.dtype(dtype).itemsize)
    rows = np.frombuffer(data, dtype)
    wanted = [zlib.crc32(rows[row : row + 1].tobytes()) for row in range(500)]
    assert row_checksums(rows).tolist() == wanted
    monkeypatch.setattr(checksums, "_MIN_TABLE_ROWS", 100)
    monkeypatch.setattr(checksums, "_BLOCK_ROWS", 64)
    assert row_checksums(rows).tolist() == wanted
    assert row_checksums(rows[:400].reshape(400, 1)).tolist() == wanted[:400]
