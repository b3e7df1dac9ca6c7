"""The two Triton kernels of `Normalize`. Importing this module requires Triton.

Both use the arithmetic described in `h5pack.device.normalize`, so their results equal those of the torch operations
bit for bit.

`_flat_kernel` handles contiguous (N, H, W, C) images without augmentation if the result is channels_last, too. It
treats all values as one flat array, in which the channel of a value is its index modulo C. Each program moves through
the array in steps of a multiple of C, so it loads the constants of its channels only once and keeps them in registers.

`_image_kernel` handles everything else: any strides, a contiguous result, flips, crops and erased boxes. Flips and
crops only change the index from which a pixel is loaded. A program computes a tile of rows x columns of one image. In a
channels_last result, a row is a line of pixels with all their channels; in a contiguous result, it is a line of one
channel's plane.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from h5pack.device.augment import Augmentation, AugmentationDraws

_WARPS = 4
_STORE_BYTES = 16
"""How many bytes a thread of the flat kernel stores with one instruction."""
_FLAT_PROGRAMS = 32
"""Programs of the flat kernel per multiprocessor: several times the number that run at once, to balance the load."""
_TILE_VALUES = 2048
_FUSION = True
"""Allow fused multiply-add. Results are bit-identical either way, but Triton warns if the option is not set."""


def interpreted() -> bool:
    """Return whether Triton runs kernels in its interpreter, which accepts CPU tensors."""
    return not isinstance(_flat_kernel, triton.runtime.JITFunction)


def normalize(
    result: torch.Tensor,
    pixels: torch.Tensor,
    constants: torch.Tensor,
    draws: AugmentationDraws | None,
    augmentation: Augmentation,
) -> None:
    """Write the normalized and augmented images into `result` with one kernel launch.

    `result` is float, (N, C, H, W), dense in channels_last or contiguous order; `pixels` is uint8, (N, H, W, C), with
    any strides; `constants` are centre, coarse, fine and bias, float32, (4, C). `augmentation` says which `draws` to
    apply.
    """
    if not result.numel():
        return
    is_flat = draws is None and pixels.is_contiguous() and result.permute(0, 2, 3, 1).is_contiguous()
    with torch.cuda.device(result.device) if result.is_cuda else contextlib.nullcontext():
        if is_flat:
            _launch_flat(result, pixels, constants)
        else:
            _launch_image(result, pixels, constants, draws, augmentation)


def _launch_flat(result: torch.Tensor, pixels: torch.Tensor, constants: torch.Tensor) -> None:
    channels = pixels.shape[3]
    values = 32 * _WARPS * _STORE_BYTES // result.element_size()
    processors = 1
    if result.is_cuda:
        processors = torch.cuda.get_device_properties(result.device).multi_processor_count
    programs = min(triton.cdiv(result.numel(), values), processors * _FLAT_PROGRAMS)
    # The step by which a program moves through the array must be a multiple of C.
    programs = triton.cdiv(programs, channels) * channels
    _flat_kernel[(programs,)](
        pixels,
        result,
        constants,
        result.numel(),
        programs * values,
        CHANNELS=channels,
        FINE=result.dtype == torch.float32,
        VALUES=values,
        num_warps=_WARPS,
        enable_fp_fusion=_FUSION,
    )


def _launch_image(
    result: torch.Tensor,
    pixels: torch.Tensor,
    constants: torch.Tensor,
    draws: AugmentationDraws | None,
    augmentation: Augmentation,
) -> None:
    planar = not result.permute(0, 2, 3, 1).is_contiguous()
    count, height, width, channels = pixels.shape
    lines, length = (channels * height, width) if planar else (height, width * channels)
    columns = min(triton.next_power_of_2(length), 256)
    rows = _TILE_VALUES // columns
    across, down = triton.cdiv(length, columns), triton.cdiv(lines, rows)
    extent = sum(size * stride for size, stride in zip(pixels.shape[1:], pixels.stride()[1:], strict=True))
    # Without draws, the kernel does not read these arguments, so any tensor can be passed.
    drawn: Any = [constants] * len(dataclasses.fields(AugmentationDraws)) if draws is None else vars(draws).values()
    _image_kernel[(count * across * down,)](
        pixels,
        result,
        constants,
        *drawn,
        height,
        width,
        *pixels.stride(),
        across,
        down,
        CHANNELS=channels,
        PLANAR=planar,
        MOVES=draws is not None and augmentation.moves_pixels,
        ERASES=draws is not None and augmentation.erase > 0,
        FINE=result.dtype == torch.float32,
        WIDE=max(extent, lines * length) >= 1 << 31,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=_WARPS,
        enable_fp_fusion=_FUSION,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _flat_kernel(  # type: ignore[no-untyped-def]
    pixels,
    result,
    constants,
    total,
    stride,
    CHANNELS: tl.constexpr,
    FINE: tl.constexpr,
    VALUES: tl.constexpr,
):
    offsets = tl.arange(0, VALUES)
    first = tl.program_id(0).to(tl.int64) * VALUES
    channel = ((first % CHANNELS).to(tl.int32) + offsets) % CHANNELS
    centre = tl.load(constants + channel)
    coarse = tl.load(constants + CHANNELS + channel)
    bias = tl.load(constants + 3 * CHANNELS + channel)
    if FINE:
        fine = tl.load(constants + 2 * CHANNELS + channel)
    for start in range(first, total, stride):
        start = tl.multiple_of(start, VALUES)
        if start + VALUES <= total:
            # Accesses without a mask are vectorized to 16 bytes, whatever `total` is.
            steps = tl.load(pixels + start + offsets).to(tl.float32) - centre
            small = bias
            if FINE:
                small = steps * fine + bias
            tl.store(result + start + offsets, (steps * coarse + small).to(result.dtype.element_ty))
        else:
            here = start + offsets < total
            steps = tl.load(pixels + start + offsets, mask=here, other=0).to(tl.float32) - centre
            small = bias
            if FINE:
                small = steps * fine + bias
            tl.store(result + start + offsets, (steps * coarse + small).to(result.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _image_kernel(  # type: ignore[no-untyped-def]
    pixels,
    result,
    constants,
    flips,
    tops,
    lefts,
    box_tops,
    box_lefts,
    box_heights,
    box_widths,
    height,
    width,
    stride_image,
    stride_y,
    stride_x,
    stride_channel,
    across,
    down,
    CHANNELS: tl.constexpr,
    PLANAR: tl.constexpr,
    MOVES: tl.constexpr,
    ERASES: tl.constexpr,
    FINE: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    image = (program // (across * down)).to(tl.int64)
    row = (program // across % down * ROWS + tl.arange(0, ROWS))[:, None]
    column = (program % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    if PLANAR:
        channel, y, x = row // height, row % height, column
        lines, length = height * CHANNELS, width
    else:
        channel, y, x = column % CHANNELS, row, column // CHANNELS
        lines, length = height, width * CHANNELS
    here = (row < lines) & (column < length)
    known = channel < CHANNELS
    centre = tl.load(constants + channel, mask=known, other=0)
    coarse = tl.load(constants + CHANNELS + channel, mask=known, other=0)
    bias = tl.load(constants + 3 * CHANNELS + channel, mask=known, other=0)
    inside = here
    from_y, from_x = y, x
    if MOVES:
        flip = tl.load(flips + image)
        from_y = y + tl.load(tops + image)
        from_x = tl.where(flip != 0, width - 1 - x, x) + tl.load(lefts + image)
        inside = here & (from_y >= 0) & (from_y < height) & (from_x >= 0) & (from_x < width)
    source = pixels + image * stride_image
    if WIDE:
        from_y, from_x, channel, row = from_y.to(tl.int64), from_x.to(tl.int64), channel.to(tl.int64), row.to(tl.int64)
    offsets = from_y * stride_y + from_x * stride_x + channel * stride_channel
    # Outside the image, pixels are 0, which is the black padding of the crop.
    steps = tl.load(source + offsets, mask=inside, other=0).to(tl.float32) - centre
    small = bias
    if FINE:
        small = steps * tl.load(constants + 2 * CHANNELS + channel, mask=known, other=0) + bias
    values = steps * coarse + small
    if ERASES:
        box_y, box_x = y - tl.load(box_tops + image), x - tl.load(box_lefts + image)
        boxed = (box_y >= 0) & (box_y < tl.load(box_heights + image))
        boxed = boxed & (box_x >= 0) & (box_x < tl.load(box_widths + image))
        values = tl.where(boxed, 0.0, values)
    target = result + image * lines * length
    tl.store(target + row * length + column, values.to(result.dtype.element_ty), mask=here)
