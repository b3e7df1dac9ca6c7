"""Tables beside images: delimited text read into columns, with errors that name file and line."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
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
    lines : list of int
        The line of the file on which each row ends, counted from 1.
    """

    path: Path
    header: tuple[str, ...]
    rows: list[list[str]]
    lines: list[int]

    def place(self, row: int) -> str:
        """File and line of a row, for messages."""
        return f"{self.path} line {self.lines[row]}"

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
            reader = csv.reader(stream, delimiter=delimiter)
            lines = [(reader.line_num, cells) for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"{path}: cannot be read as UTF-8 text with delimiters ({error}); save it as CSV") from error
    if not lines:
        raise SourceError(f"{path}: empty; its first line must name the columns")
    header = tuple(cell.strip() for cell in lines[0][1])
    return _rectangular(path, header, lines[1:])


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
        with path.open(encoding="utf-8-sig") as stream:
            lines = [(number, line.split()) for number, line in enumerate(stream, 1)]
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read as text ({error}); fetch it again") from error
    if header is None:
        if len(lines) <= skip:
            raise SourceError(f"{path}: no line that names the columns; fetch it again")
        header = ("image_id", *lines[skip][1])
        skip += 1
    return _rectangular(path, header, lines[skip:])


def _rectangular(path: Path, header: tuple[str, ...], lines: list[tuple[int, list[str]]]) -> Table:
    table = Table(path, header, [], [])
    for number, cells in lines:
        if not cells or cells == [""]:
            continue
        if len(cells) != len(header):
            raise SourceError(f"{path} line {number}: {len(cells)} cells under {len(header)} columns; mend the line")
        table.rows.append([cell.strip() for cell in cells])
        table.lines.append(number)
    return table


def integers(cells: Iterable[str]) -> npt.NDArray[np.int64] | None:
    """Cells as int64, or None where one is no integer."""
    try:
        return np.array([whole(cell) for cell in cells], np.int64)
    except (ValueError, OverflowError):
        return None


def whole(cell: str) -> int:
    """A cell as an integer; ValueError if it is none.

    Python's own ``int`` takes "1_0" for 10, where a table means a name.
    """
    if "_" in cell:
        raise ValueError(cell)
    return int(cell)


def real(cell: str) -> float:
    """A cell as a number; ValueError if it is none, "1_0" included."""
    if "_" in cell:
        raise ValueError(cell)
    return float(cell)


def numbers(table: Table, column: str) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """A column as int64 where all cells are integers, else as float64.

    Raises
    ------
    SourceError
        If a cell is no number.
    """
    cells = table.column(column)
    exact = integers(cells)
    if exact is not None:
        return exact
    values = np.empty(len(cells), np.float64)
    for row, cell in enumerate(cells):
        try:
            values[row] = real(cell)
        except ValueError:
            raise SourceError(
                f"{table.place(row)}: column {column!r} holds {cell!r}, which is no number; "
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
        cells = table.column(column)
        values = integers(cells)
        if values is not None and len(values) and values.min() == -1 and values.max() <= 1:
            values = np.where(values == -1, 0, values)
        if values is None or (len(values) and not (values.min() >= 0 and values.max() <= 255)):
            row = next(row for row, cell in enumerate(cells) if not _is_byte(cell))
            raise SourceError(
                f"{table.place(row)}: column {column!r} holds {cells[row]!r}; several label columns make a table of "
                "numbers in 0..255 (or -1 and 1); pack one label column of names, or mend the column"
            )
        result[:, position] = values
    return result


def _is_byte(cell: str) -> bool:
    try:
        return 0 <= whole(cell) <= 255
    except ValueError:
        return False
