"""Reading of damaged copies of a file, each in a process of its own, because HDF5 may crash or hang.

``python -m tests.read.read_damaged checked|unchecked SOUND COPY...`` prints a line of JSON for each copy: its name, an
outcome (right, wrong, refused, escaped, killed), and the error's text or the signal's number.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from h5pack.errors import H5PackError
from h5pack.format.schema import checksums_path
from h5pack.read.description import describe_file
from h5pack.read.engine import Engine

SECONDS = 60
"""A copy that takes longer hangs, and is killed by SIGALRM."""


def read_all(sound: Path, copies: list[Path], *, check: bool) -> dict[Path, tuple[str, str]]:
    """Return outcome and text for each copy, after a check that each error is one line that names the file."""
    command = [sys.executable, "-m", "tests.read.read_damaged", "checked" if check else "unchecked", str(sound)]
    result = subprocess.run(
        [*command, *map(str, copies)], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    found = [(name, (outcome, text)) for name, outcome, text in map(json.loads, result.stdout.splitlines())]
    assert [name for name, _ in found] == [copy.name for copy in copies]
    for copy, (_, (outcome, text)) in zip(copies, found, strict=True):
        if outcome == "refused":
            assert "\n" not in text
            assert str(copy) in text
    return dict(zip(copies, (how for _, how in found), strict=True))


def read(path: str, check: bool) -> list[Any]:
    """Return all rows of the images and of the labels."""
    pack = describe_file(path)
    engine, found = Engine(pack.path, pack.identity, pack.indexes), []
    for name in filter(None, ("images", pack.labels)):
        rows = np.arange(pack.indexes[name].rows)
        found.append(engine.read(name, rows))
        if check:
            assert checksums_path(name) in pack.indexes, "nothing would be compared"
            engine.check(name, rows, found[-1])
    return found


def outcome(path: str, sound: list[Any], check: bool) -> tuple[str, str]:
    """Return how reading a copy went, and the error."""
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
            text = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        how = json.loads(text) if code == 0 else ("killed", str(-code))
        print(json.dumps([os.path.basename(path), *how]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] == "checked", sys.argv[2], sys.argv[3:])
