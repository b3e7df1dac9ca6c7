"""Which way of reading a cell asks for."""

from __future__ import annotations

from h5pack.bench.cell import Cell, Stored
from h5pack.bench.opened import Opened
from h5pack.bench.ways import LibraryWay, LoaderWay, SingleWay, Way
from h5pack.bench.worker_way import WorkerWay


def open_way(cell: Cell, stored: Stored, seed: int, opened: Opened) -> Way:
    """The way of a cell.

    Parameters
    ----------
    cell : Cell
    stored : Stored
    seed : int
    opened : Opened
        What ways share.
    """
    direct = opened.dataset(stored)
    if cell.workers is not None:
        return WorkerWay(direct, cell, stored, seed)
    if cell.engine == "default":
        return LibraryWay(direct, cell, stored, seed, tuned=False)
    if cell.order == "single":
        if cell.engine == "tuned":
            return LibraryWay(direct, cell, stored, seed, tuned=True)
        return SingleWay(direct, stored, seed)
    way = LoaderWay(opened.dataset(stored, library=cell.engine == "tuned"), cell, stored, seed)
    way.share(opened.memory)
    return way
