"""Which rows of a shuffle buffer are shown next: pure integers, without the rows themselves.

Fresh rows are *added* to slots, batch by batch, while there is room; batches are *dealt* from the slots. A row's
showings are counted down, and with the last one its slot is free. A batch never holds a row twice, and yet each row is
shown as often as it should be by the end of the epoch, with batches as large as the fresh ones were. For that a choice
must leave rows and sizes that still fit together, even if no fresh batch follows: batches of sizes s can be dealt from
rows with n showings left if and only if for every m the m largest batches have at most as many places as the sum of
min(n, m) over the rows (Gale 1957, Ryser 1957). So of the rows with at most m showings left no more may be chosen than
keep this true. Among the choices that do, chance decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from h5pack.feed.permutation import derive_key, shuffled

Numbers = npt.NDArray[np.int64]

_ECHO = 5


def showings(factor: Fraction, batch: int) -> int:
    """How often the rows of a batch are shown; of the first n batches it is `factor` x n, rounded down."""
    return int((batch + 1) * factor // 1 - batch * factor // 1)


class EchoDeck:
    """The slots of one epoch.

    Parameters
    ----------
    factor : Fraction
        Showings of a row, at least 1.
    rows : int
        The most that slots may hold, unless a single batch is more.
    seed, epoch : int

    Attributes
    ----------
    added : int
        Batches that were added.
    dealt : int
        Batches that were dealt.
    sizes : list of [int, int]
        Rows of the batches that were added, and how many such followed each other.
    batch, row : ndarray
        int64, (slots,): which batch a slot's row came with, and its place in that.
    left : ndarray
        int64, (slots,): showings left; 0 where the slot is free.
    """

    def __init__(self, factor: Fraction, rows: int, seed: int, epoch: int) -> None:
        self._factor, self._rows = factor, rows
        self._key = derive_key(_ECHO, seed, epoch)
        self._sizes_left: Counter[int] = Counter()
        self._largest = 0
        self.added = self.dealt = 0
        self.sizes: list[list[int]] = []
        self.left, self.batch, self.row, self._shown = (np.zeros(0, np.int64) for _ in range(4))

    @classmethod
    def replayed(
        cls, factor: Fraction, rows: int, seed: int, epoch: int, sizes: Sequence[Sequence[int]], dealt: int
    ) -> EchoDeck:
        """A deck as it was after so many batches were dealt, of `sizes` that were added by then or soon after.

        Raises
        ------
        ValueError
            If that many cannot be dealt of them.
        """
        deck = cls(factor, rows, seed, epoch)
        waiting = [size for size, count in sizes for _ in range(count)][::-1]
        for _ in range(dealt):
            while waiting and deck.wants:
                deck.add(waiting.pop())
            if deck.empty:
                raise ValueError(f"{dealt} batches cannot be dealt of {deck.added}")
            deck.deal()
        return deck

    @property
    def held(self) -> int:
        """Rows in the slots."""
        return int(np.count_nonzero(self.left))

    @property
    def wants(self) -> bool:
        """Whether there is room for another batch."""
        held = self.held
        return held == 0 or held + self._largest <= self._rows

    @property
    def empty(self) -> bool:
        """Whether there is nothing to deal."""
        return not self._sizes_left

    @property
    def oldest(self) -> int:
        """The first batch of which there are rows in the slots; the next to be added, if there are none."""
        return int(self.batch[self.left > 0].min(initial=self.added))

    def add(self, rows: int) -> Numbers:
        """Put a batch's rows into free slots.

        Returns
        -------
        ndarray
            int64, (rows,): the slots.
        """
        free = np.flatnonzero(self.left == 0)
        missing = rows - len(free)
        if missing > 0:
            free = np.concatenate([free, np.arange(len(self.left), len(self.left) + missing)])
            self.left, self.batch, self.row, self._shown = (
                np.concatenate([old, np.zeros(missing, np.int64)])
                for old in (self.left, self.batch, self.row, self._shown)
            )
        slots = free[:rows]
        count = showings(self._factor, self.added)
        self.left[slots], self._shown[slots] = count, 0
        self.batch[slots], self.row[slots] = self.added, np.arange(rows)
        self._sizes_left[rows] += count
        self._largest = max(self._largest, rows)
        self.added += 1
        if self.sizes and self.sizes[-1][0] == rows:
            self.sizes[-1][1] += 1
        else:
            self.sizes.append([rows, 1])
        return slots

    def deal(self) -> tuple[Numbers, Numbers]:
        """Choose the rows of the next batch, the largest that is due.

        Returns
        -------
        slots, repeats : ndarray
            int64, (n,): where its rows are, and which showing of each this is, counted from 0.
        """
        size = max(self._sizes_left)
        held = np.flatnonzero(self.left)
        order = held[shuffled(len(held), derive_key(self._key, self.dealt))]
        slots = order[self._allowed(self.left[order], size)][:size]
        repeats = self._shown[slots]
        self.left[slots] -= 1
        self._shown[slots] += 1
        self._sizes_left[size] -= 1
        if not self._sizes_left[size]:
            del self._sizes_left[size]
        self.dealt += 1
        return slots, repeats

    def _allowed(self, left: Numbers, size: int) -> npt.NDArray[np.bool_]:
        """Which of the rows may be chosen, the first ones first."""
        allowed = np.ones(len(left), bool)
        for most in range(1, int(left.max(initial=0))):
            few = np.flatnonzero(allowed & (left <= most))
            spare = int(np.minimum(left, most).sum()) - self._places(most + 1) + size
            allowed[few[max(0, spare) :]] = False
        return allowed

    def _places(self, batches: int) -> int:
        """Places of the largest batches that are due."""
        places = 0
        for size in sorted(self._sizes_left, reverse=True):
            count = min(batches, self._sizes_left[size])
            places, batches = places + count * size, batches - count
        return places
