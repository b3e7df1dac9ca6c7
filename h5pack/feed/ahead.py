"""Batches pulled, and worked on, ahead of their consumer.

A *reader*, a thread, pulls batches out of the loader and prepares them (pins their memory). The consumer, when it asks
for a batch, *launches* what the reader has by then, up to some batches ahead, and is given the first that was launched.
Launching only queues work on the device, so nothing waits but for a first batch that is not there yet. Launching in the
consumer's thread keeps its modes (no_grad, autocast) and lets its profiler see the work.

An error, in the loader or at launching, is kept until the batches before it are handed out.

The reader does not know the consumer's end, so a forgotten one dies and stops it. As stopping may be said inside the
garbage collector, which may run in any thread with any lock held, it takes no lock.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from h5pack.errors import LoaderError
from h5pack.feed.stage import stage
from h5pack.feed.upstream import Pulled, Pulling

_live: weakref.WeakSet[Reader] = weakref.WeakSet()


class Copier(Protocol):
    """What takes batches to a device."""

    def enter(self) -> None:
        """Begin in the reader's thread."""

    def prepare(self, batch: Any) -> Any:
        """Make a batch ready to be launched, in the reader's thread, which may wait."""

    def launch(self, batch: Any, epoch: int) -> Any:
        """Start what is to be done with a prepared batch, without waiting, in the consumer's thread."""

    def receive(self, launched: Any) -> Any:
        """The consumer's batch, out of what `launch` returned."""


@dataclass
class _End:
    """Instead of a batch: why there is none."""

    error: BaseException


def _without_frame(error: BaseException) -> BaseException:
    """An error whose traceback begins one frame further down.

    That frame knows the queue that the error goes into. If nobody takes it out, it is a circle, and the loader is in
    it: a DataLoader that dies in a circle waits 5 seconds for each of its workers.
    """
    trace = error.__traceback__
    return error.with_traceback(None if trace is None else trace.tb_next)


class Reader:
    """A thread that pulls batches.

    Parameters
    ----------
    pulling : Pulling
    copier : Copier
    most : int
        Batches that it has pulled and nobody has taken, at most.
    """

    def __init__(self, pulling: Pulling, copier: Copier, most: int) -> None:
        self.stopping = False
        self._process = os.getpid()
        self._pulling, self._copier = pulling, copier
        self._rooms: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._pulled: queue.SimpleQueue[Pulled | _End] = queue.SimpleQueue()
        for _ in range(most):
            self._rooms.put(None)
        self._thread = threading.Thread(target=self._run, name="h5pack-feed", daemon=True)
        _live.add(self)
        self._thread.start()

    def take(self, *, wait: bool) -> Pulled | _End | None:
        """The next batch, or why there is none; None where it is not there yet and the caller does not wait."""
        if self._process != os.getpid():
            raise LoaderError(
                "this iterator belongs to the process that was forked, whose threads did not come along; begin a new "
                "one here with iter(feed)"
            )
        try:
            item = self._pulled.get(wait)
        except queue.Empty:
            return None
        self._rooms.put(None)
        return item

    def stop(self) -> None:
        """Have the thread end when the loader has given the batch it is at; safe inside the garbage collector."""
        self.stopping = True
        self._rooms.put(None)
        self._pulled.put(_End(LoaderError("the iterator was closed while its next batch was awaited")))

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended."""
        if self._process == os.getpid() and threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._copier.enter()
            while True:
                self._rooms.get()
                if self.stopping:
                    break
                pulled = self._pulling.pull()
                pulled.batch = self._copier.prepare(pulled.batch)
                self._pulled.put(pulled)
                # It must not outlive its consumer while this thread sleeps.
                del pulled
        except StopIteration:
            self._pulled.put(_End(StopIteration()))
        except BaseException as error:
            self._pulled.put(_End(_without_frame(error)))
        finally:
            self._pulling.close()
            # An error's frames know their callers, this one too, which would know the queue that the error is in.
            del self


class Ahead(Iterator[Pulled]):
    """The batches of an iteration, worked on ahead.

    Parameters
    ----------
    pulling : Pulling
    copier : Copier
    depth : int
        Batches that are launched besides the one that is handed out, at most; the reader has as many more.
    """

    def __init__(self, pulling: Pulling, copier: Copier, depth: int) -> None:
        self.reader = Reader(pulling, copier, depth)
        self._copier, self._depth = copier, depth
        self._launched: deque[tuple[Pulled, Any]] = deque()
        self._end: BaseException | None = None
        self._forgotten = weakref.finalize(self, self.reader.stop)
        self._forgotten.atexit = False

    def __next__(self) -> Pulled:
        while self._end is None and len(self._launched) <= self._depth:
            if not self._launch_one():
                break
        if not self._launched:
            assert self._end is not None
            try:
                raise self._end
            finally:
                # Its traceback knows this frame.
                self._end = StopIteration()
        pulled, launched = self._launched.popleft()
        pulled.batch = self._copier.receive(launched)
        return pulled

    def close(self) -> None:
        """Stop pulling, and drop what was launched."""
        self._end = self._end or StopIteration()
        self._launched.clear()
        self.reader.stop()
        self._forgotten.detach()

    def _launch_one(self) -> bool:
        """Launch the next batch, or learn that there is none; False: it is not there yet, and others are."""
        if self._launched:
            item = self.reader.take(wait=False)
        else:
            with stage("read"):
                item = self.reader.take(wait=True)
        if item is None:
            return False
        if isinstance(item, _End):
            self._end = item.error
        else:
            batch, item.batch = item.batch, None
            try:
                self._launched.append((item, self._copier.launch(batch, item.epoch)))
            except Exception as error:
                self._end = error
        if self._end is not None:
            self.reader.stop()
        return True


@atexit.register
def _stop_all() -> None:
    """A thread that is at work while the interpreter is taken down may crash it."""
    readers = list(_live)
    for reader in readers:
        reader.stop()
    for reader in readers:
        reader.join(5.0)
