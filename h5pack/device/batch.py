"""Access to the contents of a batch: its tensors, its images, its row numbers, and how often it was repeated."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from h5pack.errors import OptionsError

_IMAGES = ("images", "image")
_ROWS = "rows"
_REPEATS = "repeats"


def mark_echoed(batch: Any, repeats: int) -> Any:
    """Return a batch that shares the memory of `batch` and has the attribute `repeats`. `batch` does not change.

    `repeats` is the number of earlier deliveries of the batch. A tuple, named tuple, list or dict becomes an instance
    of a subclass of its type. A tensor is detached. A mapping of any other type is copied shallowly; if it cannot be
    copied, or cannot have attributes, it becomes a dict. Any other object is returned unchanged, without the attribute.
    So is a tuple, list or dict whose type cannot have subclasses, such as torch.Size.
    """
    if isinstance(batch, (list, tuple, dict)):
        kind = type(batch)
        with contextlib.suppress(TypeError):  # raised for a type that has no subclasses, such as torch.Size
            return _copy_into(kind if hasattr(kind, "_unmarked_type") else _marked_type(kind), batch, repeats)
        return batch
    if not isinstance(batch, (torch.Tensor, Mapping)):
        return batch
    try:
        marked: Any = batch.detach() if isinstance(batch, torch.Tensor) else copy.copy(batch)
        setattr(marked, _REPEATS, repeats)
    except (TypeError, AttributeError):
        return mark_echoed(dict(batch), repeats)
    return marked


def unmark_echoed(batch: Any) -> Any:
    """Return the batch with the type that it had before `mark_echoed`. An unmarked batch is returned unchanged.

    A mapping that `mark_echoed` had to convert to a dict remains a dict.
    """
    if hasattr(type(batch), "_unmarked_type"):
        return _copy_into(type(batch)._unmarked_type, batch, None)
    if not is_echoed(batch):
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.detach()
    batch = copy.copy(batch)
    delattr(batch, _REPEATS)
    return batch


def is_echoed(batch: Any) -> bool:
    """Return whether a batch carries the attribute `repeats` that `mark_echoed` sets."""
    return isinstance(batch, (torch.Tensor, list, tuple, Mapping)) and _REPEATS in getattr(batch, "__dict__", ())


def repeats_of(batch: Any) -> int:
    """Return how many times a batch was delivered before; 0 for an unmarked batch."""
    return getattr(batch, _REPEATS) if is_echoed(batch) else 0


@functools.cache
def _marked_type(kind: type) -> type:
    """Return a subclass of the container type `kind`. Instances of the subclass can have attributes."""

    def reduce(batch: Any, _protocol: Any) -> tuple[Any, ...]:
        # pickle cannot import a class that was created at run time, so make it call `mark_echoed` instead.
        return mark_echoed, (unmark_echoed(batch), repeats_of(batch))

    members = {"_unmarked_type": kind, "__reduce_ex__": reduce, "__module__": __name__}
    return type(f"Echoed{kind.__name__}", (kind,), members)


def _copy_into(kind: type, batch: Any, repeats: int | None) -> Any:
    """Return a container of type `kind` with the elements and attributes of `batch`.

    If `repeats` is None, the attribute `repeats` is left out, else it is set to this number.
    """
    # Do not call `kind`: a named tuple takes one argument per element, and a subclass may take any arguments.
    if isinstance(batch, tuple):
        filled: Any = tuple.__new__(kind, batch)
    elif isinstance(batch, list):
        filled = list.__new__(kind)
        list.extend(filled, batch)
    else:
        filled = dict.__new__(kind)
        if isinstance(batch, collections.defaultdict):
            filled.default_factory = batch.default_factory
        for key, value in batch.items():
            filled[key] = value
    attributes = {name: value for name, value in getattr(batch, "__dict__", {}).items() if name != _REPEATS}
    if repeats is not None:
        attributes[_REPEATS] = repeats
    # If instances of `kind` cannot have attributes, those that the user set after `mark_echoed` are lost.
    if hasattr(filled, "__dict__"):
        filled.__dict__.update(attributes)
    return filled


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors of a batch, at any depth of lists, tuples and mappings."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (list, tuple, Mapping)):
        for element in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(element)


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of the batch with `function` applied to each tensor. Other objects are shared."""
    if is_echoed(batch):
        return mark_echoed(map_tensors(unmark_echoed(batch), function), repeats_of(batch))
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, PackedSequence):
        # torch requires the batch sizes of a PackedSequence to be on the CPU.
        data, sizes, *indices = batch
        return type(batch)(function(data), sizes, *map_tensors(indices, function))
    if isinstance(batch, (list, tuple)):
        return _with_elements(batch, [map_tensors(element, function) for element in batch])
    if isinstance(batch, Mapping):
        return _with_values(batch, {key: map_tensors(element, function) for key, element in batch.items()})
    return batch


