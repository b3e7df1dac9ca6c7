"""The command `h5pack doctor`: its arguments and its output."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from typing import Any

from h5pack.commands.arguments import option_text
from h5pack.errors import OptionsError


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add this command and its arguments to the parser."""
    doctor = commands.add_parser(
        "doctor",
        parents=[common],
        help="why a GPU waits: measure each stage of feeding it, name the slowest, say what would help",
        description="Measure the stages of feeding a training step apart and together: storage, loader, copy, "
        "normalizing, step. Name the bottleneck, and say what would move it. Works without a GPU, too.",
    )
    doctor.set_defaults(run=run, parser=doctor)
    doctor.add_argument("file", metavar="FILE")
    what = doctor.add_argument_group("what to feed")
    what.add_argument("--split", metavar="NAME", help="one of the file's splits (default: all rows)")
    what.add_argument("--images", default="images", metavar="NAME", help="the dataset of images (default: images)")
    what.add_argument("--labels", default="labels", metavar="NAME", help="the dataset of labels (default: labels)")
    how = doctor.add_argument_group("how it is fed")
    how.add_argument("--batch-size", type=int, default=256, metavar="N", help="images a batch (default: 256)")
    how.add_argument("--threads", type=int, dest="num_threads", metavar="N", help="of H5Loader (default: its own)")
    how.add_argument(
        "--workers", type=int, dest="num_workers", metavar="N", help="feed by H5Dataset in a DataLoader with N workers"
    )
    how.add_argument("--window", type=int, default=16, metavar="N", help="chunks shuffled together (default: 16)")
    how.add_argument("--transform", metavar="MODULE:FUNCTION", help="your transform on the host")
    how.add_argument(
        "--no-pin", action="store_const", const=False, dest="pin_memory", help="batches in ordinary memory"
    )
    how.add_argument(
        "--pin", action="store_const", const=True, dest="pin_memory", help="in pinned memory (default: with a GPU)"
    )
    step = doctor.add_argument_group("the step")
    step.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: cuda where there is some)")
    step.add_argument("--model", metavar="MODULE:FACTORY", help="makes your model, or step (default: a small network)")
    step.add_argument("--dtype", default="float32", metavar="NAME", help="float32, bfloat16 or float16")
    doctor.add_argument("--seconds", type=float, default=30.0, metavar="S", help="time for measuring (default: 30)")
    doctor.add_argument("--plot", metavar="FILE", help="draw the stages into a .png, .svg or .pdf file")


_NOT_PARAMETERS = ("file", "model", "transform", "plot", "json", "debug", "run", "parser")


def run(arguments: argparse.Namespace) -> int:
    """Diagnose how a file is fed and print the report; return the exit status, 1 if the report has failures."""
    from h5pack.benchmark.plots import check_plot_file
    from h5pack.doctor.diagnose import Diagnosis
    from h5pack.doctor.target import DiagnoseSettings

    settings = DiagnoseSettings(
        path=arguments.file,
        model=_named(arguments, "model"),
        transform=_named(arguments, "transform"),
        **{name: value for name, value in vars(arguments).items() if name not in _NOT_PARAMETERS},
    )
    if arguments.plot is not None:
        check_plot_file(arguments.plot)
    with Diagnosis(settings, None if arguments.json or not sys.stderr.isatty() else _show) as diagnosis:
        try:
            diagnosis.run()
        except KeyboardInterrupt:
            _print(diagnosis.report(), arguments)
            raise
        report = diagnosis.report()
    _print(report, arguments)
    return 1 if report.failures else 0


def _print(report: Any, arguments: argparse.Namespace) -> None:
    """Print the report, and draw it if requested. Failures are also printed to standard error."""
    if sys.stderr.isatty() and not arguments.json:
        _show("")
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1), flush=True)
    else:
        print(option_text(report.to_text(), report.parameters, arguments.parser), flush=True)
    for failure in report.failures:
        print(f"h5pack: {failure}", file=sys.stderr)
    if arguments.plot is not None:
        from h5pack.doctor.plot import draw_stages

        draw_stages(report, arguments.plot)


def _show(text: str) -> None:
    """Show the current activity in a line that the next call overwrites."""
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _named(arguments: argparse.Namespace, name: str) -> Any:
    """Return the object that ``--model`` or ``--transform`` names; None if the option was not given.

    If the object cannot be loaded, return a function that raises the error when it is called, so that everything else
    is still measured.
    """
    text = getattr(arguments, name)
    if text is None:
        return None
    if not all(text.partition(":")):
        raise OptionsError(f"--{name} {text}: give MODULE:NAME, such as mypackage.models:build")
    try:
        return load_named(f"--{name}", text)
    except OptionsError as error:
        failure = error

    def fail(*_: Any, **__: Any) -> None:
        raise failure

    return fail


def load_named(option: str, text: str) -> Any:
    """Return the callable that MODULE:NAME names. Modules in the working directory are found, too.

    Raises
    ------
    OptionsError
        If the module cannot be imported or lacks the name, or the object is not callable.
    """
    from h5pack.doctor.step import error_line

    module_name, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        # For an installed command, sys.path begins with the command's folder and lacks the working directory.
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        # The user's module may raise any exception when it is imported.
        raise OptionsError(f"{option} {text}: {module_name!r} cannot be imported ({error_line(error)})") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise OptionsError(f"{option} {text}: {module_name!r} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise OptionsError(f"{option} {text}: that is a {type(found).__name__}, and cannot be called")
    return found
