"""Which file it was."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class FileIdentity:
    """By which a file that was replaced or rewritten is told from the one that was opened first.

    Attributes
    ----------
    inode, size, modified_ns : int
    """

    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, file: str | int) -> FileIdentity:
        """The identity of a file now, by its path or its descriptor."""
        status = os.stat(file)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)
