"""The picture of a bench: images/s by chunk size, with what is recommended."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import statistics
import textwrap
import unicodedata
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h5pack.bench.cell import Stored
from h5pack.bench.figure_axis import ChunkAxis, free_height
from h5pack.bench.report import BenchReport, Ceiling
from h5pack.bench.result_file import write_result
from h5pack.bench.statements import headline, machine_words
from h5pack.bench.swept import Swept
from h5pack.bench.wording import plain, size_text, speed_text
from h5pack.errors import OptionsError
from h5pack.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

FORMATS = {".png": "png", ".svg": "svg", ".pdf": "pdf"}
_PANEL_INCHES, _AXIS_INCHES, _HEIGHT_INCHES, _DPI = 5.8, 5.0, 5.0, 150
_INK, _QUIET = "#202124", "#6e7378"

# Colours that people with any kind of colour vision tell apart (Okabe and Ito), and another mark for each.
_DIRECT = {
    "window": ("#0072b2", "o", "window shuffle"),
    "sequential": ("#009e73", "^", "sequential"),
    "full": ("#d55e00", "s", "full shuffle"),
    "single": ("#cc79a7", "D", "one index a call (H5Dataset)"),
}
_OTHERS = {
    "tuned": ((0, (4, 2)), "v", "h5py, tuned chunk cache", ("window", "sequential", "full", "single")),
    "default": ((0, (1, 1.5)), "x", "plain h5py", ("single", "window", "full", "sequential")),
}
_ORDER_NAMES = {
    "window": "window shuffle",
    "sequential": "sequential",
    "full": "full shuffle",
    "single": "one index a call",
}


@dataclass(frozen=True)
class _Series:
    """One line of a panel."""

    order: str
    engine: str
    label: str
    colour: str
    marker: str
    line: Any


def require_matplotlib() -> None:
    """Fail early where no picture could be drawn.

    Raises
    ------
    OptionsError
        If there is no matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionsError("pictures need matplotlib, which is not installed: pip install 'h5pack[plot]'")


def picture_format(path: str | os.PathLike[str]) -> str:
    """Which kind of picture a file's name asks for: "png", "svg" or "pdf".

    Raises
    ------
    OptionsError
        If it is none of these.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise OptionsError(f"{Path(path)}: {suffix or 'no suffix'} is no kind of picture; end it in .png, .svg or .pdf")
    return FORMATS[suffix]


def require_plottable(path: str | os.PathLike[str]) -> None:
    """Fail early where a picture of this name could not be drawn.

    Raises
    ------
    OptionsError
        If there is no matplotlib, or the suffix is none of .png, .svg, .pdf.
    """
    picture_format(path)
    require_matplotlib()


def draw_bench(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw a report into a file; its suffix says of which kind.

    Raises
    ------
    OptionsError
        If there is no matplotlib, the suffix is another, or the file cannot be written.
    """
    kind = picture_format(path)
    require_matplotlib()
    write_result(path, _rendered(report, kind))


def svg_figure(report: BenchReport) -> str:
    """The picture as an ``<svg>`` element that needs nothing else, its texts drawn as paths.

    Raises
    ------
    OptionsError
        If there is no matplotlib.
    """
    require_matplotlib()
    text = _rendered(report, "svg").decode("utf-8")
    return re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S).strip()


def _rendered(report: BenchReport, kind: str) -> bytes:
    from matplotlib import rc_context
    from matplotlib.style import context

    out = io.BytesIO()
    # Dates and random identifiers would make each file another one.
    metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with context("default"), rc_context({"svg.hashsalt": "h5pack", "font.size": 9}), warnings.catch_warnings():
        # A path may have signs that the font has not; it is drawn with boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        _draw(report).savefig(out, format=kind, dpi=_DPI, metadata=metadata)
    return out.getvalue()


def _draw(report: BenchReport) -> Figure:
    # Not pyplot: that would keep the figure, and choose a backend for the whole process.
    from matplotlib.figure import Figure

    swept = Swept(report)
    caches = [cache for cache in swept.caches if _has_figures(swept, cache)]
    columns = max(1, len(caches))
    width = _PANEL_INCHES * columns + (1.0 if columns == 1 else 0)
    about = "\n".join(textwrap.fill(line, int(15 * width)) for line in _about(report))
    foot = 0.08 + 0.14 * (about.count("\n") + 1)
    whole = Figure(figsize=(width, _HEIGHT_INCHES + foot), layout="constrained")
    parts: Any = whole.subfigures(2, 1, height_ratios=[_HEIGHT_INCHES, foot])
    figure, below = parts
    title = _balanced(headline(report), int(9.5 * width))
    # A path may hold a dollar, which is no formula.
    figure.suptitle(title, x=0.012, ha="left", fontsize=11, fontweight="bold", color=_INK, parse_math=False)
    below.text(0.012, 0.5, about, va="center", fontsize=8, color=_QUIET, parse_math=False)
    panels = figure.subplots(1, columns, squeeze=False)[0]
    if not caches:
        panels[0].set_axis_off()
        panels[0].text(0.5, 0.5, "nothing was measured", ha="center", color=_QUIET, transform=panels[0].transAxes)
    axis = ChunkAxis(swept.compared(), _AXIS_INCHES)
    for panel, cache in zip(panels, caches, strict=False):
        _draw_panel(panel, report, swept, axis, cache)
    _write_legend(figure, panels, 3 if columns > 1 else 2)
    return whole


