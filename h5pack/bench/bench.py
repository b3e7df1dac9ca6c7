"""The bench from end to end: pack a sample, sweep, run off the fastest, recommend; all of it within a time."""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from h5pack.bench.cell import Cell
from h5pack.bench.interruption import Interruption
from h5pack.bench.plan import CellPlan, is_hopeless, least_of, least_seconds, plan_cells
from h5pack.bench.recommend import Question, choose, contenders, decisive
from h5pack.bench.report import BenchReport, Ceiling
from h5pack.bench.sample import Sample, make_sample
from h5pack.bench.scratch import Scratch
from h5pack.bench.settings import BenchSettings
from h5pack.bench.subject import Subject, find_subject
from h5pack.bench.sweep import Sweep
from h5pack.errors import OptionsError
from h5pack.machine import available_cpus, available_memory, free_bytes
from h5pack.measure.machine_facts import machine_facts
from h5pack.measure.memory_copy import MemoryCopy
from h5pack.measure.page_cache import drop_cache
from h5pack.measure.sequential_read import sequential
from h5pack.pack.options import ConvertOptions
from h5pack.pack.plan import human_bytes

_COPY_BYTES = 256 * 1024 * 1024
_MOST_THREADS = 4
_FINAL_SHARE = 0.35
_WARM_SHARE = 0.1
_CHUNKS_SHARE = 0.65
_MOST_TRIED = 16
"""Threads and workers beyond this are tried only where they are asked for."""
_RESERVE_SECONDS = 0.5
_SEQUENTIAL_SECONDS = 0.3


