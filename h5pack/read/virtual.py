"""Virtual datasets: whether the files that they are made of are there. HDF5 gives fill values where they are not."""

from __future__ import annotations

import math
import os
from operator import lt
from typing import Any

import h5py

from h5pack.errors import H5PackError, PackFormatError
from h5pack.hdf5 import find_item, open_file

_DEEPEST = 8
"""Virtual datasets over virtual datasets, at most."""


def require_sources(dataset: h5py.Dataset, depth: int = 0) -> None:
    """Make sure that every source of a virtual dataset is there, and is as large as its mapping says.

    Names with ``%b`` stand for as many files as there are, so nothing can be missing among them.

    Raises
    ------
    PackFormatError
    """
    if depth > _DEEPEST:
        raise PackFormatError(f"{_where(dataset)} is virtual over {_DEEPEST} others; write it as an ordinary dataset")
    by_file: dict[str, list[tuple[str, Any]]] = {}
    for source in dataset.virtual_sources():
        if "%b" not in source.file_name and "%b" not in source.dset_name:
            by_file.setdefault(source.file_name, []).append((source.dset_name, source))
    for name, parts in by_file.items():
        if name == ".":
            _require_parts(dataset, dataset.file, parts, depth)
            continue
        path = _find(name, dataset.file.filename)
        if path is None:
            raise PackFormatError(
                f"{_where(dataset)} is virtual, and its source {name} is missing; bring the file back, beside "
                f"{os.path.basename(dataset.file.filename)} or where the name says (h5dump -p -H shows it)"
            )
        try:
            with open_file(path) as file:
                _require_parts(dataset, file, parts, depth)
        except H5PackError as error:
            raise PackFormatError(f"{_where(dataset)} is virtual, and of its sources: {error}") from error


def _require_parts(dataset: h5py.Dataset, file: h5py.File, parts: list[tuple[str, Any]], depth: int) -> None:
    for name, source in parts:
        found = find_item(file, name)
        if not isinstance(found, h5py.Dataset):
            raise PackFormatError(f"{file.filename}: no dataset {name!r}, a source of {_where(dataset)}; mend the file")
        needed = _missing(source, found.shape)
        if needed is not None:
            raise PackFormatError(
                f"{file.filename}: {name!r} has shape {found.shape}, and {_where(dataset)} takes {needed} of it; bring "
                "back the file that it was made for"
            )
        if found.is_virtual:
            require_sources(found, depth + 1)


def _missing(source: Any, shape: tuple[int, ...]) -> str | None:
    """What a mapping takes of a source that is too small for it; None where it is not."""
    space = source.src_space
    if space.get_select_type() == h5py.h5s.SEL_ALL:
        count = source.vspace.get_select_npoints()
        return f"{count:,} numbers" if math.prod(shape) < count else None
    try:
        ends = [int(last) + 1 for last in space.get_select_bounds()[1]]
    except ValueError:
        # It takes all rows that will ever come.
        return None
    short = len(shape) != len(ends) or any(map(lt, shape, ends))
    return f"up to {tuple(ends)}" if short else None


def _where(dataset: h5py.Dataset) -> str:
    return f"{dataset.file.filename}: {dataset.name.lstrip('/')!r}"


def _find(name: str, virtual_file: str) -> str | None:
    """The file that HDF5 takes for a source's name; None where it finds none (H5F_prefix_open_file in src/H5Fint.c)."""
    folder = os.path.dirname(os.path.realpath(virtual_file))
    candidates = [os.path.join(prefix.replace("${ORIGIN}", folder), name) for prefix in _prefixes()]
    candidates += [name, os.path.join(folder, name), os.path.join(os.path.dirname(virtual_file), name)]
    if os.path.isabs(name):
        candidates.append(os.path.join(folder, os.path.basename(name)))
    return next((path for path in candidates if os.path.isfile(path)), None)


def _prefixes() -> list[str]:
    prefixes = os.environ.get("HDF5_VDS_PREFIX", "")
    return [prefix for prefix in (prefixes, *prefixes.split(os.pathsep)) if prefix]
