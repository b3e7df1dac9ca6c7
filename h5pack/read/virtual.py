"""Virtual datasets: the files that they are made of, and where in them each row lies.

HDF5 gives fill values where a source is missing; here that is an error. Mappings of whole rows, one behind the other,
are read directly where their sources are; for all others the HDF5 library puts the rows together.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import lt
from typing import Any

import h5py
import numpy as np

from h5pack.errors import H5PackError, PackFormatError
from h5pack.hdf5 import find_item, open_file
from h5pack.read.chunk_index import LINKED, VIRTUAL, ChunkIndex, index_dataset
from h5pack.read.identity import FileIdentity, SourceFile
from h5pack.read.virtual_index import Part, join_parts

_ORIGIN = "${ORIGIN}"
_DEEPEST = 8
"""Virtual datasets over virtual datasets, at most."""


@dataclass(frozen=True)
class _Selection:
    """What a mapping takes of a dataset, in numbers of Python's: closing a file takes the longer the more of HDF5's own
    descriptions are held, 14 ms with 20,000 of them.

    Attributes
    ----------
    everything, slab : bool
        All of the dataset, or blocks of it.
    count : int or None
        Numbers; None: all that will ever come.
    begins, ends : tuple of int
        Of the box around them.
    """

    everything: bool
    slab: bool
    count: int | None
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, space: Any) -> _Selection:
        kind = space.get_select_type()
        everything, slab = kind == h5py.h5s.SEL_ALL, kind == h5py.h5s.SEL_HYPERSLABS
        try:
            count = int(space.get_select_npoints())
            if everything or not count:
                return cls(everything, slab, count)
            begins, lasts = space.get_select_bounds()
        except (RuntimeError, ValueError):
            return cls(everything, slab, None)
        return cls(everything, slab, count, tuple(map(int, begins)), tuple(int(last) + 1 for last in lasts))

    def rows(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The rows that it takes of a dataset of this shape, as first and count; None if it takes anything else."""
        if self.everything:
            return (0, shape[0]) if shape else None
        counts = tuple(end - begin for begin, end in zip(self.begins, self.ends, strict=True))
        if not self.slab or self.count != math.prod(counts) or len(counts) != len(shape):
            return None
        if counts[1:] != shape[1:] or any(map(lt, shape, self.ends)):
            return None
        return self.begins[0], counts[0]


@dataclass(frozen=True)
class _Mapping:
    """What a virtual dataset takes of a source, and where that goes."""

    here: _Selection
    there: _Selection


_Visit = Callable[[h5py.File, h5py.Dataset, str, list[_Mapping]], None]


