"""Checks of parameters that several public functions have; the file that an output path stands for."""

from __future__ import annotations

import inspect
import math
import operator
import os
import re
from pathlib import PurePath
from typing import Any

from h5pack.errors import OptionsError
from h5pack.system.text import short_repr


def invalid(name: str, value: object, advice: str, problem: str = "is invalid") -> OptionsError:
    """Return an error with the message "NAME=VALUE PROBLEM; ADVICE" about the value of a parameter."""
    fragment = f"{name}={short_repr(value)}"
    return OptionsError(f"{fragment} {problem}; {advice}", parameters=(fragment,))


def is_path(text: str) -> bool:
    """Return whether a text can be the path of a file: not empty, without NUL, and encodable as a file name."""
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def require_local(path: str | os.PathLike[str], parameter: str = "path") -> None:
    """Raise OptionsError if `path` is not a path, or if it is empty, contains NUL or is a URL (``s3://...``)."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise invalid(parameter, path, "give the path of a file or folder")
    name = os.fsdecode(path)
    # An empty path would mean the working directory. It is often a mistake, such as an unset shell variable.
    if not is_path(name):
        raise invalid(
            parameter, name, "give a path that is not empty and contains neither NUL nor an unpaired surrogate"
        )
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", name):
        problem = "is a URL, but h5pack only reads and writes files; mount or download the data, and give its path"
        raise OptionsError.at(name, problem)


def refuse_path(name: str, value: object, code: str = "H5Dataset({})") -> None:
    """Raise OptionsError if a parameter's value is a path instead of an object; `code` makes the object of a path.

    Accept other instances of `os.PathLike`, because they may be the object, such as a loader that knows its file.
    """
    if isinstance(value, (str, bytes, PurePath)):
        raise invalid(name, value, f"give {code.format(repr(os.fspath(value)))}", "is a path")


def output_file(path: str | os.PathLike[str]) -> str:
    """Return the path of the file to write: `path`, or its target if it is a symbolic link.

    The unfinished file and the table of rejected images are in the same folder as that file.
    """
    return os.path.realpath(path) if os.path.islink(path) else os.fspath(path)


def require_callable(name: str, value: Any) -> None:
    """Raise OptionsError unless a parameter's value is None or callable."""
    if value is not None and not callable(value):
        raise invalid(name, value, "give a callable")


def _is_bool(value: Any) -> bool:
    """Return whether a value is a bool of Python, NumPy or torch, or an array of bools, without importing these."""
    return str(getattr(value, "dtype", type(value).__name__)).endswith("bool")


def flags(**values: Any) -> tuple[bool, ...]:
    """Return parameters' values as Python bools; raise OptionsError unless each is a bool of Python, NumPy or torch.

    Otherwise the text "False", such as from a configuration file, would mean True.
    """
    for name, value in values.items():
        if not _is_bool(value) or getattr(value, "ndim", False):
            raise invalid(name, value, "it must be True or False")
    return tuple(map(bool, values.values()))


def launched_number(variable: str, default: int) -> int:
    """Return the whole number in an environment variable of launchers such as torchrun; `default` if it is empty."""
    text = os.environ.get(variable) or default
    try:
        return int(text)
    except ValueError:
        problem = f"the environment variable {variable} is {text!r}; set it to a whole number, or unset it"
        raise OptionsError(problem, parameters=(variable,)) from None


def parameter_names(function: Any) -> tuple[str, ...]:
    """Return the names of a callable's parameters, or of those of a module's `forward`; () if they are unknown."""
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()
    # A module's own signature is (*args, **kwargs), unless its class replaces `__call__`.
    is_module = names == ("args", "kwargs") and hasattr(function, "forward") and not isinstance(function, type)
    return parameter_names(function.forward) if is_module else names


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Return a parameter's value, a str or an iterable of str, as a tuple; raise OptionsError for other values."""
    try:
        found = (value,) if isinstance(value, str) else tuple(value)
    except TypeError:
        # Arrays and tensors without axes are Iterable, too, but iterating over them fails.
        found = (None,)
    # The order matters, because classes are numbered in the given order. A set has another order in each process.
    if isinstance(value, (dict, set, frozenset)) or not all(isinstance(text, str) for text in found):
        raise invalid(name, value, "give a str or a list of str")
    return found


def real_number(value: Any) -> float:
    """Return a real number of Python, NumPy or torch as a float; nan for bools, texts, arrays and anything else."""
    if _is_bool(value) or isinstance(value, (str, bytes, bytearray)) or getattr(value, "ndim", False):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def whole_number(name: str, value: Any, minimum: int | None, maximum: int | None = None) -> int:
    """Return a parameter's value as an int; raise OptionsError for bools, non-integers and values out of bounds."""
    low, high = -math.inf if minimum is None else minimum, math.inf if maximum is None else maximum
    try:
        number = None if _is_bool(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        allowed = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        bound = "" if minimum is None else f" {allowed}"
        raise invalid(name, value, f"it must be a whole number{bound}")
    return number
