"""Several HDF5 files read as one. Each dataset has one index of its rows in all files; no joined file is written."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import OptionsError, PackFormatError
from h5pack.format import schema
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.description import FileDescription
from h5pack.read.encoded import EncodedIndex
from h5pack.read.hdf5 import (
    BLOCK_NAMES,
    VERIFY_ADVICE,
    dataset_error,
    find_item,
    is_pack,
    open_file,
    reporting_damage,
    require_filters,
    text,
)
from h5pack.read.ragged import RaggedIndex
from h5pack.read.storage import SourceFile
from h5pack.read.virtual_index import MappedRows, join_rows
from h5pack.system.arrays import RowNumbers, joined_ranges, limited_runs, moved_rows, row_array
from h5pack.system.parameters import require_local
from h5pack.system.text import short_repr


def list_files(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str | os.PathLike[str]]:
    """Return the files that `path` denotes: a path, a pattern such as "shards/*.h5", or a list of paths and patterns.

    The files that match a pattern are sorted. Raises OptionsError for an empty list, and PackFormatError for a pattern
    that matches nothing.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        given: Any = path
        if not isinstance(given, Sequence):
            require_local(given)
        if not len(path):
            raise OptionsError("path is an empty list; give at least one file", parameters=("path",))
        return [file for one in path for file in list_files(one)]
    name = os.fsdecode(path)
    if not glob.has_magic(name) or os.path.exists(name):
        return [path]
    found = sorted(glob.glob(name))
    if not found:
        raise PackFormatError.at(name, "no file matches this pattern; check the path")
    return list(found)


def join_descriptions(packs: Sequence[FileDescription], *, same_names: bool = True) -> FileDescription:
    """Return one description of several files, whose rows follow each other in the order of the files.

    The mean and standard deviation cover all rows from which the files' statistics were computed. Raises
    PackFormatError if the files differ in datasets, row shapes, dtypes or other metadata; if `same_names` is true, also
    in the names of classes or columns. If it is false, the description has the names of the file with most.
    """
    first = packs[0]
    for pack in packs[1:]:
        _require_alike(first, pack, same_names=same_names)
    starts = np.cumsum([0, *(next(iter(pack.indexes.values())).rows for pack in packs)]).tolist()
    splits: dict[str, list[RowNumbers]] = {}
    for pack, start in zip(packs, starts, strict=False):
        for name, rows in pack.splits.items():
            splits.setdefault(name, []).append(moved_rows(rows, start))
    mean, std = _pooled(packs)
    return replace(
        first,
        indexes={name: _join(packs, [pack.indexes[name] for pack in packs]) for name in first.indexes},
        splits={name: joined_ranges(parts) for name, parts in splits.items()},
        mean=mean,
        std=std,
        classes=_most_names(pack.classes for pack in packs),
        columns=_most_names(pack.columns for pack in packs),
        statistics_rows=sum(pack.statistics_rows for pack in packs),
        ragged={name: _join_ragged(packs, name) for name in first.ragged},
        files=tuple((path, start + row) for one, start in zip(packs, starts, strict=False) for path, row in one.files),
    )


