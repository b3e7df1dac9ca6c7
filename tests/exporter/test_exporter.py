"""An export gives back what was packed, and a conversion of it the same pack again."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps

import h5pack
from h5pack import cli
from h5pack.errors import (
    DamagedRowsError,
    H5PackError,
    NoImagesError,
    OptionsError,
    OutputExistsError,
    PackChangedError,
    PackFormatError,
    ReadError,
    SourceError,
)
from h5pack.exporter import exporter
from h5pack.exporter.exporter import ExportReport, export
from h5pack.exporter.image_files import SUFFIXES, open_rows
from h5pack.format.checksums import row_checksums
from h5pack.read.hdf5 import list_datasets
from h5pack.sources.hdf5_catalog import HDF5Datasets
from tests.crashing import leftovers
from tests.exporter.folders import files_of, flip, pixels_of, stopped, tree
from tests.makers import (
    FIELDS,
    annotated_images,
    class_folders,
    expected,
    flat_folder,
    hdf5_file,
    numbers,
    pair_folders,
    pixels,
    quick,
    save,
    split_folders,
    write_lines,
)
from tests.pack.test_convert_hdf5 import LABELS, PIXELS, ROWS, STORED, write
from tests.read.encoded_files import decoded, encode, jpegs, kinds, write_encoded


def pack_again(report: ExportReport, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Path:
    """Run the command that the report names."""
    monkeypatch.chdir(folder)
    program, *arguments = shlex.split(report.again)
    assert program == "h5pack"
    assert cli.main([*arguments, "--workers", "1", "--quiet", *more]) == 0
    return folder / "again.h5"


def content(path: Path) -> dict[str, Any]:
    """All datasets of a pack, and the names of classes and columns."""
    with h5py.File(path) as file:
        names = [name for name in list_datasets(file) if not name.startswith("checksums/chunks/")]
        found: dict[str, Any] = {name: file[name][()].tolist() for name in names}
        if "labels" in file:
            found["classes"] = {key: value.tolist() for key, value in file["labels"].attrs.items()}
        found["layout"] = file["images"].attrs["h5pack_layout"] if "images" in file else ""
    found["filenames"] = [name.decode().rpartition(".")[0] for name in found["filenames"]]
    return found


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A pack of two classes of 5 and 4 images, from the folder ``in``."""
    h5pack.convert(class_folders(tmp_path / "in", {"x": 5, "y": 4}), tmp_path / "a.h5", **quick(order="sorted"))
    return tmp_path / "a.h5"


def require_refused(pack: Path, out: Path, **keywords: Any) -> None:
    with pytest.raises(OutputExistsError):
        export(pack, out, **quick(**keywords))


SOURCES: dict[str, Callable[[Path], Path]] = {
    "splits": lambda root: split_folders(
        root, {"train": {"cat": 9, "dog": 8}, "val": {"cat": 3, "owl": 2}, "test": {"dog": 4}}
    ),
    "classes": lambda root: class_folders(root, {"cat": 7, "dog": 6, "nothing": 0}),
    "flat": lambda root: flat_folder(root, 11),
    "deep classes": lambda root: save(class_folders(root, {"a": 4, "b": 3}) / "a" / "a" / "deep" / "x.webp").parents[3],
    "an unlabeled split": lambda root: flat_folder(split_folders(root, {"train": {"x": 5, "y": 4}}) / "test", 3).parent,
    "numbers as classes": lambda root: class_folders(root, {"10": 3, "9": 4}),
    "classes that look like splits": lambda root: split_folders(root, {"train": {"test": 2, "val": 1}}),
    "names with spaces and more": lambda root: save(
        class_folders(root, {" a b": 3, "caf\u00e9 \u732b": 2}) / " a b" / "x, \"y\" 'z'.jpg"
    ).parents[1],
}


PACKED: dict[str, dict[str, Any]] = {
    "gray": {"layout": "nchw", "mode": "gray"},
    "sorted": {"compression": "gzip", "order": "sorted", "chunk_rows": 4},
}


@pytest.mark.parametrize(
    ("source", "packed"), [*((source, "") for source in SOURCES), *(("splits", how) for how in PACKED)]
)
def test_an_export_restores_images_and_converts_to_the_same_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, packed: str
) -> None:
    settings = PACKED.get(packed, {})
    root = SOURCES[source](tmp_path / "in")
    h5pack.convert(root, tmp_path / "a.h5", **quick(**settings))
    report = export(tmp_path / "a.h5", tmp_path / "out", **quick())
    before, after = files_of(root), files_of(tmp_path / "out")
    assert set(before) == set(after)
    assert report.files == report.rows == len(before)
    assert report.bytes == sum(path.stat().st_size for path in after.values())
    mode = "L" if settings.get("mode") == "gray" else "RGB"
    for name, path in before.items():
        assert np.array_equal(pixels_of(after[name]), np.squeeze(expected(path, mode=mode))), name
    assert (report.ok, report.renamed_files, report.lost) == (True, 0, ())
    from_folders = source in ("classes", "numbers as classes", "names with spaces and more")
    assert ("manifest.csv" in report.again) != from_folders
    assert content(pack_again(report, tmp_path, monkeypatch)) == content(tmp_path / "a.h5")


MANIFESTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "words and no label": (
        ["path,label,split", "a.jpg,cat,train", "b.jpg,,train", "c.jpg,dog,train", "d.jpg,,val"],
        {},
    ),
    "integers": (["path,label", "a.jpg,7", "b.jpg,-3", "c.jpg,123456789012", "d.jpg,-1"], {}),
    "a table": (
        ["path,x,y,z,part", "a.jpg,1,0,255,u", "b.jpg,0,1,17,v", "c.jpg,1,1,0,u"],
        {"label_columns": ("x", "y", "z"), "split_column": "part"},
    ),
    "fields": (
        ["path,label,weight,id", "a.jpg,u,0.1,3", "b.jpg,v,nan,-4", "c.jpg,u,1e-300,5", "d.jpg,v,2.0,9007199254740993"],
        {"field_columns": ("weight", "id")},
    ),
    "no labels": (["path,split", "a.jpg,train", "sub/b.jpg,val", "sub/deep/c.jpg,val"], {}),
    "other splits": (["path,label,split", "a.jpg,u,fold2", "b.jpg,v,fold1", "c.jpg,u,fold1", "d.jpg,v,fold2"], {}),
    "all in one odd split": (["path,label,split", "a.jpg,u,odd", "b.jpg,v,odd"], {}),
    "path parts": (["path,label,split", "../up.jpg,u,train", "x/../b.jpg,v,val", "./.hidden/c.jpg,u,val"], {}),
}


@pytest.mark.parametrize("settings", [{}, {"keep": "jpeg"}], ids=str)
def test_exported_fields_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    records = annotated_images(tmp_path / "in", 9)
    for record, text in zip(records, ["", "a\rb", 'x, "y"\r\n', " \t ", "[1]", "雪", "#", "'", "\\n"], strict=True):
        record["caption"] = text
        record["captions"].append(text)
    write_lines(tmp_path / "in" / "list.jsonl", records)
    h5pack.convert(tmp_path / "in" / "list.jsonl", tmp_path / "a.h5", **quick(**FIELDS | settings))
    report = export(tmp_path / "a.h5", tmp_path / "out", **quick())
    assert report.lost == ()
    assert export(tmp_path / "a.h5", tmp_path / "out", **quick(resume=True)).already_complete
    before, after = content(tmp_path / "a.h5"), content(pack_again(report, tmp_path, monkeypatch))
    assert len([name for name in before if name.startswith("fields/")]) == 11
    np.testing.assert_equal(after, before)


@pytest.mark.parametrize(
    ("packed", "lost"), [({}, ()), ({"order": "sorted"}, ()), ({"seed": 1}, ("the order of rows",))], ids=str
)
def test_packing_the_folders_of_an_export_loses_only_an_order_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: dict[str, Any], lost: tuple[str, ...]
) -> None:
    split_folders(tmp_path / "in", {"train": {"a": 9, "none": 0, "z": 8}, "val": {"z": 7}})
    save(tmp_path / "in" / "train" / "a" / "deep" / "0.png", 1)
    save(tmp_path / "in" / "train" / "a.b" / "0.png", 2)
    for root, kind in (("in", "splits"), ("in/train", "classes")):
        h5pack.convert(tmp_path / root, tmp_path / f"{kind}.h5", **quick(source_kind=kind, **packed))
        report = export(tmp_path / f"{kind}.h5", tmp_path / "out", **quick(overwrite=True))
        assert (report.lost, f"--source {kind}" in report.again) == (lost, True)
        before = content(tmp_path / f"{kind}.h5")
        again = content(pack_again(report, tmp_path, monkeypatch, "--overwrite"))
        assert (again == before, sorted(again["filenames"]) == sorted(before["filenames"])) == (not lost, True)


def test_what_the_manifest_loses_of_lists_is_reported(tmp_path: Path) -> None:
    large = {"large/data": np.zeros((9, 999)), "large/offsets": np.array([0, 4, 9])}
    short = {"short/data": np.arange(3, dtype=np.int16), "short/offsets": np.array([0, 1, 3])}
    source = hdf5_file(tmp_path / "f.h5", images=PIXELS[:2], **large, **short)
    report = export(source, tmp_path / "out", **quick(fields=("large", "short")))
    assert [name for line in report.lost for name in ("large", "short") if name in line] == ["large", "short"]
    assert "on average 4,495 numbers" in report.lost[0]
    assert "[1, 2]" in (tmp_path / "out" / "manifest.csv").read_text()


@pytest.mark.parametrize("source", MANIFESTS)
def test_an_exported_manifest_makes_the_same_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    lines, settings = MANIFESTS[source]
    (tmp_path / "in" / "x").mkdir(parents=True)
    for number, line in enumerate(lines[1:]):
        save(tmp_path / "in" / line.split(",")[0], number)
    (tmp_path / "in" / "list.csv").write_text("\n".join(lines) + "\n")
    h5pack.convert(tmp_path / "in" / "list.csv", tmp_path / "a.h5", **quick(**settings))
    report = export(tmp_path / "a.h5", tmp_path / "out", **quick())
    assert report.files == len(lines) - 1
    assert report.lost == ()
    before, after = content(tmp_path / "a.h5"), content(pack_again(report, tmp_path, monkeypatch))
    before.pop("filenames"), after.pop("filenames")
    np.testing.assert_equal(after, before)


