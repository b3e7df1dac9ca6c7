"""The arithmetic of `Normalize` by torch operations: windows and flips, colors, scaling, erased boxes.

On a CPU, `Normalize` uses `transform_into` and the functions whose names end in "_on_cpu", which are faster there. On
other devices, it uses the Triton kernels or, if they cannot be used, `transformed`. Inside ``torch.compile``, it uses
`transformed` on every device. All functions and the Triton kernels give the same bits, except that `resize_on_cpu`,
and so `transform_into` with a resized crop, may differ (see `h5pack.device.resize`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from h5pack.data.buffers import unfilled_memory
from h5pack.device.augment import AugmentationDraws, Changes
from h5pack.device.resize import find_taps, resize, resize_on_cpu
from h5pack.errors import OptionsError
from h5pack.system.parameters import real_number
from h5pack.system.text import short_repr

_BITS = 16
_BLOCK_VALUES = 1 << 16
"""Number of values to process at a time, so that the temporaries stay in the CPU's cache. In `scale_into`, each thread
processes this many values at a time, and its temporaries take 512 KiB. `apply_color_on_cpu` processes this many pixels
at a time."""
_ROW_VALUES = 1 << 12
"""Maximum number of values to which each of the four constants is repeated (64 KiB for all four). The constants are
repeated for several lines of an image, so that one operation computes all these lines. The number of lines is the
largest divisor of the image's height with which the constants do not exceed this maximum; if there is none, it is 1."""


