"""The report of `diagnose`, as JSON, as text and as a figure, with the verdict in words."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from h5pack.benchmark.plots import check_plot_file, save_figure
from h5pack.format import schema
from h5pack.monitor.advice import Advice, threads_advice
from h5pack.monitor.bottleneck import (
    INTERRUPTED,
    MIN_REPEATS,
    Bottleneck,
    Evidence,
    Outcome,
    Stage,
    StageResult,
    Verdict,
    rate_text,
)
from h5pack.system.text import counted, listed, printable_lines

_SMALL_GAIN = 1.05
_SLOWDOWN = 1.25  # The text mentions a slowdown of the step in the loop if it is at least this factor.
_FEW_BATCHES = 8  # In an epoch with fewer batches, the wait for the first batch takes much of the time.
_BAR, _WIDTH = 24, 110  # maximum lengths of a bar and of a line in the text
_PLAIN, _BOTTLENECK, _TOGETHER, _MUTED, _INK = "#9db4c8", "#d1495b", "#33658a", "#777777", "#222222"


@dataclass(frozen=True)
class TargetSummary:
    """Description of the file, device and step that were diagnosed."""

    path: str
    split: str | None
    images: str  # shape and dtype of a row, such as "218x178x3 uint8"
    rows: int  # number of rows in the split
    hot_rows: int  # number of rows used by the stages that read from the page cache
    device: str
    step: str
    labels: bool  # whether the step received labels
    normalize: str
    image_dataset: str = schema.IMAGES  # the names of the datasets in the file
    label_dataset: str | None = schema.LABELS
    faults: tuple[str, ...] = ()  # properties of the file that slow down reading, as in the report of `h5pack.info`
    asked_batch_size: int | None = None  # the `batch_size` of `diagnose`, if it was reduced; else None


@dataclass(frozen=True)
class DoctorReport:
    """Result of `diagnose`: the speed of every stage, the bottleneck, and the advice."""

    target: TargetSummary
    evidence: Evidence | None  #: None if the run was interrupted before all stages were measured
    stages: tuple[StageResult, ...]  #: all stages, in the order in which an image passes through them
    verdict: Verdict | None  #: None if the run was interrupted
    advice: tuple[Advice, ...]
    unknown: tuple[str, ...]  #: facts that could not be determined, and why, one line each; stages are not included
    failures: tuple[str, ...]  #: errors of the transform, of the model or its step, or of reading, one line each
    enough_seconds: float  #: recommended time budget in seconds, if that of this run was too short for all stages
    seconds: float  #: duration of the run
    machine: dict[str, Any]  #: processor, memory, file system and versions of packages

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that the text may mention, in Python syntax, such as ``num_threads=4``."""
        advice = (fragment for one in self.advice for fragment in one.parameters)
        seconds = [self.enough_seconds]
        if self.verdict is not None and self.verdict.outcome in (Outcome.NOISY, Outcome.SLOWED):
            seconds.append(_more_seconds(self.enough_seconds))
        return tuple(dict.fromkeys((*(f"seconds={one:g}" for one in seconds), *advice)))

    @property
    def verdict_text(self) -> str:
        """The verdict in words; empty if the run was interrupted."""
        if self.verdict is None or self.evidence is None:
            return ""
        return _VERDICT_TEXTS[self.verdict.outcome](self.verdict, self.evidence, self.enough_seconds)

    @property
    def first_epoch_text(self) -> str | None:
        """A text about the disk's speed if the disk slows down only the first epoch; None otherwise."""
        if self.verdict is None or self.verdict.first_epoch is None:
            return None
        return (
            f"The first epoch reaches at most {self.verdict.first_epoch}, because it reads from the disk. The "
            "same holds for an epoch that begins after the system has dropped the file from the page cache."
        )

    def advice_texts(self, *, moves: bool) -> list[str]:
        """Return the texts of advice that relieves the bottleneck if `moves` is true, else of all other advice."""
        return [one.text for one in self.advice if one.moves == moves]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict. The keys are stable across versions."""
        verdict = self.verdict
        return {
            **asdict(self.target),
            "faults": list(self.target.faults),
            "stages": [_stage_json(stage) for stage in self.stages],
            "bottleneck": [] if verdict is None else [one.value for one in verdict.bottlenecks],
            "fed": None if verdict is None else verdict.fed,
            "verdict": self.verdict_text or None,
            "first_epoch": self.first_epoch_text,
            "advice": self.advice_texts(moves=True),
            "notes": self.advice_texts(moves=False),
            "facts": None if self.evidence is None else self.evidence.to_json(),
            "unknown": list(self.unknown),
            "failures": list(self.failures),
            "interrupted": verdict is None,
            "enough_seconds": self.enough_seconds,
            "seconds": round(self.seconds, 2),
            "machine": self.machine,
        }

    def head(self) -> list[str]:
        """Return lines that describe the file, the loader, the device and the step."""
        target, evidence = self.target, self.evidence
        split = "all rows" if target.split is None else f"split {target.split}"
        lines = [f"{target.path}: {split}, {target.rows:,} images of {target.images}"]
        if (target.image_dataset, target.label_dataset) not in [(schema.IMAGES, schema.LABELS), (schema.IMAGES, None)]:
            labels = "none" if target.label_dataset is None else repr(target.label_dataset)
            lines.append(f"images: {target.image_dataset!r}; labels: {labels}")
        if evidence is not None:
            pinned = ", pinned" if evidence.pinned else ""
            feeder = f"H5Loader with {counted(evidence.parallel, 'thread')}"
            if evidence.num_workers is not None:
                feeder = f"a DataLoader with {counted(evidence.num_workers, 'worker')}"
            reduced = f" (reduced, because there are only {counted(target.rows, 'image')})"
            few = "" if target.asked_batch_size is None else reduced
            lines.append(
                f"fed by {feeder} in batches of {evidence.batch_rows:,}{few}{pinned}; "
                f"{counted(evidence.cpus, 'CPU')}; device {target.device}"
            )
        lines += [f"fault of the file: {fault}; 'h5pack info' prints the fix" for fault in target.faults]
        lines.append(f"step: {target.step}{'' if target.labels else ', without labels'}; normalize: {target.normalize}")
        if evidence is not None and evidence.one_thread_ratio is not None:
            times, threads = evidence.one_thread_ratio, evidence.step_threads
            lines.append(f"with one PyTorch thread instead of {threads}, the training is {times:.2f} times as fast")
        return lines

    def to_text(self) -> str:
        """Return the report as text: what limits the training and what to do about it, then a bar per stage."""
        interrupted = "Interrupted: no verdict. The table shows what was measured before."
        lines = _wrapped(self.verdict_text or interrupted)
        title = "What would make the training faster, most likely first:"
        lines += _listed(title, self.advice_texts(moves=True), "1. ")
        lines += ["", *self.head(), "", *_waterfall(self)]
        lines += ["", *_wrapped(self.first_epoch_text)] if self.first_epoch_text is not None else []
        lines += _listed("Other findings:", self.advice_texts(moves=False))
        return printable_lines([*lines, *_listed("Not determined:", self.unknown)])


def _listed(title: str, texts: Sequence[str], mark: str = "- ") -> list[str]:
    """Return lines: an empty one, the title, and the texts, numbered if `mark` is "1. ". [] if there are no texts."""
    lines = [line for number, text in enumerate(texts, 1) for line in _wrapped(text, mark.replace("1", str(number)))]
    return ["", title, *lines] if lines else []


def _stage_json(result: StageResult) -> dict[str, Any]:
    median, low, high, repeats = (None, None, None, 0) if result.rates is None else astuple(result.rates)
    return {
        "key": result.stage.value,
        "name": result.stage.words,
        "images_per_s": median,
        "min": low,
        "max": high,
        "repeats": repeats,
        "images": result.images,
        "cpus_used": None if result.cpus_used is None else round(result.cpus_used, 3),
        "not_measured": result.reason,
        "note": result.note,
    }


def _waterfall(report: DoctorReport) -> list[str]:
    medians = [result.rates.median for result in report.stages if result.rates is not None]
    low = 10 ** math.floor(math.log10(max(min(medians, default=1.0), 1e-3)))
    high = max(medians, default=10.0)
    width = max(len(stage.words) for stage in Stage)
    lines = [
        f"{'stage':{width}}  {'images/s':>9}  {'lowest - highest':>19}  {'CPUs':>4}  log scale from {rate_text(low)}"
    ]
    for result in report.stages:
        title, rates = f"{result.stage.words:{width}}", result.rates
        if rates is None:
            lines.append(f"{title}  not measured: {result.reason}")
            continue
        span = f"{rate_text(rates.low)} - {rate_text(rates.high)}"
        cpus = "" if result.cpus_used is None else f"{result.cpus_used:.1f}"
        size = math.log(max(rates.median, 1e-9) / low) / math.log(max(high / low, 1.001))
        bar = "#" * max(1, round(_BAR * min(1.0, size)))
        remark = "" if result.note is None else f"({result.note})"
        if result.late:
            remark = f"{remark} ({counted(rates.repeats, 'repeat')})".lstrip()
        if result.stage is Stage.EVERYTHING and report.evidence is not None:
            remark = f"the step waits {_stall_text(report.evidence)} of the time"
        lines.append(f"{title}  {rate_text(rates.median):>9}  {span:>19}  {cpus:>4}  {bar}  {remark}".rstrip())
    return lines


def _wrapped(text: str, mark: str = "") -> list[str]:
    wrapper = textwrap.TextWrapper(_WIDTH, break_on_hyphens=False, break_long_words=False)
    wrapper.initial_indent, wrapper.subsequent_indent = mark, " " * len(mark)
    return wrapper.wrap(text)


def _stall_text(evidence: Evidence) -> str:
    """Return the fraction of the loop's time in which the step waits, with its range, such as "3 % (1 to 7)"."""
    stall = evidence.stall_fraction or 0.0
    low, high = (f"{100 * one:.0f}" for one in evidence.stall_range or (stall, stall))
    return f"{100 * stall:.0f} %" + (f" ({low} to {high})" if low != high else "")


