"""`Normalize`, which turns uint8 images into normalized floats on any device, with augmentation in the same pass.

The arithmetic of ``(pixel / 255 - mean) / std`` in float32 is accurate to one rounding step.

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

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from h5pack.data.buffers import BufferPool
from h5pack.device.augment import (
    Augmentation,
    AugmentationDraws,
    crop_and_flip,
    crop_and_flip_on_cpu,
    draw_augmentation,
    erase_mask,
    erase_on_cpu,
)
from h5pack.device.batch import BatchKey
from h5pack.device.loader_wrapper import base_datasets
from h5pack.errors import OptionsError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LAYOUTS = ("channels_last", "contiguous")
_CHANNELS = ("last", "first", None)
_BACKENDS = ("auto", "torch", "triton")
_POOLED = 2
"""For how many CPU results memory is kept for reuse. Allocating new memory would take longer than the arithmetic."""
_MIN_POOLED_BYTES = 1 << 20
_BITS = 16
_BLOCK_VALUES = 1 << 16
"""How many values each thread processes at a time. Their temporaries (512 KiB) then stay in the CPU's cache."""
_ROW_VALUES = 1 << 12
"""Each constant is repeated up to this length, so that operations run over long rows. All four take 64 KiB then."""
_log = logging.getLogger(__name__)


