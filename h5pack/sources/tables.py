"""Parquet and Arrow files as sources: a column of encoded images, beside columns of labels and fields.

A column of a Parquet file can only be read in whole row groups, so images of one row group are read together.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from h5pack.errors import H5PackError, RejectedImageError, SourceError
from h5pack.images.decode import read_header
from h5pack.sources.archives import ArchiveFile
from h5pack.sources.catalog import Catalog, NameTable
from h5pack.sources.manifest import IMAGE_COLUMNS, ManifestColumns, label_columns, with_columns
from h5pack.sources.reader import SourceReader, SurveyedImage, named_fingerprint
from h5pack.sources.shards import Shards
from h5pack.sources.text_tables import TextTable
from h5pack.system.machine import available_memory
from h5pack.system.text import format_bytes

_TASK_ROWS = 1_024
"""Maximum number of rows of a task. A larger row group is divided into several tasks, each of which reads all of it."""

_DAMAGED = "is not a Parquet or Arrow file, or is damaged"
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass
class TableReader(SourceReader):
    """Reads images from a column of Parquet or Arrow files."""

    files: tuple[ArchiveFile, ...]
    column: str
    # (M, 3), for each image: index into `files`, row group in the file (0 for an Arrow file), row in the row group.
    rows: npt.NDArray[np.int64]
    # The images of the row groups in memory, by file and row group.
    _loaded: dict[tuple[int, int], Any] = field(default_factory=dict, init=False)
    # The row groups that `announce` named last, which stay in memory.
    _kept: set[tuple[int, int]] = field(default_factory=set, init=False)
    _table: tuple[int, _Table] | None = field(default=None, init=False)  # number and content of the file opened last

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": {}, "_kept": set(), "_table": None}

    def paths(self) -> list[str]:
        return [file.path for file in self.files]

    def take(self, indices: npt.NDArray[np.int64]) -> TableReader:
        return replace(self, rows=self.rows[indices])

    def groups(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        parts = self.rows[indices] // (1, 1, _TASK_ROWS)
        numbers: npt.NDArray[np.int64] = np.unique(parts, axis=0, return_inverse=True)[1]
        return numbers.reshape(-1).astype(np.int64)

    def announce(self, indices: Sequence[int]) -> None:
        self._kept = {(file, row_group) for file, row_group, _ in self.rows[np.array(indices, np.int64)].tolist()}

    def read(self, index: int, name: str) -> bytes:
        number, row_group, row = self.rows[index].tolist()
        key = number, row_group
        if key not in self._loaded:
            self._loaded = {known: values for known, values in self._loaded.items() if known in self._kept}
            self._loaded[key] = self._load(*key)
        value = self._loaded[key][row]
        path = None
        if value.is_valid and hasattr(value, "keys"):
            path, value = value.get("path"), value["bytes"]
        if not value.is_valid:
            has_path = path is not None and path.is_valid
            raise RejectedImageError(f"its row holds no image{', only a path' if has_path else ' (null)'}")
        data: bytes = value.as_py()
        return data

    def survey(self, index: int, name: str, max_pixels: int) -> SurveyedImage:
        file = self.files[self.rows[index, 0]]
        try:
            data = self.read(index, name)
        except OSError as error:
            raise file.unreadable(name, error) from error
        header = read_header(data, partial(io.BytesIO, data), max_pixels)
        return SurveyedImage(header, named_fingerprint(name, len(data), file.identity.size, file.identity.modified_ns))

    def changing(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        # One image per file is enough, because the fingerprint of an image includes the file's size and time.
        return indices[np.unique(self.rows[indices, 0], return_index=True)[1]]

    def _load(self, number: int, row_group: int) -> Any:
        """Return the image column of a row group, as a ``pyarrow.ChunkedArray``."""
        file = self.files[number]
        try:
            if self._table is None or self._table[0] != number:
                self._table = number, _open(file)
            values = self._table[1].column(self.column, row_group)
        except (H5PackError, MemoryError):
            raise
        except Exception as error:
            file.require_unchanged()
            if isinstance(error, OSError) and error.errno:
                raise
            # On damaged files, pyarrow raises several exception types.
            raise RejectedImageError(f"its row group cannot be read ({error})") from error
        file.require_unchanged()
        return values


class _Table:
    """One Parquet or Arrow file. It is read without threads, so that workers can be forked."""

    def __init__(self, file: ArchiveFile) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except Exception as error:  # A broken package may raise other errors than ImportError.
            problem = f"Parquet and Arrow files need pyarrow, whose import fails ({error}); run pip install pyarrow"
            raise SourceError.at(file.path, problem) from error
        self._parquet: Any = None
        if file.path.lower().endswith(".arrow"):
            self._table = _memory_mapped(pyarrow, file.path)
            self.schema, self.counts = self._table.schema, [self._table.num_rows]
            return
        self._parquet = parquet.ParquetFile(file.path, pre_buffer=False)
        self.schema, metadata = self._parquet.schema_arrow, self._parquet.metadata
        self.counts = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]

    def column(self, name: str, row_group: int | None = None) -> Any:
        """Return a column of one row group, or by default of the whole file, as a ``pyarrow.ChunkedArray``."""
        if self._parquet is None:
            return self._table.column(name)
        if row_group is None:
            return self._parquet.read(columns=[name], use_threads=False).column(name)
        return self._parquet.read_row_group(row_group, columns=[name], use_threads=False).column(name)

    def largest_group_bytes(self, name: str) -> int:
        """Return a column's uncompressed size in bytes in the row group where it is largest; 0 for an Arrow file."""
        if self._parquet is None:
            return 0
        metadata = self._parquet.metadata
        sizes: dict[int, int] = {}
        for number in range(metadata.num_row_groups):
            for position in range(metadata.num_columns):
                column = metadata.row_group(number).column(position)
                if f"{column.path_in_schema}.".startswith(f"{name}."):
                    sizes[number] = sizes.get(number, 0) + column.total_uncompressed_size
        return max(sizes.values(), default=0)


