"""Memory for batches: reused when, and only when, the last tensor over it is gone, here or in the main process."""

from __future__ import annotations

import copy
import errno
import gc
import io
import itertools
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import h5pack
from h5pack.data import buffers
from h5pack.data.buffers import BatchMemory, BufferPool, SharedMemory, _can_share, unfilled_memory
from h5pack.data.samples import new_batch
from h5pack.errors import LoaderError
from h5pack.system.machine import huge_page_memory
from tests.data.packs import PATIENCE, all_same
from tests.makers import class_folders, quick
from tests.read.files import in_child

PARTS: list[tuple[str, tuple[int, ...], np.dtype[Any]]] = [
    ("images", (5, 3), np.dtype("u1")),
    ("labels", (), np.dtype("i8")),
    ("boxes", (4,), np.dtype("f4")),
    ("odd", (7,), np.dtype("?")),
    ("rows", (), np.dtype("i8")),
]


def pool_of(keep: int = 2, rows: int = 9) -> BufferPool:
    return BufferPool(PARTS, rows, pinned=False, keep=keep)


@pytest.mark.parametrize("rows", [1, 9, 63, 64, 1000])
def test_tensors_lie_over_aligned_arrays_that_do_not_overlap(rows: int) -> None:
    pool = pool_of(rows=rows)
    for count in {rows, rows // 2 + 1}:
        memory = pool.allocate(count)
        end = memory.address
        for value, (field, (name, row_shape, dtype)) in enumerate(zip(pool.fields, PARTS, strict=True)):
            array, tensor = memory.arrays[name], memory.tensor(name)
            start = array.__array_interface__["data"][0]
            assert start % 64 == 0
            assert start == memory.address + field.offset == tensor.data_ptr() >= end
            end = start + count * field.row_bytes
            assert array.flags.c_contiguous
            assert tensor.shape == array.shape == (count, *row_shape)
            assert tensor.numpy().dtype == array.dtype == dtype
            array[...] = value
        assert end <= memory.address + pool.bytes
        for value, (name, _, dtype) in enumerate(PARTS):
            assert (memory.tensor(name).numpy() == np.array(value).astype(dtype)).all(), "overwritten by another field"


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
    memory = pool.allocate(9)
    address = memory.address
    held = VIEWS[kind](memory)
    images = memory.tensor("images")
    del memory
    taken = [pool.allocate(9) for _ in range(3)]
    del images
    taken.append(pool.allocate(9))
    assert address not in [other.address for other in taken]
    del held
    assert pool.allocate(9).address == address


def test_held_batches_are_never_written_to() -> None:
    pool = pool_of(keep=3)
    random = np.random.default_rng(0)
    held: dict[int, torch.Tensor] = {}
    addresses = set()
    for number in range(500):
        memory = pool.allocate(9)
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
    memories = {number: pool.allocate(9) for number in range(3)}
    addresses = [memory.address for memory in memories.values()]
    for number in (1, 2, 0):
        del memories[number]
    taken = [pool.allocate(9) for _ in range(3)]
    assert [memory.address for memory in taken] == [addresses[0], addresses[2], addresses[1]]


@pytest.mark.parametrize("keep", [0, 4])
def test_no_more_is_kept_than_was_asked_for(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    living: weakref.WeakSet[Any] = weakref.WeakSet()

    def counted(size: int) -> Any:
        memory = huge_page_memory(size)
        living.add(memory)
        return memory

    monkeypatch.setattr("h5pack.data.buffers.huge_page_memory", counted)
    pool = pool_of(keep=keep)
    held = [pool.allocate(9).tensor("images") for _ in range(12)]
    held.clear()
    assert len(living) == keep, "without another allocation"
    held = [pool.allocate(9).tensor("images") for _ in range(12)]
    del pool
    assert len(living) == 12
    held.clear()
    assert not living, "tensors may outlive their pool"


def test_a_garbage_collection_returns_memory_at_any_moment() -> None:
    pool = pool_of(keep=64)
    started, stop = threading.Barrier(4), threading.Event()

    def litter() -> None:
        """Make batches that only the garbage collector can free."""
        started.wait()
        for number in range(300):
            memory = pool.allocate(9)
            memory.arrays["labels"][...] = number
            cycle: list[Any] = [memory.tensor("labels")]
            cycle.append(cycle)
            assert cycle[0].tolist() == [number] * 9

    def collect() -> None:
        started.wait()
        while not stop.is_set():
            gc.collect(0)

    threshold = gc.get_threshold()
    gc.set_threshold(3, 2, 2)
    try:
        with ThreadPoolExecutor(4) as threads:
            threads.submit(collect)
            litterers = [threads.submit(litter) for _ in range(3)]
            wait(litterers)
            stop.set()
            for litterer in litterers:
                litterer.result()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    distinct = [pool.allocate(9) for _ in range(64)]
    assert len({memory.address for memory in distinct}) == 64, "no memory came back twice"


def test_pinned_memory_is_not_filled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """``use_deterministic_algorithms`` fills new tensors, which takes 28 ms for 64 MiB."""
    filled: list[bool] = []
    empty = torch.empty

    def pageable(*size: Any, pin_memory: bool, **settings: Any) -> torch.Tensor:
        assert pin_memory
        filled.append(torch.utils.deterministic.fill_uninitialized_memory)
        return empty(*size, **settings)

    monkeypatch.setattr(torch, "empty", pageable)
    # `torch.use_deterministic_algorithms` itself would import the compiler.
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    pool = BufferPool(PARTS, 4, pinned=True, keep=2)
    pool.prepare()
    pool.allocate(4)
    assert filled == [False] * 3
    assert torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    pool.allocate(4)
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_a_child_forked_while_threads_allocate_memory_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    entered, leave = threading.Event(), threading.Event()

    def allocate() -> None:
        with unfilled_memory():
            entered.set()
            leave.wait(PATIENCE)

    def check() -> bool:
        with unfilled_memory():
            pass
        return bool(torch.utils.deterministic.fill_uninitialized_memory)

    thread = threading.Thread(target=allocate)
    thread.start()
    assert entered.wait(PATIENCE)
    with buffers._filling.lock:  # as if another thread had it
        alike = in_child(check)
    leave.set()
    thread.join()
    assert alike
    assert check()


def test_prepared_memory_is_what_is_kept_and_what_is_taken_next() -> None:
    pool = pool_of(keep=3)
    held = pool.allocate(9)
    for _ in range(2):
        pool.prepare()
        assert len(pool._free) == 2, "those in use count, too"
    prepared = {np.frombuffer(memory, np.uint8).__array_interface__["data"][0] for memory in pool._free}
    taken = [pool.allocate(9) for _ in range(2)]
    assert {memory.address for memory in taken} == prepared
    assert held.address not in prepared


# Shared between a DataLoader's workers and the main process.

SHAPES: list[tuple[tuple[int, ...], str]] = [((4, 5, 3), "|u1"), ((4,), "int64")]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    h5pack.convert(class_folders(folder / "in", {"a": 40, "b": 35}), folder / "o.h5", **quick(chunk_rows=5))
    return folder / "o.h5"


def send(batch: Any) -> Any:
    """What arrives at the other side; here both sides are this process."""
    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(batch)
    return pickle.loads(buffer.getvalue())


def new(memory: SharedMemory) -> Any:
    tensors = memory.shared_batch(SHAPES)
    return new_batch(("images", "labels"), tensors, tensors)


def is_sent_in_segment(batch: Any) -> bool:
    _, (_, _, receive, _) = batch.__reduce_ex__(4)
    return receive is not None


def shared(memory: SharedMemory, value: int) -> Any:
    """A batch filled with a value."""
    batch = new(memory)
    for tensor in batch:
        tensor.fill_(value)
    return batch


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_is_used_again_once_no_view_of_it_lives() -> None:
    memory = SharedMemory()
    held, addresses = [], set()
    for value in range(10):
        batch = shared(memory, value)
        images, labels = received = send(batch)
        assert type(received) is type(batch)
        assert [tensor.shape for tensor in received] == [(4, 5, 3), (4,)]
        # A view of either tensor keeps both.
        if value < 5:
            held.append(images[2:, 1].numpy() if value % 2 else labels[1:])
        else:
            addresses.add(batch[0].data_ptr())
        del batch, images, labels, received
    for value, view in enumerate(held):
        assert (np.asarray(view) == value).all()
    assert len(addresses) == 1


def test_memory_is_not_used_while_the_worker_looks_at_it() -> None:
    memory = SharedMemory()
    first = shared(memory, 1)
    kept = first[0][1]
    received = send(first)
    del received, first
    shared(memory, 2)
    assert (kept == 1).all()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another tensor": lambda batch: batch._replace(images=batch.images / 2),
    "another shape": lambda batch: batch[0].unsqueeze_(1),
    "other memory": lambda batch: setattr(batch[0], "data", batch[0].clone()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_batch_is_sent_as_ordinary_tensors(change: Callable[[Any], Any]) -> None:
    batch = shared(SharedMemory(), 3)
    changed = change(batch)
    batch = changed if isinstance(changed, tuple) else batch
    assert not is_sent_in_segment(batch)
    assert torch.equal(send(batch)[0], batch[0])


def test_copies_in_the_worker_leave_the_batch_alone() -> None:
    memory = SharedMemory()
    batch = shared(memory, 4)
    deep, shallow = copy.deepcopy(batch), copy.copy(batch)
    assert type(deep) is type(shallow) is type(batch)
    received = send(batch)
    assert not is_sent_in_segment(batch), "it is on its way already"
    assert not is_sent_in_segment(shallow)
    del deep, shallow, batch
    shared(memory, 5)
    assert (received[0] == 4).all()


def test_a_forked_child_gives_nothing_back() -> None:
    memory = SharedMemory()
    received = [send(shared(memory, 6))]

    def drop() -> bool:
        received.clear()
        gc.collect()
        return True

    assert in_child(drop)
    shared(memory, 7)
    assert (received[0][0] == 6).all()


def test_a_batch_stays_right_in_a_forked_child_after_the_parent_dropped_it() -> None:
    memory = SharedMemory()
    received = [send(shared(memory, 6))]
    wait_end, go_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.read(wait_end, 1)
            code = 0 if (received[0][0] == 6).all() else 1
        finally:
            os._exit(code)
    received.clear()
    for value in range(7, 10):
        send(shared(memory, value))
    os.write(go_end, b"x")
    assert os.waitpid(child, 0)[1] == 0
    for end in (wait_end, go_end):
        os.close(end)


def test_batches_that_live_during_forks_do_not_add_up() -> None:
    gc.collect()
    before, memory = descriptors(), SharedMemory()
    for value in range(10):
        received = send(shared(memory, value))
        assert in_child(lambda: True)
        assert (received[0] == value).all()
        del received
        assert len(memory._segments) <= 2
    send(new(memory))
    # A memory file and its mapping.
    assert descriptors() == before + 2


def test_many_that_were_held_are_not_kept_for_ever() -> None:
    memory = SharedMemory()
    held = [send(new(memory)) for _ in range(20)]
    assert len(memory._segments) == 20
    del held
    memory.shared_batch(SHAPES)
    assert len(memory._segments) <= 5


def test_other_sizes_get_other_memory_and_the_old_is_let_go() -> None:
    gc.collect()
    memory = SharedMemory()
    before = descriptors()
    for rows in (1000, 10, 3000, 20):
        memory.shared_batch([((rows, 50), "|u1")])
    # A memory file and its mapping.
    assert descriptors() == before + 2
    del memory
    gc.collect()
    assert descriptors() == before


def test_neither_a_pickle_nor_a_fork_takes_segments_along() -> None:
    memory = SharedMemory()
    address = memory.shared_batch(SHAPES)[0].data_ptr()
    assert pickle.loads(pickle.dumps(memory))._segments == []
    assert in_child(lambda: shared(memory, 7))
    again = memory.shared_batch(SHAPES)
    assert again[0].data_ptr() == address
    assert not (again[0] == 7).any()


def test_workers_without_memory_files_send_ordinary_tensors(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = h5pack.H5Dataset(pack)
    expected = list(DataLoader(dataset, 8))
    monkeypatch.setattr(os, "memfd_create", Mock(side_effect=OSError(errno.EPERM, "refused")), raising=False)
    monkeypatch.setattr("h5pack.data.buffers._can_share", _can_share.__wrapped__)
    assert all_same(list(DataLoader(dataset, 8, num_workers=1, multiprocessing_context="fork")), expected)


def test_a_worker_that_died_is_named() -> None:
    batch = SharedMemory().shared_batch(SHAPES)
    rebuild, (_, descriptor, shapes) = batch.reduced(list(batch))
    with pytest.raises(LoaderError, match="/proc/999999999/fd"):
        rebuild(999_999_999, descriptor, shapes)


@pytest.mark.parametrize(("labels", "collate"), [(None, True), ("labels", False)])
def test_workers_batches_stay_right_while_held(pack: Path, labels: str | None, collate: bool) -> None:
    dataset = h5pack.H5Dataset(pack, labels=labels)
    expected = [
        default_collate([dataset[index] for index in rows]) for rows in np.split(np.arange(75), range(8, 75, 8))
    ]
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}
    loader = DataLoader(dataset, 8, collate_fn=dataset.collate if collate else None, **workers)
    opened = []
    for batches in (None, 2, None):
        held = list(itertools.islice(loader, batches))
        assert all_same(held, expected[:batches])
        del held
        gc.collect()
        opened.append(descriptors())
    assert opened[2] <= opened[0]


def test_workers_use_their_memory_again(pack: Path) -> None:
    dataset = h5pack.H5Dataset(pack)
    loader = DataLoader(dataset, batch_size=5, num_workers=1, collate_fn=WithSegments(dataset))
    seen = [int(batch[0]) for batch in loader]
    assert len(seen) == 15
    assert max(seen) <= 5, "segments of a worker whose batches are dropped at once"


class WithSegments:
    """Collate, and return how many segments the worker has beside the batch."""

    def __init__(self, dataset: h5pack.H5Dataset) -> None:
        self.dataset = dataset

    def __call__(self, samples: Any) -> Any:
        batch = self.dataset.collate(samples)
        return torch.tensor(len(self.dataset._shared._segments)), batch
