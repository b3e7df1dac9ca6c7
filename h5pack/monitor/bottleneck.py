"""Rules that find the bottleneck in feeding a training step: they turn measured numbers (`Evidence`) into a `Verdict`.

The numbers are either the counters of one interval of a training loop, from `FeedMonitor`, or the speed of every stage
measured alone, from `h5pack.diagnose`. `judge` accepts both. The verdict is data without text; recommendations are in
`h5pack.monitor.advice`. "Feed" means everything on the host that produces a batch: storage, decoding, loader and
transform. "The loop" or "everything together" is the complete training loop with feed, copy and step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
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
    """The stages that `h5pack.diagnose` measures: COLD reads from the disk, and HOT from the page cache."""

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
        """Summarize repeats, each in images per second."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def overlaps(self, other: Rates) -> bool:
        """Return whether the ranges from lowest to highest overlap, so that it is unclear which speed is higher."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        return f"{rate_text(self.median)} images/s"


def rate_text(value: float) -> str:
    """Format a speed with three significant digits, or as a whole number from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


@dataclass(frozen=True)
class StageResult:
    """The result of measuring one stage: `rates`, or the `reason` why it was not measured.

    `cpus_used` is the CPU seconds that this process and its children used per second, `images` is the number of images
    in all repeats together, and `note` says what the stage was measured on.
    """

    stage: Stage
    rates: Rates | None = None
    reason: str | None = None
    cpus_used: float | None = None
    images: int = 0
    note: str | None = None


_MIN_GAIN = 1.15


@dataclass(frozen=True)
class Trial:
    """A stage's speed with the present number of threads or workers (`before`) and with another `number` (`after`)."""

    stage: Stage
    number: int
    before: Rates
    after: Rates

    @property
    def gain(self) -> float:
        """The speed with `number` divided by the speed with the present number of threads or workers."""
        return self.after.median / self.before.median

    @property
    def helps(self) -> bool:
        """True if `number` is at least 15 % faster, and even its slowest repeat exceeds the median of `before`."""
        return self.gain >= _MIN_GAIN and self.after.low > self.before.median


class Encoding(Enum):
    """The kind of decoding that is needed in every epoch. The value completes the sentence "... in every epoch"."""

    IMAGES = "encoded images are decoded"
    CHUNKS = "compressed chunks are decoded"
    PARTS = "images that chunks cut are put together"

    @classmethod
    def of(cls, index: ChunkIndex) -> Encoding | None:
        """Return the kind of decoding that reading a dataset needs; None if rows can be read without decoding."""
        if index.is_encoded:
            return cls.IMAGES
        if index.codec is None:
            return None
        return cls.CHUNKS if index.codec.steps else cls.PARTS


