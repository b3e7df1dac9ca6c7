"""Encoding of masks, and of images that cannot be stored unchanged, before rows are written; only used with `keep`.

The offset of a row depends on the sizes of all earlier rows, so images must be encoded before the first row is written.
Each worker appends encoded images and masks to its own temporary file ``encoded-*.bin`` in the journal's folder. After
each task, the worker appends a record to a file ``encoded-*.log``. Later, rows are copied from the ``.bin`` files in
the pack's order, so the output is the same for any number of workers. A resumed conversion compares the bytes in the
``.bin`` files with the checksums in the records.

If the source reads images in groups, such as the row groups of a Parquet file, the ``.bin`` files also get the JPEG
files that are stored unchanged.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.cluster.parts import SharedResults
from h5pack.errors import RejectedImageError, ResumeError
from h5pack.format.checksums import crc32
from h5pack.format.row_offsets import CheckTask, check_rows
from h5pack.images.decode import Upright, strict_pillow, upright_of
from h5pack.images.encode import JpegEncoder
from h5pack.images.headers import DecodePath
from h5pack.images.masks import MaskDecoder, encode_mask, naming_mask
from h5pack.pack.journal import JournalWriter
from h5pack.pack.kept import ENCODED_IMAGE, EncodedPlaces, KeptPlan
from h5pack.pack.options import refuse_reject
from h5pack.pack.resume import UnfinishedPack
from h5pack.pack.survey import SurveyTask, again_task, first_changed_of, memory_error
from h5pack.pack.writer import Image, Images, join_groups, read_image, release, require_surveyed_size, worker_for
from h5pack.sources.reader import SourceReader
from h5pack.system.files import write_all
from h5pack.system.processes import run, shared
from h5pack.system.text import one_of

_PREFIX = "encoded"
_TASK_IMAGES = 64
_TASKS_PER_WORKER = 16


@dataclass
class EncodedRecord:
    """The images and masks that a task encoded, and the images that it rejected."""

    images: npt.NDArray[Any]  # (n,), dtype `ENCODED_IMAGE`
    reasons: dict[int, str] = field(default_factory=dict)  # why images were rejected, by catalog index

    def encode(self) -> bytes:
        """Return the record as bytes, the payload of a journal record."""
        return len(self.images).to_bytes(8, "little") + self.images.tobytes() + json.dumps(self.reasons).encode()

    @classmethod
    def decode(cls, payload: bytes) -> EncodedRecord:
        """Create a record from the bytes that `encode` returned."""
        end = 8 + int.from_bytes(payload[:8], "little") * ENCODED_IMAGE.itemsize
        reasons = {int(index): reason for index, reason in json.loads(payload[end:]).items()}
        return cls(np.frombuffer(payload[8:end], ENCODED_IMAGE), reasons)


@dataclass(frozen=True)
class EncodeJob:
    """The parameters that all encoding tasks of one conversion share."""

    journal: str  # the journal's folder
    max_side: int | None
    quality: int
    max_pixels: int
    mask_dtypes: tuple[str, ...] = ()  # dtype of each field of masks
    durable: bool = False  # whether files must be flushed because other machines encode, too
    token: str = field(default_factory=secrets.token_hex)  # distinguishes equal jobs of two conversions


@dataclass(frozen=True)
class EncodeTask:
    """Images that one worker encodes."""

    job: EncodeJob
    images: Images
    kept: list[bool]  # for each image: whether its file is stored unchanged
    read: list[bool]  # for each image: whether it is put into the temporary file; if not, its file is copied later
    sizes: list[tuple[int, int]]  # height and width of each image in the pack, when upright
    # In an array job: a task that surveys the images again, because they may have changed since the survey; else None.
    check: SurveyTask | None

    def __str__(self) -> str:
        return one_of(len(self.images.names), repr(self.images.names[0]))


class _EncodeWorker:
    def __init__(self, job: EncodeJob) -> None:
        self.job = job
        self.journal = JournalWriter(job.journal, _PREFIX, durable=job.durable)
        self.path = _data_path(self.journal.path)
        self.data = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.size = 0
        self.encoder = JpegEncoder(job.max_side, job.quality, job.max_pixels)
        self.masks = [MaskDecoder(self.encoder.options, dtype) for dtype in job.mask_dtypes]

    def close(self) -> None:
        os.close(self.data)
        self.journal.close()


def _data_path(journal: str) -> str:
    return journal.removesuffix(".log") + ".bin"


def encode_task(task: EncodeTask) -> tuple[str, EncodedRecord]:
    """Encode a task's images into this worker's temporary file; return the file's path and the journaled record."""
    worker = worker_for(task.job, _EncodeWorker)
    reader = shared()
    reader.announce(task.images.indices)
    rows, reasons, parts = [], {}, []
    offset = worker.size
    with strict_pillow():
        for position, image in enumerate(task.images):
            index, name, *_ = image
            try:
                encoded = _encode(worker, reader, task, position, image)
            except RejectedImageError as error:
                reasons[index] = str(error)
                continue
            except MemoryError as error:
                raise memory_error(name) from error
            for field, data, height, width in encoded:
                parts.append(data)
                rows.append((index, field, offset, len(data), crc32(data), height, width))
                offset += len(data)
    _require_unchanged(task)
    write_all(worker.data, b"".join(parts), worker.size)
    worker.size = offset
    record = EncodedRecord(np.array(rows, ENCODED_IMAGE), reasons)
    if task.job.durable:
        os.fsync(worker.data)
    worker.journal.append(record.encode())
    if task.job.durable:
        worker.journal.end()
    return worker.path, record


