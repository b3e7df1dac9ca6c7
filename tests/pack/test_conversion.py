"""Conversions from end to end: what is in the file, and what happens to bad input."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import h5py
import numpy as np
import pytest
from PIL import Image

import h5pack
from h5pack.errors import (
    H5PackError,
    IncompletePackError,
    NoImagesError,
    OptionsError,
    OutputBusyError,
    OutputExistsError,
    PackFormatError,
    RejectedImageError,
    ResumeError,
    SizesDifferError,
    SourceError,
)
from h5pack.images.decode import Decoder, decoder_versions
from h5pack.pack import finish
from h5pack.pack.conversion import Conversion
from h5pack.pack.output import Output, OutputLock
from h5pack.system.files import open_locked
from tests.crashing import convert_until, leftovers, wait_for
from tests.makers import class_folders, expected, flat_folder, pixels, quick, save, split_folders, truncate


def names_of(file: h5py.File) -> list[str]:
    return [name.decode() for name in file["filenames"][()]]


def require_statistics(file: h5py.File, rows: slice, step: int) -> None:
    sampled = file["images"][rows][::step] / 255.0
    assert np.allclose(file["statistics/mean"], sampled.mean((0, 1, 2)), atol=1e-12)
    assert np.allclose(file["statistics/std"], sampled.std((0, 1, 2)), atol=1e-12)
    assert (file["statistics"].attrs["rows"], file["statistics"].attrs["step"]) == (len(sampled), step)


@pytest.mark.parametrize(("workers", "layout", "order"), [(1, "nhwc", "shuffled"), (2, "nchw", "sorted")])
def test_rows_are_pillows_pixels_with_their_labels(tmp_path: Path, workers: int, layout: str, order: str) -> None:
    source = class_folders(tmp_path / "in", {"b": 7, "a": 5, "c": 9})
    report = h5pack.convert(source, tmp_path / "o.h5", **quick(num_workers=workers, layout=layout, order=order))
    assert (report.images, report.rejects) == (21, 0)
    with h5py.File(tmp_path / "o.h5") as file:
        names = names_of(file)
        assert sorted(names) == sorted(str(path.relative_to(source)) for path in source.rglob("*.jpg"))
        assert (names == sorted(names)) == (order == "sorted")
        classes = [name.decode() for name in file["labels"].attrs["classes"]]
        assert classes == ["a", "b", "c"]
        for row, name in enumerate(names):
            stored = file["images"][row]
            assert np.array_equal(stored if layout == "nhwc" else stored.transpose(1, 2, 0), expected(source / name))
            assert classes[file["labels"][row]] == name.split("/")[0]


@pytest.mark.parametrize(("fit", "mode"), [("crop", "rgb"), ("crop", "gray"), ("pad", "gray"), ("stretch", "rgb")])
def test_sizes_are_brought_to_one_by_pillows_own_functions(tmp_path: Path, fit: str, mode: str) -> None:
    source = tmp_path / "in"
    for number, size in enumerate([(20, 14), (31, 57), (64, 9), (16, 24)]):
        save(source / f"{number}.jpg", number, size)
        save(source / f"{number}_other.png", number, size)
    h5pack.convert(source, tmp_path / "o.h5", **quick(size=(16, 24), fit=fit, mode=mode))
    with h5py.File(tmp_path / "o.h5") as file:
        for row, name in enumerate(names_of(file)):
            want = expected(source / name, (16, 24), "L" if mode == "gray" else "RGB", fit)
            assert np.array_equal(file["images"][row], want), name


@pytest.mark.parametrize(("fit", "enlarged"), [("crop", 3), ("stretch", 3), ("pad", 1)])
def test_a_note_counts_the_images_that_are_enlarged(tmp_path: Path, fit: str, enlarged: int) -> None:
    for number, size in enumerate([(40, 40), (50, 20), (20, 50), (20, 20), (80, 80)]):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
    (tmp_path / "empty.png").write_bytes(b"")
    notes = Conversion(tmp_path, tmp_path / "o.h5", **quick(size=40, fit=fit)).plan().notes()
    assert [note.text for note in notes if "enlarged" in note.text] == [
        f"images smaller than 40x40, which are enlarged: {enlarged} of 6"
    ]
    notes = Conversion(tmp_path, tmp_path / "o.h5", **quick(size=20, fit=fit)).plan().notes()
    assert not any("enlarged" in note.text for note in notes)


def test_every_promise_of_the_format(tmp_path: Path) -> None:
    source = split_folders(tmp_path / "in", {"val": {"x": 7, "y": 5}, "train": {"x": 30, "y": 41}}, (80, 70))
    h5pack.convert(source, tmp_path / "o.h5", **quick(chunk_rows=5))
    with h5py.File(tmp_path / "o.h5") as file:
        assert (file.attrs["h5pack_format"], file.attrs["h5pack_complete"]) == (1, 1)
        assert sorted(file.attrs) == ["h5pack_complete", "h5pack_format", "h5pack_options", "h5pack_version"]
        assert b'"chunk_rows": 5' in file.attrs["h5pack_options"]
        images = file["images"]
        assert (images.chunks, images.maxshape) == ((5, 80, 70, 3), (None, 80, 70, 3))
        assert [dimension.label for dimension in images.dims] == ["N", "H", "W", "C"]
        assert (images.attrs["CLASS"], images.attrs["INTERLACE_MODE"]) == (b"IMAGE", b"INTERLACE_PIXEL")
        addresses = [images.id.get_chunk_info(chunk).byte_offset for chunk in range(images.id.get_num_chunks())]
        assert all(address % 4096 == 0 for address in addresses)
        assert [name.decode() for name in file["splits/name"]] == ["train", "val"]
        assert file["splits/rows"][()].tolist() == [[0, 71], [71, 83]]
        assert all(name.startswith("train/") for name in names_of(file)[:71])
        assert (file["labels"].chunks, file["filenames"].compression) == (None, "gzip")
        assert (images.attrs["h5pack_rdcc_nbytes"], images.attrs["h5pack_rdcc_nslots"]) == (0, 17)
        require_statistics(file, slice(71), 1)
    last = (tmp_path / "o.h5").read_bytes()[addresses[-1] + 3 * 80 * 70 * 3 :][: 2 * 80 * 70 * 3]
    assert last == bytes(len(last)), "rows past N must be zero"


def test_statistics_of_a_large_pack_take_some_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.format.schema.STATISTICS_ROWS", 7)
    source = class_folders(tmp_path / "in", {"a": 30, "b": 33})
    for number in (3, 11, 17):
        truncate(source / "a" / f"{number:05d}.jpg")
    for order in ("shuffled", "sorted"):
        h5pack.convert(source, tmp_path / f"{order}.h5", **quick(order=order))
        with h5py.File(tmp_path / f"{order}.h5") as file:
            assert len(file["images"]) == 60
            require_statistics(file, slice(60), 8)


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_truncated_images_leave_no_holes_in_three_splits(tmp_path: Path, order: str) -> None:
    counts = {"train": {"x": 30, "y": 25}, "val": {"x": 10, "y": 6}, "test": {"x": 5, "y": 7}}
    source = split_folders(tmp_path / "in", counts, (60, 50))
    broken = {"train/x/00003.jpg", "train/y/00024.jpg", "val/x/00000.jpg", "test/y/00006.jpg", "test/y/00002.jpg"}
    for name in broken:
        truncate(source / name)
    files = []
    for workers in (1, 4):
        out = tmp_path / f"{workers}.h5"
        report = h5pack.convert(source, out, **quick(order=order, num_workers=workers, chunk_rows=7))
        assert (report.images, report.rejects) == (78, 5)
        assert report.moved_rows > 0
        files.append(out.read_bytes())
    assert files[0] == files[1]
    with h5py.File(tmp_path / "1.h5") as file:
        names = names_of(file)
        assert sorted(names) == sorted({str(path.relative_to(source)) for path in source.rglob("*.jpg")} - broken)
        splits = dict(zip(file["splits/name"].asstr()[()], file["splits/rows"][()].tolist(), strict=True))
        assert splits == {"train": [0, 53], "val": [53, 68], "test": [68, 78]}
        for split, (start, stop) in splits.items():
            inside = names[start:stop]
            assert all(name.startswith(split) for name in inside)
            assert (inside == sorted(inside)) == (order == "sorted")
        for row, name in enumerate(names):
            assert np.array_equal(file["images"][row], expected(source / name))
            assert file["labels"][row] == "xy".index(name.split("/")[1])
        rejects = dict(zip(file["rejects/filenames"][()], file["rejects/reasons"][()], strict=True))
        assert rejects == {name.encode(): b"truncated" for name in broken}
    table = (tmp_path / "1.h5.rejects.csv").read_text().splitlines()
    assert table == ["filename,reason", *(f"{name},truncated" for name in sorted(broken))]
    assert h5pack.verify(tmp_path / "1.h5").ok


def test_bad_files_are_listed_with_their_reasons(tmp_path: Path) -> None:
    source = flat_folder(tmp_path / "in", 6)
    (source / "empty.jpg").write_bytes(b"")
    save(source / "mislabeled.png", 7).rename(source / "mislabeled.jpg")
    (source / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (source / "notes.txt").write_text("passed over")
    Image.new("RGB", (300, 300)).save(source / "bomb.png")
    Image.fromarray(np.zeros((20, 14), np.float32)).save(source / "float.tif")
    truncate(source / "00002.jpg")
    # Its header sends the decoder beyond the end of the file.
    (source / "offset.tif").write_bytes(b"II+\0\x08\0\0\0" + (2**63 - 1).to_bytes(8, "little"))
    (source / "drawing.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    report = h5pack.convert(source, tmp_path / "o.h5", **quick(max_pixels=80_000))
    with h5py.File(tmp_path / "o.h5") as file:
        assert sorted(names_of(file)) == [f"0000{n}.jpg" for n in (0, 1, 3, 4, 5)] + ["mislabeled.jpg"]
        rejects = dict(zip(file["rejects/filenames"].asstr()[()], file["rejects/reasons"].asstr()[()], strict=True))
    assert report.rejects == 7
    del rejects["offset.tif"], rejects["drawing.jpg"]
    assert rejects == {
        "empty.jpg": "the image is empty (0 bytes)", "gone.jpg": "file not found",
        "bomb.png": "decompression bomb: 300x300 is more than 80000 pixels",
        "float.tif": "F pixels cannot be packed; convert them to unsigned 8 or 16 bits", "00002.jpg": "truncated",
    }  # fmt: skip


def test_strict_stops_at_the_first_bad_image_even_when_resumed(tmp_path: Path) -> None:
    source = flat_folder(tmp_path / "in", 6, (60, 50))
    (source / "zero.jpg").write_bytes(b"")
    with pytest.raises(RejectedImageError, match=r"zero\.jpg"):
        h5pack.convert(source, tmp_path / "o.h5", **quick(strict=True))
    (source / "zero.jpg").unlink()
    truncate(source / "00003.jpg")
    for resume in (False, True, True):
        with pytest.raises(RejectedImageError, match=r"00003\.jpg"):
            h5pack.convert(source, tmp_path / "o.h5", **quick(strict=True, resume=resume))
    assert not (tmp_path / "o.h5").exists()
    report = h5pack.convert(source, tmp_path / "o.h5", **quick(resume=True))
    assert (report.images, report.rejects) == (5, 1)


def test_errors_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "o.h5"
    source = flat_folder(tmp_path / "in", 3)
    save(source / "wide.jpg", 9, (20, 30))
    (tmp_path / "empty").mkdir()
    cut = truncate(save(tmp_path / "cut" / "a.jpg")).parent
    junk = truncate(save(tmp_path / "junk" / "a.jpg"), 0.01).parent
    for broken, to, error in (
        (tmp_path / "missing", out, SourceError), (tmp_path / "empty", out, NoImagesError), (junk, out, NoImagesError),
        (cut, out, NoImagesError), (source, out, SizesDifferError), (source, tmp_path / "no" / "o.h5", SourceError),
        (source, tmp_path / "in", OutputExistsError),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            h5pack.convert(broken, to, **quick())
        assert caught.value.path in (str(broken), str(to), str(to.parent))
    assert leftovers(tmp_path) == {"cut", "empty", "in", "junk"}


@pytest.mark.parametrize("ending", ["", ".partial", ".partial.survey", ".partial.journal", ".rejects.csv"])
def test_a_file_of_another_user_is_an_early_error(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, others = flat_folder(tmp_path / "in", 1), tmp_path / f"o.h5{ending}"
    others.touch()
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: others.stat().st_uid + 1)
    with pytest.raises(SourceError) as caught:
        h5pack.convert(source, tmp_path / "o.h5", **quick(overwrite=True))
    assert caught.value.path == str(others)
    assert leftovers(tmp_path) == {"in", others.name}


def test_an_existing_output_is_kept_until_the_new_one_is_whole(tmp_path: Path) -> None:
    source, out = flat_folder(tmp_path / "in", 4), tmp_path / "o.h5"
    odd = save(source / "odd.jpg", 1, (9, 9))
    out.write_bytes(b"precious")
    for overwrite, error in ((False, OutputExistsError), (True, SizesDifferError)):
        with pytest.raises(error):
            h5pack.convert(source, out, **quick(overwrite=overwrite))
        assert out.read_bytes() == b"precious"
    odd.unlink()
    assert h5pack.convert(source, out, **quick(overwrite=True)).images == 4


def test_an_unfinished_output_needs_resume_or_overwrite_and_its_worker_cannot_write_into_another(
    tmp_path: Path,
) -> None:
    source, out, partial = flat_folder(tmp_path / "in", 6), tmp_path / "o.h5", tmp_path / "o.h5.partial"
    partial.write_bytes(b"begun long ago")
    with pytest.raises(OutputExistsError) as caught:
        h5pack.convert(source, out, **quick())
    assert "resume=True" in caught.value.parameters
    with partial.open("r+b") as hanging:
        h5pack.convert(source, out, **quick(overwrite=True))
        whole = out.read_bytes()
        hanging.seek(5000)
        hanging.write(bytes(20_000))
    assert out.read_bytes() == whole


def interrupted(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, rows: int, **settings: Any) -> None:
    """Begin a conversion that is interrupted after some rows."""
    calls = 0
    decode = Decoder.decode

    def failing(self: Decoder, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > rows:
            raise KeyboardInterrupt
        decode(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "decode", failing)
        with pytest.raises(KeyboardInterrupt):
            h5pack.convert(source, out, **quick(chunk_rows=2, **settings))
    assert not out.exists()


def test_resume_refuses_other_options_and_a_changed_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = flat_folder(tmp_path / "in", 8), tmp_path / "o.h5"
    interrupted(source, out, monkeypatch, rows=4)
    with monkeypatch.context() as patch:
        patch.setattr("h5pack.pack.resume.decoder_versions", lambda: {**decoder_versions(), "Pillow": "0.1"})
        with pytest.raises(ResumeError, match=r"0\.1"):
            h5pack.convert(source, out, **quick(chunk_rows=2, resume=True))
    options = (
        (0, {"seed": 3}, "seed=0"),
        (0, {"size": (32, 16)}, "size='32x16'"),
        (0, {"compat": True}, "compat=True"),
    )
    for change, settings, found in (*options, (9, {}, "8 images"), (3, {}, "00003.jpg")):
        if change:
            save(source / f"{change:05d}.jpg", 33)
        with pytest.raises(ResumeError) as caught:
            h5pack.convert(source, out, **quick(chunk_rows=2, resume=True, **settings))
        assert found in f"{caught.value} {caught.value.parameters}"
        (source / "00009.jpg").unlink(missing_ok=True)
    assert h5pack.convert(source, out, **quick(chunk_rows=2, overwrite=True)).images == 8


@pytest.mark.parametrize("settings", [{}, {"shard_bytes": 2_000_000}])
def test_a_run_that_was_interrupted_while_another_one_surveyed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    source, out = flat_folder(tmp_path / "in", 8), tmp_path / "o.h5"
    other, survey = flat_folder(tmp_path / "other", 9), h5pack.pack.conversion.survey

    def slow(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr("h5pack.pack.conversion.survey", survey)
            interrupted(source, out, monkeypatch, rows=4)
        return survey(*arguments)

    monkeypatch.setattr("h5pack.pack.conversion.survey", slow)
    with pytest.raises(OutputExistsError) as caught:
        h5pack.convert(other, out, **quick(**settings))
    assert caught.value.path == str(tmp_path / "o.h5.partial")
    monkeypatch.undo()
    assert h5pack.convert(source, out, **quick(chunk_rows=2, resume=True)).resumed_rows == 4


def test_errors_of_listing_the_source_are_not_reported_as_errors_of_the_output(tmp_path: Path) -> None:
    failure = OSError(errno.EIO, "Input/output error")
    source = MagicMock(spec=["__len__", "__getitem__"], **{"__len__.side_effect": failure})
    with pytest.raises(OSError) as caught:
        h5pack.convert(source, tmp_path / "o.h5", num_workers=1)
    assert caught.value is failure


def test_an_output_completed_during_the_survey_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, survey = flat_folder(tmp_path / "in", 4), tmp_path / "o.h5", h5pack.pack.conversion.survey

    def slow(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr("h5pack.pack.conversion.survey", survey)
            h5pack.convert(source, out, **quick(resume=True))
        return survey(*arguments)

    monkeypatch.setattr("h5pack.pack.conversion.survey", slow)
    report = h5pack.convert(source, out, **quick(resume=True))
    assert (report.already_complete, report.images, leftovers(tmp_path)) == (True, 4, {"in", "o.h5"})


@pytest.mark.parametrize("keywords", [{}, {"chunk_rows": 4, "shard_bytes": 1_090_000}])
@pytest.mark.parametrize("exists", [False, True])
def test_the_file_behind_a_symbolic_link_is_replaced(tmp_path: Path, keywords: dict[str, Any], exists: bool) -> None:
    source, path, link = flat_folder(tmp_path / "in", 9), tmp_path / "real" / "o.h5", tmp_path / "links" / "link.h5"
    path.parent.mkdir()
    link.parent.mkdir()
    link.symlink_to("../real/o.h5")
    if exists:
        path.write_bytes(b"x")
        with pytest.raises(OutputExistsError) as caught:
            h5pack.convert(source, link, **quick(**keywords))
        assert caught.value.path == str(path)
    report = h5pack.convert(source, link, **quick(overwrite=exists, **keywords))
    assert (report.path, report.images) == (str(path), 9)
    assert h5pack.convert(source, link, **quick(resume=True, **keywords)).already_complete
    assert (os.readlink(link), leftovers(link.parent)) == ("../real/o.h5", {"link.h5"})
    assert leftovers(path.parent) == {"o.h5"} | ({f"o-{number:05d}.h5" for number in range(report.shards)})
    assert h5pack.verify(link, num_workers=1).rows == 9


def test_files_of_a_killed_coordinator_are_removed_at_the_end(tmp_path: Path) -> None:
    source, output = flat_folder(tmp_path / "in", 4), Output(tmp_path / "o.h5")
    left = {f"o.h5.partial.{kind}-0123" for kind in ("owner", "probe")}
    for name in left:
        (tmp_path / name).touch()
    # A coordinator needs its own probe until the end.
    output.remove_leftovers(keep_survey=True)
    assert leftovers(tmp_path) == {"in", *left}
    h5pack.convert(source, output.final, **quick())
    assert leftovers(tmp_path) == {"in", "o.h5"}


@pytest.mark.parametrize(("workers", "shard_bytes"), [(1, None), (2, None), (2, 1_500_000)])
def test_files_that_workers_keep_open_leave_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, shard_bytes: int | None
) -> None:
    """On NFS and FUSE, a removed file gets another name while it is open, so its folder cannot be removed."""
    rmdir, end, open_files = os.rmdir, Conversion.__exit__, True

    def refusing(path: Any, **keywords: Any) -> None:
        if open_files and str(path).endswith(".partial.journal"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        rmdir(path, **keywords)

    def ending(conversion: Conversion, *error: Any) -> None:
        nonlocal open_files
        open_files = False
        end(conversion, *error)

    monkeypatch.setattr(os, "rmdir", refusing)
    monkeypatch.setattr(Conversion, "__exit__", ending)
    report = h5pack.convert(
        flat_folder(tmp_path / "in", 90), tmp_path / "o.h5", size=96, num_workers=workers, shard_bytes=shard_bytes
    )
    assert (report.shards > 1) == (shard_bytes is not None)
    assert leftovers(tmp_path) == {"in", "o.h5", *(f"o-{number:05d}.h5" for number in range(report.shards))}


@pytest.mark.parametrize("offset", [0, 64, 600, 1200])
def test_lost_metadata_is_found_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    def losing(structure: Path, descriptor: int, *arguments: Any) -> None:
        copy_structure(structure, descriptor, *arguments)
        os.pwrite(descriptor, bytes(500), offset)

    copy_structure = finish.copy_structure
    monkeypatch.setattr(finish, "copy_structure", losing)
    with pytest.raises(H5PackError) as caught:
        h5pack.convert(flat_folder(tmp_path / "in", 4), tmp_path / "o.h5", **quick())
    assert caught.value.path == str(tmp_path / "o.h5.partial")
    assert "resume=True" in caught.value.parameters
    monkeypatch.undo()
    assert h5pack.convert(tmp_path / "in", tmp_path / "o.h5", resume=True, **quick()).resumed_rows == 4
    assert h5pack.verify(tmp_path / "o.h5").ok


def test_a_name_that_leaves_no_room_for_temporary_names_is_refused_first(tmp_path: Path) -> None:
    source = flat_folder(tmp_path / "in", 4)
    max_bytes = os.pathconf(tmp_path, "PC_NAME_MAX")
    for length, resume in itertools.product((max_bytes - 39, max_bytes, max_bytes + 1), (False, True)):
        with pytest.raises(SourceError) as caught:
            h5pack.convert(source, tmp_path / ("x" * length), **quick(resume=resume))
        assert caught.value.path == str(tmp_path / ("x" * length))
    assert leftovers(tmp_path) == {"in"}
    out = tmp_path / ("x" * (max_bytes - 40))
    h5pack.convert(source, out, **quick(part="1/1"))
    assert h5pack.convert(source, out, **quick(finish=True)).images == 4


def test_resume_refuses_another_order_of_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, annotations = flat_folder(tmp_path / "in", 8), tmp_path / "o.h5", tmp_path / "a.json"
    with Image.open(source / "00000.jpg") as image:
        width, height = image.size

    def annotate(rejected: int) -> None:
        heights = [height + (number == rejected) for number in range(8)]
        images = [
            {"id": number, "file_name": f"{number:05d}.jpg", "height": rows, "width": width}
            for number, rows in enumerate(heights)
        ]
        boxes = [{"id": number, "image_id": number, "category_id": 1, "bbox": [1, 1, 5, 5]} for number in range(8)]
        tables = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "x"}]}
        annotations.write_text(json.dumps(tables))

    annotate(1)
    interrupted(annotations, out, monkeypatch, rows=4, root=source)
    annotate(6)
    with pytest.raises(ResumeError):
        h5pack.convert(annotations, out, **quick(chunk_rows=2, root=source, resume=True))
    annotate(1)
    assert h5pack.convert(annotations, out, **quick(chunk_rows=2, root=source, resume=True)).rejects == 1


def test_resume_keeps_what_was_written_and_redoes_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = flat_folder(tmp_path / "in", 20), tmp_path / "o.h5"
    h5pack.convert(source, tmp_path / "whole.h5", **quick(chunk_rows=2))
    interrupted(source, out, monkeypatch, rows=9)
    # What a power cut can do: the journal has reached the disk, some of the rows have not.
    with h5py.File(tmp_path / "whole.h5") as file, (tmp_path / "o.h5.partial").open("r+b") as stream:
        stream.seek(file["images"].id.get_chunk_info(1).byte_offset)
        stream.write(bytes(100))
    assert h5pack.convert(source, out, **quick(chunk_rows=2, resume=True)).resumed_rows == 5
    assert out.read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_a_second_conversion_to_the_same_output_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.system.files._LOCK_WAIT_SECONDS", 0.2)
    source = flat_folder(tmp_path / "in", 4)
    lock = OutputLock(Output(tmp_path / "o.h5"))
    for settings in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(OutputBusyError):
            h5pack.convert(source, tmp_path / "o.h5", **quick(**settings))
        # The source is not read, which may take minutes.
        with pytest.raises(OutputBusyError):
            h5pack.convert(tmp_path / "missing", tmp_path / "o.h5", **quick(**settings))
    lock.close()
    assert h5pack.convert(source, tmp_path / "o.h5", **quick(resume=True)).images == 4


def test_no_other_conversion_can_lock_a_file_being_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.system.files._LOCK_WAIT_SECONDS", 0.0)
    output, others = Output(tmp_path / "o.h5"), []
    lock = OutputLock(output)
    before = os.fstat(lock.descriptor).st_ino

    def then_try_to_lock(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **settings: Any) -> Any:
            result = call(*arguments, **settings)
            with monkeypatch.context() as patch:
                for name, original in originals.items():
                    patch.setattr(os, name, original)
                try:
                    os.close(open_locked(output.partial, "busy"))
                    others.append("locked")
                except OutputBusyError:
                    others.append("busy")
            return result

        return wrapped

    originals = {name: getattr(os, name) for name in ("open", "unlink", "replace", "close")}
    for name, original in originals.items():
        monkeypatch.setattr(os, name, then_try_to_lock(original))
    lock.renew()
    monkeypatch.undo()
    assert len(others) >= 4
    assert set(others) == {"busy"}
    assert os.fstat(lock.descriptor).st_ino != before
    lock.close()
    assert os.listdir(tmp_path) == []


def test_conversions_in_threads_do_not_mix(tmp_path: Path) -> None:
    folders = [flat_folder(tmp_path / name, count) for name, count in (("a", 120), ("b", 90), ("c", 60))]
    with ThreadPoolExecutor(len(folders)) as executor:
        list(executor.map(lambda folder: h5pack.convert(folder, f"{folder}.h5", **quick(chunk_rows=8)), folders))
    for folder in folders:
        h5pack.convert(folder, tmp_path / "alone.h5", **quick(chunk_rows=8, overwrite=True))
        assert Path(f"{folder}.h5").read_bytes() == (tmp_path / "alone.h5").read_bytes()


class Samples:
    """A map-style dataset, picklable for spawn."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError("no sample today")
        return pixels(index), index * 3


