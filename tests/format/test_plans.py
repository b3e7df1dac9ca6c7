"""Chunk and cache plans: their limits, and what HDF5 makes of them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5pack.format.plans import DEFAULT_CHUNK_BYTES, MIN_CHUNKS, WHOLE_PAGES_BYTES, plan_cache, plan_chunks
from h5pack.read.hdf5 import reopen_tuned

row_counts = st.integers(1, 20_000_000)
row_sizes = st.integers(1, 64 * 1024 * 1024)


@given(row_counts, row_sizes)
def test_default_chunks_are_neither_large_nor_small_nor_few(n_rows: int, row_bytes: int) -> None:
    plan = plan_chunks(n_rows, row_bytes)
    assert plan.rows >= 1
    assert plan.bytes == plan.rows * row_bytes
    assert (plan.count - 1) * plan.rows < n_rows <= plan.count * plan.rows
    assert plan.bytes >= 65_536
    assert plan.bytes <= max(DEFAULT_CHUNK_BYTES, row_bytes)
    if plan.bytes - row_bytes >= 65_536:
        assert (plan.rows - 1) * MIN_CHUNKS < n_rows, "one row fewer would be aligned too, and would give more chunks"


@given(row_counts, row_sizes, st.integers(1, 5_000), st.integers(1, 2**31))
def test_given_rows_are_used_and_given_bytes_filled_with_whole_rows(
    n_rows: int, row_bytes: int, chunk_rows: int, chunk_bytes: int
) -> None:
    plan = plan_chunks(n_rows, row_bytes, chunk_rows=chunk_rows)
    assert (plan.rows, plan.bytes, plan.count) == (chunk_rows, chunk_rows * row_bytes, math.ceil(n_rows / chunk_rows))
    filled = plan_chunks(n_rows, row_bytes, chunk_bytes=chunk_bytes)
    assert filled.bytes <= chunk_bytes or filled.rows == 1
    assert filled.bytes + row_bytes > chunk_bytes


@given(row_counts, st.integers(1, 100_000), st.integers(1, 2**31))
def test_given_bytes_are_not_exceeded_by_whole_pages(n_rows: int, row_bytes: int, chunk_bytes: int) -> None:
    plain = plan_chunks(n_rows, row_bytes, chunk_bytes=chunk_bytes)
    plan = plan_chunks(n_rows, row_bytes, chunk_bytes=chunk_bytes, whole_pages=True)
    step = 4_096 // math.gcd(4_096, row_bytes)
    assert plan.rows == (plain.rows if step > plain.rows else plain.rows // step * step)


@given(row_counts, row_sizes)
def test_chunks_end_on_a_page_boundary_where_that_costs_little(n_rows: int, row_bytes: int) -> None:
    plain, plan = plan_chunks(n_rows, row_bytes), plan_chunks(n_rows, row_bytes, whole_pages=True)
    assert plan.bytes == plan.rows * row_bytes
    assert plan.bytes >= 65_536
    step = 4_096 // math.gcd(4_096, row_bytes)
    if plan.bytes % 4_096:
        assert plan == plain
        assert step > plain.rows
        assert step * row_bytes > WHOLE_PAGES_BYTES or step * MIN_CHUNKS > n_rows
    elif plan.rows > plain.rows + step:
        assert plan.rows == step
        assert plan.bytes <= WHOLE_PAGES_BYTES
    else:
        assert abs(plan.rows - plain.rows) < 2 * step
    assert plan_chunks(n_rows, row_bytes, chunk_rows=7, whole_pages=True).rows == 7


def test_known_plans() -> None:
    sizes = {32: 1364, 64: 341, 96: 148, 128: 85, 160: 52, 192: 37, 224: 24, 256: 21, 300: 15, 512: 5}
    for side, rows in sizes.items():
        plan = plan_chunks(1_000_000, side * side * 3, whole_pages=True)
        assert plan.rows == rows
        assert plan.bytes % 4_096 == 0 or side == 300

    celeba = 218 * 178 * 3
    assert (plan_chunks(202_599, celeba).rows, plan_chunks(202_599, celeba).count) == (36, 5_628)
    assert plan_chunks(10_000_000, 32 * 32 * 3).rows == DEFAULT_CHUNK_BYTES // 3_072
    assert plan_chunks(50, 32 * 32 * 3).rows == math.ceil(65_536 / 3_072)
    assert plan_chunks(640, celeba).rows == 10
    assert plan_chunks(100, 2**24).rows == 1


CELEBA = ((20_000, 218, 178, 3), (36, 218, 178, 3))


@pytest.mark.parametrize(
    ("filtered", "window", "nbytes"),
    [
        (False, None, 0),
        (False, 16, 0),
        (True, None, 64 * 1024 * 1024),
        (True, 16, 16 * 36 * 218 * 178 * 3),
        (True, 10**6, 556 * 36 * 218 * 178 * 3),
    ],
)
def test_cache_rules(filtered: bool, window: int | None, nbytes: int) -> None:
    plan = plan_cache(*CELEBA, 1, filtered=filtered, window=window)
    assert (plan.nbytes, plan.nslots, plan.w0) == (nbytes, 556, 1.0)
    assert plan.reason.startswith("filtered" if filtered else "unfiltered")


def test_the_cache_holds_small_datasets_and_whole_rows() -> None:
    assert plan_cache((1_000, 8, 8), (10, 8, 8), 4, filtered=True).nbytes == 1_000 * 8 * 8 * 4
    row_of_many_chunks = (100, 8_192, 8_192), (1, 1_024, 1_024), 2
    assert plan_cache(*row_of_many_chunks, filtered=True).nbytes == 8_192 * 8_192 * 2
    assert plan_cache(*row_of_many_chunks, filtered=True, window=3).nbytes == 3 * 8_192 * 8_192 * 2
    for filtered in (False, True):
        empty = plan_cache((0, 8, 8), (4, 8, 8), 1, filtered=filtered)
        assert empty.nslots >= 1
        assert empty.nbytes >= 0


def hdf5_slot(scaled: tuple[int, ...], grid: list[int], nslots: int) -> int:
    """H5D__chunk_hash_val, with the bits of H5VM_log2_gen(H5VM_power2up(count))."""
    value = scaled[0]
    for place, count in zip(scaled[1:], grid[1:], strict=True):
        value = (value << (count - 1).bit_length()) ^ place
    return value % nslots


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 17)), min_size=1, max_size=4))
def test_no_two_chunks_share_a_slot(axes: list[tuple[int, int]]) -> None:
    shape, chunks = zip(*axes, strict=True)
    grid = [math.ceil(size / chunk) for size, chunk in axes]
    if math.prod(grid) > 20_000:
        return
    nslots = plan_cache(shape, chunks, 1, filtered=True).nslots
    slots = [hdf5_slot(scaled, grid, nslots) for scaled in itertools.product(*map(range, grid))]
    assert len(set(slots)) == len(slots)
    if all(count == 1 for count in grid[1:]):
        assert nslots == grid[0]


def amount_read(dataset: h5py.Dataset, data: npt.NDArray[np.uint8], rows: npt.NDArray[np.int64]) -> int:
    """What this process asks the kernel for, from /proc, in bytes, to read rows one by one."""

    def total() -> int:
        return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])

    before = total()
    assert all(np.array_equal(dataset[row], data[row]) for row in rows)
    return total() - before


def write(path: Path, data: npt.NDArray[np.uint8], chunks: tuple[int, ...]) -> int:
    """Write a compressed dataset, and return its stored size."""
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=data, chunks=chunks, compression="gzip", compression_opts=1)
        return int(file["x"].id.get_storage_size())


@pytest.mark.parametrize("chunks", [(10, 24, 24), (10, 24, 9)])
def test_a_cache_with_the_planned_slots_decodes_each_chunk_once(tmp_path: Path, chunks: tuple[int, ...]) -> None:
    data = np.random.default_rng(1).integers(0, 256, (400, 24, 24), np.uint8)
    rows = np.random.default_rng(2).integers(0, 400, 1_200)
    plan = plan_cache(data.shape, chunks, 1, filtered=True)
    amounts = []
    for nslots in (plan.nslots, plan.nslots - 1, plan.nslots // 3):
        # One file a run: a second open of the same file keeps the first one's cache.
        stored = write(tmp_path / f"{nslots}.h5", data, chunks)
        with h5py.File(tmp_path / f"{nslots}.h5") as file:
            dataset = reopen_tuned(file["x"], type(plan)(len(rows) * data[0].nbytes * 10, nslots, plan.w0, ""))
            dataset[0]
            amounts.append(amount_read(dataset, data, rows))
    planned, one_short, a_third = amounts
    assert planned <= stored * 1.02 + 20_000
    assert a_third > 2 * stored
    if chunks[1:] == data.shape[1:]:
        assert one_short > planned


def test_an_unfiltered_dataset_reads_only_the_selected_rows(tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, (2_000, 32, 32), np.uint8)
    rows = np.random.default_rng(2).integers(0, 2_000, 300)
    amounts = []
    for tuned in (True, False):
        with h5py.File(tmp_path / f"{tuned}.h5", "w", rdcc_nbytes=2**20, rdcc_nslots=521) as file:
            file.create_dataset("x", data=data, chunks=(100, 32, 32))
        with h5py.File(tmp_path / f"{tuned}.h5", rdcc_nbytes=2**20, rdcc_nslots=521) as file:
            dataset = reopen_tuned(file["x"]) if tuned else file["x"]
            dataset[0]
            amounts.append(amount_read(dataset, data, rows) / (300 * 32 * 32))
    assert amounts[0] < 1.1
    assert amounts[1] > 10


def test_the_cache_holds_whatever_a_window_uses(tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, (800, 16, 16), np.uint8)
    stored = write(tmp_path / "a.h5", data, (20, 16, 16))
    order = np.random.default_rng(3).permuted(np.arange(800).reshape(10, 80), axis=1).ravel()
    with h5py.File(tmp_path / "a.h5") as file:
        dataset = reopen_tuned(file["x"], plan_cache(data.shape, (20, 16, 16), 1, filtered=True, window=4))
        assert amount_read(dataset, data, order) < stored * 1.02 + 20_000
