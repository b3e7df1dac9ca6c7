"""An HDF5 file as a source: detection of the datasets of images and labels, and interpretation of their numbers."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5pack.errors import H5PackError, OptionsError, PackFormatError, SourceError
from h5pack.format import schema
from h5pack.format.fields import field_name, is_field_name, is_numeric_dtype, require_field_names
from h5pack.read.description import describe_file
from h5pack.read.encoded import has_kept_images, index_kept, is_encoded, is_mask_group
from h5pack.read.hdf5 import (
    OpenDataset,
    datasets_text,
    external_links,
    find_item,
    is_pack,
    list_datasets,
    open_file,
    reporting_damage,
    require_dataset,
    stored_names,
    text,
)
from h5pack.read.ragged import find_field, index_ragged, is_ragged, own_fields
from h5pack.read.storage import SourceFile
from h5pack.read.virtual import files_of
from h5pack.sources.catalog import Catalog, NameFilter, NameTable, Note, PixelField, split_ids, unused_note
from h5pack.sources.hdf5_rows import CHANNEL_AXES, HDF5RowReader, PixelForm
from h5pack.sources.hdf5_tables import (
    FIELDS_ADVICE,
    IMAGE_WORD,
    are_whole,
    dataset_source_error,
    find_labels,
    is_text,
    read_field,
    read_labels,
)
from h5pack.system.parameters import invalid
from h5pack.system.text import counted, first_names

_SAMPLED_ROWS, _DARK = 8, 64
_MATLAB_CLASS = "MATLAB_class"
# A file is damaged if it declares more rows than both limits allow. Even compressed, it could not hold that many.
_MAX_EMPTY_ROWS, _MAX_ROWS_PER_BYTE = 1_000_000, 1_000
HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")


@dataclass(frozen=True)
class HDF5Datasets:
    """The roles of the datasets of an HDF5 file, given by their paths in the file."""

    images: str | None = None  # default: the dataset that looks like images
    labels: str | None = None  # "" for none; default: a dataset beside the images with a name like "labels"
    fields: tuple[str, ...] = ()  # further datasets with one row per image
    channel_axis: str | None = None  # one of `CHANNEL_AXES`; default: inferred by `channel_axes`
    value_range: tuple[float, float] | None = None  # the values mapped to 0 and 255; see `PixelForm`
    own_fields: bool = True  # if false, fields other than masks and further images are left out

    def __post_init__(self) -> None:
        for name in ("images", "labels"):
            value = getattr(self, name)
            if not isinstance(value, (str, type(None))) or (name == "images" and value == ""):
                raise invalid(name, value, "give the name of a dataset")
        axis = self.channel_axis
        if axis is not None and not (isinstance(axis, str) and axis in CHANNEL_AXES):
            raise invalid("channel_axis", axis, f"it must be one of {', '.join(CHANNEL_AXES)}")
        if self.value_range is not None:
            low, high = self.value_range
            if not (math.isfinite(high - low) and low < high):
                raise OptionsError(
                    f"value_range is {low} to {high}; give two finite numbers, the first below the second",
                    parameters=("value_range",),
                )


def is_hdf5(path: Path) -> bool:
    """Return whether a file has HDF5's signature (at its start or after a user block) or a suffix of HDF5 files."""
    with contextlib.suppress(OSError):
        if h5py.is_hdf5(path):
            return True
    return path.suffix.lower() in HDF5_SUFFIXES


def hdf5_catalog(path: Path, datasets: HDF5Datasets, wanted: NameFilter) -> Catalog:
    """Return the catalog of an HDF5 file, in row order. `wanted` selects images by their names.

    If the file has checksums, labels and fields are compared with them here, and pixels when the reader reads them.
    """
    with open_file(path) as file, reporting_damage(path, SourceError):
        catalog = _catalog(path, file, datasets)
    return catalog.filtered(wanted)


