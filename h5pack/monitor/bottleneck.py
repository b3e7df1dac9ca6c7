"""Rules that find the bottleneck in feeding a training step: they turn measured numbers (`Evidence`) into a `Verdict`.

The numbers come from `FeedMonitor` (the counters of one interval of a training loop) or from `h5pack.diagnose` (the
speeds of every stage measured alone, and of the whole loop). `judge` accepts both. The verdict has no text;
recommendations are in `h5pack.monitor.advice`. "The feed" is everything on the host that produces a batch: storage,
decoding, loader and transform. "The loop" and "everything together" both mean the complete training loop: feed, copy,
normalizing and step.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from h5pack.read.chunk_index import ChunkIndex


class _Named(Enum):
    """Base class of enumerations that define a member by its value and, for use in texts, its `words`."""

    words: str

    def __new__(cls, value: str, words: str = "") -> _Named:
        member = object.__new__(cls)
        member._value_, member.words = value, words
        return member


class Bottleneck(_Named):
    """The possible bottlenecks, in the order in which an image passes through them."""

    STORAGE = "storage", "storage"
    DECODING = "decoding", "decoding"
    LOADER = "loader", "the loader"
    TRANSFORM = "transform", "the transform on the host"
    COPY = "copy", "the copy to the device"
    NORMALIZE = "normalize", "normalizing"
    STEP = "step", "the step"


FEED = frozenset({Bottleneck.STORAGE, Bottleneck.DECODING, Bottleneck.LOADER, Bottleneck.TRANSFORM})
"""The bottlenecks on the host, before the copy to the device."""


class Stage(_Named):
    """The stages that `h5pack.diagnose` measures. Stages named COLD read from the disk, HOT from the page cache."""

    COLD_STORED = "storage_cold_stored_order", "storage cold, stored order"
    COLD = "storage_cold", "storage cold, loader's order"
    HOT = "storage_hot", "storage hot"
    LOADER = "loader", "loader only"
    TRANSFORM = "transform", "loader and transform"
    COPY = "copy", "host-to-device copy"
    NORMALIZE = "normalize", "normalize"
    STEP = "step", "step alone"
    EVERYTHING = "everything", "everything together"


@dataclass(frozen=True)
class Rates:
    """A speed in images per second: the median, the lowest and the highest of several repeats, and their number."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Rates:
        """Summarize the speeds of several repeats, in images per second."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def overlaps(self, other: Rates) -> bool:
        """Return whether the ranges `low` to `high` of both overlap, so that it is unclear which speed is higher."""
        return self.low <= other.high and other.low <= self.high

    @property
    def is_steady(self) -> bool:
        """Whether the repeats differ by at most a factor of five; if not, they are too noisy for a verdict."""
        return self.high <= 5.0 * self.low

    def __str__(self) -> str:
        return f"{rate_text(self.median)} images/s"


def rate_text(value: float) -> str:
    """Format a speed with three significant digits, or as a whole number from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


INTERRUPTED = "the measurement was interrupted"
NO_TIME = "there was no time for it"
# Minimum number of repeats; with fewer, a median says little.
MIN_REPEATS = 3


@dataclass(frozen=True)
class StageResult:
    """The result of measuring one stage: `rates`, or the `reason` why it was not measured."""

    stage: Stage
    rates: Rates | None = None
    reason: str | None = None
    late: bool = False  # whether there was no time for enough repeats
    cpus_used: float | None = None  # CPU seconds that this process and its children used per second
    images: int = 0  # number of images in all repeats together
    note: str | None = None  # a remark, such as which rows were measured


class Encoding(Enum):
    """The kind of decoding needed in every epoch. In messages, "in every epoch" follows the value of a member."""

    IMAGES = "encoded images are decoded"
    CHUNKS = "compressed chunks are decoded"
    PARTS = "images that are split across chunks are put together"

    @classmethod
    def of(cls, index: ChunkIndex) -> Encoding | None:
        """Return the kind of decoding that reading a dataset needs; None if rows can be read without decoding."""
        if index.is_encoded:
            return cls.IMAGES
        if index.codec is None:
            return None
        return cls.CHUNKS if index.codec.steps else cls.PARTS


