"""Measure cases in turns for as long as time allows. A turn measures each case once, by the reader of the case.

A reader uses H5Loader, h5py, a DataLoader with workers, or, for single rows, H5Dataset.
"""

from __future__ import annotations

import contextlib
import io
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from h5pack.benchmark.cases import MIN_REPEATS, NO_TIME, REPEATS, BenchCase, FileVariant, Measurement, min_seconds
from h5pack.benchmark.ceilings import Ceilings, PageState, touch
from h5pack.data.dataset import H5Dataset
from h5pack.data.loader import H5Loader
from h5pack.data.samplers import ChunkBatchSampler
from h5pack.errors import H5PackError
from h5pack.images.decode import MAX_PIXELS
from h5pack.images.headers import open_image
from h5pack.read.chunk_decoder import DECODED_BYTES
from h5pack.read.encoded import is_encoded
from h5pack.read.hdf5 import open_file, reopen_tuned, require_dataset
from h5pack.system.files import make_hot

_SHUFFLES: dict[str, str | bool] = {"sequential": False, "window": "window", "full": "full"}
_IO = Path("/proc/self/io")
Epoch = Iterator[tuple[int, npt.NDArray[Any]]]
_MIN_RUN_SECONDS = 0.02
_MAX_RUN_SECONDS = {"hot": 0.2, "cold": 0.5}
"""Maximum duration of a repeat, by page-cache state: more short repeats are more informative than fewer long ones."""
_MAX_LOAD_SECONDS = 1.0
_WORKER_SECONDS = 1.5  # Assumed duration of a first repeat that starts worker processes.
_WARM_BYTES = 8 * 1024 * 1024
_PAGES_STAY = (
    "the file cannot be dropped from the page cache, for example on tmpfs, or if another process has mapped it"
)


@dataclass(frozen=True)
class ReadTiming:
    """The result of `CaseReader.run`."""

    rows: int
    seconds: float
    bytes_per_row: float | None  # Bytes requested from the file, cached or not, per row; None if unknown.


class CaseReader:
    """A reader of one case. `epoch` returns an iterator that yields (number of rows, pixels) for each read."""

    max_epoch = 1.0  # After this many times the requested seconds, `run` stops even in the middle of an epoch.
    counts_bytes = True  # Whether this process reads the file, so that its reads can be counted.

    def __init__(self, close_file: Callable[[], None], epoch: Callable[[], Epoch]) -> None:
        self._rows, self._close_file, self._epoch = 0, close_file, epoch

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
        requested, before, given, begin = self._bytes_read(), self._rows_read(), self._rows, time.perf_counter()
        while True:
            epoch = self._epoch()
            for count, pixels in epoch:
                touch(pixels)
                self._rows += count
                # Check after every read, because a batch that is read row by row may take longer than `seconds`.
                if time.perf_counter() - begin >= self.max_epoch * seconds:
                    break
            elapsed, rows = time.perf_counter() - begin, max(self._rows_read() - before, self._rows - given)
            epoch.close()  # type: ignore[attr-defined]
            if once or elapsed >= seconds:
                break
        # Count the rows again. Their number matches the number of bytes only now, when no thread is reading.
        now, counted = self._bytes_read(), max(self._rows_read() - before, self._rows - given)
        if not self.counts_bytes or requested is None or now is None or not counted:
            return ReadTiming(rows, elapsed, None)
        return ReadTiming(rows, elapsed, (now - requested) / counted)


class SharedDatasets:
    """Datasets that readers share, so that a file is indexed only once for direct reads, and once for the HDF5 library.

    `num_images` is the number of all images. A file may hold only some of them.
    """

    def __init__(self, num_images: int = 0) -> None:
        self._num_images = num_images
        self.memory: list[H5Loader] = []  # Loaders kept for their batch memory, which later readers reuse.
        self._datasets: dict[tuple[str, bool], H5Dataset] = {}

    def dataset(self, variant: FileVariant, *, library: bool = False) -> H5Dataset:
        """Return the dataset of a variant. If `library` is true, it reads all rows through the HDF5 library."""
        key = variant.label, library
        if key not in self._datasets:
            dataset = H5Dataset(variant.path, images=variant.images, labels=variant.labels)
            # Reduce the cache of decoded chunks like the number of images, so that it holds the whole file only if the
            # usual cache would hold all images.
            part = len(dataset) / max(len(dataset), self._num_images)
            dataset.engine.chunks.cache.capacity = int(DECODED_BYTES * part)
            self._datasets[key] = through_library(dataset) if library else dataset
        return self._datasets[key]


