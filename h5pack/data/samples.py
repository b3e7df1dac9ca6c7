"""Samples and batches: named tuples ``(image, label, *fields, row)`` and ``(images, labels, *fields, rows)``.

Each dataset has types with exactly its fields, so that unpacking a sample into another number of names fails. In a
batch, fields whose rows differ in length are lists: of tensors, of str, or of lists of str.

A DataLoader collates batches without copies: it gets a `SampleBatch`, whose samples are read on first access. torch's
``default_collate`` chooses a collate function by the type of the first sample (``default_collate_fn_map``). The
function for `Sample` returns the tensors that the rows of a `SampleBatch` were read into, instead of stacking samples.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import keyword
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils import collate as torch_collate

from h5pack.data.buffers import SharedBatch
from h5pack.data.decoding import NO_KEY, DrawKey, key_of
from h5pack.data.iteration import Closeable
from h5pack.errors import SizesDifferError
from h5pack.system.arrays import RowNumbers, row_array

IMAGES, LABELS, ROWS = "images", "labels", "rows"
_INLINE_BYTES = 256 * 1024
"""Lists of tensors of up to this many bytes in total are sent from a worker by pickle, larger ones in shared memory."""
_MAX_SENT_TENSORS = 128
"""A batch that is not collated is sent in shared memory if it has up to this many tensors, else as NumPy arrays. Shared
memory is faster for large images."""
_BLOCK_ROWS = 65_536
_SINGULAR = {IMAGES: "image", LABELS: "label", ROWS: "row"}


def name_fields(names: Sequence[str], label_name: str | None, with_rows: bool) -> tuple[str, ...]:
    """Return the names of a batch's fields; `names` are the datasets of the images, the labels and further fields.

    A field is named after the last part of its dataset's path. Characters other than ASCII letters, digits and "_"
    become "_". A name that does not begin with a letter gets the prefix "field_". A Python keyword, or a name that is
    already in use, gets "_" at its end.
    """
    found: list[str] = []
    # `count` and `index` are attributes of tuples, `repeats` is an attribute of an `EchoLoader`'s batches.
    taken = {*_SINGULAR, *_SINGULAR.values(), "count", "index", "repeats"}
    if label_name is None:
        taken.remove(_SINGULAR[LABELS])
    for number, path in enumerate(names):
        if number == 0 or path == label_name:
            found.append(IMAGES if number == 0 else LABELS)
            continue
        name = re.sub(r"[^A-Za-z0-9_]", "_", path.rpartition("/")[2])
        if not re.match(r"[A-Za-z]", name):
            name = f"field_{name}"
        while name in taken or keyword.iskeyword(name):
            name += "_"
        taken.add(name)
        found.append(name)
    return (*found, ROWS) if with_rows else tuple(found)


class Sample:
    """Base class of samples: named tuples with `image`, `label` and `row` in the singular, unlike `Batch`."""

    __slots__ = ()

    def __reduce__(self: Any) -> Any:
        return _new_sample, (self._batch_fields, self._lists, tuple(self))


class Batch:
    """Base class of batches, which are named tuples. A batch of a DataLoader's worker is sent in shared memory."""

    _shared: SharedBatch | None = None

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        tensors = [value for value in self if isinstance(value, torch.Tensor)]
        sent = None if self._shared is None else self._shared.reduced(tensors)
        others = {n: _joined(value) for n, value in enumerate(self) if not (sent and isinstance(value, torch.Tensor))}
        return _received_batch, (self._fields, others, *(sent or (None, ())))

    def __copy__(self: Any) -> Any:
        return self._with(self)

    def __deepcopy__(self: Any, memo: Any) -> Any:
        return self._with(copy.deepcopy(value, memo) for value in self)

    def _with(self: Any, values: Iterable[Any]) -> Any:
        """Return a batch of this type with other values and the same attributes, except the shared memory."""
        made = type(self)(*values)
        made.__dict__.update({name: value for name, value in vars(self).items() if name != "_shared"})
        return made


@functools.cache
def sample_type(fields: tuple[str, ...], lists: tuple[str, ...] = ()) -> Any:
    """Return the type of samples with these fields, named as in a batch. Fields in `lists` are lists in a batch."""
    names = [_SINGULAR.get(name, name) for name in fields]
    return _named_tuple(Sample, names, {"__slots__": (), "_batch_fields": fields, "_lists": lists})


