"""The stages after the loader: copying to the device, normalizing, the training step, and all stages together."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from h5pack.data.dataset import H5Dataset
from h5pack.device.batch import images_of, map_tensors
from h5pack.device.feed import DeviceFeed
from h5pack.device.normalize import Normalize
from h5pack.device.prefetch import CudaCopier
from h5pack.doctor.measure import Meter, Repeat, measure_calls, measure_epochs
from h5pack.doctor.step import Step
from h5pack.errors import OptionsError
from h5pack.monitor.monitor import FeedMonitor
from h5pack.monitor.probes import GpuProbe

Transform = Callable[[torch.Tensor], torch.Tensor]
# Maximum number of calls between synchronisations with a GPU, enough to hide the time that launching them takes.
_MAX_QUEUED_CALLS = 8
_PREFETCH_FACTOR = 2
# Number of batches that a `DeviceFeed` prefetches for a GPU, including those that wait in host memory.
PREFETCHED_ON_GPU = 2 * _PREFETCH_FACTOR
_SYNCHRONISED_STEPS = 4
_IDLE_PERCENT = 10
_MAX_CHANNELS = 4


class StallMeter(Meter):
    """A meter of two waiting times, each measured by a monitor.

    `step` measures how long the step waits for its batches. `loader` measures how long the loader's consumer waits.
    """

    def __init__(self, device: torch.device, step: FeedMonitor, loader: FeedMonitor) -> None:
        super().__init__(device)
        self._step, self._loader = step, loader
        self._stalled = self._starved = 0.0  # totals of earlier iterations, because a monitor restarts at 0

    def begin(self) -> None:
        """Add the last iteration's waits to the totals. Call this before the monitors begin a new iteration."""
        self._stalled, self._starved = self.stalled(), self.starved()

    def stalled(self) -> float:
        """Return for how many seconds the step has waited for its batches, in all iterations together."""
        return self._stalled + self._step.report().stall_seconds

    def starved(self) -> float:
        """Return for how many seconds the loader's consumer has waited, in all iterations together."""
        return self._starved + self._loader.report().wait_seconds


def normalizer_for(dataset: H5Dataset, images: torch.Tensor, dtype: torch.dtype) -> tuple[Transform | None, str]:
    """Return the transform that converts a loader's images to floats on the device, and its description.

    The transform is None if the images already have `dtype`.
    """
    if images.dtype == torch.uint8 and images.dim() == 4:
        found = _normalize(dataset, images, dtype)
        if found is not None:
            return found, f"Normalize, {'to 0..1' if found.channels else 'with the mean and std of the file'}"
    if images.dtype == dtype:
        return None, f"the images are {_dtype_name(dtype)} already"
    text = f"conversion from {_dtype_name(images.dtype)} to {_dtype_name(dtype)}"
    return lambda raw: raw.to(dtype), text


def _normalize(dataset: H5Dataset, images: torch.Tensor, dtype: torch.dtype) -> Normalize | None:
    """Return a `Normalize` for a four-dimensional uint8 batch, or None if no axis looks like channels."""
    if dataset.mean is not None and dataset.std is not None:
        by_statistics = Normalize.from_dataset(dataset, dtype=dtype)
        # If the user's transform has changed the number of channels, the file's statistics do not apply.
        with contextlib.suppress(OptionsError):
            by_statistics(images[:1])
            return by_statistics
    for channels, axis in (("last", 3), ("first", 1)):
        if images.shape[axis] <= _MAX_CHANNELS:
            return Normalize(dtype=dtype, channels=channels)
    return None


