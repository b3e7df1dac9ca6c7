"""The command `h5pack doctor`: its arguments and its output."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from typing import Any

from h5pack.commands.arguments import add_options, is_verbose, keywords, print_report
from h5pack.errors import OptionsError
from h5pack.system.text import error_line, printable


def add(commands: Any) -> None:
    """Add this command and its arguments to the parser."""
    doctor = commands.add_parser(
        "doctor",
        help="find out why a GPU waits for data",
        description="Measure the stages of feeding a training step (storage, loader, copy, normalization, step), each "
        "alone and all together. Name the bottleneck, and recommend what to change. A GPU is not required.",
    )
    doctor.set_defaults(run=run)
    doctor.add_argument("path", metavar="FILE")
    add_options(doctor.add_argument_group("what to feed"), {
        "--split NAME": "feed only this split (default: all rows)",
        "--images NAME": "the dataset of images (default: detected)",
        "--labels NAME": "the dataset of labels (default: detected)",
    })  # fmt: skip
    how = doctor.add_argument_group("how to feed it")
    add_options(how, {
        "--batch-size N": "images per batch (default: 256); reduced to a quarter of all images if it is larger",
        "--threads N": "reading threads of H5Loader (default: 4, or the number of CPUs if that is lower)",
        "--workers N": "use a DataLoader with N workers instead of H5Loader",
        "--window N": "number of chunks that are shuffled together (default: 16)",
        "--transform MODULE:FUNCTION": "your transform of images, run on the CPU",
    })  # fmt: skip
    pin: dict[str, Any] = {"default": None, "dest": "pin_memory"}
    add_options(how, {"--no-pin": "do not copy batches to pinned memory"}, action="store_false", **pin)
    add_options(how, {"--pin": "copy batches to pinned memory (default: with a GPU)"}, **pin)
    add_options(doctor.add_argument_group("the step"), {
        "--device NAME": "cpu, cuda or cuda:1 (default: cuda if available)",
        "--model MODULE:FACTORY": "function that returns your model or training step (default: a small network)",
        "--dtype NAME": "dtype of the images on the device: float32 (default), bfloat16 or float16",
    })  # fmt: skip
    add_options(doctor, {
        "--seconds S": "total time in seconds (default: 30)",
        "--quiet": "show no progress",
        "--plot FILE": "also draw the stages' speeds into a .png, .svg or .pdf file",
    })  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Find the bottleneck of feeding a step and print the report; return the exit status, 1 if there are failures."""
    begun = time.perf_counter()
    # Load the user's functions before torch, whose import takes seconds, so that a mistyped name fails at once.
    named = {name: load_named(f"--{name}", getattr(arguments, name)) for name in ("model", "transform")}
    from h5pack.benchmark.plots import check_plot_file
    from h5pack.doctor.diagnose import Diagnosis
    from h5pack.doctor.loaders import DiagnoseSettings

    settings = DiagnoseSettings(**{**keywords(arguments, DiagnoseSettings), **named})
    if arguments.plot is not None:
        check_plot_file(arguments.plot)
    show = _show if is_verbose(arguments) and sys.stderr.isatty() else None
    with Diagnosis(settings, show, elapsed=time.perf_counter() - begun) as diagnosis:
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
    if sys.stderr.isatty() and is_verbose(arguments):
        _show("")
    print_report(report, arguments)
    for failure in report.failures:
        print(printable(f"h5pack: {failure}"), file=sys.stderr)
    if arguments.plot is not None:
        from h5pack.doctor.report import draw_stages

        draw_stages(report, arguments.plot)


def _show(text: str) -> None:
    """Show the current activity on standard error, in a line that the next call overwrites."""
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def load_named(option: str, text: str | None) -> Any:
    """Return the callable that `text` (MODULE:NAME) names; None if `text` is None.

    Modules in the working directory are found, too.
    """
    if text is None:
        return None
    module_name, _, name = text.partition(":")
    if not (module_name and name):
        raise OptionsError(f"{option} {text}: give MODULE:NAME, such as mypackage.models:build")
    if os.getcwd() not in sys.path:
        # If h5pack runs as an installed command, sys.path begins with the command's folder, and the working directory
        # is missing.
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        # The user's module may raise any exception when it is imported, and may call sys.exit.
        raise OptionsError(f"{option} {text}: {module_name!r} cannot be imported ({error_line(error)})") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise OptionsError(
                f"{option} {text}: {module_name!r} has no attribute {name!r}; name a function or class of that module"
            )
        found = getattr(found, part)
    if not callable(found):
        raise OptionsError(f"{option} {text}: cannot be called ({type(found).__name__}); name a function or class")
    return found
