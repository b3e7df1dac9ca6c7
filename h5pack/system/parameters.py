"""Checks of parameters that several public functions have, and the error that such a check raises."""

from __future__ import annotations

import operator
from typing import Any

from h5pack.errors import OptionsError


def invalid(name: str, value: object, problem: str) -> OptionsError:
    """Return an error about a parameter's value; `problem` continues the message after the name and the value."""
    fragment = f"{name}={value!r}"
    return OptionsError(f"{fragment}{problem}", parameters=(fragment,))


def whole_number(name: str, value: Any, minimum: int | None) -> int:
    """Return a parameter's value as a Python int; raise OptionsError if it is a bool, not an integer or too small."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or (minimum is not None and value < minimum):
        bound = "" if minimum is None else f" of at least {minimum}"
        raise OptionsError(f"{name} is {value!r}; it must be a whole number{bound}", parameters=(name,))
    return operator.index(value)
