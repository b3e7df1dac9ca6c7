"""Storage alone: threads that read whole chunks, and nothing else."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from h5pack.doctor.pacing import Slice
from h5pack.feed.cpu_time import CpuTime
from h5pack.feed.dataset import H5Dataset

_BLOCK_BYTES = 16 * 1024 * 1024
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class ChunkReading:
    """Reads the images of a dataset by chunks, each thread into one buffer of its own.

    Parameters
    ----------
    dataset : H5Dataset
    """

    def __init__(self, dataset: H5Dataset) -> None:
        self._dataset = dataset
        self._index = index = dataset.engine.indexes[dataset.names[0]]
        # A part of an encoded chunk costs as much as the whole.
        most = index.unit_rows if index.codec is not None else max(1, _BLOCK_BYTES // max(1, index.row_bytes))
        self.block_rows = max(1, min(index.unit_rows, most))
        self.share: float | None = None
        """Of the last run's threads: the part of their time in which they ran, or were ready to; 0 to 1."""

    def warm(self, seconds: float, least_rows: int) -> int:
        """Read rows from the first on, until the time is up and `least_rows` are done; how many."""
        deadline = time.perf_counter() + seconds
        rows = len(self._dataset)
        out = self._buffer()
        for first, last in self._blocks(0, rows):
            self._read(first, last, out)
            if time.perf_counter() >= deadline and last >= least_rows:
                return last
        return rows

    def run(self, seconds: float, threads: int, rows: int, begin: float = 0.0) -> Slice:
        """Read for some time, in stored order, round and round.

        Parameters
        ----------
        seconds : float
        threads : int
        rows : int
            The first so many of the dataset.
        begin : float
            Where to begin, as a part of these rows, 0 to 1.
        """
        blocks = list(self._blocks(0, rows))
        start = int(begin * len(blocks))
        numbers = itertools.count(start)
        lock = threading.Lock()
        done: list[tuple[int, float, float]] = []
        errors: list[BaseException] = []
        deadline = time.perf_counter() + seconds

        def work() -> None:
            out, read = self._buffer(), 0
            ran, wall = _ready_seconds(), time.perf_counter()
            try:
                while not errors and (not read or time.perf_counter() < deadline):
                    with lock:
                        first, last = blocks[next(numbers) % len(blocks)]
                    self._read(first, last, out)
                    read += last - first
            except BaseException as error:
                errors.append(error)
            done.append((read, _ready_seconds() - ran, time.perf_counter() - wall))

        cpu, begun = CpuTime.now(), time.perf_counter()
        workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if errors:
            raise errors[0]
        images = sum(read for read, _, _ in done)
        self.share = min(1.0, sum(ran for _, ran, _ in done) / max(1e-9, sum(wall for _, _, wall in done)))
        return Slice(images, time.perf_counter() - begun, CpuTime.now().since(cpu).total, passed=images)

    def _buffer(self) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        return np.empty((self.block_rows, *self._index.row_shape), self._index.native_dtype)

    def _read(self, first: int, last: int, out: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
        rows = np.arange(first, last) + self._dataset.first_row
        self._dataset.engine.read(self._dataset.names[0], rows, out[: last - first])

    def _blocks(self, first: int, rows: int) -> Iterator[tuple[int, int]]:
        """Rows of the split that are read together, none across the edge of a chunk."""
        base, unit = self._dataset.first_row, self._index.unit_rows
        while first < rows:
            edge = ((base + first) // unit + 1) * unit - base
            last = min(rows, edge, first + self.block_rows)
            yield first, last
            first = last


def ready_share(call: object, seconds: float) -> float:
    """Call something for some time; of that time, the part in which this thread ran, or was ready to, 0 to 1."""
    assert callable(call)
    ran, begun = _ready_seconds(), time.perf_counter()
    while True:
        call()
        wall = time.perf_counter() - begun
        if wall >= seconds:
            return min(1.0, (_ready_seconds() - ran) / max(wall, 1e-9))


def _ready_seconds() -> float:
    """In which this thread ran, or would have if a CPU had been free: a busy machine must not look like a slow disk."""
    try:
        ran, queued, _ = _SCHEDSTAT.read_text().split()
        return (int(ran) + int(queued)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()
