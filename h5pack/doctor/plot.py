"""Drawing of a doctor report: one bar per stage, the bottleneck in red."""

from __future__ import annotations

import os
import textwrap
from typing import Any

from h5pack.benchmark.plots import check_plot_file, save_figure
from h5pack.doctor.report import STAGE_TITLES, DoctorReport, bottleneck_stages, feeder_text
from h5pack.monitor.bottleneck import Stage, StageResult, rate_text
from h5pack.system.text import counted

_PLAIN, _BOTTLENECK, _TOGETHER, _MUTED, _INK = "#9db4c8", "#d1495b", "#33658a", "#777777", "#222222"


def draw_stages(report: DoctorReport, path: str | os.PathLike[str]) -> None:
    """Draw the report of `diagnose` into a .png, .svg or .pdf file.

    Raises
    ------
    OptionsError
        As for `h5pack.benchmark.plots.check_plot_file`.
    """
    check_plot_file(path)
    # Do not use pyplot, which would keep the figure and choose a backend for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    axes = figure.add_subplot()
    limits = bottleneck_stages(report.verdict, report.evidence)
    medians = [result.rates.median for result in report.stages if result.rates is not None]
    low = min(medians, default=1.0) / 3
    for height, result in enumerate(report.stages):
        _draw_bar(axes, height, result, low, result.stage in limits)
    axes.set_yticks(range(len(report.stages)), [STAGE_TITLES[result.stage] for result in report.stages])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(low, max(medians, default=10.0) * 4)
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:,.10g}")
    axes.set_xlabel("images/s, logarithmic (bar: median; line: lowest to highest repeat)")
    axes.grid(axis="x", color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    # parse_math=False, because a path may contain a dollar sign, which would start a formula.
    figure.suptitle(_title(report), fontsize=13, fontweight="bold", x=0.01, ha="left", parse_math=False)
    axes.set_title(_subtitle(report), fontsize=9, color=_MUTED, loc="left", parse_math=False)
    save_figure(figure, path, dpi=120)


def _draw_bar(axes: Any, height: int, result: StageResult, low: float, limits: bool) -> None:
    rates = result.rates
    if rates is None:
        reason = textwrap.shorten(f"not measured: {result.reason}", 90, placeholder=" ...")
        axes.text(low * 1.05, height, reason, va="center", fontsize=9, color=_MUTED, style="italic", parse_math=False)
        return
    color = _BOTTLENECK if limits else _TOGETHER if result.stage is Stage.EVERYTHING else _PLAIN
    axes.barh(height, rates.median - low, left=low, height=0.62, color=color)
    axes.plot([rates.low, rates.high], [height, height], color=_INK, linewidth=1.2, solid_capstyle="butt")
    axes.annotate(
        rate_text(rates.median) + ("   bottleneck" if limits else ""),
        (max(rates.median, rates.high), height),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=10,
        fontweight="bold" if limits else "normal",
        color=_BOTTLENECK if limits else _INK,
    )


def _title(report: DoctorReport) -> str:
    if report.verdict is None:
        return "Interrupted: no verdict"
    first_sentence, stop, _ = report.verdict_text.partition(". ")
    return textwrap.fill(first_sentence + stop.strip(), 84)


def _subtitle(report: DoctorReport) -> str:
    target, evidence = report.target, report.evidence
    parts = [os.path.basename(target.path), f"{target.rows:,} images of {target.images}", f"device {target.device}"]
    if evidence is not None:
        feed = f"batches of {evidence.batch_rows:,}, {feeder_text(evidence)}, {counted(evidence.cpus, 'CPU')}"
        parts.insert(2, feed)
    return textwrap.fill("  |  ".join(parts), 120)
