"""A manifest as a source: a table (CSV, TSV, JSON lines) of image paths, labels, splits and fields.

The labels, splits and fields of other sources with tables (Parquet, WebDataset, MDS) are also read here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import SourceError
from h5pack.format import schema
from h5pack.format.fields import FieldValueError, FieldValues, parse_ragged, parse_texts, require_field_names
from h5pack.sources.catalog import (
    IMAGE_SUFFIXES,
    Catalog,
    NameFilter,
    NameTable,
    Note,
    PixelField,
    one_split,
    unused_note,
)
from h5pack.sources.folders import numbered_splits, walk
from h5pack.sources.reader import FileReader
from h5pack.sources.text_tables import (
    TextTable,
    binary_table,
    cell_text,
    class_ids,
    integers,
    is_number,
    numbers,
    read_delimited,
    read_json_lines,
    zero_for_minus_one,
)
from h5pack.system.parameters import is_path

_PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path", "image_id")
IMAGE_COLUMNS = ("image", "images", "img", "picture", "photo", "jpg", "jpeg", "png", "bytes", "content", "data")
"""Usual names of columns of encoded images, in tables that hold images rather than their paths."""
LABEL_COLUMNS = ("label", "class", "target", "category")
JSON_LINES = (".jsonl", ".ndjson")
SPLIT_COLUMNS = ("split", "partition", "subset", "set")
# Number of a column's first paths that are checked. If no such file exists, files are looked up in deeper folders.
_PROBED = 100
_MANY = 10  # with fewer images than this, a large number of classes is not worth a note


@dataclass(frozen=True, kw_only=True)
class ManifestColumns:
    """The roles of a manifest's columns. By default, columns are found by common names such as "path" and "label"."""

    path: str | None = None  # column of image paths (absolute or relative to `root`), or of images in Parquet and MDS
    labels: tuple[str, ...] = ()  # one column of integers or class names, or several columns of integers in 0..255
    split: str | None = None  # column of split names
    fields: tuple[str, ...] = ()  # columns of numbers or lists of numbers, which become fields of the pack
    root: str | None = None  # folder that relative paths start from; default: the manifest's folder
    # Each of the columns below becomes a field of the pack, too.
    texts: tuple[str, ...] = ()  # columns of text
    # Columns of lists, each with the name of its kind (`schema.COORDINATE_KINDS`).
    boxes: tuple[str, ...] = ()
    keypoints: tuple[str, ...] = ()
    box_format: str = schema.XYXY  # format of all `boxes`, one of `h5pack.format.fields.BOX_FORMATS`
    masks: tuple[str, ...] = ()  # columns of paths of masks
    images: tuple[str, ...] = ()  # columns of paths of further images

    @property
    def paths(self) -> tuple[str, ...]:
        """Columns of paths that become fields."""
        return (*self.masks, *self.images)

    @property
    def all_fields(self) -> tuple[str, ...]:
        """All columns that become fields."""
        return (*self.fields, *self.texts, *(name for name, _ in self.coordinates), *self.paths)

    @property
    def coordinates(self) -> tuple[tuple[str, str], ...]:
        """The columns of boxes and keypoints, and the kind of each."""
        return tuple((name, kind) for kind in schema.COORDINATE_KINDS for name in getattr(self, kind))

    @property
    def named(self) -> tuple[str, ...]:
        """All columns that the user named. Only the others are found by usual names."""
        return (*self.labels, *self.all_fields, *filter(None, (self.path, self.split)))


def manifest(path: Path, columns: ManifestColumns, wanted: NameFilter) -> Catalog:
    """Return the catalog of a manifest, with the images in the order of its lines."""
    table = read_json_lines(path) if path.suffix.lower() in JSON_LINES else read_delimited(path)
    path_column = columns.path or _usual(table.header, _PATHS)
    if path_column is None:
        problem = f"no column of image paths found among {', '.join(table.header):.500}; name it with path_column"
        raise SourceError.at(path, problem, "path_column")
    root = columns.root or str(path.parent)
    names, notes = _paths(table, path_column, root, wanted)
    fields = []
    for column in columns.paths:
        # `include` selects images only. A row without the path of a mask or further image is rejected by `_complete`.
        files, more = _paths(table, column, root, NameFilter(exclude=wanted.exclude), frozenset(names))
        fields.append(PixelField(column, schema.MASK if column in columns.masks else schema.IMAGE, NameTable.of(files)))
        notes += more
    catalog = Catalog("manifest", FileReader(root), NameTable.of(names), *one_split(len(names)), notes=notes)
    catalog = with_columns(replace(catalog, pixel_fields=tuple(fields)), table, columns, {path_column, *columns.paths})
    catalog = _complete(catalog.filtered(wanted))
    here = os.path.join(os.path.abspath(root), "")
    if repeated := len(catalog) - len({_normal(name, here) for name in catalog.names}):
        text = f"lines that repeat the image of an earlier line: {repeated:,}; each line is packed"
        catalog = replace(catalog, notes=(*catalog.notes, Note(text)))
    return catalog


