"""Boxes and points follow the pixels of an image that is resized."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from h5pack.format.fields import RaggedRows
from h5pack.images.decode import Decoder, PixelOptions
from h5pack.images.encode import JpegEncoder
from h5pack.images.geometry import Placement
from h5pack.images.headers import DecodePath

SIZES = [(60, 60), (61, 90), (97, 50), (40, 120), (150, 33)]


def painted(size: tuple[int, int], box: tuple[int, int, int, int]) -> np.ndarray:
    """A black image with a white box."""
    pixels = np.zeros((*size, 3), np.uint8)
    left, top, right, bottom = box
    pixels[top:bottom, left:right] = 255
    return pixels


def measured(pixels: np.ndarray) -> np.ndarray:
    """The box of the pixels that are half white or more, to a fraction of a pixel."""
    gray = pixels[:, :, 0] / 255
    edges = []
    for profile in (gray.max(axis=0), gray.max(axis=1)):
        first, last = np.flatnonzero(profile > 0.05)[[0, -1]]
        edges += [first + 1 - profile[first], last + profile[last]]
    return np.array([edges[0], edges[2], edges[1], edges[3]])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
@pytest.mark.parametrize("target", [(30, 30), (80, 40), (24, 61)])
def test_a_painted_box_stays_under_its_box(size: tuple[int, int], fit: str, target: tuple[int, int]) -> None:
    middle = size[1] // 2, size[0] // 2
    box = (middle[0] - 12, middle[1] - 9, middle[0] + 10, middle[1] + 14)
    out = np.empty((*target, 3), np.uint8)
    decoder = Decoder(PixelOptions(*target, resize=True, fit=fit, resample="bilinear"))
    decoder.decode(painted(size, box), DecodePath.PILLOW, out)
    heights, widths = (np.array([side], np.int32) for side in size)
    placement = Placement.of(heights, widths, *target, fit)
    moved = placement.boxes(np.array([box], np.float64))[0]
    assert np.abs(measured(out) - moved).max() < 1
    point = placement.points(np.array([[*middle, 1.0]]))[0]
    assert out[int(point[1]), int(point[0]), 0] > 200
    assert point[2] == 1


@pytest.mark.parametrize("size", SIZES)
def test_a_painted_box_stays_under_its_box_in_a_jpeg(size: tuple[int, int]) -> None:
    box = (4, 6, 30, 28)
    data, height, width = JpegEncoder(50, 95, 10**6).encode(painted(size, box), DecodePath.PILLOW)
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    assert pixels.shape == (height, width, 3)
    heights, widths = (np.array([side], np.int32) for side in size)
    moved = Placement.shrunk(heights, widths, 50).boxes(np.array([box], np.float64))[0]
    assert np.abs(measured(np.where(pixels < 24, 0, pixels)) - moved).max() < 1


def test_boxes_are_clipped_and_points_are_not() -> None:
    # The left and the right quarter of the second image are cut off.
    placement = Placement.of(np.array([10, 10], np.int32), np.array([10, 20], np.int32), 10, 10, "crop")

    def moved(kind: str, entries: np.ndarray) -> list[list[float]]:
        return placement.moved(RaggedRows(kind, entries, np.array([0, 1, 3]))).data.tolist()

    boxes = np.array([[1, 2, 12, 8], [0, 0, 4, 10], [3, 1, 7, 9]], np.float64)
    assert moved("boxes", boxes) == [[1, 2, 10, 8], [0, 0, 0, 10], [0, 1, 2, 9]]
    points = np.array([[1, 2, 2], [4, 3, 2], [6, 3, 1]], np.float64)
    assert moved("keypoints", points) == [[1, 2, 2], [-1, 3, 0], [1, 3, 1]]
    assert moved("keypoints", points[:, :2]) == [[1, 2], [-1, 3], [1, 3]]
    # The first image keeps its size: points on its border are visible.
    points = np.array([[0, 0, 2], [10, 10, 2], [0.5, 9.5, 1], [10.5, 3, 2], [3, -0.5, 2]])
    found = placement.moved(RaggedRows("keypoints", points, np.array([0, 5, 5]))).data
    assert found.tolist() == [[0, 0, 2], [10, 10, 2], [0.5, 9.5, 1], [10.5, 3, 0], [3, -0.5, 0]]


@pytest.mark.parametrize("is_wide", [False, True])
def test_boxes_of_a_padded_line_are_on_the_line(is_wide: bool) -> None:
    """The line is thinner than one pixel when it is resized, but has one."""
    size = (2, 200) if is_wide else (200, 2)
    out = np.empty((10, 10, 3), np.uint8)
    decoder = Decoder(PixelOptions(10, 10, resize=True, fit="pad"))
    decoder.decode(np.full((*size, 3), 255, np.uint8), DecodePath.PILLOW, out)
    heights, widths = (np.array([side], np.int32) for side in size)
    (box,) = Placement.of(heights, widths, 10, 10, "pad").boxes(np.array([[0, 0, size[1], size[0]]], np.float64))
    left, top, right, bottom = box.astype(int).tolist()
    assert (right - left) * (bottom - top) == 10
    assert (out[top:bottom, left:right] == 255).all()
    assert int(out.sum()) == 10 * 3 * 255


def test_images_that_are_small_enough_do_not_move() -> None:
    heights, widths = np.array([30, 100], np.int32), np.array([40, 50], np.int32)
    for max_side in (None, 100):
        placement = Placement.shrunk(heights, widths, max_side)
        assert (placement.scale == 1).all()
    assert Placement.shrunk(heights, widths, 50).scale.tolist() == [[1, 1], [0.5, 0.5]]
