"""Byte offsets of rows in a file, and verifying the rows' checksums without the HDF5 library."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5pack.format.checksums import row_checksums
from h5pack.system.arrays import run_edges
from h5pack.system.files import read_all


@dataclass(frozen=True)
class RowOffsets:
    """Byte offsets of the rows of a dataset that is chunked along axis 0."""

    addresses: npt.NDArray[np.int64]  # (chunks,): byte offset of each chunk
    chunk_rows: int
    row_bytes: int

    def offset(self, row: int) -> int:
        """Return the byte offset of a row."""
        chunk, within = divmod(row, self.chunk_rows)
        return int(self.addresses[chunk]) + within * self.row_bytes

    def offsets(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the byte offsets of rows, int64 (n,)."""
        chunks = rows // self.chunk_rows
        return self.addresses[chunks] + (rows - chunks * self.chunk_rows) * self.row_bytes

    def runs(self, rows: npt.NDArray[np.int64], max_rows: int) -> Iterator[tuple[int, int]]:
        """Divide ascending rows into runs, contiguous in the file, of at most `max_rows`; yield (first row, count)."""
        if not len(rows):
            return
        edges = run_edges((np.diff(rows) != 1) | (np.diff(rows // self.chunk_rows) != 0))
        for first, last in itertools.pairwise(edges.tolist()):
            for start in range(first, last, max_rows):
                yield int(rows[start]), min(max_rows, last - start)


@dataclass(frozen=True)
class CheckTask:
    """Rows, contiguous in a file, whose checksums are to be verified."""

    path: str
    start: int  # the first row
    offset: int  # byte offset of the first row
    row_bytes: int
    checksums: npt.NDArray[np.uint32]  # expected CRC-32 of each row


def check_tasks(
    path: str, offsets: RowOffsets, rows: npt.NDArray[np.int64], checksums: npt.NDArray[np.uint32], max_bytes: int
) -> Iterator[CheckTask]:
    """Yield tasks that check ascending `rows`; `checksums` is indexed by row and covers all of the dataset's rows."""
    for start, count in offsets.runs(rows, max(1, max_bytes // offsets.row_bytes)):
        yield CheckTask(path, start, offsets.offset(start), offsets.row_bytes, checksums[start : start + count])


def check_rows(task: CheckTask) -> list[int]:
    """Return the rows whose checksum differs or that cannot be read."""
    descriptor = os.open(task.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = read_all(descriptor, len(task.checksums) * task.row_bytes, task.offset)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        if len(task.checksums) > 1:
            # Reading each row alone shows which ones are unreadable.
            return [row for part in _single_rows(task) for row in check_rows(part)]
        data = b""
    finally:
        os.close(descriptor)
    whole = len(data) // task.row_bytes
    rows = np.frombuffer(data, np.uint8, whole * task.row_bytes).reshape(whole, task.row_bytes)
    wrong = np.ones(len(task.checksums), np.bool_)
    wrong[:whole] = row_checksums(rows) != task.checksums[:whole]
    return [task.start + int(number) for number in np.flatnonzero(wrong)]


def _single_rows(task: CheckTask) -> Iterator[CheckTask]:
    for number in range(len(task.checksums)):
        offset = task.offset + number * task.row_bytes
        yield CheckTask(task.path, task.start + number, offset, task.row_bytes, task.checksums[number : number + 1])


def check_rows_counted(task: CheckTask) -> tuple[int, list[int]]:
    """Return the number of checked rows (for progress bars) and the result of `check_rows`."""
    return len(task.checksums), check_rows(task)


def describe_check(task: CheckTask) -> str:
    """Describe a task's rows for the error message about a worker process that died."""
    return f"{task.path} rows {task.start}-{task.start + len(task.checksums) - 1}"
