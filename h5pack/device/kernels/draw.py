"""The Triton kernel that draws the random changes of a batch. Importing this module requires Triton.

The kernel computes the same as `augment.draw_augmentation`, in 64-bit integers, with one launch instead of dozens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from h5pack.data.buffers import unfilled_memory
from h5pack.data.draws import (
    CROP_STREAM,
    DRAWS,
    STEPS,
    TRIES,
    BatchKey,
    cached_table,
    fixed_root,
    key_base,
    side_tables,
    signed,
)
from h5pack.device import augment
from h5pack.device.augment import DRAW_ROWS, Augmentation, AugmentationDraws, color_ranges, color_table
from h5pack.device.kernels.launch import FUSION
from h5pack.images.crops import RandomResizedCrop
from h5pack.system.arrays import SPLITMIX64_FACTORS, SPLITMIX64_GAMMA

_SAMPLES = 64
"""Number of samples that one program draws for."""
_GAMMA = tl.constexpr(signed(SPLITMIX64_GAMMA))
_FACTOR = tl.constexpr(signed(SPLITMIX64_FACTORS[0]))
_OTHER_FACTOR = tl.constexpr(signed(SPLITMIX64_FACTORS[1]))
_FLIP_WORD, _TOP_WORD, _LEFT_WORD, _ERASE_WORD, _BOX_WORD, _VERTICAL_FLIP_WORD = map(
    tl.constexpr, (augment.FLIP, augment.TOP, augment.LEFT, augment.ERASE, augment.BOX, augment.VERTICAL_FLIP)
)
# The row of each draw in `AugmentationDraws.geometry`, in the order of `DRAW_ROWS`.
_FLIP, _VERTICAL_FLIP, _TOP, _LEFT, _BOX_TOP, _BOX_LEFT, _BOX_HEIGHT, _BOX_WIDTH, _HEIGHT, _WIDTH = (
    tl.constexpr(row) for row in range(len(DRAW_ROWS))
)
_COLOR = tl.constexpr(len(DRAW_ROWS))
# The index of each setting, in the order of `_settings`: two numbers each. The last six are ranges (see `_in_range`).
(
    _FLIP_CHANCE, _VERTICAL_FLIP_CHANCE, _ERASE_CHANCE, _GRAY_CHANCE, _OUT_HEIGHT, _OUT_WIDTH, _OUT_ROOT, _LEVEL,
    _WINDOW_HEIGHT, _WINDOW_WIDTH, _TOPS, _LEFTS, _BRIGHTNESS, _CONTRAST, _SATURATION, _HUE,
) = (tl.constexpr(2 * number) for number in range(16))  # fmt: skip
_DRAWS, _TRIES, _STEPS = tl.constexpr(DRAWS), tl.constexpr(TRIES), tl.constexpr(STEPS)


def draw(key: BatchKey, seed: int, augmentation: Augmentation, height: int, width: int) -> AugmentationDraws:
    """Draw the same as `augment.draw_augmentation` with one kernel launch."""
    rows = key.rows.to(torch.int64).contiguous()
    count, device, is_colored = len(rows), rows.device, augmentation.color is not None
    with unfilled_memory():
        block = torch.empty((len(DRAW_ROWS) + 12 * is_colored, count), dtype=torch.int32, device=device)
    draws = AugmentationDraws(block[: len(DRAW_ROWS)], block[len(DRAW_ROWS) :] if is_colored else None)
    if not count:
        return draws
    crop = augmentation.crop if isinstance(augmentation.crop, RandomResizedCrop) else None
    repeats, repeat = rows, key.repeats
    if isinstance(repeat, torch.Tensor):
        repeats, repeat = repeat.to(device, torch.int64).contiguous(), 0
    _draw_kernel[(-(-count // _SAMPLES),)](
        block,
        rows,
        repeats,
        cached_table((augmentation, height, width), device, lambda: _settings(augmentation, height, width)),
        side_tables(augmentation.erase_scale, augmentation.erase_ratio, device) if augmentation.erase else rows,
        rows if crop is None else _window_table(crop, height, width, device),
        rows if crop is None else side_tables(crop.scale, crop.ratio, device),
        color_table(device) if is_colored else rows,
        count,
        key_base(key, seed),
        0 if crop is None else key_base(key, seed, CROP_STREAM),
        key_base(key, seed, augment.COLOR_STREAM) if is_colored else 0,
        int(repeat),
        REPEATED=repeats is not rows,
        RESIZES=crop is not None,
        ERASES=augmentation.erase > 0,
        COLORS=is_colored,
        SAMPLES=_SAMPLES,
        num_warps=_SAMPLES // 32,
        enable_fp_fusion=FUSION,
    )
    return draws


def _settings(augmentation: Augmentation, height: int, width: int) -> torch.Tensor:
    """Return the settings of an augmentation for images of this size, int64, (n, 2). The kernel reads them by position.

    A range is its lowest value and the number of its values. A single number is followed by 0.
    """
    size = augmentation.output_size(height, width)
    jitter = augmentation.color
    chances = [augmentation.flip, augmentation.vertical_flip, augmentation.erase, jitter.grayscale if jitter else 0.0]
    ranges = (*augmentation.windows(height, width), *(color_ranges(augmentation) if jitter else ()))
    numbers = [*(round(chance * (1 << 32)) for chance in chances), *size, fixed_root(size[0] * size[1])]
    numbers += [round(augmentation.level * 65536), *augmentation.window_size(height, width)]
    return torch.tensor([*((number, 0) for number in numbers), *ranges], device="cpu")


def _window_table(crop: RandomResizedCrop, height: int, width: int, device: torch.device) -> torch.Tensor:
    """Return the image's size, the square root of its area, and the fallback window: int64, (7,)."""

    def make() -> torch.Tensor:
        numbers = [height, width, fixed_root(height * width), *crop.fallback(height, width)]
        return torch.tensor(numbers, device="cpu")

    return cached_table((crop, height, width), device, make)


