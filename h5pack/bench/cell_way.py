"""Which way of reading a cell asks for."""

from __future__ import annotations

from h5pack.bench.cell import Cell, Stored
from h5pack.bench.ways import LibraryWay, LoaderWay, SingleWay, Way, open_dataset, through_library
from h5pack.bench.worker_way import WorkerWay
from h5pack.feed.loader import H5Loader


def open_way(cell: Cell, stored: Stored, seed: int, memory: list[H5Loader] | None = None) -> Way:
    """The way of a cell.

    Parameters
    ----------
    cell : Cell
    stored : Stored
    seed : int
    memory : list of H5Loader, optional
        Loaders that keep memory for batches, which ways use in turns; a new kind of batch adds one.
    """
    if cell.workers is not None:
        return WorkerWay(open_dataset(stored), cell, stored, seed)
    if cell.engine == "default":
        return LibraryWay(cell, stored, seed, tuned=False)
    if cell.order == "single":
        return LibraryWay(cell, stored, seed, tuned=True) if cell.engine == "tuned" else SingleWay(stored, seed)
    dataset = open_dataset(stored)
    way = LoaderWay(through_library(dataset) if cell.engine == "tuned" else dataset, cell, stored, seed)
    way.share([] if memory is None else memory)
    return way
