"""`EchoLoader`: every batch is repeated as configured, every stop can be resumed, and no thread stays."""

from __future__ import annotations

import gc
import itertools
import json
import operator
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import h5pack
from h5pack.data import iteration
from h5pack.device import echo
from h5pack.device.batch import repeats_of
from h5pack.device.echo import EchoLoader, _FetchClock
from h5pack.device.feed import DeviceFeed
from h5pack.errors import LoaderError, OptionsError, StateError
from tests.crashing import wait_for
from tests.data import packs
from tests.data.packs import all_same, threads_end
from tests.device.feeds import (
    BATCH,
    LOADERS,
    Breaking,
    Gated,
    Keyed,
    Numbers,
    data_loader,
    h5_loader,
    needs_gpu,
    stateful_loader,
)
from tests.read.files import in_child

BATCHES = 9
"""Of 103 rows; the last one has 7."""


KINDS: dict[str, Callable[[Any], Any]] = {
    **LOADERS,
    "DeviceFeed": lambda dataset: DeviceFeed(h5_loader(dataset), "cpu"),
}
JSON_KINDS = [kind for kind in KINDS if kind != "stateful"]
"""Loaders whose state is written as JSON."""


def numbered_rows(batch: Any) -> list[tuple[int, int]]:
    """Row and repeat of each sample of a batch with rows."""
    return [(row, repeats_of(batch)) for row in batch[-1].tolist()]


def epoch_of(batches: Any) -> list[list[tuple[int, int]]]:
    return [numbered_rows(batch) for batch in batches]


def epochs(dataset: Any, factor: float, count: int) -> list[list[list[tuple[int, int]]]]:
    """The first epochs of an `EchoLoader` around an `H5Loader`."""
    loader = EchoLoader(h5_loader(dataset), factor)
    return [epoch_of(loader) for _ in range(count)]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


# Fixed factors.


@pytest.mark.parametrize(
    ("kind", "factor", "counts"),
    [
        *(("H5Loader", 1, [1]), ("H5Loader", 4 / 3, [1, 1, 2]), ("DataLoader", 2, [2]), ("rows", 2.5, [2, 3])),
        ("DeviceFeed", 3, [3]),
    ],
)
def test_each_batch_is_given_factor_times(dataset: h5pack.H5Dataset, kind: str, factor: float, counts: Any) -> None:
    echo, counts = EchoLoader(KINDS[kind](dataset), factor), itertools.cycle(counts)
    expected = [(batch, repeat) for batch in h5_loader(dataset) for repeat in range(next(counts))]
    found = list(echo)
    assert len(echo) == len(found) == int(BATCHES * Fraction(factor).limit_denominator(99))
    assert all_same(found, [batch for batch, _ in expected])
    assert [repeats_of(batch) for batch in found] == [repeat for _, repeat in expected]
    assert (echo.shown, echo.fresh) == (len(found), BATCHES)
    assert echo.epoch == 0
    assert len(list(echo)) == len(found)
    assert echo.epoch == 1
    assert echo.dataset is dataset


def test_repeats_share_tensors_and_the_first_is_the_loaders_batch() -> None:
    batches = [[torch.arange(4) + number, torch.ones(4)] for number in range(3)]
    found = list(EchoLoader(batches, 2))
    for number, batch in enumerate(batches):
        assert found[2 * number] is batch
        assert found[2 * number + 1] is not batch
        assert all(one is other for one, other in zip(found[2 * number + 1], batch, strict=True))
        assert repeats_of(batch) == 0


@pytest.mark.parametrize(
    ("factor", "batches", "length"), [(2.3, 10, 23), (Fraction(7, 3), 30, 70), (np.float32(1.1), 30, 33), (9, 1, 9)]
)
def test_factors_are_decimal_fractions(factor: Any, batches: int, length: int) -> None:
    """2.3 in binary is a little less, and ten batches of it would be 22."""
    echo = EchoLoader([torch.zeros(1)] * batches, factor, max_factor=9)
    assert len(echo) == len(list(echo)) == length


def test_a_state_can_be_stored_as_json_if_the_factor_is_a_numpy_integer(dataset: h5pack.H5Dataset) -> None:
    for factor in (np.int64(2), Fraction(np.int64(2))):
        state = EchoLoader(h5_loader(dataset), factor).state_dict()
        assert json.loads(json.dumps(state)) == EchoLoader(h5_loader(dataset), 2).state_dict()


