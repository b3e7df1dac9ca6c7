"""`join`: rows of several packs in one file, copied or virtual."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import h5pack
from h5pack import cli
from h5pack.combine.parts import merge_classes, open_part
from h5pack.errors import (
    DamagedRowsError,
    H5PackError,
    OptionsError,
    OutputExistsError,
    PackChangedError,
    PackFormatError,
    ResumeError,
    SourceError,
)
from h5pack.format.checksums import row_checksums
from h5pack.pack.output import Output
from tests.combine.packs import KINDS, contents, pack, two_packs
from tests.crashing import changes_in_child, distinct_steps, leftovers, small_file_system
from tests.makers import class_folders, flat_folder, hdf5_file, pixels, quick, save, split_folders, truncate
from tests.read.files import limit_open_files


@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_join_has_the_rows_of_its_packs(tmp_path: Path, kind: str, virtual: bool) -> None:
    packs, out = two_packs(tmp_path, kind), tmp_path / "o.h5"
    report = h5pack.join(packs, out, virtual=virtual)
    assert (report.images, report.bytes, report.rejects) == (24, out.stat().st_size, 0)
    assert contents(out) == contents(*packs)
    dataset = h5pack.H5Dataset(out)
    assert dataset.classes == ("cat", "dog", "emu")
    assert dataset.splits == {"train": range(14), "val": range(14, 24)}
    assert h5pack.verify(out, num_workers=1).ok
    assert leftovers(tmp_path) == {"a", "b", "a.h5", "b.h5", "o.h5"}
    with h5py.File(out) as file:
        images = file.get("images") or file["encoded/data"]
        assert images.is_virtual == virtual
        # Any other HDF5 program sees one dataset.
        held = np.concatenate([h5py.File(path)[images.name][()] for path in packs])
        assert sorted(map(bytes, held)) == sorted(map(bytes, images[()]))


def with_masks(path: Path, dtype: str) -> Path:
    """The pack, with its masks stored as this dtype, and the checksums of these bytes."""
    with h5py.File(path, "r+") as file:
        old = file["fields/mask"]
        values, attributes, options = old[()].astype(dtype), dict(old.attrs), {"chunks": old.chunks}
        options |= {"compression": old.compression, "maxshape": old.maxshape}
        del file["fields/mask"]
        file.create_dataset("fields/mask", data=values, **options).attrs.update(attributes)
        file["checksums/fields/mask"][...] = row_checksums(values)
        file.get("checksums/chunks", {}).pop("fields/mask", None)
    return path


@pytest.mark.parametrize("kind", ["pixels", "gzip"])
@pytest.mark.parametrize("virtual", [False, True])
def test_masks_of_either_byte_order_keep_their_values(tmp_path: Path, kind: str, virtual: bool) -> None:
    packs, out = [with_masks(path, ">u2") for path in two_packs(tmp_path, kind)], tmp_path / "o.h5"
    h5pack.join(packs, out, virtual=virtual)
    assert contents(out) == contents(*packs)
    assert h5pack.verify(out, num_workers=1).ok
    # Rows are copied as bytes, so one dataset cannot have rows of both orders.
    with pytest.raises(SourceError):
        h5pack.join([packs[0], with_masks(packs[1], "<u2")], tmp_path / "both.h5", virtual=virtual)


@pytest.mark.parametrize("virtual", [False, True])
def test_a_run_interrupted_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, virtual: bool) -> None:
    packs, partial = two_packs(tmp_path, "pixels"), tmp_path / "o.h5.partial"
    monkeypatch.setattr(Output, "check", lambda *_, **__: partial.write_bytes(b"begun"))
    with pytest.raises(OutputExistsError):
        h5pack.join(packs, tmp_path / "o.h5", virtual=virtual)
    assert partial.read_bytes() == b"begun"


def test_a_reject_of_several_packs_is_listed_once(tmp_path: Path) -> None:
    folder, paths = flat_folder(tmp_path / "in", 3), [tmp_path / name for name in ("a.h5", "b.h5", "c.h5")]
    truncate(folder / "00001.jpg")
    for path in paths[:2]:
        h5pack.convert(folder, path, **quick())
    truncate(folder / "00001.jpg", 0)
    h5pack.convert(folder, paths[2], **quick())
    assert h5pack.join(paths[:2], tmp_path / "o.h5").rejects == 1
    # With another reason, it is another image.
    assert h5pack.join(paths, tmp_path / "p.h5").rejects == 2


def test_splits_without_rows_are_kept(tmp_path: Path) -> None:
    packs, more = [tmp_path / "a.h5", tmp_path / "b.h5"], tmp_path / "more"
    for name in ("a", "b", "more"):
        folder = split_folders(tmp_path / name, {"train": {"x": 2}, "val": {"x": 3}})
        for path in (folder / "train" / "x").iterdir() if name != "more" else ():
            truncate(path)
    for path in (folder / "val" / "x").iterdir():
        path.rename(path.with_name(f"new{path.name}"))
    for path in packs:
        h5pack.convert(path.with_suffix(""), path, **quick())
    joined, virtual = tmp_path / "o.h5", tmp_path / "v.h5"
    h5pack.join(packs, joined)
    h5pack.join(packs, virtual, virtual=True)
    h5pack.append(packs[0], more / "val", source_kind="classes", split="val", num_workers=1)
    for path in (*packs, joined, virtual):
        with h5py.File(path) as file:
            val = len(file["filenames"])
            assert file["splits/name"][()].tolist() == [b"train", b"val"]
            assert file["splits/rows"][()].tolist() == [[0, 0], [0, val]]
            assert dict(file["statistics"].attrs) == {"split": b"train", "rows": 0, "step": 1}
        assert val == (3 if path == packs[1] else 6)
        assert h5pack.H5Dataset(path).splits == {"train": range(0), "val": range(val)}
        assert h5pack.verify(path, num_workers=1).ok


def test_statistics_are_named_after_the_split_that_they_are_of(tmp_path: Path) -> None:
    folders = {name: split_folders(tmp_path / name, {name: {"x": 3}}) for name in "bac"}
    for name, folder in folders.items():
        for path in (folder / name / "x").iterdir():
            path.rename(path.with_name(f"{name}{path.name}"))
        h5pack.convert(folder, tmp_path / f"{name}.h5", **quick(source_kind="splits"))
    path = tmp_path / "b.h5"
    mean = h5pack.H5Dataset(path).mean
    # The first split of the file is still b. A join of packs with other splits sorts splits by name.
    h5pack.append(path, folders["a"], source_kind="splits", num_workers=1)
    h5pack.join([path, tmp_path / "c.h5"], tmp_path / "o.h5")
    for one, names in ((path, [b"b", b"a"]), (tmp_path / "o.h5", [b"a", b"b", b"c"])):
        with h5py.File(one) as file:
            assert file["splits/name"][()].tolist() == names
            assert dict(file["statistics"].attrs) == {"split": b"b", "rows": 3, "step": 1}
            assert np.allclose(file["statistics/mean"][()], mean, atol=0, rtol=1e-12)


@pytest.mark.parametrize("combine", ["join", "append"])
def test_the_rejects_of_a_table_are_listed_as_often_as_it_names_them(tmp_path: Path, combine: str) -> None:
    folder, path = flat_folder(tmp_path / "in", 3), tmp_path / "a.h5"
    truncate(folder / "00001.jpg")
    table = folder / "list.csv"
    table.write_text("path\n00000.jpg\n00001.jpg\n00001.jpg\n")
    assert h5pack.convert(table, path, **quick()).rejects == 2
    if combine == "join":
        assert h5pack.join([path, path], tmp_path / "o.h5").rejects == 2
    else:
        save(tmp_path / "more" / "new.jpg", 1)
        assert h5pack.append(path, tmp_path / "more", num_workers=1).rejects == 2


def test_statistics_are_those_of_all_rows(tmp_path: Path) -> None:
    packs = two_packs(tmp_path, "pixels")
    h5pack.join(packs, tmp_path / "o.h5")
    rows = np.concatenate([np.stack([one.image for one in h5pack.H5Dataset(path, "train")]) for path in packs])
    dataset = h5pack.H5Dataset(tmp_path / "o.h5")
    np.testing.assert_allclose(dataset.mean, rows.mean((0, 1, 2)) / 255, rtol=1e-12)
    np.testing.assert_allclose(dataset.std, rows.std((0, 1, 2)) / 255, rtol=1e-12)


@pytest.mark.parametrize("kind", ["pixels", "jpeg", "gzip"])
def test_killed_at_every_step_and_resumed(tmp_path: Path, kind: str) -> None:
    packs, out = two_packs(tmp_path, kind), tmp_path / "o.h5"
    h5pack.join(packs, tmp_path / "whole.h5")
    whole = (tmp_path / "whole.h5").read_bytes()
    changes = changes_in_child(lambda: h5pack.join(packs, out), kill_at=None, watched=tmp_path / "o.h5*")
    assert out.read_bytes() == whole
    for step in distinct_steps(changes, first=True)[["pixels", "jpeg", "gzip"].index(kind) :: 2]:
        changes[step].leave_files(tmp_path / "o.h5*")
        assert not out.exists() or out.read_bytes() == whole
        h5pack.join(packs, out, resume=True)
        assert out.read_bytes() == whole, f"killed at step {step}: {changes[step]}"
        assert leftovers(tmp_path) == {"a", "b", "a.h5", "b.h5", "o.h5", "whole.h5"}


def test_another_join_is_not_resumed(tmp_path: Path) -> None:
    packs, out = two_packs(tmp_path, "pixels"), tmp_path / "o.h5"
    changes = changes_in_child(lambda: h5pack.join(packs, out), kill_at=None)
    out.unlink()
    changes_in_child(lambda: h5pack.join(packs, out), kill_at=changes.index("fsync o.h5.partial"))
    with pytest.raises(OutputExistsError):
        h5pack.join(packs, out)
    with pytest.raises(ResumeError):
        h5pack.join(packs[::-1], out, resume=True)
    with pytest.raises(ResumeError):
        h5pack.convert(tmp_path / "a" / "list.jsonl", out, **quick(resume=True, label_columns="label"))
    h5pack.join(packs, out, overwrite=True)
    assert contents(out) == contents(*packs)


@pytest.mark.parametrize("kind", ["pixels", "jpeg"])
def test_a_virtual_file_is_not_a_finished_copy(tmp_path: Path, kind: str) -> None:
    packs, out = two_packs(tmp_path, kind), tmp_path / "o.h5"
    h5pack.join(packs, out, virtual=True)
    before = out.read_bytes()
    with pytest.raises(OutputExistsError):
        h5pack.join(packs, out, resume=True)
    assert out.read_bytes() == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_join_may_be_resumed_with_another_overwrite(tmp_path: Path, overwrite: bool) -> None:
    packs, out = two_packs(tmp_path, "pixels"), tmp_path / "o.h5"
    changes = changes_in_child(lambda: h5pack.join(packs, out), kill_at=None)
    whole = out.read_bytes()
    out.unlink()
    if overwrite:
        # The interrupted run may replace an output, so the resumed one may, too.
        out.write_bytes(b"old")
    step = changes.index("fsync o.h5.partial")
    changes_in_child(lambda: h5pack.join(packs, out, overwrite=overwrite), kill_at=step)
    h5pack.join(packs, out, resume=True, overwrite=not overwrite)
    assert out.read_bytes() == whole


def test_many_packs_are_joined_with_few_open_files(tmp_path: Path) -> None:
    h5pack.convert(flat_folder(tmp_path / "in", 4), tmp_path / "a.h5", **quick())
    packs = [shutil.copy(tmp_path / "a.h5", tmp_path / f"{number}.h5") for number in range(40)]

    def join() -> None:
        limit_open_files(20)
        h5pack.join(packs, tmp_path / "o.h5", virtual=True)
        assert len(h5pack.H5Dataset(tmp_path / "o.h5")) == 160

    changes_in_child(join, kill_at=None)


def test_a_resumed_join_keeps_the_permissions_of_the_output(tmp_path: Path) -> None:
    packs, out = [], tmp_path / "o.h5"
    for name in "ab":
        packs.append(tmp_path / f"{name}.h5")
        h5pack.convert(flat_folder(tmp_path / name, 3), packs[-1], **quick(compression="gzip"))
    h5pack.join(packs, out)
    out.chmod(0o600)
    work = lambda: h5pack.join(packs, out, overwrite=True)  # noqa: E731
    step = changes_in_child(work, kill_at=None).index("create o.h5.partial.compressed")
    changes_in_child(work, kill_at=step)
    h5pack.join(packs, out, resume=True)
    assert out.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("limit", ["1", "unlimited"])
def test_too_little_room_ends_a_virtual_join_without_a_crash(tmp_path: Path, limit: str) -> None:
    """A limit on the size of files, or a full disk. In a process of its own, because HDF5 may also crash at its end."""
    found, folder = pack(tmp_path, "a", 4, ["x"]), tmp_path / "out"
    with small_file_system(folder, "4k") if limit == "unlimited" else nullcontext(folder.mkdir()):
        command = shlex.join(
            map(str, [sys.executable, "-m", "h5pack", "join", found, found, folder / "o.h5", "--virtual"])
        )
        done = subprocess.run(["bash", "-c", f"ulimit -f {limit}; {command}"], capture_output=True, text=True)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert leftovers(folder) == set()


@pytest.mark.parametrize(("kind", "dataset"), [("pixels", "images"), ("jpeg", "fields/mask")])
def test_damaged_rows_are_not_copied(tmp_path: Path, kind: str, dataset: str) -> None:
    packs, out = two_packs(tmp_path, kind), tmp_path / "o.h5"
    with h5py.File(packs[1], "r+") as file:
        if kind == "jpeg":
            file["fields/mask/data"][int(file["fields/mask/offsets"][5]) + 50] ^= 255
        else:
            file["images"][5, 0, 0] ^= 1
    with pytest.raises(DamagedRowsError) as error:
        h5pack.join(packs, out)
    assert (error.value.path, error.value.dataset, error.value.rows) == (str(packs[1]), dataset, (5,))
    assert not out.exists()


def test_damaged_labels_are_refused_with_their_rows(tmp_path: Path) -> None:
    packs = two_packs(tmp_path, "pixels")
    with h5py.File(packs[1], "r+") as file:
        file["labels"][5] += 1
    with pytest.raises(SourceError) as error:
        h5pack.join(packs, tmp_path / "o.h5")
    assert (error.value.path, error.value.dataset, error.value.rows) == (str(packs[1]), "labels", (5,))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"size": 16}, "16x16"), ({"layout": "nchw"}, "nchw"), ({"mode": "gray"}, "x1"), ({"keep": "jpeg"}, "JPEG"),
        ({"field_columns": "score"}, "sizes"), ({"label_columns": "number"}, "integers"),
    ],
    ids=str,
)  # fmt: skip
def test_packs_that_do_not_fit_together_are_refused(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    first, other = pack(tmp_path, "a", 6, ["x"]), pack(tmp_path, "b", 6, ["x"], **settings)
    with pytest.raises(SourceError) as error:
        h5pack.join([first, other], tmp_path / "o.h5")
    assert error.value.path == str(other)
    assert all(name in str(error.value) for name in (str(first), named))
    assert leftovers(tmp_path) == {"a", "b", "a.h5", "b.h5"}


def records(root: Path, name: str, **columns: list[Any]) -> Path:
    """A manifest of images with these columns."""
    rows = zip(*columns.values(), strict=True)
    lines = [{"path": f"{name}{number}.png", **dict(zip(columns, row, strict=True))} for number, row in enumerate(rows)]
    for number, line in enumerate(lines):
        save(root / name / line["path"], number)
    (root / name / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return root / name / "list.jsonl"


def test_fields_get_one_dtype(tmp_path: Path) -> None:
    cases: dict[str, tuple[list[Any], list[Any], Any]] = {
        "a": ([[1], [2, 3]], [[], []], np.int64), "b": ([[], []], [[1], [2, 3]], np.int64),
        "c": ([[1.5], []], [[2], []], np.float64), "d": ([1.5, None], [2, 3], np.float64),
        "e": ([1, 2], [3.0, 4.0], np.int64), "f": ([2**53 + 1, 1], [3.0, 4.0], np.int64),
        "point": ([[[1, 2, 1]], []], [[], []], np.float32), "points": ([[], []], [[[1, 2, 1]], []], np.float32),
    }  # fmt: skip
    keywords = quick(order="sorted", field_columns=list("abcdef"), keypoint_columns=["point", "points"])
    columns = [{name: case[part] for name, case in cases.items()} for part in (0, 1)]
    sources = [records(tmp_path, name, **found) for name, found in zip("xy", columns, strict=True)]
    packs = [source.with_suffix(".h5") for source in sources]
    for source, path in zip(sources, packs, strict=True):
        h5pack.convert(source, path, **keywords)
    h5pack.join(packs, tmp_path / "o.h5")
    h5pack.append(packs[0], sources[1], **keywords)
    for path in (tmp_path / "o.h5", packs[0]):
        assert h5pack.verify(path, num_workers=1).ok
        samples = list(h5pack.H5Dataset(path, fields=[*cases]))
        for name, (first, other, dtype) in cases.items():
            for value, sample in zip([*first, *other], samples, strict=True):
                found, expected = np.asarray(getattr(sample, name)), np.array(value, dtype)
                assert found.dtype == dtype, name
                np.testing.assert_array_equal(found.reshape(-1), expected.reshape(-1))


def test_a_file_with_the_name_of_the_folder_of_parts_is_kept(tmp_path: Path) -> None:
    found, out = pack(tmp_path, "a", 4, ["x"]), tmp_path / "o.h5"
    (tmp_path / "o.h5.partial.parts").write_text("mine")
    with pytest.raises(OutputExistsError):
        h5pack.join([found, found], out)
    assert h5pack.join([found, found], out, overwrite=True).images == 8
    assert (tmp_path / "o.h5.partial.parts").read_text() == "mine"


def test_fields_that_only_the_pack_has_are_listed_by_name(tmp_path: Path) -> None:
    packed, more = records(tmp_path, "a", x=[1], y=[2]), records(tmp_path, "b", x=[1])
    h5pack.convert(packed, packed.with_suffix(".h5"), **quick(field_columns=["x", "y"]))
    with pytest.raises(SourceError, match=r"the fields x and y, but .* has x;"):
        h5pack.append(packed.with_suffix(".h5"), more, **quick(field_columns="x"))


@pytest.mark.parametrize("value", [[1, 2], [[1], [2, 2]]])
def test_a_finished_join_is_complete_only_for_the_same_fields(tmp_path: Path, value: list[Any]) -> None:
    packs = [records(tmp_path, name, field=value) for name in ("a", "b")]
    out = tmp_path / "o.h5"
    for changed in (value, value[::-1]):
        records(tmp_path, "b", field=changed)
        for source in packs:
            path = source.with_suffix(".h5")
            h5pack.convert(source, path, **quick(order="sorted", field_columns="field", overwrite=True))
        if changed is value:
            h5pack.join([source.with_suffix(".h5") for source in packs], out)
            assert h5pack.join([source.with_suffix(".h5") for source in packs], out, resume=True).already_complete
    with pytest.raises(OutputExistsError):
        h5pack.join([source.with_suffix(".h5") for source in packs], out, resume=True)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ([1], [0.5]), ([0.5], [2**53 + 1]), ([1], [None]), ([[1]], [2]), ([1], [2**63]), ([2**63], [-1]),
        ([2**64 - 1], [-1]),
    ],
)  # fmt: skip
def test_fields_whose_numbers_would_change_are_refused_before_any_work(tmp_path: Path, first: Any, other: Any) -> None:
    packed, more = records(tmp_path, "a", field=first), records(tmp_path, "b", field=other)
    for source in (packed, more):
        h5pack.convert(source, source.with_suffix(".h5"), **quick(field_columns="field"))
    with pytest.raises(SourceError):
        h5pack.join([packed.with_suffix(".h5"), more.with_suffix(".h5")], tmp_path / "o.h5")
    with pytest.raises(SourceError):
        h5pack.append(packed.with_suffix(".h5"), more, field_columns="field", num_workers=1)
    assert leftovers(tmp_path) == {"a", "b"}
    assert leftovers(tmp_path / "a") == {"a0.png", "list.jsonl", "list.h5"}


def test_classes_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    packs = [pack(tmp_path, name, 4, classes) for name, classes in (("a", ["cat"]), ("b", ["dog", "Cat"]))]
    with pytest.raises(SourceError) as error:
        h5pack.join(packs, tmp_path / "o.h5")
    assert all(part in str(error.value) for part in ("'Cat'", "'cat'", str(packs[0]), str(packs[1])))


def test_equal_classes_of_many_packs_are_merged_as_those_of_one() -> None:
    ours, theirs = ("ant", "crane", "crane"), ("crane", "cow")
    names, maps = merge_classes([("a", ours), ("b", theirs), ("c", (*ours,)), ("d", theirs)])
    assert names == ("ant", "crane", "crane", "cow")
    assert [numbers.tolist() for numbers in maps] == [[0, 1, 2, -1], [1, 3, -1]] * 2
    # Letters that differ only in case are two classes of one pack, and may be repeated in another.
    names, maps = merge_classes([("p", ("a", "A")), ("q", ("a", "A", "A"))])
    assert (names, maps[1].tolist()) == (("a", "A", "A"), [0, 1, 2, -1])


class Birds:
    """A dataset with two classes of the same name, as torchvision's ImageNet has."""

    classes = ("ant", "crane", "bee", "crane", "cow")

    def __init__(self, start: int, count: int) -> None:
        self.filenames = [f"{number}.png" for number in range(start, start + count)]

    def __len__(self) -> int:
        return len(self.filenames)

    def __getitem__(self, index: int) -> Any:
        return pixels(index), index % 5


