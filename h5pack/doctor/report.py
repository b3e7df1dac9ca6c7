"""The report of `diagnose`, as JSON and as text. Only this module puts a verdict into words."""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from h5pack.monitor.advice import BOTTLENECK_WORDS, Advice
from h5pack.monitor.bottleneck import (
    Bottleneck,
    Doubt,
    Evidence,
    Outcome,
    Rates,
    Stage,
    StageResult,
    Trial,
    Verdict,
    rate_text,
)
from h5pack.system.text import counted

STAGE_TITLES = {
    Stage.COLD_STORED: "storage cold, stored order",
    Stage.COLD: "storage cold, loader's order",
    Stage.HOT: "storage hot",
    Stage.LOADER: "loader only",
    Stage.TRANSFORM: "loader and transform",
    Stage.COPY: "host-to-device copy",
    Stage.NORMALIZE: "normalize",
    Stage.STEP: "step alone",
    Stage.EVERYTHING: "everything together",
}
_BAR = 24
_WIDTH = 110


@dataclass(frozen=True)
class TargetSummary:
    """Description of the file, device and step that were diagnosed."""

    path: str
    split: str | None
    images: str  # shape and dtype of a row, such as "178x218x3 uint8"
    rows: int  # in the split
    hot_rows: int  # that the stages read which run from the page cache
    device: str
    step: str
    labels: bool  # whether the step received labels
    normalize: str


@dataclass(frozen=True)
class DoctorReport:
    """Result of `diagnose`: the speed of every stage, the bottleneck, and the advice."""

    target: TargetSummary
    evidence: Evidence | None  # None if the run was interrupted before all stages were measured
    stages: tuple[StageResult, ...]  # all stages, in the order in which an image passes through them
    verdict: Verdict | None  # None if the run was interrupted
    advice: tuple[Advice, ...]
    unknown: tuple[str, ...]  # what could not be determined, apart from the stages, and why
    failures: tuple[str, ...]  # errors of the user's transform and model and of reading, one line each
    seconds: float  # duration of the run
    machine: dict[str, Any]  # from `machine_facts`

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that the advice mentions, in Python syntax, such as ``num_threads=4``."""
        return tuple(dict.fromkeys(fragment for one in self.advice for fragment in one.parameters))

    @property
    def verdict_text(self) -> str:
        """The verdict in words; empty if the run was interrupted."""
        return "" if self.verdict is None or self.evidence is None else _verdict_text(self.verdict, self.evidence)

    @property
    def first_epoch_text(self) -> str | None:
        """A sentence about what slows the first epoch; None if that is the same as in later epochs."""
        if self.verdict is None or self.verdict.first_epoch is None:
            return None
        return (
            f"The first epoch reaches at most {self.verdict.first_epoch}, because it reads from the disk. So does any "
            "epoch after the system has dropped the file from the page cache."
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict. The keys are stable across versions."""
        verdict = self.verdict
        trial = None if self.evidence is None else self.evidence.trial
        return {
            **asdict(self.target),
            "stages": [_stage_json(stage) for stage in self.stages],
            "bottleneck": [] if verdict is None else [one.value for one in verdict.bottlenecks],
            "fed": None if verdict is None else verdict.fed,
            "sure": False if verdict is None else verdict.certain,
            "verdict": self.verdict_text or None,
            "first_epoch": self.first_epoch_text,
            "advice": [one.text for one in self.advice if one.moves],
            "notes": [one.text for one in self.advice if not one.moves],
            "trial": None if trial is None else _trial_json(trial),
            "facts": None if self.evidence is None else self.evidence.to_json(),
            "unknown": list(self.unknown),
            "failures": list(self.failures),
            "interrupted": verdict is None,
            "seconds": round(self.seconds, 2),
            "machine": self.machine,
        }

    def to_text(self) -> str:
        """Return the report as text: a bar per stage, the verdict, and the advice."""
        lines = [*_head(self), "", *_waterfall(self), ""]
        if self.verdict is None:
            return "\n".join([*lines, "Interrupted: no verdict. The table shows what was measured before."])
        lines += _wrapped(self.verdict_text)
        if self.first_epoch_text is not None:
            lines += _wrapped(self.first_epoch_text)
        moves = [one.text for one in self.advice if one.moves]
        if moves:
            lines += ["", "What would make it faster, the most usual causes first:"]
            lines += [line for number, item in enumerate(moves, 1) for line in _wrapped(item, f"{number}. ")]
        notes = [one.text for one in self.advice if not one.moves]
        for title, items in (("Other findings:", notes), ("Not determined:", self.unknown)):
            if items:
                lines += ["", title, *(line for item in items for line in _wrapped(item, "- "))]
        return "\n".join(lines)


