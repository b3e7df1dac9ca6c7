"""The names that belong to an export, the lock on them, and how the finished folder takes its place."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from h5pack.errors import OutputExistsError, SourceError
from h5pack.pack.output import lock_file, require_writable, sync_path
from h5pack.tools.export_names import MANIFEST


class ExportFolder:
    """Where an export writes.

    Parameters
    ----------
    folder : path
        The folder to make; links are followed.

    Attributes
    ----------
    final : Path
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.final = Path(os.path.realpath(folder))

    @property
    def partial(self) -> Path:
        """The folder under construction."""
        return self._beside(".partial")

    @property
    def journal(self) -> Path:
        """What is done; it is there before `partial`, and goes after it."""
        return self._beside(".partial.journal")

    @property
    def replaced(self) -> Path:
        """An earlier export, for the moment in which the new one takes its place."""
        return self._beside(".replaced")

    def _beside(self, ending: str) -> Path:
        return self.final.with_name(self.final.name + ending)

    def check(self, overwrite: bool, resume: bool) -> None:
        """Refuse early what would fail late.

        Raises
        ------
        OutputExistsError
            If something is in the way.
        SourceError
            If it cannot be made there.
        """
        require_writable(self.final.parent)
        if os.path.ismount(self.final):
            raise SourceError(f"{self.final}: a file system of its own; name a folder in it")
        if self.final.exists() and not self.final.is_dir():
            raise OutputExistsError(f"{self.final}: exists, and is no folder; give another name")
        if self.partial.exists() and not self.journal.exists():
            raise OutputExistsError(f"{self.partial}: exists, and is no unfinished export; move it elsewhere")
        if overwrite:
            self.require_export()
        if resume or overwrite:
            return
        if self.has_output():
            raise OutputExistsError(
                f"{self.final}: not empty; give another folder, or --overwrite to replace an earlier export"
            )
        if self.partial.exists():
            raise OutputExistsError(
                f"{self.partial}: an unfinished export; continue it with --resume, or start over with --overwrite"
            )

    def has_output(self) -> bool:
        """Whether the folder is there and holds anything."""
        try:
            with os.scandir(self.final) as entries:
                return any(True for _ in entries)
        except FileNotFoundError:
            return False

    def require_export(self) -> None:
        """Make sure that the folder, which will be removed, holds nothing but what an export wrote.

        Raises
        ------
        OutputExistsError
        """
        if not self.has_output():
            return
        remedy = "move it away, or give another folder: only what an export wrote is replaced"
        try:
            with (self.final / MANIFEST).open(newline="", encoding="utf-8") as stream:
                lines = csv.reader(stream)
                if next(lines, [""])[0] != "path":
                    raise ValueError
                known = {MANIFEST, *(line[0].removeprefix("./") for line in lines)}
        except (OSError, ValueError, IndexError, csv.Error):
            raise OutputExistsError(f"{self.final}: holds no {MANIFEST} of an export; {remedy}") from None
        for place, _, files in os.walk(self.final):
            for name in files:
                path = os.path.relpath(os.path.join(place, name), self.final)
                if path not in known:
                    raise OutputExistsError(f"{self.final}: holds {path!r}, which its {MANIFEST} does not; {remedy}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the journal, so that no other export writes here; gives its descriptor.

        Raises
        ------
        OutputBusyError
            If another one holds it.
        """
        busy = f"{self.final}: another export is writing it; wait for it, or give another name"
        descriptor = lock_file(self.journal, busy, os.O_APPEND)
        try:
            yield descriptor
        finally:
            if os.fstat(descriptor).st_size == 0 and not self.partial.exists():
                self.journal.unlink(missing_ok=True)
            os.close(descriptor)

    def begin(self, *, anew: bool) -> None:
        """Make `partial`, with an empty manifest in it; `anew`, after removing one that was left there."""
        if anew:
            shutil.rmtree(self.replaced, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.partial)
        self.partial.mkdir(exist_ok=True)
        (self.partial / MANIFEST).touch()

    @staticmethod
    def folds(folder: Path) -> bool:
        """Whether the file system of a folder with a manifest takes names that differ in case alone for the same."""
        return (folder / MANIFEST.upper()).exists()

    def publish(self, overwrite: bool) -> None:
        """Give the finished folder its name.

        Raises
        ------
        OutputExistsError
            If by now there is something that nobody agreed to replace.
        """
        sync_file_system(self.partial)
        if self.has_output():
            if not overwrite:
                raise OutputExistsError(f"{self.final}: not empty by now; add --overwrite and --resume to replace it")
            self.require_export()
            shutil.rmtree(self.replaced, ignore_errors=True)
            os.rename(self.final, self.replaced)
        # An empty folder is replaced by the renaming itself.
        os.rename(self.partial, self.final)
        self.clean()
        sync_path(self.final.parent)

    def clean(self) -> None:
        """Remove what only an unfinished export needs."""
        shutil.rmtree(self.replaced, ignore_errors=True)
        self.journal.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.partial, ignore_errors=True)
        self.clean()


def sync_file_system(folder: Path) -> None:
    """Have all of a folder's file system survive a power cut, at the cost of one call rather than one a file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
        if sync is None:
            os.sync()
        elif sync(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)
