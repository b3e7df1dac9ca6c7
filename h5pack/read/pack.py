"""What an HDF5 file says of itself as a dataset of images: shapes, labels, splits, statistics."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.errors import PackFormatError
from h5pack.hdf5 import open_file, require_complete, require_dataset, text


@dataclass(frozen=True)
class FileIdentity:
    """By which a file that was replaced or rewritten is told from the one that was opened first.

    Attributes
    ----------
    inode, size, modified_ns : int
    """

    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: str) -> FileIdentity:
        """The identity of the file at `path` now."""
        status = os.stat(path)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Pack:
    """A file's description, read once.

    Attributes
    ----------
    path : str
        Absolute.
    identity : FileIdentity
    rows : int
        N, the length of axis 0 of the images.
    row_shape : tuple of int
        Of one image, as stored.
    layout : str or None
        nhwc or nchw; None where the file does not say.
    labels : str or None
        Path of the dataset of labels; None without labels.
    classes : tuple of str or None
        Names of an integer label's values.
    columns : tuple of str or None
        Names of a label table's columns.
    splits : dict of str to (int, int)
        First row, and the row behind the last; empty in files without splits.
    mean, std : ndarray or None
        float64, (C,), in 0..1.
    """

    path: str
    identity: FileIdentity
    rows: int
    row_shape: tuple[int, ...]
    layout: str | None
    labels: str | None
    classes: tuple[str, ...] | None
    columns: tuple[str, ...] | None
    splits: dict[str, tuple[int, int]]
    mean: npt.NDArray[np.float64] | None
    std: npt.NDArray[np.float64] | None


def read_pack(path: str | os.PathLike[str], images: str = schema.IMAGES, labels: str | None = schema.LABELS) -> Pack:
    """Describe a pack, or any HDF5 file with a dataset of numbers whose axis 0 is the sample.

    Parameters
    ----------
    path : path
    images : str
        The dataset of images.
    labels : str or None
        The dataset of labels; None: do without. The default is taken only where it is there.

    Raises
    ------
    PackFormatError
        If the file or a dataset is missing or of a kind that cannot be read by rows.
    IncompletePackError
        If it is a pack whose conversion did not finish.
    """
    absolute = os.path.abspath(path)
    with open_file(absolute) as file:
        identity = FileIdentity.of(absolute)
        require_complete(file)
        stored = require_dataset(file, images)
        _require_rows(file, stored)
        if labels == schema.LABELS and labels not in file:
            labels = None
        names: dict[str, tuple[str, ...] | None] = {schema.CLASSES: None, schema.COLUMNS: None}
        if labels is not None:
            label = require_dataset(file, labels)
            _require_rows(file, label)
            if len(label) != len(stored):
                raise PackFormatError(
                    f"{absolute}: {labels!r} has {len(label):,} rows and {images!r} has {len(stored):,}; name the "
                    "right datasets, or mend the file"
                )
            names = {name: _names(label.attrs.get(name)) for name in names}
        layout = stored.attrs.get(schema.LAYOUT)
        return Pack(
            path=absolute,
            identity=identity,
            rows=stored.shape[0],
            row_shape=tuple(stored.shape[1:]),
            layout=None if layout is None else text(layout),
            labels=labels,
            classes=names[schema.CLASSES],
            columns=names[schema.COLUMNS],
            splits=_splits(file, stored.shape[0]),
            mean=_statistic(file, "mean"),
            std=_statistic(file, "std"),
        )


def _require_rows(file: h5py.File, dataset: h5py.Dataset) -> None:
    where = f"{file.filename}: dataset {dataset.name.lstrip('/')!r}"
    if dataset.ndim < 1:
        raise PackFormatError(f"{where} has no axis 0 to take samples from; name another dataset")
    if dataset.dtype.kind not in "biuf":
        raise PackFormatError(f"{where} holds {dataset.dtype}, not numbers; name another dataset")


def _names(value: Any) -> tuple[str, ...] | None:
    return None if value is None else tuple(text(item) for item in np.atleast_1d(value))


def _splits(file: h5py.File, rows: int) -> dict[str, tuple[int, int]]:
    if schema.SPLIT_ROWS not in file or schema.SPLIT_NAMES not in file:
        return {}
    names = [text(name) for name in file[schema.SPLIT_NAMES][()]]
    ranges = [(int(start), int(stop)) for start, stop in file[schema.SPLIT_ROWS][()]]
    if len(names) != len(ranges) or any(not 0 <= start <= stop <= rows for start, stop in ranges):
        raise PackFormatError(f"{file.filename}: its splits do not fit its {rows:,} rows; run 'h5pack verify' on it")
    return dict(zip(names, ranges, strict=True))


def _statistic(file: h5py.File, name: str) -> npt.NDArray[np.float64] | None:
    item = file.get(f"{schema.STATISTICS}/{name}")
    return None if not isinstance(item, h5py.Dataset) else np.asarray(item[()], np.float64)