class _Known:
    """What was found of the datasets that lead to one, each of which is looked at once, however many lead to it."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], frozenset[SourceFile]] = {}
        self.indexes: dict[tuple[str, str], ChunkIndex] = {}


def require_sources(dataset: h5py.Dataset) -> frozenset[SourceFile]:
    """Make sure that every source of a virtual dataset is there, and is as large as its mapping says.

    Names with ``%b`` stand for as many files as there are, so nothing can be missing among them.

    Returns
    -------
    frozenset of SourceFile
        The files that rows come from.

    Raises
    ------
    PackFormatError
    """
    return _require_sources(dataset, _Known(), 0)


def _require_sources(dataset: h5py.Dataset, known: _Known, depth: int) -> frozenset[SourceFile]:
    key = dataset.file.filename, dataset.name
    if key not in known.files:
        files: set[SourceFile] = set()

        def visit(file: h5py.File, found: h5py.Dataset, name: str, mappings: list[_Mapping]) -> None:
            files.add(_identify(file))
            if found.is_virtual:
                files.update(_require_sources(found, known, depth + 1))

        _visit_sources(dataset, depth, visit)
        known.files[key] = frozenset(files)
    return known.files[key]


def index_rows(file: h5py.File, dataset: h5py.Dataset, name: str) -> ChunkIndex:
    """`index_dataset`, which follows a virtual dataset's mappings and a link to the files that hold the rows.

    Parameters
    ----------
    file, dataset, name
        As of `index_dataset`.

    Returns
    -------
    ChunkIndex
        A `VirtualIndex` where the rows can be read in several files, or another one.

    Raises
    ------
    PackFormatError
        As of `index_dataset`; and if a source is missing, or smaller than its mapping says.
    """
    return _index_rows(file, dataset, name, _Known(), 0)


def _index_rows(file: h5py.File, dataset: h5py.Dataset, name: str, known: _Known, depth: int) -> ChunkIndex:
    key = file.filename, name
    if key not in known.indexes:
        index = index_dataset(file, dataset, name)
        reason = index.reason or ""
        if dataset.is_virtual and reason == VIRTUAL:
            index = _index_virtual(dataset, index, known, depth)
        elif reason.startswith(LINKED) and dataset.name is not None:
            index = _index_linked(dataset, index, known, depth)
        elif dataset.is_virtual:
            index = replace(index, others=_require_sources(dataset, known, depth))
        elif dataset.external:
            index = replace(index, others=_external_files(dataset))
        known.indexes[key] = index
    return known.indexes[key]


def _external_files(dataset: h5py.Dataset) -> frozenset[SourceFile]:
    """The files that hold the bytes of a dataset that is stored outside of HDF5, as far as they are there."""
    folder = os.path.dirname(os.path.abspath(dataset.file.filename))
    paths = [path for name, _, _ in dataset.external for path in (os.path.abspath(name), os.path.join(folder, name))]
    return frozenset(SourceFile(path, FileIdentity.of(path)) for path in paths if os.path.isfile(path))


def _index_linked(dataset: h5py.Dataset, index: ChunkIndex, known: _Known, depth: int) -> ChunkIndex:
    """The index of a dataset in another file."""
    there = _index_rows(dataset.file, dataset, dataset.name.lstrip("/"), known, depth)
    file = _identify(dataset.file)
    if there.reason is not None or not index.rows or not index.row_bytes:
        return replace(index, others=there.files | {file})
    return join_parts(index, file, b"", [Part(0, index.rows, file, there, 0)])


def _index_virtual(dataset: h5py.Dataset, index: ChunkIndex, known: _Known, depth: int) -> ChunkIndex:
    parts: list[Part] = []
    files: set[SourceFile] = set()
    reason = None if index.rows and index.row_bytes else VIRTUAL
    if any("%b" in name for source in dataset.virtual_sources() for name in source[1:3]):
        reason = f"{VIRTUAL} over names with %b"

    def visit(file: h5py.File, found: h5py.Dataset, name: str, mappings: list[_Mapping]) -> None:
        nonlocal reason
        where = _identify(file)
        files.add(where)
        boxes = [_whole_rows(dataset, found, mapping) for mapping in mappings]
        if reason is None and None in boxes:
            reason = f"{VIRTUAL}, and takes other than whole rows, one behind the other, of {name!r} in {file.filename}"
        if reason is None and not _same_type(dataset, found):
            reason = f"{VIRTUAL}, and {name!r} in {file.filename} holds numbers of another type"
        if reason is None:
            there = _index_rows(file, found, name, known, depth + 1)
            files.update(there.files)
            parts.extend(Part(first, rows, where, there, start) for first, rows, start in filter(None, boxes) if rows)
        elif found.is_virtual:
            files.update(_require_sources(found, known, depth + 1))

    _visit_sources(dataset, depth, visit)
    parts.sort(key=lambda part: part.first)
    if reason is None and any(one.first + one.rows > other.first for one, other in itertools.pairwise(parts)):
        reason = f"{VIRTUAL}, and its mappings lie over each other"
    if reason is None and parts and all(part.index.reason is not None for part in parts):
        one = parts[0]
        reason = f"{VIRTUAL} over {one.index.name!r} of {one.file.path}: {one.index.reason}"
    if reason is not None:
        return replace(index, reason=reason, others=frozenset(files))
    fill = np.full(index.row_shape, dataset.fillvalue, index.dtype).tobytes()
    return join_parts(index, _identify(dataset.file), fill, parts)


def _whole_rows(dataset: h5py.Dataset, found: h5py.Dataset, mapping: _Mapping) -> tuple[int, int, int] | None:
    """The first row of a mapping, its rows, and the first row in the source; None if it takes anything else."""
    if mapping.here.count == 0:
        return 0, 0, 0
    here, there = mapping.here.rows(dataset.shape), mapping.there.rows(found.shape)
    if here is None or there is None or here[1] != there[1] or dataset.shape[1:] != found.shape[1:]:
        return None
    return *here, there[0]


def _same_type(one: h5py.Dataset, other: h5py.Dataset) -> bool:
    return bool(one.id.get_type().equal(other.id.get_type()) and one.dtype == other.dtype)


def _identify(file: h5py.File) -> SourceFile:
    """A file that is open, which another one may have replaced by now."""
    path = os.path.abspath(file.filename)
    return SourceFile(path, FileIdentity.of(file.id.get_vfd_handle() if file.driver == "sec2" else path))


def _visit_sources(dataset: h5py.Dataset, depth: int, visit: _Visit) -> None:
    """Call `visit` with each source of a virtual dataset, while its file is open: file, dataset, name, mappings."""
    if depth > _DEEPEST:
        raise PackFormatError(f"{_where(dataset)} is virtual over {_DEEPEST} others; write it as an ordinary dataset")
    by_file: dict[str, dict[str, list[_Mapping]]] = {}
    for here, file_name, name, there in dataset.virtual_sources():
        if "%b" not in file_name and "%b" not in name:
            mapping = _Mapping(_Selection.of(here), _Selection.of(there))
            by_file.setdefault(file_name, {}).setdefault(name, []).append(mapping)
    # The last of HDF5's own.
    here = there = None
    for name, datasets in by_file.items():
        if name == ".":
            _visit(dataset, dataset.file, datasets, visit)
            continue
        path = _find(name.replace("%%", "%"), dataset.file.filename)
        if path is None:
            raise PackFormatError(
                f"{_where(dataset)} is virtual, and its source {name} is missing; bring the file back, beside "
                f"{os.path.basename(dataset.file.filename)} or where the name says (h5dump -p -H shows it)"
            )
        try:
            with open_file(path) as file:
                _visit(dataset, file, datasets, visit)
        except H5PackError as error:
            raise PackFormatError(f"{_where(dataset)} is virtual, and of its sources: {error}") from error


def _visit(dataset: h5py.Dataset, file: h5py.File, datasets: dict[str, list[_Mapping]], visit: _Visit) -> None:
    for stored, mappings in datasets.items():
        name = stored.replace("%%", "%")
        visit(file, _require_source(dataset, file, name, mappings), name, mappings)


def _require_source(dataset: h5py.Dataset, file: h5py.File, name: str, mappings: Sequence[_Mapping]) -> h5py.Dataset:
    found = find_item(file, name)
    if not isinstance(found, h5py.Dataset):
        raise PackFormatError(f"{file.filename}: no dataset {name!r}, a source of {_where(dataset)}; mend the file")
    for mapping in mappings:
        needed = _missing(mapping, found.shape)
        if needed is not None:
            raise PackFormatError(
                f"{file.filename}: {name!r} has shape {found.shape}, and {_where(dataset)} takes {needed} of it; bring "
                "back the file that it was made for"
            )
    return found


def _missing(mapping: _Mapping, shape: tuple[int, ...]) -> str | None:
    """What a mapping takes of a source that is too small for it; None where it is not."""
    there = mapping.there
    if there.everything:
        count = mapping.here.count or 0
        return f"{count:,} numbers" if math.prod(shape) < count else None
    short = bool(there.ends) and (len(shape) != len(there.ends) or any(map(lt, shape, there.ends)))
    return f"up to {there.ends}" if short else None


def _where(dataset: h5py.Dataset) -> str:
    return f"{dataset.file.filename}: {dataset.name.lstrip('/')!r}"


def _find(name: str, virtual_file: str) -> str | None:
    """The file that HDF5 takes for a source's name; None where it finds none.

    HDF5 tries the places in this order (H5F_prefix_open_file in src/H5Fint.c): an absolute name itself, of which else
    only the last part counts; the folders that HDF5_VDS_PREFIX lists, as they are written; all of it as one folder, in
    which alone a leading ``${ORIGIN}`` means something; the folder that the virtual file was opened in; the folder one
    is in; and where the virtual file really lies.
    """
    if os.path.isabs(name):
        if os.path.isfile(name):
            return name
        name = os.path.basename(name)
    opened = os.path.dirname(os.path.abspath(virtual_file))
    prefix = os.environ.get("HDF5_VDS_PREFIX", "")
    folders = [folder for folder in prefix.split(os.pathsep) if folder]
    if prefix:
        folders.append(opened + prefix[len(_ORIGIN) :] if prefix.startswith(_ORIGIN) else prefix)
    folders += [opened, "", os.path.dirname(os.path.realpath(virtual_file))]
    return next((path for folder in folders if os.path.isfile(path := os.path.join(folder, name))), None)
