"""Rules that find the bottleneck in feeding a training step: they turn measured numbers (`Evidence`) into a `Verdict`.

The numbers are either the counters of one interval of a training loop, from `FeedMonitor`, or the speed of every stage
measured alone, from `h5pack.diagnose`. `judge` accepts both. The verdict is data without text; recommendations are in
`h5pack.monitor.advice`. "The feed" is everything on the host that produces a batch: storage, decoding, loader
and transform. "The loop" and "everything together" both mean the complete training loop: feed, copy and step.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from h5pack.read.chunk_index import ChunkIndex


class Bottleneck(Enum):
    """The possible bottlenecks, in the order in which an image passes through them."""

    STORAGE = "storage"
    DECODING = "decoding"
    LOADER = "loader"
    TRANSFORM = "transform"
    COPY = "copy"
    NORMALIZE = "normalize"
    STEP = "step"


FEED = frozenset({Bottleneck.STORAGE, Bottleneck.DECODING, Bottleneck.LOADER, Bottleneck.TRANSFORM})
"""The bottlenecks on the host, before the copy to the device."""


class Stage(Enum):
    """The stages that `h5pack.diagnose` measures. COLD stages read from the disk, and HOT reads from the page cache."""

    COLD_STORED = "storage_cold_stored_order"
    COLD = "storage_cold"
    HOT = "storage_hot"
    LOADER = "loader"
    TRANSFORM = "transform"
    COPY = "copy"
    NORMALIZE = "normalize"
    STEP = "step"
    EVERYTHING = "everything"


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
        """Return whether the ranges from lowest to highest overlap, so that it is unclear which speed is higher."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        return f"{rate_text(self.median)} images/s"


