"""Base classes of the iterators of `H5Loader`, `DeviceFeed`, `EchoLoader` and `FeedMonitor`, and of their threads."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from h5pack.errors import LoaderError

C = TypeVar("C", bound="Closeable")


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
    """Base class of iterators over batches. As a context manager, it closes the iterator.

    A subclass implements `_next_batch` and `_release`, and may extend `_finish`. After an error or `close()`, ``next``
    raises `LoaderError`; after the last batch, StopIteration. `loader` is the loader's name in messages such
    as ``"begin a new one with iter(loader)"``.
    """

    def __init__(self, loader: str = "loader") -> None:
        self._loader_name = loader
        self._broken = ""
        self._ended = False

    def __next__(self) -> Any:
        if self._broken:
            raise LoaderError(
                f"this iterator {self._broken} before the end of its epoch; begin a new one with "
                f"iter({self._loader_name})"
            )
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
            # Any error, such as a KeyboardInterrupt, may leave an inconsistent state, so this iterator cannot continue.
            self._broken = "failed"
            self._release()
            raise

    def close(self) -> None:
        """Stop reading, and wait until the threads of this iteration have ended."""
        if not self._ended:
            self._broken = self._broken or "was closed"
        self._release()

    def _next_batch(self) -> Any:
        """Return the next batch; raise StopIteration at the end of the epoch."""
        raise NotImplementedError

    def _release(self) -> None:
        """Stop threads and free memory. The base class may call this several times."""

    def _finish(self) -> None:
        """Move the state to the start of the next epoch. Called after the last batch; does nothing by default."""


class BackgroundThreads:
    """Base class of groups of threads that prefetch batches. They are stopped before the interpreter exits.

    A subclass implements `stop`.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.threads: list[threading.Thread] = []

    def start(self, **targets: Callable[[], object]) -> None:
        """Start a daemon thread for each keyword argument: ``read_0=f`` calls `f` in a thread named "h5pack-read-0"."""
        self.threads = [
            threading.Thread(target=target, name=f"h5pack-{name.replace('_', '-')}", daemon=True)
            for name, target in targets.items()
        ]
        _live.add(self)
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Make the threads end after their current task, without a lock, as the garbage collector may call this."""
        raise NotImplementedError

    def join(self, seconds: float | None = None) -> None:
        """Wait until the threads have ended. Do nothing if called in one of them or in another process."""
        # The garbage collector may run this in one of the threads. Joining the others there could deadlock, because
        # they may wait for a lock that this thread holds.
        if self.process == os.getpid() and threading.current_thread() not in self.threads:
            for thread in self.threads:
                # `ident` is None if a KeyboardInterrupt occurred before this thread was started.
                if thread.ident is not None:
                    thread.join(seconds)

    def stop_with(self, owner: object) -> weakref.finalize[..., object]:
        """Stop the threads when `owner` is garbage-collected. They must not reference `owner`, or it never is."""
        finalizer = weakref.finalize(owner, self.stop)
        finalizer.atexit = False
        return finalizer

    def require_own_process(self, loader: str = "loader") -> None:
        """Raise a LoaderError in a forked child process, because a fork does not copy the threads."""
        if self.process != os.getpid():
            raise LoaderError(
                "this iterator belongs to the parent process, whose threads a fork does not copy; begin a new one here "
                f"with iter({loader})"
            )


_live: weakref.WeakSet[BackgroundThreads] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all threads before the interpreter exits, because a thread that still reads then could crash it."""
    own = [threads for threads in list(_live) if threads.process == os.getpid()]
    for threads in own:
        threads.stop()
    for threads in own:
        threads.join(5.0)
