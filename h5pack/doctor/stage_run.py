"""Stages while they are measured: what runs each, what it needs, what came of it so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from h5pack.doctor.pacing import Need, Slice
from h5pack.doctor.stage import Rates, Stage

WEIGHTS: Mapping[str, float] = {"everything": 2.0, "loader": 1.5, "transform": 1.5, "copy": 0.5, "normalize": 0.5}
"""Of what is left of the budget: figures that a verdict hangs on get more, those that hardly vary get less."""


class NotMeasured(Exception):
    """A stage cannot be measured after all; the message says why."""


@dataclass
class StageRun:
    """A stage that can be measured.

    Attributes
    ----------
    key : str
    run : callable
        Measures for some seconds; 0: a batch.
    prepare : callable or None
        To be called before each measurement, and not measured.
    note : str or None
    warm : int
        Batches that do not count in a first look.
    batches : int
        That a repeat takes at least.
    slices : list of Slice
        The repeats so far.
    """

    key: str
    run: Callable[[float], Slice]
    prepare: Callable[[], None] | None = None
    note: str | None = None
    warm: int = 0
    batches: int = 1
    slices: list[Slice] = field(default_factory=list)

    def first_look(self) -> Need:
        """Find out how long a batch takes."""
        batch_seconds = beside = 0.0
        for _ in range(self.warm + 1):
            begun = time.perf_counter()
            self._prepare()
            batch_seconds = self.run(0.0).seconds
            # What is broken off takes its time to end, too.
            beside = max(0.0, time.perf_counter() - begun - batch_seconds)
        return Need(batch_seconds, WEIGHTS.get(self.key, 1.0), beside, self.batches)

    def repeat(self, seconds: float) -> None:
        """Measure once more."""
        self._prepare()
        self.slices.append(self.run(seconds))

    def stage(self) -> Stage:
        """What came of it."""
        if not self.slices:
            return Stage(self.key, reason="it was interrupted before")
        if not all(found.images for found in self.slices):
            return Stage(self.key, reason="no images came through")
        cpu = [found.cpu_seconds for found in self.slices]
        known = [seconds for seconds in cpu if seconds is not None]
        total = sum(found.seconds for found in self.slices)
        return Stage(
            self.key,
            Rates.of([found.rate for found in self.slices]),
            cpus_used=sum(known) / total if len(known) == len(cpu) else None,
            images=sum(found.passed for found in self.slices),
            note=self.note,
        )

    def _prepare(self) -> None:
        if self.prepare is not None:
            self.prepare()
