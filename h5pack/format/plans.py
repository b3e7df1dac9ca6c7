"""Choice of the chunk size and of HDF5's chunk cache settings. This module only computes with integers, without I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from h5pack.format import schema

DEFAULT_CHUNK_BYTES = 4 * 1024 * 1024
"""Default bytes per chunk.

Chunks of this size are large enough that the overhead of a read is small compared with the transfer, and small enough
that a shuffle window (the chunks that are shuffled together) of 16 chunks mixes well.
"""

MIN_CHUNKS = 64
"""By default a chunk has at most ceil(n_rows / MIN_CHUNKS) rows, so that a small pack has enough chunks to shuffle.

A chunk has more rows if it would otherwise be too small to start on a page boundary.
"""

WHOLE_PAGES_BYTES = 16 * 1024 * 1024
"""Maximum size, in bytes, to which `plan_chunks` enlarges chunks so that they fill whole memory pages."""

_MAX_NSLOTS = 4_194_304
HDF5_MAX_CHUNK_BYTES = 2**32 - 1
"""The maximum size in bytes of a stored (possibly compressed) chunk that HDF5 1.10 can read."""


@dataclass(frozen=True)
class ChunkPlan:
    """The division of a dataset's rows into chunks."""

    rows: int  # rows per chunk
    bytes: int  # bytes per chunk
    count: int  # number of chunks of the dataset; the last one may be partly filled


@dataclass(frozen=True)
class CachePlan:
    """Settings of HDF5's raw data chunk cache (rdcc) for one open dataset."""

    nbytes: int  # size in bytes; with 0 (no cache), HDF5 reads only the selected rows of an unfiltered dataset
    nslots: int  # number of hash slots; each holds one chunk, so two chunks with the same slot evict each other
    w0: float  # preemption policy, 0 to 1; with 1, chunks that were read completely are evicted first
    reason: str  # why these settings were chosen, for reports

    @property
    def keywords(self) -> str:
        """The settings as a text of keyword arguments for `h5py.File`, such as "rdcc_nbytes=0, ..."."""
        return f"rdcc_nbytes={self.nbytes}, rdcc_nslots={self.nslots}, rdcc_w0={self.w0:g}"


def plan_chunks(
    n_rows: int,
    row_bytes: int,
    *,
    chunk_rows: int | None = None,
    chunk_bytes: int | None = None,
    whole_pages: bool = False,
) -> ChunkPlan:
    """Choose the number of rows per chunk: `chunk_rows`, or as many (at least one) as fit into `chunk_bytes`.

    By default, a chunk has as many rows as fit into `DEFAULT_CHUNK_BYTES`, but at most ceil(`n_rows` / `MIN_CHUNKS`)
    rows. However, it always has at least `schema.ALIGNMENT_THRESHOLD_BYTES` bytes, because smaller chunks would not
    start on a page boundary.

    With `whole_pages`, chunks also end on a page boundary if possible. Such chunks are adjacent in the file, so that
    all rows are one array in a mapping of the file. Let s be the smallest number of rows that fills whole pages. The
    number of rows per chunk then changes as follows:

    - `chunk_rows`, if given, does not change.
    - A number of at least s is rounded down to a multiple of s. If `chunk_bytes` is not given, and the chunk would have
      less than `schema.ALIGNMENT_THRESHOLD_BYTES` bytes after that, the number is rounded up instead.
    - A number below s becomes s if `chunk_bytes` is not given, s rows have at most `WHOLE_PAGES_BYTES` bytes, and the
      dataset has at least `MIN_CHUNKS` times s rows. Otherwise, it does not change.
    """
    if chunk_rows is not None:
        rows = chunk_rows
    elif chunk_bytes is not None:
        rows = max(1, chunk_bytes // row_bytes)
    else:
        aligned = math.ceil(schema.ALIGNMENT_THRESHOLD_BYTES / row_bytes)
        many = math.ceil(n_rows / MIN_CHUNKS)
        rows = max(1, aligned, min(DEFAULT_CHUNK_BYTES // row_bytes, many))
    if whole_pages and chunk_rows is None:
        step = schema.ALIGNMENT_BYTES // math.gcd(schema.ALIGNMENT_BYTES, row_bytes)
        if step <= rows or (step * row_bytes <= WHOLE_PAGES_BYTES and step * MIN_CHUNKS <= n_rows and not chunk_bytes):
            least = 1 if chunk_bytes else math.ceil(schema.ALIGNMENT_THRESHOLD_BYTES / (step * row_bytes))
            rows = max(rows // step, least) * step
    return ChunkPlan(rows=rows, bytes=rows * row_bytes, count=math.ceil(n_rows / rows))


def plan_cache(
    shape: Sequence[int],
    chunks: Sequence[int],
    itemsize: int,
    *,
    filtered: bool,
    window: int | None = None,
) -> CachePlan:
    """Choose the chunk cache settings for reading rows (axis 0) of a chunked dataset through the HDF5 library.

    An unfiltered dataset needs no cache. For 300 random rows of a dataset of 2,000 rows, HDF5 1.x with its default
    cache read 84 times as many bytes as requested; with ``nbytes=0``, it read only the requested bytes. A filtered
    dataset needs a cache with room for every chunk in use, because a chunk that does not fit is read and decoded again
    for every row. With fewer slots than chunks, two chunks in use can evict each other.

    `window` is the number of chunks along axis 0 that are in use at once if rows are read in the order of a shuffle
    window. None means that rows are read in any order.
    """
    chunk_bytes = math.prod(chunks) * itemsize
    nslots = _hash_range(shape, chunks)
    if not filtered:
        return CachePlan(0, nslots, 1.0, "unfiltered: without a cache, only the selected rows are read")
    grid = [math.ceil(size / chunk) for size, chunk in zip(shape, chunks, strict=True)]
    in_use = math.prod(grid[1:]) * (min(window, grid[0]) if window is not None else 1)
    nbytes = in_use * chunk_bytes
    if window is None:
        nbytes = max(nbytes, min(math.prod(grid) * chunk_bytes, 64 * 1024 * 1024))
        why = "filtered, rows in any order: room for up to 64 MiB of chunks, or more if the chunks of one row need it"
    else:
        why = f"filtered, window of {window} chunks along axis 0: room for all of them, so that each is decoded once"
    return CachePlan(nbytes, nslots, 1.0, why)


def _hash_range(shape: Sequence[int], chunks: Sequence[int]) -> int:
    """Return a number of hash slots with which no two chunks of a dataset collide, but at most `_MAX_NSLOTS`.

    HDF5 hashes chunk coordinates as ``(s0 << bits1 ^ s1) << bits2 ^ s2 ...`` modulo nslots, where ``bits1`` is the
    rounded-up log2 of the number of chunks along axis 1, and so on (H5D__chunk_hash_val in src/H5Dchunk.c).
    """
    grid = [max(1, math.ceil(size / chunk)) for size, chunk in zip(shape, chunks, strict=True)]
    slots = grid[0] << sum((count - 1).bit_length() for count in grid[1:])
    # The limit bounds the memory of the hash table itself.
    return min(max(slots, 1), _MAX_NSLOTS)
