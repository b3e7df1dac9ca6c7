"""The workload that a recommendation is for, and the choice of the loaders' settings to recommend."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from h5pack.benchmark.cases import MIN_REPEATS, BenchCase, FileVariant, Measurement
from h5pack.format.plans import CachePlan, plan_cache
from h5pack.system.text import counted, format_bytes, listed

_CACHE_WORDS = {"hot": "warm", "cold": "cold"}


def limited_batch_size(batch_size: int, rows: int) -> int:
    """Return the batch size, reduced to at most a quarter of `rows`, so that an epoch has several batches."""
    return min(batch_size, max(1, rows // 4))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The data, the machine and the settings that a recommendation is for."""

    source: str  # Path of the whole dataset, as on the command line, or a placeholder for it.
    options: dict[str, Any]  # Keywords of `h5pack.convert` for converting the source.
    num_images: int
    row_bytes: int
    sample_rows: int
    row_shape: tuple[int, ...]
    default_chunk_rows: int  # Chunk size in rows that `h5pack.convert` chooses by default.
    memory_bytes: int  # Memory that is available to this process.
    asked_batch_size: int  # Batch size that the caller of `bench` gave.
    batch_size: int  # Batch size of the cases that compare file variants; smaller if the sample is too small.
    window: int  # Window of the cases that compare file variants, in chunks.
    num_threads: int  # Number of H5Loader threads in the cases that compare file variants.
    cpus: int  # Number of CPUs that this process may use.
    split: str | None = None  # Split that a training reads; None: all rows.
    any_size: bool = False  # True: the images are generated, and stand for datasets of any size.
    fields: tuple[str, ...] = ()  # Names of an input file's further datasets that a training reads with the images.
    # True: the input file has faults and must be decoded. It is then recommended only if it is clearly faster.
    decodes_input: bool = False
    first_epoch: tuple[float, ...] = ()  # Images/s of first epochs, if only first epochs decode chunks; else empty.

    @property
    def recommended_batch_size(self) -> int:
        """The batch size that the caller of `bench` gave, but at most a quarter of the number of images."""
        return limited_batch_size(self.asked_batch_size, self.num_images)

    @property
    def memory_images(self) -> int:
        """The number of images that fit into half of the available memory. Larger datasets are judged by cold reads."""
        return self.memory_bytes // 2 // self.row_bytes

    def is_default(self, variant: FileVariant) -> bool:
        """Return whether `h5pack.convert` makes the chunks of this variant by default."""
        return variant.chunk_rows == self.default_chunk_rows and variant.compression == "none" and not variant.is_input

    def case(self, variant: str, cache: str) -> BenchCase:
        """Return the case by which a file variant is compared with others: H5Loader, direct reads, window shuffle."""
        return BenchCase(variant, "window", "direct", cache, self.batch_size, self.window, self.num_threads)


def pick_settings(
    picked: Measurement, run_off: Sequence[Measurement], workload: Workload
) -> tuple[Measurement, list[str]]:
    """Return the measurement with the recommended window and number of threads, and the reasons.

    `picked` has the usual settings. Other settings are recommended if they are faster.
    """
    case = picked.case
    alike = [one for one in run_off if replace(one.case, window=case.window, num_threads=case.num_threads) == case]
    usual = next((one for one in alike if one.case == case and len(one.speeds) >= MIN_REPEATS), picked)
    others = [one for one in alike if one.case != case and len(one.speeds) >= MIN_REPEATS]
    max_threads = max(workload.cpus, workload.num_threads)
    allowed = [one for one in others if one.case.num_threads <= max_threads]
    best = max([usual, *(one for one in allowed if one.is_faster(usual))], key=lambda one: one.median)
    reasons = []
    for name, most in (("num_threads", max_threads), ("window", sys.maxsize)):
        # Compare only cases that have the usual value of the other setting.
        same = [one for one in (usual, *others) if replace(one.case, **{name: getattr(case, name)}) == case]
        tried, value = {getattr(one.case, name): one for one in same}, getattr(best.case, name)
        if len(tried) > 1:
            reasons.append(f"{name}={value} for H5Loader; {_by_count(name, tried, tried[value], most)}.")
    return best, reasons


def pick_workers(picked: Measurement, run_off: Sequence[Measurement], workload: Workload) -> tuple[int, list[str]]:
    """Return the recommended number of workers for a DataLoader, and the reason.

    One worker per CPU is recommended, or another number if that is faster. If one per CPU was not measured, the fastest
    of the measured numbers is recommended. Numbers measured with fewer than `MIN_REPEATS` repeats are ignored. If one
    per CPU is such a number, or if no other numbers were measured, return one per CPU without a reason.
    """
    case = replace(picked.case, num_threads=1)
    tried = {
        one.case.num_workers: one
        for one in run_off
        if one.speeds and one.case.num_workers is not None and replace(one.case, num_workers=None) == case
    }
    found = {number: one for number, one in tried.items() if len(one.speeds) >= MIN_REPEATS}
    usual = found.get(workload.cpus)
    others = [one for one in found.values() if workload.cpus not in tried or (usual and one.is_faster(usual))]
    best = max(others, key=lambda one: one.median, default=usual)
    if best is None:
        return workload.cpus, []
    number = best.case.num_workers or 0
    why = "one per CPU" if best is usual else f"which is faster than {workload.cpus}, one per CPU"
    if workload.cpus not in tried:
        why = "the only number measured" if len(found) == 1 else "the fastest of the measured numbers"
    why += f"; {_by_count('num_workers', found, best)}" if len(found) > 1 else ""
    speed = f"{best.median:,.0f} images/s"
    return number, [f"If you use a DataLoader instead of H5Loader: num_workers={number} ({speed}), {why}."]


