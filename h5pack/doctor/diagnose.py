"""`diagnose`, which measures the stages of feeding a training step within a time budget and names the bottleneck."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from h5pack.benchmark.cases import usable_seconds
from h5pack.doctor.loaders import DiagnoseSettings
from h5pack.doctor.measure import NotMeasured, StageRun, measure_in_turns, min_total_seconds, with_one_thread
from h5pack.doctor.report import DoctorReport
from h5pack.doctor.target import Target
from h5pack.errors import OptionsError, SizesDifferError
from h5pack.format import schema
from h5pack.monitor.advice import FASTER_ALONE, advise
from h5pack.monitor.bottleneck import INTERRUPTED, MIN_REPEATS, Evidence, Stage, StageResult, judge
from h5pack.order.window import DEFAULT_WINDOW
from h5pack.pack.options import convert_command
from h5pack.read.hdf5 import open_file
from h5pack.sources.hdf5_catalog import detect_names, packing_options
from h5pack.system.machine import load_average, load_text, machine_facts

# Fraction of the time budget spent on reading rows into the page cache.
_WARM_FRACTION = 0.04
# Estimated durations are multiplied by this factor, because measurements may take longer.
_LEEWAY = 1.25
# Seconds for measuring each busy fraction. Shorter if the time budget is below 5 seconds. Other small measurements,
# such as that of half a batch, may take longer.
_SMALL_MEASUREMENT_SECONDS = 0.05
# Number of stages that are measured after the file has been dropped from the page cache. If the file does not fit into
# the page cache, the loop is one more such stage. These stages run last, so time is reserved for them.
_COLD_STAGES = 2
# Minimum number of batches that are normalized and passed to the step. The first run of the step takes one batch. The
# trial and each of the three repeats take three batches: one for the step alone, and two for the loop.
_MIN_BATCHES = 13
# Do not start measurements that need more than this multiple of the remaining time. The first number is for a busy
# machine, the second for an idle one.
_SLACK_BUSY, _SLACK = 3.0, 1.5
# The stages that most verdicts need (see `Diagnosis._is_needed`). Other stages are left out if time is short.
_NEEDED = frozenset({Stage.LOADER, Stage.TRANSFORM, Stage.STEP, Stage.NORMALIZE, Stage.COPY, Stage.EVERYTHING})

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
        A module keeps its weights, but not its device, mode, gradients and buffers (such as statistics of batch
        normalization). If you need these afterwards, give a copy or a factory.
    transform : callable, optional
        The transform that runs on the host. It receives whole batches like the transform of an `H5Loader`, or single
        images like the transform of an `H5Dataset` if `num_workers` is given.
    batch_size : int
        Number of images in a batch. It is reduced to a quarter of all images if it is larger than that.
    num_threads : int, optional
        Number of threads of the `H5Loader`. None: the loader's default.
    num_workers : int, optional
        Measure a DataLoader with this many workers instead of an `H5Loader`. None: measure an `H5Loader`.
    split : str, optional
        Read only the rows of this split. None: all rows.
    images, labels : str
        Names of the HDF5 datasets of images and labels. If the file has no dataset with the default name, another one
        is detected. (In a pack, only labels are detected.)
    window : int
        Number of HDF5 chunks that are shuffled together.
    dtype : {"float32", "bfloat16", "float16"}
        Type of the images on the device. With bfloat16 or float16, a module runs under autocast.
    pin_memory : bool, optional
        Whether the loader puts batches into pinned memory. None: only if the step runs on a GPU.
    seconds : float
        Time budget in seconds, for making the model and for all measurements. If the budget is small, measurements that
        a verdict does not need are left out.
    on_progress : callable, optional
        Called with a short text before each activity, such as a measurement.

    Returns
    -------
    DoctorReport
        The speed of each stage, the bottleneck, and the advice.

    Raises
    ------
    OptionsError
        If a value is invalid, if `seconds` is far too short to measure what a verdict needs, or if the device cannot
        hold a batch.
    PackFormatError, IncompletePackError
        If `H5Dataset` cannot read the file, or there are no rows to measure.
    SizesDifferError
        If the file is not a pack, and its encoded images differ in size.
    H5PackError
        The base class of all errors; see `h5pack.errors` for the others.
    """
    options = {name: value for name, value in locals().items() if name != "on_progress"}
    with Diagnosis(DiagnoseSettings(**options), on_progress) as diagnosis:
        diagnosis.run()
        return diagnosis.report()


