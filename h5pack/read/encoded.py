"""Rows that are encoded images: each the bytes of a JPEG, PNG or other file, in a variable-length dataset of uint8.

Such a dataset is read as if it held pixels: RGB, upright, (H, W, 3). H and W are row 0's; rows of another size can be
had one by one, but make no batch. The bytes are fetched through the HDF5 library, one thread at a time, and decoded by
the decoder that packs images (`h5pack.decode.images`), in any number of threads: the decoders release the GIL.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.errors import DamagedRowsError, PackFormatError, RejectedImageError, SizesDifferError
from h5pack.hdf5 import is_filtered
from h5pack.layout import CachePlan, plan_cache
from h5pack.read.chunk_index import ChunkIndex, contiguous_unit_rows

if TYPE_CHECKING:
    from h5pack.read.row_decoder import RowDecoder

REASON = "its rows are encoded images, decoded as they are read"
"""Why such a dataset comes through the HDF5 library."""


def is_encoded(dataset: h5py.Dataset) -> bool:
    """Whether a dataset has one axis, of variable-length uint8 or int8."""
    base = h5py.check_vlen_dtype(dataset.dtype)
    return dataset.ndim == 1 and isinstance(base, np.dtype) and base in (np.uint8, np.int8)


def holds_encoded(index: ChunkIndex) -> bool:
    """Whether a dataset's rows are encoded images."""
    return index.reason == REASON


def fetch_bytes(dataset: h5py.Dataset, first: int, count: int) -> list[bytes]:
    """The bytes of consecutive rows, in one call of the library.

    Parameters
    ----------
    dataset : h5py.Dataset
        For which `is_encoded` holds.
    first, count : int

    Raises
    ------
    PackFormatError
        If HDF5 cannot read them.
    """
    space = dataset.id.get_space()
    space.select_hyperslab((first,), (count,))
    cells = np.empty(count, dataset.dtype)
    try:
        dataset.id.read(h5py.h5s.create_simple((count,)), space, cells)
    except (OSError, RuntimeError, ValueError) as error:
        name, last = dataset.name.lstrip("/"), first + count - 1
        rows = f"row {first}" if count == 1 else f"rows {first}-{last}"
        raise PackFormatError(
            f"{dataset.file.filename}: {name!r} {rows} cannot be read ({error}); the file is damaged: restore it"
        ) from error
    return [cell.tobytes() for cell in cells]


@functools.cache
def row_decoder() -> RowDecoder:
    """This process's decoder; any number of threads may use it."""
    # Pillow is loaded only where rows are decoded.
    from h5pack.read.row_decoder import RowDecoder

    return RowDecoder()


def decode_rows(path: str, name: str, rows: npt.NDArray[np.int64], encoded: list[bytes], out: npt.NDArray[Any]) -> None:
    """Decode rows to their places.

    Parameters
    ----------
    path, name : str
        Of the file and the dataset, for messages.
    rows : ndarray
        int64, (n,): their numbers, for messages.
    encoded : list of bytes
        (n,).
    out : ndarray
        uint8, (n, H, W, 3); or of objects, (n,): each is given an array uint8 (h, w, 3) of its own.

    Raises
    ------
    DamagedRowsError
        If a row cannot be decoded.
    SizesDifferError
        If a row's image is not H x W.
    """
    decoder = row_decoder()
    for place, (row, data) in enumerate(zip(rows.tolist(), encoded, strict=True)):
        try:
            if out.dtype == object:
                out[place] = decoder.pixels(data)
                continue
            header = decoder.header(data)
            if (header.height, header.width) != out.shape[1:3]:
                raise SizesDifferError(_other_size(path, name, row, (header.height, header.width), out.shape[1:3]))
            decoder.decode(data, header.kind, out[place])
        except RejectedImageError as error:
            raise DamagedRowsError(
                f"{path}: {name!r} row {row} cannot be decoded ({error}); leave it out with a torch Subset, or with "
                f"'h5pack convert {path} packed.h5 --images {name}', which lists such rows",
                (row,),
            ) from error


def _other_size(path: str, name: str, row: int, size: tuple[int, ...], first: tuple[int, ...]) -> str:
    height, width = first
    return (
        f"{path}: {name!r} row {row} is {size[0]}x{size[1]} and row 0 is {height}x{width}, so that they make no batch; "
        "give H5Dataset a transform that resizes, and use a DataLoader, or run "
        f"'h5pack convert {path} packed.h5 --images {name} --size {height}x{width}'"
    )


def index_encoded(file: h5py.File, dataset: h5py.Dataset, name: str, *, sized: bool = True) -> ChunkIndex:
    """Describe a dataset of encoded images as one of pixels, at the size of row 0.

    Parameters
    ----------
    file : h5py.File
    dataset : h5py.Dataset
        For which `is_encoded` holds.
    name : str
        By which it was asked for.
    sized : bool
        False: do not look at row 0, and give images 0 x 0 pixels, for who reads their bytes only.

    Raises
    ------
    PackFormatError
        If row 0 cannot be read, or is no image.
    """
    rows = len(dataset)
    height = width = 0
    if rows and sized:
        (data,) = fetch_bytes(dataset, 0, 1)
        try:
            height, width, _ = row_decoder().pixels(data).shape
        except RejectedImageError as error:
            raise PackFormatError(
                f"{file.filename}: {name!r} row 0 is no image that can be decoded ({error}), so that the size of the "
                "images is unknown; name another dataset, or mend that row"
            ) from error
    shape = rows, height, width, 3
    # Chunks hold only references to the images, so they say nothing of which rows to keep together.
    return ChunkIndex(
        name=name,
        dtype=np.dtype(np.uint8),
        shape=shape,
        chunk_rows=dataset.chunks[0] if dataset.chunks else max(1, rows),
        unit_rows=contiguous_unit_rows(rows, height * width * 3),
        addresses=np.empty(0, np.int64),
        reason=REASON,
    )


def reference_cache(dataset: h5py.Dataset) -> CachePlan | None:
    """A chunk cache that suits a dataset for which `is_encoded` holds; None where it has no chunks."""
    if dataset.chunks is None:
        return None
    # A reference has 16 bytes in the file; NumPy's itemsize is that of a pointer.
    size = dataset.id.get_type().get_size()
    return plan_cache(dataset.shape, dataset.chunks, size, filtered=is_filtered(dataset))
