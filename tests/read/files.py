"""HDF5 files of every kind of storage, for the tests of h5pack.read."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from h5pack.read import engine as engine_module
from h5pack.read import read_plan as plan_module
from h5pack.read.chunk_index import ChunkIndex, index_dataset
from h5pack.read.description import describe_file
from h5pack.read.engine import Engine
from h5pack.read.read_plan import plan_scatter
from h5pack.read.storage import FileIdentity
from h5pack.read.virtual import index_rows

WHOLE_ROWS = ["contiguous", "rows", "extendable", "unlimited", "holes", "no_holes_filled", "never", "early"]
STORAGES = [*WHOLE_ROWS, "split", "gzip", "whole_gzip", "compact", "virtual"]
DIRECT = frozenset(STORAGES) - {"compact"}
COUNTS_USER_BLOCK = h5py.version.hdf5_version_tuple >= (1, 14, 4)
"""Whether chunk offsets of this HDF5 count from the start of the file, so that h5pack reads chunks directly."""
DTYPES = ["u1", "<i2", ">i4", "f4", ">f8", "?", "i8", "u2", "f2"]


def numbers(shape: Sequence[int], dtype: str, seed: int = 0) -> npt.NDArray[Any]:
    """Values that every dtype holds exactly."""
    return np.random.default_rng(seed).integers(0, 2 if dtype == "?" else 100, shape).astype(dtype)


def write(
    path: Path,
    values: npt.NDArray[Any],
    storage: str,
    *,
    name: str = "x",
    chunk_rows: int = 3,
    fill: int = 0,
    **settings: Any,
) -> npt.NDArray[Any]:
    """Write a file of one dataset, and return the values that a reader must find in it."""
    path.unlink(missing_ok=True)
    shape, cut = values.shape, values.shape[1:]
    fillvalue = values.dtype.type(fill)
    if storage not in ("extendable", "unlimited"):
        chunk_rows = min(chunk_rows, shape[0])
    with h5py.File(path, "w", **settings) as file:
        if storage in ("compact", "early"):
            create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            if storage == "compact":
                create.set_layout(h5py.h5d.COMPACT)
            else:
                create.set_chunk((chunk_rows, *cut))
                create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            low_level(file, name, values, create)
        elif storage == "virtual":
            file["parts/source"] = values
            create_virtual(
                file, shape, Mapped(slice(None), ".", shape, name="parts/source"), dtype=values.dtype, name=name
            )
        elif storage in ("holes", "no_holes_filled", "never"):
            chunks = None if storage == "never" else (chunk_rows, *cut)
            create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            if storage == "no_holes_filled":
                create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            dataset = file.create_dataset(name, shape, values.dtype, chunks=chunks, fillvalue=fillvalue, dcpl=create)
            values = values.copy()
            for chunk, start in enumerate(range(0, shape[0], chunk_rows)):
                rows = slice(start, min(shape[0], start + chunk_rows))
                if storage != "never" and chunk % 3 != 1:
                    dataset[rows] = values[rows]
                else:
                    values[rows] = fillvalue
        else:
            how: dict[str, Any] = {} if storage == "contiguous" else {"chunks": (chunk_rows, *cut)}
            if storage in ("split", "gzip"):
                how["chunks"] = tuple(max(1, size // 2) for size in shape)
            if storage in ("gzip", "whole_gzip"):
                how |= {"compression": "gzip", "shuffle": True, "fletcher32": True}
            if storage in ("extendable", "unlimited"):
                how["maxshape"] = (None, *cut) if storage == "extendable" else (None,) * len(shape)
            file.create_dataset(name, data=values, **how)
    return values.astype(values.dtype.newbyteorder("="))


@dataclass(frozen=True)
class Mapped:
    """A mapping: the rows `here` of a virtual dataset are the rows `there` (None: all) of a source of this shape."""

    here: Any
    file: str
    shape: tuple[int, ...]
    there: Any = None
    name: str = "x"


def create_virtual(
    file: h5py.File, shape: tuple[int, ...], *mappings: Mapped, dtype: Any = "u1", name: str = "x", fill: Any = None
) -> None:
    """Create a virtual dataset."""
    layout = h5py.VirtualLayout(shape, dtype)
    for mapped in mappings:
        source = h5py.VirtualSource(mapped.file, mapped.name, mapped.shape, dtype)
        layout[mapped.here] = source if mapped.there is None else source[mapped.there]
    file.create_virtual_dataset(name, layout, fillvalue=fill)


def write_virtual(path: Path, shape: tuple[int, ...], *mappings: Mapped, **settings: Any) -> Path:
    """Add a virtual dataset to a file."""
    with h5py.File(path, "a", libver="latest") as file:
        create_virtual(file, shape, *mappings, **settings)
    return path


def flip(path: Path, place: int, bits: int = 255) -> None:
    """Damage a byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= bits
    path.write_bytes(data)


