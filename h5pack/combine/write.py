"""Writes the pack that a `Combination` plans: copies the rows of other packs, or writes a virtual file over the packs.

The output gets its name once it is complete. If the process is killed, a resumed run repeats the interrupted step. It
copies uncompressed rows again only if their bytes in the file do not match their checksums. It writes a compressed
output from the beginning.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5pack.combine.combination import Combination
from h5pack.combine.parts import Part, Rows
from h5pack.errors import OutputExistsError, ResumeError, SourceError
from h5pack.format import schema
from h5pack.format.checksums import crc32, row_checksums
from h5pack.format.fields import field_checksums
from h5pack.format.row_offsets import CheckTask, wrong_rows
from h5pack.pack import finish
from h5pack.pack.compression import compress_chunk
from h5pack.pack.file_structure import (
    copy_structure,
    create_file,
    describe_dataset,
    describe_file,
    options_text,
    require_group,
    table_bytes,
    write_structure,
)
from h5pack.pack.journal import Journal
from h5pack.pack.options import ConvertOptions
from h5pack.pack.output import Output, OutputLock
from h5pack.pack.resume import Unfinished
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.encoded import EncodedIndex
from h5pack.read.hdf5 import attribute_names, open_file, same_names, text, utf8
from h5pack.read.ragged import own_fields
from h5pack.read.virtual_index import VirtualIndex
from h5pack.system.arrays import consecutive_runs, run_edges
from h5pack.system.files import clone_range, drop_pages, read_all, reporting_disk_errors, reserve, sync_path, write_all
from h5pack.system.machine import available_cpus
from h5pack.system.processes import open_executor, run, shared
from h5pack.system.progress import Stages
from h5pack.system.text import counted, format_bytes, printable, printable_lines
from h5pack.version import __version__

_TASK_BYTES = 8 * 1024 * 1024
_BLOCK = schema.ALIGNMENT_BYTES
_MAPPING_BYTES = 512
"""Upper bound on the bytes of one mapping (see `_VirtualRows`) in a virtual file, without the name of the source file.
"""


@dataclass(frozen=True)
class CombineReport:
    """The result of `append`, `join` or `subset`."""

    path: str  #: the output
    images: int  #: rows of the output
    bytes: int  #: size of the output
    copied_bytes: int = 0  #: bytes of rows that were written; rows that share disk blocks with a pack do not count
    rejects: int = 0  #: images that were not packed, listed in ``OUT.rejects.csv``
    added: int = 0  #: rows that `append` added
    seconds: dict[str, float] = field(default_factory=dict)  #: duration of each stage, such as "copy"
    already_complete: bool = False  #: True if ``resume=True`` found a complete output, or `append` found no new images
    notes: tuple[str, ...] = ()  #: remarks of `append`, such as the classes that the pack did not have before

    def to_text(self) -> str:
        """Return the report as text of one or more lines."""
        if self.already_complete:
            return printable(f"{self.path}: already complete, {counted(self.images, 'image')}")
        size, copied, total = format_bytes(self.bytes), format_bytes(self.copied_bytes), sum(self.seconds.values())
        images = counted(self.images, "image") + (f" ({self.added:,} new)" if self.added else "")
        lines = [f"done     {self.path}: {images}, {size}, {copied} of rows written, {total:.1f} s"]
        if self.rejects:
            lines.append(f"rejects  {self.rejects:,}, listed with reasons in {self.path}.rejects.csv")
        return printable_lines([*lines, *(f"note     {note}" for note in self.notes)])


class _UnfinishedFile(Unfinished):
    plan: Combination

    def __init__(self, plan: Combination, output: Output, lock: OutputLock, overwrite: bool, resume: bool) -> None:
        self.plan, self.output, self.own_lock = plan, output, lock
        self.structure = plan.structure
        journal = Journal(output.journal)
        before, now = journal.plan() if resume else None, self._identity()
        self.resumes = before is not None
        # As in `convert`, the output may be replaced if the interrupted run or this run has overwrite=True.
        self.overwrite = bool(before and before.pop("overwrite", False)) or overwrite
        if self.overwrite:
            output.permissions_of = output.final
        if before is None:
            output.require_not_begun(lock, ConvertOptions(overwrite=overwrite, resume=resume))
            output.remove_leftovers()
            lock.renew()
        elif before != now:
            problem = (
                "was begun with other packs, other options or another version of h5pack; resume with the same packs, "
                "options and version, or start over with overwrite=True and without resume=True"
            )
            raise ResumeError.at(output.partial, problem, "overwrite=True", "resume=True")
        else:
            drop_pages(lock.descriptor)
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


def write_combination(plan: Combination, out: Path, *, overwrite: bool, resume: bool, progress: bool) -> CombineReport:
    """Write the pack. Raises the errors of `h5pack.convert` about the output, and errors of reading the parts."""
    output, stages = Output(out), Stages(progress)
    options = ConvertOptions(overwrite=overwrite, resume=resume)
    output.check(options)
    overwrite, resume = options.overwrite, options.resume  # bool, not np.bool_: the journal is JSON
    if resume and not overwrite and output.final.exists() and not output.partial.exists():
        return _existing_report(plan, output)
    advice = "make room, then run again with resume=True"
    with reporting_disk_errors(output.partial, advice, "resume=True"), contextlib.closing(OutputLock(output)) as lock:
        pack = _UnfinishedFile(plan, output, lock, overwrite, resume)
        if plan.structure.compression is None:
            copied = _copy_rows(pack, stages)
            with stages("finish", plan.rows):
                finish.complete(pack, plan.tables)
        else:
            copied = _compress_rows(pack, stages)
        finish.publish(output, lock, pack.overwrite, plan.tables.rejects)
        size, rejects = os.fstat(lock.descriptor).st_size, len(plan.tables.rejects)
    return CombineReport(str(output.final), plan.rows, size, copied, rejects, seconds=stages.seconds)


def _existing_report(plan: Combination, output: Output) -> CombineReport:
    """Return the report of a complete output; raise OutputExistsError if it is not a copy of these rows."""
    with open_file(output.final) as file:
        same = text(file.attrs.get(schema.OPTIONS, b"")) == options_text(plan.options()) and _has_tables(file, plan)
        same = same and not any(file[name].is_virtual for name, _, _ in plan.structure.datasets)
    if not same:
        problem = "exists, but was made of other packs or rows, or is a virtual file; give another name, or "
        problem += "overwrite=True to replace it"
        raise OutputExistsError.at(output.final, problem, "overwrite=True")
    output.remove_leftovers()
    return CombineReport(str(output.final), plan.rows, output.final.stat().st_size, already_complete=True)


def _has_tables(file: h5py.File, plan: Combination) -> bool:
    """Return whether `file` has the file names, splits, labels, fields and row checksums that `plan` describes."""
    tables, path = plan.tables, schema.field_path
    images, *pixels = (dataset for dataset, _, _ in plan.structure.datasets)
    images = schema.ENCODED if tables.encoded else images
    checksums: dict[str, Any] = dict(zip((images, *pixels), tables.all_checksums, strict=True))
    checksums |= {path(one.name): [place.checksum for place, _ in one.files] for one in tables.encoded_masks}
    checksums |= {path(name): field_checksums(values) for name, values in tables.fields.items()}
    names = {path(name): getattr(values, "classes", None) for name, values in tables.fields.items()}
    if tables.labels is not None:
        checksums[schema.LABELS], names[schema.LABELS] = row_checksums(tables.labels), tables.label_names
    return (
        {images, *own_fields(file), *(schema.LABELS,) * (schema.LABELS in file)} == {*checksums}
        and np.array_equal(file[schema.FILENAMES][()], utf8(tables.filenames))
        and [text(name) for name in file[schema.SPLIT_NAMES][()]] == [name for name, _, _ in tables.splits]
        and file[schema.SPLIT_ROWS][()].tolist() == [list(rows) for _, *rows in tables.splits]
        and all(np.array_equal(file.get(schema.checksums_path(name), ()), rows) for name, rows in checksums.items())
        and all(
            same_names(
                attribute_names(file[name], schema.CLASSES) or attribute_names(file[name], schema.COLUMNS), found
            )
            for name, found in names.items()
        )
    )


def _copy_rows(pack: _UnfinishedFile, stages: Stages) -> int:
    """Copy the rows of all datasets; return the number of copied bytes. Shared disk blocks do not count."""
    plan, total, num_threads = pack.plan, 0, available_cpus()
    with stages("copy", plan.rows * len(pack.all_offsets)) as advance, ThreadPoolExecutor(num_threads) as threads:
        for number in range(len(pack.all_offsets)):
            copier = RowCopier(pack, number)
            for rows, copied in run(threads, copier.copy, copier.tasks(), 2 * num_threads):
                total += copied
                advance(rows)
    return total


class RowCopier:
    """Copies the rows of one dataset to their offsets in an unfinished file, from any number of threads.

    If the file system supports it, the unfinished file shares disk blocks with the files of the parts. Otherwise, rows
    are read, compared with their checksums, and written. A resumed run does not copy rows whose bytes are already in
    the unfinished file. Threads are used instead of processes, because most of this work releases the GIL. `number` is
    the position of the dataset in `Part.pixel_datasets`.
    """

    def __init__(self, pack: _UnfinishedFile, number: int) -> None:
        self._parts, self._origins, self._number = pack.plan.parts, pack.plan.origins, number
        self._offsets, self._checksums = pack.all_offsets[number], pack.plan.tables.all_checksums[number]
        self._path, self._descriptor, self._resumes = str(pack.output.partial), pack.own_lock.descriptor, pack.resumes
        self._copied_parts: set[int] = set()  # indices of parts that cannot share disk blocks with the file

    def tasks(self) -> Iterator[tuple[int, int]]:
        """Yield the (start, stop) rows of each task, which are contiguous in the file."""
        for start, count in self._offsets.runs(np.arange(len(self._origins)), _TASK_BYTES):
            yield start, start + count

    def copy(self, task: tuple[int, int]) -> tuple[int, int]:
        """Copy the rows of a task, or share their disk blocks; return (number of rows, number of copied bytes).

        Rows whose disk blocks are shared are not compared with their checksums.
        """
        copied = 0
        for owner, start, stop in self._origins.runs(*task):
            if owner not in self._copied_parts and self._clone(owner, start, stop):
                continue
            if self._resumes and self._is_written(start, stop):
                continue
            data = self._read(self._parts[owner], self._origins.rows[start:stop])
            write_all(self._descriptor, data, self._offsets.offset(start))
            copied += len(data)
        return task[1] - task[0], copied

    def _clone(self, owner: int, start: int, stop: int) -> bool:
        """Share the disk blocks of contiguous rows, and copy partial blocks at both ends.

        Return False if that is not possible, so that the rows must be copied.
        """
        part = self._parts[owner]
        source = self._source_range(part, start, stop)
        if source is None:
            return False
        first, count = source
        target = self._offsets.offset(start)
        head = -first % _BLOCK
        middle = (count - head) // _BLOCK * _BLOCK
        if (target - first) % _BLOCK or middle <= 0:
            return False
        descriptor = part.engine.storage.open()
        if not clone_range(descriptor, self._descriptor, first + head, middle, target + head):
            self._copied_parts.add(owner)
            return False
        for begin, end in ((0, head), (head + middle, count)):
            write_all(self._descriptor, read_all(descriptor, end - begin, first + begin), target + begin)
        return True

    def _source_range(self, part: Part, start: int, stop: int) -> tuple[int, int] | None:
        """Return the offset and the size, in bytes, of rows in their part's file; None if they are not contiguous."""
        rows = self._origins.rows[start:stop]
        index = part.engine.indexes[part.pixel_datasets[self._number]]
        if len(consecutive_runs(rows)) != 2:
            return None
        count = int(self._offsets.edges(start, stop - start)[-1])
        if isinstance(index, EncodedIndex):
            return None if index.base is None else (index.base + int(index.offsets[rows[0]]), count)
        first, last = index.offset_of(int(rows[0])), index.offset_of(int(rows[-1]))
        if first is None or last is None or last - first != count - index.row_bytes:
            return None
        return first, count

    def _is_written(self, start: int, stop: int) -> bool:
        edges, offset = self._offsets.edges(start, stop - start), self._offsets.offset(start)
        task = CheckTask(self._path, start, offset, edges, self._checksums[start:stop])
        return not wrong_rows(task, self._descriptor)

    def _read(self, part: Part, rows: Rows) -> bytes | memoryview:
        dataset, engine = part.pixel_datasets[self._number], part.engine
        if not isinstance(engine.indexes[dataset], EncodedIndex):
            return part.read_pixels(dataset, rows).reshape(-1).view(np.uint8).data
        found = engine.read_bytes(dataset, rows)
        engine.check(dataset, rows, found)
        return b"".join(found)


