"""Virtual datasets: what is missing of them is an error, where HDF5 gives zeros."""

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

import h5pack
from h5pack.errors import PackChangedError, PackFormatError
from h5pack.read import virtual as module
from h5pack.read.chunk_index import index_dataset

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


def pixels(path: Path) -> Any:
    dataset = h5pack.H5Dataset(path)
    return np.stack([dataset[index].numpy() for index in range(len(dataset))])


def test_whole_sources_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts(tmp_path)
    assert np.array_equal(pixels(virtual(tmp_path)), ROWS)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert np.array_equal(pixels(tmp_path / "v.h5"), ROWS), "names are those beside the file"
    assert np.array_equal(pixels(virtual(tmp_path, sources=lambda number: tmp_path / f"part{number}.h5")), ROWS)
    (images,) = (next(iter(h5pack.H5Loader(h5pack.H5Dataset(tmp_path / "v.h5", with_rows=False), 24, shuffle=False))),)
    assert np.array_equal(images.numpy(), ROWS)


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    parts(tmp_path)
    path = virtual(tmp_path)
    os.rename(tmp_path / "part1.h5", tmp_path / "gone.h5")
    with h5py.File(path) as file:
        assert not file["images"][8:16].any(), "HDF5 gives zeros"
    with pytest.raises(PackFormatError, match="missing") as caught:
        h5pack.H5Dataset(path)
    assert caught.value.path == "part1.h5"
    (tmp_path / "part1.h5").write_bytes(b"no file")
    with pytest.raises(PackFormatError, match="not an HDF5 file") as caught:
        h5pack.H5Dataset(path)
    assert caught.value.path == str(tmp_path / "part1.h5")


@pytest.mark.parametrize(("name", "rows"), [("data/y", 8), ("data/x", 5)])
def test_a_source_without_its_dataset_or_rows_is_named(tmp_path: Path, name: str, rows: int) -> None:
    parts(tmp_path)
    path = virtual(tmp_path)
    with h5py.File(tmp_path / "part2.h5", "w") as file:
        file[name] = ROWS[:rows]
    with pytest.raises(PackFormatError) as caught:
        h5pack.H5Dataset(path)
    assert (caught.value.path, caught.value.dataset) == (str(tmp_path / "part2.h5"), "data/x")


def test_a_part_of_a_source_needs_that_part(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = ROWS
    layout = h5py.VirtualLayout((4, 5, 4, 3), np.uint8)
    layout[...] = h5py.VirtualSource("a.h5", "x", ROWS.shape)[6:14:2]
    with h5py.File(tmp_path / "v.h5", "w", libver="latest") as file:
        file.create_virtual_dataset("images", layout)
    assert np.array_equal(pixels(tmp_path / "v.h5"), ROWS[6:14:2])
    for rows, good in ((13, True), (12, False)):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["x"] = ROWS[:rows]
        if good:
            assert np.array_equal(pixels(tmp_path / "v.h5"), ROWS[6:14:2])
        else:
            with pytest.raises(PackFormatError, match="12"):
                h5pack.H5Dataset(tmp_path / "v.h5")


def test_virtual_over_virtual_and_the_same_file(tmp_path: Path) -> None:
    parts(tmp_path)
    virtual(tmp_path, "inner.h5")
    with h5py.File(tmp_path / "outer.h5", "w", libver="latest") as file:
        file["own"] = ROWS[:2]
        layout = h5py.VirtualLayout((26, 5, 4, 3), np.uint8)
        layout[:2] = h5py.VirtualSource(".", "own", (2, 5, 4, 3))
        layout[2:] = h5py.VirtualSource("inner.h5", "images", ROWS.shape)
        file.create_virtual_dataset("images", layout)
    assert np.array_equal(pixels(tmp_path / "outer.h5"), np.concatenate([ROWS[:2], ROWS]))
    (tmp_path / "part0.h5").unlink()
    with pytest.raises(PackFormatError, match=r"part0\.h5 is missing"):
        h5pack.H5Dataset(tmp_path / "outer.h5")


def test_sources_are_found_by_prefix_or_current_folder(tmp_path: Path) -> None:
    """HDF5 reads the variable once, so this is a process of its own."""
    (tmp_path / "there").mkdir()
    parts(tmp_path / "there")
    path = virtual(tmp_path)
    code = (
        "import sys, h5pack, numpy as np; d = h5pack.H5Dataset(sys.argv[1]); "
        "print(sum(int(d[i].numpy().astype(int).sum()) for i in range(len(d))))"
    )
    there = tmp_path / "there"
    for prefix, where in ((str(there), tmp_path), (f"/none:{there}", tmp_path), ("", there)):
        environment = {**os.environ, "HDF5_VDS_PREFIX": prefix}
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], env=environment, cwd=where, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) == int(ROWS.astype(int).sum())


