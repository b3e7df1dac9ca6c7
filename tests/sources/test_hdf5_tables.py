"""Labels and fields of HDF5 files made by other tools, and values that are neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

import h5pack
from h5pack.errors import OptionsError, PackFormatError, SourceError
from h5pack.sources.hdf5_tables import find_labels
from tests.exporter.folders import flip
from tests.makers import quick
from tests.read.files import in_child, unload_zstd
from tests.sources.test_hdf5_catalog import IMAGES, LABELS, ROWS, catalog, damage, write


@pytest.mark.parametrize(
    ("stored", "labels", "names"),
    [
        (np.arange(ROWS, dtype=">i2"), range(ROWS), None),
        (np.arange(ROWS, dtype=np.float32), range(ROWS), None),
        (np.arange(ROWS)[:, None], range(ROWS), None),
        (np.arange(ROWS)[:, None, None, None], range(ROWS), None),
        (np.arange(ROWS)[None], range(ROWS), None),
        (np.arange(ROWS) % 2 == 1, [0, 1, 0, 1, 0, 1], None),
        (np.array([b"dog", b"cat"] * 3), [1, 0] * 3, ("cat", "dog")),
        (np.array([b"dog", b"", b"cat"] * 2), [1, -1, 0] * 2, ("cat", "dog")),
        (np.array([b""] * ROWS), [-1] * ROWS, None),
        (np.array(["dog", "cät"] * 3, dtype=h5py.string_dtype()), [1, 0] * 3, ("cät", "dog")),
        (np.array([1, 0] * 3, h5py.enum_dtype({"dog": 1, "cat": 0})), [1, 0] * 3, ("cat", "dog")),
        (np.array([5, 0] * 3, h5py.enum_dtype({"dog": 5, "cat": 0})), [5, 0] * 3, None),
        (np.array([True, False] * 3), [1, 0] * 3, None),
        (np.array([-1, 1] * 3), [0, 1] * 3, None),
        (np.array([-1, 0, 1] * 2), [-1, 0, 1] * 2, None),
        (np.array([-1] * ROWS), [-1] * ROWS, None),
        (np.array([-1, 1] * 3, h5py.enum_dtype({"dog": 1, "cat": 0}, "i1")), [-1, 1] * 3, ("cat", "dog")),
        (np.array([[-1, 1], [1, 1]] * 3), [[0, 1], [1, 1]] * 3, ("label_0", "label_1")),
        (np.array([[-1, 0], [1, 7]] * 3), [[0, 0], [1, 7]] * 3, ("label_0", "label_1")),
        (np.array([[-1, 1]] * ROWS), [[0, 1]] * ROWS, ("label_0", "label_1")),
        (np.array([[0.0, 255.0]] * ROWS), [[0, 255]] * ROWS, ("label_0", "label_1")),
    ],
)
def test_labels_are_converted_to_int64_or_uint8(tmp_path: Path, stored: Any, labels: Any, names: Any) -> None:
    made = catalog(write(tmp_path / "f.h5", x=IMAGES, y=stored))
    wanted = np.array(labels, np.int64 if np.ndim(labels) == 1 else np.uint8)
    np.testing.assert_array_equal(made.labels, wanted, strict=True)
    assert made.label_names == names


@pytest.mark.parametrize("kind", ["names", "names to pack", "labels"])
def test_texts_are_read_before_their_filter_is_loaded(tmp_path: Path, kind: str) -> None:
    names = [f"{row}.png" for row in range(ROWS)]
    with h5py.File(write(tmp_path / "f.h5", images=IMAGES), "a") as file:
        file.create_dataset("filenames", data=np.array(names, "S"), chunks=(2,), **hdf5plugin.Zstd())

    def check() -> bool:
        unload_zstd()
        if kind == "names":
            return h5pack.H5Dataset(tmp_path / "f.h5").filenames == names
        labels = "filenames" if kind == "labels" else ""
        h5pack.convert(tmp_path / "f.h5", tmp_path / "o.h5", **quick(labels=labels))
        packed = h5pack.H5Dataset(tmp_path / "o.h5")
        return (packed.classes == tuple(names)) if labels else sorted(packed.filenames or ()) == names

    assert in_child(check)


@pytest.mark.parametrize(
    ("stored", "advice"),
    [
        (np.arange(ROWS) / 2, ["fields='y'", "labels=''", "labels=NAME"]),
        (np.full(ROWS, np.nan), ["fields='y'", "labels=''", "labels=NAME"]),
        (np.full(ROWS, 2**63, np.uint64), ["fields='y'", "labels=''", "labels=NAME"]),
        (np.array([[-1, 0], [0, 1]] * 3), ["fields='y'", "labels=''", "labels=NAME"]),
        (np.arange(2 * ROWS).reshape(ROWS, 2) * 30, ["fields='y'", "labels=''", "labels=NAME"]),
        (np.zeros(ROWS, "c8"), ["labels=''", "labels=NAME"]),
    ],
)
def test_values_that_cannot_be_labels_are_refused_with_advice(tmp_path: Path, stored: Any, advice: list[str]) -> None:
    path = write(tmp_path / "f.h5", x=IMAGES, y=stored)
    with pytest.raises(SourceError) as caught:
        catalog(path)
    assert (caught.value.path, caught.value.dataset, sorted(caught.value.parameters)) == (str(path), "y", advice)
    assert catalog(path, labels="").labels is None
    made = catalog(path, fields=("y",) if "fields='y'" in advice else (), labels=None if "fields='y'" in advice else "")
    assert (made.labels, list(made.fields)) == (None, ["y"] if "fields='y'" in advice else [])


def test_masks_are_no_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "f.h5", images=IMAGES, labels=np.arange(ROWS * 120).reshape(ROWS, 10, 12))
    assert catalog(path).labels is None
    with pytest.raises(SourceError) as caught:
        catalog(path, labels="labels")
    assert caught.value.parameters == ("labels=NAME", "fields='labels'")
    assert [one.name for one in catalog(path, fields=("labels",)).pixel_fields] == ["labels_"]


def test_a_column_of_matlab_is_read_by_convert_only(tmp_path: Path) -> None:
    path = write(tmp_path / "f.h5", x=IMAGES, y=LABELS[None])
    with h5py.File(path) as file:
        assert find_labels(file, "x", ROWS) is None
    with pytest.raises(PackFormatError) as caught:
        h5pack.H5Dataset(path, images="x", labels="y")
    assert caught.value.dataset == "y"


def test_damaged_labels_are_an_error_unless_there_are_to_be_none(tmp_path: Path) -> None:
    damage(path := write(tmp_path / "f.h5", images=IMAGES[..., 0], label=LABELS), "label")
    with pytest.raises(PackFormatError) as caught:
        catalog(path)
    assert caught.value.dataset == "label"
    assert catalog(path, labels="").labels is None
    assert len(h5pack.H5Dataset(path, labels=None)) == ROWS


def test_labels_are_not_packed_as_a_field_too(tmp_path: Path) -> None:
    path = write(tmp_path / "f.h5", images=IMAGES, grade=LABELS, boxes=np.zeros((ROWS, 4)))
    found = catalog(path, labels="grade", fields=("boxes", "grade"))
    assert list(found.fields) == ["boxes"]
    assert np.array_equal(found.labels, LABELS)
    (note,) = found.notes
    assert "'grade'" in note.text
    assert catalog(path, labels="grade", fields=("boxes",)).notes == ()


def test_fields_are_rows_of_numbers(tmp_path: Path) -> None:
    age = np.arange(ROWS, dtype=">f4")
    path = write(tmp_path / "f.h5", x=IMAGES, meta__age=age, name=np.array([b"a"] * ROWS), labels2=age[:3], images=1)
    with h5py.File(path, "a") as file:
        file.create_dataset("larger than memory", (ROWS, 1 << 20, 1 << 20), np.float64, chunks=(1, 1024, 1024))
        file["meta/splits"] = file["other/age"] = age
        file["pairs"], file["cut"] = np.array([[b"a", b"b"]] * ROWS), np.array([b"a\0b"] * ROWS)
        file["long double"] = np.zeros(ROWS, "g")
        file["vary"] = [f"é{row}" for row in range(ROWS)]
    texts = catalog(path, images="x", fields=("name", "vary")).fields
    assert [texts[name].kind for name in ("name", "vary")] == ["text", "text"]
    assert bytes(texts["vary"][np.array([2, 4])].data).decode() == "é2é4"
    assert bytes(texts["name"].data).decode() == "a" * ROWS
    made = catalog(path, images="x", fields=("meta/age",))
    assert list(made.fields) == ["age"]
    np.testing.assert_array_equal(made.fields["age"], age.astype("f4"), strict=True)
    for field in ("pairs", "cut", "labels2", "larger than memory", "long double"):
        with pytest.raises(SourceError) as caught:
            catalog(path, images="x", fields=(field,))
        assert caught.value.dataset == field
    with pytest.raises(SourceError):
        catalog(path, images="x", labels="labels2")
    assert list(catalog(path, images="x", fields=("meta/splits",)).fields) == ["splits_"]
    for fields in (("meta/age", "other/age"), ("meta/age", "meta/age")):
        with pytest.raises(OptionsError, match=f"'{fields[0][5:]}'"):
            catalog(path, images="x", fields=fields)


def test_labels_without_their_source_are_no_zeros(tmp_path: Path) -> None:
    write(tmp_path / "source.h5", y=np.arange(ROWS), word=np.array([b"cat", b"dog"] * 3))
    path = write(tmp_path / "f.h5", x=IMAGES)
    with h5py.File(path, "a", libver="latest") as file:
        for name, dtype in (("y", np.int64), ("word", "S3")):
            layout = h5py.VirtualLayout((ROWS,), dtype)
            layout[:] = h5py.VirtualSource("source.h5", name, (ROWS,), dtype)
            file.create_virtual_dataset(name, layout)
    assert catalog(path, labels="y").labels.tolist() == list(range(ROWS))  # type: ignore[union-attr]
    assert catalog(path, labels="word").label_names == ("cat", "dog")
    (tmp_path / "source.h5").unlink()
    for name in ("y", "word"):
        with pytest.raises(PackFormatError, match=r"source\.h5"):
            catalog(path, labels=name)
        with pytest.raises((PackFormatError, SourceError)):
            catalog(path, labels="", fields=(name,))


@pytest.mark.parametrize("name", ["labels", "fields/age"])
def test_damaged_labels_and_fields_of_a_pack_are_not_taken(tmp_path: Path, name: str) -> None:
    write(tmp_path / "f.h5", images=IMAGES, labels=np.arange(ROWS), age=np.arange(ROWS) * 3)
    h5pack.convert(tmp_path / "f.h5", tmp_path / "p.h5", **quick(fields=("age",)))
    with h5py.File(tmp_path / "p.h5") as file:
        place = file[name].id.get_offset() + 8 * 2
    flip(tmp_path / "p.h5", place)
    with pytest.raises(SourceError) as caught:
        catalog(tmp_path / "p.h5")
    assert (caught.value.dataset, caught.value.rows) == (name, (2,))
    if name == "labels":
        assert len(catalog(tmp_path / "p.h5", labels="", fields=("age",))) == ROWS


@pytest.mark.parametrize("name", ["classes", "columns", "labels", "filenames"])
def test_names_and_labels_of_a_pack_must_fit_its_rows(tmp_path: Path, name: str) -> None:
    labels = np.eye(ROWS, 3, dtype=np.uint8) if name == "columns" else np.arange(ROWS) % 3
    write(tmp_path / "f.h5", images=IMAGES, labels=labels)
    h5pack.convert(tmp_path / "f.h5", tmp_path / "p.h5", **quick())
    with h5py.File(tmp_path / "p.h5", "r+") as file:
        if name in ("classes", "columns"):
            file["labels"].attrs[name] = ["a", "b"]
        elif name == "labels":
            del file["labels"]
        else:
            names = file["filenames"][:4]
            del file["filenames"]
            file["filenames"] = names
    with pytest.raises(SourceError) as caught:
        catalog(tmp_path / "p.h5")
    dataset = "filenames" if name == "filenames" else "labels"
    assert (caught.value.dataset, caught.value.parameters) == (dataset, ())
