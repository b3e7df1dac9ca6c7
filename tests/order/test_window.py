"""Orders: each row once over all ranks, the same steps for every number of ranks, the same tail from every batch."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from h5pack.errors import OptionsError
from h5pack.order import permutation, window
from h5pack.order.row_ranges import RowRange, RowSet, RowSubset
from h5pack.order.window import ChunkGroup, OrderPlan, merge_groups

MANY = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
SOME = settings(MANY, max_examples=20)


@st.composite
def row_sets(draw: st.DrawFn, least: int = 0, most: int = 150) -> RowSet:
    """A split of a file, or chosen rows of it with repeats."""
    start, count, chunk_rows = draw(st.integers(0, 30)), draw(st.integers(least, most)), draw(st.integers(1, 12))
    if draw(st.integers(0, 2)):
        return RowRange(start, start + count, chunk_rows)
    rows = draw(st.lists(st.integers(0, draw(st.integers(0, 150))), min_size=least, max_size=most))
    return RowSubset(np.array(rows, np.int64), np.arange(len(rows)), chunk_rows)


@st.composite
def plans(draw: st.DrawFn, least: int = 0, **settings: Any) -> OrderPlan:
    """Rank 0's plan; batches take 1 to 9 rows of 1 to 3 streams."""
    num_replicas, lanes, own = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    chosen: dict[str, Any] = {
        "rows": draw(row_sets(least)),
        "batch_size": own * draw(st.integers(1, 9)),
        "shuffle": draw(st.sampled_from(["window", "full", "chunk", False])),
        "seed": draw(st.integers(0, 2**64)),
        "window": draw(st.integers(1, 5)),
        "trim": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "num_replicas": num_replicas,
        "streams": own * num_replicas * lanes,
        "lanes": lanes,
    }
    return OrderPlan(**{**chosen, **settings})


epochs = st.integers(0, 3)


@contextmanager
def arithmetic(small: bool) -> Iterator[None]:
    """Where `small`: permutations, and where a chunk starts, are computed even for a few chunks."""
    most = 2 if small else permutation.TABLE_ROWS
    with patch.object(window, "TABLE_ROWS", most), patch.object(permutation, "TABLE_ROWS", most):
        yield


def ranks(plan: OrderPlan) -> list[OrderPlan]:
    return [replace(plan, rank=rank) for rank in range(plan.num_replicas)]


def dealt(group: ChunkGroup) -> Iterator[tuple[int, int, int, int]]:
    """Batch, slot, row, and index of everything in a group."""
    sizes = [count for _, _, count in group.spans]
    assert sorted(group.positions.tolist()) == list(range(sum(sizes))) == list(range(len(group.rows)))
    assert len(group.indices) == len(group.rows)
    slots = [(batch, slot + number) for batch, slot, count in group.spans for number in range(count)]
    for place, row, index in zip(group.positions, group.rows, group.indices, strict=True):
        yield (*slots[place], int(row), int(index))


def batches(plan: OrderPlan, epoch: int = 0, first: int = 0) -> list[list[int]]:
    """Indices of each batch of a rank, from `first` on; each slot must be filled exactly once."""
    filled: dict[int, dict[int, int]] = {batch: {} for batch in range(first, plan.num_batches)}
    for group in plan.chunk_groups(epoch, first):
        for batch, slot, _, index in dealt(group):
            assert slot not in filled[batch], "two rows in one slot"
            filled[batch][slot] = index
    for batch, slots in filled.items():
        assert sorted(slots) == list(range(plan.batch_rows(batch))), "a slot is empty, or past the batch's end"
    return [[slots[slot] for slot in range(len(slots))] for slots in filled.values()]


def line(plan: OrderPlan, epoch: int) -> list[int]:
    """All rows as they lie before they are cut into streams and shuffled within windows."""
    alone = OrderPlan(
        plan.rows,
        max(1, plan.rows.count),
        shuffle="chunk" if plan.shuffle == "window" else plan.shuffle,
        seed=plan.seed,
    )
    return [index for batch in batches(alone, epoch) for index in batch]


def streams(plan: OrderPlan, epoch: int) -> list[list[int]]:
    """The rows of each stream, as all ranks together see them."""
    found: list[list[int]] = [[] for _ in range(plan.streams)]
    for one in ranks(plan):
        for number, batch in enumerate(batches(one, epoch)):
            share = len(batch) // one.step_streams
            for place in range(one.step_streams):
                stream = (one.rank * one.step_streams + place) * one.lanes + number % one.lanes
                found[stream] += batch[place * share : (place + 1) * share]
    return found