@triton.jit
def _mixed(values):  # type: ignore[no-untyped-def]
    """Apply splitmix64's mixing function to int64 values, as `data.draws._mix` does."""
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * _FACTOR
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * _OTHER_FACTOR
    return values ^ ((values >> 31) & ((1 << 33) - 1))


@triton.jit
def _word(state, number):  # type: ignore[no-untyped-def]
    return _mixed((state ^ number) + _GAMMA)


@triton.jit
def _below(words, bound):  # type: ignore[no-untyped-def]
    return (((words >> 33) & 0x7FFFFFFF) * bound) >> 31


@triton.jit
def _in_range(words, range_):  # type: ignore[no-untyped-def]
    """Return integers from a range that is given by its lowest value and the number of its values."""
    return tl.load(range_) + _below(words, tl.load(range_ + 1))


@triton.jit
def _chance(words, threshold):  # type: ignore[no-untyped-def]
    return ((words >> 32) & 0xFFFFFFFF) < threshold


@triton.jit
def _rounded(products):  # type: ignore[no-untyped-def]
    return (products + 32768) >> 16


@triton.jit
def _first_that_fits(state, number, table, root, height, width, smallest):  # type: ignore[no-untyped-def]
    """Return which of each sample's rectangles is the first that fits (-1: none), and the sides of this rectangle.

    See `data.draws.first_that_fits`.
    """
    chosen, tall, wide = tl.zeros_like(state) - 1, tl.zeros_like(state), tl.zeros_like(state)
    for attempt in range(_TRIES):
        first = number + 4 * attempt
        share = tl.load(table + _below(_word(state, first), _STEPS))
        shape = table + _STEPS + _below(_word(state, first + 1), _STEPS)
        side = (share * root + (1 << 19)) >> 20
        by_ratio = (side * tl.load(shape) + (1 << 39)) >> 40
        by_inverse = (side * tl.load(shape + _STEPS) + (1 << 39)) >> 40
        fits = (chosen < 0) & (by_ratio >= smallest) & (by_inverse >= smallest)
        fits = fits & (by_ratio < height + smallest) & (by_inverse < width + smallest)
        chosen = tl.where(fits, attempt, chosen)
        tall, wide = tl.where(fits, by_ratio, tall), tl.where(fits, by_inverse, wide)
    return chosen, tall, wide


@triton.jit
def _draw_boxes(line, here, samples, state, number, settings, boxes):  # type: ignore[no-untyped-def]
    """Draw the box to erase in each sample, as `augment._boxes` does, and store it."""
    height, width = tl.load(settings + _OUT_HEIGHT), tl.load(settings + _OUT_WIDTH)
    root = tl.load(settings + _OUT_ROOT)
    chosen, tall, wide = _first_that_fits(state, number + _BOX_WORD, boxes, root, height, width, 0)
    erased = (chosen >= 0) & _chance(_word(state, number + _ERASE_WORD), tl.load(settings + _ERASE_CHANCE))
    place = number + _BOX_WORD + 4 * chosen
    top, left = _below(_word(state, place + 2), height - tall + 1), _below(_word(state, place + 3), width - wide + 1)
    tl.store(line + _BOX_TOP * samples, tl.where(erased, top, 0).to(tl.int32), mask=here)
    tl.store(line + _BOX_LEFT * samples, tl.where(erased, left, 0).to(tl.int32), mask=here)
    tl.store(line + _BOX_HEIGHT * samples, tl.where(erased, tall, 0).to(tl.int32), mask=here)
    tl.store(line + _BOX_WIDTH * samples, tl.where(erased, wide, 0).to(tl.int32), mask=here)


