"""`index_dataset` finds the address of every row, or why it cannot be read directly, and refuses damaged indexes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from h5pack.errors import PackFormatError
from h5pack.format.plans import plan_chunks
from h5pack.read.chunk_index import ChunkIndex, index_dataset
from h5pack.read.engine import Engine
from tests.makers import hdf5_file
from tests.read.files import (
    COUNTS_USER_BLOCK,
    WHOLE_ROWS,
    engine_of,
    index_of,
    low_level,
    numbers,
    require_rows,
    write,
)

SHAPE = (10, 4, 3)
VALUES = numbers(SHAPE, "<i4", 3)


def gathered(path: Path, index: ChunkIndex) -> npt.NDArray[Any]:
    """Return all rows of a dataset, cut from the file's bytes by the index."""
    data = path.read_bytes()
    rows = []
    for row in range(index.rows):
        chunk, place = divmod(row, index.chunk_rows)
        address = int(index.addresses[chunk])
        start = address + place * index.row_bytes
        rows.append(index.fill if address < 0 else data[start : start + index.row_bytes])
    return np.frombuffer(b"".join(rows), index.dtype).reshape(index.shape).astype(index.native_dtype)


@pytest.mark.parametrize(
    ("libver", "userblock"),
    [("v108", 0), *[("earliest", 512), ("v110", 4096), ("latest", 512)] * COUNTS_USER_BLOCK],
)
@pytest.mark.parametrize("storage", WHOLE_ROWS)
def test_the_index_gives_the_offset_of_every_row(tmp_path: Path, storage: str, libver: str, userblock: int) -> None:
    path = tmp_path / "f.h5"
    expected = write(path, VALUES, storage, fill=-7, libver=libver, userblock_size=userblock)
    index = index_of(path)
    assert index.library_reason is None
    assert np.array_equal(gathered(path, index), expected)
    assert (index.shape, index.rows, index.row_shape, index.row_bytes) == (SHAPE, 10, (4, 3), 48)
    whole = storage in ("contiguous", "never")
    assert index.chunk_rows == (10 if whole else 3)
    assert len(index.addresses) == (1 if whole else 4)
    holes = {"holes": [1], "no_holes_filled": [1], "never": [0]}.get(storage, [])
    assert np.flatnonzero(index.addresses < 0).tolist() == holes
    assert index.fill == (np.full((4, 3), -7, "<i4").tobytes() if holes else b"")


def external(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=VALUES, external=[(str(path.with_name("raw")), 0, VALUES.nbytes)])


def linked(path: Path) -> None:
    hdf5_file(path.with_name("other.h5"), y=VALUES)
    hdf5_file(path, x=h5py.ExternalLink("other.h5", "y"))


def filtered(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(3, 4, 3), scaleoffset=0, compression="gzip")


def oddly_typed(path: Path) -> None:
    """Write integers of 17 bits, a type that NumPy does not have."""
    kind = h5py.h5t.STD_I32BE.copy()
    kind.set_precision(17)
    with h5py.File(path, "w") as file:
        low_level(file, "x", VALUES, h5py.h5p.create(h5py.h5p.DATASET_CREATE), kind)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (filtered, "scaleoffset"),
        (partial(write, values=VALUES, storage="virtual"), "virtual"),
        (partial(write, values=VALUES, storage="compact"), "compact"),
        (external, "other files"),
        (linked, "other.h5"),
        (oddly_typed, "NumPy"),
    ],
)
def test_rows_that_cannot_be_read_directly_have_a_reason_and_equal_values(
    tmp_path: Path, make: Callable[[Path], Any], word: str
) -> None:
    path = tmp_path / "f.h5"
    make(path)
    index = index_of(path)
    assert word in (index.library_reason or "")
    assert not len(index.addresses)
    assert not Engine.can_scatter(index)
    require_rows(engine_of(path), VALUES)


def test_rows_behind_links_inside_the_file_are_read_directly(tmp_path: Path) -> None:
    path = tmp_path / "f.h5"
    write(path, VALUES, "rows")
    with h5py.File(path, "r+") as file:
        file.update({"soft": h5py.SoftLink("/x"), "hard": file["x"], "around": h5py.ExternalLink("f.h5", "x")})
    for name in ("soft", "hard", "around"):
        index = index_of(path, name)
        assert (index.name, index.library_reason) == (name, None)
        assert np.array_equal(gathered(path, index), VALUES)


def test_other_drivers_and_systems_without_preadv_use_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.h5"
    write(path, VALUES, "rows")
    with h5py.File(path, driver="core") as file:
        assert index_dataset(file, file["x"], "x").library_text == "the file is opened by HDF5's driver core"
    monkeypatch.delattr("os.preadv")
    assert index_of(path).library_text == "this system has no preadv"


@pytest.mark.parametrize(
    ("target", "value"),
    [("h5py.version.hdf5_version_tuple", (1, 14, 2)), ("h5pack.read.chunk_index._LISTS_CHUNKS", False)],
    ids=["user block before HDF5 1.14.4", "no chunk_iter before HDF5 1.12.3"],
)
def test_chunks_that_this_hdf5_misplaces_or_cannot_list_use_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, value: Any
) -> None:
    write(tmp_path / "chunked.h5", VALUES, "rows", userblock_size=512)
    write(tmp_path / "whole.h5", VALUES, "contiguous", userblock_size=512)
    write(tmp_path / "plain.h5", VALUES, "rows")
    monkeypatch.setattr(target, value)
    assert index_of(tmp_path / "chunked.h5").library_reason is not None
    assert (index_of(tmp_path / "plain.h5").library_reason is None) == ("version" in target)
    assert index_of(tmp_path / "whole.h5").library_reason is None
    require_rows(engine_of(tmp_path / "chunked.h5"), VALUES)


