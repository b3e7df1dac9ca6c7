"""Virtual datasets: missing or changed sources are errors, where HDF5 returns fill values."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

import h5pack
from h5pack.errors import PackChangedError, PackFormatError, ReadError
from h5pack.format.checksums import row_checksums
from h5pack.format.fields import RaggedRows
from h5pack.read import virtual as module
from h5pack.read.chunk_index import index_dataset
from h5pack.read.description import describe_file
from h5pack.sources.hdf5_tables import read_field
from tests.makers import hdf5_file
from tests.read.encoded_files import encode, write_encoded
from tests.read.files import (
    Mapped,
    create_virtual,
    described,
    in_child,
    limit_open_files,
    unload_zstd,
    write_virtual,
)

ALL = slice(None)
SHAPE = (24, 5, 4, 3)
ROWS = np.arange(np.prod(SHAPE), dtype=np.uint8).reshape(SHAPE)
TEXTS = np.arange(10, 40).astype("S2")


def virtual(path: Path) -> Path:
    """Write a virtual dataset over three files."""
    for number in range(3):
        hdf5_file(path.with_name(f"part{number}.h5"), **{"data/x": ROWS[number * 8 : number * 8 + 8]})
    taken = [Mapped(np.s_[n * 8 : n * 8 + 8], f"part{n}.h5", (8, 5, 4, 3), name="data/x") for n in range(3)]
    return write_virtual(path, SHAPE, *taken, name="images")


def rows_of(path: Path) -> Any:
    engine = described(path)
    return engine.read("images", range(engine.indexes["images"].rows))


@pytest.mark.parametrize(
    ("change", "found_as", "dataset", "word"),
    [
        (Path.unlink, "part1.h5", None, "missing"),
        (lambda path: path.write_bytes(b"no file"), "{folder}/part1.h5", None, "not an HDF5 file"),
        (lambda path: hdf5_file(path, **{"data/y": ROWS[:8]}), "{folder}/part1.h5", "data/x", "data/x"),
        (lambda path: hdf5_file(path, **{"data/x": ROWS[:5]}), "{folder}/part1.h5", "data/x", "data/x"),
    ],
    ids=["missing", "no HDF5", "no dataset", "few rows"],
)
def test_a_source_that_cannot_be_read_is_named(
    tmp_path: Path, change: Callable[[Path], Any], found_as: str, dataset: str | None, word: str
) -> None:
    path = virtual(tmp_path / "v.h5")
    change(tmp_path / "part1.h5")
    with pytest.raises(PackFormatError, match=word) as caught:
        describe_file(path)
    assert caught.value.path == found_as.format(folder=tmp_path)
    assert dataset is None or caught.value.dataset == dataset


def test_a_part_of_a_source_needs_that_part(tmp_path: Path) -> None:
    mapped = Mapped(ALL, "a.h5", SHAPE, np.s_[6:14:2])
    path = write_virtual(tmp_path / "v.h5", (4, 5, 4, 3), mapped, name="images")
    for kept in (24, 13):
        hdf5_file(tmp_path / "a.h5", x=ROWS[:kept])
        assert np.array_equal(rows_of(path), ROWS[6:14:2])
    hdf5_file(tmp_path / "a.h5", x=ROWS[:12])
    with pytest.raises(PackFormatError, match="12"):
        describe_file(path)


def test_virtual_over_virtual_and_the_same_file(tmp_path: Path) -> None:
    virtual(tmp_path / "inner.h5")
    path = hdf5_file(tmp_path / "outer.h5", own=ROWS[:2])
    own, inner = Mapped(np.s_[:2], ".", (2, 5, 4, 3), name="own"), Mapped(np.s_[2:], "inner.h5", SHAPE, name="images")
    write_virtual(path, (26, 5, 4, 3), own, inner, name="images")
    assert np.array_equal(rows_of(path), np.concatenate([ROWS[:2], ROWS]))
    (tmp_path / "part0.h5").unlink()
    with pytest.raises(PackFormatError, match=r"part0\.h5 is missing"):
        describe_file(path)


def test_rows_that_no_mapping_covers_match_their_checksums(tmp_path: Path) -> None:
    values = np.concatenate([ROWS[:4], np.full((2, 5, 4, 3), 7, np.uint8)])
    hdf5_file(tmp_path / "s.h5", x=ROWS[:4])
    path = hdf5_file(tmp_path / "v.h5", **{"checksums/images": row_checksums(values)})
    write_virtual(path, values.shape, Mapped(np.s_[:4], "s.h5", (4, 5, 4, 3)), name="images", fill=7)
    assert np.array_equal(rows_of(path), values)
    for changed in ({"data": ROWS[1:5]}, {"shape": (4, 5, 4, 3), "dtype": "u1"}):
        with h5py.File(tmp_path / "s.h5", "w") as file:
            file.create_dataset("x", **changed)
        with pytest.raises(PackFormatError, match=r"s\.h5 was changed"):
            describe_file(path)


PLACES = ("opened", "linked", "cwd", "prefix", "listed")
FILL = 77


def print_found(folder: Path, name: str) -> None:
    """Write a source in every folder where HDF5 searches, and delete them one by one in the order of h5py.

    Prints what h5py and h5pack read each time: the number of a place, or the fill value where none is left.
    """
    relative = name if name.startswith("sub") else os.path.basename(name)
    for number, place in enumerate(PLACES):
        (folder / place / relative).parent.mkdir(exist_ok=True)
        hdf5_file(folder / place / relative, x=np.full((2, 4), number, np.uint8))
    (folder / "linked" / "v.h5").unlink(missing_ok=True)
    mapped = Mapped(ALL, name, (2, 4))
    write_virtual(folder / "linked" / "v.h5", (2, 4), mapped, name="images", fill=FILL)
    expected = 0
    while expected != FILL:
        with h5py.File(folder / "opened" / "v.h5") as file:
            expected = int(file["images"][0, 0])
        try:
            found = int(rows_of(folder / "opened" / "v.h5")[0, 0])
        except PackFormatError:
            found = FILL
        print(name, expected, found)
        if expected != FILL:
            (folder / PLACES[expected] / relative).unlink()


@pytest.mark.parametrize("prefix", ["", "{folder}/prefix:{folder}/listed", "${{ORIGIN}}/../prefix"])
def test_sources_are_those_that_hdf5_finds(tmp_path: Path, prefix: str) -> None:
    """HDF5 reads its variable once, so each value needs a process."""
    for place in PLACES:
        (tmp_path / place).mkdir()
    (tmp_path / "opened" / "v.h5").symlink_to(tmp_path / "linked" / "v.h5")
    code = (
        "import pathlib, sys; from tests.read.test_virtual import print_found\n"
        "for name in ('s.h5', 'sub/s.h5', '/nowhere/s.h5'): print_found(pathlib.Path(sys.argv[1]), name)"
    )
    environment = {**os.environ, "HDF5_VDS_PREFIX": prefix.format(folder=tmp_path)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path / "cwd", env=environment, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert all(expected == found for _, expected, found in lines), lines
    for name in ("s.h5", "sub/s.h5", "/nowhere/s.h5"):
        assert sum(line[0] == name for line in lines) >= 4


@pytest.mark.parametrize("kind", ["strided", "encoded", "linked", "external"])
def test_replaced_sources_of_library_reads_are_noticed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HDF5 would silently return zeros, or rows of the new file."""
    monkeypatch.setattr("h5pack.read.chunk_decoder.CHECK_SECONDS", -1)
    source, path, shape = tmp_path / "source.h5", tmp_path / "v.h5", (6, 9, 8, 3)

    def write_source(fill: int) -> None:
        pixels = np.full(shape, fill, np.uint8)
        if kind == "external":
            source.write_bytes(pixels.tobytes() + bytes(fill))
            return
        if kind == "encoded":
            write_encoded(tmp_path / "new.h5", [encode(image, "PNG") for image in pixels], "x")
        else:
            with h5py.File(tmp_path / "new.h5", "w") as file:
                file.create_dataset("x", data=pixels, chunks=shape, scaleoffset=0)
        os.replace(tmp_path / "new.h5", source)

    write_source(1)
    if kind == "encoded":
        write_virtual(path, (6,), Mapped(ALL, "source.h5", (6,)), dtype=h5py.vlen_dtype(np.uint8), name="images")
    elif kind == "strided":
        halves = Mapped(np.s_[0::2], "source.h5", shape, np.s_[:3]), Mapped(np.s_[1::2], "source.h5", shape, np.s_[3:])
        write_virtual(path, shape, *halves, name="images")
    elif kind == "linked":
        hdf5_file(path, images=h5py.ExternalLink("source.h5", "x"))
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset("images", shape, np.uint8, external=[(str(source), 0, h5py.h5f.UNLIMITED)])
    engine = described(path)
    assert {found.path for found in engine.indexes["images"].files} == {str(source)}
    assert engine.read_one("images", 1).shape == (9, 8, 3)
    engine.check_unchanged()
    write_source(2)
    for _ in range(2):
        with pytest.raises(PackChangedError, match=r"source\.h5"):
            engine.read_one("images", 1)
        with pytest.raises(PackChangedError, match=r"source\.h5"):
            engine.check_unchanged()
        source.unlink(missing_ok=True)


