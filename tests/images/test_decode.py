"""Decoded pixels are Pillow's, whichever decoder made them, and refusals say why."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import re
import struct
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps, TiffImagePlugin, UnidentifiedImageError, features

from h5pack.errors import RejectedImageError
from h5pack.images import decode
from h5pack.images.decode import MAX_PIXELS, Decoder, PixelOptions, image_of, read_header, strict_pillow
from h5pack.images.headers import DecodePath, ImageHeader
from h5pack.pack.options import RESAMPLES
from tests.images.test_headers import chunk
from tests.makers import break_package, pixels
from tests.read.encoded_files import encode, oriented
from tests.read.files import in_child

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with strict_pillow():
        yield


@pytest.fixture
def lenient(_strict: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other settings of Pillow, as if no context of `strict_pillow` was open."""
    # Restored before the context of `_strict` is closed, which would otherwise stay open in this process.
    with monkeypatch.context() as patch:
        patch.setattr(decode, "_strict_contexts", 0)
        patch.setattr(decode, "_strict_settings", contextlib.ExitStack())
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 123)
        patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        yield


def header_of(data: bytes, max_pixels: int = MAX_PIXELS) -> ImageHeader:
    return read_header(data[:16_384], lambda: io.BytesIO(data), max_pixels)


def decoded(data: bytes, channels: int = 3, kind: DecodePath | None = None, **changes: Any) -> Pixels:
    """Survey the file with h5pack, then decode it at the surveyed size or at `size`."""
    header = header_of(data)
    (height, width), quiet = changes.pop("size", (header.height, header.width)), changes.pop("quiet", False)
    out = np.full((height, width, channels), 77, np.uint8)
    decoder = Decoder(PixelOptions(height, width, channels, **changes), quiet)
    decoder.decode(data, header.decode_path if kind is None else kind, out)
    return out


def slow(data: bytes, channels: int = 3) -> Pixels:
    """The slow twin: Pillow alone."""
    with Image.open(io.BytesIO(data)) as image:
        converted = ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB")
    return np.asarray(converted).reshape(converted.height, converted.width, channels)


RGB = Image.fromarray(pixels(0, (23, 17)))
GRAY = Image.fromarray(pixels(1, (23, 17), 1))
ALPHA = Image.merge("RGBA", [*RGB.split(), GRAY])
FRAMES = {"save_all": True, "append_images": [Image.fromarray(pixels(5, (23, 17)))], "duration": 50}
FILES = {
    "one bit png": encode(RGB.convert("1"), "PNG"),
    "one bit tiff": encode(RGB.convert("1"), "TIFF"),
    "gray png": encode(GRAY, "PNG"),
    "gray jpeg": encode(GRAY, "JPEG"),
    "gray with alpha": encode(Image.merge("LA", [GRAY, GRAY]), "PNG"),
    "gray with a transparent value": encode(GRAY, "PNG", transparency=90),
    "palette": encode(RGB.quantize(20), "PNG"),
    "palette with a transparent color": encode(RGB.quantize(20), "PNG", transparency=2),
    "palette with transparent colors": encode(RGB.quantize(4), "PNG", transparency=bytes([0, 80, 255, 9])),
    "palette gif": encode(RGB.quantize(20), "GIF", transparency=2),
    "palette bmp": encode(RGB.quantize(20), "BMP"),
    "rgb png": encode(RGB, "PNG"),
    "rgb with a transparent color": encode(RGB, "PNG", transparency=(1, 2, 3)),
    "rgb bmp": encode(RGB, "BMP"),
    "rgb ppm": encode(RGB, "PPM"),
    "rgb tiff": encode(RGB, "TIFF", compression="tiff_lzw"),
    "rgb webp": encode(RGB, "WEBP", quality=60),
    "rgb jpeg 2000": encode(RGB, "JPEG2000"),
    "rgba png": encode(ALPHA, "PNG"),
    "rgba webp": encode(ALPHA, "WEBP", lossless=True),
    "ycbcr jpeg": encode(RGB, "JPEG"),
    "ycbcr tiff": encode(RGB.convert("YCbCr"), "TIFF", compression="tiff_lzw"),
    "rgb jpeg": encode(RGB, "JPEG", keep_rgb=True),
    "cmyk jpeg": encode(RGB.convert("CMYK"), "JPEG"),
    "cmyk tiff": encode(RGB.convert("CMYK"), "TIFF"),
    "icc profile": encode(RGB, "JPEG", icc_profile=bytes(40_000)),
    "animated gif": encode(RGB.quantize(20), "GIF", **FRAMES),
    "animated png": encode(RGB, "PNG", **FRAMES),
    "animated webp": encode(RGB, "WEBP", **FRAMES),
    "pages of a tiff": encode(RGB, "TIFF", **FRAMES),
    "mpo": encode(RGB, "MPO", **FRAMES),
    "16-bit rgb ppm": b"P6 3 2 65535\n" + bytes(range(100, 136)),
}
HAS_AVIF = "avif" in features.modules and features.check("avif")
if HAS_AVIF:
    FILES["avif"] = encode(RGB, "AVIF", quality=70)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("data", [pytest.param(value, id=name) for name, value in FILES.items()])