def _not_measured_text(verdict: Verdict, evidence: Evidence, enough_seconds: float) -> str:
    assert verdict.stage is not None
    result, feed = evidence.stages.get(verdict.stage), evidence.rates(evidence.feed_stage)
    reason = (None if result is None else result.reason) or INTERRUPTED
    text = f"No verdict: '{verdict.stage.words}' was not measured ({reason})."
    return text if feed is None else f"{text} '{evidence.feed_stage.words}' reaches {feed}."


def _too_little_text(verdict: Verdict, evidence: Evidence, enough_seconds: float) -> str:
    assert verdict.stage is not None
    rates = evidence.rates(verdict.stage)
    times = "never measured" if rates is None else f"measured only {counted(rates.repeats, 'time')}"
    return (
        f"Too little was measured to say what limits the training: '{verdict.stage.words}' was {times}, and "
        f"{MIN_REPEATS} times are needed. Give at least seconds={enough_seconds:g}."
        f"{_known_text(evidence)}{_threads_text(evidence)}"
    )


def _noisy_text(verdict: Verdict, evidence: Evidence, enough_seconds: float) -> str:
    low, high = evidence.stall_range or (0.0, 0.0)
    why = f"in repeats of the same loop, the step waits from {100 * low:.0f} to {100 * high:.0f} % of the time"
    if verdict.stage is Stage.EVERYTHING:
        rates = evidence.rates(verdict.stage)
        assert rates is not None
        why = f"repeats of the same loop reach {rate_text(rates.low)} to {rate_text(rates.high)} images/s"
    elif verdict.stage is not None:
        why = f"'{verdict.stage.words}' reaches {evidence.rates(verdict.stage)}"
        why += f", but the loop, which contains this stage, is faster: {evidence.rates(Stage.EVERYTHING)}"
    return (
        f"The measurements are too noisy to say what limits the training: {why}. Measure again when nothing else uses "
        f"the machine, or with more time, seconds={_more_seconds(enough_seconds):g}."
        f"{_known_text(evidence)}{_threads_text(evidence)}"
    )


