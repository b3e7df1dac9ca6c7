"""`shard_bytes`: one conversion into several packs, and a virtual file over them."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

import h5pack
from h5pack import cli
from h5pack.combine.convert import ShardedConversion, shard_path
from h5pack.errors import H5PackError, NoImagesError, OptionsError, OutputBusyError, OutputExistsError, ResumeError
from h5pack.pack.finish import shards_of
from h5pack.pack.output import Output, OutputLock
from tests.combine.packs import SOURCE, contents, source
from tests.crashing import Change, convert_in_child, distinct_steps, files_of, leftovers
from tests.makers import class_folders, flat_folder, quick, save, split_folders, truncate

KINDS: dict[str, dict[str, Any]] = {
    "pixels": {"chunk_rows": 4, "shard_bytes": 1_130_000},
    "nchw": {"layout": "nchw", "size": (30, 26), "chunk_rows": 3, "shard_bytes": "1.1MiB"},
    "gzip": {"compression": "gzip", "chunk_rows": 4, "shard_bytes": 1_130_000},
    "jpeg": {"keep": "jpeg", "shard_bytes": 380_000},
    "max_side": {"keep": "jpeg", "max_side": 16, "shard_bytes": 380_000},
}

SMALL: dict[str, dict[str, Any]] = {
    "pixels": {**KINDS["pixels"], "order": "sorted", "shard_bytes": 1_095_000},
    "gzip": {**KINDS["gzip"], "order": "sorted", "shard_bytes": 1_095_000},
    "max_side": {**KINDS["max_side"], "order": "sorted", "shard_bytes": 360_000},
}


def unsharded(keywords: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if name != "shard_bytes"}


@pytest.mark.parametrize("kind", KINDS)
def test_shards_have_the_rows_of_one_pack(tmp_path: Path, kind: str) -> None:
    found, keywords = source(tmp_path / "s", "a", 40, ["x", "y"]), quick(**SOURCE, **KINDS[kind])
    report, out = h5pack.convert(found, tmp_path / "o.h5", **keywords), tmp_path / "o.h5"
    h5pack.convert(found, tmp_path / "one.h5", **unsharded(keywords))
    shards = [shard_path(out, number) for number in range(report.shards)]
    assert len(shards) > 1
    assert leftovers(tmp_path) == {"s", "o.h5", "one.h5", *(path.name for path in shards)}
    assert shards_of(out, out) == set(shards)
    assert (report.images, report.rejects) == (40, 0)
    assert report.bytes == sum(path.stat().st_size for path in (out, *shards))
    with ShardedConversion(found, tmp_path / "planned.h5", **keywords) as conversion:
        bound = conversion.plan().file_bytes
        assert report.bytes <= bound < 1.4 * report.bytes
    whole, split = h5pack.H5Dataset(tmp_path / "one.h5"), h5pack.H5Dataset(out)
    assert (split.filenames, split.splits, split.classes) == (whole.filenames, whole.splits, whole.classes)
    assert contents(out) == contents(tmp_path / "one.h5")
    np.testing.assert_allclose([split.mean, split.std], [whole.mean, whole.std], rtol=1e-12)
    assert h5pack.verify(out, num_workers=1).ok
    limit = keywords["shard_bytes"] if isinstance(keywords["shard_bytes"], int) else int(1.1 * 2**20)
    assert all(path.stat().st_size <= limit for path in shards)
    if "keep" not in keywords:
        lengths = [len(h5pack.H5Dataset(path)) for path in shards]
        assert not any(rows % keywords["chunk_rows"] for rows in lengths[:-1])
        with h5py.File(out) as first, h5py.File(tmp_path / "one.h5") as second:
            assert first["images"].is_virtual
            assert np.array_equal(first["images"], second["images"])


def test_shards_list_a_rejected_image_as_often_as_one_pack_does(tmp_path: Path) -> None:
    flat_folder(tmp_path, 40)
    (tmp_path / "empty.jpg").touch()
    names = [path.name for path in sorted(tmp_path.glob("*.jpg"))]
    table = tmp_path / "list.csv"
    table.write_text("\n".join(["path", *names, "empty.jpg"]))
    keywords = quick(**KINDS["pixels"])
    reports = [h5pack.convert(table, tmp_path / "o.h5", **keywords)]
    reports.append(h5pack.convert(table, tmp_path / "one.h5", **unsharded(keywords)))
    assert [report.rejects for report in reports] == [2, 2]
    tables = [(tmp_path / f"{name}.rejects.csv").read_bytes() for name in ("o.h5", "one.h5")]
    assert tables[0] == tables[1]


@pytest.mark.parametrize("kind", [{"chunk_rows": 2}, {"keep": "jpeg"}], ids=str)
def test_no_shard_exceeds_the_limit_if_fields_differ_in_length(tmp_path: Path, kind: dict[str, Any]) -> None:
    lines = []
    for number in range(40):
        save(tmp_path / f"{number}.jpg", number)
        text = np.random.default_rng(number).bytes(50_000 * (number // 20)).hex()
        lines.append(json.dumps({"path": f"{number}.jpg", "text": text}))
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    settings = quick(text_columns="text", order="sorted", shard_bytes=1_700_000, num_workers=1, **kind)
    report = h5pack.convert(tmp_path / "in.jsonl", tmp_path / "o.h5", **settings)
    sizes = [shard_path(tmp_path / "o.h5", number).stat().st_size for number in range(report.shards)]
    assert len(sizes) > 1
    assert max(sizes) <= 1_700_000
    assert h5pack.verify(tmp_path / "o.h5", num_workers=1).ok


def test_no_shard_exceeds_the_limit_with_an_almost_empty_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.pack.kept._MIN_CHUNKS", 4)
    for number in range(130):
        noise = np.random.default_rng(number).integers(0, 256, (100, 100, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{number}.jpg", quality=95)
    for limit in range(1_400_000, 1_662_144, 65_536):
        settings = quick(source_kind="flat", keep="jpeg", shard_bytes=limit, num_workers=1, overwrite=True)
        shards = h5pack.convert(tmp_path, tmp_path / "o.h5", **settings).shards
        sizes = [shard_path(tmp_path / "o.h5", number).stat().st_size for number in range(shards)]
        assert (len(sizes) > 1, max(sizes) <= limit) == (True, True)


def test_names_that_virtual_files_cannot_hold_are_an_early_error(tmp_path: Path) -> None:
    folder, name = flat_folder(tmp_path / "in", 3), os.fsdecode(b"\xff.h5")
    with pytest.raises(H5PackError) as caught:
        h5pack.convert(folder, tmp_path / name, **quick(shard_bytes="2MB"))
    assert caught.value.path == str(tmp_path / name)
    assert leftovers(tmp_path) == {"in"}
    h5pack.convert(folder, tmp_path / name, **quick())
    with pytest.raises(H5PackError) as caught:
        h5pack.join([tmp_path / name, tmp_path / name], tmp_path / "v.h5", virtual=True)
    assert caught.value.path == str(tmp_path / name)
    assert leftovers(tmp_path) == {"in", name}
    (tmp_path / name).rename(tmp_path / "o.h5")
    h5pack.join([tmp_path / "o.h5"] * 2, tmp_path / name, virtual=True)
    save(tmp_path / "more" / "new.jpg")
    with pytest.raises(H5PackError) as caught:
        h5pack.append(tmp_path / name, tmp_path / "more", **quick())
    assert caught.value.path == str(tmp_path / name)
    assert leftovers(tmp_path) == {"in", "more", "o.h5", name}


def test_shards_are_loaded_and_combined_as_one(tmp_path: Path) -> None:
    found, out = class_folders(tmp_path / "s", {"x": 20, "y": 21}), tmp_path / "o.h5"
    keywords = quick(chunk_rows=4, shard_bytes=1_100_000)
    shards = h5pack.convert(found, out, **keywords).shards
    rows = [row for batch in h5pack.H5Loader(h5pack.H5Dataset(out, with_rows=True), 4) for row in batch.rows.tolist()]
    assert sorted(rows) == list(range(41))
    assert (h5pack.info(out).pack or {})["splits"] == {"all": [[0, 41]]}
    more = class_folders(tmp_path / "more", {"y": 3, "z": 4})
    for path in sorted(more.rglob("*.jpg"), reverse=True):
        path.rename(path.with_name(f"m{path.name}"))
    assert h5pack.append(out, more, num_workers=1).added == 7
    assert shards_of(out, out) == {shard_path(out, number) for number in range(shards + 1)}
    assert h5pack.subset(out, tmp_path / "x.h5", classes=["z"]).images == 4
    # All shards of the old output are replaced, also the one that was appended.
    h5pack.convert(found, out, overwrite=True, **{**keywords, "shard_bytes": "1GB"})
    assert leftovers(tmp_path) == {"s", "more", "o.h5", "o-00000.h5", "x.h5"}
    assert len(h5pack.H5Dataset(out)) == 41


@pytest.mark.parametrize("kind", ["pixels", "gzip", "max_side"])
def test_killed_at_every_step_and_resumed(tmp_path: Path, kind: str) -> None:
    found, first = source(tmp_path / "s", "a", 21, ["x", "y"]), ["pixels", "gzip", "max_side"].index(kind) * 2
    keywords = quick(**SOURCE, **KINDS[kind])
    require_resumed(found, tmp_path / "o.h5", keywords, lambda changes: distinct_steps(changes, first=True)[first::7])


def require_resumed(
    found: Path, out: Path, keywords: dict[str, Any], steps: Callable[[list[Change]], list[int]]
) -> None:
    """Require that a conversion resumed from the files that a kill leaves at some of its steps gives the same files."""
    changes = convert_in_child(found, out, keywords, None)
    whole = files(out.parent)
    assert len(whole) > 2
    for step in steps(changes):
        changes[step].leave_files(files_of(out))
        assert not out.exists() or files(out.parent) == whole
        h5pack.convert(found, out, resume=True, **keywords)
        assert files(out.parent) == whole, f"killed at step {step}: {changes[step]}"
        assert leftovers(out.parent) - {f"{out.name}.rejects.csv"} == {"s", *whole}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.h5")}


def restore(folder: Path, wanted: dict[str, bytes]) -> None:
    """Replace all files of outputs, unfinished ones too, by those of `wanted`."""
    for path in (*folder.glob("o*.h5"), folder / "o.h5.partial"):
        path.unlink(missing_ok=True)
    for name, data in wanted.items():
        (folder / name).write_bytes(data)


def test_shards_that_another_program_removed_are_written_again(tmp_path: Path) -> None:
    found, out = class_folders(tmp_path / "s", {"x": 30}), tmp_path / "o.h5"
    keywords = quick(chunk_rows=4, shard_bytes=1_090_000)
    h5pack.convert(found, out, **keywords)
    whole = files(tmp_path)

    def removing(*_: object) -> None:
        shutil.rmtree(f"{out}.partial.shards")
        os.stat(f"{out}.partial.shards")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("h5pack.combine.convert.make_virtual", removing)
        with pytest.raises(H5PackError) as caught:
            h5pack.convert(found, out, overwrite=True, **keywords)
    assert "resume=True" in caught.value.parameters
    h5pack.convert(found, out, resume=True, overwrite=True, **keywords)
    assert files(tmp_path) == whole
    assert leftovers(tmp_path) == {"s", *whole}


def test_shards_that_cannot_be_removed_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    found, out = class_folders(tmp_path / "s", {"x": 30}), tmp_path / "o.h5"
    keywords = quick(chunk_rows=4, shard_bytes=1_090_000)
    (tmp_path / "kept").mkdir()
    h5pack.convert(found, out, **keywords)
    for path in shards_of(out, out):
        path.rename(tmp_path / "kept" / path.name)
    out.unlink()
    # `shutil.rmtree` does not remove links.
    Path(f"{out}.partial.shards").symlink_to(tmp_path / "kept")
    with pytest.raises(FileExistsError):
        h5pack.convert(found, out, overwrite=True, **keywords)
    assert not out.exists()


def test_an_output_is_replaced_at_the_end(tmp_path: Path) -> None:
    old, new = class_folders(tmp_path / "old", {"x": 30}), class_folders(tmp_path / "new", {"y": 20})
    out, keywords = tmp_path / "o.h5", quick(chunk_rows=4, shard_bytes=1_090_000)
    h5pack.convert(new, out, **keywords)
    after = files(tmp_path)
    h5pack.convert(old, out, overwrite=True, **keywords)
    before = files(tmp_path)
    assert len(before) > len(after) > 2
    changes = convert_in_child(new, out, {**keywords, "overwrite": True}, None)
    assert files(tmp_path) == after
    for step in distinct_steps(changes, first=True)[-9:]:
        restore(tmp_path, before)
        convert_in_child(new, out, {**keywords, "overwrite": True}, step)
        # The virtual file never refers to shards of two conversions.
        assert not out.exists() or files(tmp_path) in (before, after)
        h5pack.convert(new, out, resume=True, **keywords)
        assert files(tmp_path) == after, f"killed at step {step}: {changes[step]}"
        assert leftovers(tmp_path) == {"old", "new", *after}


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_an_output_with_shards_is_replaced_by_one_file(tmp_path: Path, compression: str) -> None:
    old, new = class_folders(tmp_path / "old", {"x": 30}), class_folders(tmp_path / "new", {"y": 20})
    out, keywords = tmp_path / "o.h5", quick(chunk_rows=4)
    h5pack.convert(old, out, shard_bytes=1_090_000, **keywords)
    before, keywords = files(tmp_path), {**keywords, "compression": compression, "overwrite": True}
    assert len(before) > 2
    changes = convert_in_child(new, out, keywords, kill_at=None)
    after = files(tmp_path)
    assert set(after) == {"o.h5"}
    for number, step in enumerate(distinct_steps(changes, first=True)[-9:]):
        restore(tmp_path, before)
        convert_in_child(new, out, keywords, kill_at=step)
        found = files(tmp_path)
        assert found["o.h5"] == after["o.h5"] or {name: found[name] for name in before} == before
        # Continued, or started over.
        h5pack.convert(new, out, **{**keywords, "resume": number % 3 < 2, "overwrite": number % 3 > 0})
        assert files(tmp_path) == after, f"killed at step {step}: {changes[step]}"
        assert leftovers(tmp_path) == {"old", "new", "o.h5"}


@pytest.mark.parametrize("replaces", [True, False])
def test_killed_while_files_are_renamed_and_started_over(tmp_path: Path, replaces: bool) -> None:
    """Started over with fewer shards, or with one file, in turns."""
    sources = [class_folders(tmp_path / name, {name: count}) for name, count in (("c", 20), ("b", 26), ("a", 36))]
    out, keywords = tmp_path / "o.h5", quick(chunk_rows=4, shard_bytes=1_090_000)
    made = []
    for found in sources:
        h5pack.convert(found, out, overwrite=True, **keywords)
        made.append(files(tmp_path))
    assert len(made[2]) > len(made[1]) > len(made[0]) > 2
    h5pack.convert(sources[0], out, overwrite=True, **unsharded(keywords))
    one_file = files(tmp_path)
    before = made[2] if replaces else {}
    restore(tmp_path, before)
    changes = convert_in_child(sources[1], out, {**keywords, "overwrite": True}, None)
    steps = [step for step in distinct_steps(changes, first=True) if changes[step].startswith(("replace", "unlink"))]
    assert len(steps) >= 8
    for number, step in enumerate(steps[-8:]):
        restore(tmp_path, before)
        for name in before:
            (tmp_path / name).chmod(0o600)
        convert_in_child(sources[1], out, {**keywords, "overwrite": True}, step)
        states = [made[2], made[1]] if replaces else [made[1]]
        after, settings = (made[0], keywords) if number & 2 else (one_file, unsharded(keywords))
        settings = {**settings, "overwrite": True}
        if number % 2:
            # Started over, and killed while it completes the renames.
            convert_in_child(sources[0], out, settings, number)
            assert not out.exists() or files(tmp_path) in states
        h5pack.convert(sources[0], out, **settings)
        assert files(tmp_path) == after, f"killed at step {step}: {changes[step]}"
        assert leftovers(tmp_path) == {"a", "b", "c", *after}
        assert all((tmp_path / name).stat().st_mode & 0o777 == 0o600 for name in after if replaces)


def test_a_refused_run_leaves_no_unfinished_file(tmp_path: Path) -> None:
    found, out = flat_folder(tmp_path / "s", 30), tmp_path / "o.h5"
    keywords = quick(chunk_rows=4, shard_bytes=1_090_000)
    h5pack.convert(found, out, **keywords)
    before = files(tmp_path)
    changes = convert_in_child(found, out, {**keywords, "overwrite": True}, None)
    step = changes.index("mkdir o.h5.partial.journal")
    convert_in_child(found, out, {**keywords, "overwrite": True}, step)
    unfinished = leftovers(tmp_path)
    for _ in range(2):
        with pytest.raises(OutputExistsError):
            h5pack.convert(found, out, resume=True, **keywords)
        assert leftovers(tmp_path) == unfinished
    h5pack.convert(found, out, resume=True, overwrite=True, **keywords)
    assert files(tmp_path) == before
    assert leftovers(tmp_path) == {"s", *before}


def test_images_that_cannot_be_decoded(tmp_path: Path) -> None:
    found, out = flat_folder(tmp_path / "s", 30), tmp_path / "o.h5"
    for number in (3, 4, 17):
        truncate(save(found / f"bad{number}.jpg", number, (20, 14)))
    (found / "empty.png").touch()
    report = h5pack.convert(found, out, **quick(chunk_rows=4, shard_bytes=1_090_000))
    assert (report.images, report.rejects) == (30, 4)
    assert report.shards > 2
    with (tmp_path / "o.h5.rejects.csv").open() as stream:
        assert sorted(line["filename"] for line in csv.DictReader(stream)) == [
            "bad17.jpg", "bad3.jpg", "bad4.jpg", "empty.png",
        ]  # fmt: skip
    h5pack.convert(found, tmp_path / "one.h5", **quick())
    assert len(contents_of(out)) == 30
    assert contents_of(out) == contents_of(tmp_path / "one.h5")


@pytest.mark.parametrize("rows", [6, 30])
def test_a_split_without_rows_is_kept(tmp_path: Path, rows: int) -> None:
    folder, out = split_folders(tmp_path / "s", {"train": {"x": 20}, "val": {"x": rows}}), tmp_path / "o.h5"
    for path in (path for path in (folder / "val").rglob("*.*") if path.is_file()):
        truncate(path)
    options = quick(chunk_rows=4, shard_bytes=1_090_000)
    assert h5pack.convert(folder, out, **options).rejects == rows
    h5pack.convert(folder, tmp_path / "one.h5", **quick())
    splits = [(h5pack.info(path).pack or {})["splits"] for path in (out, tmp_path / "one.h5")]
    assert splits[0] == splits[1]
    assert list(splits[0]) == ["train", "val"]
    assert h5pack.convert(folder, out, **{**options, "resume": True}).already_complete


@pytest.mark.parametrize(("kind", "number"), [("pixels", 0), ("pixels", 1), ("gzip", 1), ("max_side", 0)])
def test_a_shard_without_images_is_left_out(tmp_path: Path, kind: str, number: int) -> None:
    keywords, out = quick(**SMALL[kind]), tmp_path / "o.h5"
    found, edges = damaged_shard(tmp_path / "s", keywords, number)
    bad = {f"{row:05d}.bmp" for row in range(edges[number], edges[number + 1])} | {"empty.png"}
    keywords["num_workers"] = number + 1
    report = h5pack.convert(found, out, **keywords)
    assert (report.images, report.rejects, report.shards) == (31 - len(bad), len(bad), len(edges) - 2)
    paths = {shard_path(out, shard) for shard in range(len(edges) - 1) if shard != number}
    assert shards_of(out, out) == paths
    assert leftovers(tmp_path) == {"s", "o.h5", "o.h5.rejects.csv", *(path.name for path in paths)}
    with (tmp_path / "o.h5.rejects.csv").open() as stream:
        assert {line["filename"] for line in csv.DictReader(stream)} == bad
    h5pack.convert(found, tmp_path / "one.h5", **unsharded(keywords))
    assert list(contents_of(out).items()) == list(contents_of(tmp_path / "one.h5").items())
    assert h5pack.verify(out, num_workers=1).ok
    assert h5pack.convert(found, out, resume=True, **keywords).already_complete


def test_killed_while_a_shard_without_images_is_left_out_and_resumed(tmp_path: Path) -> None:
    keywords = quick(**SMALL["pixels"])
    found, _ = damaged_shard(tmp_path / "s", keywords, 1)

    def of_the_shard(changes: list[Change]) -> list[int]:
        steps = distinct_steps(changes, first=True)
        steps = [step for step in steps if changes[step].split()[1].startswith("o-00001.h5")]
        assert any(".rejects.json" in changes[step] for step in steps)
        return [*steps[-7:], steps[-1] + 1]

    require_resumed(found, tmp_path / "o.h5", keywords, of_the_shard)


def test_a_shard_without_images_leaves_no_file_of_an_old_output(tmp_path: Path) -> None:
    keywords, out = quick(**SMALL["pixels"]), tmp_path / "o.h5"
    h5pack.convert(flat_folder(tmp_path / "old", 30), out, **keywords)
    found, edges = damaged_shard(tmp_path / "s", keywords, 1)
    assert h5pack.convert(found, out, overwrite=True, **keywords).shards == len(edges) - 2
    assert shard_path(out, 0).exists()
    assert not shard_path(out, 1).exists()


@pytest.mark.parametrize("kind", SMALL)
def test_shards_without_any_image_are_an_error(tmp_path: Path, kind: str) -> None:
    found, _ = damaged_shard(tmp_path / "s", quick(**SMALL[kind]), 0)
    for path in found.iterdir():
        truncate(path)
    with pytest.raises(NoImagesError):
        h5pack.convert(found, tmp_path / "o.h5", **quick(**SMALL[kind]))
    assert leftovers(tmp_path) == {"s"}


def damaged_shard(folder: Path, keywords: dict[str, Any], number: int) -> tuple[Path, list[int]]:
    """A folder in which all images of shard `number` are cut short, but not their headers, and the shards' edges."""
    images = [save(folder / f"{row:05d}.bmp", row) for row in range(30)]
    (folder / "empty.png").touch()
    with ShardedConversion(folder, folder.parent / "o.h5", **{**keywords, "overwrite": True}) as conversion:
        edges = conversion.plan().shard_edges()
    assert len(edges) > 3
    for row in range(edges[number], edges[number + 1]):
        truncate(images[row])
    return folder, edges


