"""Pure functions that choose the recommendation from the measurements, with its reasons and doubts."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from h5pack.benchmark.cases import MIN_REPEATS, BenchCase, FileVariant, Measurement
from h5pack.format import schema
from h5pack.format.plans import CachePlan, plan_cache
from h5pack.system.text import counted, format_bytes

TIE = 0.95
"""Speeds of at least this fraction of the highest count as equal: even on an idle machine, repeats differ as much."""
MIN_ROWS, MIN_BYTES = 256, 16 * 1024 * 1024
"""A sample with fewer rows and fewer bytes than this is too small to trust, because it fits into a CPU's caches."""
_FINALIST, _MAX_FINALISTS = 0.6, 6
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
    batch_size: int  # Batch size of the cases that compare file variants.
    window: int  # Window of the cases that compare file variants, in chunks.
    num_threads: int  # Number of H5Loader threads in the cases that compare file variants.
    cpus: int  # Number of CPUs that this process may use.
    copy_speed: float | None = None  # Images/s of a memory copy on `num_threads` threads, if measured.

    def case(self, variant: str, cache: str) -> BenchCase:
        """Return the case that compares a file variant: H5Loader with direct reads and window shuffle."""
        return BenchCase(variant, "window", "direct", cache, self.batch_size, self.window, self.num_threads)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The chunks and settings to use on this machine, with the reasons."""

    variant: str  # Label of the recommended `FileVariant`.
    convert: bool  # True: convert to this variant. False: keep the input file.
    chunk_rows: int | None
    compression: str
    batch_size: int  # Rows per batch for H5Loader.
    window: int  # Number of chunks that H5Loader shuffles together.
    num_threads: int  # Number of threads for H5Loader.
    num_workers: int  # Number of worker processes if a DataLoader is used instead of H5Loader.
    chunk_cache: CachePlan | None  # Chunk cache for reading the file in window shuffle with h5py.
    judged_by: str  # Page-cache state whose speeds decided: "hot" or "cold".
    images_per_s: float  # Speed measured with these settings.
    ties: tuple[str, ...]  # Labels of the variants that count as equally fast as the fastest (see `TIE`).
    doubts: tuple[str, ...]  # Reasons why the recommendation is uncertain; empty if it is certain.
    reasons: tuple[str, ...]  # Sentences that explain the recommendation.
    command: str  # Command line that converts to the variant; empty if `convert` is False.
    code: str  # Python code that reads the file with these settings.
    gain: float | None = None  # Speedup over reading the input file with h5py, one index per call, if measured.


def pick_cache_state(workload: Workload, measurements: Sequence[Measurement]) -> tuple[str, str]:
    """Return the page-cache state that decides, "hot" or "cold", and a sentence that says why."""
    size = workload.num_images * workload.row_bytes
    sizes = f"{workload.num_images:,} images take {format_bytes(size)}; RAM has {format_bytes(workload.memory_bytes)}"
    measured = {one.case.cache for one in measurements if one.speeds}
    fits = size <= workload.memory_bytes // 2
    if fits and "hot" in measured:
        return "hot", f"Judged with the page cache warm: {sizes}, so the file stays there after an epoch."
    if not fits and "cold" in measured:
        return "cold", f"Judged with the page cache cold: {sizes}, so each epoch reads the disk."
    if not fits:
        return "hot", f"Judged with the page cache warm, although {sizes}: cold reads were not measured."
    return "cold", "Judged with the page cache cold: warm reads were not measured."


def finalists(
    variants: Sequence[FileVariant], measurements: Sequence[Measurement], workload: Workload, cache: str
) -> list[BenchCase]:
    """Return the cases to measure again side by side: one per file variant, the fastest first."""
    found = sorted(_comparable(variants, measurements, workload, cache), key=lambda one: -one.median)
    return [one.case for one in found[:_MAX_FINALISTS] if one.median >= _FINALIST * found[0].median]


def choose(
    variants: Sequence[FileVariant],
    measurements: Sequence[Measurement],
    run_off: Sequence[Measurement],
    workload: Workload,
) -> Recommendation | None:
    """Choose the recommendation from the measurements of the sweep and of the run-off; None if too little was measured.

    Among the variants that are as fast as the fastest (see `TIE`), prefer the input file, then an uncompressed variant,
    then the chunk size closest to the default. Recommend the smallest numbers of threads and workers that are as fast
    as the best.
    """
    cache, why = pick_cache_state(workload, measurements)
    by_label = {one.label: one for one in variants}
    in_sweep = _comparable(variants, measurements, workload, cache)
    earlier = {one.case: one for one in in_sweep}
    # Cases that were not in the run-off were too slow to be recommended.
    run_off_cases = _comparable(variants, run_off, workload, cache)
    found = [earlier.get(one.case, Measurement(one.case)).updated_by(one) for one in run_off_cases] or in_sweep
    if not found:
        return None
    best = max(found, key=lambda one: one.median)
    ties = [one for one in found if one.median >= TIE * best.median]
    picked = min(ties, key=lambda one: _effort(by_label[one.case.variant], workload))
    variant = by_label[picked.case.variant]
    settings, reasons = _pick_settings(variant, [*run_off, *measurements], picked, workload)
    gain, gain_reasons = _gain(variants, picked, measurements, [*found, *in_sweep])
    return Recommendation(
        variant=variant.label,
        convert=not variant.is_input,
        chunk_rows=variant.chunk_rows,
        compression=variant.compression,
        batch_size=workload.batch_size,
        **settings,
        chunk_cache=_chunk_cache(variant, settings["window"], workload),
        judged_by=cache,
        ties=tuple(one.case.variant for one in ties),
        doubts=tuple(_doubts([best, picked], max(len(found), len(in_sweep)), workload)),
        reasons=(*_comparison(picked, ties, workload), why, *reasons, *gain_reasons),
        command="" if variant.is_input else _command(variant, workload),
        code=_code(variant, workload.batch_size, settings["window"], settings["num_threads"]),
        gain=gain,
    )


def _chunk_cache(variant: FileVariant, window: int, workload: Workload) -> CachePlan | None:
    """Return the chunk cache for reading the converted file with h5py; None if the variant is not converted."""
    if variant.is_input or variant.chunk_rows is None:
        return None
    shape, chunks = (workload.num_images, *workload.row_shape), (variant.chunk_rows, *workload.row_shape)
    return plan_cache(shape, chunks, 1, filtered=variant.compression != "none", window=window)


def _comparable(
    variants: Sequence[FileVariant], measurements: Sequence[Measurement], workload: Workload, cache: str
) -> list[Measurement]:
    """Return measurements that differ only in the variant. Leave out the contiguous one, which h5pack cannot write."""
    cases = {workload.case(one.label, cache) for one in variants if one.is_input or one.chunk_rows is not None}
    return [one for one in measurements if one.speeds and one.case in cases]


def _effort(variant: FileVariant, workload: Workload) -> tuple[int, float]:
    """Return a sort key: the input file, then uncompressed variants, each by distance from the default chunk size."""
    if variant.is_input or variant.chunk_rows is None:
        return 0, 0.0
    return 1 + (variant.compression != "none"), abs(math.log(variant.chunk_rows / max(1, workload.default_chunk_rows)))


def _comparison(picked: Measurement, ties: Sequence[Measurement], workload: Workload) -> list[str]:
    speeds = f"{min(picked.speeds):,.0f} to {max(picked.speeds):,.0f}"
    text = f"{picked.case.variant}: {picked.median:,.0f} images/s, median of {len(picked.speeds)} repeats ({speeds})"
    if workload.copy_speed and picked.case.cache == "hot":
        text += f", {picked.median / workload.copy_speed:.2f} of a memory copy"
    others = ", ".join(one.case.variant for one in ties if one is not picked)
    return [f"{text}.", *([f"Equally fast, within {100 * (1 - TIE):.0f} %: {others}."] if others else [])]


def _pick_settings(
    variant: FileVariant, measurements: Sequence[Measurement], picked: Measurement, workload: Workload
) -> tuple[dict[str, Any], list[str]]:
    """Return the window, numbers of threads and workers, and measured speed to recommend for a variant; the reasons.

    The window is the workload's, unless another window is clearly faster; the numbers are the smallest that are as fast
    as the best. If a case was measured twice, its first entry in `measurements` counts.
    """
    cases: dict[BenchCase, Measurement] = {}
    for one in measurements:
        case = one.case
        plain = (case.engine, case.order, case.batch_size) == ("direct", "window", workload.batch_size)
        if one.speeds and plain and (case.variant, case.cache) == (variant.label, picked.case.cache):
            cases.setdefault(case, one)
    loaders = [one for one in cases.values() if one.case.num_workers is None]
    threads = {one.case.num_threads: one.median for one in loaders if one.case.window == workload.window}
    windows = {one.case.window: one.median for one in loaders if one.case.num_threads == workload.num_threads}
    workers = {one.case.num_workers or 0: one.median for one in cases.values() if one.case.num_workers is not None}
    num_threads, reasons = workload.num_threads, []
    if len(threads) > 1:
        num_threads = _smallest_tie(threads)
        reasons.append(f"num_threads={num_threads} for H5Loader; images/s by threads: {_by_count(threads)}.")
    num_workers, why = workload.cpus, "one per CPU, not measured"
    if workers:
        num_workers, why = _smallest_tie(workers), f"images/s by workers: {_by_count(workers)}"
    reasons.append(f"num_workers={num_workers} for a DataLoader instead of H5Loader; {why}.")
    fastest = max(windows, key=lambda window: windows[window], default=workload.window)
    window = workload.window
    if windows and windows.get(window, picked.median) < TIE * windows[fastest]:
        window = fastest
    speeds = {(one.case.window, one.case.num_threads): one.median for one in (*loaders, picked)}
    speed = round(speeds.get((window, num_threads), picked.median), 1)
    settings = {"window": window, "num_threads": num_threads, "num_workers": num_workers, "images_per_s": speed}
    return settings, reasons


def _smallest_tie(speeds: dict[int, float]) -> int:
    return min(count for count, speed in speeds.items() if speed >= TIE * max(speeds.values()))


def _by_count(speeds: dict[int, float]) -> str:
    return ", ".join(f"{count}: {speed:,.0f}" for count, speed in sorted(speeds.items()))


def _doubts(deciding: Sequence[Measurement], num_compared: int, workload: Workload) -> list[str]:
    doubts = []
    repeats = min(len(one.speeds) for one in deciding)
    if repeats < MIN_REPEATS:
        doubts.append(f"the decisive cases have only {counted(repeats, 'repeat')}; increase seconds")
    elif any(max(one.speeds) - min(one.speeds) > _MAX_SPREAD * one.median for one in deciding):
        doubts.append(f"repeats differ by more than {100 * _MAX_SPREAD:.0f} %; run it again on an idle machine")
    size = workload.sample_rows * workload.row_bytes
    if workload.sample_rows < MIN_ROWS and size < MIN_BYTES:
        doubts.append(f"the sample has only {workload.sample_rows:,} rows ({format_bytes(size)})")
    if num_compared < 2:
        doubts.append("no other variant was measured")
    return doubts


def _gain(
    variants: Sequence[FileVariant],
    picked: Measurement,
    measurements: Sequence[Measurement],
    compared: Sequence[Measurement],
) -> tuple[float | None, list[str]]:
    """Return how much faster the variant is than the input file read by h5py, and sentences about this speedup."""
    label = next((one.label for one in variants if one.is_input), None)
    if label == picked.case.variant:
        return None, []
    baseline = (label, "default", "single", picked.case.cache)
    loader = [one.median for one in compared if one.case.variant == label]
    plain = [
        one.median
        for one in measurements
        if one.speeds and (one.case.variant, one.case.engine, one.case.order, one.case.cache) == baseline
    ]
    reasons = [
        f"The input file, {reader}: {speeds[0]:,.0f} images/s, {picked.median / speeds[0]:.1f} x slower."
        for reader, speeds in (("by H5Loader", loader), ("one index a call by h5py", plain))
        if speeds
    ]
    return round(picked.median / plain[0], 2) if plain else None, reasons


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
