"""Tasks that read the rows of a chunk group and write them to their batches.

The terms are defined in `h5pack.order.window`. A chunk group is a set of chunks that are read together. A slot is the
index of a row in its batch. A span is a run of consecutive slots of one batch.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.data.buffers import BatchField, BatchMemory
from h5pack.data.dataset import H5Dataset
from h5pack.data.decoding import DrawKey
from h5pack.data.gather import CachedRows, DecodedRows, HeldRows, RowLocations
from h5pack.order.window import ChunkGroup, Span
from h5pack.read.engine import SCATTER_BYTES
from h5pack.read.read_plan import ScatterPlan, plan_scatter
from h5pack.read.storage import CHECK_SECONDS
from h5pack.system.arrays import consecutive_runs, equal_runs, limited_stops, run_edges

TASK_BYTES = 8 * 1024 * 1024
"""Bytes that one task reads: enough to make the overhead of a task (about 10 us) negligible, and few enough to divide
the work among the threads."""

_MIN_CROPS, _MAX_CROPS, _CROPPED_BYTES = 8, 64, 64 * 1024 * 1024
"""Bounds on the number of images that one task crops. Between `_MIN_CROPS` and `_MAX_CROPS`, it is the number of images
whose pixels before cropping take `_CROPPED_BYTES` in total.

64 crops of photos of 512 pixels take 40 ms. CPU time of one crop with two threads: 628 us in tasks of 32, 596 us in
tasks of 64, 584 us in tasks of 128, because drawing the windows takes 0.2 to 0.5 ms per task. But larger tasks leave
threads idle for longer at the end of an epoch.
"""

DECODING_BYTES = 256 * 1024
"""Maximum bytes of decoded chunks that one task copies, except that a larger chunk is a task of its own."""

_LARGE_BYTES, _FEW_ROWS = 8_192, 8
"""Rows of a decoded chunk are copied one by one if each has at least `_LARGE_BYTES` bytes, or if at most `_FEW_ROWS`
rows of the chunk are wanted. Other rows are copied together by NumPy's fancy indexing, which is a single call, but
copies the data twice."""

ROWS = "row numbers\0"
"""Name of the batch field that holds the row numbers in the file. No dataset has this name, because of its NUL."""

Task = Callable[[], None]
OnArrival = Callable[[list[Span]], None]


@dataclass(frozen=True)
class Block:
    """Rows to be copied from memory into one span of a batch, or into several whole batches with adjacent memory.

    `rows` has the row numbers, int64 (n,), in the order of the slots. `found` has the locations of the rows, by name of
    each field that is copied from the page cache or from decoded chunks. `checked` is the monotonic time of the check
    that all rows are in memory.
    """

    spans: list[Span]
    rows: npt.NDArray[np.int64]
    found: dict[str, RowLocations]
    checked: float

    @property
    def last(self) -> int:
        """Number of the last batch in `spans`."""
        return self.spans[-1][0]


class OpenBatches:
    """The batches that have memory, but are not complete: some of their rows have not been written yet."""

    def __init__(self) -> None:
        self._memory: dict[int, BatchMemory] = {}
        self._missing: dict[int, int] = {}
        self._lock = threading.Lock()

    def open(self, batch: int, memory: BatchMemory, rows: int) -> None:
        """Register a batch of `rows` rows, none of which is written yet."""
        self._memory[batch], self._missing[batch] = memory, rows

    def open_block(self, block: Block, memory: BatchMemory) -> None:
        """Register the batches of a block of whole batches; `memory` holds them one after the other."""
        start = 0
        for batch, _, rows in block.spans:
            self.open(batch, memory.part(start, rows), rows)
            start += rows

    def arrays_of(self, block: Block) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays, by field name, into which a block's rows are to be copied in the block's order."""
        batch, slot, _ = block.spans[0]
        # If the block has several batches, they are adjacent in memory, so one range that begins in the first batch
        # covers all of them.
        return self._memory[batch].part(slot, len(block.rows)).arrays

    def memory(self, batch: int) -> BatchMemory:
        """Return the memory of an open batch."""
        return self._memory[batch]

    def arrive(self, span: Span) -> BatchMemory | None:
        """Record that the rows of `span` are written. Return the memory of their batch if it is now complete."""
        batch, _, count = span
        with self._lock:
            self._missing[batch] -= count
            if self._missing[batch]:
                return None
            del self._missing[batch]
            return self._memory.pop(batch)


