"""A CSV or TSV manifest: a path a line, with labels, a split and further fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.errors import OptionsError, SourceError
from h5pack.sources.catalog import Catalog, FileReader, NameTable, class_ids, one_split
from h5pack.sources.folders import split_order
from h5pack.sources.tables import Table, binary_table, integers, numbers, read_delimited, real
from h5pack.sources.walk import NameFilter

_PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path", "image_id")
_LABELS = ("label", "class", "target", "category")
_SPLITS = ("split", "partition", "subset", "set")


@dataclass(frozen=True)
class ManifestColumns:
    """Which columns of a manifest mean what; by default those with the usual names.

    Attributes
    ----------
    path : str, optional
        Column of image paths, relative to the manifest's folder (or `root`), or absolute.
    labels : tuple of str
        One column: integers as they are, or names of classes. Several: a uint8 table.
    split : str, optional
    fields : tuple of str
        Columns of numbers, each stored as a dataset of its own.
    root : str, optional
        The folder that relative paths start from.
    """

    path: str | None = None
    labels: tuple[str, ...] = ()
    split: str | None = None
    fields: tuple[str, ...] = ()
    root: str | None = None


def manifest(path: Path, columns: ManifestColumns, wanted: NameFilter) -> Catalog:
    """Read a manifest; its order is the source order.

    Raises
    ------
    SourceError
        If a column is missing or holds what it cannot mean.
    OptionsError
        If a field takes one of the format's own names.
    """
    table = read_delimited(path)
    path_column = columns.path or _usual(table, _PATHS)
    if path_column is None:
        raise SourceError(
            f"{path}: no column of image paths among {', '.join(table.header)}; name it with --path-column"
        )
    names = table.column(path_column)
    for row, name in enumerate(names):
        if not name or "\0" in name:
            raise SourceError(f"{table.place(row)}: {name!r} is no path; mend the line")
    split_names, split_ids = _splits(table, columns)
    labels, label_names = _labels(table, columns)
    catalog = Catalog(
        "manifest",
        FileReader(columns.root or str(path.parent)),
        NameTable.of(names),
        split_names,
        split_ids,
        labels=labels,
        label_names=label_names,
        fields={name: numbers(table, name) for name in _field_names(columns)},
    )
    return catalog.filtered(wanted)


def _usual(table: Table, names: tuple[str, ...]) -> str | None:
    """The header's column with the first of these names that it has, whatever its case."""
    lowered = {column.lower(): column for column in reversed(table.header)}
    return next((lowered[name] for name in names if name in lowered), None)


def _labels(table: Table, columns: ManifestColumns) -> tuple[npt.NDArray[Any] | None, tuple[str, ...] | None]:
    if len(columns.labels) > 1:
        return binary_table(table, columns.labels), columns.labels
    column = columns.labels[0] if columns.labels else _usual(table, _LABELS)
    if column is None:
        return None, None
    cells = table.column(column)
    known = [row for row, cell in enumerate(cells) if cell]
    labels = np.full(len(cells), schema.NO_LABEL, np.int64)
    whole = integers(cells[row] for row in known)
    if whole is not None:
        labels[known] = whole
        return labels, None
    names, labels[known] = class_ids([cells[row] for row in known])
    if any(_is_number(name) for name in names):
        row = next(row for row in known if _is_number(cells[row]))
        raise SourceError(
            f"{table.place(row)}: column {column!r} holds the number {cells[row]!r}, and not every cell is an integer; "
            "labels are integers or names of classes; store other numbers with --field-columns"
        )
    return labels, names


def _is_number(cell: str) -> bool:
    try:
        real(cell)
    except ValueError:
        return False
    return True


def _splits(table: Table, columns: ManifestColumns) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    column = columns.split or _usual(table, _SPLITS)
    if column is None:
        return one_split(len(table.rows))
    cells = [cell or "all" for cell in table.column(column)]
    names = split_order(cells)
    index = {name: number for number, name in enumerate(names)}
    return names, np.array([index[cell] for cell in cells], np.int32)


def _field_names(columns: ManifestColumns) -> tuple[str, ...]:
    for name in columns.fields:
        if not is_field_name(name):
            raise OptionsError(f"field {name!r}: the format uses or forbids that name; rename the column")
    return columns.fields


def is_field_name(name: str) -> bool:
    """Whether a pack's field may be called so."""
    return name not in schema.RESERVED and "/" not in name and not name.startswith(".")
