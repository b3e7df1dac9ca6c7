"""Arguments that several commands share, and translation of parameters in error messages to command-line options."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

from h5pack.system.parameters import parameter_names
from h5pack.system.text import print_text


def comma_names(value: str) -> tuple[str, ...]:
    """Split an option's value at commas; raise an error if no name is left, for example for an unset shell variable."""
    names = tuple(part.strip() for part in value.split(",") if part.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{value!r} names nothing; give a name, or leave out the option")
    return names


_TYPES: dict[str, Any] = {
    "N": int, "Q": int, "PIXELS": int, "FRACTION": float, "S": float, "A,B": comma_names,
}  # fmt: skip
"""What the value of an option becomes, by its metavar. Other values stay text."""
_PARAMETERS = {
    "--source": "source_kind", "--workers": "num_workers", "--threads": "num_threads", "--cache": "caches",
}  # fmt: skip
"""Options whose parameters have other names, and these names."""
WORKERS = {"--workers N": "worker processes (default: one per available CPU)"}
PROCESSES = {**WORKERS, "--start-method METHOD": "how to start processes: fork, forkserver or spawn"}


def add_options(group: Any, options: dict[str, str], **settings: Any) -> None:
    """Add options and their help. An option with a metavar, such as "--limit N", has a value; others are flags."""
    for option, text in options.items():
        name, _, metavar = option.partition(" ")
        usual = {"metavar": metavar, "type": _TYPES.get(metavar)} if metavar else {"action": "store_true"}
        group.add_argument(name, help=text, **{"dest": _PARAMETERS.get(name), **usual, **settings})


def add_splits(group: Any, text: str) -> None:
    """Add ``--split``, which may be given several times."""
    add_options(group, {"--split NAME": f"{text}; repeatable"}, dest="splits", action="append")


def keywords(arguments: argparse.Namespace, function: Any) -> dict[str, Any]:
    """Return the arguments that are parameters of `function`, except those that are None (not given)."""
    found = {name: getattr(arguments, name, None) for name in parameter_names(function)}
    return {name: value for name, value in found.items() if value is not None}


def is_verbose(arguments: argparse.Namespace) -> bool:
    """Return whether to show progress and a summary: with neither ``--quiet`` nor ``--json``."""
    return not arguments.quiet and not arguments.json


def print_report(report: Any, arguments: argparse.Namespace, **settings: Any) -> None:
    """Print a report: as JSON with ``--json``, else ``to_text(**settings)`` with its parameters written as options."""
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1), flush=True)
    else:
        text = report.to_text(**settings)
        print_text(option_text(text, getattr(report, "parameters", ()), arguments.parser))


def add_hdf5(group: Any) -> None:
    """Add the options that name the datasets of images and labels in an HDF5 file, and say how to interpret images."""
    add_options(group, {"--images NAME": "dataset of images, as arrays or encoded files (default: detected)"})
    labels = group.add_mutually_exclusive_group()
    add_options(labels, {"--labels NAME": "dataset of labels (default: detected)"})
    labels.add_argument("--no-labels", action="store_const", const="", dest="labels", help="ignore the file's labels")
    add_options(group, {
        "--channel-axis WHERE": "position of the channel axis of an image: last, first or none (default: detected)",
        "--value-range LOW:HIGH": "the pixel values that become 0 and 255 (default: 0:1 for floats; integers keep "
        "their values)",
    })  # fmt: skip


def option_text(text: str, fragments: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return the text with each of `fragments`, such as ``size=64``, replaced by its option, ``--size 64``."""
    # Replace the longest fragments first, because one may begin with another. Do not replace parts of paths, or
    # names in quotes, such as that of a dataset 'labels'.
    for fragment in sorted(fragments, key=len, reverse=True):
        option = _option_text(fragment, parser) or fragment
        text = re.sub(rf"(?<![\w./'-]){re.escape(fragment)}(?![\w/]|\.\w)", lambda _: option, text)  # noqa: B023
    return text


def _option_text(fragment: str, parser: argparse.ArgumentParser) -> str | None:
    """Return the command-line option for ``name`` or ``name=value``; None if the command has no such option.

    ``name=True`` always becomes an option, because the message may recommend another command: doctor, for example,
    refuses the file of an unfinished conversion, and recommends running the conversion again with ``resume=True``.
    """
    name, _, text = fragment.partition("=")
    try:
        value: Any = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text.strip("[]")
    flag = "--" + name.replace("_", "-")
    # Private API: argparse has no public list of a parser's options.
    actions = [action for action in parser._actions if flag in action.option_strings or action.dest == name]
    if text:  # Prefer --no-labels to --labels ''.
        actions.sort(key=lambda action: action.const != value)
    for action in actions:
        if action.option_strings and action.nargs == 0 and (not text or action.const == value):
            return action.option_strings[-1]
        if action.option_strings and action.nargs != 0:
            return f"{action.option_strings[-1]} {shlex.quote(str(value))}" if text else action.option_strings[-1]
    return flag if value is True else None