@triton.jit
def _draw_windows(line, here, samples, state, number, table, sides):  # type: ignore[no-untyped-def]
    """Draw the crop window of each sample, as `data.draws.crop_windows` does, and store it."""
    height, width, root = tl.load(table), tl.load(table + 1), tl.load(table + 2)
    chosen, wide, tall = _first_that_fits(state, number, sides, root, width, height, 1)
    fits, place = chosen >= 0, number + 4 * chosen
    top, left = _below(_word(state, place + 2), height - tall + 1), _below(_word(state, place + 3), width - wide + 1)
    tl.store(line + _TOP * samples, tl.where(fits, top, tl.load(table + 3)).to(tl.int32), mask=here)
    tl.store(line + _LEFT * samples, tl.where(fits, left, tl.load(table + 4)).to(tl.int32), mask=here)
    tl.store(line + _HEIGHT * samples, tl.where(fits, tall, tl.load(table + 5)).to(tl.int32), mask=here)
    tl.store(line + _WIDTH * samples, tl.where(fits, wide, tl.load(table + 6)).to(tl.int32), mask=here)


@triton.jit
def _draw_colors(line, here, samples, state, number, settings, table):  # type: ignore[no-untyped-def]
    """Store the color matrix of each sample, as `augment._color_matrices` computes it."""
    brightness = _in_range(_word(state, number), settings + _BRIGHTNESS)
    contrast = _in_range(_word(state, number + 1), settings + _CONTRAST)
    saturation = _in_range(_word(state, number + 2), settings + _SATURATION)
    turn = _in_range(_word(state, number + 3), settings + _HUE) & (_STEPS - 1)
    saturation = tl.where(_chance(_word(state, number + 4), tl.load(settings + _GRAY_CHANCE)), 0, saturation)
    level = tl.load(settings + _LEVEL)
    straight = _rounded(saturation * tl.load(table + turn))
    sideways = _rounded(saturation * tl.load(table + _STEPS + turn))
    factor = _rounded(brightness * contrast)
    offset = _rounded(brightness * _rounded((65536 - contrast) * level)).to(tl.int32)
    for entry in tl.static_range(9):
        gray = tl.load(table + 2 * _STEPS + entry)
        turned = tl.load(table + 2 * _STEPS + 9 + entry)
        one = 65536 if entry % 4 == 0 else 0
        linear = _rounded((gray << 16) + straight * (one - gray) + sideways * turned)
        target = line + (entry // 3 * 4 + entry % 3) * samples
        tl.store(target, _rounded(factor * linear).to(tl.int32), mask=here)
    for entry in tl.static_range(3):
        tl.store(line + (3 + 4 * entry) * samples, offset, mask=here)


# Do not compile the kernel again if the values or the alignment of these arguments change between batches.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "block", "rows", "repeats", "settings", "boxes", "windows", "sides", "table",
        "samples", "base", "crop_base", "color_base", "repeat",
    ]
)  # fmt: skip
def _draw_kernel(  # type: ignore[no-untyped-def]
    block, rows, repeats, settings, boxes, windows, sides, table, samples, base, crop_base, color_base, repeat,
    REPEATED: tl.constexpr, RESIZES: tl.constexpr, ERASES: tl.constexpr, COLORS: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0) * SAMPLES + tl.arange(0, SAMPLES)
    here = sample < samples
    row = tl.load(rows + sample, mask=here, other=0)
    number = tl.zeros_like(row) + repeat
    if REPEATED:
        number = tl.load(repeats + sample, mask=here, other=0)
    number = number * _DRAWS
    state = _mixed((row ^ base.to(tl.int64)) + _GAMMA)
    line = block + sample
    flips = _chance(_word(state, number + _FLIP_WORD), tl.load(settings + _FLIP_CHANCE))
    vertical_flips = _chance(_word(state, number + _VERTICAL_FLIP_WORD), tl.load(settings + _VERTICAL_FLIP_CHANCE))
    tl.store(line + _FLIP * samples, flips.to(tl.int32), mask=here)
    tl.store(line + _VERTICAL_FLIP * samples, vertical_flips.to(tl.int32), mask=here)
    if RESIZES:
        _draw_windows(line, here, samples, _mixed((row ^ crop_base.to(tl.int64)) + _GAMMA), number, windows, sides)
    else:
        top = _in_range(_word(state, number + _TOP_WORD), settings + _TOPS)
        left = _in_range(_word(state, number + _LEFT_WORD), settings + _LEFTS)
        tl.store(line + _TOP * samples, top.to(tl.int32), mask=here)
        tl.store(line + _LEFT * samples, left.to(tl.int32), mask=here)
        height, width = tl.load(settings + _WINDOW_HEIGHT), tl.load(settings + _WINDOW_WIDTH)
        tl.store(line + _HEIGHT * samples, (tl.zeros_like(row) + height).to(tl.int32), mask=here)
        tl.store(line + _WIDTH * samples, (tl.zeros_like(row) + width).to(tl.int32), mask=here)
    if ERASES:
        _draw_boxes(line, here, samples, state, number, settings, boxes)
    else:
        for unused in tl.static_range(_BOX_TOP, _BOX_WIDTH + 1):
            tl.store(line + unused * samples, tl.zeros_like(sample), mask=here)
    if COLORS:
        state = _mixed((row ^ color_base.to(tl.int64)) + _GAMMA)
        _draw_colors(line + _COLOR * samples, here, samples, state, number, settings, table)
