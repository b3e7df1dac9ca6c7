"""Manifests: columns found and named, labels of every kind, splits, fields, filters."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack import schema
from h5pack.errors import OptionsError, SourceError
from h5pack.sources.catalog import Catalog
from h5pack.sources.detect import SourceOptions, open_source
from h5pack.sources.manifest import ManifestColumns, manifest
from h5pack.sources.walk import NameFilter
from tests.makers import save


def read(path: Path, /, *lines: str, wanted: NameFilter | None = None, **columns: object) -> Catalog:
    """The catalog of a manifest of these lines."""
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return manifest(path, ManifestColumns(**columns), wanted or NameFilter())  # type: ignore[arg-type]


def labelled(path: Path, *cells: str) -> Catalog:
    return read(path, "path,label", *(f"{number}.jpg,{cell}" for number, cell in enumerate(cells)))


def labels_of(catalog: Catalog) -> list[object]:
    assert catalog.labels is not None
    return catalog.labels.tolist()


@pytest.mark.parametrize(("name", "separator"), [("m.csv", ","), ("m.tsv", "\t"), ("m.TAB", "\t")])
@pytest.mark.parametrize("lead", ["", "\ufeff"])
def test_the_order_of_the_lines_is_kept(tmp_path: Path, name: str, separator: str, lead: str) -> None:
    lines = ["path,label,split", "b/2.jpg,dog,val", "a/1.jpg,cat,train", "雪/größe.jpg,cat,val"]
    catalog = read(
        tmp_path / name, lead + lines[0].replace(",", separator), *(line.replace(",", separator) for line in lines[1:])
    )
    assert list(catalog.names) == ["b/2.jpg", "a/1.jpg", "雪/größe.jpg"]
    assert (catalog.label_names, labels_of(catalog)) == (("cat", "dog"), [1, 0, 0])
    assert (catalog.split_names, catalog.split_ids.tolist()) == (("train", "val"), [1, 0, 1])
    assert (catalog.kind, catalog.fields, catalog.rejects, catalog.ignored) == ("manifest", {}, (), {})


@pytest.mark.parametrize(
    "path", ["path", "file", "filename", "file_name", "filepath", "image", "image_path", "image_id"]
)
@pytest.mark.parametrize(
    ("label", "split"), [("label", "split"), ("Class", "PARTITION"), ("TARGET", "Subset"), ("category", "set")]
)
def test_usual_names_are_found_in_any_case(tmp_path: Path, path: str, label: str, split: str) -> None:
    for spelled in (path, path.upper()):
        catalog = read(tmp_path / "m.csv", f"note,{split},{label},{spelled}", "x,test,cat,1.jpg")
        assert list(catalog.names) == ["1.jpg"]
        assert (catalog.label_names, catalog.split_names) == (("cat",), ("test",))


def test_columns_may_be_named(tmp_path: Path) -> None:
    catalog = read(
        tmp_path / "m.csv",
        "path,label,split,Where,What,When",
        "no.jpg,1,x,1.jpg,cat,late",
        path="Where",
        labels=("What",),
        split="When",
    )
    assert list(catalog.names) == ["1.jpg"]
    assert (catalog.label_names, catalog.split_names) == (("cat",), ("late",))


@pytest.mark.parametrize(
    "columns",
    [{"path": "nope"}, {"labels": ("nope",)}, {"labels": ("a", "nope")}, {"split": "nope"}, {"fields": ("nope",)}],
)
def test_unknown_columns_are_errors_that_list_the_columns(tmp_path: Path, columns: dict[str, object]) -> None:
    with pytest.raises(SourceError, match=r"m\.csv: no column 'nope'; its columns are path, a, Label"):
        read(tmp_path / "m.csv", "path,a,Label", "1.jpg,1,2", **columns)


def test_no_column_of_paths(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"m\.csv: no column of image paths among picture, label; .*--path-column"):
        read(tmp_path / "m.csv", "picture,label", "1.jpg,1")


def test_paths_are_relative_to_the_manifest_or_the_root_or_absolute(tmp_path: Path) -> None:
    for place, content in [("in/x.jpg", b"beside"), ("other/x.jpg", b"root"), ("far.jpg", b"absolute")]:
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_bytes(content)
    lines = ["path", "x.jpg", str(tmp_path / "far.jpg")]
    beside = read(tmp_path / "in" / "m.csv", *lines)
    assert [beside.reader.read(index, name) for index, name in enumerate(beside.names)] == [b"beside", b"absolute"]
    rooted = read(tmp_path / "in" / "m.csv", *lines, root=str(tmp_path / "other"))
    assert [rooted.reader.read(index, name) for index, name in enumerate(rooted.names)] == [b"root", b"absolute"]


@pytest.mark.parametrize(
    ("cells", "names", "labels"),
    [
        (["7", "-3", "007", "+2"], None, [7, -3, 7, 2]),
        (["7", "", "3"], None, [7, -1, 3]),
        (["", ""], None, [-1, -1]),
        (["dog", "", "cat", "dog", "Zebra"], ("Zebra", "cat", "dog"), [2, -1, 1, 2, 0]),
        (["1_0", "1_1", "0_1"], ("0_1", "1_0", "1_1"), [1, 2, 0]),
        (["1a", "雪", "a b"], ("1a", "a b", "雪"), [0, 2, 1]),
    ],
)
def test_labels_are_integers_or_names(
    tmp_path: Path, cells: list[str], names: tuple[str, ...] | None, labels: list[int]
) -> None:
    catalog = labelled(tmp_path / "m.csv", *cells)
    assert (catalog.label_names, labels_of(catalog)) == (names, labels)
    assert catalog.labels is not None
    assert catalog.labels.dtype == np.int64


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("abcXYZé雪", max_size=3), min_size=1, max_size=8))
def test_every_row_keeps_its_own_class(cells: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        catalog = labelled(Path(folder, "m.csv"), *cells)
    names = (*(catalog.label_names or ()), "")
    assert [names[label] for label in labels_of(catalog)] == cells  # type: ignore[call-overload]
    assert list(names[:-1]) == sorted(set(cells) - {""})


@pytest.mark.parametrize(
    ("cells", "line", "cell"),
    [(["1", "0.5"], 2, "1"), (["cat", "", "1.0"], 4, "1.0"), (["nan", "cat"], 2, "nan"), (["cat", "3"], 3, "3")],
)
def test_numbers_that_are_no_integers_are_no_labels(tmp_path: Path, cells: list[str], line: int, cell: str) -> None:
    with pytest.raises(
        SourceError, match=rf"m\.csv line {line}: column 'label' holds the number '{cell}'.*--field-columns"
    ):
        labelled(tmp_path / "m.csv", *cells)


def test_several_label_columns_make_a_table(tmp_path: Path) -> None:
    lines = ["path,smiling,young,age", "1.jpg,-1,1,30", "2.jpg,1,0,255"]
    catalog = read(tmp_path / "m.csv", *lines, labels=("age", "smiling", "young"))
    assert catalog.label_names == ("age", "smiling", "young")
    assert labels_of(catalog) == [[30, 0, 1], [255, 1, 0]]
    assert catalog.labels is not None
    assert catalog.labels.dtype == np.uint8
    with pytest.raises(SourceError, match=r"m\.csv line 3: column 'age' holds '256'; several label columns"):
        read(tmp_path / "m.csv", lines[0], lines[1], "2.jpg,1,0,256", labels=("smiling", "age"))


def test_without_labels_and_splits(tmp_path: Path) -> None:
    catalog = read(tmp_path / "m.csv", "path", "1.jpg", "2.jpg")
    assert (catalog.labels, catalog.label_names, catalog.split_names) == (None, None, ("all",))


def test_splits_come_in_their_usual_order(tmp_path: Path) -> None:
    cells = ["test", "zoo", "train", "", "valid", "train"]
    catalog = read(tmp_path / "m.csv", "path,split", *(f"{n}.jpg,{cell}" for n, cell in enumerate(cells)))
    assert catalog.split_names == ("train", "valid", "test", "all", "zoo")
    assert [catalog.split_names[split] for split in catalog.split_ids] == [cell or "all" for cell in cells]


def test_fields_are_columns_of_numbers(tmp_path: Path) -> None:
    catalog = read(tmp_path / "m.csv", "path,age,weight", "1.jpg,30,0.5", "2.jpg,-4,2", fields=("weight", "age"))
    assert list(catalog.fields) == ["weight", "age"]
    assert (catalog.fields["age"].dtype, catalog.fields["age"].tolist()) == (np.int64, [30, -4])
    assert (catalog.fields["weight"].dtype, catalog.fields["weight"].tolist()) == (np.float64, [0.5, 2.0])
    with pytest.raises(SourceError, match=r"m\.csv line 3: column 'age' holds 'old', which is no number"):
        read(tmp_path / "m.csv", "path,age", "1.jpg,30", "2.jpg,old", fields=("age",))


@pytest.mark.parametrize("name", [*sorted(schema.RESERVED), "a/b", ".hidden"])
def test_names_that_the_format_uses_are_refused_for_fields(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionsError, match=f"field '{name}': the format uses or forbids that name"):
        read(tmp_path / "m.csv", f"path,{name}", "1.jpg,1", fields=(name,))


def test_filters_keep_rows_together(tmp_path: Path) -> None:
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


def test_a_path_that_ends_in_a_slash_may_be_filtered(tmp_path: Path) -> None:
    assert list(read(tmp_path / "m.csv", "path", "a/", wanted=NameFilter(exclude=("b*",))).names) == ["a/"]


@pytest.mark.parametrize("cell", ['""', "a\0b.jpg"])
def test_a_cell_that_is_no_path_is_named_by_its_line(tmp_path: Path, cell: str) -> None:
    # csv of Python 3.10 refuses the NUL by itself.
    with pytest.raises(SourceError, match=r"m\.csv( line 4: .* is no path; mend the line|: cannot be read .*NUL)"):
        read(tmp_path / "m.csv", "path,label", "1.jpg,1", "", f"{cell},2")


def test_an_image_may_be_named_twice(tmp_path: Path) -> None:
    catalog = read(tmp_path / "m.csv", "path,label", "1.jpg,1", "1.jpg,2")
    assert (list(catalog.names), labels_of(catalog)) == (["1.jpg", "1.jpg"], [1, 2])


def test_a_column_named_path_is_preferred_wherever_it_stands(tmp_path: Path) -> None:
    save(tmp_path / "a.jpg")
    (tmp_path / "m.csv").write_text("image_id,label,path\n77,x,a.jpg\n")
    assert list(open_source(tmp_path / "m.csv", SourceOptions()).names) == ["a.jpg"]


def test_columns_for_a_folder_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.jpg")
    with pytest.raises(OptionsError, match="are a manifest's"):
        open_source(tmp_path, SourceOptions(columns=ManifestColumns(split="s")))
