"""WebDataset shards, and sources of several files."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.errors import NoImagesError, OptionsError, SourceError
from h5pack.sources import shards
from h5pack.sources.catalog import Catalog, NameFilter
from h5pack.sources.detect import SourceOptions, open_source
from h5pack.sources.manifest import ManifestColumns
from h5pack.sources.shards import Shards, expand_braces, find_shards
from tests.makers import pixels, quick, save
from tests.sources.files import rows_of, touch
from tests.sources.test_archives import add
from tests.sources.test_tables import png


def shard(path: Path, members: Mapping[str, bytes | str | dict[str, object]]) -> Path:
    """A tar file of these members; text is encoded, and dicts become JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            text = json.dumps(content) if isinstance(content, dict) else content
            add(archive, name, text.encode() if isinstance(text, str) else text)
    return path


def samples(first: int, count: int) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for number in range(first, first + count):
        found |= {f"{number:04d}.png": png(number), f"{number:04d}.cls": str(number % 3)}
    return found


_PAIR: dict[str, bytes | str] = {"png": png(0), "cls": "1"}


def opened(
    path: Path | str, kind: str | None = None, columns: ManifestColumns | None = None, **names: object
) -> Catalog:
    return open_source(path, SourceOptions(kind, NameFilter(**names), columns or ManifestColumns()))  # type: ignore[arg-type]


def test_shards_become_one_pack(tmp_path: Path) -> None:
    for number in range(3):
        shard(tmp_path / "in" / f"shard-{number:03d}.tar", samples(4 * number, 4))
    whole = opened(tmp_path / "in")
    assert (whole.kind, len(whole), whole.split_names, whole.label_names) == ("webdataset", 12, ("all",), None)
    assert whole.names[5] == "shard-001/0005.png"
    with pytest.raises(OptionsError):
        h5pack.convert(tmp_path / "in", tmp_path / "in" / "shard-001.tar", **quick(overwrite=True))
    np.testing.assert_array_equal(whole.labels, np.arange(12) % 3)
    h5pack.convert(tmp_path / "in" / "shard-{000..002}.tar", tmp_path / "o.h5", order="sorted", **quick())
    with h5py.File(tmp_path / "o.h5") as file:
        np.testing.assert_array_equal(file["images"][()], [pixels(number) for number in range(12)])
        np.testing.assert_array_equal(file["labels"][()], np.arange(12) % 3)
    h5pack.convert(tmp_path / "in", tmp_path / "folder.h5", order="sorted", num_workers=2, start_method="fork")
    assert (tmp_path / "folder.h5").read_bytes() == (tmp_path / "o.h5").read_bytes()


def test_include_and_exclude_select_shards_and_samples(tmp_path: Path) -> None:
    for number in range(3):
        shard(tmp_path / f"s{number}.tar", samples(4 * number, 4))
    for patterns, expected in (
        ({"include": ("s[02].tar",)}, [0, 1, 2, 3, 8, 9, 10, 11]),
        ({"include": ("s1.tar", "*5.png", "*6.png")}, [5, 6]),
        ({"exclude": ("s0.tar", "s1/*")}, [8, 9, 10, 11]),
        ({"include": ("*3.png",)}, [3]),
    ):
        assert [int(name[-8:-4]) for name in opened(tmp_path, **patterns).names] == expected
    save(tmp_path / "beside.png")
    assert opened(tmp_path).kind == "flat"
    assert len(opened(tmp_path, include=("s*.tar",))) == 12
    assert len(opened(tmp_path, "webdataset")) == 12


@pytest.mark.parametrize(
    ("names", "rejects"),
    [({}, ["../out/2.png", "/3.png"]), ({"exclude": ("*out*",)}, ["/3.png"]), ({"include": ("a/*",)}, [])],
)
def test_rejects_are_images_that_patterns_select(tmp_path: Path, names: dict[str, object], rejects: list[str]) -> None:
    members = {f"{name}.{ending}": data for name in ("a/1", "../out/2", "/3") for ending, data in _PAIR.items()}
    found = opened(shard(tmp_path / "s.tar", members), **names)
    assert [reject.name for reject in found.rejects] == rejects
    assert list(found.names) == ["a/1.png"]


def test_an_archive_beside_linked_folders_of_images_is_no_shard(tmp_path: Path) -> None:
    save(tmp_path / "pool" / "1.png")
    shard(tmp_path / "in" / "cat.tar", samples(0, 2))
    (tmp_path / "in" / "cat").symlink_to(tmp_path / "pool")
    assert opened(tmp_path / "in").kind == "classes"


def test_a_single_tar_file_is_a_shard_if_images_have_labels_beside_them(tmp_path: Path) -> None:
    image = png(0)
    for members, kind in (
        ({"1.png": image, "1.cls": "0"}, "webdataset"),
        ({"a/1.png": image, "a/1.cls": "0"}, "webdataset"),
        ({"1.png": image, "1.txt": "text"}, "webdataset"),
        ({"a/1.png": image, "b/1.png": image, "a/1.txt": "text"}, "classes"),
        ({"1.png": image, "2.txt": "text"}, "flat"),
    ):
        assert opened(shard(tmp_path / "x.tar", members)).kind == kind
    assert opened(shard(tmp_path / "x.tar", {"1.png": image, "1.cls": "0"}), "flat").labels is None
    assert list(opened(tmp_path / "x.tar").names) == ["1.png"]


