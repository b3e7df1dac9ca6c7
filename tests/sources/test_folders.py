"""Walks over folders, and folders of images: flat, by class, by split."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.errors import NoImagesError, SourceError
from h5pack.sources import folders
from h5pack.sources.catalog import Catalog, NameFilter
from h5pack.sources.folders import child_folders, walk

EVERYTHING = NameFilter()


def touch(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def found(root: Path, names: NameFilter = EVERYTHING) -> list[str]:
    return list(walk(str(root), names).below(""))


def torchvision_order(folder: str) -> list[str]:
    """The loop of torchvision's make_dataset, over one folder."""
    listed = []
    for root, _, names in sorted(os.walk(folder, followlinks=True)):
        for name in sorted(names):
            listed.append(os.path.join(root, name))
    return listed


FOLDERS = st.sampled_from(["a", "a-b", "a0", "a b", "A", "b.jpg", "é", "雪", "\U0001f600"])
FILES = st.sampled_from(["x.jpg", "a.jpg", "a-b.png", "a0.jpg", "É.JPG", "雪.webp", "\uffee.png"])
PATHS = st.tuples(st.lists(FOLDERS, max_size=3), FILES).map(lambda parts: "/".join([*parts[0], parts[1]]))


@settings(max_examples=26, deadline=None)
@given(st.sets(PATHS, min_size=1, max_size=14))
def test_order_is_torchvisions(paths: set[str]) -> None:
    with tempfile.TemporaryDirectory() as root:
        touch(Path(root), *paths)
        result = walk(root, EVERYTHING)
        assert [os.path.join(root, name) for name in result.below("")] == torchvision_order(root)
        for folder in {path.split("/")[0] for path in paths if "/" in path}:
            listed = [os.path.join(root, name) for name in result.below(folder)]
            assert listed == torchvision_order(os.path.join(root, folder))


def test_a_folder_keeps_apart_from_those_whose_names_begin_like_it(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "a/c/2.jpg", "a-b/3.jpg", "a0/4.jpg", "a/\U0010ffff/5.jpg", "a!/6.jpg")
    assert list(walk(str(tmp_path), EVERYTHING).below("a")) == ["a/1.jpg", "a/c/2.jpg", "a/\U0010ffff/5.jpg"]


def test_a_folder_without_files_of_its_own_leads_to_those_below(tmp_path: Path) -> None:
    touch(tmp_path, "a/b/c/1.jpg")
    result = walk(str(tmp_path), EVERYTHING)
    assert list(result.below("a")) == ["a/b/c/1.jpg"]
    assert list(result.below("b")) == []


def test_only_the_part_below_top_is_walked_and_named_from_the_root(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "a/2.jpg", "a/b/3.jpg", "c/4.jpg", "c/5.txt")
    result = walk(str(tmp_path), NameFilter(exclude=("a/b/*",)), "a")
    assert list(result.below("")) == ["a/2.jpg"]
    assert result.ignored == {"excluded": 1}


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    touch(tmp_path / "elsewhere", "1.jpg", "deep/2.jpg")
    root = touch(tmp_path / "in", "own.jpg")
    (root / "one.jpg").symlink_to(tmp_path / "elsewhere" / "1.jpg")
    (root / "all").symlink_to("../elsewhere")
    (root / "again").symlink_to(tmp_path / "elsewhere")
    assert found(root) == ["one.jpg", "own.jpg", "again/1.jpg", "again/deep/2.jpg", "all/1.jpg", "all/deep/2.jpg"]


def test_broken_links_are_found_so_that_they_become_rejects(tmp_path: Path) -> None:
    (tmp_path / "gone.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "self.jpg").symlink_to("self.jpg")
    (tmp_path / "loop").symlink_to("loop")
    result = walk(str(tmp_path), EVERYTHING)
    assert list(result.below("")) == ["gone.jpg", "self.jpg"]
    assert result.ignored == {"no suffix files": 1}
    assert child_folders(str(tmp_path)) == []


def test_loops_of_links_end_and_are_counted(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "a/2.jpg", "b/3.jpg")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "a" / "self").symlink_to(".")
    (tmp_path / "a" / "beside").symlink_to("../b")
    (tmp_path / "b" / "back").symlink_to("../a")
    result = walk(str(tmp_path), EVERYTHING)
    assert set(result.below("")) == {
        "1.jpg", "a/2.jpg", "a/beside/3.jpg", "b/3.jpg", "b/back/2.jpg",
    }  # fmt: skip
    assert result.ignored["loops of links"] == 6