class DeviceStages:
    """The stages after the loader, measured repeatedly on one `batch` of the loader.

    `images` (normalized) and `labels` (None if there are none) are on the device, as the step receives them.
    """

    def __init__(self, device: torch.device, batch: Any, normalize: Transform | None) -> None:
        self._device = device
        self._batch = batch
        self._normalize = normalize
        self._meter = Meter(device)
        self._copier: CudaCopier | None = None
        self._count = len(images_of(batch))
        self._on_device = map_tensors(batch, lambda tensor: tensor.to(device))
        raw = images_of(self._on_device)
        self.images = raw if normalize is None else normalize(raw)
        self.labels = labels_of(self._on_device)

    def copy(self, seconds: float) -> Repeat:
        """Measure copying the batch to a CUDA device as `DeviceFeed` does, through pinned memory."""
        if self._copier is None:
            # All repeats share one copier. Each copier has a CUDA stream, for which the allocator keeps extra memory.
            self._copier = CudaCopier(self._device, None)
        copier = self._copier
        copier.begin()
        return self._measure(lambda: copier.receive(copier.launch(copier.prepare(self._batch), 0)), seconds)

    def normalize(self, seconds: float) -> Repeat:
        """Measure the conversion of the batch to floats on the device."""
        raw, transform = images_of(self._on_device), self._normalize
        assert transform is not None
        return self._measure(lambda: transform(raw), seconds)

    def step(self, step: Step, seconds: float, fraction: float = 1.0) -> Repeat:
        """Measure the step on the first images of the batch: on this fraction of them, above 0 to 1."""
        count = max(1, int(fraction * self._count))
        images, labels = self.images[:count], None if self.labels is None else self.labels[:count]
        return self._measure(lambda: step(images, labels), seconds, count)

    def _measure(self, call: Callable[[], Any], seconds: float, images: int | None = None) -> Repeat:
        return measure_calls(call, self._count if images is None else images, seconds, self._meter, _MAX_QUEUED_CALLS)

    def try_step(self, step: Step) -> None:
        """Run the step once, and wait until the device has finished it, so that its errors are raised here."""
        step(self.images, self.labels)
        self._meter.synchronize()

    def synchronisations(self, step: Step) -> tuple[float, str | None]:
        """Return how often a step makes the host wait for the CUDA device, and ``FILE:LINE`` of the first wait."""
        self._meter.synchronize()
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(_SYNCHRONISED_STEPS):
                    step(self.images, self.labels)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        # PyTorch gives these warnings no category of their own, so they are recognised by their text.
        found = [warning for warning in caught if "called a synchroniz" in str(warning.message)]
        where = f"{os.path.basename(found[0].filename)}:{found[0].lineno}" if found else None
        return len(found) / _SYNCHRONISED_STEPS, where

    def everything(
        self, loader: Any, step: Step, ready_images: Callable[[], int], prefetched: int
    ) -> Callable[[float], Repeat]:
        """Return a function that measures a whole training loop for a number of seconds; see `measure_epochs`."""
        # The inner monitor gets device="cpu" because it runs in the prefetching thread, which uses no CUDA stream.
        quiet: dict[str, Any] = {"warn_stall": None, "profiler_ranges": False}
        inner = FeedMonitor(loader, device="cpu", name="doctor's loader", **quiet)
        feed = DeviceFeed(inner, self._device, transform=self._normalize, prefetch_factor=_PREFETCH_FACTOR)
        outer = FeedMonitor(feed, name="doctor", **quiet)
        meter = StallMeter(self._device, outer, inner)

        def consume(batch: Any) -> int:
            images = images_of(batch)
            step(images, labels_of(batch))
            return len(images)

        def begin() -> Any:
            meter.begin()
            return iter(outer)

        return partial(measure_epochs, begin, consume, prefetched=prefetched, meter=meter, ready_images=ready_images)


def labels_of(batch: Any) -> torch.Tensor | None:
    """Return the second element of a batch if it is a tensor, else None."""
    parts = batch if isinstance(batch, (list, tuple)) else ()
    return parts[1] if len(parts) > 1 and isinstance(parts[1], torch.Tensor) else None


def describe_device(device: torch.device) -> str:
    """Return the device as text; for a CUDA device, with the name of the GPU."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def idle_gpus(device: torch.device) -> int | None:
    """Return how many GPUs other than `device` are idle; None if there are no others or their use is unknown."""
    others = [torch.device("cuda", number) for number in range(torch.cuda.device_count()) if number != device.index]
    found = [GpuProbe(other).sample() for other in others]
    used = [None if status is None else status.utilisation_percent for status in found]
    return None if not used or None in used else sum(percent < _IDLE_PERCENT for percent in used if percent is not None)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