_BUSY = 0.8
"""A loader that uses at least this fraction of the CPUs that its threads or workers can use counts as CPU-bound."""
_WAITS = 0.5
"""A thread that runs on a CPU for less than this fraction of its time counts as waiting."""
_CROWDED = 0.5
"""Above this load average per CPU, other processes are assumed to disturb the measurement."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Measurements and facts from which `judge` derives a verdict. None: not known. Fractions are from 0 to 1."""

    # The CPUs that this process may use, all CPUs of the machine, and the load average before the measurement.
    cpus: int
    machine_cpus: int | None = None
    load: float | None = None
    # The number of threads of an H5Loader, or of workers of a DataLoader. Both are None for any other loader.
    num_threads: int | None = None
    num_workers: int | None = None
    on_gpu: bool | None = None
    batch_rows: int | None = None
    # The size and type of an image as stored in the file, and as returned by the loader.
    stored_row_bytes: int | None = None
    loaded_row_bytes: int | None = None
    stored_float: bool = False
    loaded_float: bool = False
    pinned: bool | None = None
    encoding: Encoding | None = None
    # Why rows are read through the HDF5 library. None: h5pack reads them directly from the file.
    library_reason: str | None = None
    # Whether rows are shuffled individually, regardless of the chunks that contain them.
    full_shuffle: bool = False
    # Whether all stored bytes fit into the available memory, and whether all decoded images do.
    fits_cache: bool = True
    fits_resident: bool = False
    has_transform: bool = False
    # The fraction of its time that one thread spent on a CPU instead of waiting: while it read rows from the page
    # cache, and while it called the transform.
    read_busy_fraction: float | None = None
    transform_busy_fraction: float | None = None
    # The step's images/s with half the batch size, divided by its images/s with the full batch size.
    half_batch_ratio: float | None = None
    # How many times per step the process waits for the CUDA device, and the file and line of the first such wait.
    synchronisations: float | None = None
    synchronised_at: str | None = None
    # How many GPUs torch sees, how many of the others are idle, and how many processes this training has.
    num_gpus: int = 0
    idle_gpus: int | None = None
    world_size: int = 1
    # stall_fraction: the fraction of the training loop's time in which the step waited for data. wait_fraction: the
    # time in which the process waited for the loader, divided by the time in which the step waited (the rest is the
    # copy). transform_wait_fraction: the fraction of the process's wait in which a transform ran in the step's thread.
    stall_fraction: float | None = None
    wait_fraction: float | None = None
    transform_wait_fraction: float | None = None
    # CPU seconds that the feed used per second. Used only if `stages` is empty.
    cpus_used: float | None = None
    # The stages that were measured alone. Empty: only the counters of a training loop are known.
    stages: Mapping[Stage, StageResult] = field(default_factory=dict)
    trial: Trial | None = None

    @property
    def parallel(self) -> int:
        """The number of threads or workers that read at the same time, at least 1."""
        return max(1, self.num_threads or self.num_workers or 1)

    @property
    def crowded(self) -> bool:
        """True if other processes use a considerable part of the machine's CPUs."""
        return self.load is not None and self.load > _CROWDED * (self.machine_cpus or 1)

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
        return self.cpus_of(self.feed_stage) if self.stages else self.cpus_used

    @property
    def feed_is_busy(self) -> bool | None:
        """True if the loader's threads or workers use nearly all CPUs that they could use; None if not known."""
        used = self.feed_cpus_used
        return None if used is None else used >= _BUSY * min(self.parallel, self.cpus)

    def rates(self, stage: Stage) -> Rates | None:
        """Return the speed of a stage; None if it was not measured."""
        return self.stages[stage].rates if stage in self.stages else None

    def cpus_of(self, stage: Stage) -> float | None:
        """Return the CPU seconds that a stage used per second; None if not known."""
        return self.stages[stage].cpus_used if stage in self.stages else None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, without the stages, the trial, and what only `FeedMonitor` measures."""
        left_out = ("stages", "trial", "wait_fraction", "transform_wait_fraction", "cpus_used", "full_shuffle")
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out}
        return {**found, "encoding": None if self.encoding is None else self.encoding.value}


class Outcome(Enum):
    """The kinds of result that a verdict can have."""

    NO_LOADER = "the loader was not measured"
    NO_STEP = "the step was not measured"
    FED_BUT_WAITING = "the loop has the step's speed, and yet the step waits"
    FASTER_TOGETHER = "the loop is faster than one of its parts"
    FED = "the step does not wait"
    LIMITED = "something limits the step"


class Doubt(Enum):
    """The ways in which the loop's speed can contradict a verdict based on stages that were measured alone."""

    NO_LOOP = "everything together was not measured"
    STEP_WAITS = "the step is named, and yet it waits"
    STEP_HARDLY_WAITS = "the feed is named, and yet the step hardly waits"
    SHARED_CPUS = "together they are slower than alone: they share the CPUs"
    OTHER_PROCESSES = "together they are slower than alone: others use the CPUs"
    SLOWER_TOGETHER = "together they are slower than alone"


@dataclass(frozen=True)
class Verdict:
    """The bottleneck, and how well the numbers support this result.

    Attributes
    ----------
    outcome : Outcome
    bottlenecks : tuple of Bottleneck
        Several if the numbers do not tell which one it is; empty if none could be determined.
    fed : bool or None
        Whether the loop runs as fast as the step alone. None: not known.
    certain : bool
        Whether the measurements are consistent with each other.
    doubt : Doubt or None
        The contradiction between the measurements, if any.
    feed : Rates or None
        The speed of the whole feed: storage, decoding, loader and transform.
    feed_causes : tuple of Bottleneck
        What limits the feed, whether or not the feed limits the step.
    slowest : (Bottleneck, Rates) or None
        The slowest of the three lanes, which work at the same time: the feed (named LOADER here), the copy, and the
        device (named STEP here).
    first_epoch : Rates or None
        The speed that the disk allows in the first epoch, if the disk slows down only the first epoch.
    """

    outcome: Outcome
    bottlenecks: tuple[Bottleneck, ...] = ()
    fed: bool | None = None
    certain: bool = False
    doubt: Doubt | None = None
    feed: Rates | None = None
    feed_causes: tuple[Bottleneck, ...] = ()
    slowest: tuple[Bottleneck, Rates] | None = None
    first_epoch: Rates | None = None


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
        # If the CPU use is unknown, assume that threads wait for the disk. Do not assume that of workers, because
        # passing batches between processes may be what is slow.
        found = _feed_cause(evidence, waits=busy is False or (busy is None and evidence.num_workers is None))
    return Verdict(Outcome.LIMITED, (found,), fed=False, feed_causes=(found,))