def _catalog(path: Path, file: h5py.File, datasets: HDF5Datasets) -> Catalog:
    images = (datasets.images or find_images(file)).strip("/")
    stored = find_item(file, images)
    if isinstance(stored, h5py.Dataset) and stored.shape and not (stored.is_virtual or stored.external):
        rows, size = stored.shape[0], os.path.getsize(stored.file.filename)
        if rows > max(_MAX_EMPTY_ROWS, _MAX_ROWS_PER_BYTE * size):
            raise dataset_source_error(path, images, f"has {rows:,} rows, too many for its file; restore the file")
    pack = describe_file(path, images, None, sized=False)
    images, index = next(iter(pack.indexes.items()))  # In a pack of kept files, "images" stands for "encoded".
    rows = index.rows
    asked = tuple(find_field(file, name) for name in datasets.fields)
    own = is_pack(file) and images in (schema.IMAGES, schema.ENCODED)
    labels = None if datasets.labels is None else datasets.labels.strip("/") or None
    if datasets.labels is None:
        labels = find_labels(file, images, rows, fields=asked, transposed=True)
        if own and labels is None and (checksums := schema.checksums_path(schema.LABELS)) in file:
            problem = f"is missing, but the pack has its checksums; restore the file, or delete {checksums!r} with h5py"
            raise dataset_source_error(path, schema.LABELS, problem)
    fields = tuple(name for name in asked if name != labels)
    twice = (Note(f"{labels!r} is packed as labels, not as a field"),) if labels in asked else ()
    if own and not asked:
        fields = tuple(own_fields(file))
    form = None if index.is_encoded else _form(path, require_dataset(file, images), datasets)
    if form is None and (datasets.channel_axis or datasets.value_range):
        problem = f"{images!r} holds encoded images; leave out channel_axis and value_range, which apply to arrays only"
        raise OptionsError.at(path, problem, "channel_axis", "value_range", dataset=images)
    kinds = {name: kind for name in fields if (kind := _pixel_kind(file, name, form, images))}
    masks = tuple(kinds)
    if not datasets.own_fields:
        fields = masks
    if masks:
        pack = describe_file(path, images, None, masks, sized=False)
    reader = HDF5RowReader(pack, form, kinds, _files_of(file, (labels, schema.FILENAMES, *fields)))
    values, names = None, None
    if labels is not None:
        values, names = read_labels(path, file, labels, rows, or_field=datasets.own_fields)
    require_field_names(str(path), tuple(map(field_name, fields)), path)
    columns = {field: read_field(path, file, field) for field in fields if field not in masks}
    for name, table in ((labels, values), *columns.items()):
        if table is not None and len(table) != rows:
            problem = f"has {len(table):,} rows, but {images!r} has {rows:,}; name datasets of the same length"
            raise dataset_source_error(path, str(name), problem)
    rows_names = _names(file, images, rows)
    return Catalog(
        "hdf5",
        reader,
        rows_names,
        *split_ids(pack.splits, rows, str(path), path),
        labels=values,
        label_names=names,
        fields={field_name(name): column for name, column in columns.items()},
        pixel_fields=tuple(PixelField(field_name(name), kind, rows_names) for name, kind in kinds.items()),
        notes=(
            *twice,
            *_transposed(file, images, labeled=labels is not None),
            *_pixel_notes(reader),
            *_unused(file, images, rows, {images, labels, *fields}, labeled=labels is not None),
        ),
        about=f"images {images!r}" + ("" if labels is None else f", labels {labels!r}"),
    )


def _files_of(file: h5py.File, names: Iterable[str | None]) -> frozenset[SourceFile]:
    """Return the files that hold the datasets `names`; the name of a group stands for the datasets in it."""
    items = [file.get(name) for name in names if name is not None]
    found = [part for item in items for part in (item.values() if isinstance(item, h5py.Group) else (item,))]
    return frozenset().union(*(files_of(one) for one in found if isinstance(one, h5py.Dataset)))


def _transposed(file: h5py.File, name: str, *, labeled: bool) -> Iterator[Note]:
    """Yield a note if images are probably along the last axis (labels have its length), or if MATLAB stored them."""
    images = file[name]
    if not isinstance(images, h5py.Dataset) or images.ndim < 3:
        return
    last, labels = images.shape[-1], None
    if not labeled and images.ndim == 3:
        with contextlib.suppress(PackFormatError):  # Labels that are not packed may be damaged.
            labels = find_labels(file, name, last, transposed=True)
    if labels is not None:
        text = f"{labels!r} has {last:,} rows, the length of the last axis of {name!r}; if images are along this axis,"
        yield Note(f"{text} store np.moveaxis(array, -1, 0)")
    elif _MATLAB_CLASS in images.attrs:
        text = "MATLAB stores axes in reverse order, so images that were saved as (H, W, C, N) have their width before"
        yield Note(f"{text} their height here; if so, give a dataset in Python that transposes them")


