"""Memory for batches: reused when, and only when, the last tensor over it is gone, here or in the main process."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import h5pack
from h5pack.data.buffers import BatchMemory, BufferPool, SharedBatch, SharedMemory, SharedSegment
from h5pack.errors import LoaderError
from h5pack.system.memory import huge_page_memory
from tests.makers import class_folders, quick

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
        memory = pool.allocate(rows)
        ends = []
        for field in pool.fields:
            array = memory.arrays[field.name]
            start = array.__array_interface__["data"][0]
            assert start == memory.address + field.offset
            assert start % 64 == 0
            assert array.flags.c_contiguous
            assert array.nbytes == rows * field.row_bytes
            assert not ends or start >= ends[-1]
            ends.append(start + array.nbytes)
        assert ends[-1] <= memory.address + pool.bytes


@pytest.mark.parametrize("rows", [9, 4, 1])
def test_tensors_lie_over_the_arrays(rows: int) -> None:
    memory = pool_of().allocate(rows)
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
    memory = pool.allocate(9)
    address = memory.address
    held = VIEWS[kind](memory)
    images = memory.tensor("images")
    del memory
    taken = [pool.allocate(9) for _ in range(3)]
    assert address not in [other.address for other in taken]
    del images
    taken.append(pool.allocate(9))
    assert taken[-1].address != address
    del held
    again = pool.allocate(9)
    assert again.address == address


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
    memories = {place: pool.allocate(9) for place in range(3)}
    addresses = [memory.address for memory in memories.values()]
    for place in (1, 2, 0):
        del memories[place]
    assert pool.allocate(9).address == addresses[0]
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
    stop = threading.Event()

    def litter() -> None:
        """Make batches that only the garbage collector can free."""
        for number in range(300):
            memory = pool.allocate(9)
            memory.arrays["labels"][...] = number
            tensor = memory.tensor("labels")
            cycle: list[Any] = [tensor]
            cycle.append(cycle)
            assert tensor.tolist() == [number] * 9

    def collect() -> None:
        while not stop.is_set():
            gc.collect(0)

    threshold = gc.get_threshold()
    gc.set_threshold(3, 2, 2)
    try:
        with ThreadPoolExecutor(4) as threads:
            threads.submit(collect)
            litterers = [threads.submit(litter) for _ in range(3)]
            try:
                for litterer in litterers:
                    litterer.result()
            finally:
                stop.set()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    distinct = [pool.allocate(9) for _ in range(64)]
    assert len({memory.address for memory in distinct}) == 64, "no memory came back twice"


def test_threads_never_get_the_same_memory() -> None:
    pool = pool_of(keep=8)
    start = threading.Barrier(6)

    def work(mark: int) -> None:
        start.wait()
        for turn in range(300):
            memories = [pool.allocate(9) for _ in range(1 + turn % 3)]
            for memory in memories:
                memory.arrays["rows"][...] = mark
            assert all((memory.arrays["rows"] == mark).all() for memory in memories)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))


def test_prepared_memory_is_what_is_kept_and_what_is_taken_next() -> None:
    pool = BufferPool([("x", (10,), np.dtype(np.uint8))], 100, False, 3)
    held = pool.allocate(100)
    pool.prepare()
    assert len(pool._free) == 2
    pool.prepare()
    assert len(pool._free) == 2, "those in use count, too"
    prepared = {np.frombuffer(memory, np.uint8).__array_interface__["data"][0] for memory in pool._free}
    taken = [pool.allocate(100) for _ in range(2)]
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


def fill(batch: SharedBatch, value: int) -> None:
    for tensor in batch:
        tensor.fill_(value)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_is_used_again_once_no_view_of_it_lives() -> None:
    memory = SharedMemory()
    held, addresses = [], set()
    for value in range(10):
        batch = memory.shared_batch(SHAPES)
        fill(batch, value)
        images, labels = received = send(batch)
        assert isinstance(received, list)
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
    first = memory.shared_batch(SHAPES)
    fill(first, 1)
    kept = first[0][1]
    received = send(first)
    del received, first
    second = memory.shared_batch(SHAPES)
    fill(second, 2)
    assert (kept == 1).all()


CHANGES: dict[str, Callable[[SharedBatch], Any]] = {
    "another dtype": lambda batch: batch.__setitem__(0, batch[0].float() / 2),
    "another shape": lambda batch: batch[0].unsqueeze_(1),
    "other memory": lambda batch: setattr(batch[0], "data", batch[0].clone()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_batch_is_sent_as_ordinary_tensors(change: Callable[[SharedBatch], Any]) -> None:
    batch = SharedMemory().shared_batch(SHAPES)
    fill(batch, 3)
    change(batch)
    rebuild, (tensors,) = batch.__reduce__()
    assert rebuild is list
    assert torch.equal(tensors[0], batch[0])
    single = SharedMemory().shared_batch(SHAPES[:1]).single()
    single.unsqueeze_(0)
    assert single.__reduce_ex__(4)[1][0].shape == (1, 4, 5, 3)


def test_copies_in_the_worker_leave_the_batch_alone() -> None:
    memory = SharedMemory()
    batch = memory.shared_batch(SHAPES)
    fill(batch, 4)
    deep, shallow = copy.deepcopy(batch), copy.copy(batch)
    assert (type(deep), type(shallow)) == (list, list)
    received = send(batch)
    assert batch.__reduce__()[0] is list, "it is on its way already"
    del deep, shallow, batch
    fill(memory.shared_batch(SHAPES), 5)
    assert (received[0] == 4).all()
    tensor = SharedMemory().shared_batch(SHAPES[:1]).single()
    assert type(copy.deepcopy(tensor)) is type(copy.copy(tensor)) is torch.Tensor


def test_a_forked_child_gives_nothing_back() -> None:
    memory = SharedMemory()
    batch = memory.shared_batch(SHAPES)
    fill(batch, 6)
    received = send(batch)
    del batch
    child = os.fork()
    if child == 0:
        del received
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    fill(memory.shared_batch(SHAPES), 7)
    assert (received[0] == 6).all()


def test_many_that_were_held_are_not_kept_for_ever() -> None:
    memory = SharedMemory()
    held = [send(memory.shared_batch(SHAPES)) for _ in range(20)]
    assert len(memory._segments) == 20
    del held
    memory.shared_batch(SHAPES)
    assert len(memory._segments) <= 5


def test_one_tensor_alone() -> None:
    memory = SharedMemory()
    tensor = memory.shared_batch(SHAPES[:1]).single()
    tensor.fill_(9)
    assert type(tensor + 1) is torch.Tensor
    received = send(tensor)
    assert type(received) is torch.Tensor
    assert (received == 9).all()


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
    child = os.fork()
    if child == 0:
        fill(memory.shared_batch(SHAPES), 7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    again = memory.shared_batch(SHAPES)
    assert again[0].data_ptr() == address
    assert not (again[0] == 7).any()


def test_a_worker_that_died_is_named() -> None:
    batch = SharedMemory().shared_batch(SHAPES)
    rebuild, (_, descriptor, shapes, single) = batch.__reduce__()
    with pytest.raises(LoaderError, match="/proc/999999999/fd"):
        rebuild(999_999_999, descriptor, shapes, single)


def test_a_segment_is_free_when_neither_process_uses_it() -> None:
    segment = SharedSegment(100)
    assert segment.is_free()
    array = segment.fill()
    assert not segment.is_free()
    segment.sent = True
    del array
    assert not segment.is_free()


@pytest.mark.parametrize(
    ("context", "labels", "collate"),
    [("fork", None, True), ("fork", "labels", False), ("forkserver", "labels", True), ("fork", None, False)],
)
def test_workers_batches_stay_right_while_held(pack: Path, context: str, labels: str | None, collate: bool) -> None:
    dataset = h5pack.H5Dataset(pack, labels=labels)
    expected = [dataset[index] for index in range(len(dataset))]
    loader = DataLoader(
        dataset,
        batch_size=8,
        num_workers=2,
        multiprocessing_context=context,
        persistent_workers=True,
        collate_fn=dataset.collate if collate else None,
    )
    before = None
    for epoch in range(3):
        held = []
        for number, batch in enumerate(loader):
            if epoch == 1 and number == 2:
                break
            held.append(batch)
        for number, batch in enumerate(held):
            images = batch if labels is None else batch[0]
            for place in range(len(images)):
                sample = expected[number * 8 + place]
                assert torch.equal(images[place], sample if labels is None else sample[0])
                assert labels is None or batch[1][place] == sample[1]
        del held, batch, images
        gc.collect()
        before = before or descriptors()
    assert descriptors() <= before


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
