"""A diagnosis in lines, for a terminal."""

from __future__ import annotations

import math
import textwrap

from h5pack.doctor.diagnosis import Diagnosis
from h5pack.doctor.judgement import rate_text
from h5pack.doctor.stage import EVERYTHING, Stage
from h5pack.wording import counted

_BAR = 24
_WIDTH = 110


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """The stages as a waterfall, the verdict, and what to do."""
    lines = [*_head(diagnosis), "", *_waterfall(diagnosis), ""]
    verdict = diagnosis.verdict
    if verdict is None:
        return "\n".join([*lines, "It was interrupted, so there is no verdict; above is what was measured before."])
    lines += _wrapped(verdict.text)
    if verdict.first_epoch is not None:
        lines += _wrapped(verdict.first_epoch)
    for title, items in (
        ("What would make it faster, the usual causes first:", diagnosis.advice.moves),
        ("Found besides:", diagnosis.advice.notes),
        ("Could not be found out:", diagnosis.unknown),
    ):
        if items:
            lines += ["", title]
            for number, item in enumerate(items, 1):
                mark = f"{number}. " if items is diagnosis.advice.moves else "- "
                lines += _wrapped(item, mark)
    return "\n".join(lines)


def _head(diagnosis: Diagnosis) -> list[str]:
    subject, facts = diagnosis.subject, diagnosis.facts
    split = "all rows" if subject.split is None else f"split {subject.split}"
    lines = [f"{subject.path}: {split}, {subject.rows:,} images of {subject.images}"]
    if facts is not None:
        cpus = counted(facts.cpus, "CPU")
        pinned = ", pinned" if facts.pinned else ""
        lines.append(
            f"fed by {facts.feeder} in batches of {facts.batch_rows:,}{pinned}; {cpus}; device {subject.device}"
        )
    lines.append(f"step: {subject.step}{'' if subject.labels else ', without labels'}; normalize: {subject.normalize}")
    return lines


def _waterfall(diagnosis: Diagnosis) -> list[str]:
    medians = [stage.rates.median for stage in diagnosis.stages if stage.rates is not None]
    low = 10 ** math.floor(math.log10(max(min(medians, default=1.0), 1e-3)))
    high = max(medians, default=10.0)
    width = max(len(stage.name) for stage in diagnosis.stages)
    lines = [
        f"{'stage':{width}}  {'images/s':>9}  {'lowest - highest':>19}  {'CPUs':>4}  logarithmic from {rate_text(low)}"
    ]
    for stage in diagnosis.stages:
        if stage.rates is None:
            lines.append(f"{stage.name:{width}}  not measured: {stage.reason}")
            continue
        rates = stage.rates
        span = f"{rate_text(rates.low)} - {rate_text(rates.high)}"
        cpus = "" if stage.cpus_used is None else f"{stage.cpus_used:.1f}"
        size = math.log(max(rates.median, 1e-9) / low) / math.log(max(high / low, 1.001))
        bar = "#" * max(1, round(_BAR * min(1.0, max(0.0, size))))
        after = f"  {remark}" if (remark := _remark(stage, diagnosis)) else ""
        lines.append(f"{stage.name:{width}}  {rate_text(rates.median):>9}  {span:>19}  {cpus:>4}  {bar}{after}")
    return lines


def _remark(stage: Stage, diagnosis: Diagnosis) -> str:
    stall = None if diagnosis.facts is None else diagnosis.facts.stall
    if stage.key == EVERYTHING and stall is not None:
        return f"the step waits {100 * stall:.0f} % of the time"
    return "" if stage.note is None else f"({stage.note})"


def _wrapped(text: str, mark: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_on_hyphens=False,
        break_long_words=False,
    )
