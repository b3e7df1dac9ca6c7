"""The report: a short answer, all figures as tables and JSON, and the table of the sweep."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from h5pack.benchmark.cases import Measurement, SweepTable
from h5pack.benchmark.report import BenchReport, measured_text, speed_text
from h5pack.system.text import printable
from tests.benchmark import reports


def worst_case() -> BenchReport:
    """As much to say as there can be."""
    report = reports.file_report()
    report.recommendation = reports.recommended(report.variants[4], compared=False)
    report.complete = False
    report.faults = tuple(f"fault {number}" for number in range(5))
    return report


@pytest.mark.parametrize("report", [reports.folder_report(), reports.file_report(), worst_case(), reports.empty()])
def test_the_answer_has_fewer_than_25_lines_of_100_columns(report: BenchReport) -> None:
    lines = report.to_text().splitlines()
    assert len(lines) < 25
    assert max(map(len, lines)) <= 100


def test_the_answer_says_what_to_type_and_what_was_not_compared() -> None:
    report = worst_case()
    chosen, text = report.recommendation, report.to_text()
    for part in (f"    {line}\n" for line in (chosen.command, *chosen.code.splitlines())):
        assert part in text.replace("\n", " ") or part in text
    # No sentence is cut: what there is no room for is counted.
    reasons = text.partition("\n- ")[2].partition("\n\n")[0].replace("\n  ", " ").split("\n- ")
    assert all(line.endswith(".") or "Fault" in line for line in reasons)
    (number,) = re.findall(r"(\d+) more reasons?", text)
    assert len(reasons) + int(number) == len(chosen.reasons) + len(report.faults)
    assert report.parameters == (f"rows={report.source_images}", "full=True")
    assert all(parameter in text for parameter in report.parameters)
    # Of a source that has no more images than the sample, no more rows are asked for.
    report.sample_rows = report.source_images
    assert report.parameters == ("size=218x178", "num_images=N", "full=True")
    assert "rows=" not in report.headline()
    counts, report.num_images = report.num_images, 10**6
    assert report.parameters == ("size=218x178", "num_images=1000000", "full=True"), "as it was given"
    report.num_images = counts
    # Nor are they if chunk sizes hardly matter.
    report.sample_rows = 100
    report.recommendation = reports.recommended(
        report.variants[4], compared=False, hardly_matters=True, memory_images=123_456, reasons=()
    )
    assert " 120,000 " in report.to_text()
    assert report.parameters == ("num_images=N", "seconds=300", "full=True")
    assert "rows=" not in report.headline()
    # A source that is read in a few milliseconds is too small for that, whatever number is given.
    counts, report.num_images, report.source_images = (report.num_images, report.source_images), 500, 500
    assert report.parameters == ("size=218x178", "num_images=N", "seconds=300", "full=True")
    report.num_images, report.source_images = counts
    report.num_images = 10**6
    assert report.parameters == ("full=True",)
    assert " for 1,000,000," in report.to_text().replace("\n", " ")
    assert text.startswith("interrupted")
    assert not reports.folder_report().to_text().startswith("interrupted")


@pytest.mark.parametrize("full", [False, True])
def test_the_first_lines_are_the_answer_with_its_figure_and_threads(full: bool) -> None:
    first = reports.folder_report().to_text(full).partition("\n\n")[0]
    assert all(part in first for part in ("36 rows (4 MiB)", "76,210 images/s", "num_threads=2"))
    report = reports.folder_report()
    report.recommendation, report.enough_seconds = None, 90
    report.missing = [f"{one.label}: only 1 of 3 repeats were measured" for one in report.variants]
    first, reasons = report.to_text(full).split("\n\n")[:2]
    assert report.parameters[0] == "seconds=90"
    assert report.parameters[0] in first
    notes = [] if full else [f"- {text}" for text in report.notes]
    report.enough_seconds = None
    assert "seconds" not in report.to_text(full).partition("\n\n")[0]
    assert reasons.splitlines() == [*(f"- missing: {text}" for text in report.missing), *notes]


@pytest.mark.parametrize(("source_images", "named"), [(36, False), (37, True), (202_599, True)])
def test_a_source_smaller_than_a_default_chunk_gives_it_no_size(source_images: int, named: bool) -> None:
    report = reports.folder_report()
    report.source_images = source_images
    report.recommendation = reports.recommended(reports.packed(36), is_default=True, compared=False)
    assert ("36 rows (4 MiB)" in report.headline()) == named


def test_only_measured_cases_are_in_the_table_of_the_run_off() -> None:
    report = reports.folder_report()
    report.run_off.append(reports.failed(reports.packed(7), "window", "direct", "hot"))
    table = report.to_text(full=True).partition("\nrun-off")[2].partition("\n\n")[0].partition("\n")[2]
    assert len(table.splitlines()) == len(report.run_off)
    assert "7 rows" not in table


def test_the_run_off_has_ratios_within_turns() -> None:
    report, best = reports.folder_report(), reports.packed(36)
    others = [
        reports.measured(reports.packed(9), "window", "direct", "hot"),
        reports.measured(best, "window", "direct", "hot", num_threads=1),
        reports.measured(best, "window", "direct", "hot", num_threads=1, num_workers=2),
        reports.measured(best, "window", "direct", "hot", num_threads=1, num_workers=1),
    ]
    usual = reports.measured(best, "window", "direct", "hot")
    # The fourth turn was fast: medians of all repeats do not show it, ratios do.
    report.measurements = []
    report.run_off = [replace(usual, speeds=(100.0, 100.0, 100.0, 900.0), turns=(1, 2, 3, 4))]
    speeds = [(50.0, 50.0, 450.0), (99.0, 99.0, 1e6), (20.0,), (12.0,)]
    turns = [(2, 3, 4), (2, 3, 9), (7,), (7,)]
    report.run_off += [
        replace(one, speeds=some, turns=when) for one, some, when in zip(others, speeds, turns, strict=True)
    ]

    def column() -> list[tuple[str, ...]]:
        lines = report.to_text(full=True).partition("\nrun-off")[2].partition("\n\n")[0].splitlines()[2:]
        return sorted((words[-2 if "±" not in line else -3], words[-1]) for line in lines if (words := line.split()))

    assert column() == sorted([("100", "1.00"), ("50", "0.50"), ("99", "0.99"), ("20", "-"), ("12", "-")])
    # As in the answer, the turns of the sweep count, too, if those of the run-off are few.
    slow = [replace(one, speeds=(10.0, 10.0), turns=(-2, -1)) for one in others[:1]]
    report.measurements = [replace(usual, speeds=(100.0, 100.0), turns=(-2, -1)), *slow]
    assert ("50", "0.50") in column()
    report.measurements[1:] = [replace(slow[0], speeds=(10.0,) * 4, turns=(-4, -3, -2, -1))]
    report.measurements[:1] = [replace(usual, speeds=(100.0,) * 4, turns=(-4, -3, -2, -1))]
    assert ("10", "0.10") in column()
    # Of a small sample nothing is compared.
    report.recommendation = replace(report.recommendation, compared=False)
    assert {ratio for _, ratio in column()} == {"-"}


RATIO = re.compile(r"(\d+\.\d+) of a (memory copy|sequential read) with (\d+) thread")


@pytest.mark.parametrize("seed", range(20))
def test_no_figure_is_above_its_ceiling_and_a_noisy_one_is_left_out(seed: int) -> None:
    random, report = Random(seed), reports.folder_report()
    ratios = sorted(random.uniform(0.3, random.choice((1.0, 1.3, 3.0))) for _ in range(3))
    chosen = reports.recommended(reports.packed(36), of_ceiling=(ratios[1], ratios[0], ratios[2]), ceiling_threads=2)
    report.recommendation = chosen
    found, text = RATIO.search(report.headline()), report.headline()
    if ratios[2] > 1.5 * ratios[0]:
        assert found is None
        assert "2 threads" not in text
    elif ratios[1] >= 1:
        assert found is None
        assert "2 threads, within noise" in text
    else:
        assert (float(found[1]), found[3]) == (pytest.approx(ratios[1], abs=0.006), "2")
        assert float(found[1]) <= 1


def test_the_headline_says_why_nothing_could_be_compared() -> None:
    report = reports.folder_report()
    report.recommendation = reports.recommended(reports.packed(36), is_default=True, busy=True)
    assert all(part in report.headline() for part in ("vary", "36 rows", "seconds=300"))
    report.recommendation = dataclasses.replace(report.recommendation, best_in_median=True)
    assert report.headline().startswith("No chunk size is 15 % faster in the median: keep the default of 36 rows")
    assert all(part in report.headline() for part in ("vary", "36 rows", "seconds=300"))
    # Of a small source, the headline says how long an epoch takes; of a small sample, how many rows to measure.
    report.recommendation = reports.recommended(reports.packed(36), compared=False, images_per_s=1_000_000)
    assert all(part in report.headline() for part in (" 36 rows", f" {report.sample_rows / 1000:,.1f} ms", "rows="))
    report.recommendation = dataclasses.replace(report.recommendation, hardly_matters=True)
    assert all(part in report.headline() for part in (" 36 rows", f" {report.num_images / 1000:,.1f} ms"))
    assert "rows=" not in report.headline()
    report.recommendation = reports.recommended(reports.packed(36), is_default=True)
    assert not any(part in report.headline() for part in ("vary", "sample"))
    assert report.parameters == ("full=True",)
    # More time is advised only if it may change the answer, and is more than was given.
    report.recommendation = reports.recommended(reports.packed(36), is_default=True, unsure=True)
    assert "seconds=300" in report.parameters
    report.budget_seconds, report.measurements = 200, report.measurements[:1]
    assert report.parameters == ("full=True",)
    report.recommendation = reports.recommended(reports.packed(36), is_default=True)
    # A few images like the generated ones would get smaller chunks.
    report.kind = "generated"
    assert report.parameters == ("num_images=N", "full=True")
    assert "2,241" in report.headline()
    report.recommendation = reports.recommended(reports.packed(9), is_default=True)
    assert report.parameters == ("full=True",)
    assert "for sets" not in report.headline()
    # Generated images are many enough if an epoch takes 10 ms.
    report.recommendation = reports.recommended(reports.packed(36), compared=False, images_per_s=1_000_000)
    assert report.parameters == ("rows=10000", "full=True")
    assert "rows=10000" in report.headline()


@pytest.mark.parametrize(("seconds", "longer"), [(60, 300), (150, 300), (240, 960), (300, 1200)])
def test_a_busy_machine_needs_at_least_twice_the_time(seconds: float, longer: int) -> None:
    report = reports.folder_report()
    report.budget_seconds, report.recommendation = seconds, reports.recommended(reports.packed(36), busy=True)
    assert f"seconds={longer}" in report.headline()
    # So are only the cases that decide, unless nothing else was measured.
    only = ("orders='window'", "engines='direct'", "caches='hot'")
    assert report.parameters == (f"seconds={longer}", *only, "full=True")
    assert all(parameter in report.headline() for parameter in only)
    report.measurements = reports.decisive(report.variants)
    assert report.parameters == (f"seconds={longer}", "full=True")


def test_the_full_text_has_every_case_and_note() -> None:
    report = reports.file_report()
    report.measurements += [
        reports.failed(report.variants[1], "window", "direct", "cold", "no space left on device"),
        reports.measured(report.variants[4], "window", "direct", "hot", 61_234.0, batch_size=64),
    ]
    text = report.to_text(full=True)
    assert report.fix not in text  # The command that is recommended has the chunks to convert to.
    parts = ["no space left on device", "61.2k", report.notes[0], "7.64 GiB of memory", "memory copy, 2 threads"]
    parts += [variant.label for variant in report.variants]
    # The recommended variant and its ties are marked.
    for part in (*parts, "\n> 36 rows", "\n= 9 rows", "\n  2 rows"):
        assert part in text


def test_a_report_survives_json() -> None:
    for report in (reports.file_report(), reports.empty()):
        found = json.loads(json.dumps(report.to_json()))
        again = BenchReport.from_json(found)
        assert json.loads(json.dumps(again.to_json())) == found
        assert again.recommendation == report.recommendation
        assert [(one.case, one.turns) for one in again.run_off] == [(one.case, one.turns) for one in report.run_off]
    assert "/scratch" not in json.dumps(reports.file_report().to_json())


def test_text_from_outside_cannot_move_the_cursor() -> None:
    assert printable("a\x1b[31m\n\udc80é") == "a\\x1b[31m\\n\\udc80é"
    report = reports.folder_report()
    report.source = "/data/\x1b[31m"
    assert "\x1b" not in report.to_text(full=True)


def test_speeds_have_three_digits_and_the_spread_of_the_farthest_repeat() -> None:
    texts = {8.314: "8.31", 831.4: "831", 999.6: "1.00k", 8_314: "8.31k", 83_140: "83.1k", 831_400: "831k"}
    texts |= {1_516_000: "1.52M"}
    assert {speed: speed_text(speed) for speed in texts} == texts
    assert {speed: measured_text((speed,)) for speed in texts} == texts
    assert (measured_text((90.0, 100.0, 104.0)), measured_text(())) == ("100 ±10%", "-")


def table_of(rows: Sequence[int], *measurements: Measurement) -> SweepTable:
    report = reports.empty()
    report.variants = [reports.packed(one) for one in rows]
    report.measurements = list(measurements)
    return SweepTable(report.measurements, report.variants, report.run_off)


def test_the_table_holds_the_usual_settings_which_are_measured_first() -> None:
    plain = [reports.measured(reports.packed(rows), "window", "direct", "hot") for rows in (1, 36, 9)]
    others = [
        reports.measured(reports.packed(36), "window", "direct", "hot", 7e3, batch_size=size) for size in (64, 1024)
    ]
    table = table_of((1, 36, 9), *plain, *others)
    assert [one.label for one in table.variants] == ["1 row", "9 rows", "36 rows"]
    assert [table.found(name, "window", "direct", "hot") for name in ("1 row", "36 rows", "9 rows")] == plain
    assert table.found("36 rows", "full", "direct", "hot") is None
    assert table.others == others


def test_the_table_is_updated_by_the_run_off() -> None:
    report = reports.folder_report()
    report.run_off = [replace(one, speeds=2 * one.speeds) for one in report.run_off]
    found = SweepTable(report.measurements, report.variants, report.run_off).found("36 rows", "window", "direct", "hot")
    assert found.median == pytest.approx(70e3 + 36 * reports.ROW_BYTES / 1e3)


def test_orders_engines_and_caches_are_those_measured_in_their_order() -> None:
    cases = [("single", "default", "cold"), ("window", "direct", "hot"), ("sequential", "tuned", "cold")]
    table = table_of((36,), *(reports.measured(reports.packed(36), *names) for names in cases))
    assert table.orders == ["sequential", "window", "single"]
    assert (table.engines, table.caches) == (["direct", "tuned", "default"], ["hot", "cold"])


def test_chunk_sizes_are_compared_in_one_compression() -> None:
    report = reports.empty()
    gzip = [reports.packed(rows, "gzip") for rows in (36, 9)]
    report.variants = [*gzip, reports.contiguous(), reports.packed(36), reports.packed(9), reports.as_it_is()]
    compared = SweepTable(report.measurements, report.variants).compared()
    assert [one.label for one in compared] == ["as it is", "9 rows", "36 rows", "contiguous"]
    report.variants = [*gzip, *(reports.packed(rows, "lzf") for rows in (36, 9))]
    compared = SweepTable(report.measurements, report.variants).compared()
    assert [one.label for one in compared] == ["9 rows gzip", "36 rows gzip"]
