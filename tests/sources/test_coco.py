"""COCO: annotations beside folders of images become boxes, labels of boxes, ids and captions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import h5pack
from h5pack.errors import OptionsError, SourceError
from h5pack.pack.conversion import Conversion
from h5pack.sources.catalog import NameFilter
from h5pack.sources.coco import coco
from h5pack.sources.detect import SourceOptions, open_source
from h5pack.sources.manifest import ManifestColumns
from tests.makers import quick
from tests.sources.files import rows_of

CATEGORIES = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}, {"id": 90, "name": "car"}]
NAMES = ["boxes", "box_labels", "crowd", "image_ids", "captions"]


def image(number: int, **more: Any) -> dict[str, Any]:
    return {"id": 100 + number, "file_name": f"{number:06d}.png", "height": 30, "width": 40, **more}


def box(number: int, numbers: list[float], category: int | str = 7, **more: Any) -> dict[str, Any]:
    return {"id": 1, "image_id": 100 + number, "category_id": category, "bbox": numbers, "iscrowd": 0, **more}


def caption(number: int, text: str) -> dict[str, Any]:
    return {"id": 2, "image_id": 100 + number, "caption": text}


def write(path: Path, images: list[Any], annotations: list[Any], categories: Any = CATEGORIES) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"info": {}, "images": images, "annotations": annotations, "categories": categories}))
    return path


def pictures(folder: Path, *numbers: int, size: tuple[int, int] = (30, 40), **settings: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        Image.new("RGB", size[::-1], (number, 0, 0)).save(folder / f"{number:06d}.png", **settings)


def laid_out(root: Path) -> Path:
    """A folder as COCO distributes it: two splits, boxes and captions, the second in another order."""
    pictures(root / "train2017", 0, 1, 2)
    pictures(root / "val2017", 3)
    boxes = [box(1, [1, 2, 10, 5]), box(0, [0, 0, 4, 4], 90), box(1, [3, 4, 5, 6], 3, iscrowd=1)]
    write(root / "annotations" / "instances_train2017.json", [image(0), image(1), image(2)], boxes)
    texts = [caption(2, "two"), caption(0, "a dog 雪"), caption(2, "a second\none")]
    write(root / "annotations" / "captions_train2017.json", [image(2), image(0), image(1)], texts)
    write(root / "annotations" / "instances_val2017.json", [image(3)], [box(3, [1.5, 2.25, 3, 4])])
    (root / "annotations" / "person_keypoints_val2017.json").write_text("{")
    return root


def test_a_size_that_only_one_file_of_a_split_gives_is_used(tmp_path: Path) -> None:
    pictures(tmp_path / "train2017", 0)
    unsized = {key: value for key, value in image(0).items() if key in ("id", "file_name")}
    write(tmp_path / "annotations" / "captions_train2017.json", [unsized], [caption(0, "a")])
    write(tmp_path / "annotations" / "instances_train2017.json", [image(0)], [box(0, [50, 50, 4, 4])])
    catalog = open_source(tmp_path, SourceOptions())
    assert [row.tolist() for row in catalog.fields["boxes"].values()] == [[]]  # type: ignore[union-attr]
    assert catalog.coordinate_sizes.tolist() == [[30, 40]]


def rows(path: Path, **keywords: Any) -> dict[str, Any]:
    """The fields of each row of a pack, by the name of its file."""
    dataset = h5pack.H5Dataset(path, fields=NAMES, check=True, **keywords)
    return {
        name: (*(value.tolist() for value in sample[1:5]), sample.captions)
        for name, sample in zip(dataset.filenames or (), dataset[:], strict=True)
    }


def test_a_folder_as_coco_lays_it_out(tmp_path: Path) -> None:
    root = laid_out(tmp_path / "coco")
    report = h5pack.convert(root, tmp_path / "o.h5", **quick())
    assert (report.images, report.rejects) == (4, 0)
    expected = {
        "train2017/000000.png": ([[0, 0, 4, 4]], [2], [0], 100, ["a dog 雪"]),
        "train2017/000001.png": ([[1, 2, 11, 7], [3, 4, 8, 10]], [1, 0], [0, 1], 101, []),
        "train2017/000002.png": ([], [], [], 102, ["two", "a second\none"]),
    }
    assert rows(tmp_path / "o.h5", split="train") == expected
    assert rows(tmp_path / "o.h5", split="val") == {"val2017/000003.png": ([[1.5, 2.25, 4.5, 6.25]], [1], [0], 103, [])}
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", fields=NAMES)
    assert dataset.field_classes == {"box_labels": ("cat", "dog", "car")}
    assert (dataset[0].boxes.dtype, dataset[0].box_labels.dtype) == (torch.float32, torch.int64)
    h5pack.convert(tmp_path / "o.h5", tmp_path / "p.h5", **quick(seed=4))
    assert rows(tmp_path / "p.h5", split="train") == expected
    assert h5pack.H5Dataset(tmp_path / "p.h5", fields=NAMES).field_classes == dataset.field_classes


def test_the_split_may_be_the_name_of_the_folder(tmp_path: Path) -> None:
    """As in exports of Roboflow."""
    pictures(tmp_path / "valid", 0)
    path = tmp_path / "valid" / "_annotations.coco.json"
    write(path, [image(0)], [box(0, [1, 2, 3, 4], 2**70)], [{"id": 2**70, "name": "x"}])
    catalog = open_source(path, SourceOptions())
    assert (list(catalog.names), catalog.split_names) == (["000000.png"], ("valid",))
    assert (catalog.fields["box_labels"].classes, catalog.fields["box_labels"].data.tolist()) == (("x",), [0])


def test_categories_without_boxes_are_the_labels_of_images(tmp_path: Path) -> None:
    """As in iNaturalist; an image of several categories has no label that could stand for them."""
    pictures(tmp_path, 0, 1, 2)
    annotations = [{"id": 1, "image_id": 100 + number, "category_id": 7 * number} for number in (1, 1)]
    path = write(tmp_path / "train.json", [image(0), image(1), image(2)], annotations)
    catalog = open_source(path, SourceOptions())
    assert (catalog.labels.tolist(), catalog.label_names, list(catalog.fields)) == (
        [-1, 1, -1], ("cat", "dog", "car"), ["image_ids"],
    )  # fmt: skip
    annotations.append({**annotations[0], "category_id": 3})
    several = open_source(write(path, [image(0), image(1)], annotations), SourceOptions())
    assert (several.labels, len(several.notes)) == (None, 1)
    assert "category_id" in several.notes[0].text


@pytest.mark.parametrize("where", ["images", "train2017", "images/train2017", "train", ".", "annotations", "elsewhere"])
def test_one_file_of_annotations_finds_its_images(tmp_path: Path, where: str) -> None:
    path = write(tmp_path / "annotations" / "instances_train2017.json", [image(0), image(1)], [box(1, [1, 2, 3, 4])])
    pictures(tmp_path / where, 0, 1)
    root = str(tmp_path / "elsewhere") if where == "elsewhere" else None
    if root is not None:
        with pytest.raises(SourceError) as caught:
            coco(path, NameFilter())
        assert caught.value.parameters == ("root",)
    rooted = ManifestColumns(root=root)
    catalog = open_source(path, SourceOptions(columns=rooted))
    assert (catalog.kind, list(catalog.names)) == ("coco", ["000000.png", "000001.png"])
    assert catalog.split_names == ("train",)
    assert len(catalog.reader.read(1, catalog.names[1])) > 0  # type: ignore[arg-type]
    assert list(catalog.fields) == ["image_ids", "boxes", "box_labels", "crowd"]
    assert len(open_source(path, SourceOptions(wanted=NameFilter(exclude=("*0.png",)), columns=rooted))) == 1


def test_boxes_outside_are_clipped_and_those_without_area_left_out(tmp_path: Path) -> None:
    boxes = [
        box(0, [-5, 25, 20, 20]), box(0, [1, 2, 0, 4], 3), box(0, [50, 2, 5, 5], 3), box(0, [1, 2, 3, -4]),
        box(0, [0, 0, 40.05, 30], 90), box(9, [1, 2, 3, 4]), box(0, [5, 5, 1, 1], 3, segmentation=[[1, 2]], area=1),
    ]  # fmt: skip
    path = write(tmp_path / "list.json", [image(0)], boxes)
    pictures(tmp_path, 0)
    with Conversion(path, tmp_path / "o.h5", **quick()) as conversion:
        texts = [note.text for note in conversion.plan().notes()]
        conversion.run()
    assert "'area', 'id', 'segmentation'" in texts[0]
    # Left out: three boxes without area and one of no image. Clipped: one box; 0.05 pixels do not count.
    assert [text.partition(" ")[0] for text in texts[1:4]] == ["3", "1", "1"]
    sample = h5pack.H5Dataset(tmp_path / "o.h5", fields=["boxes", "box_labels"])[0]
    assert sample.boxes.tolist() == [[0, 25, 15, 30], [0, 0, 40, 30], [5, 5, 6, 6]]
    assert sample.box_labels.tolist() == [1, 2, 0]


@pytest.mark.parametrize(("iscrowd", "crowd"), [("0", 0), ("1", 1), (False, 0), (True, 1), (None, 0), (1.0, 1)])
def test_iscrowd_may_be_written_in_several_ways(tmp_path: Path, iscrowd: Any, crowd: int) -> None:
    path = write(tmp_path / "list.json", [image(0)], [box(0, [1, 2, 3, 4], "7", iscrowd=iscrowd)])
    pictures(tmp_path, 0)
    assert rows_of(open_source(path, SourceOptions()).fields["crowd"])[1] == [[crowd]]


def test_the_first_image_may_be_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "annotations" / "instances_train2017.json", [image(0), image(1)], [])
    pictures(tmp_path / "train2017", 1)
    report = h5pack.convert(path, tmp_path / "o.h5", **quick())
    assert (report.images, report.rejects) == (1, 1)


def test_missing_images_and_images_of_another_size_are_rejected(tmp_path: Path) -> None:
    pictures(tmp_path, 0, 2)
    pictures(tmp_path, 1, size=(31, 40))
    unsized = {"id": 104, "file_name": "000004.png"}
    pictures(tmp_path, 4, size=(20, 20))
    path = write(tmp_path / "a.json", [image(number) for number in range(4)] + [unsized], [box(4, [15, 15, 10, 10])])
    with Conversion(path, tmp_path / "o.h5", **quick(size=(15, 20), order="sorted")) as conversion:
        plan = conversion.plan()
        assert [(reject.name, reject.reason.partition(",")[0]) for reject in plan.rejects] == [
            ("000001.png", "it is 31x40"), ("000003.png", "file not found")
        ]  # fmt: skip
        conversion.run()
    sample = h5pack.H5Dataset(tmp_path / "o.h5", fields=["boxes"])[2]
    # The crop of a square to 15x20 cuts 2.5 pixels from the top and the bottom.
    assert sample.boxes.tolist() == [[15, 12.5, 20, 15]]


def test_notes_do_not_count_images_of_another_size_than_annotated(tmp_path: Path) -> None:
    pictures(tmp_path, 0)
    pictures(tmp_path, 1, size=(8, 9))
    path = write(tmp_path / "a.json", [image(0), image(1)], [box(number, [1, 2, 30, 20]) for number in (0, 1)])
    with Conversion(path, tmp_path / "o.h5", **quick(size=(15, 20))) as conversion:
        (note,) = conversion.plan().notes()
    assert "'id'" in note.text


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_boxes_of_a_file_that_exif_turns_are_turned(tmp_path: Path, orientation: int) -> None:
    pixels = np.zeros((30, 40, 3), np.uint8)
    pixels[4:10, 5:20] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    for number in (0, 1):
        Image.fromarray(pixels).save(tmp_path / f"{number:06d}.png", exif=exif)
    upright = image(1, height=40, width=30)
    boxes = [box(0, [5, 4, 15, 6]), box(1, [1, 2, 3, 4])]
    path = write(tmp_path / "a.json", [image(0), upright], boxes)
    h5pack.convert(path, tmp_path / "o.h5", **quick(order="sorted"))
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", fields=["boxes"])
    found, boxes_of = dataset[0].image.numpy()[:, :, 0], dataset[0].boxes.tolist()
    assert found.shape == (40, 30)
    down, across = np.nonzero(found)
    assert boxes_of == [[across.min(), down.min(), across.max() + 1, down.max() + 1]]
    assert dataset[1].boxes.tolist() == [[1, 2, 4, 6]]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[1]", b"3", b"null", b"\xff", b"[" * 100_000, b'{"images": []}',
        b'{"images": {}, "annotations": []}',
        b'{"images": [{"id": 1}], "annotations": []}', b'{"images": [3], "annotations": []}',
        b'{"images": [{"id": 1, "file_name": ""}], "annotations": []}',
        b'{"images": [{"id": 1.9, "file_name": "a"}], "annotations": []}',
        b'{"images": [{"id": true, "file_name": "a"}], "annotations": []}',
        b'{"images": [{"id": 1, "file_name": "a", "height": 20.5, "width": 20}], "annotations": []}',
        b'{"images": [{"id": 1, "file_name": "a"}, {"id": 2, "file_name": "\\ud83d"}], "annotations": []}',
        b'{"images": [{"id": 1, "file_name": "a"}, {"id": 1, "file_name": "b"}], "annotations": []}',
        b'{"images": [{"id": 9223372036854775808, "file_name": "a"}], "annotations": []}',
        b'{"images": [{"id": 1, "file_name": "a", "height": 2147483648, "width": 1}], "annotations": []}',
        b'{"images": [{"id": Infinity, "file_name": "a"}], "annotations": []}',
        b'{"images": [{"id": 1, "file_name": "a", "height": 8, "width": -1}], "annotations": []}',
        b'{"images": [], "annotations": []}', b'{"images": [], "annotations": [3]}',
        b'{"images": [], "annotations": [], "categories": [3]}',
    ],
)  # fmt: skip
def test_files_that_are_not_coco_are_errors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    (tmp_path / "a").touch()
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path / "a.json", SourceOptions())
    assert caught.value.path == str(tmp_path / "a.json")


@pytest.mark.parametrize(
    "wrong",
    [
        {"bbox": [1, 2, 3]}, {"bbox": "x"}, {"bbox": None}, {"bbox": [1, 2, float("nan"), 4]}, {"category_id": 5},
        {"category_id": None}, {"category_id": 1.5}, {"category_id": True},
        {"image_id": None}, {"image_id": 100.9}, {"image_id": True}, {"image_id": float("inf")},
        {"caption": 3}, {"caption": "\0"}, {"caption": "\ud800"},
        {"bbox": [1, 2, 3, 10**400]}, {"iscrowd": float("inf")}, {"iscrowd": "no"},
    ],
)  # fmt: skip
def test_malformed_annotations_are_errors_that_name_them(tmp_path: Path, wrong: dict[str, Any]) -> None:
    pictures(tmp_path, 0)
    path = write(tmp_path / "a.json", [image(0)], [box(0, [1, 2, 3, 4]), box(0, [1, 2, 3, 4]) | wrong])
    with pytest.raises(SourceError, match="annotation 1 "):
        coco(path, NameFilter())


def test_a_folder_without_annotations_is_no_coco(tmp_path: Path) -> None:
    pictures(tmp_path / "x", 0)
    assert open_source(tmp_path, SourceOptions()).kind == "classes"
    with pytest.raises(SourceError):
        open_source(tmp_path, SourceOptions(kind="coco"))
    laid_out(tmp_path)
    assert open_source(tmp_path, SourceOptions()).kind == "coco"
    with pytest.raises(OptionsError) as caught:
        open_source(tmp_path, SourceOptions(columns=ManifestColumns(root=str(tmp_path), boxes=("a",))))
    # COCO uses root, so it is not to be left out.
    assert caught.value.parameters == ("box_columns",)
