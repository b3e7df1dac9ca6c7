"""An HDF5 file as a source: detection of the datasets of images and labels, and interpretation of their numbers."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.errors import DamagedRowsError, H5PackError, OptionsError, PackFormatError, SourceError
from h5pack.format import schema
from h5pack.format.fields import (
    FieldValueError,
    FieldValues,
    is_field_name,
    is_numeric_dtype,
    parse_texts,
    require_field_names,
)
from h5pack.read.chunk_index import index_checksums
from h5pack.read.description import describe_file
from h5pack.read.encoded import has_kept_images, is_encoded, is_mask_group
from h5pack.read.engine import Engine
from h5pack.read.hdf5 import (
    attribute_names,
    dataset_names,
    datasets_text,
    open_file,
    reporting_damage,
    require_dataset,
    text,
)
from h5pack.read.ragged import find_field, index_ragged, is_ragged, own_fields, read_ragged
from h5pack.read.storage import FileIdentity, SourceFile
from h5pack.read.virtual import files_of, require_sources
from h5pack.sources.catalog import Catalog, NameFilter, NameTable, Note, PixelField, split_ids, unused_note
from h5pack.sources.hdf5_rows import CHANNEL_AXES, HDF5RowReader, PixelForm, mask_dtype
from h5pack.sources.manifest import class_ids
from h5pack.system.files import absolute_path
from h5pack.system.machine import available_memory
from h5pack.system.parameters import invalid
from h5pack.system.text import format_bytes

_FIELDS = "fields=[NAME]"  # In advice.
_MATLAB_CLASS = "MATLAB_class"
_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
_LABELS = ("labels", "label", "targets", "target", "y", "class", "category")
# Matches the word for images in a dataset's name, such as "images", "train/images", "train_set_x" or "X".
_IMAGE_WORD = re.compile(r"(?<![a-z])(?:images?|imgs?|x)(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class HDF5Datasets:
    """The roles of the datasets of an HDF5 file, given by their paths in the file."""

    images: str | None = None  # default: the dataset that looks like images
    labels: str | None = None  # "" for none; default: a dataset beside the images with a name like "labels"
    fields: tuple[str, ...] = ()  # further datasets with one row per image
    channel_axis: str | None = None  # one of `CHANNEL_AXES`; default: inferred by `channel_axes`
    value_range: tuple[float, float] | None = None  # the values mapped to 0 and 255; see `PixelForm`
    own_fields: bool = True  # if false, only fields of masks and of further images are kept

    def __post_init__(self) -> None:
        if self.channel_axis is not None and self.channel_axis not in CHANNEL_AXES:
            raise invalid(
                "channel_axis", self.channel_axis, f" is invalid; it must be one of {', '.join(CHANNEL_AXES)}"
            )
        if self.value_range is not None:
            low, high = self.value_range
            if not (math.isfinite(high - low) and low < high):
                raise OptionsError(
                    f"value_range is {low:g} to {high:g}; give two finite numbers, the first below the second",
                    parameters=("value_range",),
                )


def is_hdf5(path: Path) -> bool:
    """Return whether a file has HDF5's signature (at its start or after a user block) or a suffix of HDF5 files."""
    with contextlib.suppress(OSError):
        if h5py.is_hdf5(path):
            return True
    return path.suffix.lower() in _SUFFIXES


def hdf5_catalog(path: Path, datasets: HDF5Datasets, wanted: NameFilter) -> Catalog:
    """Return the catalog of an HDF5 file: the rows of its images whose names `wanted` allows, in row order."""
    with open_file(path) as file, reporting_damage(path, SourceError):
        catalog = _catalog(path, file, datasets)
    return catalog.filtered(wanted)


