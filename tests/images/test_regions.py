"""Windows of JPEGs that are decoded with less work have the pixels of Pillow's whole image."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
import pytest
from PIL import Image

from h5pack.images import regions
from h5pack.images.headers import DecodePath, parse_jpeg, with_height
from tests.makers import pixels
from tests.read.encoded_files import encode

SIZES = [(41, 35), (48, 64), (17, 90), (65, 16)]
KINDS: dict[str, dict[str, Any]] = {
    "gray": {},
    "444": {"subsampling": 0},
    "422": {"subsampling": 1},
    "420": {"subsampling": 2},
    "progressive": {"subsampling": 2, "progressive": True},
    "restarts": {"subsampling": 2, "restart_marker_blocks": 3},
    "comment": {"subsampling": 2, "comment": b"\xff\xc0\xff\xd9", "optimize": True},
    "fill bytes": {"subsampling": 2},
}


def jpeg(kind: str, size: tuple[int, int]) -> bytes:
    data = encode(pixels(3, size, 1 if kind == "gray" else 3), quality=88, **KINDS[kind])
    return data.replace(b"\xff\xc0", b"\xff\xff\xff\xc0", 1) if kind == "fill bytes" else data


@pytest.mark.parametrize("kind", KINDS)
def test_upper_rows_have_the_pixels_of_the_whole_image(kind: str) -> None:
    pytest.importorskip("simplejpeg")
    compared = 0
    for size in SIZES:
        data = jpeg(kind, size)
        header = parse_jpeg(data)
        expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        for bottom in range(1, size[0] + 1):
            found = regions.decode_top(data, header, (bottom // 2, 3, bottom - bottom // 2, 9))
            assert (found is None) == (bottom + 2 >= size[0])
            if found is not None:
                assert np.array_equal(found, expected[bottom // 2 : bottom, 3:12]), (size, bottom)
                compared += 1
    assert compared == sum(height - 2 - 1 for height, _ in SIZES)


def test_a_height_is_replaced_and_nothing_else() -> None:
    for kind in KINDS:
        data = jpeg(kind, (41, 35))
        changed = with_height(data, 300)
        header = parse_jpeg(changed)
        assert (header.height, header.width) == (300, 35)
        assert with_height(changed, 41) == data
        assert sum(one != other for one, other in zip(data, changed, strict=True)) == 2


def test_images_without_an_end_and_damaged_ones_are_left_to_whole_decoding() -> None:
    data = jpeg("420", (48, 64))
    header = parse_jpeg(data)
    window = (0, 0, 16, 16)
    for lacking in (data[:-2], data[: len(data) // 2], data + b"\0"):
        assert regions.decode_top(lacking, header, window) is None
    tables = data.index(b"\xff\xc4")
    damaged = data[: tables + 5] + b"\xff" * 16 + data[tables + 21 :]
    assert regions.decode_top(damaged, header, window) is None
    assert regions.decode_top(data, regions.ImageHeader(48, 64, DecodePath.PILLOW), window) is None


def test_what_other_threads_write_to_standard_error_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    def decode(*args: Any) -> None:
        os.write(2, b"a line of another thread\n")

    assert regions._exact_paths(decode) == frozenset()
    assert capfd.readouterr().err


@pytest.mark.parametrize("kind", ["444", "422", "420", "gray"])
def test_single_columns_and_rows_have_the_pixels_of_the_whole_image(kind: str) -> None:
    pytest.importorskip("nvidia.nvimgcodec", reason="pip install nvidia-nvimgcodec-cu12")
    data = jpeg(kind, (35, 50))
    header = parse_jpeg(data)
    decoder = regions.region_decoder(header.decode_path)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    columns = [(0, left, 35, width) for width in (1, 2) for left in range(50 - width + 1)]
    for top, left, height, width in [*columns, *((top, 0, 1, 50) for top in range(35))]:
        found = decoder.decode(data, (top, left, height, width))
        if found is not None:
            assert np.array_equal(found, expected[top : top + height, left : left + width]), (top, left)
        assert (found is None) == (width == 1)