def _normal(name: str, folder: str) -> str:
    """Return a path without ".", ".." and "//"; if it is below `folder`, which ends in "/", relative to that folder."""
    if "/." in name or "//" in name or name.startswith("."):  # Of a million names, `normpath` would take 1 s.
        name = os.path.normpath(os.path.join(folder, name))
    return name.removeprefix(folder)


def _paths(
    table: TextTable, column: str, root: str, wanted: NameFilter, images: frozenset[str] = frozenset()
) -> tuple[list[str], tuple[Note, ...]]:
    """Return the paths of a column's files, absolute or relative to `root`, and a note if some differ from the cells.

    If one of the first files exists, the paths are the cells. Otherwise, look below `root` for the file whose path ends
    with the cell. The cell may lack the suffix of the file, may begin with the name of the folder `root`, and may have
    backslashes between folders, as on Windows. A cell that matches no file is returned as it is.

    For a column of masks or further images, `images` are the paths of the main images. Then cells may be empty, and a
    cell that matches a main image and another file stands for the other file.
    """
    names = table.column(column)
    for row, name in enumerate(names):
        if not is_path(name) and (name or not images):
            raise table.error(row, f"{name!r} is not a path; correct the line")
    first = [os.path.join(root, name) for name in names[:_PROBED] if name]
    if not first or not os.path.isdir(root) or any(map(os.path.exists, first)):
        return names, ()
    files: dict[str, list[str]] = {}
    for file in walk(root, wanted).below(""):
        files.setdefault(os.path.splitext(os.path.basename(file))[0], []).append(file)
    own = f"{os.path.basename(os.path.abspath(root))}/"
    paths = []
    for row, name in enumerate(names):
        ending = "/" + name.replace("\\", "/").removeprefix(own)
        whole, suffix = os.path.splitext(ending)
        stem = os.path.basename(whole if suffix.lower() in IMAGE_SUFFIXES else ending)
        same = files.get(stem, ())
        found = [file for file in same if f"/{file}".endswith((ending, ending + os.path.splitext(file)[1]))]
        if len(found) > 1:
            found = [file for file in found if file not in images] or found
        if len(found) > 1 and name not in found:
            problem = f"{name!r} may be {found[0]!r} or {found[1]!r}; choose with root, include or exclude"
            raise table.error(row, problem, "root", "include", "exclude")
        paths.append(found[0] if len(found) == 1 else name)
    examples = [pair for pair in zip(names, paths, strict=True) if pair[0] != pair[1]][:1]
    return paths, tuple(Note("files are looked up below {}: {!r} means {!r}".format(root, *pair)) for pair in examples)


def _complete(catalog: Catalog) -> Catalog:
    """Return the catalog without images that lack the path of a mask or further image. These become rejects."""
    missing = {row: one.name for one in catalog.pixel_fields for row, file in enumerate(one.files) if not file}
    if not missing:
        return catalog
    rejects = [catalog.reject(row, f"no path in column {name!r}") for row, name in sorted(missing.items())]
    kept = np.setdiff1d(np.arange(len(catalog), dtype=np.int64), np.array([*missing], np.int64))
    return replace(catalog.take(kept), rejects=(*catalog.rejects, *rejects))


def with_columns(catalog: Catalog, table: TextTable, columns: ManifestColumns, used: set[str]) -> Catalog:
    """Return the catalog with the labels, splits and fields of a table, which has one row for each image.

    `used` are columns with another purpose, such as the images. A note says which other columns are not packed. If
    the table has no column of splits, the catalog's splits are kept.
    """
    require_field_names(str(table.path), columns.all_fields, table.path)
    chosen = label_columns(columns, table)
    split_column = columns.split or _usual(table.header, SPLIT_COLUMNS, (*columns.named, *table.unreadable))
    labels, label_names = _labels(table, chosen)
    packed = {*used, split_column, *chosen, *columns.all_fields}
    ways: dict[str, tuple[str, ...]] = {} if chosen else {"labels": ("label_columns",)}
    ways |= {"numbers": ("field_columns",), "texts": ("text_columns",)}
    ways |= {"paths": ("mask_columns", "image_columns")} if catalog.kind == "manifest" else {}
    advice = "pack columns of " + ", of ".join(f"{what} with {' or '.join(names)}" for what, names in ways.items())
    parameters = [name for names in ways.values() for name in names]
    notes = unused_note("columns", [name for name in table.header if name not in packed], advice, *parameters)
    notes += _many_classes_note(chosen, labels, label_names) + _joined_classes_note(chosen, label_names or ())
    splits = catalog.split_names, catalog.split_ids
    if split_column is not None:
        splits = numbered_splits([cell or "all" for cell in table.column(split_column)])
    return replace(
        catalog,
        split_names=splits[0],
        split_ids=splits[1],
        labels=labels,
        label_names=label_names,
        fields={name: _field(table, name, columns) for name in columns.all_fields if name not in columns.paths},
        notes=catalog.notes + notes,
    )


