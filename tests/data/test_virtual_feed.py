"""Virtual datasets are fed as ordinary ones are: the loader gives h5py's pixels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

import h5pack
from h5pack.errors import PackChangedError
from tests.data import packs
from tests.read.files import Mapped, create_virtual, replaced

pytestmark = pytest.mark.usefixtures("no_thread_stays")

SHAPE, ROWS, HOLE = (16, 12, 3), (23, 30, 17, 26), 5
WHOLE: dict[str, Any] = {"chunks": (7, *SHAPE)}
CUT: dict[str, Any] = {"chunks": (5, 8, 12, 2)}
CODED: dict[str, Any] = {"chunks": (8, *SHAPE), "compression": "gzip"}
FORMS: dict[str, list[dict[str, Any]]] = {
    "raw": [WHOLE, {}, {"chunks": (10, *SHAPE)}, {"chunks": (4, *SHAPE)}],
    "coded": [CODED, CUT, CODED, CUT],
    "mixed": [WHOLE, {}, CODED, CUT],
    "with one for the library": [WHOLE, {}, {"chunks": (8, *SHAPE), "scaleoffset": 0}, {}],
}


def virtual(folder: Path, form: str, dtype: str = "u1") -> tuple[Path, npt.NDArray[Any]]:
    """A file of images and labels over four others, with rows of none between them; return its images."""
    total, parts = sum(ROWS) + HOLE, list[Mapped]()
    values = packs.values(total, SHAPE, dtype)
    for number, (rows, settings) in enumerate(zip(ROWS, FORMS[form], strict=True)):
        at = sum(ROWS[:number]) + (HOLE if number > 1 else 0)
        with h5py.File(folder / f"s{number}.h5", "w") as file:
            file.create_dataset("images", data=values[at : at + rows], **settings)
            file["labels"] = np.arange(at, at + rows)
        parts.append(Mapped(slice(at, at + rows), f"s{number}.h5", (rows,)))
    with h5py.File(folder / "v.h5", "w", libver="latest") as file:
        for name, shape, kind, fill in (("images", SHAPE, dtype, 3), ("labels", (), "i8", -1)):
            mapped = [replace(part, shape=(*part.shape, *shape), name=name) for part in parts]
            create_virtual(file, (total, *shape), *mapped, dtype=kind, name=name, fill=fill)
        found = file["images"][()]
    return folder / "v.h5", found.astype(found.dtype.newbyteorder("="))


def require_epoch(batches: Any, values: npt.NDArray[Any]) -> None:
    """Each row once, with its pixels and its label."""
    hole, seen = range(sum(ROWS[:2]), sum(ROWS[:2]) + HOLE), []
    for images, labels, rows in batches:
        assert np.array_equal(images.numpy(), values[rows.numpy()])
        assert labels.tolist() == [-1 if row in hole else row for row in rows.tolist()]
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(values)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("shuffle", "dtype"), [("window", "u1"), ("full", ">i2"), (False, ">i2")])
def test_the_loader_gives_h5pys_pixels(tmp_path: Path, form: str, shuffle: Any, dtype: str) -> None:
    path, values = virtual(tmp_path, form, dtype)
    dataset = h5pack.H5Dataset(path, with_rows=True)
    loader = h5pack.H5Loader(dataset, 9, shuffle=shuffle, window=2, num_threads=2)
    for _ in range(2):
        require_epoch(loader, values)
    stats = loader.stats()
    # The labels are read once and held.
    row_bytes = 2 * values[0].nbytes + 8
    assert (stats.rows, stats.bytes_wanted) == (2 * len(values), row_bytes * len(values))
    if form == "raw":
        # All but the rows without a mapping.
        assert stats.bytes_read == row_bytes * (len(values) - HOLE)


@pytest.mark.parametrize("form", ["raw", "coded"])
def test_a_source_that_is_replaced_between_epochs_is_named(tmp_path: Path, form: str) -> None:
    path, values = virtual(tmp_path, form)
    loader = h5pack.H5Loader(h5pack.H5Dataset(path, with_rows=True), 9, num_threads=2)
    require_epoch(loader, values)
    replaced(tmp_path / "s3.h5")
    with pytest.raises(PackChangedError, match="s3"):
        iter(loader)


def test_files_are_closed_and_opened_again_under_way(tmp_path: Path) -> None:
    path, values = virtual(tmp_path, "raw")
    dataset = h5pack.H5Dataset(path, with_rows=True)
    dataset.engine.files.max_open = 1
    loader = h5pack.H5Loader(dataset, 9, shuffle="full", num_threads=3)
    for _ in range(3):
        require_epoch(loader, values)
