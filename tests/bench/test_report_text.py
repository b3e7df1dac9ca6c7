"""A report as text: about 100 columns, in a fixed order, true also where much is missing."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5pack.bench.report import BenchReport
from h5pack.bench.report_text import WIDTH, bench_text, table_lines
from h5pack.bench.tables import Entry, Row, Table
from tests.bench import reports

ROW = 116_412


@pytest.mark.parametrize("make", [reports.folder_report, reports.small_report, reports.foreign_report, reports.empty])
def test_lines_fit_and_end_without_spaces(make: object) -> None:
    lines = bench_text(make()).splitlines()  # type: ignore[operator]
    assert max(map(len, lines)) <= WIDTH
    assert [line for line in lines if line != line.rstrip()] == []
    assert all(one or other for one, other in itertools.pairwise(lines)), "two empty lines"


def test_the_order_of_the_blocks() -> None:
    text = bench_text(reports.foreign_report())
    heads = [
        "bench       /data/celeba.h5: a file of 202,599 images",
        "images/s, hot (in the page cache)",
        "images/s, cold (dropped from the page cache)",
        "amplification and chunk hits",
        "run-off between the fastest",
        "figures     median of the repeats",
        "not measured",
        "faults of /data/celeba.h5",
        "what the file loses",
        "cure        h5pack convert",
        "notes",
        "recommendation",
        "    h5pack convert /data/celeba.h5 packed.h5 --chunk-rows 36",
        "    dataset = h5pack.H5Dataset('packed.h5')",
    ]
    places = [text.index(head if number == 0 else f"\n{head}") for number, head in enumerate(heads)]
    assert places == sorted(places)


def test_a_line_of_a_table_has_label_size_and_figures_under_their_heads() -> None:
    report = reports.empty()
    report.files = [reports.packed(1, ROW), reports.packed(36, ROW)]
    report.measurements = [
        reports.measured(stored, order, "direct", "hot", speed)
        for stored, speed in zip(report.files, (61_000.0, 7_120.0), strict=True)
        for order in ("window", "full")
    ]
    report.measurements[3] = dataclasses.replace(report.measurements[3], speeds=(7_120.0,))
    report.measurements[2] = dataclasses.replace(report.measurements[2], speeds=(7_120.0, 8_000.0, 7_000.0))
    lines = bench_text(report).split("images/s, hot (in the page cache)\n")[1].splitlines()[:4]
    assert lines == [
        "                        window       full",
        "  chunks      each      direct     direct",
        lines[2],
        "  36 rows    4 MiB  7.12k ±13%  7.12k",
    ]
    assert lines[2].startswith("  1 row    114 KiB  61.0k ±")


def test_a_partial_report_says_so_first() -> None:
    report = reports.folder_report()
    report.complete = False
    report.recommendation = None
    text = bench_text(report)
    assert text.startswith("interrupted: ")
    assert text.endswith("no recommendation: nothing was measured that it could rest on")
    assert not bench_text(reports.folder_report()).startswith("interrupted")


def test_a_recommendation_that_is_not_sure_says_so() -> None:
    report = reports.folder_report()
    report.recommendation = dataclasses.replace(reports.recommended(report.files[3]), sure=False)
    assert "recommendation\n  Too little was measured to be sure. Perhaps pack it in" in bench_text(report)


def test_what_was_not_measured_is_a_dash_with_its_reason_below() -> None:
    report = reports.empty()
    report.files = [reports.packed(1, ROW), reports.packed(36, ROW)]
    report.measurements = [
        reports.measured(report.files[0], "window", "direct", "hot"),
        reports.failed(report.files[1], "window", "direct", "hot", "no space"),
    ]
    text = bench_text(report)
    line = next(line for line in text.splitlines() if line.startswith("  36 rows"))
    assert line.split() == ["36", "rows", "4", "MiB", "-"]
    assert "not measured\n  - 36 rows, window, direct, hot: no space" in text


def test_commands_and_code_are_whole_and_texts_of_others_are_only_text() -> None:
    report = reports.folder_report()
    long = "x" * 300
    chosen = reports.recommended(report.files[3], command=f"h5pack convert '{long} y'", code=f"a = '{long}'\nb = 1")
    report.recommendation = chosen
    report.subject = "a\x1b[2J\nb"
    report.notes = ["see a\x1b[2J"]
    text = bench_text(report)
    assert f"\n    h5pack convert '{long} y'\n" in text
    assert f"\n    a = '{long}'\n    b = 1" in text
    assert "\x1b" not in text
    assert "bench       a\\x1b[2J\\nb: a folder" in text


SWEEPS = [
    (stored, order, engine, cache)
    for stored in (reports.as_it_is(ROW), reports.packed(1, ROW), reports.packed(36, ROW), reports.packed(36, ROW,
    "gzip"), reports.contiguous(ROW))
    for order in ("sequential", "window", "full", "single")
    for engine in ("direct", "tuned", "default")
    for cache in ("hot", "cold")
]  # fmt: skip


@st.composite
def partial_reports(draw: st.DrawFn) -> BenchReport:
    """A report with some of everything."""
    report = reports.foreign_report()
    chosen = draw(st.lists(st.sampled_from(SWEEPS), max_size=40, unique_by=lambda one: (one[0].label, *one[1:])))
    make = draw(st.lists(st.sampled_from((reports.measured, reports.failed)), min_size=len(chosen)))
    report.measurements = [one(*cell) for one, cell in zip(make, chosen, strict=False)]
    report.files = [stored for stored in report.files if draw(st.booleans())]
    labels = {one.cell.stored for one in report.measurements}
    report.files += [stored for stored in dict.fromkeys(one[0] for one in SWEEPS)
                     if stored.label in labels and stored not in report.files]  # fmt: skip
    if draw(st.booleans()):
        report.recommendation = None
    for name in ("trials", "notes", "ceilings"):
        if draw(st.booleans()):
            setattr(report, name, [])
    report.complete = draw(st.booleans())
    return report


@given(partial_reports())
def test_any_part_of_a_report_is_printed(report: BenchReport) -> None:
    text = bench_text(report)
    assert max(map(len, text.splitlines())) <= WIDTH
    for one in report.measurements:
        assert one.cell.stored in text
    if any(not one.speeds for one in report.measurements):
        assert reports.REASON in " ".join(text.split())


def test_columns_that_do_not_fit_go_below_and_none_is_lost() -> None:
    heads = tuple(f"head{number:02}" for number in range(3))
    groups = tuple((f"group{number}", heads) for number in range(6))
    entries = tuple(Entry(f"{number}.5k", "±5%") for number in range(18))
    lines = table_lines(Table("t", ("name", "each"), groups, (Row(("a", "1 MiB"), entries), Row(("b", ""), entries))))
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    for number in range(18):
        assert sum(f" {number}.5k ±5%" in line for line in lines) == 2
    assert all(f" group{number} " in text for number in range(6))
    assert lines.count("") == 2


def test_a_title_wider_than_its_columns_keeps_them_in_line() -> None:
    groups = (("a very long title", ("x",)), ("", ("y",)))
    row = Row(("n",), (Entry("1"), Entry("2")))
    assert table_lines(Table("t", ("",), groups, (row,))) == [
        "t",
        "     a very long title",
        "                     x  y",
        "  n                  1  2",
    ]
