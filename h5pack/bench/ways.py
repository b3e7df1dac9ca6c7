"""The ways of reading that a bench compares, each of which runs for as long as it is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from h5pack.bench.cell import Cell, Stored
from h5pack.bench.library_file import LibraryFile
from h5pack.feed.dataset import H5Dataset
from h5pack.feed.loader import H5Loader
from h5pack.feed.samplers import ChunkBatchSampler
from h5pack.measure.consuming import touch

_ORDERS: dict[str, str | bool] = {"sequential": False, "window": "window", "full": "full"}
_IO = Path("/proc/self/io")
_PATIENCE = 4.0
"""How many times as long as wanted an epoch may take before it is left."""


@dataclass(frozen=True)
class Timing:
    """A run of a way.

    Attributes
    ----------
    rows : int
    seconds : float
    bytes_a_row : float or None
        Asked of the system by this process; None where it does not say.
    """

    rows: int
    seconds: float
    bytes_a_row: float | None


class Way(Protocol):
    """A way of reading."""

    def run(self, seconds: float, *, once: bool = False) -> Timing:
        """Read for about so long, an epoch at most if `once`."""

    def close(self) -> None:
        """Stop, and give the memory back."""


def first_rows(dataset: H5Dataset, stored: Stored) -> npt.NDArray[np.int64] | None:
    """The rows of a sample within a larger file; None: all."""
    return None if stored.rows == len(dataset) else np.arange(stored.rows)


class LoaderWay:
    """Batches by H5Loader, which reads the file anew in each epoch.

    Parameters
    ----------
    dataset : H5Dataset
    cell : Cell
    stored : Stored
    seed : int
    """

    def __init__(self, dataset: H5Dataset, cell: Cell, stored: Stored, seed: int) -> None:
        self._dataset = dataset
        self._cell, self._seed, self._rows = cell, seed, first_rows(dataset, stored)
        self._before = dataset.stats()
        self._loader = self._new_loader()

    def _new_loader(self) -> H5Loader:
        return H5Loader(
            self._dataset,
            self._cell.batch,
            shuffle=_ORDERS[self._cell.order],
            seed=self._seed,
            window=self._cell.window,
            threads=self._cell.threads,
            rows=self._rows,
            resident="no",
        )

    def share(self, memory: list[H5Loader]) -> None:
        """Use memory that is filled already: the first touch of fresh memory costs more than the reading."""
        if not any(self._loader.use_memory_of(keeper) for keeper in memory):
            memory.append(self._new_loader())
            self._loader.use_memory_of(memory[-1])
        self._loader.prepare_memory()

    def run(self, seconds: float, *, once: bool = False) -> Timing:
        """Whole epochs until the time is up; one that takes much longer is left, and what was read of it counts.

        An epoch that is left says too much of small chunks, whose batches are ahead of the consumer at that moment.
        """
        asked, before = bytes_asked(), self._dataset.stats().rows
        begin = time.perf_counter()
        while True:
            iterator = iter(self._loader)
            for batch in iterator:
                touch((batch[0] if isinstance(batch, list) else batch).numpy())
                if time.perf_counter() - begin >= _PATIENCE * seconds:
                    break
            elapsed = time.perf_counter() - begin
            if once or elapsed >= seconds:
                rows = self._dataset.stats().rows - before
                iterator.close()  # type: ignore[attr-defined]
                # No thread is reading now, so bytes and rows go together.
                return Timing(rows, elapsed, _bytes_a_row(asked, self._dataset.stats().rows - before))

    def hit_rate(self) -> float | None:
        """The part of the rows that came with another row of their chunk; None before any."""
        stats = self._dataset.stats()
        rows = stats.rows - self._before.rows
        return (stats.chunk_hits - self._before.chunk_hits) / rows if rows else None

    def close(self) -> None:
        """Stop reading, and give the memory back."""
        self._loader.close()
        self._dataset.close()


class SingleWay:
    """One random index of an H5Dataset a call.

    Parameters
    ----------
    dataset : H5Dataset
    stored : Stored
    seed : int
    """

    def __init__(self, dataset: H5Dataset, stored: Stored, seed: int) -> None:
        self._dataset = dataset
        self._rows = shuffled(stored.rows, seed)

    def run(self, seconds: float, *, once: bool = False) -> Timing:
        """Rows until the time is up."""

        def read(row: int) -> None:
            sample = self._dataset[row]
            touch((sample[0] if isinstance(sample, tuple) else sample).numpy())

        return timed_rows(self._rows, read, seconds, once=once)

    def close(self) -> None:
        """Close the file."""
        self._dataset.close()


class LibraryWay:
    """Plain h5py: one row a call, into batches where the order has some.

    Parameters
    ----------
    dataset : H5Dataset
        Which tells the order.
    cell : Cell
    stored : Stored
    seed : int
    tuned : bool
        With an rdcc cache for reading in any order.
    """

    def __init__(self, dataset: H5Dataset, cell: Cell, stored: Stored, seed: int, *, tuned: bool) -> None:
        self._file = LibraryFile(stored.path, stored.images, tuned=tuned)
        self._cell, self._stored, self._seed = cell, stored, seed
        self._epoch = 0
        rows = first_rows(dataset, stored)
        self._sampler = ChunkBatchSampler(dataset, cell.batch, window=cell.window, seed=seed, rows=rows)

    def run(self, seconds: float, *, once: bool = False) -> Timing:
        """Rows, or batches, until the time is up."""
        if self._cell.order == "single":
            rows = shuffled(self._stored.rows, self._seed)
            return timed_rows(rows, lambda row: touch(self._file.row(row)), seconds, once=once)
        asked, begin, done = bytes_asked(), time.perf_counter(), 0
        consecutive = self._cell.order == "sequential"
        while True:
            for batch in self._batches():
                # A batch may take longer than there is time, row by row.
                for read, pixels in self._file.batch(batch, consecutive=consecutive):
                    touch(pixels)
                    done += read
                    if time.perf_counter() - begin >= seconds:
                        break
                if time.perf_counter() - begin >= seconds:
                    break
            elapsed = time.perf_counter() - begin
            if once or elapsed >= seconds:
                return Timing(done, elapsed, _bytes_a_row(asked, done))

    def _batches(self) -> Iterator[Any]:
        if self._cell.order == "sequential":
            size, stop = self._cell.batch, self._stored.rows
            return (range(start, min(stop, start + size)) for start in range(0, stop, size))
        if self._cell.order == "full":
            self._epoch += 1
            rows = shuffled(self._stored.rows, self._seed + self._epoch)
            return iter(np.array_split(rows, range(self._cell.batch, len(rows), self._cell.batch)))
        return iter(self._sampler)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def shuffled(rows: int, seed: int) -> npt.NDArray[np.int64]:
    """All rows in a random order; int64, (n,)."""
    return np.random.default_rng(seed).permutation(rows)


def timed_rows(rows: npt.NDArray[np.int64], read: Any, seconds: float, *, once: bool) -> Timing:
    """Call `read` with row after row until the time is up."""
    asked, begin, done = bytes_asked(), time.perf_counter(), 0
    elapsed = 0.0
    while elapsed < seconds:
        for row in rows.tolist():
            read(row)
            done += 1
            elapsed = time.perf_counter() - begin
            if elapsed >= seconds:
                break
        if once:
            break
    return Timing(done, elapsed, _bytes_a_row(asked, done))


def bytes_asked() -> int | None:
    """Bytes that this process has asked of the system by read calls, page cache or not; None where it does not say."""
    try:
        return int(_IO.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _bytes_a_row(asked: int | None, rows: int) -> float | None:
    now = bytes_asked()
    return None if asked is None or now is None or not rows else (now - asked) / rows
