"""Map-style datasets: what samples may be, and why others are rejected."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from h5pack.errors import RejectedImageError
from h5pack.sources.map_style import MapStyleReader, map_style_catalog
from tests.makers import pixels

COLOUR = pixels(1)
GRAY = pixels(2, channels=1)


def sample(value: Any) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any] | None]:
    """What becomes of one sample of a dataset."""
    return MapStyleReader([value]).sample(0)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (COLOUR, COLOUR),
        (GRAY, GRAY[:, :, None]),
        (GRAY[:, :, None], GRAY[:, :, None]),
        (torch.from_numpy(COLOUR), COLOUR),
        (Image.fromarray(COLOUR), COLOUR),
        (Image.fromarray(GRAY), GRAY[:, :, None]),
        (Image.fromarray(COLOUR).convert("RGBA"), COLOUR),
        (Image.fromarray(GRAY > 99), np.repeat(255 * np.uint8(GRAY > 99)[:, :, None], 3, axis=2)),
        (COLOUR[::-1, ::2], COLOUR[::-1, ::2]),
    ],
)
def test_images_become_uint8_pixels_with_a_channel_axis(image: Any, expected: Any) -> None:
    for value in (image, (image, None), (image, 3), [image, 3], (image, 3, "more")):
        array, label = sample(value)
        assert array.dtype == np.uint8
        assert np.array_equal(array, expected)
        labelled = isinstance(value, (tuple, list)) and value[1] == 3
        assert (None if label is None else label.item()) == (3 if labelled else None)
    assert np.array_equal(MapStyleReader([(image, 3)]).read(0, "00000000"), expected)


class Failing:
    def __len__(self) -> int:
        return 1_234

    def __getitem__(self, index: int) -> Any:
        raise KeyError("lost")


def truncated() -> Image.Image:
    """A lazily opened image."""
    stream = io.BytesIO()
    Image.fromarray(pixels(1, (64, 64))).save(stream, "JPEG")
    return Image.open(io.BytesIO(stream.getvalue()[:-200]))


IMAGES: list[Any] = [
    *(COLOUR.astype(np.float32), COLOUR.astype(np.int64), GRAY > 99, None, {"image": COLOUR}, "x.jpg"),
    *(COLOUR.transpose(2, 0, 1), COLOUR[:, :, :2], COLOUR[None], COLOUR[:0], np.uint8(3), [[1, 2], [3]]),
    Image.fromarray(GRAY.astype(np.uint16) * 256),
    *(Image.fromarray(GRAY.astype(np.int32)), Image.fromarray(GRAY.astype(np.float32)), truncated()),
]
LABELS: list[Any] = [
    *("cat", 1.0, np.float32(2), [0, 256], [-1, 1], [], [[1, 2]], [0.5], 2**63, 2**70, {}, [[1], [1, 2]]),
]


@pytest.mark.parametrize(
    "dataset",
    [*([(image, 3)] for image in IMAGES), *([(COLOUR, label)] for label in LABELS), [()], [(COLOUR,)], Failing()],
)
def test_other_samples_are_rejected_with_a_reason(dataset: Any) -> None:
    with pytest.raises(RejectedImageError) as caught:
        MapStyleReader(dataset).sample(0)
    assert str(caught.value).startswith("the dataset")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("label", "dtype", "stored"),
    [
        *((-1, np.int64, -1), (True, np.int64, 1), (np.uint8(200), np.int64, 200), (torch.tensor(5), np.int64, 5)),
        *((2**63 - 1, np.int64, 2**63 - 1), ([0, 1, 255], np.uint8, [0, 1, 255]), (torch.tensor([7]), np.uint8, [7])),
        (np.array([True, False]), np.uint8, [1, 0]),
    ],
)
def test_labels_are_integers_or_rows_of_small_ones(label: Any, dtype: Any, stored: Any) -> None:
    np.testing.assert_array_equal(sample((COLOUR, label))[1], np.array(stored, dtype), strict=True)


def test_the_catalog_reads_no_sample() -> None:
    catalog = map_style_catalog(Failing())
    assert (catalog.kind, catalog.labels, catalog.split_names) == ("dataset", None, ("all",))
    assert list(catalog.names) == [f"{index:08d}" for index in range(1_234)]


def test_a_reader_can_be_sent_to_workers() -> None:
    reader = pickle.loads(pickle.dumps(MapStyleReader([(COLOUR, 1)])))
    assert np.array_equal(reader.read(0, "00000000"), COLOUR)
