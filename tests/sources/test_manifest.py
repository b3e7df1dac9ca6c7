"""Text tables, and manifests: columns, labels of every kind, splits, fields, filters."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h5pack.errors import NoImagesError, OptionsError, SourceError
from h5pack.format import schema
from h5pack.format.fields import parse_texts
from h5pack.sources.catalog import Catalog, NameFilter
from h5pack.sources.detect import SourceOptions, open_source
from h5pack.sources.manifest import ManifestColumns, manifest
from tests.sources.files import rows_of, touch, written


def test_a_manifest_whose_images_are_all_rejected_says_why(tmp_path: Path) -> None:
    path = written(tmp_path / "m.csv", "path,mask\na.jpg,\nb.jpg,\n")
    with pytest.raises(NoImagesError, match=r"skipped: 2 rejected, such as a\.jpg: no path in column 'mask'"):
        open_source(path, SourceOptions(columns=ManifestColumns(masks=("mask",))))


def test_only_columns_that_are_used_need_a_name_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path / "m.csv", "path,label,x,x\na.jpg,1,2,3\n")
    assert len(open_source(path, SourceOptions())) == 1
    with pytest.raises(SourceError, match="several columns are named 'x'"):
        open_source(path, SourceOptions(columns=ManifestColumns(fields=("x",))))
    path = written(tmp_path / "m.csv", "path,label,label\na.jpg,1,2\n")
    with pytest.raises(SourceError, match="several columns are named 'label'"):
        open_source(path, SourceOptions())


@pytest.mark.parametrize(
    ("cells", "notes"), [("a|b a b", 1), ("a|b a c", 0), ("a,b", 0), ("x;y;y x y", 1), ("a|b|c b c", 0)]
)
def test_a_note_tells_classes_that_join_others(tmp_path: Path, cells: str, notes: int) -> None:
    catalog = read(tmp_path / "m.tsv", "path\tlabel", *(f"{cell}.jpg\t{cell}" for cell in cells.split()))
    assert [note.parameters for note in catalog.notes] == [("label_columns",)] * notes


def read(path: Path, /, *lines: str, wanted: NameFilter | None = None, **columns: object) -> Catalog:
    """The catalog of a manifest of these lines."""
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return manifest(path, ManifestColumns(**columns), wanted or NameFilter())  # type: ignore[arg-type]


def labeled(path: Path, *cells: str) -> Catalog:
    return read(path, "path,label", *(f"{number}.jpg,{cell}" for number, cell in enumerate(cells)))


def labels_of(catalog: Catalog, dtype: type = np.int64) -> list[object]:
    assert catalog.labels.dtype == dtype
    return catalog.labels.tolist()


@pytest.mark.parametrize(("name", "separator"), [("m.csv", ","), ("m.tsv", "\t"), ("m.TAB", "\t")])
def test_the_order_of_the_lines_is_kept(tmp_path: Path, name: str, separator: str) -> None:
    lines = ["path,label,split", "b/2.jpg,dog,val", "a/1.jpg,cat,train", "雪/größe.jpg,cat,val"]
    catalog = read(tmp_path / name, *(line.replace(",", separator) for line in lines))
    assert list(catalog.names) == ["b/2.jpg", "a/1.jpg", "雪/größe.jpg"]
    assert (catalog.label_names, labels_of(catalog)) == (("cat", "dog"), [1, 0, 0])
    assert (catalog.split_names, catalog.split_ids.tolist()) == (("train", "val"), [1, 0, 1])
    assert (catalog.kind, catalog.fields, catalog.rejects, catalog.ignored) == ("manifest", {}, (), {})


@pytest.mark.parametrize(
    ("path", "label", "split"),
    [
        *(("path", "label", "split"), ("file", "Class", "PARTITION"), ("filename", "TARGET", "Subset")),
        *(("file_name", "category", "set"), ("FilePath", "label", "set"), ("image", "target", "subset")),
        *(("IMAGE_PATH", "class", "Split"), ("image_id", "Label", "split")),
    ],
)
def test_usual_names_are_found_in_any_case(tmp_path: Path, path: str, label: str, split: str) -> None:
    catalog = read(tmp_path / "m.csv", f"note,{split},{label},{path}", "x,test,cat,1.jpg", "y,,,1.jpg")
    assert list(catalog.names) == ["1.jpg", "1.jpg"]
    assert (catalog.label_names, catalog.split_names) == (("cat",), ("test", "all"))


def test_named_columns_are_preferred_to_usual_ones(tmp_path: Path) -> None:
    lines = ["image_id,path,label,split,Where,What,When", "77,no.jpg,1,x,1.jpg,cat,late"]
    assert list(read(tmp_path / "m.csv", *lines).names) == ["no.jpg"]
    catalog = read(tmp_path / "m.csv", *lines, path="Where", labels=("What",), split="When")
    assert list(catalog.names) == ["1.jpg"]
    assert (catalog.label_names, catalog.split_names) == (("cat",), ("late",))
    bare = read(tmp_path / "m.csv", "path", "1.jpg", "2.jpg")
    assert (bare.labels, bare.label_names, bare.split_names) == (None, None, ("all",))


@pytest.mark.parametrize(
    "columns",
    [{"path": "nope"}, {"labels": ("nope",)}, {"labels": ("a", "nope")}, {"split": "nope"}, {"fields": ("nope",)}],
)
def test_unknown_columns_are_errors_that_list_the_columns(tmp_path: Path, columns: dict[str, object]) -> None:
    with pytest.raises(SourceError, match=r"'nope'.*path, a, Label"):
        read(tmp_path / "m.csv", "path,a,Label", "1.jpg,1,2", **columns)
    with pytest.raises(SourceError) as caught:
        read(tmp_path / "m.csv", "picture,label", "1.jpg,1")
    assert caught.value.parameters == ("path_column",)


def test_paths_are_relative_to_the_manifest_or_the_root_or_absolute(tmp_path: Path) -> None:
    touch(tmp_path, "in/x.jpg", "other/x.jpg", "far.jpg")
    for place, content in [("in/x.jpg", b"beside"), ("other/x.jpg", b"root"), ("far.jpg", b"absolute")]:
        (tmp_path / place).write_bytes(content)
    lines = ["path", "x.jpg", str(tmp_path / "far.jpg")]
    beside = read(tmp_path / "in" / "m.csv", *lines)
    assert [beside.reader.read(index, name) for index, name in enumerate(beside.names)] == [b"beside", b"absolute"]
    rooted = read(tmp_path / "in" / "m.csv", *lines, root=str(tmp_path / "other"))
    assert [rooted.reader.read(index, name) for index, name in enumerate(rooted.names)] == [b"root", b"absolute"]


def test_a_manifest_may_be_a_pipe_if_the_kind_is_given() -> None:
    """As from a shell's ``<(zcat m.csv.gz)``. Like other programs, h5pack waits until the pipe is written."""
    receive, send = os.pipe()
    os.write(send, b"path,label\na.jpg,1\n")
    os.close(send)
    catalog = open_source(f"/dev/fd/{receive}", SourceOptions(kind="manifest", columns=ManifestColumns(root=".")))
    os.close(receive)
    assert (list(catalog.names), labels_of(catalog)) == (["a.jpg"], [1])


