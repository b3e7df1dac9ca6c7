"""The settings, cases and measurements of a benchmark, and the choice of cases if time is short.

A case is one configuration to measure.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import reduce
from typing import Any

from h5pack.pack.compression import parse_compression
from h5pack.system.parameters import flags, invalid, real_number, require_local, whole_number
from h5pack.system.text import counted

ORDERS = ("sequential", "window", "full", "single")
"""Orders of reading: in stored order, in window shuffle, in full shuffle, or one random row per call."""
ENGINES = ("direct", "tuned", "default")
"""Readers: H5Loader reading the file directly; H5Loader using the HDF5 library with a tuned chunk cache; h5py.

For the order "single", H5Dataset replaces the first one, and h5py with a tuned chunk cache replaces the second one.
"""
CACHES = ("hot", "cold")
"""Page-cache states: the file is in the page cache, or was dropped from it before reading."""
DEFAULT_CHUNK_BYTES = tuple(1024 * size for size in (64, 256, 1024, 4096, 16384))
MIN_REPEATS = 3
"""Minimum number of repeats for a reliable median."""
MIN_TURNS = 5
"""A file variant counts as faster than another only after this many turns (see `Sweep`) that measured both.

Fewer turns are enough if the speeds differ much (see `Measurement.is_faster`).
"""
REPEATS = 4
"""The length of a repeat is chosen so that about this many repeats, or more, fit into the time of a case.

Slow cases get fewer repeats.
"""
TIE = 0.95
"""A speed of at least this fraction of another counts as equal: repeats differ by as much even on an idle machine."""
_CLEAR = 1.25
"""If the lowest ratio of two cases' speeds is above this bound, a wide spread of the ratios does not matter.

See `Measurement.is_faster`.
"""
HOPELESS = 0.6
"""A case is slower than another if its fastest repeat is below this fraction of the other's slowest repeat.

This holds even with few repeats.
"""
MIN_EPOCH_SECONDS = 0.005
"""A sample that is read in less time than this is too small to compare variants.

Starting an epoch would take much of that time.
"""
SHORT_EPOCH_SECONDS = 0.05
"""If all images are read in less time than this, variants are not compared, because chunk sizes hardly matter.

