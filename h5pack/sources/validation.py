"""Division of the training images: a fraction of them, chosen by a hash, becomes a split for validation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from h5pack.errors import OptionsError
from h5pack.sources.catalog import Catalog, one_split
from h5pack.sources.folders import split_rank
from h5pack.system.arrays import shuffled_split
from h5pack.system.text import counted

_NAME = "val"
# A split number for `shuffled_split`, to choose the images for validation. It is far above real split numbers, so that
# the choice is independent of how the splits are shuffled.
_HASH = 2**32


def training_split(source: str, catalog: Catalog, val: float) -> int:
    """Return the index of the split to divide: the split for training, or 0 if the source has no splits.

    Raise OptionsError if there is not exactly one split for training, or if there already is one for validation.
    """
    names = catalog.split_names
    if names == one_split(0)[0]:
        return 0
    ranks = [split_rank(name) for name in names]
    training, validation = ([number for number, one in enumerate(ranks) if one == rank] for rank in (0, 1))
    if len(training) == 1 and not validation:
        return training[0]
    parameter, listed = f"val={val!r}", ", ".join(map(repr, names))
    problem = f"{'several of its splits are' if training else 'none of its splits is'} for training ({listed})"
    if validation:
        problem = f"it already has the split {names[validation[0]]!r} for validation"
    raise OptionsError(
        f"{source}: {parameter} would take validation images from the training split, but {problem}; leave out "
        f"{parameter}",
        path=None if catalog.kind == "dataset" else source,
        parameters=(parameter,),
    )


def divided_names(names: tuple[str, ...], training: int) -> tuple[str, ...]:
    """Return the names of the splits after dividing the split with the index `training`."""
    first = "train" if names == one_split(0)[0] else names[training]
    return (*names[:training], first, _NAME, *names[training + 1 :])


def divide(catalog: Catalog, training: int, usable: npt.NDArray[np.int64], val: float, seed: int) -> Catalog:
    """Return the catalog with a split for validation, inserted after the split with the index `training`.

    `usable` are the indices of the images to choose from, int64 (n,). The new split gets the fraction `val` of those in
    the divided split. Raise OptionsError if it would get none or all of them.
    """
    images = usable[catalog.split_ids[usable] == training]
    labels = catalog.labels if catalog.labels is not None and catalog.labels.ndim == 1 else None
    chosen = choose_val(None if labels is None else labels[images], len(images), val, seed)
    if chosen.all() or not chosen.any():
        raise OptionsError(
            f"val={val!r} of {counted(len(images), 'image')} is {int(chosen.sum())}, but each split needs at least "
            "one; give another fraction",
            parameters=(f"val={val!r}",),
        )
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
