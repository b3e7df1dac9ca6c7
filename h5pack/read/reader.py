"""Rows of a file's datasets through the HDF5 library, with a cache that suits reading them in any order."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.errors import PackFormatError
from h5pack.hdf5 import open_file, reopen_tuned, require_dataset, require_filters
from h5pack.read.encoded import decode_rows, fetch_bytes, is_encoded, reference_cache
from h5pack.read.identity import FileIdentity

_DECODED_TOGETHER = 32
"""Encoded rows that are fetched at once, so that their bytes take little memory beside the pixels."""


class H5Reader:
    """Reads rows of datasets of one file; opens it on first use in each process, so it can be pickled and forked.

    Parameters
    ----------
    path : str
        Absolute.
    identity : FileIdentity
        Of the file that was described; another one is refused.
    """

    def __init__(self, path: str, identity: FileIdentity) -> None:
        self.path = path
        self.identity = identity
        self._opened: _Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "identity": self.identity, "_opened": None}

    def read(self, name: str, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> int:
        """Rows of a dataset of numbers, in the order asked for; consecutive ones in one call of the library.

        Parameters
        ----------
        name : str
            Path of the dataset.
        rows : ndarray
            int64, (n,), within 0..N-1; repeats are allowed.
        out : ndarray
            (n, ...), in the machine's byte order, C-contiguous: where they go.

        Returns
        -------
        int
            Calls of the library.

        Raises
        ------
        PackChangedError
            If the file is no longer the one that was described.
        PackFormatError
            If HDF5 cannot read them.
        """
        opened = self._open()
        dataset = opened.dataset(name)
        row_shape = dataset.shape[1:]
        if opened.leaves_holes(name):
            # HDF5 leaves the memory as it is where a chunk was never written and must not be filled.
            out[...] = dataset.fillvalue
        space = dataset.id.get_space()
        origin = (0,) * len(row_shape)
        runs = _runs(rows)
        for first, last in runs:
            start, count = int(rows[first]), last - first
            space.select_hyperslab((start, *origin), (count, *row_shape))
            memory = h5py.h5s.create_simple((count, *row_shape))
            try:
                dataset.id.read(memory, space, out[first:last])
            except OSError as error:
                raise PackFormatError(
                    f"{self.path}: {name!r} rows {start}-{start + count - 1} cannot be read ({error}); run "
                    "'h5pack verify' on it"
                ) from error
        return len(runs)

    def read_bytes(self, name: str, rows: npt.NDArray[np.int64]) -> list[bytes]:
        """The bytes of rows of variable length, as stored, in the order asked for; consecutive ones in one call.

        Parameters
        ----------
        name : str
            Path of a dataset with one axis, of variable-length uint8 or int8.
        rows : ndarray
            int64, (n,), within 0..N-1; repeats are allowed.

        Raises
        ------
        PackChangedError
            If the file is no longer the one that was described.
        PackFormatError
            If HDF5 cannot read them.
        """
        dataset = self._open().dataset(name)
        found: list[bytes] = []
        for first, last in _runs(rows):
            found += fetch_bytes(dataset, int(rows[first]), last - first)
        return found

    def read_images(self, name: str, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> tuple[int, int]:
        """Decode rows that are encoded images, in the order asked for.

        Parameters
        ----------
        name : str
            As for `read_bytes`.
        rows : ndarray
            int64, (n,), within 0..N-1; repeats are allowed.
        out : ndarray
            uint8, (n, H, W, 3), C-contiguous: where they go. Or of objects, (n,): each row becomes an array uint8
            (h, w, 3) of its own size.

        Returns
        -------
        int
            Bytes of the encoded images.
        int
            Calls of the library.

        Raises
        ------
        PackChangedError, PackFormatError
            As of `read_bytes`.
        DamagedRowsError
            If a row cannot be decoded.
        SizesDifferError
            If a row's image is not H x W.
        """
        dataset = self._open().dataset(name)
        size = calls = 0
        for first, last in _runs(rows):
            for low in range(first, last, _DECODED_TOGETHER):
                high = min(low + _DECODED_TOGETHER, last)
                encoded = fetch_bytes(dataset, int(rows[low]), high - low)
                decode_rows(self.path, name, rows[low:high], encoded, out[low:high])
                size += sum(map(len, encoded))
                calls += 1
        return size, calls

    def open(self, name: str) -> None:
        """Open the file, and a dataset, in this process.

        Raises
        ------
        PackChangedError
            If the file is no longer the one that was described.
        PackFormatError
            If it cannot be opened, or a decoder is missing.
        """
        self._open().dataset(name)

    def close(self) -> None:
        """Close the file in this process once running reads are done; the next read opens it again."""
        # HDF5 closes it with the last handle.
        self._opened = None

    def _open(self) -> _Opened:
        opened = self._opened
        if opened is None or opened.process != os.getpid():
            # A forked child must not use its parent's handle: they would share the library's state of a moment.
            self.identity.require(self.path)
            opened = self._opened = _Opened(self.path)
        return opened


def _runs(rows: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Where consecutive rows begin and end among `rows`."""
    if not len(rows):
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    return list(itertools.pairwise([0, *breaks.tolist(), len(rows)]))


class _Opened:
    """One process's handles."""

    def __init__(self, path: str) -> None:
        self.process = os.getpid()
        self.file = open_file(path)
        self._datasets: dict[str, h5py.Dataset] = {}
        self._lock = threading.Lock()

    def dataset(self, name: str) -> h5py.Dataset:
        found = self._datasets.get(name)
        if found is None:
            # Two threads must not open it twice: the second would close the first one's handle.
            with self._lock:
                found = self._datasets.get(name)
                if found is None:
                    found = require_dataset(self.file, name)
                    require_filters(found)
                    cache = reference_cache(found) if is_encoded(found) else None
                    found = self._datasets[name] = reopen_tuned(found, cache)
        return found

    def leaves_holes(self, name: str) -> bool:
        dataset = self.dataset(name)
        return bool(dataset.id.get_create_plist().get_fill_time() == h5py.h5d.FILL_TIME_NEVER)
