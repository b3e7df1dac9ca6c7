"""Samples and batches: named tuples ``(image, label, *fields, row)`` and ``(images, labels, *fields, rows)``.

Their types are created for the fields that a dataset has, so that unpacking fails if there are fewer or more.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import keyword
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from h5pack.data.buffers import SharedBatch

IMAGES, LABELS, ROWS = "images", "labels", "rows"
_SINGULAR = {IMAGES: "image", LABELS: "label", ROWS: "row"}


def name_fields(names: Sequence[str], label_name: str | None, with_rows: bool) -> tuple[str, ...]:
    """Return the names of a batch's fields; `names` are the datasets of the images, the labels and further fields.

    A field is named after the last part of its dataset's path. A name that is no Python identifier, or is taken, is
    changed by replacing characters with "_" and by appending "_".
    """
    found: list[str] = []
    # The last ones are attributes of tuples, and of batches that an `EchoLoader` repeats.
    taken = {*_SINGULAR, *_SINGULAR.values(), "count", "index", "repeats"}
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
        return _new_sample, (self._batch_fields, tuple(self))


class Batch:
    """Base class of batches, which are named tuples. A batch of a DataLoader's worker is sent in shared memory."""

    _fields: tuple[str, ...]
    _shared: SharedBatch | None = None

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        sent = None if self._shared is None else self._shared.reduced(list(self))
        return (_received_batch, (self._fields, *sent)) if sent else (new_batch, (self._fields, tuple(self)))

    def __copy__(self: Any) -> Any:
        return self._with(self)

    def __deepcopy__(self: Any, memo: Any) -> Any:
        return self._with(copy.deepcopy(value, memo) for value in self)

    def _with(self: Any, values: Iterable[Any]) -> Any:
        """Return a batch of this type and with the same attributes, but for the shared memory."""
        made = type(self)(*values)
        made.__dict__.update({name: value for name, value in vars(self).items() if name != "_shared"})
        return made


@functools.cache
def sample_type(fields: tuple[str, ...]) -> Any:
    """Return the type of the samples of batches with these fields."""
    names = [_SINGULAR.get(name, name) for name in fields]
    return _named_tuple(Sample, names, {"__slots__": (), "_batch_fields": fields})


@functools.cache
def batch_type(fields: tuple[str, ...]) -> Any:
    """Return the type of batches with these fields."""
    return _named_tuple(Batch, fields, {})


def new_batch(fields: tuple[str, ...], tensors: Sequence[Any]) -> Any:
    """Return a batch of tensors."""
    batch = batch_type(fields)(*tensors)
    if isinstance(tensors, SharedBatch):
        batch._shared = tensors
    return batch


def _named_tuple(base: type, names: Sequence[str], members: dict[str, Any]) -> Any:
    # The base class comes first, because its methods replace those of tuple.
    kind = type(base.__name__, (base, collections.namedtuple(base.__name__, names)), members)
    with contextlib.suppress(AttributeError, ValueError):
        # torchvision's transforms use torch's pytrees, which before torch 2.9 do not see tensors in such a type.
        # Private API: torch.utils._pytree has no public counterpart for registering a container.
        pytree.register_pytree_node(kind, lambda value: (list(value), None), lambda parts, _: kind(*parts))
    return kind


def _new_sample(fields: tuple[str, ...], values: Sequence[Any]) -> Any:
    return sample_type(fields)(*values)


def _received_batch(fields: tuple[str, ...], receive: Any, arguments: Any) -> Any:
    tensors: list[torch.Tensor] = receive(*arguments)
    return batch_type(fields)(*tensors)
