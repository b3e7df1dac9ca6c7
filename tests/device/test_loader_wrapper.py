"""`LoaderWrapper`, by `DeviceFeed`: the epoch and the state of any loader, whatever was prefetched."""

from __future__ import annotations

import contextlib
import inspect
import json
import pickle
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import h5pack
from h5pack.device.feed import DeviceFeed
from h5pack.errors import LoaderError, OptionsError, StateError
from tests.data.packs import same
from tests.device.feeds import (
    BATCH,
    FEEDS,
    LOADERS,
    Keyed,
    Numbers,
    PrefetchingFeed,
    data_loader,
    every_feed,
    h5_loader,
    rest_of,
)


@every_feed
@pytest.mark.parametrize("kind", LOADERS)
def test_resume_at_every_batch(dataset: h5pack.H5Dataset, feed_of: Any, kind: str) -> None:
    epochs = [rest_of(DeviceFeed(LOADERS[kind](dataset)))]
    feed = feed_of(LOADERS[kind](dataset))
    list(feed)
    epochs.append(rest_of(feed))
    assert epochs[0] != epochs[1]
    flat = epochs[0] + epochs[1]
    feed = feed_of(LOADERS[kind](dataset))
    states = [feed.state_dict()]
    for epoch in epochs:
        iterator = iter(feed)
        for rows in epoch:
            assert same(next(iterator)[-1], torch.tensor(rows))
            states.append(feed.state_dict())
        assert [next(iterator, None) for _ in range(2)] == [None, None]
        # After the epoch it is the beginning of the next.
        states[-1] = feed.state_dict()
        if epoch is epochs[0]:
            # No empty epoch follows; a StatefulDataLoader does the same.
            other = feed_of(LOADERS[kind](dataset))
            other.load_state_dict(states[-1])
            assert rest_of(other) == epochs[1]
    for taken, state in enumerate(states[:-1]):
        if kind != "stateful":
            json.dumps(state)
        other = feed_of(LOADERS[kind](dataset))
        other.load_state_dict(pickle.loads(pickle.dumps(state)))
        found = rest_of(other)
        while len(found) < len(flat) - taken:
            found += rest_of(other)
        assert found == flat[taken:], taken


def test_a_loader_may_know_its_file(dataset: h5pack.H5Dataset) -> None:
    class Loader(list):  # type: ignore[type-arg]
        def __fspath__(self) -> str:
            return dataset.path

    batches = list(h5_loader(dataset))
    assert len(list(DeviceFeed(Loader(batches)))) == len(batches)


@every_feed
def test_resume_of_a_loader_with_persistent_workers(dataset: h5pack.H5Dataset, feed_of: Any) -> None:
    expected = rest_of(DeviceFeed(h5_loader(dataset)))
    feed = feed_of(data_loader(dataset, 2, persistent_workers=True))
    for taken in (1, 4, 9):
        feed.set_epoch(0)
        iterator = iter(feed)
        assert [next(iterator)[-1].tolist() for _ in range(taken)] == expected[:taken]
        state = feed.state_dict()
        assert (state["epoch"], state["batches"]) == (0, taken)
        del iterator
        # The same workers continue, right after the break.
        feed.load_state_dict(state)
        assert rest_of(feed) == expected[taken:]
    state = feed.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 0)
    feed.close()


@pytest.mark.parametrize("wrapper", [None, h5pack.EchoLoader, h5pack.FeedMonitor])
def test_a_loader_with_persistent_workers_has_one_iteration(dataset: h5pack.H5Dataset, wrapper: Any) -> None:
    loader = data_loader(dataset, 1, persistent_workers=True)
    arguments = {h5pack.EchoLoader: (1,)}.get(wrapper, ())
    feed = PrefetchingFeed(loader if wrapper is None else wrapper(loader, *arguments), prefetch_factor=1)
    held = iter(feed)
    next(held)
    feed.set_epoch(0)
    assert rest_of(feed) == rest_of(DeviceFeed(h5_loader(dataset)))
    with pytest.raises(LoaderError):
        list(held)


@pytest.mark.skipif("in_order" not in inspect.signature(DataLoader).parameters, reason="torch is older than 2.6")
@pytest.mark.parametrize("wrapper", [*FEEDS.values(), h5pack.EchoLoader, h5pack.FeedMonitor])
@pytest.mark.parametrize("kind", ["batches", "rows"])
def test_epochs_of_a_loader_that_delivers_out_of_order(dataset: h5pack.H5Dataset, wrapper: Any, kind: str) -> None:
    order: dict[str, Any] = {"batch_sampler": h5pack.ChunkBatchSampler(dataset, BATCH)}
    if kind == "rows":
        order = {"batch_size": BATCH, "sampler": h5pack.ChunkSampler(dataset), "drop_last": True}
    wrapped = wrapper(DataLoader(dataset, **order, num_workers=2, in_order=False))
    for epoch in range(2):
        assert len(list(wrapped)) == len(wrapped)
        assert (wrapped.epoch, wrapped.state_dict()["epoch"]) == (epoch, epoch + 1)