# A loader that uses at least this fraction of the CPUs that its threads or workers can use counts as CPU-bound.
_BUSY = 0.8
# The fraction of the loop's time that normalizing takes is measured in the loop, and is also computed from the stages
# measured alone. If the two results differ by more than this factor, neither is trusted.
_SHARE_NOISE = 2.0
# A thread counts as mostly waiting if it runs on a CPU for less than this fraction of its time.
_WAITS = 0.5


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Measurements and facts from which `judge` derives a verdict. None: not known. Fractions are from 0 to 1."""

    # Set by both `FeedMonitor` and `h5pack.diagnose`:
    cpus: int  # number of CPUs that this process may use
    machine_cpus: int | None = None  # number of CPUs of the machine
    gpus: int | None = None  # number of GPUs that this process may use
    # The threads of an H5Loader, or the workers of a DataLoader. Both are None for any other loader.
    num_threads: int | None = None
    num_workers: int | None = None
    encoding: Encoding | None = None  # the decoding needed in every epoch; None if there is none
    library_reason: str | None = None  # why rows are read through the HDF5 library; None: h5pack reads them directly
    # The fraction of the loop's time, over all repeats, in which the step waited for data
    stall_fraction: float | None = None

    # Set by `FeedMonitor` only, for loops whose stages are not measured:
    full_shuffle: bool = False  # whether rows are shuffled individually, regardless of their chunks
    # The process's wait for the loader, divided by the step's wait, which includes copy and transform on the device.
    wait_fraction: float | None = None
    # The fraction of the process's wait for the loader in which a transform ran in the step's thread.
    transform_wait_fraction: float | None = None
    # CPU seconds per second that were used: by the child processes if the loader is a DataLoader, which may have
    # workers, else by this process and its children.
    cpus_used: float | None = None

    # Set by `h5pack.diagnose` only:
    stages: Mapping[Stage, StageResult] = field(default_factory=dict)  # the speed of each stage alone, and of the loop
    stall_range: tuple[float, float] | None = None  # lowest and highest `stall_fraction` of a single repeat
    load: float | None = None  # the system's load average before the measurement
    world_size: int = 1  # number of processes of this training
    on_gpu: bool | None = None  # whether the step runs on a GPU
    idle_gpus: int | None = None  # number of idle GPUs besides the one that runs the step
    step_threads: int | None = None  # number of threads of PyTorch's operations on the CPU
    builtin_step: bool = False  # whether the step is h5pack's small network, not the user's model
    batch_rows: int | None = None  # number of images in a batch
    epoch_batches: int | None = None  # number of batches in an epoch
    # Bytes of an image, and whether its values are floats: in the file (stored), and in the loader's batches (loaded).
    stored_row_bytes: int | None = None
    loaded_row_bytes: int | None = None
    stored_float: bool = False
    loaded_float: bool = False
    pinned: bool | None = None  # whether the loader's batches are in pinned memory
    fits_cache: bool = True  # whether the page cache can hold all stored bytes
    has_transform: bool = False  # whether a transform runs on the host
    # The fraction of time in which a thread ran, or waited only for a CPU: when reading rows from the page cache, and
    # when calling the transform.
    read_busy_fraction: float | None = None
    transform_busy_fraction: float | None = None
    # The fraction of the loop's time in which the step's thread normalized; None on a GPU, where normalizing overlaps
    # with the step.
    normalize_fraction: float | None = None
    # The step's images/s with half a batch, divided by its images/s with a whole batch.
    half_batch_ratio: float | None = None
    # The loop's images/s with one of PyTorch's CPU threads, divided by its images/s with all threads.
    one_thread_ratio: float | None = None
    synchronizations: float | None = None  # how often a step makes the process wait for the CUDA device
    synchronized_at: str | None = None  # FILE:LINE of the first such wait

    @property
    def step_competes(self) -> bool:
        """Whether the step runs in several threads on CPUs that the loader uses, too."""
        return not self.on_gpu and self.cpus > 1 and (self.step_threads or 1) > 1

    @property
    def parallel(self) -> int:
        """The number of threads or workers that read at the same time, at least 1."""
        return max(1, self.num_threads or self.num_workers or 1)

    @property
    def transform_waits(self) -> bool:
        """True if the transform spends more time waiting than computing."""
        return self.transform_busy_fraction is not None and self.transform_busy_fraction < _WAITS

    @property
    def feed_stage(self) -> Stage:
        """The stage that measures the loader as used in training: TRANSFORM if there is a transform, else LOADER."""
        return Stage.TRANSFORM if self.has_transform else Stage.LOADER

    @property
    def feed_cpus_used(self) -> float | None:
        """CPU seconds per second that the loader uses. If that is not known, those that the whole process uses."""
        return self.stages[self.feed_stage].cpus_used if self.feed_stage in self.stages else self.cpus_used

    @property
    def feed_is_busy(self) -> bool | None:
        """True if `feed_cpus_used` is nearly the number of CPUs that the loader could use; None if not known."""
        used = self.feed_cpus_used
        return None if used is None else used >= _BUSY * min(self.parallel, self.cpus)

    @property
    def normalize_agrees(self) -> bool:
        """Whether normalizing takes about the fraction of the loop's time that separate measurements suggest.

        False if repeats of normalizing or of the step differ too much, or if a measurement is missing.
        """
        normalize, step = self.rates(Stage.NORMALIZE), self.rates(Stage.STEP)
        if normalize is None or step is None or self.normalize_fraction is None:
            return False
        if not (normalize.is_steady and step.is_steady):
            return False
        alone = step.median / (normalize.median + step.median) * (1 - (self.stall_fraction or 0.0))
        return alone / _SHARE_NOISE <= self.normalize_fraction <= alone * _SHARE_NOISE

    def rates(self, stage: Stage) -> Rates | None:
        """Return the speed of a stage; None if it was not measured."""
        return self.stages[stage].rates if stage in self.stages else None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict without the stages and without the fields that only `FeedMonitor` sets."""
        left_out = ("stages", "wait_fraction", "transform_wait_fraction", "cpus_used", "full_shuffle")
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out}
        found["stall_range"] = None if self.stall_range is None else list(self.stall_range)
        return {**found, "encoding": None if self.encoding is None else self.encoding.value}