def _catalog(path: Path, file: h5py.File, datasets: HDF5Datasets) -> Catalog:
    images = (datasets.images or find_images(file)).strip("/")
    pack = describe_file(path, images, None, sized=False)
    rows = pack.indexes[images].rows
    labels = find_labels(file, images, rows) if datasets.labels is None else datasets.labels.strip("/") or None
    asked = tuple(find_field(file, name) for name in datasets.fields)
    fields = tuple(name for name in asked if name != labels)
    twice = (Note(f"{labels!r} is packed as labels, and not as a field, too"),) if labels in asked else ()
    if not asked and schema.FORMAT in file.attrs and images in (schema.IMAGES, schema.ENCODED):
        fields = tuple(own_fields(file))
    form = None if pack.indexes[images].is_encoded else _form(path, require_dataset(file, images), datasets)
    if form is None and (datasets.channel_axis or datasets.value_range):
        problem = f"{images!r} holds encoded images; leave out channel_axis and value_range, which apply to arrays only"
        raise OptionsError.at(path, problem, "channel_axis", "value_range", dataset=images)
    kinds = {name: kind for name in fields if (kind := _pixel_kind(file, name, form, images))}
    masks = tuple(kinds)
    if not datasets.own_fields:
        fields = masks
    if masks:
        pack = describe_file(path, images, None, masks, sized=False)
    reader = HDF5RowReader(pack, form, masks, _files_of(file, (labels, schema.FILENAMES, *fields)))
    values, names = (None, None) if labels is None else _read_labels(path, file, labels)
    field_names = tuple(map(os.path.basename, fields))
    require_field_names(str(path), field_names, path)
    columns = {field: _read_field(path, file, field) for field in fields if field not in masks}
    for name, table in ((labels, values), *columns.items()):
        if table is not None and len(table) != rows:
            problem = f"has {len(table):,} rows, but {images!r} has {rows:,}; name datasets of the same length"
            raise _dataset_error(path, str(name), problem)
    tables = dict(zip(fields, field_names, strict=True))
    rows_names = _names(file, images, rows)
    return Catalog(
        "hdf5",
        reader,
        rows_names,
        *split_ids(pack.splits, rows, str(path), path),
        labels=values,
        label_names=names,
        fields={tables[name]: column for name, column in columns.items()},
        pixel_fields=tuple(PixelField(tables[name], kind, rows_names) for name, kind in kinds.items()),
        notes=(
            *twice,
            *_transposed(file[images]),
            *_unused(file, images, rows, {images, labels, *fields}, labelled=labels is not None),
        ),
        about=f"images {images!r}" + ("" if labels is None else f", labels {labels!r}"),
    )


def _files_of(file: h5py.File, names: Iterable[str | None]) -> frozenset[SourceFile]:
    """Return the files that hold the datasets `names`, and the datasets in the groups `names`."""
    items = [file.get(name) for name in names if name is not None]
    found = [part for item in items for part in (item.values() if isinstance(item, h5py.Group) else (item,))]
    return frozenset().union(*(files_of(one) for one in found if isinstance(one, h5py.Dataset)))


def _transposed(images: h5py.Dataset | h5py.Group) -> tuple[Note, ...]:
    """Return a note if MATLAB stored the images, because it stores the axes of arrays in reverse order."""
    if _MATLAB_CLASS not in images.attrs or not isinstance(images, h5py.Dataset) or images.ndim < 3:
        return ()
    text = (
        "MATLAB stores axes in reverse order, so images that were saved as (H, W, C, N) have their width before their"
    )
    return (Note(f"{text} height here; if so, save permute(X, [2 1 3 4]) in MATLAB"),)


def _unused(file: h5py.File, images: str, rows: int, used: set[str | None], *, labelled: bool) -> tuple[Note, ...]:
    """Return notes that list the datasets that are not packed, except the tables that h5pack itself writes."""
    own = schema.RESERVED if schema.FORMAT in file.attrs else ()
    names = [name for name in dataset_names(file) if name not in used]
    names = [name for name in names if name.partition("/")[0] not in own]
    names += [name for name in own_fields(file) if own and name not in used]
    # `_has_rows` is false for a damaged dataset. That is no error here, because the dataset is not packed.
    fitting = [name for name in names if _has_rows(file, name, rows)]
    others = [name for name in names if name not in fitting]
    or_labels = "" if labelled else ", or one of them with labels"
    advice = f"datasets of numbers or texts can be packed with fields{or_labels}"
    return (
        *unused_note("datasets", fitting, advice, "fields", *(() if labelled else ("labels",))),
        *unused_note("datasets", others, f"they do not have the length of {images!r}, which is {rows:,}"),
    )


def _has_rows(file: h5py.File, name: str, rows: int) -> bool:
    try:
        if is_ragged(file, name):
            return index_ragged(file, name).rows == rows
        return bool(file[name].shape) and len(file[name]) == rows
    except Exception:
        return False


def find_images(file: h5py.File) -> str:
    """Return the path of the images: "images", a pack's "encoded", or else the only dataset that looks like images."""
    if isinstance(file.get(schema.IMAGES), h5py.Dataset):
        return schema.IMAGES
    if schema.FORMAT in file.attrs and has_kept_images(file, schema.ENCODED):
        return schema.ENCODED
    found = [name for name in dataset_names(file) if _looks_like_images(file[name])]
    if len(found) == 1:
        return found[0]
    shapes = "arrays (N, H, W), (N, H, W, C) or (N, C, H, W) of numbers, or encoded images"
    problem = f"none of its datasets looks like images, that is, {shapes} (found: {datasets_text(file)})"
    if found:
        problem = f"{', '.join(map(repr, found))} look like images"
    path, parameter = file.filename, "images=NAME"
    raise SourceError.at(path, f"{problem}; choose one with {parameter}", parameter)


