"""Draws of augmentation: a function of the sample's key, the same everywhere, and evenly spread."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from h5pack.data.draws import DRAWS, TRIES, BatchKey, random_words
from h5pack.device import augment
from h5pack.device.augment import DRAW_ROWS, Augmentation, AugmentationDraws, ColorJitter, draw_augmentation
from h5pack.device.operations import apply_color, apply_color_on_cpu
from h5pack.errors import OptionsError
from h5pack.images.crops import CenterCrop, RandomCrop
from h5pack.order.permutation import derive_key

ALL = Augmentation(flip=0.5, crop=4, erase=0.5, vertical_flip=0.3)
COLORS = ColorJitter(brightness=0.4, contrast=0.5, saturation=0.6, hue=0.2, grayscale=0.3)


def stacked(draws: AugmentationDraws) -> torch.Tensor:
    """int32, (N, 8): all but the size of the window."""
    return torch.stack([getattr(draws, name) for name in DRAW_ROWS if not name.startswith("crop")], 1)


def words_of(seed: int, epoch: int, row: int, repeat: int) -> list[int]:
    return [derive_key(seed, epoch, row, DRAWS * repeat + number) for number in range(DRAWS)]


def below(word: int, bound: int) -> int:
    return ((word >> 33) * bound) >> 31


def slow_draw(words: list[int], options: Augmentation, height: int, width: int) -> tuple[int, ...]:
    """The draws of one sample out of its 64-bit words; the box as torchvision's RandomErasing chooses it."""
    padding = options.crop.padding if isinstance(options.crop, RandomCrop) else int(options.crop)
    size = options.crop.output_size if isinstance(options.crop, RandomCrop) else (height, width)
    top = below(words[augment.TOP], height + 2 * padding - size[0] + 1) - padding
    left = below(words[augment.LEFT], width + 2 * padding - size[1] + 1) - padding
    height, width = size
    chances = ((augment.FLIP, options.flip), (augment.VERTICAL_FLIP, options.vertical_flip))
    flip = (*(int(words[index] >> 32 < p * 2**32) for index, p in chances), top, left)
    if words[augment.ERASE] >> 32 < options.erase * 2**32:
        for first in range(augment.BOX, augment.BOX + 4 * TRIES, 4):
            share, ratio = ((below(word, 4096) + 0.5) / 4096 for word in words[first : first + 2])
            area = height * width * (options.erase_scale[0] + share * np.diff(options.erase_scale)[0])
            logs = [math.log(bound) for bound in options.erase_ratio]
            aspect = math.exp(logs[0] + ratio * (logs[1] - logs[0]))
            box_height, box_width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if box_height < height and box_width < width:
                box_top = below(words[first + 2], height - box_height + 1)
                box_left = below(words[first + 3], width - box_width + 1)
                return (*flip, box_top, box_left, box_height, box_width)
    return (*flip, 0, 0, 0, 0)


def test_the_words_are_those_of_the_key() -> None:
    rows = [0, 1, 7, 2**31, 2**40 + 3]
    found = random_words(BatchKey(torch.tensor(rows), 3, 2), 11, DRAWS)
    expected = np.array([words_of(11, 3, row, 2) for row in rows], np.uint64).view(np.int64)
    np.testing.assert_array_equal(found.numpy(), expected)


def test_which_word_draws_what_never_changes() -> None:
    words = (augment.FLIP, augment.TOP, augment.LEFT, augment.ERASE, augment.BOX, augment.VERTICAL_FLIP)
    assert words == (0, 1, 2, 3, 4, 44)


def test_views_and_streams_have_words_of_their_own() -> None:
    rows, repeats = torch.tensor([5, 2**40 + 3]), torch.tensor([0, 3])
    found = []
    for view, stream in ((0, 0), (1, 0), (0, 1), (2, 3), (3, 2)):
        words = random_words(BatchKey(rows, 4, repeats, view), -7, 5, stream)
        parts = (stream, view) if stream or view else ()
        expected = [
            [derive_key(-7, 4, *parts, row, DRAWS * repeat + number) for number in range(5)]
            for row, repeat in zip(rows.tolist(), repeats.tolist(), strict=True)
        ]
        np.testing.assert_array_equal(words.numpy(), np.array(expected, np.uint64).view(np.int64))
        found += words.flatten().tolist()
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("size", [(32, 32), (218, 178), (5, 64)])
def test_draws_equal_the_slow_twin(size: tuple[int, int]) -> None:
    rows = torch.arange(100) * 37
    for options in (ALL, replace(ALL, crop=RandomCrop((5, 30), padding=2), vertical_flip=0.0)):
        found = stacked(draw_augmentation(BatchKey(rows, 5, 1), 42, options, *size)).tolist()
        expected = [slow_draw(words_of(42, 5, row, 1), options, *size) for row in rows.tolist()]
        assert [tuple(line[:4]) for line in found] == [line[:4] for line in expected]
        # Sides are computed in steps of 2^-20, so one that is that close to a half may round the other way.
        assert sum(tuple(line) == other for line, other in zip(found, expected, strict=True)) >= 99
        assert sum(line[6] > 0 for line in found) > 20