def test_every_mode_is_converted_as_by_pillow(data: bytes, channels: int) -> None:
    assert np.array_equal(decoded(data, channels), slow(data, channels))


def test_cielab_becomes_gray_by_way_of_rgb() -> None:
    data = encode(RGB.convert("LAB"), "TIFF", exif=oriented(6))
    gray = Image.fromarray(slow(data)).convert("L")
    assert np.array_equal(decoded(data), slow(data))
    assert np.array_equal(decoded(data, 1)[:, :, 0], np.asarray(gray))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_keep_their_high_byte(form: str, channels: int) -> None:
    values = np.random.default_rng(0).integers(0, 65_536, (9, 12)).astype(np.uint16)
    want = np.repeat((values >> 8).astype(np.uint8)[:, :, None], channels, axis=2)
    if form == "PPM":
        data = b"P5 12 9 65535\n" + values.astype(">u2").tobytes()
    else:
        data = encode(Image.fromarray(values), form)
        turned = encode(Image.fromarray(values), form, exif=oriented(6))
        assert np.array_equal(decoded(turned, channels), np.rot90(want, -1))
    assert np.array_equal(decoded(data, channels), want)


def tiff(size: tuple[int, int], bits: int, photometric: int | None, planes: list[bytes]) -> bytes:
    """An uncompressed TIFF file with a strip for each plane; if there is one, its pixels have one channel."""
    count, (height, width) = len(planes), size
    tags: dict[int, list[int]] = {
        256: [width], 257: [height], 258: [bits] * count, 259: [1], 262: [photometric or 0], 273: [0] * count,
        277: [count], 278: [height], 279: [len(plane) for plane in planes], 284: [1 if count == 1 else 2],
    }  # fmt: skip
    if photometric is None:
        del tags[262]
    end = 8 + 2 + 12 * len(tags) + 4
    tags[273] = [end + 12 * count + sum(map(len, planes[:plane])) for plane in range(count)]
    entries, further = [], b""
    for tag, values in tags.items():
        data = struct.pack(f"<{len(values)}I", *values)
        if len(values) > 1:
            data, further = struct.pack("<I", end + len(further)), further + data
        entries.append(struct.pack("<HHI", tag, 4, len(values)) + data)
    further = further.ljust(12 * count, b"\0")
    return b"".join([b"II*\0\x08\0\0\0", struct.pack("<H", len(tags)), *entries, bytes(4), further, *planes])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("bits", "white_is_zero"), [(8, False), (8, True), (12, False), (16, False), (16, True)])
def test_gray_tiffs_keep_their_high_bits(bits: int, white_is_zero: bool, channels: int) -> None:
    values = np.random.default_rng(0).integers(0, 1 << bits, (9, 12))
    if bits == 12:
        first, second = values[:, ::2], values[:, 1::2]
        stored = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=2).astype(np.uint8)
    else:
        stored = values.astype(f"<u{bits // 8}")
    shown = (1 << bits) - 1 - values if white_is_zero else values
    for photometric in (0, None) if white_is_zero else (1,):  # None: without that tag, as 0
        found = decoded(tiff((9, 12), bits, photometric, [stored.tobytes()]), channels)
        assert np.array_equal(found, np.repeat((shown >> bits - 8)[:, :, None], channels, axis=2))