class Diagnosis(contextlib.AbstractContextManager["Diagnosis"]):
    """One run of `diagnose`. `report` can be called at any time and returns the results so far.

    `elapsed` is the number of seconds of the time budget that were spent before this object was created.
    """

    def __init__(
        self, settings: DiagnoseSettings, on_progress: Progress | None = None, *, elapsed: float = 0.0
    ) -> None:
        self._settings = settings
        self._show: Progress = on_progress or (lambda text: None)
        # The first optimizer of a process imports 900 modules, which took longer than all trials of a small step.
        torch.optim.SGD([torch.zeros(1)])
        self._begun = time.perf_counter() - elapsed
        self._end = self._begun + usable_seconds(settings.seconds)
        self._load = load_average()
        self._runs: dict[Stage, StageRun] = {}
        self._unknown: list[str] = []
        self._evidence: Evidence | None = None
        self._measuring = 0.0  # time.perf_counter() at the start of the first repeat; 0 before
        self._batch_seconds = 0.0  # minimum time that the device needs for a batch; 0 if unknown
        self._complete = False
        # The loop with all of PyTorch's threads, and the loop with one thread; None if they are not compared.
        self._loops: tuple[StageRun, StageRun] | None = None
        # The loop with one thread, if it could not be measured because there was too little time; else None.
        self._left_out: StageRun | None = None
        images, labels = detect_names(settings.path, settings.images, settings.labels)
        self.target = Target(replace(settings, images=images, labels=labels))

    def __exit__(self, *_: object) -> None:
        self.target.close()

    def run(self) -> None:
        """Measure all stages, and determine the bottleneck."""
        with warnings.catch_warnings():
            # Hide PyTorch's warning that there are more workers than CPUs: the report has advice on this number.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            self._run()

    def _run(self) -> None:
        target = self.target
        self._show("reading the first rows")
        try:
            target.load_sample()
        except SizesDifferError as error:
            # A pack does not raise this error. It stores the sizes of its images, so `Target` knows that they differ,
            # and decodes crops of one size.
            path = target.dataset.path
            with open_file(path) as file:
                options = packing_options(file, target.dataset.names[0], target.dataset.label_name)
            command = shlex.join(convert_command(path, {**options, "keep": "jpeg"}))
            text = f"{path}: the images differ in size; convert the file to a pack ({command}), and measure the pack"
            raise SizesDifferError(text, path=path, dataset=error.dataset, rows=error.rows) from error
        if self._left() <= 0:
            # Nothing is known about the stages, so recommend at least the default.
            self._refuse(DiagnoseSettings.seconds)
        self._show("making the step")
        target.make_step()
        for at_least, probably in target.batch_seconds():
            self._batch_seconds = at_least
            # Refuse now if there is too little time, either for one whole batch or for all measurements.
            if self._is_hopeless(_MIN_BATCHES * at_least) or at_least > self._left():
                self._refuse(_MIN_BATCHES * probably)
        target.use_whole_batch()
        target.warm(_WARM_FRACTION * self._settings.seconds)
        hot = self._try_out(target.hot_runs())
        hot += self._try_out_loops(hot)
        self._measuring = time.perf_counter()
        # Cold stages drop the file from the page cache. They run last, so that the cache has to be filled only once.
        needed, left = min_total_seconds(hot), self._left()
        for_hot = max(needed, left * len(hot) / (len(hot) + _COLD_STAGES + (not target.fits_cache)))
        measure_in_turns(hot, min(self._end, self._measuring + for_hot), self._repeat, time.perf_counter)
        # If other processes slowed a stage down, it may have too few repeats. Repeat it before the cold stages.
        needed_runs = [run for run in hot if self._is_needed(run.stage)]
        while late := next((run for run in needed_runs if self._lacks_repeats(run)), None):
            self._repeat(late, late.min_seconds)
        measured = self._small_measurements()
        measure_in_turns(self._try_out(target.cold_runs()), self._end, self._repeat, time.perf_counter)
        self._complete = True
        self._collect_evidence(measured)

    def report(self) -> DoctorReport:
        """Return the results so far."""
        target, evidence = self.target, self._evidence
        verdict = None if evidence is None else judge(evidence)
        enough, unknown = self._enough_seconds(), list(self._unknown)
        if self._left_out is not None:
            why = f"there was too little time to measure the training with one thread; give seconds={enough:g} or more"
            unknown.insert(0, f"{_threads_question()}: {why}, or compare with a run under OMP_NUM_THREADS=1")
        return DoctorReport(
            target=target.describe(),
            evidence=evidence,
            stages=tuple(self._results().values()),
            verdict=verdict,
            advice=() if verdict is None or evidence is None else tuple(advise(verdict, evidence)),
            unknown=tuple(unknown),
            failures=tuple(dict.fromkeys(target.failures.values())),
            enough_seconds=enough,
            seconds=time.perf_counter() - self._begun,
            machine=machine_facts(Path(os.path.dirname(target.dataset.path))),
        )

    def _left(self) -> float:
        return self._end - time.perf_counter()

    def _try_out(self, runs: Sequence[StageRun]) -> list[StageRun]:
        """Run stages briefly to learn how long a repeat takes, the needed stages first (see `_is_needed`).

        Return the stages to measure: the needed stages that did not fail, and as many others as the time allows. Raise
        OptionsError if there is far too little time for the needed stages.
        """
        tried: list[StageRun] = []
        for run in sorted(runs, key=lambda run: not self._is_needed(run.stage)):
            self._runs[run.stage] = run
            needed = self._is_needed(run.stage)
            self._show(f"{run.stage.words}, a trial")
            least = 2 * self._batch_seconds if run.stage is Stage.EVERYTHING else 0.0
            fits = self._left() > (least if needed else min_total_seconds(tried))
            if fits and self._guarded(run.stage, run.try_out):
                others_fit = self._left() > min_total_seconds((*tried, run))
                tried += [run] if needed or others_fit else []
            hopeless = not fits or self._is_hopeless(min_total_seconds(tried))
            if needed and not self._measuring and hopeless:
                self._refuse()
        return tried

    def _is_hopeless(self, needed: float) -> bool:
        """Return whether `needed` seconds exceed the remaining time by so much that measuring can hardly succeed.

        On a busy machine, a larger excess is accepted, because the machine may become idle.
        """
        return needed > (_SLACK_BUSY if load_text(self._load) else _SLACK) * self._left()

    def _is_needed(self, stage: Stage) -> bool:
        if not self.target.fits_cache and stage is Stage.COLD:
            return True
        return stage in _NEEDED and not (stage is Stage.LOADER and self.target.has_transform)

    def _lacks_repeats(self, run: StageRun) -> bool:
        """Return whether to repeat a stage: it has too few repeats, none has failed, and there is time for another."""
        fits = _LEEWAY * run.total_seconds <= self._left()
        return fits and len(run.repeats) < MIN_REPEATS and run.stage not in self.target.reasons

    def _repeat(self, run: StageRun, seconds: float) -> bool:
        """Measure a repeat of a stage; return whether that succeeded."""
        self._show(f"{run.stage.words}, repeat {len(run.repeats) + 1}")
        return self._guarded(run.stage, partial(run.repeat, seconds))

    def _small_measurements(self) -> dict[str, Any]:
        """Measure the fields of `Evidence` that are not results of stages; return them by name.

        The first `hot_rows` rows must be in the page cache.
        """
        target, budget = self.target, self._settings.seconds
        found: dict[str, Any] = {"load": self._load}
        self._show("small measurements")
        seconds = min(_SMALL_MEASUREMENT_SECONDS, 0.01 * budget)

        def measure(name: str, stage: Stage, call: Callable[[], Any]) -> None:
            self._guarded(stage, lambda: found.update({name: call()}))

        measure("read_busy_fraction", Stage.HOT, lambda: target.reader.busy_fraction(seconds, target.hot_rows))
        measure("transform_busy_fraction", Stage.TRANSFORM, lambda: target.transform_busy_fraction(seconds))
        run, step = self._runs.get(Stage.STEP), target.step
        if run is not None and step is not None and Stage.STEP not in target.reasons:
            found["one_thread_ratio"] = self._one_thread_ratio()
            enough = max(6 * run.min_seconds, seconds)
            if enough < min(0.05 * budget, 0.25 * self._left()):
                measure("half_batch_ratio", Stage.STEP, lambda: target.stages.half_batch_ratio(step, enough))
            else:
                self._unknown.append("whether the batch is too small: there was no time to measure half a batch")
            if target.on_gpu:
                found["synchronizations"], found["synchronized_at"] = target.stages.synchronizations(step)
        if not target.on_gpu:
            self._unknown.append("host synchronization, unpinned memory and idle GPUs: the step runs on the CPU")
        return found

    def _try_out_loops(self, hot: Sequence[StageRun]) -> list[StageRun]:
        """Return the loops to measure in order to compare one PyTorch thread with all threads.

        These are the loop with one thread and, if `hot` does not contain it, the loop with all threads. Return an empty
        list if the loops cannot be compared. If the reason is lack of time, set `_left_out`.
        """
        threads, reasons = torch.get_num_threads(), self.target.reasons
        if self.target.on_gpu or threads < 2 or Stage.STEP not in self._runs or Stage.STEP in reasons:
            return []
        # Compare loops that read from the page cache. If the file does not fit into memory, the stage "everything
        # together" is measured later and reads from the disk, so also measure a loop with all threads here.
        together = self._runs.get(Stage.EVERYTHING) or next(iter(self.target.loop(self.target.hot_rows)), None)
        if together is None or Stage.EVERYTHING in reasons:
            return []
        more = [] if together in hot else [together]
        if more and not self._guarded(Stage.EVERYTHING, together.try_out):
            return []
        # Before the trial, assume the worst: with one thread, the loop takes `threads` times as long.
        alone = StageRun(Stage.EVERYTHING, partial(with_one_thread, together.run), together.prepare)
        alone.min_seconds, alone.overhead_seconds = threads * together.min_seconds, together.overhead_seconds
        others = (*hot, *more)
        if self._left() > min_total_seconds(others) + alone.total_seconds:
            self._show(f"{Stage.EVERYTHING.words}, with one thread, a trial")
            if not self._guarded(Stage.EVERYTHING, alone.try_out):
                return []
            if self._left() > min_total_seconds((*others, alone)):
                self._loops = together, alone
                return [*more, alone]
        self._left_out = alone
        return []

    def _one_thread_ratio(self) -> float | None:
        """Return the loop's speed with one PyTorch thread divided by its speed with all threads.

        None if the loops were not compared, if there are too few repeats, or if the repeats disagree on whether one
        thread is faster.
        """
        if self._loops is None or Stage.EVERYTHING in self.target.reasons:
            return None
        pairs = zip(*(run.repeats for run in self._loops), strict=False)
        ratios: list[float] = sorted(alone.rate / together.rate for together, alone in pairs if together.images)
        if len(ratios) < MIN_REPEATS:
            self._left_out = self._loops[1]
            return None
        low, middle, high = ratios[0], statistics.median(ratios), ratios[-1]
        if (middle > FASTER_ALONE and low > 1) or high <= FASTER_ALONE:
            return middle
        times = f"with one thread, the training is {low:.1f} to {high:.1f} times as fast"
        self._unknown.append(f"{_threads_question()}: {times}; compare with a run under OMP_NUM_THREADS=1")
        return None

    def _guarded(self, stage: Stage, call: Callable[[], Any]) -> bool:
        """Call `call`; return whether it succeeded. If not, record the error as the reason not to measure `stage`."""
        try:
            call()
            return True
        except NotMeasured as error:
            self.target.reasons[stage] = str(error)
        except Exception as error:
            # The user's transform and model may raise any exception, on any batch.
            self.target.record_failure(stage, error, f"'{stage.words}' failed")
        return False

    def _results(self) -> dict[Stage, StageResult]:
        reasons, runs = self.target.reasons, self._runs
        return {
            stage: runs[stage].result()
            if stage in runs and stage not in reasons and (runs[stage].repeats or self._complete)
            else StageResult(stage, reason=reasons.get(stage, INTERRUPTED))
            for stage in Stage
        }

    def _collect_evidence(self, measured: dict[str, Any]) -> None:
        everything = self._runs.get(Stage.EVERYTHING)
        repeats = [one for one in everything.repeats if one.seconds] if everything is not None else []
        if repeats:
            seconds, stalls = sum(one.seconds for one in repeats), [one.stall_seconds / one.seconds for one in repeats]
            measured["stall_fraction"] = sum(one.stall_seconds for one in repeats) / seconds
            measured["stall_range"] = (min(stalls), max(stalls))
            if not self.target.on_gpu:
                measured["normalize_fraction"] = sum(one.normalize_seconds for one in repeats) / seconds
        self._evidence = self.target.evidence(**measured, stages=self._results())
        if busy := load_text(self._load):
            self._unknown.append(f"the speed on an idle machine: other processes use this machine ({busy})")

    def _enough_seconds(self, min_seconds: float = 0.0) -> float:
        """Return the estimated time budget, in seconds, that is enough for all stages.

        Assume that measuring takes at least `min_seconds`.
        """
        before = (self._measuring or time.perf_counter()) - self._begun
        runs = [*self._runs.values(), *([] if self._left_out is None else [self._left_out])]
        measuring = max(min_seconds, min_total_seconds(runs))
        if not self._measuring and Stage.EVERYTHING not in self._runs:
            # `measuring` does not include the loop yet. A repeat of the loop needs two batches. Assume that each batch
            # takes as long as all other stages together.
            measuring *= 3
        # Recommend more seconds than were given, even if the estimate is lower.
        before = max(before, self._settings.seconds - measuring)
        needed = _LEEWAY * (before + measuring) + 0.5
        return math.ceil(needed) if needed > 3 else math.ceil(10 * needed) / 10

    def _refuse(self, min_seconds: float = 0.0) -> None:
        """Raise an OptionsError that says that the time budget is too short, and recommends a longer one."""
        settings, enough = self._settings, self._enough_seconds(min_seconds)
        busy = load_text(self._load)
        raise OptionsError(
            f"seconds={settings.seconds:g} is too short to measure batches of {self.target.batch_size} images on this "
            f"machine{f', which other processes use ({busy})' if busy else ''}; give at least seconds={enough:g}, or a "
            "smaller batch_size",
            parameters=(f"seconds={settings.seconds:g}", f"seconds={enough:g}", "batch_size"),
        )


def _threads_question() -> str:
    return f"whether PyTorch's {torch.get_num_threads()} threads slow the training down"