def detect_names(path: str | os.PathLike[str], images: str, labels: str) -> tuple[str, str]:
    """Return the names of the datasets of images and labels to read.

    The default names, "images" and "labels", stand for datasets that are detected if the file has none of these names;
    images are detected only outside of packs. Other names are returned as they are. Raise PackFormatError if none or
    several datasets look like images.
    """
    with open_file(path) as file:
        if images == schema.IMAGES and images not in file and schema.FORMAT not in file.attrs:
            try:
                images = find_images(file)
            except SourceError as error:
                raise PackFormatError(str(error), path=error.path, parameters=error.parameters) from error
        rows = file.get(images)
        if labels == schema.LABELS and labels not in file and isinstance(rows, h5py.Dataset) and rows.shape:
            found = find_labels(file, images, len(rows))
            labels = found if found is not None and file[found].dtype.kind in "biuf" else labels
    return images, labels


def _looks_like_images(dataset: h5py.Dataset) -> bool:
    try:
        return is_encoded(dataset) or is_image_array(dataset.shape or (), dataset.dtype)
    except TypeError:
        # NumPy has no dtype for the type of this dataset.
        return False


def is_image_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Return whether an array's rows look like images: numeric, height and width of at least 8, at most 4 channels."""
    if dtype.kind not in "biuf" or len(shape) not in (3, 4):
        return False
    return channel_axes(shape[1:]) != [] and sorted(shape[1:])[-2] >= 8


def channel_axes(row_shape: tuple[int, ...]) -> list[str]:
    """Return the members of `CHANNEL_AXES` that fit the shape of a row; [] if it cannot be an image."""
    if len(row_shape) == 2:
        return ["none"]
    if len(row_shape) != 3:
        return []
    return [name for name, axis in (("last", 2), ("first", 0)) if 1 <= row_shape[axis] <= 4]


def _form(path: Path, dataset: h5py.Dataset, datasets: HDF5Datasets) -> PixelForm:
    shape, name = dataset.shape[1:], dataset.name.lstrip("/")
    stored = dataset.attrs.get(schema.LAYOUT)
    allowed = channel_axes(shape)
    asked = datasets.channel_axis
    if asked is None and stored is not None:
        asked = "first" if text(stored) == "nchw" else "last"
    if not allowed or (asked is not None and asked not in allowed) or 0 in shape:
        if allowed and 0 not in shape:
            given, advice = f"channel_axis={asked!r}", "or name another dataset with images=NAME"
            problem = f"has rows of shape {shape}, which do not fit {given}; give {' or '.join(allowed)}, {advice}"
            raise _dataset_error(path, name, problem, given, "images=NAME")
        problem = f"has rows of shape {shape}, not (H, W), (H, W, C) or (C, H, W) with C from 1 to 4"
        raise _dataset_error(path, name, f"{problem}; name another dataset with images=NAME", "images=NAME")
    if asked is None and len(allowed) > 1:
        problem = f"has rows of shape {shape}, whose channels may be the last or the first axis; give channel_axis"
        raise _dataset_error(path, name, problem, "channel_axis")
    return PixelForm(asked or allowed[0], datasets.value_range)


def find_labels(file: h5py.File, images: str, rows: int) -> str | None:
    """Return the path of the dataset beside `images` with a usual name for labels and `rows` rows, or None."""
    if schema.FORMAT in file.attrs and images in (schema.IMAGES, schema.ENCODED):
        # Only "labels" has the labels of a pack. A field may be called "label".
        return schema.LABELS if schema.LABELS in file else None
    folder, _, own = images.rpartition("/")
    prefix = f"{folder}/" if folder else ""
    for name in _label_names(own):
        found = file.get(f"{prefix}{name}")
        if isinstance(found, h5py.Dataset) and found.shape and len(found) == rows and name != own:
            return f"{prefix}{name}"
    return None


@functools.cache
def log_unused_labels(path: str, images: str) -> None:
    """Warn, once per process and dataset, if a file that is opened without labels seems to have labels of `images`."""
    with open_file(path) as file:
        images = images.strip("/")
        found = find_labels(file, images, len(file[images]))
    if found is not None:
        advice = "%s: opened without labels; give labels=%r to load the labels of %r"
        logging.getLogger("h5pack").warning(advice, path, found, images)