class Table(Samples):
    def __getitem__(self, index: int) -> Any:
        return pixels(index, channels=1), [index % 2, 1]


@pytest.mark.parametrize("settings", [{}, {"num_workers": 2, "start_method": "spawn"}, {"limit": 6}])
def test_a_map_style_dataset_is_a_source(tmp_path: Path, settings: dict[str, Any]) -> None:
    h5pack.convert(Samples(), tmp_path / "o.h5", **quick(**settings))
    with h5py.File(tmp_path / "o.h5") as file:
        packed = [0, 3, 7, 11, 15, 19] if "limit" in settings else sorted({*range(23)} - {5})
        assert sorted(int(name) for name in names_of(file)) == packed
        for row, name in enumerate(names_of(file)):
            assert np.array_equal(file["images"][row], pixels(int(name)))
            assert file["labels"][row] == int(name) * 3
        if "limit" not in settings:
            assert file["rejects/reasons"][()].tolist() == [b"the dataset raised ValueError: no sample today"]


def test_a_dataset_of_gray_images_with_tables_of_labels(tmp_path: Path) -> None:
    h5pack.convert(Table(), tmp_path / "o.h5", **quick(mode="gray", order="sorted"))
    with h5py.File(tmp_path / "o.h5") as file:
        assert (file["images"].shape, file["labels"].dtype) == ((23, 20, 14, 1), np.uint8)
        assert file["labels"][()].tolist() == [[index % 2, 1] for index in range(23)]


