"""Files that a bench writes: there whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from h5pack.errors import OptionsError
from h5pack.pack.output import write_atomically


def write_result(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file; one of that name is replaced.

    Raises
    ------
    OptionsError
        If it cannot be written there.
    """
    target = Path(path)
    try:
        write_atomically(target, data)
    except OSError as error:
        raise OptionsError(f"{target}: {error.strerror or error}; name a file that can be written") from error
