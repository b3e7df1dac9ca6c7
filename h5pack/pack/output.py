"""The output file: the report of its conversion, the temporary files beside it, the disk space it needs, its lock."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from h5pack.errors import NoSpaceError, OutputBusyError, OutputExistsError
from h5pack.system.files import is_locked, lock, open_locked, require_writable
from h5pack.system.machine import free_bytes
from h5pack.system.text import format_bytes


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion.

    `seconds` is the time of each stage: survey (including listing the source), check (of rows written by an earlier
    run), write, compress (only with `compression`), finish (moving rows, tables, fsync, rename).
    """

    path: str  #: the output
    images: int  #: rows of the output
    rejects: int  #: images that were not packed; ``OUT.rejects.csv`` and the HDF5 group `/rejects` list them
    bytes: int  #: size of the output
    num_workers: int  #: processes that decoded images
    resumed_rows: int = 0  #: planned rows that an earlier, interrupted run had already written or rejected
    moved_rows: int = 0  #: rows that were moved to close gaps left by images that could not be decoded
    seconds: dict[str, float] = field(default_factory=dict)
    already_complete: bool = False  #: before this call, which is possible with ``resume=True``

    def to_text(self) -> str:
        """Return the report as one or two lines of text."""
        if self.already_complete:
            return f"{self.path}: already complete"
        total = sum(self.seconds.values())
        speed = self.images / total if total else 0.0
        size = format_bytes(self.bytes)
        text = f"done     {self.path}: {self.images:,} images, {size}, {total:.1f} s ({speed:,.0f} images/s)"
        if self.rejects:
            text += f"\nrejects  {self.rejects:,}, listed with reasons in {self.path}.rejects.csv"
        return text


class Output:
    """Paths of a conversion's output, which exists only when it is complete, and of the temporary files beside it."""

    def __init__(self, final: Path) -> None:
        self.final = final
        self.partial = self._beside(".partial")  # the file under construction
        self.new = self._beside(".partial.new")  # becomes `partial` when it is locked
        self.journal = self._beside(".partial.journal")  # a folder; see `h5pack.pack.journal`
        # A sparse file with the pack's final HDF5 metadata, which is then copied into `partial`.
        # The compressed copy of `partial`. It replaces `partial` when the copy is complete.
        self.structure = self._beside(".partial.structure")
        self.compressed = self._beside(".partial.compressed")
        self.rejects = self._beside(".rejects.csv")  # the table of images that were not packed

    def _beside(self, ending: str) -> Path:
        return self.final.with_name(self.final.name + ending)

    def check(self, overwrite: bool, resume: bool) -> None:
        """Raise if the conversion could not finish: the folder is not writable, or an existing file is in the way."""
        require_writable(self.final.parent)
        if self.final.is_dir():
            raise OutputExistsError(f"{self.final}: is a folder; give the name of a file", path=self.final)
        if self.final.exists() and not overwrite and not resume:
            raise OutputExistsError(
                f"{self.final}: exists; give another name, or overwrite=True to replace it",
                path=self.final,
                parameters=("overwrite=True",),
            )
        if self.partial.exists() and not overwrite and not resume:
            if is_locked(self.partial):
                raise OutputBusyError(_busy(self), path=self.final)
            raise OutputExistsError(
                f"{self.partial}: belongs to an unfinished conversion; continue it with resume=True, or start over "
                "with overwrite=True",
                path=self.partial,
                parameters=("resume=True", "overwrite=True"),
            )

    def require_space(self, needed: int) -> None:
        """Raise NoSpaceError if `needed` bytes, minus what the unfinished files already occupy, are not free."""
        held = 0
        for path in (self.partial, self.compressed, *self.journal.glob("*.bin")):
            with contextlib.suppress(FileNotFoundError):
                held += os.stat(path).st_blocks * 512
        free = free_bytes(self.final.parent)
        if needed - held > free:
            raise NoSpaceError(
                f"{self.final}: needs {needed - held:,} bytes more and {self.final.parent} has only {free:,} free; "
                "make room or choose another output, then run again with resume=True",
                path=self.final,
                parameters=("resume=True",),
            )

    def journal_identity(self) -> tuple[int, int] | None:
        """Return the device and inode numbers of the journal's folder; None if it does not exist."""
        try:
            status = os.stat(self.journal)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def remove_leftovers(self) -> None:
        """Remove the temporary files `journal`, `structure`, `compressed` and `new`; keep `partial`."""
        shutil.rmtree(self.journal, ignore_errors=True)
        self.structure.unlink(missing_ok=True)
        self.compressed.unlink(missing_ok=True)
        self.new.unlink(missing_ok=True)


class OutputLock:
    """An flock on ``OUT.partial``, held from the file's creation until it is renamed to the output.

    Raises OutputBusyError if another process holds it.
    """

    def __init__(self, output: Output) -> None:
        self._path, self._new = output.partial, output.new
        self.descriptor = open_locked(output.partial, _busy(output))

    def renew(self) -> None:
        """Replace the file by an empty one with a new inode, and lock the new file.

        A hanging worker of an earlier conversion may still have the old file open; it cannot write into the new one.
        """
        # The new file is locked before it gets the name, so another conversion cannot lock it first.
        self._new.unlink(missing_ok=True)
        os.close(os.open(self._new, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        self.replace(self._new)

    def replace(self, path: Path) -> None:
        """Rename the file at `path` to ``OUT.partial``, and lock it instead of the old one.

        A process that waits for the old file's lock will notice that the name now belongs to another file.
        """
        fresh = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            lock(fresh)
            os.replace(path, self._path)
        except BaseException:
            os.close(fresh)
            raise
        os.close(self.descriptor)
        self.descriptor = fresh

    @property
    def inode(self) -> int:
        """Inode number of the locked file."""
        return os.fstat(self.descriptor).st_ino

    def share(self) -> None:
        """Downgrade to a shared lock: readers can open the complete file, but no other conversion can lock it."""
        lock(self.descriptor, shared=True, wait=True)

    def release(self) -> None:
        """Release the lock, and remove the file if nothing was written to it."""
        with contextlib.suppress(OSError):
            status = os.fstat(self.descriptor)
            if status.st_size == 0 and os.path.samestat(status, os.stat(self._path)):
                os.unlink(self._path)
        os.close(self.descriptor)


def _busy(output: Output) -> str:
    return f"{output.final}: another conversion is writing it; wait until that has finished, or give another name"
