"""The stages after the loader: copying to the device, normalizing, the training step, and all stages together.

The step runs the user's model, or a small built-in network.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from h5pack.data.dataset import H5Dataset
from h5pack.device.batch import images_of, map_tensors, tensors_of
from h5pack.device.copier import CudaOperations, DeviceCopier
from h5pack.device.feed import DeviceFeed
from h5pack.device.loader_wrapper import FetchedBatch
from h5pack.device.normalize import Normalize
from h5pack.doctor.measure import Meter, Repeat, measure_calls, measure_epochs
from h5pack.errors import H5PackError, OptionsError
from h5pack.monitor.monitor import FeedMonitor
from h5pack.monitor.probes import GpuProbe
from h5pack.system.parameters import parameter_names
from h5pack.system.text import error_line

Transform = Callable[[torch.Tensor], torch.Tensor]
Loss = Callable[[Any, Any], torch.Tensor]
Step = Callable[[torch.Tensor, "torch.Tensor | None"], Any]
# Maximum number of calls between synchronizations with a GPU. After each synchronization, the queue is empty, and the
# GPU is idle for about 20 us, which is as long as a short call takes.
_MAX_QUEUED_CALLS = 256
# Maximum number of queued copies to the GPU. Each holds device memory until the GPU has finished the copy.
_MAX_QUEUED_COPIES = 8
# Maximum number of tensors that `copies_beyond_cache` returns. Only small batches would need more to exceed the cache.
# For small batches the cache does not matter, because launching the kernel takes most of the time.
_MAX_COPIES = 16
_PREFETCH_FACTOR = 2
# Number of batches that a `DeviceFeed` prefetches for a GPU, including those that wait in host memory.
PREFETCHED_ON_GPU = 2 * _PREFETCH_FACTOR
_SYNCHRONIZED_STEPS = 4
_IDLE_PERCENT = 10
_MAX_CHANNELS = 4
# Number of outputs of the built-in network if the number of classes is unknown.
_DEFAULT_OUTPUTS = 10


def normalizer_for(dataset: H5Dataset, images: torch.Tensor, dtype: torch.dtype) -> tuple[Transform | None, str]:
    """Return the transform that converts `images` to `dtype`, and its description.

    If the images have this dtype already, return None and a text that says so.
    """
    if images.dtype == torch.uint8 and images.dim() == 4:
        if dataset.mean is not None and dataset.std is not None:
            by_statistics = Normalize.from_dataset(dataset, dtype=dtype)
            # If the user's transform has changed the number of channels, the file's statistics do not apply.
            with contextlib.suppress(OptionsError):
                by_statistics(images[:1])
                return by_statistics, "Normalize, with the mean and std of the file"
        for channels, axis in (("last", 3), ("first", 1)):
            if images.shape[axis] <= _MAX_CHANNELS:
                return Normalize(dtype=dtype, channels=channels), "Normalize, to 0..1"
    given, wanted = (str(one).removeprefix("torch.") for one in (images.dtype, dtype))
    if images.dtype == dtype:
        return None, f"the images are {wanted} already"
    return lambda raw: raw.to(dtype), f"conversion from {given} to {wanted}"


class DeviceStages:
    """The stages after the loader. All except the whole loop are measured repeatedly on one `batch` of the loader.

    `images` (normalized) and `labels` (None if there are none) are on the device, as the step receives them.
    """

    def __init__(self, device: torch.device, batch: Any, normalize: Transform | None) -> None:
        self._device = device
        self._batch = batch
        self._normalize = normalize
        self._meter = Meter(device)
        self._count = len(images_of(batch))
        # Detach the tensors. If the user's transform has trainable parameters, its results belong to an autograd graph,
        # and only one backward pass can use this graph.
        on_device = map_tensors(batch, lambda tensor: tensor.detach().to(device))
        raw = images_of(on_device)
        self.images = raw if normalize is None else normalize(raw)
        self.labels = labels_of(on_device)
        self._turns = itertools.cycle(copies_beyond_cache(raw, cache_bytes_of(device)))

    def copy(self, seconds: float) -> Repeat:
        """Measure copying the batch to a CUDA device as `DeviceFeed` does, through pinned memory."""
        copier = DeviceCopier(CudaOperations(self._device), None)
        return self._measure(
            lambda: copier.deliver(copier.copy(FetchedBatch(self._batch, 0, 0, 1, None))),
            seconds,
            self._count,
            _MAX_QUEUED_COPIES,
        )

    def normalize(self, seconds: float) -> Repeat:
        """Measure the conversion of the batch to floats on the device."""
        transform = self._normalize
        assert transform is not None
        return self._measure(lambda: transform(next(self._turns)), seconds, self._count)

    def step(self, step: Step, seconds: float, fraction: float = 1.0) -> Repeat:
        """Measure the step on the first `fraction` (above 0 and at most 1) of the batch's images."""
        count = max(1, int(fraction * self._count))
        images, labels = self.images[:count], None if self.labels is None else self.labels[:count]
        return self._measure(lambda: step(images, labels), seconds, count)

    def half_batch_ratio(self, step: Step, seconds: float) -> float | None:
        """Return images/s with half a batch divided by images/s with the whole batch; None for a single image."""
        if self._count < 2:
            return None
        # Return the highest of three ratios, so that noise does not make half a batch look slow.
        pairs = [(self.step(step, seconds / 6, 0.5).rate, self.step(step, seconds / 6).rate) for _ in range(3)]
        return max(half / whole for half, whole in pairs)

    def _measure(
        self, call: Callable[[], Any], seconds: float, images: int, max_queued_calls: int = _MAX_QUEUED_CALLS
    ) -> Repeat:
        on_gpu = self._device.type == "cuda"
        return measure_calls(call, images, seconds, self._meter, max_queued_calls, warm_up=on_gpu)

    def try_step(self, step: Step) -> None:
        """Run the step once, and wait until the device has finished it, so that its errors are raised here."""
        step(self.images, self.labels)
        self._meter.synchronize()

    def synchronizations(self, step: Step) -> tuple[float, str | None]:
        """Return how often a step makes the host wait for the CUDA device, and ``FILE:LINE`` of the first wait or None.

        ``FILE`` is a name without folders.
        """
        self._meter.synchronize()
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(_SYNCHRONIZED_STEPS):
                    step(self.images, self.labels)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        # PyTorch gives these warnings no category of their own, so they are recognized by their text.
        found = [warning for warning in caught if "called a synchroniz" in str(warning.message)]
        where = f"{os.path.basename(found[0].filename)}:{found[0].lineno}" if found else None
        return len(found) / _SYNCHRONIZED_STEPS, where

    def everything(
        self, loader: Any, step: Step, ready_images: Callable[[], int], prefetched: int
    ) -> Callable[[float], Repeat]:
        """Return a function that measures a whole training loop for a number of seconds.

        `ready_images` and `prefetched` are the parameters of `measure_epochs`, which measures the loop.
        """
        # The inner monitor measures the loader's batches, which are on the host, so it must not time a CUDA stream.
        quiet: dict[str, Any] = {"warn_stall": None, "profiler_ranges": False}
        inner = FeedMonitor(loader, device="cpu", name="doctor's loader", **quiet)
        feed = DeviceFeed(inner, self._device, transform=self._normalize, prefetch_factor=_PREFETCH_FACTOR)
        outer = FeedMonitor(feed, name="doctor", **quiet)
        meter = Meter(self._device, outer, inner)

        def consume(batch: Any) -> int:
            images = images_of(batch)
            step(images, labels_of(batch))
            return len(images)

        return partial(measure_epochs, outer, consume, prefetched=prefetched, meter=meter, ready_images=ready_images)


