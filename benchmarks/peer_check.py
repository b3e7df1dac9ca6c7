"""Whether an epoch gave every image exactly once, with its label."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peer_ways.image_folder import ImageFolder, decode

_LABELS = 256


def as_array(values: Any) -> npt.NDArray[Any]:
    """An array over the memory of an array or a tensor."""
    array: npt.NDArray[Any] = values.numpy() if hasattr(values, "numpy") else np.asarray(values)
    return array


def marks(images: npt.NDArray[np.uint8], labels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """One number for each image: the sum of its pixels, times 256, plus its label.

    It is the same for channels first and last.

    Parameters
    ----------
    images : ndarray
        uint8 (n, ...).
    labels : ndarray
        Integers (n,), below 256.

    Returns
    -------
    ndarray
        int64 (n,).
    """
    sums = images.reshape(len(images), -1).sum(axis=1, dtype=np.int64)
    found: npt.NDArray[np.int64] = sums * _LABELS + labels.astype(np.int64)
    return found


def truth(source: ImageFolder, workers: int) -> npt.NDArray[np.int64]:
    """The marks of a folder's images, decoded by Pillow, int64 (N,) in the folder's order."""
    with ProcessPoolExecutor(workers) as pool:
        sums = list(pool.map(_pixel_sum, source.paths, chunksize=64))
    return np.array(sums, np.int64) * _LABELS + source.labels


def checksum(found: npt.NDArray[np.int64]) -> int:
    """The sum of all pixels, whatever the order of the images."""
    return int((found // _LABELS).sum())


def fault(found: npt.NDArray[np.int64], expected: npt.NDArray[np.int64]) -> str | None:
    """What is wrong with an epoch; None where every image came exactly once.

    Parameters
    ----------
    found, expected : ndarray
        int64, marks in any order. Two images of one mark count as two.
    """
    if np.array_equal(np.sort(found), np.sort(expected)):
        return None
    numbers = np.unique(np.concatenate([found, expected]))
    wanted, got = _counts(numbers, expected), _counts(numbers, found)
    missing, extra = int(np.maximum(wanted - got, 0).sum()), int(np.maximum(got - wanted, 0).sum())
    return (
        f"{len(found):,} images came for {len(expected):,}: {missing:,} of them are missing, and {extra:,} came twice "
        "or are none of them"
    )


def _counts(numbers: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    places = np.searchsorted(numbers, values)
    return np.bincount(places, minlength=len(numbers)).astype(np.int64)


def _pixel_sum(path: Path) -> int:
    return int(decode(path).sum(dtype=np.int64))
