"""Tests that depend on time, on machines that are slow or busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def with_enough_time(seconds: float, run: Callable[[float], Result], is_right: Callable[[Result], bool]) -> Result:
    """Call `run` with `seconds`; where its result is not right, with 4 times and at last with 16 times as much.

    `seconds` is a budget, or the unit of a test's sleeps: the longer it is, the less other processes disturb it.
    The last result is returned as it is, for the test to check.
    """
    for factor in (1, 4):
        result = run(factor * seconds)
        if is_right(result):
            return result
    return run(16 * seconds)
