"""Masks, boxes and keypoints move with the crops that are decoded, in every loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate

import h5pack
from h5pack.data.draws import BatchKey, crop_windows
from h5pack.errors import OptionsError, PackFormatError
from tests.makers import pixels, quick, write_lines

SIZES = [(60, 81), (97, 40), (33, 33), (128, 70), (50, 90), (75, 100), (40, 41)]
CROPS = [
    h5pack.RandomResizedCrop((24, 30)),
    h5pack.CenterCrop(20, resize=28),
    h5pack.CenterCrop(48),
    h5pack.Resize((16, 25)),
]
FIELDS = ["mask", "boxes", "points", "caption", "age"]


def square(number: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of what is painted into image `number`, its mask, and is a box."""
    height, width = SIZES[number]
    return width // 4 + number, height // 3, width // 4 + number + 14, height // 3 + 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of JPEGs of several sizes, each with a red square, whose place is in a mask, boxes and points, too."""
    folder = tmp_path_factory.mktemp("fields")
    lines = []
    for number, size in enumerate(SIZES):
        left, top, right, bottom = square(number)
        image, mask = pixels(number, size) // 4, np.zeros(size, np.uint8)
        image[top:bottom, left:right] = (255, 0, 0)
        mask[top:bottom, left:right] = 1 + number
        Image.fromarray(image).save(folder / f"{number}.jpg", quality=95, subsampling=0)
        Image.fromarray(mask).save(folder / f"{number}.png")
        boxes = [[left, top, right, bottom], [0, 0, size[1], size[0]]][: 1 + number % 2]
        middle = [(left + right) / 2, (top + bottom) / 2, 2]
        lines.append(
            {
                "path": f"{number}.jpg",
                "label": number,
                "mask": f"{number}.png",
                "boxes": boxes if number != 3 else [],
                "points": [middle],
                "caption": f"square {number}",
                "age": number / 2,
            }
        )
    write_lines(folder / "m.jsonl", lines)
    settings: dict[str, Any] = {"mask_columns": ["mask"], "box_columns": ["boxes"], "keypoint_columns": ["points"]}
    settings |= {"text_columns": ["caption"], "field_columns": ["age"], "order": "sorted", "keep": "jpeg"}
    h5pack.convert(folder / "m.jsonl", folder / "o.h5", **quick(**settings))
    return folder / "o.h5"


def expected(row: int, crop: Any, epoch: int) -> tuple[Any, Any, Any]:
    """Mask, boxes and points by a slow twin, pixel by pixel and point by point."""
    height, width = SIZES[row]
    top = left = first = other = 0
    extents = resized = (height, width)
    if isinstance(crop, h5pack.RandomResizedCrop):
        window = crop_windows(BatchKey(torch.tensor([row]), epoch), 3, crop, height, width)
        top, left, *extents_list = (int(part) for part in window)
        extents, resized = (extents_list[0], extents_list[1]), crop.output_size
    elif isinstance(crop, h5pack.CenterCrop):
        resized, (first, other) = crop.resized_size(height, width), crop.window(height, width)
    else:
        resized = crop.output_size
    begins, offsets = (top, left), (first, other)

    def move(value: float, axis: int) -> float:
        return (value - begins[axis]) * resized[axis] / extents[axis] - offsets[axis]

    x0, y0, x1, y1 = square(row)
    mask = np.full(crop.output_size, 255, np.uint8)
    for y, x in np.ndindex(*crop.output_size):
        place = [(y + offsets[0] + 0.5) / resized[0], (x + offsets[1] + 0.5) / resized[1]]
        if min(place) >= 0 and max(place) < 1:
            source = [int(begins[axis] + place[axis] * extents[axis] + 1e-9) for axis in range(2)]
            mask[y, x] = 1 + row if y0 <= source[0] < y1 and x0 <= source[1] < x1 else 0
    found = [[x0, y0, x1, y1], [0, 0, width, height]][: 1 + row % 2] if row != 3 else []
    limits = crop.output_size[::-1]
    boxes = [[min(max(move(v, 1 - n % 2), 0), limits[n % 2]) for n, v in enumerate(box)] for box in found]
    x, y = move((x0 + x1) / 2, 1), move((y0 + y1) / 2, 0)
    seen = 0 <= x <= limits[0] and 0 <= y <= limits[1]
    return mask, np.array(boxes, np.float32).reshape(-1, 4), np.array([[x, y, 2 * seen]], np.float32)