def _known_text(evidence: Evidence) -> str:
    """Return text that compares the speed of the loader alone with that of the step alone; "" if one is unknown."""
    feed, step = evidence.rates(evidence.feed_stage), evidence.rates(Stage.STEP)
    if feed is None or step is None:
        return ""
    known = f" Measured alone, the loader reaches {feed}, and the step {step}"
    if min(feed.repeats, step.repeats) < MIN_REPEATS or feed.overlaps(step):
        return f"{known}. The speeds are too close, or the repeats too few, to say which is slower."
    slower = "the loader" if feed.high < step.low else "the step"
    return f"{known}: {slower} was slower in every repeat."


def _more_seconds(enough_seconds: float) -> float:
    """Return the time budget, in seconds, to recommend if the measurements were too noisy."""
    return max(60.0, 2 * enough_seconds)


def _threads_text(evidence: Evidence) -> str:
    """Return the advice on the number of PyTorch's CPU threads; "" if there is none."""
    advice = threads_advice(evidence)
    return "" if advice is None else f" {advice.text}"


def _slowed_text(verdict: Verdict, evidence: Evidence, enough_seconds: float) -> str:
    together, step = evidence.rates(Stage.EVERYTHING), evidence.rates(Stage.STEP)
    return (
        f"The step is slower in the loop than alone: everything together reaches {together}, the step alone {step}. "
        f"But the step waits for data only {_stall_text(evidence)} of the time, so the loader is fast enough. "
        "Something else takes the CPUs: the loader's own threads, or other programs."
        f"{_threads_text(evidence)} Measure again when nothing else uses the machine, or with more time, "
        f"seconds={_more_seconds(enough_seconds):g}."
    )


