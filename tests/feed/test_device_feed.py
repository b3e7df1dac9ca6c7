"""`DeviceFeed`: the loader's batches and states, whatever was read ahead; what CUDA does is played on the CPU."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import pickle
import threading
import time
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import h5pack
from h5pack.errors import LoaderError, OptionsError, StateError
from h5pack.feed import device_feed
from h5pack.feed.batch_key import BatchKey, EchoedBatch, repeats_of
from h5pack.feed.batch_parts import map_tensors
from h5pack.feed.cuda_copier import CudaCopier
from h5pack.feed.device_feed import DeviceFeed
from h5pack.feed.image_transform import ImageTransform
from tests.feed import packs
from tests.feed.packs import all_same, loader_threads, reference, same, threads_end

BATCH = 12
Pair = namedtuple("Pair", "images rows")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    with packs.watched():
        yield
    gc.collect()
    assert threads_end(), loader_threads()


@pytest.fixture
def dataset(tmp_path: Path) -> h5pack.H5Dataset:
    return h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5"), with_rows=True)


class PlayedCopier:
    """Does on the CPU, and at once, what `CudaCopier` queues on a device."""

    def __init__(self, transform: ImageTransform | None) -> None:
        self.transform = transform
        self.launched = self.received = 0
        self.ahead: list[int] = []

    def begin(self) -> None:
        pass

    def enter(self) -> None:
        assert threading.current_thread().name == "h5pack-feed"

    def prepare(self, batch: Any) -> Any:
        return batch

    def launch(self, batch: Any, epoch: int) -> Any:
        assert threading.current_thread() is threading.main_thread()
        self.launched += 1
        batch = map_tensors(batch, torch.clone)
        return batch if self.transform is None else self.transform(batch, epoch)

    def receive(self, launched: Any) -> Any:
        self.received += 1
        self.ahead.append(self.launched - self.received)
        return launched


class PlayedFeed(DeviceFeed):
    """A feed that reads ahead as on CUDA."""

    played: PlayedCopier

    def _begin_copying(self) -> Any:
        self.played = PlayedCopier(self._transform)
        return self.played


FEEDS: dict[str, Callable[..., DeviceFeed]] = {
    "direct": DeviceFeed,
    **{
        f"depth {depth}": lambda loader, depth=depth, **more: PlayedFeed(loader, depth=depth, **more)
        for depth in (1, 2, 3)
    },
}
every_feed = pytest.mark.parametrize("feed_of", FEEDS.values(), ids=FEEDS)


def h5_loader(dataset: Any) -> Any:
    return h5pack.H5Loader(dataset, BATCH, window=3, seed=7, threads=1)


def data_loader(dataset: Any, workers: int = 0, **settings: Any) -> Any:
    sampler = h5pack.ChunkBatchSampler(dataset, BATCH, window=3, seed=7)
    return DataLoader(dataset, batch_sampler=sampler, num_workers=workers, **settings)


def row_loader(dataset: Any) -> Any:
    return DataLoader(dataset, BATCH, sampler=h5pack.ChunkSampler(dataset, window=3, seed=7))


def stateful_loader(dataset: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install 'h5pack[dev]'")
    sampler = h5pack.ChunkBatchSampler(dataset, BATCH, window=3, seed=7)
    return module.StatefulDataLoader(dataset, batch_sampler=sampler)


LOADERS = {"H5Loader": h5_loader, "DataLoader": data_loader, "rows": row_loader, "stateful": stateful_loader}


class Numbers:
    """A loader that tells nothing about itself."""

    def __init__(self, count: int = 5) -> None:
        self.count = count
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            self.given += 1
            yield torch.full((2, 3), number)


class Keyed:
    """A transform that keeps its keys."""

    keyed = True

    def __init__(self) -> None:
        self.keys: list[BatchKey] = []

    def __call__(self, images: torch.Tensor, key: BatchKey) -> torch.Tensor:
        self.keys.append(key)
        return images.float() + 1000 * key.rows.reshape(-1, *[1] * (images.ndim - 1)) + key.epoch


# What comes out.


@every_feed
@pytest.mark.parametrize("kind", LOADERS)
def test_the_loaders_batches_in_order(dataset: h5pack.H5Dataset, feed_of: Any, kind: str) -> None:
    feed = feed_of(LOADERS[kind](dataset))
    expected = [list(LOADERS[kind](dataset)) for _ in range(1)]
    assert len(feed) == len(expected[0]) == 9
    assert feed.dataset is dataset
    for batches in expected:
        assert all_same(list(feed), batches)
    assert len(list(feed)) == 9
    assert feed.epoch == 1
    feed.set_epoch(0)
    assert all_same(list(feed), expected[0])
    assert feed.epoch == 0


def test_on_the_cpu_nothing_is_copied() -> None:
    batches = [[torch.zeros(2), "text"], (torch.ones(2), 3), {"images": torch.ones(1)}]
    found = list(DeviceFeed(batches, "cpu"))
    assert all(one is two for one, two in zip(found, batches, strict=True))
    assert not loader_threads()


@every_feed
def test_containers_stay_and_all_but_the_images_passes(feed_of: Any) -> None:
    images, rows, thing = torch.ones(2, 3), torch.arange(2), object()
    batches: list[Any] = [
        [images, rows, thing],
        (images, None, "text"),
        Pair(images, rows),
        {"x": thing, "image": images},
        OrderedDict(images=images, more=[rows, (thing, {"deep": rows})]),
        images,
        EchoedBatch([images, rows], 2),
        EchoedBatch.of((images, rows), torch.tensor([1, 2])),
        EchoedBatch.of({"images": images}, 1),
        EchoedBatch.of(images, 3),
    ]
    found = list(feed_of(batches, transform=lambda part: part * 5))
    for one, two in zip(found, batches, strict=True):
        assert type(one) is type(two)
        assert torch.equal(torch.as_tensor(repeats_of(one)), torch.as_tensor(repeats_of(two)))
        changed = one
        if isinstance(one, dict):
            changed = one.get("images", one.get("image"))
        elif not isinstance(one, torch.Tensor):
            changed = one[0]
        assert changed.unique().tolist() == [5]
    assert found[0][2] is thing
    assert found[4]["more"][1][0] is thing
    assert torch.equal(found[4]["more"][1][1]["deep"], rows)
    # The loader may show its batches again.
    assert images.unique().tolist() == [1]
    assert batches[0][0] is images


@every_feed
def test_where_the_images_are(feed_of: Any) -> None:
    one, two = torch.ones(2), torch.full((2,), 2)
    for place, batch in (
        (1, [one, two]),
        (-1, (one, two)),
        ("right", {"left": one, "right": two}),
        ("rows", Pair(one, two)),
    ):
        (found,) = feed_of([batch], transform=torch.neg, images=place)
        parts = list(found.values() if isinstance(found, dict) else found)
        assert [part.unique().tolist() for part in parts] == [[1], [-2]]
    for place, batch, message in (
        (None, ["text", one], "the images of a batch of 2 parts are a str, not a tensor"),
        (4, [one], "no images at 4 in a batch of 1 parts; say images="),
        (None, {"left": one, "right": two}, "no images at None in a batch of the keys 'left', 'right'"),
        ("x", {"y": one}, "no images at 'x'"),
        (None, 7, "no images at None in a batch of type int"),
        ("x", Pair(one, two), "no images at 'x'"),
    ):
        with pytest.raises(OptionsError, match=message):
            list(feed_of([batch], transform=torch.neg, images=place))


# Keys.


@every_feed
@pytest.mark.parametrize("kind", LOADERS)
def test_the_key_of_each_batch(dataset: h5pack.H5Dataset, feed_of: Any, kind: str) -> None:
    keyed = Keyed()
    feed = feed_of(LOADERS[kind](dataset), transform=keyed)
    for epoch in (0, 1, 5):
        feed.set_epoch(epoch)
        keyed.keys.clear()
        for images, labels, rows in feed:
            assert torch.equal(labels, rows)
            stored = torch.from_numpy(packs.values())[rows]
            assert torch.equal(images, stored.float() + 1000 * rows.reshape(-1, 1, 1, 1) + epoch)
        assert [key.epoch for key in keyed.keys] == [epoch] * 9
        assert sorted(torch.cat([key.rows for key in keyed.keys]).tolist()) == list(range(packs.ROWS))


@every_feed
def test_keys_of_other_loaders(feed_of: Any) -> None:
    keyed = Keyed()
    images, rows = torch.zeros(3, 2), torch.tensor([5, 6, 9])
    repeats = torch.tensor([0, 2, 1])
    batches = [
        {"images": images, "rows": rows},
        EchoedBatch([images, "x", rows], 4),
        EchoedBatch.of((images, "x", rows), repeats),
        Pair(images, rows),
    ]
    feed = feed_of(batches, transform=keyed)
    for epoch in range(2):
        keyed.keys.clear()
        found = list(feed)
        assert [key.epoch for key in keyed.keys] == [epoch] * 4
        assert all(torch.equal(key.rows, rows) for key in keyed.keys)
        assert [keyed.keys[number].repeats for number in (0, 1, 3)] == [0, 4, 0]
        assert torch.equal(torch.as_tensor(keyed.keys[2].repeats), repeats)
        assert torch.equal(found[0]["rows"], rows)
        assert torch.equal(found[1][-1], rows)
    feed.set_epoch(7)
    assert len(list(feed)) == 4
    assert (keyed.keys[-1].epoch, feed.epoch) == (7, 7)


@every_feed
def test_keys_need_rows(dataset: h5pack.H5Dataset, feed_of: Any) -> None:
    plain = h5pack.H5Dataset(dataset.path)
    message = r"Keyed draws by row, and the dataset's batches have no rows; open .* with_rows=True\)"
    for data in (plain, Subset(plain, [1, 2]), h5pack.ConcatPack([plain, plain])):
        with pytest.raises(OptionsError, match=message):
            feed_of(DataLoader(data, 2), transform=Keyed())
    images, labels = torch.zeros(3, 2), torch.arange(3)
    for batch in (
        [images, labels, "x"],
        [images, "x", labels.int()],
        [images, "x", torch.arange(4)],
        {"images": images},
        images,
        labels,
    ):
        with pytest.raises(OptionsError, match="does not end in its 3 row numbers, int64"):
            list(feed_of([batch], transform=Keyed()))
    # An ImageFolder's batches: labels must not pass for rows.
    with pytest.raises(OptionsError, match="the second of a batch's two parts may be labels as well"):
        list(feed_of(DataLoader(TensorDataset(images, labels), 3), transform=Keyed()))
    without = h5pack.H5Dataset(dataset.path, labels=None, with_rows=True)
    assert len(list(feed_of(h5_loader(without), transform=Keyed()))) == 9


# State.


def end_of(feed: DeviceFeed) -> list[Any]:
    """The rows of the rest of an epoch, batch by batch."""
    return [batch[-1].tolist() for batch in feed]


@every_feed
@pytest.mark.parametrize("kind", LOADERS)
def test_resume_at_every_batch(dataset: h5pack.H5Dataset, feed_of: Any, kind: str) -> None:
    epochs = [end_of(DeviceFeed(LOADERS[kind](dataset)))]
    feed = feed_of(LOADERS[kind](dataset))
    list(feed)
    epochs.append(end_of(feed))
    assert epochs[0] != epochs[1]
    flat = epochs[0] + epochs[1]
    feed = feed_of(LOADERS[kind](dataset))
    states = [feed.state_dict()]
    for epoch in epochs:
        iterator = iter(feed)
        for rows in epoch:
            assert same(next(iterator)[-1], torch.tensor(rows))
            states.append(feed.state_dict())
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)
        # Behind the epoch it is the beginning of the next.
        states[-1] = feed.state_dict()
        if epoch is epochs[0]:
            # Resumed there, no epoch is empty; a StatefulDataLoader's own rule is the same.
            other = feed_of(LOADERS[kind](dataset))
            other.load_state_dict(states[-1])
            assert end_of(other) == epochs[1]
    for taken, state in enumerate(states[:-1]):
        if kind != "stateful":
            json.dumps(state)
        other = feed_of(LOADERS[kind](dataset))
        other.load_state_dict(pickle.loads(pickle.dumps(state)))
        found = end_of(other)
        while len(found) < len(flat) - taken:
            found += end_of(other)
        assert found == flat[taken:], taken


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_resume_of_a_loader_with_workers(dataset: h5pack.H5Dataset, depth: int) -> None:
    feed_of = (lambda loader: PlayedFeed(loader, depth=depth)) if depth else DeviceFeed
    expected = end_of(DeviceFeed(h5_loader(dataset)))
    feed = feed_of(data_loader(dataset, 2, persistent_workers=True))
    for taken in range(1, 10):
        feed.set_epoch(0)
        iterator = iter(feed)
        assert [next(iterator)[-1].tolist() for _ in range(taken)] == expected[:taken]
        state = feed.state_dict()
        assert (state["epoch"], state["batches"]) == (0, taken)
        del iterator
        # The same workers go on, right after the break.
        feed.load_state_dict(state)
        assert end_of(feed) == expected[taken:]
    assert feed.state_dict()["epoch"] == 1
    assert feed.state_dict()["batches"] == 0
    feed.close()


def test_workers_that_stay_serve_one_iteration(dataset: h5pack.H5Dataset) -> None:
    feed = PlayedFeed(data_loader(dataset, 1, persistent_workers=True), depth=1)
    held = iter(feed)
    next(held)
    feed.set_epoch(0)
    assert end_of(feed) == end_of(DeviceFeed(h5_loader(dataset)))
    with pytest.raises(LoaderError, match="the iterator was closed"):
        list(held)


@every_feed
def test_states_are_the_loaders_own(dataset: h5pack.H5Dataset, feed_of: Any) -> None:
    loader = h5_loader(dataset)
    feed = feed_of(loader)
    iterator = iter(feed)
    assert feed.state_dict()["batches"] == 0
    next(iterator)
    next(iterator)
    bare = h5_loader(dataset)
    bare.load_state_dict(feed.state_dict())
    rest = end_of(DeviceFeed(bare))
    assert rest == [batch[-1].tolist() for batch in iterator]
    assert len(rest) == 7


@every_feed
def test_another_epoch_or_state_amid_an_iteration(dataset: h5pack.H5Dataset, feed_of: Any) -> None:
    for kind in ("H5Loader", "DataLoader"):
        feed = feed_of(LOADERS[kind](dataset))
        iterator = iter(feed)
        next(iterator)
        state = feed.state_dict()
        next(iterator)
        feed.set_epoch(4)
        assert (feed.state_dict()["epoch"], feed.state_dict()["batches"]) == (4, 0)
        assert len(list(iterator)) == 7
        assert feed.state_dict()["epoch"] == 4
        feed.load_state_dict(state)
        assert feed.state_dict() == state
        assert len(list(feed)) == 8


@every_feed
def test_the_epoch_is_kept_where_no_loader_tells_it(feed_of: Any) -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install 'h5pack[dev]'")
    keyed = Keyed()

    def make() -> Any:
        data = [{"images": torch.zeros(2), "rows": row} for row in range(6)]
        return feed_of(module.StatefulDataLoader(data, 2, shuffle=False), transform=keyed)

    feed = make()
    list(feed)
    iterator = iter(feed)
    next(iterator)
    state = feed.state_dict()
    assert state["epoch"] == 1
    del iterator
    other = make()
    other.load_state_dict(state)
    keyed.keys.clear()
    assert len(list(other)) == 2
    assert [(key.epoch, key.rows.tolist()) for key in keyed.keys] == [(1, [2, 3]), (1, [4, 5])]
    with pytest.raises(StateError, match=r"not a state of a StatefulDataLoader .*give what state_dict\(\) returned"):
        other.load_state_dict({"order": 3})


@every_feed
def test_loaders_without_state(feed_of: Any) -> None:
    for loader, name in ((DataLoader([1, 2, 3]), "DataLoader"), (Numbers(), "Numbers")):
        feed = feed_of(loader)
        list(feed)
        message = f"a {name} keeps no state, and has no sampler that does; use an H5Loader"
        with pytest.raises(StateError, match=message):
            feed.state_dict()
        with pytest.raises(StateError, match=message):
            feed.load_state_dict({"epoch": 0, "loader": {}})
    with pytest.raises(TypeError):
        len(feed_of(Numbers()))
    # One that wraps such a loader says it only to those who ask.
    outer = feed_of(DeviceFeed(Numbers()))
    assert len(list(outer)) == 5
    with pytest.raises(StateError, match="a Numbers keeps no state"):
        outer.state_dict()


# Reading ahead.


class Slow:
    """A loader whose next batch comes when it is let go."""

    def __init__(self, count: int) -> None:
        self.tokens: Any = threading.Semaphore(count)
        self.left = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        try:
            for number in itertools.count():
                self.tokens.acquire()
                yield torch.tensor([number])
        finally:
            self.left.set()


def settle(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    assert condition()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_more_is_read_ahead_than_depth(depth: int) -> None:
    loader = Numbers(20)
    feed = PlayedFeed(loader, depth=depth)
    for taken, batch in enumerate(feed, 1):
        assert batch[0, 0] == taken - 1
        settle(lambda: loader.given == min(20, feed.played.launched + depth))
        assert feed.played.launched <= taken + depth
    # Where the loader keeps up, it is as many.
    assert max(feed.played.ahead) == depth


def test_a_slow_loader_holds_nothing_back() -> None:
    loader = Slow(3)
    feed = PlayedFeed(loader, depth=3)
    iterator = iter(feed)
    # Three batches are there, the fourth never comes: they are handed out all the same.
    assert [next(iterator).item() for _ in range(3)] == [0, 1, 2]
    found: list[Any] = []
    waiting = threading.Timer(0.05, loader.tokens.release)
    waiting.start()
    found.append(next(iterator).item())
    assert found == [3]
    waiting.join()
    # Its thread is inside the loader now; forgetting the iterator ends it when it comes back.
    del iterator
    gc.collect()
    loader.tokens.release(2)
    assert loader.left.wait(10)
    assert threads_end()


@pytest.mark.parametrize("depth", [1, 3])
def test_breaks_leave_nothing(dataset: h5pack.H5Dataset, depth: int) -> None:
    loader = h5_loader(dataset)
    feed = PlayedFeed(loader, depth=depth)
    dying: list[Any] = []
    for taken in range(1, 9):
        for number, batch in enumerate(feed, 1):
            dying.append(weakref.ref(batch[0]))
            if number == taken:
                break
        del batch
    feed.close()
    assert threads_end(), loader_threads()
    gc.collect()
    assert not any(batch() is not None for batch in dying)
    iterator = iter(feed)
    next(iterator)
    iterator.close()
    with pytest.raises(LoaderError, match="this iterator was closed before its epoch's end"):
        next(iterator)
    assert len(list(feed)) == 9


@pytest.mark.parametrize("late", [False, True], ids=["soon", "late"])
@pytest.mark.parametrize("fails", [False, True], ids=["end", "error"])
def test_an_end_that_nobody_took_is_no_circle(fails: bool, late: bool) -> None:
    """A DataLoader in a circle dies slowly: its queues are closed before it tells its workers to end."""

    class Three:
        def __iter__(self) -> Iterator[Any]:
            yield from torch.zeros(3, 1)
            if late:
                # So that the end comes when nobody asks any more.
                time.sleep(0.3)
            if fails:
                raise ValueError("broken")

    loader = Three()
    dying = weakref.ref(loader)
    feed = PlayedFeed(loader, depth=3)
    gc.disable()
    try:
        iterator = iter(feed)
        reader = next(iter(feed._readers))
        next(iterator)
        reader.join(10)
        del loader, feed, iterator, reader
        assert dying() is None
    finally:
        gc.enable()


def test_a_generator_stays_its_owners() -> None:
    def numbers() -> Iterator[Any]:
        for number in range(20):
            yield torch.tensor(number)

    for feed_of in FEEDS.values():
        given = numbers()
        feed = feed_of(given)
        for batch in feed:
            if batch == 3:
                break
        feed.close()
        # As in a plain loop; reading ahead took some, and nothing closed it.
        assert next(given) >= 4


# Errors.


class Breaking:
    """A loader that fails at one batch."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error = at, error

    def __iter__(self) -> Iterator[Any]:
        for number in range(9):
            if number == self.at:
                raise self.error
            yield torch.tensor([number])


