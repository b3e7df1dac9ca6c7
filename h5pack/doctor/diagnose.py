"""`diagnose`, which measures the stages of feeding a training step within a time budget and names the bottleneck."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from h5pack.benchmark.ceilings import interleaved
from h5pack.doctor.measure import NotMeasured, StageCost, StageRun, min_total_seconds, repeats_within, share_budget
from h5pack.doctor.report import STAGE_TITLES, DoctorReport
from h5pack.doctor.target import DiagnoseSettings, Target
from h5pack.errors import OptionsError
from h5pack.format import schema
from h5pack.monitor.advice import advise
from h5pack.monitor.bottleneck import INTERRUPTED, Evidence, Stage, StageResult, judge
from h5pack.order.window import DEFAULT_WINDOW
from h5pack.system.machine import machine_facts
from h5pack.system.text import counted

# Fraction of the budget spent on reading rows into the page cache.
_WARM_FRACTION = 0.08
# Above this load average per CPU, other processes are assumed to disturb the measurement.
_CROWDED = 0.5
# If the time budget is too short, the error recommends the estimated minimum multiplied by this factor.
_LEEWAY = 1.25
# For how many seconds to measure how busy reads and the transform are; fewer if the time budget is small.
_QUESTION_SECONDS = 0.05

Progress = Callable[[str], None]


def diagnose(
    path: str | os.PathLike[str],
    *,
    device: Any = None,
    model: Any = None,
    transform: Callable[..., Any] | None = None,
    batch_size: int = 256,
    num_threads: int | None = None,
    num_workers: int | None = None,
    split: str | None = None,
    images: str = schema.IMAGES,
    labels: str = schema.LABELS,
    window: int = DEFAULT_WINDOW,
    dtype: str = "float32",
    pin_memory: bool | None = None,
    seconds: float = 30.0,
    on_progress: Progress | None = None,
) -> DoctorReport:
    """Measure the stages of feeding a training step, name the bottleneck, and recommend how to remove it.

    Parameters
    ----------
    path : path
        A file written by h5pack, or any other HDF5 file that `H5Dataset` can read.
    device : device, optional
        The device on which the step runs, such as "cpu", "cuda" or "cuda:1". None: CUDA if available, else the CPU.
    model : Module or callable, optional
        A torch module, or a factory. The factory is called with the keywords ``shape``, ``classes``, ``num_classes``
        and ``device``, but only with those that its signature names. It returns a module, a pair of a module and a
        loss, or a function of images and labels that runs the whole step. None: a small built-in network.
    transform : callable, optional
        The transform that runs on the host. It receives whole batches like the transform of an `H5Loader`, or single
        images like the transform of an `H5Dataset` if `num_workers` is given.
    batch_size : int
    num_threads : int, optional
        Number of threads of the `H5Loader`. None: the loader's default.
    num_workers : int, optional
        Measure a DataLoader with this many workers instead of an `H5Loader`. None: measure an `H5Loader`.
    split : str, optional
        Read only the rows of this split. None: all rows.
    images, labels : str
        Names of the HDF5 datasets that hold the images and the labels.
    window : int
        Number of HDF5 chunks that are shuffled together.
    dtype : {"float32", "bfloat16", "float16"}
        Type of the images on the device. With bfloat16 or float16, the step runs under autocast.
    pin_memory : bool, optional
        Whether the loader puts batches into pinned memory. None: only if the step runs on a GPU.
    seconds : float
        Time budget for all measurements together, in seconds. The time to make the model is not counted.
    on_progress : callable, optional
        Called with a short text before each measurement.

    Returns
    -------
    DoctorReport

    Raises
    ------
    OptionsError
        If a value is invalid, or `seconds` is too short to measure every stage.
    PackFormatError, IncompletePackError
        If `H5Dataset` cannot read the file, or there are no rows to measure.
    """
    options = {name: value for name, value in locals().items() if name != "on_progress"}
    with Diagnosis(DiagnoseSettings(**options), on_progress) as diagnosis:
        diagnosis.run()
        return diagnosis.report()


class Diagnosis(contextlib.AbstractContextManager["Diagnosis"]):
    """One run of `diagnose`. `report` may be called at any time and returns the results so far."""

    def __init__(self, settings: DiagnoseSettings, on_progress: Progress | None = None) -> None:
        self._settings = settings
        self._show: Progress = on_progress or (lambda text: None)
        self._begun = time.perf_counter()
        self._load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        self._runs: dict[Stage, StageRun] = {}
        self._costs: dict[Stage, StageCost] = {}
        self._unknown: list[str] = []
        self._evidence: Evidence | None = None
        self.target = Target(settings)

    def __exit__(self, *_: object) -> None:
        self.target.close()

    def run(self) -> None:
        """Measure all stages, and determine the bottleneck."""
        target, seconds = self.target, self._settings.seconds
        self._show("reading the first rows")
        self._begun = time.perf_counter()
        target.load_sample()
        self._show("making the step")
        making = time.perf_counter()
        target.make_step()
        # The budget excludes making the model, which may download weights or compile.
        self._begun += time.perf_counter() - making
        cold = self._estimate(target.cold_runs())
        target.warm(_WARM_FRACTION * seconds)
        hot = self._estimate(target.hot_runs())
        measured = self._small_measurements()
        left, needed = self._left(), min_total_seconds(self._costs)
        if needed > left:
            self._refuse(seconds - left + needed)
        repeats = repeats_within(self._costs, left)
        shares = share_budget(self._costs, left, repeats)
        # Cold stages drop the file from the page cache. They run last, so that it has to be filled only once.
        for group in (hot, cold):
            for stage in interleaved(group, repeats):
                run = self._runs[stage]
                if stage not in target.reasons:
                    self._show(f"{STAGE_TITLES[stage]}, repeat {len(run.repeats) + 1}")
                    self._guarded(stage, partial(run.repeat, shares[stage]))
        self._collect_evidence(measured)

    def report(self) -> DoctorReport:
        """Return the results so far."""
        target, evidence = self.target, self._evidence
        verdict = None if evidence is None else judge(evidence)
        return DoctorReport(
            target=target.describe(),
            evidence=evidence,
            stages=tuple(self._results().values()),
            verdict=verdict,
            advice=() if verdict is None or evidence is None else tuple(advise(verdict, evidence)),
            unknown=tuple(self._unknown),
            failures=tuple(dict.fromkeys(target.failures.values())),
            seconds=time.perf_counter() - self._begun,
            machine=machine_facts(Path(os.path.dirname(target.dataset.path))),
        )

    def _left(self) -> float:
        return self._settings.seconds - (time.perf_counter() - self._begun)

    def _estimate(self, runs: Sequence[StageRun]) -> list[Stage]:
        """Estimate how long a repeat of each stage takes, and return the stages that can be measured."""
        stages = []
        for run in runs:
            self._show(f"{STAGE_TITLES[run.stage]}, an estimate")
            self._runs[run.stage] = run
            cost = self._guarded(run.stage, run.estimate)
            if cost is not None:
                if run.stage is Stage.EVERYTHING and Stage.STEP in self._costs and run.prepare is None:
                    # The first iteration was slow. Later ones take at most as long as all stages in sequence.
                    parts = sum(part.batch_seconds for part in self._costs.values())
                    cost = replace(cost, batch_seconds=min(cost.batch_seconds, parts))
                self._costs[run.stage] = cost
                stages.append(run.stage)
            if self._left() < 0:
                self._refuse(self._settings.seconds - self._left() + min_total_seconds(self._costs))
        return stages

    def _small_measurements(self) -> dict[str, Any]:
        """Measure the fields of `Evidence` that are not stages; return them by name. The page cache must be filled."""
        target, budget = self.target, self._settings.seconds
        found: dict[str, Any] = {"load": self._load}
        self._show("small measurements")
        seconds = min(_QUESTION_SECONDS, 0.02 * budget)
        found["read_busy_fraction"] = target.read_busy_fraction(seconds)
        busy = self._guarded(Stage.TRANSFORM, lambda: target.transform_busy_fraction(seconds))
        found["transform_busy_fraction"] = busy
        step = self._costs.get(Stage.STEP)
        if step is not None:
            enough = max(6 * step.batch_seconds, seconds)
            if enough < 0.1 * budget:
                found["half_batch_ratio"] = self._guarded(Stage.STEP, lambda: target.half_batch_ratio(enough))
            else:
                text = "whether the batch is too small: no time to measure half of one; give more seconds"
                self._unknown.append(text)
            if target.on_gpu:
                found["synchronisations"], found["synchronised_at"] = target.synchronisations()
        if not target.on_gpu:
            self._unknown.append("host synchronisation, unpinned memory and idle GPUs: the step runs on the CPU")
        return found

    def _guarded(self, stage: Stage, call: Callable[[], Any]) -> Any:
        """Return the result of `call`. If it fails, record the error as the stage's reason and return None."""
        try:
            return call()
        except NotMeasured as error:
            self.target.reasons[stage] = str(error)
        except Exception as error:
            # The user's transform and model may raise any exception, on any batch.
            self.target.record_failure(stage, error, f"'{STAGE_TITLES[stage]}' failed")
        return None

    def _results(self) -> dict[Stage, StageResult]:
        """Return the results of all stages, in the order in which an image passes through them."""
        reasons, runs = self.target.reasons, self._runs
        return {
            stage: runs[stage].result()
            if stage in runs and stage not in reasons
            else StageResult(stage, reason=reasons.get(stage, INTERRUPTED))
            for stage in Stage
        }

    def _collect_evidence(self, measured: dict[str, Any]) -> None:
        everything = self._runs.get(Stage.EVERYTHING)
        if everything is not None and everything.repeats:
            stalls = sum(one.stall_seconds for one in everything.repeats)
            measured["stall_fraction"] = stalls / sum(one.seconds for one in everything.repeats)
        self._evidence = self.target.evidence(**measured, stages=self._results())
        cpus = os.cpu_count() or 1
        if self._load is not None and self._load > _CROWDED * cpus:
            load = f"load average {self._load:.1f} on {counted(cpus, 'CPU')}"
            self._unknown.append(f"the speed on an idle machine, because other processes are using this one ({load})")

    def _refuse(self, seconds: float) -> None:
        """Raise an OptionsError that recommends a longer time, because the results would be meaningless."""
        needed = _LEEWAY * seconds / (1 - _WARM_FRACTION)
        rounded = math.ceil(needed) if needed > 3 else math.ceil(10 * needed) / 10
        settings = self._settings
        raise OptionsError(
            f"seconds={settings.seconds:g} is too short to measure batches of {settings.batch_size} images on this "
            f"machine; give at least seconds={rounded:g}, or a smaller batch_size",
            parameters=(f"seconds={rounded:g}", "batch_size"),
        )
