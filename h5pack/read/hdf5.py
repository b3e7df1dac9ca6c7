"""Functions that open HDF5 files and datasets, read rows and chunk locations, and raise errors with advice."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.errors import H5PackError, IncompletePackError, PackFormatError, ReadError, SourceError
from h5pack.format import schema
from h5pack.format.plans import CachePlan, plan_cache
from h5pack.system.arrays import consecutive_runs
from h5pack.system.machine import optional_module
from h5pack.system.parameters import require_local

_MATLAB_CELLS = (b"#refs#/", b"#subsystem#/")
BLOCK_NAMES = 65_536
"""Number of file names that are read from a file at a time."""
_BLOCK_BYTES = 256 * 1024 * 1024
_MAX_NAMED, _MAX_SORTED = 20, 1_000  # maximum number of datasets that a message lists, and that are opened for it
OpenDataset = Callable[[], h5py.Dataset]
NOT_UTF8 = "is not UTF-8, so h5pack cannot read it; rename it with h5py's Group.move"  # continues after a name
VERIFY_ADVICE = "run 'h5pack verify' on the file, then restore it or convert again"


def open_file(path: str | os.PathLike[str]) -> h5py.File:
    """Open an HDF5 file; raise PackFormatError if that fails, for example because another process is writing it."""
    require_local(path)
    name = os.fsdecode(path).rstrip(os.sep) or os.sep
    if os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name):
        # HDF5 would wait forever for a named pipe that no process writes to.
        raise PackFormatError.at(name, "a pipe or device, in which HDF5 cannot seek; write its data to a file first")
    try:
        return h5py.File(name, "r")
    except FileNotFoundError as error:
        raise PackFormatError.at(name, "no such file; check the path") from error
    except (OSError, RuntimeError) as error:
        if os.path.isdir(name):
            raise PackFormatError.at(name, "a folder, not an HDF5 file; pack it with 'h5pack convert'") from error
        raise PackFormatError.at(name, _open_failure(name, error)) from error


def _open_failure(name: str, error: Exception) -> str:
    # HDF5 distinguishes many causes only in the texts of its errors.
    text, number = str(error), getattr(error, "errno", None)
    if isinstance(error, PermissionError):
        return "no permission to read it; change its mode, or ask its owner"
    if isinstance(error, BlockingIOError):
        return "another process is writing it; wait until that process has finished"
    if number == errno.EMFILE:
        return f"cannot be opened ({os.strerror(errno.EMFILE)}); raise the limit on open files ('ulimit -n')"
    if number in (errno.ENOLCK, errno.ENOTSUP):
        return "its file system has no file locks; set HDF5_USE_FILE_LOCKING=FALSE in the environment and try again"
    if "truncated file" in text:
        return "the file is cut short (a broken copy or download); copy it again"
    if "already open for write" in text:
        # Writers of SWMR mode hold no lock, so a file that is being written looks like one whose writer was killed.
        advice = "wait for that process, or if there is none, restore the file, or run 'h5clear -s' at your own risk"
        return f"a process is writing it in SWMR mode, or its writer was killed; {advice}"
    if "signature not found" in text:
        size = os.path.getsize(name)
        return "the file is empty (0 bytes); convert again" if size == 0 else "not an HDF5 file; check the path"
    if failed_call(error) is not None:
        return metadata_problem(error)
    detail = text[text.find("(") + 1 : text.rfind(")")] if "(" in text and ")" in text else text
    return f"HDF5 cannot open it ({detail}); the file is damaged: restore it or convert again"


@contextlib.contextmanager
def reporting_damage(
    path: str | os.PathLike[str], kind: type[PackFormatError | SourceError] = PackFormatError
) -> Iterator[None]:
    """Turn any exception in the `with` block, except h5pack's own errors, into an error of type `kind` about `path`.

    For damaged metadata of a file, h5py can raise any type of exception.
    """
    try:
        yield
    except H5PackError:
        raise
    except Exception as error:
        raise kind.at(path, metadata_problem(error)) from error


def metadata_problem(error: Exception, damage: str = "its metadata is damaged") -> str:
    """Return a line that says why reading a file's metadata raised `error` (if unknown, `damage`), and what to do."""
    reason = failed_call(error)
    if reason is not None:
        return f"cannot be read ({reason}); check the disk, then try again"
    if isinstance(error, MemoryError):
        return "has metadata that does not fit in memory; use a machine with more memory"
    if isinstance(error, UnicodeEncodeError):
        return f"it has no object {error.object!r}, since names are UTF-8; give another name"
    if isinstance(error, UnicodeDecodeError):
        return f"the name of an object in it is not UTF-8: {error.object!r}; rename it with h5py's Group.move"
    return f"{damage} ({error.args[0] if isinstance(error, KeyError) else error}); restore the file, or convert again"


