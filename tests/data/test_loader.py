"""`H5Loader`: the batches of a DataLoader over the same order, from threads that end when they should."""

from __future__ import annotations

import bisect
import contextlib
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset, random_split

import h5pack
from h5pack.errors import (
    DamagedRowsError,
    H5PackError,
    LoaderError,
    OptionsError,
    PackChangedError,
    StateError,
)
from h5pack.system.memory import huge_page_memory
from tests.data import packs
from tests.data.packs import all_same, loader_threads, reference, same, threads_end
from tests.stacks import watched

BATCH = 12
REPOSITORY = Path(__file__).parents[2]
RESIDENT = ["no", "host", "auto"]
WAYS = [("no", 1), ("host", 3), ("auto", 2)]
"""`resident` and number of threads."""

ORDERS: dict[str, dict[str, Any]] = {
    "window": {},
    "true": {"shuffle": True},
    "window of 1": {"window": 1},
    "window of all": {"window": 100},
    "full": {"shuffle": "full"},
    "chunk": {"shuffle": "chunk"},
    "stored": {"shuffle": False},
    "drop_last": {"drop_last": True},
    "streams": {"streams": 4},
    "streams and lanes": {"streams": 12, "lanes": 2},
    "full, lanes": {"shuffle": "full", "streams": 3, "lanes": 3},
    "stored, lanes, drop_last": {"shuffle": False, "streams": 4, "lanes": 2, "drop_last": True},
    "a rank": {"rank": 1, "num_replicas": 2, "streams": 4},
    "a rank, drop_last": {"rank": 2, "num_replicas": 3, "drop_last": True},
    "rows": {"indices": [5, 99, 3, 60, 60, 61, 7, -1, 20, 21, 22, 23, 24, 77, 5]},
    "one row": {"indices": [42]},
    "no rows": {"indices": []},
    "large batches": {"batch_size": 500},
    "single rows": {"batch_size": 1, "indices": list(range(0, 100, 7))},
}


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    with watched():
        yield
    assert threads_end(), loader_threads()


@pytest.fixture
def dataset(tmp_path: Path) -> h5pack.H5Dataset:
    return h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5"))


def loader_of(dataset: Any, **settings: Any) -> h5pack.H5Loader:
    return h5pack.H5Loader(dataset, **{"batch_size": BATCH, "window": 3, "seed": 7, **settings})


def order_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {"batch_size": BATCH, "window": 3, "seed": 7, **settings}


# The batches.


@pytest.mark.parametrize("order", ORDERS)
def test_batches_are_those_of_a_dataloader(dataset: h5pack.H5Dataset, order: str) -> None:
    settings = ORDERS[order]
    expected = reference(dataset, 3, **order_of(settings))
    for resident, threads in WAYS:
        loader = loader_of(dataset, resident=resident, num_threads=threads, **settings)
        for epoch in range(3):
            assert len(loader) == len(expected[epoch])
            assert all_same(list(loader), expected[epoch])
            assert loader.epoch == epoch


def kinds() -> dict[str, dict[str, Any]]:
    """Files of all kinds: the arguments of `packs.write`."""
    rows, shape = packs.ROWS, packs.SHAPE
    image, label = packs.values(), np.arange(rows)
    return {
        "gzip": {"compression": "gzip", "images": image, "labels": label},
        "cut rows": {"chunks": (10, 8, 12, 2), "images": image, "labels": label},
        "contiguous": {"chunks": None, "images": image, "labels": label},
        "big-endian": {"images": packs.values(dtype=">u2"), "labels": label.astype(">i4")},
        "big-endian, gzip": {"images": packs.values(dtype=">u2"), "labels": label.astype(">i4"), "compression": "gzip"},
        "float": {"images": packs.values(dtype="f4"), "labels": label},
        "big-endian float": {"images": packs.values(dtype=">f8"), "labels": np.linspace(0, 1, rows).astype(">f4")},
        "bool": {"images": packs.values(dtype="?"), "labels": label % 2 == 0},
        "small rows": {"images": packs.values(shape=(5, 3)), "labels": label.astype("u1")},
        "small big-endian rows": {"images": packs.values(shape=(5, 3), dtype=">u2"), "labels": label},
        "single numbers": {"images": packs.values(shape=(), dtype="f4"), "labels": label},
        "table": {"images": image, "labels": packs.values(shape=(40,), dtype="i1")},
        "large table": {"images": image, "labels": packs.values(shape=(300,), dtype=">f4")},
        "no labels": {"images": image},
        "fields": {
            "images": image,
            "labels": label,
            "boxes": packs.values(shape=(4,), dtype="f4"),
            "masks": packs.values(shape=shape[:2], dtype="?"),
            "large": packs.values(shape=(99,), dtype=">f8"),
        },
        "fields, no labels": {"images": image, "boxes": packs.values(shape=(4,), dtype=">f4")},
        "long chunks": {"chunks": 64, "images": image, "labels": label},
        "chunks of one row": {"chunks": 1, "images": image, "labels": label},
    }


