"""`read_pack` describes any HDF5 file of numbers, and says in one line why it cannot."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.checksum import row_checksums
from h5pack.errors import IncompletePackError, PackFormatError
from h5pack.read import pack as pack_module
from h5pack.read.engine import Engine
from h5pack.read.identity import FileIdentity
from h5pack.read.pack import Pack, read_pack
from tests.makers import quick, split_folders
from tests.read.files import numbers

IMAGES = numbers((6, 5, 4, 3), "u1", 1)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    source = split_folders(folder / "in", {"train": {"x": 5, "y": 4}, "test": {"x": 2, "y": 1}}, (8, 8))
    h5pack.convert(source, folder / "o.h5", quick(chunk_rows=4))
    return folder / "o.h5"


@pytest.fixture
def copy(pack: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(pack, tmp_path / "o.h5"))


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A file that knows nothing of h5pack."""
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["images"] = IMAGES
        file["deep/er/y"] = np.arange(6) % 3
    return tmp_path / "f.h5"


def test_a_pack(pack: Path) -> None:
    found = read_pack(pack)
    assert (found.path, found.identity) == (str(pack), FileIdentity.of(str(pack)))
    assert list(found.indexes) == ["images", "checksums/images", "labels", "checksums/labels"]
    for index in found.indexes.values():
        assert (index.rows, index.reason) == (12, None)
    assert found.indexes["images"].shape == (12, 8, 8, 3)
    assert (found.layout, found.labels, found.fields) == ("nhwc", "labels", ())
    assert (found.classes, found.columns) == (("x", "y"), None)
    assert found.splits == {"train": (0, 9), "test": (9, 12)}
    with h5py.File(pack) as file:
        assert np.array_equal(found.mean, file["statistics/mean"][()])
        assert np.array_equal(found.std, file["statistics/std"][()])


def test_a_foreign_file(foreign: Path) -> None:
    found = read_pack(foreign)
    assert list(found.indexes) == ["images"]
    assert (found.layout, found.labels, found.classes, found.columns) == (None, None, None, None)
    assert (found.splits, found.mean, found.std) == ({}, None, None)
    assert list(read_pack(foreign, "images", "deep/er/y", ("images",)).indexes) == ["images", "deep/er/y"]