def failed_call(error: Exception) -> str | None:
    """Return why the system call behind `error` failed, without HDF5's details; None if `error` has another cause."""
    found = re.search(r"errno = (\d+)", str(error))
    number = getattr(error, "errno", None) or (int(found[1]) if found else 0)
    return os.strerror(number) if number else None


def dataset_error(path: str, name: str, problem: str, rows: Sequence[int] = ()) -> PackFormatError:
    """Return the error to raise for a dataset that cannot be used; `problem` continues after the dataset's name."""
    return PackFormatError.at(path, f"{name!r} {problem}", dataset=name, rows=rows)


def read_rows(dataset: h5py.Dataset, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> int:
    """Read `rows` into `out`; return the number of HDF5 library calls, which is one per run of consecutive rows.

    `rows` is int64 (n,), and `out` is (n, ...). Raises ReadError if a system call fails, and PackFormatError if the
    rows cannot be read for another reason.
    """
    row_shape = dataset.shape[1:]
    if dataset.id.get_create_plist().get_fill_time() == h5py.h5d.FILL_TIME_NEVER:
        # With this setting, HDF5 does not write the fill value for chunks without allocated storage, so do it here.
        out[...] = dataset.fillvalue
    space = dataset.id.get_space()
    origin = (0,) * len(row_shape)
    edges = consecutive_runs(rows).tolist()
    for first, last in itertools.pairwise(edges):
        start, count = int(rows[first]), last - first
        space.select_hyperslab((start, *origin), (count, *row_shape))
        try:
            dataset.id.read(h5py.h5s.create_simple((count, *row_shape)), space, out[first:last])
        except (OSError, RuntimeError, ValueError) as error:
            # The text of HDF5's error says whether a system call failed.
            kind = ReadError if "file read failed" in str(error) else PackFormatError
            path, name = dataset.file.filename, dataset.name.lstrip("/")
            which = f"row {start}" if count == 1 else f"rows {start}-{start + count - 1}"
            reason = failed_call(error) or error
            problem = f"{name!r} {which} cannot be read ({reason}); run 'h5pack verify' on the file, or restore it"
            raise kind.at(path, problem, dataset=name, rows=range(start, start + count)) from error
    require_open_sources(dataset)
    return len(edges) - 1


def require_open_sources(dataset: h5py.Dataset) -> None:
    """Raise ReadError if rows that were read from a virtual dataset may be wrong because too many files are open.

    If HDF5 cannot open a source file, it returns fill values for the rows. HDF5 keeps all source files open that it
    could open. So if another file can be opened now, the limit on open files did not prevent HDF5 from opening any.
    """
    try:
        if dataset.is_virtual:
            os.close(os.open(os.sep, os.O_RDONLY))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            path, name = dataset.file.filename, dataset.name.lstrip("/")
            problem = f"{name!r} is virtual, and its source files cannot all be opened ({error.strerror})"
            raise ReadError.at(path, f"{problem}; raise the limit on open files ('ulimit -n')", dataset=name) from error


def is_pack(file: h5py.File) -> bool:
    """Return whether a file is a pack, complete or not."""
    return schema.FORMAT in file.attrs


def require_complete(file: h5py.File) -> None:
    """Raise IncompletePackError for an incomplete pack, PackFormatError for a newer format; accept all other files."""
    if not is_pack(file):
        return
    version, known = int(file.attrs[schema.FORMAT]), schema.FORMAT_VERSION
    if version > known:
        problem = f"has pack format {version}, but this h5pack reads only formats up to {known}; upgrade h5pack"
        raise PackFormatError.at(file.filename, problem)
    if not int(file.attrs.get(schema.COMPLETE, 0)):
        problem = "its conversion did not finish; run the same conversion again with resume=True"
        raise IncompletePackError.at(file.filename, problem, "resume=True")


def require_dataset(file: h5py.File, name: str, parameter: str = "") -> h5py.Dataset:
    """Return the dataset `name` of `file`; if there is none, raise a PackFormatError that lists the datasets.

    `parameter` is the parameter that the message recommends for naming another dataset, such as ``labels=NAME``.
    """
    item = find_item(file, name) if isinstance(name, str) else None
    if not isinstance(item, h5py.Dataset):
        parameter = parameter or ("images=NAME" if name == schema.IMAGES else "")
        listed = list_datasets(file)
        if name in listed:
            raise dataset_error(file.filename, name, NOT_UTF8)
        alike = [found for found in listed if found.endswith(f"/{name}")]
        if not alike and parameter == "images=NAME" and len(listed) <= _MAX_SORTED:
            alike = [found for found, opened in listed.items() if opened().ndim >= 3]
        likely = f", perhaps {alike[0]!r}" if len(alike) == 1 else ""
        parameters, advice = ((parameter,), f"; give {parameter}{likely}") if parameter else ((), "")
        problem = f"has no dataset {name!r}; its datasets are {datasets_text(listed)}{advice}"
        raise PackFormatError.at(file.filename, problem, *parameters, dataset=name)
    return item


def read_offsets(file: h5py.File, name: str, data: h5py.Dataset, unit: str) -> npt.NDArray[np.int64]:
    """Read `name`, the offsets of rows in `data`, int64 (N + 1,); raise PackFormatError if they do not fit `data`.

    `unit` is what messages call the rows of `data`, such as "bytes".
    """
    table = require_dataset(file, name)
    if table.ndim != 1 or not len(table) or table.dtype.kind not in "iu":
        problem = f"is {table.dtype} {table.shape}, but offsets are int64 (rows + 1,); {VERIFY_ADVICE}"
        raise dataset_error(file.filename, name, problem)
    offsets: npt.NDArray[np.int64] = table[()].astype(np.int64)
    outside = (offsets[:-1] < 0) | (offsets[1:] < offsets[:-1]) | (offsets[1:] > len(data))
    if outside.any() or not 0 <= offsets[0] <= len(data):
        row = int(outside.argmax()) if len(outside) else 0
        problem = f"row {row} is not a range of the {len(data):,} {unit} of {data.name[1:]!r}; {VERIFY_ADVICE}"
        raise dataset_error(file.filename, name, problem, (row,))
    return offsets


def datasets_text(listed: dict[str, OpenDataset]) -> str:
    """Return what `list_datasets` returned as a text such as "'X' uint8 (9, 8, 8, 3)", by descending number of axes."""
    # Sort only the first datasets, because opening all of very many datasets would take minutes.
    opened = [(name, opened()) for name, opened in itertools.islice(listed.items(), _MAX_SORTED)]
    texts: list[str] = []
    for name, dataset in sorted(opened, key=lambda one: -one[1].ndim)[:_MAX_NAMED]:
        try:
            texts.append(f"{name!r} {dataset.dtype} {dataset.shape}")
        except TypeError:
            # NumPy has no dtype for this dataset.
            texts.append(repr(name))
    more = f" and {len(listed) - _MAX_NAMED:,} more" if len(listed) > _MAX_NAMED else ""
    return (", ".join(texts) or "none") + more


def find_item(file: h5py.File, name: str) -> Any:
    """Return the object called `name`, or None. If it is damaged, raise PackFormatError, unlike ``file.get``."""
    try:
        return file[name]
    # A loop of soft links, perhaps above the object, is a RuntimeError. If garbage collection closes HDF5 objects while
    # h5py reads the text of an error, HDF5 frees the text, and UnicodeDecodeError may be raised instead of KeyError.
    except (KeyError, RuntimeError, UnicodeDecodeError) as error:
        if "too many links" not in str(error) and isinstance(file.get(name, getlink=True), h5py.HardLink):
            raise dataset_error(file.filename, name, metadata_problem(error, "has damaged metadata")) from error
        return None
    except UnicodeEncodeError:  # Names are UTF-8, so no object has a name with an unpaired surrogate.
        return None


def list_datasets(file: h5py.File, links: Sequence[ExternalLink] | None = None) -> dict[str, OpenDataset]:
    """Return the paths of all datasets in a file, without a leading slash, each with a function that opens the dataset.

    Datasets behind external links come last. `links` are the file's external links, by default those that
    `external_links` finds. The elements of MATLAB's cell arrays are left out, because a file can have thousands of
    them, with names such as "#refs#/a". Bytes of paths that are not UTF-8 become surrogates, as in `os.fsdecode`.
    """
    found = _datasets_below(file)
    for link in external_links(file) if links is None else links:
        stored = link.name.encode(errors="surrogateescape")
        target = file.get(stored) if link.found else None
        if isinstance(target, h5py.Dataset):
            found[link.name] = partial(file.__getitem__, stored)
        elif isinstance(target, h5py.Group):
            found |= {f"{link.name}/{name}": opened for name, opened in _datasets_below(target).items()}
    return found


def _datasets_below(group: h5py.Group) -> dict[str, OpenDataset]:
    hard_links: list[tuple[bytes, int]] = []

    def add(path: bytes, info: Any) -> None:
        if info.type == h5py.h5l.TYPE_HARD:
            hard_links.append((path, info.u))

    # Neither `h5py.h5o.visit` nor opening objects by their paths: both take time proportional to the depth per object.
    group.id.links.visit(add, info=True)
    found: dict[str, OpenDataset] = {}
    addresses: set[int] = set()
    groups = [(b"", group.id)]  # the groups on the way to the current link
    for path, address in hard_links:
        parent, _, name = path.rpartition(b"/")
        while groups[-1][0] != parent:
            groups.pop()
        if address in addresses:
            continue
        addresses.add(address)
        kind = h5py.h5o.get_info(groups[-1][1], name).type
        if kind == h5py.h5o.TYPE_GROUP:
            groups.append((path, h5py.h5g.open(groups[-1][1], name)))
        elif kind == h5py.h5o.TYPE_DATASET and not path.startswith(_MATLAB_CELLS):
            found[path.decode(errors="surrogateescape")] = partial(_open_dataset, groups[-1][1], name)
    return found


def _open_dataset(group: h5py.h5g.GroupID, name: bytes) -> h5py.Dataset:
    return h5py.Dataset(h5py.h5o.open(group, name), readonly=True)


@dataclass(frozen=True)
class ExternalLink:
    """A link to an object in another file."""

    name: str  #: path of the link, without a leading slash
    target: str  #: FILE:PATH
    found: bool  #: false if the target does not exist or cannot be opened


def external_links(file: h5py.File) -> tuple[ExternalLink, ...]:
    """Return the links of a file to objects in other files. Paths are decoded as in `list_datasets`."""
    found: list[tuple[bytes, int]] = []
    file.id.links.visit(lambda name, info: found.append((name, info.type)), info=True)
    links = {name: file.id.links.get_val(name) for name, kind in found if kind == h5py.h5l.TYPE_EXTERNAL}
    listed = []
    for name, target in links.items():
        leads = False
        with contextlib.suppress(RuntimeError):  # a loop of links in the other file
            leads = file.get(name) is not None
        listed.append(ExternalLink(name.decode(errors="surrogateescape"), ":".join(map(text, target)), leads))
    return tuple(listed)


def reopen_tuned(dataset: h5py.Dataset, cache: CachePlan | None = None) -> h5py.Dataset:
    """Reopen a dataset with another chunk cache, by default one that suits reading rows in any order.

    A dataset without chunks is returned unchanged. Otherwise, `dataset` is closed. The cache is set by an access
    property list, because h5py ignores ``rdcc_nbytes=0`` for datasets.
    """
    if dataset.chunks is None:
        return dataset
    if cache is None:
        # Ask HDF5 for the size, because it stores a row of variable length as 16 bytes, and NumPy's itemsize is 8.
        item_bytes = dataset.id.get_type().get_size()
        cache = plan_cache(dataset.shape, dataset.chunks, item_bytes, filtered=is_filtered(dataset))
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_chunk_cache(cache.nslots, cache.nbytes, cache.w0)
    file_id, path = dataset.file.id, dataset.name.encode()
    # While a dataset is open, it keeps the cache of its first handle, so close that handle first.
    dataset.id.close()
    return h5py.Dataset(h5py.h5d.open(file_id, path, access))


def is_filtered(dataset: h5py.Dataset) -> bool:
    """Return whether the dataset's chunks are filtered (for example, compressed)."""
    return bool(dataset.id.get_create_plist().get_nfilters() > 0)


@dataclass(frozen=True)
class Filter:
    """A filter of a dataset: its registered number, parameters, and name."""

    number: int
    parameters: tuple[int, ...]
    name: str


def filters_of(dataset: h5py.Dataset) -> tuple[Filter, ...]:
    """Return a dataset's filters in encoding order."""
    create = dataset.id.get_create_plist()
    found = [create.get_filter(position) for position in range(create.get_nfilters())]
    return tuple(Filter(number, tuple(values), text(name)) for number, _, values, name in found)


def load_filter(number: int) -> bool:
    """Try to make a filter available to HDF5 in this process; return whether it is available."""
    if not h5py.h5z.filter_avail(number):
        optional_module("hdf5plugin")  # Importing it registers its filters with HDF5.
    return bool(h5py.h5z.filter_avail(number))


def require_filters(dataset: h5py.Dataset) -> None:
    """Make a dataset's filters available to HDF5 in this process; raise PackFormatError if a decoder is missing."""
    if dataset.is_virtual:
        # The sources may need filters of hdf5plugin. Opening the sources to find out would take longer.
        optional_module("hdf5plugin")
    for item in filters_of(dataset):
        if not load_filter(item.number):
            problem = f"has filter {item.number} ({item.name or 'unnamed'}), whose decoder is missing"
            advice = "install a plugin of HDF5 that has it, such as hdf5plugin (pip install hdf5plugin)"
            raise dataset_error(dataset.file.filename, dataset.name.lstrip("/"), f"{problem}; {advice}")


@dataclass(frozen=True)
class ChunkTable:
    """The locations of a dataset's chunks in its file.

    The arrays have the shape (chunks along axis 0,), or (chunks along axis 0, chunks per row) if chunks hold only parts
    of rows.
    """

    addresses: npt.NDArray[np.int64]  # byte offsets from the start of the file; -1 for a chunk without storage
    sizes: npt.NDArray[np.int64]  # stored (compressed) bytes
    filter_masks: npt.NDArray[np.uint32]  # bit i is set if filter i was not applied to the chunk


def chunk_grid(dataset: h5py.Dataset) -> tuple[int, ...]:
    """Return the number of chunks along each axis of a chunked dataset."""
    return tuple(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))