@every_feed
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("where", ["loader", "transform"])
def test_an_error_comes_at_its_batch(feed_of: Any, at: int, where: str) -> None:
    def transform(images: torch.Tensor) -> torch.Tensor:
        if where == "transform" and images == at:
            raise ValueError("broken")
        return images

    loader = Breaking(at if where == "loader" else -1, ValueError("broken"))
    feed = feed_of(loader, transform=transform)
    for _ in range(2):
        iterator = iter(feed)
        assert [next(iterator).item() for _ in range(at)] == list(range(at))
        with pytest.raises(ValueError, match="broken"):
            next(iterator)
        for _ in range(2):
            with pytest.raises(LoaderError, match="this iterator failed before its epoch's end; begin a new one"):
                next(iterator)


@every_feed
def test_out_of_device_memory(feed_of: Any) -> None:
    short = [True]

    def transform(images: torch.Tensor) -> torch.Tensor:
        if short[0] and images[0, 0] == 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return images

    feed = feed_of(Numbers(), transform=transform)
    iterator = iter(feed)
    assert [next(iterator)[0, 0].item() for _ in range(2)] == [0, 1]
    with pytest.raises(torch.cuda.OutOfMemoryError, match="Tried to allocate") as caught:
        next(iterator)
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "lower the batch size or depth" in said
    assert threads_end()
    short[0] = False
    assert len(list(feed)) == 5


