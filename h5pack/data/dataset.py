"""`H5Dataset`: the rows of one or more HDF5 files as a map-style torch dataset."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from h5pack.data.buffers import SharedMemory
from h5pack.data.decoding import NO_KEY, CropDecoder, DrawKey, can_crop
from h5pack.data.samples import (
    BatchSource,
    SampleBatch,
    name_fields,
    out_of_range,
    positions_of,
    read_small_rows,
    sample_type,
    split_list,
)
from h5pack.errors import OptionsError, PackFormatError
from h5pack.format import schema
from h5pack.format.fields import RaggedRows
from h5pack.images.crops import DecodeCrop, RandomResizedCrop
from h5pack.images.decode import image_of
from h5pack.read.description import FileDescription, describe_file, require_tensors
from h5pack.read.encoded import EncodedIndex, decoding_row
from h5pack.read.engine import Engine, ReadStats
from h5pack.read.ragged import read_ragged, texts_of
from h5pack.read.several import join_descriptions, list_files, read_filenames
from h5pack.sources.hdf5_tables import log_unused_labels
from h5pack.system.arrays import joined_ranges, moved_rows
from h5pack.system.parameters import flags, invalid, require_callable, texts
from h5pack.system.text import counted, first_names, splits_text


class H5Dataset(BatchSource):
    """Samples of an HDF5 file: named tuples ``(image, label, *fields, row)``.

    Elements that the file does not have, or that are not requested, are left out. So a sample that has only an image
    has one element: ``sample.image``. Each field is named after the last part of its path.

    The dataset works with fork, spawn and forkserver workers, because the file is opened on first use in each process
    and the dataset owns no thread. The rows of a batch are read together (``__getitems__``): directly from the file if
    its layout allows it, else through the HDF5 library, in which case the reason is logged. The dataset is a context
    manager that closes the file.

    Parameters
    ----------
    path : path or sequence of path
        A pack (a file that h5pack wrote), or any HDF5 file with a dataset that has one sample per entry of axis 0. The
        samples are arrays of numbers or encoded images. Encoded images are the JPEG bytes that a pack keeps, or rows of
        variable-length uint8 that hold the bytes of a JPEG, PNG or other image file. They are decoded to RGB
        (H, W, 3). A list of files, or a pattern such as ``"shards/*.h5"``, is read as one file with all their rows.
    split : str or sequence of str, optional
        Name of one of the file's splits, or names of several splits, whose samples follow each other in the given
        order. None: all rows.
    transform : callable, optional
        Called with each image as a Pillow image, as torchvision's ``ImageFolder`` does. Images other than uint8 gray or
        RGB are passed as the tensors that samples have without `transform`. Masks and boxes are not transformed.
    target_transform : callable, optional
        Called with each label.
    images : str
        Path of the dataset of images in the file. If the default path does not exist, but the file is a pack that keeps
        JPEG bytes, its encoded images are read.
    labels : str or None
        Path of the dataset of labels in the file; None: no labels. If the file has no dataset at the default path, the
        samples have no labels.
    fields : str or sequence of str, optional
        Names of fields of a pack, or paths of further datasets with one row per image, such as masks. In a sample they
        come after the label. A row is a tensor, a str if it is one text, or a list of str if it is several texts.
    with_rows : bool
        Append the row number in the file, an int, to each sample.
    check : bool
        Compare each row that is read with its stored checksum. Encoded images are compared by their encoded bytes.
    decode : RandomResizedCrop, CenterCrop or Resize, optional
        For encoded images: decode the window that this crop needs, and resize it, so that all images are uint8
        (height, width, 3). With an h5pack sampler or loader, a random window depends only on (seed, epoch, row), like
        the windows of `Normalize`. With other samplers, it depends on torch's random generator. None: whole images.
    exact : bool
        With `decode`, True: the pixels are as if the whole image was decoded, then cropped and resized. False: if the
        window is at least twice as high and twice as wide as it will be after resizing, a JPEG is decoded at a fraction
        of its size, which is faster.

    Attributes
    ----------
    splits : dict of str to range or ndarray
        Name of each split, and its rows in the file: a range, or an int64 array (n,) if they are not consecutive.
    classes : tuple of str or None
        Class names: the label i means the class ``classes[i]``.
    columns : tuple of str or None
        Column names, if the labels are a table (rows, K).
    mean, std : ndarray or None
        float64, (C,): mean and standard deviation of each channel, stored in the pack, for pixels scaled to 0..1.
    field_names : tuple of str
        Names of a batch's elements: "images", "labels", the fields, "rows".
    names : tuple of str
        Paths of the datasets that a sample consists of: images, labels, and the fields that are not in `ragged`.
    ragged : dict of str to RaggedIndex
        Path and index of each field whose rows differ in length. In a batch these fields are lists.
    kinds : dict of str to str
        Kind of each field by its name in `field_names`: array, boxes, image, keypoints, mask, ragged, text or texts.
    field_classes : dict of str to tuple of str
        Class names of the fields that hold class numbers, such as the labels of boxes, by their names in `field_names`.
    is_random : bool
        Whether crops of images are random.
    rows : range or ndarray
        Row number in the file of each sample: a range, or an int64 array (n,) if they are not consecutive.
    group_rows : int
        Number of rows that are read together, usually those of one chunk. Samplers yield these rows close together.

    Raises
    ------
    PackFormatError
        If the file, one of the datasets or the split does not exist, or the file is damaged.
    IncompletePackError
        If the pack's conversion did not finish.
    OptionsError
        If a parameter is invalid, or does not fit the file, such as ``check=True`` for a file without checksums.

    Notes
    -----
    Without `transform` an image is a tensor with the stored dtype and axes, such as (H, W, C). Encoded images become
    uint8. Without `decode`, encoded images may differ in size; collating images of several sizes into one batch is an
    error. A label that is a single integer or bool is a Python int or bool. Any other label is a tensor of the stored
    dtype: of shape () for a single float, (K,) for a row of a table.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        split: str | Sequence[str] | None = None,
        *,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        images: str = schema.IMAGES,
        labels: str | None = schema.LABELS,
        fields: str | Sequence[str] | None = (),
        with_rows: bool = False,
        check: bool = False,
        decode: DecodeCrop | None = None,
        exact: bool = True,
    ) -> None:
        chosen = _split_names(split)
        require_callable("transform", transform)
        require_callable("target_transform", target_transform)
        fields = texts("fields", () if fields is None else fields)
        described = [describe_file(one, images, labels, fields) for one in list_files(path)]
        pack = described[0] if len(described) == 1 else join_descriptions(described)
        self.path = pack.path
        if labels == schema.LABELS and pack.labels is None and images != schema.IMAGES:
            log_unused_labels(pack.path, images)
        require_tensors(pack)
        self.split = split if split is None or isinstance(split, str) else chosen
        self.transform, self.target_transform = transform, target_transform
        with_rows, check, exact = flags(with_rows=with_rows, check=check, exact=exact)
        self.with_rows, self.check = with_rows, check
        label_paths = () if pack.labels is None else (pack.labels,)
        given = tuple(dict.fromkeys((next(iter(pack.indexes)), *label_paths, *pack.fields)))
        self.names = tuple(name for name in given if name not in pack.ragged)
        self.label_name = pack.labels
        self.field_names = name_fields(given, self.label_name, with_rows)
        paths = dict(zip(given, self.field_names, strict=False))
        kinds = {**dict.fromkeys(pack.fields, schema.ARRAY), **pack.kinds}
        kinds.update({name: one.kind for name, one in pack.ragged.items()})
        self.kinds, self._path_kinds = {paths[name]: kind for name, kind in kinds.items()}, kinds
        self._lists = tuple(paths[name] for name in pack.ragged)
        self._set_description(pack)
        if check and schema.checksums_path(self.names[0]) not in pack.indexes:
            message = f"{pack.path}: the file has no checksums of {self.names[0]!r}; omit check"
            raise OptionsError(message, path=pack.path, dataset=self.names[0], parameters=("check",))
        self._shared = SharedMemory()
        self.engine = Engine(pack.path, pack.identity, pack.indexes, files=pack.files)
        for name in chosen:
            if name not in pack.splits:
                message = f"{pack.path}: no split {name!r}; {splits_text(pack.splits)}"
                raise PackFormatError(message, path=pack.path, parameters=(f"split={name!r}",))
        index = pack.indexes[self.names[0]]
        self.rows = joined_ranges([self.splits[name] for name in chosen] if chosen else [range(index.rows)])
        self._encoded = tuple(name for name in self.names if pack.indexes[name].is_encoded)
        self.group_rows = index.group_rows
        self._set_decoder(decode, exact)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        index = self.engine.indexes[self.names[0]]
        varies = self.decoder is None and isinstance(index, EncodedIndex) and not index.has_one_size
        shape = "several sizes" if varies else " x ".join(map(str, self.row_shape(self.names[0])))
        labels = ", no labels" if self.label_name is None else f", labels {self.label_name!r}"
        names = self.field_names[1 + (self.label_name is not None) : len(self.field_names) - self.with_rows]
        rows = f"{counted(len(self), 'row')} of {shape}{labels}{', fields ' * bool(names)}{', '.join(names)}"
        return f"H5Dataset({first_names([self.path] * len(self._pack.files), 1)}, split={self.split!r}): {rows}"

    def row_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a row of a dataset in `names`, before any transform.

        If encoded images differ in size, and `decode` is None, this is the shape of row 0.
        """
        shape = self.engine.indexes[name].row_shape
        return (*self.decoder.crop.output_size, *shape[2:]) if self.decoder and self.is_cropped(name) else shape

    def is_cropped(self, name: str) -> bool:
        """Return whether a dataset in `names` holds images or masks that are decoded as crops."""
        return self.decoder is not None and name in self._encoded

    @property
    def class_to_idx(self) -> dict[str, int] | None:
        """Dict from class name to label, as in torchvision's datasets; None if the file has no class names."""
        return None if self.classes is None else {name: label for label, name in enumerate(self.classes)}

    @property
    def targets(self) -> torch.Tensor | None:
        """The labels of all samples, read from the file; None if there are no labels.

        The tensor is int64 (n,) if each label is a single integer, else it has the stored dtype.
        """
        if self.label_name is None:
            return None
        labels = read_small_rows(self, self.label_name, self.rows)
        is_class = is_class_label(self.engine.indexes[self.label_name])
        return torch.from_numpy(labels.astype(np.int64, copy=False) if is_class else labels)

    @property
    def filenames(self) -> list[str] | None:
        """The source file name of each sample, read from the pack; None if the file does not store them."""
        return read_filenames(self._pack, self.rows)

    def __getitem__(self, index: int | slice) -> Any:
        """Return one sample, or for a slice a list of samples. Negative indices count from the end.

        Raises
        ------
        IndexError
            If `index` is out of range.
        """
        if isinstance(index, slice):
            return self._load(self._rows(range(*index.indices(len(self)))), self.draw_key(()))
        if self.check or self._encoded or not hasattr(index, "__index__"):
            return self._load(self._rows([index]), self.draw_key([index]))[0]
        number = operator.index(index)
        if not -len(self.rows) <= number < len(self.rows):
            raise out_of_range(index, len(self.rows), f"{self.path}: ")
        row = int(self.rows[number])
        values = [self._convert(name, self.engine.read_one(name, row)) for name in self.names]
        if self.with_rows:
            values.append(row)
        if self.ragged:
            lists = self.read_lists(np.array([row]))
            values = [*self.arranged(values, [some[0] for some in lists])]
        return sample_type(self.field_names, self._lists)(*values)

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return the samples at many indices, read together. torch's DataLoader calls this for each batch.

        Without transforms the result is a `SampleBatch`, which reads when a sample is accessed or `collate` is called.
        """
        rows, key, plain = self._rows(indices), self.draw_key(indices), self.transform is self.target_transform is None
        return SampleBatch(rows, self, key) if plain else self._load(rows, key)

    @property
    def is_plain(self) -> bool:
        """Whether neither a transform nor a ``__getitem__`` or ``__getitems__`` of a subclass changes the samples."""
        return type(self).__getitems__ is H5Dataset.__getitems__ and self.transform is self.target_transform is None

    def file_rows(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the rows of the file, int64 (n,), of samples, given their `indices` from 0 to ``len(self) - 1``."""
        rows = self.rows
        return indices + rows.start if isinstance(rows, range) else rows[indices]

    def read_batch(
        self, rows: npt.NDArray[np.int64], key: DrawKey = NO_KEY, *, share: bool = True
    ) -> list[torch.Tensor]:
        """Return the tensors of `rows` of the file, each (n, ...). Random crops are drawn from `key`.

        If `share` is true, the tensors of a worker process are in shared memory, if the system supports this.
        """
        shapes = [((len(rows), *row_shape), dtype.str) for _, row_shape, dtype in batch_fields(self)]
        if self.with_rows:
            shapes.append(((len(rows),), "int64"))
        batch = self._shared.batch(shapes, share=share)
        for name, tensor in zip(self.names, batch, strict=False):
            out = tensor.numpy()
            if self.is_cropped(name):
                self.decode_rows(name, rows, list(out), key)
                if self.check:
                    self.engine.check(name, rows, out)
            elif out.dtype == self.engine.indexes[name].native_dtype:
                self.read_rows(name, rows, out)
            else:
                out[...] = self.read_rows(name, rows)
        if self.with_rows:
            batch[-1].numpy()[...] = rows
        return batch

    def _set_description(self, pack: FileDescription) -> None:
        self._pack, self.ragged, self.splits = pack, pack.ragged, pack.splits
        self.classes, self.columns, self.mean, self.std = pack.classes, pack.columns, pack.mean, pack.std
        named = zip(self._lists, pack.ragged.values(), strict=True)
        self.field_classes = {name: one.classes for name, one in named if one.classes is not None}

    def joined_with(self, others: Sequence[H5Dataset]) -> H5Dataset:
        """Return one dataset with the samples of this dataset, then of `others`, which must have the same fields.

        The caller must check that the names of classes and columns agree.
        """
        made, datasets = copy.copy(self), (self, *others)
        made._set_description(join_descriptions([one._pack for one in datasets], same_names=False))
        starts = np.cumsum([0, *(one.engine.indexes[one.names[0]].rows for one in datasets)]).tolist()
        made.rows = joined_ranges([moved_rows(one.rows, start) for one, start in zip(datasets, starts, strict=False)])
        made.split = None
        made.check, made.is_random = any(one.check for one in datasets), any(one.is_random for one in datasets)
        made._same_decode = all(one._same_decode and one._decode == self._decode for one in datasets)
        made.engine = Engine(made._pack.path, made._pack.identity, made._pack.indexes, files=made._pack.files)
        made.group_rows = made.engine.indexes[made.names[0]].group_rows
        return made

    def with_decode(self, decode: DecodeCrop | None, exact: bool) -> H5Dataset:
        """Return a dataset that shares this dataset's open files, and decodes images by `decode` and `exact`.

        If `decode` is None, return this dataset itself.

        Raises
        ------
        OptionsError
            If `decode` does not fit the file. If `decode` is None, and this dataset was joined from datasets that
            differ in `decode` or `exact`.
        """
        if decode is None:
            if not self._same_decode:
                raise OptionsError(
                    "the datasets differ in decode or exact; give H5Loader decode=, which replaces theirs, or use a "
                    "DataLoader",
                    parameters=("decode=", "decode", "exact"),
                )
            return self
        made = copy.copy(self)
        made._set_decoder(decode, exact)
        return made

    def _set_decoder(self, decode: DecodeCrop | None, exact: bool) -> None:
        images = self.engine.indexes[self.names[0]]
        self.decoder, self.is_random = None, isinstance(decode, RandomResizedCrop)
        self._decode, self._same_decode = (decode, decode is None or exact), True
        if decode is not None:
            kinds = self._path_kinds.items()
            unmoved = [name for name, kind in kinds if not can_crop(kind, images, name in self._encoded)]
            self.decoder = CropDecoder(self.path, images, decode, exact, unmoved)

    def read_ragged(self, name: str, rows: npt.NDArray[np.int64]) -> RaggedRows:
        """Return the values of a field in `ragged` in `rows`, int64 (n,). Verify their checksums if ``check=True``."""
        return read_ragged(self.engine, self.ragged[name], rows, check=self.check)

    def read_lists(
        self,
        rows: npt.NDArray[np.int64],
        key: DrawKey = NO_KEY,
        held: Mapping[str, RaggedRows] | None = None,
    ) -> list[list[Any]]:
        """Return, for each field in `ragged`, a list of its values in `rows`: of tensors, of str or of lists of str.

        Boxes and keypoints move with images that are cropped; random crops are drawn from `key`. `held` has the values
        in `rows` of fields that were read before, by path. These fields are not read again.

        Raises
        ------
        DamagedRowsError
            If rows differ from their checksums and ``check=True``, or if a text is malformed.
        """
        images, found, placement = self.engine.indexes[self.names[0]], list[list[Any]](), None
        is_moved = any(index.kind in schema.COORDINATE_KINDS for index in self.ragged.values())
        if is_moved and self.decoder is not None and isinstance(images, EncodedIndex):
            placement = self.decoder.placement(rows, images.image_sizes[rows], key)
        for name, index in self.ragged.items():
            values = held[name] if held and name in held else self.read_ragged(name, rows)
            if index.kind in schema.TEXT_KINDS:
                found.append(texts_of(self.engine, name, rows, values))
            else:
                if placement is not None and index.kind in schema.COORDINATE_KINDS:
                    values = placement.moved(values)
                found.append(split_list(values.data, np.diff(values.offsets).tolist()))
        return found

    def split_batch(self, batch: Sequence[Any], rows: npt.NDArray[np.int64], lists: Sequence[list[Any]]) -> list[Any]:
        samples, new, last = [], sample_type(self.field_names, self._lists), len(self.names)
        columns: list[Any] = [np.asarray(part)[: len(rows)] for part in batch[:last]]
        if self.with_rows:
            columns.append(rows.tolist())
        for number, values in enumerate(zip(*columns, strict=True)):
            converted = [self._convert(name, value) for name, value in zip(self.names, values, strict=False)]
            samples.append(new(*self.arranged([*converted, *values[last:]], [some[number] for some in lists])))
        return samples

    def decode_rows(
        self, name: str, rows: npt.NDArray[np.int64], outs: Sequence[npt.NDArray[Any]], key: DrawKey
    ) -> None:
        """Decode crops of the encoded images or masks in `rows` of the file, int64 (n,), into the arrays in `outs`.

        ``outs[i]`` is for ``rows[i]``. Checksums are not verified.
        """
        assert self.decoder is not None
        encoded, named = self.engine.read_encoded(name, rows), partial(decoding_row, self.engine.file_row, name)
        decode = self.decoder.decode if name == self.names[0] else self.decoder.decode_masks
        decode(rows, encoded, outs, key, named)

    def read_rows(
        self, name: str, rows: npt.NDArray[np.int64], out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """Read rows of one of the datasets in `names`, verify their checksums if ``check=True``, and return the rows.

        Parameters
        ----------
        name : str
        rows : ndarray
            int64 (n,), rows of the file in any order.
        out : ndarray, optional
            Array to write to: (n, ...), in native byte order. For encoded images or masks it may be an array of
            objects, (n,), which receives arrays (h, w, 3) or (h, w) of any size. None: a new array.
        """
        values = self.engine.read_batch(name, rows, out)
        if self.check:
            self.engine.check(name, rows, values)
        return values

    def stats(self) -> ReadStats:
        """Return statistics of what this process has read: rows, visits to chunks, bytes, amplification.

        Reads in DataLoader workers are not included, because each worker has its own counters.
        """
        return self.engine.snapshot()

    def close(self) -> None:
        """Close the file in this process; the next read opens it again."""
        self.engine.close()

    def _rows(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """Convert indices into this dataset to row numbers in the file; int64, (n,)."""
        return self.file_rows(positions_of(indices, len(self.rows), f"{self.path}: "))

    def _load(self, rows: npt.NDArray[np.int64], key: DrawKey) -> list[Any]:
        if not self._encoded or self.decoder is not None:
            batch: list[Any] = self.read_batch(rows, key, share=False)
        else:
            # An array of objects can hold images of different sizes.
            outs = [np.empty(len(rows), object) if name in self._encoded else None for name in self.names]
            batch = [self.read_rows(name, rows, out) for name, out in zip(self.names, outs, strict=True)]
        return self.split_batch(batch, rows, self.read_lists(rows, key))

    def _convert(self, name: str, value: Any) -> Any:
        if name == self.names[0]:
            if self.transform is None:
                return torch.from_numpy(np.asarray(value))
            return self.transform(self._transformable(value))
        if name != self.label_name:
            return torch.from_numpy(np.asarray(value))
        whole = np.ndim(value) == 0 and value.dtype.kind in "biu"
        label = value.item() if whole else torch.from_numpy(np.asarray(value))
        return label if self.target_transform is None else self.target_transform(label)

    def _transformable(self, value: npt.NDArray[Any]) -> Any:
        """Return a uint8 gray or RGB image as a Pillow image, any other image as a tensor."""
        pixels = value[..., None] if value.ndim == 2 else value
        if self._pack.layout == "nchw" and pixels.ndim == 3:
            pixels = pixels.transpose(1, 2, 0)
        is_picture = value.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] in (1, 3)
        return image_of(pixels) if is_picture else torch.from_numpy(np.asarray(value))


def _split_names(split: Any) -> tuple[str, ...]:
    """Return the names in the parameter `split`; an empty tuple if it is None, which means all rows."""
    if split is None:
        return ()
    names = (split,) if isinstance(split, str) else tuple(split) if isinstance(split, Sequence) else ()
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise invalid("split", split, "give one name, or a list of distinct names")
    return names


def is_class_label(index: Any) -> bool:
    """Return whether a label dataset has exactly one integer per row. Such labels are int64 in batches."""
    return not index.row_shape and index.dtype.kind in "iu"


def batch_fields(dataset: H5Dataset) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Return the name, row shape and dtype of each tensor of a batch, except of the tensor with the row numbers."""
    fields = []
    for name in dataset.names:
        index = dataset.engine.indexes[name]
        is_class = name == dataset.label_name and is_class_label(index)
        fields.append((name, dataset.row_shape(name), np.dtype(np.int64) if is_class else index.native_dtype))
    return fields