Generated images may stand for datasets of any size (see `Workload.any_size`). If so, this limit does not apply.
"""
LEEWAY = 1.25
"""Estimated times are multiplied by this factor, because repeats take longer when other programs run."""
NO_TIME = "there was no time to measure this"

MIN_ROWS, _MIN_BYTES = 256, 64 * 1024 * 1024
"""A sample with fewer rows and fewer bytes than these is too small to compare variants, whatever its speed."""
_MIN_CASE_SECONDS = {"hot": 0.14, "cold": 0.2}
_DECODE_BUDGET_BYTES = 2**30


def is_small(rows: int, row_bytes: int) -> bool:
    """Return whether a sample is too small to compare variants, because an epoch takes only a few milliseconds."""
    return rows < MIN_ROWS and rows * row_bytes < _MIN_BYTES


@dataclass(frozen=True)
class Ceiling:
    """An upper bound on the speed of readers on this machine.

    Apart from noise, only cold reads of compressed files exceed it.
    """

    name: str  # "memory copy" or "sequential read".
    num_threads: int
    cache: str  # "hot" or "cold": the page-cache state to which this bound applies.
    speeds: tuple[float, ...]  # Images/s of each repeat.

    def __str__(self) -> str:
        return f"{self.name}, {counted(self.num_threads, 'thread')}"


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """The validated keywords of `bench`, whose docstring explains them.

    A keyword that accepts several values is a tuple, even if it has only one value.
    """

    seconds: float = 60.0
    chunk_rows: tuple[int, ...] = ()
    chunk_bytes: tuple[int, ...] = ()
    contiguous: bool = True
    orders: tuple[str, ...] = ORDERS
    engines: tuple[str, ...] = ENGINES
    caches: tuple[str, ...] = CACHES
    compression: tuple[str, ...] = ("none",)
    batch_size: tuple[int, ...] = (256,)
    window: tuple[int, ...] = (16,)
    num_threads: tuple[int, ...] = ()
    num_workers: tuple[int, ...] = ()
    rows: int | None = None
    num_images: int | None = None
    size: tuple[int, int] | None = None
    source_kind: str | None = None
    images: str | None = None
    labels: str | None = None
    scratch: str | os.PathLike[str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        seconds = real_number(self.seconds)
        if not 0 < seconds < math.inf:
            raise invalid("seconds", self.seconds, "give a finite number above 0")
        object.__setattr__(self, "seconds", seconds)
        flags(contiguous=self.contiguous)
        for name, allowed in (("orders", ORDERS), ("engines", ENGINES), ("caches", CACHES)):
            values = getattr(self, name)
            if not values or not set(values) <= set(allowed):
                raise invalid(name, ",".join(map(str, values)), f"give one or more of {', '.join(allowed)}")
        several = ("batch_size", "window", "num_threads", "num_workers", "chunk_rows", "chunk_bytes")
        for name in (*several, "rows", "num_images", "seed"):
            found, bound = getattr(self, name), int(name not in ("num_workers", "seed"))
            if found is None and name != "seed":
                continue
            # Convert NumPy's numbers, because reports are written as JSON.
            made = [whole_number(name, value, bound) for value in (found if name in several else (found,))]
            object.__setattr__(self, name, tuple(made) if name in several else made[0])
        for name in ("batch_size", "window", "compression"):
            if not getattr(self, name):
                raise invalid(name, "", "give at least one value")
        for compression in self.compression:
            parse_compression(compression)
        if self.scratch is not None:
            require_local(self.scratch, "scratch")


@dataclass(frozen=True)
class FileVariant:
    """A file that holds the rows of the sample, with one chunk size and one compression."""

    label: str  # Such as "32 rows" (per chunk), "32 rows gzip", "contiguous", or "as it is" for the input file.
    path: str
    images: str  # Name of the dataset of images.
    labels: str | None  # Name of the dataset of labels; None without labels.
    rows: int  # Number of rows to read, from the start of the file.
    # Size of a decoded chunk in rows and in bytes. Both are None if the images are contiguous, virtual or encoded.
    chunk_rows: int | None
    chunk_bytes: int | None
    row_bytes: int  # Size of a decoded row in bytes.
    # As for `convert`. For the input file: its HDF5 filters, such as "shuffle+gzip", "encoded images" or "none".
    compression: str
    stored_bytes: int  # Size of the dataset of images in the file.
    overhead: float  # stored_bytes divided by the size of the array in memory.
    is_input: bool = False  # True for the input file itself, False for a file converted from it.


@dataclass(frozen=True)
class BenchCase:
    """One configuration of a benchmark: a file variant, and the order, reader and settings to read it with."""

    variant: str  # Label of the file variant.
    order: str  # One of ORDERS.
    engine: str  # One of ENGINES.
    cache: str  # One of CACHES.
    batch_size: int
    window: int
    num_threads: int  # Reading threads; 1 for readers that work in the calling thread.
    num_workers: int | None = None  # Number of workers if a DataLoader reads, else None.

    def __str__(self) -> str:
        workers = counted(self.num_threads, "thread") if self.num_workers is None else f"num_workers={self.num_workers}"
        return f"{self.variant}, {self.order}, {self.engine}, {self.cache}, {workers}"


@dataclass(frozen=True)
class Measurement:
    """Results of all repeats of a case."""

    case: BenchCase
    speeds: tuple[float, ...] = ()  # Images/s of each repeat.
    amplification: float | None = None  # Bytes requested from the file per byte of delivered images; None if unknown.
    # Fraction of rows that were read together with an earlier row of the same chunk; None if unknown.
    hit_rate: float | None = None
    reason: str | None = None  # Why the case, or one of its repeats, was not measured; else None.
    # Images/s of the ceiling, measured after each repeat with `ceiling_threads` threads. If it could not be measured
    # after some repeats, there are fewer values than `speeds`.
    ceilings: tuple[float, ...] = ()
    turns: tuple[int, ...] = ()  # Number of the turn of each repeat. Only repeats of the same turn are compared.

    @property
    def median(self) -> float:
        """Median speed in images/s; 0 without repeats."""
        return statistics.median(self.speeds) if self.speeds else 0.0

    @property
    def of_ceiling(self) -> tuple[float, ...]:
        """The speed of each repeat divided by the ceiling's speed after it; empty if any ceiling is missing."""
        matched = len(self.ceilings) == len(self.speeds)
        return tuple(map(operator.truediv, self.speeds, self.ceilings)) if matched else ()

    def ratios(self, other: Measurement, *, all_turns: bool = False) -> tuple[float, ...]:
        """Return this case's speed divided by the other's in each turn that measured both, in ascending order.

        The speed of a machine varies over time, but hardly within a turn, so a ratio shows the difference of the cases.
        If `all_turns` is false, the lowest tenth and the highest tenth of the ratios are left out as outliers. The
        number of ratios in a tenth is rounded down.
        """
        others = dict(zip(other.turns, other.speeds, strict=False))
        both = zip(self.turns, self.speeds, strict=False)
        ratios = sorted(speed / others[turn] for turn, speed in both if turn in others)
        outliers = 0 if all_turns else len(ratios) // 10
        return tuple(ratios[outliers : len(ratios) - outliers])

    def is_faster(self, other: Measurement, min_turns: int = MIN_REPEATS) -> bool:
        """Return whether this case is faster than `other`, judged by the ratios of their speeds (see `ratios`).

        - There must be at least `min_turns` ratios.
        - The lowest ratio must be above 1.05.
        - The lowest ratio must also be above 1.25 or above the spread, which is the highest ratio divided by the
          lowest: on a busy machine, a few ratios may all be above 1 by chance.

        If the lowest ratio is above both 1.25 and the spread, `MIN_REPEATS` ratios are enough. No ratios are needed if
        the other's fastest repeat is below `HOPELESS` times this one's slowest.
        """
        if not self.speeds or not other.speeds:
            return False
        if max(other.speeds) < HOPELESS * min(self.speeds):
            return True
        ratios = self.ratios(other)
        if len(ratios) < MIN_REPEATS or TIE * ratios[0] <= 1:
            return False
        bounds = _CLEAR, ratios[-1] / ratios[0]
        return ratios[0] > (min(bounds) if len(ratios) >= min_turns else max(bounds))

    def with_repeats_of(self, other: Measurement) -> Measurement:
        """Return one measurement with the repeats of this one and then those of `other`, a later one of the same case.

        All other values, such as `hit_rate`, are those of `other`, or those of `self` if `other` has no repeats.
        """
        return replace(
            other if other.speeds else self,
            speeds=self.speeds + other.speeds,
            ceilings=self.ceilings + other.ceilings,
            turns=self.turns + other.turns,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, whose keys are stable across versions."""
        return {
            **asdict(self.case),
            "images_per_s": repeats_json(self.speeds),
            "ceiling_images_per_s": repeats_json(self.ceilings),
            "turns": list(self.turns),
            "amplification": None if self.amplification is None else round(self.amplification, 4),
            "hit_rate": None if self.hit_rate is None else round(self.hit_rate, 4),
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Measurement:
        """Make a measurement from the result of `to_json`, whose numbers are rounded."""
        case = BenchCase(**{field.name: found[field.name] for field in fields(BenchCase)})
        names = ("images_per_s", "ceiling_images_per_s")
        speeds, ceilings = (tuple(found[name]["repeats"]) if found[name] else () for name in names)
        turns = tuple(found["turns"])
        return cls(case, speeds, found["amplification"], found["hit_rate"], found["reason"], ceilings, turns)


@dataclass(frozen=True)
class CaseRepeats:
    """The repeats of one case in the sweep and in the run-off (see `bench.py`). The run-off is more reliable."""

    stated: Measurement  # The repeats of the run-off if there are at least `MIN_TURNS`, else all repeats.
    every: Measurement  # All repeats.

    @classmethod
    def of(cls, sweep: Measurement | None, run_off: Measurement | None) -> CaseRepeats:
        """Combine the measurements of a case in the sweep and in the run-off. One of them may be None."""
        every = reduce(Measurement.with_repeats_of, [one for one in (sweep, run_off) if one is not None])
        return cls(run_off if run_off is not None and len(run_off.speeds) >= MIN_TURNS else every, every)

    def beside(self, other: CaseRepeats) -> tuple[Measurement, Measurement]:
        """Return two measurements to compare: one of this case, and one of `other`.

        If at least `MIN_TURNS` turns of the two `stated` measured both cases, return the two `stated`. Otherwise,
        return the two `every`.
        """
        if len(self.stated.ratios(other.stated)) >= MIN_TURNS:
            return self.stated, other.stated
        return self.every, other.every

    def ratios(self, other: CaseRepeats, *, all_turns: bool = False) -> tuple[float, ...]:
        """Return this case's speed divided by the other's in each turn that measured both; see `Measurement.ratios`."""
        mine, others = self.beside(other)
        return mine.ratios(others, all_turns=all_turns)


def ceiling_threads(case: BenchCase, cpus: int) -> int:
    """Return how many threads measure the ceiling of a case.

    For cold reads, it is the `num_threads` of the case. For hot reads, it is one more, but at most `cpus`, because the
    thread that calls the loader copies rows, too.
    """
    return min(case.num_threads + 1, cpus) if case.cache == "hot" else case.num_threads


def repeats_json(speeds: Sequence[float]) -> dict[str, Any] | None:
    """Return median, minimum, maximum and all repeats in images/s, rounded; None without repeats."""
    if not speeds:
        return None
    found = {"median": statistics.median(speeds), "min": min(speeds), "max": max(speeds)}
    return {**{name: round(speed, 1) for name, speed in found.items()}, "repeats": [round(one, 1) for one in speeds]}


def usable_seconds(budget: float) -> float:
    """Return how many seconds of a time budget packing and measuring may take.

    The rest is for the report, for removing temporary files, and for the end of the process, which takes up to 0.7 s
    if torch was imported.
    """
    return 0.97 * budget - min(0.9, 0.2 * budget)


def plan_cases(cases: Sequence[BenchCase], seconds: float) -> list[BenchCase]:
    """Return the most important cases that fit into `seconds`."""
    taken: list[BenchCase] = []
    for _, level in itertools.groupby(sorted(cases, key=_level), _level):
        # Add all cases of a level or none, because variants can only be compared if all of them are measured.
        more = [*taken, *level]
        if sum(map(min_seconds, more)) <= seconds:
            taken = more
    return taken


def enough_seconds(budget: float, left: float, cases: Sequence[BenchCase]) -> int:
    """Return a time budget that leaves enough time for `cases`, given that `budget` leaves `left` seconds for them."""
    needed = LEEWAY * sum(map(min_seconds, cases))
    return math.ceil(max(budget * needed / left if left > 0 else 0.0, budget + needed - left))


def min_seconds(case: BenchCase) -> float:
    """Return the seconds to plan for a case. Cases that decide the recommendation get four times as much as others."""
    return _MIN_CASE_SECONDS[case.cache] * (4 if _level(case) <= 1 else 1)


def min_bench_seconds(cases: Sequence[BenchCase]) -> float:
    """Return the minimum time in seconds for measuring `cases`, with the minimum number of repeats."""
    return MIN_REPEATS * sum(_MIN_CASE_SECONDS[case.cache] for case in cases)


def exceeds_decode_budget(variant: FileVariant, batch_size: int) -> bool:
    """Return whether reading a batch of random rows may decode more than 1 GiB of chunks."""
    if variant.compression == "none" or not variant.chunk_bytes or not variant.chunk_rows:
        return False
    chunks = min(batch_size, -(-variant.rows // variant.chunk_rows))
    return chunks * variant.chunk_bytes > _DECODE_BUDGET_BYTES


def all_cases(
    variants: Sequence[FileVariant], settings: BenchSettings, batch_size: int, num_threads: int
) -> list[BenchCase]:
    """Return all cases that `settings` ask for and the variants allow, regardless of time."""
    cases = []
    window = settings.window[0]
    for variant, cache in itertools.product(variants, settings.caches):
        for engine, order in itertools.product(settings.engines, settings.orders):
            # A dataset without chunks has no chunk cache to tune.
            cannot_tune = engine == "tuned" and variant.chunk_rows is None
            if cannot_tune or (order == "full" and exceeds_decode_budget(variant, batch_size)):
                continue
            rows = 1 if order == "single" else batch_size
            threads = 1 if order == "single" or engine == "default" else num_threads
            cases.append(BenchCase(variant.label, order, engine, cache, rows, window, threads))
        if "direct" in settings.engines and "window" in settings.orders:
            # Change one setting at a time: batch size, window, number of threads or number of workers.
            base = BenchCase(variant.label, "window", "direct", cache, batch_size, window, num_threads)
            cases += [replace(base, batch_size=size) for size in settings.batch_size[1:] if size != batch_size]
            cases += [replace(base, window=chunks) for chunks in settings.window[1:]]
            cases += [replace(base, num_threads=count) for count in settings.num_threads if count != num_threads]
            cases += [replace(base, num_threads=1, num_workers=count) for count in settings.num_workers]
    return cases


def _level(case: BenchCase) -> int:
    """Return how important a case is; 0 is the most important. Levels 0 and 1 decide the recommendation."""
    cold = case.cache == "cold"
    if (case.engine, case.order) == ("direct", "window"):
        return 0 + cold
    if (case.engine, case.order) == ("default", "single"):
        return 2 + cold
    return (6 if cold else 4) + (case.engine != "direct")


class SweepTable:
    """The measurements as a table by variant, order, engine and page-cache state.

    If `run_off` is given, the repeats of the run-off are combined with those of the same case (see `CaseRepeats`).

    Cases may also differ in batch size, window, threads or workers. For each order, engine and page-cache state, the
    table holds only the cases with the same settings as the first of `measurements`. All other cases are in `others`.
    The variants are sorted: the input file, the uncompressed variants by ascending chunk size, the contiguous variant,
    and the compressed variants by ascending chunk size.
    """

    def __init__(
        self, measurements: Sequence[Measurement], variants: Sequence[FileVariant], run_off: Sequence[Measurement] = ()
    ) -> None:
        cases = [one.case for one in measurements]
        self.variants = sorted(variants, key=_variant_key)
        self.caches = [name for name in CACHES if any(case.cache == name for case in cases)]
        self.orders = [name for name in ORDERS if any(case.order == name for case in cases)]
        self.engines = [name for name in ENGINES if any(case.engine == name for case in cases)]
        self.others: list[Measurement] = []
        usual: dict[tuple[str, str, str], BenchCase] = {}
        self._found: dict[tuple[str, str, str, str], Measurement] = {}
        by_case = {one.case: one for one in run_off}
        for one in measurements:
            case = replace(one.case, variant="")
            updated = CaseRepeats.of(one, by_case.get(one.case)).stated
            if usual.setdefault((case.order, case.engine, case.cache), case) == case:
                self._found[one.case.variant, case.order, case.engine, case.cache] = updated
            else:
                self.others.append(updated)

    def found(self, variant: str, order: str, engine: str, cache: str) -> Measurement | None:
        """Return the measurement of a case, which may have no repeats. Return None if `measurements` lacks the case."""
        return self._found.get((variant, order, engine, cache))

    def compared(self) -> list[FileVariant]:
        """Return the variants to draw: the input file and the uncompressed variants.

        If all chunked variants are compressed, those of one compression method are included.
        """
        made = [one.compression for one in self.variants if not one.is_input and one.chunk_rows is not None]
        first = made[0] if made else "none"
        return [one for one in self.variants if one.is_input or one.compression in ("none", first)]


def _variant_key(variant: FileVariant) -> tuple[Any, ...]:
    compressed = variant.compression != "none" and not variant.is_input
    return not variant.is_input, compressed, variant.chunk_bytes is None, variant.chunk_bytes or 0, variant.label
