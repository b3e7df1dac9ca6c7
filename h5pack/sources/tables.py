"""Tables beside images: delimited text read into columns, with errors that name file and line."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from h5pack.errors import SourceError


@dataclass(frozen=True)
class Table:
    """A header and the rows under it.

    Attributes
    ----------
    path : Path
        The file, for messages.
    header : tuple of str
    rows : list of list of str
        Each as long as the header.
    first_line : int
        The line number of the first row, counted from 1.
    """

    path: Path
    header: tuple[str, ...]
    rows: list[list[str]]
    first_line: int

    def column(self, name: str) -> list[str]:
        """The cells of one column.

        Raises
        ------
        SourceError
            If there is no such column; the message lists those there are.
        """
        if name not in self.header:
            raise SourceError(f"{self.path}: no column {name!r}; its columns are {', '.join(self.header)}")
        position = self.header.index(name)
        return [row[position] for row in self.rows]


def read_delimited(path: Path) -> Table:
    """Read a CSV file, or a TSV file by its ending, whose first line names the columns."""
    delimiter = "\t" if path.suffix.lower() in (".tsv", ".tab") else ","
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            lines = list(csv.reader(stream, delimiter=delimiter))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"{path}: cannot be read as UTF-8 text with delimiters ({error}); save it as CSV") from error
    if not lines:
        raise SourceError(f"{path}: empty; its first line must name the columns")
    header = tuple(cell.strip() for cell in lines[0])
    return Table(path, header, _rectangular(path, header, lines[1:], 2), 2)


def read_spaced(path: Path, header: tuple[str, ...] | None, skip: int = 0) -> Table:
    """Read a table delimited by spaces, as CelebA's are.

    Parameters
    ----------
    path : Path
    header : tuple of str or None
        The column names; None: the line after `skip` lines names all columns but the first (the file name).
    skip : int
        Lines to pass over first.
    """
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read as text ({error}); fetch it again") from error
    if header is None:
        if len(lines) <= skip:
            raise SourceError(f"{path}: no line that names the columns; fetch it again")
        header = ("image_id", *lines[skip])
        skip += 1
    return Table(path, header, _rectangular(path, header, lines[skip:], skip + 1), skip + 1)


def _rectangular(path: Path, header: tuple[str, ...], lines: list[list[str]], first_line: int) -> list[list[str]]:
    rows = []
    for number, cells in enumerate(lines, first_line):
        if not cells or cells == [""]:
            continue
        if len(cells) != len(header):
            raise SourceError(f"{path} line {number}: {len(cells)} cells under {len(header)} columns; mend the line")
        rows.append([cell.strip() for cell in cells])
    return rows


def integers(table: Table, column: str) -> npt.NDArray[np.int64] | None:
    """A column as int64, or None where a cell is no integer."""
    try:
        return np.array([int(cell) for cell in table.column(column)], np.int64)
    except (ValueError, OverflowError):
        return None


def numbers(table: Table, column: str) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """A column as int64 where all cells are integers, else as float64.

    Raises
    ------
    SourceError
        If a cell is no number.
    """
    whole = integers(table, column)
    if whole is not None:
        return whole
    values = np.empty(len(table.rows), np.float64)
    for number, cell in enumerate(table.column(column)):
        try:
            values[number] = float(cell)
        except ValueError:
            raise SourceError(
                f"{table.path} column {column!r}: row {number + 1} holds {cell!r}, which is no number; "
                "a field holds numbers, and names belong in a label column"
            ) from None
    return values


def binary_table(table: Table, columns: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Columns as a uint8 table (N, K): 0 and 1, where -1 also means 0 (CelebA's way), or any integers in 0..255.

    Raises
    ------
    SourceError
        If a cell is no such number.
    """
    result = np.empty((len(table.rows), len(columns)), np.uint8)
    for position, column in enumerate(columns):
        values = integers(table, column)
        if values is not None and len(values) and values.min() == -1 and values.max() <= 1:
            values = np.where(values == -1, 0, values)
        if values is None or (len(values) and not (values.min() >= 0 and values.max() <= 255)):
            raise SourceError(
                f"{table.path} column {column!r}: several label columns make a table of numbers in 0..255 "
                "(or -1 and 1); pack one label column of names, or mend the column"
            )
        result[:, position] = values
    return result
