"""The plan of a conversion that keeps JPEG files: rows are the bytes of files, and differ in length.

JPEG files are stored unchanged if neither side exceeds `max_side`. All other images are encoded before rows are written
(see `h5pack.pack.encode`). Until then, the plan estimates their sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.format import schema
from h5pack.format.plans import DEFAULT_CHUNK_BYTES, ChunkPlan
from h5pack.images.decode import MAX_PIXELS
from h5pack.images.encode import fitted_size
from h5pack.pack.file_structure import EncodedMasks, PixelRows
from h5pack.pack.journal import EncodedFile
from h5pack.pack.options import ConvertOptions
from h5pack.pack.plan import ConvertPlan, NoRowsError, plan_rows
from h5pack.pack.row_order import RowOrder, Rows, close_holes
from h5pack.pack.survey import Survey
from h5pack.sources.catalog import Catalog
from h5pack.system.arrays import limited_stops
from h5pack.system.parameters import invalid
from h5pack.system.text import counted, format_bytes

_MIN_CHUNKS = 256
# Typical sizes of masks as PNG files, and of photos as JPEG files with quality 90; only used for estimates.
_BYTES_PER_PIXEL, _BYTES_PER_MASK_PIXEL, _HEADER_BYTES = 0.25, 0.03, 700


ENCODED_IMAGE = np.dtype(
    [
        ("index", "<i8"), ("field", "<i4"), ("offset", "<i8"), ("bytes", "<i8"), ("checksum", "<u4"), ("height", "<i4"),
        ("width", "<i4"),
    ]
)  # fmt: skip
"""An encoded image or mask: catalog index, number of the field of masks (-1: the image), offset and size in bytes in a
temporary file, CRC-32, and height and width when upright (0: as in the survey, for an image that is not encoded)."""


class EncodedPlaces:
    """Locations of encoded images in temporary files; `fields` has the locations of the masks of each field."""

    def __init__(self, images: int, fields: int = 0) -> None:
        self.paths: list[str] = []
        self.owners = np.full(images, -1, np.int32)  # (M,): index in `paths`; -1: in no temporary file
        self.images = np.zeros(images, ENCODED_IMAGE)
        self.fields = [EncodedPlaces(images) for _ in range(fields)]

    def add(self, path: str, images: npt.NDArray[Any]) -> None:
        """Add the locations of images and masks, (n,), dtype `ENCODED_IMAGE`, in the temporary file `path`."""
        if path not in self.paths:
            self.paths.append(path)
        own = images[images["field"] < 0]
        self.owners[own["index"]], self.images[own["index"]] = self.paths.index(path), own
        for number, field in enumerate(self.fields):
            masks = images[images["field"] == number].copy()
            masks["field"] = -1
            field.add(path, masks)

    def file(self, index: int) -> EncodedFile | None:
        """Return the location of an image in the temporary files, or None if no file contains it."""
        owner, image = self.owners[index], self.images[index]
        return None if owner < 0 else EncodedFile(self.paths[owner], int(image["offset"]), int(image["checksum"]))


@dataclass(frozen=True)
class KeptPlan(ConvertPlan):
    """The plan of a conversion that keeps JPEG files. `height` and `width` are 0, because sizes may differ."""

    heights: npt.NDArray[np.int32]  # (M,): of each image in the pack, when upright
    widths: npt.NDArray[np.int32]
    encoded_bytes: npt.NDArray[np.int64]  # (M,): size of each image's file in the pack, estimated until it is encoded
    fits: npt.NDArray[np.bool_]  # (M,): whether the file is stored unchanged
    # (M,): whether the image is put into a temporary file before rows are written, because it must be encoded, or
    # because the source reads images in groups
    needs_encoding: npt.NDArray[np.bool_]
    places: EncodedPlaces | None = None  # None before images are encoded, and if none needs it

    def between(self, start: int, stop: int) -> ConvertPlan:
        plan = super().between(start, stop)
        assert isinstance(plan, KeptPlan)
        size, needs_encoding = int(plan.offsets[-1]), self.needs_encoding & plan.has_row
        return replace(plan, chunks=plan_data_chunks(size), needs_encoding=needs_encoding)

    def shard_edges(self) -> list[int]:
        """Return the first row of each shard, then the total number of rows.

        The sizes of masks, and of images to encode, are estimates. A shard has at least one image, even if this image
        alone exceeds `shard_bytes`. Raises OptionsError if the metadata and one spare chunk alone fill `shard_bytes`.
        """
        size = self.options.shard_bytes
        if size is None:
            return [0, self.rows]
        fields = self._field_bytes()
        lengths = np.diff(self.offsets) + fields - (int(fields.sum()) - self._tables_bytes()) // self.rows
        # The last chunk may be almost empty, so leave room for one more chunk.
        room = size - self.structure.metadata_block_bytes - plan_data_chunks(size).bytes
        if room < 1:
            raise invalid("shard_bytes", size, f"give more than {size - room:,} bytes", "has no room for images")
        return [0, *limited_stops(lengths, room)]

    @property
    def to_encode(self) -> npt.NDArray[np.bool_]:
        """Which images are put into temporary files before rows are written, bool (M,).

        If images have masks, these are all images that become rows, because their masks are encoded.
        """
        return self.has_row if self.catalog.pixel_fields else self.needs_encoding

    @property
    def pixel_rows(self) -> tuple[PixelRows, ...]:
        """The fields whose datasets are chunked like the images: none, because masks are stored as PNG files."""
        return ()

    def mask_tables(self) -> list[EncodedMasks]:
        """Return the fields of masks, which are stored as PNG files; none before the masks are encoded."""
        if self.places is None:
            return []
        return [
            EncodedMasks(one.name, dtype, self._masks_of(places))
            for one, dtype, places in zip(self.catalog.pixel_fields, self.mask_dtypes, self.places.fields, strict=True)
        ]

    def _masks_of(self, places: EncodedPlaces) -> list[tuple[EncodedFile, int]]:
        found = [(places.file(index), int(places.images[index]["bytes"])) for index in self.row_order.origins.tolist()]
        return [(file, size) for file, size in found if file is not None]

    def encoded_files(self, indices: Rows) -> list[EncodedFile | None]:
        return [None if self.places is None else self.places.file(index) for index in indices.tolist()]

    def with_encoded(self, places: EncodedPlaces, reasons: dict[int, str]) -> KeptPlan:
        """Return the plan with the sizes of encoded images; images in `reasons`, by catalog index, become rejects."""
        packed = ~np.isin(self.row_order.origins, np.array([*reasons], np.int64))
        rejects = (*self.rejects, *(self.catalog.reject(index, reason) for index, reason in sorted(reasons.items())))
        if not packed.any():
            raise NoRowsError(self, rejects)
        order = close_holes(self.row_order.split_starts, packed, self.options.order == "sorted")
        origins = self.row_order.origins[order.origins]
        found, images = places.owners >= 0, places.images
        heights, widths, sizes = self.heights.copy(), self.widths.copy(), self.encoded_bytes.copy()
        sizes[found] = images["bytes"][found]
        sized = found & (images["height"] > 0)
        heights[sized], widths[sized] = images["height"][sized], images["width"][sized]
        return replace(
            self,
            row_order=RowOrder(origins, order.split_starts),
            chunks=plan_data_chunks(int(sizes[origins].sum())),
            rejects=rejects,
            heights=heights,
            widths=widths,
            encoded_bytes=sizes,
            places=places,
        )

    @cached_property
    def offsets(self) -> Rows:
        """Byte offset of each row in the data, and the end of the last row, (N + 1,)."""
        return np.append(0, np.cumsum(self.encoded_bytes[self.row_order.origins]))

    @property
    def row_bytes(self) -> int:
        """Mean bytes per row."""
        return max(1, int(self.offsets[-1]) // self.rows)

    def pixels_of(self, row: int) -> int:
        index = self.row_order.origins[row]
        return int(self.heights[index]) * int(self.widths[index])

    def encoded_tables(self) -> dict[str, npt.NDArray[Any]]:
        origins = self.row_order.origins
        sizes = np.stack([self.heights[origins], self.widths[origins]], axis=1).astype(np.int32)
        return {schema.ENCODED_OFFSETS: self.offsets, schema.ENCODED_SIZE: sizes}

    @property
    def needed_bytes(self) -> int:
        """The disk space in bytes that the conversion needs while it runs, including the temporary files.

        The sizes of images and masks that are not encoded yet are estimates.
        """
        return super().needed_bytes + int(self.encoded_bytes[self.needs_encoding].sum()) + self._mask_bytes

    @property
    def _mask_bytes(self) -> int:
        """Bytes of all masks; an estimate until they are encoded."""
        if self.places is not None:
            return sum(int(one.images["bytes"].sum()) for one in self.places.fields)
        pixels = self.heights.astype(np.int64)[self.row_order.origins] * self.widths[self.row_order.origins]
        return int(_BYTES_PER_MASK_PIXEL * pixels.sum()) * len(self.catalog.pixel_fields)

    def _tables_bytes(self) -> int:
        offsets = 8 * (self.rows + 1) * len(self.catalog.pixel_fields)
        return super()._tables_bytes() + 16 * (self.rows + 1) + offsets + self._mask_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON-serializable dict with the keys of `ConvertPlan.to_json`, and `encoded_bytes`.

        `shape` has only the number of images, and `chunk_rows` is None. `encoded_bytes` is the size of all JPEG files
        in the pack. It is an estimate until images are encoded.
        """
        own = {"shape": [self.rows], "chunk_rows": None, "encoded_bytes": int(self.offsets[-1])}
        return {**super().to_json(), **own}

    def _images_text(self) -> str:
        origins = self.row_order.origins
        sides = np.maximum(self.heights, self.widths)[origins]
        sizes = f"longer sides {sides.min():,} to {sides.max():,}"
        about = "about " if self.needs_encoding.any() else ""
        kept = int(self.fits[origins].sum())
        how = "" if kept == self.rows else f" ({self.rows - kept:,} of them encoded, quality {self.options.quality})"
        size = format_bytes(int(self.offsets[-1]))
        return f"{counted(self.rows, 'JPEG file')}{how}, {about}{size}, {sizes}, {self.options.order}"

    def _chunks_text(self) -> str:
        return f"{self.chunks.count:,} of {format_bytes(self.chunks.bytes)}"


