"""Rows of an HDF5 file as images: read by the engine that reads packs, turned into uint8 pixels with channels last."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import DamagedRowsError, H5PackError, PackFormatError, RejectedImageError, SourceError
from h5pack.read.engine import Engine
from h5pack.read.pack import Pack, checksums_of
from h5pack.sources.catalog import Reader

CHANNEL_AXES = ("last", "first", "none")
_BATCH_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class PixelForm:
    """What the numbers of a row mean.

    Attributes
    ----------
    channel_axis : str
        Which axis of a row holds the channels: last (H, W, C), first (C, H, W) or none (H, W).
    value_range : (float, float) or None
        The values that become 0 and 255. None: what `default_range` says, and without one uint8 and bool as they are,
        16 bits by their high byte.
    """

    channel_axis: str
    value_range: tuple[float, float] | None = None

    def size(self, row_shape: tuple[int, ...]) -> tuple[int, int]:
        """Height and width of a row, in pixels."""
        return row_shape[-2:] if self.channel_axis != "last" else row_shape[:2]  # type: ignore[return-value]

    def pixels(self, row: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Pixels of a row, uint8 (h, w, 1 or 3), perhaps a view of it; an alpha channel is dropped.

        Raises
        ------
        RejectedImageError
            If a value lies outside the range.
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
        least, most = row.min(), row.max()
        # Comparing this way round refuses NaN, too.
        if not (least >= low and most <= high):
            raise RejectedImageError(f"values from {least:g} to {most:g}, outside {low:g} to {high:g}")
        if (low, high) == (0, 255) and row.dtype.kind in "iu":
            return row.astype(np.uint8)
        scaled = (row.astype(np.float64) - low) * (255 / (high - low))
        return np.rint(scaled, out=scaled).astype(np.uint8)


def default_range(dtype: np.dtype[Any]) -> tuple[float, float] | None:
    """The values that become 0 and 255 where nobody says: 0 and 1 of floats, 0 and 255 of integers of other sizes than
    8 and 16 bits and of signed ones; None for uint8, bool and uint16.
    """
    if dtype.kind == "f":
        return 0.0, 1.0
    return None if dtype.kind == "b" or (dtype.kind == "u" and dtype.itemsize <= 2) else (0.0, 255.0)


class HDF5RowReader(Reader):
    """Reads images out of the rows of one dataset.

    Parameters
    ----------
    pack : Pack
        The file, whose first dataset holds the images.
    form : PixelForm or None
        None: each row is an encoded image.
    """

    def __init__(self, pack: Pack, form: PixelForm | None) -> None:
        self.pack, self.form = pack, form
        self.images = next(iter(pack.indexes))
        self.index = pack.indexes[self.images]
        self._checks = checksums_of(self.images) in pack.indexes
        names = (self.images, *([checksums_of(self.images)] if self._checks else ()))
        # That encoded images are decoded is what this is about.
        self.engine = Engine(
            pack.path, pack.identity, {name: pack.indexes[name] for name in names}, warn=form is not None
        )
        # None: image i is row i.
        self.rows: npt.NDArray[np.int64] | None = None
        self._coming: list[int] = []
        self._next = 0
        self._loaded: dict[int, npt.NDArray[Any]] = {}

    def take(self, indices: npt.NDArray[np.int64]) -> HDF5RowReader:
        taken = HDF5RowReader.__new__(HDF5RowReader)
        taken.__dict__.update(self.__dict__)
        taken.rows = self._rows(indices)
        return taken

    def groups(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        if self.form is None or self.engine.scatters(self.index):
            return None
        return self.index.units_of(self._rows(indices))

    def begin(self, indices: Sequence[int]) -> None:
        self._coming, self._next = list(indices), 0
        self._loaded.clear()
        # Of what was asked for until now nothing will be asked for again.
        self.engine.chunks.kept.clear()

    def read(self, index: int, name: str) -> bytes | npt.NDArray[np.uint8]:
        if self.form is None:
            return self.encoded(index)
        row = self._loaded.pop(index, None)
        if row is None:
            row = self._load(index)
        return self.form.pixels(row)

    def prints(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """A fingerprint of each image, uint64 (n,): of its row, its dataset, and the lengths and times of the file and
        of those that a virtual dataset takes its rows from.
        """
        known = [self.pack.identity, *(file.identity for file in sorted(self.index.files, key=lambda file: file.path))]
        described = "\0".join([self.images, *(f"{one.size} {one.modified_ns}" for one in known)]).encode()
        base = np.uint64(int.from_bytes(hashlib.blake2b(described, digest_size=8).digest(), "little"))
        prints: npt.NDArray[np.uint64] = self._rows(indices).astype(np.uint64) ^ base
        return prints

    def encoded(self, index: int) -> bytes:
        """The encoded image in a row.

        Raises
        ------
        RejectedImageError
            If there is none.
        """
        row = int(self._rows(np.array([index]))[0])
        try:
            data = self.engine.reader.read_bytes(self.images, np.array([row], np.int64))[0]
        except PackFormatError as error:
            raise self._refusal(error) from error
        if not data:
            raise RejectedImageError("zero bytes")
        return data

    def _rows(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return indices if self.rows is None else self.rows[indices]

    def _load(self, index: int) -> npt.NDArray[Any]:
        """One row, and with it as many of those that come next as fit a batch."""
        most = max(1, _BATCH_BYTES // max(1, self.index.row_bytes))
        if self.index.unit_rows * self.index.row_bytes > self.engine.chunks.kept.capacity and not self.index.raw:
            # Such a chunk is not kept, so all that is wanted of it is taken at once.
            most = len(self._coming)
        coming = self._coming[self._next : self._next + most]
        if coming[:1] != [index]:
            return self._row_of(index)
        self._next += len(coming)
        try:
            values = self._rows_of(coming)
        except RejectedImageError:
            # One of them is damaged; which, and whether the others are good, each will tell by itself.
            self._next = len(self._coming)
            return self._row_of(index)
        self._loaded = dict(zip(coming, values, strict=True))
        return self._loaded.pop(index)

    def _row_of(self, index: int) -> npt.NDArray[Any]:
        row: npt.NDArray[Any] = self._rows_of([index])[0]
        return row

    def _refusal(self, error: PackFormatError) -> H5PackError:
        """What it means that the HDF5 library does not give a row: the row's fault, unless nothing can be read."""
        if "file read failed" in str(error):
            return SourceError(f"{error}; mend the storage, then continue with --resume")
        try:
            self.engine.reader.open(self.images)
        except H5PackError as reason:
            return SourceError(f"{reason} (then continue with --resume)")
        return RejectedImageError("its row cannot be read")

    def _rows_of(self, indices: Sequence[int]) -> npt.NDArray[Any]:
        rows = self._rows(np.array(indices, np.int64))
        try:
            values = self.engine.read(self.images, rows)
            if self._checks:
                self.engine.check(self.images, checksums_of(self.images), rows, values)
        except DamagedRowsError as error:
            raise RejectedImageError("its row is damaged: other than its checksum says, or not decodable") from error
        except PackFormatError as error:
            raise self._refusal(error) from error
        except H5PackError as error:
            raise SourceError(f"{error} (then continue with --resume)") from error
        return values