def _label_names(images: str) -> Iterator[str]:
    match = _IMAGE_WORD.search(images)
    for word in _LABELS:
        if match is not None:
            for written in (word, word.upper(), word.title()):
                yield images[: match.start()] + written + images[match.end() :]
        yield word


def further_datasets(file: h5py.File, images: str, labels: str | None) -> list[str]:
    """Return the paths of the datasets, other than images and labels, that can be packed as fields.

    Leave out the datasets of a group with other images, such as those of another split, and names that cannot be part
    of a list that is separated by commas.
    """
    own = schema.RESERVED if schema.FORMAT in file.attrs else ()
    rows, axes, names = len(file[images]), file[images].ndim, dataset_names(file)
    # Datasets in a group with other images belong to these, unless `images` is in that group, too. Arrays of fewer axes
    # are not counted as other images, because they may be masks.
    groups = {os.path.dirname(name) for name in names if file[name].ndim == axes and _looks_like_images(file[name])}
    others = tuple(f"{group}/" for group in groups if group and not images.startswith(f"{group}/"))
    found: dict[str, str] = {}
    for name in names:
        if name in (images, labels) or name.startswith(others) or name.split(",") != [name.strip()]:
            continue
        base, is_own = os.path.basename(name), name.partition("/")[0] in own
        fits = not is_own and is_field_name(base) and _has_rows(file, name, rows)
        if fits and (is_numeric_dtype(file[name].dtype) or is_text(file[name])):
            found.setdefault(base, name)
    return list(found.values())


def is_text(item: Any) -> bool:
    """Return whether an item of a file is a dataset with one text per row."""
    return isinstance(item, h5py.Dataset) and item.ndim == 1 and h5py.check_string_dtype(item.dtype) is not None


def _pixel_kind(file: h5py.File, name: str, form: PixelForm | None, images: str) -> str | None:
    """Return the kind of a field of pixels, `schema.MASK` or `schema.IMAGE`; None for other fields.

    Masks are integers or bools with the height and width of the images, or PNG files in a pack of encoded images.
    """
    if form is None:
        return schema.MASK if is_mask_group(file, name) else None
    if is_ragged(file, name):
        return None
    dataset, shape = require_dataset(file, name, _FIELDS), file[images].shape
    if text(dataset.attrs.get(schema.KIND, b"")) == schema.IMAGE:
        return schema.IMAGE if dataset.shape == shape and dataset.dtype == file[images].dtype else None
    fits = dataset.shape == (shape[0], *form.size(shape[1:]))
    if schema.FORMAT in file.attrs:
        # Masks of a pack have at most 32 bits, so wider integers are an array.
        fits = fits and np.can_cast(dataset.dtype, np.int32)
    return schema.MASK if fits and mask_dtype(dataset.dtype) is not None else None


def _names(file: h5py.File, images: str, rows: int) -> NameTable:
    """Return the file names stored in a pack, or else names that consist of the dataset's path and the row number."""
    stored = file.get(schema.FILENAMES)
    own = images in (schema.IMAGES, schema.ENCODED)
    if own and isinstance(stored, h5py.Dataset) and stored.shape == (rows,):
        # A file written by another program may contain empty names, or names with NUL, which a NameTable cannot store.
        names = (text(name).replace("\0", "\\x00") for name in stored[()].tolist())
        return NameTable.of(name or f"{images}/{row:08d}" for row, name in enumerate(names))
    return NameTable.of(f"{images}/{row:08d}" for row in range(rows))


_OTHER, _NONE, _FIELD = "labels=NAME", "labels=''", "fields=NAME"


