"""The order of an epoch: chunks are permuted, then rows are shuffled within a window of chunks.

The order depends only on a plan (`OrderPlan`) and the epoch. Its terms:

- line: all rows of the epoch in one sequence: the chunks in permuted order, concatenated. Without a shuffle, the chunks
  are in the file's order. With the shuffle "full", the line is a permutation of the single rows instead.
- stream: one of `streams` equal parts of the line. If the rows do not divide evenly, the line is padded by repeating
  its beginning, or trimmed. With the shuffle "window", the rows of each `window` consecutive chunks of a stream are
  shuffled.
- lane: a group of streams; stream s belongs to lane s mod `lanes`. Batch t takes the same number of rows from each
  stream of lane t mod `lanes`.
- rank: one of `num_replicas` processes. Each owns ``streams / num_replicas`` streams, the same number from each lane.
- slot: the index of a row within its batch.
- chunk group: consecutive chunks of the line that are read together.

Consequently the rows of a step are the same for every number of ranks with the same `streams`, `lanes` and global batch
(batch size x ranks).

With every shuffle but "full", each chunk is read by one rank. Exceptions are chunks that the end of a stream cuts, and
chunks that padding repeats. If DataLoader workers take batches in turn and their number divides `lanes`, each chunk is
also read by one worker, with the same exceptions.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import OptionsError
from h5pack.order.permutation import TABLE_ROWS, Permutation, derive_key
from h5pack.order.row_ranges import EpochRows, Rows, RowSampler
from h5pack.system.arrays import shuffled
from h5pack.system.parameters import flags, invalid, whole_number
from h5pack.system.properties import cached_property

ORDER_VERSION = 1
SHUFFLES = ("window", "full", "chunk", False)
DEFAULT_WINDOW = 16
# The fourth part of each random key, so that keys for different purposes differ; the first part is `ORDER_VERSION`. Do
# not change these numbers: the order of every seed would change.
_CHUNKS, _ROWS, _WINDOW, _DRAWS = 1, 2, 3, 4


Span = tuple[int, int, int]
"""A run of consecutive rows of one batch: (batch number, first slot, number of slots)."""


@dataclass(frozen=True)
class ChunkGroup:
    """Rows that are read together, such as those of a shuffle window, and the batches and slots that they go to.

    The slots of all spans, in the order of `spans`, are numbered from 0. ``rows[i]`` goes to the slot with the number
    ``positions[i]``.
    """

    rows: Rows  # int64, (n,): rows of the file, ascending within each chunk
    indices: Rows  # int64, (n,): the dataset indices that a sampler yields for `rows`
    positions: Rows  # int64, (n,): a permutation of 0 to n - 1, see above
    spans: list[Span]  # in ascending order of batches
    # Rows of the file that later groups need. They are to be read into the page cache when this group is planned. Each
    # array is int64 (n,), ascending.
    upcoming: tuple[Rows, ...] = ()

    def split_by_batch(self, values: npt.NDArray[Any]) -> Iterator[tuple[Span, npt.NDArray[Any]]]:
        """Yield each span (see `spans`) with the values of its rows; `values`, (n, ...), are in the order of `rows`."""
        ordered = self.in_slot_order(values)
        start = 0
        for span in self.spans:
            yield span, ordered[start : start + span[2]]
            start += span[2]

    def in_slot_order(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Reorder values, (n, ...), from the order of `rows` to the order of the slots to which the rows go."""
        ordered = np.empty_like(values)
        ordered[self.positions] = values
        return ordered

    @cached_property
    def slots(self) -> tuple[Rows, Rows]:
        """For each of `rows`: the index of its span in `spans`, and its slot in the batch; both int64, (n,)."""
        _, firsts, counts = np.array(self.spans).T
        ends = np.cumsum(counts)
        owners = np.searchsorted(ends, self.positions, "right")
        return owners, self.positions + (firsts + counts - ends)[owners]

    @property
    def first(self) -> int:
        """The number of the first batch with rows of this group."""
        return self.spans[0][0]

    @property
    def last(self) -> int:
        """The number of the last batch with rows of this group."""
        return self.spans[-1][0]


