"""`h5pack export` on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


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


def add_hdf5(group: Any) -> None:
    """Add the options that say which datasets of an HDF5 file mean what."""
    group.add_argument(
        "--images", metavar="NAME", help="the dataset of images, numbers or encoded ones (default: look)"
    )
    labels = group.add_mutually_exclusive_group()
    labels.add_argument("--labels", metavar="NAME", help="the dataset of labels (default: look)")
    labels.add_argument("--no-labels", action="store_const", const="", dest="labels", help="take no labels")
    group.add_argument("--channel-axis", metavar="WHERE", help="of a row: last, first or none (default: look)")
    group.add_argument("--value-range", metavar="LOW:HIGH", help="values that become 0 and 255 (default of floats 0:1)")


def hdf5_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the options of `add_hdf5` say, by the names of `h5pack.sources.hdf5_catalog.HDF5Datasets`."""
    from h5pack.pack.options import parse_range

    return {
        "images": arguments.images,
        "labels": arguments.labels,
        "channel_axis": arguments.channel_axis,
        "value_range": None if arguments.value_range is None else parse_range(arguments.value_range),
    }


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
        fields=tuple(part.strip() for part in (arguments.fields or "").split(",") if part.strip()),
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