def chunk_table(dataset: h5py.Dataset) -> ChunkTable:
    """Return the locations of all chunks of a dataset; chunks that hold parts of the same rows are in C order.

    One pass of ``chunk_iter`` takes 2 to 4 microseconds per chunk, whereas a single lookup takes time linear in the
    chunk count. Raises ValueError if the index is damaged: a chunk is off the grid, is listed twice, or is unfiltered
    and has a wrong size.
    """
    grid, chunks = chunk_grid(dataset), dataset.chunks
    per_row = math.prod(grid[1:])
    shape = grid[:1] if per_row == 1 else (grid[0], per_row)
    size = None if is_filtered(dataset) else math.prod(chunks) * dataset.dtype.itemsize
    table = ChunkTable(np.full(shape, -1, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.uint32))
    addresses, sizes, masks = table.addresses.reshape(-1), table.sizes.reshape(-1), table.filter_masks.reshape(-1)

    def record(chunk: Any) -> None:
        number = 0
        for offset, length, along_axis in zip(chunk.chunk_offset, chunks, grid, strict=True):
            position, rest = divmod(offset, length)
            if rest or not 0 <= position < along_axis:
                raise ValueError(f"a chunk at {chunk.chunk_offset} is off the chunk grid")
            number = number * along_axis + position
        if size is not None and chunk.size != size:
            raise ValueError(f"chunk {number} has {chunk.size} bytes instead of {size}")
        if addresses[number] >= 0:
            raise ValueError(f"chunk {number} is listed twice")
        addresses[number], sizes[number], masks[number] = chunk.byte_offset, chunk.size, chunk.filter_mask

    dataset.id.chunk_iter(record)
    return table


