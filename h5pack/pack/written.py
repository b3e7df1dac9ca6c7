"""What is known of all rows of a conversion while they are being written."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from h5pack.pack.journal import RowRecord


class Written:
    """Collects the records of a conversion's rows, from earlier runs and from this one.

    Parameters
    ----------
    rows : int
        Planned rows.
    channels : int

    Attributes
    ----------
    packed : ndarray
        bool, (rows,): which rows hold an image.
    settled : ndarray
        bool, (rows,): which rows are written or rejected.
    checksums : ndarray
        uint32, (rows,): CRC-32 of each row's bytes.
    reasons : dict of int to str
        Why rows were rejected.
    sums : dict of int to ndarray
        uint64, (2, C): channel sums, of the rows that were sampled.
    """

    def __init__(self, rows: int, channels: int) -> None:
        self.packed: npt.NDArray[np.bool_] = np.zeros(rows, np.bool_)
        self.settled: npt.NDArray[np.bool_] = np.zeros(rows, np.bool_)
        self.checksums: npt.NDArray[np.uint32] = np.zeros(rows, np.uint32)
        self.reasons: dict[int, str] = {}
        self.sums: dict[int, npt.NDArray[np.uint64]] = {}
        self._channels = channels

    def add(self, record: RowRecord) -> None:
        """Take a record in; a later one of the same rows wins."""
        rows = record.rows
        self.packed[rows] = record.packed
        self.settled[rows] = True
        self.checksums[rows] = record.checksums
        self.reasons.update(record.reasons)
        self.sums.update(zip(record.sampled.tolist(), record.sums, strict=True))

    def forget(self, rows: list[int]) -> None:
        """Rows that do not hold what their record says are to be written again."""
        self.packed[rows] = False
        self.settled[rows] = False

    def record(self) -> RowRecord:
        """All of it as one record."""
        sampled = np.array(sorted(self.sums), np.int64)
        sums = np.zeros((len(sampled), 2, self._channels), np.uint64)
        for place, row in enumerate(sampled.tolist()):
            sums[place] = self.sums[row]
        return RowRecord(np.arange(len(self.packed)), self.packed, self.checksums, sampled, sums, self.reasons)