def test_labels_are_numbers_or_words_or_a_key_of_json(tmp_path: Path) -> None:
    def labels(first: object, second: object, ending: str = "cls", **columns: object) -> object:
        members = {"1.png": png(0), f"1.{ending}": first, "2.png": png(1), f"2.{ending}": second}
        path = shard(tmp_path / "x.tar", members)  # type: ignore[arg-type]
        catalog = opened(path, columns=ManifestColumns(**columns))  # type: ignore[arg-type]
        return None if catalog.labels is None else catalog.labels.tolist(), catalog.label_names

    assert labels("7\n", " -1") == ([7, -1], None)
    assert labels("dog", "cat") == ([1, 0], ("cat", "dog"))
    assert labels({"Label": 3, "w": 1}, {"Label": None}, "json") == ([3, -1], None)
    assert labels({"x": "b"}, {"x": "a"}, "json", labels=("x",)) == ([1, 0], ("a", "b"))
    several = labels({"a": 1, "b": True}, {"a": 0, "b": False}, "json", labels=("a", "b"))
    assert several == ([[1, 1], [0, 0]], ("a", "b"))
    assert labels({"text": "b"}, {"text": ["a"]}, "json") == (None, None)
    beside = {"1.png": png(0), "1.cls": "1", "1.json": {"cls": "tench", "caption": "a fish"}}
    catalog = opened(shard(tmp_path / "x.tar", beside), columns=ManifestColumns(texts=("caption",)))
    assert (catalog.labels.tolist(), catalog.label_names) == ([1], None)
    for first, second in (("1", "cat"), ("1.5", "2"), (b"\xff", "1"), ("1" * 2_000_000, "1")):
        with pytest.raises(SourceError):
            labels(first, second)
    for content in ("{", "[1]", "[" * 100_000):
        with pytest.raises(SourceError):
            labels({"label": 1}, content, "json")


def test_fields_and_splits_come_from_json_and_file_names(tmp_path: Path) -> None:
    for split, count in (("train", 2), ("val", 1)):
        members: dict[str, bytes | str | dict[str, object]] = {}
        for number in range(count):
            members |= {f"{number}.png": png(0), f"{number}.cls": "1", f"{number}.json": {"weight": number / 2}}
        shard(tmp_path / f"set-{split}-0.tar", members)
    catalog = opened(tmp_path, columns=ManifestColumns(fields=("weight",)))
    assert (catalog.split_names, catalog.split_ids.tolist()) == (("train", "val"), [0, 0, 1])
    assert catalog.fields["weight"].tolist() == [0.0, 0.5, 0.0]
    assert catalog.labels.tolist() == [1, 1, 1]
    with pytest.raises(SourceError):
        opened(tmp_path, columns=ManifestColumns(fields=("nothing",)))
    members = {"0.png": png(0), "0.txt": "a cat\n", "1.jpg": png(0), "1.json": {"box": [[1, 2, 3, 4]], "x": {}}}
    captions = opened(shard(tmp_path / "c.tar", members), columns=ManifestColumns(texts=("txt",), boxes=("box",)))
    assert rows_of(captions.fields["txt"]) == ("text", ["a cat\n", ""])
    assert rows_of(captions.fields["box"]) == ("boxes", [[], [[1, 2, 3, 4]]])
    for columns, unused in (
        (ManifestColumns(root="x", labels=("a",)), ("root",)),
        (ManifestColumns(path="x", images=("a",)), ("path_column", "image_columns")),
    ):
        with pytest.raises(OptionsError) as caught:
            opened(tmp_path, columns=columns)
        assert caught.value.parameters == unused


def test_json_that_is_read_for_some_samples_only_names_no_splits(tmp_path: Path) -> None:
    values = {"split": "val", "label": 7}
    members = {"0.png": png(0), "0.cls": "3", "0.json": values, "1.png": png(0), "1.json": values}
    path = shard(tmp_path / "train-0.tar", members)
    catalog = opened(path)
    assert (catalog.labels.tolist(), catalog.split_names) == ([3, -1], ("train",))
    catalog = opened(path, columns=ManifestColumns(split="split"))
    assert (catalog.labels.tolist(), catalog.split_names) == ([3, -1], ("val",))


def test_what_is_not_packed_is_noted(tmp_path: Path) -> None:
    members = {"1.png": png(0), "1.cls": "1", "1.txt": "a cat", "1.seg.png": png(0), "2.png": png(0)}
    catalog = opened(shard(tmp_path / "x.tar", {**members, "3.cls": "1", ".hidden.png": b"", "../4.png": b""}))
    assert catalog.labels.tolist() == [1, -1]
    assert (catalog.ignored, len(catalog.rejects)) == ({"samples without an image": 1, "hidden": 1}, 1)
    assert len(catalog.notes) == 2
    assert len(opened(shard(tmp_path / "x.tar", {"1.png": png(0), "1.txt": "a cat"})).notes) == 2


