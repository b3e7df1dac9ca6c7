"""`DeviceFeed`: the batches of the loader, on the device; what runs on CUDA is imitated on the CPU."""

from __future__ import annotations

import gc
import itertools
import pickle
from typing import Any

import pytest
import torch

import h5pack
from h5pack.device import feed
from h5pack.device.feed import DeviceFeed
from h5pack.errors import LoaderError, OptionsError
from tests.crashing import wait_for
from tests.data.packs import all_same, loader_threads, reference, same, threads_end
from tests.device.feeds import BATCH, LOADERS, Breaking, Keyed, Numbers, every_feed, h5_loader, needs_gpu, rest_of


@every_feed
@pytest.mark.parametrize("kind", LOADERS)
def test_batches_and_keys_are_those_of_the_loader_in_order(dataset: h5pack.H5Dataset, feed_of: Any, kind: str) -> None:
    keyed, loader = Keyed(), LOADERS[kind](dataset)
    feed, first = feed_of(LOADERS[kind](dataset), transform=keyed), list(loader)
    assert (len(feed), len(first), feed.dataset) == (9, 9, dataset)
    for again, epoch, expected in ((False, 0, first), (False, 1, list(loader)), (True, 0, first)):
        if again:
            feed.set_epoch(epoch)
        keyed.keys.clear()
        for batch, (images, *others) in zip(feed, expected, strict=True):
            rows = others[-1].reshape(-1, 1, 1, 1)
            assert same(list(batch), [images.float() + 1000 * rows + epoch, *others])
        assert feed.epoch == epoch
        assert [key.epoch for key in keyed.keys] == [epoch] * 9


def test_batches_pass_unchanged_on_the_cpu() -> None:
    batches = [[torch.zeros(2), "text"], (torch.ones(2), 3), {"images": torch.ones(1)}]
    found = list(DeviceFeed(batches, "cpu"))
    assert all(one is two for one, two in zip(found, batches, strict=True))
    assert not loader_threads()


def test_another_transform_is_that_of_the_next_iteration(dataset: h5pack.H5Dataset) -> None:
    wrapped = DeviceFeed(h5_loader(dataset), "cpu", transform=torch.zeros_like)
    for transform, value in ((torch.zeros_like, 0), (torch.ones_like, 1)):
        wrapped.transform = transform
        assert wrapped.transform is transform
        assert all((batch[0] == value).all() for batch in wrapped)
    seconds, wrapped.transform = wrapped.transform_seconds, torch.neg
    assert wrapped.transform_seconds == seconds > 0
    with pytest.raises(OptionsError):
        wrapped.transform = "flip"
    wrapped.transform = None
    wrapped.set_epoch(0)
    assert all_same(list(wrapped), list(h5_loader(dataset)))


def test_missing_devices_and_invalid_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert DeviceFeed([]).device == torch.device("cpu")
    for wrong in ("cuda", "cuda:1", torch.device("cuda", 0), 0):
        with pytest.raises(OptionsError) as caught:
            DeviceFeed([], wrong)
        name = "cuda:0" if wrong == 0 else str(wrong)
        assert caught.value.parameters == (f"device={name!r}", "device='cpu'")
    for wrong_arguments in (
        {"device": "gpu"},
        {"device": -1},
        {"device": 2**70},
        {"device": "hip"},
        {"device": "xpu"},
        {"prefetch_factor": 0},
        {"loader": 7},
    ):
        with pytest.raises(OptionsError):
            DeviceFeed(**{"loader": [], **wrong_arguments})  # type: ignore[arg-type]


def test_local_rank_chooses_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert feed.resolve_device(None) == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [str(feed.resolve_device(name)) for name in (None, "cuda", "cpu")] == ["cuda:1", "cuda:0", "cpu"]
    # A launcher may show each process one device only.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert feed.resolve_device(None) == torch.device("cuda", 0)
    with pytest.raises(OptionsError):
        feed.resolve_device("cuda:1")


def test_batches_are_copied_to_other_devices() -> None:
    (batch,) = DeviceFeed([[torch.zeros(3, dtype=torch.uint8), "text"]], "meta", transform=torch.Tensor.float)
    assert (batch[0].device.type, batch[0].dtype, batch[1]) == ("meta", torch.float32, "text")


@every_feed
def test_a_pickled_feed_has_the_state_and_begins_again(dataset: h5pack.H5Dataset, feed_of: Any) -> None:
    feed = feed_of(h5_loader(dataset), transform=torch.Tensor.float)
    iterator = iter(feed)
    first = next(iterator)
    if feed_of is not DeviceFeed:
        wait_for(lambda: feed.copier.copied == 4)
    other = pickle.loads(pickle.dumps(feed))
    # What was only prefetched does not count.
    assert other.state_dict() == feed.state_dict()
    other.set_epoch(0)
    assert same(next(iter(other)), first)
    assert "prefetch_factor=" in repr(other)


