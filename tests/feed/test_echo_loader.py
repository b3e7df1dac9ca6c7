"""`EchoLoader`: each batch, or row, so often; every stop is a resume; and a thread that never outlives its use."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import h5pack
from h5pack.errors import LoaderError, OptionsError, StateError
from h5pack.feed.batch_key import BatchKey, repeats_of
from h5pack.feed.device_feed import DeviceFeed
from h5pack.feed.echo_loader import EchoLoader
from tests.feed import packs
from tests.feed.packs import all_same, loader_threads, same, threads_end

BATCH = 12
BATCHES = 9
"""Of 103 rows; the last one has 7."""


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    with packs.watched():
        yield
    gc.collect()
    assert threads_end(), loader_threads()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return packs.labelled(tmp_path / "f.h5")


@pytest.fixture
def dataset(path: Path) -> h5pack.H5Dataset:
    return h5pack.H5Dataset(path, with_rows=True)


def own(dataset: Any, **settings: Any) -> h5pack.H5Loader:
    return h5pack.H5Loader(dataset, BATCH, window=3, seed=7, **settings)


def torchs(dataset: Any, workers: int = 0, **settings: Any) -> Any:
    sampler = h5pack.ChunkBatchSampler(dataset, BATCH, window=3, seed=7, **settings)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate, num_workers=workers)


def by_rows(dataset: Any) -> Any:
    sampler = h5pack.ChunkSampler(dataset, window=3, seed=7)
    return DataLoader(dataset, BATCH, sampler=sampler, collate_fn=dataset.collate)


def fed(dataset: Any) -> DeviceFeed:
    return DeviceFeed(own(dataset), "cpu")


LOADERS: dict[str, Callable[[Any], Any]] = {"H5Loader": own, "batches": torchs, "rows": by_rows, "DeviceFeed": fed}


def shown(batch: Any) -> list[tuple[int, int]]:
    """Row and repeat of each sample of a batch with rows."""
    repeats = repeats_of(batch)
    each = repeats.tolist() if isinstance(repeats, torch.Tensor) else [repeats] * len(batch[-1])
    return list(zip(batch[-1].tolist(), each, strict=True))


def all_shown(batches: Any) -> list[list[tuple[int, int]]]:
    return [shown(batch) for batch in batches]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


# Fixed factors.


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("factor", "counts"), [(1, [1]), (2, [2]), (2.5, [2, 3]), (4 / 3, [1, 1, 2]), (3, [3])])
def test_each_batch_so_often(dataset: h5pack.H5Dataset, kind: str, factor: float, counts: list[int]) -> None:
    plain = list(own(dataset))
    echo = EchoLoader(LOADERS[kind](dataset), factor)
    expected = [
        (batch, repeat) for batch, count in zip(plain, itertools.cycle(counts), strict=False) for repeat in range(count)
    ]
    found = list(echo)
    assert len(echo) == len(found) == len(expected) == int(BATCHES * Fraction(factor).limit_denominator(99))
    assert all_same(found, [batch for batch, _ in expected])
    assert [repeats_of(batch) for batch in found] == [repeat for _, repeat in expected]
    assert (echo.shown, echo.fresh) == (len(found), BATCHES)
    assert echo.epoch == 0
    assert len(list(echo)) == len(found)
    assert echo.epoch == 1
    assert echo.dataset is dataset


def test_repeats_are_the_same_tensors_and_the_first_is_untouched() -> None:
    batches = [[torch.arange(4) + number, torch.ones(4)] for number in range(3)]
    found = list(EchoLoader(batches, 2))
    for number, batch in enumerate(batches):
        assert found[2 * number] is batch
        assert found[2 * number + 1] is not batch
        assert [one is other for one, other in zip(found[2 * number + 1], batch, strict=True)] == [True, True]
        assert repeats_of(batch) == 0


def test_factors_are_what_is_written(dataset: h5pack.H5Dataset) -> None:
    """2.3 in binary is a little less, and ten batches of it would be 22."""
    assert len(EchoLoader([torch.zeros(1)] * 10, 2.3)) == 23
    assert len(list(EchoLoader([torch.zeros(1)] * 10, 2.3))) == 23
    assert len(EchoLoader([torch.zeros(1)] * 30, Fraction(7, 3))) == 70
    assert len(EchoLoader([torch.zeros(1)] * 30, np.float32(1.1))) == 33


def test_echoes_of_echoes_are_told_apart(dataset: h5pack.H5Dataset) -> None:
    for buffer in (0, 40):
        found = all_shown(EchoLoader(EchoLoader(own(dataset), 2), 3, shuffle_buffer=buffer))
        seen = Counter(itertools.chain.from_iterable(found))
        assert seen == {(row, repeat): 1 for row in range(packs.ROWS) for repeat in range(6)}


# A shuffle buffer.


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("factor", "rows"), [(2, 50), (2.5, 50), (3, 13), (1, 30), (2, 1000), (2, 1)])
def test_each_row_so_often_with_its_pixels(
    path: Path, dataset: h5pack.H5Dataset, kind: str, factor: float, rows: int
) -> None:
    with h5py.File(path) as file:
        images, labels = file["images"][()], file["labels"][()]
    echo = EchoLoader(LOADERS[kind](dataset), factor, shuffle_buffer=rows, seed=3)
    orders = []
    for epoch in range(2):
        seen: dict[int, list[int]] = defaultdict(list)
        found = []
        for batch in echo:
            pixels, classes, numbers = batch
            assert np.array_equal(pixels.numpy(), images[numbers.numpy()])
            assert np.array_equal(classes.numpy(), labels[numbers.numpy()])
            assert len(set(numbers.tolist())) == len(numbers), "a row twice in a batch"
            repeats = repeats_of(batch)
            assert isinstance(repeats, torch.Tensor)
            assert repeats.dtype == torch.int64
            for row, repeat in shown(batch):
                seen[row].append(repeat)
            found.append(shown(batch))
        assert sorted(seen) == list(range(packs.ROWS))
        for repeats_seen in seen.values():
            assert repeats_seen == list(range(len(repeats_seen)))
            assert len(repeats_seen) in (int(factor), int(-(-factor // 1)))
        assert [len(batch) for batch in found] == sorted((len(batch) for batch in found), reverse=True)
        assert len(found) == len(echo)
        assert echo.epoch == epoch
        assert (echo.shown, echo.fresh) == (sum(map(len, found)), packs.ROWS)
        orders.append(found)
    assert orders[0] != orders[1]
    again = EchoLoader(LOADERS[kind](dataset), factor, shuffle_buffer=rows, seed=3)
    assert all_shown(again) == orders[0]
    again.set_epoch(1)
    assert all_shown(again) == orders[1]
    if rows >= 2 * BATCH:
        other = EchoLoader(LOADERS[kind](dataset), factor, shuffle_buffer=rows, seed=4)
        assert all_shown(other) != orders[0]


def test_the_buffer_holds_no_more_than_it_says(dataset: h5pack.H5Dataset) -> None:
    for rows, most in ((50, 50), (5, BATCH)):
        iterator: Any = iter(EchoLoader(own(dataset), 2, shuffle_buffer=rows))
        held = []
        for _ in iterator:
            held.append(iterator._course._deck.held)
            assert [len(part) for part in iterator._course._buffer._parts] == [most] * 3
        assert max(held) <= most
        if rows == 50:
            assert max(held[:5]) > 50 - BATCH, "it is filled"


def test_batches_of_a_buffer_are_their_own(dataset: h5pack.H5Dataset) -> None:
    expected = list(EchoLoader(own(dataset), 2, shuffle_buffer=40))
    for batch, before in zip(EchoLoader(own(dataset), 2, shuffle_buffer=40), expected, strict=True):
        assert same(batch, before)
        for part in batch:
            part.zero_()


Pair = namedtuple("Pair", "images labels")


@pytest.mark.parametrize("made", ["tensor", "tuple", "named", "dict", "nested"])
@pytest.mark.parametrize("buffer", [0, 20])
def test_batches_of_all_kinds(made: str, buffer: int) -> None:
    def batch(number: int) -> Any:
        rows = torch.arange(4) + 4 * number
        images = torch.arange(4 * 6).reshape(4, 6) + 100 * number
        return {
            "tensor": rows,
            "tuple": (images, rows),
            "named": Pair(images, rows),
            "dict": {"images": images, "rows": rows},
            "nested": [{"a": (images, [rows])}, rows],
        }[made]

    def numbers(found: Any) -> Any:
        return {
            "tensor": lambda: found,
            "tuple": lambda: found[1],
            "named": lambda: found.labels,
            "dict": lambda: found["rows"],
            "nested": lambda: found[0]["a"][1][0],
        }[made]()

    kinds = {"tensor": torch.Tensor, "tuple": tuple, "named": Pair, "dict": dict, "nested": list}
    found = list(EchoLoader([batch(number) for number in range(5)], 3, shuffle_buffer=buffer))
    assert all(isinstance(one, kinds[made]) for one in found)
    assert Counter(int(row) for one in found for row in numbers(one)) == dict.fromkeys(range(20), 3)
    each = [repeats_of(one) for one in found]
    assert all(isinstance(repeats, torch.Tensor) for repeats in each) is bool(buffer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_buffer_keeps_memory_format_and_type(dtype: torch.dtype) -> None:
    whole = torch.rand(24, 3, 5, 7).mul(4).to(dtype)
    batches = [
        (whole[first : first + 6].contiguous(memory_format=torch.channels_last), torch.arange(first, first + 6))
        for first in range(0, 24, 6)
    ]
    for images, rows in EchoLoader(batches, 2, shuffle_buffer=12):
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert images.dtype == dtype
        assert torch.equal(images, whole[rows])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([[torch.zeros(4), ["a", "b"]]], "a part of this one is a str"),
        ([{"a": np.zeros(4)}], "a part of this one is a ndarray"),
        ([[torch.zeros(4), torch.zeros(3)]], "have \\['3', '4'\\] rows"),
        ([[torch.zeros(4), torch.tensor(1)]], "have \\['4', 'None'\\] rows"),
        ([torch.zeros(4, 2), torch.zeros(4, 3)], "whose tensors are alike"),
        ([torch.zeros(4), torch.zeros(4, dtype=torch.int64)], "whose tensors are alike"),
    ],
)
def test_what_cannot_be_mixed(batches: Any, message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        list(EchoLoader(batches, 2, shuffle_buffer=20))
    assert len(list(EchoLoader(batches, 2))) == 2 * len(batches)


# Inside and outside of a DeviceFeed.


class Noting:
    """A keyed transform that gives back by what it would draw."""

    keyed = True

    def __call__(self, images: torch.Tensor, key: BatchKey) -> torch.Tensor:
        repeats = torch.as_tensor(key.repeats).expand(len(key.rows))
        return torch.stack([key.rows, torch.full_like(key.rows, key.epoch), repeats], 1)


@pytest.mark.parametrize("buffer", [0, 40])
def test_augmentation_differs_inside_and_is_repeated_outside(dataset: h5pack.H5Dataset, buffer: int) -> None:
    inside = DeviceFeed(EchoLoader(own(dataset), 2, shuffle_buffer=buffer), "cpu", transform=Noting())
    outside = EchoLoader(DeviceFeed(own(dataset), "cpu", transform=Noting()), 2, shuffle_buffer=buffer)
    for epoch in range(2):
        keys = Counter(tuple(key) for batch in inside for key in batch[0].tolist())
        assert keys == {(row, epoch, repeat): 1 for row in range(packs.ROWS) for repeat in range(2)}
        keys = Counter(tuple(key) for batch in outside for key in batch[0].tolist())
        assert keys == {(row, epoch, 0): 2 for row in range(packs.ROWS)}


# Resuming.


@pytest.mark.parametrize(("factor", "buffer"), [(2, 0), (2.5, 0), (2, 30), (1.5, 40)])
@pytest.mark.parametrize(("kind", "outer"), [*((kind, "alone") for kind in LOADERS), ("H5Loader", "in a DeviceFeed")])
def test_resumed_at_every_batch(dataset: h5pack.H5Dataset, kind: str, factor: float, buffer: int, outer: str) -> None:
    def new() -> Any:
        echo = EchoLoader(LOADERS[kind](dataset), factor, shuffle_buffer=buffer, seed=1)
        return echo if outer == "alone" else DeviceFeed(echo, "cpu")

    whole = [all_shown(loader) for loader in [new()] for _ in range(3)]
    first = new()
    for epoch in range(2):
        states = [first.state_dict()]
        for batch in first:
            assert shown(batch) == whole[epoch][len(states) - 1]
            states.append(first.state_dict())
        states.append(first.state_dict())
        for done, state in enumerate(map(through_json, states)):
            loader = new()
            loader.load_state_dict(state)
            assert through_json(loader.state_dict()) == state
            if done % 2:
                loader.set_epoch(epoch if done <= len(whole[epoch]) else epoch + 1)
            if done <= len(whole[epoch]):
                assert all_shown(loader) == whole[epoch][done:]
            if done % 4 == 0 or done > len(whole[epoch]):
                assert all_shown(loader) == whole[epoch + 1]


@pytest.mark.parametrize("buffer", [0, 30])
def test_resumed_with_workers(dataset: h5pack.H5Dataset, buffer: int) -> None:
    def new() -> EchoLoader:
        return EchoLoader(torchs(dataset, workers=2), 2, shuffle_buffer=buffer)

    whole = [all_shown(loader) for loader in [EchoLoader(own(dataset), 2, shuffle_buffer=buffer)] for _ in range(2)]
    for done in (3, 10):
        stopped = new()
        assert all_shown(itertools.islice(stopped, done)) == whole[0][:done]
        loader = new()
        loader.load_state_dict(through_json(stopped.state_dict()))
        assert all_shown(loader) == whole[0][done:]
    assert all_shown(loader) == whole[1]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("buffer", [0, 30])
def test_resumed_over_a_stateful_dataloader(dataset: h5pack.H5Dataset, buffer: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs pip install torchdata")

    def new() -> EchoLoader:
        sampler = h5pack.ChunkBatchSampler(dataset, BATCH, window=3, seed=7)
        loader = stateful.StatefulDataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate)
        return EchoLoader(loader, 2, shuffle_buffer=buffer)

    whole = [all_shown(loader) for loader in [EchoLoader(own(dataset), 2, shuffle_buffer=buffer)] for _ in range(2)]
    for done in (1, 2, 7, 14, 18):
        stopped = new()
        assert all_shown(itertools.islice(stopped, done)) == whole[0][:done]
        loader = new()
        loader.load_state_dict(stopped.state_dict())
        assert all_shown(loader) == whole[0][done:]
        assert all_shown(loader) == whole[1]


def test_resumed_again_and_again(dataset: h5pack.H5Dataset) -> None:
    """Each process gives two batches; the state of a resumed one counts from the epoch's beginning."""
    for buffer in (0, 30):
        whole = all_shown(EchoLoader(own(dataset), 2.5, shuffle_buffer=buffer))
        found: list[Any] = []
        state = EchoLoader(own(dataset), 2.5, shuffle_buffer=buffer).state_dict()
        while len(found) < len(whole):
            loader = EchoLoader(own(dataset), 2.5, shuffle_buffer=buffer)
            loader.load_state_dict(state)
            found += all_shown(itertools.islice(loader, 2))
            state = through_json(loader.state_dict())
        assert found == whole


