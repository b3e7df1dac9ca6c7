"""What an HDF5 file says of itself as a dataset of images: shapes, labels, splits, statistics."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.errors import H5PackError, PackFormatError
from h5pack.hdf5 import find_item, open_file, require_complete, require_dataset, text
from h5pack.read.chunk_index import ChunkIndex, index_dataset
from h5pack.read.encoded import index_encoded, is_encoded
from h5pack.read.identity import FileIdentity
from h5pack.read.virtual import index_rows, require_sources


@dataclass(frozen=True)
class Pack:
    """A file's description, read once.

    Attributes
    ----------
    path : str
        Absolute.
    identity : FileIdentity
    indexes : dict of str to ChunkIndex
        Where the rows of each dataset lie: the images first, then the labels, the fields, and the checksums of all.
    layout : str or None
        nhwc or nchw; None where the file does not say. Encoded images are nhwc.
    labels : str or None
        Path of the dataset of labels; None without labels.
    fields : tuple of str
        Paths of further datasets of rows.
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
    indexes: dict[str, ChunkIndex]
    layout: str | None
    labels: str | None
    fields: tuple[str, ...]
    classes: tuple[str, ...] | None
    columns: tuple[str, ...] | None
    splits: dict[str, tuple[int, int]]
    mean: npt.NDArray[np.float64] | None
    std: npt.NDArray[np.float64] | None


def read_pack(
    path: str | os.PathLike[str],
    images: str = schema.IMAGES,
    labels: str | None = schema.LABELS,
    fields: Sequence[str] = (),
    *,
    sized: bool = True,
) -> Pack:
    """Describe a pack, or any HDF5 file with a dataset of numbers, or of encoded images, whose axis 0 is the sample.

    Parameters
    ----------
    path : path
    images : str
        The dataset of images.
    labels : str or None
        The dataset of labels; None: do without. The default is taken only where it, or its checksums, is there.
    fields : sequence of str
        Further datasets with a row for each image.
    sized : bool
        False: of encoded images only the bytes will be read, so their size does not matter.

    Raises
    ------
    PackFormatError
        If the file or a dataset is missing, damaged, or of a kind that cannot be read by rows.
    IncompletePackError
        If it is a pack whose conversion did not finish.
    """
    absolute = os.path.abspath(path)
    with open_file(absolute) as file:
        # Of the file that is open, which another one may have replaced by now.
        identity = FileIdentity.of(file.id.get_vfd_handle() if file.driver == "sec2" else absolute)
        try:
            require_complete(file)
            if labels == schema.LABELS and labels not in file and checksums_of(labels) not in file:
                labels = None
            images, labels = images.strip("/"), None if labels is None else labels.strip("/")
            return _describe(file, identity, images, labels, tuple(name.strip("/") for name in fields), sized=sized)
        except H5PackError:
            raise
        except Exception as error:
            # Damage shows as any of h5py's errors.
            raise PackFormatError(
                f"{absolute}: its metadata is damaged ({error}); restore the file, or run 'h5pack verify' on it"
            ) from error


def _describe(
    file: h5py.File,
    identity: FileIdentity,
    images: str,
    labels: str | None,
    fields: tuple[str, ...],
    *,
    sized: bool,
) -> Pack:
    stored = require_dataset(file, images)
    indexes: dict[str, ChunkIndex] = {}
    for name in (images, *(() if labels is None else (labels,)), *fields):
        dataset = stored if name == images else require_dataset(file, name)
        _require_rows(file, dataset, name == images)
        if len(dataset) != len(stored):
            raise PackFormatError(
                f"{file.filename}: {name!r} has {len(dataset):,} rows and {images!r} has {len(stored):,}; name the "
                "right datasets, or mend the file"
            )
        if is_encoded(dataset):
            # Checksums are those of rows as stored, and nobody has such of pixels that are yet to be decoded.
            others = require_sources(dataset) if dataset.is_virtual else frozenset()
            indexes[name] = replace(index_encoded(file, dataset, name, sized=sized), others=others)
            continue
        indexes[name] = index_rows(file, dataset, name)
        checksums = find_item(file, checksums_of(name))
        if isinstance(checksums, h5py.Dataset) and checksums.shape == (len(stored),) and checksums.dtype.kind == "u":
            indexes[checksums_of(name)] = index_dataset(file, checksums, checksums_of(name))
    label = None if labels is None else file[labels]
    layout = "nhwc" if is_encoded(stored) else stored.attrs.get(schema.LAYOUT)
    return Pack(
        path=file.filename,
        identity=identity,
        indexes=indexes,
        layout=None if layout is None else text(layout),
        labels=labels,
        fields=fields,
        classes=None if label is None else _names(label.attrs.get(schema.CLASSES)),
        columns=None if label is None else _names(label.attrs.get(schema.COLUMNS)),
        splits=_splits(file, stored.shape[0]),
        mean=_statistic(file, "mean"),
        std=_statistic(file, "std"),
    )


def checksums_of(name: str) -> str:
    """Path of the dataset that holds the checksums of a dataset's rows."""
    return f"{schema.CHECKSUMS}/{name}"


def _require_rows(file: h5py.File, dataset: h5py.Dataset, images: bool) -> None:
    where = f"{file.filename}: dataset {dataset.name.lstrip('/')!r}"
    if dataset.ndim < 1:
        raise PackFormatError(f"{where} has no axis 0 to take samples from; name another dataset")
    try:
        dtype = dataset.dtype
    except TypeError as error:
        raise PackFormatError(f"{where} holds no numbers that NumPy knows ({error}); name another dataset") from error
    if is_encoded(dataset):
        return
    string = h5py.check_string_dtype(dtype)
    if images and string is not None and string.length is None:
        raise PackFormatError(
            f"{where} holds variable-length strings; encoded images must be stored as variable-length uint8 "
            "(h5py.vlen_dtype(np.uint8)), since text ends at the first zero byte; write them anew, or name another "
            "dataset"
        )
    base = h5py.check_vlen_dtype(dtype)
    if isinstance(base, np.dtype):
        raise PackFormatError(
            f"{where} holds variable-length {base} on {dataset.ndim} axes; rows of variable length must be encoded "
            "images, uint8 on one axis; name another dataset"
        )
    if dtype.kind not in "biuf":
        raise PackFormatError(f"{where} holds {dtype}, not numbers; name another dataset")


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