def _compress_rows(pack: _UnfinishedFile, stages: Stages) -> int:
    """Write the compressed output; return the total size of its chunks in bytes."""
    plan, step, num_workers, total = pack.plan, pack.structure.chunk_rows, available_cpus(), 0
    datasets = len(pack.structure.datasets)
    with stages("compress", plan.rows * datasets) as advance, open_executor(num_workers, None, plan) as executor:

        def chunks() -> Iterator[bytes]:
            nonlocal total
            tasks = list(itertools.product(range(datasets), range(0, plan.rows, step)))
            found = run(executor, _compressed_chunk, tasks, 2 * num_workers, ordered=True)
            for (_, start), data in zip(tasks, found, strict=True):
                total += len(data)
                advance(min(step, plan.rows - start))
                yield data

        finish.complete_compressed(pack, plan.tables, chunks(), executor)
    return total


def _compressed_chunk(task: tuple[int, int]) -> bytes:
    """Return the compressed bytes of a chunk. `task` is (position of the dataset, first row of the chunk).

    If a part has a chunk of the same rows with the same compression, return the stored bytes of that chunk.
    """
    plan: Combination = shared()
    number, start = task
    structure = plan.structure
    compression = structure.compression
    assert compression is not None
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
    """Return the stored bytes of the part's chunk that consists of exactly `rows`.

    Return None if there is no such chunk, or if its bytes do not match their checksum.
    """
    index = part.engine.indexes[part.pixel_datasets[number]]
    chunk, within = divmod(int(rows[0]), index.chunk_rows)
    whole = len(rows) == index.chunk_rows and not within and len(consecutive_runs(rows)) == 2
    if not whole or index.codec is None or index.stored_checksums is None or index.filter_masks[chunk]:
        return None
    data = read_all(part.engine.storage.open(), int(index.sizes[chunk]), int(index.addresses[chunk]))
    return data if crc32(data) == int(index.stored_checksums[chunk]) else None