def test_nested_echoes_count_repeats_of_both(dataset: h5pack.H5Dataset) -> None:
    found = epoch_of(EchoLoader(EchoLoader(h5_loader(dataset), 2), 3))
    seen = Counter(itertools.chain.from_iterable(found))
    assert seen == {(row, repeat): 1 for row in range(packs.ROWS) for repeat in range(6)}


# Inside and around a DeviceFeed.


def test_keys_differ_between_repeats_inside_a_feed_and_not_around_it(dataset: h5pack.H5Dataset) -> None:
    inside, around = Keyed(), Keyed()
    loaders = [
        DeviceFeed(EchoLoader(h5_loader(dataset), 2), "cpu", transform=inside),
        EchoLoader(DeviceFeed(h5_loader(dataset), "cpu", transform=around), 2),
    ]
    for epoch in range(2):
        for loader in loaders:
            assert Counter(row for batch in loader for row in batch[-1].tolist()) == dict.fromkeys(range(packs.ROWS), 2)
        for keyed, repeats in ((inside, (0, 1)), (around, (0,))):
            keys = Counter((row, key.epoch, key.repeats) for key in keyed.keys for row in key.rows.tolist())
            assert keys == {(row, epoch, repeat): 1 for row in range(packs.ROWS) for repeat in repeats}
            keyed.keys.clear()


# Resuming.


@pytest.mark.parametrize("kind", [*JSON_KINDS, "in a DeviceFeed"])
def test_resumed_at_every_batch(dataset: h5pack.H5Dataset, kind: str) -> None:
    def new() -> Any:
        if kind == "in a DeviceFeed":
            return DeviceFeed(EchoLoader(h5_loader(dataset), 2.5), "cpu")
        return EchoLoader(KINDS[kind](dataset), 2.5)

    whole, first = epochs(dataset, 2.5, 3), new()
    for epoch in range(2):
        states = [first.state_dict()]
        for batch in first:
            assert numbered_rows(batch) == whole[epoch][len(states) - 1]
            states.append(first.state_dict())
        states.append(first.state_dict())
        assert [state["epoch"] for state in states] == [epoch] * (len(states) - 1) + [epoch + 1]
        for done, state in list(enumerate(map(through_json, states)))[:: 1 if epoch == 0 else 5]:
            loader = new()
            loader.load_state_dict(state)
            assert through_json(loader.state_dict()) == state
            if done % 2:
                loader.set_epoch(epoch if done <= len(whole[epoch]) else epoch + 1)
            if done <= len(whole[epoch]):
                assert epoch_of(loader) == whole[epoch][done:]
            if done % 4 == 0 or done > len(whole[epoch]):
                assert epoch_of(loader) == whole[epoch + 1]


