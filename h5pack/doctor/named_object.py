"""The user's own functions, named on the command line as MODULE:NAME."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from h5pack.errors import OptionsError


def load_named(option: str, text: str) -> Any:
    """What MODULE:NAME names; modules are looked for in the working directory, too.

    Parameters
    ----------
    option : str
        By which it was given, for the error.
    text : str

    Raises
    ------
    OptionsError
        If the module cannot be imported, or has no such name.
    """
    module_name, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        # The command h5pack begins its path with the folder that it is installed in.
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        # A module of the user's may fail with anything.
        raise OptionsError(f"{option} {text}: {module_name!r} cannot be imported ({one_line(error)})") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise OptionsError(f"{option} {text}: {module_name!r} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise OptionsError(f"{option} {text}: that is a {type(found).__name__}, and cannot be called")
    return found


def one_line(error: BaseException) -> str:
    """An error in one line: its kind, and the line that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # A DataLoader's worker puts its whole traceback in front.
    text = lines[-1] if lines[0].startswith("Caught ") else lines[0]
    return text if text != lines[0] else f"{type(error).__name__}: {text}"
