"""What an exported folder contains.

Names of files are restored where they can be, never outside the folder, never alike. The table says just what a
conversion reads.
"""

from __future__ import annotations

import csv
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.exporter.contents import ExportNames, Manifest, NameRules, name_files, plan_manifest
from h5pack.exporter.image_files import SourceRows
from h5pack.sources.catalog import Catalog, NameFilter, NameTable, PixelField
from h5pack.sources.manifest import ManifestColumns, manifest
from h5pack.sources.reader import SourceReader

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


def test_the_work_per_file_does_not_grow_with_the_number_of_equal_names() -> None:
    folded: list[str] = []

    class CountingRules(NameRules):
        def fold(self, name: str) -> str:
            folded.append(name)
            return name

    count = 300
    found = named(catalog(["a.png"] * count), CountingRules((".png",)))
    assert list(found.paths) == ["a.png", *(f"a~{number}.png" for number in range(2, count + 1))]
    assert len(folded) <= 4 * count


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
        (("a/b", "a_b"), ["a_b", "a_b~2"]), (("..", "."), ["_..", "_."]), (("", ".git"), ["_", "_.git"]),
        (("x" * 999, "x" * 998), ["x" * 200, "x" * 200 + "~2"]),
        (("\u00e9" * 150, "manifest.csv"), ["\u00e9" * 100, "_manifest.csv"]),
    ],
)  # fmt: skip
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


def planned(source: Catalog, sources: bool = False) -> Manifest:
    return plan_manifest(rows_of(source, sources), ExportNames(source.names, (), 0))


def options_of(plan: Manifest) -> list[str]:
    """The options of the command that packs the export again."""
    pack = SimpleNamespace(form=None, index=SimpleNamespace(row_shape=()), pack=SimpleNamespace(layout="nhwc"))
    source = SourceRows(catalog([]), pack, np.arange(0), False)  # type: ignore[arg-type]
    command, _ = plan.command(Path("out"), source, ExportNames(plan.paths, (), 0))
    start = "h5pack convert out/manifest.csv again.h5 --order sorted"
    assert command.startswith(start)
    return shlex.split(command.removeprefix(start))


def written(plan: Manifest, path: Path, left_out: tuple[int, ...] = ()) -> list[list[str]]:
    plan.write(path, left_out)
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.reader(stream))


def read(plan: Manifest, path: Path) -> Catalog:
    """The catalog that a conversion with the plan's options sees."""
    words = options_of(plan)
    options = dict(zip(words[::2], words[1::2], strict=True))
    labels, fields = (
        tuple(options[name].split(",")) if name in options else () for name in ("--label-columns", "--field-columns")
    )
    return manifest(path, ManifestColumns(labels=labels, fields=fields), NameFilter())


NUMBERS: list[npt.NDArray[Any]] = [
    np.array([0.1, np.nan, -np.inf, 5e-324], np.float64), np.array([0.1, 1 / 3, 1e38, -0.0], np.float32),
    np.array([2**63 - 1, -(2**63), 0, 7]), np.array([1.0, 2.0, 3.0, 4.0]), np.array([True, False, True, True]),
    np.array([0, 255, 3, 4], np.uint8),
]  # fmt: skip


@pytest.mark.parametrize("values", NUMBERS, ids=lambda values: str(values.dtype))
def test_numbers_are_restored_exactly(tmp_path: Path, values: npt.NDArray[Any]) -> None:
    plan = planned(catalog(["a.png", "b.png", "c.png", "d.png"], fields={"x": values}))
    written(plan, tmp_path / "m.csv")
    found = read(plan, tmp_path / "m.csv").fields["x"]
    np.testing.assert_array_equal(found, values)
    assert found.dtype == (np.float64 if values.dtype.kind == "f" else np.int64)


def test_paths_and_class_names_with_special_characters_are_restored(tmp_path: Path) -> None:
    names = [' lead/a.png', 'quo"te.png', "com,ma.png", "\u732b.png", "#.png", "=1+1.png"]  # fmt: skip
    words = ("a,b", 'c"d', "e f", "\u732b", "#g", "=h")
    plan = planned(catalog(names, labels=range(6), label_names=words), sources=True)
    assert len(plan.lost) == 1
    lines = written(plan, tmp_path / "m.csv")
    assert lines[0] == ["path", "split", "label", "row", "source"]
    assert [line[2] for line in lines[1:]] == list(words)
    found = read(plan, tmp_path / "m.csv")
    # White space in front of a cell is taken away, so the path begins otherwise.
    assert list(found.names) == ["./ lead/a.png", *names[1:]]
    assert [found.label_names[label] for label in found.labels] == list(words)