def test_classes_of_one_name_stay_apart(tmp_path: Path) -> None:
    settings = quick(order="sorted", chunk_rows=2)
    h5pack.convert(Birds(0, 10), tmp_path / "a.h5", **settings)
    h5pack.convert(Birds(10, 5), tmp_path / "b.h5", **settings)
    h5pack.convert(Birds(0, 10), tmp_path / "shards.h5", shard_bytes=1_130_000, **settings)
    h5pack.subset(tmp_path / "a.h5", tmp_path / "part.h5", rows="0:10")
    h5pack.join([tmp_path / "a.h5", tmp_path / "b.h5"], tmp_path / "both.h5")
    assert h5pack.info(tmp_path / "a.h5", stats=True).stats["labels"] == {"ant": 2, "crane": 4, "bee": 2, "cow": 2}  # type: ignore[index]
    h5pack.append(tmp_path / "a.h5", Birds(10, 5), order="sorted", num_workers=1)
    for name, count in (("shards", 10), ("part", 10), ("both", 15), ("a", 15)):
        dataset = h5pack.H5Dataset(tmp_path / f"{name}.h5")
        assert (dataset.classes, dataset.targets.tolist()) == (Birds.classes, [row % 5 for row in range(count)])
    assert h5pack.subset(tmp_path / "both.h5", tmp_path / "cranes.h5", classes=["crane", "bee"]).images == 9
    some = h5pack.H5Dataset(tmp_path / "cranes.h5")
    assert (some.classes, some.targets.tolist()) == (("crane", "crane", "bee"), [0, 2, 1] * 3)
    assert "'crane'" in h5pack.export(tmp_path / "both.h5", tmp_path / "out", num_workers=1).lost[0]


