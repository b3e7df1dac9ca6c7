"""`h5pack preview` on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from h5pack.commands.arguments import add_hdf5, hdf5_options


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    preview = commands.add_parser(
        "preview",
        parents=[common],
        help="draw some images of every split and class on one sheet",
        description="Draw a contact sheet of a pack, or of any HDF5 file: some images of each class of each split, "
        "with names, counts and row numbers.",
    )
    preview.set_defaults(run=run)
    preview.add_argument("file", metavar="FILE", help="a pack, or an HDF5 file of anybody's")
    preview.add_argument("out", metavar="OUT", help="the picture to make: .png, .jpg or .webp")

    what = preview.add_argument_group("what to show")
    what.add_argument("--split", action="append", default=[], metavar="NAME", help="only this split; repeatable")
    what.add_argument("--per-class", type=int, metavar="N", help="images of each class (default 8)")
    what.add_argument(
        "--classes", type=int, default=20, metavar="N", help="classes of each split, at most (default 20)"
    )
    what.add_argument("--seed", type=int, metavar="N", help="draw rows at random (default: evenly spaced)")
    add_hdf5(what)

    how = preview.add_argument_group("how it looks")
    how.add_argument("--tile", type=int, default=128, metavar="PIXELS", help="longer side of an image (default 128)")
    how.add_argument("--font", metavar="FILE", help="a font for names in signs that the usual ones have not")


def run(arguments: argparse.Namespace) -> int:
    """Draw a sheet as the arguments say; the exit status, 1 where rows could not be shown."""
    from h5pack.tools.preview import PreviewOptions, preview
    from h5pack.tools.preview_report import preview_lines

    options = PreviewOptions(
        splits=tuple(arguments.split),
        per_class=arguments.per_class,
        classes=arguments.classes,
        tile=arguments.tile,
        seed=arguments.seed,
        font=arguments.font,
        **hdf5_options(arguments),
    )
    report = preview(arguments.file, arguments.out, options)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        print(preview_lines(report, arguments.out))
        for row in report.damaged:
            print(f"{arguments.file}: row {row.row} ({row.name}): {row.reason}", file=sys.stderr)
    return 0 if report.ok else 1
