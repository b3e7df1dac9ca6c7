"""Image files of an export: selecting rows, converting their pixels, encoding them in worker processes."""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from h5pack.errors import NoImagesError, OptionsError, RejectedImageError
from h5pack.images.decode import image_of, strict_pillow, upright_of
from h5pack.images.encode import save_jpeg
from h5pack.images.headers import ORIENTATION_TAG, file_format, orientation_of
from h5pack.images.masks import as_stored, gray_mask, naming_mask
from h5pack.pack.writer import join_groups
from h5pack.read.encoded import RowDecoder
from h5pack.sources.catalog import Catalog, NameFilter, NameTable
from h5pack.sources.hdf5_catalog import HDF5Datasets, hdf5_catalog
from h5pack.sources.hdf5_rows import HDF5RowReader, PixelForm, default_range
from h5pack.system.files import write_all
from h5pack.system.parameters import texts
from h5pack.system.processes import shared
from h5pack.system.text import one_of, splits_text

SUFFIXES = {"png": (".png",), "jpeg": (".jpg", ".jpeg", ".jpe", ".jfif")}
"""File name suffixes of each format. A name with none of them gets the first one."""

_TASKS_PER_WORKER = 16
_TASK_BYTES = 32 * 1024 * 1024
_PNG = {"compress_level": 1, "compress_type": zlib.Z_RLE}
_PLAIN_CHROMA_QUALITY = 90
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"


@dataclass(frozen=True)
class MissingRow:
    """A row that could not be exported or shown."""

    row: int  # row number in the file
    name: str  # the stored name; if there is none, the dataset path and row number
    reason: str  # message of the error


@dataclass(frozen=True)
class SourceRows:
    """The selected rows of an HDF5 file with their names, labels and splits; no pixels have been read yet."""

    catalog: Catalog  # the rows in stored order
    reader: HDF5RowReader
    rows: npt.NDArray[np.int64]  # (n,), row numbers in the file
    has_names: bool  # False if the file stores no names, so that the catalog's names are made from row numbers

    def __len__(self) -> int:
        return len(self.rows)


def open_rows(
    path: str | os.PathLike[str], datasets: HDF5Datasets, splits: str | Sequence[str] = (), limit: int | None = None
) -> SourceRows:
    """Select the rows of `splits` (default: all) in an HDF5 file.

    If there are more than `limit` of these rows, select `limit` evenly spaced ones.
    """
    splits = texts("splits", splits)
    catalog = hdf5_catalog(Path(os.fsdecode(path)), datasets, NameFilter())
    unknown = [name for name in splits if name not in catalog.split_names]
    if unknown:
        known = splits_text(catalog.split_names)
        raise OptionsError.at(path, f"no split {unknown[0]!r}; {known}", f"splits={unknown[0]!r}")
    if splits:
        catalog = _only_splits(catalog, splits)
    if limit is not None:
        catalog = catalog.evenly_spaced(limit)
    if not len(catalog):
        where = f" in its splits {', '.join(map(repr, splits))}" if splits else ""
        raise NoImagesError.at(path, f"no rows{where}; run 'h5pack info' to list the file's contents")
    reader = catalog.reader
    assert isinstance(reader, HDF5RowReader)
    rows = np.arange(len(catalog), dtype=np.int64) if reader.rows is None else reader.rows
    named = zip(rows.tolist(), catalog.names, strict=True)
    has_names = any(name != f"{reader.images}/{row:08d}" for row, name in named)
    return SourceRows(catalog, reader, rows, has_names)


def _only_splits(catalog: Catalog, wanted: Sequence[str]) -> Catalog:
    kept = [number for number, name in enumerate(catalog.split_names) if name in wanted]
    found = catalog.take(np.flatnonzero(np.isin(catalog.split_ids, kept)))
    names = tuple(catalog.split_names[number] for number in kept)
    return replace(found, split_names=names, split_ids=np.searchsorted(kept, found.split_ids).astype(np.int32))


