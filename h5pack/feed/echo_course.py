"""How an epoch's batches are shown several times: three courses that it can take.

A course gives batches, and keeps its *place*, which is what a state is made of. The place outlives the course, and
holds neither batches nor threads, so a forgotten iterator takes them with it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from h5pack.errors import StateError
from h5pack.feed.batch_key import EchoedBatch, repeats_of
from h5pack.feed.echo_deck import EchoDeck, showings
from h5pack.feed.fetch_ahead import FetchAhead
from h5pack.feed.row_buffer import RowBuffer, rows_in
from h5pack.feed.upstream import Position, Pulled, Pulling


@dataclass
class Place:
    """Where a course is.

    Attributes
    ----------
    loader : Position
        Of the wrapped loader's iteration: before `batch`.
    epoch : int
    batch : int
        The batch that is shown, or, with a buffer, the first of which there are rows in it.
    showing : int
        How often it was shown; with a buffer, how many batches were dealt.
    sizes : list of [int, int]
        With a buffer: rows of the batches that were taken in, and how many such followed each other.
    shown, fresh : int
        Batches (with a buffer: rows) handed out in this iteration, and how many of them for the first time.
    """

    loader: Position
    epoch: int
    batch: int = 0
    showing: int = 0
    sizes: list[list[int]] = field(default_factory=list)
    shown: int = 0
    fresh: int = 0


class FixedCourse:
    """Each batch `factor` times, one showing after the other.

    Parameters
    ----------
    pulling : Pulling
        The wrapped loader's iteration.
    place : Place
        Where to begin.
    factor : Fraction
    """

    def __init__(self, pulling: Pulling, place: Place, factor: Fraction) -> None:
        self._pulling, self._place, self._factor = pulling, place, factor
        self._current: Pulled | None = None

    def next(self) -> Any:
        """The next batch, or StopIteration."""
        place = self._place
        if self._current is None:
            self._current = self._pulling.pull()
            place.epoch = self._current.epoch
        current = self._current
        batch = _echoed(current.batch, place.showing, _whole(self._factor))
        _count(place)
        if place.showing == showings(self._factor, place.batch):
            place.batch, place.showing, place.loader = place.batch + 1, 0, _behind(place.loader, current)
            self._current = None
        return batch

    def close(self) -> None:
        """Let go of the batch and of the loader's iteration."""
        self._current = None
        self._pulling.close()


class AutomaticCourse:
    """Each batch until a fresh one is ready, and at most `most` times.

    Parameters
    ----------
    pulling : Pulling
    place : Place
    most : int

    Attributes
    ----------
    reader : Reader
        The thread that pulls.
    """

    def __init__(self, pulling: Pulling, place: Place, most: int) -> None:
        self._place, self._most = place, most
        self._current: Pulled | None = None
        self._ahead = FetchAhead(pulling)
        self.reader = self._ahead.reader

    def next(self) -> Any:
        """The next batch, or StopIteration."""
        place = self._place
        self._ahead.consumer_asks()
        fresh = self._ahead.take(wait=self._current is None or place.showing >= self._most)
        if fresh is not None:
            self._show(fresh)
            del fresh
            if place.showing >= self._most:
                # A resume: it was shown as often as may be.
                return self.next()
        assert self._current is not None
        batch = _echoed(self._current.batch, place.showing, self._most)
        _count(place)
        self._ahead.consumer_gets()
        return batch

    def close(self) -> None:
        """End the thread, after the batch that it is fetching."""
        self._current = None
        self._ahead.close()

    def _show(self, fresh: Pulled) -> None:
        place = self._place
        if self._current is not None:
            place.batch, place.showing, place.loader = place.batch + 1, 0, _behind(place.loader, self._current)
        place.epoch = fresh.epoch
        self._current = fresh