def test_external_storage_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    """HDF5 would silently read zeros."""
    sizes, size = (200, 300, h5py.h5f.UNLIMITED), ROWS.nbytes
    starts = np.cumsum([0, *sizes[:2], size - 500])
    for number in range(3):
        data = ROWS.tobytes()[starts[number] : starts[number + 1]]
        (tmp_path / f"{number}.raw").write_bytes(bytes(number) + data)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        stored = [(str(tmp_path / f"{number}.raw"), number, sizes[number]) for number in range(3)]
        file.create_dataset("images", SHAPE, np.uint8, external=stored)
    assert np.array_equal(rows_of(tmp_path / "f.h5"), ROWS)
    for number in range(3):
        whole = (tmp_path / f"{number}.raw").read_bytes()
        (tmp_path / f"{number}.raw").write_bytes(whole[:-1])
        with pytest.raises(PackFormatError, match=rf"{number}\.raw") as caught:
            describe_file(tmp_path / "f.h5")
        assert caught.value.dataset == "images"
        (tmp_path / f"{number}.raw").write_bytes(whole)


def test_external_storage_is_found_where_hdf5_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, HDF5 looks in the current folder only, and would read zeros of the file there."""
    current, folder = tmp_path / "current", tmp_path / "folder"
    for place, data in ((current, ROWS.tobytes()[:-1]), (folder, ROWS.tobytes())):
        place.mkdir()
        (place / "a.raw").write_bytes(data)
    with h5py.File(folder / "f.h5", "w") as file:
        file.create_dataset("images", SHAPE, np.uint8, external=[("a.raw", 0, h5py.h5f.UNLIMITED)])
    monkeypatch.chdir(current)
    with pytest.raises(PackFormatError, match=r"current/a\.raw"):
        describe_file(folder / "f.h5")
    (folder / "inner").mkdir()
    (current / "link").symlink_to("../folder/inner")  # So "link/.." is `folder`.
    prefixes = ("${ORIGIN}", "${ORIGIN}inner/..", "${ORIGIN}/inner/..", "../folder", "link/..", str(folder))
    for prefix in prefixes:
        monkeypatch.setenv("HDF5_EXTFILE_PREFIX", prefix)
        assert {one.path for one in described(folder / "f.h5").indexes["images"].files} == {str(folder / "a.raw")}
    code = "import sys, h5py; sys.stdout.buffer.write(h5py.File(sys.argv[1])['images'][()].tobytes())"
    for prefix, expected in (*((prefix, ROWS.tobytes()) for prefix in prefixes), ("", ROWS.tobytes()[:-1] + b"\0")):
        monkeypatch.setenv("HDF5_EXTFILE_PREFIX", prefix)
        assert subprocess.check_output([sys.executable, "-c", code, str(folder / "f.h5")]) == expected


@pytest.mark.parametrize("kind", ["pixels", "texts"])
def test_sources_beyond_the_limit_on_open_files_are_an_error(tmp_path: Path, kind: str) -> None:
    """HDF5 keeps sources open, and silently reads fill values of those that it cannot open."""
    expected = np.arange(10, 40).repeat(16).reshape(30, 4, 4).astype("u1") if kind == "pixels" else TEXTS
    for number in range(30):
        hdf5_file(tmp_path / f"{number}.h5", x=expected[number])
    mapped = [Mapped(number, f"{number}.h5", expected.shape[1:]) for number in range(30)]
    path = write_virtual(tmp_path / "v.h5", expected.shape, *mapped, dtype=expected.dtype)

    def read(room: int) -> bool:
        limit_open_files(room)
        if kind == "pixels":
            return np.array_equal(described(path, "x", None).read("x", range(30)), expected)
        with h5py.File(path) as file:
            texts = read_field(path, file, "x")
        return isinstance(texts, RaggedRows) and texts.values() == [text.decode() for text in expected.tolist()]

    def fails() -> bool:
        with pytest.raises(ReadError, match="open files") as caught:
            read(20)
        return (caught.value.path, caught.value.dataset) == (str(path), "x")

    assert in_child(fails)
    assert in_child(lambda: read(50))


@pytest.mark.parametrize("pickled", [False, True])
def test_filters_of_sources_are_loaded_in_each_process(tmp_path: Path, pickled: bool) -> None:
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("x", data=ROWS[number], chunks=SHAPE[1:], **hdf5plugin.Zstd())
    mapped = [Mapped(number, f"{number}.h5", SHAPE[1:]) for number in range(2)]
    path = write_virtual(tmp_path / "v.h5", (2, *SHAPE[1:]), *mapped, name="images")
    dataset = pickle.dumps(h5pack.H5Dataset(path))

    def check() -> bool:
        unload_zstd()
        opened = pickle.loads(dataset) if pickled else h5pack.H5Dataset(path)
        return bool(np.array_equal(opened[1][0], ROWS[1]))

    assert in_child(check)


def test_a_source_with_many_paths_is_visited_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven levels of 8 virtual datasets, each over all 8 of the level below: 8**7 paths to 57 datasets."""
    shape = (8, 4, 4)
    with h5py.File(tmp_path / "f.h5", "w", libver="latest") as file:
        for number in range(8):
            file[f"0-{number}"] = np.full(shape, number, np.uint8)
        for level, number in itertools.product(range(1, 8), range(8)):
            below = [Mapped(row, ".", shape, row, f"{level - 1}-{row}") for row in range(8)]
            name = "images" if (level, number) == (7, 0) else f"{level}-{number}"
            create_virtual(file, shape, *below, name=name)
    indexed: list[str] = []
    monkeypatch.setattr(module, "index_dataset", lambda *call: (indexed.append(call[2]), index_dataset(*call))[1])
    engine = described(tmp_path / "f.h5")
    assert len(indexed) == len(set(indexed)) == 57
    assert engine.read("images", range(8))[:, 0, 0].tolist() == list(range(8))
