"""Collating a DataLoader's batches without copies: `SampleBatch`, whose samples are read on first access.

torch's ``default_collate`` chooses a collate function by the type of the first sample (``default_collate_fn_map``). The
function for `Sample` returns the tensors that the rows of a `SampleBatch` were read into, instead of stacking samples.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils import collate as torch_collate

from h5pack.data.decoding import NO_KEY, DrawKey, key_of
from h5pack.data.iteration import Closeable
from h5pack.data.samples import Sample, new_batch
from h5pack.errors import SizesDifferError


class BatchSource(Closeable, Dataset[Any]):
    """Base class of datasets that can read whole batches.

    `field_names` are the names of a batch's fields; `is_random` is whether crops of images are random.
    """

    field_names: tuple[str, ...]
    is_random: bool
    _lists: tuple[str, ...]  # names of the fields that are lists in a batch

    def collate(self, samples: Sequence[Any]) -> Any:
        """Collate samples as torch's ``default_collate`` does, but read the rows directly into the batch.

        Fields whose rows differ in length become lists: of tensors (n_i, ...), of str, or of lists of str.

        In a worker process the batch is in shared memory that is reused once the main process has released it, so
        sending a batch neither copies it nor allocates new memory. A DataLoader without a ``collate_fn`` collates in
        the same way. With `transform` or `target_transform`, or for samples that are not from this dataset, this is the
        same as ``default_collate``.

        Returns
        -------
        named tuple of Tensor
            `images`, (n, ...), of the samples' shape and dtype; `labels`, int64 (n,) if integers, else of the stored
            dtype; the fields, by their names; `rows`, the row numbers in the files, int64 (n,).
        """
        if isinstance(samples, SampleBatch) and samples._source is self:
            return samples.collate()
        return default_collate(list(samples))

    def draw_key(self, indices: Sequence[Any]) -> DrawKey:
        """Return the key from which the crops of samples are drawn; `indices` come from a sampler or from a user."""
        return key_of(indices) if self.is_random else NO_KEY

    def read_batch(self, rows: npt.NDArray[np.int64], key: DrawKey = NO_KEY) -> list[torch.Tensor]:
        """Return the tensors of a batch, each (n, ...). In a worker they are in shared memory.

        Random crops are drawn from `key`.
        """
        raise NotImplementedError

    def read_lists(self, rows: npt.NDArray[np.int64], key: DrawKey = NO_KEY) -> list[list[Any]]:
        """Return, for each field that is a list in a batch, its values in `rows`. Random crops are drawn from `key`."""
        raise NotImplementedError

    def arranged(self, values: Sequence[Any], lists: Sequence[Any]) -> Sequence[Any]:
        """Return the values of a batch or a sample in the order of `field_names`.

        For a batch, `values` is the result of `read_batch`, and `lists` the result of `read_lists`. For a sample, each
        element is the value of one row instead.
        """
        if not lists:
            return values
        tensors, others = iter(values), iter(lists)
        return [next(others if name in self._lists else tensors) for name in self.field_names]

    def split_batch(
        self, batch: list[torch.Tensor], rows: npt.NDArray[np.int64], lists: Sequence[list[Any]] = ()
    ) -> list[Any]:
        """Return the first ``len(rows)`` samples of a batch; their tensors share the batch's memory.

        `lists` is what `read_lists` returned for these rows.
        """
        raise NotImplementedError


def positions_of(indices: Sequence[int], count: int, where: str = "") -> npt.NDArray[np.int64]:
    """Return indices into `count` samples as int64, (n,), none negative; raise an IndexError if one is out of range."""
    try:
        numbers = np.fromiter(map(operator.index, indices), np.int64, len(indices))
    except OverflowError:
        numbers = np.array([min(max(operator.index(index), -count - 1), count) for index in indices])
    wrong = np.flatnonzero((numbers < -count) | (numbers >= count))
    if len(wrong):
        raise out_of_range(indices[int(wrong[0])], count, where)
    numbers[numbers < 0] += count
    return numbers


def out_of_range(index: int, count: int, where: str) -> IndexError:
    """Return the error for an index of `count` samples; `where` begins its message."""
    allowed = f"; give {-count} to {count - 1}" if count else ""
    return IndexError(f"{where}index {index} is out of range for {count} samples{allowed}")


class SampleBatch(Sequence[Any]):
    """A sequence of samples that are read together on first access or by `collate`.

    `rows`, int64 (n,), are passed to ``source.read_batch``: row numbers in a file, or indices of a `ConcatPack`. If the
    images differ in size, so that one tensor cannot hold them, ``load(rows, key)`` reads the samples instead. Random
    crops are drawn from `key`.
    """

    def __init__(
        self,
        rows: npt.NDArray[np.int64],
        source: BatchSource,
        load: Callable[[npt.NDArray[np.int64], DrawKey], list[Any]] | None = None,
        key: DrawKey = NO_KEY,
    ) -> None:
        self.rows, self._key = rows, key
        self._source = source
        self._load = load
        self._differ = False
        self._batch: list[torch.Tensor] | None = None
        self._first: Any = None
        self._samples: list[Any] | None = None

    def collate(self) -> Any:
        """Return the batch. The caller owns its tensors, so a second call reads again."""
        batch, self._batch = self._batch, None
        if batch is None or self._samples is not None:
            batch = self._source.read_batch(self.rows, self._key)
        values = self._source.arranged(batch, self._source.read_lists(self.rows, self._key))
        return new_batch(self._source.field_names, values, batch)

    def samples(self) -> list[Any]:
        """Return the samples, which are read on the first call only."""
        if self._samples is None:
            self._samples = self._load_samples(self.rows)
        return self._samples

    def _load_samples(self, rows: npt.NDArray[np.int64]) -> list[Any]:
        """Return the samples of `rows`, the first rows of the batch. They are views of the batch or read by `load`."""
        if self._load is None:
            return self._source.split_batch(self._read(), rows, self._source.read_lists(rows, self._key))
        if not self._differ:
            try:
                return self._source.split_batch(self._read(), rows, self._source.read_lists(rows, self._key))
            except SizesDifferError:
                self._differ = True
        return self._load(rows, self._key)

    def _read(self) -> list[torch.Tensor]:
        if self._batch is None:
            self._batch = self._source.read_batch(self.rows, self._key)
        return self._batch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if index != 0 or not len(self):
            return self.samples()[index]
        if self._first is None:
            self._first = (self._samples or self._load_samples(self.rows[:1]))[0]
        return self._first

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples())


def _collate(batch: Sequence[Any], *, collate_fn_map: dict[Any, Any] | None = None) -> Any:
    """Collate a `SampleBatch` or a list of samples."""
    usual = collate_fn_map is not None and collate_fn_map.get(torch.Tensor) is torch_collate.collate_tensor_fn
    if usual and isinstance(batch, SampleBatch) and batch._samples is None:
        return batch.collate()
    fields, lists = batch[0]._batch_fields, batch[0]._lists
    collated = [
        list(column) if name in lists else torch_collate.collate(column, collate_fn_map=collate_fn_map)
        for name, column in zip(fields, zip(*batch, strict=True), strict=True)
    ]
    return new_batch(fields, collated)


# Private API: torch documents default_collate_fn_map, but exports it only from torch.utils.data._utils.collate.
torch_collate.default_collate_fn_map[Sample] = _collate
