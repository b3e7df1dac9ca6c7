"""The commands that read a file, except `bench` and `doctor`: their arguments and their output."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from h5pack.commands.arguments import (
    PROCESSES,
    add_hdf5,
    add_options,
    add_splits,
    is_verbose,
    keywords,
    print_report,
)
from h5pack.system.text import print_text, printable


def add(commands: Any) -> None:
    """Add these commands and their arguments to the parser."""
    info = commands.add_parser(
        "info",
        help="show what an HDF5 file contains and how it is stored",
        description="Describe any HDF5 file: its datasets, chunks, filters and storage overhead, the recommended chunk "
        "cache, and properties that slow down reading, with the command that fixes them.",
    )
    info.set_defaults(run=_info)
    info.add_argument("path", metavar="FILE")
    add_options(info, {
        "--labels NAME": "dataset of labels of an HDF5 file (default: detected)",
        "--stats": "also report class counts and channel statistics",
        "--full": "also print the datasets after the first 200, kinds of chunk index, chunk caches for h5py, and what "
        "opening the file reads",
    })  # fmt: skip

    verify = commands.add_parser(
        "verify",
        help="check a pack's structure and every row's checksum",
        description="Check a pack's structure and every row's checksum; exit status 1 if anything is damaged.",
    )
    verify.set_defaults(run=_verify)
    verify.add_argument("path", metavar="FILE")
    add_options(verify, {"--workers N": "worker processes, at least 2 (default: one per available CPU)"})
    _add_preview(commands)
    _add_export(commands)


def _add_preview(commands: Any) -> None:
    preview = commands.add_parser(
        "preview",
        help="draw some images of every split and class on one sheet",
        description="Draw a contact sheet of a pack, or of any HDF5 file: some images of each class of each split, "
        "with names, counts and row numbers.",
    )
    preview.set_defaults(run=_preview)
    preview.add_argument("path", metavar="FILE", help="a pack, or any HDF5 file")
    preview.add_argument("out", metavar="OUT", help="the picture to create (.png, .jpg or .webp)")

    what = preview.add_argument_group("what to show")
    add_splits(what, "show only this split")
    add_options(what, {
        "--per-class N": "show at most N images of each class of a split (default 8); without classes, at most N "
        "images of each split (default 32)",
        "--max-classes N": "show at most N classes per split (default 20)",
        "--seed N": "select rows at random with this seed (default: evenly spaced rows)",
    })  # fmt: skip
    add_hdf5(what)
    how = preview.add_argument_group("how it looks")
    add_options(how, {"--tile PIXELS": "maximum length of an image's longer side (default 128)"})


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a file's images into class folders of image files",
        description="Write the images of a pack, or of any HDF5 file, as image files into one folder per split and "
        "class, with a manifest that lists all labels. DIR appears only when the export is complete.",
    )
    export.set_defaults(run=_export)
    export.add_argument("file", metavar="FILE", help="a pack, or any HDF5 file")
    export.add_argument(
        "folder", type=lambda name: name.rstrip("/") or name, metavar="DIR", help="the folder to create"
    )

    what = export.add_argument_group("what to export")
    add_splits(what, "export only this split")
    add_options(what, {"--limit N": "export at most N images, evenly spaced in FILE"})
    add_hdf5(what)
    add_options(what, {
        "--fields A,B": "further datasets to export, with one row per image; masks and images become files, other "
        "values go into the manifest (default: all fields of a pack)",
    })  # fmt: skip
    add_options(export.add_argument_group("execution options"), {
        "--format FORMAT": "image format: png (lossless) or jpeg (default: jpeg for a pack that keeps JPEG files, else "
        "png)",
        "--quality N": "JPEG quality, 1 to 100 (default 95)",
        **PROCESSES,
        "--overwrite": "replace an earlier export when the new one is complete; discard an unfinished export",
        "--resume": "continue an interrupted export",
        "--quiet": "print no progress and no summary",
    })  # fmt: skip


def _info(arguments: argparse.Namespace) -> int:
    from h5pack.inspect.info import info

    report = info(**keywords(arguments, info))
    print_report(report, arguments, full=arguments.full)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    """Verify a pack and print the report; return the exit status, 1 if anything is damaged."""
    from h5pack.inspect.verify import verify

    report = verify(progress=not arguments.json, **keywords(arguments, verify))
    print_report(report, arguments)
    return 0 if report.ok else 1


def _preview(arguments: argparse.Namespace) -> int:
    """Draw a contact sheet; return the exit status, 1 if any rows could not be shown."""
    from h5pack.inspect.preview import preview

    report = preview(**keywords(arguments, preview))
    print_report(report, arguments)
    if not arguments.json:
        if any(split.left_out for split in report.splits):
            num_classes = max(split.named for split in report.splits)
            print(f"  to show all classes, if they fit on a sheet: --max-classes {num_classes}")
        for row in report.damaged:
            print(printable(f"{arguments.path}: row {row.row} ({row.name}): {row.reason}"), file=sys.stderr)
    return 0 if report.ok else 1


def _export(arguments: argparse.Namespace) -> int:
    """Export the images; return the exit status, 1 if any rows could not be exported."""
    from h5pack.exporter.exporter import export

    report = export(progress=is_verbose(arguments), **keywords(arguments, export))
    named = replace(report, path=arguments.folder)
    if arguments.json or not arguments.quiet:
        print_report(report if arguments.json else named, arguments)
    if not report.ok and not arguments.json:
        print_text(named.damage_text(), sys.stderr)
    return 0 if report.ok else 1
