"""`describe_file` describes any HDF5 file of numbers, or raises an error of one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.errors import IncompletePackError, PackFormatError
from h5pack.format.checksums import row_checksums
from h5pack.read import description as module
from h5pack.read.description import describe_file
from h5pack.read.engine import Engine
from h5pack.read.several import join_descriptions
from h5pack.read.storage import FileIdentity
from tests.makers import hdf5_file, quick, split_folders
from tests.read.files import Mapped, create_virtual, flip, numbers, replaced

IMAGES = numbers((6, 5, 4, 3), "u1", 1)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    source = split_folders(folder / "in", {"train": {"x": 5, "y": 4}, "test": {"x": 2, "y": 1}}, (8, 8))
    h5pack.convert(source, folder / "o.h5", **quick(chunk_rows=4))
    return folder / "o.h5"


@pytest.fixture
def copy(pack: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(pack, tmp_path / "o.h5"))


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A file that was not written by h5pack."""
    return hdf5_file(tmp_path / "f.h5", **{"images": IMAGES, "deep/er/y": np.arange(6) % 3})


def test_a_pack(pack: Path) -> None:
    found = describe_file(pack)
    assert (found.path, found.identity) == (str(pack), FileIdentity.of(str(pack)))
    assert list(found.indexes) == ["images", "checksums/images", "labels", "checksums/labels"]
    for index in found.indexes.values():
        assert (index.rows, index.library_reason) == (12, None)
    assert found.indexes["images"].shape == (12, 8, 8, 3)
    assert (found.layout, found.labels, found.fields) == ("nhwc", "labels", ())
    assert (found.classes, found.columns) == (("x", "y"), None)
    assert found.splits == {"train": range(9), "test": range(9, 12)}
    with h5py.File(pack) as file:
        assert np.array_equal(found.mean, file["statistics/mean"][()])
        assert np.array_equal(found.std, file["statistics/std"][()])
    unlabeled = describe_file(pack, labels=None)
    assert list(unlabeled.indexes) == ["images", "checksums/images"]
    assert (unlabeled.labels, unlabeled.classes) == (None, None)


def test_equal_names_of_classes_are_held_once(pack: Path, copy: Path) -> None:
    first, second = describe_file(pack), describe_file(copy)
    assert first.classes
    assert first.classes is second.classes


def test_a_foreign_file(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = describe_file(foreign)
    assert list(found.indexes) == ["images"]
    assert (found.layout, found.labels, found.classes, found.columns) == (None, None, None, None)
    assert (found.splits, found.mean, found.std) == ({}, None, None)
    # Slashes around a name, a relative path, and a field that is also the labels.
    monkeypatch.chdir(foreign.parent)
    found = describe_file("f.h5", "/images", "//deep/er/y/", ("/deep/er/y",))
    assert (found.path, list(found.indexes)) == (str(foreign), ["images", "deep/er/y"])
    assert (found.labels, found.fields) == ("deep/er/y", ("deep/er/y",))


def test_fields_have_checksums_of_the_right_shape_and_dtype(copy: Path) -> None:
    values, names = numbers((12, 2), "f4"), ("boxes", "short", "float", "text", "table")
    sums = row_checksums(values)
    stored = (sums, sums[:5], sums.astype("f4"), np.array(["one"] * 12, object), sums[:, None])
    with h5py.File(copy, "r+") as file:
        for name, checksums in zip(names, stored, strict=True):
            file[name], file[f"checksums/{name}"] = values, checksums
    found = describe_file(copy, fields=names)
    assert found.fields == names
    assert list(found.indexes)[4:] == ["boxes", "checksums/boxes", *names[1:]]


def test_attributes_of_other_programs_are_read(foreign: Path) -> None:
    """Strings of variable and of fixed length; a single string instead of a list."""
    with h5py.File(foreign, "r+") as file:
        file["images"].attrs["h5pack_layout"] = np.bytes_(b"nchw")
        file["labels"] = np.arange(6)
        file["labels"].attrs["classes"] = ["ünder", "b"]
        file["labels"].attrs["columns"] = "one"
    found = describe_file(foreign)
    assert (found.layout, found.classes, found.columns) == ("nchw", ("ünder", "b"), ("one",))


ONE_COLUMN: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "gzip": {"chunks": (3, 1), "compression": "gzip"},
    "wide chunks": {"chunks": (3, 2), "maxshape": (None, None)},
}


