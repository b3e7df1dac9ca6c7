"""Base classes of the iterators of `H5Loader`, `DeviceFeed`, `EchoLoader` and `FeedMonitor`, and of their threads."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from h5pack.errors import LoaderError
from h5pack.system.libc import libc_function

C = TypeVar("C", bound="Closeable")

IDLE = "h5pack-idle"
"""Name of a thread that waits for the next epoch."""


class Closeable:
    """Base class of objects with a `close` method that the end of a ``with`` block calls."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the resources of this object."""
        raise NotImplementedError


class BatchIterator(Closeable, Iterator[Any]):
    """Base class of iterators over batches. The end of a ``with`` block closes the iterator.

    If several threads share an iterator, each batch goes to one of them, and all get StopIteration at the end. After an
    error or `close()`, ``next`` raises `LoaderError`; after the last batch, StopIteration.

    A subclass implements `_next_batch` and `_release`, and may extend `_finish`. `loader` is the loader's name in
    messages such as ``"begin a new one with iter(loader)"``.
    """

    def __init__(self, loader: str = "loader") -> None:
        self._loader_name = loader
        self._broken = ""
        self._ended = False
        # Reentrant, because a signal handler may call ``next`` inside ``next``. `close` does not take this lock.
        self._lock, self._process = threading.RLock(), os.getpid()

    def __next__(self) -> Any:
        if self._process != os.getpid():
            # If another thread of the parent held the lock during the fork, no thread of this child will release it.
            self._lock, self._process = threading.RLock(), os.getpid()
        with self._lock:
            if self._broken:
                problem = f"this iterator {self._broken} before the end of its epoch"
                raise LoaderError(f"{problem}; begin a new one with iter({self._loader_name})")
            if self._ended:
                raise StopIteration
            try:
                return self._next_batch()
            except StopIteration:
                self._ended = True
                self._release()
                self._finish()
                raise
            except BaseException:
                # After an error, such as a KeyboardInterrupt, this iterator may be in an inconsistent state.
                self._broken = "failed"
                self._release()
                raise

    def close(self) -> None:
        """Stop reading, and wait until the threads of this iteration have stopped."""
        if not self._ended:
            self._broken = self._broken or "was closed"
        self._release()

    def _next_batch(self) -> Any:
        """Return the next batch; raise StopIteration at the end of the epoch."""
        raise NotImplementedError

    def _release(self) -> None:
        """Stop threads and free memory. The base class may call this several times; the default does nothing."""

    def _finish(self) -> None:
        """Move the state to the start of the next epoch. Called after the last batch; the default does nothing."""


class Ended:
    """Whether a function has ended. Unlike `threading.Event`, it stays usable if a signal handler interrupts `wait`."""

    def __init__(self) -> None:
        self._is_set, self._queue = False, queue.SimpleQueue[None]()

    def set(self) -> None:
        """Record that the function has ended."""
        self._is_set = True
        self._queue.put(None)

    def wait(self) -> None:
        """Wait until the function has ended."""
        if not self._is_set:
            self._queue.get()
            self._queue.put(None)  # for other waiting threads


class ReusableThread(threading.Thread):
    """A daemon thread that runs one function after another. In between, it waits in `idle` for the next one."""

    def __init__(self, idle: IdleThreads) -> None:
        super().__init__(name=IDLE, daemon=True)
        self._idle = idle
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], Ended] | None] = queue.SimpleQueue()
        try:
            self.start()
        except BaseException:
            # An interrupt may come after the thread has started, which then nothing else would end.
            self.end()
            raise

    def begin(self, name: str, target: Callable[[], object]) -> Ended:
        """Start to run `target`, and give the thread the name `name`. Return an `Ended` that is set after `target`."""
        self.name, ended = name, Ended()
        self._calls.put((target, ended))
        return ended

    def end(self) -> None:
        """End the thread, after the function that it runs. The garbage collector may call this, so it takes no lock."""
        self._calls.put(None)

    def run(self) -> None:
        """Run functions until `end` is called."""
        while (call := self._calls.get()) is not None:
            target, ended = call
            try:
                target()
                # The function references the batches. Drop it before the thread waits.
                del target, call
                self.name = IDLE
                self._idle.add(self)
            finally:
                ended.set()


