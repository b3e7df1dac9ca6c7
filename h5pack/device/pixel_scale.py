"""The arithmetic of ``(pixel / 255 - mean) / std`` in float32, accurate to one rounding step.

If it were computed as ``pixel * scale + bias``, pixels near the mean would lose most of their digits. Therefore the
integer ``centre`` nearest to ``255 * mean`` is subtracted first, which is exact. The factor ``1 / (255 * std)`` is
split into ``coarse + fine`` with 16 significant bits each, so the product of either part with an 8-bit integer is
exact in float32::

    steps  = pixel - centre                          exact
    small  = steps * fine + bias                     one rounding, of a value below 0.51 * coarse
    result = steps * coarse + small                  one rounding

A fused multiply-add therefore gives the same bits as a separate product and sum, so results are identical on all
devices. float16 and bfloat16 results do not need ``fine``: ``steps * coarse + bias`` is within 2^-16 of the exact value
before it is rounded to at most 11 significant bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_BITS = 16
_BLOCK_VALUES = 1 << 16
"""How many values each thread processes at a time. Their temporaries (512 KiB) then stay in the CPU's cache."""
_ROW_VALUES = 1 << 12
"""Each constant is repeated up to this length, so that operations run over long rows. All four take 64 KiB then."""


@dataclass(frozen=True)
class PixelScale:
    """The constants of the arithmetic described in this module. Each has one number per channel, exact in float32."""

    centre: tuple[float, ...]
    coarse: tuple[float, ...]
    fine: tuple[float, ...]
    bias: tuple[float, ...]

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float]) -> PixelScale:
        """Compute the constants from means in 0..1 and positive standard deviations."""
        means, deviations = np.asarray(mean, np.float64), np.asarray(std, np.float64)
        centre = np.rint(255 * means)
        scale = 1 / (255 * deviations)
        coarse = _leading_bits(scale)
        bias = ((centre / 255 - means) / deviations).astype(np.float32)
        parts = (centre, coarse, _leading_bits(scale - coarse), bias)
        return cls(*(tuple(part.tolist()) for part in parts))

    def tensor(self, device: torch.device, channels: int) -> torch.Tensor:
        """Return centre, coarse, fine and bias as float32, (4, channels). Single numbers are repeated per channel."""
        rows = (self.centre, self.coarse, self.fine, self.bias)
        values = [list(row) if len(row) > 1 else list(row) * channels for row in rows]
        return torch.tensor(values, dtype=torch.float32, device=device)


def _leading_bits(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Round each value to 16 significant bits."""
    fraction, exponent = np.frexp(values)
    rounded: npt.NDArray[np.float64] = np.ldexp(np.rint(np.ldexp(fraction, _BITS)), exponent - _BITS)
    return rounded


def scale_whole(pixels: torch.Tensor, constants: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the uint8 `pixels`, (N, H, W, C), scaled to `dtype` by operations that ``torch.compile`` can fuse.

    `constants` are float32, (4, C), from `PixelScale.tensor`.
    """
    centre, coarse, fine, bias = constants
    steps = pixels - centre
    small = torch.addcmul(bias, steps, fine) if dtype == torch.float32 else bias
    return torch.addcmul(small, steps, coarse).to(dtype)


def scale_into(out: torch.Tensor, pixels: torch.Tensor, constants: torch.Tensor, planar: bool) -> None:
    """Write scaled pixels into `out`, block by block, so that temporaries stay in the CPU's cache.

    `out` (floats) and `pixels` (uint8) are contiguous and have the same shape: (N, H, W, C), or (N, C, H, W) if
    `planar`. `constants` are float32, (4, C), from `PixelScale.tensor`.
    """
    count, height, width, channels = out.shape if not planar else [out.shape[axis] for axis in (0, 2, 3, 1)]
    planes, row = (channels, width) if planar else (1, width * channels)
    together = _divisor(height, _ROW_VALUES // (planes * row))
    shape = (count, planes, height // together, together * row)
    tiled = constants[:, :, None].expand(4, planes, together * row) if planar else constants.repeat(1, together * width)
    centre, coarse, fine, bias = (part.reshape(planes, 1, together * row).contiguous() for part in tiled)
    out, pixels = out.view(shape), pixels.view(shape)

    limit = _BLOCK_VALUES * torch.get_num_threads()
    images = max(1, limit // max(1, out[0].numel()))
    rows = max(1, limit // (planes * shape[3])) if images == 1 else shape[2]
    sizes = (2, min(images, count), planes, min(rows, shape[2]), shape[3])
    work = torch.empty(sizes, dtype=torch.float32, device=out.device)
    for first in range(0, count, images):
        for top in range(0, shape[2], rows):
            block = (slice(first, first + images), slice(None), slice(top, top + rows))
            target, source = out[block], pixels[block]
            steps, small = (part[: target.shape[0], :, : target.shape[2]] for part in work)
            torch.sub(source, centre, out=steps)
            if out.dtype == torch.float32:
                torch.addcmul(bias, steps, fine, out=small)
                torch.addcmul(small, steps, coarse, out=target)
            else:
                torch.addcmul(bias, steps, coarse, out=small)
                target.copy_(small)


def _divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`; 1 if `limit` is below 1."""
    return next(found for found in range(max(1, min(number, limit)), 0, -1) if number % found == 0)