@functools.cache
def batch_type(fields: tuple[str, ...]) -> Any:
    """Return the type of batches with these fields."""
    return _named_tuple(Batch, fields, {})


def new_batch(fields: tuple[str, ...], values: Sequence[Any], shared: Sequence[Any] | None = None) -> Any:
    """Return a batch of tensors and lists. If the tensors are those of a `SharedBatch`, give it as `shared`."""
    batch = batch_type(fields)(*values)
    if isinstance(shared, SharedBatch):
        batch._shared = shared
    return batch


def _named_tuple(base: type, names: Sequence[str], members: dict[str, Any]) -> Any:
    # The base class comes first, because its methods replace those of tuple.
    kind = type(base.__name__, (base, collections.namedtuple(base.__name__, names)), members)
    with contextlib.suppress(AttributeError, ValueError):
        # torchvision's transforms use torch's pytrees. Before torch 2.8, these do not see the tensors in a subclass of
        # a named tuple unless it is registered. Private API: torch.utils._pytree has no public counterpart for
        # registering a container.
        pytree.register_pytree_node(kind, lambda value: (list(value), None), lambda parts, _: kind(*parts))
    return kind


def _new_sample(fields: tuple[str, ...], lists: tuple[str, ...], values: Sequence[Any]) -> Any:
    return sample_type(fields, lists)(*values)


def _received_samples(fields: tuple[str, ...], lists: tuple[str, ...], samples: list[list[Any]]) -> list[Any]:
    rows = ([torch.from_numpy(one) if isinstance(one, np.ndarray) else one for one in sample] for sample in samples)
    return [_new_sample(fields, lists, values) for values in rows]


@dataclass
class _JoinedList:
    """A list of tensors (n_i, ...), joined into one, because sending each from a worker would take 0.1 ms."""

    entries: npt.NDArray[Any] | torch.Tensor
    lengths: list[int]


def _joined(value: Any) -> Any:
    """Return a list of tensors as a `_JoinedList` if they can be concatenated, and any other value unchanged."""
    if not (type(value) is list and can_join(value) and value[0].device.type == "cpu"):
        return value
    try:
        torch.empty(0, dtype=value[0].dtype).numpy()
    except TypeError:  # NumPy does not have this dtype.
        return value
    entries = torch.cat(value)
    return _JoinedList(entries.numpy() if entries.nbytes <= _INLINE_BYTES else entries, [len(one) for one in value])


def can_join(values: list[Any]) -> bool:
    """Return whether the values are plain strided tensors (n_i, ...) that can be concatenated without gradients."""
    first = values[0] if values else None
    return (
        isinstance(first, torch.Tensor)
        and first.ndim > 0
        and all(
            type(one) is torch.Tensor
            and one.layout is torch.strided
            and not one.requires_grad
            and (one.dtype, one.device, one.ndim) == (first.dtype, first.device, first.ndim)
            and one.shape[1:] == first.shape[1:]
            for one in values
        )
    )


