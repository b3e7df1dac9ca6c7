"""Rows of a file's datasets through the HDF5 library, with a cache that suits reading them in any order."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.errors import PackChangedError, PackFormatError
from h5pack.hdf5 import open_file, reopen_tuned, require_dataset
from h5pack.read.pack import FileIdentity, Pack


class H5Reader:
    """Reads rows of datasets of one file; opens it on first use in each process, so it can be pickled and forked.

    Parameters
    ----------
    pack : Pack
        Says which file, and which it was.
    """

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self._opened: _Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"pack": self.pack, "_opened": None}

    def read(self, name: str, rows: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Rows of a dataset, in the order asked for; consecutive ones in one call of the library.

        Parameters
        ----------
        name : str
            Path of the dataset.
        rows : sequence of int
            Within 0..N-1; repeats are allowed.

        Returns
        -------
        ndarray
            (len(rows), ...), in the machine's byte order.

        Raises
        ------
        PackChangedError
            If the file is no longer the one that was described.
        PackFormatError
            If HDF5 cannot read them.
        """
        dataset = self._open().dataset(name)
        row_shape = dataset.shape[1:]
        out = np.empty((len(rows), *row_shape), dataset.dtype.newbyteorder("="))
        wanted = np.asarray(rows, np.int64)
        breaks = np.flatnonzero(np.diff(wanted) != 1) + 1
        edges = [0, *breaks.tolist(), len(wanted)]
        space = dataset.id.get_space()
        origin = (0,) * len(row_shape)
        for first, last in itertools.pairwise(edges):
            if first == last:
                continue
            start, count = int(wanted[first]), last - first
            space.select_hyperslab((start, *origin), (count, *row_shape))
            memory = h5py.h5s.create_simple((count, *row_shape))
            try:
                dataset.id.read(memory, space, out[first:last])
            except OSError as error:
                raise PackFormatError(
                    f"{self.pack.path}: {name!r} rows {start}-{start + count - 1} cannot be read ({error}); run "
                    "'h5pack verify' on it"
                ) from error
        return out

    def close(self) -> None:
        """Close the file in this process; the next read opens it again."""
        opened, self._opened = self._opened, None
        if opened is not None and opened.process == os.getpid():
            opened.file.close()

    def _open(self) -> _Opened:
        opened = self._opened
        if opened is None or opened.process != os.getpid():
            # A forked child must not use its parent's handle: they would share the library's state of a moment.
            try:
                identity = FileIdentity.of(self.pack.path)
            except FileNotFoundError:
                identity = None
            if identity != self.pack.identity:
                raise PackChangedError(
                    f"{self.pack.path}: the file was replaced or rewritten since this dataset was made; make the "
                    "dataset anew"
                )
            opened = self._opened = _Opened(self.pack.path)
        return opened


class _Opened:
    """One process's handles."""

    def __init__(self, path: str) -> None:
        self.process = os.getpid()
        self.file = open_file(path)
        self._datasets: dict[str, h5py.Dataset] = {}

    def dataset(self, name: str) -> h5py.Dataset:
        found = self._datasets.get(name)
        if found is None:
            found = self._datasets[name] = reopen_tuned(require_dataset(self.file, name))
        return found