PLACES = ("opened", "linked", "cwd", "prefix", "listed")
LOOK = """
import os, sys, h5py
from h5pack.errors import PackFormatError
from h5pack.read.engine import Engine
from h5pack.read.description import describe_file

path, relative, *places = sys.argv[1:]
while True:
    with h5py.File(path) as file:
        expected = int(file["images"][0, 0, 0, 0])
    try:
        pack = describe_file(path)
        found = int(Engine(pack.path, pack.identity, pack.indexes).read("images", [0])[0, 0, 0, 0])
    except PackFormatError:
        # HDF5 gives the fill value.
        found = 77
    print(expected, found)
    if expected == 77:
        break
    os.remove(os.path.join(places[expected - 1], relative))
"""


@pytest.mark.parametrize("prefix", ["", "{folder}/prefix", "{folder}/prefix:{folder}/listed", "${{ORIGIN}}/../prefix"])
@pytest.mark.parametrize("name", ["s.h5", "sub/s.h5", "/nowhere/s.h5"])
def test_sources_are_those_that_hdf5_finds(tmp_path: Path, name: str, prefix: str) -> None:
    """Files of one name in every place where HDF5 looks, taken away one after the other; h5py says which one it is."""
    relative = name.lstrip("/") if name.startswith("sub") else os.path.basename(name)
    for number, place in enumerate(PLACES):
        target = tmp_path / place / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(target, "w") as file:
            file["x"] = np.full((2, 4, 4, 3), number + 1, np.uint8)
    layout = h5py.VirtualLayout((2, 4, 4, 3), np.uint8)
    layout[:] = h5py.VirtualSource(name, "x", (2, 4, 4, 3))
    with h5py.File(tmp_path / "linked" / "v.h5", "w", libver="latest") as file:
        file.create_virtual_dataset("images", layout, fillvalue=77)
    (tmp_path / "opened" / "v.h5").symlink_to(tmp_path / "linked" / "v.h5")
    environment = {**os.environ, "HDF5_VDS_PREFIX": prefix.format(folder=tmp_path)}
    command = [sys.executable, "-c", LOOK, str(tmp_path / "opened" / "v.h5"), relative]
    command += [str(tmp_path / place) for place in PLACES]
    done = subprocess.run(command, cwd=tmp_path / "cwd", env=environment, capture_output=True, text=True, check=True)
    seen = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert all(expected == found for expected, found in seen), [PLACES[expected - 1] for expected, _ in seen[:-1]]
    assert len(seen) >= 4


@pytest.mark.parametrize("kind", ["strided", "encoded", "linked", "external"])
def test_replaced_sources_of_library_reads_are_noticed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HDF5 gives zeros, or another file's rows, and says nothing."""
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
    dataset = h5pack.H5Dataset(path)
    assert {found.path for found in dataset.engine.indexes["images"].files} == {str(source)}
    assert dataset[1].shape == (9, 8, 3)
    loader = h5pack.H5Loader(dataset, 3)
    assert sum(len(batch) for batch in loader) == 6
    if kind == "external":
        source.write_bytes(bytes(6 * 9 * 8 * 3 + 1))
    else:
        write_source(2)
    with pytest.raises(PackChangedError, match=r"source\.h5"):
        dataset[1]
    with pytest.raises(PackChangedError, match=r"source\.h5"):
        list(loader)
    source.unlink()
    with pytest.raises(PackChangedError, match=r"source\.h5"):
        dataset[1]


def test_a_source_with_many_paths_is_visited_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven levels of 12 virtual datasets, each over all 12 below: 12**7 ways, and 84 datasets."""
    with h5py.File(tmp_path / "f.h5", "w", libver="latest") as file:
        for number in range(12):
            file[f"0-{number}"] = np.full((12, 4, 4), number, np.uint8)
        for level, number in itertools.product(range(1, 8), range(12)):
            layout = h5py.VirtualLayout((12, 4, 4), np.uint8)
            for row in range(12):
                layout[row] = h5py.VirtualSource(".", f"{level - 1}-{row}", (12, 4, 4))[row]
            file.create_virtual_dataset("images" if (level, number) == (7, 0) else f"{level}-{number}", layout)
    indexed: list[str] = []
    monkeypatch.setattr(module, "index_dataset", lambda *call: (indexed.append(call[2]), index_dataset(*call))[1])
    dataset = h5pack.H5Dataset(tmp_path / "f.h5")
    assert len(indexed) == len(set(indexed)) == 85
    assert [int(dataset[row][0, 0]) for row in range(12)] == list(range(12))


def test_holes_of_several_lengths_beside_compressed_rows(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file.create_dataset("x", data=np.ones((10, 64, 64), np.uint8), chunks=(5, 64, 64), compression="gzip")
    layout = h5py.VirtualLayout((45, 64, 64), np.uint8)
    layout[5:15] = h5py.VirtualSource("s.h5", "x", (10, 64, 64))
    with h5py.File(tmp_path / "v.h5", "w", libver="latest") as file:
        file.create_virtual_dataset("images", layout, fillvalue=7)
    for resident in ("no", "auto"):
        dataset = h5pack.H5Dataset(tmp_path / "v.h5", with_rows=True)
        found = {int(row): int(image.min()) for images, rows in h5pack.H5Loader(dataset, 8, resident=resident)
                 for image, row in zip(images, rows, strict=True)}  # fmt: skip
        assert found == {row: 1 if 5 <= row < 15 else 7 for row in range(45)}
