"""`Storage` fills memory with exactly the file's bytes, or says which rows it could not read."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.errors import PackChangedError, ReadError
from h5pack.read import storage as storage_module
from h5pack.read.engine import Engine
from h5pack.read.storage import MAX_BUFFERS, FileIdentity, Preadv, Storage, python_preadv
from tests.read.files import descriptors, engine_of, in_child, numbers, run_threads, write

IMPLEMENTATIONS = [storage_module.preadv, python_preadv]
SIZE = 50_000
DATA = np.random.default_rng(7).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "bytes").write_bytes(DATA.tobytes())
    return tmp_path / "bytes"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "_RETRY_SECONDS", (0.0, 0.0, 0.0))


def opened(path: Path) -> Storage:
    return Storage(str(path), FileIdentity.of(str(path)))


def named(place: int) -> str:
    return f"'x' row {place}"


def scattered(
    storage: Storage, size: int, runs: list[tuple[int, int]], spread: int = 0
) -> tuple[npt.NDArray[np.uint8], int]:
    """Read runs (offset, places) to places in reverse order, `spread` bytes apart; and the calls of the kernel."""
    count = sum(places for _, places in runs)
    memory = np.full((count, size + spread), 201, np.uint8)
    buffers = np.empty((count, 2), np.uint64)
    start = memory.__array_interface__["data"][0]
    buffers[:, 0] = start + np.arange(count)[::-1] * (size + spread)
    buffers[:, 1] = size
    edges = [0, *itertools.accumulate(places for _, places in runs)]
    calls = storage.scatter(buffers, edges, [offset for offset, _ in runs], named)
    assert (memory[:, size:] == 201).all(), "nothing between the places is touched"
    return memory[::-1, :size], calls


def sliced(size: int, runs: list[tuple[int, int]]) -> npt.NDArray[np.uint8]:
    parts = [DATA[offset : offset + size * places].reshape(places, size) for offset, places in runs]
    return np.concatenate([np.empty((0, size), np.uint8), *parts])


@settings(max_examples=26, deadline=None)
@given(st.integers(1, 700), st.integers(0, 9), st.data())
def test_scattered_extents_equal_slices(size: int, spread: int, data: st.DataObject) -> None:
    runs = []
    for _ in range(data.draw(st.integers(1, 6))):
        places = data.draw(st.integers(1, 20))
        runs.append((data.draw(st.integers(0, SIZE - size * places)), places))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bytes"
        path.write_bytes(DATA.tobytes())
        for implementation in IMPLEMENTATIONS:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(storage_module, "preadv", implementation)
                found, calls = scattered(opened(path), size, runs, spread)
            assert np.array_equal(found, sliced(size, runs))
            assert calls == len(runs)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30), st.integers(0, SIZE + 100))
def test_the_c_librarys_preadv_equals_pythons(sizes: list[int], offset: int) -> None:
    """Places of all sizes, also over the end of the file."""
    found = []
    with tempfile.TemporaryFile() as file:
        file.write(DATA.tobytes())
        file.flush()
        for implementation in IMPLEMENTATIONS:
            parts = [np.zeros(size, np.uint8) for size in sizes]
            pairs = np.array([[part.__array_interface__["data"][0], len(part)] for part in parts], np.uint64)
            got = implementation(file.fileno(), pairs.__array_interface__["data"][0], len(parts), offset)
            whole = np.concatenate(parts)
            assert got == min(sum(sizes), max(0, SIZE - offset))
            assert np.array_equal(whole[:got], DATA[offset : offset + got])
            assert not whole[got:].any()
            found.append(whole)
    assert np.array_equal(*found)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_both_raise_the_errors_of_the_kernel(implementation: Preadv) -> None:
    pair = np.zeros((1, 2), np.uint64)
    with pytest.raises(OSError) as caught:
        implementation(-1, pair.__array_interface__["data"][0], 1, 0)
    assert caught.value.errno == errno.EBADF


def test_this_machine_uses_the_c_library() -> None:
    assert storage_module.preadv is not python_preadv


def test_without_preadv_in_the_c_library_python_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    assert storage_module._c_preadv() is None
    monkeypatch.setattr("ctypes.sizeof", lambda _: 4)
    assert storage_module._c_preadv() is None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("places", [MAX_BUFFERS, MAX_BUFFERS + 1, 3 * MAX_BUFFERS + 5])
def test_more_buffers_than_one_call_allows(
    path: Path, monkeypatch: pytest.MonkeyPatch, places: int, implementation: Preadv
) -> None:
    monkeypatch.setattr(storage_module, "preadv", implementation)
    found, calls = scattered(opened(path), 11, [(3, places)])
    assert np.array_equal(found, sliced(11, [(3, places)]))
    assert calls == -(-places // MAX_BUFFERS)


def test_no_call_exceeds_the_byte_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "_MAX_CALL_BYTES", 1000)
    asked = recorded(monkeypatch)
    found, calls = scattered(opened(path), 300, [(0, 10), (9000, 2)])
    assert np.array_equal(found, sliced(300, [(0, 10), (9000, 2)]))
    assert [count for _, count, _ in asked] == [3, 3, 3, 1, 2]
    assert calls == 5
    asked.clear()
    found, calls = scattered(opened(path), 1500, [(7, 3)])
    assert np.array_equal(found, sliced(1500, [(7, 3)]))
    assert [count for _, count, _ in asked] == [1, 1, 1]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Every call, as (descriptor, places, offset)."""
    real, asked = storage_module.preadv, []

    def preadv(descriptor: int, buffers: int, count: int, offset: int) -> int:
        asked.append((descriptor, count, offset))
        return real(descriptor, buffers, count, offset)

    monkeypatch.setattr(storage_module, "preadv", preadv)
    return asked