def _require_unchanged(task: EncodeTask) -> None:
    """In an array job, raise ResumeError if an image has changed since the survey: all parts will use the result."""
    changed = None if task.check is None else first_changed_of(task.check)
    if changed is not None:
        partial = task.job.journal.removesuffix(".journal")
        name = task.images.names[task.images.indices.index(changed)]
        problem = (
            f"{name} has changed since the conversion began; restore it and run again, or delete all of {partial}* to "
            "start over"
        )
        raise ResumeError.at(partial, problem)


def _encode(
    worker: _EncodeWorker, reader: SourceReader, task: EncodeTask, position: int, image: Image
) -> list[tuple[int, bytes, int, int]]:
    """Encode an image and its masks; return field number, data, height and width of each (see `ENCODED_IMAGE`).

    If the image's file is copied later, when rows are written, the result has only the masks.
    """
    index, name, decode_path, masks, size = image
    found: list[tuple[int, bytes, int, int]] = []
    height, width = task.sizes[position]
    upright = Upright(height, width)
    if task.read[position] or decode_path == DecodePath.PILLOW:
        source = read_image(reader, index, name)
        if task.kept[position] and isinstance(source, bytes):
            if task.read[position]:
                found.append((-1, source, 0, 0))
            if masks:
                # If the file has an Exif orientation, the masks must be turned upright.
                upright = upright_of(source) if decode_path == DecodePath.PILLOW else upright
        else:
            data, height, width = worker.encoder.encode(source, decode_path)
            upright = worker.encoder.upright
            require_surveyed_size(name, upright, size)
            found.append((-1, data, height, width))
    for number, (mask, decoder) in enumerate(zip(masks, worker.masks, strict=True)):
        with naming_mask(mask):
            pixels = decoder.pixels(read_image(reader, index, mask, field=number), upright)
            found.append((number, encode_mask(pixels, height, width), height, width))
    return found


def encode_images(
    pack: UnfinishedPack, executor: Executor, num_workers: int, advance: Callable[[int], object]
) -> KeptPlan:
    """Encode a plan's masks, and images that cannot be stored unchanged; return the plan with the sizes of all files.

    `advance` is first called with the number of images that an earlier run has encoded or rejected. Then it is called
    after each task with the task's number of images.
    """
    plan = pack.plan
    assert isinstance(plan, KeptPlan)
    places, reasons = EncodedPlaces(len(plan.catalog), len(plan.catalog.pixel_fields)), {}
    in_parts, resumable = isinstance(executor, SharedResults), not plan.options.in_array_job
    # In an array job, submit all tasks: if a task is already done, the executor returns its saved result.
    payloads = () if in_parts else pack.journal.payloads(_PREFIX)
    records = [(_data_path(str(path)), EncodedRecord.decode(payload)) for path, payload in payloads]
    for _, record in records:
        reasons.update(record.reasons)
    encoded = [(path, record.images) for path, record in records if len(record.images)]
    checks = run(executor, check_rows, map(_check_task, encoded), 2 * num_workers, ordered=True, resumable=resumable)
    for (path, images), (_, damaged) in zip(encoded, checks, strict=True):
        places.add(path, np.delete(images, damaged))
    missing = np.zeros(len(plan.catalog), np.bool_)
    for part, needed in ((places, plan.needs_encoding), *((one, plan.to_encode) for one in places.fields)):
        missing |= needed & (part.owners < 0)
    todo = np.setdiff1d(np.flatnonzero(missing), np.array([*reasons], np.int64))
    advance(int(plan.to_encode.sum()) - len(todo))
    options = plan.options
    job = EncodeJob(
        str(pack.journal.folder), options.max_side, options.quality, options.max_pixels, plan.mask_dtypes,
        pack.distributed,
    )  # fmt: skip
    tasks = _tasks(plan, job, todo, 1 if in_parts else num_workers, check=in_parts)
    try:
        for written, record in run(executor, encode_task, tasks, 2 * num_workers, resumable=resumable):
            places.add(written, record.images)
            reasons.update(record.reasons)
            advance(len({*record.images["index"].tolist()}) + len(record.reasons))
            if options.strict:
                for index, reason in record.reasons.items():
                    refuse_reject(plan.source, plan.catalog.reject(index, reason), options, begun=True)
    finally:
        # With one worker, this process encoded the images. Close its journal file, because a resumed run would wait for
        # the file's lock.
        release()
    return plan.with_encoded(places, reasons)


def _tasks(
    plan: KeptPlan, job: EncodeJob, indices: npt.NDArray[np.int64], num_workers: int, *, check: bool
) -> Iterator[EncodeTask]:
    max_images = min(_TASK_IMAGES, max(1, -(-len(indices) // (num_workers * _TASKS_PER_WORKER))))
    groups = plan.catalog.reader.groups(indices)
    for share in join_groups(indices, np.arange(len(indices)) if groups is None else groups, max_images):
        checked = plan.catalog.reader.changing(share) if check else share[:0]
        yield EncodeTask(
            job=job,
            images=Images.of(plan, share),
            kept=plan.fits[share].tolist(),
            read=plan.needs_encoding[share].tolist(),
            sizes=list(zip(plan.heights[share].tolist(), plan.widths[share].tolist(), strict=True)),
            check=again_task(plan.catalog, plan.options, checked, plan.fingerprints) if len(checked) else None,
        )


def _check_task(encoded: tuple[str, npt.NDArray[Any]]) -> CheckTask:
    path, images = encoded
    return CheckTask(path, 0, int(images["offset"][0]), np.append(0, np.cumsum(images["bytes"])), images["checksum"])
