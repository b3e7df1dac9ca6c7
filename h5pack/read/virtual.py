"""Virtual datasets: which source files they refer to, and where in these files each row is stored.

If a source file is missing, HDF5 silently returns fill values, but h5pack raises an error (except for names with
``%b``). If all mappings cover consecutive whole rows of the same type, without overlap, rows are read directly from the
sources whose layout allows it. Otherwise, the HDF5 library assembles all rows.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import lt
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5pack.errors import H5PackError, PackFormatError
from h5pack.read.chunk_index import ChunkIndex, index_dataset
from h5pack.read.hdf5 import dataset_error, find_item, open_file, require_filters
from h5pack.read.storage import FileIdentity, SourceFile
from h5pack.read.virtual_index import MappedRows, join_rows
from h5pack.system.files import absolute_path

_ORIGIN = "${ORIGIN}"
_MAX_DEPTH = 8
"""Maximum nesting depth of virtual datasets that are sources of other virtual datasets."""


@dataclass(frozen=True)
class _Selection:
    """The elements that a mapping selects in one dataset.

    The selection is stored as Python integers and not as an HDF5 dataspace, because closing a file takes 14 ms while
    20,000 dataspaces are alive.
    """

    everything: bool
    slab: bool  # whether it is a hyperslab
    count: int | None  # number of elements; None if unlimited
    # Corners of the bounding box; empty if nothing or everything is selected, or if `count` is None.
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()  # exclusive

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
        """Return (first row, number of rows) if consecutive whole rows of a dataset of this shape are selected.

        Return None for any other selection.
        """
        if self.everything:
            return (0, shape[0]) if shape else None
        counts = tuple(end - begin for begin, end in zip(self.begins, self.ends, strict=True))
        if not self.slab or self.count != math.prod(counts) or len(counts) != len(shape):
            return None
        if counts[1:] != shape[1:] or any(map(lt, shape, self.ends)):
            return None
        return self.begins[0], counts[0]


class _Mapping(NamedTuple):
    """A mapping: the selection in the virtual dataset (`here`) and the selection in its source (`there`)."""

    here: _Selection
    there: _Selection


_Visit = Callable[[h5py.File, h5py.Dataset, str, list[_Mapping]], object]
"""What is called with an open source file, a source in it, the source's name, and the mappings to it."""


@dataclass
class _Visited:
    """Results by (file, dataset), so that a source that several mappings refer to is examined only once."""

    files: dict[tuple[str, str], frozenset[SourceFile]] = field(default_factory=dict)
    indexes: dict[tuple[str, str], ChunkIndex] = field(default_factory=dict)


def files_of(dataset: h5py.Dataset, visited: _Visited | None = None, depth: int = 0) -> frozenset[SourceFile]:
    """Return a dataset's file and all other files that hold its values.

    Raises PackFormatError if a source of a virtual dataset is missing or too small, or if external storage is cut
    short. Sources with ``%b`` in their name are left out, because such a name stands for any number of files. Only
    recursive calls give `visited` and `depth`.
    """
    visited = visited or _Visited()
    key = dataset.file.filename, dataset.name
    if key not in visited.files:
        files = {identify(dataset.file), *_external_files(dataset)}

        def visit(file: h5py.File, found: h5py.Dataset, name: str, mappings: list[_Mapping]) -> None:
            files.update({identify(file)}, files_of(found, visited, depth + 1))

        _visit_sources(dataset, depth, visit)
        visited.files[key] = frozenset(files)
    return visited.files[key]


def has_other_files(dataset: h5py.Dataset) -> bool:
    """Return whether a dataset is virtual, or has its values in external storage."""
    return bool(dataset.is_virtual or dataset.external)


def missing_sources(datasets: dict[str, h5py.Dataset]) -> dict[str, str]:
    """Return the error of `files_of` for each dataset that has one, as a text, by the names in `datasets`.

    A file that holds values of several datasets is opened only once.
    """
    visited = _Visited()

    def visit(file: h5py.File, found: h5py.Dataset, name: str, mappings: list[_Mapping]) -> None:
        files_of(found, visited, 1)

    errors = _visit_all_sources({name: (dataset, visit) for name, dataset in datasets.items()}, 0)
    for name, dataset in datasets.items():
        try:
            _external_files(dataset)
        except PackFormatError as error:
            errors[name] = error
    return {name: str(error) for name, error in errors.items()}


