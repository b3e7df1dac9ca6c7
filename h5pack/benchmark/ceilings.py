"""Ceilings, the upper bounds that readers are compared with: copying rows in memory, and reading a file sequentially.

To measure cold reads, `PageState` drops files from the page cache.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from h5pack.benchmark.cases import BenchCase, Ceiling, FileVariant, ceiling_threads
from h5pack.data.dataset import H5Dataset
from h5pack.read.virtual_index import VirtualIndex
from h5pack.system.files import drop_cache
from h5pack.system.machine import available_memory, huge_page_memory

_T = TypeVar("_T")

_BLOCK_BYTES = 4 * 1024 * 1024
_COPY_BYTES = 256 * 1024 * 1024
_SEQUENTIAL_SECONDS, _MIN_COPY_SECONDS = 0.3, 0.02
_BUFFERS_PER_THREAD = 3
_PROBES = 16


def touch(images: npt.NDArray[Any]) -> int:
    """Read a byte of each page of an array, so that the whole array is in memory; return the sum of the bytes."""
    return int(images.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].sum())


def interleaved(names: Sequence[_T], repeats: int) -> Iterator[_T]:
    """Yield all names `repeats` times, forwards and backwards in turn, so that a drift in speed affects all equally."""
    for repeat in range(repeats):
        yield from names if repeat % 2 == 0 else reversed(names)


def sequential(path: Path, flags: int = 0, seconds: float = math.inf, num_threads: int = 1) -> float:
    """Read a file, or as much of it as is read in about `seconds`, and return bytes/s.

    Each thread reads an equal part of the file sequentially. `flags` are further flags for `os.open`, such as O_DIRECT.
    """
    size = path.stat().st_size
    part = -(-size // num_threads // _BLOCK_BYTES) * _BLOCK_BYTES
    begin = time.perf_counter()

    def read(thread: int) -> int:
        descriptor = os.open(path, os.O_RDONLY | flags)
        block, at, end = mmap.mmap(-1, _BLOCK_BYTES), thread * part, (thread + 1) * part
        try:
            while at < end and (got := os.preadv(descriptor, [block], at)):
                at += got
                # Stop at an unaligned end of the file, too: O_DIRECT cannot read from an unaligned offset.
                if time.perf_counter() - begin >= seconds or got % mmap.PAGESIZE:
                    break
        finally:
            os.close(descriptor)
        return at - thread * part

    with ThreadPoolExecutor(num_threads) as pool:
        done = sum(pool.map(read, range(num_threads)))
    return done / (time.perf_counter() - begin)


class MemoryCopy:
    """Copies random rows of a uint8 array (rows, row_bytes) with ``np.take`` into batches whose memory is reused."""

    def __init__(self, rows: int, row_bytes: int, batch_size: int, max_threads: int = 2) -> None:
        self.rows, self.batch_size = rows, batch_size
        self.source = self._array(rows, row_bytes)
        self.source[...] = np.arange(row_bytes, dtype=np.uint32).astype(np.uint8)
        self.buffers = [self._array(batch_size, row_bytes) for _ in range(_BUFFERS_PER_THREAD * max_threads)]
        for buffer in self.buffers:
            buffer[...] = 1

    @staticmethod
    def _array(rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
        size = rows * row_bytes
        return np.frombuffer(huge_page_memory(size), np.uint8)[:size].reshape(rows, row_bytes)

    def __call__(self, num_threads: int, seed: int) -> float:
        """Copy one epoch of full batches in random order; return rows/s."""
        order = np.random.default_rng(seed).permutation(self.rows)
        batches = self.rows // self.batch_size

        def copy(thread: int) -> None:
            for number in range(thread, batches, num_threads):
                buffer = number // num_threads % _BUFFERS_PER_THREAD
                out = self.buffers[thread * _BUFFERS_PER_THREAD + buffer]
                rows = order[number * self.batch_size : (number + 1) * self.batch_size]
                np.take(self.source, rows, axis=0, out=out, mode="clip")
                touch(out)

        begin = time.perf_counter()
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(copy, range(num_threads)))
        return batches * self.batch_size / (time.perf_counter() - begin)


class Ceilings:
    """Measures the two ceilings.

    - For hot reads: copying random rows in memory. This needs enough memory.
    - For cold reads: reading a file sequentially. This needs an uncompressed file.
    """

    def __init__(self, variants: Sequence[FileVariant], rows: int, row_bytes: int, batch_size: int, cpus: int) -> None:
        self._cpus = cpus
        # Skip compressed files, whose bytes/s cannot be converted to images/s, and files whose rows are in other files.
        plain = [variant.path for variant in variants if variant.compression == "none"]
        plain = [path for path in plain if os.path.getsize(path) >= rows * row_bytes]
        self._path = Path(plain[-1]) if plain else None
        rows = max(batch_size, min(rows, _COPY_BYTES // row_bytes))
        batches = (available_memory() // 4 // row_bytes - rows) // batch_size
        # Maximum number of copying threads, each with its own buffers; 0 or less if there is too little memory for one.
        self.copy_threads = min(cpus, batches // _BUFFERS_PER_THREAD)
        self.copy = MemoryCopy(rows, row_bytes, batch_size, self.copy_threads) if self.copy_threads > 0 else None
        self._row_bytes = row_bytes
        self._speeds: dict[tuple[str, int], list[float]] = {}

    def measure(self, case: BenchCase) -> float | None:
        """Measure and record the ceiling for an H5Loader case; return images/s, or None if it cannot be measured."""
        threads = ceiling_threads(case, self._cpus)
        speed = self._measure_copy(threads) if case.cache == "hot" else self._measure_read(threads)
        if speed is not None:
            self._speeds.setdefault((case.cache, threads), []).append(speed)
        return speed

    def _measure_copy(self, num_threads: int) -> float | None:
        if self.copy is None or num_threads > self.copy_threads:
            return None
        speeds: list[float] = []
        begin = time.perf_counter()
        # Copy several epochs of a small sample, because one takes less time than starting the threads.
        while not speeds or time.perf_counter() - begin < _MIN_COPY_SECONDS:
            speeds.append(self.copy(num_threads, len(speeds)))
        return len(speeds) / sum(1 / speed for speed in speeds)

    def _measure_read(self, num_threads: int) -> float | None:
        if self._path is None or drop_cache(self._path):
            # Do not try again if the file cannot be dropped from the page cache.
            self._path = None
            return None
        return sequential(self._path, seconds=_SEQUENTIAL_SECONDS, num_threads=num_threads) / self._row_bytes

    def results(self) -> list[Ceiling]:
        """Return the ceilings that were measured."""
        names = {"hot": "memory copy", "cold": "sequential read"}
        return [
            Ceiling(names[cache], num_threads, cache, tuple(speeds))
            for (cache, num_threads), speeds in sorted(self._speeds.items(), reverse=True)
        ]


class PageState:
    """The page-cache state of a dataset's file and of all other files that its rows are stored in."""

    def __init__(self, dataset: H5Dataset) -> None:
        self._dataset = dataset
        others = {other.path for index in dataset.engine.indexes.values() for other in index.files}
        self.files = (Path(dataset.path), *sorted(Path(other) for other in others - {dataset.path}))

    def drop(self) -> str | None:
        """Drop the files from the page cache; return None if that succeeds, else the reason why pages stay there."""
        # Close the dataset first: its loaders map the files, and mapped pages cannot be dropped.
        self._dataset.close()
        for path in self.files:
            try:
                left = drop_cache(path)
            except OSError as error:
                return f"{path} cannot be dropped from the page cache ({error.strerror or error})"
            if left and (path != self.files[0] or self._seems_cached()):
                return (
                    f"{left:,} pages of {path} stay in the page cache: another process has mapped them, or the system "
                    "(such as macOS) or the file system (such as tmpfs) keeps them there"
                )
        return None

    def _seems_cached(self) -> bool:
        """Return whether any of a few sampled chunks can be read without waiting for the disk; True if unknown.

        Return False for a virtual dataset, because its rows are in other files. This check is needed because mincore(2)
        reports all pages as cached to a process without write permission for the file.
        """
        index = self._dataset.engine.indexes[self._dataset.names[0]]
        if isinstance(index, VirtualIndex):
            return False
        offsets = index.addresses.reshape(-1)
        offsets = offsets[offsets >= 0]
        if not len(offsets) or not hasattr(os, "RWF_NOWAIT"):
            return True
        step = max(1, len(offsets) // _PROBES)
        return any(self._dataset.engine.storage.is_cached(int(offset)) for offset in offsets[::step])
