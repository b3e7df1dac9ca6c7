"""Reusable memory for batches: pooled in this process, or shared between a DataLoader's workers and the main process.

Copying rows to new memory is slow, because the kernel zeroes each page at its first access (measured: 15,700 images/s
in new memory, 70,000 in reused memory). So the memory of a batch returns to the `BufferPool` when the batch's last
tensor is freed. The pool has a weak reference to the array that the tensors share. The callback of this reference may
run in the garbage collector, in any thread, while any lock is held. So the callback takes no lock, and changes only
deques, whose operations are atomic. The most recently used memory is reused first, because it is most likely in the
CPU's caches. Pinned memory is managed by torch's host allocator, which reuses it after pending copies to the device
have finished.

torch allocates new shared memory for every tensor that is sent between processes, and mapping it takes over four times
as long as copying into it (measured: 14 ms and 3 ms for 30 MB). So each worker has a few reusable *segments* (anonymous
memory files). The first byte of a segment says whether the main process still uses the segment. The worker sets this
byte to `_BUSY` when it sends a batch. The main process maps the segment, and sets the byte to `_FREE` when the batch's
last tensor is freed. A worker reuses a segment only if the byte is `_FREE` and the worker itself has no array in the
segment any more.

If the main process forks, the child shares the segments of the batches that exist already. When such a batch is freed,
the main process sets the byte to `_FORKED` instead. The worker then forgets the segment, and the system frees the
segment when no process maps it any more.

If a user's collate function changes the batch that `H5Dataset.collate` returned, the batch is sent as ordinary tensors,
which torch copies.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.deterministic
from torch.utils.data import get_worker_info

from h5pack.errors import LoaderError
from h5pack.system.machine import huge_page_memory

_deterministic: Any = torch.utils.deterministic  # mypy does not see `fill_uninitialized_memory`.
_ALIGNMENT = 64
_PAGE = 4096

Shape = tuple[tuple[int, ...], npt.DTypeLike]


def lay_out(shapes: Sequence[Shape]) -> tuple[list[int], int]:
    """Lay out an array for each (shape, dtype) in memory; return the arrays' byte offsets and the total of bytes."""
    offsets, size = [], 0
    for shape, dtype in shapes:
        offsets.append(size)
        size += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


@dataclass(frozen=True)
class BatchField:
    """Properties of one tensor of a batch; `offset` is its byte offset in the batch's memory."""

    name: str
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    row_bytes: int
    offset: int


@contextlib.contextmanager
def unfilled_memory() -> Iterator[None]:
    """Context in which torch does not fill new tensors with a value, for tensors that are then overwritten completely.

    With ``torch.use_deterministic_algorithms``, torch otherwise fills every new tensor, which takes as long as copying
    it. The context changes the setting ``torch.utils.deterministic.fill_uninitialized_memory``, which is global. So if
    several threads are in the context, the last thread to leave it restores the setting.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    with _filling.lock:
        if not _filling.users:
            _filling.before = _deterministic.fill_uninitialized_memory
        _filling.users += 1
        _deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        with _filling.lock:
            _filling.users -= 1
            if not _filling.users:
                _deterministic.fill_uninitialized_memory = _filling.before


class _Filling:
    """The number of threads inside `unfilled_memory`, and the value of the setting before the first thread entered."""

    def __init__(self) -> None:
        self.lock, self.users, self.before = threading.Lock(), 0, True

    def forget_threads(self) -> None:
        """Start again in a forked child, where the parent's threads neither release the lock nor leave the context."""
        if self.users:
            _deterministic.fill_uninitialized_memory = self.before
        self.__init__()  # type: ignore[misc]


_filling = _Filling()
os.register_at_fork(after_in_child=_filling.forget_threads)


