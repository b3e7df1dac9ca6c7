"""`bench`: within a time budget, pack a sample with several chunk sizes, time reading it, and recommend one size.

A file variant is the sample with one chunk size and compression. A case is a file variant and the order, reader, cache
state and settings to read it with. The cases that decide the recommendation are measured first: one case for each
variant, and then the *run-off*, which measures the fastest variants again, and tries other loader settings with the
best one. The remaining time is for the cases that only appear in the tables. All measurements but those of the run-off
are the *sweep*.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from h5pack.benchmark.cases import (
    CACHES,
    ENGINES,
    LEEWAY,
    MIN_REPEATS,
    NO_TIME,
    ORDERS,
    BenchCase,
    BenchSettings,
    all_cases,
    enough_seconds,
    exceeds_decode_budget,
    is_small,
    min_bench_seconds,
    min_seconds,
    plan_cases,
    usable_seconds,
)
from h5pack.benchmark.ceilings import Ceilings
from h5pack.benchmark.loader_settings import Workload, deciding_caches, limited_batch_size
from h5pack.benchmark.plots import check_plot_file, draw_bench
from h5pack.benchmark.recommend import Findings, Recommendation, choose, finalists, missing
from h5pack.benchmark.report import BenchReport
from h5pack.benchmark.sample import BenchInput, BenchSample, dataset_images, find_input, make_sample, scratch_folder
from h5pack.benchmark.sweep import Sweep
from h5pack.errors import OptionsError
from h5pack.pack.options import parse_size
from h5pack.system.machine import available_cpus, available_memory, load_average, machine_facts
from h5pack.system.parameters import flags, invalid
from h5pack.system.progress import progress_bar

_MAX_THREADS = 4
_TRIED = (1, 2, 4, 8, 16)
"""Default numbers of threads and workers to compare. Numbers above the number of CPUs are left out. The number of CPUs
is added if it is below 16."""
_WARM_SHARE, _COMPARE_SHARE, _FINALISTS_SHARE, _SETTINGS_SHARE = 0.1, 0.2, 0.5, 0.25
"""Fractions of the remaining time for warming up, for comparing variants, for measuring the fastest variants again, and
for measuring each of two sets of loader settings."""
_SMALL_SECONDS = 10.0
"""Time limit for measuring a sample that is too small to compare variants. It is longer if there are many variants."""
_REST_TURNS = 4
"""If no other cases are left to measure, the run-off is repeated while there is time for more than this many turns."""


def bench(
    source: str | os.PathLike[str] | None = None,
    *,
    seconds: float = 60.0,
    chunk_rows: int | Sequence[int] = (),
    chunk_bytes: int | Sequence[int] = (),
    contiguous: bool = True,
    orders: str | Sequence[str] = ORDERS,
    engines: str | Sequence[str] = ENGINES,
    caches: str | Sequence[str] = CACHES,
    compression: str | Sequence[str] = "none",
    batch_size: int | Sequence[int] = 256,
    window: int | Sequence[int] = 16,
    num_threads: int | Sequence[int] = (),
    num_workers: int | Sequence[int] = (),
    rows: int | None = None,
    num_images: int | None = None,
    size: int | tuple[int, int] | str | None = None,
    source_kind: str | None = None,
    images: str | None = None,
    labels: str | None = None,
    scratch: str | os.PathLike[str] | None = None,
    seed: int = 0,
    plot: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> BenchReport:
    """Measure which chunks and loader settings are fastest on this machine.

    Pack a sample of the images with several chunk sizes, read each file in several ways, and recommend a chunk size.
    Temporary files are removed. If several batch sizes or windows are given, everything else is measured with the first
    batch size and the first window.

    Parameters
    ----------
    source : path, optional
        Any path that `convert` accepts as its source. None: generate images.
    seconds : float
        Time budget for everything, including packing. The cases that decide the recommendation are measured first.
    chunk_rows, chunk_bytes : int or sequence of int
        Chunk sizes to compare, in rows or bytes. Default: 64 KiB to 16 MiB, and the default of `convert`.
    contiguous : bool
        Whether to also measure a contiguous (unchunked) copy of the sample.
    orders : sequence of {"sequential", "window", "full", "single"}
        Orders of reading: as stored, window shuffle, full shuffle, one random index per call.
    engines : sequence of {"direct", "tuned", "default"}
        Readers: H5Loader reading the file directly, H5Loader reading through the HDF5 library with a tuned chunk cache,
        and plain h5py. For the order "single", H5Dataset replaces the first one, and h5py with a tuned chunk cache the
        second one.
    caches : sequence of {"hot", "cold"}
        Page-cache states: the file is in the page cache, or was dropped from it before reading.
    compression : str or sequence of str
        Compression methods to compare, as for `convert`.
    batch_size : int or sequence of int
        Rows per batch. The first value is reduced to a quarter of the sample if it is larger.
    window : int or sequence of int
        Number of chunks that are shuffled together.
    num_threads, num_workers : int or sequence of int
        Numbers to compare: of H5Loader's reading threads, and of a DataLoader's worker processes. Default: the number
        of CPUs that this process may use, but at most 16, and all powers of two below that number.
    rows : int, optional
        Number of rows in the sample. Default: as many as time, memory and disk allow, up to 512 MiB.
    num_images : int, optional
        Number of images in the dataset that the recommendation is for, if `source` is only a part of it. Default: the
        number of images in `source`. Generated images stand for a large dataset.
    size : int, (int, int) or str, optional
        Height and width of every packed image, as for `convert`. Default: the size of the images, or 224x224 if their
        sizes differ.
    source_kind : str, optional
        Kind of `source`, as for `convert`. Default: detect it.
    images, labels : str, optional
        Names of the datasets of images and labels in an HDF5 file. Default: detect them.
    scratch : path, optional
        Folder for temporary files. The disk that holds it is measured. Default: the working directory if that is
        writable, else the system's temporary folder.
    seed : int
        Seed of the shuffled orders.
    plot : path, optional
        File to draw the result into: .png, .svg or .pdf.
    progress : bool
        Whether to show a progress bar on standard error if that is a terminal.

    Returns
    -------
    BenchReport
        ``print(report.to_text())`` shows the recommendation; ``report.to_json()`` returns all measurements.

    Raises
    ------
    H5PackError
        If there are too few images, a value is invalid, or there is too little time or disk space.
    """
    keywords = {name: value for name, value in locals().items() if name not in ("source", "plot", "progress")}
    if plot is not None:
        check_plot_file(plot)
    report = BenchRun(source, make_settings(**keywords), progress=progress).run()
    if plot is not None:
        draw_bench(report, plot)
    return report


def make_settings(**keywords: Any) -> BenchSettings:
    """Return the settings for keywords of `bench`. A single value becomes a tuple if its keyword accepts several."""
    several = {field.name for field in fields(BenchSettings) if isinstance(field.default, tuple)}
    for name in several & keywords.keys():
        values = keywords[name]
        # Arrays and tensors without axes are Iterable, too, but iterating over them fails.
        is_several = isinstance(values, Iterable) and not isinstance(values, str) and getattr(values, "ndim", True)
        try:
            keywords[name] = tuple(dict.fromkeys(values)) if is_several else (values,)
        except TypeError as error:  # A list in a list is not hashable.
            raise invalid(name, values, "give one value, or a list of values") from error
    if keywords.get("size") is not None:
        keywords["size"] = parse_size(keywords["size"])
    return BenchSettings(**keywords)


@dataclass
class _Comparison:
    """Takes the measurements that decide the recommendation, until the time `end`, and adds them to `findings`."""

    findings: Findings
    settings: BenchSettings
    sweep: Sweep
    ceilings: Ceilings
    clock: Callable[[], float]
    end: float  # As returned by `clock`.

    def compare(self, cases: Sequence[BenchCase]) -> float:
        """Measure the cases that compare variants. Return the estimated seconds to measure each of them once."""
        workload, found = self.findings.workload, self.findings.measurements
        turn, left = 0.0, self.end - self.clock()
        for cache in deciding_caches(workload, self.settings.caches):
            self.findings = replace(self.findings, cache=cache)
            chosen = [case for case in cases if case == workload.case(case.variant, cache)]
            turn = self.sweep.measure(chosen, _COMPARE_SHARE * left, found, self.ceilings, end=self.end)
            if any(one.speeds for one in found):
                break
        return turn

    def run_off(self) -> bool:
        """Measure the fastest variants again, then other loader settings. Return whether any repeats were added."""
        workload, left, before = self.findings.workload, self.end - self.clock(), self._repeats()
        chosen = choose(self.findings)
        if chosen is None or not chosen.compared or missing(self.findings):
            return False
        cases, found = finalists(self.findings), self.findings.run_off
        self.sweep.measure(cases, _FINALISTS_SHARE * left, found, self.ceilings, reload_each_repeat=True)
        chosen = choose(self.findings) or chosen
        counts = sorted({count for count in (*_TRIED, workload.cpus) if count <= min(workload.cpus, max(_TRIED))})
        usual = workload.case(chosen.variant, self.findings.cache)
        threads = [replace(usual, num_threads=count) for count in self.settings.num_threads or counts]
        windows = [replace(usual, window=window) for window in self.settings.window]
        alone = replace(usual, num_threads=1)
        workers = [replace(alone, num_workers=count) for count in self.settings.num_workers or counts]
        # Measure the usual settings again beside other windows and numbers of threads.
        for others in ([*dict.fromkeys([usual, *threads, *windows])], workers):
            seconds = _SETTINGS_SHARE * (self.end - self.clock())
            self.sweep.measure(others, seconds, found, self.ceilings, end=self.clock() + seconds)
        return self._repeats() > before

    def _repeats(self) -> int:
        return sum(len(one.speeds) for one in self.findings.run_off)

    def measure_first_epoch(self, chosen: Recommendation) -> None:
        """If only first epochs decode chunks, measure first epochs, and add their speeds to the workload."""
        workload = self.findings.workload
        speeds = self.sweep.first_epoch(workload.case(chosen.variant, chosen.judged_by), self.end)
        self.findings = replace(self.findings, workload=replace(workload, first_epoch=speeds))


class BenchRun:
    """One run of `bench`.

    Until packing ends, `report` is None. From then on, it holds the results so far, even after an interruption.
    `elapsed` is the part of the time budget that was used before this object was made, in seconds.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | None,
        settings: BenchSettings,
        *,
        progress: bool = False,
        clock: Callable[[], float] = time.monotonic,
        elapsed: float = 0.0,
    ) -> None:
        self._begun, self._load = clock() - elapsed, load_average()
        self._source = source
        self._settings = settings
        self._clock = clock
        (progress,) = flags(progress=progress)
        self._bar = progress_bar(
            settings.seconds, disable=None if progress else True, bar_format="{desc:<22}{bar}| {elapsed}", leave=False
        )
        self.report: BenchReport | None = None

    def run(self) -> BenchReport:
        """Measure the cases, as far as time allows, and return the report."""
        settings, begin = self._settings, self._begun
        end = begin + usable_seconds(settings.seconds)
        try:
            with scratch_folder(settings.scratch) as scratch:
                with self._phase("packing a sample"):
                    source = find_input(self._source, scratch, settings)
                    sample = make_sample(source, settings, scratch, self._clock, end - self._clock())
                packing = self._clock() - begin
                self._on_progress()
                report = self.report = BenchReport(
                    source="generated images" if source.kind == "generated" else source.source,
                    kind=source.kind,
                    num_images=dataset_images(source, settings) or source.num_images,
                    source_images=source.num_images,
                    row_shape=sample.row_shape,
                    row_bytes=sample.row_bytes,
                    sample_rows=sample.rows,
                    budget_seconds=settings.seconds,
                    machine=machine_facts(scratch),
                    variants=list(sample.variants),
                    faults=source.faults,
                    fix=source.fix,
                    notes=list(sample.notes),
                    seconds={"packing": packing},
                    pack_images_per_s=sample.pack_images_per_s,
                    load=self._load,
                )
                self._measure(report, sample, source, end)
                report.complete = True
        finally:
            self._bar.close()
            if self.report is not None:
                self.report.seconds["all"] = self._clock() - begin
        return report

    def _measure(self, report: BenchReport, sample: BenchSample, source: BenchInput, end: float) -> None:
        settings = self._settings
        batch_size = limited_batch_size(settings.batch_size[0], sample.rows)
        decodes_input = any(one.is_input and one.compression != "none" for one in sample.variants)
        workload = Workload(
            source=_command_source(report, source),
            options=sample.options, num_images=report.num_images, row_bytes=sample.row_bytes, sample_rows=sample.rows,
            row_shape=sample.row_shape, default_chunk_rows=sample.default_chunk_rows, memory_bytes=available_memory(),
            batch_size=batch_size, window=settings.window[0], num_threads=min(_MAX_THREADS, available_cpus()),
            cpus=available_cpus(), split=source.split, fields=source.fields,
            asked_batch_size=settings.batch_size[0],
            any_size=dataset_images(source, settings) is None,
            decodes_input=decodes_input and bool(source.faults),
        )  # fmt: skip
        every = all_cases(sample.variants, settings, batch_size, workload.num_threads)
        first = deciding_caches(workload, settings.caches)[0]
        needed = min_bench_seconds([case for case in every if case == workload.case(case.variant, first)])
        _require_time(end - self._clock(), needed, report.seconds["packing"], settings)
        if is_small(sample.rows, sample.row_bytes):
            end = min(end, self._clock() + max(_SMALL_SECONDS, 2 * needed))
        sweep = Sweep(sample.variants, settings.seed, self._on_progress, self._clock, report.num_images)
        with self._phase("warming up"):
            sweep.warm(_WARM_SHARE * (end - self._clock()))
            most = min(workload.cpus, max(workload.num_threads, *(settings.num_threads or _TRIED)) + 1)
            ceilings = Ceilings(sample.variants, sample.rows, sample.row_bytes, batch_size, most)
        if ceilings.copy_threads < min(workload.num_threads + 1, workload.cpus):
            report.notes.append("There is too little memory to measure a memory copy, the ceiling of warm reads.")
        findings = Findings(report.variants, report.measurements, report.run_off, workload, first)
        comparison = _Comparison(findings, settings, sweep, ceilings, self._clock, end)
        try:
            with self._phase("comparing chunk sizes"):
                turn = comparison.compare(every)
            with self._phase("run-off"):
                more = comparison.run_off()
                # If there are no other cases, all of the time goes to the run-off.
                while more and len(report.measurements) == len(every) and end - self._clock() > _REST_TURNS * turn:
                    more = comparison.run_off()
        finally:
            report.ceilings += ceilings.results()
        chosen, judged_by = choose(comparison.findings), comparison.findings.cache
        report.missing = missing(comparison.findings, sample.not_packed)
        failed = {one.case for one in report.measurements if one.reason not in (None, NO_TIME)}
        if chosen is not None and not report.missing:
            comparison.measure_first_epoch(chosen)
            report.recommendation = choose(comparison.findings)
        # More time would not help if all the deciding cases failed, or if the settings exclude all of them.
        elif not failed.issuperset(case for case in every if case == workload.case(case.variant, judged_by)):
            needed = report.seconds["packing"] + report.seconds["warming up"] + (MIN_REPEATS + 1) * turn
            report.enough_seconds = math.ceil(LEEWAY * max(needed, settings.seconds))
        ceilings.copy = None  # Free the memory of its arrays.
        if "full" in settings.orders:
            _note_slow(report, sample, batch_size)
        if chosen is not None and not chosen.compared:
            end = min(end, self._clock() + _SMALL_SECONDS)
        self._measure_others(report, every, sweep, end)
        if not report.missing:
            # Choose again: the reasons include h5py's speed on the input file, which was measured only now.
            report.recommendation = choose(comparison.findings)

    def _measure_others(self, report: BenchReport, every: Sequence[BenchCase], sweep: Sweep, end: float) -> None:
        """Measure the cases that do not decide the recommendation, as far as time allows."""
        done = {one.case for one in report.measurements}
        others, left = [case for case in every if case not in done], end - self._clock()
        cases = plan_cases(others, left)
        enough = enough_seconds(self._settings.seconds, left, others)
        hot, cold = ([case for case in cases if case.cache == cache] for cache in CACHES)
        hot_seconds = left * sum(map(min_seconds, hot)) / (sum(map(min_seconds, cases)) or 1.0)
        with self._phase("other cases (warm)"):
            sweep.measure(hot, hot_seconds, report.measurements)
        with self._phase("other cases (cold)"):
            sweep.measure(cold, end - self._clock(), report.measurements)
        tried = {one.case for one in report.measurements if one.reason != NO_TIME}
        chosen, left_out = report.recommendation, len(set(every) - tried)
        # Omit this note in two cases. If there is no recommendation, the headline of the report says what to do or why.
        # If variants are not compared, most cases are left out on purpose.
        if left_out and chosen is not None and chosen.compared:
            text = f"{left_out} of {len(every)} cases were not measured for lack of time; the answer needs none of them"
            report.notes.append(f"{text}. About {enough} seconds are enough for all tables.")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._bar.set_description_str(name)
        begin = self._clock()
        try:
            yield
        finally:
            if self.report is not None:
                self.report.seconds[name] = self.report.seconds.get(name, 0.0) + self._clock() - begin

    def _on_progress(self) -> None:
        self._bar.update(min(self._clock() - self._begun, self._settings.seconds) - self._bar.n)


def _require_time(left: float, needed: float, packing: float, settings: BenchSettings) -> None:
    if left < needed:
        kept = settings.seconds - usable_seconds(settings.seconds)
        given, enough = f"seconds={settings.seconds:g}", f"seconds={1.5 * (packing + needed) + 1:.0f}"
        raise OptionsError(
            f"{given} is too short: it took {packing:.1f} s until the sample was packed, measuring takes "
            f"{needed:.1f} s, and {kept:.1f} s are for cleaning up; give {enough}, fewer rows or fewer chunk sizes",
            parameters=(given, enough),
        )


def _command_source(report: BenchReport, source: BenchInput) -> str:
    """Return the source to name in the recommended command: a placeholder if the input is not the whole dataset."""
    if source.kind == "generated":
        return "IMAGES"
    return source.source if report.num_images == source.num_images else "ALL_IMAGES"


def _note_slow(report: BenchReport, sample: BenchSample, batch_size: int) -> None:
    slow = [variant.label for variant in sample.variants if exceeds_decode_budget(variant, batch_size)]
    if slow:
        report.notes.append(
            f"Not measured with full shuffle: {', '.join(slow)}, because a batch may decode more than 1 GiB of chunks."
        )
