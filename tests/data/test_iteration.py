"""The threads of iterators: usable after an interrupt at any moment, and never left behind."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import h5pack
from h5pack.data.iteration import (
    BackgroundThreads,
    BatchIterator,
    Ended,
    IdleThreads,
    ReusableThread,
    _stop_all,
    serial_torch,
)
from h5pack.data.pipeline import Pipeline
from h5pack.errors import LoaderError
from tests.data import packs
from tests.data.packs import PATIENCE, in_time
from tests.read.files import in_child

pytestmark = pytest.mark.usefixtures("no_thread_stays")


def test_an_interrupt_of_waiting_leaves_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes when a Condition has just been locked, as in the wait of a threading.Event."""
    enter, thread = threading.Condition.__enter__, threading.current_thread()

    def interrupted(self: threading.Condition) -> bool:
        locked = enter(self)
        if threading.current_thread() is thread:
            raise KeyboardInterrupt
        return locked

    ended = Ended()
    timer = threading.Timer(0.2, ended.set)
    timer.start()
    with monkeypatch.context() as context:
        context.setattr(threading.Condition, "__enter__", interrupted)
        ended.wait()
    timer.join()
    for _ in range(2):
        in_time(ended.wait)
    in_time(ended.set)


@pytest.mark.parametrize("method", ["_take", "return_credit"])
def test_a_signal_handler_may_close_the_iterator_inside_next(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a handler does that runs in the consumer's thread, which holds the lock of the pipeline."""
    dataset = h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5", rows=4_000))
    loader = h5pack.H5Loader(dataset, 4, num_threads=2, window=1, prefetch_factor=1)
    iterator, original, consumer = iter(loader), getattr(Pipeline, method), []

    def closing(self: Pipeline, *arguments: Any, **options: Any) -> Any:
        found = original(self, *arguments, **options)
        if consumer == [threading.get_ident()]:
            consumer.clear()
            with self._lock if method == "return_credit" else threading.Lock():
                iterator.close()
        return found

    def consume() -> None:
        consumer.append(threading.get_ident())
        with pytest.raises(LoaderError):
            list(iterator)

    monkeypatch.setattr(Pipeline, method, closing)
    in_time(consume)
    assert consumer == [], "it was not closed"
    in_time(lambda: list(loader))
    loader.close()


class Slow(BatchIterator):
    """Ten batches. `entered` and `leave` say that a thread is in `_next_batch`, and may leave it."""

    def __init__(self) -> None:
        super().__init__()
        self.left = list(range(10))
        self.entered, self.leave = threading.Semaphore(0), threading.Semaphore(0)

    def _next_batch(self) -> int:
        if not self.left:
            raise StopIteration
        found = self.left[0]
        self.entered.release()
        assert self.leave.acquire(timeout=PATIENCE)
        self.left.remove(found)
        return found


def test_threads_that_share_an_iterator_get_each_batch_once_and_its_end(tmp_path: Path) -> None:
    slow = Slow()
    loader = h5pack.H5Loader(h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5", rows=40)), 4, num_threads=2)
    for iterator, batches in ((slow, 10), (iter(loader), 10)):
        found: list[list[Any]] = [[] for _ in range(4)]
        threads = [threading.Thread(target=lambda own: own.extend(iterator), args=(own,)) for own in found]  # noqa: B023
        for thread in threads:
            thread.start()
        for _ in range(batches if iterator is slow else 0):
            assert slow.entered.acquire(timeout=PATIENCE)
            slow.leave.release()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert sum(map(len, found)) == batches
    loader.close()


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    iterator = Slow()
    thread = threading.Thread(target=next, args=(iterator,))
    thread.start()
    assert iterator.entered.acquire(timeout=PATIENCE)

    def take() -> bool:
        iterator.entered, iterator.leave = threading.Semaphore(0), threading.Semaphore(1)
        return next(iterator) == 0

    taken = in_child(take)
    iterator.leave.release()
    thread.join(PATIENCE)
    assert taken


def test_if_a_thread_cannot_start_the_others_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, taken = ReusableThread.start, []

    def failing(self: ReusableThread) -> None:
        if len(taken) == 2:
            raise RuntimeError("can't start new thread")
        start(self)
        taken.append(self)

    loader = h5pack.H5Loader(h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5")), 4, num_threads=3)
    with monkeypatch.context() as context:
        context.setattr(ReusableThread, "start", failing)
        with pytest.raises(LoaderError):
            iter(loader)
    loader.close()
    for thread in taken:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize("wrapper", [lambda loader: loader, h5pack.EchoLoader], ids=["alone", "in an EchoLoader"])
def test_an_iteration_whose_threads_cannot_start_takes_no_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapper: Any
) -> None:
    own = h5pack.H5Loader(h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5")), 4)
    loader = wrapper(own)
    iterator = iter(loader)
    states = [loader.state_dict()]
    for _ in range(3):
        next(iterator)
    states.append(loader.state_dict())
    iterator.close()
    for state, left in zip(states, (len(loader), len(loader) - 3), strict=True):
        loader.load_state_dict(state)
        own.close()  # Otherwise, threads of the previous iteration would be used again.
        with monkeypatch.context() as context:
            context.setattr(ReusableThread, "start", Mock(side_effect=RuntimeError))
            with pytest.raises(LoaderError):
                iter(loader)
        assert loader.state_dict() == state
        assert len(list(loader)) == left
        assert loader.epoch == 0


def test_threads_that_cannot_start_after_an_interrupt_are_a_loader_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = h5pack.H5Loader(h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5")), 4)
    monkeypatch.setattr(ReusableThread, "start", Mock(side_effect=RuntimeError))
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(LoaderError):
            iter(loader)


def test_all_threads_end_at_exit_while_another_thread_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = IdleThreads()
    with monkeypatch.context() as context:
        context.setattr(ReusableThread, "start", Mock())
        starting = ReusableThread(idle)
    running = ReusableThread(idle)
    monkeypatch.setattr(threading, "enumerate", lambda: [starting, running])
    _stop_all()
    assert not running.is_alive()
    starting.start()
    starting.join(PATIENCE)
    assert not starting.is_alive()


def test_threads_stop_before_an_interrupt_can_keep_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = h5pack.H5Loader(h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5")), 4, num_threads=2)
    iterator = iter(loader)
    next(iterator)
    with monkeypatch.context() as context:
        context.setattr(BackgroundThreads, "join", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            iterator.close()  # type: ignore[attr-defined]
    loader.close()


def test_an_interrupt_while_a_thread_starts_stays_an_interrupt_and_ends_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`threading.Condition` fails to release a lock if the interrupt came before it had the lock again."""
    start, taken = ReusableThread.start, []

    def interrupted(self: ReusableThread) -> None:
        start(self)
        taken.append(self)
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()

    loader = h5pack.H5Loader(h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5")), 4, num_threads=2)
    with monkeypatch.context() as context:
        context.setattr(ReusableThread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
    (thread,) = taken
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert len(list(loader)) == len(loader)
    assert loader.epoch == 0


@pytest.mark.parametrize(
    "wrapper", [lambda loader: loader, partial(h5pack.EchoLoader, factor="auto")], ids=["alone", "echo"]
)
def test_threads_end_if_an_interrupt_comes_when_they_have_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapper: Any
) -> None:
    start = BackgroundThreads.start

    def interrupted(self: BackgroundThreads, *arguments: Any, **targets: Any) -> None:
        start(self, *arguments, **targets)
        raise KeyboardInterrupt

    dataset = h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5", rows=4_000))
    loader = wrapper(h5pack.H5Loader(dataset, 4, num_threads=2, window=1, prefetch_factor=1))
    with monkeypatch.context() as context:
        context.setattr(BackgroundThreads, "start", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            iter(loader)
    assert packs.threads_end(), packs.loader_threads()


def test_an_interrupt_does_not_keep_torch_serial() -> None:
    def check() -> None:
        with serial_torch:
            pass
        before = serial_torch._get()
        serial_torch.__enter__()  # An interrupt at the start of `__exit__` leaves this state.
        with serial_torch:
            assert serial_torch._get() == 1
        assert serial_torch._get() == before

    torch.get_num_threads()
    in_time(check)