def other_files(file: h5py.File, dataset: h5py.Dataset) -> frozenset[SourceFile]:
    """Return all files of a dataset except `file`, which contains the dataset, or a link to it."""
    return files_of(dataset) - {identify(file)}


def index_rows(
    file: h5py.File, dataset: h5py.Dataset, name: str, visited: _Visited | None = None, depth: int = 0
) -> ChunkIndex:
    """Index a dataset like `index_dataset`, and follow virtual mappings and links to the files that hold the rows.

    Returns a `VirtualIndex` if at least some rows can be read directly from the source files. Also raises the errors of
    `files_of`. Only recursive calls give `visited` and `depth`.
    """
    visited = visited or _Visited()
    key = file.filename, name
    if key not in visited.indexes:
        index = index_dataset(file, dataset, name)
        if dataset.file.filename != file.filename and dataset.name is not None:
            index = _index_linked(dataset, index, visited, depth)
        elif dataset.is_virtual:
            index = _index_virtual(dataset, index, visited, depth)
        elif dataset.external:
            index = replace(index, external_files=_external_files(dataset))
        visited.indexes[key] = index
    return visited.indexes[key]


def _external_files(dataset: h5py.Dataset) -> frozenset[SourceFile]:
    """Return the existing files of external storage, which HDF5 looks for in the current folder by default.

    Raises PackFormatError if such a file is cut short, because HDF5 would read zeros. Also raises it if a path is that
    of a pipe or a device, because HDF5 might wait forever.
    """
    if not dataset.external:
        return frozenset()
    folder = os.environ.get("HDF5_EXTFILE_PREFIX", "")
    if folder.startswith("${ORIGIN}"):
        folder = f"{os.path.dirname(absolute_path(dataset.file.filename))}/{folder.removeprefix('${ORIGIN}')}"
    refuse = partial(dataset_error, dataset.file.filename, dataset.name.lstrip("/"))
    left = math.prod(dataset.shape or ()) * dataset.id.get_type().get_size()
    files: set[SourceFile] = set()
    for name, offset, size in dataset.external:
        count = min(size, left)
        left -= count
        path = absolute_path(os.path.join(folder, name))
        if not os.path.isfile(path):
            if os.path.exists(path) and not os.path.isdir(path):  # HDF5 would wait for a pipe.
                raise refuse(f"has its data in {path}, which is not a regular file; restore that file")
            continue
        file = SourceFile(path, FileIdentity.of(path))
        if count and file.identity.size < offset + count:
            problem = f"needs the first {offset + count:,} bytes of {path}, which has only {file.identity.size:,}"
            raise refuse(f"{problem}; restore that file")
        files.add(file)
    return frozenset(files)


def _index_linked(dataset: h5py.Dataset, index: ChunkIndex, visited: _Visited, depth: int) -> ChunkIndex:
    """Return `index`, the index of a link to `dataset`, with the locations of the rows in the file of `dataset`."""
    there = index_rows(dataset.file, dataset, dataset.name.lstrip("/"), visited, depth)
    file = identify(dataset.file)
    if there.library_reason is not None or not index.rows or not index.row_bytes:
        return replace(index, external_files=there.files | {file})
    return join_rows(index, file, b"", [MappedRows(0, index.rows, file, there, 0)])