def test_the_report_lists_what_a_conversion_would_lose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, vectors = (PIXELS[:9] / 255).astype(np.float32), np.arange(18.0).reshape(9, 2) / 7
    fields = {"vectors": vectors, "masks": np.zeros((9, 40, 40), np.uint8)}
    with h5py.File(hdf5_file(tmp_path / "f.h5", images=images, labels=np.arange(9) % 2, **fields), "a") as file:
        file["labels"].attrs["classes"] = ["zebra", "ant", "7"]
    report = export(tmp_path / "f.h5", tmp_path / "out", **quick(fields=("vectors", "masks")))
    for what, item in zip(("names of classes", "'masks'", "'vectors'", "float32"), report.lost, strict=True):
        assert what in item
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["7", "ant", "manifest.csv", "zebra"]
    with h5py.File(pack_again(report, tmp_path, monkeypatch)) as file:
        assert file["labels"][()].tolist() == [0, 1] * 4 + [0]
        assert np.array_equal(file["fields/vectors.1"][()], vectors[:, 1])
        assert np.array_equal(file["images"][()], np.rint(images.astype(np.float64) * 255))
    with h5py.File(tmp_path / "f.h5", "a") as file:
        file["labels"].attrs["classes"] = ["zebra", "ant", "bee"]
        file.create_dataset("splits/name", data=np.array([b"b", b"a", b"none"]))
        file["splits/rows"] = [[0, 5], [5, 9], [9, 9]]
    lost = export(tmp_path / "f.h5", tmp_path / "other", **quick()).lost
    for what, item in zip(("'bee'", "order of classes", "'none'", "order of splits", "float32"), lost, strict=True):
        assert what in item


def test_a_split_in_several_ranges_of_rows_loses_the_order_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = {"a": ("train", "val"), "b": ("train", "val"), "c": ("val", "val")}
    for name, some in splits.items():
        for number, split in enumerate(some):
            (tmp_path / name / split).mkdir(parents=True, exist_ok=True)
            save(tmp_path / name / split / f"{name}{number}.png", 9 * ord(name) + number)
    h5pack.convert(tmp_path / "a", tmp_path / "p.h5", **quick(source_kind="splits"))
    for name, several in (("c", False), ("b", True)):  # c only lengthens the last range
        h5pack.append(tmp_path / "p.h5", tmp_path / name, **quick(source_kind="splits"))
        report = export(tmp_path / "p.h5", tmp_path / f"out {name}", **quick())
        before, after = content(tmp_path / "p.h5"), content(pack_again(report, tmp_path, monkeypatch, "--overwrite"))
        assert np.array_equal(after["images"], before["images"]) == (not several)
        assert ["order of rows" in item for item in report.lost] == [True] * several


def test_changes_of_dtypes_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [
        np.arange(4, dtype=np.int64), np.arange(4) / 8, np.arange(4, dtype=np.uint64) + 2**63, np.arange(4) > 1,
        np.arange(4, dtype=np.uint8), np.arange(4, dtype=np.float32), np.arange(4, dtype=np.uint64),
    ]  # fmt: skip
    fields = {f"x{number}": values for number, values in enumerate(columns)}
    hdf5_file(tmp_path / "f.h5", images=PIXELS[:4], **fields)
    report = export(tmp_path / "f.h5", tmp_path / "out", **quick(fields=[*fields]))
    with h5py.File(pack_again(report, tmp_path, monkeypatch)) as file:
        again = {name: file[f"fields/{name}"][()] for name in fields}
    for name, values in fields.items():
        assert np.array_equal(again[name], values)
        reported = [str(values.dtype) in item for item in report.lost if repr(name) in item]
        assert reported == [True] * (again[name].dtype != values.dtype)


@pytest.mark.parametrize(("stored", "workers"), [("CelebA recipe", 1), ("cut and gzip", 2), ("encoded", 1)])
def test_any_hdf5_file(tmp_path: Path, stored: str, workers: int) -> None:
    source = write(tmp_path / "f.h5", STORED[stored])
    report = export(source, tmp_path / "out", images="x", num_workers=workers)
    assert report.files == ROWS
    for row in range(ROWS):
        assert np.array_equal(pixels_of(tmp_path / "out" / str(LABELS[row]) / f"{row:06d}.png"), PIXELS[row])