def _fed_text(verdict: Verdict, evidence: Evidence, enough_seconds: float) -> str:
    stall, threads = evidence.stall_fraction or 0.0, threads_advice(evidence)
    text = _limits_text(verdict)
    if threads is not None and threads.moves:
        times, step_threads = evidence.one_thread_ratio, evidence.step_threads
        text += f", slowed by PyTorch's {step_threads} threads (with one, the training is {times:.1f} times as fast)"
    text += f": the step waits for data {_stall_text(evidence)}"
    if evidence.normalize_fraction is not None and evidence.normalize_agrees:
        normalize = 100 * evidence.normalize_fraction
        step = 100 - normalize - 100 * stall
        text += f" of the time, normalizing takes {normalize:.0f} %, and the step itself {step:.0f} %"
    else:
        text += " of the time"
    unsteady = _unsteady_text(evidence)
    if verdict.slowdown >= _SLOWDOWN and not unsteady:
        text += f". Alone, normalizing and the step are {verdict.slowdown:.1f} times as fast as in the loop, "
        text += "where other programs or other threads, such as the loader's, take CPUs from them"
    return f"{text}. Without waiting, the training would gain at most {100 * verdict.gain - 100:.0f} %.{unsteady}"


def _unsteady_text(evidence: Evidence) -> str:
    """Return sentences about the stages whose repeats differ too much; "" if there are no such stages."""
    known = {stage: evidence.rates(stage) for stage in (Stage.NORMALIZE, Stage.STEP, Stage.EVERYTHING)}
    ranges = [
        f"'{stage.words}' ({rate_text(rates.low)} to {rate_text(rates.high)} images/s)"
        for stage, rates in known.items()
        if rates is not None and not rates.is_steady
    ]
    what = "differ by more than a factor of five, so only the step's waiting time is certain"
    again = "Measure again when nothing else uses the machine"
    return f" Repeats of {listed(ranges)} {what}. {again}." if ranges else ""


