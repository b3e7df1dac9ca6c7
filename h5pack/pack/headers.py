"""What an image's first bytes tell: size, and how it may be decoded.

Plain JPEG and PNG files are parsed here, in a tenth of the time that Pillow needs to open one; whatever is not plain
(orientation tags, unusual colour, other formats) is left to Pillow, and the tests hold both to the same answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import BinaryIO

_SOF = (0xC0, 0xC1, 0xC2)
_STANDALONE = (0x01, *range(0xD0, 0xD8))
_APP1, _APP14, _SOS, _EOI = 0xE1, 0xEE, 0xDA, 0xD9


class Kind(IntEnum):
    """How an image may be decoded; all but PILLOW are upright 8-bit JPEGs with the usual colour."""

    PILLOW = 0
    JPEG_GRAY = 1
    JPEG_444 = 2
    JPEG_422 = 3
    JPEG_420 = 4


_KINDS = {
    (0x11,): Kind.JPEG_GRAY,
    (0x11, 0x11, 0x11): Kind.JPEG_444,
    (0x21, 0x11, 0x11): Kind.JPEG_422,
    (0x22, 0x11, 0x11): Kind.JPEG_420,
}


@dataclass(frozen=True)
class Header:
    """Size of an image as it is shown (upright), and how to decode it.

    Attributes
    ----------
    height, width : int
        Pixels.
    kind : Kind
    """

    height: int
    width: int
    kind: Kind


def parse_jpeg(head: bytes) -> Header | None:
    """Read the frame header of a plain JPEG.

    Parameters
    ----------
    head : bytes
        The first bytes of the file.

    Returns
    -------
    Header or None
        None where Pillow must look: no JPEG, an Exif or XMP segment (which may hold an orientation), CMYK, 12 bits,
        lossless or arithmetic coding, or a frame header beyond `head`.
    """
    if head[:3] != b"\xff\xd8\xff":
        return None
    position, usual_colour = 2, False
    while position + 4 <= len(head):
        if head[position] != 0xFF:
            return None
        marker = head[position + 1]
        if marker == 0xFF:
            position += 1
            continue
        if marker in _STANDALONE or marker in (_APP1, _SOS, _EOI):
            return None
        length = (head[position + 2] << 8) + head[position + 3]
        body = head[position + 4 : position + 2 + length]
        if marker in _SOF:
            return _frame(body, usual_colour)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return None
        if marker == 0xE0 and body[:5] == b"JFIF\0":
            usual_colour = True
        if marker == _APP14 and body[:5] == b"Adobe":
            if len(body) < 12 or body[11] != 1:
                return None
            usual_colour = True
        position += 2 + length
    return None


def _frame(body: bytes, usual_colour: bool) -> Header | None:
    if len(body) < 6 or body[0] != 8:
        return None
    height, width, components = (body[1] << 8) + body[2], (body[3] << 8) + body[4], body[5]
    if not height or not width or len(body) != 6 + 3 * components:
        return None
    factors = tuple(body[7 + 3 * index] for index in range(components))
    # One component is coded alone, so its sampling factors mean nothing.
    kind = Kind.JPEG_GRAY if components == 1 else _KINDS.get(factors)
    identifiers = tuple(body[6 + 3 * index] for index in range(components))
    if kind is None or not (usual_colour or identifiers in ((1,), (1, 2, 3))):
        return None
    return Header(height, width, kind)


_TURNING_CHUNKS = (b"eXIf", b"iTXt")
_TURNING_KEYWORDS = (b"Raw profile type", b"XML:com.adobe.xmp")


def parse_png(stream: BinaryIO) -> Header | None:
    """Read the header of a PNG, and look through its chunks for one that could hold an orientation.

    Parameters
    ----------
    stream : binary file
        At its start.

    Returns
    -------
    Header or None
        None where Pillow must look: no PNG, cut short, or such a chunk.
    """
    start = stream.read(33)
    if start[:8] != b"\x89PNG\r\n\x1a\n" or start[12:16] != b"IHDR" or len(start) < 33:
        return None
    width, height = int.from_bytes(start[16:20], "big"), int.from_bytes(start[20:24], "big")
    while True:
        chunk = stream.read(8)
        if len(chunk) < 8:
            return None
        length, name = int.from_bytes(chunk[:4], "big"), chunk[4:]
        if name == b"IEND":
            return Header(height, width, Kind.PILLOW) if width and height else None
        if name in _TURNING_CHUNKS:
            return None
        skipped = 0
        if name in (b"tEXt", b"zTXt"):
            keyword = stream.read(min(length, 80))
            if keyword.startswith(_TURNING_KEYWORDS):
                return None
            skipped = len(keyword)
        stream.seek(length + 4 - skipped, 1)