@pytest.mark.parametrize("where", ["here", "virtual", "linked"])
@pytest.mark.parametrize("storage", ONE_COLUMN)
def test_integer_labels_of_one_column_are_numbers_however_they_are_stored(
    tmp_path: Path, storage: str, where: str
) -> None:
    path = hdf5_file(tmp_path / "f.h5", images=np.zeros((7, 4), np.uint8))
    source = path if where == "here" else tmp_path / "source.h5"
    with h5py.File(source, "a") as file:
        # The rows of the last chunk are fill values.
        file.create_dataset("x", (7, 1), "i4", fillvalue=9, **ONE_COLUMN[storage])[:6] = np.arange(6)[:, None]
    with h5py.File(path, "a") as file:
        if where == "virtual":
            create_virtual(file, (7, 1), Mapped(slice(None), "source.h5", (7, 1)), dtype="i4", name="labels")
        else:
            file["labels"] = file["x"] if where == "here" else h5py.ExternalLink("source.h5", "x")
    plain = hdf5_file(tmp_path / "plain.h5", images=np.zeros((1, 4), np.uint8), labels=np.full((1, 1), 4, np.int32))
    one, two = describe_file(path), join_descriptions([describe_file(plain), describe_file(path)])
    for found, labels in ((one, [0, 1, 2, 3, 4, 5, 9]), (two, [4, 0, 1, 2, 3, 4, 5, 9])):
        read = Engine(found.path, found.identity, found.indexes).read("labels", range(len(labels)))
        assert read.tolist() == labels


def made(**datasets: Any) -> Callable[[h5py.File], Any]:
    return lambda file: [file.create_dataset(name, data=data) for name, data in datasets.items()]


def splits(names: Any, rows: Any) -> Callable[[h5py.File], Any]:
    return lambda file: file.update({"splits/name": names, "splits/rows": rows})


def fuel_splits(entries: list[tuple[str, str, int, int]], **rows: Any) -> Callable[[h5py.File], Any]:
    """The attribute of the package Fuel. `rows` has the rows of splits that are not consecutive."""

    def add(file: h5py.File) -> None:
        names = [("split", "S5"), ("source", "S9"), ("start", "i8"), ("stop", "i8"), ("indices", h5py.ref_dtype)]
        table = np.zeros(len(entries), [*names, ("available", "?"), ("comment", "S1")])
        for number, (name, source, start, stop) in enumerate(entries):
            other = file.create_dataset(name, data=rows[name]).ref if name in rows else h5py.Reference()
            table[number] = (name, source, start, stop, other, True, b"")
        file.attrs["split"] = table

    return add


def test_splits_of_fuel_are_read(foreign: Path) -> None:
    entries = [("train", "images", 0, 3), ("train", "deep/er/y", 0, 6), ("test", "images", 3, 5)]
    with h5py.File(foreign, "r+") as file:
        fuel_splits([*entries, ("odd", "images", 0, 0)], odd=[5, 1])(file)
    found = describe_file(foreign).splits
    assert (found["train"], found["test"], list(found)) == (range(3), range(3, 5), ["train", "test", "odd"])
    assert np.asarray(found["odd"]).tolist() == [5, 1]


def test_damaged_splits_of_fuel_are_an_error_not_missing(tmp_path: Path) -> None:
    path = tmp_path / "f.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file["images"] = IMAGES
        # HDF5 finds an attribute of over 64 KiB by a B-tree, whose nodes have checksums.
        fuel_splits([("train", "images", 0, 3), *[("other", "labels", 0, 1)] * 2_000])(file)
    assert describe_file(path).splits == {"train": range(3)}
    flip(path, path.read_bytes().index(b"BTLF") + 9, 1)
    with pytest.raises(PackFormatError, match="damaged"):
        describe_file(path)


def nothing(file: h5py.File) -> None:
    """Leave the file as it is."""


RECORDS = np.zeros(6, [("a", "i4"), ("b", "f4")])
# What is added to the file, the arguments of `describe_file`, and the dataset in the error.
WRONG: dict[str, tuple[Callable[[h5py.File], Any], dict[str, Any], str | None]] = {
    "other length": (made(labels=np.arange(5)), {}, "labels"),
    "field of other length": (made(z=np.zeros((7, 2))), {"fields": ("z",)}, "z"),
    "scalar": (made(z=3), {"images": "z"}, "z"),
    "null": (made(z=h5py.Empty("f4")), {"images": "z"}, "z"),
    "text": (made(labels=["a"] * 6), {}, "labels"),
    "compound": (made(z=RECORDS), {"images": "z"}, "z"),
    "complex": (made(z=np.zeros(6, "c8")), {"images": "z"}, "z"),
    "no images": (nothing, {"images": "nothing"}, "nothing"),
    "no labels": (nothing, {"labels": "nothing"}, "nothing"),
    "no field": (nothing, {"fields": ("images", "no")}, "no"),
    "root": (nothing, {"images": "/"}, ""),
    "dangling external link": (lambda file: file.update({"z": h5py.ExternalLink("gone", "x")}), {"images": "z"}, "z"),
    "empty": (lambda file: [file.pop(name) for name in ("images", "deep")], {}, "images"),
    "splits past the end": (splits(["a"], [[0, 7]]), {}, None),
    "backward splits": (splits(["a"], [[4, 3]]), {}, None),
    "nameless splits": (splits(["a"], [[0, 3], [3, 6]]), {}, None),
    "splits that are no numbers": (splits(["a"], [[b"x", b"y"]]), {}, None),
    "splits of Fuel past the end": (fuel_splits([("a", "images", 0, 7)]), {}, None),
    "rows of Fuel past the end": (fuel_splits([("a", "images", 0, 0)], a=[6]), {}, None),
    "statistics that are no numbers": (lambda file: file.update({"statistics/mean": ["red"]}), {}, None),
}


