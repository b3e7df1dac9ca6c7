"""What a report says in sentences: nothing that was not measured, and no doubt left out."""

from __future__ import annotations

import dataclasses

from h5pack.bench.cell import Measurement
from h5pack.bench.report import BenchReport, Ceiling
from h5pack.bench.statements import (
    advice,
    ceiling_words,
    common_settings,
    facts,
    headline,
    legend,
    machine_words,
    recommended_facts,
    unmeasured,
    version_words,
)
from h5pack.bench.swept import Swept
from tests.bench import reports

ROW = 116_412


def chosen_of(report: BenchReport) -> object:
    assert report.recommendation is not None
    return report.recommendation


def test_facts_of_a_full_report() -> None:
    found = facts(reports.folder_report())
    assert dict(found[:4]) == {
        "subject": "/data/celebA: a folder of 202,599 images",
        "rows": "218 x 178 x 3, 114 KiB each",
        "sample": "4,096 rows, 455 MiB",
        "machine": "AMD EPYC 7763 64-Core Processor (a virtual machine), 2 CPUs, 8.2 GB of memory, ext4",
    }
    # What the phases sum up to is not what passed.
    assert found[4][1].startswith("59 s of 60 s (packing 5.1 s, warming up 0.4 s, page cache warm 22.0 s")
    assert found[4][1].endswith("; packed 4,210 images/s")
    assert [name for name, _ in found[5:]] == ["ceiling"] * 3
    assert found[6][1].startswith("memory copy, 2 threads, hot: 83.0k ±")


def test_facts_of_a_report_that_has_hardly_begun() -> None:
    report = reports.empty()
    report.machine = {}
    assert dict(facts(report))["sample"] == "none yet"
    assert dict(facts(report))["machine"] == "unknown"
    assert dict(facts(report))["time"] == "0 s of 60 s"
    assert version_words({}) == ""
    assert machine_words({"cpus": 1, "file_system": None}) == "1 CPU"
    assert ceiling_words(Ceiling("memory copy", 1, "hot", ())) == ""


def test_versions_that_are_not_known_are_left_out() -> None:
    assert version_words(reports.MACHINE) == (
        "Linux 6.1.0-18-cloud-amd64, Python 3.11.9, h5pack 0.6.0, h5py 3.16.0, numpy 2.4.6, torch 2.13.0"
    )


def test_settings_that_all_figures_have_are_said_once_and_exceptions_named() -> None:
    report = reports.folder_report()
    assert common_settings(Swept(report)) == (
        "batches of 256 rows; windows of 16 chunks; 2 threads, but 1 thread for single and default"
    )
    report.measurements = [one for one in report.measurements if one.cell.engine == "direct"]
    full = [one for one in report.measurements if one.cell.order == "full"]
    report.measurements += [
        dataclasses.replace(one, cell=dataclasses.replace(one.cell, engine="tuned", batch=64)) for one in full
    ]
    assert common_settings(Swept(report)) == (
        "batches of 256 rows, but batches of 64 rows for tuned; windows of 16 chunks; "
        "2 threads, but 1 thread for single"
    )


def test_the_legend_explains_what_is_there_and_nothing_else() -> None:
    report = reports.empty()
    assert legend(report, ">", "=") == []
    report.files = [reports.packed(36, ROW)]
    report.measurements = reports.sweep(report.files, engines=("default",), orders=("single",))
    texts = [text for _, text in legend(report, ">", "=")]
    assert "recommended" not in texts[0]
    assert texts[1:] == ["single: one random index a call", "default: plain h5py", "1 thread"]
    assert "★: recommended; ≈: as fast" in legend(reports.folder_report(), "★", "≈")[0][1]


def test_reasons_are_said_once_with_what_they_hold_for() -> None:
    report = reports.empty()
    files = [reports.packed(rows, ROW) for rows in (1, 2, 9)]
    report.files = [*files, reports.contiguous(ROW)]
    report.measurements = [
        *reports.sweep(files, caches=("hot",)),
        *(reports.failed(one, "window", "direct", "cold") for one in files),
        *(reports.failed(one, "single", "default", "cold") for one in files),
    ]
    report.trials = [reports.failed(files[0], "window", "direct", "hot", "out of\nmemory")]
    assert unmeasured(report) == [
        f"all that is cold: {reports.REASON}",
        "1 row, window, direct, hot: out of\\nmemory",
        "contiguous, tuned: without chunks there is no chunk cache",
    ]


