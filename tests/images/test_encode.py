"""Images encoded as JPEG: sizes, modes, and bytes that do not depend on the decoder that is installed."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from h5pack.errors import RejectedImageError
from h5pack.images import decode
from h5pack.images.encode import JpegEncoder, fitted_size
from h5pack.images.headers import parse_jpeg
from tests.makers import pixels
from tests.read.encoded_files import encode


@pytest.mark.parametrize(
    ("size", "max_side", "expected"),
    [
        ((30, 50), None, (30, 50)),
        ((30, 50), 50, (30, 50)),
        ((30, 50), 25, (15, 25)),
        ((50, 30), 7, (7, 4)),
        ((1, 900), 3, (1, 3)),
    ],
)
def test_the_longer_side_is_bounded(size: tuple[int, int], max_side: int | None, expected: tuple[int, int]) -> None:
    assert fitted_size(*size, max_side) == expected


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("max_side", [None, 20])
def test_files_do_not_depend_on_the_decoder(mode: str, max_side: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(Image.fromarray(pixels(1, (40, 30))).convert(mode), comment=b"by someone")
    header = parse_jpeg(data)
    found = {JpegEncoder(max_side, 80, 10**6).encode(data, path)[0] for path in (header.decode_path, 0)}
    monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
    found.add(JpegEncoder(max_side, 80, 10**6).encode(data, header.decode_path)[0])
    (encoded,) = found
    with Image.open(io.BytesIO(encoded)) as image:
        assert (image.mode, image.size) == (mode, (30, 40) if max_side is None else (15, 20))
        assert "comment" not in image.info


def test_what_jpeg_cannot_hold_is_rejected() -> None:
    with pytest.raises(RejectedImageError):
        JpegEncoder(None, 80, 10**6).encode(np.zeros((1, 70_000, 3), np.uint8), 0)
    with pytest.raises(RejectedImageError):
        JpegEncoder(None, 80, 10**6).encode(b"no image", 0)


def test_no_working_directory_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(Image.fromarray(pixels(1)), "PNG")
    expected = JpegEncoder(None, 80, 10**6).encode(data, 0)
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    assert JpegEncoder(None, 80, 10**6).encode(data, 0) == expected