class IdleThreads:
    """Threads that wait for the next epoch of a loader, because starting threads takes longer than a small batch.

    At most `keep` threads wait. There would be more after iterations that overlapped: an iteration that was left early
    has threads that are still busy when the next one begins.
    """

    def __init__(self, keep: int = 0) -> None:
        self._keep = keep
        self._threads: deque[ReusableThread] = deque()
        self._closed = False
        _idle.add(self)

    def take(self) -> ReusableThread:
        """Return an idle thread, or a new one; raise LoaderError if the system permits no more threads."""
        with contextlib.suppress(IndexError):
            return self._threads.pop()
        handled = sys.exc_info()[1]  # by the caller; may be an earlier interrupt
        try:
            return ReusableThread(self)
        except RuntimeError as error:
            if isinstance(error.__context__, KeyboardInterrupt) and error.__context__ is not handled:
                # The interrupt came while `start` waited for a lock, and releasing that lock failed.
                raise error.__context__ from None
            problem = f"a thread cannot be started ({error}); free memory, or raise the limit of 'ulimit -u'"
            raise LoaderError(problem) from error

    def add(self, thread: ReusableThread) -> None:
        """Keep a thread whose function has ended. After `close`, or if enough threads are kept, end it instead."""
        if len(self._threads) >= self._keep:
            thread.end()
            return
        self._threads.append(thread)
        if self._closed:
            self.close()

    def close(self) -> None:
        """End idle threads now, and busy threads when their functions end. The garbage collector may call this."""
        self._closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._threads.pop().end()


class BackgroundThreads:
    """Base class of groups of threads that prefetch batches. They are stopped before the interpreter exits.

    A subclass implements `stop`.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.threads: list[threading.Thread] = []
        self.consumer: int | None = None  # identifier of the thread that is inside ``next``
        self._ended: list[Ended] = []

    def start(self, owner: object, idle: IdleThreads | None = None, **targets: Callable[[], object]) -> None:
        """Run each keyword argument in a thread: ``read_0=f`` calls `f` in a thread named "h5pack-read-0".

        When `owner` is garbage-collected, `finalizer` stops the threads. They must not reference `owner`, which would
        otherwise never be garbage-collected while they run.

        The threads come from `idle` and return there. If `idle` is None, new threads are started, and end afterwards.
        """
        # Before the threads start: after an interrupt in between, nothing would stop them.
        self.finalizer = weakref.finalize(owner, self.stop)
        self.finalizer.atexit = False
        _live.add(self)
        source = IdleThreads() if idle is None else idle
        try:
            for name, target in targets.items():
                thread = source.take()
                self.threads.append(thread)
                self._ended.append(thread.begin(f"h5pack-{name.replace('_', '-')}", target))
        except BaseException:
            # Stop the threads that are running already, because the caller cannot.
            self.stop()
            raise

    def stop(self) -> None:
        """Make the threads end after their current task. The garbage collector may call this, so it takes no lock."""
        raise NotImplementedError

    def join(self) -> None:
        """Wait until the functions in the threads have ended.

        Do nothing in another process, in one of these threads, or in the thread that is inside ``next``.
        """
        # The garbage collector may call this in one of the threads, which would then wait for itself. A signal handler
        # may call this inside ``next``, while the interrupted code holds a lock that the threads need.
        inside = threading.current_thread() in self.threads or threading.get_ident() == self.consumer
        if self.process == os.getpid() and not inside:
            for ended in self._ended:
                ended.wait()

    def require_own_process(self, loader: str = "loader") -> None:
        """Raise a LoaderError in a forked child process, because a fork does not copy the threads."""
        if self.process != os.getpid():
            raise LoaderError(
                "this iterator belongs to the parent process, whose threads a fork does not copy; begin a new one here "
                f"with iter({loader})"
            )


_live: weakref.WeakSet[BackgroundThreads] = weakref.WeakSet()
_idle: weakref.WeakSet[IdleThreads] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all threads before the interpreter exits, because a thread that is still reading could crash it."""
    for threads in list(_live):
        if threads.process == os.getpid():
            threads.stop()
    for idle in list(_idle):
        idle.close()
    for thread in threading.enumerate():
        if isinstance(thread, ReusableThread):
            # If an interrupt came while `thread` was moved from or to the idle threads, no loop above has ended it.
            thread.end()
            # `join` raises if another thread is just starting `thread`, which then ends at once.
            with contextlib.suppress(RuntimeError):
                thread.join(5.0)


class _SerialTorch(threading.local):
    """Context in which torch's operations run in the calling thread only, if torch uses OpenMP.

    `torch.set_num_threads` is not used, because it would change the number of threads for the whole process.
    """

    _inside = False
    _get = staticmethod(libc_function("omp_get_max_threads", ctypes.c_int) or (lambda: 1))
    _set = staticmethod(libc_function("omp_set_num_threads", None, ctypes.c_int) or (lambda _: None))

    def __enter__(self) -> None:
        # torch's first call in a thread sets OpenMP's number of threads. Make that call before setting the number to 1.
        torch.get_num_threads()
        # If `_inside` is still true, this is a signal handler that has interrupted `__exit__`. `_before` is then
        # still the number to restore.
        if not self._inside:
            self._before = self._get()
        self._inside = True
        self._set(1)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)
        self._inside = False


serial_torch = _SerialTorch()