@pytest.mark.parametrize(("make", "asked", "dataset"), WRONG.values(), ids=list(WRONG))
def test_unreadable_datasets_are_refused_in_one_line(
    foreign: Path, make: Callable[[h5py.File], Any], asked: dict[str, Any], dataset: str | None
) -> None:
    with h5py.File(foreign, "r+") as file:
        make(file)
    with pytest.raises(PackFormatError) as caught:
        describe_file(foreign, **asked)
    assert "\n" not in str(caught.value)
    found = caught.value.path, caught.value.dataset
    assert found == (str(foreign), dataset), (caught.value, caught.value.__cause__)


def test_numbers_unknown_to_numpy_are_refused(foreign: Path) -> None:
    """Integers of three bytes."""
    with h5py.File(foreign, "r+") as file:
        kind = h5py.h5t.STD_I32LE.copy()
        kind.set_precision(24)
        kind.set_size(3)
        h5py.h5d.create(file.id, b"z", kind, h5py.h5s.create_simple((6,)))
    for asked in ({"images": "z"}, {"labels": "z"}, {"fields": ("z",)}):
        with pytest.raises(PackFormatError, match="NumPy") as caught:
            describe_file(foreign, **asked)
        assert caught.value.dataset == "z"
    assert list(describe_file(foreign).indexes) == ["images"]


def test_a_missing_dataset_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["train/X"], file["train/y"] = IMAGES, np.arange(6)
        # NumPy has no dtype for a bit field.
        h5py.h5d.create(file.id, b"bits", h5py.h5t.STD_B8LE, h5py.h5s.create_simple((3,)))
    with pytest.raises(PackFormatError) as caught:
        h5pack.H5Dataset(tmp_path / "f.h5")
    assert caught.value.parameters == ("images=NAME",)
    assert str(caught.value).endswith("'train/X'")
    assert all(part in str(caught.value) for part in ("'train/X' uint8 (6, 5, 4, 3)", "'train/y' int64 (6,)", "'bits'"))
    with h5py.File(tmp_path / "f.h5", "a") as file:
        for number in range(30):
            file[f"a/{number:02d}"] = [1]
    with pytest.raises(PackFormatError) as caught:
        h5pack.H5Dataset(tmp_path / "f.h5")
    # Those with the most axes come first, since they may be the images.
    assert "its datasets are 'train/X' uint8 (6, 5, 4, 3), " in str(caught.value)
    assert str(caught.value).count("'a/") == 20 - 1
    assert " and 13 more" in str(caught.value)


def test_unfinished_packs_and_newer_formats(copy: Path) -> None:
    with h5py.File(copy, "r+") as file:
        del file.attrs["h5pack_complete"]
    with pytest.raises(IncompletePackError) as caught:
        describe_file(copy)
    assert caught.value.parameters == ("resume=True",)
    for version, word in ((99, "99"), ("one", "metadata")):
        with h5py.File(copy, "r+") as file:
            file.attrs["h5pack_format"] = version
        with pytest.raises(PackFormatError, match=word):
            describe_file(copy)


def test_paths_that_are_not_hdf5_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_bytes(b"hello" * 200)
    for name, word in (("empty", "empty"), ("text", "not an HDF5"), ("missing", "no such file"), ("", "a folder")):
        with pytest.raises(PackFormatError, match=word):
            describe_file(tmp_path / name)


@pytest.mark.parametrize("name", ["labels", "checksums/images", "statistics/mean", "statistics/std"])
def test_a_damaged_dataset_is_an_error_not_missing(copy: Path, name: str) -> None:
    """If it counted as missing, labels, checksums or statistics would silently be left out."""
    with h5py.File(copy) as file:
        header = h5py.h5o.get_info(file[name].id).addr
    flip(copy, header + 12, 1)
    with pytest.raises(PackFormatError, match="damaged") as caught:
        describe_file(copy)
    assert caught.value.dataset == name


def test_a_pack_with_checksums_of_missing_labels_is_refused(copy: Path) -> None:
    """The checksums prove that labels were lost."""
    with h5py.File(copy, "r+") as file:
        file.move("labels", "lapels")
    with pytest.raises(PackFormatError, match=r"o\.h5: .*'labels'"):
        describe_file(copy)
    assert describe_file(copy, labels=None).labels is None
    assert describe_file(copy, labels="lapels").labels == "lapels"


def test_the_identity_is_that_of_the_file_that_was_described(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if another file replaces it as soon as it is open."""
    real = module.open_file
    monkeypatch.setattr(module, "open_file", lambda path: (real(path), replaced(foreign))[0])
    found = describe_file(foreign)
    assert found.identity != FileIdentity.of(str(foreign))
    engine = Engine(found.path, found.identity, found.indexes)
    with pytest.raises(h5pack.PackChangedError):
        engine.read("images", [0])


def test_a_name_that_is_not_utf8_is_not_taken_for_damage(foreign: Path) -> None:
    for asked in ({"images": "\udcff"}, {"labels": "\udcff"}, {"fields": ("\udcff",)}):
        with pytest.raises(PackFormatError) as caught:
            describe_file(foreign, **asked)
        assert "damaged" not in str(caught.value)
