"""Encoded images: each row holds the bytes of a JPEG, PNG or other image file.

A dataset of encoded images is read as if it held pixels: RGB, upright, (H, W, 3), where H and W are the size of row 0.
Rows of another size can be read as single samples. They can be batched only if the parameter `decode` of `H5Dataset`
gives all images one size.

A pack stores encoded images in the group `/encoded` (`EncodedIndex`). Their bytes are read directly, if possible. Other
files store encoded images in a dataset, mostly of variable-length uint8 (see `is_encoded`). The HDF5 library reads
their bytes, in one thread at a time. In both cases, `h5pack.images.decode`, which `h5pack convert` also uses, decodes
the images without the GIL, in any number of threads.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from PIL import Image

from h5pack.errors import DamagedRowsError, PackFormatError, RejectedImageError, SizesDifferError
from h5pack.format import schema
from h5pack.images.decode import MAX_PIXELS, Decoder, PixelOptions, read_header
from h5pack.images.headers import ImageHeader, file_format
from h5pack.images.masks import read_mask
from h5pack.read.chunk_decoder import SourceFiles
from h5pack.read.chunk_index import ChunkIndex, contiguous_group_rows
from h5pack.read.hdf5 import (
    VERIFY_ADVICE,
    dataset_error,
    find_item,
    read_offsets,
    read_rows,
    require_dataset,
    require_filters,
    text,
)
from h5pack.read.read_plan import merge_ranges
from h5pack.read.storage import SourceFile, Storage
from h5pack.read.virtual import index_rows
from h5pack.read.virtual_index import VirtualIndex
from h5pack.system.properties import cached_property

_FETCHED_ROWS = 32
"""Number of encoded rows that the HDF5 library fetches at once; few, so that their bytes take little memory."""
FileRow = Callable[[int], tuple[str, int]]
"""`Engine.file_row`, which returns the path of the file that has a row, and the row's number in that file."""


class RowDecoder(Decoder):
    """Decodes images to upright RGB, without resizing them and without changing settings of Pillow.

    `quiet` is as for `Decoder`.
    """

    def __init__(self, quiet: bool = False) -> None:
        # Load Pillow's plugins before any thread decodes. Otherwise, Image.open in one thread might not recognize a
        # format while another thread is still loading the plugins.
        Image.init()
        super().__init__(PixelOptions(0, 0), quiet)

    def header(self, data: bytes) -> ImageHeader:
        """Return an image's header, with its upright size.

        Raises RejectedImageError if `data` is not an image, or if the image is too large.
        """
        return read_header(data, lambda: io.BytesIO(data), MAX_PIXELS)

    def pixels(self, data: bytes) -> npt.NDArray[np.uint8]:
        """Return an image's pixels, uint8 (h, w, 3), at its own size; raise RejectedImageError if decoding fails."""
        header = self.header(data)
        out = np.empty((header.height, header.width, 3), np.uint8)
        self.decode(data, header.decode_path, out)
        return out

    def _place(self, image: Image.Image, out: npt.NDArray[np.uint8]) -> None:
        # `out` has the size in the image's header; the size in the options is unused.
        height, width = out.shape[:2]
        if (image.height, image.width) != (height, width):
            raise RejectedImageError(f"its header says {height}x{width}, but the image is {image.height}x{image.width}")
        out[...] = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def is_encoded(dataset: h5py.Dataset) -> bool:
    """Return whether the rows of a dataset look like encoded images, which is so in two cases:

    - The dataset has one axis, and its rows are variable-length uint8 or int8.
    - All rows have the same length (uint8 on two axes, or opaque values or strings on one axis), and the first row
      begins like a JPEG or PNG file.
    """
    dtype = dataset.dtype
    base = h5py.check_vlen_dtype(dtype)
    if dataset.ndim == 1 and isinstance(base, np.dtype):
        return base in (np.uint8, np.int8)
    is_bytes = (dataset.ndim == 1 and dtype.kind in "SV") or (dataset.ndim == 2 and dtype == np.uint8)
    if not is_bytes or not len(dataset):
        return False
    try:
        require_filters(dataset)
        # Files of some other formats may end with zeros, which h5py drops from strings, like padding.
        return file_format(dataset[0].tobytes()) in ("jpeg", "png")
    except (OSError, PackFormatError):
        return False  # Reading the rows will raise an error with advice.


