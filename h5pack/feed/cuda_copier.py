"""Batches to a CUDA device, beside the stream that the step runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from h5pack.feed.batch_parts import map_tensors, tensors_of
from h5pack.feed.image_transform import ImageTransform
from h5pack.feed.stage import stage


@dataclass
class _Prepared:
    """A batch whose host memory is pinned, and an event behind what the loader did on the device, if it did."""

    batch: Any
    ready: torch.cuda.Event | None


@dataclass
class _Launched:
    """A batch on its way, and an event behind the last work on it."""

    batch: Any
    done: torch.cuda.Event


class CudaCopier:
    """Copies batches to a device, and transforms them there, on a stream of its own.

    Host memory: torch's allocator of pinned memory keeps it until the copies out of it are done, and gives it again
    then, so its blocks go round. Device memory belongs to this stream; the consumer's streams are recorded on it, so
    that it is not given again before their work is done. Nothing here waits for the device.

    Parameters
    ----------
    device : torch.device
        With an index.
    transform : ImageTransform, optional
    """

    def __init__(self, device: torch.device, transform: ImageTransform | None) -> None:
        self.device, self._transform = device, transform
        # One stream for all epochs: the allocator keeps memory for each stream there is.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Have what is queued on the consumer's stream come first: a transform's own tensors may be made there."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def enter(self) -> None:
        """Begin in the reader's thread, which has a current device of its own."""
        torch.cuda.set_device(self.device)

    def prepare(self, batch: Any) -> Any:
        """Pin what is pageable, in the reader's thread."""
        prepared = map_tensors(batch, _pinned)
        ready = None
        if any(tensor.device == self.device for tensor in tensors_of(prepared)):
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self.device))
        return _Prepared(prepared, ready)

    def launch(self, prepared: _Prepared, epoch: int) -> _Launched:
        """Queue the copies and the transform."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if prepared.ready is not None:
                self._stream.wait_event(prepared.ready)
            with stage("copy"):
                batch = map_tensors(prepared.batch, self._copy)
            if self._transform is not None:
                batch = self._transform(batch, epoch)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return _Launched(batch, done)

    def receive(self, launched: _Launched) -> Any:
        """The batch, for the stream that is the consumer's current one now."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(launched.done)
        for tensor in tensors_of(launched.batch):
            if tensor.device == self.device:
                tensor.record_stream(current)
        return launched.batch

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self.device:
            # The loader made it on another stream, whose allocator must know of this one's work.
            tensor.record_stream(self._stream)
            return tensor
        return tensor.to(self.device, non_blocking=True)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return tensor.pin_memory() if plain and not tensor.is_pinned() else tensor
