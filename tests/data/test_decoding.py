"""Crops that are decoded from encoded images: pixels of the slow twin, drawn for seed, epoch and row only."""

from __future__ import annotations

import itertools
import pickle
import re
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import h5pack
from h5pack.data import chunk_groups, decoding
from h5pack.data.draws import BatchKey, crop_windows
from h5pack.errors import DamagedRowsError, OptionsError, SizesDifferError
from h5pack.images import decode
from h5pack.read import encoded as encoded_rows
from tests.forking import output_of
from tests.makers import pixels
from tests.read.encoded_files import decoded, encode, kinds, write_encoded, write_kept

CROP = h5pack.RandomResizedCrop(16)
SEED = 5


def photos() -> list[bytes]:
    """Images of many sizes and kinds: plain JPEGs of each subsampling, progressive, gray, CMYK, turned, PNG, WebP."""
    sizes = [(60, 81), (97, 40), (33, 33), (128, 70), (18, 90), (75, 100)]
    plain = [
        encode(pixels(number, size), quality=85, subsampling=number % 3, progressive=number > 3)
        for number, size in enumerate(sizes)
    ]
    return [*plain, *kinds().values(), encode(pixels(9, (50, 41), 1)), encode(pixels(9, (50, 41)), "PNG")]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of all `photos`, whose labels are the row numbers."""
    return write_kept(tmp_path_factory.mktemp("kept") / "k.h5", photos())


@pytest.fixture(params=["all", "no regions", "whole images", "Pillow only"])
def decoders(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a test with all decoders, without the one of regions, of upper rows, and without simplejpeg, too."""
    if request.param != "all":
        monkeypatch.setattr(decoding, "region_decoder", lambda _: None)
    if request.param not in ("all", "no regions"):
        monkeypatch.setattr(decoding, "decode_top", lambda *_: None)
    if request.param == "Pillow only":
        monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
    monkeypatch.setattr(encoded_rows, "_decoders", threading.local())
    return request.param


def resized(image: np.ndarray[Any, Any], size: tuple[int, int]) -> torch.Tensor:
    """An image, uint8 (h, w, 3), resized by torch as torchvision does, (height, width, 3)."""
    planes = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    found = torch.nn.functional.interpolate(planes, size, mode="bilinear", antialias=True)
    return found[0].permute(1, 2, 0)


def drawn(data: bytes, row: int, epoch: int, crop: h5pack.RandomResizedCrop = CROP, seed: int = SEED) -> torch.Tensor:
    """The slow twin: decode the whole image by Pillow, cut the drawn window out, resize it."""
    image = decoded(data)
    window = crop_windows(BatchKey(torch.tensor([row]), epoch), seed, crop, *image.shape[:2])
    top, left, height, width = (int(part) for part in window)
    return resized(image[top : top + height, left : left + width], crop.output_size)


def by_row(batches: Iterable[Any]) -> dict[int, torch.Tensor]:
    """The images of batches with rows, by row; each row at most once."""
    found: dict[int, torch.Tensor] = {}
    for batch in batches:
        for row, image in zip(batch.rows.tolist(), batch.images, strict=True):
            assert row not in found
            found[row] = image.clone()
    return found


def same(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[row], other[row]) for row in one)


