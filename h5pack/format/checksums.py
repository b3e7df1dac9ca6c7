"""CRC-32 checksums of rows, which a pack stores in its group `/checksums`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.system.machine import optional_module

# isal and zlib compute the same checksum. On one machine isal reached 86 GB/s and zlib 5.8 GB/s. On other machines zlib
# reaches only 1 GB/s. There, the checksum of a row takes half as long as decoding a small JPEG.
fastest_zlib: Any = optional_module("isal.isal_zlib") or zlib

crc32: Callable[..., int] = fastest_zlib.crc32
"""Return the CRC-32 of a bytes-like object, as zlib defines it. Uses isal, which is faster, if isal is installed."""


def row_checksums(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of each row's bytes, uint32 (n,). `rows`, (n, ...), may have any dtype."""
    rows = np.ascontiguousarray(rows)
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:])).view(np.uint8)
    return np.fromiter((crc32(row) for row in flat), dtype=np.uint32, count=len(rows))
