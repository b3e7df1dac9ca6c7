"""The samples of one batch, read when they are looked at.

torch's ``default_collate`` goes by the first sample's type, and lets a type say how its batches are collated
(``default_collate_fn_map``). So a batch that nobody has looked at begins with a sample of a type of its own, by which a
DataLoader gets the tensors that the rows were read into, without stacking copies of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import _pytree as pytree
from torch.utils.data._utils import collate as torch_collate

from h5pack.errors import SizesDifferError
from h5pack.feed.shared import MarkedTensor, SharedBatch


class BatchSource(Protocol):
    """What reads a batch."""

    def read_batch(self, rows: npt.NDArray[np.int64]) -> list[torch.Tensor]:
        """The tensors of a batch, each (n, ...), as ``default_collate`` makes them."""

    def split_batch(self, batch: list[torch.Tensor], rows: npt.NDArray[np.int64]) -> list[Any]:
        """Samples over the memory of the first rows of a batch."""


class FirstSample(tuple[Any, ...]):
    """The first sample of a batch, where a sample has several parts; copies of it are ordinary tuples."""

    def __reduce__(self) -> Any:
        return tuple, (list(self),)

    def __copy__(self) -> tuple[Any, ...]:
        return tuple(self)


class FirstTensor(MarkedTensor):
    """The first sample of a batch, where a sample is one tensor."""


class SampleBatch(Sequence[Any]):
    """Samples of known rows, as a sequence; ``list`` makes a list of it.

    Nothing is read until the first sample is asked for, or the batch.

    Parameters
    ----------
    rows : ndarray
        int64, (n,): rows of the file.
    source : BatchSource
    load : callable, optional
        Gives the samples of rows each by itself, where they differ in size and so make no batch.
    """

    def __init__(
        self,
        rows: npt.NDArray[np.int64],
        source: BatchSource,
        load: Callable[[npt.NDArray[np.int64]], list[Any]] | None = None,
    ) -> None:
        self.rows = rows
        self._source = source
        self._load = load
        self._differ = False
        self._batch: list[torch.Tensor] | None = None
        self._first: Any = None
        self._samples: list[Any] | None = None

    def comes_from(self, source: BatchSource) -> bool:
        """Whether it is `source` that reads it; the rows of another dataset are others."""
        return self._source is source

    @property
    def untouched(self) -> bool:
        """Whether nobody has samples of it, but perhaps the first, to look at."""
        return self._samples is None

    def collate(self) -> list[torch.Tensor] | torch.Tensor:
        """The tensors of the batch, for the caller to keep, or the one tensor: another call reads the rows again."""
        batch, self._batch = self._batch, None
        if batch is None or self._samples is not None:
            batch = self._source.read_batch(self.rows)
        if len(batch) > 1:
            return batch
        return batch.single() if isinstance(batch, SharedBatch) else batch[0]

    def samples(self) -> list[Any]:
        """The samples, read once."""
        if self._samples is None:
            self._samples = self._take(self.rows)
        return self._samples

    def _take(self, rows: npt.NDArray[np.int64]) -> list[Any]:
        """Samples of the first rows: over the batch's memory, or each by itself."""
        if self._load is None:
            return self._source.split_batch(self._read(), rows)
        if not self._differ:
            try:
                return self._source.split_batch(self._read(), rows)
            except SizesDifferError:
                self._differ = True
        return self._load(rows)

    def _read(self) -> list[torch.Tensor]:
        if self._batch is None:
            self._batch = self._source.read_batch(self.rows)
        return self._batch

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if index != 0 or not len(self):
            return self.samples()[index]
        if self._first is None:
            if self._samples is None:
                (first,) = self._take(self.rows[:1])
            else:
                first = self._samples[0]
            alone = isinstance(first, torch.Tensor)
            self._first = first.as_subclass(FirstTensor) if alone else FirstSample(first)
        return self._first

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples())


def _collate(batch: Sequence[Any], *, collate_fn_map: dict[Any, Any] | None = None) -> Any:
    """How torch collates what begins with a first sample: a batch, or a list of one's own."""
    usual = collate_fn_map is not None and collate_fn_map.get(torch.Tensor) is torch_collate.collate_tensor_fn
    if usual and isinstance(batch, SampleBatch) and batch.untouched:
        return batch.collate()
    first = batch[0]
    first = first.plain() if isinstance(first, FirstTensor) else tuple(first)
    return torch_collate.collate([first, *batch[1:]], collate_fn_map=collate_fn_map)


torch_collate.default_collate_fn_map.update({FirstSample: _collate, FirstTensor: _collate})

with contextlib.suppress(AttributeError, ValueError):
    # torch's trees, on which torchvision's transforms go, would take an unknown type for a leaf.
    pytree.register_pytree_node(FirstSample, lambda sample: (list(sample), None), lambda parts, _: tuple(parts))
