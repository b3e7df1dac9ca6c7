"""Opening HDF5 files and datasets, with errors that say what to do and caches that suit the reading."""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import os
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.errors import IncompletePackError, PackFormatError
from h5pack.layout import CachePlan, plan_cache


def open_file(path: str | os.PathLike[str]) -> h5py.File:
    """Open an HDF5 file for reading.

    Raises
    ------
    PackFormatError
        If there is no such file, it is not HDF5, it is cut short, or somebody is writing it.
    """
    name = os.fspath(path)
    try:
        return h5py.File(name, "r")
    except FileNotFoundError as error:
        raise PackFormatError(f"{name}: no such file; check the path") from error
    except IsADirectoryError as error:
        raise PackFormatError(f"{name}: a folder, not an HDF5 file; pack it with 'h5pack convert'") from error
    except (OSError, RuntimeError) as error:
        if os.path.isdir(name):
            raise PackFormatError(f"{name}: a folder, not an HDF5 file; pack it with 'h5pack convert'") from error
        raise PackFormatError(f"{name}: {_open_failure(name, error)}") from error


def _open_failure(name: str, error: Exception) -> str:
    text = str(error)
    if isinstance(error, PermissionError):
        return "no permission to read it; change its mode, or ask its owner"
    if isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.EACCES):
        return "another process is writing it; wait until it has finished"
    if isinstance(error, OSError) and error.errno in (errno.ENOLCK, errno.ENOTSUP):
        return "its file system has no locks; set HDF5_USE_FILE_LOCKING=FALSE and try again"
    if "truncated file" in text:
        return "the file is cut short (a broken copy or download); copy it again"
    if "already open for write" in text:
        return "a writer was killed and HDF5 refuses the file; restore it, or run 'h5clear -s' at your own risk"
    if "signature not found" in text:
        size = os.path.getsize(name)
        return "it is empty; convert again" if size == 0 else "not an HDF5 file; check the path"
    detail = text[text.find("(") + 1 : text.rfind(")")] if "(" in text and ")" in text else text
    return f"HDF5 cannot open it ({detail}); the file is damaged: restore it or convert again"


def require_complete(file: h5py.File) -> None:
    """Refuse a pack whose conversion has not finished; files that are no packs pass.

    Raises
    ------
    IncompletePackError
    PackFormatError
        If the pack has a format version that this h5pack does not know.
    """
    if schema.FORMAT not in file.attrs:
        return
    version = int(file.attrs[schema.FORMAT])
    if version > schema.FORMAT_VERSION:
        raise PackFormatError(
            f"{file.filename}: pack format {version}, and this h5pack reads up to {schema.FORMAT_VERSION}; "
            "upgrade with 'pip install -U h5pack'"
        )
    if not int(file.attrs.get(schema.COMPLETE, 0)):
        raise IncompletePackError(
            f"{file.filename}: its conversion did not finish; run the same 'h5pack convert' with --resume"
        )


def require_dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """The dataset `name` of `file`.

    Raises
    ------
    PackFormatError
        If there is none, and the message lists those there are; or if it is damaged.
    """
    item = find_item(file, name)
    if not isinstance(item, h5py.Dataset):
        known = ", ".join(repr(found) for found in dataset_names(file)) or "none"
        raise PackFormatError(f"{file.filename}: no dataset {name!r}; it holds {known}")
    return item


def find_item(file: h5py.File, name: str) -> Any:
    """What a name leads to; None where it leads nowhere. ``file.get`` gives None for what is damaged, too.

    Raises
    ------
    PackFormatError
        If it is there, but cannot be opened.
    """
    try:
        return file[name]
    except KeyError as error:
        if isinstance(file.get(name, getlink=True), h5py.HardLink):
            raise PackFormatError(
                f"{file.filename}: {name!r} cannot be opened ({error.args[0]}); the file is damaged: restore it, or "
                "convert again"
            ) from error
        return None


def dataset_names(file: h5py.File) -> list[str]:
    """Paths of all datasets in a file, without a leading slash, in HDF5's own order of names."""
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return names


def reopen_tuned(dataset: h5py.Dataset, cache: CachePlan | None = None) -> h5py.Dataset:
    """The same dataset, opened anew with a chunk cache that suits reading its rows in any order.

    h5py drops a dataset-level ``rdcc_nbytes=0`` (its value is tested for truth), hence the access property list.

    Parameters
    ----------
    dataset : h5py.Dataset
    cache : CachePlan, optional
        Instead of `plan_cache`'s for any order.
    """
    if dataset.chunks is None:
        return dataset
    if cache is None:
        cache = plan_cache(dataset.shape, dataset.chunks, dataset.dtype.itemsize, filtered=is_filtered(dataset))
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_chunk_cache(cache.nslots, cache.nbytes, cache.w0)
    file_id, path = dataset.file.id, dataset.name.encode()
    # A dataset that is open keeps the cache of its first opener, so the old handle goes first.
    dataset.id.close()
    return h5py.Dataset(h5py.h5d.open(file_id, path, access))