def make_kept_plan(source: str, catalog: Catalog, survey: Survey, options: ConvertOptions) -> KeptPlan:
    """Return the plan of a conversion with `keep`; raises the errors of `plan_rows`."""
    heights, widths, max_side = survey.heights.copy(), survey.widths.copy(), options.max_side or math.inf
    sides = np.maximum(heights, widths)
    for index in np.flatnonzero(sides > max_side).tolist():
        heights[index], widths[index] = fitted_size(int(heights[index]), int(widths[index]), options.max_side)
    pixels = heights.astype(np.int64) * widths
    # Readers of packs refuse images with more pixels than `MAX_PIXELS`, even if `max_pixels` allows them.
    for index in np.flatnonzero(pixels > MAX_PIXELS).tolist():
        bomb = f"decompression bomb: {heights[index]}x{widths[index]} is more than {MAX_PIXELS} pixels"
        survey.reject(index, bomb)
    plan = plan_rows(source, catalog, survey, options)
    origins = plan.row_order.origins
    fits = (survey.kept_bytes > 0) & (sides <= max_side)
    sizes = np.where(fits, survey.kept_bytes, (pixels * _BYTES_PER_PIXEL).astype(np.int64) + _HEADER_BYTES)
    needs_encoding = np.zeros(len(catalog), np.bool_)
    needs_encoding[origins] = ~fits[origins] | (catalog.reader.groups(origins) is not None)
    return KeptPlan(
        **{**vars(plan), "chunks": plan_data_chunks(int(sizes[origins].sum()))},
        heights=heights,
        widths=widths,
        encoded_bytes=sizes,
        fits=fits,
        needs_encoding=needs_encoding,
    )


def plan_data_chunks(size: int) -> ChunkPlan:
    """Return the chunks for `size` encoded bytes, from 64 KiB (HDF5 does not align smaller ones) to 4 MiB each."""
    # The largest power of two that gives at least 256 chunks, so that the unused rest of the last chunk is small.
    chunk = schema.ALIGNMENT_THRESHOLD_BYTES
    while chunk < DEFAULT_CHUNK_BYTES and 2 * chunk * _MIN_CHUNKS <= size:
        chunk *= 2
    return ChunkPlan(rows=chunk, bytes=chunk, count=-(-size // chunk))