class MixedCourse:
    """Each row `factor` times, in batches of rows out of a buffer.

    Parameters
    ----------
    pulling : Pulling
    place : Place
    factor : Fraction
    rows : int
        Of the buffer.
    seed : int
    """

    def __init__(self, pulling: Pulling, place: Place, factor: Fraction, rows: int, seed: int) -> None:
        self._pulling, self._place = pulling, place
        self._factor, self._rows, self._seed = factor, rows, seed
        self._deck: EchoDeck | None = None
        self._buffer = RowBuffer(rows)
        self._over = False
        # Before each batch of which there are rows in the buffer, and behind the last one.
        self._positions: deque[Position] = deque([place.loader])

    def next(self) -> Any:
        """The next batch, or StopIteration."""
        place = self._place
        deck = self._deck or self._begin()
        while not self._over and deck.wants:
            try:
                self._add(deck, self._pulling.pull())
            except StopIteration:
                self._over = True
        if deck.empty:
            raise StopIteration
        slots, shown = deck.deal()
        repeats = torch.from_numpy(self._buffer.repeats(slots) * _whole(self._factor) + shown)
        batch = EchoedBatch.of(self._buffer.take(slots), repeats)
        oldest = deck.oldest
        for _ in range(place.batch, oldest):
            self._positions.popleft()
        place.batch = oldest
        place.loader, place.showing = self._positions[0], deck.dealt
        place.shown += len(slots)
        place.fresh += int((shown == 0).sum())
        return batch

    def close(self) -> None:
        """Let go of the buffer and of the loader's iteration."""
        self._buffer = RowBuffer(0)
        self._pulling.close()

    def _begin(self) -> EchoDeck:
        place = self._place
        if place.showing:
            deck = self._deck = self._resumed()
        else:
            first = self._pulling.pull()
            place.epoch = first.epoch
            deck = self._deck = EchoDeck(self._factor, self._rows, self._seed, place.epoch)
            self._add(deck, first)
        place.sizes = deck.sizes
        return deck

    def _resumed(self) -> EchoDeck:
        """The deck as it was, and its rows, whose batches are fetched again."""
        place = self._place
        try:
            deck = EchoDeck.replayed(self._factor, self._rows, self._seed, place.epoch, place.sizes, place.showing)
            if deck.oldest != place.batch:
                raise ValueError(f"batch {place.batch} is not the first of {deck.oldest}")
        except ValueError as error:
            raise StateError(f"the state's batches do not add up ({error}); it was damaged") from error
        sizes = [size for size, count in deck.sizes for _ in range(count)]
        for number in range(place.batch, deck.added):
            try:
                pulled: Pulled | None = self._pulling.pull()
            except StopIteration:
                pulled = None
            if pulled is None or rows_in(pulled.batch) != sizes[number]:
                raise StateError(
                    f"batch {number} of the epoch is not the one of {sizes[number]} rows that the state was saved "
                    "with; resume with the same loader"
                )
            slots = np.flatnonzero((deck.left > 0) & (deck.batch == number))
            self._buffer.put(slots, pulled.batch, deck.row[slots])
            self._positions.append(_behind(self._positions[-1], pulled))
        return deck

    def _add(self, deck: EchoDeck, pulled: Pulled) -> None:
        self._buffer.put(deck.add(rows_in(pulled.batch)), pulled.batch)
        self._positions.append(_behind(self._positions[-1], pulled))


def _behind(position: Position, pulled: Pulled) -> Position:
    """The position behind a batch of the same iteration."""
    return Position(position.counted, pulled.number, pulled.state)


def _whole(factor: Fraction) -> int:
    """How often a row is shown at most."""
    return -int(-factor // 1)


def _echoed(batch: Any, showing: int, most: int) -> Any:
    """A batch that says which showing it is; at its first one the batch itself."""
    before = repeats_of(batch)
    if showing == 0 and isinstance(before, int) and before == 0:
        return batch
    return EchoedBatch.of(batch, before * most + showing)


def _count(place: Place) -> None:
    place.shown += 1
    place.fresh += place.showing == 0
    place.showing += 1
