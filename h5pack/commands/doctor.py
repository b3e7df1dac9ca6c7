"""The command `h5pack doctor`: its arguments and its output."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from typing import Any

from h5pack.commands.arguments import print_report
from h5pack.errors import OptionsError
from h5pack.system.text import error_line


def add(commands: Any) -> None:
    """Add this command and its arguments to the parser."""
    doctor = commands.add_parser(
        "doctor",
        help="find out why a GPU waits for data",
        description="Measure the stages of feeding a training step (storage, loader, copy, normalization, step), each "
        "alone and all together. Name the bottleneck, and recommend what to change. A GPU is not required.",
    )
    doctor.set_defaults(run=run)
    doctor.add_argument("file", metavar="FILE")
    what = doctor.add_argument_group("what to feed")
    what.add_argument("--split", metavar="NAME", help="feed only this split (default: all rows)")
    what.add_argument("--images", default="images", metavar="NAME", help="the dataset of images (default: detected)")
    what.add_argument("--labels", default="labels", metavar="NAME", help="the dataset of labels (default: detected)")
    how = doctor.add_argument_group("how to feed it")
    how.add_argument(
        "--batch-size", type=int, default=256, metavar="N",
        help="images per batch, at most a quarter of the images (default: 256)",
    )  # fmt: skip
    how.add_argument(
        "--threads", type=int, dest="num_threads", metavar="N",
        help="reading threads of H5Loader (default: 4, or the number of CPUs if that is lower)",
    )  # fmt: skip
    how.add_argument(
        "--workers", type=int, dest="num_workers", metavar="N",
        help="use a DataLoader with N workers instead of H5Loader",
    )  # fmt: skip
    how.add_argument(
        "--window", type=int, default=16, metavar="N", help="chunks that are shuffled together (default: 16)"
    )
    how.add_argument("--transform", metavar="MODULE:FUNCTION", help="your transform of images, run on the CPU")
    how.add_argument(
        "--no-pin", action="store_false", default=None, dest="pin_memory", help="do not copy batches to pinned memory"
    )
    how.add_argument(
        "--pin", action="store_true", default=None, dest="pin_memory",
        help="copy batches to pinned memory (default: with a GPU)",
    )  # fmt: skip
    step = doctor.add_argument_group("the step")
    step.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:1 (default: cuda if available)")
    step.add_argument(
        "--model", metavar="MODULE:FACTORY",
        help="function that returns your model or training step (default: a small network)",
    )  # fmt: skip
    step.add_argument(
        "--dtype", default="float32", metavar="NAME",
        help="dtype of the images on the device: float32 (default), bfloat16 or float16",
    )  # fmt: skip
    doctor.add_argument("--seconds", type=float, default=30.0, metavar="S", help="total time in seconds (default: 30)")
    doctor.add_argument("--quiet", action="store_true", help="show no progress")
    doctor.add_argument("--plot", metavar="FILE", help="also draw the stages' speeds into a .png, .svg or .pdf file")


_NOT_PARAMETERS = ("file", "model", "transform", "plot", "quiet", "json", "debug", "run", "parser")


def run(arguments: argparse.Namespace) -> int:
    """Find the bottleneck of feeding a step and print the report; return the exit status, 1 if there are failures."""
    begun = time.perf_counter()
    # Load the user's functions before torch, whose import takes seconds, so that a mistyped name fails at once.
    named = {name: load_named(f"--{name}", getattr(arguments, name)) for name in ("model", "transform")}
    from h5pack.benchmark.plots import check_plot_file
    from h5pack.doctor.diagnose import Diagnosis
    from h5pack.doctor.loaders import DiagnoseSettings

    settings = DiagnoseSettings(
        path=arguments.file,
        **named,
        **{name: value for name, value in vars(arguments).items() if name not in _NOT_PARAMETERS},
    )
    if arguments.plot is not None:
        check_plot_file(arguments.plot)
    show = None if arguments.quiet or arguments.json or not sys.stderr.isatty() else _show
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
    if sys.stderr.isatty() and not arguments.json and not arguments.quiet:
        _show("")
    print_report(report, arguments)
    for failure in report.failures:
        print(f"h5pack: {failure}", file=sys.stderr)
    if arguments.plot is not None:
        from h5pack.doctor.report import draw_stages

        draw_stages(report, arguments.plot)


def _show(text: str) -> None:
    """Show the current activity in a line that the next call overwrites."""
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def load_named(option: str, text: str | None) -> Any:
    """Return the callable that `text`, MODULE:NAME, names; None for None. The working directory is searched, too."""
    if text is None:
        return None
    module_name, _, name = text.partition(":")
    if not (module_name and name):
        raise OptionsError(f"{option} {text}: give MODULE:NAME, such as mypackage.models:build")
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
            raise OptionsError(
                f"{option} {text}: {module_name!r} has no attribute {name!r}; name a function or class of that module"
            )
        found = getattr(found, part)
    if not callable(found):
        raise OptionsError(f"{option} {text}: cannot be called ({type(found).__name__}); name a function or class")
    return found
