"""Prefetching by a thread: how far, and that nothing of it stays."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import h5pack
from h5pack.errors import LoaderError
from tests.crashing import wait_for
from tests.data.packs import loader_threads, threads_end
from tests.device.feeds import FEEDS, Gated, Numbers, PrefetchingFeed, h5_loader
from tests.read.files import in_child


@pytest.mark.parametrize("prefetch_factor", [1, 2, 3])
def test_prefetch_factor_batches_are_copied_ahead(prefetch_factor: int) -> None:
    loader = Numbers(20)
    feed = PrefetchingFeed(loader, prefetch_factor=prefetch_factor)
    for taken, batch in enumerate(feed, 1):
        assert batch[0, 0] == taken - 1
        expected = min(20, taken + prefetch_factor)
        wait_for(lambda expected=expected: feed.copier.copied == expected)
        assert feed.copier.copied == loader.given


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


def test_closing_an_iterator_waits_until_the_loader_is_no_longer_read() -> None:
    loader = Gated(released=1)
    iterator: Any = iter(PrefetchingFeed(loader))
    next(iterator)
    wait_for(lambda: loader.begun == 2)
    waiting = threading.Timer(0.05, loader.tokens.release)
    waiting.start()
    iterator.close()
    assert loader.left.is_set()
    waiting.join()


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
        for ended in thread._ended:
            ended.wait()
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