def batch_size_and_bytes(batch: Any) -> tuple[int | None, int]:
    """Return the length of the first tensor or array that has an axis, and the total bytes of all tensors and arrays.

    The length is None if no tensor or array has an axis. Sparse COO tensors have no `nbytes`, so they count as 0 bytes.
    """
    if isinstance(batch, torch.Tensor):
        # Nested tensors of the strided layout have `size`, but not `shape`.
        return (batch.size(0) if batch.dim() else None), 0 if batch.layout == torch.sparse_coo else batch.nbytes
    if not isinstance(batch, (list, tuple, Mapping)):
        # The batch may be an array of another library, such as NumPy.
        shape, nbytes = getattr(batch, "shape", ()), getattr(batch, "nbytes", 0)
        return (shape[0] if isinstance(shape, tuple) and shape else None), nbytes if isinstance(nbytes, int) else 0
    found = [batch_size_and_bytes(element) for element in (batch.values() if isinstance(batch, Mapping) else batch)]
    return next((size for size, _ in found if size is not None), None), sum(nbytes for _, nbytes in found)


def images_of(batch: Any, image_key: Hashable | None = None) -> torch.Tensor:
    """Return the images of a batch; raise OptionsError if no tensor is found under `image_key` (see `DeviceFeed`)."""
    images = batch if isinstance(batch, torch.Tensor) else None
    with contextlib.suppress(LookupError, TypeError, ValueError):
        images = batch[_resolve_key(batch, image_key)] if images is None else images
    if not isinstance(images, torch.Tensor):
        problem = "found no tensor of images" if images is None else f"the images are a {type(images).__name__}"
        raise OptionsError(
            f"{problem} in a batch {_describe_batch(batch)} (image_key={image_key!r}); give the index or key of a "
            "tensor of images as image_key",
            parameters=("image_key",),
        )
    return images


def with_images(batch: Any, image_key: Hashable | None, images: Any) -> Any:
    """Return a copy of a batch with new `images`; the other elements are shared.

    Call `unmark_echoed` first, because the copy of a marked batch may lose its mark.
    """
    if isinstance(batch, torch.Tensor):
        return images
    return with_elements(batch, {_resolve_key(batch, image_key): images})


def with_elements(batch: Any, elements: Mapping[Any, Any]) -> Any:
    """Return a copy of a batch with new `elements`, given by key or index; the other elements are shared.

    Call `unmark_echoed` first, because the copy of a marked batch may lose its mark.
    """
    if isinstance(batch, Mapping):
        return _with_values(batch, dict(elements))
    changed = list(batch)
    for index, element in elements.items():
        changed[index] = element
    return _with_elements(batch, changed)


def named_elements(batch: Any) -> dict[Hashable, tuple[Any, Any]]:
    """Return ``{name: (key or index, element)}`` for the elements of a batch; {} if it is not a container.

    The name is the key in a mapping, the field name in a named tuple, and the index in any other list or tuple.
    """
    if isinstance(batch, Mapping):
        return {key: (key, element) for key, element in batch.items()}
    if not isinstance(batch, (list, tuple)):
        return {}
    names = getattr(batch, "_fields", range(len(batch)))
    return {name: (index, element) for index, (name, element) in enumerate(zip(names, batch, strict=True))}


def rows_of(batch: Any) -> torch.Tensor | None:
    """Return the row numbers of a batch, int64, (N,), or None if the batch has none.

    In a mapping or named tuple, row numbers are the element "rows". In any other list or tuple with at least two
    elements, they are the last element. If this element is not an int64 tensor (N,), the batch has no row numbers.
    """
    rows: Any = None
    if isinstance(batch, Mapping) or hasattr(batch, "_fields"):
        _, rows = named_elements(batch).get(_ROWS, (None, None))
    elif isinstance(batch, (list, tuple)) and len(batch) > 1:
        rows = batch[-1]
    is_rows = isinstance(rows, torch.Tensor) and rows.dtype == torch.int64 and rows.ndim == 1
    return rows if is_rows else None


def _resolve_key(batch: Any, image_key: Hashable | None) -> Any:
    if isinstance(batch, Mapping):
        return next((key for key in _IMAGES if key in batch), _IMAGES[0]) if image_key is None else image_key
    if not isinstance(batch, (list, tuple)):
        raise TypeError
    if isinstance(image_key, str):
        return getattr(batch, "_fields", ()).index(image_key)
    return 0 if image_key is None else image_key


def _describe_batch(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"with the keys {', '.join(map(repr, batch))}"
    if isinstance(batch, (list, tuple)):
        return f"with {len(batch)} elements"
    return f"of type {type(batch).__name__}"


def _with_elements(batch: Any, elements: Sequence[Any]) -> Any:
    if isinstance(batch, list):
        changed = copy.copy(batch)
        changed[:] = elements
        return changed
    # A named tuple's constructor takes one argument per element.
    kind = type(batch)
    return kind(*elements) if hasattr(kind, "_fields") else kind(elements)


def _with_values(batch: Any, values: dict[Any, Any]) -> Any:
    if hasattr(batch, "__setitem__") and hasattr(batch, "copy"):
        changed = copy.copy(batch)
        # If the constructor of a dict sets ``self.__dict__ = self``, its items are also attributes: change both.
        attributes = getattr(changed, "__dict__", {})
        for key, value in values.items():
            if key in attributes and attributes[key] is batch[key]:
                attributes[key] = value
            changed[key] = value
        return changed
    # For a mapping of any other type, build a new one. `copy.copy` may fail, or return a mapping that shares the memory
    # in which the original stores its values.
    merged = {**batch, **values}
    with contextlib.suppress(TypeError):
        return type(batch)(merged)
    return merged
