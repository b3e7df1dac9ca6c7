"""What would move the bottleneck, in the order of the usual causes: a pure function of what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from h5pack.doctor.facts import Facts
from h5pack.doctor.judgement import DECODING, STORAGE, Verdict, rate_text
from h5pack.doctor.stage import COLD, COLD_STORED, COPY, LOADER, NORMALIZE, STEP, TRANSFORM, Stage
from h5pack.doctor.trial import Trial
from h5pack.feed.cpu_time import BUSY
from h5pack.wording import counted

_SEEKS = 1.3
"""A disk that is so much faster in stored order loses time between chunks."""
_OVERHEAD = 0.75
"""With half the batch, images/s below this part: each step has a fixed cost that larger batches share."""
_SMALL_BATCH_BYTES = 1 << 20
_WORSE = 0.95
_ONE_CPU = 1.3


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes
    ----------
    moves : tuple of str
        What would move the bottleneck, the usual causes first.
    notes : tuple of str
        What was found besides, and does not hold the loop up now.
    """

    moves: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Findings:
    verdict: Verdict
    stages: Mapping[str, Stage]
    facts: Facts
    trial: Trial | None

    def limits(self, *names: str) -> bool:
        """Whether one of these holds the loop up."""
        return bool(set(names) & set(self.verdict.bottleneck))

    def median(self, key: str) -> float | None:
        """Images a second of a stage, where it was measured."""
        found = self.stages.get(key)
        return None if found is None or found.rates is None else found.rates.median


class Finding(NamedTuple):
    """Something that was found.

    Attributes
    ----------
    moves : bool
        Whether to change it would move the bottleneck.
    text : str
        What to do, in words.
    """

    moves: bool
    text: str


def advise(verdict: Verdict, stages: Mapping[str, Stage], facts: Facts, trial: Trial | None = None) -> Advice:
    """What to do about a verdict.

    Parameters
    ----------
    verdict : Verdict
    stages : mapping of str to Stage
    facts : Facts
    trial : Trial, optional
        What another number of threads gave.
    """
    findings = _Findings(verdict, stages, facts, trial)
    found = [finding for cause in _CAUSES for finding in cause(findings)]
    return Advice(
        tuple(finding.text for finding in found if finding.moves),
        tuple(finding.text for finding in found if not finding.moves),
    )


def _reads_in_flight(findings: _Findings) -> list[Finding]:
    facts, trial = findings.facts, findings.trial
    limits = findings.limits(STORAGE)
    if not limits and findings.verdict.first_epoch is None:
        return []
    texts = []
    tried = trial if trial is not None and trial.parallel > facts.threads else None
    # For a first epoch alone nobody wants more of them than there are CPUs.
    more = limits or facts.threads <= facts.cpus
    if tried is not None and tried.helps and more:
        texts.append(
            f"Too few reads in flight: {tried.parallel} {facts.units} instead of {facts.threads} give "
            f"{tried.gain:.1f} times as much ({_per_s(tried.after.median)}). Raise {facts.option} to {tried.parallel}: "
            f"{facts.units} that wait need no CPU of their own."
        )
    elif tried is None and more:
        texts.append(f"Perhaps too few reads in flight: try {facts.option} {min(4 * facts.threads, 32)}.")
    stored, order = findings.median(COLD_STORED), findings.median(COLD)
    if stored is not None and order is not None and stored > _SEEKS * order:
        texts.append(
            f"In stored order the disk gives {_per_s(stored)}, in the loader's order {_per_s(order)}: larger chunks "
            "need fewer seeks (h5pack convert --chunk-bytes)."
        )
    known = ""
    if tried is not None and not tried.helps:
        known = f"More {facts.units} do not help ({tried.parallel}: {tried.gain:.2f} times). "
    read = ", or read it once before the training, as it fits into memory" if facts.fits_cache and not limits else ""
    texts.append(f"{known}Put the file on a faster disk{read}; or store less (h5pack convert --size, --compression).")
    return [Finding(limits, text) for text in texts]


def _decoding(findings: _Findings) -> list[Finding]:
    facts = findings.facts
    if facts.library is None and facts.encoding is None:
        return []
    limits = findings.limits(DECODING)
    if facts.encoding is None:
        text = (
            f"Rows come through the HDF5 library ({facts.library}), one thread at a time; h5pack convert makes a file "
            "that is read directly."
        )
    else:
        text = (
            f"{facts.encoding.capitalize()} in every epoch; do it once (h5pack convert, without --compression), if the "
            "disk has the room."
        )
    found = [Finding(limits, text)]
    if limits and facts.workers is None and facts.fits_resident:
        kept = (
            "Decoded, the images fit into memory, and H5Loader keeps them there by default (resident='auto'): then "
            "only the first epoch decodes. For this measurement that was off."
        )
        found.append(Finding(True, kept))
    return found


