"""Threads that fill batches ahead of their consumer.

The protocol. An order comes in segments (`OrderPlan.segments`): rows that are read together, and their places in the
batches. A segment is *issued* when there is memory for every batch it touches: it is cut into tasks, each of which
fills some rows of some batches. A batch is *done* when no row of it is missing; it then goes to the consumer, who
brings the batches into order and returns a *credit* for each. Credits bound the batches that are open, or done but not
fetched; batches that the consumer holds are its own. As no later segment holds rows of a batch before an earlier
segment's first, credits for one segment's span, and one more, are enough never to stand still.

A planning thread computes the order, a few segments ahead, and has a cold disk begin with them. A reading thread takes
a task, or issues the next segment where there is none, or sleeps until something changes: a token in `_wake` says so.
Stopping is a flag and tokens. Both can be given inside the garbage collector, which may run in any thread, with any
lock held: nothing that it calls takes a lock.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import LoaderError
from h5pack.feed.buffers import BatchMemory, BufferPool
from h5pack.feed.dataset import H5Dataset
from h5pack.feed.filling import Filling, Span
from h5pack.feed.joined_segments import join_segments
from h5pack.feed.order import OrderPlan, Segment
from h5pack.feed.resident import ResidentRows
from h5pack.feed.segment_tasks import PlannedSegment, SegmentTasks, Task

_PLANNED = 2
"""Segments that are planned ahead."""

_JOINED_BYTES = 16 * 1024 * 1024
"""Shorter segments are read together, up to two tasks' worth. Measured on chunks of one row of 116 KB, one thread, in
windows of 16 chunks: 19,800 images/s by themselves, and 35,000 joined."""

_KEPT_AHEAD = 4
"""Batches gathered ahead out of memory, besides two for each thread."""

_live: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@dataclass
class _Waiting:
    """A segment whose chunks are still being loaded into memory."""

    loads: int
    tasks: list[Task]


class Pipeline:
    """One epoch on its way.

    Parameters
    ----------
    dataset : H5Dataset
    plan : OrderPlan
    epoch, first : int
        Which epoch, and the batch to begin with.
    pool : BufferPool
    threads : int
    credits : int
        Batches that are open, or done and not fetched, at most.
    finish : callable
        Called with a batch's number and memory once it is full; what it returns is the consumer's batch.
    resident : ResidentRows, optional
        Where the rows are kept, or will be.
    small : ResidentRows, optional
        Small parts that are in memory already.
    """

    def __init__(
        self,
        dataset: H5Dataset,
        plan: OrderPlan,
        epoch: int,
        first: int,
        pool: BufferPool,
        threads: int,
        credits: int,
        finish: Callable[[int, BatchMemory], Any],
        resident: ResidentRows | None = None,
        small: ResidentRows | None = None,
    ) -> None:
        self.process = os.getpid()
        self._plan, self._pool, self._resident, self._finish = plan, pool, resident, finish
        self._segments = join_segments(
            plan.segments(epoch, first),
            max(1, _JOINED_BYTES // max(1, sum(part.row_bytes for part in pool.parts))),
            plan.span,
        )
        self._planned: deque[PlannedSegment] = deque()
        self._planning = True
        self._granted, self._opened = 0, first
        self._filling = Filling()
        self._segment_tasks = SegmentTasks(dataset, pool.parts, self._filling, small, keep=plan.shuffle == "full")
        # Where all rows are in memory nothing is won by turning to a whole segment at once: then its batches are opened
        # one by one, so that few buffers go round, and those stay in the processor's cache. With several streams a
        # batch needs several segments.
        self._single = resident is not None and resident.complete and plan.step_streams * plan.lanes == 1
        if self._single:
            credits = min(credits, 2 * threads + _KEPT_AHEAD)
        self._shares: deque[tuple[Span, npt.NDArray[np.int64]]] = deque()
        self._tasks: deque[Task] = deque()
        self._loading: dict[int, list[_Waiting]] = {}
        self._stopping = False
        self._lock = threading.Lock()
        self._credits: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Any] | BaseException] = queue.SimpleQueue()
        self._rooms: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(credits):
            self._credits.put(None)
        for _ in range(_PLANNED):
            self._rooms.put(None)
        self._readers = threads
        works = {"plan": self._plan_ahead, **{f"read-{number}": self._work for number in range(threads)}}
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"h5pack-{name}", daemon=True)
            for name, work in works.items()
        ]
        _live.add(self)
        for thread in self._threads:
            thread.start()

    # The consumer's side.

    def fetch(self) -> tuple[int, Any]:
        """The next batch that is done, with its number, in whatever order they get done.

        Raises
        ------
        BaseException
            What a thread raised.
        """
        item = self._done.get()
        if isinstance(item, BaseException):
            try:
                raise item
            finally:
                # Its traceback knows this frame.
                del item
        return item

    @property
    def waiting(self) -> int:
        """Batches that are done, and not fetched."""
        return self._done.qsize()

    def return_credit(self) -> None:
        """Say that a batch was handed to the consumer."""
        self._credits.put(None)
        self._wake_one()

    def stop(self) -> None:
        """Have the threads end after the task each is at; safe inside the garbage collector."""
        self._stopping = True
        self._rooms.put(None)
        for _ in self._threads:
            self._wake.put(None)
        self._done.put(LoaderError("the iterator was closed while its next batch was awaited"))

    def join(self, seconds: float | None = None) -> None:
        """Wait until the threads have ended."""
        # One of them gets here from inside the garbage collector; the others may wait for what it holds.
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                # Ctrl-C may have come before all were started.
                if thread.ident is not None:
                    thread.join(seconds)

    # The threads' side.

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._done.put(error)
            self.stop()
        if self._stopping:
            # Tasks know the pipeline. Without them it dies with its last thread, and its memory with it.
            with self._lock:
                self._tasks.clear()
                self._loading.clear()

    def _plan_ahead(self) -> None:
        for segment in self._segments:
            planned = PlannedSegment(segment, {})
            if self._resident is None or self._resident.missing(segment.rows):
                planned = self._segment_tasks.plan(segment)
            self._rooms.get()
            if self._stopping:
                return
            self._planned.append(planned)
            self._wake_one()
        self._planning = False
        self._wake_one()

    def _work(self) -> None:
        while (task := self._next_task()) is not None:
            task()
            # A task holds memory; it must not outlive its batch while the thread sleeps.
            del task

    def _next_task(self) -> Task | None:
        while not self._stopping:
            with self._lock:
                # In this order: the planner clears the one after it has filled the other.
                over = not self._planning and not self._planned and not self._shares
                if not self._tasks and (self._planned or self._shares) and self._issue():
                    for _ in range(len(self._tasks) - 1):
                        self._wake_one()
                if self._tasks:
                    return self._tasks.popleft()
                if over and not self._loading:
                    break
            self._wake.get()
        # Whoever sleeps must see it, too.
        self._wake.put(None)
        return None

    def _wake_one(self) -> None:
        # With as many tokens as readers, every sleeper will look again after this.
        if self._wake.qsize() < self._readers:
            self._wake.put(None)

    def _issue(self) -> bool:
        """Turn the next segment, or the next shares of it, into tasks, if there is memory for their batches."""
        if self._single:
            return self._issue_shares()
        planned = self._planned[0]
        if not self._open(planned.segment.last):
            return False
        self._planned.popleft()
        self._rooms.put(None)
        if self._resident is None:
            self._tasks.extend(self._segment_tasks.read(planned, self._arrived))
        else:
            self._load_and_gather(planned.segment, self._resident)
        return True

    def _issue_shares(self) -> bool:
        """A task for each thread, if there is memory."""
        if not self._shares:
            segment = self._planned.popleft().segment
            self._rooms.put(None)
            self._shares.extend(segment.deal(segment.rows))
        assert self._resident is not None
        while self._shares and len(self._tasks) < self._readers and self._open(self._shares[0][0][0]):
            span, rows = self._shares.popleft()
            self._tasks.append(self._segment_tasks.gather_share(span, rows, self._resident, self._arrived))
        return bool(self._tasks)

    def _open(self, last: int) -> bool:
        """Open all batches up to `last`, if there are credits for them."""
        while self._granted < last + 1 - self._opened:
            try:
                self._credits.get_nowait()
            except queue.Empty:
                return False
            self._granted += 1
        for batch in range(self._opened, last + 1):
            rows = self._plan.batch_rows(batch)
            self._filling.open(batch, self._pool.take(rows), rows)
            self._granted -= 1
        self._opened = max(self._opened, last + 1)
        return True

    def _load_and_gather(self, segment: Segment, resident: ResidentRows) -> None:
        """Queue what loads a segment's chunks, where they are not in memory yet, and then gathers its batches."""
        gathers = self._segment_tasks.gather(segment, resident, self._arrived)
        missing = resident.missing(segment.rows)
        if not missing:
            self._tasks.extend(gathers)
            return
        waiting = _Waiting(len(missing), gathers)
        for chunk in missing:
            if chunk not in self._loading:
                self._loading[chunk] = []
                self._tasks.append(partial(self._load, chunk, resident))
            self._loading[chunk].append(waiting)

    def _load(self, chunk: int, resident: ResidentRows) -> None:
        resident.load(chunk)
        with self._lock:
            for waiting in self._loading.pop(chunk, ()):
                waiting.loads -= 1
                if not waiting.loads:
                    self._tasks.extend(waiting.tasks)
                    for _ in waiting.tasks:
                        self._wake_one()
            if not self._loading:
                self._wake_one()

    def _arrived(self, spans: list[Span]) -> None:
        """Count rows that have arrived, and give the batches that are full to the consumer."""
        for span in spans:
            if self._stopping:
                # Nobody will ask for them, and a transform may take long.
                return
            memory = self._filling.arrived(span)
            if memory is not None:
                self._done.put((span[0], self._finish(span[0], memory)))


@atexit.register
def _stop_all() -> None:
    """A thread that still reads while the interpreter is taken down may crash it."""
    own = [pipeline for pipeline in list(_live) if pipeline.process == os.getpid()]
    for pipeline in own:
        pipeline.stop()
    for pipeline in own:
        pipeline.join(5.0)
