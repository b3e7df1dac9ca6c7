"""Walks over folders, and folders of images: flat, by class, by split."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.errors import NoImagesError, SourceError
from h5pack.sources import folders
from h5pack.sources.catalog import Catalog, NameFilter
from h5pack.sources.detect import SourceOptions, open_source
from h5pack.sources.folders import walk
from tests.makers import tar_file
from tests.sources.files import touch

EVERYTHING = NameFilter()


def found(root: Path, wanted: NameFilter = EVERYTHING) -> list[str]:
    return list(walk(str(root), wanted).below(""))


def torchvision_order(folder: str) -> list[str]:
    """The loop of torchvision's make_dataset, over one folder."""
    walked = sorted(os.walk(folder, followlinks=True))
    return [os.path.join(root, name) for root, _, names in walked for name in sorted(names)]


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
    deep = "d/" * 300 + "x.jpg"
    touch(tmp_path, "a/1.jpg", "a/c/2.jpg", "a-b/3.jpg", "a0/4.jpg", "a/\U0010ffff/5.jpg", "a!/6.jpg", deep)
    result = walk(str(tmp_path), EVERYTHING)
    assert list(result.below("a")) == ["a/1.jpg", "a/c/2.jpg", "a/\U0010ffff/5.jpg"]
    assert list(result.below("d")) == [deep]
    assert list(result.below("c")) == []


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
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jpg")).touch()
    (tmp_path / "gone.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "self.jpg").symlink_to("self.jpg")
    (tmp_path / "loop").symlink_to("loop")
    result = walk(str(tmp_path), EVERYTHING)
    assert list(result.below("")) == ["gone.jpg", "self.jpg", os.fsdecode(b"\xff.jpg")]
    assert result.ignored == {"no suffix files": 1}
    assert result.subfolders == {}


def test_a_link_that_cannot_be_followed_is_named_and_can_be_excluded(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "a/2.jpg")
    (tmp_path / "a" / "link").symlink_to("x" * 256)
    with pytest.raises(SourceError) as caught:
        walk(str(tmp_path), EVERYTHING)
    assert caught.value.path == str(tmp_path / "a" / "link")
    for pattern in ("a/link/*", "link"):
        assert found(tmp_path, NameFilter(exclude=(pattern,))) == ["1.jpg", "a/2.jpg"]


def test_folders_of_links_to_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the folders has four links to the next one, so that there are 4**10 paths."""
    for number in range(11):
        touch(tmp_path / str(number), "x.jpg")
        for link in range(4):
            (tmp_path / str(number) / f"link{link}").symlink_to(f"../{number + 1}")
    monkeypatch.setattr(folders, "_MAX_VISITS", 100)
    with pytest.raises(SourceError):
        walk(str(tmp_path), EVERYTHING)


def test_loops_of_links_end_and_are_counted(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "a/2.jpg", "b/3.jpg")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "a" / "self").symlink_to(".")
    (tmp_path / "a" / "beside").symlink_to("../b")
    (tmp_path / "b" / "back").symlink_to("../a")
    result = walk(str(tmp_path), EVERYTHING)
    assert set(result.below("")) == {"1.jpg", "a/2.jpg", "a/beside/3.jpg", "b/3.jpg", "b/back/2.jpg"}
    assert result.ignored["loops of links"] == 6


def test_skipped_files_are_counted_by_category(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "2.JPEG", "3.Png", "a/4.tiff", ".hidden.jpg", "a/.DS_Store", ".jpg", "notes.txt")
    touch(tmp_path, "a/more.TXT", "README", "archive.tar.gz", ".git/x.jpg", "a/.thumbs/y.jpg", "__MACOSX/z.jpg")
    result = walk(str(tmp_path), EVERYTHING)
    assert list(result.below("")) == ["1.jpg", "2.JPEG", "3.Png", "a/4.tiff"]
    files = {".txt files": 2, "no suffix files": 1, ".gz files": 1}
    assert result.ignored == {"hidden": 3, **files, "hidden folders": 3}


@pytest.mark.parametrize(
    ("include", "exclude", "kept"),
    [
        ("", "*.PNG", "1.jpg 2.png a/1.jpg a/b/3.jpg"), ("*.jpg", "", "1.jpg a/1.jpg a/b/3.jpg"),
        ("1.jpg", "", "1.jpg a/1.jpg"), ("a/*", "", "a/1.jpg a/x.dat a/b/3.jpg"), ("*.dat 2.*", "", "2.png a/x.dat"),
        ("[12].*", "a/*", "1.jpg 2.png"), ("", "a/b/*", "1.jpg 2.png a/1.jpg"), ("", "1.jpg", "2.png a/b/3.jpg"),
        ("*.jpg", "*", ""), ("*", "*.png", "1.jpg a/1.jpg a/x.dat a/b/3.jpg"), (".*.jpg", "", "a/.1.jpg"),
        ("1.* a/.*", "", "1.jpg a/.1.jpg a/1.jpg"), ("*.jpg .*", ".1*", "1.jpg a/1.jpg a/b/3.jpg"),
    ],
)  # fmt: skip
def test_include_and_exclude(tmp_path: Path, include: str, exclude: str, kept: str) -> None:
    touch(tmp_path, "1.jpg", "2.png", "a/.1.jpg", "a/1.jpg", "a/b/3.jpg", "a/x.dat")
    result = walk(str(tmp_path), NameFilter(tuple(include.split()), tuple(exclude.split())))
    assert list(result.below("")) == kept.split()
    assert sum(result.ignored.values()) == 6 - len(kept.split())


@pytest.fixture
def too_deep(tmp_path: Path) -> Path:
    """A folder that cannot be listed by its path, also not by root: the path is too long."""
    touch(tmp_path, "good/1.jpg")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for name in ["bad", *["x" * 250] * 19]:
        os.mkdir(name, dir_fd=descriptor)
        below = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    return tmp_path


def test_a_folder_that_cannot_be_listed_is_an_error(too_deep: Path) -> None:
    with pytest.raises(SourceError) as caught:
        walk(str(too_deep), EVERYTHING)
    assert caught.value.parameters == ("exclude",)
    assert str(caught.value.path).startswith(str(too_deep / "bad"))
    with pytest.raises(SourceError):
        walk(str(too_deep), NameFilter(exclude=("bad", "bad/", "*.png", "good/*")))


@pytest.mark.parametrize("pattern", ["bad/*", "*/x*", "*"])
def test_a_folder_that_cannot_be_listed_is_left_out_by_exclude(too_deep: Path, pattern: str) -> None:
    result = walk(str(too_deep), NameFilter(exclude=(pattern,)))
    assert list(result.below("")) == ([] if pattern == "*" else ["good/1.jpg"])
    assert result.ignored["excluded folders"] == 1


def classes(root: Path, *exclude: str) -> Catalog:
    return folders.classes(walk(str(root), NameFilter(exclude=exclude)))


def splits(root: Path, *exclude: str) -> Catalog:
    return folders.splits(walk(str(root), NameFilter(exclude=exclude)))


def rows(catalog: Catalog) -> list[tuple[str, str, int | None]]:
    """Name, split and label of every image."""
    labels = [None] * len(catalog) if catalog.labels is None else catalog.labels.tolist()
    return [
        (name, catalog.split_names[split], label)
        for name, split, label in zip(catalog.names, catalog.split_ids.tolist(), labels, strict=True)
    ]


def test_classes_are_the_top_folders_sorted(tmp_path: Path) -> None:
    names = ["B/1.jpg", "a/2.jpg", "a/c/1.jpg", "a-b/1.jpg", "a0/1.jpg", "b/1.jpg", "link/1.jpg", "雪/1.jpg"]
    root = touch(tmp_path / "in", *(name for name in names if name[:4] != "link"), "c/readme.txt")
    touch(root, "__MACOSX/a/1.jpg", ".cache/1.jpg", "readme.txt")
    (root / "link").symlink_to(touch(tmp_path / "pool", "1.jpg"))
    (root / "broken").symlink_to("nowhere")
    catalog = classes(root)
    # The class c keeps its number, although it has no images.
    assert catalog.label_names == ("B", "a", "a-b", "a0", "b", "c", "link", "雪")
    labels = (0, 1, 1, 2, 3, 4, 6, 7)
    assert rows(catalog) == [(name, "all", label) for name, label in zip(names, labels, strict=True)]
    assert (catalog.labels.dtype, catalog.split_ids.dtype) == (np.int64, np.int32)


@pytest.mark.parametrize(
    ("catalog_of", "names", "where", "parameter"),
    [
        (classes, ["a/1.jpg", "stray.jpg"], "", "source_kind='flat'"),
        (splits, ["train/a/1.jpg", "test/a/1.jpg", "stray.jpg"], "", "exclude"),
        (splits, ["train/a/1.jpg", "train/stray.jpg", "test/x.jpg"], "train", "exclude"),
    ],
)
def test_images_beside_folders_are_an_error_that_names_one(
    tmp_path: Path, catalog_of: Callable[..., Catalog], names: list[str], where: str, parameter: str
) -> None:
    touch(tmp_path, *names)
    with pytest.raises(SourceError, match=r"stray\.jpg") as caught:
        catalog_of(tmp_path)
    assert (caught.value.path, caught.value.parameters) == (str(tmp_path / where), (parameter,))
    assert len(catalog_of(tmp_path, "*stray*")) == len(names) - 1


def test_splits_come_in_their_usual_order(tmp_path: Path) -> None:
    touch(tmp_path, "test/a/1.jpg", "Validation/a/1.jpg", "TRAIN/c/deep/2.jpg", "extra/c/1.jpg", "extra/d/1.jpg")
    (tmp_path / "extra" / "b").mkdir()
    catalog = splits(tmp_path)
    assert catalog.split_names == ("TRAIN", "Validation", "test", "extra")
    unordered = ["testing", "dev", "other", "tr", "test", "valid", "training", "val", "train", "validation", "Train"]
    ordered = ["Train", "tr", "train", "training", "dev", "val", "valid", "validation", "test", "testing", "other"]
    assert folders.split_order(unordered * 2) == tuple(ordered)
    words = ["TrainA", "x_valid_2", "PublicTest", "TrainVal", "tree"]
    assert [folders.split_rank(name) for name in words] == [0, 1, 2, 3, 3]
    assert [folders.is_split_name(name) for name in ("testing", "TRAIN", "other")] == [True, True, False]
    # A class has the same number in all splits, and keeps it without images.
    assert catalog.label_names == ("a", "b", "c", "d")
    names = ["TRAIN/c/deep/2.jpg", "Validation/a/1.jpg", "test/a/1.jpg", "extra/c/1.jpg", "extra/d/1.jpg"]
    labels = (2, 0, 0, 2, 3)
    assert rows(catalog) == [(name, name.split("/")[0], label) for name, label in zip(names, labels, strict=True)]


def test_a_split_of_images_alone_has_no_labels(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "test/x.jpg", "test/y.jpg")
    catalog = splits(tmp_path)
    assert [label for *_, label in rows(catalog)] == [0, 1, -1, -1]
    assert catalog.label_names == ("a", "b")
    catalog = splits(tmp_path, "train/*/*")
    assert rows(catalog) == [("test/x.jpg", "test", None), ("test/y.jpg", "test", None)]
    assert catalog.label_names is None


def test_a_splits_only_folder_of_images_is_no_class(tmp_path: Path) -> None:
    root = touch(tmp_path, "train/cat/images/1.jpg", "train/dog/images/1.jpg", "val/Images/1.jpg", "val/Images/a/2.jpg")
    assert [label for _, split, label in rows(splits(root)) if split == "val"] == [-1, -1]
    assert splits(root).label_names == ("cat", "dog")
    without = splits(root, "train/dog/*", "train/cat/*")
    assert (without.labels, without.label_names, len(without)) == (None, None, 2)
    touch(root, "val/other/1.jpg")
    assert splits(root).label_names == ("Images", "cat", "dog", "other")


def test_a_splits_only_folder_is_a_class_if_another_split_has_it(tmp_path: Path) -> None:
    touch(tmp_path, "train/fake_images/1.jpg", "train/real_images/2.jpg", "val/real_images/3.jpg", "test/images/4.jpg")
    catalog = splits(tmp_path)
    assert [label for *_, label in rows(catalog)] == [0, 1, 1, -1]
    assert catalog.label_names == ("fake_images", "real_images")


def test_images_beside_class_folders_in_a_splits_only_folder_are_refused(tmp_path: Path) -> None:
    touch(tmp_path, "train/images/cat/1.jpg", "train/images/dog/2.jpg", "val/images/cat/3.jpg", "val/images/dog/4.jpg")
    touch(tmp_path, "test/images/5.jpg", "test/images/more/6.jpg")
    assert [label for *_, label in rows(splits(tmp_path))] == [0, 1, 0, 1, -1, -1]
    touch(tmp_path, "train/images/x.jpg")
    with pytest.raises(SourceError) as caught:
        splits(tmp_path)
    assert caught.value.path == str(tmp_path / "train" / "images")


@pytest.mark.parametrize(
    ("names", "notes"),
    [
        (["a/abbey/1.jpg", "a/apse/indoor/2.jpg", "b/1.jpg"], 1),
        (["train/0/0/1.jpg", "train/0/1/2.jpg", "train/1/0/3.jpg"], 1),
        (["a/1.jpg", "a/more/2.jpg", "a/most/3.jpg", "b/images/4.jpg"], 0),
    ],
)
def test_a_note_tells_that_classes_have_several_deeper_folders(tmp_path: Path, names: list[str], notes: int) -> None:
    root = touch(tmp_path / "in", *names)
    for source in (root, tar_file(tmp_path / "in.tar", root)):
        assert len(open_source(source, SourceOptions()).notes) == notes


@pytest.mark.parametrize(
    ("names", "empty", "exclude", "notes"),
    [
        (["a/1.jpg", "b/2.jpg"], "", (), 0),
        (["a/1.jpg", "b/2.jpg"], "c", (), 1),
        (["a/1.jpg", "b/2.jpg"], "", ("b/*",), 1),
        (["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg"], "val/b", (), 0),
        (["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg"], "val/c", (), 1),
    ],
)
def test_a_note_names_classes_without_images(
    tmp_path: Path, names: list[str], empty: str, exclude: tuple[str, ...], notes: int
) -> None:
    root = touch(tmp_path / "in", *names)
    (root / empty).mkdir(exist_ok=True)
    for source in (root, tar_file(tmp_path / "in.tar", root)):
        catalog = open_source(source, SourceOptions(wanted=NameFilter(exclude=exclude)))
        assert len(catalog.notes) == notes
        assert len(catalog.label_names) == len(set(catalog.labels.tolist())) + notes


def test_classes_of_a_split_may_be_in_a_folder_of_images_or_of_the_name_of_the_split(tmp_path: Path) -> None:
    names = ["train/train/cat/1.jpg", "train/train/dog/deep/2.jpg", "val/images/dog/1.jpg", "test/test/1.jpg"]
    catalog = splits(touch(tmp_path, *names))
    assert [(name, label) for name, _, label in rows(catalog)] == list(zip(names, [0, 1, 1, -1], strict=True))
    assert catalog.label_names == ("cat", "dog")


@pytest.mark.parametrize(
    ("names", "kind", "labels", "found"),
    [
        (["data/images/cat/1.jpg", "data/images/dog/1.jpg", "meta/a.txt", "b.txt"], "classes", ("cat", "dog"), {"all"}),
        (["a/train/cat/1.jpg", "a/val/dog/1.jpg"], "splits", ("cat", "dog"), {"train", "val"}),
        (["images/train/1.jpg", "images/val/1.jpg", "labels/train/1.txt"], "splits", None, {"train", "val"}),
        (["cat/1.jpg", "cat/more/2.jpg", "dog/none.txt"], "classes", ("cat", "dog"), {"all"}),
        (["train/cat/1.jpg"], "splits", ("cat",), {"train"}),
        (["data/images/1.jpg", "data/images/more/2.jpg", "data/list.txt"], "flat", None, {"all"}),
        (["training/image_2/1.jpg", "val/image_2/1.jpg"], "splits", None, {"training", "val"}),
    ],
)
def test_classes_or_splits_may_be_in_an_only_folder(
    names: list[str], kind: str, labels: tuple[str, ...] | None, found: set[str], tmp_path: Path
) -> None:
    root = touch(tmp_path / "in", *names)
    for name in names:
        (root / name).write_text(name)
    for source in (root, tar_file(tmp_path / "in.tar", root)):
        catalog = open_source(source, SourceOptions())
        assert (catalog.kind, catalog.label_names, {*catalog.split_names}) == (kind, labels, found)
        images = [name for name in sorted(names) if name.endswith(".jpg")]
        for index, (name, image) in enumerate(zip(catalog.names, images, strict=True)):
            # The names of an archive's members begin below its only folder.
            assert name == (image if source == root else image[-len(name) :])
            assert catalog.reader.read(index, name) == image.encode()
            if labels is not None:
                assert catalog.label_names[catalog.labels[index]] in name.split("/")


def test_a_split_without_images_is_no_split(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.jpg", "val/a/notes.txt")
    assert splits(tmp_path).split_names == ("train",)
    with pytest.raises(NoImagesError):
        splits(tmp_path, "train/*")
