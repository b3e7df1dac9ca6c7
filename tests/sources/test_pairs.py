"""Folders of images and of their masks."""

from __future__ import annotations

from pathlib import Path

import pytest

from h5pack.errors import OptionsError, SourceError
from h5pack.sources.catalog import NameFilter
from h5pack.sources.detect import SourceOptions, open_source
from tests.makers import tar_file
from tests.sources.files import touch


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ["images/b.jpg", "images/a.tif", "masks/a.png", "masks/b.gif"],
            {"masks": {"b.jpg": "b.gif", "a.tif": "a.png"}},
        ),
        (
            ["JPEGImages/1.jpg", "SegmentationClass/1.png", "SegmentationObject/1.png", "Annotations/1.xml"],
            {"SegmentationClass": {"1.jpg": "1.png"}, "SegmentationObject": {"1.jpg": "1.png"}},
        ),
        (["img/x/1.a.jpg", "gt/x/1.a.png"], {"gt": {"x/1.a.jpg": "x/1.a.png"}}),
        (
            ["images/a_1.jpg", "images/b_1.jpg", "annotations/trimaps/a_1.png", "annotations/trimaps/b_1.png"],
            {"annotations": {"a_1.jpg": "trimaps/a_1.png", "b_1.jpg": "trimaps/b_1.png"}},
        ),
        (
            ["leftImg8bit/u/u_1_left.png", "leftImg8bit/v/v_1_left.png", "gtFine/u/u_1_gt.png", "gtFine/v/v_1_gt.png"],
            {"gtFine": {"u/u_1_left.png": "u/u_1_gt.png", "v/v_1_left.png": "v/v_1_gt.png"}},
        ),
        (
            ["images/1.jpg", "images/1-2.jpg", "gt/1-m.png", "gt/1-2-m.png", "edges/1.png", "edges/1-2.png"],
            {"edges": {"1-2.jpg": "1-2.png", "1.jpg": "1.png"}, "gt": {"1-2.jpg": "1-2-m.png", "1.jpg": "1-m.png"}},
        ),
        (["images/1.jpg", "masks/1_mask.png"], {"masks": {"1.jpg": "1_mask.png"}}),
        (["drawings/1.jpg", "masks/1.png"], {"masks": {"1.jpg": "1.png"}}),
        (["images/1.jpg", "outlines/1.png"], {"outlines": {"1.jpg": "1.png"}}),
    ],
)
def test_images_are_paired_with_masks(tmp_path: Path, names: list[str], expected: dict[str, dict[str, str]]) -> None:
    catalog = open_source(touch(tmp_path, *names), SourceOptions("pairs"))
    assert (catalog.kind, catalog.labels, catalog.split_names) == ("pairs", None, ("all",))
    assert [one.name for one in catalog.pixel_fields] == [*expected]
    for one in catalog.pixel_fields:
        images, masks = ([name.partition("/")[2] for name in table] for table in (catalog.names, one.files))
        assert dict(zip(images, masks, strict=True)) == expected[one.name]
        assert {name.partition("/")[0] for name in one.files} == {one.name}


@pytest.mark.parametrize("folder", ["labels", "splits"])
def test_masks_in_a_folder_of_a_reserved_name_become_the_field_masks(tmp_path: Path, folder: str) -> None:
    paths = [f"images/{number}.jpg" for number in range(3)] + [f"{folder}/{number}.png" for number in range(3)]
    catalog = open_source(touch(tmp_path, *paths), SourceOptions("pairs"))
    assert [(one.name, [*one.files]) for one in catalog.pixel_fields] == [("masks", paths[3:])]


def test_a_reserved_name_beside_masks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionsError):
        open_source(touch(tmp_path, "images/1.jpg", "labels/1.png", "masks/1.png"), SourceOptions("pairs"))


@pytest.mark.parametrize("masks", ["annotations/trimaps/train/{}.png", "gt/train/{}_m.png", "gt/deep/train/{}_m.png"])
def test_masks_of_a_single_split_lie_in_folders_of_their_own(tmp_path: Path, masks: str) -> None:
    for images in (["images/train/1.jpg", "images/train/2.jpg"], ["images/train/1.jpg", "images/val/2.jpg"]):
        paths = [*images, *(masks.format(number) for number in range(1, 3) if f"images/train/{number}.jpg" in images)]
        catalog = open_source(touch(tmp_path / str(len(paths)), *paths), SourceOptions("pairs"))
        assert [*catalog.names] == [path for path in images if "train" in path]
        assert [*catalog.pixel_fields[0].files] == paths[2:]


@pytest.mark.parametrize("by_split", [False, True])
def test_pairs_in_splits(tmp_path: Path, by_split: bool) -> None:
    paths = ["val/images/1.jpg", "val/masks/1.png", "training/images/1.jpg", "training/masks/1.png"]
    if not by_split:
        paths = ["/".join((role, split, name)) for split, role, name in (path.split("/") for path in paths)]
    catalog = open_source(touch(tmp_path, *paths), SourceOptions("pairs"))
    assert catalog.split_names == ("training", "val")
    found = zip(catalog.names, catalog.pixel_fields[0].files, catalog.split_ids.tolist(), strict=True)
    for image, mask, split in found:
        assert mask == image.replace("images", "masks").replace("jpg", "png")
        assert catalog.split_names[split] in image


