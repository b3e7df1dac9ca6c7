"""The two Triton kernels of resized crops. Importing this module requires Triton.

`_tap_kernel` writes the taps of each row and column of the results (see `h5pack.device.resize`), with windows and flips
applied. Its arithmetic is too long to be repeated for each pixel. `_resize_kernel` computes a tile of rows x columns of
one image from these taps, and then colors, normalizes and erases it like `h5pack.device.kernels.image`. In a
channels_last result, a row is a line of pixels with all their channels; in a contiguous result, it is a line of one
channel's plane.

All results equal those of the torch operations, which compute the levels (0 to 255) with integers, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from h5pack.data.buffers import unfilled_memory
from h5pack.device.augment import DRAW_ROWS, AugmentationDraws, Changes
from h5pack.device.kernels.image import _load_constants, _scaled
from h5pack.device.kernels.launch import FUSION
from h5pack.device.resize import KEPT_BITS, WEIGHT_BITS, max_taps
from h5pack.images.crops import RandomResizedCrop

_TAP_BLOCK = 128
_ROWS, _COLUMNS, _WARPS = 4, 64, 1
"""The size of a tile, and the number of warps that compute it. Each thread computes 8 values of the tile. To compute
more values, a thread needs more registers, and then too few threads run at once to hide the latency of memory. Both
were found by measuring on an H100.
"""
# Sums are shifted right by `_SHIFT` bits after the first axis, and by `_LAST_SHIFT` bits at the end. The sums start
# at `_HALF` and `_LAST_HALF`, so that the shifts round.
_SHIFT, _LAST_SHIFT = tl.constexpr(WEIGHT_BITS - KEPT_BITS), tl.constexpr(WEIGHT_BITS + KEPT_BITS)
_HALF, _LAST_HALF = tl.constexpr(1 << (_SHIFT.value - 1)), tl.constexpr(1 << (_LAST_SHIFT.value - 1))
_UNIT_BITS = tl.constexpr(WEIGHT_BITS)
# The row of each draw in `AugmentationDraws.geometry`, in the order of `DRAW_ROWS`.
_FLIP, _VERTICAL_FLIP, _TOP, _LEFT, _BOX_TOP, _BOX_LEFT, _BOX_HEIGHT, _BOX_WIDTH, _HEIGHT, _WIDTH = (
    tl.constexpr(row) for row in range(len(DRAW_ROWS))
)


def resize(
    result: torch.Tensor,
    pixels: torch.Tensor,
    constants: torch.Tensor,
    draws: AugmentationDraws | None,
    changes: Changes,
) -> torch.Tensor:
    """Write the cropped, resized, flipped, colored, normalized and erased images into `result`, and return it.

    It takes two kernel launches. The arguments are those of `kernels.normalize`; `changes.resize` is the crop.
    """
    crop = changes.resize
    assert crop is not None
    if not result.numel():
        return result
    (count, height, width, channels), (out_height, out_width) = pixels.shape, crop.output_size
    taps, is_random = max_taps(crop, height, width), isinstance(crop, RandomResizedCrop)
    # If all images have the same taps, one table is enough.
    tables = 1 if draws is None else count
    sizes = [(tables, 1 + number, length) for number, length in zip(taps, crop.output_size, strict=True)]
    with unfilled_memory():
        rows, columns = (torch.empty(size, dtype=torch.int32, device=pixels.device) for size in sizes)
    # Without draws, the kernels do not read these arguments, so any tensor can be passed.
    block = rows if draws is None else draws.geometry.contiguous()
    color = None if draws is None else draws.color
    colors = rows if color is None else color.contiguous()
    planar = not result.permute(0, 2, 3, 1).is_contiguous()
    across, down = -(-out_width * (1 if planar else channels) // _COLUMNS), -(-out_height // _ROWS)
    extents = [abs(size * stride) for size, stride in zip(pixels.shape[1:], pixels.stride()[1:], strict=True)]
    _tap_kernel[(tables, -(-max(crop.output_size) // _TAP_BLOCK), 2)](
        *(rows, columns, block, count, height, width),
        *(*crop.resized_size(height, width), *crop.window(height, width), out_height, out_width, *taps),
        RANDOM=is_random,
        FLIPS=draws is not None,
        BLOCK=_TAP_BLOCK,
        num_warps=_TAP_BLOCK // 32,
        enable_fp_fusion=FUSION,
    )
    _resize_kernel[(count * across * down,)](
        *(pixels, result, constants, rows, columns, block, colors, count),
        *(height, width, out_height, out_width, *taps, *pixels.stride(), across, down),
        CHANNELS=channels,
        PLANAR=planar,
        RANDOM=is_random,
        SHARED=draws is None,
        COLORS=color is not None,
        ERASES=changes.erases,
        FINE=result.dtype == torch.float32,
        WIDE=sum(extents) >= 1 << 31,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
        enable_fp_fusion=FUSION,
    )
    return result


# Do not compile a kernel again if the values or the alignment of these arguments change between batches.
@triton.jit(do_not_specialize=["draws", "samples"])  # type: ignore[untyped-decorator]
def _tap_kernel(  # type: ignore[no-untyped-def]
    rows, columns, draws, samples, height, width, resized_height, resized_width, top, left, out_height, out_width,
    taps_y, taps_x, RANDOM: tl.constexpr, FLIPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, extent, flip = 0, height, 0
    if tl.program_id(2) == 0:
        if RANDOM:
            begin, extent = tl.load(draws + _TOP * samples + image), tl.load(draws + _HEIGHT * samples + image)
        if FLIPS:
            flip = tl.load(draws + _VERTICAL_FLIP * samples + image)
        rows += image * (1 + taps_y) * out_height
        _write_taps(rows, output, begin, extent, flip, resized_height, top, out_height, taps_y)
    else:
        extent = width
        if RANDOM:
            begin, extent = tl.load(draws + _LEFT * samples + image), tl.load(draws + _WIDTH * samples + image)
        if FLIPS:
            flip = tl.load(draws + _FLIP * samples + image)
        columns += image * (1 + taps_x) * out_width
        _write_taps(columns, output, begin, extent, flip, resized_width, left, out_width, taps_x)


@triton.jit
def _write_taps(target, output, begin, extent, flip, resized, offset, size, taps):  # type: ignore[no-untyped-def]
    here = output < size
    pixel = tl.where(flip != 0, size - 1 - output, output) + offset
    inside = (pixel >= 0) & (pixel < resized)
    reach = 2 * tl.maximum(extent, resized)
    center = (2 * pixel + 1) * extent
    # A negative quotient is rounded towards 0 here, and is replaced with 0 in any case.
    first = tl.maximum((center - reach + resized) // (2 * resized), 0)
    total = tl.zeros_like(output)
    for tap in range(taps):
        total += _tap_weight(first + tap, center, reach, extent, resized, inside)
    total = tl.maximum(total, 1).to(tl.int64)
    tl.store(target + output, tl.maximum(begin + first, 0), mask=here)
    for tap in range(taps):
        weight = _tap_weight(first + tap, center, reach, extent, resized, inside).to(tl.int64)
        weight = ((weight << (_UNIT_BITS + 1)) + total) // (2 * total)
        tl.store(target + (1 + tap) * size + output, weight.to(tl.int32), mask=here)


@triton.jit
def _tap_weight(pixel, center, reach, extent, resized, inside):  # type: ignore[no-untyped-def]
    weight = reach - tl.abs((2 * pixel + 1) * resized - center)
    return tl.where(inside & (pixel < extent), tl.maximum(weight, 0), 0)


@triton.jit(do_not_specialize=["pixels", "draws", "colors", "samples"])  # type: ignore[untyped-decorator]
def _resize_kernel(  # type: ignore[no-untyped-def]
    pixels, result, constants, rows, columns, draws, colors, samples, height, width, out_height, out_width,
    taps_y, taps_x, stride_image, stride_y, stride_x, stride_channel, across, down,
    CHANNELS: tl.constexpr, PLANAR: tl.constexpr, RANDOM: tl.constexpr, SHARED: tl.constexpr, COLORS: tl.constexpr,
    ERASES: tl.constexpr, FINE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    image = (program // (across * down)).to(tl.int64)
    y = program // across % down * ROWS + tl.arange(0, ROWS)
    column = program % across * COLUMNS + tl.arange(0, COLUMNS)
    STEP: tl.constexpr = 1 if PLANAR else CHANNELS
    x = column // STEP
    draws += image
    count_y, count_x = taps_y, taps_x
    if RANDOM:
        # Smaller windows may have fewer taps than the largest window. Draws of another Normalize may have windows that
        # exceed the image. The minimum keeps the loops from reading taps outside of the tables.
        extent_y, extent_x = tl.load(draws + _HEIGHT * samples), tl.load(draws + _WIDTH * samples)
        count_y = tl.minimum(tl.cdiv(2 * tl.maximum(extent_y, out_height), out_height), taps_y)
        count_x = tl.minimum(tl.cdiv(2 * tl.maximum(extent_x, out_width), out_width), taps_x)
    if not SHARED:
        rows += image * (1 + taps_y) * out_height
        columns += image * (1 + taps_x) * out_width
    # Compare columns, not x: the compiler then knows that a vector is all inside or all outside, and stores it at once.
    here = (y < out_height)[:, None] & (column < out_width * STEP)[None, :]
    offsets = y[:, None].to(tl.int64) * (out_width * STEP) + column[None, :]
    boxed = here
    if ERASES:
        box_y, box_x = y - tl.load(draws + _BOX_TOP * samples), x - tl.load(draws + _BOX_LEFT * samples)
        boxed_y = (box_y >= 0) & (box_y < tl.load(draws + _BOX_HEIGHT * samples))
        boxed_x = (box_x >= 0) & (box_x < tl.load(draws + _BOX_WIDTH * samples))
        boxed = boxed_y[:, None] & boxed_x[None, :]
    source = pixels + image * stride_image
    target = result + image * CHANNELS * out_height * out_width
    if COLORS:
        # Adjacent values of a channels_last result belong to different channels. Each value needs all three channels.
        red = _resized(
            source, rows, columns, y, x, height, width, out_height, out_width,
            count_y, count_x, stride_y, stride_x, WIDE, ROWS, COLUMNS,
        )  # fmt: skip
        green = _resized(
            source + stride_channel, rows, columns, y, x, height, width, out_height, out_width,
            count_y, count_x, stride_y, stride_x, WIDE, ROWS, COLUMNS,
        )  # fmt: skip
        blue = _resized(
            source + 2 * stride_channel, rows, columns, y, x, height, width, out_height, out_width,
            count_y, count_x, stride_y, stride_x, WIDE, ROWS, COLUMNS,
        )  # fmt: skip
    for plane in range(CHANNELS if PLANAR else 1):  # Unrolled, the loop would need too many registers.
        channel = tl.full((COLUMNS,), plane, tl.int32) if PLANAR else column % CHANNELS
        if COLORS:
            row = (colors + image + 4 * channel * samples)[None, :]
            mixed = tl.load(row) * red + tl.load(row + samples) * green + tl.load(row + 2 * samples) * blue
            # Add the offset (the last number of the row), and 2^15 so that the shift rounds.
            levels = tl.minimum(tl.maximum((mixed + tl.load(row + 3 * samples) + 32768) >> 16, 0), 255)
        else:
            of_channel = channel.to(tl.int64) * stride_channel if WIDE else channel * stride_channel
            levels = _resized(
                source + of_channel, rows, columns, y, x, height, width, out_height, out_width,
                count_y, count_x, stride_y, stride_x, WIDE, ROWS, COLUMNS,
            )  # fmt: skip
        center, coarse, fine, bias = _load_constants(constants + channel, CHANNELS, FINE)
        values = _scaled(levels, center[None, :], coarse[None, :], fine[None, :], bias[None, :], FINE)
        if ERASES:
            values = tl.where(boxed, 0.0, values)
        tl.store(target + plane * out_height * out_width + offsets, values.to(result.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _resized(  # type: ignore[no-untyped-def]
    source, rows, columns, y, x, height, width, out_height, out_width, count_y, count_x, stride_y, stride_x,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return a tile of levels, int32 in 0..255, (ROWS, COLUMNS), of the channel or channels that `source` points to."""
    known_y, known_x = y < out_height, x < out_width
    first_y, first_x = tl.load(rows + y, mask=known_y, other=0), tl.load(columns + x, mask=known_x, other=0)
    if WIDE:
        first_y, first_x = first_y.to(tl.int64), first_x.to(tl.int64)
    total = tl.full((ROWS, COLUMNS), _LAST_HALF, tl.int32)
    for tap_x in range(count_x):
        # Taps without weight may lie outside of the image, so their positions are clamped.
        from_x = source + tl.minimum(first_x + tap_x, width - 1) * stride_x
        weight_x = tl.load(columns + (1 + tap_x) * out_width + x, mask=known_x, other=0)
        line = tl.full((ROWS, COLUMNS), _HALF, tl.int32)
        for tap_y in range(count_y):
            from_y = tl.minimum(first_y + tap_y, height - 1) * stride_y
            weight_y = tl.load(rows + (1 + tap_y) * out_height + y, mask=known_y, other=0)
            line += tl.load(from_x[None, :] + from_y[:, None]).to(tl.int32) * weight_y[:, None]
        total += (line >> _SHIFT) * weight_x[None, :]
    return tl.minimum(total >> _LAST_SHIFT, 255)
