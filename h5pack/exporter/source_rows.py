"""Selection of rows of an HDF5 file, with their names, labels and splits, for export and preview."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from h5pack.errors import NoImagesError, OptionsError
from h5pack.sources.catalog import Catalog, NameFilter
from h5pack.sources.hdf5_catalog import HDF5Datasets, hdf5_catalog
from h5pack.sources.hdf5_rows import HDF5RowReader


@dataclass(frozen=True)
class MissingRow:
    """A row that could not be read.

    Attributes
    ----------
    row : int
        Row number in the HDF5 file.
    name : str
        The stored name, or dataset path and row number if no names are stored.
    reason : str
    """

    row: int
    name: str
    reason: str


@dataclass(frozen=True)
class SourceRows:
    """The selected rows with their names, labels and splits; no pixels have been read yet.

    Attributes
    ----------
    catalog : Catalog
        The rows in stored order.
    reader : HDF5RowReader
        The reader of the catalog's images.
    rows : ndarray
        int64 (n,), the row numbers in the file.
    has_names : bool
        Whether the names in the catalog are stored in the file, rather than derived from row numbers.
    """

    catalog: Catalog
    reader: HDF5RowReader
    rows: npt.NDArray[np.int64]
    has_names: bool

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def channels(self) -> int | None:
        """Number of channels of a row; None if rows are encoded images."""
        form, shape = self.reader.form, self.reader.index.row_shape
        if form is None:
            return None
        return {"none": 1, "first": shape[0], "last": shape[-1]}[form.channel_axis]


def open_rows(
    path: str | os.PathLike[str], datasets: HDF5Datasets, splits: Sequence[str] = (), limit: int | None = None
) -> SourceRows:
    """Find the images, labels, names and splits of a file, and select rows.

    Parameters
    ----------
    path : path
        A pack, or any HDF5 file with a dataset of images.
    datasets : HDF5Datasets
    splits : sequence of str
        Select only the rows of these splits. Default: all rows.
    limit : int, optional
        Select at most this many rows, evenly spaced.

    Raises
    ------
    SourceError, PackFormatError
        If it is ambiguous which dataset holds the images, or if a dataset is damaged.
    OptionsError
        If the file has no split of a given name.
    NoImagesError
        If no row is selected.
    """
    catalog = hdf5_catalog(Path(path), datasets, NameFilter())
    reader = catalog.reader
    assert isinstance(reader, HDF5RowReader)
    has_names = any(name != f"{reader.images}/{row:08d}" for row, name in enumerate(catalog.names))
    unknown = [name for name in splits if name not in catalog.split_names]
    if unknown:
        names = ", ".join(map(repr, catalog.split_names))
        raise OptionsError(f"{path}: no split {unknown[0]!r}; it has {names}", path=path)
    if splits:
        catalog = _only_splits(catalog, splits)
    if limit is not None:
        catalog = catalog.limited(limit)
    if not len(catalog):
        where = f" in its splits {', '.join(map(repr, splits))}" if splits else ""
        raise NoImagesError(f"{path}: no row{where}; see what the file holds with 'h5pack info'", path=path)
    reader = catalog.reader
    assert isinstance(reader, HDF5RowReader)
    rows = np.arange(len(catalog), dtype=np.int64) if reader.rows is None else reader.rows
    return SourceRows(catalog, reader, rows, has_names)


def _only_splits(catalog: Catalog, wanted: Sequence[str]) -> Catalog:
    kept = [number for number, name in enumerate(catalog.split_names) if name in wanted]
    numbers = np.full(len(catalog.split_names), -1, np.int32)
    numbers[kept] = np.arange(len(kept))
    ids = numbers[catalog.split_ids]
    indices = np.flatnonzero(ids >= 0)
    return replace(
        catalog.take(indices), split_names=tuple(catalog.split_names[number] for number in kept), split_ids=ids[indices]
    )
