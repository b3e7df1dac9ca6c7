"""Random flips, padded crops and erased boxes (random erasing), drawn separately for each sample of a batch.

A draw is one pseudo-random number: a hash of (seed, epoch, row, repeat, number of the draw), computed in 64-bit integer
arithmetic, which is exact on every device. A sample therefore gets the same augmentation on every device, for every
batch size and number of ranks, and after a resume. The hash is splitmix64: a draw equals
``derive_key(seed, epoch, row, 64 * repeat + number)`` from `h5pack.order.permutation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from h5pack.errors import OptionsError
from h5pack.order.permutation import derive_key
from h5pack.system.arrays import SPLITMIX64_FACTORS, SPLITMIX64_GAMMA

if TYPE_CHECKING:
    from h5pack.device.batch import BatchKey


DRAWS = 64
"""How many draw numbers are reserved for each repeat of a row."""
TRIES = 10
"""Number of boxes to try per image. If none fits, nothing is erased, as in torchvision's RandomErasing."""
_FLIP, _TOP, _LEFT, _ERASE, _BOX = 0, 1, 2, 3, 4
_STEPS = 4096
_UNIT_BITS = 20
_UNIT = 1 << _UNIT_BITS
_cached_tables: dict[tuple[object, ...], list[torch.Tensor]] = {}


@dataclass(frozen=True)
class Augmentation:
    """The random changes to make to images, as described in `Normalize`. Raises OptionsError for invalid values."""

    flip: float = 0.0  # Probability of a horizontal flip.
    crop: int = 0  # Pixels of padding on each side before a random window is cut out.
    erase: float = 0.0  # Probability that a box is erased.
    erase_scale: tuple[float, float] = (0.02, 0.33)  # Range of the box's area / the image's area; drawn uniformly.
    erase_ratio: tuple[float, float] = (0.3, 3.3)  # Range of the box's height / width; drawn log-uniformly.

    def __post_init__(self) -> None:
        # These values are converted to tuples of floats because they are part of the key of `_cached_tables`.
        for name in ("erase_scale", "erase_ratio"):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != 2:
                raise OptionsError(f"{name} has {len(values)} numbers; give two in ascending order", parameters=(name,))
            object.__setattr__(self, name, values)
        (low_area, high_area), (low_ratio, high_ratio) = self.erase_scale, self.erase_ratio
        is_whole = 0 <= self.crop < 1 << 20 and self.crop == int(self.crop)
        is_scale, is_ratio = 0 < low_area <= high_area <= 1, 1 / 1024 <= low_ratio <= high_ratio <= 1024
        for name, is_valid, wanted in (
            ("flip", 0 <= self.flip <= 1, "a probability from 0 to 1"),
            ("erase", 0 <= self.erase <= 1, "a probability from 0 to 1"),
            ("crop", is_whole, "the padding in pixels, an integer of at least 0"),
            ("erase_scale", is_scale, "two fractions of the area in ascending order, above 0 and at most 1"),
            ("erase_ratio", is_ratio, "two ratios in ascending order, from 1/1024 to 1024"),
        ):
            if not is_valid:
                raise OptionsError(f"{name} is {getattr(self, name)}; give {wanted}", parameters=(name,))

    @property
    def moves_pixels(self) -> bool:
        """True if a flip or a crop can move pixels."""
        return self.flip > 0 or self.crop > 0

    @property
    def enabled(self) -> bool:
        """True if any random change is enabled."""
        return self.moves_pixels or self.erase > 0


@dataclass(frozen=True)
class AugmentationDraws:
    """The random augmentation of each sample of a batch. Each tensor is int32, (N,), on the images' device."""

    flip: torch.Tensor  # 1 for an image to flip, else 0. The flip is applied after the crop.
    # The first row and column of the crop window, in pixels of the image; negative if it begins in the padding.
    top: torch.Tensor
    left: torch.Tensor
    # The box to erase, in pixels of the result. All four are 0 if nothing is erased.
    box_top: torch.Tensor
    box_left: torch.Tensor
    box_height: torch.Tensor
    box_width: torch.Tensor


