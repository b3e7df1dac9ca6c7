"""A finished output that a resume finds: is it what this conversion would make?"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from h5pack import schema
from h5pack.errors import OutputExistsError
from h5pack.hdf5 import open_file, require_complete, text
from h5pack.pack.options import ConvertOptions
from h5pack.pack.skeleton import options_text
from h5pack.sources.catalog import Catalog


def require_finished(path: Path, catalog: Catalog, options: ConvertOptions) -> tuple[int, int]:
    """Check that a file is complete, and made with these options from this source.

    File names, labels and splits are compared; the images themselves were not kept to compare with.

    Parameters
    ----------
    path : Path
    catalog : Catalog
        Of the source as it is now.
    options : ConvertOptions

    Returns
    -------
    rows, rejects : int

    Raises
    ------
    OutputExistsError
        If it is something else.
    PackFormatError
        If it is no HDF5 file, or unfinished.
    """
    with open_file(path) as file:
        if schema.FORMAT not in file.attrs:
            raise _other(path, "is no pack")
        require_complete(file)
        if text(file.attrs.get(schema.OPTIONS, b"")) != options_text(options.content()):
            raise _other(path, "was not made with these options")
        if not _same_source(file, catalog):
            raise _other(path, "was not made from this source")
        rejects = len(file[f"{schema.REJECTS}/filenames"]) if schema.REJECTS in file else 0
        return len(file[schema.IMAGES]), rejects


def _same_source(file: h5py.File, catalog: Catalog) -> bool:
    """Whether the packed and the rejected names are the source's, and labels and splits agree."""
    packed = file[schema.FILENAMES][()].tolist()
    rejected = file[f"{schema.REJECTS}/filenames"][()].tolist() if schema.REJECTS in file else []
    names = [name.encode("utf-8", "backslashreplace") for name in catalog.names]
    listed = [reject.name.encode("utf-8", "backslashreplace") for reject in catalog.rejects]
    if sorted(packed + rejected) != sorted(names + listed):
        return False
    index = {name: number for number, name in enumerate(names)}
    if len(index) < len(names):
        # Names that occur twice do not tell which row is which.
        return True
    origin = np.array([index[name] for name in packed], np.int64)
    splits = [text(name) for name in file[schema.SPLIT_NAMES][()]]
    stored_splits = np.repeat(np.arange(len(splits)), np.diff(file[schema.SPLIT_ROWS][()], axis=1)[:, 0])
    if splits != list(catalog.split_names) or not np.array_equal(catalog.split_ids[origin], stored_splits):
        return False
    if catalog.labels is None:
        return schema.LABELS not in file or catalog.kind == "dataset"
    return schema.LABELS in file and np.array_equal(file[schema.LABELS][()], catalog.labels[origin])


def _other(path: Path, what: str) -> OutputExistsError:
    return OutputExistsError(
        f"{path}: exists, and {what}; give another name, or --overwrite without --resume to replace it"
    )
