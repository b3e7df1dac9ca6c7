"""Where every row of a dataset lies in its file, so that it can be read beside the HDF5 library."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.errors import PackFormatError
from h5pack.hdf5 import ChunkTable, chunk_grid, chunk_table, filters_of, require_filters
from h5pack.layout import DEFAULT_CHUNK_BYTES, plan_chunks
from h5pack.read.codecs import Codec, find_codec
from h5pack.read.identity import SourceFile

_MOST_UNIT_ROWS = 4_096
"""Rows that a contiguous dataset's make-believe chunks have at most, so that a window of them stays small."""
VIRTUAL = "it is virtual"
LINKED = "a link leads to"
"""How the reasons of datasets begin whose rows lie in files of their own (`h5pack.read.virtual`)."""
_LISTS_CHUNKS = hasattr(h5py.h5d.DatasetID, "chunk_iter")
_COUNTS_USER_BLOCK = (1, 14, 4)
"""The first HDF5 that places chunks from the start of the file, not from behind its user block (1.14.2 does not)."""


@dataclass(frozen=True)
class ChunkIndex:
    """Where a dataset's rows lie.

    Attributes
    ----------
    name : str
        Path of the dataset.
    dtype : dtype
        As stored; what is read is handed out in the machine's byte order.
    shape : tuple of int
        Axis 0 is the row.
    chunk_rows : int
        Rows that lie one behind the other: those of a chunk, or all rows of a contiguous dataset.
    unit_rows : int
        Rows that a chunk-aware order keeps together: those of a chunk, or about 4 MiB of a contiguous dataset.
    addresses : ndarray
        int64, (chunks,): byte offset of each chunk from the start of the file; -1 where none is allocated, so that
        its rows are the fill value. (chunks, pieces) where several chunks hold pieces of the same rows. Empty where
        `reason` is given.
    fill : bytes
        One row of fill values, as stored; empty where every chunk is allocated.
    reason : str or None
        Why the rows must come through the HDF5 library; None: they can be read directly.
    codec : Codec or None
        What decodes a chunk; None: chunks are stored as they are, and hold whole rows.
    sizes : ndarray
        int64, as `addresses`: with a codec, the bytes of each chunk as stored; -1 where only the HDF5 library can tell
        whether it passed through the filters.
    masks : ndarray
        uint32, as `addresses`: with a codec, bit i says that filter i was left out.
    others : frozenset of SourceFile
        Other files that rows come from by way of the HDF5 library, which does not see that one is replaced.
    piece_shape : tuple of int or None
        Shape of a chunk, where chunks do not hold whole rows and nothing else.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunk_rows: int
    unit_rows: int
    addresses: npt.NDArray[np.int64]
    fill: bytes = b""
    reason: str | None = None
    codec: Codec | None = None
    sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    masks: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    piece_shape: tuple[int, ...] | None = None
    others: frozenset[SourceFile] = frozenset()

    @property
    def rows(self) -> int:
        """Rows of the dataset."""
        return self.shape[0]

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.shape[1:]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @cached_property
    def native_dtype(self) -> np.dtype[Any]:
        """The dtype of rows that were read."""
        native: np.dtype[Any] = self.dtype.newbyteorder("=")
        return native

    @property
    def complete(self) -> bool:
        """Whether every row has storage."""
        return not self.fill

    @property
    def raw(self) -> bool:
        """Whether every row's bytes lie in a file as they are."""
        return self.reason is None and self.codec is None

    @property
    def warning(self) -> str | None:
        """Why rows, all or some, come through the HDF5 library; None: they are all read directly."""
        return self.reason

    @property
    def decoding_bytes(self) -> int:
        """Memory that giving some rows of a chunk takes, besides the rows' own places: none for raw rows."""
        if self.codec is None:
            return 0
        # A chunk as stored, decoded, and among its neighbours.
        return 2 * self.chunk_rows * self.row_bytes + int(self.sizes.max(initial=0))

    @property
    def files(self) -> frozenset[SourceFile]:
        """The files that rows come from, besides the dataset's own."""
        return self.others

    def chunks_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The number of the chunk that each row lies in; int64, (n,)."""
        return rows // self.chunk_rows

    def units_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The number of the unit that each row lies in, of those that are cheapest read together; int64, (n,)."""
        return rows // self.unit_rows

    def rows_beside(self, row: int) -> int:
        """Rows of the chunk that a row lies in."""
        return min(self.chunk_rows, self.rows - row // self.chunk_rows * self.chunk_rows)

    def offsets_of(self, rows: npt.NDArray[np.int64], chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Byte offset of each row, where rows are raw and `chunks` are theirs; -1 for rows without storage."""
        starts = self.addresses[chunks]
        offsets = starts + (rows - chunks * self.chunk_rows) * self.row_bytes
        if not self.complete:
            offsets[starts < 0] = -1
        return offsets

    def offset_of(self, row: int) -> int | None:
        """Byte offset of a row that lies in the dataset's own file as it is; None for others, and empty ones."""
        if not self.raw or not self.row_bytes:
            return None
        chunk = row // self.chunk_rows
        start = int(self.addresses[chunk])
        return None if start < 0 else start + (row - chunk * self.chunk_rows) * self.row_bytes

    def owners_of(self, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """The number of the source that each chunk lies in; None: all lie in the dataset's own file."""
        return None

    def fill_of(self, row: int) -> bytes:
        """The fill value of a row that has no storage, as stored."""
        return self.fill

    def describe(self, rows: npt.NDArray[np.int64], place: int) -> str:
        """The consecutive rows from `place` on, in words."""
        first = int(rows[place])
        steps = np.flatnonzero(np.diff(rows[place:]) != 1)
        last = int(rows[place + steps[0]] if len(steps) else rows[-1])
        return f"{self.name!r} row {first}" if first == last else f"{self.name!r} rows {first}-{last}"


def index_dataset(file: h5py.File, dataset: h5py.Dataset, name: str) -> ChunkIndex:
    """Find every chunk of a dataset, in one pass, and check that it lies inside the file.

    Parameters
    ----------
    file : h5py.File
        The file that was asked for; a link may lead the dataset elsewhere.
    dataset : h5py.Dataset
        Of numbers, with at least one axis.
    name : str
        By which it was asked for.

    Raises
    ------
    PackFormatError
        If the index is damaged: chunks past the end of the file, over each other, or off the grid.
    """
    row_bytes = math.prod(dataset.shape[1:]) * dataset.dtype.itemsize
    chunk_rows = dataset.chunks[0] if dataset.chunks else max(1, dataset.shape[0])
    unit_rows = chunk_rows if dataset.chunks else contiguous_unit_rows(dataset.shape[0], row_bytes)
    require_filters(dataset)
    reason = _why_not(file, dataset)
    piece_shape = dataset.chunks if dataset.chunks and dataset.chunks[1:] != dataset.shape[1:] else None
    codec: Codec | None = None
    found = filters_of(dataset)
    if reason is None and (found or piece_shape):
        codec_or_reason = find_codec(found, math.prod(dataset.chunks) * dataset.dtype.itemsize)
        if isinstance(codec_or_reason, Codec):
            codec = codec_or_reason
        else:
            reason = codec_or_reason
    table = ChunkTable(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint32))
    fill = b""
    if reason is None and row_bytes and dataset.shape[0]:
        try:
            table = chunk_table(dataset) if dataset.chunks else _contiguous(dataset)
        except MemoryError as error:
            raise PackFormatError(f"{file.filename}: {name!r} has more chunks than memory has room for") from error
        except Exception as error:
            # Damage shows as any of h5py's errors.
            raise PackFormatError(
                f"{file.filename}: the chunk index of {name!r} is damaged ({error}); restore the file, or convert again"
            ) from error
        numbers = np.arange(len(table.addresses))
        stored = np.minimum(dataset.shape[0] - numbers * chunk_rows, chunk_rows) * row_bytes
        if codec is not None:
            stored = table.sizes.copy()
            if codec.steps:
                _mark_doubtful(table, _partial(dataset), codec)
        _require_inside(file, name, table.addresses, stored, chunk_rows, dataset.shape[0])
        if (table.addresses < 0).any():
            fill = np.full(dataset.shape[1:], dataset.fillvalue, dataset.dtype).tobytes()
    return ChunkIndex(
        name,
        dataset.dtype,
        dataset.shape,
        chunk_rows,
        unit_rows,
        table.addresses,
        fill,
        reason,
        codec,
        table.sizes,
        table.masks,
        piece_shape,
    )


def _partial(dataset: h5py.Dataset) -> npt.NDArray[np.bool_]:
    """Which chunks reach past the dataset's edge; as `ChunkTable` has them."""
    grid = chunk_grid(dataset)
    partial = np.zeros(grid, np.bool_)
    for axis, (size, chunk) in enumerate(zip(dataset.shape, dataset.chunks, strict=True)):
        if size % chunk:
            partial[(slice(None),) * axis + (-1,)] = True
    pieces = math.prod(grid[1:])
    return partial.reshape(grid[0]) if pieces == 1 else partial.reshape(grid[0], pieces)


def _mark_doubtful(table: ChunkTable, partial: npt.NDArray[np.bool_], codec: Codec) -> None:
    """A chunk at the edge may be stored as it is, and no mask says so (H5Pset_chunk_opts)."""
    table.sizes[partial & (table.sizes == codec.size) & (table.masks == 0)] = -1


def contiguous_unit_rows(rows: int, row_bytes: int) -> int:
    """Rows that a chunk-aware order keeps together where no chunks say: about 4 MiB of them."""
    if row_bytes >= DEFAULT_CHUNK_BYTES:
        return 1
    return min(_MOST_UNIT_ROWS, plan_chunks(max(1, rows), max(1, row_bytes)).rows)


def _why_not(file: h5py.File, dataset: h5py.Dataset) -> str | None:
    """Why a dataset's rows cannot be read directly; None if they can."""
    if not hasattr(os, "preadv"):
        return "this system has no preadv"
    if dataset.file.filename != file.filename:
        return f"{LINKED} {dataset.file.filename}"
    if file.driver != "sec2":
        return f"the file is opened by HDF5's driver {file.driver}"
    create = dataset.id.get_create_plist()
    layout = create.get_layout()
    if layout == h5py.h5d.VIRTUAL:
        return VIRTUAL
    if layout == h5py.h5d.COMPACT:
        return "its layout is compact"
    if create.get_external_count():
        return "its data lies in other files"
    if dataset.chunks and not _LISTS_CHUNKS:
        return f"h5py {h5py.version.version} with HDF5 {h5py.version.hdf5_version} cannot list chunks"
    if dataset.chunks and file.userblock_size and h5py.version.hdf5_version_tuple < _COUNTS_USER_BLOCK:
        return f"HDF5 {h5py.version.hdf5_version} misplaces the chunks of files with a user block"
    if not dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True)):
        return "its numbers are stored in an unusual way"
    return None