def transformed(
    pixels: torch.Tensor,
    constants: torch.Tensor,
    draws: AugmentationDraws | None,
    changes: Changes,
    size: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return images, uint8 (N, H, W, C), changed as `draws` say and scaled to `dtype`: (N, C, *size).

    Works on any device and inside ``torch.compile``. `constants` are those of `scale_whole`.
    """
    if changes.resize is not None:
        pixels = resize(pixels, *find_taps(draws, changes.resize, pixels))
    elif draws is not None and changes.moves:
        pixels = crop_and_flip(pixels, draws, size)
    if draws is not None and draws.color is not None:
        pixels = apply_color(pixels, draws.color)
    result = scale_whole(pixels, constants, dtype)
    if draws is not None and changes.erases:
        result = result.masked_fill(erase_mask(draws, *size)[..., None], 0.0)
    return result.permute(0, 3, 1, 2)


def transform_into(
    result: torch.Tensor,
    pixels: torch.Tensor,
    constants: torch.Tensor,
    draws: AugmentationDraws | None,
    changes: Changes,
    planar: bool,
) -> None:
    """Write what `transformed` returns into `result`, (N, C, height, width), by operations that are fast on a CPU.

    `result` is contiguous if `planar`, else its memory format is channels_last.
    """
    source = pixels.permute(0, 3, 1, 2) if planar else pixels
    if changes.resize is not None:
        source = resize_on_cpu(pixels, draws, changes.resize, planar)
    elif draws is not None and changes.moves:
        height, width = result.shape[2:]
        source = crop_and_flip_on_cpu(pixels, draws, (height, width), planar)
    if draws is not None and draws.color is not None:
        moved = source.permute(0, 2, 3, 1) if planar else source
        moved = apply_color_on_cpu(moved, draws.color)
        source = moved.permute(0, 3, 1, 2) if planar else moved
    scale_into(result if planar else result.permute(0, 2, 3, 1), source.contiguous(), constants, planar)
    if draws is not None and changes.erases:
        erase_on_cpu(result, draws)


def crop_and_flip(pixels: torch.Tensor, draws: AugmentationDraws, size: tuple[int, int]) -> torch.Tensor:
    """Return a window of each image, flipped as `draws` say: uint8, (N, *size, C).

    Works on any device and inside ``torch.compile``.
    """
    count, height, width, channels = pixels.shape
    if not height or not width:
        return pixels.new_zeros(count, *size, channels)  # All of the window is padding.
    rows = _sources(size[0], draws.vertical_flip, draws.top)
    columns = _sources(size[1], draws.flip, draws.left)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    images = torch.arange(count, device=pixels.device)[:, None, None]
    found = pixels[images, rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]]
    return found * inside[..., None]


def _sources(length: int, flip: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return for each row (or column) of the window which row (or column) of the image it shows: int64, (N, length)."""
    positions = torch.arange(length, device=flip.device).expand(len(flip), length)
    return torch.where(flip[:, None] != 0, length - 1 - positions, positions) + first[:, None]


def crop_and_flip_on_cpu(
    pixels: torch.Tensor, draws: AugmentationDraws, size: tuple[int, int], planar: bool
) -> torch.Tensor:
    """Do the same as `crop_and_flip`, by one copy per image.

    The result is contiguous: (N, C, *size) if `planar`, else (N, *size, C). On a CPU, this is twice as fast as
    `crop_and_flip` for images of 32 x 32 pixels, and 20 times as fast for images of 218 x 178 pixels.
    """
    (count, *source_size, channels), (height, width) = pixels.shape, size
    shape = (count, channels, height, width) if planar else (count, height, width, channels)
    result = torch.zeros(shape, dtype=torch.uint8, device="cpu")
    targets = result.permute(0, 2, 3, 1) if planar else result
    parts = (draws.flip, draws.vertical_flip, draws.top, draws.left)
    for number, (flip, vertical_flip, top, left) in enumerate(zip(*(part.tolist() for part in parts), strict=True)):
        # These are the window's rows and columns that lie inside the image. The rest of the result stays black.
        upper, lower = max(0, -top), min(height, source_size[0] - top)
        start, stop = max(0, -left), min(width, source_size[1] - left)
        if upper >= lower or start >= stop:
            continue
        source = pixels[number, upper + top : lower + top, start + left : stop + left]
        if flip or vertical_flip:
            source = source.flip([axis for axis, flips in enumerate((vertical_flip, flip)) if flips])
        if flip:
            start, stop = width - stop, width - start
        if vertical_flip:
            upper, lower = height - lower, height - upper
        targets[number, upper:lower, start:stop] = source
    return result


def fixed_window(pixels: torch.Tensor, top: int, left: int, size: tuple[int, int]) -> torch.Tensor:
    """Return the same window of all images, (N, *size, C).

    The result is a view of the images, or a copy that is padded with black if the window exceeds the images.
    """
    (height, width), (rows, columns) = pixels.shape[1:3], size
    inner = pixels[:, max(0, top) : top + rows, max(0, left) : left + columns]
    if inner.shape[1:3] == size:
        return inner
    pads = (max(0, -left), max(0, left + columns - width), max(0, -top), max(0, top + rows - height))
    return torch.nn.functional.pad(inner, (0, 0, *pads))


def apply_color(pixels: torch.Tensor, color: torch.Tensor) -> torch.Tensor:
    """Multiply each uint8 image, (N, H, W, 3), by its own 3 x 4 color matrix; round and clamp the levels to 0..255.

    `color` is int32, (12, N), in units of 2^-16; see `AugmentationDraws`.
    """
    red, green, blue = pixels.to(torch.int32).unbind(3)
    matrix = color[:, :, None, None]
    channels = []
    for row in range(0, 12, 4):
        mixed = matrix[row] * red + matrix[row + 1] * green + matrix[row + 2] * blue + matrix[row + 3]
        channels.append(((mixed + (1 << 15)) >> 16).clamp(0, 255))
    return torch.stack(channels, 3).to(torch.uint8)


def apply_color_on_cpu(pixels: torch.Tensor, color: torch.Tensor) -> torch.Tensor:
    """Do the same as `apply_color` for a few images at a time, so that the temporaries fit in the CPU's cache.

    The result has the memory layout of `pixels`.
    """
    with unfilled_memory():
        result = torch.empty_like(pixels)
    count = max(1, _BLOCK_VALUES // max(1, pixels.shape[1] * pixels.shape[2]))
    for first in range(0, len(pixels), count):
        some = slice(first, first + count)
        result[some] = apply_color(pixels[some], color[:, some])
    return result


def erase_mask(draws: AugmentationDraws, height: int, width: int) -> torch.Tensor:
    """Return a mask that is True inside the erased boxes: bool, (N, H, W)."""
    device = draws.geometry.device
    rows = torch.arange(height, device=device) - draws.box_top[:, None]
    columns = torch.arange(width, device=device) - draws.box_left[:, None]
    inside_rows = (rows >= 0) & (rows < draws.box_height[:, None])
    inside_columns = (columns >= 0) & (columns < draws.box_width[:, None])
    return inside_rows[:, :, None] & inside_columns[:, None, :]


def erase_on_cpu(result: torch.Tensor, draws: AugmentationDraws) -> None:
    """Set the erased boxes of `result`, shape (N, C, H, W), to 0 in place."""
    boxes = (draws.box_top, draws.box_left, draws.box_height, draws.box_width)
    for number, (top, left, height, width) in enumerate(zip(*(part.tolist() for part in boxes), strict=True)):
        if height:
            result[number, :, top : top + height, left : left + width] = 0


def scale_constants(mean: Sequence[float], std: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Return center, coarse, fine and bias (see `h5pack.device.normalize`): four tuples with a number per channel.

    float32 holds all of them exactly. `mean` is in 0..1, and `std` is positive.
    """
    means, deviations = np.asarray(mean, np.float64), np.asarray(std, np.float64)
    center = np.rint(255 * means)
    scale = 1 / (255 * deviations)
    coarse = _leading_bits(scale)
    bias = ((center / 255 - means) / deviations).astype(np.float32)
    return tuple(tuple(part.tolist()) for part in (center, coarse, _leading_bits(scale - coarse), bias))


def _leading_bits(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Round each value to 16 significant bits."""
    fraction, exponent = np.frexp(values)
    rounded: npt.NDArray[np.float64] = np.ldexp(np.rint(np.ldexp(fraction, _BITS)), exponent - _BITS)
    return rounded


def scale_whole(pixels: torch.Tensor, constants: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the uint8 `pixels`, (N, H, W, C), scaled to `dtype` by operations that ``torch.compile`` can fuse.

    `constants` are center, coarse, fine and bias, float32, (4, C).
    """
    center, coarse, fine, bias = constants
    steps = pixels - center
    small = torch.addcmul(bias, steps, fine) if dtype == torch.float32 else bias
    return torch.addcmul(small, steps, coarse).to(dtype)


def scale_into(out: torch.Tensor, pixels: torch.Tensor, constants: torch.Tensor, planar: bool) -> None:
    """Write scaled pixels into `out`, block by block, so that temporaries stay in the CPU's cache.

    `out` (floats) and `pixels` (uint8) are contiguous and have the same shape: (N, H, W, C), or (N, C, H, W) if
    `planar`. `constants` are center, coarse, fine and bias, float32, (4, C).
    """
    count, height, width, channels = out.shape if not planar else [out.shape[axis] for axis in (0, 2, 3, 1)]
    planes, row = (channels, width) if planar else (1, width * channels)
    together = _divisor(height, _ROW_VALUES // (planes * row))
    shape = (count, planes, height // together, together * row)
    tiled = constants[:, :, None].expand(4, planes, together * row) if planar else constants.repeat(1, together * width)
    center, coarse, fine, bias = (part.reshape(planes, 1, together * row).contiguous() for part in tiled)
    out, pixels = out.view(shape), pixels.view(shape)

    limit = _BLOCK_VALUES * torch.get_num_threads()
    images = max(1, limit // max(1, out[0].numel()))
    rows = max(1, limit // (planes * shape[3])) if images == 1 else shape[2]
    sizes = (2, min(images, count), planes, min(rows, shape[2]), shape[3])
    with unfilled_memory():
        work = torch.empty(sizes, dtype=torch.float32, device=out.device)
    for first in range(0, count, images):
        for top in range(0, shape[2], rows):
            block = (slice(first, first + images), slice(None), slice(top, top + rows))
            target, source = out[block], pixels[block]
            steps, small = (part[: target.shape[0], :, : target.shape[2]] for part in work)
            torch.sub(source, center, out=steps)
            if out.dtype == torch.float32:
                torch.addcmul(bias, steps, fine, out=small)
                torch.addcmul(small, steps, coarse, out=target)
            else:
                torch.addcmul(bias, steps, coarse, out=small)
                target.copy_(small)


def _divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`; 1 if `limit` is below 1."""
    return next(found for found in range(max(1, min(number, limit)), 0, -1) if number % found == 0)


def checked_statistics(
    mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std as tuples of equal length (1 if both are None); raise OptionsError if invalid."""
    given = f"mean is {short_repr(mean)} and std is {short_repr(std)}"
    try:
        means = None if mean is None else tuple(map(real_number, mean))
        deviations = None if std is None else tuple(map(real_number, std))
    except TypeError as error:
        raise OptionsError(f"{given}; give sequences of one number per channel", parameters=("mean", "std")) from error
    if means is None:
        means = (0.0,) * len(deviations or (1.0,))
    if deviations is None:
        deviations = (1.0,) * len(means)
    if len(means) != len(deviations) or not means:
        raise OptionsError(
            f"mean has {len(means)} channels and std has {len(deviations)}; give one number per channel for both",
            parameters=("mean", "std"),
        )
    in_range = {"mean": all(0 <= x <= 1 for x in means), "std": all(0 < x < math.inf for x in deviations)}
    for name, is_valid in in_range.items():
        if not is_valid:
            raise OptionsError(
                f"{given}; give means from 0 to 1 and positive standard deviations, for pixels scaled to 0..1 (if your "
                "numbers are for pixels in 0..255, divide them by 255)",
                parameters=(name,),
            )
    return means, deviations


def stored_statistics(dataset: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation that a dataset's file stores; raise OptionsError if it has none."""
    mean, std = getattr(dataset, "mean", None), getattr(dataset, "std", None)
    # Arrays and tensors have methods of these names.
    if mean is None or std is None or callable(mean):
        where = getattr(dataset, "path", f"a {type(dataset).__name__}")
        raise OptionsError(
            f"{where}: the dataset has no mean and std; give them to Normalize ('h5pack info FILE --stats' and "
            "h5pack.info(FILE, stats=True) measure them), or use Normalize.imagenet() for RGB images",
            path=getattr(dataset, "path", None),
        )
    return tuple(map(float, mean)), tuple(map(float, std))
