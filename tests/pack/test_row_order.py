"""Which row each image goes to, and how rows close up after rejects."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from h5pack.format.fields import RaggedRows
from h5pack.pack.finish import moved_runs
from h5pack.pack.row_order import close_holes, order_rows
from h5pack.sources.validation import choose_groups, choose_val, group_ids
from h5pack.system.arrays import shuffled_split

# The order of every pack ever made hangs on these; they never change.
PINNED = {
    (10, 0, 0): [3, 4, 0, 9, 2, 6, 7, 8, 1, 5],
    (10, 0, 1): [8, 4, 6, 0, 7, 5, 1, 9, 2, 3],
    (10, 1, 0): [9, 3, 2, 7, 8, 6, 1, 5, 0, 4],
    (10, 2**63 - 1, 0): [4, 5, 2, 3, 7, 8, 1, 6, 9, 0],
    (5, 12_345, 7): [0, 4, 1, 3, 2],
}


@pytest.mark.parametrize(("count", "seed", "split"), PINNED)
def test_the_order_never_changes_between_releases(count: int, seed: int, split: int) -> None:
    assert shuffled_split(count, seed, split).tolist() == PINNED[count, seed, split]


def slow_shuffled(count: int, seed: int, split: int) -> list[int]:
    """SplitMix64 in Python's own integers."""

    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    gamma = 0x9E3779B97F4A7C15
    key = mix((seed * gamma + (split + 1) * 0xD1B54A32D192ED03) % 2**64)
    return sorted(range(count), key=lambda place: mix((key + (place + 1) * gamma) % 2**64))


@given(st.integers(0, 200), st.integers(0, 2**63 - 1), st.integers(0, 50))
@example(0, 0, 0)
@example(1, 2**63 - 1, 0)
def test_shuffling_is_the_published_hash(count: int, seed: int, split: int) -> None:
    assert shuffled_split(count, seed, split).tolist() == slow_shuffled(count, seed, split)


@given(st.lists(st.integers(0, 4), max_size=80), st.none() | st.integers(0, 2**63 - 1), st.integers(0, 1_000))
def test_ordering_keeps_every_image_in_its_split(split_of: list[int], seed: int | None, gaps: int) -> None:
    indices = np.sort(np.random.default_rng(gaps).permutation(len(split_of) + gaps)[: len(split_of)])
    ids = np.array(split_of, np.int32)
    ordered = order_rows(indices, ids, 5, seed)
    assert ordered.split_starts.tolist() == [0, *np.cumsum(np.bincount(ids, minlength=5)).tolist()]
    for split in range(5):
        inside = ordered.origins[ordered.split_starts[split] : ordered.split_starts[split + 1]]
        members = indices[ids == split]
        assert sorted(inside.tolist()) == members.tolist()
        if seed is None:
            assert inside.tolist() == members.tolist()
        else:
            assert inside.tolist() == members[slow_shuffled(len(members), seed, split)].tolist()


