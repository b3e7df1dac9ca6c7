"""`H5Dataset`: the rows of an HDF5 file as a map-style torch dataset."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from h5pack import schema
from h5pack.errors import PackFormatError
from h5pack.read.pack import read_pack
from h5pack.read.reader import H5Reader


class H5Dataset(Dataset[Any]):
    """Samples ``(image, label)``, or ``image`` where there are no labels, out of an HDF5 file.

    Works with fork, spawn and forkserver workers: the file is opened on first use in each process, and the dataset
    owns no thread and no lock. Batches are fetched in one call (``__getitems__``).

    Parameters
    ----------
    path : path
        A pack, or any HDF5 file with a dataset of numbers whose axis 0 is the sample.
    split : str, optional
        One of the file's splits; None: all rows.
    transform : callable, optional
        Called with each image as torchvision's transforms expect it: a uint8 ndarray (H, W, C) where C is stored last
        (``ToTensor`` and ``v2.ToImage`` take it), a tensor (C, H, W) where C is stored first.
    target_transform : callable, optional
        Called with each label.
    images : str
        Path of the dataset of images.
    labels : str or None
        Path of the dataset of labels; None: do without. The default is taken only where the file has it.

    Attributes
    ----------
    classes : tuple of str or None
        Names of the values of an integer label.
    columns : tuple of str or None
        Names of the columns of a label table.
    mean, std : ndarray or None
        float64, (C,), in 0..1: the pack's channel statistics.

    Raises
    ------
    PackFormatError
        If the file, a dataset or the split is not there.
    IncompletePackError
        If the pack's conversion did not finish.

    Notes
    -----
    Without `transform` an image is a uint8 tensor as stored, (H, W, C) or (C, H, W). A label is an int, or a tensor
    (K,) where the file holds a table.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        split: str | None = None,
        *,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        images: str = schema.IMAGES,
        labels: str | None = schema.LABELS,
    ) -> None:
        pack = read_pack(path, images, labels)
        self.path = pack.path
        self.split = split
        self.transform = transform
        self.target_transform = target_transform
        self.classes = pack.classes
        self.columns = pack.columns
        self.mean = pack.mean
        self.std = pack.std
        self._images = images
        self._labels = pack.labels
        self._channels_first = pack.layout == "nchw"
        self._reader = H5Reader(pack)
        self._start, stop = 0, pack.rows
        if split is not None:
            if split not in pack.splits:
                known = ", ".join(repr(name) for name in pack.splits) or "none"
                raise PackFormatError(f"{pack.path}: no split {split!r}; its splits are {known}")
            self._start, stop = pack.splits[split]
        self._length = stop - self._start

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        shape = " x ".join(str(size) for size in self._reader.pack.row_shape)
        return f"H5Dataset({self.path!r}, split={self.split!r}): {len(self):,} rows of {shape}"

    def __getitem__(self, index: int | slice) -> Any:
        """One sample; negative indices count from the end, and a slice gives a list of samples.

        Raises
        ------
        IndexError
            If there is no such row.
        """
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Samples of many indices with one read a dataset; torch's DataLoader calls it with each batch's indices."""
        rows = np.fromiter((self._row(index) for index in indices), np.int64, len(indices))
        # HDF5 is quicker in file order, and neighbours come in one call.
        order = np.argsort(rows, kind="stable")
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        pixels = self._reader.read(self._images, rows[order])
        labels = None if self._labels is None else self._reader.read(self._labels, rows[order])
        return [self._sample(pixels[place, ...], None if labels is None else labels[place]) for place in back.tolist()]

    def _row(self, index: int) -> int:
        number = operator.index(index)
        if not -self._length <= number < self._length:
            raise IndexError(f"{self.path}: index {number} of {self._length} rows; use -{self._length} to one below it")
        return self._start + (number + self._length if number < 0 else number)

    def _sample(self, pixels: npt.NDArray[Any], label: Any) -> Any:
        image: Any = pixels
        if self.transform is None or self._channels_first:
            image = torch.from_numpy(pixels)
        if self.transform is not None:
            image = self.transform(image)
        if label is None:
            return image
        target: Any = torch.from_numpy(label) if np.ndim(label) else label.item()
        return image, target if self.target_transform is None else self.target_transform(target)
