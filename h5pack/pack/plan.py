"""The plan of a conversion: everything that is settled before the first pixel is written."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.decode.images import PixelOptions
from h5pack.errors import NoImagesError, OptionsError, RejectedImageError, SizesDifferError
from h5pack.layout import ChunkPlan, plan_chunks
from h5pack.pack.compression import most_bytes
from h5pack.pack.options import ConvertOptions
from h5pack.pack.placement import Placement, place
from h5pack.pack.survey import Survey
from h5pack.sources.catalog import Catalog, Reject

_METADATA_BYTES = 65_536
_HDF5_MAX_CHUNK_BYTES = 2**32 - 1


@dataclass(frozen=True)
class ConvertPlan:
    """What a conversion will do.

    Attributes
    ----------
    source : str
        Where the images are.
    catalog : Catalog
        All M images that were found.
    options : ConvertOptions
    height, width : int
        Pixels of a row.
    placement : Placement
        Row to catalog index, and the splits.
    kinds : ndarray
        uint8, (M,): how each image may be decoded.
    prints : ndarray
        uint64, (M,): fingerprints of the source.
    chunks : ChunkPlan
        Of `/images`.
    rejects : tuple of Reject
        Known so far: by the tables and by the headers.
    """

    source: str
    catalog: Catalog
    options: ConvertOptions
    height: int
    width: int
    placement: Placement
    kinds: npt.NDArray[np.uint8]
    prints: npt.NDArray[np.uint64]
    chunks: ChunkPlan
    rejects: tuple[Reject, ...]

    @property
    def rows(self) -> int:
        """Rows of the pack, if every image decodes."""
        return len(self.placement.order)

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """(H, W, C) or (C, H, W), as the layout says."""
        channels = self.options.channels
        if self.options.layout == "nchw":
            return channels, self.height, self.width
        return self.height, self.width, channels

    @property
    def row_bytes(self) -> int:
        """Bytes a row."""
        return self.height * self.width * self.options.channels

    @property
    def pixels(self) -> PixelOptions:
        """What the workers need to know of the options."""
        options = self.options
        return PixelOptions(
            self.height,
            self.width,
            options.channels,
            options.size is not None,
            options.fit,
            options.resample,
            options.draft,
            options.max_pixels,
        )

    @property
    def file_bytes(self) -> int:
        """Bytes the file will take, at most: the chunks, and the tables before compression."""
        size = self.chunks.bytes
        if self.options.filter is not None:
            size = most_bytes(size)
        return self._chunks_bytes(size) + self._tables_bytes()

    @property
    def needed_bytes(self) -> int:
        """Bytes of disk the conversion needs: the file, and its tables once more in the file that lends them.

        A compressed file lies beside the raw rows until it is whole.
        """
        if self.options.filter is not None:
            return self.file_bytes + self._chunks_bytes(self.chunks.bytes) + _METADATA_BYTES
        return self.file_bytes + self._tables_bytes()

    def _chunks_bytes(self, size: int) -> int:
        return self.chunks.count * (size + schema.ALIGNMENT_BYTES)

    def _tables_bytes(self) -> int:
        catalog = self.catalog
        label_bytes = 0 if catalog.labels is None else catalog.labels.nbytes // max(1, len(catalog))
        field_bytes = sum(4 + values.nbytes // max(1, len(catalog)) for values in catalog.fields.values())
        return self.rows * (4 + 4 + label_bytes + field_bytes) + catalog.names.nbytes + _METADATA_BYTES

    def split_rows(self) -> dict[str, tuple[int, int]]:
        """Each split's first row and the row behind its last."""
        starts = self.placement.starts.tolist()
        return dict(zip(self.catalog.split_names, itertools.pairwise(starts), strict=True))

    def label_kind(self) -> str:
        """The labels, in words."""
        labels, names = self.catalog.labels, self.catalog.label_names
        if labels is None:
            return "none"
        if labels.ndim == 2:
            return f"{labels.shape[1]} columns, uint8"
        return f"{len(names)} classes" if names is not None else "integers"

    def to_json(self) -> dict[str, Any]:
        """The plan for programs; keys are stable."""
        return {
            "source": self.source,
            "kind": self.catalog.kind,
            "images": self.rows,
            "shape": [self.rows, *self.row_shape],
            "labels": self.label_kind(),
            "classes": list(self.catalog.label_names or ()),
            "fields": sorted(self.catalog.fields),
            "splits": {name: list(rows) for name, rows in self.split_rows().items()},
            "chunk_rows": self.chunks.rows,
            "chunk_bytes": self.chunks.bytes,
            "chunks": self.chunks.count,
            "bytes": self.file_bytes,
            "needed_bytes": self.needed_bytes,
            "rejects": len(self.rejects),
            "ignored": self.catalog.ignored,
            "options": self.options.content(),
        }

    def describe(self) -> str:
        """The plan for people, a few lines."""
        options, chunks = self.options, self.chunks
        sizes = f"{self.height}x{self.width} {options.mode}"
        if options.size is not None:
            sizes += f", by {options.fit} and {options.resample}"
        splits = ", ".join(f"{name} {stop - start:,}" for name, (start, stop) in self.split_rows().items())
        file = human_bytes(self.file_bytes)
        if options.filter is not None:
            file = f"at most {file}, {options.filter.name}; until it is whole, {human_bytes(self.needed_bytes)} of disk"
        lines = [
            f"source   {self.source} ({self.catalog.kind}{self.catalog.about and ': ' + self.catalog.about})",
            f"images   {self.rows:,} of {sizes}, {options.layout}, {options.order}",
            f"labels   {self.label_kind()}" + "".join(f", field {name}" for name in sorted(self.catalog.fields)),
            f"splits   {splits}",
            f"chunks   {chunks.count:,} of {chunks.rows:,} rows, {human_bytes(chunks.bytes)} each",
            f"file     {file}",
        ]
        if self.catalog.ignored:
            passed = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.catalog.ignored.items()))
            lines.append(f"ignored  {passed}")
        if self.rejects:
            first = self.rejects[0]
            lines.append(f"rejects  {len(self.rejects):,} so far ({first.name}: {first.reason})")
        return "\n".join(lines)


