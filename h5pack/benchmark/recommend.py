"""Choice of the recommendation from the measurements, with its reasons and doubts: pure functions."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from h5pack.benchmark.cases import MIN_REPEATS, BenchCase, FileVariant, Measurement
from h5pack.format import schema
from h5pack.format.plans import CachePlan, plan_cache
from h5pack.system.text import counted, format_bytes

TIE = 0.95
"""Speeds of at least this fraction of the fastest count as equal: even repeats on a quiet machine differ as much."""
MIN_ROWS, MIN_BYTES = 256, 16 * 1024 * 1024
"""A sample with fewer rows and fewer bytes than this is too small to trust, because it fits into a CPU's caches."""
_FINALIST = 0.6
_MAX_SPREAD = 0.4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The data, the machine and the settings that a recommendation is made for."""

    source: str  # Path to convert, as on the command line; empty for generated images.
    options: dict[str, Any]  # Keywords of `h5pack.convert` with which the sample was packed.
    num_images: int
    row_bytes: int
    sample_rows: int
    row_shape: tuple[int, ...]
    default_chunk_rows: int  # Chunk size that `h5pack.convert` chooses by default.
    memory_bytes: int  # Memory available for the page cache.
    batch_size: int  # This and the next two: settings of the cases that compare file variants.
    window: int
    num_threads: int
    cpus: int
    copy_speed: float | None = None  # Images/s of a memory copy on `num_threads` threads, if measured.

    def is_loader_case(self, case: BenchCase, window: int, num_threads: int) -> bool:
        """Return whether H5Loader reads the case in window shuffle with these settings and `batch_size`."""
        return (case.engine, case.order, case.batch_size, case.window, case.num_threads, case.num_workers) == (
            "direct", "window", self.batch_size, window, num_threads, None,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The chunks and settings to use on this machine, with the reasons."""

    variant: str  # Label of the recommended `FileVariant`.
    convert: bool  # Whether to convert to that variant. False: keep the input file.
    chunk_rows: int | None
    compression: str
    batch_size: int  # This and the next two: settings for H5Loader.
    window: int
    num_threads: int
    num_workers: int  # Number of workers if a DataLoader is used instead.
    chunk_cache: CachePlan | None  # Chunk cache for reading the file in window shuffle with h5py.
    judged_by: str  # Page-cache state whose speeds decided: "hot" or "cold".
    images_per_s: float  # Speed measured with these settings.
    ties: tuple[str, ...]  # Labels of all variants that count as fast as the fastest, see `TIE`.
    doubts: tuple[str, ...]  # Why the recommendation is not certain; empty if it is.
    reasons: tuple[str, ...]  # Sentences that explain the recommendation.
    command: str  # Command line that converts to the variant; empty if `convert` is False.
    code: str  # Python code that reads the file with these settings.
    gain: float | None = None  # Speedup over reading the input file with h5py, one index per call, if measured.


def pick_cache_state(workload: Workload, measurements: Sequence[Measurement]) -> tuple[str, str]:
    """Return the page-cache state that decides, "hot" or "cold", and a sentence that says why."""
    size = workload.num_images * workload.row_bytes
    sizes = f"{workload.num_images:,} images take {format_bytes(size)} of {format_bytes(workload.memory_bytes)} memory"
    measured = {one.case.cache for one in measurements if one.speeds}
    fits = size <= workload.memory_bytes // 2
    if fits and "hot" in measured:
        return "hot", f"Compared with the page cache warm: {sizes}, so the file stays there after an epoch."
    if not fits and "cold" in measured:
        return "cold", f"Compared with the page cache cold: {sizes}, so each epoch reads the disk."
    if not fits:
        return "hot", f"Compared with the page cache warm, although {sizes}: cold reads were not measured."
    return "cold", "Compared with the page cache cold: warm reads were not measured."


def finalists(
    variants: Sequence[FileVariant], measurements: Sequence[Measurement], workload: Workload, cache: str, count: int = 6
) -> list[BenchCase]:
    """Return the cases of the fastest variants for the run-off, fastest first."""
    found = _comparable(variants, measurements, workload, cache)
    found.sort(key=lambda one: -one.median)
    return [one.case for one in found[:count] if one.median >= _FINALIST * found[0].median]


