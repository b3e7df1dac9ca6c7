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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import h5pack
from h5pack.data.buffers import BufferPool
from h5pack.data.chunk_groups import Block, GroupReader
from h5pack.data.gather import DecodedRows
from h5pack.data.iteration import IDLE
from h5pack.errors import DamagedRowsError, H5PackError, LoaderError, OptionsError, PackChangedError
from h5pack.system.files import make_hot
from h5pack.system.machine import huge_page_memory
from tests.data import packs
from tests.data.packs import all_same, loader_threads, reference, same, threads_end
from tests.read.encoded_files import decoded, jpegs, write_encoded
from tests.read.files import in_child

pytestmark = pytest.mark.usefixtures("no_thread_stays")

BATCH = 12
REPOSITORY = Path(__file__).parents[2]

ORDERS: dict[str, dict[str, Any]] = {
    **packs.ORDERS,
    "true": {"shuffle": True},
    "window of 1": {"window": 1},
    "window of all": {"window": 100},
    "stored, lanes, drop_last": {"shuffle": False, "streams": 4, "lanes": 2, "drop_last": True},
    "one row": {"indices": [42]},
    "no rows": {"indices": []},
    "large batches": {"batch_size": 500},
    "single rows": {"batch_size": 1, "indices": list(range(0, 100, 7))},
    **{f"weights, {name}": {"weights": packs.WEIGHTS, **one} for name, one in packs.ORDERS.items() if name != "rows"},
    "weights, rows": {**packs.ORDERS["rows"], "weights": [*range(15)]},
    "weights, one row": {"weights": [0] * 42 + [1] + [0] * 60},
    "weights, few samples": {"weights": packs.WEIGHTS, "num_samples": 3},
    "weights, many samples": {"weights": packs.WEIGHTS, "num_samples": 411},
}
RESUMED = ["window", "full", "streams and lanes", "stored, lanes, drop_last", "a rank", "rows"]
RESUMED += ["weights, window", "weights, full", "weights, streams and lanes"]


ORDER = {"batch_size": BATCH, "window": 3, "seed": 7}


def loader_of(dataset: Any, **settings: Any) -> h5pack.H5Loader:
    return h5pack.H5Loader(dataset, **{**ORDER, **settings})


def expected_of(dataset: Any, epochs: int = 3, **order: Any) -> list[list[Any]]:
    """The batches of each epoch that a DataLoader yields."""
    return reference(dataset, epochs, **{**ORDER, **order})


def require_epochs(loader: h5pack.H5Loader, expected: list[list[Any]]) -> None:
    for epoch in expected:
        assert all_same(list(loader), epoch)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_batches_are_those_of_a_dataloader(dataset: h5pack.H5Dataset, order: dict[str, Any], way: str) -> None:
    expected = expected_of(dataset, **order)

    def is_enough(memory_bytes: int) -> bool:
        with contextlib.suppress(OptionsError):
            loader_of(dataset, memory_bytes=memory_bytes, **order)
            return True
        return False

    enough = loader_of(dataset, **order).memory_bytes
    least = bisect.bisect_left(range(enough), True, key=is_enough)
    for memory_bytes, threads in ((None, 1), (least, 3)):
        loader = loader_of(dataset, num_threads=threads, memory_bytes=memory_bytes, **order)
        assert len(loader) == len(expected[0])
        assert memory_bytes is None or loader.memory_bytes <= memory_bytes
        require_epochs(loader, expected)
        assert loader.epoch == 2


IMAGES, NUMBERS, TABLE = packs.values(), np.arange(packs.ROWS), packs.values(shape=(4,), dtype="f4")
BIG_ENDIAN = {"images": packs.values(dtype=">u2"), "labels": NUMBERS.astype(">i4")}
MASKS, LARGE = packs.values(shape=packs.SHAPE[:2], dtype="?"), packs.values(shape=(99,), dtype=">f8")
KINDS: dict[str, dict[str, Any]] = {
    "gzip": {"compression": "gzip"},
    "cut rows": {"chunks": (10, 8, 12, 2)},
    "contiguous": {"chunks": None},
    "long chunks": {"chunks": 64},
    "chunks of one row": {"chunks": 1},
    "big-endian": BIG_ENDIAN,
    "big-endian, gzip": {**BIG_ENDIAN, "compression": "gzip"},
    "float": {"images": packs.values(dtype="f4")},
    "big-endian float": {"images": packs.values(dtype=">f8"), "labels": np.linspace(0, 1, packs.ROWS).astype(">f4")},
    "bool": {"images": packs.values(dtype="?"), "labels": NUMBERS % 2 == 0},
    "small rows": {"images": packs.values(shape=(5, 3)), "labels": NUMBERS.astype("u1")},
    "small big-endian rows": {"images": packs.values(shape=(5, 3), dtype=">u2")},
    "single numbers": {"images": packs.values(shape=(), dtype="f4")},
    "table": {"labels": packs.values(shape=(40,), dtype="i1")},
    "large table": {"labels": packs.values(shape=(300,), dtype=">f4")},
    "no labels": {"labels": None},
    "fields": {"boxes": TABLE, "masks": MASKS, "large": LARGE},
    "fields, no labels": {"labels": None, "boxes": TABLE.astype(">f4")},
    "encoded": {"size": (20, 14)},
    # Rows below 512 bytes take another way through the loader.
    "small encoded rows": {"size": (8, 6)},
}