def slow_matrix(words: list[int], jitter: ColorJitter, level: float) -> npt.NDArray[np.float64]:
    """The 3 x 4 matrix of one sample in float64, by the formulas of `ColorJitter`, with the matrix of colorsys."""

    def factor(word: int, spread: float) -> float:
        low, high = round((1 - spread) * 65536), round((1 + spread) * 65536)
        return (low + below(word, high - low + 1)) / 65536

    b, c, s = (
        factor(word, spread)
        for word, spread in zip(words, (jitter.brightness, jitter.contrast, jitter.saturation), strict=False)
    )
    turns = round(jitter.hue * 4096)
    angle = 2 * math.pi * (below(words[3], 2 * turns + 1) - turns) / 4096
    if words[4] >> 32 < jitter.grayscale * 2**32:
        s = 0
    gray = np.array([0.299, 0.587, 0.114])
    red, _, blue = np.eye(3)
    yiq = np.stack([gray, 0.74 * (red - gray) - 0.27 * (blue - gray), 0.48 * (red - gray) + 0.41 * (blue - gray)])
    cosine, sine = math.cos(angle), math.sin(angle)
    turned = np.linalg.inv(yiq) @ np.array([[0, 0, 0], [0, cosine, -sine], [0, sine, cosine]]) @ yiq
    linear = b * c * (np.ones((3, 1)) * gray + s * turned)
    return np.hstack([linear, np.full((3, 1), b * (1 - c) * level)])


def test_color_matrices_follow_the_formulas() -> None:
    rows = torch.arange(200) * 13
    for jitter in (COLORS, ColorJitter(hue=0.5), ColorJitter(1, 1, 1, 0.5, 0)):
        options = Augmentation(color=jitter, level=100.25)
        found = draw_augmentation(BatchKey(rows, 5, 1, 2), 42, options, 8, 8).color
        assert (found.shape, found.dtype) == ((12, 200), torch.int32)
        for row, matrix in zip(rows.tolist(), found.T.numpy() / 65536, strict=True):
            words = [derive_key(42, 5, 2, 2, row, DRAWS + number) for number in range(5)]
            # Products are rounded to 2^-16, and a brightness of up to 2 multiplies the contrast's rounding.
            np.testing.assert_allclose(matrix.reshape(3, 4), slow_matrix(words, jitter, 100.25), atol=20 / 65536)
    plain = draw_augmentation(BatchKey(rows, 0), 0, Augmentation(color=ColorJitter()), 8, 8).color
    assert torch.equal(plain.T, (torch.eye(3, 4, dtype=torch.int32) << 16).flatten().expand(200, 12))


def test_draws_of_one_kind_do_not_change_those_of_another() -> None:
    key = BatchKey(torch.arange(50) * 7, 3, 1)
    alone = draw_augmentation(key, 5, Augmentation(flip=0.5), 32, 32).flip
    both = Augmentation(flip=0.5, crop=RandomCrop(20), erase=0.5, vertical_flip=0.5, color=COLORS)
    assert torch.equal(draw_augmentation(key, 5, both, 32, 32).flip, alone)


def test_repeats_may_differ_within_a_batch() -> None:
    rows, repeats = torch.tensor([3, 3, 4, 3]), torch.tensor([0, 1, 0, 2])
    found = stacked(draw_augmentation(BatchKey(rows, 2, repeats), 7, ALL, 64, 48))
    for row, repeat, line in zip(rows, repeats.tolist(), found, strict=True):
        assert torch.equal(stacked(draw_augmentation(BatchKey(row[None], 2, repeat), 7, ALL, 64, 48))[0], line)


def test_what_is_off_is_never_drawn_and_what_is_sure_always() -> None:
    key = BatchKey(torch.arange(1000), 0, 0)
    assert not stacked(draw_augmentation(key, 0, Augmentation(), 16, 16)).any()
    middle = draw_augmentation(key, 0, Augmentation(crop=CenterCrop((10, 20))), 16, 17)
    assert [set(part.tolist()) for part in (middle.top, middle.left)] == [{3}, {-1}]
    sure = draw_augmentation(key, 0, Augmentation(flip=1.0, erase=1.0), 64, 64)
    assert all(map(torch.all, (sure.flip == 1, sure.box_height > 0, sure.box_width > 0)))


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
    ("kind", "name", "values"),
    [
        (Augmentation, "flip", (-0.1, float("nan"), "often")),
        (Augmentation, "vertical_flip", (2,)),
        (Augmentation, "erase", (1.5, None, True)),
        (Augmentation, "crop", (-1, 1.5, 4.0, True, "8", (28, 28), np.ones(2))),
        (Augmentation, "erase_scale", ((0.5, 0.2), (0.0, 0.2), (0.1,), "01", 0.3)),
        (Augmentation, "erase_ratio", ((0.0, 1.0), (None, 1))),
        (Augmentation, "color", (0.5,)),
        (ColorJitter, "brightness", (1.5,)),
        (ColorJitter, "contrast", ((0.8, 1.2),)),
        (ColorJitter, "hue", (0.6,)),
        (ColorJitter, "grayscale", (-0.1,)),
    ],
)
def test_invalid_options_are_refused(kind: Any, name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(OptionsError) as caught:
            kind(**{name: value})
        assert [parameter.partition("=")[0] for parameter in caught.value.parameters] == [name]
        assert name != "crop" or repr(value) in str(caught.value)


def test_windows_larger_than_the_image_are_refused() -> None:
    for padding, fits in ((1, False), (2, True)):
        options = Augmentation(crop=RandomCrop((36, 10), padding))
        if fits:
            assert options.windows(32, 32) == ((-2, 1), (-2, 27))
        else:
            with pytest.raises(OptionsError) as caught:
                options.windows(32, 32)
            assert caught.value.parameters == ("crop",)


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("shape", [(0, 32, 32), (130, 32, 32), (3, 300, 250)])
def test_colors_change_on_a_cpu_as_on_any_device(shape: tuple[int, int, int], planar: bool) -> None:
    random = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (*shape, 3), dtype=torch.uint8, generator=random)
    if planar:
        pixels = pixels.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    color = torch.randint(-40_000, 70_000, (12, len(pixels)), dtype=torch.int32, generator=random)
    found = apply_color_on_cpu(pixels, color)
    assert torch.equal(found, apply_color(pixels, color))
    assert found.stride() == pixels.stride()
