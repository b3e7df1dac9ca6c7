"""Virtual datasets: missing or changed sources are errors, where HDF5 returns fill values."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from h5pack.errors import PackChangedError, PackFormatError
from h5pack.read import virtual as module
from h5pack.read.chunk_index import index_dataset
from h5pack.read.description import describe_file
from h5pack.read.virtual_index import VirtualIndex
from tests.read.files import described

ROWS = np.arange(24 * 5 * 4 * 3, dtype=np.uint8).reshape(24, 5, 4, 3)


def parts(folder: Path) -> None:
    for number in range(3):
        with h5py.File(folder / f"part{number}.h5", "w") as file:
            file["data/x"] = ROWS[number * 8 : number * 8 + 8]


def virtual(folder: Path, name: str = "v.h5", sources: Any = None, **settings: Any) -> Path:
    layout = h5py.VirtualLayout(ROWS.shape, np.uint8)
    for number in range(3):
        path = f"part{number}.h5" if sources is None else sources(number)
        layout[number * 8 : number * 8 + 8] = h5py.VirtualSource(path, "data/x", (8, 5, 4, 3))
    with h5py.File(folder / name, "w", libver="latest") as file:
        file.create_virtual_dataset("images", layout, **settings)
    return folder / name


def rows_of(path: Path) -> Any:
    engine = described(path)
    return engine.read("images", range(engine.indexes["images"].rows))


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    parts(tmp_path)
    path = virtual(tmp_path)
    os.rename(tmp_path / "part1.h5", tmp_path / "gone.h5")
    with h5py.File(path) as file:
        assert not file["images"][8:16].any(), "HDF5 gives zeros"
    with pytest.raises(PackFormatError, match="missing") as caught:
        describe_file(path)
    assert caught.value.path == "part1.h5"
    (tmp_path / "part1.h5").write_bytes(b"no file")
    with pytest.raises(PackFormatError, match="not an HDF5 file") as caught:
        describe_file(path)
    assert caught.value.path == str(tmp_path / "part1.h5")


@pytest.mark.parametrize(("name", "rows"), [("data/y", 8), ("data/x", 5)])
def test_a_source_without_its_dataset_or_rows_is_named(tmp_path: Path, name: str, rows: int) -> None:
    parts(tmp_path)
    path = virtual(tmp_path)
    with h5py.File(tmp_path / "part2.h5", "w") as file:
        file[name] = ROWS[:rows]
    with pytest.raises(PackFormatError) as caught:
        describe_file(path)
    assert (caught.value.path, caught.value.dataset) == (str(tmp_path / "part2.h5"), "data/x")


def test_a_part_of_a_source_needs_that_part(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = ROWS
    layout = h5py.VirtualLayout((4, 5, 4, 3), np.uint8)
    layout[...] = h5py.VirtualSource("a.h5", "x", ROWS.shape)[6:14:2]
    with h5py.File(tmp_path / "v.h5", "w", libver="latest") as file:
        file.create_virtual_dataset("images", layout)
    assert np.array_equal(rows_of(tmp_path / "v.h5"), ROWS[6:14:2])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = ROWS[:13]
    assert np.array_equal(rows_of(tmp_path / "v.h5"), ROWS[6:14:2])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = ROWS[:12]
    with pytest.raises(PackFormatError, match="12"):
        describe_file(tmp_path / "v.h5")


def test_virtual_over_virtual_and_the_same_file(tmp_path: Path) -> None:
    parts(tmp_path)
    virtual(tmp_path, "inner.h5")
    with h5py.File(tmp_path / "outer.h5", "w", libver="latest") as file:
        file["own"] = ROWS[:2]
        layout = h5py.VirtualLayout((26, 5, 4, 3), np.uint8)
        layout[:2] = h5py.VirtualSource(".", "own", (2, 5, 4, 3))
        layout[2:] = h5py.VirtualSource("inner.h5", "images", ROWS.shape)
        file.create_virtual_dataset("images", layout)
    assert np.array_equal(rows_of(tmp_path / "outer.h5"), np.concatenate([ROWS[:2], ROWS]))
    (tmp_path / "part0.h5").unlink()
    with pytest.raises(PackFormatError, match=r"part0\.h5 is missing"):
        describe_file(tmp_path / "outer.h5")


PLACES = ("opened", "linked", "cwd", "prefix", "listed")
FILL = 77


def print_found(folder: Path, name: str) -> None:
    """Write a source in every folder where HDF5 searches, and delete them one by one in the order of h5py.

    Prints what h5py and h5pack read each time: the number of a place, or the fill value where none is left.
    """
    relative = name if name.startswith("sub") else os.path.basename(name)
    for number, place in enumerate(PLACES):
        (folder / place / relative).parent.mkdir(exist_ok=True)
        with h5py.File(folder / place / relative, "w") as file:
            file["x"] = np.full((2, 4), number, np.uint8)
    layout = h5py.VirtualLayout((2, 4), np.uint8)
    layout[:] = h5py.VirtualSource(name, "x", (2, 4))
    with h5py.File(folder / "linked" / "v.h5", "w", libver="latest") as file:
        file.create_virtual_dataset("images", layout, fillvalue=FILL)
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


@pytest.mark.parametrize("prefix", ["", "{folder}/prefix", "{folder}/prefix:{folder}/listed", "${{ORIGIN}}/../prefix"])
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
    source, path = tmp_path / "source.h5", tmp_path / "v.h5"

    def write_source(fill: int) -> None:
        with h5py.File(tmp_path / "new.h5", "w") as file:
            if kind == "encoded":
                stream = io.BytesIO()
                Image.fromarray(np.full((9, 8, 3), fill, np.uint8)).save(stream, "PNG")
                file.create_dataset("x", (6,), h5py.vlen_dtype(np.uint8))
                for row in range(6):
                    file["x"][row] = np.frombuffer(stream.getvalue(), np.uint8)
            else:
                file.create_dataset(
                    "x", data=np.full((6, 9, 8, 3), fill), dtype=np.uint8, chunks=(6, 9, 8, 3), scaleoffset=0
                )
        os.replace(tmp_path / "new.h5", source)

    if kind == "external":
        source.write_bytes(bytes(6 * 9 * 8 * 3))
        with h5py.File(path, "w") as file:
            file.create_dataset("images", (6, 9, 8, 3), np.uint8, external=[(str(source), 0, h5py.h5f.UNLIMITED)])
    else:
        write_source(1)
        with h5py.File(path, "w", libver="latest") as file:
            if kind == "linked":
                file["images"] = h5py.ExternalLink("source.h5", "x")
            elif kind == "encoded":
                layout = h5py.VirtualLayout((6,), h5py.vlen_dtype(np.uint8))
                layout[:] = h5py.VirtualSource("source.h5", "x", (6,), h5py.vlen_dtype(np.uint8))
                file.create_virtual_dataset("images", layout)
            else:
                layout = h5py.VirtualLayout((6, 9, 8, 3), np.uint8)
                taken = h5py.VirtualSource("source.h5", "x", (6, 9, 8, 3))
                layout[0::2], layout[1::2] = taken[:3], taken[3:]
                file.create_virtual_dataset("images", layout)
    engine = described(path)
    assert {found.path for found in engine.indexes["images"].files} == {str(source)}
    assert engine.read_one("images", 1).shape == (9, 8, 3)
    engine.check_unchanged()
    if kind == "external":
        source.write_bytes(bytes(6 * 9 * 8 * 3 + 1))
    else:
        write_source(2)
    for _ in range(2):
        with pytest.raises(PackChangedError, match=r"source\.h5"):
            engine.read_one("images", 1)
        with pytest.raises(PackChangedError, match=r"source\.h5"):
            engine.check_unchanged()
        source.unlink(missing_ok=True)


def test_a_source_with_many_paths_is_visited_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven levels of 8 virtual datasets, each over all 8 of the level below: 8**7 paths to 57 datasets."""
    with h5py.File(tmp_path / "f.h5", "w", libver="latest") as file:
        for number in range(8):
            file[f"0-{number}"] = np.full((8, 4, 4), number, np.uint8)
        for level, number in itertools.product(range(1, 8), range(8)):
            layout = h5py.VirtualLayout((8, 4, 4), np.uint8)
            for row in range(8):
                layout[row] = h5py.VirtualSource(".", f"{level - 1}-{row}", (8, 4, 4))[row]
            file.create_virtual_dataset("images" if (level, number) == (7, 0) else f"{level}-{number}", layout)
    indexed: list[str] = []
    monkeypatch.setattr(module, "index_dataset", lambda *call: (indexed.append(call[2]), index_dataset(*call))[1])
    engine = described(tmp_path / "f.h5")
    assert len(indexed) == len(set(indexed)) == 57
    assert engine.read("images", range(8))[:, 0, 0].tolist() == list(range(8))


def test_holes_of_several_lengths_beside_compressed_rows(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file.create_dataset("x", data=np.ones((10, 64, 64), np.uint8), chunks=(5, 64, 64), compression="gzip")
    layout = h5py.VirtualLayout((45, 64, 64), np.uint8)
    layout[5:15] = h5py.VirtualSource("s.h5", "x", (10, 64, 64))
    with h5py.File(tmp_path / "v.h5", "w", libver="latest") as file:
        file.create_virtual_dataset("images", layout, fillvalue=7)
    engine = described(tmp_path / "v.h5")
    expected = np.where((np.arange(45) >= 5) & (np.arange(45) < 15), 1, 7)
    assert np.array_equal(engine.read("images", range(45))[:, 0, 0], expected)
    index = engine.indexes["images"]
    assert isinstance(index, VirtualIndex)
    for first, last in itertools.pairwise([*index.starts.tolist(), 45]):
        values, positions = engine.rows_in_chunk("images", np.arange(first, last), keep=True)
        assert np.array_equal(values[positions, 0, 0], expected[first:last])
