"""Encoded images decode to Pillow's pixels in any layout and thread, and rows that cannot be decoded are named."""

from __future__ import annotations

import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from PIL import Image

import h5pack
from h5pack.errors import DamagedRowsError, PackFormatError, SizesDifferError
from h5pack.images import decode
from h5pack.pack import options
from h5pack.read import encoded as row_decoder_module
from h5pack.read.description import describe_file
from tests.makers import pixels, quick
from tests.read.encoded_files import SIZE, decoded, encode, jpegs, kinds, write_encoded
from tests.read.files import (
    Mapped,
    described,
    flip,
    in_child,
    read_in_threads,
    require_rows,
    unload_zstd,
    write_virtual,
)
from tests.read.read_damaged import read_all

LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": (7,)},
    "single rows": {"chunks": (1,)},
    "guessed": {"chunks": True},
    "extendable": {"chunks": (4,), "maxshape": (None,)},
    "gzip": {"chunks": (5,), "compression": "gzip", "shuffle": True},
}


@pytest.mark.parametrize(("layout", "dtype"), [*((layout, "u1") for layout in LAYOUTS), ("chunked", "i1")])
def test_bytes_and_pixels_in_every_layout(
    tmp_path: Path, layout: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("h5pack.read.encoded._FETCHED_ROWS", 7)
    rows = jpegs(31)
    path = write_encoded(tmp_path / "f.h5", rows, dtype=dtype, **LAYOUTS[layout])
    engine = described(path)
    index = engine.indexes["images"]
    assert index.is_encoded
    assert (index.shape, index.dtype, index.addresses.size) == ((31, *SIZE, 3), np.uint8, 0)
    expected = np.stack([decoded(row) for row in rows])
    dice = np.random.default_rng(3)
    for wanted in (np.arange(31), dice.permutation(31), np.array([4, 4, 30, 0, 4]), np.empty(0, np.int64)):
        assert engine.read_bytes("images", wanted) == [rows[row] for row in wanted]
        assert np.array_equal(engine.read("images", wanted), expected[wanted])
        assert np.array_equal(engine.read("labels", wanted), wanted)


@pytest.mark.parametrize("settings", [{}, {"chunks": True, "compression": "gzip"}])
@pytest.mark.parametrize("kind", ["uint8", "S", "V"])
def test_rows_of_equal_length_that_begin_like_an_image_file(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    rows = [*jpegs(5), encode(pixels(7, SIZE), "PNG")]
    width = max(map(len, rows)) + 3
    padded = np.array([list(row.ljust(width, b"\0")) for row in rows], np.uint8)
    values = padded if kind == "uint8" else padded.view(f"{kind}{width}")[:, 0]
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("images", data=values, **settings)
        file.create_dataset("features", data=padded[:, ::-1])
        file.create_dataset("none", data=padded[:0])
        file.create_dataset("webp", data=np.frombuffer(encode(pixels(7, SIZE), "WEBP"), np.uint8)[None])
    engine = described(tmp_path / "f.h5", labels=None)
    order = np.array([5, 0, 3, 3])
    assert np.array_equal(engine.read("images", order), np.stack([decoded(rows[row]) for row in order]))
    for name in ("features", "none", "webp"):
        assert not describe_file(tmp_path / "f.h5", name).indexes[name].is_encoded
    h5pack.convert(tmp_path / "f.h5", tmp_path / "o.h5", **quick(order="sorted"))
    assert np.array_equal(h5pack.H5Dataset(tmp_path / "o.h5")[5].image, decoded(rows[5]))


@pytest.mark.parametrize("name", ["f.h5", "v.h5"])
def test_compressed_rows_are_recognized_before_their_filter_is_loaded(tmp_path: Path, name: str) -> None:
    rows = [data.ljust(2000, b"\0") for data in jpegs(3)]
    table = np.frombuffer(b"".join(rows), np.uint8).reshape(3, 2000)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("images", data=table, chunks=(1, 2000), **hdf5plugin.Zstd())
    write_virtual(tmp_path / "v.h5", (3, 2000), Mapped(slice(None), "f.h5", (3, 2000), name="images"), name="images")

    def check() -> bool:
        unload_zstd()
        return tuple(h5pack.H5Dataset(tmp_path / name)[0][0].shape) == (20, 14, 3)

    assert in_child(check)


def test_virtual_over_encoded_rows(tmp_path: Path) -> None:
    rows = jpegs(9)
    parts = []
    for first in (0, 3, 6):
        write_encoded(tmp_path / f"{first}.h5", rows[first : first + 3])
        parts.append(Mapped(np.s_[first : first + 3], f"{first}.h5", (3,), name="images"))
    write_virtual(tmp_path / "f.h5", (9,), *parts, dtype=h5py.vlen_dtype(np.uint8), name="images")
    engine = described(tmp_path / "f.h5")
    order = np.array([8, 0, 4, 3, 5])
    assert engine.read_bytes("images", order) == [rows[row] for row in order]
    assert np.array_equal(engine.read("images", order), np.stack([decoded(rows[row]) for row in order]))
    (tmp_path / "3.h5").unlink()
    with pytest.raises(PackFormatError, match=r"3\.h5 is missing"):
        described(tmp_path / "f.h5")


@pytest.mark.parametrize("kind", kinds())
def test_pixels_equal_pillows(tmp_path: Path, kind: str) -> None:
    """Row 0 is a plain JPEG of the same upright size."""
    data = kinds()[kind]
    engine = described(write_encoded(tmp_path / "f.h5", [jpegs(1)[0], data]))
    expected = decoded(data)
    assert described(write_encoded(tmp_path / "0.h5", [data])).indexes["images"].shape == (1, *expected.shape)
    assert np.array_equal(engine.read("images", [1])[0], expected)
    own = engine.read("images", [1, 0, 1], np.empty(3, object))
    assert np.array_equal(own[0], expected)
    assert own[0] is not own[2]


def test_group_rows_follow_the_pixels_not_the_chunks_of_references(tmp_path: Path) -> None:
    rows = jpegs(1, (60, 50)) * 900
    with h5py.File(tmp_path / "pixels.h5", "w") as file:
        file.create_dataset("images", (900, 60, 50, 3), "u1")
    expected = describe_file(tmp_path / "pixels.h5").indexes["images"].group_rows
    assert 1 < expected < 900
    for layout in ("single rows", "gzip"):
        index = describe_file(write_encoded(tmp_path / f"{layout}.h5", rows, **LAYOUTS[layout])).indexes["images"]
        assert index.group_rows == expected


def test_encoded_reads_are_counted(tmp_path: Path) -> None:
    rows = jpegs(40)
    engine = described(write_encoded(tmp_path / "f.h5", rows, chunks=(8,)))
    engine.read("images", np.arange(40))
    stats = engine.snapshot()
    assert (stats.rows, stats.chunk_misses, stats.chunk_hits) == (40, 5, 35)
    assert stats.bytes_read == sum(map(len, rows))
    assert stats.bytes_wanted == 40 * 20 * 14 * 3
    assert stats.amplification == stats.bytes_read / stats.bytes_wanted
    # 40 rows are more than are fetched at once.
    assert stats.reads == 2


def test_the_cache_holds_the_references_of_compressed_chunks(tmp_path: Path) -> None:
    """A reference has 16 bytes, not the 8 of NumPy's itemsize. A smaller cache would decode chunks repeatedly."""
    path = write_encoded(tmp_path / "f.h5", jpegs(50), chunks=(50,), compression="gzip")
    reader = described(path).reader
    reader.read_bytes("images", np.array([0]))
    cache = reader._handles.dataset("images").id.get_access_plist().get_chunk_cache()
    assert cache[1] >= 50 * 16


def test_a_pickled_reader_and_a_forked_child(tmp_path: Path) -> None:
    rows = jpegs(5)
    engine = described(write_encoded(tmp_path / "f.h5", rows))
    expected = np.stack([decoded(row) for row in rows])
    require_rows(engine, expected, "images")
    require_rows(pickle.loads(pickle.dumps(engine)), expected, "images")
    assert in_child(lambda: np.array_equal(engine.read("images", [4, 0]), expected[[4, 0]]))
    assert in_child(lambda: engine.read_bytes("images", np.array([3])) == [rows[3]])


def test_many_threads(tmp_path: Path) -> None:
    """All threads share a decoder; each reads all kinds of rows in its own order."""
    rows = list(kinds().values())
    engine = described(write_encoded(tmp_path / "f.h5", rows, chunks=(3,)))
    read_in_threads(engine, np.stack([decoded(row) for row in rows]), "images")


def test_rare_formats_are_loaded_before_threads_decode() -> None:
    """Pillow loads rare formats on demand; another thread that decodes at that moment may fail."""
    code = (
        "from PIL import Image; from h5pack.read.encoded import row_decoder; assert 'WEBP' not in Image.OPEN\n"
        "row_decoder(); assert 'WEBP' in Image.OPEN"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "the image is empty"),
    "text": (lambda: b"no image at all", "not an image, or of an unknown format"),
    "zeros": (lambda: bytes(500), "not an image, or of an unknown format"),
    "truncated jpeg": (lambda: encode(pixels(3, SIZE))[:-99], "truncated"),
    "truncated png": (lambda: encode(pixels(3, SIZE), "PNG")[:-99], "truncated"),
    "truncated webp": (lambda: encode(pixels(3, SIZE), "WEBP")[:-99], "."),
    "a header alone": (lambda: encode(pixels(3, SIZE))[:20], "."),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 14 20\n", "PostScript"),
    "a bomb": (
        lambda: b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\0\1\0\0" * 2 + b"\x08\x02\0\0\0" + bytes(4),
        "bomb|not an image|cannot be decoded|truncated",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_row_that_cannot_be_decoded_is_named(tmp_path: Path, kind: str) -> None:
    make, reason = BAD[kind]
    rows = jpegs(9)
    rows[6] = make()
    path = write_encoded(tmp_path / "f.h5", rows)
    engine = described(path)
    for out in (None, np.empty(3, object)):
        with pytest.raises(DamagedRowsError, match=reason) as caught:
            engine.read("images", [2, 6, 1], out)
        assert caught.value.rows == (6,)
        assert "\n" not in str(caught.value)
    # Other rows can be read, and so can the bytes of the bad row.
    assert np.array_equal(engine.read("images", [5, 7]), np.stack([decoded(rows[5]), decoded(rows[7])]))
    assert engine.read_bytes("images", np.array([6])) == [rows[6]]
    with pytest.raises(PackFormatError) as refused:
        describe_file(write_encoded(tmp_path / "0.h5", rows[6:]))
    assert (refused.value.dataset, refused.value.rows) == ("images", (0,))
    assert "\n" not in str(refused.value)


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert row_decoder_module.MAX_PIXELS == options.MAX_PIXELS
    monkeypatch.setattr(row_decoder_module, "MAX_PIXELS", 20 * 14)
    rows = [*jpegs(1), encode(pixels(0, (20, 15))), encode(pixels(0, (20, 15)), "PNG")]
    engine = described(write_encoded(tmp_path / "f.h5", rows))
    for row in (1, 2):
        with pytest.raises(DamagedRowsError, match="bomb: 20x15"):
            engine.read("images", [row], np.empty(1, object))


def test_an_image_of_another_size_is_refused_in_a_batch(tmp_path: Path) -> None:
    rows = [*jpegs(3), encode(pixels(5, (30, 9)), "PNG"), *jpegs(2)]
    path = write_encoded(tmp_path / "f.h5", rows)
    engine = described(path)
    for wanted in ([3], [1, 3, 2], [4, 3, 0]):
        with pytest.raises(SizesDifferError, match="30x9") as caught:
            engine.read("images", wanted)
        assert (caught.value.rows, caught.value.parameters) == ((3,), ("decode=RandomResizedCrop(224)", "size='20x14'"))
    own = engine.read("images", [4, 3, 0, 3], np.empty(4, object))
    assert all(np.array_equal(image, decoded(rows[row])) for image, row in zip(own, (4, 3, 0, 3), strict=True))


def test_random_bytes_give_errors_or_images(tmp_path: Path) -> None:
    """Random changes of bytes give an error that names the row, or an image, but no other error."""
    dice = np.random.default_rng(5)
    originals = list(kinds().values())
    rows = [originals[0]]
    for number in range(150):
        data = bytearray(originals[number % len(originals)])
        for place in dice.integers(0, len(data), 1 + number % 7).tolist():
            data[place] = int(dice.integers(256))
        rows.append(bytes(data))
    engine = described(write_encoded(tmp_path / "f.h5", rows))
    named: list[int] = []
    failed: list[int] = []
    for row in range(1, len(rows)):
        try:
            (image,) = engine.read("images", [row], np.empty(1, object))
        except DamagedRowsError as error:
            named += error.rows
            failed.append(row)
        else:
            assert (image.dtype, image.shape[2:]) == (np.uint8, (3,))
    assert named == failed
    assert 10 < len(named) < 140


@pytest.mark.skipif(h5py.version.hdf5_version_tuple < (1, 14, 4), reason="HDF5 before 1.14.4 crashes on damaged heaps")
def test_damage_to_heaps_and_references(tmp_path: Path) -> None:
    """Random changes give an error, or other rows. Sizes of objects are not changed, because HDF5 may then hang."""
    path = write_encoded(tmp_path / "sound.h5", jpegs(12), chunks=(4,))
    original = path.read_bytes()
    places = [heap.start() + place for heap in re.finditer(b"GCOL", original) for place in range(16)]
    with h5py.File(path) as file:
        for number in range(3):
            start = file["images"].id.get_chunk_info(number).byte_offset
            places += range(start, start + 4 * 16)
    dice, copies = random.Random(4), [tmp_path / f"{number:02}.h5" for number in range(25)]
    for copy in copies:
        shutil.copy(path, copy)
        flip(copy, dice.choice(places), dice.randrange(1, 256))
    outcomes = read_all(path, copies, check=False)
    for copy, (outcome, text) in outcomes.items():
        assert outcome in ("right", "wrong", "refused"), f"{copy.name}: {outcome} {text}"
    assert sum(outcome == "refused" for outcome, _ in outcomes.values()) > 5


def test_pillow_warns_once_not_for_every_row(tmp_path: Path) -> None:
    """Pillow warns of a palette with transparency in bytes. The user's warning filters stay as they are."""
    palette = encode(Image.fromarray(pixels(1, SIZE)).convert("P"), "PNG", transparency=bytes(range(200)))
    path = write_encoded(tmp_path / "f.h5", [palette] * 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        described(path).read("images", range(20))
        assert not warnings.filters
    assert ["Palette images" in str(warning.message) for warning in caught] == [True]


def test_other_rows_of_variable_length_are_refused(tmp_path: Path) -> None:
    kinds = (
        *map(h5py.vlen_dtype, (np.float32, np.uint16)),
        h5py.string_dtype(),
        h5py.string_dtype("ascii"),
        "V50",
        "S50",
    )
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("x", (3, 2), h5py.vlen_dtype(np.uint8))
        for number, kind in enumerate(kinds):
            file.create_dataset(f"x{number}", (3,), kind)
        names = list(file)
    for name in names:
        with pytest.raises(PackFormatError) as caught:
            describe_file(tmp_path / "f.h5", name)
        assert caught.value.dataset == name
    # `convert` would refuse these strings, too.
    assert "convert" not in str(caught.value)


def test_unwritten_rows_and_datasets_are_empty(tmp_path: Path) -> None:
    path = write_encoded(tmp_path / "f.h5", jpegs(3), chunks=(2,), maxshape=(None,))
    with h5py.File(path, "r+") as file:
        file["images"].resize((7,))
    engine = described(path, labels=None)
    assert engine.read_bytes("images", np.array([2, 3, 6]))[1:] == [b"", b""]
    with pytest.raises(DamagedRowsError, match="the image is empty") as caught:
        engine.read("images", [5])
    assert caught.value.rows == (5,)
    engine = described(write_encoded(tmp_path / "none.h5", []))
    assert engine.read("images", []).shape == engine.indexes["images"].shape == (0, 0, 0, 3)
    assert engine.read_bytes("images", np.empty(0, np.int64)) == []


def test_threads_decode_without_simplejpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of one size: Pillow's decoder writes to memory that it uses again for the next image of this size."""
    monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
    monkeypatch.setattr(row_decoder_module, "_decoders", threading.local())
    rows = [encode(pixels(number, (200, 200))) for number in range(8)]
    engine = described(write_encoded(tmp_path / "f.h5", rows))
    read_in_threads(engine, np.stack([decoded(row) for row in rows]), "images")
