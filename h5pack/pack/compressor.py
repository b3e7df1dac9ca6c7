"""Workers' work on a compressed pack: read a chunk's finished rows back, and compress them as HDF5 would."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5pack.checksum import row_checksums
from h5pack.errors import H5PackError
from h5pack.pack.compression import Compression
from h5pack.pack.executors import run
from h5pack.pack.skeleton import Skeleton, filtered_chunk, require_filter
from h5pack.rows import RowPlaces, read_all


@dataclass(frozen=True)
class CompressTask:
    """One chunk.

    Attributes
    ----------
    path : str
        ``OUT.partial``, with its rows in their final places.
    start : int
        The chunk's first row.
    offset : int
        Where that starts in the file, in bytes.
    shape : tuple of int
        The chunk's: (rows, H, W, C) or (rows, C, H, W).
    checksums : ndarray
        uint32, (n,): of the rows that are there. The rest of the chunk is zero.
    compression : Compression
    """

    path: str
    start: int
    offset: int
    shape: tuple[int, ...]
    checksums: npt.NDArray[np.uint32]
    compression: Compression


def compress_chunk(task: CompressTask) -> tuple[int, bytes]:
    """Compress one chunk.

    Returns
    -------
    rows : int
        That the chunk holds.
    stored : bytes
        The chunk as HDF5 stores it.

    Raises
    ------
    H5PackError
        If the rows are not those that were written.
    """
    require_filter(task.compression)
    chunk = np.zeros(task.shape, np.uint8)
    rows = chunk[: len(task.checksums)]
    descriptor = os.open(task.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = read_all(descriptor, rows.nbytes, task.offset)
    finally:
        os.close(descriptor)
    rows.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
    if not np.array_equal(row_checksums(rows), task.checksums):
        raise H5PackError(
            f"{task.path}: reading {describe_chunk(task)} back gave something else than was written; check the disk, "
            "then run the same command with --resume"
        )
    return len(rows), filtered_chunk(chunk, task.compression)


def describe_chunk(task: CompressTask) -> str:
    """A task in words, for the message when its worker dies."""
    return f"rows {task.start}-{task.start + len(task.checksums) - 1}"


def compressed_chunks(
    path: str,
    skeleton: Skeleton,
    places: RowPlaces,
    checksums: npt.NDArray[np.uint32],
    executor: Executor,
    in_flight: int,
    advance: Callable[[int], object],
) -> Iterator[bytes]:
    """All chunks of the finished file, in their order, compressed by the workers.

    Parameters
    ----------
    path : str
        ``OUT.partial``, with its rows in their final places.
    skeleton : Skeleton
        With a compression.
    places : RowPlaces
    checksums : ndarray
        uint32, (N,): of the final rows.
    executor : Executor
    in_flight : int
        How many chunks at most are compressed, or wait to be stored.
    advance : callable
        Told how many rows were compressed, chunk by chunk.
    """
    assert skeleton.compression is not None
    compression, shape = skeleton.compression, (skeleton.chunk_rows, *skeleton.row_shape)

    def tasks() -> Iterator[CompressTask]:
        for start in range(0, len(checksums), skeleton.chunk_rows):
            some = checksums[start : start + skeleton.chunk_rows]
            yield CompressTask(path, start, places.offset(start), shape, some, compression)

    for rows, stored in run(executor, compress_chunk, tasks(), in_flight, describe_chunk, ordered=True):
        yield stored
        advance(rows)
