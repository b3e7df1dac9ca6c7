"""Labels and fields of an HDF5 file that any tool made: detection of the labels, and the values of both."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.errors import DamagedRowsError, H5PackError, PackFormatError, SourceError
from h5pack.format import schema
from h5pack.format.fields import FieldValueError, FieldValues, is_numeric_dtype, parse_texts
from h5pack.read.chunk_index import index_checksums
from h5pack.read.description import describe_file
from h5pack.read.engine import Engine
from h5pack.read.hdf5 import (
    attribute_names,
    find_item,
    is_pack,
    open_file,
    require_dataset,
    require_filters,
    require_open_sources,
    text,
)
from h5pack.read.ragged import index_ragged, is_ragged, read_ragged
from h5pack.read.storage import FileIdentity
from h5pack.read.virtual import files_of
from h5pack.sources.text_tables import class_ids, zero_for_minus_one
from h5pack.system.files import absolute_path
from h5pack.system.machine import available_memory
from h5pack.system.text import format_bytes

FIELDS_ADVICE = "fields=[NAME]"
_MIN_CHECKED_BYTES = 2**20  # Reading how much memory is free takes longer than reading a smaller dataset.
_LABELS = ("labels", "label", "targets", "target", "y", "class", "category")
# Matches a dataset's path if it contains a word for images: "images", "train/images", "train_set_x" or "X".
IMAGE_WORD = re.compile(r"(?<![a-z])(?:images?|imgs?|x)(?![a-z])", re.IGNORECASE)


def find_labels(
    file: h5py.File, images: str, rows: int, *, fields: Sequence[str] = (), transposed: bool = False
) -> str | None:
    """Return the path of the labels in the group of `images`, found by a usual name such as "y"; None if not found.

    A dataset in `fields` is not returned. The shape is (rows,) or (rows, K), apart from axes of length 1. With
    `transposed`, it may also be (1, rows), as MATLAB stores a column; only `convert` reads such labels. In a pack, any
    object "labels" is returned. Raise PackFormatError if an object with a usual name is damaged.
    """
    if is_pack(file) and images in (schema.IMAGES, schema.ENCODED):
        # Only "labels" has the labels of a pack. A field may be called "label".
        return schema.LABELS if schema.LABELS in file else None
    folder, _, own = images.rpartition("/")
    prefix = f"{folder}/" if folder else ""
    for name in _label_names(own):
        found = find_item(file, f"{prefix}{name}")
        if not isinstance(found, h5py.Dataset) or name == own or f"{prefix}{name}" in fields:
            continue
        shape = found.shape or ()
        fits = shape[:1] == (rows,) and sum(length != 1 for length in shape[1:]) < 2
        if fits or (transposed and shape == (1, rows)):
            return f"{prefix}{name}"
    return None


@functools.cache
def log_unused_labels(path: str, images: str) -> None:
    """Warn, once per process and dataset, if a file that is opened without labels seems to have labels of `images`."""
    found = None
    with open_file(path) as file, contextlib.suppress(PackFormatError):
        images = images.strip("/")
        found = find_labels(file, images, len(file[images]))
    if found is not None:
        advice = "%s: opened without labels; give labels=%r to load the labels of %r"
        logging.getLogger("h5pack").warning(advice, path, found, images)


def _label_names(images: str) -> Iterator[str]:
    match = IMAGE_WORD.search(images)
    for word in _LABELS:
        if match is not None:
            for written in (word, word.upper(), word.title()):
                yield images[: match.start()] + written + images[match.end() :]
        yield word


def is_text(item: Any) -> bool:
    """Return whether an item of a file is a dataset with one text per row."""
    return isinstance(item, h5py.Dataset) and item.ndim == 1 and h5py.check_string_dtype(item.dtype) is not None


_OTHER, _NONE = "labels=NAME", "labels=''"
_CORRECT = "correct its names with h5py, or restore the file"  # advice on a pack whose names were edited


def read_labels(
    path: Path, file: h5py.File, name: str, rows: int, *, or_field: bool
) -> tuple[npt.NDArray[Any], tuple[str, ...] | None]:
    """Return the labels of N images and names: int64 (N,) with class names or None, or uint8 (N, K) with column names.

    N is `rows`, unless the dataset has another length. If `or_field` is true, errors recommend to pack numbers that are
    not labels as a field.
    """
    dataset = require_dataset(file, name, _OTHER)
    values = _read_all(path, dataset, name)
    as_field = (f"fields={name!r}",) if or_field else ()
    if values.size == rows == max(values.shape, default=0):
        values = values.reshape(-1)
    if values.ndim not in (1, 2):
        raise _label_error(path, name, f"has shape {values.shape}, but labels are (N,) or (N, K)", _OTHER, *as_field)
    if values.ndim == 1 and values.dtype.kind in "OSU":
        if any(not isinstance(value, (bytes, str)) for value in values.tolist()):
            raise _label_error(path, name, "does not hold one number or one text per row", _OTHER, _NONE)
        words, numbers = class_ids([text(value) for value in values.tolist()])
        return numbers, words or None
    if values.dtype.kind not in "biuf":
        raise _label_error(path, name, f"holds {values.dtype}, which cannot be labels", _OTHER, _NONE)
    if not are_whole(values) or (values.size and not -(2**63) <= int(values.min()) <= int(values.max()) < 2**63):
        odd = values[(values != np.floor(values)) | (values < -(2.0**63)) | (values >= 2.0**63)]
        found = f"holds numbers that are not all 64-bit integers, such as {odd[0]}"
        raise _label_error(path, name, found, _OTHER, _NONE, *as_field)
    if values.ndim == 2:
        columns = attribute_names(dataset, schema.COLUMNS) or ()
        if columns and len(columns) != values.shape[1] and is_pack(file):
            found = f"has {values.shape[1]} columns, but {len(columns)} names of columns"
            raise dataset_source_error(path, name, f"{found}; {_CORRECT}")
        if len(columns) != values.shape[1]:
            columns = tuple(f"label_{column}" for column in range(values.shape[1]))
        return _byte_table(path, name, values, as_field), columns
    labels = values.astype(np.int64)
    classes = attribute_names(dataset, schema.CLASSES) or _enum_names(dataset)
    # In a pack, beside class names, and if all labels are -1, -1 may be `NO_LABEL`, which must not become 0.
    if classes is None and not is_pack(file) and labels.max(initial=0) > 0:
        labels = zero_for_minus_one(labels)
    if classes is not None and len(labels) and not schema.NO_LABEL <= labels.min() <= labels.max() < len(classes):
        found = f"has {len(classes)} classes, but values from {labels.min()} to {labels.max()}"
        if is_pack(file):
            raise dataset_source_error(path, name, f"{found}; {_CORRECT}")
        raise _label_error(path, name, found, _OTHER, _NONE)
    return labels, classes


def are_whole(values: npt.NDArray[Any] | h5py.Dataset) -> bool:
    """Return whether `values` contain no fraction, infinity or NaN. Of a dataset, check only the first 1,024 rows."""
    if values.dtype.kind != "f":
        return True
    try:
        first = values[:1024] if isinstance(values, h5py.Dataset) else values
    except OSError:
        return True  # Reading all labels will raise an error with advice.
    return bool((np.isfinite(first) & (first == np.rint(first))).all())


def _enum_names(dataset: h5py.Dataset) -> tuple[str, ...] | None:
    """Return the names of the values 0, 1, ... of an HDF5 enum; None for other types, and if the values have gaps."""
    names = {value: name for name, value in (h5py.check_enum_dtype(dataset.dtype) or {}).items()}
    return tuple(names[value] for value in sorted(names)) if names and sorted(names) == [*range(len(names))] else None


def dataset_source_error(path: Path, name: str, problem: str, *parameters: str) -> SourceError:
    """Return the error to raise for a dataset that cannot be packed; `problem` continues after the dataset's name."""
    return SourceError.at(path, f"{name!r} {problem}", *parameters, dataset=name)


