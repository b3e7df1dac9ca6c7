"""Formatting of numbers, sizes, lists and errors as text."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TextIO

from h5pack.errors import H5PackError


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural, such as "1 row", "2,000 rows" or "2 batches"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s")


def labels_text(shape: Sequence[int] | None, dtype: object, classes: Sequence[str] | None) -> str:
    """Describe labels, such as "10 classes"; `shape` is (N,) or (N, columns), or None if there are no labels."""
    if shape is None:
        return "none"
    if len(shape) == 2:
        return f"{counted(shape[1], 'column')}, {dtype}"
    return "integers" if classes is None else counted(len(classes), "class")


def one_of(count: int, first: str) -> str:
    """Describe `count` images, one of which may be the cause of an error, by the name of the first."""
    return first if count == 1 else f"one of {counted(count, 'image')}, the first {first}"


def splits_text(names: Iterable[str]) -> str:
    """Return which splits a file has, for messages: "its splits are 'train', 'val'" or "it has no splits"."""
    known = ", ".join(map(repr, names))
    return f"its splits are {known}" if known else "it has no splits"


def listed(names: Sequence[str]) -> str:
    """Return names joined as in a sentence, such as "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def first_names(names: Sequence[str], count: int = 8) -> str:
    """Return the first names in quotes, and how many more there are, such as "'a', 'b' and 3 more"."""
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(map(repr, names[:count])) + more


def first_lines(lines: Iterable[str], total: int, count: int = 20) -> list[str]:
    """Return the first `count` of `total` lines and, if there are more, a line with their number."""
    more = [f"  and {total - count:,} more (the JSON report lists all)"] if total > count else []
    return [*itertools.islice(lines, count), *more]


def stored_option_text(name: str, value: object) -> tuple[str, str]:
    """Describe an option as a pack stores it, such as "with size='32x16'" or "without limit".

    Also return the fragment that names the parameter.
    """
    parameter = "source_kind" if name == "source" else name
    if value is None or value is False or value in ([], ()):
        return f"without {parameter}", parameter
    if parameter in ("size", "value_range") and isinstance(value, (list, tuple)):
        value = ("x" if parameter == "size" else ":").join(map(str, value))
    if isinstance(value, list):
        return f"with {parameter} {value}", parameter
    return f"with {parameter}={value!r}", f"{parameter}={value!r}"


def short_repr(value: object) -> str:
    """Return a value's repr in one line, cut to 60 characters and "..." if it is longer."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."


def format_bytes(count: float) -> str:
    """Return a number of bytes with a binary unit and at most three digits, such as "64 KiB" or "1.5 MiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.2g} {units[0]}" if 0 < value < 1 else f"{value:.3g} {units[0]}"


def printable(text: str) -> str:
    """Return untrusted text with its non-printable characters escaped, such as control characters. Spaces are kept."""
    return "".join(
        sign
        if sign.isprintable() or unicodedata.category(sign) == "Zs"
        else sign.encode("unicode_escape", "backslashreplace").decode("ascii")
        for sign in text
    )


def printable_lines(lines: Iterable[str]) -> str:
    """Return lines of untrusted text, joined by line breaks, with control characters in a line escaped."""
    return "\n".join(map(printable, lines))


def print_text(text: str, file: TextIO | None = None) -> None:
    """Print lines of untrusted text with control characters escaped."""
    print(printable_lines(text.split("\n")), file=file, flush=True)


def error_line(error: BaseException) -> str:
    """Return an error's type and the line of its message that states the cause.

    For an H5PackError with a message of one line, return only the message.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if len(lines) == 1 and isinstance(error, H5PackError):
        return lines[0].strip()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if lines[0].startswith("Caught ") and frames:
        # An error from a DataLoader worker begins with the whole traceback. Its cause follows the last frame.
        return next((line for line in lines[frames[-1] :] if not line[0].isspace()), lines[-1]).strip()
    return f"{type(error).__name__}: {lines[0].strip()}"