def splits_of(path: Path) -> dict[str, list[str]]:
    """The file names of each split."""
    with h5py.File(path) as file:
        ranges = zip(file["splits/name"].asstr()[()], file["splits/rows"][()].tolist(), strict=True)
        return {name: names_of(file)[start:stop] for name, (start, stop) in ranges}


def test_a_validation_split_has_its_fraction_of_each_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = class_folders(tmp_path / "in", {"a": 20, "b": 10, "c": 10})
    (source / "a" / "zero.jpg").write_bytes(b"")
    out = tmp_path / "o.h5"
    h5pack.convert(source, tmp_path / "whole.h5", **quick(val=0.2, chunk_rows=2, num_workers=2))
    whole = splits_of(tmp_path / "whole.h5")
    assert {name: Counter(name[0] for name in names) for name, names in whole.items()} == {
        "train": {"a": 16, "b": 8, "c": 8},
        "val": {"a": 4, "b": 2, "c": 2},
    }
    h5pack.convert(source, out, **quick(val=0.2, seed=1))
    assert set(splits_of(out)["val"]) != set(whole["val"])
    out.unlink()
    interrupted(source, out, monkeypatch, rows=9, val=0.2)
    with pytest.raises(ResumeError) as caught:
        h5pack.convert(source, out, **quick(val=0.3, chunk_rows=2, resume=True))
    assert "val=0.2" in caught.value.parameters
    # Once with an unfinished and once with a finished output.
    for complete in (False, True):
        report = h5pack.convert(source, out, **quick(val=0.2, chunk_rows=2, resume=True))
        assert (report.already_complete, out.read_bytes()) == (complete, (tmp_path / "whole.h5").read_bytes())
    with pytest.raises(OutputExistsError):
        h5pack.convert(source, out, **quick(val=0.3, chunk_rows=2, resume=True))
    truncate(source / whole["val"][0], keep=0.95)
    assert h5pack.convert(source, out, **quick(val=0.2, chunk_rows=2, overwrite=True)).rejects == 2
    left = splits_of(out)
    assert (set(left["val"]), set(left["train"])) == ({*whole["val"][1:]}, {*whole["train"]})


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ({"train": 20}, {"train": 15, "val": 5}),
        ({"training": 20, "testing": 3, "test": 9}, {"training": 15, "val": 5, "test": 9, "testing": 3}),
        ({"train": 8, "valid": 9}, "valid"), ({"Validation": 9}, "Validation"),
        ({"test": 9, "train": 8, "tr": 7}, "several"), ({"test": 9}, "none"),
    ],
)  # fmt: skip
def test_only_training_images_are_divided(tmp_path: Path, counts: dict[str, int], found: dict[str, int] | str) -> None:
    source = split_folders(tmp_path / "in", {name: {"x": count - 2, "y": 2} for name, count in counts.items()})
    out = tmp_path / "o.h5"
    if isinstance(found, str):
        with pytest.raises(OptionsError, match=found) as caught:
            h5pack.convert(source, out, **quick(val=0.25))
        assert caught.value.parameters == ("val=0.25",)
    else:
        h5pack.convert(source, out, **quick(val=0.25))
        splits = splits_of(out)
        assert {name: len(rows) for name, rows in splits.items()} == found
        # The images of the other splits stay there.
        assert all(name.startswith(f"{split}/") for split in set(counts) & set(splits) for name in splits[split])
        assert {name.partition("/")[0] for name in splits["val"]} == {next(iter(counts))}
        assert h5pack.convert(source, out, **quick(val=0.25, resume=True)).already_complete
    for val in (0.001, 0.999):
        with pytest.raises(OptionsError):
            h5pack.convert(source, tmp_path / "p.h5", **quick(val=val))


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_training_images_are_not_divided(tmp_path: Path, count: int) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["images"], file["person"] = np.zeros((9, 8, 8, 3), np.uint8), np.arange(9)
        file["splits/name"], file["splits/rows"] = ["train", "test"], [[0, count], [count, 9]]
    for options, parameters in (({}, ()), ({"val_groups": "person", "fields": "person"}, ("val_groups='person'",))):
        with pytest.raises(OptionsError, match="leave out") as caught:
            h5pack.convert(tmp_path / "in.h5", tmp_path / "o.h5", **quick(val=0.5, **options))
        assert caught.value.parameters == ("val=0.5", *parameters)
    h5pack.convert(tmp_path / "in.h5", tmp_path / "o.h5", **quick())
    assert [len(rows) for rows in splits_of(tmp_path / "o.h5").values()] == [count, 9 - count]


