"""Encoded images to pixels, each at its own size, in any thread."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

from h5pack.decode.headers import Header
from h5pack.decode.images import MAX_PIXELS, Decoder, PixelOptions, read_header
from h5pack.errors import RejectedImageError


class RowDecoder(Decoder):
    """Decodes images to RGB, upright, without resizing; one serves all threads of a process.

    It changes nothing in Pillow, whose switches belong to the whole process: a truncated image is refused unless the
    program itself has set ``ImageFile.LOAD_TRUNCATED_IMAGES``.
    """

    def __init__(self) -> None:
        # In Pillow's search for a format, a thread that comes while another one still loads the rare formats
        # may find none. So they are loaded before any thread decodes.
        Image.init()
        super().__init__(
            PixelOptions(
                height=0,
                width=0,
                channels=3,
                resize=False,
                fit="crop",
                resample="bilinear",
                draft=False,
                max_pixels=MAX_PIXELS,
            )
        )

    def header(self, data: bytes) -> Header:
        """An image's upright size.

        Raises
        ------
        RejectedImageError
            If it is no image, or too large a one.
        """
        return read_header(data, lambda: io.BytesIO(data), MAX_PIXELS)

    def pixels(self, data: bytes) -> npt.NDArray[np.uint8]:
        """An image's pixels, uint8 (h, w, 3), at its own size.

        Raises
        ------
        RejectedImageError
            If it cannot be decoded.
        """
        header = self.header(data)
        out = np.empty((header.height, header.width, 3), np.uint8)
        self.decode(data, header.kind, out)
        return out

    def _place(self, image: Image.Image, out: npt.NDArray[np.uint8]) -> None:
        # Not at the size of the options, but at that of the place.
        if (image.height, image.width) != out.shape[:2]:
            raise RejectedImageError(
                f"its header says {out.shape[0]}x{out.shape[1]}, and it is {image.height}x{image.width}"
            )
        out[...] = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
