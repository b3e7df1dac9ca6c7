"""Fields whose rows differ in length: boxes, keypoints, other arrays, texts.

In a file, each field is a group of two datasets: the entries of all rows, and the offset of each row's first entry. The
offsets are held in memory. The entries of several rows are read together, if possible without the HDF5 library.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.errors import DamagedRowsError, PackFormatError
from h5pack.format import schema
from h5pack.format.fields import RaggedRows, is_numeric_dtype
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.engine import Engine
from h5pack.read.hdf5 import (
    NOT_UTF8,
    VERIFY_ADVICE,
    attribute,
    attribute_names,
    dataset_error,
    find_item,
    is_pack,
    read_offsets,
    require_dataset,
    text,
)
from h5pack.read.read_plan import merge_ranges
from h5pack.read.virtual import index_rows


@dataclass(frozen=True, kw_only=True)
class RaggedIndex:
    """The locations of a field's rows. Row i consists of the entries ``offsets[i]`` to ``offsets[i + 1] - 1``."""

    name: str
    kind: str  # one of `schema.RAGGED_KINDS`
    offsets: npt.NDArray[np.int64]  # (N + 1,), ascending
    data: ChunkIndex  # index of the dataset of entries; each of its rows is one entry
    classes: tuple[str, ...] | None = None  # class names, if entries are class numbers and the file names them

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1


def is_ragged(file: h5py.File, name: str) -> bool:
    """Return whether `name` is the group of a ragged field.

    Return False for the groups of masks and for a pack's `/encoded`, although they have datasets of the same names.
    """
    group = find_item(file, name)
    if name.strip("/") == schema.ENCODED and is_pack(file):
        return False
    if not isinstance(group, h5py.Group) or not {schema.FIELD_DATA, schema.FIELD_OFFSETS} <= set(group):
        return False
    return text(group.attrs.get(schema.KIND, schema.RAGGED)) != schema.MASK


def index_ragged(file: h5py.File, name: str) -> RaggedIndex:
    """Return the index of a ragged field; raise PackFormatError if it is not stored as docs/format.md describes."""
    kind = text(attribute(file[name], schema.KIND, schema.RAGGED))
    data_name = f"{name}/{schema.FIELD_DATA}"
    data = require_dataset(file, data_name)
    if kind not in schema.RAGGED_KINDS:
        raise _unknown_kind(file, name, kind)
    if data.ndim < 1 or not is_numeric_dtype(data.dtype) or 0 in data.shape[1:]:
        problem = f"is {data.dtype} {data.shape}, not rows of numbers; {VERIFY_ADVICE}"
        raise dataset_error(file.filename, data_name, problem)
    wanted = schema.KINDS[kind]
    if wanted.shapes and not (data.dtype == wanted.dtype and data.shape[1:] in wanted.shapes):
        problem = f"is {data.dtype} {data.shape}, which does not fit the kind {kind!r}; {VERIFY_ADVICE}"
        raise dataset_error(file.filename, data_name, problem)
    box_format = text(attribute(file[name], schema.BOX_FORMAT, schema.XYXY))
    if box_format != schema.XYXY:
        raise dataset_error(file.filename, name, f"has boxes of the unknown format {box_format!r}; use a newer h5pack")
    return RaggedIndex(
        name=name,
        kind=kind,
        offsets=read_offsets(file, f"{name}/{schema.FIELD_OFFSETS}", data, "entries"),
        data=index_rows(file, data, data_name),
        classes=attribute_names(file[name], schema.CLASSES),
    )


def require_known_kind(file: h5py.File, name: str) -> None:
    """Raise PackFormatError if a pack's field is a dataset whose kind this version does not know."""
    item = find_item(file, name) if os.path.dirname(name) == schema.FIELDS and is_pack(file) else None
    if isinstance(item, h5py.Dataset):
        kind = text(attribute(item, schema.KIND, schema.ARRAY))
        if kind not in (schema.ARRAY, *schema.PIXEL_KINDS):
            raise _unknown_kind(file, name, kind)


