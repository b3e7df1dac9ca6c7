"""COCO as a source: JSON files of annotations beside folders of images. Boxes and captions become fields."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import SourceError
from h5pack.format import schema
from h5pack.format.fields import FieldValues, RaggedRows
from h5pack.images.decode import MAX_SIDE
from h5pack.sources.catalog import NO_SPLITS, Catalog, NameFilter, NameTable, Note, unused_note
from h5pack.sources.folders import is_split_name, split_order
from h5pack.sources.reader import FileReader
from h5pack.system.parameters import is_path
from h5pack.system.text import counted

_FOLDER = "annotations"
_INSTANCES, _CAPTIONS = "instances", "captions"
_NAME = re.compile(rf"({_INSTANCES}|{_CAPTIONS})_(.+)\.json")
_MAX_ID = 2**63
_TAKEN = frozenset(("image_id", "category_id", "bbox", "iscrowd", "caption"))


def is_coco(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder has COCO's annotation files: ``annotations/{instances,captions}_*.json``."""
    return bool(_annotation_files(Path(path)))


def _annotation_files(root: Path) -> dict[str, list[Path]]:
    """Return the paths of the annotation files by split, such as "train2017"; {} if there are none."""
    found: dict[str, list[Path]] = {}
    try:
        paths = sorted((root / _FOLDER).iterdir())
    except OSError:
        return found
    for path in paths:
        match = _NAME.fullmatch(path.name)
        if match is not None and path.is_file():
            found.setdefault(match[2], []).append(path)
    return found


@dataclass
class _Image:
    """An image with its annotations."""

    name: str  # path of its file, relative to the folder of its split
    split: int  # index into the catalog's `split_names`
    image_id: int
    size: tuple[int, int]  # height and width; 0 if they are not given
    boxes: list[list[float]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)  # category id of each box
    crowd: list[int] = field(default_factory=list)  # for each box: 1 if it contains a crowd, else 0
    captions: list[str] = field(default_factory=list)
    categories: set[int] = field(default_factory=set)  # category ids of annotations without a box


@dataclass
class _Annotations:
    """The content of the annotation files that were read so far."""

    images: list[_Image] = field(default_factory=list)
    categories: dict[int, str] = field(default_factory=dict)  # names by id
    has_boxes: bool = False
    has_captions: bool = False
    unused: set[str] = field(default_factory=set)  # keys of annotations that are not packed
    # "empty": number of boxes left out for having no area; "unknown": number of annotations of images not listed.
    counts: Counter[str] = field(default_factory=Counter)


def coco(path: Path, wanted: NameFilter, root: str | None = None) -> Catalog:
    """Return the catalog of a folder in COCO's layout, or of one annotation file.

    The images of a split are in the order in which its annotation files list them. `root` is the folder that contains
    the images, directly or in one of the usual subfolders. Default: `path` if it is a folder, else the annotation
    file's folder or its parent.
    """
    files = _annotation_files(path) if path.is_dir() else {_split_of(path): [path]}
    if not files:
        problem = f"has no {_FOLDER}/{_INSTANCES}_*.json and no {_FOLDER}/{_CAPTIONS}_*.json"
        raise SourceError.at(path, f"{problem}; give annotations, or a table as CSV, TSV or JSONL")
    splits = split_order(_short(name) for name in files)
    top = Path(root) if root is not None else path if path.is_dir() else None
    found, folders = _Annotations(), []
    for name, some in sorted(files.items(), key=lambda item: splits.index(_short(item[0]))):
        images: dict[int, _Image] = {}
        for one in some:
            _read(one, found, images, splits.index(_short(name)))
        folder = _image_folder(some[0], name, images.values(), top)
        folders += [os.path.relpath(folder, top) if top is not None else ""] * len(images)
        found.images += images.values()
    labels, label_names = _image_labels(found)
    base = str(top if top is not None else folder)
    paths = zip(folders, (image.name for image in found.images), strict=True)
    names = [os.path.normpath(os.path.join(*pair)) for pair in paths]
    return Catalog(
        "coco",
        FileReader(base),
        NameTable.of(names),
        splits if len(splits) > 1 or is_split_name(splits[0]) else NO_SPLITS,
        np.array([image.split for image in found.images], np.int32),
        labels=labels,
        label_names=label_names,
        fields=_fields(found),
        notes=_notes(found),
        coordinate_sizes=np.array([image.size for image in found.images], np.int32).reshape(-1, 2),
    ).filtered(wanted)


