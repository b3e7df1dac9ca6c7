"""Arguments that several commands share, and translation of parameters in error messages to command-line options."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
from collections.abc import Sequence
from typing import Any


def comma_parts(value: str | None) -> tuple[str, ...]:
    """Split a text at commas and strip white space from each part; return an empty tuple for None."""
    return () if value is None else tuple(part.strip() for part in value.split(",") if part.strip())


def comma_names(value: str) -> tuple[str, ...]:
    """Split an option's value at commas; raise an error if no name is left, for example for an unset shell variable."""
    names = comma_parts(value)
    if not names:
        raise argparse.ArgumentTypeError(f"{value!r} names nothing; give a name, or leave out the option")
    return names


def add_workers(group: Any) -> None:
    """Add ``--workers``, the number of worker processes."""
    group.add_argument(
        "--workers", dest="num_workers", type=int, metavar="N", help="worker processes (default: one per available CPU)"
    )


def print_report(report: Any, arguments: argparse.Namespace, **settings: Any) -> None:
    """Print a report: with ``--json`` as JSON, else its text for `settings`, with parameters written as options."""
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1), flush=True)
    else:
        text = report.to_text(**settings)
        print(option_text(text, getattr(report, "parameters", ()), arguments.parser), flush=True)


def add_hdf5(group: Any) -> None:
    """Add the options that name the datasets of images and labels in an HDF5 file, and say how to interpret images."""
    group.add_argument(
        "--images", metavar="NAME", help="dataset of images, as arrays or encoded files (default: detected)"
    )
    labels = group.add_mutually_exclusive_group()
    labels.add_argument("--labels", metavar="NAME", help="dataset of labels (default: detected)")
    labels.add_argument("--no-labels", action="store_const", const="", dest="labels", help="ignore the file's labels")
    group.add_argument(
        "--channel-axis", metavar="WHERE",
        help="position of the channel axis of an image: last, first or none (default: detected)",
    )  # fmt: skip
    group.add_argument(
        "--value-range", metavar="LOW:HIGH",
        help="the pixel values that become 0 and 255 (default: 0:1 for floats; integers keep their values)",
    )  # fmt: skip


def option_text(text: str, fragments: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return the text with each of `fragments`, such as ``size=64``, replaced by its option, ``--size 64``."""
    # Replace the longest fragments first, because one may begin with another. Do not replace parts of paths.
    for fragment in sorted(fragments, key=len, reverse=True):
        option = _option_text(fragment, parser) or fragment
        text = re.sub(rf"(?<![\w./-]){re.escape(fragment)}(?![\w/]|\.\w)", lambda _: option, text)  # noqa: B023
    return text


def _option_text(fragment: str, parser: argparse.ArgumentParser) -> str | None:
    """Return the command-line option for ``name`` or ``name=value``; None if the command has no such option.

    ``name=True`` always becomes an option, because the message may recommend another command: doctor, for example,
    refuses the file of an unfinished conversion, and recommends running the conversion again with ``resume=True``.
    """
    name, _, text = fragment.partition("=")
    value = _literal(text)
    flag = "--" + name.replace("_", "-")
    # Private API: argparse has no public list of a parser's options.
    actions = [action for action in parser._actions if flag in action.option_strings or action.dest == name]
    for action in actions:
        if action.option_strings and action.nargs == 0 and (not text or action.const == value):
            return action.option_strings[-1]
        if action.option_strings and action.nargs != 0 and not (text and value == ""):
            return f"{action.option_strings[-1]} {shlex.quote(str(value))}" if text else action.option_strings[-1]
    return flag if value is True else None


def _literal(value: str) -> Any:
    """Return the value of a Python literal; return other text unchanged, but without the brackets of a list."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value.strip("[]")
