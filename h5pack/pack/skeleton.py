"""The HDF5 around the pixels: a file whose chunks have addresses but no content, and the tables beside them.

A skeleton is made twice. The first, for as many rows as were planned, settles where every chunk lies; HDF5 never opens
that file for writing again, for a kill during such a reopening leaves a file that HDF5 refuses. The second, for the
rows that were packed, has the same addresses (chunks are allocated in order, so fewer chunks are a prefix) and all
tables behind them; its bytes outside the chunks complete the first.

A compressed pack is a file of its own, whose chunks get their places one by one, as long as each turns out to be.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.checksum import row_checksums
from h5pack.errors import H5PackError, OptionsError
from h5pack.hdf5 import chunk_addresses, load_filter, utf8
from h5pack.layout import plan_cache
from h5pack.pack.compression import Compression
from h5pack.sources.catalog import NameTable

_TABLE_CHUNK_BYTES = 262_144


@dataclass(frozen=True)
class Skeleton:
    """What the images dataset looks like.

    Attributes
    ----------
    row_shape : tuple of int
        (H, W, C) or (C, H, W).
    chunk_rows : int
    layout : str
        nhwc or nchw.
    compat : bool
        Write for HDF5 1.8.
    attributes : dict
        Root attributes, known before the first pixel.
    compression : Compression or None
        Of the chunks of `build_compressed`; those of `build` are stored as they are.
    """

    row_shape: tuple[int, int, int]
    chunk_rows: int
    layout: str
    compat: bool
    attributes: dict[str, str]
    compression: Compression | None = None


@dataclass(frozen=True)
class Tables:
    """Everything beside the pixels, in the order of the final rows.

    Attributes
    ----------
    labels : ndarray or None
    label_names : tuple of str or None
    fields : dict of str to ndarray
    filenames : NameTable
    splits : dict of str to (int, int)
    checksums : ndarray
        uint32, (N,).
    statistics : dict
        mean and std, float64 (C,) in 0..1; rows, step and split, what they were taken from.
    rejects : list of (str, str)
        Name and reason.
    """

    labels: npt.NDArray[Any] | None
    label_names: tuple[str, ...] | None
    fields: dict[str, npt.NDArray[Any]]
    filenames: Sequence[str] | NameTable
    splits: dict[str, tuple[int, int]]
    checksums: npt.NDArray[np.uint32]
    statistics: dict[str, Any]
    rejects: list[tuple[str, str]] = field(default_factory=list)


def build(path: str | os.PathLike[str], skeleton: Skeleton, rows: int, tables: Tables | None) -> npt.NDArray[np.int64]:
    """Write a skeleton, and give the address of each chunk.

    Parameters
    ----------
    path : path
        Truncated if it exists; the file stays the same inode, so a lock on it holds.
    skeleton : Skeleton
    rows : int
    tables : Tables or None
        None: the first skeleton, which says of itself that it is incomplete.

    Returns
    -------
    ndarray
        int64, (chunks,): byte offsets.

    Raises
    ------
    OSError
        If it cannot be written; ENOSPC where the disk is full.
    """
    with _system_errors():
        return _build(path, skeleton, rows, tables)


def _build(path: str | os.PathLike[str], skeleton: Skeleton, rows: int, tables: Tables | None) -> npt.NDArray[np.int64]:
    with _create_file(path, skeleton.compat) as file:
        # The images come first: what is allocated before them would move their chunks.
        addresses = chunk_addresses(_create_images(file, skeleton, rows, None))
        _describe_file(file, skeleton, tables)
    return addresses


def build_compressed(
    path: str | os.PathLike[str], skeleton: Skeleton, rows: int, tables: Tables, chunks: Iterable[bytes]
) -> None:
    """Write a compressed pack.

    Parameters
    ----------
    path : path
    skeleton : Skeleton
    rows : int
    tables : Tables
    chunks : iterable of bytes
        All chunks in their order, as `filtered_chunk` gives them.

    Raises
    ------
    OSError
        If it cannot be written; ENOSPC where the disk is full.
    """
    with _system_errors(), _create_file(path, skeleton.compat) as file:
        images = _create_images(file, skeleton, rows, skeleton.compression)
        for number, chunk in enumerate(chunks):
            place_chunk(images, number, chunk)
        _describe_file(file, skeleton, tables)


def place_chunk(images: h5py.Dataset, number: int, chunk: bytes) -> None:
    """Store a chunk that has been through the dataset's filters."""
    images.id.write_direct_chunk((number * images.chunks[0], 0, 0, 0), chunk)


