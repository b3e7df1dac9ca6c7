"""`Storage` fills memory with exactly the file's bytes, or names the rows that it cannot read."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.errors import PackChangedError, ReadError
from h5pack.read import storage as storage_module
from h5pack.read.engine import Engine
from h5pack.read.storage import MAX_BUFFERS, FileIdentity, Storage
from tests.read.files import descriptors, engine_of, in_child, numbers, replaced, run_threads, write

SIZE = 50_000
DATA = np.random.default_rng(7).integers(0, 256, SIZE, np.uint8)
RUNS = [(100, 7), (20_000, 1), (40_000, 5)]
"""Extents: an offset and a number of rows."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("storage") / "bytes"
    path.write_bytes(DATA.tobytes())
    return path


@pytest.fixture
def path(shared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(shared, tmp_path))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "_RETRY_SECONDS", (0.0, 0.0, 0.0))


def opened(path: Path) -> Storage:
    return Storage(str(path), FileIdentity.of(str(path)))


def named(place: int) -> str:
    return f"'x' row {place}"


def require_read(storage: Storage, size: int, runs: list[tuple[int, int]] = RUNS, spread: int = 0) -> int:
    """Read extents to buffers in reverse order, `spread` bytes apart; return the number of system calls."""
    count = sum(places for _, places in runs)
    memory = np.full((count, size + spread), 201, np.uint8)
    buffers = np.empty((count, 2), np.uint64)
    start = memory.__array_interface__["data"][0]
    buffers[:, 0] = start + np.arange(count)[::-1] * (size + spread)
    buffers[:, 1] = size
    edges = [0, *itertools.accumulate(places for _, places in runs)]
    calls = storage.scatter(buffers, edges, [offset for offset, _ in runs], named)
    assert (memory[:, size:] == 201).all(), "nothing between the places is touched"
    parts = [DATA[offset : offset + size * places].reshape(places, size) for offset, places in runs]
    assert np.array_equal(memory[::-1, :size], np.concatenate(parts))
    return calls


@settings(max_examples=26)
@given(st.integers(1, 700), st.integers(0, 9), st.data())
def test_scattered_extents_equal_slices(shared: Path, size: int, spread: int, data: st.DataObject) -> None:
    runs = []
    for _ in range(data.draw(st.integers(1, 6))):
        places = data.draw(st.integers(1, 20))
        runs.append((data.draw(st.integers(0, SIZE - size * places)), places))
    assert require_read(opened(shared), size, runs, spread) == len(runs)


@pytest.mark.parametrize(
    ("size", "runs", "max_bytes", "counts"),
    [
        (11, [(3, MAX_BUFFERS)], None, [MAX_BUFFERS]),
        (11, [(3, 3 * MAX_BUFFERS + 5)], None, [*[MAX_BUFFERS] * 3, 5]),
        (300, [(0, 10), (9000, 2)], 1000, [3, 3, 3, 1, 2]),
        (1500, [(7, 3)], 1000, [1, 1, 1]),
    ],
)
def test_no_call_exceeds_the_limits_of_buffers_and_bytes(
    path: Path, monkeypatch: pytest.MonkeyPatch, size: int, runs: Any, max_bytes: int | None, counts: list[int]
) -> None:
    monkeypatch.setattr(storage_module, "_MAX_CALL_BYTES", max_bytes or storage_module._MAX_CALL_BYTES)
    preadv = Mock(wraps=storage_module.preadv)
    monkeypatch.setattr(storage_module, "preadv", preadv)
    assert require_read(opened(path), size, runs) == len(counts)
    assert [call.args[2] for call in preadv.call_args_list] == counts


def limited(limits: Iterator[int | OSError | None]) -> Callable[[int, int, int, int], int]:
    """Return a `preadv` whose calls read at most these numbers of bytes, everything (None), or raise the error."""
    real = storage_module.preadv

    def preadv(descriptor: int, buffers: int, count: int, offset: int) -> int:
        limit = next(limits)
        if isinstance(limit, OSError):
            raise limit
        if limit is None:
            return real(descriptor, buffers, count, offset)
        pairs = np.zeros((count, 2), np.uint64)
        ctypes.memmove(pairs.__array_interface__["data"][0], buffers, pairs.nbytes)
        ends = np.cumsum(pairs[:, 1])
        keep = int(np.searchsorted(ends, limit)) + 1
        pairs = pairs[:keep].copy()
        if keep <= count:
            pairs[-1, 1] -= np.uint64(int(ends[keep - 1]) - limit)
        return real(descriptor, pairs.__array_interface__["data"][0], len(pairs), offset)

    return preadv