def test_labels_are_integers_or_names(tmp_path: Path) -> None:
    for cells, names, labels in (
        (["7", "-3", "007", "+2"], None, [7, -3, 7, 2]),
        *((["7", "", "3"], None, [7, -1, 3]), (["", ""], None, [-1, -1]), (["-1", "2", "1"], None, [-1, 2, 1])),
        *((["-1", "1", "", "1"], None, [0, 1, -1, 1]), (["-1", "-1"], None, [-1, -1])),
        (["dog", "", "cat", "dog", "Zebra"], ("Zebra", "cat", "dog"), [2, -1, 1, 2, 0]),
        (["1_0", "1_1", "0_1"], ("0_1", "1_0", "1_1"), [1, 2, 0]),
        (["1a", "雪", "a b"], ("1a", "a b", "雪"), [0, 2, 1]),
    ):
        catalog = labeled(tmp_path / "m.csv", *cells)
        assert (catalog.label_names, labels_of(catalog)) == (names, labels)


@pytest.mark.parametrize(
    ("cells", "line"),
    [(["1", "0.5"], 3), (["1", str(2**64)], 3), (["cat", "", "1.0"], 4), (["nan", "cat"], 2), (["cat", "3"], 3)],
)
def test_numbers_that_are_not_integers_are_not_labels(tmp_path: Path, cells: list[str], line: int) -> None:
    with pytest.raises(SourceError, match=rf"line {line}: .*'{cells[line - 2]}'") as caught:
        labeled(tmp_path / "m.csv", *cells)
    assert (caught.value.path, caught.value.parameters) == (str(tmp_path / "m.csv"), ("field_columns='label'",))


