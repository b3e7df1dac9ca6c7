"""Masks: images whose pixels are numbers, such as the class of each pixel of another image.

A mask is decoded to the numbers in its file: palette indices instead of colors, gray values of 8 or 16 bits, integers
of 32 bits, or 0 and 1 for 1 bit. A mask is transformed exactly like its image: turned upright, then cropped, padded or
stretched with the same window. Resizing copies the nearest pixel. Pixels of padding are 255, or -1 in masks of more
than 8 bits.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from h5pack.errors import RejectedImageError
from h5pack.images.decode import MAX_PIXELS, PixelOptions, Upright, refuse_bomb, refuse_scans, rejecting, resized
from h5pack.images.headers import TURNS, open_image, orientation_of

_MODES = {"1": "|u1", "L": "|u1", "P": "|u1", "I;16": "<i4", "I;16L": "<i4", "I;16B": "<i4", "I;16N": "<i4", "I": "<i4"}
"""Pillow's modes of masks, and the dtypes of their pixels."""

_MAX_16_BITS = 2**16 - 1

PADDING = {"|u1": 255, "<i4": -1}
"""The value of padding pixels, by dtype."""


class MaskHeader(NamedTuple):
    """The size of a mask as it is stored in its file, and the dtype of its pixels."""

    height: int
    width: int
    dtype: str


@contextlib.contextmanager
def naming_mask(name: str, kind: str = "mask") -> Iterator[None]:
    """Prefix the reason of a RejectedImageError about a mask with "its mask NAME".

    The reason is reported for the image, so it must say which mask it is about. `kind` replaces the word "mask".
    """
    try:
        yield
    except RejectedImageError as error:
        raise RejectedImageError(f"its {kind} {name}: {error}") from error


def read_mask_header(open_file: Callable[[], BinaryIO], max_pixels: int) -> MaskHeader:
    """Return a mask's header; raise RejectedImageError if the file is not a mask, OSError if the storage fails."""
    with open_file() as stream, rejecting(), open_image(stream, max_pixels) as image:
        dtype = _dtype(image)
        refuse_bomb(image.height, image.width, max_pixels)
        return MaskHeader(image.height, image.width, dtype)


def _dtype(image: Image.Image) -> str:
    """Return the dtype of a mask's pixels; raise RejectedImageError if they are not single numbers."""
    dtype = _MODES.get(image.mode)
    if dtype is None:
        raise RejectedImageError(
            f"{image.mode} pixels are not class numbers; save the mask with a palette, as gray or with 16 bits"
        )
    return dtype


def mask_numbers(image: Image.Image) -> npt.NDArray[Any]:
    """Return the pixels of an opened mask, uint8 or int32 (h, w); raise RejectedImageError if they are not integers."""
    return np.asarray(image).astype(_dtype(image), copy=False)