class Normalize:
    """A transform of uint8 images to ``(image / 255 - mean) / std`` in one pass, accurate to one rounding step.

    Flips, crops and erased boxes are applied in the same pass. They depend only on the seed and on each sample's epoch,
    row, and number of earlier deliveries of the row (see `BatchKey`).

    Parameters
    ----------
    mean, std : sequence of float, optional
        One number per channel, for pixel values scaled to 0..1. Default: mean 0 and std 1 for all channels.
    dtype : torch.dtype
        Type of the result: float32, float16 or bfloat16.
    layout : {"channels_last", "contiguous"}
        Memory format of the result. Its shape is (N, C, H, W) in both cases.
    channels : {"last", "first"}, optional
        Which axis of the images is the channel axis: (N, H, W, C) or (N, C, H, W). Default: the axis whose length is
        the length of `mean` and `std`, or the axis of length 1 or 3 if neither is given. If both axes have such a
        length, calls raise `OptionsError`.
    flip : float or bool
        The probability of a horizontal flip. True: 0.5.
    crop : int
        Pixels of black padding added on each side before a window of the image's size is cut out at random, like
        torchvision's ``RandomCrop(size, padding=crop)``. The crop is applied before the flip.
    erase : float
        The probability that a box is set to 0 (the mean) after normalizing, like torchvision's ``RandomErasing``.
    erase_scale : tuple of float
        Smallest and largest target area of the box, as a fraction of the image's area.
    erase_ratio : tuple of float
        Smallest and largest height-to-width ratio of the box.
    seed : int
        Seed of the random augmentation.
    backend : {"auto", "torch", "triton"}
        "auto": use a Triton kernel for CUDA tensors if Triton works, and torch operations otherwise. Inside
        ``torch.compile``, torch operations are always used, because the compiler fuses them.

    Attributes
    ----------
    keyed : bool
        Whether calls need a `BatchKey`. True if flip, crop or erase is enabled.

    Raises
    ------
    OptionsError
        If an option is invalid. Calls raise it if the images are not a uint8 batch with the expected number of
        channels, or if a required key is missing.
    """

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        layout: str = "channels_last",
        channels: str | None = None,
        flip: float | bool = False,
        crop: int | None = None,
        erase: float = 0.0,
        erase_scale: tuple[float, float] = (0.02, 0.33),
        erase_ratio: tuple[float, float] = (0.3, 3.3),
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        self.mean, self.std = _checked_statistics(mean, std)
        self._any_channels = mean is None and std is None
        for name, value, known in (
            ("dtype", dtype, _DTYPES),
            ("layout", layout, _LAYOUTS),
            ("channels", channels, _CHANNELS),
            ("backend", backend, _BACKENDS),
        ):
            if value not in known:
                raise OptionsError(
                    f"{name} is {value!r}; give one of {', '.join(map(repr, known))}", parameters=(name,)
                )
        largest = max(max(mean, 1 - mean) / std for mean, std in zip(self.mean, self.std, strict=True))
        if not largest <= torch.finfo(dtype).max:
            raise OptionsError(
                f"std {min(self.std)} makes values of {largest:.3g}, which {dtype} cannot hold; give a larger std or "
                "another dtype",
                parameters=("std",),
            )
        self.dtype = dtype
        self.layout = layout
        self.channels = channels
        probability = 0.5 if flip is True else float(flip)
        self.augmentation = Augmentation(probability, crop or 0, float(erase), erase_scale, erase_ratio)
        self.keyed = self.augmentation.enabled
        self.seed = int(seed)
        self.backend = backend
        self._scale = scale_constants(self.mean, self.std)
        self._constants: dict[tuple[str, int], torch.Tensor] = {}
        self._pool: BufferPool | None = None
        self._kernels_fail = False

    @classmethod
    def from_dataset(cls, dataset: Any, **options: Any) -> Normalize:
        """Create a transform with the mean and standard deviation that are stored in an h5pack file.

        Parameters
        ----------
        dataset : H5Dataset, or Subset or ConcatPack of H5Datasets
        **options
            Further parameters of `Normalize`.

        Raises
        ------
        OptionsError
            If the dataset has no statistics, or the datasets of a ConcatPack have different ones.
        """
        found = {_statistics_of(part) for part in base_datasets(dataset)}
        if len(found) != 1:
            raise OptionsError("the statistics of the concatenated datasets differ; give Normalize mean and std")
        return cls(*found.pop(), **options)

    @classmethod
    def imagenet(cls, **options: Any) -> Normalize:
        """Create a transform with the mean and standard deviation of ImageNet, which many pretrained models expect."""
        return cls(IMAGENET_MEAN, IMAGENET_STD, **options)

    def __repr__(self) -> str:
        mean, std = (tuple(float(f"{value:.4g}") for value in values) for values in (self.mean, self.std))
        options = {"mean": mean, "std": std, "dtype": self.dtype, "layout": self.layout, "channels": self.channels}
        if self.keyed:
            options |= {**vars(self.augmentation), "seed": self.seed}
        options["backend"] = self.backend
        return f"Normalize({', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def __getstate__(self) -> dict[str, Any]:
        # Device tensors and pooled memory are not pickled. They are created again when they are needed.
        return {**self.__dict__, "_constants": {}, "_pool": None, "_kernels_fail": False}

    def __call__(self, images: torch.Tensor, key: BatchKey | None = None) -> torch.Tensor:
        """Return normalized and augmented images.

        Parameters
        ----------
        images : Tensor
            uint8, (N, H, W, C) or (N, C, H, W), with any strides, on any device.
        key : BatchKey, optional
            The identity of each sample. Required if `keyed` is true.

        Returns
        -------
        Tensor
            The images as (N, C, H, W), of type `dtype`, on the same device.
        """
        pixels = self._pixels(images)
        _, height, width, channels = pixels.shape
        draws = None
        if self.keyed:
            draws = draw_augmentation(self._checked_key(key, pixels), self.seed, self.augmentation, height, width)
        if torch.compiler.is_compiling():
            # torch.compile fuses these operations into one kernel. Its tensors are symbolic and must not be cached.
            return self._by_operations(pixels, self._constant_tensor(images.device, channels), draws)
        name = (str(images.device), channels)
        if name not in self._constants:
            self._constants[name] = self._constant_tensor(images.device, channels)
        constants = self._constants[name]
        planar = self.layout == "contiguous"
        if self._by_triton(images.device):
            result = self._empty(pixels)
            if self._launched(result, pixels, constants, draws):
                return result
        if images.device.type != "cpu" or not pixels.numel():
            return self._by_operations(pixels, constants, draws)
        result = self._empty(pixels)
        memory = result if planar else result.permute(0, 2, 3, 1)
        source = pixels.permute(0, 3, 1, 2) if planar else pixels
        if draws is not None and self.augmentation.moves_pixels:
            source = crop_and_flip_on_cpu(pixels, draws, planar)
        scale_into(memory, source.contiguous(), constants, planar)
        if draws is not None and self.augmentation.erase:
            erase_on_cpu(result, draws)
        return result

    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Check the images and return them as (N, H, W, C), without a copy."""
        if not isinstance(images, torch.Tensor):
            raise OptionsError(f"the images are a {type(images).__name__}; give a uint8 tensor")
        if images.dtype != torch.uint8:
            raise OptionsError(f"the images have dtype {images.dtype}; give uint8 images")
        shape = tuple(images.shape)
        if len(shape) != 4:
            raise OptionsError(f"the images have shape {shape}; give a batch, (N, H, W, C) or (N, C, H, W)")
        counts = {1, 3} if self._any_channels else {len(self.mean)}
        last, first = shape[3] in counts, shape[1] in counts
        channels = self.channels
        if channels is None:
            if last and first:
                raise OptionsError(
                    f"images of shape {shape} may have their channels last or first; give channels='last' or 'first'",
                    parameters=("channels",),
                )
            channels = "last" if last else "first"
        found = shape[3] if channels == "last" else shape[1]
        if not self._any_channels and found != len(self.mean):
            raise OptionsError(
                f"images of shape {shape} do not have the {len(self.mean)} channels of mean and std; give a mean "
                "and std for each channel, or set channels to 'last' or 'first'",
                parameters=("channels", "mean", "std"),
            )
        return images if channels == "last" else images.permute(0, 2, 3, 1)

    def _checked_key(self, key: BatchKey | None, pixels: torch.Tensor) -> BatchKey:
        if key is None:
            raise OptionsError(
                "flip, crop and erase derive their random numbers from each sample's row number; either pass a "
                "BatchKey as key, or open the dataset with with_rows=True and wrap the loader in DeviceFeed"
            )
        shapes = [tuple(part.shape) for part in (key.rows, key.repeats) if isinstance(part, torch.Tensor)]
        if any(shape != (len(pixels),) for shape in shapes):
            raise OptionsError(
                f"the key's tensors have shapes {shapes}, but there are {len(pixels)} images; give one entry per image"
            )
        if key.rows.device == pixels.device:
            return key
        return BatchKey(key.rows.to(pixels.device), key.epoch, key.repeats)

    def _constant_tensor(self, device: torch.device, channels: int) -> torch.Tensor:
        """Return centre, coarse, fine and bias as float32, (4, channels). Single numbers are repeated per channel."""
        values = [row if len(row) > 1 else row * channels for row in self._scale]
        return torch.tensor(values, dtype=torch.float32, device=device)

    def _empty(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised result of shape (N, C, H, W) in the memory format `self.layout`."""
        planar = self.layout == "contiguous"
        count, height, width, channels = pixels.shape
        shape = (count, channels, height, width) if planar else (count, height, width, channels)
        size = self.dtype.itemsize * math.prod(shape)
        if pixels.device.type == "cpu" and size >= _MIN_POOLED_BYTES:
            result = self._pooled(count, size // count).view(self.dtype).view(shape)
        else:
            result = torch.empty(shape, dtype=self.dtype, device=pixels.device)
        return result if planar else result.permute(0, 3, 1, 2)

    def _pooled(self, count: int, row_bytes: int) -> torch.Tensor:
        """Return a uint8 tensor (count, row_bytes), in the memory of an earlier result if the user has dropped that."""
        pool = self._pool
        if pool is None or pool.fields[0].row_bytes != row_bytes or pool.bytes < count * row_bytes:
            pool = self._pool = BufferPool([("images", (row_bytes,), np.dtype(np.uint8))], count, False, _POOLED)
        return pool.allocate(count).tensor("images")

    def _by_triton(self, device: torch.device) -> bool:
        if self.backend == "auto":
            return device.type == "cuda" and not self._kernels_fail
        return self.backend == "triton"

    def _launched(
        self, result: torch.Tensor, pixels: torch.Tensor, constants: torch.Tensor, draws: AugmentationDraws | None
    ) -> bool:
        """Fill `result` with the Triton kernel and return True. With "auto", return False if Triton fails.

        After a failure with "auto", later calls do not try Triton again.
        """
        try:
            from h5pack.device import kernels
        except ImportError as error:
            if self.backend == "triton":
                raise OptionsError(
                    "backend='triton' needs Triton: pip install triton, or give backend='auto'",
                    parameters=("backend='triton'", "backend='auto'"),
                ) from error
            self._kernels_fail = True
            return False
        if self.backend == "triton" and pixels.device.type != "cuda" and not kernels.interpreted():
            raise OptionsError(
                f"backend='triton' needs CUDA tensors, not {pixels.device.type}; give backend='auto'",
                parameters=("backend='triton'", "backend='auto'"),
            )
        try:
            kernels.normalize(result, pixels, constants, draws, self.augmentation)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            # Triton compiles the kernel at the first call, which fails without a C compiler or with too old a driver.
            # An AcceleratorError (torch 2.8 or newer) was caused by an earlier kernel, so it is raised in any case.
            if self.backend == "triton" or isinstance(error, getattr(torch, "AcceleratorError", ())):
                raise
            _log.warning("the Triton kernel failed, so torch operations are used instead: %s", error)
            self._kernels_fail = True
            return False
        return True

    def _by_operations(
        self, pixels: torch.Tensor, constants: torch.Tensor, draws: AugmentationDraws | None
    ) -> torch.Tensor:
        """Compute the result with torch operations, which run on any device and inside ``torch.compile``."""
        if draws is not None and self.augmentation.moves_pixels:
            pixels = crop_and_flip(pixels, draws)
        result = scale_whole(pixels, constants, self.dtype)
        if draws is not None and self.augmentation.erase:
            result = result.masked_fill(erase_mask(draws, *pixels.shape[1:3])[..., None], 0.0)
        result = result.permute(0, 3, 1, 2)
        if self.layout == "contiguous":
            return result.contiguous()
        return result.contiguous(memory_format=torch.channels_last)


def _checked_statistics(
    mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Check mean and std, and return them as tuples of equal length. If both are None, the length is 1."""
    try:
        means = None if mean is None else tuple(map(float, mean))
        deviations = None if std is None else tuple(map(float, std))
    except TypeError as error:
        raise OptionsError(
            f"mean is {mean!r} and std is {std!r}; give sequences of one number per channel", parameters=("mean", "std")
        ) from error
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
                f"mean is {means} and std is {deviations}; give means from 0 to 1 and positive standard deviations, "
                "for pixels scaled to 0..1 (if they are for pixels in 0..255, divide them by 255)",
                parameters=(name,),
            )
    return means, deviations


def _statistics_of(dataset: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation that are stored in the file of a dataset."""
    mean, std = getattr(dataset, "mean", None), getattr(dataset, "std", None)
    if mean is None or std is None:
        where = getattr(dataset, "path", f"a {type(dataset).__name__}")
        raise OptionsError(
            f"{where}: the dataset has no mean and std; give them to Normalize, or use Normalize.imagenet()",
            path=getattr(dataset, "path", None),
        )
    return tuple(map(float, mean)), tuple(map(float, std))


def scale_constants(mean: Sequence[float], std: Sequence[float]) -> list[list[float]]:
    """Return centre, coarse, fine and bias of each channel, exact in float32, for means in 0..1 and positive `std`."""
    means, deviations = np.asarray(mean, np.float64), np.asarray(std, np.float64)
    centre = np.rint(255 * means)
    scale = 1 / (255 * deviations)
    coarse = _leading_bits(scale)
    bias = ((centre / 255 - means) / deviations).astype(np.float32)
    return [part.tolist() for part in (centre, coarse, _leading_bits(scale - coarse), bias)]


def _leading_bits(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Round each value to 16 significant bits."""
    fraction, exponent = np.frexp(values)
    rounded: npt.NDArray[np.float64] = np.ldexp(np.rint(np.ldexp(fraction, _BITS)), exponent - _BITS)
    return rounded


def scale_whole(pixels: torch.Tensor, constants: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the uint8 `pixels`, (N, H, W, C), scaled to `dtype` by operations that ``torch.compile`` can fuse.

    `constants` are centre, coarse, fine and bias, float32, (4, C).
    """
    centre, coarse, fine, bias = constants
    steps = pixels - centre
    small = torch.addcmul(bias, steps, fine) if dtype == torch.float32 else bias
    return torch.addcmul(small, steps, coarse).to(dtype)


def scale_into(out: torch.Tensor, pixels: torch.Tensor, constants: torch.Tensor, planar: bool) -> None:
    """Write scaled pixels into `out`, block by block, so that temporaries stay in the CPU's cache.

    `out` (floats) and `pixels` (uint8) are contiguous and have the same shape: (N, H, W, C), or (N, C, H, W) if
    `planar`. `constants` are centre, coarse, fine and bias, float32, (4, C).
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
