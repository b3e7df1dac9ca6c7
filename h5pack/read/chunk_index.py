"""The chunk index of a dataset: the byte offset of every chunk, so that rows can be read without the HDF5 library.

A chunk to which nothing was written may have no storage allocated in the file. Its rows consist of the fill value.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.format import schema
from h5pack.format.plans import plan_chunks
from h5pack.format.schema import COMPRESSION_METHODS
from h5pack.read.codecs import FilterPipeline, UnsupportedFilterError, find_pipeline
from h5pack.read.hdf5 import (
    ChunkTable,
    Filter,
    chunk_grid,
    chunk_table,
    dataset_error,
    filters_of,
    find_item,
    metadata_problem,
    require_filters,
    stored_options,
)
from h5pack.read.storage import SourceFile, has_preadv
from h5pack.system.arrays import consecutive_runs
from h5pack.system.properties import cached_property

_MAX_GROUP_ROWS = 4_096
"""Maximum number of rows in a chunk group of a contiguous dataset, so that shuffle windows stay small."""
_LISTS_CHUNKS = hasattr(h5py.h5d.DatasetID, "chunk_iter")
_COUNTS_USER_BLOCK = (1, 14, 4)
"""First HDF5 version whose chunk offsets count from the start of the file. In earlier versions they count from the end
of the user block, an optional prefix before the HDF5 data."""


@dataclass(frozen=True, kw_only=True)
class ChunkIndex:
    """The locations of a dataset's rows in its file. Rows are entries along axis 0.

    The arrays `addresses`, `sizes` and `filter_masks` are those of a `ChunkTable`. They are empty if `library_reason`
    is not None, or if the dataset has no bytes. `sizes` and `filter_masks` are also empty if `codec` is None. A size of
    -1 marks a chunk that must be read through the HDF5 library, because the file does not say whether the chunk was
    filtered.
    """

    name: str
    dtype: np.dtype[Any]  # in stored byte order
    shape: tuple[int, ...]
    chunk_rows: int  # number of rows in a chunk; a contiguous dataset counts as one chunk
    group_rows: int  # rows in a chunk group, which is read together: a chunk, or up to 4 MiB of a contiguous dataset
    addresses: npt.NDArray[np.int64]
    # One row of fill values in stored byte order. Empty if every chunk has allocated storage, or if `library_reason` is
    # not None.
    fill: bytes = b""
    library_reason: str | None = None  # why all rows are read through the HDF5 library; None if they are not
    is_encoded: bool = False  # whether rows are encoded images
    # Decoder of chunks that are filtered or hold only parts of rows. None if h5pack itself reads no such chunks.
    codec: FilterPipeline | None = None
    sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    filter_masks: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    stored_checksums: npt.NDArray[np.uint32] | None = None  # (chunks,): CRC-32 of each chunk's stored bytes, if known
    chunk_shape: tuple[int, ...] | None = None  # shape of chunks if they hold only parts of rows, else None
    external_files: frozenset[SourceFile] = frozenset()  # other files that hold rows, to be checked for changes

    @property
    def rows(self) -> int:
        """Number of rows of the dataset."""
        return self.shape[0]

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.shape[1:]

    @cached_property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @cached_property
    def native_dtype(self) -> np.dtype[Any]:
        """The dtype of returned rows, which is `dtype` in native byte order."""
        native: np.dtype[Any] = self.dtype.newbyteorder("=")
        return native

    @property
    def complete(self) -> bool:
        """Whether every row has allocated storage, so that no row consists of fill values.

        True, but meaningless, if `library_reason` is not None, or if rows are encoded images.
        """
        return not self.fill

    @cached_property
    def raw(self) -> bool:
        """Whether one direct read can fetch any row that has allocated storage.

        This requires that the bytes of each row are unfiltered and contiguous in the file, and that h5pack can read
        them without the HDF5 library.
        """
        return self.library_reason is None and self.codec is None

    @cached_property
    def is_empty(self) -> bool:
        """Whether `raw` is true and no row has allocated storage, so that reads return the fill value without I/O."""
        return self.raw and bool((self.addresses < 0).all())

    @property
    def library_text(self) -> str | None:
        """Why rows are read through the HDF5 library; None if h5pack reads all rows directly.

        For a virtual dataset, this is the reason of the first source whose rows are read through the library.
        """
        return self.library_reason

    @property
    def decoding_bytes(self) -> int:
        """Maximum memory in bytes for reading and decoding one chunk; 0 if h5pack itself decodes no chunk."""
        if self.codec is None:
            return 0
        # Three buffers: the stored chunk, the decoded chunk, and the rows joined from several chunks.
        return 2 * self.chunk_rows * self.row_bytes + int(self.sizes.max(initial=0))

    @property
    def decoded_bytes(self) -> int:
        """Total size in bytes of all chunks after decoding; 0 if no chunk must be decoded."""
        chunk_bytes = self.chunk_rows * self.row_bytes
        return -(-self.rows // self.chunk_rows) * chunk_bytes if self.decoding_bytes else 0

    @property
    def files(self) -> frozenset[SourceFile]:
        """The files that hold rows of this dataset, other than its own file."""
        return self.external_files

    def chunks_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the chunk number of each row; int64 (n,)."""
        return rows // self.chunk_rows

    def groups_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the chunk group number of each row, int64 (n,). Rows of one group are cheapest to read together."""
        return rows // self.group_rows

    def rows_in_chunk_of(self, row: int) -> int:
        """Return the number of rows in the chunk that contains `row`."""
        return min(self.chunk_rows, self.rows - row // self.chunk_rows * self.chunk_rows)

    def offsets_of(self, rows: npt.NDArray[np.int64], chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the byte offset of each row of a `raw` dataset, int64 (n,); -1 for a row without allocated storage.

        `chunks` must be ``chunks_of(rows)``.
        """
        starts = self.addresses[chunks]
        offsets = starts + (rows - chunks * self.chunk_rows) * self.row_bytes
        if not self.complete:
            offsets[starts < 0] = -1
        return offsets

    def offset_of(self, row: int) -> int | None:
        """Return a row's byte offset in the dataset's own file; None if one direct read cannot fetch the row."""
        if not self.raw or not self.row_bytes:
            return None
        chunk = row // self.chunk_rows
        start = int(self.addresses[chunk])
        return None if start < 0 else start + (row - chunk * self.chunk_rows) * self.row_bytes

    def split_by_source(
        self, rows: npt.NDArray[np.int64]
    ) -> Iterator[tuple[SourceFile | None, ChunkIndex, npt.NDArray[np.int64]]]:
        """Split `rows` into runs whose rows are stored in the same source.

        For each run, yield (file, index, numbers): the source's file and index, and the numbers that the rows of the
        run have in the source, int64 (n,). A dataset that is not virtual is its own source, and the file is None.
        """
        yield None, self, rows

    def ranges(self, start: int, stop: int) -> RowRanges:
        """Split rows `start` to `stop` - 1 into ranges. The rows of a range are in one source and one chunk group.

        However, rows of a source that `is_empty` are not split by chunk group.
        """
        # If no row has allocated storage, rows are never read, so they can form a single range.
        step = self.rows if self.is_empty else self.group_rows
        firsts = np.append(start, np.arange((start // step + 1) * step, stop, step))
        zeros = np.zeros(len(firsts), np.int64)
        addresses = self.offsets_of(firsts, self.chunks_of(firsts)) if self.raw else zeros - 1
        return RowRanges(firsts, zeros, zeros, addresses)

    def fill_of(self, row: int) -> bytes:
        """Return one row of fill values as bytes, for a row without allocated storage."""
        return self.fill

    def describe(self, rows: npt.NDArray[np.int64], position: int) -> str:
        """Return the dataset's name and the numbers of the consecutive rows that begin at ``rows[position]``.

        This is for error messages. For example, "'images' rows 4-7".
        """
        count = int(consecutive_runs(rows[position:])[1])
        first, last = int(rows[position]), int(rows[position + count - 1])
        return f"{self.name!r} row {first}" if first == last else f"{self.name!r} rows {first}-{last}"


@dataclass(frozen=True)
class SourceDataset:
    """A dataset that stores rows of a virtual dataset and is not virtual itself."""

    file: SourceFile
    index: ChunkIndex


@dataclass(frozen=True)
class RowRanges:
    """Consecutive rows, split as `ChunkIndex.ranges` does. All arrays have the shape (ranges,)."""

    firsts: npt.NDArray[np.int64]  # first row of each range
    source_ids: npt.NDArray[np.int64]  # index of each range's source in `VirtualIndex.sources`; 0 if not virtual
    shifts: npt.NDArray[np.int64]  # for each range, a row's number in the source minus its number in this dataset
    # Byte offset of each range's first row. -1 if the range has no allocated storage or cannot be read directly.
    addresses: npt.NDArray[np.int64]


def index_dataset(file: h5py.File, dataset: h5py.Dataset, name: str) -> ChunkIndex:
    """Return the index of a numeric dataset. If h5pack can read rows directly, also check the locations of the chunks.

    `dataset` was opened as `name` in `file`. If an external link in this name leads to another file, `dataset` belongs
    to that file. Raises PackFormatError if a filter's decoder is missing, or if the chunk index is damaged: for
    example, chunks extend past the end of the file, overlap, or are off the chunk grid.
    """
    row_bytes = math.prod(dataset.shape[1:]) * dataset.dtype.itemsize
    chunk_rows = dataset.chunks[0] if dataset.chunks else max(1, dataset.shape[0])
    group_rows = chunk_rows if dataset.chunks else contiguous_group_rows(dataset.shape[0], row_bytes)
    if not dataset.is_virtual:
        require_filters(dataset)
    reason = _library_reason(file, dataset)
    chunk_shape = dataset.chunks if dataset.chunks and dataset.chunks[1:] != dataset.shape[1:] else None
    codec: FilterPipeline | None = None
    filters = filters_of(dataset)
    if reason is None and (filters or chunk_shape):
        try:
            codec = find_pipeline(filters, math.prod(dataset.chunks) * dataset.dtype.itemsize)
        except UnsupportedFilterError as error:
            reason = str(error)
    table = none = ChunkTable(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint32))
    fill, stored_checksums = b"", None
    if reason is None and row_bytes and dataset.shape[0]:
        table = _read_table(file, dataset, name)
        numbers = np.arange(len(table.addresses))
        stored = np.minimum(dataset.shape[0] - numbers * chunk_rows, chunk_rows) * row_bytes
        if codec is not None:
            stored = table.sizes.copy()
            stored_checksums = _stored_checksums(file, name, table, filters)
            if codec.steps:
                # Writers may leave edge chunks unfiltered although their mask is 0 (H5Pset_chunk_opts). If an edge
                # chunk has the size of a decoded chunk, it is unknown whether it was filtered. So HDF5 must read it.
                at_edge = _reaches_past_edge(dataset).reshape(stored.shape)
                table.sizes[at_edge & (stored == codec.size) & (table.filter_masks == 0)] = -1
        _require_inside(dataset, name, table.addresses, stored)
        if (table.addresses < 0).any():
            fill = np.full(dataset.shape[1:], dataset.fillvalue, dataset.dtype).tobytes()
    return ChunkIndex(
        name=name,
        dtype=dataset.dtype,
        shape=dataset.shape,
        chunk_rows=chunk_rows,
        group_rows=group_rows,
        addresses=table.addresses,
        fill=fill,
        library_reason=reason,
        codec=codec,
        sizes=table.sizes if codec is not None else none.sizes,
        filter_masks=table.filter_masks if codec is not None else none.filter_masks,
        stored_checksums=stored_checksums,
        chunk_shape=chunk_shape,
    )


def index_checksums(file: h5py.File, name: str, rows: int) -> dict[str, ChunkIndex]:
    """Return {path: index} of the dataset that holds the row checksums of `name`.

    Return {} if there is no such dataset, or if the number of checksums is not `rows`.
    """
    path = schema.checksums_path(name)
    found = find_item(file, path)
    fits = isinstance(found, h5py.Dataset) and found.shape == (rows,) and found.dtype.kind == "u"
    return {path: index_dataset(file, found, path)} if fits else {}


def _stored_checksums(
    file: h5py.File, name: str, table: ChunkTable, filters: tuple[Filter, ...]
) -> npt.NDArray[np.uint32] | None:
    """Return the checksums of the stored chunks; None if there are none, or if they do not belong to these chunks.

    If another program rewrote the chunks, their number or their total size usually differs from the number of
    checksums, or from the total size that is stored with the checksums. Incompressible or constant rows may keep their
    sizes at another compression level, so the filter must also be that of the pack's options, if these are known.
    """
    found = find_item(file, f"{schema.CHUNK_CHECKSUMS}/{name}")
    if not isinstance(found, h5py.Dataset) or found.shape != table.sizes.shape or found.dtype != np.uint32:
        return None
    if int(found.attrs.get(schema.STORED_BYTES, -1)) != int(table.sizes.sum()):
        return None
    compression = _compression(filters)
    if stored_options(file).get("compression", compression) != compression:
        return None
    checksums: npt.NDArray[np.uint32] = found[()]
    return checksums


def _compression(filters: tuple[Filter, ...]) -> str | None:
    """Return the value of the option `compression` that gives these filters; None if there is none."""
    for name, method in COMPRESSION_METHODS.items():
        if [one.number for one in filters] == [method.filter]:
            level = filters[0].parameters[:1] if method.max_level else ()
            return ":".join(map(str, (name, *level)))
    return None


def contiguous_group_rows(rows: int, row_bytes: int) -> int:
    """Return the number of rows per chunk group of a dataset without chunks.

    It is the number of rows per chunk that `plan_chunks` chooses by default, but at most 4,096.
    """
    return min(_MAX_GROUP_ROWS, plan_chunks(max(1, rows), max(1, row_bytes)).rows)


def _library_reason(file: h5py.File, dataset: h5py.Dataset) -> str | None:
    """Return why a dataset's rows must be read through the HDF5 library, or None if h5pack can read them directly."""
    create = dataset.id.get_create_plist()
    layout = create.get_layout()
    versions = f"h5py {h5py.version.version} with HDF5 {h5py.version.hdf5_version}"
    if not has_preadv():
        return "this system has no preadv"
    if dataset.file.filename != file.filename:
        return f"a link leads to {dataset.file.filename}"
    if file.driver != "sec2":
        return f"the file is opened by HDF5's driver {file.driver}"
    if layout == h5py.h5d.VIRTUAL:
        return "it is virtual"
    if layout == h5py.h5d.COMPACT:
        return "its layout is compact"
    if create.get_external_count():
        return "its data is in other files"
    if dataset.chunks and not _LISTS_CHUNKS:
        return f"{versions} cannot list chunks"
    if dataset.chunks and file.userblock_size and h5py.version.hdf5_version_tuple < _COUNTS_USER_BLOCK:
        return f"{versions} reports wrong chunk offsets in files with a user block"
    if not dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True)):
        return "NumPy has no dtype for its stored numbers"
    return None