def test_classes_of_one_source_may_differ_only_in_case(tmp_path: Path) -> None:
    first, other = pack(tmp_path, "a", 6, ["A", "a"]), pack(tmp_path, "b", 4, ["a", "A"])
    for number, name in enumerate("Aa"):
        one = pack(tmp_path, f"only {number}", 4, [name])
        assert h5pack.join([first, one], tmp_path / "o.h5").images == 10
        assert h5pack.join([one, first], tmp_path / "o.h5", overwrite=True).images == 10
        counts = dict(zip(h5pack.H5Dataset(tmp_path / "o.h5").classes or (), [7, 3], strict=True))
        assert counts == {name: 7, "aA"[number]: 3}
        (tmp_path / "o.h5").unlink()
    assert h5pack.join([first, other], tmp_path / "both.h5").images == 10
    assert h5pack.subset(first, tmp_path / "some.h5", classes="a").images == 3
    dataset = h5pack.H5Dataset(tmp_path / "both.h5")
    assert dataset.classes == ("A", "a")
    assert dataset.targets.bincount().tolist() == [5, 5]


def test_wrong_calls(tmp_path: Path) -> None:
    first = pack(tmp_path, "a", 4, ["x"])
    flat = flat_folder(tmp_path / "flat", 3)
    (tmp_path / "text.h5").write_text("no HDF5")
    hdf5_file(tmp_path / "other.h5", images=np.zeros((4, 9, 9, 3), np.uint8))
    for packs in ([first], first, []):
        with pytest.raises(OptionsError):
            h5pack.join(packs, tmp_path / "o.h5")
    for other in ("text.h5", "other.h5", "none.h5"):
        with pytest.raises(PackFormatError) as error:
            h5pack.join([first, tmp_path / other], tmp_path / "o.h5")
        assert error.value.path == str(tmp_path / other)
    for out, overwrite in ((first, True), (tmp_path / "o.h5", "no")):
        with pytest.raises(OptionsError):
            h5pack.join([first, first], out, overwrite=overwrite)  # type: ignore[arg-type]
    h5pack.join([first, first], tmp_path / "virtual.h5", virtual=True)
    for virtual in (False, True):
        with pytest.raises(OptionsError):
            h5pack.join([tmp_path / "virtual.h5"] * 2, first, overwrite=True, virtual=virtual)
    h5pack.convert(flat, tmp_path / "o.h5", **quick())
    with pytest.raises(OutputExistsError):
        h5pack.join([first, first], tmp_path / "o.h5")
    (tmp_path / "v.h5.partial").write_bytes(b"x")
    for resume in (False, True):
        with pytest.raises(OutputExistsError) as error:
            h5pack.join([first, first], tmp_path / "v.h5", virtual=True, resume=resume)
        assert error.value.parameters == ("overwrite=True",)
    h5pack.join([first, first], tmp_path / "v.h5", virtual=True, overwrite=True)