def _field(table: TextTable, name: str, columns: ManifestColumns) -> FieldValues:
    """Return the values of a column that becomes a field."""
    values, parameter = table.values(name), "text_columns"
    try:
        if name in columns.texts:
            return parse_texts(_listed_texts(values))
        kind = dict(columns.coordinates).get(name, schema.RAGGED)
        parameter = schema.KINDS[kind].parameter
        if kind == schema.RAGGED and not any(map(_is_list, values)):
            return numbers(table, name)
        return parse_ragged(_lists(table, name, values), kind, columns.box_format)
    except FieldValueError as error:
        message = f"column {name!r} {error}; correct the value, or leave the column out of {parameter}"
        raise table.error(error.row, message, parameter, *error.parameters) from None


def _is_list(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))


def _lists(table: TextTable, name: str, values: list[Any]) -> list[Any]:
    """Return a column's values. Texts are parsed as JSON, and empty cells become None."""
    found = []
    for row, value in enumerate(values):
        try:
            found.append((json.loads(value) if value.strip() else None) if isinstance(value, str) else value)
        except (ValueError, RecursionError) as error:
            problem = f"column {name!r} contains {value!r:.60}, not a list in JSON ({error}); correct it"
            raise table.error(row, problem) from None
    return found


def _listed_texts(values: list[Any]) -> list[Any]:
    """Return a column's texts. Return lists of texts if every cell is a list of texts in JSON, as in exports."""
    if not values or not all(isinstance(value, str) and value.startswith("[") for value in values):
        return [cell_text(value) if isinstance(value, (bool, int, float)) else value for value in values]
    try:
        lists = [json.loads(value) for value in values]
    except (ValueError, RecursionError):
        return values
    return lists if all(isinstance(text, str) for texts in lists for text in texts) else values


def _many_classes_note(
    columns: Sequence[str], labels: npt.NDArray[Any] | None, names: tuple[str, ...] | None
) -> tuple[Note, ...]:
    """Return a note if there are, on average, fewer than five images per integer, or fewer than two per class name."""
    if labels is None or labels.ndim > 1:
        return ()
    labels = labels[labels != schema.NO_LABEL]
    count = len(np.unique(labels)) if names is None else len(names)
    if len(labels) < _MANY or (5 if names is None else 2) * count <= len(labels):
        return ()
    if names is None:
        kind, advice = "integers", "numbers that are not classes can be packed with field_columns"
    else:
        kind, advice = "class names", "name another column with label_columns if they are not classes"
    text = f"column {columns[0]!r} has {count:,} different {kind} for {len(labels):,} labeled images; {advice}"
    return (Note(text, ("field_columns", "label_columns")),)


def _joined_classes_note(columns: Sequence[str], names: Sequence[str]) -> tuple[Note, ...]:
    """Return a note if a class name consists of other class names and a separator, such as "cat|dog"."""
    known = {*names} if len(columns) == 1 else set()
    for separator in "|,; ":
        joined = [name for name in known if separator in name and known.issuperset(name.split(separator))]
        if joined:
            advice = "if images have several classes, give a column of 0 and 1 for each class, with label_columns"
            return (Note(f"column {columns[0]!r} joins classes, as in {min(joined)!r}; {advice}", ("label_columns",)),)
    return ()


def label_columns(columns: ManifestColumns, table: TextTable) -> tuple[str, ...]:
    """Return the label columns: those in `columns`, or else the one with a usual name, or else ()."""
    usual = _usual(table.header, LABEL_COLUMNS, (*columns.named, *table.unreadable))
    return columns.labels or ((usual,) if usual is not None else ())


def _usual(header: tuple[str, ...], names: tuple[str, ...], others: Sequence[str] = ()) -> str | None:
    """Return the column whose name, in lower case, comes first in `names`, ignoring `others`; None if there is none."""
    lowered = {column.lower(): column for column in reversed(header) if column not in others}
    return next((lowered[name] for name in names if name in lowered), None)


def _labels(table: TextTable, columns: tuple[str, ...]) -> tuple[npt.NDArray[Any] | None, tuple[str, ...] | None]:
    if len(columns) > 1:
        advice = "; give one label column of class names, others with text_columns, and numbers with field_columns"
        return binary_table(table, columns, advice), columns
    if not columns:
        return None, None
    (column,) = columns
    cells = table.column(column)
    known = [row for row, cell in enumerate(cells) if cell]
    labels = np.full(len(cells), schema.NO_LABEL, np.int64)
    whole = integers(cells[row] for row in known)
    if whole is not None:
        # If all labels are -1, they mean that there is no label.
        labels[known] = zero_for_minus_one(whole) if whole.max(initial=0) > 0 else whole
        return labels, None
    names, labels = class_ids(cells)
    if any(is_number(name) for name in names):
        rows = [row for row in known if is_number(cells[row])]
        row = next((row for row in rows if integers([cells[row]]) is None), rows[0])
        raise table.error(
            row,
            f"column {column!r} contains the number {cells[row]!r}; labels are either all 64-bit integers (1, not "
            f"1.0) or all class names; pack other numbers as fields with field_columns={column!r}",
            f"field_columns={column!r}",
        )
    return labels, names
