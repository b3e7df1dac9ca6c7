"""Ceilings, the upper bounds that readers are compared with: copying rows in memory, and reading sequentially."""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from h5pack.benchmark.cases import FileVariant
from h5pack.benchmark.report import Ceiling
from h5pack.data.dataset import H5Dataset
from h5pack.system.files import drop_cache
from h5pack.system.machine import available_memory, huge_page_memory

_T = TypeVar("_T")

_BLOCK_BYTES = 4 * 1024 * 1024
_COPY_BYTES = 256 * 1024 * 1024
_SEQUENTIAL_SECONDS = 0.3
_BUFFERS_PER_THREAD = 3
_PROBES = 16


def touch(images: npt.NDArray[Any]) -> int:
    """Read one byte of every memory page of an array, so that all of it is in memory; return the sum."""
    return int(images.reshape(-1)[:: mmap.PAGESIZE].sum())


def images_of(batch: Any) -> Any:
    """Return the images of a batch or sample: its first element if it is a list or tuple, else the batch itself."""
    return batch[0] if isinstance(batch, (list, tuple)) else batch


def interleaved(names: Sequence[_T], repeats: int) -> Iterator[_T]:
    """Yield all names `repeats` times, alternately forwards and backwards, so that drifts affect all names equally."""
    for repeat in range(repeats):
        yield from names if repeat % 2 == 0 else reversed(names)


def sequential(path: Path, flags: int = 0, seconds: float = math.inf) -> float:
    """Read a file from its start for at most about `seconds`; return bytes/s. `flags` are for `os.open` (O_DIRECT)."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    block, done = mmap.mmap(-1, _BLOCK_BYTES), 0
    begin = time.perf_counter()
    try:
        while time.perf_counter() - begin < seconds and (got := os.preadv(descriptor, [block], done)):
            done += got
            # Stop at an unaligned end of the file: O_DIRECT cannot read from an unaligned offset.
            if got % mmap.PAGESIZE:
                break
    finally:
        os.close(descriptor)
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
        threads = [threading.Thread(target=copy, args=(thread,)) for thread in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return batches * self.batch_size / (time.perf_counter() - begin)


class Ceilings:
    """The ceilings of a benchmark in images/s: a memory copy on 1 and on `num_threads` threads, and a cold read.

    The copy is left out if there is too little memory. For the cold read, an uncompressed file is dropped from the page
    cache and then read sequentially.
    """

    def __init__(
        self, variants: Sequence[FileVariant], rows: int, row_bytes: int, batch_size: int, num_threads: int
    ) -> None:
        rows = max(batch_size, min(rows, _COPY_BYTES // row_bytes))
        needed = (rows + _BUFFERS_PER_THREAD * num_threads * batch_size) * row_bytes
        self.copy = MemoryCopy(rows, row_bytes, batch_size, num_threads) if needed <= available_memory() // 4 else None
        self.copies: dict[int, list[float]] = {count: [] for count in sorted({1, num_threads})}
        # Skip compressed files, whose bytes/s cannot be converted to images/s.
        plain = [variant.path for variant in variants if variant.compression == "none"]
        self._path = Path(plain[-1]) if plain else None
        self._row_bytes = row_bytes
        self._reads: list[float] = []

    def measure_copy(self) -> None:
        """Measure one repeat of the copy with each number of threads."""
        if self.copy is not None:
            for count, speeds in self.copies.items():
                speeds.append(self.copy(count, len(speeds)))

    def measure_read(self) -> None:
        """Measure one repeat of the cold read; stop measuring if the file cannot be dropped from the page cache."""
        if self._path is not None and drop_cache(self._path):
            self._path = None
        if self._path is not None:
            self._reads.append(sequential(self._path, seconds=_SEQUENTIAL_SECONDS) / self._row_bytes)

    def results(self) -> list[Ceiling]:
        """Return the ceilings that were measured."""
        found = [Ceiling("memory copy", count, "hot", tuple(speeds)) for count, speeds in self.copies.items()]
        return [one for one in (*found, Ceiling("sequential read", 1, "cold", tuple(self._reads))) if one.speeds]


class PageState:
    """The page-cache state of a dataset's file and of all other files that its rows are stored in."""

    def __init__(self, dataset: H5Dataset) -> None:
        self._dataset = dataset
        others = {other.path for index in dataset.engine.indexes.values() for other in index.files}
        self.files = (Path(dataset.path), *sorted(Path(other) for other in others - {dataset.path}))

    def drop(self) -> str | None:
        """Drop the files from the page cache; return None if that succeeds, else the reason why pages stay there."""
        if not hasattr(os, "posix_fadvise"):
            return "this system cannot drop a file from the page cache"
        # The system keeps pages that a process has mapped, as loaders of this dataset do.
        self._dataset.close()
        for path in self.files:
            try:
                left = drop_cache(path)
            except OSError as error:
                return f"{path} cannot be dropped from the page cache ({error.strerror or error})"
            if left and (path != self.files[0] or self._seems_cached()):
                return (
                    f"{left:,} pages of {path} stay in the page cache: another process has mapped them, or the file "
                    "system keeps them there (such as tmpfs)"
                )
        return None

    def _seems_cached(self) -> bool:
        """Return whether any of a few sampled rows can be read without waiting for the disk.

        mincore(2) reports all pages as cached to a process that may not write the file, hence this second check.
        """
        index = self._dataset.engine.indexes[self._dataset.names[0]]
        offsets = index.addresses.reshape(-1)
        offsets = offsets[offsets >= 0]
        if not len(offsets) or not hasattr(os, "RWF_NOWAIT"):
            return True
        step = max(1, len(offsets) // _PROBES)
        return any(self._dataset.engine.storage.is_cached(int(offset)) for offset in offsets[::step])