@pytest.mark.parametrize(
    "action", [h5pack.convert, h5pack.subset, lambda path, out: h5pack.join([path, path], out)],
    ids=["convert", "subset", "join"],
)  # fmt: skip
def test_an_output_below_a_file_is_refused(tmp_path: Path, action: Any) -> None:
    path = pack(tmp_path, "a", 4, ["x"])
    with pytest.raises(SourceError) as caught:
        action(path, path / "o.h5")
    assert caught.value.path == str(path)


@pytest.mark.parametrize(
    "action",
    [h5pack.convert, h5pack.subset, h5pack.export, h5pack.preview, lambda path, out: h5pack.join([path, path], out)],
    ids=["convert", "subset", "export", "preview", "join"],
)
def test_an_output_that_is_a_link_to_itself_is_refused(tmp_path: Path, action: Any) -> None:
    path, out = pack(tmp_path, "a", 4, ["x"]), tmp_path / "o.png"
    out.symlink_to(out.name)
    for wanted in (out, out / "o.png"):
        with pytest.raises(H5PackError) as caught:
            action(path, wanted)
        assert caught.value.path in (str(out), str(wanted))
    assert out.is_symlink()
    assert leftovers(tmp_path) == {"a", "a.h5", "o.png"}


@pytest.mark.parametrize("kind", ["pixels", "jpeg"])
def test_a_shard_of_a_virtual_file_that_is_missing_or_another_one_is_noticed(tmp_path: Path, kind: str) -> None:
    packs, out = two_packs(tmp_path, kind), tmp_path / "v.h5"
    h5pack.join(packs, out, virtual=True)
    before = packs[1].read_bytes()
    loaded = h5pack.H5Dataset(out)
    packs[1].unlink()
    with pytest.raises(PackFormatError) as error:
        h5pack.H5Dataset(out)
    assert "b.h5" in str(error.value)
    assert not h5pack.verify(out, num_workers=1).ok
    other = pack(tmp_path / "other", "b", 10, ["emu", "cat"], seed=5, **KINDS[kind])
    shutil.copy(other, packs[1])
    with pytest.raises(PackFormatError) as error:
        h5pack.H5Dataset(out)
    assert error.value.path == str(packs[1])
    with pytest.raises((PackChangedError, PackFormatError)):
        list(h5pack.H5Loader(loaded, 4, shuffle=False))
    packs[1].write_bytes(before)
    assert len(contents(out)) == 24


