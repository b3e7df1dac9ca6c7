"""The table beside exported images: a line a row, in stored order, with split, labels and fields.

``h5pack convert DIR/manifest.csv`` reads it back: splits, labels, tables and fields, and the order of rows.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import category

import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.errors import OutputExistsError
from h5pack.sources.catalog import Catalog, NameTable
from h5pack.sources.folders import split_order
from h5pack.sources.tables import real

_BLOCK_ROWS = 4_096
_MOST_NUMBERS = 1_024
# What a manifest's column of labels may be called; the first of these that a header has is taken for it.
_LABEL_COLUMNS = ("label", "class", "target", "category")


@dataclass(frozen=True)
class ManifestColumn:
    """A column.

    Attributes
    ----------
    name : str
    values : ndarray or NameTable
        (n,): of every row.
    words : tuple of str or None
        What the values, integers, are the numbers of; -1 leaves the cell empty.
    """

    name: str
    values: npt.NDArray[Any] | NameTable
    words: tuple[str, ...] | None = None

    def cells(self, start: int, stop: int) -> list[Any]:
        """The cells of some rows."""
        if isinstance(self.values, NameTable):
            return [printable(self.values[row]) for row in range(start, stop)]
        values = self.values[start:stop]
        if self.words is not None:
            named = (*map(printable, self.words), "")
            return [named[value] for value in values.tolist()]
        if values.dtype.kind == "b":
            values = values.view(np.uint8)
        # As Python's numbers, whose text gives back the very value.
        return values.tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Manifest:
    """The table, not yet written.

    Attributes
    ----------
    paths : NameTable
        (n,).
    labels, fields, others : tuple of ManifestColumn
        Those that a conversion takes for labels and for fields, and those that only tell where a row comes from.
    split : ManifestColumn
    lost : tuple of str
        What a conversion of the table would not restore, in words.
    """

    paths: NameTable
    split: ManifestColumn
    labels: tuple[ManifestColumn, ...]
    fields: tuple[ManifestColumn, ...]
    others: tuple[ManifestColumn, ...]
    lost: tuple[str, ...]

    @property
    def header(self) -> list[str]:
        """The names of the columns."""
        columns = (self.split, *self.labels, *self.fields, *self.others)
        return ["path", *(column.name for column in columns)]

    @property
    def options(self) -> list[str]:
        """Options of ``h5pack convert`` that name the columns which it does not find by itself."""
        found = ["--label-columns", ",".join(column.name for column in self.labels)] if len(self.labels) > 1 else []
        fields = ",".join(column.name for column in self.fields)
        return [*found, "--field-columns", fields] if fields else found

    def lines(self) -> Iterator[list[Any]]:
        """The cells of each row."""
        columns = (self.split, *self.labels, *self.fields, *self.others)
        for start in range(0, len(self.paths), _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, len(self.paths))
            paths = (_cell(self.paths[row]) for row in range(start, stop))
            yield from map(list, zip(paths, *(column.cells(start, stop) for column in columns), strict=True))

    def write(self, path: Path, left_out: Iterable[int]) -> None:
        """Write it, but for the rows that have no file.

        Raises
        ------
        OSError
        """
        absent = frozenset(left_out)
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(self.header)
            writer.writerows(line for row, line in enumerate(self.lines()) if row not in absent)

    def missing_from(self, path: Path) -> list[int]:
        """Rows that a table which was written before does not have.

        Raises
        ------
        OutputExistsError
            If it has others, or says something else of them.
        """
        missing = []
        try:
            with path.open(newline="", encoding="utf-8") as stream:
                found = csv.reader(stream)
                if next(found, None) != self.header:
                    raise _another(path)
                given = next(found, None)
                for row, line in enumerate(self.lines()):
                    if given == [str(cell) for cell in line]:
                        given = next(found, None)
                    else:
                        missing.append(row)
        except (OSError, ValueError, csv.Error) as error:
            raise _another(path) from error
        if given is not None:
            raise _another(path)
        return missing


def plan_manifest(
    catalog: Catalog, paths: NameTable, rows: npt.NDArray[np.int64], sources: NameTable | None
) -> Manifest:
    """Lay the table out.

    Parameters
    ----------
    catalog : Catalog
    paths : NameTable
        (n,): the rows' files.
    rows : ndarray
        int64, (n,): their numbers in the file they come from.
    sources : NameTable or None
        (n,): the names that the file gives them.
    """
    name = _Header("path", "split")
    lost: list[str] = []
    split = ManifestColumn("split", catalog.split_ids, catalog.split_names)
    labels, others = _labels(catalog, name, lost)
    fields: list[ManifestColumn] = []
    for field, values in sorted(catalog.fields.items()):
        fields += _field(field, values, catalog.labels is None, name, lost)
    others.append(ManifestColumn(name("row"), rows))
    if sources is not None:
        others.append(ManifestColumn(name("source"), sources))
    lost += _lost_splits(catalog)
    return Manifest(paths, split, tuple(labels), tuple(fields), tuple(others), tuple(lost))


class _Header:
    """Gives columns distinct names that survive a reading: stripped, without commas."""

    def __init__(self, *taken: str) -> None:
        self._taken = set(taken)

    def __call__(self, wanted: str) -> str:
        plain = printable(wanted).strip().replace(",", ";") or "column"
        name, number = plain, 2
        while name in self._taken:
            name, number = f"{plain}~{number}", number + 1
        self._taken.add(name)
        return name


def _labels(catalog: Catalog, name: _Header, lost: list[str]) -> tuple[list[ManifestColumn], list[ManifestColumn]]:
    """The columns of labels, and one of class names beside where labels can only be given as numbers."""
    labels, names = catalog.labels, catalog.label_names
    if labels is None:
        return [], []
    if labels.ndim == 2:
        assert names is not None
        columns = [ManifestColumn(name(column), labels[:, place]) for place, column in enumerate(names)]
        changed = [column for column, made in zip(names, columns, strict=True) if column != made.name]
        if changed:
            lost.append(f"names of label columns ({changed[0]!r} is called otherwise)")
        return columns, []
    if names is None:
        return [ManifestColumn(name("label"), labels)], []
    unreadable = next((word for word in names if not _is_word(word)), None)
    if unreadable is not None:
        # A table of numbers among words is refused, and one of numbers alone is read as numbers.
        lost.append(f"names of classes (a table cannot hold {unreadable!r} as a name, so labels are numbers)")
        return [ManifestColumn(name("label"), labels)], [ManifestColumn(name("class"), labels, names)]
    used = {names[label] for label in np.unique(labels).tolist() if label != schema.NO_LABEL}
    unused = [word for word in names if word not in used]
    if unused:
        lost.append(f"{_counted(unused, 'class', 'classes')} without rows")
    if [word for word in names if word in used] != sorted(used):
        lost.append("the order of classes, which becomes alphabetic, and with it their numbers")
    return [ManifestColumn(name("label"), labels, names)], []


def _field(
    field: str, values: npt.NDArray[Any], unlabelled: bool, name: _Header, lost: list[str]
) -> Iterator[ManifestColumn]:
    count = math.prod(values.shape[1:])
    if count > _MOST_NUMBERS:
        lost.append(f"field {field!r}, of {count:,} numbers a row, which is not in the table")
        return
    if values.ndim > 1:
        flat = values.reshape(len(values), count)
        lost.append(f"the shape of field {field!r}, whose numbers are columns of their own")
        yield from (ManifestColumn(name(f"{field}.{place}"), flat[:, place]) for place in range(count))
        return
    # Without labels, a column of such a name would be taken for them.
    column = name(f"field_{field}" if unlabelled and field.lower() in _LABEL_COLUMNS else field)
    if column != field:
        lost.append(f"the name of field {field!r}, which is called {column!r}")
    yield ManifestColumn(column, values)


def _lost_splits(catalog: Catalog) -> Iterator[str]:
    counts = np.bincount(catalog.split_ids, minlength=len(catalog.split_names))
    empty = [name for name, count in zip(catalog.split_names, counts.tolist(), strict=True) if not count]
    if empty:
        yield f"{_counted(empty, 'split', 'splits')} without rows"
    filled = [name for name in catalog.split_names if name not in empty]
    if any(name != (printable(name).strip() or "all") for name in filled):
        yield "names of splits that are empty, or hold what a table cannot"
    elif list(split_order(filled)) != filled:
        yield "the order of splits"


def _counted(names: list[str], one: str, many: str) -> str:
    return f"{one} {names[0]!r}" if len(names) == 1 else f"{len(names):,} {many} ({names[0]!r} first)"


def _is_word(name: str) -> bool:
    """Whether a table's cell of this name is read as a word, and as this one."""
    if not name or name != printable(name).strip():
        return False
    try:
        real(name)
    except ValueError:
        return True
    return False


def printable(name: str) -> str:
    """A name without control characters, which are escaped: a bare carriage return ends a line of a table."""
    if name.isprintable():
        return name
    return "".join(sign.encode("unicode_escape").decode() if category(sign) == "Cc" else sign for sign in name)


def _cell(path: str) -> str:
    """A path as a cell, whose white space in front would be taken away."""
    return f"./{path}" if path[:1].isspace() else path


def _another(path: Path) -> OutputExistsError:
    return OutputExistsError(
        f"{path}: exists, and is not of this export; give another folder, or --overwrite without --resume to replace it"
    )
