"""Functions in processes of their own that need not import torch, because the fork server has imported it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def output_of(function: Callable[..., Any], *arguments: Any) -> str:
    """Call a function in such a process, which must succeed within 330 s; return what it printed and its errors."""
    with tempfile.NamedTemporaryFile() as output:
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_call, args=(output.name, function, arguments))
        process.start()
        process.join(330)
        process.kill()
        text = Path(output.name).read_text()
    assert process.exitcode == 0, text
    return text


def _call(output: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # The child's own children are started as in any other process.
    multiprocessing.set_start_method(None, force=True)
    with open(output, "w") as stream:
        for standard in (1, 2):
            os.dup2(stream.fileno(), standard)
    function(*arguments)
