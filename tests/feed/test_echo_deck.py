"""`EchoDeck`: rows are shown as often as they should be, never twice in a batch, whatever the sizes."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

from h5pack.feed.echo_deck import EchoDeck, showings

Shown = tuple[int, int, int]
FACTORS = [Fraction(1), Fraction(4, 3), Fraction(2), Fraction(5, 2), Fraction(3), Fraction(23, 5)]


def dealt(deck: EchoDeck, sizes: list[int]) -> Iterator[list[Shown]]:
    """The batches of an epoch of such fresh ones: (batch, row, repeat) of each row."""
    waiting = sizes[::-1]
    while True:
        while waiting and deck.wants:
            deck.add(waiting.pop())
        if deck.empty:
            return
        # Free slots keep what they had, so this is what was in those that were dealt.
        slots, repeats = deck.deal()
        yield list(zip(deck.batch[slots].tolist(), deck.row[slots].tolist(), repeats.tolist(), strict=True))


def shape_of(number: int) -> tuple[list[int], int]:
    """Fresh batches of some sizes, and a buffer's rows: equal sizes, with a last smaller one, or any."""
    chance = random.Random(number)
    batch, count = chance.randint(1, 9), chance.randint(1, 12)
    sizes = [batch] * count
    if number % 3 == 1:
        sizes[-1] = chance.randint(1, batch)
    elif number % 3 == 2:
        sizes = [chance.randint(0, 9) for _ in range(count)]
    return sizes, chance.randint(1, 6 * batch)


@pytest.mark.parametrize("factor", FACTORS, ids=str)
def test_rows_are_shown_so_often_and_never_twice_in_a_batch(factor: Fraction) -> None:
    for number in range(150):
        sizes, rows = shape_of(number)
        deck = EchoDeck(factor, rows, number, 3)
        batches = []
        for batch in dealt(deck, sizes):
            batches.append(batch)
            assert len({(origin, row) for origin, row, _ in batch}) == len(batch), "a row twice in a batch"
            if number % 3 < 2:
                assert len(deck.left) <= max(rows, sizes[0])
        expected = [showings(factor, origin) for origin in range(len(sizes))]
        assert set(expected) <= {int(factor), int(-(-factor // 1))}
        assert sum(expected) == int(len(sizes) * factor)
        seen: dict[tuple[int, int], list[int]] = defaultdict(list)
        for origin, row, repeat in itertools.chain.from_iterable(batches):
            seen[origin, row].append(repeat)
        assert seen == {
            (origin, row): list(range(expected[origin])) for origin, size in enumerate(sizes) for row in range(size)
        }
        assert Counter(map(len, batches)) == sum(
            (Counter({size: count}) for size, count in zip(sizes, expected, strict=True)), Counter()
        )


@pytest.mark.parametrize("factor", [Fraction(2), Fraction(5, 2)], ids=str)
def test_replayed_at_every_batch(factor: Fraction) -> None:
    for number in range(24):
        sizes, rows = shape_of(number)
        whole = list(dealt(EchoDeck(factor, rows, 5, 0), sizes))
        deck = EchoDeck(factor, rows, 5, 0)
        for done, _ in enumerate(dealt(deck, sizes), 1):
            again = EchoDeck.replayed(factor, rows, 5, 0, deck.sizes, done)
            assert (again.added, again.dealt, again.oldest) == (deck.added, done, deck.oldest)
            assert np.array_equal(again.left, deck.left)
            assert list(dealt(again, sizes[again.added :])) == whole[done:]


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    orders = [list(dealt(EchoDeck(Fraction(2), 40, seed, epoch), [8] * 9)) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] == list(dealt(EchoDeck(Fraction(2), 40, 0, 0), [8] * 9))
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_the_order_is_pinned() -> None:
    """It must not change between releases: saved states replay it."""
    order = list(dealt(EchoDeck(Fraction(3, 2), 4, 7, 1), [2, 2, 2, 1]))
    assert order == [
        [(1, 1, 0), (0, 0, 0)],
        [(1, 0, 0), (0, 1, 0)],
        [(1, 0, 1), (1, 1, 1)],
        [(2, 0, 0), (2, 1, 0)],
        [(3, 0, 0)],
        [(3, 0, 1)],
    ]


def test_repeats_are_far_apart() -> None:
    """With a buffer of ten batches the second showing comes about as many batches later, not next."""
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, batch in enumerate(dealt(EchoDeck(Fraction(2), 160, 0, 0), [16] * 200)):
        for origin, row, _ in batch:
            places[origin, row].append(place)
    gaps = np.array([second - first for first, second in places.values()])
    assert 8 < gaps.mean() < 12
    assert (gaps == 1).mean() < 0.2


def test_only_choices_that_can_be_finished_are_made_and_all_of_those() -> None:
    """Three rows, one of which has two showings left, in two batches of two: it must be in both."""
    seen = set()
    for epoch in range(60):
        deck = EchoDeck(Fraction(2), 2, 0, epoch)
        deck.add(2)
        deck.add(1)
        # Sizes 2, 2, 1, 1 of rows with two showings each.
        first = frozenset(deck.deal()[0].tolist())
        seen.add(first)
        assert [len(deck.deal()[0]) for _ in range(3)] == [2, 1, 1]
        assert deck.empty
    assert seen == {frozenset(pair) for pair in itertools.combinations(range(3), 2)}
    tight = EchoDeck(Fraction(2), 2, 0, 0)
    tight.add(2)
    tight.left[:] = [2, 1]
    tight._sizes_left = Counter({2: 1, 1: 1})
    assert sorted(tight.deal()[0].tolist()) == [0, 1]
    assert tight.deal()[0].tolist() == [0]


def test_more_than_there_is_cannot_be_replayed() -> None:
    with pytest.raises(ValueError, match="5 batches cannot be dealt of 2"):
        EchoDeck.replayed(Fraction(2), 10, 0, 0, [[4, 2]], 5)
