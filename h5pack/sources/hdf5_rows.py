"""Rows of an HDF5 file as images. Encoded images are kept; numbers become uint8 pixels with the channels last."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import DamagedRowsError, PackFormatError, RejectedImageError
from h5pack.format import schema
from h5pack.images.decode import read_header
from h5pack.images.masks import narrow_mask, read_mask
from h5pack.read.description import FileDescription
from h5pack.read.engine import Engine
from h5pack.read.storage import SourceFile
from h5pack.sources.reader import SourceReader, SurveyedImage, fingerprint

CHANNEL_AXES = ("last", "first", "none")
_BATCH_BYTES = 16 * 1024 * 1024
_HELD_BYTES = 128 * 1024 * 1024  # of rows that are read at once because they are in many chunks


@dataclass(frozen=True)
class PixelForm:
    """The conversion of a row's numbers to pixels.

    If `value_range` is None, `default_range` of the dtype is used. If that is also None, uint8 values are kept, False
    and True become 0 and 255, and uint16 values are replaced by their high bytes.
    """

    channel_axis: str  # "last" (H, W, C), "first" (C, H, W) or "none" (H, W)
    value_range: tuple[float, float] | None = None  # the values mapped to 0 and 255

    def size(self, row_shape: tuple[int, ...]) -> tuple[int, int]:
        """Return height and width of a row, in pixels."""
        return row_shape[-2:] if self.channel_axis != "last" else row_shape[:2]  # type: ignore[return-value]

    def channels(self, row_shape: tuple[int, ...]) -> int:
        """Return the number of channels of a row."""
        return {"none": 1, "first": row_shape[0], "last": row_shape[-1]}[self.channel_axis]

    def pixels(self, row: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Return the pixels of a row, uint8 (h, w, 1 or 3), possibly a view of the row; an alpha channel is dropped.

        Raise RejectedImageError if a value is NaN or outside the range.
        """
        image = self._bytes(row)
        if self.channel_axis == "none":
            return image[:, :, None]
        if self.channel_axis == "first":
            image = image.transpose(1, 2, 0)
        return image[:, :, : image.shape[2] - 1] if image.shape[2] in (2, 4) else image

    def _bytes(self, row: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        bounds = self.value_range or default_range(row.dtype)
        if bounds is None:
            if row.dtype == np.bool_:
                row = row.view(np.uint8) * np.uint8(255)
            elif row.dtype != np.uint8:
                row = (row >> 8).astype(np.uint8)
            return row
        low, high = bounds
        lowest, highest = row.min(), row.max()
        # The condition is negated so that NaN is rejected, too.
        if not (lowest >= low and highest <= high):
            raise RejectedImageError(
                f"its values, {lowest!s} to {highest!s}, are not all in the range {low} to {high}",
                parameters=("value_range",),
            )
        if (low, high) == (0, 255) and row.dtype.kind in "iu":
            return row.astype(np.uint8)
        scaled = (row.astype(np.float64) - low) * (255 / (high - low))
        return np.rint(scaled, out=scaled).astype(np.uint8)


def default_range(dtype: np.dtype[Any]) -> tuple[float, float] | None:
    """Return the values that become 0 and 255: (0, 1) for floats, None for bool, uint8 and uint16, else (0, 255)."""
    if dtype.kind == "f":
        return 0.0, 1.0
    return None if dtype.kind == "b" or (dtype.kind == "u" and dtype.itemsize <= 2) else (0.0, 255.0)


class HDF5RowReader(SourceReader):
    """Reads images from the rows of the first dataset in `pack`. If `form` is None, each row is an encoded image.

    `kinds` are the kinds of the datasets of masks and further images, by path; `pack` must describe these datasets,
    too. `form` also applies to further images. `tables` are the files that hold labels and other fields.
    """

    def __init__(
        self, pack: FileDescription, form: PixelForm | None, kinds: dict[str, str] | None = None,
        tables: frozenset[SourceFile] = frozenset(),
    ) -> None:  # fmt: skip
        self.pack, self.form, self.tables = pack, form, tables
        self.images = next(iter(pack.indexes))
        self.index = pack.indexes[self.images]
        self.has_checksums = schema.checksums_path(self.images) in pack.indexes
        self.kinds = kinds or {}
        self.pixel_fields = tuple(self.kinds)  # the datasets of `Catalog.pixel_fields`
        if not self.index.is_encoded:
            self.row_bytes = sum(pack.indexes[name].row_bytes for name in (self.images, *self.pixel_fields))
        # Do not warn that a dataset of encoded images is slow to read, because this conversion is the remedy.
        self.engine = Engine(pack.path, pack.identity, pack.indexes, warn=not self.index.is_encoded)
        # The row of each image; None means that image i is row i.
        self.rows: npt.NDArray[np.int64] | None = None
        self._coming: list[int] = []
        self._next = 0
        self._batch_rows = 1
        self._loaded: dict[int, npt.NDArray[Any]] = {}

    def take(self, indices: npt.NDArray[np.int64]) -> HDF5RowReader:
        taken = HDF5RowReader.__new__(HDF5RowReader)
        taken.__dict__.update(self.__dict__, rows=self._rows(indices), _coming=[], _loaded={})
        return taken

    def paths(self) -> set[str]:
        files = self.tables.union(*(index.files for index in self.pack.indexes.values()))
        return {self.pack.path, *(file.path for file in files)}

    def groups(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        if self.index.is_encoded:
            return None
        # Group by the first dataset that must be decoded, so that each of its chunks is decoded once.
        datasets = [self.engine.indexes[name] for name in (self.images, *self.pixel_fields)]
        decoded = (index for index in datasets if not index.raw and not index.is_encoded)
        first = next(decoded, None if self.engine.can_scatter(self.index) else self.index)
        return None if first is None else first.groups_of(self._rows(indices))

    def announce(self, indices: Sequence[int]) -> None:
        self._coming, self._next = list(indices), 0
        self._batch_rows = max(1, _BATCH_BYTES // max(1, self.index.row_bytes))
        if not self.index.is_encoded and not self.index.raw:
            groups = np.unique(self.index.groups_of(self._rows(np.array(self._coming, np.int64))))
            count = len(groups) if len(self._coming) * self.index.row_bytes <= _HELD_BYTES else 1
            if count * self.index.group_rows * self.index.row_bytes > self.engine.chunks.cache.capacity:
                # The cache cannot keep the chunks of these rows between two reads, so read all rows at once.
                self._batch_rows = len(self._coming)
        self._loaded.clear()
        # Rows that were announced earlier will not be read again, so their chunks can be dropped.
        self.engine.chunks.cache.clear()

    def read(self, index: int, name: str) -> bytes | npt.NDArray[np.uint8]:
        if self.form is None:
            return self.encoded(index)
        row = self._loaded.pop(index, None)
        if row is None:
            row = self._load(index)
        return self.form.pixels(row)

    def read_field(self, number: int, index: int, name: str) -> npt.NDArray[Any]:
        """Return a mask, uint8 or int32 (h, w), or a further image, uint8 (h, w, 1 or 3)."""
        dataset = self.pixel_fields[number]
        dtype = self.engine.indexes[dataset].native_dtype
        if self.engine.indexes[dataset].is_encoded:
            return read_mask(self.encoded(index, dataset), dtype)
        values: npt.NDArray[Any] = self._read_rows([index], dataset)[0]
        if self.kinds[dataset] == schema.IMAGE and self.form is not None:
            return self.form.pixels(values)
        return narrow_mask(values if self.form is None else values.reshape(self.form.size(self.index.row_shape)))

    def uniform_mask_dtypes(self) -> list[str]:
        masks = (name for name, kind in self.kinds.items() if kind == schema.MASK)
        dtypes = {name: narrow_mask(np.zeros(1, self.engine.indexes[name].native_dtype)).dtype.str for name in masks}
        return [dtypes.get(name, "|u1") for name in self.kinds]

    def survey(self, index: int, name: str, max_pixels: int) -> SurveyedImage:
        data = self.encoded(index)
        header = read_header(data, partial(io.BytesIO, data), max_pixels)
        return SurveyedImage(header, int(self.fingerprints(np.array([index]))[0]))

    def uniform_size(self) -> tuple[int, int] | None:
        return None if self.form is None else self.form.size(self.index.row_shape)

    def fingerprints(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return hashes of each row's number, the dataset's path, and the sizes and times of the files, uint64 (n,)."""
        known = [self.pack.identity, *(file.identity for file in sorted(self.index.files, key=lambda file: file.path))]
        described = "\0".join([self.images, *(f"{one.size} {one.modified_ns}" for one in known)]).encode()
        base = np.uint64(fingerprint(described))
        fingerprints: npt.NDArray[np.uint64] = self._rows(indices).astype(np.uint64) ^ base
        return fingerprints

    def changing(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        # One encoded image is enough, because its fingerprint includes the sizes and times of the files.
        return super().changing(indices)[:1]

    def encoded(self, index: int, dataset: str | None = None) -> bytes:
        """Return the bytes of an encoded image or mask; raise RejectedImageError if its row is empty or unreadable."""
        data: bytes = self._read_rows([index], dataset)[0]
        if not data:
            raise RejectedImageError("the image is empty (0 bytes)")
        return data

    def _rows(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return indices if self.rows is None else self.rows[indices]

    def _load(self, index: int) -> npt.NDArray[Any]:
        """Return the row of an image. If it is the next announced image, prefetch images announced after it."""
        coming = self._coming[self._next : self._next + self._batch_rows]
        if coming[:1] == [index]:
            self._next += len(coming)
            try:
                self._loaded = dict(zip(coming, self._read_rows(coming), strict=True))
                return self._loaded.pop(index)
            except RejectedImageError:
                # One of these rows is damaged. Read all announced rows one by one from now on, to find out which.
                self._next = len(self._coming)
        row: npt.NDArray[Any] = self._read_rows([index])[0]
        return row

    def _read_rows(self, indices: Sequence[int], dataset: str | None = None) -> Any:
        """Return the rows of images or masks: an array, or a list of bytes if they are encoded."""
        rows = self._rows(np.array(indices, np.int64))
        name = dataset or self.images
        read = self.engine.read_bytes if self.engine.indexes[name].is_encoded else self.engine.read
        try:
            values: Any = read(name, rows)
            self.engine.check(name, rows, values)
        except DamagedRowsError as error:
            reason = "its row is damaged: it does not match its checksum or cannot be decoded"
            raise RejectedImageError(reason) from error
        except PackFormatError as error:
            # If the file cannot be opened, this is not the fault of the row.
            self.engine.reader.open(name)
            raise RejectedImageError("its row cannot be read") from error
        return values
