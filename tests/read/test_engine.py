"""`Engine` returns the same rows as h5py from any storage, thread and process, and counts its reads."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import h5pack
from h5pack.errors import DamagedRowsError, PackChangedError
from h5pack.format.checksums import row_checksums
from h5pack.read import engine as engine_module
from h5pack.read.engine import Engine, ReadStats
from h5pack.read.hdf5 import open_file
from h5pack.read.hdf5_reader import H5Reader
from h5pack.read.read_plan import plan_scatter
from h5pack.read.storage import FileIdentity
from h5pack.system.files import drop_cache, make_hot
from tests.data.packs import in_time
from tests.makers import flat_folder, quick
from tests.read import files
from tests.read.files import described, engine_of, in_child, numbers, require_rows, write


def h5pys(path: Path, rows: list[int], shape: tuple[int, ...], fill: Any) -> npt.NDArray[Any]:
    """Read rows by h5py, one by one."""
    with h5py.File(path) as file:
        dataset = file["x"]
        out = np.full((len(rows), *shape[1:]), fill, dataset.dtype.newbyteorder("="))
        for place, row in enumerate(rows):
            # With fill_time="never", HDF5 does not write the fill value, so `out` must hold it already.
            dataset.read_direct(out, np.s_[row : row + 1], np.s_[place : place + 1])
        return out


def test_a_signal_handler_may_ask_for_statistics_while_they_change(tmp_path: Path) -> None:
    write(tmp_path / "f.h5", numbers((9, 4), "u1"), "rows")
    engine = engine_of(tmp_path / "f.h5")

    def work() -> ReadStats:
        with engine._own_lock():
            return engine.snapshot()

    assert in_time(work) == ReadStats()


@settings(max_examples=66)
@given(st.data())
def test_rows_equal_h5pys(data: st.DataObject) -> None:
    draw = data.draw
    sizes = draw(st.tuples(st.integers(1, 30), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)))
    shape = sizes[: draw(st.integers(1, 4))]
    dtype, storage = draw(st.sampled_from(files.DTYPES)), draw(st.sampled_from(files.STORAGES))
    blocks = [{"userblock_size": 512}] * files.COUNTS_USER_BLOCK
    how = draw(st.sampled_from([{}, {"libver": "latest"}, {"libver": "v110"}, *blocks]))
    rows, fill, chunk_rows = draw(files.row_lists(shape[0])), draw(st.sampled_from([0, 1])), draw(st.integers(1, 8))
    wanted = np.array(rows, np.int64)
    with files.drawn_limits(draw) as folder:
        path = folder / "f.h5"
        values = write(path, numbers(shape, dtype), storage, fill=fill, chunk_rows=chunk_rows, **how)
        engine = engine_of(path)
        assert (engine.indexes["x"].library_reason is None) == (storage in files.DIRECT)
        expected = h5pys(path, rows, shape, fill)
        assert np.array_equal(expected, values[rows])
        by_library = np.full_like(expected, 1)
        H5Reader(str(path), FileIdentity.of(str(path))).read("x", wanted, by_library)
        assert np.array_equal(by_library, expected)
        files.require_every_read(engine, rows, expected)
        engine.close()


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    source = flat_folder(folder / "in", 40, (16, 16))
    h5pack.convert(source, folder / "o.h5", **quick(chunk_rows=6))
    return folder / "o.h5"


def test_whole_chunks_in_any_order_are_read_once(pack: Path) -> None:
    engine = described(pack)
    assert engine.indexes["images"].row_bytes >= engine_module.SCATTER_BYTES
    assert engine.stats.amplification == 1.0
    with h5py.File(pack) as file:
        images = file["images"][()]
    for chunk in [3, 0, 6, 1, 5, 2, 4]:
        rows = np.random.default_rng(0).permutation(np.arange(6 * chunk, min(40, 6 * chunk + 6)))
        assert np.array_equal(engine.read("images", rows), images[rows])
    assert engine.stats == ReadStats(40, 33, 7, bytes_wanted=30_720, bytes_read=30_720, reads=7)
    # Chunks are counted for the first dataset only.
    engine.read("checksums/images", [1, 2, 30])
    assert (engine.stats.rows, engine.stats.chunk_misses, engine.stats.bytes_wanted) == (40, 7, 30_720 + 12)


def test_batches_of_small_cached_rows_are_copied_from_a_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.h5"
    values = write(path, numbers((500, 64, 12), "u1"), "early", chunk_rows=64, libver=("v110", "v110"))
    make_hot(path)
    rows = np.random.default_rng(0).integers(0, 500, 200)
    out = np.empty((200, 64, 12), np.uint8)
    engine, chunks = engine_of(path), len(set((rows // 64).tolist()))
    assert engine.read_batch("x", rows, out) is out
    assert np.array_equal(out, values[rows])
    assert engine.stats == ReadStats(200, 200 - chunks, chunks, 200 * 768, 200 * 768, reads=0)
    # Reads take system calls: those of few rows, large rows, large files, and rows that are not cached.
    assert np.array_equal(engine.read_batch("x", rows[:15]), values[rows[:15]])
    before = engine.stats.reads
    assert before > 0
    limits = {"_MAX_CACHED_ROW_BYTES": 767, "_MAX_CHECKED_BYTES": path.stat().st_size - 1}
    for name, limit in limits.items():
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, name, limit)
            assert np.array_equal(engine.read_batch("x", rows), values[rows])
        assert engine.stats.reads > before
        before = engine.stats.reads
    if not drop_cache(path):
        cold = engine_of(path)
        assert np.array_equal(cold.read_batch("x", rows), values[rows])
        assert cold.stats.reads > 0


def test_a_batch_of_a_file_that_was_cut_short_or_replaced_is_refused(tmp_path: Path) -> None:
    rows = np.arange(100)
    for name in ("cut.h5", "replaced.h5"):
        path = tmp_path / name
        write(path, numbers((500, 64, 12), "u1"), "contiguous")
        engine = engine_of(path)
        engine.read_batch("x", rows)
        assert engine.stats.reads == 0
        if name == "cut.h5":
            os.truncate(path, 4096)
        else:
            write(path, numbers((500, 64, 12), "u1", seed=1), "contiguous")
            engine.storage.checked = -np.inf
            engine._mapped["x"].mapping._opened = (-np.inf, [])
        with pytest.raises(PackChangedError):
            engine.read_batch("x", rows)


def test_small_rows_are_read_over_small_gaps(tmp_path: Path) -> None:
    path = tmp_path / "f.h5"
    values = write(path, numbers((9000, 4), "i4"), "contiguous")
    engine = engine_of(path)
    require_rows(engine, values)
    assert engine.stats == ReadStats(9000, 8999, 1, 9000 * 16, 9000 * 16, 1)
    # A gap of a page is read, a larger one is not.
    engine = engine_of(path)
    assert np.array_equal(engine.read("x", [0, 257, 600]), values[[0, 257, 600]])
    assert (engine.stats.reads, engine.stats.bytes_read) == (2, (258 + 1) * 16)
    assert engine.stats.amplification == 259 / 3


def test_enumerations_are_numbers(tmp_path: Path) -> None:
    kind = h5py.enum_dtype({"cat": 1, "dog": 7}, basetype=">i2")
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("x", data=np.array([7, 1, 1, 7], kind), dtype=kind)
        file.create_dataset("z", data=np.array([7, 1, 1, 7], kind), dtype=kind, chunks=(3,), compression="gzip")
    engine = engine_of(tmp_path / "f.h5", "x", "z")
    for name in "xz":
        assert engine.read(name, [3, 2, 0]).tolist() == [7, 1, 7]
        assert engine.read(name, [1]).dtype == np.dtype("i2")


@pytest.mark.parametrize("storage", ["rows", "virtual", "compact"])
def test_one_line_is_logged_for_each_dataset_that_goes_through_the_library(
    tmp_path: Path, storage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "f.h5"
    write(path, numbers((9, 4), "i4"), storage)
    with caplog.at_level(logging.DEBUG):
        Engine(str(path), FileIdentity.of(str(path)), {"x": files.index_of(path)}, warn=False)
        assert not caplog.records
        engine_of(path)
        engine = engine_of(path)
        for _ in range(3):
            engine.read("x", [3, 1])
        pickle.loads(pickle.dumps(engine)).read("x", [0])
    lines = [record.getMessage() for record in caplog.records if record.name == "h5pack"]
    assert len(lines) == (storage not in files.DIRECT)
    for line in lines:
        assert line.startswith(f"{path}: 'x' is read through the HDF5 library, which is slower: ")
        assert "\n" not in line


def test_check_names_the_damaged_rows(pack: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(pack, tmp_path / "o.h5"))
    index = described(pack).indexes["images"]

    def check(rows: Sequence[int]) -> None:
        engine, wanted = described(path), np.array(rows, np.int64)
        engine.check("images", wanted, engine.read("images", wanted))

    def damage(row: int) -> None:
        chunk, place = divmod(row, index.chunk_rows)
        files.flip(path, int(index.addresses[chunk]) + place * index.row_bytes + row * 7, 16)

    check([*range(40), 3, 3])
    damage(17)
    check([row for row in range(40) if row != 17])
    with pytest.raises(DamagedRowsError) as caught:
        check([39, 17, 2, 17])
    assert caught.value.rows == (17,)
    for row in (0, 39, *range(20, 30)):
        damage(row)
    with pytest.raises(DamagedRowsError) as caught:
        check(range(40)[::-1])
    assert caught.value.rows == (0, 17, *range(20, 30), 39)


@pytest.mark.parametrize(("dtype", "storage"), [(">i4", "rows"), (">f8", "whole_gzip"), ("<i4", "gzip"), ("?", "rows")])
def test_checksums_are_of_the_bytes_as_stored(tmp_path: Path, dtype: str, storage: str) -> None:
    path, values = tmp_path / "f.h5", numbers((8, 5), dtype)
    write(path, values, storage)
    with h5py.File(path, "r+") as file:
        file["checksums/x"] = row_checksums(values)
    engine, rows = engine_of(path, "x", "checksums/x"), np.array([6, 0, 1])
    found = engine.read("x", rows)
    engine.check("x", rows, found)
    found[1, 2] = not found[1, 2] if dtype == "?" else found[1, 2] + 1
    with pytest.raises(DamagedRowsError, match="row 0"):
        engine.check("x", rows, found)
    engine_of(path, "x").check("x", rows, found)  # An engine without checksums has nothing to compare with.


def test_concurrent_reads_return_the_right_rows(tmp_path: Path) -> None:
    shapes = {"large": ((60, 700), {"chunks": (7, 700)}), "small": ((60, 9), {})}
    shapes["gzip"] = ((60, 40), {"chunks": (7, 13), "compression": "gzip"})
    kept = {name: numbers(shape, "<i2", len(name)) for name, (shape, _) in shapes.items()}
    with h5py.File(tmp_path / "f.h5", "w") as file:
        for name, (_, how) in shapes.items():
            file.create_dataset(name, data=kept[name], **how)
    engine = engine_of(tmp_path / "f.h5", *kept)
    start = threading.Barrier(4, timeout=60)

    def work(number: int) -> None:
        dice = np.random.default_rng(number)
        start.wait()
        for _ in range(20):
            for name, values in kept.items():
                rows = dice.integers(0, 60, 20)
                assert np.array_equal(engine.read(name, rows), values[rows]), (name, rows)

    files.run_threads(4, work)
    assert engine.stats.rows == 4 * 20 * 20
    assert engine.stats.bytes_wanted == 4 * 20 * 20 * (1400 + 18 + 80)


@pytest.mark.parametrize("storage", ["rows", "whole_gzip", "compact", "rows of files", "whole_gzip of files"])
def test_pickled_and_forked_while_open(tmp_path: Path, storage: str) -> None:
    path, of_files = tmp_path / "f.h5", storage.endswith(" of files")
    source = tmp_path / "s.h5" if of_files else path
    values = write(source, numbers((20, 300), "i4"), storage.removesuffix(" of files"))
    if of_files:
        files.write_virtual(path, (20, 300), files.Mapped(np.s_[:], "s.h5", (20, 300)), dtype="i4")
    engine, rows = engine_of(path), [9, 3, 4, 19, 3]
    assert np.array_equal(engine.read("x", rows), values[rows])
    again: Engine = pickle.loads(pickle.dumps(engine))
    assert again.stats == ReadStats(), "each process counts for itself"
    assert again.files.own is again.chunks, "chunks are kept in one place"
    assert np.array_equal(again.read("x", rows), values[rows])
    assert in_child(lambda: np.array_equal(engine.read("x", rows[:2]), values[rows[:2]]) and engine.stats.rows == 2)
    assert np.array_equal(engine.read("x", rows), values[rows])
    assert (engine.stats.rows, again.stats.rows) == (10, 5)


def test_forked_while_another_thread_counts(tmp_path: Path) -> None:
    path = tmp_path / "f.h5"
    values = write(path, numbers((20, 300), "i4"), "rows")
    engine = engine_of(path)
    with engine._lock[1]:
        assert in_child(lambda: np.array_equal(engine.read("x", [3]), values[[3]]))


@pytest.mark.parametrize("change", ["cut", "rewritten"])
def test_a_file_changed_since_the_last_read_through_the_library_is_noticed(tmp_path: Path, change: str) -> None:
    """HDF5 would return zeros, or the new values."""
    path = tmp_path / "f.h5"
    values = write(path, numbers((40, 30, 20), "i4"), "split")
    engine = engine_of(path)
    assert np.array_equal(engine.read("x", [3]), values[[3]])
    assert len(engine.chunks.cache._own_state().chunks) == 0
    if change == "cut":
        os.truncate(path, 8192)
    else:
        with path.open("r+b") as file:
            file.write(path.read_bytes()[:-1] + b"\1")
    for _ in range(2):
        with pytest.raises(PackChangedError):
            engine.read("x", [39])


def test_a_file_replaced_just_before_the_library_opens_it_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept = tmp_path / "f.h5", tmp_path / "kept.h5"
    values = write(path, numbers((20, 30), "i4"), "compact")
    write(tmp_path / "other.h5", -values, "compact")
    engine = engine_of(path)

    def open_another(name: str) -> h5py.File:
        path.rename(kept)
        (tmp_path / "other.h5").rename(path)
        return open_file(name)

    monkeypatch.setattr("h5pack.read.hdf5_reader.open_file", open_another)
    with pytest.raises(PackChangedError):
        engine.read("x", [3])
    monkeypatch.undo()
    kept.rename(path)
    assert np.array_equal(engine.read("x", [3]), values[[3]])


@pytest.mark.parametrize("storage", ["rows", "whole_gzip"])
def test_closed_engines_open_again_and_notice_another_file(tmp_path: Path, storage: str) -> None:
    path = tmp_path / "f.h5"
    values = write(path, numbers((20, 300), "i4"), storage)
    engine = engine_of(path)
    for _ in range(2):
        require_rows(engine, values)
        engine.close()
    files.replaced(path)
    for _ in range(2):
        with pytest.raises(PackChangedError, match=r"f\.h5"):
            engine.read("x", [5])
        path.unlink(missing_ok=True)


def test_only_uncached_bytes_are_prefetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.h5"
    write(path, numbers((20, 600), "u1"), "holes")
    engine = engine_of(path)
    places = engine.indexes["x"].addresses
    plan = plan_scatter(engine.indexes["x"], np.array([0, 1, 4, 6, 8, 19]))
    asked: list[tuple[int, int]] = []
    probed: list[int] = []
    monkeypatch.setattr(engine.storage, "will_need", lambda offset, count: asked.append((offset, count)))
    monkeypatch.setattr(engine.storage, "is_cached", lambda offset: probed.append(offset) is None)
    engine.prefetch(plan)
    assert asked == []
    assert min(probed) >= 0
    monkeypatch.setattr(engine.storage, "is_cached", lambda offset: False)
    engine.prefetch(plan)
    runs = [(0, 2), (6, 1), (8, 1), (19, 1)]
    assert asked == [(int(places[row // 3]) + row % 3 * 600, count * 600) for row, count in runs]
    # Every second row is not stored.
    asked.clear()
    engine.files.prefetch(engine.indexes["x"], np.array([3, 0, 4, 1, 5, 2, 12, 6]))
    assert asked == [(int(places[row // 3]) + row % 3 * 600, 600) for row in (0, 1, 2, 6)]


def test_consecutive_rows_may_begin_and_end_in_different_chunks(tmp_path: Path) -> None:
    values = write(tmp_path / "f.h5", numbers((12, 40), "u1"), "holes")
    engine = engine_of(tmp_path / "f.h5")
    for start in range(12):
        for stop in range(start + 1, 13):
            assert np.array_equal(engine.read_range("x", start, stop), values[start:stop])
            assert np.array_equal(engine.read("x", range(start, stop)), values[start:stop])