def _label_error(path: Path, name: str, found: str, *advice: str) -> SourceError:
    return dataset_source_error(path, name, f"{found}; give {' or '.join(advice)}", *advice)


def read_field(path: Path, file: h5py.File, name: str) -> FieldValues:
    """Return a field's values in native byte order: numbers, texts or ragged rows. Raise SourceError for others."""
    if is_ragged(file, name):
        index = index_ragged(file, name)
        _require_memory(path, name, index.data.rows * index.data.row_bytes)
        indexes = {index.data.name: index.data, **index_checksums(file, name, index.rows)}
        engine = Engine(absolute_path(path), FileIdentity.of(os.fspath(path)), indexes, warn=False)
        with _reporting(path, name), contextlib.closing(engine):
            return read_ragged(engine, index, np.arange(index.rows), check=True)
    dataset = require_dataset(file, name, FIELDS_ADVICE)
    if is_text(dataset):
        try:
            return parse_texts([text(value) for value in _read_all(path, dataset, name).tolist()])
        except FieldValueError as error:
            raise dataset_source_error(path, name, f"row {error.row} {error}; leave out this field") from None
    if not is_numeric_dtype(dataset.dtype) or not dataset.shape:
        problem = f"holds {dataset.dtype}, but a field needs rows of numbers or one text per row; leave it out"
        raise dataset_source_error(path, name, problem)
    return _read_all(path, dataset, name)


