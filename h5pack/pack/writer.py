"""Writing rows: the missing rows are divided into tasks; workers decode the images, write the rows, and journal them.

A row's offset in the file is known before its pixels, so workers share nothing but the file: no pixels are sent between
processes, and the HDF5 library is not used.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from h5pack.errors import OutputBusyError, RejectedImageError, SourceError
from h5pack.format import schema
from h5pack.format.checksums import crc32
from h5pack.format.plans import DEFAULT_CHUNK_BYTES
from h5pack.format.row_offsets import RowOffsets
from h5pack.images.decode import Decoder, PixelOptions, Upright, strict_pillow
from h5pack.images.headers import DecodePath, parse_jpeg
from h5pack.images.masks import MaskDecoder, naming_mask
from h5pack.pack.direct_io import ContiguousRows, RowBuffer, RowFile
from h5pack.pack.file_structure import PixelRows
from h5pack.pack.journal import WRITTEN, EncodedFile, JournalWriter, RowRecord, read_encoded
from h5pack.pack.plan import ConvertPlan
from h5pack.pack.statistics import channel_sums, encoded_sums, sampled_rows, statistics_range
from h5pack.pack.survey import HDF5_ERRORS, memory_error, storage_error
from h5pack.sources.reader import RUN_AGAIN, START_OVER, SourceReader
from h5pack.system.processes import shared

# Limits in bytes of a task's rows, and of the image files they come from. Tasks are large, because after each task a
# worker waits for its last write. On a Dask cluster, each task also costs the scheduler 2 ms.
TASK_BYTES, _TASK_SOURCE_BYTES = 128 * 1024 * 1024, 64 * 1024 * 1024
_TASKS_PER_WORKER = 16
# Rows that are not contiguous in the file are written in groups of this size while the next group is decoded.
_SCATTERED_BYTES = 1024 * 1024
# Files are read, rows decoded, checksums computed and channels summed in blocks of about this size. Doing all four for
# one row after the other takes a quarter more CPU time for images of 32x32 pixels, and 3 % more for 218x178.
_BLOCK_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class WriteJob:
    """The parameters that all writing tasks of one conversion share."""

    path: str  # of ``OUT.partial``
    journal: str  # the journal's folder
    pixels: PixelOptions
    io: str  # direct, buffered or auto; see `h5pack.pack.direct_io`
    inode: int  # of the file; a file at `path` with another inode belongs to another conversion
    durable: bool = False  # whether rows must be flushed because other machines write, too; see `_write_durably`
    keep: bool = False  # whether rows are the bytes of image files instead of pixels
    fields: tuple[PixelRows, ...] = ()
    # Distinguishes equal jobs of two conversions. Otherwise, a worker would go on using the files that it opened for
    # the first conversion, although these files may be deleted.
    token: str = field(default_factory=secrets.token_hex)


Image = tuple[int, str, int, tuple[str, ...], Sequence[int]]
"""An image's catalog index, name, `DecodePath`, names of masks and further images, and size in `Images.sizes`."""

Source = bytes | npt.NDArray[np.uint8]
"""An image before it is decoded: the bytes of its file, or pixels, uint8 (h, w, 1 or 3)."""


@dataclass(frozen=True)
class Images:
    """The images of a worker's task."""

    indices: list[int]  # in the catalog
    names: list[str]
    decode_paths: list[int]
    masks: list[list[str]]  # for each field of pixels, the names of the images' masks or further images
    # Height and width of each image, for which its boxes and keypoints were scaled; empty if they need no check.
    sizes: Sequence[Sequence[int]] = ()

    @classmethod
    def of(cls, plan: ConvertPlan, indices: npt.NDArray[np.int64]) -> Images:
        """Return the images of a plan that have these catalog indices, int64 (n,)."""
        names, masks = plan.catalog.names.at(indices), [one.files.at(indices) for one in plan.catalog.pixel_fields]
        sizes = None if plan.options.draft else plan.catalog.coordinate_sizes
        surveyed = () if sizes is None else sizes[indices].tolist()
        return cls(indices.tolist(), names, plan.decode_paths[indices].tolist(), masks, surveyed)

    def __iter__(self) -> Iterator[Image]:
        masks = zip(*self.masks, strict=True) if self.masks else [()] * len(self.indices)
        sizes = self.sizes or [()] * len(self.indices)
        return zip(self.indices, self.names, self.decode_paths, masks, sizes, strict=True)


