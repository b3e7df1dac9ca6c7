"""Numbers of things, in words."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number of things: 1 row, 2,000 rows, 2 batches."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith(("ch", "s")) else "s")
