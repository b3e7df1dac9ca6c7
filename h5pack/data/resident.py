"""Rows kept in memory: each chunk is read when it is first needed, and later batches are copied from memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.data.dataset import H5Dataset
from h5pack.system.machine import huge_page_memory

_BLOCK_ROWS = 65_536
"""Number of rows that `load_all` reads at once. A bound is needed because planning the read of a small row takes many
times the memory of the row."""


class ResidentRows:
    """Selected rows of a dataset (ascending and distinct), kept in memory once they are loaded.

    `names` are the paths of the datasets to keep (images, labels, fields); None: all.
    """

    def __init__(
        self, dataset: H5Dataset, rows: range | npt.NDArray[np.int64], names: Sequence[str] | None = None
    ) -> None:
        self._dataset = dataset
        self._count = len(rows)
        self._start = int(rows[0]) if len(rows) else 0
        consecutive = not len(rows) or int(rows[-1]) - self._start + 1 == len(rows)
        # Row numbers can take more memory than the rows, so do not store them if the rows are consecutive.
        self._rows = None if consecutive else np.asarray(rows)
        self._chunk_rows = dataset.group_rows
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        for name in dataset.names if names is None else names:
            index = dataset.engine.indexes[name]
            memory = huge_page_memory(len(rows) * index.row_bytes)
            self._arrays[name] = np.ndarray((len(rows), *index.row_shape), index.native_dtype, memory)
        last = int(rows[-1]) // self._chunk_rows if len(rows) else -1
        self._first = self._start // self._chunk_rows
        self._loaded = np.zeros(last - self._first + 1, np.bool_)
        self._complete = False

    @staticmethod
    def bytes_needed(dataset: H5Dataset, rows: int) -> int:
        """Return the memory in bytes that `rows` rows of all images, labels and fields take."""
        return rows * sum(dataset.engine.indexes[name].row_bytes for name in dataset.names)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def load_all(self) -> None:
        """Read all rows."""
        for low in range(0, self._count, _BLOCK_ROWS):
            self._read(low, min(low + _BLOCK_ROWS, self._count))
        self._loaded[:] = True

    def missing(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return the numbers of the chunks of `rows` that have not been loaded yet."""
        if self.complete:
            return []
        chunks = np.unique(rows // self._chunk_rows)
        return [int(chunk) for chunk in chunks[~self._loaded[chunks - self._first]]]

    @property
    def complete(self) -> bool:
        """Whether all chunks are loaded."""
        # This is cheap while chunks are being loaded, because `all` stops at the first one that is not loaded.
        self._complete = self._complete or bool(self._loaded.all())
        return self._complete

    def load(self, chunk: int) -> None:
        """Read the rows of a chunk into memory. Two threads may load the same chunk, which only costs time."""
        edges = np.array((chunk * self._chunk_rows, (chunk + 1) * self._chunk_rows))
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
            if index.dtype.isnative and index.library_reason is None:
                self._dataset.read_rows(name, rows, array[low:high])
            else:
                # Convert before writing: converting in place would briefly expose wrong values to threads that already
                # copy these rows.
                array[low:high] = self._dataset.read_rows(name, rows)

    def gather(self, name: str, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Copy loaded rows to `out`, in the order of `rows`."""
        positions = rows - self._start if self._rows is None else np.searchsorted(self._rows, rows)
        array = self._arrays[name]
        if out.dtype == array.dtype:
            np.take(array, positions, axis=0, out=out, mode="clip")
        else:
            out[...] = array[positions]