def _has_figures(swept: Swept, cache: str) -> bool:
    return any(
        swept.median(form.label, one.order, one.engine, cache) for form in swept.compared() for one in _series(swept)
    )


def _series(swept: Swept) -> list[_Series]:
    """What is drawn: all orders of the direct engine, and of each other engine the one that tells most."""
    found = []
    if "direct" in swept.engines:
        for order, (colour, marker, name) in _DIRECT.items():
            if order in swept.orders:
                found.append(_Series(order, "direct", f"direct: {name}", colour, marker, "-"))
    for engine, (line, marker, name, orders) in _OTHERS.items():
        order_found = next((order for order in orders if order in swept.orders), None)
        if engine in swept.engines and order_found is not None:
            label = f"{name}: {_ORDER_NAMES[order_found]}"
            found.append(_Series(order_found, engine, label, _QUIET, marker, line))
    return found


def _draw_panel(panel: Axes, report: BenchReport, swept: Swept, axis: ChunkAxis, cache: str) -> None:
    top = 0.0
    points: list[tuple[float, float]] = []
    for one in _series(swept):
        for line in (axis.line, *([form] for form in axis.apart)):
            top = max(top, _draw_line(panel, swept, axis, one, line, cache, points))
    chosen = report.recommendation
    if chosen is not None and chosen.judged_by == cache:
        top = max(top, chosen.images_per_s)
    fastest = max((speed for _, speed in points), default=0.0)
    ceilings = _draw_ceilings(panel, report, cache, top, fastest)
    top = max([top, *ceilings])
    panel.set_ylim(0, 1.14 * top)
    panel.set_xlim(*axis.limits)
    _draw_frame(panel, axis, cache, None if chosen is None else chosen.stored)
    form = next((one for one in report.files if chosen is not None and one.label == chosen.stored), None)
    place = None if form is None else axis.place(form)
    if chosen is not None and chosen.judged_by == cache and place is not None:
        text = f"{'recommended' if chosen.sure else 'perhaps'}: {chosen.stored}"
        # A ceiling's name stands above its line.
        points += [(place, height) for speed in ceilings for height in (speed, speed + 0.05 * top)]
        _draw_choice(panel, axis, (place, chosen.images_per_s), text, points, 1.14 * top)


def _draw_line(
    panel: Axes, swept: Swept, axis: ChunkAxis, one: _Series, forms: list[Stored], cache: str,
    points: list[tuple[float, float]],
) -> float:  # fmt: skip
    """Medians with whiskers from the slowest to the fastest repeat; the highest of these."""
    places, medians, lows, highs = [], [], [], []
    for form in forms:
        found = swept.found(form.label, one.order, one.engine, cache)
        if found is None or not found.speeds:
            continue
        places.append(axis.places[form.label])
        medians.append(found.median)
        lows.append(found.median - min(found.speeds))
        highs.append(max(found.speeds) - found.median)
    if not places:
        return 0.0
    points += zip(places, medians, strict=True)
    quiet = one.engine != "direct"
    panel.errorbar(
        places, medians, yerr=[lows, highs], label=one.label, color=one.colour, marker=one.marker, linestyle=one.line,
        linewidth=1.3 if quiet else 1.8, markersize=5, capsize=2.5, elinewidth=0.9, zorder=2 if quiet else 3,
    )  # fmt: skip
    return max(median + high for median, high in zip(medians, highs, strict=True))


def _draw_ceilings(panel: Axes, report: BenchReport, cache: str, top: float, fastest: float) -> list[float]:
    """The highest ceiling of each kind as a line, one that is far above `top` as a word; images/s of the lines."""
    highest: dict[str, Ceiling] = {}
    for ceiling in report.ceilings:
        if ceiling.cache == cache and ceiling.speeds:
            before = highest.get(ceiling.name)
            if before is None or statistics.median(before.speeds) < statistics.median(ceiling.speeds):
                highest[ceiling.name] = ceiling
    drawn = []
    for ceiling in highest.values():
        speed = statistics.median(ceiling.speeds)
        # On a disk of changing speed other reads may have been faster.
        kind = "ceiling: " if speed >= fastest else ""
        text = f"{kind}{ceiling.name}, {counted(ceiling.threads, 'thread')}: {speed_text(speed)}"
        style: dict[str, Any] = {"fontsize": 8, "color": _INK, "zorder": 4}
        if speed > 3 * top:
            # Drawn to scale it would press everything else to the ground.
            panel.text(0.015, 0.985, f"↑ {text}", va="top", transform=panel.transAxes, **style)
            continue
        drawn.append(speed)
        panel.axhline(speed, color=_INK, linewidth=1, linestyle=(0, (7, 3)), zorder=1)
        panel.annotate(
            text, (0.015, speed), (0, 3.5), xycoords=panel.get_yaxis_transform(), textcoords="offset points", **style
        )
    return drawn


