"""The output folder of an export: it is locked, written under a temporary name, then renamed to its final name."""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from h5pack.errors import OutputExistsError, SourceError
from h5pack.exporter.names import MANIFEST, ExportNames
from h5pack.system.files import open_locked, require_writable, sync_file_system, sync_path


class ExportFolder:
    """The output folder of an export and its temporary siblings: an unfinished export, a lock file, a replaced export.

    Parameters
    ----------
    folder : path
        The folder to create. Symbolic links are resolved.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.given = Path(folder)
        self.final = Path(os.path.realpath(folder))

    @property
    def partial(self) -> Path:
        """The folder of the unfinished export, which is renamed to `final` when it is complete."""
        return self._beside(".partial")

    @property
    def lock_file(self) -> Path:
        """The lock file. It exists whenever `partial` does, so a `partial` without it was not made by an export."""
        return self._beside(".partial.lock")

    @property
    def replaced(self) -> Path:
        """The temporary name of an earlier export while the new one takes its place."""
        return self._beside(".replaced")

    def _beside(self, ending: str) -> Path:
        return self.final.with_name(self.final.name + ending)

    def check(self, overwrite: bool, resume: bool) -> None:
        """Raise before any work is done if the export could not be published at this path.

        Raises
        ------
        OutputExistsError, SourceError
        """
        require_writable(self.final.parent)
        if os.path.ismount(self.final):
            raise SourceError(f"{self.final}: is a mount point; name a folder in it", path=self.final)
        if self.final.exists() and not self.final.is_dir():
            raise OutputExistsError(f"{self.final}: exists, and is not a folder; give another name", path=self.final)
        if self.partial.exists() and not self.lock_file.exists():
            raise OutputExistsError(
                f"{self.partial}: exists, and is not an unfinished export; move it elsewhere", path=self.partial
            )
        if overwrite:
            self.require_export()
        if resume or overwrite:
            return
        if self.has_output():
            raise self.not_empty()
        if self.partial.exists():
            raise OutputExistsError(
                f"{self.partial}: an unfinished export; continue it with resume=True, or start over with "
                "overwrite=True",
                path=self.partial,
                parameters=("resume=True", "overwrite=True"),
            )

    def has_output(self) -> bool:
        """Return whether the final folder exists and is not empty."""
        try:
            with os.scandir(self.final) as entries:
                return any(True for _ in entries)
        except FileNotFoundError:
            return False

    def not_empty(self) -> OutputExistsError:
        """Return the error to raise if the final folder is not empty and must not be replaced."""
        return OutputExistsError(
            f"{self.final}: not empty; give another folder, or overwrite=True to replace an earlier export",
            path=self.final,
            parameters=("overwrite=True",),
        )

    def require_export(self) -> None:
        """Raise OutputExistsError if the final folder, which would be deleted, has files that no export wrote."""
        if not self.has_output():
            return
        advice = "move it away, or give another folder: only what an export wrote is replaced"
        try:
            with (self.final / MANIFEST).open(newline="", encoding="utf-8") as stream:
                lines = csv.reader(stream)
                if next(lines, [""])[0] != "path":
                    raise ValueError
                known = {MANIFEST, *(line[0].removeprefix("./") for line in lines)}
        except (OSError, ValueError, IndexError, csv.Error):
            raise OutputExistsError(
                f"{self.final}: holds no {MANIFEST} of an export; {advice}", path=self.final
            ) from None
        for path in _files_below(self.final):
            if path not in known:
                raise OutputExistsError(
                    f"{self.final}: holds {path!r}, which its {MANIFEST} does not; {advice}", path=self.final
                )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this output during a `with` block; raise OutputBusyError if another export holds it."""
        busy = f"{self.final}: another export is writing it; wait for it, or give another name"
        descriptor = open_locked(self.lock_file, busy)
        try:
            yield
        finally:
            if not self.partial.exists():
                self.lock_file.unlink(missing_ok=True)
            os.close(descriptor)

    def begin(self, *, keep: bool) -> None:
        """Create `partial` with an empty manifest. Unless `keep` is true, delete an unfinished export first."""
        if not keep:
            self.remove_replaced()
            self.remove_partial()
        self.partial.mkdir(exist_ok=True)
        (self.partial / MANIFEST).touch()

    def make_folders(self, names: ExportNames) -> None:
        """Create all folders in `partial`, and delete what a run with other options left there."""
        known = {MANIFEST, *names.paths}
        folders = set(names.folders)
        for path in _files_below(self.partial):
            if path not in known:
                (self.partial / path).unlink()
        for place, below, _ in os.walk(self.partial, topdown=False):
            for name in below:
                path = os.path.join(place, name)
                if os.path.relpath(path, self.partial) not in folders:
                    os.rmdir(path)
        for folder in names.folders:
            (self.partial / folder).mkdir(exist_ok=True)

    @staticmethod
    def folds_case(folder: Path) -> bool:
        """Return whether the file system ignores case in names. `folder` must contain a manifest to test it with."""
        return (folder / MANIFEST.upper()).exists()

    def publish(self, overwrite: bool) -> None:
        """Rename `partial` to `final`; raise OutputExistsError if `final` meanwhile holds what must not be replaced."""
        sync_file_system(self.partial)
        if self.has_output():
            if not overwrite:
                raise self.not_empty()
            self.require_export()
            self.remove_replaced()
            os.rename(self.final, self.replaced)
        # os.rename replaces an existing folder if it is empty.
        os.rename(self.partial, self.final)
        self.remove_replaced()
        sync_path(self.final.parent)

    def remove_replaced(self) -> None:
        """Delete the earlier export that was renamed to make way for the new one."""
        shutil.rmtree(self.replaced, ignore_errors=True)

    def remove_partial(self) -> None:
        """Delete the unfinished export, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.partial)


def _files_below(folder: Path) -> Iterator[str]:
    """Yield the paths of all files below a folder, relative to that folder."""
    for place, _, files in os.walk(folder):
        for name in files:
            yield os.path.relpath(os.path.join(place, name), folder)