def _pixel_notes(reader: HDF5RowReader) -> Iterator[Note]:
    """Yield a note if the alpha channel is left out, and a note if the pixels of all rows in a sample become dark."""
    form, index = reader.form, reader.index
    if form is None or not index.rows:
        return
    channels = form.channels(index.row_shape)
    if channels in (2, 4):
        yield Note(f"the last of {channels} channels is taken for alpha, and left out")
    if form.value_range is not None or index.dtype in (np.bool_, np.uint8):
        return
    rows = np.unique(np.linspace(0, index.rows - 1, _SAMPLED_ROWS).astype(np.int64))
    # Errors are reported, with advice, when the rows are packed.
    with contextlib.suppress(H5PackError), contextlib.closing(reader.engine):
        values = reader.engine.read(reader.images, rows)
        brightest = max(int(form.pixels(row).max()) for row in values)
        if brightest < _DARK:
            found = f"the values of {counted(len(rows), 'row')} reach only {values.max():g}, and their pixels"
            yield Note(f"{found} {brightest} of 255; give value_range, the range of all values", ("value_range",))


def _unused(file: h5py.File, images: str, rows: int, used: set[str | None], *, labeled: bool) -> tuple[Note, ...]:
    """Return notes that list the datasets that are not packed. Do not list the tables that h5pack itself writes."""
    own = schema.RESERVED if is_pack(file) else ()
    if _filenames(file, images, rows) is not None:
        used = {*used, schema.FILENAMES}
    links = external_links(file)
    listed = list_datasets(file, links)
    names = [name for name in listed if name.partition("/")[0] not in own]
    names = [name for name in (*names, *(own_fields(file) if own else ())) if name not in used]
    fits = {name: _has_rows(file, name, rows, listed.get(name)) for name in names}
    fitting, others, damaged = ([name for name in names if fits[name] == fit] for fit in (True, False, None))
    missing = [link.name for link in links if not link.found]
    or_labels = "" if labeled else ", or one of them with labels"
    advice = f"datasets of numbers or texts can be packed with fields{or_labels}"
    return (
        *unused_note("datasets", fitting, advice, "fields", *(() if labeled else ("labels",))),
        *unused_note("datasets", others, f"they do not have the length of {images!r}, which is {rows:,}"),
        *unused_note("datasets", damaged, "they cannot be opened"),
        *unused_note("links", missing, "the files or objects that they lead to are missing"),
    )


def _has_rows(file: h5py.File, name: str, rows: int, opened: OpenDataset | None) -> bool | None:
    """Return whether a dataset or field has `rows` rows; None if it cannot be opened.

    `opened` opens the dataset (see `list_datasets`). It is None for other fields, such as groups.
    """
    try:
        if opened is None and is_ragged(file, name):
            return index_ragged(file, name).rows == rows
        if opened is None and is_mask_group(file, name):
            return index_kept(file, name, sized=False).rows == rows
        dataset = file[name] if opened is None else opened()
        return (dataset.shape or ())[:1] == (rows,)
    except Exception:
        return None


def find_images(file: h5py.File) -> str:
    """Return the path of the images: "images", a pack's "encoded", or the only dataset that looks like images.

    If several datasets look like images, return the only one whose name has a word for images, such as "x". Raise
    SourceError if no dataset looks like images, or if the choice remains unclear.
    """
    if isinstance(file.get(schema.IMAGES), h5py.Dataset):
        return schema.IMAGES
    if is_pack(file) and has_kept_images(file, schema.ENCODED):
        return schema.ENCODED
    listed = list_datasets(file)
    found = [name for name, opened in listed.items() if _looks_like_images(opened())]
    named = [name for name in found if IMAGE_WORD.search(name)]
    for names in (found, named):
        if len(names) == 1:
            return names[0]
    shapes = "arrays (N, H, W), (N, H, W, C) or (N, C, H, W) of numbers, or encoded images"
    problem = f"none of its datasets looks like images, that is, {shapes} (found: {datasets_text(listed)})"
    if found:
        problem = f"{first_names(found)} look like images"
    advice = "ConcatPack in Python joins several" if found else "if each is one image, give a dataset in Python"
    path, parameter = file.filename, "images=NAME"
    raise SourceError.at(path, f"{problem}; choose one with {parameter} ({advice})", parameter)