_decoders = threading.local()


def row_decoder() -> RowDecoder:
    """Return this thread's decoder. Threads must not share a decoder, because it reuses its memory."""
    if not hasattr(_decoders, "own"):
        _decoders.own = RowDecoder()
    own: RowDecoder = _decoders.own
    return own


def decode_rows(
    file_row: FileRow, index: ChunkIndex, rows: npt.NDArray[np.int64], encoded: list[bytes], out: npt.NDArray[Any]
) -> None:
    """Decode `encoded`, the bytes of each row, into `out`; `file_row` and `rows` are used in messages only.

    `out` is either uint8 (n, H, W, 3), or an object array (n,) whose elements become uint8 arrays (h, w, 3) of
    individual sizes. For masks, `out` or its elements have no last axis, and the dtype of `index`. Raises
    DamagedRowsError if a row cannot be decoded. Raises SizesDifferError if `out` is not an object array, and the size
    of a row is not H x W.
    """
    decoder, is_mask = row_decoder(), isinstance(index, EncodedIndex) and index.is_mask
    for position, (row, data) in enumerate(zip(rows.tolist(), encoded, strict=True)):
        with decoding_row(file_row, index.name, row):
            if not is_mask and out.dtype != object:
                header = decoder.header(data)
                _require_size(file_row, index.name, row, (header.height, header.width), out.shape[1:3])
                decoder.decode(data, header.decode_path, out[position])
                continue
            found = read_mask(data, index.native_dtype) if is_mask else decoder.pixels(data)
            if out.dtype != object:
                _require_size(file_row, index.name, row, found.shape, out.shape[1:3])
            out[position] = found


@contextlib.contextmanager
def decoding_row(file_row: FileRow, name: str, row: int) -> Iterator[None]:
    """Turn a RejectedImageError raised in the `with` block into a DamagedRowsError that names the row."""
    try:
        yield
    except RejectedImageError as error:
        path, row = file_row(row)
        advice = "leave it out with a torch Subset, or pack the file with 'h5pack convert', which lists such rows"
        problem = f"{name!r} row {row} cannot be decoded ({error}); {advice}"
        raise DamagedRowsError.at(path, problem, dataset=name, rows=(row,)) from error


