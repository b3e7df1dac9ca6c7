"""Text tables: their lines, quotes and cells."""

from __future__ import annotations

import csv
import math
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h5pack.errors import SourceError
from h5pack.sources import text_tables
from h5pack.sources.catalog import NameFilter
from h5pack.sources.manifest import ManifestColumns, manifest
from h5pack.sources.text_tables import TextTable, binary_table, integers, numbers, read_delimited
from tests.sources.files import written


def table(*cells: str, column: str = "x") -> TextTable:
    return TextTable(Path("t.csv"), (column,), lambda _: list(cells), lambda row: f" line {row + 2}")


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("lead", ["", "\ufeff"])
def test_byte_order_marks_line_endings_spaces_and_quotes(tmp_path: Path, ending: str, lead: str) -> None:
    lines = [lead + "path , label", ' a.jpg,"x, y" ', "", '"b.jpg",z']
    result = read_delimited(written(tmp_path / "t.csv", ending.join(lines)))
    assert result.header == ("path", "label")
    assert [result.column(name) for name in result.header] == [["a.jpg", "b.jpg"], ["x, y", "z"]]
    assert [result.place(row) for row in range(2)] == [" line 2", " line 4"]


def test_the_limit_on_cells_is_raised_but_not_lowered(tmp_path: Path) -> None:
    limit = csv.field_size_limit(2**25)
    try:
        assert limit >= 2**24
        runpy.run_path(str(text_tables.__file__))
        assert csv.field_size_limit(5) == 2**25
        with pytest.raises(SourceError, match=" line 2: "):
            read_delimited(written(tmp_path / "t.csv", "a,b\n123456,1\n"))
    finally:
        csv.field_size_limit(limit)


def test_the_first_line_and_the_suffix_decide_what_separates_cells(tmp_path: Path) -> None:
    for name, text, header, cells in (
        ("t.csv", '\ufeff"a";b\n1;"x;y, z"\n', ("a", "b"), ["1", "x;y, z"]),
        ("t.csv", "a;,b\n1;,2\n", ("a;", "b"), ["1;", "2"]),
        ("t.csv", "a\n1;2\n", ("a",), ["1;2"]),
        ("t.csv", "a\tb\n1,5\t2\n", ("a", "b"), ["1,5", "2"]),
        ("t.csv", "a\tx,b\n1,2\n", ("a\tx", "b"), ["1", "2"]),
        ("t.tsv", "a,x\tb\n1,5\t2\n", ("a,x", "b"), ["1,5", "2"]),
        ("t.tsv", "a,b\n1,2\n", ("a", "b"), ["1", "2"]),
        ("t.tab", "a;b\n1;2\n", ("a", "b"), ["1", "2"]),
    ):
        result = read_delimited(written(tmp_path / name, text))
        assert (result.header, [result.column(name)[0] for name in header]) == (header, cells)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("a,b\n1,2\n\n1\n", 4), ("a,b\n1,2,3\n", 2), ('a,b\n"1\n1",2\n1,2,3\n', 4), ("", None),
        (b"\xff\xfea\0,\0b\0", None),
    ],
)  # fmt: skip
def test_malformed_files_are_errors_that_name_the_line(tmp_path: Path, content: str | bytes, line: int | None) -> None:
    with pytest.raises(SourceError) as caught:
        read_delimited(written(tmp_path / "t.csv", content))
    assert caught.value.path == str(tmp_path / "t.csv")
    assert line is None or f" line {line}:" in str(caught.value)


@pytest.mark.parametrize("cell", ["", "1.0", "cat", "1_0", "1e3", "nan", str(2**63), "9" * 5_000, "0x10", "--1"])
def test_what_is_not_an_integer_of_64_bits(cell: str) -> None:
    assert integers(["1", cell]) is None
    ends = [-(2**63), 2**63 - 1]
    np.testing.assert_array_equal(integers(map(str, ends)), np.array(ends, np.int64), strict=True)


@pytest.mark.parametrize(
    ("cells", "dtype"),
    [
        (["3", "-4"], np.int64), (["3", "0.5", "1e-3", "nan"], np.float64), ([], np.int64),
        ([2**63 - 1, -(2**63)], np.int64), ([2**64 - 1, 0, 2**63 + 1], np.uint64),
        # Empty cells are NaN.
        (["1", "", "3"], np.float64), (["1.0", "", "3.0"], np.float64), ([2**53 + 2, "", 1e300], np.float64),
    ],
)  # fmt: skip
def test_numbers_are_exact_integers_or_float64(cells: list[Any], dtype: Any) -> None:
    expected = np.array([cell or "nan" for cell in map(str, cells)]).astype(dtype)
    np.testing.assert_array_equal(numbers(table(*map(str, cells)), "x"), expected, strict=True)


