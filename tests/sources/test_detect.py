"""Which kind of source a path is."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from h5pack.errors import NoImagesError, SourceError
from h5pack.sources import detect
from h5pack.sources.catalog import NameFilter
from h5pack.sources.detect import SourceOptions, open_source
from tests.makers import save, tar_file
from tests.sources.files import touch


def kind_of(root: Path, **settings: object) -> str:
    return open_source(root, SourceOptions(**settings)).kind  # type: ignore[arg-type]


def test_a_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(SourceError, match="Permission") as caught:
        open_source(tmp_path, SourceOptions())
    assert caught.value.path == str(tmp_path)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["1.jpg"], "flat"), (["1.jpg", "empty/notes.txt"], "flat"), (["cat/1.jpg", "dog/1.jpg"], "classes"),
        (["cat/deep/1.jpg"], "classes"), (["cat/1.jpg", "train/notes.txt"], "classes"),
        (["train/cat/1.jpg", "test/cat/1.jpg"], "splits"), (["Train/1.jpg"], "splits"),
        (["train/cat/1.jpg", "docs/readme.txt"], "splits"),
        (["train/cat/1.jpg", ".cache/1.jpg", "__MACOSX/train/1.jpg"], "splits"),
        (["img_align_celeba/1.jpg"], "classes"), (["steam_train/1.jpg", "model-train/1.jpg"], "classes"),
        (["Val_Kilmer/1.jpg", "Dev_Patel/1.jpg"], "classes"),
        ([f"{name}/1.jpg" for name in ("train_yard", "a", "b", "c", "test_tube")], "classes"),
        # As in the folders of YOLO, whose labels are text.
        ([f"{name}/{file}" for name in ("train", "val") for file in ("images/1.jpg", "labels/1.txt")], "splits"),
    ],
)  # fmt: skip
def test_a_folder_is_known_by_what_is_in_it(tmp_path: Path, names: list[str], kind: str) -> None:
    assert kind_of(touch(tmp_path, *names)) == kind


def test_celeba_and_manifests_are_known(tmp_path: Path) -> None:
    touch(tmp_path, "img_align_celeba/1.jpg")
    (tmp_path / "list_attr_celeba.txt").write_text("1\nBald Young\n1.jpg -1 1\n")
    assert kind_of(tmp_path) == "celeba"
    for name in ("m.csv", "m.TSV", "m.tab"):
        (tmp_path / name).write_text("path\n1.jpg\n")
        assert kind_of(tmp_path / name) == "manifest"


def test_a_mixture_of_splits_and_classes_is_an_error_that_names_both(tmp_path: Path) -> None:
    touch(tmp_path, "data/cat/1.jpg", "data/train/dog/1.jpg")
    with pytest.raises(SourceError) as caught:
        kind_of(tmp_path)
    # The pattern to exclude begins at the source, not at the folder with the splits.
    assert caught.value.parameters == ("source_kind='splits'", "source_kind='classes'", "exclude='data/cat/*'")
    assert {*open_source(tmp_path, SourceOptions("splits")).split_names} == {"cat", "train"}
    assert open_source(tmp_path / "data", SourceOptions("classes")).label_names == ("cat", "train")
    assert kind_of(tmp_path, wanted=NameFilter(exclude=("data/cat/*",))) == "splits"
    assert kind_of(tmp_path, wanted=NameFilter(exclude=("data/train/*",))) == "classes"


@pytest.mark.parametrize(
    "folders", ["train2017 val2017", "Train_images test_images", "WIDER_train WIDER_val x_test", "trainA trainB testA"]
)
def test_folders_with_words_of_splits_may_be_splits_or_classes(tmp_path: Path, folders: str) -> None:
    names = folders.split()
    touch(tmp_path, *(f"{folder}/1.jpg" for folder in names))
    touch(tmp_path, *(f"other{number}/1.jpg" for number in range(len(names))))
    with pytest.raises(SourceError) as caught:
        kind_of(tmp_path)
    assert caught.value.parameters == ("source_kind='splits'", "source_kind='classes'", "exclude")
    assert {*names} < {*open_source(tmp_path, SourceOptions("splits")).split_names}
    assert kind_of(tmp_path, kind="classes") == "classes"
    touch(tmp_path, "another/1.jpg")
    assert kind_of(tmp_path) == "classes"


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["images_001/images/1.jpg", "images_002/images/2.jpg"], ["flat", "classes"]),
        (["HAM_images_part_1/1.jpg", "HAM_images_part_2/2.jpg"], ["flat", "classes"]),
        (["bottle/train/good/1.jpg", "bottle/test/broken/2.jpg", "cable/train/good/1.jpg"], ["classes"]),
        (["real_images/1.jpg", "fake_images/2.jpg"], []),
        (["class_1/1.jpg", "class_2/2.jpg"], []),
    ],
)
def test_folders_that_are_probably_no_classes(tmp_path: Path, names: list[str], kinds: list[str]) -> None:
    touch(tmp_path, *names)
    if not kinds:
        assert kind_of(tmp_path) == "classes"
        return
    with pytest.raises(SourceError) as caught:
        kind_of(tmp_path)
    assert caught.value.parameters == (*(f"source_kind={kind!r}" for kind in kinds), "exclude")
    assert [kind_of(tmp_path, kind=kind) for kind in kinds] == kinds


@pytest.mark.parametrize(
    ("names", "pair"),
    [
        (["images/1.jpg", "images/2.jpg", "masks/1.png", "masks/2.png"], "images"),
        (["Images/a/1.jpg", "ground_truth/a/1.png", "notes/x.jpg"], "Images"),
        (["train/JPEGImages/1.jpg", "train/SegmentationClass/1.png", "val/x/2.jpg"], "train/JPEGImages"),
        (["images/1.jpg", "images/2.jpg", "images/3.jpg", "masks/4.png", "masks/5.png", "masks/1.png"], "images"),
        (["leftImg8bit/a/1_x.png", "gtFine/a/1_y.png"], "leftImg8bit"),
        (["train_images/1.png", "train_masks/1.png"], "train_images"),
        (["1/images/1.png", "1/masks/1.png", "2/images/3.png"], "1/images"),
        (["test/1.png", "test_labels/1.png", "val/2.png", "val_labels/2.png"], "test"),
        (["images/1.png", "trimaps/1.png"], "images"),
        (["cat/1.jpg", "dog/1.jpg"], None),
        (["images/1.jpg", "drawings/1.jpg"], None),
        (["images/cat/1.jpg", "labels/1.txt"], None),
    ],
)
def test_images_beside_their_masks_are_not_classes(tmp_path: Path, names: list[str], pair: str | None) -> None:
    root = touch(tmp_path, *names)
    if pair is None:
        assert kind_of(root) == "classes"
        return
    with pytest.raises(SourceError) as caught:
        kind_of(root)
    kind = "splits" if pair.startswith("t") and pair != "train_images" else "classes"
    pairs, exclude, same = caught.value.parameters
    assert (pairs, same) == ("source_kind='pairs'", f"source_kind={kind!r}")
    assert repr(pair) in str(caught.value)
    left = open_source(root, SourceOptions(wanted=NameFilter(exclude=(exclude.split("'")[1],))))
    assert 0 < len(left) < len(open_source(root, SourceOptions("flat")))
    assert kind_of(root, kind="pairs") == "pairs"
    assert kind_of(root, kind=kind) == kind
    assert kind_of(root / pair) in ("flat", "classes")


@pytest.mark.parametrize(
    ("names", "kind", "ending"),
    [
        (["cat/1 (1).png", "cat/1 (1)_mask.png", "dog/2.png"], "classes", "_mask"),
        (["train/a.jpg", "train/a-GT.png", "train/b.jpg"], "splits", "-GT"),
        (["data/1.tif", "data/1_mask.tif"], "classes", "_mask"),
        (["a/1.jpg", "a/1.png", "a/2.jpg", "a/2.png", "b/3.jpg", "b/3.png"], "classes", ".png"),
        (["1.JPEG", "1.png", "2.JPEG", "2.png"], "flat", ".png"),
        (["1.png", "1_seg.png", "2_mask.png"], "flat", ""),
        (["a/1.jpg", "a/1.png", "a/2.jpg", "a/3.png", "b/1.jpg"], "classes", ""),
    ],
)
def test_masks_beside_their_images_are_not_images(tmp_path: Path, names: list[str], kind: str, ending: str) -> None:
    root = touch(tmp_path, *names)
    if not ending:
        assert kind_of(root) == kind
        return
    with pytest.raises(SourceError) as caught:
        kind_of(root)
    pattern = f"*{ending}*" if ending == ".png" else f"*{ending}[._]*"
    assert caught.value.parameters == ("source_kind='pairs'", f"exclude={pattern!r}", f"source_kind={kind!r}")
    assert kind_of(root, kind="pairs") == "pairs"
    assert kind_of(root, kind=kind) == kind
    masks = sum(ending in name for name in names)
    assert len(open_source(root, SourceOptions(wanted=NameFilter(exclude=(pattern,))))) == len(names) - masks


def test_a_note_names_tables_beside_images_without_labels(tmp_path: Path) -> None:
    touch(tmp_path, "train/1.jpg", "train/x.txt", "labels.csv", "b.json")
    (tmp_path / "train" / "a.json").write_text('{"images": []}')
    (note,) = open_source(tmp_path, SourceOptions()).notes
    assert [name in note.text for name in ("labels.csv", "train/a.json", "b.json")] == [True, True, False]
    assert len(open_source(tar_file(tmp_path.with_suffix(".tar"), tmp_path), SourceOptions()).notes) == 1
    pairs = touch(tmp_path / "p", "images/1.jpg", "masks/1.png", "masks/1.json")
    assert open_source(tar_file(tmp_path.with_suffix(".pairs"), pairs), SourceOptions("pairs")).notes == ()
    shutil.rmtree(tmp_path / "p")
    touch(tmp_path, *(f"{number}.json" for number in range(100)))
    assert "a.json" not in open_source(tmp_path, SourceOptions()).notes[0].text
    for names, count in (("cat/1.jpg dog/2.jpg t.csv", 0), ("train/cat/1.jpg val/2.jpg t.csv", 1)):
        assert len(open_source(touch(tmp_path / f"{count}", *names.split()), SourceOptions()).notes) == count


def test_hidden_and_excluded_tables_are_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "1.jpg", "a.csv", "._a.csv", "closed/b.csv", "closed/2.jpg")
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scandir(path if "closed" not in str(path) else "/nowhere"))
    catalog = open_source(tmp_path, SourceOptions(wanted=NameFilter(exclude=("closed/*",))))
    assert list(catalog.names) == ["1.jpg"]
    (note,) = catalog.notes
    assert ["'a.csv'" in note.text, "._a.csv" in note.text, "b.csv" in note.text] == [True, False, False]
    (tmp_path / "a.csv").rename(tmp_path / "A.CSV")
    (tmp_path / "B.JSON").write_text("{}")
    (note,) = open_source(tmp_path, SourceOptions(wanted=NameFilter(exclude=("closed/*",)))).notes
    assert ["'A.CSV'" in note.text, "B.JSON" in note.text] == [True, False]


def test_a_given_kind_overrules_the_detected_one(tmp_path: Path) -> None:
    touch(tmp_path, "train/cat/1.jpg", "test/cat/1.jpg")
    assert list(open_source(tmp_path, SourceOptions("flat")).names) == ["test/cat/1.jpg", "train/cat/1.jpg"]
    assert open_source(tmp_path, SourceOptions("classes")).label_names == ("test", "train")
    for kind in ("celeba", "manifest"):
        with pytest.raises(SourceError):
            kind_of(tmp_path, kind=kind)
    (tmp_path / "list.txt").write_text("path,label\ntrain/cat/1.jpg,x\n")
    assert kind_of(tmp_path / "list.txt", kind="manifest") == "manifest"
    with pytest.raises(SourceError) as caught:
        kind_of(tmp_path / "list.txt", kind="classes")
    assert caught.value.parameters == ("source_kind='classes'",)


@pytest.mark.parametrize("kind", [None, "flat", "classes"])
def test_a_source_without_images_is_an_error_that_counts_what_was_skipped(tmp_path: Path, kind: str | None) -> None:
    touch(tmp_path, "a/1.txt", "a/2.txt", "a/.hidden.jpg", ".git/x.jpg")
    with pytest.raises(NoImagesError, match=r"2 \.txt files, 1 hidden, 1 hidden folders") as caught:
        kind_of(tmp_path, kind=kind)
    assert caught.value.path == str(tmp_path)


@pytest.mark.parametrize("name", ["missing", "x" * 5_000, "looped", "photo.jpg", "pipe"])
def test_what_is_not_a_source_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "looped").symlink_to("looped")
    touch(tmp_path, "photo.jpg")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError) as caught:
        kind_of(tmp_path / name)
    assert caught.value.path == str(tmp_path / name)


@pytest.mark.parametrize("kind", [None, "hdf5", "flat"])
def test_a_failing_disk_is_no_missing_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    monkeypatch.setattr(os, "stat", Mock(side_effect=OSError(errno.EIO, "failed", str(tmp_path))))
    with pytest.raises(SourceError, match="failed") as caught:
        open_source(tmp_path, SourceOptions(kind))
    assert caught.value.path == str(tmp_path)


def test_too_many_open_files_are_no_unreadable_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "walk", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(SourceError, match="'ulimit -n'"):
        open_source(tmp_path, SourceOptions())


def test_a_limit_applies_to_every_kind(tmp_path: Path) -> None:
    touch(tmp_path / "in", *(f"{name}/{number}.jpg" for name in "ab" for number in range(6)))
    (tmp_path / "link").symlink_to("in")
    limited = open_source(str(tmp_path / "link"), SourceOptions(limit=4))
    assert list(limited.names) == ["a/0.jpg", "a/3.jpg", "b/0.jpg", "b/3.jpg"]
    assert len(open_source(tmp_path / "in", SourceOptions(limit=100))) == 12
    assert list(open_source([0, 1, 2, 3], SourceOptions(limit=2)).names) == ["00000000", "00000002"]


def test_objects_that_are_not_map_style_datasets_are_errors() -> None:
    for value in (42, None, iter([])):
        with pytest.raises(SourceError):
            open_source(value, SourceOptions())  # type: ignore[arg-type]
    with pytest.raises(NoImagesError):
        open_source([], SourceOptions())


@pytest.mark.parametrize("name", ["x.json", "index.json", "a/index.json", "annotations/instances_train.json"])
def test_pipes_in_a_folder_are_not_opened(tmp_path: Path, name: str) -> None:
    save(tmp_path / "in" / "a" / "1.jpg")
    (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "in" / name)
    assert len(open_source(tmp_path / "in", SourceOptions())) == 1
