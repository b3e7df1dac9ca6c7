"""Random numbers of the samples of a batch: hashes of (seed, epoch, row, repeat, number of the draw).

The hashes are computed in 64-bit integer arithmetic, which is exact on every device. A sample therefore gets the same
draws on every device, for every number of ranks, and after a resume. They depend on the batch size only if an epoch has
several copies of a row (see `first_use`). The hash is splitmix64: a draw equals ``derive_key(seed, epoch, row, 64 *
repeat + number)`` from `h5pack.order.permutation`. If the view or the stream is not 0 (see `BatchKey` and
`random_words`), a draw equals ``derive_key(seed, epoch, stream, view, row, 64 * repeat + number)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from h5pack.images.crops import RandomResizedCrop
from h5pack.order.permutation import derive_key
from h5pack.system.arrays import SPLITMIX64_FACTORS, SPLITMIX64_GAMMA

DRAWS = 64
"""Number of draws that are reserved for each copy of a row in an epoch."""
TRIES = 10
"""Number of random rectangles to try per image, for a crop or for a box to erase. If none of them fits into the image,
a crop uses its fallback window, and no box is erased."""
CROP_STREAM = 1
"""The stream of draws (see `random_words`) from which resized crops are drawn."""
STEPS = 4096
"""Number of entries of each table that `side_tables` returns."""
_MAX_BATCH_BITS = 20
_UNIT_BITS = 20
_UNIT = 1 << _UNIT_BITS
_cached_tables: dict[tuple[object, ...], torch.Tensor] = {}


@dataclass(frozen=True)
class BatchKey:
    """The identity of each sample of a batch, from which a transform derives its random numbers.

    The random numbers are then a pure function of (seed, epoch, row, repeat, view): the same on every device, for every
    number of ranks, and in a resumed run. They depend on the batch size only if an epoch has several copies of a row
    (see `first_use`).
    """

    rows: torch.Tensor  #: The index of each sample in the file's datasets: int64, (N,), on the images' device.
    epoch: int
    repeats: int | torch.Tensor = 0  #: Differs between the copies of a row in an epoch: an int, or int64, (N,).
    view: int = 0  #: Which of several augmented views of the same images: 0, 1, ...


def first_use(batch: int, rank: int, rank_rows: int) -> int:
    """Return the use number of the first row of a rank's batch, which has `rank_rows` rows.

    A use number distinguishes the copies of a row in an epoch: it is the `repeats` of a copy's `BatchKey`, so that each
    copy has random numbers of its own. The rows of a global batch (all ranks together) have consecutive use numbers,
    which do not depend on the number of ranks. All rows of an epoch have different ones if a global batch has at most
    2^20 rows.
    """
    return (batch << _MAX_BATCH_BITS) + rank * rank_rows


def random_words(key: BatchKey, seed: int, count: int, stream: int = 0) -> torch.Tensor:
    """Return the first `count` random 64-bit words of each sample: int64, (N, count).

    `stream` separates kinds of draws, so that one kind may take more numbers without changing another. `Normalize`
    draws flips, crops and boxes from stream 0, resized crops from stream 1 and colors from stream 2. Stream 3 is for
    other transforms. While torch.compile traces a call, `seed` must fit 64 bits.
    """
    rows = key.rows.to(torch.int64)
    of_row = _mix((rows ^ key_base(key, seed, stream)) + signed(SPLITMIX64_GAMMA))
    numbers = torch.arange(count, device=rows.device)
    if isinstance(key.repeats, torch.Tensor):
        numbers = key.repeats.to(rows.device, torch.int64)[:, None] * DRAWS + numbers
    else:
        numbers = numbers + int(key.repeats) * DRAWS
    return _mix((of_row[:, None] ^ numbers) + signed(SPLITMIX64_GAMMA))


def key_base(key: BatchKey, seed: int, stream: int = 0) -> int | torch.Tensor:
    """Return the part of the hash that all samples of a batch share, as a signed 64-bit integer.

    It is ``derive_key(seed, epoch)`` in view 0 of stream 0, else ``derive_key(seed, epoch, stream, view)``. While
    torch.compile traces a call, the result is an int64 tensor (), not an int. The reason is that the epoch changes
    between calls, so Dynamo would turn an int into a symbol, and products of symbols must not exceed 64 bits.
    """
    parts = (seed, key.epoch, stream, key.view) if stream or key.view else (seed, key.epoch)
    if not torch.compiler.is_compiling():
        return signed(derive_key(*parts))
    state = torch.zeros((), dtype=torch.int64, device=key.rows.device)
    for part in parts:
        state = _mix((state ^ torch.full_like(state, part)) + signed(SPLITMIX64_GAMMA))
    return state


def signed(value: int) -> int:
    """Return the signed 64-bit integer, for torch.int64, that has the same lower 64 bits as `value`."""
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Apply splitmix64's mixing function to int64 values with the result that uint64 arithmetic would give.

    int64 products wrap around like uint64 products. ``>>`` on int64 copies the sign bit, so masks clear the copies.
    """
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * signed(SPLITMIX64_FACTORS[0])
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * signed(SPLITMIX64_FACTORS[1])
    return values ^ ((values >> 31) & ((1 << 33) - 1))


