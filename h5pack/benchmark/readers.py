"""The readers that a benchmark compares: H5Loader, H5Dataset, plain h5py and a DataLoader. Each runs one case."""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import numpy.typing as npt
from PIL import Image
from torch.utils.data import DataLoader

from h5pack.benchmark.cases import BenchCase, FileVariant
from h5pack.benchmark.ceilings import images_of, touch
from h5pack.data.dataset import H5Dataset
from h5pack.data.loader import H5Loader
from h5pack.data.samplers import ChunkBatchSampler
from h5pack.read.hdf5 import is_filtered, open_file, reopen_tuned, require_dataset, require_filters

_SHUFFLES: dict[str, str | bool] = {"sequential": False, "window": "window", "full": "full"}
_IO = Path("/proc/self/io")
_MAX_EPOCH = 4.0
"""An epoch is abandoned when it takes this many times the requested seconds."""


@dataclass(frozen=True)
class ReadTiming:
    """Result of a run."""

    rows: int
    seconds: float
    bytes_per_row: float | None  # Requested by read calls; None if unknown.


class CaseReader(Protocol):
    """Interface of a reader of one case."""

    def run(self, seconds: float, *, once: bool = False) -> ReadTiming:
        """Read for about `seconds`; with `once`, at most one epoch."""

    def close(self) -> None:
        """Stop reading, and free the memory."""


class SharedDatasets:
    """Open datasets that all readers of a benchmark share: the chunks of a file, maybe millions, are indexed once."""

    def __init__(self) -> None:
        self.memory: list[H5Loader] = []  # Loaders whose batch memory one reader after the other reuses.
        self._datasets: dict[tuple[str, bool], H5Dataset] = {}

    def dataset(self, variant: FileVariant, *, library: bool = False) -> H5Dataset:
        """Return the dataset of a variant; with `library`, one that reads all rows through the HDF5 library."""
        key = variant.label, library
        if key not in self._datasets:
            dataset = H5Dataset(variant.path, images=variant.images, labels=variant.labels)
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
        return SingleReader(lambda row: images_of(dataset[row]).numpy(), dataset.close, variant, seed)
    reader = LoaderReader(shared.dataset(variant, library=case.engine == "tuned"), case, variant, seed)
    reader.share(shared.memory)
    return reader


class LoaderReader:
    """Reader of batches by an H5Loader, which reads the file again in each epoch."""

    def __init__(self, dataset: H5Dataset, case: BenchCase, variant: FileVariant, seed: int) -> None:
        self._dataset, self._case, self._seed = dataset, case, seed
        self._indices = _first_rows(dataset, variant)
        self._before = dataset.stats()
        self._loader = self._new_loader()

    def _new_loader(self) -> H5Loader:
        case = self._case
        return H5Loader(
            self._dataset,
            case.batch_size,
            shuffle=_SHUFFLES[case.order],
            seed=self._seed,
            window=case.window,
            num_threads=case.num_threads,
            indices=self._indices,
            resident="no",
        )

    def share(self, memory: list[H5Loader]) -> None:
        """Reuse an earlier reader's batch memory, because the first write to new memory is slower than reading."""
        if not any(self._loader.use_memory_of(keeper) for keeper in memory):
            memory.append(self._new_loader())
            self._loader.use_memory_of(memory[-1])
        self._loader.prepare_memory()

    def run(self, seconds: float, *, once: bool = False) -> ReadTiming:
        """Run whole epochs until the time is up; abandon an epoch that takes much longer.

        This favours small chunks: more of their batches are prefetched at that moment, and these count as read.
        """
        requested, before = requested_bytes(), self._dataset.stats().rows
        begin = time.perf_counter()
        while True:
            iterator = iter(self._loader)
            for batch in iterator:
                touch(images_of(batch).numpy())
                if time.perf_counter() - begin >= _MAX_EPOCH * seconds:
                    break
            elapsed = time.perf_counter() - begin
            if once or elapsed >= seconds:
                rows = self._dataset.stats().rows - before
                iterator.close()  # type: ignore[attr-defined]
                # Count the rows again: now that no thread is reading, they match the bytes.
                return ReadTiming(rows, elapsed, _bytes_per_row(requested, self._dataset.stats().rows - before))

    def hit_rate(self) -> float | None:
        """Return the fraction of rows whose chunk had already been read for another row; None before any read."""
        stats = self._dataset.stats()
        rows = stats.rows - self._before.rows
        return (stats.chunk_hits - self._before.chunk_hits) / rows if rows else None

    def close(self) -> None:
        """Stop the loader, and free its memory."""
        self._loader.close()
        self._dataset.close()


