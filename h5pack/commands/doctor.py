"""`h5pack doctor` on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    doctor = commands.add_parser(
        "doctor",
        parents=[common],
        help="why a GPU waits: measure each stage of feeding it, name the slowest, say what would help",
        description="Measure the stages of feeding a training step apart and together: storage, loader, copy, "
        "normalising, step. Name the bottleneck, and say what would move it. Works without a GPU, too.",
    )
    doctor.set_defaults(run=run)
    doctor.add_argument("file", metavar="FILE")
    what = doctor.add_argument_group("what to feed")
    what.add_argument("--split", metavar="NAME", help="one of the file's splits (default: all rows)")
    what.add_argument("--images", default="images", metavar="NAME", help="the dataset of images (default: images)")
    what.add_argument("--labels", default="labels", metavar="NAME", help="the dataset of labels (default: labels)")
    how = doctor.add_argument_group("how it is fed")
    how.add_argument("--batch-size", type=int, default=256, metavar="N", help="images a batch (default: 256)")
    how.add_argument("--threads", type=int, metavar="N", help="of H5Loader (default: its own)")
    how.add_argument("--workers", type=int, metavar="N", help="feed by H5Dataset in a DataLoader with N workers")
    how.add_argument("--window", type=int, default=16, metavar="N", help="chunks shuffled together (default: 16)")
    how.add_argument("--transform", metavar="MODULE:FUNCTION", help="your transform on the host")
    how.add_argument(
        "--pin", action=argparse.BooleanOptionalAction, help="batches in pinned memory (default: with a GPU)"
    )
    step = doctor.add_argument_group("the step")
    step.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: cuda where there is some)")
    step.add_argument("--model", metavar="MODULE:FACTORY", help="makes your model, or step (default: a small network)")
    step.add_argument("--dtype", default="float32", metavar="NAME", help="float32, bfloat16 or float16")
    doctor.add_argument("--seconds", type=float, default=30.0, metavar="S", help="time for measuring (default: 30)")
    doctor.add_argument("--plot", metavar="PNG", help="draw the stages")


def run(arguments: argparse.Namespace) -> int:
    """Examine a file's feeding; the exit status."""
    from h5pack.doctor.examination import Examination
    from h5pack.doctor.options import DoctorOptions
    from h5pack.doctor.waterfall import require_plot

    options = DoctorOptions(
        path=arguments.file,
        device=arguments.device,
        model=arguments.model,
        transform=arguments.transform,
        batch_size=arguments.batch_size,
        threads=arguments.threads,
        workers=arguments.workers,
        split=arguments.split,
        images=arguments.images,
        labels=arguments.labels,
        window=arguments.window,
        dtype=arguments.dtype,
        pin=arguments.pin,
        seconds=arguments.seconds,
    )
    if arguments.plot is not None:
        require_plot(arguments.plot)
    examination = Examination(options, None if arguments.json or not sys.stderr.isatty() else _show)
    try:
        examination.run()
    except KeyboardInterrupt:
        _print(examination, arguments)
        raise
    finally:
        examination.close()
    failures = _print(examination, arguments)
    return 1 if failures else 0


def _print(examination: Any, arguments: argparse.Namespace) -> list[str]:
    """Print and draw what was found; the failures, which were printed to standard error."""
    from h5pack.doctor.text import diagnosis_text
    from h5pack.doctor.waterfall import draw

    diagnosis = examination.diagnosis()
    if sys.stderr.isatty() and not arguments.json:
        _show("")
    print(json.dumps(diagnosis.to_json(), indent=1) if arguments.json else diagnosis_text(diagnosis), flush=True)
    for failure in diagnosis.failures:
        print(f"h5pack: {failure}", file=sys.stderr)
    if arguments.plot is not None:
        draw(diagnosis, arguments.plot)
    return list(diagnosis.failures)


def _show(text: str) -> None:
    """Tell what is being done, in a line that the next one overwrites."""
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