class ExportForm(PixelForm):
    """A conversion of rows to the pixels of PNG files. It keeps an alpha channel.

    If no `value_range` is given, it also keeps all 16 bits of gray uint16 values.
    """

    def pixels(self, row: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a row's pixels, uint8 or uint16 (h, w, 1 to 4). Values out of range raise a RejectedImageError."""
        image = row if self.keeps_16_bits(row.dtype, row.shape) else self._bytes(row)
        if self.channel_axis == "none":
            return image[:, :, None]
        return image.transpose(1, 2, 0) if self.channel_axis == "first" else image

    def keeps_16_bits(self, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> bool:
        """Return whether rows of this dtype and shape become 16-bit gray images; all others get 8 bits per channel."""
        gray = self.channels(row_shape) == 1 and self.value_range is None
        return gray and dtype.kind == "u" and dtype.itemsize == 2

    def is_exact(self, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> bool:
        """Return whether PNG files preserve every value of rows of this dtype and shape."""
        if self.keeps_16_bits(dtype, row_shape) or dtype.kind == "b":
            return True
        bounds = self.value_range or default_range(dtype)
        return (bounds is None and dtype.itemsize == 1) or (bounds == (0.0, 255.0) and dtype.kind in "iu")


@dataclass(frozen=True)
class ExportWork:
    """The settings that all worker processes of an export share."""

    reader: HDF5RowReader
    folder: str  # path of the folder in which the files are written
    format: str  # one of `SUFFIXES`
    quality: int  # of JPEG files, 1 to 100
    keep: bool  # whether to keep existing files that already hold the pixels of their rows
    check_only: bool = False  # whether to write nothing, and only count files that are missing or differ

    def is_copied(self, encoded: bytes) -> bool:
        """Return whether the bytes of an encoded row are written unchanged, because they have the export's format."""
        return file_format(encoded) == self.format


@dataclass(frozen=True)
class ExportTask:
    """The rows that one call of `export_rows` exports."""

    indices: npt.NDArray[np.int64]  # (n,), indices of the rows in the catalog, ascending
    paths: list[tuple[str, ...]]  # for each row: the paths of its image, masks and further images in the folder

    def __str__(self) -> str:
        return one_of(len(self.paths), repr(self.paths[0][0]))


@dataclass
class ExportResults:
    """The outcome for the rows of a task, or of all tasks."""

    rows: int = 0
    bytes: int = 0  # total size of the files
    reasons: dict[int, str] = field(default_factory=dict)  # why a row has no file, by the row's index in the catalog
    parameters: tuple[str, ...] = ()  # parameters named by the first RejectedImageError that names any
    resumed: int = 0  # number of images kept from an earlier run
    copied: int = 0  # number of rows already stored in the export's format, whose bytes are written unchanged
    differing: int = 0  # number of files that are missing or differ, if `check_only` is true

    def add(self, other: ExportResults) -> None:
        """Add the outcome of further rows."""
        self.rows += other.rows
        self.bytes += other.bytes
        self.reasons.update(other.reasons)
        self.parameters = self.parameters or other.parameters
        self.resumed += other.resumed
        self.copied += other.copied
        self.differing += other.differing


def export_tasks(reader: HDF5RowReader, files: Sequence[NameTable], num_workers: int) -> Iterator[ExportTask]:
    """Divide all rows into tasks, in stored order. Rows whose chunks are read together stay in one task.

    The first table in `files` has the path of each row's image. There is one more table for each field of masks or
    further images, with the path of each row's mask or further image.
    """
    count = len(files[0])
    everything = np.arange(count, dtype=np.int64)
    max_rows = max(1, -(-count // (num_workers * _TASKS_PER_WORKER)))
    max_rows = min(max_rows, max(1, _TASK_BYTES // max(1, reader.index.row_bytes)))
    groups = reader.groups(everything)
    for share in join_groups(everything, everything if groups is None else groups, max_rows):
        yield ExportTask(share, list(zip(*(table.at(share) for table in files), strict=True)))


def export_rows(task: ExportTask) -> ExportResults:
    """Write, keep or check the files of a task (see `_store`), in a worker process."""
    work: ExportWork = shared()
    results = ExportResults(len(task.paths))
    work.reader.announce(task.indices.tolist())
    with strict_pillow():
        decoder = RowDecoder(quiet=True) if work.reader.index.is_encoded else None
        for index, names in zip(task.indices.tolist(), task.paths, strict=True):
            path, *masks = paths = [f"{work.folder}/{name}" for name in names]
            own = ExportResults()
            try:
                # An image whose mask cannot be read is left out, and so are the masks of a damaged image.
                for number, mask in enumerate(masks):
                    with naming_mask(names[number + 1], "mask or further image"):
                        _export_field(work, number, index, mask, own)
                _export_row(work, index, path, decoder, own)
                results.add(own)
            except RejectedImageError as error:
                results.reasons[index] = str(error)
                results.parameters = results.parameters or error.parameters
                for written in () if work.check_only else paths:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(written)
    return results


def _export_row(work: ExportWork, index: int, path: str, decoder: RowDecoder | None, results: ExportResults) -> None:
    """Write the file of a row, or with `work.check_only`, compare it; raise RejectedImageError for a damaged row.

    If the row is an encoded image of the export's format, its bytes are copied, so that a JPEG is not compressed again.
    If the file has no checksums with which the reader compares these bytes, they are decoded to find damage.
    """
    data: bytes | None = None
    pixels: Any = None
    if decoder is None:
        pixels = work.reader.read(index, "")
    else:
        encoded = work.reader.encoded(index)
        data = encoded if work.is_copied(encoded) else None
        if data is None or not work.reader.has_checksums:
            pixels = decoder.pixels(encoded)
        results.copied += data is not None
    if data is None and work.format == "jpeg":
        # JPEG is lossy, so an existing file is compared with these bytes, not with the row's pixels.
        data = encode_jpeg(pixels, work.quality)
    results.resumed += _store(work, path, pixels, data, results)


def _export_field(work: ExportWork, number: int, index: int, path: str, results: ExportResults) -> None:
    """Write, keep or check the file of a row's mask or further image (see `_store`).

    uint8 masks become 8-bit PNG files, other masks become 16-bit PNG files. Further images get the export's format.
    """
    pixels = work.reader.read_field(number, index, path)
    data = None
    if pixels.ndim == 2:
        orientation = 1
        if work.reader.index.is_encoded and work.is_copied(encoded := work.reader.encoded(index)):
            # The image file keeps its Exif orientation. Give the mask the same, because `convert` applies it to both.
            orientation = upright_of(encoded).orientation
        pixels = gray_mask(as_stored(pixels, orientation))[:, :, None]
        data = None if orientation == 1 else encode_png(pixels, orientation)
    elif work.format == "jpeg":
        data = encode_jpeg(pixels, work.quality)
    _store(work, path, pixels, data, results)


def _store(work: ExportWork, path: str, pixels: Any, data: bytes | None, results: ExportResults) -> bool:
    """Write `data` to the file at `path` or, if `data` is None, write `pixels` as PNG. Return whether a file was kept.

    If `work.keep` is true and the file already has these contents, keep it and return True. If `work.check_only` is
    true, do not write the file, but add 1 to `results.differing`.
    """
    if work.keep:
        with contextlib.suppress(OSError):
            existing = Path(path).read_bytes()
            if existing == data if data is not None else _shows(existing, pixels):
                results.bytes += len(existing)
                return True
    if work.check_only:
        results.differing += 1
    else:
        data = encode_png(pixels) if data is None else data
        _write_file(path, data)
        results.bytes += len(data)
    return False


def _shows(data: bytes, pixels: npt.NDArray[Any]) -> bool:
    """Return whether a PNG file is complete and holds exactly these pixels, (h, w, c)."""
    # Pillow accepts a file that was truncated after its last pixel, for example because its writer was killed.
    if not data.endswith(_PNG_END):
        return False
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if image.mode == "P" or orientation_of(image) != 1:
                return False
            found = np.asarray(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False
    found = found if found.ndim == 3 else found[:, :, None]
    # Compare only whether both dtypes are uint8: Pillow opens a 16-bit PNG file as uint16 or int32, by its version.
    return (found.dtype == np.uint8) == (pixels.dtype == np.uint8) and np.array_equal(found, pixels)


def _write_file(path: str, data: bytes) -> None:
    # The folder has a temporary name until the export is complete, so its files need no temporary names.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, data, 0)
    finally:
        os.close(descriptor)


def encode_png(pixels: npt.NDArray[Any], orientation: int = 1) -> bytes:
    """Return pixels (h, w, c) encoded as PNG: uint8 gray, gray with alpha, RGB or RGBA, or uint16 gray.

    An Exif `orientation` other than 1 is stored in the file.

    zlib's level 1 with the RLE strategy is used because it is fast: one thread encodes 380 images/s of 218x178 pixels.
    Level 1 alone encodes 310 images/s. The default level 6 encodes 110 images/s, into 3 % smaller files than RLE.
    """
    stream, exif = io.BytesIO(), Image.Exif()
    if orientation != 1:
        exif[ORIENTATION_TAG] = orientation
    image_of(pixels).save(stream, "PNG", exif=exif, **_PNG)
    return stream.getvalue()


def encode_jpeg(pixels: npt.NDArray[np.uint8], quality: int) -> bytes:
    """Return pixels, uint8 (h, w, 1 or 3), encoded as JPEG; below quality 90, chroma is subsampled (4:2:0)."""
    # Pillow's subsampling 0 is 4:4:4, and 2 is 4:2:0.
    return save_jpeg(image_of(pixels), quality=quality, subsampling=0 if quality >= _PLAIN_CHROMA_QUALITY else 2)