@dataclass(frozen=True)
class PlannedGroup:
    """A chunk group, and how its rows come into the batches.

    If `runs` is None, the rows are read from the file. `plans` then has the read plan of each field whose rows are read
    directly into the batches, by field name.

    If `runs` is not None, all rows are in memory, and are copied in blocks (see `Block`). `runs` then holds two arrays,
    int64 (n,): the first row and the last row of each run of consecutive rows. `found` then has the locations of the
    rows, as in `Block`, in the order of `ChunkGroup.in_slot_order`.
    """

    group: ChunkGroup
    plans: dict[str, ScatterPlan]
    found: dict[str, RowLocations]
    runs: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
    checked: float = 0.0  # monotonic time of the check that all rows are in memory


class _Countdown:
    """Counter of a chunk group's unfinished tasks. After the last task it calls `on_arrival` with the group's spans.

    Only the tasks reference the countdown, so no reference cycle keeps the pipeline alive.
    """

    def __init__(self, spans: list[Span], on_arrival: OnArrival) -> None:
        self._spans, self._on_arrival = spans, on_arrival
        self.tasks = 0
        self._lock = threading.Lock()

    def run(self, work: Callable[[int, int], None], low: int, high: int) -> None:
        """Run one task, ``work(low, high)``, and call `on_arrival` if no task is left."""
        work(low, high)
        with self._lock:
            self.tasks -= 1
            left = self.tasks
        if not left:
            self._on_arrival(self._spans)


