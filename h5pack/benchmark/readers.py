"""The code that reads the file in a benchmark case: H5Loader, h5py, single rows, or a DataLoader with workers."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from PIL import Image
from torch.utils.data import DataLoader

from h5pack.benchmark.cases import BenchCase, FileVariant
from h5pack.benchmark.ceilings import touch
from h5pack.data.dataset import H5Dataset
from h5pack.data.loader import H5Loader
from h5pack.data.samplers import ChunkBatchSampler
from h5pack.read.chunk_decoder import DECODED_BYTES
from h5pack.read.hdf5 import open_file, reopen_tuned, require_dataset

_SHUFFLES: dict[str, str | bool] = {"sequential": False, "window": "window", "full": "full"}
_IO = Path("/proc/self/io")


@dataclass(frozen=True)
class ReadTiming:
    """The result of `CaseReader.run`."""

    rows: int
    seconds: float
    bytes_per_row: float | None  # Bytes requested from the file, cached or not, per row; None if unknown.


class CaseReader:
    """Base class of the readers of one case; `_epoch` yields (number of rows, pixels) for each read.

    `close_file` closes the file.
    """

    max_epoch = 1.0  # `run` stops within an epoch after this many times the requested seconds.
    counts_bytes = True  # Whether this process reads the file, so that its reads can be counted.

    def __init__(self, close_file: Callable[[], None]) -> None:
        self._rows, self._close_file = 0, close_file

    def _epoch(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        raise NotImplementedError

    def close(self) -> None:
        """Stop reading, close the file, and free the memory."""
        self._close_file()

    def _rows_read(self) -> int:
        return self._rows

    def _bytes_read(self) -> int | None:
        """Return how many bytes this process has requested by read calls, cached or not; None if unknown."""
        try:
            return int(_IO.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return None

    def run(self, seconds: float, *, once: bool = False) -> ReadTiming:
        """Read epochs for about `seconds`; if `once` is true, read at most one epoch."""
        requested, before, begin = self._bytes_read(), self._rows_read(), time.perf_counter()
        while True:
            epoch = self._epoch()
            for count, pixels in epoch:
                touch(pixels)
                self._rows += count
                # Check after every read, because a batch that is read row by row may take longer than `seconds`.
                if time.perf_counter() - begin >= self.max_epoch * seconds:
                    break
            elapsed, rows = time.perf_counter() - begin, self._rows_read() - before
            epoch.close()  # type: ignore[attr-defined]
            if once or elapsed >= seconds:
                break
        # Count the rows again, because only now, when no thread is reading, the rows match the bytes.
        now, counted = self._bytes_read(), self._rows_read() - before
        if not self.counts_bytes or requested is None or now is None or not counted:
            return ReadTiming(rows, elapsed, None)
        return ReadTiming(rows, elapsed, (now - requested) / counted)


class SharedDatasets:
    """Datasets shared by several readers, so that the chunks of a file, maybe millions, are indexed only once."""

    def __init__(self, sampled: float = 1.0) -> None:
        self._sampled = sampled
        self.memory: list[H5Loader] = []  # Loaders kept for their batch memory, which later readers reuse.
        self._datasets: dict[tuple[str, bool], H5Dataset] = {}

    def dataset(self, variant: FileVariant, *, library: bool = False) -> H5Dataset:
        """Return the dataset of a variant. If `library` is true, it reads all rows through the HDF5 library."""
        key = variant.label, library
        if key not in self._datasets:
            dataset = H5Dataset(variant.path, images=variant.images, labels=variant.labels)
            # Scale the cache by the sample's share of all images: it should hold the sample only if it would hold all.
            if not variant.is_input:
                dataset.engine.chunks.cache.capacity = int(DECODED_BYTES * self._sampled)
            self._datasets[key] = through_library(dataset) if library else dataset
        return self._datasets[key]


def through_library(dataset: H5Dataset) -> H5Dataset:
    """Change the dataset so that it reads all rows through the HDF5 library, and return it."""
    for name, index in dataset.engine.indexes.items():
        dataset.engine.indexes[name] = replace(index, library_reason="the benchmark asks for it")
    return dataset


def open_reader(case: BenchCase, variant: FileVariant, seed: int, shared: SharedDatasets) -> CaseReader:
    """Return the reader for a case."""
    dataset = shared.dataset(variant)
    if case.num_workers is not None:
        return WorkerReader(dataset, case, variant, seed)
    if case.engine == "default" or (case.engine == "tuned" and case.order == "single"):
        library = LibraryReader(dataset, case, variant, seed)
        return SingleReader(library.read_row, library.close, variant, seed) if case.order == "single" else library
    if case.order == "single":
        return SingleReader(lambda row: dataset[row][0].numpy(), dataset.close, variant, seed)
    reader = LoaderReader(shared.dataset(variant, library=case.engine == "tuned"), case, variant, seed)
    reader.share(shared.memory)
    return reader


class LoaderReader(CaseReader):
    """Reader of batches by an H5Loader. Rows that the loader has prefetched count as read."""

    max_epoch = 4.0

    def __init__(self, dataset: H5Dataset, case: BenchCase, variant: FileVariant, seed: int) -> None:
        super().__init__(dataset.close)
        self._dataset = dataset
        self._before = dataset.stats()
        self._new_loader = partial(
            H5Loader, dataset, case.batch_size, shuffle=_SHUFFLES[case.order], seed=seed, window=case.window,
            num_threads=case.num_threads, indices=_first_rows(dataset, variant),
        )  # fmt: skip
        self._loader = self._new_loader()
        self.decodes_once = self._loader.decodes_once

    def share(self, memory: list[H5Loader]) -> None:
        """Reuse an earlier reader's batch memory, because the first write to new memory is slower than reading."""
        if not any(self._loader.use_memory_of(keeper) for keeper in memory):
            memory.append(self._new_loader())
            self._loader.use_memory_of(memory[-1])
        self._loader.prepare_memory()

    def _epoch(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        batches = iter(self._loader)
        try:
            for batch in batches:
                yield len(batch.images), batch.images.numpy()
        finally:
            batches.close()  # type: ignore[attr-defined]

    def _rows_read(self) -> int:
        return self._dataset.stats().rows

    def _bytes_read(self) -> int | None:
        # The base class counts read calls, but rows in the page cache are copied without a read call.
        return self._dataset.stats().bytes_read

    def hit_rate(self) -> float | None:
        """Return the fraction of rows whose chunk had already been read for another row; None before any read."""
        stats = self._dataset.stats()
        rows = stats.rows - self._before.rows
        return (stats.chunk_hits - self._before.chunk_hits) / rows if rows else None

    def close(self) -> None:
        """Stop the loader, free its memory, and close the file."""
        self._loader.close()
        super().close()


class SingleReader(CaseReader):
    """Reader of one random row at a time; `read` returns the pixels of a row."""

    def __init__(
        self, read: Callable[[int], npt.NDArray[Any]], close_file: Callable[[], None], variant: FileVariant, seed: int
    ) -> None:
        super().__init__(close_file)
        self._read = read
        self._order: list[int] = np.random.default_rng(seed).permutation(variant.rows).tolist()

    def _epoch(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        return ((1, self._read(row)) for row in self._order)


class LibraryReader(CaseReader):
    """Reader of batches by h5py, row by row, or in the sequential order with a slice per batch.

    Encoded images are read row by row, and decoded by Pillow.
    The chunk cache is h5py's default, or set up for random access if the case's engine is "tuned". `dataset` is used
    only for the order of a window shuffle.
    """

    def __init__(self, dataset: H5Dataset, case: BenchCase, variant: FileVariant, seed: int) -> None:
        file = open_file(variant.path)
        super().__init__(file.close)
        self._case, self._num_rows = case, variant.rows
        self._sampler = _window_sampler(dataset, case, variant, seed)
        self._random = np.random.default_rng(seed)
        self._batch: npt.NDArray[Any] | None = None
        self._images = require_dataset(file, variant.images)
        if case.engine == "tuned":
            self._images = reopen_tuned(self._images)
        self._encoded = h5py.check_vlen_dtype(self._images.dtype) is not None

    def _epoch(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        for rows in self._batches():
            yield from self.read_batch(rows)

    def read_row(self, row: int) -> npt.NDArray[Any]:
        """Return the pixels of one row."""
        found: npt.NDArray[Any] = self._images[row]
        if not self._encoded:
            return found
        with Image.open(io.BytesIO(found.tobytes())) as opened:
            return np.asarray(opened.convert("RGB"))

    def read_batch(self, rows: Sequence[int]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Read a batch, and yield (number of rows, pixels) for each read.

        In sequential order, rows that are not encoded are read as one slice; otherwise they are copied one by one.
        """
        if self._case.order == "sequential" and not self._encoded:
            yield len(rows), self._images[rows[0] : rows[-1] + 1]
            return
        for slot, row in enumerate(rows):
            pixels = self.read_row(int(row))
            if self._batch is None or len(self._batch) < len(rows) or self._batch.shape[1:] != pixels.shape:
                self._batch = np.empty((len(rows), *pixels.shape), pixels.dtype)
            self._batch[slot] = pixels
            yield 1, self._batch[slot]

    def _batches(self) -> Iterable[Any]:
        if self._case.order == "window":
            return self._sampler
        size, rows = self._case.batch_size, np.arange(self._num_rows)
        if self._case.order == "full":
            self._random.shuffle(rows)
        return np.array_split(rows, range(size, len(rows), size))


class WorkerReader(CaseReader):
    """Reader of batches by a DataLoader with an H5Dataset, `ChunkBatchSampler` and ``collate_fn=dataset.collate``."""

    max_epoch = math.inf  # Finish each epoch: busy workers would disturb the next measurement.
    counts_bytes = False

    def __init__(self, dataset: H5Dataset, case: BenchCase, variant: FileVariant, seed: int) -> None:
        super().__init__(dataset.close)
        self._loader: DataLoader[Any] | None = DataLoader(
            dataset, batch_sampler=_window_sampler(dataset, case, variant, seed), num_workers=case.num_workers or 0,
            collate_fn=dataset.collate, persistent_workers=bool(case.num_workers),
        )  # fmt: skip

    def _epoch(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        assert self._loader is not None
        return ((len(batch.images), batch.images.numpy()) for batch in self._loader)

    def close(self) -> None:
        """Drop the DataLoader, which ends its workers, and close the file."""
        self._loader = None
        super().close()


def _first_rows(dataset: H5Dataset, variant: FileVariant) -> npt.NDArray[np.int64] | None:
    """Return the indices of the sample's rows in a larger file; None if the sample is the whole file."""
    return None if variant.rows == len(dataset) else np.arange(variant.rows)


def _window_sampler(dataset: H5Dataset, case: BenchCase, variant: FileVariant, seed: int) -> ChunkBatchSampler:
    indices = _first_rows(dataset, variant)
    return ChunkBatchSampler(dataset, case.batch_size, window=case.window, seed=seed, indices=indices)
