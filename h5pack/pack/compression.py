"""Compression of chunks: parsing the option `compression`, and compressing the rows of an unfinished pack."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.errors import H5PackError
from h5pack.format.checksums import row_checksums
from h5pack.format.schema import COMPRESSION_METHODS, CompressionMethod
from h5pack.read.hdf5 import load_filter
from h5pack.system.files import read_all
from h5pack.system.parameters import invalid

NONE = "none"
COMPRESSIONS = (NONE, *COMPRESSION_METHODS)
"""Allowed values of the option `compression`, without a level."""


@dataclass(frozen=True)
class Compression:
    """A compression method with its level, if it has levels."""

    name: str  # the value of the option `compression`, with the level
    method: CompressionMethod  # its parameters, HDF5's ``cd_values``, have the level


def parse_compression(text: str) -> Compression | None:
    """Parse a value of `compression`, such as gzip, zstd:7 or bitshuffle-lz4; return None for "none"."""
    name, colon, level = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name == NONE and not colon:
        return None
    method = COMPRESSION_METHODS.get(name)
    if method is not None and (not colon or level in map(str, range(1, method.max_level + 1))):
        method = replace(method, parameters=(int(level),)) if colon else method
        return Compression(f"{name}:{method.parameters[0]}" if method.max_level else name, method)
    levels = (f"{name}:1 to {name}:{one.max_level}" for name, one in COMPRESSION_METHODS.items() if one.max_level)
    raise invalid("compression", text, f"it must be one of {', '.join([*COMPRESSIONS, *levels])}")


def max_compressed_bytes(count: int) -> int:
    """Return an upper bound of the size in bytes of `count` bytes after compression, whatever the filter.

    Incompressible data grows by at most 52 bytes per block of 8,192 bytes with Bitshuffle-LZ4, by 1 byte in 256 with
    zstd, and by 1 byte in 1,000 with gzip.
    """
    return count + count // 64 + 1024


def require_filter(compression: Compression) -> None:
    """Load a filter's HDF5 plugin into this process; raises OptionsError if it is not installed."""
    if not load_filter(compression.method.filter):
        problem = f"needs HDF5's filter {compression.method.filter}, which is not installed"
        raise invalid("compression", compression.name, "run pip install hdf5plugin, or choose gzip", problem)


def add_filter(properties: h5py.h5p.PropDCID, compression: Compression) -> None:
    """Add a filter to a dataset's creation properties."""
    # If a mandatory filter fails, HDF5 raises an error. If an optional one fails, HDF5 stores the chunk uncompressed,
    # with a filter mask that is not 0. The file format requires 0, and `store_chunk` writes 0.
    properties.set_filter(compression.method.filter, h5py.h5z.FLAG_MANDATORY, compression.method.parameters)


def compress_chunk(values: npt.NDArray[Any], compression: Compression) -> bytes:
    """Compress a chunk, (rows, ...), by writing it to an HDF5 file in memory; return the bytes that HDF5 stores."""
    require_filter(compression)  # A worker that was not forked has not loaded it.
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fapl_core(max(65_536, values.nbytes), False)
    # HDF5 identifies files in memory by name, so each thread needs a name of its own.
    name = f"h5pack-chunk-{threading.get_ident()}".encode()
    with h5py.File(h5py.h5f.create(name, h5py.h5f.ACC_TRUNC, fapl=access)) as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk(values.shape)
        add_filter(properties, compression)
        space = h5py.h5s.create_simple(values.shape)
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"chunk", h5py.h5t.py_create(values.dtype), space, properties))
        dataset.write_direct(values)
        file.flush()
        filter_mask, stored = dataset.id.read_direct_chunk((0,) * values.ndim)
        assert not filter_mask
    return bytes(stored)


@dataclass(frozen=True)
class CompressTask:
    """A chunk to compress, of the images or of a field in ``OUT.partial``. Its rows already have their final order."""

    path: str
    start: int  # the chunk's first row
    offset: int  # the chunk's byte offset in the file
    shape: tuple[int, ...]  # (rows, H, W, C) or (rows, C, H, W); (rows, H, W) for masks
    checksums: npt.NDArray[np.uint32]  # (n,): CRC-32 of each row; in the last chunk, n may be below shape[0]
    compression: Compression
    dtype: str = "|u1"

    def __str__(self) -> str:
        return f"rows {self.start}-{self.start + len(self.checksums) - 1}"


def compress_rows(task: CompressTask) -> tuple[int, bytes]:
    """Read a chunk's rows back, check and compress them; return the number of rows and the compressed bytes."""
    chunk = np.zeros(task.shape, task.dtype)
    rows = chunk[: len(task.checksums)]
    with open(task.path, "rb") as stream:
        data = read_all(stream.fileno(), rows.nbytes, task.offset)
    rows.reshape(-1).view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    if not np.array_equal(row_checksums(rows), task.checksums):
        problem = (
            f"{task} of the file do not match their checksums; check the disk, then run "
            "again with resume=True (in an array job, with finish=True)"
        )
        raise H5PackError.at(
            task.path, problem, "resume=True", "finish=True", rows=range(task.start, task.start + len(task.checksums))
        )
    return len(rows), compress_chunk(chunk, task.compression)
