"""Image headers: an image's size and how it may be decoded.

Plain JPEG and PNG files are parsed here, in a tenth of the time that Pillow needs to open such a file. All other files
(with orientation tags, unusual color spaces, or other formats) are left to Pillow. The tests require that this module
and Pillow give the same results. "Upright" means that the Exif orientation has been applied, or that there is none to
apply.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import BinaryIO

from PIL import Image

from h5pack.errors import RejectedImageError
from h5pack.system.machine import optional_module

_SOF = (0xC0, 0xC1, 0xC2)
_PROGRESSIVE, _ALL_COEFFICIENTS = 0xC2, (1 << 64) - 1
_APP0, _APP1, _APP14, _SOS = 0xE0, 0xE1, 0xEE, 0xDA
# Accepted segments: tables, restart intervals, comments, and APPn except APP1, which may contain an orientation.
_ACCEPTED = frozenset({0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)} - {_APP1})
# Leave images with these APPn segments to Pillow, which parses the segments and rejects malformed ones.
_PILLOW_SEGMENTS = (b"MPF\0", b"Photoshop 3.0\0")
_JFIF_BYTES, _ICC_BYTES, _ADOBE_BYTES = 14, 14, 12
ORIENTATION_TAG = 0x0112

SIDEWAYS = (5, 6, 7, 8)
"""The Exif orientations that exchange height and width."""

TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The operation that turns an image upright, by Exif orientation."""

_FORMATS = frozenset({
    "AVIF", "BMP", "DDS", "DIB", "GIF", "HEIF", "ICNS", "ICO", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "PSD", "QOI",
    "SGI", "TGA", "TIFF", "WEBP",
})  # fmt: skip
"""Pillow's names for the formats of `IMAGE_SUFFIXES`.

Pillow supports further formats, which must not be opened: it decodes EPS files by running Ghostscript, and an IPTC file
may contain EPS.
"""
_HEIF_BRANDS = (b"ftyphe", b"ftypmif1", b"ftypmsf1")
_ICONS = (b"\0\0\1\0", b"icns")
# Finds the images in an icon: PNG images, JPEG 2000 images and JPEG 2000 codestreams. Two
# groups of each match are the sides of the image.
_PARTS_OF_ICONS = re.compile(
    rb"\x89PNG\r\n\x1a\n.{4}IHDR(.{4})(.{4})|\0\0\0\x16ihdr(.{4})(.{4})|\xff\x4f\xff\x51.{4}(.{4})(.{4})", re.DOTALL
)


class DecodePath(IntEnum):
    """The way in which an image can be decoded.

    PILLOW means ``Image.open``, which decodes all images. The others are kinds of upright 8-bit JPEGs, gray or YCbCr
    with the named chroma subsampling, which faster decoders can decode, too.
    """

    PILLOW = 0
    JPEG_GRAY = 1
    JPEG_444 = 2
    JPEG_422 = 3
    JPEG_420 = 4


_JPEG_PATHS = {
    (0x11,): DecodePath.JPEG_GRAY,
    (0x11, 0x11, 0x11): DecodePath.JPEG_444,
    (0x21, 0x11, 0x11): DecodePath.JPEG_422,
    (0x22, 0x11, 0x11): DecodePath.JPEG_420,
}


@dataclass(frozen=True)
class ImageHeader:
    """The size of an image in pixels after applying its Exif orientation, and how to decode it."""

    height: int
    width: int
    decode_path: DecodePath
    orientation: int = 1  # the Exif orientation, 1 to 8


def file_format(head: bytes) -> str | None:
    """Return "jpeg" or "png" if the first bytes of an image file are those of this format; else None."""
    if head.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    return "png" if head.startswith(b"\x89PNG\r\n\x1a\n") else None


def orientation_of(image: Image.Image) -> int:
    """Return the orientation of an image from its Exif data, or else its XMP data: 1 to 8, and 1 if none is valid."""
    try:
        value = image.getexif().get(ORIENTATION_TAG, 1)
    except (SyntaxError, ValueError, struct.error):  # Pillow raises these for damaged Exif data.
        return 1
    return value if isinstance(value, int) and value in TURNS else 1


