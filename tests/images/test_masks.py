"""Masks are decoded to their numbers, and moved by the window of their images."""

from __future__ import annotations

import io
import itertools
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from h5pack.errors import RejectedImageError
from h5pack.images.decode import MAX_PIXELS, Decoder, PixelOptions, Upright
from h5pack.images.headers import TURNS, DecodePath
from h5pack.images.masks import MaskDecoder, as_stored, gray_mask, narrow_mask, read_mask_header
from tests.read.encoded_files import encode, oriented


def slow_axis(length: int, wanted: int, begin: Fraction, extent: Fraction) -> list[tuple[int, ...]]:
    """The pixel under the center of each pixel of the output, or both if the center is exactly between two."""
    centers = [begin + (number + Fraction(1, 2)) * extent / wanted for number in range(wanted)]
    return [(int(one) - 1, int(one)) if one.denominator == 1 else (int(one),) for one in centers]


def slow_places(length: int, wanted: int, other: int, other_wanted: int, fit: str) -> list[tuple[int, ...]]:
    """The pixels of one axis that each pixel of the output may come from, none in a border."""
    scale = min if fit == "pad" else max
    factor = scale(Fraction(wanted, length), Fraction(other_wanted, other))
    if fit == "stretch":
        return slow_axis(length, wanted, Fraction(0), Fraction(length))
    if fit == "crop":
        # The largest window in the middle with the ratio of the output.
        extent = wanted / factor
        return slow_axis(length, wanted, (length - extent) / 2, extent)
    inner = round(length * factor)
    if (length * factor).denominator == 2:
        # Exactly between two sizes. Pillow rounds a quotient of floats, which may be a little less or more.
        inner = round(length / other * other_wanted)
    first = round((wanted - inner) / 2)
    inside = slow_axis(length, inner, Fraction(0), Fraction(length))
    return [()] * first + inside + [()] * (wanted - inner - first)


@given(
    height=st.integers(8, 40), width=st.integers(8, 40), out_height=st.integers(5, 30), out_width=st.integers(5, 30),
    fit=st.sampled_from(["crop", "pad", "stretch"]), wide=st.booleans(),
)  # fmt: skip
def test_every_pixel_is_the_nearest_one_of_the_same_window(
    height: int, width: int, out_height: int, out_width: int, fit: str, wide: bool
) -> None:
    """Each pixel of the mask, and the same pixels of an image that is resized without averaging, has its own number."""
    numbers = np.arange(height * width).reshape(height, width)
    numbers = numbers if wide else numbers % 251
    size, dtype = (out_height, out_width), "<i4" if wide else "|u1"
    options = PixelOptions(*size, resize=True, fit=fit, resample="nearest")
    decoder = Decoder(options)
    pixels = np.stack([numbers & 255, numbers >> 8, numbers * 0], axis=2).astype(np.uint8)
    image, mask = np.zeros((*size, 3), np.uint8), np.zeros(size, dtype)
    decoder.decode(pixels, DecodePath.PILLOW, image)
    stored = Image.fromarray(numbers.astype(np.uint16 if wide else np.uint8))
    MaskDecoder(options, dtype).decode(encode(stored, "PNG"), decoder.upright, mask)
    border = -1 if wide else 255
    rows = slow_places(height, out_height, width, out_width, fit)
    columns = slow_places(width, out_width, height, out_height, fit)
    for y, x in itertools.product(range(out_height), range(out_width)):
        assert mask[y, x] in {int(numbers[one, other]) for one in rows[y] for other in columns[x]} or (
            mask[y, x] == border and not (rows[y] and columns[x])
        )
    inside = mask != border
    assert np.array_equal(mask[inside], image[inside][:, 0] + 256 * image[inside][:, 1].astype(int))
    assert not image[~inside].any()


@pytest.mark.parametrize("value", range(1, 9))
@pytest.mark.parametrize("own", [False, True])
def test_a_mask_is_turned_with_its_image(value: int, own: bool) -> None:
    """A mask of the stored pixels is turned by the image's orientation; one with an orientation by its own."""
    numbers = np.arange(12 * 18, dtype=np.uint8).reshape(12, 18)
    photo = Image.fromarray(np.stack([numbers] * 3, axis=2))
    shape = (18, 12) if value > 4 else (12, 18)
    options = PixelOptions(*shape)
    decoder = Decoder(options)
    image, mask = np.zeros((*shape, 3), np.uint8), np.zeros(shape, np.uint8)
    decoder.decode(encode(photo, "PNG", exif=oriented(value)), DecodePath.PILLOW, image)
    settings = {"exif": oriented(value)} if own else {}
    MaskDecoder(options, "|u1").decode(encode(numbers, "PNG", **settings), decoder.upright, mask)
    assert np.array_equal(mask, image[:, :, 0])
    assert decoder.upright == Upright(*shape, value)
    if value > 4:
        upright = np.asarray(Image.fromarray(numbers).transpose(TURNS[value]))
        MaskDecoder(options, "|u1").decode(encode(upright, "PNG"), decoder.upright, mask)
        assert np.array_equal(mask, upright), "a mask of the upright size is upright already"


