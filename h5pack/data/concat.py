"""`ConcatPack`: several HDF5 files as one map-style torch dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from h5pack.data.buffers import SharedMemory
from h5pack.data.dataset import H5Dataset, batch_fields
from h5pack.data.decoding import NO_KEY, DrawKey, DrawnIndex
from h5pack.data.samples import IMAGES, LABELS, ROWS, BatchSource, SampleBatch, positions_of
from h5pack.errors import OptionsError
from h5pack.system.parameters import invalid, refuse_path

Rows = npt.NDArray[np.int64]


class ConcatPack(BatchSource):
    """Concatenation of several datasets. Sample i of dataset d has the index ``offsets[d] + i``.

    Parameters
    ----------
    datasets : sequence of H5Dataset
        Their images, labels and fields must have the same shapes and dtypes, and all or none must have labels.

    Attributes
    ----------
    datasets : tuple of H5Dataset
    offsets : ndarray
        int64, (n + 1,): the index of each dataset's first sample, followed by the total number of samples.
    is_random : bool
        Whether at least one dataset has random crops.

    Raises
    ------
    OptionsError
        If `datasets` is empty, or contains an object that is not an `H5Dataset`. If two datasets have different fields.
        If two datasets have different names for the same class number or label column. A dataset may have more classes
        than another, as after `h5pack.append`.
    """

    def __init__(self, datasets: Sequence[H5Dataset]) -> None:
        refuse_path("datasets", datasets, "[H5Dataset({}), ...]")
        try:
            given = iter(datasets)
        except TypeError:  # Raised for a tensor without axes, too, which `isinstance` takes for an Iterable.
            raise invalid("datasets", datasets, "give H5Datasets in a list") from None
        self.datasets = tuple(given)
        if not self.datasets:
            raise OptionsError("datasets is empty; give H5Datasets in a list", parameters=("datasets",))
        for dataset in self.datasets:
            refuse_path("datasets", dataset, "[H5Dataset({}), ...]")
            if not isinstance(dataset, H5Dataset):
                raise OptionsError(
                    f"datasets contains a {type(dataset).__name__}; give only H5Datasets", parameters=("datasets",)
                )
            _check_same_fields(self.datasets[0], dataset)
        _check_same_classes(self.datasets)
        self.offsets: Rows = np.cumsum([0, *map(len, self.datasets)])
        self.field_names, self._lists = self.datasets[0].field_names, self.datasets[0]._lists
        self.is_random = any(one.is_random for one in self.datasets)
        self._shared = SharedMemory()

    @property
    def _plain(self) -> bool:
        # Computed on each access, because users may set the transforms of the datasets later.
        return all(one.is_plain for one in self.datasets)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __repr__(self) -> str:
        return f"ConcatPack({list(self.datasets)!r})"

    def close(self) -> None:
        """Close the files in this process; the next read opens them again."""
        for dataset in self.datasets:
            dataset.close()

    def joined(self) -> H5Dataset:
        """Return one `H5Dataset` with all samples in the same order, to give to `H5Loader`.

        Do not read samples from the returned dataset, because it uses the `decode` of the first dataset for all. Only
        `H5Loader` checks that all datasets have the same `decode`.

        Raises
        ------
        OptionsError
            If a dataset has a `transform` or `target_transform`, or is of a subclass with its own ``__getitem__``.
        PackFormatError
            If the files differ in metadata other than the names of classes and columns.
        """
        first, *others = self.datasets
        if not self._plain:
            raise OptionsError(
                "a dataset changes its samples by a transform or a subclass's __getitem__; give the transforms to "
                "H5Loader instead, which transforms batches",
                parameters=("transform", "target_transform"),
            )
        return first.joined_with(others)

    def __getitem__(self, index: int) -> Any:
        """Return one sample; a negative index counts from the end.

        Raises
        ------
        IndexError
            If there is no such sample.
        """
        number = positions_of([index], len(self))
        owner = int(self._owners(number)[0])
        return self.datasets[owner][int(number[0] - self.offsets[owner])]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return the samples at many indices; samples of the same dataset are read together."""
        numbers, key = positions_of(indices, len(self)), self.draw_key(indices)
        return SampleBatch(numbers, self, key) if self._plain else self._load(numbers, key)

    def _load(self, indices: Rows, key: DrawKey) -> list[Any]:
        samples: list[Any] = [None] * len(indices)
        for dataset, positions, inner in self._by_dataset(indices):
            found = dataset.__getitems__(DrawnIndex.of(inner.tolist(), key.at(positions)))
            for position, sample in zip(positions.tolist(), found, strict=True):
                samples[position] = sample
        return samples

    def read_batch(self, indices: Rows, key: DrawKey = NO_KEY) -> list[torch.Tensor]:
        batch: list[torch.Tensor] = []
        for dataset, positions, inner in self._by_dataset(indices):
            # These tensors need no shared memory, because they are copied into `batch` below.
            parts = dataset.read_batch(dataset.file_rows(inner), key.at(positions), share=False)
            if not batch:
                shapes = [((len(indices), *part.shape[1:]), part.numpy().dtype.str) for part in parts]
                batch = self._shared.batch(shapes)
            for whole, part in zip(batch, parts, strict=True):
                whole.numpy()[positions] = part.numpy()
        return batch or self.datasets[0].read_batch(indices)

    def read_lists(self, indices: Rows, key: DrawKey = NO_KEY) -> list[list[Any]]:
        lists: list[list[Any]] = [[None] * len(indices) for _ in self.datasets[0].ragged]
        if lists:
            for dataset, positions, inner in self._by_dataset(indices):
                parts = dataset.read_lists(dataset.file_rows(inner), key.at(positions))
                for whole, part in zip(lists, parts, strict=True):
                    for position, value in zip(positions.tolist(), part, strict=True):
                        whole[position] = value
        return lists

    def split_batch(self, batch: Sequence[Any], indices: Rows, lists: Sequence[list[Any]]) -> list[Any]:
        # Any of the datasets can split the batch, because all have the same fields and dtypes, and no transforms. With
        # `with_rows`, the row numbers are in the last tensor.
        rows = batch[-1].numpy()[: len(indices)] if self.datasets[0].with_rows else indices
        return self.datasets[0].split_batch(batch, rows, lists)

    def stats(self) -> list[Any]:
        """Return statistics of what this process has read, one `ReadStats` per dataset."""
        return [dataset.stats() for dataset in self.datasets]

    def _owners(self, indices: Rows) -> Rows:
        """Return the index in `datasets` of each sample's dataset; int64, (n,)."""
        return np.searchsorted(self.offsets, indices, "right") - 1

    def _by_dataset(self, indices: Rows) -> Iterator[tuple[H5Dataset, Rows, Rows]]:
        """Split `indices` by dataset. Yield (dataset, positions of its samples in `indices`, their indices in it)."""
        owners = self._owners(indices)
        for owner in np.unique(owners).tolist():
            positions = np.flatnonzero(owners == owner)
            yield self.datasets[owner], positions, indices[positions] - self.offsets[owner]