def _require_size(file_row: FileRow, name: str, row: int, size: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise SizesDifferError if the `size` of a row, (height, width), differs from `wanted`, the size of row 0."""
    if size != wanted:
        path, row = file_row(row)
        own, first = f"{size[0]}x{size[1]}", f"{wanted[0]}x{wanted[1]}"
        options = "decode=RandomResizedCrop(224)", f"size='{first}'"
        problem = f"image {row} of {name!r} is {own} and the first is {first}, so they cannot be batched"
        advice = f"give {options[0]}, or another crop or Resize, or convert the file with {options[1]}"
        raise SizesDifferError.at(path, f"{problem}; {advice}", *options, dataset=name, rows=(row,))


def index_encoded(file: h5py.File, dataset: h5py.Dataset, name: str, *, sized: bool = True) -> ChunkIndex:
    """Return the index of a dataset of encoded images, with the shape of decoded pixels, (N, H, W, 3).

    H and W are the size of row 0. If `sized` is false, row 0 is not decoded, and H and W are 0, which suffices for
    reading the bytes. Raises PackFormatError if row 0 cannot be decoded.
    """
    rows = len(dataset)
    height = width = 0
    if rows and sized:
        cell = np.empty((1, *dataset.shape[1:]), dataset.dtype)
        read_rows(dataset, np.zeros(1, np.int64), cell)
        try:
            height, width, _ = row_decoder().pixels(cell[0].tobytes()).shape
        except RejectedImageError as error:
            problem = f"row 0 is not an image that can be decoded ({error}), so the size of the images is unknown"
            advice = "name another dataset, or repair that row"
            raise dataset_error(file.filename, name, f"{problem}; {advice}", (0,)) from error
    # Choose chunk groups as in a contiguous dataset, because chunks of variable-length rows hold only references to
    # the rows' bytes.
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


@dataclass(frozen=True, kw_only=True)
class EncodedIndex(ChunkIndex):
    """The locations of the images in a pack's group `/encoded`, or of the masks in a group in `/fields`.

    `data` is the index of the group's dataset `data`, in which each row is one byte. Image i consists of the bytes
    ``offsets[i]`` to ``offsets[i + 1] - 1`` of this dataset.
    """

    offsets: npt.NDArray[np.int64]  # (N + 1,), ascending
    data: ChunkIndex
    image_sizes: npt.NDArray[np.int32]  # (N, 2), height and width in pixels of each upright image
    is_mask: bool = False

    @cached_property
    def has_one_size(self) -> bool:
        """Whether all images have the height and the width of image 0."""
        return bool((self.image_sizes == self.image_sizes[:1]).all())

    @property
    def raw(self) -> bool:
        """Always false, because rows must be decoded."""
        return False

    @property
    def files(self) -> frozenset[SourceFile]:
        return self.data.files

    @cached_property
    def base(self) -> int | None:
        """Byte offset in the file at which the bytes of `data` begin.

        None if `data` is virtual, is compressed, or does not have all bytes in one contiguous range of the file.
        """
        if isinstance(self.data, VirtualIndex) or self.library_reason is not None:
            return None
        starts = self.data.addresses
        return int(starts[0]) if len(starts) and (np.diff(starts) == self.data.chunk_rows).all() else None

    def reads(self, rows: npt.NDArray[np.int64]) -> Iterator[tuple[slice, int, int]]:
        """Divide ascending rows, int64 (n,), into reads; for each read, yield (slice of `rows`, start, stop).

        A read covers the bytes `start` to `stop` - 1 of the data. These may include small gaps between the rows.
        """
        starts, ends = self.offsets[rows], self.offsets[rows + 1]
        for low, high in merge_ranges(starts, ends):
            yield slice(low, high), int(starts[low]), int(ends[high - 1])

    def extents(self, start: int, stop: int) -> Iterator[tuple[int | None, int, int]]:
        """Yield the extents that store the bytes `start` to `stop` - 1 of the data.

        An extent is (source, byte offset, number of bytes). The source is an index in `VirtualIndex.sources`, or None
        if the data is not virtual. The offset is that in the source's file, or in the dataset's own file.
        """
        if start == stop:
            return
        if self.base is not None:
            yield None, self.base + start, stop - start
            return
        ranges = self.data.ranges(start, stop)
        virtual = isinstance(self.data, VirtualIndex)
        sources = ranges.source_ids.tolist() if virtual else [None] * len(ranges.firsts)
        sizes = np.diff(np.append(ranges.firsts, stop)).tolist()
        yield from zip(sources, ranges.addresses.tolist(), sizes, strict=True)

    def read_into(
        self, storage_of: Callable[[int | None], Storage], out: npt.NDArray[np.uint8], start: int,
        rows: npt.NDArray[np.int64],
    ) -> int:  # fmt: skip
        """Fill `out`, uint8 (n,), with the bytes of `data` from byte `start` on; return the number of system calls.

        `rows` is used in messages only. Errors are those of `Storage.scatter`.
        """
        done = calls = 0
        for source, offset, count in self.extents(start, start + len(out)):
            part = out[done : done + count]
            calls += storage_of(source).read_into(part, offset, lambda _: self.describe(rows, 0))
            done += count
        return calls


def encoded_rows(
    files: SourceFiles, index: ChunkIndex, rows: npt.NDArray[np.int64]
) -> Iterator[tuple[slice, list[bytes], int]]:
    """Read the bytes of ascending rows; for each read, yield (slice of `rows`, bytes of each row, call count)."""
    if not isinstance(index, EncodedIndex):
        for first in range(0, len(rows), _FETCHED_ROWS):
            part = slice(first, first + _FETCHED_ROWS)
            yield part, *files.own.reader.read_bytes(index.name, rows[part])
        return
    for part, start, stop in index.reads(rows):
        if index.library_reason is None:
            data = np.empty(stop - start, np.uint8)
            calls = index.read_into(partial(files.storage, index.data), data, start, rows[part])
        else:
            runs = index.data.split_by_source(np.arange(start, stop))
            read = [files.decoder(file).read_through_library(source, there) for file, source, there in runs]
            data = np.concatenate([np.empty(0, np.uint8), *(one.values for one in read)])
            calls = sum(one.calls for one in read)
        edges = (index.offsets[rows[part, None] + [0, 1]] - start).tolist()
        yield part, [data[first:last].tobytes() for first, last in edges], calls


def has_kept_images(file: h5py.File, name: str) -> bool:
    """Return whether `name` is the group `/encoded` of a pack that keeps JPEG files."""
    return name == schema.ENCODED and isinstance(find_item(file, name), h5py.Group)


def is_mask_group(file: h5py.File, name: str) -> bool:
    """Return whether `name` is the group of a mask field, whose masks are stored as PNG files."""
    group = find_item(file, name)
    return isinstance(group, h5py.Group) and text(group.attrs.get(schema.KIND, b"")) == schema.MASK


def index_kept(file: h5py.File, name: str = schema.ENCODED, *, sized: bool = True) -> EncodedIndex:
    """Return the index of the group `/encoded` or a mask field; raise PackFormatError if its datasets do not match.

    If `sized` is false, height and width in `shape` are 0, which suffices for reading the bytes.
    """
    data_name = f"{name}/data"
    data, sizes = require_dataset(file, data_name), require_dataset(file, schema.ENCODED_SIZE)
    if data.ndim != 1 or data.dtype != np.uint8:
        problem = f"is {data.dtype} {data.shape}, but encoded images are uint8 on one axis; {VERIFY_ADVICE}"
        raise dataset_error(file.filename, data_name, problem)
    offsets = read_offsets(file, f"{name}/offsets", data, "bytes")
    rows = len(offsets) - 1
    if sizes.shape != (rows, 2) or sizes.dtype.kind not in "iu":
        if name != schema.ENCODED and sizes.ndim == 2 and len(sizes) != rows:
            raise dataset_error(file.filename, name, f"has {rows:,} rows for {len(sizes):,} images; {VERIFY_ADVICE}")
        problem = f"is {sizes.dtype} {sizes.shape}, not int32 ({rows}, 2); {VERIFY_ADVICE}"
        raise dataset_error(file.filename, schema.ENCODED_SIZE, problem)
    height = width = pixel_bytes = 0
    if rows and sized:
        pixels = sizes[()].astype(np.int64)
        height, width = (int(side) for side in pixels[0])
        areas = np.prod(np.clip(pixels, 1, MAX_PIXELS), axis=1)
        impossible = np.flatnonzero((pixels < 1).any(axis=1) | (areas > MAX_PIXELS))
        if len(impossible):
            row = int(impossible[0])
            problem = f"gives row {row} the impossible size {pixels[row, 0]}x{pixels[row, 1]}; {VERIFY_ADVICE}"
            raise dataset_error(file.filename, schema.ENCODED_SIZE, problem, (row,))
        # Use the mean size, because row 0 may be unusually small or large.
        pixel_bytes = int(areas.sum()) * 3 // rows
    bytes_index = index_rows(file, data, data_name)
    reason = bytes_index.library_text
    if reason is None and not (bytes_index.raw and bytes_index.complete):
        reason = "its bytes are compressed, or not all of them are stored"
    group_rows = contiguous_group_rows(rows, pixel_bytes)
    is_mask = name != schema.ENCODED
    return EncodedIndex(
        name=name,
        dtype=np.dtype(_mask_dtype(file, name) if is_mask else np.uint8),
        shape=(rows, height, width) if is_mask else (rows, height, width, 3),
        is_mask=is_mask,
        chunk_rows=group_rows,
        group_rows=group_rows,
        addresses=np.empty(0, np.int64),
        library_reason=reason,
        is_encoded=True,
        offsets=offsets,
        data=bytes_index,
        image_sizes=sizes[()].astype(np.int32, copy=False),
    )


def _mask_dtype(file: h5py.File, name: str) -> str:
    dtype = text(file[name].attrs.get(schema.DTYPE, b""))
    if dtype not in ("uint8", "int32"):
        problem = f"has masks of the dtype {dtype!r}, not uint8 or int32; use a newer h5pack, or convert again"
        raise dataset_error(file.filename, name, problem)
    return dtype
