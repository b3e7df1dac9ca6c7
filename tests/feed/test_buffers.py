"""Memory for batches: used again when nobody looks at it any more, and not before."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from h5pack.feed.buffers import BatchMemory, BufferPool, anonymous

PARTS: list[tuple[str, tuple[int, ...], np.dtype[Any]]] = [
    ("images", (5, 3), np.dtype("u1")),
    ("labels", (), np.dtype("i8")),
    ("boxes", (4,), np.dtype("f4")),
    ("odd", (7,), np.dtype("?")),
    ("rows", (), np.dtype("i8")),
]


def pool_of(keep: int = 2, rows: int = 9) -> BufferPool:
    return BufferPool(PARTS, rows, pinned=False, keep=keep)


def test_parts_are_aligned_and_apart() -> None:
    for rows in (1, 9, 63, 64, 1000):
        pool = pool_of(rows=rows)
        memory = pool.take(rows)
        ends = []
        for part in pool.parts:
            array = memory.arrays[part.name]
            start = array.__array_interface__["data"][0]
            assert start == memory.address + part.offset
            assert start % 64 == 0
            assert array.flags.c_contiguous
            assert array.nbytes == rows * part.row_bytes
            assert not ends or start >= ends[-1]
            ends.append(start + array.nbytes)
        assert ends[-1] <= memory.address + pool.bytes


@pytest.mark.parametrize("rows", [9, 4, 1])
def test_tensors_lie_over_the_arrays(rows: int) -> None:
    memory = pool_of().take(rows)
    for name, row_shape, dtype in PARTS:
        tensor = memory.tensor(name)
        assert tensor.shape == (rows, *row_shape)
        assert tensor.numpy().dtype == dtype
        memory.arrays[name][...] = 1
        assert bool((tensor == 1).all())
    assert np.array_equal(memory.arrays["images"], np.ones((rows, 5, 3))), "the others were written elsewhere"


VIEWS: dict[str, Callable[[BatchMemory], Any]] = {
    "a tensor": lambda memory: memory.tensor("images"),
    "another part": lambda memory: memory.tensor("rows"),
    "a view": lambda memory: memory.tensor("images")[2:4, 1:, 0],
    "another dtype": lambda memory: memory.tensor("labels").view(torch.uint8),
    "no rows": lambda memory: memory.tensor("boxes")[:0],
    "an ndarray": lambda memory: memory.tensor("boxes").numpy(),
    "a view of an ndarray": lambda memory: memory.tensor("boxes").numpy()[1:3].T,
    "the filler's array": lambda memory: memory.arrays["odd"],
    "a storage": lambda memory: memory.tensor("odd").untyped_storage(),
    "a memoryview": lambda memory: memoryview(memory.tensor("images").numpy()),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_memory_is_used_again_when_the_last_view_dies_and_not_before(kind: str) -> None:
    pool = pool_of()
    memory = pool.take(9)
    address = memory.address
    held = VIEWS[kind](memory)
    images = memory.tensor("images")
    del memory
    taken = [pool.take(9) for _ in range(3)]
    assert address not in [other.address for other in taken]
    del images
    taken.append(pool.take(9))
    assert taken[-1].address != address
    del held
    again = pool.take(9)
    assert again.address == address


def test_held_batches_are_never_written_to() -> None:
    pool = pool_of(keep=3)
    random = np.random.default_rng(0)
    held: dict[int, torch.Tensor] = {}
    addresses = set()
    for number in range(2_000):
        memory = pool.take(9)
        addresses.add(memory.address)
        memory.arrays["images"][...] = number % 251
        held[number] = memory.tensor("images")
        if len(held) > random.integers(1, 9):
            for gone in random.choice(list(held), random.integers(1, len(held) + 1), replace=False).tolist():
                assert held[gone].unique().tolist() == [gone % 251]
                del held[gone]
    assert len(addresses) < 40, "most of the memory was used again"


def test_what_came_back_last_is_taken_first() -> None:
    pool = pool_of(keep=4)
    memories = {place: pool.take(9) for place in range(3)}
    addresses = [memory.address for memory in memories.values()]
    for place in (1, 2, 0):
        del memories[place]
    assert pool.take(9).address == addresses[0]
    taken = [pool.take(9) for _ in range(3)]
    assert [memory.address for memory in taken] == [addresses[0], addresses[2], addresses[1]]


@pytest.mark.parametrize("keep", [0, 1, 4])
def test_no_more_is_kept_than_was_asked_for(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    living: weakref.WeakSet[Any] = weakref.WeakSet()

    def counted(size: int) -> Any:
        memory = anonymous(size)
        living.add(memory)
        return memory

    monkeypatch.setattr("h5pack.feed.buffers.anonymous", counted)
    pool = pool_of(keep=keep)
    held = [pool.take(9).tensor("images") for _ in range(12)]
    assert len(living) == 12
    held.clear()
    assert len(living) == keep, "without anybody asking for memory again"
    held = [pool.take(9).tensor("images") for _ in range(12)]
    assert len(living) == 12
    del pool
    assert len(living) == 12
    held.clear()
    assert not living, "tensors may outlive their pool"


def test_a_garbage_collection_gives_memory_back_at_any_moment() -> None:
    pool = pool_of(keep=64)
    stop = threading.Event()
    errors: list[BaseException] = []

    def litter() -> None:
        """Batches that only the garbage collector can find."""
        try:
            for number in range(1_500):
                memory = pool.take(9)
                memory.arrays["labels"][...] = number
                tensor = memory.tensor("labels")
                cycle: list[Any] = [tensor]
                cycle.append(cycle)
                assert tensor.tolist() == [number] * 9
        except BaseException as error:
            errors.append(error)

    def collect() -> None:
        while not stop.is_set():
            gc.collect()

    threshold = gc.get_threshold()
    gc.set_threshold(3, 2, 2)
    collector = threading.Thread(target=collect)
    litterers = [threading.Thread(target=litter) for _ in range(3)]
    try:
        for thread in [collector, *litterers]:
            thread.start()
        for thread in litterers:
            thread.join()
    finally:
        stop.set()
        collector.join()
        gc.set_threshold(*threshold)
    assert not errors
    gc.collect()
    distinct = [pool.take(9) for _ in range(64)]
    assert len({memory.address for memory in distinct}) == 64, "no memory came back twice"


def test_threads_never_get_the_same_memory() -> None:
    pool = pool_of(keep=8)
    errors: list[BaseException] = []
    start = threading.Barrier(6)

    def work(mark: int) -> None:
        try:
            start.wait()
            for turn in range(1_500):
                memories = [pool.take(9) for _ in range(1 + turn % 3)]
                for memory in memories:
                    memory.arrays["rows"][...] = mark
                assert all((memory.arrays["rows"] == mark).all() for memory in memories)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_memory_is_zero_at_first_and_of_any_size() -> None:
    for size in (0, 1, 4096, 3_000_000):
        memory = anonymous(size)
        assert len(memory) == max(1, size)
        assert not np.frombuffer(memory, np.uint8).any()
    empty = BufferPool([("images", (0, 3), np.dtype("f4"))], 5, pinned=False, keep=1)
    assert empty.take(5).tensor("images").shape == (5, 0, 3)


def test_prepared_memory_is_what_is_kept_and_what_is_taken_next() -> None:
    pool = BufferPool([("x", (10,), np.dtype(np.uint8))], 100, False, 3)
    held = pool.take(100)
    pool.prepare()
    assert len(pool._free) == 2
    pool.prepare()
    assert len(pool._free) == 2, "those in use count, too"
    prepared = {np.frombuffer(memory, np.uint8).__array_interface__["data"][0] for memory in pool._free}
    taken = [pool.take(100) for _ in range(2)]
    assert {memory.address for memory in taken} == prepared
    assert held.address not in prepared
