"""Folders of images as sources: listing of files, and catalogs for flat folders, class folders and split folders."""

from __future__ import annotations

import errno
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from h5pack.errors import NoImagesError, SourceError
from h5pack.format import schema
from h5pack.sources.catalog import Catalog, FileReader, NameFilter, NameTable, one_split


@dataclass
class Walk:
    """The result of `walk`: the folders below a root that contain selected files."""

    # The sorted names of each folder's files; keys are folders relative to the root ("" is the root). The names are
    # joined into one string by NUL, which no name contains, so that a million names are not a million objects.
    folders: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # the sorted folders
    ignored: Counter[str] = field(default_factory=Counter)  # skipped files and folders by category

    def names(self, folder: str) -> list[str]:
        """Return the sorted names of the selected files in `folder`, without its path."""
        return self.folders[folder].split("\0")

    def below(self, top: str) -> Iterator[str]:
        """Yield the paths, relative to the root, of all selected files in and below the folder `top`."""
        for folder in self._folders_below(top):
            lead = f"{folder}/" if folder else ""
            for name in self.names(folder):
                yield lead + name

    def _folders_below(self, top: str) -> list[str]:
        if not top:
            return self.order
        # Strings that start with "a/" sort between "a/" and "a0", because "0" follows "/" in Unicode.
        first, last = bisect_left(self.order, f"{top}/"), bisect_left(self.order, f"{top}0")
        return ([top] if top in self.folders else []) + self.order[first:last]


def walk(root: str, names: NameFilter, top: str = "") -> Walk:
    """Find all files in and below the folder `top` of `root` that the filter `names` selects.

    The order does not depend on the file system. Links to files and folders are followed, except loops of links. Raise
    SourceError if a folder cannot be listed, unless the filter excludes everything below that folder.
    """
    found = Walk()
    stack: list[tuple[str, frozenset[tuple[int, int]]]] = [(top, frozenset())]
    while stack:
        folder, above = stack.pop()
        path = os.path.join(root, folder) if folder else root
        try:
            status = os.stat(path)
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                found.ignored["loops of links"] += 1
                continue
            wanted, below = _list_folder(path, folder, names, found.ignored)
        except OSError as error:
            if names.excludes_below(folder):
                found.ignored["excluded folders"] += 1
                continue
            raise SourceError(
                f"{path}: the folder cannot be listed ({error.strerror}); make it readable, or skip it with exclude",
                path=path,
                parameters=("exclude",),
            ) from error
        stack += [(name, above | {identity}) for name in below]
        if wanted:
            found.folders[folder] = "\0".join(sorted(wanted))
    found.order = sorted(found.folders)
    return found


def _list_folder(path: str, folder: str, names: NameFilter, ignored: Counter[str]) -> tuple[list[str], list[str]]:
    """Return the names of a folder's selected files, and the paths of its subfolders relative to the root."""
    wanted, below = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            relative = f"{folder}/{entry.name}" if folder else entry.name
            if _is_folder(entry):
                if _is_visible(entry.name):
                    below.append(relative)
                else:
                    ignored["hidden folders"] += 1
                continue
            refusal = names.refusal(relative)
            if refusal is None:
                wanted.append(entry.name)
            else:
                ignored[refusal] += 1
    return wanted, below


def child_folders(root: str) -> list[str]:
    """Return the sorted names of the visible folders directly below `root`."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if _is_visible(entry.name) and _is_folder(entry))


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "__MACOSX"


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        # A link that leads to itself is treated as a file, and becomes a rejected image when it cannot be read.
        if error.errno != errno.ELOOP:
            raise
        return False


# Folder names that denote a split, with a number by which the splits are ordered in a pack.
_SPLIT_RANKS = {
    "train": 0, "training": 0, "tr": 0,
    "val": 1, "valid": 1, "validation": 1, "dev": 1,
    "test": 2, "testing": 2,
}  # fmt: skip


def is_split_name(name: str) -> bool:
    """Return whether a folder with this name is a split by convention: train, val, test or a variant of these."""
    return name.lower() in _SPLIT_RANKS


def split_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct split names in stored order: train, validation, test, then others by name."""
    return tuple(sorted(set(names), key=lambda name: (_SPLIT_RANKS.get(name.lower(), 3), name)))