def bottleneck_stages(verdict: Verdict | None, evidence: Evidence | None) -> set[Stage]:
    """Return the stages whose low speed shows the bottleneck."""
    names = set() if verdict is None else set(verdict.bottlenecks)
    found = {Stage(one.value) for one in names - {Bottleneck.STORAGE, Bottleneck.DECODING}}
    if Bottleneck.STORAGE in names:
        found.add(Stage.HOT if evidence is None or evidence.fits_cache else Stage.COLD)
    return found | ({Stage.HOT} if Bottleneck.DECODING in names else set())


def feeder_text(evidence: Evidence) -> str:
    """Return a description of the loader and its number of threads or workers."""
    if evidence.num_workers is None:
        return f"H5Loader with {counted(evidence.parallel, 'thread')}"
    return f"a DataLoader with {counted(evidence.num_workers, 'worker')}"


def _stage_json(result: StageResult) -> dict[str, Any]:
    rates = result.rates
    return {
        "key": result.stage.value,
        "name": STAGE_TITLES[result.stage],
        "images_per_s": None if rates is None else rates.median,
        "min": None if rates is None else rates.low,
        "max": None if rates is None else rates.high,
        "repeats": 0 if rates is None else rates.repeats,
        "images": result.images,
        "cpus_used": None if result.cpus_used is None else round(result.cpus_used, 3),
        "not_measured": result.reason,
        "note": result.note,
    }


def _trial_json(trial: Trial) -> dict[str, Any]:
    def speeds(rates: Rates) -> dict[str, float]:
        return {"images_per_s": rates.median, "min": rates.low, "max": rates.high}

    named = {"stage": trial.stage.value, "name": STAGE_TITLES[trial.stage], "parallel": trial.number}
    return {**named, **speeds(trial.after), "before": speeds(trial.before)}


def _head(report: DoctorReport) -> list[str]:
    target, evidence = report.target, report.evidence
    split = "all rows" if target.split is None else f"split {target.split}"
    lines = [f"{target.path}: {split}, {target.rows:,} images of {target.images}"]
    if evidence is not None:
        pinned = ", pinned" if evidence.pinned else ""
        lines.append(
            f"fed by {feeder_text(evidence)} in batches of {evidence.batch_rows:,}{pinned}; "
            f"{counted(evidence.cpus, 'CPU')}; device {target.device}"
        )
    lines.append(f"step: {target.step}{'' if target.labels else ', without labels'}; normalize: {target.normalize}")
    return lines


def _waterfall(report: DoctorReport) -> list[str]:
    medians = [result.rates.median for result in report.stages if result.rates is not None]
    low = 10 ** math.floor(math.log10(max(min(medians, default=1.0), 1e-3)))
    high = max(medians, default=10.0)
    width = max(map(len, STAGE_TITLES.values()))
    lines = [
        f"{'stage':{width}}  {'images/s':>9}  {'lowest - highest':>19}  {'CPUs':>4}  logarithmic from {rate_text(low)}"
    ]
    for result in report.stages:
        title, rates = STAGE_TITLES[result.stage], result.rates
        if rates is None:
            lines.append(f"{title:{width}}  not measured: {result.reason}")
            continue
        span = f"{rate_text(rates.low)} - {rate_text(rates.high)}"
        cpus = "" if result.cpus_used is None else f"{result.cpus_used:.1f}"
        size = math.log(max(rates.median, 1e-9) / low) / math.log(max(high / low, 1.001))
        bar = "#" * max(1, round(_BAR * min(1.0, max(0.0, size))))
        line = f"{title:{width}}  {rate_text(rates.median):>9}  {span:>19}  {cpus:>4}  {bar}  {_remark(result, report)}"
        lines.append(line.rstrip())
    return lines


def _remark(result: StageResult, report: DoctorReport) -> str:
    stall = None if report.evidence is None else report.evidence.stall_fraction
    if result.stage is Stage.EVERYTHING and stall is not None:
        return f"the step waits {_percent(stall)}"
    return "" if result.note is None else f"({result.note})"


def _wrapped(text: str, mark: str = "") -> list[str]:
    wrapper = textwrap.TextWrapper(_WIDTH, break_on_hyphens=False, break_long_words=False)
    wrapper.initial_indent, wrapper.subsequent_indent = mark, " " * len(mark)
    return wrapper.wrap(text)