COLOR = pixels(1)
ALPHA = np.dstack([COLOR, pixels(2)[:, :, 0]])
GRAY = COLOR[:, :, 0]
# A row, the options of `export`, and the pixels of its PNG.
FORMS: dict[str, tuple[npt.NDArray[Any], dict[str, Any], npt.NDArray[Any]]] = {
    "alpha": (ALPHA, {}, ALPHA),
    "gray and alpha first": (COLOR[:, :, :2].transpose(2, 0, 1), {}, COLOR[:, :, :2]),
    "gray": (GRAY, {}, GRAY),
    "16-bit gray": (GRAY.astype(">u2") * 259, {}, GRAY.astype(np.uint16) * 259),
    "16-bit gray to 8 bits": (GRAY.astype("<u2") * 16, {"value_range": (0, 4080)}, GRAY),
    "16-bit color": (COLOR.astype("<u2") * 256 + 77, {}, COLOR),
    "truth": (GRAY > 99, {}, np.uint8(255) * (GRAY > 99)),
    "normalized": (COLOR / 127.5 - 1, {"value_range": (-1, 1)}, COLOR),
    "three channels of three": (COLOR[:3], {"channel_axis": "first"}, COLOR[:3].transpose(1, 2, 0)),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_every_form(tmp_path: Path, form: str) -> None:
    row, settings, wanted = FORMS[form]
    settings = quick(images="pictures", **settings)
    hdf5_file(tmp_path / "f.h5", pictures=np.stack([row, row]))
    report = export(tmp_path / "f.h5", tmp_path / "out", **settings)
    assert np.array_equal(pixels_of(tmp_path / "out" / "000001.png"), wanted)
    assert bool(report.lost) == (row.dtype.itemsize > 1 and form != "16-bit gray")
    report = export(tmp_path / "f.h5", tmp_path / "jpegs", format="jpeg", quality=70, **settings)
    with Image.open(tmp_path / "jpegs" / "000000.jpg") as image:
        assert (image.format, image.size) == ("JPEG", wanted.shape[1::-1])
        assert image.mode == ("RGB" if wanted.ndim == 3 and wanted.shape[2] > 2 else "L")
    assert len(report.lost) == 1


def test_encoded_rows_of_the_wanted_format_are_copied(tmp_path: Path) -> None:
    rows = [*kinds().values(), encode(pixels(3, (31, 9)), "PNG")]
    write_encoded(tmp_path / "f.h5", rows)
    formats = [Image.open(io.BytesIO(data)).format for data in rows]
    for kind, (suffix, *_) in SUFFIXES.items():
        report = export(tmp_path / "f.h5", tmp_path / kind, **quick(format=kind, labels=""))
        assert report.copied_files == formats.count(kind.upper()) > 5
        for row, data in enumerate(rows):
            path = tmp_path / kind / f"{row:06d}{suffix}"
            if formats[row] == kind.upper():
                assert path.read_bytes() == data
            elif kind == "png":
                assert np.array_equal(pixels_of(path), decoded(data))
    write_encoded(tmp_path / "jpegs.h5", jpegs(3))
    assert export(tmp_path / "jpegs.h5", tmp_path / "out", **quick(format="jpeg")).lost == ()


@pytest.mark.parametrize(("format", "is_lost"), [("jpeg", False), ("png", True)])
def test_jpeg_files_that_packing_again_would_encode_again_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, is_lost: bool
) -> None:
    h5pack.convert(flat_folder(tmp_path / "in", 3), tmp_path / "a.h5", **quick(keep="jpeg"))
    report = export(tmp_path / "a.h5", tmp_path / "out", **quick(format=format))
    again = pack_again(report, tmp_path, monkeypatch)
    assert (
        not np.array_equal(h5pack.H5Dataset(again)[0].image, h5pack.H5Dataset(tmp_path / "a.h5")[0].image)
    ) == is_lost
    assert len(report.lost) == is_lost


def test_damaged_rows_are_reported_and_not_exported(tmp_path: Path) -> None:
    source = split_folders(tmp_path / "in", {"train": {"x": 20, "y": 11}, "test": {"x": 3}})
    h5pack.convert(source, tmp_path / "a.h5", **quick(chunk_rows=7))
    with h5py.File(tmp_path / "a.h5") as file:
        names = [name.decode() for name in file["filenames"]]
        places = [file["images"].id.get_chunk_info(chunk).byte_offset for chunk in range(5)]
    flip(tmp_path / "a.h5", places[1] + 3 * 20 * 14 * 3 + 5)
    flip(tmp_path / "a.h5", places[4] + 17)
    report = export(tmp_path / "a.h5", tmp_path / "out", num_workers=2)
    assert [(row.row, row.name) for row in report.damaged] == [(10, names[10]), (28, names[28])]
    assert (report.rows, report.files, report.ok) == (34, 32, False)
    missing = {names[10].removesuffix(".jpg"), names[28].removesuffix(".jpg")}
    assert set(files_of(tmp_path / "out")) == set(files_of(source)) - missing
    table = (tmp_path / "out" / "manifest.csv").read_text()
    assert table.count("\n") == 33
    assert not any(f"{name}.png" in table for name in missing)
    assert f"row 10 ({names[10]})" in report.damage_text()
    resumed = export(tmp_path / "a.h5", tmp_path / "out", **quick(resume=True))
    assert (resumed.already_complete, resumed.damaged) == (True, report.damaged)


def test_rows_that_do_not_decode_or_lie_outside_the_range(tmp_path: Path) -> None:
    rows = jpegs(4)
    rows[1], rows[2] = rows[1][:300], b""
    write_encoded(tmp_path / "f.h5", rows)
    report = export(tmp_path / "f.h5", tmp_path / "out", **quick(format="jpeg"))
    assert {row.row: row.reason for row in report.damaged} == {1: "truncated", 2: "the image is empty (0 bytes)"}
    values = np.random.default_rng(0).random((5, 9, 9, 3)).astype(np.float32)
    values[3, 2, 2, 1] = np.nan
    source = hdf5_file(tmp_path / "g.h5", images=values)
    assert [row.row for row in export(source, tmp_path / "other", **quick()).damaged] == [3]
    with pytest.raises(DamagedRowsError) as caught:
        export(hdf5_file(source, images=values + 5), tmp_path / "none", **quick())
    assert (caught.value.rows, caught.value.parameters) == ((0, 1, 2, 3, 4), ("value_range",))
    assert leftovers(tmp_path) == {"f.h5", "g.h5", "other", "out"}


def test_rows_that_are_too_large_for_jpeg_are_reported(tmp_path: Path) -> None:
    write_encoded(tmp_path / "f.h5", [encode(np.zeros((2, side), np.uint8), "PNG") for side in (65_501, 65_500)])
    assert [row.row for row in export(tmp_path / "f.h5", tmp_path / "out", **quick(format="jpeg")).damaged] == [0]
    assert export(tmp_path / "f.h5", tmp_path / "png", **quick(format="png")).ok


