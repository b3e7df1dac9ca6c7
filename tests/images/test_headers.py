"""The fast header parsers say what Pillow says, or nothing."""

from __future__ import annotations

import io
import random
import re
import struct
import warnings
import zlib
from typing import Any

import PIL
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, PngImagePlugin, UnidentifiedImageError

from h5pack.errors import RejectedImageError
from h5pack.images.decode import strict_pillow
from h5pack.images.headers import DecodePath, ImageHeader, file_format, is_incomplete, open_image, parse_jpeg, parse_png
from h5pack.sources.catalog import IMAGE_SUFFIXES
from tests.makers import pixels
from tests.read.encoded_files import encode, oriented

KEEPS_RGB = [int(number) for number in PIL.__version__.split(".")[:2]] >= [10, 2]


def jpeg(size: tuple[int, int] = (20, 14), seed: int = 0, **settings: Any) -> bytes:
    return encode(pixels(seed, size), **settings)


def shown_size(data: bytes) -> tuple[int, int] | None:
    """Height and width by Pillow alone, upright; None where Pillow refuses the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as image:
                # Only the header is read, because the pixels may be truncated.
                orientation = image.getexif().get(0x0112, 1)
                width, height = image.size
        except Exception:
            return None
    return (width, height) if orientation in (5, 6, 7, 8) else (height, width)


def agrees(data: bytes) -> ImageHeader | None:
    """What the parsers find is what Pillow finds."""
    header, wanted = parse_jpeg(data[:16_384]) or parse_png(io.BytesIO(data)), shown_size(data)
    assert header is None or wanted is None or (header.height, header.width) == wanted
    return header


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize(
    ("subsampling", "path"),
    [("4:4:4", DecodePath.JPEG_444), ("4:2:2", DecodePath.JPEG_422), ("4:2:0", DecodePath.JPEG_420)],
)
def test_plain_jpegs_are_parsed(subsampling: str, path: DecodePath, progressive: bool) -> None:
    for seed, size in enumerate([(1, 1), (7, 9), (16, 16), (33, 1_001)]):
        data = jpeg(size, seed, quality=(1, 75, 100)[seed % 3], subsampling=subsampling, progressive=progressive)
        assert agrees(data) == ImageHeader(*size, path)
    gray = encode(pixels(1, (31, 17), 1), progressive=progressive)
    assert agrees(gray) == ImageHeader(31, 17, DecodePath.JPEG_GRAY)


@pytest.mark.parametrize("settings", [{"subsampling": 0}, {"subsampling": 2, "restart_marker_rows": 1}])
def test_progressive_jpegs_without_some_of_their_scans_are_found(settings: dict[str, Any]) -> None:
    data = jpeg((40, 60), progressive=True, **settings)
    scans = [match.start() for match in re.finditer(b"\xff\xda", data)]
    assert len(scans) == 10
    assert not is_incomplete(data)
    assert all(is_incomplete(data[:scan] + b"\xff\xd9") for scan in scans[1:])
    for other in (jpeg(), encode(pixels(1, (31, 17), 1), progressive=True)):
        assert not is_incomplete(other)


def test_the_size_comes_from_this_file_not_from_the_one_before() -> None:
    for size in [(20, 14), (20, 14), (14, 20), (20, 14), (276, 14)]:
        assert parse_jpeg(jpeg(size)) == ImageHeader(*size, DecodePath.JPEG_420)
        assert parse_jpeg(jpeg(size)[:40]) is None


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def inserted(data: bytes, addition: bytes, before: int) -> bytes:
    """A JPEG with a further segment in front of the first one with the marker `before`."""
    position = data.index(bytes([0xFF, before]))
    return data[:position] + addition + data[position:]


SOF, SOS, DQT = 0xC0, 0xDA, 0xDB
TURNED = b"Exif\0\0" + oriented(6).tobytes()[6:]
XMP = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize("before", [DQT, SOF, SOS])
@pytest.mark.parametrize("body", [TURNED, XMP], ids=["exif", "xmp"])
def test_an_orientation_may_stand_behind_the_frame_header(body: bytes, before: int) -> None:
    data = inserted(jpeg(), segment(0xE1, body), before)
    # Older versions of Pillow do not read XMP.
    assert shown_size(data) == (14, 20) or body == XMP
    assert parse_jpeg(data) is None


@pytest.mark.parametrize("before", [DQT, SOF, SOS])
@pytest.mark.parametrize("transform", [0, 2, 1])
def test_an_adobe_mark_may_stand_behind_the_frame_header(transform: int, before: int) -> None:
    adobe = segment(0xEE, b"Adobe" + bytes([0, 100, 0, 0, 0, 0, transform]))
    header = agrees(inserted(jpeg(), adobe, before))
    assert header == (ImageHeader(20, 14, DecodePath.JPEG_420) if transform == 1 else None)


def test_unusual_color_is_left_to_pillow() -> None:
    image = Image.fromarray(pixels(0))
    for data in (
        *([encode(image, "JPEG", keep_rgb=True)] if KEEPS_RGB else []),
        encode(image.convert("CMYK"), "JPEG"),
        jpeg().replace(b"JFIF\0", b"JFXF\0").replace(b"\3\1\x22\0\2\x11\1\3\x11", b"\3R\x22\0G\x11\1B\x11"),
    ):
        assert shown_size(data) == (20, 14)
        assert parse_jpeg(data) is None


def test_malformed_segments_are_left_to_pillow() -> None:
    for marker, body in (
        *((0xE0, b"JFIF\0"), (0xE0, b"JFIFx1234567890123"), (0xE2, b"ICC_PROFILE\0"), (0xE2, b"ICC_PROFILE\0\1")),
        *((0xE2, b"MPF\0junk"), (0xED, b"Photoshop 3.0\x008BIM\4\4"), (0xEE, b"Adobe\0")),
    ):
        assert parse_jpeg(inserted(jpeg(), segment(marker, body), DQT)) is None, body
    for length in (b"\0\0", b"\0\1", b"\xff\xff"):
        assert parse_jpeg(inserted(jpeg(), b"\xff\xe5" + length, DQT)) is None


def test_segments_that_do_not_matter_are_passed_over() -> None:
    data = jpeg(icc_profile=bytes(1_000), comment=b"x" * 3_000, dpi=(300, 300), restart_marker_rows=1)
    data = inserted(data, segment(0xE5, b"anything") + b"\xff\xff\xff" + segment(0xED, b"other"), DQT)
    assert agrees(data) == ImageHeader(20, 14, DecodePath.JPEG_420)


def test_a_scan_beyond_the_head_and_two_frame_headers_are_left_to_pillow() -> None:
    data = jpeg(icc_profile=bytes(40_000))
    assert parse_jpeg(data[:16_384]) is None
    assert parse_jpeg(data) == ImageHeader(20, 14, DecodePath.JPEG_420)
    data = jpeg()
    at = data.index(b"\xff\xc0")
    frame = data[at : at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")]
    assert parse_jpeg(inserted(data, frame.replace(b"\0\x14\0\x0e", b"\0\x15\0\x0e"), SOS)) is None


PICTURE = Image.fromarray(pixels(0))
PNGS: dict[str, tuple[Image.Image, dict[str, Any]]] = {
    **{mode: (PICTURE.convert(mode), {}) for mode in ("RGB", "RGBA", "L", "LA", "1")},
    "palette": (PICTURE.quantize(16), {}),
    "palette with transparency": (PICTURE.quantize(16), {"transparency": 3}),
    "16 bit": (Image.fromarray(pixels(0, channels=1).astype("uint16") * 257), {}),
    "icc": (PICTURE, {"icc_profile": bytes(40_000)}),
    "animated": (PICTURE, {"save_all": True, "append_images": [PICTURE.rotate(180)], "duration": 40}),
    "animated behind a default image": (
        PICTURE,
        {"save_all": True, "default_image": True, "append_images": [PICTURE.rotate(180)]},
    ),
}


@pytest.mark.parametrize("name", PNGS)
def test_plain_pngs_are_parsed(name: str) -> None:
    image, settings = PNGS[name]
    data = encode(image, "PNG", **settings)
    assert agrees(data) == ImageHeader(20, 14, DecodePath.PILLOW)
    # With a wrong CRC, Pillow must decide.
    assert parse_png(io.BytesIO(data[:19] + bytes([data[19] ^ 1]) + data[20:])) is None


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


PNG = encode(pixels(0), "PNG")
TIFF_TURNED = oriented(6).tobytes()[6:]
RAW_PROFILE = f"\nexif\n{len(TURNED):8}\n{TURNED.hex()}\n".encode()
TURNING = {
    "eXIf": chunk(b"eXIf", TIFF_TURNED),
    "iTXt": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.split(b"\0")[1]),
    "raw profile": chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(RAW_PROFILE)),
    "raw profile as text": chunk(b"tEXt", b"Raw profile type exif\0" + RAW_PROFILE),
    "xmp as text": chunk(b"tEXt", b"XML:com.adobe.xmp\0" + XMP.split(b"\0")[1]),
    "xmp by its short name": chunk(b"tEXt", b"xmp\0" + XMP.split(b"\0")[1]),
    "exif by its short name": chunk(b"tEXt", b"exif\0" + TIFF_TURNED),
}


@pytest.mark.parametrize("before", [b"IDAT", b"IEND"])
@pytest.mark.parametrize("name", TURNING)
def test_an_orientation_anywhere_in_a_png_is_never_overlooked(name: str, before: bytes) -> None:
    at = PNG.index(before) - 4
    data = PNG[:at] + TURNING[name] + PNG[at:]
    assert parse_png(io.BytesIO(data)) is None
    if before == b"IDAT" and name in ("eXIf", "raw profile", "xmp as text"):
        assert shown_size(data) == (14, 20)


def test_other_texts_in_a_png_are_passed_over() -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("Title", "a")
    info.add_text("k", "b" * 5_000, zip=True)
    info.add_text("Exif comment", "c")
    assert agrees(encode(pixels(0), "PNG", pnginfo=info)) == ImageHeader(20, 14, DecodePath.PILLOW)


SMALL = {
    "jpeg": jpeg((9, 7)),
    "progressive": jpeg((9, 7), progressive=True),
    "rgb jpeg": encode(pixels(0), keep_rgb=True),
    "exif jpeg": jpeg((9, 7), exif=oriented(6), comment=b"hello"),
    "png": encode(pixels(0, (9, 7)), "PNG"),
    "exif png": encode(pixels(0, (9, 7)), "PNG", exif=oriented(6)),
    "palette png": encode(Image.fromarray(pixels(0, (9, 7))).quantize(4), "PNG"),
}


@pytest.mark.parametrize("data", [pytest.param(value, id=name) for name, value in SMALL.items()])
def test_cut_and_flipped_bytes(data: bytes) -> None:
    for keep in range(len(data)):
        header = agrees(data[:keep])
        assert header is None or shown_size(data) == (header.height, header.width)
    drawn = random.Random(5)
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(drawn.choice([1, 1, 2, 5])):
            damaged[drawn.randrange(len(data))] ^= drawn.randrange(1, 256)
        agrees(bytes(damaged))


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=400))
@example(b"\xff\xd8\xff" + b"\xff" * 300)
@example(b"\xff\xd8\xff\xe0\0\0" * 50)
@example(b"\xff\xd8\xff\xe0\0\2" * 50)
def test_any_bytes_behind_a_jpegs_start(data: bytes) -> None:
    agrees(b"\xff\xd8\xff" + data)
    agrees(data)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(min_size=4, max_size=4), st.binary(max_size=30))))
def test_any_chunks_behind_a_pngs_start(chunks: list[tuple[int, bytes, bytes]]) -> None:
    body = b"".join(struct.pack(">I", length) + name + data for length, name, data in chunks)
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    agrees(PNG[:33] + body)


def iptc(data: bytes) -> bytes:
    """Return an IPTC file, whose image Pillow opens as a file of any format."""
    values = ((3, 60, b"\1\0"), (3, 20, b"\0\x0e"), (3, 30, b"\0\x14"), (3, 120, b"\5"), (8, 10, data), (9, 10, b""))
    return b"".join(struct.pack(">BBBH", 0x1C, record, number, len(value)) + value for record, number, value in values)


@pytest.mark.parametrize("data", [iptc(jpeg()), b"GRIB\0\0\0\1", b"\x89HDF\r\n\x1a\n", b"8BPX"])
def test_formats_without_a_suffix_of_images_are_not_opened(data: bytes) -> None:
    with pytest.raises(UnidentifiedImageError):
        open_image(io.BytesIO(data), 999)


def test_the_formats_of_all_suffixes_are_opened() -> None:
    Image.init()
    for suffix in IMAGE_SUFFIXES & Image.EXTENSION.keys():
        if (form := Image.EXTENSION[suffix]) in Image.SAVE and form not in ("AVIF", "HEIF"):
            stream = io.BytesIO()
            PICTURE.resize((32, 32)).save(stream, form)
            stream.seek(0)
            with open_image(stream, 2**20) as image:
                assert Image.EXTENSION[suffix] == image.format, suffix


def test_formats_are_recognized_by_their_first_bytes() -> None:
    wanted = {"JPEG": "jpeg", "PNG": "png", "WEBP": None, "GIF": None}
    assert {form: file_format(encode(pixels(0), form)[:12]) for form in wanted} == wanted
    assert [file_format(head) for head in (b"", b"\xff\xd8", b"\x89PNG\r\n")] == [None, None, None]


@pytest.mark.parametrize("form", ["ICO", "ICNS"])
def test_images_in_icons_are_not_decoded_beyond_the_limit(form: str) -> None:
    large = PNG[:8] + chunk(b"IHDR", struct.pack(">IIBBBBB", 2_000, 1_001, 8, 0, 0, 0, 0)) + PNG[33:]
    body = struct.pack("<HHHBBBBHHII", 0, 1, 1, 32, 32, 0, 0, 1, 32, len(large), 22) + large
    if form == "ICNS":
        body = struct.pack(">4sI4sI", b"icns", 16 + len(large), b"ic07", 8 + len(large)) + large
    with strict_pillow():
        with pytest.raises(RejectedImageError):
            open_image(io.BytesIO(body), 2_000 * 1_000)
        stream = io.BytesIO()
        Image.new("RGB", (128, 128)).save(stream, form)
        stream.seek(0)
        with open_image(stream, 2_000 * 1_000) as image:
            image.load()
            assert image.format == form
        stream.seek(0)
        with pytest.raises(RejectedImageError):
            open_image(stream, 99)
