"""PNGs hold the exact pixels for every decoder; JPEGs are Pillow's."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from h5pack.exporter.image_files import encode_jpeg, encode_png

RANDOM = np.random.default_rng(0).integers(0, 256, (131, 257, 4), np.uint8)


@pytest.mark.parametrize(
    ("values", "mode"),
    [
        *((RANDOM[:1, :9, :channels], mode) for channels, mode in enumerate(("L", "LA", "RGB", "RGBA"), 1)),
        *((RANDOM[:, :, :channels].copy(), mode) for channels, mode in enumerate(("L", "LA", "RGB", "RGBA"), 1)),
        (RANDOM.transpose(1, 0, 2)[:, :, :3], "RGB"),
        (RANDOM[:, :, :1].astype(np.uint16) * 257 + 3, "I;16"),
    ],
)
def test_a_png_holds_the_pixels(values: np.ndarray[Any, Any], mode: str) -> None:
    with Image.open(io.BytesIO(encode_png(values))) as image:
        assert (image.format, image.size) == ("PNG", values.shape[1::-1])
        # Older versions of Pillow open 16 bits as I.
        assert image.mode in (mode, mode.removesuffix(";16"))
        assert np.array_equal(np.asarray(image).reshape(values.shape), values)


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