def _contiguous(dataset: h5py.Dataset) -> ChunkTable:
    offset = dataset.id.get_offset()
    # HDF5 adds a user block to the offset of nothing, too.
    absent = offset is None or dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED
    size = math.prod(dataset.shape) * dataset.dtype.itemsize
    return ChunkTable(np.array([-1 if absent else offset]), np.array([size]), np.zeros(1, np.uint32))


def _require_inside(
    file: h5py.File,
    name: str,
    addresses: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    chunk_rows: int,
    rows: int,
) -> None:
    """Refuse chunks past the end of the file or over each other: reading them would give wrong pixels."""
    pieces = addresses.size // max(1, len(addresses))
    addresses, sizes = addresses.reshape(-1), sizes.reshape(-1)
    numbers = np.flatnonzero(addresses >= 0)
    if not len(numbers):
        return
    starts = addresses[numbers]
    size = os.path.getsize(file.filename)
    stored = sizes[numbers]
    where = f"{file.filename}: {name!r}"
    outside = np.flatnonzero(starts > size - stored)
    if len(outside):
        chunk = int(numbers[outside[0]]) // pieces
        first, last = chunk * chunk_rows, min(rows, (chunk + 1) * chunk_rows) - 1
        raise PackFormatError(
            f"{where} rows {first}-{last} lie past the end of the file ({size:,} bytes); the file is cut short or "
            "damaged: restore it, or convert again"
        )
    order = np.argsort(starts, kind="stable")
    over = np.flatnonzero(np.diff(starts[order]) < stored[order][:-1])
    if len(over):
        one, other = sorted(int(numbers[order[over[0] + step]]) for step in (0, 1))
        raise PackFormatError(
            f"{where} chunks {one} and {other} lie over each other; the file is damaged: restore it, or convert again"
        )