@dataclass(frozen=True)
class BatchPlan(ABC):
    """The batches of a rank, and the chunk groups in which their rows are read: all that samplers and loaders need.

    It has all parameters of an order except the epoch. The abstract members describe every epoch: all epochs have the
    same number of batches, and batches with the same number have the same number of rows.
    """

    rows: RowSampler
    batch_size: int  # rows of a full batch of this rank
    _: KW_ONLY
    shuffle: str | bool = "window"  # one of `SHUFFLES`; True is converted to "window"
    seed: int = 0
    window: int = DEFAULT_WINDOW  # chunks per shuffle window
    drop_last: bool = False  # whether rows that do not fill the last batch are left out
    rank: int = 0
    num_replicas: int = 1

    def __post_init__(self) -> None:
        # A type is text, because the modules of plans have `from __future__ import annotations`.
        for name in (field.name for field in fields(self) if field.type == "int"):
            minimum = {"seed": 0, "rank": None}.get(name, 1)
            # This also converts NumPy integers, because a saved state must contain Python ints only.
            object.__setattr__(self, name, whole_number(name, getattr(self, name), minimum))
        if isinstance(self.shuffle, (bool, np.bool_)):
            object.__setattr__(self, "shuffle", "window" if self.shuffle else False)
        elif not isinstance(self.shuffle, str) or self.shuffle not in SHUFFLES:
            raise invalid("shuffle", self.shuffle, "give 'window', 'full', 'chunk' or False")
        object.__setattr__(self, "drop_last", flags(drop_last=self.drop_last)[0])
        if not 0 <= self.rank < self.num_replicas:
            raise OptionsError(
                f"rank is {self.rank}; give a number from 0 to {self.num_replicas - 1} (num_replicas - 1)",
                parameters=("rank", "num_replicas"),
            )

    @property
    @abstractmethod
    def num_batches(self) -> int:
        """Number of batches of this rank per epoch."""

    @abstractmethod
    def batch_rows(self, batch: int) -> int:
        """Return the number of rows of one batch."""

    @property
    @abstractmethod
    def max_group_batches(self) -> int:
        """Upper bound on the number of batches from the first batch of a chunk group to the last batch of the group.

        A loader has memory for at least this number of batches, and `merge_groups` merges up to this number.
        """

    @property
    @abstractmethod
    def is_sequential(self) -> bool:
        """Whether a chunk group has no rows of batches before the last batch of the previous group.

        A loader can then fill the batches one after the other.
        """

    @property
    @abstractmethod
    def reads_again(self) -> bool:
        """Whether most chunks have rows in several chunk groups, so that decoded chunks are worth keeping."""

    @property
    @abstractmethod
    def repeats_rows(self) -> bool:
        """Whether an epoch may have several copies of a row, not counting copies that make streams equally long."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return values that are saved with a state. A state can be loaded only if its values equal these.

        The dict is JSON-serializable.
        """

    @abstractmethod
    def chunk_groups(self, epoch: int, first: int = 0) -> Iterator[ChunkGroup]:
        """Yield the rows of the epoch, starting with batch `first`, one chunk group at a time.

        The groups come in ascending order of their first batch. So when a group is yielded whose first batch is b, all
        rows of the batches before b have been yielded.
        """


