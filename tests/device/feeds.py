"""Loaders, and feeds that prefetch on the CPU as `DeviceFeed` does on CUDA, for the tests of this folder."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

import h5pack
from h5pack.data.draws import BatchKey
from h5pack.device import feed
from h5pack.device.copier import DeviceCopier, QueuedBatch
from h5pack.device.feed import DeviceFeed
from h5pack.device.loader_wrapper import FetchedBatch
from tests.crashing import wait_for

BATCH = 12


def needs_gpu(test: Any) -> Any:
    """Mark a test that runs on a GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")(test))


class HostOperations:
    """Does on the CPU at once what `CudaOperations` queues on a device, and counts it."""

    # Not equal to the device of tensors in host memory, which has no index.
    device = torch.device("cpu", 0)

    def __init__(self) -> None:
        self.copy_stream = self.transform_stream = self

    def enter(self) -> None:
        assert threading.current_thread().name == "h5pack-feed"

    def current_stream(self, *_: Any) -> HostOperations:
        return self

    event = current_stream

    def synchronize(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = synchronize

    def on(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        assert threading.current_thread().name == "h5pack-feed"
        return tensor.clone()

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        raise AssertionError("the tensor is on no device")


class CountingCopier(DeviceCopier):
    """Counts batches."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.copied = 0

    def copy(self, fetched: FetchedBatch) -> QueuedBatch:
        self.copied += 1
        return super().copy(fetched)

    def transform(self, queued: QueuedBatch) -> QueuedBatch:
        assert threading.current_thread() is threading.main_thread()
        return super().transform(queued)


class PrefetchingFeed(DeviceFeed):
    """A feed that prefetches on the CPU."""

    def _operations(self) -> Any:
        return HostOperations()

    def _begin_copying(self) -> Any:
        with patch.object(feed, "DeviceCopier", CountingCopier):
            self.copier: Any = super()._begin_copying()
        return self.copier


def prefetching_feed(loader: Any, **options: Any) -> PrefetchingFeed:
    return PrefetchingFeed(loader, prefetch_factor=3, **options)


FEEDS: dict[str, Callable[..., DeviceFeed]] = {"direct": DeviceFeed, "prefetch": prefetching_feed}
every_feed = pytest.mark.parametrize("feed_of", FEEDS.values(), ids=FEEDS)


def h5_loader(dataset: Any) -> Any:
    return h5pack.H5Loader(dataset, BATCH, window=3, seed=7, num_threads=1)


def data_loader(dataset: Any, workers: int = 0, **settings: Any) -> Any:
    sampler = h5pack.ChunkBatchSampler(dataset, BATCH, window=3, seed=7)
    return DataLoader(dataset, batch_sampler=sampler, num_workers=workers, **settings)


def row_loader(dataset: Any) -> Any:
    return DataLoader(dataset, BATCH, sampler=h5pack.ChunkSampler(dataset, window=3, seed=7))


def stateful_loader(dataset: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="scripts/install dev")
    sampler = h5pack.ChunkBatchSampler(dataset, BATCH, window=3, seed=7)
    return module.StatefulDataLoader(dataset, batch_sampler=sampler)


def batched_row_loader(dataset: Any) -> Any:
    rows = h5pack.ChunkSampler(dataset, window=3, seed=7)
    return DataLoader(dataset, batch_sampler=BatchSampler(rows, BATCH, drop_last=False))


LOADERS = {
    "H5Loader": h5_loader,
    "DataLoader": data_loader,
    "rows": row_loader,
    "batched rows": batched_row_loader,
    "stateful": stateful_loader,
}


class Numbers:
    """A loader that has no length, dataset, epoch or state."""

    def __init__(self, count: int = 5) -> None:
        self.count = count
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            self.given += 1
            yield torch.full((2, 3), number)


class Breaking:
    """A loader that fails at one batch."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error = at, error

    def __iter__(self) -> Iterator[Any]:
        for number in range(9):
            if number == self.at:
                raise self.error
            yield torch.tensor([number])


class Gated:
    """A loader whose next batch comes when a test releases it."""

    def __init__(self, batches: int = 20, released: int = 0) -> None:
        self.batches, self.tokens = batches, threading.Semaphore(released)
        self.begun, self.threads, self.inside = 0, set[str](), 0
        self.left = threading.Event()

    def __iter__(self) -> Iterator[torch.Tensor]:
        try:
            for number in range(self.batches):
                assert self.inside == 0
                self.inside += 1
                self.begun += 1
                self.threads.add(threading.current_thread().name)
                self.tokens.acquire()
                self.inside -= 1
                yield torch.full((4,), number)
        finally:
            self.left.set()

    def release(self, iterator: Any) -> None:
        """Release one batch, and wait until the iterator's thread has it."""
        self.tokens.release()
        wait_for(lambda: iterator.thread._batches.qsize() > 0)


class Keyed:
    """A transform that records its keys."""

    keyed = True

    def __init__(self) -> None:
        self.keys: list[BatchKey] = []

    def __call__(self, images: torch.Tensor, key: BatchKey) -> torch.Tensor:
        self.keys.append(key)
        return images.float() + 1000 * key.rows.reshape(-1, *[1] * (images.ndim - 1)) + key.epoch


def rest_of(feed: DeviceFeed) -> list[Any]:
    """The rows of the rest of an epoch, batch by batch."""
    return [batch[-1].tolist() for batch in feed]
