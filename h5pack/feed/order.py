"""In which order rows are read: a pure function of a plan and an epoch.

The chunks are permuted and laid end to end: the *line*. The line is cut into `streams` parts of equal length, padded by
going round to its beginning, or trimmed. Inside a stream, `window` pieces of chunks at a time are shuffled. Stream s is
in *lane* s mod `lanes`; step t takes as many rows from each stream of lane t mod `lanes`, and rank r of w owns
``streams / w`` of them, equally many of each lane. So the rows of a step are the same for every number of ranks, each
chunk is read by one rank (but for those that a stream's end cuts in two), and, where a DataLoader's workers take the
batches in turns and their number divides `lanes`, by one worker.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import OptionsError
from h5pack.feed.permutation import TABLE_ROWS, Permutation, derive_key, shuffled
from h5pack.feed.row_set import RowSet, SpanRows

ORDER_VERSION = 1
SHUFFLES = ("window", "full", "chunk", False)
DEFAULT_WINDOW = 16
_CHUNKS, _ROWS, _WINDOW = 1, 2, 3

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Segment:
    """Rows that are read together, and their places in the batches.

    Attributes
    ----------
    rows : ndarray
        int64, (n,): rows of the file, ascending within each chunk.
    indices : ndarray
        int64, (n,): what a sampler calls them.
    batches, slots : ndarray
        int64, (n,): the batch of each, and its place there.
    first, last : int
        The first and the last batch among them.
    """

    rows: Rows
    indices: Rows
    batches: Rows
    slots: Rows
    first: int
    last: int


@dataclass(frozen=True)
class OrderPlan:
    """All that an order depends on but the epoch.

    Attributes
    ----------
    rows : RowSet
    batch_size : int
        Rows of this rank's full batches.
    shuffle : str or False
        One of `SHUFFLES`.
    seed : int
    window : int
        Chunks that are shuffled together.
    drop_last : bool
        Trim the streams to equal length, and leave out a last smaller batch; else pad, and keep it.
    rank, world_size : int
    streams, lanes : int
    interleaved : bool
        Take the rows of this rank's streams one by one in turns, and cut that into batches.

    Raises
    ------
    OptionsError
        If they do not fit together.
    """

    rows: RowSet
    batch_size: int
    shuffle: str | bool = "window"
    seed: int = 0
    window: int = DEFAULT_WINDOW
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    streams: int = 1
    lanes: int = 1
    interleaved: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "window", "world_size", "streams", "lanes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionsError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.shuffle not in SHUFFLES:
            raise OptionsError(f"shuffle {self.shuffle!r} is none of 'window', 'full', 'chunk', False")
        if not 0 <= self.rank < self.world_size:
            raise OptionsError(f"rank {self.rank} is not one of 0 to {self.world_size - 1} (world_size - 1)")
        if self.streams % (self.world_size * self.lanes):
            raise OptionsError(
                f"{self.streams} streams do not divide into {self.world_size} ranks of {self.lanes} lanes; give a "
                f"multiple of {self.world_size * self.lanes}"
            )
        if not self.interleaved and self.batch_size % self.step_streams:
            raise OptionsError(
                f"a batch of {self.batch_size} rows does not divide into {self.step_streams} streams a step; give a "
                f"multiple of {self.step_streams}, or fewer streams"
            )

    @property
    def step_streams(self) -> int:
        """Streams that a batch of this rank takes rows from."""
        return self.streams // (self.world_size * self.lanes)

    @property
    def stream_rows(self) -> int:
        """Rows of each stream, those repeated as padding included."""
        whole, rest = divmod(self.rows.count, self.streams)
        return whole + (1 if rest and not self.drop_last else 0)

    @property
    def take(self) -> int:
        """Rows that a full batch takes from each of its streams."""
        return self.batch_size // self.step_streams

    @property
    def rank_rows(self) -> int:
        """Rows of this rank, before a last smaller batch is left out."""
        return self.stream_rows * (self.streams // self.world_size)

    @property
    def batches(self) -> int:
        """Batches an epoch."""
        if self.interleaved:
            return -(-self.rank_rows // self.batch_size)
        steps = self.stream_rows // self.take if self.drop_last else -(-self.stream_rows // self.take)
        return steps * self.lanes

    def batch_rows(self, batch: int) -> int:
        """Rows of one batch."""
        if self.interleaved:
            return min(self.batch_size, self.rank_rows - batch * self.batch_size)
        return self.step_streams * min(self.take, self.stream_rows - batch // self.lanes * self.take)

    @property
    def span(self) -> int:
        """Batches that one segment reaches over, at most."""
        if self.shuffle == "full":
            return 1
        rows = min((1 if self.shuffle is False else self.pieces) * self.rows.unit_rows, self.stream_rows)
        each = self.batch_size if self.interleaved else self.take
        return min(self.batches, (-(-rows // each) + 1) * self.lanes)

    @property
    def pieces(self) -> int:
        """Pieces of chunks a segment."""
        return self.window if self.shuffle == "window" else 1

    def identity(self) -> dict[str, Any]:
        """What must be the same for a saved state to make sense; numbers and texts only."""
        return {
            "order": ORDER_VERSION,
            **self.rows.identity(),
            "shuffle": self.shuffle,
            "seed": self.seed,
            "window": self.window if self.shuffle == "window" else 1,
            "drop_last": self.drop_last,
            "streams": self.streams,
            "lanes": self.lanes,
            "global_batch": None if self.interleaved else self.batch_size * self.world_size,
        }

    def segments(self, epoch: int, first: int = 0) -> Iterator[Segment]:
        """The epoch's rows from batch `first` on, in an order in which no batch waits for a later one's segment."""
        if not self.rows.count:
            return
        line = _Line(self, epoch)
        waiting = []
        for number, (stream, lane, place) in enumerate(self._own_streams()):
            begin = self._first_row(first, lane, place)
            segments = self._placed(line.segments(stream, begin), lane, place, first)
            head = next(segments, None)
            if head is not None:
                waiting.append((head.first, number, head, segments))
        heapq.heapify(waiting)
        while waiting:
            _, number, head, segments = waiting[0]
            yield head
            following = next(segments, None)
            if following is None:
                heapq.heappop(waiting)
            else:
                heapq.heapreplace(waiting, (following.first, number, following, segments))

    def _own_streams(self) -> Iterator[tuple[int, int, int]]:
        """This rank's streams, with the lane of each, and its place among those of its lane."""
        for place in range(self.step_streams):
            for lane in range(self.lanes):
                yield (self.rank * self.step_streams + place) * self.lanes + lane, lane, place

    def _first_row(self, batch: int, lane: int, place: int) -> int:
        """The first row of a stream that batch `batch` or a later one takes."""
        if self.interleaved:
            return max(0, -(-(batch * self.batch_size - place) // self.step_streams))
        return max(0, -(-(batch - lane) // self.lanes)) * self.take

    def _placed(
        self, pieces: Iterator[tuple[Rows, Rows, Rows]], lane: int, place: int, first: int
    ) -> Iterator[Segment]:
        """Segments out of rows and their places in a stream."""
        take, end = self.take, self.batches
        for rows, indices, at in pieces:
            if self.interleaved:
                batches, slots = np.divmod(at * self.step_streams + place, self.batch_size)
            else:
                steps = at // take
                batches = steps * self.lanes + lane
                # The last, smaller batch takes less from each stream.
                slots = at - steps * take + place * np.minimum(take, self.stream_rows - steps * take)
            low, high = int(batches.min()), int(batches.max())
            if low < first or high >= end:
                keep = (batches >= first) & (batches < end)
                if not keep.any():
                    continue
                rows, indices, batches, slots = rows[keep], indices[keep], batches[keep], slots[keep]
                low, high = int(batches.min()), int(batches.max())
            yield Segment(rows, indices, batches, slots, low, high)


class _Line:
    """One epoch's permuted chunks, laid end to end; beyond its end it begins again."""

    def __init__(self, plan: OrderPlan, epoch: int) -> None:
        self.plan, self.epoch, self.rows = plan, epoch, plan.rows
        mixed = plan.shuffle in ("window", "chunk")
        self._permutation = Permutation(plan.rows.chunks, self._key(_CHUNKS)) if mixed else None
        self._edges: Rows | None = None
        self._lacks: list[tuple[int, int]] = []
        if isinstance(plan.rows, SpanRows) and (not mixed or plan.rows.chunks > TABLE_ROWS):
            # Only the first and the last chunk are shorter, so where a chunk starts is arithmetic.
            for chunk, lack in plan.rows.lacks:
                where = chunk
                if self._permutation is not None:
                    where = int(self._permutation.where(np.array([chunk]))[0])
                self._lacks.append((where, lack))
        else:
            lengths = plan.rows.lengths()
            if self._permutation is not None:
                lengths = lengths[self._permutation.at(np.arange(plan.rows.chunks))]
            self._edges = np.concatenate(([0], np.cumsum(lengths)))

    def _key(self, *parts: int) -> int:
        return derive_key(ORDER_VERSION, self.plan.seed, self.epoch, *parts)

    def _start(self, place: int) -> int:
        """Where the chunk at a place of the line starts."""
        rounds, inside = divmod(place, self.rows.chunks)
        if self._edges is not None:
            start = int(self._edges[inside])
        else:
            start = inside * self.rows.unit_rows - sum(lack for where, lack in self._lacks if where < inside)
        return rounds * self.rows.count + start

    def _find(self, row: int) -> int:
        """The place of the chunk that holds a row of the line."""
        rounds, inside = divmod(row, self.rows.count)
        base = rounds * self.rows.chunks
        if self._edges is not None:
            return base + int(np.searchsorted(self._edges, inside, "right")) - 1
        place = inside // self.rows.unit_rows
        while place + 1 < self.rows.chunks and self._start(place + 1) <= inside:
            place += 1
        return base + place

    def segments(self, stream: int, begin: int) -> Iterator[tuple[Rows, Rows, Rows]]:
        """Rows, indices and places in the stream, from its row `begin` on or a little before it."""
        length = self.plan.stream_rows
        if self.plan.shuffle == "full":
            yield from self._full(stream * length, begin, length)
            return
        start, end = stream * length, (stream + 1) * length
        if begin >= length:
            return
        origin, pieces = self._find(start), self.plan.pieces
        window = (self._find(start + begin) - origin) // pieces
        while True:
            head = origin + window * pieces
            low, high = max(start, self._start(head)), min(end, self._start(head + pieces))
            if low >= end:
                return
            taken = []
            for place in range(head, head + pieces):
                if self._start(place) >= high:
                    break
                taken.append(self._piece(place, low, high))
            rows, indices = (np.concatenate(parts) for parts in zip(*taken, strict=True))
            at = np.arange(len(rows))
            if self.plan.shuffle == "window":
                at = shuffled(len(rows), self._key(_WINDOW, stream, window))
            yield rows, indices, at + (low - start)
            window += 1

    def _piece(self, place: int, low: int, high: int) -> tuple[Rows, Rows]:
        """The part of a chunk that lies between two rows of the line."""
        begin, end = self._start(place), self._start(place + 1)
        first, last = max(low, begin) - begin, min(high, end) - begin
        inside = place % self.rows.chunks
        chunk = inside if self._permutation is None else int(self._permutation.at(np.array([inside]))[0])
        return self.rows.take(chunk, first, max(first, last))

    def _full(self, start: int, begin: int, length: int) -> Iterator[tuple[Rows, Rows, Rows]]:
        """Rows permuted one by one, a batch's share at a time, each share in the file's order."""
        permutation = Permutation(self.rows.count, self._key(_ROWS))
        each = self.plan.batch_size if self.plan.interleaved else self.plan.take
        for low in range(begin, length, each):
            at = np.arange(low, min(low + each, length))
            rows, indices = self.rows.pick(permutation.at((start + at) % self.rows.count))
            order = np.argsort(rows, kind="stable")
            yield rows[order], indices[order], at[order]
