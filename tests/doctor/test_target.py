"""What is diagnosed: settings that are refused, files that cannot be diagnosed, and facts of those that can."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from h5pack.doctor.target import DiagnoseSettings, Target
from h5pack.errors import OptionsError, PackFormatError
from h5pack.format import schema
from h5pack.monitor.bottleneck import Encoding, Evidence
from tests.data.packs import converted, values, write
from tests.doctor import users


def settings(path: str | Path, **changes: Any) -> DiagnoseSettings:
    usual: dict[str, Any] = {"batch_size": 16, "window": 2, "dtype": "float32", "seconds": 60.0, "device": "cpu"}
    usual |= {"images": schema.IMAGES, "labels": schema.LABELS, "model": users.cheap}
    return DiagnoseSettings(path=path, **{**usual, **changes})


def evidence(path: Path, **changes: Any) -> Evidence:
    target = Target(settings(path, **changes))
    try:
        target.warm(0.0)
        target.load_sample()
        return target.evidence()
    finally:
        target.close()


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        *(({name: -1}, (name,)) for name in ("batch_size", "window", "num_threads", "num_workers")),
        ({"num_threads": 2, "num_workers": 2}, ("num_threads", "num_workers")),
        ({"dtype": "int8"}, ("dtype",)),
        *(({"seconds": value}, ("seconds",)) for value in (0.0, float("inf"), float("nan"))),
        ({"model": "module:name"}, ("model",)),
        ({"transform": 3}, ("transform",)),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], parameters: tuple[str, ...]) -> None:
    with pytest.raises(OptionsError) as caught:
        settings("x.h5", **changes)
    assert caught.value.parameters == parameters


@pytest.mark.parametrize("changes", [{"device": "meta"}, {"device": "gpu"}, {"device": "cpu", "pin_memory": True}])
def test_devices_that_cannot_be_measured_are_refused(path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(OptionsError):
        Target(settings(path, **changes))


def test_files_that_cannot_be_diagnosed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no HDF5")
    write(tmp_path / "none.h5", labels=np.arange(3))
    write(tmp_path / "empty.h5", chunks=None, images=np.zeros((0, 4, 4, 3), np.uint8))
    for name in ("missing.h5", "text", "none.h5", "empty.h5"):
        with pytest.raises(PackFormatError, match=name):
            Target(settings(tmp_path / name))
    path = converted(tmp_path)
    for changes in ({"split": "no_such_split"}, {"labels": "no_such_labels"}):
        with pytest.raises(PackFormatError, match="no_such"):
            Target(settings(path, **changes))


@pytest.mark.parametrize(("split", "rows"), [(None, 1), ("test", 12)])
def test_a_batch_larger_than_the_rows(tmp_path: Path, split: str | None, rows: int) -> None:
    path = converted(tmp_path) if split else write(tmp_path / "one.h5", chunks=1, images=values(1))
    target = Target(settings(path, split=split, model=None, batch_size=256))
    target.load_sample()
    target.make_step()
    found = target.describe()
    assert target.failures == {}
    assert (target.evidence().batch_rows, found.rows) == (rows, rows)
    # The one row has no labels.
    assert found.labels == (split is not None)
    target.close()


def test_what_a_file_decodes_is_known(tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.fromarray(np.zeros((9, 7, 3), np.uint8)).save(picture, "png")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        rows = file.create_dataset("images", (40,), h5py.vlen_dtype(np.uint8))
        for number in range(40):
            rows[number] = np.frombuffer(picture.getvalue(), np.uint8)
    found = [
        evidence(write(tmp_path / "z.h5", compression="gzip", images=values())),
        evidence(write(tmp_path / "p.h5", chunks=(10, 8, 12, 3), images=values())),
        evidence(tmp_path / "x.h5"),
        evidence(write(tmp_path / "f.h5", images=values(dtype="f4"))),
    ]
    assert [one.encoding for one in found] == [Encoding.CHUNKS, Encoding.PARTS, Encoding.IMAGES, None]
    assert [one.library_reason for one in found] == [None] * 4
    assert [(one.stored_float, one.loaded_float) for one in found] == [(False, False)] * 3 + [(True, True)]
    assert all(one.fits_cache for one in found)


def test_a_transform_that_makes_floats_is_known(path: Path) -> None:
    found = evidence(path, transform=users.to_float)
    assert found.loaded_float
    assert found.loaded_row_bytes == 4 * found.stored_row_bytes == 4 * 576
    found = evidence(path, num_workers=0, transform=users.of_one_image)
    assert (found.num_workers, found.num_threads, found.loaded_float) == (0, None, True)
