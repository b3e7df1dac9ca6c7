"""Labels and fields of an HDF5 file as a pack stores them."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.errors import DamagedRowsError, H5PackError, OptionsError, SourceError
from h5pack.hdf5 import text
from h5pack.machine import available_memory
from h5pack.read.engine import Engine
from h5pack.read.pack import checksums_of, read_pack
from h5pack.read.virtual import require_sources
from h5pack.sources.catalog import class_ids
from h5pack.sources.manifest import is_field_name


def read_labels(path: Path, dataset: h5py.Dataset, name: str) -> tuple[npt.NDArray[Any], tuple[str, ...] | None]:
    """Labels as a pack stores them: int64 (N,) with the classes' names, or uint8 (N, K) with the columns'.

    Raises
    ------
    SourceError
        If they are none, or cannot be read.
    """
    values = _values(path, dataset, name)
    where = f"{path}: {name!r}"
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim not in (1, 2):
        raise SourceError(f"{where} has shape {values.shape}; labels are (N,) or (N, K): name another with --labels")
    if values.ndim == 1 and values.dtype.kind in "OSU":
        if any(not isinstance(value, (bytes, str)) for value in values.tolist()):
            raise SourceError(f"{where} holds neither numbers nor texts; name another with --labels, or --no-labels")
        words, numbers = class_ids([text(value) for value in values.tolist()])
        return numbers, words
    if values.dtype.kind not in "biuf":
        raise SourceError(f"{where} holds {values.dtype}, no labels; name another with --labels, or --no-labels")
    whole = values.dtype.kind != "f" or bool((np.isfinite(values) & (values == np.rint(values))).all())
    if not whole or (values.size and not -(2**63) <= int(values.min()) <= int(values.max()) < 2**63):
        raise SourceError(
            f"{where} holds numbers that are no labels, such as {values.reshape(-1)[0]}; labels are integers: store "
            "them with --fields, and give --no-labels"
        )
    if values.ndim == 2:
        columns = _attribute_names(dataset, schema.COLUMNS, values.shape[1])
        return _byte_table(values, where), columns or tuple(f"label_{number}" for number in range(values.shape[1]))
    labels = values.astype(np.int64)
    classes = _attribute_names(dataset, schema.CLASSES, None)
    if classes is not None and len(labels) and not schema.NO_LABEL <= labels.min() <= labels.max() < len(classes):
        raise SourceError(
            f"{where} has {len(classes)} classes and labels from {labels.min()} to {labels.max()}; mend "
            "the file, or give --no-labels"
        )
    return labels, classes


def read_field(path: Path, dataset: h5py.Dataset, name: str) -> npt.NDArray[Any]:
    """A field, (N, ...), of numbers in the machine's byte order.

    Raises
    ------
    SourceError
        If it holds something else, or cannot be read.
    """
    if dataset.dtype.kind not in "biuf" or not dataset.shape:
        raise SourceError(f"{path}: {name!r} holds {dataset.dtype}; fields are rows of numbers: leave it out")
    return _values(path, dataset, name)


def field_names_of(path: Path, fields: tuple[str, ...]) -> tuple[str, ...]:
    """What the pack will call its fields: the last parts of their paths.

    Raises
    ------
    OptionsError
        If two would be called alike, or one as the format calls something else.
    """
    names = tuple(map(os.path.basename, fields))
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise OptionsError(f"{path}: two of the fields would be called {twice[0]!r}; give one of them")
    for name in names:
        if not is_field_name(name):
            raise OptionsError(f"{path}: a field may not be called {name!r}, which the format uses; leave it out")
    return names


def _byte_table(values: npt.NDArray[Any], where: str) -> npt.NDArray[np.uint8]:
    """A table of numbers in 0..255, or of -1 and 1, which mean 0 and 1 (CelebA's way)."""
    least, most = (values.min(), values.max()) if values.size else (0, 0)
    if least == -1 and most <= 1:
        values = values > 0
    elif least < 0 or most > 255:
        raise SourceError(
            f"{where} holds numbers from {least} to {most}; a table of labels holds 0 to 255 (or -1 and 1): store it "
            "with --fields, and give --no-labels"
        )
    return values.astype(np.uint8)


def _attribute_names(dataset: h5py.Dataset, attribute: str, count: int | None) -> tuple[str, ...] | None:
    found = dataset.attrs.get(attribute)
    if found is None:
        return None
    names = tuple(text(name) for name in np.atleast_1d(found))
    return names if count is None or len(names) == count else None


def _values(path: Path, dataset: h5py.Dataset, name: str) -> npt.NDArray[Any]:
    """All of a dataset: numbers as images are read, and compared with their checksums where there are some."""
    size = math.prod(dataset.shape or ()) * dataset.dtype.itemsize
    if size > available_memory() // 2:
        raise SourceError(f"{path}: {name!r} holds {size / 2**30:.1f} GiB, more than memory has room for; leave it out")
    try:
        if dataset.dtype.kind in "biuf" and dataset.shape:
            return _numbers(path, dataset, name)
        if dataset.is_virtual:
            require_sources(dataset)
        return np.asarray(dataset[()])
    except DamagedRowsError as error:
        raise SourceError(f"{error}; or leave that dataset out") from error
    except H5PackError:
        raise
    except Exception as error:
        # Damage shows as any of h5py's errors.
        raise SourceError(f"{path}: {name!r} cannot be read ({error}); restore the file, or name another") from error


def _numbers(path: Path, dataset: h5py.Dataset, name: str) -> npt.NDArray[Any]:
    pack = read_pack(path, name, None)
    engine = Engine(pack.path, pack.identity, pack.indexes, warn=False)
    rows = np.arange(len(dataset))
    values = engine.read(name, rows)
    if checksums_of(name) in pack.indexes:
        engine.check(name, checksums_of(name), rows, values)
    engine.close()
    return values
