"""A folder for temporary packs, which is gone afterwards, whatever happened."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from h5pack.errors import NoSpaceError, OptionsError
from h5pack.machine import free_bytes

_PREFIX = ".h5pack-bench-"
_LOCK = "lock"


class Scratch:
    """Makes the folder, and removes it in the end; also those that runs which were killed left beside it.

    Parameters
    ----------
    parent : path, optional
        Where: on the disk whose speed matters. None: the working directory, or the system's folder for temporary files
        where nothing may be written there.

    Attributes
    ----------
    path : Path

    Raises
    ------
    OptionsError
        If nothing can be written there.
    """

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        wanted = Path.cwd() if parent is None else Path(parent)
        if parent is None and not os.access(wanted, os.W_OK | os.X_OK):
            wanted = Path(tempfile.gettempdir())
        self.parent = wanted
        try:
            _remove_left(wanted)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=wanted))
        except OSError as error:
            raise OptionsError(
                f"{wanted}: no temporary files can be made there ({error.strerror}); give --scratch a folder"
            ) from error
        self._lock = _locked(self.path / _LOCK, os.O_CREAT)

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def require(self, size: int) -> None:
        """Make sure that so many bytes fit.

        Raises
        ------
        NoSpaceError
        """
        free = free_bytes(self.path)
        if size > free:
            raise NoSpaceError(
                f"{self.parent}: temporary packs need {size:,} bytes, and {free:,} are free; give --scratch another "
                "folder, or fewer --rows or chunk sizes"
            )


def _locked(path: Path, flags: int) -> int | None:
    """A descriptor of a file that only this process has locked; None where another one has, or locks are unknown."""
    try:
        import fcntl

        descriptor = os.open(path, os.O_RDWR | flags, 0o600)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_left(parent: Path) -> None:
    """Remove the folders of runs that are no more: a dead process holds no lock."""
    for folder in parent.glob(f"{_PREFIX}*"):
        descriptor = _locked(folder / _LOCK, 0)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
            os.close(descriptor)
