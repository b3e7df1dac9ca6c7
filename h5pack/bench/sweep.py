"""Measures cells in turns, for as long as the time allows."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from h5pack.bench.cell import ENOUGH_REPEATS, Cell, Measurement, Stored
from h5pack.bench.cell_way import open_way
from h5pack.bench.opened import Opened
from h5pack.bench.plan import REPEATS, least_of
from h5pack.bench.ways import LoaderWay, Way
from h5pack.errors import H5PackError
from h5pack.measure.page_cache import make_hot
from h5pack.measure.page_state import PageState

_LEAST_RUN = 0.02
_WARM_BYTES = 8 * 1024 * 1024
_MOST_RUN = 0.5
"""Longer runs tell less than more of them."""
_LONGEST_LOAD = 1.0
_STAYS = "its pages stay in the page cache, which this file system does not let go"


@dataclass
class _Running:
    """What is known of a cell so far: times in seconds, `run` of its last repeat, `load` the longest."""

    cell: Cell
    anew: bool
    allowance: float = 0.0
    speeds: list[float] = field(default_factory=list)
    spent: float = 0.0
    run: float = 0.0
    load: float = 0.0
    asked: list[float] = field(default_factory=list)
    hit_rate: float | None = None
    reason: str | None = None

    def loads_anew(self) -> bool:
        """Whether its file is loaded before the next repeat, which leaves time for enough of them."""
        return self.anew and ENOUGH_REPEATS * (self.run + self.load) <= self.allowance

    def next_seconds(self) -> float:
        """That the next repeat will take."""
        return self.run + (self.load if self.loads_anew() else 0.0)


class Sweep:
    """Runs cells in turns, forwards and backwards, so that a drift of the machine's speed meets all alike.

    Parameters
    ----------
    files : sequence of Stored
    seed : int
    report : callable
        Called with the seconds that have passed since the last call.
    """

    def __init__(self, files: Sequence[Stored], seed: int, report: Callable[[float], None]) -> None:
        self._files = {stored.label: stored for stored in files}
        self._seed = seed
        self._report = report
        self._clock = time.monotonic()
        self._opened = Opened()
        self._pages = {stored.label: PageState(self._opened.dataset(stored)) for stored in files}
        self._stays: set[str] = set()

    def measure(
        self,
        cells: Sequence[Cell],
        seconds: float,
        found: list[Measurement],
        others: Sequence[Callable[[], None]] = (),
        *,
        anew: bool = False,
    ) -> None:
        """Measure cells of one page-cache state for about so long, and put what is known of them into `found`.

        Each cell has its share of it (`least_of`); one that is slow to run gets fewer repeats. The first ones come
        first, and those whose turn does not come in time say so.

        Parameters
        ----------
        cells : sequence of Cell
        seconds : float
        found : list of Measurement
            Gets one for each cell, also where this is interrupted.
        others : sequence of callable
            Called once each turn: ceilings.
        anew : bool
            Load a file into the page cache anew before each repeat, by an epoch as in training, as long as there
            is time for enough repeats. How its pages come to lie in memory makes all epochs faster or slower by up to a
            fifth until it is loaded again, which repeats without it would not show.
        """
        running = [_Running(cell, anew) for cell in cells]
        if not running:
            return
        shares = sum(least_of(cell) for cell in cells)
        for one in running:
            one.allowance = seconds * least_of(one.cell) / shares
        end = time.monotonic() + seconds
        try:
            self._turns(running, end, others)
        finally:
            found += [self._known(one) for one in running]

    def _turns(self, running: list[_Running], end: float, others: Sequence[Callable[[], None]]) -> None:
        turn = 0
        while True:
            due = [
                one for one in running
                if one.reason is None and (not one.speeds or one.spent + one.next_seconds() <= one.allowance)
            ]  # fmt: skip
            if not due or time.monotonic() >= end:
                return
            for other in others:
                other()
                self._tick()
            for one in due if turn % 2 == 0 else reversed(due):
                if time.monotonic() + one.next_seconds() > end:
                    continue
                begin = time.monotonic()
                if one.loads_anew():
                    self._load(one)
                loaded = time.monotonic()
                self._run(one, min(_MOST_RUN, max(_LEAST_RUN, one.allowance / (2 * REPEATS))))
                now = time.monotonic()
                one.load, one.run = max(one.load, loaded - begin), now - loaded
                one.spent += now - begin
                self._tick()
            turn += 1

    def _run(self, one: _Running, seconds: float) -> None:
        stored = self._files[one.cell.stored]
        cold = one.cell.cache == "cold"
        if cold and stored.label in self._stays:
            one.reason = _STAYS
            return
        way: Way | None = None
        try:
            way = open_way(one.cell, stored, self._seed, self._opened)
            if cold:
                # Nothing was read by this way yet: what it keeps in memory by itself would not be cold.
                if self._pages[stored.label].drop() is not None:
                    self._stays.add(stored.label)
                    one.reason = _STAYS
                    return
            else:
                if not stored.own:
                    make_hot(Path(stored.path))
                # A first touch costs more than what is measured.
                way.run(seconds / 2)
            timing = way.run(seconds, once=cold)
            if timing.rows == 0 or timing.seconds <= 0:
                one.reason = "no row came in time"
                return
            one.speeds.append(timing.rows / timing.seconds)
            if timing.bytes_a_row is not None:
                one.asked.append(timing.bytes_a_row)
            if isinstance(way, LoaderWay):
                one.hit_rate = way.hit_rate()
        except (H5PackError, OSError, MemoryError, RuntimeError) as error:
            # A DataLoader's workers that die, for want of shared memory for one, are a RuntimeError.
            one.reason = str(error) or type(error).__name__
        finally:
            if way is not None:
                way.close()

    def warm(self, seconds: float) -> None:
        """Have the sample's rows in the page cache; of the file asked about as many as can be read in so long."""
        for label, stored in self._files.items():
            rows = max(1, min(stored.rows, _WARM_BYTES // stored.row_bytes))
            self._epoch(Cell(label, "window", "direct", "hot", rows, 16, 1), seconds)
            if not stored.own:
                make_hot(Path(stored.path))
            self._tick()

    def _load(self, one: _Running) -> None:
        """Have a file's rows in the page cache anew, as in training: by an epoch in this order."""
        if one.cell.cache == "hot" and self._pages[one.cell.stored].drop() is None:
            self._epoch(replace(one.cell, workers=None), _LONGEST_LOAD)

    def _epoch(self, cell: Cell, seconds: float) -> None:
        """Read an epoch, not much longer than so many seconds, for nothing but what it leaves in the page cache."""
        # What it is that cannot be read, each cell will say.
        with contextlib.suppress(H5PackError, OSError):
            way = open_way(cell, self._files[cell.stored], self._seed, self._opened)
            way.run(seconds, once=True)
            way.close()

    def _known(self, one: _Running) -> Measurement:
        row_bytes = self._files[one.cell.stored].row_bytes
        amplification = statistics.mean(one.asked) / row_bytes if one.asked else None
        reason = one.reason if one.reason is not None or one.speeds else "the time was over before"
        return Measurement(one.cell, tuple(one.speeds), amplification, one.hit_rate, reason)

    def _tick(self) -> None:
        now = time.monotonic()
        self._report(now - self._clock)
        self._clock = now
