"""Batches on their way: which rows of them are still missing."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from h5pack.feed.buffers import BatchMemory

Span = tuple[int, int, int]
"""Batch, first slot in it, and how many slots."""


@dataclass
class _Open:
    memory: BatchMemory
    missing: int


class Filling:
    """The batches that have memory, and rows missing."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()

    def open(self, batch: int, memory: BatchMemory, rows: int) -> None:
        """Begin a batch of `rows` rows."""
        self._open[batch] = _Open(memory, rows)

    def memory(self, batch: int) -> BatchMemory:
        """The memory of an open batch."""
        return self._open[batch].memory

    def arrived(self, span: Span) -> BatchMemory | None:
        """Count rows of a batch that have arrived; its memory if none is missing now, and the batch is closed."""
        batch, _, count = span
        with self._lock:
            found = self._open[batch]
            found.missing -= count
            if found.missing:
                return None
            del self._open[batch]
        return found.memory