def written(path: Path, kind: str) -> dict[str, Any]:
    """What is in the new file of this kind, by name."""
    file = {"images": IMAGES, "labels": NUMBERS, **KINDS[kind]}
    if "size" in file:
        rows = jpegs(packs.ROWS, file["size"])
        write_encoded(path, rows, chunks=(16,))
        return {"images": np.stack([decoded(row) for row in rows]), "labels": NUMBERS}
    if file["labels"] is None:
        del file["labels"]
    packs.write(path, **file)
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_all_kinds(tmp_path: Path, kind: str, way: str) -> None:
    file = written(tmp_path / "f.h5", kind)
    fields = [name for name in ("boxes", "masks", "large") if name in file]
    for with_rows, threads in ((False, 1), (True, 3)):
        dataset = h5pack.H5Dataset(tmp_path / "f.h5", fields=fields, with_rows=with_rows)
        expected = expected_of(dataset)
        assert [type(batch) for batch in loader_of(dataset)] == [type(expected[0][0])] * 9
        require_epochs(loader_of(dataset, num_threads=threads), expected)
    first = expected[0][0]
    assert np.array_equal(first[0].numpy(), file["images"][first[-1]]), "the reference itself is right"


def test_subsets_and_splits(tmp_path: Path) -> None:
    whole = h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5"))
    nested = Subset(Subset(whole, range(90, 10, -1)), [5, 50, 6, 51, 6, 7, 20])
    test = h5pack.H5Dataset(packs.converted(tmp_path), "test", with_rows=True)
    for dataset, chosen in ((nested, {"indices": [3, 1, 4, 1, 5]}), (Subset(whole, []), {}), (test, {})):
        loader = loader_of(dataset, **chosen)
        assert loader.dataset is dataset
        require_epochs(loader, expected_of(dataset, 2, **chosen))


@pytest.mark.parametrize(("name", "row"), [("images", 12), ("labels", 30)])
def test_damaged_rows_are_never_delivered(tmp_path: Path, way: str, name: str, row: int) -> None:
    path = packs.converted(tmp_path)
    expected = expected_of(h5pack.H5Dataset(path), 2)
    require_epochs(loader_of(h5pack.H5Dataset(path, check=True)), expected)
    packs.flip(path, row, name)
    loader = loader_of(h5pack.H5Dataset(path, check=True))
    for _ in range(3):
        with pytest.raises(DamagedRowsError) as caught:
            list(loader)
        assert caught.value.rows == (row,)
    assert len(list(loader_of(h5pack.H5Dataset(path)))) == 4, "check was not requested"


def test_one_read_a_chunk(dataset: h5pack.H5Dataset, way: str) -> None:
    for epoch in range(1, 4):
        list(loader_of(dataset))
        stats = dataset.stats()
        assert (stats.rows, stats.chunk_misses, stats.amplification) == (epoch * packs.ROWS, epoch * 11, 1.0)
    # Labels are read once for each loader.
    assert (stats.reads > 3) == (way == "read")