def test_what_fails_here_and_there_is_named_and_the_rest_counted() -> None:
    report = reports.empty()
    report.files = [reports.packed(rows, ROW) for rows in range(1, 8)]
    report.measurements = [
        *(reports.measured(one, "window", "direct", "hot") for one in report.files),
        *(reports.failed(one, "full", "default", "hot", "slow") for one in report.files[1:]),
        reports.measured(report.files[0], "full", "default", "hot"),
    ]
    (text,) = unmeasured(report)
    assert text.startswith("2 rows, full, default, hot; 3 rows, full, default, hot; ")
    assert text.endswith("5 rows, full, default, hot; and 2 more (--json lists all): slow")


def test_no_speeds_and_no_reason_is_a_want_of_time() -> None:
    report = reports.empty()
    cell = reports.measured(reports.packed(1, ROW), "window", "direct", "hot").cell
    report.measurements = [Measurement(cell)]
    assert unmeasured(report) == ["1 row, window, direct, hot: the time was over before"]


def test_the_advice() -> None:
    chosen = reports.recommended(reports.packed(36, ROW))
    read = "read it with batches of 256, a window of 16 chunks and 2 threads."
    assert advice(chosen) == f"Pack it in chunks of 36 rows, and {read}"
    packed = dataclasses.replace(chosen, compression="gzip", chunk_rows=1)
    assert advice(packed) == f"Pack it in chunks of 1 row, compressed with gzip, and {read}"
    assert advice(dataclasses.replace(chosen, convert=False)) == f"Keep the file as it is, and {read}"
    doubtful = advice(dataclasses.replace(chosen, sure=False))
    assert doubtful == f"Too little was measured to be sure. Perhaps pack it in chunks of 36 rows, and {read}"


def test_what_was_measured_is_compared_with_the_highest_ceiling_of_the_same_cache() -> None:
    report = reports.folder_report()
    chosen = reports.recommended(reports.packed(36, ROW), 41_500.0)
    found = dict(recommended_facts(report, chosen))
    assert found["measured"] == "41,500 images/s, hot; 0.50 of the memory copy (2 threads)"
    assert found["h5py"].startswith("rdcc_nbytes=0 rdcc_nslots=114 rdcc_w0=1 (")
    report.ceilings = [Ceiling("memory copy", 2, "hot", ())]
    found = dict(recommended_facts(report, dataclasses.replace(chosen, cache=None)))
    assert found["measured"] == "41,500 images/s, hot"
    assert "h5py" not in found


def test_the_headline_says_what_was_found_and_how_sure_that_is() -> None:
    report = reports.folder_report()
    assert headline(report).startswith("Chunks of 36 rows (4 MiB) give 76,200 images/s in shuffled batches on this ")
    assert headline(report).endswith(" times as fast as plain h5py, one index a call")
    report.complete = False
    assert headline(report).endswith(" (interrupted)")
    report.recommendation = dataclasses.replace(reports.recommended(report.files[3]), sure=False)
    assert headline(report).startswith("Too little was measured to be sure, but perhaps chunks of 36 rows")
    # A ratio would sound surer than it is.
    assert " times " not in headline(report)
    report.recommendation = None
    assert headline(report) == "Images/s by chunk size; too little was measured to recommend one (interrupted)"


def test_the_headline_of_a_file_compares_with_the_file() -> None:
    report = reports.foreign_report()
    own = Swept(report).median("as it is", "single", "default", "hot")
    assert own is not None
    times = f"{76_210 / own:,.0f} times as fast as plain h5py on the file as it is, one index a call"
    assert headline(report).endswith(f", {times}")
    report.recommendation = reports.recommended(report.files[0], 23_000.0, convert=False)
    assert headline(report).startswith("The file as it is gives 23,000 images/s")
    report.measurements = []
    assert " times " not in headline(report)
