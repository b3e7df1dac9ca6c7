"""Text tables (CSV, TSV, JSON lines) with a row for each image, and their cells as numbers and classes."""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import SourceError
from h5pack.format import schema
from h5pack.system.text import counted, short_repr

# A cell may have more characters than 131,072, the default limit of the module csv. The limit is for the whole process.
csv.field_size_limit(max(csv.field_size_limit(), 2**24))
_TRUTH = {"True": "1", "False": "0"}


@dataclass(frozen=True)
class TextTable:
    """A table with a header and one row per image."""

    path: Path
    header: tuple[str, ...]
    load: Callable[[str], list[Any]]  # returns the values of a column, None for a missing value
    place: Callable[[int], str]  # returns where a row is, as a text that follows the path in messages, e.g. " line 3"
    unreadable: frozenset[str] = frozenset()  # columns that hold neither numbers, text nor lists of these

    def error(self, row: int, message: str, *parameters: str) -> SourceError:
        """Return an error whose message begins with the file and the line or name of a row."""
        return SourceError(f"{self.path}{self.place(row)}: {message}", path=self.path, parameters=parameters)

    def column(self, name: str) -> list[str]:
        """Return the stripped cells of a column as text; raise SourceError for a list, a dict, or a text with NUL."""
        values = self.values(name)
        for row, value in enumerate(values):
            if isinstance(value, str) and "\0" in value:
                problem = f"column {name!r} contains {value!r:.60}, which has a NUL; correct the value"
                raise self.error(row, problem)
            if isinstance(value, (list, dict)):
                problem = f"column {name!r} contains {value!r:.60}, not a number or a text"
                if isinstance(value, dict):
                    raise self.error(row, f"{problem}; give its values columns of their own")
                raise self.error(row, f"{problem}; pack lists with field_columns", "field_columns")
        return [cell_text(value).strip() for value in values]

    def values(self, name: str) -> list[Any]:
        """Return the values of a column; raise SourceError unless exactly one column has this name."""
        if self.header.count(name) != 1:
            found = "several columns are named" if name in self.header else "no column"
            raise SourceError.at(self.path, f"{found} {name!r}; its columns are {', '.join(self.header):.500}")
        return self.load(name)