def flat(root: str, found: Walk) -> Catalog:
    """Return a catalog without labels of all images below `root`, at any depth."""
    names = NameTable.of(found.below(""))
    return Catalog("flat", FileReader(root), names, *one_split(len(names)), ignored=dict(found.ignored))


def classes(root: str, found: Walk, folders: list[str]) -> Catalog:
    """Return a catalog with one class per folder. As in torchvision's ImageFolder, a class includes its subfolders.

    `folders` are the sorted folders directly below `root`. Each is a class, even if it has no images.
    """
    if found.folders.get(""):
        advice = "move them into a class, or pack all images without labels with source_kind='flat'"
        raise _mixed(root, "class", repr(found.names("")[0]), advice, "source_kind='flat'")
    names: list[str] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        names.extend(found.below(folder))
        labels.extend([label] * (len(names) - len(labels)))
    return Catalog(
        "classes",
        FileReader(root),
        NameTable.of(names),
        *one_split(len(names)),
        labels=np.array(labels, np.int64),
        label_names=tuple(folders),
        ignored=dict(found.ignored),
    )


# Names of folders, without "_" and "-", that hold images, and of folders that hold what a model is to predict for them.
_IMAGE_FOLDERS = frozenset(("images", "image", "imgs", "img", "inputs", "input", "photos", "jpegimages", "rgb"))
_TARGET_FOLDERS = frozenset((
    "masks", "mask", "labels", "label", "annotations", "annotation", "segmentations", "segmentation", "targets",
    "segmentationclass", "segmentationobject", "groundtruth", "gt", "gtfine", "trimaps", "depth", "edges", "mattes",
))  # fmt: skip


def refuse_pairs(root: str, found: Walk, folders: list[str]) -> None:
    """Raise SourceError if one folder has images and another has their masks, under the same names.

    `folders` are paths relative to `root`.
    """
    plain = {folder: os.path.basename(folder).lower().replace("_", "").replace("-", "") for folder in folders}
    images = next((folder for folder in folders if plain[folder] in _IMAGE_FOLDERS), None)
    targets = next((folder for folder in folders if plain[folder] in _TARGET_FOLDERS), None)
    if images is None or targets is None:
        return
    stems = [
        {os.path.splitext(name[len(folder) + 1 :])[0] for name in found.below(folder)} for folder in (images, targets)
    ]
    kind = "source_kind='splits'" if "/" in images else "source_kind='classes'"
    fewest = min(map(len, stems))
    if fewest and 2 * len(stems[0] & stems[1]) >= fewest:
        raise SourceError(
            f"{root}: {images!r} and {targets!r} hold files of the same names, so they are probably images and their "
            f"masks, not classes; pack {os.path.join(root, images)} alone, or both as classes with {kind}",
            path=root,
            parameters=(kind,),
        )


def splits(root: str, found: Walk, folders: list[str]) -> Catalog:
    """Return a catalog with one split per folder, each of class folders or of images without labels (label -1)."""
    split_names = split_order(folder for folder in folders if any(found.below(folder)))
    if not split_names:
        raise NoImagesError(f"{root}: no images in its split folders ({', '.join(folders)}); check the path", path=root)
    if found.folders.get(""):
        raise _mixed(root, "split", repr(found.names("")[0]), "move them into a split, or skip them with exclude")
    labelled = [split for split in split_names if _has_classes(root, split, found)]
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


def _has_classes(root: str, split: str, found: Walk) -> bool:
    """Return whether a split's images are in class folders; raise SourceError if some are and others are not."""
    inner = next((name for name in found.below(split) if name.count("/") > 1), None)
    if inner is not None and split in found.folders:
        example = f"{found.names(split)[0]!r} beside {inner.split('/')[1]!r}"
        advice = "move them into a class, or skip them with exclude"
        raise _mixed(os.path.join(root, split), "class", example, advice)
    return inner is not None


def _mixed(folder: str, kind: str, example: str, advice: str, parameter: str = "exclude") -> SourceError:
    """Return the error for a folder that contains images beside class or split folders."""
    message = f"{folder}: has images beside its {kind} folders, such as {example}; {advice}"
    return SourceError(message, path=folder, parameters=(parameter,))
