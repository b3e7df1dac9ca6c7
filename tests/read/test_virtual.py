"""Virtual datasets: what is missing of them is an error, where HDF5 gives zeros."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.errors import PackFormatError

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
    with pytest.raises(
        PackFormatError, match=r"v\.h5: 'images' is virtual, and its source part1\.h5 is missing"
    ) as caught:
        h5pack.H5Dataset(path)
    assert "\n" not in str(caught.value)
    (tmp_path / "part1.h5").write_bytes(b"no file")
    with pytest.raises(PackFormatError, match=r"is virtual, and of its sources: .*part1\.h5: not an HDF5 file"):
        h5pack.H5Dataset(path)


def test_a_source_without_its_dataset_or_rows_is_named(tmp_path: Path) -> None:
    parts(tmp_path)
    path = virtual(tmp_path)
    with h5py.File(tmp_path / "part2.h5", "w") as file:
        file["data/y"] = ROWS[:8]
    with pytest.raises(PackFormatError, match=r"part2\.h5: no dataset 'data/x', a source of .*v\.h5: 'images'"):
        h5pack.H5Dataset(path)
    with h5py.File(tmp_path / "part2.h5", "w") as file:
        file["data/x"] = ROWS[:5]
    with pytest.raises(PackFormatError, match=r"'data/x' has shape \(5, 5, 4, 3\), and .* takes 480 numbers of it"):
        h5pack.H5Dataset(path)


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
            with pytest.raises(PackFormatError, match=r"'x' has shape \(12, 5, 4, 3\)"):
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
    with pytest.raises(PackFormatError, match=r"sources: .*inner\.h5: 'images' is virtual, .* part0\.h5 is missing"):
        h5pack.H5Dataset(tmp_path / "outer.h5")


def test_a_prefix_or_the_folder_one_is_in_leads_to_the_sources(tmp_path: Path) -> None:
    """HDF5 reads the variable once, so this is a process of its own."""
    import subprocess
    import sys

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
