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
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import OptionsError
from h5pack.feed.permutation import TABLE_ROWS, Permutation, derive_key, shuffled
from h5pack.feed.row_set import EpochRows, RowSource, SpanRows

ORDER_VERSION = 1
SHUFFLES = ("window", "full", "chunk", False)
DEFAULT_WINDOW = 16
_CHUNKS, _ROWS, _WINDOW, _DRAWS = 1, 2, 3, 4

Rows = npt.NDArray[np.int64]


def whole_number(name: str, value: Any, least: int | None) -> int:
    """An option's value as Python's int.

    Raises
    ------
    OptionsError
        If it is no whole number, or below `least`.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise OptionsError(f"{name} is {value!r}; it must be a whole number{bound}")
    return operator.index(value)


@dataclass(frozen=True)
class Segment:
    """Rows that are read together, and their places in the batches.

    Attributes
    ----------
    rows : ndarray
        int64, (n,): rows of the file, ascending within each chunk.
    indices : ndarray
        int64, (n,): what a sampler calls them.
    places : ndarray
        int64, (n,): a permutation; places 0 to n - 1 are dealt out to the spans, one after the other.
    spans : list of (int, int, int)
        Batch, first slot in it, and how many slots; batches ascending.
    """

    rows: Rows
    indices: Rows
    places: Rows
    spans: list[tuple[int, int, int]]

    def deal(self, values: npt.NDArray[Any]) -> Iterator[tuple[tuple[int, int, int], npt.NDArray[Any]]]:
        """The spans, each with its share of `values`, (n, ...), which are in the order of `rows`."""
        dealt = np.empty_like(values)
        dealt[self.places] = values
        begin = 0
        for span in self.spans:
            yield span, dealt[begin : begin + span[2]]
            begin += span[2]

    def slots(self, places: Rows) -> tuple[Rows, Rows]:
        """Of places, int64 (n,): the number of each one's span, and its slot in that span's batch; int64, (n,)."""
        _, firsts, counts = np.array(self.spans).T
        ends = np.cumsum(counts)
        owners = np.searchsorted(ends, places, "right")
        return owners, places + (firsts + counts - ends)[owners]

    @property
    def first(self) -> int:
        """The first batch with rows of this segment."""
        return self.spans[0][0]

    @property
    def last(self) -> int:
        """The last batch with rows of this segment."""
        return self.spans[-1][0]


@dataclass(frozen=True)
class OrderPlan:
    """All that an order depends on but the epoch.

    Attributes
    ----------
    rows : RowSource
    batch_size : int
        Rows of this rank's full batches.
    shuffle : str or False
        One of `SHUFFLES`.
    seed : int
    window : int
        Chunks that are shuffled together.
    trim : bool
        Trim the streams to equal length; else pad them.
    drop_last : bool
        Leave out a last smaller batch.
    rank, world_size : int
    streams, lanes : int

    Raises
    ------
    OptionsError
        If they do not fit together.
    """

    rows: RowSource
    batch_size: int
    shuffle: str | bool = "window"
    seed: int = 0
    window: int = DEFAULT_WINDOW
    trim: bool = False
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    streams: int = 1
    lanes: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "window", "world_size", "streams", "lanes", "seed", "rank"):
            least = None if name in ("seed", "rank") else 1
            # numpy's whole numbers, too; a saved state holds Python's.
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if self.shuffle not in SHUFFLES:
            raise OptionsError(f"shuffle {self.shuffle!r} is none of 'window', 'full', 'chunk', False")
        if not 0 <= self.rank < self.world_size:
            raise OptionsError(f"rank {self.rank} is not one of 0 to {self.world_size - 1} (world_size - 1)")
        if self.streams % (self.world_size * self.lanes):
            raise OptionsError(
                f"{self.streams} streams do not divide into {self.world_size} ranks of {self.lanes} lanes; give a "
                f"multiple of {self.world_size * self.lanes}"
            )
        if self.batch_size % self.step_streams:
            raise OptionsError(
                f"a batch of {self.batch_size} rows does not divide into {self.step_streams} streams a step; give a "
                f"multiple of {self.step_streams}, or fewer streams"
            )

    @cached_property
    def step_streams(self) -> int:
        """Streams that a batch of this rank takes rows from."""
        return self.streams // (self.world_size * self.lanes)

    @cached_property
    def stream_rows(self) -> int:
        """Rows of each stream, those repeated as padding included."""
        whole, rest = divmod(self.rows.count, self.streams)
        return whole + (1 if rest and not self.trim else 0)

    @cached_property
    def take(self) -> int:
        """Rows that a full batch takes from each of its streams."""
        return self.batch_size // self.step_streams

    @cached_property
    def rank_rows(self) -> int:
        """Rows of this rank, before a last smaller batch is left out."""
        return self.stream_rows * (self.streams // self.world_size)

    @cached_property
    def batches(self) -> int:
        """Batches an epoch."""
        steps = self.stream_rows // self.take if self.drop_last else -(-self.stream_rows // self.take)
        return steps * self.lanes

    def batch_rows(self, batch: int) -> int:
        """Rows of one batch."""
        return self.step_streams * min(self.take, self.stream_rows - batch // self.lanes * self.take)

    @cached_property
    def span(self) -> int:
        """Batches that one segment reaches over, at most."""
        if self.shuffle == "full":
            return 1
        rows = min(self.rows.most(self.pieces), self.stream_rows)
        return min(self.batches, (-(-rows // self.take) + 1) * self.lanes)

    @cached_property
    def pieces(self) -> int:
        """Pieces of chunks a segment: a window's, or, where rows keep their order, as many as make a batch."""
        return self.window if self.shuffle == "window" else max(1, self.take // max(1, self.rows.most(1)))

    def identity(self) -> dict[str, Any]:
        """What must be the same for a saved state to make sense; numbers and texts only."""
        return {
            "order": ORDER_VERSION,
            **self.rows.identity(),
            "shuffle": self.shuffle,
            "seed": self.seed,
            "window": self.window if self.shuffle == "window" else 1,
            "trim": self.trim,
            "drop_last": self.drop_last,
            "streams": self.streams,
            "lanes": self.lanes,
            "global_batch": self.batch_size * self.world_size,
        }

    def segments(self, epoch: int, first: int = 0) -> Iterator[Segment]:
        """The epoch's rows from batch `first` on, in an order in which no batch waits for a later one's segment."""
        if not self.rows.count:
            return
        line = _Line(self, epoch)
        waiting = []
        for number, (stream, lane, place) in enumerate(self._own_streams()):
            begin = max(0, -(-(first - lane) // self.lanes)) * self.take
            segments = self._placed(line.segments(stream, begin), lane, place, begin)
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

    def _placed(
        self, pieces: Iterator[tuple[Rows, Rows, Rows, int]], lane: int, place: int, begin: int
    ) -> Iterator[Segment]:
        """Segments out of rows, their order, and where in the stream they begin."""
        take = self.take
        end = min(self.stream_rows, self.batches // self.lanes * take)
        for rows, indices, places, low in pieces:
            high = low + len(rows)
            if low < begin or high > end:
                # Batches that were consumed before, or a last one that is left out.
                low, skipped, high = max(low, begin), max(0, begin - low), min(high, end)
                keep = (places >= skipped) & (places < skipped + high - low)
                rows, indices, places = rows[keep], indices[keep], places[keep] - skipped
            spans = []
            for step in range(low // take, -(-high // take)):
                # The last, smaller batch takes less from each stream.
                share = min(take, self.stream_rows - step * take)
                first, last = max(low, step * take), min(high, (step + 1) * take)
                spans.append((step * self.lanes + lane, first - step * take + place * share, last - first))
            if spans:
                yield Segment(rows, indices, places, spans)


class _Line:
    """One epoch's permuted chunks, laid end to end; beyond its end it begins again."""

    def __init__(self, plan: OrderPlan, epoch: int) -> None:
        self.plan, self.epoch = plan, epoch
        self.rows: EpochRows = plan.rows.of_epoch(self._key(_DRAWS))
        mixed = plan.shuffle in ("window", "chunk")
        self._permutation = Permutation(self.rows.chunks, self._key(_CHUNKS)) if mixed else None
        self._edges: Rows | None = None
        self._lacks: list[tuple[int, int]] = []
        if isinstance(self.rows, SpanRows) and (not mixed or self.rows.chunks > TABLE_ROWS):
            # Only the first and the last chunk are shorter, so where a chunk starts is arithmetic.
            for chunk, lack in self.rows.lacks:
                where = chunk
                if self._permutation is not None:
                    where = int(self._permutation.where(np.array([chunk]))[0])
                self._lacks.append((where, lack))
        else:
            lengths = self.rows.lengths()
            if self._permutation is not None:
                lengths = lengths[self._permutation.at(np.arange(self.rows.chunks))]
            self._edges = np.concatenate(([0], np.cumsum(lengths)))

    def _key(self, *parts: int) -> int:
        return derive_key(ORDER_VERSION, self.plan.seed, self.epoch, *parts)

    def _starts(self, places: Rows) -> Rows:
        """Where the chunks at places of the line start."""
        rounds, inside = np.divmod(places, self.rows.chunks)
        if self._edges is not None:
            found: Rows = rounds * self.rows.count + self._edges[inside]
            return found
        starts: Rows = rounds * self.rows.count + inside * self.rows.unit_rows
        for where, lack in self._lacks:
            starts -= lack * (where < inside)
        return starts

    def _find(self, row: int) -> int:
        """The place of the chunk that holds a row of the line."""
        rounds, inside = divmod(row, self.rows.count)
        if self._edges is not None:
            place = int(np.searchsorted(self._edges, inside, "right")) - 1
        else:
            # The lacking rows move a chunk's start back by less than two chunks.
            near = inside // self.rows.unit_rows + np.arange(3)
            near = near[near < self.rows.chunks]
            place = int(near[np.searchsorted(self._starts(near), inside, "right") - 1])
        return rounds * self.rows.chunks + place

    def segments(self, stream: int, begin: int) -> Iterator[tuple[Rows, Rows, Rows, int]]:
        """Rows, indices, their order, and where in the stream they begin: from row `begin`, or a little before it."""
        length = self.plan.stream_rows
        if begin >= length:
            return
        if self.plan.shuffle == "full":
            yield from self._full(stream * length, begin, length)
            return
        start, end = stream * length, (stream + 1) * length
        origin = self._find(start)
        pieces = min(self.plan.pieces, self._find(end - 1) - origin + 1)
        window = (self._find(start + begin) - origin) // pieces
        while True:
            heads = origin + window * pieces + np.arange(pieces + 1)
            edges = np.clip(self._starts(heads), start, end)
            low, high = int(edges[0]), int(edges[-1])
            if low >= end:
                return
            rows, indices = self._pieces(heads[:-1], edges)
            places = np.arange(high - low)
            if self.plan.shuffle == "window":
                places = shuffled(high - low, self._key(_WINDOW, stream, window))
            yield rows, indices, places, low - start
            window += 1

    def _pieces(self, heads: Rows, edges: Rows) -> tuple[Rows, Rows]:
        """The rows between edges of the line, each pair of which lies in the chunk at its place."""
        begins = self._starts(heads)
        chunks = heads % self.rows.chunks
        if self._permutation is not None:
            chunks = self._permutation.at(chunks)
        some = edges[1:] > edges[:-1]
        return self.rows.take(chunks[some], (edges[:-1] - begins)[some], (edges[1:] - begins)[some])

    def _full(self, start: int, begin: int, length: int) -> Iterator[tuple[Rows, Rows, Rows, int]]:
        """Rows permuted one by one, a batch's share at a time, each share in the file's order."""
        permutation = Permutation(self.rows.count, self._key(_ROWS))
        for low in range(begin, length, self.plan.take):
            at = np.arange(low, min(low + self.plan.take, length))
            rows, indices = self.rows.pick(permutation.at((start + at) % self.rows.count))
            order = np.argsort(rows, kind="stable")
            yield rows[order], indices[order], order, low