@pytest.mark.parametrize("value", range(1, 9))
def test_the_orientation_turns_a_mask_as_it_is_stored_upright(value: int) -> None:
    upright = np.arange(12 * 18, dtype=np.uint8).reshape(12, 18)
    stored = Image.fromarray(as_stored(upright, value))
    turned = stored.transpose(TURNS[value]) if value in TURNS else stored
    assert np.array_equal(np.asarray(turned), upright)


def test_a_tiff_that_pillow_turns_itself_turns_its_mask() -> None:
    numbers = np.arange(12 * 12, dtype=np.uint8).reshape(12, 12)
    decoder = Decoder(PixelOptions(12, 12))
    image, mask = np.zeros((12, 12, 3), np.uint8), np.zeros((12, 12), np.uint8)
    data = encode(np.stack([numbers] * 3, axis=2), "TIFF", exif=oriented(3))
    decoder.decode(data, DecodePath.PILLOW, image)
    MaskDecoder(PixelOptions(12, 12, resize=True), "|u1").decode(encode(numbers, "PNG"), decoder.upright, mask)
    assert np.array_equal(mask, image[:, :, 0])


def palette_image(numbers: npt.NDArray[np.uint8]) -> Image.Image:
    image = Image.fromarray(numbers).convert("L")
    colored = Image.new("P", image.size)
    colored.putpalette([value for number in range(256) for value in (255 - number, 7, number)])
    colored.putdata(numbers.reshape(-1).tolist())
    return colored


NUMBERS = np.array([[0, 1, 20], [255, 3, 4]], np.uint8)
FORMS = {
    "L": (encode(NUMBERS, "PNG"), NUMBERS),
    "P": (encode(palette_image(NUMBERS), "PNG"), NUMBERS),
    "1": (encode(Image.fromarray(NUMBERS > 3), "PNG"), NUMBERS > 3),
    "I;16": (encode(NUMBERS.astype(np.uint16) * 257, "PNG"), NUMBERS.astype(int) * 257),
    "I": (encode(NUMBERS.astype(np.int32) * -70_000, "TIFF"), NUMBERS.astype(int) * -70_000),
}


@pytest.mark.parametrize("mode", FORMS)
def test_the_numbers_of_each_mode_are_kept(mode: str) -> None:
    data, numbers = FORMS[mode]
    header = read_mask_header(lambda: io.BytesIO(data), MAX_PIXELS)
    assert header == (2, 3, "<i4" if mode.startswith("I") else "|u1")
    out = np.zeros((2, 3), header.dtype)
    MaskDecoder(PixelOptions(2, 3, resize=True), header.dtype).decode(data, Upright(2, 3), out)
    assert np.array_equal(out, numbers)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "F", "CMYK"])
def test_colors_are_no_numbers(mode: str) -> None:
    data = encode(Image.new(mode, (3, 2)), "TIFF")
    with pytest.raises(RejectedImageError, match=mode):
        read_mask_header(lambda: io.BytesIO(data), MAX_PIXELS)
    with pytest.raises(RejectedImageError, match=mode):
        MaskDecoder(PixelOptions(2, 3, resize=True), "|u1").pixels(data, Upright(2, 3))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (FORMS["L"][0][:45], "truncated"),
        (b"text", "not an image"),
        (b"", "not an image"),
        (FORMS["I;16"][0], "more bits"),
        (encode(Image.new("L", (4, 2)), "PNG"), "2x4, but its image's size is 2x3"),
        (encode(Image.new("L", (2, 3)), "PNG"), "3x2, but its image's size is 2x3"),
    ],
)
def test_what_is_no_mask_of_the_image_is_rejected(data: bytes, reason: str) -> None:
    with pytest.raises(RejectedImageError, match=reason):
        MaskDecoder(PixelOptions(2, 3, resize=True), "|u1").pixels(data, Upright(2, 3))


@pytest.mark.parametrize("dtype", ["bool", "u1", "i1", "<u2", ">u2", "i4", ">i4", "u4", "i8", "u8"])
def test_integers_become_masks_of_at_most_32_bits(dtype: str) -> None:
    values = np.array([[0, 1], [1, 0]], dtype)
    stored = np.uint8 if dtype in ("bool", "u1") else np.int32
    np.testing.assert_array_equal(narrow_mask(values), values.astype(stored), strict=True)


@pytest.mark.parametrize(("dtype", "number"), [("u4", 2**31), ("i8", 2**31), ("i8", -(2**31) - 1), ("u8", 2**64 - 1)])
def test_numbers_that_need_64_bits_are_no_mask(dtype: str, number: int) -> None:
    with pytest.raises(RejectedImageError):
        narrow_mask(np.array([[0, number]], dtype))
    inside = number - 1 if 0 < number < 2**32 else number + 1 if number < 0 else 2**31 - 1
    assert narrow_mask(np.array([[inside]], dtype)).tolist() == [[inside]]


def test_gray_masks_have_at_most_16_bits() -> None:
    for numbers, dtype in ((np.array([[0, 255]], np.uint8), np.uint8), (np.array([[0, 65_535]], np.int32), np.uint16)):
        np.testing.assert_array_equal(gray_mask(numbers), numbers.astype(dtype), strict=True)
    for number in (-1, 65_536):
        with pytest.raises(RejectedImageError):
            gray_mask(np.array([[0, number]], np.int32))