def _read_labels(path: Path, file: h5py.File, name: str) -> tuple[npt.NDArray[Any], tuple[str, ...] | None]:
    """Return the labels and their names: int64 (N,) and class names or None, or uint8 (N, K) and column names."""
    dataset = require_dataset(file, name, "labels=NAME")
    values = _read_all(path, dataset, name)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim not in (1, 2):
        raise _label_error(path, name, f"has shape {values.shape}, but labels are (N,) or (N, K)", _OTHER)
    if values.ndim == 1 and values.dtype.kind in "OSU":
        if any(not isinstance(value, (bytes, str)) for value in values.tolist()):
            raise _label_error(path, name, "does not hold one number or one text per row", _OTHER, _NONE)
        words, numbers = class_ids([text(value) for value in values.tolist()])
        return numbers, words or None
    if values.dtype.kind not in "biuf":
        raise _label_error(path, name, f"holds {values.dtype}, which cannot be labels", _OTHER, _NONE)
    whole = values.dtype.kind != "f" or bool((np.isfinite(values) & (values == np.rint(values))).all())
    if not whole or (values.size and not -(2**63) <= int(values.min()) <= int(values.max()) < 2**63):
        found = f"holds numbers that are not all 64-bit integers (it starts with {values.reshape(-1)[0]})"
        raise _label_error(path, name, found, _OTHER, _NONE, _FIELD)
    if values.ndim == 2:
        columns = attribute_names(dataset, schema.COLUMNS) or ()
        if len(columns) != values.shape[1]:
            columns = tuple(f"label_{column}" for column in range(values.shape[1]))
        return _byte_table(path, name, values), columns
    labels = values.astype(np.int64)
    classes = attribute_names(dataset, schema.CLASSES) or _enum_names(dataset)
    if classes is not None and len(labels) and not schema.NO_LABEL <= labels.min() <= labels.max() < len(classes):
        found = f"has {len(classes)} classes, but values from {labels.min()} to {labels.max()}"
        raise _label_error(path, name, found, _OTHER, _NONE)
    return labels, classes


def _enum_names(dataset: h5py.Dataset) -> tuple[str, ...] | None:
    """Return the names of the values 0, 1, ... of an HDF5 enum; None for other types, and if the values have gaps."""
    names = {value: name for name, value in (h5py.check_enum_dtype(dataset.dtype) or {}).items()}
    return tuple(names[value] for value in sorted(names)) if names and sorted(names) == [*range(len(names))] else None


def _dataset_error(path: Path, name: str, problem: str, *parameters: str) -> SourceError:
    return SourceError.at(path, f"{name!r} {problem}", *parameters, dataset=name)


def _label_error(path: Path, name: str, found: str, *advice: str) -> SourceError:
    return _dataset_error(path, name, f"{found}; give {' or '.join(advice)}", *advice)


def _read_field(path: Path, file: h5py.File, name: str) -> FieldValues:
    """Return a field's values, in native byte order: numbers, texts or ragged rows. Raise SourceError for others."""
    if is_ragged(file, name):
        index = index_ragged(file, name)
        _require_memory(path, name, index.data.rows * index.data.row_bytes)
        indexes = {index.data.name: index.data, **index_checksums(file, name, index.rows)}
        engine = Engine(absolute_path(path), FileIdentity.of(os.fspath(path)), indexes, warn=False)
        with _reporting(path, name), contextlib.closing(engine):
            return read_ragged(engine, index, np.arange(index.rows), check=True)
    dataset = require_dataset(file, name, _FIELDS)
    if is_text(dataset):
        try:
            return parse_texts([text(value) for value in _read_all(path, dataset, name).tolist()])
        except FieldValueError as error:
            raise _dataset_error(path, name, f"row {error.row} {error}; leave out this field") from None
    if not is_numeric_dtype(dataset.dtype) or not dataset.shape:
        problem = f"holds {dataset.dtype}, but a field needs rows of numbers or one text per row; leave it out"
        raise _dataset_error(path, name, problem)
    return _read_all(path, dataset, name)


def _byte_table(path: Path, name: str, values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Convert a label table to uint8. Its numbers must be 0 to 255, or -1 to 1 as in CelebA, where -1 becomes 0."""
    low, high = (values.min(), values.max()) if values.size else (0, 0)
    if low == -1 and high <= 1:
        values = values > 0
    elif low < 0 or high > 255:
        found = f"holds numbers from {low} to {high}, but a label table holds 0 to 255 (or -1 and 1)"
        raise _label_error(path, name, found, _OTHER, _NONE, _FIELD)
    return values.astype(np.uint8)


def _require_memory(path: Path, name: str, size: int) -> None:
    if size > available_memory() // 2:
        raise _dataset_error(path, name, f"holds {format_bytes(size)}, over half of the free memory; leave it out")


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
            require_sources(dataset)
        return np.asarray(dataset[()])


@contextlib.contextmanager
def _reporting(path: Path, name: str) -> Iterator[None]:
    """Turn DamagedRowsError, and errors other than H5PackError, into SourceError with advice to omit the dataset."""
    try:
        yield
    except DamagedRowsError as error:
        raise SourceError(f"{error}; or leave out that dataset", path=path, dataset=name, rows=error.rows) from error
    except H5PackError:
        raise
    except Exception as error:
        # On damaged files, h5py may raise any exception type.
        problem = f"cannot be read ({error}); restore the file, or leave out that dataset"
        raise _dataset_error(path, name, problem) from error
