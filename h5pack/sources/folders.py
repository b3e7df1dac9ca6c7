"""Folders of images: flat, one folder a class, or one folder a split."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np

from h5pack import schema
from h5pack.errors import NoImagesError, SourceError
from h5pack.sources.catalog import Catalog, FileReader, NameTable, one_split
from h5pack.sources.walk import Walk, child_folders

# Folder names that mean a split, in the order in which splits are stored.
_SPLIT_RANKS = {
    "train": 0, "training": 0, "tr": 0,
    "val": 1, "valid": 1, "validation": 1, "dev": 1,
    "test": 2, "testing": 2,
}  # fmt: skip


def is_split_name(name: str) -> bool:
    """Whether a folder of this name is a split by custom: train, val, test and their variants."""
    return name.lower() in _SPLIT_RANKS


def split_order(names: Iterable[str]) -> tuple[str, ...]:
    """Distinct split names, train before validation before test before others."""
    return tuple(sorted(set(names), key=lambda name: (_SPLIT_RANKS.get(name.lower(), 3), name)))


def flat(root: str, found: Walk) -> Catalog:
    """Every image below `root`, however deep, without labels."""
    names = NameTable.of(found.below(""))
    split_names, split_ids = one_split(len(names))
    return Catalog("flat", FileReader(root), names, split_names, split_ids, ignored=dict(found.ignored))


def classes(root: str, found: Walk, folders: list[str]) -> Catalog:
    """One folder a class, as torchvision's ImageFolder reads it: the class is the top folder, deeper ones belong to it.

    Parameters
    ----------
    root : str
    found : Walk
        Of `root`.
    folders : list of str
        The folders directly below `root`, sorted: the classes, also those without images.
    """
    if found.folders.get(""):
        first = found.names("")[0]
        raise SourceError(
            f"{root}: holds images beside its class folders ({first!r}, say); move them into a class, "
            "or pack everything without labels with --source flat"
        )
    names: list[str] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        names.extend(found.below(folder))
        labels.extend([label] * (len(names) - len(labels)))
    split_names, split_ids = one_split(len(names))
    return Catalog(
        "classes",
        FileReader(root),
        NameTable.of(names),
        split_names,
        split_ids,
        labels=np.array(labels, np.int64),
        label_names=tuple(folders),
        ignored=dict(found.ignored),
    )


def _in_classes(root: str, split: str, found: Walk) -> bool:
    """Whether the images of a split lie in class folders, rather than in the split's own folder."""
    inner = next((name for name in found.below(split) if name.count("/") > 1), None)
    if inner is not None and split in found.folders:
        raise SourceError(
            f"{os.path.join(root, split)}: holds images beside its class folders ({found.names(split)[0]!r} beside "
            f"{inner.split('/')[1]!r}, say); move them into a class, or leave them out with --exclude"
        )
    return inner is not None


def splits(root: str, found: Walk, folders: list[str]) -> Catalog:
    """One folder a split; in each, class folders, or images alone where the split has no labels (label -1).

    Raises
    ------
    NoImagesError
        If no split holds an image.
    SourceError
        If images lie beside the splits, or beside the class folders of one.
    """
    split_names = split_order(folder for folder in folders if any(found.below(folder)))
    if not split_names:
        raise NoImagesError(f"{root}: no image in its split folders ({', '.join(folders)})")
    if found.folders.get(""):
        raise SourceError(
            f"{root}: holds images beside its split folders ({found.names('')[0]!r}, say); move them into a split, "
            "or leave them out with --exclude"
        )
    labelled = [split for split in split_names if _in_classes(root, split, found)]
    label_names = tuple(sorted({name for split in labelled for name in child_folders(os.path.join(root, split))}))
    index = {name: number for number, name in enumerate(label_names)}
    names: list[str] = []
    labels: list[int] = []
    split_ids: list[int] = []
    for number, split in enumerate(split_names):
        for name in found.below(split):
            parts = name.split("/")
            names.append(name)
            labels.append(index[parts[1]] if len(parts) > 2 else schema.NO_LABEL)
            split_ids.append(number)
    return Catalog(
        "splits",
        FileReader(root),
        NameTable.of(names),
        split_names,
        np.array(split_ids, np.int32),
        labels=np.array(labels, np.int64) if label_names else None,
        label_names=label_names or None,
        ignored=dict(found.ignored),
    )