@st.composite
def planned(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Splits, and which of their rows hold an image."""
    lengths = draw(st.lists(st.integers(0, 25), min_size=1, max_size=5))
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows = int(starts[-1])
    packed = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    return starts, np.array(packed, np.bool_)


@given(planned(), st.booleans())
def test_closing_up_keeps_the_packed_rows_of_each_split(plan: tuple[np.ndarray, np.ndarray], keep_order: bool) -> None:
    starts, packed = plan
    closed = close_holes(starts, packed, keep_order)
    assert len(closed.origins) == packed.sum() == closed.split_starts[-1]
    for split in range(len(starts) - 1):
        inside = closed.origins[closed.split_starts[split] : closed.split_starts[split + 1]]
        good = np.flatnonzero(packed[starts[split] : starts[split + 1]]) + starts[split]
        assert sorted(inside.tolist()) == good.tolist()
        if keep_order:
            assert inside.tolist() == good.tolist()
        else:
            holes = starts[split + 1] - starts[split] - len(good)
            displaced = inside - starts[split] != np.arange(len(inside))
            assert displaced.sum() <= holes
            assert inside[displaced].tolist() == good[len(good) - displaced.sum() :].tolist()
    assert (closed.origins >= np.arange(len(closed.origins))).all(), "a row never moves up"


@given(planned(), st.booleans())
def test_carrying_out_the_moves_yields_the_order(plan: tuple[np.ndarray, np.ndarray], keep_order: bool) -> None:
    starts, packed = plan
    order = close_holes(starts, packed, keep_order).origins
    file = list(range(len(packed)))
    runs = moved_runs(order)
    assert runs == sorted(runs)
    for target, origin, rows in runs:
        for step in range(rows):
            assert file[origin + step] == origin + step, "overwritten before it was moved"
            file[target + step] = file[origin + step]
    assert file[: len(order)] == order.tolist()
    assert sum(rows for _, _, rows in runs) == (order != np.arange(len(order))).sum()
    for (target, origin, rows), (following, source, _) in itertools.pairwise(runs):
        assert (target + rows, origin + rows) != (following, source), "two runs could have been one"


def test_the_validation_split_never_changes_between_releases() -> None:
    labels = np.array([5, 7, 5, 7, 7, -1, 7, 5, 7, 7])
    assert np.flatnonzero(choose_val(labels, 10, 0.3, 0)).tolist() == [3, 4, 7]
    assert np.flatnonzero(choose_val(None, 10, 0.3, 0)).tolist() == [2, 4, 7]
    assert np.flatnonzero(choose_groups(np.unique(labels, return_inverse=True)[1], 0.3, 0)).tolist() == [0, 2, 5, 7]
    # Without images, such as if all images for training were rejected, there is no group.
    for values in (np.zeros(0, np.int64), np.zeros((0, 3), np.float32)):
        assert choose_groups(group_ids(values), 0.5, 0).tolist() == []


class_sizes = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(class_sizes, st.floats(0.001, 0.999), st.integers(0, 2**63 - 1))
@example([10] * 10, 0.1, 0)
@example([1] * 60, 0.1, 0)
@example([3, 3], 0.5, 0)
def test_each_class_gives_its_fraction_to_the_validation_split(sizes: list[int], val: float, seed: int) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)) * 7 - 1, sizes))
    chosen = choose_val(labels, len(labels), val, seed)
    assert chosen.sum() == round(len(labels) * val)
    for label, size in zip(np.arange(len(sizes)) * 7 - 1, sizes, strict=True):
        assert abs(chosen[labels == label].sum() - size * val) < 1 + 1e-9
    assert choose_val(None, len(labels), val, seed).sum() == chosen.sum()


def test_what_a_seed_chooses_for_validation_is_even() -> None:
    labels = np.repeat(np.arange(30), 3)
    counts = sum(choose_val(labels, 90, 0.1, seed).astype(int) for seed in range(400))
    # Each image is expected in 40 of them, with a standard deviation of 6.
    assert min(counts) > 15
    assert max(counts) < 70


@given(class_sizes, st.floats(0.001, 0.999), st.integers(0, 2**63 - 1))
@example([1, 99], 0.9, 0)
@example([5], 0.5, 0)
@example([25, 3, 3, 3, 3, 3], 0.1, 3)
@example([1, 1, 2], 0.999, 0)
def test_whole_groups_come_close_to_the_fraction(sizes: list[int], val: float, seed: int) -> None:
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    chosen = choose_groups(groups, val, seed)
    assert set(groups[chosen]).isdisjoint(groups[~chosen])
    assert chosen.any() == (len(sizes) > 1)
    assert not chosen.all()
    # No single group that is left would bring the number of images closer, unless one must be left.
    miss = abs(chosen.sum() - val * len(groups))
    left = sorted(set(groups[~chosen].tolist()))
    if len(left) > 1 and chosen.sum() < 2 * val * len(groups):
        assert miss <= min(abs(chosen.sum() + sizes[group] - val * len(groups)) for group in left)
    # At most half of the smallest group that is left, or of the only one that is chosen, is too few or too many.
    assert miss <= max(sizes)


def test_equal_values_are_one_group() -> None:
    texts = RaggedRows.of_texts(["b", "", "a", "b", ""], "text")
    assert group_ids(texts).tolist() == [2, 0, 1, 2, 0]
    nan = np.nan
    assert group_ids(np.array([1.5, nan, 1.5, nan, -2])).tolist() == [1, 2, 1, 2, 0]
    pairs = group_ids(np.array([[1, nan], [nan, 1], [1, nan], [1, 2]])).tolist()
    assert [pairs[0] == other for other in pairs] == [True, False, True, False]
    assert sorted(set(pairs)) == [0, 1, 2]
    same = np.array([[0.0, nan, 1], [-0.0, np.copysign(nan, -1), 1]], np.float32)
    assert group_ids(same).tolist() == group_ids(same[:, :1]).tolist() == [0, 0]
    ragged = RaggedRows.of("ragged", list(same), same[0, :0])
    assert group_ids(ragged).tolist() == [0, 0]
