"""Prefetching: a thread fetches batches, which are copied to a CUDA device before the training step requests them.

The consumer is the code that iterates over the batches, usually the training loop. A `PrefetchThread` fetches batches
from the loader and queues their copies to the device: at most ``prefetch_factor`` batches more than the consumer has
requested. When the consumer requests a batch, `DevicePrefetcher` queues the transforms of all batches whose copies are
queued, and delivers the next batch. So the consumer waits only if the loader has no batch ready, or if the device is
far behind (see below). Transforms are called in the consumer's thread, so the modes (no_grad, autocast) and the
profiler of this thread apply to them.

The host may queue many training steps before the device has done them, but the batches of these steps need memory.
Therefore batch n is fetched only when the device has finished the step of batch n - ``prefetch_factor`` - 2.

If fetching, copying or transforming a batch fails, all earlier batches are delivered before the error is raised.

The prefetch thread does not refer to its consumer. So an iterator that the user drops is garbage-collected, and the
iterator's finalizer stops the thread. Garbage collection may run in any thread while any lock is held, so `stop` must
not take a lock.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from h5pack.data.iteration import BackgroundThreads
from h5pack.device.copier import DeviceCopier, QueuedBatch
from h5pack.device.loader_wrapper import BatchFetcher, FetchedBatch
from h5pack.device.profiling import profiler_range
from h5pack.errors import LoaderError


class PrefetchThread(BackgroundThreads):
    """A thread that fetches batches and queues them for `get`.

    It fetches `credits` batches at first, and then one more for each call of `release`. It calls `enter` before the
    first fetch. It calls `prepare` with each batch, and queues the result. After the last batch, it queues the
    exception that ended the iteration: StopIteration if nothing failed. It stops when `owner` is garbage-collected.
    """

    def __init__(
        self,
        fetcher: BatchFetcher,
        enter: Callable[[], None],
        prepare: Callable[[FetchedBatch], Any],
        credits: int,
        owner: object,
    ) -> None:
        super().__init__()
        self.stopping = False
        self._fetcher, self._enter, self._prepare = fetcher, enter, prepare
        self._credits: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._batches: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(credits):
            self._credits.put(None)
        self.start(owner, feed=self._run)

    def get(self, *, seconds: float | None) -> Any:
        """Return the next batch or the final exception; None if neither comes within `seconds`.

        If `seconds` is None, wait as long as necessary.
        """
        self.require_own_process("feed")
        try:
            return self._batches.get(timeout=seconds)
        except queue.Empty:
            return None

    def release(self, event: Any = None) -> None:
        """Let the thread fetch one more batch. It first waits until the device has reached `event`, if given."""
        self._credits.put(event)

    def stop(self) -> None:
        """Stop the thread once it has fetched its current batch. `stop` takes no lock, so finalizers may call it."""
        self.stopping = True
        self._credits.put(None)
        self._batches.put(
            LoaderError(
                "the loader was closed, or began a new iteration; use its newest iterator, or begin another iteration"
            )
        )

    def _run(self) -> None:
        try:
            self._enter()
            while True:
                event = self._credits.get()
                if self.stopping:
                    break
                if event is not None:
                    event.synchronize()
                self._batches.put(self._prepare(self._fetcher.fetch()))
        except StopIteration:
            self._batches.put(StopIteration())
        except BaseException as error:
            # Remove this frame from the traceback. The frame refers to the queue that will hold the error, so it would
            # close a reference cycle that includes the loader. A DataLoader that is garbage-collected as part of a
            # cycle waits 5 seconds for each of its workers.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            self._batches.put(error)
        finally:
            self._fetcher.close()
            # An error's frames refer to their callers, including this frame, which would keep `self` alive.
            del self


class DevicePrefetcher(Iterator[FetchedBatch]):
    """An iterator over batches that are copied and transformed before the consumer requests them.

    Besides the delivered batch, up to `prefetch_factor` batches are on the device. Until the device has finished the
    previous step, it also holds the batch of the previous step.
    """

    def __init__(self, fetcher: BatchFetcher, copier: DeviceCopier, prefetch_factor: int) -> None:
        self.thread = PrefetchThread(fetcher, copier.enter, copier.copy, prefetch_factor, owner=self)
        self._copier, self._prefetch_factor = copier, prefetch_factor
        self._launched: deque[QueuedBatch] = deque()
        self._consumed: Any = None
        self._delivered = False
        self._end: BaseException | None = None

    def __next__(self) -> FetchedBatch:
        # Call n delivers batch n. Call n - 1 recorded the event `_consumed`, which follows the step of batch n - 2. By
        # now, the step of batch n - 1 is queued, too, and the event recorded below follows it.
        self.thread.release(self._consumed)
        self._consumed = self._copier.consumed() if self._delivered else None
        while self._end is None and len(self._launched) <= self._prefetch_factor:
            if not self._launch_one():
                break
        if not self._launched:
            assert self._end is not None
            try:
                raise self._end
            finally:
                # The error's traceback refers to this frame and `self`. Keeping the error would be a reference cycle.
                self._end = StopIteration()
        self._delivered = True
        return self._copier.deliver(self._launched.popleft())

    def close(self) -> None:
        """Stop fetching, and drop the batches that were copied but not delivered."""
        self._end = self._end or StopIteration()
        self._launched.clear()
        self._copier.join_streams()
        self.thread.stop()
        self.thread.finalizer.detach()

    def _launch_one(self) -> bool:
        """Queue the next batch's transform, or record the end of the batches, and return True.

        Return False if no batch is ready, but an earlier one can be delivered. If none can be delivered, wait.
        """
        if self._launched:
            item = self.thread.get(seconds=0.0)
        else:
            with profiler_range("read"):
                item = self.thread.get(seconds=None)
        if item is None:
            return False
        if isinstance(item, BaseException):
            self._end = item
        else:
            try:
                self._launched.append(self._copier.transform(item))
            except Exception as error:
                self._end = error
        if self._end is not None:
            self.thread.stop()
        return True