def test_columns_that_are_not_packed_are_named(tmp_path: Path) -> None:
    (note,) = read(tmp_path / "m.csv", "path,label,age,split,caption,b", "1.jpg,2,3,train,x,4", fields=("b",)).notes
    assert "'age', 'caption';" in note.text
    assert note.parameters == ("field_columns", "text_columns", "mask_columns", "image_columns")
    assert read(tmp_path / "m.csv", "path,label,split", "1.jpg,2,train").notes == ()
    columns = [f"c{number}" for number in range(20)]
    (note,) = read(tmp_path / "m.csv", ",".join(["path", *columns]), ",".join(["1.jpg"] * 21)).notes
    assert ("'c7' and 12 more" in note.text, "'c8'" in note.text) == (True, False)


@pytest.mark.parametrize(
    ("name", "images", "classes", "noted"),
    [
        ("name {}", 10, 10, True), ("name {}", 10, 6, True), ("name {}", 10, 5, False), ("name {}", 9, 9, False),
        ("{}", 10, 10, True), ("{}", 10, 3, True), ("{}", 10, 2, False), ("{}", 9, 9, False),
    ],
)  # fmt: skip
def test_a_note_on_classes_of_few_images(tmp_path: Path, name: str, images: int, classes: int, noted: bool) -> None:
    lines = [f"{number}.jpg,{name.format(number % classes)}" for number in range(images)]
    notes = read(tmp_path / "m.csv", "path,label", *lines).notes
    assert [note.parameters for note in notes] == [("field_columns", "label_columns")] * noted


def test_a_note_counts_lines_that_name_an_earlier_image_again(tmp_path: Path) -> None:
    lines = ("a.jpg,train", "b.jpg,val", "a.jpg,val", "a.jpg,val")
    for used, count in ((lines[:2], 0), (lines, 2)):
        found = read(tmp_path / "m.csv", "path,split", *used)
        assert len(found) == len(used)
        assert [f": {count}" in note.text for note in found.notes] == [True] * (count > 0)
    assert read(tmp_path / "m.csv", "path,split", *lines, wanted=NameFilter(exclude=("*",))).notes == ()


def test_a_usual_column_that_is_named_as_a_field_is_only_that(tmp_path: Path) -> None:
    lines = ["path,label,class,set", "1.jpg,0.5,cat,3", "2.jpg,1.5,dog,4"]
    catalog = read(tmp_path / "m.csv", *lines, fields=("label", "set"))
    assert (catalog.label_names, catalog.fields["label"].tolist()) == (("cat", "dog"), [0.5, 1.5])
    assert (catalog.split_names, catalog.fields["set"].tolist()) == (("all",), [3, 4])
    both = read(tmp_path / "m.csv", *lines, fields=("set",), labels=("set",), split="set")
    assert (labels_of(both), both.split_names) == ([3, 4], ("3", "4"))