def test_planes_of_sixteen_bits_are_rejected() -> None:
    values = pixels(0, (9, 12)).transpose(2, 0, 1)
    planes = [plane.tobytes() for plane in values]
    assert np.array_equal(decoded(tiff((9, 12), 8, 2, planes)), values.transpose(1, 2, 0))
    deep = [(plane.astype("<u2") * 257).tobytes() for plane in values]
    with pytest.raises(RejectedImageError):
        decoded(tiff((9, 12), 16, 2, deep))
    assert np.array_equal(decoded(tiff((9, 12), 16, 1, deep[:1]), 1)[:, :, 0], values[0])


@pytest.mark.parametrize("value", [*range(10), 1536])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "MPO", "palette"])
def test_every_orientation_is_turned_upright_once(form: str, value: int) -> None:
    if form == "AVIF" and not HAS_AVIF:
        pytest.skip("this Pillow reads no AVIF")
    channels = 1 if value % 2 else 3
    if form == "palette":
        data = encode(RGB.quantize(9), "PNG", exif=oriented(value), transparency=bytes([0, 3, 9]))
    else:
        data = encode(RGB, form, exif=oriented(value), **(FRAMES if form == "MPO" else {}))
    want = slow(data, channels)
    assert (header_of(data).height, header_of(data).width) == want.shape[:2]
    assert header_of(data).orientation in range(1, 9)
    assert np.array_equal(decoded(data, channels), want)
    assert np.array_equal(decoded(data, channels, resize=True, size=(8, 9)), fitted(data, (8, 9), channels=channels))