def contents_of(path: Path) -> dict[str, bytes]:
    dataset = h5pack.H5Dataset(path, check=True)
    names = dataset.filenames or []
    return {names[row]: bytes(np.asarray(dataset[row].image)) for row in range(len(dataset))}


def test_workers(tmp_path: Path) -> None:
    found = flat_folder(tmp_path / "s", 40)
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        keywords = {"chunk_rows": 4, "shard_bytes": 1_090_000, "num_workers": workers}
        h5pack.convert(found, tmp_path / str(workers) / "o.h5", **keywords)
    assert files(tmp_path / "1") == files(tmp_path / "2")


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"shard_bytes": 0}, "shard_bytes"), ({"shard_bytes": "large"}, "shard_bytes"),
        ({"shard_bytes": "1KiB"}, "shard_bytes"), ({"shard_bytes": "1GiB", "compat": True}, "compat=True"),
        ({"shard_bytes": "1GiB", "part": (1, 2)}, "part"), ({"shard_bytes": "1GiB", "finish": True}, "finish=True"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_options(tmp_path: Path, keywords: dict[str, Any], named: str) -> None:
    flat_folder(tmp_path / "s", 3)
    with pytest.raises(OptionsError) as error:
        h5pack.convert(tmp_path / "s", tmp_path / "o.h5", **quick(**keywords))
    assert any(name.startswith(named) for name in error.value.parameters)
    assert leftovers(tmp_path) == {"s"}


def test_files_in_the_way(tmp_path: Path) -> None:
    found, out = flat_folder(tmp_path / "s", 30), tmp_path / "o.h5"
    keywords = quick(chunk_rows=4, shard_bytes=1_090_000)
    shard_path(out, 1).write_bytes(b"other")
    with pytest.raises(OutputExistsError) as error:
        h5pack.convert(found, out, **keywords)
    assert error.value.path == str(shard_path(out, 1))
    assert leftovers(tmp_path) == {"s", "o-00001.h5"}
    assert shard_path(out, 1).read_bytes() == b"other"
    h5pack.convert(found, out, overwrite=True, **keywords)
    with pytest.raises(OutputExistsError):
        h5pack.convert(found, out, **keywords)
    before = files(tmp_path)
    assert h5pack.convert(found, out, resume=True, **keywords).already_complete
    with pytest.raises(OutputExistsError):
        h5pack.convert(found, out, resume=True, **{**keywords, "shard_bytes": "2MB"})
    assert files(tmp_path) == before


def test_a_shard_with_rows_of_the_source_is_not_replaced(tmp_path: Path) -> None:
    keywords = quick(chunk_rows=4, shard_bytes=1_090_000)
    h5pack.convert(flat_folder(tmp_path / "s", 30), tmp_path / "o.h5", **keywords)
    h5pack.join([tmp_path / "o.h5"] * 2, tmp_path / "virtual.h5", virtual=True)
    before = files(tmp_path)
    for out, settings in (("o.h5", keywords), ("o.h5", quick()), ("o-00001.h5", quick())):
        with pytest.raises(OptionsError):
            h5pack.convert(tmp_path / "virtual.h5", tmp_path / out, overwrite=True, **settings)
    after = files(tmp_path)
    assert {name: after[name] for name in before} == before


def test_another_conversion_is_not_resumed(tmp_path: Path) -> None:
    found, out = flat_folder(tmp_path / "s", 30), tmp_path / "o.h5"
    keywords = quick(chunk_rows=4, shard_bytes=1_090_000)
    changes = convert_in_child(found, out, keywords, None)
    for name in files(tmp_path):
        (tmp_path / name).unlink()
    # When the first shard has just got its name.
    step = changes.index("replace o-00000.h5.partial")
    convert_in_child(found, out, keywords, step + 1)
    assert (Output(out).shards / "o-00000.h5").exists()
    for others in (unsharded(keywords), {**keywords, "shard_bytes": "2MB"}, {**keywords, "seed": 1}):
        with pytest.raises(ResumeError):
            h5pack.convert(found, out, resume=True, **others)
    with pytest.raises(OutputExistsError):
        h5pack.convert(found, out, **keywords)
    lock = OutputLock(Output(out))
    with pytest.raises(OutputBusyError):
        h5pack.convert(found, out, resume=True, **keywords)
    lock.close()
    save(found / "00007.jpg", seed=99)
    with pytest.raises(ResumeError):
        h5pack.convert(found, out, resume=True, **keywords)
    assert h5pack.convert(found, out, overwrite=True, **keywords).images == 30


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, out = flat_folder(tmp_path / "s", 30), tmp_path / "o.h5"
    words = ["convert", str(found), str(out), "--chunk-rows", "4", "--shard-bytes", "1.09MB", "--workers", "1"]
    assert cli.main([*words, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert leftovers(tmp_path) == {"s"}
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert cli.main([*words, "--overwrite", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert plan["shards"] == report["shards"] == len(shards_of(out, out)) > 2
    assert f"{report['shards']} files" in text
    assert cli.main([*words, "--overwrite", "--compat"]) == 2
    assert "--compat" in capsys.readouterr().err
    with h5py.File(out) as file:
        assert json.loads(file.attrs["h5pack_options"])["shard_bytes"] == 1_090_000
        sources = {os.path.dirname(one.file_name) for one in file["images"].virtual_sources()}
    assert sources == {""}
    assert math.isfinite(report["seconds"]["write"])