class BatchMemory:
    """The memory of a batch that is being filled: row indices `start` to ``start + rows - 1`` of a buffer.

    `base` holds the buffer's bytes, uint8. If the buffer is pinned, `pinned` is the same buffer as a tensor, else None.
    `address` is the address of the buffer's first byte. `arrays` has an array (rows, ...) for each field, by name.
    """

    def __init__(
        self,
        base: npt.NDArray[np.uint8],
        pinned: torch.Tensor | None,
        fields: list[BatchField],
        rows: int,
        start: int = 0,
    ) -> None:
        self.address = base.__array_interface__["data"][0]
        self._base, self._pinned, self._fields, self._start = base, pinned, fields, start
        # The arrays keep `base` alive, and `base` keeps the memory alive.
        self.arrays = {
            field.name: np.ndarray((rows, *field.row_shape), field.dtype, base, field.offset + start * field.row_bytes)
            for field in fields
        }

    def part(self, start: int, rows: int) -> BatchMemory:
        """Return `rows` rows of this memory, from row index `start` on. Index 0 is this memory's first row."""
        return BatchMemory(self._base, self._pinned, self._fields, rows, self._start + start)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a field as a tensor in this memory. The tensor and its views keep the memory allocated."""
        array = self.arrays[name]
        if self._pinned is None:
            return torch.from_numpy(array)
        field = next(field for field in self._fields if field.name == name)
        offset = field.offset + self._start * field.row_bytes
        part = self._pinned[offset : offset + array.nbytes]
        return part.view(torch.from_numpy(array[:0]).dtype).view(array.shape)


class BufferPool:
    """Allocator of memory for batches of up to `batch_rows` rows. It reuses memory after a batch's tensors are freed.

    `fields` are the (name, row shape, dtype) of a batch's tensors. When a batch is freed, its buffer is kept for reuse
    if the pool then has at most `keep` buffers, counting free buffers and buffers in use. Pinned buffers are kept by
    torch's allocator instead, in any number. `blocks`, if not None, is a further pool, whose buffers are each large
    enough for several batches.
    """

    def __init__(
        self, fields: list[tuple[str, tuple[int, ...], np.dtype[Any]]], batch_rows: int, pinned: bool, keep: int
    ) -> None:
        self.keep, self.batch_rows = keep, batch_rows
        self.blocks: BufferPool | None = None
        offsets, size = lay_out([((batch_rows, *row_shape), dtype) for _, row_shape, dtype in fields])
        self.fields = [
            BatchField(name, row_shape, dtype, math.prod(row_shape) * dtype.itemsize, offset)
            for (name, row_shape, dtype), offset in zip(fields, offsets, strict=True)
        ]
        # torch's allocator of pinned memory rounds sizes up to powers of two.
        self.bytes = 1 << (size - 1).bit_length() if pinned and size else -(-size // _PAGE) * _PAGE
        self.pinned = pinned
        self._pinned_buffers = 0  # Number of buffers allocated in advance.
        self._free: deque[mmap.mmap] = deque()
        self._used: deque[None] = deque()  # One element per buffer in use.

    def allocate(self, rows: int) -> BatchMemory:
        """Return memory for a batch of `rows` rows."""
        if self.pinned:
            pinned = self._new_pinned()
            return BatchMemory(pinned.numpy(), pinned, self.fields, rows)
        try:
            memory = self._free.pop()
        except IndexError:
            memory = huge_page_memory(self.bytes)
        base = np.frombuffer(memory, np.uint8)
        free, used, keep = self._free, self._used, self.keep

        def give_back() -> None:
            used.pop()
            if len(free) + len(used) < keep:
                free.append(memory)

        # All tensors of the batch reference the array `base`, so `give_back` is called when the last of them is freed.
        used.append(None)
        weakref.finalize(base, give_back).atexit = False
        return BatchMemory(base, None, self.fields, rows)

    def prepare(self, buffers: int | None = None) -> None:
        """Allocate as many buffers as the pool may keep, so that later batches do not wait for new memory.

        Each page of pageable memory is written to, so that the kernel provides it now. `buffers` is the number of
        pinned buffers to allocate (None: `keep`); it has no effect on a pool of pageable memory. Pinned buffers that an
        earlier call allocated are not allocated again, because torch's allocator keeps them.
        """
        if self.pinned:
            wanted = self.keep if buffers is None else buffers
            if wanted > self._pinned_buffers:
                self._pinned_buffers = wanted
                held = [self._new_pinned() for _ in range(wanted)]
                del held
            return
        for _ in range(self.keep - len(self._free) - len(self._used)):
            memory = huge_page_memory(self.bytes)
            np.frombuffer(memory, np.uint8)[::_PAGE] = 0
            self._free.append(memory)

    def _new_pinned(self) -> torch.Tensor:
        with unfilled_memory():
            return torch.empty(self.bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def can_pin() -> bool:
    """Return whether torch can pin memory. If it cannot, warn the caller of the calling function."""
    has_gpu = torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available()
    # With Apple's GPUs (MPS), torch fails to pin memory, or pinned tensors are not on the CPU.
    if has_gpu and not torch.backends.mps.is_available():
        return True
    text = "pin_memory needs a GPU with memory of its own, and there is none; batches are in pageable memory"
    warnings.warn(text, stacklevel=3)
    return False


_HEADER = mmap.PAGESIZE
_FREE, _BUSY, _FORKED = 0, 1, 2
_SPARE = 3
"""Number of free segments that a worker keeps besides the one it fills: prefetching needs several at a time."""


class SharedSegment:
    """Reusable shared memory for one batch of a worker: `size` bytes after a header page."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._used: weakref.ref[Any] | None = None
        try:
            self.descriptor = os.memfd_create("h5pack-batch", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, _HEADER + size)
            self._memory = mmap.mmap(self.descriptor, _HEADER + size)
        except OSError as error:
            raise LoaderError(
                f"cannot allocate {size:,} bytes of shared memory for a batch ({error.strerror}); keep fewer batches "
                "at a time, or raise the limits on open files (ulimit -n) and memory"
            ) from error

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def is_free(self) -> bool:
        """Return whether neither this worker nor the main process nor a child that it forked uses the segment."""
        here = self._used is not None and self._used() is not None
        return not here and self.state == _FREE

    @property
    def state(self) -> int:
        """`_BUSY` if the main process uses the segment, `_FORKED` if only its forked children may, else `_FREE`."""
        return self._memory[0]

    def send(self) -> None:
        """Mark the segment as used by the main process."""
        self._memory[0] = _BUSY

    def fill(self) -> npt.NDArray[np.uint8]:
        """Mark the segment as used by this worker, and return an array of its bytes, uint8 (size,)."""
        base = np.frombuffer(self._memory, np.uint8, self.size, _HEADER)
        self._used = weakref.ref(base)
        return base


