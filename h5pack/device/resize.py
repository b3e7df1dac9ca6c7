"""Resized crops: antialiased bilinear resizing of uint8 images.

`resize` and the Triton kernels compute in integers, so they give the same bits on every device. `resize_on_cpu`, which
`Normalize` uses for tensors on the CPU, is faster, but its levels (0 to 255) may differ from those of `resize` by 1 (by
2 if an image shrinks more than 150 times).

The filter is that of torch's ``interpolate(mode="bilinear", antialias=True)`` and of Pillow. Rows and columns are
resized separately. Let n pixels of the image become m pixels, and let k be the larger of n and m. Then pixel p of the
image contributes to pixel i of the result with the weight::

    max(0, 2 k - |(2 p + 1) m - (2 i + 1) n|)        divided by the sum of these weights over all p

The weights are rounded to multiples of 2^-16. After the first axis, values keep 6 fractional bits, so the final levels
differ from the exact values by rounding only. The pixels p that contribute to pixel i are called the taps of pixel i.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from h5pack.device.augment import AugmentationDraws
from h5pack.device.targets import AxisMap, axes_of
from h5pack.images.crops import RandomResizedCrop, ResizedCrop

WEIGHT_BITS = 16
KEPT_BITS = 6
"""Fractional bits of pixels between the two passes of resizing. 8 + 6 + 16 bits fit into a signed 32-bit integer."""


def max_taps(crop: ResizedCrop, height: int, width: int) -> tuple[int, int]:
    """Return the largest number of rows of an image, and of columns, that contribute to a pixel of the result."""
    sides = zip((height, width), crop.resized_size(height, width), strict=True)
    rows, columns = (-(-2 * max(side, resized) // resized) for side, resized in sides)
    return rows, columns


def find_taps(
    draws: AugmentationDraws | None, crop: ResizedCrop, pixels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the taps of all rows of the results, and the taps of all columns.

    The taps of a row are the rows of the image from which it is computed. Crops and flips are taken into account. Each
    tensor is int32, (N, 1 + taps, size). Along axis 1, it holds the position of the first tap, in pixels of the image,
    and then the weights of all taps in order, in units of 2^-16. In the padding, all weights are 0. If `draws` is None,
    all images have the same taps, and N is 1 (0 for an empty batch).
    """
    _, height, width, _ = pixels.shape
    # Without draws, all images have the taps of the first one.
    images = pixels[:1] if draws is None else pixels
    rows, columns = axes_of(images, draws, crop, (height, width), crop.output_size)
    row_taps, column_taps = max_taps(crop, height, width)
    return _taps(rows, row_taps), _taps(columns, column_taps)


def _taps(axis: AxisMap, taps: int) -> torch.Tensor:
    """Return the taps along one axis (see `find_taps`)."""
    begin, extent, resized = axis.begin[:, None], axis.extent[:, None], axis.resized
    output = torch.arange(axis.size, device=begin.device)
    output = torch.where(axis.flip[:, None], axis.size - 1 - output, output) + axis.offset
    reach = 2 * extent.clamp(min=resized)
    center = (2 * output + 1) * extent
    first = torch.div(center - reach + resized, 2 * resized, rounding_mode="floor").clamp(min=0)
    pixel = first[:, None] + torch.arange(taps, device=output.device)[:, None]
    weights = (reach[:, None] - ((2 * pixel + 1) * resized - center[:, None]).abs()).clamp(min=0)
    weights = weights * ((pixel < extent[:, None]) & ((output >= 0) & (output < resized))[:, None])
    total = weights.sum(1, keepdim=True).clamp(min=1)
    weights = torch.div((weights << (WEIGHT_BITS + 1)) + total, 2 * total, rounding_mode="floor")
    return torch.cat(((begin + first).clamp(min=0)[:, None], weights), 1).to(torch.int32)


