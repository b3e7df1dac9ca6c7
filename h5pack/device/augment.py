"""Random flips, crops, colors and erased boxes (random erasing), drawn separately for each sample of a batch.

The random numbers are those of `h5pack.data.draws`, which depend only on the seed and on each sample's `BatchKey`. So
samples with equal keys get the same augmentation on every device, for every batch size and number of ranks, and after a
resume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from h5pack.data.draws import (
    STEPS,
    TRIES,
    BatchKey,
    below,
    cached_table,
    chance,
    crop_windows,
    first_that_fits,
    random_words,
)
from h5pack.errors import OptionsError
from h5pack.images.crops import (
    CenterCrop,
    RandomCrop,
    RandomResizedCrop,
    ResizedCrop,
    check_image_size,
    checked_range,
)
from h5pack.system.parameters import invalid, real_number, whole_number

FLIP, TOP, LEFT, ERASE, BOX, VERTICAL_FLIP = 0, 1, 2, 3, 4, 44
"""Indices of a sample's random words (`random_words`, stream 0). BOX is the first of 40 words: `TRIES` (10) attempts to
draw a box that fits use four words each."""
COLOR_STREAM = 2
GRAY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in gray, as in Pillow and ITU-R BT.601."""
_QUARTER_TURN = (11225, 21145, -32370, -21774, 2601, 19173, 82681, -68855, -13826)
"""The 3 x 3 matrix that removes a color's gray and rotates the rest by a quarter turn, from axis I to axis Q.

It is inverse(T) R T, where R maps (Y, I, Q) to (0, -Q, I), and T maps a color to YIQ: Y by the weights of BT.601, and
I = 0.74 (red - Y) - 0.27 (blue - Y), Q = 0.48 (red - Y) + 0.41 (blue - Y) as in Python's colorsys (FCC NTSC 1953). The
entries are in units of 2^-16, rounded such that each row adds up to 0.
"""


