"""Rows that are copied from memory to batches: from the page cache, decoded chunks, or small fields held in memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from h5pack.data.dataset import H5Dataset
from h5pack.data.iteration import serial_torch
from h5pack.data.samples import read_small_rows
from h5pack.read.chunk_decoder import DecodedDataset
from h5pack.read.mapping import MappedDataset
from h5pack.system.arrays import RowNumbers


class HeldRows:
    """Selected rows (ascending and distinct) of a small field, read into private memory at construction."""

    def __init__(self, dataset: H5Dataset, name: str, rows: RowNumbers) -> None:
        self._start = int(rows[0]) if len(rows) else 0
        consecutive = not len(rows) or int(rows[-1]) - self._start + 1 == len(rows)
        # Row numbers can take more memory than the values, so do not store them if the rows are consecutive.
        self._rows = None if consecutive else np.asarray(rows)
        self._values = read_small_rows(dataset, name, rows)

    def gather(self, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Copy `rows`, int64 (n,), in this order to `out`, (n, ...), C-contiguous, and convert them to its dtype."""
        positions = rows - self._start if self._rows is None else np.searchsorted(self._rows, rows)
        if out.dtype == self._values.dtype:
            np.take(self._values, positions, axis=0, out=out, mode="clip")
        else:
            out[...] = self._values[positions]


def list_sizes(dataset: H5Dataset, rows: range, max_bytes: int) -> dict[str, int]:
    """Choose fields whose rows differ in length, smallest first, as long as they fit into `max_bytes` together.

    Return the size in bytes of each chosen field, by name. The size is that of the field's values in `rows`, plus that
    of the offsets of all rows in the file.
    """
    sizes = {
        name: int(index.offsets[rows.stop] - index.offsets[rows.start]) * index.data.row_bytes + index.offsets.nbytes
        for name, index in dataset.ragged.items()
    }
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: sizes[name]):
        if sum(found.values()) + sizes[name] <= max_bytes:
            found[name] = sizes[name]
    return found


@dataclass(frozen=True)
class RowLocations:
    """Locations of rows, to pass to `gather`: `positions`, int64 (n,), and the numbers of the files with these rows."""

    positions: npt.NDArray[np.int64]
    files: list[int]


class CachedRows:
    """Rows of a dataset in the page cache. They are copied from a mapping of the file, in the stored byte order.

    One call copies many rows without the GIL: ``np.take`` if the rows form an array (`MappedDataset.array`), else
    ``torch.index_select``. Speeds as multiples of the speed of ``np.take`` from private memory (2 cores, one thread):

    - ``np.take``: 1.01 for rows of 150 KB, 0.95 for rows of 3 KB.
    - ``torch.index_select``: 0.94 for rows of 116 KB, 0.84 for rows of 3 KB.
    - A loop in Python, which would hold the GIL: 1.01 for rows of 116 KB, 0.36 for rows of 3 KB.
    """

    def __init__(self, mapped: MappedDataset) -> None:
        self.mapped = mapped
        if mapped.array is None:
            self._unit, self._windows = _windows(mapped)

    def ready(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> bool:
        """Return whether rows ``first[i]`` to ``last[i]`` can be copied now (see `MappedDataset.ready`)."""
        return self.mapped.ready(first, last)

    def load(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> bool:
        """Load rows ``first[i]`` to ``last[i]``; return whether they can be copied (see `MappedDataset.load`)."""
        return self.mapped.load(first, last)

    def locate(self, rows: npt.NDArray[np.int64]) -> RowLocations:
        """Return the locations of `rows`, int64 (n,). It is fastest to locate many, mostly ascending rows at once."""
        if self.mapped.array is not None:
            return RowLocations(self.mapped.positions(rows), self.mapped.files(rows))
        return RowLocations(self.mapped.offsets(rows) // self._unit, self.mapped.files(rows))

    def gather(self, found: RowLocations, out: npt.NDArray[Any]) -> None:
        """Copy located rows to `out`, (n, ...), C-contiguous. `ready` or `load` must have returned True for them."""
        self.mapped.mapping.require_whole(found.files)
        flat = out.reshape(-1).view(np.uint8).reshape(len(found.positions), self.mapped.index.row_bytes)
        if self.mapped.array is not None:
            np.take(self.mapped.array, found.positions, axis=0, out=flat, mode="clip")
        else:
            positions = torch.from_numpy(found.positions)
            with serial_torch:
                torch.index_select(self._windows, 0, positions, out=torch.from_numpy(flat).view(self._windows.dtype))
        self.mapped.mapping.require_unchanged(found.files)


class DecodedRows:
    """Rows of a dataset whose decoded chunks stay in memory, copied in stored byte order; used like `CachedRows`."""

    def __init__(self, decoded: DecodedDataset) -> None:
        self._decoded = decoded

    def ready(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> bool:
        """Return whether rows ``first[i]`` to ``last[i]`` can be copied now (see `DecodedDataset.ready`)."""
        return self._decoded.ready(first, last)

    def load(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> bool:
        """Return False: chunks are not loaded in advance, but decoded when they are read."""
        return False

    def locate(self, rows: npt.NDArray[np.int64]) -> RowLocations:
        """Return the locations of `rows`, int64 (n,): the row numbers themselves."""
        return RowLocations(rows, [])

    def gather(self, found: RowLocations, out: npt.NDArray[Any]) -> None:
        """Copy located rows to `out`, (n, ...), C-contiguous. `ready` must have returned True for these rows."""
        flat = out.reshape(-1).view(np.uint8).reshape(len(found.positions), self._decoded.index.row_bytes)
        self._decoded.copy(found.positions, flat)


def _windows(mapped: MappedDataset) -> tuple[int, torch.Tensor]:
    """Return (unit, windows); `windows` is a view of the mapping as overlapping windows, each of the size of a row.

    ``windows[i]`` begins at byte ``i * unit``, so ``windows[offset // unit]`` is the row at byte `offset`. `unit` is a
    number of up to 16 bytes that divides the size of a row and the offset of every row.
    """
    data, size = mapped.mapping.bytes, mapped.index.row_bytes
    common = int(np.gcd.reduce(np.append(mapped.starts, size)))
    unit = next(unit for unit in _DTYPES if common % unit == 0)
    # PyTorch warns about tensors of read-only buffers, so pass a ctypes array. Nothing writes through this tensor.
    memory = (ctypes.c_ubyte * len(data)).from_address(data.__array_interface__["data"][0])
    memory.mapping = mapped.mapping  # type: ignore[attr-defined]
    values = torch.frombuffer(memory, dtype=torch.uint8)[: len(data) // unit * unit].view(_DTYPES[unit])
    return unit, values.as_strided(((len(data) - size) // unit + 1, size // unit), (1, 1))


_DTYPES = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
