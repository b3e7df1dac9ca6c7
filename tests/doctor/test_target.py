"""What is diagnosed: settings that are refused, files that cannot be diagnosed, and facts of those that can."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

import h5pack
from h5pack.doctor.target import DiagnoseSettings, Target
from h5pack.errors import H5PackError, OptionsError, PackFormatError, SizesDifferError
from h5pack.format import schema
from h5pack.monitor.bottleneck import Encoding, Evidence, Stage
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
        *(({name: value}, ()) for name, value in (("batch_size", 0), ("window", 0), ("num_threads", 0))),
        ({"num_workers": -1}, ()),
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
    if parameters:
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


def encoded(path: Path, sizes: list[tuple[int, int]]) -> Path:
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("images", (len(sizes),), h5py.vlen_dtype(np.uint8))
        for number, size in enumerate(sizes):
            name = path.with_name("row.png")
            Image.fromarray(np.full((*size, 3), number, np.uint8)).save(name)
            rows[number] = np.frombuffer(name.read_bytes(), np.uint8)
    return path


def test_what_a_file_decodes_is_known(tmp_path: Path) -> None:
    found = [
        evidence(write(tmp_path / "z.h5", compression="gzip", images=values())),
        evidence(write(tmp_path / "p.h5", chunks=(10, 8, 12, 3), images=values())),
        evidence(encoded(tmp_path / "x.h5", [(9, 7)] * 40)),
        evidence(write(tmp_path / "f.h5", images=values(dtype="f4"))),
    ]
    assert [one.encoding for one in found] == [Encoding.CHUNKS, Encoding.PARTS, Encoding.IMAGES, None]
    assert [one.library_reason for one in found] == [None] * 4
    assert [(one.stored_float, one.loaded_float) for one in found] == [(False, False)] * 3 + [(True, True)]
    assert all(one.fits_cache for one in found)


def test_encoded_images_of_several_sizes_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SizesDifferError):
        evidence(encoded(tmp_path / "y.h5", [(9, 7)] * 20 + [(5, 5)] * 20))


def test_a_transform_that_makes_floats_is_known(path: Path) -> None:
    found = evidence(path, transform=users.to_float)
    assert found.loaded_float
    assert found.loaded_row_bytes == 4 * found.stored_row_bytes == 4 * 576
    found = evidence(path, num_workers=0, transform=users.of_one_image)
    assert (found.num_workers, found.num_threads, found.loaded_float) == (0, None, True)


def test_the_threads_of_one_cpu(path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        found = evidence(path)
    finally:
        os.sched_setaffinity(0, allowed)
    assert (found.cpus, found.num_threads) == (1, 1)


def test_a_transform_that_fails_is_noted(path: Path) -> None:
    def fail(images: Any) -> Any:
        raise H5PackError("none of them")

    for transform in (users.failing_transform, fail):
        target = Target(settings(path, transform=transform))
        target.load_sample()
        assert list(target.failures) == [Stage.TRANSFORM]
        assert "\n" not in target.failures[Stage.TRANSFORM]
        target.close()
    assert h5pack.H5Dataset(path)[0] is not None