def test_a_usual_column_that_has_another_role_is_only_that(tmp_path: Path) -> None:
    lines = ["image,class,set", "1.jpg,a,x", "2.jpg,b,y"]
    catalog = read(tmp_path / "m.csv", *lines, labels=("set",))
    assert (catalog.label_names, catalog.split_names) == (("x", "y"), ("all",))
    catalog = read(tmp_path / "m.csv", *lines, split="class")
    assert (catalog.labels, catalog.split_names) == (None, ("a", "b"))
    catalog = read(tmp_path / "m.csv", *lines, path="class")
    assert (list(catalog.names), catalog.labels, catalog.split_names) == (["a", "b"], None, ("x", "y"))


def test_fields_and_several_labels_are_columns_of_numbers(tmp_path: Path) -> None:
    catalog = read(tmp_path / "m.csv", "path,age,weight", "1.jpg,30,0.5", "2.jpg,-4,2", fields=("weight", "age"))
    assert list(catalog.fields) == ["weight", "age"]
    np.testing.assert_array_equal(catalog.fields["age"], np.array([30, -4]), strict=True)
    np.testing.assert_array_equal(catalog.fields["weight"], np.array([0.5, 2.0]), strict=True)
    lines = ["path,smiling,young,age", "1.jpg,-1,1,30", "2.jpg,1,0,255"]
    catalog = read(tmp_path / "m.csv", *lines, labels=("age", "smiling"))
    assert (catalog.label_names, labels_of(catalog, np.uint8)) == (("age", "smiling"), [[30, 0], [255, 1]])
    for name in (*sorted(schema.RESERVED), "a/b", ".hidden"):
        with pytest.raises(OptionsError, match=f"'{name}'"):
            read(tmp_path / "m.csv", f"path,{name}", "1.jpg,1", fields=(name,))


def test_filters_keep_rows_together(tmp_path: Path) -> None:
    assert list(read(tmp_path / "m.csv", "path", "a/", wanted=NameFilter(exclude=("b*",))).names) == ["a/"]
    lines = ["path,label,weight", "a/1.jpg,cat,1", "a/2.dat,dog,2", "b/1.jpg,eel,3", "b/.x.jpg,fox,4"]
    for include, exclude, kept, ignored in [
        ((), (), [1, 2, 3, 4], {}),
        (("a/*",), (), [1, 2], {"not included": 2}),
        ((), ("a/*", "2.dat"), [3, 4], {"excluded": 2}),
        (("*.jpg",), ("b/1*",), [1, 4], {"excluded": 1, "not included": 1}),
    ]:
        catalog = read(tmp_path / "m.csv", *lines, wanted=NameFilter(include, exclude), fields=("weight",))
        assert catalog.fields["weight"].tolist() == kept
        assert labels_of(catalog) == [number - 1 for number in kept]
        assert list(catalog.names) == [lines[number].split(",")[0] for number in kept]
        assert (catalog.ignored, catalog.label_names) == (ignored, ("cat", "dog", "eel", "fox"))


def test_rows_that_are_filtered_out_are_not_rejected_for_a_missing_mask(tmp_path: Path) -> None:
    lines = ["path,mask", "0.jpg,0.png", "1.jpg,", "2.jpg,", "3.jpg,3.png"]
    for wanted, kept, rejected in [
        (NameFilter(), ["0.jpg", "3.jpg"], ["1.jpg", "2.jpg"]),
        (NameFilter(exclude=("0.jpg", "1.jpg")), ["3.jpg"], ["2.jpg"]),
        (NameFilter(include=("[03].jpg",)), ["0.jpg", "3.jpg"], []),
    ]:
        catalog = read(tmp_path / "m.csv", *lines, wanted=wanted, masks=("mask",))
        assert ([*catalog.names], [reject.name for reject in catalog.rejects]) == (kept, rejected)
        assert [*catalog.pixel_fields[0].files] == [f"{name[0]}.png" for name in kept]


