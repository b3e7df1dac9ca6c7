"""`H5Dataset`: the rows of an HDF5 file as a map-style torch dataset."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate

from h5pack import schema
from h5pack.errors import OptionsError, PackFormatError
from h5pack.feed.sample_batch import SampleBatch
from h5pack.feed.shared import SharedMemory
from h5pack.read.encoded import holds_encoded
from h5pack.read.engine import Engine
from h5pack.read.pack import checksums_of, read_pack
from h5pack.read.stats import ReadStats


class H5Dataset(Dataset[Any]):
    """Samples out of an HDF5 file: ``(image, label, *fields, row)``, or as many of these as it has.

    Works with fork, spawn and forkserver workers: the file is opened on first use in each process, and the dataset
    owns no thread. Batches are fetched in one go (``__getitems__``), rows come straight from the page cache where the
    file allows it, and through the HDF5 library, with a line in the log, where it does not.

    Parameters
    ----------
    path : path
        A pack, or any HDF5 file with a dataset whose axis 0 is the sample: of numbers, or of encoded images (the bytes
        of a JPEG, PNG or other file in each row of variable-length uint8), which are decoded to RGB (H, W, 3).
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
    fields : sequence of str
        Paths of further datasets with a row for each image; their rows follow the label, as tensors.
    with_rows : bool
        End each sample with the number of its row in the file, an int.
    check : bool
        Compare each row that is read with its stored checksum.

    Attributes
    ----------
    classes : tuple of str or None
        Names of the values of an integer label.
    columns : tuple of str or None
        Names of the columns of a label table.
    mean, std : ndarray or None
        float64, (C,), in 0..1: the pack's channel statistics.
    names : tuple of str
        The datasets of a sample: the images, the labels, the fields.
    label_name : str or None
        Which of them holds the labels.
    first_row : int
        Row of the file that is sample 0.
    unit_rows : int
        Rows a chunk: what a chunk-aware sampler keeps together.

    Raises
    ------
    PackFormatError
        If the file, a dataset or the split is not there, or the file is damaged.
    IncompletePackError
        If the pack's conversion did not finish.
    OptionsError
        If `check` is asked for and there are no checksums.

    Notes
    -----
    Without `transform` an image is a uint8 tensor as stored, (H, W, C) or (C, H, W). Encoded images may differ in size:
    a sample, or what `transform` is called with, has its own; a batch of several sizes is an error. A label is an int;
    a tensor () of its dtype where it is no whole number; a tensor (K,) where the file holds a table.
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
        fields: Sequence[str] = (),
        with_rows: bool = False,
        check: bool = False,
    ) -> None:
        if isinstance(fields, str):
            raise OptionsError(f"fields is the text {fields!r}; give a sequence of dataset names")
        pack = read_pack(path, images, labels, fields)
        self.path = pack.path
        self.split = split
        self.transform = transform
        self.target_transform = target_transform
        self.classes = pack.classes
        self.columns = pack.columns
        self.mean = pack.mean
        self.std = pack.std
        self.with_rows = with_rows
        self.check = check
        self.names = tuple(name for name in pack.indexes if not name.startswith(f"{schema.CHECKSUMS}/"))
        self.label_name = pack.labels
        self._channels_first = pack.layout == "nchw"
        if check and checksums_of(self.names[0]) not in pack.indexes:
            raise OptionsError(f"{pack.path}: it has no checksums of {self.names[0]!r}; leave check out")
        self._shared = SharedMemory()
        self.engine = Engine(pack.path, pack.identity, pack.indexes)
        self.first_row, stop = 0, pack.indexes[self.names[0]].rows
        if split is not None:
            if split not in pack.splits:
                known = ", ".join(repr(name) for name in pack.splits) or "none"
                raise PackFormatError(f"{pack.path}: no split {split!r}; its splits are {known}")
            self.first_row, stop = pack.splits[split]
        self._encoded = tuple(name for name in self.names if holds_encoded(pack.indexes[name]))
        self._length = stop - self.first_row
        self.unit_rows = pack.indexes[self.names[0]].unit_rows

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        shape = " x ".join(str(size) for size in self.engine.indexes[self.names[0]].row_shape)
        return f"H5Dataset({self.path!r}, split={self.split!r}): {len(self):,} rows of {shape}"

    def __getitem__(self, index: int | slice) -> Any:
        """One sample; negative indices count from the end, and a slice gives a list of samples.

        Raises
        ------
        IndexError
            If there is no such row.
        """
        if isinstance(index, slice):
            return self._load(self._rows(range(*index.indices(len(self)))))
        if self.check or self._encoded:
            return self._load(self._rows([index]))[0]
        row = self._row(index)
        sample = [self._part(name, self.engine.read_one(name, row)) for name in self.names]
        if self.with_rows:
            sample.append(row)
        return sample[0] if len(sample) == 1 else tuple(sample)

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Samples of many indices, read together; torch's DataLoader asks for batches so.

        Without transforms they are read when they are first looked at, so that `collate` can do without samples.
        """
        rows = self._rows(indices)
        return SampleBatch(rows, self, self._load if self._encoded else None) if self._plain else self._load(rows)

    def collate(self, samples: Sequence[Any]) -> Any:
        """Batch samples as torch's ``default_collate`` does, only faster: rows go straight to their place in the batch.

        In a worker process that place is in shared memory, which is used again when the main process is done with the
        batch, so that nothing is copied on the way there, and no fresh memory is needed. A DataLoader without a
        ``collate_fn`` comes here by itself.
        With `transform` or `target_transform`, or samples that come from elsewhere, it is ``default_collate``.

        Returns
        -------
        list of Tensor, or Tensor
            The images as stored, (n, ...); the labels, int64 (n,) for whole numbers, else as stored; the fields; the
            row numbers, int64 (n,).
        """
        if isinstance(samples, SampleBatch) and samples.comes_from(self):
            return samples.collate()
        return default_collate(list(samples))

    def read_batch(self, rows: npt.NDArray[np.int64], *, share: bool = True) -> list[torch.Tensor]:
        """The tensors of rows of the file, each (n, ...), as `collate` gives them; of a worker, in shared memory."""
        shapes: list[tuple[tuple[int, ...], str]] = []
        for name in self.names:
            index = self.engine.indexes[name]
            whole = name == self.label_name and is_class_label(index)
            shapes.append(((len(rows), *index.row_shape), "int64" if whole else index.native_dtype.str))
        if self.with_rows:
            shapes.append(((len(rows),), "int64"))
        batch = self._shared.batch(shapes, share=share)
        for name, tensor in zip(self.names, batch, strict=False):
            out = tensor.numpy()
            if out.dtype == self.engine.indexes[name].native_dtype:
                self.read_rows(name, rows, out)
            else:
                out[...] = self.read_rows(name, rows)
        if self.with_rows:
            batch[-1].numpy()[...] = rows
        return batch

    def split_batch(self, batch: list[torch.Tensor], rows: npt.NDArray[np.int64]) -> list[Any]:
        """Samples over the memory of the first ``len(rows)`` rows of a batch."""
        return self._samples([list(tensor.numpy()[: len(rows)]) for tensor in batch[: len(self.names)]], rows)

    def _samples(self, columns: list[list[Any]], rows: npt.NDArray[np.int64]) -> list[Any]:
        """Samples out of the rows of each dataset."""
        if self.with_rows:
            columns.append(rows.tolist())
        samples = []
        for values in zip(*columns, strict=True):
            sample = [self._part(name, value) for name, value in zip(self.names, values, strict=False)]
            sample += values[len(self.names) :]
            samples.append(sample[0] if len(sample) == 1 else tuple(sample))
        return samples

    def read_rows(
        self, name: str, rows: npt.NDArray[np.int64], out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """Rows of one of the datasets in `names`, checked where the dataset checks.

        Parameters
        ----------
        name : str
        rows : ndarray
            int64, (n,): rows of the file, in any order.
        out : ndarray, optional
            (n, ...), in the machine's byte order: where they go. Rows that are encoded images may go to an array of
            objects, (n,), each as an array uint8 (h, w, 3) of its own size.
        """
        values = self.engine.read(name, rows, out)
        if self.check:
            self.check_rows(name, rows, values)
        return values

    def check_rows(self, name: str, rows: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        """Compare rows that were read with their stored checksums, where the file has some for this dataset.

        Raises
        ------
        DamagedRowsError
        """
        if checksums_of(name) in self.engine.indexes:
            self.engine.check(name, checksums_of(name), rows, values)

    def stats(self) -> ReadStats:
        """What this process has read so far: rows, chunk hits and misses, bytes, amplification.

        DataLoader workers count for themselves.
        """
        return self.engine.snapshot()

    def close(self) -> None:
        """Close the file in this process; the next read opens it again."""
        self.engine.close()

    def _row(self, index: int) -> int:
        """Row of the file of an index into this dataset."""
        place = operator.index(index)
        if not -self._length <= place < self._length:
            raise IndexError(f"{self.path}: index {index} of {self._length} rows; use -{self._length} to one below it")
        return self.first_row + place % self._length

    def _rows(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """Rows of the file of indices into this dataset."""
        try:
            rows = np.fromiter(map(operator.index, indices), np.int64, len(indices))
        except OverflowError:
            far = self._length
            rows = np.array([min(max(operator.index(index), -far - 1), far) for index in indices])
        wrong = np.flatnonzero((rows < -self._length) | (rows >= self._length))
        if len(wrong):
            raise IndexError(
                f"{self.path}: index {indices[int(wrong[0])]} of {self._length} rows; use -{self._length} to one below "
                "it"
            )
        rows[rows < 0] += self._length
        rows += self.first_row
        return rows

    @property
    def _plain(self) -> bool:
        return self.transform is None and self.target_transform is None

    def _load(self, rows: npt.NDArray[np.int64]) -> list[Any]:
        if not self._encoded:
            return self.split_batch(self.read_batch(rows, share=False), rows)
        columns = []
        for name in self.names:
            # Objects are images of any size, each in memory of its own.
            out = np.empty(len(rows), object) if name in self._encoded else None
            columns.append(list(self.read_rows(name, rows, out)))
        return self._samples(columns, rows)

    def _part(self, name: str, value: Any) -> Any:
        if name == self.names[0]:
            if self.transform is None:
                return torch.from_numpy(np.asarray(value))
            return self.transform(torch.from_numpy(value) if self._channels_first else value)
        if name != self.label_name:
            return torch.from_numpy(np.asarray(value))
        whole = np.ndim(value) == 0 and value.dtype.kind in "biu"
        label = value.item() if whole else torch.from_numpy(np.asarray(value))
        return label if self.target_transform is None else self.target_transform(label)


def is_class_label(index: Any) -> bool:
    """Whether a dataset of labels holds one whole number a row, which a batch gives as int64."""
    return not index.row_shape and index.dtype.kind in "iu"
