"""Counts of what was read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ReadStats:
    """What was read, in this process.

    Attributes
    ----------
    rows : int
        Rows handed out of the main dataset (the images).
    chunk_hits, chunk_misses : int
        Rows that were read together with another row of their chunk, and visits to a chunk; their sum is `rows`.
    bytes_wanted, bytes_read : int
        Of all datasets: in the rows handed out, and asked of the file, where chunks may be compressed.
    reads : int
        Calls of the kernel, or of the HDF5 library.
    """

    rows: int = 0
    chunk_hits: int = 0
    chunk_misses: int = 0
    bytes_wanted: int = 0
    bytes_read: int = 0
    reads: int = 0

    @property
    def amplification(self) -> float:
        """Bytes read over bytes wanted; 1.0 before anything was read."""
        return self.bytes_read / self.bytes_wanted if self.bytes_wanted else 1.0