def draw_augmentation(
    key: BatchKey, seed: int, augmentation: Augmentation, height: int, width: int
) -> AugmentationDraws:
    """Draw the augmentation of each sample. The tensors are on the device of ``key.rows``; devices do not differ."""
    count = _BOX + 4 * TRIES if augmentation.erase else _ERASE
    words = random_words(key, seed, count)
    flip = _chance(words[:, _FLIP], augmentation.flip)
    top = _below(words[:, _TOP], 2 * augmentation.crop + 1) - augmentation.crop
    left = _below(words[:, _LEFT], 2 * augmentation.crop + 1) - augmentation.crop
    boxes = _boxes(words, augmentation, height, width) if augmentation.erase else [torch.zeros_like(top)] * 4
    return AugmentationDraws(*(part.to(torch.int32) for part in (flip, top, left, *boxes)))


def random_words(key: BatchKey, seed: int, count: int) -> torch.Tensor:
    """Return the first `count` random 64-bit words of each sample: int64, (N, count)."""
    rows = key.rows.to(torch.int64)
    of_row = _mix((rows ^ _signed(derive_key(seed, key.epoch))) + _signed(SPLITMIX64_GAMMA))
    numbers = torch.arange(count, device=rows.device)
    if isinstance(key.repeats, torch.Tensor):
        numbers = key.repeats.to(rows.device, torch.int64)[:, None] * DRAWS + numbers
    else:
        numbers = numbers + int(key.repeats) * DRAWS
    return _mix((of_row[:, None] ^ numbers) + _signed(SPLITMIX64_GAMMA))


