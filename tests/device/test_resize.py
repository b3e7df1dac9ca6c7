"""Resized crops: windows drawn as torchvision draws them, pixels resized as torch does, the same everywhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F

from h5pack.device.augment import Augmentation, AugmentationDraws, ColorJitter, draw_augmentation
from h5pack.device.normalize import Normalize
from h5pack.device.operations import apply_color, erase_mask, scale_whole
from h5pack.device.resize import find_taps, max_taps, resize, resize_on_cpu
from h5pack.errors import OptionsError
from h5pack.images.crops import CenterCrop, RandomResizedCrop, ResizedCrop
from tests.device.feeds import needs_gpu
from tests.device.test_normalize import LAYOUTS, batch
from tests.images.test_crops import key_of

Ints = npt.NDArray[np.int64]
CROPS: tuple[ResizedCrop, ...] = (
    RandomResizedCrop(9),
    RandomResizedCrop((5, 40), scale=(0.5, 1.0)),
    RandomResizedCrop((64, 3), scale=(0.01, 0.1), ratio=(0.2, 5)),
    CenterCrop(12, resize=14),
    CenterCrop((7, 30), resize=10),
)
"""Windows that grow and shrink along either axis, and a window that is wider than the resized image."""


def draws_of(crop: ResizedCrop, count: int, height: int, width: int, **changes: Any) -> AugmentationDraws:
    """Draws of the crop, and of both flips."""
    augmentation = Augmentation(flip=0.5, vertical_flip=0.5, crop=crop, **changes)
    return draw_augmentation(key_of(count), 11, augmentation, height, width)


def window_of(draws: AugmentationDraws, number: int) -> tuple[int, ...]:
    parts = (draws.top, draws.left, draws.crop_height, draws.crop_width)
    return tuple(int(part[number]) for part in parts)


def weights(length: int, size: int) -> npt.NDArray[np.float64]:
    """The matrix, (size, length), by which torch's antialiased bilinear interpolation resizes one axis."""
    scale = length / size
    support = max(scale, 1.0)
    matrix = np.zeros((size, length))
    for line in range(size):
        center = scale * (line + 0.5)
        first, end = max(int(center - support + 0.5), 0), min(int(center + support + 0.5), length)
        matrix[line, first:end] = [max(0.0, 1 - abs((pixel - center + 0.5) / support)) for pixel in range(first, end)]
    return matrix / matrix.sum(1, keepdims=True)


def reference(images: torch.Tensor, draws: AugmentationDraws | None, crop: ResizedCrop) -> npt.NDArray[np.float64]:
    """Resized, cropped and flipped images, image by image with matrices: float64, (N, H, W, C)."""
    found = []
    for number, image in enumerate(images.numpy()):
        if draws is not None and isinstance(crop, RandomResizedCrop):
            top, left, height, width = window_of(draws, number)
            image = image[top : top + height, left : left + width]
        height, width = crop.resized_size(*image.shape[:2])
        image = np.einsum(
            "yh,hwc,xw->yxc", weights(len(image), height), image, weights(image.shape[1], width), optimize=True
        )
        (top, left), size = crop.window(*images.shape[1:3]), crop.output_size
        padded = np.pad(image, ((max(0, -top), size[0]), (max(0, -left), size[1]), (0, 0)))
        image = padded[max(0, top) :, max(0, left) :][: size[0], : size[1]]
        if draws is not None:
            image = image[::-1] if draws.vertical_flip[number] else image
            image = image[:, ::-1] if draws.flip[number] else image
        found.append(image)
    return np.stack(found)


@pytest.mark.parametrize("size", [(11, 13), (40, 25), (1, 1), (3, 90)])
@pytest.mark.parametrize("crop", CROPS, ids=str)
def test_pixels_are_those_of_the_matrices(crop: ResizedCrop, size: tuple[int, int]) -> None:
    for channels in (1, 3, 4):
        images = batch(8, *size, channels)
        for draws in (draws_of(crop, 8, *size), None)[: 2 - isinstance(crop, RandomResizedCrop)]:
            expected = reference(images, draws, crop)
            found = resize(images, *find_taps(draws, crop, images)).double().numpy()
            # Half a level is the last rounding. Half of 2^-6 are the bits kept between the axes.
            assert np.abs(found - expected).max() <= 0.5 + 0.5 / 64 + 0.01
            for planar in (False, True):
                result = resize_on_cpu(images, draws, crop, planar)
                assert result.is_contiguous()
                host = result.permute(0, 2, 3, 1) if planar else result
                assert np.abs(host.double().numpy() - expected).max() <= 1.01


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [1, (1, 2), (2, 1), (7, 1), (8, 9)])
def test_tiny_windows_and_results_of_images_in_any_memory_order(size: int | tuple[int, int], channels: int) -> None:
    images = batch(8, 11, 13, channels)
    first = images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    columns = images.transpose(1, 2).contiguous().transpose(1, 2)
    for crop in (RandomResizedCrop(size), RandomResizedCrop(size, scale=(0.01, 0.03)), CenterCrop(size, resize=1)):
        draws = draws_of(crop, 8, 11, 13)
        expected = reference(images, draws, crop)
        for source in (images, first, columns):
            assert np.abs(resize_on_cpu(source, draws, crop, False).double().numpy() - expected).max() <= 1.01


