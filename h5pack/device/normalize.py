"""`Normalize`, which turns uint8 images into normalized floats on any device, with augmentation in the same pass.

The arithmetic of ``(pixel / 255 - mean) / std`` in float32 is accurate to one rounding step.

If it were computed as ``pixel * scale + bias``, results near 0 would typically lose a third of their significant bits.
Therefore the integer ``center`` nearest to ``255 * mean`` is subtracted first, which is exact. The result for
``pixel = center`` is ``bias = (center / 255 - mean) / std``. The factor ``1 / (255 * std)`` is split into
``coarse + fine`` with 16 significant bits each, so the product of either part with an 8-bit integer is exact in
float32::

    steps  = pixel - center                          exact
    small  = steps * fine + bias                     one rounding, of a value below 0.51 * coarse
    result = steps * coarse + small                  one rounding

A fused multiply-add therefore gives the same bits as a separate product and sum, so results are identical on all
devices. float16 and bfloat16 results do not need ``fine``: the relative error of ``steps * coarse + bias`` is at most
about 2^-15, and such results have at most 11 significant bits.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from h5pack.data.buffers import BufferPool, unfilled_memory
from h5pack.data.draws import BatchKey, cached_table, signed
from h5pack.device import operations
from h5pack.device.augment import (
    GRAY,
    Augmentation,
    AugmentationDraws,
    Changes,
    ColorJitter,
    draw_augmentation,
    fixed_draws,
)
from h5pack.device.loader_wrapper import base_datasets
from h5pack.device.targets import checked_fields
from h5pack.errors import OptionsError
from h5pack.images.crops import CenterCrop, RandomCrop, ResizedCrop
from h5pack.system.parameters import invalid, refuse_path, whole_number

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_POOLED = 2
"""Maximum number of CPU results whose memory is kept for reuse.