def require_filter(compression: Compression) -> None:
    """Have HDF5 know a filter, in this process.

    Raises
    ------
    OptionsError
        If its plugin is not installed.
    """
    if not load_filter(compression.number):
        raise OptionsError(
            f"compression {compression.name!r} needs HDF5's filter {compression.number}, which is not installed; "
            "pip install 'h5pack[compress]', or choose gzip"
        )


def filtered_chunk(values: npt.NDArray[np.uint8], compression: Compression) -> bytes:
    """What HDF5 stores for a chunk of these values: it writes them into a file in memory, which is then asked.

    Parameters
    ----------
    values : ndarray
        uint8, (rows, ...): one chunk.
    compression : Compression
        Loaded, see `require_filter`.

    Raises
    ------
    H5PackError
        If the filter did not take them.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fapl_core(max(65_536, values.nbytes), False)
    # HDF5 tells files in memory apart by their names.
    name = f"h5pack-chunk-{threading.get_ident()}".encode()
    with h5py.File(h5py.h5f.create(name, h5py.h5f.ACC_TRUNC, fapl=access)) as file:
        create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        create.set_chunk(values.shape)
        _add_filter(create, compression)
        space = h5py.h5s.create_simple(values.shape)
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"chunk", h5py.h5t.STD_U8LE, space, create))
        dataset.write_direct(values)
        file.flush()
        mask, stored = dataset.id.read_direct_chunk((0,) * values.ndim)
    if mask:
        raise H5PackError(
            f"HDF5 {h5py.version.hdf5_version} stored a chunk without {compression.name}, though it was told not to; "
            "this is a fault of the filter, choose another --compression"
        )
    return bytes(stored)


def _add_filter(create: h5py.h5p.PropDCID, compression: Compression) -> None:
    # Mandatory: an optional filter may leave a chunk as it is, and not every reader looks whether it did.
    create.set_filter(compression.number, h5py.h5z.FLAG_MANDATORY, compression.parameters)


@contextlib.contextmanager
def _system_errors() -> Iterator[None]:
    """HDF5 tells the system's error in its text alone."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        number = re.search(r"errno = (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def _describe_file(file: h5py.File, skeleton: Skeleton, tables: Tables | None) -> None:
    for name, value in skeleton.attributes.items():
        file.attrs[name] = np.bytes_(value.encode())
    file.attrs[schema.FORMAT] = np.int64(schema.FORMAT_VERSION)
    file.attrs[schema.COMPLETE] = np.int64(tables is not None)
    if tables is not None:
        _write_tables(file, tables)


def _create_file(path: str | os.PathLike[str], compat: bool) -> h5py.File:
    """An empty file without time stamps, so that the same content makes the same bytes."""
    create = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    create.set_obj_track_times(False)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    version = h5py.h5f.LIBVER_V18 if compat else h5py.h5f.LIBVER_V110
    access.set_libver_bounds(version, version)
    access.set_alignment(schema.ALIGNMENT_THRESHOLD_BYTES, schema.ALIGNMENT_BYTES)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    # The caller holds an flock of its own, with which HDF5's would collide.
    access.set_file_locking(False, False)
    return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, create, access))


def _create_images(file: h5py.File, skeleton: Skeleton, rows: int, compression: Compression | None) -> h5py.Dataset:
    chunks = (skeleton.chunk_rows, *skeleton.row_shape)
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_chunk(chunks)
    create.set_obj_track_times(False)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if compression is None:
        # Early allocation settles every address now; nothing is written, so the file is sparse.
        create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    else:
        _add_filter(create, compression)
    cache = plan_cache((rows, *skeleton.row_shape), chunks, 1, filtered=compression is not None)
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_chunk_cache(cache.nslots, cache.nbytes, cache.w0)
    # Extendable, because HDF5 packs the chunks of a fixed-size dataset back to back, unaligned.
    space = h5py.h5s.create_simple((rows, *skeleton.row_shape), (h5py.h5s.UNLIMITED, *skeleton.row_shape))
    images = h5py.Dataset(
        h5py.h5d.create(file.id, schema.IMAGES.encode(), h5py.h5t.STD_U8LE, space, create, dapl=access)
    )
    _describe_images(images, skeleton)
    images.attrs[schema.RDCC_NBYTES] = np.int64(cache.nbytes)
    images.attrs[schema.RDCC_NSLOTS] = np.int64(cache.nslots)
    images.attrs[schema.RDCC_W0] = np.float64(cache.w0)
    return images