def _signed(value: int) -> int:
    """Reinterpret an unsigned 64-bit integer as a signed one with the same bits, as torch.int64 requires."""
    return value - (1 << 64) if value >> 63 else value


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Apply splitmix64's mixing function to int64 values with the result that uint64 arithmetic would give.

    int64 products wrap around like uint64 products. ``>>`` on int64 copies the sign bit, so masks clear the copies.
    """
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * _signed(SPLITMIX64_FACTORS[0])
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * _signed(SPLITMIX64_FACTORS[1])
    return values ^ ((values >> 31) & ((1 << 33) - 1))


def _below(words: torch.Tensor, bound: int | torch.Tensor) -> torch.Tensor:
    """Map random words to integers from 0 to bound - 1 by scaling their upper 31 bits. `bound` must be below 2^31."""
    return (((words >> 33) & ((1 << 31) - 1)) * bound) >> 31


def _chance(words: torch.Tensor, probability: float) -> torch.Tensor:
    """Map random words to bools that are True with this probability, rounded to a multiple of 2^-32."""
    return ((words >> 32) & ((1 << 32) - 1)) < round(probability * (1 << 32))


def _boxes(words: torch.Tensor, augmentation: Augmentation, height: int, width: int) -> list[torch.Tensor]:
    """Return top, left, height and width of each sample's box, each int64, (N,). All are 0 if nothing is erased.

    The sides are ``sqrt(area * ratio)`` and ``sqrt(area / ratio)``, as in torchvision. The square roots are fixed-point
    integers from tables, because ``exp`` rounds differently on different devices.
    """
    tries = words[:, _BOX : _BOX + 4 * TRIES].reshape(-1, TRIES, 4)
    shares, ratios, inverses = _tables(augmentation, words.device)
    steps = _below(tries[..., :2], _STEPS)
    whole = math.isqrt(height * width << (2 * _UNIT_BITS))
    side = (shares[steps[..., 0]] * whole + (_UNIT >> 1)) >> _UNIT_BITS
    heights = (side * ratios[steps[..., 1]] + (_UNIT * _UNIT >> 1)) >> (2 * _UNIT_BITS)
    widths = (side * inverses[steps[..., 1]] + (_UNIT * _UNIT >> 1)) >> (2 * _UNIT_BITS)
    fits = (heights < height) & (widths < width)
    # argmax returns the first box that fits. If none fits it returns 0, and the size of that box is set to 0 below.
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
    """Return square roots of area fractions, of ratios and of inverse ratios, in units of 2^-20: int64, (4096,) each.

    The range of the area and the range of the ratio's logarithm are divided into 4096 equal steps. Each entry is the
    value at the middle of a step.
    """
    name = (augmentation.erase_scale, augmentation.erase_ratio, str(device))
    # While torch.compile traces this call, tensors are symbolic. They must not be mixed with tensors of the cache.
    if name in _cached_tables and not torch.compiler.is_compiling():
        return _cached_tables[name]
    middles = (torch.arange(_STEPS, dtype=torch.float64, device="cpu") + 0.5) / _STEPS
    low, high = augmentation.erase_scale
    shares = (low + (high - low) * middles).sqrt()
    low, high = (math.log(ratio) / 2 for ratio in augmentation.erase_ratio)
    logs = low + (high - low) * middles
    tables = [(table * _UNIT).round().to(torch.int64).to(device) for table in (shares, logs.exp(), (-logs).exp())]
    if not torch.compiler.is_compiling():
        _cached_tables[name] = tables
    return tables


def crop_and_flip(pixels: torch.Tensor, draws: AugmentationDraws) -> torch.Tensor:
    """Return cropped and flipped images, uint8 (N, H, W, C) like `pixels`. It works inside ``torch.compile``."""
    count, height, width, _ = pixels.shape
    rows = torch.arange(height, device=pixels.device) + draws.top[:, None]
    columns = torch.arange(width, device=pixels.device).expand(count, width)
    columns = torch.where(draws.flip[:, None] != 0, width - 1 - columns, columns) + draws.left[:, None]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    images = torch.arange(count, device=pixels.device)[:, None, None]
    found = pixels[images, rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]]
    return found * inside[..., None]


def crop_and_flip_on_cpu(pixels: torch.Tensor, draws: AugmentationDraws, planar: bool) -> torch.Tensor:
    """Do the same as `crop_and_flip`, by one copy per image. The result is contiguous; (N, C, H, W) if `planar`.

    On a CPU, this is twice as fast for images of 32 x 32 pixels, and 20 times as fast for images of 218 x 178.
    """
    count, height, width, channels = pixels.shape
    shape = (count, channels, height, width) if planar else (count, height, width, channels)
    result = torch.zeros(shape, dtype=torch.uint8)
    targets = result.permute(0, 2, 3, 1) if planar else result
    for number, (flip, top, left) in enumerate(
        zip(draws.flip.tolist(), draws.top.tolist(), draws.left.tolist(), strict=True)
    ):
        # These are the window's rows and columns that lie inside the image. The rest of the result stays black.
        upper, lower = max(0, -top), min(height, height - top)
        start, stop = max(0, -left), min(width, width - left)
        if upper >= lower or start >= stop:
            continue
        source = pixels[number, upper + top : lower + top, start + left : stop + left]
        if flip:
            source = source.flip(1)
            start, stop = width - stop, width - start
        targets[number, upper:lower, start:stop] = source
    return result


def erase_mask(draws: AugmentationDraws, height: int, width: int) -> torch.Tensor:
    """Return a mask that is True inside the erased boxes: bool, (N, H, W)."""
    rows = torch.arange(height, device=draws.box_top.device) - draws.box_top[:, None]
    columns = torch.arange(width, device=draws.box_top.device) - draws.box_left[:, None]
    inside_rows = (rows >= 0) & (rows < draws.box_height[:, None])
    inside_columns = (columns >= 0) & (columns < draws.box_width[:, None])
    return inside_rows[:, :, None] & inside_columns[:, None, :]


def erase_on_cpu(result: torch.Tensor, draws: AugmentationDraws) -> None:
    """Set the erased boxes of `result`, shape (N, C, H, W), to 0 in place."""
    boxes = (draws.box_top, draws.box_left, draws.box_height, draws.box_width)
    for number, (top, left, height, width) in enumerate(zip(*(part.tolist() for part in boxes), strict=True)):
        if height:
            result[number, :, top : top + height, left : left + width] = 0