def _draw_frame(panel: Axes, axis: ChunkAxis, cache: str, important: str | None) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    names = {form.label: _tick(form) for form in (*axis.line, *axis.apart)}
    labelled = axis.labelled(important, names)
    panel.set_xticks(
        [axis.places[form.label] for form in labelled], [names[form.label] for form in labelled], fontsize=8
    )
    for tick, form in zip(panel.get_xticklabels(), labelled, strict=True):
        if form.label == important:
            tick.set_fontweight("bold")
    panel.set_xticks(list(axis.places.values()), minor=True)
    panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _scale_text(value)))
    panel.set_ylabel("images/s")
    panel.set_xlabel("chunk: rows, and bytes (logarithmic)")
    state = {"hot": "file in the page cache (hot)", "cold": "file dropped from the page cache (cold)"}
    panel.set_title(state.get(cache, cache), fontsize=10, color=_INK, loc="left")
    panel.grid(axis="y", color="#e3e5e8", linewidth=0.7, zorder=0)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    if axis.border is not None:
        panel.axvline(axis.border, color="#c4c8cc", linewidth=0.8, zorder=0)


def _scale_text(value: float) -> str:
    """80.0k as 80k, 1.50M as 1.5M, 100k as it is."""
    if value < 1000:
        return f"{value:g}"
    return re.sub(r"\.(?=\D?$)", "", re.sub(r"(\.\d*?)0+(?=\D?$)", r"\1", speed_text(value)))


def _tick(form: Stored) -> str:
    if form.own:
        return "as it is" + ("" if form.chunk_rows is None else f"\n{counted(form.chunk_rows, 'row')}")
    if form.chunk_bytes is None or form.chunk_rows is None:
        return form.label.replace(" ", "\n")
    return f"{counted(form.chunk_rows, 'row')}\n{size_text(form.chunk_bytes)}"


def _draw_choice(
    panel: Axes, axis: ChunkAxis, at: tuple[float, float], text: str, points: list[tuple[float, float]], top: float
) -> None:
    """Mark what is recommended, and name it where nothing is in the way."""
    place, speed = at
    near = 0.3 * (axis.limits[1] - axis.limits[0])
    heights = [height for other, height in points if abs(other - place) <= near]
    # The star is not to be covered.
    star = (speed - 0.05 * top, speed + 0.05 * top)
    height = free_height([*heights, *star], top, close_to=speed)
    middle = (axis.limits[0] + axis.limits[1]) / 2
    panel.annotate(
        f"{text}\n{speed_text(speed)} images/s",
        (place, speed),
        (place, height),
        ha="center" if abs(place - middle) < near else "right" if place > middle else "left",
        va="center",
        fontsize=9,
        fontweight="bold",
        color=_INK,
        arrowprops={"arrowstyle": "-", "color": _INK, "linewidth": 0.9, "shrinkB": 6},
        bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.9},
        zorder=6,
    )
    panel.plot([place], [speed], "*", markersize=15, color="#f0e442", markeredgecolor=_INK, zorder=7)


def _balanced(text: str, width: int) -> str:
    """A text in as few lines as `width` allows, of about one length."""
    lines = textwrap.wrap(text, width)
    even = len(text) // max(1, len(lines))
    return next(
        "\n".join(tried)
        for tried in (textwrap.wrap(text, least) for least in range(even, width + 1))
        if len(tried) <= len(lines)
    )


def _about(report: BenchReport) -> list[str]:
    shape = " x ".join(map(str, report.row_shape))
    sample = f"rows of {shape} ({size_text(report.row_bytes)}), sample of {report.sample_rows:,}"
    return [
        f"{_shortened(plain(report.subject))}: {counted(report.images, 'image')}",
        f"{sample}; {machine_words(report.machine)}",
    ]


def _shortened(path: str, most: int = 60) -> str:
    """The end of a path, in so many columns; some signs take two."""
    kept, columns = "", 0
    for sign in reversed(path):
        columns += 2 if unicodedata.east_asian_width(sign) in "WF" else 1
        if columns > most:
            return f"...{kept}"
        kept = sign + kept
    return kept


def _write_legend(figure: SubFigure, panels: Any, columns: int) -> None:
    handles: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False,
            fontsize=8.5, title="median; whiskers: slowest and fastest repeat", title_fontsize=8,
        )  # fmt: skip
