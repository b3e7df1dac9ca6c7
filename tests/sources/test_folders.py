"""Flat folders, class folders and split folders: names, labels, splits."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from h5pack.errors import NoImagesError, SourceError
from h5pack.sources import folders
from h5pack.sources.catalog import Catalog
from h5pack.sources.walk import NameFilter, child_folders, walk
from tests.sources.test_walk import touch


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
    with pytest.raises(SourceError, match=r"images beside its class folders \('stray\.jpg', say\).*--source flat"):
        classes(tmp_path)
    assert rows(classes(tmp_path, "stray*")) == [("a/1.jpg", "all", 0)]


def test_two_thousand_classes_take_little_time(tmp_path: Path) -> None:
    for number in range(2_000):
        os.mkdir(tmp_path / f"{number:04d}")
        os.close(os.open(tmp_path / f"{number:04d}" / "x.jpg", os.O_CREAT))
    started = time.perf_counter()
    catalog = classes(tmp_path)
    assert time.perf_counter() - started < 2
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
    with pytest.raises(NoImagesError, match=r"no image in its split folders \(train, val\)"):
        splits(tmp_path, "train/*")


def test_images_beside_splits_are_an_error(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.jpg", "test/a/1.jpg", "stray.jpg")
    with pytest.raises(SourceError, match=r"images beside its split folders \('stray\.jpg', say\)"):
        splits(tmp_path)
    assert len(splits(tmp_path, "stray.jpg")) == 2


def test_images_beside_the_classes_of_a_split_are_an_error(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.jpg", "train/stray.jpg", "test/x.jpg")
    with pytest.raises(SourceError, match=r"train: holds images beside its class folders \('stray\.jpg' beside 'a'"):
        splits(tmp_path)
    assert len(splits(tmp_path, "train/stray.jpg")) == 2
