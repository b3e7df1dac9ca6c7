"""Augmentation that is drawn by a sample's key: flips, padded crops and erased boxes, as whole numbers.

A draw is a hash of (seed, epoch, row, repeat, number of the draw) in 64-bit integer arithmetic, which is exact on every
device. So a sample is augmented in the same way by every device, batch size, number of ranks, and after every resume.
The hash is splitmix64, as of `h5pack.feed.permutation`: the word of a draw is
``derive_key(seed, epoch, row, 64 * repeat + number)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from h5pack.errors import OptionsError
from h5pack.feed.permutation import derive_key

if TYPE_CHECKING:
    from h5pack.feed.batch_key import BatchKey

DRAWS = 64
"""Numbers set aside for the draws of one showing of a row."""
TRIES = 10
"""Boxes that are tried before an image is left whole, as torchvision's RandomErasing does."""
_FLIP, _TOP, _LEFT, _ERASE, _BOX = 0, 1, 2, 3, 4
_STEPS = 4096
_UNIT_BITS = 20
_UNIT = 1 << _UNIT_BITS
_MADE: dict[tuple[object, ...], list[torch.Tensor]] = {}


@dataclass(frozen=True)
class Augmentation:
    """What is done to the images at random.

    Parameters
    ----------
    flip : float
        The probability of a horizontal flip.
    crop : int
        Pixels of black around the image, out of which a window of the image's size is cut; 0: none.
    erase : float
        The probability that a box is erased.
    erase_scale : tuple of float
        The smallest and the largest share of the image's area that a box aims at; uniform between them.
    erase_ratio : tuple of float
        The smallest and the largest height of a box over its width; log-uniform between them.

    Raises
    ------
    OptionsError
    """

    flip: float = 0.0
    crop: int = 0
    erase: float = 0.0
    erase_scale: tuple[float, float] = (0.02, 0.33)
    erase_ratio: tuple[float, float] = (0.3, 3.3)

    def __post_init__(self) -> None:
        # Lists too, and one type whatever was given: draws are looked up by these.
        for name in ("erase_scale", "erase_ratio"):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != 2:
                raise OptionsError(f"{name} has {len(values)} numbers; give the smallest and the largest")
            object.__setattr__(self, name, values)
        for name, value in (("flip", self.flip), ("erase", self.erase)):
            if not 0 <= value <= 1:
                raise OptionsError(f"{name} is {value}; give a probability, 0 to 1")
        if self.crop != int(self.crop) or not 0 <= self.crop < 1 << 20:
            raise OptionsError(f"crop is {self.crop}; give the pixels of padding, a whole number from 0")
        low, high = self.erase_scale
        if not 0 < low <= high <= 1:
            raise OptionsError(f"erase_scale is {self.erase_scale}; give two shares of the area, 0 to 1, smaller first")
        low, high = self.erase_ratio
        if not 1 / 1024 <= low <= high <= 1024:
            raise OptionsError(f"erase_ratio is {self.erase_ratio}; give two ratios, 1/1024 to 1024, smaller first")

    @property
    def moves(self) -> bool:
        """Whether pixels change their place."""
        return self.flip > 0 or self.crop > 0

    @property
    def on(self) -> bool:
        """Whether anything is random."""
        return self.moves or self.erase > 0


@dataclass(frozen=True)
class Draws:
    """What was drawn for each sample of a batch; each int32, (N,), on the images' device.

    Attributes
    ----------
    flip : Tensor
        0, or 1 where the image is flipped; it is flipped after the crop.
    top, left : Tensor
        Where the window begins in the image, in pixels; negative in the padding.
    box_top, box_left, box_height, box_width : Tensor
        The box that is erased, in pixels of the result; of height 0 where none is.
    """

    flip: torch.Tensor
    top: torch.Tensor
    left: torch.Tensor
    box_top: torch.Tensor
    box_left: torch.Tensor
    box_height: torch.Tensor
    box_width: torch.Tensor


def draw(key: BatchKey, seed: int, augmentation: Augmentation, height: int, width: int) -> Draws:
    """The draws of a batch; the same whole numbers on every device.

    Parameters
    ----------
    key : BatchKey
        Its rows are int64, (N,); the draws are on their device.
    seed : int
    augmentation : Augmentation
    height, width : int
        Of the images, in pixels.
    """
    count = _BOX + 4 * TRIES if augmentation.erase else _ERASE
    words = hashed(key, seed, count)
    flip = _chance(words[:, _FLIP], augmentation.flip)
    top = _below(words[:, _TOP], 2 * augmentation.crop + 1) - augmentation.crop
    left = _below(words[:, _LEFT], 2 * augmentation.crop + 1) - augmentation.crop
    boxes = _boxes(words, augmentation, height, width) if augmentation.erase else [torch.zeros_like(top)] * 4
    return Draws(*(part.to(torch.int32) for part in (flip, top, left, *boxes)))