def through_library(dataset: H5Dataset) -> H5Dataset:
    """Change the dataset so that it reads all rows through the HDF5 library, and return it."""
    for name, index in dataset.engine.indexes.items():
        dataset.engine.indexes[name] = replace(index, library_reason="the benchmark asks for it")
    return dataset


def open_reader(case: BenchCase, variant: FileVariant, seed: int, shared: SharedDatasets) -> CaseReader:
    """Open the file variant of a case, and return the reader for the engine, order and `num_workers` of the case."""
    dataset = shared.dataset(variant)
    if case.num_workers is not None:
        return WorkerReader(dataset, case, variant, seed)
    if case.engine == "default" or (case.engine == "tuned" and case.order == "single"):
        return LibraryReader(dataset, case, variant, seed)
    if case.order == "single":
        order = _random_rows(variant, seed)
        return CaseReader(dataset.close, lambda: ((1, dataset[row][0].numpy()) for row in order))
    return LoaderReader(shared.dataset(variant, library=case.engine == "tuned"), case, variant, seed, shared.memory)


class LoaderReader(CaseReader):
    """A reader of batches by an H5Loader.

    Rows count as soon as they are prefetched from the file. Rows that the loader holds in memory count on delivery.
    """

    max_epoch = 4.0

    def __init__(
        self, dataset: H5Dataset, case: BenchCase, variant: FileVariant, seed: int, memory: list[H5Loader]
    ) -> None:
        super().__init__(dataset.close, self._batches)
        self._dataset = dataset
        self._before = dataset.stats()
        new_loader = partial(
            H5Loader, dataset, case.batch_size, shuffle=_SHUFFLES[case.order], seed=seed, window=case.window,
            num_threads=case.num_threads, indices=_first_rows(dataset, variant),
        )  # fmt: skip
        self._loader = new_loader()
        self.decodes_once = self._loader.decodes_once
        # Share batch memory with earlier readers, because first writes to new memory take longer than reading rows.
        if not any(self._loader.use_memory_of(keeper) for keeper in memory):
            memory.append(new_loader())
            self._loader.use_memory_of(memory[-1])
        self._loader.prepare_memory()

    def _batches(self) -> Epoch:
        batches = iter(self._loader)
        try:
            for batch in batches:
                yield len(batch.images), batch.images.numpy()
        finally:
            batches.close()  # type: ignore[attr-defined]

    def _rows_read(self) -> int:
        return self._dataset.stats().rows

    def _bytes_read(self) -> int | None:
        # The base class counts the bytes of read calls. H5Loader copies rows from the page cache without read calls.
        return self._dataset.stats().bytes_read

    def hit_rate(self) -> float | None:
        """Return the fraction of rows that were read together with an earlier row of their chunk; None without rows."""
        stats = self._dataset.stats()
        rows = stats.rows - self._before.rows
        return (stats.chunk_hits - self._before.chunk_hits) / rows if rows else None

    def close(self) -> None:
        """Stop the loader, free the rows it holds, and close the file."""
        self._loader.close()
        super().close()