def text_lines(path: Path, newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a text file in UTF-8; `newline` is as in `open`."""
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as stream:
            yield from stream
    except UnicodeDecodeError as error:
        raise SourceError.at(path, f"is not text in UTF-8 ({error}); save it in UTF-8") from error


def read_json_lines(path: Path) -> TextTable:
    """Read a table whose lines are JSON objects, which may have different keys."""
    records, lines = list[dict[str, Any]](), list[int]()
    for number, line in enumerate(text_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("it is another value")
        except (ValueError, RecursionError) as error:
            problem = f"line {number}: is not a JSON object ({error}); correct the line"
            raise SourceError(f"{path} {problem}", path=path) from error
        records.append(record)
        lines.append(number)
    if not records:
        raise SourceError.at(path, "the file is empty; each line must be a JSON object")
    header = tuple(dict.fromkeys(key for record in records for key in record))
    return TextTable(
        path, header, lambda name: [record.get(name) for record in records], lambda row: f" line {lines[row]}"
    )


def read_delimited(path: Path) -> TextTable:
    """Read a table whose first line names the columns.

    The delimiter is the first one that the first line contains: a tab, comma or semicolon if the suffix is .tsv or
    .tab, else a comma, semicolon or tab.
    """
    texts = list(text_lines(path, newline=""))
    delimiters = "\t,;" if path.suffix.lower() in (".tsv", ".tab") else ",;\t"
    delimiter = next((one for one in delimiters if one in "".join(texts[:1])), delimiters[0])
    lines = _read_cells(path, texts, delimiter)
    if not lines or not "".join(lines[0][1]).strip():
        raise SourceError.at(path, "its first line is empty; it must name the columns")
    header = tuple(cell.strip() for cell in lines[0][1])
    return rectangular(path, header, lines[1:])


def _read_cells(path: Path, texts: list[str], delimiter: str) -> list[tuple[int, list[str]]]:
    """Return the number of each row's last line, and its cells; raise SourceError if a quote joins lines wrongly."""
    reader, rows, end = csv.reader(texts, delimiter=delimiter), [], 0
    try:
        for cells in reader:
            # If a quote joins several lines, parse these again in strict mode, which finds an unclosed quote. In a
            # single line, other characters beside a quote, such as spaces, do no harm.
            if reader.line_num > end + 1 or (cells and cells[-1].endswith(("\n", "\r"))):
                list(csv.reader(texts[end : reader.line_num], delimiter=delimiter, strict=True))
            end = reader.line_num
            rows.append((end, cells))
    except csv.Error as error:
        problem = f"line {end + 1}: cannot be read ({error}); look for an unclosed quote from this line on"
        raise SourceError(f"{path} {problem}", path=path) from error
    return rows


def rectangular(path: Path, header: tuple[str, ...], lines: list[tuple[int, list[str]]]) -> TextTable:
    """Return the table of `lines` (number, cells). Raise SourceError if a line does not have one cell per column."""
    rows: list[list[str]] = []
    numbers: list[int] = []  # for each row, the number of its last line in the file, counted from 1
    table = TextTable(
        path, header, lambda name: list(map(itemgetter(header.index(name)), rows)), lambda row: f" line {numbers[row]}"
    )
    for number, cells in lines:
        if not cells or cells == [""]:
            continue
        numbers.append(number)
        if len(cells) != len(header):
            problem = f"has {counted(len(cells), 'cell')}, but the table has {counted(len(header), 'column')}"
            raise table.error(-1, f"{problem}; correct the line")
        rows.append(cells)
    return table


def cell_text(value: object) -> str:
    """Return a value as the text of a cell: "" for None, "0" and "1" for False and True."""
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def parse_number(cell: str, kind: type[int | float]) -> int | float:
    """Return a cell as int or float; raise ValueError if it is not a number or contains "_", as in "1_0"."""
    if "_" in cell:
        raise ValueError(cell)
    return kind(cell)


def is_number(cell: str) -> bool:
    """Return whether a cell is a number, including nan and inf."""
    try:
        parse_number(cell, float)
    except ValueError:
        return False
    return True


def integers(cells: Iterable[str]) -> npt.NDArray[np.int64] | None:
    """Return cells as int64, or None if a cell is not a 64-bit integer."""
    try:
        return np.array([parse_number(cell, int) for cell in cells], np.int64)
    except (ValueError, OverflowError):
        return None


def numbers(table: TextTable, column: str) -> npt.NDArray[np.int64 | np.uint64 | np.float64]:
    """Return a column as int64, or as uint64 for larger integers; as float64 if some cells are not integers.

    An empty cell becomes NaN. Raise SourceError if a cell is not a number or is beyond float64, or if an integer would
    be rounded or fits no dtype.
    """
    cells = table.column(column)
    try:
        exact = [int(parse_number(cell, int)) for cell in cells]
    except ValueError:
        return _floats(table, column, cells)
    low, high = min(exact, default=0), max(exact, default=0)
    if -(2**63) <= low <= high < 2**63:
        return np.array(exact, np.int64)
    if 0 <= low <= high < 2**64:
        return np.array(exact, np.uint64)
    row = exact.index(low if low < -(2**63) else high)
    raise _number_error(table, column, row, "but its integers must all fit into int64 or all into uint64")


def _number_error(table: TextTable, column: str, row: int, problem: str) -> SourceError:
    problem = f"column {column!r} contains {short_repr(table.column(column)[row])}, {problem}"
    advice = "name it with text_columns instead of field_columns"
    return table.error(row, f"{problem}; {advice}", "text_columns", "field_columns")


def _floats(table: TextTable, column: str, cells: list[str]) -> npt.NDArray[np.float64]:
    try:
        found = np.array([parse_number(cell or "nan", float) for cell in cells], np.float64)
    except ValueError:
        row = next(row for row, cell in enumerate(cells) if cell and not is_number(cell))
        raise _number_error(table, column, row, "not a number") from None
    for row in np.flatnonzero(np.abs(found) >= 2**53).tolist():
        exact = None
        with contextlib.suppress(ValueError):
            exact = int(parse_number(cells[row], int))
        if math.isinf(found[row]) and "inf" not in cells[row].lower():
            raise _number_error(table, column, row, "which is beyond float64")
        if exact is not None and exact != float(found[row]):
            problem = "which would be rounded, because other cells are empty or not integers"
            raise _number_error(table, column, row, problem)
    return found


def binary_table(table: TextTable, columns: Sequence[str], advice: str = "") -> npt.NDArray[np.uint8]:
    """Return columns of integers in 0..255 as uint8 (N, K). In a column of only -1 and 1, as in CelebA, -1 becomes 0.

    Integers may be written as pandas writes them: 1.0 for 1, or True and False for 1 and 0. Raise SourceError for other
    values. Its message ends with `advice`, which names `text_columns` and `field_columns`; default: correct the column.
    """
    result = np.empty((len(table.column(columns[0])), len(columns)), np.uint8)
    for position, column in enumerate(columns):
        cells = [_TRUTH.get(cell, cell.removesuffix(".0")) for cell in table.column(column)]
        values = integers(cells)
        if values is not None:
            values = zero_for_minus_one(values)
        if values is None or (len(values) and not (values.min() >= 0 and values.max() <= 255)):
            # Show -1, which is allowed in some columns, only if no other cell is wrong.
            row = min((cell == "-1", row) for row, cell in enumerate(cells) if not _is_byte(cell))[1]
            raise table.error(
                row,
                f"column {column!r} contains {table.column(column)[row]!r}; each of several label columns must hold "
                f"integers in 0..255 (or -1 and 1){advice or '; correct the column'}",
                *(("text_columns", "field_columns") if advice else ()),
            )
        result[:, position] = values
    return result


def zero_for_minus_one(labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return labels, (N,) or (N, K), with 0 in place of -1 in each column of only -1 and 1, as CelebA has them."""
    return np.where((np.abs(labels) == 1).all(axis=0), labels > 0, labels)


def _is_byte(cell: str) -> bool:
    return integers([cell]) is not None and 0 <= int(cell) <= 255


def class_ids(values: Sequence[str]) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """Return the sorted distinct values except "", and the index of each value among them, int64; `NO_LABEL` for ""."""
    names = tuple(sorted({*values} - {""}))
    index = {"": schema.NO_LABEL, **{name: number for number, name in enumerate(names)}}
    return names, np.array([index[value] for value in values], np.int64)
