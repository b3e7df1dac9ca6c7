"""A dataset as plain h5py reads it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from PIL import Image

from h5pack.hdf5 import is_filtered, open_file, reopen_tuned, require_dataset, require_filters


class LibraryFile:
    """Rows by ``dataset[i]``; those of variable length are decoded by Pillow.

    Parameters
    ----------
    path, images : str
    tuned : bool
        With an rdcc cache that suits reading rows in any order; else as h5py opens it.
    """

    def __init__(self, path: str, images: str, *, tuned: bool) -> None:
        self._file = open_file(path)
        self._dataset = require_dataset(self._file, images)
        if is_filtered(self._dataset):
            require_filters(self._dataset)
        if tuned:
            self._dataset = reopen_tuned(self._dataset)
        self._encoded = h5py.check_vlen_dtype(self._dataset.dtype) is not None
        self._batch: npt.NDArray[Any] | None = None

    def row(self, row: int) -> npt.NDArray[Any]:
        """One row."""
        found: npt.NDArray[Any] = self._dataset[row]
        if not self._encoded:
            return found
        with Image.open(io.BytesIO(found.tobytes())) as opened:
            return np.asarray(opened.convert("RGB"))

    def batch(self, rows: Sequence[int], *, consecutive: bool) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Some rows, with how many came: a slice where they are consecutive; else one by one, each put into a batch."""
        if consecutive and not self._encoded:
            yield len(rows), self._dataset[rows[0] : rows[-1] + 1]
            return
        for place, row in enumerate(rows):
            pixels = self.row(int(row))
            if self._batch is None or len(self._batch) < len(rows) or self._batch.shape[1:] != pixels.shape:
                self._batch = np.empty((len(rows), *pixels.shape), pixels.dtype)
            self._batch[place] = pixels
            yield 1, self._batch[place]

    def close(self) -> None:
        """Close the file."""
        self._file.close()