def choose(
    variants: Sequence[FileVariant],
    measurements: Sequence[Measurement],
    run_off: Sequence[Measurement],
    workload: Workload,
) -> Recommendation | None:
    """Choose the recommendation from the measurements of the sweep and of the run-off; None if too little was measured.

    Among the variants that are as fast as the fastest (see `TIE`), prefer the input file, then the variant closest to
    the default of `h5pack.convert`; then the smallest numbers of threads and workers that are as fast as the best.
    """
    cache, why = pick_cache_state(workload, measurements)
    by_label = {one.label: one for one in variants}
    measured_in_sweep = _comparable(variants, measurements, workload, cache)
    found = _after_run_off(measured_in_sweep, _comparable(variants, run_off, workload, cache))
    if not found:
        return None
    best = max(found, key=lambda one: one.median)
    ties = [one for one in found if one.median >= TIE * best.median]
    picked = min(ties, key=lambda one: _effort(by_label[one.case.variant], workload))
    variant = by_label[picked.case.variant]
    # The run-off comes first, so that its measurements take precedence over the sweep's.
    same = [one for one in (*run_off, *measurements) if one.case.variant == variant.label and one.case.cache == cache]
    num_threads, thread_reasons = _pick_threads(same, workload)
    num_workers, worker_reason = _pick_workers(same, workload)
    window = _pick_window(same, workload, picked)
    final = next(
        (one for one in (picked, *same) if one.speeds and workload.is_loader_case(one.case, window, num_threads)),
        picked,
    )
    input_variant = next((one for one in variants if one.is_input), None)
    gain, gain_reasons = _gain(input_variant, variant, picked, measurements, [*found, *measured_in_sweep])
    plan = plan_cache(
        # The shape is that of all images, not of the sample.
        [workload.num_images, *workload.row_shape],
        [variant.chunk_rows or workload.num_images, *workload.row_shape],
        1,
        filtered=variant.compression != "none",
        window=window,
    )
    return Recommendation(
        variant=variant.label,
        convert=not variant.is_input,
        chunk_rows=variant.chunk_rows,
        compression=variant.compression,
        batch_size=workload.batch_size,
        window=window,
        num_threads=num_threads,
        num_workers=num_workers,
        chunk_cache=None if variant.chunk_rows is None or variant.is_input else plan,
        judged_by=cache,
        images_per_s=round(final.median, 1),
        ties=tuple(one.case.variant for one in ties),
        doubts=tuple(_doubts([best, picked], max(len(found), len(measured_in_sweep)), workload)),
        reasons=(*_comparison(picked, ties, found, workload), why, *thread_reasons, worker_reason, *gain_reasons),
        command="" if variant.is_input else _command(variant, workload),
        code=_code(variant, workload.batch_size, window, num_threads),
        gain=gain,
    )


def _comparable(
    variants: Sequence[FileVariant], measurements: Sequence[Measurement], workload: Workload, cache: str
) -> list[Measurement]:
    """Return measurements that differ only in the variant, without the contiguous one: h5pack always writes chunks."""
    allowed = {one.label for one in variants if one.is_input or one.chunk_rows is not None}
    return [
        one
        for one in measurements
        if one.speeds
        and one.case.variant in allowed
        and one.case.cache == cache
        and workload.is_loader_case(one.case, workload.window, workload.num_threads)
    ]