def _transform(findings: _Findings) -> list[Finding]:
    facts = findings.facts
    if not findings.limits(TRANSFORM):
        return []
    texts = []
    texts.append(
        "The transform on the host: have it run on the device, for whole batches (DeviceFeed(loader, 'cuda', "
        "transform=...)), do what is the same in every epoch once (before h5pack convert), or make it cheaper."
    )
    used, trial = _cpus_used(findings, TRANSFORM), findings.trial
    if facts.transform_waits:
        tried = "" if trial is None else _tried(trial, trial.parallel)
        number = f" {trial.parallel}" if trial is not None and trial.helps else ""
        ran = f"{100 * (facts.transform_share or 0):.0f} %"
        texts.append(
            f"The transform waits more than it computes (it runs {ran} of its time). Find out for what; meanwhile, "
            f"more {facts.units} wait at the same time ({facts.option}{number}){tried}."
        )
    elif facts.workers is None and used is not None and min(facts.threads, facts.cpus) > 1 and BUSY <= used < _ONE_CPU:
        texts.append(
            "Its threads use one CPU together: something lets one of them run at a time (Python's GIL, a lock). Use "
            "operations on whole tensors, or a DataLoader (--workers)."
        )
    return [Finding(True, text) for text in texts]


def _small_batch(findings: _Findings) -> list[Finding]:
    facts = findings.facts
    found = []
    if findings.limits(STEP) and facts.half_batch is not None and facts.half_batch < _OVERHEAD:
        text = (
            f"A small batch: with half of it the step takes {100 * facts.half_batch:.0f} % of its images/s, so each "
            "step has a cost that a larger batch would share (--batch-size)."
        )
        found.append(Finding(True, text))
    if facts.batch_rows * facts.handed_bytes < _SMALL_BATCH_BYTES and findings.limits(LOADER, COPY):
        text = (
            f"A small batch: {facts.batch_rows} images of {facts.handed_bytes:,} bytes are handed over at a time, and "
            "each hand-over has its cost; take a larger one (--batch-size)."
        )
        found.append(Finding(True, text))
    return found


def _float_batches(findings: _Findings) -> list[Finding]:
    facts = findings.facts
    if not facts.handed_float:
        return []
    limits = findings.limits(COPY, LOADER, TRANSFORM) or (facts.stored_float and findings.limits(STORAGE))
    cure = "keep uint8 on the host, and make floats on the device (DeviceFeed(..., transform=Normalize(...)))"
    more = f", {facts.handed_bytes / max(1, facts.row_bytes):.1f} times what is stored"
    if facts.stored_float:
        cure, more = "where they are pictures, store them as uint8 (h5pack convert --value-range)", ""
    text = f"Float batches on the host: {facts.handed_bytes:,} bytes an image{more}; {cure}."
    return [Finding(limits, text)]


def _unpinned(findings: _Findings) -> list[Finding]:
    if not findings.facts.on_gpu or findings.facts.pinned:
        return []
    text = (
        "Unpinned memory: each batch is copied once more on the host before the GPU can fetch it; give pin_memory=True "
        "(--pin)."
    )
    return [Finding(findings.limits(COPY, LOADER), text)]


def _parallel(findings: _Findings) -> list[Finding]:
    facts = findings.facts
    if facts.workers == 0:
        text = "A DataLoader without workers reads while the step waits; give it some (--workers)."
        return [Finding(_feed_limits(findings), text)]
    waits = findings.limits(STORAGE) or (findings.limits(TRANSFORM) and facts.transform_waits)
    # Who waits may be more than there are CPUs.
    if waits:
        return []
    if facts.threads > facts.cpus:
        return [_too_many(findings)]
    if not findings.limits(LOADER, DECODING, TRANSFORM):
        return []
    busy = facts.busy(_cpus_used(findings, TRANSFORM if facts.transformed else LOADER))
    return _too_few(findings, busy) if facts.threads < facts.cpus else _just_right(facts, busy)