def test_no_more_memory_is_taken_than_was_given(
    dataset: h5pack.H5Dataset, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(
        "h5pack.data.buffers.huge_page_memory", lambda size: taken.append(size) or huge_page_memory(size)
    )
    for given in (100_000, 101_000, 110_000, 170_000, 200_000, 10**7):
        taken.clear()
        try:
            loader = loader_of(dataset, window=2, memory_bytes=given)
        except OptionsError:
            assert given < 110_000
            continue
        for _ in range(3):
            for batch in loader:
                time.sleep(0.001)
                del batch
        assert sum(taken) <= loader.memory_bytes <= given, "the memory of batches is used again"


def test_ranks_share_half_of_the_memory(dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.data.loader.available_memory", lambda: 2_000_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "24")
    assert loader_of(dataset, window=1).memory_bytes <= 1_000_000 // 24
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "80")
    for shuffle, advice in (("window", ["window"]), ("full", [])):
        with pytest.raises(OptionsError, match="12,500") as caught:
            loader_of(dataset, shuffle=shuffle)
        assert caught.value.parameters == ("memory_bytes", "batch_size", *advice)


@pytest.mark.parametrize("gpu", ["", "mps"])
def test_pinned_memory_needs_a_gpu(dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    for module in filter(None, (torch.cuda, getattr(torch, "accelerator", None), torch.backends.mps)):
        monkeypatch.setattr(module, "is_available", lambda: bool(gpu))
    with pytest.warns(UserWarning, match="pin_memory") as caught:
        loader = h5pack.H5Loader(dataset, BATCH, pin_memory=True)
    assert caught[0].filename == __file__
    assert not loader.pin_memory
    assert len(list(loader)) == 9


SOME_KINDS = ["gzip", "big-endian", "small rows", "fields"]


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_batches_in_torchs_own_memory(tmp_path: Path, kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `pin_memory`, but for the pinning."""
    asked: list[bool] = []
    empty = torch.empty

    def pageable(*size: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*size, **settings)

    written(tmp_path / "f.h5", kind)
    dataset = h5pack.H5Dataset(tmp_path / "f.h5", with_rows=True)
    expected = expected_of(dataset)

    prepare, prepared = BufferPool.prepare, [0]

    def counted(pool: BufferPool, *buffers: int) -> None:
        """Allocate buffers before the first batch."""
        before = len(asked)
        prepare(pool, *buffers)
        prepared[0] += len(asked) - before

    monkeypatch.setattr(BufferPool, "prepare", counted)
    monkeypatch.setattr("h5pack.data.loader.can_pin", lambda: True)
    monkeypatch.setattr(torch, "empty", pageable)
    loader = loader_of(dataset, pin_memory=True)
    assert all_same([batch for _ in expected for batch in loader], list(itertools.chain(*expected)))
    # Small batches that are in the page cache are allocated several at a time.
    assert 27 // 3 <= asked.count(True) - prepared[0] <= 27
    # If rows have to be read, all batches that may be open at a time. Otherwise, a few blocks of batches.
    few = min(loader._max_gathered + 2, (loader._pool.blocks or loader._pool).keep)
    reads = way == "read" and kind not in ("small rows", "gzip")
    assert prepared[0] - few in ({loader._pool.keep} if reads else {0, loader._pool.keep}), "pages may leave the cache"
    asked.clear()
    prepared[0] = 0
    monkeypatch.setattr("h5pack.data.loader._SMALL_BLOCK_BYTES", 1)
    loader = loader_of(dataset, pin_memory=True)
    assert all_same([batch for _ in expected for batch in loader], list(itertools.chain(*expected)))
    assert asked.count(True) == 27 + prepared[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_pinned_batches(tmp_path: Path, kind: str) -> None:
    written(tmp_path / "f.h5", kind)
    dataset = h5pack.H5Dataset(tmp_path / "f.h5", with_rows=True)
    loader = loader_of(dataset, pin_memory=True)
    for epoch in expected_of(dataset):
        batches, copies = [], []
        for batch in loader:
            assert batch[0].is_pinned()
            copies.append([part.to("cuda", non_blocking=True) for part in batch])
            batches.append(batch)
        assert all_same(batches, epoch)
        torch.cuda.synchronize()
        assert all_same([[part.cpu() for part in batch] for batch in copies], epoch)


def test_error_names_the_parameter_at_fault(dataset: h5pack.H5Dataset) -> None:
    changed = h5pack.H5Dataset(dataset.path, transform=lambda image: image)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (changed, {}, "transform="),
        (Subset(changed, [1, 2]), {}, "transform="),
        (h5pack.H5Dataset(dataset.path, target_transform=int), {}, "target_transform="),
        (TensorDataset(torch.zeros(3)), {}, "dataset"),
        (dataset, {"memory_bytes": "1G"}, "memory_bytes"),
        *((dataset, {"num_threads": 0}, "num_threads"), (dataset, {"num_threads": 2.5}, "num_threads")),
        (dataset, {"num_threads": 2**31}, "num_threads"),
        *((dataset, {"num_workers": 2}, "num_threads"), (dataset, {"transform": "flip"}, "transform")),
        *((dataset, {"batch_size": 0}, "batch_size"), (dataset, {"lanes": 2, "streams": 3}, "streams")),
    ]
    for source, settings, parameter in cases:
        with pytest.raises(OptionsError) as caught:
            loader_of(source, **settings)
        assert any(name.partition("=")[0] == parameter.rstrip("=") for name in caught.value.parameters)
    assert not loader_threads()


def test_lengths_and_attributes(dataset: h5pack.H5Dataset) -> None:
    loader = loader_of(Subset(dataset, range(50)), drop_last=True)
    assert (len(loader), loader.batch_size, loader.drop_last, loader.epoch) == (4, BATCH, True, 0)
    batches = iter(loader)
    next(batches)
    assert len(batches) == 3
    assert f"batch_size={BATCH}, shuffle='window', seed=7, window=3" in repr(loader)
    for part in (loader_of(dataset, indices=range(9)), loader_of(Subset(dataset, range(9)))):
        assert f"({dataset!r}, 9 of them, batch_size=" in repr(part)


@pytest.mark.parametrize("wanted", [1, 9, 12, 1_000])
def test_prefetch_factor_is_between_a_window_and_what_memory_allows(
    dataset: h5pack.H5Dataset, wanted: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    minimum = loader_of(dataset, prefetch_factor=1).prefetch_factor
    loader = loader_of(dataset, num_threads=2, prefetch_factor=wanted, memory_bytes=10**6)
    most = loader_of(dataset, prefetch_factor=1_000, memory_bytes=10**6).prefetch_factor
    assert minimum < most < 1_000
    assert loader.prefetch_factor == min(max(wanted, minimum), most)
    assert loader.memory_bytes <= 10**6
    require_epochs(loader, expected_of(dataset, 1))
    if wanted == 9:
        fill_up(loader, 9)
    if way == "mapped":
        # A batch for each thread and one more are enough, or as many blocks of small ones.
        for block_bytes, depth in ((1, 3), (2 * loader._new_pool(0).bytes, 6)):
            monkeypatch.setattr("h5pack.data.loader._SMALL_BLOCK_BYTES", block_bytes)
            fill_up(loader_of(dataset, num_threads=2, window=50), depth)


def fill_up(loader: h5pack.H5Loader, depth: int) -> None:
    """Wait until this many batches are ready, and check that there are no more."""
    with iter(loader) as batches:
        end = time.monotonic() + 30
        while batches.waiting < depth:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert loader.queue_depth == depth
    assert loader.queue_depth == 0


def test_transforms_are_given_whole_batches(dataset: h5pack.H5Dataset, way: str) -> None:
    names = set()

    def scaled(images: torch.Tensor) -> torch.Tensor:
        names.add(threading.current_thread().name)
        return images.permute(0, 3, 1, 2).float() / 255

    expected = [[[scaled(images), labels * 2] for images, labels in epoch] for epoch in expected_of(dataset)]
    names.clear()
    settings = {"transform": scaled, "target_transform": lambda labels: labels.mul_(2)}
    require_epochs(loader_of(dataset, **settings), expected)
    assert all(name.startswith("h5pack-read-") for name in names)


def test_the_consumer_helps_to_copy_cached_rows(dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own thread, but not in its inference mode, and without transforms, which could depend on such modes."""
    make_hot(Path(dataset.path))
    # The reading threads wait until the consumer has copied something.
    copied, names, fill = threading.Event(), set(), GroupReader.fill

    def noted(self: GroupReader, block: Block) -> None:
        if threading.current_thread() is threading.main_thread():
            copied.set()
        assert copied.wait(30)
        names.add(threading.current_thread().name)
        fill(self, block)

    monkeypatch.setattr(GroupReader, "fill", noted)
    monkeypatch.setattr("h5pack.data.loader._SMALL_BLOCK_BYTES", 1)
    with torch.inference_mode():
        batches = list(loader_of(dataset, num_threads=1))
    assert threading.main_thread().name in names
    assert all_same(batches, expected_of(dataset, 1)[0])
    assert not any(part.is_inference() for batch in batches for part in batch)
    names.clear()
    assert len(list(loader_of(dataset, num_threads=1, transform=lambda images: images))) == len(batches)
    assert names == {"h5pack-read-0"}


def test_transforms_run_in_all_threads_however_few_cpus_there_are(
    dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hot(Path(dataset.path))
    monkeypatch.setattr("h5pack.data.loader.available_cpus", lambda: 1)
    monkeypatch.setattr("h5pack.data.loader._SMALL_BLOCK_BYTES", 1)
    together = threading.Barrier(3)

    def waits_for_others(images: torch.Tensor) -> torch.Tensor:
        together.wait(30)
        return images

    loader = loader_of(dataset, num_threads=3, prefetch_factor=9, transform=waits_for_others)
    assert len(list(loader)) == 9, "a multiple of the threads"


def test_the_threads_of_an_epoch_are_those_of_the_one_before(dataset: h5pack.H5Dataset, way: str) -> None:
    gc.collect()
    before = idle_threads()
    loader = loader_of(dataset, num_threads=2)
    first = list(loader)
    threads = idle_threads() - before
    assert len(threads) == 3, "two that read, and one that plans"
    assert all_same([*first, *loader, *loader], list(itertools.chain(*expected_of(dataset, 3))))
    assert idle_threads() - before == threads
    assert sum(1 for _ in zip(loader, loader, strict=True)) == len(first)
    assert 3 <= len(idle_threads() - before) <= 6, "those of the first may have ended before the second began"
    loader.close()
    assert require_end(idle_threads() - before)
    assert len(list(loader)) == len(first)
    assert len(idle_threads() - before) == 3
    del loader
    gc.collect()
    assert require_end(idle_threads() - before)


def test_iterations_that_overlap_leave_the_threads_of_one(dataset: h5pack.H5Dataset) -> None:
    gc.collect()
    before = idle_threads()
    both, go_on = threading.Barrier(2 * 2 + 1), threading.Event()

    def waits(images: torch.Tensor) -> torch.Tensor:
        if not go_on.is_set():
            both.wait(30)
            go_on.wait(30)
        return images

    loader = loader_of(dataset, num_threads=2, transform=waits)
    left = [iter(loader), iter(loader)]
    both.wait(30)
    left.clear()
    go_on.set()
    assert threads_end()
    deadline = time.monotonic() + 30
    while len(idle_threads() - before) > 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(idle_threads() - before) == 3


def require_end(threads: set[threading.Thread]) -> bool:
    """Whether all these threads end soon."""
    for thread in threads:
        thread.join(30)
    return not any(thread.is_alive() for thread in threads)


def idle_threads() -> set[threading.Thread]:
    """The threads that wait for an epoch."""
    return {thread for thread in threading.enumerate() if thread.name == IDLE}


class Noise:
    """Random, from the generator that it is given."""

    def __call__(self, images: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        return images + torch.randint(0, 100, images.shape, generator=generator, dtype=torch.uint8)


class NoiseModule(torch.nn.Module):
    forward = Noise.__call__


class OwnCall(NoiseModule):
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return super().__call__(images // 100)


def test_a_transform_whose_call_takes_no_generator_is_called_without(dataset: h5pack.H5Dataset) -> None:
    first = next(iter(loader_of(dataset, transform=OwnCall())))[0]
    assert int(first.max()) < 102


@pytest.mark.parametrize("noise", [Noise, NoiseModule])
def test_a_seeded_transform_is_the_same_in_every_run(dataset: h5pack.H5Dataset, noise: Any, way: str) -> None:
    def noisy(labels: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
        return labels + torch.randint(0, 1000, labels.shape, generator=generator)

    settings: dict[str, Any] = {"transform": noise(), "target_transform": noisy}
    first = loader_of(dataset, num_threads=1, **settings)
    epochs = [list(first) for _ in range(2)]
    loader = loader_of(dataset, num_threads=3, **settings)
    require_epochs(loader, epochs[:1])
    for batch in itertools.islice(zip(loader, epochs[1], strict=True), 4):
        assert same(*batch)
    resumed = loader_of(dataset, num_threads=2, **settings)
    resumed.load_state_dict(loader.state_dict())
    require_epochs(resumed, [epochs[1][4:]])
    plain = expected_of(dataset, 2)
    added = [epochs[at][batch][0] - plain[at][batch][0] for at, batch in ((0, 0), (0, 1), (1, 0))]
    assert not torch.equal(added[0], added[1])
    assert not torch.equal(added[0], added[2])
    one, other = (next(iter(loader_of(dataset, seed=seed, shuffle=False, **settings))) for seed in (7, 8))
    assert not same(one, other), "another seed is other noise"


def broken_at(number: int, error: type[Exception] = ArithmeticError) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a transform whose call with this number, from 0, raises an error."""
    calls = itertools.count()

    def broken(part: torch.Tensor) -> torch.Tensor:
        if next(calls) == number:
            raise error("on purpose")
        return part

    return broken


@pytest.mark.parametrize("name", ["transform", "target_transform"])
def test_a_transform_that_a_dataset_gets_later_is_refused(dataset: h5pack.H5Dataset, name: str) -> None:
    given = h5pack.H5Dataset(dataset.path)
    loaders = [h5pack.H5Loader(one, 4) for one in (given, h5pack.ConcatPack([given]), Subset(given, [1, 2]))]
    setattr(given, name, lambda value: value)
    for loader in loaders:
        with pytest.raises(OptionsError) as caught:
            iter(loader)
        assert f"{name}=" in caught.value.parameters


@pytest.mark.parametrize("where", ["transform", "target_transform"])
@pytest.mark.parametrize("error", [ArithmeticError, StopIteration])
def test_an_error_in_a_transform(dataset: h5pack.H5Dataset, way: str, where: str, error: type[Exception]) -> None:
    loader = loader_of(dataset, **{where: broken_at(4, error)})
    batches = iter(loader)
    with pytest.raises((ArithmeticError, LoaderError)) as caught:
        list(batches)
    # A StopIteration would be the end of the epoch.
    found = caught.value.__cause__ if error is StopIteration else caught.value
    assert isinstance(found, error)
    assert "broken" in [frame.name for frame in traceback.extract_tb(found.__traceback__)]
    assert threads_end()
    for _ in range(2):
        with pytest.raises(LoaderError):
            next(batches)
    assert loader.state_dict()["epoch"] == 0
    assert len(list(loader)) == 9, "the loader goes on with the next epoch"


@pytest.mark.parametrize("fits", [True, False])
def test_chunks_that_fit_the_cache_are_decoded_once(
    tmp_path: Path, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packs.labeled(tmp_path / "f.h5", 300, compression="gzip")
    dataset = h5pack.H5Dataset(path, with_rows=True)
    # Small fields that are not held in memory do not reduce the budget for decoded chunks.
    monkeypatch.setattr("h5pack.data.loader._MAX_SMALL_BYTES", 300 * 8 - 1)
    smallest = h5pack.H5Loader(dataset, 16, num_threads=2, prefetch_factor=1, memory_bytes=10**8).memory_bytes
    assert h5pack.H5Loader(dataset, 16, num_threads=2, prefetch_factor=1, memory_bytes=smallest).decodes_once
    monkeypatch.undo()
    if not fits:
        dataset.engine.chunks.cache.capacity = dataset.engine.decoded_bytes() - 1
    loader, plain = h5pack.H5Loader(dataset, 16, num_threads=2), h5pack.H5Dataset(path)
    read = []
    for _ in range(3):
        before = dataset.stats().bytes_read
        for batch in loader:
            assert torch.equal(batch.images, torch.stack([plain[row].image for row in batch.rows.tolist()]))
        read.append(dataset.stats().bytes_read - before)
    assert read[0] > 0
    assert [bool(count) for count in read[1:]] == [not fits, not fits]


def test_a_full_shuffle_of_few_compressed_chunks_needs_memory_for_these(tmp_path: Path) -> None:
    path = packs.labeled(tmp_path / "f.h5", compression="gzip")
    dataset = h5pack.H5Dataset(path)
    loader = h5pack.H5Loader(dataset, 16, shuffle="full", num_threads=2, prefetch_factor=1, memory_bytes=10**6)
    packs.require_values(loader, packs.values())
    assert dataset.engine.chunks.cache.bytes <= dataset.engine.decoded_bytes() < loader.memory_bytes <= 10**6


@pytest.mark.parametrize("dtype", ["u1", ">u2"])
@pytest.mark.parametrize("storage", [{"compression": "gzip"}, {"chunks": (10, 16, 9, 3)}], ids=["gzip", "cut chunks"])
def test_later_epochs_copy_decoded_rows_from_one_array(
    tmp_path: Path, storage: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do the batches of a DataLoader, and a forked process, which shares the array."""
    values = packs.values(67, (16, 16, 3), dtype)
    packs.write(tmp_path / "f.h5", images=values, labels=np.arange(67), **{"chunks": 10, **storage})
    monkeypatch.setattr("h5pack.read.engine._MIN_CACHED_ROWS", 1)
    dataset, gathered, decodes = h5pack.H5Dataset(tmp_path / "f.h5"), [0], [0]
    gather, decode = DecodedRows.gather, GroupReader._decode

    def count(calls: list[int], function: Any, *arguments: Any) -> None:
        calls[0] += 1
        function(*arguments)

    monkeypatch.setattr(DecodedRows, "gather", lambda *arguments: count(gathered, gather, *arguments))
    monkeypatch.setattr(GroupReader, "_decode", lambda *arguments: count(decodes, decode, *arguments))
    for shuffle in ("window", "full", False):
        loader = h5pack.H5Loader(dataset, 16, shuffle=shuffle, window=2, num_threads=2)
        for _ in range(3):
            packs.require_values(loader, values)
    assert gathered[0] > 0
    assert 0 < decodes[0] <= 7, "the first epoch"
    engine = dataset.engine
    assert engine.chunks.cache.bytes <= engine.decoded_bytes()
    copied = engine.decoded("images")
    assert np.array_equal(copied.array.view(values.dtype).reshape(values.shape), values)
    before = dataset.stats().bytes_read
    packs.require_values(DataLoader(dataset, 16, shuffle=True, collate_fn=dataset.collate), values)
    assert in_child(lambda: packs.require_values(loader, values) is None)
    assert dataset.stats().bytes_read == before + 67 * 8, "the labels, once"
    dataset.close()
    assert engine.decoded("images") is not copied
    packs.require_values(loader, values)


@pytest.mark.parametrize("shape", [(8, 24, 3), (64, 64, 3)], ids=["copied together", "copied one by one"])
@pytest.mark.parametrize("chunks", [1, 3, 99])
def test_a_task_decodes_several_small_chunks(
    tmp_path: Path, shape: tuple[int, ...], chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = packs.values(67, shape)
    packs.write(tmp_path / "f.h5", images=values, labels=np.arange(67), chunks=10, compression="gzip")
    monkeypatch.setattr("h5pack.data.chunk_groups.DECODING_BYTES", chunks * 10 * values[0].nbytes + 1)
    tasks, decode = [], GroupReader._decode

    def count(self: GroupReader, field: Any, group: Any, edges: list[int], low: int, high: int) -> None:
        tasks.append((high - low, len(edges) - 1))
        decode(self, field, group, edges, low, high)

    monkeypatch.setattr(GroupReader, "_decode", count)
    for shuffle in ("window", "full"):
        loader = h5pack.H5Loader(h5pack.H5Dataset(tmp_path / "f.h5"), 16, shuffle=shuffle, window=6, num_threads=2)
        packs.require_values(loader, values)
    assert max(count for count, _ in tasks) == min(chunks, max(total for _, total in tasks))


@pytest.mark.parametrize("kind", ["chunks of one row", "big-endian", "gzip"])
def test_several_iterators_at_once(tmp_path: Path, kind: str, way: str) -> None:
    written(tmp_path / "f.h5", kind)
    dataset = h5pack.H5Dataset(tmp_path / "f.h5")
    expected = expected_of(dataset, 4)
    random = np.random.default_rng(1)
    for _ in range(2):
        loader = loader_of(dataset)
        running = [iter(loader) for _ in range(4)]
        found: list[list[Any]] = [[], [], [], []]
        for number in random.permutation([0, 1, 2, 3] * 9):
            found[number].append(next(running[number]))
        assert all(map(all_same, found, expected))


def test_the_end_stays_the_end(dataset: h5pack.H5Dataset) -> None:
    # The iterator does not need the loader's variable.
    batches = iter(loader_of(dataset))
    assert len([*iter(batches)]) == 9
    assert not loader_threads(), "the threads end with the last batch"
    for _ in range(3):
        assert next(batches, None) is None
        batches.close()


def test_a_closed_iterator_is_not_a_finished_one(dataset: h5pack.H5Dataset, way: str) -> None:
    expected = expected_of(dataset, 4)
    with loader_of(dataset) as loader:
        one, other = iter(loader), iter(loader)
        held = next(one)
        one.close()
        with pytest.raises(LoaderError, match="closed"):
            next(one)
        assert same(next(other), expected[1][0])
    assert not loader_threads()
    for batches in (one, other, one, other):
        with pytest.raises(LoaderError, match="closed"):
            next(batches)
    assert same(held, expected[0][0])
    require_epochs(loader, expected[2:])
    loader.close()
    loader.close()


@pytest.mark.parametrize("how", ["close", "close the iterator", "run out", "error", "forget"])
def test_nothing_waits_for_the_garbage_collector(dataset: h5pack.H5Dataset, how: str, way: str) -> None:
    """Even while the iterator that was closed is held."""
    loader = loader_of(dataset, num_threads=3, transform=broken_at(2 if how == "error" else -1))
    gc.collect()
    gc.disable()
    try:
        batches: Any = iter(loader)
        watch = weakref.ref(batches._pipeline)
        if how == "close":
            loader.close()
        elif how == "close the iterator":
            next(batches)
            batches.close()
        elif how == "forget":
            next(batches)
            del batches
        else:
            with contextlib.suppress(ArithmeticError):
                assert len(list(batches)) == 9
        assert threads_end()
        assert watch() is None
    finally:
        gc.enable()


def test_a_close_from_another_thread_wakes_the_consumer(dataset: h5pack.H5Dataset) -> None:
    hold = threading.Event()
    loader = loader_of(dataset, transform=lambda images: hold.wait(30) and images)
    batches = iter(loader)
    closer = threading.Timer(0.1, loader.close)
    closer.start()
    with pytest.raises(LoaderError, match="closed"):
        next(batches)
    hold.set()
    closer.join()


@pytest.mark.parametrize("order", RESUMED)
def test_a_state_saved_at_any_batch_gives_the_same_tail(dataset: h5pack.H5Dataset, order: str, way: str) -> None:
    make = partial(loader_of, dataset, **ORDERS[order])
    expected = list(itertools.chain(*expected_of(dataset, 2, **ORDERS[order])))
    loader = make()
    size = len(loader)
    states = [loader.state_dict(), *(loader.state_dict() for _ in range(2) for _ in loader)]
    assert len(states) == 2 * size + 1
    for done, state in enumerate(states):
        resumed = make(num_threads=1 + done % 3)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.state_dict() == state
        # The last state of an epoch has nothing left of it.
        found = [*resumed, *(resumed if done <= size else ())]
        assert all_same(found, expected[done : done + len(found)])
        assert len(found) == (size if done == size else 2 * size - done)
        # A state counts batches, so a sampler resumes from that of a loader.
        sampler = h5pack.ChunkBatchSampler(dataset, **{**ORDER, **ORDERS[order]})
        sampler.load_state_dict(state)
        left = size - done if done <= size else 2 * size - done
        assert list(sampler) == [batch.labels.tolist() for batch in found[:left]]


@pytest.mark.parametrize("order", RESUMED)
def test_a_loader_follows_a_batch_sampler_and_shares_its_state(dataset: h5pack.H5Dataset, order: str) -> None:
    settings, expected = {**ORDER, **ORDERS[order]}, expected_of(dataset, 2, **ORDERS[order])
    sampler = h5pack.ChunkBatchSampler(dataset, **settings)
    with h5pack.H5Loader(dataset, batch_sampler=sampler, num_threads=2) as loader:
        assert loader.drop_last == sampler.drop_last
        sampler.load_state_dict({**sampler.state_dict(), "batches": 1})
        require_epochs(loader, [expected[0][1:], expected[1]])
        assert (sampler.epoch, sampler.state_dict()["epoch"]) == (1, 2)


def test_a_state_at_the_end_of_an_epoch(dataset: h5pack.H5Dataset) -> None:
    expected, loader = expected_of(dataset), loader_of(dataset)
    *_, inside = (loader.state_dict() for _ in loader)
    behind = loader.state_dict()
    assert [(state["epoch"], state["batches"]) for state in (inside, behind)] == [(0, 9), (1, 0)]
    # A loop over the epoch that was saved has nothing left; behind it, the next loop is the next epoch.
    for state, chosen, epochs in (
        *((inside, None, [[], expected[1]]), (behind, None, expected[1:])),
        *((inside, 1, expected[1:]), (behind, 1, expected[1:]), (inside, 2, expected[2:])),
    ):
        resumed = loader_of(dataset)
        resumed.load_state_dict(state)
        if chosen is not None:
            resumed.set_epoch(chosen)
        require_epochs(resumed, epochs)


@pytest.mark.parametrize("how", ["cut", "cut, gzip", "replaced", "removed"])
def test_a_file_changes_in_an_epoch(tmp_path: Path, how: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packs.labeled(tmp_path / "f.h5", 600, compression="gzip" if "gzip" in how else None)
    loader = loader_of(h5pack.H5Dataset(path), memory_bytes=10**6, num_threads=1)
    batches: Any = iter(loader)
    next(batches)
    while batches.waiting < 4:
        # Copying a batch from the mapping while the file is cut would be a SIGBUS. With four, the thread waits.
        time.sleep(0.001)
    for module in ("storage", "mapping"):
        monkeypatch.setattr(f"h5pack.read.{module}.CHECK_SECONDS", 0)
    monkeypatch.setattr("h5pack.read.storage._RETRY_SECONDS", (0.0,))
    if how == "replaced":
        os.replace(packs.labeled(tmp_path / "g.h5", 601), path)
    else:
        path.unlink() if how == "removed" else os.truncate(path, 9_000)
    with pytest.raises(H5PackError):
        list(batches)
    assert threads_end()
    with pytest.raises(PackChangedError):
        iter(loader)


@pytest.mark.parametrize("compression", ["gzip", None])
def test_a_forked_child_starts_from_scratch(tmp_path: Path, way: str, compression: str | None) -> None:
    dataset = h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5", compression=compression))
    expected = expected_of(dataset)
    loader = loader_of(dataset)
    batches = iter(loader)
    held = [next(batches), next(batches)]

    def work() -> bool:
        with pytest.raises(LoaderError):
            next(batches)
        require_epochs(loader, expected[1:2])
        left = iter(loader)
        assert same(next(left), expected[2][0])
        batches.close()
        loader.close()
        return threads_end() and all_same(held, expected[0][:2])

    assert in_child(work)
    assert all_same([*held, *batches], expected[0]), "the parent does not notice"
    require_epochs(loader, expected[1:2])


def test_a_fork_at_any_moment(dataset: h5pack.H5Dataset, way: str) -> None:
    expected = expected_of(dataset, 10)
    loader = loader_of(dataset, num_threads=3)
    for epoch in range(9):
        loader.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(epoch):
            next(batches)
        assert in_child(lambda epoch=epoch: all_same(list(loader), expected[epoch + 1]))
        assert all_same(list(batches), expected[epoch][epoch:])


SCRIPT = """
import atexit, itertools, sys, threading, time, h5pack
def report():
    print("left:", *[thread.name for thread in threading.enumerate() if thread.name.startswith("h5pack-")])
atexit.register(report)  # What is registered first is called last.
loader = h5pack.H5Loader(h5pack.H5Dataset(sys.argv[1]), 12, window=3)
"""


def started(path: Path, body: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT + body, str(path)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


WAITING = """
slow = h5pack.H5Loader(loader.dataset, 12, window=3, transform=lambda x: time.sleep(0.2) or x)
for batch in itertools.chain.from_iterable(itertools.repeat(slow)):
    print("ready", flush=True)
"""
HELD = """
class Cycle: pass
held = [iter(loader) for _ in range(3)]
sys.held = [iter(loader)]
cycle = Cycle()
cycle.cycle, cycle.batches = cycle, iter(loader)
first = [next(batches) for batches in (*held, *sys.held, cycle.batches)]
"""


def test_control_c_ends_the_process(tmp_path: Path) -> None:
    with started(packs.labeled(tmp_path / "f.h5"), WAITING) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "Exception ignored" not in errors
    assert errors.count("Traceback") == 1


def test_unfinished_iterators_do_not_disturb_the_exit(tmp_path: Path) -> None:
    with started(packs.labeled(tmp_path / "f.h5", 2000), HELD + "report()\nsys.exit(0)") as process:
        try:
            output, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
    before, after = output.splitlines()
    assert before.startswith("left: h5pack-"), "otherwise the end proves nothing"
    assert after == "left:", "no thread reads while the interpreter is shut down"


def test_loaders_that_take_turns_share_memory(dataset: h5pack.H5Dataset) -> None:
    orders: list[dict[str, Any]] = [{"shuffle": "full"}, {}, {"shuffle": False}]
    loaders = [loader_of(dataset, **order) for order in orders]
    assert loaders[1].use_memory_of(loaders[0])
    assert loaders[2].use_memory_of(loaders[1])
    loaders[0].prepare_memory()
    expected = [expected_of(dataset, 2, **order) for order in orders]
    for epoch, number in itertools.product(range(2), range(3)):
        found = [[part.clone() for part in batch] for batch in loaders[number]]
        assert all_same(found, expected[number][epoch])
    assert not loaders[0].use_memory_of(loader_of(dataset, batch_size=BATCH + 1))
