"""What the blocks of a page of the docs need when they are run as a script."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Sequence

VARYING = (
    *(r"\b[\d.,]+ (s|seconds)\b", r"[\d,]+ images/s", r"on \d+ workers?"),
    r"[\d.]+ (KiB|MiB)(?=,| of its image files)",
)
"""What differs between runs and machines: times, speeds, numbers of CPUs, sizes of compressed files and JPEGs."""


def plain(line: str) -> str:
    """A line without what differs between runs; the current folder is called ``/data`` in the docs."""
    line = line.replace(f"{os.getcwd()}/", "/data/").rstrip()
    for pattern in VARYING:
        line = re.sub(pattern, "#", line)
    return line


def shell(command: str, printed: Sequence[str] = ()) -> None:
    """Run a command in bash. With `printed` it must print these lines; ``...`` stands for any lines.

    A command that prints nothing in the docs must succeed.
    """
    done = subprocess.run(["bash", "-euc", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert printed or done.returncode == 0, f"$ {command}\n{done.stdout}"
    found = [plain(line) for line in done.stdout.splitlines()]
    groups = itertools.groupby(map(plain, printed), lambda line: line == "...")
    parts = [list(part) for dots, part in groups if not dots]
    begin = 0
    for part in parts:
        places = [at for at in range(begin, len(found)) if found[at : at + len(part)] == part]
        assert places, f"$ {command}\nexpected {part}\nin {found}"
        begin = places[0] + len(part)
    if parts and printed[0] != "...":
        assert found[: len(parts[0])] == parts[0], found
    if parts and printed[-1] != "...":
        assert found[-len(parts[-1]) :] == parts[-1], found
