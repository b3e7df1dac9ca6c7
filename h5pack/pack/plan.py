"""The plan of a conversion, made before the first pixel is written."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import NoImagesError, OptionsError, SizesDifferError
from h5pack.format import schema
from h5pack.format.fields import row_bytes
from h5pack.format.plans import HDF5_MAX_CHUNK_BYTES, ChunkPlan, plan_chunks
from h5pack.images.decode import PixelOptions
from h5pack.pack.compression import Compression, max_compressed_bytes
from h5pack.pack.file_structure import EncodedMasks, FileStructure, PixelRows, options_text, plan_metadata
from h5pack.pack.journal import EncodedFile
from h5pack.pack.options import FITS, ConvertOptions, refuse_reject
from h5pack.pack.row_order import RowOrder, Rows, order_rows
from h5pack.pack.survey import Survey
from h5pack.read.hdf5 import utf8
from h5pack.sources.catalog import Catalog, Note, Reject
from h5pack.sources.map_style import with_labels
from h5pack.sources.reader import MISSING_FILE_REASONS
from h5pack.sources.validation import divide
from h5pack.system.arrays import limited_stops
from h5pack.system.files import absolute_path
from h5pack.system.parameters import invalid
from h5pack.system.text import counted, first_names, format_bytes, labels_text, printable_lines
from h5pack.version import __version__

_METADATA_BYTES = 65_536
# Upper bound for what one shard adds to a virtual dataset: the metadata of its mapping, including the shard's name.
_MAPPING_BYTES = 1_024
_BLOCK = 65_536
# An output of at least this size, and this many times as large as the image files, gets a note on how to save space.
_LARGE_FILE_BYTES, _MANY_TIMES = 256 * 1024 * 1024, 3


@dataclass(frozen=True)
class ConvertPlan:
    """The plan of a conversion: sizes, order of the rows, chunks, and the rejects known so far."""

    source: str  # path of the source; "dataset" for a map-style dataset
    catalog: Catalog  # all M images that were found
    options: ConvertOptions
    height: int  # of each row, in pixels
    width: int
    row_order: RowOrder  # the catalog index of each row, and the splits
    decode_paths: npt.NDArray[np.uint8]  # (M,): the `DecodePath` of each image
    fingerprints: npt.NDArray[np.uint64]  # (M,): a hash per image, which changes if the image does
    chunks: ChunkPlan  # size and number of the chunks of the images dataset
    rejects: tuple[Reject, ...]  # images that the source or the image headers show to be unusable
    source_bytes: int  # size of the image files in bytes; 0 if the images are not files
    mask_dtypes: tuple[str, ...]  # dtype of each field of pixels, in the catalog's order

    @property
    def rows(self) -> int:
        """Number of rows of the pack if every image can be decoded."""
        return len(self.row_order.origins)

    @property
    def has_row(self) -> npt.NDArray[np.bool_]:
        """Which images become rows, bool (M,)."""
        found = np.zeros(len(self.catalog), np.bool_)
        found[self.row_order.origins] = True
        return found

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """Shape of a row: (H, W, C) or (C, H, W), depending on `options.layout`."""
        return self.pixels.row_shape

    @property
    def row_bytes(self) -> int:
        """Bytes per row of the images."""
        return self.height * self.width * self.options.channels

    @property
    def pixels(self) -> PixelOptions:
        """The options that workers need to decode images into rows."""
        options = self.options
        return PixelOptions(
            height=self.height, width=self.width, channels=options.channels, resize=options.size is not None,
            fit=options.fit, resample=options.resample, draft=options.draft, max_pixels=options.max_pixels,
            layout=options.layout,
        )  # fmt: skip

    @property
    def pixel_rows(self) -> tuple[PixelRows, ...]:
        """The fields whose datasets are chunked like the images: the masks and the further images."""
        shapes: dict[str, tuple[int, ...]] = {schema.MASK: (self.height, self.width), schema.IMAGE: self.row_shape}
        return tuple(
            PixelRows(one.name, one.kind, shapes[one.kind], dtype)
            for one, dtype in zip(self.catalog.pixel_fields, self.mask_dtypes, strict=True)
        )

    def pixels_of(self, row: int) -> int:
        """Return the number of pixels of the image in a row."""
        return self.height * self.width

    def stored_rows(self, rows: int) -> int:
        """Return the length of axis 0 of the images dataset if it has `rows` rows; in bytes if rows are encoded."""
        return rows if self.offsets is None else int(self.offsets[rows])

    @property
    def offsets(self) -> Rows | None:
        """Byte offset of each encoded row from the first row, and the last row's end, (N + 1,); None for pixels."""
        return None

    def encoded_files(self, indices: Rows) -> list[EncodedFile | None]:
        """Return where each image at `indices`, int64 (n,), is in the temporary files; None if it is in none."""
        return [None] * len(indices)

    @property
    def to_encode(self) -> npt.NDArray[np.bool_]:
        """Which images, or their masks, are put into temporary files before rows are written, bool (M,)."""
        return np.zeros(len(self.catalog), np.bool_)

    def encoded_tables(self) -> dict[str, npt.NDArray[Any]]:
        """Return the tables of offsets and sizes of encoded images, by dataset path; empty if rows are pixels."""
        return {}

    def mask_tables(self) -> Sequence[EncodedMasks]:
        """Return the masks that are stored as PNG files."""
        return ()

    def between(self, start: int, stop: int) -> ConvertPlan:
        """Return the plan of a shard with rows `start` to ``stop - 1``. It has all splits, even if they are empty."""
        starts = np.clip(self.row_order.split_starts, start, stop) - start
        return replace(
            self,
            row_order=RowOrder(self.row_order.origins[start:stop], starts),
            chunks=replace(self.chunks, count=-(-(stop - start) // self.chunks.rows)),
            rejects=self.rejects if start == 0 else (),
        )

    def shards(self) -> list[ConvertPlan]:
        """Return the plan of each shard; if `shard_bytes` is None, there is one shard."""
        return [self.between(start, stop) for start, stop in itertools.pairwise(self.shard_edges())]

    def shard_edges(self) -> list[int]:
        """Return the first row of each shard, then the total number of rows.

        A shard has whole chunks, and at most `shard_bytes` bytes. If `shard_bytes` is None, there is one shard. Raises
        OptionsError if `shard_bytes` is too small for one chunk.
        """
        size, step = self.options.shard_bytes, self.chunks.rows
        if size is None:
            return [0, self.rows]
        fields = np.add.reduceat(self._field_bytes(), np.arange(0, self.rows, step))
        others = self._chunks_bytes(self.options.filter) + self._tables_bytes() - int(fields.sum())
        lengths = -(-others // self.chunks.count) + fields
        room = size - self.structure.metadata_block_bytes
        if room < lengths.max():
            needed = f"{size - room + int(lengths.max()):,} bytes"
            raise invalid("shard_bytes", size, f"give at least {needed}", "is too small for one chunk")
        return [0, *(min(step * stop, self.rows) for stop in limited_stops(lengths, room))]

    @property
    def structure(self) -> FileStructure:
        """The structure of the output."""
        options, catalog = self.options, self.catalog
        structure = FileStructure(
            row_shape=self.row_shape if options.keep is None else (),
            chunk_rows=self.chunks.rows,
            layout=options.layout,
            compat=options.compat,
            attributes={schema.VERSION: __version__, schema.OPTIONS: options_text(options.content())},
            compression=options.filter,
            fields=self.pixel_rows,
        )
        names = sum(utf8(texts).nbytes for texts in (catalog.label_names or (), catalog.split_names))
        datasets = 2 * (len(catalog.fields) + len(catalog.pixel_fields)) + 1
        return replace(structure, metadata_bytes=plan_metadata(self.chunks.count, structure, names, datasets))

    @property
    def file_bytes(self) -> int:
        """Upper bound of the output's size in bytes, with all shards; an estimate if images must be encoded."""
        structure, size = self.structure, self._data_bytes()
        if self.options.shard_bytes is None:
            return structure.metadata_block_bytes + size
        shards = len(self.shard_edges()) - 1
        # Each shard of encoded images has chunks of its own size, and the last chunk may be partly filled.
        rest = _METADATA_BYTES + (0 if self.options.keep is None else self.chunks.bytes)
        mappings = shards * (1 + len(self.catalog.pixel_fields)) * _MAPPING_BYTES
        virtual = replace(structure, metadata_bytes=structure.metadata_bytes + mappings)
        size += shards * (structure.metadata_block_bytes + rest)
        return size + virtual.metadata_block_bytes + self._tables_bytes()

    @property
    def needed_bytes(self) -> int:
        """Upper bound of the disk space in bytes that the conversion needs while it runs.

        Without compression, the tables are counted twice, because they are first written to a temporary file. With
        compression, the uncompressed rows also need space until the pack, or their shard, is complete.
        """
        if self.options.filter is None:
            return self._data_bytes() + self._tables_bytes()
        # At any time, the folder holds compressed shards and at most one uncompressed shard.
        return min(self._compressing_bytes(), self.file_bytes + max(one._compressing_bytes() for one in self.shards()))

    def _compressing_bytes(self) -> int:
        """Return an upper bound of the disk space in bytes for writing all rows, and then compressing them."""
        return self._data_bytes() + self._chunks_bytes(None) + _METADATA_BYTES

    def _data_bytes(self) -> int:
        """Upper bound of the output's disk space in bytes, without the metadata block, most of which is unallocated."""
        return self._chunks_bytes(self.options.filter) + self._tables_bytes()

    def _chunks_bytes(self, compression: Compression | None) -> int:
        """Return an upper bound of the size in bytes of all chunks of the images and of the fields of pixels."""
        sizes = (self.chunks.bytes, *(self.chunks.rows * one.row_bytes for one in self.pixel_rows))
        stored = [size if compression is None else max_compressed_bytes(size) for size in sizes]
        return self.chunks.count * sum(size + schema.ALIGNMENT_BYTES for size in stored)

    def _tables_bytes(self) -> int:
        catalog = self.catalog
        label_bytes = 0 if catalog.labels is None else catalog.labels.nbytes // max(1, len(catalog))
        others = self.rows * (4 + 4 + label_bytes + 4 * len(catalog.pixel_fields))
        return others + int(self._field_bytes().sum()) + catalog.names.nbytes + _METADATA_BYTES

    def _field_bytes(self) -> Rows:
        """Return the bytes of each row in all fields except those of pixels, including checksums, int64 (N,)."""
        columns = (4 + row_bytes(values, self.row_order.origins) for values in self.catalog.fields.values())
        return sum(columns, np.zeros(self.rows, np.int64))

    def reject(self, row: int, reason: str) -> Reject:
        """Return the image of a planned row as a reject."""
        return self.catalog.reject(int(self.row_order.origins[row]), reason)

    def require_no_rejects(self, reasons: Mapping[int, str]) -> None:
        """Raise RejectedImageError if ``strict=True`` and there are `reasons` (why planned rows were rejected)."""
        for row, reason in reasons.items() if self.options.strict else ():
            refuse_reject(self.source, self.reject(row, reason), self.options, begun=True)

    def all_rejects(self, reasons: Mapping[int, str]) -> list[Reject]:
        """Return the plan's rejects and those found while decoding (`reasons`, by planned row), sorted by name."""
        rejects = [*self.rejects, *(self.reject(row, reason) for row, reason in reasons.items())]
        return sorted(rejects, key=lambda reject: (reject.name, reject.reason))

    def split_rows(self) -> dict[str, tuple[int, int]]:
        """Return the (start, stop) rows of each split."""
        starts = self.row_order.split_starts.tolist()
        return dict(zip(self.catalog.split_names, itertools.pairwise(starts), strict=True))

    def notes(self) -> tuple[Note, ...]:
        """Return notes on the source, fields that are not resized, missing labels, large chunks and a large file."""
        notes = list(self.catalog.notes)
        source_size, labels = self.catalog.reader.uniform_size(), self.catalog.labels
        if source_size not in (None, (self.height, self.width)):
            shapes = [(name, getattr(values, "shape", ())) for name, values in self.catalog.fields.items()]
            if maps := [name for name, shape in shapes if source_size in (shape[1:3], shape[2:4])]:
                text = f"images and masks are resized, but these fields are packed as they are: {first_names(maps)}"
                notes.append(Note(text))
        if labels is not None and labels.ndim == 1:
            missing = labels[self.row_order.origins] == schema.NO_LABEL
            counts = {name: int(missing[slice(*rows)].sum()) for name, rows in self.split_rows().items()}
            if text := ", ".join(f"{name} {count:,}" for name, count in counts.items() if count):
                which = "with the label -1" if self.catalog.label_names is None else "without a label (-1)"
                notes.append(Note(f"images {which}: {text}"))
        if self.options.chunk_rows is not None and self.options.chunk_rows > self.rows:
            text = f"chunk_rows exceeds the {self.rows:,} images; the only chunk has room for {self.chunks.rows:,} rows"
            notes.append(Note(text, ("chunk_rows",)))
        is_large = self.file_bytes >= max(_LARGE_FILE_BYTES, _MANY_TIMES * self.source_bytes)
        if self.options.keep is None and self.source_bytes and is_large:
            text = "rows are pixels; keep='jpeg' stores image files instead. A smaller size saves more than compression"
            notes.append(Note(text, ("keep='jpeg'", "size")))
        return tuple(notes)

    def label_kind(self) -> str:
        """Return a description of the labels, such as "10 classes"."""
        labels = self.catalog.labels
        return labels_text(None if labels is None else labels.shape, "uint8", self.catalog.label_names)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON-serializable dict. The keys are stable across versions."""
        return {
            "source": self.source,
            "kind": self.catalog.kind,
            "images": self.rows,
            "shape": [self.rows, *self.row_shape],
            "labels": self.label_kind(),
            "classes": list(self.catalog.label_names or ()),
            "fields": sorted([*self.catalog.fields, *(one.name for one in self.catalog.pixel_fields)]),
            "splits": {name: list(rows) for name, rows in self.split_rows().items()},
            "chunk_rows": self.chunks.rows,
            "chunk_bytes": self.chunks.bytes,
            "chunks": self.chunks.count,
            "bytes": self.file_bytes,
            "shards": 0 if self.options.shard_bytes is None else len(self.shard_edges()) - 1,
            "needed_bytes": self.needed_bytes,
            "source_bytes": self.source_bytes,
            "rejects": len(self.rejects),
            "ignored": self.catalog.ignored,
            "notes": [note.text for note in self.notes()],
            "options": self.options.content(),
        }

    def _images_text(self) -> str:
        options = self.options
        how = "" if options.size is None else f", {FITS[options.fit]}, resized with {options.resample}"
        return f"{self.rows:,} of {self.height}x{self.width} {options.mode}{how}, {options.layout}, {options.order}"

    def _chunks_text(self) -> str:
        chunks = self.chunks
        return f"{chunks.count:,} of {counted(chunks.rows, 'row')}, {format_bytes(chunks.bytes)} each"

    def to_text(self, note_text: Callable[[Note], str] = attrgetter("text")) -> str:
        """Return the plan as lines of text. `note_text` returns the text of a note."""
        options = self.options
        splits = ", ".join(f"{name} {stop - start:,}" for name, (start, stop) in self.split_rows().items())
        if options.val is not None:
            of = "each class" if self.catalog.labels is not None and self.catalog.labels.ndim == 1 else "the images"
            of = of if options.val_groups is None else f"the images, in whole groups of {options.val_groups!r}"
            taken = "" if len(self.catalog.split_names) == 2 else " in the training split"
            splits += f" (val: {options.val:g} of {of}{taken}, seed {options.seed})"
        bound = "about" if self.to_encode.any() else "at most"
        file = f"{bound} {format_bytes(self.file_bytes)}"
        if options.filter is not None:
            file += f", {options.filter.name}"
        if self.source_bytes:
            times = self.file_bytes / self.source_bytes
            file += f", {times:,.{times < 10:d}f} times the {format_bytes(self.source_bytes)} of its image files"
        if options.filter is not None:
            file += f"; needs {format_bytes(self.needed_bytes)} of disk space until it is complete"
        lines = [
            f"source   {self.source} ({self.catalog.kind}{self.catalog.about and ': ' + self.catalog.about})",
            f"images   {self._images_text()}",
            f"labels   {', '.join([self.label_kind(), *self.catalog.field_texts()])}",
            *(
                f"field    {one.name}: {one.kind}s, {np.dtype(dtype)}"
                for one, dtype in zip(self.catalog.pixel_fields, self.mask_dtypes, strict=True)
            ),
            f"splits   {splits}",
            f"chunks   {self._chunks_text()}",
            f"file     {file}",
        ]
        if options.shard_bytes is not None:
            shards = counted(len(self.shard_edges()) - 1, "file")
            lines.append(f"shards   {shards} of {bound} {format_bytes(options.shard_bytes)}")
        if self.catalog.ignored:
            ignored = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.catalog.ignored.items()))
            lines.append(f"ignored  {ignored}")
        lines += [f"note     {note_text(note)}" for note in self.notes()]
        if self.rejects:
            first = self.rejects[0]
            lines.append(f"rejects  {len(self.rejects):,} so far ({first.shown}: {first.reason})")
        return printable_lines(lines)


class NoRowsError(NoImagesError):
    """None of the images of a plan, or of a shard of it, can be packed. `rejects` lists all of them."""

    def __init__(self, plan: ConvertPlan, rejects: Sequence[Reject]) -> None:
        advice, parameters = "check the images", ("value_range",) if plan.catalog.kind == "hdf5" else ()
        advice += ", or give value_range if the values of its arrays have another range" if parameters else ""
        advice += plan.options.start_over_advice
        problem = f"none of its images can be packed ({rejects[0].shown}: {rejects[0].reason}); {advice}"
        super().__init__(f"{plan.source}: {problem}", path=plan.source, parameters=parameters)
        self.rejects = tuple(rejects)


def plan_rows(source: str, catalog: Catalog, survey: Survey, options: ConvertOptions) -> ConvertPlan:
    """Return a plan of the rows, without their size and chunks.

    Raises NoImagesError if no image can be packed, RejectedImageError with `strict`, OptionsError if `val` is refused.
    """
    rejects = [*catalog.rejects]
    rejects += [catalog.reject(index, reason) for index, reason in sorted(survey.reasons.items())]
    if options.strict and rejects:
        refuse_reject(source, rejects[0], options, begun=False)
    usable = np.delete(np.arange(len(catalog)), [*survey.reasons])
    if not len(usable):
        advice = "check the source"
        if catalog.kind == "manifest" and rejects[0].reason in MISSING_FILE_REASONS:
            folder = options.root or os.path.dirname(absolute_path(source))
            advice = f"relative paths start from {folder}; if that is wrong, give root"
            advice += "; make absolute paths of another machine relative"
        problem = (
            f"none of its {counted(len(catalog), 'image')} can be packed (for example, {rejects[0].shown}: "
            f"{rejects[0].reason}); {advice}{options.start_over_advice}"
        )
        raise NoImagesError.at(source, problem, "root")
    if survey.labels is not None or catalog.reader.has_labels:
        catalog = with_labels(catalog, survey.labels, survey.unused)
    if options.val is not None:
        catalog = divide(source, catalog, usable, options.val, options.seed, options.group_field)
    seed = options.seed if options.order == "shuffled" else None
    split_ids = catalog.split_ids if len(usable) == len(catalog) else catalog.split_ids[usable]
    return ConvertPlan(
        source=source,
        catalog=catalog,
        options=options,
        height=0,
        width=0,
        row_order=order_rows(usable, split_ids, len(catalog.split_names), seed),
        decode_paths=survey.decode_paths,
        fingerprints=survey.fingerprints,
        chunks=ChunkPlan(0, 0, 0),
        rejects=tuple(rejects),
        source_bytes=survey.file_bytes,
        mask_dtypes=tuple(survey.mask_dtypes),
    )


def make_plan(source: str, catalog: Catalog, survey: Survey, options: ConvertOptions) -> ConvertPlan:
    """Return the plan of a conversion to pixels.

    Raises the errors of `plan_rows`, SizesDifferError, and OptionsError if a chunk can take 4 GiB or more.
    """
    plan = plan_rows(source, catalog, survey, options)
    height, width = options.size or _common_size(source, catalog, survey, np.flatnonzero(plan.has_row))
    chunks = _plan_chunks(plan.rows, height * width, options, survey.mask_dtypes)
    return replace(plan, height=height, width=width, chunks=chunks)


def _plan_chunks(rows: int, pixels: int, options: ConvertOptions, mask_dtypes: Sequence[str]) -> ChunkPlan:
    chunks = plan_chunks(
        rows, pixels * options.channels, chunk_rows=options.chunk_rows, chunk_bytes=options.chunk_bytes,
        whole_pages=options.filter is None,
    )  # fmt: skip
    largest = pixels * max(options.channels, *(np.dtype(dtype).itemsize for dtype in mask_dtypes), 1)
    stored = chunks.rows * largest if options.filter is None else max_compressed_bytes(chunks.rows * largest)
    if stored > HDF5_MAX_CHUNK_BYTES:
        raise OptionsError(
            f"a chunk of {chunks.rows:,} rows of {largest:,} bytes can take {stored:,} bytes in the file, and HDF5 "
            "1.10 reads only chunks below 4 GiB; reduce chunk_rows, chunk_bytes or size",
            parameters=("chunk_rows", "chunk_bytes", "size"),
        )
    return chunks


def _common_size(source: str, catalog: Catalog, survey: Survey, usable: npt.NDArray[np.int64]) -> tuple[int, int]:
    # For each size (height << 32 | width): the number of images that have it, and the catalog index of the first.
    found: dict[int, tuple[int, int]] = {}
    for start in range(0, len(usable), _BLOCK):
        block = usable[start : start + _BLOCK]
        joined = survey.heights[block].astype(np.int64) << 32 | survey.widths[block]
        sizes, firsts, counts = np.unique(joined, return_index=True, return_counts=True)
        for size, at, count in zip(sizes.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            before, earliest = found.get(size, (0, int(block[at])))
            found[size] = before + count, earliest
    if len(found) > 1:
        which = sorted(found, key=lambda size: (-found[size][0], size))[:2]
        common = [f"{size >> 32}x{size & 0xFFFFFFFF}" for size in which]
        first, second = (
            f"{text} ({found[key][0]:,}, such as {catalog.shown(found[key][1])})"
            for text, key in zip(common, which, strict=True)
        )
        problem = (
            f"its images have {len(found):,} sizes, most often {first}, then {second}; give "
            f"size='{common[0]}' or another size to resize them (fit says how: crop, pad or stretch)"
        )
        raise SizesDifferError.at(source, problem, f"size='{common[0]}'", "fit")
    (size,) = found
    return size >> 32, size & 0xFFFFFFFF