def test_a_row_that_is_too_large_for_one_call_is_read_in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = storage_module.preadv

    def preadv(descriptor: int, buffers: int, count: int, offset: int) -> int:
        sizes = np.ctypeslib.as_array(ctypes.cast(buffers, ctypes.POINTER(ctypes.c_uint64)), (count, 2))[:, 1]
        if sizes.sum() > 300:  # As on macOS with 2 GiB.
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, buffers, count, offset)

    monkeypatch.setattr(storage_module, "_MAX_CALL_BYTES", 300)
    monkeypatch.setattr(storage_module, "preadv", preadv)
    monkeypatch.setattr(os, "preadv", Mock(side_effect=OSError(errno.EINVAL, os.strerror(errno.EINVAL))))
    require_read(opened(path), 700)
    out = np.zeros(1000, np.uint8)
    opened(path).read_into(out, 77, named)
    assert np.array_equal(out, DATA[77:1077])


@pytest.mark.parametrize("dtype", [">i4", "?", "S7", "M8[s]", "u1,<f4"])
@pytest.mark.parametrize("shape", [(), (4, 3)])
def test_a_single_row_of_any_dtype(path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    out = np.zeros(shape, dtype)
    # Older versions of NumPy cannot export the buffer of a datetime array, so a second call reads it by address.
    assert opened(path).read_into(out, 77, named) <= (2 if dtype == "M8[s]" else 1)
    assert out.tobytes() == DATA[77 : 77 + out.nbytes].tobytes()


def broken() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(("offset", "error"), [(1000, broken()), (1000, None), (SIZE - 50, None)])
def test_a_single_row_is_retried(
    path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, error: OSError | None
) -> None:
    """After an error, and after a short read, unless the file ends."""
    real = os.preadv
    short = Mock(side_effect=error or (lambda file, views, place: real(file, [memoryview(views[0])[:40]], place)))
    monkeypatch.setattr(os, "preadv", short)
    out = np.zeros(100, np.uint8)
    if offset == 1000:
        assert opened(path).read_into(out, offset, named) == 2
        assert np.array_equal(out, DATA[offset : offset + 100])
    else:
        with pytest.raises(ReadError, match="row 0 "):
            opened(path).read_into(out, offset, named)


@settings(max_examples=26)
@given(st.lists(st.one_of(st.none(), st.integers(1, 900)), min_size=1, max_size=12), st.integers(1, 400))
def test_short_reads_are_continued(shared: Path, limits: list[int | None], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_module, "preadv", limited(itertools.cycle(limits)))
        require_read(opened(shared), size)


@pytest.mark.parametrize(
    "limits",
    [
        [0, 0, 0],
        [100, 0, 50, 0],
        [650, broken(), 0, broken()],
        [OSError(errno.EINTR, "interrupted"), None, OSError(errno.EAGAIN, "again")],
        [299, 1, 0, 0, None],
    ],
)
def test_temporary_errors_are_retried(path: Path, monkeypatch: pytest.MonkeyPatch, limits: list[Any]) -> None:
    monkeypatch.setattr(storage_module, "preadv", limited(itertools.chain(limits, itertools.repeat(None))))
    require_read(opened(path), 300)


@pytest.mark.parametrize(
    ("limits", "place", "reason"),
    [
        ([None, broken()], 7, "Input/output error"),
        ([601, broken()], 2, "Input/output error"),
        ([None, None, 1250, 0], 12, "the file ends too early"),
        ([0], 0, "the file ends too early"),
    ],
)
def test_lasting_errors_name_the_row(
    path: Path, monkeypatch: pytest.MonkeyPatch, limits: list[Any], place: int, reason: str
) -> None:
    preadv = Mock(side_effect=limited(itertools.chain(limits, itertools.repeat(limits[-1]))))
    monkeypatch.setattr(storage_module, "preadv", preadv)
    with pytest.raises(ReadError, match=f"row {place} .*{reason}") as caught:
        require_read(opened(path), 300)
    assert caught.value.path == str(path)
    assert isinstance(caught.value, OSError)
    # One call for many buffers, then a first try for one buffer and three retries.
    assert preadv.call_count == len(limits) + 4


def pack_of_rows(folder: Path) -> tuple[Path, npt.NDArray[Any], Engine]:
    path = folder / "f.h5"
    values = write(path, numbers((20, 10, 60), "u1"), "rows")
    return path, values, engine_of(path)


def test_an_engine_names_the_rows_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, values, engine = pack_of_rows(tmp_path)
    bad = int(engine.indexes["x"].addresses[2]) + 600
    real = storage_module.preadv

    def preadv(descriptor: int, buffers: int, count: int, offset: int) -> int:
        if offset <= bad < offset + 600 * count:
            if offset == bad:
                raise broken()
            count = (bad - offset) // 600
        return real(descriptor, buffers, count, offset)

    monkeypatch.setattr(storage_module, "preadv", preadv)
    assert np.array_equal(engine.read("x", [6, 8, 5]), values[[6, 8, 5]])
    with pytest.raises(ReadError, match=r"rows 7-8 .*Input"):
        engine.read("x", range(20)[:9])
    with pytest.raises(ReadError, match="row 7 "):
        engine.read("x", [9, 7, 2])
    monkeypatch.setattr("h5pack.read.engine.SCATTER_BYTES", 1 << 30)
    monkeypatch.setattr(storage_module, "preadv", limited(itertools.repeat(0)))
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(ReadError, match=r"rows 3-5 .*ends"):
        engine.read("x", [5, 4, 3])


@pytest.mark.parametrize(("size", "scatter_bytes"), [(0, 1), (5000, 1), (600, 1 << 30)])
def test_a_file_that_is_cut_while_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, scatter_bytes: int
) -> None:
    monkeypatch.setattr("h5pack.read.engine.SCATTER_BYTES", scatter_bytes)
    monkeypatch.setattr(storage_module, "CHECK_SECONDS", 1000.0)
    path, values, engine = pack_of_rows(tmp_path)
    assert np.array_equal(engine.read("x", [19]), values[[19]])
    os.truncate(path, size)
    with pytest.raises(PackChangedError):
        engine.read("x", range(20))