def _check_same_fields(one: H5Dataset, other: H5Dataset) -> None:
    """Raise an OptionsError if images, labels, fields or row numbers of two datasets differ in form or presence."""
    names = ("images", "labels", "fields", "row numbers")
    for what, mine, theirs in zip(names, _field_texts(one), _field_texts(other), strict=True):
        if mine != theirs:
            advice, parameters = "convert and open both with the same parameters", list[str]()
            if what == "images" and _is_encoded(one) and _is_encoded(other) and None in (one.decoder, other.decoder):
                advice, parameters = "give both the same decode, such as RandomResizedCrop(224)", ["decode"]
                if one.decoder is other.decoder:
                    # Packs of the same images may differ in their first image, since packs are shuffled.
                    advice = f"these are the sizes of their first images; {advice}"
            raise OptionsError(
                f"{one.path} and {other.path} differ in {what}: {mine or 'none'} and {theirs or 'none'}; {advice}",
                path=other.path,
                parameters=parameters,
            )


def _check_same_classes(datasets: Sequence[H5Dataset]) -> None:
    """Raise an OptionsError if two datasets have different names for the same class number or label column."""
    # Skip datasets with a `target_transform`, because it may change the class numbers.
    labeled = [one for one in datasets if one.target_transform is None]
    advice, parameters = "open them with a target_transform or labels=None", ("target_transform", "labels=None")
    _require_same_names({one: one.columns or () for one in labeled}, "label column", advice, *parameters)
    advice = f"join them with 'h5pack join', or {advice}"
    _require_same_names({one: one.classes or () for one in labeled}, "class", advice, *parameters)
    for name in dict.fromkeys(name for one in datasets for name in one.field_classes):
        named = {one: one.field_classes.get(name, ()) for one in datasets}
        _require_same_names(named, f"{name!r} class", "leave this field out of fields=", "fields")


def _require_same_names(named: dict[H5Dataset, tuple[str, ...]], what: str, advice: str, *parameters: str) -> None:
    """Raise an OptionsError if two tuples in `named` have different names at the same index.

    `what` says what has these names, such as "class". A tuple may be longer than another.
    """
    if not named:
        return
    longest = max(named, key=lambda one: len(named[one]))
    for other in named:
        for number, (mine, theirs) in enumerate(zip(named[longest], named[other], strict=False)):
            if mine != theirs:
                problem = f"{longest.path} and {other.path} differ in {what} {number}: {mine!r} and {theirs!r}"
                raise OptionsError(f"{problem}; {advice}", path=other.path, parameters=parameters)


def _field_texts(dataset: H5Dataset) -> tuple[str, str, str, str]:
    """Describe a batch's images, labels, fields and row numbers, so that two datasets can be compared."""
    texts = {name: f"{row_shape} {dtype}" for name, row_shape, dtype in batch_fields(dataset)}
    lists = iter([f"{one.kind} {one.data.row_shape} {one.data.native_dtype}" for one in dataset.ragged.values()])
    if dataset.transform is not None and _is_encoded(dataset):
        # Do not compare `row_shape`, which is the shape of row 0 only. Images may differ in size, because a transform
        # can resize them.
        texts[dataset.names[0]] = "encoded images"
    images, labels = texts.pop(dataset.names[0]), texts.pop(dataset.label_name or "", "")
    names, arrays = (name for name in dataset.field_names if name not in (IMAGES, LABELS, ROWS)), iter(texts.values())
    fields = ", ".join(f"{name} {next(lists if name in dataset._lists else arrays)}" for name in names)
    return images, labels, fields, "with_rows=True" if dataset.with_rows else ""


def _is_encoded(dataset: H5Dataset) -> bool:
    return dataset.engine.indexes[dataset.names[0]].is_encoded