def _feed_cause(evidence: Evidence, *, waits: bool) -> Bottleneck:
    """Return what limits reading: storage if the threads wait, else decoding if any is needed, else the loader."""
    if waits:
        return Bottleneck.STORAGE
    decodes = evidence.encoding is not None or evidence.library_reason is not None
    return Bottleneck.DECODING if decodes else Bottleneck.LOADER


_EQUAL = 1.1
"""Two speeds whose medians differ by at most this factor count as equal, whatever the ranges of their repeats."""
_APART = 1.5
"""Two speeds whose medians differ by more than this factor count as different, even if one outlying repeat makes their
ranges overlap."""
_FED = 0.9
"""The step counts as fed, meaning that it does not wait, if the loop reaches this fraction of the step's own speed."""
_SHORT = 0.75
"""If the loop is slower than this fraction of its slowest lane (see `_StageRules`), the lanes slow each other down."""
_MOSTLY, _HARDLY = 0.5, 0.1
"""The step mostly waits above the first stall fraction, and hardly waits below the second."""
_FASTER = 1.25
"""If the loop is faster than this multiple of its slowest lane, the measurement of that lane cannot be right."""
_EXPLAINS = (0.5, 0.7)
"""Limits of a stage's speed divided by that of a stage that it contains, such as the loader and reading. Below the
first, the outer stage itself is the cause; from the second on, the inner stage is; in between, both are named."""


def _alike(one: Rates, other: Rates) -> bool:
    larger, smaller = max(one.median, other.median), min(one.median, other.median)
    return larger <= _EQUAL * smaller or (larger <= _APART * smaller and one.overlaps(other))