def open_image(file: BinaryIO, max_pixels: int) -> Image.Image:
    """Return ``Image.open(file)`` for the formats of `IMAGE_SUFFIXES`; raise UnidentifiedImageError for others.

    Raise RejectedImageError for PostScript, and for HEIF files whose brand only pillow-heif can open if it is not
    installed. Also raise it if an icon has an image of more than `max_pixels` pixels, because Pillow decodes the images
    in an icon before their size is known.
    """
    head = file.read(12)
    _prepare_format(head)
    Image.init()
    formats = [name for name in Image.ID if name in _FORMATS]  # in Pillow's order: some formats have no signature
    if head.startswith(_ICONS):
        for found in _PARTS_OF_ICONS.finditer(head + file.read()):
            first, second = (int.from_bytes(side, "big") for side in found.groups() if side is not None)
            if first * second > max_pixels:
                raise RejectedImageError(f"decompression bomb: {first}x{second} is more than {max_pixels} pixels")
    file.seek(0)
    return Image.open(file, formats=formats)


def _prepare_format(head: bytes) -> None:
    """Register pillow-heif with Pillow if `head` is the start of a HEIF file.

    Raise RejectedImageError if pillow-heif is needed but not installed, or if the file is PostScript.
    """
    if head.startswith((b"%!PS", b"\xc5\xd0\xd3\xc6")):
        raise RejectedImageError("PostScript cannot be decoded without running a program; convert it to PNG")
    if not head[4:].startswith(_HEIF_BRANDS) or "HEIF" in Image.OPEN:
        return
    heif = optional_module("pillow_heif")
    if heif is not None:
        heif.register_heif_opener()
    elif head[4:].startswith(_HEIF_BRANDS[0]):  # Files of the other brands may be AVIF files, which Pillow can open.
        raise RejectedImageError("HEIF needs the package pillow-heif; install it and convert again")


_last_prefix: tuple[bytes, ImageHeader] | None = None


def parse_jpeg(head: bytes) -> ImageHeader | None:
    """Parse the header of a plain JPEG from the first bytes of the file.

    Return None if Pillow must parse the file, because one of the following holds:

    - The file has another format, or is malformed.
    - The file has an Exif, XMP, MPF or Photoshop segment, which may contain an orientation.
    - The color space or the chroma subsampling is unusual, or a channel has 12 bits.
    - The coding is lossless or arithmetic.
    - `head` ends before the first scan. One of these segments may then follow after `head`.
    """
    global _last_prefix
    # Images of the same size from the same encoder often start with identical bytes up to the first scan, and no later
    # byte affects the result.
    last = _last_prefix
    if last is not None and head.startswith(last[0]):
        return last[1]
    if file_format(head) != "jpeg":
        return None
    # usual_color: whether a JFIF or Adobe segment declares that three components are YCbCr.
    position, usual_color, frame = 2, False, b""
    while position + 4 <= len(head):
        if head[position] != 0xFF:
            return None
        marker = head[position + 1]
        if marker == 0xFF:
            position += 1
            continue
        length = (head[position + 2] << 8) + head[position + 3]
        end = position + 2 + length
        if length < 2 or end > len(head):
            return None
        body = head[position + 4 : end]
        if marker == _SOS:
            header = _frame(frame, usual_color)
            if header is not None:
                _last_prefix = head[:end], header
            return header
        if marker in _SOF:
            if frame:
                return None
            frame = body
        elif marker not in _ACCEPTED or body.startswith(_PILLOW_SEGMENTS):
            return None
        elif marker == _APP0 and body[:4] == b"JFIF":
            if len(body) < _JFIF_BYTES or body[4]:
                return None
            usual_color = True
        elif marker == _APP14 and body[:5] == b"Adobe":
            if len(body) < _ADOBE_BYTES or body[11] != 1:
                return None
            usual_color = True
        elif body.startswith(b"ICC_PROFILE\0") and len(body) < _ICC_BYTES:
            return None
        position = end
    return None