@every_feed
def test_an_interrupt_comes_at_once(feed_of: Any) -> None:
    def transform(images: torch.Tensor) -> torch.Tensor:
        if images[0, 0] == 0:
            raise KeyboardInterrupt
        return images

    iterator = iter(feed_of(Numbers(), transform=transform))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(LoaderError):
        next(iterator)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_an_iterator_in_a_forked_child() -> None:
    feed = PlayedFeed(Numbers())
    iterator = iter(feed)
    next(iterator)
    settle(lambda: feed.loader.given >= 3)
    child = os.fork()
    if not child:
        try:
            for _ in range(4):
                next(iterator)
        except LoaderError as error:
            os._exit(0 if "belongs to the process that was forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(iterator)) == 4


# Devices.


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert DeviceFeed([]).device == torch.device("cpu")
    for wrong in ("cuda", "cuda:1", torch.device("cuda", 0)):
        with pytest.raises(
            OptionsError, match=r"device 'cuda.*' was asked for, and torch .*; leave device out, or say"
        ):
            DeviceFeed([], wrong)
    with pytest.raises(OptionsError, match="device 'gpu' is none"):
        DeviceFeed([], "gpu")
    with pytest.raises(OptionsError, match="depth is 0"):
        DeviceFeed([], depth=0)


def test_each_rank_has_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert device_feed.resolve_device(None) == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_feed.resolve_device(None) == torch.device("cuda", 1)
    assert device_feed.resolve_device("cuda") == torch.device("cuda", 0)
    assert device_feed.resolve_device("cpu") == torch.device("cpu")
    # A launcher that shows each process one device.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_feed.resolve_device(None) == torch.device("cuda", 0)
    with pytest.raises(OptionsError, match="device 'cuda:1' was asked for, and there are 1"):
        device_feed.resolve_device("cuda:1")


def test_other_devices_are_moved_to() -> None:
    (batch,) = DeviceFeed([[torch.zeros(3, dtype=torch.uint8), "text"]], "meta", transform=torch.Tensor.float)
    assert (batch[0].device.type, batch[0].dtype, batch[1]) == ("meta", torch.float32, "text")


def test_a_feed_can_be_pickled(dataset: h5pack.H5Dataset) -> None:
    feed = DeviceFeed(h5_loader(dataset), "cpu", transform=torch.Tensor.float)
    first = next(iter(feed))
    other = pickle.loads(pickle.dumps(feed))
    other.set_epoch(0)
    assert same(next(iter(other)), first)
    assert repr(other).startswith("DeviceFeed(<h5pack.feed.loader.H5Loader")


@every_feed
def test_stages_are_labelled(feed_of: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        list(feed_of(Numbers(2), transform=torch.neg))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["h5pack: transform"] == 2
    assert 1 <= counts["h5pack: read"] <= 3
    assert "h5pack: copy" not in counts


class PlayedStream:
    """Notes what is asked of a stream, and by whom."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: PlayedStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: PlayedEvent) -> None:
        self.log.append(f"{self.name} waits for event {event.number}")


class PlayedEvent:
    """Notes where it is recorded."""

    def __init__(self, log: list[str], numbers: Iterator[int]) -> None:
        self.log, self.number = log, next(numbers)

    def record(self, stream: PlayedStream) -> None:
        self.log.append(f"event {self.number} on {stream.name}")


def test_what_is_asked_of_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of waits, copies and events, with a device that keeps no data, and streams that only take notes."""
    log: list[str] = []
    numbers = itertools.count()
    current = PlayedStream(log, "step")
    device = torch.device("meta")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: PlayedStream(log, "side"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: PlayedEvent(log, numbers))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: log.append("the reader's device is set"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(log.append(f"on {stream.name}:")))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(f"used by {stream.name}"))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.dtype == torch.uint8)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: log.append("pinned") or tensor)

    def transform(images: torch.Tensor) -> torch.Tensor:
        log.append(f"transform {tuple(images.shape)} on {images.device}")
        return images.float()

    copier = CudaCopier(device, ImageTransform(transform, None))
    copier.begin()
    copier.enter()
    batch = copier.receive(copier.launch(copier.prepare([torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2)]), 0))
    assert [part.device.type for part in batch] == ["meta", "meta"]
    assert log == [
        "side waits for step",
        "the reader's device is set",
        "pinned",
        "on side:",
        "transform (2, 3) on meta",
        "event 0 on side",
        "step waits for event 0",
        "used by step",
        "used by step",
    ]
    # What the loader made on the device itself: its stream comes first, and knows of ours.
    log.clear()
    copier.receive(copier.launch(copier.prepare(torch.zeros(4, device=device)), 0))
    assert log == [
        "event 1 on step",
        "on side:",
        "side waits for event 1",
        "used by side",
        "transform (4,) on meta",
        "event 2 on side",
        "step waits for event 2",
        "used by step",
    ]