def test_a_virtual_file_moves_with_its_shards(tmp_path: Path) -> None:
    packs = two_packs(tmp_path, "pixels")
    (tmp_path / "new").mkdir()
    h5pack.join(packs, tmp_path / "new" / "v%d.h5", virtual=True)
    wanted = contents(*packs)
    shutil.copytree(tmp_path, tmp_path.parent / "moved")
    for path in packs:
        path.unlink()
    assert contents(tmp_path.parent / "moved" / "new" / "v%d.h5") == wanted


def test_packs_with_percent_signs_in_their_names_are_read_directly(tmp_path: Path) -> None:
    packs = [path.rename(path.with_name(f"{path.stem}%b.h5")) for path in two_packs(tmp_path, "pixels")]
    h5pack.join(packs, tmp_path / "v.h5", virtual=True)
    assert open_part(tmp_path / "v.h5").is_virtual
    assert contents(tmp_path / "v.h5") == contents(*packs)


@pytest.mark.parametrize(
    ("packs", "out", "stored"),
    [
        ("far/away", "link/v.h5", "../../../far/away/a.h5"), ("link", "link/v.h5", "a.h5"),
        ("link", "v.h5", "link/a.h5"), ("link", "link/sub/v.h5", "../a.h5"),
        ("link/sub", "far/v.h5", "../link/sub/a.h5"), ("far/away", "link/../v.h5", "../../far/away/a.h5"),
    ],
)  # fmt: skip
def test_a_virtual_file_finds_packs_through_linked_folders(tmp_path: Path, packs: str, out: str, stored: str) -> None:
    for folder in ("far/away", "disk/0/1/sub"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk/0/1")
    os.replace(pack(tmp_path, "a", 4, ["x"]), tmp_path / packs / "a.h5")
    h5pack.join([tmp_path / packs / "a.h5"] * 2, f"{tmp_path}/{out}", virtual=True)
    for path in (f"{tmp_path}/{out}", os.path.realpath(f"{tmp_path}/{out}")):
        with h5py.File(path) as file, h5py.File(tmp_path / packs / "a.h5") as source:
            assert {one.file_name for one in file["images"].virtual_sources()} == {stored}
            assert sorted(map(bytes, file["images"])) == sorted([*map(bytes, source["images"])] * 2)
        assert h5pack.verify(path).ok
    h5pack.join([tmp_path / packs / "a.h5", f"{tmp_path}/{out}"], tmp_path / "all.h5", virtual=True)
    assert h5pack.verify(tmp_path / "all.h5").rows == 12


@pytest.mark.parametrize("virtual", [False, True])
def test_the_file_behind_a_symbolic_link_is_replaced(tmp_path: Path, virtual: bool) -> None:
    first, path, link = pack(tmp_path, "a", 4, ["x"]), tmp_path / "real" / "0" / "o.h5", tmp_path / "link.h5"
    path.parent.mkdir(parents=True)
    link.symlink_to("real/0/o.h5")
    for overwrite in (np.False_, np.True_):
        report = h5pack.join([first, first], link, virtual=virtual, overwrite=overwrite, resume=np.False_)  # type: ignore[arg-type]
        assert (report.path, os.readlink(link), leftovers(path.parent)) == (str(path), "real/0/o.h5", {"o.h5"})
    with h5py.File(link) as file, h5py.File(first) as source:
        assert sorted(map(bytes, file["images"])) == sorted([*map(bytes, source["images"])] * 2)
    h5pack.subset(first, link, rows=[1], overwrite=True)
    assert (os.readlink(link), len(h5pack.H5Dataset(path))) == ("real/0/o.h5", 1)


def test_a_join_of_virtual_files_and_a_copy_of_one(tmp_path: Path) -> None:
    packs = two_packs(tmp_path, "pixels")
    third = pack(tmp_path, "c", 5, ["fox"])
    h5pack.join(packs, tmp_path / "v.h5", virtual=True)
    h5pack.join([tmp_path / "v.h5", third], tmp_path / "w.h5", virtual=True)
    h5pack.join([tmp_path / "w.h5", pack(tmp_path, "d", 3, ["gnu"])], tmp_path / "o.h5")
    assert contents(tmp_path / "o.h5") == contents(*packs, third, tmp_path / "d.h5")
    # The rows of a pack that is repeated follow each other, but begin again.
    h5pack.join([third, third], tmp_path / "v.h5", virtual=True, overwrite=True)
    h5pack.join([tmp_path / "v.h5", packs[0]], tmp_path / "w.h5", virtual=True, overwrite=True)
    assert h5pack.verify(tmp_path / "w.h5", num_workers=1).ok


@pytest.mark.parametrize("kind", ["pixels", "jpeg"])
def test_a_loader_reads_a_virtual_file_like_the_copy(tmp_path: Path, kind: str) -> None:
    packs = [pack(tmp_path, name, 70, ["x", "y"], size=(32, 32)) for name in "abc"] if kind == "pixels" else None
    packs = packs or [pack(tmp_path, name, 30, ["x", "y"], keep="jpeg") for name in "abc"]
    h5pack.join(packs, tmp_path / "v.h5", virtual=True)
    h5pack.join(packs, tmp_path / "o.h5")
    rows = {}
    for name in ("v", "o"):
        dataset = h5pack.H5Dataset(tmp_path / f"{name}.h5", with_rows=True)
        mapped = dataset.engine.mapped("images") if kind == "pixels" else None
        assert mapped is None or mapped.array is not None
        rows[name] = {}
        for batch in (*h5pack.H5Loader(dataset, 7), *h5pack.H5Loader(dataset, 7)):
            found = zip(batch.rows.tolist(), batch.images.numpy(), batch.labels.tolist(), strict=True)
            rows[name].update({row: (image.tobytes(), label) for row, image, label in found})
        assert dataset.engine.indexes[dataset.names[0]].library_text is None
    assert rows["v"] == rows["o"]
    assert len(rows["v"]) == sum(len(h5pack.H5Dataset(path)) for path in packs)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As a user would type them, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("one", 5), ("two", 4)):
        class_folders(tmp_path / name, {"cat": count, f"dog-{name}": count})
        for path in sorted((tmp_path / name).rglob("*.jpg")):
            path.rename(path.with_name(f"{name}-{path.name}"))
    commands = [f"convert {name} {name}.h5 --workers 1" for name in ("one", "two")] + ["join one.h5 two.h5 both.h5"]
    commands += ["join one.h5 two.h5 v.h5 --virtual", "subset both.h5 cats.h5 --classes cat --sample 3"]
    for command in (*commands, "append one.h5 two --workers 1"):
        assert cli.main([*command.split(), "--quiet"]) == 0
    lengths = {name: len(h5pack.H5Dataset(f"{name}.h5")) for name in ("one", "both", "v", "cats")}
    assert lengths == {"one": 18, "both": 18, "v": 18, "cats": 3}
    assert cli.main(["append", "one.h5", "two"]) == 1
    errors = capsys.readouterr().err
    assert (errors.count("\n"), "--only-new" in errors) == (1, True)


