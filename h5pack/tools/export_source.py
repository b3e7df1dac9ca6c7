"""The rows of an HDF5 file that a tool takes, found as a conversion finds them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from h5pack.errors import NoImagesError, OptionsError
from h5pack.sources.catalog import Catalog
from h5pack.sources.hdf5_catalog import HDF5Datasets, hdf5_catalog
from h5pack.sources.hdf5_rows import HDF5RowReader
from h5pack.sources.walk import NameFilter
from h5pack.tools.export_names import has_own_names


@dataclass(frozen=True)
class SourceRows:
    """Rows with their names, labels and splits, before any is read.

    Attributes
    ----------
    catalog : Catalog
        In stored order.
    reader : HDF5RowReader
        The catalog's.
    rows : ndarray
        int64, (n,): their numbers in the file.
    has_names : bool
        Whether the catalog's names are the file's own.
    """

    catalog: Catalog
    reader: HDF5RowReader
    rows: npt.NDArray[np.int64]
    has_names: bool

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def channels(self) -> int | None:
        """Channels of a row; None where rows are encoded images."""
        form, shape = self.reader.form, self.reader.index.row_shape
        if form is None:
            return None
        return {"none": 1, "first": shape[0], "last": shape[-1]}[form.channel_axis]


def open_rows(
    path: str | os.PathLike[str], datasets: HDF5Datasets, splits: Sequence[str] = (), limit: int | None = None
) -> SourceRows:
    """Find a file's images, labels, names and splits.

    Parameters
    ----------
    path : path
        A pack, or any HDF5 file with a dataset of images.
    datasets : HDF5Datasets
    splits : sequence of str
        Only these; none: all.
    limit : int, optional
        At most so many rows, evenly spaced.

    Raises
    ------
    SourceError, PackFormatError
        If it does not say which dataset is meant, or one is damaged.
    OptionsError
        If it has no such split.
    NoImagesError
        If no row is left.
    """
    catalog = hdf5_catalog(Path(path), datasets, NameFilter())
    reader = catalog.reader
    assert isinstance(reader, HDF5RowReader)
    has_names = has_own_names(catalog, reader.images, np.arange(len(catalog)))
    unknown = [name for name in splits if name not in catalog.split_names]
    if unknown:
        raise OptionsError(f"{path}: no split {unknown[0]!r}; it has {', '.join(map(repr, catalog.split_names))}")
    if splits:
        catalog = _of_splits(catalog, splits)
    if limit is not None:
        catalog = catalog.limited(limit)
    if not len(catalog):
        where = f" in its splits {', '.join(map(repr, splits))}" if splits else ""
        raise NoImagesError(f"{path}: no row{where}; look at what the file holds with 'h5pack info'")
    reader = catalog.reader
    assert isinstance(reader, HDF5RowReader)
    rows = np.arange(len(catalog), dtype=np.int64) if reader.rows is None else reader.rows
    return SourceRows(catalog, reader, rows, has_names)


def _of_splits(catalog: Catalog, wanted: Sequence[str]) -> Catalog:
    kept = [number for number, name in enumerate(catalog.split_names) if name in wanted]
    numbers = np.full(len(catalog.split_names), -1, np.int32)
    numbers[kept] = np.arange(len(kept))
    ids = numbers[catalog.split_ids]
    places = np.flatnonzero(ids >= 0)
    return replace(
        catalog.take(places), split_names=tuple(catalog.split_names[number] for number in kept), split_ids=ids[places]
    )
