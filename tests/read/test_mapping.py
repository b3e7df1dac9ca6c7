"""Rows copied from a mapping: which rows may be copied, and what happens to files that change under it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

from h5pack.errors import PackChangedError
from h5pack.read import mapping
from h5pack.read.mapping import FileMapping, MappedDataset
from h5pack.read.storage import FileIdentity, SourceFile, Storage
from h5pack.system.files import cached_pages, drop_cache, file_system_type, make_hot
from tests.read.files import STORAGES, Mapped, engine_of, in_child, numbers, write, write_virtual

ROWS, SHAPE = 200, (64, 64, 3)


def mapped_file(path: Path, storage: str = "rows", dtype: str = "u1", **settings: Any) -> tuple[Any, MappedDataset]:
    values = write(path, numbers((ROWS, *SHAPE), dtype), storage, **settings)
    found = engine_of(path).mapped("x")
    return values, found


@pytest.fixture
def hot(tmp_path: Path) -> tuple[Any, MappedDataset]:
    """Values, and their rows in a mapping of the file f.h5, which is in the page cache."""
    values, found = mapped_file(tmp_path / "f.h5")
    make_hot(tmp_path / "f.h5")
    return values, found


def copied(found: MappedDataset, rows: np.ndarray) -> np.ndarray:
    """The rows' bytes, read one by one from the mapping."""
    size = found.index.row_bytes
    return np.array([found.mapping.bytes[offset : offset + size] for offset in found.offsets(rows).tolist()])


@pytest.mark.parametrize("storage", STORAGES)
def test_only_rows_stored_as_they_are_can_be_mapped(tmp_path: Path, storage: str) -> None:
    path = tmp_path / "f.h5"
    values = write(path, numbers((30, 4, 5), ">i4"), storage)
    found = engine_of(path).mapped("x")
    assert (found is not None) == (storage in ("contiguous", "rows", "extendable", "unlimited", "early", "virtual"))
    if found is not None:
        make_hot(path)
        rows = np.random.default_rng(0).permutation(30)
        assert found.ready(rows, rows)
        assert np.array_equal(copied(found, rows).view(">i4").reshape(30, 4, 5), values[rows])
        if found.array is not None:
            assert np.array_equal(found.array[rows], copied(found, rows))


@pytest.mark.parametrize("chunk_rows", [1, 3, 50])
def test_adjacent_chunks_are_one_array(tmp_path: Path, chunk_rows: int) -> None:
    values, found = mapped_file(tmp_path / "f.h5", "early", chunk_rows=chunk_rows, libver=("v110", "v110"))
    found.ready(np.arange(ROWS), np.arange(ROWS))
    assert np.array_equal(found.array.reshape(ROWS, *SHAPE), values)


def test_rows_are_ready_only_while_the_page_cache_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.h5"
    values, found = mapped_file(path)
    everything = np.arange(ROWS)
    if drop_cache(path):
        pytest.skip("this file system keeps its pages in memory")
    assert not found.ready(everything, everything)
    assert cached_pages(path) <= 1, "the check itself reads nothing"
    make_hot(path)
    assert found.ready(everything, everything)
    assert np.array_equal(copied(found, everything).reshape(values.shape), values)
    del found
    assert drop_cache(path) == 0, "nothing keeps the mapping"


