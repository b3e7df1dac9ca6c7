"""Encoding of images of any format as JPEG. Images that are too large are shrunk first."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile

from h5pack.errors import RejectedImageError
from h5pack.images.decode import Decoder, PixelOptions
from h5pack.images.headers import DecodePath

_MAX_SIDE = 65_500  # libjpeg's limit, beyond which it prints to standard error


def fitted_size(height: int, width: int, max_side: int | None) -> tuple[int, int]:
    """Return an image's height and width after shrinking its longer side to at most `max_side` pixels.

    If `max_side` is None, return `height` and `width`.
    """
    longer = max(height, width)
    if max_side is None or longer <= max_side:
        return height, width
    return max(1, round(height * max_side / longer)), max(1, round(width * max_side / longer))


def save_jpeg(image: Image.Image, **settings: Any) -> bytes:
    """Return an image encoded as JPEG with these `settings` of Pillow; raise RejectedImageError if this fails."""
    if max(image.size) > _MAX_SIDE:
        raise RejectedImageError(f"a side has more than {_MAX_SIDE:,} pixels, the limit of JPEG")
    stream = io.BytesIO()
    try:
        image.save(stream, "JPEG", **settings)
    except (OSError, ValueError) as error:
        raise RejectedImageError(f"cannot be encoded as JPEG: {error}") from error
    return stream.getvalue()


class JpegEncoder(Decoder):
    """Decodes images, shrinks their longer side to at most `max_side` pixels, and encodes them as JPEG.

    If `max_side` is None, no image is shrunk. Images of more than `max_pixels` pixels are rejected. Images are
    decoded as by `Decoder`, and turned upright. Gray images stay gray, except that images with alpha or with one bit
    per pixel become RGB. `quality` is Pillow's JPEG quality. Chroma is subsampled (4:2:0).
    """

    def __init__(self, max_side: int | None, quality: int, max_pixels: int) -> None:
        self._max_side, self._quality = max_side, quality
        self._image: Image.Image | None = None
        self.options = PixelOptions(0, 0, resize=True, fit="stretch", max_pixels=max_pixels)
        super().__init__(self.options, quiet=True)

    def encode(self, source: bytes | npt.NDArray[np.uint8], decode_path: int) -> tuple[bytes, int, int]:
        """Encode an image; return the JPEG file, its height and its width. Raise RejectedImageError if this fails."""
        self.decode(source, decode_path, np.empty((0, 0, 3), np.uint8))
        image = self._image
        assert image is not None
        if decode_path == DecodePath.JPEG_GRAY and image.mode != "L":
            # simplejpeg repeats gray in three channels, but Pillow does not. The output must not depend on the decoder.
            image = image.getchannel(0)
        height, width = fitted_size(image.height, image.width, self._max_side)
        if (height, width) != (image.height, image.width):
            image = image.resize((width, height), self._resample)
        # Copy the image if it is an opened file. To save an opened file, Pillow would need the working directory, which
        # may not exist.
        image = image.copy() if isinstance(image, ImageFile.ImageFile) else image
        # Drop the comment of the source file. Otherwise, Pillow would write the comment, but only if Pillow, not
        # simplejpeg, had decoded the file.
        image.info = {}
        return save_jpeg(image, quality=self._quality), height, width

    def _place(self, image: Image.Image, out: npt.NDArray[np.uint8]) -> None:
        self._image = image
