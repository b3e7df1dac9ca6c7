"""Decoded chunks that are kept for the next batch of the same window."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

DECODED_BYTES = 192 * 1024 * 1024
"""A default window of 32 chunks of 4 MiB, and half of the next."""


class _Kept:
    """One process's chunks; oldest first."""

    def __init__(self) -> None:
        self.process = os.getpid()
        # A lock that another thread holds at a fork would stay locked in the child.
        self.lock = threading.Lock()
        self.chunks: OrderedDict[Hashable, npt.NDArray[np.uint8]] = OrderedDict()
        self.bytes = 0


class DecodedChunks:
    """The chunks that were used last, up to a number of bytes; each process has its own.

    Parameters
    ----------
    capacity : int
        Bytes. A chunk that is larger is not kept.
    """

    def __init__(self, capacity: int = DECODED_BYTES) -> None:
        self.capacity = capacity
        self._state = _Kept()

    def _own(self) -> _Kept:
        state = self._state
        if state.process != os.getpid():
            # One assignment, so that no thread finds half of a new state.
            state = self._state = _Kept()
        return state

    def __getstate__(self) -> dict[str, Any]:
        return {"capacity": self.capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def bytes(self) -> int:
        """Bytes that are kept."""
        return self._own().bytes

    def has(self, key: Hashable) -> bool:
        """Whether a chunk is kept."""
        return key in self._own().chunks

    def get(self, key: Hashable, decode: Callable[[], npt.NDArray[np.uint8]], *, keep: bool) -> npt.NDArray[np.uint8]:
        """A chunk that is kept, or else what `decode` gives, which is kept if `keep` says so.

        Two threads may decode the same chunk at once; that is wasted, not wrong.
        """
        state = self._own()
        with state.lock:
            found = state.chunks.get(key)
            if found is not None:
                state.chunks.move_to_end(key)
                return found
        found = decode()
        if keep and found.nbytes <= self.capacity:
            with state.lock:
                before = state.chunks.pop(key, None)
                state.bytes += found.nbytes - (0 if before is None else before.nbytes)
                state.chunks[key] = found
                while state.bytes > self.capacity:
                    _, oldest = state.chunks.popitem(last=False)
                    state.bytes -= oldest.nbytes
        return found

    def clear(self) -> None:
        """Forget all chunks."""
        self._state = _Kept()
