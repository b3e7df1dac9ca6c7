"""Samples and batches: named tuples ``(image, label, *fields, row)`` and ``(images, labels, *fields, rows)``.

Each dataset has types with exactly its fields, so that unpacking a sample into another number of names fails. In a
batch, fields whose rows differ in length are lists: of tensors, of str, or of lists of str.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch.utils import _pytree as pytree

from h5pack.data.buffers import SharedBatch

IMAGES, LABELS, ROWS = "images", "labels", "rows"
_INLINE_BYTES = 256 * 1024
"""Lists of tensors of up to this many bytes in total are sent from a worker by pickle, larger ones in shared memory."""
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
    """Base class of samples, which are named tuples."""

    __slots__ = ()
    _fields: tuple[str, ...]

    def __reduce__(self: Any) -> Any:
        return _new_sample, (self._batch_fields, self._lists, tuple(self))


class Batch:
    """Base class of batches, which are named tuples. A batch of a DataLoader's worker is sent in shared memory."""

    _fields: tuple[str, ...]
    _shared: SharedBatch | None = None

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        tensors = [value for value in self if isinstance(value, torch.Tensor)]
        sent = None if self._shared is None else self._shared.reduced(tensors)
        values = [_joined(value) for value in self]
        if not sent and not any(isinstance(value, _JoinedList) for value in values):
            return new_batch, (self._fields, tuple(self))
        others = {n: value for n, value in enumerate(values) if not (sent and isinstance(value, torch.Tensor))}
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
    """Return a batch of tensors and lists; `shared`, by default `values`, may be the `SharedBatch` of its tensors."""
    batch = batch_type(fields)(*values)
    shared = values if shared is None else shared
    if isinstance(shared, SharedBatch):
        batch._shared = shared
    return batch


def _named_tuple(base: type, names: Sequence[str], members: dict[str, Any]) -> Any:
    # The base class comes first, because its methods replace those of tuple.
    kind = type(base.__name__, (base, collections.namedtuple(base.__name__, names)), members)
    with contextlib.suppress(AttributeError, ValueError):
        # torchvision's transforms use torch's pytrees, which before torch 2.9 do not see tensors in such a type.
        # Private API: torch.utils._pytree has no public counterpart for registering a container.
        pytree.register_pytree_node(kind, lambda value: (list(value), None), lambda parts, _: kind(*parts))
    return kind


def _new_sample(fields: tuple[str, ...], lists: tuple[str, ...], values: Sequence[Any]) -> Any:
    return sample_type(fields, lists)(*values)


@dataclass
class _JoinedList:
    """A list of tensors (n_i, ...), joined to be sent from a worker: each alone would take 0.1 ms to send."""

    entries: npt.NDArray[Any] | torch.Tensor
    lengths: list[int]


def _joined(value: Any) -> Any:
    """Return a list of tensors as a `_JoinedList` if they can be concatenated, and any other value unchanged."""
    first = value[0] if type(value) is list and value else None
    if not isinstance(first, torch.Tensor) or first.ndim < 1:
        return value
    same = all(
        type(one) is torch.Tensor
        and (one.dtype, one.device, one.shape[1:]) == (first.dtype, first.device, first.shape[1:])
        and not one.requires_grad
        for one in value
    )
    if not same or first.device.type != "cpu" or first.dtype == torch.bfloat16:
        return value
    entries = torch.cat(value)
    return _JoinedList(entries.numpy() if entries.nbytes <= _INLINE_BYTES else entries, [len(one) for one in value])


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