# On a GPU.


def checksums(batch: Iterable[torch.Tensor]) -> list[int]:
    return [int(part.long().sum()) for part in batch]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_batches_on_a_gpu(dataset: h5pack.H5Dataset, pin_memory: bool, depth: int) -> None:
    expected = reference(dataset, 2, BATCH, window=3, seed=7)
    loader = h5pack.H5Loader(dataset, BATCH, window=3, seed=7, pin_memory=pin_memory)
    feed = DeviceFeed(loader, "cuda", transform=Keyed(), depth=depth)
    for epoch, batches in enumerate(expected):
        found = list(feed)
        for one, two in zip(found, batches, strict=True):
            assert all(part.device == feed.device for part in one)
            images = two[0].float() + 1000 * two[-1].reshape(-1, 1, 1, 1) + epoch
            assert same([part.cpu() for part in one], [images, *two[1:]])


@pytest.mark.gpu
@needs_gpu
def test_states_on_a_gpu(dataset: h5pack.H5Dataset) -> None:
    expected = end_of(DeviceFeed(h5_loader(dataset), "cpu"))
    for taken in range(10):
        feed = DeviceFeed(h5_loader(dataset), "cuda", depth=2)
        iterator = iter(feed)
        assert [next(iterator)[-1].tolist() for _ in range(taken)] == expected[:taken]
        other = DeviceFeed(h5_loader(dataset), "cuda")
        other.load_state_dict(feed.state_dict())
        assert end_of(other) == expected[taken:]


