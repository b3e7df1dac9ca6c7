"""`verify` names what is damaged, and survives what damage does to the HDF5 library."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import signal
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import hdf5plugin
import numpy as np
import pytest

import h5pack
from h5pack.cli import main
from h5pack.errors import OptionsError, PackFormatError, ReadError, WorkerError
from h5pack.inspect import verify as module
from tests.combine import packs
from tests.makers import flat_folder, hdf5_file, pair_folders, quick, split_folders
from tests.read.files import in_child, limit_open_files


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    source = split_folders(folder / "in", {"train": {"x": 31, "y": 26}, "test": {"x": 5, "y": 9}}, (80, 70))
    h5pack.convert(source, folder / "o.h5", **quick(chunk_rows=7))
    return folder / "o.h5"


@pytest.fixture
def copy(pack: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(pack, tmp_path / "o.h5"))


@pytest.mark.parametrize("block_rows", [9, 71])
def test_checksums_of_labels_do_not_depend_on_how_many_are_read_at_a_time(
    pack: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    monkeypatch.setattr(module, "_BLOCK_ROWS", block_rows)
    with h5py.File(pack) as file:
        assert np.array_equal(module._checksums_of(file, "labels"), file["checksums/labels"][()])


def test_flipped_bytes_are_named_by_row_and_file(copy: Path) -> None:
    intact = h5pack.verify(copy)
    assert (intact.ok, intact.rows, intact.problems, intact.damaged) == (True, 71, (), {})
    with h5py.File(copy) as file:
        addresses = [file["images"].id.get_chunk_info(chunk).byte_offset for chunk in range(11)]
        names = [name.decode() for name in file["filenames"]]
        labels = file["labels"].id.get_offset()
    row_bytes = 80 * 70 * 3
    data = bytearray(copy.read_bytes())
    data[addresses[3] + 2 * row_bytes + 5] ^= 1
    data[addresses[10]] ^= 128
    data[labels + 8 * 9] ^= 1
    copy.write_bytes(data)
    report = h5pack.verify(copy)
    assert report.damaged == {"images": [23, 70], "labels": [9]}
    assert report.filenames == {row: names[row] for row in (9, 23, 70)}
    assert f"row 23 ({names[23]})" in report.to_text()
    # A byte after the last row of a chunk does not matter.
    data[addresses[10] + row_bytes] ^= 1
    copy.write_bytes(data)
    assert h5pack.verify(copy) == report


def test_structural_problems_are_listed_by_dataset(copy: Path) -> None:
    with h5py.File(copy, "r+") as file:
        file["splits/rows"][1, 0] = 50
        del file["filenames"]
        del file["checksums/labels"]
        file["checksums/nothing"] = np.zeros(71, np.uint32)
    report = h5pack.verify(copy)
    datasets = ["filenames", "splits/rows", "checksums/labels", "checksums/nothing"]
    assert [problem.partition(":")[0] for problem in report.problems] == datasets


def test_files_that_cannot_be_opened_are_problems_or_errors(copy: Path, tmp_path: Path) -> None:
    for content in (copy.read_bytes()[:-9000], b""):
        copy.write_bytes(content)
        assert len(h5pack.verify(copy).problems) == 1
    for absent in (tmp_path / "no.h5", tmp_path):
        with pytest.raises(PackFormatError) as missing:
            h5pack.verify(absent)
        assert missing.value.path == str(absent)
    with pytest.raises(PackFormatError):
        h5pack.verify(hdf5_file(tmp_path / "foreign.h5", images=np.zeros((3, 4, 4, 3), np.uint8)))
    with pytest.raises(OptionsError) as caught:
        h5pack.verify(copy, num_workers=0)
    assert caught.value.parameters == ("num_workers=0",)


def test_unfinished_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    source = flat_folder(tmp_path / "in", 4)
    monkeypatch.setattr("h5pack.pack.finish.publish", lambda *_: None)
    monkeypatch.setattr("h5pack.pack.finish.complete", lambda *_: None)
    h5pack.convert(source, tmp_path / "o.h5", **quick())
    report = h5pack.verify(tmp_path / "o.h5.partial")
    assert len(report.problems) == 1
    assert main(["verify", str(tmp_path / "o.h5.partial")]) == 1
    assert "--resume" in capsys.readouterr().out


def test_a_pack_compressed_by_another_tool_is_checked_through_the_library(copy: Path, tmp_path: Path) -> None:
    with h5py.File(copy) as old, h5py.File(tmp_path / "gzip.h5", "w") as new:
        for name, item in old.items():
            if name != "images":
                old.copy(item, new)
        new.attrs.update(old.attrs)
        values = old["images"][()]
        new.create_dataset("images", data=values, chunks=(7, 80, 70, 3), compression="gzip")
    assert h5pack.verify(tmp_path / "gzip.h5").ok
    with h5py.File(tmp_path / "gzip.h5", "r+") as file:
        file["images"][33, 4, 4, 0] ^= 1
    assert h5pack.verify(tmp_path / "gzip.h5").damaged == {"images": [33]}


def test_only_datasets_with_damaged_rows_are_listed(tmp_path: Path) -> None:
    h5pack.convert(split_folders(tmp_path / "in", {"train": {"x": 2, "y": 1}}), tmp_path / "o.h5", **quick(keep="jpeg"))
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        data = file["encoded/data"][()]
        del file["encoded/data"]
        file.create_dataset("encoded/data", data=data, compression="gzip")
        file["labels"][2] ^= 1
    assert h5pack.verify(tmp_path / "o.h5").damaged == {"labels": [2]}


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_kept_images_whose_stored_size_is_another_one_are_damaged(tmp_path: Path, compression: str | None) -> None:
    h5pack.convert(pair_folders(tmp_path / "in", 5), tmp_path / "o.h5", **quick(source_kind="pairs", keep="jpeg"))
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        data = file["encoded/data"][()]
        if compression is not None:
            del file["encoded/data"]
            file.create_dataset("encoded/data", data=data, compression=compression)
    assert h5pack.verify(tmp_path / "o.h5").ok
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        file["encoded/size"][3, 1] += 1
    report = h5pack.verify(tmp_path / "o.h5")
    assert (report.problems, report.damaged) == ((), {"encoded": [3]})
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        file["encoded/size"][2] = 0  # A dataset refuses the file, but all damaged rows are named.
    report = h5pack.verify(tmp_path / "o.h5")
    assert (report.problems, report.damaged) == ((), {"encoded": [2, 3]})


@pytest.mark.parametrize(
    ("check", "settings", "name"),
    [
        (h5pack.verify, {"compression": "gzip"}, "images"), (h5pack.verify, {"keep": "jpeg"}, "encoded/data"),
        (lambda path: h5pack.info(path, stats=True), {"compression": "gzip"}, "images"),
    ],
    ids=["pixels", "jpeg", "info"],
)  # fmt: skip
def test_a_virtual_pack_with_too_many_sources_is_not_called_damaged(
    tmp_path: Path, check: Any, settings: dict[str, Any], name: str
) -> None:
    """HDF5 keeps sources open, and silently reads fill values of those that it cannot open."""
    h5pack.convert(flat_folder(tmp_path / "in", 1), tmp_path / "a.h5", **quick(**settings))
    packs = [shutil.copy(tmp_path / "a.h5", tmp_path / f"{number}.h5") for number in range(60)]
    h5pack.join(packs, tmp_path / "o.h5", virtual=True)
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        del file["statistics"]

    def fails() -> bool:
        limit_open_files(40)
        with pytest.raises(ReadError, match="open files") as caught:
            check(tmp_path / "o.h5")
        return bool(caught.value.dataset == name)

    assert in_child(fails)


def test_damaged_file_names_are_a_problem(copy: Path) -> None:
    with h5py.File(copy) as file:
        chunk = file["filenames"].id.get_chunk_info(0)
    data = bytearray(copy.read_bytes())
    data[chunk.byte_offset + chunk.size // 2] ^= 255
    copy.write_bytes(data)
    report = h5pack.verify(copy)
    assert (report.ok, report.rows, report.damaged) == (False, 71, {})
    assert [problem.partition(":")[0] for problem in report.problems] == ["filenames"]


@pytest.mark.parametrize("name", ["filenames", "checksums/images"])
def test_tables_that_were_compressed_with_a_plugin_are_not_damaged(copy: Path, name: str) -> None:
    with h5py.File(copy, "r+") as file:
        values = file[name][()]
        del file[name]
        file.create_dataset(name, data=values, chunks=(10,), compression=hdf5plugin.Zstd())
    assert h5pack.verify(copy, start_method="spawn").ok  # in a process that has not imported the plugin


def test_a_damaged_mask_field_hides_no_damaged_images(tmp_path: Path) -> None:
    source = pair_folders(tmp_path / "in", 5)
    h5pack.convert(source, tmp_path / "o.h5", **quick(source_kind="pairs", keep="jpeg"))
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        file["fields/masks/offsets"][1] = 10**6
        file["encoded/data"][3] ^= 1
    report = h5pack.verify(tmp_path / "o.h5")
    assert (report.rows, report.damaged) == (5, {"encoded": [0]})
    (problem,) = report.problems
    assert ("fields/masks" in problem, "h5pack verify" in problem) == (True, False)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_labels_that_are_not_finite_do_not_end_the_check(copy: Path, number: float) -> None:
    with h5py.File(copy, "r+") as file:
        labels = file["labels"]
        values, attributes = labels[()].astype(np.float64), dict(labels.attrs)
        values[3] = number
        del file["labels"]
        file.create_dataset("labels", data=values).attrs.update(attributes)
    report = h5pack.verify(copy)
    assert (report.rows, any("2 class names" in problem for problem in report.problems)) == (71, True)


@pytest.mark.parametrize("chunks", [None, (3, 20, 20, 3), (7, 80, 70, 1)])
def test_rows_are_checked_in_the_layouts_of_h5repack(copy: Path, chunks: tuple[int, ...] | None) -> None:
    with h5py.File(copy, "r+") as file:
        rows, layout = file["images"][()], file["images"].attrs["h5pack_layout"]
        del file["images"]
        file.create_dataset("images", data=rows, chunks=chunks).attrs["h5pack_layout"] = layout
    assert h5pack.verify(copy).ok
    with h5py.File(copy, "r+") as file:
        file["images"][23, 40, 30] += 1
    report = h5pack.verify(copy)
    assert (report.problems, report.damaged) == ((), {"images": [23]})


def replace(file: h5py.File, name: str, values: Any) -> None:
    """Replace a dataset, or an attribute with "@" before its name, or remove it if `values` is None."""
    path, _, attribute = name.partition("@")
    target, key = (file[path].attrs, attribute) if attribute else (file, path)
    if key in target:
        del target[key]
    if values is not None:
        target[key] = values


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("splits/name", ["train"]),
        ("splits/rows", [0, 57, 57, 71]),
        ("splits/rows", [[0, 57, 1], [57, 71, 1]]),
        ("statistics", None),
        ("statistics/mean", 0.5),
        ("statistics/mean", [0.5]),
        ("statistics/std", [1.0, np.nan, 1.0]),
        ("statistics/mean", [120.0, 110.0, 90.0]),
        ("statistics@rows", -4),
        ("statistics@split", "training"),
        ("statistics@step", None),
        ("statistics@step", 0),
        ("rejects/filenames", ["a.jpg"]),
        ("images@h5pack_layout", "HWC"),
    ],
)
def test_edited_tables_are_named_and_refused(copy: Path, tmp_path: Path, name: str, values: Any) -> None:
    with h5py.File(copy, "r+") as file:
        replace(file, name, values)
    report = h5pack.verify(copy)
    names = ["splits/rows" if "splits" in name else re.split("[/@]", name)[0]]
    if name == "statistics":
        names = ["statistics/mean", "statistics/std"]
    assert ([problem.partition(":")[0] for problem in report.problems], report.damaged) == (names, {})
    with pytest.raises(PackFormatError):
        h5pack.subset(copy, tmp_path / "s.h5", rows="0:2")
    with contextlib.suppress(PackFormatError):
        h5pack.info(copy).to_text()


def test_split_names_that_are_not_utf8_are_a_problem(copy: Path) -> None:
    with h5py.File(copy, "r+") as file:
        replace(file, "splits/name", np.array([b"train", b"t\xffst"]))
    report = h5pack.verify(copy)
    assert ([problem.partition(":")[0] for problem in report.problems], report.damaged) == (["splits/name"], {})


@pytest.mark.parametrize(
    ("classes", "fits"), [(["x", "why"], True), (["x", "y", "z"], True), (["x"], False), ("x,y", False)]
)
def test_class_names_must_fit_the_labels(copy: Path, classes: list[str] | str, fits: bool) -> None:
    with h5py.File(copy, "r+") as file:
        file["labels"].attrs["classes"] = classes
    report = h5pack.verify(copy)
    assert (report.ok, report.damaged) == (fits, {})
    assert [problem.partition(":")[0] for problem in report.problems] == ["labels"] * (not fits)


def test_column_names_must_fit_a_table_of_labels(copy: Path) -> None:
    with h5py.File(copy, "r+") as file:
        del file["labels"]
        file["labels"] = np.zeros((71, 3), np.uint8)
        file["labels"].attrs["columns"] = ["a", "b"]
        file["checksums/labels"][:] = zlib.crc32(bytes(3))
    assert [problem.partition(":")[0] for problem in h5pack.verify(copy).problems] == ["labels"]


def test_labels_that_became_strings_are_named(copy: Path) -> None:
    with h5py.File(copy, "r+") as file:
        words = [f"class {label}" for label in file["labels"]]
        del file["labels"]
        file["labels"] = words
        file["images"][23] = 0
    report = h5pack.verify(copy)
    assert (len(report.problems), report.damaged) == (1, {"images": [23]})


def test_damaged_attributes_are_a_problem_and_are_not_read_as_missing(tmp_path: Path) -> None:
    """HDF5 stores more than 8 attributes, and those of over 64 KiB, in heaps and B-trees of their own."""
    flat_folder(tmp_path / "in", 3)
    lines = ["path,label", *(f"in/{path.name},{'x' * 66_000}" for path in (tmp_path / "in").iterdir())]
    (tmp_path / "m.csv").write_text("\n".join(lines))
    path = tmp_path / "o.h5"
    h5pack.convert(tmp_path / "m.csv", path, **quick())
    whole = path.read_bytes()
    assert (h5pack.verify(path).ok, h5pack.H5Dataset(path).classes) == (True, ("x" * 66_000,))
    places = [found.start() for found in re.finditer(rb"FHDB|BTLF", whole)]
    assert len(places) >= 4
    for place in places:
        data = bytearray(whole)
        data[place + 9] ^= 1
        path.write_bytes(data)
        report = h5pack.verify(path)
        assert (report.ok, report.damaged) == (False, {})
        with pytest.raises(PackFormatError):
            h5pack.H5Dataset(path)


def test_the_kind_of_a_field_with_damaged_attributes_is_not_lost(tmp_path: Path) -> None:
    """Masks and boxes without their kinds would not be moved with their images."""
    path, fields = packs.pack(tmp_path, "a", 6, ["x"]), ["boxes", "points", "mask"]
    size = path.stat().st_size
    with h5py.File(path, "a") as file:
        for name in fields:
            file[f"fields/{name}"].attrs["note"] = np.bytes_("x" * 66_000)
    whole = path.read_bytes()
    assert h5pack.verify(path).ok
    h5pack.H5Dataset(path, fields=fields)
    places = [found.start() for found in re.compile(b"FHDB").finditer(whole, size)]  # the heaps of attributes
    assert len(places) == 3
    for place in places:
        path.write_bytes(whole[: place + 9] + bytes([whole[place + 9] ^ 1]) + whole[place + 10 :])
        report = h5pack.verify(path)
        assert (report.ok, report.rows, report.damaged) == (False, 6, {})
        with pytest.raises(PackFormatError):
            h5pack.H5Dataset(path, fields=fields)


def test_random_damage_is_found_or_harmless(pack: Path, tmp_path: Path) -> None:
    """Each random flip is found, or changed nothing that a reader sees; nothing crashes this process."""
    whole = pack.read_bytes()
    with h5py.File(pack) as file:
        images, labels = file["images"][()], file["labels"][()]
    dice = random.Random(5)
    found = 0
    for number in range(16):
        data = bytearray(whole)
        # Half of them in the metadata, which is a small part of the file.
        if number % 2:
            place = dice.randrange(len(data))
        else:
            place = dice.choice([dice.randrange(4096), -dice.randrange(1, 12000)])
        data[place] ^= 1 << dice.randrange(8)
        path = tmp_path / "o.h5"
        path.write_bytes(data)
        try:
            intact = h5pack.verify(path).ok
        except PackFormatError:
            intact = False
        if not intact:
            found += 1
            continue
        with h5py.File(path) as file:
            assert np.array_equal(file["images"][()], images)
            assert np.array_equal(file["labels"][()], labels)
    assert found > 5


def test_unreadable_rows_are_damaged(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread = os.pread
    with h5py.File(pack) as file:
        bad = file["images"].id.get_chunk_info(2).byte_offset + 80 * 70 * 3

    def failing(descriptor: int, count: int, offset: int) -> bytes:
        if offset <= bad < offset + count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", failing)
    assert h5pack.verify(pack, start_method="fork").damaged == {"images": [15]}


def test_a_worker_that_dies_is_no_damage(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.format.row_offsets.read_all", lambda *_: os.kill(os.getpid(), 9))
    with pytest.raises(WorkerError) as caught:
        h5pack.verify(pack, start_method="fork")
    # verify has no resume=True to recommend.
    assert caught.value.parameters == ("num_workers",)


def test_workers_that_cannot_start_are_no_damage(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", Mock(side_effect=OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))))
    with pytest.raises(WorkerError):
        h5pack.verify(pack, start_method="fork")


def test_a_crash_of_the_hdf5_library_is_damage(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(path: Path) -> None:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # On Python 3.14, a handler of a library kept the worker alive.
        os.kill(os.getpid(), signal.SIGSEGV)

    monkeypatch.setattr("h5pack.inspect.verify.open_file", crash)
    report = h5pack.verify(pack, start_method="fork")
    assert (report.ok, report.rows, len(report.problems)) == (False, 0, 1)


@pytest.mark.parametrize("compression", ["none", "gzip:1"])
def test_damaged_masks_are_named_by_row(tmp_path: Path, compression: str) -> None:
    settings = quick(source_kind="pairs", chunk_rows=4, compression=compression)
    h5pack.convert(pair_folders(tmp_path / "in", 14), tmp_path / "o.h5", **settings)
    assert h5pack.verify(tmp_path / "o.h5").ok
    with h5py.File(tmp_path / "o.h5") as file:
        offset = file["fields/masks"].id.get_chunk_info(2).byte_offset
        names = [name.decode() for name in file["filenames"]]
    data = bytearray((tmp_path / "o.h5").read_bytes())
    data[offset + 20] ^= 1
    (tmp_path / "o.h5").write_bytes(data)
    report = h5pack.verify(tmp_path / "o.h5")
    rows = [8] if compression == "none" else [8, 9, 10, 11]
    assert (report.damaged, report.problems) == ({"fields/masks": rows}, ())
    assert report.filenames == {row: names[row] for row in rows}
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        del file["checksums/fields/masks"]
    (problem,) = h5pack.verify(tmp_path / "o.h5").problems
    assert problem.startswith("checksums/fields/masks:")


def test_a_field_that_lost_its_kind_is_named(tmp_path: Path) -> None:
    h5pack.convert(pair_folders(tmp_path / "in", 5), tmp_path / "o.h5", **quick(source_kind="pairs"))
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        del file["fields/masks"].attrs["kind"]
    report = h5pack.verify(tmp_path / "o.h5")
    assert ([problem.partition(":")[0] for problem in report.problems], report.damaged) == (["fields/masks"], {})