def limited(limits: Iterator[int | OSError | None]) -> Preadv:
    """A kernel that reads at most these numbers of bytes, call by call; None: all, or fails."""
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


def row_read(storage: Storage, out: npt.NDArray[Any], offset: int) -> int:
    return storage.read_into(out, offset, named)


@pytest.mark.parametrize("dtype", ["u1", ">i4", "<f8", "?", "S7", "V5", "M8[s]", "u1,<f4"])
@pytest.mark.parametrize("shape", [(), (1,), (4, 3)])
def test_a_single_row_of_any_dtype(path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    out = np.zeros(shape, dtype)
    # An older numpy gives no view of its times; then it is asked for by address.
    assert row_read(opened(path), out, 77) <= (2 if dtype == "M8[s]" else 1)
    assert out.tobytes() == DATA[77 : 77 + out.nbytes].tobytes()


@pytest.mark.parametrize("trouble", ["fails", "is short", "never comes"])
def test_a_single_row_is_retried(path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    real = os.preadv

    def preadv(descriptor: int, views: Any, offset: int) -> int:
        if trouble == "fails":
            raise broken()
        return real(descriptor, [memoryview(views[0])[:40]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    out, offset = np.zeros(100, np.uint8), SIZE - 50 if trouble == "never comes" else 1000
    if trouble == "never comes":
        with pytest.raises(ReadError, match="row 0 "):
            row_read(opened(path), out, offset)
    else:
        assert row_read(opened(path), out, offset) == 2
        assert np.array_equal(out, DATA[offset : offset + 100])


def broken() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


RUNS = [(100, 7), (20_000, 1), (40_000, 5)]


@settings(max_examples=26, deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(1, 900)), min_size=1, max_size=12), st.integers(1, 400))
def test_short_reads_are_continued(limits: list[int | None], size: int) -> None:
    """Also in the middle of a row, and again and again."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "bytes"
        path.write_bytes(DATA.tobytes())
        patch.setattr(storage_module, "preadv", limited(itertools.cycle(limits)))
        found, _ = scattered(opened(path), size, RUNS)
        assert np.array_equal(found, sliced(size, RUNS))


@pytest.mark.parametrize(
    "limits",
    [
        [0],
        [0, 0, 0],
        [100, 0, 50, 0],
        [broken()],
        [broken(), broken(), broken()],
        [650, broken(), 0, broken()],
        [OSError(errno.EINTR, "interrupted"), None, OSError(errno.EAGAIN, "again")],
        [299, 1, 0, 0, None],
    ],
)
def test_temporary_errors_are_retried(path: Path, monkeypatch: pytest.MonkeyPatch, limits: list[Any]) -> None:
    monkeypatch.setattr(storage_module, "preadv", limited(itertools.chain(limits, itertools.repeat(None))))
    found, _ = scattered(opened(path), 300, RUNS)
    assert np.array_equal(found, sliced(300, RUNS))


@pytest.mark.parametrize(
    ("limits", "place", "reason"),
    [
        ([broken()], 0, "Input/output error"),
        ([None, broken()], 7, "Input/output error"),
        ([601, broken()], 2, "Input/output error"),
        ([None, None, 1250, 0], 12, "the file ends before them"),
        ([0], 0, "the file ends before them"),
    ],
)
def test_lasting_errors_name_the_row(
    path: Path, monkeypatch: pytest.MonkeyPatch, limits: list[Any], place: int, reason: str
) -> None:
    limits = [*limits[:-1], *[limits[-1]] * 50]
    calls = iter(limits)
    monkeypatch.setattr(storage_module, "preadv", limited(calls))
    with pytest.raises(ReadError, match=f"row {place} .*{reason}") as caught:
        scattered(opened(path), 300, RUNS)
    assert caught.value.path == str(path)
    assert isinstance(caught.value, OSError)
    # The call for many, then one at once and three more.
    assert len(limits) - len(list(calls)) == len(limits[:-50]) + 1 + 4


def test_pauses_grow_between_tries(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(storage_module, "_RETRY_SECONDS", (0.0, 0.05, 0.5))
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr(storage_module, "preadv", limited(itertools.repeat(broken())))
    with pytest.raises(ReadError):
        scattered(opened(path), 300, RUNS)
    assert slept == [0.0, 0.05, 0.5]


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
    with pytest.raises(ReadError, match=r"rows 3-5 .*ends"):
        engine.read("x", [5, 4, 3])


@pytest.mark.parametrize("size", [0, 600, 5000])
@pytest.mark.parametrize("scatter_bytes", [1, 1 << 30])
def test_a_file_that_is_cut_while_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, scatter_bytes: int
) -> None:
    monkeypatch.setattr("h5pack.read.engine.SCATTER_BYTES", scatter_bytes)
    path, values, engine = pack_of_rows(tmp_path)
    monkeypatch.setattr(storage_module, "CHECK_SECONDS", 1000.0)
    assert np.array_equal(engine.read("x", [19]), values[[19]])
    os.truncate(path, size)
    with pytest.raises(PackChangedError):
        engine.read("x", range(20))


def test_a_short_file_with_the_same_identity_names_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file checks unchanged, so that its rows are named."""
    path, _, engine = pack_of_rows(tmp_path)
    engine.read("x", [0])
    same = FileIdentity.of(str(path))
    os.truncate(path, int(engine.indexes["x"].addresses[2]) + 700)
    monkeypatch.setattr(FileIdentity, "of", classmethod(lambda *_: same))
    with pytest.raises(ReadError, match=r"rows 7-8 .*ends"):
        engine.read("x", range(9))


def replace(path: Path, seed: int) -> None:
    write(path.with_name("new.h5"), numbers((20, 10, 60), "u1", seed), "rows")
    os.replace(path.with_name("new.h5"), path)


def test_a_file_that_is_replaced_while_it_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, values, engine = pack_of_rows(tmp_path)
    engine.read("x", [0])
    now = storage_module.time.monotonic()
    replace(path, 9)
    # Until it checks again it reads on from the file that it opened.
    monkeypatch.setattr("time.monotonic", lambda: now + 0.5)
    assert np.array_equal(engine.read("x", range(20)), values)
    monkeypatch.setattr("time.monotonic", lambda: now + 1.5)
    for _ in range(2):
        with pytest.raises(PackChangedError):
            engine.read("x", [3])
    path.unlink()
    with pytest.raises(PackChangedError):
        engine.read("x", [3])


def test_a_file_that_is_rewritten_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, values, engine = pack_of_rows(tmp_path)
    monkeypatch.setattr(storage_module, "CHECK_SECONDS", -1.0)
    assert np.array_equal(engine.read("x", [4]), values[[4]])
    os.utime(path, ns=(1, 1))
    with pytest.raises(PackChangedError):
        engine.read("x", [4])


def test_the_file_is_checked_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, engine = pack_of_rows(tmp_path)
    checks = []
    real = Storage.check_unchanged
    monkeypatch.setattr(Storage, "check_unchanged", lambda self: (checks.append(1), real(self)))
    for _ in range(50):
        engine.read("x", [1])
    assert len(checks) <= 2


def replaced(path: Path) -> None:
    path.with_name("new").write_bytes(DATA.tobytes())
    os.replace(path.with_name("new"), path)


@pytest.mark.parametrize("change", [replaced, Path.unlink])
def test_a_file_that_is_replaced_or_deleted_before_it_is_opened(path: Path, change: Callable[[Path], None]) -> None:
    storage = opened(path)
    change(path)
    with pytest.raises(PackChangedError):
        storage.open()
    assert descriptors(path) == 0


def test_a_file_that_is_replaced_while_it_is_being_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, real = opened(path), os.open
    monkeypatch.setattr(os, "open", lambda name, flags: (replaced(path), real(name, flags))[1])
    with pytest.raises(PackChangedError):
        storage.open()
    assert descriptors(path) == 0


def test_a_file_that_cannot_be_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    storage = opened(path)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ReadError, match="denied"):
        storage.open()


def test_closing_and_opening_again(path: Path) -> None:
    storage = opened(path)
    storage.close()
    assert descriptors(path) == 0, "nothing is opened before the first use"
    for _ in range(3):
        found, _ = scattered(storage, 10, RUNS)
        assert np.array_equal(found, sliced(10, RUNS))
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

    def reads(one: Storage) -> bool:
        return np.array_equal(scattered(one, 9, RUNS)[0], sliced(9, RUNS))

    def child() -> bool:
        fine = storage.open() == first and reads(storage)
        storage.close()
        return fine and descriptors(path) == 0 and reads(storage)

    again: Storage = pickle.loads(pickle.dumps(storage))
    assert reads(again)
    assert again.open() != first
    again.close()
    assert in_child(child)
    assert storage.open() == first
    assert reads(storage)


def test_threads_that_open_at_once_share_one_descriptor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, real, together, made = opened(path), os.open, threading.Barrier(4, timeout=60), []

    def late(name: str, flags: int) -> int:
        descriptor = real(name, flags)
        made.append(descriptor)
        together.wait()
        return descriptor

    monkeypatch.setattr(os, "open", late)

    def work(_: int) -> None:
        assert np.array_equal(scattered(storage, 20, RUNS)[0], sliced(20, RUNS))

    run_threads(4, work)
    assert len(set(made)) == 4, "all of them opened it"
    assert descriptors(path) == 1


def test_is_cached(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = opened(path)
    scattered(storage, 10, RUNS)
    assert storage.is_cached(RUNS[0][0])
    asked = []

    def preadv(descriptor: int, buffers: Any, offset: int, flags: int) -> int:
        asked.append((descriptor, offset, flags))
        if offset == 4096:
            raise BlockingIOError
        if offset == 8192:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return 1

    monkeypatch.setattr(os, "preadv", preadv)
    assert [storage.is_cached(offset) for offset in (0, 4096, 8192)] == [True, False, True]
    assert asked == [(storage.open(), offset, os.RWF_NOWAIT) for offset in (0, 4096, 8192)]
    monkeypatch.delattr(os, "RWF_NOWAIT")
    assert storage.is_cached(4096)
    assert len(asked) == 3


def test_will_need_calls_fadvise_if_there_is_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, calls = opened(path), []
    storage.will_need(0, SIZE)
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: calls.append(call))
    storage.will_need(123, 456)
    assert calls == [(storage.open(), 123, 456, os.POSIX_FADV_WILLNEED)]
    monkeypatch.delattr(os, "posix_fadvise")
    storage.will_need(1, 2)
    assert len(calls) == 1


def test_closing_while_others_read_never_gives_them_another_file(path: Path, tmp_path: Path) -> None:
    storage = opened(path)
    other = tmp_path / "other.bin"
    other.write_bytes(b"\xee" * path.stat().st_size)
    over = threading.Event()
    found: list[bool] = []

    def read() -> None:
        while not over.is_set():
            found.append(np.array_equal(scattered(storage, 9, RUNS)[0], sliced(9, RUNS)))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(300):
        storage.close()
        # It takes the number of a descriptor that was just closed.
        with other.open("rb") as file:
            file.read(1)
    over.set()
    for reader in readers:
        reader.join()
    assert len(found) >= 3
    assert all(found)
