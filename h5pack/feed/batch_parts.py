"""The parts of a batch: its tensors, its images, its rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from h5pack.errors import OptionsError
from h5pack.feed.batch_key import EchoedBatch, is_echoed, repeats_of

_IMAGES = ("images", "image")
_ROWS = "rows"


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """All tensors of a batch, however deep in lists, tuples and mappings."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from tensors_of(part)
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from tensors_of(part)
    repeats = repeats_of(batch)
    if isinstance(repeats, torch.Tensor):
        yield repeats


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch of the same containers, with what `function` makes of each tensor; anything else is the same object."""
    if is_echoed(batch):
        repeats = repeats_of(batch)
        if isinstance(repeats, torch.Tensor):
            repeats = function(repeats)
        return EchoedBatch.of(map_tensors(EchoedBatch.plain(batch), function), repeats)
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, (list, tuple)):
        return _with_parts(batch, [map_tensors(part, function) for part in batch])
    if isinstance(batch, Mapping):
        return _with_values(batch, {key: map_tensors(part, function) for key, part in batch.items()})
    return batch


def images_of(batch: Any, place: Hashable | None = None) -> torch.Tensor:
    """The images of a batch.

    Parameters
    ----------
    batch : Tensor, list, tuple or mapping
    place : int or str, optional
        Index of a list's or tuple's part, field of a named tuple, or key of a mapping. None: the first part, the value
        of "images" or "image", or the tensor itself.

    Raises
    ------
    OptionsError
        If there is no tensor at that place.
    """
    images = batch
    if not isinstance(batch, torch.Tensor):
        try:
            images = batch[_place(batch, place)]
        except (LookupError, TypeError, ValueError) as error:
            raise OptionsError(f"no images at {place!r} in a batch of {_described(batch)}; say images=") from error
    if not isinstance(images, torch.Tensor):
        raise OptionsError(
            f"the images of a batch of {_described(batch)} are a {type(images).__name__}, not a tensor; say where they "
            "are by images="
        )
    return images


def with_images(batch: Any, place: Hashable | None, images: Any) -> Any:
    """The batch with other images; the one that is given is left as it was."""
    if is_echoed(batch):
        return EchoedBatch.of(with_images(EchoedBatch.plain(batch), place, images), repeats_of(batch))
    if isinstance(batch, torch.Tensor):
        return images
    where = _place(batch, place)
    if isinstance(batch, Mapping):
        return _with_values(batch, {where: images})
    parts = list(batch)
    parts[where] = images
    return _with_parts(batch, parts)


def rows_of(batch: Any) -> torch.Tensor | None:
    """The row numbers of a batch, int64, (N,), where it has them.

    They are the value of "rows" in a mapping or a named tuple, and the last of at least two parts of any other list or
    tuple.
    """
    rows: Any = None
    if isinstance(batch, Mapping):
        rows = batch.get(_ROWS)
    elif isinstance(batch, (list, tuple)):
        if _ROWS in getattr(batch, "_fields", ()):
            rows = batch.rows  # type: ignore[union-attr]
        elif len(batch) > 1:
            rows = batch[-1]
    numbers = isinstance(rows, torch.Tensor) and rows.dtype == torch.int64 and rows.ndim == 1
    return rows if numbers else None


def _place(batch: Any, place: Hashable | None) -> Any:
    if isinstance(batch, Mapping):
        return next((key for key in _IMAGES if key in batch), _IMAGES[0]) if place is None else place
    if not isinstance(batch, (list, tuple)):
        raise TypeError
    if isinstance(place, str):
        return getattr(batch, "_fields", ()).index(place)
    return 0 if place is None else place


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"the keys {', '.join(map(repr, batch))}"
    if isinstance(batch, (list, tuple)):
        return f"{len(batch)} parts"
    return f"type {type(batch).__name__}"


def _with_parts(batch: Any, parts: Sequence[Any]) -> Any:
    kind = type(batch)
    if kind is list:
        return list(parts)
    if kind is tuple:
        return tuple(parts)
    if isinstance(batch, list):
        changed = copy.copy(batch)
        changed[:] = parts
        return changed
    # A named tuple's constructor takes its parts one by one.
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def _with_values(batch: Any, values: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return {**batch, **values}
    if not hasattr(batch, "__setitem__"):
        return type(batch)({**batch, **values})
    changed = copy.copy(batch)
    for key, value in values.items():
        changed[key] = value
    return changed