def split_list(entries: npt.NDArray[Any] | torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """Split entries into rows of these lengths; return tensors that share the memory of `entries`."""
    joined = entries if isinstance(entries, torch.Tensor) else torch.from_numpy(entries)
    return list(torch.split(joined, lengths))


def _received_batch(fields: tuple[str, ...], others: dict[int, Any], receive: Any, arguments: Any) -> Any:
    tensors = iter(() if receive is None else receive(*arguments))
    values = [others[number] if number in others else next(tensors) for number in range(len(fields))]
    return batch_type(fields)(
        *(split_list(one.entries, one.lengths) if isinstance(one, _JoinedList) else one for one in values)
    )


class BatchSource(Closeable, Dataset[Any]):
    """Base class of datasets that can read whole batches.

    `field_names` are the names of a batch's fields; `is_random` is whether crops of images are random.
    """

    field_names: tuple[str, ...]
    is_random: bool
    _lists: tuple[str, ...]  # names of the fields that are lists in a batch

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        defined = (name for one in cls.__mro__ for name in ("__getitems__", "__getitem__") if name in vars(one))
        if next(defined) == "__getitem__":
            # A DataLoader prefers `__getitems__`, and would ignore the `__getitem__` of a user's subclass.
            cls.__getitems__ = BatchSource.__getitems__  # type: ignore[method-assign]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return the samples at many indices."""
        return [self[index] for index in indices]

    def collate(self, samples: Sequence[Any]) -> Any:
        """Collate samples as torch's ``default_collate`` does, but read the rows directly into the batch.

        Fields whose rows differ in length become lists: of tensors (n_i, ...), of str, or of lists of str.

        In a worker process on Linux the batch is in shared memory that is reused once the main process has released it,
        so sending a batch neither copies it nor allocates new memory. A DataLoader without a ``collate_fn`` collates in
        the same way. With `transform` or `target_transform`, or for samples that are not from this dataset, the method
        just calls ``default_collate``.

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
        """Return the tensors of a batch, each (n, ...).

        In a worker they are in shared memory if the system supports it. Random crops are drawn from `key`.
        """
        raise NotImplementedError

    def _load(self, rows: npt.NDArray[np.int64], key: DrawKey) -> list[Any]:
        """Return the samples in `rows`, whose images may differ in size. Random crops are drawn from `key`."""
        raise NotImplementedError

    def read_lists(self, rows: npt.NDArray[np.int64], key: DrawKey = NO_KEY) -> list[list[Any]]:
        """Return the values in `rows` of the fields that batches hold as lists.

        Boxes and keypoints move with images that are cropped or resized; random crops are drawn from `key`.
        """
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

    def split_batch(self, batch: Sequence[Any], rows: npt.NDArray[np.int64], lists: Sequence[list[Any]]) -> list[Any]:
        """Return the first ``len(rows)`` samples of a batch of tensors or arrays, with which they share memory.

        `lists` is what `read_lists` returned for these rows.
        """
        raise NotImplementedError


def read_small_rows(dataset: Any, name: str, rows: RowNumbers) -> npt.NDArray[Any]:
    """Return rows of a dataset of an `H5Dataset`, as its `read_rows` does, but read 65,536 rows at a time.

    A bound is needed because planning the read of a small row takes many times the memory of the row.
    """
    index = dataset.engine.indexes[name]
    values = np.empty((len(rows), *index.row_shape), index.native_dtype)
    for low in range(0, len(rows), _BLOCK_ROWS):
        part = rows[low : low + _BLOCK_ROWS]
        dataset.read_rows(name, row_array(part), values[low : low + len(part)])
    return values


def positions_of(indices: Sequence[int], count: int, where: str = "") -> npt.NDArray[np.int64]:
    """Return indices into `count` samples as int64, (n,), none negative; raise an IndexError if one is out of range.

    Raises a TypeError if one is not an integer.
    """
    try:
        numbers = np.fromiter(map(operator.index, indices), np.int64, len(indices))
    except TypeError as error:
        raise TypeError(f"{where}{error}; a DataLoader takes batches of indices as batch_sampler") from None
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
    images differ in size, so that one tensor cannot hold them, each sample gets a tensor of its own instead. Random
    crops are drawn from `key`.
    """

    def __init__(self, rows: npt.NDArray[np.int64], source: BatchSource, key: DrawKey) -> None:
        self.rows, self._source, self._key = rows, source, key
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
        """Return the samples in `rows`, which must be the first rows of the batch.

        The samples are views of the batch, unless their images differ in size.
        """
        source, key = self._source, self._key.at(np.arange(len(rows)))
        if not self._differ:
            try:
                if self._batch is None:
                    self._batch = source.read_batch(self.rows, self._key)
                return source.split_batch(self._batch, rows, source.read_lists(rows, key))
            except SizesDifferError:
                self._differ = True
        return source._load(rows, key)

    def __reduce__(self) -> Any:
        # If a worker's collate function returns this batch, read the samples in the worker. If that fails, send the
        # batch unread: the main process then reads it and gets the error. An error in the worker's thread that pickles
        # would lose the batch. That could also happen with many tensors, because each needs a file descriptor, of which
        # 1,024 may be open. So send many tensors as arrays.
        try:
            samples = [list(sample) for sample in self]
        except Exception:
            return SampleBatch, (self.rows, self._source, self._key)
        if len(self) * len(self._source.field_names) > _MAX_SENT_TENSORS:
            samples = [[one.numpy() if isinstance(one, torch.Tensor) else one for one in sample] for sample in samples]
        return _received_samples, (self._source.field_names, self._source._lists, samples)

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