def _by_count(name: str, tried: dict[int, Measurement], best: Measurement, most: int = sys.maxsize) -> str:
    """Return a text with the speeds of other values of a setting, as multiples of the recommended value's speed.

    Values above `most` are not recommended, even if they are faster. For `num_threads`, `most` is the number of CPUs.
    """
    ratios = {value: one.ratios(best) or (one.median / best.median,) for value, one in tried.items() if one is not best}
    others = [f"{name}={value} gives {ratio_text(found)}" for value, found in sorted(ratios.items())]
    text = f"{', '.join(others)} of its speed"
    if any(value > most and max(found) >= 1 for value, found in ratios.items()):
        text += f"; there are too few CPUs for more than {most} threads"
    unclear = [f"{name}={value}" for value, found in sorted(ratios.items()) if max(found) >= 1 and value <= most]
    which = f" from {listed(unclear)}" if len(ratios) > 1 else ""
    return f"{text}; the difference{which} is not clear" if unclear else text


def plan_chunk_cache(variant: FileVariant, window: int, workload: Workload) -> CachePlan | None:
    """Return the chunk cache for reading a converted file with h5py; None for the input file and contiguous files."""
    if variant.is_input or variant.chunk_rows is None:
        return None
    shape, chunks = (workload.num_images, *workload.row_shape), (variant.chunk_rows, *workload.row_shape)
    return plan_cache(shape, chunks, 1, filtered=variant.compression != "none", window=window)


def deciding_caches(workload: Workload, caches: Sequence[str]) -> list[str]:
    """Return `caches` in the order in which to judge by them.

    The second page-cache state is used only if no case could be measured with the first.
    """
    fits = workload.num_images <= workload.memory_images
    return [cache for cache in (("hot", "cold") if fits else ("cold", "hot")) if cache in caches]


def cache_reason(workload: Workload, cache: str) -> str:
    """Return a sentence on the page-cache state that the recommendation is for: which one it is, and why."""
    size, memory = format_bytes(workload.num_images * workload.row_bytes), format_bytes(workload.memory_bytes)
    expected = deciding_caches(workload, ("hot", "cold"))[0]
    half = f"{'at most' if expected == 'hot' else 'more than'} half of the {memory} of available memory"
    sizes = f"{workload.num_images:,} images take {size}, {half}"
    state = f"Judged with the page cache {_CACHE_WORDS[cache]}"
    if cache == expected:
        return f"{state}: {sizes}, so {'the file stays in memory' if cache == 'hot' else 'epochs may read the disk'}."
    other = _CACHE_WORDS[expected]
    return f"{state}, because nothing was measured with a {other} one; in training it would be {other} ({sizes})."


def measuring_reasons(workload: Workload) -> list[str]:
    """Return sentences on how a training differs from the measurements.

    There are up to three sentences: on a smaller recommended batch size, on a smaller measured batch size, and on the
    speed of the first epoch if only the first epoch decodes chunks.
    """
    rows, asked, sentences = counted(workload.sample_rows, "row"), workload.asked_batch_size, []
    size, images = workload.recommended_batch_size, counted(workload.num_images, "image")
    if size < asked:
        few = f"batch_size={size} instead of {asked}: a quarter of {images}, so that an epoch has several batches"
        sentences.append(f"{few}. Train with the size that suits your model.")
    if workload.batch_size < size:
        sentences.append(f"Measured with batch_size={workload.batch_size}: the sample has only {rows}.")
    if workload.first_epoch:
        speeds = workload.first_epoch
        speed = speed_range_text(statistics.median(speeds), min(speeds), max(speeds))
        sentences.append(f"The first epoch decodes each chunk: {speed}. Then the chunks stay in memory.")
    return sentences


def speed_range_text(speed: float, low: float, high: float) -> str:
    """Return a speed and the range of its repeats, such as "1,234 images/s (1,100 to 1,300)"."""
    return f"{speed:,.0f} images/s" + f" ({low:,.0f} to {high:,.0f})" * (low < high)


def epoch_text(rows: int, *speeds: float) -> str:
    """Return how long `rows` images take at `speeds` in images/s: median and range, such as "1.9 ms (1.5 to 2.2)"."""
    seconds, least, most = (rows / speed for speed in (statistics.median(speeds), max(speeds), min(speeds)))
    factor, unit = (1_000, "ms") if seconds < 1 else (1, "s")
    span = f" ({factor * least:.1f} to {factor * most:.1f})" if len(speeds) > 1 else ""
    return f"{factor * seconds:.1f} {unit}{span}"


def ratio_text(ratios: Sequence[float]) -> str:
    """Return the median of ratios, and their range if there are several, such as "1.12 (1.05 to 1.20)"."""
    span = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.2f}{span}"
