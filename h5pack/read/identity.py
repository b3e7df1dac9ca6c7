"""Which file it was."""

from __future__ import annotations

import os
from dataclasses import dataclass

from h5pack.errors import PackChangedError


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

    def require(self, path: str, file: str | int | None = None) -> None:
        """Make sure that `path`, or a descriptor that came of it, still leads to this file.

        Raises
        ------
        PackChangedError
        """
        try:
            same = FileIdentity.of(path if file is None else file) == self
        except OSError:
            same = False
        if not same:
            raise PackChangedError(
                f"{path}: the file was replaced or rewritten since this dataset was made; make the dataset anew"
            )


@dataclass(frozen=True)
class SourceFile:
    """A file that rows come from.

    Attributes
    ----------
    path : str
        Absolute.
    identity : FileIdentity
    """

    path: str
    identity: FileIdentity