def test_numbers_that_convert_takes_for_other_labels_are_named() -> None:
    for labels, names, lost in (
        *(([1, 0, -1], None, 0), ([1, 1, 1], None, 0), ([1, -1, 1], None, 1)),
        *(([1, -1, 1], ("a", "b"), 1), ([1, -1, 1], ("a", "1"), 2)),  # a class without rows; its name, too
    ):
        assert len(planned(catalog(["a.png", "b.png", "c.png"], labels=labels, label_names=names)).lost) == lost


@pytest.mark.parametrize("odd", ["-1e3", "nan", "", " x", "a\rb"])
def test_labels_are_numbers_if_a_class_name_would_be_misread(tmp_path: Path, odd: str) -> None:
    plan = planned(catalog(["a.png", "b.png", "c.png"], labels=[1, 0, -1], label_names=("cat", odd)))
    assert "names of classes" in plan.lost[0]
    lines = written(plan, tmp_path / "m.csv")
    assert lines[0] == ["path", "split", "label", "class", "row"]
    assert [line[2] for line in lines[1:]] == ["1", "0", "-1"]
    found = read(plan, tmp_path / "m.csv")
    assert (found.labels.tolist(), found.label_names) == ([1, 0, -1], None)


def test_columns_have_names_of_their_own(tmp_path: Path) -> None:
    table = np.array([[1, 2, 3, 4]], np.uint8)
    source = catalog(["a.png"], fields={"row": np.ones(1), "x": np.zeros(1)})
    source = Catalog(**{**source.__dict__, "labels": table, "label_names": ("path", "x", "a, b", " y ")})
    plan = planned(source, sources=True)
    assert next(plan.lines(())) == ["path", "split", "path~2", "x", "a; b", "y", "row", "x~2", "row~2", "source"]
    assert options_of(plan) == ["--label-columns", "path~2,x,a; b,y", "--field-columns", "row,x~2"]
    assert [name in lost for name, lost in zip(("'path~2'", "'x~2'"), plan.lost, strict=True)] == [True, True]
    written(plan, tmp_path / "m.csv")
    assert read(plan, tmp_path / "m.csv").labels.tolist() == table.tolist()


def test_splits_that_would_be_misread() -> None:
    for splits, lost in ((("train", "val"), 0), (("all",), 0), (("val", "train"), 1), ((" val", "x"), 1)):
        assert len(planned(catalog([f"{n}.png" for n in range(len(splits))], splits=list(splits))).lost) == lost


def test_rows_without_a_file_have_no_line(tmp_path: Path) -> None:
    plan = planned(catalog([f"{n}.png" for n in range(10_000)], labels=range(10_000)))
    lines = written(plan, tmp_path / "m.csv", (0, 4_096, 9_999))
    assert len(lines) == 9_998
    assert [line[0] for line in lines[1:3]] == ["1.png", "2.png"]
    assert plan.equals(tmp_path / "m.csv", (0, 4_096, 9_999))
    assert not plan.equals(tmp_path / "m.csv", (0, 4_096))


def test_another_table_does_not_equal_it(tmp_path: Path) -> None:
    plan = planned(catalog(["a.png", "b.png"], labels=[3, 4]))
    path = tmp_path / "m.csv"
    header, first, second = "path,split,label,row\n", "a.png,all,3,0\n", "b.png,all,4,1\n"
    others = ["path,split,label\na.png,all,3\nb.png,all,4\n", header + first + "b.png,all,5,1\n"]
    others += [header + second + first, header + first + second + "c.png,all,4,2\n"]
    for text in ("", *others, "\x89PNG\xff"):
        path.write_bytes(text.encode("latin-1"))
        assert not plan.equals(path, ())
    assert not plan.equals(tmp_path / "none.csv", ())
    written(plan, path)
    assert plan.equals(path, ())


def test_names_with_control_characters_are_escaped_in_the_sources(tmp_path: Path) -> None:
    rows = rows_of(catalog(["a\r\n\x1b[31m.jpg"]), True, [7])
    plan = plan_manifest(rows, ExportNames(NameTable.of(["a.png"]), (), 0))
    assert written(plan, tmp_path / "m.csv")[1] == ["a.png", "all", "7", "a\\r\\n\\x1b[31m.jpg"]
