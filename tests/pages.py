"""What the blocks of a page of the docs need when they are run as a script."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import IO

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
    code, output = run(command)
    assert printed or code == 0, f"$ {command}\n{output}"
    found = [plain(line) for line in output.splitlines()]
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


def run(command: str) -> tuple[int, str]:
    """Run lines in bash, or in forked processes, which need not import h5pack; return the exit status and output.

    A part begins at each line that calls Python. It is run in bash if it has further lines or needs a shell.
    """
    with tempfile.TemporaryFile("w+") as output:
        for part in re.split(r"\n(?=h5pack |python -m )", command.rstrip()):
            line = re.sub(r" # .*$", "", part)
            if re.match(r"(h5pack|python -m) ", line) and not re.search(r"[$|&;<>*?~\\\n]", line):
                code = run_module(shlex.split(line.removeprefix("python -m ")), output)
            else:
                done = subprocess.run(["bash", "-euc", part], stdout=output, stderr=subprocess.STDOUT)
                code = done.returncode
            if code:
                break
        output.seek(0)
        return code, output.read()


def run_module(words: Sequence[str], output: IO[str]) -> int:
    """Run a module in a forked process as ``python -m`` does; return its exit status."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        for standard in (1, 2):
            os.dup2(output.fileno(), standard)
        sys.argv = [*words]
        # Not by default from Python 3.14 on, where a fork server of the parent could not be waited for, and the lock of
        # tqdm would be reported as leaked after `os._exit`.
        multiprocessing.set_start_method("fork", force=True)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