def test_resuming_reads_only_what_the_buffer_needs(tmp_path: Path) -> None:
    dataset = h5pack.H5Dataset(packs.labelled(tmp_path / "large.h5", rows=3000), with_rows=True)

    def new() -> EchoLoader:
        return EchoLoader(h5pack.H5Loader(dataset, 10, window=3), 2, shuffle_buffer=50)

    stopped = new()
    list(itertools.islice(stopped, 500))
    state = stopped.state_dict()
    assert state["loader"]["batches"] == state["batch"] > 250 - 10 * 5
    loader = new()
    loader.load_state_dict(state)
    assert len(list(loader)) == 100


def test_another_epoch_drops_the_place(dataset: h5pack.H5Dataset) -> None:
    whole = [all_shown(loader) for loader in [EchoLoader(own(dataset), 2.5)] for _ in range(3)]
    echo = EchoLoader(own(dataset), 2.5)
    list(itertools.islice(echo, 6))
    state = echo.state_dict()
    echo.set_epoch(2)
    assert all_shown(echo) == whole[2]
    echo.load_state_dict(state)
    echo.set_epoch(1)
    assert all_shown(echo) == whole[1]


def test_states_of_other_settings_are_refused(dataset: h5pack.H5Dataset) -> None:
    state = EchoLoader(own(dataset), 2).state_dict()
    mixed = EchoLoader(own(dataset), 2, shuffle_buffer=30, seed=1).state_dict()
    for given, settings, message in (
        (state, {"factor": 3}, r"saved with factor \[2, 1\], and this EchoLoader has \[3, 1\]"),
        (state, {"factor": "auto"}, "saved with factor"),
        (state, {"shuffle_buffer": 30}, "saved with shuffle_buffer 0"),
        (mixed, {"shuffle_buffer": 40, "seed": 1}, "saved with shuffle_buffer 30"),
        (mixed, {"shuffle_buffer": 30, "seed": 2}, "saved with seed 1"),
        (own(dataset).state_dict(), {}, "not a state of an EchoLoader"),
        ({**state, "batch": "x"}, {}, "not a state of an EchoLoader"),
        ({**state, "echo": {**state["echo"], "version": 2}}, {}, "saved with version 2"),
    ):
        with pytest.raises(StateError, match=message):
            EchoLoader(own(dataset), **{"factor": 2, **settings}).load_state_dict(given)
    with pytest.raises(StateError, match="saved with seed"):
        EchoLoader(own(dataset, drop_last=True), 2).load_state_dict(
            EchoLoader(h5pack.H5Loader(dataset, BATCH, window=3, seed=8, drop_last=True), 2).state_dict()
        )
    EchoLoader(own(dataset), 2, seed=5).load_state_dict(state)


