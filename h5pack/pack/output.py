"""The names that belong to an output, and the lock that keeps a second conversion out."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from h5pack.errors import NoSpaceError, OutputBusyError, OutputExistsError, SourceError
from h5pack.machine import free_bytes

# A killed conversion's workers notice within milliseconds; two users' conversions stay.
_LOCK_WAIT_SECONDS = 3.0


@dataclass(frozen=True)
class Output:
    """Where a conversion writes.

    Attributes
    ----------
    final : Path
        The output, complete or absent.
    """

    final: Path

    @property
    def partial(self) -> Path:
        """The file under construction."""
        return self._beside(".partial")

    @property
    def journal(self) -> Path:
        """The folder of what is done."""
        return self._beside(".partial.journal")

    @property
    def finish(self) -> Path:
        """The sparse file that lends `partial` its last metadata."""
        return self._beside(".partial.finish")

    @property
    def compressed(self) -> Path:
        """The compressed copy of `partial`, which takes its name when it is whole."""
        return self._beside(".partial.compressed")

    @property
    def rejects(self) -> Path:
        """The table of images that were not packed."""
        return self._beside(".rejects.csv")

    def _beside(self, ending: str) -> Path:
        return self.final.with_name(self.final.name + ending)

    def check(self, overwrite: bool, resume: bool) -> None:
        """Refuse early what would fail late.

        Raises
        ------
        OutputBusyError
            If another conversion is writing it.
        OutputExistsError
            If the output, or an unfinished conversion to it, is in the way.
        SourceError
            If the folder for it is missing.
        """
        require_writable(self.final.parent)
        if self.final.is_dir():
            raise OutputExistsError(f"{self.final}: is a folder; name a file")
        if self.final.exists() and not overwrite and not resume:
            raise OutputExistsError(f"{self.final}: exists; give another name, or --overwrite to replace it")
        if self.partial.exists() and not overwrite and not resume:
            if _is_locked(self.partial):
                raise OutputBusyError(_busy(self))
            raise OutputExistsError(
                f"{self.partial}: an unfinished conversion; continue it with --resume, or start over with --overwrite"
            )

    def require_space(self, needed: int) -> None:
        """Refuse a conversion that cannot fit; what `partial` and `compressed` already hold counts as had.

        Raises
        ------
        NoSpaceError
        """
        held = 0
        for path in (self.partial, self.compressed):
            with contextlib.suppress(FileNotFoundError):
                held += os.stat(path).st_blocks * 512
        free = free_bytes(self.final.parent)
        if needed - held > free:
            raise NoSpaceError(
                f"{self.final}: needs {needed - held:,} bytes more and {self.final.parent} has {free:,} free; make "
                "room or choose another output, then run the same command with --resume"
            )

    def journal_identity(self) -> tuple[int, int] | None:
        """Device and inode of the journal's folder; None without one."""
        try:
            status = os.stat(self.journal)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def remove_leftovers(self) -> None:
        """Remove the journal, the finishing file and the compressed copy; `partial` stays."""
        shutil.rmtree(self.journal, ignore_errors=True)
        self.finish.unlink(missing_ok=True)
        self.compressed.unlink(missing_ok=True)


class OutputLock:
    """An flock on ``OUT.partial``, held from its creation to its renaming.

    Parameters
    ----------
    output : Output

    Raises
    ------
    OutputBusyError
        If another conversion holds it.
    """

    def __init__(self, output: Output) -> None:
        self._path = output.partial
        self.descriptor = lock_file(output.partial, _busy(output))

    def renew(self) -> None:
        """Put an empty file of a new inode in place, and lock it.

        A worker of an earlier conversion that hangs somewhere still has the old one open, and may write into it.
        """
        import fcntl

        os.unlink(self._path)
        fresh = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):
            fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(self.descriptor)
        self.descriptor = fresh

    def replace(self, path: Path) -> None:
        """Rename the file at `path` to the locked one's name, and lock it instead.

        Whoever waits for the lock finds that the name means another file by then.
        """
        import fcntl

        fresh = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(path, self._path)
        except BaseException:
            os.close(fresh)
            raise
        os.close(self.descriptor)
        self.descriptor = fresh

    @property
    def inode(self) -> int:
        """Of the file that is locked."""
        return os.fstat(self.descriptor).st_ino

    def share(self) -> None:
        """Let readers open the file, which is complete from here on, while other conversions stay out."""
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def release(self) -> None:
        """Give the lock up, and leave no file behind that nothing was written to."""
        with contextlib.suppress(OSError):
            status = os.fstat(self.descriptor)
            if status.st_size == 0 and os.path.samestat(status, os.stat(self._path)):
                os.unlink(self._path)
        os.close(self.descriptor)


def _busy(output: Output) -> str:
    return f"{output.final}: another conversion is writing it; wait for it, or give another name"


def _is_locked(path: Path) -> bool:
    import fcntl

    with path.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


def require_writable(folder: Path) -> None:
    """Make sure that an output can be made in a folder.

    Raises
    ------
    SourceError
    """
    if not folder.is_dir():
        raise SourceError(f"{folder}: no such folder for the output; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SourceError(f"{folder}: no permission to write there; choose another folder")


def lock_file(path: Path, busy: str, flags: int = 0) -> int:
    """Open a file, made where it is missing, and lock it; gives its descriptor.

    Parameters
    ----------
    path : Path
    busy : str
        What to say where another process holds it.
    flags : int
        For opening it, besides ``O_RDWR``, ``O_CREAT`` and ``O_CLOEXEC``.

    Raises
    ------
    OutputBusyError
        If another process holds it, and goes on to.
    """
    import fcntl

    deadline = time.monotonic() + _LOCK_WAIT_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                # Some network file systems have no locks; there nobody keeps a second writer out.
                return descriptor
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise OutputBusyError(busy) from error
            time.sleep(0.05)
            continue
        # Between opening and locking, a writer that ended may have renamed or removed the file.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


def sync_path(path: Path) -> None:
    """Make a file's bytes, or the renames in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that it is there whole, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
