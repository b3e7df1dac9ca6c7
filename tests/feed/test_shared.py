"""Batches from workers: their memory is used again when, and only when, the main process is done with it."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import h5pack
from h5pack.errors import LoaderError
from h5pack.feed.shared import Segment, SharedBatch, SharedMemory
from tests.makers import class_folders, quick

SHAPES: list[tuple[tuple[int, ...], str]] = [((4, 5, 3), "|u1"), ((4,), "int64")]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    h5pack.convert(class_folders(folder / "in", {"a": 40, "b": 35}), folder / "o.h5", quick(chunk_rows=5))
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


def test_memory_is_used_again_when_the_receiver_is_done() -> None:
    memory = SharedMemory()
    addresses = []
    for value in range(6):
        batch = memory.take(SHAPES)
        fill(batch, value)
        addresses.append(batch[0].data_ptr())
        received = send(batch)
        del batch
        assert isinstance(received, list)
        assert [tensor.shape for tensor in received] == [(4, 5, 3), (4,)]
        assert all((tensor == value).all() for tensor in received)
        del received
    assert len(set(addresses)) == 1


def test_memory_is_not_used_while_any_view_of_it_lives() -> None:
    memory = SharedMemory()
    held = []
    for value in range(5):
        batch = memory.take(SHAPES)
        fill(batch, value)
        images, labels = send(batch)
        # A view of either part keeps both.
        held.append(images[2:, 1].numpy() if value % 2 else labels[1:])
        del batch, images, labels
        gc.collect()
    for value, view in enumerate(held):
        assert (np.asarray(view) == value).all()


def test_memory_is_not_used_while_the_worker_looks_at_it() -> None:
    memory = SharedMemory()
    first = memory.take(SHAPES)
    fill(first, 1)
    kept = first[0][1]
    received = send(first)
    del received, first
    second = memory.take(SHAPES)
    fill(second, 2)
    assert (kept == 1).all()


def test_a_batch_that_never_left_gives_its_memory_back() -> None:
    memory = SharedMemory()
    address = memory.take(SHAPES)[0].data_ptr()
    assert memory.take(SHAPES)[0].data_ptr() == address


def test_a_changed_batch_crosses_as_ordinary_tensors() -> None:
    memory = SharedMemory()
    batch = memory.take(SHAPES)
    fill(batch, 3)
    batch[0] = batch[0].float() / 2
    found = batch.__reduce__()
    assert found[0] is list
    assert torch.equal(found[1][0][0], torch.full((4, 5, 3), 1.5))


def reshape(batch: SharedBatch) -> None:
    batch[0].unsqueeze_(1)


def replace_data(batch: SharedBatch) -> None:
    batch[0].data = batch[0].clone()


@pytest.mark.parametrize("change", [reshape, replace_data])
def test_a_batch_changed_in_place_crosses_as_ordinary_tensors(change: Callable[[SharedBatch], None]) -> None:
    batch = SharedMemory().take(SHAPES)
    fill(batch, 3)
    change(batch)
    rebuild, (tensors,) = batch.__reduce__()
    assert rebuild is list
    assert tensors[0].shape == batch[0].shape
    single = SharedMemory().take(SHAPES[:1]).single()
    single.unsqueeze_(0)
    assert single.__reduce_ex__(4)[1][0].shape == (1, 4, 5, 3)


def test_copies_in_the_worker_leave_the_batch_alone() -> None:
    memory = SharedMemory()
    batch = memory.take(SHAPES)
    fill(batch, 4)
    deep, shallow = copy.deepcopy(batch), copy.copy(batch)
    assert (type(deep), type(shallow)) == (list, list)
    received = send(batch)
    assert batch.__reduce__()[0] is list, "it is on its way already"
    del deep, shallow, batch
    fill(memory.take(SHAPES), 5)
    assert (received[0] == 4).all()
    tensor = SharedMemory().take(SHAPES[:1]).single()
    assert type(copy.deepcopy(tensor)) is type(copy.copy(tensor)) is torch.Tensor


def test_a_forked_child_gives_nothing_back() -> None:
    memory = SharedMemory()
    batch = memory.take(SHAPES)
    fill(batch, 6)
    received = send(batch)
    del batch
    child = os.fork()
    if child == 0:
        del received
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    fill(memory.take(SHAPES), 7)
    assert (received[0] == 6).all()


def test_many_that_were_held_are_not_kept_for_ever() -> None:
    memory = SharedMemory()
    held = [send(memory.take(SHAPES)) for _ in range(20)]
    assert len(memory._segments) == 20
    del held
    memory.take(SHAPES)
    assert len(memory._segments) <= 5


def test_one_tensor_alone() -> None:
    memory = SharedMemory()
    tensor = memory.take(SHAPES[:1]).single()
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
        memory.take([((rows, 50), "|u1")])
    # A memory file and its mapping.
    assert descriptors() == before + 2
    del memory
    gc.collect()
    assert descriptors() == before


def test_neither_a_pickle_nor_a_fork_takes_segments_along() -> None:
    memory = SharedMemory()
    address = memory.take(SHAPES)[0].data_ptr()
    assert pickle.loads(pickle.dumps(memory))._segments == []
    child = os.fork()
    if child == 0:
        fill(memory.take(SHAPES), 7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    again = memory.take(SHAPES)
    assert again[0].data_ptr() == address
    assert not (again[0] == 7).any()


def test_a_worker_that_died_is_named() -> None:
    batch = SharedMemory().take(SHAPES)
    rebuild, (_, descriptor, shapes, single) = batch.__reduce__()
    with pytest.raises(LoaderError, match="a worker's batch cannot be reached at /proc/999999999/fd"):
        rebuild(999_999_999, descriptor, shapes, single)


def test_a_segment_is_free_only_when_it_was_given_back() -> None:
    segment = Segment(100)
    assert segment.is_free()
    array = segment.fill()
    assert not segment.is_free()
    segment.sent = True
    del array
    assert not segment.is_free()


@pytest.mark.parametrize(
    ("context", "labels", "collate"),
    [
        *itertools.product(["fork", "forkserver"], [None, "labels"], [True, False]),
        ("spawn", None, True),
        ("spawn", "labels", False),
    ],
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
    for epoch in range(4):
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
    del loader


def test_workers_use_their_memory_again(pack: Path) -> None:
    dataset = h5pack.H5Dataset(pack)
    inodes = Inodes(dataset)
    loader = DataLoader(dataset, batch_size=5, num_workers=1, collate_fn=inodes)
    seen = [int(batch[0]) for batch in loader]
    assert len(seen) == 15
    assert max(seen) <= 5, "segments of a worker whose batches are dropped at once"


class Inodes:
    """Collates, drops the batch's name, and tells how many segments the worker has."""

    def __init__(self, dataset: h5pack.H5Dataset) -> None:
        self.dataset = dataset

    def __call__(self, samples: Any) -> Any:
        batch = self.dataset.collate(samples)
        return torch.tensor(len(self.dataset._shared._segments)), batch
