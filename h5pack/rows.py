"""Rows at known places in a file: where they are, reading, writing and checking them without the HDF5 library."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5pack.checksum import row_checksums


@dataclass(frozen=True)
class RowPlaces:
    """Where the rows of a dataset that is chunked along axis 0 lie in its file.

    Attributes
    ----------
    addresses : ndarray
        int64, (chunks,): byte offset of each chunk.
    chunk_rows : int
    row_bytes : int
    """

    addresses: npt.NDArray[np.int64]
    chunk_rows: int
    row_bytes: int

    def offset(self, row: int) -> int:
        """Byte offset of a row."""
        chunk, place = divmod(row, self.chunk_rows)
        return int(self.addresses[chunk]) + place * self.row_bytes

    def offsets(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Byte offset of each of some rows, int64 (n,)."""
        chunks = rows // self.chunk_rows
        return self.addresses[chunks] + (rows - chunks * self.chunk_rows) * self.row_bytes

    def runs(self, rows: npt.NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
        """Cut ascending rows into runs (first, count) that lie one behind the other in the file.

        Parameters
        ----------
        rows : ndarray
            int64, ascending.
        most : int
            Rows a run at most.
        """
        if not len(rows):
            return
        breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(rows // self.chunk_rows) != 0)) + 1
        edges = [0, *breaks.tolist(), len(rows)]
        for first, last in itertools.pairwise(edges):
            for start in range(first, last, most):
                yield int(rows[start]), min(most, last - start)


@dataclass(frozen=True)
class CheckTask:
    """A run of rows to read back.

    Attributes
    ----------
    path : str
    start : int
        The first row.
    offset : int
        Where it starts in the file, in bytes.
    row_bytes : int
    checksums : ndarray
        uint32, (n,): what they should be.
    """

    path: str
    start: int
    offset: int
    row_bytes: int
    checksums: npt.NDArray[np.uint32]


def check_tasks(
    path: str, places: RowPlaces, rows: npt.NDArray[np.int64], checksums: npt.NDArray[np.uint32], most_bytes: int
) -> Iterator[CheckTask]:
    """Tasks that read back ascending `rows`, whose CRC-32s `checksums` gives by row."""
    for start, count in places.runs(rows, max(1, most_bytes // places.row_bytes)):
        yield CheckTask(path, start, places.offset(start), places.row_bytes, checksums[start : start + count])


def check_rows(task: CheckTask) -> list[int]:
    """Read rows back, and give those whose checksum differs, or which the file or the disk does not give."""
    descriptor = os.open(task.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = read_all(descriptor, len(task.checksums) * task.row_bytes, task.offset)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        if len(task.checksums) > 1:
            # Which of them lie on the bad spot, one by one.
            return [row for part in _single_rows(task) for row in check_rows(part)]
        data = b""
    finally:
        os.close(descriptor)
    whole = len(data) // task.row_bytes
    rows = np.frombuffer(data, np.uint8, whole * task.row_bytes).reshape(whole, task.row_bytes)
    wrong = np.ones(len(task.checksums), np.bool_)
    wrong[:whole] = row_checksums(rows) != task.checksums[:whole]
    return [task.start + int(place) for place in np.flatnonzero(wrong)]


def _single_rows(task: CheckTask) -> Iterator[CheckTask]:
    for place in range(len(task.checksums)):
        offset = task.offset + place * task.row_bytes
        yield CheckTask(task.path, task.start + place, offset, task.row_bytes, task.checksums[place : place + 1])


def check_counted(task: CheckTask) -> tuple[int, list[int]]:
    """`check_rows`, and how many rows it looked at."""
    return len(task.checksums), check_rows(task)


def describe_check(task: CheckTask) -> str:
    """A task in words, for the message when its worker dies."""
    return f"{task.path} rows {task.start}-{task.start + len(task.checksums) - 1}"


def write_all(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """Write every byte at `offset`, however few the kernel takes at a time."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def read_all(descriptor: int, count: int, offset: int) -> bytes:
    """Read `count` bytes at `offset`; fewer only at the end of the file."""
    parts = []
    while count:
        part = os.pread(descriptor, count, offset)
        if not part:
            break
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