@pytest.mark.parametrize(
    ("pattern", "images", "mask"),
    [
        ("{split}/{name}{ending}", "", "_mask"),
        ("top/{split}/a/{name}{ending}", "", "_mask"),
        ("{split}/{name}{ending}", "", ""),
        ("{split}{role}/{name}{ending}", "", "annot"),
        ("{split}_{role}/{name}{ending}", "images", "labels"),
        ("top/only/{role}/deep/{split}/{name}{ending}", "rgb", "masks"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_splits_in_other_layouts(tmp_path: Path, pattern: str, images: str, mask: str, packed: bool) -> None:
    def path(split: str, name: str, role: str, suffix: str) -> str:
        ending = suffix if "{role}" in pattern else role + suffix
        return pattern.format(split=split, name=name, role=role, ending=ending)

    keys = [(split, name) for split in ("Train", "val") for name in "12"]
    expected = [(path(*key, images, ".jpg"), path(*key, mask, ".png"), key[0]) for key in keys]
    if "{split}_{role}" in pattern:
        # As in Carvana, whose images for testing have no masks.
        touch(tmp_path / "in", "test/9.jpg", "legend.png")
    source = touch(tmp_path / "in", *(name for one in expected for name in one[:2]))
    if packed:
        source = tar_file(tmp_path / "in.tar", source)
        expected = [tuple(part.removeprefix("top/") for part in one) for one in expected]
    catalog = open_source(source, SourceOptions("pairs"))
    splits = [catalog.split_names[number] for number in catalog.split_ids]
    assert sorted(zip(catalog.names, catalog.pixel_fields[0].files, splits, strict=True)) == sorted(expected)
    assert len(catalog.rejects) == ("{split}_{role}" in pattern)


def test_what_is_no_pair_is_counted_or_rejected(tmp_path: Path) -> None:
    names = ["images/1.jpg", "images/2.jpg", "images/3.jpg", "images/1.png", "notes/x.jpg", "top.jpg"]
    names += ["masks/1.png", "masks/2.png", "masks/2.gif", "masks/9.png", "masks/read.txt"]
    catalog = open_source(touch(tmp_path, *names), SourceOptions("pairs"))
    assert [*catalog.names] == ["images/1.jpg", "images/1.png"]
    assert [*catalog.pixel_fields[0].files] == ["masks/1.png"] * 2
    assert {reject.name for reject in catalog.rejects} == {"images/2.jpg", "images/3.jpg"}
    assert catalog.ignored == {".txt files": 1, "other images": 2, "files of 'masks' without an image": 1}
    some = open_source(tmp_path, SourceOptions("pairs", wanted=NameFilter(("*.png",), ("notes/*",))))
    assert ([*some.names], [*some.pixel_fields[0].files]) == (["images/1.png"], ["masks/1.png"])
    assert (some.rejects, some.ignored["not included"], some.ignored["excluded"]) == ((), 3, 1)


@pytest.mark.parametrize("ending", [".png", ".PNG"])
def test_masks_beside_images_of_the_same_names(tmp_path: Path, ending: str) -> None:
    touch(tmp_path, *(f"{number}{suffix}" for number in range(3) for suffix in (".jpg", ending)))
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path, SourceOptions())
    assert f"exclude='*{ending}*'" in caught.value.parameters
    catalog = open_source(tmp_path, SourceOptions("pairs"))
    assert [*catalog.names] == ["0.jpg", "1.jpg", "2.jpg"]
    assert [*catalog.pixel_fields[0].files] == [f"{number}{ending}" for number in range(3)]


@pytest.mark.parametrize("missing", [[0], [3, 5], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4]])
def test_images_without_a_mask_beside_others_with_one_are_rejected(tmp_path: Path, missing: list[int]) -> None:
    names = [f"{number}.png" for number in range(6) if number not in missing]
    touch(tmp_path, *names, *(f"{number}.jpg" for number in range(6)))
    catalog = open_source(tmp_path, SourceOptions("pairs"))
    assert [*catalog.pixel_fields[0].files] == names
    assert [reject.name for reject in catalog.rejects] == [f"{number}.jpg" for number in missing]


def test_masks_that_a_word_marks_precede_those_of_the_same_name(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg", "a_mask.png", "b.jpg", "b_mask.png", "c.jpg", "c.png", "c_mask.png")
    catalog = open_source(tmp_path, SourceOptions("pairs"))
    assert [*catalog.pixel_fields[0].files] == ["a_mask.png", "b_mask.png", "c_mask.png", "c_mask.png"]


def test_masks_that_a_word_marks_precede_a_lone_pair_in_another_folder(tmp_path: Path) -> None:
    touch(tmp_path, "docs/a.jpg", "docs/a.png", *(f"scans/{name}.jpg" for name in ("b", "b_mask", "c", "c_mask")))
    catalog = open_source(tmp_path, SourceOptions("pairs"))
    assert [*catalog.pixel_fields[0].files] == ["scans/b_mask.jpg", "scans/c_mask.jpg"]


def test_the_first_image_and_the_first_mask_must_have_one_name(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", *(f"{name}{suffix}" for name in "bcd" for suffix in (".jpg", ".png")))
    assert len(open_source(tmp_path, SourceOptions())) == 7


@pytest.mark.parametrize(
    "names",
    [
        ["images/1.jpg"], ["masks/1.jpg"], ["a/1.jpg", "b/1.png"], ["images/1.jpg", "photos/1.jpg", "masks/1.png"],
        ["images/1.jpg", "x/1.jpg", "y/1.png"], ["images/1.jpg", "masks/2.png"],
        ["images/1.jpg", "images/2.jpg", "masks/1_mask.png", "masks/1_edge.png"], ["1.jpg"],
    ],
)  # fmt: skip
def test_folders_that_are_no_pairs_are_an_error(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(SourceError) as caught:
        open_source(touch(tmp_path, *names), SourceOptions("pairs"))
    assert caught.value.path == str(tmp_path)
