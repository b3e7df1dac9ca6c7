"""Recommendations against bottlenecks: their texts, and rules that choose them from a verdict and its evidence.

The rules return `Advice` objects. The texts are templates in `Remedy`, and name parameters, not command-line flags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from h5pack.monitor.bottleneck import FEED, Bottleneck, Encoding, Evidence, Outcome, Stage, Verdict
from h5pack.system.text import counted


class Remedy(Enum):
    """The texts of the recommendations: templates to fill with `Advice.values`.

    Backticks mark parameters that the command line shows as flags; `Advice.text` removes the backticks.
    """

    TRY_MORE_READS = (
        "Perhaps too few reads run at once: at most {parallel}, although this process may use {cpus}. Try "
        "`{parameter}={number}`."
    )
    LARGER_CHUNKS = (
        "The disk loses time with seeks: it reaches {stored} in stored order, but {order} in the loader's order. "
        "Larger chunks need fewer seeks ('h5pack convert' with a larger chunk_bytes)."
    )
    READ_ONCE_BEFORE = "Read the file once before the training: it fits into memory."
    FASTER_DISK = (
        "Put the file on a faster disk, or store fewer bytes ('h5pack convert' with a smaller size or with "
        "compression)."
    )
    SHUFFLE_WINDOWS = (
        "Rows are drawn without regard to chunks, so each compressed chunk is decoded many times. Shuffle within "
        "windows of chunks (H5Loader or ChunkBatchSampler with shuffle='window')."
    )
    CONVERT_FOR_DIRECT_READS = (
        "Rows are read through the HDF5 library ({reason}), one thread at a time. 'h5pack convert' makes a file that "
        "is read directly."
    )
    DECODE_ONCE = (
        "{encoding} in every epoch. If the disk has room, do this only once ('h5pack convert' without compression)."
    )
    TRANSFORM_ON_DEVICE = "Run the transform on the GPU, for whole batches (DeviceFeed(loader, 'cuda', transform=...))."
    CHEAPER_TRANSFORM = (
        "Make the transform cheaper. Apply operations whose results are the same in every epoch only once, before "
        "'h5pack convert'."
    )
    TRANSFORM_WAITS = (
        "The transform mostly waits (it computes for only {busy:.0f} % of its time). Find out what it waits for."
    )
    TRANSFORM_IN_MORE_THREADS = (
        "Until then, use more {units}, so that more calls wait at the same time (`{parameter}={number}`)."
    )
    TRANSFORM_IN_PARALLEL = (
        "Together, the transform's threads use only about one CPU: Python's GIL or a lock lets only one of them run at "
        "a time. Use operations on whole tensors, or a DataLoader (`num_workers`)."
    )
    LARGER_BATCH_FOR_STEP = (
        "Small batches: with half the batch size, the step reaches only {half:.0f} % of its images/s, so each step "
        "has a fixed cost, which a larger `batch_size` spreads over more images."
    )
    LARGER_BATCH_FOR_LOADER = (
        "Small batches: each batch has a fixed cost, but holds only {images} of {size:,} bytes. Set a larger "
        "`batch_size`."
    )
    UINT8_BATCHES = (
        "Float batches on the host: {size:,} bytes per image, {times:.1f} times the size in the file. Keep uint8 on "
        "the host, and convert to float on the device (DeviceFeed(..., transform=Normalize(...)))."
    )
    STORE_UINT8 = (
        "Float batches on the host: {size:,} bytes per image. Store ordinary pictures as uint8 ('h5pack convert', "
        "which needs the range of the values only if it is not 0..1)."
    )
    PIN_MEMORY = (
        "Unpinned memory: each batch is copied once more on the host before the GPU can fetch it. Set "
        "`pin_memory=True`."
    )
    CHEAPER_COPY = (
        "The copy to the device, or the transform there, takes longer than the step. Copy uint8 from pinned memory "
        "(pin_memory=True), and convert to float on the device (DeviceFeed(..., transform=Normalize(...)))."
    )
    START_WORKERS = (
        "A DataLoader without workers reads and decodes while the step waits. Set its `num_workers`, or use H5Loader "
        "('h5pack convert' first, if the images are not in a pack yet)."
    )
    LOWER_PARALLELISM = (
        "Too many {units}: {parallel} share the {cpus} that this process may use. Lower `{parameter}` to {number}."
    )
    RAISE_PARALLELISM = (
        "Too few {units}: {parallel} for the {cpus} that this process may use. Raise `{parameter}` to {number}."
    )
    MORE_CPUS = (
        "This process may use {cpus}, and the loader's {units} keep them busy. The machine has {machine_cpus} CPUs: "
        "check the limits set by taskset, SLURM and the container's quota."
    )
    USE_H5LOADER = (
        "Use H5Loader, which reads in threads and passes nothing between processes. If the images are not in a pack "
        "yet, decode them only once ('h5pack convert')."
    )
    READ_IN_WORKERS = (
        "Load batches in the workers of a DataLoader, or pack the images ('h5pack convert') and use H5Loader."
    )
    AVOID_SYNCHRONIZATION = (
        "Host synchronization inside the step: the process waits for the GPU {times:.1f} times per step{where}. Usual "
        "causes are .item(), .cpu() and printing a tensor. Read losses only every few steps."
    )
    FEWER_STEP_THREADS = (
        "PyTorch's {step_threads} threads share the CPUs with the loader and other programs. If one thread is delayed, "
        "the others wait for it. A single thread may be faster or slower: try OMP_NUM_THREADS=1 before the command, or "
        "call torch.set_num_threads(1) in your code."
    )
    ONE_STEP_THREAD = (
        "PyTorch's {step_threads} threads take CPUs from each other and from the loader: with one thread, the training "
        "is {times:.1f} times as fast. Set OMP_NUM_THREADS=1 before the command, or call torch.set_num_threads(1) in "
        "your code, and measure again."
    )
    OWN_MODEL = "The step is a small built-in network. To measure your own, give `model`."
    USE_IDLE_GPUS = "{others}: train with {gpus} processes, one on each GPU (torchrun)."
    NORMALIZE_ON_GPU = "Normalizing runs on the CPU. A GPU normalizes in one fast kernel (`device='cuda'`)."
    USE_GPU = "The step runs on the CPU: use the GPU (`device='cuda'`) or a smaller network."
    LESS_ARITHMETIC = (
        "No GPU was found, so the step runs on the CPU: use a smaller network or smaller images ('h5pack convert' with "
        "a smaller size)."
    )
    FASTER_STEP = (
        "Make the step itself faster: mixed precision (`dtype='bfloat16'`), torch.compile, channels_last. A faster "
        "loader would not help."
    )


@dataclass(frozen=True)
class Advice:
    """One recommendation: a template and the numbers and names to insert into it."""

    remedy: Remedy
    moves: bool  # whether the advice relieves the bottleneck, so that following it makes the training faster now
    values: Mapping[str, Any] = field(default_factory=dict)
    first_epoch: bool = False  # whether the advice concerns only the first epoch

    @property
    def text(self) -> str:
        """The text of the recommendation, with the values inserted."""
        prefix = "Only for the first epoch: " if self.first_epoch else ""
        return prefix + self.remedy.value.format(**self.values).replace("`", "")

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters in backticks in the template, spelled exactly as in `text`."""
        return tuple(re.findall("`(.*?)`", self.remedy.value.format(**self.values)))