def test_damaged_states_of_a_buffer(dataset: h5pack.H5Dataset) -> None:
    echo = EchoLoader(own(dataset), 2, shuffle_buffer=30)
    list(itertools.islice(echo, 9))
    state = echo.state_dict()
    for change, message in (
        ({"showing": 99}, "do not add up"),
        ({"batch": state["batch"] + 1}, "do not add up"),
        ({"sizes": [[11, 7]]}, "is not the one of 11 rows|do not add up"),
    ):
        echo.load_state_dict({**state, **change})
        with pytest.raises(StateError, match=message):
            next(iter(echo))


def test_no_state_where_the_loader_has_none() -> None:
    for buffer in (0, 8):
        echo = EchoLoader([torch.zeros(4)] * 3, 2, shuffle_buffer=buffer)
        list(echo)
        with pytest.raises(StateError, match="keeps no state"):
            echo.state_dict()


# Errors.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factor": 0.5}, "factor is 0.5; it must be a number of at least 1"),
        ({"factor": float("nan")}, "factor is nan"),
        ({"factor": float("inf")}, "factor is inf"),
        ({"factor": "two"}, "factor is 'two'"),
        ({"factor": True}, "factor is True"),
        ({"factor": None}, "factor is None"),
        ({"factor": 9}, "factor is 9, above most=8"),
        ({"factor": 2, "most": 0}, "most is 0"),
        ({"factor": 2, "shuffle_buffer": -1}, "shuffle_buffer is -1"),
        ({"factor": 2, "shuffle_buffer": 1.5}, "shuffle_buffer is 1.5"),
        ({"factor": 2, "seed": "a"}, "seed is 'a'"),
        ({"factor": "auto", "shuffle_buffer": 10}, "needs a factor to count by"),
        ({"loader": 7}, "a int gives no batches"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        EchoLoader(**{"loader": [torch.zeros(1)], **settings})
    assert len(EchoLoader([torch.zeros(1)], 9, most=9)) == 9


class Failing:
    """Fails at its fourth batch."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(3):
            yield torch.full((4,), number)
        raise OSError("the disk is gone")


@pytest.mark.parametrize("settings", [{"factor": 2}, {"factor": 2, "shuffle_buffer": 4}, {"factor": "auto"}])
def test_an_error_of_the_loader_surfaces_behind_what_came_before(settings: dict[str, Any]) -> None:
    iterator = iter(EchoLoader(Failing(), **settings))
    found = []
    with pytest.raises(OSError, match="the disk is gone"):
        found.extend(int(batch[0]) for batch in iterator)
    assert sorted(set(found)) == [0, 1, 2]
    if settings["factor"] == 2:
        assert found == [0, 0, 1, 1, 2, 2]
    with pytest.raises(LoaderError, match="failed before its epoch's end"):
        next(iterator)


@pytest.mark.parametrize("settings", [{"factor": 2}, {"factor": 2, "shuffle_buffer": 30}])
def test_the_state_after_an_error_is_behind_the_last_batch(
    dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    whole = all_shown(EchoLoader(own(dataset), **settings))
    finish = h5pack.H5Loader._finish

    def failing(self: Any, epoch: int, recipe: Any, batch: int, memory: Any) -> Any:
        if batch == 5:
            raise OSError("no")
        return finish(self, epoch, recipe, batch, memory)

    echo, found = EchoLoader(own(dataset, threads=1), **settings), []
    with monkeypatch.context() as patched:
        patched.setattr(h5pack.H5Loader, "_finish", failing)
        with pytest.raises(OSError, match="no"):
            found.extend(shown(batch) for batch in echo)
    assert 0 < len(found) < len(whole)
    again = EchoLoader(own(dataset), **settings)
    again.load_state_dict(through_json(echo.state_dict()))
    assert found + all_shown(again) == whole


def test_closed_and_pickled(dataset: h5pack.H5Dataset) -> None:
    for settings in ({"factor": 2}, {"factor": 2, "shuffle_buffer": 30}, {"factor": "auto"}):
        echo = EchoLoader(own(dataset), **settings)
        iterator: Any = iter(echo)
        next(iterator)
        iterator.close()
        with pytest.raises(LoaderError, match="was closed before its epoch's end"):
            next(iterator)
        copied = pickle.loads(pickle.dumps(echo))
        copied.set_epoch(0)
        if settings["factor"] == 2:
            assert all_shown(copied) == all_shown(EchoLoader(own(dataset), **settings))


# The automatic factor.


class Slow:
    """Batches that take their time, and who asked for them."""

    def __init__(self, seconds: float, batches: int = 20) -> None:
        self.seconds, self.batches = seconds, batches
        self.begun, self.threads, self.inside = 0, set[str](), 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.batches):
            assert self.inside == 0
            self.inside += 1
            self.begun += 1
            self.threads.add(threading.current_thread().name)
            time.sleep(self.seconds)
            self.inside -= 1
            yield torch.full((4,), number)


def stalls(loader: Any, step_seconds: float) -> tuple[list[int], float]:
    """The batches' numbers, and the share of the time behind the first batch that the step waited."""
    batches, waited = iter(loader), 0.0
    found = [int(next(batches)[0])]
    begin = time.perf_counter()
    while True:
        time.sleep(step_seconds)
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            return found, waited / (time.perf_counter() - begin)
        found.append(int(batch[0]))


def test_auto_hides_a_producer_that_is_three_times_slower() -> None:
    plain = stalls(Slow(0.045), 0.015)[1]
    assert plain > 0.5
    echo = EchoLoader(Slow(0.045), "auto")
    # The machine may be busy with other things at any one time.
    tries = []
    for _ in range(3):
        found, stalled = stalls(echo, 0.015)
        tries.append(stalled)
        assert found == sorted(found)
        assert set(found) == set(range(20))
        assert echo.fresh == 20
        assert echo.shown == len(found)
        if stalled < 0.1 and 2.4 < len(found) / 20 < 3.6:
            break
    assert min(tries) < 0.1, tries
    assert 2 < len(found) / 20 < 4.5


def test_auto_repeats_hardly_anything_of_a_fast_producer() -> None:
    found, _ = stalls(EchoLoader(Slow(0.001), "auto"), 0.02)
    assert set(found) == set(range(20))
    assert len(found) <= 24


def test_auto_shows_a_batch_at_most_so_often() -> None:
    for most in (1, 3):
        counts = Counter(stalls(EchoLoader(Slow(0.05, 5), "auto", most=most), 0.001)[0])
        assert set(counts) == set(range(5))
        # The last one is followed by the end, which comes at once.
        assert [counts[number] for number in range(4)] == [most] * 4


def test_auto_gives_repeats_that_say_so(dataset: h5pack.H5Dataset) -> None:
    found = [int(repeats_of(batch)) for batch in EchoLoader(Slow(0.02, 5), "auto", most=4)]
    assert found[:8] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_auto_pulls_in_one_thread_and_one_batch_ahead() -> None:
    slow = Slow(0.0)
    iterator = iter(EchoLoader(slow, "auto"))
    next(iterator)
    time.sleep(0.1)
    assert slow.begun == 2
    assert len(slow.threads) == 1
    assert threading.current_thread().name not in slow.threads


def test_auto_has_no_length() -> None:
    with pytest.raises(TypeError, match="has no length"):
        len(EchoLoader(Slow(0.0), "auto"))
    assert {int(batch[0]) for batch in list(EchoLoader(Slow(0.0), "auto"))} == set(range(20))


@pytest.mark.parametrize("kind", LOADERS)
def test_auto_resumes_where_it_was(dataset: h5pack.H5Dataset, kind: str) -> None:
    """Which batch comes next depends on the time; it is the same again, or the one behind it."""
    plain = [shown(batch) for batch in own(dataset)]
    echo = EchoLoader(LOADERS[kind](dataset), "auto", most=3)
    given: list[int] = []
    for batch in echo:
        rows = batch[-1].tolist()
        given.append(next(number for number, one in enumerate(plain) if [row for row, _ in one] == rows))
        state = through_json(echo.state_dict())
        assert (state["batch"], state["showing"]) == (given[-1], given.count(given[-1]))
        assert repeats_of(batch) == state["showing"] - 1
        loader = EchoLoader(LOADERS[kind](dataset), "auto", most=3)
        loader.load_state_dict(state)
        assert through_json(loader.state_dict()) == state
        rest = list(loader)
        if state["showing"] < 3:
            assert rest[0][-1].tolist() == rows
            assert repeats_of(rest[0]) == state["showing"]
        else:
            assert not rest or rest[0][-1].tolist() == [row for row, _ in plain[given[-1] + 1]]
        behind = [row for one in plain[given[-1] + 1 :] for row, _ in one]
        assert {row for one in rest for row in one[-1].tolist()} - set(rows) == set(behind)
    assert given == sorted(given)
    assert set(given) == set(range(BATCHES))
    assert echo.state_dict()["loader"]["epoch"] == 1


def fail_amid(loader: Any) -> None:
    for _ in loader:
        raise ZeroDivisionError


def test_auto_ends_its_thread_with_the_iterator() -> None:
    echo = EchoLoader(Slow(0.01, 1000), "auto")
    for _ in echo:
        break
    assert threads_end()
    iterator = iter(echo)
    next(iterator)
    forgotten = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert forgotten() is None
    assert threads_end()
    with pytest.raises(ZeroDivisionError):
        fail_amid(echo)
    gc.collect()
    assert threads_end()


def test_auto_waits_for_the_last_thread_before_it_begins_again() -> None:
    """A DataLoader that keeps its workers has one iterator for all epochs; `Slow` asserts that nobody else is in it."""
    slow = Slow(0.05)
    echo = EchoLoader(slow, "auto")
    for _ in range(3):
        iterator = iter(echo)
        next(iterator)
        while not slow.inside:
            time.sleep(0.001)
        del iterator
    workers: Any = DataLoader(range(40), batch_size=4, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    echo = EchoLoader(workers, "auto", most=1)
    for _ in range(2):
        assert next(iter(echo)).tolist() == [0, 1, 2, 3]
    assert [batch.tolist()[0] for batch in echo] == list(range(0, 40, 4))


def test_auto_lets_the_interpreter_exit() -> None:
    code = (
        "import time, torch\n"
        "from h5pack.feed.echo_loader import EchoLoader\n"
        "def batches():\n"
        "    while True:\n"
        "        time.sleep(0.05)\n"
        "        yield torch.zeros(3)\n"
        "iterator = iter(EchoLoader(batches(), 'auto'))\n"
        "next(iterator)\n"
        "next(iterator)\n"
        "print('done')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_auto_says_that_a_forked_child_needs_its_own_iterator() -> None:
    echo = EchoLoader(Slow(0.0), "auto")
    iterator = iter(echo)
    next(iterator)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            next(iterator)
        except LoaderError as error:
            code = 0 if "was forked" in str(error) and next(iter(echo)) is not None else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_auto_refuses_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = EchoLoader(Slow(0.0), "auto")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(OptionsError, match="another number of steps"):
        iter(echo)
    with pytest.raises(OptionsError, match="another number of steps"):
        EchoLoader(Slow(0.0), "auto")
    assert len(list(EchoLoader(Slow(0.0, 3), 2))) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", [{"factor": 2}, {"factor": 2, "shuffle_buffer": 40}, {"factor": "auto"}])
def test_around_a_device_feed_on_cuda(path: Path, settings: dict[str, Any]) -> None:
    dataset = h5pack.H5Dataset(path, with_rows=True)
    with h5py.File(path) as file:
        images = torch.from_numpy(file["images"][()]).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        echo = EchoLoader(DeviceFeed(own(dataset), "cuda", transform=lambda pixels: pixels.float() * 2), **settings)
        for _ in range(3):
            seen = Counter()
            for pixels, _, rows in echo:
                assert torch.equal(pixels, images[rows].float() * 2)
                seen.update(rows.tolist())
            assert sorted(seen) == list(range(packs.ROWS))
