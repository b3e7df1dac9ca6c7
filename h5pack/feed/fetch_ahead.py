"""One batch fetched ahead, and how long that takes beside what its consumer takes."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch

from h5pack.feed.ahead import Reader
from h5pack.feed.upstream import Pulled, Pulling

_PATIENCE = 0.05
"""Of the consumer's time between two batches: how long a fresh one is waited for that should be ready by then."""
_NEWEST = 0.2
"""Share of the newest time in a moving average."""


class FetchAhead:
    """Pulls an iteration's batches in a thread, never more than one ahead.

    Parameters
    ----------
    pulling : Pulling

    Attributes
    ----------
    reader : Reader
        The thread. It ends with the iteration, and when this object is forgotten.
    """

    def __init__(self, pulling: Pulling) -> None:
        self._timer = _Timer()
        self.reader = Reader(pulling, self._timer, 1)
        self._asked_at = 0.0
        self._consumer_seconds = 0.0
        self._forgotten = weakref.finalize(self, self.reader.stop)
        self._forgotten.atexit = False

    def take(self, *, wait: bool) -> Pulled | None:
        """The batch ahead.

        Parameters
        ----------
        wait : bool
            False: it is given if it is ready, or should be within a twentieth of the consumer's time and is; else None.
            Repeats that hide a wait which is hardly there would cost freshness for nothing.

        Raises
        ------
        BaseException
            What pulling it raised: StopIteration, if there is none left.
        """
        if not wait:
            patience = _PATIENCE * self._consumer_seconds
            missing = self._timer.expected() - time.monotonic()
            if 0.0 < missing <= patience and self._timer.ready.acquire(timeout=patience):
                self._timer.ready.release()
        item = self.reader.take(wait=wait)
        if item is None:
            return None
        if not isinstance(item, Pulled):
            try:
                raise item.error
            finally:
                # Its traceback knows this frame.
                del item
        self._timer.taken()
        return item

    def consumer_asks(self) -> None:
        """The consumer asks for a batch."""
        if self._asked_at:
            self._consumer_seconds = _moved(self._consumer_seconds, time.monotonic() - self._asked_at)

    def consumer_gets(self) -> None:
        """The consumer is given a batch."""
        self._asked_at = time.monotonic()

    def close(self) -> None:
        """End the thread, after the batch that it is at."""
        self.reader.stop()
        self.reader.join()


class _Timer:
    """Stands by in the reader's thread where a DeviceFeed's copier does; the batches stay as they are."""

    def __init__(self) -> None:
        self.ready = threading.Semaphore(0)
        self._begun, self._seconds = time.monotonic(), 0.0
        # Streams are a thread's own. A DeviceFeed that hands out in the other thread must have the consumer's wait.
        self._stream = torch.cuda.current_stream() if _cuda_in_use() else None

    def enter(self) -> None:
        """Begin in the reader's thread."""
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def prepare(self, batch: Any) -> Any:
        """Note that a batch is there."""
        self._seconds = _moved(self._seconds, time.monotonic() - self._begun)
        self.ready.release()
        return batch

    def launch(self, batch: Any, epoch: int) -> Any:
        """Not called."""
        raise NotImplementedError

    def receive(self, launched: Any) -> Any:
        """Not called."""
        raise NotImplementedError

    def taken(self) -> None:
        """The batch was taken, so the next one is begun."""
        self._begun = time.monotonic()
        self.ready.acquire()

    def expected(self) -> float:
        """When the batch that is being pulled should be there, as `time.monotonic` counts."""
        return self._begun + self._seconds


def _moved(average: float, seconds: float) -> float:
    return seconds if not average else average + _NEWEST * (seconds - average)


def _cuda_in_use() -> bool:
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return used
