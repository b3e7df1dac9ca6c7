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
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from h5pack.errors import OptionsError
from h5pack.order import permutation, window
from h5pack.order.row_ranges import RowRange, RowSet
from h5pack.order.window import ChunkGroup, OrderPlan, merge_groups
from tests.order.plans import EPOCHS, MANY, SHUFFLES, batches, require_groups, subset, targets, weigh, weighted

SOME = settings(MANY, max_examples=20)


@st.composite
def row_sets(draw: st.DrawFn, least: int = 0) -> RowSet:
    """A split of a file, or chosen rows of it with repeats."""
    start, count, chunk_rows = draw(st.integers(0, 30)), draw(st.integers(least, 150)), draw(st.integers(1, 12))
    if draw(st.integers(0, 2)):
        return RowRange(start, start + count, chunk_rows)
    rows = draw(st.lists(st.integers(0, draw(st.integers(0, 150))), min_size=least, max_size=150))
    return subset(rows, chunk_rows)


drawn_rows = weighted().map(lambda drawn: weigh(*drawn))
"""Row sets of which each epoch draws some rows, by weight."""


@st.composite
def plans(draw: st.DrawFn, least: int = 0, weights: bool = False, **settings: Any) -> OrderPlan:
    """Rank 0's plan; batches take 1 to 9 rows of 1 to 3 streams."""
    num_replicas, lanes, own = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    chosen: dict[str, Any] = {
        "rows": draw(drawn_rows if weights else row_sets(least)),
        "batch_size": own * draw(st.integers(1, 9)),
        "shuffle": draw(st.sampled_from(SHUFFLES)),
        "seed": draw(st.integers(0, 2**64)),
        "window": draw(st.integers(1, 5)),
        "trim": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "num_replicas": num_replicas,
        "streams": own * num_replicas * lanes,
        "lanes": lanes,
    }
    return OrderPlan(**{**chosen, **settings})


@contextmanager
def arithmetic(small: bool) -> Iterator[None]:
    """Where `small`: permutations, and where a chunk starts, are computed even for a few chunks."""
    most = 2 if small else permutation.TABLE_ROWS
    with patch.object(window, "TABLE_ROWS", most), patch.object(permutation, "TABLE_ROWS", most):
        yield


def ranks(plan: OrderPlan) -> list[OrderPlan]:
    return [replace(plan, rank=rank) for rank in range(plan.num_replicas)]


def flat(plan: OrderPlan, epoch: int) -> list[int]:
    return list(itertools.chain(*batches(plan, epoch)))


def line(plan: OrderPlan, epoch: int) -> list[int]:
    """All rows before they are cut into streams and shuffled within windows."""
    shuffle = "chunk" if plan.shuffle == "window" else plan.shuffle
    return flat(OrderPlan(plan.rows, max(1, plan.rows.count), shuffle=shuffle, seed=plan.seed), epoch)


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


def row_of(rows: RowSet) -> dict[int, int]:
    """The row of each index, in the file's order."""
    stored, indices = rows.rows_at(np.arange(rows.count))
    return dict(zip(indices.tolist(), stored.tolist(), strict=True))


