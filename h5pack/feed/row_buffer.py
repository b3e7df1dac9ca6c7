"""Rows of batches in numbered slots, out of which other batches are put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from h5pack.errors import OptionsError
from h5pack.feed.batch_key import EchoedBatch, repeats_of
from h5pack.feed.batch_parts import map_tensors, tensors_of
from h5pack.feed.buffers import BufferPool

Numbers = npt.NDArray[np.int64]

_NUMPY = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_NUMPY |= {torch.float16, torch.float32, torch.float64}
_SPARE = 2
"""Batches' memory that is kept for the next ones: touching fresh memory takes longer than copying into it."""


def rows_in(batch: Any) -> int:
    """How many rows a batch has, all of whose parts are tensors (rows, ...).

    Raises
    ------
    OptionsError
        If it has other parts, or they differ in their rows.
    """
    _require_tensors(batch)
    counts = {tensor.shape[0] if tensor.dim() else None for tensor in tensors_of(batch)}
    if len(counts) != 1 or None in counts:
        raise OptionsError(
            f"a shuffle buffer takes batches of tensors with a row for each sample, and this one's have "
            f"{sorted(map(str, counts))} rows; leave shuffle_buffer out"
        )
    return int(counts.pop() or 0)


def _require_tensors(batch: Any) -> None:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for part in batch:
            _require_tensors(part)
    elif not isinstance(batch, torch.Tensor):
        raise OptionsError(
            f"a shuffle buffer takes batches of tensors, and a part of this one is a {type(batch).__name__}; leave "
            "shuffle_buffer out, or have the loader give tensors alone"
        )


class RowBuffer:
    """Slots for rows, on the device that they come from.

    The rows are copied in and out, so that a batch's memory is free as soon as it was put.

    Parameters
    ----------
    capacity : int
        Slots to have memory for from the start; there are more when more are used.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._template: Any = None
        self._parts: list[torch.Tensor] = []
        self._formats: list[torch.memory_format] = []
        self._pinned: list[bool] = []
        self._pool: BufferPool | None = None
        self._largest = 0
        # Which showing the rows were when they came.
        self._repeats = np.zeros(0, np.int64)

    def put(self, slots: Numbers, batch: Any, rows: Numbers | None = None) -> None:
        """Copy rows of a batch to slots.

        Parameters
        ----------
        slots : ndarray
            int64, (n,).
        batch : Tensor, list, tuple or dict
            Of tensors (rows, ...).
        rows : ndarray, optional
            int64, (n,): which; None: all.

        Raises
        ------
        OptionsError
            If its tensors are of other shapes, types or devices than those before.
        """
        repeats = repeats_of(batch)
        batch = EchoedBatch.plain(batch)
        tensors = [tensor.detach() for tensor in tensors_of(batch)]
        self._fit(batch, tensors, int(slots.max(initial=-1)) + 1)
        for part, tensor in zip(self._parts, tensors, strict=True):
            source = tensor if rows is None else tensor.index_select(0, _index(rows, tensor))
            if part.device.type == "cpu" and part.dtype in _NUMPY:
                # numpy copies whole rows; torch's index_copy_ was 4 to 12 times slower.
                part.numpy()[slots] = source.numpy()
            else:
                part.index_copy_(0, _index(slots, part), source)
        shown = repeats.cpu().numpy() if isinstance(repeats, torch.Tensor) else np.full(rows_in(batch), repeats)
        self._repeats[slots] = shown if rows is None else shown[rows]

    def take(self, slots: Numbers) -> Any:
        """A batch of the rows in slots, in memory of its own, made like the batches that were put."""
        if len(slots) > self._largest:
            self._largest = len(slots)
            self._pool = self._new_pool()
        memory = None if self._pool is None else self._pool.take(len(slots))
        made = []
        for number, (part, layout, pinned) in enumerate(zip(self._parts, self._formats, self._pinned, strict=True)):
            if memory is not None:
                tensor = memory.tensor(str(number))
            else:
                shape = (len(slots), *part.shape[1:])
                tensor = torch.empty(
                    shape, dtype=part.dtype, device=part.device, memory_format=layout, pin_memory=pinned
                )
            made.append(torch.index_select(part, 0, _index(slots, part), out=tensor))
        following = iter(made)
        return map_tensors(self._template, lambda _: next(following))

    def repeats(self, slots: Numbers) -> Numbers:
        """Which showing the rows in slots were when they came; int64, (n,)."""
        return self._repeats[slots]

    def _fit(self, batch: Any, tensors: list[torch.Tensor], slots: int) -> None:
        """Have memory for so many slots."""
        if not self._parts:
            self._formats = [_layout(tensor) for tensor in tensors]
            self._pinned = [tensor.is_pinned() for tensor in tensors]
            self._parts = [tensor.new_empty((0, *tensor.shape[1:])) for tensor in tensors]
            self._template = map_tensors(batch, lambda tensor: tensor.new_empty(0))
        now = [(tensor.shape[1:], tensor.dtype, tensor.device) for tensor in tensors]
        before = [(part.shape[1:], part.dtype, part.device) for part in self._parts]
        if now != before:
            raise OptionsError(
                f"a shuffle buffer takes batches whose tensors are alike, and one has {now} after {before}; leave "
                "shuffle_buffer out"
            )
        if slots > len(self._repeats):
            slots = max(slots, self._capacity)
            for number, (part, layout) in enumerate(zip(self._parts, self._formats, strict=True)):
                grown = torch.empty(
                    (slots, *part.shape[1:]), dtype=part.dtype, device=part.device, memory_format=layout
                )
                grown[: len(part)] = part
                self._parts[number] = grown
            self._repeats = np.concatenate([self._repeats, np.zeros(slots - len(self._repeats), np.int64)])

    def _new_pool(self) -> BufferPool | None:
        """Memory for batches that lie as numpy's arrays do, to be used again and again."""
        plain = zip(self._parts, self._formats, self._pinned, strict=True)
        if not all(
            part.device.type == "cpu"
            and part.dtype in _NUMPY
            and layout is torch.contiguous_format
            and pinned == self._pinned[0]
            for part, layout, pinned in plain
        ):
            return None
        parts = [
            (str(number), tuple(part.shape[1:]), part[:0].numpy().dtype) for number, part in enumerate(self._parts)
        ]
        return BufferPool(parts, self._largest, self._pinned[0], _SPARE)


def _layout(tensor: torch.Tensor) -> torch.memory_format:
    """How a tensor lies in memory, as far as it matters to a network."""
    for dimensions, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == dimensions and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous():
            return layout
    return torch.contiguous_format


def _index(numbers: Numbers, beside: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(numbers).to(beside.device, non_blocking=True)
