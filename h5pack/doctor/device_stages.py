"""What happens behind the loader: the copy, normalising, the step, and everything together."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from h5pack.doctor.pacing import NoMeter, Slice, calls_slice, epochs_slice
from h5pack.doctor.training_step import Step
from h5pack.errors import OptionsError
from h5pack.feed.batch_parts import images_of, map_tensors
from h5pack.feed.cuda_copier import CudaCopier
from h5pack.feed.dataset import H5Dataset
from h5pack.feed.device_feed import DeviceFeed
from h5pack.feed.feed_monitor import FeedMonitor
from h5pack.feed.gpu_probe import GpuIdentity, GpuProbe
from h5pack.feed.normalize import Normalize

Transform = Callable[[torch.Tensor], torch.Tensor]
_TOGETHER = 8
"""Calls between waits for a GPU: so many hide the launch."""
_DEPTH = 2
READ_AHEAD = 2 * _DEPTH
"""Batches that a `DeviceFeed` holds on a GPU and before it."""
_SYNCHRONISED_STEPS = 4
_IDLE_PERCENT = 10
_MOST_CHANNELS = 4


class DeviceMeter(NoMeter):
    """Waits for a device.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        """Wait until it has done what it was told."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class StallMeter(DeviceMeter):
    """Counts, besides, how long a step waited for its batches, and how long the loader was waited for.

    Parameters
    ----------
    device : torch.device
    step : FeedMonitor
        Around everything that feeds the step.
    loader : FeedMonitor
        Around the loader.
    """

    def __init__(self, device: torch.device, step: FeedMonitor, loader: FeedMonitor) -> None:
        super().__init__(device)
        self._monitors = (step, loader)
        # A monitor counts from 0 in each iteration.
        self._earlier, self._taken = [0.0, 0.0], [0.0, 0.0]

    def begin(self) -> None:
        """An iteration of the monitors is about to begin."""
        for place in range(2):
            self._earlier[place] += self._taken[place]
            self._taken[place] = 0.0

    def stalled(self) -> float:
        """Seconds in which the step waited, of all iterations."""
        self._taken[0] = self._monitors[0].report().stall_seconds
        return self._earlier[0] + self._taken[0]

    def starved(self) -> float:
        """Seconds in which the loader was waited for, of all iterations."""
        self._taken[1] = self._monitors[1].report().wait_seconds
        return self._earlier[1] + self._taken[1]

    def epoch_over(self) -> None:
        """Take the epoch's counts."""
        self.stalled()
        self.starved()


def normalizer_for(dataset: H5Dataset, images: torch.Tensor, dtype: torch.dtype) -> tuple[Transform | None, str]:
    """What makes floats of a batch's images on the device, and what that is in words.

    Parameters
    ----------
    dataset : H5Dataset
        Whose statistics count.
    images : Tensor
        A batch of the loader's.
    dtype : torch.dtype
    """
    if images.dtype == torch.uint8 and images.dim() == 4:
        found = _normalize(dataset, images, dtype)
        if found is not None:
            return found, f"Normalize, {'to 0..1' if found.channels else 'by the statistics of the file'}"
    if images.dtype == dtype:
        return None, f"not needed, the images are {_named(dtype)} already"
    return Cast(dtype), f"a conversion of {_named(images.dtype)} to {_named(dtype)}"


def _normalize(dataset: H5Dataset, images: torch.Tensor, dtype: torch.dtype) -> Normalize | None:
    """What suits images of uint8 on four axes; None where no axis looks like channels."""
    if dataset.mean is not None and dataset.std is not None:
        by_statistics = Normalize.from_dataset(dataset, dtype=dtype)
        # A transform may have given the images other channels.
        with contextlib.suppress(OptionsError):
            by_statistics(images[:1])
            return by_statistics
    for channels, axis in (("last", 3), ("first", 1)):
        if images.shape[axis] <= _MOST_CHANNELS:
            return Normalize(dtype=dtype, channels=channels)
    return None


