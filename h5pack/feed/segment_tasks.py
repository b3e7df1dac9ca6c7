"""What is to be done for a segment of an order: read its rows, and put them into their batches."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.feed.buffers import Part
from h5pack.feed.dataset import H5Dataset
from h5pack.feed.filling import Filling, Span
from h5pack.feed.order import Segment
from h5pack.feed.resident import ResidentRows
from h5pack.read.engine import SCATTER_BYTES
from h5pack.read.runs import chunk_edges
from h5pack.read.scatter import Scatter

TASK_BYTES = 8 * 1024 * 1024
"""Bytes a task reads: long beside the cost of a task (some 10 us), short beside a batch."""

_LARGE_BYTES = 8_192
"""Decoded rows of this many bytes or more are copied one by one, smaller ones by one index, which copies twice."""

ROWS = "row numbers"
"""The part of a batch that holds its row numbers; no dataset has a space in front of it."""

Task = Callable[[], None]
Arrived = Callable[[list[Span]], None]


@dataclass(frozen=True)
class PlannedSegment:
    """A segment, and how its large parts are read.

    Attributes
    ----------
    segment : Segment
    plans : dict of str to Scatter
        Of the parts whose rows go straight to their places.
    """

    segment: Segment
    plans: dict[str, Scatter]


class _Countdown:
    """Tasks to go until a segment's rows are in their batches; then somebody is told.

    Only tasks know whom to tell, so that a pipeline is not held by what it holds.
    """

    def __init__(self, spans: list[Span], arrived: Arrived) -> None:
        self._spans, self._arrived = spans, arrived
        self.tasks = 0
        self._lock = threading.Lock()

    def count(self) -> None:
        """Count one task that is done."""
        with self._lock:
            self.tasks -= 1
            left = self.tasks
        if not left:
            self._arrived(self._spans)


class SegmentTasks:
    """Cuts segments into tasks.

    Parameters
    ----------
    dataset : H5Dataset
    parts : list of Part
        Of a batch.
    filling : Filling
        Where batches are open.
    small : ResidentRows, optional
        Small parts that are in memory already.
    keep : bool
        Keep decoded chunks: the order comes back to them.
    """

    def __init__(
        self,
        dataset: H5Dataset,
        parts: list[Part],
        filling: Filling,
        small: ResidentRows | None,
        keep: bool,
    ) -> None:
        self._keep = keep
        self._dataset, self._engine = dataset, dataset.engine
        self._parts, self._filling, self._small = parts, filling, small

    def plan(self, segment: Segment) -> PlannedSegment:
        """Find where a segment's rows lie, and have a cold disk begin with them."""
        plans = {}
        for name in self._dataset.names:
            if self._engine.scatters(self._engine.indexes[name]):
                plans[name] = self._engine.plan(name, segment.rows)
                self._engine.advise(plans[name])
            elif self._engine.decodes(self._engine.indexes[name]):
                self._engine.advise_chunks(name, segment.rows)
        return PlannedSegment(segment, plans)

    def read(self, planned: PlannedSegment, arrived: Arrived) -> list[Task]:
        """Tasks that read a segment from the file: large rows to their places, others by way of a staging array.

        `arrived` is called with the spans whose rows are in their batches.
        """
        segment, countdown = planned.segment, _Countdown(planned.segment.spans, arrived)
        tasks: list[Task] = []
        for part in self._parts:
            plan = planned.plans.get(part.name)
            if plan is not None:
                plan.buffers[:, 0] = self._addresses(segment, part)
                cuts = _cut(plan.edges, part.row_bytes)
                tasks += [partial(self._scatter, plan, low, high, countdown) for low, high in itertools.pairwise(cuts)]
            elif part.name == ROWS or part.row_bytes < SCATTER_BYTES:
                tasks.append(partial(self._stage, part, segment, countdown))
            elif self._engine.decodes(self._engine.indexes[part.name]):
                edges = chunk_edges(self._engine.indexes[part.name], segment.rows)
                tasks += [
                    partial(self._decode, part, segment, low, high, countdown)
                    for low, high in itertools.pairwise(edges)
                ]
            else:
                cuts = _cut(_ascending(segment.rows), part.row_bytes, whole=False)
                tasks += [
                    partial(self._copy, part, segment, low, high, countdown) for low, high in itertools.pairwise(cuts)
                ]
        countdown.tasks = len(tasks)
        return tasks

    def gather(self, segment: Segment, resident: ResidentRows, arrived: Arrived) -> list[Task]:
        """Tasks that copy a segment's rows out of memory, one a batch; `arrived` as for `read`."""
        return [self.gather_share(span, rows, resident, arrived) for span, rows in segment.deal(segment.rows)]

    def gather_share(self, span: Span, rows: npt.NDArray[np.int64], resident: ResidentRows, arrived: Arrived) -> Task:
        """A task that copies the rows of one span out of memory."""
        return partial(self._gather, span, rows, resident, arrived)

    def _addresses(self, segment: Segment, part: Part) -> npt.NDArray[np.uint64]:
        """Where each row of a segment goes, in memory."""
        size = part.row_bytes
        begin, bases, counts = 0, [], []
        for batch, slot, count in segment.spans:
            bases.append(self._filling.memory(batch).address + part.offset + (slot - begin) * size)
            counts.append(count)
            begin += count
        dealt = np.repeat(np.array(bases, np.int64), counts)
        dealt += np.arange(0, begin * size, size)
        return dealt[segment.places].view(np.uint64)

    def _scatter(self, plan: Scatter, low: int, high: int, countdown: _Countdown) -> None:
        self._engine.scatter(plan, low, high)
        countdown.count()

    def _stage(self, part: Part, segment: Segment, countdown: _Countdown) -> None:
        if part.name == ROWS:
            values: npt.NDArray[Any] = segment.rows
        elif self._small is not None and part.name in self._small:
            values = np.empty((len(segment.rows), *part.row_shape), part.dtype)
            self._small.gather(part.name, segment.rows, values)
        else:
            values = self._engine.read(part.name, segment.rows)
        for (batch, slot, count), share in segment.deal(values):
            self._filling.memory(batch).arrays[part.name][slot : slot + count] = share
        countdown.count()

    def _decode(self, part: Part, segment: Segment, low: int, high: int, countdown: _Countdown) -> None:
        """Rows of one chunk that passed through filters, as they are stored."""
        chunk, rows = self._engine.decode(part.name, segment.rows[low:high], keep=self._keep)
        # Sorted by place, each batch's rows are together.
        order = np.argsort(segment.places[low:high])
        places, rows = segment.places[low:high][order], rows[order]
        owners, slots = segment.slots(places)
        heads = np.flatnonzero(np.append(True, np.diff(owners) != 0)).tolist()
        large = part.row_bytes >= _LARGE_BYTES
        for begin, end in itertools.pairwise([*heads, len(places)]):
            batch = segment.spans[owners[begin]][0]
            array = self._filling.memory(batch).arrays[part.name].view(chunk.dtype)
            if large:
                for slot, row in zip(slots[begin:end].tolist(), rows[begin:end].tolist(), strict=True):
                    array[slot] = chunk[row]
            else:
                array[slots[begin:end]] = chunk[rows[begin:end]]
        countdown.count()

    def _copy(self, part: Part, segment: Segment, low: int, high: int, countdown: _Countdown) -> None:
        """Large rows that only the HDF5 library can read, one by one to their places."""
        values = self._engine.read(part.name, segment.rows[low:high])
        owners, slots = segment.slots(segment.places[low:high])
        for value, owner, slot in zip(values, owners.tolist(), slots.tolist(), strict=True):
            self._filling.memory(segment.spans[owner][0]).arrays[part.name][slot] = value
        countdown.count()

    def _gather(self, span: Span, rows: npt.NDArray[np.int64], resident: ResidentRows, arrived: Arrived) -> None:
        batch, slot, count = span
        for name, array in self._filling.memory(batch).arrays.items():
            if name == ROWS:
                array[slot : slot + count] = rows
            else:
                resident.gather(name, rows, array[slot : slot + count])
        arrived([span])


def _ascending(rows: npt.NDArray[np.int64]) -> list[int]:
    """Where rows begin to ascend anew, and their end."""
    return [0, *(np.flatnonzero(np.diff(rows) < 0) + 1).tolist(), len(rows)]


def _cut(edges: list[int], row_bytes: int, *, whole: bool = True) -> list[int]:
    """Cut runs into tasks of about `TASK_BYTES`: numbers of the runs they begin with, and the end.

    Parameters
    ----------
    edges : list of int
        (runs + 1,): rows at which runs begin, and the end.
    row_bytes : int
    whole : bool
        Several whole runs may make a task. Else each run is cut by itself, and rows are given instead of runs.
    """
    most = max(1, TASK_BYTES // row_bytes)
    if not whole:
        cuts = [cut for low, high in itertools.pairwise(edges) for cut in range(low, high, most)]
        return [*cuts, edges[-1]]
    cuts = [0]
    for number in range(1, len(edges) - 1):
        if edges[number + 1] - edges[cuts[-1]] > most:
            cuts.append(number)
    return [*cuts, len(edges) - 1]