def persons(path: Path, of: str = "train") -> set[int]:
    """The persons in a split, by the number of the image: four images show one."""
    return {int(Path(name).stem) // 4 for name in splits_of(path)[of]}


class People(Samples):
    def __getitem__(self, index: int) -> Any:
        return {"image": pixels(index), "label": index % 2, "person": [float(index // 4)] * 2}


@pytest.mark.parametrize("kind", ["number", "text", "dataset"])
def test_images_of_one_group_stay_in_one_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "o.h5"
    lines = ["path,label,person,name"]
    for number in range(22):
        save(tmp_path / f"{number}.jpg", number, (20, 14))
        lines.append(f"{number}.jpg,{number % 2},{number // 4},{'p' * (1 + number // 4)}")
    source.write_text("\n".join(lines) + "\n")
    given: dict[str, Any] = {
        "number": {"field_columns": "person", "val_groups": "person"},
        "text": {"text_columns": "name", "val_groups": "name"},
        "dataset": {"fields": "person", "val_groups": "person"},
    }[kind]
    found: Any = People() if kind == "dataset" else source
    h5pack.convert(found, out, **quick(val=0.3, chunk_rows=2, num_workers=1, **given))
    # Of 22 or 23 images 0.3 are 7 or 8: those of two persons with four images each, or with four and two.
    assert len(persons(out, "val")) == 2
    assert persons(out, "val") | persons(out) == set(range(6))
    assert persons(out, "val").isdisjoint(persons(out))
    assert h5pack.convert(found, out, **quick(val=0.3, chunk_rows=2, resume=True, **given)).already_complete
    with pytest.raises(OutputExistsError):
        h5pack.convert(found, out, **quick(val=0.3, chunk_rows=2, resume=True, **{**given, "val_groups": None}))
    if kind != "dataset":
        whole = out.read_bytes()
        out.unlink()
        interrupted(found, out, monkeypatch, rows=9, val=0.3, **given)
        with pytest.raises(ResumeError) as caught:
            h5pack.convert(found, out, **quick(val=0.3, chunk_rows=2, resume=True, **{**given, "val_groups": None}))
        assert any("val_groups" in one for one in caught.value.parameters)
        h5pack.convert(found, out, **quick(val=0.3, chunk_rows=2, resume=True, **given))
        assert out.read_bytes() == whole


class Unread(People):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("nothing needs to be read")


def test_groups_are_a_field_with_several_values(tmp_path: Path) -> None:
    source, out = tmp_path / "in.h5", tmp_path / "o.h5"
    with h5py.File(source, "w") as file:
        file["images"], file["one"] = np.zeros((9, 8, 8, 3), np.uint8), [b"x"] * 9
        file["a/two"] = file["b/two"] = [[1, 2]] * 8 + [[1, 3]]
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (source, {"val": 0.5, "val_groups": "one"}), (source, {"val": 0.5, "val_groups": "one", "fields": "a/two"}),
        (source, {"val": 0.5, "val_groups": "one", "fields": "one"}),
        (source, {"val": 0.5, "val_groups": "b/two", "fields": "a/two"}), (source, {"val": 0.5, "val_groups": 5}),
        (Unread(), {"val": 0.5, "val_groups": "unknown", "fields": "person"}),
    ]  # fmt: skip
    for given, options in wrong:
        with pytest.raises(OptionsError) as caught:
            h5pack.convert(given, out, **quick(**options))
        assert f"val_groups={options['val_groups']!r}" in caught.value.parameters
    with pytest.raises(OptionsError) as caught:
        h5pack.convert(source, out, **quick(val_groups="one"))
    assert caught.value.parameters == ("val_groups", "val")
    for name in ("two", "a/two", "/a/two/"):
        h5pack.convert(source, out, **quick(val=0.5, val_groups=name, fields=("one", "a/two"), overwrite=True))
        assert sorted(map(len, splits_of(out).values())) == [1, 8]
    assert leftovers(tmp_path) == {"in.h5", "o.h5"}
    # The groups of the images that a pack has already would not be seen.
    with pytest.raises(OptionsError) as caught:
        h5pack.append(out, source, val=0.5, val_groups="two")
    assert caught.value.parameters == ("val_groups",)


@pytest.mark.parametrize("dataset", [Samples(), Table()])
def test_a_validation_split_of_a_dataset(tmp_path: Path, dataset: Samples) -> None:
    h5pack.convert(dataset, tmp_path / "o.h5", **quick(val=0.25, mode="gray"))
    # One of the samples of integers fails.
    number = 22 if type(dataset) is Samples else 23
    val = splits_of(tmp_path / "o.h5")["val"]
    assert len(val) == round(number * 0.25)
    report = h5pack.convert(dataset, tmp_path / "o.h5", **quick(val=0.25, mode="gray", resume=True))
    assert report.already_complete


def test_the_file_does_not_depend_on_the_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = class_folders(tmp_path / "in", {"a": 20, "b": 20}, (50, 41))
    h5pack.convert(source, tmp_path / "fast.h5", **quick())
    monkeypatch.setattr("h5pack.images.decode._simplejpeg", lambda: None)
    h5pack.convert(source, tmp_path / "slow.h5", **quick())
    assert (tmp_path / "fast.h5").read_bytes() == (tmp_path / "slow.h5").read_bytes()


@pytest.mark.parametrize("settings", [{}, {"compat": True}, {"compression": "gzip"}, {"chunk_rows": 1}])
def test_the_plan_bounds_the_size_of_the_file(tmp_path: Path, settings: dict[str, Any]) -> None:
    source = class_folders(tmp_path / "in", {"a": 20, "b": 20}, (50, 41))
    (source / "a" / "zero.jpg").write_bytes(b"")
    with Conversion(source, tmp_path / "o.h5", **quick(**settings)) as conversion:
        plan = conversion.plan()
        report = conversion.run()
    assert plan.source_bytes == sum(path.stat().st_size for path in source.rglob("*.jpg"))
    assert report.bytes <= plan.file_bytes < report.bytes + 500_000


def test_unicode_and_undecodable_names(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "雪"
    save(folder / "größe.jpg", 1), save(folder / "плюс.jpg", 2)
    os.rename(save(folder / "x.jpg", 3), os.fsencode(folder) + b"/bad\xff.jpg")
    h5pack.convert(folder.parent, tmp_path / "o.h5", **quick(order="sorted"))
    with h5py.File(tmp_path / "o.h5") as file:
        assert names_of(file) == ["雪/bad\\udcff.jpg", "雪/größe.jpg", "雪/плюс.jpg"]
        assert file["labels"].attrs["classes"][0].decode() == "雪"


def test_the_same_content_makes_the_same_bytes_at_any_time(tmp_path: Path) -> None:
    source = split_folders(tmp_path / "in", {"train": {"x": 9}, "test": {"x": 5, "y": 2}}, (60, 50))
    truncate(source / "test" / "y" / "00001.jpg")

    def file(compat: bool) -> bytes:
        h5pack.convert(source, tmp_path / "o.h5", **quick(compat=compat, overwrite=True))
        return (tmp_path / "o.h5").read_bytes()

    before, second = [file(False), file(True)], int(time.time())
    # HDF5 counts time in seconds.
    wait_for(lambda: int(time.time()) > second)
    assert [file(False), file(True)] == before


@pytest.mark.parametrize("shards", [False, True])
def test_file_locks_of_hdf5_do_not_conflict_with_the_lock_of_the_output(tmp_path: Path, shards: bool) -> None:
    source = flat_folder(tmp_path / "in", 20)
    settings = quick(chunk_rows=4, shard_bytes=1_090_000 if shards else None)
    h5pack.convert(source, tmp_path / "o.h5", **settings)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.h5")}
    arguments = repr((str(source), str(tmp_path / "o.h5")))
    code = f"import h5pack; h5pack.convert(*{arguments}, **{settings}, overwrite=True)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "HDF5_USE_FILE_LOCKING": "TRUE"})
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.h5")} == before


def test_resume_of_a_finished_output_only_checks_it(tmp_path: Path) -> None:
    first, second = class_folders(tmp_path / "a", {"x": 5, "y": 4}), class_folders(tmp_path / "b", {"x": 4, "y": 5})
    renamed = class_folders(tmp_path / "c", {"x": 5, "z": 4})
    out = tmp_path / "o.h5"
    h5pack.convert(first, out, **quick())
    before = out.stat().st_mtime_ns
    report = h5pack.convert(first, out, **quick(resume=True))
    assert (report.already_complete, report.images) == (True, 9)
    for source, settings, error in (
        (second, {}, OutputExistsError), (renamed, {}, OutputExistsError), (first, {"seed": 7}, OutputExistsError),
        (tmp_path / "none", {}, SourceError),
    ):  # fmt: skip
        with pytest.raises(error):
            h5pack.convert(source, out, **quick(resume=True, **settings))
    assert out.stat().st_mtime_ns == before
    with h5py.File(out, "r+") as file:
        file.attrs["h5pack_complete"] = 0
    with pytest.raises(IncompletePackError):
        h5pack.convert(first, out, **quick(resume=True))
    out.write_bytes(b"precious")
    with pytest.raises(PackFormatError):
        h5pack.convert(first, out, **quick(resume=True))
    assert out.read_bytes() == b"precious"


def test_a_finished_output_that_has_lost_a_shard_is_not_complete(tmp_path: Path) -> None:
    source, out = flat_folder(tmp_path / "in", 20), tmp_path / "o.h5"
    settings = quick(chunk_rows=4, shard_bytes=1_090_000)
    first = h5pack.convert(source, out, **settings)
    report = h5pack.convert(source, out, **settings, resume=True)
    assert (report.already_complete, report.shards, report.bytes) == (True, first.shards, first.bytes)
    (tmp_path / "o-00000.h5").unlink()
    with pytest.raises(OutputExistsError):
        h5pack.convert(source, out, **settings, resume=True)


@pytest.mark.parametrize("kind", ["gzip", "shards", "parts"])
def test_a_resumed_run_keeps_the_permissions_of_the_output(tmp_path: Path, kind: str) -> None:
    source, out = flat_folder(tmp_path / "in", 20), tmp_path / "o.h5"
    settings = quick(
        **{"gzip": {"compression": "gzip"}, "shards": {"chunk_rows": 4, "shard_bytes": 1_090_000}}.get(kind, {})
    )
    h5pack.convert(source, out, **settings)
    out.chmod(0o600)
    if kind == "parts":
        h5pack.convert(source, out, part="1/1", overwrite=True, **settings)
        output = Output(out, permissions_of=out)
        with contextlib.closing(OutputLock(output)) as lock:
            partial = [output.partial.stat()]
            lock.isolate()
            partial.append(output.partial.stat())
        assert partial[0].st_ino != partial[1].st_ino
        assert [status.st_mode & 0o777 for status in partial] == [0o600] * 2
        h5pack.convert(source, out, finish=True, **settings)
    else:
        convert_until("h5pack.pack.writer.write_rows", source, out, {**settings, "overwrite": True})
        h5pack.convert(source, out, resume=True, **settings)
    packs = sorted(tmp_path.glob("o-*.h5")) or [out]
    assert [path.stat().st_mode & 0o777 for path in packs] == [0o600] * (3 if kind == "shards" else 1)


TABLE = "filename,label,mask,kind\n00000.jpg,cat,m/0.png,a\n00001.jpg,dog,m/1.png,b\n00002.jpg,dog,m/2.png,b\n"
REPEATED = TABLE + "00001.jpg,dog,m/1.png,b\n"


@pytest.mark.parametrize(
    ("table", "changed"),
    [
        (TABLE, TABLE.replace("cat", "ant").replace("dog", "bee")),
        (TABLE, TABLE.replace("m/1.png", "")),
        (TABLE, TABLE.replace("1.jpg,dog", "1.jpg,cat")),
        (TABLE, TABLE.replace(",b", ",c")),
        (TABLE, TABLE.replace("0.png,a", "0.png,ab").replace("1.png,b", "1.png,")),
        (REPEATED, REPEATED.replace("2.jpg,dog", "2.jpg,cat")),
        (REPEATED, REPEATED.replace("1.jpg,dog", "1.jpg,cat")),
        (REPEATED, REPEATED.replace("m/2.png,b", "m/2.png,c")),
        (REPEATED, REPEATED.replace("cat", "x").replace("dog", "cat").replace("x,", "dog,")),
    ],
)
def test_a_finished_output_of_a_changed_table_is_not_complete(tmp_path: Path, table: str, changed: str) -> None:
    root, out = flat_folder(tmp_path / "in", 3), tmp_path / "o.h5"
    (root / "m").mkdir()
    for number in range(3):
        Image.fromarray(np.full((20, 14), number, np.uint8)).save(root / "m" / f"{number}.png")
    source = root / "table.csv"
    options = quick(mask_columns="mask", text_columns="kind")
    source.write_text(table)
    h5pack.convert(source, out, **options)
    assert h5pack.convert(source, out, resume=True, **options).already_complete
    source.write_text(changed)
    with pytest.raises(OutputExistsError):
        h5pack.convert(source, out, resume=True, **options)


def test_an_output_that_appears_during_the_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, rejects = flat_folder(tmp_path / "in", 6), tmp_path / "o.h5", tmp_path / "o.h5.rejects.csv"
    (source / "empty.png").touch()
    complete = MagicMock(side_effect=finish.complete)

    def meanwhile(*arguments: Any) -> None:
        complete(*arguments)
        out.write_bytes(b"precious")
        rejects.write_text("other")

    monkeypatch.setattr(finish, "complete", meanwhile)
    # The resumed run finds it at its beginning.
    for resume in (False, True):
        with pytest.raises(OutputExistsError) as caught:
            h5pack.convert(source, out, **quick(resume=resume))
        assert "overwrite=True" in caught.value.parameters
        assert (out.read_bytes(), rejects.read_text()) == (b"precious", "other")
    assert complete.call_count == 1
    monkeypatch.undo()
    assert h5pack.convert(source, out, **quick(resume=True, overwrite=True)).images == 6
    assert h5pack.verify(out).ok


def test_chunks_larger_than_a_task_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = flat_folder(tmp_path / "in", 60, (60, 50))
    h5pack.convert(source, tmp_path / "whole.h5", **quick(chunk_rows=50))
    monkeypatch.setattr("h5pack.pack.writer.TASK_BYTES", 70_000)
    for io in ("direct", "buffered"):
        h5pack.convert(source, tmp_path / f"{io}.h5", **quick(chunk_rows=50, io=io, num_workers=2, start_method="fork"))
        assert (tmp_path / f"{io}.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_one_long_name_among_many(tmp_path: Path) -> None:
    source = flat_folder(tmp_path / "in", 5)
    deep = source.joinpath(*["d" * 200] * 15)
    save(deep / "x.jpg", 9)
    h5pack.convert(source, tmp_path / "o.h5", **quick(source_kind="flat"))
    with h5py.File(tmp_path / "o.h5") as file:
        assert str(deep.relative_to(source) / "x.jpg") in names_of(file)
        assert file["filenames"].chunks[0] * file["filenames"].dtype.itemsize <= 262_144