def require(batch: Any, crop: Any, epoch: int) -> list[int]:
    """Compare the fields of a batch with the slow twin; return its rows."""
    for number, row in enumerate(batch.rows.tolist()):
        mask, boxes, points = expected(row, crop, epoch)
        assert np.array_equal(batch.mask[number], mask), row
        np.testing.assert_allclose(batch.boxes[number], boxes, atol=1e-4)
        np.testing.assert_allclose(batch.points[number], points, atol=1e-4)
        assert (batch.caption[number], float(batch.age[number])) == (f"square {row}", row / 2)
    return list(batch.rows.tolist())


@pytest.mark.parametrize("crop", CROPS, ids=["random", "resized", "center", "resize"])
def test_fields_move_with_decoded_crops(path: Path, crop: Any) -> None:
    dataset = h5pack.H5Dataset(path, fields=FIELDS, with_rows=True)
    loader = h5pack.H5Loader(dataset, 3, decode=crop, seed=3, num_threads=2)
    for epoch in range(3 if crop is CROPS[0] else 1):
        assert sorted(row for batch in loader for row in require(batch, crop, epoch)) == list(range(len(SIZES)))
    cropped = h5pack.H5Dataset(path, fields=FIELDS, with_rows=True, decode=crop)
    for workers in (0, 1):
        sampler = h5pack.ChunkBatchSampler(cropped, 4, seed=3)
        batches = DataLoader(cropped, batch_sampler=sampler, num_workers=workers)
        assert sorted(row for batch in batches for row in require(batch, crop, 0)) == list(range(len(SIZES)))


def test_copies_of_a_row_have_fields_of_their_own_crops(path: Path) -> None:
    dataset = h5pack.H5Dataset(path, fields=FIELDS, decode=CROPS[0])
    order: dict[str, Any] = {"weights": [1, 2, 3, 1, 1, 2, 4], "seed": 3}
    sampler = h5pack.ChunkBatchSampler(dataset, 5, **order)
    loaded = list(h5pack.H5Loader(dataset, 5, **order))
    assert sum(len(batch.images) for batch in loaded) == len(SIZES)
    for collate in (None, dataset.collate, lambda batch: default_collate(list(batch))):
        sampler.set_epoch(0)
        for one, other in zip(DataLoader(dataset, batch_sampler=sampler, collate_fn=collate), loaded, strict=True):
            for name in ("images", "mask", "boxes", "points"):
                assert all(map(torch.equal, getattr(one, name), getattr(other, name))), name


def test_single_samples_and_fields_without_places(path: Path) -> None:
    dataset = h5pack.H5Dataset(path, fields=FIELDS, with_rows=True, decode=CROPS[1])
    mask, boxes, points = expected(2, CROPS[1], 0)
    sample = dataset[2]
    assert np.array_equal(sample.mask, mask)
    np.testing.assert_allclose(sample.boxes, boxes, atol=1e-4)
    np.testing.assert_allclose(sample.points, points, atol=1e-4)
    samples = dataset[:3]
    assert np.array_equal(samples[2].mask, mask)
    assert [sample.caption for sample in samples] == [f"square {row}" for row in range(3)]


def test_masks_that_cannot_move_are_refused(path: Path, tmp_path: Path) -> None:
    import h5py

    with h5py.File(path) as source, h5py.File(tmp_path / "o.h5", "w") as file:
        for name in source:
            source.copy(name, file)
        for name, value in source.attrs.items():
            file.attrs[name] = value
        del file["fields/mask"]
        masks = file.create_dataset("fields/mask", data=np.zeros((len(SIZES), 8, 8), np.uint8))
        masks.attrs["kind"] = np.bytes_(b"mask")
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", fields=["mask"])
    with pytest.raises(OptionsError) as caught:
        h5pack.H5Loader(dataset, 2, decode=CROPS[0])
    assert caught.value.parameters == ("decode", "fields")


@pytest.mark.parametrize("parameter", ["images", "labels"])
def test_masks_are_neither_images_nor_labels(path: Path, parameter: str) -> None:
    with pytest.raises(PackFormatError) as caught:
        h5pack.H5Dataset(path, **{parameter: "fields/mask"})
    assert caught.value.dataset == "fields/mask"
