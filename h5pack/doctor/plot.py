"""Drawing of a report of `diagnose`: one bar per stage, with the bottleneck in red."""

from __future__ import annotations

import os
import textwrap
from typing import Any

from h5pack.benchmark.plots import check_plot_file, save_figure
from h5pack.doctor.report import STAGE_TITLES, DoctorReport, bottleneck_stage
from h5pack.monitor.bottleneck import Stage, StageResult, rate_text

_PLAIN, _BOTTLENECK, _TOGETHER, _MUTED, _INK = "#9db4c8", "#d1495b", "#33658a", "#777777", "#222222"


def draw_stages(report: DoctorReport, path: str | os.PathLike[str]) -> None:
    """Draw the report of `diagnose` into a .png, .svg or .pdf file; raise OptionsError if that is impossible."""
    check_plot_file(path)
    # Do not use pyplot, which would keep the figure and choose a backend for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    axes = figure.add_subplot()
    names = () if report.verdict is None else report.verdict.bottlenecks
    limits = {bottleneck_stage(name, report.evidence) for name in names if report.evidence is not None}
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
    # parse_math=False, because a path may contain a dollar sign, which would start a formula.
    title = textwrap.fill(report.verdict_text.partition(". ")[0] or "Interrupted: no verdict", 84)
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left", parse_math=False)
    head = "\n".join(textwrap.fill(line, 120) for line in report.head())
    axes.set_title(head, fontsize=9, color=_MUTED, loc="left", parse_math=False)
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
    text = rate_text(rates.median) + ("   bottleneck" if limits else "")
    where = (rates.high, height)
    axes.annotate(text, where, xytext=(6, 0), textcoords="offset points", va="center", fontsize=10, color=_INK)