def put_other_file(path: Path) -> None:
    write(path.with_name("new.h5"), numbers((20, 10, 60), "u1", 9), "rows")
    path.with_name("new.h5").rename(path)


@pytest.mark.parametrize("rows", [[3], range(20), [19, 2, 3]])
@pytest.mark.parametrize("size", [1, None])
def test_a_file_that_is_written_while_it_is_open_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Sequence[int], size: int | None
) -> None:
    monkeypatch.setattr(storage_module, "CHECK_SECONDS", 1000.0)
    path, values, engine = pack_of_rows(tmp_path)
    assert np.array_equal(engine.read("x", rows), values[list(rows)])
    time.sleep(0.02)  # The kernel's clock for modification times advances every few milliseconds.
    # Cut it and make it as long as before, or write its first byte again.
    whole, first = path.stat().st_size, path.read_bytes()[:1]
    if size is not None:
        os.truncate(path, size)
        os.truncate(path, whole)
    else:
        with path.open("r+b") as file:
            file.write(first)
    for read in (lambda: engine.read("x", rows), lambda: engine.read_one("x", rows[0])):
        with pytest.raises(PackChangedError):
            read()


@pytest.mark.parametrize("change", [put_other_file, Path.unlink])
def test_a_file_that_is_replaced_while_it_is_open_is_noticed_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    path, values, engine = pack_of_rows(tmp_path)
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    engine.read("x", [0])
    change(path)
    now += 0.9
    # Until the next check, rows come from the file that is open.
    assert np.array_equal(engine.read("x", range(20)), values)
    now += 0.2
    for _ in range(2):
        with pytest.raises(PackChangedError):
            engine.read("x", [3])


def test_a_disk_that_fails_is_no_change_of_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = FileIdentity.of(path)
    for number, kind in ((errno.EIO, ReadError), (errno.EACCES, ReadError), (errno.ESTALE, PackChangedError)):
        monkeypatch.setattr(os, "stat", Mock(side_effect=OSError(number, os.strerror(number))))
        with pytest.raises(kind) as caught:
            identity.require(str(path))
        assert caught.value.path == str(path)


