"""Workers' work: decode images into rows, write the rows in place, journal them.

A row's place in the file is known before its pixels, so workers share nothing but the file: no pixel passes between
processes, and the HDF5 library takes no part.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5pack.checksum import crc32
from h5pack.decode.images import Decoder, PixelOptions, strict_pillow
from h5pack.errors import OutputBusyError, RejectedImageError, SourceError
from h5pack.pack.executors import shared
from h5pack.pack.journal import JournalWriter, RowRecord
from h5pack.pack.rowfile import RowFile, RowRun
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
    inode : int
        Of the file; another file by that name is another conversion's.
    """

    path: str
    journal: str
    row_shape: tuple[int, int, int]
    layout: str
    pixels: PixelOptions
    io: str
    inode: int


@dataclass(frozen=True)
class WriteRun:
    """Rows that are written together: one behind the other in the file, or each at its own place.

    Attributes
    ----------
    rows : ndarray
        int64, (n,): planned rows, ascending.
    offsets : ndarray
        int64, (n,): where each starts in the file, in bytes.
    indices : list of int
        The images' places in the catalog.
    names : list of str
    kinds : list of int
        How each may be decoded.
    sampled : list of int
        Which of these rows, counted from 0, are part of the statistics.
    """

    rows: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    indices: list[int]
    names: list[str]
    kinds: list[int]
    sampled: list[int]


@dataclass(frozen=True)
class WriteTask:
    """Runs for one worker.

    Attributes
    ----------
    job : WriteJob
    runs : list of WriteRun
    """

    job: WriteJob
    runs: list[WriteRun]


class _Worker:
    """One conversion's state in one process."""

    def __init__(self, job: WriteJob) -> None:
        self.job = job
        # The journal first: a resume waits for whoever holds one.
        self.journal = JournalWriter(job.journal)
        self.decoder = Decoder(job.pixels)
        self.file = RowFile(job.path, job.io)
        if os.fstat(self.file.descriptor).st_ino != job.inode:
            raise OutputBusyError(f"{job.path}: replaced by another conversion; let that one finish")
        self.upright = upright_buffer(job.pixels, job.layout)

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


def write_rows(task: WriteTask) -> list[RowRecord]:
    """Decode a task's images, write their rows, and journal each run when it is written.

    Raises
    ------
    OSError
        If the output cannot be written; ENOSPC where it is full.
    SourceError
        If the source's storage fails.
    """
    worker = _worker_for(task.job)
    records: list[RowRecord] = []
    before: RowRun | None = None
    row_bytes = int(np.prod(task.job.row_shape))
    shared().begin([index for run in task.runs for index in run.indices])
    with strict_pillow():
        for run in task.runs:
            current = worker.file.begin_rows(run.offsets, row_bytes)
            record = _fill(worker, run, current)
            # While this run was decoded, the one before was written.
            if before is not None:
                before.wait()
                worker.journal.append(records[-1])
            before = current
            records.append(record)
    if before is not None:
        before.wait()
        worker.journal.append(records[-1])
    return records


def _fill(worker: _Worker, run: WriteRun, target: RowRun) -> RowRecord:
    """Decode a run's images into its buffer, handing finished rows on."""
    job, count = worker.job, len(run.indices)
    packed = np.ones(count, np.bool_)
    checksums = [0] * count
    reasons: dict[int, str] = {}
    sums = []
    sampled = iter([*run.sampled, -1])
    next_sampled = next(sampled)
    for place, (index, name, kind) in enumerate(zip(run.indices, run.names, run.kinds, strict=True)):
        row = target.row(place).reshape(job.row_shape)
        try:
            _decode(worker, index, name, kind, row)
        except RejectedImageError as error:
            packed[place] = False
            reasons[int(run.rows[place])] = str(error)
            row[...] = 0
        else:
            checksums[place] = crc32(row)
        if place == next_sampled:
            next_sampled = next(sampled)
            if packed[place]:
                # Now, while the row is in the processor's cache.
                sums.append((int(run.rows[place]), channel_sums(row, job.layout)))
        target.ready(place + 1)
    return RowRecord(
        rows=run.rows,
        packed=packed,
        checksums=np.array(checksums, np.uint32),
        sampled=np.array([row for row, _ in sums], np.int64),
        sums=np.array([total for _, total in sums], np.uint64).reshape(len(sums), 2, job.pixels.channels),
        reasons=reasons,
    )


def _decode(worker: _Worker, index: int, name: str, kind: int, row: npt.NDArray[np.uint8]) -> None:
    try:
        source = shared().read(index, name)
    except OSError as error:
        # The survey has read this file, so its loss is the storage's fault, or the source is being changed.
        raise SourceError(
            f"{name}: {error.strerror or error}, though the survey had read it; bring the source back as it was, then "
            "continue with --resume"
        ) from error
    decode_row(worker.decoder, source, kind, row, worker.upright)


def upright_buffer(pixels: PixelOptions, layout: str) -> npt.NDArray[np.uint8] | None:
    """What `decode_row` needs to turn channels to the front: uint8, (H, W, C); None where they are stored last."""
    return None if layout == "nhwc" else np.empty((pixels.height, pixels.width, pixels.channels), np.uint8)


def decode_row(
    decoder: Decoder,
    source: bytes | npt.NDArray[np.uint8],
    kind: int,
    row: npt.NDArray[np.uint8],
    upright: npt.NDArray[np.uint8] | None,
) -> None:
    """Decode one image into a row as it is stored.

    Parameters
    ----------
    decoder : Decoder
    source, kind
        As for `Decoder.decode`.
    row : ndarray
        uint8, (H, W, C) or (C, H, W), contiguous.
    upright : ndarray or None
        See `upright_buffer`.

    Raises
    ------
    RejectedImageError
    """
    if upright is None:
        decoder.decode(source, kind, row)
    else:
        decoder.decode(source, kind, upright)
        row[...] = upright.transpose(2, 0, 1)


def describe(task: WriteTask) -> str:
    """A task in words, for the message when its worker dies."""
    first, last = task.runs[0], task.runs[-1]
    return f"rows {first.rows[0]}-{last.rows[-1]} ({first.names[0]!r} and on)"