def detect_names(path: str | os.PathLike[str], images: str, labels: str) -> tuple[str, str]:
    """Return the names of the datasets of images and labels to read.

    If the file has no dataset of a default name, "images" or "labels", this name is replaced by the name of a detected
    dataset. Images are not detected in packs. Labels are detected only if they are numbers; otherwise, "labels" is
    returned. Other names are returned unchanged. Raise PackFormatError if none or several datasets look like images.
    """
    with open_file(path) as file:
        if images == schema.IMAGES and images not in file and not is_pack(file):
            try:
                images = find_images(file)
            except SourceError as error:
                raise PackFormatError(str(error), path=error.path, parameters=error.parameters) from error
        rows = find_item(file, images)
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
    """Return the members of `CHANNEL_AXES` that fit the shape of a row; [] if it cannot be an image.

    A row of shape (W, 3) cannot be an image, because a dataset of shape (H, W, 3) is a single image.
    """
    if len(row_shape) == 2:
        return [] if row_shape[1] <= 4 < row_shape[0] else ["none"]
    if len(row_shape) != 3:
        return []
    return [name for name, axis in (("last", 2), ("first", 0)) if 1 <= row_shape[axis] <= 4]


def _form(path: Path, dataset: h5py.Dataset, datasets: HDF5Datasets) -> PixelForm:
    shape, name = dataset.shape[1:], dataset.name.lstrip("/")
    stored = dataset.attrs.get(schema.LAYOUT)
    allowed = [] if 0 in shape else channel_axes(shape)
    asked = datasets.channel_axis
    if asked is None and stored is not None:
        asked = "first" if text(stored) == "nchw" else "last"
    if not allowed:
        problem = f"has rows of shape {shape}, not (H, W), (H, W, C) or (C, H, W) with C from 1 to 4"
        if 0 in shape or len(shape) == 2:
            what = "is empty" if 0 in shape else "is a single image (to pack many, give convert() a PyTorch dataset)"
            problem = f"has the shape {dataset.shape}, so it {what}"
        raise dataset_source_error(path, name, f"{problem}; name another dataset with images=NAME", "images=NAME")
    if asked is not None and asked not in allowed:
        given = () if datasets.channel_axis is None else (f"channel_axis={asked!r}",)
        what = given[0] if given else f"its attribute {schema.LAYOUT!r}"
        fitting = [f"channel_axis={axis!r}" for axis in allowed]
        advice = f"give {' or '.join(fitting)}, or name another dataset with images=NAME"
        problem = f"has rows of shape {shape}, which do not fit {what}; {advice}"
        raise dataset_source_error(path, name, problem, *given, *fitting, "images=NAME")
    if asked is None and len(allowed) > 1:
        problem = f"has rows of shape {shape}, whose channels may be the last or the first axis; give channel_axis"
        raise dataset_source_error(path, name, problem, "channel_axis")
    return PixelForm(asked or allowed[0], datasets.value_range)


class FurtherDatasets:
    """The datasets beside images that can be packed as fields. The datasets of each file are listed once."""

    def __init__(self) -> None:
        # By file: the candidates by number of rows, and the folders of images by number of axes.
        self._listed: dict[str, tuple[dict[int, list[str]], dict[int, set[str]]]] = {}

    def names(self, file: h5py.File, images: str, labels: str | None) -> list[str]:
        """Return the paths of the datasets, other than images and labels, that can be packed as fields.

        Leave out datasets in a group with other images, such as the images of another split, and datasets that cannot
        be opened. Also leave out datasets whose name has a comma, or a space at its start or end, because a list of
        names is separated by commas.
        """
        if file.filename not in self._listed:
            self._listed[file.filename] = _list_fields(file)
        candidates, groups = self._listed[file.filename]
        # Datasets in a group with other images belong to these images, unless `images` is in the same group. Only
        # arrays with as many axes as `images` count as other images, because arrays with fewer or more axes may be
        # masks.
        others = groups.get(file[images].ndim, set()) - set(_folders(images))
        found: dict[str, str] = {}
        for name in candidates.get(len(file[images]), ()):
            if name not in (images, labels) and others.isdisjoint(_folders(name)):
                found.setdefault(field_name(name), name)
        return list(found.values())


def _folders(name: str) -> list[str]:
    """Return the paths of all groups above a dataset except the root."""
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _list_fields(file: h5py.File) -> tuple[dict[int, list[str]], dict[int, set[str]]]:
    candidates: dict[int, list[str]] = {}
    groups: dict[int, set[str]] = {}
    for name, opened in list_datasets(file).items():
        with contextlib.suppress(Exception):  # It cannot be opened, or NumPy does not have its type.
            dataset = opened()
            shape = dataset.shape or ()
            if _looks_like_images(dataset):
                groups.setdefault(len(shape), set()).add(os.path.dirname(name))
            listable = name.split(",") == [name.strip()] and is_field_name(field_name(name))
            if listable and shape and (is_numeric_dtype(dataset.dtype) or is_text(dataset)):
                candidates.setdefault(shape[0], []).append(name)
    return candidates, groups


