"""What an unfinished export has written: a line for each task, with a checksum of its own.

A line that a kill cut short has another checksum, and is as good as not there. What the lines say is not believed but
compared with the files, which after a power cut may hold less.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from h5pack.checksum import crc32
from h5pack.errors import ResumeError
from h5pack.rows import read_all
from h5pack.tools.export_rows import ExportPart, WrittenFiles


class ExportJournal:
    """A journal that is open and locked.

    Parameters
    ----------
    path : str
        For messages.
    descriptor : int
        Opened for appending.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    def start(self, header: dict[str, Any]) -> None:
        """Forget everything, and note what this export is."""
        os.ftruncate(self._descriptor, 0)
        self._append(header)
        os.fsync(self._descriptor)

    def append(self, part: ExportPart) -> None:
        """Note files that are written."""
        if part.indices:
            self._append([part.indices, part.sizes, part.checksums])

    def header(self) -> dict[str, Any] | None:
        """What the export is that was begun; None where none was."""
        first = next(self._records(), None)
        return first if isinstance(first, dict) else None

    def written(self, count: int) -> WrittenFiles:
        """The files of `count` images, as far as they were noted."""
        files = WrittenFiles.none(count)
        for record in self._records():
            if isinstance(record, list):
                files.note(*record)
        return files

    def require(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """The header, where it says that this very export was begun.

        Raises
        ------
        ResumeError
        """
        before = self.header() or {}
        for name, value in wanted.items():
            if before.get(name) != value:
                what = {"options": "other options", "h5pack": "another version of h5pack"}.get(name, "another file")
                changed = " (or the file has changed since)" if name == "source" else ""
                raise ResumeError(
                    f"{self._path}: begun with {what}{changed}; give the same again, or start over with --overwrite"
                )
        return before

    def _append(self, record: Any) -> None:
        data = json.dumps(record, separators=(",", ":")).encode()
        # The line break comes first, so that what a kill cut short spoils no other line.
        line = b"\n%08x %b" % (crc32(data), data)
        while line:
            line = line[os.write(self._descriptor, line) :]

    def _records(self) -> Iterator[Any]:
        data = read_all(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        for line in data.split(b"\n"):
            checksum, _, record = line.partition(b" ")
            if record and checksum == b"%08x" % crc32(record):
                yield json.loads(record)
