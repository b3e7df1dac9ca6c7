"""Byte offsets of rows in a file, and verification of the rows' checksums without the HDF5 library."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5pack.format.checksums import crc32
from h5pack.system.arrays import RowNumbers, consecutive_runs, limited_runs, row_array, run_edges
from h5pack.system.files import read_all

_BLOCK_ROWS = 1 << 20


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

    def edges(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return the boundaries of `count` contiguous rows, of which `start` is the first; int64 (count + 1,).

        The boundaries are in bytes from the beginning of row `start`, so the first one is 0.
        """
        return np.arange(count + 1, dtype=np.int64) * self.row_bytes

    def runs(self, rows: npt.NDArray[np.int64], max_bytes: int) -> Iterator[tuple[int, int]]:
        """Divide ascending rows into runs that are contiguous in the file; yield (first row, count) of each run.

        A run has at most `max_bytes` bytes. A row that has more is a run by itself.
        """
        if not len(rows):
            return
        max_rows = max(1, max_bytes // self.row_bytes)
        edges = run_edges((np.diff(rows) != 1) | (np.diff(rows // self.chunk_rows) != 0))
        for first, last in itertools.pairwise(edges.tolist()):
            for start in range(first, last, max_rows):
                yield int(rows[start]), min(max_rows, last - start)


@dataclass(frozen=True)
class EncodedOffsets(RowOffsets):
    """Byte offsets of rows of different lengths that follow each other in the file, such as encoded images.

    `addresses` has the byte offset of each row, so `chunk_rows` is 1. `row_bytes` is the mean length of the rows in
    bytes, rounded down, but at least 1.
    """

    ends: npt.NDArray[np.int64]  # (N,): byte offset at which each row ends

    @classmethod
    def of(cls, base: int, offsets: npt.NDArray[np.int64]) -> EncodedOffsets:
        """Create from `offsets`, int64 (N + 1,): the boundaries of the rows, relative to byte `base` of the file."""
        mean = int(offsets[-1] - offsets[0]) // max(1, len(offsets) - 1)
        return cls(base + offsets[:-1], 1, max(1, mean), base + offsets[1:])

    def edges(self, start: int, count: int) -> npt.NDArray[np.int64]:
        return np.append(0, self.ends[start : start + count] - self.addresses[start])

    def runs(self, rows: npt.NDArray[np.int64], max_bytes: int) -> Iterator[tuple[int, int]]:
        for first, last in limited_runs(consecutive_runs(rows), self.addresses[rows], self.ends[rows], max_bytes):
            yield int(rows[first]), last - first


RowCheck = Callable[[int, memoryview], bool]


@dataclass(frozen=True)
class CheckTask:
    """Rows, contiguous in a file, whose checksums are to be verified."""

    path: str
    start: int  # the first row
    offset: int  # byte offset of the first row
    edges: npt.NDArray[np.int64]  # boundaries of the rows in bytes from `offset`, as `RowOffsets.edges` returns them
    checksums: npt.NDArray[np.uint32]  # expected CRC-32 of each row

    def __str__(self) -> str:
        return f"{self.path} rows {self.start}-{self.start + len(self.checksums) - 1}"


def check_tasks(
    path: str, offsets: RowOffsets, rows: RowNumbers, checksums: npt.NDArray[np.uint32], max_bytes: int
) -> Iterator[CheckTask]:
    """Yield tasks that check ascending `rows`; `checksums`, uint32 (N,), has one checksum per row of the dataset.

    A task has at most `max_bytes` bytes. A row that has more is a task by itself.
    """
    # Dividing rows into runs takes several times the memory of the row numbers, so divide a block of rows at a time.
    for low in range(0, len(rows), _BLOCK_ROWS):
        for start, count in offsets.runs(row_array(rows[low : low + _BLOCK_ROWS]), max_bytes):
            edges = offsets.edges(start, count)
            yield CheckTask(path, start, offsets.offset(start), edges, checksums[start : start + count])


def check_rows(task: CheckTask, is_damaged: RowCheck | None = None) -> tuple[int, list[int]]:
    """Return the number of checked rows, and those of them that `wrong_rows` returns."""
    descriptor = os.open(task.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return len(task.checksums), wrong_rows(task, descriptor, is_damaged)
    finally:
        os.close(descriptor)


def wrong_rows(task: CheckTask, descriptor: int, is_damaged: RowCheck | None = None) -> list[int]:
    """Return the rows that cannot be read or do not match their checksums. The file is open as `descriptor`.

    If `is_damaged` is given, it is called with the number and the bytes of each row that matches its checksum. Rows for
    which it returns True are returned, too.

    A row cannot be read if the file ends before it, or if reading it fails with EIO (the disk reports an error). Raises
    OSError for any other error.
    """
    try:
        data = read_all(descriptor, int(task.edges[-1]), task.offset)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        if len(task.checksums) > 1:
            # Read each row alone to find the rows that cannot be read.
            return [row for part in _single_rows(task) for row in wrong_rows(part, descriptor, is_damaged)]
        data = b""
    view, wrong = memoryview(data), []
    for number, (start, stop) in enumerate(itertools.pairwise(task.edges.tolist())):
        row, found = task.start + number, view[start:stop]
        differs = stop > len(data) or crc32(found) != task.checksums[number]
        if differs or (is_damaged is not None and is_damaged(row, found)):
            wrong.append(row)
    return wrong


def _single_rows(task: CheckTask) -> Iterator[CheckTask]:
    for number, (start, stop) in enumerate(itertools.pairwise(task.edges.tolist())):
        edges = np.array([0, stop - start])
        yield CheckTask(task.path, task.start + number, task.offset + start, edges, task.checksums[number : number + 1])
