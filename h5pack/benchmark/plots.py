"""Check and save the figure files of `bench` and `doctor`, and draw the figure of a `bench` report."""

from __future__ import annotations

import importlib
import io
import os
import statistics
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from h5pack.benchmark.cases import FileVariant, SweepTable
from h5pack.benchmark.report import BenchReport, machine_text, speed_text
from h5pack.errors import OptionsError
from h5pack.system.files import write_atomically
from h5pack.system.parameters import output_file, require_local
from h5pack.system.text import counted, format_bytes, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = {".png": "png", ".svg": "svg", ".pdf": "pdf"}
_PANEL_INCHES, _HEIGHT_INCHES, _DPI = 6.2, 5.2, 150
_MAX_NAMES = 9
"""Maximum number of variants that are named along an axis. The recommended variant is named in addition."""
_DARK, _GRAY = "#202124", "#6e7378"


class _Series(NamedTuple):
    """One line of a panel: an order and an engine, with label and style."""

    order: str
    engine: str
    label: str
    color: str
    marker: str
    line: Any


# The colors are distinguishable with any kind of color vision (Okabe and Ito); the markers differ as well.
_DIRECT = (
    _Series("window", "direct", "direct: window shuffle", "#0072b2", "o", "-"),
    _Series("sequential", "direct", "direct: sequential", "#009e73", "^", "-"),
    _Series("full", "direct", "direct: full shuffle", "#d55e00", "s", "-"),
    _Series("single", "direct", "direct: one index a call", "#cc79a7", "D", "-"),
)
# For each of the other engines, only the first of these orders that was measured is drawn.
_TUNED = tuple(
    _Series(order, "tuned", f"h5py, tuned chunk cache: {order}", _GRAY, "v", (0, (4, 2)))
    for order in ("window", "sequential", "full", "single")
)
_DEFAULT = tuple(
    _Series(order, "default", f"plain h5py: {order}", _GRAY, "x", (0, (1, 1.5)))
    for order in ("single", "window", "full", "sequential")
)


def check_plot_file(path: str | os.PathLike[str]) -> None:
    """Raise OptionsError if a figure cannot be saved in this file, or matplotlib is missing."""
    require_local(path, "plot")
    target = Path(os.fsdecode(path))
    if target.suffix.lower() not in FORMATS:
        raise OptionsError.at(target, "figures are saved as .png, .svg or .pdf; choose one of these")
    file = Path(output_file(target)).absolute()
    is_loop = file.is_symlink()  # a link that leads to itself
    if is_loop or file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise OptionsError.at(target, "cannot be written; name a file in an existing, writable folder")
    try:
        importlib.import_module("matplotlib")
    except Exception as error:  # A broken package may raise other errors than ImportError.
        problem = f"figures need matplotlib, whose import fails ({error}); run pip install matplotlib"
        raise OptionsError(problem) from error


def save_figure(figure: Figure, path: str | os.PathLike[str], *, dpi: int) -> None:
    """Write a matplotlib figure atomically, also through a symbolic link. Equal figures give byte-identical files."""
    from matplotlib import rc_context

    target, out = Path(os.fsdecode(path)), io.BytesIO()
    kind = FORMATS[target.suffix.lower()]
    # Leave out dates and random identifiers, which would make the files of equal figures differ.
    metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with rc_context({"svg.hashsalt": "h5pack"}), warnings.catch_warnings():
        # Ignore the warning about characters that the font lacks; matplotlib draws boxes instead.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(out, format=kind, dpi=dpi, metadata=metadata)
    try:
        write_atomically(Path(output_file(target)), out.getvalue())
    except OSError as error:
        raise OptionsError.at(path, f"cannot be written ({error.strerror or error})") from error


