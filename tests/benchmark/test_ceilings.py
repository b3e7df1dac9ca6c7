"""Files are dropped from the page cache, or the reason is given; ceilings that cannot be measured are left out."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.benchmark.cases import BenchCase
from h5pack.benchmark.ceilings import Ceilings, PageState, sequential, touch
from h5pack.system.files import drop_cache, make_hot
from tests.benchmark.test_cases import variant
from tests.data.packs import ROWS, SHAPE, labeled


def test_a_byte_of_each_page_is_read_whatever_the_dtype() -> None:
    for dtype in (np.uint8, np.int32, np.float64):
        images = np.full(3 * mmap.PAGESIZE + 8, 7, np.uint8).view(dtype)
        assert touch(images.reshape(1, -1)) == 4 * 7
    assert touch(np.full(9, np.nan, np.float32)) == 0


def test_a_file_is_dropped(tmp_path: Path) -> None:
    path = labeled(tmp_path / "x.h5")
    make_hot(path)
    dataset = h5pack.H5Dataset(path)
    loader = h5pack.H5Loader(dataset, 8)
    list(loader)  # The dataset now has a mapping of the file.
    reason = PageState(dataset).drop()
    assert reason is None or "stay in the page cache" in reason
    dataset.close()
    assert (drop_cache(path) == 0) == (reason is None)


def test_pages_that_stay_have_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = PageState(h5pack.H5Dataset(labeled(tmp_path / "x.h5")))
    for drop, cached, reason in (
        (lambda path: 7, True, "7 pages of "),
        # mincore(2) pretends to see pages that are not cached.
        (lambda path: 7, False, None),
        (Mock(side_effect=OSError(22, "Invalid argument")), True, "Invalid argument"),
    ):
        monkeypatch.setattr("h5pack.read.storage.Storage.is_cached", lambda *_, cached=cached: cached)
        monkeypatch.setattr("h5pack.benchmark.ceilings.drop_cache", drop)
        found = state.drop()
        assert found is None if reason is None else reason in str(found)


def test_too_little_memory_leaves_the_copy_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.benchmark.ceilings.available_memory", lambda: 1_000)
    ceilings = Ceilings([], rows=100, row_bytes=1_000, batch_size=8, cpus=1)
    case = BenchCase("", "window", "direct", "hot", 8, 2, 1)
    assert [ceilings.measure(replace(case, cache=cache)) for cache in ("hot", "cold")] == [None, None]
    assert (ceilings.copy, ceilings.results()) == (None, [])
    # Memory for two threads: 64 rows, and three batches of 8 rows for each.
    monkeypatch.setattr("h5pack.benchmark.ceilings.available_memory", lambda: 4 * (64 + 2 * 3 * 8) * 1_000)
    ceilings = Ceilings([], rows=64, row_bytes=1_000, batch_size=8, cpus=4)
    assert [ceilings.measure(replace(case, num_threads=count)) is None for count in (1, 2, 3)] == [False, True, True]


def test_ceilings_have_the_threads_of_the_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(9_000_000))
    monkeypatch.setattr("h5pack.benchmark.ceilings.drop_cache", lambda path: 0)
    ceilings = Ceilings([variant(2, path=str(path))], rows=64, row_bytes=1_000, batch_size=8, cpus=2)
    case = BenchCase("", "window", "direct", "hot", 8, 2, 1)
    for changed in (case, replace(case, num_threads=2), replace(case, cache="cold", num_threads=3)):
        assert ceilings.measure(changed) > 0
    assert [(one.name, one.num_threads, len(one.speeds)) for one in ceilings.results()] == [
        ("memory copy", 2, 2), ("sequential read", 3, 1)
    ]  # fmt: skip


def test_a_file_whose_rows_are_in_other_files_is_no_ceiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "virtual.h5"
    path.write_bytes(bytes(9_000))
    monkeypatch.setattr("h5pack.benchmark.ceilings.drop_cache", lambda path: 0)
    ceilings = Ceilings([variant(2, path=str(path), is_input=True)], rows=64, row_bytes=1_000, batch_size=8, cpus=1)
    assert ceilings.measure(BenchCase("", "window", "direct", "cold", 8, 2, 1)) is None


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_sequential_read_reads_bytes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    path, read = tmp_path / "x.bin", []
    path.write_bytes(bytes(11_000_001))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: (read.append(preadv(*arguments)), read[-1])[1])
    assert sequential(path, num_threads=num_threads) > 0
    assert sum(read) == 11_000_001
    # A thread that starts late on a busy machine reads a block all the same.
    assert sequential(path, seconds=0.0, num_threads=num_threads) > 0


def test_the_files_of_a_virtual_dataset_are_dropped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = labeled(tmp_path / "part.h5")
    layout = h5py.VirtualLayout((2 * ROWS, *SHAPE), "u1")
    layout[:ROWS] = layout[ROWS:] = h5py.VirtualSource(part, "images", (ROWS, *SHAPE))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("images", layout)
    dropped: list[Any] = []
    monkeypatch.setattr("h5pack.benchmark.ceilings.drop_cache", lambda path: dropped.append(path) or 0)
    assert PageState(h5pack.H5Dataset(tmp_path / "all.h5")).drop() is None
    assert dropped == [tmp_path / "all.h5", part]
