"""How long a CUDA stream waited for batches, found out without ever waiting for it.

An event is put on the consumer's stream before a batch is asked for, another behind whatever that left there. The
device passes the first when all work before it is done, and the second when the batch may be used. So the time between
them is the time in which it had nothing to do but wait: for the process, and for the rest of the copy. A wait of the
process that is hidden by work that is still queued does not count. Both events are asked later whether they have
passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch


class TimingEvent(Protocol):
    """A CUDA event that keeps time, as far as it is used here."""

    def record(self, stream: Any) -> None:
        """Put it on a stream."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to another event."""


class DeviceWait:
    """Counts the seconds in which the current stream of a device waited for batches.

    Parameters
    ----------
    event : callable
        Makes an event.
    stream : callable
        Gives the consumer's current stream.
    """

    def __init__(self, event: Callable[[], TimingEvent], stream: Callable[[], Any]) -> None:
        self._event, self._stream = event, stream
        self._spare: list[tuple[TimingEvent, TimingEvent]] = []
        self._open: tuple[TimingEvent, TimingEvent] | None = None
        self._pending: deque[tuple[TimingEvent, TimingEvent, float]] = deque()
        self._seconds = 0.0

    @classmethod
    def on(cls, device: torch.device) -> DeviceWait:
        """Of a CUDA device."""
        make: Callable[..., TimingEvent] = torch.cuda.Event
        return cls(partial(make, enable_timing=True), partial(torch.cuda.current_stream, device))

    def begin(self) -> None:
        """A batch is about to be asked for."""
        self._open = pair = self._spare.pop() if self._spare else (self._event(), self._event())
        pair[0].record(self._stream())

    def end(self, host_seconds: float) -> None:
        """The batch was handed over, after so many seconds of the process's waiting."""
        if self._open is None:
            return
        pair, self._open = self._open, None
        # On the stream that is current now; it is this one that waits for the copy.
        pair[1].record(self._stream())
        self._pending.append((*pair, host_seconds))
        self._harvest()

    @property
    def seconds(self) -> float:
        """Counted so far; the waits that the device has not come to are taken to be the process's."""
        self._harvest()
        return self._seconds + sum(host for _, _, host in self._pending)

    def _harvest(self) -> None:
        while self._pending and self._pending[0][1].query():
            first, last, _ = self._pending.popleft()
            self._seconds += max(0.0, first.elapsed_time(last) / 1000)
            self._spare.append((first, last))