def flip_in_chunk(path: Path, chunk: int, name: str = "x") -> None:
    """Damage the middle of a chunk."""
    with h5py.File(path) as file:
        found = file[name].id.get_chunk_info(chunk)
    flip(path, found.byte_offset + found.size // 2)


def require_rows(engine: Engine, values: npt.NDArray[Any], name: str = "x") -> None:
    """All rows, read in a drawn order, have these values."""
    order = np.random.default_rng(0).permutation(len(values))
    assert np.array_equal(engine.read(name, order), values[order])


def read_in_threads(engine: Engine, values: npt.NDArray[Any], name: str) -> None:
    """Threads that share the engine read all rows several times, each in an order of its own."""

    def work(seed: int) -> None:
        for order in np.random.default_rng(seed).permuted([range(len(values))] * 10, axis=1):
            assert np.array_equal(engine.read(name, order), values[order])

    run_threads(4, work)
    assert engine.snapshot().rows == 4 * 10 * len(values)


@contextmanager
def drawn_limits(draw: Callable[[st.SearchStrategy[int]], int]) -> Iterator[Path]:
    """A new folder, and drawn sizes of rows to scatter, of gaps to read, and of batches to copy."""
    scatter_bytes = draw(st.sampled_from([1, engine_module.SCATTER_BYTES, 1 << 30]))
    gap_bytes = draw(st.sampled_from([0, 100, plan_module.MAX_GAP_BYTES]))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "SCATTER_BYTES", scatter_bytes)
        patch.setattr(plan_module, "MAX_GAP_BYTES", gap_bytes)
        patch.setattr(engine_module, "_MIN_CACHED_ROWS", draw(st.sampled_from([1, engine_module._MIN_CACHED_ROWS])))
        yield Path(folder)


def require_every_read(engine: Engine, rows: list[int], expected: npt.NDArray[Any]) -> None:
    """Rows have the expected values however they are read, and a new engine counts them rightly."""
    index, wanted, out = engine.indexes["x"], np.array(rows, np.int64), np.full_like(expected, 1)
    found = engine.read("x", rows)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)
    assert engine.read("x", wanted, out) is out
    assert np.array_equal(out, expected)
    # Rows were read twice sorted, and then in the given order.
    chunks = index.chunks_of(wanted).tolist()
    times, visits, absent = 2, 2 * len(set(chunks)), 0
    if not index.library_reason:
        absent = int((index.addresses[chunks] < 0).sum())
    if Engine.can_scatter(index):
        assert np.array_equal(to_addresses(engine, wanted), expected)
        times, visits = 3, visits + len(list(itertools.groupby(chunks)))
    stats, count = engine.snapshot(), times * len(rows)
    assert (stats.rows, stats.bytes_wanted) == (count, count * index.row_bytes)
    assert (stats.chunk_misses, stats.chunk_hits) == (visits, count - visits)
    if index.codec is not None:
        # Chunks of size -1 are read through HDF5, which counts the bytes of their rows.
        sizes = {chunk: index.sizes[chunk] for chunk in set(chunks)}
        once = sum(
            int(size.sum() if (size >= 0).all() else index.rows_in_chunk_of(chunk * index.chunk_rows) * index.row_bytes)
            for chunk, size in sizes.items()
        )
        # A chunk of which all rows were requested is not cached; few rows of chunks with parts of rows are read alone.
        assert stats.bytes_read <= 2 * once + (0 if index.codec.steps else stats.bytes_wanted)
        assert not index.codec.steps or stats.bytes_read >= once
    elif Engine.can_scatter(index):
        assert stats.bytes_read == times * (len(rows) - absent) * index.row_bytes
    elif index.library_reason is not None:
        assert stats.bytes_read == stats.bytes_wanted
    assert index.codec is not None or (stats.reads > 0) == bool(rows) or absent == len(rows)
    batch = engine.read_batch("x", wanted)
    assert batch.dtype == expected.dtype
    assert np.array_equal(batch, expected)
    right = dict(zip(rows, expected, strict=True))
    for row, values in right.items():
        one = engine.read_one("x", row)
        assert one.dtype == expected.dtype
        assert np.array_equal(one, values)
    if index.library_reason is None and not index.raw:
        for _, several in itertools.groupby(sorted(right), key=lambda row: int(index.chunks_of(np.array([row]))[0])):
            same = list(several)
            decoded, places = engine.rows_in_chunk("x", np.array(same))
            assert np.array_equal(decoded[places], [right[row] for row in same])