@pytest.mark.gpu
@needs_gpu
def test_many_tiny_batches_on_several_streams() -> None:
    """Batches are used on streams that change from one to the next, and dropped at once; none is overwritten early."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    batches = [
        [torch.full((64, 33), number % 251, dtype=torch.uint8), torch.full((5,), number)] for number in range(400)
    ]
    feed = DeviceFeed(batches, "cuda", transform=lambda images: images.float() * 2, depth=3)
    weight = torch.eye(33, device="cuda")
    torch.cuda.synchronize()
    allocated: list[int] = []
    for _ in range(4):
        sums: list[Any] = []
        iterator = iter(feed)
        for number in itertools.count():
            stream = streams[number % 3]
            with torch.cuda.stream(stream):
                batch = next(iterator, None)
                if batch is None:
                    break
                # Work that lasts, so that the batch is still in use when its memory goes back.
                images = batch[0]
                for _ in range(4):
                    images = images @ weight
                sums.append((images.sum(), batch[1].sum()))
            del batch, images
        torch.cuda.synchronize()
        assert [(int(a), int(b)) for a, b in sums] == [
            (number % 251 * 2 * 64 * 33, number * 5) for number in range(400)
        ]
        del sums
        allocated.append(torch.cuda.memory_allocated())
    assert len(set(allocated[1:])) == 1, allocated


@pytest.mark.gpu
@needs_gpu
def test_breaks_on_a_gpu_leave_nothing(dataset: h5pack.H5Dataset) -> None:
    feed = DeviceFeed(h5pack.H5Loader(dataset, BATCH, pin_memory=True), "cuda", depth=3)
    list(feed)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for taken in range(1, 9):
        iterator = iter(feed)
        for _ in range(taken):
            next(iterator)
        del iterator
    feed.close()
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert len(list(feed)) == 9


@pytest.mark.gpu
@needs_gpu
def test_what_a_loader_made_on_the_gpu() -> None:
    batches = [torch.full((50,), number, device="cuda") for number in range(20)]
    found = list(DeviceFeed(batches, "cuda", transform=lambda images: images + 1))
    assert [checksums([batch]) for batch in found] == [[50 * (number + 1)] for number in range(20)]


def test_a_batch_whose_transform_fails_is_not_counted(tmp_path: Path) -> None:
    """The step has not received it, so it comes again."""
    dataset = h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5"), with_rows=True)
    for wrapped in (lambda loader: loader, lambda loader: h5pack.EchoLoader(loader, 2)):
        expected = [batch[-1].tolist() for batch in wrapped(h5pack.H5Loader(dataset, 8, seed=3))]
        calls = 0

        def failing(images: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise KeyboardInterrupt
            return images

        feed = h5pack.DeviceFeed(wrapped(h5pack.H5Loader(dataset, 8, seed=3)), "cpu", transform=failing)
        received = []
        with contextlib.suppress(KeyboardInterrupt):
            for batch in feed:
                received.append(batch[-1].tolist())
        assert calls == 4
        assert received == expected[:3]
        again = h5pack.DeviceFeed(wrapped(h5pack.H5Loader(dataset, 8, seed=3)), "cpu")
        again.load_state_dict(feed.state_dict())
        assert [batch[-1].tolist() for batch in again] == expected[3:]


class Epochs:
    """Tells the epochs of the keys that it is called with."""

    keyed = True

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, images: torch.Tensor, key: h5pack.BatchKey) -> torch.Tensor:
        self.seen.append(key.epoch)
        return images


def test_an_iteration_keeps_its_epoch_when_another_begins(tmp_path: Path) -> None:
    dataset = h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5"), with_rows=True)
    epochs = Epochs()
    feed = h5pack.DeviceFeed(h5pack.H5Loader(dataset, 8), "cpu", transform=epochs)
    first = iter(feed)
    next(first)
    second = iter(feed)
    next(first)
    next(second)
    next(first)
    assert epochs.seen == [0, 0, 1, 0]


def test_a_sampler_that_must_be_told_its_epoch_freezes_nothing(tmp_path: Path) -> None:
    """torch's DistributedSampler stays in epoch 0 unless somebody tells it; the draws go on."""
    dataset = h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5"), with_rows=True)
    sampler = torch.utils.data.DistributedSampler(dataset, 1, 0)
    epochs = Epochs()
    feed = h5pack.DeviceFeed(DataLoader(dataset, 50, sampler=sampler), "cpu", transform=epochs)
    for _ in range(3):
        list(feed)
    batches = len(feed)
    assert epochs.seen == [epoch for epoch in range(3) for _ in range(batches)]
    sampler.set_epoch(7)
    list(feed)
    feed.set_epoch(20)
    list(feed)
    assert epochs.seen[3 * batches :] == [7] * batches + [20] * batches
    assert sampler.epoch == 20