@pytest.mark.parametrize("cell", ['""', "a\0b.jpg"])
def test_a_cell_that_is_not_a_path_is_an_error(tmp_path: Path, cell: str) -> None:
    with pytest.raises(SourceError):
        read(tmp_path / "m.csv", "path,label", "1.jpg,1", "", f"{cell},2")


def jsonl(path: Path, *records: object) -> Path:
    return written(path, "".join(f"{json.dumps(record)}\n" for record in records))


@pytest.mark.parametrize("cell", ["\ud83d.jpg", "a\0.jpg"])
def test_a_text_of_json_that_is_not_a_path_is_an_error(tmp_path: Path, cell: str) -> None:
    for record in ({"path": cell, "mask": "1.png"}, {"path": "1.jpg", "mask": cell}):
        path = jsonl(tmp_path / "m.jsonl", {"path": "0.jpg", "mask": ""}, record)
        with pytest.raises(SourceError, match="line 2: "):
            manifest(path, ManifestColumns(masks=("mask",)), NameFilter())


def test_images_without_a_label_are_no_class_in_the_note_of_many_classes(tmp_path: Path) -> None:
    for cells, notes in (([*"0101010101", "", "-1"], 0), ([*"0121010101", "", "-1"], 1), (["1", *[""] * 11], 0)):
        assert len(labeled(tmp_path / "m.csv", *cells).notes) == notes


@pytest.mark.parametrize("column", ["label", "split"])
def test_a_name_with_a_nul_is_an_error_because_the_file_would_end_it_there(tmp_path: Path, column: str) -> None:
    path = jsonl(tmp_path / "m.jsonl", {"path": "0.jpg", column: "a"}, {"path": "1.jpg", column: "a\0"})
    with pytest.raises(SourceError, match=f"line 2: column '{column}' "):
        manifest(path, ManifestColumns(), NameFilter())


@pytest.mark.parametrize("root", [None, ".", "images"])
def test_a_note_counts_repeated_images_also_in_other_spellings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = touch(tmp_path / (root or "."), "a.jpg", "b.jpg")
    lines = ["path", "a.jpg", "b.jpg", "./a.jpg", "x/..//b.jpg", f"{folder}/a.jpg", "a.jpg"]
    catalog = read(Path("m.csv"), *lines, root=root)
    assert len(catalog) == 6
    assert [" 4;" in note.text for note in catalog.notes] == [True]


def test_undecodable_bytes_of_a_path_are_kept_as_surrogates(tmp_path: Path) -> None:
    assert [*read(tmp_path / "m.jsonl", '{"path": "\\udcff.jpg"}').names] == ["\udcff.jpg"]


COLUMNS = ManifestColumns(
    fields=("n", "list"), texts=("text", "texts"), boxes=("box",), keypoints=("point",), box_format="xywh"
)


def test_json_lines_have_lists_texts_and_boxes(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "m.jsonl",
        {"path": "a.jpg", "n": 1, "list": [[1, 2]], "text": " a\n", "texts": ["x", ""], "box": [[1, 2, 3, 4]],
         "label": "cat", "split": "val"},
        {"file": 1, "path": "b.jpg", "n": 2.5, "list": [], "point": [[1, 2]], "texts": [], "label": "ant"},
        {"path": "c.jpg", "n": 3, "list": None, "text": "雪", "label": None, "split": "train"},
    )  # fmt: skip
    catalog = manifest(path, COLUMNS, NameFilter())
    assert catalog.fields["n"].tolist() == [1, 2.5, 3]  # type: ignore[union-attr]
    assert {name: rows_of(values) for name, values in catalog.fields.items() if name != "n"} == {
        "list": ("ragged", [[[1, 2]], [], []]), "text": ("text", [" a\n", "", "雪"]),
        "texts": ("texts", [["x", ""], [], []]), "box": ("boxes", [[[1, 2, 4, 6]], [], []]),
        "point": ("keypoints", [[], [[1, 2]], []]),
    }  # fmt: skip
    assert (catalog.label_names, labels_of(catalog)) == (("ant", "cat"), [1, 0, -1])
    assert (catalog.split_names, catalog.split_ids.tolist()) == (("train", "val", "all"), [1, 2, 0])
    (note,) = catalog.notes
    assert "'file'" in note.text
    taken = catalog.take(np.array([2, 0]))
    assert rows_of(taken.fields["text"]) == ("text", ["雪", " a\n"])
    changed = replace(catalog, fields={**catalog.fields, "text": parse_texts([" a\n雪", "", ""])})
    assert changed.tables_checksum() != catalog.tables_checksum()