def write_virtual(plan: Combination, out: Path, *, overwrite: bool) -> CombineReport:
    """Write the virtual file of a combination. It takes little time, so an interrupted call cannot be resumed."""
    begin, options = time.perf_counter(), ConvertOptions(overwrite=overwrite)
    output = Output(out, permissions_of=out if overwrite else None)
    output.check(options, resumable=False)
    advice = "make room, then run again"
    with reporting_disk_errors(output.partial, advice), contextlib.closing(OutputLock(output)) as lock:
        output.require_not_begun(lock, options, resumable=False)
        lock.renew()
        try:
            make_virtual(plan, output, lock, output.final.parent)
            finish.publish(output, lock, overwrite, plan.tables.rejects)
        except BaseException:
            output.structure.unlink(missing_ok=True)
            output.partial.unlink(missing_ok=True)
            raise
        size, rejects = os.fstat(lock.descriptor).st_size, len(plan.tables.rejects)
    seconds = {"write": time.perf_counter() - begin}
    return CombineReport(str(output.final), plan.rows, size, 0, rejects, seconds=seconds)


def make_virtual(plan: Combination, output: Output, lock: OutputLock, folder: Path) -> None:
    """Replace ``OUT.partial`` by the virtual file, which refers to packs by paths relative to `folder`."""
    lock.create(output.structure)
    _write(plan, output.structure, folder)
    sync_path(output.structure)
    lock.replace(output.structure)