class GroupReader:
    """Factory of the tasks that fill `batches` with the rows of chunk groups.

    `held` has the small fields that are held in memory, by name. If `keep` is true, decoded chunks are cached for later
    groups and epochs. ``draw_key(batches, slots)`` returns the key of random crops (`h5pack.data.samplers.draw_key`).
    """

    def __init__(
        self,
        dataset: H5Dataset,
        fields: list[BatchField],
        held: dict[str, HeldRows],
        draw_key: Callable[[Any, Any], DrawKey],
        *,
        keep: bool,
    ) -> None:
        self.batches = OpenBatches()
        self._dataset, self._engine = dataset, dataset.engine
        self._fields, self._held, self._keep, self._draw_key = fields, held, keep, draw_key
        self._cached = {field.name: rows for field in fields if (rows := self._find(field)) is not None}
        self._can_gather = len(held) + len(self._cached) == len(dataset.names)

    def _find(self, field: BatchField) -> CachedRows | DecodedRows | None:
        """Return an object that copies a field's rows from memory: from decoded chunks, or from a mapping of the file.

        Return None in each of these cases:

        - The field is the row numbers, or one of the fields in `held`.
        - The stored bytes cannot be copied unchanged, because batches have another dtype or byte order.
        - Decoded chunks are not kept, and the file cannot be mapped.
        """
        if field.name == ROWS or field.name in self._held:
            return None
        index = self._engine.indexes[field.name]
        as_stored = index.dtype.isnative or self._engine.keeps_byte_order(index)
        if not as_stored or field.dtype != index.native_dtype:
            return None
        if self._keep and (decoded := self._engine.decoded(field.name)) is not None:
            return DecodedRows(decoded)
        mapped = self._engine.mapped(field.name)
        return None if mapped is None else CachedRows(mapped)

    def plan(self, group: ChunkGroup) -> PlannedGroup:
        """Plan the reads of a group's rows, and bring rows that are not in memory into the page cache.

        If `FileMapping.load` can load the rows, wait until it has done so: they can then be copied from a mapping.
        Otherwise only make the kernel start reading. The same is done for the group's `upcoming` rows.
        """
        for rows in group.upcoming:
            runs = _runs_of(rows)
            if not (self._ready(*runs) or self._load(*runs)):
                self._prefetch(rows)
        planned = self.plan_cached(group)
        if planned is None and self._load(*_runs_of(group.rows)):
            planned = self.plan_cached(group)
        return planned or PlannedGroup(group, self._prefetch(group.rows), {})

    def plan_cached(self, group: ChunkGroup) -> PlannedGroup | None:
        """Plan a group whose rows can all be copied from memory; return None for any other group.

        If a few pages are missing in the page cache, this waits until they are read from the disk.
        """
        runs, checked = _runs_of(group.rows), time.monotonic()
        return PlannedGroup(group, {}, self._locate(group), runs, checked) if self._ready(*runs) else None

    def _prefetch(self, rows: npt.NDArray[np.int64]) -> dict[str, ScatterPlan]:
        """Make the kernel start reading rows; return a read plan for each field that is read directly into batches."""
        plans = {}
        for name in self._dataset.names:
            index = self._engine.indexes[name]
            if self._engine.can_scatter(index):
                plans[name] = plan_scatter(index, rows)
                self._engine.prefetch(plans[name])
            elif self._engine.can_decode(index):
                self._engine.files.prefetch(index, rows)
            else:
                self._engine.prefetch_encoded(name, rows)
        return plans

    def _locate(self, group: ChunkGroup) -> dict[str, RowLocations]:
        """Return the locations of a group's rows, by field name, as `PlannedGroup.found` describes.

        All rows of the group are located at once. With several files, locating the rows of each batch separately would
        take a third as long as copying the rows.
        """
        found = {}
        for name, rows in self._cached.items():
            located = rows.locate(group.rows)
            found[name] = RowLocations(group.in_slot_order(located.positions), located.files)
        return found

    def read(self, planned: PlannedGroup, on_arrival: OnArrival) -> list[Task]:
        """Return tasks that read or decode the rows of a group and write them to their batches.

        `on_arrival` is called with the group's spans once all rows of the group are in their batches.
        """
        group, countdown = planned.group, _Countdown(planned.group.spans, on_arrival)
        rows, tasks = len(group.rows), list[Task]()
        for field in self._fields:
            plan, max_rows = planned.plans.get(field.name), max(1, TASK_BYTES // max(1, field.row_bytes))
            if plan is not None:
                plan.buffers[:, 0] = self._addresses(group, field)
                # Each task has up to `max_rows` rows. A task does not cut a run of rows; a longer run is one task.
                work, stops = partial(self._engine.execute, plan), limited_stops(np.diff(plan.edges), max_rows)
                cuts = [0, *stops]
            elif self._dataset.is_cropped(field.name):
                size = self._engine.indexes[field.name].row_bytes
                count = max(_MIN_CROPS, min(_MAX_CROPS, _CROPPED_BYTES // max(1, size)))
                work, cuts = partial(self._crop, field, group), [*range(0, rows, count), rows]
            elif field.name == ROWS or field.row_bytes < SCATTER_BYTES:
                work, cuts = partial(self._stage, field, group), [0, rows]
            elif self._engine.can_decode(self._engine.indexes[field.name]):
                index = self._engine.indexes[field.name]
                edges = equal_runs(index.chunks_of(group.rows)).tolist()
                count, last = max(1, DECODING_BYTES // (index.chunk_rows * field.row_bytes)), len(edges) - 1
                work, cuts = partial(self._decode, field, group, edges), [*range(0, last, count), last]
            else:
                # Each task has up to `max_rows` rows in ascending order.
                ascending = itertools.pairwise(run_edges(np.diff(group.rows) < 0).tolist())
                starts = [start for low, high in ascending for start in range(low, high, max_rows)]
                work, cuts = partial(self._copy, field, group), [*starts, rows]
            tasks += [partial(countdown.run, work, low, high) for low, high in itertools.pairwise(cuts)]
        countdown.tasks = len(tasks)
        return tasks

    def blocks(self, planned: PlannedGroup, batch_rows: int, max_rows: int) -> list[Block]:
        """Divide a group whose rows are in memory into blocks of up to `max_rows` rows.

        A block is a part of a span, or several whole batches. A whole batch is a span of `batch_rows` rows. If
        `batch_rows` is 0, each block has rows of one batch only.
        """
        assert planned.runs is not None
        for name in self._cached:
            self._engine.count_copied(name, *planned.runs)
        max_batches = max_rows // batch_rows if batch_rows else 0
        parts: list[list[Span]] = []
        whole: list[Span] = []  # the last of `parts`, if another whole batch may be added to it
        for batch, slot, count in planned.group.spans:
            if count == batch_rows and max_batches > 1:
                if len(whole) in (0, max_batches):
                    whole = []
                    parts.append(whole)
                whole.append((batch, slot, count))
            else:
                whole, pieces = [], -(-count // max_rows)
                edges = [slot + count * number // pieces for number in range(pieces + 1)]
                parts += [[(batch, first, last - first)] for first, last in itertools.pairwise(edges)]
        rows, ends = planned.group.in_slot_order(planned.group.rows), [0]
        blocks = []
        for spans in parts:
            ends.append(ends[-1] + sum(count for _, _, count in spans))
            own = slice(ends[-2], ends[-1])
            found = {name: RowLocations(some.positions[own], some.files) for name, some in planned.found.items()}
            blocks.append(Block(spans, rows[own], found, planned.checked))
        return blocks

    def fill(self, block: Block) -> None:
        """Copy a block's rows to its batches: from memory if they are still there, else from the file."""
        # The kernel may have dropped pages since the group was planned. Copying from the mapping would wait for each of
        # these pages, so read the rows with the engine instead.
        in_memory = time.monotonic() - block.checked < CHECK_SECONDS or self._ready(block.rows, block.rows)
        for name, part in self.batches.arrays_of(block).items():
            if name == ROWS:
                part[...] = block.rows
            elif name in self._held:
                self._held[name].gather(block.rows, part)
            elif in_memory:
                self._cached[name].gather(block.found[name], part)
            else:
                self._engine.read(name, block.rows, part)
                if not self._engine.indexes[name].dtype.isnative:
                    part.byteswap(inplace=True)

    def _ready(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> bool:
        return self._can_gather and all(rows.ready(first, last) for rows in self._cached.values())

    def _load(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> bool:
        return self._can_gather and all(rows.load(first, last) for rows in self._cached.values())

    def _addresses(self, group: ChunkGroup, field: BatchField) -> npt.NDArray[np.uint64]:
        """Return the memory address to which each row of a group is to be written; uint64, (n,)."""
        size = field.row_bytes
        start, bases, counts = 0, [], []
        for batch, slot, count in group.spans:
            bases.append(self.batches.memory(batch).address + field.offset + (slot - start) * size)
            counts.append(count)
            start += count
        addresses = np.repeat(np.array(bases, np.int64), counts)
        addresses += np.arange(0, start * size, size)
        return addresses[group.positions].view(np.uint64)

    def _stage(self, field: BatchField, group: ChunkGroup, low: int, high: int) -> None:
        """Copy all rows of a group to their batches, for a field with small rows.

        `low` and `high` are ignored. They are parameters because all tasks are called with them.
        """
        if field.name == ROWS:
            values: npt.NDArray[Any] = group.rows
        elif field.name in self._held:
            values = np.empty((len(group.rows), *field.row_shape), field.dtype)
            self._held[field.name].gather(group.rows, values)
        else:
            values = self._engine.read(field.name, group.rows)
        for (batch, slot, count), part in group.split_by_batch(values):
            self.batches.memory(batch).arrays[field.name][slot : slot + count] = part

    def _decode(self, field: BatchField, group: ChunkGroup, edges: list[int], low: int, high: int) -> None:
        """Decode chunks `low` to `high` - 1 of the group, and copy their rows to the batches, in the stored byte order.

        Chunk i of the group has the rows ``group.rows[edges[i] : edges[i + 1]]``.
        """
        arrays = self._arrays(field, group)
        for first, last in itertools.pairwise(edges[low : high + 1]):
            chunk, rows = self._engine.rows_in_chunk(field.name, group.rows[first:last], keep=self._keep)
            owners, slots = (part[first:last] for part in group.slots)
            if field.row_bytes >= _LARGE_BYTES or len(rows) <= _FEW_ROWS:
                for owner, slot, row in zip(owners.tolist(), slots.tolist(), rows.tolist(), strict=True):
                    arrays[owner].view(chunk.dtype)[slot] = chunk[row]
                continue
            # Sort the rows by position, so that the rows of each batch are adjacent.
            order = np.argsort(group.positions[first:last])
            owners, slots, rows = owners[order], slots[order], rows[order]
            for start, stop in itertools.pairwise(equal_runs(owners).tolist()):
                arrays[owners[start]].view(chunk.dtype)[slots[start:stop]] = chunk[rows[start:stop]]

    def _arrays(self, field: BatchField, group: ChunkGroup) -> list[npt.NDArray[Any]]:
        """Return, for each span of the group, the field's array in the batch of this span."""
        return [self.batches.memory(batch).arrays[field.name] for batch, _, _ in group.spans]

    def _copy(self, field: BatchField, group: ChunkGroup, low: int, high: int) -> None:
        """Read rows `low` to `high` - 1 of the group into new memory, and copy them to their batches.

        This is for large rows that can be neither read directly into the batches nor copied from decoded chunks.
        """
        values = self._engine.read(field.name, group.rows[low:high])
        for value, out in zip(values, self._outs(field, group, low, high), strict=True):
            out[...] = value

    def _crop(self, field: BatchField, group: ChunkGroup, low: int, high: int) -> None:
        """Decode crops of the encoded images or masks in rows `low` to `high` - 1 of the group into their batches."""
        outs = self._outs(field, group, low, high)
        owners, slots = (part[low:high] for part in group.slots)
        batches = np.array([batch for batch, _, _ in group.spans])[owners]
        self._dataset.decode_rows(field.name, group.rows[low:high], outs, self._draw_key(batches, slots))

    def _outs(self, field: BatchField, group: ChunkGroup, low: int, high: int) -> list[npt.NDArray[Any]]:
        """Return an array for each of the group's rows `low` to `high` - 1: the memory of this row in its batch."""
        arrays, (owners, slots) = self._arrays(field, group), (part[low:high].tolist() for part in group.slots)
        return [arrays[owner][slot] for owner, slot in zip(owners, slots, strict=True)]


def _runs_of(rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first and the last row of each run of consecutive rows, int64 (runs,)."""
    edges = consecutive_runs(rows)
    return rows[edges[:-1]], rows[edges[1:] - 1]
