"""What an examination found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from h5pack.doctor.advice import Advice
from h5pack.doctor.facts import Facts
from h5pack.doctor.judgement import Verdict
from h5pack.doctor.stage import Stage
from h5pack.doctor.trial import Trial


@dataclass(frozen=True)
class Subject:
    """What was examined.

    Attributes
    ----------
    path : str
    split : str or None
    images : str
        What an image is, in words, such as ``178x218x3 uint8``.
    rows : int
        Of the split.
    hot_rows : int
        Of them, those that the hot stages went through.
    device : str
    step : str
        In words.
    labels : bool
        Whether the step got labels.
    normalize : str
        What makes floats of the images, in words.
    """

    path: str
    split: str | None
    images: str
    rows: int
    hot_rows: int
    device: str
    step: str
    labels: bool
    normalize: str


@dataclass(frozen=True)
class Diagnosis:
    """The stages, what they mean, and what to do.

    Attributes
    ----------
    subject : Subject
    facts : Facts or None
        None: it was interrupted before they were known.
    stages : tuple of Stage
        In the order in which an image passes them.
    verdict : Verdict or None
        None: it was interrupted.
    advice : Advice
    trial : Trial or None
    unknown : tuple of str
        What could not be found out besides the stages, and why.
    failures : tuple of str
        What failed of the user's own: one line each.
    seconds : float
        That it took.
    machine : dict
        As `machine_facts` gives it.
    """

    subject: Subject
    facts: Facts | None
    stages: tuple[Stage, ...]
    verdict: Verdict | None
    advice: Advice
    trial: Trial | None
    unknown: tuple[str, ...]
    failures: tuple[str, ...]
    seconds: float
    machine: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The diagnosis for programs; keys are stable."""
        verdict = self.verdict
        return {
            **asdict(self.subject),
            "stages": [stage.to_json() for stage in self.stages],
            "bottleneck": [] if verdict is None else list(verdict.bottleneck),
            "fed": None if verdict is None else verdict.fed,
            "sure": False if verdict is None else verdict.sure,
            "verdict": None if verdict is None else verdict.text,
            "first_epoch": None if verdict is None else verdict.first_epoch,
            "advice": list(self.advice.moves),
            "notes": list(self.advice.notes),
            "trial": None if self.trial is None else self.trial.to_json(),
            "facts": None if self.facts is None else asdict(self.facts),
            "unknown": list(self.unknown),
            "failures": list(self.failures),
            "interrupted": verdict is None,
            "seconds": round(self.seconds, 2),
            "machine": self.machine,
        }