Allocating new memory would take longer than the arithmetic.
"""
_MIN_POOLED_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class Normalize:
    """A transform of uint8 images to ``(image / 255 - mean) / std`` in one pass, accurate to one rounding step.

    Crops, flips and colors are applied in the same pass, in this order; boxes are erased after normalizing. Random
    changes depend only on the seed and on each sample's `BatchKey`: its row, epoch and view, and a number that differs
    between uses of the row in an epoch.

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
        length, or neither has, calls raise `OptionsError`.
    flip : float or bool
        The probability of a horizontal flip. True: 0.5.
    crop : int, RandomCrop, CenterCrop or RandomResizedCrop, optional
        An int: pixels of black padding added on each side before a window of the image's size is cut out at random,
        like torchvision's ``RandomCrop(size, padding=crop)``. An int is never the window's size: for that, give a crop
        such as ``RandomCrop(28)``. CenterCrop and RandomResizedCrop can also resize.
    erase : float
        The probability that a box is set to 0 (the mean) after normalizing, like torchvision's ``RandomErasing``.
    erase_scale : tuple of float
        Smallest and largest target area of the box, as a fraction of the result's area.
    erase_ratio : tuple of float
        Smallest and largest height-to-width ratio of the box.
    vertical_flip : float or bool
        The probability of a vertical flip. True: 0.5.
    color : ColorJitter, optional
        Random brightness, contrast, saturation, hue and grayscale, of images with three channels.
    fields : dict, optional
        Elements of the batch that move with the images in a `DeviceFeed`. Maps the name, key or index of an element to
        "mask", "boxes" or "keypoints" (see `h5pack.device.targets`), or to None if it must not move.
    seed : int
        Seed of the random augmentation.
    backend : {"auto", "torch", "triton"}
        "auto": use a Triton kernel for CUDA tensors if Triton works, and torch operations otherwise. "torch": always
        use torch operations. "triton": use a Triton kernel, or raise an error if that is impossible. Inside
        ``torch.compile``, torch operations are always used, because the compiler fuses them.

    Attributes
    ----------
    keyed : bool
        Whether calls need a `BatchKey`. True if any change is random.

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
        crop: int | RandomCrop | ResizedCrop | None = None,
        erase: float = 0.0,
        erase_scale: tuple[float, float] = (0.02, 0.33),
        erase_ratio: tuple[float, float] = (0.3, 3.3),
        vertical_flip: float | bool = False,
        color: ColorJitter | None = None,
        fields: Mapping[Hashable, str | None] | None = None,
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        self.mean, self.std = operations.checked_statistics(mean, std)
        self._any_channels = mean is None and std is None
        for name, value, known in (
            ("dtype", dtype, (torch.float32, torch.float16, torch.bfloat16)),
            ("layout", layout, ("channels_last", "contiguous")),
            ("channels", channels, ("last", "first", None)),
            ("backend", backend, ("auto", "torch", "triton")),
        ):
            if isinstance(value, np.ndarray) or value not in known:
                raise invalid(name, value, f"give one of {', '.join(map(repr, known))}")
        largest = max(max(mean, 1 - mean) / std for mean, std in zip(self.mean, self.std, strict=True))
        if not largest <= torch.finfo(dtype).max:
            raise OptionsError(
                f"with std {self.std}, results reach {largest:.3g}, which {dtype} cannot represent; give a larger std "
                "or another dtype",
                parameters=("std",),
            )
        self.dtype = dtype
        self.layout = layout
        self.channels = channels
        across, down = (0.5 * bool(p) if isinstance(p, (bool, np.bool_)) else p for p in (flip, vertical_flip))
        level = 127.5
        if mean is not None and len(self.mean) == 3:
            level = 255 * sum(weight * value for weight, value in zip(GRAY, self.mean, strict=True))
        crop = 0 if crop is None or crop is False else crop
        self.augmentation = Augmentation(
            flip=across, crop=crop, erase=erase, erase_scale=erase_scale, erase_ratio=erase_ratio, vertical_flip=down,
            color=color, level=level,
        )  # fmt: skip
        self.keyed = self.augmentation.is_random
        self.fields = checked_fields(fields)
        self.seed = whole_number("seed", seed, 0)
        self._seed = signed(self.seed)
        self.backend = backend
        self._scale = operations.scale_constants(self.mean, self.std)
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
            If the dataset has no statistics, or the datasets of a ConcatPack have different statistics.
        """
        refuse_path("dataset", dataset)
        found = {operations.stored_statistics(part) for part in base_datasets(dataset)}
        if len(found) != 1:
            none = f"a {type(dataset).__name__} is not an H5Dataset, nor a Subset or ConcatPack of them"
            problem = "the statistics of the concatenated datasets differ" if found else none
            raise OptionsError(f"{problem}; give Normalize mean and std")
        return cls(*found.pop(), **options)

    @classmethod
    def imagenet(cls, **options: Any) -> Normalize:
        """Create a transform with the mean and standard deviation of ImageNet, which many pretrained models expect."""
        return cls(IMAGENET_MEAN, IMAGENET_STD, **options)

    def __repr__(self) -> str:
        mean, std = (tuple(float(f"{value:.4g}") for value in values) for values in (self.mean, self.std))
        options = {"mean": mean, "std": std, "dtype": self.dtype, "layout": self.layout, "channels": self.channels}
        if self.augmentation != Augmentation(level=self.augmentation.level):
            options |= {**vars(self.augmentation), "seed": self.seed}
            del options["level"]
        options["backend"] = self.backend
        return f"Normalize({', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def __getstate__(self) -> dict[str, Any]:
        # Pooled memory is not pickled. It is allocated again when it is needed.
        return {**self.__dict__, "_pool": None, "_kernels_fail": False}

    def __call__(
        self,
        images: torch.Tensor,
        key: BatchKey | None = None,
        *,
        draws: AugmentationDraws | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return normalized and augmented images.

        Parameters
        ----------
        images : Tensor
            uint8, (N, H, W, C) or (N, C, H, W), with any strides, on any device.
        key : BatchKey, optional
            The identity of each sample. Required if `keyed` is true and `draws` is None.
        draws : AugmentationDraws, optional
            What `draw` returned, to be applied instead of new draws.
        out : Tensor, optional
            Memory for the result, such as the input of a CUDA graph. It must have the result's shape, dtype, memory
            format and device.

        Returns
        -------
        Tensor
            The images as ``(N, C, *output_size)``, of type `dtype`, on the same device; `out` if that is given.
        """
        pixels = self._pixels(images)
        count, height, width, channels = pixels.shape
        size = self.augmentation.output_size(height, width)
        if out is not None:
            self._check_out(out, (count, channels, *size), images.device)
        changes = Changes(resize=self.augmentation.resize)
        if draws is not None:
            if not isinstance(draws, AugmentationDraws):
                raise invalid("draws", draws, "give what Normalize.draw returned")
            draws.check(pixels)
            # The draws may come from another Normalize, so all kinds of changes and any window are possible.
            changes = Changes(moves=True, pads=True, erases=True, resize=changes.resize)
        elif self.keyed:
            draws = self._draw(key, pixels)
            changes = self.augmentation.changes(height, width)
        elif size != (height, width) and changes.resize is None:
            (top, _), (left, _) = self.augmentation.windows(height, width)
            pixels = operations.fixed_window(pixels, top, left, size)
        constants = self._constant_tensor(images.device, channels)
        if self._by_triton(images.device):
            target = self._empty(pixels, size) if out is None else out
            args = (target, pixels, constants, draws, changes)
            kernel = "normalize" if changes.resize is None else "resize"
            if self._launched(images.device, kernel, *args) is not None:
                return target
        if torch.compiler.is_compiling() or images.device.type != "cpu" or not pixels.numel():
            result = operations.transformed(pixels, constants, draws, changes, size, self.dtype)
            return result.contiguous(memory_format=self._memory_format) if out is None else out.copy_(result)
        target = self._empty(pixels, size) if out is None else out
        operations.transform_into(target, pixels, constants, draws, changes, planar=self.layout == "contiguous")
        return target

    def draw(self, images: torch.Tensor, key: BatchKey | None = None) -> AugmentationDraws | None:
        """Return the changes that a call with these arguments would draw. Pass them as `draws`, or use them for masks.

        Parameters
        ----------
        images : Tensor
            As in calls. The values of the pixels are not used.
        key : BatchKey, optional
            The identity of each sample. Required if `keyed` is true.

        Returns
        -------
        AugmentationDraws or None
            None if calls only normalize.
        """
        pixels = self._pixels(images)
        _, height, width, _ = pixels.shape
        if self.keyed:
            return self._draw(key, pixels)
        if not isinstance(self.augmentation.crop, CenterCrop):
            return None
        (top, _), (left, _) = self.augmentation.windows(height, width)
        return fixed_draws(pixels, top, left, self.augmentation.window_size(height, width))

    def image_size(self, images: torch.Tensor) -> tuple[int, int]:
        """Return height and width of a batch of images, in pixels.

        Raises OptionsError if calls would reject the batch.
        """
        _, height, width, _ = self._pixels(images).shape
        return height, width

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of the result for images of this size, in pixels."""
        return self.augmentation.output_size(height, width)

    def _draw(self, key: BatchKey | None, pixels: torch.Tensor) -> AugmentationDraws:
        key = self._checked_key(key, pixels)
        args = (key, self._seed, self.augmentation, *pixels.shape[1:3])
        if self._by_triton(pixels.device):
            draws: AugmentationDraws | None = self._launched(pixels.device, "draw", *args)
            if draws is not None:
                return draws
        return draw_augmentation(*args)

    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Check the images and return them as (N, H, W, C), without a copy."""
        if not isinstance(images, torch.Tensor):
            raise OptionsError(f"the images are a {type(images).__name__}; give a uint8 tensor")
        if images.dtype != torch.uint8:
            raise OptionsError(f"the images have dtype {images.dtype}; give uint8 images")
        shape = tuple(images.shape)
        if len(shape) != 4:
            gray = "; for gray images (N, H, W), give images[..., None]" if len(shape) == 3 else ""
            raise OptionsError(f"the images have shape {shape}; give a batch, (N, H, W, C) or (N, C, H, W){gray}")
        counts = {1, 3} if self._any_channels else {len(self.mean)}
        last, first = shape[3] in counts, shape[1] in counts
        channels = self.channels
        if channels is None:
            if last == first and (last or self._any_channels):
                which = "may have their channels last or first" if last else "have neither 1 nor 3 channels"
                text = f"images of shape {shape} {which}; give channels='last' or 'first'"
                raise OptionsError(text, parameters=("channels",))
            channels = "last" if last else "first"
        found = shape[3] if channels == "last" else shape[1]
        if not self._any_channels and found != len(self.mean):
            other = "'first'" if channels == "last" else "'last'"
            advice = f", or channels={other}" if last or first else ""
            raise OptionsError(
                f"images of shape {shape} do not have the {len(self.mean)} channels of mean and std; give a mean "
                f"and std for each channel{advice}",
                parameters=("channels", "mean", "std"),
            )
        if self.augmentation.color is not None and found != 3:
            raise OptionsError(
                f"images of shape {shape} have {found} channels; give color only for images with 3 channels",
                parameters=("color",),
            )
        return images if channels == "last" else images.permute(0, 2, 3, 1)

    def _check_out(self, out: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
        if not isinstance(out, torch.Tensor):
            raise invalid("out", out, "give a tensor")
        found = (tuple(out.shape), out.dtype, out.device, out.is_contiguous(memory_format=self._memory_format))
        if found != (shape, self.dtype, device, True):
            raise OptionsError(
                f"out has shape {tuple(out.shape)}, {out.dtype} and strides {out.stride()}, on {out.device}; give a "
                f"tensor of shape {shape}, {self.dtype}, on {device}, in the memory format {self.layout}",
                parameters=("out",),
            )

    @property
    def _memory_format(self) -> torch.memory_format:
        return torch.contiguous_format if self.layout == "contiguous" else torch.channels_last

    def _checked_key(self, key: BatchKey | None, pixels: torch.Tensor) -> BatchKey:
        if not isinstance(key, BatchKey):
            raise OptionsError(
                f"random changes need each sample's row number, but the key is a {type(key).__name__}; either pass a "
                "BatchKey as key, or open the dataset with with_rows=True and wrap the loader in DeviceFeed"
            )
        shapes = [tuple(part.shape) for part in (key.rows, key.repeats) if isinstance(part, torch.Tensor)]
        if any(shape != (len(pixels),) for shape in shapes):
            raise OptionsError(
                f"the key's tensors have shapes {shapes}, but there are {len(pixels)} images; give one entry per image"
            )
        if key.rows.device == pixels.device:
            return key
        return dataclasses.replace(key, rows=key.rows.to(pixels.device))

    def _constant_tensor(self, device: torch.device, channels: int) -> torch.Tensor:
        """Return center, coarse, fine and bias as float32, (4, channels).

        If each is a single number, it is repeated for all channels.
        """

        def make() -> torch.Tensor:
            values = [row if len(row) > 1 else row * channels for row in self._scale]
            return torch.tensor(values, dtype=torch.float32, device=device)

        return cached_table((self._scale, channels), device, make)

    def _empty(self, pixels: torch.Tensor, output_size: tuple[int, int]) -> torch.Tensor:
        """Return an uninitialized result of shape (N, C, *output_size) in the memory format `self.layout`."""
        planar = self.layout == "contiguous"
        (count, *_, channels), (height, width) = pixels.shape, output_size
        shape = (count, channels, height, width) if planar else (count, height, width, channels)
        size = self.dtype.itemsize * math.prod(shape)
        with unfilled_memory():
            if pixels.device.type == "cpu" and size >= _MIN_POOLED_BYTES:
                result = self._pooled(count, size // count).view(self.dtype).view(shape)
            else:
                result = torch.empty(shape, dtype=self.dtype, device=pixels.device)
        return result if planar else result.permute(0, 3, 1, 2)

    def _pooled(self, count: int, row_bytes: int) -> torch.Tensor:
        """Return a uint8 tensor (count, row_bytes), if possible in the memory of a result that the user has dropped."""
        pool = self._pool
        if pool is None or pool.fields[0].row_bytes != row_bytes or pool.bytes < count * row_bytes:
            pool = self._pool = BufferPool([("images", (row_bytes,), np.dtype(np.uint8))], count, False, _POOLED)
        return pool.allocate(count).tensor("images")

    def _by_triton(self, device: torch.device) -> bool:
        if torch.compiler.is_compiling():
            return False  # torch.compile fuses the operations into one kernel.
        if self.backend == "auto":
            return device.type == "cuda" and not self._kernels_fail
        return self.backend == "triton"

    def _launched(self, device: torch.device, name: str, *args: Any) -> Any:
        """Launch the kernel "draw", "normalize" or "resize" and return its result.

        If Triton fails and `backend` is "auto", return None, and do not try Triton again in later calls. Only errors of
        importing Triton, and of compiling and loading a kernel, count as failures of Triton. Errors of a launch are
        raised in any case, because earlier kernels may have caused them.
        """
        refuse = functools.partial(OptionsError, parameters=("backend='triton'", "backend='auto'"))
        try:
            from h5pack.device.kernels import draw, launch, normalize, resize
        except ImportError as error:
            if self.backend == "triton":
                raise refuse("backend='triton' needs Triton: pip install triton, or give backend='auto'") from error
            self._kernels_fail = True
            return None
        if self.backend == "triton" and device.type != "cuda" and not launch.interpreted():
            raise refuse(f"backend='triton' needs CUDA tensors, not {device.type}; give backend='auto'")
        try:
            function: Any = {"draw": draw.draw, "resize": resize.resize}.get(name, normalize.normalize)
            return launch.run(device, function, *args)
        except launch.UnusableError as error:
            if self.backend == "triton":
                raise
            _log.warning("Triton cannot be used, so torch operations are used instead: %s", error)
            self._kernels_fail = True
            return None