def narrow_mask(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a mask of integers or bools, (h, w), as uint8 or int32.

    Raise RejectedImageError if a number does not fit into int32.
    """
    if values.dtype.kind == "b" or values.dtype == np.uint8:
        return values.astype(np.uint8, copy=False)
    if not np.can_cast(values.dtype, np.int32) and not -(2**31) <= int(values.min()) <= int(values.max()) < 2**31:
        raise RejectedImageError(f"its numbers from {values.min()} to {values.max()} do not fit into int32")
    return values.astype(np.int32, copy=False)


class MaskDecoder:
    """A decoder of masks into rows (H, W) of `dtype`, "|u1" or "<i4". `options` are the pixel options of the images."""

    def __init__(self, options: PixelOptions, dtype: str) -> None:
        self._options, self._dtype = options, dtype

    def decode(self, source: bytes | npt.NDArray[Any], image: Upright, out: npt.NDArray[Any]) -> None:
        """Decode a mask into `out`, (H, W).

        `source` is the bytes of a file, or pixels (h, w). `image` is `Decoder.upright` after decoding the mask's image.
        Raise RejectedImageError if the mask cannot be decoded, or if its upright size is not that of its image.
        """
        pixels = self.pixels(source, image)
        if pixels.shape != out.shape:
            # The shapes differ only with `options.resize`. Without it, images of another size were already rejected.
            size = (self._options.width, self._options.height)
            found, border = Image.fromarray(pixels), PADDING[self._dtype]
            pixels = np.asarray(resized(found, size, self._options.fit, Image.Resampling.NEAREST, border))
        out[...] = pixels

    def pixels(self, source: bytes | npt.NDArray[Any], image: Upright) -> npt.NDArray[Any]:
        """Return the numbers of a mask, turned upright like its `image` but not resized: uint8 or int32, (h, w)."""
        if isinstance(source, bytes):
            with rejecting(), open_image(io.BytesIO(source), self._options.max_pixels) as mask:
                refuse_bomb(mask.height, mask.width, self._options.max_pixels)
                refuse_scans(source, mask.height * mask.width)
                _require_bits(_dtype(mask), self._dtype)
                before = orientation_of(mask)
                pixels = np.asarray(mask).astype(self._dtype, copy=False)
                pixels = _turned(pixels, orientation_of(mask))
            if before == 1:
                # The file has no orientation of its own. Turn the mask like its image, if the turned mask has the size
                # of the upright image.
                turned = _turned(pixels, image.orientation)
                pixels = turned if turned.shape == (image.height, image.width) else pixels
        else:
            _require_bits(source.dtype.str, self._dtype)
            pixels = source.astype(self._dtype, copy=False)
        height, width = pixels.shape
        require_size(height, width, image.height, image.width)
        return pixels


def _require_bits(dtype: str, wanted: npt.DTypeLike) -> None:
    if np.dtype(dtype).itemsize > np.dtype(wanted).itemsize:
        raise RejectedImageError("its pixels have more bits than the pixels of the other masks")


def read_mask(data: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the pixels of a PNG file that `encode_mask` made, (h, w); raise RejectedImageError if it is damaged."""
    with rejecting(), Image.open(io.BytesIO(data), formats=("PNG",)) as image:
        refuse_bomb(image.height, image.width, MAX_PIXELS)
        _require_bits(_dtype(image), dtype)
        # Copy, because torch warns about tensors of read-only memory.
        return np.array(image).astype(dtype, copy=False)


def as_stored(pixels: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    """Turn an upright mask, (h, w), to the way in which an image with this Exif orientation is stored."""
    return _turned(pixels, {6: 8, 8: 6}.get(orientation, orientation))  # Each other turn is its own inverse.


def encode_mask(pixels: npt.NDArray[Any], height: int, width: int) -> bytes:
    """Resize a mask, uint8 or int32 (h, w), to `height` and `width`; return it as a gray PNG file of 8 or 16 bits.

    Resizing copies the nearest pixel. Raise RejectedImageError if a number does not fit into 16 bits.
    """
    if pixels.shape != (height, width):
        pixels = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST))
    stream = io.BytesIO()
    Image.fromarray(gray_mask(pixels)).save(stream, "PNG")
    return stream.getvalue()


def gray_mask(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a mask, uint8 or int32, as uint8 or uint16; raise RejectedImageError if a number does not fit."""
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.min() < 0 or pixels.max() > _MAX_16_BITS:
        found = f"its numbers go from {pixels.min()} to {pixels.max()}"
        raise RejectedImageError(f"{found}, but must be from 0 to {_MAX_16_BITS}")
    return pixels.astype(np.uint16)


def require_size(height: int, width: int, image_height: int, image_width: int) -> None:
    """Raise RejectedImageError if a mask does not have the size of its image."""
    if (height, width) != (image_height, image_width):
        raise RejectedImageError(f"its size is {height}x{width}, but its image's size is {image_height}x{image_width}")


def _turned(pixels: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    if orientation not in TURNS:
        return pixels
    return np.asarray(Image.fromarray(pixels).transpose(TURNS[orientation]))
