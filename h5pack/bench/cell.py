"""One thing that a bench measures: which file is read, in which order, by which engine, and so on."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

ENOUGH_REPEATS = 3
"""That a median says something of."""


@dataclass(frozen=True)
class Stored:
    """One way in which the sample's rows are stored.

    Attributes
    ----------
    label : str
        "32 rows", "32 rows gzip", "contiguous", or "as it is".
    path : str
    images : str
        Path of the dataset of images.
    labels : str or None
        Path of the dataset of labels.
    rows : int
        Rows that are read: the first ones.
    chunk_rows : int or None
        None: contiguous, virtual, or rows of variable length.
    chunk_bytes : int or None
        Uncompressed.
    row_bytes : int
        Bytes of a row as it is handed out.
    compression : str
        Names of the filters; "none" without.
    stored_bytes : int
        Bytes in the file, of the dataset of images as a whole.
    overhead : float
        Bytes in the file over bytes of the array, of the dataset as a whole.
    own : bool
        Whether this is the file that was asked about, and not one made of it.
    """

    label: str
    path: str
    images: str
    labels: str | None
    rows: int
    chunk_rows: int | None
    chunk_bytes: int | None
    row_bytes: int
    compression: str
    stored_bytes: int
    overhead: float
    own: bool = False


@dataclass(frozen=True)
class Cell:
    """A setting.

    Attributes
    ----------
    stored : str
        Label of a `Stored`.
    order, engine, cache : str
        See `BenchSettings`.
    batch, window : int
        Rows and chunks.
    threads : int
        That read; 1 for what reads in the calling thread.
    workers : int or None
        Of a DataLoader; None: without one.
    """

    stored: str
    order: str
    engine: str
    cache: str
    batch: int
    window: int
    threads: int
    workers: int | None = None


@dataclass(frozen=True)
class Measurement:
    """What was measured of a cell.

    Attributes
    ----------
    cell : Cell
    speeds : tuple of float
        Images/s of each repeat; empty where there is none.
    amplification : float or None
        Bytes asked of the system for each byte of the images handed out; None where it is not known.
    hit_rate : float or None
        The part of the rows that came with another row of their chunk; None where it is not known.
    reason : str or None
        Why it could not be measured.
    """

    cell: Cell
    speeds: tuple[float, ...] = ()
    amplification: float | None = None
    hit_rate: float | None = None
    reason: str | None = None

    @property
    def median(self) -> float:
        """Images/s; 0 without repeats."""
        return statistics.median(self.speeds) if self.speeds else 0.0

    def settled_by(self, run_off: Measurement | None) -> Measurement:
        """What is known after a run-off: its repeats, each of a file loaded anew; with these where they are too few."""
        if run_off is None or not run_off.speeds:
            return self
        enough = len(run_off.speeds) >= ENOUGH_REPEATS
        return replace(run_off, speeds=run_off.speeds if enough else (*self.speeds, *run_off.speeds))

    def to_json(self) -> dict[str, Any]:
        """The measurement for programs; keys are stable."""
        found = asdict(self.cell)
        found["images_per_s"] = spread_of(self.speeds)
        found["amplification"] = None if self.amplification is None else round(self.amplification, 4)
        found["hit_rate"] = None if self.hit_rate is None else round(self.hit_rate, 4)
        found["reason"] = self.reason
        return found

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Measurement:
        """What `to_json` gave; figures are as round as there."""
        cell = Cell(**{field.name: found[field.name] for field in fields(Cell)})
        speeds = () if found["images_per_s"] is None else tuple(found["images_per_s"]["repeats"])
        return cls(cell, speeds, found["amplification"], found["hit_rate"], found["reason"])


def spread_of(speeds: tuple[float, ...]) -> dict[str, Any] | None:
    """Median, minimum, maximum, and each repeat, images/s; None without repeats."""
    if not speeds:
        return None
    return {
        "median": round(statistics.median(speeds), 1),
        "min": round(min(speeds), 1),
        "max": round(max(speeds), 1),
        "repeats": [round(speed, 1) for speed in speeds],
    }