def _memory_mapped(pyarrow: Any, path: str) -> Any:
    """Return the table of an Arrow file in the stream format (as from Hugging Face datasets) or in the file format."""
    source, options = pyarrow.memory_map(path), pyarrow.ipc.IpcReadOptions(use_threads=False)
    try:
        return pyarrow.ipc.open_stream(source, options=options).read_all()
    except pyarrow.ArrowInvalid:
        source.seek(0)
        return pyarrow.ipc.open_file(source, options=options).read_all()


def _open(file: ArchiveFile) -> _Table:
    """Open a file; raise SourceError if it is damaged."""
    with file.parsing(_DAMAGED):
        return _Table(file)


def tables(shards: Shards, columns: ManifestColumns) -> Catalog:
    """Return the catalog of Parquet or Arrow files, with the images in the order of the rows."""
    files = tuple(ArchiveFile(str(path)) for path in shards.paths)
    with files[0].parsing(_DAMAGED):  # Using a damaged name of a column raises an error.
        schema = _open(files[0]).schema
        image = columns.path or _find_images(files[0], schema)
    names: list[str] = []
    counts: list[int] = []
    features, rows = [], [np.zeros((0, 3), np.int64)]
    for number, (file, prefix) in enumerate(zip(files, shards.prefixes, strict=True)):
        with file.parsing(_DAMAGED):
            one = _open(file)
            _require_columns(file, one, schema, image)
        features.append(_features(one.schema))
        names += [f"{prefix}{row:08d}" for row in range(sum(one.counts))]
        counts.append(sum(one.counts))
        for row_group, count in enumerate(one.counts):
            rows.append(np.stack(np.broadcast_arrays(number, row_group, np.arange(count)), axis=1))
    reader = TableReader(files, image, np.concatenate(rows))
    catalog = Catalog("parquet", reader, NameTable.of(names), *shards.split_ids(counts), about=f"images {image!r}")
    of_folders = {name: values for name, values in _partitions(shards.names).items() if name not in schema.names}

    def values_of(name: str) -> list[Any]:
        if name in of_folders:
            return [value for value, count in zip(of_folders[name], counts, strict=True) for _ in range(count)]
        return [value for file in files for value in _values(file, name)]

    table = TextTable(
        shards.named, (*schema.names, *of_folders), values_of,
        lambda row: f": {names[row]}",
        frozenset(field.name for field in schema if not _is_plain(field.type)),
    )  # fmt: skip
    catalog = with_columns(catalog, table, columns, {image})
    if catalog.labels is not None and catalog.labels.ndim == 1 and catalog.label_names is None:
        (column,) = label_columns(columns, table)
        stored = [one.get(column, {}).get("names") for one in features]
        catalog = _with_class_names(catalog, table, files, column, stored)
    return catalog.filtered(shards.wanted)


def _partitions(names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the columns that folders such as ``label=3`` define in the paths of all files, with a value for each file.

    Values are integers if all values of a column are. `_HIVE_NULL` becomes None, as in pyarrow.
    """
    folders = [[folder.partition("=") for folder in name.split("/")[:-1] if "=" in folder] for name in names]
    found = [{unquote(key): unquote(value) for key, _, value in named} for named in folders]
    columns: dict[str, list[Any]] = {}
    for key in found[0]:
        if key and all(key in one for one in found):
            values = [None if one[key] == _HIVE_NULL else one[key] for one in found]
            is_integer = all(value is None or re.fullmatch(r"-?[0-9]+", value) for value in values)
            columns[key] = [int(value) if is_integer and value is not None else value for value in values]
    return columns


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """Return the features that Hugging Face datasets stored in a schema, by column; {} if there are none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: one for name, one in features.items() if isinstance(one, dict)}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}