@functools.cache
def _can_share() -> bool:
    """Return whether this system has anonymous memory files, and /proc, through which the main process opens them."""
    try:
        descriptor = os.memfd_create("h5pack-probe")
    except (OSError, AttributeError):  # macOS does not have this function; an old kernel or a sandbox refuses it.
        return False
    can_open = os.path.exists(f"/proc/self/fd/{descriptor}")
    os.close(descriptor)
    return can_open


class SharedMemory:
    """The segments of a worker process. A forked or unpickled copy starts without segments."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._segments: list[SharedSegment] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Callable[[], SharedMemory], tuple[()]]:
        return SharedMemory, ()

    def batch(self, shapes: Sequence[Shape], *, share: bool = True) -> list[torch.Tensor]:
        """Return new tensors to fill. A worker gets shared memory if `share` is true and the system supports it."""
        if share and get_worker_info() is not None and _can_share():
            return self.shared_batch(shapes)
        with unfilled_memory():
            return [
                torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device="cpu")
                for shape, dtype in shapes
            ]

    def shared_batch(self, shapes: Sequence[Shape]) -> SharedBatch:
        """Return tensors to fill, in a free segment of shared memory."""
        if self._process != os.getpid():
            self.__init__()  # type: ignore[misc]
        size = max(1, lay_out(shapes)[1])
        with self._lock:
            return SharedBatch(self._free_segment(size), shapes)

    def _free_segment(self, size: int) -> SharedSegment:
        free = [segment for segment in self._segments if segment.is_free()]
        fitting = [segment for segment in free if size <= segment.size <= 2 * size] or [SharedSegment(size)]
        # Drop all other free segments: they have the wrong size, or there are more than needed now.
        kept = fitting[: 1 + _SPARE]
        used = [segment for segment in self._segments if segment not in free and segment.state != _FORKED]
        self._segments = used + kept
        return kept[0]


class SharedBatch(list[torch.Tensor]):
    """The tensors of one batch, in a `SharedSegment`. The main process receives them as a plain list."""

    def __init__(self, segment: SharedSegment, shapes: Sequence[Shape]) -> None:
        self._segment, self._shapes = segment, shapes
        super().__init__(_tensors(segment.fill(), shapes))
        self._signatures = [_signature(tensor) for tensor in self]

    def reduced(self, tensors: list[torch.Tensor]) -> Any:
        """Mark the segment as sent; return the function and arguments that recreate the tensors in the main process.

        Return None if `tensors` are not the unchanged tensors of this batch, because one was replaced or reshaped.
        Also return None if the segment was sent before, and the main process or a forked child may still use it.
        """
        if self._segment.state != _FREE or [_signature(tensor) for tensor in tensors] != self._signatures:
            return None
        self._segment.send()
        return _receive, (os.getpid(), self._segment.descriptor, self._shapes)


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a value that changes if the tensor's memory, dtype, shape or strides change."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _tensors(base: npt.NDArray[np.uint8], shapes: Sequence[Shape]) -> list[torch.Tensor]:
    offsets, _ = lay_out(shapes)
    return [
        torch.from_numpy(np.ndarray(shape, dtype, base, offset))
        for (shape, dtype), offset in zip(shapes, offsets, strict=True)
    ]


class _Forks:
    """The number of forks that this process has begun, plus the number of forks that have returned."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


_forks = _Forks()
# Count before and after each fork, because another thread may receive a batch after the call of `before`, but before
# the fork itself.
os.register_at_fork(before=_forks.add, after_in_parent=_forks.add)


def _receive(process: int, descriptor: int, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Map a worker's segment in the main process, and return the tensors of the batch."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise LoaderError(
            f"a worker's batch cannot be opened at {path} ({error.strerror}): the worker died, or this process has "
            "too many open files (raise the limit of 'ulimit -n'), or this system does not let a process open the "
            "files of another process (give the DataLoader a collate_fn that returns default_collate(list(samples)))"
        ) from error
    try:
        memory = mmap.mmap(opened, 0)
    finally:
        os.close(opened)
    base = np.frombuffer(memory, np.uint8, len(memory) - _HEADER, _HEADER)
    owner, forks = os.getpid(), _forks.count

    def release() -> None:
        # The garbage collector may call this, so take no lock. In a forked child, do not change the byte, because the
        # parent may still use the segment.
        if os.getpid() == owner:
            memory[0] = _FREE if forks == _forks.count else _FORKED

    weakref.finalize(base, release).atexit = False
    return _tensors(base, shapes)
