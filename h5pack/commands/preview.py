"""The command `h5pack preview`: its arguments and its output."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from h5pack.commands.arguments import add_hdf5, hdf5_options, print_report


def add(commands: Any) -> None:
    """Add this command and its arguments to the parser."""
    preview = commands.add_parser(
        "preview",
        help="draw some images of every split and class on one sheet",
        description="Draw a contact sheet of a pack, or of any HDF5 file: some images of each class of each split, "
        "with names, counts and row numbers.",
    )
    preview.set_defaults(run=run)
    preview.add_argument("file", metavar="FILE", help="a pack, or any HDF5 file")
    preview.add_argument("out", metavar="OUT", help="the picture to create (.png, .jpg or .webp)")

    what = preview.add_argument_group("what to show")
    what.add_argument("--split", action="append", default=[], metavar="NAME", help="show only this split; repeatable")
    what.add_argument("--per-class", type=int, metavar="N", help="show at most N images per class (default 8)")
    what.add_argument(
        "--max-classes", type=int, default=20, metavar="N", help="show at most N classes per split (default 20)"
    )
    what.add_argument(
        "--seed", type=int, metavar="N", help="select rows at random with this seed (default: evenly spaced rows)"
    )
    add_hdf5(what)

    how = preview.add_argument_group("how it looks")
    how.add_argument("--tile", type=int, default=128, metavar="PIXELS", help="longer side of each image (default 128)")


def run(arguments: argparse.Namespace) -> int:
    """Draw a contact sheet; return the exit status, 1 if any rows could not be shown."""
    from h5pack.inspect.preview import preview

    report = preview(
        arguments.file,
        arguments.out,
        splits=tuple(arguments.split),
        per_class=arguments.per_class,
        max_classes=arguments.max_classes,
        tile=arguments.tile,
        seed=arguments.seed,
        **hdf5_options(arguments),
    )
    print_report(report, arguments)
    if not arguments.json:
        if any(split.left_out for split in report.splits):
            print(f"  to show all classes: --max-classes {max(split.named for split in report.splits)}")
        for row in report.damaged:
            print(f"{arguments.file}: row {row.row} ({row.name}): {row.reason}", file=sys.stderr)
    return 0 if report.ok else 1
