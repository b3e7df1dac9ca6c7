"""`append`: a pack grows, or is as it was."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.combine.parts import open_part
from h5pack.combine.write import RowCopier
from h5pack.errors import (
    NoImagesError,
    NoSpaceError,
    OptionsError,
    OutputExistsError,
    PackFormatError,
    SizesDifferError,
    SourceError,
)
from h5pack.pack.options import ConvertOptions
from tests.combine.packs import KINDS, SOURCE, contents, pack, source
from tests.crashing import changes_in_child, distinct_steps, leftovers, small_file_system
from tests.makers import class_folders, flat_folder, numbers, pixels, quick, save, split_folders, truncate


def parts(root: Path, kind: str) -> tuple[Path, Path, dict[str, tuple[Any, ...]]]:
    """A pack, a source of further images, and what both contain; the second has a new class."""
    first = pack(root, "a", 14, ["cat", "dog"], **KINDS[kind])
    other = pack(root, "b", 10, ["emu", "cat"], **KINDS[kind])
    wanted = contents(first, other)
    other.unlink()
    return first, root / "b" / "list.jsonl", wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_pack_grows(tmp_path: Path, kind: str) -> None:
    path, more, wanted = parts(tmp_path, kind)
    truncate(source(tmp_path / "c", "c", 5, ["dog"]).with_name("c001.jpg"))
    old = h5pack.H5Dataset(path)
    before = [sample.image for sample in old]
    report = h5pack.append(path, more, **quick(**SOURCE))
    assert (report.images, report.added, report.rejects) == (24, 10, 0)
    assert "'emu'" in report.notes[-1]
    assert contents(path) == wanted
    dataset = h5pack.H5Dataset(path)
    assert dataset.classes == ("cat", "dog", "emu")
    # The rows that were there are where they were.
    assert all(np.array_equal(one.image, image) for one, image in zip(dataset, before, strict=False))
    assert [len(rows) for rows in dataset.splits.values()] == [14, 10]
    assert h5pack.verify(path, num_workers=1).ok
    report = h5pack.append(path, tmp_path / "c" / "list.jsonl", split="later", **quick(**SOURCE))
    assert (report.images, report.added, report.rejects) == (28, 4, 1)
    assert not any("'dog'" in note for note in report.notes)
    again = h5pack.H5Dataset(path, split="later")
    assert ((again.classes or ())[:3], np.asarray(again.rows).tolist()) == (dataset.classes, [24, 25, 26, 27])
    assert (tmp_path / "a.h5.rejects.csv").read_text().count("c001.jpg") == 1
    assert leftovers(tmp_path) == {"a", "b", "c", "a.h5", "a.h5.rejects.csv"}


@pytest.mark.parametrize("keep", [None, "jpeg"])
def test_statistics_count_images_of_all_splits_that_become_one(tmp_path: Path, keep: str | None) -> None:
    path, more = tmp_path / "a.h5", split_folders(tmp_path / "b", {"train": {"x": 3}, "val": {"x": 4}})
    h5pack.convert(split_folders(tmp_path / "a", {"train": {"y": 2}}), path, **quick(source_kind="splits", keep=keep))
    h5pack.append(path, more, split="train", source_kind="splits", num_workers=1)
    rows = np.concatenate([sample.image.numpy().reshape(-1, 3) for sample in h5pack.H5Dataset(path, "train")])
    with h5py.File(path) as file:
        assert dict(file["statistics"].attrs) == {"split": b"train", "rows": 9, "step": 1}
        np.testing.assert_allclose(file["statistics/mean"][()], rows.mean(0) / 255, rtol=1e-12)
        np.testing.assert_allclose(file["statistics/std"][()], rows.std(0) / 255, rtol=1e-12)


class Listed:
    """Samples with a list of numbers each, which a pack stores as an array if all lists have one length."""

    def __init__(self, name: str, lists: list[list[Any]]) -> None:
        self.filenames, self.lists = [f"{name}{number}" for number in range(len(lists))], lists

    def __len__(self) -> int:
        return len(self.lists)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": np.full((6, 5, 3), index, np.uint8), "list": self.lists[index]}


@pytest.mark.parametrize("new", [[[7]], [[7, 8], [9, 10]], [[[1, 2], [3, 4]]]])
def test_lists_of_one_length_are_appended_to_lists_of_several(tmp_path: Path, new: list[list[Any]]) -> None:
    old: list[list[Any]] = [[[1, 2]], []] if isinstance(new[0][0], list) else [[1], [2, 3], []]
    path = tmp_path / "a.h5"
    h5pack.convert(Listed("old", old), path, **quick(fields="list", order="sorted"))
    assert h5pack.append(path, Listed("new", new), fields="list", order="sorted", num_workers=1).added == len(new)
    lists = [np.asarray(sample[1]).tolist() for sample in h5pack.H5Dataset(path, fields=["list"])]
    assert lists == old + new
    assert h5pack.verify(path, num_workers=1).ok
    other = tmp_path / "b.h5"
    h5pack.convert(Listed("b", new), other, **quick(fields="list"))
    h5pack.join([path, other], tmp_path / "o.h5")
    with pytest.raises(SourceError):  # the first pack determines the kind of a field
        h5pack.join([other, path], tmp_path / "o.h5", overwrite=True)


def test_lists_of_one_length_are_appended_to_empty_lists(tmp_path: Path) -> None:
    path, old, new = tmp_path / "a.h5", [[], []], [[7, 8], [9, 10]]
    h5pack.convert(Listed("old", old), path, **quick(fields="list", order="sorted"))
    h5pack.append(path, Listed("new", new), fields="list", order="sorted", num_workers=1)
    assert [np.asarray(sample[1]).tolist() for sample in h5pack.H5Dataset(path, fields=["list"])] == old + new


def test_images_without_a_label_are_noted(tmp_path: Path) -> None:
    path = pack(tmp_path, "a", 4, ["cat", "dog"])
    more = source(tmp_path / "b", "b", 6, ["dog"])
    lines = more.read_text().splitlines()
    more.write_text("\n".join([*lines[:4], *(line.replace('"dog"', '""') for line in lines[4:])]))
    report = h5pack.append(path, more, **quick(**SOURCE))
    assert (report.added, [h5pack.H5Dataset(path)[row].label for row in range(4, 10)].count(-1)) == (6, 2)
    assert [note.endswith("val 2") for note in report.notes] == [True]


def test_two_appends_have_what_a_join_has(tmp_path: Path) -> None:
    packs = [pack(tmp_path, name, count, ["x", name]) for name, count in (("a", 9), ("b", 7), ("c", 5))]
    h5pack.join(packs, tmp_path / "o.h5")
    for name in "bc":
        h5pack.append(packs[0], tmp_path / name / "list.jsonl", **quick(**SOURCE))
    assert contents(packs[0]) == contents(tmp_path / "o.h5")
    one, other = h5pack.H5Dataset(packs[0]), h5pack.H5Dataset(tmp_path / "o.h5")
    assert one.classes == other.classes
    assert (one.mean, one.std) == (pytest.approx(other.mean, abs=0), pytest.approx(other.std, abs=0))


@pytest.mark.parametrize("kind", ["pixels", "jpeg"])
def test_killed_at_every_step(tmp_path: Path, kind: str) -> None:
    path, more, wanted = parts(tmp_path, kind)
    old = path.read_bytes()

    def work(**settings: Any) -> Any:
        return h5pack.append(path, more, **quick(**SOURCE, **settings))

    changes = changes_in_child(work, kill_at=None, watched=tmp_path / "a.h5*")
    whole = path.read_bytes()
    for step in distinct_steps(changes, first=True)[kind == "jpeg" :: 3]:
        changes[step].leave_files(tmp_path / "a.h5*")
        # The pack is whole at every moment: what it was, or what it becomes.
        assert path.read_bytes() in (old, whole), changes[step]
        report = work(resume=True)
        assert (report.images, path.read_bytes() == whole) == (24, True), f"killed at step {step}: {changes[step]}"
        assert leftovers(tmp_path) == {"a", "b", "a.h5"}
    assert contents(path) == wanted


def test_an_interrupted_append_is_not_forgotten(tmp_path: Path) -> None:
    path, more, wanted = parts(tmp_path, "pixels")
    copy = shutil.copy(path, tmp_path / "t.h5")
    changes = changes_in_child(lambda: h5pack.append(copy, more, **quick(**SOURCE)), None)
    step = changes.index("replace t.h5.new.partial") + 2
    changes_in_child(lambda: h5pack.append(path, more, **quick(**SOURCE)), step)
    assert (tmp_path / "a.h5.new").exists()
    with pytest.raises(OutputExistsError):
        h5pack.append(path, more, **quick(**SOURCE))
    h5pack.append(path, more, overwrite=True, **quick(**SOURCE))
    assert contents(path) == wanted


@pytest.mark.parametrize("last", ["replace t.h5.new.partial", "replace t.h5.partial", "unlink t.h5.new.rejects.csv"])
def test_what_an_interrupted_append_left_is_discarded_without_new_images(tmp_path: Path, last: str) -> None:
    folder, path = flat_folder(tmp_path / "in", 3), tmp_path / "t.h5"
    h5pack.convert(folder, path, **quick())
    before = path.read_bytes()
    new = save(folder / "new.jpg")
    changes = changes_in_child(lambda: h5pack.append(path, folder, only_new=True, **quick()), None)
    path.write_bytes(before)
    step = len(changes) - changes[::-1].index(last)
    changes_in_child(lambda: h5pack.append(path, folder, only_new=True, **quick()), step)
    assert (tmp_path / "t.h5.new").exists()
    new.unlink()
    if last == "replace t.h5.new.partial":
        assert h5pack.append(path, folder, only_new=True, overwrite=True, resume=True, **quick()).already_complete
        assert (tmp_path / "t.h5.new").exists()
    assert h5pack.append(path, folder, only_new=True, overwrite=True, **quick()).already_complete
    assert leftovers(tmp_path) == {"in", "t.h5"}
    assert len(h5pack.H5Dataset(path)) == 3 + (last != "replace t.h5.new.partial")


def test_the_pack_of_another_user_is_an_early_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, more, _ = parts(tmp_path, "pixels")
    before = leftovers(tmp_path)
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(SourceError):
        h5pack.append(path, more, **quick(**SOURCE))
    assert leftovers(tmp_path) == before


def test_names_that_the_pack_has(tmp_path: Path) -> None:
    path, more, wanted = parts(tmp_path, "pixels")
    h5pack.append(path, more, **quick(**SOURCE))
    before = path.read_bytes()
    with pytest.raises(SourceError) as error:
        h5pack.append(path, more, **quick(**SOURCE))
    assert error.value.parameters == ("only_new=True",)
    report = h5pack.append(path, more, only_new=True, **quick(**SOURCE))
    assert (report.already_complete, report.added, path.read_bytes() == before) == (True, 0, True)
    (tmp_path / "b" / "b003.jpg").rename(tmp_path / "b" / "new.jpg")
    text = more.read_text().replace('"b003.jpg"', '"new.jpg"')
    more.write_text(text)
    assert h5pack.append(path, more, only_new=True, **quick(**SOURCE)).added == 1
    assert contents(path).keys() == {*wanted, "new.jpg"}


@pytest.mark.parametrize("empty", [True, False])
def test_rejected_images_are_tried_again(tmp_path: Path, empty: bool) -> None:
    folder, path = flat_folder(tmp_path / "in", 3), tmp_path / "o.h5"
    bad = truncate(folder / "00001.jpg", 0 if empty else 0.6)
    h5pack.convert(folder, path, **quick())
    before = path.read_bytes()
    report = h5pack.append(path, folder, only_new=True, **quick())
    assert (report.already_complete, path.read_bytes() == before) == (True, True)
    assert leftovers(tmp_path) == {"in", "o.h5", "o.h5.rejects.csv"}
    # Images that were not rejected before are an error, as in a conversion.
    other = truncate(save(folder / "other.jpg"), 0.6)
    with pytest.raises(NoImagesError):
        h5pack.append(path, folder, only_new=True, **quick())
    other.unlink()
    save(bad)
    assert h5pack.append(path, folder, only_new=True, **quick()).added == 1


def test_a_reject_is_listed_once_and_until_its_image_is_packed(tmp_path: Path) -> None:
    folder, path = flat_folder(tmp_path / "in", 4), tmp_path / "o.h5"
    for number in (1, 2):
        truncate(folder / f"0000{number}.jpg")
    h5pack.convert(folder, path, **quick())
    first = open_part(path).rejects
    # One is rejected again, for the same reason or another one, while the other is still listed.
    save(folder / "new.jpg")
    assert h5pack.append(path, folder, only_new=True, **quick()).rejects == 2
    assert open_part(path).rejects == first
    truncate(folder / "00001.jpg", 0)
    save(folder / "00002.jpg")
    assert h5pack.append(path, folder, only_new=True, **quick()).rejects == 1
    (last,) = open_part(path).rejects
    assert (last.name, last.reason != first[0].reason) == ("00001.jpg", True)
    save(folder / "00001.jpg")
    assert h5pack.append(path, folder, only_new=True, **quick()).rejects == 0
    assert leftovers(tmp_path) == {"in", "o.h5"}


def test_resuming_a_complete_append_of_rejected_images(tmp_path: Path) -> None:
    first, folder, path = flat_folder(tmp_path / "a", 1), tmp_path / "b", tmp_path / "v.h5"
    h5pack.convert(first, path, shard_bytes="2MB", **quick())
    truncate(save(folder / "bad.jpg"))
    save(folder / "good.jpg")
    assert h5pack.append(path, folder, **quick()).added == 1
    assert h5pack.append(path, folder, resume=True, **quick()).already_complete
    rejects = {"v.h5.rejects.csv", "v-00001.h5.rejects.csv"}
    assert leftovers(tmp_path) == {"a", "b", "v.h5", "v-00000.h5", "v-00001.h5"} | rejects


def test_a_name_that_is_not_valid_utf8_is_appended_once(tmp_path: Path) -> None:
    folder = flat_folder(tmp_path / "in", 1)
    (folder / "00000.jpg").rename(folder / os.fsdecode(b"\xff.jpg"))
    h5pack.convert(folder, tmp_path / "o.h5", **quick())
    with pytest.raises(SourceError) as error:
        h5pack.append(tmp_path / "o.h5", folder, **quick())
    assert error.value.parameters == ("only_new=True",)
    assert h5pack.append(tmp_path / "o.h5", folder, only_new=True, **quick()).already_complete
    save(folder / os.fsdecode(b"\xfe.jpg"))
    assert h5pack.append(tmp_path / "o.h5", folder, only_new=True, **quick()).added == 1
    assert h5pack.H5Dataset(tmp_path / "o.h5").filenames == ["\\udcff.jpg", "\\udcfe.jpg"]


OF_NEW_IMAGES = {
    "source_kind", "include", "exclude", "limit", "root", "path_column", "label_columns", "split_column",
    "field_columns", "mask_columns", "text_columns", "box_columns", "keypoint_columns", "box_format", "image_columns",
    "images", "labels", "fields", "channel_axis", "value_range", "order", "seed", "val", "strict", "num_workers",
    "start_method", "io", "overwrite", "resume",
}  # fmt: skip
"""The options that `append` accepts. All others are those of the pack, or refused."""


def test_options_are_those_of_the_pack_unless_they_concern_only_the_new_images(tmp_path: Path) -> None:
    folder = flat_folder(tmp_path / "in", 2)
    path = h5pack.convert(folder, tmp_path / "o.h5", **quick()).path
    for name in {field.name for field in fields(ConvertOptions)} - OF_NEW_IMAGES:
        with pytest.raises(OptionsError) as refused:
            h5pack.append(path, folder, **{name: getattr(ConvertOptions, name)})
        assert refused.value.parameters == (name,)


def test_images_that_do_not_fit(tmp_path: Path) -> None:
    h5pack.convert(class_folders(tmp_path / "in", {"y": 5}), tmp_path / "o.h5", **quick())
    before = (tmp_path / "o.h5").read_bytes()
    for other, kind, settings in (
        (class_folders(tmp_path / "large", {"x": 3}, (30, 30)), SizesDifferError, {}),
        (flat_folder(tmp_path / "flat", 3), SourceError, {}),
        (class_folders(tmp_path / "more", {"Y": 3}), SourceError, {}), (tmp_path / "none", SourceError, {}),
        (tmp_path / "large", OptionsError, {"size": 30}), (tmp_path / "large", OptionsError, {"chunk_rows": 3}),
        (tmp_path / "large", OptionsError, {"part": (1, 2)}), (tmp_path / "large", OptionsError, {"finish": True}),
    ):  # fmt: skip
        with pytest.raises(kind):
            h5pack.append(tmp_path / "o.h5", other, **quick(**settings))
        assert (tmp_path / "o.h5").read_bytes() == before
        assert not [name for name in leftovers(tmp_path) if name.startswith("o.h5.")]
    with pytest.raises(SourceError, match=r"has labels of the kind classes, but .* has none"):
        h5pack.append(tmp_path / "o.h5", tmp_path / "flat", **quick())
    with pytest.raises(OptionsError) as refused:
        h5pack.append(tmp_path / "o.h5", tmp_path / "large", split="all", **quick(val=0.5))
    assert refused.value.parameters == ("val", "split")
    with pytest.raises(OptionsError, match="append writes all new images to one file"):
        h5pack.append(tmp_path / "o.h5", tmp_path / "large", **quick(shard_bytes="1MB"))
    # Images of a source without splits go into the only split.
    path = tmp_path / "s.h5"
    h5pack.convert(split_folders(tmp_path / "splits", {"train": {"": 2}, "val": {"": 2}}), path, **quick())
    with pytest.raises(OptionsError) as error:
        h5pack.append(path, flat_folder(tmp_path / "two", 2), **quick())
    assert error.value.parameters == ("split", "val=0.1")
    assert not [name for name in leftovers(tmp_path) if name.startswith(f"{path.name}.")]
    h5pack.append(path, tmp_path / "two", **quick(val=0.5))
    assert [len(rows) for rows in h5pack.H5Dataset(path).splits.values()] == [3, 3]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_beside_the_pack_that_is_no_pack_is_kept_by_resume(tmp_path: Path, overwrite: bool) -> None:
    path, other = tmp_path / "o.h5", tmp_path / "o.h5.new"
    h5pack.convert(flat_folder(tmp_path / "in", 2), path, **quick())
    other.write_text("mine")
    with pytest.raises(PackFormatError):
        h5pack.append(path, flat_folder(tmp_path / "more", 3), **quick(only_new=True, resume=True, overwrite=overwrite))
    assert other.read_text() == "mine"


@pytest.mark.parametrize("virtual", [False, True])
def test_resume_with_another_source_keeps_what_an_append_left(tmp_path: Path, virtual: bool) -> None:
    old, path, other = tmp_path / "old.h5", tmp_path / "o.h5", tmp_path / ("o-00000.h5" if virtual else "o.h5.new")
    h5pack.convert(flat_folder(tmp_path / "in", 2), old, **quick())
    h5pack.join([old, old], path, virtual=virtual)
    h5pack.convert(flat_folder(tmp_path / "monday", 3), other, **quick())
    before = other.read_bytes()
    with pytest.raises(OutputExistsError) as caught:
        h5pack.append(path, flat_folder(tmp_path / "tuesday", 4), **quick(only_new=True, resume=True))
    parameters = ("resume=True",) if virtual else ("overwrite=True", "resume=True")
    assert (caught.value.path, caught.value.parameters) == (str(other), parameters)
    assert other.read_bytes() == before


def test_images_of_several_sizes_are_an_error_of_append(tmp_path: Path) -> None:
    """The error of a conversion would recommend a size, a parameter that `append` lacks."""
    path = tmp_path / "o.h5"
    h5pack.convert(flat_folder(tmp_path / "in", 2), path, **quick())
    save(tmp_path / "more" / "same.jpg")
    save(tmp_path / "more" / "larger.jpg", size=(30, 30))
    with pytest.raises(SizesDifferError) as error:
        h5pack.append(path, tmp_path / "more", **quick())
    assert (error.value.path, error.value.parameters) == (str(path), ())
    assert "h5pack convert --size" in str(error.value)


def test_a_full_disk_leaves_the_pack_as_it_was(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "4m") as disk:
        h5pack.convert(flat_folder(tmp_path / "a", 20, (100, 120)), disk / "o.h5", **quick())
        before = (disk / "o.h5").read_bytes()
        more = flat_folder(tmp_path / "b", 90, (100, 120))
        for number, path in enumerate(sorted(more.iterdir())):
            path.rename(more / f"b{number}.jpg")
        with pytest.raises(NoSpaceError):
            h5pack.append(disk / "o.h5", more, **quick())
        assert (disk / "o.h5").read_bytes() == before


def test_blocks_are_shared_where_the_file_system_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow twin of a file system with reflinks: each block that would be shared is copied."""
    path, more, wanted = parts(tmp_path, "nchw")
    shared: list[tuple[int, int, int]] = []

    def clone(source: int, target: int, start: int, count: int, offset: int) -> bool:
        shared.append((start, count, offset))
        assert not any(number % 4096 for number in shared[-1])
        os.pwrite(target, os.pread(source, count, start), offset)
        return True

    monkeypatch.setattr("h5pack.combine.write.clone_range", clone)
    monkeypatch.setattr("h5pack.combine.write._BLOCK", 4096)
    reads: list[int] = []
    read = RowCopier._read
    monkeypatch.setattr(RowCopier, "_read", lambda self, part, rows: reads.append(len(rows)) or read(self, part, rows))
    h5pack.append(path, more, **quick(**SOURCE))
    assert contents(path) == wanted
    assert shared
    assert sum(reads) < 24 * 2