def test_random_crops_are_the_pixels_of_the_slow_twin(kept: Path, decoders: str) -> None:
    rows = photos()
    loader = h5pack.H5Loader(
        h5pack.H5Dataset(kept, with_rows=True), 7, decode=CROP, seed=SEED, num_threads=3, shuffle="full"
    )
    pairs = 0
    for epoch in range(500 // len(rows) + 1 if decoders == "all" else 3):
        found = by_row(loader)
        assert sorted(found) == list(range(len(rows)))
        for row, image in found.items():
            assert torch.equal(image, drawn(rows[row], row, epoch)), (row, epoch)
        pairs += len(found)
    assert pairs >= 500 or decoders != "all"


def test_regions_are_decoded_if_the_package_is_installed(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvidia.nvimgcodec", reason="pip install nvidia-nvimgcodec-cu12")
    usual = decoding.region_decoder
    regions = Mock(wraps=usual)
    monkeypatch.setattr(decoding, "region_decoder", regions)
    by_row(h5pack.H5Loader(h5pack.H5Dataset(kept, with_rows=True), 8, decode=CROP, num_threads=1))
    assert sum(usual(*call.args) is not None for call in regions.call_args_list) >= 3


@pytest.mark.parametrize("scans", [1, 4, 9])
def test_crops_of_jpegs_without_all_scans_are_the_pixels_of_the_slow_twin(tmp_path: Path, scans: int) -> None:
    rows = []
    for seed in range(8):
        whole = encode(pixels(seed, (90, 70)), quality=85, progressive=True, subsampling=seed % 3)
        starts = [match.start() for match in re.finditer(b"\xff\xda", whole)]
        rows.append(whole[: starts[scans]] + b"\xff\xd9")
    loader = h5pack.H5Loader(
        h5pack.H5Dataset(write_kept(tmp_path / "k.h5", rows), with_rows=True), 4, decode=CROP, seed=SEED
    )
    for epoch in range(3):
        for row, image in by_row(loader).items():
            assert torch.equal(image, drawn(rows[row], row, epoch)), (row, epoch)


@pytest.mark.parametrize(
    "crop",
    [
        h5pack.CenterCrop(16, resize=20),
        h5pack.CenterCrop((20, 30), resize=20),
        h5pack.CenterCrop(40),
        h5pack.CenterCrop(16),
        h5pack.Resize((24, 10)),
    ],
)
def test_other_crops_are_those_of_torchvision(kept: Path, decoders: str, crop: Any) -> None:
    found = by_row(h5pack.H5Loader(h5pack.H5Dataset(kept, with_rows=True), 9, decode=crop))
    for row, data in enumerate(photos()):
        image = decoded(data)
        if isinstance(crop, h5pack.Resize):
            expected = resized(image, crop.output_size)
        else:
            small = resized(image, crop.resized_size(*image.shape[:2])).numpy()
            height, width = crop.output_size
            # As torchvision pads and cuts: half of what lacks above and left, then the middle.
            gaps = [max(0, size - side) for size, side in zip(crop.output_size, small.shape[:2], strict=True)]
            small = np.pad(small, [*((gap // 2, (gap + 1) // 2) for gap in gaps), (0, 0)])
            top, left = round((small.shape[0] - height) / 2), round((small.shape[1] - width) / 2)
            expected = torch.from_numpy(small[top : top + height, left : left + width])
        assert torch.equal(found[row], expected), row


@pytest.mark.parametrize("small_tasks", [False, True])
def test_crops_do_not_depend_on_threads_workers_batches_or_ranks(
    kept: Path, small_tasks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_tasks:
        monkeypatch.setattr(chunk_groups, "_MIN_CROPS", 2)
        monkeypatch.setattr(chunk_groups, "_CROPPED_BYTES", 0)
    dataset = h5pack.H5Dataset(kept, decode=CROP, with_rows=True)
    expected = {row: drawn(data, row, 0) for row, data in enumerate(photos())}
    for threads, batch in ((1, 4), (4, 4), (2, 32)):
        assert same(by_row(h5pack.H5Loader(dataset, batch, seed=SEED, num_threads=threads)), expected)
    sampler = h5pack.ChunkBatchSampler(dataset, 5, seed=SEED)
    for workers in (0, 2):
        sampler.set_epoch(0)
        assert same(by_row(DataLoader(dataset, batch_sampler=sampler, num_workers=workers)), expected)
    assert same(by_row(DataLoader(dataset, 3, sampler=h5pack.ChunkSampler(dataset, seed=SEED))), expected)
    parts: dict[int, torch.Tensor] = {}
    for rank in range(2):
        loader = h5pack.H5Loader(
            dataset, 3, seed=SEED, rank=rank, num_replicas=2, streams=2, drop_last=True, shuffle="full"
        )
        parts |= by_row(loader)
    assert len(parts) >= len(expected) - 6
    assert same(parts, {row: expected[row] for row in parts})


def test_a_resumed_epoch_has_the_same_crops(kept: Path) -> None:
    def loader() -> h5pack.H5Loader:
        return h5pack.H5Loader(h5pack.H5Dataset(kept, with_rows=True), 4, decode=CROP, seed=SEED, num_threads=2)

    first, whole = loader(), loader()
    by_row(first), by_row(whole)
    batches = iter(first)
    head = [next(batches) for _ in range(3)]
    second = loader()
    second.load_state_dict(first.state_dict())
    found = by_row(head) | by_row(second)
    assert same(found, by_row(whole))
    assert same(found, {row: drawn(data, row, 1) for row, data in enumerate(photos())})


def test_epochs_and_copies_of_a_row_differ(kept: Path) -> None:
    dataset = h5pack.H5Dataset(kept, with_rows=True, decode=CROP)
    loader = h5pack.H5Loader(dataset, 4, seed=SEED)
    one, two = by_row(loader), by_row(loader)
    assert sum(torch.equal(one[row], two[row]) for row in one) < len(one) // 4
    weights = np.zeros(len(dataset))
    weights[0] = 1
    for order in (
        h5pack.H5Loader(dataset, 1, indices=[0] * 12),
        h5pack.H5Loader(dataset, 1, weights=weights, num_samples=12),
        DataLoader(
            dataset, batch_sampler=h5pack.ChunkBatchSampler(dataset, 1, weights=weights, num_samples=12), num_workers=2
        ),
        DataLoader(dataset, 1, sampler=h5pack.ChunkSampler(dataset, weights=weights, num_samples=12)),
    ):
        copies = [batch.images[0].clone() for batch in order]
        assert len(copies) == 12
        assert len({image.numpy().tobytes() for image in copies}) > 9
    again = [batch.images[0].clone() for batch in h5pack.H5Loader(dataset, 1, weights=weights, num_samples=12)]
    assert all(torch.equal(image, other) for image, other in zip(again, copies, strict=True))
    batch = dataset.collate(dataset.__getitems__([0] * 12))
    assert len({image.numpy().tobytes() for image in batch.images}) > 9
    # Copies within a batch, and on several ranks.
    for drawing in ({"weights": weights, "num_samples": 12}, {"indices": [0] * 12}):
        whole, sampler = h5pack.H5Loader(dataset, 6, **drawing), h5pack.ChunkBatchSampler(dataset, 6, **drawing)
        images = torch.cat([batch.images for batch in whole])
        assert len({image.numpy().tobytes() for image in images}) > 9
        assert torch.equal(images, torch.cat([batch.images for batch in DataLoader(dataset, batch_sampler=sampler)]))
        ranks = [h5pack.H5Loader(dataset, 3, **drawing, rank=rank, num_replicas=2, streams=2) for rank in range(2)]
        alone = h5pack.H5Loader(dataset, 6, **drawing, streams=2)
        steps = [torch.cat([batch.images for batch in step]) for step in zip(*ranks, strict=True)]
        assert torch.equal(torch.cat(steps), torch.cat([batch.images for batch in alone]))


def test_crops_stay_in_host_memory_whatever_torchs_default_device_is(kept: Path) -> None:
    dataset = h5pack.H5Dataset(kept, with_rows=True, decode=CROP)
    sampler = h5pack.ChunkBatchSampler(dataset, 4, seed=SEED)
    expected = by_row(h5pack.H5Loader(dataset, 4, seed=SEED))
    with torch.device("meta"):
        for indices in sampler:
            found = dataset.collate(dataset.__getitems__(indices))
            assert torch.equal(found.images, torch.stack([expected[row] for row in found.rows.tolist()]))
        assert dataset[0].image.device.type == "cpu"
        weights = np.arange(len(dataset)) + 1
        assert len(list(h5pack.H5Loader(dataset, 4, weights=weights))) == len(sampler)


@pytest.mark.parametrize("streams", [1, 4])
def test_a_state_saved_in_the_middle_of_a_turn_resumes_the_same_crops(kept: Path, streams: int) -> None:
    dataset = h5pack.H5Dataset(kept, decode=CROP)

    def sampler() -> h5pack.ChunkSampler:
        weights = np.arange(len(dataset)) % 3 + 1
        return h5pack.ChunkSampler(dataset, weights=weights, num_samples=40, streams=streams, seed=SEED, drop_last=True)

    def drawn_keys(indices: Iterable[Any]) -> list[tuple[int, Any]]:
        return [(int(index), index.key) for index in indices]

    whole = drawn_keys(sampler())
    # A turn is a row of each stream.
    assert [key.repeat for _, key in whole] == [(number // streams << 20) + number % streams for number in range(40)]
    for stop in range(1, 40):
        first, second = sampler(), sampler()
        head = drawn_keys(itertools.islice(iter(first), stop))
        second.load_state_dict(first.state_dict())
        assert head + drawn_keys(second) == whole


def test_other_samplers_draw_from_torchs_generator(kept: Path) -> None:
    dataset = h5pack.H5Dataset(kept, decode=CROP, with_rows=True)

    def epoch(seed: int, workers: int = 0) -> dict[int, torch.Tensor]:
        torch.manual_seed(seed)
        return by_row(DataLoader(dataset, 6, shuffle=True, num_workers=workers))

    assert same(epoch(1), epoch(1))
    assert same(epoch(1, 2), epoch(1, 2))
    assert not same(epoch(1), epoch(2))
    torch.manual_seed(3)
    one, two = dataset[1].image, dataset[1].image
    assert not torch.equal(one, two)
    torch.manual_seed(3)
    assert torch.equal(dataset[1].image, one)


def test_crops_that_are_not_random_leave_torchs_generator_alone(kept: Path) -> None:
    dataset = h5pack.H5Dataset(kept, decode=h5pack.CenterCrop(8))
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    next(iter(h5pack.H5Loader(dataset, 4)))
    dataset.collate(dataset.__getitems__([0, 3]))
    assert (dataset[0].image.shape, len(dataset[:2])) == ((8, 8, 3), 2)
    assert torch.equal(torch.rand(3), expected)


def test_samples_transforms_and_lists_of_packs(kept: Path, tmp_path: Path) -> None:
    seen = []

    def transform(image: Any) -> int:
        seen.append(image.size)
        return 0

    dataset = h5pack.H5Dataset(kept, decode=h5pack.CenterCrop((8, 9)), transform=transform)
    assert [sample.image for sample in dataset[:3]] == [0, 0, 0]
    assert next(iter(DataLoader(dataset, 4))).images.tolist() == [0, 0, 0, 0]
    assert seen == [(9, 8)] * 7
    other = write_encoded(tmp_path / "e.h5", [encode(pixels(number, (30, 20 + number))) for number in range(6)])
    both = h5pack.ConcatPack([h5pack.H5Dataset(path, decode=CROP, labels=None) for path in (kept, other)])
    sampler = h5pack.MixtureSampler(both, 4, weights=[1, 3], num_samples=24, seed=2)
    found = [batch.images for batch in DataLoader(both, batch_sampler=sampler)]
    sampler.set_epoch(0)
    again = [batch.images for batch in DataLoader(both, batch_sampler=sampler, num_workers=2)]
    assert [tuple(images.shape) for images in found] == [(4, 16, 16, 3)] * 6
    assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))
    assert both[len(both) - 1].image.shape == (16, 16, 3)


def test_tiny_images_and_crops(tmp_path: Path) -> None:
    """Rows of fewer bytes than those that are read directly into batches."""
    path = write_kept(tmp_path / "k.h5", [encode(pixels(number, (8 + number, 9)), "PNG") for number in range(5)])
    found = by_row(h5pack.H5Loader(h5pack.H5Dataset(path, with_rows=True), 3, decode=h5pack.Resize((4, 5))))
    for row, image in found.items():
        assert torch.equal(image, resized(pixels(row, (8 + row, 9)), (4, 5)))


def test_whole_images_of_several_sizes_name_the_way(kept: Path) -> None:
    with pytest.raises(SizesDifferError) as caught:
        list(h5pack.H5Loader(h5pack.H5Dataset(kept), 8))
    assert caught.value.parameters[0] == "decode=RandomResizedCrop(224)"


def test_invalid_uses_are_refused(kept: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw.h5"
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(photos()[0])
    h5pack.convert(tmp_path / "images", raw, num_workers=1)
    for make, parameter in (
        (lambda: h5pack.H5Dataset(raw, decode=CROP), "decode"),
        (lambda: h5pack.H5Loader(h5pack.H5Dataset(raw), 1, decode=CROP), "decode"),
        (lambda: h5pack.H5Dataset(kept, decode=h5pack.RandomCrop(8)), "decode"),
        (lambda: h5pack.H5Dataset(kept, decode=224), "decode"),
        (lambda: h5pack.Resize(224), "size"),
        (lambda: h5pack.Resize((0, 3)), "size"),
        (lambda: h5pack.ChunkSampler(Subset(h5pack.H5Dataset(kept, decode=CROP), [0])), "dataset"),
        (lambda: h5pack.ChunkSampler(h5pack.ConcatPack([h5pack.H5Dataset(kept, decode=CROP)])), "dataset"),
    ):
        with pytest.raises(OptionsError) as caught:
            make()
        assert caught.value.parameters[0].partition("=")[0] == parameter


def test_crops_are_compared_with_checksums(tmp_path: Path) -> None:
    path = write_kept(tmp_path / "k.h5", photos())
    with h5py.File(path, "r+") as file:
        file["checksums/encoded"][2] ^= 1
    dataset = h5pack.H5Dataset(path, check=True, decode=h5pack.CenterCrop(16))
    for read in (
        lambda: dataset[2],
        lambda: dataset.collate(dataset.__getitems__([1, 2])),
        lambda: list(h5pack.H5Loader(dataset, 3, shuffle=False)),
    ):
        with pytest.raises(DamagedRowsError) as caught:
            read()
        assert tuple(caught.value.rows) == (2,)
    assert dataset[1].image.shape == (16, 16, 3)


def test_rows_that_cannot_be_decoded_are_named(tmp_path: Path) -> None:
    long = encode(np.zeros((1, 20_000, 3), np.uint8), "PNG")
    rows = [photos()[0], encode(pixels(1, (97, 97)), "PNG"), long]
    path = write_kept(tmp_path / "k.h5", rows)
    with h5py.File(path, "r+") as file:
        file["encoded/data"][len(rows[0]) + 200 : len(rows[0]) + 300] = 0
    for row, crop in ((1, h5pack.CenterCrop(97)), (2, h5pack.CenterCrop(224, resize=10_000))):
        loader = h5pack.H5Loader(h5pack.H5Dataset(path), 1, indices=[row], decode=crop)
        with pytest.raises(DamagedRowsError) as caught:
            list(loader)
        assert caught.value.rows == (row,)


@pytest.fixture(params=["simplejpeg", "Pillow only"])
def _reduced_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode JPEGs at a fraction of their size with each of the two packages."""
    if request.param == "Pillow only":
        monkeypatch.setattr(decoding, "decode_top", lambda *_: None)
        monkeypatch.setitem(sys.modules, "simplejpeg", None)


@pytest.mark.usefixtures("_reduced_by")
def test_an_inexact_crop_is_nearly_the_same(tmp_path: Path) -> None:
    large = [encode(pixels(number, (300, 400)), quality=90) for number in range(4)]
    path = write_kept(tmp_path / "k.h5", large)

    def images(exact: bool, crop: Any) -> torch.Tensor:
        loader = h5pack.H5Loader(h5pack.H5Dataset(path), 4, decode=crop, exact=exact, shuffle=False)
        return next(iter(loader)).images.float()

    for crop in (h5pack.RandomResizedCrop(32, scale=(0.5, 1)), h5pack.CenterCrop(32, resize=40)):
        difference = (images(True, crop) - images(False, crop)).abs()
        assert 0 < difference.mean() < 4
    # No fraction of the size is enough for this one.
    crop = h5pack.RandomResizedCrop(200)
    assert torch.equal(images(True, crop), images(False, crop))


@pytest.mark.usefixtures("_reduced_by")
@pytest.mark.parametrize("damage", ["truncated", "tables"])
def test_damaged_rows_of_inexact_crops_are_named(tmp_path: Path, damage: str) -> None:
    data = encode(pixels(0, (300, 400)), quality=90)
    path = write_kept(tmp_path / "k.h5", [data, encode(pixels(1, (90, 70)))])
    tables = data.index(b"\xff\xc4") + 5
    with h5py.File(path, "r+") as file:
        if damage == "truncated":
            file["encoded/data"][len(data) // 2 : len(data)] = 0
        else:
            file["encoded/data"][tables : tables + 16] = 255
    dataset = h5pack.H5Dataset(path, decode=h5pack.CenterCrop(32, resize=40), exact=False)
    for read in (lambda: dataset[0], lambda: list(h5pack.H5Loader(dataset, 2))):
        with pytest.raises(DamagedRowsError) as caught:
            read()
        assert caught.value.rows == (0,)


def test_a_key_survives_pickling() -> None:
    key = decoding.DrawKey(1, 2, 3)
    sent = pickle.loads(pickle.dumps(decoding.DrawnIndex.of([4, 5], key)))
    assert sent == [4, 5]
    found = decoding.key_of(sent)
    assert (found.seed, found.epoch, found.repeat.tolist()) == (1, 2, [3, 3])
    assert decoding.key_of([*sent, 6]).seed != decoding.key_of([*sent, 6]).seed


def print_count(path: Path) -> None:
    loader = h5pack.H5Loader(h5pack.H5Dataset(path), 4, decode=h5pack.RandomResizedCrop(16))
    print(sum(len(batch.images) for batch in loader))


def test_nothing_is_written_to_standard_error(kept: Path) -> None:
    assert output_of(print_count, kept) == f"{len(photos())}\n"