class SingleReader:
    """Reader of one random row at a time; `read` returns the pixels of a row, `close` closes the file."""

    def __init__(
        self, read: Callable[[int], npt.NDArray[Any]], close: Callable[[], None], variant: FileVariant, seed: int
    ) -> None:
        self._read, self.close = read, close
        self._rows: list[int] = np.random.default_rng(seed).permutation(variant.rows).tolist()

    def run(self, seconds: float, *, once: bool = False) -> ReadTiming:
        """Read single rows until the time is up."""
        requested, begin, done = requested_bytes(), time.perf_counter(), 0
        elapsed = 0.0
        while elapsed < seconds:
            for row in self._rows:
                touch(self._read(row))
                done += 1
                elapsed = time.perf_counter() - begin
                if elapsed >= seconds:
                    break
            if once:
                break
        return ReadTiming(done, elapsed, _bytes_per_row(requested, done))


class LibraryReader:
    """Reader of batches by h5py's ``dataset[i]``; encoded images are decoded by Pillow.

    The chunk cache is h5py's default, or set up for random access if the case's engine is "tuned". `dataset` is used
    only for the order of a window shuffle.
    """

    def __init__(self, dataset: H5Dataset, case: BenchCase, variant: FileVariant, seed: int) -> None:
        self._case, self._rows, self._seed = case, variant.rows, seed
        self._sampler = _window_sampler(dataset, case, variant, seed)
        self._epoch = 0
        self._batch: npt.NDArray[Any] | None = None
        self._file = open_file(variant.path)
        self._images = require_dataset(self._file, variant.images)
        if is_filtered(self._images):
            require_filters(self._images)
        if case.engine == "tuned":
            self._images = reopen_tuned(self._images)
        self._encoded = h5py.check_vlen_dtype(self._images.dtype) is not None

    def run(self, seconds: float, *, once: bool = False) -> ReadTiming:
        """Read batches until the time is up."""
        requested, begin, done = requested_bytes(), time.perf_counter(), 0
        while True:
            for count, pixels in itertools.chain.from_iterable(map(self.read_batch, self._batches())):
                touch(pixels)
                done += count
                # Check after every row, because a batch that is read row by row may take longer than `seconds`.
                if time.perf_counter() - begin >= seconds:
                    break
            elapsed = time.perf_counter() - begin
            if once or elapsed >= seconds:
                return ReadTiming(done, elapsed, _bytes_per_row(requested, done))

    def read_row(self, row: int) -> npt.NDArray[Any]:
        """Return the pixels of one row."""
        found: npt.NDArray[Any] = self._images[row]
        if not self._encoded:
            return found
        with Image.open(io.BytesIO(found.tobytes())) as opened:
            return np.asarray(opened.convert("RGB"))

    def read_batch(self, rows: Sequence[int]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Read a batch, and yield (number of rows, pixels) for each read.

        In sequential order, rows are read as one slice; otherwise they are copied into the batch one by one.
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

    def _batches(self) -> Iterator[Any]:
        size = self._case.batch_size
        if self._case.order == "sequential":
            return (range(start, min(self._rows, start + size)) for start in range(0, self._rows, size))
        if self._case.order == "full":
            self._epoch += 1
            rows = np.random.default_rng(self._seed + self._epoch).permutation(self._rows)
            return iter(np.array_split(rows, range(size, len(rows), size)))
        return iter(self._sampler)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WorkerReader:
    """Reader of batches by a DataLoader with an H5Dataset, `ChunkBatchSampler` and ``collate_fn=dataset.collate``."""

    def __init__(self, dataset: H5Dataset, case: BenchCase, variant: FileVariant, seed: int) -> None:
        self._dataset = dataset
        self._loader: DataLoader[Any] | None = DataLoader(
            dataset,
            batch_sampler=_window_sampler(dataset, case, variant, seed),
            num_workers=case.num_workers or 0,
            collate_fn=dataset.collate,
            persistent_workers=bool(case.num_workers),
        )

    def run(self, seconds: float, *, once: bool = False) -> ReadTiming:
        """Run whole epochs until the time is up: workers still busy would disturb the next measurement."""
        assert self._loader is not None
        begin, rows = time.perf_counter(), 0
        while True:
            for batch in self._loader:
                images = images_of(batch)
                touch(images.numpy())
                rows += len(images)
            elapsed = time.perf_counter() - begin
            if once or elapsed >= seconds:
                return ReadTiming(rows, elapsed, None)

    def close(self) -> None:
        """Drop the DataLoader, which ends its workers, and close the file."""
        self._loader = None
        self._dataset.close()


def requested_bytes() -> int | None:
    """Return how many bytes this process has requested by read calls, from cache or disk; None if unknown."""
    try:
        return int(_IO.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _bytes_per_row(before: int | None, rows: int) -> float | None:
    now = requested_bytes()
    return None if before is None or now is None or not rows else (now - before) / rows


def _first_rows(dataset: H5Dataset, variant: FileVariant) -> npt.NDArray[np.int64] | None:
    """Return the indices of the sample's rows in a larger file; None if the sample is the whole file."""
    return None if variant.rows == len(dataset) else np.arange(variant.rows)


def _window_sampler(dataset: H5Dataset, case: BenchCase, variant: FileVariant, seed: int) -> ChunkBatchSampler:
    indices = _first_rows(dataset, variant)
    return ChunkBatchSampler(dataset, case.batch_size, window=case.window, seed=seed, indices=indices)
