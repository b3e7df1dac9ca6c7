"""Memory for batches, used again as soon as nobody looks at it.

Fresh memory costs more than the copy into it: the kernel zeroes each page at its first touch (measured: 70,000 images/s
fall to 15,700). So a batch's memory goes back to the pool when its last tensor dies. The word comes from a weak
reference to the array under the tensors; its callback may run inside the garbage collector, in any thread, with any
lock held, so it does nothing but append the memory to a deque, which is one step of the interpreter, unless enough is
kept already. What came back last is taken first: it is warm.

Pinned memory is torch's own: its host allocator reuses it, and waits for the copies to the device that still read it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 64
_PAGE = 4096

Shape = tuple[tuple[int, ...], npt.DTypeLike]


def anonymous(size: int) -> mmap.mmap:
    """Zeroed memory of its own, on huge pages where the system has them: fewer faults, and faster copies."""
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    memory = mmap.mmap(-1, max(size, 1), flags=flags) if flags else mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Some kernels have no huge pages.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def lay_out(shapes: Sequence[Shape]) -> tuple[list[int], int]:
    """Where each array of a batch starts in its memory, and the bytes of all.

    Parameters
    ----------
    shapes : sequence of (shape, dtype)
    """
    offsets, size = [], 0
    for shape, dtype in shapes:
        offsets.append(size)
        size += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


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
    arrays : dict of str to ndarray
        (rows, ...): the parts, for filling.
    """

    def __init__(self, base: npt.NDArray[np.uint8], pinned: torch.Tensor | None, parts: list[Part], rows: int) -> None:
        self.address = base.__array_interface__["data"][0]
        self._pinned = pinned
        self._parts = parts
        # The arrays hold `base`, and through it the memory.
        self.arrays = {part.name: np.ndarray((rows, *part.row_shape), part.dtype, base, part.offset) for part in parts}

    def tensor(self, name: str) -> torch.Tensor:
        """A part as a tensor over the same memory; it and its views keep that alive."""
        array = self.arrays[name]
        if self._pinned is None:
            return torch.from_numpy(array)
        part = next(part for part in self._parts if part.name == name)
        piece = self._pinned[part.offset : part.offset + array.nbytes]
        return piece.view(torch.from_numpy(array[:0]).dtype).view(array.shape)


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
        self.keep = keep
        offsets, size = lay_out([((batch_rows, *row_shape), dtype) for _, row_shape, dtype in parts])
        self.parts = [
            Part(name, row_shape, dtype, math.prod(row_shape) * dtype.itemsize, offset)
            for (name, row_shape, dtype), offset in zip(parts, offsets, strict=True)
        ]
        # torch's host allocator takes powers of two.
        self.bytes = 1 << (size - 1).bit_length() if pinned and size else -(-size // _PAGE) * _PAGE
        self._pinned = pinned
        self._free: deque[mmap.mmap] = deque()
        self._numbers = itertools.count()
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._dead: deque[int] = deque()

    def take(self, rows: int) -> BatchMemory:
        """Memory for a batch of `rows` rows."""
        if self._pinned:
            pinned = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=True)
            return BatchMemory(pinned.numpy(), pinned, self.parts, rows)
        self._forget()
        try:
            memory = self._free.pop()
        except IndexError:
            memory = anonymous(self.bytes)
        base = np.frombuffer(memory, np.uint8)
        number, free, dead, keep, watched = next(self._numbers), self._free, self._dead, self.keep, self._watched

        def give_back(_: object) -> None:
            dead.append(number)
            # Free ones and those in use together.
            if len(free) + len(watched) - len(dead) < keep:
                free.append(memory)

        # The tensors hold the array, not the memory, so the array's death is that of the last tensor.
        self._watched[number] = weakref.ref(base, give_back)
        return BatchMemory(base, None, self.parts, rows)

    def prepare(self) -> None:
        """Have as many unused ones as are kept, each page touched, which is what costs time of fresh memory."""
        if self._pinned:
            return
        self._forget()
        for _ in range(self.keep - len(self._free) - len(self._watched)):
            memory = anonymous(self.bytes)
            np.frombuffer(memory, np.uint8)[::_PAGE] = 0
            self._free.append(memory)

    def _forget(self) -> None:
        """Drop what is known of dead arrays; several iterators may do so at once."""
        with contextlib.suppress(IndexError):
            while True:
                self._watched.pop(self._dead.popleft(), None)
