"""Read rows through the HDF5 library, with a chunk cache that suits reading them in any order."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.read.hdf5 import open_file, read_rows, reopen_tuned, require_dataset, require_filters
from h5pack.read.storage import FileIdentity


class H5Reader:
    """Reads rows of the datasets of one file through the HDF5 library; row numbers are int64 (n,), in any order.

    Each process opens the file on first use, so a reader can be pickled, and used in forked processes. Methods raise
    PackChangedError if the file no longer has this `identity`. Methods that read rows raise ReadError if a system call
    fails, and PackFormatError if HDF5 fails for another reason, such as damaged chunks.
    """

    def __init__(self, path: str, identity: FileIdentity) -> None:
        self.path = path
        self.identity = identity
        self._handles: _Handles | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "identity": self.identity, "_handles": None}

    def read(self, name: str, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> int:
        """Read numeric rows into `out`, and return the number of HDF5 library calls (see `read_rows`).

        `out` must be C-contiguous and in native byte order.
        """
        with self._opened() as handles:
            return read_rows(handles.dataset(name), rows, out)

    def read_bytes(self, name: str, rows: npt.NDArray[np.int64]) -> tuple[list[bytes], int]:
        """Return the bytes of encoded rows, and the number of HDF5 library calls."""
        with self._opened() as handles:
            dataset = handles.dataset(name)
            cells = np.empty((len(rows), *dataset.shape[1:]), dataset.dtype)
            calls = read_rows(dataset, rows, cells)
        return [cell.tobytes() for cell in cells], calls

    def open(self, name: str) -> None:
        """Open the file and a dataset in this process, without reading rows."""
        with self._opened() as handles:
            handles.dataset(name)

    def close(self) -> None:
        """Close the file in this process once reads in progress have ended. The next read opens it again."""
        # HDF5 closes the file when its last handle is released. Reads in progress still hold a handle.
        self._handles = None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[_Handles]:
        """Return the file, opened in this process. At the end of the `with` block, check that it has not changed.

        Raises PackChangedError if it has. HDF5 itself would not notice the change: for example, it would return zeros
        for bytes past the end of a file that was cut short.
        """
        try:
            handles = self._handles
            if handles is None or handles.process != os.getpid():
                # A forked child must open the file itself, because its copy of HDF5's state is not safe to use.
                handles = _Handles(self.path)
                self.identity.require(self.path)  # If another file has just replaced this file, do not keep it open.
                self._handles = handles
            yield handles
        finally:
            self.identity.require(self.path)


class _Handles:
    """The open file and datasets of one process."""

    def __init__(self, path: str) -> None:
        self.process = os.getpid()
        self.file = open_file(path)
        self._datasets: dict[str, h5py.Dataset] = {}
        self._lock = threading.Lock()

    def dataset(self, name: str) -> h5py.Dataset:
        # Only one thread may open a dataset, because `reopen_tuned` would close the handle of another thread.
        with self._lock:
            if name not in self._datasets:
                found = require_dataset(self.file, name)
                require_filters(found)
                self._datasets[name] = reopen_tuned(found)
            return self._datasets[name]
