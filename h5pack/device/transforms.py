"""Transforms in a `DeviceFeed`: applying them to batches, several views of images, random numbers for transforms."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Subset

from h5pack.data.concat import ConcatPack
from h5pack.data.dataset import H5Dataset
from h5pack.data.draws import DRAWS, BatchKey, first_use, random_words
from h5pack.device.batch import (
    images_of,
    is_echoed,
    map_tensors,
    mark_echoed,
    named_elements,
    repeats_of,
    rows_of,
    tensors_of,
    unmark_echoed,
    with_elements,
    with_images,
)
from h5pack.device.normalize import Normalize
from h5pack.device.profiling import profiler_range
from h5pack.device.targets import axes_of, is_mask, move_field
from h5pack.errors import OptionsError
from h5pack.format import schema
from h5pack.system.parameters import invalid, whole_number

_STREAM = 3
"""The stream of random words for transforms other than `Normalize` (see `random_words`)."""
_ADVICE = "open the dataset with H5Dataset(..., with_rows=True)"


class Views:
    """A transform that makes several views of the same images, for contrastive learning (such as SimCLR).

    In a `DeviceFeed`, the images of the batch become a tuple of tensors, one for each view. If a `Normalize` among the
    transforms moves a field with the images, the field becomes such a tuple, too. The random numbers of a keyed
    transform in one view are independent of those in another, even with the same transform and seed.

    Parameters
    ----------
    *transforms : callable
        The transform of each view, called with the images, and with a `BatchKey` if it is keyed. The key's `view` is
        the number of the view, from 0. The same transform may be given several times.

    Attributes
    ----------
    keyed : bool
        Whether calls need a `BatchKey`. True if one of the transforms is keyed.

    Raises
    ------
    OptionsError
        If there are no transforms, or if one of them is not callable, is a `Views`, or takes whole batches.
    """

    def __init__(self, *transforms: Callable[..., Any]) -> None:
        if not transforms:
            raise OptionsError("Views has no transforms; give one for each view", parameters=("transforms",))
        for transform in transforms:
            if not callable(transform) or isinstance(transform, Views) or _takes_batches(transform):
                raise OptionsError(
                    f"{_name_of(transform)} cannot make a view; give callables that take images and return a tensor",
                    parameters=("transforms",),
                )
        self.transforms: tuple[Any, ...] = transforms
        self.keyed = any(map(_is_keyed, transforms))

    def __repr__(self) -> str:
        return f"Views({', '.join(map(repr, self.transforms))})"

    def __call__(self, images: torch.Tensor, key: BatchKey | None = None) -> tuple[Any, ...]:
        """Return a tuple with the images of each view."""
        return tuple(_call(transform, images, _view(key, number)) for number, transform in enumerate(self.transforms))


def uniform(key: BatchKey, seed: int, count: int) -> torch.Tensor:
    """Return random numbers for a keyed transform, at least 0 and below 1: float32, (N, count).

    They are the same on every device, and independent for different seeds. `Normalize` uses none of them.

    Parameters
    ----------
    key : BatchKey
        What the transform was called with.
    seed : int
    count : int
        How many numbers each sample needs, at most 64. For more numbers, call this function with several seeds, and
        concatenate the results.

    Raises
    ------
    OptionsError
        If `count` is not an integer from 1 to 64, or `seed` is not an integer.
    """
    count = whole_number("count", count, 1)
    if count > DRAWS:
        raise invalid("count", count, f"give a number from 1 to {DRAWS}; for more numbers, use several seeds")
    words = random_words(key, whole_number("seed", seed, None), count, stream=_STREAM)
    # The upper 24 bits are exact in float32.
    return ((words >> 40) & ((1 << 24) - 1)).to(torch.float32) * 2.0**-24


class ImageTransform:
    """A wrapper that applies the transform, or the sequence of transforms, of a `DeviceFeed` to a batch.

    `seconds` is the total time spent in calls of the transforms. `dataset` is the loader's dataset, None if unknown.
    `rank` is the loader's rank if its epochs may have several copies of a row, else None.
    Raises OptionsError if a transform is not callable, needs row numbers that the dataset does not provide, or has
    `fields` but is not a `Normalize` (for example, a compiled `Normalize`).
    """

    def __init__(
        self, transform: Any, image_key: Hashable | None, dataset: Any = None, rank: int | None = None
    ) -> None:
        self.image_key, self.rank = image_key, rank
        self.transforms = tuple(transform) if isinstance(transform, (list, tuple)) else (transform,)
        for one in self.transforms:
            if not callable(one):
                raise OptionsError(
                    f"the transform {_name_of(one)} is not callable; give a callable or a sequence of them",
                    parameters=("transform",),
                )
        called = [one for each in self.transforms for one in _views_of(each)]
        for one in called:
            if getattr(one, "fields", None) and not isinstance(one, Normalize):
                raise OptionsError(
                    f"the transform {_name_of(one)} has fields, but only a Normalize moves fields; if it is a compiled "
                    "Normalize, do not compile it",
                    parameters=("fields",),
                )
        self._overwriting = [one for one in called if overwrites_results(one)]
        # `draws`: whether any transform may use torch's generators. `replaces_images`: whether the first transform is
        # known to return new images, and to leave the loaded images unchanged.
        self.draws = any(not _is_keyed(one) and not isinstance(one, Normalize) for one in called)
        first = self.transforms[0] if self.transforms else None
        self.replaces_images = all(isinstance(one, Normalize) for one in _views_of(first))
        self.seconds = 0.0
        keyed = [one for one in self.transforms if _is_keyed(one)]
        self.keyed, self._name = bool(keyed), _name_of(keyed[0]) if keyed else ""
        pack = _pack_of(dataset)
        self._gives_rows = None if pack is None else pack.with_rows
        kinds = {} if pack is None else pack.kinds
        self._moving = {name: kind for name, kind in kinds.items() if kind in schema.COORDINATE_KINDS}
        if self.keyed and self._gives_rows is False:
            raise OptionsError(
                f"the transform {self._name} needs row numbers, but the dataset's batches have none; {_ADVICE}"
            )

    def __call__(self, batch: Any, epoch: int, number: int = 0) -> Any:
        """Return the transformed batch; raise OptionsError if images, row numbers or fields are missing.

        `number` is the index of the batch in its epoch.
        """
        with profiler_range("transform"):
            # Make the key from the loaded batch, because a transform of whole batches may drop the row numbers.
            key = self._key(batch, images_of(batch, self.image_key), epoch, number) if self.keyed else None
            begin = time.perf_counter()
            changed = unmark_echoed(batch)
            for transform in self.transforms:
                apply = self._call if _takes_batches(transform) else self._apply_to_images
                changed = apply(transform, changed, key)
            self.seconds += time.perf_counter() - begin
        return mark_echoed(changed, repeats_of(batch)) if is_echoed(batch) else changed

    def _apply_to_images(self, transform: Callable[..., Any], batch: Any, key: BatchKey | None) -> Any:
        images = images_of(batch, self.image_key)
        if isinstance(transform, Views):
            views = [
                self._view(one, batch, images, _view(key, number)) for number, one in enumerate(transform.transforms)
            ]
            changed: Any = tuple(view for view, _ in views)
            # If only some of the views move a field, the other views get the unmoved field.
            moved: dict[Any, Any] = {
                index: tuple(fields.get(index, batch[index]) for _, fields in views)
                for index in dict.fromkeys(index for _, fields in views for index in fields)
            }
        else:
            changed, moved = self._view(transform, batch, images, key)
        batch = with_images(batch, self.image_key, changed)
        return with_elements(batch, moved) if moved else batch

    def _view(
        self, transform: Callable[..., Any], batch: Any, images: torch.Tensor, key: BatchKey | None
    ) -> tuple[Any, dict[Any, Any]]:
        """Return the transformed images, and the fields that `transform` moves with them, by key or index."""
        if not isinstance(transform, Normalize):
            return self._call(transform, images, key), {}
        size = transform.image_size(images)
        moves = transform.augmentation.changes(*size).moves
        kinds = self._kinds(transform, batch, images, size) if moves else {}
        if not kinds:
            return _call(transform, images, key), {}
        draws = transform.draw(images, key)
        changed = transform(images, key, draws=draws)
        axes = axes_of(images, draws, transform.augmentation.crop, size, transform.output_size(*size))
        return changed, {index: move_field(kind, batch[index], axes) for index, kind in kinds.items()}

    def _call(self, transform: Callable[..., Any], argument: Any, key: BatchKey | None) -> Any:
        result = _call(transform, argument, key)
        if result is None:
            wanted = "batch" if _takes_batches(transform) else "images"
            raise OptionsError(f"the transform {_name_of(transform)} returned None; return the {wanted}")
        return map_tensors(result, torch.clone) if any(transform is one for one in self._overwriting) else result

    def _kinds(self, transform: Normalize, batch: Any, images: torch.Tensor, size: tuple[int, int]) -> dict[Any, str]:
        """Return the kind of each field to move, by key or index.

        Raises OptionsError if `transform.fields` is wrong, or lacks an element that has to move with the images.
        """
        elements = named_elements(batch)
        names = ", ".join(map(repr, elements))
        kinds = {}
        for name, kind in transform.fields.items():
            # If an element has a name, `fields` may contain its name or its index.
            found = name if name in elements else next((n for n, (index, _) in elements.items() if index == name), None)
            if found is None:
                raise OptionsError(
                    f"fields[{name!r}] names no element of the batch, or an element that another key of fields names, "
                    f"too; give one key for each element; the elements are {names}",
                    parameters=("fields",),
                )
            index, element = elements.pop(found)
            if kind is not None and element is images:
                raise OptionsError(f"fields[{name!r}] names the images; leave out this key", parameters=("fields",))
            if kind is not None:
                kinds[index] = kind
        for name, (_, element) in elements.items():
            shapes = [tuple(tensor.shape) for tensor in tensors_of(element) if tensor is not images]
            masks = [shape for shape in shapes if is_mask(shape, size) and shape[0] == len(images)]
            if name in self._moving:
                kind, what = self._moving[name], f"their {self._moving[name]} in {name!r}"
            elif masks:
                kind, what = "mask", f"{name!r} of shape {masks[0]}, which has their height and width"
            else:
                continue
            raise OptionsError(
                f"the transform moves the pixels of the images, but not {what}; give Normalize "
                f'fields={{{name!r}: "{kind}"}}, or None instead of "{kind}" to leave {name!r} unmoved',
                parameters=("fields",),
            )
        return kinds

    def _key(self, batch: Any, images: torch.Tensor, epoch: int, number: int) -> BatchKey:
        rows = rows_of(batch)
        if rows is None or rows is images or len(rows) != len(images):
            raise OptionsError(
                f"the transform {self._name} needs {len(images)} int64 row numbers under the batch's key 'rows' or as "
                f"its last element; {_ADVICE}"
            )
        is_pair = isinstance(batch, (list, tuple)) and len(batch) == 2 and not hasattr(batch, "_fields")
        if is_pair and not self._gives_rows:
            # The element may be integer labels, with which all images of a class would be augmented alike.
            raise OptionsError(
                f"the transform {self._name} needs row numbers, but the batch's second element may be labels instead, "
                f"which look the same; {_ADVICE}, or make the batches dicts with the key 'rows'"
            )
        repeats: int | torch.Tensor = repeats_of(batch)
        if self.rank is not None:
            first = first_use(number, self.rank, len(rows))
            repeats = torch.arange(first, first + len(rows), device=images.device)
        return BatchKey(rows.to(images.device, non_blocking=True), epoch, repeats)


def _call(transform: Callable[..., Any], argument: Any, key: BatchKey | None) -> Any:
    return transform(argument, key) if _is_keyed(transform) else transform(argument)


def _views_of(transform: Any) -> tuple[Any, ...]:
    """Return the transforms of a `Views`, or ``(transform,)`` for any other transform."""
    return transform.transforms if isinstance(transform, Views) else (transform,)


def _view(key: BatchKey | None, number: int) -> BatchKey | None:
    return None if key is None else replace(key, view=number)


def _is_keyed(transform: Any) -> bool:
    return bool(getattr(transform, "keyed", False))


def overwrites_results(transform: Any) -> bool:
    """Return whether a transform was compiled to replay CUDA graphs, which overwrite the results of earlier calls."""
    # Private API: torch has no public function for this; `torch.compile` gives its result this attribute.
    config = getattr(transform, "get_compiler_config", None)
    return callable(config) and bool((config() or {}).get("triton.cudagraphs"))


def _takes_batches(transform: Any) -> bool:
    """Return whether a transform is called with whole batches instead of images."""
    return bool(getattr(transform, "whole_batch", False))


def _name_of(transform: Any) -> str:
    return getattr(transform, "__name__", type(transform).__name__)


def _pack_of(dataset: Any) -> H5Dataset | None:
    """Return the `H5Dataset` inside any `Subset`s, or the first `H5Dataset` of a `ConcatPack` inside them.

    Return None for any other dataset.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, ConcatPack):
        dataset = dataset.datasets[0]
    return dataset if isinstance(dataset, H5Dataset) else None