KINDS = kinds()


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_all_kinds(tmp_path: Path, kind: str) -> None:
    file = KINDS[kind]
    path = packs.write(tmp_path / "f.h5", **file)
    fields = [name for name in ("boxes", "masks", "large") if name in file]
    for with_rows in (False, True):
        dataset = h5pack.H5Dataset(path, fields=fields, with_rows=with_rows)
        expected = reference(dataset, 3, **order_of({}))
        for resident, threads in WAYS:
            loader = loader_of(dataset, resident=resident, num_threads=threads)
            for epoch in expected:
                batches = list(loader)
                assert all_same(batches, epoch)
                assert isinstance(batches[0], torch.Tensor) == (len(dataset.names) + with_rows == 1)
    first = expected[0][0]
    assert np.array_equal(first[0].numpy(), file["images"][first[-1]]), "the reference itself is right"


def test_subsets_and_splits(tmp_path: Path) -> None:
    pack = packs.converted(tmp_path)
    whole = h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5"))
    one, other = random_split(whole, [70, 33], torch.Generator().manual_seed(3))
    nested = Subset(Subset(whole, range(90, 10, -1)), [5, 50, 6, 51, 6])
    chosen = {"indices": [3, 1, 4, 1, 5, 30]}
    for resident in RESIDENT:
        for dataset in (one, other, nested, Subset(whole, []), h5pack.H5Dataset(pack, "test", with_rows=True)):
            expected = reference(dataset, 2, **order_of({}))
            loader = loader_of(dataset, resident=resident)
            assert loader.dataset is dataset
            for epoch in expected:
                assert all_same(list(loader), epoch)
        expected = reference(other, 1, **order_of(chosen))
        assert all_same(list(loader_of(other, resident=resident, **chosen)), expected[0])
    seen = torch.cat([labels for part in (one, other) for _, labels in loader_of(part)])
    assert sorted(seen.tolist()) == list(range(packs.ROWS))


@pytest.mark.parametrize(("name", "row"), [("images", 12), ("labels", 30)])
@pytest.mark.parametrize("resident", RESIDENT)
def test_damaged_rows_are_never_delivered(tmp_path: Path, resident: str, name: str, row: int) -> None:
    path = packs.converted(tmp_path)
    expected = reference(h5pack.H5Dataset(path), 2, **order_of({}))
    loader = loader_of(h5pack.H5Dataset(path, check=True), resident=resident)
    assert [all_same(list(loader), epoch) for epoch in expected] == [True, True]
    packs.flip(path, row, name)
    loader = loader_of(h5pack.H5Dataset(path, check=True), resident=resident)
    for _ in range(3):
        with pytest.raises(DamagedRowsError) as caught:
            list(loader)
        assert caught.value.rows == (row,)
    assert len(list(loader_of(h5pack.H5Dataset(path), resident=resident))) == 4, "check was not requested"


def test_one_read_a_chunk(dataset: h5pack.H5Dataset) -> None:
    for epoch in range(1, 4):
        list(loader_of(dataset, resident="no"))
        stats = dataset.stats()
        assert stats.rows == epoch * packs.ROWS
        assert stats.chunk_misses == epoch * 11
        assert stats.amplification == 1.0
    rows = dataset.stats().rows
    loader = loader_of(dataset, resident="host")
    assert loader.stats() == dataset.stats()
    for _ in range(3):
        list(loader)
    assert loader.stats().rows == rows + packs.ROWS, "what is kept is read once"
    auto = loader_of(dataset, resident="auto")
    for _ in range(4):
        list(auto)
    assert auto.stats().rows == rows + 3 * packs.ROWS, "auto reads the first epoch, and reads the second to keep it"


