"""Names of exported files: restored where they can be, never outside the folder, never alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.exporter.image_files import SourceRows
from h5pack.exporter.names import ExportNames, NameRules, name_files
from h5pack.sources.catalog import Catalog, NameFilter, NameTable, PixelField, SourceReader

PNG = NameRules((".png",))


def catalog(names: list[str], **values: Any) -> Catalog:
    """A catalog of an HDF5 file: splits by name, labels by number."""
    splits = values.pop("splits", ["all"] * len(names))
    split_names = values.pop("split_names", tuple(dict.fromkeys(splits)))
    ids = np.array([split_names.index(name) for name in splits], np.int32)
    if values.get("labels") is not None:
        values["labels"] = np.array(values["labels"], np.int64)
    return Catalog("hdf5", SourceReader(), NameTable.of(names), split_names, ids, **values)


def rows_of(source: Catalog, stored: bool = True, rows: list[int] | None = None) -> SourceRows:
    """Rows of a catalog that nothing is read from."""
    numbers = np.arange(len(source)) if rows is None else np.array(rows)
    return SourceRows(source, source.reader, numbers, stored)  # type: ignore[arg-type]


def named(source: Catalog, rules: NameRules = PNG, stored: bool = True) -> ExportNames:
    return name_files(rows_of(source, stored), rules)


def paths(source: Catalog, rules: NameRules = PNG, stored: bool = True) -> list[str]:
    return list(named(source, rules, stored).paths)


def test_names_of_class_and_split_folders_come_back() -> None:
    names, pets = ["train/cat/a.jpg", "train/dog/deep/b.webp", "val/cat/c.PNG"], ("cat", "dog")
    found = named(catalog(names, splits=["train", "train", "val"], labels=[0, 1, 0], label_names=pets))
    assert list(found.paths) == ["train/cat/a.png", "train/dog/deep/b.png", "val/cat/c.PNG"]
    assert found.folders == ("train", "train/cat", "train/dog", "train/dog/deep", "val", "val/cat")
    assert found.renamed == 0
    # Folders of splits and classes precede all other names.
    names = ["img/a.jpg", "cat/b.jpg", "train/c.jpg"]
    source = catalog(names, splits=["train"] * 3, labels=[0, 0, 0], label_names=("cat",))
    assert paths(source) == ["train/cat/img/a.png", "train/cat/b.png", "train/cat/c.png"]
    classes = catalog(["cat/a.jpg", "dog/b.jpg"], labels=[0, 1], label_names=pets)
    assert paths(classes, NameRules((".jpg", ".jpeg"))) == ["cat/a.jpg", "dog/b.jpg"]
    rules = NameRules((".png",), max_name_bytes=40)
    assert paths(catalog(["n" * 20 + ".jpg", "m" * 30 + ".jpg"]), rules) == ["n" * 20 + ".png", "000001.png"]


def test_rows_without_names_are_numbered() -> None:
    source = catalog(["x"] * 3, splits=["train", "train", "val"], labels=[1, 0, 1], label_names=("cat", "dog"))
    found = name_files(rows_of(source, False, [17, 3, 12_345_678]), PNG)
    assert list(found.paths) == ["train/dog/00000017.png", "train/cat/00000003.png", "val/dog/12345678.png"]
    assert found.renamed == 0
    assert paths(catalog(["x", "x"]), stored=False) == ["000000.png", "000001.png"]


def test_folders_of_numeric_labels_sort_like_the_numbers() -> None:
    assert paths(catalog(["a.jpg", "b.jpg", "c.jpg"], labels=[7, 10, 0])) == ["07/a.png", "10/b.png", "00/c.png"]
    many = [f"{number}.jpg" for number in range(1001)]
    assert paths(catalog(many, labels=range(1001)))[17] == "17.png"
    assert paths(catalog(many[:1000], labels=range(1000)))[17] == "017/17.png"


def test_rows_without_a_label() -> None:
    names = ["a.jpg", "b.jpg", "test/c.jpg"]
    source = catalog(names, splits=["train", "train", "test"], labels=[0, -1, -1], label_names=("cat", "_no_label"))
    found = named(source)
    assert list(found.paths) == ["train/cat/a.png", "train/_no_label/b.png", "test/c.png"]
    # The class of that name, which has no rows, is another one.
    assert found.folders == ("test", "train", "train/_no_label", "train/_no_label~2", "train/cat")


def test_classes_without_rows_keep_their_folders() -> None:
    assert named(catalog(["b/1.jpg"], labels=[1], label_names=("a", "b", "c"))).folders == ("a", "b", "c")
    source = catalog(["val/a/1.jpg"], splits=["val"], split_names=("train", "val"), labels=[0], label_names=("a", "b"))
    assert named(source).folders == ("val", "val/a", "val/b")


HOSTILE = {
    "/etc/passwd": "etc/passwd.png",
    "../../up.jpg": "up.png",
    "a/../b.jpg": "a/b.png",
    "./c.jpg": "c.png",
    "d//e.jpg": "d/e.png",
    "f.jpg/": "f.png",
    "nul\0.jpg": "nul_.png",
    "line\nbreak\x1b[2J.jpg": "line_break_[2J.png",
    ".hidden/.g.jpg": "_.hidden/_.g.png",
    ".jpg": "_.png",
    "__MACOSX/h.jpg": "___MACOSX/h.png",
    "manifest.csv/i.jpg": "_manifest.csv/i.png",
    "Manifest.CSV": "_Manifest.CSV.png",
    "..": "000013.png",
    "": "000014.png",
    "x" * 300: "000015.png",
    "/".join(["deep"] * 900): "000016.png",
    "\u732b/caf\u00e9.jpg": "\u732b/caf\u00e9.png",
    "tail.tar.gz": "tail.tar.gz.png",
    "dots..jpg": "dots..png",
    "C:\\windows\\j.jpg": "C:\\windows\\j.png",
}


def test_hostile_names_stay_inside() -> None:
    # As a list, since a table of names holds no NUL; what reads them from a file has to see to that.
    source = catalog([name.replace("\0", "\x01") for name in HOSTILE])
    found = named(source)
    assert (list(found.paths), found.renamed) == (list(HOSTILE.values()), 17)


def test_names_that_collide() -> None:
    names = ["a.jpg", "a.png", "a~2.gif", "a.webp", "b.png", "b.png/c.jpg", "b", "b/d.jpg", "a.jpg"]
    found = named(catalog(names))
    stems = ["a", "a~3", "a~2", "a~4", "b~2", "b.png/c", "b~3", "b/d", "a~5"]
    assert list(found.paths) == [f"{stem}.png" for stem in stems]
    assert found.renamed == 5


def test_files_beside_the_images_are_distinct_too() -> None:
    names = ["IMG_1.png", "IMG_1.PNG", "a.jpg/b.png", "a.png", "c.png", "c.png/d.png", "c~2.png"]
    fields = tuple(PixelField(name, kind, NameTable.of(names)) for name, kind in (("m", "mask"), ("right", "image")))
    for rules, suffix in ((PNG, ".png"), (NameRules((".jpg", ".jpeg")), ".jpg")):
        found = named(catalog(names, pixel_fields=fields), rules)
        tables = [found.paths, *found.masks]
        everything = [path for table in tables for path in table]
        assert len({*everything, *found.folders}) == len(everything) + len(found.folders)
        assert {path.rpartition("/")[0] for path in everything} <= set(found.folders)
        stems = [[path.partition("/")[2].rpartition(".")[0] for path in table] for table in tables]
        assert stems[0] == stems[1] == stems[2], "a row's files have the same path in each folder"
        assert stems[0][:2] == ["IMG_1", "IMG_1~2"]
        assert {path[-4:] for path in found.masks[0]} == {".png"}
        assert {path[-4:] for path in found.masks[1]} == {suffix}


def test_names_that_collide_where_case_does_not_count() -> None:
    names = ["A.jpg", "a.jpg", "Caf\u00e9.jpg", "cafe\u0301.jpg", "B/x.jpg", "b.png"]
    assert paths(catalog(names)) == ["A.png", "a.png", "Caf\u00e9.png", "cafe\u0301.png", "B/x.png", "b.png"]
    folded = NameRules((".png",), fold_case=True)
    found = paths(catalog(names), folded)
    assert found == ["A.png", "a~2.png", "Caf\u00e9.png", "cafe\u0301~2.png", "B/x.png", "b.png"]
    classes = catalog(["1.jpg", "2.jpg"], labels=[0, 1], label_names=("X", "x"))
    assert paths(classes, folded) == ["X/1.png", "x~2/2.png"]


@pytest.mark.parametrize(
    ("classes", "folders"),
    [
        (("a/b", "a_b"), ["a_b", "a_b~2"]),
        (("..", "."), ["_..", "_."]),
        (("", ".git"), ["_", "_.git"]),
        (("x" * 999, "x" * 998), ["x" * 200, "x" * 200 + "~2"]),
        (("\u00e9" * 150, "manifest.csv"), ["\u00e9" * 100, "_manifest.csv"]),
    ],
)
def test_classes_that_cannot_be_folders(classes: tuple[str, str], folders: list[str]) -> None:
    source = catalog(["1.jpg", "2.jpg"], labels=[0, 1], label_names=classes)
    assert paths(source) == [f"{folders[0]}/1.png", f"{folders[1]}/2.png"]


PARTS = st.text(st.sampled_from("aA.~2 /\u00e9\n_"), max_size=6)
USUAL = st.sampled_from(["a.jpg", "a.png", "a.png/b.jpg", "train/x/a.jpg"])
# A table of names does not tell one empty name from none at all.
NAMES = st.lists(st.one_of(PARTS, USUAL), min_size=1).filter(any)


@settings(max_examples=50, deadline=None)
@given(NAMES, st.booleans(), st.data())
def test_any_names_give_distinct_valid_files(names: list[str], fold: bool, data: st.DataObject) -> None:
    count = len(names)
    labels = data.draw(st.none() | st.lists(st.integers(-1, 2), min_size=count, max_size=count))
    words = data.draw(st.lists(PARTS, min_size=3, max_size=3, unique=True)) if labels is not None else None
    splits = data.draw(st.lists(st.sampled_from(["train", "val", "a", ".."]), min_size=count, max_size=count))
    source = catalog(names, splits=splits, labels=labels, label_names=None if words is None else tuple(words))
    found = named(source, NameRules((".png",), fold))
    files = [path.casefold() if fold else path for path in found.paths]
    folders = {folder.casefold() if fold else folder for folder in found.folders}
    assert len(set(files) - folders) == count
    for path, file in zip(found.paths, files, strict=True):
        assert path.lower().endswith(".png")
        assert file.rpartition("/")[0] in folders | {""}
        assert not any(part.startswith(".") or not part for part in path.split("/"))
        assert path.isprintable()
        assert NameFilter().refusal(path) is None
    assert all(folder.rpartition("/")[0] in found.folders or "/" not in folder for folder in found.folders)
