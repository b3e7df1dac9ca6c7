"""PNGs hold the exact pixels for every decoder; JPEGs are Pillow's."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from h5pack.images.encode import encode_jpeg, encode_png


@pytest.mark.parametrize("size", [(1, 9), (131, 257)])
@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "LA"), (3, "RGB"), (4, "RGBA")])
def test_a_png_holds_the_pixels(channels: int, mode: str, size: tuple[int, int]) -> None:
    values = np.random.default_rng(channels).integers(0, 256, (*size, channels), np.uint8)
    with Image.open(io.BytesIO(encode_png(values))) as image:
        image.load()
        assert (image.format, image.mode, image.size) == ("PNG", mode, size[::-1])
        assert np.array_equal(np.asarray(image).reshape(values.shape), values)


def test_rows_of_other_strides() -> None:
    values = np.random.default_rng(0).integers(0, 256, (3, 20, 14), np.uint8).transpose(1, 2, 0)
    with Image.open(io.BytesIO(encode_png(values))) as image:
        assert np.array_equal(np.asarray(image), values)


def test_16_bits_of_gray() -> None:
    values = np.random.default_rng(0).integers(0, 65_536, (20, 14, 1), np.uint16)
    with Image.open(io.BytesIO(encode_png(values))) as image:
        assert image.mode in ("I;16", "I")
        assert np.array_equal(np.asarray(image), values[:, :, 0])


def decoded(data: bytes) -> Any:
    with Image.open(io.BytesIO(data)) as image:
        return image.mode, np.asarray(image).astype(int)


def test_jpegs_near_the_pixels_with_colour_at_full_resolution() -> None:
    # Red and green lines in turn, which half the resolution of colour would mix.
    lines = np.zeros((16, 16, 3), np.uint8)
    lines[::2, :, 0] = lines[1::2, :, 1] = 200
    mode, fine = decoded(encode_jpeg(lines, 95))
    assert mode == "RGB"
    assert np.abs(fine - lines).mean() < 12
    assert np.abs(decoded(encode_jpeg(lines, 75))[1] - lines).mean() > 40
    mode, gray = decoded(encode_jpeg(lines[:, :, :1], 95))
    assert mode == "L"
    assert np.abs(gray - lines[:, :, 0]).mean() < 12
