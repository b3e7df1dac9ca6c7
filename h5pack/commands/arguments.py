"""Arguments that several commands share, and translation of parameters in messages and reports to options."""

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
        raise argparse.ArgumentTypeError(f"{value!r} is an empty list; give at least one value, or omit the option")
    return names


_TYPES: dict[str, Any] = {
    "N": int, "Q": int, "PIXELS": int, "FRACTION": float, "S": float, "A,B": comma_names,
}  # fmt: skip
"""The type to which an option's value is converted, by the option's metavar. With other metavars, values stay text."""
_PARAMETERS = {
    "--source": "source_kind", "--workers": "num_workers", "--threads": "num_threads", "--cache": "caches",
}  # fmt: skip
"""For each option that is not named like its parameter: the name of the parameter."""
PROCESSES = {
    "--workers N": "worker processes (default: one per available CPU)",
    "--start-method METHOD": "how to start worker processes: fork, forkserver or spawn (default: fork if that is safe, "
    "else forkserver)",
}


def add_options(group: Any, options: dict[str, str], **settings: Any) -> None:
    """Add options to a parser or group. `options` maps each option to its help text.

    An option with a metavar, such as "--limit N", has a value. An option without a metavar is a flag. `settings` are
    further keywords of `add_argument`, for all of these options.
    """
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
    """Return whether to show progress, and the plan of a conversion. False with ``--quiet`` or ``--json``."""
    return not arguments.quiet and not arguments.json


def print_report(report: Any, arguments: argparse.Namespace, **settings: Any) -> None:
    """Print a report: as JSON with ``--json``, else as the text ``report.to_text(**settings)``.

    In the text, each fragment in ``report.parameters``, such as ``num_threads=4``, becomes an option (``--threads 4``).
    """
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1), flush=True)
    else:
        text = report.to_text(**settings)
        print_text(option_text(text, getattr(report, "parameters", ()), arguments.parser))


def add_hdf5(group: Any) -> None:
    """Add the options for HDF5 files: which datasets hold the images and labels, and how to interpret the images."""
    add_options(group, {"--images NAME": "dataset of images, as arrays or encoded files (default: detected)"})
    labels = group.add_mutually_exclusive_group()
    add_options(labels, {"--labels NAME": "dataset of labels (default: detected)"})
    labels.add_argument("--no-labels", action="store_const", const="", dest="labels", help="ignore the file's labels")
    add_options(group, {
        "--channel-axis WHERE": "position of the channel axis of an image: last, first or none (default: detected)",
        "--value-range LOW:HIGH": "the pixel values that become 0 and 255 (default: 0:1 for floats and bools, 0:65535 "
        "for uint16, 0:255 for other integers)",
    })  # fmt: skip


def option_text(text: str, fragments: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return the text with each of `fragments`, such as ``size=64``, replaced by its option, ``--size 64``."""
    # Replace the longest fragments first, because a long fragment may begin with a shorter one. Do not replace text
    # inside a path, or a name in quotes, such as the dataset 'labels'.
    for fragment in sorted(fragments, key=len, reverse=True):
        option = _option_text(fragment, parser) or fragment
        text = re.sub(rf"(?<![\w./'-]){re.escape(fragment)}(?![\w/]|\.\w)", lambda _: option, text)  # noqa: B023
    return text


def _option_text(fragment: str, parser: argparse.ArgumentParser) -> str | None:
    """Return the command's option or argument for a fragment ``name`` or ``name=value``, or None if it has none.

    But ``name=True`` always becomes ``--name``, because the message may recommend another command. For example, doctor
    refuses the file of an unfinished conversion, and recommends running the conversion again with ``resume=True``.
    """
    name, _, text = fragment.partition("=")
    try:
        value: Any = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text.strip("[]")
    flag = "--" + name.replace("_", "-")
    # Private API: argparse has no public list of a parser's options.
    actions = [
        action
        for action in parser._actions
        if flag in action.option_strings
        or name == action.dest
        or (not action.option_strings and name == str(action.metavar).lower())
    ]
    if text:  # For labels='', prefer --no-labels to --labels ''.
        actions.sort(key=lambda action: action.const != value)
    for action in actions:
        option = str(action.option_strings[-1] if action.option_strings else action.metavar)
        if action.nargs == 0 and (not text or action.const == value):
            return option
        if action.nargs != 0:
            return f"{option} {shlex.quote(str(value))}" if text else option
    return flag if value is True else None