def test_a_split_and_a_limit(tmp_path: Path) -> None:
    source = split_folders(tmp_path / "in", {"train": {"x": 20, "y": 20}, "val": {"x": 6}, "test": {"y": 5}})
    h5pack.convert(source, tmp_path / "a.h5", **quick(order="sorted"))
    report = export(tmp_path / "a.h5", tmp_path / "out", **quick(splits=("test", "val")))
    assert report.splits == {"val": 6, "test": 5}
    assert set(files_of(tmp_path / "out")) == {name for name in files_of(source) if not name.startswith("train")}
    report = export(tmp_path / "a.h5", tmp_path / "few", **quick(splits=("train",), limit=4))
    assert report.splits == {"train": 4}
    assert set(files_of(tmp_path / "few")) == {f"train/{row}" for row in ("x/00000", "x/00010", "y/00000", "y/00010")}
    with pytest.raises(OptionsError) as caught:
        export(tmp_path / "a.h5", tmp_path / "no", **quick(splits=("val", "no")))
    assert caught.value.parameters == ("splits='no'",)


def test_each_chunk_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "f.h5", STORED["cut and gzip"])
    opened = open_rows(source, HDF5Datasets())
    monkeypatch.setattr(exporter, "open_rows", lambda *_: opened)
    export(source, tmp_path / "out", **quick())
    with h5py.File(source) as file:
        assert opened.reader.engine.snapshot().bytes_read == file["x"].id.get_storage_size()


def test_existing_files_are_replaced_only_if_an_export_wrote_them(pack: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export(pack, f"{out}/", **quick())
    require_refused(pack, out)
    # The manifest has the names of the originals, but an export does not write these.
    originals = [
        Path(shutil.copy(path, out / path.relative_to(tmp_path / "in"))) for path in (tmp_path / "in").rglob("*.jpg")
    ]
    require_refused(pack, out, overwrite=True)
    for path in originals:
        path.unlink()
    assert export(pack, out, **quick(overwrite=True, format="jpeg")).files == 9
    assert {path.suffix for path in out.rglob("*") if path.is_file()} == {".jpg", ".csv"}
    (out / "notes.txt").write_text("mine")
    require_refused(pack, out, overwrite=True)
    (out / "notes.txt").unlink()
    (tmp_path / "link").symlink_to(out)
    assert export(pack, tmp_path / "link", **quick(overwrite=True)).path == str(out)
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "b.partial").mkdir()
    (tmp_path / "c.replaced").mkdir()
    for other in (tmp_path / "in", pack, tmp_path / "b", tmp_path / "c"):
        require_refused(pack, other, overwrite=True)
    for wrong, named in (("/", "/"), (tmp_path / "none" / "c", str(tmp_path / "none"))):
        with pytest.raises(SourceError) as caught:
            export(pack, wrong, **quick())
        assert caught.value.path == named
    # A source folder with a table of its own is no export, even if the table lists all files.
    names = sorted(str(path.relative_to(tmp_path / "in")) for path in (tmp_path / "in").rglob("*.*"))
    table = tmp_path / "in" / "manifest.csv"
    table.write_text("\n".join(["path,split,label", *(f"{name},all,0" for name in names)]))
    require_refused(pack, tmp_path / "in", overwrite=True)
    table.unlink()
    assert len(files_of(tmp_path / "in")) == len(names) == 9
    assert leftovers(tmp_path) == {"a.h5", "b.partial", "c.replaced", "in", "link", "out"}


