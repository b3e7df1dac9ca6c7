"""A split that is kept in memory: each chunk is read when it is first needed, and batches are gathered there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.feed.buffers import anonymous
from h5pack.feed.dataset import H5Dataset


class ResidentRows:
    """Rows of a dataset's parts, in memory.

    Parameters
    ----------
    dataset : H5Dataset
    rows : ndarray
        int64, (n,), ascending, without repeats: rows of the file.
    names : sequence of str, optional
        Which parts; None: all.
    """

    def __init__(self, dataset: H5Dataset, rows: npt.NDArray[np.int64], names: Sequence[str] | None = None) -> None:
        self._dataset = dataset
        self._rows = rows
        self._unit = dataset.unit_rows
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        for name in dataset.names if names is None else names:
            index = dataset.engine.indexes[name]
            memory = np.frombuffer(anonymous(len(rows) * index.row_bytes), index.native_dtype, -1)
            count = len(rows) * index.row_bytes // index.dtype.itemsize
            self._arrays[name] = memory[:count].reshape(len(rows), *index.row_shape)
        first = int(rows[0]) // self._unit if len(rows) else 0
        last = int(rows[-1]) // self._unit if len(rows) else -1
        self._first = first
        self._together = not len(rows) or int(rows[-1]) - int(rows[0]) + 1 == len(rows)
        self._loaded = np.zeros(last - first + 1, np.bool_)

    @staticmethod
    def bytes_needed(dataset: H5Dataset, rows: int) -> int:
        """Bytes that `rows` rows of all parts take."""
        return rows * sum(dataset.engine.indexes[name].row_bytes for name in dataset.names)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def load_all(self) -> None:
        """Read all rows at once."""
        for name, array in self._arrays.items():
            self._dataset.read_rows(name, self._rows, array)
        self._loaded[:] = True

    def missing(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """The chunks of `rows` that were not loaded yet."""
        chunks = np.unique(rows // self._unit)
        return [int(chunk) for chunk in chunks[~self._loaded[chunks - self._first]]]

    def load(self, chunk: int) -> None:
        """Read a chunk's rows. Doing it twice is wasted, not wrong."""
        low, high = np.searchsorted(self._rows, (chunk * self._unit, (chunk + 1) * self._unit)).tolist()
        for name, array in self._arrays.items():
            self._dataset.read_rows(name, self._rows[low:high], array[low:high])
        self._loaded[chunk - self._first] = True

    def gather(self, name: str, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Copy loaded rows to `out`, in the order given."""
        places = rows - self._rows[0] if self._together else np.searchsorted(self._rows, rows)
        np.take(self._arrays[name], places, axis=0, out=out, mode="clip")
