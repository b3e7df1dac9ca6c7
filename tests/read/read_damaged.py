"""Reads every row of damaged copies of a file, each in a process of its own, and says how it went.

``python -m tests.read.read_damaged checked|unchecked SOUND COPY...`` prints a line of JSON for each copy: its name, an
outcome (right, wrong, refused, escaped, killed), and the error in words or the signal's number.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any

import numpy as np

from h5pack.data.dataset import H5Dataset
from h5pack.errors import H5PackError

SECONDS = 60
"""A copy that takes longer hangs, and is killed by SIGALRM."""


def read(path: str, check: bool) -> tuple[Any, ...]:
    """All rows of the images and of the labels."""
    dataset = H5Dataset(path, check=check)
    rows = np.arange(len(dataset))
    return tuple(dataset.read_rows(name, rows) for name in dataset.names)


def outcome(path: str, sound: tuple[Any, ...], check: bool) -> tuple[str, str]:
    """How reading a copy went, and the error."""
    try:
        found = read(path, check)
    except H5PackError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except BaseException as error:
        return "escaped", f"{type(error).__name__}: {error}"
    same = len(found) == len(sound) and all(
        mine.dtype == right.dtype and np.array_equal(mine, right) for mine, right in zip(found, sound, strict=True)
    )
    return "right" if same else "wrong", ""


def main(check: bool, sound: str, copies: list[str]) -> None:
    """Print the outcome of each copy."""
    right = read(sound, check)
    for path in copies:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            with contextlib.suppress(OSError):
                os.write(writer, json.dumps(outcome(path, right, check)).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        how, words = json.loads(said) if code == 0 else ("killed", str(-code))
        print(json.dumps([os.path.basename(path), how, words]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] == "checked", sys.argv[2], sys.argv[3:])