def cache_bytes_of(device: torch.device) -> int:
    """Return the size of a GPU's L2 cache in bytes, or 0 for other devices."""
    if device.type != "cuda":
        return 0
    # torch 2.4 does not report the size, so assume 64 MiB.
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)


def copies_beyond_cache(images: torch.Tensor, cache_bytes: int) -> list[torch.Tensor]:
    """Return `images` and up to 15 copies of it, until together they are at least twice as large as the device's cache.

    In training, every batch is new, so it is not in the cache. A single batch that is measured repeatedly would be in
    the cache.
    """
    count = min(_MAX_COPIES, max(1, math.ceil(2 * cache_bytes / max(1, images.nbytes))))
    return [images, *(images.clone() for _ in range(count - 1))]


def labels_of(batch: Any) -> torch.Tensor | None:
    """Return the second element of a batch if the batch is a list or tuple and the element is a tensor; else None."""
    parts = batch if isinstance(batch, (list, tuple)) else ()
    return parts[1] if len(parts) > 1 and isinstance(parts[1], torch.Tensor) else None


def idle_gpus(device: torch.device) -> int | None:
    """Return how many GPUs other than `device` are idle.

    None if there are no other GPUs, or if the use of one of them is unknown.
    """
    others = [torch.device("cuda", number) for number in range(torch.cuda.device_count()) if number != device.index]
    found = [GpuProbe(other).sample() for other in others]
    used = [None if status is None else status.utilization_percent for status in found]
    return None if not used or None in used else sum(percent < _IDLE_PERCENT for percent in used if percent is not None)


