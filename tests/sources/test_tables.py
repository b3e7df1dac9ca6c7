"""Parquet and Arrow files as sources."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import h5pack
from h5pack.errors import H5PackError, NoImagesError, RejectedImageError, ResumeError, SourceError
from h5pack.images.decode import MAX_PIXELS
from h5pack.sources import tables
from h5pack.sources.catalog import Catalog, NameFilter
from h5pack.sources.detect import SourceOptions, open_source
from h5pack.sources.manifest import ManifestColumns
from tests.crashing import interrupt
from tests.makers import break_package, pixels, quick
from tests.read.encoded_files import encode
from tests.sources.files import rows_of


def png(seed: int) -> bytes:
    return encode(pixels(seed), "PNG")


def table(numbers: range, features: dict[str, Any] | None = None, **columns: Any) -> pa.Table:
    """As Hugging Face datasets stores images: structs of bytes and a path."""
    images = [{"bytes": png(number), "path": f"{number}.png"} for number in numbers]
    return described(pa.table({"image": images, "label": [number % 3 for number in numbers], **columns}), features)


def described(made: pa.Table, features: dict[str, Any] | None) -> pa.Table:
    """The table with features as Hugging Face datasets stores them."""
    metadata = None if features is None else {"huggingface": json.dumps({"info": {"features": features}})}
    return made.replace_schema_metadata(metadata)


def write(path: Path, made: pa.Table, row_group_size: int = 4) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(made, path, row_group_size=row_group_size)
    return path


def opened(path: Path, columns: ManifestColumns | None = None, **names: tuple[str, ...]) -> Catalog:
    return open_source(path, SourceOptions(None, NameFilter(**names), columns or ManifestColumns()))


NAMES = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["cat", "dog", "fox"]}}


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_a_parquet_file_becomes_a_pack(order: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", table(range(14), NAMES))
    h5pack.convert(path, tmp_path / "o.h5", order=order, chunk_rows=2, **quick())
    with h5py.File(tmp_path / "o.h5") as file:
        rows = [int(name) for name in file["filenames"][()]]
        np.testing.assert_array_equal(file["images"][()], [pixels(row) for row in rows])
        np.testing.assert_array_equal(file["labels"][()], np.array(rows) % 3)
        assert [name.decode() for name in file["labels"].attrs["classes"]] == ["cat", "dog", "fox"]
    assert (order == "sorted") == (rows == list(range(14)))
    h5pack.convert(path, tmp_path / "two.h5", order=order, chunk_rows=2, num_workers=2, start_method="fork")
    assert (tmp_path / "two.h5").read_bytes() == (tmp_path / "o.h5").read_bytes()


def test_the_layout_of_hugging_face_gives_splits(tmp_path: Path) -> None:
    for split, numbers in (("train", range(5)), ("test", range(5, 7))):
        write(tmp_path / "data" / f"{split}-00000-of-00001.parquet", table(numbers))
    (tmp_path / "README.md").touch()
    catalog = opened(tmp_path)
    assert (catalog.kind, catalog.split_names) == ("parquet", ("train", "test"))
    assert catalog.split_ids.tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert catalog.names[0] == "data/test-00000-of-00001/00000000"
    assert len(opened(tmp_path, include=("*train*.parquet",))) == 5
    assert len(opened(tmp_path, include=("*test*1",))) == 1
    assert len(opened(tmp_path / "data" / "{train,test}-00000-of-00001.parquet")) == 7


def test_columns_in_the_names_of_folders_are_read(tmp_path: Path) -> None:
    made = table(range(12)).append_column("split", [["train", "val", "train"] * 4])
    made = made.append_column("place", [["x/y", None, "z"] * 4])
    parquet.write_to_dataset(made, tmp_path / "in", partition_cols=["label", "split", "place"])
    assert (tmp_path / "in/label=0/split=train/place=x%2Fy").is_dir()
    columns = ManifestColumns(texts=("place",))
    catalog = opened(tmp_path / "in", columns)
    assert catalog.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert (catalog.split_names, catalog.split_ids.tolist()) == (("train", "val"), [0] * 4 + [1] * 4 + [0] * 4)
    assert rows_of(catalog.fields["place"])[1] == ["x/y"] * 4 + [""] * 4 + ["z"] * 4
    numbers = [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    assert [catalog.reader.read(index, "") for index in range(12)] == [png(number) for number in numbers]
    # A column of the files themselves takes precedence, and a folder that only some files are in is no column.
    for name in ("label=7/a", "label=7/kind=1/b"):
        write(tmp_path / "own" / f"{name}.parquet", table(range(3)))
    catalog = opened(tmp_path / "own")
    assert catalog.labels.tolist() == [0, 1, 2] * 2
    assert catalog.fields == {}


@pytest.mark.parametrize("form", ["stream", "file"])
def test_a_dataset_saved_to_disk_is_read(form: str, tmp_path: Path) -> None:
    made = table(range(6), NAMES)
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for name in ("data-00000-of-00001.arrow", "cache-1a2b.arrow"):
            with pa.OSFile(str(tmp_path / split / name), "wb") as sink:
                new = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
                with new(sink, made.schema) as writer:
                    writer.write_table(made, max_chunksize=4)
        (tmp_path / split / "state.json").touch()
    catalog = opened(tmp_path)
    assert (len(catalog), catalog.split_names, catalog.label_names) == (12, ("train", "test"), ("cat", "dog", "fox"))
    assert [catalog.reader.read(index, "") for index in range(6)] == [png(index) for index in range(6)]


def test_files_are_packed_whatever_their_names(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "tmp_b", "tmp/c", "cache-d")):
        write(tmp_path / f"{name}.parquet", table(range(number, number + 1)))
    assert list(opened(tmp_path).names) == ["a/00000000", "cache-d/00000000", "tmp_b/00000000", "tmp/c/00000000"]


@pytest.mark.skipif(not hasattr(pa, "binary_view"), reason="pip install 'pyarrow>=16'")
def test_views_of_bytes_and_strings_are_read(tmp_path: Path) -> None:
    """As Polars writes them by default."""
    made = pa.table({
        "image": pa.array([png(number) for number in range(4)], pa.binary_view()),
        "label": pa.array(["fox", "cat", None, "fox"], pa.string_view()),
        "text": pa.array(["a", "b" * 40, "c", ""], pa.string_view()),
    })  # fmt: skip
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as sink, pa.ipc.new_file(sink, made.schema) as writer:
        writer.write_table(made)
    for path in (tmp_path / "t.arrow", write(tmp_path / "t.parquet", made)):
        catalog = opened(path, ManifestColumns(texts=("text",)))
        assert [catalog.reader.read(index, "") for index in range(4)] == [png(index) for index in range(4)]
        assert (catalog.labels.tolist(), catalog.label_names) == ([1, 0, -1, 1], ("cat", "fox"))
        assert rows_of(catalog.fields["text"]) == ("text", ["a", "b" * 40, "c", ""])


def test_columns_have_the_roles_of_a_manifests_columns(tmp_path: Path) -> None:
    made = table(
        range(4), w=[0.5, 1.25, -3.0, 4.0], big=[2**53 + 1, 2, 3, 4], kind=["b", "a", None, "b"],
        split=["val"] * 3 + ["train"], yes=[True, False, True, True], boxes=[[1], [2], [3], [4]],
    )  # fmt: skip
    path = write(tmp_path / "x.parquet", made)
    catalog = opened(path, ManifestColumns(fields=("w", "big")))
    assert catalog.fields["w"].tolist() == [0.5, 1.25, -3.0, 4.0]
    assert catalog.fields["big"].tolist() == [2**53 + 1, 2, 3, 4]
    assert (catalog.split_names, catalog.split_ids.tolist()) == (("train", "val"), [1, 1, 1, 0])
    assert len(catalog.notes) == 1
    words = opened(path, ManifestColumns(labels=("kind",)))
    assert (words.labels.tolist(), words.label_names) == ([1, 0, -1, 1], ("a", "b"))
    lists = opened(path, ManifestColumns(fields=("boxes",), texts=("kind",)))
    assert rows_of(lists.fields["boxes"]) == ("ragged", [[1], [2], [3], [4]])
    assert rows_of(lists.fields["kind"]) == ("text", ["b", "a", "", "b"])
    several = opened(path, ManifestColumns(labels=("yes", "label")))
    assert several.labels.tolist() == [[1, 0], [0, 1], [1, 2], [1, 0]]
    for columns in ({"labels": ("boxes",)}, {"fields": ("kind",)}, {"labels": ("no",)}):
        with pytest.raises(SourceError) as caught:
            opened(path, ManifestColumns(**columns))
        assert caught.value.path == str(path)


def test_a_column_that_holds_no_labels_is_not_taken_for_them_by_its_name(tmp_path: Path) -> None:
    images = [{"bytes": png(number), "path": None} for number in range(3)]
    made = pa.table({"image": images, "label": images, "category": ["a", "b", "a"], "split": [b"x"] * 3})
    path = write(tmp_path / "x.parquet", made)
    catalog = opened(path, ManifestColumns(path="image"))
    assert (catalog.labels.tolist(), catalog.label_names, catalog.split_names) == ([0, 1, 0], ("a", "b"), ("all",))
    with pytest.raises(SourceError):
        opened(path, ManifestColumns(path="image", labels=("label",)))


def test_nulls_are_rejects_and_labels_of_minus_one(tmp_path: Path) -> None:
    images = [None, {"bytes": None, "path": "x.png"}, {"bytes": None, "path": None}, {"bytes": b"", "path": None}]
    images += [{"bytes": png(4), "path": None}, {"bytes": png(5)[:200], "path": None}]
    path = write(tmp_path / "x.parquet", pa.table({"image": images, "label": [0, 1, 2, 3, None, 5]}))
    report = h5pack.convert(path, tmp_path / "o.h5", **quick())
    assert (report.images, report.rejects) == (1, 5)
    with h5py.File(tmp_path / "o.h5") as file:
        assert file["labels"][()].tolist() == [-1]


def test_minus_one_is_no_label_if_the_classes_have_names(tmp_path: Path) -> None:
    for features, labels in ((NAMES, [1, -1, 1, -1]), (None, [1, 0, 1, 0])):
        made = table(range(4)).set_column(1, "label", pa.array([1, -1, 1, None if features else -1]))
        catalog = opened(write(tmp_path / "x.parquet", described(made, features)))
        assert catalog.labels is not None
        assert catalog.labels.tolist() == labels


def test_the_column_of_images_is_found_or_asked_for(tmp_path: Path) -> None:
    data = [png(0), png(1)]
    for columns, features, found in (
        ({"data": data}, None, "data"),
        ({"x": pa.array(data, pa.large_binary())}, None, "x"),
        ({"x": data, "image": data}, None, "image"),
        ({"image": data, "second": data}, {"second": {"_type": "Image"}, "image": {"_type": "Value"}}, "second"),
        ({"a": data, "b": data}, None, None),
        ({"a": [1, 2], "text": ["x", "y"]}, None, None),
    ):
        path = write(tmp_path / "x.parquet", described(pa.table(columns), features))
        if found is not None:
            assert opened(path).about == f"images {found!r}"
            continue
        with pytest.raises(SourceError) as caught:
            opened(path)
        # Without a column of images, path_column cannot help.
        assert caught.value.parameters == (("path_column",) if "a" in columns and "b" in columns else ())
        for column in ("text", "nothing"):
            with pytest.raises(SourceError):
                opened(path, ManifestColumns(path=column))
    path = write(tmp_path / "x.parquet", pa.table({"a": data, "b": data}))
    assert opened(path, ManifestColumns(path="b")).about == "images 'b'"


def test_row_groups_must_fit_into_memory_whatever_the_name_of_the_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "available_memory", lambda: 9_000)
    for name in ("image", "image.bytes"):
        data = [np.random.default_rng(seed).bytes(1_200) for seed in range(4)]
        path = write(tmp_path / "x.parquet", pa.table({name: data}))
        with pytest.raises(SourceError, match="row group takes"):
            opened(path, ManifestColumns(path=name))


def test_columns_may_be_in_any_order(tmp_path: Path) -> None:
    for name, columns in (("a", ["image", "label"]), ("b", ["label", "image"])):
        made = pa.table({"image": [png(0), png(1)], "label": [3, 4]})
        write(tmp_path / f"{name}.parquet", made.select(columns))
    catalog = opened(tmp_path)
    assert catalog.labels is not None
    assert catalog.labels.tolist() == [3, 4] * 2
    assert [catalog.reader.read(row, "") for row in range(4)] == [png(0), png(1)] * 2


def test_files_that_differ_are_errors(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table(range(2)))
    for other in (pa.table({"image": [1]}), table(range(2), more=[1, 2]), pa.table({"x": [png(0)]})):
        write(tmp_path / "b.parquet", other)
        with pytest.raises(SourceError) as caught:
            opened(tmp_path)
        assert caught.value.path == str(tmp_path / "b.parquet")
    for name, classes in (("a", ["x", "y", "z"]), ("b", ["y", "x", "z"])):
        features = NAMES | {"label": {"_type": "ClassLabel", "names": classes}}
        write(tmp_path / "d" / f"{name}.parquet", table(range(4), features))
    with pytest.raises(SourceError) as caught:
        opened(tmp_path / "d")
    assert caught.value.path == str(tmp_path / "d" / "b.parquet")
    labels = {"label": {"_type": "ClassLabel", "names": ["one"]}}
    for number in range(2):
        write(tmp_path / "c" / f"{number}.parquet", table(range(number + 1), labels))
    # Row 1 of the second file has label 1.
    with pytest.raises(SourceError, match="1/00000001"):
        opened(tmp_path / "c")


def test_damaged_files_are_errors_or_rejects(tmp_path: Path) -> None:
    data = write(tmp_path / "x.parquet", table(range(9))).read_bytes()
    for damaged in (b"", data[:100], data[:-30], b"PAR1" + bytes(100)):
        (tmp_path / "x.parquet").write_bytes(damaged)
        with pytest.raises(SourceError):
            opened(tmp_path / "x.parquet")
    for start in range(4, len(data), len(data) // 12):
        (tmp_path / "x.parquet").write_bytes(data[:start] + b"\xff" * 40 + data[start + 40 :])
        try:
            catalog = opened(tmp_path / "x.parquet")
        except H5PackError:
            continue
        for index, name in enumerate(catalog.names):
            with contextlib.suppress(RejectedImageError):
                catalog.reader.survey(index, name, MAX_PIXELS)
    (tmp_path / "x.parquet").write_bytes(data)
    with pytest.raises(NoImagesError):
        opened(tmp_path / "x.parquet", exclude=("*",))


@pytest.mark.parametrize("column", ["image", "label", "bytes"])
def test_names_of_columns_that_are_not_utf_8_are_damage(tmp_path: Path, column: str) -> None:
    path = tmp_path / "x.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table(range(2)).schema) as writer:
        writer.write_table(table(range(2)))
    path.write_bytes(path.read_bytes().replace(column.encode(), b"\xff" + column[1:].encode()))
    for columns in (ManifestColumns(), ManifestColumns(path="image")):
        with pytest.raises(SourceError) as caught:
            opened(path, columns)
        assert caught.value.path == str(path)


def test_a_lack_of_memory_rejects_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", table(range(9)))
    fails = Mock(side_effect=pa.lib.ArrowMemoryError("malloc failed"))
    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", fails)
    with pytest.raises(SourceError, match="memory"):
        h5pack.convert(path, tmp_path / "o.h5", **quick())
    assert not (tmp_path / "o.h5").exists()


def test_deeply_nested_features_are_ignored(tmp_path: Path) -> None:
    made = table(range(3)).replace_schema_metadata({"huggingface": "[" * 100_000})
    assert len(opened(write(tmp_path / "x.parquet", made))) == 3


def test_a_replaced_file_is_an_error(tmp_path: Path) -> None:
    catalog = opened(write(tmp_path / "x.parquet", table(range(9))))
    reader = pickle.loads(pickle.dumps(catalog.reader))
    assert reader.read(0, "") == png(0)
    os.replace(write(tmp_path / "y.parquet", table(range(9))), tmp_path / "x.parquet")
    for each in (reader, catalog.reader):
        with pytest.raises(SourceError):
            each.read(8, "")


def test_an_interrupted_conversion_of_a_parquet_file_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", table(range(24)))
    settings = quick(chunk_rows=2)
    h5pack.convert(path, tmp_path / "whole.h5", **settings)
    announce, calls = tables.TableReader.announce, itertools.count()

    def failing(*arguments: Any) -> None:
        announce(*arguments) if next(calls) < 2 else interrupt()

    monkeypatch.setattr(tables.TableReader, "announce", failing)
    with pytest.raises(KeyboardInterrupt):
        h5pack.convert(path, tmp_path / "o.h5", **settings)
    monkeypatch.undo()
    before = path.stat()
    os.utime(path, ns=(0, 7))
    with pytest.raises(ResumeError):
        h5pack.convert(path, tmp_path / "o.h5", resume=True, **settings)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert h5pack.convert(path, tmp_path / "o.h5", resume=True, **settings).resumed_rows > 0
    assert (tmp_path / "o.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_each_row_group_is_read_once_for_announced_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = opened(write(tmp_path / "x.parquet", table(range(20)), row_group_size=5)).reader
    assert reader.groups(np.array([0, 4, 5, 19])).tolist() == [0, 0, 1, 2]
    loads: list[tuple[int, int]] = []
    load = tables.TableReader._load
    monkeypatch.setattr(tables.TableReader, "_load", lambda self, *key: loads.append(key) or load(self, *key))
    announced = [0, 19, 1, 18, 5, 2]
    reader.announce(announced)
    assert [reader.read(index, "") for index in announced] == [png(index) for index in announced]
    assert loads == [(0, 0), (0, 3), (0, 1)]
    monkeypatch.setattr(tables, "_TASK_ROWS", 2)
    assert reader.groups(np.arange(5)).tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("broken", [False, True])
def test_a_missing_or_broken_pyarrow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    path = write(tmp_path / "x.parquet", table(range(2)))
    if broken:
        break_package("pyarrow", tmp_path, monkeypatch)
    else:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SourceError, match=r"pip install pyarrow"):
        opened(path)
