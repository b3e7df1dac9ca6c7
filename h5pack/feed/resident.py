"""A split that is kept in memory: each chunk is read when it is first needed, and batches are gathered there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.feed.buffers import anonymous
from h5pack.feed.dataset import H5Dataset

_PIECE_ROWS = 65_536
"""Rows that `load_all` reads at once; planning a read takes many times the bytes of a small row."""


class ResidentRows:
    """Rows of a dataset's parts, in memory.

    Parameters
    ----------
    dataset : H5Dataset
    rows : range or ndarray
        int64, (n,), ascending, without repeats: rows of the file.
    names : sequence of str, optional
        Which parts; None: all.
    """

    def __init__(
        self, dataset: H5Dataset, rows: range | npt.NDArray[np.int64], names: Sequence[str] | None = None
    ) -> None:
        self._dataset = dataset
        self._count = len(rows)
        self._start = int(rows[0]) if len(rows) else 0
        together = not len(rows) or int(rows[-1]) - self._start + 1 == len(rows)
        # Rows that follow each other are arithmetic; their numbers may take more memory than they do.
        self._rows = None if together else np.asarray(rows)
        self._unit = dataset.unit_rows
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        for name in dataset.names if names is None else names:
            index = dataset.engine.indexes[name]
            memory = anonymous(len(rows) * index.row_bytes)
            self._arrays[name] = np.ndarray((len(rows), *index.row_shape), index.native_dtype, memory)
        last = int(rows[-1]) // self._unit if len(rows) else -1
        self._first = self._start // self._unit
        self._loaded = np.zeros(last - self._first + 1, np.bool_)
        self._complete = False

    @staticmethod
    def bytes_needed(dataset: H5Dataset, rows: int) -> int:
        """Bytes that `rows` rows of all parts take."""
        return rows * sum(dataset.engine.indexes[name].row_bytes for name in dataset.names)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def load_all(self) -> None:
        """Read all rows."""
        for low in range(0, self._count, _PIECE_ROWS):
            self._read(low, min(low + _PIECE_ROWS, self._count))
        self._loaded[:] = True
        self._complete = True

    def missing(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """The chunks of `rows` that were not loaded yet."""
        if self.complete:
            return []
        chunks = np.unique(rows // self._unit)
        return [int(chunk) for chunk in chunks[~self._loaded[chunks - self._first]]]

    @property
    def complete(self) -> bool:
        """Whether every chunk was loaded."""
        # The search ends at the first that was not.
        self._complete = self._complete or bool(self._loaded.all())
        return self._complete

    def load(self, chunk: int) -> None:
        """Read a chunk's rows. Doing it twice is wasted, not wrong."""
        edges = np.array((chunk * self._unit, (chunk + 1) * self._unit))
        if self._rows is None:
            low, high = np.clip(edges - self._start, 0, self._count).tolist()
        else:
            low, high = np.searchsorted(self._rows, edges).tolist()
        self._read(low, high)
        self._loaded[chunk - self._first] = True

    def _read(self, low: int, high: int) -> None:
        rows = np.arange(self._start + low, self._start + high) if self._rows is None else self._rows[low:high]
        for name, array in self._arrays.items():
            index = self._dataset.engine.indexes[name]
            if index.dtype.isnative and index.reason is None:
                self._dataset.read_rows(name, rows, array[low:high])
            else:
                # Numbers that are converted in place would be wrong for a moment, to one who gathers them already.
                array[low:high] = self._dataset.read_rows(name, rows)

    def gather(self, name: str, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Copy loaded rows to `out`, in the order given."""
        places = rows - self._start if self._rows is None else np.searchsorted(self._rows, rows)
        array = self._arrays[name]
        if out.dtype == array.dtype:
            np.take(array, places, axis=0, out=out, mode="clip")
        else:
            out[...] = array[places]