def test_what_is_passed_over_is_counted_by_kind(tmp_path: Path) -> None:
    touch(
        tmp_path,
        *("1.jpg", "2.JPEG", "3.Png", "a/4.tiff"),
        *(".hidden.jpg", "a/.DS_Store", ".jpg"),
        *("notes.txt", "a/more.TXT", "README", "archive.tar.gz"),
        *(".git/x.jpg", "a/.thumbs/y.jpg", "__MACOSX/z.jpg"),
    )
    result = walk(str(tmp_path), EVERYTHING)
    assert list(result.below("")) == ["1.jpg", "2.JPEG", "3.Png", "a/4.tiff"]
    assert result.ignored == {
        "hidden": 3,
        ".txt files": 2,
        "no suffix files": 1,
        ".gz files": 1,
        "hidden folders": 3,
    }


@pytest.mark.parametrize(
    ("include", "exclude", "kept"),
    [
        ((), (), ["1.jpg", "2.png", "a/1.jpg", "a/b/3.jpg"]),
        (("*.jpg",), (), ["1.jpg", "a/1.jpg", "a/b/3.jpg"]),
        (("1.jpg",), (), ["1.jpg", "a/1.jpg"]),
        (("a/*",), (), ["a/1.jpg", "a/x.dat", "a/b/3.jpg"]),
        (("*.dat", "2.*"), (), ["2.png", "a/x.dat"]),
        (("[12].*",), ("a/*",), ["1.jpg", "2.png"]),
        ((), ("a/b/*",), ["1.jpg", "2.png", "a/1.jpg"]),
        ((), ("1.jpg",), ["2.png", "a/b/3.jpg"]),
        ((), ("*.PNG",), ["1.jpg", "2.png", "a/1.jpg", "a/b/3.jpg"]),
        (("*.jpg",), ("*",), []),
    ],
)
def test_include_and_exclude(
    tmp_path: Path, include: tuple[str, ...], exclude: tuple[str, ...], kept: list[str]
) -> None:
    touch(tmp_path, "1.jpg", "2.png", "a/1.jpg", "a/b/3.jpg", "a/x.dat")
    result = walk(str(tmp_path), NameFilter(include, exclude))
    assert list(result.below("")) == kept
    assert sum(result.ignored.values()) == 5 - len(kept)


def test_what_filters_pass_over_is_counted(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "2.jpg", "3.jpg", "4.txt")
    result = walk(str(tmp_path), NameFilter(("[123].jpg",), ("2*",)))
    assert result.ignored == {"excluded": 1, "not included": 1}


def test_folders_300_levels_deep(tmp_path: Path) -> None:
    here = str(tmp_path)
    for _ in range(300):
        here = os.path.join(here, "d")
        os.mkdir(here)
    Path(here, "x.jpg").touch()
    assert found(tmp_path) == ["d/" * 300 + "x.jpg"]


@pytest.fixture
def too_deep(tmp_path: Path) -> Path:
    """A folder that cannot be listed by its path, also not by root: the path is too long."""
    touch(tmp_path, "good/1.jpg")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for number in range(20):
        name = "bad" if number == 0 else "x" * 250
        os.mkdir(name, dir_fd=descriptor)
        below = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    return tmp_path


def test_a_folder_that_cannot_be_listed_is_an_error(too_deep: Path) -> None:
    with pytest.raises(SourceError, match="too long") as caught:
        walk(str(too_deep), EVERYTHING)
    assert caught.value.parameters == ("exclude",)
    assert str(caught.value.path).startswith(str(too_deep / "bad"))
    with pytest.raises(SourceError, match="listed"):
        walk(str(too_deep), NameFilter(exclude=("bad", "bad/", "*.png", "good/*")))


@pytest.mark.parametrize("pattern", ["bad/*", "b*", "*/x*", "*"])
def test_a_folder_that_cannot_be_listed_is_left_out_by_exclude(too_deep: Path, pattern: str) -> None:
    result = walk(str(too_deep), NameFilter(exclude=(pattern,)))
    assert list(result.below("")) == ([] if pattern == "*" else ["good/1.jpg"])
    assert result.ignored["excluded folders"] == 1


