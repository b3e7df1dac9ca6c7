"""Batches that a DataLoader's worker hands to the main process, in shared memory that is used again.

torch makes a new piece of shared memory for every tensor that crosses processes. Its pages are zeroed and mapped at
their first touch, which costs four times the copy into it (measured: 14 ms against 3 ms for 30 MB). Here a worker owns
a few *segments* (anonymous memory files), each with a page in front whose first byte says whether the main process is
done with it. The main process maps a segment for each batch, and writes that byte when the batch's last tensor is gone.
A segment is filled again only when that byte is there, and no array over it is left in the worker.

Where a batch was changed on its way (a collate function of one's own around this one), its tensors are ordinary ones,
which torch copies.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from h5pack.errors import LoaderError
from h5pack.feed.buffers import Shape, lay_out

_HEADER = mmap.PAGESIZE
_FREE, _BUSY = 0, 1
_SPARE = 3
"""Free segments that a worker keeps: as many batches as it is usually ahead."""

_watched: dict[int, weakref.ref[Any]] = {}
_numbers = itertools.count()


class Segment:
    """A piece of shared memory of one worker.

    Parameters
    ----------
    size : int
        Bytes, without the header.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent = False
        self._used: weakref.ref[Any] | None = None
        try:
            self.descriptor = os.memfd_create("h5pack-batch", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, _HEADER + size)
            self._memory = mmap.mmap(self.descriptor, _HEADER + size)
        except OSError as error:
            raise LoaderError(
                f"no shared memory for a batch of {size:,} bytes ({error.strerror}); hold fewer batches at a time, or "
                "raise the limits on open files (ulimit -n) and shared memory"
            ) from error

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def is_free(self) -> bool:
        """Whether nobody looks at it, here or in the main process."""
        here = self._used is not None and self._used() is not None
        return not here and not (self.sent and self._memory[0] == _BUSY)

    def send(self) -> None:
        """Say that the main process will have it."""
        self.sent = True
        self._memory[0] = _BUSY

    def fill(self) -> npt.NDArray[np.uint8]:
        """Begin to use it; an array over its bytes."""
        self.sent = False
        self._memory[0] = _BUSY
        base = np.frombuffer(self._memory, np.uint8, self.size, _HEADER)
        self._used = weakref.ref(base)
        return base


class SharedMemory:
    """A worker's segments.

    They are the process's own: neither a fork nor a pickle takes them along.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._segments: list[Segment] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Callable[[], SharedMemory], tuple[()]]:
        return SharedMemory, ()

    def batch(self, shapes: Sequence[Shape], *, share: bool = True) -> list[torch.Tensor]:
        """Tensors to fill: of a worker in shared memory, where that is asked for and can be had; else ordinary ones."""
        if share and get_worker_info() is not None and can_share():
            return self.take(shapes)
        return [torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype) for shape, dtype in shapes]

    def take(self, shapes: Sequence[Shape]) -> SharedBatch:
        """A batch of tensors to fill.

        Parameters
        ----------
        shapes : list of (shape, dtype)
        """
        if self._process != os.getpid():
            self.__init__()  # type: ignore[misc]
        size = max(1, lay_out(shapes)[1])
        with self._lock:
            return SharedBatch(self._free_segment(size), shapes)

    def _free_segment(self, size: int) -> Segment:
        free = [segment for segment in self._segments if segment.is_free()]
        fitting = [segment for segment in free if size <= segment.size <= 2 * size] or [Segment(size)]
        # Some more came of batches of another size, or of many that were held at a time.
        kept = fitting[: 1 + _SPARE]
        self._segments = [segment for segment in self._segments if segment not in free] + kept
        return kept[0]


class SharedBatch(list[torch.Tensor]):
    """The tensors of one batch, over a segment; the main process gets a list, or the one tensor of a batch of one."""

    def __init__(self, segment: Segment, shapes: Sequence[Shape]) -> None:
        self._segment, self._shapes = segment, shapes
        super().__init__(_tensors(segment.fill(), shapes))
        self._looks = [_look(tensor) for tensor in self]

    def __reduce__(self) -> Any:
        return self.reduced(list(self), single=False) or (list, (list(self),))

    def __copy__(self) -> list[torch.Tensor]:
        return list(self)

    def __deepcopy__(self, memo: Any) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self]

    def reduced(self, tensors: list[torch.Tensor], *, single: bool) -> Any:
        """How pickle rebuilds it in the main process; None where it was changed, or is on its way already."""
        if self._segment.sent or [_look(tensor) for tensor in tensors] != self._looks:
            return None
        self._segment.send()
        return _received, (os.getpid(), self._segment.descriptor, self._shapes, single)

    def single(self) -> torch.Tensor:
        """The one tensor of a batch of one."""
        tensor = self[0].as_subclass(_SingleTensor)
        tensor.batch = self
        return tensor


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """By which a tensor over other memory, or of another shape, is told from the one that was made."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class MarkedTensor(torch.Tensor):
    """A tensor with a type of its own; copies of it, and what is computed from it, are ordinary ones."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def plain(self) -> torch.Tensor:
        """The same memory as an ordinary tensor."""
        return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _same, (self.plain(),)

    def __copy__(self) -> torch.Tensor:
        return self.plain()

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.plain().clone()


class _SingleTensor(MarkedTensor):
    """A tensor that crosses to the main process as its segment does."""

    batch: SharedBatch

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.batch.reduced([self], single=True) or super().__reduce_ex__(protocol)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def can_share() -> bool:
    """Whether the system has what this needs."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def _tensors(base: npt.NDArray[np.uint8], shapes: Sequence[Shape]) -> list[torch.Tensor]:
    offsets, _ = lay_out(shapes)
    return [
        torch.from_numpy(np.ndarray(shape, dtype, base, offset))
        for (shape, dtype), offset in zip(shapes, offsets, strict=True)
    ]


def _received(process: int, descriptor: int, shapes: Sequence[Shape], single: bool) -> Any:
    """A worker's batch, in the main process."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise LoaderError(
            f"a worker's batch cannot be reached at {path} ({error.strerror}): the worker died, or processes may not "
            "see each other here; in the latter case give the DataLoader a collate_fn that returns "
            "default_collate(list(samples))"
        ) from error
    try:
        memory = mmap.mmap(opened, 0)
    finally:
        os.close(opened)
    base = np.frombuffer(memory, np.uint8, len(memory) - _HEADER, _HEADER)
    number, owner = next(_numbers), os.getpid()

    def done(_: object) -> None:
        # It may run inside the garbage collector, so no lock; and in a forked child, whose parent still looks at it.
        if os.getpid() == owner:
            memory[0] = _FREE
        _watched.pop(number, None)

    _watched[number] = weakref.ref(base, done)
    tensors = _tensors(base, shapes)
    return tensors[0] if single else tensors
