"""An HDF5 file as a source: which dataset holds the images, which the labels, and how they are to be understood."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.errors import H5PackError, OptionsError, SourceError
from h5pack.hdf5 import dataset_names, open_file, require_dataset, text
from h5pack.read.encoded import is_encoded
from h5pack.read.pack import Pack, checksums_of, read_pack
from h5pack.sources.catalog import Catalog, NameTable, one_split
from h5pack.sources.hdf5_rows import CHANNEL_AXES, HDF5RowReader, PixelForm
from h5pack.sources.hdf5_tables import field_names_of, read_field, read_labels
from h5pack.sources.walk import NameFilter

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
_LABELS = ("labels", "label", "targets", "target", "y")
_REST = "rest"
# What of a dataset's name says that it holds the images: "images", "train/images", "train_set_x", "X".
_IMAGE_WORD = re.compile(r"(?<![a-z])(?:images?|imgs?|x)(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class HDF5Datasets:
    """Which datasets of an HDF5 file mean what.

    Attributes
    ----------
    images : str, optional
        None: look.
    labels : str, optional
        None: look. An empty name: there are none.
    fields : tuple of str
        Further datasets with a row for each image; of a pack, its own come without being named.
    channel_axis : str, optional
        One of `CHANNEL_AXES`; None: look.
    value_range : (float, float), optional
        The values that become 0 and 255; see `PixelForm`.
    own_fields : bool
        Whether a pack's own fields come without being named.
    """

    images: str | None = None
    labels: str | None = None
    fields: tuple[str, ...] = ()
    channel_axis: str | None = None
    value_range: tuple[float, float] | None = None
    own_fields: bool = True

    def __post_init__(self) -> None:
        if self.channel_axis is not None and self.channel_axis not in CHANNEL_AXES:
            raise OptionsError(f"channel_axis {self.channel_axis!r} is none of {', '.join(CHANNEL_AXES)}")
        if self.value_range is not None:
            low, high = self.value_range
            if not (math.isfinite(high - low) and low < high):
                raise OptionsError(f"value_range is {low:g} to {high:g}; the first must be below the second")


def is_hdf5(path: Path) -> bool:
    """Whether a file is HDF5, by its signature, before which there may be a user block, or else by its ending."""
    try:
        with path.open("rb") as stream:
            size, place = os.fstat(stream.fileno()).st_size, 0
            while place < size:
                stream.seek(place)
                if stream.read(len(_SIGNATURE)) == _SIGNATURE:
                    return True
                place = max(512, 2 * place)
    except OSError:
        pass
    return path.suffix.lower() in _SUFFIXES


def hdf5_catalog(path: Path, datasets: HDF5Datasets, wanted: NameFilter) -> Catalog:
    """Catalog the rows of an HDF5 file; row order is source order.

    Raises
    ------
    SourceError
        If it does not say which dataset is meant, or labels do not fit.
    PackFormatError
        If the file or a dataset is damaged or missing.
    OptionsError
        If a field takes one of the format's own names.
    """
    with open_file(path) as file:
        try:
            catalog = _catalog(path, file, datasets)
        except H5PackError:
            raise
        except Exception as error:
            # Damage shows as any of h5py's errors.
            raise SourceError(f"{path}: its metadata is damaged ({error}); restore the file") from error
    return catalog.filtered(wanted)


def _catalog(path: Path, file: h5py.File, datasets: HDF5Datasets) -> Catalog:
    images = (datasets.images or _find_images(file)).strip("/")
    pack = read_pack(path, images, None, sized=False)
    stored = require_dataset(file, images)
    labels = _find_labels(file, images) if datasets.labels is None else datasets.labels.strip("/") or None
    fields = tuple(name.strip("/") for name in datasets.fields)
    if not fields and datasets.own_fields and schema.FORMAT in file.attrs and images == schema.IMAGES:
        fields = tuple(_own_fields(file))
    form = None if is_encoded(stored) else _form(path, stored, datasets)
    if form is None and (datasets.channel_axis or datasets.value_range):
        raise OptionsError(
            f"{path}: {images!r} holds encoded images, which know their channels and values; leave out --channel-axis "
            "and --value-range"
        )
    reader = HDF5RowReader(pack, form)
    values, names = (None, None) if labels is None else read_labels(path, require_dataset(file, labels), labels)
    field_names = field_names_of(path, fields)
    columns = {field: read_field(path, require_dataset(file, field), field) for field in fields}
    for name, table in ((labels, values), *columns.items()):
        if table is not None and len(table) != len(stored):
            raise SourceError(
                f"{path}: {name!r} has {len(table):,} rows and {images!r} has {len(stored):,}; name datasets that "
                "go together"
            )
    split_names, split_ids = _splits(path, pack, len(stored))
    return Catalog(
        "hdf5",
        reader,
        _names(file, images, len(stored)),
        split_names,
        split_ids,
        labels=values,
        label_names=names,
        fields=dict(zip(field_names, columns.values(), strict=True)),
        about=f"images {images!r}" + ("" if labels is None else f", labels {labels!r}"),
    )


def _find_images(file: h5py.File) -> str:
    """The dataset of images of a file that has one; of several, the one called so."""
    if isinstance(file.get(schema.IMAGES), h5py.Dataset):
        return schema.IMAGES
    found = [name for name in dataset_names(file) if _looks_like_images(file[name])]
    if len(found) == 1:
        return found[0]
    if not found:
        held = ", ".join(f"{name!r} {_described(file[name])}" for name in dataset_names(file)) or "none"
        raise SourceError(
            f"{file.filename}: none of its datasets looks like images, (N, H, W), (N, H, W, C) or (N, C, H, W) of "
            f"numbers, or encoded ones ({held}); name one with --images"
        )
    raise SourceError(
        f"{file.filename}: {', '.join(map(repr, found))} look like images; say which with --images, and convert each "
        "to a pack of its own"
    )


def _looks_like_images(dataset: h5py.Dataset) -> bool:
    try:
        return is_encoded(dataset) or is_image_array(dataset.shape or (), dataset.dtype)
    except TypeError:
        # Numbers that NumPy has not.
        return False


def is_image_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether an array's rows look like images: numbers, of two axes of some length, and perhaps one of channels."""
    if dtype.kind not in "biuf" or len(shape) not in (3, 4):
        return False
    return channel_axes(shape[1:]) != [] and sorted(shape[1:])[-2] >= 8


