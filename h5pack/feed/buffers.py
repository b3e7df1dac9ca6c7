"""Memory for batches, used again as soon as nobody looks at it.

Fresh memory costs more than the copy into it: each page is zeroed by the kernel at its first touch (measured: 70,000
images/s fall to 15,700). So a batch's memory goes back to the pool when its last tensor dies. The word comes from a weak
reference to the array under the tensors; its callback may run inside the garbage collector, in any thread, with any lock
held, so it does nothing but put the memory into a queue.

Pinned memory is torch's own: its host allocator reuses it, and waits for the copies to the device that still read it.
"""

from __future__ import annotations

import mmap
import queue
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 64
_PAGE = 4096


def anonymous(size: int) -> mmap.mmap:
    """Zeroed memory of its own, on huge pages where the system has them: fewer faults, and faster copies."""
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    memory = mmap.mmap(-1, max(size, 1), flags=flags) if flags else mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # A kernel without huge pages.
    return memory


@dataclass(frozen=True)
class Part:
    """One tensor of a batch.

    Attributes
    ----------
    name : str
    row_shape : tuple of int
    dtype : dtype
    row_bytes : int
    offset : int
        Of its first byte in the batch's memory.
    """

    name: str
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    row_bytes: int
    offset: int


class BatchMemory:
    """The memory of one batch, while it is filled.

    Attributes
    ----------
    address : int
    tensors : dict of str to Tensor
        (rows, ...), over the memory.
    arrays : dict of str to ndarray
        The same, for filling.
    """

    def __init__(self, base: torch.Tensor, parts: list[Part], rows: int) -> None:
        self.address = base.data_ptr()
        self.tensors: dict[str, torch.Tensor] = {}
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        for part in parts:
            piece = base[part.offset : part.offset + rows * part.row_bytes]
            dtype = torch.from_numpy(np.empty(0, part.dtype)).dtype
            tensor = piece.view(dtype).view((rows, *part.row_shape))
            self.tensors[part.name] = tensor
            self.arrays[part.name] = tensor.numpy()


class BufferPool:
    """Gives memory for batches, and takes it back by itself.

    Parameters
    ----------
    parts : list of (name, row shape, dtype)
        The tensors of a batch.
    batch_rows : int
        Of the largest batch.
    pinned : bool
    keep : int
        How many unused ones to keep for later.
    """

    def __init__(
        self, parts: list[tuple[str, tuple[int, ...], np.dtype[Any]]], batch_rows: int, pinned: bool, keep: int
    ) -> None:
        self.parts: list[Part] = []
        self.keep = keep
        size = 0
        for name, row_shape, dtype in parts:
            row_bytes = int(np.prod(row_shape, dtype=np.int64)) * dtype.itemsize
            self.parts.append(Part(name, row_shape, dtype, row_bytes, size))
            size += -(-batch_rows * row_bytes // _ALIGNMENT) * _ALIGNMENT
        self.bytes = -(-size // _PAGE) * _PAGE
        self._pinned = pinned
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._dead: queue.SimpleQueue[int] = queue.SimpleQueue()

    def take(self, rows: int) -> BatchMemory:
        """Memory for a batch of `rows` rows."""
        if self._pinned:
            return BatchMemory(torch.empty(self.bytes, dtype=torch.uint8, pin_memory=True), self.parts, rows)
        self._forget()
        try:
            memory = self._free.get_nowait()
        except queue.Empty:
            memory = anonymous(self.bytes)
        base = np.frombuffer(memory, np.uint8)
        number, free, dead = id(base), self._free, self._dead

        def give_back(_: object) -> None:
            free.put(memory)
            dead.put(number)

        # The tensors hold the array, not the memory, so the array's death is that of the last tensor.
        self._watched[number] = weakref.ref(base, give_back)
        return BatchMemory(torch.from_numpy(base), self.parts, rows)

    def _forget(self) -> None:
        """Drop what is known of dead arrays, and memory beyond what is worth keeping."""
        while not self._dead.empty():
            number = self._dead.get_nowait()
            watch = self._watched.get(number)
            if watch is not None and watch() is None:
                del self._watched[number]
        while self._free.qsize() > self.keep:
            self._free.get_nowait()
