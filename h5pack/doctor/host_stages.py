"""Measurement of the stages on the host: only reading chunks, and running the loaders as a training run would."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from h5pack.benchmark.ceilings import touch
from h5pack.data.dataset import H5Dataset
from h5pack.data.loader import H5Loader
from h5pack.data.samplers import ChunkBatchSampler
from h5pack.device.batch import batch_size_and_bytes, tensors_of
from h5pack.doctor.measure import Repeat
from h5pack.monitor.probes import CpuTime

_MAX_BLOCK_BYTES = 16 * 1024 * 1024
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class ChunkReader:
    """A reader of a dataset's images. Each thread has its own buffer of `block_rows` rows, at most a chunk group.

    `busy_fraction` is the fraction (0 to 1) of the last `run` in which the threads did not wait for storage, but ran or
    waited for a CPU. It is None before the first `run`.
    """

    def __init__(self, dataset: H5Dataset) -> None:
        self._dataset = dataset
        self._index = index = dataset.engine.indexes[dataset.names[0]]
        # An encoded chunk has to be decoded completely even for a few of its rows, so it is never split.
        whole = index.codec is not None
        max_rows = index.group_rows if whole else max(1, _MAX_BLOCK_BYTES // max(1, index.row_bytes))
        self.block_rows = max(1, min(index.group_rows, max_rows))
        self.busy_fraction: float | None = None

    def warm(self, seconds: float, min_rows: int) -> int:
        """Read rows in order, for `seconds` and until at least `min_rows` are read; return the number of rows read."""
        deadline = time.perf_counter() + seconds
        rows, out = len(self._dataset), self._buffer()
        for first, last in self._blocks(0, rows):
            self._read(first, last, out)
            if time.perf_counter() >= deadline and last >= min_rows:
                return last
        return rows

    def run(self, seconds: float, num_threads: int, rows: int, begin: float = 0.0) -> Repeat:
        """Measure reading the first `rows` rows in stored order for `seconds`.

        Start at the fraction `begin` (0 to 1) of these rows, and continue with the first row after the last one.
        """
        blocks = list(self._blocks(0, rows))
        deadline = time.perf_counter() + seconds

        def work(thread: int) -> tuple[int, float, float]:
            out, read, number = self._buffer(), 0, int(begin * len(blocks)) + thread
            ran, wall = _ready_seconds(), time.perf_counter()
            while True:
                first, last = blocks[number % len(blocks)]
                self._read(first, last, out)
                read, number = read + last - first, number + num_threads
                if time.perf_counter() >= deadline:
                    return read, _ready_seconds() - ran, time.perf_counter() - wall

        cpu, begun = CpuTime.now(), time.perf_counter()
        with ThreadPoolExecutor(num_threads) as pool:
            done = list(pool.map(work, range(num_threads)))
        images, ran, wall = map(sum, zip(*done, strict=True))
        self.busy_fraction = min(1.0, ran / max(1e-9, wall))
        return Repeat(
            int(images), time.perf_counter() - begun, CpuTime.now().since(cpu).total, total_images=int(images)
        )

    def _buffer(self) -> npt.NDArray[Any]:
        return np.empty((self.block_rows, *self._index.row_shape), self._index.native_dtype)

    def _read(self, first: int, last: int, out: npt.NDArray[Any]) -> None:
        rows = np.arange(first, last) + self._dataset.first_row
        self._dataset.engine.read(self._dataset.names[0], rows, out[: last - first])

    def _blocks(self, first: int, rows: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of the split's rows, from `first` to `last` - 1, each of at most one chunk group."""
        base, unit = self._dataset.first_row, self._index.group_rows
        while first < rows:
            edge = ((base + first) // unit + 1) * unit - base
            last = min(rows, edge, first + self.block_rows)
            yield first, last
            first = last


def busy_fraction(call: Callable[[], Any], seconds: float) -> float:
    """Call `call` for `seconds`; return the fraction (0 to 1) of them in which this thread ran or waited for a CPU."""
    ran, begun = _ready_seconds(), time.perf_counter()
    while True:
        call()
        wall = time.perf_counter() - begun
        if wall >= seconds:
            return min(1.0, (_ready_seconds() - ran) / max(wall, 1e-9))


def _ready_seconds() -> float:
    """Return this thread's CPU time in seconds, plus the time it waited for a CPU if the kernel reports that.

    The wait for a CPU is included, so that a busy machine does not look like a slow disk.
    """
    try:
        ran, queued, _ = _SCHEDSTAT.read_text().split()
        return (int(ran) + int(queued)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()


@dataclass
class HostLoaders:
    """A factory of the loaders to measure: `H5Loader`s, or DataLoaders if `num_workers` is not None.

    `dataset` must not have a transform of its own. An `H5Loader` calls `transform` with whole batches, and a DataLoader
    calls it with single images. `parallel` is the number of threads of an `H5Loader`, or of workers of a DataLoader.
    """

    dataset: H5Dataset
    _: KW_ONLY
    batch_size: int
    window: int
    num_threads: int | None
    num_workers: int | None
    transform: Callable[..., Any] | None
    pin_memory: bool
    _made: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        dataset = self.transformed_dataset = self.dataset
        if self.transform is not None and self.num_workers is not None:
            self.transformed_dataset = H5Dataset(
                dataset.path,
                dataset.split,
                transform=self.transform,
                images=dataset.names[0],
                labels=dataset.label_name,
            )
        self.parallel: int = self.make().num_threads if self.num_workers is None else self.num_workers

    def make(self, rows: int | None = None, *, transform: bool = False) -> Any:
        """Make a loader of the first `rows` rows (None: all rows), with the transform if `transform` is true."""
        options: dict[str, Any] = {"window": self.window, "rank": 0, "num_replicas": 1}
        options["indices"] = None if rows is None or rows >= len(self.dataset) else range(rows)
        if self.num_workers is None:
            loader: Any = H5Loader(
                self.dataset,
                self.batch_size,
                num_threads=self.num_threads,
                # Rows kept in memory would not be read from the file, so reading would not be measured.
                resident="no",
                pin_memory=self.pin_memory,
                transform=self.transform if transform else None,
                **options,
            )
        else:
            dataset = self.transformed_dataset if transform else self.dataset
            loader = DataLoader(
                dataset,
                batch_sampler=ChunkBatchSampler(dataset, self.batch_size, **options),
                num_workers=self.num_workers,
                # Starting workers takes seconds, which must not count in every measured epoch.
                persistent_workers=self.num_workers > 0,
                collate_fn=dataset.collate,
                pin_memory=self.pin_memory,
            )
        self._made.append(loader)
        return loader

    def prefetch_of(self, loader: Any) -> tuple[int, Callable[[], int]]:
        """Return how many batches a loader prefetches, and a function that counts its ready images (DataLoader: 0)."""
        if self.num_workers is not None:
            return int((loader.prefetch_factor or 0) * loader.num_workers), lambda: 0
        return 2 * loader.plan.max_group_batches + 2, lambda: loader.queue_depth * loader.plan.batch_rows(0)

    def stop(self, loader: Any) -> None:
        """Stop a loader's threads or workers."""
        self._made.remove(loader)
        if self.num_workers is None:
            loader.close()
        elif getattr(loader, "_iterator", None) is not None:
            # Private API: DataLoader._iterator._shutdown_workers. Torch has no public way to end persistent workers.
            with contextlib.suppress(AttributeError):
                loader._iterator._shutdown_workers()
            loader._iterator = None

    def close(self) -> None:
        """Stop all loaders, and close the dataset that this object opened for the transform."""
        for loader in list(self._made):
            self.stop(loader)
        if self.transformed_dataset is not self.dataset:
            self.transformed_dataset.close()


def touch_batch(batch: Any) -> int:
    """Read every page of a batch in host memory, as a copy to a device would; return the number of images."""
    for tensor in tensors_of(batch):
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
            touch(tensor.view(-1).view(torch.uint8).numpy())
    return batch_size_and_bytes(batch)[0] or 0
