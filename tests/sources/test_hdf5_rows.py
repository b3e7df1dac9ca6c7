"""Rows of an HDF5 file as images: what their numbers become, and that reading ahead changes nothing."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.errors import PackChangedError, PackFormatError, ReadError, RejectedImageError
from h5pack.format import schema
from h5pack.read.description import describe_file
from h5pack.sources import hdf5_rows
from h5pack.sources.hdf5_rows import HDF5RowReader, PixelForm

SEEN = np.arange(12 * 10 * 3, dtype=np.uint8).reshape(12, 10, 3)


def reader(path: Path, name: str = "x") -> HDF5RowReader:
    return HDF5RowReader(describe_file(path, name, None), PixelForm("last"))


@pytest.mark.parametrize(
    ("stored", "value_range"),
    [
        (SEEN, None), (SEEN.astype(np.float32) / np.float32(255), None), ((SEEN / 255).astype(">f8"), None),
        (SEEN.astype(np.uint16) * 256 + 255, None), (SEEN.astype(">u2") << 8, None), (SEEN.astype(np.int64), None),
        (SEEN.astype(np.uint32), None), (SEEN.astype(np.int16), None), (SEEN.astype(np.float32), (0, 255)),
        (SEEN.astype(np.float64) / 127.5 - 1, (-1, 1)), (SEEN.astype(np.uint16) * 16 + 7, (0, 4095)),
        (SEEN.astype(np.int16) - 128, (-128, 127)),
    ],
)  # fmt: skip
def test_numbers_become_the_pixels_they_stand_for(stored: npt.NDArray[Any], value_range: Any) -> None:
    found = PixelForm("last", value_range).pixels(stored)
    assert found.dtype == np.uint8
    if value_range == (0, 4095):
        assert np.abs(found.astype(int) - SEEN).max() <= 1, "255 is not the last of 16 parts"
    else:
        assert np.array_equal(found, SEEN)


def test_half_precision_and_truth_values() -> None:
    assert np.array_equal(PixelForm("last").pixels(np.array([[[0.0, 0.5, 1.0]]], np.float16))[0, 0], [0, 128, 255])
    assert np.array_equal(PixelForm("none").pixels(np.array([[True, False]])), [[[255], [0]]])


@pytest.mark.parametrize(("value", "dtype"), [(1.001, "f4"), (-0.001, "f8"), (np.nan, "f4"), (256, "i4"), (-1, "i1")])
def test_numbers_outside_the_range_are_refused(value: float, dtype: Any) -> None:
    row = np.zeros((4, 5), dtype)
    assert not PixelForm("none").pixels(row).any()
    row[2, 3] = value
    with pytest.raises(RejectedImageError) as caught:
        PixelForm("none").pixels(row)
    assert caught.value.parameters == ("value_range",)
    with pytest.raises(RejectedImageError, match=r"0\.0 to 1\.0000001, are"):
        PixelForm("last", (0.0, 1.0)).pixels(np.array([[[0]], [[1 + 2**-23]]], np.float32))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("axis", ["last", "first"])
def test_channels_come_last_and_alpha_goes(axis: str, channels: int) -> None:
    row = np.random.default_rng(0).integers(0, 256, (6, 7, channels), np.uint8)
    found = PixelForm(axis).pixels(row if axis == "last" else np.ascontiguousarray(row.transpose(2, 0, 1)))
    assert np.array_equal(found, row[:, :, : {1: 1, 2: 1, 3: 3, 4: 3}[channels]])
    assert PixelForm(axis).size(row.shape if axis == "last" else (channels, 6, 7)) == (6, 7)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "f.h5"
    values = np.random.default_rng(0).integers(0, 256, (40, 12, 16, 3), np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=(7, 12, 16, 3))
        file.create_dataset("gzip", data=values, chunks=(7, 12, 16, 3), compression="gzip")
        file.create_dataset("cut", data=values, chunks=(7, 6, 16, 3))
        file.create_dataset("tiny", data=values[:, :4, :4], chunks=(7, 4, 4, 3))
    return path


def test_rows_of_a_chunk_form_a_group(file: Path) -> None:
    indices = np.array([0, 6, 7, 39])
    assert reader(file).groups(indices) is None, "any row can be read by itself"
    for name in ("gzip", "cut", "tiny"):
        np.testing.assert_array_equal(reader(file, name).groups(indices), [0, 0, 1, 5])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 39), max_size=30), st.lists(st.integers(0, 39), max_size=5),
    st.sampled_from(["x", "gzip", "cut", "tiny"]), st.integers(1, 5_000),
)  # fmt: skip
def test_reading_ahead_is_exact(file: Path, coming: list[int], others: list[int], name: str, batch_bytes: int) -> None:
    with h5py.File(file) as opened:
        expected = opened[name][()]
    made = reader(file, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hdf5_rows, "_BATCH_BYTES", batch_bytes)
        made.announce(coming)
        for place, index in enumerate(coming):
            assert np.array_equal(made.read(index, ""), expected[index])  # type: ignore[arg-type]
            # Other rows may be requested in between.
            for other in others[place : place + 1]:
                assert np.array_equal(made.read(other, ""), expected[other])  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [None, 1_000], ids=["kept", "too large to keep"])
def test_a_group_is_decoded_once(file: Path, capacity: int | None) -> None:
    made = reader(file, "gzip")
    if capacity is not None:
        made.engine.chunks.cache.capacity = capacity
    with pytest.MonkeyPatch.context() as patch:
        # Two rows a batch, and still the chunk is read once.
        patch.setattr(hdf5_rows, "_BATCH_BYTES", 1_200)
        made.announce(range(7))
        for index in range(7):
            made.read(index, "")
    with h5py.File(file) as opened:
        size = opened["gzip"].id.get_chunk_info(0).size
    assert made.engine.snapshot().bytes_read == size


def test_the_chunks_of_announced_rows_are_decoded_once_if_the_cache_cannot_keep_all(file: Path) -> None:
    made = reader(file, "gzip")
    made.engine.chunks.cache.capacity = 3 * 7 * made.index.row_bytes
    with h5py.File(file) as opened:
        expected = opened["gzip"][()]
        sizes = [opened["gzip"].id.get_chunk_info(number).size for number in range(6)]
    rows = np.random.default_rng(0).permutation(40).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hdf5_rows, "_BATCH_BYTES", 10 * made.index.row_bytes)
        made.announce(rows)
        assert np.array_equal([made.read(row, "") for row in rows], expected[rows])
        assert made.engine.snapshot().bytes_read == sum(sizes)
        patch.setattr(hdf5_rows, "_HELD_BYTES", 39 * made.index.row_bytes)
        made.announce(rows)
        made.read(rows[0], "")
        assert len(made._loaded) == 9


def test_the_bytes_of_a_row_include_its_masks(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["x"], file["mask"] = np.zeros((4, 8, 8, 3), np.uint8), np.zeros((4, 8, 8), np.int64)
    found = describe_file(tmp_path / "f.h5", "x", None, ("mask",))
    assert HDF5RowReader(found, PixelForm("last"), {"mask": schema.MASK}).row_bytes == 8 * 8 * (3 + 8)


@pytest.mark.parametrize(
    ("images", "masks", "groups"),
    [
        ({}, {}, None),
        ({}, {"compression": "gzip"}, [0] * 5 + [1] * 5),
        ({"compression": "gzip"}, {"compression": "gzip"}, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
    ],
)
def test_rows_of_a_compressed_chunk_of_masks_form_a_group_if_images_are_not_decoded(
    tmp_path: Path, images: dict[str, Any], masks: dict[str, Any], groups: list[int] | None
) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((10, 16, 16, 3), np.uint8), chunks=(2, 16, 16, 3), **images)
        file.create_dataset("mask", data=np.zeros((10, 16, 16), np.uint8), chunks=(5, 16, 16), **masks)
    found = describe_file(tmp_path / "f.h5", "x", None, ("mask",))
    grouped = HDF5RowReader(found, PixelForm("last"), {"mask": schema.MASK}).groups(np.arange(10))
    assert (None if grouped is None else grouped.tolist()) == groups


def test_a_reader_of_some_images_renumbers_them(file: Path) -> None:
    with h5py.File(file) as opened:
        expected = opened["gzip"][()]
    some = reader(file, "gzip").take(np.array([30, 3, 8])).take(np.array([2, 0]))
    for reading in (some, pickle.loads(pickle.dumps(some))):
        assert np.array_equal([reading.read(0, ""), reading.read(1, "")], expected[[8, 30]])
    assert some.groups(np.array([0, 1])).tolist() == [1, 4]  # type: ignore[union-attr]
    whole = reader(file, "gzip")
    whole.announce(range(4))
    whole.read(0, "")
    taken = whole.take(np.array([30, 31, 32]))
    assert np.array_equal([taken.read(index, "") for index in range(3)], expected[30:33])
    assert some.fingerprints(np.array([0, 1])).tolist() == whole.fingerprints(np.array([8, 30])).tolist()
    assert len(set(whole.fingerprints(np.arange(40)).tolist())) == 40


@pytest.mark.parametrize("name", ["gzip", "cut_gzip"])
def test_damage_rejects_only_the_rows_of_its_chunk(tmp_path: Path, name: str) -> None:
    values = np.random.default_rng(0).integers(0, 99, (20, 12, 10, 3), np.uint8)
    with h5py.File(tmp_path / "f.h5", "w") as made:
        chunks = (5, 12, 10, 3) if name == "gzip" else (5, 6, 10, 3)
        dataset = made.create_dataset(name, data=values, chunks=chunks, compression="gzip")
        info = dataset.id.get_chunk_info(1 if name == "gzip" else 2)
    with (tmp_path / "f.h5").open("r+b") as stream:
        stream.seek(info.byte_offset + 20)
        stream.write(bytes(40))
    found = reader(tmp_path / "f.h5", name)
    found.announce(range(20))
    for index in range(20):
        if 5 <= index < 10:
            with pytest.raises(RejectedImageError):
                found.read(index, "")
        else:
            assert np.array_equal(found.read(index, ""), values[index])  # type: ignore[arg-type]


def test_another_file_under_the_same_name_stops(tmp_path: Path) -> None:
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as made:
            made["x"] = np.full((9, 12, 10, 3), number, np.uint8)
    found = reader(tmp_path / "0.h5")
    (tmp_path / "1.h5").rename(tmp_path / "0.h5")
    with pytest.raises(PackChangedError):
        found.read(3, "")


@pytest.mark.parametrize(
    ("failure", "error"),
    [(ReadError("failed"), ReadError), (PackFormatError("wrong chunk"), RejectedImageError)],
)
def test_read_errors_reject_the_row_or_stop_the_conversion(
    tmp_path: Path, failure: Exception, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing disk stops the conversion, a wrong row is left out, and a file that does not open is no row's fault."""
    with h5py.File(tmp_path / "f.h5", "w") as made:
        made.create_dataset("x", data=np.zeros((9, 12, 10, 3), np.uint8), chunks=(9, 12, 10, 3), scaleoffset=0)
    found = reader(tmp_path / "f.h5")
    assert np.array_equal(found.read(2, ""), np.zeros((12, 10, 3)))  # type: ignore[arg-type]
    monkeypatch.setattr(found.engine.reader, "read", Mock(side_effect=failure))
    with pytest.raises(error):
        found.read(2, "")
    monkeypatch.setattr(found.engine.reader, "open", Mock(side_effect=PackFormatError("too many open files")))
    with pytest.raises(type(failure)):
        found.read(2, "")