@dataclass(frozen=True)
class RowGroup:
    """Rows that are decoded and written together; they may be contiguous in the file or scattered."""

    rows: npt.NDArray[np.int64]  # (n,): planned rows, ascending
    offsets: npt.NDArray[np.int64]  # (n,): byte offset of each row in the file
    images: Images  # of the rows
    sampled: set[int]  # positions in `rows` of the rows that the channel statistics use
    field_offsets: list[npt.NDArray[np.int64]]  # like `offsets`, for each field in `WriteJob.fields`
    # Only with `keep`, where rows are contiguous: the end of each row in bytes, counted from the start of the group,
    # and the location of each image's encoded bytes (None: read the image's file).
    ends: list[int]
    encoded: list[EncodedFile | None]


@dataclass(frozen=True)
class WriteTask:
    """Row groups that one worker decodes and writes."""

    job: WriteJob
    groups: list[RowGroup]

    def __str__(self) -> str:
        first, last = self.groups[0], self.groups[-1]
        return f"rows {first.rows[0]}-{last.rows[-1]} (from {first.images.names[0]!r} on)"


def write_tasks(
    plan: ConvertPlan, job: WriteJob, offsets: Sequence[RowOffsets], missing: npt.NDArray[np.int64], num_workers: int
) -> Iterator[WriteTask]:
    """Yield tasks that write the `missing` rows, int64 (n,), ascending.

    The last tasks are small, so that all workers finish at about the same time. But if rows must be read or written in
    groups, all tasks have about the same size. `offsets` are the row offsets of the images, and of each field that is
    chunked like them.
    """
    row_offsets, *field_offsets = offsets
    sampled = np.zeros(plan.rows, np.bool_)
    sampled[sampled_rows(*statistics_range(plan, plan.row_order), job.keep)] = True
    # The reader may hold all images of a task in memory, where they may be larger than their rows.
    max_task_rows = max(1, TASK_BYTES // max(plan.row_bytes, plan.catalog.reader.row_bytes))
    equal_share = min(max_task_rows, max(1, -(-len(missing) // (num_workers * _TASKS_PER_WORKER))))
    if plan.source_bytes:
        max_task_rows = max(1, min(max_task_rows, _TASK_SOURCE_BYTES * len(plan.catalog) // plan.source_bytes))
    else:
        # The time to read images that are not files is unknown, so make smaller tasks.
        max_task_rows = equal_share
    min_task_rows = max(1, equal_share // 8)
    # A network file system may write back whole pages, so two machines that write to one page could overwrite each
    # other's rows. So keep the rows of a chunk in one task. Chunks of at least 64 KiB share no page. For smaller ones,
    # rely on `RowFile`, which opens the file such that NFS writes only the bytes that changed.
    by_chunk = job.durable and not job.keep and any(one.row_bytes % schema.ALIGNMENT_BYTES for one in offsets)
    row_groups = None  # with `keep`, each file is read by itself
    if by_chunk:
        row_groups = missing // row_offsets.chunk_rows
    elif not job.keep:
        row_groups = plan.catalog.reader.groups(plan.row_order.origins[missing])
    scattered = row_groups is not None and not by_chunk
    shares = (missing,) if row_groups is None else join_groups(missing, row_groups, equal_share)
    left = len(missing)
    for share in shares:
        groups: list[RowGroup] = []
        count = 0
        max_bytes = min(DEFAULT_CHUNK_BYTES if job.keep else plan.chunks.bytes, equal_share * plan.row_bytes)
        for rows in _written_together(share, row_offsets, max_bytes, scattered=scattered):
            max_rows = max(min_task_rows, min(max_task_rows, left // (2 * num_workers)))
            if row_groups is None and groups and count + len(rows) > max_rows:
                yield WriteTask(job, groups)
                groups, left, count = [], left - count, 0
            indices = plan.row_order.origins[rows]
            groups.append(
                RowGroup(
                    rows=rows,
                    offsets=row_offsets.offsets(rows),
                    images=Images.of(plan, indices),
                    sampled={*np.flatnonzero(sampled[rows]).tolist()},
                    field_offsets=[one.offsets(rows) for one in field_offsets],
                    ends=row_offsets.edges(int(rows[0]), len(rows))[1:].tolist() if job.keep else [],
                    encoded=plan.encoded_files(indices) if job.keep else [],
                )
            )
            count += len(rows)
        if groups:
            yield WriteTask(job, groups)


def join_groups(
    rows: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], max_rows: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Divide ascending rows into ascending arrays of whole groups: at most `max_rows` rows, or one larger group.

    `groups`, int64 (n,), has the group number of each row.
    """
    by_group = rows[np.argsort(groups, kind="stable")]
    edges = [0, *(np.flatnonzero(np.diff(np.sort(groups))) + 1).tolist(), len(rows)]
    start = 0
    for edge, after in itertools.pairwise(edges):
        if edge > start and after - start > max_rows:
            yield np.sort(by_group[start:edge])
            start = edge
    if start < len(rows):
        yield np.sort(by_group[start:])


def _written_together(
    rows: npt.NDArray[np.int64], row_offsets: RowOffsets, max_bytes: int, *, scattered: bool
) -> Iterator[npt.NDArray[np.int64]]:
    """Divide ascending rows into arrays to write together: rows that are contiguous in the file.

    If `scattered` is true, several short contiguous arrays are joined into one array.
    """
    apart: list[npt.NDArray[np.int64]] = []
    for start, count in row_offsets.runs(rows, max_bytes):
        found = np.arange(start, start + count)
        if scattered and count * row_offsets.row_bytes < _SCATTERED_BYTES:
            apart.append(found)
        else:
            yield found
    if apart:
        joined = np.concatenate(apart)
        step = _SCATTERED_BYTES // row_offsets.row_bytes
        yield from (joined[first : first + step] for first in range(0, len(joined), step))


class _Worker:
    def __init__(self, job: WriteJob, journal: str | None = None) -> None:
        self.job = job
        # Open the journal before the file: a resumed conversion waits until no process that may write has its journal
        # open.
        self.journal = JournalWriter(job.journal, durable=job.durable, path=journal)
        self.decoder = SampleDecoder(job.pixels, job.fields, quiet=True)
        self.file = RowFile(job.path, job.io)
        self.field_files = [RowFile(job.path, job.io) for _ in job.fields]
        if os.fstat(self.file.descriptor).st_ino != job.inode:
            self.close()
            raise OutputBusyError.at(job.path, "was replaced by another conversion; wait until it has finished")

    def close(self) -> None:
        for file in (self.file, *self.field_files):
            file.close()
        self.journal.close()


Job = TypeVar("Job")
Worker = TypeVar("Worker", bound=Any)  # has the attribute `job` and the method `close`
# Per thread, because conversions with one worker may run in several threads of a process.
_local = threading.local()


def worker_for(job: Job, create: Callable[[Job], Worker]) -> Worker:
    """Return this thread's worker for `job`. If there is none, create it, and close the worker of an earlier job."""
    worker: Worker | None = getattr(_local, "worker", None)
    if worker is None or worker.job != job:
        release()
        _local.worker = worker = create(job)
    return worker


def release() -> None:
    """Close the files that this thread opened to write rows or to encode images."""
    worker: Any = _local.__dict__.pop("worker", None)
    if worker is not None:
        worker.close()


atexit.register(release)


def write_rows(task: WriteTask) -> list[RowRecord]:
    """Write a task's rows, and journal the record of each group after its rows are written; return all records."""
    return _write_durably(task) if task.job.durable else _write_groups(worker_for(task.job, _Worker), task)


def _write_durably(task: WriteTask) -> list[RowRecord]:
    """Write a task's rows, flush them to the disk, then journal them and flush the journal.

    Close all files after each task, because network file systems send all unsent data when a file is closed.
    """
    job = task.job
    before: tuple[WriteJob, str] | None = _local.__dict__.pop("durable", None)
    worker = _Worker(job, before[1] if before is not None and before[0] == job else None)
    try:
        worker.journal.begin()
        # The process that finishes saves this file, and then looks for writers that have begun. So either this writer
        # finds the file, or that process finds the writer.
        if os.path.exists(os.path.join(job.journal, WRITTEN)):
            raise OutputBusyError.at(job.path, "another process is finishing it; wait until that process has finished")
        records = _write_groups(worker, task)
        os.fsync(worker.file.descriptor)
        for record in records:
            worker.journal.append(record.encode())
        worker.journal.end()
    finally:
        worker.close()
    # After an error, the next task creates a new journal file, because the last record of this one may be incomplete.
    _local.durable = (job, worker.journal.path)
    return records


def _write_groups(worker: _Worker, task: WriteTask) -> list[RowRecord]:
    records: list[RowRecord] = []
    previous: list[RowBuffer] = []
    row_bytes = math.prod(task.job.pixels.row_shape)
    if not task.job.keep:
        shared().announce([index for group in task.groups for index in group.images.indices])
    with strict_pillow():
        for group in task.groups:
            if task.job.keep:
                # Files differ in length, so each byte counts as a row.
                current: list[RowBuffer] = [ContiguousRows(worker.file, int(group.offsets[0]), group.ends[-1], 1)]
                record = _copy(group, current[0])
            else:
                last = group is task.groups[-1]
                current = [worker.file.begin_rows(group.offsets, row_bytes, last=last)]
                for field, file, offsets in zip(task.job.fields, worker.field_files, group.field_offsets, strict=True):
                    current.append(file.begin_rows(offsets, field.row_bytes, last=last))
                record = _fill(worker, group, current)
            # Journal the previous group only now, because it was being written while this one was decoded.
            if previous:
                _journal(worker, previous, records[-1])
            previous = current
            records.append(record)
    _journal(worker, previous, records[-1])
    return records


def _journal(worker: _Worker, buffers: list[RowBuffer], record: RowRecord) -> None:
    """Wait until a group's rows are written, then journal its record. If the job is durable, only wait.

    For a durable job, `_write_durably` journals the records after it has flushed the rows.
    """
    for buffer in buffers:
        buffer.wait()
    if not worker.job.durable:
        worker.journal.append(record.encode())


class SampleDecoder:
    """A decoder of images, their masks and further images into rows. Threads cannot share it (see `Decoder`)."""

    def __init__(self, pixels: PixelOptions, fields: Sequence[PixelRows], quiet: bool = False) -> None:
        self.image = Decoder(pixels, quiet)
        self._fields = [
            (one.kind, Decoder(pixels, quiet) if one.kind == schema.IMAGE else MaskDecoder(pixels, one.dtype))
            for one in fields
        ]

    def decode(
        self, reader: SourceReader, image: Image, source: Source, row: npt.NDArray[np.uint8],
        field_rows: Sequence[npt.NDArray[Any]],
    ) -> None:  # fmt: skip
        """Decode `source`, the image as `read_image` returns it; read and decode its masks and further images."""
        index, name, decode_path, masks, size = image
        self.image.decode(source, decode_path, row)
        upright = self.image.upright
        require_surveyed_size(name, upright, size)
        if not masks:
            return
        for number, (mask, (kind, decoder), field_row) in enumerate(zip(masks, self._fields, field_rows, strict=True)):
            with naming_mask(mask, kind):
                further = read_image(reader, index, mask, field=number)
                if isinstance(decoder, MaskDecoder):
                    decoder.decode(further, upright, field_row)
                else:
                    header = parse_jpeg(further) if isinstance(further, bytes) else None
                    decoder.decode(further, DecodePath.PILLOW if header is None else header.decode_path, field_row)


def require_surveyed_size(name: str, found: Upright, size: Sequence[int]) -> None:
    """Raise SourceError if an image has another size than in `Images.sizes`."""
    if size and [found.height, found.width] != size:
        problem = (
            f"is {found.height}x{found.width}, but the survey found {size[0]}x{size[1]}, so its boxes or keypoints "
            f"would be misplaced; restore it, then {RUN_AGAIN}, or {START_OVER}"
        )
        raise SourceError.at(name, problem, "resume=True", "overwrite=True")


def _fill(worker: _Worker, group: RowGroup, buffers: list[RowBuffer]) -> RowRecord:
    """Decode a group's images into its buffers, allowing each row to be written as soon as it is decoded."""
    reader: SourceReader = shared()
    pixels, count, row_shape = worker.job.pixels, len(group.rows), worker.job.pixels.row_shape
    images, *others = buffers
    checksums: list[list[int]] = [[] for _ in buffers]
    reasons: dict[int, str] = {}  # by position in the group
    sums: dict[int, npt.NDArray[np.uint64]] = {}
    images_read = read_ahead(reader, group.images)
    step = max(1, _BLOCK_BYTES // math.prod(row_shape))
    for first in range(0, count, step):
        positions = range(first, min(first + step, count))
        rows = [images.row(position).reshape(row_shape) for position in positions]
        field_rows = [
            [buffer.row(position).view(field.dtype).reshape(field.row_shape) for position in positions]
            for field, buffer in zip(worker.job.fields, others, strict=True)
        ]
        block = itertools.islice(images_read, len(positions))
        for position, (image, source), row, *parts in zip(positions, block, rows, *field_rows, strict=True):
            try:
                if isinstance(source, str):
                    raise RejectedImageError(source)
                worker.decoder.decode(reader, image, source, row, parts)
            except RejectedImageError as error:
                reasons[position] = str(error)
                for part in (row, *parts):
                    part[...] = 0
            except MemoryError as error:
                raise memory_error(image[1]) from error
            for buffer in buffers:
                buffer.ready(position + 1)
        for known, some in zip(checksums, (rows, *field_rows), strict=True):
            known += map(crc32, some)
        if sampled := sorted(group.sampled.intersection(positions)):
            found = channel_sums([rows[position - first] for position in sampled], pixels.layout)
            sums.update(zip(group.rows[sampled].tolist(), found, strict=True))
    packed, all_checksums = np.ones(count, np.bool_), np.array(checksums, np.uint32)
    packed[[*reasons]] = False
    return RowRecord.of(
        group.rows, packed, all_checksums[0], sums, pixels.channels,
        reasons={int(group.rows[position]): reason for position, reason in reasons.items()},
        field_checksums=all_checksums[1:],
    )  # fmt: skip


def read_ahead(reader: SourceReader, images: Images) -> Iterator[tuple[Image, Source | str]]:
    """Yield each image with its file's bytes or its pixels, or with the reason if it is rejected.

    Files are read in blocks. But pixels are yielded before the next image is read, because a map-style dataset may
    return the same array again. So are images with masks, because readers may keep only the last sample, mask included.
    """
    block: list[tuple[Image, Source | str]] = []
    size = 0
    for image in images:
        source: Source | str
        try:
            source = read_image(reader, image[0], image[1])
        except RejectedImageError as error:
            # Keep only the text: the traceback of a kept error refers to frames, which keep rows and files in memory.
            source = str(error)
        except MemoryError as error:
            raise memory_error(image[1]) from error
        block.append((image, source))
        size += len(source) if isinstance(source, bytes) and not image[3] else _BLOCK_BYTES
        if size >= _BLOCK_BYTES:
            yield from block
            block, size = [], 0
    yield from block


def _copy(group: RowGroup, buffer: RowBuffer) -> RowRecord:
    """Copy the bytes of a group's image files to its buffer, allowing each file to be written as soon as it is read."""
    sums, start = {}, 0
    checksums = np.zeros(len(group.rows), np.uint32)
    files = zip(group.images.indices, group.images.names, group.ends, group.encoded, strict=True)
    for position, (index, name, end, encoded) in enumerate(files):
        data = read_kept(shared(), index, name, end - start, encoded)
        buffer.buffer[start:end] = np.frombuffer(data, np.uint8)
        checksums[position] = crc32(data)
        try:
            total = encoded_sums(data) if position in group.sampled else None
        except MemoryError as error:
            raise memory_error(name) from error
        if total is not None:
            sums[int(group.rows[position])] = total
        buffer.ready(end)
        start = end
    return RowRecord.of(group.rows, np.ones(len(group.rows), np.bool_), checksums, sums, 3)


def read_kept(reader: SourceReader, index: int, name: str, size: int, encoded: EncodedFile | None) -> bytes:
    """Return the `size` bytes at the location `encoded` of a temporary file; if it is None, those of the image's file.

    Raises SourceError if the image's file cannot be read or has another size, and the errors of `read_encoded`.
    """
    if encoded is not None:
        return read_encoded(encoded, size)
    try:
        data = read_image(reader, index, name)
    except RejectedImageError:
        data = b""
    if not isinstance(data, bytes) or len(data) != size:
        problem = (
            f"had {size:,} bytes when the conversion began, and has changed; restore it, then {RUN_AGAIN}, or "
            f"{START_OVER}"
        )
        raise SourceError.at(name, problem, "resume=True", "overwrite=True")
    return data


def read_image(reader: SourceReader, index: int, name: str, field: int | None = None) -> Source:
    """Return an image or, if `field` is a number, its mask or further image; raise SourceError if storage fails."""
    try:
        source = reader.read(index, name) if field is None else reader.read_field(field, index, name)
    except HDF5_ERRORS as error:
        raise storage_error(error) from error
    except OSError as error:
        # The survey could read this file, so either the storage has failed or the source was changed since.
        found = f"{error.strerror or error}, although the survey could read it"
        raise SourceError.at(name, f"{found}; restore the source, then {RUN_AGAIN}", "resume=True") from error
    return source