class Cast:
    """Images of another dtype.

    Parameters
    ----------
    dtype : torch.dtype
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """The images, converted."""
        return images.to(self._dtype)


class DeviceStages:
    """The stages behind the loader.

    Parameters
    ----------
    device : torch.device
    batch : Any
        One of the loader's, on the host.
    normalize : callable or None
    """

    def __init__(self, device: torch.device, batch: Any, normalize: Transform | None) -> None:
        self._device = device
        self._batch = batch
        self._normalize = normalize
        self._meter = DeviceMeter(device)
        self._copier: CudaCopier | None = None
        self._count = len(images_of(batch))
        self._there = map_tensors(batch, lambda tensor: tensor.to(device))
        raw = images_of(self._there)
        self.images = raw if normalize is None else normalize(raw)
        """As the step gets them."""
        self.labels = labels_of(self._there)

    def copy(self, seconds: float) -> Slice:
        """Copy the batch to a CUDA device, as `DeviceFeed` does: from pinned memory, into which it is brought first."""
        if self._copier is None:
            # One for all repeats: the allocator keeps memory for each stream there is.
            self._copier = CudaCopier(self._device, None)
        copier = self._copier
        copier.begin()

        def call() -> int:
            copier.receive(copier.launch(copier.prepare(self._batch), 0))
            return self._count

        return calls_slice(call, seconds, self._meter, _TOGETHER)

    def normalize(self, seconds: float) -> Slice:
        """Make floats of the batch on the device."""
        raw, transform = images_of(self._there), self._normalize
        assert transform is not None

        def call() -> int:
            transform(raw)
            return self._count

        return calls_slice(call, seconds, self._meter, _TOGETHER)

    def step(self, step: Step, seconds: float, part: float = 1.0) -> Slice:
        """Take the step on the batch, or on the first part of it, as often as time allows."""
        count = max(1, int(part * self._count))
        images, labels = self.images[:count], None if self.labels is None else self.labels[:count]

        def call() -> int:
            step(images, labels)
            return count

        return calls_slice(call, seconds, self._meter, _TOGETHER)

    def try_step(self, step: Step) -> None:
        """Take the step once, and wait for it."""
        step(self.images, self.labels)
        self._meter.settle()

    def synchronisations(self, step: Step) -> tuple[float, str | None]:
        """How often a step waits for the CUDA device, and where the first time."""
        self._meter.settle()
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(_SYNCHRONISED_STEPS):
                    step(self.images, self.labels)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        found = [warning for warning in caught if "called a synchroniz" in str(warning.message)]
        where = f"{os.path.basename(found[0].filename)}:{found[0].lineno}" if found else None
        return len(found) / _SYNCHRONISED_STEPS, where

    def everything(self, loader: Any, step: Step, waiting: Callable[[], int]) -> Callable[[float, int], Slice]:
        """The loop of a training over a loader, to be run for some seconds; the first `lead` batches warm it up.

        Parameters
        ----------
        loader : iterable
        step : callable
        waiting : callable
            Tells how many images wait ready in the loader.
        """
        # The inner one watches from the thread that reads ahead, which is nobody's stream.
        inner = FeedMonitor(loader, warn_stall=None, labels=False, device="cpu", name="doctor's loader")
        feed = DeviceFeed(inner, self._device, transform=self._normalize, depth=_DEPTH)
        outer = FeedMonitor(feed, warn_stall=None, labels=False, name="doctor")
        meter = StallMeter(self._device, outer, inner)

        def consume(batch: Any) -> int:
            images = images_of(batch)
            step(images, labels_of(batch))
            return len(images)

        def begin() -> Any:
            meter.begin()
            return iter(outer)

        def run(seconds: float, lead: int) -> Slice:
            return epochs_slice(begin, consume, seconds, lead, meter, waiting)

        return run


def labels_of(batch: Any) -> torch.Tensor | None:
    """The second part of a batch, where that is a tensor."""
    parts = batch if isinstance(batch, (list, tuple)) else ()
    return parts[1] if len(parts) > 1 and isinstance(parts[1], torch.Tensor) else None


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name of `DTYPES`."""
    found: torch.dtype = getattr(torch, name)
    return found


def describe_device(device: torch.device) -> str:
    """A device in words."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def count_gpus() -> int:
    """GPUs that torch sees."""
    return torch.cuda.device_count()


def idle_gpus(device: torch.device) -> int | None:
    """How many of the other GPUs that torch sees do nothing; None where the driver does not say, or there are none."""
    if torch.cuda.device_count() < 2:
        return None
    idle = 0
    for number in range(torch.cuda.device_count()):
        if number == device.index:
            continue
        status = GpuProbe(GpuIdentity.of(torch.device("cuda", number))).sample()
        if status is None or status.utilisation_percent is None:
            return None
        idle += status.utilisation_percent < _IDLE_PERCENT
    return idle


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
