"""Rows at known places in a file."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5pack.format.checksums import row_checksums
from h5pack.format.row_offsets import (
    CheckTask,
    RowOffsets,
    check_rows,
    check_rows_counted,
    check_tasks,
    describe_check,
)
from h5pack.system.files import read_all, write_all

ROW_BYTES = 6


def scattered(chunk_rows: int, chunks: int = 12) -> RowOffsets:
    """Chunks that lie anywhere, in no order."""
    order = np.random.default_rng(chunk_rows).permutation(chunks)
    return RowOffsets(order * (chunk_rows * ROW_BYTES + 10) + 3, chunk_rows, ROW_BYTES)


@given(st.integers(1, 9), st.sets(st.integers(0, 107)), st.integers(1, 12))
def test_runs_hold_every_row_once_and_lie_in_one_piece(chunk_rows: int, drawn: set[int], most: int) -> None:
    places = scattered(chunk_rows, 108)
    rows = np.array(sorted(drawn), np.int64)
    runs = list(places.runs(rows, most))
    assert [row for first, count in runs for row in range(first, first + count)] == rows.tolist()
    for first, count in runs:
        assert 1 <= count <= most
        assert places.offset(first + count - 1) == places.offset(first) + (count - 1) * ROW_BYTES
    for (first, count), (following, _) in itertools.pairwise(runs):
        joined = first + count == following and following % chunk_rows != 0
        assert not joined or count == most, "two runs could have been one"


@pytest.fixture
def pack(tmp_path: Path) -> tuple[Path, RowOffsets, np.ndarray]:
    places = scattered(5)
    content = np.random.default_rng(0).integers(0, 256, (57, ROW_BYTES), np.uint8)
    path = tmp_path / "rows"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for row, values in enumerate(content):
        write_all(descriptor, values.tobytes(), places.offset(row))
    os.close(descriptor)
    return path, places, content


@pytest.mark.parametrize("most_bytes", [1, 13, 10**6])
def test_intact_rows_pass_and_damaged_rows_are_named(
    pack: tuple[Path, RowOffsets, np.ndarray], most_bytes: int
) -> None:
    path, places, content = pack
    rows, checksums = np.arange(57, dtype=np.int64), row_checksums(content)
    tasks = list(check_tasks(str(path), places, rows, checksums, most_bytes))
    assert sum(check_rows_counted(task)[0] for task in tasks) == 57
    assert [row for task in tasks for row in check_rows(task)] == []
    damaged = [0, 4, 5, 31, 56]
    with path.open("r+b") as stream:
        for row in damaged:
            stream.seek(places.offset(row) + row % ROW_BYTES)
            stream.write(bytes([content[row, row % ROW_BYTES] ^ 0x10]))
    assert [row for task in tasks for row in check_rows(task)] == damaged


def test_only_the_rows_that_were_asked_for_are_checked(pack: tuple[Path, RowOffsets, np.ndarray]) -> None:
    path, places, content = pack
    checksums = row_checksums(content)
    checksums[3] += 1
    for rows, wrong in ([1, 2, 4, 20], []), ([2, 3, 4], [3]):
        tasks = check_tasks(str(path), places, np.array(rows, np.int64), checksums, 1_000)
        assert [row for task in tasks for row in check_rows(task)] == wrong


@pytest.mark.parametrize("kept", range(5 * ROW_BYTES + 1))
def test_rows_behind_the_end_of_the_file_are_wrong(tmp_path: Path, kept: int) -> None:
    content = np.random.default_rng(0).integers(1, 256, (5, ROW_BYTES), np.uint8)
    (tmp_path / "short").write_bytes(content.tobytes()[:kept])
    task = CheckTask(str(tmp_path / "short"), 70, 0, ROW_BYTES, row_checksums(content))
    assert check_rows(task) == list(range(70 + kept // ROW_BYTES, 75))
    assert describe_check(task) == f"{tmp_path}/short rows 70-74"


def test_reading_stops_at_the_end_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(20)))
    descriptor = os.open(tmp_path / "f", os.O_RDONLY)
    assert read_all(descriptor, 5, 10) == bytes(range(10, 15))
    assert read_all(descriptor, 50, 10) == bytes(range(10, 20))
    assert read_all(descriptor, 5, 20) == b""
    assert read_all(descriptor, 0, 3) == b""
    os.close(descriptor)


def test_a_kernel_that_takes_and_gives_little_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, pread = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, bytes(data)[:3], offset))
    monkeypatch.setattr(os, "pread", lambda file, count, offset: pread(file, min(count, 4), offset))
    descriptor = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    write_all(descriptor, memoryview(bytes(range(100))), 7)
    assert read_all(descriptor, 200, 0) == bytes(7) + bytes(range(100))
    os.close(descriptor)
