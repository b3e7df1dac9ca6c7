"""Copying batches to a CUDA device and transforming them there, on separate CUDA streams.

Each batch passes through three streams. The *copy stream* copies it from pinned memory. The *transform stream* waits
for the copy and transforms it. The *consumer's stream* (the one that is current when the batch is requested) waits for
both, and then runs the training step.

torch's allocator may give the memory of a freed tensor to the next tensor of the same stream at once, even if another
stream is still using it. So `record_stream` must be called for each further stream that uses a tensor. The allocator
then reuses the tensor's memory only when that stream has finished the work that was queued when the tensor was freed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from h5pack.data.samples import can_join
from h5pack.data.selection import distributed_ranks
from h5pack.device.batch import images_of, map_tensors, named_elements, repeats_of, tensors_of
from h5pack.device.loader_wrapper import FetchedBatch
from h5pack.device.profiling import profiler_range
from h5pack.device.transforms import ImageTransform
from h5pack.errors import LoaderError
from h5pack.order.permutation import derive_key


class CudaOperations:
    """The CUDA operations of a `DeviceCopier`. Tests replace them with a simulation. `device` must have an index."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copy_stream, self.transform_stream = _streams(device)

    def enter(self) -> None:
        """Make the device the current one in this thread."""
        torch.cuda.set_device(self.device)

    def current_stream(self) -> Any:
        """Return the current stream of this thread."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager in which a stream and its device are the current ones."""
        return torch.cuda.stream(stream)

    def event(self, stream: Any) -> Any:
        """Record an event on a stream and return it. A thread that waits for it sleeps instead of using a CPU."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a strided CPU tensor as a dense tensor in pinned memory. Return tensors on other devices unchanged."""
        if tensor.device.type != "cpu":
            return tensor
        if not _is_dense(tensor):
            # Copying a tensor with gaps or overlaps to the device would first make a dense copy in pageable memory.
            tensor = tensor.contiguous()
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device; the copy is queued on the current stream."""
        return tensor.to(self.device, non_blocking=True)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Prevent the allocator from reusing the tensor's memory before the stream's work on it is done."""
        tensor.record_stream(stream)


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    """Return the copy stream and the transform stream of a device.

    All feeds of the process share them, because the allocator keeps memory for each stream that was ever used. The
    transform stream has priority, because the training step would otherwise delay the next batch.
    """
    stream: Any = torch.cuda.Stream
    return stream(device), stream(device, priority=-1)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's values fill its memory without gaps or overlaps, in one of torch's memory formats."""
    if tensor.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])


@dataclass
class QueuedBatch:
    """A batch whose copy or transform is queued on the device. `done` is the event recorded after that work."""

    fetched: FetchedBatch
    done: Any


class DeviceCopier:
    """Moves the batches of one iteration to a device and transforms them there.

    The prefetch thread calls `enter` and `copy`; the consumer's thread calls the other methods.

    With `keep_images`, the repeats of a batch of an `EchoLoader` share one copy of their images on the device. The
    first transform must not change this copy in place. So `keep_images` only has an effect if the first transform is a
    `Normalize`, or `Views` whose transforms are all `Normalize`.
    """

    def __init__(self, operations: CudaOperations, transform: ImageTransform | None, keep_images: bool = False) -> None:
        self._operations, self._transform = operations, transform
        self.enter = operations.enter
        self._keeps_images = keep_images and transform is not None and transform.replaces_images
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        # Make the transform stream wait for the consumer's stream, which may still be computing tensors that the
        # transform uses.
        operations.transform_stream.wait_stream(operations.current_stream())
        self.join_streams()

    def copy(self, fetched: FetchedBatch) -> QueuedBatch:
        """Queue the copies of a batch's tensors. Tensors in pageable memory are first copied to pinned memory."""
        operations, stream = self._operations, self._operations.copy_stream
        if any(self._is_here(tensor) for tensor in tensors_of(fetched.batch)):
            # Make the copy stream wait for tensors that the loader made on the device, because the device may not have
            # finished them.
            stream.wait_event(operations.event(operations.current_stream()))
        images = images_of(fetched.batch, self._transform.image_key) if self._keeps_images and self._transform else None
        if not repeats_of(fetched.batch):
            # Drop the copy of earlier images: the loader may have written this batch's images into the same tensor.
            self._kept = None
        with operations.on(stream), profiler_range("copy"):
            # `joined` contains the copies by the `id` of the original tensor. A mapping may make new tensors on each
            # access. Keep them in a list: if one of them were freed, a later tensor could get the same `id`.
            elements = [element for _, element in named_elements(fetched.batch).values()]
            joined = self._joined_copies(elements)
            fetched.batch = map_tensors(
                fetched.batch, lambda one: joined[id(one)] if id(one) in joined else self._copied(images, one)
            )
            return QueuedBatch(fetched, operations.event(stream))

    def transform(self, queued: QueuedBatch) -> QueuedBatch:
        """Queue the transform of a batch."""
        if self._transform is None:
            return queued
        operations, stream, fetched = self._operations, self._operations.transform_stream, queued.fetched
        with operations.on(stream):
            stream.wait_event(queued.done)
            for tensor in self._tensors_here(fetched.batch):
                operations.record_stream(tensor, stream)
            fetched.batch = apply_transform(self._transform, fetched, operations.device)
            return QueuedBatch(fetched, operations.event(stream))

    def deliver(self, queued: QueuedBatch) -> FetchedBatch:
        """Return the batch, after making the consumer's current stream wait for its copy and transform."""
        operations, fetched = self._operations, queued.fetched
        stream = operations.current_stream()
        stream.wait_event(queued.done)
        for tensor in self._tensors_here(fetched.batch):
            operations.record_stream(tensor, stream)
        if not all(_is_strided(tensor) for tensor in tensors_of(fetched.batch)):
            # `record_stream` does not support sparse tensors, so they are copied here, on the consumer's stream.
            with outside_inference_mode():
                fetched.batch = map_tensors(
                    fetched.batch, lambda tensor: tensor if _is_strided(tensor) else tensor.to(operations.device)
                )
        return fetched

    def consumed(self) -> Any:
        """Record an event after all work that the consumer has queued so far, and return the event."""
        return self._operations.event(self._operations.current_stream())

    def join_streams(self) -> None:
        """Make the consumer's current stream wait for all transforms.

        Transforms may use tensors, such as weights, that the consumer frees when the iteration has ended.
        """
        self._operations.current_stream().wait_stream(self._operations.transform_stream)

    def _copied(self, images: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
        if self._is_here(tensor) or not _is_strided(tensor):
            return tensor
        if tensor is not images:
            return self._operations.copy(self._operations.pin(tensor))
        if self._kept is None or self._kept[0] is not tensor:
            self._kept = tensor, self._operations.copy(self._operations.pin(tensor))
        return self._kept[1]

    def _joined_copies(self, elements: list[Any]) -> dict[int, torch.Tensor]:
        """Queue one copy operation for each list in `elements` whose tensors can be joined.

        Return the copy of each tensor by the `id` of the original tensor. Copying a single small tensor takes as long
        as copying all tensors of a list at once.
        """
        copies: dict[int, torch.Tensor] = {}
        for element in elements:
            if isinstance(element, list) and len(element) > 1 and can_join(element) and not self._is_here(element[0]):
                joined = self._operations.copy(self._operations.pin(torch.cat(element)))
                copies.update(zip(map(id, element), torch.split(joined, list(map(len, element))), strict=True))
        return copies

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._operations.device

    def _tensors_here(self, batch: Any) -> Iterator[torch.Tensor]:
        return (tensor for tensor in tensors_of(batch) if self._is_here(tensor) and _is_strided(tensor))


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def apply_transform(transform: ImageTransform, fetched: FetchedBatch, device: torch.device) -> Any:
    """Return the transformed batch. The result does not depend on when the batch was requested.

    The transform runs outside of inference mode, because the consumer may be in this mode during prefetching, but no
    longer when it uses the batch. If the transform may draw from torch's generators (``transform.draws``), they are
    seeded during the call, from torch's seed, the epoch, the batch's number and the rank. Without seeding, the
    result would depend on how many numbers the training step has drawn before.
    """
    seeded = _seeded(device, fetched.epoch, fetched.number) if transform.draws else contextlib.nullcontext()
    with outside_inference_mode(), seeded:
        try:
            return transform(fetched.batch, fetched.epoch, fetched.number)
        except StopIteration as error:
            # Raising the StopIteration itself would look like the regular end of the epoch.
            raise LoaderError(
                "a transform raised StopIteration; make it raise another error, or return its result"
            ) from error


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """If inference mode is on, turn it off in the context, but do not record gradients there."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def _seeded(device: torch.device, epoch: int, number: int) -> Iterator[None]:
    """Seed torch's generators of the CPU and of a CUDA `device` in the context, and restore their states afterwards."""
    rank, _ = distributed_ranks() or (0, 1)
    seed = derive_key(torch.initial_seed(), epoch, number, rank) >> 1
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