def _index_virtual(dataset: h5py.Dataset, index: ChunkIndex, visited: _Visited, depth: int) -> ChunkIndex:
    parts: list[MappedRows] = []
    files: set[SourceFile] = set()
    # Why rows are read through the HDF5 library; None as long as all mappings can be read directly.
    reason = None if index.rows and index.row_bytes else "it is virtual"
    if any(_is_pattern(name) for source in dataset.virtual_sources() for name in source[1:3]):
        reason = "it is virtual, and its sources' names contain %b"

    def visit(file: h5py.File, found: h5py.Dataset, name: str, mappings: list[_Mapping]) -> None:
        nonlocal reason
        where = identify(file)
        files.add(where)
        boxes = [_whole_rows(dataset, found, mapping) for mapping in mappings]
        if reason is None and None in boxes:
            source = f"{name!r} in {file.filename}"
            reason = f"it is virtual, and a mapping does not cover consecutive whole rows of {source}"
        same_type = dataset.id.get_type().equal(found.id.get_type()) and dataset.dtype == found.dtype
        if reason is None and not same_type:
            reason = f"it is virtual, and its source {name!r} in {file.filename} holds numbers of another type"
        if reason is None:
            there = index_rows(file, found, name, visited, depth + 1)
            files.update(there.files)
            parts.extend(
                MappedRows(first, rows, where, there, start) for first, rows, start in filter(None, boxes) if rows
            )
        else:
            files.update(files_of(found, visited, depth + 1))

    _visit_sources(dataset, depth, visit)
    parts.sort(key=lambda part: part.first)
    if reason is None and any(one.first + one.rows > other.first for one, other in itertools.pairwise(parts)):
        reason = "it is virtual, and its mappings overlap"
    if reason is None and parts and all(part.index.library_reason is not None for part in parts):
        one = parts[0]
        reason = f"it is virtual, and its source {one.index.name!r} in {one.file.path}: {one.index.library_reason}"
    if reason is not None:
        return replace(index, library_reason=reason, external_files=frozenset(files))
    fill = np.full(index.row_shape, dataset.fillvalue, index.dtype).tobytes()
    return join_rows(index, identify(dataset.file), fill, parts)


def _whole_rows(dataset: h5py.Dataset, found: h5py.Dataset, mapping: _Mapping) -> tuple[int, int, int] | None:
    """Return (first row, row count, first row in source) if a mapping covers consecutive whole rows, else None."""
    if mapping.here.count == 0:
        return 0, 0, 0
    here, there = mapping.here.rows(dataset.shape), mapping.there.rows(found.shape)
    if here is None or there is None or here[1] != there[1] or dataset.shape[1:] != found.shape[1:]:
        return None
    return *here, there[0]


def identify(file: h5py.File) -> SourceFile:
    """Return the path and the identity of an open file."""
    path = absolute_path(file.filename)
    # Take the identity of the open descriptor, because the file at the path may already have been replaced.
    return SourceFile(path, FileIdentity.of(file.id.get_vfd_handle() if file.driver == "sec2" else path))


def _visit_sources(dataset: h5py.Dataset, depth: int, visit: _Visit) -> None:
    """Call ``visit(file, found, name, mappings)`` for each source, while the source's file is open."""
    for error in _visit_all_sources({"": (dataset, visit)}, depth).values():
        raise error


def _visit_all_sources(datasets: dict[str, tuple[h5py.Dataset, _Visit]], depth: int) -> dict[str, PackFormatError]:
    """Visit the sources of several datasets. Open each source file once for all of them.

    Return the first error of each dataset that has one.
    """
    by_file: dict[tuple[str, str], list[tuple[int, str, dict[str, list[_Mapping]]]]] = {}
    for key, (dataset, _) in datasets.items():
        if dataset.is_virtual and depth > _MAX_DEPTH:
            problem = f"is nested more than {_MAX_DEPTH} virtual datasets deep; store its rows in an ordinary dataset"
            raise PackFormatError(f"{_where(dataset)} {problem}")
        holder = dataset.file.filename
        for position, (name, mappings) in enumerate(_mappings(dataset).items()):
            by_file.setdefault((holder, name), []).append((position, key, mappings))
    errors: dict[str, tuple[int, PackFormatError]] = {}
    for (_, name), wanted in by_file.items():
        file: h5py.File | None = None
        with contextlib.ExitStack() as stack:
            for position, key, mappings in wanted:
                if key in errors and errors[key][0] < position:
                    continue
                dataset, visit = datasets[key]
                try:
                    if name == ".":
                        _visit(dataset, dataset.file, mappings, visit)
                        continue
                    path = _require_path(dataset, name) if file is None else ""
                    with _reporting_source(dataset):
                        file = stack.enter_context(open_file(path)) if file is None else file
                        _visit(dataset, file, mappings, visit)
                except PackFormatError as error:
                    errors[key] = position, error
    return {key: error for key, (_, error) in errors.items()}