def name_of(function: Any) -> str:
    """Return MODULE:NAME for a function or class, and the name of the type for any other object."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}:{name}" if module and name else type(function).__name__


def make_step(
    model: Any, shape: tuple[int, ...], classes: int | None, device: torch.device, dtype: torch.dtype
) -> tuple[Step, str]:
    """Return a step that runs `model` for images of `shape`, and the step's description.

    Raise OptionsError if the factory `model` fails or returns an object of a wrong type, or if the module cannot be
    moved to `device`.
    """
    if model is None:
        network = _small_network(shape, classes or _DEFAULT_OUTPUTS)
        return ModuleStep(network, None, device, dtype), f"a small built-in network{_size_text(network)}"
    name, made = "" if isinstance(model, nn.Module) else name_of(model), model
    if name:
        try:
            # Do not pass an unknown number of classes, so that the factory's default applies.
            known = {"shape": shape, "classes": classes, "num_classes": classes, "device": device}
            named = parameter_names(model)
            made = model(**{key: value for key, value in known.items() if key in named and value is not None})
        except H5PackError:
            raise
        except Exception as error:
            # The user's code may raise any exception.
            raise OptionsError(f"the model {name} failed ({error_line(error)})") from error
    loss: Loss | None = None
    if isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
        made, loss = made
    if isinstance(made, nn.Module):
        text = f"a {type(made).__name__}{_size_text(made)}"
        try:
            return ModuleStep(made, loss, device, dtype), f"{name}, {text}" if name else text
        except Exception as error:
            # For example, the device may have too little memory.
            raise OptionsError(f"the model cannot be moved to {device} ({error_line(error)})") from error
    if callable(made):
        return made, f"{name}, which returned a step function"
    raise OptionsError(
        f"the model {name} returned an object of type {type(made).__name__}; it must return a torch module, a pair of "
        "a module and a loss, or a function of images and labels"
    )


class ModuleStep:
    """A training step of a module: forward, loss, backward, SGD with momentum.

    With a `dtype` other than float32, forward and loss run under autocast. If no parameter of the module is trainable,
    the step ends after the loss.

    The optimizer (with lr=0) updates copies of the weights, so that the step does all of the work, but not even
    infinite gradients change the weights. Buffers, such as statistics of batch normalization, change.

    The default loss is:

    - cross-entropy for outputs of shape (N, K) and one integer label per image;
    - binary cross-entropy for integer labels of the same shape as the outputs;
    - the mean of the squared outputs in all other cases.
    """

    def __init__(self, module: nn.Module, loss: Loss | None, device: torch.device, dtype: torch.dtype) -> None:
        self._module = module.to(device).train()
        self._loss = loss or default_loss
        self._autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)
        self._trains = any(parameter.requires_grad for parameter in module.parameters())
        self._optimizer: torch.optim.Optimizer | None = None

    def __call__(self, images: torch.Tensor, labels: torch.Tensor | None) -> None:
        with self._autocast():
            loss = self._loss(self._module(images), labels)
        if not self._trains:
            return
        if self._optimizer is None:
            # Make the optimizer after the first forward pass, in which lazy modules get the shapes of their parameters.
            trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            self._copies = [(parameter.detach().clone(), parameter) for parameter in trained]
            self._optimizer = torch.optim.SGD([copy for copy, _ in self._copies], lr=0.0, momentum=0.9)
        self._module.zero_grad(set_to_none=True)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        for copy, parameter in self._copies:
            copy.grad = parameter.grad
        self._optimizer.step()


def default_loss(output: Any, labels: torch.Tensor | None) -> torch.Tensor:
    """Return the default loss of `ModuleStep`, computed from the first tensor of `output`."""
    found = next(tensors_of(output), None)
    if found is None:
        raise TypeError(f"the module returned a {type(output).__name__} that holds no tensor; return a tensor")
    found = found.float()
    if labels is not None and labels.device == found.device and len(labels) == len(found):
        whole = not labels.dtype.is_floating_point
        if whole and labels.dim() == 1 and found.dim() == 2:
            # Clamp labels beyond the module's number of classes, so that the loss does not fail. -1 means no label.
            return F.cross_entropy(found, labels.long().clamp(-1, found.shape[1] - 1), ignore_index=-1)
        if labels.shape == found.shape and whole:
            return F.binary_cross_entropy_with_logits(found, labels.long().clamp(0, 1).float())
    return found.square().mean()


def _size_text(module: nn.Module) -> str:
    """Return " of N parameters"; "" if a lazy module has parameters without a shape."""
    parameters = list(module.parameters())
    if any(nn.parameter.is_lazy(parameter) for parameter in parameters):
        return ""
    return f" of {sum(parameter.numel() for parameter in parameters):,} parameters"


def _small_network(shape: tuple[int, ...], outputs: int) -> nn.Module:
    if len(shape) != 3:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.ReLU(), nn.Linear(64, outputs))
    network = nn.Sequential(
        nn.Conv2d(shape[0], 16, 7, stride=4, padding=3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, outputs),
    )
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return, unused-ignore]