def unit_of(rows: RowSet) -> dict[int, int]:
    """The chunk of each index."""
    stored, indices = rows.rows_at(np.arange(rows.count))
    return dict(zip(indices.tolist(), (stored // rows.chunk_rows).tolist(), strict=True))


def windows(rows: list[int], starts: range, plan: OrderPlan) -> Iterator[list[int]]:
    """A stream's share of the line, cut behind each `window` pieces of chunks."""
    chunk = unit_of(plan.rows)
    # A new piece begins with another chunk, and where the line begins again.
    pieces = [
        number
        for number, place in enumerate(starts)
        if not number or chunk[rows[number]] != chunk[rows[number - 1]] or place % plan.rows.count == 0
    ]
    cuts = [*pieces[:: plan.window], len(rows)]
    for low, high in itertools.pairwise(cuts):
        yield rows[low:high]


# What an epoch holds.


@given(plans(), epochs, st.booleans())
@MANY
def test_each_stream_is_its_share_of_the_line_shuffled_in_windows(plan: OrderPlan, epoch: int, small: bool) -> None:
    with arithmetic(small):
        if not plan.rows.count:
            assert all(batches(one, epoch) == [] for one in ranks(plan))
            return
        whole, length = line(plan, epoch), plan.stream_rows
        assert sorted(whole) == list(range(plan.rows.count))
        kept = length // plan.stream_share * plan.stream_share if plan.drop_last else length
        for stream, rows in enumerate(streams(plan, epoch)):
            places = range(stream * length, (stream + 1) * length)
            expected = [whole[place % len(whole)] for place in places]
            if plan.shuffle != "window":
                assert rows == expected[:kept]
                continue
            begin = 0
            for window in windows(expected, places, plan):
                found = rows[begin : begin + len(window)]
                begin += len(window)
                if begin <= kept:
                    assert Counter(found) == Counter(window)
                else:
                    assert not Counter(found) - Counter(window)
            assert len(rows) == kept


@given(plans(drop_last=False), epochs, st.booleans())
@MANY
def test_each_row_once_over_all_ranks_as_distributed_sampler_counts(plan: OrderPlan, epoch: int, small: bool) -> None:
    with arithmetic(small):
        found = [[index for batch in batches(one, epoch) for index in batch] for one in ranks(plan)]
        count, whole = plan.rows.count, line(plan, epoch)
    theirs = DistributedSampler(range(count), plan.streams, 0, drop_last=plan.trim)  # type: ignore[arg-type]
    assert plan.stream_rows == theirs.num_samples
    assert [len(rows) for rows in found] == [plan.rank_rows] * plan.num_replicas
    seen = Counter(itertools.chain(*found))
    total = plan.streams * plan.stream_rows
    if plan.trim:
        assert 0 <= count - total < plan.streams
        assert seen == Counter(whole[:total])
    else:
        assert 0 <= total - count < plan.streams
        # What is missing to equal streams are the first rows of the line, again.
        assert seen == Counter(itertools.islice(itertools.cycle(whole), total))


@given(plans(), epochs)
@MANY
def test_batches_have_the_sizes_they_say(plan: OrderPlan, epoch: int) -> None:
    found = batches(plan, epoch)
    assert len(found) == plan.num_batches
    assert [len(batch) for batch in found] == [plan.batch_rows(number) for number in range(plan.num_batches)]
    if plan.drop_last:
        assert all(len(batch) == plan.batch_size for batch in found)
    else:
        assert sum(map(len, found)) == plan.rank_rows
        assert all(len(batch) == plan.batch_size for batch in found[: -plan.lanes])


@given(plans(), epochs)
@MANY
def test_rows_of_the_file_and_indices_go_together(plan: OrderPlan, epoch: int) -> None:
    stored, indices = plan.rows.rows_at(np.arange(plan.rows.count))
    row_of = dict(zip(indices.tolist(), stored.tolist(), strict=True))
    for group in plan.chunk_groups(epoch):
        assert [row_of[index] for index in group.indices.tolist()] == group.rows.tolist()
        if plan.rows.chunk_count > 1:
            # A single chunk may follow itself, where the line begins again.
            runs = itertools.groupby(group.rows.tolist(), key=lambda row: row // plan.rows.chunk_rows)
            assert all(run == sorted(run) for run in (list(group) for _, group in runs)), "ascending within each chunk"


def test_stored_order_is_stored_order() -> None:
    assert batches(OrderPlan(RowRange(7, 24, 5), 6, shuffle=False)) == [[*range(6)], [*range(6, 12)], [*range(12, 17)]]
    rows = RowSubset(np.array([9, 2, 30, 2, 11]), np.array([0, 1, 2, 3, 4]), 4)
    assert batches(OrderPlan(rows, 2, shuffle=False)) == [[1, 3], [0, 4], [2]]
    assert batches(OrderPlan(rows, 2, shuffle=False), epoch=5) == [[1, 3], [0, 4], [2]]


@given(plans(least=1, shuffle="chunk", streams=1, lanes=1, num_replicas=1, batch_size=7, drop_last=False), epochs)
@MANY
def test_chunk_keeps_the_stored_order_within_chunks(plan: OrderPlan, epoch: int) -> None:
    chunk = unit_of(plan.rows)
    rows = [index for batch in batches(plan, epoch) for index in batch]
    runs = [list(group) for _, group in itertools.groupby(rows, key=chunk.__getitem__)]
    assert len(runs) == plan.rows.chunk_count, "each chunk in one run"
    stored = plan.rows.rows_at(np.arange(plan.rows.count))[1].tolist()
    inside = [[index for index in stored if chunk[index] == number] for number in dict.fromkeys(map(chunk.get, stored))]
    assert sorted(runs) == sorted(inside)


@pytest.mark.parametrize("shuffle", ["window", "full", "chunk"])
def test_epochs_and_seeds_are_other_orders(shuffle: str) -> None:
    plan = OrderPlan(RowRange(0, 100, 7), 10, shuffle=shuffle, window=3)
    orders = [batches(replace(plan, seed=seed), epoch) for seed in (0, 1, 2**63) for epoch in range(20)]
    assert all(one != other for one, other in itertools.combinations(orders, 2))
    assert batches(plan, 3) == batches(replace(plan), 3)


def test_windows_mix_the_rows_of_their_chunks_and_no_others() -> None:
    plan = OrderPlan(RowRange(0, 120, 10), 40, shuffle="window", window=4)
    for batch in batches(plan):
        chunks = [index // 10 for index in batch]
        assert set(Counter(chunks).values()) == {10}
        assert len(list(itertools.groupby(chunks))) > 20, "mixed"


# Ranks and steps.


@given(
    row_sets(),
    st.sampled_from([1, 2, 3, 4, 6, 12]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from(["window", "full", "chunk", False]),
    st.booleans(),
    epochs,
)
@MANY
def test_steps_have_the_same_rows_for_every_number_of_ranks(
    rows: RowSet, per_lane: int, lanes: int, take: int, shuffle: str | bool, drop: bool, epoch: int
) -> None:
    plan = OrderPlan(
        rows,
        per_lane * take,
        shuffle=shuffle,
        seed=5,
        window=3,
        trim=drop,
        drop_last=drop,
        streams=per_lane * lanes,
        lanes=lanes,
        num_replicas=1,
    )
    steps = [Counter(batch) for batch in batches(plan, epoch)]
    for num_replicas in (w for w in range(2, per_lane + 1) if per_lane % w == 0):
        dealt_out = [
            batches(one, epoch)
            for one in ranks(replace(plan, batch_size=plan.batch_size // num_replicas, num_replicas=num_replicas))
        ]
        together = [sum(map(Counter, step), Counter()) for step in zip(*dealt_out, strict=True)]
        assert together == steps
        shares = zip(*[[len(batch) for batch in found] for found in dealt_out], strict=True)
        assert all(len(set(share)) == 1 for share in shares), "ranks wait for each other"


def cut_chunks(plan: OrderPlan, epoch: int) -> set[int]:
    """Chunks that a stream's end cuts, or that padding repeats."""
    whole, chunk, length = line(plan, epoch), unit_of(plan.rows), plan.stream_rows
    cut = set()
    for stream in range(plan.streams):
        first, end = stream * length % len(whole), (stream + 1) * length
        if first and chunk[whole[first]] == chunk[whole[first - 1]]:
            cut.add(chunk[whole[first]])
        if end > len(whole):
            cut |= {chunk[whole[place % len(whole)]] for place in range(len(whole), end)}
    return cut


@given(plans(least=1, drop_last=False), epochs, st.integers(1, 4))
@MANY
def test_a_chunk_has_one_reader(plan: OrderPlan, epoch: int, workers: int) -> None:
    """One rank, one group, and one of the workers that take batches in turns, where their number divides lanes."""
    assume(plan.shuffle != "full" and plan.stream_rows)
    chunk, cut = unit_of(plan.rows), cut_chunks(plan, epoch)
    readers = defaultdict(set)
    for one in ranks(plan):
        for number, group in enumerate(one.chunk_groups(epoch)):
            pieces = {chunk[index] for index in group.indices.tolist()}
            assert len(pieces) <= plan.group_chunks
            for batch, _, _, index in dealt(group):
                worker = batch % workers if plan.lanes % workers == 0 else None
                readers[chunk[index]].add((one.rank, worker, number))
    assert len(cut) <= 2 * plan.streams
    assert all(len(readers[number]) == 1 for number in set(readers) - cut)


def test_few_chunks_are_cut() -> None:
    plan = OrderPlan(RowRange(3, 10_003, 10), 32, shuffle="window", window=4, num_replicas=2, streams=8, lanes=2)
    assert len(cut_chunks(plan, 0)) <= 8


# Resuming.


@given(plans(), epochs, st.booleans())
@SOME
def test_from_every_batch_on_the_tail_is_the_same(plan: OrderPlan, epoch: int, small: bool) -> None:
    plan = replace(plan, rank=plan.num_replicas - 1)
    with arithmetic(small):
        whole = batches(plan, epoch)
        for first in range(len(whole) + 1):
            assert batches(plan, epoch, first) == whole[first:]


@given(plans(), epochs, st.integers(0, 6))
@MANY
def test_segments_come_in_an_order_that_few_open_batches_are_enough_for(
    plan: OrderPlan, epoch: int, first: int
) -> None:
    for one in ranks(plan):
        begun = 0
        for group in one.chunk_groups(epoch, first):
            numbers = [batch for batch, _, _ in group.spans]
            assert numbers == sorted(set(numbers))
            assert (group.first, group.last) == (min(numbers), max(numbers))
            assert group.first >= begun, "holds rows of a batch before an earlier group's first"
            assert group.last - group.first < one.max_group_batches
            begun = group.first
        assert one.max_group_batches <= max(1, one.num_batches)


@pytest.mark.parametrize("shuffle", ["chunk", False])
def test_where_rows_keep_their_order_small_chunks_go_together(shuffle: str | bool) -> None:
    """Each group costs some tenths of a millisecond."""
    small, large = (OrderPlan(RowRange(0, 9_000, unit), 250, shuffle=shuffle) for unit in (1, 300))
    groups = list(small.chunk_groups(1))
    assert [len(group.rows) for group in groups] == [250] * 36
    assert {group.last - group.first + 1 for group in groups} == {1}
    assert small.max_group_batches == 2, "no more memory than for larger chunks"
    assert [len(group.rows) for group in large.chunk_groups(1)] == [300] * 30


def test_span_counts_rows_that_are_repeated() -> None:
    plan = OrderPlan(RowSubset(np.zeros(100, np.int64), np.arange(100), 4), 5, shuffle="window", window=2)
    assert plan.num_batches == 20
    assert plan.max_group_batches == 20


def test_span_is_not_much_more_than_a_segment_needs() -> None:
    plan = OrderPlan(RowRange(0, 100_000, 100), 250, shuffle="window", window=10)
    assert max(group.last - group.first + 1 for group in plan.chunk_groups(0)) in (
        plan.max_group_batches,
        plan.max_group_batches - 1,
    )
    assert plan.max_group_batches == 5
    assert replace(plan, shuffle="full").max_group_batches == 1
    assert replace(plan, shuffle=False).max_group_batches == 2


def test_a_window_of_more_chunks_than_there_are_costs_nothing() -> None:
    plan = OrderPlan(RowRange(0, 50, 5), 10, window=10**12)
    assert batches(plan) == batches(replace(plan, window=10))


def test_a_billion_rows_and_streams_that_hold_little_of_them() -> None:
    plan = OrderPlan(RowRange(5, 5 + 10**9, 100), 64, window=8, num_replicas=8, streams=64, rank=7)
    assert plan.rows.chunk_count > permutation.TABLE_ROWS
    middle = plan.num_batches // 2
    group = next(plan.chunk_groups(1, middle))
    assert group.first == middle
    assert len(np.unique(group.rows)) == len(group.rows)
    assert group.rows.max() < 5 + 10**9


# What makes no sense.


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": 2.0},
        {"batch_size": True},
        {"window": 0},
        {"window": None},
        {"num_replicas": 0},
        {"streams": -2},
        {"lanes": "2"},
        {"seed": 1.5},
        {"seed": None},
        {"rank": 0.0},
        {"rank": 1},
        {"rank": -1},
        {"shuffle": "rows"},
        {"shuffle": None},
        {"num_replicas": 2, "streams": 3},
        {"lanes": 2, "num_replicas": 2, "streams": 6},
        {"streams": 3},
    ],
    ids=str,
)
def test_error_names_the_parameter_at_fault(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionsError) as caught:
        OrderPlan(**{"rows": RowRange(0, 100, 7), "batch_size": 8, **wrong})
    assert set(caught.value.parameters) & set(wrong)


def test_the_identity_is_numbers_and_texts_and_changes_with_the_order() -> None:
    plan = OrderPlan(RowRange(0, 100, 7), 8, num_replicas=2, streams=4, lanes=2)
    changes: list[dict[str, Any]] = [
        *({"rows": RowRange(0, 99, 7)}, {"batch_size": 16}, {"shuffle": "full"}, {"seed": 1}, {"window": 2}),
        *({"trim": True}, {"drop_last": True}, {"streams": 8}, {"lanes": 1}, {"shuffle": "chunk"}, {"shuffle": False}),
    ]
    texts = {json.dumps(replace(plan, **change).identity()) for change in [{}, *changes]}
    assert len(texts) == len(changes) + 1
    same = replace(plan, batch_size=16, num_replicas=1)
    assert same.identity() == replace(plan, rank=1).identity() == plan.identity()
    assert replace(plan, shuffle="full", window=3).identity() == replace(plan, shuffle="full").identity()


# Pinned: these orders must never change, as saved states point into them.

PINNED = RowRange(3, 43, 4)


@pytest.mark.parametrize(
    ("settings", "epoch", "expected"),
    [
        (
            {"shuffle": "window", "window": 3},
            0,
            [[35, 7, 33, 8, 13, 6], [14, 15, 34, 36, 5, 16], [24, 37, 20, 22, 17, 19], [21, 38, 23, 39, 18, 12]],
        ),
        (
            {"shuffle": "window", "window": 3},
            1,
            [[13, 19, 17, 18, 12, 10], [15, 11, 14, 16, 20, 9], [8, 5, 6, 26, 7, 1], [27, 2, 25, 28, 4, 3]],
        ),
        (
            {"shuffle": "window", "window": 3, "seed": 12345678901234567890},
            0,
            [[2, 38, 15, 14, 3, 4], [16, 13, 1, 39, 37, 32], [31, 27, 25, 34, 36, 33], [26, 30, 28, 29, 35, 18]],
        ),
        (
            {"shuffle": "full"},
            0,
            [[38, 24, 37, 31, 36, 35], [29, 23, 12, 14, 18, 28], [22, 10, 19, 3, 6, 21], [17, 11, 15, 9, 8, 34]],
        ),
        (
            {"shuffle": "full"},
            2,
            [[29, 26, 15, 25, 13, 3], [20, 8, 18, 31, 12, 5], [34, 22, 38, 16, 28, 27], [9, 1, 19, 24, 14, 6]],
        ),
        (
            {"shuffle": "chunk"},
            0,
            [[13, 14, 15, 16, 5, 6], [7, 8, 33, 34, 35, 36], [37, 38, 39, 17, 18, 19], [20, 21, 22, 23, 24, 1]],
        ),
        (
            {"shuffle": "chunk", "num_replicas": 3, "streams": 3, "rank": 2},
            0,
            [[26, 27, 28, 9, 10, 11], [12, 0, 29, 30, 31, 32], [13, 14]],
        ),
        (
            {"shuffle": False, "streams": 2},
            0,
            [[0, 1, 2, 20, 21, 22], [3, 4, 5, 23, 24, 25], [6, 7, 8, 26, 27, 28], [9, 10, 11, 29, 30, 31]],
        ),
        (
            {"shuffle": "window", "window": 2, "streams": 4, "lanes": 2},
            0,
            [[15, 7, 14, 22, 23, 24], [35, 39, 37, 11, 9, 28], [8, 16, 6, 3, 2, 4], [38, 36, 19, 12, 10, 32]],
        ),
        (
            {"shuffle": "window", "window": 2, "streams": 4, "lanes": 2, "num_replicas": 2, "rank": 1},
            7,
            [[14, 16, 20, 15, 13, 25], [3, 1, 28, 26, 2, 4], [35, 33, 36, 34], [27, 38, 39, 37]],
        ),
        (
            {"shuffle": "full", "streams": 4, "lanes": 4},
            1,
            [[7, 36, 15, 19, 37, 4], [30, 23, 27, 0, 38, 17], [18, 12, 26, 28, 9, 22], [24, 5, 16, 35, 11, 25]],
        ),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value),
)
def test_orders_are_pinned(settings: dict[str, Any], epoch: int, expected: list[list[int]]) -> None:
    plan = OrderPlan(**{"rows": PINNED, "batch_size": 6, "seed": 7, "trim": False, **settings})
    assert batches(plan, epoch)[:4] == expected


def test_orders_beyond_a_table_are_pinned() -> None:
    plan = OrderPlan(RowRange(3, 10**8, 50), 6, shuffle="window", seed=7, window=3)
    assert plan.rows.chunk_count > permutation.TABLE_ROWS
    assert next(plan.chunk_groups(0)).indices[:5].tolist() == [36698847, 36698848, 36698849, 36698850, 36698851]
    with arithmetic(True):
        small = OrderPlan(PINNED, 6, shuffle="chunk", seed=7)
        assert batches(small)[:2] == [[0, 9, 10, 11, 12, 5], [6, 7, 8, 25, 26, 27]]
    full = OrderPlan(RowRange(3, 10**8, 50), 6, shuffle="full", seed=7)
    assert next(full.chunk_groups(0)).indices.tolist() == [4421305, 27757467, 57447990, 57472725, 82186821, 84033594]


def test_chosen_rows_are_pinned() -> None:
    rows = RowSubset(np.array([40, 3, 12, 3, 25, 26, 8, 9]), np.arange(8), 4)
    assert batches(OrderPlan(rows, 4, shuffle="window", seed=7, window=2)) == [[1, 4, 5, 3], [2, 0, 7, 6]]
    assert batches(OrderPlan(rows, 4, shuffle="full", seed=7)) == [[3, 7, 6, 5], [4, 0, 1, 2]]


def placed(groups: Iterable[ChunkGroup]) -> dict[tuple[int, int], tuple[int, int]]:
    """Row and index at each slot of each batch; a slot that is filled twice fails."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for group in groups:
        assert sorted(group.positions.tolist()) == list(range(len(group.rows)))
        owners, slots = group.slots(group.positions)
        for owner, slot, row, index in zip(owners, slots, group.rows, group.indices, strict=True):
            key = group.spans[owner][0], int(slot)
            assert key not in found
            found[key] = int(row), int(index)
    return found


@SOME
@given(plan=plans(), epoch=epochs, max_rows=st.integers(1, 60), max_batches=st.integers(1, 5))
def test_joined_segments_hold_the_same_rows_at_the_same_places(
    plan: OrderPlan, epoch: int, max_rows: int, max_batches: int
) -> None:
    before = list(plan.chunk_groups(epoch))
    after = list(merge_groups(plan.chunk_groups(epoch), max_rows, max_batches))
    assert placed(after) == placed(before)
    assert len(after) <= len(before)
    lengths = {len(group.rows) for group in before}
    for group in after:
        assert len(group.rows) <= max_rows or len(group.rows) in lengths
        assert group.last - group.first < max(max_batches, plan.max_group_batches)
        batches = [span[0] for span in group.spans]
        assert batches == sorted(batches)
    # What makes a pipeline never stand still: no group goes back behind the first batch of one before it.
    firsts = [group.first for group in after]
    assert firsts == sorted(firsts)


def test_single_row_chunks_come_in_few_segments() -> None:
    plan = OrderPlan(RowRange(0, 4_096, 1), 256, window=16)
    assert len(list(plan.chunk_groups(0))) == 256
    joined = list(merge_groups(plan.chunk_groups(0), 144, plan.max_group_batches))
    assert {len(group.rows) for group in joined[:-1]} == {144}
    assert np.array_equal(np.sort(np.concatenate([group.rows for group in joined])), np.arange(4_096))
