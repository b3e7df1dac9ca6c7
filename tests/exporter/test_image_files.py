"""JPEGs are Pillow's. That PNGs hold the exact pixels, `test_exporter` shows."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from h5pack.exporter.image_files import encode_jpeg


def decoded(data: bytes) -> Any:
    with Image.open(io.BytesIO(data)) as image:
        return image.mode, np.asarray(image).astype(int)


def test_jpegs_near_the_pixels_with_color_at_full_resolution() -> None:
    # Red and green lines in turn, which half the resolution of color would mix.
    lines = np.zeros((16, 16, 3), np.uint8)
    lines[::2, :, 0] = lines[1::2, :, 1] = 200
    mode, fine = decoded(encode_jpeg(lines, 95))
    assert mode == "RGB"
    assert np.abs(fine - lines).mean() < 12
    assert np.abs(decoded(encode_jpeg(lines, 75))[1] - lines).mean() > 40
    mode, gray = decoded(encode_jpeg(lines[:, :, :1], 95))
    assert mode == "L"
    assert np.abs(gray - lines[:, :, 0]).mean() < 12