def _too_many(findings: _Findings) -> Finding:
    facts, trial = findings.facts, findings.trial
    cpus = counted(facts.cpus, "CPU")
    if trial is not None and trial.parallel == facts.cpus and trial.gain < _WORSE:
        return Finding(False, f"{facts.threads} {facts.units} on {cpus}: fewer are slower, as measured.")
    text = (
        f"Too many {facts.units}: {facts.threads} take turns on {cpus} that this process may use; lower {facts.option} "
        f"to {facts.cpus}{_tried(trial, facts.cpus)}."
    )
    # Without a GPU the step wants the same CPUs.
    return Finding(_feed_limits(findings) or not facts.on_gpu, text)


def _too_few(findings: _Findings, busy: bool | None) -> list[Finding]:
    facts, trial = findings.facts, findings.trial
    if trial is None and not busy:
        return []
    if trial is not None and trial.parallel == facts.cpus and not trial.helps:
        text = f"{trial.parallel} {facts.units} instead of {facts.threads} do not help ({trial.gain:.2f} times)."
        return [Finding(False, text)]
    text = (
        f"Too few {facts.units}: {facts.threads} for {counted(facts.cpus, 'CPU')} that this process may use; raise "
        f"{facts.option} to {facts.cpus}{_tried(trial, facts.cpus)}."
    )
    return [Finding(True, text)]


def _just_right(facts: Facts, busy: bool | None) -> list[Finding]:
    if not busy:
        return []
    more = ""
    if facts.machine_cpus > facts.cpus:
        more = f" The machine has {facts.machine_cpus}: ask for more of them (taskset, SLURM, the container's quota)."
    text = (
        f"{counted(facts.threads, facts.units[:-1])} for {counted(facts.cpus, 'CPU')} that this process may use: that "
        f"is right, and more CPUs would help.{more}"
    )
    return [Finding(True, text)]


def _synchronisation(findings: _Findings) -> list[Finding]:
    facts = findings.facts
    if not facts.synchronisations:
        return []
    where = "" if facts.synchronised_at is None else f", first at {facts.synchronised_at}"
    text = (
        f"Host synchronisation inside the step: {facts.synchronisations:.1f} times a step the process waits for the "
        f"GPU (.item(), .cpu(), a print of a tensor{where}); look at losses every few steps instead."
    )
    return [Finding(findings.limits(STEP) or not findings.verdict.sure, text)]


def _second_gpu(findings: _Findings) -> list[Finding]:
    facts = findings.facts
    if not facts.on_gpu or facts.gpus < 2 or facts.world_size > 1 or facts.idle_gpus == 0:
        return []
    others = facts.gpus - 1 if facts.idle_gpus is None else facts.idle_gpus
    which = "An idle second GPU" if others == 1 else f"{others} idle GPUs"
    unless = "" if facts.idle_gpus is not None else " (unless others use it; the driver does not say)"
    text = f"{which}{unless}: train on {others + 1} (torchrun --nproc_per_node {others + 1})."
    return [Finding(findings.limits(STEP), text)]


def _the_step(findings: _Findings) -> list[Finding]:
    facts = findings.facts
    if findings.limits(NORMALIZE) and not facts.on_gpu:
        return [Finding(True, "Normalising takes the CPUs' time; on a GPU it is one quick kernel.")]
    if not findings.limits(STEP):
        return []
    if not facts.on_gpu:
        return [Finding(True, "The step runs on the CPU: use a GPU (--device cuda), or a smaller network.")]
    text = "The step itself: mixed precision (--dtype bfloat16), torch.compile, channels_last. No loader can help it."
    return [Finding(True, text)]


_CAUSES: tuple[Callable[[_Findings], list[Finding]], ...] = (
    _reads_in_flight,
    _decoding,
    _transform,
    _small_batch,
    _float_batches,
    _unpinned,
    _parallel,
    _synchronisation,
    _second_gpu,
    _the_step,
)


def _feed_limits(findings: _Findings) -> bool:
    return findings.limits(STORAGE, DECODING, LOADER, TRANSFORM)


def _cpus_used(findings: _Findings, key: str) -> float | None:
    found = findings.stages.get(key)
    return None if found is None else found.cpus_used


def _tried(trial: Trial | None, parallel: int) -> str:
    """What a trial with so many threads says, in brackets."""
    if trial is None or trial.parallel != parallel:
        return ""
    return f" (measured: {trial.gain:.2f} times, {_per_s(trial.after.median)})"


def _per_s(value: float) -> str:
    return f"{rate_text(value)} images/s"
