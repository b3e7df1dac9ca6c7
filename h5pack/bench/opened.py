"""What the ways of a bench share: each file's index, and memory for batches."""

from __future__ import annotations

from dataclasses import replace

from h5pack.bench.cell import Stored
from h5pack.feed.dataset import H5Dataset
from h5pack.feed.loader import H5Loader


class Opened:
    """Datasets that are indexed once, since a file of other making may have millions of chunks.

    Attributes
    ----------
    memory : list of H5Loader
        Loaders that keep memory for batches, which ways use in turns; a new kind of batch adds one.
    """

    def __init__(self) -> None:
        self.memory: list[H5Loader] = []
        self._datasets: dict[tuple[str, bool], H5Dataset] = {}

    def dataset(self, stored: Stored, *, library: bool = False) -> H5Dataset:
        """A file's rows; with `library` all of them come through the HDF5 library."""
        key = stored.label, library
        if key not in self._datasets:
            dataset = H5Dataset(stored.path, images=stored.images, labels=stored.labels)
            self._datasets[key] = through_library(dataset) if library else dataset
        return self._datasets[key]


def through_library(dataset: H5Dataset) -> H5Dataset:
    """The dataset, all of whose rows come through the HDF5 library from now on."""
    for name, index in dataset.engine.indexes.items():
        dataset.engine.indexes[name] = replace(index, reason="the bench asks for it")
    return dataset
