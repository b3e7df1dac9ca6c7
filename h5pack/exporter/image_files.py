"""Exported image files: conversion of rows to pixels, and the worker function that writes, keeps or checks files."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from h5pack.errors import RejectedImageError
from h5pack.images.decode import strict_pillow
from h5pack.images.encode import SIGNATURES, encode_jpeg, encode_png
from h5pack.pack.writer import join_groups
from h5pack.read.encoded import RowDecoder
from h5pack.sources.catalog import NameTable
from h5pack.sources.hdf5_rows import HDF5RowReader, PixelForm, default_range
from h5pack.system.files import write_all
from h5pack.system.processes import shared

_TASKS_PER_WORKER = 16
_TASK_BYTES = 32 * 1024 * 1024
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"


class ExportForm(PixelForm):
    """A conversion of rows to the pixels of PNG files, which keeps the alpha channel and 16-bit gray values."""

    def pixels(self, row: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the pixels of a row, uint8 or uint16 (h, w, 1 to 4).

        Raises
        ------
        RejectedImageError
            If a value is outside `value_range`.
        """
        image = row if self.keeps_16_bits(row.dtype, row.shape) else self._bytes(row)
        if self.channel_axis == "none":
            return image[:, :, None]
        return image.transpose(1, 2, 0) if self.channel_axis == "first" else image

    def keeps_16_bits(self, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> bool:
        """Return whether rows of this dtype and shape become 16-bit gray images; all others get 8 bits per channel."""
        channels = {"none": 1, "first": row_shape[0], "last": row_shape[-1]}[self.channel_axis]
        return dtype.kind == "u" and dtype.itemsize == 2 and channels == 1 and self.value_range is None

    def is_exact(self, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> bool:
        """Return whether a PNG preserves every value of such rows exactly."""
        if self.keeps_16_bits(dtype, row_shape) or dtype.kind == "b":
            return True
        bounds = self.value_range or default_range(dtype)
        return (bounds is None and dtype.itemsize == 1) or (bounds == (0.0, 255.0) and dtype.kind in "iu")


@dataclass(frozen=True)
class ExportWork:
    """The settings that all worker processes of an export share.

    Attributes
    ----------
    reader : HDF5RowReader
    folder : str
    format : str
        "png" or "jpeg".
    quality : int
        JPEG quality.
    keep : bool
        Keep existing files that already hold the pixels of their rows.
    check_only : bool
        Write nothing; count the files that are missing or differ.
    """

    reader: HDF5RowReader
    folder: str
    format: str
    quality: int
    keep: bool
    check_only: bool


@dataclass(frozen=True)
class ExportTask:
    """The rows of one task: their indices in the catalog, int64 (n,), ascending, and their relative file paths."""

    indices: npt.NDArray[np.int64]
    paths: list[str]


@dataclass
class TaskResults:
    """The outcome for the rows of a task.

    Attributes
    ----------
    sizes : dict of int to int
        Size of each row's file in bytes, by the row's index in the catalog.
    reasons : dict of int to str
        For each row that could not be exported, why, by the row's index.
    resumed : int
        Number of files kept from an earlier run.
    copied : int
        Number of rows that hold an encoded image of the export's format, whose bytes are used unchanged.
    differing : int
        With `check_only`, the number of files that are missing or differ.
    """

    sizes: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    resumed: int = 0
    copied: int = 0
    differing: int = 0


def export_tasks(reader: HDF5RowReader, paths: NameTable, num_workers: int) -> Iterator[ExportTask]:
    """Divide all rows into tasks, in stored order. Rows of the same chunk group stay in one task."""
    count = len(paths)
    everything = np.arange(count, dtype=np.int64)
    max_rows = max(1, -(-count // (num_workers * _TASKS_PER_WORKER)))
    max_rows = min(max_rows, max(1, _TASK_BYTES // max(1, reader.index.row_bytes)))
    groups = reader.groups(everything)
    shares = (
        (everything[start : start + max_rows] for start in range(0, count, max_rows))
        if groups is None
        else join_groups(everything, groups, max_rows)
    )
    for share in shares:
        yield ExportTask(share, [paths[index] for index in share.tolist()])


def export_rows(task: ExportTask) -> TaskResults:
    """Write, keep or check the files of a task, in a worker process.

    Raises
    ------
    OSError
        If a file cannot be written; its `errno` is ENOSPC if the disk is full.
    SourceError
        If reading the source fails with an I/O error.
    """
    work: ExportWork = shared()
    results = TaskResults()
    work.reader.begin(task.indices.tolist())
    with strict_pillow():
        decoder = RowDecoder() if work.reader.form is None else None
        for index, name in zip(task.indices.tolist(), task.paths, strict=True):
            path = f"{work.folder}/{name}"
            try:
                _export_row(work, index, path, decoder, results)
            except RejectedImageError as error:
                results.reasons[index] = str(error)
                if work.keep and not work.check_only:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
    return results


def _export_row(work: ExportWork, index: int, path: str, decoder: RowDecoder | None, results: TaskResults) -> None:
    """Write the file of a row unless it already holds the row's pixels; raise RejectedImageError for a damaged row.

    If the row is an encoded image of the right format, its bytes are copied after a test that they decode. A JPEG
    is thus not compressed a second time.
    """
    data = None
    if decoder is None:
        pixels: Any = work.reader.read(index, "")
    else:
        encoded = work.reader.encoded(index)
        pixels = decoder.pixels(encoded)
        if encoded.startswith(SIGNATURES[work.format]):
            data = encoded
            results.copied += 1
    if data is None and work.format == "jpeg":
        # JPEG is lossy, so an existing JPEG is compared with these bytes, not with the row's pixels.
        data = encode_jpeg(pixels, work.quality)
    existing = _read_file(path) if work.keep else None
    if existing is not None and (existing == data if data is not None else _shows(existing, pixels)):
        results.resumed += 1
        results.sizes[index] = len(existing)
    elif work.check_only:
        results.differing += 1
    else:
        data = encode_png(pixels) if data is None else data
        _write_file(path, data)
        results.sizes[index] = len(data)


def describe(task: ExportTask) -> str:
    """Return a description of a task's files for the error message if its worker process dies."""
    return f"{task.paths[0]!r} and the {len(task.paths) - 1} files after it"


def _read_file(path: str) -> bytes | None:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError:
        return None


def _shows(data: bytes, pixels: npt.NDArray[Any]) -> bool:
    """Return whether a PNG file is complete and holds exactly these pixels, (h, w, c)."""
    # Pillow accepts a file that was truncated after its last pixel, for example because its writer was killed.
    if not data.endswith(_PNG_END):
        return False
    try:
        with Image.open(io.BytesIO(data)) as image:
            found = np.asarray(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False
    found = found if found.ndim == 3 else found[:, :, None]
    return found.dtype.itemsize == pixels.dtype.itemsize and np.array_equal(found, pixels)


def _write_file(path: str, data: bytes) -> None:
    # The whole folder has a temporary name until the export is complete, so its files do not need temporary names.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, data, 0)
    finally:
        os.close(descriptor)