class LibraryReader(CaseReader):
    """A reader that uses h5py. It reads single rows or batches.

    In sequential order, a batch is read as one slice. In other orders, and if images are encoded, it is read row by
    row. Pillow decodes encoded images. `dataset` is used only for the order of a window shuffle.
    """

    def __init__(self, dataset: H5Dataset, case: BenchCase, variant: FileVariant, seed: int) -> None:
        file = open_file(variant.path)
        super().__init__(file.close, self._reads)
        self._case, self._num_rows = case, variant.rows
        self._sampler = _window_sampler(dataset, case, variant, seed)
        self._random, self._singles = np.random.default_rng(seed), _random_rows(variant, seed)
        self._batch: npt.NDArray[Any] | None = None
        self._images = require_dataset(file, variant.images)
        if case.engine == "tuned":
            self._images = reopen_tuned(self._images)
        self._encoded = is_encoded(self._images)

    def _reads(self) -> Epoch:
        order, size, rows = self._case.order, self._case.batch_size, np.arange(self._num_rows)
        if order == "single":
            yield from ((1, self.read_row(row)) for row in self._singles)
            return
        if order == "full":
            self._random.shuffle(rows)
        parts = range(size, len(rows), size)
        batches: Iterable[Any] = self._sampler if order == "window" else np.array_split(rows, parts)
        for batch in batches:
            yield from self.read_batch(batch)

    def read_row(self, row: int) -> npt.NDArray[Any]:
        """Return the pixels of one row."""
        found: npt.NDArray[Any] = self._images[row]
        if not self._encoded:
            return found
        with open_image(io.BytesIO(found.tobytes()), MAX_PIXELS) as opened:
            return np.asarray(opened.convert("RGB"))

    def read_batch(self, rows: Sequence[int]) -> Epoch:
        """Read a batch, as one slice or row by row; yield (number of rows, pixels) for each read."""
        if self._case.order == "sequential" and not self._encoded:
            yield len(rows), self._images[rows[0] : rows[-1] + 1]
            return
        for slot, row in enumerate(rows):
            pixels = self.read_row(int(row))
            if self._batch is None or len(self._batch) < len(rows) or self._batch.shape[1:] != pixels.shape:
                self._batch = np.empty((len(rows), *pixels.shape), pixels.dtype)
            self._batch[slot] = pixels
            yield 1, self._batch[slot]


class WorkerReader(CaseReader):
    """A reader of batches by a DataLoader with an H5Dataset, its `collate` and a `ChunkBatchSampler`."""

    max_epoch = math.inf  # Finish each epoch, because workers that are still busy would disturb the next measurement.
    counts_bytes = False

    def __init__(self, dataset: H5Dataset, case: BenchCase, variant: FileVariant, seed: int) -> None:
        super().__init__(dataset.close, self._batches)
        self._loader: DataLoader[Any] | None = DataLoader(
            dataset, batch_sampler=_window_sampler(dataset, case, variant, seed), num_workers=case.num_workers or 0,
            collate_fn=dataset.collate, persistent_workers=bool(case.num_workers),
        )  # fmt: skip

    def _batches(self) -> Epoch:
        assert self._loader is not None
        return ((len(batch.images), batch.images.numpy()) for batch in self._loader)

    def close(self) -> None:
        """Delete the DataLoader, so that its workers end, and close the file."""
        self._loader = None
        super().close()


def _first_rows(dataset: H5Dataset, variant: FileVariant) -> npt.NDArray[np.int64] | None:
    """Return the indices of the sample's rows in a larger file; None if the sample is the whole file."""
    return None if variant.rows == len(dataset) else np.arange(variant.rows)


def _random_rows(variant: FileVariant, seed: int) -> list[int]:
    rows: list[int] = np.random.default_rng(seed).permutation(variant.rows).tolist()
    return rows


def _window_sampler(dataset: H5Dataset, case: BenchCase, variant: FileVariant, seed: int) -> ChunkBatchSampler:
    indices = _first_rows(dataset, variant)
    return ChunkBatchSampler(dataset, case.batch_size, window=case.window, seed=seed, indices=indices)


@dataclass
class _CaseState:
    case: BenchCase
    reload: bool  # Whether to load the file into the page cache again before each repeat.
    allowance: float  # Seconds that all repeats may take together.
    end: float  # When the last repeat must end, as returned by the clock of `Sweep`.
    # Until this time, the first `MIN_REPEATS` repeats may exceed the allowance. None: they may not.
    late_end: float | None = None
    run_seconds: float = 0.0  # Duration of the latest repeat, without loading; at first an estimate.
    speeds: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)  # Number of the turn that measured each repeat.
    # Images/s of the ceiling, measured after each repeat. There are fewer values than `speeds` if a measurement failed.
    ceilings: list[float] = field(default_factory=list)
    spent: float = 0.0  # Seconds that the repeats have taken so far.
    load_seconds: float = 0.0  # Duration of the longest loading.
    bytes_per_row: list[float] = field(default_factory=list)
    hit_rate: float | None = None
    reason: str | None = None  # Why the case cannot be measured; None if it can.

    def reloads_next(self) -> bool:
        """Return whether to load the file into the page cache again before the next repeat.

        The allowance must be enough for `MIN_REPEATS` repeats with loading.
        """
        return self.reload and MIN_REPEATS * (self.run_seconds + self.load_seconds) <= self.allowance

    def next_seconds(self) -> float:
        return self.run_seconds + (self.load_seconds if self.reloads_next() else 0.0)

    def is_due(self, now: float) -> bool:
        """Return whether to measure another repeat. Return False if `reason` is set.

        The repeat must end before `end` and within the allowance, but the first repeat may exceed the allowance. With
        `late_end`, the first `MIN_REPEATS` repeats may exceed the allowance, and need only end before `late_end`.
        """
        few = self.late_end is not None and len(self.speeds) < MIN_REPEATS
        within = few or not self.speeds or self.spent + self.next_seconds() <= self.allowance
        end = self.late_end if few and self.late_end is not None else self.end
        return self.reason is None and within and now + self.next_seconds() < end


