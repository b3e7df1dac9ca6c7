"""Workers' work: rows read and checked, encoded, and written as image files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.checksum import crc32
from h5pack.decode.images import strict_pillow
from h5pack.errors import RejectedImageError
from h5pack.pack.executors import shared
from h5pack.pack.session import grouped
from h5pack.read.row_decoder import RowDecoder
from h5pack.rows import write_all
from h5pack.sources.catalog import NameTable
from h5pack.sources.hdf5_rows import HDF5RowReader, PixelForm, default_range
from h5pack.tools.export_image import SIGNATURES, encode_jpeg, encode_png

_TASKS_A_WORKER = 16
_TASK_BYTES = 32 * 1024 * 1024


class WholeForm(PixelForm):
    """Pixels for files that can hold them: with their alpha channel, and gray ones of 16 bits as they are."""

    def pixels(self, row: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Pixels of a row, uint8 or uint16 (h, w, 1 to 4).

        Raises
        ------
        RejectedImageError
            If a value lies outside the range.
        """
        image = row if self.keeps_16_bits(row.dtype, row.shape) else self._bytes(row)
        if self.channel_axis == "none":
            return image[:, :, None]
        return image.transpose(1, 2, 0) if self.channel_axis == "first" else image

    def keeps_16_bits(self, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> bool:
        """Whether rows are stored as 16-bit gray."""
        channels = {"none": 1, "first": row_shape[0], "last": row_shape[-1]}[self.channel_axis]
        return dtype.kind == "u" and dtype.itemsize == 2 and channels == 1 and self.value_range is None

    def is_exact(self, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> bool:
        """Whether every value comes back from a PNG as it was."""
        if self.keeps_16_bits(dtype, row_shape) or dtype.kind == "b":
            return True
        bounds = self.value_range or default_range(dtype)
        return (bounds is None and dtype.itemsize == 1) or (bounds == (0.0, 255.0) and dtype.kind in "iu")


@dataclass(frozen=True)
class ExportWork:
    """What all workers of one export share.

    Attributes
    ----------
    reader : HDF5RowReader
    folder : str
        Where the files go.
    format : str
        png or jpeg.
    quality : int
        Of JPEGs.
    """

    reader: HDF5RowReader
    folder: str
    format: str
    quality: int

    def file_bytes(self, index: int, decoder: RowDecoder | None) -> tuple[bytes, bool]:
        """An image's file, and whether it is the row's own bytes.

        An encoded row of the wanted format is copied once it was seen to decode, so that a JPEG stays the JPEG it is.

        Raises
        ------
        RejectedImageError
            If the row cannot be read or decoded, or differs from its checksum.
        """
        if decoder is not None:
            data = self.reader.encoded(index)
            pixels = decoder.pixels(data)
            if data.startswith(SIGNATURES[self.format]):
                return data, True
        else:
            found = self.reader.read(index, "")
            assert isinstance(found, np.ndarray)
            pixels = found
        return encode_png(pixels) if self.format == "png" else encode_jpeg(pixels, self.quality), False


@dataclass(frozen=True)
class ExportTask:
    """Rows for one worker.

    Attributes
    ----------
    indices : ndarray
        int64, (n,): the images' places in the catalog, ascending.
    paths : list of str
        (n,): their files, relative to the folder.
    sizes, checksums : ndarray
        int64, uint32, (n,): what an earlier run wrote; -1 bytes where it wrote nothing.
    """

    indices: npt.NDArray[np.int64]
    paths: list[str]
    sizes: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint32]


@dataclass
class ExportPart:
    """What became of a task.

    Attributes
    ----------
    indices : list of int
        The images that have a file now.
    sizes, checksums : list of int
        Their files' lengths in bytes, and CRC-32s.
    copied, resumed : int
        How many of these are a row's own bytes, and how many an earlier run had written.
    reasons : dict of int to str
        Why others have none.
    """

    indices: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    copied: int = 0
    resumed: int = 0
    reasons: dict[int, str] = field(default_factory=dict)

    def add(self, index: int, size: int, checksum: int) -> None:
        """Note a file."""
        self.indices.append(index)
        self.sizes.append(size)
        self.checksums.append(checksum)


@dataclass(frozen=True)
class WrittenFiles:
    """What is known of each image's file.

    Attributes
    ----------
    sizes : ndarray
        int64, (n,): bytes; -1 where there is none.
    checksums : ndarray
        uint32, (n,): CRC-32s.
    """

    sizes: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint32]

    @classmethod
    def none(cls, count: int) -> WrittenFiles:
        """Of `count` images, none of which has a file."""
        return cls(np.full(count, -1, np.int64), np.zeros(count, np.uint32))

    def note(self, indices: list[int], sizes: list[int], checksums: list[int]) -> None:
        """Take notice of files that were written."""
        self.sizes[indices], self.checksums[indices] = sizes, checksums


def export_tasks(reader: HDF5RowReader, paths: NameTable, before: WrittenFiles, workers: int) -> Iterator[ExportTask]:
    """Cut all images into tasks, in stored order; rows that come with their whole chunk stay together."""
    count = len(paths)
    everything = np.arange(count, dtype=np.int64)
    most = max(1, -(-count // (workers * _TASKS_A_WORKER)))
    most = min(most, max(1, _TASK_BYTES // max(1, reader.index.row_bytes)))
    groups = reader.groups(everything)
    shares = (
        (everything[start : start + most] for start in range(0, count, most))
        if groups is None
        else grouped(everything, groups, most)
    )
    for share in shares:
        yield ExportTask(
            share, [paths[index] for index in share.tolist()], before.sizes[share], before.checksums[share]
        )


def export_rows(task: ExportTask) -> ExportPart:
    """Write the files of a task, but for those that an earlier run wrote and that are still what it wrote.

    Raises
    ------
    OSError
        If a file cannot be written; ENOSPC where the disk is full.
    SourceError
        If the source's storage fails.
    """
    work: ExportWork = shared()
    part = ExportPart()
    todo = []
    for index, path, size, checksum in zip(
        task.indices.tolist(), task.paths, task.sizes.tolist(), task.checksums.tolist(), strict=True
    ):
        if size >= 0 and _holds(f"{work.folder}/{path}", size, checksum):
            part.add(index, size, checksum)
            part.resumed += 1
        else:
            todo.append((index, path))
    work.reader.begin([index for index, _ in todo])
    with strict_pillow():
        decoder = RowDecoder() if work.reader.form is None else None
        for index, path in todo:
            try:
                data, copied = work.file_bytes(index, decoder)
            except RejectedImageError as error:
                part.reasons[index] = str(error)
                continue
            _write(f"{work.folder}/{path}", data)
            part.add(index, len(data), crc32(data))
            part.copied += copied
    return part


def describe(task: ExportTask) -> str:
    """A task in words, for the message when its worker dies."""
    return f"{task.paths[0]!r} and the {len(task.paths) - 1} files behind it"


def _holds(path: str, size: int, checksum: int) -> bool:
    try:
        with open(path, "rb") as stream:
            if os.fstat(stream.fileno()).st_size != size:
                return False
            return crc32(stream.read()) == checksum
    except OSError:
        return False


def _write(path: str, data: bytes) -> None:
    # The export's folder has another name until all is whole, so no file needs one of its own.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, data, 0)
    finally:
        os.close(descriptor)