def test_pixels_are_within_one_level_of_interpolate() -> None:
    for length, size, scale in ((256, 224, (0.08, 1.0)), (300, 64, (0.5, 1.0)), (40, 224, (0.3, 1.0))):
        crop = RandomResizedCrop(size, scale)
        images = batch(4, length, length)
        draws = draws_of(crop, 4, length, length)
        twin = resize(images, *find_taps(draws, crop, images))
        host = resize_on_cpu(images, draws, crop, False)
        for number in range(4):
            top, left, height, width = window_of(draws, number)
            part = images[number, top : top + height, left : left + width].permute(2, 0, 1)[None]
            whole = F.interpolate(part, size=(size, size), mode="bilinear", antialias=True)[0].permute(1, 2, 0)
            axes = [axis for axis, flip in enumerate((draws.vertical_flip, draws.flip)) if flip[number]]
            for result in (twin, host):
                differences = (result[number].int() - whole.flip(axes).int()).abs()
                assert differences.max() <= 1
                assert differences.double().mean() < 0.25


def test_the_center_is_that_of_resize_and_crop() -> None:
    """The formulas of torchvision's Resize(256, antialias=True) and CenterCrop(224)."""
    for height, width in ((256, 256), (375, 500), (150, 90)):
        images = batch(1, height, width)
        size = (int(256 * height / width), 256) if width <= height else (256, int(256 * width / height))
        whole = F.interpolate(images.permute(0, 3, 1, 2), size=size, mode="bilinear", antialias=True)
        top, left = (round((side - 224) / 2) for side in size)
        expected = whole[:, :, top : top + 224, left : left + 224].permute(0, 2, 3, 1)
        crop = CenterCrop(224, resize=256)
        for result in (resize(images, *find_taps(None, crop, images)), resize_on_cpu(images, None, crop, False)):
            assert (result.int() - expected.int()).abs().max() <= 1


def test_one_color_stays_that_color() -> None:
    for length, size in ((4000, 3), (3, 700), (256, 224), (97, 96)):
        for level in (0, 1, 127, 254, 255):
            images = torch.full((1, length, 2, 1), level, dtype=torch.uint8)
            crop = RandomResizedCrop((size, 2))
            taps = find_taps(None, crop, images)
            assert taps[0].shape[1] == 1 + max_taps(crop, length, 2)[0] == 1 + math.ceil(2 * max(length / size, 1))
            assert (resize(images, *taps) == level).all()


# Normalize.


def levels_of(norm: Normalize, result: torch.Tensor) -> torch.Tensor:
    """Undo the normalization: float64, (N, H, W, C), 0 to 255."""
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (norm.mean, norm.std))
    return (result.permute(0, 2, 3, 1).double() * std + mean) * 255


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("crop", CROPS, ids=str)
def test_normalize_crops_resizes_flips_and_erases(crop: ResizedCrop, layout: str) -> None:
    norm = Normalize.imagenet(crop=crop, layout=layout, flip=0.5, vertical_flip=0.5, erase=0.5, seed=4)
    images, key = batch(12, 31, 26), key_of(12)
    assert norm.keyed
    draws = norm.draw(images, key)
    result = norm(images, key)
    assert result.is_contiguous(memory_format=LAYOUTS[layout])
    assert result.shape[2:] == norm.output_size(31, 26) == crop.output_size
    boxes = erase_mask(draws, *crop.output_size)
    assert 0 < boxes.sum() < boxes.numel()
    assert (result.permute(0, 2, 3, 1)[boxes] == 0).all()
    found, expected = levels_of(norm, result), torch.from_numpy(reference(images, draws, crop))
    assert (found - expected).abs()[~boxes].max() <= 1.01
    # One sample alone, stored with channels first; draws made before; memory given.
    alone = norm(images[5:6].permute(0, 3, 1, 2), key_of(12, rows=key.rows[5:6]))
    assert torch.equal(alone, result[5:6])
    out = torch.empty_like(result)
    assert norm(images, draws=draws, out=out) is out
    assert torch.equal(out, result)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.8 cannot trace resized crops")
def test_a_compiled_normalize_resizes() -> None:
    color = ColorJitter(0.4, 0.4, 0.4, 0.1, 0.2)
    torch._dynamo.reset()
    crop = CROPS[0]
    norm = Normalize.imagenet(crop=crop, flip=0.5, erase=0.5, color=color)
    images, key = batch(4, 31, 26), key_of(4)
    draws = norm.draw(images, key)
    levels = apply_color(resize(images, *find_taps(draws, crop, images)), draws.color)
    expected = scale_whole(levels, norm._constant_tensor(images.device, 3), norm.dtype)
    expected = expected.masked_fill(erase_mask(draws, *crop.output_size)[..., None], 0.0).permute(0, 3, 1, 2)
    compiled = torch.compile(lambda images, key: norm(images, key), fullgraph=True, backend="eager")
    assert torch.equal(compiled(images, key), expected)
    # Outside of the compiler `interpolate` resizes, and a color may double the difference of a level.
    assert (levels_of(norm, norm(images, key)) - levels_of(norm, expected)).abs().max() < 4.5


def test_a_center_crop_needs_no_key() -> None:
    norm = Normalize.imagenet(crop=CenterCrop(224, resize=256))
    assert not norm.keyed
    images = batch(2, 300, 320)
    expected = resize_on_cpu(images, None, CenterCrop(224, resize=256), False)
    assert torch.equal(norm(images), Normalize.imagenet()(expected))
    draws = norm.draw(images)
    assert window_of(draws, 1) == (0, 0, 300, 320)
    assert torch.equal(norm(images, draws=draws), norm(images))
    with pytest.raises(OptionsError):
        norm(batch(1, 2, 20_000))


@needs_gpu
def test_pixels_on_a_gpu_are_the_same() -> None:
    for crop in CROPS:
        images, draws = batch(9, 40, 30), draws_of(crop, 9, 40, 30)
        there = AugmentationDraws(draws.geometry.cuda())
        found = resize(images.cuda(), *find_taps(there, crop, images.cuda()))
        assert torch.equal(found.cpu(), resize(images, *find_taps(draws, crop, images)))
