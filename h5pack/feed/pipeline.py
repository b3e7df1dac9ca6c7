"""Threads that fill batches ahead of their consumer.

The protocol. An order comes in segments (`OrderPlan.segments`): rows that are read together, and their places in the
batches. A segment is *issued* when there is memory for every batch it touches: it is cut into tasks, each of which fills
some rows of some batches. A batch is *done* when no row of it is missing; it then goes to the consumer, who brings the
batches into order and returns a *credit* for each. Credits bound the batches that are open or done but not fetched;
batches that the consumer holds are its own. As no later segment holds rows of a batch before an earlier segment's first,
credits for one segment's span, and a few, are enough never to stand still.

A thread takes a task, or issues the next segment where there is none, or sleeps until something changes: a token in
`_wake` says so. Stopping is a flag and tokens. Both can be given inside the garbage collector, which may run in any
thread, with any lock held: nothing that it calls takes a lock.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.feed.buffers import BatchMemory, BufferPool
from h5pack.feed.dataset import H5Dataset
from h5pack.feed.order import OrderPlan, Segment
from h5pack.feed.resident import ResidentRows

TASK_BYTES = 4 * 1024 * 1024
"""Bytes a task reads: long beside the cost of a task (some 10 us), short beside a batch."""

ROWS = "row numbers"
"""The part of a batch that holds its row numbers; no dataset has a space in front of it."""

Task = Callable[[], None]
_live: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@dataclass
class _Filling:
    """A batch with rows missing."""

    memory: BatchMemory
    missing: int


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
    ) -> None:
        self.process = os.getpid()
        self._dataset, self._plan, self._pool, self._resident = dataset, plan, pool, resident
        self._finish = finish
        self._names = [part.name for part in pool.parts]
        self._segments = plan.segments(epoch, first)
        self._head: Segment | None = None
        self._granted = 0
        self._opened = first
        self._filling: dict[int, _Filling] = {}
        self._tasks: deque[Task] = deque()
        self._loading: dict[int, list[_Waiting]] = {}
        self._exhausted = False
        self._stopping = False
        self._lock = threading.Lock()
        self._credits: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Any] | BaseException] = queue.SimpleQueue()
        for _ in range(credits):
            self._credits.put(None)
        self._threads = [
            threading.Thread(target=self._work, name=f"h5pack-read-{number}", daemon=True) for number in range(threads)
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
            raise item
        return item

    def return_credit(self) -> None:
        """Say that a batch was handed to the consumer."""
        self._credits.put(None)
        self._wake_one()

    def stop(self) -> None:
        """Have the threads end after the task each is at; safe inside the garbage collector."""
        self._stopping = True
        for _ in self._threads:
            self._wake.put(None)
        self._done.put(RuntimeError("the pipeline was stopped"))

    def join(self, seconds: float | None = None) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)

    # The threads' side.

    def _work(self) -> None:
        try:
            while (task := self._next_task()) is not None:
                task()
                # A task holds memory; it must not outlive its batch while the thread sleeps.
                del task
        except BaseException as error:
            self._done.put(error)
            self.stop()

    def _next_task(self) -> Task | None:
        while not self._stopping:
            with self._lock:
                if not self._tasks and not self._exhausted and self._issue():
                    for _ in range(len(self._tasks) - 1):
                        self._wake_one()
                if self._tasks:
                    return self._tasks.popleft()
                if self._exhausted and not self._loading:
                    break
            self._wake.get()
        # Whoever sleeps must see it, too.
        self._wake.put(None)
        return None

    def _wake_one(self) -> None:
        # With as many tokens as threads, every sleeper will look again after this.
        if self._wake.qsize() < len(self._threads):
            self._wake.put(None)

    def _issue(self) -> bool:
        """Turn the next segment into tasks, if there is memory for all its batches."""
        if self._head is None:
            self._head = next(self._segments, None)
            if self._head is None:
                self._exhausted = True
                return False
            self._advise(self._head)
        segment = self._head
        while self._granted < segment.last + 1 - self._opened:
            try:
                self._credits.get_nowait()
            except queue.Empty:
                return False
            self._granted += 1
        for batch in range(self._opened, segment.last + 1):
            rows = self._plan.batch_rows(batch)
            self._filling[batch] = _Filling(self._pool.take(rows), rows * len(self._names))
            self._granted -= 1
        self._opened = max(self._opened, segment.last + 1)
        self._head = None
        if self._resident is None:
            self._tasks.extend(self._read_tasks(segment))
        else:
            self._load_tasks(segment, self._resident)
        return True

    def _advise(self, segment: Segment) -> None:
        """Have a cold disk begin with a segment before there is memory for it."""
        if self._resident is None or self._resident.missing(segment.rows):
            self._dataset.engine.advise(self._dataset.names[0], segment.rows)

    # Tasks.

    def _read_tasks(self, segment: Segment) -> list[Task]:
        """Tasks that read a segment from the file: large rows to their places, small ones by way of a sort."""
        engine = self._dataset.engine
        tasks: list[Task] = []
        span = segment.last + 1 - segment.first
        batches = segment.batches - segment.first
        for part in self._pool.parts:
            if part.name == ROWS or not engine.scatters(engine.indexes[part.name]):
                tasks += self._sorted_tasks(segment, part.name, part.row_bytes)
                continue
            numbers = range(segment.first, segment.last + 1)
            # Batches of other lanes between this segment's may be full and gone.
            filling = [self._filling.get(batch) for batch in numbers]
            base = np.array([0 if found is None else found.memory.address for found in filling], np.uint64)
            base += np.uint64(part.offset)
            addresses = base[batches] + (segment.slots * part.row_bytes).view(np.uint64)
            plan = engine.plan_scatter(part.name, segment.rows, addresses)
            cuts = self._cut(plan.edges, part.row_bytes)
            firsts = np.array(plan.edges)[cuts]
            counts = np.bincount(
                np.repeat(np.arange(len(cuts) - 1), np.diff(firsts)) * span + batches, minlength=(len(cuts) - 1) * span
            ).reshape(-1, span)
            for number, (low, high) in enumerate(zip(cuts, cuts[1:], strict=False)):
                tasks.append(_bind(self._scatter, plan, low, high, segment.first, counts[number]))
        # Small parts take long to wait for if they come last.
        tasks.sort(key=lambda task: task.__name__ != "_sorted")
        return tasks

    @staticmethod
    def _cut(edges: list[int], row_bytes: int) -> list[int]:
        """Cut runs into tasks of about `TASK_BYTES`: numbers of the runs they begin with, and the end."""
        rows = max(1, TASK_BYTES // row_bytes)
        cuts = [0]
        for number in range(1, len(edges) - 1):
            if edges[number] // rows != edges[cuts[-1]] // rows or edges[number] - edges[cuts[-1]] >= rows:
                cuts.append(number)
        cuts.append(len(edges) - 1)
        return cuts

    def _scatter(self, plan: Any, low: int, high: int, first: int, counts: Any) -> None:
        self._dataset.engine.scatter(plan, low, high)
        self._filled(first, counts)

    def _sorted_tasks(self, segment: Segment, name: str, row_bytes: int) -> list[Task]:
        """Tasks that read rows and then put them into the batches, one task a batch or as many as are small."""
        order = np.lexsort((segment.slots, segment.batches))
        batches = segment.batches[order]
        edges = np.concatenate(([0], np.flatnonzero(np.diff(batches)) + 1, [len(order)]))
        rows, slots = segment.rows[order], segment.slots[order]
        if name == ROWS:
            return [_bind(self._put_rows, rows, slots, batches, edges)]
        return [_bind(self._sorted, name, rows, slots, batches, edges)]

    def _put_rows(self, rows: Any, slots: Any, batches: Any, edges: Any) -> None:
        self._put(ROWS, rows, slots, batches, edges)

    def _sorted(self, name: str, rows: Any, slots: Any, batches: Any, edges: Any) -> None:
        self._put(name, self._dataset.engine.read(name, rows), slots, batches, edges)

    def _put(self, name: str, values: npt.NDArray[Any], slots: Any, batches: Any, edges: Any) -> None:
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            batch = int(batches[low])
            self._filling[batch].memory.arrays[name][slots[low:high]] = values[low:high]
            self._filled(batch, [high - low])

    def _load_tasks(self, segment: Segment, resident: ResidentRows) -> None:
        """Queue what loads a segment's chunks, where they are not in memory yet, and then gathers its batches."""
        order = np.lexsort((segment.slots, segment.batches))
        batches = segment.batches[order]
        edges = np.concatenate(([0], np.flatnonzero(np.diff(batches)) + 1, [len(order)]))
        rows, slots = segment.rows[order], segment.slots[order]
        gathers: list[Task] = [
            _bind(self._gather, int(batches[low]), rows[low:high], slots[low:high])
            for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        ]
        missing = resident.missing(segment.rows)
        if not missing:
            self._tasks.extend(gathers)
            return
        waiting = _Waiting(len(missing), gathers)
        for chunk in missing:
            if chunk not in self._loading:
                self._loading[chunk] = []
                self._tasks.append(_bind(self._load, chunk))
            self._loading[chunk].append(waiting)

    def _load(self, chunk: int) -> None:
        assert self._resident is not None
        self._resident.load(chunk)
        with self._lock:
            for waiting in self._loading.pop(chunk):
                waiting.loads -= 1
                if not waiting.loads:
                    self._tasks.extend(waiting.tasks)
                    for _ in waiting.tasks:
                        self._wake_one()

    def _gather(self, batch: int, rows: Any, slots: Any) -> None:
        assert self._resident is not None
        arrays = self._filling[batch].memory.arrays
        low, high = int(slots[0]), int(slots[-1]) + 1
        together = high - low == len(slots)
        for name in self._names:
            if name == ROWS:
                arrays[name][slots] = rows
            elif together:
                self._resident.gather(name, rows, arrays[name][low:high])
            else:
                values = np.empty((len(rows), *arrays[name].shape[1:]), arrays[name].dtype)
                self._resident.gather(name, rows, values)
                arrays[name][slots] = values
        self._filled(batch, [len(rows) * len(self._names)])

    def _filled(self, first: int, counts: Any) -> None:
        """Count rows that have arrived, and hand over the batches that are full."""
        full: list[tuple[int, BatchMemory]] = []
        with self._lock:
            for step, count in enumerate(counts):
                if count:
                    filling = self._filling[first + step]
                    filling.missing -= int(count)
                    if not filling.missing:
                        full.append((first + step, self._filling.pop(first + step).memory))
        while full:
            batch, memory = full.pop()
            item = (batch, self._finish(batch, memory))
            del memory
            self._done.put(item)
            del item


def _bind(function: Callable[..., None], *arguments: Any) -> Task:
    def task() -> None:
        function(*arguments)

    task.__name__ = function.__name__
    return task


@atexit.register
def _stop_all() -> None:
    """A thread that still reads while the interpreter is taken down may crash it."""
    for pipeline in list(_live):
        with contextlib.suppress(Exception):
            pipeline.stop()
    for pipeline in list(_live):
        pipeline.join(5.0)