def with_height(data: bytes, height: int) -> bytes:
    """Return a JPEG with another height in its header, so that decoders stop after that many rows.

    `data` must be a JPEG for which `parse_jpeg` returns a header.
    """
    position = _frame_position(data)
    return b"".join((data[: position + 5], height.to_bytes(2, "big"), data[position + 7 :]))


def is_incomplete(data: bytes) -> bool:
    """Return whether a JPEG is progressive and lacks the scans of some coefficients, or of some bits of coefficients.

    Decoders estimate what is missing from the surrounding blocks. So the pixels in a window depend on pixels outside of
    the window. `data` must be a JPEG for which `parse_jpeg` returns a header.
    """
    position = _frame_position(data)
    if data[position + 1] != _PROGRESSIVE:
        return False
    components = data[position + 10 : position + 10 + 3 * data[position + 9] : 3]
    known = dict.fromkeys(components, 0)  # bit k is set if one of the scans has the lowest bit of coefficient k
    # In compressed data, 0xFF is followed by 0 or a restart marker, so the marker of a scan cannot occur in it.
    while (position := data.find(b"\xff\xda", position + 2)) >= 0:
        body = data[position + 4 : position + 14]
        end = 1 + 2 * body[0] if body else 0
        if len(body) >= end + 3 and not body[end + 2] & 15:
            for component in body[1:end:2]:
                known[component] = known.get(component, 0) | (2 << body[end + 1]) - (1 << body[end])
    return any(known[component] != _ALL_COEFFICIENTS for component in components)


def _frame_position(data: bytes) -> int:
    position = 2
    while data[position + 1] not in _SOF:
        fill = data[position + 1] == 0xFF
        position += 1 if fill else 2 + (data[position + 2] << 8) + data[position + 3]
    return position


def _frame(body: bytes, usual_color: bool) -> ImageHeader | None:
    if len(body) < 6 or body[0] != 8:
        return None
    height, width, components = (body[1] << 8) + body[2], (body[3] << 8) + body[4], body[5]
    if not height or not width or len(body) != 6 + 3 * components:
        return None
    factors = tuple(body[7 + 3 * index] for index in range(components))
    # The sampling factors of a single component have no effect, so any are accepted.
    decode_path = DecodePath.JPEG_GRAY if components == 1 else _JPEG_PATHS.get(factors)
    identifiers = tuple(body[6 + 3 * index] for index in range(components))
    if decode_path is None or not (usual_color or identifiers in ((1,), (1, 2, 3))):
        return None
    return ImageHeader(height, width, decode_path)


_TURNING_CHUNKS = (b"eXIf", b"iTXt")
_TURNING_KEYWORDS = (b"Raw profile type", b"XML:com.adobe.xmp", b"exif", b"xmp")


def parse_png(stream: BinaryIO) -> ImageHeader | None:
    """Parse the header of a PNG, and search its chunks for one that could contain an orientation.

    Return None if there is such a chunk, and for other formats, truncated files and invalid headers.
    `stream` must be positioned at its start.
    """
    start = stream.read(33)
    if file_format(start) != "png" or start[12:16] != b"IHDR" or len(start) < 33:
        return None
    if zlib.crc32(start[12:29]) != int.from_bytes(start[29:], "big"):
        return None
    width, height = int.from_bytes(start[16:20], "big"), int.from_bytes(start[20:24], "big")
    while True:
        chunk = stream.read(8)
        if len(chunk) < 8:
            return None
        length, name = int.from_bytes(chunk[:4], "big"), chunk[4:]
        if name == b"IEND":
            return ImageHeader(height, width, DecodePath.PILLOW) if width and height else None
        if name in _TURNING_CHUNKS:
            return None
        skipped = 0
        if name in (b"tEXt", b"zTXt"):
            keyword = stream.read(min(length, 80))
            if keyword.startswith(_TURNING_KEYWORDS):
                return None
            skipped = len(keyword)
        stream.seek(length + 4 - skipped, 1)