def _most_names(names: Iterable[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    return max(names, key=lambda one: len(one or ()))


def _require_alike(first: FileDescription, other: FileDescription, *, same_names: bool) -> None:
    checked = [schema.checksums_path(next(iter(one.indexes))) in one.indexes for one in (first, other)]
    if checked[0] != checked[1]:
        plain, pack = (other, first) if checked[0] else (first, other)
        problem = f"has no checksums of its rows, but {pack.path} has; pack it, too, with 'h5pack convert'"
        raise PackFormatError.at(plain.path, problem)
    others = _metadata(other, names=same_names)
    for what, one in _metadata(first, names=same_names).items():
        if one != (two := others[what]):
            if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
                shared = {*one} & {*two}
                one, two = ([entry for entry in found if entry not in shared] or found for found in (one, two))
            problem = f"differs from {first.path} in {what}: {short_repr(two)} instead of {short_repr(one)}"
            advice = "'h5pack join' can join packs with different classes, and fields with different dtypes"
            raise PackFormatError.at(other.path, f"{problem}; files that are read as one must agree in this ({advice})")


def _metadata(pack: FileDescription, *, names: bool) -> dict[str, Any]:
    """Return the metadata that must be equal in files that are read as one. The keys are names for messages.

    If `names` is true, include the names of classes and columns.
    """
    found: dict[str, Any] = {
        "the datasets": [
            (name, str(index.dtype), () if isinstance(index, EncodedIndex) else index.row_shape)
            for name, index in pack.indexes.items()
        ],
        "the layout": pack.layout,
        "the kinds of fields": pack.kinds,
    }
    if names:
        found |= {"the classes": pack.classes, "the columns": pack.columns}
        found["the classes of fields"] = [(name, index.classes) for name, index in pack.ragged.items()]
    return found


def _join(packs: Sequence[FileDescription], parts: Sequence[ChunkIndex]) -> ChunkIndex:
    """Return one index of a dataset in all files; ``parts[i]`` is its index in file i."""
    first, rows = parts[0], sum(part.rows for part in parts)
    encoded = [part for part in parts if isinstance(part, EncodedIndex)]
    if encoded:
        return replace(
            encoded[0],
            shape=(rows, *first.row_shape),
            library_reason=next((part.library_reason for part in encoded if part.library_reason is not None), None),
            offsets=_joined_offsets(packs, encoded),
            data=_join(packs, [part.data for part in encoded]),
            image_sizes=np.concatenate([part.image_sizes for part in encoded]),
        )
    if first.is_encoded:
        problem = "holds encoded images, which can be read from several files only if these are packs"
        raise dataset_error(packs[0].path, first.name, f"{problem}; pack the files with 'h5pack convert'")
    whole = replace(first, shape=(rows, *first.row_shape))
    if not rows or not whole.row_bytes:
        return whole  # No file stores any bytes of this dataset.
    mapped, at = [], 0
    for pack, part in zip(packs, parts, strict=True):
        if part.rows:
            mapped.append(MappedRows(at, part.rows, SourceFile(pack.path, pack.identity), part, 0))
        at += part.rows
    own = SourceFile(packs[0].path, packs[0].identity)
    return join_rows(whole, own, b"", mapped)


def _join_ragged(packs: Sequence[FileDescription], name: str) -> RaggedIndex:
    parts = [pack.ragged[name] for pack in packs]
    data = _join(packs, [part.data for part in parts])
    classes = _most_names(part.classes for part in parts)
    return replace(parts[0], offsets=_joined_offsets(packs, parts), data=data, classes=classes)


def _joined_offsets(
    packs: Sequence[FileDescription], parts: Sequence[EncodedIndex | RaggedIndex]
) -> npt.NDArray[np.int64]:
    """Return the offset of each row in the joined data, followed by the end of the last row; int64 (N + 1,)."""
    for pack, part in zip(packs, parts, strict=True):
        if (int(part.offsets[0]), int(part.offsets[-1])) != (0, part.data.rows):
            problem = "has offsets that do not run from 0 to the end of its data, so the file can only be read alone"
            raise dataset_error(pack.path, part.name, f"{problem}; pack the files with 'h5pack convert'")
    starts = np.cumsum([0, *(part.data.rows for part in parts)])
    moved = [part.offsets + start for part, start in zip(parts, starts, strict=False)]
    return np.concatenate([*(offsets[:-1] for offsets in moved), moved[-1][-1:]])


def _pooled(packs: Sequence[FileDescription]) -> tuple[npt.NDArray[np.float64] | None, npt.NDArray[np.float64] | None]:
    """Return the mean and the standard deviation of all files, weighted by `statistics_rows`.

    Return (None, None) if a file lacks one of the two.
    """
    known = [(one.statistics_rows, one.mean, one.std) for one in packs if one.mean is not None and one.std is not None]
    if len(known) < len(packs):
        return None, None
    counted = [one for one in known if one[0]]
    if not counted:
        return packs[0].mean, packs[0].std
    rows, means, stds = map(np.array, zip(*counted, strict=True))
    mean = np.average(means, 0, rows)
    return mean, np.sqrt(np.maximum(np.average(stds**2 + means**2, 0, rows) - mean**2, 0))


def read_filenames(pack: FileDescription, rows: RowNumbers) -> list[str] | None:
    """Return the stored file name of each row's source image; None if one of the files has no file names.

    Raises PackChangedError if a file was replaced or rewritten since it was described.
    """
    for source in {SourceFile(pack.path, pack.identity)}.union(*(index.files for index in pack.indexes.values())):
        source.identity.require(source.path)
    found = [""] * len(rows)
    numbers = row_array(rows)
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    starts = [*(start for _, start in pack.files), next(iter(pack.indexes.values())).rows]
    edges = np.searchsorted(numbers, starts).tolist()
    for number, (path, start) in enumerate(pack.files):
        with open_file(path) as file, reporting_damage(path):
            stored, count = find_item(file, schema.FILENAMES), starts[number + 1] - start
            if getattr(stored, "shape", None) != (count,):
                if stored is None or not is_pack(file):
                    return None
                problem = f"does not have a name for each of the {count:,} rows; {VERIFY_ADVICE}"
                raise dataset_error(path, schema.FILENAMES, problem)
            require_filters(stored)
            own = numbers - start
            for low, high in limited_runs(np.array(edges[number : number + 2]), own, own + 1, BLOCK_NAMES):
                names = stored[int(own[low]) : int(own[high - 1]) + 1]
                chosen = names[own[low:high] - own[low]].tolist()
                for position, name in zip(order[low:high].tolist(), chosen, strict=True):
                    found[position] = text(name)
    return found