def _write(plan: Combination, path: Path, folder: Path) -> None:
    mappings = [list(_mappings(plan, number)) for number in range(1 + len(plan.pixel_rows))]
    files = {one.file for found in mappings for one in found}
    names = {file: virtual_name(file, folder) for file in files}
    room = sum(len(names[one.file]) + _MAPPING_BYTES for found in mappings for one in found)
    room += plan.structure.metadata_bytes
    # HDF5 1.8 has no virtual datasets, so `compat` is not possible.
    structure = replace(plan.structure, compat=False, compression=None, metadata_bytes=room)
    lengths = [plan.stored_rows(plan.rows), *[plan.rows] * len(structure.fields)]
    with create_file(path, structure) as file:
        # HDF5 2.0.0 may crash if it cannot write metadata when it closes a file, so allocate the disk space first.
        reserve(path, 0, structure.metadata_bytes)
        reserve(path, structure.metadata_block_bytes, table_bytes(plan.tables))
        for (name, row_shape, dtype), found, rows in zip(structure.datasets, mappings, lengths, strict=True):
            shape = (rows, *row_shape)
            require_group(file, os.path.dirname(name))
            kind, space = h5py.h5t.py_create(np.dtype(dtype)), h5py.h5s.create_simple(shape)
            create = _sources(shape, found, names)
            describe_dataset(h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, space, create)), structure)
        describe_file(file, structure, plan.tables)
    # Free the reserved space beyond the end of the file.
    os.truncate(path, path.stat().st_size)


