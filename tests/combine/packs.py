"""Packs to be combined, whose rows have labels, splits and fields of all kinds, and what a pack contains."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import h5pack
from tests.makers import FIELDS, annotated_images, numbers, quick, write_lines

KINDS: dict[str, dict[str, Any]] = {
    "pixels": {}, "nchw": {"layout": "nchw", "size": (30, 26), "chunk_rows": 4},
    "gzip": {"compression": "gzip", "chunk_rows": 4}, "jpeg": {"keep": "jpeg"}, "1.8": {"compat": True},
}  # fmt: skip
SOURCE = {**FIELDS, "mask_columns": "mask", "label_columns": "label", "split_column": "split"}
FIELD_NAMES = ["boxes", "points", "caption", "captions", "sizes", "score", "mask"]


def source(root: Path, prefix: str, count: int, classes: list[str], splits: tuple[str, ...] = ("train", "val")) -> Path:
    """A JSONL manifest of images called PREFIX000.jpg and so on; the split changes after every third image."""
    records = annotated_images(root, count)
    for number, record in enumerate(records):
        (root / record["path"]).rename(root / f"{prefix}{number:03d}.jpg")
        Image.fromarray(numbers(number, (24, 20))).save(root / f"{prefix}{number:03d}.png")
        record["number"] = number
        record["path"], record["mask"] = f"{prefix}{number:03d}.jpg", f"{prefix}{number:03d}.png"
        record["label"], record["split"] = classes[number % len(classes)], splits[number // 3 % len(splits)]
    return write_lines(root / "list.jsonl", records)


def pack(root: Path, name: str, count: int, classes: list[str], **settings: Any) -> Path:
    """A pack of such a source, and the source beside it."""
    for path, data in _files(name, count, tuple(classes), tuple(settings.items())).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root / f"{name}.h5"


@functools.cache
def _files(name: str, count: int, classes: tuple[str, ...], settings: tuple[tuple[str, Any], ...]) -> dict[Path, bytes]:
    """The files of a pack and its source, which many tests share."""
    with tempfile.TemporaryDirectory() as folder:
        found = source(Path(folder, name), name, count, list(classes))
        h5pack.convert(found, Path(folder, f"{name}.h5"), **quick(**SOURCE | dict(settings)))
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder): path.read_bytes() for path in paths}


def two_packs(root: Path, kind: str) -> list[Path]:
    """Two packs, of which the second has a class that the first lacks, and lacks one of it."""
    settings = KINDS[kind]
    return [pack(root, "a", 14, ["cat", "dog"], **settings), pack(root, "b", 10, ["emu", "cat"], **settings)]


def contents(*paths: Path) -> dict[str, tuple[Any, ...]]:
    """Split, class, pixels and fields of each row, by file name; rows are compared with their checksums."""
    found = {}
    for path in paths:
        dataset = h5pack.H5Dataset(path, fields=FIELD_NAMES, check=True)
        names, splits = dataset.filenames or [], {}
        for split, rows in dataset.splits.items():
            splits.update(dict.fromkeys(np.asarray(rows).tolist(), split))
        for row, (image, label, *fields) in enumerate(dataset.__getitems__(range(len(dataset)))):
            values = [one.tolist() if hasattr(one, "tolist") else one for one in (image, *fields)]
            assert names[row] not in found
            found[names[row]] = (splits[row], (dataset.classes or ())[int(label)], *values)
    return found
