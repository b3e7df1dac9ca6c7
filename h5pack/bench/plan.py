"""Which cells a bench measures, and how long each may take: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from h5pack.bench.cell import Cell, Stored
from h5pack.bench.settings import BenchSettings

REPEATS = 4
"""How often a cell is to be measured, where its own slowness allows."""

_LEAST_SECONDS = {"hot": 0.14, "cold": 0.2}
"""That a cell takes to say anything, beginnings included; a cold one drops its file from the page cache first."""

_HOPELESS_BYTES = 2**30
_VARIED = ("direct", "window")


@dataclass(frozen=True)
class CellPlan:
    """What to measure in the time there is.

    Attributes
    ----------
    hot, cold : tuple of Cell
    left_out : tuple of Cell
        What the time does not suffice for.
    """

    hot: tuple[Cell, ...]
    cold: tuple[Cell, ...]
    left_out: tuple[Cell, ...]


def plan_cells(files: Sequence[Stored], settings: BenchSettings, batch: int, threads: int, seconds: float) -> CellPlan:
    """The most important cells that fit into `seconds`.

    Parameters
    ----------
    files : sequence of Stored
    settings : BenchSettings
    batch, threads : int
        Of all cells but those that vary them.
    seconds : float
        For measuring alone.
    """
    levels: dict[int, list[Cell]] = {}
    for stored in files:
        for cell in _cells(stored, settings, batch, threads):
            levels.setdefault(_level(cell), []).append(cell)
    taken: list[Cell] = []
    left_out: list[Cell] = []
    spent = 0.0
    for level in sorted(levels):
        cost = sum(least_of(cell) for cell in levels[level])
        # A level is taken as a whole: half a column compares nothing.
        if taken and spent + cost > seconds:
            left_out += levels[level]
            continue
        spent += cost
        taken += levels[level]
    hot, cold = (tuple(cell for cell in taken if cell.cache == cache) for cache in ("hot", "cold"))
    return CellPlan(hot, cold, tuple(left_out))


def least_of(cell: Cell) -> float:
    """Seconds that a cell takes at least; what decides the recommendation has four times as much."""
    return _LEAST_SECONDS[cell.cache] * (4 if _level(cell) <= 1 else 1)


def is_hopeless(stored: Stored, batch: int) -> bool:
    """Whether one batch of rows from anywhere may decode a gigabyte."""
    if stored.compression == "none" or not stored.chunk_bytes or not stored.chunk_rows:
        return False
    return min(batch, -(-stored.rows // stored.chunk_rows)) * stored.chunk_bytes > _HOPELESS_BYTES


def least_seconds(files: Sequence[Stored], settings: BenchSettings, batch: int, threads: int) -> float:
    """Seconds that the least that says anything takes: the first level of the cells, and half of that for a run-off."""
    cells = [cell for stored in files for cell in _cells(stored, settings, batch, threads)]
    first = min(map(_level, cells))
    return 1.5 * sum(least_of(cell) for cell in cells if _level(cell) == first)


def _cells(stored: Stored, settings: BenchSettings, batch: int, threads: int) -> list[Cell]:
    cells = []
    for cache in settings.caches:
        for engine in settings.engines:
            if engine == "tuned" and stored.chunk_rows is None:
                # There is no chunk cache.
                continue
            for order in settings.orders:
                reading = 1 if order == "single" or engine == "default" else threads
                rows = 1 if order == "single" else batch
                if order == "full" and is_hopeless(stored, batch):
                    continue
                cells.append(Cell(stored.label, order, engine, cache, rows, settings.window, reading))
        if _VARIED[0] not in settings.engines or _VARIED[1] not in settings.orders:
            continue
        varied = [Cell(stored.label, "window", "direct", cache, size, settings.window, threads)
                  for size in settings.batch_sizes[1:]]  # fmt: skip
        varied += [Cell(stored.label, "window", "direct", cache, batch, window, threads)
                   for window in settings.windows[1:]]  # fmt: skip
        varied += [Cell(stored.label, "window", "direct", cache, batch, settings.window, count)
                   for count in settings.threads if count != threads]  # fmt: skip
        varied += [Cell(stored.label, "window", "direct", cache, batch, settings.window, 1, count)
                   for count in settings.workers]  # fmt: skip
        cells += varied
    return cells


def _level(cell: Cell) -> int:
    """How much a cell matters; 0 decides what is recommended."""
    if cell.engine == "direct" and cell.order == "window":
        return 0 if cell.cache == "hot" else 1
    if cell.engine == "default" and cell.order == "single":
        return 2 if cell.cache == "hot" else 3
    if cell.cache == "hot":
        return 4 if cell.engine == "direct" else 5
    return 6 if cell.engine == "direct" else 7