def _byte_table(path: Path, name: str, values: npt.NDArray[Any], as_field: tuple[str, ...]) -> npt.NDArray[np.uint8]:
    """Convert a table of numbers from 0 to 255 to uint8. In a column of only -1 and 1, as in CelebA, -1 becomes 0."""
    fitted = zero_for_minus_one(values)
    if fitted.size and not 0 <= fitted.min() <= fitted.max() <= 255:
        found = f"holds numbers from {values.min():.0f} to {values.max():.0f}, but a column of labels holds 0 to 255"
        raise _label_error(path, name, f"{found} (or only -1 and 1)", _OTHER, _NONE, *as_field)
    return fitted.astype(np.uint8)


def _require_memory(path: Path, name: str, size: int) -> None:
    if size > _MIN_CHECKED_BYTES and size > available_memory() // 2:
        problem = f"holds {format_bytes(size)}, over half of the free memory; convert the file without it"
        raise dataset_source_error(path, name, problem)


def _read_all(path: Path, dataset: h5py.Dataset, name: str) -> npt.NDArray[Any]:
    """Return all values of a dataset. Numbers are read by `Engine`, and checked if the file has their checksums."""
    _require_memory(path, name, math.prod(dataset.shape or ()) * dataset.dtype.itemsize)
    with _reporting(path, name):
        if dataset.dtype.kind in "biuf" and dataset.shape:
            pack, rows = describe_file(path, name, None), np.arange(len(dataset))
            with contextlib.closing(Engine(pack.path, pack.identity, pack.indexes, warn=False)) as engine:
                values = engine.read(name, rows)
                engine.check(name, rows, values)
            return values
        if dataset.is_virtual:
            files_of(dataset)  # Raises an error if a source is missing.
        require_filters(dataset)
        values = np.asarray(dataset[()])
        require_open_sources(dataset)
        return values


@contextlib.contextmanager
def _reporting(path: Path, name: str) -> Iterator[None]:
    """Turn DamagedRowsError, and errors other than H5PackError, into SourceError.

    Advise to convert without the dataset, because `join` and others, which read all datasets of a pack, cannot omit it.
    """
    try:
        yield
    except DamagedRowsError as error:
        problem = f"{error}; or leave {name!r} out when you convert this file"
        raise SourceError(problem, path=path, dataset=name, rows=error.rows) from error
    except H5PackError:
        raise
    except Exception as error:
        # On damaged files, h5py may raise any exception type.
        problem = f"cannot be read ({error}); restore the file, or leave this dataset out when you convert it"
        raise dataset_source_error(path, name, problem) from error