@pytest.fixture
def heif(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A HEIF file with the orientation 6, in a process in which nothing opens HEIF files yet."""
    package = pytest.importorskip("pillow_heif", reason="pip install pillow-heif")
    package.register_heif_opener()
    data = encode(RGB, "HEIF", exif=oriented(6).tobytes())
    monkeypatch.delitem(Image.OPEN, "HEIF")
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])
    return data


@pytest.mark.parametrize("brand", [b"heic", b"mif1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_heif_is_opened_by_pillow_heif(heif: bytes, brand: bytes, channels: int) -> None:
    data = heif[:8] + brand + heif[12:]
    found = decoded(data, channels)
    assert np.array_equal(found, slow(data, channels))
    upright = np.rot90(slow(encode(RGB, "PNG"), channels), -1)
    assert found.shape == upright.shape
    assert np.corrcoef(found.ravel(), upright.ravel())[0, 1] > 0.9


def test_heif_without_pillow_heif_says_what_to_install(
    heif: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_package("pillow_heif", tmp_path, monkeypatch)
    with pytest.raises(RejectedImageError, match="pillow-heif"):
        header_of(heif)
    with pytest.raises(RejectedImageError, match="pillow-heif"):
        Decoder(PixelOptions(17, 23)).decode(heif, DecodePath.PILLOW, np.empty((17, 23, 3), np.uint8))
    with pytest.raises(RejectedImageError, match="unknown format"):
        header_of(heif[:8] + b"mif1" + heif[12:])


@pytest.mark.parametrize("form", ["PNG", "PNG text", "WEBP"])
def test_damaged_exif_data_is_no_orientation(form: str) -> None:
    if form == "PNG text":
        png = encode(RGB, "PNG")
        data = png[:33] + chunk(b"tEXt", b"Raw profile type exif\0\nexif\n    9\nnot hex\n") + png[33:]
    else:
        data = encode(RGB, form, exif=b"Exif\0\0garbage, not TIFF")
    header, (height, width) = header_of(data), RGB.size[::-1]
    assert (header.height, header.width, header.orientation) == (height, width, 1)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(decoded(data), np.asarray(image.convert("RGB")))


def fitted(
    data: bytes, size: tuple[int, int], fit: str = "crop", resample: str = "bicubic", channels: int = 3
) -> Pixels:
    image = Image.fromarray(np.squeeze(slow(data, channels), 2) if channels == 1 else slow(data))
    resized = {"crop": ImageOps.fit, "pad": ImageOps.pad, "stretch": Image.Image.resize}[fit]
    if image.size != size[::-1]:
        image = resized(image, size[::-1], Image.Resampling[resample.upper()])
    return np.asarray(image).reshape(*size, channels)


@pytest.mark.parametrize("resample", RESAMPLES)
@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_resizing_is_pillows_own(fit: str, resample: str) -> None:
    names = ("rgb png", "ycbcr jpeg", "gray jpeg", "palette with transparent colors", "cmyk jpeg")
    thin = ((1, 1), (2, 3)) if fit == "pad" else ((1, 40), (40, 1), (1, 1), (2, 3))
    lines = [encode(pixels(3, size)) for size in thin]
    for number, data in enumerate([*(FILES[name] for name in names), *lines]):
        for size in ((23, 17), (50, 31), (7, 60), (1, 1)):
            channels = 1 if number % 2 else 3
            found = decoded(data, channels, resize=True, size=size, fit=fit, resample=resample)
            assert np.array_equal(found, fitted(data, size, fit, resample, channels)), (number, size)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_line_is_padded_on_both_sides(form: str, turned: bool) -> None:
    image = Image.fromarray(pixels(3, (1, 40)))
    data = encode(image.transpose(Image.Transpose.ROTATE_90) if turned else image, form)
    found = decoded(data, 3, resize=True, size=(6, 10) if turned else (10, 6), fit="pad", resample="box")
    found = found.transpose(1, 0, 2) if turned else found
    line = Image.fromarray(slow(data).transpose(1, 0, 2) if turned else slow(data)).resize((6, 1), Image.Resampling.BOX)
    assert found.any()
    assert np.array_equal(found[found.any(axis=(1, 2))], np.asarray(line))


def drawn_jpeg(drawn: random.Random, number: int) -> bytes:
    size = (drawn.randint(1, 70), drawn.randint(1, 70))
    settings: dict[str, Any] = {name: drawn.random() < 0.35 for name in ("progressive", "optimize")}
    settings["quality"] = drawn.randint(1, 100)
    if drawn.random() < 0.3:
        settings[drawn.choice(["restart_marker_blocks", "restart_marker_rows"])] = drawn.randint(1, 5)
    if drawn.random() < 0.2:
        return encode(pixels(number, size, 1), **settings)
    color = {"subsampling": drawn.randint(0, 2)} if drawn.random() < 0.9 else {"subsampling": 0, "keep_rgb": True}
    return encode(pixels(number, size), **settings, **color)


simplejpeg_only = pytest.mark.skipif(decode._simplejpeg() is None, reason="simplejpeg is not installed")


@simplejpeg_only
def test_the_fast_decoder_is_proven_for_every_kind() -> None:
    decode_jpeg = decode._simplejpeg()
    for kind in set(DecodePath) - {DecodePath.PILLOW}:
        assert decode._is_exact(decode_jpeg, kind, 3)
        assert decode._is_exact(decode_jpeg, kind, 1) == (kind == DecodePath.JPEG_GRAY)


def test_a_broken_simplejpeg_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_package("simplejpeg", tmp_path, monkeypatch)
    assert decode._simplejpeg() is None


@simplejpeg_only
def test_a_decoder_with_other_pixels_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if simplejpeg had another version of libjpeg-turbo: for one kind, a single value of a sample differs."""
    exact = decode._simplejpeg()
    used = []

    def inexact(data: bytes, *arguments: Any, **keywords: Any) -> Pixels:
        found = exact(data, *arguments, **keywords)
        kind = header_of(data).decode_path
        used.append(kind)
        found[0, 0, 0] ^= kind == DecodePath.JPEG_422
        return found

    monkeypatch.setattr(decode, "_simplejpeg", lambda: inexact)
    for subsampling, kind in enumerate((DecodePath.JPEG_444, DecodePath.JPEG_422, DecodePath.JPEG_420)):
        data = encode(pixels(1, (20, 30)), subsampling=subsampling)
        for _ in range(2):
            assert np.array_equal(decoded(data), slow(data))
        assert used.count(kind) == (1 if kind == DecodePath.JPEG_422 else 4 + 2)


@pytest.fixture(params=[pytest.param("simplejpeg", marks=simplejpeg_only), "pillow"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What decodes plain JPEGs: simplejpeg, or Pillow's decoder without its parser of headers."""
    if request.param == "pillow":
        monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
    return request.param


def test_pillows_decoder_is_called_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for images of other sizes and modes in turn; none has pixels of the one before."""
    files = [encode(pixels(seed, (23, 17 + seed % 2))) for seed in range(6)]
    files.insert(3, FILES["gray jpeg"])
    expected = [fitted(data, (12, 9)) for data in files]
    monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
    monkeypatch.setattr(Image, "open", None)
    decoder = Decoder(PixelOptions(12, 9, resize=True))
    for data, pixels_of_file in zip(files, expected, strict=True):
        out = np.empty((12, 9, 3), np.uint8)
        with pytest.raises(RejectedImageError):
            decoder.decode(data[: len(data) // 2], header_of(data).decode_path, out)
        decoder.decode(data, header_of(data).decode_path, out)
        assert np.array_equal(out, pixels_of_file)


@pytest.mark.parametrize("seed", range(2))
def test_the_fast_decoder_gives_pillows_pixels(seed: int, fast: str) -> None:
    drawn = random.Random(seed)
    files = [drawn_jpeg(drawn, number) for number in range(150)]
    assert sum(header_of(data).decode_path != DecodePath.PILLOW for data in files) > 100
    for data in files:
        for channels in (1, 3):
            assert np.array_equal(decoded(data, channels), slow(data, channels))
        small = (drawn.randint(1, 40), drawn.randint(1, 40))
        assert np.array_equal(decoded(data, resize=True, size=small), fitted(data, small))


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_progressive_images_without_their_last_scans(subsampling: int, fast: str) -> None:
    data = encode(pixels(2, (61, 45)), progressive=True, subsampling=subsampling)
    for scan in [*re.finditer(rb"\xff\xda", data)][1:]:
        first_scans = data[: scan.start()] + b"\xff\xd9"
        assert outcome(first_scans, None) == outcome(first_scans, DecodePath.PILLOW)


def outcome(data: bytes, kind: DecodePath | None, **changes: Any) -> bytes | str:
    try:
        return decoded(data, kind=kind, **changes).tobytes()
    except RejectedImageError as error:
        return str(error)


def same_with_and_without(data: bytes) -> bytes | str:
    """The outcome, which neither the decoder nor a second try may change."""
    with_fast = outcome(data, None)
    assert with_fast == outcome(data, DecodePath.PILLOW)
    assert with_fast == outcome(data, None)
    assert outcome(data, None, resize=True, size=(9, 9)) == outcome(data, DecodePath.PILLOW, resize=True, size=(9, 9))
    return with_fast


JPEGS = {
    "baseline": {},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_rows": 1, "subsampling": 1},
    "with exif": {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"},
}


@pytest.mark.parametrize("settings", [pytest.param(value, id=name) for name, value in JPEGS.items()])
def test_cut_and_damaged_jpegs_have_the_same_outcome_with_either_decoder(settings: dict[str, Any], fast: str) -> None:
    data = encode(pixels(4, (41, 30)), **settings)
    outcomes = [same_with_and_without(data[:keep]) for keep in [*range(1, len(data), 11), len(data) - 1, len(data)]]
    assert outcomes.count("truncated") > len(outcomes) / 3
    drawn = random.Random(len(settings))
    outcomes = []
    for _ in range(80):
        damaged = bytearray(data)
        for _ in range(drawn.choice([1, 1, 3])):
            damaged[drawn.randrange(2, len(data))] ^= 1 << drawn.randrange(8)
        # A damaged size may be anything; this test is about the pixels.
        if len(outcome(bytes(damaged), DecodePath.PILLOW)) <= 2_000_000:
            outcomes.append(same_with_and_without(bytes(damaged)))
    assert {type(found) for found in outcomes} == {bytes, str}


def test_reasons_depend_on_the_image_alone() -> None:
    drawn = random.Random(9)
    reasons = set()
    for name, data in FILES.items():
        for _ in range(6):
            damaged = bytearray(data[: drawn.randint(1, len(data))])
            damaged[drawn.randrange(len(damaged))] ^= 1 << drawn.randrange(8)
            first = outcome(bytes(damaged), DecodePath.PILLOW, resize=True, size=(8, 8))
            assert first == outcome(bytes(damaged), DecodePath.PILLOW, resize=True, size=(8, 8)), name
            if isinstance(first, str):
                reasons.add(first)
    assert len(reasons) > 3
    for reason in reasons:
        assert re.search(r"0x[0-9a-f]{4,}|<|object at|\n", reason) is None
        assert reason == reason.strip() != ""


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the image is empty (0 bytes)"),
        (b"no image at all", "not an image, or of an unknown format"),
        (FILES["ycbcr jpeg"][:-20], "truncated"),
        (FILES["rgb png"][:-200], "truncated"),
        (encode(Image.fromarray(np.zeros((3, 4), np.float32)), "TIFF"), "F pixels cannot be packed"),
        (encode(Image.fromarray(np.zeros((3, 4), np.int32)), "TIFF"), "I pixels cannot be packed"),
    ],
)
def test_reasons(data: bytes, reason: str) -> None:
    with pytest.raises(RejectedImageError, match="^" + re.escape(reason)):
        decoded(data)


def test_an_image_of_another_size_is_refused_unless_resized() -> None:
    for data in (FILES["ycbcr jpeg"], FILES["rgb png"]):
        for size in ((23, 18), (22, 17), (17, 23), (40, 40), (3, 3)):
            with pytest.raises(RejectedImageError, match=f"23x17, .* {size[0]}x{size[1]}"):
                decoded(data, size=size)


def test_a_file_that_is_replaced_after_the_survey_is_decoded_or_rejected() -> None:
    for name in ("rgb png", "gray jpeg", "ycbcr jpeg"):
        assert np.array_equal(decoded(FILES[name], kind=DecodePath.JPEG_420), slow(FILES[name]))
    with pytest.raises(RejectedImageError):
        Decoder(PixelOptions(4, 4)).decode(b"replaced", DecodePath.JPEG_420, np.zeros((4, 4, 3), np.uint8))


@pytest.mark.parametrize("name", ["rgb png", "ycbcr jpeg", "rgb tiff", "animated webp"])
def test_bombs_are_refused_by_the_survey_and_by_the_decoder(name: str) -> None:
    data = FILES[name]
    with pytest.raises(RejectedImageError, match="bomb"):
        header_of(data, 390)
    assert header_of(data, 391).height == 23
    with pytest.raises(RejectedImageError, match="bomb"):
        decoded(data, kind=DecodePath.PILLOW, max_pixels=390)
    # This size is beyond Pillow's own limit.
    bomb = b"P5 20000 20000 255\n"
    with pytest.raises(RejectedImageError, match="bomb"):
        Decoder(PixelOptions(4, 4, resize=True)).decode(bomb, DecodePath.PILLOW, np.zeros((4, 4, 3), np.uint8))
    assert header_of(bomb, 4 * 10**8).width == 20_000


@pytest.mark.parametrize("exif", [b"", Image.Exif().tobytes()])
def test_progressive_jpegs_of_thousands_of_scans_are_refused(exif: bytes) -> None:
    data = encode(np.zeros((1_001, 1_000), np.uint8), "JPEG", progressive=True, exif=exif)
    first = data.index(b"\xff\xda")
    scan = data[first : data.index(b"\xff", first + 2)]
    decoder, out = Decoder(PixelOptions(4, 4, resize=True)), np.ones((4, 4, 3), np.uint8)
    header = header_of(data, 2**20)
    for count in (10, 10_000):
        with pytest.raises(RejectedImageError) if count > 10 else contextlib.nullcontext():
            decoder.decode(data[:first] + count * scan + data[first:], header.decode_path, out)
    assert not out.any()


def test_what_pillow_logs_is_not_written_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = encode(np.zeros((8, 8, 3), np.uint8), "TIFF")
    samples, too_many = (struct.pack("<HHIH", TiffImagePlugin.SAMPLESPERPIXEL, 3, 1, count) for count in (3, 128))
    assert samples in data
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])
        with pytest.raises(RejectedImageError):
            header_of(data.replace(samples, too_many))
    assert capsys.readouterr().err == ""


def test_messages_of_libtiff_become_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    """libtiff would write them to the terminal, in between the progress of a conversion."""
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    data = encode(Image.fromarray(noise), "TIFF", compression="tiff_lzw")
    damaged = data[:60] + b"\xff" * 1940 + data[2000:]
    # The first kind of message begins with the file's name, the second with that of a function of libtiff.
    for broken in (damaged, data[:60] + bytes(1940) + data[2000:]) * 2:
        with pytest.raises(RejectedImageError, match=r"libtiff: [A-Z]"):
            decoded(broken, quiet=True)
        assert np.array_equal(decoded(data, quiet=True), noise)
    assert capfd.readouterr() == ("", "")
    # A loader's threads do not redirect the standard error of the process.
    with pytest.raises(RejectedImageError, match="OSError"):
        decoded(damaged)
    assert capfd.readouterr().err.startswith("tempfile.tif: ")


@pytest.mark.usefixtures("lenient")
def test_pillows_settings_are_put_back() -> None:
    with pytest.raises(RejectedImageError, match="truncated"), strict_pillow():
        decoded(FILES["ycbcr jpeg"][:-30])
    assert Image.MAX_IMAGE_PIXELS == 123
    assert ImageFile.LOAD_TRUNCATED_IMAGES


@pytest.mark.usefixtures("lenient")
def test_pillows_settings_hold_until_the_last_thread_is_done() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with strict_pillow():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with strict_pillow(), strict_pillow():
        thread.start()
        entered.wait()
    assert Image.MAX_IMAGE_PIXELS is None
    with strict_pillow():
        pass
    assert Image.MAX_IMAGE_PIXELS is None
    leave.set()
    thread.join()
    assert Image.MAX_IMAGE_PIXELS == 123


def test_a_child_forked_while_another_thread_changes_pillows_settings_can_change_them() -> None:
    entered, forks = threading.Event(), threading.Event()

    def other() -> None:
        with decode._strict_lock:
            entered.set()
            forks.wait()

    def child() -> bool:
        with strict_pillow():
            return Image.MAX_IMAGE_PIXELS is None

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    os.register_at_fork(before=forks.set)
    assert in_child(child)
    thread.join()


@pytest.mark.usefixtures("lenient")
def test_pillows_warnings_are_no_reason_to_refuse() -> None:
    tag = b"\0\1\x12\0\x03\0\0\0\1\0\6"
    data = encode(RGB, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\5\1" + tag[2:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with strict_pillow():
            assert decoded(data).shape[2] == 3


@pytest.mark.parametrize("value", [1, 6])
@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_draft_decodes_jpegs_reduced_and_at_the_planned_size(fit: str, value: int) -> None:
    data = encode(pixels(8, (400, 300)), quality=95, exif=oriented(value))
    draft = decoded(data, resize=True, size=(40, 70), fit=fit, draft=True)
    with Image.open(io.BytesIO(data)) as image:
        image.draft(None, (40, 70) if value == 6 else (70, 40))
        reduced = encode(ImageOps.exif_transpose(image), "PNG")
    assert np.array_equal(draft, fitted(reduced, (40, 70), fit))
    assert not np.array_equal(draft, decoded(data, resize=True, size=(40, 70), fit=fit))
    # Draft changes only JPEGs.
    for name in ("rgb png", "rgb webp", "rgb tiff"):
        found = decoded(FILES[name], resize=True, size=(3, 3), draft=True, fit=fit)
        assert np.array_equal(found, fitted(FILES[name], (3, 3), fit))


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_of_a_dataset_are_copied(channels: int) -> None:
    for source in (pixels(0, (9, 7)), pixels(0, (9, 7), 1)[:, :, None], pixels(0, (1, 7)), pixels(0, (9, 1))):
        out = np.zeros((*source.shape[:2], channels), np.uint8)
        Decoder(PixelOptions(*out.shape)).decode(source, DecodePath.PILLOW, out)
        image = image_of(source).convert("L" if channels == 1 else "RGB")
        assert np.array_equal(out, np.asarray(image).reshape(out.shape))
        # The layout (C, H, W) holds the same pixels.
        planes = np.zeros((channels, *source.shape[:2]), np.uint8)
        Decoder(PixelOptions(*out.shape, layout="nchw")).decode(source, DecodePath.PILLOW, planes)
        assert np.array_equal(planes.transpose(1, 2, 0), out)


def test_storage_errors_do_not_reject_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(io.BytesIO):
        def read(self, *arguments: Any) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError) as caught:
        read_header(b"II*\0", Failing, MAX_PIXELS)
    assert not isinstance(caught.value, UnidentifiedImageError)


@pytest.mark.parametrize(
    "error", [ValueError("at <PIL.Image.Image object at 0x7f12ab>"), SyntaxError("at"), OSError("at")]
)
def test_any_exception_of_a_decoder_rejects_the_image(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "open", Mock(side_effect=error))
    assert outcome(FILES["rgb png"], DecodePath.PILLOW) == f"cannot be decoded: {type(error).__name__}: at"


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 70_000, 3), (300, 1, 1), (218, 178, 3), (701, 503, 1)])
def test_pixels_are_copied_whole_with_and_without_pillows_encoder(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    image = image_of(pixels)
    # With the negative slack, the encoder gives less than the whole image.
    for slack in (decode._ENCODER_SLACK_BYTES, -(pixels.nbytes // 2)):
        monkeypatch.setattr(decode, "_ENCODER_SLACK_BYTES", slack)
        out = np.zeros(shape, np.uint8)
        decode._copy_pixels(image, out)
        assert np.array_equal(out, pixels)
