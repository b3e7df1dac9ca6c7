"""Pure functions that choose the recommendation from the measurements, with its reasons and doubts."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from h5pack.benchmark.cases import MIN_REPEATS, NO_TIME, BenchCase, FileVariant, Measurement, ceiling_threads
from h5pack.format import schema
from h5pack.format.plans import CachePlan, plan_cache
from h5pack.system.text import counted, format_bytes

MIN_ROWS, MIN_BYTES = 256, 16 * 1024 * 1024
"""A sample with fewer rows and fewer bytes than this is too small to trust, because it fits into a CPU's caches."""
_FINALIST, _MAX_FINALISTS = 0.6, 6
_CACHE_WORDS = {"hot": "warm", "cold": "cold"}


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
    asked_batch_size: int | None = None  # Batch size that was asked for, if the sample is too small for it.
    split: str | None = None  # Split that a training reads; None: all rows.

    def is_default(self, variant: FileVariant) -> bool:
        """Return whether `h5pack.convert` makes these chunks by default."""
        return variant.chunk_rows == self.default_chunk_rows and variant.compression == "none" and not variant.is_input

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
    images_per_s_range: tuple[float, float] = (0.0, 0.0)  # Slowest and fastest repeat.
    # The speed divided by that of the ceiling, measured beside each repeat with `ceiling_threads` threads: the median,
    # the lowest and the highest. None if no ceiling was measured.
    of_ceiling: tuple[float, float, float] | None = None
    ceiling_threads: int = 0
    ties: tuple[str, ...]  # Labels of the variants that count as equally fast as the fastest (see `TIE`).
    doubts: tuple[str, ...]  # Reasons why the recommendation is uncertain; empty if it is certain.
    reasons: tuple[str, ...]  # Sentences that explain the recommendation.
    command: str  # Command line that converts to the variant; empty if `convert` is False.
    code: str  # Python code that reads the file with these settings.
    is_default: bool = False  # Whether `h5pack.convert` makes these chunks by default.
    gain: float | None = None  # Speedup over reading the input file with h5py, one index per call, if measured.


def deciding_caches(workload: Workload, caches: Sequence[str]) -> list[str]:
    """Return the page-cache states that may decide, the best first; the others only if that one cannot be measured."""
    fits = workload.num_images * workload.row_bytes <= workload.memory_bytes // 2
    return [cache for cache in (("hot", "cold") if fits else ("cold", "hot")) if cache in caches]


def _cache_reason(workload: Workload, cache: str) -> str:
    size = workload.num_images * workload.row_bytes
    sizes = f"{workload.num_images:,} images take {format_bytes(size)}; RAM has {format_bytes(workload.memory_bytes)}"
    if cache == deciding_caches(workload, ("hot", "cold"))[0]:
        then = "so the file stays there after an epoch" if cache == "hot" else "so each epoch reads the disk"
        return f"Judged with the page cache {_CACHE_WORDS[cache]}: {sizes}, {then}."
    return f"Judged with the page cache {_CACHE_WORDS[cache]}, because the other state was not measured: {sizes}."