@pytest.mark.parametrize("change", [replaced, Path.unlink, None], ids=["replaced", "deleted", "replaced as it opens"])
def test_a_file_that_changes_before_it_is_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None] | None
) -> None:
    storage, real = opened(path), os.open
    if change is None:
        monkeypatch.setattr(os, "open", lambda name, flags: (replaced(path), real(name, flags))[1])
    else:
        change(path)
    with pytest.raises(PackChangedError):
        storage.open()
    assert descriptors(path) == 0


def test_a_file_that_cannot_be_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError(errno.EACCES, "denied")))
    with pytest.raises(ReadError, match="denied"):
        opened(path).open()
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(errno.EMFILE, "many")))
    with pytest.raises(ReadError, match="'ulimit -n'"):
        opened(path).open()


def test_closing_and_opening_again(path: Path) -> None:
    storage = opened(path)
    storage.close()
    assert descriptors(path) == 0, "nothing is opened before the first use"
    for _ in range(2):
        require_read(storage, 10)
        assert descriptors(path) == 1
        assert storage.open() == storage.open()
        storage.close()
        storage.close()
        assert descriptors(path) == 0
    storage.open()
    del storage
    assert descriptors(path) == 0


def test_pickled_and_forked_while_open(path: Path) -> None:
    storage = opened(path)
    first = int(storage.open())

    def child() -> bool:
        fine = storage.open() == first
        require_read(storage, 9)
        storage.close()
        fine = fine and descriptors(path) == 0
        require_read(storage, 9)
        return fine

    again: Storage = pickle.loads(pickle.dumps(storage))
    require_read(again, 9)
    assert again.open() != first
    again.close()
    assert in_child(child)
    assert storage.open() == first
    require_read(storage, 9)


def test_is_cached_and_will_need(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = opened(path)
    require_read(storage, 10)
    assert storage.is_cached(RUNS[0][0])
    storage.will_need(0, SIZE)
    for failure, cached in ((BlockingIOError(), False), (OSError(errno.EOPNOTSUPP, "not supported"), True)):
        monkeypatch.setattr(os, "preadv", Mock(side_effect=failure))
        assert storage.is_cached(4096) is cached
    advise = Mock()
    monkeypatch.setattr(os, "posix_fadvise", advise)
    storage.will_need(123, 456)
    advise.assert_called_once_with(storage.open(), 123, 456, os.POSIX_FADV_WILLNEED)
    # Systems that refuse or lack these calls.
    advise.side_effect = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    storage.will_need(1, 2)
    monkeypatch.delattr(os, "RWF_NOWAIT")
    monkeypatch.delattr(os, "posix_fadvise")
    assert storage.is_cached(4096)
    storage.will_need(1, 2)


def test_closing_while_others_read_never_gives_them_another_file(path: Path, tmp_path: Path) -> None:
    storage, other = opened(path), tmp_path / "other.bin"
    other.write_bytes(b"\xee" * SIZE)
    over, started = threading.Event(), threading.Barrier(4, timeout=60)

    def work(number: int) -> None:
        started.wait()
        if number < 3:
            while not over.is_set():
                require_read(storage, 9)
            return
        try:
            for _ in range(300):
                storage.close()
                # This file gets the number of a descriptor that was just closed.
                with other.open("rb") as file:
                    file.read(1)
        finally:
            over.set()

    run_threads(4, work)
    assert descriptors(path) <= 1, "threads that open it at once share a descriptor"


@pytest.mark.parametrize(("kind", "same"), [("fuse.sshfs", True), ("ext4", False), (None, False)])
def test_inodes_that_a_file_system_changes_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None, same: bool
) -> None:
    monkeypatch.setattr(storage_module, "_is_fuse", {})
    monkeypatch.setattr(storage_module, "file_system_type", lambda _: kind)
    path, other = tmp_path / "a", tmp_path / "b"
    for one in (path, other):
        one.write_bytes(b"bytes")
        os.utime(one, (1, 1))
    identity = FileIdentity.of(str(path))
    other.replace(path)
    with contextlib.nullcontext() if same else pytest.raises(PackChangedError):
        identity.require(str(path))
    os.utime(path, (1, 2))
    with pytest.raises(PackChangedError):
        identity.require(str(path))