def _verdict_text(verdict: Verdict, evidence: Evidence) -> str:
    if verdict.outcome is Outcome.NO_LOADER:
        return f"No verdict: the loader was not measured ({_reason(evidence, evidence.feed_stage)})."
    if verdict.outcome is Outcome.NO_STEP:
        causes = [BOTTLENECK_WORDS[name] for name in verdict.feed_causes if name is not Bottleneck.LOADER]
        limited = f", limited by {' or '.join(causes)}" if causes else ""
        reason = _reason(evidence, Stage.STEP)
        return f"No verdict: the step was not measured ({reason}). The loader reaches {verdict.feed}{limited}."
    if verdict.outcome is Outcome.CONTRADICTION:
        return _contradiction_text(verdict, evidence)
    if verdict.outcome is Outcome.FED:
        return _fed_text(verdict, evidence)
    names, together, step = verdict.bottlenecks, evidence.rates(Stage.EVERYTHING), evidence.rates(Stage.STEP)
    text = f"The bottleneck is {' or '.join(BOTTLENECK_WORDS[name] for name in names)}"
    if len(names) > 1:
        text += " (these measurements do not tell which)"
    text += f": {'; '.join(_grounds(name, verdict, evidence) for name in names)}."
    if together is not None and step is not None:
        percent = 100 * together.median / step.median
        text += f" Everything together reaches {together}, {percent:.0f} % of the step's own speed."
    return text if verdict.doubt is None else f"{text} {_doubt_text(verdict.doubt, verdict.certain, evidence)}"


def _contradiction_text(verdict: Verdict, evidence: Evidence) -> str:
    assert verdict.slowest is not None
    lane, rates = verdict.slowest
    together = evidence.rates(Stage.EVERYTHING)
    step = "" if lane is Bottleneck.STEP else f", while the step reaches {evidence.rates(Stage.STEP)}"
    waits = "" if evidence.stall_fraction is None else f", and the step waits {_percent(evidence.stall_fraction)}"
    why = "The machine's speed changed meanwhile"
    if together is not None and together.median < rates.median:
        cpus = counted(evidence.cpus, "CPU")
        why = f"Either the stages slow each other down (they share {cpus}), or the machine's speed changed meanwhile"
    return (
        "No verdict, because the measurements contradict each other. Each measured alone, the slowest is "
        f"{BOTTLENECK_WORDS[lane]} ({rates}){step}. But everything together reaches {together}{waits}. {why}; measure "
        "again with more seconds, and with nothing else running."
    )


def _fed_text(verdict: Verdict, evidence: Evidence) -> str:
    together, step, feed = evidence.rates(Stage.EVERYTHING), evidence.rates(Stage.STEP), verdict.feed
    assert step is not None and feed is not None  # noqa: PT018
    text = f"The loader is fast enough: the step reaches {step} alone and {together} in the training loop"
    if evidence.stall_fraction is not None:
        text += f", where it waits {_percent(evidence.stall_fraction)}"
    if feed.median < 1.5 * step.median:
        return f"{text}. But the loader has little to spare ({feed}): a faster step would wait for it."
    return f"{text}. The loader could deliver {feed}."


def _grounds(name: Bottleneck, verdict: Verdict, evidence: Evidence) -> str:
    """Return the measurement that makes `name` a bottleneck."""
    rates = evidence.rates
    if name is Bottleneck.STORAGE and not evidence.fits_cache and rates(Stage.COLD) is not None:
        return f"from the disk, the loader reaches {rates(Stage.COLD)}, and the file does not fit into memory"
    if name is Bottleneck.STORAGE:
        waits = 1 - (evidence.read_busy_fraction or 0.0)
        return f"the loader reaches {verdict.feed}, and its reads wait for the disk or the network {_percent(waits)}"
    if name is Bottleneck.DECODING:
        why = "rows are read through the HDF5 library" if evidence.encoding is None else evidence.encoding.value
        return f"the loader reaches {verdict.feed}, and {why} in every epoch"
    if name is Bottleneck.LOADER:
        return f"{feeder_text(evidence)} reaches {rates(Stage.LOADER)}"
    if name is Bottleneck.TRANSFORM:
        alone = rates(Stage.LOADER)
        without = "" if alone is None else f" and {alone} without it"
        return f"the loader reaches {rates(Stage.TRANSFORM)} with the transform{without}"
    work = {Bottleneck.COPY: "copying", Bottleneck.NORMALIZE: "normalizing", Bottleneck.STEP: "the step"}[name]
    return f"{work} alone reaches {rates(Stage(name.value))}"


def _doubt_text(doubt: Doubt, certain: bool, evidence: Evidence) -> str:
    why = {
        Doubt.SHARED_CPUS: f"the stages share {counted(evidence.cpus, 'CPU')}",
        Doubt.OTHER_PROCESSES: "other processes also use the CPUs",
        Doubt.SLOWER_TOGETHER: (
            "the stages wait for each other (Python's GIL, memory, synchronisation), or the machine's speed changed"
        ),
    }
    if doubt is Doubt.NO_LOOP:
        text = f"everything together was not measured ({_reason(evidence, Stage.EVERYTHING)})"
    else:
        text = f"the loop is slower than its slowest stage alone, because {why[doubt]}"
    return f"{text[0].upper()}{text[1:]}." if certain else f"This is not certain: {text}."


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} % of the time"


def _reason(evidence: Evidence, stage: Stage) -> str:
    result = evidence.stages.get(stage)
    return (result.reason if result is not None else None) or "the measurement was interrupted"