class Outcome(Enum):
    """The kinds of result that a verdict can have."""

    NOT_MEASURED = "the loader, the step or the loop could not be measured"
    TOO_LITTLE = "there was no time for enough repeats"
    NOISY = "repeats differ too much, or a stage alone is slower than the whole loop"
    FED = "the step hardly waits"
    LIMITED = "the step waits for a bottleneck"
    CONTENTION = "the step waits, although the loader and the copy alone are fast enough"
    SLOWED = "the step hardly waits, but it is much slower in the loop than alone"


@dataclass(frozen=True)
class Verdict:
    """The bottleneck, as far as the numbers support one."""

    outcome: Outcome
    bottlenecks: tuple[Bottleneck, ...] = ()  # more than one if the measurements cannot tell them apart
    # NOT_MEASURED: the stage that was not measured. TOO_LITTLE: the stage with too few repeats. NOISY: the stage that
    # is slower alone than the loop; EVERYTHING if the loop's speeds differ too much; None if the waits differ too much.
    stage: Stage | None = None
    gain: float = 1.0  # upper bound: how many times as fast the training would be if the step did not wait
    slowdown: float = 1.0  # FED on a CPU: the speed of normalizing and the step alone, divided by the loop's speed
    first_epoch: Rates | None = None  # the disk's speed, if the disk slows down only the first epoch

    @property
    def fed(self) -> bool | None:
        """Whether the step hardly waits; None if that is not known."""
        fed = {Outcome.FED: True, Outcome.SLOWED: True, Outcome.LIMITED: False, Outcome.CONTENTION: False}
        return fed.get(self.outcome)


def judge(evidence: Evidence) -> Verdict:
    """Find the bottleneck, from the stages if any were measured, else from the counters of a training loop."""
    return _StageRules(evidence).verdict() if evidence.stages else _judge_interval(evidence)


def _judge_interval(evidence: Evidence) -> Verdict:
    busy = evidence.feed_is_busy
    if evidence.wait_fraction is not None and evidence.wait_fraction < 0.5:
        # The step waits more than twice as long as the process. Only a step on a CUDA device can wait longer than the
        # process: it waits for the copy and the transform, which come after the loader. Decide this first: the process
        # may spend most of its own short wait on launching the kernels of a transform, which the next condition would
        # take for a slow transform.
        found = Bottleneck.COPY
    elif (evidence.transform_wait_fraction or 0.0) > 0.5:
        found = Bottleneck.TRANSFORM
    elif evidence.num_workers == 0 or (evidence.num_workers is None and evidence.num_threads is None):
        found = Bottleneck.LOADER
    elif evidence.library_reason is not None or (evidence.full_shuffle and evidence.encoding is Encoding.CHUNKS):
        found = Bottleneck.DECODING
    else:
        # If the CPU use is unknown, assume that threads wait for the disk. Do not assume this for worker processes,
        # because they may be slow for another reason: passing batches between processes.
        found = _feed_cause(evidence, waits=busy is False or (busy is None and evidence.num_workers is None))
    return Verdict(Outcome.LIMITED, (found,))


