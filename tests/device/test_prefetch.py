"""Prefetching by a thread: how far, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import h5pack
from h5pack.device.batch import ImageTransform
from h5pack.device.prefetch import CudaCopier
from h5pack.errors import LoaderError
from tests.crashing import wait_for
from tests.data.packs import loader_threads, threads_end
from tests.device.feeds import FEEDS, Gated, Numbers, PrefetchingFeed, h5_loader
from tests.read.files import in_child


@pytest.mark.parametrize("prefetch_factor", [1, 2, 3])
def test_at_most_prefetch_factor_batches_are_launched_ahead(prefetch_factor: int) -> None:
    loader = Numbers(20)
    feed = PrefetchingFeed(loader, prefetch_factor=prefetch_factor)
    for taken, batch in enumerate(feed, 1):
        assert batch[0, 0] == taken - 1
        wait_for(lambda: loader.given == min(20, feed.copier.launched + prefetch_factor))
        assert feed.copier.launched <= taken + prefetch_factor
    # Where the loader keeps up, it is as many.
    assert max(feed.copier.ahead) == prefetch_factor


def test_batches_are_delivered_while_the_loader_waits() -> None:
    loader = Gated(released=3)
    iterator = iter(PrefetchingFeed(loader, prefetch_factor=3))
    # Three batches are ready and the fourth is not: they are delivered.
    assert [int(next(iterator)[0]) for _ in range(3)] == [0, 1, 2]
    waiting = threading.Timer(0.05, loader.tokens.release)
    waiting.start()
    assert int(next(iterator)[0]) == 3
    waiting.join()
    # The thread is inside the loader now; dropping the iterator ends it after that batch.
    del iterator
    gc.collect()
    loader.tokens.release(2)
    assert loader.left.wait(60)
    assert threads_end()


@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_abandoned_iterations_leave_no_thread_and_no_batch(dataset: h5pack.H5Dataset, prefetch_factor: int) -> None:
    loader = h5_loader(dataset)
    feed = PrefetchingFeed(loader, prefetch_factor=prefetch_factor)
    dying: list[Any] = []
    for taken in range(1, 9):
        for batch in itertools.islice(feed, taken):
            dying.append(weakref.ref(batch[0]))
        del batch
    feed.close()
    assert threads_end(), loader_threads()
    gc.collect()
    assert not any(batch() is not None for batch in dying)
    iterator = iter(feed)
    next(iterator)
    iterator.close()
    with pytest.raises(LoaderError):
        next(iterator)
    assert len(list(feed)) == 9


@pytest.mark.parametrize("late", [False, True], ids=["soon", "late"])
@pytest.mark.parametrize("fails", [False, True], ids=["end", "error"])
def test_an_end_that_is_not_received_makes_no_reference_cycle(fails: bool, late: bool) -> None:
    """A DataLoader in a reference cycle dies slowly: it waits 5 seconds for each worker."""
    requested = threading.Event()

    class Three:
        def __iter__(self) -> Iterator[Any]:
            yield from torch.zeros(3, 1)
            if late:
                # The end comes after the last request.
                requested.wait(60)
            if fails:
                raise ValueError("broken")

    loader = Three()
    dying = weakref.ref(loader)
    feed = PrefetchingFeed(loader, prefetch_factor=3)
    gc.disable()
    try:
        iterator = iter(feed)
        thread = next(iter(feed._threads))
        next(iterator)
        requested.set()
        thread.join(60)
        del loader, feed, iterator, thread
        assert dying() is None
    finally:
        gc.enable()


def test_a_generator_stays_open() -> None:
    def numbers() -> Iterator[Any]:
        for number in range(20):
            yield torch.tensor(number)

    for feed_of in FEEDS.values():
        given = numbers()
        feed = feed_of(given)
        list(itertools.islice(feed, 4))
        feed.close()
        # Prefetching consumed some batches, and nothing closed it.
        assert next(given) >= 4


def test_an_iterator_raises_in_a_forked_child() -> None:
    feed = PrefetchingFeed(Numbers())
    iterator = iter(feed)
    next(iterator)
    wait_for(lambda: feed.loader.given >= 3)

    def child() -> bool:
        with pytest.raises(LoaderError):
            list(iterator)
        return True

    assert in_child(child)
    assert len(list(iterator)) == 4


class RecordedStream:
    """Records the calls of a stream."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: RecordedStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: RecordedEvent) -> None:
        self.log.append(f"{self.name} waits for event {event.number}")


class RecordedEvent:
    """Records the stream that it is recorded on."""

    def __init__(self, log: list[str], numbers: Iterator[int]) -> None:
        self.log, self.number = log, next(numbers)

    def record(self, stream: RecordedStream) -> None:
        self.log.append(f"event {self.number} on {stream.name}")


def test_the_order_of_copies_and_waits_on_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the device "meta", which keeps no data, and streams that record calls."""
    log: list[str] = []
    numbers = itertools.count()
    current = RecordedStream(log, "step")
    device = torch.device("meta")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: RecordedStream(log, "side"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: RecordedEvent(log, numbers))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: log.append("the thread's device is set"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(log.append(f"on {stream.name}:")))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(f"used by {stream.name}"))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.dtype == torch.uint8)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: log.append("pinned") or tensor)

    def transform(images: torch.Tensor) -> torch.Tensor:
        log.append(f"transform {tuple(images.shape)} on {images.device}")
        return images.float()

    copier = CudaCopier(device, ImageTransform(transform, None))
    copier.begin()
    copier.enter()
    batch = copier.receive(copier.launch(copier.prepare([torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2)]), 0))
    assert [part.device.type for part in batch] == ["meta", "meta"]
    assert "; ".join(log) == (
        "side waits for step; the thread's device is set; pinned; on side:; transform (2, 3) on meta; event 0 on side; "
        "step waits for event 0; used by step; used by step"
    )
    # A batch that the loader made on the device: its stream comes first, and records the use on ours.
    log.clear()
    copier.receive(copier.launch(copier.prepare(torch.zeros(4, device=device)), 0))
    assert "; ".join(log) == (
        "event 1 on step; on side:; side waits for event 1; used by side; transform (4,) on meta; event 2 on side; "
        "step waits for event 2; used by step"
    )
