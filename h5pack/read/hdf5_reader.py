"""Reading of rows through the HDF5 library, with a chunk cache that suits reading them in any order."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.read.encoded import decode_rows, fetch_bytes, is_encoded, reference_cache
from h5pack.read.hdf5 import open_file, read_error, reopen_tuned, require_dataset, require_filters
from h5pack.read.storage import FileIdentity
from h5pack.system.arrays import consecutive_runs

_DECODE_ROWS = 32
"""Number of encoded rows fetched at once, small enough that their bytes need little memory compared with the pixels."""


class H5Reader:
    """Reads rows of the datasets of one file through the HDF5 library.

    It opens the file on first use in each process, so it can be pickled, and used in forked processes.
    """

    def __init__(self, path: str, identity: FileIdentity) -> None:
        self.path = path
        self.identity = identity
        self._handles: _Handles | None = None

    def __repr__(self) -> str:
        return f"H5Reader({self.path!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "identity": self.identity, "_handles": None}

    def read(self, name: str, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> int:
        """Read rows of a numeric dataset in the given order, with one library call per run of consecutive rows.

        Parameters
        ----------
        name : str
            Path of the dataset.
        rows : ndarray
            int64 (n,), within 0..N-1; repeats are allowed.
        out : ndarray
            (n, ...), native byte order, C-contiguous; receives the rows.

        Returns
        -------
        int
            Number of library calls.

        Raises
        ------
        PackChangedError
            If the file was replaced or rewritten since it was described.
        ReadError
            If a system call fails to read the file.
        PackFormatError
            If HDF5 cannot read the rows for another reason, such as damaged chunks.
        """
        handles = self._open()
        dataset = handles.dataset(name)
        row_shape = dataset.shape[1:]
        if dataset.id.get_create_plist().get_fill_time() == h5py.h5d.FILL_TIME_NEVER:
            # With this setting, HDF5 does not write the fill value to `out` for chunks without allocated storage.
            out[...] = dataset.fillvalue
        space = dataset.id.get_space()
        origin = (0,) * len(row_shape)
        edges = consecutive_runs(rows).tolist()
        for first, last in itertools.pairwise(edges):
            start, count = int(rows[first]), last - first
            space.select_hyperslab((start, *origin), (count, *row_shape))
            memory = h5py.h5s.create_simple((count, *row_shape))
            try:
                dataset.id.read(memory, space, out[first:last])
            except OSError as error:
                raise read_error(self.path, name, range(start, start + count), error) from error
        return len(edges) - 1

    def read_bytes(self, name: str, rows: npt.NDArray[np.int64]) -> list[bytes]:
        """Return the bytes of encoded rows in the given order; parameters and errors are those of `read`."""
        dataset = self._open().dataset(name)
        found: list[bytes] = []
        for first, last in itertools.pairwise(consecutive_runs(rows).tolist()):
            found += fetch_bytes(dataset, int(rows[first]), last - first)
        return found

    def read_images(self, name: str, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> tuple[int, int]:
        """Read encoded rows in the given order and decode them into `out` (see `decode_rows`).

        Returns the number of encoded bytes and of library calls.
        """
        dataset = self._open().dataset(name)
        size = calls = 0
        for first, last in itertools.pairwise(consecutive_runs(rows).tolist()):
            for low in range(first, last, _DECODE_ROWS):
                high = min(low + _DECODE_ROWS, last)
                encoded = fetch_bytes(dataset, int(rows[low]), high - low)
                decode_rows(self.path, name, rows[low:high], encoded, out[low:high])
                size += sum(map(len, encoded))
                calls += 1
        return size, calls

    def open(self, name: str) -> None:
        """Open the file and a dataset in this process, without reading rows; errors are those of `read`."""
        self._open().dataset(name)

    def close(self) -> None:
        """Close the file in this process once reads in progress have ended. The next read opens it again."""
        # HDF5 closes the file with its last handle, which reads in progress still hold.
        self._handles = None

    def _open(self) -> _Handles:
        handles = self._handles
        if handles is None or handles.process != os.getpid():
            # A forked child must open the file itself: its parent's handle relies on library state that is only copied.
            self.identity.require(self.path)
            handles = self._handles = _Handles(self.path)
        return handles


class _Handles:
    """The open file and datasets of one process."""

    def __init__(self, path: str) -> None:
        self.process = os.getpid()
        self.file = open_file(path)
        self._datasets: dict[str, h5py.Dataset] = {}
        self._lock = threading.Lock()

    def dataset(self, name: str) -> h5py.Dataset:
        found = self._datasets.get(name)
        if found is None:
            # Only one thread may open a dataset: reopen_tuned in a second thread would close the first one's handle.
            with self._lock:
                found = self._datasets.get(name)
                if found is None:
                    found = require_dataset(self.file, name)
                    require_filters(found)
                    cache = reference_cache(found) if is_encoded(found) else None
                    found = self._datasets[name] = reopen_tuned(found, cache)
        return found
