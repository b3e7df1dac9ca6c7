"""What a conversion tells when it is done."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    Attributes
    ----------
    path : str
        The finished file.
    images : int
        Rows of the file.
    rejects : int
        Images that were not packed; ``OUT.rejects.csv`` and `/rejects` list them.
    bytes : int
        Size of the file.
    workers : int
        Processes that decoded.
    resumed_rows : int
        Rows that an earlier run had written.
    moved_rows : int
        Rows that moved to close the holes of images that did not decode.
    seconds : dict of str to float
        Time spent in each stage: survey (listing included), check (of an earlier run's rows), write (to the last
        pwrite), compress (where that is asked for), finish (moves, tables, fsync, rename).
    already_complete : bool
        With `resume`, whether the output was finished before this call.
    """

    path: str
    images: int
    rejects: int
    bytes: int
    workers: int
    resumed_rows: int = 0
    moved_rows: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    already_complete: bool = False