def draw_bench(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw the report of `bench` into a file that `check_plot_file` accepts."""
    from matplotlib import rc_context
    from matplotlib.style import context

    with context("default"), rc_context({"font.size": 9}):
        save_figure(bench_figure(report), path, dpi=_DPI)


def bench_figure(report: BenchReport) -> Figure:
    """Return a figure of images/s by chunk size, with one panel per page-cache state."""
    # Do not use pyplot, which would keep the figure and choose a backend for the whole process.
    from matplotlib.figure import Figure

    table = SweepTable(report.measurements, report.variants, report.run_off)
    series = _drawn_series(table)
    caches = [
        cache
        for cache in table.caches
        if any(_speeds(table, variant, one, cache) for variant in table.compared() for one in series)
    ]
    width = _PANEL_INCHES * max(1, len(caches)) + (len(caches) < 2)
    figure = Figure(figsize=(width, _HEIGHT_INCHES), layout="constrained")
    # parse_math=False, because a path may contain a dollar sign, which would start a formula.
    figure.suptitle(_title(report, int(12 * width)), x=0.012, ha="left", fontsize=10, color=_DARK, parse_math=False)
    panels = figure.subplots(1, max(1, len(caches)), squeeze=False)[0]
    if not caches:
        panels[0].set_axis_off()
        panels[0].text(0.5, 0.5, "nothing was measured", ha="center", color=_GRAY, transform=panels[0].transAxes)
    for panel, cache in zip(panels, caches, strict=False):
        _draw_panel(panel, report, table, series, cache)
    legends = [panel.get_legend_handles_labels() for panel in panels]
    handles = {label: one for drawn, labels in legends for one, label in zip(drawn, labels, strict=True)}
    if handles:
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=3 if len(caches) > 1 else 2,
            frameon=False, fontsize=8.5, title="median; whiskers: slowest and fastest repeat", title_fontsize=8,
        )  # fmt: skip
    return figure


def _title(report: BenchReport, width: int) -> str:
    shape = "x".join(map(str, report.row_shape))
    about = f"{counted(report.num_images, 'image')} of {shape}, sample of {report.sample_rows:,}"
    source = printable(report.source)
    source = source if len(source) <= 60 else f"...{source[-57:]}"
    lines = [report.headline(), f"{source}: {about}; {machine_text(report.machine)}"]
    return "\n".join(textwrap.fill(line, width) for line in lines)


def _drawn_series(table: SweepTable) -> list[_Series]:
    """Return the lines to draw: all orders of the direct engine, and one order of each other engine."""
    found = [one for one in _DIRECT if one.order in table.orders and "direct" in table.engines]
    for series in (_TUNED, _DEFAULT):
        found += [one for one in series if one.order in table.orders and one.engine in table.engines][:1]
    return found


def _speeds(table: SweepTable, variant: FileVariant, series: _Series, cache: str) -> tuple[float, ...]:
    found = table.found(variant.label, series.order, series.engine, cache)
    return found.speeds if found is not None else ()


def _draw_panel(panel: Axes, report: BenchReport, table: SweepTable, series: list[_Series], cache: str) -> None:
    variants = sorted(table.compared(), key=lambda one: (one.is_input, one.chunk_bytes is None))
    # A line connects the chunk sizes. To the right of it, the contiguous variant and the input file are single points.
    chunked = [slot for slot, one in enumerate(variants) if one.chunk_bytes is not None and not one.is_input]
    alone = [[slot] for slot in range(len(variants)) if slot not in chunked]
    top = 0.0
    for one in series:
        speeds = [_speeds(table, variant, one, cache) for variant in variants]
        for slots in (chunked, *alone):
            drawn = [slot for slot in slots if speeds[slot]]
            low, medians, high = ([of(speeds[slot]) for slot in drawn] for of in (min, statistics.median, max))
            if drawn:
                # Lists, because Matplotlib 3.10 converts an array of one number in a way that NumPy deprecates.
                below_and_above = np.subtract([medians, high], [low, medians]).tolist()
                panel.errorbar(
                    drawn, medians, yerr=below_and_above, label=one.label, color=one.color, marker=one.marker,
                    linestyle=one.line, linewidth=1.5, markersize=5, capsize=2.5, elinewidth=0.9,
                )  # fmt: skip
                top = max(top, *high)
    top = max(top, _draw_ceiling(panel, report, cache, top))
    chosen = report.recommendation
    labels = [one.label for one in variants]
    if chosen is not None and chosen.judged_by == cache and chosen.variant in labels:
        text = f"{'recommended' if chosen.compared else 'perhaps'}: {chosen.variant}, {speed_text(chosen.images_per_s)}"
        panel.plot(
            labels.index(chosen.variant), chosen.images_per_s, "*", markersize=15, color="#f0e442",
            markeredgecolor=_DARK, zorder=7, label=text,
        )  # fmt: skip
        top = max(top, chosen.images_per_s)
    panel.set_ylim(0, 1.1 * top)
    _draw_axes(panel, variants, cache, None if chosen is None else chosen.variant)


def _draw_ceiling(panel: Axes, report: BenchReport, cache: str, top: float) -> float:
    """Draw the ceiling as a line, or only as text if its speed is far above `top`.

    Return the speed that the axis must reach to show the line; 0 without a line.
    """
    ceiling = report.ceiling_of(cache)
    if ceiling is None:
        return 0.0
    speed = statistics.median(ceiling.speeds)
    text = f"{ceiling}: {speed_text(speed)}"
    if speed > 3 * top:
        panel.text(0.015, 0.985, f"↑ {text}", va="top", fontsize=8, color=_DARK, transform=panel.transAxes)
        return 0.0
    panel.axhline(speed, color=_DARK, linewidth=1, linestyle=(0, (7, 3)), zorder=1)
    panel.annotate(
        text, (0.015, speed), (0, 3.5), xycoords=panel.get_yaxis_transform(), textcoords="offset points", fontsize=8,
        color=_DARK,
    )  # fmt: skip
    return speed


def _draw_axes(panel: Axes, variants: list[FileVariant], cache: str, chosen: str | None) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    step = -(-len(variants) // _MAX_NAMES)
    named = [slot for slot, one in enumerate(variants) if slot % step == 0 or one.label == chosen]
    panel.set_xticks(named, [_tick(variants[slot]) for slot in named], fontsize=8)
    for tick, slot in zip(panel.get_xticklabels(), named, strict=True):
        tick.set_fontweight("bold" if variants[slot].label == chosen else "normal")
    panel.set_xlim(-0.6, len(variants) - 0.4)
    panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.set_ylabel("images/s")
    panel.set_xlabel("chunk: rows and bytes")
    state = {"hot": "file in the page cache (hot)", "cold": "file dropped from the page cache (cold)"}
    panel.set_title(state[cache], fontsize=10, color=_DARK, loc="left")
    panel.grid(axis="y", color="#e3e5e8", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _tick(variant: FileVariant) -> str:
    size = "" if variant.chunk_bytes is None else f"\n{format_bytes(variant.chunk_bytes)}"
    return variant.label.replace(" ", "\n", 1) if not size else variant.label + size
