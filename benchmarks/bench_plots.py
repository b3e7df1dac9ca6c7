"""The tables and the picture of `benchmarks.chunk_size` for the docs."""

from __future__ import annotations

import statistics
from typing import Any

from h5pack.bench.cell import Measurement, Stored
from h5pack.bench.report import BenchReport
from h5pack.bench.swept import Swept
from h5pack.wording import counted

_WAYS = (
    ("H5Loader, window", "window", "direct"),
    ("H5Loader, full shuffle", "full", "direct"),
    ("H5Dataset, one index", "single", "direct"),
    ("h5py tuned, window", "window", "tuned"),
    ("h5py, full shuffle", "full", "default"),
    ("h5py, one index", "single", "default"),
)


def chunk_size_table(result: dict[str, Any], cache: str) -> str:
    """Images/s of every form of chunks in one state of the page cache, as a Markdown table."""
    report = BenchReport.from_json(result)
    swept = Swept(report)
    lines = [f"| chunks | {' | '.join(name for name, _, _ in _WAYS)} |", "|---|" + "---|" * len(_WAYS)]
    for form in report.files:
        cells = [_cell(swept.found(form.label, order, engine, cache)) for _, order, engine in _WAYS]
        lines.append(f"| {_named(form, report)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _named(form: Stored, report: BenchReport) -> str:
    size = "" if form.chunk_bytes is None else f", {form.chunk_bytes / 2**20:.2g} MiB"
    chosen = report.recommendation is not None and report.recommendation.stored == form.label
    return f"**{form.label}**{size}" if chosen else f"{form.label}{size}"


def _cell(one: Measurement | None) -> str:
    if one is None or not one.speeds:
        return "-"
    reads = "" if one.amplification is None or one.amplification < 1.05 else f", {one.amplification:.1f}x read"
    return f"{one.median:,.0f}{reads}"


def chunk_size_about(result: dict[str, Any]) -> str:
    """The machine, the images, and the ceilings of the run, as a sentence."""
    machine, report = result["machine"], BenchReport.from_json(result)
    where = machine["processor"] + (" (a virtual machine)" if machine["virtual"] else "")
    rows = " x ".join(str(size) for size in report.row_shape)
    ceilings = "; ".join(
        f"{one.name}, {counted(one.threads, 'thread')}: {statistics.median(one.speeds):,.0f}" for one in report.ceilings
    )
    return (
        f"{where}, {machine['cpus']} CPUs, {machine['file_system']}; {report.sample_rows:,} images of "
        f"{rows}, batches of 256, windows of 16 chunks; medians, images/s. Ceilings: {ceilings}."
    )


def trials_table(result: dict[str, Any]) -> str:
    """The run-off: chunks, threads and workers, as a Markdown table."""
    report = BenchReport.from_json(result)
    lines = ["| chunks | read by | images/s |", "|---|---|---|"]
    for one in sorted(report.trials, key=lambda one: -one.median):
        count = one.cell.threads if one.cell.workers is None else one.cell.workers
        what = "H5Loader, thread" if one.cell.workers is None else "H5Dataset in a DataLoader, worker"
        speeds = f"{one.median:,.0f} ({min(one.speeds):,.0f} to {max(one.speeds):,.0f})" if one.speeds else "-"
        lines.append(f"| {one.cell.stored} | {what.replace(',', f', {count}')}{'s' * (count != 1)} | {speeds} |")
    return "\n".join(lines)


def again_table(result: dict[str, Any]) -> str:
    """The chunk sizes of a bench, measured once more, as a Markdown table and a sentence."""
    lines = ["| chunks | images/s |", "|---|---|"]
    for label, speed in result["images_per_s"].items():
        name = f"**{label}**" if label == result["recommended"] else label
        lines.append(f"| {name} | {speed['median']:,.0f} ({speed['min']:,.0f} to {speed['max']:,.0f}) |")
    best = f"{result['recommended']}, as recommended: {result['of_best']:.2f} of the best."
    return "\n".join([*lines, "", best])


def recommendation_text(result: dict[str, Any]) -> str:
    """What the bench said in the end."""
    chosen = BenchReport.from_json(result).recommendation
    if chosen is None:
        return "Nothing was recommended."
    return "\n".join([*(f"- {reason}" for reason in chosen.reasons), "", "```console", f"$ {chosen.command}", "```"])