def _split_of(path: Path) -> str:
    """Return the split of an annotation file: from its name, else its folder's name, else the stem of the file."""
    match, folder = _NAME.fullmatch(path.name), path.absolute().parent.name
    return match[2] if match is not None else folder if is_split_name(folder) else path.stem


def _short(name: str) -> str:
    """Return the name of a split without a year: "train" for "train2017"."""
    plain = name.rstrip("0123456789")
    return plain if is_split_name(plain) else name


def _image_folder(file: Path, split: str, images: Collection[_Image], top: Path | None) -> Path:
    """Return the first usual folder that contains an image; if `images` is empty, the first of the usual folders.

    The first image that is in one of the usual folders decides. These are `top` and folders in it, such as "train2017"
    and "images/train2017". If `top` is None, the annotation file's folder and its parent replace `top`.
    """
    parents = (top,) if top is not None else (file.parent.parent, file.parent)
    inner = ((), (split,), ("images", split), (_short(split),), ("images", _short(split)), ("images",))
    folders = [parent.joinpath(*parts) for parts in inner for parent in parents]
    if not images:
        return folders[0]
    for image in images:
        for folder in folders:
            if (folder / image.name).is_file():
                return folder
    missing = f"none of its images, such as {image.name!r}, is in one of the usual folders"
    raise SourceError.at(file, f"{missing}; name the folder of the images with root", "root")


def _read(path: Path, found: _Annotations, images: dict[int, _Image], split: int) -> None:
    """Read an annotation file: add its images to `images`, its categories to `found`, its annotations to both."""
    try:
        content = json.loads(path.read_bytes())
        entries, annotations = content["images"], content["annotations"]
        categories = content.get("categories", [])
        if not all(isinstance(part, list) for part in (entries, annotations, categories)):
            raise TypeError("its images, annotations or categories are not a list")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"has no {error}" if isinstance(error, KeyError) else str(error)
        problem = f"is not COCO's JSON ({problem}); give a file of annotations, or another table as CSV, TSV or JSONL"
        raise SourceError.at(path, problem) from error
    known: set[int] = set()
    _add_all(path, "image", entries, lambda entry: _add_image(entry, images, split, known))
    _add_all(path, "category", categories, lambda category: _add_category(found, category))
    _add_all(path, "annotation", annotations, lambda annotation: _add(found, images, annotation))


def _add_all(path: Path, noun: str, entries: list[Any], add: Callable[[Any], None]) -> None:
    """Call `add` with each of the entries; raise SourceError if one is malformed."""
    for number, entry in enumerate(entries):
        try:
            add(entry)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise SourceError.at(path, f"{noun} {number} is malformed ({error!r}); correct it") from error


def _add_category(found: _Annotations, category: Any) -> None:
    number = _integer(category["id"])
    name = str(category.get("name", number))
    if found.categories.setdefault(number, name) != name:
        raise ValueError(f"id {number} is named {name!r}, but was named {found.categories[number]!r} before")


def _add_image(entry: Any, images: dict[int, _Image], split: int, known: set[int]) -> None:
    """Add an image that no other file of the split has listed. `known` are the ids of this file's images so far."""
    image_id, name = _integer(entry["id"]), entry["file_name"]
    size = _integer(entry.get("height") or 0), _integer(entry.get("width") or 0)
    if not isinstance(name, str) or not is_path(name):
        raise ValueError(f"file_name {name!r}")
    if not -_MAX_ID <= image_id < _MAX_ID or not 0 <= min(size) <= max(size) <= MAX_SIDE:
        raise ValueError(f"id {image_id}, size {size}")
    if image_id in known or (image_id in images and images[image_id].name != name):
        raise ValueError(f"two images have the id {image_id}")
    known.add(image_id)
    image = images.setdefault(image_id, _Image(name, split, image_id, size))
    if 0 in image.size:
        # An earlier file of the split may lack the image's size.
        image.size = size


