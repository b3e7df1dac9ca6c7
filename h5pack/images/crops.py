"""Options of crops, which select the window that `Normalize(crop=...)` or `H5Loader(decode=...)` cuts out of an image.

The classes only check the options and compute sizes and positions of windows; they do not touch pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from h5pack.errors import OptionsError
from h5pack.system.parameters import invalid, real_number, whole_number

MAX_SIZE = 1 << 14
"""Largest height and width of a crop, in pixels. The resizing arithmetic multiplies two sizes in 32-bit integers."""
_MAX_RATIO = 1024
_MAX_PRODUCT = 1 << 29
"""Largest product of an image's side and its resized side. Four times the product must fit into 32 bits."""


class _Crop:
    """Base class of crops. `size` is given as an int or a pair (height, width), and stored as a pair."""

    size: int | Sequence[int]

    def __post_init__(self) -> None:
        is_pair = isinstance(self.size, Sequence) and not isinstance(self.size, (str, bytes))
        pair: tuple[Any, ...] = tuple(self.size) if is_pair else (self.size, self.size)  # type: ignore[arg-type]
        if len(pair) != 2:
            raise invalid("size", self.size, "give (height, width) in pixels")
        object.__setattr__(self, "size", tuple(whole_number("size", side, 1, MAX_SIZE) for side in pair))

    @property
    def output_size(self) -> tuple[int, int]:
        """Height and width of the result, in pixels."""
        height, width = self.size  # type: ignore[misc]
        return height, width


@dataclass(frozen=True)
class RandomCrop(_Crop):
    """A window at a random position, not resized, like torchvision's ``RandomCrop(size, padding=padding)``.

    Parameters
    ----------
    size : int or (int, int)
        Height and width of the window, in pixels. An int gives a square.
    padding : int
        Pixels of black padding on each side of the image, added before the window is cut out.

    Raises
    ------
    OptionsError
        If a value is invalid.
    """

    size: int | Sequence[int]
    padding: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "padding", whole_number("padding", self.padding, 0, MAX_SIZE))


@dataclass(frozen=True)
class CenterCrop(_Crop):
    """The central window of the image, like torchvision's ``Resize(resize)`` followed by ``CenterCrop(size)``.

    Parameters
    ----------
    size : int or (int, int)
        Height and width of the window, in pixels. An int gives a square.
    resize : int, optional
        Resize the image first (bilinear, antialiased), so that its shorter side has this many pixels. Default: the
        image is not resized.

    Raises
    ------
    OptionsError
        If a value is invalid.

    Notes
    -----
    If the window is larger than the image, the image is padded with black.
    """

    size: int | Sequence[int]
    resize: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resize is not None:
            object.__setattr__(self, "resize", whole_number("resize", self.resize, 1, MAX_SIZE))

    def resized_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width, in pixels, that an image of `height` x `width` pixels has after resizing.

        They are rounded as in torchvision.
        """
        if self.resize is None:
            return height, width
        longer = int(self.resize * max(height, width) / min(height, width))
        return (longer, self.resize) if width <= height else (self.resize, longer)

    def window(self, height: int, width: int) -> tuple[int, int]:
        """Return the window's first row and column in the resized image.

        `height` and `width` are the size of the image before resizing, in pixels. If the window is taller than the
        resized image, the first row is 0 or negative. If the window is wider, the first column is 0 or negative.
        """
        sides = zip(self.resized_size(height, width), self.output_size, strict=True)
        top, left = (round((side - size) / 2) if side >= size else -((size - side) // 2) for side, size in sides)
        return top, left


@dataclass(frozen=True)
class RandomResizedCrop(_Crop):
    """A window of random position, area and shape, resized to one size, like torchvision's ``RandomResizedCrop``.

    Parameters
    ----------
    size : int or (int, int)
        Height and width of the result, in pixels. An int gives a square. Resizing is bilinear and antialiased.
    scale : (float, float)
        Range of the window's area, as a fraction of the image's area. The area is drawn uniformly from this range.
    ratio : (float, float)
        Range of the window's width divided by its height. The ratio is drawn log-uniformly from this range.

    Raises
    ------
    OptionsError
        If a value is invalid.
    """

    size: int | Sequence[int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low, high in (("scale", 0.0, 1.0), ("ratio", 1 / _MAX_RATIO, float(_MAX_RATIO))):
            object.__setattr__(self, name, checked_range(name, getattr(self, name), low, high))

    def resized_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of a resized window, in pixels."""
        return self.output_size

    def window(self, height: int, width: int) -> tuple[int, int]:
        """Return the first row and column of the result in the resized window, which are 0."""
        return 0, 0

    def fallback(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the window to use if no drawn window fits: top, left, height and width, in pixels of the image.

        As in torchvision, this is the largest central window with the nearest allowed ratio.
        """
        window_height, window_width = height, width
        if width / height < self.ratio[0]:
            window_height = max(1, round(width / self.ratio[0]))
        elif width / height > self.ratio[1]:
            window_width = max(1, round(height * self.ratio[1]))
        return (height - window_height) // 2, (width - window_width) // 2, window_height, window_width


@dataclass(frozen=True)
class Resize(_Crop):
    """The whole image, resized to one size, like torchvision's ``Resize((height, width))``.

    Parameters
    ----------
    size : (int, int)
        Height and width of the result, in pixels. Resizing is bilinear and antialiased.

    Raises
    ------
    OptionsError
        If `size` is invalid. It must be a pair: torchvision treats an int as the length of the shorter side, so results
        could differ in size.
    """

    size: Sequence[int]

    def __post_init__(self) -> None:
        if not isinstance(self.size, Sequence):
            raise invalid(
                "size", self.size, "give (height, width), or use CenterCrop(size, resize=size) to keep the proportions"
            )
        super().__post_init__()


ResizedCrop = CenterCrop | RandomResizedCrop
"""The crops of `Normalize` that may change the scale of an image."""


def check_image_size(crop: ResizedCrop, height: int, width: int) -> None:
    """Raise OptionsError if images of `height` x `width` pixels cannot be resized with 32-bit arithmetic.

    Images without pixels cannot be resized either.
    """
    resized = crop.resized_size(height, width) if height and width else (0, 0)
    if not min(resized) or max(height * resized[0], width * resized[1]) > _MAX_PRODUCT:
        what = f"to {resized[0]} x {resized[1]} pixels; give another crop" if height and width else "pixels"
        raise OptionsError(f"crop cannot resize images of {height} x {width} {what}", parameters=("crop",))


def checked_range(name: str, value: Any, low: float, high: float) -> tuple[float, float]:
    """Return two ascending positive numbers from `low` to `high` as floats; raise OptionsError for anything else."""
    try:
        first, last = map(real_number, value)
    except (TypeError, ValueError):
        first = last = math.nan
    if not (low <= first <= last <= high and first > 0):
        raise invalid(name, value, f"give two positive numbers in ascending order, from {low:.4g} to {high:.4g}")
    return first, last


DecodeCrop = CenterCrop | RandomResizedCrop | Resize
"""The crops that can be made while images are decoded."""