@pytest.mark.parametrize(("value", "parameters"), [([1], ("field_columns",)), ({"a": 1}, ())])
def test_lists_and_dicts_are_no_labels(tmp_path: Path, value: Any, parameters: tuple[str, ...]) -> None:
    path = jsonl(tmp_path / "m.jsonl", {"path": "a.jpg", "label": value})
    with pytest.raises(SourceError) as caught:
        manifest(path, ManifestColumns(), NameFilter())
    assert caught.value.parameters == parameters


def test_cells_of_csv_hold_lists_as_json_and_texts_as_they_are(tmp_path: Path) -> None:
    text = 'path,n,list,text,texts,box,point\na.jpg,1, [1],"x, ""y""\n ","[""a""]","[[1,2,3,4]]",\nb.jpg,2,,,[], ,\n'
    catalog = manifest(written(tmp_path / "m.csv", text), COLUMNS, NameFilter())
    assert {name: rows_of(values) for name, values in catalog.fields.items() if name != "n"} == {
        "list": ("ragged", [[1], []]), "text": ("text", ['x, "y"\n ', ""]), "texts": ("texts", [["a"], []]),
        "box": ("boxes", [[[1, 2, 4, 6]], []]), "point": ("keypoints", [[], []]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("list", [1, [2]]), ("list", "x"), ("list", {"a": 1}), ("n", "x"), ("text", {}), ("text", "a\0b"),
        ("texts", "no list"), ("box", [1, 2, 3, 4]), ("box", 7), ("point", [[1]]), ("label", ["cat"]), ("split", {}),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_its_column_names_the_line(tmp_path: Path, name: str, cell: object) -> None:
    first = {"path": "a", "n": 1, "list": [1], "text": "a", "texts": ["b"], "box": [[1, 2, 3, 4]], "point": [[1, 2]]}
    path = jsonl(tmp_path / "m.jsonl", {**first, "label": "x", "split": "all"}, {**first, "path": "b", name: cell})
    with pytest.raises(SourceError, match=rf"m\.jsonl line 2: .*'{name}'"):
        manifest(path, COLUMNS, NameFilter())


def test_boxes_with_a_width_are_asked_for_their_format(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "m.jsonl", {"path": "a", "box": [[1, 5, 9, 4]]})
    with pytest.raises(SourceError) as caught:
        manifest(path, ManifestColumns(boxes=("box",)), NameFilter())
    assert caught.value.parameters == ("box_columns", "box_format='xywh'")


def test_lists_in_csv_that_are_no_json_name_the_line(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="line 3: "):
        read(tmp_path / "m.csv", "path,a", "1.jpg,[1]", '2.jpg,"[1"', fields=("a",))
    with pytest.raises(OptionsError):
        read(tmp_path / "m.csv", "path,a", "1.jpg,1", fields=("a",), texts=("a",))


def test_images_are_looked_up_below_the_root_by_the_ends_of_their_paths(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.x.jpg", "b/deep/2.PNG", "b/3.jpg", "c/3.jpg", "b/4.txt", "a/4", "c/d/5.tif")
    names = ["1.x", "deep/2.PNG", "c/3", f"{tmp_path.name}/c/d/5", "4", "2", "6.jpg", "x/1.x.jpg"]
    path = written(tmp_path / "t.csv", "\n".join(["path,label", *(f"{name},{row}" for row, name in enumerate(names))]))
    catalog = manifest(path, ManifestColumns(), NameFilter())
    found = ["a/1.x.jpg", "b/deep/2.PNG", "c/3.jpg", "c/d/5.tif", "4", "b/deep/2.PNG", "6.jpg", "x/1.x.jpg"]
    assert (list(catalog.names), catalog.labels.tolist()) == (found, list(range(8)))
    below = manifest(path, ManifestColumns(root=str(tmp_path / "c")), NameFilter())
    assert list(below.names) == [*names[:2], "3.jpg", *names[3:]]


def test_paths_with_backslashes_are_looked_up(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "b/1.jpg", "b/deep/2.png")
    own = tmp_path.name
    path = written(tmp_path / "t.csv", f"path\na\\1.jpg\nb\\1\n{own}\\b\\deep\\2.png\nc\\1.jpg\n")
    assert list(manifest(path, ManifestColumns(), NameFilter()).names) == [
        "a/1.jpg",
        "b/1.jpg",
        "b/deep/2.png",
        "c\\1.jpg",
    ]


def test_masks_and_further_images_are_looked_up(tmp_path: Path) -> None:
    touch(tmp_path, "images/1.jpg", "images/2.jpg", "masks/1.png", "masks/2_mask.png", "depth/1_d.png", "depth/2_d.png")
    path = written(tmp_path / "t.csv", "path,mask,depth\n1,1,1_d\n2,2_mask.png,2_d\n2,,2_d")
    columns = ManifestColumns(masks=("mask",), images=("depth",))
    catalog = manifest(path, columns, NameFilter(include=("images/*",)))
    assert list(catalog.names) == ["images/1.jpg", "images/2.jpg"]
    assert [list(one.files) for one in catalog.pixel_fields] == [
        ["masks/1.png", "masks/2_mask.png"], ["depth/1_d.png", "depth/2_d.png"],
    ]  # fmt: skip
    assert [reject.name for reject in catalog.rejects] == ["images/2.jpg"]
    # Another file beside the mask has its name, too.
    (tmp_path / "depth/1.png").touch()
    with pytest.raises(SourceError):
        manifest(path, columns, NameFilter(include=("images/*",)))


def test_a_file_that_is_where_the_table_says_is_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.sources.manifest._PROBED", 1)
    touch(tmp_path, "1.jpg", "a/1.jpg", "a/2.jpg")
    path = written(tmp_path / "t.csv", "path\nmissing.jpg\n1.jpg\n2.jpg\n")
    assert list(manifest(path, ManifestColumns(), NameFilter()).names) == ["missing.jpg", "1.jpg", "a/2.jpg"]


def test_a_name_of_several_files_is_an_error_unless_they_are_excluded(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "b/1.jpg")
    path = written(tmp_path / "t.csv", "path\n1\n")
    with pytest.raises(SourceError) as caught:
        manifest(path, ManifestColumns(), NameFilter())
    assert caught.value.parameters == ("root", "include", "exclude")
    for wanted in (NameFilter(exclude=("b/*",)), NameFilter(include=("a/*",))):
        assert list(manifest(path, ManifestColumns(), wanted).names) == ["a/1.jpg"]
    (tmp_path / "1").touch()
    assert list(manifest(path, ManifestColumns(), NameFilter()).names) == ["1"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("m.jsonl", ""), ("m.jsonl", "\n \n"), ("m.csv", ""), ("m.csv", "\npath\na.png\n"), ("m.tsv", " \t\na")],
)
def test_a_table_whose_first_line_is_empty_is_an_error(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SourceError, match="empty"):
        manifest(tmp_path / name, ManifestColumns(), NameFilter())