# Memory.


def least_memory(dataset: h5pack.H5Dataset, **settings: Any) -> int:
    """The smallest `memory_bytes` that a loader accepts."""

    def is_enough(memory_bytes: int) -> bool:
        with contextlib.suppress(OptionsError):
            loader_of(dataset, memory_bytes=memory_bytes, **settings)
            return True
        return False

    return bisect.bisect_left(range(10**8), True, key=is_enough)


@pytest.mark.parametrize("order", ORDERS)
def test_the_least_memory_is_enough(dataset: h5pack.H5Dataset, order: str) -> None:
    expected = reference(dataset, 2, **order_of(ORDERS[order]))
    least = {}
    for resident in RESIDENT:
        settings = {**ORDERS[order], "resident": resident}
        least[resident] = least_memory(dataset, **settings)
        loader = loader_of(dataset, memory_bytes=least[resident], **settings)
        assert loader.memory_bytes <= least[resident]
        assert [all_same(list(loader), epoch) for epoch in expected] == [True, True]
    assert least["no"] == least["auto"] <= least["host"]


def test_no_more_memory_is_taken_than_was_given(dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    from h5pack.data import buffers as memory
    from h5pack.data import resident

    taken: list[int] = []

    def counted(size: int) -> Any:
        taken.append(size)
        return huge_page_memory(size)

    monkeypatch.setattr(memory, "huge_page_memory", counted)
    monkeypatch.setattr(resident, "huge_page_memory", counted)
    for given, kept in itertools.product((100_000, 101_000, 110_000, 170_000, 200_000, 10**7), RESIDENT):
        taken.clear()
        try:
            loader = loader_of(dataset, window=2, memory_bytes=given, resident=kept)
        except OptionsError:
            assert kept == "host" or given < 110_000
            continue
        assert loader.memory_bytes <= given
        for _ in range(3):
            for batch in loader:
                time.sleep(0.001)
                del batch
        assert sum(taken) <= loader.memory_bytes, "batches are used again, and the rows are kept once"


def test_memory_is_half_of_what_there_is_shared_by_the_ranks(
    dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("h5pack.data.loader.available_memory", lambda: 2_000_000)
    assert loader_of(dataset).resident
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "24")
    loader = loader_of(dataset, window=1)
    assert not loader.resident
    assert loader.memory_bytes <= 1_000_000 // 24
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "80")
    with pytest.raises(OptionsError, match="12,500"):
        loader_of(dataset)


def test_batches_are_the_consumers_for_as_long_as_it_holds_them(dataset: h5pack.H5Dataset) -> None:
    expected = reference(dataset, 4, **order_of({}))
    for resident in RESIDENT:
        loader = loader_of(dataset, resident=resident, memory_bytes=400_000)
        held = [batch for _ in range(4) for batch in loader]
        assert all_same(held, list(itertools.chain(*expected)))
        views = [images[:, 3].numpy() for images, _ in held]
        del held
        list(loader)
        loader.close()
        list(loader)
        for view, (images, _) in zip(views, itertools.chain(*expected), strict=True):
            assert np.array_equal(view, images[:, 3].numpy())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_pinned_memory_needs_a_gpu(dataset: h5pack.H5Dataset) -> None:
    with pytest.warns(UserWarning, match="pin_memory") as caught:
        loader = h5pack.H5Loader(dataset, BATCH, pin_memory=True)
    assert caught[0].filename == __file__
    assert not loader.pin_memory
    assert len(list(loader)) == 9