def text(value: Any) -> str:
    """Decode a string attribute or element, which h5py returns as bytes or as str."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def stored_names(dataset: h5py.Dataset) -> Iterator[str]:
    """Yield the strings of a dataset, read in blocks, because as bytes objects they take three times the memory."""
    require_filters(dataset)
    count = max(1, min(BLOCK_NAMES, _BLOCK_BYTES // dataset.dtype.itemsize))
    for low in range(0, len(dataset), count):
        names = dataset[low : low + count].tolist()
        require_open_sources(dataset)
        yield from map(text, names)


def attribute(item: h5py.HLObject, name: str, default: Any = None) -> Any:
    """Return an attribute, or `default` if it does not exist; raise an error if it is damaged, unlike ``attrs.get``."""
    return item.attrs[name] if name in item.attrs else default  # noqa: SIM401


def attribute_names(dataset: h5py.Dataset, name: str) -> tuple[str, ...] | None:
    """Return the strings in an attribute, or None if the attribute does not exist."""
    value = attribute(dataset, name)
    if isinstance(value, np.ndarray) and value.dtype.kind == "S":
        return _shared_names(value.dtype.itemsize, value.tobytes())
    return None if value is None else tuple(text(item) for item in np.atleast_1d(value))


def same_names(stored: Sequence[str] | None, names: Sequence[str] | None) -> bool:
    """Return whether names are equal as they are stored; None stands for no names."""
    return [encode_text(name) for name in stored or ()] == [encode_text(name) for name in names or ()]


@lru_cache(maxsize=4)
def _shared_names(width: int, stored: bytes) -> tuple[str, ...]:
    """Return the strings in `stored`, `width` bytes each. Files with the same class names share one tuple."""
    return tuple(map(text, np.frombuffer(stored, f"S{width}").tolist()))


def stored_options(file: h5py.File) -> dict[str, Any]:
    """Return the options of a pack's conversion; empty if they are unknown."""
    try:
        options = json.loads(text(file.attrs.get(schema.OPTIONS, b"")))
    except (ValueError, RecursionError):
        return {}
    return options if isinstance(options, dict) else {}


def require_utf8_splits(file: h5py.File) -> None:
    """Raise ValueError if the name of one of a pack's splits is not UTF-8."""
    for name in file[schema.SPLIT_NAMES][()].tolist():
        if isinstance(name, bytes) and name.decode(errors="replace").encode() != name:
            raise ValueError(f"{name!r} is not UTF-8")


def encode_text(value: str) -> bytes:
    """Encode a string as UTF-8. Bytes of file names that are not UTF-8 become escapes such as ``\\udcXX``."""
    return value.encode("utf-8", "backslashreplace")


def utf8(values: Any) -> npt.NDArray[np.bytes_]:
    """Encode strings for a UTF-8 dataset or attribute whose strings have a fixed length."""
    encoded = [encode_text(value) for value in values]
    return np.array(encoded, dtype=h5py.string_dtype("utf-8", max([1, *map(len, encoded)])))