def _read_table(file: h5py.File, dataset: h5py.Dataset, name: str) -> ChunkTable:
    try:
        return chunk_table(dataset) if dataset.chunks else _contiguous_table(dataset)
    except Exception as error:
        # On damaged files, h5py may raise any exception type.
        raise dataset_error(file.filename, name, metadata_problem(error, "has a damaged chunk index")) from error


def _contiguous_table(dataset: h5py.Dataset) -> ChunkTable:
    offset = dataset.id.get_offset()
    # If there is no allocated storage, the offset may be the size of the user block instead of None. So check the
    # allocation status, too.
    absent = offset is None or dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED
    size = math.prod(dataset.shape) * dataset.dtype.itemsize
    return ChunkTable(np.array([-1 if absent else offset]), np.array([size]), np.zeros(1, np.uint32))


def _reaches_past_edge(dataset: h5py.Dataset) -> npt.NDArray[np.bool_]:
    """Return whether each chunk extends past the dataset's edge, as a bool array with the shape of the chunk grid."""
    partial = np.zeros(chunk_grid(dataset), np.bool_)
    for axis, (size, chunk) in enumerate(zip(dataset.shape, dataset.chunks, strict=True)):
        if size % chunk:
            partial[(slice(None),) * axis + (-1,)] = True
    return partial


