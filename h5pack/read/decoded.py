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


class DecodedChunks:
    """The chunks that were used last, up to a number of bytes; each process has its own.

    Parameters
    ----------
    capacity : int
        Bytes. A chunk that is larger is not kept.
    """

    def __init__(self, capacity: int = DECODED_BYTES) -> None:
        self.capacity = capacity
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        # A lock that another thread holds at a fork would stay locked in the child.
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, npt.NDArray[np.uint8]] = OrderedDict()
        self.bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"capacity": self.capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def get(self, key: Hashable, decode: Callable[[], npt.NDArray[np.uint8]], *, keep: bool) -> npt.NDArray[np.uint8]:
        """A chunk that is kept, or else what `decode` gives, which is kept if `keep` says so.

        Two threads may decode the same chunk at once; that is wasted, not wrong.
        """
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        found = decode()
        if keep and found.nbytes <= self.capacity:
            with self._lock:
                before = self._kept.pop(key, None)
                self.bytes += found.nbytes - (0 if before is None else before.nbytes)
                self._kept[key] = found
                while self.bytes > self.capacity:
                    _, oldest = self._kept.popitem(last=False)
                    self.bytes -= oldest.nbytes
        return found

    def clear(self) -> None:
        """Forget all chunks."""
        self._begin()
