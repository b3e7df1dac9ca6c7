"""Workers' work: decode images into rows, write the rows in place, journal them.

A row's place in the file is known before its pixels, so workers share nothing but the file: no pixel passes between
processes, and the HDF5 library takes no part.
"""

from __future__ import annotations

import atexit
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5pack.checksum import crc32
from h5pack.errors import RejectedImageError, SourceError
from h5pack.pack.executors import shared
from h5pack.pack.images import Decoder, PixelOptions, strict_pillow
from h5pack.pack.journal import JournalWriter, RowRecord
from h5pack.pack.rowfile import RowFile
from h5pack.pack.statistics import channel_sums


@dataclass(frozen=True)
class WriteJob:
    """What all tasks of one conversion share.

    Attributes
    ----------
    path : str
        ``OUT.partial``.
    journal : str
        Its journal's folder.
    row_shape : tuple of int
        As stored.
    layout : str
    pixels : PixelOptions
    io : str
        direct, buffered or auto; see `h5pack.pack.rowfile`.
    """

    path: str
    journal: str
    row_shape: tuple[int, int, int]
    layout: str
    pixels: PixelOptions
    io: str


@dataclass(frozen=True)
class WriteTask:
    """A run of rows that lie one behind the other in the file.

    Attributes
    ----------
    job : WriteJob
    start : int
        The first planned row.
    offset : int
        Where it starts in the file, in bytes.
    indices : list of int
        The images' places in the catalog.
    names : list of str
    kinds : list of int
        How each may be decoded.
    sampled : list of int
        Which of these rows, counted from 0, are part of the statistics.
    """

    job: WriteJob
    start: int
    offset: int
    indices: list[int]
    names: list[str]
    kinds: list[int]
    sampled: list[int]


class _Worker:
    """One conversion's state in one process."""

    def __init__(self, job: WriteJob) -> None:
        self.job = job
        self.file = RowFile(job.path, job.io)
        self.decoder = Decoder(job.pixels)
        self.journal = JournalWriter(job.journal)
        self.upright = np.empty((job.pixels.height, job.pixels.width, job.pixels.channels), np.uint8)

    def close(self) -> None:
        self.file.close()
        self.journal.close()


_worker: _Worker | None = None


def _worker_for(job: WriteJob) -> _Worker:
    global _worker
    if _worker is None or _worker.job != job:
        release()
        _worker = _Worker(job)
    return _worker


def release() -> None:
    """Close what this process holds open for a conversion."""
    global _worker
    if _worker is not None:
        _worker.close()
        _worker = None


atexit.register(release)


def write_rows(task: WriteTask) -> RowRecord:
    """Decode a task's images, write their rows, then journal them.

    Raises
    ------
    OSError
        If the output cannot be written; ENOSPC where it is full.
    SourceError
        If the source's storage fails.
    """
    worker = _worker_for(task.job)
    count = len(task.indices)
    row_bytes = int(np.prod(task.job.row_shape))
    rows = worker.file.begin(task.offset, count * row_bytes).reshape(count, *task.job.row_shape)
    record = RowRecord(
        start=task.start,
        packed=np.ones(count, np.bool_),
        checksums=np.zeros(count, np.uint32),
        sampled=np.zeros(0, np.int64),
        sums=np.zeros((0, 2, task.job.pixels.channels), np.uint64),
    )
    with strict_pillow():
        for place in range(count):
            try:
                _decode(worker, task, place, rows[place])
            except RejectedImageError as error:
                record.packed[place] = False
                record.reasons[task.start + place] = str(error)
                rows[place] = 0
            else:
                record.checksums[place] = crc32(rows[place])
            worker.file.ready((place + 1) * row_bytes)
    sampled = [place for place in task.sampled if record.packed[place]]
    if sampled:
        record.sampled = np.array(sampled, np.int64) + task.start
        record.sums = np.stack([channel_sums(rows[place], task.job.layout) for place in sampled])
    worker.file.end()
    worker.journal.append(record)
    return record


def _decode(worker: _Worker, task: WriteTask, place: int, row: npt.NDArray[np.uint8]) -> None:
    name = task.names[place]
    try:
        source = shared().read(task.indices[place], name)
    except OSError as error:
        # The survey has read this file, so its loss is the storage's fault, or the source is being changed.
        raise SourceError(
            f"{name}: {error.strerror or error}, though the survey had read it; bring the source back as it was, then "
            "continue with --resume"
        ) from error
    if task.job.layout == "nhwc":
        worker.decoder.decode(source, task.kinds[place], row)
    else:
        worker.decoder.decode(source, task.kinds[place], worker.upright)
        row[...] = worker.upright.transpose(2, 0, 1)


def describe(task: WriteTask) -> str:
    """A task in words, for the message when its worker dies."""
    return f"rows {task.start}-{task.start + len(task.names) - 1} ({task.names[0]!r} and on)"
