"""The stages as a picture: a bar each, the bottleneck in colour."""

from __future__ import annotations

import io
import os
import textwrap
from pathlib import Path
from typing import Any

from h5pack.doctor.diagnosis import Diagnosis
from h5pack.doctor.judgement import DECODING, STORAGE, rate_text
from h5pack.doctor.stage import COLD, EVERYTHING, HOT, NAMES, Stage
from h5pack.errors import OptionsError
from h5pack.pack.output import write_atomically
from h5pack.wording import counted

_PLAIN, _GUILTY, _TOGETHER, _MUTED = "#9db4c8", "#d1495b", "#33658a", "#777777"


def require_plot(path: str | os.PathLike[str]) -> None:
    """Make sure that a picture can be drawn, and written to `path`.

    Raises
    ------
    OptionsError
        If matplotlib is not installed, its folder is missing, or the ending is none that matplotlib writes.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise OptionsError("a plot needs matplotlib: pip install 'h5pack[plot]', or leave --plot out") from error
    target = Path(path)
    if not target.parent.is_dir():
        raise OptionsError(f"{target}: there is no folder {target.parent}; make it first")
    known = FigureCanvasAgg.filetypes
    if target.suffix.lstrip(".").lower() not in known:
        raise OptionsError(f"{target}: its ending is none of {', '.join(sorted(known))}; give a .png, say")


def draw(diagnosis: Diagnosis, path: str | os.PathLike[str]) -> None:
    """Write the picture of a diagnosis.

    Parameters
    ----------
    diagnosis : Diagnosis
    path : path
        Its ending says the format.

    Raises
    ------
    OptionsError
        As of `require_plot`.
    """
    require_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    guilty = guilty_stages(diagnosis)
    medians = [stage.rates.median for stage in diagnosis.stages if stage.rates is not None]
    low = min(medians, default=1.0) / 3
    for place, stage in enumerate(diagnosis.stages):
        _bar(axes, place, stage, low, stage.key in guilty)
    axes.set_yticks(range(len(diagnosis.stages)), [stage.name for stage in diagnosis.stages])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(low, max(medians, default=10.0) * 4)
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:,.10g}")
    axes.set_xlabel("images/s, logarithmic (bar: median; line: lowest to highest repeat)")
    axes.grid(axis="x", color="#e4e4e4")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle(_title(diagnosis), fontsize=13, fontweight="bold", x=0.01, ha="left")
    axes.set_title(_subtitle(diagnosis), fontsize=9, color=_MUTED, loc="left")
    target = Path(path)
    stream = io.BytesIO()
    figure.savefig(stream, format=target.suffix.lstrip(".").lower())
    try:
        write_atomically(target, stream.getvalue())
    except OSError as error:
        raise OptionsError(f"{target} cannot be written ({error.strerror or error}); give another place") from error


def guilty_stages(diagnosis: Diagnosis) -> set[str]:
    """Keys of the stages in which the bottleneck shows."""
    verdict, facts = diagnosis.verdict, diagnosis.facts
    found = set() if verdict is None else set(verdict.bottleneck)
    if STORAGE in found:
        found.add(HOT if facts is None or facts.fits_cache else COLD)
    if DECODING in found:
        found.add(HOT)
    return found & set(NAMES)


def _bar(axes: Any, place: int, stage: Stage, low: float, guilty: bool) -> None:
    rates = stage.rates
    if rates is None:
        reason = textwrap.shorten(f"not measured: {stage.reason}", 90, placeholder=" ...")
        axes.text(low * 1.05, place, reason, va="center", fontsize=9, color=_MUTED, style="italic")
        return
    colour = _GUILTY if guilty else _TOGETHER if stage.key == EVERYTHING else _PLAIN
    axes.barh(place, rates.median - low, left=low, height=0.62, color=colour)
    axes.plot([rates.low, rates.high], [place, place], color="#222222", linewidth=1.2, solid_capstyle="butt")
    text = rate_text(rates.median) + ("   bottleneck" if guilty else "")
    axes.annotate(
        text,
        (max(rates.median, rates.high), place),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=10,
        fontweight="bold" if guilty else "normal",
        color=_GUILTY if guilty else "#222222",
    )


def _title(diagnosis: Diagnosis) -> str:
    verdict = diagnosis.verdict
    if verdict is None:
        return "Interrupted: no verdict"
    return textwrap.fill(_sentence(verdict.text), 84)


def _sentence(text: str) -> str:
    """The first sentence."""
    head, stop, _ = text.partition(". ")
    return head + stop.strip()


def _subtitle(diagnosis: Diagnosis) -> str:
    subject, facts = diagnosis.subject, diagnosis.facts
    parts = [os.path.basename(subject.path), f"{subject.rows:,} images of {subject.images}", f"device {subject.device}"]
    if facts is not None:
        parts.insert(2, f"batches of {facts.batch_rows:,}, {facts.feeder}, {counted(facts.cpus, 'CPU')}")
    return textwrap.fill("  |  ".join(parts), 120)
