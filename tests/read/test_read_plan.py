"""`plan_extents` divides rows where their bytes are not adjacent; `plan_reads` merges extents over small gaps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.read import read_plan
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.read_plan import plan_extents, plan_reads
from tests.read.files import row_lists


def index(addresses: list[int], chunk_rows: int, row_bytes: int, rows: int) -> ChunkIndex:
    return ChunkIndex(
        name="x",
        dtype=np.dtype("u1"),
        shape=(rows, row_bytes),
        chunk_rows=chunk_rows,
        group_rows=chunk_rows,
        addresses=np.array(addresses, np.int64),
        fill=bytes(row_bytes),
    )


def reference(made: ChunkIndex, rows: list[int]) -> list[tuple[list[int], int, int]]:
    """Compute extents row by row, as (rows, offset of the first or -1, chunks visited)."""
    runs: list[tuple[list[int], int, int]] = []
    before: tuple[int, int] | None = None
    for row in rows:
        chunk, place = divmod(row, made.chunk_rows)
        address = int(made.addresses[chunk])
        offset = -1 if address < 0 else address + place * made.row_bytes
        new = int(before is None or before[0] != chunk)
        if before is not None and (
            (offset < 0 and before[1] < 0) or (offset >= 0 <= before[1] and offset == before[1] + made.row_bytes)
        ):
            runs[-1] = ([*runs[-1][0], row], runs[-1][1], runs[-1][2] + new)
        else:
            runs.append(([row], offset, new))
        before = chunk, offset
    return runs


@st.composite
def layouts(draw: st.DrawFn) -> ChunkIndex:
    """Draw chunks in any order in the file, with or without gaps, some without storage."""
    chunk_rows, row_bytes = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    chunks = draw(st.integers(1, 6))
    slots = draw(st.permutations(range(chunks)))
    gap = draw(st.sampled_from([0, 0, 1, 64]))
    absent = draw(st.lists(st.booleans(), min_size=chunks, max_size=chunks)) if draw(st.booleans()) else [False] * 6
    size = chunk_rows * row_bytes + gap
    addresses = [-1 if absent[chunk] else slots[chunk] * size for chunk in range(chunks)]
    rows = draw(st.integers((chunks - 1) * chunk_rows + 1, chunks * chunk_rows))
    return index(addresses, chunk_rows, row_bytes, rows)


@settings(max_examples=100)
@given(layouts(), st.data())
def test_extents_equal_those_of_one_row_at_a_time(made: ChunkIndex, data: st.DataObject) -> None:
    rows = data.draw(row_lists(made.rows))
    runs = plan_extents(made, np.array(rows, np.int64))
    expected = reference(made, rows)
    assert runs.edges.tolist() == list(itertools.accumulate((len(run[0]) for run in expected), initial=0))
    assert runs.offsets.tolist() == [run[1] for run in expected]
    assert runs.chunk_visits.tolist() == [run[2] for run in expected]
    for part in (runs.edges, runs.offsets, runs.chunk_visits):
        assert part.dtype == np.int64


def test_offsets_past_four_gigabytes() -> None:
    runs = plan_extents(index([1 << 40], 1 << 20, 1 << 20, 1 << 20), np.array([(1 << 20) - 1], np.int64))
    assert runs.offsets.tolist() == [(1 << 41) - (1 << 20)]


@pytest.mark.parametrize(
    ("rows", "max_gap_bytes", "offsets", "sizes"),
    [
        ([0, 1, 2, 3], 0, [100], [40]),
        ([0, 2], 0, [100, 120], [10, 10]),
        ([0, 2], 10, [100], [30]),
        ([0, 4], 150, [100, 300], [10, 10]),
        ([0, 4], 190, [100], [210]),
        ([4, 0], 1_000, [300, 100], [10, 10]),
        ([5, 6, 7], 1_000, [310, -1], [10, 20]),
    ],
)
def test_reads_run_over_gaps_up_to_a_limit(
    rows: list[int], max_gap_bytes: int, offsets: list[int], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks 0 and 1 are adjacent, chunk 2 is apart, chunk 3 has no storage."""
    monkeypatch.setattr(read_plan, "MAX_GAP_BYTES", max_gap_bytes)
    plan = plan_reads(index([100, 120, 300, -1], 2, 10, 8), np.array(rows, np.int64))
    assert (plan.offsets.tolist(), plan.sizes.tolist()) == (offsets, sizes)


def test_reads_are_cut_at_multiples_of_the_largest_extent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_plan, "MAX_EXTENT_BYTES", 2_500)
    plan = plan_reads(index([0], 1_000, 10, 1_000), np.arange(0, 1_000, 2))
    assert plan.offsets.tolist() == [0, 2_500, 5_000, 7_500]
    assert plan.edges.tolist() == [0, 125, 250, 375, 500]