def test_a_relative_path_becomes_absolute(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(foreign.parent)
    assert read_pack("f.h5").path == str(foreign)


@pytest.mark.parametrize("name", ["deep/er/y", "/deep/er/y", "//deep/er/y/"])
def test_slashes_around_a_name_do_not_matter(foreign: Path, name: str) -> None:
    found = read_pack(foreign, "/images", name, (name,))
    assert list(found.indexes) == ["images", "deep/er/y"]
    assert (found.labels, found.fields) == ("deep/er/y", ("deep/er/y",))


def test_labels_are_left_out_where_asked(pack: Path) -> None:
    found = read_pack(pack, labels=None)
    assert list(found.indexes) == ["images", "checksums/images"]
    assert (found.labels, found.classes) == (None, None)


def test_fields_have_checksums_too(copy: Path) -> None:
    values = numbers((12, 2), "f4")
    with h5py.File(copy, "r+") as file:
        file["boxes"], file["points"] = values, values
        file["checksums/boxes"] = row_checksums(values)
        file["checksums/points"] = row_checksums(values)[:5]
    found = read_pack(copy, fields=("boxes", "points"))
    assert found.fields == ("boxes", "points")
    assert list(found.indexes)[4:] == ["boxes", "checksums/boxes", "points"], "those of another length are none"


@pytest.mark.parametrize(
    "checksums",
    [
        np.arange(6).astype("f4"),
        np.array([b"x"] * 6),
        np.array(["one"] * 6, object),
        np.zeros((6, 1), "u4"),
        np.zeros(5, "u4"),
    ],
)
def test_what_cannot_be_checksums_is_not_taken_for_them(foreign: Path, checksums: Any) -> None:
    with h5py.File(foreign, "r+") as file:
        file["checksums/images"] = checksums
    assert list(read_pack(foreign).indexes) == ["images"]


def test_links(foreign: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["z"] = np.arange(6) * 2
    with h5py.File(foreign, "r+") as file:
        file["soft"] = h5py.SoftLink("/images")
        file["labels"] = h5py.SoftLink("deep/er/y")
        file["outside"] = h5py.ExternalLink("other.h5", "z")
    found = read_pack(foreign, "soft", fields=("outside",))
    assert list(found.indexes) == ["soft", "labels", "outside"]
    assert [index.reason is None for index in found.indexes.values()] == [True, True, True]
    engine = Engine(found.path, found.identity, found.indexes)
    assert np.array_equal(engine.read("soft", [5, 0]), IMAGES[[5, 0]])
    assert engine.read("labels", [5, 0]).tolist() == [2, 0]
    assert engine.read("outside", [5, 0]).tolist() == [10, 0]


def test_attributes_as_others_write_them(foreign: Path) -> None:
    """Text of variable length, and of fixed; a single name."""
    with h5py.File(foreign, "r+") as file:
        file["images"].attrs["h5pack_layout"] = np.bytes_(b"nchw")
        file["labels"] = np.arange(6)
        file["labels"].attrs["classes"] = ["ünder", "b"]
        file["labels"].attrs["columns"] = "one"
    found = read_pack(foreign)
    assert (found.layout, found.classes, found.columns) == ("nchw", ("ünder", "b"), ("one",))


# What is made of a sound file, what is asked for, and what the error says.
WRONG: list[tuple[str, Callable[[h5py.File], Any], dict[str, Any], str]] = [
    (
        "other length",
        lambda file: file.create_dataset("labels", data=np.arange(5)),
        {},
        r"'labels' has 5 rows and 'images' has 6; name the right datasets, or mend the file",
    ),
    (
        "field of other length",
        lambda file: file.create_dataset("z", data=np.zeros((7, 2))),
        {"fields": ("z",)},
        r"'z' has 7 rows and 'images' has 6",
    ),
    ("scalar", lambda file: file.create_dataset("z", data=3), {"images": "z"}, r"dataset 'z' has no axis 0"),
    (
        "scalar labels",
        lambda file: file.create_dataset("labels", data=3),
        {},
        r"dataset 'labels' has no axis 0 to take samples from; name another dataset",
    ),
    (
        "null",
        lambda file: file.create_dataset("z", data=h5py.Empty("f4")),
        {"images": "z"},
        r"dataset 'z' has no axis 0",
    ),
    (
        "text",
        lambda file: file.create_dataset("labels", data=["a"] * 6),
        {},
        r"dataset 'labels' holds object, not numbers; name another dataset",
    ),
    (
        "fixed text",
        lambda file: file.create_dataset("z", data=np.array([b"a"] * 6)),
        {"fields": ("z",)},
        r"dataset 'z' holds \|S1, not numbers",
    ),
    (
        "compound",
        lambda file: file.create_dataset("z", data=np.zeros(6, [("a", "i4"), ("b", "f4")])),
        {"images": "z"},
        r"dataset 'z' holds .*, not numbers",
    ),
    ("complex", lambda file: file.create_dataset("z", data=np.zeros(6, "c8")), {"images": "z"}, r"not numbers"),
    ("no images", lambda file: None, {"images": "nothing"}, r"no dataset 'nothing'; it holds 'deep/er/y', 'images'"),
    ("no labels", lambda file: None, {"labels": "nothing"}, r"no dataset 'nothing'; it holds 'deep/er/y', 'images'"),
    ("no field", lambda file: None, {"fields": ("images", "no")}, r"no dataset 'no'; it holds"),
    ("group", lambda file: None, {"images": "deep/er"}, r"no dataset 'deep/er'; it holds 'deep/er/y', 'images'"),
    ("root", lambda file: None, {"images": "/"}, r"no dataset ''; it holds"),
    ("below a dataset", lambda file: None, {"images": "images/x"}, r"no dataset 'images/x'"),
    (
        "dangling link",
        lambda file: file.__setitem__("z", h5py.SoftLink("/gone")),
        {"images": "z"},
        r"no dataset 'z'; it holds",
    ),
    (
        "dangling external link",
        lambda file: file.__setitem__("z", h5py.ExternalLink("gone.h5", "x")),
        {"images": "z"},
        r"no dataset 'z'",
    ),
    (
        "empty",
        lambda file: [file.pop(name) for name in ("images", "deep")],
        {},
        r"no dataset 'images'; it holds none$",
    ),
    (
        "splits past the end",
        lambda file: file.update({"splits/name": ["a"], "splits/rows": [[0, 7]]}),
        {},
        r"its splits do not fit its 6 rows; run 'h5pack verify' on it",
    ),
    (
        "negative splits",
        lambda file: file.update({"splits/name": ["a"], "splits/rows": [[-1, 3]]}),
        {},
        r"its splits do not fit its 6 rows",
    ),
    (
        "backward splits",
        lambda file: file.update({"splits/name": ["a"], "splits/rows": [[4, 3]]}),
        {},
        r"its splits do not fit its 6 rows",
    ),
    (
        "nameless splits",
        lambda file: file.update({"splits/name": ["a"], "splits/rows": [[0, 3], [3, 6]]}),
        {},
        r"its splits do not fit its 6 rows",
    ),
    (
        "splits that are no pairs",
        lambda file: file.update({"splits/name": ["a"], "splits/rows": [0, 6]}),
        {},
        r"its metadata is damaged \(.*\); restore the file, or run 'h5pack verify' on it",
    ),
    (
        "splits that are no numbers",
        lambda file: file.update({"splits/name": ["a"], "splits/rows": [[b"x", b"y"]]}),
        {},
        r"its metadata is damaged",
    ),
    (
        "splits that are groups",
        lambda file: [file.create_group("splits/name"), file.create_group("splits/rows")],
        {},
        r"its metadata is damaged",
    ),
    (
        "statistics that are no numbers",
        lambda file: file.update({"statistics/mean": ["red"]}),
        {},
        r"its metadata is damaged",
    ),
]


@pytest.mark.parametrize(("make", "asked", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_cannot_be_read_says_why(
    foreign: Path, make: Callable[[h5py.File], Any], asked: dict[str, Any], message: str
) -> None:
    with h5py.File(foreign, "r+") as file:
        make(file)
    with pytest.raises(PackFormatError, match=rf"f\.h5: .*{message}") as caught:
        read_pack(foreign, **asked)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(foreign))


def test_numbers_that_numpy_has_not(foreign: Path) -> None:
    """Integers of three bytes."""
    with h5py.File(foreign, "r+") as file:
        kind = h5py.h5t.STD_I32LE.copy()
        kind.set_precision(24)
        kind.set_size(3)
        h5py.h5d.create(file.id, b"z", kind, h5py.h5s.create_simple((6,)))
    for asked in ({"images": "z"}, {"labels": "z"}, {"fields": ("z",)}):
        with pytest.raises(PackFormatError, match=r"f\.h5: dataset 'z' holds no numbers that NumPy knows"):
            read_pack(foreign, **asked)
    assert list(read_pack(foreign).indexes) == ["images"]


def test_unfinished_packs_and_newer_formats(copy: Path) -> None:
    with h5py.File(copy, "r+") as file:
        file.attrs["h5pack_complete"] = 0
    with pytest.raises(IncompletePackError, match=r"o\.h5: its conversion did not finish; run .* --resume"):
        read_pack(copy)
    with h5py.File(copy, "r+") as file:
        del file.attrs["h5pack_complete"]
    with pytest.raises(IncompletePackError):
        read_pack(copy)
    with h5py.File(copy, "r+") as file:
        file.attrs["h5pack_format"] = 99
    with pytest.raises(PackFormatError, match="pack format 99, and this h5pack reads up to 1"):
        read_pack(copy)
    with h5py.File(copy, "r+") as file:
        file.attrs["h5pack_format"] = "one"
    with pytest.raises(PackFormatError, match="its metadata is damaged"):
        read_pack(copy)


def test_no_file_of_that_kind(tmp_path: Path) -> None:
    for name, content, message in (("empty", b"", "it is empty"), ("text", b"hello" * 200, "not an HDF5 file")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(PackFormatError, match=message):
            read_pack(tmp_path / name)
    with pytest.raises(PackFormatError, match="no such file"):
        read_pack(tmp_path / "missing")
    with pytest.raises(PackFormatError, match="a folder"):
        read_pack(tmp_path)


@pytest.mark.parametrize("name", ["images", "labels", "checksums/images", "checksums/labels"])
def test_a_damaged_dataset_is_not_a_missing_one(copy: Path, name: str) -> None:
    """So that nobody reads on without labels or checksums."""
    with h5py.File(copy) as file:
        header = h5py.h5o.get_info(file[name].id).addr
    data = bytearray(copy.read_bytes())
    data[header + 12] ^= 1
    copy.write_bytes(data)
    with pytest.raises(
        PackFormatError, match=rf"o\.h5: '{name}' cannot be opened \(.*\); the file is damaged: restore"
    ):
        read_pack(copy)


def test_a_pack_that_lost_its_labels(copy: Path) -> None:
    """Their checksums tell that there were some."""
    with h5py.File(copy, "r+") as file:
        file.move("labels", "lapels")
    with pytest.raises(PackFormatError, match=r"o\.h5: .*'labels'"):
        read_pack(copy)
    assert read_pack(copy, labels=None).labels is None
    assert read_pack(copy, labels="lapels").labels == "lapels"


@pytest.fixture
def replaced(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that another one replaces as soon as it is open."""
    opened: list[h5py.File] = []
    real = pack_module.open_file

    def open_file(path: str) -> h5py.File:
        opened.append(real(path))
        shutil.copy(foreign, foreign.with_name("new.h5"))
        os.replace(foreign.with_name("new.h5"), foreign)
        return opened[-1]

    monkeypatch.setattr(pack_module, "open_file", open_file)
    yield foreign
    assert opened


def test_the_identity_is_that_of_the_file_that_was_described(replaced: Path) -> None:
    found: Pack = read_pack(replaced)
    assert found.identity != FileIdentity.of(str(replaced))
    engine = Engine(found.path, found.identity, found.indexes)
    with pytest.raises(h5pack.PackChangedError):
        engine.read("images", [0])