def permissions(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mode & 0o7777, status.st_uid, status.st_gid


@pytest.mark.parametrize(
    ("settings", "mode"),
    [({}, 0o440), ({"compression": "gzip"}, 0o600), ({"shard_bytes": "2MB"}, 0o440), ({"shard_bytes": "2MB"}, 0o600)],
    ids=str,
)
def test_permissions_are_kept(tmp_path: Path, settings: Any, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder, seen = tmp_path / "o.h5", flat_folder(tmp_path / "in", 3), {}
    truncate(folder / "00001.jpg")
    h5pack.convert(folder, path, **quick(**settings))
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, 1234, 5678)
    old = permissions(path)
    save(tmp_path / "more" / "new.jpg")
    replace = os.replace

    def noting(source: Path, target: Path) -> None:
        seen[target.name] = permissions(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", noting)
    h5pack.append(path, tmp_path / "more", **quick())
    new = "o-00001.h5" if "shard_bytes" in settings else "o.h5.new"
    # While a file is written, only its owner may read and write besides.
    assert [seen[name] for name in (f"{new}.partial", new, "o.h5.partial", "o.h5")] == [(mode | 0o600, *old[1:])] * 4
    lasting = leftovers(tmp_path) - {"in", "more", "o-00000.h5", "o-00000.h5.rejects.csv"}
    assert lasting == {"o.h5", "o.h5.rejects.csv"} | ({new} if "shard_bytes" in settings else set())
    assert {permissions(tmp_path / name) for name in lasting} == {old}


@pytest.mark.parametrize("virtual", [False, True])
def test_the_pack_behind_a_symbolic_link_grows(tmp_path: Path, virtual: bool) -> None:
    path, link = tmp_path / "real" / "o.h5", tmp_path / "links" / "link.h5"
    path.parent.mkdir()
    link.parent.mkdir()
    link.symlink_to("../real/o.h5")
    h5pack.convert(flat_folder(tmp_path / "in", 3), path, **quick(**{"shard_bytes": "2MB"} if virtual else {}))
    save(tmp_path / "more" / "new.jpg")
    report = h5pack.append(link, tmp_path / "more", **quick())
    assert (report.path, report.images) == (str(path), 4)
    assert (os.readlink(link), leftovers(link.parent)) == ("../real/o.h5", {"link.h5"})
    assert leftovers(path.parent) == ({"o.h5", "o-00000.h5", "o-00001.h5"} if virtual else {"o.h5"})
    assert [h5pack.H5Dataset(one).filenames[-1] for one in (link, path)] == ["new.jpg"] * 2
    assert h5pack.verify(link, num_workers=1).ok


@pytest.mark.parametrize("kind", ["pixels", "jpeg"])
def test_a_virtual_file_gets_a_further_pack(tmp_path: Path, kind: str) -> None:
    path, more, wanted = parts(tmp_path, kind)
    third = pack(tmp_path, "c", 5, ["fox"], **KINDS[kind])
    out = tmp_path / "v.h5"
    h5pack.join([path, third], out, virtual=True)
    wanted |= contents(third)
    copy = shutil.copy(out, tmp_path / "w.h5")
    changes = changes_in_child(lambda: h5pack.append(copy, more, **quick(**SOURCE)), None)
    before = out.read_bytes()
    changes_in_child(lambda: h5pack.append(out, more, **quick(**SOURCE)), changes.index("replace w.h5.partial") - 1)
    assert out.read_bytes() == before
    with pytest.raises(OutputExistsError):
        h5pack.append(out, more, **quick(**SOURCE))
    report = h5pack.append(out, more, resume=True, **quick(**SOURCE))
    assert (report.images, report.added) == (29, 10)
    assert contents(out) == wanted
    assert h5pack.append(out, more, resume=True, **quick(**SOURCE)).already_complete
    assert h5pack.verify(out, num_workers=1).ok
    # The new file refers to the packs, not to the file that it replaced.
    with h5py.File(out) as file:
        images = file.get("images") or file["encoded/data"]
        assert {source.file_name for source in images.virtual_sources()} == {"a.h5", "c.h5", "v-00000.h5"}
    h5pack.append(out, source(tmp_path / "d", "d", 3, ["gnu"]), **quick(**SOURCE))
    assert len(contents(out)) == 32
    assert {"v-00000.h5", "v-00001.h5"} < leftovers(tmp_path)


@pytest.mark.parametrize("more", ["in", "more"])
def test_a_file_with_the_name_of_a_further_pack_is_kept(tmp_path: Path, more: str) -> None:
    path, mine = tmp_path / "v.h5", tmp_path / "v-00001.h5"
    h5pack.convert(flat_folder(tmp_path / "in", 3), path, shard_bytes="2MB", **quick())
    save(tmp_path / "more" / "new.jpg")
    shutil.copy(h5pack.convert(tmp_path / "more", tmp_path / "mine.h5", **quick()).path, mine)
    before = mine.read_bytes()
    for settings in ({}, {"overwrite": True}, {"overwrite": True, "resume": True}):
        with pytest.raises(OutputExistsError) as error:
            h5pack.append(path, tmp_path / more, only_new=True, **quick(**settings))
        assert (error.value.path, mine.read_bytes()) == (str(mine), before)
    mine.unlink()
    assert h5pack.append(path, tmp_path / more, only_new=True, overwrite=True, **quick()).added == (more == "more")


@dataclass
class Maps:
    """A dataset in Python whose samples have a field with the height and width of their images."""

    names: str
    dtype: str

    @property
    def filenames(self) -> list[str]:
        return [f"{name}.png" for name in self.names]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": pixels(index), "map": numbers(index, (20, 14)).astype(self.dtype)}


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_arrays_of_the_size_of_images_do_not_become_masks(tmp_path: Path, dtype: str) -> None:
    path, other = tmp_path / "a.h5", tmp_path / "b.h5"
    for names, out in (("abc", path), ("de", other)):
        h5pack.convert(Maps(names, dtype), out, **quick(fields="map", order="sorted"))
    h5pack.join([path, other], tmp_path / "o.h5")
    h5pack.append(path, Maps("de", dtype), **quick(fields="map", order="sorted"))
    h5pack.subset(path, tmp_path / "s.h5", rows="0:5")
    for found in (path, tmp_path / "o.h5", tmp_path / "s.h5"):
        with h5py.File(found) as file:
            assert (file["fields/map"].attrs["kind"], file["fields/map"].dtype) == (b"array", dtype)
            assert np.array_equal(file["fields/map"], [numbers(index, (20, 14)) for index in (0, 1, 2, 0, 1)])
        assert h5pack.verify(found, num_workers=1).ok


def store_again(path: Path, name: str, **storage: Any) -> None:
    """Store a dataset of a pack in another way, as h5repack does."""
    with h5py.File(path, "a") as file:
        data, attributes = file[name][()], dict(file[name].attrs)
        del file[name]
        file.create_dataset(name, data=data, **storage).attrs.update(attributes)


@pytest.mark.parametrize(
    ("kind", "name", "storage", "virtual"),
    [
        ("jpeg", "encoded/data", {"compression": "gzip"}, False), ("pixels", "images", {"scaleoffset": 0}, False),
        ("jpeg", "encoded/data", {"compression": "gzip"}, True), ("pixels", "fields/mask", {"scaleoffset": 0}, True),
    ],
)  # fmt: skip
def test_rows_that_only_the_hdf5_library_reads_are_kept(
    tmp_path: Path, kind: str, name: str, storage: dict[str, Any], virtual: bool
) -> None:
    path, more, wanted = parts(tmp_path, kind)
    store_again(path, name, **storage)
    if virtual:
        third = pack(tmp_path, "c", 5, ["fox"], **KINDS[kind])
        wanted |= contents(third)
        store_again(third, name, **storage)
        h5pack.join([path, third], tmp_path / "v.h5", virtual=True)
        path = tmp_path / "v.h5"
    assert h5pack.append(path, more, **quick(**SOURCE)).images == len(wanted)
    assert contents(path) == wanted
    assert h5pack.verify(path, num_workers=1).ok


def test_progress_ends_at_the_number_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, more, _ = parts(tmp_path, "gzip")
    bars: list[tuple[str, int, list[int]]] = []

    def bar(count: int, *, desc: str, **_: object) -> Any:
        bars.append((desc, count, []))
        return contextlib.nullcontext(SimpleNamespace(update=bars[-1][2].append))

    monkeypatch.setattr("h5pack.system.progress.progress_bar", bar)
    h5pack.append(path, more, progress=True, **quick(**SOURCE))
    assert {desc for desc, _, _ in bars} >= {"write", "compress"}
    assert [sum(done) for _, _, done in bars] == [count for _, count, _ in bars]


def test_a_contiguous_pack_does_not_become_one_chunk(tmp_path: Path) -> None:
    path = tmp_path / "o.h5"
    h5pack.convert(flat_folder(tmp_path / "in", 9, (400, 400)), path, **quick())
    with h5py.File(path) as file:
        chunks = file["images"].chunks
    store_again(path, "images")
    save(tmp_path / "more" / "new.jpg", size=(400, 400))
    h5pack.append(path, tmp_path / "more", **quick())
    with h5py.File(path) as file:
        assert (file["images"].shape[0], file["images"].chunks) == (10, chunks)


def test_masks_that_cannot_be_copied_are_an_error_before_any_work(tmp_path: Path) -> None:
    path, more, _ = parts(tmp_path, "jpeg")
    store_again(path, "fields/mask/data", compression="gzip")
    for work in (
        lambda: h5pack.subset(path, tmp_path / "o.h5"), lambda: h5pack.join([path, path], tmp_path / "o.h5"),
        lambda: h5pack.join([path, path], tmp_path / "o.h5", virtual=True),
        lambda: h5pack.append(path, more, **quick(**SOURCE)),
    ):  # fmt: skip
        with pytest.raises(SourceError) as caught:
            work()
        assert (caught.value.path, caught.value.dataset) == (str(path), "fields/mask")
        assert leftovers(tmp_path) == {"a", "a.h5", "b"}


@pytest.mark.parametrize("settings", [{}, {"compression": "gzip"}, {"shard_bytes": "2MB"}], ids=str)
def test_a_pack_that_is_overwritten_keeps_its_permissions(tmp_path: Path, settings: dict[str, Any]) -> None:
    path, folder = tmp_path / "o.h5", flat_folder(tmp_path / "in", 3)
    h5pack.convert(folder, path, overwrite=True, **quick(**settings))
    path.chmod(0o440)
    h5pack.convert(folder, path, overwrite=True, **quick(**settings))
    assert {permissions(one)[0] for one in tmp_path.glob("o*.h5")} == {0o440}
    h5pack.convert(folder, tmp_path / "p.h5", **quick())
    h5pack.subset(tmp_path / "p.h5", path, overwrite=True)
    assert permissions(path)[0] == 0o440 != permissions(tmp_path / "p.h5")[0]
