"""`ConcatPack`: several datasets, end to end, as one map-style torch dataset."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate

from h5pack.errors import OptionsError
from h5pack.feed.dataset import H5Dataset, is_class_label
from h5pack.feed.sample_batch import SampleBatch
from h5pack.feed.shared import SharedMemory

Rows = npt.NDArray[np.int64]


class ConcatPack(Dataset[Any]):
    """Several datasets, one after the other: the index of a sample is its dataset's offset plus its index there.

    Parameters
    ----------
    datasets : sequence of H5Dataset
        Whose samples have the same parts: images of one shape and dtype, labels or none, and so on.

    Attributes
    ----------
    datasets : tuple of H5Dataset
    offsets : ndarray
        int64, (n + 1,): the index at which each dataset begins, and the number of samples.

    Raises
    ------
    OptionsError
        If there is no dataset, one is no H5Dataset, or two of them do not go together.
    """

    def __init__(self, datasets: Sequence[H5Dataset]) -> None:
        self.datasets = tuple(datasets)
        if not self.datasets:
            raise OptionsError("a ConcatPack of no datasets; give one or more")
        for dataset in self.datasets:
            if not isinstance(dataset, H5Dataset):
                raise OptionsError(f"a ConcatPack is made of H5Datasets, not of a {type(dataset).__name__}; give those")
            _require_alike(self.datasets[0], dataset)
        self.offsets: Rows = np.cumsum([0, *map(len, self.datasets)])
        self._shared = SharedMemory()
        self._plain = all(one.transform is None and one.target_transform is None for one in self.datasets)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __getitem__(self, index: int) -> Any:
        """One sample; a negative index counts from the end.

        Raises
        ------
        IndexError
            If there is no such sample.
        """
        number = self._indices([index])
        owner = int(self._owners(number)[0])
        return self.datasets[owner][int(number[0] - self.offsets[owner])]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Samples in the order asked for; those of a dataset are read together."""
        numbers = self._indices(indices)
        if self._plain:
            return SampleBatch(numbers, self)
        samples: list[Any] = [None] * len(numbers)
        for dataset, places, rows in self._groups(numbers):
            found = dataset.__getitems__((rows - dataset.first_row).tolist())
            for place, sample in zip(places.tolist(), found, strict=True):
                samples[place] = sample
        return samples

    def collate(self, samples: Sequence[Any]) -> Any:
        """Batch samples as ``default_collate`` does, without stacking them one by one.

        Returns
        -------
        list of Tensor, or Tensor
            As of `H5Dataset.collate`; with row numbers, those are of each sample's own file.
        """
        if isinstance(samples, SampleBatch) and samples.comes_from(self):
            return samples.collate()
        return default_collate(list(samples))

    def read_batch(self, indices: Rows) -> list[torch.Tensor]:
        """The tensors of samples, each (n, ...)."""
        batch: list[torch.Tensor] = []
        for dataset, places, rows in self._groups(indices):
            # A part of the batch, which is copied here.
            parts = dataset.read_batch(rows, share=False)
            if not batch:
                shapes = [((len(indices), *part.shape[1:]), part.numpy().dtype.str) for part in parts]
                batch = self._shared.batch(shapes)
            for whole, part in zip(batch, parts, strict=True):
                whole.numpy()[places] = part.numpy()
        return batch or self.datasets[0].read_batch(indices)

    def split_batch(self, batch: list[torch.Tensor], indices: Rows) -> list[Any]:
        """Samples over the memory of the first ``len(indices)`` rows of a batch."""
        # What a dataset makes of a part depends on its dtype only, and row numbers are in the batch already.
        rows = batch[-1].numpy()[: len(indices)] if self.datasets[0].with_rows else indices
        return self.datasets[0].split_batch(batch, rows)

    def stats(self) -> list[Any]:
        """What this process has read so far of each dataset."""
        return [dataset.stats() for dataset in self.datasets]

    def _indices(self, indices: Sequence[int]) -> Rows:
        numbers = np.array([operator.index(index) for index in indices], np.int64)
        wrong = np.flatnonzero((numbers < -len(self)) | (numbers >= len(self)))
        if len(wrong):
            raise IndexError(f"index {indices[int(wrong[0])]} of {len(self)} samples; use -{len(self)} to one below it")
        numbers[numbers < 0] += len(self)
        return numbers

    def _owners(self, indices: Rows) -> Rows:
        """The number of each sample's dataset."""
        return np.searchsorted(self.offsets, indices, "right") - 1

    def _groups(self, indices: Rows) -> Iterator[tuple[H5Dataset, Rows, Rows]]:
        """Each dataset that is asked, which places its samples have, and their rows in the file."""
        owners = self._owners(indices)
        for owner in np.unique(owners).tolist():
            places = np.flatnonzero(owners == owner)
            dataset = self.datasets[owner]
            yield dataset, places, indices[places] - self.offsets[owner] + dataset.first_row


def _require_alike(one: H5Dataset, other: H5Dataset) -> None:
    """Raise an error that names both, if a sample of one has other parts than one of the other."""
    for what, mine, theirs in zip(
        ("images", "labels", "fields", "row numbers"), _parts(one), _parts(other), strict=True
    ):
        if mine != theirs:
            raise OptionsError(
                f"{one.path} and {other.path} do not go together: {what} {mine or 'none'} and {theirs or 'none'}; "
                "convert or open them alike"
            )


def _parts(dataset: H5Dataset) -> tuple[str, str, str, str]:
    """Shape and dtype of each part of a batch, in words."""
    words = {}
    for name in dataset.names:
        index = dataset.engine.indexes[name]
        dtype = "whole numbers" if name == dataset.label_name and is_class_label(index) else str(index.native_dtype)
        words[name] = f"{index.row_shape} {dtype}"
    images = words.pop(dataset.names[0])
    labels = words.pop(dataset.label_name, "") if dataset.label_name is not None else ""
    return images, labels, ", ".join(words.values()), "with" if dataset.with_rows else ""
