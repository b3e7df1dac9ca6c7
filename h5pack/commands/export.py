"""`h5pack export` on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from h5pack.commands.arguments import add_hdf5, comma_parts, hdf5_options


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    export = commands.add_parser(
        "export",
        parents=[common],
        help="write a file's images as PNG or JPEG files in class folders",
        description="Write the images of a pack, or of any HDF5 file, as image files in folders of their splits and "
        "classes, with a manifest of all labels. Nothing appears under DIR before it is whole.",
    )
    export.set_defaults(run=run)
    export.add_argument("file", metavar="FILE", help="a pack, or an HDF5 file of anybody's")
    # Of this name, as the message after Ctrl-C looks for what is kept of it.
    export.add_argument("out", type=_without_slash, metavar="DIR", help="the folder to make")

    what = export.add_argument_group("what to export")
    what.add_argument("--split", action="append", default=[], metavar="NAME", help="only this split; repeatable")
    what.add_argument("--limit", type=int, metavar="N", help="at most N images, evenly spaced")
    add_hdf5(what)
    what.add_argument("--fields", metavar="A,B", help="further datasets with a row an image, for the manifest")

    how = export.add_argument_group("how to go about it")
    how.add_argument("--format", default="png", metavar="FORMAT", help="png (default): the very pixels; or jpeg")
    how.add_argument("--quality", type=int, metavar="N", help="of JPEGs, 1 to 100 (default 95)")
    how.add_argument("--workers", type=int, metavar="N", help="processes (default: the CPUs this process may use)")
    how.add_argument("--start-method", metavar="METHOD", help="fork, forkserver or spawn")
    how.add_argument("--overwrite", action="store_true", help="replace an earlier export when the new one is whole")
    how.add_argument("--resume", action="store_true", help="continue an interrupted export")
    how.add_argument("--quiet", action="store_true", help="no progress, no summary")


def _without_slash(folder: str) -> str:
    return folder.rstrip("/") or folder


def run(arguments: argparse.Namespace) -> int:
    """Export as the arguments say; the exit status, 1 where rows could not be exported."""
    from h5pack.tools.export_options import ExportOptions
    from h5pack.tools.export_report import damage_text, export_text
    from h5pack.tools.exporter import export

    options = ExportOptions(
        format=arguments.format,
        quality=arguments.quality,
        splits=tuple(arguments.split),
        limit=arguments.limit,
        fields=comma_parts(arguments.fields),
        workers=arguments.workers,
        start_method=arguments.start_method,
        overwrite=arguments.overwrite,
        resume=arguments.resume,
        **hdf5_options(arguments),
    )
    talk = not arguments.quiet and not arguments.json
    report = export(arguments.file, arguments.out, options, progress=talk)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1))
    elif talk:
        print(export_text(report, arguments.out))
    if not report.ok and not arguments.json:
        print(damage_text(report, arguments.out), file=sys.stderr)
    return 0 if report.ok else 1
