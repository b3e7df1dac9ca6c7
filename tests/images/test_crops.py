"""Options of crops, and the windows that are drawn from them as torchvision draws them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from h5pack.data.draws import BatchKey, crop_windows
from h5pack.errors import OptionsError
from h5pack.images.crops import CenterCrop, RandomCrop, RandomResizedCrop, check_image_size
from h5pack.order.permutation import derive_key
from tests.device.feeds import needs_gpu

Ints = npt.NDArray[np.int64]


def test_a_size_is_a_number_or_a_pair() -> None:
    for size in (224, (224, 224), [224, 224], np.int64(224)):
        assert RandomCrop(size) == RandomCrop(224)
        assert hash(CenterCrop(size)) == hash(CenterCrop(224))
        assert RandomResizedCrop(size).output_size == (224, 224)
    assert RandomCrop((20, 30), padding=4).output_size == (20, 30)
    assert repr(RandomResizedCrop(8, (0.5, 1))).endswith(
        "size=(8, 8), scale=(0.5, 1.0), ratio=(0.75, 1.3333333333333333))"
    )


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *((RandomCrop, "size", value) for value in (0, -1, 2.5, True, "64", (3,), (3, 4, 5), (0, 3), 20_000, None)),
        *((RandomCrop, "padding", value) for value in (-1, 1.5, None)),
        *((CenterCrop, "resize", value) for value in (0, 1.5, (8, 8), 20_000)),
        *((RandomResizedCrop, "scale", value) for value in ((0.0, 1.0), (0.5, 0.2), (0.1, 1.1), (0.1,), 0.5)),
        *((RandomResizedCrop, "ratio", value) for value in ((0, 1), (2, 1), (1, 1e9), (float("nan"), 1), "12", None)),
    ],
)
def test_invalid_options_are_refused(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(OptionsError) as caught:
        kind(**{"size": 8, name: value})
    assert [parameter.partition("=")[0] for parameter in caught.value.parameters] == [name]


def test_a_center_crop_is_where_torchvision_has_it() -> None:
    # By the formulas of torchvision's Resize(resize) and CenterCrop(size).
    assert CenterCrop(224, resize=256).resized_size(500, 375) == (341, 256)
    assert CenterCrop(224, resize=256).resized_size(375, 500) == (256, 341)
    assert CenterCrop(224, resize=256).resized_size(256, 256) == (256, 256)
    # Halves round to the even number, as Python rounds.
    assert CenterCrop(224, resize=256).window(500, 375) == (58, 16)
    assert CenterCrop(4).window(5, 7) == (0, 2)
    assert CenterCrop((6, 7)).window(6, 4) == (0, -1)


def test_images_that_cannot_be_resized_are_refused() -> None:
    check_image_size(CenterCrop(224, resize=256), 4000, 6000)
    center = CenterCrop(224, resize=256)
    for crop, size in ((center, (2, 10_000)), (center, (10_000, 2)), (RandomResizedCrop(8), (0, 5))):
        with pytest.raises(OptionsError) as caught:
            check_image_size(crop, *size)
        assert caught.value.parameters == ("crop",)


def test_the_window_where_none_fits_has_the_nearest_ratio() -> None:
    crop = RandomResizedCrop(8)
    assert crop.fallback(100, 100) == (0, 0, 100, 100)
    assert crop.fallback(100, 30) == (30, 0, 40, 30)
    assert crop.fallback(30, 100) == (0, 30, 30, 40)
    assert crop.fallback(30, 41) == (0, 0, 30, 40)
    assert crop.fallback(41, 30) == (0, 0, 40, 30)
    assert crop.fallback(1, 1) == (0, 0, 1, 1)
    assert RandomResizedCrop(8, ratio=(4, 5)).fallback(50, 1) == (24, 0, 1, 1)


# Draws.


def key_of(count: int, **parts: Any) -> BatchKey:
    return BatchKey(**{"rows": torch.arange(count) * 37 + 5, "epoch": 3, "repeats": 1, **parts})


def torchvision_windows(crop: RandomResizedCrop, height: int, width: int, count: int) -> Ints:
    """Top, left, height and width, int64 (count, 4), by the formula of torchvision's RandomResizedCrop.get_params."""
    random = np.random.default_rng(7)
    # If none of ten windows fits, the middle of the image, as large as the ratios allow.
    window = [height, width]
    if width / height < crop.ratio[0]:
        window[0] = round(width / crop.ratio[0])
    elif width / height > crop.ratio[1]:
        window[1] = round(height * crop.ratio[1])
    found = np.tile([(height - window[0]) // 2, (width - window[1]) // 2, *window], (count, 1))
    missing = np.ones(count, bool)
    for _ in range(10):
        area = height * width * random.uniform(*crop.scale, count)
        ratio = np.exp(random.uniform(math.log(crop.ratio[0]), math.log(crop.ratio[1]), count))
        widths, heights = np.rint(np.sqrt(area * ratio)).astype(int), np.rint(np.sqrt(area / ratio)).astype(int)
        fits = missing & (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
        tops = np.floor(random.random(count) * (height - heights + 1)).astype(int)
        lefts = np.floor(random.random(count) * (width - widths + 1)).astype(int)
        found[fits] = np.stack((tops, lefts, heights, widths), 1)[fits]
        missing &= ~fits
    return found


def largest_distance(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
    """The statistic of the two-sample test of Kolmogorov and Smirnov: how far the distribution functions differ."""
    values = np.unique(np.concatenate((first, second)))
    shares = [np.searchsorted(np.sort(part), values, side="right") / len(part) for part in (first, second)]
    return float(np.abs(shares[0] - shares[1]).max())


@pytest.mark.parametrize(
    ("crop", "size"),
    [
        (RandomResizedCrop(224), (375, 500)),
        (RandomResizedCrop(224), (20, 100)),
        (RandomResizedCrop(96, scale=(0.3, 0.9), ratio=(0.25, 3)), (80, 60)),
    ],
)
def test_windows_are_distributed_as_those_of_torchvision(crop: RandomResizedCrop, size: tuple[int, int]) -> None:
    count, (height, width) = 40_000, size
    key = BatchKey(torch.arange(count), 0)
    found = torch.stack(crop_windows(key, 0, crop, height, width), 1).numpy()
    expected = torchvision_windows(crop, height, width, count)
    assert (found[:, 2:] > 0).all()
    assert (found[:, :2] >= 0).all()
    assert (found[:, :2] + found[:, 2:] <= size).all()
    for of in (
        lambda windows: windows[:, 2] * windows[:, 3],
        lambda windows: np.log(windows[:, 3] / windows[:, 2]),
        lambda windows: windows[:, 0],
        lambda windows: windows[:, 1],
        # Where the window lies in the room that it has: uniform, whatever its size.
        lambda windows: (windows[:, 0] + 0.5) / (height - windows[:, 2] + 1),
        lambda windows: (windows[:, 1] + 0.5) / (width - windows[:, 3] + 1),
        lambda windows: windows[:, 0] - windows[:, 1] + windows[:, 2],
    ):
        # Exceeded by equal distributions once in 10,000 times.
        assert largest_distance(of(found), of(expected)) < math.sqrt(-math.log(1e-4 / 2) / count)
    missed = [(windows == crop.fallback(height, width)).all(1).mean() for windows in (found, expected)]
    assert abs(missed[0] - missed[1]) <= 5 * math.sqrt(2 * missed[1] * (1 - missed[1]) / count)
    assert (missed[1] > 0.05) == (size == (20, 100)), "one of the sizes has windows that often do not fit"


def test_windows_equal_the_slow_twin() -> None:
    crop, (height, width), rows = RandomResizedCrop(8, (0.1, 1), (0.5, 3)), (61, 83), [0, 7, 2**40 + 3, *range(9, 99)]
    found = torch.stack(crop_windows(BatchKey(torch.tensor(rows), 4, 2, view=3), -5, crop, height, width), 1)
    expected = []
    for row in rows:
        words = [derive_key(-5, 4, 1, 3, row, 64 * 2 + number) for number in range(40)]
        window = crop.fallback(height, width)
        for area, ratio, top, left in (words[first : first + 4] for first in range(36, -1, -4)):
            share, power = (((word >> 33 << 12 >> 31) + 0.5) / 4096 for word in (area, ratio))
            pixels, aspect = height * width * (0.1 + 0.9 * share), 0.5 * 6**power
            columns, lines = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
            if columns <= width and lines <= height:
                window = (
                    (top >> 33) * (height - lines + 1) >> 31,
                    (left >> 33) * (width - columns + 1) >> 31,
                    lines,
                    columns,
                )
        expected.append(window)
    assert found.tolist() == list(map(list, expected))


def test_windows_stay_the_same_in_every_release() -> None:
    found = torch.stack(crop_windows(key_of(4), 1, RandomResizedCrop(224), 256, 320), 1)
    assert found.tolist() == [[81, 78, 151, 163], [35, 75, 148, 172], [74, 148, 151, 157], [2, 1, 254, 286]]


def test_windows_of_views_epochs_and_repeats_differ() -> None:
    keys = [key_of(50), key_of(50, view=1), key_of(50, epoch=4), key_of(50, repeats=0)]
    found = [torch.stack(crop_windows(key, 1, RandomResizedCrop(8), 300, 300), 1) for key in keys]
    for number, windows in enumerate(found):
        for other in found[:number]:
            assert (windows == other).all(1).sum() < 3


@needs_gpu
def test_windows_on_a_gpu_are_the_same() -> None:
    rows, crop = torch.arange(5000) * 991, RandomResizedCrop(8)
    found = [torch.stack(crop_windows(BatchKey(part, 3, 1), 9, crop, 218, 178)).cpu() for part in (rows, rows.cuda())]
    assert torch.equal(*found)