def hashed(key: BatchKey, seed: int, count: int) -> torch.Tensor:
    """The first `count` words of each sample: int64, (N, count), every bit of which is random."""
    rows = key.rows.to(torch.int64)
    of_row = _mix((rows ^ _signed(derive_key(seed, key.epoch))) + _signed(0x9E3779B97F4A7C15))
    numbers = torch.arange(count, device=rows.device)
    if isinstance(key.repeats, torch.Tensor):
        numbers = key.repeats.to(rows.device, torch.int64)[:, None] * DRAWS + numbers
    else:
        numbers = numbers + int(key.repeats) * DRAWS
    return _mix((of_row[:, None] ^ numbers) + _signed(0x9E3779B97F4A7C15))


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _mix(values: torch.Tensor) -> torch.Tensor:
    """splitmix64's mix; int64 products wrap as uint64 ones do, and the masks make the shifts logical."""
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return values ^ ((values >> 31) & ((1 << 33) - 1))


def _below(words: torch.Tensor, bound: int | torch.Tensor) -> torch.Tensor:
    """Whole numbers 0 to bound - 1, bound below 2^31: the upper 31 bits, scaled."""
    return (((words >> 33) & ((1 << 31) - 1)) * bound) >> 31


def _chance(words: torch.Tensor, probability: float) -> torch.Tensor:
    """True with a probability that is counted in steps of 2^-32."""
    return ((words >> 32) & ((1 << 32) - 1)) < round(probability * (1 << 32))


def _boxes(words: torch.Tensor, augmentation: Augmentation, height: int, width: int) -> list[torch.Tensor]:
    """Top, left, height and width of each sample's box, int64 (N,); of height and width 0 where none is erased.

    The sides are ``sqrt(area * ratio)`` and ``sqrt(area / ratio)``, as in torchvision. The roots come from tables of
    whole numbers, because ``exp`` rounds differently from device to device.
    """
    tries = words[:, _BOX : _BOX + 4 * TRIES].reshape(-1, TRIES, 4)
    shares, ratios, inverses = _tables(augmentation, words.device)
    steps = _below(tries[..., :2], _STEPS)
    whole = math.isqrt(height * width << (2 * _UNIT_BITS))
    side = (shares[steps[..., 0]] * whole + (_UNIT >> 1)) >> _UNIT_BITS
    heights = (side * ratios[steps[..., 1]] + (_UNIT * _UNIT >> 1)) >> (2 * _UNIT_BITS)
    widths = (side * inverses[steps[..., 1]] + (_UNIT * _UNIT >> 1)) >> (2 * _UNIT_BITS)
    fits = (heights < height) & (widths < width)
    # The first try that fits; where none does, the first of all, of which no height is left.
    first = fits.to(torch.int32).argmax(1, keepdim=True)
    erased = _chance(words[:, _ERASE], augmentation.erase) & fits.any(1)
    box_height, box_width, word_top, word_left = (
        part.gather(1, first)[:, 0] for part in (heights, widths, tries[..., 2], tries[..., 3])
    )
    box_height, box_width = box_height * erased, box_width * erased
    return [
        _below(word_top, height - box_height + 1) * erased,
        _below(word_left, width - box_width + 1) * erased,
        box_height,
        box_width,
    ]


def _tables(augmentation: Augmentation, device: torch.device) -> list[torch.Tensor]:
    """Roots of the shares of the area, of the ratios, and of the ratios' inverses, at the middle of each step.

    Each is int64, (4096,), in 2^-20.
    """
    name = (augmentation.erase_scale, augmentation.erase_ratio, str(device))
    # A traced call makes its own: its tensors are none that another call may keep.
    if name in _MADE and not torch.compiler.is_compiling():
        return _MADE[name]
    middles = (torch.arange(_STEPS, dtype=torch.float64, device="cpu") + 0.5) / _STEPS
    low, high = augmentation.erase_scale
    shares = (low + (high - low) * middles).sqrt()
    low, high = (math.log(ratio) / 2 for ratio in augmentation.erase_ratio)
    logs = low + (high - low) * middles
    tables = [(table * _UNIT).round().to(torch.int64).to(device) for table in (shares, logs.exp(), (-logs).exp())]
    if not torch.compiler.is_compiling():
        _MADE[name] = tables
    return tables
