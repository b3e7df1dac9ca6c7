"""`DeviceCopier`: the order of its work on streams, in a simulation; and how tensors of all kinds are copied."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

import h5pack
from h5pack.device.copier import CudaOperations, DeviceCopier
from h5pack.device.feed import DeviceFeed
from h5pack.device.loader_wrapper import FetchedBatch
from h5pack.device.transforms import overwrites_results
from tests.data.packs import all_same, same
from tests.device.feeds import LOADERS, Keyed, Numbers, PrefetchingFeed, every_feed, h5_loader, prefetching_feed
from tests.device.simulation import DEFAULT, OTHER, THIRD, RaceError, SimulatedDevice, Site

SCHEDULES = 300
"""Each takes 8 ms; 10,000 were run when the code was written."""


class SimulatedFeed(DeviceFeed):
    """A feed to a simulated device."""

    simulated: SimulatedDevice

    def _operations(self) -> Any:
        return self.simulated


class SimulatedLoader:
    """Yields images in host memory and labels that are made on the device."""

    def __init__(self, device: SimulatedDevice, batches: int) -> None:
        self.device, self.batches = device, batches

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.batches):
            images = torch.empty(1)
            images.value = number  # type: ignore[attr-defined]
            yield [images, self.device.run([], ("label", number))]


def train(device: SimulatedDevice, seed: int, *, plain: bool = False) -> None:
    """Epochs that may be left early, on changing streams; batches are kept for some steps."""
    drawn = random.Random(seed)
    prefetch_factor, batches = drawn.randint(1, 3), drawn.randint(2, 6)
    transforms, times = drawn.random() < 0.8, drawn.choice([1, 1, 2])
    constants: list[torch.Tensor] = []

    def transform(images: torch.Tensor) -> torch.Tensor:
        return device.run([images, *constants], ("image", images.block.value))  # type: ignore[attr-defined]

    loader: Any = SimulatedLoader(device, batches)
    loader = loader if times == 1 else h5pack.EchoLoader(loader, times)
    feed = SimulatedFeed(loader, "meta", transform=transform if transforms else None, prefetch_factor=prefetch_factor)
    feed.simulated = device
    if feed._transform is not None:
        # As with Normalize: repeated images are copied once.
        feed._transform.replaces_images = True
    kept: list[Any] = []
    home = device.streams[DEFAULT if plain else drawn.choice([DEFAULT, OTHER])]
    for _ in range(3):
        with device.on(home):
            old, constants[:] = constants[:], [device.run([], "constant")]
            iterator = iter(feed)
            del old
        stop = drawn.choice([times * batches, drawn.randint(1, times * batches)])
        for number in range(stop):
            with device.on(device.streams[DEFAULT if plain else drawn.choice([DEFAULT, OTHER, THIRD])]):
                batch = next(iterator)
                row = number // times
                expected = ("image", row) if transforms else row
                assert [tensor.block.value for tensor in batch] == [expected, ("label", row)]
                for _ in range(drawn.randint(1, 2)):
                    device.run(batch)
            kept.append(batch)
            del batch
            while len(kept) > (0 if plain else drawn.randint(0, 2)):
                kept.pop(0)
        kept.clear()
        if drawn.random() < 0.5:
            with device.on(home):
                iterator.close()
                constants.clear()
                device.run([], "new work")
        del iterator
        feed.close()


def race(seed: int, without: Site | None = None) -> SimulatedDevice:
    device = SimulatedDevice(seed, without=without)
    train(device, seed)
    return device


def test_no_schedule_has_a_race() -> None:
    sites: set[Site] = set()
    for seed in range(SCHEDULES):
        sites |= race(seed).sites
    assert len(sites) == 8, sites


@pytest.mark.parametrize(
    "name", ["__init__", "join_streams", "copy", "transform 0", "transform 1", "deliver 0", "deliver 1"]
)
def test_each_wait_and_each_recorded_stream_is_needed(name: str) -> None:
    sites = sorted(set[Site]().union(*(race(seed).sites for seed in range(20))))
    method, _, number = name.partition(" ")
    site = [one for one in sites if one[0] == method][int(number or 0)]
    with pytest.raises(RaceError):
        _ = [race(seed, without=site) for seed in range(300)]


@pytest.mark.parametrize("prefetch_factor", [1, 2, 3])
def test_memory_is_bounded_although_no_work_of_the_device_ends(prefetch_factor: int) -> None:
    found = []
    for without in (None, "_run"):
        device = SimulatedDevice(prefetch_factor, never=True)
        feed = SimulatedFeed(SimulatedLoader(device, 60), "meta", prefetch_factor=prefetch_factor)
        feed.simulated = device
        if without is not None:
            line = next(line for name, line in race(0).sites if name == without)
            device.without = (without, line)
        for batch in feed:
            device.run(batch)
        found.append(device.most_live)
    # Two tensors a batch. A loop drops a batch when it has the next one, so the event of its release comes one later.
    assert found[0] <= 2 * (prefetch_factor + 4)
    # The labels are made and used on one stream, where memory is used again at once.
    assert found[1] >= 60


def test_feeds_share_the_two_streams_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator keeps memory for each stream that was ever used, so an epoch must not make new ones."""
    stream = Mock(side_effect=lambda *_, **__: object())
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    # Devices that nothing else uses, because their streams stay until the process ends.
    devices = [torch.device("cuda", number) for number in (61, 62)]
    found = [CudaOperations(device) for device in devices * 3]
    assert stream.mock_calls == [made for device in devices for made in (call(device), call(device, priority=-1))]
    assert len({operations.copy_stream for operations in found}) == 2
    assert len({operations.transform_stream for operations in found}) == 2