def _require_inside(
    dataset: h5py.Dataset, name: str, addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> None:
    """Raise PackFormatError if chunks extend past the end of the file or overlap, because their rows would be wrong."""
    numbers = np.flatnonzero(addresses >= 0)
    starts, stored = addresses.reshape(-1)[numbers], sizes.reshape(-1)[numbers]
    path = dataset.file.filename
    file_size = os.path.getsize(path)
    outside = np.flatnonzero(starts > file_size - stored)
    if len(outside):
        rows, chunk_rows = dataset.shape[0], dataset.chunks[0] if dataset.chunks else dataset.shape[0]
        first = int(numbers[outside[0]]) // (addresses.size // len(addresses)) * chunk_rows
        problem = f"rows {first}-{min(rows, first + chunk_rows) - 1} are stored beyond the end of the file"
        advice = f"({file_size:,} bytes), which was cut short; restore it, or convert again"
        raise dataset_error(path, name, f"{problem} {advice}")
    order = np.argsort(starts, kind="stable")
    over = np.flatnonzero(np.diff(starts[order]) < stored[order][:-1])
    if len(over):
        one, other = sorted(int(numbers[order[over[0] + step]]) for step in (0, 1))
        problem = f"has a damaged chunk index: chunks {one} and {other} overlap; restore the file, or convert again"
        raise dataset_error(path, name, problem)