def channel_axes(row_shape: tuple[int, ...]) -> list[str]:
    """Which of `CHANNEL_AXES` a row's shape allows."""
    if len(row_shape) == 2:
        return ["none"]
    if len(row_shape) != 3:
        return []
    return [name for name, axis in (("last", 2), ("first", 0)) if 1 <= row_shape[axis] <= 4]


def _described(dataset: h5py.Dataset) -> str:
    return f"{dataset.dtype} {dataset.shape}"


def _form(path: Path, dataset: h5py.Dataset, datasets: HDF5Datasets) -> PixelForm:
    shape, name = dataset.shape[1:], dataset.name.lstrip("/")
    stored = dataset.attrs.get(schema.LAYOUT)
    allowed = channel_axes(shape)
    asked = datasets.channel_axis
    if asked is None and stored is not None:
        asked = "first" if text(stored) == "nchw" else "last"
    if not allowed or (asked is not None and asked not in allowed) or 0 in shape:
        what = f" with channels {asked}" if allowed and asked is not None else ""
        raise SourceError(
            f"{path}: the rows of {name!r} have shape {shape}, which is no image{what}: (H, W), (H, W, C) or "
            "(C, H, W), C from 1 to 4; name another dataset with --images"
        )
    if asked is None and len(allowed) > 1:
        raise SourceError(
            f"{path}: rows of {shape} may have their channels last or first; say which with --channel-axis"
        )
    return PixelForm(asked or allowed[0], datasets.value_range)


def _find_labels(file: h5py.File, images: str) -> str | None:
    """A dataset beside the images whose name says that it holds their labels."""
    folder, _, own = images.rpartition("/")
    prefix = f"{folder}/" if folder else ""
    rows = len(file[images])
    for name in _label_names(own):
        found = file.get(f"{prefix}{name}")
        if isinstance(found, h5py.Dataset) and found.shape and len(found) == rows and name != own:
            return f"{prefix}{name}"
    return None


def _label_names(images: str) -> Iterator[str]:
    match = _IMAGE_WORD.search(images)
    for word in _LABELS:
        if match is not None:
            for written in (word, word.upper(), word.title()):
                yield images[: match.start()] + written + images[match.end() :]
        yield word


def _own_fields(file: h5py.File) -> Iterator[str]:
    """A pack's further datasets, those with checksums."""
    for name, item in file.items():
        if name not in schema.RESERVED and isinstance(item, h5py.Dataset) and checksums_of(name) in file:
            yield name


def _splits(path: Path, pack: Pack, rows: int) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    if not pack.splits:
        return one_split(rows)
    names = (*pack.splits, _REST)
    ids = np.full(rows, len(pack.splits), np.int32)
    for number, (start, stop) in enumerate(pack.splits.values()):
        if (ids[start:stop] != len(pack.splits)).any():
            raise SourceError(f"{path}: its splits share rows; mend the file")
        ids[start:stop] = number
    return (names if (ids == len(pack.splits)).any() else names[:-1]), ids


def _names(file: h5py.File, images: str, rows: int) -> NameTable:
    """A pack's file names, or the rows' numbers."""
    stored = file.get(schema.FILENAMES)
    if images == schema.IMAGES and isinstance(stored, h5py.Dataset) and stored.shape == (rows,):
        # A file that h5pack did not write may hold empty names, and NULs, which a table of names cannot.
        names = (text(name).replace("\0", "\\x00") for name in stored[()].tolist())
        return NameTable.of(name or f"{images}/{row:08d}" for row, name in enumerate(names))
    return NameTable.of(f"{images}/{row:08d}" for row in range(rows))