def missing(
    variants: Sequence[FileVariant],
    measurements: Sequence[Measurement],
    run_off: Sequence[Measurement],
    workload: Workload,
    cache: str,
    not_packed: Sequence[str] = (),
) -> list[str]:
    """Return what is missing for a recommendation, one phrase each; empty if enough was measured.

    Every variant needs `MIN_REPEATS` repeats, unless it is much slower than the fastest.
    """
    planned = [one for one in variants if one.is_input or one.chunk_rows is not None]
    found = {one.case: one for one in _compared(variants, measurements, run_off, workload, cache)}
    failed = {one.case for one in (*measurements, *run_off) if one.reason not in (None, NO_TIME)}
    best = max((one.median for one in found.values()), default=0.0)
    phrases = []
    for variant in planned:
        case = workload.case(variant.label, cache)
        repeats = len(found[case].speeds) if case in found else 0
        slow = case in found and max(found[case].speeds) < _FINALIST * best
        if repeats < MIN_REPEATS and not slow and case not in failed:
            phrases.append(f"{variant.label}: {repeats} of {MIN_REPEATS} repeats")
    if not found and not phrases:
        phrases.append("H5Loader in window shuffle (orders='window', engines='direct'), by which variants are compared")
    if len(planned) < 2 and not_packed:
        phrases.append(f"not packed: {', '.join(not_packed)}")
    return phrases


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
    cache: str,
) -> Recommendation | None:
    """Choose the recommendation from the measurements of the sweep and of the run-off; None if nothing was measured.

    Among the variants that are not clearly slower than the fastest (see `Measurement.is_faster`), prefer the input
    file, then an uncompressed variant, then the chunk size closest to the default. Recommend other settings than the
    usual ones only if they are clearly faster.
    """
    by_label = {one.label: one for one in variants}
    found = _compared(variants, measurements, run_off, workload, cache)
    if not found:
        return None
    best, small = max(found, key=lambda one: one.median), _small_sample(workload)
    ties = found if small else [one for one in found if not best.is_faster(one)]
    picked = min(ties, key=lambda one: _effort(by_label[one.case.variant], workload))
    variant = by_label[picked.case.variant]
    used, settings_reasons = _pick_settings(picked, run_off, workload)
    num_workers, workers_reason = _pick_workers(picked, run_off, workload)
    gain, gain_reasons = _gain(variants, picked, measurements, found)
    ratios = used.of_ceiling
    return Recommendation(
        variant=variant.label,
        convert=not variant.is_input,
        chunk_rows=variant.chunk_rows,
        compression=variant.compression,
        batch_size=workload.batch_size,
        window=used.case.window,
        num_threads=used.case.num_threads,
        num_workers=num_workers,
        chunk_cache=_chunk_cache(variant, used.case.window, workload),
        judged_by=cache,
        images_per_s=round(used.median, 1),
        images_per_s_range=(round(min(used.speeds), 1), round(max(used.speeds), 1)),
        of_ceiling=(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None,
        ceiling_threads=ceiling_threads(used.case, workload.cpus),
        ties=tuple(one.case.variant for one in ties),
        doubts=(small,) if small else (),
        reasons=(
            *_batch_reasons(workload),
            *_comparison(picked, found, ties, by_label, workload),
            *gain_reasons,
            _cache_reason(workload, cache),
            *settings_reasons,
            workers_reason,
        ),
        command="" if variant.is_input else _command(variant, workload),
        code=_code(variant, used.case, workload.split),
        is_default=workload.is_default(variant),
        gain=gain,
    )


def _small_sample(workload: Workload) -> str:
    """Return why the sample is too small to compare variants; empty if it is not."""
    size = workload.sample_rows * workload.row_bytes
    small = workload.sample_rows < MIN_ROWS and size < MIN_BYTES
    return f"the sample has only {counted(workload.sample_rows, 'row')} ({format_bytes(size)})" if small else ""


def _batch_reasons(workload: Workload) -> list[str]:
    """Return a sentence if batches are smaller than was asked for."""
    if workload.asked_batch_size is None:
        return []
    rows = counted(workload.sample_rows, "row")
    return [f"batch_size={workload.batch_size} instead of {workload.asked_batch_size}: the sample has only {rows}."]


def _compared(
    variants: Sequence[FileVariant],
    measurements: Sequence[Measurement],
    run_off: Sequence[Measurement],
    workload: Workload,
    cache: str,
) -> list[Measurement]:
    """Return the measurements that compare variants, of the sweep updated by the run-off."""
    again = {one.case: one for one in run_off}
    return [one.updated_by(again.get(one.case)) for one in _comparable(variants, measurements, workload, cache)]


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


def _comparison(
    picked: Measurement,
    found: Sequence[Measurement],
    ties: Sequence[Measurement],
    by_label: Mapping[str, FileVariant],
    workload: Workload,
) -> list[str]:
    """Return sentences that compare the recommended variant with the others."""
    others = [one for one in found if one is not picked]
    if not others:
        return ["No other variant was measured."]
    clearly = [one for one in others if one not in ties]
    texts = [f"Clearly slower: {_by_variant(clearly)}."] if clearly else []
    equal = [one for one in ties if one is not picked]
    if equal:
        variant = by_label[picked.case.variant]
        why = "keeping the file is the least work" if variant.is_input else "this one is nearest to the default"
        why = "so the default is recommended" if workload.is_default(variant) else why
        texts.insert(0, f"Not measurably faster or slower: {_by_variant(equal)}; {why}.")
    return texts


def _by_variant(measurements: Sequence[Measurement]) -> str:
    return ", ".join(f"{one.case.variant} ({one.median:,.0f})" for one in measurements)


def _pick_settings(
    picked: Measurement, run_off: Sequence[Measurement], workload: Workload
) -> tuple[Measurement, list[str]]:
    """Return the measurement whose window and number of threads are recommended, and the reasons.

    It is that of the usual settings, unless another one with enough repeats is clearly faster.
    """
    case = picked.case
    alike = [one for one in run_off if replace(one.case, window=case.window, num_threads=case.num_threads) == case]
    usual = next((one for one in alike if one.case == case and len(one.speeds) >= MIN_REPEATS), picked)
    others = [one for one in alike if one.case != case and len(one.speeds) >= MIN_REPEATS]
    allowed = [one for one in others if one.case.num_threads <= max(workload.cpus, workload.num_threads)]
    best = max([usual, *(one for one in allowed if one.is_faster(usual))], key=lambda one: one.median)
    reasons = []
    for name, label in (("num_threads", "threads"), ("window", "window")):
        speeds = {getattr(one.case, name): one.median for one in (usual, *others)}
        if len(speeds) > 1:
            chosen = getattr(best.case, name)
            reasons.append(f"{name}={chosen} for H5Loader; images/s by {label}: {_by_count(speeds)}.")
    return best, reasons


def _pick_workers(picked: Measurement, run_off: Sequence[Measurement], workload: Workload) -> tuple[int, str]:
    """Return the number of workers for a DataLoader, one per CPU unless another is clearly faster; and the reason."""
    case = replace(picked.case, num_threads=1)
    found = {
        one.case.num_workers or 0: one
        for one in run_off
        if one.case.num_workers is not None
        and len(one.speeds) >= MIN_REPEATS
        and replace(one.case, num_workers=None) == case
    }
    usual = found.get(workload.cpus)
    faster = [one for one in found.values() if usual is not None and one.is_faster(usual)]
    best = max(faster, key=lambda one: one.median, default=usual)
    number = workload.cpus if best is None else best.case.num_workers or 0
    why = "one per CPU"
    if found:
        why += f"; images/s by workers: {_by_count({count: one.median for count, one in found.items()})}"
    return number, f"num_workers={number} for a DataLoader instead of H5Loader; {why}."


def _by_count(speeds: dict[int, float]) -> str:
    return ", ".join(f"{count}: {speed:,.0f}" for count, speed in sorted(speeds.items()))


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
    chunk_rows = None if workload.is_default(variant) else variant.chunk_rows
    options: dict[str, Any] = {"chunk_rows": chunk_rows, "compression": variant.compression, **workload.options}
    defaults = {"compression": "none", "images": "images", "labels": "labels", "layout": "nhwc", "mode": "rgb"}
    words = ["h5pack", "convert", workload.source or "IMAGES", "packed.h5"]
    for name, value in options.items():
        if value not in (None, defaults.get(name)):
            text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [f"--{'source' if name == 'source_kind' else name.replace('_', '-')}", text]
    return shlex.join(words)


def _code(variant: FileVariant, case: BenchCase, split: str | None) -> str:
    names = "" if split is None else f", split={split!r}"
    if variant.is_input:
        names += "" if variant.images == schema.IMAGES else f", images={variant.images!r}"
        names += "" if variant.labels in (None, schema.LABELS) else f", labels={variant.labels!r}"
    path = variant.path if variant.is_input else "packed.h5"
    return (
        f"dataset = h5pack.H5Dataset({path!r}{names})\n"
        f"loader = h5pack.H5Loader(dataset, batch_size={case.batch_size}, window={case.window}, "
        f"num_threads={case.num_threads})"
    )
