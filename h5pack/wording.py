"""Numbers of things, and lists of them, in words."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """A number of things: 1 row, 2,000 rows, 2 batches."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith(("ch", "s")) else "s")


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