def _after_run_off(sweep: Sequence[Measurement], run_off: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements of the cases in the run-off (the others were too slow for it), or else the sweep's."""
    if not run_off:
        return list(sweep)
    earlier = {one.case: one for one in sweep}
    return [earlier.get(one.case, Measurement(one.case)).updated_by(one) for one in run_off]


def _effort(variant: FileVariant, workload: Workload) -> tuple[int, float]:
    """Return a sort key that is smallest for the input file, then for the default of `h5pack.convert`."""
    if variant.is_input or variant.chunk_rows is None:
        return 0, 0.0
    return 1 + (variant.compression != "none"), abs(math.log(variant.chunk_rows / max(1, workload.default_chunk_rows)))


def _comparison(
    picked: Measurement, ties: Sequence[Measurement], found: Sequence[Measurement], workload: Workload
) -> list[str]:
    speeds = f"{min(picked.speeds):,.0f} to {max(picked.speeds):,.0f}"
    text = f"{picked.case.variant}: {picked.median:,.0f} images/s, median of {len(picked.speeds)} repeats ({speeds})"
    if workload.copy_speed and picked.case.cache == "hot":
        text += f", {picked.median / workload.copy_speed:.2f} of a memory copy"
    reasons = [f"{text}."]
    others = [one.case.variant for one in ties if one is not picked]
    if others:
        reasons.append(f"Equally fast, within {100 * (1 - TIE):.0f} %: {', '.join(others)}.")
    slower = [one for one in found if one not in ties]
    unclear = [one for one in slower if max(one.speeds) >= min(picked.speeds)]
    if unclear:
        names = ", ".join(f"{one.case.variant} ({one.median:,.0f})" for one in unclear)
        reasons.append(f"Slower by less than the spread of the repeats: {names}.")
    if slower:
        worst = min(slower, key=lambda one: one.median)
        reasons.append(f"Slowest of the run-off: {worst.case.variant} ({worst.median:,.0f}).")
    return reasons


def _variations(
    same: Sequence[Measurement], workload: Workload, matches: Callable[[BenchCase], bool]
) -> list[Measurement]:
    """Return the first measurement of each case in window shuffle by the direct engine for which `matches` is true."""
    cases: dict[BenchCase, Measurement] = {}
    for one in same:
        case = one.case
        plain = (case.engine, case.order, case.batch_size) == ("direct", "window", workload.batch_size)
        if one.speeds and plain and matches(case):
            cases.setdefault(case, one)
    return list(cases.values())


def _smallest_tie(found: Sequence[Measurement], count: Callable[[Measurement], int]) -> tuple[int, str]:
    """Return the smallest count that is as fast as the fastest, and a text with the speed at each count."""
    best = max(one.median for one in found)
    smallest = min(count(one) for one in found if one.median >= TIE * best)
    return smallest, ", ".join(f"{count(one)}: {one.median:,.0f}" for one in sorted(found, key=count))


def _pick_threads(same: Sequence[Measurement], workload: Workload) -> tuple[int, list[str]]:
    found = _variations(same, workload, lambda case: case.window == workload.window and case.num_workers is None)
    if len(found) < 2:
        return workload.num_threads, []
    count, speeds = _smallest_tie(found, lambda one: one.case.num_threads)
    return count, [f"num_threads={count} for H5Loader; images/s by threads: {speeds}."]


def _pick_workers(same: Sequence[Measurement], workload: Workload) -> tuple[int, str]:
    found = _variations(same, workload, lambda case: case.window == workload.window and case.num_workers is not None)
    if not found:
        return workload.cpus, f"num_workers={workload.cpus} for a DataLoader: one per CPU, not measured."
    count, speeds = _smallest_tie(found, lambda one: one.case.num_workers or 0)
    return count, f"num_workers={count} for a DataLoader instead of H5Loader; images/s by workers: {speeds}."


def _pick_window(same: Sequence[Measurement], workload: Workload, picked: Measurement) -> int:
    """Return the first window of the settings, unless another one is clearly faster."""
    found = _variations(
        same, workload, lambda case: case.num_threads == workload.num_threads and case.num_workers is None
    )
    best = max(found, key=lambda one: one.median, default=picked)
    first = next((one for one in found if one.case.window == workload.window), picked)
    return workload.window if first.median >= TIE * best.median else best.case.window


def _doubts(deciding: Sequence[Measurement], num_compared: int, workload: Workload) -> list[str]:
    doubts = []
    repeats = min(len(one.speeds) for one in deciding)
    if repeats < MIN_REPEATS:
        doubts.append(f"the decisive cases have only {counted(repeats, 'repeat')}; increase seconds")
    elif any(max(one.speeds) - min(one.speeds) > _MAX_SPREAD * one.median for one in deciding):
        doubts.append(f"repeats differ by more than {100 * _MAX_SPREAD:.0f} %; run it again on an idle machine")
    size = workload.sample_rows * workload.row_bytes
    if workload.sample_rows < MIN_ROWS and size < MIN_BYTES:
        doubts.append(f"the sample has only {workload.sample_rows:,} rows, {format_bytes(size)}")
    if num_compared < 2:
        doubts.append("no other variant was measured")
    return doubts


def _gain(
    input_variant: FileVariant | None,
    variant: FileVariant,
    picked: Measurement,
    measurements: Sequence[Measurement],
    compared: Sequence[Measurement],
) -> tuple[float | None, list[str]]:
    """Return the speedup of the recommended variant over the input file read by h5py, and sentences about it."""
    if input_variant is None or variant.is_input:
        return None, []
    reasons, gain = [], None
    loader = next((one.median for one in compared if one.case.variant == input_variant.label), None)
    if loader:
        reasons.append(f"The input file: {loader:,.0f} images/s by H5Loader, {picked.median / loader:.1f} x slower.")
    for one in measurements:
        case = one.case
        baseline = (input_variant.label, "default", "single", picked.case.cache)
        if one.speeds and (case.variant, case.engine, case.order, case.cache) == baseline:
            gain = round(picked.median / one.median, 2)
            reasons.append(
                f"The input file, one index a call by h5py: {one.median:,.0f} images/s, {gain:.1f} x slower."
            )
    return gain, reasons


def _command(variant: FileVariant, workload: Workload) -> str:
    options: dict[str, Any] = {"chunk_rows": variant.chunk_rows, "compression": variant.compression, **workload.options}
    defaults = {"compression": "none", "images": "images", "labels": "labels", "layout": "nhwc", "mode": "rgb"}
    words = ["h5pack", "convert", workload.source or "IMAGES", "packed.h5"]
    for name, value in options.items():
        if value not in (None, defaults.get(name)):
            text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [f"--{'source' if name == 'source_kind' else name.replace('_', '-')}", text]
    return shlex.join(words)


def _code(variant: FileVariant, batch_size: int, window: int, num_threads: int) -> str:
    names = ""
    if variant.is_input:
        names += "" if variant.images == schema.IMAGES else f", images={variant.images!r}"
        names += "" if variant.labels in (None, schema.LABELS) else f", labels={variant.labels!r}"
    path = variant.path if variant.is_input else "packed.h5"
    return (
        f"dataset = h5pack.H5Dataset({path!r}{names})\n"
        f"loader = h5pack.H5Loader(dataset, batch_size={batch_size}, window={window}, num_threads={num_threads})"
    )