@st.composite
def row_lists(draw: st.DrawFn, rows: int) -> list[int]:
    """Rows in any order, with repeats, in runs, all of them, or none."""
    some = st.lists(st.integers(0, rows - 1), max_size=50)
    start = draw(st.integers(0, rows - 1))
    run = st.just(list(range(start, draw(st.integers(start, rows)))))
    unique = some.map(lambda drawn: sorted(set(drawn)))
    backwards = run.map(lambda drawn: drawn[::-1])
    return draw(st.one_of(some, some.map(sorted), unique, run, backwards, st.permutations(range(rows))))


def to_addresses(engine: Engine, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Read rows by a plan, in two calls, to addresses in reverse order with gaps of 3 bytes, and return them."""
    index = engine.indexes["x"]
    memory = np.full((len(rows), index.row_bytes + 3), 77, np.uint8)
    start = memory.__array_interface__["data"][0]
    plan = plan_scatter(index, rows)
    plan.buffers[:, 0] = start + np.arange(len(rows))[::-1] * memory.shape[1]
    runs = len(plan.offsets)
    engine.execute(plan, 0, runs // 2)
    engine.execute(plan, runs // 2)
    assert (memory[:, index.row_bytes :] == 77).all()
    stored = np.ascontiguousarray(memory[::-1, : index.row_bytes]).view(index.dtype)
    return stored.reshape(len(rows), *index.row_shape).astype(index.native_dtype)


def low_level(file: h5py.File, name: str, values: npt.NDArray[Any], create: Any, stored: Any = None) -> None:
    """Create a dataset with properties, or a type, that h5py's high-level functions do not offer."""
    space = h5py.h5s.create_simple(values.shape)
    kind = h5py.h5t.py_create(values.dtype, logical=True) if stored is None else stored
    dataset = h5py.h5d.create(file.id, name.encode(), kind, space, create)
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(values))


def index_of(path: Path, name: str = "x") -> ChunkIndex:
    """The index of one dataset."""
    with h5py.File(path) as file:
        return index_dataset(file, file[name], name)


def engine_of(path: Path, *names: str) -> Engine:
    """An engine over some of a file's datasets."""
    with h5py.File(path) as file:
        indexes = {name: index_rows(file, file[name], name) for name in names or ("x",)}
    return Engine(str(path), FileIdentity.of(str(path)), indexes)


def described(path: Path, *args: Any, **asked: Any) -> Engine:
    """An engine over what `describe_file` finds."""
    found = describe_file(path, *args, **asked)
    return Engine(found.path, found.identity, found.indexes)


def replaced(path: Path) -> None:
    """Put a copy of a file into its place, which is another file."""
    os.replace(shutil.copy(path, path.with_name("new.h5")), path)


def descriptors(path: Path) -> int:
    """Return how many descriptors of this process are open on a file."""
    # The descriptor of the listing itself is closed by now.
    links = (f"/proc/self/fd/{entry}" for entry in os.listdir("/proc/self/fd"))
    return [os.readlink(link) for link in links if os.path.lexists(link)].count(str(path))


def limit_open_files(room: int) -> None:
    """Let this process open only `room` more files."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    limit = next(limit for limit in itertools.count(room) if len({*range(limit)} - used) == room)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def unload_zstd() -> None:
    """Make this process one in which hdf5plugin has not been imported, so that HDF5 lacks its filter Zstandard."""
    h5py.h5z.unregister_filter(32015)
    for name in [name for name in sys.modules if name.partition(".")[0] == "hdf5plugin"]:
        del sys.modules[name]


def in_child(check: Any) -> bool:
    """Whether a check holds in a forked child, and ends in time."""
    child = os.fork()
    if child == 0:
        code = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def run_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(number)` in threads; the first failure is raised here."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
