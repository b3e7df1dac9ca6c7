"""Division of the training images: a fraction of them, chosen by a hash, becomes a split for validation.

By default, the same fraction of each class is chosen. With a field that groups images, whole groups are chosen, so that
related images stay in the same split.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import OptionsError
from h5pack.format.fields import FieldValues, RaggedRows
from h5pack.sources.catalog import NO_SPLITS, Catalog
from h5pack.sources.folders import split_rank
from h5pack.system.arrays import shuffled_split
from h5pack.system.text import counted, listed

_NAME = "val"
# A split number for `shuffled_split`, to choose the images for validation. It is far above real split numbers, so that
# the choice is independent of how the splits are shuffled.
_HASH = 2**32


def training_split(source: str, catalog: Catalog, val: float) -> int:
    """Return the index of the split to divide: the split for training, or 0 if the source has no splits.

    Raise OptionsError if there is not exactly one split for training, or if there already is one for validation.
    """
    names = catalog.split_names
    if names == NO_SPLITS:
        return 0
    ranks = [split_rank(name) for name in names]
    training, validation = ([number for number, one in enumerate(ranks) if one == rank] for rank in (0, 1))
    if len(training) == 1 and not validation:
        return training[0]
    parameter = f"val={val!r}"
    found = "several of its splits are" if training else "none of its splits is"
    problem = f"{found} for training ({', '.join(map(repr, names))})"
    if validation:
        problem = f"the source already has the split {names[validation[0]]!r} for validation"
    raise OptionsError(
        f"{source}: {parameter} would take validation images from the training split, but {problem}; leave out "
        f"{parameter}",
        path=None if catalog.kind == "dataset" else source,
        parameters=(parameter,),
    )


def divided_names(names: tuple[str, ...], training: int) -> tuple[str, ...]:
    """Return the names of the splits that result from dividing the split with the index `training`."""
    first = "train" if names == NO_SPLITS else names[training]
    return (*names[:training], first, _NAME, *names[training + 1 :])


def require_field(source: str, catalog: Catalog, field: str, names: Collection[str]) -> None:
    """Raise OptionsError if `field`, by which images are to be grouped, is not one of the `names` of fields."""
    if field not in names:
        found = f"has only {listed([repr(name) for name in names])}" if names else "has none"
        raise OptionsError(
            f"{source}: val_groups={field!r} needs a field of this name, but the source {found}; make one with "
            "field_columns or text_columns (from a column), or with fields (from an HDF5 dataset or a key of samples)",
            path=None if catalog.kind == "dataset" else source,
            parameters=(f"val_groups={field!r}", "field_columns", "text_columns", "fields"),
        )


def group_ids(values: FieldValues) -> npt.NDArray[np.int64]:
    """Number the distinct values of a field from 0; return each image's number, int64 (n,). NaNs count as equal."""
    if isinstance(values, RaggedRows):
        values = replace(values, data=_with_equal_bytes(values.data))
        rows = [values.row(index).tobytes() for index in range(len(values))]
        numbers = {row: number for number, row in enumerate(sorted(set(rows)))}
        return np.array([numbers[row] for row in rows], np.int64)
    if not values.size:  # NumPy cannot infer the number of columns of no rows.
        return np.zeros(len(values), np.int64)
    flat = values.reshape(len(values), -1)
    if flat.shape[1] != 1:
        # Compare rows as bytes, because to NumPy, a row with NaN differs from itself.
        flat = np.ascontiguousarray(_with_equal_bytes(flat)).view(np.dtype((np.void, flat.shape[1] * flat.itemsize)))
    return np.unique(flat[:, 0], return_inverse=True)[1].astype(np.int64)


