"""Weighted draws: a row's share rounded down or up, exactly as many as asked for, the same from every loader."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, random_split

import h5pack
from h5pack.errors import OptionsError, StateError
from h5pack.order.permutation import derive_key
from h5pack.order.row_ranges import EpochRows, RowRange, Rows, RowSet
from h5pack.order.weights import MAX_SAMPLES, WeightedRows, balanced_weights
from h5pack.order.window import OrderPlan
from tests.data import packs
from tests.data.packs import threads_end
from tests.order.plans import EPOCHS, MANY, SHUFFLES, Drawn, batches, subset, weigh, weighted
from tests.stacks import watched


def require_shares(counts: Sequence[int], weights: Sequence[float], samples: int) -> None:
    """Each count is its share, rounded down or up; where that is whole, rounding may have moved it a little."""
    assert sum(counts) == samples
    whole = sum(map(Fraction, weights), Fraction(0))
    for count, weight in zip(counts, weights, strict=True):
        share = Fraction(weight) * samples / whole
        slack = Fraction(1, 10**9) if abs(share - round(share)) < Fraction(1, 10**9) else 0
        assert floor(share - slack) <= count <= ceil(share + slack), (count, float(share))


def slow_counts(weights: Sequence[float], samples: int, key: int) -> list[int]:
    """Copies of each row, point by point in exact fractions."""
    edges = list(itertools.accumulate(map(Fraction, weights)))
    offset = Fraction(key >> 11, 1 << 53)
    counts = [0] * len(weights)
    for point in range(samples):
        counts[bisect_right(edges, (point + offset) * edges[-1] / samples)] += 1
    return counts


def counts_of(rows: RowSet, found: Sequence[Sequence[int]]) -> list[int]:
    """How often each row was drawn, in stored order."""
    seen = Counter(itertools.chain(*found))
    return [seen[index] for index in rows.rows_at(np.arange(rows.count))[1].tolist()]


def all_rows(found: EpochRows) -> tuple[Rows, Rows]:
    """Rows and indices of all that an epoch draws, in stored order."""
    chunks = np.arange(found.chunk_count)
    return found.rows_in_chunks(chunks, np.zeros_like(chunks), found.chunk_lengths())


# What an epoch draws.


@given(weighted(), st.integers(0, 2**64), EPOCHS, st.sampled_from(SHUFFLES))
@MANY
def test_counts_are_those_of_points_on_a_line(drawn: Drawn, seed: int, epoch: int, shuffle: str | bool) -> None:
    plan = OrderPlan(weigh(*drawn), 7, shuffle=shuffle, seed=seed, window=3)
    counts = counts_of(drawn[0], batches(plan, epoch))
    assert counts == slow_counts(*drawn[1:], derive_key(1, seed, epoch, 4))
    require_shares(counts, *drawn[1:])


@given(weighted(), EPOCHS, st.sampled_from(SHUFFLES), st.sampled_from([2, 3, 4]), st.booleans())
@MANY
def test_what_does_not_divide_is_repeated_or_left_out(
    drawn: Drawn, epoch: int, shuffle: str | bool, count: int, trim: bool
) -> None:
    samples = drawn[2]
    alone = OrderPlan(weigh(*drawn), 5, shuffle=shuffle, seed=1, window=2)
    plans = [replace(alone, trim=trim, rank=rank, num_replicas=count, streams=count) for rank in range(count)]
    together = Counter(itertools.chain(*(batch for plan in plans for batch in batches(plan, epoch))))
    whole = Counter(itertools.chain(*batches(alone, epoch)))
    assert together.total() == (samples // count if trim else -(-samples // count)) * count
    assert together <= whole if trim else together >= whole


@given(weighted(), EPOCHS, st.sampled_from(["window", "chunk", False]), st.integers(1, 4))
@MANY
def test_a_drawn_chunk_lies_in_one_group(drawn: Drawn, epoch: int, shuffle: str | bool, window: int) -> None:
    rows = drawn[0]
    plan = OrderPlan(weigh(*drawn), 4, shuffle=shuffle, seed=2, window=window)
    seen: list[set[int]] = []
    for group in plan.chunk_groups(epoch):
        owners = group.rows // rows.chunk_rows
        chunks = [chunk for chunk, _ in itertools.groupby(owners.tolist())]
        assert len(chunks) == len(set(chunks)) <= plan.group_chunks, "each in one run"
        assert len(group.rows) <= plan.rows.max_rows(plan.group_chunks)
        for _, run in itertools.groupby(group.rows.tolist(), key=lambda row: row // rows.chunk_rows):
            assert np.all(np.diff(list(run)) >= 0), "ascending within each chunk"
        seen.append(set(chunks))
    assert sum(map(len, seen)) == len(set().union(*seen))
    # Chunks that nothing is drawn from take no place in a window.
    assert all(len(chunks) == plan.group_chunks for chunks in seen[:-1])


def test_equal_weights_draw_every_row_equally_often() -> None:
    # A sum of 0.1s in floating point is off by so much that a row would be drawn twice now and then.
    rows = RowRange(3, 100_003, 100)
    for copies in (1, 3):
        drawn = WeightedRows(rows, np.full(100_000, 0.1), copies * 100_000)
        for epoch in range(3):
            assert (np.bincount(all_rows(drawn.epoch_rows(derive_key(epoch)))[1]) == copies).all()


@pytest.mark.parametrize("samples", [1, 7, 10**7, MAX_SAMPLES])
def test_counts_are_exact_where_products_have_more_than_64_bits(samples: int) -> None:
    weights = np.random.default_rng(samples).exponential(size=3_000) ** 4
    drawn = WeightedRows(RowRange(0, 3_000, 7), weights, samples)
    ends = list(itertools.accumulate(map(int, drawn._units)))
    line = ends[-1]
    assert 1 << 57 < line < 1 << 61
    for offset in (0, 1, line // 3, line - 1):
        expected = [-((offset - samples * end) // line) for end in ends]
        assert drawn.row_edges(np.arange(drawn.rows.chunk_count), offset)[1].tolist() == expected
        assert drawn.draws_before(drawn.sums, offset).tolist() == [0, *expected[6::7], expected[-1]]
        assert expected[-1] == samples


@given(weighted(), st.integers(0, 2**64 - 1), st.data())
@MANY
def test_picks_and_takes_are_parts_of_the_whole(drawn: Drawn, key: int, data: st.DataObject) -> None:
    found = weigh(*drawn).epoch_rows(key)
    assert found.chunk_lengths().min() > 0
    assert int(found.chunk_lengths().sum()) == found.count == drawn[2]
    rows, indices = all_rows(found)
    assert (np.diff(rows) >= 0).all()
    places = np.array(data.draw(st.lists(st.integers(0, found.count - 1), max_size=9)), np.int64)
    for part, whole in zip(found.rows_at(places), (rows, indices), strict=True):
        assert part.tolist() == whole[places].tolist()
    chosen = data.draw(st.lists(st.integers(0, found.chunk_count - 1), min_size=1, max_size=5))
    ends = np.concatenate(([0], np.cumsum(found.chunk_lengths())))
    cuts = [sorted(data.draw(st.tuples(*[st.integers(0, int(found.chunk_lengths()[chunk]))] * 2))) for chunk in chosen]
    spans = [range(ends[chunk] + low, ends[chunk] + high) for chunk, (low, high) in zip(chosen, cuts, strict=True)]
    firsts, lasts = np.array(cuts).T
    for part, whole in zip(found.rows_in_chunks(np.array(chosen), firsts, lasts), (rows, indices), strict=True):
        assert part.tolist() == whole[list(itertools.chain(*spans))].tolist()


def test_rows_from_more_chunks_than_are_computed_together() -> None:
    weights = np.random.default_rng(0).exponential(size=200_000)
    found = WeightedRows(RowRange(0, 200_000, 1_000), weights, 150_000).epoch_rows(9)
    places = np.random.default_rng(1).permutation(150_000)
    assert np.array_equal(found.rows_at(places)[1], all_rows(found)[1][places])


def test_a_heavy_chunk_does_not_count_for_each_of_a_window() -> None:
    weights = np.ones(10_000)
    weights[500:510] = 90
    drawn = WeightedRows(RowRange(0, 10_000, 10), weights, 10_000)
    # The heavy chunk has 826 of the draws, the others 9.2 each.
    assert 826 + 15 * 9 < drawn.max_rows(16) <= 2 * 827 + 15 * 10 + 16
    assert drawn.max_rows(1) >= 826
    assert drawn.max_rows(10**6) >= 10_000


def test_what_can_be_drawn_is_all_rows_above_zero() -> None:
    span = RowRange(10, 30, 4)
    some = weigh(span, [0, 1] * 10, 5)
    assert (some.unique_count, list(some.unique_rows())) == (10, list(range(11, 30, 2)))
    assert weigh(span, [1.0] * 20, 5).unique_rows() == range(10, 30)
    chosen = subset([9, 2, 9, 4], 4)
    assert list(weigh(chosen, [0, 1, 0, 2], 5).unique_rows()) == [4, 9]
    assert weigh(chosen, [1, 1, 1, 1], 5).unique_count == 3


# Pinned: these orders must never change, as saved states point into them.

PINNED = [0.5, 2, 0, 1, 1, 7, 0.25, 0, 0, 0, 0, 0, 3, 1, 1, 1, 0.1, 0.2, 0.3, 1]


@pytest.mark.parametrize(
    ("settings", "epoch", "expected"),
    [
        ({"shuffle": "window", "window": 2}, 0, [[12, 12, 12, 0, 5, 13], [5, 5, 5, 5, 5, 14], [5, 15, 4, 3, 1, 19]]),
        ({"shuffle": "window", "window": 2}, 1, [[12, 12, 12, 19, 5, 5], [5, 1, 5, 5, 4, 5], [1, 5, 15, 14, 13, 0]]),
        ({"shuffle": "full"}, 0, [[12, 4, 5, 12, 14, 5], [3, 5, 5, 15, 1, 0], [13, 5, 19, 5, 5, 12]]),
        ({"shuffle": "chunk", "streams": 2}, 0, [[12, 12, 12, 5, 5, 5], [0, 13, 14, 5, 5, 19], [15, 5, 5, 1, 3, 4]]),
        ({"shuffle": False}, 0, [[0, 1, 3, 4, 5, 5], [5, 5, 5, 5, 5, 12], [12, 12, 13, 14, 15, 19]]),
    ],
    ids=str,
)
def test_orders_are_pinned(settings: dict[str, Any], epoch: int, expected: list[list[int]]) -> None:
    plan = OrderPlan(weigh(RowRange(3, 23, 4), PINNED, 18), 6, seed=7, **settings)
    assert batches(plan, epoch) == expected


# Through the public classes.


@pytest.fixture
def dataset(tmp_path: Path) -> Iterator[h5pack.H5Dataset]:
    with watched():
        yield h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5"), with_rows=True)
    assert threads_end()


def order(**settings: Any) -> dict[str, Any]:
    """Options of an order by weight; a window of 3 chunks."""
    return {"window": 3, "seed": 7, "weights": packs.WEIGHTS, **settings}


@pytest.mark.parametrize("file", [{"compression": "gzip"}, {"shape": (5, 4, 3)}, {"chunks": None}], ids=str)
def test_copies_of_a_row_from_other_files(tmp_path: Path, file: dict[str, Any]) -> None:
    images = packs.values(shape=file.pop("shape", packs.SHAPE))
    path = packs.write(tmp_path / "f.h5", images=images, labels=np.arange(packs.ROWS), **file)
    dataset = h5pack.H5Dataset(path)
    for way in packs.WAYS:
        with packs.rows_by(way), h5pack.H5Loader(dataset, 12, **order(num_samples=400)) as loader:
            for _ in range(2):
                found, rows = map(torch.cat, zip(*loader, strict=True))
                assert np.array_equal(found.numpy(), images[rows.numpy()])
                assert len(rows) == 400


def test_resuming_single_rows_and_pickled_samplers(dataset: h5pack.H5Dataset) -> None:
    whole = list(h5pack.ChunkSampler(dataset, **order()))
    for done in range(0, len(whole), 10):
        sampler = h5pack.ChunkSampler(dataset, **order())
        next(iter(sampler))
        again = pickle.loads(pickle.dumps(h5pack.ChunkSampler(dataset, **order())))
        again.load_state_dict(sampler.state_dict(rows_consumed=done))
        assert list(again) == whole[done:]


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"weights": packs.WEIGHTS * 2}, "weights_digest"),
        ({"num_samples": 99}, "num_samples"),
        ({"weights": None}, "num_samples"),
        ({"seed": 8}, "seed"),
    ],
    ids=str,
)
def test_a_state_of_other_draws_is_refused(dataset: h5pack.H5Dataset, change: dict[str, Any], parameter: str) -> None:
    state = h5pack.ChunkBatchSampler(dataset, 12, **order()).state_dict()
    for make in (h5pack.ChunkBatchSampler, h5pack.H5Loader):
        with pytest.raises(StateError) as caught:
            make(dataset, 12, **order(**change)).load_state_dict(state)
        assert caught.value.parameters == (parameter,)
    h5pack.H5Loader(dataset, 12, **order()).load_state_dict(state)


def test_weights_belong_to_the_indices_as_given(dataset: h5pack.H5Dataset) -> None:
    def drawn(source: Any, **settings: Any) -> Counter[int]:
        return Counter(h5pack.ChunkSampler(source, **settings))

    some = Subset(dataset, [50, 3, 99, 3])
    assert drawn(some, weights=[1, 0, 2, 3], num_samples=12) == {0: 2, 2: 4, 3: 6}
    assert drawn(dataset, indices=[50, 3, 99], weights=[0, 1, 3], num_samples=8) == {3: 2, 99: 6}
    assert drawn(some, indices=[2, 0, -1], weights=torch.tensor([3, 1, 0]), num_samples=4) == {2: 3, 0: 1}
    assert drawn(Subset(some, [2, 1]), weights=np.array([True, False])) == {0: 2}
    assert drawn(dataset, weights=np.arange(packs.ROWS, dtype=np.float32) == 5, num_samples=3) == {5: 3}
    # Weights may change after a loader was made.
    part, _ = random_split(dataset, [60, 43], torch.Generator().manual_seed(0))
    weights = np.random.default_rng(3).integers(0, 4, 60).astype(np.float64)
    expected = Counter(np.repeat(part.indices, weights.astype(int)).tolist())
    loader = h5pack.H5Loader(part, 7, weights=weights, num_samples=expected.total())
    weights[:] = 1
    assert Counter(torch.cat([rows for _, _, rows in loader]).tolist()) == expected


# Balanced classes.


def of_classes(path: Path, labels: npt.NDArray[Any]) -> h5pack.H5Dataset:
    return h5pack.H5Dataset(packs.write(path, images=packs.values(len(labels)), labels=labels))


def balanced(dataset: Any, num_samples: int, **settings: Any) -> list[int]:
    return list(h5pack.ChunkSampler(dataset, **{"weights": "balanced", "num_samples": num_samples, **settings}))


@pytest.mark.parametrize("dtype", ["u1", "i8", ">i4"])
def test_balanced_classes(tmp_path: Path, dtype: str) -> None:
    labels = np.repeat([0, 3, 4, 200], [700, 200, 90, 10]).astype(dtype)
    for name, mixed in (("sorted", labels), ("shuffled", np.random.default_rng(4).permutation(labels))):
        sampler = h5pack.ChunkSampler(of_classes(tmp_path / name, mixed), weights="balanced", num_samples=1_150, seed=1)
        totals: Counter[int] = Counter()
        for _ in range(20):
            drawn = list(sampler)
            per_row, per_class = Counter(drawn), Counter(mixed[drawn].tolist())
            assert len(drawn) == 1_150
            for label, count in per_class.items():
                mine = np.flatnonzero(mixed == label)
                share = Fraction(1_150, 4 * len(mine))
                assert {per_row[row] for row in mine.tolist()} <= {floor(share), ceil(share)}
                # Each run of a class is one part of the line.
                assert abs(count - Fraction(1_150, 4)) < np.count_nonzero(np.diff(mine) > 1) + 1
            assert name == "shuffled" or max(per_class.values()) - min(per_class.values()) <= 1
            totals += per_class
        assert all(abs(count / 20 - 287.5) < 6 for count in totals.values())


@pytest.mark.parametrize("labels", [[3, -1, 3, 7, 3], [-(2**63), 2**63 - 1, 5, 5, -1], [-1, -1], []])
@pytest.mark.parametrize("unlabeled", [None, -1])
def test_balanced_weights_are_those_of_counting(labels: list[int], unlabeled: int | None) -> None:
    counts = Counter(labels)
    wanted = [0.0 if label == unlabeled else 1 / counts[label] for label in labels]
    found = balanced_weights(np.array(labels, np.int64), unlabeled)
    assert (found is None and not any(wanted)) or (found is not None and found.tolist() == wanted)


def test_balanced_classes_of_a_subset_are_its_own(tmp_path: Path) -> None:
    labels = np.array([0] * 50 + [1] * 30 + [2] * 20)
    rows = [*range(10), *range(50, 54), 60]
    some = Subset(of_classes(tmp_path / "f.h5", labels), rows)
    drawn = balanced(some, 40)
    assert Counter(labels[rows][drawn].tolist()) == {0: 20, 1: 20}
    assert balanced(some, 40, weights=[1 / 20] * 10 + [1 / 10] * 5) == drawn
    with h5pack.H5Loader(some, 4, weights="balanced", num_samples=40) as loader:
        assert torch.cat([labels for _, labels in loader]).tolist() == labels[rows][drawn].tolist()


def test_rows_without_a_label_are_in_no_class_of_a_pack(tmp_path: Path) -> None:
    path = packs.converted(tmp_path)
    with h5py.File(path, "r+") as file:
        file["labels"][:10] = -1
        labels = file["labels"][:]
    assert set(labels[balanced(h5pack.H5Dataset(path), 100)].tolist()) == {0, 1}
    # In other files it is a number as any.
    signs = of_classes(tmp_path / "signs.h5", np.array([-1] * 30 + [1] * 10))
    assert sum(index < 30 for index in balanced(signs, 20)) == 10
    with h5py.File(path, "r+") as file:
        file["labels"][:] = -1
    with pytest.raises(OptionsError, match="labels"):
        balanced(h5pack.H5Dataset(path), 100)


def test_ten_million_rows_take_little_more_than_their_weights(tmp_path: Path) -> None:
    rows = 10_000_000
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("images", (rows, 4), "u1", chunks=(5_000, 4))
    dataset = h5pack.H5Dataset(tmp_path / "f.h5")
    weights = np.random.default_rng(0).random(rows)
    tracemalloc.start()
    try:
        sampler = h5pack.ChunkBatchSampler(dataset, 256, weights=weights)
        held, peak = tracemalloc.get_traced_memory()
        assert held < 8 * rows + 2**20
        assert peak < 8 * rows + 8 * 2**20
        tracemalloc.reset_peak()
        batches = iter(sampler)
        assert len(set(next(batches))) > 50
        assert tracemalloc.get_traced_memory()[1] - held < 32 * 2**20, "a window of 16 chunks of 5,000 rows"
        sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "batches": 30_000})
        assert next(iter(sampler))
        assert tracemalloc.get_traced_memory()[1] - held < 32 * 2**20
    finally:
        tracemalloc.stop()


def wrong_at(index: int, value: float) -> npt.NDArray[np.float64]:
    weights = np.ones(packs.ROWS)
    weights[index] = value
    return weights


@pytest.mark.parametrize(
    "wrong",
    [
        *({"weights": wrong_at(17, -1)}, {"weights": wrong_at(102, np.nan)}, {"weights": wrong_at(0, np.inf)}),
        *({"weights": wrong_at(3, -np.inf)}, {"weights": np.ones(102)}, {"weights": []}, {"weights": 1.0}),
        *({"weights": np.ones((103, 2))}, {"weights": np.ones(103), "indices": [1, 2]}, {"weights": np.zeros(103)}),
        *({"weights": ["1"] * 103}, {"weights": [None] * 103}, {"weights": [[1], [1, 2]]}),
        *({"weights": np.ones(103) * 1j}, {"weights": "equal"}, {"weights": np.ones(103), "num_samples": 0}),
        *({"weights": np.ones(103), "num_samples": 2.5}, {"weights": np.ones(103), "num_samples": 2**60}),
        *({"num_samples": 50}, {"weights": [], "indices": []}),
    ],
    ids=str,
)
def test_error_names_the_parameter_at_fault(dataset: h5pack.H5Dataset, wrong: dict[str, Any]) -> None:
    batched = {"batch_size": 4}
    for make, size in ((h5pack.ChunkSampler, {}), (h5pack.ChunkBatchSampler, batched), (h5pack.H5Loader, batched)):
        with pytest.raises(OptionsError) as caught:
            make(dataset, **size, **wrong)
        assert {name.partition("=")[0] for name in caught.value.parameters} & set(wrong)


@pytest.mark.parametrize("labels", [None, np.zeros(20), np.zeros((20, 3), "u1")], ids=["none", "float", "table"])
def test_labels_that_are_no_classes_cannot_be_balanced(tmp_path: Path, labels: Any) -> None:
    parts = {} if labels is None else {"labels": labels}
    dataset = h5pack.H5Dataset(packs.write(tmp_path / "f.h5", images=packs.values(20), **parts))
    with pytest.raises(OptionsError) as caught:
        h5pack.ChunkBatchSampler(dataset, 4, weights="balanced")
    assert (caught.value.path, "weights" in caught.value.parameters) == (dataset.path, True)