def _feed_cause(evidence: Evidence, *, waits: bool) -> Bottleneck:
    """Return what limits reading: storage if the threads wait, else decoding or the HDF5 library, else the loader.

    Reading through the HDF5 library counts as decoding.
    """
    if waits:
        return Bottleneck.STORAGE
    decodes = evidence.encoding is not None or evidence.library_reason is not None
    return Bottleneck.DECODING if decodes else Bottleneck.LOADER


# The step counts as waiting if it waits for more than this fraction of the loop's time. The parameter `warn_stall` of
# `FeedMonitor` has the same default.
MAX_STALL = 0.1
# If the step waits for more than MAX_STALL of the time in some repeats but not in others, and the lowest and highest
# fraction differ by more than this, there is no verdict.
_STALL_NOISE = 0.1
# Two speeds whose medians differ by at most this factor count as equal, whatever the ranges of their repeats.
_EQUAL = 1.1
# Two speeds whose medians differ by more than this factor count as different, even if their ranges overlap.
_APART = 1.5
# The feed is fast enough if its slowest repeat is more than this many times as fast as the step's fastest repeat.
_AMPLE = 1.5
# If a step on the CPU hardly waits for data, but is this many times as fast alone as in the loop, other work slows it.
_SLOWED = 3.0
# If the loop is this many times as fast as one of its stages alone, the machine's speed changed between measurements.
_FASTER = 1.25
# An outer stage, such as the loader, contains an inner stage, such as reading. If the outer speed is below the first
# fraction of the inner speed, the outer stage itself is the cause. From the second fraction on, the inner stage is the
# cause. Both stages are named in between, or if the repeats differ too much to tell.
_EXPLAINS = (0.5, 0.7)


def _alike(one: Rates, other: Rates) -> bool:
    larger, smaller = max(one.median, other.median), min(one.median, other.median)
    return larger <= _EQUAL * smaller or (larger <= _APART * smaller and one.overlaps(other))