def test_ambiguous_samples_are_errors_that_name_them(tmp_path: Path) -> None:
    path = shard(tmp_path / "x.tar", {"a/1.png": png(0), "a/1.cls": "1", "a/1.jpg": png(0)})
    with pytest.raises(SourceError, match="a/1"):
        opened(path)
    assert list(opened(path, include=("*.jpg",)).names) == ["a/1.jpg"]
    for again in ("a/1.cls", "a/1.CLS"):
        shard(path, {"a/1.png": png(0), "a/1.cls": "1"})
        with tarfile.open(path, "a") as archive:
            archive.addfile(tarfile.TarInfo(again))
        with pytest.raises(SourceError, match="a/1"):
            opened(path)


def test_a_missing_or_damaged_shard_is_an_error_that_names_it(tmp_path: Path) -> None:
    for number in (0, 2):
        shard(tmp_path / f"s{number}.tar", samples(0, 2))
    with pytest.raises(SourceError) as caught:
        opened(tmp_path / "s{0..2}.tar")
    assert caught.value.path == str(tmp_path / "s1.tar")
    os.truncate(tmp_path / "s2.tar", 700)
    with pytest.raises(SourceError) as caught:
        opened(tmp_path)
    assert caught.value.path == str(tmp_path / "s2.tar")
    with pytest.raises(SourceError):
        opened(tmp_path / "s{0..2}.bin")
    with pytest.raises(NoImagesError):
        opened(tmp_path, "webdataset", exclude=("*.tar",))


@pytest.mark.parametrize(
    ("include", "exclude", "kind"),
    [
        ((), (), ""), (("*.tar",), (), "webdataset"), (("train/*",), (), "webdataset"), (("meta/*",), (), "parquet"),
        ((), ("*.parquet",), "webdataset"), ((), ("meta/*",), "webdataset"), (("cat/*.jpg",), ("*.tar",), "parquet"),
    ],
)  # fmt: skip
def test_the_kind_of_shards_that_are_selected(
    tmp_path: Path, include: tuple[str, ...], exclude: tuple[str, ...], kind: str
) -> None:
    touch(tmp_path, "train/x.tar", "train/._x.tar", "train/._x.parquet", "meta/x.parquet", "__MACOSX/x.parquet")
    wanted = NameFilter(include, exclude)
    assert shards.shards_kind(tmp_path, wanted) == kind
    if kind == "webdataset":
        assert find_shards(tmp_path, wanted, [".tar"]).names == ["train/x.tar"]


def test_braces_expand_as_in_a_shell() -> None:
    for pattern, expected in {
        "a-{000..002}.tar": "a-000.tar a-001.tar a-002.tar", "{9..11}": "9 10 11", "{2..0}": "2 1 0",
        "{08..10}": "08 09 10", "{a,b}/{0..1}": "a/0 a/1 b/0 b/1", "{a}": "{a}", "plain": "plain",
    }.items():  # fmt: skip
        assert " ".join(expand_braces(pattern)) == expected


def test_a_file_is_one_shard_however_often_a_pattern_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "xa.tar", "xb1.tar", "xb2.tar")
    pattern = tmp_path / "x{a,b{1,2}}.tar"
    assert sorted(find_shards(pattern, NameFilter(), [".tar"]).names) == ["xa.tar", "xb1.tar", "xb2.tar"]
    monkeypatch.setattr(shards, "_MAX_FILES", 3)
    assert len(find_shards(pattern, NameFilter(), [".tar"]).names) == 3
    monkeypatch.setattr(shards, "_MAX_FILES", 2)
    with pytest.raises(SourceError):
        find_shards(pattern, NameFilter(), [".tar"])


def test_shards_in_a_folder_may_have_suffixes_in_any_case(tmp_path: Path) -> None:
    touch(tmp_path, "a.TAR", "b.tar", "c.txt", "d.Tar")
    assert sorted(find_shards(tmp_path, NameFilter(), [".tar"]).names) == ["a.TAR", "b.tar", "d.Tar"]


def test_splits_of_several_files_come_from_their_names() -> None:
    def splits(*names: str) -> tuple[tuple[str, ...], list[int]]:
        found, ids = Shards(Path(), list(names), NameFilter()).split_ids([1] * len(names))
        return found, ids.tolist()

    assert splits("data/test-0.parquet", "data/train-0.parquet") == (("train", "test"), [1, 0])
    assert splits("val/0.tar", "train/0.tar", "train/1.tar") == (("train", "val"), [1, 0, 0])
    assert splits("train-0.tar", "more-1.tar") == (("all",), [0, 0])
    assert splits("train-test-0.tar") == (("all",), [0])
    assert splits("train/x/train/0.tar", "val/0.tar") == (("train", "val"), [0, 1])
    assert splits("trainer-0.tar") == (("all",), [0])
