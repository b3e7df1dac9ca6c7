"""The readers that a benchmark compares: H5Loader, H5Dataset, plain h5py and a DataLoader.

A case is one configuration of a benchmark; each reader runs one case for a given time.
"""

from __future__ import annotations

import io
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
from h5pack.benchmark.ceilings import touch
from h5pack.data.dataset import H5Dataset
from h5pack.data.loader import H5Loader
from h5pack.data.samplers import ChunkBatchSampler
from h5pack.read.chunk_index import LibraryCause, LibraryReason
from h5pack.read.hdf5 import is_filtered, open_file, reopen_tuned, require_dataset, require_filters

_SHUFFLES: dict[str, str | bool] = {"sequential": False, "window": "window", "full": "full"}
_IO = Path("/proc/self/io")
_MAX_EPOCH = 4.0
"""An epoch is abandoned when it takes this many times the requested seconds."""


@dataclass(frozen=True)
class ReadTiming:
    """Result of a run: rows read, duration, and bytes per row requested by read calls (None if unknown)."""

    rows: int
    seconds: float
    bytes_per_row: float | None


class CaseReader(Protocol):
    """Interface of a reader of one case."""

    def run(self, seconds: float, *, once: bool = False) -> ReadTiming:
        """Read for about `seconds`; with `once`, at most one epoch."""

    def close(self) -> None:
        """Stop reading, and free the memory."""


class SharedDatasets:
    """Open datasets and batch memory that all readers of a benchmark share.

    The chunks of each file variant are indexed only once, because a file may have millions of them. ``memory`` holds
    loaders whose batch memory is reused by one reader after the other.
    """

    def __init__(self) -> None:
        self.memory: list[H5Loader] = []
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
    reason = LibraryReason(LibraryCause.REQUESTED, "the benchmark asks for it")
    for name, index in dataset.engine.indexes.items():
        dataset.engine.indexes[name] = replace(index, library_reason=reason)
    return dataset


def open_reader(case: BenchCase, variant: FileVariant, seed: int, shared: SharedDatasets) -> CaseReader:
    """Return the reader for a case."""
    dataset = shared.dataset(variant)
    if case.num_workers is not None:
        return WorkerReader(dataset, case, variant, seed)
    if case.engine == "default" or (case.engine == "tuned" and case.order == "single"):
        return LibraryReader(dataset, case, variant, seed)
    if case.order == "single":
        return SingleReader(dataset, variant, seed)
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
        """Reuse an earlier reader's batch memory: the first write to new memory takes longer than the reading."""
        if not any(self._loader.use_memory_of(keeper) for keeper in memory):
            memory.append(self._new_loader())
            self._loader.use_memory_of(memory[-1])
        self._loader.prepare_memory()

    def run(self, seconds: float, *, once: bool = False) -> ReadTiming:
        """Run whole epochs until the time is up; abandon an epoch that takes much longer.

        Abandoning an epoch favours small chunks, because more of their batches are
        prefetched at that moment, and these count as read.
        """
        requested, before = requested_bytes(), self._dataset.stats().rows
        begin = time.perf_counter()
        while True:
            iterator = iter(self._loader)
            for batch in iterator:
                touch(_images(batch).numpy())
                if time.perf_counter() - begin >= _MAX_EPOCH * seconds:
                    break
            elapsed = time.perf_counter() - begin
            if once or elapsed >= seconds:
                rows = self._dataset.stats().rows - before
                iterator.close()  # type: ignore[attr-defined]
                # Count the rows again: now that no thread is reading, they match the bytes.
                return ReadTiming(rows, elapsed, _bytes_per_row(requested, self._dataset.stats().rows - before))

    def hit_rate(self) -> float | None:
        """Return the fraction of rows that needed no read of their own; None before any row was read.

        Their chunk had already been read for another row.
        """
        stats = self._dataset.stats()
        rows = stats.rows - self._before.rows
        return (stats.chunk_hits - self._before.chunk_hits) / rows if rows else None

    def close(self) -> None:
        """Stop the loader, and free its memory."""
        self._loader.close()
        self._dataset.close()


class SingleReader:
    """Reader of one random index of an H5Dataset per call."""

    def __init__(self, dataset: H5Dataset, variant: FileVariant, seed: int) -> None:
        self._dataset = dataset
        self._rows = _shuffled(variant.rows, seed)

    def run(self, seconds: float, *, once: bool = False) -> ReadTiming:
        """Read single rows until the time is up."""
        return timed_rows(self._rows, lambda row: touch(_images(self._dataset[row]).numpy()), seconds, once=once)

    def close(self) -> None:
        """Close the file."""
        self._dataset.close()