def _add(found: _Annotations, images: dict[int, _Image], annotation: Any) -> None:
    """Add an annotation to its image. Leave out a box that has no area in the image. Boxes are clipped later."""
    image = images.get(_integer(annotation["image_id"]))
    found.unused.update(annotation.keys() - _TAKEN)
    if image is None:
        found.counts["unknown"] += 1
        return
    if "caption" in annotation:
        found.has_captions = True
        image.captions.append(_text(annotation["caption"]))
    if "bbox" not in annotation:
        if "category_id" in annotation:
            image.categories.add(_category(found, annotation))
        return
    found.has_boxes = True
    left, top, width, height = (float(number) for number in annotation["bbox"])
    if not math.isfinite(left + top + width + height):
        raise ValueError(f"bbox {annotation['bbox']}")
    label = _category(found, annotation)
    right, bottom = left + width, top + height
    height, width = image.size
    if max(left, 0) >= min(right, width or right) or max(top, 0) >= min(bottom, height or bottom):
        found.counts["empty"] += 1
        return
    image.boxes.append([left, top, right, bottom])
    image.labels.append(label)
    image.crowd.append(int(int(annotation.get("iscrowd") or 0) != 0))


def _category(found: _Annotations, annotation: Any) -> int:
    label = _integer(annotation["category_id"])
    if label not in found.categories:
        raise ValueError(f"there is no category {label}")
    return label


def _image_labels(found: _Annotations) -> tuple[npt.NDArray[np.int64] | None, tuple[str, ...] | None]:
    """Return labels and class names: the categories of images whose annotations have no boxes, as in iNaturalist.

    Return (None, None) if an annotation has a box, if an image has several categories, or if no image has one.
    """
    counts = {len(image.categories) for image in found.images}
    if found.has_boxes or not any(counts):
        return None, None
    if max(counts) > 1:
        found.unused.add("category_id")
        return None, None
    ids = sorted(found.categories)
    numbers = {label: number for number, label in enumerate(ids)}
    labels = [next(map(numbers.__getitem__, image.categories), schema.NO_LABEL) for image in found.images]
    return np.array(labels, np.int64), tuple(found.categories[label] for label in ids)


def _integer(value: Any) -> int:
    """Return a number of JSON, or a text of digits, as an integer; raise ValueError if it is a bool or a fraction."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def _text(caption: Any) -> str:
    if not isinstance(caption, str) or "\0" in caption:
        raise ValueError(f"caption {caption!r:.60}")
    caption.encode()
    return caption


def _fields(found: _Annotations) -> dict[str, FieldValues]:
    fields: dict[str, FieldValues] = {"image_ids": np.array([image.image_id for image in found.images], np.int64)}
    if found.has_boxes:
        ids = sorted(found.categories)
        boxes = [np.array(image.boxes).reshape(-1, 4) for image in found.images]
        fields["boxes"] = RaggedRows.of(schema.BOXES, boxes, np.zeros((0, 4)))
        # A dict, not an array, because ids may be beyond int64.
        numbers = {label: number for number, label in enumerate(ids)}
        labels = _ragged([[numbers[label] for label in image.labels] for image in found.images])
        fields["box_labels"] = replace(labels, classes=tuple(found.categories[label] for label in ids))
        fields["crowd"] = _ragged([image.crowd for image in found.images])
    if found.has_captions:
        fields["captions"] = RaggedRows.of_texts([image.captions for image in found.images], schema.TEXTS)
    return fields


def _ragged(rows: Sequence[list[int]]) -> RaggedRows:
    return RaggedRows.of(schema.RAGGED, [np.array(row, np.int64) for row in rows], np.zeros(0, np.int64))


def _notes(found: _Annotations) -> tuple[Note, ...]:
    advice = "only captions, boxes with category_id and iscrowd, or one category_id of each image are packed"
    notes = unused_note("values of annotations", sorted(found.unused), advice)
    reasons = {"empty": ("box", "having no area"), "unknown": ("annotation", "belonging to no image")}
    for kind, (noun, reason) in reasons.items():
        if found.counts[kind]:
            notes += (Note(f"{counted(found.counts[kind], noun)} left out for {reason}"),)
    return notes