@pytest.mark.parametrize("factor", [1, 2, 2.5])
@pytest.mark.parametrize("function", ["_FixedEcho._end_batch", "DeliveryCursor.advance"])
def test_an_interrupt_during_the_last_delivery_of_a_batch_can_be_resumed(
    dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch, factor: float, function: str
) -> None:
    expected = [batch[-1].tolist() for batch in EchoLoader(h5_loader(dataset), factor)]
    interrupted, seen = EchoLoader(h5_loader(dataset), factor), []
    original = operator.attrgetter(function)(echo)

    def interrupt(*arguments: Any) -> None:
        if len(seen) > 3:
            raise KeyboardInterrupt
        original(*arguments)

    monkeypatch.setattr(f"h5pack.device.echo.{function}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        seen.extend(batch[-1].tolist() for batch in interrupted)
    monkeypatch.undo()
    resumed = EchoLoader(h5_loader(dataset), factor)
    resumed.load_state_dict(through_json(interrupted.state_dict()))
    rest = itertools.islice(resumed, len(expected))
    assert seen + [batch[-1].tolist() for batch in rest] == expected


@pytest.mark.parametrize("kind", ["workers", "stateful"])
def test_resumed_over_other_loaders(dataset: h5pack.H5Dataset, kind: str) -> None:
    def new() -> EchoLoader:
        return EchoLoader(data_loader(dataset, workers=2) if kind == "workers" else stateful_loader(dataset), 2)

    whole = epochs(dataset, 2, 2)
    for done in (3, 10) if kind == "workers" else (1, 2, 7, 14, 18):
        stopped = new()
        assert epoch_of(itertools.islice(stopped, done)) == whole[0][:done]
        loader = new()
        loader.load_state_dict(through_json(stopped.state_dict()) if kind == "workers" else stopped.state_dict())
        assert epoch_of(loader) == whole[0][done:]
        assert epoch_of(loader) == whole[1]


def test_resumed_after_every_two_batches(dataset: h5pack.H5Dataset) -> None:
    """The state of a resumed loader counts from the beginning of the epoch."""
    (whole,) = epochs(dataset, 2.5, 1)
    found: list[Any] = []
    state = EchoLoader(h5_loader(dataset), 2.5).state_dict()
    while len(found) < len(whole):
        loader = EchoLoader(h5_loader(dataset), 2.5)
        loader.load_state_dict(state)
        found += epoch_of(itertools.islice(loader, 2))
        state = through_json(loader.state_dict())
    assert found == whole


def test_states_keep_the_form_of_version_1(dataset: h5pack.H5Dataset) -> None:
    echo = EchoLoader(h5_loader(dataset), 2.5)
    list(itertools.islice(echo, 4))
    state = echo.state_dict()
    settings = {"version": 1, "factor": [5, 2], "most": None, "shuffle_buffer": 0, "seed": None}
    expected = {"echo": settings, "epoch": 0, "batch": 1, "showing": 2, "sizes": []}
    assert {name: state[name] for name in expected} == expected
    assert state["loader"]["batches"] == 1
    assert EchoLoader(h5_loader(dataset), "auto", max_factor=3).state_dict()["echo"]["most"] == 3


def test_set_epoch_drops_a_loaded_state_of_another_epoch(dataset: h5pack.H5Dataset) -> None:
    whole = epochs(dataset, 2.5, 3)
    echo = EchoLoader(h5_loader(dataset), 2.5)
    list(itertools.islice(echo, 6))
    state = echo.state_dict()
    echo.set_epoch(2)
    assert epoch_of(echo) == whole[2]
    echo.load_state_dict(state)
    echo.set_epoch(1)
    assert epoch_of(echo) == whole[1]


def test_states_of_other_settings_are_refused(dataset: h5pack.H5Dataset) -> None:
    state = EchoLoader(h5_loader(dataset), 2).state_dict()
    for given, factor in (
        (state, 3),
        (state, "auto"),
        ({**state, "echo": {**state["echo"], "shuffle_buffer": 30}}, 2),
        ({**state, "echo": {**state["echo"], "version": 2}}, 2),
        ({**state, "batch": "x"}, 2),
        ({**state, "batch": -1}, 2),
        ({**state, "showing": -1}, 2),
        ({**state, "showing": 1.5}, 2),
        (h5_loader(dataset).state_dict(), 2),
        (EchoLoader(h5pack.H5Loader(dataset, BATCH, window=3, seed=8), 2).state_dict(), 2),
    ):
        with pytest.raises(StateError):
            EchoLoader(h5_loader(dataset), factor).load_state_dict(given)


# Errors.


@pytest.mark.parametrize(
    ("settings", "parameter"),
    [({"factor": factor}, "factor") for factor in (0.5, float("nan"), float("inf"), "two", "2", True, np.True_, None)]
    + [({"factor": np.ones(2)}, "factor")]
    + [({"factor": 9}, "max_factor"), ({"max_factor": 0}, None)]
    + [({"loader": loader}, "loader") for loader in (7, "pack.h5", b"pack.h5", np.array(7), torch.tensor(7))],
)
def test_invalid_options_are_refused(settings: dict[str, Any], parameter: str | None) -> None:
    with pytest.raises(OptionsError) as caught:
        EchoLoader(**{"loader": [torch.zeros(1)], **settings})
    assert parameter is None or parameter in {name.partition("=")[0] for name in caught.value.parameters}


@pytest.mark.parametrize("factor", [2, "auto"])
def test_an_error_of_the_loader_comes_after_the_batches_before_it(factor: Any) -> None:
    iterator = iter(EchoLoader(Breaking(3, OSError("the disk is gone")), factor))
    found = []
    with pytest.raises(OSError, match="the disk is gone"):
        found.extend(int(batch[0]) for batch in iterator)
    assert found == [0, 0, 1, 1, 2, 2] if factor == 2 else {*found} == {0, 1, 2}
    with pytest.raises(LoaderError):
        next(iterator)


def test_the_state_after_an_error_is_that_of_the_last_batch(
    dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = epochs(dataset, 2, 1)
    finish = h5pack.H5Loader._finish

    def failing(self: Any, epoch: int, batch: int, memory: Any) -> Any:
        if batch == 5:
            raise OSError("no")
        return finish(self, epoch, batch, memory)

    echo, found = EchoLoader(h5_loader(dataset), 2), []
    with monkeypatch.context() as patched:
        patched.setattr(h5pack.H5Loader, "_finish", failing)
        with pytest.raises(OSError, match="no"):
            found.extend(numbered_rows(batch) for batch in echo)
    # None at all if one thread fails before the other has filled the first batch.
    assert len(found) < len(whole)
    again = EchoLoader(h5_loader(dataset), 2)
    again.load_state_dict(through_json(echo.state_dict()))
    assert found + epoch_of(again) == whole


@pytest.mark.parametrize("factor", [2, "auto"])
def test_a_closed_iterator_refuses_and_a_pickled_loader_begins_again(dataset: h5pack.H5Dataset, factor: Any) -> None:
    with EchoLoader(h5_loader(dataset), factor) as echo:
        iterator: Any = iter(echo)
        next(iterator)
        iterator.close()
        with pytest.raises(LoaderError):
            next(iterator)
        copied = pickle.loads(pickle.dumps(echo))
        assert copied.state_dict() == echo.state_dict()
        copied.set_epoch(0)
        found = epoch_of(copied)
        assert {row for batch in found for row, _ in batch} == set(range(packs.ROWS))
        if factor == 2:
            assert [found] == epochs(dataset, 2, 1)
        next(iter(echo))
    assert threads_end()
    assert f"factor={factor!r}, max_factor=8" in repr(echo)


# The automatic factor.


@pytest.mark.parametrize("steps", [1, 3])
def test_auto_repeats_until_the_next_batch_is_ready(steps: int) -> None:
    """A loader that is `steps` times slower than the step."""
    loader = Gated(11)
    echo = EchoLoader(loader, "auto")
    iterator = iter(echo)
    found = []
    for _ in range(10):
        loader.release(iterator)
        found += [next(iterator) for _ in range(steps)]
    assert [int(batch[0]) for batch in found] == [number for number in range(10) for _ in range(steps)]
    assert [repeats_of(batch) for batch in found] == [*range(steps)] * 10
    assert (echo.fresh, echo.shown) == (10, 10 * steps)
    # The last batch is not repeated reliably: the end comes at once.
    loader.release(iterator)
    assert int(next(iterator)[0]) == 10
    wait_for(lambda: iterator.thread._batches.qsize() > 0)
    assert next(iterator, None) is None


@pytest.mark.parametrize("max_factor", [1, 3])
def test_auto_waits_for_a_batch_after_max_factor_repeats(max_factor: int) -> None:
    loader = Gated(5)
    iterator = iter(EchoLoader(loader, "auto", max_factor=max_factor))
    # Not the last batch: the end comes at once.
    for number in range(4):
        # One more step than a batch may be repeated, which a batch that comes late must end.
        late = threading.Timer(0.05, loader.tokens.release)
        late.start()
        assert int(next(iterator)[0]) == number
        late.join()
        assert [int(next(iterator)[0]) for _ in range(max_factor - 1)] == [number] * (max_factor - 1)
    loader.tokens.release()
    assert int(next(iterator)[0]) == 4


def test_auto_fetches_in_one_thread_and_one_batch_ahead() -> None:
    loader = Gated(released=20)
    echo = EchoLoader(loader, "auto")
    iterator: Any = iter(echo)
    next(iterator)
    wait_for(lambda: iterator.thread._batches.qsize() > 0)
    with pytest.raises(TypeError):
        len(echo)
    assert loader.begun == 2
    assert len(loader.threads - {threading.current_thread().name}) == len(loader.threads) == 1


@pytest.mark.parametrize("kind", JSON_KINDS)
def test_auto_resumes_at_the_same_batch_or_the_next(dataset: h5pack.H5Dataset, kind: str) -> None:
    """Which batch comes next depends on the time; it is the same again, or the one behind it."""
    plain = [numbered_rows(batch) for batch in h5_loader(dataset)]
    echo = EchoLoader(KINDS[kind](dataset), "auto", max_factor=3)
    given: list[int] = []
    for batch in echo:
        rows = batch[-1].tolist()
        given.append(next(number for number, one in enumerate(plain) if [row for row, _ in one] == rows))
        state = through_json(echo.state_dict())
        assert (state["batch"], state["showing"]) == (given[-1], given.count(given[-1]))
        assert repeats_of(batch) == state["showing"] - 1
        loader = EchoLoader(KINDS[kind](dataset), "auto", max_factor=3)
        loader.load_state_dict(state)
        assert through_json(loader.state_dict()) == state
        rest = list(loader)
        if state["showing"] < 3:
            assert (rest[0][-1].tolist(), repeats_of(rest[0])) == (rows, state["showing"])
        else:
            assert not rest or rest[0][-1].tolist() == [row for row, _ in plain[given[-1] + 1]]
        behind = [row for one in plain[given[-1] + 1 :] for row, _ in one]
        assert {row for one in rest for row in one[-1].tolist()} - set(rows) == set(behind)
    assert (given, {*given}) == (sorted(given), {*range(BATCHES)})
    assert echo.state_dict()["loader"]["epoch"] == 1


def test_auto_takes_loaders_whose_device_is_a_name() -> None:
    loader = Numbers(3)
    loader.device = "cuda:0"  # type: ignore[attr-defined]
    assert len({int(batch[0, 0]) for batch in EchoLoader(loader, "auto")}) == 3


def test_auto_ends_its_thread_with_the_iterator() -> None:
    echo = EchoLoader(Gated(1000, released=1000), "auto")
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
    # Before the interpreter exits, all threads are stopped.
    iterator = iter(echo)
    next(iterator)
    iteration._stop_all()
    assert threads_end()


def test_auto_waits_for_the_last_thread_before_it_begins_again() -> None:
    """A DataLoader with persistent workers has one iterator for all epochs, in which `Gated` allows one thread."""
    loader = Gated()
    echo = EchoLoader(loader, "auto")
    for _ in range(3):
        loader.tokens = threading.Semaphore(1)
        iterator = iter(echo)
        next(iterator)
        wait_for(lambda: loader.inside == 1 and loader.begun % 2 == 0)
        del iterator
        # Its thread is still inside; the next iteration waits for it.
        threading.Timer(0.05, loader.tokens.release).start()
    gc.collect()
    assert threads_end()
    workers: Any = DataLoader(range(40), batch_size=4, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    echo = EchoLoader(workers, "auto", max_factor=1)
    for _ in range(2):
        assert next(iter(echo)).tolist() == [0, 1, 2, 3]
    assert [batch.tolist()[0] for batch in echo] == list(range(0, 40, 4))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_auto_in_a_forked_child_needs_an_iterator_of_its_own() -> None:
    echo = EchoLoader(Gated(released=20), "auto")
    iterator = iter(echo)
    next(iterator)

    def child() -> bool:
        with pytest.raises(LoaderError):
            next(iterator)
        return next(iter(echo)) is not None

    assert in_child(child)


def test_auto_refuses_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = EchoLoader(Gated(released=20), "auto")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    for start in (lambda: iter(echo), lambda: EchoLoader(Gated(released=20), "auto")):
        with pytest.raises(OptionsError):
            start()
    assert len(list(EchoLoader(Gated(3, released=3), 2))) == 6


@needs_gpu
@pytest.mark.parametrize("factor", [2, "auto"])
def test_around_a_device_feed_on_cuda(dataset: h5pack.H5Dataset, factor: Any) -> None:
    with h5py.File(dataset.path) as file:
        images = torch.from_numpy(file["images"][()]).cuda()
    with torch.cuda.stream(torch.cuda.Stream()):
        echo = EchoLoader(DeviceFeed(h5_loader(dataset), "cuda", transform=lambda pixels: pixels.float() * 2), factor)
        for _ in range(3):
            seen = set()
            for pixels, _, rows in echo:
                assert torch.equal(pixels, images[rows].float() * 2)
                seen.update(rows.tolist())
            assert seen == set(range(packs.ROWS))


def test_the_thread_uses_the_consumers_stream_of_the_feeds_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed copies to cuda:1 while cuda:0 is the current device."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "set_stream", calls.append)
    clock = _FetchClock(torch.device("cuda", 1))
    clock.enter()
    assert calls == ["stream of cuda:1", "stream of None"]
