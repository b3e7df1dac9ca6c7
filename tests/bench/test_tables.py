"""The tables of a report: every figure that was measured is in one of them, and no other."""

from __future__ import annotations

import dataclasses

import pytest

from h5pack.bench.tables import Table, all_tables, loss_table
from h5pack.bench.wording import speed_text
from tests.bench import reports

ROW = 116_412


def columns(table: Table) -> list[tuple[str, str]]:
    return [(title, head) for title, heads in table.groups for head in heads]


def entries(table: Table) -> dict[tuple[str, str, str], str]:
    """Texts by line, group and head."""
    found = {}
    for row in table.rows:
        assert len(row.lead) == len(table.lead)
        for (title, head), entry in zip(columns(table), row.entries, strict=True):
            found[row.lead[0], title, head] = entry.text
    return found


@pytest.mark.parametrize("make", [reports.folder_report, reports.small_report, reports.foreign_report])
def test_every_figure_of_the_sweep_stands_in_its_place(make: object) -> None:
    report = make()  # type: ignore[operator]
    tables = {table.title: entries(table) for table in all_tables(report)}
    hot, cold = "images/s, hot (in the page cache)", "images/s, cold (dropped from the page cache)"
    seen = 0
    for one in report.measurements:
        cell = one.cell
        table = tables[hot if cell.cache == "hot" else cold]
        expected = one.settled_by(next((trial for trial in report.trials if trial.cell == cell), None))
        assert table[cell.stored, cell.order, cell.engine] == speed_text(expected.median)
        seen += 1
    assert seen == sum(text != "-" for title in (hot, cold) for text in tables.get(title, {}).values())


def test_a_report_without_figures_has_no_tables() -> None:
    assert all_tables(reports.empty()) == []
    assert loss_table(reports.empty()) is None


def test_what_failed_or_was_not_reached_is_a_dash() -> None:
    report = reports.empty()
    report.files = [reports.packed(1, ROW), reports.packed(36, ROW)]
    report.measurements = [
        reports.measured(report.files[0], "window", "direct", "hot", 5e3),
        reports.failed(report.files[1], "window", "direct", "hot"),
        reports.measured(report.files[1], "full", "direct", "hot", 6e3),
    ]
    (speeds, _) = all_tables(report)
    texts = entries(speeds)
    assert texts["36 rows", "window", "direct"] == texts["1 row", "full", "direct"] == "-"
    assert {entry.value is None for row in speeds.rows for entry in row.entries if entry.text == "-"} == {True}


def test_recommended_and_equal_lines_are_marked() -> None:
    table = all_tables(reports.folder_report())[0]
    assert {row.lead[0]: row.mark for row in table.rows if row.mark} == {"9 rows": "=", "36 rows": ">", "144 rows": "="}


def test_amplification_is_shown_where_it_is_known_and_both_where_hot_and_cold_differ() -> None:
    report = reports.empty()
    stored = reports.packed(36, ROW)
    report.files = [stored]

    def known(order: str, cache: str, amplification: float | None, hits: float | None) -> None:
        one = reports.measured(stored, order, "direct", cache, 5e3)
        report.measurements.append(dataclasses.replace(one, amplification=amplification, hit_rate=hits))

    known("window", "hot", 1.001, 0.972)
    known("window", "cold", 1.049, 0.968)
    known("full", "hot", 8.0, None)
    known("full", "cold", 12.0, 0.5)
    known("single", "hot", None, None)
    table = next(table for table in all_tables(report) if table.title == "amplification and chunk hits")
    assert columns(table) == [("window", "direct"), ("full", "direct")]
    assert [(entry.text, entry.extra) for entry in table.rows[0].entries] == [("1.02x", "97%"), ("8.00..12.00x", "50%")]