def _describe_images(images: h5py.Dataset, skeleton: Skeleton) -> None:
    """The HDF5 Image specification's attributes (version 1.2), which viewers go by, and the axes."""
    last = skeleton.layout == "nhwc"
    channels = skeleton.row_shape[2 if last else 0]
    images.attrs["CLASS"] = np.bytes_("IMAGE")
    images.attrs["IMAGE_VERSION"] = np.bytes_("1.2")
    if channels == 3:
        images.attrs["IMAGE_SUBCLASS"] = np.bytes_("IMAGE_TRUECOLOR")
        images.attrs["INTERLACE_MODE"] = np.bytes_("INTERLACE_PIXEL" if last else "INTERLACE_PLANE")
    else:
        images.attrs["IMAGE_SUBCLASS"] = np.bytes_("IMAGE_GRAYSCALE")
        images.attrs["IMAGE_WHITE_IS_ZERO"] = np.uint8(0)
    images.attrs[schema.LAYOUT] = np.bytes_(skeleton.layout)
    for axis, label in enumerate(skeleton.layout.upper()):
        images.dims[axis].label = label


def _write_tables(file: h5py.File, tables: Tables) -> None:
    if tables.labels is not None:
        labels = file.create_dataset(schema.LABELS, data=tables.labels)
        if tables.label_names is not None:
            kind = schema.CLASSES if tables.labels.ndim == 1 else schema.COLUMNS
            labels.attrs[kind] = utf8(tables.label_names)
    for name, values in sorted(tables.fields.items()):
        file.create_dataset(name, data=values)
    _create_names(file, schema.FILENAMES, tables.filenames)

    # Groups that HDF5 makes on the way to a dataset would carry the time.
    for name in (schema.SPLITS, schema.CHECKSUMS):
        file.create_group(name)
    file.create_dataset(schema.SPLIT_NAMES, data=utf8(tables.splits))
    file.create_dataset(schema.SPLIT_ROWS, data=np.array([*tables.splits.values()], np.int64))

    file.create_dataset(f"{schema.CHECKSUMS}/{schema.IMAGES}", data=tables.checksums)
    if tables.labels is not None:
        file.create_dataset(f"{schema.CHECKSUMS}/{schema.LABELS}", data=row_checksums(tables.labels))
    for name, values in sorted(tables.fields.items()):
        file.create_dataset(f"{schema.CHECKSUMS}/{name}", data=row_checksums(values))

    statistics = file.create_group(schema.STATISTICS)
    for name in ("mean", "std"):
        statistics.create_dataset(name, data=np.asarray(tables.statistics[name], np.float64))
    statistics.attrs["rows"] = np.int64(tables.statistics["rows"])
    statistics.attrs["step"] = np.int64(tables.statistics["step"])
    split = utf8([tables.statistics["split"]])
    statistics.attrs.create("split", split[0], dtype=split.dtype)

    if tables.rejects:
        file.create_group(schema.REJECTS)
        _create_names(file, f"{schema.REJECTS}/filenames", [name for name, _ in tables.rejects])
        _create_names(file, f"{schema.REJECTS}/reasons", [reason for _, reason in tables.rejects])


def _create_names(file: h5py.File, path: str, names: Sequence[str] | NameTable) -> None:
    """A table of strings: fixed UTF-8 (20,000 names read in 0.9 ms against 12.5 ms of variable length), gzip."""
    width = max((len(name.encode("utf-8", "backslashreplace")) for name in names), default=1)
    rows = max(1, min(len(names), _TABLE_CHUNK_BYTES // max(1, width)))
    table = file.create_dataset(
        path,
        (len(names),),
        h5py.string_dtype("utf-8", max(1, width)),
        chunks=(rows,),
        compression="gzip",
        compression_opts=6,
    )
    # Chunk by chunk: one long name would make the whole table that wide in memory.
    for start in range(0, len(names), rows):
        stop = min(start + rows, len(names))
        table[start:stop] = utf8([names[index] for index in range(start, stop)], minimum=max(1, width))


def options_text(options: dict[str, Any]) -> str:
    """The options that change content, as a pack's root group holds them."""
    return json.dumps(options, sort_keys=True)


def root_attributes(version: str, created: str, options: dict[str, Any]) -> dict[str, str]:
    """The text attributes of a pack's root group."""
    return {
        schema.VERSION: version,
        schema.CREATED: created,
        schema.OPTIONS: options_text(options),
    }