def rate_text(value: float) -> str:
    """Format a speed with three significant digits, or as a whole number from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


INTERRUPTED = "the measurement was interrupted"


@dataclass(frozen=True)
class StageResult:
    """The result of measuring one stage: `rates`, or the `reason` why it was not measured."""

    stage: Stage
    rates: Rates | None = None
    reason: str | None = None
    cpus_used: float | None = None  # CPU seconds that this process and its children used per second
    images: int = 0  # number of images in all repeats together
    note: str | None = None  # a remark, such as which rows were measured


class Encoding(Enum):
    """The kind of decoding needed in every epoch. Its value begins a sentence that ends with "in every epoch"."""

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
# A thread counts as mostly waiting if it runs on a CPU for less than this fraction of its time.
_WAITS = 0.5


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Measurements and facts from which `judge` derives a verdict. None: not known. Fractions are from 0 to 1."""

    cpus: int  # number of CPUs that this process may use
    machine_cpus: int | None = None  # number of CPUs of the machine
    load: float | None = None  # the system's load average before the measurement
    # The threads of an H5Loader, or the workers of a DataLoader. Both are None for any other loader.
    num_threads: int | None = None
    num_workers: int | None = None
    on_gpu: bool | None = None  # whether the step runs on a GPU
    batch_rows: int | None = None  # number of images in a batch
    # The size of an image, and whether its values are floats: stored in the file, and loaded by the loader.
    stored_row_bytes: int | None = None
    loaded_row_bytes: int | None = None
    stored_float: bool = False
    loaded_float: bool = False
    pinned: bool | None = None  # whether the loader's batches are in pinned memory
    encoding: Encoding | None = None  # the decoding needed in every epoch; None if there is none
    library_reason: str | None = None  # why rows are read through the HDF5 library; None: h5pack reads them directly
    full_shuffle: bool = False  # whether rows are shuffled individually, regardless of their chunks
    fits_cache: bool = True  # whether the page cache can hold all stored bytes
    has_transform: bool = False  # whether a transform runs on the host
    # The fraction of the time in which a thread did not wait while it read from the page cache or called the transform.
    read_busy_fraction: float | None = None
    transform_busy_fraction: float | None = None
    half_batch_ratio: float | None = None  # the step's images/s with half a batch, divided by those with a whole one
    synchronisations: float | None = None  # how often a step makes the process wait for the CUDA device
    synchronised_at: str | None = None  # FILE:LINE of the first such wait
    idle_gpus: int | None = None  # number of idle GPUs besides the one that runs the step
    world_size: int = 1  # number of processes of this training
    stall_fraction: float | None = None  # fraction of the loop's time in which the step waited for data
    # The process's wait for the loader, divided by the step's wait, which also includes the wait for the copy.
    wait_fraction: float | None = None
    # The fraction of the process's wait for the loader in which a transform ran in the step's thread.
    transform_wait_fraction: float | None = None
    cpus_used: float | None = None  # CPU seconds that the feed used per second; ignored unless `stages` is empty
    stages: Mapping[Stage, StageResult] = field(default_factory=dict)  # empty if only the counters of a loop are known

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
        """The stage that measured the complete loader as used in training: TRANSFORM if there is a transform."""
        return Stage.TRANSFORM if self.has_transform else Stage.LOADER

    @property
    def feed_cpus_used(self) -> float | None:
        """CPU seconds that the loader's threads or workers used per second."""
        return self.stages[self.feed_stage].cpus_used if self.feed_stage in self.stages else self.cpus_used

    @property
    def feed_is_busy(self) -> bool | None:
        """True if the loader's threads or workers use nearly all CPUs that they could use; None if not known."""
        used = self.feed_cpus_used
        return None if used is None else used >= _BUSY * min(self.parallel, self.cpus)

    def rates(self, stage: Stage) -> Rates | None:
        """Return the speed of a stage; None if it was not measured."""
        return self.stages[stage].rates if stage in self.stages else None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict without the stages and without the fields that only `FeedMonitor` sets."""
        left_out = ("stages", "wait_fraction", "transform_wait_fraction", "cpus_used", "full_shuffle")
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out}
        return {**found, "encoding": None if self.encoding is None else self.encoding.value}


class Outcome(Enum):
    """The kinds of result that a verdict can have."""

    NO_LOADER = "the loader was not measured"
    NO_STEP = "the step was not measured"
    CONTRADICTION = "the loop contradicts the stages measured alone, so no bottleneck is named"
    FED = "the step does not wait"
    LIMITED = "a bottleneck slows down the training"


@dataclass(frozen=True)
class Verdict:
    """The bottleneck, and how well the numbers support this result."""

    outcome: Outcome
    bottlenecks: tuple[Bottleneck, ...] = ()  # more than one if the measurements cannot tell them apart
    fed: bool | None = None  # whether the loop runs as fast as the step alone
    certain: bool = False  # whether the measurements agree with each other
    slower: bool = False  # whether the loop is clearly slower than its slowest lane alone
    feed: Rates | None = None  # the speed of the whole feed
    first_epoch: Rates | None = None  # the disk's speed, if the disk slows down only the first epoch


def judge(evidence: Evidence) -> Verdict:
    """Find the bottleneck, from the stages if any were measured, else from the counters of a training loop."""
    return _StageRules(evidence).verdict() if evidence.stages else _judge_interval(evidence)


def _judge_interval(evidence: Evidence) -> Verdict:
    busy = evidence.feed_is_busy
    if (evidence.transform_wait_fraction or 0.0) > 0.5:
        found = Bottleneck.TRANSFORM
    elif evidence.wait_fraction is not None and evidence.wait_fraction < 0.5:
        found = Bottleneck.COPY
    elif evidence.num_workers == 0 or (evidence.num_workers is None and evidence.num_threads is None):
        found = Bottleneck.LOADER
    elif evidence.library_reason is not None or (evidence.full_shuffle and evidence.encoding is Encoding.CHUNKS):
        found = Bottleneck.DECODING
    else:
        # If the CPU use is unknown, assume that threads wait for the disk. Do not assume this for worker processes,
        # because they may be slow for another reason: passing batches between processes.
        found = _feed_cause(evidence, waits=busy is False or (busy is None and evidence.num_workers is None))
    return Verdict(Outcome.LIMITED, (found,), fed=False)


def _feed_cause(evidence: Evidence, *, waits: bool) -> Bottleneck:
    """Return what limits reading: storage if the threads wait, else decoding if any is needed, else the loader."""
    if waits:
        return Bottleneck.STORAGE
    decodes = evidence.encoding is not None or evidence.library_reason is not None
    return Bottleneck.DECODING if decodes else Bottleneck.LOADER


# Two speeds whose medians differ by at most this factor count as equal, whatever the ranges of their repeats.
_EQUAL = 1.1
# Two speeds whose medians differ by more than this factor count as different, even if an outlier makes ranges overlap.
_APART = 1.5
# The step counts as fed, meaning that it does not wait, if the loop reaches this fraction of the step's own speed.
_FED = 0.9
# If the loop reaches less than this fraction of the speed of its slowest lane (see `_StageRules`), the lanes probably
# slow each other down.
_SHORT = 0.75
# The step mostly waits above the first stall fraction, and hardly waits below the second.
_MOSTLY, _HARDLY = 0.5, 0.1
# If the loop is this many times as fast as its slowest lane, the measurement of that lane cannot be right.
_FASTER = 1.25
# An outer stage, such as the loader, contains an inner stage, such as reading. If the outer speed is below the first
# fraction of the inner speed, the outer stage itself is the cause. From the second fraction on, the inner stage is the
# cause. In between, both are named.
_EXPLAINS = (0.5, 0.7)


def _alike(one: Rates, other: Rates) -> bool:
    larger, smaller = max(one.median, other.median), min(one.median, other.median)
    return larger <= _EQUAL * smaller or (larger <= _APART * smaller and one.overlaps(other))


class _StageRules:
    """The rules for stages that were measured alone.

    Three lanes work at the same time: the feed (storage to transform), the copy, and the device (normalize, step). The
    slowest lane limits the training, and the part of that lane that takes the most time is the bottleneck.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.rates = {stage: rates for stage in Stage if (rates := evidence.rates(stage)) is not None}
        self.device = {stage: self.rates[stage] for stage in (Stage.NORMALIZE, Stage.STEP) if stage in self.rates}
        # If the file does not fit into memory, every epoch reads from the disk, so the disk's speed counts.
        self.cold = None if evidence.fits_cache else self.rates.get(Stage.COLD)
        self.together = self.rates.get(Stage.EVERYTHING)
        self.stall = None if self.together is None else evidence.stall_fraction

    def verdict(self) -> Verdict:
        """Find the bottleneck."""
        lanes = self._lanes()
        feed = lanes.get(Bottleneck.LOADER)
        if feed is None:
            return Verdict(Outcome.NO_LOADER)
        known: dict[str, Any] = {"feed": feed, "first_epoch": self._first_epoch()}
        if Stage.STEP not in self.rates:
            return Verdict(Outcome.NO_STEP, **known)
        together, slowest = self.together, _slowest(lanes.values())
        bottlenecks = self._parts([lane for lane in lanes if _alike(lanes[lane], slowest)])
        fed, step_only = self._is_fed(), bottlenecks == (Bottleneck.STEP,)
        mostly = self.stall is not None and self.stall > _MOSTLY
        hardly = self.stall is not None and self.stall < _HARDLY
        too_fast = together is not None and together.low > _FASTER * slowest.high
        contradicts = (too_fast or (hardly and Bottleneck.STEP not in bottlenecks)) and not fed
        if contradicts or (mostly and (fed or step_only)):
            return Verdict(Outcome.CONTRADICTION, **known)
        # A step that shares the CPUs with its loader is slower than when measured alone, even if it does not wait.
        if fed or (step_only and hardly):
            return Verdict(Outcome.FED, (Bottleneck.STEP,), fed=True, certain=True, **known)
        slower = together is not None and together.median < _SHORT * slowest.median and not together.overlaps(slowest)
        # If the feed or the copy is named and the step mostly waits, that confirms the verdict even though the loop is
        # slower than its slowest lane.
        confirmed = mostly and bool(set(bottlenecks) - {Bottleneck.NORMALIZE, Bottleneck.STEP})
        certain = confirmed or (together is not None and not slower)
        return Verdict(Outcome.LIMITED, bottlenecks, fed, certain=certain, slower=slower, **known)

    def _lanes(self) -> dict[Bottleneck, Rates]:
        rates, lanes = self.rates, {}
        feed = rates.get(self.evidence.feed_stage)
        if feed is not None:
            lanes[Bottleneck.LOADER] = feed if self.cold is None else _slowest([feed, self.cold])
        if Stage.COPY in rates:
            lanes[Bottleneck.COPY] = rates[Stage.COPY]
        if Stage.STEP in rates:
            # A GPU may normalize and compute the step at the same time; a CPU does one after the other.
            lanes[Bottleneck.STEP] = (_slowest if self.evidence.on_gpu else _in_turn)(self.device.values())
        return lanes

    def _is_fed(self) -> bool | None:
        if self.together is None:
            return None
        together, step = self.together, self.rates[Stage.STEP]
        close = together.median >= _SHORT * step.median and together.overlaps(step)
        return close or together.median >= _FED * step.median

    def _feed_causes(self) -> tuple[Bottleneck, ...]:
        hot, cold = self.rates[self.evidence.feed_stage], self.cold
        if cold is None:
            return self._transform_causes()
        if _alike(cold, hot):
            return tuple(dict.fromkeys([Bottleneck.STORAGE, *self._transform_causes()]))
        return (Bottleneck.STORAGE,) if cold.median < hot.median else self._transform_causes()

    def _transform_causes(self) -> tuple[Bottleneck, ...]:
        if not self.evidence.has_transform:
            return self._loader_causes()
        if Stage.LOADER not in self.rates:
            return (Bottleneck.TRANSFORM,)
        # The fraction of the time per image (of loader and transform together) that the transform takes.
        added = 1 - self.rates[Stage.TRANSFORM].median / self.rates[Stage.LOADER].median
        if added >= _EXPLAINS[0]:
            return (Bottleneck.TRANSFORM,)
        rest = self._loader_causes()
        return rest if added < 1 - _EXPLAINS[1] else (*rest, Bottleneck.TRANSFORM)

    def _loader_causes(self) -> tuple[Bottleneck, ...]:
        hot = self.rates.get(Stage.HOT)
        if hot is None:
            return (Bottleneck.LOADER,)
        busy = self.evidence.read_busy_fraction
        below = _feed_cause(self.evidence, waits=busy is not None and busy < _WAITS)
        explained = self.rates[Stage.LOADER].median / hot.median
        if below is Bottleneck.LOADER or explained < _EXPLAINS[0]:
            return (Bottleneck.LOADER,)
        return (below,) if explained >= _EXPLAINS[1] else (below, Bottleneck.LOADER)

    def _parts(self, limits: list[Bottleneck]) -> tuple[Bottleneck, ...]:
        """Return the bottlenecks within the slowest lanes, in the order in which an image passes through them."""
        names = set(limits) & {Bottleneck.COPY}
        if Bottleneck.LOADER in limits:
            names.update(self._feed_causes())
        if Bottleneck.STEP in limits:
            slowest = _slowest(self.device.values())
            names.update(Bottleneck(stage.value) for stage, rates in self.device.items() if _alike(rates, slowest))
        return tuple(one for one in Bottleneck if one in names)

    def _first_epoch(self) -> Rates | None:
        cold, usual = self.rates.get(Stage.COLD), self.together or self.rates.get(Stage.LOADER)
        if cold is None or usual is None or not self.evidence.fits_cache:
            return None
        return cold if cold.median < usual.median and not _alike(cold, usual) else None


def _slowest(speeds: Collection[Rates]) -> Rates:
    return min(speeds, key=lambda one: one.median)


def _in_turn(parts: Collection[Rates]) -> Rates:
    """Return the images per second if each image passes through all parts one after the other."""

    def combined(*values: float) -> float:
        return 1 / sum(1 / value for value in values)

    median, low, high = map(combined, *((part.median, part.low, part.high) for part in parts))
    return Rates(median, low, high, min(part.repeats for part in parts))