def test_compressed_chunks_stand_beside_their_equals() -> None:
    report = reports.empty()
    files = [reports.packed(rows, ROW, kind) for rows in (9, 36) for kind in ("none", "gzip")]
    report.files = files[:3]
    report.measurements = [reports.measured(stored, "window", "direct", "hot") for stored in report.files]
    speeds, _, compressed = all_tables(report)
    assert [row.lead[0] for row in speeds.rows] == ["9 rows", "36 rows"]
    assert compressed.title.startswith("compression: images/s, hot")
    assert [row.lead for row in compressed.rows] == [("9 rows", "1 MiB", "1.00"), ("9 rows gzip", "1 MiB", "0.81")]


def test_one_table_for_each_setting_that_was_varied() -> None:
    report = reports.empty()
    stored = reports.packed(36, ROW)
    report.files = [stored, reports.packed(9, ROW)]
    report.measurements = [
        *(reports.measured(one, "window", "direct", "hot") for one in report.files),
        reports.measured(stored, "window", "direct", "hot", 1e3, batch=64),
        reports.measured(stored, "window", "direct", "hot", 2e3, window=4),
        reports.measured(stored, "window", "direct", "hot", 3e3, threads=1),
        reports.measured(stored, "window", "direct", "hot", 4e3, threads=1, workers=2),
        reports.measured(stored, "window", "direct", "hot", 5e3, batch=64, window=4),
    ]
    tables = {table.title: table for table in all_tables(report)}
    heads = {title.rpartition(" by ")[2]: table.groups[0][1] for title, table in tables.items() if " by " in title}
    assert heads == {
        "rows a batch": ("64", "256"),
        "chunks a window": ("4", "16"),
        "reading threads": ("1", "2"),
        "workers of a DataLoader": ("without", "2"),
    }
    assert tables["images/s by rows a batch"].rows[0].entries[0].text == "1.00k"
    assert tables["images/s by workers of a DataLoader"].rows[0].entries[1].text == "4.00k"
    assert [row.entries[0].text for row in tables["other settings"].rows] == ["5.00k"]


def test_the_run_off_has_the_settings_that_differ_and_the_fastest_first() -> None:
    table = all_tables(reports.folder_report())[-1]
    assert table.title == "run-off between the fastest"
    assert table.lead == ("chunks", "threads", "workers")
    assert table.about == "All with order window, engine direct, page cache hot, batch 256, window 16."
    values = [row.entries[0].value or 0 for row in table.rows]
    assert values == sorted(values, reverse=True)
    assert table.rows[0].lead == ("36 rows", "2", "-")


def test_the_loss_of_a_file_is_told_only_where_both_were_measured() -> None:
    report = reports.foreign_report()
    report.measurements = [
        one for one in report.measurements if (one.cell.stored, one.cell.cache) != ("36 rows", "cold")
    ]
    table = loss_table(report)
    assert table is not None
    assert table.groups[0] == ("images/s", ("as it is", "36 rows"))
    assert [row.lead for row in table.rows] == [
        ("hot", "single", "default"),
        ("hot", "window", "default"),
        ("hot", "window", "tuned"),
        ("hot", "window", "direct"),
    ]
    before, after, times = table.rows[0].entries
    assert times.text == f"{(after.value or 0) / (before.value or 1):.0f}x"


def test_without_a_recommendation_the_loss_is_that_to_the_fastest_chunks() -> None:
    report = reports.foreign_report()
    report.recommendation = None
    table = loss_table(report)
    assert table is not None
    fastest = max(
        (one for one in report.measurements if one.cell.stored not in ("as it is",)),
        key=lambda one: one.median * ((one.cell.order, one.cell.engine, one.cell.cache) == ("window", "direct", "hot")),
    )
    assert table.groups[0][1][1] == fastest.cell.stored


def test_a_file_that_should_stay_as_it_is_loses_nothing() -> None:
    report = reports.foreign_report()
    report.recommendation = reports.recommended(report.files[0], convert=False)
    assert loss_table(report) is None
    assert loss_table(reports.folder_report()) is None