def below(words: torch.Tensor, bound: int | torch.Tensor) -> torch.Tensor:
    """Map random words to integers from 0 to bound - 1 by scaling their upper 31 bits. `bound` must be below 2^31."""
    return (((words >> 33) & ((1 << 31) - 1)) * bound) >> 31


def chance(words: torch.Tensor, probability: float) -> torch.Tensor:
    """Map random words to bools that are True with this probability, rounded to a multiple of 2^-32."""
    return ((words >> 32) & ((1 << 32) - 1)) < round(probability * (1 << 32))


def crop_windows(key: BatchKey, seed: int, crop: RandomResizedCrop, height: Any, width: Any) -> list[torch.Tensor]:
    """Return top, left, height and width of each sample's window in pixels of the image, each int64, (N,).

    `height` and `width` are ints for images of one size, else int64 tensors, (N,).
    """
    words = random_words(key, seed, 4 * TRIES, stream=CROP_STREAM)
    # For `first_that_fits`, a ratio is height / width, but the ratio of a crop is width / height. So exchange the
    # sides. With ``smallest=1`` a window may be as large as the image.
    fits, window_width, window_height, word_top, word_left = first_that_fits(
        words, crop.scale, crop.ratio, width, height, smallest=1
    )
    top, left = below(word_top, height - window_height + 1), below(word_left, width - window_width + 1)
    drawn = [top, left, window_height, window_width]
    if not isinstance(height, torch.Tensor):
        return [torch.where(fits, part, other) for part, other in zip(drawn, crop.fallback(height, width), strict=True)]
    for number in torch.nonzero(~fits)[:, 0].tolist():
        for part, other in zip(drawn, crop.fallback(int(height[number]), int(width[number])), strict=True):
            part[number] = other
    return drawn


def first_that_fits(
    words: torch.Tensor,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    height: Any,
    width: Any,
    smallest: int,
) -> list[torch.Tensor]:
    """Choose the first of each sample's ten rectangles that fits into the image.

    A rectangle fits if its height is from `smallest` to ``height - 1 + smallest``, and its width is from `smallest` to
    ``width - 1 + smallest``. Return whether a rectangle fits (bool), the height and width of the chosen rectangle, and
    two random words for its position (int64); each (N,). If no rectangle fits, the values are those of the first one.

    `words` is int64, (N, 4 * TRIES). `height` and `width` are ints, or int64 tensors (N,). The height and width of a
    rectangle are ``sqrt(area * ratio)`` and ``sqrt(area / ratio)``, as in torchvision. The square roots are fixed-point
    integers from tables, because ``exp`` rounds differently on different devices.
    """
    tries = words.reshape(-1, TRIES, 4)
    shares, ratios, inverses = side_tables(scale, ratio, words.device)
    steps = below(tries[..., :2], STEPS)
    whole: Any
    if isinstance(height, torch.Tensor):
        roots = [fixed_root(area) for area in (height * width).tolist()]
        whole = torch.tensor(roots, dtype=torch.int64, device=words.device)[:, None]
        height, width = height[:, None], width[:, None]
    else:
        whole = fixed_root(height * width)
    side = (shares[steps[..., 0]] * whole + (_UNIT >> 1)) >> _UNIT_BITS
    heights = (side * ratios[steps[..., 1]] + (_UNIT * _UNIT >> 1)) >> (2 * _UNIT_BITS)
    widths = (side * inverses[steps[..., 1]] + (_UNIT * _UNIT >> 1)) >> (2 * _UNIT_BITS)
    fits = (heights < height + smallest) & (widths < width + smallest) & (heights >= smallest) & (widths >= smallest)
    # argmax returns the index of the first rectangle that fits, and 0 if none fits.
    first = fits.to(torch.int32).argmax(1, keepdim=True)
    parts = (heights, widths, tries[..., 2], tries[..., 3])
    return [fits.any(1), *(part.gather(1, first)[:, 0] for part in parts)]


def fixed_root(value: int) -> int:
    """Return the square root of `value` in units of 2^-20, rounded down."""
    return math.isqrt(value << (2 * _UNIT_BITS))


def side_tables(scale: tuple[float, float], ratio: tuple[float, float], device: torch.device) -> torch.Tensor:
    """Return square roots of area fractions, of ratios and of inverse ratios, in units of 2^-20: int64, (3, 4096).

    The range of the area and the range of the ratio's logarithm are divided into 4096 equal steps. Each entry is the
    value at the middle of a step.
    """

    def make() -> torch.Tensor:
        middles = (torch.arange(STEPS, dtype=torch.float64, device="cpu") + 0.5) / STEPS
        shares = (scale[0] + (scale[1] - scale[0]) * middles).sqrt()
        low, high = (math.log(bound) / 2 for bound in ratio)
        logs = low + (high - low) * middles
        return torch.stack([(table * _UNIT).round().to(torch.int64) for table in (shares, logs.exp(), (-logs).exp())])

    return cached_table((scale, ratio), device, make)


def cached_table(name: tuple[object, ...], device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the table called `name` on a device: from the cache, or else from ``make()``."""
    # While torch.compile traces this call, tensors are symbolic. They must not be mixed with tensors of the cache.
    if torch.compiler.is_compiling():
        return make().to(device)
    name = (*name, str(device))
    if name not in _cached_tables:
        _cached_tables[name] = make().to(device)
    return _cached_tables[name]
