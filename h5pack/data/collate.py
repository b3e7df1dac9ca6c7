"""Collating a DataLoader's batches without copies: `SampleBatch`, whose samples are read on first access.

torch's ``default_collate`` chooses a collate function by the type of the first sample (``default_collate_fn_map``).
The first sample of a `SampleBatch` therefore has a special type, whose collate function returns the tensors that the
rows were read into, instead of stacking copies of the samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils import collate as torch_collate

from h5pack.data.buffers import MarkedTensor, SharedBatch
from h5pack.data.iteration import Closeable
from h5pack.errors import SizesDifferError


class BatchSource(Closeable, Dataset[Any]):
    """Base class of datasets that can read whole batches."""

    def collate(self, samples: Sequence[Any]) -> Any:
        """Collate samples as torch's ``default_collate`` does, but read the rows directly into the batch.

        In a worker process the batch is in shared memory that is reused once the main process has released it, so
        sending a batch neither copies it nor allocates new memory. A DataLoader without a ``collate_fn`` collates in
        the same way. With `transform` or `target_transform`, or for samples that are not from this dataset, this is the
        same as ``default_collate``.

        Returns
        -------
        list of Tensor, or Tensor
            The images of the stored shape and dtype, (n, ...); the labels, int64 (n,) if integers, else of the stored
            dtype; the fields; the row numbers in the files, int64 (n,). A single tensor if there are only images.
        """
        if isinstance(samples, SampleBatch) and samples.comes_from(self):
            return samples.collate()
        return default_collate(list(samples))

    def read_batch(self, rows: npt.NDArray[np.int64]) -> list[torch.Tensor]:
        """Return the tensors of a batch, each (n, ...). In a worker they are in shared memory."""
        raise NotImplementedError

    def split_batch(self, batch: list[torch.Tensor], rows: npt.NDArray[np.int64]) -> list[Any]:
        """Return the first ``len(rows)`` samples of a batch; their tensors share the batch's memory."""
        raise NotImplementedError


class FirstSample(tuple[Any, ...]):
    """The type of a batch's first sample if samples are tuples. A copied or unpickled one is an ordinary tuple."""

    def __reduce__(self) -> Any:
        return tuple, (list(self),)

    def __copy__(self) -> tuple[Any, ...]:
        return tuple(self)


class FirstTensor(MarkedTensor):
    """The type of a batch's first sample if each sample is a single tensor."""


class SampleBatch(Sequence[Any]):
    """A sequence of samples that are read together on first access or by `collate`.

    `rows`, int64 (n,), are passed to ``source.read_batch``: row numbers in a file, or indices of a `ConcatPack`. If the
    images differ in size, so that one tensor cannot hold them, the samples are read individually by `load`.
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
        """Return whether `source` is the dataset that this batch reads from, so that it may collate the batch."""
        return self._source is source

    @property
    def untouched(self) -> bool:
        """Whether no sample other than the first has been accessed."""
        return self._samples is None

    def collate(self) -> list[torch.Tensor] | torch.Tensor:
        """Return the tensors of the batch, or its only tensor. The caller owns them, so a second call reads again."""
        batch, self._batch = self._batch, None
        if batch is None or self._samples is not None:
            batch = self._source.read_batch(self.rows)
        if len(batch) > 1:
            return batch
        return batch.single() if isinstance(batch, SharedBatch) else batch[0]

    def samples(self) -> list[Any]:
        """Return the samples, which are read on the first call only."""
        if self._samples is None:
            self._samples = self._load_samples(self.rows)
        return self._samples

    def _load_samples(self, rows: npt.NDArray[np.int64]) -> list[Any]:
        """Return the samples of `rows`, the first rows of the batch: views of its tensors, or what `load` returns."""
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

    def __getitem__(self, index: Any) -> Any:
        if index != 0 or not len(self):
            return self.samples()[index]
        if self._first is None:
            first = (self._samples or self._load_samples(self.rows[:1]))[0]
            alone = isinstance(first, torch.Tensor)
            self._first = first.as_subclass(FirstTensor) if alone else FirstSample(first)
        return self._first

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples())


def _collate(batch: Sequence[Any], *, collate_fn_map: dict[Any, Any] | None = None) -> Any:
    """Collate a batch whose first sample is a `FirstSample` or `FirstTensor`.

    `batch` is a `SampleBatch`, or a list of the samples of a `SampleBatch`.
    """
    usual = collate_fn_map is not None and collate_fn_map.get(torch.Tensor) is torch_collate.collate_tensor_fn
    if usual and isinstance(batch, SampleBatch) and batch.untouched:
        return batch.collate()
    first = batch[0]
    first = first.plain() if isinstance(first, FirstTensor) else tuple(first)
    return torch_collate.collate([first, *batch[1:]], collate_fn_map=collate_fn_map)


# Private API: torch documents default_collate_fn_map, but exports it only from torch.utils.data._utils.collate.
torch_collate.default_collate_fn_map.update({FirstSample: _collate, FirstTensor: _collate})

with contextlib.suppress(AttributeError, ValueError):
    # torchvision's transforms use torch's pytrees, so they would not find the tensors in an unregistered type.
    # Private API: torch.utils._pytree has no public counterpart for registering a container.
    pytree.register_pytree_node(FirstSample, lambda sample: (list(sample), None), lambda parts, _: tuple(parts))
