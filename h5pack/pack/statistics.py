"""Mean and standard deviation of the channels, exact: sums are integers to the last step."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from h5pack import schema


def sampled_rows(start: int, stop: int) -> npt.NDArray[np.int64]:
    """Rows of a split that the statistics are taken from: every one of a small split, every 8th of others."""
    return np.arange(start, stop, schema.statistics_step(stop - start), dtype=np.int64)


def channel_sums(row: npt.NDArray[np.uint8], layout: str) -> npt.NDArray[np.uint64]:
    """Exact sums of a row's values and of their squares.

    Pillow counts values; multiplying counts is four times faster than summing squares of an interleaved array.

    Parameters
    ----------
    row : ndarray
        uint8, (H, W, C) or (C, H, W), as `layout` says.
    layout : str
        nhwc or nchw.

    Returns
    -------
    ndarray
        uint64, (2, C).
    """
    pixels = row if layout == "nhwc" else row.transpose(1, 2, 0)
    channels = pixels.shape[2]
    image = Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if channels == 1 else pixels))
    counts = np.array(image.histogram(), np.uint64).reshape(channels, 256)
    values = np.arange(256, dtype=np.uint64)
    return np.stack([counts @ values, counts @ (values * values)])


def mean_and_std(
    total: npt.NDArray[np.uint64], rows: int, row_pixels: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and (population) standard deviation in 0..1 from exact sums.

    Parameters
    ----------
    total : ndarray
        uint64, (2, C): sums of values, and of their squares.
    rows : int
        Rows that were summed.
    row_pixels : int
        Pixels a row.

    Returns
    -------
    mean, std : ndarray
        float64, (C,); NaN where `rows` is 0.
    """
    count = rows * row_pixels
    sums, squares = ([int(value) for value in line] for line in total)
    if not count:
        return np.full(len(sums), math.nan), np.full(len(sums), math.nan)
    mean = [value / (255 * count) for value in sums]
    # Python's integers have any length: the difference of two large numbers loses nothing.
    variance = [square * count - value * value for value, square in zip(sums, squares, strict=True)]
    std = [math.sqrt(value) / (255 * count) for value in variance]
    return np.array(mean), np.array(std)