def make_plan(source: str, catalog: Catalog, survey: Survey, options: ConvertOptions) -> ConvertPlan:
    """Settle sizes, splits, order and chunks.

    Raises
    ------
    RejectedImageError
        With ``strict``, if an image is already known to be unusable.
    NoImagesError
        If none is usable.
    SizesDifferError
        If sizes differ and `options.size` is not set.
    OptionsError
        If a chunk would reach HDF5's limit of 4 GiB.
    """
    rejects = [*catalog.rejects]
    rejects += [Reject(catalog.names[index], reason) for index, reason in sorted(survey.reasons.items())]
    if options.strict and rejects:
        raise RejectedImageError(
            f"{source}: {rejects[0].name}: {rejects[0].reason}; mend or remove it, or go on without it by leaving "
            "out --strict"
        )
    usable = np.setdiff1d(np.arange(len(catalog), dtype=np.int64), np.array([*survey.reasons], np.int64))
    if not len(usable):
        raise NoImagesError(
            f"{source}: none of its {len(catalog):,} files can be read as an image "
            f"({rejects[0].name}: {rejects[0].reason}, say); check the path"
        )
    height, width = options.size or _common_size(source, catalog, survey, usable)
    if survey.labels is not None:
        catalog = _with_labels(catalog, survey.labels)
    seed = options.seed if options.order == "shuffled" else None
    return ConvertPlan(
        source=source,
        catalog=catalog,
        options=options,
        height=height,
        width=width,
        placement=place(usable, catalog.split_ids[usable], len(catalog.split_names), seed),
        kinds=survey.kinds,
        prints=survey.prints,
        chunks=_plan_chunks(len(usable), height * width * options.channels, options),
        rejects=tuple(rejects),
    )


def _plan_chunks(rows: int, row_bytes: int, options: ConvertOptions) -> ChunkPlan:
    chunks = plan_chunks(rows, row_bytes, chunk_rows=options.chunk_rows, chunk_bytes=options.chunk_bytes)
    if options.filter is not None and most_bytes(chunks.bytes) > _HDF5_MAX_CHUNK_BYTES:
        raise OptionsError(
            f"a chunk of {chunks.rows} rows x {row_bytes} bytes may be {most_bytes(chunks.bytes):,} bytes when "
            "compressed; HDF5 1.10 reads chunks below 4 GiB; ask for fewer rows a chunk or smaller images"
        )
    return chunks


def _common_size(source: str, catalog: Catalog, survey: Survey, usable: npt.NDArray[np.int64]) -> tuple[int, int]:
    packed = survey.heights[usable].astype(np.int64) << 32 | survey.widths[usable]
    sizes, firsts, counts = np.unique(packed, return_index=True, return_counts=True)
    if len(sizes) > 1:
        common, other = np.argsort(-counts, kind="stable")[:2]
        texts = [
            f"{catalog.names[int(usable[firsts[which]])]} is {sizes[which] >> 32}x{sizes[which] & 0xFFFFFFFF}"
            for which in (common, other)
        ]
        raise SizesDifferError(
            f"{source}: its images have {len(sizes):,} sizes ({texts[0]} as {counts[common]:,} are, {texts[1]}); "
            "give --size HxW, and --fit crop, pad or stretch"
        )
    return int(sizes[0] >> 32), int(sizes[0] & 0xFFFFFFFF)


def _with_labels(catalog: Catalog, labels: npt.NDArray[Any]) -> Catalog:

    names = tuple(f"label_{column}" for column in range(labels.shape[1])) if labels.ndim == 2 else None
    return replace(catalog, labels=labels, label_names=names)


def human_bytes(count: int) -> str:
    """A number of bytes with a binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