def _mappings(dataset: h5py.Dataset) -> dict[str, dict[str, list[_Mapping]]]:
    """Return the mappings of a virtual dataset by source file and source; {} for other datasets."""
    by_file: dict[str, dict[str, list[_Mapping]]] = {}
    for here, file_name, name, there in dataset.virtual_sources() if dataset.is_virtual else ():
        if not _is_pattern(file_name) and not _is_pattern(name):
            mapping = _Mapping(_Selection.of(here), _Selection.of(there))
            by_file.setdefault(file_name, {}).setdefault(name, []).append(mapping)
    return by_file


def _require_path(dataset: h5py.Dataset, name: str) -> str:
    path = _find(name.replace("%%", "%"), dataset.file.filename)
    if path is None:
        advice = "restore it at that path (a relative path starts in the virtual file's folder)"
        problem = f"{_where(dataset)} is virtual, and its source file {name} is missing; {advice}"
        raise PackFormatError(problem, path=name)
    return path


@contextlib.contextmanager
def _reporting_source(dataset: h5py.Dataset) -> Iterator[None]:
    try:
        yield
    except H5PackError as error:
        problem = f"{_where(dataset)} is virtual, and a source cannot be read: {error}"
        raise PackFormatError(problem, path=error.path, dataset=error.dataset) from error


def _is_pattern(name: str) -> bool:
    """Return whether a source's name contains ``%b``, which HDF5 replaces by numbers.

    In such a name, ``%%`` stands for a percent sign.
    """
    return "%b" in name.replace("%%", "")


def _visit(dataset: h5py.Dataset, file: h5py.File, datasets: dict[str, list[_Mapping]], visit: _Visit) -> None:
    for stored, mappings in datasets.items():
        name = stored.replace("%%", "%")
        visit(file, _require_source(dataset, file, name, mappings), name, mappings)


def _require_source(dataset: h5py.Dataset, file: h5py.File, name: str, mappings: Sequence[_Mapping]) -> h5py.Dataset:
    found = find_item(file, name)
    problem, needed = "is missing or not a dataset", "it"
    if isinstance(found, h5py.Dataset):
        require_filters(found)
        problem = f"has shape {found.shape}"
        sizes = (_needed(mapping, found.shape) for mapping in mappings)
        needed = next((size for size in sizes if size is not None), "")
    if needed:
        advice = f"the virtual dataset {_where(dataset)} needs {needed}; restore the right file"
        raise dataset_error(file.filename, name, f"{problem}, but {advice}")
    return found


def _needed(mapping: _Mapping, shape: tuple[int, ...]) -> str | None:
    """Return a description of the size that a mapping requires, or None if a source of this shape is large enough."""
    there = mapping.there
    if there.everything:
        count = mapping.here.count or 0
        return f"at least {count:,} numbers" if math.prod(shape) < count else None
    short = bool(there.ends) and (len(shape) != len(there.ends) or any(map(lt, shape, there.ends)))
    return f"a shape of at least {there.ends}" if short else None


def _where(dataset: h5py.Dataset) -> str:
    return f"{dataset.file.filename}: {dataset.name.lstrip('/')!r}"


def _find(name: str, virtual_file: str) -> str | None:
    """Return the path of the file that HDF5 would open for a source's file name, or None if HDF5 would find none.

    HDF5 (H5F_prefix_open_file in src/H5Fint.c) first tries an absolute name unchanged. If there is no such file, it
    drops all but the last component of the name. HDF5 then looks for the name in these folders, in this order:

    1. each folder listed in HDF5_VDS_PREFIX, in which ``${ORIGIN}`` is not expanded
    2. the whole value of HDF5_VDS_PREFIX as one folder, in which a leading ``${ORIGIN}`` is expanded
    3. the folder of the path by which the virtual file was opened
    4. the current folder
    5. the folder of the virtual file's real path
    """
    if os.path.isabs(name):
        if os.path.isfile(name):
            return name
        name = os.path.basename(name)
    opened = os.path.dirname(absolute_path(virtual_file))
    prefix = os.environ.get("HDF5_VDS_PREFIX", "")
    folders = [folder for folder in prefix.split(os.pathsep) if folder]
    if prefix:
        folders.append(opened + prefix[len(_ORIGIN) :] if prefix.startswith(_ORIGIN) else prefix)
    folders += [opened, "", os.path.dirname(os.path.realpath(virtual_file))]
    return next((path for folder in folders if os.path.isfile(path := os.path.join(folder, name))), None)