@pytest.mark.parametrize("sees", [True, False], ids=["mincore", "RWF_NOWAIT"])
def test_a_block_is_checked_again_after_a_second(
    hot: tuple[Any, MappedDataset], monkeypatch: pytest.MonkeyPatch, sees: bool
) -> None:
    _, found = hot
    found.mapping._sees_cache = sees
    calls, now = [], [100.0]
    share = found.mapping._cached_share
    monkeypatch.setattr(mapping.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(found.mapping, "_cached_share", lambda *span: calls.append(span) or share(*span))
    for moment, expected in ((100.0, 1), (100.9, 1), (101.5, 2)):
        now[0] = moment
        assert found.ready(np.arange(ROWS), np.arange(ROWS))
        assert len(calls) == expected
    first, last = found.offsets(np.array([0, ROWS - 1])).tolist()
    assert calls[0] == (0, first // 4096 * 4096, last + found.index.row_bytes)
    monkeypatch.setattr(found.mapping, "_cached_share", lambda *_: 0.9)
    now[0] += 2
    assert not found.ready(np.array([0]), np.array([0]))


def test_pages_are_loaded_into_the_page_table_once(
    hot: tuple[Any, MappedDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = hot
    loaded: list[int] = []
    madvise = mapping._madvise
    monkeypatch.setattr(mapping, "_madvise", lambda *call: loaded.append(call[1]) or madvise(*call))
    monkeypatch.setattr(mapping, "CHECK_SECONDS", -1.0)
    rows = np.arange(ROWS)
    for _ in range(3):
        assert found.ready(rows, rows)
    first, last = found.offsets(np.array([0, ROWS - 1])).tolist()
    whole = last + found.index.row_bytes - first // 4096 * 4096
    assert sum(loaded) == whole
    # A block that lost a page is loaded again, and so is any if the system does not say what is in the page cache.
    shares = iter([0.99] * 8)
    monkeypatch.setattr(found.mapping, "_cached_share", lambda *_: next(shares))
    assert found.ready(rows[:1], rows[:1])
    found.mapping._sees_cache = False
    monkeypatch.setattr(found.mapping, "_cached_share", lambda *_: 1.0)
    assert found.ready(rows[:1], rows[:1])
    assert sum(loaded) == whole + 2 * (mapping._BLOCK - first // 4096 * 4096)


def test_blocks_between_wanted_ones_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_BLOCK", 65_536)
    _, found = mapped_file(tmp_path / "f.h5")
    spans: list[tuple[int, int]] = []
    monkeypatch.setattr(found.mapping, "_load", lambda *span, **_: spans.append(span[1:3]) or True)
    rows = np.array([3, 150, 4])
    assert found.ready(rows, rows)
    ends = found.offsets(rows) + found.index.row_bytes
    for start, stop in zip(found.offsets(rows), ends, strict=True):
        assert any(low <= start and stop <= high for low, high in spans)
    assert sum(high - low for low, high in spans) <= 6 * 65_536


def test_own_datasets_share_a_mapping_that_no_virtual_dataset_uses(tmp_path: Path) -> None:
    path = tmp_path / "v.h5"
    write(tmp_path / "f.h5", numbers((ROWS, *SHAPE), "u1"), "contiguous")
    values = write(path, numbers((ROWS, *SHAPE), "u1", seed=1), "contiguous", name="y")
    write_virtual(path, (ROWS, *SHAPE), Mapped(slice(None), "f.h5", (ROWS, *SHAPE)), name="v")
    with h5py.File(path, "a") as file:
        file["z"] = values
    engine, rows = engine_of(path, "v", "y", "z"), np.arange(ROWS)
    virtual, *own = (engine.mapped(name) for name in ("v", "y", "z"))
    assert own[0].mapping is own[1].mapping is not virtual.mapping
    make_hot(path)
    for found in own:
        assert found.ready(rows, rows)
        assert np.array_equal(copied(found, rows).reshape(values.shape), values)


def test_blocks_are_loaded_again_once_more_of_them_holds_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_BLOCK", 65_536)
    path = tmp_path / "f.h5"
    path.write_bytes(bytes(4 * 65_536))
    shared = FileMapping.open([Storage(str(path), FileIdentity.of(str(path)))], [0])
    loaded: list[tuple[int, int]] = []
    monkeypatch.setattr(shared, "_load", lambda _, start, stop, **__: loaded.append((start, stop)) or True)
    # The chunks of two datasets alternate.
    for start, stop in ((0, 100_000), (4_096, 200_000)):
        shared.add_rows(0, start, stop)
        assert shared.ready(np.array([start]), np.array([stop]))
    assert loaded == [(0, 100_000), (0, 200_000)]


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, MappedDataset]:
    """Values, and their rows in a mapping of a file that is not in the page cache, in blocks of 64 KiB."""
    monkeypatch.setattr(mapping, "_BLOCK", 65_536)
    monkeypatch.setattr(mapping, "_BLOCK_FILE_SYSTEMS", (file_system_type(tmp_path),))
    if not mapping._kernel_reads_blocks():
        pytest.skip("needs Linux 5.18")
    path = tmp_path / "f.h5"
    values = write(path, numbers((ROWS, *SHAPE), "u1"), "rows")
    found = engine_of(path).mapped("x")
    assert found is not None
    # Drop it now, because opening the file loads some of its pages.
    if drop_cache(path):
        pytest.skip("this file system keeps files in the page cache")
    return values, found


def test_missing_blocks_are_loaded(cold: tuple[Any, MappedDataset]) -> None:
    values, found = cold
    rows = np.random.default_rng(0).permutation(ROWS)
    assert not found.ready(rows, rows)
    assert found.load(rows, rows)
    assert found.ready(rows, rows)
    assert np.array_equal(copied(found, rows).reshape(ROWS, *SHAPE), values[rows])
    # All pages with rows; metadata may be elsewhere.
    path = Path(found.mapping._storages[0].path)
    assert cached_pages(path) >= ROWS * found.index.row_bytes // 4_096


def test_blocks_are_not_loaded_where_that_does_not_suit(
    cold: tuple[Any, MappedDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = cold
    few, most = np.arange(0, ROWS, 20), np.arange(0, ROWS, 2)
    size = ROWS * found.index.row_bytes
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "available_memory", lambda: 2 * size - 8_192)
        assert not found.load(most, most)
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "_SMALL_BYTES", size - 8_192)
        assert not found.load(few, few)
        found.mapping._suits_blocks = False
        assert not found.load(most, most)
    assert not found.ready(few, few)
    # These are enough of each block, or the file is small.
    found.mapping._suits_blocks = True
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "_SMALL_BYTES", 0)
        assert found.load(most, most)


def test_few_rows_of_a_small_file_are_loaded(cold: tuple[Any, MappedDataset]) -> None:
    _, found = cold
    few = np.arange(0, ROWS, 20)
    assert found.load(few, few)


@pytest.mark.parametrize(
    ("release", "loads"), [("5.15.0-91-generic", False), ("5.18.0", True), ("6.1.0-rc1", True), ("unknown", False)]
)
def test_old_kernels_would_load_page_by_page(release: str, loads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = type("Names", (), {"release": release})
    monkeypatch.setattr(mapping.os, "uname", names)
    monkeypatch.setattr(mapping.mmap, "PAGESIZE", 4_096)
    assert mapping._kernel_reads_blocks() == loads
    # As on some ARM machines; Linux would load 512 MiB.
    monkeypatch.setattr(mapping.mmap, "PAGESIZE", 65_536)
    assert not mapping._kernel_reads_blocks()


def test_a_file_that_became_shorter_is_not_loaded(cold: tuple[Any, MappedDataset]) -> None:
    _, found = cold
    os.truncate(found.mapping._storages[0].path, 100_000)
    rows = np.arange(ROWS)
    assert not found.load(rows, rows)


@pytest.mark.parametrize("storage", ["rows", "virtual"])
def test_a_file_system_without_mappings_is_read_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    path = tmp_path / "f.h5"
    write(path, numbers((ROWS, *SHAPE), "u1"), storage)
    monkeypatch.setattr(mapping, "_mmap", Mock(side_effect=OSError(19, "No such device")))
    assert engine_of(path).mapped("x") is None


@pytest.mark.parametrize("limit", [2, 4])
def test_mapped_sources_take_at_most_half_of_the_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(mapping, "max_open_files", lambda: limit)
    paths = [tmp_path / f"{name}.h5" for name in "ab"]
    values = numbers((ROWS, *SHAPE), "u1")
    for path in paths:
        write(path, values, "contiguous")
        make_hot(path)
    layout = h5py.VirtualLayout((2 * ROWS, *SHAPE), "u1")
    for number, path in enumerate(paths):
        layout[number * ROWS : (number + 1) * ROWS] = h5py.VirtualSource(path, "x", (ROWS, *SHAPE))
    with h5py.File(tmp_path / "v.h5", "w", libver="latest") as file:
        file.create_virtual_dataset("x", layout)
    found, rows = engine_of(tmp_path / "v.h5").mapped("x"), np.arange(2 * ROWS)
    assert (found is None) == (limit == 2)
    if found is not None:
        # The sources' rows form one array, although they do not begin at a multiple of the size of a block.
        assert found.ready(rows, rows)
        assert np.array_equal(found.array[found.positions(rows)].reshape(2, *values.shape), [values, values])


def test_very_many_sources_are_refused_without_comparing_each_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    count = mapping._MAX_FILES + 1
    files = [SourceFile(f"{number}.h5", FileIdentity(number, 1, 1)) for number in range(count)]
    compared = Mock(side_effect=lambda one, other: one.path == other.path)
    monkeypatch.setattr(SourceFile, "__eq__", lambda one, other: compared(one, other))
    index = Mock(sources=[Mock(file=file) for file in files], source_ids=np.arange(count))
    assert MappedDataset.of_sources(index, Mock()) is None
    assert compared.call_count < count


def test_a_forked_child_checks_for_itself(hot: tuple[Any, MappedDataset]) -> None:
    values, found = hot
    rows = np.arange(ROWS)
    assert found.ready(rows, rows)

    def check() -> bool:
        return found.ready(rows, rows) and np.array_equal(copied(found, rows).reshape(values.shape), values)

    assert in_child(check)


@pytest.mark.parametrize("change", ["cut", "replaced"])
def test_a_changed_file_is_noticed_before_its_bytes_are_touched(
    hot: tuple[Any, MappedDataset], tmp_path: Path, change: str
) -> None:
    path, (_, found) = tmp_path / "f.h5", hot
    assert found.ready(np.arange(ROWS), np.arange(ROWS))
    if change == "cut":
        os.truncate(path, 4096)
        for check in (found.mapping.require_whole, found.mapping.require_unchanged):
            with pytest.raises(PackChangedError):
                check([0])
    else:
        (tmp_path / "other").write_bytes(bytes(path.stat().st_size))
        os.replace(tmp_path / "other", path)
        found.mapping.require_whole([0])
        found.mapping.require_unchanged([0])
        assert found.mapping.bytes[found.offsets(np.array([0]))[0] :][:9].any(), "the mapping has the old bytes"


def test_only_touching_a_cut_file_without_checking_is_a_signal(hot: tuple[Any, MappedDataset], tmp_path: Path) -> None:
    _, found = hot
    os.truncate(tmp_path / "f.h5", 4096)
    assert not found.ready(np.arange(ROWS), np.arange(ROWS))
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        with contextlib.suppress(BaseException):
            found.mapping.bytes[-1]
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGBUS
