"""The launches of the two Triton kernels that normalize without resizing. Importing this module requires Triton.

Both use the arithmetic described in `h5pack.device.normalize`, so their results equal those of the torch operations bit
for bit.

`_flat_kernel` handles contiguous (N, H, W, C) images without augmentation if the result is channels_last, too. It
treats all values as one flat array, in which the channel of a value is its index modulo C. Each program moves through
the array in steps that are multiples of C, so it loads its channels' constants only once and keeps them in registers.

`image_kernel` handles everything else: any strides, a contiguous result, windows, flips, colors and erased boxes.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from h5pack.device.augment import AugmentationDraws, Changes
from h5pack.device.kernels.image import _load_constants, _scaled, image_kernel
from h5pack.device.kernels.launch import FUSION

_WARPS = 4
_STORE_BYTES = 16
"""How many bytes a thread stores with one instruction."""
_FLAT_PROGRAMS = 128
"""Programs of the flat kernel per multiprocessor: many times the number that run at once, to balance the load."""
_IMAGE_WARPS = 2
"""Warps per program of the image kernel; each thread computes one vector at a time."""
_TURNS, _TURNS_OF_PLANES = 4, 2
"""Maximum number of turns of a program of the image kernel. In each turn, the program computes vectors in the same
columns, but in other lines. What depends on the columns is computed once for all turns. With more turns, there would be
too few programs to hide the latency of memory. The second number is for programs that compute all planes of an image in
each turn. Both were found by measuring on an H100.
"""
_MOST_PARTS = 65535
"""CUDA's limit for the second dimension of a grid."""


def normalize(
    result: torch.Tensor,
    pixels: torch.Tensor,
    constants: torch.Tensor,
    draws: AugmentationDraws | None,
    changes: Changes,
) -> torch.Tensor:
    """Write the normalized and augmented images into `result` with one kernel launch, and return it.

    `result` is float, (N, C, H, W), dense in channels_last or contiguous order; `pixels` is uint8, (N, H, W, C), with
    any strides; `constants` are center, coarse, fine and bias, float32, (4, C). `changes` says which `draws` to apply.
    """
    if not result.numel():
        return result
    if not pixels.numel():
        # The result of images without pixels is only padding. Black images of one pixel give the same result, and the
        # kernel can read them.
        pixels = pixels.new_zeros(len(pixels), 1, 1, pixels.shape[3])
    is_flat = draws is None and pixels.is_contiguous() and result.permute(0, 2, 3, 1).is_contiguous()
    if is_flat:
        _launch_flat(result, pixels, constants)
    else:
        _launch_image(result, pixels, constants, draws, changes)
    return result


def _launch_flat(result: torch.Tensor, pixels: torch.Tensor, constants: torch.Tensor) -> None:
    channels = pixels.shape[3]
    values = 32 * _WARPS * _STORE_BYTES // result.element_size()
    processors = 1
    if result.is_cuda:
        processors = torch.cuda.get_device_properties(result.device).multi_processor_count
    programs = min(-(-result.numel() // values), processors * _FLAT_PROGRAMS)
    # The step by which a program moves through the array must be a multiple of C.
    programs = -(-programs // channels) * channels
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
        enable_fp_fusion=FUSION,
    )


def _launch_image(
    result: torch.Tensor,
    pixels: torch.Tensor,
    constants: torch.Tensor,
    draws: AugmentationDraws | None,
    changes: Changes,
) -> None:
    count, channels, lines, width = result.shape
    values = _STORE_BYTES // result.element_size()
    vectors = 32 * _IMAGE_WARPS
    planes, length = 0, width * channels
    if not result.permute(0, 2, 3, 1).is_contiguous():
        # Planes whose first values are at different distances from multiples of 16 bytes are computed one by one.
        planes, length = (channels if lines * width % values == 0 else 1), width
    parts = count * channels if planes == 1 else count
    period, blocks = plan_lines(lines, length, values, vectors, _TURNS_OF_PLANES if planes > 1 else _TURNS)
    is_whole = length % values == 0
    sizes = [abs(size * stride) for size, stride in zip(pixels.shape[1:], pixels.stride()[1:], strict=True)]
    # Without draws, the kernel does not read these arguments, so any tensor can be passed.
    drawn = constants if draws is None else draws.geometry.contiguous()
    color = None if draws is None else draws.color
    colors = constants if color is None else color.contiguous()
    depth = -(-parts // _MOST_PARTS)
    image_kernel[(blocks if is_whole else blocks + 1, -(-parts // depth), depth)](
        *(pixels, result, constants, drawn, colors, count, *pixels.shape[1:3], lines, length),
        *(*pixels.stride(), blocks, period, parts),
        CHANNELS=channels,
        PLANES=planes,
        MOVES=changes.moves,
        PADDED=changes.pads,
        ERASES=changes.erases,
        COLORS=color is not None,
        FINE=result.dtype == torch.float32,
        # Whether offsets need 64 bits. Sizes count twice, because threads also compute offsets past the end, but do not
        # use them.
        WIDE=2 * sum(sizes) + 2 * lines * length >= 1 << 31,
        WHOLE=is_whole,
        VECTORS=vectors,
        VALUES=values,
        num_warps=_IMAGE_WARPS,
        enable_fp_fusion=FUSION,
    )


@functools.lru_cache(256)
def plan_lines(lines: int, length: int, values: int, vectors: int, turns: int) -> tuple[int, int]:
    """Return the period (the distance between successive lines of a thread) and the number of programs for a part.

    A line has `length` values. A program has a loop, in each turn of which it computes `vectors` vectors of `values`
    values. The period is such that the same columns of a thread's lines are multiples of 16 bytes apart. Of the periods
    for which a loop has at most `turns` turns, return the one with the smallest product of programs and turns, where
    the preparation of a program counts as three more turns.
    """
    least = values // math.gcd(length, values)
    per_line = max(1, length // values)

    def programs(period: int) -> int:
        return -(-period * per_line // vectors)

    first = -(-lines // (turns * least)) * least
    periods = range(first, max(first, lines) + 1, least)
    period = min(periods, key=lambda each: programs(each) * (3 + -(-lines // each)))
    return period, programs(period)


# Do not compile the kernel again for a last batch with fewer values.
@triton.jit(do_not_specialize=["total"])  # type: ignore[untyped-decorator]
def _flat_kernel(  # type: ignore[no-untyped-def]
    pixels, result, constants, total, stride, CHANNELS: tl.constexpr, FINE: tl.constexpr, VALUES: tl.constexpr
):
    offsets = tl.arange(0, VALUES)
    first = tl.program_id(0).to(tl.int64) * VALUES
    channel = ((first % CHANNELS).to(tl.int32) + offsets) % CHANNELS
    center, coarse, fine, bias = _load_constants(constants + channel, CHANNELS, FINE)
    for start in range(first, total, stride):
        start = tl.multiple_of(start, VALUES)
        if start + VALUES <= total:
            # Accesses without a mask are vectorized to 16 bytes, whatever `total` is.
            raw = tl.load(pixels + start + offsets).to(tl.int32)
            values = _scaled(raw, center, coarse, fine, bias, FINE)
            tl.store(result + start + offsets, values.to(result.dtype.element_ty))
        else:
            here = start + offsets < total
            raw = tl.load(pixels + start + offsets, mask=here, other=0).to(tl.int32)
            values = _scaled(raw, center, coarse, fine, bias, FINE)
            tl.store(result + start + offsets, values.to(result.dtype.element_ty), mask=here)