def advise(verdict: Verdict, evidence: Evidence) -> list[Advice]:
    """Return advice on the bottleneck and on other findings, one subject after the other."""
    return list(_Rules(verdict, evidence))


def threads_advice(evidence: Evidence) -> Advice | None:
    """Return advice on the number of PyTorch's CPU threads.

    None if the training step does not compete with the loader for CPUs, or if the loop was measured with one thread
    and was not clearly faster.
    """
    if not evidence.step_competes:
        return None
    times, values = evidence.one_thread_ratio, {"step_threads": evidence.step_threads}
    if times is None:
        return Advice(Remedy.FEWER_STEP_THREADS, False, values)
    return Advice(Remedy.ONE_STEP_THREAD, True, {**values, "times": times}) if times > FASTER_ALONE else None


FASTER_ALONE = 1.2
"""PyTorch uses too many threads if the training is more than this many times as fast with one thread."""
# The disk loses time with seeks if stored order is more than this many times as fast as the loader's order.
_SEEKS = 1.3
# A step has a high fixed cost if its images/s with half a batch are less than this fraction of those with a full batch.
_OVERHEAD = 0.75
_SMALL_BATCH_BYTES = 1 << 20
# Larger batches are advised only if an epoch has more of them: `diagnose` uses at most a quarter of the images in one.
_FEW_BATCHES = 5
# A loader counts as using only one CPU if it uses at least the first number of CPUs, and fewer than the second.
_ONE_CPU = (0.8, 1.3)