def chunk_of(rows: RowSet) -> dict[int, int]:
    return {index: row // rows.chunk_rows for index, row in row_of(rows).items()}


def windows(rows: list[int], starts: range, plan: OrderPlan) -> Iterator[list[int]]:
    """A stream's share of the line, cut after each `window` chunks or parts of chunks."""
    chunk = chunk_of(plan.rows)
    # A part begins with another chunk, and where the line begins again.
    parts = [
        number
        for number, place in enumerate(starts)
        if not number or chunk[rows[number]] != chunk[rows[number - 1]] or place % plan.rows.count == 0
    ]
    for low, high in itertools.pairwise([*parts[:: plan.window], len(rows)]):
        yield rows[low:high]


# What an epoch contains.


@given(plans(), EPOCHS, st.booleans())
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
            assert len(rows) == kept
            if plan.shuffle != "window":
                assert rows == expected[:kept]
                continue
            begin = 0
            for window in windows(expected, places, plan):
                found = Counter(rows[begin : begin + len(window)])
                begin += len(window)
                assert found == Counter(window) if begin <= kept else not found - Counter(window)


@given(plans(drop_last=False), EPOCHS, st.booleans())
@MANY
def test_each_row_once_over_all_ranks_as_distributed_sampler_counts(plan: OrderPlan, epoch: int, small: bool) -> None:
    with arithmetic(small):
        found = [flat(one, epoch) for one in ranks(plan)]
        count, whole = plan.rows.count, line(plan, epoch)
    assert plan.stream_rows == DistributedSampler(range(count), plan.streams, 0, drop_last=plan.trim).num_samples
    assert [len(rows) for rows in found] == [plan.rank_rows] * plan.num_replicas
    total = plan.streams * plan.stream_rows
    assert 0 <= (count - total if plan.trim else total - count) < plan.streams
    # The first rows of the line, again, make the streams equally long.
    assert Counter(itertools.chain(*found)) == Counter(itertools.islice(itertools.cycle(whole), total))


@given(plans(), EPOCHS)
@MANY
def test_batches_have_the_promised_sizes_and_rows_match_indices(plan: OrderPlan, epoch: int) -> None:
    sizes = [len(batch) for batch in batches(plan, epoch)]
    assert sizes == [plan.batch_rows(number) for number in range(plan.num_batches)]
    assert set(sizes if plan.drop_last else sizes[: -plan.lanes]) <= {plan.batch_size}
    assert plan.drop_last or sum(sizes) == plan.rank_rows
    row = row_of(plan.rows)
    for group in plan.chunk_groups(epoch):
        assert [row[index] for index in group.indices.tolist()] == group.rows.tolist()
        if plan.rows.chunk_count > 1:
            # A single chunk may follow itself, where the line begins again.
            runs = itertools.groupby(group.rows.tolist(), key=lambda row: row // plan.rows.chunk_rows)
            assert all(run == sorted(run) for run in (list(run) for _, run in runs)), "ascending within each chunk"


def test_stored_order_is_stored_order() -> None:
    assert batches(OrderPlan(RowRange(7, 24, 5), 6, shuffle=False)) == [[*range(6)], [*range(6, 12)], [*range(12, 17)]]
    rows = subset([9, 2, 30, 2, 11], 4)
    for epoch in (0, 5):
        assert batches(OrderPlan(rows, 2, shuffle=False), epoch) == [[1, 3], [0, 4], [2]]


@given(plans(least=1, shuffle="chunk", streams=1, lanes=1, num_replicas=1, batch_size=7, drop_last=False), EPOCHS)
@MANY
def test_chunk_keeps_the_stored_order_within_chunks(plan: OrderPlan, epoch: int) -> None:
    chunk = chunk_of(plan.rows)
    runs = [list(run) for _, run in itertools.groupby(flat(plan, epoch), key=chunk.__getitem__)]
    assert len(runs) == plan.rows.chunk_count, "each chunk in one run"
    assert sorted(runs) == sorted(list(run) for _, run in itertools.groupby(chunk, key=chunk.__getitem__))


@pytest.mark.parametrize("shuffle", ["window", "full", "chunk"])
def test_epochs_and_seeds_are_other_orders(shuffle: str) -> None:
    plan = OrderPlan(RowRange(0, 100, 7), 10, shuffle=shuffle, window=3)
    orders = [batches(replace(plan, seed=seed), epoch) for seed in (0, 1, 2**63) for epoch in range(20)]
    assert all(one != other for one, other in itertools.combinations(orders, 2))
    assert batches(plan, 3) == orders[3]


def test_windows_mix_the_rows_of_their_chunks_and_no_others() -> None:
    for batch in batches(OrderPlan(RowRange(0, 120, 10), 40, shuffle="window", window=4)):
        chunks = [index // 10 for index in batch]
        assert set(Counter(chunks).values()) == {10}
        assert len(list(itertools.groupby(chunks))) > 20, "mixed"


# Ranks and steps.


@given(
    st.data(), row_sets() | drawn_rows, st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 3), st.booleans(), EPOCHS
)
@MANY
def test_steps_have_the_same_rows_for_every_number_of_ranks(
    data: st.DataObject, rows: Any, per_lane: int, lanes: int, drop: bool, epoch: int
) -> None:
    size, shuffle = per_lane * data.draw(st.integers(1, 5)), data.draw(st.sampled_from(SHUFFLES))
    order: dict[str, Any] = {"shuffle": shuffle, "seed": 5, "window": 3, "trim": drop, "drop_last": drop}
    plan = OrderPlan(rows, size, **order, streams=per_lane * lanes, lanes=lanes)
    steps = [Counter(batch) for batch in batches(plan, epoch)]
    for count in (count for count in range(2, per_lane + 1) if per_lane % count == 0):
        found = [batches(one, epoch) for one in ranks(replace(plan, batch_size=size // count, num_replicas=count))]
        together = list(zip(*found, strict=True))
        assert [Counter(itertools.chain(*step)) for step in together] == steps
        assert all(len(set(map(len, step))) == 1 for step in together), "ranks wait for each other"


def cut_chunks(plan: OrderPlan, epoch: int) -> set[int]:
    """Chunks that a stream's end cuts, or that padding repeats."""
    whole, chunk, length = line(plan, epoch), chunk_of(plan.rows), plan.stream_rows
    cut = set()
    for stream in range(plan.streams):
        first, end = stream * length % len(whole), (stream + 1) * length
        if first and chunk[whole[first]] == chunk[whole[first - 1]]:
            cut.add(chunk[whole[first]])
        cut |= {chunk[whole[place % len(whole)]] for place in range(len(whole), end)}
    return cut


@given(plans(least=1, drop_last=False), EPOCHS, st.integers(1, 4))
@MANY
def test_a_chunk_has_one_reader(plan: OrderPlan, epoch: int, workers: int) -> None:
    """One rank, one group, and one of the workers that take batches in turns, where their number divides lanes."""
    assume(plan.shuffle != "full" and plan.stream_rows)
    chunk, cut = chunk_of(plan.rows), cut_chunks(plan, epoch)
    readers = defaultdict(set)
    for one in ranks(plan):
        for number, group in enumerate(one.chunk_groups(epoch)):
            chunks = [chunk[index] for index in group.indices.tolist()]
            assert len(set(chunks)) <= plan.group_chunks
            for owner, batch in zip(chunks, targets(group)[0].tolist(), strict=True):
                readers[owner].add((one.rank, batch % workers if plan.lanes % workers == 0 else None, number))
    assert len(cut) <= 2 * plan.streams
    assert all(len(readers[number]) == 1 for number in set(readers) - cut)


# Resuming.


@given(plans() | plans(weights=True), EPOCHS, st.booleans())
@MANY
def test_from_every_batch_on_the_tail_is_the_same(plan: OrderPlan, epoch: int, small: bool) -> None:
    plan = replace(plan, rank=plan.num_replicas - 1)
    with arithmetic(small):
        whole = batches(plan, epoch)
        for first in range(len(whole) + 1):
            assert batches(plan, epoch, first) == whole[first:]


@given(plans(), EPOCHS, st.integers(0, 6))
@MANY
def test_chunk_groups_ascend_and_few_batches_are_open(plan: OrderPlan, epoch: int, first: int) -> None:
    for one in ranks(plan):
        require_groups(one, epoch, first)


@pytest.mark.parametrize("shuffle", ["chunk", False])
def test_where_rows_keep_their_order_small_chunks_go_together(shuffle: str | bool) -> None:
    """Each group costs some tenths of a millisecond."""
    small, large = (OrderPlan(RowRange(0, 9_000, unit), 250, shuffle=shuffle) for unit in (1, 300))
    assert [(len(group.rows), group.last - group.first) for group in small.chunk_groups(1)] == [(250, 0)] * 36
    assert small.max_group_batches == 2, "no more memory than for larger chunks"
    assert [len(group.rows) for group in large.chunk_groups(1)] == [300] * 30


def test_the_bound_of_open_batches_is_close() -> None:
    plan = OrderPlan(RowRange(0, 100_000, 100), 250, shuffle="window", window=10)
    assert max(group.last - group.first + 1 for group in plan.chunk_groups(0)) in (4, 5)
    bounds = [replace(plan, shuffle=shuffle).max_group_batches for shuffle in ("window", "full", False)]
    assert bounds == [5, 1, 2]
    repeated = OrderPlan(subset([0] * 100, 4), 5, shuffle="window", window=2)
    assert repeated.num_batches == repeated.max_group_batches == 20


def test_a_window_of_more_chunks_than_there_are_costs_nothing() -> None:
    plan = OrderPlan(RowRange(0, 50, 5), 10, window=10**12)
    assert batches(plan) == batches(replace(plan, window=10))


def test_an_epoch_of_a_billion_rows_starts_in_its_middle() -> None:
    plan = OrderPlan(RowRange(5, 5 + 10**9, 100), 64, window=8, num_replicas=8, streams=64, rank=7)
    assert plan.rows.chunk_count > permutation.TABLE_ROWS
    group = next(plan.chunk_groups(1, plan.num_batches // 2))
    assert group.first == plan.num_batches // 2
    assert len(np.unique(group.rows)) == len(group.rows)
    assert group.rows.max() < 5 + 10**9


# Parameters and identity.


@pytest.mark.parametrize(
    "wrong",
    [
        *({"batch_size": 0}, {"batch_size": 2.0}, {"batch_size": True}, {"window": 0}, {"window": None}),
        *({"num_replicas": 0}, {"streams": -2}, {"lanes": "2"}, {"seed": 1.5}, {"seed": None}),
        *({"seed": -1}, {"rank": 0.0}, {"rank": 1}, {"rank": -1}, {"shuffle": "rows"}, {"shuffle": None}),
        *({"num_replicas": 2, "streams": 3}, {"lanes": 2, "num_replicas": 2, "streams": 6}, {"streams": 3}),
    ],
    ids=str,
)
def test_error_names_the_parameter_at_fault(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionsError) as caught:
        OrderPlan(**{"rows": RowRange(0, 100, 7), "batch_size": 8, **wrong})
    assert {name.partition("=")[0] for name in caught.value.parameters} & set(wrong)


def test_the_identity_is_numbers_and_texts_and_changes_with_the_order() -> None:
    plan = OrderPlan(RowRange(0, 100, 7), 8, num_replicas=2, streams=4, lanes=2)
    changes: list[dict[str, Any]] = [
        *({"rows": RowRange(0, 99, 7)}, {"batch_size": 16}, {"shuffle": "full"}, {"seed": 1}, {"window": 2}),
        *({"trim": True}, {"drop_last": True}, {"streams": 8}, {"lanes": 1}, {"shuffle": "chunk"}, {"shuffle": False}),
    ]
    texts = {json.dumps(replace(plan, **change).identity()) for change in [{}, *changes]}
    assert len(texts) == len(changes) + 1
    for same in ({"batch_size": 16, "num_replicas": 1}, {"rank": 1}):
        assert replace(plan, **same).identity() == plan.identity()
    assert replace(plan, shuffle="full", window=3).identity() == replace(plan, shuffle="full").identity()


# Pinned: these orders must never change, as saved states point into them.

PINNED = RowRange(3, 43, 4)


@pytest.mark.parametrize(
    ("settings", "epoch", "expected"),
    [
        ({"window": 3}, 0, "35 7 33 8 13 6, 14 15 34 36 5 16, 24 37 20 22 17 19, 21 38 23 39 18 12"),
        ({"window": 3}, 1, "13 19 17 18 12 10, 15 11 14 16 20 9, 8 5 6 26 7 1, 27 2 25 28 4 3"),
        ({"window": 3, "seed": 12345678901234567890}, 0,
         "2 38 15 14 3 4, 16 13 1 39 37 32, 31 27 25 34 36 33, 26 30 28 29 35 18"),
        ({"shuffle": "full"}, 0, "38 24 37 31 36 35, 29 23 12 14 18 28, 22 10 19 3 6 21, 17 11 15 9 8 34"),
        ({"shuffle": "full"}, 2, "29 26 15 25 13 3, 20 8 18 31 12 5, 34 22 38 16 28 27, 9 1 19 24 14 6"),
        ({"shuffle": "chunk"}, 0, "13 14 15 16 5 6, 7 8 33 34 35 36, 37 38 39 17 18 19, 20 21 22 23 24 1"),
        ({"shuffle": "chunk", "num_replicas": 3, "streams": 3, "rank": 2}, 0,
         "26 27 28 9 10 11, 12 0 29 30 31 32, 13 14"),
        ({"shuffle": False, "streams": 2}, 0, "0 1 2 20 21 22, 3 4 5 23 24 25, 6 7 8 26 27 28, 9 10 11 29 30 31"),
        ({"window": 2, "streams": 4, "lanes": 2}, 0,
         "15 7 14 22 23 24, 35 39 37 11 9 28, 8 16 6 3 2 4, 38 36 19 12 10 32"),
        ({"window": 2, "streams": 4, "lanes": 2, "num_replicas": 2, "rank": 1}, 7,
         "14 16 20 15 13 25, 3 1 28 26 2 4, 35 33 36 34, 27 38 39 37"),
        ({"shuffle": "full", "streams": 4, "lanes": 4}, 1,
         "7 36 15 19 37 4, 30 23 27 0 38 17, 18 12 26 28 9 22, 24 5 16 35 11 25"),
    ],
    ids=str,
)  # fmt: skip
def test_orders_are_pinned(settings: dict[str, Any], epoch: int, expected: str) -> None:
    plan = OrderPlan(**{"rows": PINNED, "batch_size": 6, "seed": 7, "trim": False, **settings})
    assert [" ".join(map(str, batch)) for batch in batches(plan, epoch)[:4]] == expected.split(", ")


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
    rows = subset([40, 3, 12, 3, 25, 26, 8, 9], 4)
    assert batches(OrderPlan(rows, 4, shuffle="window", seed=7, window=2)) == [[1, 4, 5, 3], [2, 0, 7, 6]]
    assert batches(OrderPlan(rows, 4, shuffle="full", seed=7)) == [[3, 7, 6, 5], [4, 0, 1, 2]]


def placed(groups: Iterable[ChunkGroup]) -> dict[tuple[int, int], tuple[int, int]]:
    """Row and index at each slot of each batch; a slot that is filled twice fails."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for group in groups:
        numbers, slots = targets(group)
        owners, same_slots = group.slots
        assert np.array_equal(slots, same_slots)
        assert [group.spans[owner][0] for owner in owners] == numbers.tolist()
        keys = list(zip(numbers.tolist(), slots.tolist(), strict=True))
        assert len(found.keys() | keys) == len(found) + len(keys)
        found |= zip(keys, zip(group.rows.tolist(), group.indices.tolist(), strict=True), strict=True)
    return found


@SOME
@given(plan=plans(), epoch=EPOCHS, max_rows=st.integers(1, 60), max_batches=st.integers(1, 5))
def test_merged_groups_have_the_same_rows_in_the_same_slots(
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
        numbers = [span[0] for span in group.spans]
        assert numbers == sorted(numbers)
    # A pipeline never stalls, because no group goes back before the first batch of an earlier one.
    assert [group.first for group in after] == sorted(group.first for group in after)


def test_single_row_chunks_come_in_few_groups() -> None:
    plan = OrderPlan(RowRange(0, 4_096, 1), 256, window=16)
    assert len(list(plan.chunk_groups(0))) == 256
    merged = list(merge_groups(plan.chunk_groups(0), 150, plan.max_group_batches))
    assert {len(group.rows) for group in merged[:-1]} == {144}
    assert np.array_equal(np.sort(np.concatenate([group.rows for group in merged])), np.arange(4_096))


@pytest.mark.parametrize(("max_rows", "computed"), [(256, 1), (300, 2), (512, 2)])
def test_merging_computes_no_group_before_it_is_needed(max_rows: int, computed: int) -> None:
    plan = OrderPlan(RowRange(0, 4_096, 16), 256, window=16)
    taken = []
    groups = (taken.append(group) or group for group in plan.chunk_groups(0))
    next(merge_groups(groups, max_rows, plan.max_group_batches))
    assert len(taken) == computed
