"""Which measurements compare chunks, and which vary something else."""

from __future__ import annotations

from h5pack.bench.swept import Base, Swept
from tests.bench import reports

ROW = 116_412


def report_of(*measurements: object, files: object = None) -> Swept:
    report = reports.empty()
    report.files = list(files)  # type: ignore[call-overload]
    report.measurements = list(measurements)  # type: ignore[arg-type]
    return Swept(report)


def test_the_commonest_settings_are_those_of_the_comparison() -> None:
    files = [reports.packed(rows, ROW) for rows in (1, 36, 9)]
    plain = [reports.measured(stored, "window", "direct", "hot") for stored in files]
    batch = [reports.measured(files[1], "window", "direct", "hot", 7e3, batch=size) for size in (64, 1024)]
    workers = reports.measured(files[1], "window", "direct", "hot", 8e3, threads=1, workers=3)
    both = reports.measured(files[1], "window", "direct", "hot", 9e3, batch=64, window=4)
    swept = report_of(*batch, *plain, workers, both, files=files)
    assert [form.label for form in swept.forms] == ["1 row", "9 rows", "36 rows"]
    assert swept.base("window", "direct", "hot") == Base(256, 16, 2, None)
    assert swept.base("window", "direct", "cold") is None
    assert [swept.found(stored.label, "window", "direct", "hot") for stored in files] == plain
    assert swept.found("36 rows", "full", "direct", "hot") is None
    sizes, processes = swept.variations()
    assert (sizes.name, sizes.values) == ("batch", {64: batch[0], 256: plain[1], 1024: batch[1]})
    # Threads that feed no loader of ours are no setting that varies.
    assert (processes.name, processes.values) == ("workers", {None: plain[1], 3: workers})
    assert swept.others == [both]


def test_of_equally_common_settings_the_first_counts() -> None:
    stored = reports.packed(36, ROW)
    first, *others = (reports.measured(stored, "window", "direct", "hot", window=size) for size in (16, 4, 64))
    swept = report_of(first, *others, files=[stored])
    assert swept.found("36 rows", "window", "direct", "hot") is first
    assert [list(one.values) for one in swept.variations()] == [[4, 16, 64]]


def test_names_come_in_their_order_and_new_ones_last() -> None:
    stored = reports.packed(36, ROW)
    cells = [("single", "default", "cold"), ("window", "direct", "hot"), ("sequential", "tuned", "cold")]
    swept = report_of(*(reports.measured(stored, *names) for names in cells), files=[stored])
    assert (swept.orders, swept.engines, swept.caches) == (
        ["sequential", "window", "single"],
        ["direct", "tuned", "default"],
        ["hot", "cold"],
    )


def test_what_was_not_measured_has_no_median() -> None:
    stored = reports.packed(36, ROW)
    failed = reports.failed(stored, "window", "direct", "cold")
    swept = report_of(failed, files=[stored])
    assert swept.found("36 rows", "window", "direct", "cold") is failed
    assert swept.median("36 rows", "window", "direct", "cold") is None


def test_the_file_asked_about_stands_first_and_compressed_chunks_apart() -> None:
    gzip = [reports.packed(rows, ROW, "gzip") for rows in (36, 9)]
    files = [*gzip, reports.contiguous(ROW), reports.packed(36, ROW), reports.packed(9, ROW), reports.packed(1, ROW)]
    swept = report_of(files=[*files, reports.as_it_is(ROW)])
    assert [form.label for form in swept.compared()] == ["as it is", "1 row", "9 rows", "36 rows", "contiguous"]
    assert [form.label for form in swept.compressed()] == ["9 rows", "9 rows gzip", "36 rows", "36 rows gzip"]


def test_where_all_chunks_are_compressed_these_are_compared() -> None:
    swept = report_of(files=[reports.packed(rows, ROW, kind) for kind in ("gzip", "lzf") for rows in (9, 1)])
    assert [form.label for form in swept.compared()] == ["1 row gzip", "9 rows gzip"]
    assert [form.label for form in swept.compressed()] == ["1 row gzip", "1 row lzf", "9 rows gzip", "9 rows lzf"]