class _Rules:
    """An iterable of recommendations. Each private method yields the recommendations on one subject."""

    def __init__(self, verdict: Verdict, evidence: Evidence) -> None:
        self.verdict, self.evidence = verdict, evidence
        self.feed_limits = self.limits(*FEED)
        # If the number of GPUs is not known, assume that there is one.
        self.has_gpu = evidence.on_gpu or evidence.gpus != 0

    def __iter__(self) -> Iterator[Advice]:
        reads_limit = self.limits(Bottleneck.STORAGE)
        if reads_limit or self.verdict.first_epoch is not None:
            yield from (replace(one, first_epoch=not reads_limit) for one in self._reads(reads_limit))
        for rules in (self._decoding, self._transform, self._batches, self._copy, self._parallelism, self._device):
            yield from rules()

    def limits(self, *names: Bottleneck) -> bool:
        """Return whether any of `names` is among the bottlenecks of the verdict."""
        return not set(names).isdisjoint(self.verdict.bottlenecks)

    def make(self, remedy: Remedy, moves: bool = True, **values: Any) -> Advice:
        """Return an `Advice` for `remedy`, with `values` and the values that many templates need, such as `cpus`."""
        evidence = self.evidence
        units = "threads" if evidence.num_workers is None else "workers"
        parallel, cpus = evidence.parallel, evidence.cpus
        shared = {"units": units, "parameter": f"num_{units}", "parallel": parallel, "number": cpus}
        return Advice(remedy, moves, {**shared, "cpus": counted(cpus, "CPU"), **values})

    def _reads(self, limits: bool) -> Iterator[Advice]:
        evidence = self.evidence
        if evidence.parallel < evidence.cpus:
            yield self.make(Remedy.TRY_MORE_READS, limits)
        stored, order = evidence.rates(Stage.COLD_STORED), evidence.rates(Stage.COLD)
        if stored is not None and order is not None and stored.low > _SEEKS * order.high:
            yield self.make(Remedy.LARGER_CHUNKS, limits, stored=stored, order=order)
        if evidence.fits_cache and not limits:
            yield self.make(Remedy.READ_ONCE_BEFORE, False)
        yield self.make(Remedy.FASTER_DISK, limits)

    def _decoding(self) -> Iterator[Advice]:
        evidence, limits = self.evidence, self.limits(Bottleneck.DECODING)
        if evidence.full_shuffle and evidence.encoding is Encoding.CHUNKS:
            yield self.make(Remedy.SHUFFLE_WINDOWS, limits)
        if evidence.encoding is not None:
            words = evidence.encoding.value
            yield self.make(Remedy.DECODE_ONCE, limits, encoding=words[0].upper() + words[1:])
        elif evidence.library_reason is not None:
            yield self.make(Remedy.CONVERT_FOR_DIRECT_READS, limits, reason=evidence.library_reason)

    def _transform(self) -> Iterator[Advice]:
        evidence = self.evidence
        if not self.limits(Bottleneck.TRANSFORM):
            return
        if self.has_gpu:
            yield self.make(Remedy.TRANSFORM_ON_DEVICE)
        yield self.make(Remedy.CHEAPER_TRANSFORM)
        used_one = _ONE_CPU[0] <= (evidence.feed_cpus_used or 0.0) < _ONE_CPU[1]
        if evidence.transform_waits:
            yield self.make(Remedy.TRANSFORM_WAITS, busy=100 * (evidence.transform_busy_fraction or 0.0))
            if evidence.parallel < evidence.cpus:
                yield self.make(Remedy.TRANSFORM_IN_MORE_THREADS)
        elif evidence.num_workers is None and min(evidence.parallel, evidence.cpus) > 1 and used_one:
            yield self.make(Remedy.TRANSFORM_IN_PARALLEL)

    def _batches(self) -> Iterator[Advice]:
        evidence, half = self.evidence, self.evidence.half_batch_ratio
        rows, size = evidence.batch_rows or 0, evidence.loaded_row_bytes or 0
        step = evidence.rates(Stage.STEP)
        steady = step is None or step.is_steady
        may_grow = evidence.epoch_batches is None or evidence.epoch_batches > _FEW_BATCHES
        if may_grow and self.limits(Bottleneck.STEP) and half is not None and half < _OVERHEAD and steady:
            yield self.make(Remedy.LARGER_BATCH_FOR_STEP, half=100 * half)
        is_small = 0 < rows * size < _SMALL_BATCH_BYTES
        if may_grow and is_small and self.limits(Bottleneck.LOADER, Bottleneck.COPY):
            yield self.make(Remedy.LARGER_BATCH_FOR_LOADER, images=counted(rows, "image"), size=size)
        if evidence.stored_float and evidence.loaded_float:
            yield self.make(Remedy.STORE_UINT8, self.limits(Bottleneck.COPY, *FEED - {Bottleneck.DECODING}), size=size)
        elif evidence.loaded_float and self.has_gpu:
            limits = self.limits(Bottleneck.COPY, Bottleneck.LOADER, Bottleneck.TRANSFORM)
            yield self.make(
                Remedy.UINT8_BATCHES, limits, size=size, times=size / max(1, evidence.stored_row_bytes or 1)
            )

    def _copy(self) -> Iterator[Advice]:
        if self.evidence.pinned is None and self.limits(Bottleneck.COPY):
            yield self.make(Remedy.CHEAPER_COPY)
        elif self.evidence.on_gpu and not self.evidence.pinned:
            yield self.make(Remedy.PIN_MEMORY, self.limits(Bottleneck.COPY, Bottleneck.LOADER))

    def _parallelism(self) -> Iterator[Advice]:
        evidence = self.evidence
        if evidence.num_threads is None and evidence.num_workers is None:
            yield self.make(Remedy.READ_IN_WORKERS, self.limits(Bottleneck.LOADER))
        elif evidence.num_workers == 0:
            yield self.make(Remedy.START_WORKERS, self.feed_limits)
        # If the threads mostly wait, more threads than CPUs are useful, so do not compare these two numbers.
        elif not self.limits(Bottleneck.STORAGE) and not (
            self.limits(Bottleneck.TRANSFORM) and evidence.transform_waits
        ):
            yield from self._number_of_threads()
        if evidence.num_workers and self.feed_limits and not evidence.stages:
            yield self.make(Remedy.USE_H5LOADER)

    def _number_of_threads(self) -> Iterator[Advice]:
        evidence = self.evidence
        if evidence.parallel > evidence.cpus:
            # A step on the CPU needs the same CPUs, so fewer threads help even if the step is the bottleneck.
            on_cpu = evidence.on_gpu is False or not self.has_gpu
            yield self.make(Remedy.LOWER_PARALLELISM, self.feed_limits or on_cpu)
        elif not (evidence.feed_is_busy and self.limits(*FEED - {Bottleneck.STORAGE})):
            return
        elif evidence.parallel < evidence.cpus:
            yield self.make(Remedy.RAISE_PARALLELISM)
        elif (evidence.machine_cpus or 0) > evidence.cpus:
            yield self.make(Remedy.MORE_CPUS, machine_cpus=evidence.machine_cpus)

    def _device(self) -> Iterator[Advice]:
        evidence, step_limits = self.evidence, self.limits(Bottleneck.STEP)
        if evidence.synchronizations:
            where = f", first at {evidence.synchronized_at}" if evidence.synchronized_at else ""
            moves = step_limits or self.verdict.outcome is Outcome.CONTENTION
            yield self.make(Remedy.AVOID_SYNCHRONIZATION, moves, times=evidence.synchronizations, where=where)
        idle = evidence.idle_gpus
        if idle and evidence.world_size == 1:
            yield self.make(Remedy.USE_IDLE_GPUS, step_limits, others=counted(idle, "idle GPU"), gpus=idle + 1)
        threads = threads_advice(evidence)
        if threads is not None and threads.moves:
            yield threads
        if not (step_limits or self.limits(Bottleneck.NORMALIZE)):
            return
        if step_limits and evidence.builtin_step:
            yield self.make(Remedy.OWN_MODEL, False)
        elif evidence.on_gpu:
            yield self.make(Remedy.FASTER_STEP)
        elif self.has_gpu:
            yield self.make(Remedy.USE_GPU if step_limits else Remedy.NORMALIZE_ON_GPU)
        else:
            yield self.make(Remedy.LESS_ARITHMETIC)
