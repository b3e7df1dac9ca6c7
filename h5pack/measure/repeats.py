"""Repeats of a measurement: in which order, and how far apart."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum, maximum and count of repeats."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "repeats": len(values),
    }


def interleaved(names: Sequence[str], repeats: int) -> Iterator[str]:
    """Names in turn, forwards and backwards, so that a drift of the machine's speed meets all alike."""
    for repeat in range(repeats):
        yield from names if repeat % 2 == 0 else reversed(names)
