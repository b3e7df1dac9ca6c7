"""What is examined: the file, its loaders, the user's transform and model, and the stages that can be run on them."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from typing import Any

from h5pack.doctor.device_stages import (
    READ_AHEAD,
    DeviceStages,
    count_gpus,
    describe_device,
    dtype_of,
    idle_gpus,
    normalizer_for,
)
from h5pack.doctor.diagnosis import Subject
from h5pack.doctor.facts import Facts
from h5pack.doctor.feeding import Feeding, look_at
from h5pack.doctor.named_object import load_named, one_line
from h5pack.doctor.options import DoctorOptions
from h5pack.doctor.pacing import LOADER_BATCHES, Slice, epochs_slice
from h5pack.doctor.stage import COLD, COLD_STORED, COPY, EVERYTHING, HOT, LOADER, NORMALIZE, STEP, TRANSFORM
from h5pack.doctor.stage_run import NotMeasured, StageRun
from h5pack.doctor.storage_stages import ChunkReading, ready_share
from h5pack.doctor.training_step import Step, StepSetting, builtin_step, load_step
from h5pack.errors import OptionsError, PackFormatError
from h5pack.feed.batch_parts import images_of
from h5pack.feed.dataset import H5Dataset
from h5pack.feed.device_feed import resolve_device
from h5pack.feed.resident import ResidentRows
from h5pack.machine import available_cpus, available_memory
from h5pack.measure.page_state import PageState
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.encoded import holds_encoded

_FITS = 0.8
"""The part of the available memory up to which a file counts as staying there."""
_GOLDEN = 0.618
"""Steps of this part of the file begin each cold repeat somewhere else."""


class Patient:
    """What is examined.

    Parameters
    ----------
    options : DoctorOptions

    Attributes
    ----------
    device : torch.device
    dataset : H5Dataset
    failures : dict of str to str
        Of the user's own functions: stage, and what happened, in a line.
    reasons : dict of str to str
        Why stages cannot be measured.
    hot_rows : int
        The first so many rows of the split are those of the hot stages.

    Raises
    ------
    OptionsError
        If the device is not there, or an option makes no sense for it or for the file.
    PackFormatError
        If the file, a dataset or the split is not there, or holds no rows.
    """

    def __init__(self, options: DoctorOptions) -> None:
        self._options = options
        self.device = resolve_device(options.device)
        if self.device.type not in ("cpu", "cuda"):
            raise OptionsError(f"device {options.device!r} cannot be measured; give 'cpu' or 'cuda'")
        self.on_gpu = self.device.type == "cuda"
        if options.pin and not self.on_gpu:
            raise OptionsError("pinned memory is for a GPU, and the device is the CPU; leave --pin out")
        self.pin = self.on_gpu if options.pin is None else options.pin
        self.dataset = H5Dataset(options.path, options.split, images=options.images, labels=options.labels)
        if not len(self.dataset):
            where = f"split {options.split!r}" if options.split is not None else repr(options.images)
            raise PackFormatError(f"{self.dataset.path}: {where} has no rows; there is nothing to measure")
        self.index: ChunkIndex = self.dataset.engine.indexes[self.dataset.names[0]]
        self.failures: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.feeding = Feeding(options, self.dataset, self._load_transform(), self.pin)
        self.reading = ChunkReading(self.dataset)
        self.hot_rows = len(self.dataset)
        self.fits_cache = self._stored_bytes() <= _FITS * available_memory()
        self._pages = PageState(self.dataset)
        self._step: Step | None = None
        self._stages: DeviceStages | None = None
        self._sample: Any = None
        self._step_text = self._normalize_text = "none"

    @property
    def transformed(self) -> bool:
        """Whether there is a transform of the user's, working or not."""
        return self._options.transform is not None

    @property
    def least_rows(self) -> int:
        """Rows of a window, which a loader reads before it gives the first batch, and of two batches."""
        rows = max(self._options.window * self.index.unit_rows, 2 * self._options.batch_size)
        return min(rows, len(self.dataset))

    def _load_transform(self) -> Callable[..., Any] | None:
        text = self._options.transform
        if text is None:
            return None
        try:
            found: Callable[..., Any] = load_named("--transform", text)
            return found
        except OptionsError as error:
            self.failures[TRANSFORM] = str(error)
            return None

    def warm(self, seconds: float) -> None:
        """Have rows in the page cache: as many as take so long, and those of a window."""
        self.hot_rows = max(self.reading.warm(seconds, self.least_rows), 1)

    def take_sample(self) -> None:
        """Take a batch out of a loader, with the user's transform, where that works."""
        self._sample = self._first()
        if self.feeding.transform is None:
            return
        try:
            transformed = self._first(transform=True)
            if not len(images_of(transformed)):
                raise OptionsError("it gave a batch without images")
            self._sample = transformed
        except Exception as error:
            # The user's code may fail with anything.
            what = "a batch" if self._options.workers is None else "an image"
            self.failures[TRANSFORM] = f"--transform {self._options.transform} failed on {what} ({one_line(error)})"
            self.feeding.transform = None

    def _first(self, *, transform: bool = False) -> Any:
        """The first batch of a loader."""
        loader = self.feeding.make(self.hot_rows, transform=transform)
        iterator = iter(loader)
        try:
            return next(iterator)
        finally:
            del iterator
            self.feeding.stop(loader)

    def make_step(self) -> None:
        """Make the step, and take it once."""
        options, dataset = self._options, self.dataset
        images = images_of(self._sample)
        normalize, self._normalize_text = normalizer_for(dataset, images, dtype_of(options.dtype))
        self._stages = stages = DeviceStages(self.device, self._sample, normalize)
        if normalize is None:
            self.reasons[NORMALIZE] = self._normalize_text.removeprefix("not needed, ")
        names = dataset.classes or dataset.columns
        setting = StepSetting(
            tuple(stages.images.shape[1:]), None if names is None else len(names), self.device, stages.images.dtype
        )
        try:
            step, self._step_text = (
                builtin_step(setting) if options.model is None else load_step(options.model, setting)
            )
            stages.try_step(step)
            self._step = step
        except OptionsError as error:
            self.failures[STEP] = str(error)
        except Exception as error:
            # The user's code may fail with anything.
            shape = "x".join(map(str, stages.images.shape))
            who = "the built-in step" if options.model is None else f"--model {options.model}"
            self.failures[STEP] = (
                f"{who} failed on a batch of {shape} {options.dtype} on {self.device} ({one_line(error)})"
            )

    def hot_runs(self) -> list[StageRun]:
        """The stages that are measured with the rows in the page cache."""
        some = f"{self.hot_rows:,} of {len(self.dataset):,} rows" if self.hot_rows < len(self.dataset) else None
        threads = max(1, self.feeding.parallel)
        runs = [
            StageRun(HOT, lambda seconds: self.reading.run(seconds, threads, self.hot_rows), note=some, warm=1),
            self.loader_run(LOADER, note=some),
        ]
        if not self.transformed:
            self.reasons[TRANSFORM] = "no --transform is given"
        elif TRANSFORM in self.failures:
            self.reasons[TRANSFORM] = "--transform failed"
        else:
            runs.append(self.loader_run(TRANSFORM, note=some))
        runs += self._device_runs()
        if self.fits_cache:
            runs += self._everything(self.hot_rows, None)
        return runs

    def cold_runs(self) -> list[StageRun]:
        """The stages that are measured with the file dropped from the page cache."""
        reason = self._pages.drop()
        if reason is not None:
            self.reasons[COLD_STORED] = self.reasons[COLD] = reason
            return [] if self.fits_cache else self._everything(None, None)
        turns = itertools.count()
        rows = len(self.dataset)

        def stored(seconds: float) -> Slice:
            return self.reading.run(seconds, 1, rows, begin=next(turns) * _GOLDEN % 1)

        runs = [StageRun(COLD_STORED, stored, self._drop), self.loader_run(COLD)]
        return runs if self.fits_cache else [*runs, *self._everything(None, self._drop)]

    def loader_run(self, key: str, parallel: int | None = None, note: str | None = None) -> StageRun:
        """A loader alone: of the hot rows, with the user's transform, or cold.

        Parameters
        ----------
        key : {"loader", "transform", "storage_cold"}
        parallel : int, optional
            Other threads or workers than the options say.
        note : str, optional
        """
        cold = key == COLD
        loader = self.feeding.make(None if cold else self.hot_rows, transform=key == TRANSFORM, parallel=parallel)
        lead, waiting = self.feeding.lead(loader), self.feeding.waiting(loader)

        def run(seconds: float) -> Slice:
            return epochs_slice(lambda: iter(loader), look_at, seconds, lead, waiting=waiting)

        return StageRun(key, run, self._drop if cold else None, note, int(key == LOADER), LOADER_BATCHES)

    def _device_runs(self) -> list[StageRun]:
        stages, step = self._stages, self._step
        assert stages is not None
        runs = []
        if self.on_gpu:
            runs.append(StageRun(COPY, stages.copy, warm=1))
        else:
            self.reasons[COPY] = "the step runs on the CPU" if count_gpus() else "there is no GPU"
        if NORMALIZE not in self.reasons:
            runs.append(StageRun(NORMALIZE, stages.normalize, note=None if self.on_gpu else "on the CPU", warm=1))
        if step is None:
            self.reasons[STEP] = "--model failed" if self._options.model is not None else "the built-in step failed"
        else:
            runs.append(StageRun(STEP, lambda seconds: stages.step(step, seconds), warm=1))
        return runs

    def _everything(self, rows: int | None, prepare: Callable[[], None] | None) -> list[StageRun]:
        stages, step = self._stages, self._step
        if TRANSFORM in self.failures or stages is None or step is None:
            self.reasons[EVERYTHING] = self.reasons[TRANSFORM if TRANSFORM in self.failures else STEP]
            return []
        loader = self.feeding.make(rows, transform=self.transformed)
        run = stages.everything(loader, step, self.feeding.waiting(loader))
        lead = self.feeding.lead(loader) + READ_AHEAD * self.on_gpu
        return [StageRun(EVERYTHING, lambda seconds: run(seconds, lead), prepare, batches=LOADER_BATCHES)]

    def _drop(self) -> None:
        reason = self._pages.drop()
        if reason is not None:
            raise NotMeasured(reason)

    def reading_share(self, seconds: float) -> float | None:
        """Of the time of a single thread that reads hot rows: the part in which it ran, 0 to 1."""
        self.reading.run(seconds, 1, self.hot_rows)
        return self.reading.share

    def transform_share(self, seconds: float) -> float | None:
        """The same of the user's transform; None where there is none that works."""
        transform = self.feeding.transform
        if transform is None:
            return None
        if self._options.workers is not None:
            dataset = self.feeding.transformed_dataset
            return ready_share(lambda: dataset[0], seconds)
        images = images_of(self._first())
        try:
            return ready_share(lambda: transform(images), seconds)
        except TypeError:
            # It takes a generator, too, which a loader gives it.
            return None

    def half_batch(self, seconds: float) -> float | None:
        """Images a second of the step with half the batch, over those with all of it."""
        stages, step = self._stages, self._step
        if stages is None or step is None or len(stages.images) < 2:
            return None
        pairs = [(stages.step(step, seconds / 6, 0.5).rate, stages.step(step, seconds / 6).rate) for _ in range(3)]
        return sorted(half / whole for half, whole in pairs)[1]

    def synchronisations(self) -> tuple[float | None, str | None]:
        """How often a step waits for the GPU, and where; None where that cannot be told."""
        if self._stages is None or self._step is None or not self.on_gpu:
            return None, None
        return self._stages.synchronisations(self._step)

    def facts(self, found: dict[str, Any]) -> Facts:
        """What is known besides the figures; `found` holds what was measured of it."""
        rows, index = len(self.dataset), self.index
        images = images_of(self._sample)
        batch = min(self._options.batch_size, rows)
        epoch_rows = self.hot_rows if self.fits_cache else rows
        encoding = None
        if holds_encoded(index):
            encoding = "encoded images are decoded"
        elif index.codec is not None:
            encoding = "compressed chunks are decoded" if index.codec.steps else "images cut by chunks are put together"
        stored = index.native_dtype.kind == "f"
        return Facts(
            cpus=available_cpus(),
            machine_cpus=os.cpu_count() or 1,
            workers=self._options.workers,
            threads=max(1, self.feeding.parallel),
            on_gpu=self.on_gpu,
            batch_rows=batch,
            epoch_batches=math.ceil(epoch_rows / batch),
            row_bytes=index.row_bytes,
            handed_bytes=images.nbytes // max(1, len(images)),
            handed_float=images.is_floating_point(),
            stored_float=stored,
            pinned=self.pin,
            encoding=encoding,
            library=None if holds_encoded(index) else index.reason,
            fits_cache=self.fits_cache,
            fits_resident=ResidentRows.bytes_needed(self.dataset, rows) <= available_memory() // 2,
            transformed=self.transformed,
            gpus=count_gpus() if self.on_gpu else 0,
            world_size=int(os.environ.get("WORLD_SIZE", "1") or 1),
            idle_gpus=idle_gpus(self.device) if self.on_gpu else None,
            **found,
        )

    def subject(self) -> Subject:
        """What it is, in words."""
        shape = "x".join(map(str, self.index.row_shape)) or "single"
        return Subject(
            path=self.dataset.path,
            split=self._options.split,
            images=f"{shape} {self.index.native_dtype}",
            rows=len(self.dataset),
            hot_rows=self.hot_rows,
            device=describe_device(self.device),
            step=self._step_text,
            labels=self._stages is not None and self._stages.labels is not None,
            normalize=self._normalize_text,
        )

    def close(self) -> None:
        """Stop the loaders, and close the file."""
        self.feeding.close()
        self.dataset.close()
        self.feeding.transformed_dataset.close()

    def _stored_bytes(self) -> int:
        """What the split takes in the file."""
        index, rows = self.index, len(self.dataset)
        part = rows / max(1, index.rows)
        if holds_encoded(index) or index.reason is not None:
            return int(os.path.getsize(self.dataset.path) * part)
        if index.codec is not None and len(index.sizes):
            return int(index.sizes.clip(0).sum() * part)
        return rows * index.row_bytes