def _with_equal_bytes(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values with equal bytes for equal values: -0.0 becomes 0.0, and every NaN becomes the same NaN."""
    if values.dtype.kind == "f":
        values = values + values.dtype.type(0)
        values[np.isnan(values)] = np.nan
    return values


def divide(
    source: str, catalog: Catalog, usable: npt.NDArray[np.int64], val: float, seed: int, group_field: str | None = None
) -> Catalog:
    """Return the catalog with a split for validation, inserted after the split that it is taken from.

    `usable` are the indices of the images to choose from, int64 (n,). The new split gets the fraction `val` of the
    usable images in the divided split. With `group_field`, it gets about this fraction, because images with equal
    values in this field stay in the same split.
    Raise the errors of `training_split`, and OptionsError if the divided or the new split would have no images.
    """
    training = training_split(source, catalog, val)
    images = usable[catalog.split_ids[usable] == training]
    if len(images) < 2:
        given = [f"val={val!r}", *(() if group_field is None else (f"val_groups={group_field!r}",))]
        problem = f"{given[0]} needs at least 2 images for training that can be packed; the source has {len(images)}"
        raise OptionsError(f"{source}: {problem}; leave out {' and '.join(given)}", parameters=given)
    if group_field is not None:
        chosen = choose_groups(group_ids(catalog.fields[group_field][images]), val, seed)
        parameter = f"val_groups={group_field!r}"
        problem = f"{parameter} needs images with different values of this field"
    else:
        labels = catalog.labels if catalog.labels is not None and catalog.labels.ndim == 1 else None
        chosen = choose_val(None if labels is None else labels[images], len(images), val, seed)
        parameter = f"val={val!r}"
        problem = f"{parameter} of {counted(len(images), 'image')} is {int(chosen.sum())}, but no split may be empty"
    if chosen.all() or not chosen.any():
        other = "fraction" if group_field is None else "field"
        raise OptionsError(f"{source}: {problem}; give another {other}", parameters=(parameter,))
    split_ids = catalog.split_ids + (catalog.split_ids > training).astype(np.int32)
    split_ids[images[chosen]] = training + 1
    return replace(catalog, split_names=divided_names(catalog.split_names, training), split_ids=split_ids)


def choose_val(labels: npt.NDArray[np.int64] | None, count: int, val: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return which of `count` images go to the split for validation, bool (count,): the fraction `val`, rounded.

    With `labels`, int64 (count,), each class gives this fraction of its images, rounded down, and the classes with the
    largest remainders give one more. A hash chooses the images, and also decides between equal remainders.
    """
    ids = np.zeros(count, np.int64) if labels is None else np.unique(labels, return_inverse=True)[1]
    sizes = np.bincount(ids)
    # Round, so that remainders which differ only by floating-point errors are equal.
    shares = np.round(sizes * val, 9)
    quotas = np.floor(shares).astype(np.int64)
    by_remainder = np.lexsort((shuffled_split(len(sizes), seed, _HASH + 1), quotas - shares))
    quotas[by_remainder[: round(count * val) - int(quotas.sum())]] += 1
    order = shuffled_split(count, seed, _HASH)
    by_class = order[np.argsort(ids[order], kind="stable")]
    positions = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = np.zeros(count, np.bool_)
    chosen[by_class[positions < np.repeat(quotas, sizes)]] = True
    return chosen


def choose_groups(groups: npt.NDArray[np.int64], val: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return which images go to the split for validation, bool (n,): whole groups with about the fraction `val` of all.

    `groups`, int64 (n,), is the group of each image, numbered from 0. Groups are visited in the order of a hash. A
    group is chosen if it brings the fraction of chosen images closer to `val`. If no group would be chosen this way,
    the smallest one is chosen; if all groups would be, the smallest one is not. With fewer than two groups, no image is
    chosen.
    """
    sizes, target, total = np.bincount(groups).tolist(), val * len(groups), 0
    if len(sizes) < 2:
        return np.zeros(len(groups), np.bool_)
    order, chosen = shuffled_split(len(sizes), seed, _HASH).tolist(), set[int]()
    for group in order:
        if abs(total + sizes[group] - target) < abs(total - target):
            chosen.add(group)
            total += sizes[group]
    if len(chosen) in (0, len(sizes)):
        chosen ^= {min(order, key=sizes.__getitem__)}
    return np.isin(groups, [*chosen])
