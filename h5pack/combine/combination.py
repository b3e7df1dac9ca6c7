"""Makes one pack of the rows of other packs (its parts): plans the tables and the structure, and writes the output.

The output gets its name once it is complete. Every step can be repeated after a kill: uncompressed rows are copied
again only if the bytes in the file do not match their checksums; a compressed output is written from the beginning.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.combine.parts import Part, RowOrigins, Rows
from h5pack.combine.row_copies import RowCopier
from h5pack.errors import OutputExistsError, ResumeError, SourceError
from h5pack.format import schema
from h5pack.format.checksums import crc32, row_checksums
from h5pack.format.plans import plan_chunks
from h5pack.pack import finish
from h5pack.pack.compression import compress_chunk, parse_compression, require_filter
from h5pack.pack.file_structure import (
    EncodedMasks,
    FileStructure,
    PackTables,
    PixelRows,
    copy_structure,
    options_text,
    plan_metadata,
    write_structure,
)
from h5pack.pack.journal import EncodedFile, Journal
from h5pack.pack.kept import plan_data_chunks
from h5pack.pack.options import ConvertOptions
from h5pack.pack.output import Output, OutputLock, Stages
from h5pack.pack.resume import Unfinished
from h5pack.read.encoded import EncodedIndex
from h5pack.read.hdf5 import open_file, text, utf8
from h5pack.sources.catalog import Catalog
from h5pack.system.arrays import consecutive_runs, equal_runs
from h5pack.system.files import read_all, reporting_full_disk
from h5pack.system.machine import available_cpus
from h5pack.system.processes import open_executor, run, shared
from h5pack.system.text import format_bytes
from h5pack.version import __version__

Splits = list[tuple[str, int, int]]


@dataclass(frozen=True)
class CombineReport:
    """The result of `append`, `join` or `subset`."""

    path: str  #: the output
    images: int  #: rows of the output
    bytes: int  #: size of the output
    copied_bytes: int = 0  #: bytes of rows that were written; rows that share disk blocks with a source do not count
    rejects: int = 0  #: images that were not packed, listed in ``OUT.rejects.csv``
    added: int = 0  #: rows that `append` added
    seconds: dict[str, float] = field(default_factory=dict)
    already_complete: bool = False  #: whether nothing was left to do, with ``resume=True`` or without new images

    def to_text(self) -> str:
        """Return the report as one or two lines of text."""
        if self.already_complete:
            return f"{self.path}: already complete"
        size, copied, total = format_bytes(self.bytes), format_bytes(self.copied_bytes), sum(self.seconds.values())
        images = f"{self.images:,} images" + (f" ({self.added:,} new)" if self.added else "")
        text = f"done     {self.path}: {images}, {size}, {copied} of rows written, {total:.1f} s"
        if self.rejects:
            text += f"\nrejects  {self.rejects:,}, listed with reasons in {self.path}.rejects.csv"
        return text


@dataclass(frozen=True)
class Combination:
    """The plan of a pack that is made of the rows of parts: its contents, and where each row comes from."""

    verb: str | None  # append, join or subset, stored with the options; None if the parts are shards of a conversion
    parts: tuple[Part, ...]
    catalog: Catalog  # the tables of the new pack
    origins: RowOrigins
    splits: Splits
    statistics: dict[str, Any]
    chunk_rows: int | None = None  # None: as `convert` chooses by default. Unused if the parts keep JPEG files

    @classmethod
    def of(
        cls, verb: str | None, parts: Sequence[Part], merged: Catalog, order: Rows, statistics: dict[str, Any],
        chunk_rows: int | None = None,
    ) -> Combination:  # fmt: skip
        """Return a combination. `order` lists its rows, as row numbers of `merged`, the catalog of all parts' rows."""
        catalog = merged if np.array_equal(order, np.arange(len(merged))) else _tables_at(merged, order)
        edges = equal_runs(catalog.split_ids.astype(np.int64))
        names = [catalog.split_names[number] for number in catalog.split_ids[edges[:-1]].tolist()]
        if verb is None:
            # The rows are sorted by split. As in one file, keep splits without rows.
            names = list(catalog.split_names)
            edges = np.searchsorted(catalog.split_ids, np.arange(1 + len(names)))
        pairs = itertools.pairwise(edges.tolist())
        splits = [(name, start, stop) for name, (start, stop) in zip(names, pairs, strict=True)]
        return cls(verb, tuple(parts), catalog, RowOrigins.of(parts, order), splits, statistics, chunk_rows)

    @property
    def rows(self) -> int:
        """Number of rows of the output."""
        return len(self.origins)

    def permissions_of(self, out: Path) -> Path | None:
        """Return the file whose permissions the output gets: the pack that it replaces, if rows are appended to it."""
        return out if self.verb == "append" else None

    def stored_rows(self, rows: int) -> int:
        """Return the length along axis 0 that the images of the first `rows` rows take: rows of pixels, or bytes."""
        return rows if self.offsets is None else int(self.offsets[rows])

    @cached_property
    def offsets(self) -> Rows | None:
        """Boundaries of the encoded rows in bytes from the first row, (N + 1,); None if rows are pixels."""
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
        """Return the checksums of all rows of the dataset at position `number` of `Part.pixel_datasets`."""
        return self._gathered(lambda part: part.checksums(part.pixel_datasets[number]))

    @cached_property
    def pixel_rows(self) -> tuple[PixelRows, ...]:
        """The fields of pixels that are chunked like the images; none if images are encoded."""
        first = self.parts[0]
        if first.is_encoded:
            return ()
        indexes = [first.engine.indexes[dataset] for dataset in first.reader.masks]
        return tuple(
            PixelRows(one.name, one.kind, index.row_shape, index.native_dtype.str)
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
        """Return the options that the pack stores: the first part's and, if set, the verb and the parts' identities."""
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
        """Return where the parts store the masks of field `number`; only for packs that keep JPEG files."""
        files: list[tuple[EncodedFile, int]] = [(EncodedFile("", 0, 0), 0)] * self.rows
        for owner, part in enumerate(self.parts):
            dataset = part.pixel_datasets[number + 1]
            index, checksums = part.engine.indexes[dataset], part.checksums(dataset)
            base = index.base if isinstance(index, EncodedIndex) and index.library_reason is None else None
            if base is None or not isinstance(index, EncodedIndex):
                raise SourceError(
                    f"{part.path}: its masks {dataset!r} are not contiguous in the file; pack it again with "
                    "'h5pack convert'",
                    path=part.path,
                    dataset=dataset,
                )
            for position in np.flatnonzero(self.origins.owners == owner).tolist():
                row = int(self.origins.rows[position])
                start, stop = int(index.offsets[row]), int(index.offsets[row + 1])
                place = EncodedFile(str(part.path), base + start, int(checksums[row]), dataset, row)
                files[position] = (place, stop - start)
        one = self.catalog.pixel_fields[number]
        dtype = self.parts[0].engine.indexes[self.parts[0].pixel_datasets[number + 1]].native_dtype
        return EncodedMasks(one.name, dtype.str, files)


def _tables_at(merged: Catalog, order: Rows) -> Catalog:
    """Select the rows with the numbers `order`, in that order, in all tables of `merged`; the reader stays the same."""
    return replace(
        merged,
        names=merged.names.take(order),
        split_ids=merged.split_ids[order],
        labels=None if merged.labels is None else merged.labels[order],
        fields={name: values[order] for name, values in merged.fields.items()},
    )


def _encoded(part: Part) -> EncodedIndex:
    assert isinstance(part.index, EncodedIndex)
    return part.index


class _UnfinishedFile(Unfinished):
    """The unfinished file of a combination."""

    plan: Combination

    def __init__(self, plan: Combination, output: Output, lock: OutputLock, overwrite: bool, resume: bool) -> None:
        self.plan, self.output, self.own_lock = plan, output, lock
        self.structure = plan.structure
        journal = Journal(output.journal)
        before, now = journal.plan() if resume else None, self._identity()
        self.resumes = before is not None
        # As in `convert`, a resumed run may replace the output if it or the interrupted run was to overwrite it.
        self.overwrite = bool(before and before.pop("overwrite", False)) or overwrite
        if before is None:
            output.require_not_begun(lock, ConvertOptions(overwrite=overwrite, resume=resume))
            output.remove_leftovers()
            lock.renew()
        elif before != now:
            raise ResumeError(
                f"{output.partial}: was begun with other packs, options or another version of h5pack; resume with the "
                "same ones, or start over with overwrite=True and without resume=True",
                path=output.partial,
                parameters=("overwrite=True", "resume=True"),
            )
        self.addresses = write_structure(output.structure, self.structure, plan.stored_rows(plan.rows), None)
        copy_structure(output.structure, lock.descriptor, self.addresses, self.structure)
        if before is None:
            journal.start({**now, "overwrite": self.overwrite}, np.empty(0, np.uint64))
        self.all_offsets = self.structure.row_offsets(self.addresses, plan.offsets)

    def _identity(self) -> dict[str, Any]:
        plan = self.plan
        origins = crc32(plan.origins.rows, crc32(plan.origins.owners))
        shape = [plan.rows, self.structure.chunk_rows, *self.structure.row_shape]
        return {
            "h5pack": __version__, "options": plan.options(), "shape": shape,
            "tables": [plan.catalog.tables_checksum(), origins],
        }  # fmt: skip


def write_combination(
    plan: Combination, out: Path, *, overwrite: bool, resume: bool, progress: bool, added: int = 0
) -> CombineReport:
    """Write the pack. Raises the errors of `h5pack.convert` about the output, and errors of reading the parts."""
    output, stages = Output(out, permissions_of=plan.permissions_of(out)), Stages(progress)
    output.check(ConvertOptions(overwrite=overwrite, resume=resume))
    if resume and not overwrite and output.final.exists() and not output.partial.exists():
        return _existing_report(plan, output)
    lock = OutputLock(output)
    try:
        with reporting_full_disk(output.partial, "make room, then run again with resume=True", "resume=True"):
            pack = _UnfinishedFile(plan, output, lock, overwrite, resume)
            if plan.structure.compression is None:
                copied = _copy_rows(pack, stages)
                with stages("finish", plan.rows):
                    finish.complete(pack, plan.tables)
            else:
                copied = _compress_rows(pack, stages)
            finish.publish(output, lock, pack.overwrite, plan.tables.rejects)
        size = os.fstat(lock.descriptor).st_size
        return CombineReport(
            str(output.final), plan.rows, size, copied, len(plan.tables.rejects), added=added, seconds=stages.seconds
        )
    finally:
        lock.release()


def _existing_report(plan: Combination, output: Output) -> CombineReport:
    """Return the report of an output that is already complete.

    Raise OutputExistsError if its options or its rows differ from the plan.
    """
    with open_file(output.final) as file:
        same = text(file.attrs.get(schema.OPTIONS, b"")) == options_text(plan.options())
        same = same and _has_rows(file, plan.tables)
    if not same:
        raise OutputExistsError(
            f"{output.final}: exists, but was made of other rows; give another name, or overwrite=True without "
            "resume=True to replace it",
            path=output.final,
            parameters=("overwrite=True", "resume=True"),
        )
    output.remove_leftovers()
    return CombineReport(str(output.final), plan.rows, output.final.stat().st_size, already_complete=True)


def _has_rows(file: h5py.File, tables: PackTables) -> bool:
    """Return whether a pack has the images, file names, labels and splits of the given tables, in the same order."""
    checksums = {schema.ENCODED if tables.encoded else schema.IMAGES: tables.checksums}
    if tables.labels is not None:
        checksums[schema.LABELS] = row_checksums(tables.labels)
    return (
        np.array_equal(file[schema.FILENAMES][()], utf8(tables.filenames))
        and all(np.array_equal(file[f"{schema.CHECKSUMS}/{name}"][()], rows) for name, rows in checksums.items())
        and [text(name) for name in file[schema.SPLIT_NAMES][()]] == [name for name, _, _ in tables.splits]
        and file[schema.SPLIT_ROWS][()].tolist() == [list(rows) for _, *rows in tables.splits]
    )


def _copy_rows(pack: _UnfinishedFile, stages: Stages) -> int:
    """Copy the rows of all datasets; return the number of copied (not shared) bytes."""
    plan, total, num_threads = pack.plan, 0, available_cpus()
    with (
        stages("copy", plan.rows * len(pack.all_offsets)) as advance,
        ThreadPoolExecutor(num_threads) as threads,
    ):
        for number, (offsets, checksums) in enumerate(zip(pack.all_offsets, plan.tables.all_checksums, strict=True)):
            copier = RowCopier(
                plan.parts, number, plan.origins, offsets, checksums, pack.own_lock.descriptor, resumes=pack.resumes
            )
            for rows, copied in run(threads, copier.copy, copier.tasks(), 2 * num_threads):
                total += copied
                advance(rows)
    return total


def _compress_rows(pack: _UnfinishedFile, stages: Stages) -> int:
    """Write the compressed output; return the total size of its chunks in bytes."""
    plan, step, num_workers, total = pack.plan, pack.structure.chunk_rows, available_cpus(), 0
    datasets = len(pack.structure.datasets)
    with (
        stages("compress", plan.rows * datasets) as advance,
        open_executor(num_workers, None, plan) as executor,
    ):

        def chunks() -> Iterator[bytes]:
            nonlocal total
            tasks = ((number, start) for number in range(datasets) for start in range(0, plan.rows, step))
            for data in run(executor, _compressed_chunk, tasks, 2 * num_workers, ordered=True):
                total += len(data)
                yield data
                advance(step)

        finish.complete_compressed(pack, plan.tables, chunks(), executor)
    return total


def _compressed_chunk(task: tuple[int, int]) -> bytes:
    """Return the compressed bytes of a chunk. `task` is (position of the dataset, first row of the chunk).

    If a part has a chunk of the same rows with the same compression, that chunk's bytes are reused.
    """
    plan: Combination = shared()
    number, start = task
    structure = plan.structure
    compression = structure.compression
    assert compression is not None
    require_filter(compression)
    _, shape, dtype = structure.datasets[number]
    stop = min(start + structure.chunk_rows, plan.rows)
    chunk = np.zeros((structure.chunk_rows, *shape), dtype)
    for owner, first, last in plan.origins.runs(start, stop):
        part, rows = plan.parts[owner], plan.origins.rows[first:last]
        if last - first == len(chunk) and part.options.get("compression") == compression.name:
            stored = _stored_chunk(part, number, rows)
            if stored is not None:
                return stored
        chunk[first - start : last - start] = part.read_pixels(part.pixel_datasets[number], rows)
    return compress_chunk(chunk, compression)


def _stored_chunk(part: Part, number: int, rows: Rows) -> bytes | None:
    """Return the bytes of a part's chunk if it has exactly these rows and matches its checksum, else None."""
    index = part.engine.indexes[part.pixel_datasets[number]]
    chunk, within = divmod(int(rows[0]), index.chunk_rows)
    whole = len(rows) == index.chunk_rows and not within and len(consecutive_runs(rows)) == 2
    if not whole or index.codec is None or index.stored_checksums is None or index.filter_masks[chunk]:
        return None
    data = read_all(part.engine.storage.open(), int(index.sizes[chunk]), int(index.addresses[chunk]))
    return data if crc32(data) == int(index.stored_checksums[chunk]) else None