class _StageRules:
    """The rules for stages that were measured alone, and for the loop.

    The loop shows whether the step waits. The speeds of the stages show which stage it waits for.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.rates = {stage: rates for stage in Stage if (rates := evidence.rates(stage)) is not None}
        self.device = {stage: self.rates[stage] for stage in (Stage.NORMALIZE, Stage.STEP) if stage in self.rates}
        # If the file does not fit into memory, every epoch reads from the disk, so the disk's speed counts.
        self.cold = None if evidence.fits_cache else self.rates.get(Stage.COLD)

    def verdict(self) -> Verdict:
        """Find the bottleneck."""
        needed = (self.evidence.feed_stage, Stage.STEP, Stage.EVERYTHING)
        for stage in (*needed, Stage.COPY, Stage.NORMALIZE, *(() if self.evidence.fits_cache else (Stage.COLD,))):
            result = self.evidence.stages.get(stage)
            if result is not None and result.late:
                return Verdict(Outcome.TOO_LITTLE, stage=stage)
            if stage in needed and stage not in self.rates:
                return Verdict(Outcome.NOT_MEASURED, stage=stage)
        stall = self.evidence.stall_fraction or 0.0
        low, high = self.evidence.stall_range or (stall, stall)
        if low <= MAX_STALL < high and high - low > _STALL_NOISE:
            return Verdict(Outcome.NOISY)
        together, producers, demand = self.rates[Stage.EVERYTHING], self._feed_and_copy(), self._demand()
        # If the step waited for at most MAX_STALL of the time in every repeat, noisy speeds of the feed and of the loop
        # do not matter.
        waited = high > MAX_STALL
        if waited and not together.is_steady:
            return Verdict(Outcome.NOISY, stage=Stage.EVERYTHING)
        for stage, rates in ((producers if waited else {}) | self.device).items():
            if together.median > _FASTER * rates.median:
                return Verdict(Outcome.NOISY, stage=stage)
        gain = 1 / max(1e-3, 1 - stall)
        if stall > MAX_STALL:
            # The loop cannot become faster than the device alone. If noise makes the device alone seem slower than the
            # loop, the gain is 1.
            gain = min(gain, max(1.0, demand.median / together.median))
        known: dict[str, Any] = {"gain": gain, "first_epoch": self._first_epoch()}
        if stall <= MAX_STALL and not self.evidence.on_gpu and demand.low > _SLOWED * together.high:
            return Verdict(Outcome.SLOWED, **known)
        if stall <= MAX_STALL:
            slowdown = 1.0 if self.evidence.on_gpu else demand.median / together.median
            return Verdict(Outcome.FED, self._device_parts(), slowdown=slowdown, **known)
        slowest = _slowest(producers.values())
        if slowest.low > _AMPLE * demand.high:
            return Verdict(Outcome.CONTENTION, **known)
        names: set[Bottleneck] = set()
        for stage in (stage for stage, rates in producers.items() if _alike(rates, slowest)):
            names.update([Bottleneck.COPY] if stage is Stage.COPY else self._feed_causes())
        return Verdict(Outcome.LIMITED, tuple(one for one in Bottleneck if one in names), **known)

    def _feed_and_copy(self) -> dict[Stage, Rates]:
        """Return the speeds of the feed and of the copy, which work at the same time as the device."""
        feed = self.evidence.feed_stage
        if self.cold is not None and self.cold.median < self.rates[feed].median:
            feed = Stage.COLD
        return {stage: self.rates[stage] for stage in (feed, Stage.COPY) if stage in self.rates}

    def _demand(self) -> Rates:
        """Return the speed of normalizing and the step. A GPU may do both at once, a CPU does one after the other."""
        return (_slowest if self.evidence.on_gpu else _in_turn)(self.device.values())

    def _device_parts(self) -> tuple[Bottleneck, ...]:
        """Return the stage that takes more time, normalizing or the step, or both stages if they are about equal.

        Compare their speeds measured alone and, if known, also their shares of the loop's time. If the speeds and the
        shares name different stages, return both stages. But if the shares are too far from what the speeds suggest
        (see `normalize_agrees`), return only the step, because nothing shows that normalizing is the limit.
        """
        evidence, alone = self.evidence, {stage: 1 / rates.median for stage, rates in self.device.items()}
        parts = [alone]
        if evidence.normalize_fraction is not None and Stage.NORMALIZE in alone:
            if not evidence.normalize_agrees:
                return (Bottleneck.STEP,)
            step = 1 - evidence.normalize_fraction - (evidence.stall_fraction or 0.0)
            parts.append({Stage.NORMALIZE: evidence.normalize_fraction, Stage.STEP: step})
        longest = {stage for some in parts for stage in some if max(some.values()) <= _EQUAL * some[stage]}
        return tuple(Bottleneck(stage.value) for stage in alone if stage in longest)

    def _feed_causes(self) -> tuple[Bottleneck, ...]:
        feed, cold = self.rates[self.evidence.feed_stage], self.cold
        if cold is not None and _alike(cold, feed):
            return (Bottleneck.STORAGE, *self._hot_causes())
        return (Bottleneck.STORAGE,) if cold is not None and cold.median < feed.median else self._hot_causes()

    def _hot_causes(self) -> tuple[Bottleneck, ...]:
        """Return what limits the feed when it reads from the page cache."""
        busy, loader, hot = self.evidence.read_busy_fraction, self.rates.get(Stage.LOADER), self.rates.get(Stage.HOT)
        if loader is None:
            return (Bottleneck.TRANSFORM,)
        causes: tuple[Bottleneck, ...] = (Bottleneck.LOADER,)
        below = _feed_cause(self.evidence, waits=busy is not None and busy < _WAITS)
        if hot is not None and below is not Bottleneck.LOADER:
            causes = _causes(loader, Bottleneck.LOADER, hot, (below,))
        if self.evidence.has_transform:
            causes = _causes(self.rates[Stage.TRANSFORM], Bottleneck.TRANSFORM, loader, causes)
        return causes

    def _first_epoch(self) -> Rates | None:
        cold, together = self.rates.get(Stage.COLD), self.rates[Stage.EVERYTHING]
        if cold is None or not self.evidence.fits_cache or cold.high >= together.low or _alike(cold, together):
            return None
        return cold


def _causes(outer: Rates, own: Bottleneck, inner: Rates, within: tuple[Bottleneck, ...]) -> tuple[Bottleneck, ...]:
    """Return what limits an outer stage (see `_EXPLAINS`): itself (`own`), the inner stage (`within`), or both."""
    share = outer.median / inner.median
    if share < _EXPLAINS[0] and outer.high < _APART * _EXPLAINS[0] * inner.low:
        return (own,)
    if share >= _EXPLAINS[1] and outer.low >= _EXPLAINS[0] * inner.high:
        return within
    return (*within, own)


def _slowest(speeds: Collection[Rates]) -> Rates:
    return min(speeds, key=lambda one: one.median)


def _in_turn(parts: Collection[Rates]) -> Rates:
    """Return the combined speed if each image passes through all parts, one after the other."""

    def combined(*values: float) -> float:
        return 1 / sum(1 / value for value in values)

    median, low, high = map(combined, *((part.median, part.low, part.high) for part in parts))
    return Rates(median, low, high, min(part.repeats for part in parts))
