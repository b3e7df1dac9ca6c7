"""Draws of augmentation: a function of the sample's key, the same everywhere, and evenly spread."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from h5pack.device.augment import DRAWS, TRIES, Augmentation, AugmentationDraws, draw_augmentation, random_words
from h5pack.device.batch import BatchKey
from h5pack.errors import OptionsError
from h5pack.order.permutation import derive_key
from tests.device.feeds import needs_gpu

ALL = Augmentation(flip=0.5, crop=4, erase=0.5)
FIELDS = tuple(AugmentationDraws.__dataclass_fields__)


def stacked(draws: AugmentationDraws) -> torch.Tensor:
    """int32, (N, 7)."""
    return torch.stack([getattr(draws, name) for name in FIELDS], 1)


def words_of(seed: int, epoch: int, row: int, repeat: int) -> list[int]:
    return [derive_key(seed, epoch, row, DRAWS * repeat + number) for number in range(4 + 4 * TRIES)]


def slow_draw(words: list[int], options: Augmentation, height: int, width: int) -> tuple[int, ...]:
    """The draws of one sample out of its 64-bit words; the box as torchvision's RandomErasing chooses it."""

    def below(word: int, bound: int) -> int:
        return ((word >> 33) * bound) >> 31

    flip = int(words[0] >> 32 < options.flip * 2**32)
    top, left = (below(word, 2 * options.crop + 1) - options.crop for word in words[1:3])
    if words[3] >> 32 < options.erase * 2**32:
        for first in range(4, len(words), 4):
            share, ratio = ((below(word, 4096) + 0.5) / 4096 for word in words[first : first + 2])
            area = height * width * (options.erase_scale[0] + share * np.diff(options.erase_scale)[0])
            logs = [math.log(bound) for bound in options.erase_ratio]
            aspect = math.exp(logs[0] + ratio * (logs[1] - logs[0]))
            box_height, box_width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if box_height < height and box_width < width:
                box_top = below(words[first + 2], height - box_height + 1)
                box_left = below(words[first + 3], width - box_width + 1)
                return flip, top, left, box_top, box_left, box_height, box_width
    return flip, top, left, 0, 0, 0, 0


def test_the_words_are_those_of_the_key() -> None:
    rows = [0, 1, 7, 2**31, 2**40 + 3]
    found = random_words(BatchKey(torch.tensor(rows), 3, 2), 11, 4 + 4 * TRIES)
    expected = np.array([words_of(11, 3, row, 2) for row in rows], np.uint64).view(np.int64)
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("size", [(32, 32), (218, 178), (5, 64)])
def test_draws_equal_the_slow_twin(size: tuple[int, int]) -> None:
    rows = torch.arange(100) * 37
    found = stacked(draw_augmentation(BatchKey(rows, 5, 1), 42, ALL, *size)).tolist()
    expected = [slow_draw(words_of(42, 5, row, 1), ALL, *size) for row in rows.tolist()]
    assert [tuple(line[:3]) for line in found] == [line[:3] for line in expected]
    # Sides are computed in steps of 2^-20, so one that is that close to a half may round the other way.
    assert sum(tuple(line) == other for line, other in zip(found, expected, strict=True)) >= 99
    assert sum(line[5] > 0 for line in found) > 30


def test_repeats_may_differ_within_a_batch() -> None:
    rows, repeats = torch.tensor([3, 3, 4, 3]), torch.tensor([0, 1, 0, 2])
    found = stacked(draw_augmentation(BatchKey(rows, 2, repeats), 7, ALL, 64, 48))
    for row, repeat, line in zip(rows, repeats.tolist(), found, strict=True):
        assert torch.equal(stacked(draw_augmentation(BatchKey(row[None], 2, repeat), 7, ALL, 64, 48))[0], line)


def test_what_is_off_is_never_drawn_and_what_is_sure_always() -> None:
    key = BatchKey(torch.arange(1000), 0, 0)
    assert not stacked(draw_augmentation(key, 0, Augmentation(), 16, 16)).any()
    sure = draw_augmentation(key, 0, Augmentation(flip=1.0, erase=1.0), 64, 64)
    assert all(map(torch.all, (sure.flip == 1, sure.box_height > 0, sure.box_width > 0)))


def test_draws_are_spread_evenly() -> None:
    count = 20_000
    options = Augmentation(flip=0.25, crop=2, erase=0.4)
    found = draw_augmentation(BatchKey(torch.arange(count), 0, 0), 0, options, 100, 100)
    # Bounds are at 5 standard deviations.
    assert abs(found.flip.float().mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / count)
    assert abs((found.box_height > 0).float().mean() - 0.4) < 5 * math.sqrt(0.4 * 0.6 / count)
    places = Counter(zip(found.top.tolist(), found.left.tolist(), strict=True))
    assert set(places) == {(top, left) for top in range(-2, 3) for left in range(-2, 3)}
    assert all(abs(times - count / 25) < 5 * math.sqrt(count / 25) for times in places.values())
    boxed = found.box_height > 0
    area = (found.box_height * found.box_width)[boxed].double() / 100**2
    assert 0.015 < area.min() < 0.025
    assert 0.32 < area.max() < 0.345
    assert abs(area.mean() - 0.175) < 0.005
    ratio = (found.box_height / found.box_width)[boxed].double().log()
    assert abs(ratio.mean() - math.log(0.3 * 3.3) / 2) < 0.03


def test_boxes_lie_in_the_image() -> None:
    for height, width in ((1, 1), (2, 2), (1, 40), (3, 200), (30, 31)):
        options = Augmentation(erase=1.0, erase_scale=(0.01, 1.0))
        found = draw_augmentation(BatchKey(torch.arange(500), 0, 0), 0, options, height, width)
        assert stacked(found).min() >= 0
        assert (found.box_top + found.box_height <= height).all()
        assert (found.box_left + found.box_width <= width).all()
        # As in torchvision, no box is as high or as wide as the image.
        assert found.box_height.max() < max(height, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("flip", -0.1), ("flip", float("nan")), ("erase", 1.5), ("crop", -1), ("crop", 1.5)),
        *(("erase_scale", value) for value in ((0.5, 0.2), (0.0, 0.2), (0.1,))),
        ("erase_ratio", (0.0, 1.0)),
    ],
)
def test_invalid_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionsError) as caught:
        Augmentation(**{name: value})
    assert caught.value.parameters == (name,)


@needs_gpu
def test_draws_on_a_gpu_are_the_same() -> None:
    rows = torch.arange(5000) * 991
    expected = stacked(draw_augmentation(BatchKey(rows, 3, 1), 9, ALL, 218, 178))
    assert torch.equal(stacked(draw_augmentation(BatchKey(rows.cuda(), 3, 1), 9, ALL, 218, 178)).cpu(), expected)
