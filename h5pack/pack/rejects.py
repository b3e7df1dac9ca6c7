"""Rejects: images that were not packed. They are listed in a CSV file beside the pack; ``strict=True`` raises."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from h5pack.errors import RejectedImageError
from h5pack.sources.catalog import Reject
from h5pack.system.files import write_atomically


def write_rejects(path: Path, rejects: Sequence[Reject]) -> None:
    """Write ``OUT.rejects.csv``, or remove it if there are no rejects."""
    if not rejects:
        path.unlink(missing_ok=True)
        return
    stream = io.StringIO(newline="")
    table = csv.writer(stream, lineterminator="\n")
    table.writerow(["filename", "reason"])
    table.writerows((reject.name, reject.reason) for reject in rejects)
    write_atomically(path, stream.getvalue().encode("utf-8", "backslashreplace"))


def refuse_reject(source: str, reject: Reject, *, begun: bool) -> None:
    """Raise RejectedImageError for an image that cannot be packed with ``strict=True``.

    `begun` means that rows have been written, so the message also advises how to resume.
    """
    advice = "or run again without strict=True to leave it out"
    if begun:
        advice = "and start over with overwrite=True, or continue with resume=True and without strict=True"
    raise RejectedImageError(
        f"{source}: {reject.name}: {reject.reason}; repair or remove it, {advice}",
        path=source,
        parameters=("overwrite=True", "resume=True", "strict=True") if begun else ("strict=True",),
    )