def _find_images(file: ArchiveFile, schema: Any) -> str:
    """Return the column of images: by its Hugging Face feature, or else by types and names of columns."""
    features = _features(schema)
    binary = [field.name for field in schema if _is_images(field.type)]
    found = [name for name in binary if features.get(name, {}).get("_type") == "Image"]
    found = found or [name for name in binary if name.lower() in IMAGE_COLUMNS] or binary
    if len(found) == 1:
        return str(found[0])
    if found:
        problem = f"{', '.join(map(repr, found))} look like images; choose one with path_column"
        raise SourceError.at(file.path, problem, "path_column")
    held = ", ".join(f"{field.name!r} {field.type}" for field in schema)
    problem = f"has no column of images, that is, of type binary or a struct with a field 'bytes' (found: {held})"
    raise SourceError.at(file.path, f"{problem}; check the path")


def _is_images(kind: Any) -> bool:
    from pyarrow import types

    if types.is_struct(kind):
        kind = next(
            (kind.field(number).type for number in range(kind.num_fields) if kind.field(number).name == "bytes"), None
        )
    return kind is not None and (types.is_binary(kind) or types.is_large_binary(kind) or _is_view(kind, "binary"))


def _is_view(kind: Any, name: str) -> bool:
    """Return whether a type is the view type `name`, "binary" or "string". Older versions of pyarrow do not have it."""
    from pyarrow import types

    check = getattr(types, f"is_{name}_view", None)
    return check is not None and bool(check(kind))


def _require_columns(file: ArchiveFile, table: _Table, schema: Any, image: str) -> None:
    """Raise SourceError if a file has other columns than the first file, or too large a row group for the memory."""
    if image not in table.schema.names or not _is_images(table.schema.field(image).type):
        found = f"has no column {image!r} of images (its columns are {', '.join(table.schema.names)})"
        problem = f"{found}; name another column with path_column"
        raise SourceError.at(file.path, problem, "path_column")
    if sorted(table.schema.names) != sorted(schema.names):
        raise SourceError.at(file.path, "has other columns than the first file; pack the files separately")
    size = table.largest_group_bytes(image)
    if size > available_memory() // 2:
        problem = f"a row group takes {format_bytes(size)}, over half of the free memory"
        problem += "; write the file again with smaller row groups"
        raise SourceError.at(file.path, problem)


def _is_plain(kind: Any) -> bool:
    """Return whether a type is one of numbers, text, or lists of these."""
    from pyarrow import types

    value = kind.value_type if types.is_dictionary(kind) else kind
    while types.is_list(value) or types.is_large_list(value) or types.is_fixed_size_list(value):
        value = value.value_type
    is_number = types.is_integer(value) or types.is_floating(value) or types.is_boolean(value)
    is_text = types.is_string(value) or types.is_large_string(value) or _is_view(value, "string")
    return is_number or is_text or types.is_null(value)


def _values(file: ArchiveFile, name: str) -> list[Any]:
    """Return the values of a column of numbers, text, or lists of these. A null becomes None."""
    table = _open(file)
    kind = table.schema.field(name).type
    if not _is_plain(kind):
        problem = "not integers, floats, text or lists of these; leave it out"
        raise SourceError.at(file.path, f"column {name!r} holds {kind}, {problem}")
    with file.parsing(f"column {name!r} cannot be read"):
        values = table.column(name).to_pylist()
    file.require_unchanged()
    return values  # type: ignore[no-any-return]


def _with_class_names(
    catalog: Catalog, table: TextTable, files: Sequence[ArchiveFile], column: str, stored: Sequence[Any]
) -> Catalog:
    """Return the catalog with the class names of a label column, if the files store such names.

    ``stored[i]`` are the class names that Hugging Face stored in file i, or None.
    """
    names = stored[0]
    for one, others in zip(files, stored, strict=True):
        if others != names:
            problem = f"column {column!r} has other classes than in the first file; pack the files separately"
            raise SourceError.at(one.path, problem)
    if not isinstance(names, list) or not names:
        return catalog
    # Read the labels again: `with_columns` made 0 and 1 of only -1 and 1. Beside class names, -1 means no label.
    labels = np.array([int(cell or -1) for cell in table.column(column)], np.int64)
    for row in np.flatnonzero((labels < -1) | (labels >= len(names)))[:1].tolist():
        problem = f"column {column!r} contains {labels[row]}, but has {len(names)} classes"
        raise table.error(row, f"{problem}; name another column with label_columns", "label_columns")
    return replace(catalog, labels=labels, label_names=tuple(map(str, names)))