@pytest.mark.parametrize("layout", ["dense", "channels last", "expanded", "gapped", "transposed", "gapped and pinned"])
def test_copies_are_made_from_dense_pinned_memory(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of any other tensor goes through pageable memory, in the training thread."""
    pinned: list[torch.Tensor] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        # As torch does it: with the same strides, so it fails for tensors that overlap.
        copy = torch.empty_strided(tensor.shape, tensor.stride()).copy_(tensor)
        pinned.append(copy)
        return copy

    def is_pinned(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in {one.untyped_storage().data_ptr() for one in pinned}

    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    tensor = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    whole = pin_memory(tensor) if layout == "gapped and pinned" else tensor
    tensor = {
        "dense": tensor,
        "channels last": tensor.contiguous(memory_format=torch.channels_last),
        "expanded": tensor[:, :1].expand(2, 3, 4, 5),
        "gapped": tensor[:, :, ::2],
        "transposed": tensor.permute(3, 2, 1, 0),
        "gapped and pinned": whole[:, :, ::2],
    }[layout]
    operations = CudaOperations.__new__(CudaOperations)
    result = operations.pin(tensor)
    assert torch.equal(result, tensor)
    assert result is pinned[-1]
    assert result.is_contiguous() or result.is_contiguous(memory_format=torch.channels_last)
    assert result.stride() == tensor.stride() or layout not in ("dense", "channels last")
    assert operations.pin(result) is result
    assert operations.pin(result[1:]).data_ptr() == result[1:].data_ptr()


@every_feed
def test_random_transforms_do_not_depend_on_the_loaders_timing(feed_of: Any) -> None:
    """The step draws from the same generators, and batches are transformed at times that depend on the loader."""

    def epochs(skip: int = 0) -> list[list[float]]:
        torch.manual_seed(7)
        feed, found = feed_of(Numbers(6), transform=lambda images: images + torch.rand(())), []
        for _ in range(2):
            for number, batch in enumerate(feed):
                torch.rand(number + skip)
                found.append([float(batch[0, 0]), float(torch.rand(()))] if not skip else [float(batch[0, 0])])
        return found

    expected = epochs()
    assert [epochs() for _ in range(6)] == [expected] * 6
    assert epochs(skip=3) == [one[:1] for one in expected]
    # Each batch has draws of its own, in each epoch.
    assert len({round(batch[0] % 1, 6) for batch in expected}) == 12


@every_feed
@pytest.mark.parametrize("kind", LOADERS)
def test_random_transforms_continue_after_a_resume(dataset: h5pack.H5Dataset, feed_of: Any, kind: str) -> None:
    def feed(state: Any = None) -> DeviceFeed:
        made = feed_of(LOADERS[kind](dataset), transform=lambda images: images + torch.rand(()))
        if state is not None:
            made.load_state_dict(state)
        return made

    torch.manual_seed(3)
    first = feed()
    expected = [[batch[0] for batch in first] for _ in range(2)]
    stopped = feed()
    iterator = iter(stopped)
    for _ in range(5):
        next(iterator)
    state = stopped.state_dict()
    torch.rand(100)
    assert all_same([batch[0] for batch in feed(state)], expected[0][5:])
    # The next epoch, also if the resumed one is left.
    resumed = feed(state)
    next(iter(resumed))
    assert all_same([batch[0] for batch in resumed], expected[1])


@every_feed
def test_batches_requested_in_inference_mode_can_be_trained_on(feed_of: Any) -> None:
    """Those of a loader that makes its tensors in the caller's thread, too; and those changed in place, or cloned."""
    weight = torch.ones(3, requires_grad=True)

    def overwriting(images: torch.Tensor) -> torch.Tensor:
        return images + 1

    overwriting.get_compiler_config = lambda: {"triton.cudagraphs": True}  # type: ignore[attr-defined]
    loader = DataLoader(TensorDataset(torch.ones(4, 3)), 2, collate_fn=lambda samples: default_collate(samples)[0])
    for transform in (lambda images: images * weight.detach(), lambda images: images.sub_(0.5), overwriting):
        with torch.inference_mode():
            batch = next(iter(feed_of(loader, transform=transform)))
        (batch * weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("kind", ["Normalize", "views", "keyed", "in place", "sequence"])
def test_repeated_images_are_copied_once_for_normalize(dataset: h5pack.H5Dataset, kind: str) -> None:
    """Other transforms might change them, or deliver them, in which case the step might change them."""
    norm = h5pack.Normalize(flip=0.5)
    transforms: dict[str, Any] = {
        "Normalize": [norm, lambda images: images.add_(1)],
        "views": h5pack.Views(norm, norm),
        "keyed": Keyed(),
        "in place": lambda images: images.add_(1),
        "sequence": [KeyedBatch(), lambda images: images.add_(1)],
    }
    once = kind in ("Normalize", "views")
    copied: list[tuple[int, ...]] = []

    class Counting(PrefetchingFeed):
        def _operations(self) -> Any:
            operations = super()._operations()
            operations.copy = lambda tensor: copied.append(tuple(tensor.shape)) or tensor.clone()
            return operations

    source = h5pack.H5Dataset(dataset.path, with_rows=True)
    feed = Counting(h5pack.EchoLoader(h5_loader(source), 3), transform=transforms[kind])
    found = [batch.images for batch in feed]
    if kind not in ("in place", "sequence"):
        slow = DeviceFeed(h5pack.EchoLoader(h5_loader(source), 3), "cpu", transform=transforms[kind])
        assert all(map(same, map(flat, found), (flat(batch.images) for batch in slow)))
    assert len(found) == 27
    assert sum(len(shape) == 4 for shape in copied) == (9 if once else 27)


@every_feed
def test_repeats_of_a_loader_that_fills_one_tensor_again_and_again_are_its_batches(feed_of: Any) -> None:
    def batches() -> Iterator[Any]:
        images = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
        for number in range(3):
            yield [images.fill_(number)]

    feed = feed_of(h5pack.EchoLoader(batches(), 2), transform=h5pack.Normalize())
    assert [round(255 * float(images.mean())) for (images,) in feed] == [0, 0, 1, 1, 2, 2]


class KeyedBatch:
    """A transform of whole batches that leaves the images as they are."""

    keyed = whole_batch = True

    def __call__(self, batch: Any, key: Any) -> Any:
        return batch


def flat(images: Any) -> list[torch.Tensor]:
    return list(images) if isinstance(images, tuple) else [images]


def test_results_that_the_next_call_overwrites_are_copied() -> None:
    result = torch.zeros(2, 3)

    def transform(images: torch.Tensor) -> torch.Tensor:
        return result.copy_(images)

    compiled = torch.compile(transform, mode="reduce-overhead")
    assert [overwrites_results(one) for one in (transform, torch.compile(transform), compiled)] == [False, False, True]
    transform.get_compiler_config = compiled.get_compiler_config  # type: ignore[attr-defined]
    assert [float(batch.sum()) for batch in prefetching_feed(Numbers(4), transform=transform)] == [0, 6, 12, 18]
    views = h5pack.Views(transform, lambda images: images + 1, transform)
    batches = list(prefetching_feed(Numbers(4), transform=views))
    assert [[float(view.sum()) for view in batch] for batch in batches] == [[6 * n, 6 * n + 6, 6 * n] for n in range(4)]


def test_sparse_parts_of_a_batch_are_copied_when_it_is_delivered() -> None:
    device = SimulatedDevice(0)
    sparse = torch.eye(3).to_sparse()
    there = sparse.to("meta")
    copier = DeviceCopier(device, None)  # type: ignore[arg-type]
    queued = copier.copy(FetchedBatch([sparse, "text", there], 0, 0, 1, None))
    assert queued.fetched.batch[0] is sparse
    # A transform of whole batches may leave tensors in host memory.
    host = torch.ones(2)
    queued.fetched.batch.append(host)
    with torch.inference_mode():
        found = copier.deliver(queued).batch
    assert (found[0].device.type, found[0].layout, found[1]) == ("meta", torch.sparse_coo, "text")
    assert not found[0].is_inference()
    assert (found[2] is there, found[3] is host) == (True, True)


class Computed(Mapping[str, Any]):
    """Makes new values on each access."""

    def __init__(self, number: int) -> None:
        self.number = number + 0.0  # raises a TypeError for a dict, so that copies are dicts

    def __getitem__(self, name: str) -> Any:
        whole = torch.full((3, 2), self.number)
        return whole if name == "images" else [whole[0] + n for n in range(3)]

    def __iter__(self) -> Iterator[str]:
        return iter(("images", "boxes"))

    def __len__(self) -> int:
        return 2


def test_values_that_a_mapping_computes_stay_apart() -> None:
    """Tensors that were joined and freed must not lend their ids to others."""
    for number, batch in enumerate(prefetching_feed(map(Computed, range(20)))):
        expected = dict(Computed(number))
        assert torch.equal(batch["images"], expected["images"])
        assert all(map(torch.equal, batch["boxes"], expected["boxes"]))


def test_a_list_of_tensors_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(0)
    copy = Mock(side_effect=torch.clone)
    monkeypatch.setattr(device, "copy", copy)
    copier = DeviceCopier(device, None)  # type: ignore[arg-type]
    boxes = [torch.full((count, 4), float(count)) for count in (2, 0, 5)]
    mixed = [torch.ones(2), torch.ones(2, dtype=torch.int64)]
    batch = [torch.zeros(3, 2), boxes, ["a", "b", "c"], mixed, []]
    found = copier.copy(FetchedBatch(batch, 0, 0, 1, None)).fetched.batch
    copied = [len(made.args[0]) for made in copy.mock_calls]
    assert copied[0] == 7, "the boxes"
    assert sorted(copied[1:4]) == [2, 2, 3]
    assert [one.tolist() for one in found[1]] == [one.tolist() for one in boxes]
    assert (found[2], [one.dtype for one in found[3]], found[4]) == (["a", "b", "c"], [torch.float32, torch.int64], [])
    assert boxes[0] is batch[1][0]  # type: ignore[index]
