"""Tables of text: cells, columns of numbers, and errors that name file and line."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.errors import SourceError
from h5pack.sources.tables import Table, binary_table, integers, numbers, read_delimited, read_spaced


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def table(*cells: str, column: str = "x") -> Table:
    return Table(Path("t.csv"), (column,), [[cell] for cell in cells], list(range(2, 2 + len(cells))))


CELLS = st.text(st.characters(exclude_categories=("Cs", "Cc", "Z")), min_size=1, max_size=6)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4).flatmap(lambda width: st.lists(st.tuples(*[CELLS] * width), max_size=5)))
def test_what_pythons_csv_writes_is_read(rows: list[tuple[str, ...]]) -> None:
    width = len(rows[0]) if rows else 2
    header = tuple(f"c{n}" for n in range(width))
    with tempfile.TemporaryDirectory() as folder:
        for suffix, delimiter in ((".csv", ","), (".tsv", "\t"), (".TAB", "\t")):
            path = Path(folder, f"t{suffix}")
            with path.open("w", newline="", encoding="utf-8") as stream:
                csv.writer(stream, delimiter=delimiter).writerows([header, *rows])
            result = read_delimited(path)
            assert result.header == header
            assert result.rows == [list(row) for row in rows]
            assert result.lines == list(range(2, 2 + len(rows)))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("lead", ["", "\ufeff"])
def test_byte_order_marks_line_endings_spaces_and_quotes(tmp_path: Path, ending: str, lead: str) -> None:
    lines = [lead + "path , label", ' a.jpg,"x, y" ', "", '"b.jpg",z']
    result = read_delimited(written(tmp_path / "t.csv", ending.join(lines)))
    assert result.header == ("path", "label")
    assert result.rows == [["a.jpg", "x, y"], ["b.jpg", "z"]]
    assert result.lines == [2, 4]


def test_places_count_the_lines_of_the_file(tmp_path: Path) -> None:
    result = read_delimited(written(tmp_path / "t.csv", 'a,b\n\n1,"two\nlines"\n\n3,4\n'))
    assert [result.place(row) for row in range(2)] == [f"{tmp_path}/t.csv line 4", f"{tmp_path}/t.csv line 6"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n\n1\n", r"t\.csv line 4: 1 cells under 2 columns; mend the line"),
        ("a,b\n1,2,3\n", r"t\.csv line 2: 3 cells under 2 columns"),
        ('a,b\n"1\n1",2\n1,2,3\n', r"t\.csv line 4: 3 cells"),
        ("", r"t\.csv: empty; its first line must name the columns"),
        (b"\xff\xfea\0,\0b\0", r"t\.csv: cannot be read as UTF-8 text"),
        ("a,b\n" + "x" * 200_000 + ",1\n", r"t\.csv: cannot be read .*field larger than field limit"),
    ],
)
def test_malformed_files_are_errors_that_name_the_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_delimited(written(tmp_path / "t.csv", content))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"missing\.csv: cannot be read"):
        read_delimited(tmp_path / "missing.csv")
    with pytest.raises(SourceError, match=r"missing\.txt: cannot be read"):
        read_spaced(tmp_path / "missing.txt", None)


def test_tables_delimited_by_spaces(tmp_path: Path) -> None:
    path = written(tmp_path / "t.txt", "2\r\nBald  Young \r\n1.jpg -1  1\r\n2.jpg  1 -1\r\n\r\n")
    result = read_spaced(path, None, skip=1)
    assert result.header == ("image_id", "Bald", "Young")
    assert result.rows == [["1.jpg", "-1", "1"], ["2.jpg", "1", "-1"]]
    assert result.lines == [3, 4]
    path = written(tmp_path / "p.txt", "1.jpg 0\n\n2.jpg 2\n")
    result = read_spaced(path, ("image_id", "partition"))
    assert (result.rows, result.lines) == ([["1.jpg", "0"], ["2.jpg", "2"]], [1, 3])


def test_malformed_tables_delimited_by_spaces(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"t\.txt line 4: 2 cells under 3 columns"):
        read_spaced(written(tmp_path / "t.txt", "2\nA B\n1.jpg 1 1\n2.jpg 1\n"), None, skip=1)
    with pytest.raises(SourceError, match=r"t\.txt: no line that names the columns"):
        read_spaced(written(tmp_path / "t.txt", "2\n"), None, skip=1)
    with pytest.raises(SourceError, match=r"t\.txt: cannot be read as text"):
        read_spaced(written(tmp_path / "t.txt", b"\xff\xff"), None, skip=1)


def test_an_unknown_column_lists_the_known_ones() -> None:
    with pytest.raises(SourceError, match=r"t\.csv: no column 'y'; its columns are x"):
        table("1").column("y")


@settings(max_examples=33, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8))
def test_every_int64_is_an_integer(values: list[int]) -> None:
    result = integers([str(value) for value in values])
    assert result is not None
    assert result.dtype == np.int64
    assert result.tolist() == values


@pytest.mark.parametrize("cell", ["", "1.0", "cat", "1_0", "1e3", "nan", str(2**63), "9" * 5_000, "0x10", "--1"])
def test_what_is_no_integer(cell: str) -> None:
    assert integers(["1", cell]) is None


def test_numbers_are_int64_where_all_are_integers_else_float64() -> None:
    for cells, dtype in [(("3", "-4"), np.int64), (("3", "0.5", "1e-3", "nan"), np.float64), ((), np.int64)]:
        result = numbers(table(*cells), "x")
        assert result.dtype == dtype
        assert np.array_equal(result, [float(cell) for cell in cells], equal_nan=True)


@pytest.mark.parametrize("cell", ["", "cat", "1_0.5", "1,5"])
def test_a_cell_that_is_no_number_is_named(cell: str) -> None:
    with pytest.raises(SourceError, match=rf"t\.csv line 4: column 'x' holds '{cell}', which is no number"):
        numbers(table("1", "2.5", cell, "worse"), "x")


@pytest.mark.parametrize(
    ("cells", "stored"),
    [
        (["-1", "1", "-1"], [0, 1, 0]),
        (["-1", "0", "1"], [0, 0, 1]),
        (["-1", "-1"], [0, 0]),
        (["0", "1"], [0, 1]),
        (["0", "255"], [0, 255]),
        ([], []),
    ],
)
def test_tables_of_small_numbers(cells: list[str], stored: list[int]) -> None:
    result = binary_table(table(*cells), ["x"])
    assert (result.dtype, result.shape) == (np.uint8, (len(cells), 1))
    assert result[:, 0].tolist() == stored


@pytest.mark.parametrize(
    ("cells", "line"),
    [
        (["0", "256"], 3),
        (["-1", "2"], 2),
        (["-2"], 2),
        (["1", "0.5"], 3),
        (["1", "0", ""], 4),
        (["yes"], 2),
        (["1_0"], 2),
    ],
)
def test_what_is_no_small_number_is_named(cells: list[str], line: int) -> None:
    with pytest.raises(SourceError, match=rf"t\.csv line {line}: column 'x' holds '{cells[line - 2]}'; several label"):
        binary_table(table(*cells), ["x"])


def test_a_table_keeps_the_order_of_the_columns_asked_for() -> None:
    whole = Table(Path("t.csv"), ("a", "b", "c"), [["1", "2", "-1"], ["3", "4", "1"]], [2, 3])
    assert binary_table(whole, ["c", "a"]).tolist() == [[0, 1], [1, 3]]