def is_filtered(dataset: h5py.Dataset) -> bool:
    """Whether the dataset's chunks pass through filters."""
    return bool(dataset.id.get_create_plist().get_nfilters() > 0)


@dataclass(frozen=True)
class Filter:
    """A filter of a dataset.

    Attributes
    ----------
    number : int
        By which HDF5 knows it.
    parameters : tuple of int
    name : str
    """

    number: int
    parameters: tuple[int, ...]
    name: str


def filters_of(dataset: h5py.Dataset) -> tuple[Filter, ...]:
    """A dataset's filters, in the order in which they encode."""
    create = dataset.id.get_create_plist()
    found = [create.get_filter(place) for place in range(create.get_nfilters())]
    return tuple(Filter(number, tuple(values), text(name)) for number, _, values, name in found)


def load_filter(number: int) -> bool:
    """Have HDF5 know a filter, in this process; whether it does."""
    if not h5py.h5z.filter_avail(number):
        with contextlib.suppress(ImportError):
            # It registers its filters.
            importlib.import_module("hdf5plugin")
    return bool(h5py.h5z.filter_avail(number))


def require_filters(dataset: h5py.Dataset) -> None:
    """Have HDF5 know a dataset's filters, in this process.

    Raises
    ------
    PackFormatError
        If a decoder is missing.
    """
    for item in filters_of(dataset):
        if not load_filter(item.number):
            raise PackFormatError(
                f"{dataset.file.filename}: the chunks of {dataset.name.lstrip('/')!r} pass through filter "
                f"{item.number} ({item.name or 'unnamed'}), whose decoder is missing; pip install 'h5pack[compress]'"
            )


@dataclass(frozen=True)
class ChunkTable:
    """Where the chunks of a dataset lie: (chunks along axis 0,), and an axis of pieces where rows are cut.

    Attributes
    ----------
    addresses : ndarray
        int64: byte offsets from the start of the file; -1 for a chunk without storage.
    sizes : ndarray
        int64: bytes as stored.
    masks : ndarray
        uint32: bit i says that filter i was left out.
    """

    addresses: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    masks: npt.NDArray[np.uint32]


def chunk_grid(dataset: h5py.Dataset) -> tuple[int, ...]:
    """Chunks along each axis of a chunked dataset."""
    return tuple(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))


def chunk_table(dataset: h5py.Dataset) -> ChunkTable:
    """The chunks of a dataset; those that hold pieces of the same rows in the order of C.

    One pass of ``chunk_iter``, 2 to 4 microseconds a chunk; asking chunk by chunk is linear in the chunk count for
    each question.

    Raises
    ------
    ValueError
        If the index is damaged: a chunk off the grid, twice, or without filters and of another size.
    """
    grid, chunks = chunk_grid(dataset), dataset.chunks
    pieces = math.prod(grid[1:])
    count = grid[0] * pieces
    size = None if is_filtered(dataset) else math.prod(chunks) * dataset.dtype.itemsize
    table = ChunkTable(np.full(count, -1, np.int64), np.zeros(count, np.int64), np.zeros(count, np.uint32))

    def record(chunk: Any) -> None:
        number = 0
        for offset, length, most in zip(chunk.chunk_offset, chunks, grid, strict=True):
            place, rest = divmod(offset, length)
            if rest or not 0 <= place < most:
                raise ValueError(f"a chunk at {chunk.chunk_offset}")
            number = number * most + place
        if size is not None and chunk.size != size:
            raise ValueError(f"chunk {number} has {chunk.size} bytes instead of {size}")
        if table.addresses[number] >= 0:
            raise ValueError(f"chunk {number} twice")
        table.addresses[number] = chunk.byte_offset
        table.sizes[number], table.masks[number] = chunk.size, chunk.filter_mask

    dataset.id.chunk_iter(record)
    if pieces == 1:
        return table
    shape = grid[0], pieces
    return ChunkTable(table.addresses.reshape(shape), table.sizes.reshape(shape), table.masks.reshape(shape))


def chunk_addresses(dataset: h5py.Dataset) -> npt.NDArray[np.int64]:
    """`chunk_table`'s addresses, of a dataset whose chunks hold whole rows; int64, (chunks,)."""
    return chunk_table(dataset).addresses


def text(value: Any) -> str:
    """A string attribute or element, whether HDF5 stored it as bytes or as text."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def utf8(values: Any, *, minimum: int = 1) -> npt.NDArray[np.bytes_]:
    """Encode strings for a fixed-length UTF-8 dataset or attribute.

    A name that is no valid Unicode (file names on Linux are bytes) keeps its odd bytes as ``\\udcXX`` escapes.
    """
    encoded = [value.encode("utf-8", "backslashreplace") for value in values]
    width = max([minimum, *map(len, encoded)])
    return np.array(encoded, dtype=h5py.string_dtype("utf-8", width))