def _limited_text(verdict: Verdict, evidence: Evidence, enough_seconds: float) -> str:
    text = f"{_limits_text(verdict)}: the step waits {_stall_text(evidence)} of the time"
    if len(verdict.bottlenecks) > 1:
        text += " (the measurements cannot show which of the named bottlenecks it is)"
    grounds = "; ".join(dict.fromkeys(_grounds(name, evidence) for name in verdict.bottlenecks))
    return f"{text}. {grounds}; the step alone reaches {evidence.rates(Stage.STEP)}. {_gain_text(verdict)}"


def _contention_text(verdict: Verdict, evidence: Evidence, enough_seconds: float) -> str:
    what, why = "The loader and the step slow each other down", f"They share {counted(evidence.cpus, 'CPU')}."
    if evidence.epoch_batches is not None and evidence.epoch_batches < _FEW_BATCHES:
        what = "Short epochs limit the training"
        why = f"An epoch has only {counted(evidence.epoch_batches, 'batch')}, and the step waits for the first."
    return (
        f"{what}: the step waits {_stall_text(evidence)} of the time, although the loader alone reaches "
        f"{evidence.rates(evidence.feed_stage)}, and the step alone only {evidence.rates(Stage.STEP)}. {why} "
        f"{_gain_text(verdict)}"
    )


def _gain_text(verdict: Verdict) -> str:
    if verdict.gain < _SMALL_GAIN:
        return "However, the training is hardly slower than the step alone."
    return f"Without waiting, the training would be at most {verdict.gain:.3g} times as fast."


_VERDICT_TEXTS: dict[Outcome, Callable[[Verdict, Evidence, float], str]] = {
    Outcome.NOT_MEASURED: _not_measured_text,
    Outcome.TOO_LITTLE: _too_little_text,
    Outcome.NOISY: _noisy_text,
    Outcome.FED: _fed_text,
    Outcome.LIMITED: _limited_text,
    Outcome.CONTENTION: _contention_text,
    Outcome.SLOWED: _slowed_text,
}


def _limits_text(verdict: Verdict) -> str:
    names = " or ".join(name.words for name in verdict.bottlenecks)
    return f"{names[0].upper()}{names[1:]} limits the training"


def bottleneck_stage(name: Bottleneck, evidence: Evidence) -> Stage:
    """Return the stage whose speed shows that `name` is a bottleneck."""
    if name is Bottleneck.STORAGE and not evidence.fits_cache and evidence.rates(Stage.COLD) is not None:
        return Stage.COLD
    return Stage.HOT if name in (Bottleneck.STORAGE, Bottleneck.DECODING) else Stage(name.value)


def _grounds(name: Bottleneck, evidence: Evidence) -> str:
    """Return text about the measurement that shows that `name` is a bottleneck."""
    stage, why = bottleneck_stage(name, evidence), ""
    if stage is Stage.COLD:
        why = ", and the file does not fit into memory"
    elif name is Bottleneck.STORAGE:
        why = f", and a thread that reads waits {100 - 100 * (evidence.read_busy_fraction or 0.0):.0f} % of the time"
    elif name is Bottleneck.DECODING:
        words = "rows are read through the HDF5 library" if evidence.encoding is None else evidence.encoding.value
        why = f", and {words} in every epoch"
    return f"'{stage.words}' reaches {evidence.rates(stage)}{why}"


def draw_stages(report: DoctorReport, path: str | os.PathLike[str]) -> None:
    """Draw the report of `diagnose` into a .png, .svg or .pdf file; raise OptionsError if that is impossible."""
    check_plot_file(path)
    # Do not use pyplot, which would keep the figure and choose a backend for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    axes = figure.add_subplot()
    limits = set()
    if report.verdict is not None and report.evidence is not None:
        limits = {bottleneck_stage(name, report.evidence) for name in report.verdict.bottlenecks}
    medians = [result.rates.median for result in report.stages if result.rates is not None]
    low = min(medians, default=1.0) / 3
    for height, result in enumerate(report.stages):
        _draw_bar(axes, height, result, low, result.stage in limits)
    axes.set_yticks(range(len(report.stages)), [result.stage.words for result in report.stages])
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
