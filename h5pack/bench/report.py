"""What a bench found out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from h5pack.bench.cell import Measurement, Stored, spread_of
from h5pack.layout import CachePlan


@dataclass(frozen=True)
class Ceiling:
    """What nothing can exceed on this machine.

    Attributes
    ----------
    name : str
        "memory copy", or "sequential read".
    threads : int
    cache : str
        "hot" or "cold": what it is the ceiling of.
    speeds : tuple of float
        Images/s of each repeat.
    """

    name: str
    threads: int
    cache: str
    speeds: tuple[float, ...]


@dataclass(frozen=True)
class Recommendation:
    """What to do, on this machine and with these images.

    Attributes
    ----------
    stored : str
        Label of the `Stored` that it is about.
    convert : bool
        Whether the file is to be made; False: the one asked about is as good as it gets.
    chunk_rows : int or None
    compression : str
    batch, window, threads : int
        Of H5Loader.
    workers : int
        Of a DataLoader, where that is used.
    cache : CachePlan or None
        rdcc settings for reading the file in this order through the HDF5 library.
    judged_by : str
        "hot" or "cold": which figures decided.
    images_per_s : float
        What was measured with these settings.
    alike : tuple of str
        Labels of all that are as fast as the fastest, within what was measured.
    sure : bool
        False: too little was measured to be sure, and `reasons` say why.
    reasons : tuple of str
        In sentences.
    command : str
        The command line that makes the file; empty where none is to be made.
    code : str
        Python that reads it with these settings.
    gain : float or None
        Times as fast as the file asked about, of another making, read as people read it (one index by h5py).
    """

    stored: str
    convert: bool
    chunk_rows: int | None
    compression: str
    batch: int
    window: int
    threads: int
    workers: int
    cache: CachePlan | None
    judged_by: str
    images_per_s: float
    alike: tuple[str, ...]
    sure: bool
    reasons: tuple[str, ...]
    command: str
    code: str
    gain: float | None = None


@dataclass
class BenchReport:
    """A bench's results, filled as they come; what is there after Ctrl-C is true, and `complete` is False.

    Attributes
    ----------
    subject : str
        What was asked about: a path, or "generated images".
    kind : str
        "folder", "file" or "generated".
    images : int
        In all of it.
    row_shape : tuple of int
    row_bytes : int
    sample_rows : int
        That were read.
    files : list of Stored
    ceilings : list of Ceiling
    measurements : list of Measurement
        The sweep.
    trials : list of Measurement
        The run-off between the fastest: chunks, threads, windows, workers.
    faults : tuple of str
        What the file asked about costs its readers, by its chunks alone.
    cure : str or None
        A command that mends them.
    notes : list of str
        What was left out, and what was assumed, in sentences.
    recommendation : Recommendation or None
        None: nothing that is sure enough was measured.
    budget_seconds : float
    seconds : dict of str to float
        Of each phase.
    pack_images_per_s : float or None
        Of packing the sample.
    machine : dict
    complete : bool
    """

    subject: str
    kind: str
    images: int
    row_shape: tuple[int, ...]
    row_bytes: int
    sample_rows: int
    budget_seconds: float
    machine: dict[str, Any]
    files: list[Stored] = field(default_factory=list)
    ceilings: list[Ceiling] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    trials: list[Measurement] = field(default_factory=list)
    faults: tuple[str, ...] = ()
    cure: str | None = None
    notes: list[str] = field(default_factory=list)
    recommendation: Recommendation | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    pack_images_per_s: float | None = None
    complete: bool = False

    def to_json(self) -> dict[str, Any]:
        """The report for programs; keys are stable."""
        return {
            "benchmark": "chunk_size",
            "subject": self.subject,
            "kind": self.kind,
            "images": self.images,
            "row_shape": list(self.row_shape),
            "row_bytes": self.row_bytes,
            "sample_rows": self.sample_rows,
            "budget_seconds": self.budget_seconds,
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "pack_images_per_s": None if self.pack_images_per_s is None else round(self.pack_images_per_s, 1),
            "machine": self.machine,
            "files": [
                {name: value for name, value in asdict(stored).items() if name != "path"} for stored in self.files
            ],
            "ceilings": [
                {"name": one.name, "threads": one.threads, "cache": one.cache, "images_per_s": spread_of(one.speeds)}
                for one in self.ceilings
            ],
            "measurements": [one.to_json() for one in self.measurements],
            "trials": [one.to_json() for one in self.trials],
            "faults": list(self.faults),
            "cure": self.cure,
            "notes": list(self.notes),
            "recommendation": None if self.recommendation is None else asdict(self.recommendation),
            "complete": self.complete,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> BenchReport:
        """What `to_json` gave, for tables and pictures; paths of temporary files are not in it."""
        chosen = found["recommendation"]
        if chosen is not None:
            cache = None if chosen["cache"] is None else CachePlan(**chosen["cache"])
            lists = {name: tuple(chosen[name]) for name in ("alike", "reasons")}
            chosen = Recommendation(**{**chosen, **lists, "cache": cache})
        return cls(
            subject=found["subject"],
            kind=found["kind"],
            images=found["images"],
            row_shape=tuple(found["row_shape"]),
            row_bytes=found["row_bytes"],
            sample_rows=found["sample_rows"],
            budget_seconds=found["budget_seconds"],
            machine=found["machine"],
            files=[Stored(path="", **one) for one in found["files"]],
            ceilings=[
                Ceiling(one["name"], one["threads"], one["cache"], tuple(one["images_per_s"]["repeats"]))
                for one in found["ceilings"]
            ],
            measurements=[Measurement.from_json(one) for one in found["measurements"]],
            trials=[Measurement.from_json(one) for one in found["trials"]],
            faults=tuple(found["faults"]),
            cure=found["cure"],
            notes=list(found["notes"]),
            recommendation=chosen,
            seconds=found["seconds"],
            pack_images_per_s=found["pack_images_per_s"],
            complete=found["complete"],
        )