@every_feed
def test_states_of_other_wrappers_that_have_a_sampler(dataset: h5pack.H5Dataset, feed_of: Any) -> None:
    class Moving:
        """A wrapper as timm's PrefetchLoader."""

        def __init__(self) -> None:
            self.loader = LOADERS["rows"](dataset)
            self.sampler = self.loader.sampler

        def __iter__(self) -> Iterator[Any]:
            return iter(self.loader)

    expected = rest_of(DeviceFeed(LOADERS["rows"](dataset)))
    feed, resumed = feed_of(Moving()), feed_of(Moving())
    iterator = iter(feed)
    assert [next(iterator)[-1].tolist() for _ in range(4)] == expected[:4]
    resumed.load_state_dict(feed.state_dict())
    assert rest_of(resumed) == expected[4:]


@every_feed
def test_a_state_can_be_loaded_into_the_bare_loader(dataset: h5pack.H5Dataset, feed_of: Any) -> None:
    feed = feed_of(h5_loader(dataset))
    iterator = iter(feed)
    assert feed.state_dict()["batches"] == 0
    next(iterator), next(iterator)
    bare = h5_loader(dataset)
    bare.load_state_dict(feed.state_dict())
    assert rest_of(DeviceFeed(bare)) == rest_of(iterator)


@every_feed
def test_setting_the_epoch_or_the_state_during_an_iteration(dataset: h5pack.H5Dataset, feed_of: Any) -> None:
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


def test_the_epoch_may_be_any_integer_and_an_invalid_one_changes_nothing(dataset: h5pack.H5Dataset) -> None:
    loader = MagicMock(spec=["__iter__", "state_dict"])
    loader.state_dict.return_value = {}
    feed = DeviceFeed(loader)
    feed.set_epoch(np.int64(3))
    assert json.loads(json.dumps(feed.state_dict())) == {"epoch": 3, "loader": {}}
    for feed in (DeviceFeed(loader), DeviceFeed(h5_loader(dataset))):
        before = feed.state_dict()
        with pytest.raises(OptionsError, match="epoch"):
            feed.set_epoch("4")  # type: ignore[arg-type]
        assert feed.state_dict() == before


@every_feed
def test_the_state_holds_the_epoch_if_the_loader_counts_none(feed_of: Any) -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="scripts/install dev")
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
    with pytest.raises(StateError):
        other.load_state_dict({"order": 3})


@every_feed
def test_loaders_without_state(feed_of: Any) -> None:
    for loader in (DataLoader([1, 2, 3]), Numbers()):
        feed = feed_of(loader)
        list(feed)
        for use in (feed.state_dict, lambda feed=feed: feed.load_state_dict({"epoch": 0, "loader": {}})):
            with pytest.raises(StateError):
                use()
    with pytest.raises(TypeError):
        len(feed_of(Numbers()))
    # A wrapper of a wrapper raises only when it is asked.
    outer = feed_of(DeviceFeed(Numbers()))
    assert len(list(outer)) == 5
    with pytest.raises(StateError):
        outer.state_dict()


def test_a_batch_whose_transform_fails_is_not_counted(dataset: h5pack.H5Dataset) -> None:
    """The step has not received it, so it is given again."""
    for wrapped in (lambda loader: loader, lambda loader: h5pack.EchoLoader(loader, 2)):
        expected = rest_of(wrapped(h5_loader(dataset)))
        failing = Mock(spec=[], side_effect=[*range(3), KeyboardInterrupt])
        feed = DeviceFeed(wrapped(h5_loader(dataset)), "cpu", transform=failing)
        received = []
        with contextlib.suppress(KeyboardInterrupt):
            for batch in feed:
                received.append(batch[-1].tolist())
        assert received == expected[:3]
        again = DeviceFeed(wrapped(h5_loader(dataset)), "cpu")
        again.load_state_dict(feed.state_dict())
        assert rest_of(again) == expected[3:]


def test_an_iteration_keeps_its_epoch_when_another_begins(dataset: h5pack.H5Dataset) -> None:
    keyed = Keyed()
    feed = h5pack.DeviceFeed(h5pack.H5Loader(dataset, 8), "cpu", transform=keyed)
    first = iter(feed)
    next(first)
    second = iter(feed)
    for iterator in (first, second, first):
        next(iterator)
    assert [key.epoch for key in keyed.keys] == [0, 0, 1, 0]


def test_a_feed_made_after_the_samplers_set_epoch_begins_there(dataset: h5pack.H5Dataset) -> None:
    sampler = torch.utils.data.DistributedSampler(dataset, 1, 0)
    keyed = Keyed()
    for epoch in (5, 6):
        sampler.set_epoch(epoch)
        list(h5pack.DeviceFeed(DataLoader(dataset, 60, sampler=sampler), "cpu", transform=keyed))
    assert [key.epoch for key in keyed.keys] == [5, 5, 6, 6]


def test_keys_have_the_next_epoch_if_the_sampler_stays_in_its_own(dataset: h5pack.H5Dataset) -> None:
    """torch's DistributedSampler stays in epoch 0 until its `set_epoch` is called; keys do not."""
    sampler = torch.utils.data.DistributedSampler(dataset, 1, 0)
    keyed = Keyed()
    feed = h5pack.DeviceFeed(DataLoader(dataset, 60, sampler=sampler), "cpu", transform=keyed)
    for setter, epoch in ((None, 0), (None, 1), (None, 2), (sampler, 7), (feed, 20)):
        if setter is not None:
            setter.set_epoch(epoch)
        list(feed)
    assert [key.epoch for key in keyed.keys] == [0, 0, 1, 1, 2, 2, 7, 7, 20, 20]
    assert sampler.epoch == 20
