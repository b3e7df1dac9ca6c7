"""Prefetching: a thread fetches batches, which are copied to a CUDA device before the training step requests them.

The consumer is the code that iterates over the batches, usually the training loop. A `PrefetchThread` fetches batches
from the loader and prepares them (pins their memory). When the consumer requests a batch, `DevicePrefetcher` *launches*
the prepared batches, up to ``prefetch_factor`` more than the requested one, and delivers the batch that was launched
first. A launch only queues the copy and the transform on the device, so the consumer has to wait only if no batch is
ready. Launches run in the consumer's thread, so this thread's modes (no_grad, autocast) and profiler apply to them.

If the loader or a launch fails, the batches before the error are delivered first, and then the error is raised.

The thread holds no reference to its consumer. An iterator that the user drops is therefore garbage-collected, and the
iterator's finalizer stops the thread. Garbage collection may run in any thread while any lock is held, so `stop` must
not take a lock.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from h5pack.data.iteration import BackgroundThreads
from h5pack.device.batch import ImageTransform, map_tensors, tensors_of
from h5pack.device.loader_wrapper import BatchFetcher, FetchedBatch
from h5pack.device.profiling import profiler_range
from h5pack.errors import LoaderError


@dataclass
class EndOfBatches:
    """The queue entry after the last batch. `error` is what ended the iteration: StopIteration if nothing failed."""

    error: BaseException


class PrefetchThread(BackgroundThreads):
    """A thread that fetches batches and queues them; at most `max_batches` are being fetched or waiting for `get`.

    The thread calls `enter` before the first fetch. It calls `prepare` with each batch, and queues the result.
    """

    def __init__(
        self, fetcher: BatchFetcher, enter: Callable[[], None], prepare: Callable[[Any], Any], max_batches: int
    ) -> None:
        super().__init__()
        self.stopping = False
        self._fetcher, self._enter, self._prepare = fetcher, enter, prepare
        self._credits: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._batches: queue.SimpleQueue[FetchedBatch | EndOfBatches] = queue.SimpleQueue()
        for _ in range(max_batches):
            self._credits.put(None)
        self.start(feed=self._run)

    def get(self, *, seconds: float | None) -> FetchedBatch | EndOfBatches | None:
        """Return the next batch or the end marker; None if none comes within `seconds` (no limit if that is None)."""
        self.require_own_process("feed")
        try:
            item = self._batches.get(timeout=seconds)
        except queue.Empty:
            return None
        self._credits.put(None)
        return item

    def stop(self) -> None:
        """Stop the thread once it has fetched its current batch. This takes no lock, so finalizers may call it."""
        self.stopping = True
        self._credits.put(None)
        self._batches.put(EndOfBatches(LoaderError("the iterator was closed while its next batch was awaited")))

    def _run(self) -> None:
        try:
            self._enter()
            while True:
                self._credits.get()
                if self.stopping:
                    break
                fetched = self._fetcher.fetch()
                fetched.batch = self._prepare(fetched.batch)
                self._batches.put(fetched)
                # Without this, the variable would keep the batch in memory while the thread waits.
                del fetched
        except StopIteration:
            self._batches.put(EndOfBatches(StopIteration()))
        except BaseException as error:
            # Remove this frame from the traceback. The frame refers to the queue that will hold the error, so it would
            # close a reference cycle that includes the loader. A DataLoader that is garbage-collected as part of a
            # cycle waits 5 seconds for each of its workers.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            self._batches.put(EndOfBatches(error))
        finally:
            self._fetcher.close()
            # An error's frames refer to their callers, including this frame, which would keep `self` alive.
            del self


class DevicePrefetcher(Iterator[FetchedBatch]):
    """An iterator over batches that are copied and transformed before the consumer requests them.

    Besides the delivered batch, up to `prefetch_factor` batches are launched (their copy and transform are queued on
    the device), and as many more wait in host memory.
    """

    def __init__(self, fetcher: BatchFetcher, copier: CudaCopier, prefetch_factor: int) -> None:
        self.thread = PrefetchThread(fetcher, copier.enter, copier.prepare, prefetch_factor)
        self._copier, self._prefetch_factor = copier, prefetch_factor
        self._launched: deque[tuple[FetchedBatch, Any]] = deque()
        self._end: BaseException | None = None
        self._finalizer = self.thread.stop_with(self)

    def __next__(self) -> FetchedBatch:
        while self._end is None and len(self._launched) <= self._prefetch_factor:
            if not self._launch_one():
                break
        if not self._launched:
            assert self._end is not None
            try:
                raise self._end
            finally:
                # The error's traceback refers to this frame and so to `self`. Keeping the error would be a cycle.
                self._end = StopIteration()
        fetched, launched = self._launched.popleft()
        fetched.batch = self._copier.receive(launched)
        return fetched

    def close(self) -> None:
        """Stop fetching, and drop the batches that were launched but not delivered."""
        self._end = self._end or StopIteration()
        self._launched.clear()
        self.thread.stop()
        self._finalizer.detach()

    def _launch_one(self) -> bool:
        """Launch the next batch, or record the end. Return False if it is not ready, but others are launched."""
        if self._launched:
            item = self.thread.get(seconds=0.0)
        else:
            with profiler_range("read"):
                item = self.thread.get(seconds=None)
        if item is None:
            return False
        if isinstance(item, EndOfBatches):
            self._end = item.error
        else:
            batch, item.batch = item.batch, None
            try:
                self._launched.append((item, self._copier.launch(batch, item.epoch)))
            except Exception as error:
                self._end = error
        if self._end is not None:
            self.thread.stop()
        return True


@dataclass
class _QueuedBatch:
    """A batch, and an event after the device work that is queued for the batch (None if no work is queued)."""

    batch: Any
    done: torch.cuda.Event | None


class CudaCopier:
    """A copier that moves batches to a device and transforms them there, on its own CUDA stream.

    The host never waits for the device. torch's allocator of pinned memory reuses host memory only after the copies
    from it are done. Device memory is allocated on the copier's stream. `record_stream` is called for the consumer's
    stream, so that the memory is not reused before the consumer's work on it is done. `device` must have an index.
    """

    def __init__(self, device: torch.device, transform: ImageTransform | None) -> None:
        self.device, self._transform = device, transform
        # All epochs use the same stream, because the allocator keeps a separate pool of memory for each stream.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Make the copy stream wait for work queued on the consumer's stream, such as creating transform constants."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def enter(self) -> None:
        """Set the current CUDA device. The prefetch thread calls this first."""
        torch.cuda.set_device(self.device)

    def prepare(self, batch: Any) -> _QueuedBatch:
        """Copy the batch's tensors in pageable memory to pinned memory. The prefetch thread calls this."""
        pinned = map_tensors(batch, _pin)
        done = None
        if any(tensor.device == self.device for tensor in tensors_of(pinned)):
            # The loader made tensors on the device, and the device may not have finished them.
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self.device))
        return _QueuedBatch(pinned, done)

    def launch(self, prepared: _QueuedBatch, epoch: int) -> _QueuedBatch:
        """Queue the batch's copies and the transform on the copy stream."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if prepared.done is not None:
                self._stream.wait_event(prepared.done)
            with profiler_range("copy"):
                batch = map_tensors(prepared.batch, self._copy)
            if self._transform is not None:
                batch = self._transform(batch, epoch)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return _QueuedBatch(batch, done)

    def receive(self, launched: _QueuedBatch) -> Any:
        """Return the batch, after making the consumer's current stream wait for its copy and transform."""
        current = torch.cuda.current_stream(self.device)
        if launched.done is not None:
            current.wait_event(launched.done)
        for tensor in tensors_of(launched.batch):
            if tensor.device == self.device:
                tensor.record_stream(current)
        return launched.batch

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self.device:
            # The loader allocated this tensor on another stream. record_stream prevents the allocator from reusing its
            # memory before the copy stream's work on it is done.
            tensor.record_stream(self._stream)
            return tensor
        return tensor.to(self.device, non_blocking=True)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    pageable = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_pinned()
    return tensor.pin_memory() if pageable else tensor