class Bench:
    """One bench.

    Parameters
    ----------
    path : path, optional
        A folder of images, any HDF5 file, or None: pictures are made.
    settings : BenchSettings
    convert : ConvertOptions, optional
        How images become rows: source, include and the like, size, fit, layout, mode.
    progress : bool
        Show a bar on standard error, where that is a terminal.

    Attributes
    ----------
    report : BenchReport or None
        What is known so far, also after an interruption; None before there is anything.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        settings: BenchSettings | None = None,
        convert: ConvertOptions | None = None,
        *,
        progress: bool = False,
    ) -> None:
        self._path = path
        self._settings = settings or BenchSettings()
        options = convert or ConvertOptions()
        self._options = _with(options, self._settings)
        self._bar = tqdm(
            total=self._settings.seconds,
            disable=not progress or not sys.stderr.isatty(),
            bar_format="{desc:<22}{bar}| {elapsed}",
            leave=False,
        )
        self._interruption = Interruption()
        self.report: BenchReport | None = None

    def run(self) -> BenchReport:
        """Measure, and recommend.

        Raises
        ------
        H5PackError
            If there is nothing to measure, no time or no space for it.
        """
        begun = time.monotonic()
        end = begun + self._settings.seconds
        try:
            with self._interruption, Scratch(self._settings.scratch) as scratch:
                with self._phase("packing a sample"):
                    subject = find_subject(self._path, self._options, scratch.path)
                    sample = make_sample(subject, self._settings, scratch)
                packing = time.monotonic() - begun
                self._tick(packing)
                report = self.report = _begin_report(subject, sample, self._settings, scratch.path)
                report.seconds["packing"] = packing
                with _warning_once():
                    self._measure(report, sample, subject, end)
                report.complete = True
        finally:
            self._bar.close()
            if self.report is not None:
                self.report.seconds["all"] = time.monotonic() - begun
        return report

    def _measure(self, report: BenchReport, sample: Sample, subject: Subject, end: float) -> None:
        settings = self._settings
        batch = min(settings.batch_sizes[0], max(1, sample.rows // 4))
        if batch < settings.batch_sizes[0]:
            report.notes.append(f"Batches of {batch} rows, since the sample has {sample.rows:,}.")
        threads = min(_MOST_THREADS, available_cpus())
        needed = least_seconds(sample.files, settings, batch, threads)
        _require_time(end - time.monotonic() - _RESERVE_SECONDS, needed, report.seconds["packing"], settings)
        sweep = Sweep(sample.files, settings.seed, self._tick)
        with self._phase("warming up"):
            sweep.warm(_WARM_SHARE * (end - time.monotonic()))
        left = end - time.monotonic() - _RESERVE_SECONDS
        plan = plan_cells(sample.files, settings, batch, threads, (1 - _FINAL_SHARE) * left)
        _note_left_out(report, plan, sample, batch)
        copy = _Copy(sample, batch, threads, report)
        try:
            with self._phase("page cache warm"):
                share = _hot_share(plan) * (1 - _FINAL_SHARE) * left
                sweep.measure(plan.hot, share, report.measurements, [copy.turn])
            copy.done()
            reading = _Sequential(sample, report)
            with self._phase("page cache cold"):
                share = (1 - _FINAL_SHARE) * left - share
                sweep.measure(plan.cold, share, report.measurements, [reading.turn] if plan.cold else [])
        finally:
            copy.done()
        question = _question(subject, sample, settings, batch, threads, copy.median(threads))
        with self._phase("run-off"):
            self._run_off(sweep, report, question, end - _RESERVE_SECONDS)
        report.recommendation = choose(report.files, report.measurements, report.trials, question)

    def _run_off(self, sweep: Sweep, report: BenchReport, question: Question, end: float) -> None:
        """The fastest chunks again, side by side; then on the best of them threads and workers."""
        cache, _ = decisive(question, report.measurements)
        cells = contenders(report.files, report.measurements, question, cache)
        if not cells:
            return
        sweep.measure(cells, _CHUNKS_SHARE * (end - time.monotonic()), report.trials, anew=True)
        interim = choose(report.files, report.measurements, report.trials, question)
        if interim is None:
            return
        counts = [count for count in _powers(available_cpus()) if count <= _MOST_TRIED]
        more = []
        for count in self._settings.threads or counts:
            more.append(Cell(interim.stored, "window", "direct", cache, question.batch, question.window, count))
        for count in self._settings.workers or counts:
            if (why := _no_room(count, question)) is not None:
                report.notes.append(why)
            else:
                more.append(Cell(interim.stored, "window", "direct", cache, question.batch, question.window, 1, count))
        # What was measured a moment ago counts already.
        more = [cell for cell in dict.fromkeys(more) if cell not in cells]
        sweep.measure(more, end - time.monotonic(), report.trials)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._bar.set_description_str(name)
        begin = time.monotonic()
        try:
            yield
        finally:
            if self.report is not None:
                self.report.seconds[name] = time.monotonic() - begin

    def _tick(self, seconds: float) -> None:
        self._interruption.check()
        self._bar.update(min(seconds, max(0.0, self._settings.seconds - self._bar.n)))


class _Copy:
    """The ceiling of warm reads, measured in every turn."""

    def __init__(self, sample: Sample, batch: int, threads: int, report: BenchReport) -> None:
        rows = max(batch, min(sample.rows, _COPY_BYTES // sample.row_bytes))
        self._copy: MemoryCopy | None = None
        if (rows + 3 * threads * batch) * sample.row_bytes <= available_memory() // 4:
            self._copy = MemoryCopy(rows, sample.row_bytes, batch, threads)
        else:
            report.notes.append("A memory copy, the ceiling of warm reads, was left out for want of memory.")
        self._speeds: dict[int, list[float]] = {count: [] for count in sorted({1, threads})}
        self._report = report

    def turn(self) -> None:
        for count, speeds in self._speeds.items():
            if self._copy is not None:
                speeds.append(self._copy(count, len(speeds)))

    def done(self) -> None:
        """Put down what is known, and give the memory back."""
        if self._copy is not None:
            self._report.ceilings += [
                Ceiling("memory copy", count, "hot", tuple(speeds)) for count, speeds in self._speeds.items() if speeds
            ]
            self._copy = None

    def median(self, threads: int) -> float | None:
        speeds = self._speeds[threads]
        return statistics.median(speeds) if speeds else None


class _Sequential:
    """The ceiling of cold reads, measured in every turn."""

    def __init__(self, sample: Sample, report: BenchReport) -> None:
        # A compressed file's bytes are not those of its images.
        plain = [stored for stored in sample.files if stored.compression == "none"]
        self._stored = plain[-1] if plain else None
        self._row_bytes = sample.row_bytes
        self._report = report
        self._speeds: list[float] = []

    def turn(self) -> None:
        if self._stored is None:
            return
        path = Path(self._stored.path)
        if drop_cache(path):
            self._stored = None
        else:
            self._speeds.append(sequential(path, seconds=_SEQUENTIAL_SECONDS) / self._row_bytes)
            others = [one for one in self._report.ceilings if one.name != "sequential read"]
            self._report.ceilings[:] = [*others, Ceiling("sequential read", 1, "cold", tuple(self._speeds))]


def _with(options: ConvertOptions, settings: BenchSettings) -> ConvertOptions:
    changed = {
        name: value
        for name, value in (("size", settings.size), ("images", settings.images), ("labels", settings.labels))
        if value is not None
    }
    return replace(options, **changed)  # type: ignore[arg-type]


def _begin_report(subject: Subject, sample: Sample, settings: BenchSettings, folder: Path) -> BenchReport:
    return BenchReport(
        subject=subject.name,
        kind=subject.kind,
        images=subject.images,
        row_shape=sample.row_shape,
        row_bytes=sample.row_bytes,
        sample_rows=sample.rows,
        budget_seconds=settings.seconds,
        machine=machine_facts(folder),
        files=list(sample.files),
        faults=subject.faults,
        cure=subject.cure,
        notes=list(sample.notes),
        pack_images_per_s=sample.pack_images_per_s,
    )


def _require_time(left: float, needed: float, packing: float, settings: BenchSettings) -> None:
    if left < needed:
        raise OptionsError(
            f"a budget of {settings.seconds:g} s is too small: packing the sample took {packing:.1f} s, and measuring "
            f"takes {needed:.1f} s at least; give --seconds {1.5 * (packing + needed) + 1:.0f}, fewer --rows or fewer "
            "sizes to compare"
        )


def _no_room(workers: int, question: Question) -> str | None:
    """Why so many workers cannot hand over batches; None: they can."""
    shared = Path("/dev/shm")
    # DataLoader's prefetch_factor is 2.
    needed = 2 * workers * question.batch * question.row_bytes
    if not shared.is_dir() or needed <= free_bytes(shared):
        return None
    return (
        f"{workers} workers of a DataLoader were left out: their batches need {human_bytes(needed)} of shared memory, "
        f"and {human_bytes(free_bytes(shared))} are free in {shared}."
    )


@contextmanager
def _warning_once() -> Iterator[None]:
    """Have each of h5pack's warnings appear once: files are opened for each measurement."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in seen
        seen.add(text)
        return new

    logger = logging.getLogger("h5pack")
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def _question(
    subject: Subject, sample: Sample, settings: BenchSettings, batch: int, threads: int, copy: float | None
) -> Question:
    return Question(
        source="" if subject.kind == "generated" else subject.source,
        options=sample.options,
        images=subject.images,
        row_bytes=sample.row_bytes,
        sample_rows=sample.rows,
        row_shape=sample.row_shape,
        default_rows=sample.default_rows,
        memory=available_memory(),
        batch=batch,
        window=settings.window,
        threads=threads,
        cpus=available_cpus(),
        copy=copy,
    )


def _note_left_out(report: BenchReport, plan: CellPlan, sample: Sample, batch: int) -> None:
    if plan.left_out:
        kinds = dict.fromkeys(f"{one.engine} {one.order} ({one.cache})" for one in plan.left_out)
        report.notes.append(f"For want of time these were left out: {', '.join(kinds)}; give more --seconds.")
    slow = [stored.label for stored in sample.files if is_hopeless(stored, batch)]
    if slow:
        report.notes.append(
            f"The full shuffle of {', '.join(slow)} was left out: each batch would decode more than a gigabyte."
        )


def _hot_share(plan: CellPlan) -> float:
    hot, cold = (sum(map(least_of, cells)) for cells in (plan.hot, plan.cold))
    return hot / (hot + cold) if hot + cold else 0.0


def _powers(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most` itself."""
    found = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*found, most]
