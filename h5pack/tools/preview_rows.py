"""Which rows a contact sheet shows: some of each class of each split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.sources.catalog import Catalog

PER_CLASS = 8
UNCLASSED = 32


@dataclass(frozen=True)
class RowSample:
    """Rows of one class, or of a split without classes.

    Attributes
    ----------
    name : str or None
        Of the class; None without classes.
    rows : int
        How many there are.
    places : ndarray
        int64, (n,), ascending: those to show, by their places in the catalog.
    """

    name: str | None
    rows: int
    places: npt.NDArray[np.int64]


@dataclass(frozen=True)
class SplitSample:
    """A split's samples.

    Attributes
    ----------
    name : str
    rows : int
        Rows of the split.
    classes : int
        How many classes it has rows of, shown or not; 0 without classes.
    samples : tuple of RowSample
    left_out : int
        Classes that are not shown.
    """

    name: str
    rows: int
    classes: int
    samples: tuple[RowSample, ...]
    left_out: int = 0


def sample_rows(catalog: Catalog, per_class: int | None, classes: int, seed: int | None) -> list[SplitSample]:
    """Choose rows.

    Parameters
    ----------
    catalog : Catalog
    per_class : int or None
        Rows of each class; None: 8, and 32 of a split without classes.
    classes : int
        Classes of each split, at most; rows without a label come besides.
    seed : int or None
        Draw them at random; None: evenly spaced in stored order.
    """
    random = None if seed is None else np.random.default_rng(seed)
    found = []
    for number, name in enumerate(catalog.split_names):
        places = np.flatnonzero(catalog.split_ids == number)
        if catalog.labels is None or catalog.labels.ndim > 1:
            sample = RowSample(None, len(places), _some(places, per_class or UNCLASSED, random))
            found.append(SplitSample(name, len(places), 0, (sample,) if len(places) else ()))
            continue
        labels = catalog.labels[places]
        values, counts = np.unique(labels, return_counts=True)
        pairs = list(zip(values.tolist(), counts.tolist(), strict=True))
        unlabelled = [pair for pair in pairs if pair[0] == schema.NO_LABEL and catalog.label_names is not None]
        named = [pair for pair in pairs if pair not in unlabelled]
        samples = tuple(
            RowSample(class_name(catalog, value), count, _some(places[labels == value], per_class or PER_CLASS, random))
            for value, count in (*named[:classes], *unlabelled)
        )
        found.append(SplitSample(name, len(places), len(named), samples, max(0, len(named) - classes)))
    return found


def class_name(catalog: Catalog, label: int) -> str:
    """What a label means."""
    if catalog.label_names is None:
        return f"label {label}"
    return "no label" if label == schema.NO_LABEL else catalog.label_names[label]


def marks(names: tuple[str, ...], values: npt.NDArray[Any]) -> list[str]:
    """The attributes of a row of a table that are set; with their value where that is not 1.

    Parameters
    ----------
    names : tuple of str
    values : ndarray
        (K,).
    """
    return [
        name if value == 1 else f"{name} = {value}"
        for name, value in zip(names, values.tolist(), strict=True)
        if value != 0
    ]


def _some(places: npt.NDArray[np.int64], most: int, random: np.random.Generator | None) -> npt.NDArray[np.int64]:
    if len(places) <= most:
        return places
    if random is not None:
        return np.sort(random.choice(places, most, replace=False))
    return places[np.arange(most) * len(places) // most]