def _unknown_kind(file: h5py.File, name: str, kind: str) -> PackFormatError:
    return dataset_error(file.filename, name, f"is of the unknown kind {kind!r}; use a newer version of h5pack")


def read_ragged(engine: Engine, index: RaggedIndex, rows: npt.NDArray[np.int64], *, check: bool = False) -> RaggedRows:
    """Return `rows`, int64 (n,), of a field in the given order. Row numbers may repeat.

    `engine` must have the indexes of the field's data and checksums. If `check` is true and the field has checksums,
    raise DamagedRowsError if a row differs from its checksum. Other errors are those of `Engine.read`.
    """
    starts, stops = index.offsets[rows], index.offsets[rows + 1]
    lengths = stops - starts
    empty = np.empty((0, *index.data.row_shape), index.data.native_dtype)
    parts = [empty] * (len(rows) + 1)
    order = np.argsort(starts, kind="stable")
    order = order[lengths[order] > 0]
    first, last = starts[order], stops[order]
    for low, high in merge_ranges(first, last, index.data.row_bytes):
        start = int(first[low])
        read = engine.read_range(index.data.name, start, int(last[high - 1]))
        extents = zip(order[low:high].tolist(), first[low:high].tolist(), last[low:high].tolist(), strict=True)
        for position, begin, end in extents:
            parts[position] = read[begin - start : end - start]
    data, offsets = np.concatenate(parts), np.append(0, np.cumsum(lengths))
    found = RaggedRows(index.kind, data, offsets, index.classes)
    if check and schema.checksums_path(index.name) in engine.indexes:
        values = RaggedRows(index.kind, data.astype(index.data.dtype, copy=False), offsets)
        engine.require_checksums(index.name, rows, values.checksums())
    return found


def texts_of(engine: Engine, name: str, rows: npt.NDArray[np.int64], found: RaggedRows) -> list[Any]:
    """Return the texts in `found`, which was read from `rows`; raise DamagedRowsError if a text is malformed."""
    wrong, problem = np.zeros(len(found), np.bool_), "is not UTF-8"
    if found.kind == schema.TEXTS:
        filled = np.flatnonzero(np.diff(found.offsets))
        wrong[filled] = found.data[found.offsets[filled + 1] - 1] != 0
        problem = "has a text without its final zero byte" if wrong.any() else problem
    try:
        if not wrong.any():
            return found.values()
    except UnicodeDecodeError:
        wrong[:] = [not _is_utf8(found.row(number).tobytes()) for number in range(len(found))]
    path, row = engine.file_row(int(rows[wrong.argmax()]))
    raise DamagedRowsError.at(path, f"{name!r} row {row} {problem}; {VERIFY_ADVICE}", dataset=name, rows=(row,))


def _is_utf8(data: bytes) -> bool:
    return data.decode(errors="ignore").encode() == data


def find_field(file: h5py.File, name: str) -> str:
    """Return the path of a pack's field `name`. If there is no such field, `name` is a path, and is itself returned.

    Raises PackFormatError if the file is a pack, and has neither such a field nor an object at this path.
    """
    name = name.strip("/")
    own = schema.field_path(name)
    if is_pack(file) and find_item(file, own) is not None:
        return own
    if is_pack(file) and find_item(file, name) is None:
        known = ", ".join(repr(os.path.basename(path)) for path in own_fields(file)) or "none"
        raise PackFormatError.at(file.filename, f"has no field {name!r}; its fields are {known}", dataset=name)
    return name


def own_fields(file: h5py.File) -> list[str]:
    """Return the sorted paths of a pack's fields.

    Raises PackFormatError if `/fields` is not a group, or if the name of a field is not UTF-8.
    """
    group = find_item(file, schema.FIELDS)
    if group is None:
        return []
    if not isinstance(group, h5py.Group):
        raise PackFormatError.at(file.filename, f"{schema.FIELDS!r} is not a group; {VERIFY_ADVICE}")
    for name in group:
        if isinstance(name, bytes):
            raise dataset_error(file.filename, schema.field_path(os.fsdecode(name)), NOT_UTF8)
    return [schema.field_path(name) for name in sorted(group)]
