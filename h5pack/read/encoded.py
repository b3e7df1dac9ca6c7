"""Datasets of encoded images: each row holds the bytes of a JPEG, PNG or other image file.

Such a dataset is read as if it held pixels: RGB, upright, (H, W, 3), where H and W are the size of row 0. Rows of
another size can be read one by one, but not batched. The HDF5 library fetches the bytes, one thread at a time.
`h5pack.images.decode`, which `h5pack convert` uses too, decodes them in any number of threads without the GIL.
"""

from __future__ import annotations

import functools
import io
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from PIL import Image

from h5pack.errors import DamagedRowsError, RejectedImageError, SizesDifferError
from h5pack.images.decode import MAX_PIXELS, Decoder, PixelOptions, read_header
from h5pack.images.headers import ImageHeader
from h5pack.read.chunk_index import ChunkIndex, contiguous_group_rows
from h5pack.read.hdf5 import dataset_error, read_rows


class RowDecoder(Decoder):
    """Decodes images to upright RGB without resizing. It is thread-safe.

    It changes no process-wide setting of Pillow, such as ``ImageFile.LOAD_TRUNCATED_IMAGES``.
    """

    def __init__(self) -> None:
        # Load Pillow's plugins before any thread decodes: Image.open in one thread may fail to recognize a format
        # while another thread is still loading the plugins.
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

    def header(self, data: bytes) -> ImageHeader:
        """Return an image's header with its upright size; raise RejectedImageError if it is no image or too large."""
        return read_header(data, lambda: io.BytesIO(data), MAX_PIXELS)

    def pixels(self, data: bytes) -> npt.NDArray[np.uint8]:
        """Return an image's pixels, uint8 (h, w, 3), at its own size; raise RejectedImageError if decoding fails."""
        header = self.header(data)
        out = np.empty((header.height, header.width, 3), np.uint8)
        self.decode(data, header.decode_path, out)
        return out

    def _place(self, image: Image.Image, out: npt.NDArray[np.uint8]) -> None:
        # `out` has the size in the image's header; the size in the options is unused.
        if (image.height, image.width) != out.shape[:2]:
            raise RejectedImageError(
                f"its header says {out.shape[0]}x{out.shape[1]}, but the image is {image.height}x{image.width}"
            )
        out[...] = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def is_encoded(dataset: h5py.Dataset) -> bool:
    """Return whether a dataset may hold encoded images: one axis, of variable-length uint8 or int8."""
    base = h5py.check_vlen_dtype(dataset.dtype)
    return dataset.ndim == 1 and isinstance(base, np.dtype) and base in (np.uint8, np.int8)


row_decoder = functools.cache(RowDecoder)
"""Returns this process's decoder, which is thread-safe."""


def decode_rows(path: str, name: str, rows: npt.NDArray[np.int64], encoded: list[bytes], out: npt.NDArray[Any]) -> None:
    """Decode encoded rows into `out`; `path`, `name` and `rows` are used in messages only.

    `out` is either uint8 (n, H, W, 3), or an object array (n,) whose elements become uint8 arrays (h, w, 3) of
    individual sizes. Raises DamagedRowsError if a row cannot be decoded, SizesDifferError if it is not H x W.
    """
    decoder = row_decoder()
    for position, (row, data) in enumerate(zip(rows.tolist(), encoded, strict=True)):
        try:
            if out.dtype == object:
                out[position] = decoder.pixels(data)
                continue
            header = decoder.header(data)
            if (header.height, header.width) != out.shape[1:3]:
                height, width = out.shape[1:3]
                raise SizesDifferError(
                    f"{path}: {name!r} row {row} is {header.height}x{header.width} and row 0 is {height}x{width}, so "
                    "they cannot be batched; give H5Dataset a transform that resizes, and use a DataLoader, or "
                    f"pack the file with 'h5pack convert' and size='{height}x{width}'",
                    path=path,
                    dataset=name,
                    rows=(row,),
                    parameters=(f"size='{height}x{width}'",),
                )
            decoder.decode(data, header.decode_path, out[position])
        except RejectedImageError as error:
            raise DamagedRowsError(
                f"{path}: {name!r} row {row} cannot be decoded ({error}); leave it out with a torch Subset, or pack "
                "the file with 'h5pack convert', which lists such rows",
                path=path,
                dataset=name,
                rows=(row,),
            ) from error


def index_encoded(file: h5py.File, dataset: h5py.Dataset, name: str, *, sized: bool = True) -> ChunkIndex:
    """Return an index that describes a dataset of encoded images as one of pixels, in the size of row 0.

    If `sized` is false, row 0 is not decoded and the size is given as 0 x 0, which suffices for reading the bytes.
    """
    rows = len(dataset)
    height = width = 0
    if rows and sized:
        cell = np.empty(1, dataset.dtype)
        read_rows(dataset, np.zeros(1, np.int64), cell)
        try:
            height, width, _ = row_decoder().pixels(cell[0].tobytes()).shape
        except RejectedImageError as error:
            problem = (
                f"row 0 is not an image that can be decoded ({error}), so the size of the images is unknown; name "
                "another dataset, or repair that row"
            )
            raise dataset_error(file.filename, name, problem, (0,)) from error
    # Chunks hold only references to the images' bytes, so chunk groups are those of a contiguous dataset.
    return ChunkIndex(
        name=name,
        dtype=np.dtype(np.uint8),
        shape=(rows, height, width, 3),
        chunk_rows=dataset.chunks[0] if dataset.chunks else max(1, rows),
        group_rows=contiguous_group_rows(rows, height * width * 3),
        addresses=np.empty(0, np.int64),
        library_reason="its rows are encoded images, decoded as they are read",
        is_encoded=True,
    )
