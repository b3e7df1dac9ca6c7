"""`Normalize`: batches of uint8 images to normalised floats, on the device they are on, augmented on the way."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from h5pack.errors import OptionsError
from h5pack.feed.augment import Augmentation, Draws, draw
from h5pack.feed.buffers import BufferPool
from h5pack.feed.pixel_moves import erase_on_cpu, erased, moved, moved_on_cpu
from h5pack.feed.pixel_scale import PixelScale, scale_into, scale_whole

if TYPE_CHECKING:
    from h5pack.feed.batch_key import BatchKey

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LAYOUTS = ("channels_last", "contiguous")
_CHANNELS = ("last", "first", None)
_BACKENDS = ("auto", "torch", "triton")
_POOLED = 2
"""Results on the CPU whose memory is kept for later ones: fresh memory costs more than the arithmetic."""
_POOLED_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class Normalize:
    """uint8 images to ``(image / 255 - mean) / std``, within one rounding step, in one pass.

    Flips, crops and erased boxes are part of the pass. They are drawn by each sample's key, so they depend on nothing
    but the seed, the epoch, the row, and which showing of the row it is.

    Parameters
    ----------
    mean, std : sequence of float, optional
        Of each channel, in 0..1; None: 0 and 1, so that the result is ``image / 255``, for any number of channels.
    dtype : torch.dtype
        Of the result: float32, float16 or bfloat16.
    layout : {"channels_last", "contiguous"}
        Memory format of the result, whose shape is (N, C, H, W) in either.
    channels : {"last", "first"}, optional
        Which axis of the images holds the channels: (N, H, W, C) or (N, C, H, W). None: the one that is as long as
        `mean`; without `mean` the last where it is 1 or 3, else axis 1; if both would do it is an error.
    flip : float or bool
        The probability of a horizontal flip; True: 0.5.
    crop : int
        Pad each side with so many black pixels and cut a window of the image's size at random, as torchvision's
        ``RandomCrop(size, padding=crop)``; before the flip.
    erase : float
        The probability that a box is set to 0 after normalising, which is the mean, as torchvision's
        ``RandomErasing``.
    erase_scale : tuple of float
        The share of the image's area that the box aims at: smallest, largest.
    erase_ratio : tuple of float
        Height of the box over its width: smallest, largest.
    seed : int
        Of the draws.
    backend : {"auto", "torch", "triton"}
        "auto": Triton's kernel for CUDA tensors where Triton works, torch operations for everything else. Inside
        ``torch.compile`` it is torch operations, which the compiler fuses.

    Attributes
    ----------
    keyed : bool
        Whether calls need a key: with flip, crop or erase.

    Raises
    ------
    OptionsError
        If an option makes no sense; of calls also if the images are no uint8 batch that fits, or a key is missing.
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
                raise OptionsError(f"{name} is {value!r}; give one of {', '.join(map(repr, known))}")
        largest = max(max(mean, 1 - mean) / std for mean, std in zip(self.mean, self.std, strict=True))
        if not largest <= torch.finfo(dtype).max:
            raise OptionsError(f"std {min(self.std)} makes values of {largest:.3g}, which {dtype} cannot hold")
        self.dtype = dtype
        self.layout = layout
        self.channels = channels
        probability = 0.5 if flip is True else float(flip)
        self.augmentation = Augmentation(probability, crop or 0, float(erase), erase_scale, erase_ratio)
        self.keyed = self.augmentation.on
        self.seed = int(seed)
        self.backend = backend
        self._scale = PixelScale.of(self.mean, self.std)
        self._constants: dict[tuple[str, int], torch.Tensor] = {}
        self._pool: BufferPool | None = None
        self._kernels_fail = False

    @classmethod
    def from_dataset(cls, dataset: Any, **settings: Any) -> Normalize:
        """With the mean and the deviation that a pack has stored.

        Parameters
        ----------
        dataset : H5Dataset, or a Subset or ConcatPack of such
        **settings
            As of `Normalize`.

        Raises
        ------
        OptionsError
            If the dataset has no statistics, or a ConcatPack's datasets have different ones.
        """
        found = _statistics_of(dataset)
        if len(set(found)) != 1:
            raise OptionsError("the datasets' statistics differ; give Normalize the mean and std to use")
        return cls(*found[0], **settings)

    @classmethod
    def imagenet(cls, **settings: Any) -> Normalize:
        """With the constants that models pretrained on ImageNet expect; further settings as of `Normalize`."""
        return cls(IMAGENET_MEAN, IMAGENET_STD, **settings)

    def __repr__(self) -> str:
        parts = [f"mean={_text(self.mean)}, std={_text(self.std)}", f"dtype={self.dtype}", f"layout={self.layout!r}"]
        parts += [f"channels={self.channels!r}"] if self.channels else []
        augmentation = self.augmentation
        parts += [f"flip={augmentation.flip}"] if augmentation.flip else []
        parts += [f"crop={augmentation.crop}"] if augmentation.crop else []
        if augmentation.erase:
            parts.append(f"erase={augmentation.erase}, erase_scale={augmentation.erase_scale}")
            parts.append(f"erase_ratio={augmentation.erase_ratio}")
        parts += [f"seed={self.seed}"] if self.keyed else []
        parts += [f"backend={self.backend!r}"] if self.backend != "auto" else []
        return f"Normalize({', '.join(parts)})"

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to this process stays here.
        return {**self.__dict__, "_constants": {}, "_pool": None, "_kernels_fail": False}

    def __call__(self, images: torch.Tensor, key: BatchKey | None = None) -> torch.Tensor:
        """Normalised images.

        Parameters
        ----------
        images : Tensor
            uint8, (N, H, W, C) or (N, C, H, W), with any strides, on any device.
        key : BatchKey, optional
            Needed where `keyed`.

        Returns
        -------
        Tensor
            (N, C, H, W), of `dtype`, on the same device.

        Raises
        ------
        OptionsError
        """
        pixels = self._pixels(images)
        _, height, width, channels = pixels.shape
        draws = None
        if self.keyed:
            draws = draw(self._checked_key(key, pixels), self.seed, self.augmentation, height, width)
        constants = self._constants_on(images.device, channels)
        planar = self.layout == "contiguous"
        if torch.compiler.is_compiling():
            # The compiler fuses these, into Triton's kernels on CUDA.
            return self._by_operations(pixels, constants, draws)
        if self._by_triton(images.device):
            result = self._empty(pixels)
            if self._launched(result, pixels, constants, draws):
                return result
        if images.device.type != "cpu" or not pixels.numel():
            return self._by_operations(pixels, constants, draws)
        result = self._empty(pixels)
        memory = result if planar else result.permute(0, 2, 3, 1)
        source = pixels.permute(0, 3, 1, 2) if planar else pixels
        if draws is not None and self.augmentation.moves:
            source = moved_on_cpu(pixels, draws, planar)
        scale_into(memory, source.contiguous(), constants, planar)
        if draws is not None and self.augmentation.erase:
            erase_on_cpu(result, draws)
        return result

    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        """The images as (N, H, W, C), over the same memory."""
        if not isinstance(images, torch.Tensor):
            raise OptionsError(f"the images are a {type(images).__name__}; give a uint8 tensor")
        if images.dtype.is_floating_point:
            raise OptionsError(f"the images are already float ({images.dtype}): Normalize takes uint8")
        if images.dtype != torch.uint8:
            raise OptionsError(f"the images are {images.dtype}: Normalize takes uint8")
        shape = tuple(images.shape)
        if len(shape) != 4:
            raise OptionsError(f"the images' shape is {shape}; give a batch, (N, H, W, C) or (N, C, H, W)")
        counts = {1, 3} if self._any_channels else {len(self.mean)}
        last, first = shape[3] in counts, shape[1] in counts
        channels = self.channels
        if channels is None:
            if last and first:
                raise OptionsError(f"images of shape {shape} may have their channels last or first; say channels=")
            channels = "last" if last else "first"
        found = shape[3] if channels == "last" else shape[1]
        if not self._any_channels and found != len(self.mean):
            raise OptionsError(
                f"images of shape {shape} have not the {len(self.mean)} channels that mean and std have; give "
                "as many means as there are channels, or say channels="
            )
        return images if channels == "last" else images.permute(0, 2, 3, 1)

    def _checked_key(self, key: BatchKey | None, pixels: torch.Tensor) -> BatchKey:
        if key is None:
            raise OptionsError(
                "flip, crop and erase are drawn by each sample's row; open the dataset with with_rows=True and use "
                "DeviceFeed, or call with a BatchKey"
            )
        shapes = [tuple(part.shape) for part in (key.rows, key.repeats) if isinstance(part, torch.Tensor)]
        if any(shape != (len(pixels),) for shape in shapes):
            raise OptionsError(f"the key's shapes are {shapes}, of {len(pixels)} images; give a row for each image")
        if key.rows.device == pixels.device:
            return key
        from h5pack.feed.batch_key import BatchKey

        return BatchKey(key.rows.to(pixels.device), key.epoch, key.repeats)

    def _constants_on(self, device: torch.device, channels: int) -> torch.Tensor:
        name = (str(device), channels)
        # A traced call's tensors are none that another call may keep.
        if torch.compiler.is_compiling() or name not in self._constants:
            constants = self._scale.tensor(device, channels)
            if torch.compiler.is_compiling():
                return constants
            self._constants[name] = constants
        return self._constants[name]

    def _empty(self, pixels: torch.Tensor) -> torch.Tensor:
        """A result to fill: (N, C, H, W), dense in the order of the layout."""
        planar = self.layout == "contiguous"
        count, height, width, channels = pixels.shape
        shape = (count, channels, height, width) if planar else (count, height, width, channels)
        size = self.dtype.itemsize * math.prod(shape)
        if pixels.device.type == "cpu" and size >= _POOLED_BYTES:
            result = self._pooled(count, size // count).view(self.dtype).view(shape)
        else:
            result = torch.empty(shape, dtype=self.dtype, device=pixels.device)
        return result if planar else result.permute(0, 3, 1, 2)

    def _pooled(self, count: int, row_bytes: int) -> torch.Tensor:
        """uint8, (count, row_bytes), in memory whose last user is gone, where there is some."""
        pool = self._pool
        if pool is None or pool.parts[0].row_bytes != row_bytes or pool.bytes < count * row_bytes:
            pool = BufferPool([("images", (row_bytes,), np.dtype(np.uint8))], count, False, _POOLED)
            self._pool = pool
        return pool.take(count).tensor("images")

    def _by_triton(self, device: torch.device) -> bool:
        if self.backend == "auto":
            return device.type == "cuda" and not self._kernels_fail
        return self.backend == "triton"

    def _launched(
        self, result: torch.Tensor, pixels: torch.Tensor, constants: torch.Tensor, draws: Draws | None
    ) -> bool:
        """Whether Triton's kernel filled the result; with "auto" torch operations do where it cannot."""
        try:
            from h5pack.feed import kernels
        except ImportError as error:
            if self.backend == "triton":
                raise OptionsError("backend 'triton' needs Triton: pip install triton, or leave backend out") from error
            self._kernels_fail = True
            return False
        if self.backend == "triton" and pixels.device.type != "cuda" and not kernels.interpreted():
            raise OptionsError(f"backend 'triton' needs CUDA tensors, not {pixels.device.type}; leave backend out")
        try:
            kernels.normalize(result, pixels, constants, draws, self.augmentation)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            # Triton compiles at the first call, for which a machine may lack a compiler or have too old a driver.
            if self.backend == "triton" or "CUDA error" in str(error):
                # The second is an earlier kernel's, and no fault of this one.
                raise
            _log.warning("Triton's kernel cannot be used here, torch operations are: %s", error)
            self._kernels_fail = True
            return False
        return True

    def _by_operations(self, pixels: torch.Tensor, constants: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        """The result by torch operations that run on any device and that a compiler can trace."""
        if draws is not None and self.augmentation.moves:
            pixels = moved(pixels, draws)
        result = scale_whole(pixels, constants, self.dtype)
        if draws is not None and self.augmentation.erase:
            result = result.masked_fill(erased(draws, *pixels.shape[1:3])[..., None], 0.0)
        result = result.permute(0, 3, 1, 2)
        if self.layout == "contiguous":
            return result.contiguous()
        return result.contiguous(memory_format=torch.channels_last)


def _checked_statistics(
    mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Means and deviations as tuples of one length, of which 1 stands for any number of channels."""
    try:
        means = None if mean is None else tuple(float(value) for value in mean)
        deviations = None if std is None else tuple(float(value) for value in std)
    except TypeError as error:
        raise OptionsError(f"mean {mean!r} and std {std!r}: give a sequence of a number for each channel") from error
    if means is None:
        means = (0.0,) * len(deviations or (1.0,))
    if deviations is None:
        deviations = (1.0,) * len(means)
    if len(means) != len(deviations) or not means:
        raise OptionsError(f"mean has {len(means)} channels and std has {len(deviations)}; give one of each a channel")
    for value in means:
        if not 0 <= value <= 1:
            raise OptionsError(f"mean {value} is not in 0..1; statistics of pixels in 0..255 are divided by 255 first")
    for value in deviations:
        if not 0 < value < math.inf:
            raise OptionsError(f"std {value} is no deviation; give positive numbers, in the units of pixels in 0..1")
    return means, deviations


def _statistics_of(dataset: Any) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Mean and deviation of each dataset that this one is made of."""
    if hasattr(dataset, "datasets"):
        return [pair for part in dataset.datasets for pair in _statistics_of(part)]
    if hasattr(dataset, "dataset"):
        return _statistics_of(dataset.dataset)
    mean, std = getattr(dataset, "mean", None), getattr(dataset, "std", None)
    if mean is None or std is None:
        where = getattr(dataset, "path", f"a {type(dataset).__name__}")
        raise OptionsError(f"{where}: it has no statistics; give Normalize mean and std, or use Normalize.imagenet()")
    return [(tuple(map(float, mean)), tuple(map(float, std)))]


def _text(values: tuple[float, ...]) -> str:
    return f"({', '.join(f'{value:.4g}' for value in values)}{',' if len(values) == 1 else ''})"
