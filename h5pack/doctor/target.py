"""The target of a diagnosis: the file, the user's transform and model, and the stages to measure."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from h5pack.benchmark.ceilings import PageState, touch
from h5pack.benchmark.loader_settings import limited_batch_size
from h5pack.data.dataset import H5Dataset
from h5pack.device.batch import batch_size_and_bytes, images_of, map_tensors, tensors_of
from h5pack.device.feed import resolve_device
from h5pack.doctor.device_stages import (
    PREFETCHED_ON_GPU,
    DeviceStages,
    Step,
    Transform,
    idle_gpus,
    labels_of,
    make_step,
    name_of,
    normalizer_for,
)
from h5pack.doctor.loaders import DiagnoseSettings, HostLoaders
from h5pack.doctor.measure import ChunkReader, NotMeasured, Repeat, StageRun, busy_fraction, measure_epochs
from h5pack.doctor.report import TargetSummary
from h5pack.errors import H5PackError, OptionsError, PackFormatError
from h5pack.images.crops import RandomResizedCrop
from h5pack.inspect.info import faults_of
from h5pack.monitor.bottleneck import Encoding, Evidence, Stage
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.encoded import EncodedIndex
from h5pack.read.virtual_index import VirtualIndex
from h5pack.system.machine import available_cpus, available_memory
from h5pack.system.parameters import launched_number
from h5pack.system.processes import reporting_start_errors
from h5pack.system.text import error_line, short_repr

# A file larger than this fraction of the available memory is assumed not to stay in the page cache.
_CACHED_FRACTION = 0.8
# Each repeat of COLD_STORED starts this fraction of all rows after the start of the previous one, and continues at row
# 0 after the last row. This fraction (the golden ratio) spreads the starts evenly.
_GOLDEN = 0.618
# Numbers of images from which the time for a whole batch is estimated.
_FEW_IMAGES = (8, 64)
_TRIAL_SECONDS, _MAX_TRIALS = 0.1, 5
_CROP_SIZE = 224


def touch_batch(batch: Any) -> int:
    """Read every page of a batch in host memory, as a copy to a device would; return the number of images."""
    for tensor in tensors_of(batch):
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
            touch(tensor.view(-1).view(torch.uint8).numpy())
    return batch_size_and_bytes(batch)[0] or 0


def _first_rows(batch: Any, rows: int) -> Any:
    """Return a batch with only the first `rows` rows of the tensors that have one row per image."""
    count = len(images_of(batch))
    return map_tensors(batch, lambda tensor: tensor[:rows] if tensor.dim() and len(tensor) == count else tensor)


class Target:
    """The file, loaders, device and step of a diagnosis.

    - `failures` maps a stage to its error in one line. Most of these errors come from the user's code.
    - `reasons` maps a stage to the reason why it is not measured.
    - `reader` reads rows for the stages without a loader.
    - `hot_rows`: the stages that read from the page cache read the first `hot_rows` rows of the split.
    - `fits_cache` is true if the page cache can hold the whole split.

    Raises OptionsError and PackFormatError as `diagnose` does.
    """

    def __init__(self, settings: DiagnoseSettings) -> None:
        self._settings = settings
        self.device = resolve_device(settings.device)
        if self.device.type not in ("cpu", "cuda"):
            text = f"device {str(settings.device)!r} cannot be measured; give 'cpu' or 'cuda'"
            raise OptionsError(text, parameters=("device",))
        self.on_gpu = self.device.type == "cuda"
        self.has_transform = settings.transform is not None
        if settings.pin_memory and not self.on_gpu:
            text = "pin_memory=True needs a GPU, but the step runs on the CPU; leave out pin_memory=True"
            raise OptionsError(text, parameters=("pin_memory=True",))
        self._pinned = self.on_gpu if settings.pin_memory is None else settings.pin_memory
        self.dataset = H5Dataset(settings.path, settings.split, images=settings.images, labels=settings.labels)
        if not len(self.dataset):
            where = f"split {settings.split!r}" if settings.split is not None else repr(settings.images)
            text = f"{self.dataset.path}: {where} has no rows to measure; name another split or dataset"
            raise PackFormatError(text, path=self.dataset.path, dataset=settings.images)
        self.batch_size = limited_batch_size(settings.batch_size, len(self.dataset))
        self.index: ChunkIndex = self.dataset.engine.indexes[self.dataset.names[0]]
        if isinstance(self.index, EncodedIndex) and not self.index.has_one_size:
            # The images of a batch must have one size. So decode random crops, as most trainings do.
            self.dataset = self.dataset.with_decode(RandomResizedCrop(_CROP_SIZE), exact=True)
        self.failures: dict[Stage, str] = {}
        self.reasons: dict[Stage, str] = {}
        self.loaders = HostLoaders(self.dataset, replace(settings, batch_size=self.batch_size), self._pinned)
        self.reader = ChunkReader(self.dataset)
        self.hot_rows = len(self.dataset)
        self.fits_cache = self._stored_bytes() <= _CACHED_FRACTION * available_memory()
        self._pages = PageState(self.dataset)
        self.step: Step | None = None
        self._normalize: Transform | None = None
        self.stages: DeviceStages  # set by `make_step`
        self._sample: Any = None
        self._step_text = self._normalize_text = "none"

    def warm(self, seconds: float) -> None:
        """Read rows into the page cache for about `seconds`, and set `hot_rows` to the number of rows read.

        Read at least one shuffle window and at least two batches (or all rows), even if that takes longer.
        """
        min_rows = max(self._settings.window * self.index.group_rows, 2 * self.batch_size)
        self.hot_rows = self.reader.warm(seconds, min(min_rows, len(self.dataset)))

    def load_sample(self) -> None:
        """Load one batch, with the user's transform if that works."""
        self._sample = self._first_batch()
        if self.loaders.transform is None:
            return
        try:
            transformed = self._first_batch(transform=True)
            try:
                count = len(images_of(transformed))
            except (OptionsError, TypeError) as error:  # no tensor, or one without axes
                found = transformed[0] if isinstance(transformed, tuple) else transformed
                raise TypeError(f"the batch holds {short_repr(found)} instead of a tensor of images") from error
            if not count:
                raise ValueError("it returned a batch without images")
            self._sample = transformed
        except Exception as error:
            # The user's code may raise any exception.
            what = "a batch" if self._settings.num_workers is None else "an image"
            name = name_of(self.loaders.transform)
            text = f"the transform {name} failed on {what}"
            self.record_failure(Stage.TRANSFORM, error, text, "the transform failed")
            self.loaders.transform = None

    def record_failure(self, stage: Stage, error: Exception, what: str, reason: str | None = None) -> None:
        """Record that a stage failed because of `error`.

        In `failures`, record the text `what` with the error in parentheses, or only the error if it is an H5PackError.
        In `reasons`, record `reason`, by default the error.
        """
        line = error_line(error)
        self.failures[stage] = line if isinstance(error, H5PackError) else f"{what} ({line})"
        self.reasons[stage] = reason or line

    def _first_batch(self, *, transform: bool = False) -> Any:
        loader = self.loaders.make(self.hot_rows, transform=transform)
        with reporting_start_errors():
            iterator = iter(loader)
        try:
            return next(iterator)
        finally:
            del iterator
            self.loaders.stop(loader)

    def make_step(self) -> None:
        """Make the step, and run it once on a few images; a failure is recorded in `failures`."""
        settings, dataset = self._settings, self.dataset
        images = images_of(self._sample)
        normalize, self._normalize_text = normalizer_for(dataset, images, getattr(torch, settings.dtype))
        if normalize is None:
            self.reasons[Stage.NORMALIZE] = self._normalize_text
            self._normalize_text = f"not needed, {self._normalize_text}"
        self._normalize = normalize
        self.stages = DeviceStages(self.device, _first_rows(self._sample, _FEW_IMAGES[0]), normalize)
        names = dataset.classes or dataset.columns
        shape, classes = tuple(self.stages.images.shape[1:]), None if names is None else len(names)

        def make() -> None:
            dtype = self.stages.images.dtype
            self.step, self._step_text = make_step(settings.model, shape, classes, self.device, dtype)
            self.stages.try_step(self.step)

        self._try(make)

    def batch_seconds(self) -> Iterator[tuple[float, float]]:
        """Estimate from a few images how long the device needs for a batch; yield (minimum, probable) seconds.

        With these estimates, a batch that takes too long need not be started. Yield nothing for a batch of at most 8
        images, or for a GPU: its first calls are slow, and a few images may take as long as a batch.
        """
        whole, images, earlier = len(images_of(self._sample)), 0, 0.0
        for count in () if self.on_gpu else (few for few in _FEW_IMAGES if few < whole):
            if count > len(self.stages.images):
                self.stages = DeviceStages(self.device, _first_rows(self._sample, count), self._normalize)
            # Use the shortest of several calls, because the first is slow, and other processes may disturb any of them.
            ended, found = time.perf_counter() + _TRIAL_SECONDS, list[float]()
            while len(found) < 2 or (len(found) < _MAX_TRIALS and time.perf_counter() < ended):
                if not self._try(lambda: found.append(self._device_seconds())):  # noqa: B023
                    return
            seconds = min(found)
            probably = max(seconds, seconds + (seconds - earlier) / (count - images) * (whole - count))
            yield probably if images else seconds, probably
            images, earlier = count, seconds

    def _device_seconds(self) -> float:
        begun = time.perf_counter()
        if self._normalize is not None:
            self.stages.normalize(0.0)
        if self.step is not None:
            self.stages.step(self.step, 0.0)
        return time.perf_counter() - begun

    def use_whole_batch(self) -> None:
        """Run the step once on a whole batch, and use this batch from now on. If the step fails, record the failure.

        Raise OptionsError if the batch does not fit on the device.
        """
        try:
            self.stages = DeviceStages(self.device, self._sample, self._normalize)
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            what = f"a batch of {len(images_of(self._sample))} images does not fit on {self.device}"
            text = f"{what} ({error_line(error)}); give a smaller batch_size"
            raise OptionsError(text, parameters=("batch_size",)) from error
        step = self.step
        if step is not None:
            self._try(lambda: self.stages.try_step(step))

    def _try(self, call: Callable[[], None]) -> bool:
        """Call `call`, which makes or runs the step. If it fails, record the failure, use no step, and return False."""
        try:
            call()
            return True
        except Exception as error:
            # The user's code may raise any exception.
            self.step, model = None, self._settings.model
            size = "x".join(map(str, self.stages.images.shape))
            who, name = ("built-in step", "") if model is None else ("model", f" {name_of(model)}")
            what = f"the {who}{name} failed on a batch of {size} {self._settings.dtype} on {self.device}"
            self.record_failure(Stage.STEP, error, what, f"the {who} failed")
            return False

    def hot_runs(self) -> list[StageRun]:
        """Return the stages to measure with rows in the page cache; record in `reasons` why others are missing."""
        some = f"{self.hot_rows:,} of {len(self.dataset):,} rows" if self.hot_rows < len(self.dataset) else None
        how = "read by system calls, but H5Loader may copy rows from a memory map" if self.index.raw else None
        how = "; ".join(filter(None, (some, how))) or None
        read = partial(self.reader.run, num_threads=max(1, self.loaders.parallel), rows=self.hot_rows)
        runs = [StageRun(Stage.HOT, read, note=how), self._loader_run(Stage.LOADER, note=some)]
        if not self.has_transform:
            self.reasons[Stage.TRANSFORM] = "there is no transform"
        elif Stage.TRANSFORM not in self.failures:
            runs.append(self._loader_run(Stage.TRANSFORM, note=some))
        runs += self._device_runs()
        if self.fits_cache:
            runs += self.loop(self.hot_rows)
        return runs

    def cold_runs(self) -> list[StageRun]:
        """Return the stages that are measured after the file has been dropped from the page cache.

        They include the whole loop if the file is too large for the page cache.
        """
        try:
            self._drop()
        except NotMeasured as error:
            self.reasons[Stage.COLD_STORED] = self.reasons[Stage.COLD] = str(error)
            return [] if self.fits_cache else self.loop()
        turns, rows = itertools.count(), len(self.dataset)

        def stored(seconds: float) -> Repeat:
            # Read each row only once, because the page cache holds it afterwards.
            return self.reader.run(seconds, 1, rows, begin=next(turns) * _GOLDEN % 1, once=True)

        runs = [StageRun(Stage.COLD_STORED, stored, self._drop), self._loader_run(Stage.COLD)]
        return runs if self.fits_cache else [*runs, *self.loop(cold=True)]

    def _loader_run(self, stage: Stage, note: str | None = None) -> StageRun:
        """Return the run of a stage that measures a loader alone: LOADER, TRANSFORM or COLD."""
        cold = stage is Stage.COLD
        loader = self.loaders.make(None if cold else self.hot_rows, transform=stage is Stage.TRANSFORM)
        prefetched, ready = self.loaders.prefetch_of(loader)
        run = partial(measure_epochs, loader, touch_batch, prefetched=prefetched, ready_images=ready, once=cold)
        return StageRun(stage, run, partial(self._drop, loader) if cold else None, note)

    def _device_runs(self) -> list[StageRun]:
        stages, step, runs = self.stages, self.step, []
        if self.on_gpu:
            runs.append(StageRun(Stage.COPY, stages.copy))
        else:
            self.reasons[Stage.COPY] = "the step runs on the CPU" if torch.cuda.device_count() else "there is no GPU"
        if Stage.NORMALIZE not in self.reasons:
            note = None if self.on_gpu else "on the CPU"
            runs.append(StageRun(Stage.NORMALIZE, stages.normalize, note=note))
        if step is not None:
            runs.append(StageRun(Stage.STEP, partial(stages.step, step)))
        return runs

    def loop(self, rows: int | None = None, *, cold: bool = False) -> list[StageRun]:
        """Return a list of one stage, the training loop over the first `rows` rows (None: all); [] if it cannot run."""
        step, transform_failed = self.step, Stage.TRANSFORM in self.failures
        if step is None or transform_failed:
            self.reasons[Stage.EVERYTHING] = self.reasons[Stage.TRANSFORM if transform_failed else Stage.STEP]
            return []
        loader = self.loaders.make(rows, transform=self.has_transform)
        prefetched, ready = self.loaders.prefetch_of(loader)
        run = self.stages.everything(loader, step, ready, prefetched + PREFETCHED_ON_GPU * self.on_gpu)
        return [StageRun(Stage.EVERYTHING, run, partial(self._drop, loader) if cold else None)]

    def _drop(self, loader: Any = None) -> None:
        """Drop the file from the page cache; then start the workers of `loader`, if it is a DataLoader."""
        # Memory mappings of the file, such as those of workers, would keep its pages in the page cache.
        self.loaders.release_file()
        reason = self._pages.drop()
        if reason is not None:
            raise NotMeasured(reason)
        if loader is not None:
            self.loaders.start_workers(loader)

    def transform_busy_fraction(self, seconds: float) -> float | None:
        """Return the `busy_fraction` of the transform in this thread.

        With a DataLoader, this includes reading an image. None if there is no transform, or if it requires a generator.
        """
        transform = self.loaders.transform
        if transform is None:
            return None
        if self._settings.num_workers is not None:
            dataset = self.loaders.transformed_dataset
            return busy_fraction(lambda: dataset[0], seconds)
        images = images_of(self._first_batch())
        try:
            return busy_fraction(lambda: transform(images), seconds)
        except TypeError:
            # The transform may require the parameter `generator`, which only a loader passes.
            return None

    def evidence(self, **measured: Any) -> Evidence:
        """Return the `Evidence` for a verdict: the `measured` fields, and the facts about the target."""
        index, rows, images = self.index, len(self.dataset), images_of(self._sample)
        num_workers = self._settings.num_workers
        return Evidence(
            cpus=available_cpus(),
            machine_cpus=os.cpu_count() or 1,
            num_threads=self.loaders.parallel if num_workers is None else None,
            num_workers=num_workers,
            on_gpu=self.on_gpu,
            step_threads=torch.get_num_threads(),
            builtin_step=self._settings.model is None,
            batch_rows=self.batch_size,
            stored_row_bytes=index.row_bytes,
            loaded_row_bytes=images.nbytes // max(1, len(images)),
            stored_float=index.native_dtype.kind == "f",
            loaded_float=images.is_floating_point(),
            pinned=self._pinned,
            encoding=None if self.loaders.decodes_once else Encoding.of(index),
            library_reason=None if index.is_encoded else index.library_text,
            fits_cache=self.fits_cache,
            has_transform=self.has_transform,
            gpus=torch.cuda.device_count(),
            idle_gpus=idle_gpus(self.device) if self.on_gpu else None,
            epoch_batches=-(-rows // self.batch_size),
            world_size=launched_number("WORLD_SIZE", 1),
            **measured,
        )

    def describe(self) -> TargetSummary:
        """Return the target's description for the report."""
        asked, shape = self._settings.batch_size, self.dataset.row_shape(self.dataset.names[0])
        crop = "" if self.dataset.decoder is None else f", RandomResizedCrop({_CROP_SIZE}) of images of several sizes"
        return TargetSummary(
            path=self.dataset.path,
            split=self._settings.split,
            images=f"{'x'.join(map(str, shape)) or 'single'} {self.index.native_dtype}{crop}",
            rows=len(self.dataset),
            hot_rows=self.hot_rows,
            device=f"{self.device} ({torch.cuda.get_device_name(self.device)})" if self.on_gpu else str(self.device),
            step=self._step_text,
            labels=labels_of(self._sample) is not None,
            image_dataset=self.dataset.names[0],
            label_dataset=self.dataset.label_name,
            normalize=self._normalize_text,
            faults=faults_of(self.dataset.path, self.dataset.names[0]),
            asked_batch_size=asked if self.batch_size < asked else None,
        )

    def close(self) -> None:
        """Stop the loaders, and close the file."""
        self.loaders.close()
        self.dataset.close()

    def _stored_bytes(self) -> int:
        """Return approximately how many bytes the rows of the split take in the file."""
        index, rows = self.index, len(self.dataset)
        fraction = rows / max(1, index.rows)
        if isinstance(index, EncodedIndex):
            return int((index.offsets[-1] - index.offsets[0]) * fraction)
        if index.library_reason is not None or isinstance(index, VirtualIndex):
            paths = {self.dataset.path, *(one.path for one in index.files)}
            return int(sum(map(os.path.getsize, paths)) * fraction)
        if index.codec is not None and len(index.sizes):
            return int(index.sizes.clip(0).sum() * fraction)
        return rows * index.row_bytes
