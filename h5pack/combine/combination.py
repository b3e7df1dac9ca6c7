"""The plan of a pack that is made of rows of other packs (its parts): the new pack's tables and structure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.combine.parts import Part, RowOrigins, Rows
from h5pack.format import schema
from h5pack.format.plans import plan_chunks
from h5pack.pack.compression import parse_compression
from h5pack.pack.file_structure import EncodedMasks, FileStructure, PackTables, PixelRows, options_text, plan_metadata
from h5pack.pack.journal import EncodedFile
from h5pack.pack.kept import plan_data_chunks
from h5pack.read.encoded import EncodedIndex
from h5pack.read.hdf5 import utf8
from h5pack.sources.catalog import Catalog
from h5pack.system.arrays import equal_runs
from h5pack.version import __version__


@dataclass(frozen=True)
class Combination:
    """The plan of a pack that is made of the rows of parts: its contents, and where each row comes from."""

    verb: str | None  # append, join or subset, stored with the options; None if the parts are shards of a conversion
    parts: tuple[Part, ...]
    catalog: Catalog  # the tables of the new pack
    origins: RowOrigins
    splits: list[tuple[str, int, int]]  # name, first row and end row (exclusive)
    statistics: dict[str, Any]
    chunk_rows: int | None = None  # None: as `convert` chooses by default. Unused if the parts keep JPEG files

    @classmethod
    def of(
        cls, verb: str | None, parts: Sequence[Part], merged: Catalog, order: Rows, statistics: dict[str, Any],
        chunk_rows: int | None = None,
    ) -> Combination:  # fmt: skip
        """Return a combination of the rows `order` of `merged`, the catalog of all parts' rows."""
        catalog = merged if np.array_equal(order, np.arange(len(merged))) else _tables_at(merged, order)
        origins = RowOrigins.of(parts, order)
        return cls(verb, tuple(parts), catalog, origins, _split_ranges(catalog), statistics, chunk_rows)

    @property
    def rows(self) -> int:
        """Number of rows of the output."""
        return len(self.origins)

    def stored_rows(self, rows: int) -> int:
        """Return the length of axis 0 of the images dataset for `rows` rows: `rows`, or their bytes if encoded."""
        return rows if self.offsets is None else int(self.offsets[rows])

    @cached_property
    def offsets(self) -> Rows | None:
        """Boundaries of the encoded images, in bytes from the start of the first image, (N + 1,); None for pixels."""
        if not self.parts[0].is_encoded:
            return None
        return np.append(0, np.cumsum(self._gathered(lambda part: np.diff(_encoded(part).offsets))))

    def _gathered(self, values: Callable[[Part], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return the value of each row of the output; `values(part)` returns the values of all rows of a part."""
        columns = [values(part) for part in self.parts]
        out = np.empty((self.rows, *columns[0].shape[1:]), columns[0].dtype)
        for owner, column in enumerate(columns):
            mine = self.origins.owners == owner
            out[mine] = column[self.origins.rows[mine]]
        return out

    def checksums(self, number: int) -> npt.NDArray[np.uint32]:
        """Return the checksums of the output's rows in the dataset at position `number` of `Part.pixel_datasets`."""
        return self._gathered(lambda part: part.checksums(part.pixel_datasets[number]))

    @cached_property
    def pixel_rows(self) -> tuple[PixelRows, ...]:
        """The fields of masks and of further images, which are chunked like the images; () if images are encoded."""
        first = self.parts[0]
        if first.is_encoded:
            return ()
        indexes = [first.engine.indexes[dataset] for dataset in first.reader.pixel_fields]
        return tuple(
            PixelRows(one.name, one.kind, index.row_shape, index.dtype.str)
            for one, index in zip(first.catalog.pixel_fields, indexes, strict=True)
        )

    @cached_property
    def structure(self) -> FileStructure:
        """The structure of the output."""
        first, catalog = self.parts[0], self.catalog
        compression = parse_compression(str(first.options.get("compression", "none")))
        row_shape = () if first.is_encoded else first.index.row_shape
        if self.offsets is not None:
            chunks = plan_data_chunks(int(self.offsets[-1]))
        else:
            chunks = plan_chunks(
                self.rows, math.prod(row_shape), chunk_rows=self.chunk_rows, whole_pages=compression is None
            )
        structure = FileStructure(
            row_shape=row_shape,
            chunk_rows=chunks.rows,
            layout=first.layout,
            compat=bool(first.options.get("compat", False)),
            attributes={schema.VERSION: __version__, schema.OPTIONS: options_text(self.options())},
            compression=compression,
            fields=self.pixel_rows,
        )
        names = sum(utf8(texts).nbytes for texts in (catalog.label_names or (), [name for name, _, _ in self.splits]))
        datasets = 2 * (len(catalog.fields) + len(catalog.pixel_fields)) + 1
        return replace(structure, metadata_bytes=plan_metadata(chunks.count, structure, names, datasets))

    def options(self) -> dict[str, Any]:
        """Return the options that the output stores: those of the first part.

        If `verb` is not None, the returned options also contain the verb and the identities of the parts.
        """
        if self.verb is None:
            return self.parts[0].options
        made_of = {"verb": self.verb, "parts": [part.identity for part in self.parts]}
        return {**self.parts[0].options, "combined": made_of}

    @cached_property
    def tables(self) -> PackTables:
        """The data of all tables."""
        catalog, sizes = self.catalog, {}
        if self.offsets is not None:
            image_sizes = self._gathered(lambda part: _encoded(part).image_sizes)
            sizes = {schema.ENCODED_OFFSETS: self.offsets, schema.ENCODED_SIZE: image_sizes}
        return PackTables(
            labels=catalog.labels,
            label_names=catalog.label_names,
            fields=catalog.fields,
            filenames=catalog.names,
            splits=self.splits,
            checksums=self.checksums(0),
            pixel_checksums=tuple(self.checksums(number + 1) for number in range(len(self.pixel_rows))),
            encoded=sizes,
            encoded_masks=[self._masks(number) for number in range(len(catalog.pixel_fields)) if sizes],
            statistics=self.statistics,
            rejects=sorted(catalog.rejects, key=lambda reject: (reject.name, reject.reason)),
        )

    def _masks(self, number: int) -> EncodedMasks:
        """Return where the parts store the masks of field `number` of `Catalog.pixel_fields`.

        Call this only if the packs keep JPEG files. Their masks are PNG files.
        """
        files: list[tuple[EncodedFile, int]] = [(EncodedFile("", 0, 0), 0)] * self.rows
        for owner, part in enumerate(self.parts):
            dataset = part.pixel_datasets[number + 1]
            index, checksums = part.engine.indexes[dataset], part.checksums(dataset)
            assert isinstance(index, EncodedIndex)
            assert index.base is not None
            for position in np.flatnonzero(self.origins.owners == owner).tolist():
                row = int(self.origins.rows[position])
                start, stop = int(index.offsets[row]), int(index.offsets[row + 1])
                place = EncodedFile(str(part.path), index.base + start, int(checksums[row]), dataset, row)
                files[position] = (place, stop - start)
        return EncodedMasks(self.catalog.pixel_fields[number].name, self.parts[0].pixel_dtypes[number].str, files)


def _tables_at(merged: Catalog, order: Rows) -> Catalog:
    """Return `merged` with only the rows `order`, in that order; the reader and the pixel fields do not change."""
    return replace(
        merged,
        names=merged.names.take(order),
        split_ids=merged.split_ids[order],
        labels=None if merged.labels is None else merged.labels[order],
        fields={name: values[order] for name, values in merged.fields.items()},
    )


def _split_ranges(catalog: Catalog) -> list[tuple[str, int, int]]:
    """Return the name, first row and end row of each run of rows of one split, and of each split without rows."""
    edges = equal_runs(catalog.split_ids.astype(np.int64)).tolist()
    numbers = catalog.split_ids[edges[:-1]].tolist()
    found = [(number, start, stop) for number, (start, stop) in zip(numbers, itertools.pairwise(edges), strict=True)]
    for number in sorted({*range(len(catalog.split_names))} - {*numbers}):
        # As in a conversion, a split without rows stands before the next split.
        at = next((index for index, (other, _, _) in enumerate(found) if other > number), len(found))
        row = found[at][1] if at < len(found) else len(catalog)
        found.insert(at, (number, row, row))
    return [(catalog.split_names[number], start, stop) for number, start, stop in found]


def _encoded(part: Part) -> EncodedIndex:
    assert isinstance(part.index, EncodedIndex)
    return part.index
