"""A simulation of CUDA streams and of torch's caching allocator, under the real code of `DeviceFeed`.

A device may run queued work at any time that its streams, events and waits allow. Instead of trying many such times,
the simulation gives every queued operation a *vector clock*: for each stream, how many of its operations are certainly
done before this one begins. Two accesses to the same memory, of which one writes, are safe if one is in the other's
clock.

The allocator is as eager as torch's: memory is used again by the next allocation on its stream, as soon as the events
of `record_stream`, recorded when the tensor is freed, are complete. Whether an event is complete is drawn at random.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

DEVICE = torch.device("meta")
COPY, TRANSFORM, DEFAULT, OTHER, THIRD = range(5)
Clock = tuple[int, ...]
_START: Clock = (0,) * 5
Site = tuple[str, int]


class RaceError(AssertionError):
    """Memory is accessed while other work on it may still be queued."""


def joined(one: Clock, two: Clock) -> Clock:
    return tuple(map(max, one, two))


@dataclass
class Block:
    """Device memory of one tensor."""

    stream: int
    used_by: set[int] = field(default_factory=set)  # other streams, by `record_stream`
    written: tuple[int, int] | None = None  # stream and number of the operation
    reads: list[tuple[int, int]] = field(default_factory=list)
    value: Any = None


class Event:
    def __init__(self, device: SimulatedDevice, clock: Clock) -> None:
        self.device, self.clock = device, clock

    def synchronize(self) -> None:
        with self.device.lock:
            if self.device.applies():
                self.device.known = joined(self.device.known, self.clock)


class Stream:
    def __init__(self, device: SimulatedDevice, number: int) -> None:
        self.device, self.number, self.clock = device, number, _START

    def wait_event(self, event: Event) -> None:
        with self.device.lock:
            if self.device.applies():
                self.clock = joined(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        with self.device.lock:
            if self.device.applies():
                self.clock = joined(self.clock, other.clock)


class SimulatedDevice:
    """The operations that a `DeviceCopier` needs, and those of loaders, transforms and steps, on simulated streams.

    `never`: no event is complete until someone waits for it. `without`: a place in h5pack's code whose call has no
    effect.
    """

    device = DEVICE

    def __init__(self, seed: int, *, never: bool = False, without: Site | None = None) -> None:
        self.random, self.never, self.without = random.Random(seed), never, without
        self.lock = threading.RLock()
        self.streams = [Stream(self, number) for number in range(len(_START))]
        self.copy_stream, self.transform_stream = self.streams[COPY], self.streams[TRANSFORM]
        self.known = _START  # what any thread of the host knows to be complete
        self.sites: set[Site] = set()
        self._free: list[list[Block]] = [[] for _ in self.streams]
        self._pending: list[tuple[Block, list[Clock]]] = []
        self.live = self.most_live = 0
        self._local = threading.local()

    # What the copier calls.

    def enter(self) -> None:
        assert threading.current_thread().name == "h5pack-feed"

    def current_stream(self) -> Stream:
        # A new thread begins with the default stream.
        return getattr(self._local, "stream", self.streams[DEFAULT])

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        yield
        self._local.stream = before

    def event(self, stream: Stream) -> Event:
        with self.lock:
            return Event(self, stream.clock)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.run([], tensor.value)  # type: ignore[attr-defined]

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        with self.lock:
            if self.applies() and stream.number != tensor.block.stream:  # type: ignore[attr-defined]
                tensor.block.used_by.add(stream.number)  # type: ignore[attr-defined]

    # What loaders, transforms and steps do on the device.

    def run(self, read: list[torch.Tensor], value: Any = None) -> Any:
        """Queue an operation on the current stream that reads tensors, and writes a new one with `value`, if given."""
        self._pause()
        with self.lock:
            stream, result = self.current_stream(), None
            blocks = [tensor.block for tensor in read]  # type: ignore[attr-defined]
            written = self._allocate(stream) if value is not None else None
            number = stream.clock[stream.number] + 1
            clock = joined(stream.clock, self.known)
            for block in blocks:
                self._require(clock, [block.written] if block.written else [])
                block.reads.append((stream.number, number))
            if written is not None:
                self._require(clock, written.reads + ([written.written] if written.written else []))
                written.written, written.reads, written.value = (stream.number, number), [], value
                result = torch.empty(1, device=DEVICE)
                result.block = written  # type: ignore[attr-defined]
                weakref.finalize(result, self._release, written)
            stream.clock = tuple(number if k == stream.number else done for k, done in enumerate(clock))
            return result

    def applies(self) -> bool:
        """Note the place in h5pack's code that calls this; return False if its call is to have no effect."""
        frame: Any = sys._getframe(2)
        while "/h5pack/device/" not in frame.f_code.co_filename.replace("\\", "/"):
            frame = frame.f_back
            if frame is None:
                return True
        site = (frame.f_code.co_name, frame.f_lineno)
        self.sites.add(site)
        return site != self.without

    def _require(self, clock: Clock, earlier: list[tuple[int, int]]) -> None:
        if any(clock[stream] < number for stream, number in earlier):
            raise RaceError(f"an operation with the clock {clock} meets {earlier}")

    def _allocate(self, stream: Stream) -> Block:
        for entry in list(self._pending):
            block, events = entry
            if all(self._is_complete(clock) for clock in events):
                self._pending.remove(entry)
                self._free[block.stream].append(block)
                self.live -= 1
        self.live += 1
        self.most_live = max(self.live, self.most_live)
        free = self._free[stream.number]
        if not free:
            return Block(stream.number)
        block = free.pop()
        block.used_by = set()
        return block

    def _is_complete(self, clock: Clock) -> bool:
        if joined(clock, self.known) == self.known:
            return True
        if self.never or self.random.random() < 0.5:
            return False
        self.known = joined(self.known, clock)
        return True

    def _release(self, block: Block) -> None:
        with self.lock:
            if block.used_by:
                self._pending.append((block, [self.streams[number].clock for number in block.used_by]))
            else:
                self._free[block.stream].append(block)
                self.live -= 1

    def _pause(self) -> None:
        """Let other threads run, sometimes."""
        drawn = self.random.random()
        if drawn < 0.2:
            time.sleep(0 if drawn > 0.01 else 1e-4)