class _StageRules:
    """The rules for stages that were measured alone.

    Three lanes work at the same time: the feed (storage to transform), the copy, and the device (normalize, step). The
    slowest lane limits the training, and the part of it that takes the most time is the bottleneck.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.rates = {stage: rates for stage in Stage if (rates := evidence.rates(stage)) is not None}
        # If the file does not fit into memory, every epoch reads from the disk, so the disk's speed counts.
        self.cold = None if evidence.fits_cache else self.rates.get(Stage.COLD)
        self.together = self.rates.get(Stage.EVERYTHING)

    def verdict(self) -> Verdict:
        """Find the bottleneck."""
        lanes = self._lanes()
        feed = lanes.get(Bottleneck.LOADER)
        if feed is None:
            return Verdict(Outcome.NO_LOADER)
        causes, first = self._feed_causes(), self._first_epoch()
        if Stage.STEP not in self.rates:
            return Verdict(Outcome.NO_STEP, feed=feed, feed_causes=causes, first_epoch=first)
        slowest = min(lanes, key=lambda lane: lanes[lane].median)

        def found(outcome: Outcome, bottlenecks: tuple[Bottleneck, ...] = (), **known: Any) -> Verdict:
            known |= {"feed": feed, "feed_causes": causes, "slowest": (slowest, lanes[slowest]), "first_epoch": first}
            return Verdict(outcome, bottlenecks, **known)

        stall, fed = self.evidence.stall_fraction, self._is_fed()
        if fed and stall is not None and stall > _MOSTLY:
            return found(Outcome.FED_BUT_WAITING)
        if self.together is not None and not fed and self.together.low > _FASTER * lanes[slowest].high:
            return found(Outcome.FASTER_TOGETHER)
        limits = [lane for lane in lanes if lane is slowest or _alike(lanes[lane], lanes[slowest])]
        bottlenecks = self._parts(limits, causes)
        # A step that shares the CPUs with its loader is slower than when measured alone, even if it does not wait.
        if fed or (bottlenecks == (Bottleneck.STEP,) and stall is not None and stall < _HARDLY):
            return found(Outcome.FED, (Bottleneck.STEP,), fed=True, certain=True)
        certain, doubt = self._doubt(bottlenecks, lanes[slowest])
        return found(Outcome.LIMITED, bottlenecks, fed=fed, certain=certain, doubt=doubt)

    def _lanes(self) -> dict[Bottleneck, Rates]:
        rates, lanes = self.rates, {}
        feed = rates.get(self.evidence.feed_stage)
        if feed is not None:
            lanes[Bottleneck.LOADER] = min((one for one in (feed, self.cold) if one), key=lambda one: one.median)
        if Stage.COPY in rates:
            lanes[Bottleneck.COPY] = rates[Stage.COPY]
        if Stage.STEP in rates:
            parts = [rates[stage] for stage in (Stage.NORMALIZE, Stage.STEP) if stage in rates]
            # A GPU may normalize and compute the step at the same time; a CPU does one after the other.
            on_gpu = self.evidence.on_gpu
            lanes[Bottleneck.STEP] = min(parts, key=lambda one: one.median) if on_gpu else _in_turn(parts)
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
        # The fraction of the time per image that the transform adds to the time of the loader.
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

    def _parts(self, limits: list[Bottleneck], causes: tuple[Bottleneck, ...]) -> tuple[Bottleneck, ...]:
        """Return the bottlenecks within the slowest lanes, in the order in which an image passes through them."""
        names: set[Bottleneck] = set()
        for lane in limits:
            if lane is Bottleneck.LOADER:
                names.update(causes)
            elif lane is Bottleneck.COPY or Stage.NORMALIZE not in self.rates:
                names.add(lane)
            else:
                normalize, step = self.rates[Stage.NORMALIZE], self.rates[Stage.STEP]
                alike = _alike(normalize, step)
                if alike or normalize.median < step.median:
                    names.add(Bottleneck.NORMALIZE)
                if alike or normalize.median >= step.median:
                    names.add(Bottleneck.STEP)
        return tuple(one for one in Bottleneck if one in names)

    def _first_epoch(self) -> Rates | None:
        cold, usual = self.rates.get(Stage.COLD), self.together or self.rates.get(Stage.LOADER)
        if cold is None or usual is None or not self.evidence.fits_cache:
            return None
        return cold if cold.median < usual.median and not _alike(cold, usual) else None

    def _doubt(self, bottlenecks: tuple[Bottleneck, ...], slowest: Rates) -> tuple[bool, Doubt | None]:
        """Return whether the loop's speed supports the verdict, and in which way it contradicts the verdict, if so."""
        together, stall = self.together, self.evidence.stall_fraction
        if together is None:
            return False, Doubt.NO_LOOP
        waits = stall is not None and stall > _MOSTLY
        if waits and bottlenecks == (Bottleneck.STEP,):
            return False, Doubt.STEP_WAITS
        if stall is not None and stall < _HARDLY and Bottleneck.STEP not in bottlenecks:
            return False, Doubt.STEP_HARDLY_WAITS
        if together.median >= _SHORT * slowest.median or together.overlaps(slowest):
            return True, None
        used, cpus = self.evidence.cpus_of(Stage.EVERYTHING), self.evidence.cpus
        doubt = Doubt.OTHER_PROCESSES if self.evidence.crowded else Doubt.SLOWER_TOGETHER
        if used is not None and used >= _BUSY * cpus:
            doubt = Doubt.SHARED_CPUS
        # If the feed or the copy was named and the step mostly waits, that confirms the verdict even though the loop is
        # slower than its slowest lane.
        return waits and bool(set(bottlenecks) - {Bottleneck.NORMALIZE, Bottleneck.STEP}), doubt


def _in_turn(parts: list[Rates]) -> Rates:
    """Return the images per second if each image passes through all parts one after the other."""
    median, low, high = (1 / sum(1 / value for value in values) for values in zip(*map(_bounds, parts), strict=True))
    return Rates(median, low, high, min(part.repeats for part in parts))


def _bounds(rates: Rates) -> tuple[float, float, float]:
    return rates.median, rates.low, rates.high
