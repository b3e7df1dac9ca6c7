"""Byte offsets of rows, and checking rows there."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5pack.format import row_offsets
from h5pack.format.checksums import row_checksums
from h5pack.format.row_offsets import EncodedOffsets, RowOffsets, check_rows, check_tasks
from tests.read.files import flip

ROW_BYTES = 6


def scattered(chunk_rows: int, chunks: int = 12) -> RowOffsets:
    """Chunks that lie anywhere, in no order."""
    order = np.random.default_rng(chunk_rows).permutation(chunks)
    return RowOffsets(order * (chunk_rows * ROW_BYTES + 10) + 3, chunk_rows, ROW_BYTES)


@given(st.integers(1, 9), st.sets(st.integers(0, 107)), st.integers(1, 12))
def test_runs_hold_every_row_once_and_lie_in_one_piece(chunk_rows: int, drawn: set[int], max_rows: int) -> None:
    offsets = scattered(chunk_rows, 108)
    rows = np.array(sorted(drawn), np.int64)
    runs = list(offsets.runs(rows, max_rows * ROW_BYTES))
    assert [row for first, count in runs for row in range(first, first + count)] == rows.tolist()
    for first, count in runs:
        assert 1 <= count <= max_rows
        assert offsets.offset(first + count - 1) == offsets.offset(first) + (count - 1) * ROW_BYTES
    for (first, count), (following, _) in itertools.pairwise(runs):
        joined = first + count == following and following % chunk_rows != 0
        assert not joined or count == max_rows, "two runs could have been one"


@pytest.fixture
def pack(tmp_path: Path) -> tuple[Path, RowOffsets, np.ndarray]:
    offsets = scattered(5)
    content = np.random.default_rng(0).integers(0, 256, (57, ROW_BYTES), np.uint8)
    with open(tmp_path / "rows", "wb") as stream:
        for row, values in enumerate(content):
            stream.seek(offsets.offset(row))
            stream.write(values.tobytes())
    return tmp_path / "rows", offsets, content


def test_tasks_are_the_same_rows_however_many_are_divided_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets, checksums = scattered(5), np.arange(57, dtype=np.uint32)
    for block in (1, 7, 10, 100):
        monkeypatch.setattr(row_offsets, "_BLOCK_ROWS", block)
        for rows in (range(57), np.array([0, 3, 4, 5, 40, 56])):
            tasks = [*check_tasks("file", offsets, rows, checksums, 100)]
            assert [row for task in tasks for row in task.checksums.tolist()] == [*rows]
            assert all(task.start == task.checksums[0] for task in tasks)


@pytest.mark.parametrize("max_bytes", [1, 13, 10**6])
def test_intact_rows_pass_and_damaged_rows_are_named(pack: tuple[Path, RowOffsets, np.ndarray], max_bytes: int) -> None:
    path, offsets, content = pack
    rows, checksums = np.arange(57, dtype=np.int64), row_checksums(content)
    tasks = list(check_tasks(str(path), offsets, rows, checksums, max_bytes))
    assert sum(check_rows(task)[0] for task in tasks) == 57
    assert [row for task in tasks for row in check_rows(task)[1]] == []
    damaged = [0, 4, 5, 31, 56]
    for row in damaged:
        flip(path, offsets.offset(row) + row % ROW_BYTES, 0x10)
    assert [row for task in tasks for row in check_rows(task)[1]] == damaged


def test_only_the_rows_that_were_asked_for_are_checked(pack: tuple[Path, RowOffsets, np.ndarray]) -> None:
    path, offsets, content = pack
    checksums = row_checksums(content)
    checksums[3] += 1
    for rows, wrong in ([1, 2, 4, 20], []), ([2, 3, 4], [3]):
        tasks = check_tasks(str(path), offsets, np.array(rows, np.int64), checksums, 1_000)
        assert [row for task in tasks for row in check_rows(task)[1]] == wrong


@pytest.mark.parametrize("kept", range(5 * ROW_BYTES + 1))
def test_rows_behind_the_end_of_the_file_are_wrong(tmp_path: Path, kept: int) -> None:
    content = np.random.default_rng(0).integers(1, 256, (5, ROW_BYTES), np.uint8)
    (tmp_path / "short").write_bytes(content.tobytes()[:kept])
    task = row_offsets.CheckTask(
        str(tmp_path / "short"), 70, 0, ROW_BYTES * np.arange(len(content) + 1), row_checksums(content)
    )
    assert check_rows(task) == (5, list(range(70 + kept // ROW_BYTES, 75)))
    assert str(task) == f"{tmp_path}/short rows 70-74"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 30), st.data())
def test_rows_of_different_lengths(lengths: list[int], max_bytes: int, data: st.DataObject) -> None:
    edges = np.cumsum([0, *lengths])
    offsets = EncodedOffsets.of(100, edges)
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1)))), np.int64)
    runs = list(offsets.runs(rows, max_bytes))
    assert [row for first, count in runs for row in range(first, first + count)] == rows.tolist()
    for first, count in runs:
        assert offsets.offset(first) == 100 + edges[first]
        assert offsets.edges(first, count).tolist() == (edges[first : first + count + 1] - edges[first]).tolist()
        assert count == 1 or edges[first + count] - edges[first] <= max_bytes