class LibraryFile:
    """HDF5 file whose rows are read by h5py's ``dataset[i]``; encoded images are decoded by Pillow.

    With `tuned`, the chunk cache is set up for random access; otherwise it is h5py's default.
    """

    def __init__(self, path: str, images: str, *, tuned: bool) -> None:
        self._file = open_file(path)
        self._dataset = require_dataset(self._file, images)
        if is_filtered(self._dataset):
            require_filters(self._dataset)
        if tuned:
            self._dataset = reopen_tuned(self._dataset)
        self._encoded = h5py.check_vlen_dtype(self._dataset.dtype) is not None
        self._batch: npt.NDArray[Any] | None = None

    def row(self, row: int) -> npt.NDArray[Any]:
        """Return the pixels of one row."""
        found: npt.NDArray[Any] = self._dataset[row]
        if not self._encoded:
            return found
        with Image.open(io.BytesIO(found.tobytes())) as opened:
            return np.asarray(opened.convert("RGB"))

    def batch(self, rows: Sequence[int], *, consecutive: bool) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Read a batch, and yield (number of rows, pixels) for each read.

        Consecutive rows are read as one slice; other rows are copied into the batch one by one.
        """
        if consecutive and not self._encoded:
            yield len(rows), self._dataset[rows[0] : rows[-1] + 1]
            return
        for slot, row in enumerate(rows):
            pixels = self.row(int(row))
            if self._batch is None or len(self._batch) < len(rows) or self._batch.shape[1:] != pixels.shape:
                self._batch = np.empty((len(rows), *pixels.shape), pixels.dtype)
            self._batch[slot] = pixels
            yield 1, self._batch[slot]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class LibraryReader:
    """Reader of batches or single rows by plain h5py. `dataset` is used only for the order of a window shuffle."""

    def __init__(self, dataset: H5Dataset, case: BenchCase, variant: FileVariant, seed: int) -> None:
        self._file = LibraryFile(variant.path, variant.images, tuned=case.engine == "tuned")
        self._case, self._rows, self._seed = case, variant.rows, seed
        self._epoch = 0
        self._sampler = ChunkBatchSampler(
            dataset, case.batch_size, window=case.window, seed=seed, indices=_first_rows(dataset, variant)
        )

    def run(self, seconds: float, *, once: bool = False) -> ReadTiming:
        """Read batches, or single rows if the case asks for them, until the time is up."""
        if self._case.order == "single":
            rows = _shuffled(self._rows, self._seed)
            return timed_rows(rows, lambda row: touch(self._file.row(row)), seconds, once=once)
        requested, begin, done = requested_bytes(), time.perf_counter(), 0
        while True:
            for count, pixels in self._epoch_rows():
                touch(pixels)
                done += count
                # Check after every row, because a batch that is read row by row may take longer than `seconds`.
                if time.perf_counter() - begin >= seconds:
                    break
            elapsed = time.perf_counter() - begin
            if once or elapsed >= seconds:
                return ReadTiming(done, elapsed, _bytes_per_row(requested, done))

    def _epoch_rows(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        for batch in self._batches():
            yield from self._file.batch(batch, consecutive=self._case.order == "sequential")

    def _batches(self) -> Iterator[Any]:
        size = self._case.batch_size
        if self._case.order == "sequential":
            return (range(start, min(self._rows, start + size)) for start in range(0, self._rows, size))
        if self._case.order == "full":
            self._epoch += 1
            rows = _shuffled(self._rows, self._seed + self._epoch)
            return iter(np.array_split(rows, range(size, len(rows), size)))
        return iter(self._sampler)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WorkerReader:
    """Reader of batches by a DataLoader with an H5Dataset, `ChunkBatchSampler` and ``collate_fn=dataset.collate``."""

    def __init__(self, dataset: H5Dataset, case: BenchCase, variant: FileVariant, seed: int) -> None:
        sampler = ChunkBatchSampler(
            dataset, case.batch_size, window=case.window, seed=seed, indices=_first_rows(dataset, variant)
        )
        self._dataset = dataset
        self._loader: DataLoader[Any] | None = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=case.num_workers or 0,
            collate_fn=dataset.collate,
            persistent_workers=bool(case.num_workers),
        )

    def run(self, seconds: float, *, once: bool = False) -> ReadTiming:
        """Run whole epochs until the time is up.

        Stopping in mid-epoch would leave workers running, which would disturb the next measurement.
        """
        assert self._loader is not None
        begin, rows = time.perf_counter(), 0
        while True:
            for batch in self._loader:
                images = _images(batch)
                touch(images.numpy())
                rows += len(images)
            elapsed = time.perf_counter() - begin
            if once or elapsed >= seconds:
                return ReadTiming(rows, elapsed, None)

    def close(self) -> None:
        """Drop the DataLoader, which ends the workers because nothing else refers to their iterator; close the file."""
        self._loader = None
        self._dataset.close()


def timed_rows(rows: npt.NDArray[np.int64], read: Callable[[int], object], seconds: float, *, once: bool) -> ReadTiming:
    """Measure calling `read` with one row after the other until the time is up."""
    requested, begin, done = requested_bytes(), time.perf_counter(), 0
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
    return ReadTiming(done, elapsed, _bytes_per_row(requested, done))


def requested_bytes() -> int | None:
    """Return how many bytes this process has requested by read calls, from cache or disk; None if unknown."""
    try:
        return int(_IO.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _bytes_per_row(before: int | None, rows: int) -> float | None:
    now = requested_bytes()
    return None if before is None or now is None or not rows else (now - before) / rows


def _images(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (list, tuple)) else batch


def _first_rows(dataset: H5Dataset, variant: FileVariant) -> npt.NDArray[np.int64] | None:
    """Return the indices of the sample's rows in a larger file; None if the sample is the whole file."""
    return None if variant.rows == len(dataset) else np.arange(variant.rows)


def _shuffled(rows: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(rows)