def tagged(path: Path, dtype: str, classes: list[str] | None, numbers: list[int]) -> Path:
    """A pack of two images with a ragged field of class numbers."""
    source = path.with_suffix(".in.h5")
    with h5py.File(source, "w") as file:
        file["images"] = np.zeros((2, 8, 8, 3), np.uint8)
        file["tags/data"], file["tags/offsets"] = (
            np.array(numbers, dtype),
            np.array([0, len(numbers[:1]), len(numbers)]),
        )
        if classes is not None:
            file["tags"].attrs["classes"] = classes
    h5pack.convert(source, path, fields="tags", order="sorted", num_workers=1)
    return path


@pytest.mark.parametrize(("dtype", "count"), [("u1", 200), ("i1", 100), ("u1", 100)])
def test_class_numbers_of_fields_are_not_cut_to_their_dtype(tmp_path: Path, dtype: str, count: int) -> None:
    packs = [
        tagged(
            tmp_path / f"{name}.h5", dtype, [f"{name}{number}" for number in range(count)], [0, count // 2, count - 1]
        )
        for name in ("a", "b")
    ]
    h5pack.join(packs, tmp_path / "o.h5")
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", fields=["tags"])
    names = [[dataset.field_classes["tags"][number] for number in dataset[row].tags.tolist()] for row in range(4)]
    expected = [[[f"{name}0"], [f"{name}{count // 2}", f"{name}{count - 1}"]] for name in ("a", "b")]
    assert names == [*expected[0], *expected[1]]
    assert h5pack.verify(tmp_path / "o.h5", num_workers=1).ok


@pytest.mark.parametrize(("dtype", "numbers"), [("i8", [0, 5, 1]), ("i8", [0, -2, 1]), ("f8", [0.5, 1, 1])])
def test_numbers_of_no_class_are_not_joined(tmp_path: Path, dtype: str, numbers: list[int]) -> None:
    packs = [tagged(tmp_path / f"{name}.h5", dtype, [name, "z"], numbers) for name in ("a", "b")]
    with pytest.raises(SourceError) as caught:
        h5pack.join(packs, tmp_path / "o.h5")
    assert (caught.value.path, caught.value.dataset) == (str(packs[0]), "fields/tags")


@pytest.mark.parametrize("named", ["a", "b"])
def test_numbers_without_class_names_do_not_get_names(tmp_path: Path, named: str) -> None:
    packs = [
        tagged(tmp_path / f"{name}.h5", "i8", ["cat", "dog"] if name == named else None, [0, 1, 1]) for name in "ab"
    ]
    with pytest.raises(SourceError):
        h5pack.join(packs, tmp_path / "o.h5")
    with pytest.raises(SourceError):
        h5pack.append(packs[0], packs[1].with_suffix(".in.h5"), fields="tags", num_workers=1)
    assert not [*tmp_path.glob("a.h5.*")]


@pytest.mark.parametrize(("dtype", "classes"), [("i8", ["cat", "emu"]), ("f8", ["cat", "emu"]), ("f8", None)])
@pytest.mark.parametrize("numbers", [[], [0, 1, 1]])
def test_class_names_of_fields_without_entries_are_merged(
    tmp_path: Path, dtype: str, classes: list[str] | None, numbers: list[int]
) -> None:
    packs = [tagged(tmp_path / "a.h5", "i8" if numbers else dtype, ["dog", "cat"], numbers)]
    packs.append(tagged(tmp_path / "b.h5", dtype, classes, []))
    for order in (packs, packs[::-1]):
        h5pack.join(order, tmp_path / "o.h5", overwrite=True)
        dataset = h5pack.H5Dataset(tmp_path / "o.h5", fields=["tags"])
        assert set(dataset.field_classes["tags"]) == {"cat", "dog", *(classes or ())}
        names = [dataset.field_classes["tags"][number] for row in range(4) for number in dataset[row].tags.tolist()]
        assert names == (["dog", "cat", "cat"] if numbers else [])
        assert h5pack.verify(tmp_path / "o.h5", num_workers=1).ok
