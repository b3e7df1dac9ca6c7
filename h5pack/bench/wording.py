"""Numbers and names of a bench in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from h5pack.bench.cell import Cell, Stored

NOT_MEASURED = "-"

ORDER_WORDS = {
    "sequential": "rows as they are stored",
    "window": "chunks permuted, and the rows of a window of chunks mixed",
    "full": "rows permuted one by one",
    "single": "one random index a call",
}
ENGINE_WORDS = {
    "direct": "H5Loader, beside the HDF5 library (single: H5Dataset)",
    "tuned": "through the HDF5 library, with a chunk cache that suits the order",
    "default": "plain h5py",
}


def speed_text(speed: float) -> str:
    """Images/s with three digits: 831, 8.31k, 83.1k, 1.52M."""
    if not (math.isfinite(speed) and speed > 0):
        return NOT_MEASURED
    value = float(f"{speed:.3g}")
    for size, unit in ((1e6, "M"), (1e3, "k"), (1.0, "")):
        if value >= size or size == 1.0:
            value /= size
            # Below a thousandth there is nothing to tell.
            decimals = min(3, max(0, 2 - math.floor(math.log10(value))))
            return f"{value:.{decimals}f}{unit}"
    raise AssertionError(speed)


def speed_words(speed: float) -> str:
    """Images/s in a sentence: three digits that count, with separators of thousands."""
    return f"{float(f'{speed:.3g}'):,.0f}" if speed >= 100 else f"{speed:.3g}"


def spread_text(speeds: Sequence[float]) -> str:
    """How far the farthest repeat is from the median: ±6%; nothing where there was but one."""
    if len(speeds) < 2:
        return ""
    median = statistics.median(speeds)
    far = max(max(speeds) - median, median - min(speeds)) / median
    return f"±{math.ceil(100 * far - 1e-9)}%"


def measured_text(speeds: Sequence[float]) -> str:
    """Median and spread in a sentence: 83.1k ±6%."""
    return f"{speed_text(statistics.median(speeds))} {spread_text(speeds)}".rstrip()


def times_text(ratio: float) -> str:
    """A ratio with as many digits as a noisy figure deserves: 0.92, 3.4, 31."""
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}" if ratio < 10 else f"{ratio:,.0f}"


def size_text(count: int) -> str:
    """A number of bytes with a binary unit and three digits: 64 KiB, 114 KiB, 1 MiB."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.2g} {units[0]}" if 0 < value < 1 else f"{value:.3g} {units[0]}"


def chunk_text(stored: Stored) -> str:
    """Bytes a chunk; nothing without chunks."""
    return "" if stored.chunk_bytes is None else size_text(stored.chunk_bytes)


def cell_words(cell: Cell) -> str:
    """A setting in words, without what all of its kind have in common: 36 rows, window, direct, hot."""
    return f"{cell.stored}, {cell.order}, {cell.engine}, {cell.cache}"


def plain(text: str) -> str:
    """A text of others (a path, say) without what would move a cursor, or is no Unicode: those are escaped."""
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape", "backslashreplace").decode("ascii")
        for sign in text
    )