class _VirtualRows(NamedTuple):
    """A mapping: consecutive rows of a virtual dataset, and their location in a source dataset.

    In a dataset of encoded images, a row is a single byte.
    """

    first: int  # first row in the virtual dataset
    length: int
    file: str
    dataset: str
    start: int  # first row in the source dataset
    rows: int  # number of rows of the whole source dataset


def _mappings(plan: Combination, number: int) -> Iterator[_VirtualRows]:
    """Yield the mappings of the dataset at position `number` of `Part.pixel_datasets`, in ascending order of rows.

    Rows of a virtual part are mapped to the files that store them, not to the virtual file.
    """
    for owner, start, stop in plan.origins.runs(0, plan.rows):
        part, rows = plan.parts[owner], plan.origins.rows[start:stop]
        index = part.engine.indexes[part.pixel_datasets[number]]
        for low, high in itertools.pairwise(consecutive_runs(rows).tolist()):
            first, begin, end = start + low, int(rows[low]), int(rows[high - 1]) + 1
            if isinstance(index, EncodedIndex) and plan.offsets is not None:
                data = index.data
                first, begin, end = int(plan.offsets[first]), int(index.offsets[begin]), int(index.offsets[end])
            else:
                data = index
            if begin < end:
                yield from _sources_of(str(part.path), data, first, begin, end)


def _sources_of(path: str, index: ChunkIndex, first: int, begin: int, end: int) -> Iterator[_VirtualRows]:
    if not isinstance(index, VirtualIndex):
        yield _VirtualRows(first, end - begin, path, index.name, begin, index.rows)
        return
    ranges = index.ranges(begin, end)
    counts = np.diff(np.append(ranges.firsts, end))
    starts = ranges.firsts + ranges.shifts
    # A range never extends beyond a chunk, so there may be many. Join ranges that follow each other in one source.
    joins = (np.diff(ranges.source_ids) == 0) & (starts[1:] == starts[:-1] + counts[:-1])
    for low, high in itertools.pairwise(run_edges(~joins).tolist()):
        source = index.sources[int(ranges.source_ids[low])]
        count, start = int(counts[low:high].sum()), int(starts[low])
        here = first + int(ranges.firsts[low]) - begin
        yield _VirtualRows(here, count, source.file.path, source.index.name, start, source.index.rows)


def _sources(shape: tuple[int, ...], mappings: list[_VirtualRows], names: dict[str, bytes]) -> h5py.h5p.PropDCID:
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_obj_track_times(False)
    origin = (0,) * (len(shape) - 1)
    for one in mappings:
        here, there = h5py.h5s.create_simple(shape), h5py.h5s.create_simple((one.rows, *shape[1:]))
        here.select_hyperslab((one.first, *origin), (one.length, *shape[1:]))
        there.select_hyperslab((one.start, *origin), (one.length, *shape[1:]))
        create.set_virtual(here, names[one.file], one.dataset.replace("%", "%%").encode(), there)
    return create


def virtual_name(path: str, folder: Path) -> bytes:
    """Return the name by which a virtual file in `folder` refers to the file `path`: its path relative to `folder`.

    Symbolic links are resolved if the relative path would otherwise lead to another file: after a link to a folder, the
    system resolves ".." to the parent of the link's target. Raise SourceError if the name is not valid UTF-8.
    """
    found = os.path.relpath(path, folder)
    parent, name = os.path.split(path)
    if os.path.realpath(folder / os.path.dirname(found)) != os.path.realpath(parent):
        found = os.path.relpath(os.path.join(os.path.realpath(parent), name), os.path.realpath(folder))
    try:
        # Write % as %%, because HDF5 would replace %b by the number of a block.
        return found.replace("%", "%%").encode()
    except UnicodeEncodeError as error:
        problem = "its path is not valid UTF-8, so h5py could not read a virtual file that refers to it; rename it"
        raise SourceError.at(path, problem) from error
