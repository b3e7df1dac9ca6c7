"""Packs that keep JPEG bytes: rows are read directly in any layout, and damaged offsets are refused."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.errors import DamagedRowsError, PackFormatError, SizesDifferError
from h5pack.read import read_plan
from h5pack.read.description import describe_file
from h5pack.read.encoded import EncodedIndex
from h5pack.read.engine import Engine
from h5pack.read.several import join_descriptions
from tests.makers import pixels
from tests.read.encoded_files import SIZE, decoded, encode, jpegs, write_kept
from tests.read.files import described, flip, in_child

LAYOUTS: dict[str, dict[str, Any]] = {
    "small chunks": {"chunk": 100},
    "adjacent chunks": {"chunk": 65536},
    "gzip": {"chunk": 1000, "compression": "gzip"},
}


@pytest.mark.parametrize(
    ("layout", "read_bytes"),
    [("small chunks", 1), ("small chunks", 10**7), ("adjacent chunks", 2000), ("gzip", 1), ("gzip", 2000)],
)
def test_bytes_and_pixels_in_every_layout(
    tmp_path: Path, layout: str, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_plan, "MAX_MERGED_BYTES", read_bytes)
    rows = jpegs(31)
    engine = described(write_kept(tmp_path / "f.h5", rows, **LAYOUTS[layout]))
    index = engine.indexes["encoded"]
    assert isinstance(index, EncodedIndex)
    assert (index.shape, index.is_encoded, index.raw) == ((31, *SIZE, 3), True, False)
    assert (index.library_reason is None) == (layout != "gzip")
    expected = np.stack([decoded(row) for row in rows])
    dice = np.random.default_rng(3)
    for wanted in (np.arange(31), dice.permutation(31), np.array([4, 4, 30, 0, 4]), np.empty(0, np.int64)):
        assert engine.read_bytes("encoded", wanted) == [rows[row] for row in wanted]
        assert np.array_equal(engine.read("encoded", wanted), expected[wanted])
        assert np.array_equal(engine.read("labels", wanted), wanted)
        engine.check("encoded", wanted, expected[wanted])
        engine.check("encoded", wanted, [rows[row] for row in wanted])
    with pytest.raises(DamagedRowsError) as caught:
        engine.check("encoded", np.array([7, 5]), [rows[7], rows[4]])
    assert caught.value.rows == (5,)
    assert pickle.loads(pickle.dumps(engine)).read_bytes("encoded", np.array([3])) == [rows[3]]
    assert in_child(lambda: engine.read_bytes("encoded", np.array([30, 2])) == [rows[30], rows[2]])


@pytest.mark.parametrize("layouts", [("small chunks", "gzip"), ("gzip", "adjacent chunks"), ("gzip", "gzip")])
def test_files_of_every_layout_are_read_as_one(tmp_path: Path, layouts: tuple[str, str]) -> None:
    rows = jpegs(20)
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    for path, part, layout in zip(paths, (rows[:9], rows[9:]), layouts, strict=True):
        write_kept(path, part, **LAYOUTS[layout])
    pack = join_descriptions([describe_file(path) for path in paths])
    engine = Engine(pack.path, pack.identity, pack.indexes, files=pack.files)
    wanted = np.random.default_rng(3).permutation(20)
    assert engine.read_bytes("encoded", wanted) == [rows[row] for row in wanted]
    assert np.array_equal(engine.read("encoded", wanted), [decoded(rows[row]) for row in wanted])


def test_adjacent_rows_are_read_together_and_counted(tmp_path: Path) -> None:
    rows = jpegs(40)
    engine = described(write_kept(tmp_path / "f.h5", rows, chunk=1 << 20))
    engine.read("encoded", np.arange(40))
    stats = engine.snapshot()
    assert (stats.rows, stats.reads, stats.bytes_read) == (40, 1, sum(map(len, rows)))
    assert stats.bytes_wanted == 40 * 20 * 14 * 3


def test_group_rows_follow_the_mean_size(tmp_path: Path) -> None:
    thumbnail, photo = encode(pixels(0, (8, 8))), encode(pixels(1, (200, 300)))
    path = write_kept(tmp_path / "f.h5", [thumbnail] + [photo] * 4_000, chunk=1 << 20)
    index = describe_file(path).indexes["encoded"]
    assert index.group_rows == (4 << 20) // ((4_000 * 200 * 300 + 64) * 3 // 4_001)
    assert describe_file(path, "encoded").indexes["encoded"].shape == index.shape == (4_001, 8, 8, 3)


def test_images_of_several_sizes(tmp_path: Path) -> None:
    rows = [encode(pixels(seed, (20 + seed, 14))) for seed in range(5)]
    dataset = h5pack.H5Dataset(write_kept(tmp_path / "f.h5", rows), check=True)
    assert [tuple(dataset[row].image.shape) for row in range(5)] == [(20 + row, 14, 3) for row in range(5)]
    with pytest.raises(SizesDifferError) as caught:
        dataset.collate(dataset.__getitems__([0, 3]))
    assert caught.value.rows == (3,)


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    """A changed byte of a JPEG may well decode, so only the checksum finds it."""
    rows = jpegs(9)
    path = write_kept(tmp_path / "f.h5", rows)
    flip(path, path.read_bytes().index(rows[6]) + len(rows[6]) - 9, 3)
    dataset = h5pack.H5Dataset(path, check=True)
    assert dataset[5].label == 5
    with pytest.raises(DamagedRowsError) as caught:
        dataset[6]
    assert caught.value.rows == (6,)


def changed(path: Path, name: str, row: int, value: Any) -> Path:
    with h5py.File(path, "r+") as file:
        file[name][row] = value
    return path


@pytest.mark.parametrize("row", [0, 3, 9])
@pytest.mark.parametrize("value", [-1, -(2**63), 2**40, 2**62])
def test_offsets_outside_of_the_data_are_refused(tmp_path: Path, row: int, value: int) -> None:
    path = changed(write_kept(tmp_path / "f.h5", jpegs(9)), "encoded/offsets", row, value)
    with pytest.raises(PackFormatError) as caught:
        describe_file(path)
    assert caught.value.dataset == "encoded/offsets"
    assert caught.value.rows in ((row,), (row - 1,))


def test_descending_offsets_are_refused(tmp_path: Path) -> None:
    path = write_kept(tmp_path / "f.h5", jpegs(9))
    with h5py.File(path) as file:
        value = file["encoded/offsets"][5]
    with pytest.raises(PackFormatError) as caught:
        describe_file(changed(path, "encoded/offsets", 3, value + 1))
    assert caught.value.rows == (3,)


def test_other_damage_is_refused(tmp_path: Path) -> None:
    rows = jpegs(9)
    path = write_kept(tmp_path / "f.h5", rows)
    with h5py.File(path, "r+") as file:
        file["encoded/data"].resize((sum(map(len, rows)) - 1,))
    with pytest.raises(PackFormatError):
        describe_file(path)
    for row, size in itertools.product((0, 8), ((0, 14), (-5, 14), (2**31 - 1, 2**31 - 1))):
        with pytest.raises(PackFormatError) as caught:
            describe_file(changed(write_kept(path, rows), "encoded/size", row, size))
        assert (caught.value.dataset, caught.value.rows) == ("encoded/size", (row,))
    for name, values in {
        "encoded/data": np.zeros((9, 2), np.uint8),
        "encoded/offsets": np.zeros((9, 2), np.int64),
        "encoded/size": np.zeros((8, 2), np.int32),
    }.items():
        for other in (values, values.astype("f4"), None):
            write_kept(path, rows)
            with h5py.File(path, "r+") as file:
                del file[name]
                if other is not None:
                    file[name] = other
            with pytest.raises(PackFormatError) as caught:
                describe_file(path)
            assert caught.value.dataset == name


def test_a_pack_without_rows(tmp_path: Path) -> None:
    engine = described(write_kept(tmp_path / "f.h5", []))
    assert engine.indexes["encoded"].shape == (0, 0, 0, 3)
    assert engine.read_bytes("encoded", np.empty(0, np.int64)) == []


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = write_kept(tmp_path / "f.h5", jpegs(9), chunk=1 << 20)
    with h5py.File(path) as file:
        start = file["encoded/data"].id.get_chunk_info(0).byte_offset
    data = path.read_bytes()
    (tmp_path / "cut.h5").write_bytes(data[: start + 999])
    with pytest.raises(h5pack.H5PackError):
        describe_file(tmp_path / "cut.h5")
