"""One image file's bytes, from pixels."""

from __future__ import annotations

import functools
import importlib
import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from h5pack.checksum import crc32

SUFFIXES = {"png": (".png",), "jpeg": (".jpg", ".jpeg", ".jpe", ".jfif")}
"""The endings of each format's names; the first is the one that is given."""
SIGNATURES = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}
"""How each format's files begin."""

# The colour type of PNG's header, by the number of channels (PNG specification, section 11.2.1).
_COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
_FILTER_UP = 2
_PLAIN_CHROMA_QUALITY = 90


def encode_png(pixels: npt.NDArray[Any]) -> bytes:
    """A PNG file of these very pixels.

    Each line is stored as its difference to the one above (PNG's filter "up"), compressed at level 1, by isal where
    that is installed. Measured on 218x178 photographs, one thread: 2,400 images/s with isal and 540 with zlib, where
    Pillow makes 280 at level 1 and 105 at its default, level 6; the files are 4 % and 10 % larger than Pillow's.

    Parameters
    ----------
    pixels : ndarray
        uint8 or uint16, (h, w, c): gray, gray and alpha, RGB or RGBA.
    """
    height, width, channels = pixels.shape
    depth = 8 * pixels.dtype.itemsize
    # PNG stores the high byte first.
    lines = np.ascontiguousarray(pixels, pixels.dtype.newbyteorder(">")).reshape(height, -1).view(np.uint8)
    filtered = np.empty((height, 1 + lines.shape[1]), np.uint8)
    filtered[:, 0] = _FILTER_UP
    # The line above the first is zero.
    filtered[0, 1:] = lines[0]
    np.subtract(lines[1:], lines[:-1], out=filtered[1:, 1:])
    header = struct.pack(">IIBBBBB", width, height, depth, _COLOUR_TYPES[channels], 0, 0, 0)
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", _deflate()(filtered, 1)), _chunk(b"IEND", b""))
    return SIGNATURES["png"] + b"".join(parts)


def encode_jpeg(pixels: npt.NDArray[np.uint8], quality: int) -> bytes:
    """A JPEG file of pixels, by Pillow. From quality 90 on, colour is stored at full resolution.

    Parameters
    ----------
    pixels : ndarray
        uint8, (h, w, 1 or 3).
    quality : int
        1 to 100.
    """
    stream = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))
    # 0 is 4:4:4, 2 is 4:2:0.
    image.save(stream, "JPEG", quality=quality, subsampling=0 if quality >= _PLAIN_CHROMA_QUALITY else 2)
    return stream.getvalue()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return b"".join((struct.pack(">I", len(data)), kind, data, struct.pack(">I", crc32(data, crc32(kind)))))


@functools.cache
def _deflate() -> Callable[[Any, int], bytes]:
    """Zlib's compressor of bytes at a level, or isal's, whose output any inflater reads."""
    try:
        found: Callable[[Any, int], bytes] = importlib.import_module("isal.isal_zlib").compress
    except ImportError:
        return zlib.compress
    return found