def resize(pixels: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return `pixels`, uint8 (N, H, W, C), as resized images, uint8 (N, height, width, C).

    `rows` and `columns` are what `find_taps` returned. Works on any device and inside ``torch.compile``.
    """
    count, height, width, channels = pixels.shape
    images = torch.arange(count, device=pixels.device)[:, None]
    lines = torch.arange(rows.shape[2], device=pixels.device)[:, None]
    shape = (count, rows.shape[2], width, channels)
    total = torch.full(shape, 1 << (WEIGHT_BITS - KEPT_BITS - 1), dtype=torch.int32, device=pixels.device)
    for tap in range(rows.shape[1] - 1):
        found = pixels[images, (rows[:, 0].long() + tap).clamp(0, height - 1)]
        total = total + found * rows[:, 1 + tap, :, None, None]
    partly = total >> (WEIGHT_BITS - KEPT_BITS)
    shape = (count, rows.shape[2], columns.shape[2], channels)
    total = torch.full(shape, 1 << (WEIGHT_BITS + KEPT_BITS - 1), dtype=torch.int32, device=pixels.device)
    for tap in range(columns.shape[1] - 1):
        found = partly[images[..., None], lines, (columns[:, :1].long() + tap).clamp(0, width - 1)]
        total = total + found * columns[:, 1 + tap, None, :, None]
    return (total >> (WEIGHT_BITS + KEPT_BITS)).clamp(max=255).to(torch.uint8)


def resize_on_cpu(
    pixels: torch.Tensor, draws: AugmentationDraws | None, crop: ResizedCrop, planar: bool
) -> torch.Tensor:
    """Do the same as `find_taps` and `resize`, with torch's ``interpolate``. Levels may differ (see the module).

    The result is contiguous, (N, C, height, width) if `planar`, else (N, height, width, C).
    """
    count, height, width, channels = pixels.shape
    size, resized, offset = crop.output_size, crop.resized_size(height, width), crop.window(height, width)
    shape = (count, channels, *size) if planar else (count, *size, channels)
    result = torch.zeros(shape, dtype=torch.uint8, device="cpu")
    targets = result if planar else result.permute(0, 3, 1, 2)
    sources = pixels.permute(0, 3, 1, 2)
    windows = [(0, 0, height, width)] * count
    if draws is not None and isinstance(crop, RandomResizedCrop):
        parts = (draws.top, draws.left, draws.crop_height, draws.crop_width)
        windows = list(zip(*(part.tolist() for part in parts), strict=True))
    # Windows drawn by another Normalize may exceed the image, and torch's `interpolate` (up to at least version 2.13)
    # gives wrong values for results of width 1, and for some windows of width 1. `resize` handles all of them.
    if resized[1] == 1 or any(
        min(top, left, rows - 1, columns - 2, height - top - rows, width - left - columns) < 0
        for top, left, rows, columns in windows
    ):
        result = resize(pixels, *find_taps(draws, crop, pixels))
        return result.permute(0, 3, 1, 2).contiguous() if planar else result
    flips = torch.zeros(2, count, device="cpu") if draws is None else torch.stack((draws.vertical_flip, draws.flip))
    for number, ((top, left, rows, columns), flip) in enumerate(zip(windows, flips.T.tolist(), strict=True)):
        window = sources[number : number + 1, :, top : top + rows, left : left + columns]
        # A flip of a crop costs no further copy, because `interpolate` copies windows that are not contiguous.
        window = window.flip([2 + axis for axis in (0, 1) if flip[axis]]) if any(flip) else window
        found, target = F.interpolate(window, resized, mode="bilinear", antialias=True)[0], targets[number]
        for axis in (0, 1):
            # Pixels outside of the resized image stay black.
            first = resized[axis] - size[axis] - offset[axis] if flip[axis] else offset[axis]
            begin, end = max(0, first), min(resized[axis], first + size[axis])
            found = found.narrow(1 + axis, begin, end - begin)
            target = target.narrow(1 + axis, begin - first, end - begin)
        target.copy_(found)
    return result