class Sweep:
    """Measures cases in turns, alternately forwards and backwards, so that drifts of speed affect all cases equally.

    A turn measures one repeat of every case that has time left. `on_progress` is called after each repeat.
    """

    def __init__(
        self,
        variants: Sequence[FileVariant],
        seed: int,
        on_progress: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
        num_images: int = 0,  # number of all images, of which the files may hold only a part
    ) -> None:
        self._variants = {variant.label: variant for variant in variants}
        self._seed = seed
        self._on_progress = on_progress
        self._clock = clock
        self._num_images = num_images
        self._shared = SharedDatasets(num_images)
        self._pages = {variant.label: PageState(self._shared.dataset(variant)) for variant in variants}
        self._pages_stay: set[str] = set()
        self._turn = 0  # The number of turns so far, of all calls of `measure`.

    def warm(self, seconds: float) -> None:
        """Load all variants into the page cache, but only as much of the input file as `seconds` allow."""
        for label, variant in self._variants.items():
            rows = max(1, min(variant.rows, _WARM_BYTES // variant.row_bytes))
            self._read_epoch(BenchCase(label, "window", "direct", "hot", rows, 16, 1), seconds / len(self._variants))
            if not variant.is_input:
                make_hot(Path(variant.path))
            self._on_progress()

    def first_epoch(self, case: BenchCase, end: float) -> tuple[float, ...]:
        """Return images/s of the first epochs of several new readers.

        Return an empty tuple if chunks are not decoded, or if later epochs decode them again.
        """
        speeds: list[float] = []
        while len(speeds) < MIN_REPEATS and self._clock() < end:
            with self._reader(case, SharedDatasets(self._num_images)) as reader:
                if not isinstance(reader, LoaderReader) or not reader.decodes_once:
                    return ()
                timing = reader.run(_MAX_LOAD_SECONDS, once=True)
            speeds.append(timing.rows / timing.seconds)
            self._on_progress()
        return tuple(speeds)

    def measure(
        self,
        cases: Sequence[BenchCase],
        seconds: float,
        found: list[Measurement],
        ceilings: Ceilings | None = None,
        *,
        end: float | None = None,
        reload_each_repeat: bool = False,
    ) -> float:
        """Measure cases for about `seconds`, and add one measurement per case to `found`, even if interrupted.

        If `found` already has a measurement of a case, the repeats are added to it. Return the estimated seconds of one
        turn.

        Each case gets a share of the time in proportion to its `min_seconds`, so slow cases get fewer repeats, maybe
        none. If `end` is given, each case gets `MIN_REPEATS` repeats even if that takes longer than `seconds`, but no
        repeat that would end after `end`. With `ceilings`, the ceiling is measured after each repeat of an H5Loader.

        If `reload_each_repeat` is true, the file is loaded into the page cache again before each repeat, provided that
        time remains for enough repeats. The reason: speeds differ by up to a fifth depending on where in memory the
        cached pages are, and this changes only when the file is loaded again.
        """
        shares = sum(min_seconds(case) for case in cases)
        soft_end = self._clock() + seconds
        states = []
        for case in cases:
            allowance, first = seconds * min_seconds(case) / shares, _WORKER_SECONDS if case.num_workers else 0.0
            states.append(_CaseState(case, reload_each_repeat, allowance, soft_end, end, first))
        try:
            while self._take_turn(states, ceilings, backwards=self._turn % 2 == 1):
                self._turn += 1
        finally:
            merged = {one.case: one for one in found}
            for one in map(self._result, states):
                merged[one.case] = merged[one.case].with_repeats_of(one) if one.case in merged else one
            found[:] = merged.values()
        taken = [state.run_seconds + state.load_seconds for state in states if state.spent]
        return len(states) * statistics.mean(taken) if taken else 0.0

    def _take_turn(self, states: list[_CaseState], ceilings: Ceilings | None, *, backwards: bool) -> bool:
        """Measure one repeat of each case that is due. Return whether any case was due."""
        measured = False
        for state in reversed(states) if backwards else states:
            begin = self._clock()
            if not state.is_due(begin):
                continue
            measured = True
            if state.reloads_next():
                self._load(state.case)
            loaded = self._clock()
            most = _MAX_RUN_SECONDS[state.case.cache]
            seconds = min(most, max(_MIN_RUN_SECONDS, state.allowance / (2 * REPEATS)))
            self._run(state, seconds, ceilings)
            now = self._clock()
            state.load_seconds, state.run_seconds = max(state.load_seconds, loaded - begin), now - loaded
            state.spent += now - begin
            self._on_progress()
        return measured

    def _run(self, state: _CaseState, seconds: float, ceilings: Ceilings | None) -> None:
        """Measure one repeat of a case, or record the reason why it cannot be measured."""
        variant = self._variants[state.case.variant]
        cold = state.case.cache == "cold"
        if cold and variant.label in self._pages_stay:
            state.reason = _PAGES_STAY
            return
        try:
            with self._reader(state.case, self._shared) as reader:
                if cold:
                    # Measure cold reads with a new reader, because an old one may hold rows of the file in memory.
                    if self._pages[variant.label].drop() is not None:
                        self._pages_stay.add(variant.label)
                        state.reason = _PAGES_STAY
                        return
                else:
                    if not variant.is_input:
                        make_hot(Path(variant.path))
                    # Run the reader once before measuring, because the first write to new memory is slow. If decoded
                    # chunks are kept in memory for later epochs, read a whole epoch.
                    keeps = isinstance(reader, LoaderReader) and reader.decodes_once
                    reader.run(_MAX_LOAD_SECONDS if keeps else seconds / 2, once=keeps)
                timing = reader.run(seconds, once=cold)
                state.speeds.append(timing.rows / timing.seconds)
                state.turns.append(self._turn)
                if timing.bytes_per_row is not None:
                    state.bytes_per_row.append(timing.bytes_per_row)
                if isinstance(reader, LoaderReader):
                    state.hit_rate = reader.hit_rate()
            # Measure the ceiling when the file is closed, because mapped pages cannot be dropped.
            if isinstance(reader, LoaderReader) and ceilings is not None:
                speed = ceilings.measure(state.case)
                state.ceilings += [] if speed is None else [speed]
        except (H5PackError, OSError, MemoryError, RuntimeError) as error:
            # The death of a DataLoader worker, for example for lack of shared memory, raises a RuntimeError.
            state.reason = str(error) or type(error).__name__

    def _load(self, case: BenchCase) -> None:
        """Drop a hot case's file from the page cache, and load it again as training does.

        Training reads an epoch in the case's order. Do nothing for a cold case.
        """
        if case.cache == "hot" and self._pages[case.variant].drop() is None:
            self._read_epoch(replace(case, num_workers=None), _MAX_LOAD_SECONDS)

    def _read_epoch(self, case: BenchCase, seconds: float) -> None:
        """Read at most one epoch to fill the page cache. Errors are ignored; the measurement will report them."""
        with contextlib.suppress(H5PackError, OSError), self._reader(case, self._shared) as reader:
            reader.run(seconds, once=True)

    def _reader(self, case: BenchCase, shared: SharedDatasets) -> contextlib.closing[CaseReader]:
        return contextlib.closing(open_reader(case, self._variants[case.variant], self._seed, shared))

    def _result(self, state: _CaseState) -> Measurement:
        row_bytes = self._variants[state.case.variant].row_bytes
        amplification = statistics.mean(state.bytes_per_row) / row_bytes if state.bytes_per_row else None
        reason = state.reason or (None if state.speeds else NO_TIME)
        ceilings, turns = tuple(state.ceilings), tuple(state.turns)
        return Measurement(state.case, tuple(state.speeds), amplification, state.hit_rate, reason, ceilings, turns)
