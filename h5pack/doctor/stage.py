"""A stage of feeding a step: its name, and the figures that were measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from h5pack.measure.repeats import spread

COLD_STORED = "storage_cold_stored_order"
COLD = "storage_cold"
HOT = "storage_hot"
LOADER = "loader"
TRANSFORM = "transform"
COPY = "copy"
NORMALIZE = "normalize"
STEP = "step"
EVERYTHING = "everything"

NAMES = {
    COLD_STORED: "storage cold, stored order",
    COLD: "storage cold, loader's order",
    HOT: "storage hot",
    LOADER: "loader only",
    TRANSFORM: "loader and --transform",
    COPY: "host-to-device copy",
    NORMALIZE: "normalize",
    STEP: "step alone",
    EVERYTHING: "everything together",
}
"""The stages, in the order in which an image passes them."""


@dataclass(frozen=True)
class Rates:
    """Images a second, of several repeats.

    Attributes
    ----------
    median, low, high : float
        Images a second; the lowest and the highest repeat.
    repeats : int
    """

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Rates:
        """Of the repeats, each in images a second."""
        found = spread(values)
        return cls(found["median"], found["min"], found["max"], int(found["repeats"]))

    def meets(self, other: Rates) -> bool:
        """Whether the ranges overlap, so that repeats do not tell which is the larger."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Stage:
    """A stage, measured or not.

    Attributes
    ----------
    key : str
        One of `NAMES`.
    rates : Rates or None
        None: not measured.
    reason : str or None
        Why it was not measured.
    cpus_used : float or None
        CPU seconds of this process and its children over seconds; None: not known.
    images : int
        That passed in all repeats.
    note : str or None
        On what was measured.
    """

    key: str
    rates: Rates | None = None
    reason: str | None = None
    cpus_used: float | None = None
    images: int = 0
    note: str | None = None

    @property
    def name(self) -> str:
        """As a person reads it."""
        return NAMES[self.key]

    def to_json(self) -> dict[str, Any]:
        """An object for programs; keys are stable."""
        rates = self.rates
        return {
            "key": self.key,
            "name": self.name,
            "images_per_s": None if rates is None else rates.median,
            "min": None if rates is None else rates.low,
            "max": None if rates is None else rates.high,
            "repeats": 0 if rates is None else rates.repeats,
            "images": self.images,
            "cpus_used": None if self.cpus_used is None else round(self.cpus_used, 3),
            "not_measured": self.reason,
            "note": self.note,
        }
