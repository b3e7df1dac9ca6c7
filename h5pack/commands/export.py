"""The command `h5pack export`: its arguments and its output."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from h5pack.commands.arguments import add_hdf5, add_workers, comma_parts


def add(commands: Any) -> None:
    """Add this command and its arguments to the parser."""
    export = commands.add_parser(
        "export",
        help="write a file's images as PNG or JPEG files in class folders",
        description="Write the images of a pack, or of any HDF5 file, as image files into one folder per split and "
        "class, with a manifest that lists all labels. DIR appears only when the export is complete.",
    )
    export.set_defaults(run=run)
    export.add_argument("file", metavar="FILE", help="a pack, or any HDF5 file")
    # The argument must be called "out": the message after Ctrl-C looks for unfinished output at arguments.out.
    export.add_argument("out", type=_without_slash, metavar="DIR", help="the folder to create")

    what = export.add_argument_group("what to export")
    what.add_argument(
        "--split", dest="splits", action="append", default=[], metavar="NAME", help="export only this split; repeatable"
    )
    what.add_argument("--limit", type=int, metavar="N", help="export at most N images, evenly spaced in FILE")
    add_hdf5(what)
    what.add_argument(
        "--fields", type=comma_parts, default=(), metavar="A,B",
        help="datasets (one row per image) to write into the manifest (default: all fields of a pack)",
    )  # fmt: skip

    how = export.add_argument_group("execution options")
    how.add_argument(
        "--format", metavar="FORMAT",
        help="image format: png (lossless) or jpeg (default: jpeg for a pack that keeps JPEG files, else png)",
    )  # fmt: skip
    how.add_argument("--quality", type=int, metavar="N", help="JPEG quality, 1 to 100 (default 95)")
    add_workers(how)
    how.add_argument("--start-method", metavar="METHOD", help="how to start processes: fork, forkserver or spawn")
    how.add_argument("--overwrite", action="store_true", help="replace an earlier export when the new one is complete")
    how.add_argument("--resume", action="store_true", help="continue an interrupted export")
    how.add_argument("--quiet", action="store_true", help="print no progress and no summary")


def _without_slash(folder: str) -> str:
    return folder.rstrip("/") or folder


def run(arguments: argparse.Namespace) -> int:
    """Export the images; return the exit status, 1 if any rows could not be exported."""
    from h5pack.exporter.exporter import export

    verbose = not arguments.quiet and not arguments.json
    names = (
        "format", "quality", "splits", "limit", "images", "labels", "fields", "channel_axis", "value_range",
        "num_workers", "start_method", "overwrite", "resume",
    )  # fmt: skip
    keywords = {name: getattr(arguments, name) for name in names}
    report = export(arguments.file, arguments.out, progress=verbose, **keywords)
    named = replace(report, path=arguments.out)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1))
    elif verbose:
        print(named.to_text())
    if not report.ok and not arguments.json:
        print(named.damage_text(), file=sys.stderr)
    return 0 if report.ok else 1