@pytest.mark.parametrize(("shape", "chunks"), [((0, 4, 3), True), ((0,), False), ((5, 0, 3), True), ((5, 0), False)])
def test_datasets_without_bytes_have_no_addresses(tmp_path: Path, shape: tuple[int, ...], chunks: bool) -> None:
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        how: dict[str, Any] = {"maxshape": (None,) * len(shape), "chunks": (2,) * len(shape)} if chunks else {}
        file.create_dataset("x", shape, "<i4", **how)
    assert index_of(path).row_bytes == 4 * int(np.prod(shape[1:]))
    rows = [2, 0, 2] if shape[0] else []
    found = engine_of(path).read("x", rows)
    assert (found.shape, found.dtype) == ((len(rows), *shape[1:]), np.dtype("i4"))


@pytest.mark.parametrize(
    ("shape", "chunks", "expected"),
    [
        ((1000, 7), (13, 7), 13),
        ((1000, 8, 7), (13, 4, 7), 13),
        # Contiguous rows are grouped as a pack would divide them into chunks: 4 MiB if there are many.
        ((100_000, 128, 128, 3), None, 4 * 1024 * 1024 // 49_152),
        ((2_000, 128, 128, 3), None, plan_chunks(2_000, 49_152).rows),
        ((10_000_000, 3), None, 4_096),
        ((0, 128, 128, 3), None, 2),
        ((100, 0), None, 4_096),
    ],
)
def test_group_rows_are_those_of_a_chunk_or_4_mib(
    tmp_path: Path, shape: tuple[int, ...], chunks: tuple[int, ...] | None, expected: int
) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("x", shape, "u1", chunks=chunks)
    assert index_of(tmp_path / "f.h5").group_rows == expected


def test_contiguous_rows_of_four_gigabytes(tmp_path: Path) -> None:
    """A chunk may not be as large, but these rows are not chunked."""
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((2, 1 << 32))
        h5py.h5d.create(file.id, b"x", h5py.h5t.STD_U8LE, space, create)
    index = index_of(path)
    assert (index.group_rows, index.row_bytes, index.library_reason) == (1, 1 << 32, None)


# Files of the oldest format have no checksums in their metadata, so that a patched address reaches the index.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "f.h5", VALUES, "rows", libver="earliest")
    return tmp_path / "f.h5"


def patch(path: Path, old: int | bytes, new: int | bytes) -> None:
    """Replace an address, or other bytes, that occur once."""
    before, after = (value.to_bytes(8, "little") if isinstance(value, int) else value for value in (old, new))
    data = path.read_bytes()
    assert data.count(before) == 1
    path.write_bytes(data.replace(before, after))


def chunk_key(row_offset: int, size: int = 144) -> bytes:
    """A chunk's key in a version 1 B-tree: size, filters, and offsets along each axis and inside the element."""
    offsets = (value.to_bytes(8, "little") for value in (row_offset, 0, 0, 0))
    return b"".join([size.to_bytes(4, "little"), bytes(4), *offsets])


@pytest.mark.parametrize(
    ("place", "word"),
    [
        (lambda size, first: size - 143, "rows 6-8"),
        (lambda size, first: (1 << 64) - 2, None),
        *((lambda size, first, step=step: first + step, "chunks 0 and 2") for step in (0, 143, -143)),
    ],
    ids=["past the end", "far away", "on another", "over its end", "over its start"],
)
def test_chunks_beyond_the_end_of_the_file_or_over_others_are_refused(
    path: Path, place: Callable[[int, int], int], word: str | None
) -> None:
    first, _, third, _ = index_of(path).addresses.tolist()
    patch(path, third, place(path.stat().st_size, first))
    with pytest.raises(PackFormatError, match=word) as caught:
        index_of(path)
    assert (caught.value.path, caught.value.dataset) == (str(path), "x")


def test_the_last_chunk_may_be_cut_or_overlap_behind_its_last_row(path: Path) -> None:
    first, *_, last = index_of(path).addresses.tolist()
    patch(path, last, first - 48)
    assert index_of(path).addresses[3] == first - 48
    size, row = path.stat().st_size, VALUES[9].tobytes()
    patch(path, first - 48, size)
    with open(path, "ab") as file:
        file.write(row)
    assert np.array_equal(gathered(path, index_of(path)), VALUES)
    with open(path, "r+b") as file:
        file.truncate(size + len(row) - 1)
    with pytest.raises(PackFormatError, match="rows 9-9"):
        index_of(path)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [(6, chunk_key(4)), (6, chunk_key(12)), (6, chunk_key(9)), (3, chunk_key(3, 143))],
    ids=["off the grid", "past the end", "twice", "another size"],
)
def test_damaged_chunk_keys_are_refused(path: Path, key: int, wrong: bytes) -> None:
    patch(path, chunk_key(key), wrong)
    with pytest.raises(PackFormatError) as caught:
        index_of(path)
    assert (caught.value.path, caught.value.dataset) == (str(path), "x")


@pytest.mark.parametrize("failure", [RuntimeError, KeyError, MemoryError])
def test_any_failure_to_list_chunks_is_a_pack_format_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    monkeypatch.setattr("h5pack.read.chunk_index.chunk_table", Mock(side_effect=failure("bad B-tree")))
    with pytest.raises(PackFormatError) as caught:
        index_of(path)
    assert caught.value.dataset == "x"