@pytest.mark.parametrize("ending", ["", ".partial.lock"])
def test_a_folder_of_another_user_in_a_shared_folder_is_an_error_before_any_work(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    (tmp_path / f"out{ending}").mkdir()
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(SourceError):
        export(pack, tmp_path / "out", **quick())


@pytest.mark.parametrize("failure", [ReadError("no disk"), PackChangedError("replaced")])
def test_storage_errors_have_no_advice_for_conversions(
    failure: H5PackError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hdf5_file(tmp_path / "f.h5", images=PIXELS)
    monkeypatch.setattr("h5pack.read.engine.Engine.read", Mock(side_effect=failure))
    with pytest.raises(type(failure)) as caught:
        export(tmp_path / "f.h5", tmp_path / "out", **quick())
    assert caught.value.parameters == ()


def test_resuming_a_complete_export_changes_nothing(pack: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = export(pack, out, **quick(resume=True))
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again = export(pack, out, **quick(resume=True))
    assert (again.already_complete, again.files, again.bytes, again.ok) == (True, done.files, done.bytes, True)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == times
    for other in ({"limit": 3}, {"labels": ""}, {"format": "jpeg"}):
        require_refused(pack, out, resume=True, **other)
    next(out.rglob("*.png")).unlink()
    require_refused(pack, out, resume=True)
    assert leftovers(tmp_path) == {"a.h5", "in", "out"}


def test_an_unfinished_export_is_continued_only_on_request(pack: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped(pack, out, **quick())
    with pytest.raises(OutputExistsError) as caught:
        export(pack, out, **quick())
    assert caught.value.parameters == ("resume=True", "overwrite=True")
    report = export(pack, out, **quick(resume=True))
    assert (report.resumed_files, report.files) == (9, 9)
    # Without resume, nothing of the unfinished export is kept.
    stopped(pack, out, **quick(overwrite=True))
    report = export(pack, out, **quick(overwrite=True))
    assert (report.resumed_files, report.files) == (0, 9)
    assert leftovers(tmp_path) == {"a.h5", "in", "out"}


@pytest.mark.parametrize("keywords", [{"limit": 7}, {"labels": ""}, {"format": "jpeg"}, {"splits": "train"}, {}])
def test_resumes_with_other_options_or_a_changed_file_are_fresh_exports(tmp_path: Path, keywords: Any) -> None:
    source = split_folders(tmp_path / "in", {"train": {"x": 4, "y": 3}, "val": {"x": 2}})
    h5pack.convert(source, tmp_path / "a.h5", **quick())
    stopped(tmp_path / "a.h5", tmp_path / "out", **quick())
    if not keywords:
        save(source / "train" / "x" / "00002.jpg", 77)
        h5pack.convert(source, tmp_path / "a.h5", **quick(overwrite=True))
    report = export(tmp_path / "a.h5", tmp_path / "out", **quick(resume=True, **keywords))
    assert keywords or (report.resumed_files, report.files) == (8, 9)
    export(tmp_path / "a.h5", tmp_path / "fresh", **quick(**keywords))
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_an_export_with_a_turned_or_colored_file_is_not_complete(tmp_path: Path) -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(1, 8, 8)
    h5pack.convert(hdf5_file(tmp_path / "in.h5", images=pixels), tmp_path / "a.h5", **quick(mode="gray"))
    export(tmp_path / "a.h5", tmp_path / "out", **quick())
    (path,) = (tmp_path / "out").rglob("*.png")
    whole, turned, colored = path.read_bytes(), Image.Exif(), Image.fromarray(pixels[0])
    turned[0x0112] = 6
    colored = colored.convert("P")
    colored.putpalette([255, 0, 0] * 256)
    for image, settings in ((Image.open(io.BytesIO(whole)), {"exif": turned}), (colored, {})):
        image.save(path, **settings)
        assert np.array_equal(Image.open(path), pixels[0])
        with pytest.raises(OutputExistsError):
            export(tmp_path / "a.h5", tmp_path / "out", **quick(resume=True))
    path.write_bytes(whole)
    assert export(tmp_path / "a.h5", tmp_path / "out", **quick(resume=True)).already_complete


def test_files_and_rows_that_are_damaged_by_the_time_they_are_resumed(pack: Path, tmp_path: Path) -> None:
    export(pack, tmp_path / "whole", **quick())
    stopped(pack, tmp_path / "out", **quick())
    written = sorted((tmp_path / "out.partial").rglob("*.png"))
    written[0].unlink()
    written[1].write_bytes(written[1].read_bytes()[:-1])
    flip(written[2], 40)
    written[3].write_bytes(b"")
    assert export(pack, tmp_path / "out", **quick(resume=True)).resumed_files == 5
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    stopped(pack, tmp_path / "other", **quick())
    (tmp_path / "other.partial" / "x" / "00002.png").unlink()
    times = pack.stat()
    with h5py.File(pack) as file:
        place = file["images"].id.get_chunk_info(0).byte_offset
    flip(pack, place + 2 * 20 * 14 * 3)
    # The modification time stays, as when a disk loses data.
    os.utime(pack, ns=(times.st_atime_ns, times.st_mtime_ns))
    report = export(pack, tmp_path / "other", **quick(resume=True))
    assert [row.row for row in report.damaged] == [2]
    assert (report.files, report.resumed_files, report.splits) == (8, 8, {"all": 8})


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_that_appear_during_an_export_are_kept(pack: Path, tmp_path: Path, overwrite: bool) -> None:
    out = tmp_path / "out"
    if overwrite:
        export(pack, out, **quick())

    def disturb(*_: object) -> None:
        out.mkdir(exist_ok=True)
        (out / "notes.txt").write_text("mine")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("h5pack.exporter.exporter.sync_file_system", disturb)
        require_refused(pack, out, overwrite=overwrite)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    report = export(pack, out, **quick(resume=True, overwrite=overwrite))
    assert (report.resumed_files, report.files) == (9, 9)
    assert leftovers(tmp_path) == {"a.h5", "in", "out"}


def test_hostile_names_stay_inside_the_folder(tmp_path: Path) -> None:
    """Absolute paths, parents, NULs, duplicates, a file that is also a folder, an empty and an undecodable name."""
    names = [b"/abs/a.jpg", b"../../b.jpg", b"nul\0l/c.jpg", b"d.jpg", b"d.png", b"d.png/e.jpg", b"", b"\xff.jpg"]
    hdf5_file(tmp_path / "f.h5", images=PIXELS[: len(names)], filenames=np.array(names, "S20"))
    out = tmp_path / "deep" / "er" / "out"
    out.parent.mkdir(parents=True)
    report = export(tmp_path / "f.h5", out, **quick())
    found = {str(path.relative_to(out)): pixels_of(path) for path in out.rglob("*.png") if path.is_file()}
    assert len(found) == report.files == len(names)
    exported = ["abs/a", "nul\\x00l/c", "d~2", "d~3", "d.png/e", "images/00000006", "\\xff"]
    for row, name in enumerate([exported[0], "b", *exported[1:]]):
        assert np.array_equal(found[f"{name}.png"], PIXELS[row]), name
    assert (leftovers(tmp_path), leftovers(tmp_path / "deep")) == ({"f.h5", "deep"}, {"er"})


def test_links_in_an_unfinished_export_are_not_followed(tmp_path: Path, pack: Path) -> None:
    """A folder, a file and the manifest that another user has replaced by links."""
    out, other = tmp_path / "out", tmp_path / "other"
    export(pack, out, **quick())
    out.rename(tmp_path / "out.partial")
    (tmp_path / "out.partial.lock").touch()
    out = tmp_path / "out.partial"
    (out / "x").rename(other)
    (out / "x").symlink_to(other)
    (other / "00000.png").write_bytes(b"kept")
    for name in ("manifest.csv", "y/00001.png"):
        (tmp_path / "file").write_bytes(b"kept")
        (out / name).unlink()
        (out / name).symlink_to(tmp_path / "file")
    report = export(pack, tmp_path / "out", **quick(resume=True))
    assert (report.files, report.resumed_files) == (9, 3)
    assert (other / "00000.png").read_bytes() == (tmp_path / "file").read_bytes() == b"kept"
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_an_invalid_value_is_refused_with_its_parameter(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {"format": "gif", "quality": 0, "limit": 0, "num_workers": 0, "start_method": "thread"}
    for name, value in {**wrong, "channel_axis": "middle"}.items():
        with pytest.raises(OptionsError) as caught:
            export(tmp_path / "no.h5", tmp_path / "out", **{"format": "jpeg", name: value})
        assert [one.partition("=")[0] for one in caught.value.parameters] == [name]


def test_a_table_with_long_texts_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"path": f"{save(tmp_path / 'a.png')}", "text": "x" * 200_000}))
    h5pack.convert(tmp_path / "in.jsonl", tmp_path / "a.h5", **quick(text_columns="text"))
    report = export(tmp_path / "a.h5", tmp_path / "out", **quick())
    assert export(tmp_path / "a.h5", tmp_path / "out", **quick(resume=True)).already_complete
    assert export(tmp_path / "a.h5", tmp_path / "out", **quick(overwrite=True)).files == 1
    with h5py.File(pack_again(report, tmp_path, monkeypatch)) as file:
        assert len(file["fields/text/data"]) == 200_000


@pytest.mark.parametrize("name", [" label", "Class ", "target"])
def test_fields_do_not_come_back_as_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    images, values = PIXELS[:6, :9, :9], np.arange(6) / 8
    hdf5_file(tmp_path / "f.h5", images=images, **{name: values, "category": np.zeros((6, 9, 9), np.uint8)})
    h5pack.convert(tmp_path / "f.h5", tmp_path / "a.h5", **quick(labels="", fields=[name, "category"], order="sorted"))
    report = export(tmp_path / "a.h5", tmp_path / "out", **quick())
    assert len(report.lost) == 2
    with h5py.File(pack_again(report, tmp_path, monkeypatch)) as file:
        assert "labels" not in file
        assert file[f"fields/field_{name.strip()}"][()].tolist() == values.tolist()


def test_integers_of_numpy_are_accepted(tmp_path: Path) -> None:
    hdf5_file(tmp_path / "f.h5", images=np.zeros((2, 9, 9, 3), np.uint8))
    one = np.int64(1)
    report = export(tmp_path / "f.h5", tmp_path / "out", format="jpeg", quality=one, limit=one, num_workers=one)
    assert json.loads(json.dumps(report.to_json()))["num_workers"] == report.files == 1


def test_nothing_is_written_without_images(tmp_path: Path) -> None:
    hdf5_file(tmp_path / "f.h5", images=np.zeros((0, 9, 9, 3), np.uint8))
    hdf5_file(tmp_path / "one.h5", images=np.zeros((1, 9, 9, 3), np.uint8))
    for source, keywords, error in (
        *(("no.h5", {}, PackFormatError), (".", {}, PackFormatError), ("f.h5", {}, NoImagesError)),
        *(("one.h5", {"quality": 90, **given}, OptionsError) for given in ({}, {"format": "png"})),
    ):
        with pytest.raises(error):
            export(tmp_path / source, tmp_path / "out", **keywords)
    assert leftovers(tmp_path) == {"f.h5", "one.h5"}


@pytest.mark.parametrize(("wide", "split"), [(False, True), (True, False)])
def test_masks_are_beside_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide: bool, split: bool) -> None:
    """Converted again, by the manifest or as pairs, images and masks are equal."""
    monkeypatch.chdir(tmp_path)
    for part in ("train", "val") if split else ("",):
        pair_folders(Path("in"), 6, images=f"images/{part}", masks=f"masks/{part}")
    if wide:
        path = Path("in") / "masks" / ("train" if split else "") / "001.png"
        Image.fromarray(numbers(1, (20, 14)).astype(np.uint16) * 1000).save(path)
    h5pack.convert("in", "a.h5", **quick(source_kind="pairs"))
    report = export("a.h5", "out", num_workers=2)
    files = sorted(str(path.relative_to("out")) for path in Path("out").rglob("*.png"))
    middle = "val/" if split else ""
    assert {f"images/{middle}005.png", f"masks/{middle}005.png"} < {*files}
    assert (len(files), report.lost) == (24 if split else 12, ())
    assert cli.main([*shlex.split(report.again)[1:], "--workers", "1"]) == 0
    h5pack.convert("out", "pairs.h5", **quick(source_kind="pairs", order="sorted"))
    with h5py.File("a.h5") as file, h5py.File("again.h5") as again, h5py.File("pairs.h5") as pairs:
        for name in ("images", "fields/masks", "splits/rows", "splits/name"):
            assert np.array_equal(file[name][()], again[name][()]), name
        rows = [pairs["filenames"][()].tolist().index(name) for name in again["filenames"][()]]
        assert np.array_equal(pairs["fields/masks"][()][rows], file["fields/masks"][()])
        assert file["fields/masks"].dtype == (np.int32 if wide else np.uint8)
    before = {path: path.read_bytes() for path in files_of(Path("out")).values()}
    (Path("out") / "masks" / middle / "003.png").write_bytes(b"damaged")
    Path("out").rename("out.partial")
    Path("out.partial.lock").touch()
    assert export("a.h5", "out", num_workers=1, resume=True).resumed_files == report.files
    assert {path: path.read_bytes() for path in files_of(Path("out")).values()} == before
    assert export("a.h5", "out", num_workers=1, resume=True).already_complete
    export("a.h5", "out", num_workers=1, overwrite=True)


def test_masks_of_copied_files_are_turned_as_these_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From square images, a conversion cannot see whether a mask is upright, so it relies on the orientations."""
    monkeypatch.chdir(tmp_path)
    pair_folders(Path("in"), 18, size=(20, 20))
    for number, path in enumerate(sorted(Path("in/images").iterdir())):
        exif = Image.Exif()
        exif[0x0112] = number % 9
        Image.fromarray(pixels(number, (20, 20))).save(path, exif=exif)
    h5pack.convert("in", "a.h5", **quick(source_kind="pairs", keep="jpeg"))
    for format in ("jpeg", "png"):
        report = export("a.h5", format, **quick(format=format))
        assert cli.main([*shlex.split(report.again)[1:], "--workers", "1"]) == 0
        old, new = (h5pack.H5Dataset(path, fields=["masks"]) for path in ("a.h5", "again.h5"))
        for sample, name, again in zip(old, new.filenames, new, strict=True):
            assert np.array_equal(sample.masks, again.masks)
            mask = Image.open(Path(format, name.replace("images", "masks")).with_suffix(".png"))
            assert np.array_equal(ImageOps.exif_transpose(mask), sample.masks)
        os.unlink("again.h5")


@pytest.mark.parametrize("format", SUFFIXES)
def test_an_export_of_further_images_can_be_replaced(tmp_path: Path, format: str) -> None:
    root = flat_folder(tmp_path / "in", 6)
    names = sorted(path.name for path in root.iterdir())
    lines = ["image,second", *(f"{first},{second}" for first, second in zip(names[:3], names[3:], strict=True))]
    (root / "list.csv").write_text("\n".join(lines))
    h5pack.convert(root / "list.csv", tmp_path / "a.h5", **quick(image_columns="second"))
    export(tmp_path / "a.h5", tmp_path / "out", **quick(format=format))
    before = tree(tmp_path / "out")
    export(tmp_path / "a.h5", tmp_path / "out", **quick(format=format, overwrite=True))
    assert tree(tmp_path / "out") == before
    (tmp_path / "out" / "mine.jpg").touch()
    require_refused(tmp_path / "a.h5", tmp_path / "out", overwrite=True)


def test_files_that_only_a_text_of_the_table_names_are_kept(tmp_path: Path) -> None:
    root = flat_folder(tmp_path / "in", 2)
    lines = [{"image": path.name, "original": f"raw/{path.name}"} for path in sorted(root.iterdir())]
    table = write_lines(root / "list.jsonl", lines)
    h5pack.convert(table, tmp_path / "a.h5", **quick(text_columns="original"))
    export(tmp_path / "a.h5", tmp_path / "out", **quick())
    save(tmp_path / "out" / "raw" / "00000.jpg")
    require_refused(tmp_path / "a.h5", tmp_path / "out", overwrite=True)


def test_a_mask_that_does_not_fit_png_is_not_called_damaged(tmp_path: Path) -> None:
    folder = pair_folders(tmp_path / "in", 3)
    for path in (folder / "masks").iterdir():
        Image.fromarray(numbers(1, (20, 14)).astype(np.uint16) * 1000).save(path)
    h5pack.convert(folder, tmp_path / "a.h5", **quick(source_kind="pairs"))
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        masks = file["fields/masks"][()]
        masks[1] = -1
        file["fields/masks"][()] = masks
        file["checksums/fields/masks"][()] = row_checksums(masks)
    assert h5pack.verify(tmp_path / "a.h5").ok
    report = export(tmp_path / "a.h5", tmp_path / "out", **quick())
    assert [row.row for row in report.damaged] == [1]
    assert "h5pack verify" not in report.damage_text()


@pytest.mark.parametrize("damaged", ["fields/masks", "images"])
def test_a_damaged_mask_or_image_leaves_both_out(tmp_path: Path, damaged: str) -> None:
    h5pack.convert(pair_folders(tmp_path / "in", 6), tmp_path / "a.h5", **quick(source_kind="pairs", order="sorted"))
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file[damaged][2, 0, 0] ^= 1
    report = export(tmp_path / "a.h5", tmp_path / "out")
    assert [(row.row, row.name) for row in report.damaged] == [(2, "images/002.jpg")]
    assert not [*(tmp_path / "out").rglob("002.png")]
    files = [*(tmp_path / "out").rglob("*.png")]
    assert (len(files), sum(file.stat().st_size for file in files)) == (10, report.bytes)
    again = export(tmp_path / "a.h5", tmp_path / "out", **quick(resume=True))
    assert (again.already_complete, again.bytes, again.damaged) == (True, report.bytes, report.damaged)