def packing_options(
    file: h5py.File, name: str, labels: str | None = None, further: FurtherDatasets | None = None
) -> dict[str, Any]:
    """Return the keyword arguments with which `convert` keeps the axes, labels and fields of the images in `name`.

    `labels` is the dataset of labels: None to detect it, "" if there are none. `further` is shared by several calls.
    """
    images = file[name]
    found: dict[str, Any] = {}
    if not is_pack(file):  # `convert` keeps the labels and fields of a pack by default.
        # `labels` may be a path in another file, from which a link led to these images.
        labels = None if labels and labels not in file else labels
        if labels is None:
            labels = find_labels(file, name, len(images), transposed=True)
            labels = None if labels is not None and not are_whole(file[labels]) else labels
        labels = None if labels is None else labels.strip("/")
        fields = (further or FurtherDatasets()).names(file, name, labels)
        found |= {"images": name} | ({} if labels is None else {"labels": labels})
        found |= {"fields": ",".join(fields)} if fields else {}
    axes = [] if is_encoded(images) else channel_axes(images.shape[1:])
    if len(axes) == 1:
        found |= {"layout": "nchw"} if axes == ["first"] else {}
        gray = axes == ["none"] or images.shape[3 if axes == ["last"] else 1] < 3
        found |= {"mode": "gray"} if gray else {}
    return found


def _pixel_kind(file: h5py.File, name: str, form: PixelForm | None, images: str) -> str | None:
    """Return the kind of a field of pixels, `schema.MASK` or `schema.IMAGE`; None for other fields.

    A field of further images in color has the shape and dtype of the images. Masks are integers or bools with the
    height and width of the images, such as (N, H, W) or (N, H, W, 1). In a pack of encoded images, masks are PNG files.
    """
    if form is None:
        return schema.MASK if is_mask_group(file, name) else None
    if is_ragged(file, name):
        return None
    dataset, shape = require_dataset(file, name, FIELDS_ADVICE), file[images].shape
    own, wanted = dataset.shape or (), (shape[0], *form.size(shape[1:]))
    stored = text(dataset.attrs.get(schema.KIND, b""))
    if stored == schema.ARRAY:
        return None
    if stored == schema.IMAGE or (not is_pack(file) and own == shape and form.channels(shape[1:]) > 2):
        return schema.IMAGE if own == shape and dataset.dtype == file[images].dtype else None
    if is_pack(file):
        # Masks of a pack have at most 32 bits, so wider integers are not a mask.
        fits = own == wanted and np.can_cast(dataset.dtype, np.int32)
    else:
        sides = [[length for length in shape[1:] if length > 1] for shape in (own, wanted)]
        fits = own[:1] == wanted[:1] and sides[0] == sides[1]
    return schema.MASK if fits and dataset.dtype.kind in "biu" else None


def _filenames(file: h5py.File, images: str, rows: int) -> h5py.Dataset | None:
    """Return the dataset of the images' file names; None if it is missing or has another length than the images.

    Raise SourceError if the file is a pack, and the dataset has another length.
    """
    stored = find_item(file, schema.FILENAMES)
    if images not in (schema.IMAGES, schema.ENCODED) or not isinstance(stored, h5py.Dataset):
        return None
    if stored.shape != (rows,) and is_pack(file):
        found = f"has shape {stored.shape}, but there are {rows:,} images"
        problem = f"{found}; restore the file, or delete the dataset with h5py"
        raise dataset_source_error(Path(file.filename), schema.FILENAMES, problem)
    return stored if stored.shape == (rows,) else None


def _names(file: h5py.File, images: str, rows: int) -> NameTable:
    """Return the file names stored in a pack, or else names that consist of the dataset's path and the row number."""
    stored = _filenames(file, images, rows)
    if stored is None:
        return NameTable.of(f"{images}/{row:08d}" for row in range(rows))
    # A file written by another program may contain empty names, or names with NUL, which a NameTable cannot store.
    names = (name.replace("\0", "\\x00") for name in stored_names(stored))
    return NameTable.of(name or f"{images}/{row:08d}" for row, name in enumerate(names))