SOME_KINDS = ["gzip", "big-endian", "small rows", "fields"]


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_batches_in_torchs_own_memory(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `pin_memory`, but for the pinning."""
    asked: list[bool] = []
    empty = torch.empty

    def pageable(*size: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*size, **settings)

    dataset = h5pack.H5Dataset(packs.write(tmp_path / "f.h5", **KINDS[kind]), with_rows=True)
    expected = reference(dataset, 3, **order_of({}))
    monkeypatch.setattr("h5pack.data.loader._can_pin", lambda: True)
    monkeypatch.setattr(torch, "empty", pageable)
    for resident in RESIDENT:
        loader = loader_of(dataset, pin_memory=True, resident=resident)
        found = [batch for _ in expected for batch in loader]
        assert all_same(found, list(itertools.chain(*expected)))
    assert asked.count(True) == 3 * 27


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_pinned_batches(tmp_path: Path, kind: str) -> None:
    path = packs.write(tmp_path / "f.h5", **KINDS[kind])
    dataset = h5pack.H5Dataset(path, with_rows=True)
    expected = reference(dataset, 3, **order_of({}))
    loader = loader_of(dataset, pin_memory=True)
    for epoch in expected:
        batches, copies = [], []
        for batch in loader:
            assert batch[0].is_pinned()
            copies.append([part.to("cuda", non_blocking=True) for part in batch])
            batches.append(batch)
        assert all_same(batches, epoch)
        torch.cuda.synchronize()
        assert all_same([[part.cpu() for part in batch] for batch in copies], epoch)


# Options.


def test_error_names_the_parameter_at_fault(dataset: h5pack.H5Dataset) -> None:
    changed = h5pack.H5Dataset(dataset.path, transform=lambda image: image)
    for other in (changed, Subset(changed, [1, 2]), h5pack.H5Dataset(dataset.path, target_transform=int)):
        with pytest.raises(OptionsError) as caught:
            loader_of(other)
        assert "transform=" in caught.value.parameters
    with pytest.raises(OptionsError) as caught:
        loader_of(TensorDataset(torch.zeros(3)))
    assert caught.value.parameters == ("dataset",)
    settings: list[dict[str, Any]] = [
        {"resident": "gpu"},
        {"num_threads": 0},
        {"num_threads": 2.5},
        {"memory_bytes": "1G"},
        {"batch_size": 0},
        {"shuffle": "some"},
        {"rank": 1},
        {"lanes": 2, "streams": 3},
        {"indices": [103]},
    ]
    for wrong in settings:
        with pytest.raises(OptionsError) as caught:
            loader_of(dataset, **wrong)
        assert set(caught.value.parameters) & set(wrong)
    assert not loader_threads()


def test_lengths_and_attributes(dataset: h5pack.H5Dataset) -> None:
    part = Subset(dataset, range(50))
    loader = loader_of(part, drop_last=True)
    assert (len(loader), loader.batch_size, loader.drop_last, loader.epoch) == (4, BATCH, True, 0)
    batches = iter(loader)
    next(batches)
    assert len(batches) == 3
    for text in ("H5Loader(", f"batch_size={BATCH}", "shuffle='window'", "seed=7", "window=3"):
        assert text in repr(loader)


def test_with_ends_the_threads_and_leaves_the_loader_usable(dataset: h5pack.H5Dataset) -> None:
    calls, released = itertools.count(), threading.Event()

    def held(images: torch.Tensor) -> torch.Tensor:
        """Let the first batch pass; otherwise the threads could be done before they are counted."""
        if next(calls):
            released.wait(60)
        return images

    with loader_of(dataset, num_threads=1, transform=held) as loader, iter(loader) as batches:
        next(batches)
        assert loader_threads()
        released.set()
    assert not loader_threads()
    with pytest.raises(LoaderError, match="closed"):
        next(batches)
    assert len(list(loader)) == len(loader)


@pytest.mark.parametrize("wanted", [1, 9, 12, 1_000])
def test_prefetch_factor_is_between_a_window_and_what_memory_allows(dataset: h5pack.H5Dataset, wanted: int) -> None:
    minimum = loader_of(dataset, resident="no", prefetch_factor=1).prefetch_factor
    loader = loader_of(dataset, resident="no", prefetch_factor=wanted, memory_bytes=10**6)
    if wanted < 1_000:
        assert loader.prefetch_factor == max(wanted, minimum)
    else:
        assert minimum < loader.prefetch_factor < wanted
    assert loader.memory_bytes <= 10**6
    assert all_same(list(loader), reference(dataset, 1, **order_of({}))[0])
    if wanted == 9:
        with iter(loader) as batches:
            while batches.waiting < 9:
                time.sleep(0.001)
            assert loader.queue_depth == 9
        assert loader.queue_depth == 0


# Transforms.


def test_transforms_are_given_whole_batches(dataset: h5pack.H5Dataset) -> None:
    names = set()

    def scaled(images: torch.Tensor) -> torch.Tensor:
        names.add(threading.current_thread().name)
        assert images.dtype == torch.uint8
        return images.permute(0, 3, 1, 2).float() / 255

    def doubled(labels: torch.Tensor) -> torch.Tensor:
        assert labels.dtype == torch.int64
        return labels.mul_(2)

    expected = reference(dataset, 3, **order_of({}))
    for resident in RESIDENT:
        loader = loader_of(dataset, resident=resident, transform=scaled, target_transform=doubled)
        for epoch in expected:
            for (images, labels), (plain, numbers) in zip(loader, epoch, strict=True):
                assert torch.equal(images, plain.permute(0, 3, 1, 2).float() / 255)
                assert torch.equal(labels, numbers * 2)
    assert all(name.startswith("h5pack-read-") for name in names)


class Noise(torch.nn.Module):
    """Random, from the generator that it is given."""

    def __call__(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return images + torch.randint(0, 100, images.shape, generator=generator, dtype=torch.uint8)


def test_a_seeded_transform_is_the_same_in_every_run(dataset: h5pack.H5Dataset) -> None:
    def noisy(labels: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
        return labels + torch.randint(0, 1000, labels.shape, generator=generator)

    settings: dict[str, Any] = {"transform": Noise(), "target_transform": noisy}
    first = loader_of(dataset, num_threads=1, **settings)
    epochs = [list(first) for _ in range(2)]
    states = []
    loader = loader_of(dataset, num_threads=3, resident="host", **settings)
    for epoch in epochs:
        for batch, other in zip(loader, epoch, strict=True):
            assert same(batch, other)
            states.append(loader.state_dict())
    resumed = loader_of(dataset, num_threads=2, **settings)
    resumed.load_state_dict(states[12])
    assert all_same(list(resumed), epochs[1][4:])
    plain = reference(dataset, 2, **order_of({}))
    noise = [epochs[at][batch][0] - plain[at][batch][0] for at, batch in ((0, 0), (0, 1), (1, 0))]
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])
    other_seed = loader_of(dataset, seed=8, shuffle=False, **settings)
    same_order = loader_of(dataset, shuffle=False, **settings)
    assert not same(next(iter(other_seed)), next(iter(same_order)))


def test_a_stop_iteration_of_a_transform_is_an_error_and_no_end_of_the_epoch(dataset: h5pack.H5Dataset) -> None:
    def exhausted(images: torch.Tensor) -> torch.Tensor:
        return next(iter(()))

    loader = loader_of(dataset, transform=exhausted)
    with pytest.raises(LoaderError) as caught:
        list(loader)
    assert isinstance(caught.value.__cause__, StopIteration)
    assert loader.state_dict()["epoch"] == 0


@pytest.mark.parametrize(("where", "resident"), [("transform", "no"), ("target_transform", "host")])
def test_an_error_in_a_transform_reaches_the_consumer(dataset: h5pack.H5Dataset, resident: str, where: str) -> None:
    calls = itertools.count()

    def broken(part: torch.Tensor) -> torch.Tensor:
        if next(calls) == 4:
            raise ArithmeticError("on purpose")
        return part

    loader = loader_of(dataset, resident=resident, **{where: broken})
    batches = iter(loader)
    with pytest.raises(ArithmeticError) as caught:
        list(batches)
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert threads_end()
    for _ in range(2):
        with pytest.raises(LoaderError):
            next(batches)
    assert len(list(loader)) == 9, "the loader goes on with the next epoch"


# Iterations.


def test_each_iteration_is_the_next_epoch_unless_set_epoch_chose_another(dataset: h5pack.H5Dataset) -> None:
    expected = reference(dataset, 5, **order_of({}))
    loader = loader_of(dataset)
    assert all_same(list(loader), expected[0])
    loader.set_epoch(2)
    assert all_same(list(loader), expected[2])
    for batch in loader:
        assert same(batch, expected[3][0])
        break
    assert all_same(list(loader), expected[4]), "an epoch that was abandoned is over"


def test_several_iterators_at_once(dataset: h5pack.H5Dataset) -> None:
    expected = reference(dataset, 6, **order_of({}))
    for resident in RESIDENT:
        loader = loader_of(dataset, resident=resident)
        for one, other in zip(zip(loader, loader, strict=True), zip(*expected[:2], strict=True), strict=True):
            assert same(one[0], other[0])
            assert same(one[1], other[1])
        running = [iter(loader) for _ in range(4)]
        random = np.random.default_rng(1)
        found: list[list[Any]] = [[], [], [], []]
        while min(map(len, found)) < 9:
            place = int(random.choice([place for place in range(4) if len(found[place]) < 9]))
            found[place].append(next(running[place]))
        for place in range(4):
            assert all_same(found[place], expected[2 + place])


@pytest.mark.parametrize("kind", ["big-endian", "gzip"])
def test_several_iterators_load_the_same_rows(tmp_path: Path, kind: str) -> None:
    dataset = h5pack.H5Dataset(packs.write(tmp_path / "f.h5", **KINDS[kind]))
    expected = reference(dataset, 3, **order_of({}))
    for _ in range(4):
        loader = loader_of(dataset, resident="host")
        for batches in zip(zip(loader, loader, loader, strict=True), zip(*expected, strict=True), strict=True):
            assert all_same(*batches)


def test_an_iterator_that_was_left_ends_its_threads(tmp_path: Path) -> None:
    dataset = h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5", 1_000))
    loader = loader_of(dataset)
    for _ in loader:
        assert loader_threads()
        break
    assert threads_end()
    batches = iter(loader)
    next(batches)
    assert loader_threads()
    del batches
    assert threads_end()
    batches = iter(loader)
    del loader
    assert len(list(batches)) == 84, "it does not need the loader's variable"


def test_the_end_stays_the_end(dataset: h5pack.H5Dataset) -> None:
    batches = iter(loader_of(dataset))
    assert iter(batches) is batches
    assert len([*batches]) == 9
    assert not loader_threads(), "the threads end with the last batch"
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(batches)
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)


def test_what_was_closed_is_not_taken_for_finished(dataset: h5pack.H5Dataset) -> None:
    expected = reference(dataset, 3, **order_of({}))
    loader = loader_of(dataset, resident="host")
    one, other = iter(loader), iter(loader)
    held = next(one)
    one.close()
    with pytest.raises(LoaderError, match="closed"):
        next(one)
    assert same(next(other), expected[1][0])
    loader.close()
    assert not loader_threads()
    for batches in (one, other):
        for _ in range(2):
            with pytest.raises(LoaderError, match="closed"):
                next(batches)
    assert same(held, expected[0][0])
    assert all_same(list(loader), expected[2]), "a loader may be used after close"
    loader.close()
    loader.close()


@pytest.mark.parametrize("how", ["close", "close the iterator", "run out", "error", "forget"])
def test_no_memory_waits_for_the_garbage_collector(dataset: h5pack.H5Dataset, how: str) -> None:
    """Even while the iterator that was closed is held."""
    calls = itertools.count()

    def broken(images: torch.Tensor) -> torch.Tensor:
        if next(calls) == 2 and how == "error":
            raise ArithmeticError("on purpose")
        return images

    loader = loader_of(dataset, num_threads=3, transform=broken)
    gc.collect()
    gc.disable()
    try:
        batches: Any = iter(loader)
        watch = weakref.ref(batches._pipeline)
        assert watch() is not None
        time.sleep(0.02)
        if how == "close":
            loader.close()
        elif how == "close the iterator":
            next(batches)
            batches.close()
        elif how == "run out":
            assert len(list(batches)) == 9
        elif how == "forget":
            del batches
        else:
            with contextlib.suppress(ArithmeticError):
                list(batches)
        assert threads_end()
        assert watch() is None
    finally:
        gc.enable()


def test_a_close_from_another_thread_wakes_the_consumer(dataset: h5pack.H5Dataset) -> None:
    hold = threading.Event()

    def slow(images: torch.Tensor) -> torch.Tensor:
        hold.wait(30)
        return images

    loader = loader_of(dataset, transform=slow)
    batches = iter(loader)
    closer = threading.Timer(0.1, loader.close)
    closer.start()
    with pytest.raises(LoaderError, match="closed"):
        next(batches)
    hold.set()
    closer.join()


# States.


@pytest.mark.parametrize(
    ("order", "resident"),
    [
        *(("window", "no"), ("full", "host"), ("streams and lanes", "no"), ("stored, lanes, drop_last", "host")),
        *(("a rank", "no"), ("rows", "host")),
    ],
)
def test_a_state_saved_at_any_batch_gives_the_same_tail(dataset: h5pack.H5Dataset, order: str, resident: str) -> None:
    settings = {**ORDERS[order], "resident": resident}
    expected = list(itertools.chain(*reference(dataset, 2, **order_of(ORDERS[order]))))
    loader = loader_of(dataset, **settings)
    size = len(loader)
    states = [loader.state_dict()]
    for _ in range(2):
        for _ in loader:
            states.append(loader.state_dict())
    assert len(states) == 2 * size + 1
    for done, state in enumerate(states):
        resumed = loader_of(dataset, **{**settings, "num_threads": 1 + done % 3})
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.state_dict() == state
        # The last state of an epoch has nothing left of it.
        found = [*resumed, *(resumed if done <= size else ())]
        assert all_same(found, expected[done : done + len(found)])
        assert len(found) == (2 * size - done if done < size or done > size else size)


def test_a_state_at_the_end_of_an_epoch(dataset: h5pack.H5Dataset) -> None:
    expected = reference(dataset, 3, **order_of({}))
    loader = loader_of(dataset)
    iterator = iter(loader)
    for _ in range(len(loader)):
        next(iterator)
    inside = loader.state_dict()
    assert next(iterator, None) is None
    behind = loader.state_dict()
    assert (inside["epoch"], inside["batches"]) == (0, len(loader))
    assert (behind["epoch"], behind["batches"]) == (1, 0)
    resumed = loader_of(dataset)
    resumed.load_state_dict(inside)
    assert list(resumed) == [], "the loop over the epoch that was saved has nothing left"
    assert all_same(list(resumed), expected[1])
    resumed.load_state_dict(behind)
    assert all_same(list(resumed), expected[1]), "the loop was over, so the next one is the next epoch"
    for state in (inside, behind):
        resumed.load_state_dict(state)
        resumed.set_epoch(1)
        assert all_same(list(resumed), expected[1])
    resumed.load_state_dict(inside)
    resumed.set_epoch(2)
    assert all_same(list(resumed), expected[2])


def test_a_state_of_another_order_is_refused(dataset: h5pack.H5Dataset) -> None:
    state = loader_of(dataset).state_dict()
    for settings in (
        *({"seed": 8}, {"window": 4}, {"shuffle": "full"}, {"batch_size": 6}, {"drop_last": True}, {"streams": 2}),
        *({"indices": range(103)}, {"rank": 0, "num_replicas": 2}),
    ):
        with pytest.raises(StateError):
            loader_of(dataset, **settings).load_state_dict(state)
    for wrong in ({}, {**state, "batches": "many"}, {"epoch": 1, "batches": 3}):
        with pytest.raises(StateError):
            loader_of(dataset).load_state_dict(wrong)


# The file under it.


@pytest.mark.parametrize(
    ("how", "resident"), [("cut", "no"), ("cut, gzip", "host"), ("replaced", "no"), ("removed", "host")]
)
def test_a_file_that_changes_during_an_epoch_is_an_error(
    tmp_path: Path, how: str, resident: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packs.labelled(tmp_path / "f.h5", 600, compression="gzip" if "gzip" in how else None)
    loader = loader_of(h5pack.H5Dataset(path), resident=resident, memory_bytes=10**6)
    batches = iter(loader)
    next(batches)
    monkeypatch.setattr("h5pack.read.storage.CHECK_SECONDS", 0)
    monkeypatch.setattr("h5pack.read.storage._RETRY_SECONDS", (0.0,))
    if "cut" in how:
        os.truncate(path, 9_000)
    elif how == "replaced":
        os.replace(packs.labelled(tmp_path / "g.h5", 601), path)
    else:
        path.unlink()
    with pytest.raises(H5PackError):
        list(batches)
    assert threads_end()
    with pytest.raises(PackChangedError):
        iter(loader)


# Processes.


def in_a_child(work: Callable[[], None]) -> str:
    """Run `work` in a forked child; what went wrong there, or nothing."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(30)
            work()
            text = ""
        except BaseException:
            text = traceback.format_exc()
        os.write(into, text.encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return text or ("" if status == 0 else f"the child ended with {status}")


@pytest.mark.parametrize(("resident", "compression"), [("no", "gzip"), ("host", None)])
def test_a_forked_child_starts_from_scratch(tmp_path: Path, resident: str, compression: str | None) -> None:
    dataset = h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5", compression=compression))
    expected = reference(dataset, 3, **order_of({}))
    loader = loader_of(dataset, resident=resident)
    batches = iter(loader)
    held = [next(batches), next(batches)]

    def work() -> None:
        with pytest.raises(LoaderError):
            next(batches)
        assert all_same(held, expected[0][:2])
        assert all_same(list(loader), expected[1])
        left = iter(loader)
        assert same(next(left), expected[2][0])
        batches.close()
        loader.close()
        assert threads_end()
        assert all_same(held, expected[0][:2])

    assert in_a_child(work) == ""
    assert all_same([*held, *batches], expected[0]), "the parent does not notice"
    assert all_same(list(loader), expected[1])


def test_a_fork_at_any_moment(dataset: h5pack.H5Dataset) -> None:
    expected = reference(dataset, 10, **order_of({}))
    loader = loader_of(dataset, num_threads=3)
    for epoch in range(9):
        loader.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(epoch):
            next(batches)

        def work(epoch: int = epoch) -> None:
            assert all_same(list(loader), expected[epoch + 1])

        assert in_a_child(work) == ""
        assert all_same(list(batches), expected[epoch][epoch:])


def script(path: Path, body: str) -> list[str]:
    """Run `body` with a loader; say at the very end which of its threads are left."""
    head = f"import sys, time, h5pack\nloader = h5pack.H5Loader(h5pack.H5Dataset({str(path)!r}), 12, window=3)\n"
    return [sys.executable, "-c", LAST_WORDS + head + body]


LAST_WORDS = """
import atexit, threading
def report():
    print("left:", *[thread.name for thread in threading.enumerate() if thread.name.startswith("h5pack-")])
atexit.register(report)  # What is registered first is called last.
"""


BODIES = {
    "awaiting a batch": (
        "slow = h5pack.H5Loader(loader.dataset, 12, window=3, transform=lambda x: time.sleep(0.2) or x)\n"
        "print('ready', flush=True)\nwhile True:\n    for batch in slow: pass\n"
    ),
    "with iterators held": (
        "held = [iter(loader) for _ in range(3)]\nfirst = [next(batches) for batches in held]\n"
        "print('ready', flush=True)\nwhile True: time.sleep(60)\n"
    ),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_control_c_ends_the_process(tmp_path: Path, body: str) -> None:
    command = script(packs.labelled(tmp_path / "f.h5"), body)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPOSITORY, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "Exception ignored" not in errors
    assert errors.count("Traceback") == 1


HELD = """
class Cycle: pass
held = iter(loader)
sys.held = [iter(loader) for _ in range(3)]
cycle = Cycle()
cycle.cycle, cycle.batches = cycle, iter(loader)
first = [next(batches) for batches in (held, *sys.held, cycle.batches)]
report()
sys.exit(0)
"""


def test_unfinished_iterators_do_not_disturb_the_exit(tmp_path: Path) -> None:
    command = script(packs.labelled(tmp_path / "f.h5", 2000), HELD)
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    before, after = process.stdout.splitlines()
    assert before.startswith("left: h5pack-"), "otherwise the end proves nothing"
    assert after == "left:", "no thread reads while the interpreter is shut down"


def test_loaders_that_take_turns_share_memory(dataset: h5pack.H5Dataset) -> None:
    orders = [{"shuffle": "full"}, {}, {"shuffle": False}]
    loaders = [loader_of(dataset, resident="no", **order) for order in orders]
    assert loaders[1].use_memory_of(loaders[0])
    assert loaders[2].use_memory_of(loaders[1])
    loaders[0].prepare_memory()
    for epoch in range(2):
        for loader, order in zip(loaders, orders, strict=True):
            expected = reference(dataset, epoch + 1, **order_of(order))[epoch]
            assert all_same([[part.clone() for part in batch] for batch in loader], expected)
    assert not loaders[0].use_memory_of(loader_of(dataset, batch_size=BATCH + 1))
