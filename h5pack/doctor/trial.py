"""A trial: a stage measured again with another number of threads, beside what it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from h5pack.doctor.facts import Facts
from h5pack.doctor.judgement import DECODING, STORAGE, Verdict
from h5pack.doctor.stage import COLD, LOADER, NAMES, TRANSFORM, Rates, Stage

_MORE_READS = 4
_MOST_READS = 32
_GAIN = 1.15


@dataclass(frozen=True)
class PlannedTrial:
    """What to try.

    Attributes
    ----------
    stage : str
        Key of the stage.
    parallel : int
        Threads of the `H5Loader`, or workers of the DataLoader.
    """

    stage: str
    parallel: int


@dataclass(frozen=True)
class Trial:
    """What came of it.

    Attributes
    ----------
    stage : str
    parallel : int
    before, after : Rates
        With the threads that there were, measured again beside it, and with `parallel`.
    """

    stage: str
    parallel: int
    before: Rates
    after: Rates

    @property
    def gain(self) -> float:
        """Speed over speed before."""
        return self.after.median / self.before.median

    @property
    def helps(self) -> bool:
        """Whether it is surely faster."""
        return self.gain >= _GAIN and self.after.low > self.before.median

    def to_json(self) -> dict[str, Any]:
        """An object for programs; keys are stable."""
        return {
            "stage": self.stage,
            "name": NAMES[self.stage],
            "parallel": self.parallel,
            "images_per_s": self.after.median,
            "min": self.after.low,
            "max": self.after.high,
            "before": {"images_per_s": self.before.median, "min": self.before.low, "max": self.before.high},
        }


def plan_trial(verdict: Verdict, stages: Mapping[str, Stage], facts: Facts) -> PlannedTrial | None:
    """Which number of threads is worth a trial, if the feed is what holds the loop up.

    Who waits may have more reads in flight than there are CPUs; who computes wants as many threads as there are CPUs.
    """
    fed = TRANSFORM if facts.transformed else LOADER
    cold = stages.get(COLD)
    cold_matters = cold is not None and cold.rates is not None and (not facts.fits_cache or verdict.first_epoch)
    if STORAGE in verdict.bottleneck or (verdict.first_epoch and cold_matters):
        parallel = min(_MORE_READS * facts.threads, _MOST_READS)
        return PlannedTrial(COLD if cold_matters else LOADER, parallel) if parallel > facts.threads else None
    if TRANSFORM in verdict.bottleneck and facts.transform_waits:
        parallel = min(_MORE_READS * facts.threads, _MOST_READS)
        return PlannedTrial(TRANSFORM, parallel) if parallel > facts.threads else None
    if not {DECODING, LOADER, TRANSFORM} & set(verdict.bottleneck) or facts.threads == facts.cpus:
        return None
    return PlannedTrial(fed, facts.cpus)