def test_a_missing_root_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="listed") as caught:
        walk(str(tmp_path / "missing"), EVERYTHING)
    assert caught.value.path == str(tmp_path / "missing")


def test_an_empty_folder(tmp_path: Path) -> None:
    result = walk(str(tmp_path), EVERYTHING)
    assert (list(result.below("")), result.ignored) == ([], {})


def test_undecodable_names_are_found(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jpg")).touch()
    assert [os.fsencode(name) for name in found(tmp_path)] == [b"\xff.jpg"]


def test_child_folders_are_the_visible_ones(tmp_path: Path) -> None:
    touch(tmp_path, "b/1.jpg", ".git/1.jpg", "__MACOSX/1.jpg", "file.jpg")
    (tmp_path / "A").mkdir()
    (tmp_path / "link").symlink_to("b")
    (tmp_path / "broken").symlink_to("nowhere")
    assert child_folders(str(tmp_path)) == ["A", "b", "link"]


def flat(root: Path) -> Catalog:
    return folders.flat(str(root), walk(str(root), NameFilter()))


def classes(root: Path, *exclude: str) -> Catalog:
    return folders.classes(str(root), walk(str(root), NameFilter(exclude=exclude)), child_folders(str(root)))


def splits(root: Path, *exclude: str) -> Catalog:
    return folders.splits(str(root), walk(str(root), NameFilter(exclude=exclude)), child_folders(str(root)))


def rows(catalog: Catalog) -> list[tuple[str, str, int | None]]:
    """Name, split and label of every image."""
    labels = [None] * len(catalog) if catalog.labels is None else catalog.labels.tolist()
    return [
        (name, catalog.split_names[split], label)
        for name, split, label in zip(catalog.names, catalog.split_ids.tolist(), labels, strict=True)
    ]


def test_a_flat_folder_has_no_labels_however_deep(tmp_path: Path) -> None:
    catalog = flat(touch(tmp_path, "b.jpg", "a.jpg", "sub/deep/c.jpg", "notes.txt"))
    assert rows(catalog) == [("a.jpg", "all", None), ("b.jpg", "all", None), ("sub/deep/c.jpg", "all", None)]
    assert (catalog.kind, catalog.label_names, catalog.ignored) == ("flat", None, {".txt files": 1})


def test_classes_are_the_top_folders_sorted(tmp_path: Path) -> None:
    catalog = classes(
        touch(tmp_path, "b/1.jpg", "a0/1.jpg", "a/2.jpg", "a/c/1.jpg", "a-b/1.jpg", "雪/1.jpg", "B/1.jpg")
    )
    assert catalog.label_names == ("B", "a", "a-b", "a0", "b", "雪")
    assert rows(catalog) == [
        ("B/1.jpg", "all", 0),
        ("a/2.jpg", "all", 1),
        ("a/c/1.jpg", "all", 1),
        ("a-b/1.jpg", "all", 2),
        ("a0/1.jpg", "all", 3),
        ("b/1.jpg", "all", 4),
        ("雪/1.jpg", "all", 5),
    ]
    assert catalog.labels is not None
    assert (catalog.labels.dtype, catalog.split_ids.dtype) == (np.int64, np.int32)


def test_an_empty_class_keeps_its_number(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "b/readme.txt", "c/1.jpg", "__MACOSX/a/1.jpg", ".cache/1.jpg")
    catalog = classes(tmp_path)
    assert catalog.label_names == ("a", "b", "c")
    assert rows(catalog) == [("a/1.jpg", "all", 0), ("c/1.jpg", "all", 2)]


def test_a_class_may_be_a_link(tmp_path: Path) -> None:
    touch(tmp_path / "pool", "cats/1.jpg")
    touch(tmp_path / "in", "dog/1.jpg")
    (tmp_path / "in" / "cat").symlink_to(tmp_path / "pool" / "cats")
    assert rows(classes(tmp_path / "in")) == [("cat/1.jpg", "all", 0), ("dog/1.jpg", "all", 1)]


def test_images_beside_class_folders_are_an_error_that_names_one(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "stray.jpg")
    with pytest.raises(SourceError, match="stray") as caught:
        classes(tmp_path)
    assert caught.value.parameters == ("source_kind='flat'",)
    assert rows(classes(tmp_path, "stray*")) == [("a/1.jpg", "all", 0)]


def test_two_thousand_classes_are_numbered_in_order(tmp_path: Path) -> None:
    for number in range(2_000):
        os.mkdir(tmp_path / f"{number:04d}")
        os.close(os.open(tmp_path / f"{number:04d}" / "x.jpg", os.O_CREAT))
    catalog = classes(tmp_path)
    assert catalog.labels is not None
    assert catalog.labels.tolist() == list(range(2_000))


def test_splits_come_in_their_usual_order(tmp_path: Path) -> None:
    touch(tmp_path, "test/a/1.jpg", "Validation/a/1.jpg", "TRAIN/a/1.jpg", "TRAIN/b/deep/2.jpg", "extra/b/1.jpg")
    catalog = splits(tmp_path)
    assert catalog.split_names == ("TRAIN", "Validation", "test", "extra")
    assert catalog.label_names == ("a", "b")
    assert rows(catalog) == [
        ("TRAIN/a/1.jpg", "TRAIN", 0),
        ("TRAIN/b/deep/2.jpg", "TRAIN", 1),
        ("Validation/a/1.jpg", "Validation", 0),
        ("test/a/1.jpg", "test", 0),
        ("extra/b/1.jpg", "extra", 1),
    ]


def test_every_custom_name_of_a_split_has_its_rank() -> None:
    names = ["testing", "dev", "other", "tr", "test", "valid", "training", "val", "train", "validation", "Train"]
    assert folders.split_order(names + names) == (
        *("Train", "tr", "train", "training"),
        *("dev", "val", "valid", "validation"),
        *("test", "testing", "other"),
    )
    assert all(folders.is_split_name(name) for name in (*names[:2], "TRAIN"))
    assert not folders.is_split_name("other")


def test_labels_are_the_same_in_all_splits_although_classes_are_lacking_in_some(tmp_path: Path) -> None:
    touch(tmp_path, "train/b/1.jpg", "train/d/1.jpg", "val/a/1.jpg", "val/d/1.jpg")
    (tmp_path / "train" / "c").mkdir()
    catalog = splits(tmp_path)
    assert catalog.label_names == ("a", "b", "c", "d")
    assert [label for *_, label in rows(catalog)] == [1, 3, 0, 3]


def test_a_split_of_images_alone_has_no_labels(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "test/x.jpg", "test/y.jpg")
    catalog = splits(tmp_path)
    assert rows(catalog) == [
        ("train/a/1.jpg", "train", 0),
        ("train/b/1.jpg", "train", 1),
        ("test/x.jpg", "test", -1),
        ("test/y.jpg", "test", -1),
    ]
    assert catalog.label_names == ("a", "b")


def test_splits_of_images_alone_make_a_pack_without_labels(tmp_path: Path) -> None:
    touch(tmp_path, "train/1.jpg", "test/2.jpg")
    (tmp_path / "train" / "nothing").mkdir()
    catalog = splits(tmp_path)
    assert (catalog.labels, catalog.label_names) == (None, None)
    assert rows(catalog) == [("train/1.jpg", "train", None), ("test/2.jpg", "test", None)]


def test_a_split_without_images_is_no_split(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.jpg", "val/a/notes.txt")
    assert splits(tmp_path).split_names == ("train",)
    with pytest.raises(NoImagesError, match="train, val"):
        splits(tmp_path, "train/*")


def test_images_beside_splits_are_an_error(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.jpg", "test/a/1.jpg", "stray.jpg")
    with pytest.raises(SourceError, match="stray") as caught:
        splits(tmp_path)
    assert caught.value.parameters == ("exclude",)
    assert len(splits(tmp_path, "stray.jpg")) == 2


def test_images_beside_the_classes_of_a_split_are_an_error(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.jpg", "train/stray.jpg", "test/x.jpg")
    with pytest.raises(SourceError, match="stray") as caught:
        splits(tmp_path)
    assert (caught.value.path, caught.value.parameters) == (str(tmp_path / "train"), ("exclude",))
    assert len(splits(tmp_path, "train/stray.jpg")) == 2
