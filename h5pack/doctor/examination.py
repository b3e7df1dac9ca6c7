"""`Examination`: measures the stages of feeding a step within a budget of time, and says what it found."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from h5pack.doctor.advice import Advice, advise
from h5pack.doctor.diagnosis import Diagnosis
from h5pack.doctor.facts import Facts
from h5pack.doctor.judgement import Verdict, judge
from h5pack.doctor.named_object import one_line
from h5pack.doctor.options import DoctorOptions
from h5pack.doctor.pacing import REPEATS, Need, allot, needed_seconds, repeats_within
from h5pack.doctor.patient import Patient
from h5pack.doctor.stage import COLD, EVERYTHING, NAMES, STEP, TRANSFORM, Rates, Stage
from h5pack.doctor.stage_run import NotMeasured, StageRun
from h5pack.doctor.trial import PlannedTrial, Trial, plan_trial
from h5pack.errors import H5PackError, OptionsError
from h5pack.measure.machine_facts import machine_facts
from h5pack.measure.repeats import interleaved
from h5pack.wording import counted

_WARM_PART = 0.08
"""Of the budget, for bringing rows into the page cache."""
_TRIAL_PART = 0.2
"""Of the budget, for a trial."""
_LEEWAY = 1.25
"""A budget that is advised is so many times the one that would have done."""
_QUESTION_SECONDS = 0.05
"""For each of the questions that are no stage."""

Progress = Callable[[str], None]


def diagnose(options: DoctorOptions, progress: Progress | None = None) -> Diagnosis:
    """Measure the stages of feeding a training step, name the bottleneck, and say what would move it.

    Parameters
    ----------
    options : DoctorOptions
    progress : callable, optional
        Is told what is being done, in words.

    Raises
    ------
    OptionsError
        If an option makes no sense, or `seconds` is too little to measure anything.
    PackFormatError, IncompletePackError
        If the file is not one that `H5Dataset` reads, or holds no rows.
    """
    examination = Examination(options, progress)
    try:
        examination.run()
    finally:
        examination.close()
    return examination.diagnosis()


class Examination:
    """One examination, which can be asked for what it has found so far at any time.

    Parameters
    ----------
    options : DoctorOptions
    progress : callable, optional

    Raises
    ------
    OptionsError, PackFormatError, IncompletePackError
        As of `diagnose`.
    """

    def __init__(self, options: DoctorOptions, progress: Progress | None = None) -> None:
        self._options = options
        self._tell: Progress = progress or (lambda text: None)
        self._begun = time.perf_counter()
        self._load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        self._runs: dict[str, StageRun] = {}
        self._needs: dict[str, Need] = {}
        self._reasons: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        self._unknown: list[str] = []
        self._facts: Facts | None = None
        self._verdict: Verdict | None = None
        self._advice = Advice((), ())
        self._trial: Trial | None = None
        self._patient = Patient(options)

    def run(self) -> None:
        """Measure everything, and judge.

        Raises
        ------
        OptionsError
            If the budget is too small.
        H5PackError
            If the file's rows cannot be read.
        """
        patient = self._patient
        self._tell("reading the first rows")
        self._begun = time.perf_counter()
        patient.take_sample()
        self._tell("making the step")
        making = time.perf_counter()
        patient.make_step()
        # Making a model may load weights from anywhere, and compile: no part of what is measured.
        self._begun += time.perf_counter() - making
        cold = self._look_at(patient.cold_runs())
        patient.warm(_WARM_PART * self._options.seconds)
        hot = self._look_at(patient.hot_runs())
        found = self._ask()
        left, needed = self._left(), needed_seconds(self._needs)
        if needed > left:
            self._refuse(self._options.seconds - left + needed)
        # A trial gets what the stages can do without.
        left = max(needed, left - _TRIAL_PART * self._options.seconds)
        repeats = repeats_within(self._needs, left)
        slices = allot(self._needs, left, repeats)
        # What drops the file from the cache comes last, so that rows need to be made hot but once.
        for group in (hot, cold):
            for key in interleaved(group, repeats):
                self._repeat(key, slices[key])
        self._judge(found)

    def diagnosis(self) -> Diagnosis:
        """What was found so far."""
        patient = self._patient
        return Diagnosis(
            patient.subject(),
            self._facts,
            tuple(self._stages().values()),
            self._verdict,
            self._advice,
            self._trial,
            tuple(self._unknown),
            tuple(dict.fromkeys([*patient.failures.values(), *self._failures.values()])),
            time.perf_counter() - self._begun,
            machine_facts(Path(os.path.dirname(patient.dataset.path))),
        )

    def close(self) -> None:
        """Stop what runs, and close the file."""
        self._patient.close()

    def _left(self) -> float:
        return self._options.seconds - (time.perf_counter() - self._begun)

    def _look_at(self, runs: Sequence[StageRun]) -> list[str]:
        """Find out how long a batch takes in each stage; the keys of those that work."""
        keys = []
        for run in runs:
            self._tell(f"{NAMES[run.key]}, a first look")
            self._runs[run.key] = run
            need = self._guarded(run.key, run.first_look)
            if need is not None:
                if run.key == EVERYTHING and STEP in self._needs and run.prepare is None:
                    # The first time is slower; it need not take longer than all its parts in turn.
                    parts = sum(part.batch_seconds for part in self._needs.values())
                    need = replace(need, batch_seconds=min(need.batch_seconds, parts))
                self._needs[run.key] = need
                keys.append(run.key)
            if self._left() < 0:
                spent = self._options.seconds - self._left()
                self._refuse(spent + needed_seconds(self._needs), at_least=True)
        return keys

    def _ask(self) -> dict[str, Any]:
        """The small questions, asked while the rows are hot."""
        patient = self._patient
        found: dict[str, Any] = {}
        self._tell("small questions")
        seconds = min(_QUESTION_SECONDS, 0.02 * self._options.seconds)
        found["reading_share"] = patient.reading_share(seconds)
        found["transform_share"] = self._guarded(TRANSFORM, lambda: patient.transform_share(seconds))
        step = self._needs.get(STEP)
        if step is not None:
            enough = max(6 * step.batch_seconds, seconds)
            if enough < 0.1 * self._options.seconds:
                found["half_batch"] = self._guarded(STEP, lambda: patient.half_batch(enough))
            else:
                self._unknown.append("a small batch: there is no time to try half of it; give more --seconds")
            if patient.on_gpu:
                count, where = patient.synchronisations()
                found |= {"synchronisations": count, "synchronised_at": where}
        if not patient.on_gpu:
            self._unknown.append(
                "host synchronisation inside the step, unpinned memory, idle GPUs: the step runs on the CPU"
            )
        return found

    def _repeat(self, key: str, seconds: float) -> None:
        run = self._runs[key]
        if key in self._reasons:
            return
        self._tell(f"{NAMES[key]}, repeat {len(run.slices) + 1}")
        self._guarded(key, lambda: run.repeat(seconds))

    def _guarded(self, key: str, call: Callable[[], Any]) -> Any:
        """What `call` gives; None where it fails, which is noted."""
        try:
            return call()
        except NotMeasured as error:
            self._reasons[key] = str(error)
        except H5PackError as error:
            self._reasons[key] = str(error)
            self._failures[key] = str(error)
        except Exception as error:
            # The user's transform and model may fail with anything, and at any batch.
            self._reasons[key] = one_line(error)
            self._failures[key] = f"{NAMES[key]}: {one_line(error)}"
        return None

    def _stages(self) -> dict[str, Stage]:
        """All stages, in the order in which an image passes them."""
        reasons = {**self._patient.reasons, **self._reasons}
        stages = {}
        for key in NAMES:
            run = self._runs.get(key)
            if key in reasons:
                stages[key] = Stage(key, reason=reasons[key])
            else:
                stages[key] = Stage(key, reason="it was interrupted before") if run is None else run.stage()
        return stages

    def _judge(self, found: dict[str, Any]) -> None:
        everything = self._runs.get(EVERYTHING)
        if everything is not None and everything.slices:
            slices = everything.slices
            found["stall"] = sum(part.stall_seconds for part in slices) / sum(part.seconds for part in slices)
        self._facts = facts = self._patient.facts({**found, "load": self._load})
        if facts.crowded:
            self._unknown.append(
                f"how fast an idle machine would be: other processes use this one (load average {facts.load:.1f} on "
                f"{counted(facts.machine_cpus, 'CPU')})"
            )
        stages = self._stages()
        verdict = judge(stages, facts)
        planned = plan_trial(verdict, stages, facts)
        if planned is not None:
            self._tell(f"a trial with {planned.parallel} {facts.units}")
            self._trial = self._guarded(planned.stage, lambda: self._try(planned))
        self._advice = advise(verdict, stages, facts, self._trial)
        self._verdict = verdict

    def _try(self, planned: PlannedTrial) -> Trial | None:
        """Measure a stage with another number of threads, in turns with what it was."""
        key, need = planned.stage, self._needs[planned.stage]
        patient = self._patient
        if key != COLD:
            patient.warm(0.0)
        runs = {"before": patient.loader_run(key), "after": patient.loader_run(key, planned.parallel)}
        for run in runs.values():
            run.repeat(0.0)
            run.slices.clear()
        repeats = len(runs) * REPEATS
        if self._left() < repeats * (need.least_seconds + need.beside_seconds):
            number = counted(planned.parallel, "thread" if self._options.workers is None else "worker")
            self._unknown.append(f"whether {number} would do better: no time for a trial; give more --seconds")
            return None
        share = min(self._left(), _TRIAL_PART * self._options.seconds) / repeats
        seconds = max(need.least_seconds, share - need.beside_seconds)
        for name in interleaved(list(runs), REPEATS):
            runs[name].repeat(seconds)
        rates = {name: Rates.of([part.rate for part in run.slices]) for name, run in runs.items()}
        return Trial(key, planned.parallel, rates["before"], rates["after"])

    def _refuse(self, seconds: float, *, at_least: bool = False) -> None:
        """Stop, as figures of so short a time would mean nothing."""
        needed = _LEEWAY * seconds / (1 - _WARM_PART)
        rounded = math.ceil(needed) if needed > 3 else math.ceil(10 * needed) / 10
        options = self._options
        raise OptionsError(
            f"seconds is {options.seconds:g}, too little to measure batches of {options.batch_size} images here; give "
            f"--seconds {rounded:g} or {'much ' * at_least}more, or a smaller --batch-size"
        )
