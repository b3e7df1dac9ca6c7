"""Transforms of a feed: of whole batches, in sequence, of several views, and of the fields that move with images."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

import h5pack
from h5pack.data.draws import BatchKey
from h5pack.device.batch import mark_echoed, repeats_of
from h5pack.device.transforms import ImageTransform, uniform
from h5pack.errors import OptionsError
from h5pack.order.permutation import derive_key
from tests.data import packs
from tests.device.feeds import Keyed, every_feed, h5_loader
from tests.makers import FIELDS as PACKED
from tests.makers import annotated_images, quick

Triple = namedtuple("Triple", "images labels rows")


class Whole:
    """A transform of whole batches that records what it was called with."""

    whole_batch = True

    def __init__(self, *, keyed: bool = False, result: Any = "same") -> None:
        self.keyed, self.result = keyed, result
        self.calls: list[Any] = []

    def __call__(self, batch: Any, *keys: BatchKey) -> Any:
        self.calls.append((batch, *keys))
        return batch if self.result == "same" else self.result


@every_feed
def test_a_whole_batch_transform_gets_and_returns_batches(dataset: h5pack.H5Dataset, feed_of: Any) -> None:
    class AddRows:
        whole_batch = keyed = True

        def __call__(self, batch: Any, key: BatchKey) -> Any:
            images, labels, rows = batch
            assert torch.equal(rows, key.rows)
            return {"images": images + key.epoch, "doubled": 2 * labels}

    feed = feed_of(h5_loader(dataset), transform=[torch.Tensor.float, AddRows(), torch.neg])
    for epoch in range(2):
        rows = []
        for batch in feed:
            assert sorted(batch) == ["doubled", "images"]
            numbers = batch["doubled"] // 2
            assert torch.equal(batch["images"], -(torch.from_numpy(packs.values())[numbers].float() + epoch))
            rows += numbers.tolist()
        assert sorted(rows) == list(range(packs.ROWS))
    assert feed.transform_seconds > 0


@every_feed
def test_transforms_in_sequence_share_the_key_of_the_loaded_batch(feed_of: Any) -> None:
    images, rows = torch.ones(3, 2), torch.tensor([5, 6, 9])
    first, last, plain = Keyed(), Keyed(), Whole()
    drop = Whole(keyed=True, result={"image": images})
    batch = mark_echoed(Triple(images, "x", rows), 4)
    (found,) = feed_of([batch], transform=(first, plain, drop, last))
    keys = [first.keys[0], drop.calls[0][1], last.keys[0]]
    assert all(torch.equal(key.rows, rows) for key in keys)
    assert [(key.epoch, key.repeats, key.view) for key in keys] == [(0, 4, 0)] * 3
    # A transform sees the container that the loader made, and how often the batch was repeated stays known.
    assert type(plain.calls[0][0]) is type(drop.calls[0][0]) is Triple
    assert torch.equal(drop.calls[0][0].images, first(images, keys[0]))
    assert repeats_of(found) == 4
    assert torch.equal(found["image"], last(images, keys[0]))


def test_wrong_transforms_are_refused() -> None:
    images, rows = torch.ones(3, 2), torch.arange(3)
    for transform in (3, [torch.neg, None]):
        with pytest.raises(OptionsError) as caught:
            h5pack.DeviceFeed([], "cpu", transform=transform)
        assert caught.value.parameters == ("transform",)
    with pytest.raises(OptionsError):
        ImageTransform(Whole(result=None), None)([images, "x", rows], 0)
    for transform in (lambda _: None, h5pack.Views(torch.neg, lambda _: None)):
        with pytest.raises(OptionsError):
            ImageTransform(transform, None)([images, "x", rows], 0)
    with pytest.raises(OptionsError):
        ImageTransform([Whole(), Whole(keyed=True)], None)([images, "x"], 0)
    for wrong in ((), (3,), (torch.neg, Whole()), (h5pack.Views(torch.neg),)):
        with pytest.raises(OptionsError) as caught:
            h5pack.Views(*wrong)
        assert caught.value.parameters == ("transforms",)


def repeating(dataset: h5pack.H5Dataset, kind: str, workers: int = 0) -> Any:
    """A loader whose epochs have several copies of a row, also within a batch."""
    weights = torch.where(torch.arange(len(dataset)) % 16 == 0, 9.0, 1.0)
    if kind == "weights":
        return h5pack.H5Loader(dataset, 16, weights=weights, rank=1, num_replicas=2)
    if kind == "indices":
        sampler = h5pack.ChunkBatchSampler(dataset, 16, indices=[0, 1, 2] * 20)
        return DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    if kind == "replacement":
        return DataLoader(dataset, 16, sampler=WeightedRandomSampler(weights.tolist(), 64))
    if kind == "longer":
        return DataLoader(dataset, 16, sampler=RandomSampler(dataset, num_samples=3 * len(dataset)))
    pack = h5pack.ConcatPack([h5pack.H5Dataset(dataset.path, with_rows=True), dataset])
    mixture = h5pack.MixtureSampler(pack, 16, weights=[3, 1], num_samples=2 * len(dataset))
    return (
        DataLoader(pack, batch_sampler=mixture) if kind == "mixture" else h5pack.H5Loader(pack, batch_sampler=mixture)
    )


@every_feed
@pytest.mark.parametrize("kind", ["weights", "indices", "replacement", "longer", "mixture", "mixture of H5Loader"])
def test_copies_of_a_row_have_draws_of_their_own(dataset: h5pack.H5Dataset, feed_of: Any, kind: str) -> None:
    class Draw:
        keyed = True

        def __call__(self, images: torch.Tensor, key: BatchKey) -> torch.Tensor:
            return uniform(key, 0, 1)

    def feed() -> Any:
        return feed_of(h5pack.EchoLoader(repeating(dataset, kind), factor=2), transform=Draw())

    whole = feed()
    found = [torch.column_stack([batch.images[:, 0], batch.rows]) for _ in range(2) for batch in whole]
    samples = torch.cat(found)
    assert len(samples[:, 1].unique()) < len(samples) // 2
    assert len(samples[:, 0].unique()) > len(samples) - 3
    if kind not in ("replacement", "longer"):
        stopped, resumed = feed(), feed()
        for _ in zip(range(2), stopped, strict=False):
            state = stopped.state_dict()
        resumed.load_state_dict(state)
        rest = torch.cat([torch.column_stack([batch.images[:, 0], batch.rows]) for batch in resumed])
        assert torch.equal(rest, torch.cat(found[2 : len(found) // 2]))


def test_copies_of_a_row_have_the_same_draws_on_any_number_of_ranks(dataset: h5pack.H5Dataset) -> None:
    weights = np.where(np.arange(len(dataset)) % 16 == 0, 9.0, 1.0)
    normalize = h5pack.Normalize(flip=0.5, crop=3)

    def steps(ranks: int) -> list[torch.Tensor]:
        loaders = [
            h5pack.H5Loader(dataset, 16 // ranks, weights=weights, streams=4, rank=rank, num_replicas=ranks)
            for rank in range(ranks)
        ]
        feeds = [h5pack.DeviceFeed(loader, "cpu", transform=normalize) for loader in loaders]
        return [torch.cat([batch.images for batch in batches]) for batches in zip(*feeds, strict=True)]

    assert all(torch.equal(one, other) for one, other in zip(steps(1), steps(4), strict=True))


# Several views.


@every_feed
def test_each_view_has_a_number_and_draws_of_its_own(feed_of: Any) -> None:
    images = torch.randint(0, 256, (6, 32, 32, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    rows, labels = torch.arange(6), torch.zeros(6)
    augment = h5pack.Normalize(flip=0.5, crop=8)
    recording = Keyed()
    views = h5pack.Views(augment, augment, torch.neg, recording)
    (found,) = feed_of([[images, labels, rows]], transform=views)
    assert views.keyed
    assert [key.view for key in recording.keys] == [3]
    first, second, third, _ = found[0]
    # View 0 is what the transform alone makes.
    assert torch.equal(first, augment(images, BatchKey(rows, 0)))
    assert torch.equal(second, augment(images, BatchKey(rows, 0, view=1)))
    assert torch.equal(third, torch.neg(images))
    assert not any(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    # The same in a call without a feed.
    direct = views(images, BatchKey(rows, 0))
    assert all(torch.equal(one, two) for one, two in zip(found[0], direct, strict=True))
    assert not h5pack.Views(torch.neg).keyed
    assert len(h5pack.Views(torch.neg, torch.abs)(images)) == 2


# Fields that move with the images.


MASKS, BOXES, POINTS = "masks", "boxes", "points"
FIELDS = {MASKS: "mask", BOXES: "boxes", POINTS: "keypoints"}


def marked_batch(count: int = 40) -> dict[str, Any]:
    """Black images with a white square of 3 x 3 pixels; its mask, its box, and its corners and center as points."""
    random = torch.Generator().manual_seed(3)
    top, left = (torch.randint(0, length - 2, (count,), generator=random) for length in (20, 24))
    images = torch.zeros(count, 20, 24, 3, dtype=torch.uint8)
    for number in range(count):
        images[number, top[number] : top[number] + 3, left[number] : left[number] + 3] = 255
    corner = torch.stack([left, top], 1).float()
    boxes = torch.cat([corner, corner + 3], 1)[:, None]
    points = torch.cat([corner[:, None] + 1.5, torch.ones(count, 1, 1)], 2)
    return {
        "images": images,
        MASKS: images[..., 0] // 255,
        BOXES: boxes,
        POINTS: points,
        "rows": torch.arange(count),
    }


@every_feed
def test_fields_move_with_the_images(feed_of: Any) -> None:
    batch = marked_batch()
    normalize = h5pack.Normalize(flip=0.5, crop=6, erase=0.0, fields=FIELDS)
    (found,) = feed_of([batch], transform=normalize)
    assert torch.equal(found["images"], normalize(batch["images"], BatchKey(batch["rows"], 0)))
    # The mask is what the image shows, and the box is what the mask shows.
    assert torch.equal(found[MASKS], found["images"][:, 0].to(torch.uint8))
    assert not torch.equal(found[MASKS], batch[MASKS])
    lost = 0
    for mask, box, point in zip(found[MASKS], found[BOXES][:, 0], found[POINTS][:, 0], strict=True):
        rows, columns = (mask.any(axis).nonzero()[:, 0] for axis in (1, 0))
        if not len(rows):
            assert not (box[2:] > box[:2]).all()
            lost += 1
            continue
        assert box.tolist() == [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
        if mask.sum() == 9:
            assert point.tolist() == [columns[1] + 0.5, rows[1] + 0.5, 1]
    assert 0 < lost < 20
    # The loader's batch is unchanged.
    assert all(torch.equal(one, two) for one, two in zip(batch.values(), marked_batch().values(), strict=True))


@every_feed
def test_fields_move_for_validation_without_row_numbers(feed_of: Any) -> None:
    batch = {name: part for name, part in marked_batch().items() if name != "rows"}
    for crop, scale, (left, top) in (
        (h5pack.CenterCrop((12, 14)), 1, (5, 4)),
        (h5pack.CenterCrop((24, 28), resize=40), 2, (10, 8)),
    ):
        normalize = h5pack.Normalize(crop=crop, fields=FIELDS)
        (found,) = feed_of([batch], transform=normalize)
        assert found["images"].shape[2:] == found[MASKS].shape[1:] == crop.size
        moved = (scale * batch[BOXES] - torch.tensor([left, top, left, top])).clamp(min=0)
        height, width = crop.size
        assert torch.equal(found[BOXES], moved.minimum(torch.tensor([width, height, width, height])))
        assert torch.equal(found[POINTS][..., :2], scale * batch[POINTS][..., :2] - torch.tensor([left, top]))
        if scale == 1:
            assert torch.equal(found[MASKS], found["images"][:, 0].to(torch.uint8))
        else:
            enlarged = batch[MASKS].repeat_interleave(2, 1).repeat_interleave(2, 2)
            assert torch.equal(found[MASKS], enlarged[:, top : top + height, left : left + width])


@every_feed
def test_fields_of_a_file_have_the_names_of_its_datasets(tmp_path: Path, feed_of: Any) -> None:
    batch = {name: part.numpy() for name, part in marked_batch().items()}
    path = packs.write(tmp_path / "f.h5", **{name: batch[name] for name in ("images", MASKS, BOXES)})
    dataset = h5pack.H5Dataset(path, labels=None, fields=[MASKS, BOXES], with_rows=True)
    by_name, by_index = (
        h5pack.Normalize(flip=0.5, crop=6, fields={masks: "mask", BOXES: "boxes"}) for masks in (MASKS, 1)
    )
    loaders = [h5pack.H5Loader(dataset, 16, num_threads=1), DataLoader(dataset, 16, collate_fn=dataset.collate)]
    for loader, normalize in zip(loaders, (by_name, by_index), strict=True):
        for images, masks, boxes, rows in feed_of(loader, transform=normalize):
            assert torch.equal(masks, images[:, 0].to(torch.uint8))
            assert boxes.shape == (len(rows), 1, 4)
            assert boxes.dtype == torch.float32
            assert np.isin(boxes[..., 0].numpy(), np.arange(25)).all()


def test_each_view_moves_the_fields() -> None:
    batch = marked_batch()
    one = h5pack.Normalize(flip=0.5, crop=6, fields={MASKS: "mask", BOXES: None})
    two = h5pack.Normalize(flip=0.5, crop=2, seed=1, fields={MASKS: "mask", BOXES: "boxes"})
    found = ImageTransform(h5pack.Views(one, two, torch.Tensor.float), None)(batch, 0)
    for view in range(2):
        assert torch.equal(found[MASKS][view], found["images"][view][:, 0].to(torch.uint8))
    assert not torch.equal(found[MASKS][0], found[MASKS][1])
    # What a view does not move stays as it was.
    assert torch.equal(found[MASKS][2], batch[MASKS])
    assert torch.equal(found[BOXES][0], batch[BOXES])
    assert torch.equal(found[BOXES][2], batch[BOXES])
    assert not torch.equal(found[BOXES][1], batch[BOXES])
    assert torch.equal(found[POINTS], batch[POINTS])


@every_feed
def test_a_field_that_looks_spatial_must_be_named(feed_of: Any) -> None:
    batch = marked_batch()
    moving, erasing = h5pack.Normalize(crop=2), h5pack.Normalize(erase=0.5)
    hidden = [batch["images"], {"deep": batch[MASKS][..., None]}, batch["rows"]]
    first = [batch["images"], batch["images"].movedim(3, 1), batch["rows"]]
    for wrong, name in ((batch, MASKS), (hidden, 1), (first, 1)):
        for transform in (moving, h5pack.Views(torch.neg, moving)):
            with pytest.raises(OptionsError) as caught:
                list(feed_of([wrong], transform=transform))
            assert caught.value.parameters == ("fields",)
            assert repr(name) in str(caught.value)
        # None leaves it; and what moves no pixels needs no fields.
        leaving = h5pack.Normalize(crop=2, fields={name: None})
        assert len(list(feed_of([wrong], transform=leaving))) == len(list(feed_of([wrong], transform=erasing))) == 1
    # Tensors of other shapes are not spatial.
    small = {**batch, MASKS: batch[MASKS][:, :5]}
    assert len(list(feed_of([small], transform=moving))) == 1
    with pytest.raises(OptionsError) as caught:
        list(feed_of([small], transform=h5pack.Normalize(crop=2, fields={"absent": "mask"})))
    assert caught.value.parameters == ("fields",)
    for wrong, key in ((small, "images"), ([small["images"], small[MASKS], small["rows"]], 0)):
        with pytest.raises(OptionsError, match="names the images"):
            list(feed_of([wrong], transform=h5pack.Normalize(crop=2, fields={key: "mask"})))


# Random numbers for keyed transforms.


def test_uniform_draws_belong_to_the_sample() -> None:
    rows = torch.arange(20_000)
    draws = uniform(BatchKey(rows, 3), seed=5, count=3)
    assert (draws.dtype, draws.shape) == (torch.float32, (20_000, 3))
    # The upper 24 bits of the words, as integers of any size.
    expected = [[(derive_key(5, 3, 3, 0, row, number) >> 40) / 2**24 for number in range(3)] for row in range(50)]
    assert draws[:50].tolist() == expected
    assert 0 <= draws.min() <= draws.max() < 1
    keys = [BatchKey(rows, 4), BatchKey(rows, 3, 1), BatchKey(rows, 3, 0, 1)]
    for other in [uniform(key, 5, 3) for key in keys] + [uniform(BatchKey(rows, 3), 6, 3)]:
        assert torch.corrcoef(torch.stack([draws[:, 0], other[:, 0]]))[0, 1].abs() < 0.04
    assert torch.equal(uniform(BatchKey(rows[7:9], 3), 5, 3), draws[7:9])
    for count in (0, 65):
        with pytest.raises(OptionsError) as caught:
            uniform(BatchKey(rows, 3), 5, count)
        assert caught.value.parameters == (f"count={count}",)
    for name in ("seed", "count"):
        for value in (2.0, "2", True, None):
            with pytest.raises(OptionsError) as caught:
                uniform(**{"key": BatchKey(rows, 3), "seed": 5, "count": 3, name: value})
            assert caught.value.parameters == (f"{name}={value!r}",)


@every_feed
def test_boxes_and_points_of_a_pack_move_or_are_refused_by_name(tmp_path: Path, feed_of: Any) -> None:
    annotated_images(tmp_path / "in", 12)
    h5pack.convert(tmp_path / "in" / "list.jsonl", tmp_path / "o.h5", **quick(**PACKED))
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", fields=["boxes", "points", "caption"], with_rows=True)
    loader = h5pack.H5Loader(dataset, 5, shuffle=False)
    named: dict[Hashable, str | None] = {"boxes": "boxes", "points": "keypoints"}
    for name, fields in (("boxes", {"points": "keypoints"}), ("points", {"boxes": "boxes"})):
        with pytest.raises(OptionsError, match=f"'{name}'"):
            list(feed_of(loader, transform=h5pack.Normalize(flip=0.5, fields=fields)))
    plain = list(loader)
    for batch, before in zip(feed_of(loader, transform=h5pack.Normalize(flip=1.0, fields=named)), plain, strict=True):
        width = before.images.shape[2]
        assert batch.caption == before.caption
        for moved, boxes, points, old in zip(batch.boxes, before.boxes, batch.points, before.points, strict=True):
            mirrored = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)
            torch.testing.assert_close(moved.cpu(), mirrored)
            torch.testing.assert_close(points.cpu(), torch.stack([width - old[:, 0], old[:, 1], old[:, 2]], 1))
    left = h5pack.Normalize(flip=1.0, fields={"boxes": None, "points": None})
    for batch, before in zip(feed_of(loader, transform=left), plain, strict=True):
        assert all(torch.equal(one.cpu(), other) for one, other in zip(batch.boxes, before.boxes, strict=True))
    assert len(list(feed_of(loader, transform=h5pack.Normalize()))) == 3