@dataclass(frozen=True, kw_only=True)
class OrderPlan(BatchPlan):
    """The order of a shuffle window, with streams and lanes. The module's docstring defines the terms.

    `batch_size` must be a multiple of `step_streams`, and `drop_last` leaves out the last batch of each lane if it is
    smaller.
    """

    trim: bool = False  # whether rows are left out to make the streams equally long; otherwise rows are repeated
    streams: int = 1  # a multiple of ``num_replicas * lanes``
    lanes: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streams % (self.num_replicas * self.lanes):
            raise OptionsError(
                f"{self.streams} streams cannot be divided among {self.num_replicas} ranks x {self.lanes} lanes; give "
                f"streams= a multiple of {self.num_replicas * self.lanes}",
                parameters=("streams", "lanes"),
            )
        if self.batch_size % self.step_streams:
            raise OptionsError(
                f"a batch of {self.batch_size} rows cannot be divided among the {self.step_streams} streams that it "
                f"takes rows from; give a batch_size that is a multiple of {self.step_streams}, or fewer streams",
                parameters=("batch_size", "streams"),
            )

    @cached_property
    def step_streams(self) -> int:
        """Number of streams from which each batch of this rank takes rows."""
        return self.streams // (self.num_replicas * self.lanes)

    @cached_property
    def stream_rows(self) -> int:
        """Rows per stream, including rows that are repeated as padding."""
        whole, rest = divmod(self.rows.count, self.streams)
        return whole + (1 if rest and not self.trim else 0)

    @cached_property
    def stream_share(self) -> int:
        """Number of rows that a full batch takes from each of its streams."""
        return self.batch_size // self.step_streams

    @cached_property
    def rank_rows(self) -> int:
        """Number of rows of this rank per epoch. A smaller last batch counts even if `drop_last` leaves it out."""
        return self.stream_rows * (self.streams // self.num_replicas)

    @cached_property
    def num_batches(self) -> int:
        share = self.stream_share
        steps = self.stream_rows // share if self.drop_last else -(-self.stream_rows // share)
        return steps * self.lanes

    def batch_rows(self, batch: int) -> int:
        return self.step_streams * min(self.stream_share, self.stream_rows - batch // self.lanes * self.stream_share)

    @cached_property
    def max_group_batches(self) -> int:
        if self.shuffle == "full":
            return 1
        rows = min(self.rows.max_rows(self.group_chunks), self.stream_rows)
        return min(self.num_batches, (-(-rows // self.stream_share) + 1) * self.lanes)

    @cached_property
    def group_chunks(self) -> int:
        """Number of chunks per chunk group.

        With the shuffle "window", a group is a window. With "chunk" and False, a group has as many chunks as fit into
        `stream_share` rows, but at least one. "full" does not use this number.
        """
        return self.window if self.shuffle == "window" else max(1, self.stream_share // max(1, self.rows.max_rows(1)))

    @cached_property
    def is_sequential(self) -> bool:
        return self.step_streams * self.lanes == 1

    @property
    def reads_again(self) -> bool:
        return self.shuffle == "full"

    @property
    def repeats_rows(self) -> bool:
        return self.rows.repeats_rows

    def identity(self) -> dict[str, Any]:
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
            "global_batch": self.batch_size * self.num_replicas,
        }

    def chunk_groups(self, epoch: int, first: int = 0) -> Iterator[ChunkGroup]:
        if self.rows.count:
            sequence, places = _ChunkSequence(self, epoch), range(self.step_streams)
            streams = [self._in_batches(sequence, lane, place, first) for place in places for lane in range(self.lanes)]
            yield from heapq.merge(*streams, key=lambda group: group.first)

    def _in_batches(self, sequence: _ChunkSequence, lane: int, place: int, first: int) -> Iterator[ChunkGroup]:
        """Yield the chunk groups of a stream of this rank, from batch `first` on.

        `place` is the number of the stream among this rank's streams of the lane `lane`.
        """
        share = self.stream_share
        stream = (self.rank * self.step_streams + place) * self.lanes + lane
        start = max(0, -(-(first - lane) // self.lanes)) * share
        end = min(self.stream_rows, self.num_batches // self.lanes * share)
        for rows, indices, positions, low in sequence.groups(stream, start):
            high = low + len(rows)
            if low < start or high > end:
                # Leave out the rows of batches before `first`, and the rows of a smaller last batch that is dropped.
                low, skipped, high = max(low, start), max(0, start - low), min(high, end)
                keep = (positions >= skipped) & (positions < skipped + high - low)
                rows, indices, positions = rows[keep], indices[keep], positions[keep] - skipped
            spans = []
            for step in range(low // share, -(-high // share)):
                # The last batch may be smaller, and then takes fewer rows from each stream.
                step_share = min(share, self.stream_rows - step * share)
                first, last = max(low, step * share), min(high, (step + 1) * share)
                spans.append((step * self.lanes + lane, first - step * share + place * step_share, last - first))
            if spans:
                yield ChunkGroup(rows, indices, positions, spans)


class _ChunkSequence:
    """The line of one epoch (see the module's docstring). After the last chunk, the line begins again with the first.

    Chunks are numbered along the line. A chunk that is repeated gets a new number. Offsets on the line count rows.
    """

    def __init__(self, plan: OrderPlan, epoch: int) -> None:
        self.plan, self.epoch = plan, epoch
        self.rows: EpochRows = plan.rows.epoch_rows(self._key(_DRAWS))
        permuted = plan.shuffle in ("window", "chunk")
        self._permutation = Permutation(self.rows.chunk_count, self._key(_CHUNKS)) if permuted else None
        self._edges: Rows | None = None
        self._short: list[tuple[int, int]] = []
        if self.rows.short_chunks is not None and (not permuted or self.rows.chunk_count > TABLE_ROWS):
            # Only a range's first and last chunk can be shorter, so the start of any chunk is computed without a table.
            for chunk, missing in self.rows.short_chunks:
                number = chunk
                if self._permutation is not None:
                    number = int(self._permutation.positions_of(np.array([chunk]))[0])
                self._short.append((number, missing))
        else:
            lengths = self.rows.chunk_lengths()
            if self._permutation is not None:
                lengths = lengths[self._permutation.items_at(np.arange(self.rows.chunk_count))]
            self._edges = np.concatenate(([0], np.cumsum(lengths)))

    def _key(self, *parts: int) -> int:
        return derive_key(ORDER_VERSION, self.plan.seed, self.epoch, *parts)

    def _starts(self, numbers: Rows) -> Rows:
        """Return the offsets on the line, int64 (n,), at which the chunks with these numbers start."""
        rounds, inside = np.divmod(numbers, self.rows.chunk_count)
        if self._edges is not None:
            found: Rows = rounds * self.rows.count + self._edges[inside]
            return found
        starts: Rows = rounds * self.rows.count + inside * self.rows.chunk_rows
        for number, missing in self._short:
            starts -= missing * (number < inside)
        return starts

    def _find(self, offset: int) -> int:
        """Return the number of the chunk that contains an offset on the line."""
        rounds, inside = divmod(offset, self.rows.count)
        if self._edges is not None:
            number = int(np.searchsorted(self._edges, inside, "right")) - 1
        else:
            # If all chunks were full, the offset would be in chunk ``inside // chunk_rows``. The two short chunks make
            # later chunks start earlier, by less than two full chunks in all. So the offset is in this chunk or in one
            # of the next two.
            near = inside // self.rows.chunk_rows + np.arange(3)
            near = near[near < self.rows.chunk_count]
            number = int(near[np.searchsorted(self._starts(near), inside, "right") - 1])
        return rounds * self.rows.chunk_count + number

    def groups(self, stream: int, first: int) -> Iterator[tuple[Rows, Rows, Rows, int]]:
        """Yield each chunk group of a stream: (rows, indices, positions, the group's offset in the stream).

        The first three are those of a `ChunkGroup`. The first group contains offset `first` of the stream, and may
        start before this offset.
        """
        length = self.plan.stream_rows
        if first >= length:
            return
        if self.plan.shuffle == "full":
            yield from self._fully_shuffled(stream * length, first, length)
            return
        start, end = stream * length, (stream + 1) * length
        origin = self._find(start)
        chunks = min(self.plan.group_chunks, self._find(end - 1) - origin + 1)
        window = (self._find(start + first) - origin) // chunks
        while True:
            numbers = origin + window * chunks + np.arange(chunks + 1)
            edges = np.clip(self._starts(numbers), start, end)
            low, high = int(edges[0]), int(edges[-1])
            if low >= end:
                return
            rows, indices = self._rows_between(numbers[:-1], edges)
            positions = np.arange(high - low)
            if self.plan.shuffle == "window":
                positions = shuffled(high - low, self._key(_WINDOW, stream, window))
            yield rows, indices, positions, low - start
            window += 1

    def _rows_between(self, numbers: Rows, edges: Rows) -> tuple[Rows, Rows]:
        """Return rows and indices at offsets ``edges[i]`` to ``edges[i + 1] - 1``, all in chunk ``numbers[i]``."""
        starts = self._starts(numbers)
        chunks = numbers % self.rows.chunk_count
        if self._permutation is not None:
            chunks = self._permutation.items_at(chunks)
        some = edges[1:] > edges[:-1]
        return self.rows.rows_in_chunks(chunks[some], (edges[:-1] - starts)[some], (edges[1:] - starts)[some])

    def _fully_shuffled(self, start: int, first: int, length: int) -> Iterator[tuple[Rows, Rows, Rows, int]]:
        """Yield the groups of a fully shuffled stream: each has the stream's rows of one batch, in the file's order.

        The elements are those of `groups`. `start` is the offset of the stream on the line; `first` and `length` count
        from there.
        """
        permutation = Permutation(self.rows.count, self._key(_ROWS))
        for low in range(first, length, self.plan.stream_share):
            offsets = np.arange(low, min(low + self.plan.stream_share, length))
            rows, indices = self.rows.rows_at(permutation.items_at((start + offsets) % self.rows.count))
            order = np.argsort(rows, kind="stable")
            yield rows[order], indices[order], order, low


def merge_groups(groups: Iterable[ChunkGroup], max_rows: int, max_batches: int) -> Iterator[ChunkGroup]:
    """Merge consecutive chunk groups into larger ones; the rows keep their batches and slots.

    A merged group has at most `max_rows` rows, and at most `max_batches` batches from the first to the last. A group
    that is already larger is yielded unchanged.
    """
    waiting: list[ChunkGroup] = []
    rows = 0
    for group in groups:
        fits = waiting and (
            rows + len(group.rows) <= max_rows
            # With several streams the next group may have rows of earlier batches, but spans must ascend.
            and group.first >= waiting[-1].last
            and group.last - waiting[0].first < max_batches
        )
        if waiting and not fits:
            yield _merged(waiting)
            waiting, rows = [], 0
        waiting.append(group)
        rows += len(group.rows)
        if rows >= max_rows:
            # Yield here, so that the next group is not computed before it is needed.
            yield _merged(waiting)
            waiting, rows = [], 0
    if waiting:
        yield _merged(waiting)


def _merged(groups: list[ChunkGroup]) -> ChunkGroup:
    if len(groups) == 1:
        return groups[0]
    spans: list[Span] = []
    for group in groups:
        for batch, slot, count in group.spans:
            last = spans[-1] if spans else (-1, 0, 0)
            if last[0] == batch and last[1] + last[2] == slot:
                spans[-1] = batch, last[1], last[2] + count
            else:
                spans.append((batch, slot, count))
    starts = np.cumsum([0, *(len(group.rows) for group in groups)])
    return ChunkGroup(
        np.concatenate([group.rows for group in groups]),
        np.concatenate([group.indices for group in groups]),
        np.concatenate([group.positions + start for group, start in zip(groups, starts, strict=False)]),
        spans,
        tuple(rows for group in groups for rows in group.upcoming),
    )