@pytest.mark.parametrize(
    ("cells", "line"),
    [
        ([1, 2**64], 3), ([2**63, -1], 2), ([2**63, -(2**63) - 1], 3),
        *(([1, 2.5, cell, "worse"], 4) for cell in ("-", "cat", "1_0.5", "1,5")),
        # As floats, these integers would be others.
        (["", 2**53, 2**53 + 1], 4), ([1.5, -(2**53) - 3], 3), (["", 2**64 - 1], 3), ([0.5, 2**63 + 1], 3),
        ([0.5, "1e400"], 3),
    ],
)  # fmt: skip
def test_a_cell_that_is_not_a_number_or_fits_no_dtype_is_named(cells: list[Any], line: int) -> None:
    with pytest.raises(SourceError, match=rf"line {line}: .*'x'.*{cells[line - 2]!r}"):
        numbers(table(*map(str, cells)), "x")


@pytest.mark.parametrize("digits", [400, 4_400])
def test_integers_beyond_float64_are_named(digits: int) -> None:
    for first in ("0.5", "", "1", "inf"):
        with pytest.raises(SourceError, match="line 3"):
            numbers(table(first, "1" + "0" * digits), "x")
    assert numbers(table("-inf", "Infinity"), "x").tolist() == [-math.inf, math.inf]


def test_label_tables_hold_small_integers() -> None:
    tables = {"-1 1.0 -1.0": [0, 1, 0], "-1 -1": [0, 0], "1.0 0.0": [1, 0], "0 255": [0, 255], "": []}
    tables |= {"True False": [1, 0]}
    for cells, stored in tables.items():
        result = binary_table(table(*cells.split()), ["x"])
        np.testing.assert_array_equal(result, np.array(stored, np.uint8).reshape(-1, 1), strict=True)


@pytest.mark.parametrize(
    ("cells", "line"),
    [
        (["0", "256"], 3), (["-1", "2"], 2), (["-2"], 2), (["1", "0.5"], 3), (["1", "0", ""], 4), (["1_0"], 2),
        (["-1", "x"], 3), (["0", "-1", "1"], 3),
    ],
)  # fmt: skip
def test_a_cell_outside_a_label_table_is_named(cells: list[str], line: int) -> None:
    with pytest.raises(SourceError, match=rf"line {line}: .*'{cells[line - 2]}'") as caught:
        binary_table(table(*cells), ["x"], "; pack them with text_columns or field_columns")
    assert caught.value.parameters == ("text_columns", "field_columns")


def test_a_quote_that_is_not_closed_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "m.csv", 'path,label\na.jpg,5" disk\n"b.jpg","c, ""d"""\n')
    assert read_delimited(path).column("label") == ['5" disk', 'c, "d"']
    written(path, 'path,label\na.jpg,"two\nlines"\nb.jpg,"c" \n')
    assert read_delimited(path).column("label") == ["two\nlines", "c"]
    for lines in ('a.jpg,"x\nb.jpg,y\nc.jpg,y\n', 'a.jpg,x\nb.jpg,y\n"c.jpg,y\n', 'a.jpg,"x\nb.jpg,y\nc.jpg,"z"\n'):
        written(path, f"path,label\n{lines}")
        with pytest.raises(SourceError, match=r"m\.csv line \d+: cannot be read") as caught:
            read_delimited(path)
        assert caught.value.path == str(path)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b'{"path": "a"}\n[1]\n', " line 2: "), (b'{"path": "a"}\n\n{"path"\n', " line 3: "),
        (b"[" * 100_000, " line 1: "), (b'{"path": "\xff"}', ""), (b"", ""), (b'{"name": "a"}', ""),
        (b'{"path": "a"}\n{}\n', " line 2: "),
    ],
)  # fmt: skip
def test_lines_that_are_no_json_objects_are_errors(tmp_path: Path, content: bytes, line: str) -> None:
    with pytest.raises(SourceError, match=re.escape(f"m.jsonl{line}")):
        manifest(written(tmp_path / "m.jsonl", content), ManifestColumns(), NameFilter())