@dataclass(frozen=True)
class ColorJitter:
    """Random brightness, contrast, saturation and hue, like torchvision's ``ColorJitter`` and ``RandomGrayscale``.

    All changes of a sample are combined into one matrix, so each pixel is rounded and clamped to 0..255 only once. The
    factors b, c and s (brightness, contrast and saturation) are drawn uniformly from 1 - x to 1 + x, where x is the
    parameter of the same name. The angle h is drawn uniformly from -hue to hue, where 1 is a full turn. A pixel
    p = (red, green, blue) becomes::

        gray   = 0.299 red + 0.587 green + 0.114 blue
        p      = gray + s * ((p - gray) rotated by h in the plane of I and Q of the YIQ color space)
        result = b * (c * p + (1 - c) * level)

    `level` is the gray of the mean color, 255 times the option `mean` of `Normalize`. Without `mean`, it is 127.5.

    Parameters
    ----------
    brightness, contrast, saturation : float
        The largest difference between the factor and 1, from 0 to 1.
    hue : float
        The largest rotation, as a fraction of a full turn, from 0 to 0.5.
    grayscale : float
        The probability that s is 0, which makes all channels equal.

    Raises
    ------
    OptionsError
        If a value is not a number, or is out of range.

    Notes
    -----
    torchvision applies the four changes in random order, and clamps and rounds after each. Its `level` is the mean
    gray of each image. It rotates the hue in HSV, which is not linear.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    grayscale: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            object.__setattr__(self, name, _checked_share(name, value, 0.5 if name == "hue" else 1))


def _checked_share(name: str, value: Any, largest: float) -> float:
    """Return the value of an option as a float; raise OptionsError if it is not a number from 0 to `largest`."""
    number = real_number(value)
    if not 0 <= number <= largest:  # True for NaN, too: `real_number` returns NaN if `value` is not a number.
        raise invalid(name, value, f"give a number from 0 to {largest}")
    return number


class Changes(NamedTuple):
    """Which kinds of changes the draws of a batch may make to its images, besides the colors. Without draws, none."""

    moves: bool = False  # Images are flipped or cropped.
    pads: bool = False  # The crop window may exceed the image.
    erases: bool = False
    resize: ResizedCrop | None = None  # The crop if it resizes its windows, else None.


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """The augmentation options of `Normalize`. Raises OptionsError for invalid values."""

    flip: float = 0.0  # Probability of a horizontal flip.
    # An int: pixels of padding, added on each side before a window of the image's size is cut out.
    crop: int | RandomCrop | ResizedCrop = 0
    erase: float = 0.0  # Probability that a box is erased.
    erase_scale: tuple[float, float] = (0.02, 0.33)  # Range of (box area) / (result area), drawn uniformly.
    erase_ratio: tuple[float, float] = (0.3, 3.3)  # Range of the box's height / width, drawn log-uniformly.
    vertical_flip: float = 0.0  # Probability of a vertical flip.
    color: ColorJitter | None = None
    level: float = 127.5  # The gray level that a change of contrast leaves unchanged.

    def __post_init__(self) -> None:
        for name in ("flip", "vertical_flip", "erase"):
            object.__setattr__(self, name, _checked_share(name, getattr(self, name), 1))
        # Make the ranges tuples of floats, which are hashable, because keys of cached tables contain the ranges.
        for name, low, high in (("erase_scale", 0.0, 1.0), ("erase_ratio", 1 / 1024, 1024.0)):
            object.__setattr__(self, name, checked_range(name, getattr(self, name), low, high))
        if not isinstance(self.crop, (RandomCrop, CenterCrop, RandomResizedCrop)):
            try:
                padding = whole_number("crop", self.crop, 0, (1 << 20) - 1)
            except OptionsError:
                advice = "give the padding in pixels (an integer from 0 to 1048575) or a crop such as RandomCrop(224)"
                raise invalid("crop", self.crop, advice) from None
            object.__setattr__(self, "crop", padding)
        if self.color is not None and not isinstance(self.color, ColorJitter):
            raise invalid("color", self.color, "give ColorJitter(...)")

    @property
    def is_random(self) -> bool:
        """True if a random change is enabled: a random crop, a flip, a color jitter or erasing."""
        crops = self.crop != 0 and not isinstance(self.crop, CenterCrop)
        return crops or max(self.flip, self.vertical_flip, self.erase) > 0 or self.color is not None

    @property
    def resize(self) -> ResizedCrop | None:
        """`crop` if it resizes (`RandomResizedCrop`, or `CenterCrop` with `resize`), else None."""
        if isinstance(self.crop, CenterCrop):
            return None if self.crop.resize is None else self.crop
        return self.crop if isinstance(self.crop, RandomResizedCrop) else None

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of the result for images of this size, in pixels.

        Raises OptionsError if images of this size cannot be resized.
        """
        if self.resize is not None:
            check_image_size(self.resize, height, width)
        return (height, width) if isinstance(self.crop, int) else self.crop.output_size

    def windows(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (smallest first row, number of possible first rows) of the crop window, and the same for its columns.

        For a `RandomResizedCrop`, whose windows `crop_windows` draws, the results are (0, 1) and have no meaning.
        Raises OptionsError if the window of a `RandomCrop` does not fit in an image of this size after padding.
        """
        if isinstance(self.crop, RandomResizedCrop) or self.resize is not None:
            # If a CenterCrop resizes, its window is the whole image.
            return (0, 1), (0, 1)
        if isinstance(self.crop, CenterCrop):
            top, left = self.crop.window(height, width)
            return (top, 1), (left, 1)
        padding = self.crop.padding if isinstance(self.crop, RandomCrop) else int(self.crop)
        sizes = zip((height, width), self.output_size(height, width), strict=True)
        rows, columns = (size + 2 * padding - window + 1 for size, window in sizes)
        if min(rows, columns) < 1:
            raise OptionsError(
                f"images of {height} x {width} pixels are too small for {self.crop}; give a smaller size or more "
                "padding",
                parameters=("crop",),
            )
        return (-padding, rows), (-padding, columns)

    def window_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the crop window's height and width, in pixels of the image.

        The windows of a `RandomResizedCrop` have no fixed size. For it, return the image's size.
        """
        return self.output_size(height, width) if self.resize is None else (height, width)

    def changes(self, height: int, width: int) -> Changes:
        """Return which kinds of changes may be made to images of this size, in pixels."""
        moves = self.crop != 0 or max(self.flip, self.vertical_flip) > 0
        axes = zip(self.windows(height, width), self.output_size(height, width), (height, width), strict=True)
        pads = any(first < 0 or first + count - 1 + window > size for (first, count), window, size in axes)
        return Changes(moves=moves, pads=pads, erases=self.erase > 0, resize=self.resize)


DRAW_ROWS = (
    *("flip", "vertical_flip", "top", "left", "box_top", "box_left", "box_height", "box_width"),
    *("crop_height", "crop_width"),
)
"""The names of the rows of `AugmentationDraws.geometry`."""


class _Row:
    """A read-only attribute: a row of `AugmentationDraws.geometry`."""

    def __init__(self, name: str) -> None:
        self._number = DRAW_ROWS.index(name)

    def __get__(self, draws: AugmentationDraws | None, owner: type) -> torch.Tensor:
        if draws is None:
            raise AttributeError("only an object has this attribute, not its class")
        return draws.geometry[self._number]


@dataclass(frozen=True)
class AugmentationDraws:
    """The random augmentation of each sample of a batch: int32 tensors on the images' device."""

    geometry: torch.Tensor  #: (10, N). The attributes `flip` to `crop_width` are its rows, (N,) each.
    #: (12, N): the 3 x 4 color matrix of each sample, row by row, in units of 2^-16. The last column of the matrix
    #: holds the offsets that are added to red, green and blue. None: the colors do not change.
    color: torch.Tensor | None = None

    flip = _Row("flip")  #: 1 for an image to flip horizontally, else 0. Flips are applied after the crop.
    vertical_flip = _Row("vertical_flip")  #: 1 for an image to flip vertically, else 0.
    #: First row of the crop window, in pixels of the image; negative if it is in the padding above the image.
    top = _Row("top")
    left = _Row("left")  #: First column of the crop window; negative if it is in the padding on the left.
    box_top = _Row("box_top")  #: First row of the box to erase, in pixels of the result; 0 if nothing is erased.
    box_left = _Row("box_left")  #: First column of the box.
    box_height = _Row("box_height")  #: Height of the box; 0 if nothing is erased.
    box_width = _Row("box_width")  #: Width of the box.
    #: Height of the crop window, in pixels of the image. If the window is not resized, this is the result's height. The
    #: window of ``CenterCrop(resize=...)`` is the whole image; the middle is cut out after resizing.
    crop_height = _Row("crop_height")
    crop_width = _Row("crop_width")  #: Width of the crop window.

    def check(self, pixels: torch.Tensor) -> None:
        """Raise OptionsError if these draws cannot be applied to the images `pixels`, (N, H, W, C)."""
        count, channels = len(pixels), pixels.shape[3]
        for part, rows in ((self.geometry, len(DRAW_ROWS)), (self.color, 12)):
            fitting = (rows, count), torch.int32, pixels.device
            if part is not None and (part.shape, part.dtype, part.device) != fitting:
                raise OptionsError(
                    f"the draws do not fit {count} images on {pixels.device}; give what Normalize.draw returned for "
                    "these images",
                    parameters=("draws",),
                )
        if self.color is not None and channels != 3:
            raise OptionsError(
                f"the draws change colors, which needs images with 3 channels, but these images have {channels}; give "
                "the draws of a Normalize without color",
                parameters=("draws",),
            )


def fixed_draws(images: torch.Tensor, top: int, left: int, size: tuple[int, int]) -> AugmentationDraws:
    """Return draws that crop all images to the same window, without other changes."""
    draws = AugmentationDraws(torch.zeros((len(DRAW_ROWS), len(images)), dtype=torch.int32, device=images.device))
    draws.top.fill_(top)
    draws.left.fill_(left)
    draws.crop_height.fill_(size[0])
    draws.crop_width.fill_(size[1])
    return draws


def draw_augmentation(
    key: BatchKey, seed: int, augmentation: Augmentation, height: int, width: int
) -> AugmentationDraws:
    """Draw the augmentation of each sample, for images of this size in pixels, on the device of ``key.rows``.

    The result is the same on every device, and the same as that of the Triton kernel (`kernels.draw`).
    """
    (top, rows), (left, columns) = augmentation.windows(height, width)
    counts = (FLIP + 1, LEFT + 1 if rows * columns > 1 else 0, BOX + 4 * TRIES if augmentation.erase else 0)
    words = random_words(key, seed, max(*counts, VERTICAL_FLIP + 1 if augmentation.vertical_flip else 0))
    none = torch.zeros_like(words[:, FLIP])
    boxes = [none] * 4
    if augmentation.erase:
        boxes = _boxes(words, augmentation, *augmentation.output_size(height, width))
    flips = (
        chance(words[:, FLIP], augmentation.flip),
        chance(words[:, VERTICAL_FLIP], augmentation.vertical_flip) if augmentation.vertical_flip else none,
    )
    if isinstance(augmentation.crop, RandomResizedCrop):
        window = crop_windows(key, seed, augmentation.crop, height, width)
    else:
        window = [
            below(words[:, TOP], rows) + top if rows > 1 else none + top,
            below(words[:, LEFT], columns) + left if columns > 1 else none + left,
            *(none + size for size in augmentation.window_size(height, width)),
        ]
    color = None
    if augmentation.color is not None:
        color = _color_matrices(random_words(key, seed, 5, COLOR_STREAM), augmentation)
    return AugmentationDraws(torch.stack([*flips, *window[:2], *boxes, *window[2:]]).to(torch.int32), color)


def _boxes(words: torch.Tensor, augmentation: Augmentation, height: int, width: int) -> list[torch.Tensor]:
    """Return top, left, height and width of each sample's box, each int64, (N,).

    All four are 0 for a sample in which nothing is erased.
    """
    tries = words[:, BOX : BOX + 4 * TRIES]
    # With ``smallest=0``, a box is less high and less wide than the result, as in torchvision.
    fits, box_height, box_width, word_top, word_left = first_that_fits(
        tries, augmentation.erase_scale, augmentation.erase_ratio, height, width, smallest=0
    )
    erased = chance(words[:, ERASE], augmentation.erase) & fits
    box_height, box_width = box_height * erased, box_width * erased
    return [
        below(word_top, height - box_height + 1) * erased,
        below(word_left, width - box_width + 1) * erased,
        box_height,
        box_width,
    ]


def color_table(device: torch.device) -> torch.Tensor:
    """Return 4096 cosines and 4096 sines of a full turn, and two 3 x 3 matrices: int64, (8210,), in units of 2^-16.

    The first matrix maps colors to gray. The second maps the color with the YIQ components (Y, I, Q) to the color with
    the components (0, -Q, I).
    """

    def make() -> torch.Tensor:
        angles = torch.arange(STEPS, dtype=torch.float64, device="cpu") * (2 * math.pi / STEPS)
        cosines, sines = ((part * 65536).round().to(torch.int64) for part in (angles.cos(), angles.sin()))
        gray = tuple(round(weight * 65536) for weight in GRAY)
        return torch.cat([cosines, sines, torch.tensor(gray * 3 + _QUARTER_TURN, device="cpu")])

    return cached_table(("color",), device, make)


def color_ranges(augmentation: Augmentation) -> tuple[tuple[int, int], ...]:
    """Return (lowest value, number of values) of brightness, contrast, saturation and hue, as integers.

    The values of hue are in units of 1/4096 turn, and those of the other three in units of 2^-16.
    """
    jitter = augmentation.color
    assert jitter is not None
    factors = (jitter.brightness, jitter.contrast, jitter.saturation)
    bounds = [(round((1 - factor) * 65536), round((1 + factor) * 65536)) for factor in factors]
    turn = round(jitter.hue * STEPS)
    return tuple((low, high - low + 1) for low, high in (*bounds, (-turn, turn)))


def _color_matrices(words: torch.Tensor, augmentation: Augmentation) -> torch.Tensor:
    """Return the color matrices (see `AugmentationDraws.color`); `words` are five random words per sample, (N, 5)."""
    ranges = color_ranges(augmentation)
    brightness, contrast, saturation, hue = (
        below(words[:, number], count) + low for number, (low, count) in enumerate(ranges)
    )
    assert augmentation.color is not None
    saturation = saturation * ~chance(words[:, 4], augmentation.color.grayscale)
    table = color_table(words.device)
    gray, turned = table[2 * STEPS :].view(2, 9, 1)
    one = torch.eye(3, dtype=torch.int64, device=words.device).view(9, 1) << 16
    straight = _rounded(saturation * table[hue & (STEPS - 1)])
    sideways = _rounded(saturation * table[STEPS + (hue & (STEPS - 1))])
    linear = _rounded((gray << 16) + straight * (one - gray) + sideways * turned)
    linear = _rounded(_rounded(brightness * contrast) * linear)
    offset = _rounded(brightness * _rounded((65536 - contrast) * round(augmentation.level * 65536)))
    matrix = torch.cat([linear.view(3, 3, -1), offset.expand(3, 1, -1)], 1)
    return matrix.view(12, -1).to(torch.int32)


def _rounded(products: torch.Tensor) -> torch.Tensor:
    """Divide by 2^16 and round to the nearest integer."""
    return (products + (1 << 15)) >> 16
