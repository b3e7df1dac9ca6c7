"""The CRC-32 of rows, as `/checksums` stores it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt


def _fastest_crc32() -> Callable[..., int]:
    # isal's and zlib's polynomial is the same; isal did 86 GB/s and zlib 5.8 GB/s on one machine, where others'
    # zlib does 1 GB/s, which is half the time of decoding a small JPEG.
    try:
        from isal import isal_zlib
    except ImportError:
        import zlib

        return zlib.crc32
    return cast("Callable[..., int]", isal_zlib.crc32)


crc32: Callable[..., int] = _fastest_crc32()
"""zlib's CRC-32 of a bytes-like object, by the fastest implementation that is installed."""


def row_checksums(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """CRC-32 of each row's bytes.

    Parameters
    ----------
    rows : ndarray, (n, ...)
        Any dtype; axis 0 is the row.

    Returns
    -------
    ndarray
        uint32, (n,).
    """
    rows = np.ascontiguousarray(rows)
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:])).view(np.uint8)
    return np.fromiter((crc32(row) for row in flat), dtype=np.uint32, count=len(rows))