@every_feed
def test_torchs_profiler_shows_the_stages(feed_of: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        list(feed_of(Numbers(2), transform=torch.neg))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["h5pack: transform"] == 2
    assert 1 <= counts["h5pack: read"] <= 3
    assert "h5pack: copy" not in counts


# Errors.


@every_feed
@pytest.mark.parametrize(
    ("where", "at", "error"),
    [
        *((where, at, ValueError) for where in ("loader", "transform") for at in (0, 5)),
        ("transform", 0, KeyboardInterrupt),
    ],
)
def test_an_error_is_raised_after_the_batches_before_it(feed_of: Any, where: str, at: int, error: Any) -> None:
    def transform(images: torch.Tensor) -> torch.Tensor:
        if where == "transform" and images == at:
            raise error("broken")
        return images

    feed = feed_of(Breaking(at if where == "loader" else -1, error("broken")), transform=transform)
    for _ in range(2):
        iterator = iter(feed)
        assert [next(iterator).item() for _ in range(at)] == list(range(at))
        with pytest.raises(error, match="broken"):
            next(iterator)
        with pytest.raises(LoaderError):
            next(iterator)


@every_feed
def test_a_transform_cannot_end_the_epoch(feed_of: Any) -> None:
    iterator = iter(
        feed_of(Breaking(-1, ValueError()), transform=lambda images: images if images < 2 else next(iter(())))
    )
    assert [next(iterator).item() for _ in range(2)] == [0, 1]
    with pytest.raises(LoaderError) as caught:
        next(iterator)
    assert isinstance(caught.value.__cause__, StopIteration)


@every_feed
def test_out_of_memory_errors_advise_a_lower_prefetch_factor(feed_of: Any) -> None:
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
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "prefetch_factor" in text
    assert threads_end()
    short[0] = False
    assert len(list(feed)) == 5


# On a GPU.


@needs_gpu
@pytest.mark.parametrize(("pin_memory", "prefetch_factor"), [(False, 3), (True, 1), (True, 3)])
def test_batches_on_a_gpu(dataset: h5pack.H5Dataset, pin_memory: bool, prefetch_factor: int) -> None:
    expected = reference(dataset, 2, BATCH, window=3, seed=7)
    loader = h5pack.H5Loader(dataset, BATCH, window=3, seed=7, pin_memory=pin_memory)
    feed = DeviceFeed(loader, "cuda", transform=Keyed(), prefetch_factor=prefetch_factor)
    for epoch, batches in enumerate(expected):
        for one, two in zip(feed, batches, strict=True):
            assert all(part.device == feed.device for part in one)
            images = two[0].float() + 1000 * two[-1].reshape(-1, 1, 1, 1) + epoch
            assert same([part.cpu() for part in one], [images, *two[1:]])


@needs_gpu
def test_states_on_a_gpu(dataset: h5pack.H5Dataset) -> None:
    expected = rest_of(DeviceFeed(h5_loader(dataset), "cpu"))
    for taken in range(10):
        feed = DeviceFeed(h5_loader(dataset), "cuda", prefetch_factor=2)
        iterator = iter(feed)
        assert [next(iterator)[-1].tolist() for _ in range(taken)] == expected[:taken]
        other = DeviceFeed(h5_loader(dataset), "cuda")
        other.load_state_dict(feed.state_dict())
        assert rest_of(other) == expected[taken:]


@needs_gpu
def test_many_tiny_batches_on_several_streams() -> None:
    """Batches are used on alternating streams and dropped at once; none is overwritten early."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    numbers = range(400)
    batches = [[torch.full((64, 33), n % 251, dtype=torch.uint8), torch.full((5,), n)] for n in numbers]
    feed = DeviceFeed(batches, "cuda", transform=lambda images: images.float() * 2, prefetch_factor=3)
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
                # Long work, so that the batch is still in use when its memory is freed.
                images = batch[0]
                torch.cuda._sleep(200_000)
                for _ in range(4):
                    images = images @ weight
                sums.append((images.sum(), batch[1].sum()))
            del batch, images
        torch.cuda.synchronize()
        assert [(int(a), int(b)) for a, b in sums] == [(n % 251 * 2 * 64 * 33, n * 5) for n in numbers]
        del sums
        allocated.append(torch.cuda.memory_allocated())
    assert len(set(allocated[1:])) == 1, allocated


@needs_gpu
@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_memory_is_bounded_when_the_host_runs_ahead_of_the_gpu(prefetch_factor: int) -> None:
    size = 1 << 22
    feed = DeviceFeed([torch.zeros(size, dtype=torch.uint8)] * 300, "cuda", prefetch_factor=prefetch_factor)
    torch.cuda.synchronize()
    before, most = torch.cuda.memory_allocated(), 0
    for batch in feed:
        torch.cuda._sleep(2_000_000)
        batch.add_(1)
        most = max(most, torch.cuda.memory_allocated() - before)
    assert most <= (prefetch_factor + 4) * size


@needs_gpu
def test_abandoned_iterations_free_gpu_memory(dataset: h5pack.H5Dataset) -> None:
    feed = DeviceFeed(h5pack.H5Loader(dataset, BATCH, pin_memory=True), "cuda", prefetch_factor=3)
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


@needs_gpu
def test_batches_that_a_loader_made_on_the_gpu() -> None:
    batches = [torch.full((50,), number, device="cuda") for number in range(20)]
    found = list(DeviceFeed(batches, "cuda", transform=lambda images: images + 1))
    assert [int(batch.sum()) for batch in found] == [50 * (number + 1) for number in range(20)]
