"""The threads of an `H5Loader`, which prefetch batches.

An order is a sequence of chunk groups (`BatchPlan.chunk_groups`): rows that are read together, each with its batch and
its slot (row index in the batch). The terms of the protocol:

- A group is *issued* when memory is available for every batch with rows of the group. It is then cut into tasks, each
  of which fills some rows of some batches. A group of the third kind below is issued without memory.
- A batch is *open* from the allocation of its memory until all its rows are written. It is then *done*, and is queued
  for the consumer, which restores the order of the batches.
- A *credit* is the permission to open a batch. The consumer returns one for each batch that is delivered. So credits
  bound the number of batches that are open or done; batches that were delivered do not count.

The groups are sorted by the first batch to which their rows go. Therefore, if the largest group has rows of n batches,
n + 1 credits are enough to avoid a deadlock.

A planning thread computes the order a few groups ahead, and makes the kernel start reading data that is not in the page
cache. A reading thread runs the next task. If there is none, it issues the next group. If that is not possible, it
sleeps until a token in `_wake` signals a change.

The rows of a *cached* group, which are all in memory (in the page cache or in decoded chunks), are copied block by
block. A block is a part of a large batch, or several small batches. So there are three kinds of groups:

- Rows that are read or decoded: all batches are opened when the group is issued; reading threads run its tasks.
- Cached rows, with several streams or lanes (see `h5pack.order.window`): the same, but each task copies a block.
- Cached rows, with a single stream and lane (`_is_batchwise`): the batches of a block are opened when a thread takes
  the block. While the consumer waits, it copies blocks, too (`can_help`).

Waking a thread takes longer than copying a small batch. So a planned group or a returned credit puts a token into
`_wake` only if fewer than `_useful` reading threads are awake. A thread that takes work does the same if work is left.

`stop` sets a flag and puts tokens into queues. The garbage collector may call it in any thread while any lock is held,
so neither `stop` nor anything that it calls may take a lock.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from h5pack.data.buffers import BatchMemory, BufferPool
from h5pack.data.chunk_groups import Block, GroupReader, PlannedGroup, Task
from h5pack.data.iteration import BackgroundThreads, IdleThreads
from h5pack.errors import LoaderError
from h5pack.order.window import BatchPlan, ChunkGroup, Span, merge_groups

_PLANNED = 2
"""Number of groups to plan ahead of the group that is issued next."""

_MERGED_BYTES = 16 * 1024 * 1024
"""Groups are merged up to this many bytes, the size of two tasks. Measured with chunks of one row of 116 KB, one thread
and windows of 16 chunks: 19,800 images/s without merging, 35,000 with it."""


class EpochGroups:
    """The chunk groups of the epochs of an order, merged into groups that are large enough to be read efficiently."""

    def __init__(self, plan: BatchPlan, row_bytes: int) -> None:
        self._plan, self._max_rows = plan, max(1, _MERGED_BYTES // max(1, row_bytes))
        self._begun: tuple[int, Iterator[ChunkGroup]] | None = None

    def of(self, epoch: int, first: int) -> Iterator[ChunkGroup]:
        """Yield the chunk groups of an epoch from batch `first` on, then compute the first group of the next epoch."""
        begun, self._begun = self._begun, None
        yield from begun[1] if begun is not None and (begun[0], 0) == (epoch, first) else self._merged(epoch, first)
        following = self._merged(epoch + 1, 0)
        head = list(itertools.islice(following, 1))
        self._begun = epoch + 1, itertools.chain(head, following)

    def _merged(self, epoch: int, first: int) -> Iterator[ChunkGroup]:
        return merge_groups(self._plan.chunk_groups(epoch, first), self._max_rows, self._plan.max_group_batches)


class Pipeline(BackgroundThreads):
    """The threads and batches of one epoch, starting with batch `first`; `groups` are its chunk groups from there on.

    At most `credits` batches have memory but are not delivered yet. `finish` receives the number and the memory of each
    complete batch, and returns the batch that the consumer gets. `owner` and `idle` are those of
    `BackgroundThreads.start`.

    For cached groups, a task copies up to `block_rows` rows. With a single stream and lane, while such groups are
    copied, at most `max_gathered` batches (instead of `credits`) have memory but are not delivered yet. `max_gathered`
    must not exceed `credits`. If `can_help` is also true, the consumer's thread helps to copy while it waits, and at
    most `cpus` threads copy.
    """

    def __init__(
        self,
        reader: GroupReader,
        plan: BatchPlan,
        groups: Iterator[ChunkGroup],
        first: int,
        pool: BufferPool,
        *,
        num_threads: int,
        credits: int,
        finish: Callable[[int, BatchMemory], Any],
        max_gathered: int,
        block_rows: int,
        cpus: int,
        can_help: bool,
        owner: object,
        idle: IdleThreads | None,
    ) -> None:
        super().__init__()
        self._plan, self._pool, self._finish = plan, pool, finish
        self._reader, self._batches, self._groups = reader, reader.batches, groups
        self._planned: deque[PlannedGroup] = deque()
        self._planning = True
        # Numbers of the next batch to open and of the next batch to deliver.
        self._opened, self._delivered, self._max_open = first, first, credits
        # Fill batches of cached rows one after the other: this uses few buffers, which then stay in the CPU's cache.
        # With several streams or lanes, process whole groups at once, because consecutive batches take rows from
        # several groups.
        self._batchwise = plan.is_sequential
        self._max_gathered = max_gathered
        self._blocks: deque[Block] = deque()  # of a cached group
        self._block_rows = block_rows
        self._can_help, self._helping = can_help, False
        self._awake, self._cpus = num_threads, cpus
        self._tasks: deque[Task] = deque()
        self._stopping = False
        self._lock = threading.Lock()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Any] | BaseException] = queue.SimpleQueue()
        self._plan_slots: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(_PLANNED):
            self._plan_slots.put(None)
        self._readers = num_threads
        batchwise = True
        try:
            # After an epoch, the first group of the next one is computed already. If its rows are in memory, plan it
            # here to begin at once. Otherwise planning could wait for the disk.
            for group in itertools.islice(groups, 1):
                planned = reader.plan_cached(group)
                if planned is None:
                    self._groups, batchwise = itertools.chain([group], groups), False
                else:
                    self._plan_slots.get()
                    self._planned.append(planned)
                    batchwise = self._is_batchwise(planned)
        except Exception as error:
            self._done.put(error)
            self.stop()
        if pool.pinned and not batchwise:
            # Pin memory now, because pinning takes long, and a group that is not batchwise opens all its batches while
            # the lock is held.
            pool.prepare()
        readers = {f"read_{number}": partial(self._guarded, self._work) for number in range(num_threads)}
        self.start(owner, idle, **readers, plan=partial(self._guarded, self._plan_ahead))

    # Methods that the consumer's thread calls.

    def fetch(self) -> tuple[int, Any]:
        """Wait until any batch is complete, and return (number, batch). Raise the error of a failed thread.

        Batches may come in any order.
        """
        item = self._next_done()
        if isinstance(item, StopIteration):
            # Raising the StopIteration itself would look like the regular end of the epoch.
            raise LoaderError(
                "a transform raised StopIteration; make it raise another error, or return its result"
            ) from item
        if isinstance(item, BaseException):
            try:
                raise item
            finally:
                # Break the reference cycle: the traceback of `item` references this frame.
                del item
        return item

    def _next_done(self) -> tuple[int, Any] | BaseException:
        """Return the next item of `_done`. Until there is one, help to copy cached rows instead of sleeping."""
        helping = False
        while self._can_help:
            try:
                item = self._done.get_nowait()
                self._helping = helping
                return item
            except queue.Empty:
                pass
            try:
                with self._lock:
                    task = None if self._stopping else self._take(helping=True)
                    self._helping = helping = task is not None
                if task is None:
                    break
                # Tensors created in the caller's inference mode could not be used by autograd or changed in place.
                with torch.inference_mode(False):
                    task()
                del task
            except Exception as error:
                # Queue the error behind the complete batches, so that these are delivered first.
                self._done.put(error)
                self.stop()
                self._helping = False
                break
            except BaseException as error:
                self.stop()
                return error
        return self._done.get()

    @property
    def waiting(self) -> int:
        """Number of batches that are complete but not fetched."""
        return self._done.qsize()

    def return_credit(self) -> None:
        """Permit the threads to allocate one more batch, because a batch was delivered to the consumer."""
        self._delivered += 1
        with self._lock:
            self._wake_one()

    def stop(self) -> None:
        """Make the threads' functions end after their current task. The garbage collector may call this."""
        self._stopping = True
        self._plan_slots.put(None)
        for _ in self.threads:
            self._wake.put(None)
        self._done.put(LoaderError("this iterator was closed during next(); begin a new one with iter(loader)"))

    # Methods that the pipeline's threads call.

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._done.put(error)
            self.stop()
        if self._stopping:
            # Tasks reference the pipeline. Drop them, so that its memory is freed when the threads end.
            with self._lock:
                self._tasks.clear()
                self._blocks.clear()

    def _plan_ahead(self) -> None:
        for group in self._groups:
            planned = self._reader.plan(group)
            self._plan_slots.get()
            if self._stopping:
                return
            with self._lock:
                self._planned.append(planned)
                self._wake_one()
        with self._lock:
            self._planning = False
            self._wake.put(None)

    def _work(self) -> None:
        while (task := self._next_task()) is not None:
            task()
            # A task references a batch's memory. Drop it, so that a sleeping thread does not keep that memory alive.
            del task

    def _next_task(self) -> Task | None:
        while not self._stopping:
            with self._lock:
                # Whether no task will be added: every group was planned and issued, and no block is left to copy.
                over = not self._planning and not self._planned and not self._blocks
                task = self._take(helping=False)
                if task is not None:
                    return task
                if over and not self._tasks:
                    break
                self._awake -= 1
            self._wake.get()
            with self._lock:
                self._awake += 1
        # Pass the token on, so that all other reading threads wake up and end, too.
        self._wake.put(None)
        return None

    def _take(self, *, helping: bool) -> Task | None:
        """Return a task that can be run now, or None. The caller must hold the lock.

        If `helping` is true, the consumer calls this, and only tasks that copy a block are returned.
        """
        if not self._tasks and not self._blocks and self._planned:
            self._issue()
        task = None
        if self._tasks:
            task = None if helping else self._tasks.popleft()
        elif self._blocks and (helping or self._awake <= self._useful):
            block = self._blocks[0]
            if block.last - self._delivered < self._max_gathered:
                self._open_block(block)
                task = partial(self._fill, self._blocks.popleft())
        if (task is not None or helping) and (self._tasks or self._blocks or self._planned):
            self._wake_one()
        return task

    @property
    def _useful(self) -> int:
        """Number of reading threads that may be awake. More threads than CPUs would only slow down the copying."""
        # Threads that read from a disk or run transforms may wait, so more of them than CPUs are useful.
        if self._tasks or not self._can_help:
            return self._readers
        return max(1, min(self._readers, self._cpus - self._helping))

    def _fill(self, block: Block) -> None:
        self._reader.fill(block)
        self._arrive(block.spans)

    def _wake_one(self) -> None:
        """Wake a reading thread if fewer than `_useful` are awake. The caller must hold the lock."""
        if self._awake < self._useful and not self._wake.qsize():
            self._wake.put(None)

    def _issue(self) -> None:
        """Queue the tasks or blocks of the next group.

        Do nothing if the group's batches need memory now, but there are too few credits.
        """
        planned = self._planned[0]
        batchwise = self._is_batchwise(planned)
        if not batchwise:
            if planned.group.last - self._delivered >= self._max_open:
                return
            self._open(planned.group.last)
        self._planned.popleft()
        self._plan_slots.put(None)
        if planned.runs is None:
            self._tasks.extend(self._reader.read(planned, self._arrive))
            return
        combines = batchwise and self._pool.blocks is not None
        blocks = self._reader.blocks(planned, self._pool.batch_rows if combines else 0, self._block_rows)
        if batchwise:
            self._blocks.extend(blocks)
        else:
            self._tasks.extend(partial(self._fill, block) for block in blocks)

    def _is_batchwise(self, planned: PlannedGroup) -> bool:
        return planned.runs is not None and self._batchwise

    def _open_block(self, block: Block) -> None:
        """Open the batches of a block. Several batches get adjacent memory."""
        if len(block.spans) == 1:
            self._open(block.last)
        else:
            assert self._pool.blocks is not None
            self._batches.open_block(block, self._pool.blocks.allocate(len(block.rows)))
            self._opened = block.last + 1

    def _open(self, last: int) -> None:
        """Open all batches up to number `last` that were not opened yet."""
        for batch in range(self._opened, last + 1):
            rows = self._plan.batch_rows(batch)
            self._batches.open(batch, self._pool.allocate(rows), rows)
        self._opened = max(self._opened, last + 1)

    def _arrive(self, spans: list[Span]) -> None:
        """Record that the rows of `spans` are written, and queue the batches that are now complete for the consumer."""
        for span in spans:
            if self._stopping:
                # These batches will not be fetched, and calling a transform on them could take long.
                return
            memory = self._batches.arrive(span)
            if memory is not None:
                self._done.put((span[0], self._finish(span[0], memory)))
