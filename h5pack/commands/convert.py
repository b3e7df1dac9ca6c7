"""The command `h5pack convert`: its arguments and its output."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields, replace
from typing import Any

from h5pack.commands.arguments import add_hdf5, add_workers, comma_parts
from h5pack.errors import OptionsError
from h5pack.system.text import counted


def add(commands: Any) -> None:
    """Add this command and its arguments to the parser."""
    convert = commands.add_parser(
        "convert",
        help="pack a folder of images, or another HDF5 file, into an HDF5 file",
        description="Pack a folder of images, or the images of another HDF5 file, into an HDF5 file. OUT appears only "
        "when it is complete.",
    )
    convert.set_defaults(run=run)
    convert.add_argument("source", metavar="SOURCE", help="a folder of images, a CSV or TSV manifest, or any HDF5 file")
    convert.add_argument("out", metavar="OUT", help="the HDF5 file to create")

    what = convert.add_argument_group("what to pack")
    what.add_argument(
        "--source", dest="source_kind", metavar="KIND", help="flat, classes, splits, celeba, manifest or hdf5"
    )
    what.add_argument("--include", action="append", default=[], metavar="GLOB", help="only matching paths; repeatable")
    what.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="no matching paths; repeatable")
    what.add_argument("--limit", type=int, metavar="N", help="at most N images, evenly spaced")
    what.add_argument("--root", metavar="DIR", help="folder that a manifest's relative paths refer to")
    what.add_argument("--path-column", metavar="NAME", help="a manifest's column of paths")
    what.add_argument(
        "--label-columns", type=comma_parts, metavar="A,B", help="a manifest's label column, or columns of a table"
    )
    what.add_argument("--split-column", metavar="NAME", help="a manifest's column of splits")
    what.add_argument(
        "--field-columns", type=comma_parts, metavar="A,B", help="a manifest's columns of numbers, stored as fields"
    )

    hdf5 = convert.add_argument_group("HDF5 sources")
    add_hdf5(hdf5)
    hdf5.add_argument("--fields", type=comma_parts, metavar="A,B", help="further datasets with one row per image")
    _add_layout(convert)
    _add_execution(convert)


def _add_layout(convert: argparse.ArgumentParser) -> None:
    rows = convert.add_argument_group("rows")
    rows.add_argument("--size", metavar="HxW", help="height and width of every row, or one number for a square")
    rows.add_argument("--fit", metavar="HOW", help="how to reach --size: crop (default), pad or stretch")
    rows.add_argument("--resample", metavar="FILTER", help="Pillow's filter (default bicubic)")
    rows.add_argument("--draft", action="store_true", help="decode JPEGs at reduced size: faster, but other pixels")
    rows.add_argument("--mode", metavar="MODE", help="rgb (default) or gray")
    rows.add_argument("--layout", metavar="LAYOUT", help="nhwc (default) or nchw")
    rows.add_argument("--max-pixels", type=int, metavar="N", help="reject larger images as decompression bombs")

    file = convert.add_argument_group("file layout")
    file.add_argument("--order", metavar="ORDER", help="shuffled (default) or sorted")
    file.add_argument("--seed", type=int, metavar="N", help="seed of the shuffled order (default 0)")
    file.add_argument("--chunk-rows", metavar="N", help="rows per chunk, or auto (default)")
    file.add_argument("--chunk-bytes", metavar="SIZE", help="bytes per chunk, such as 4MiB")
    file.add_argument(
        "--compression", metavar="METHOD", help="none (default), gzip[:1-9], zstd[:1-22] or bitshuffle-lz4"
    )
    file.add_argument("--compat", action="store_true", help="write for readers of HDF5 1.8")


def _add_execution(convert: argparse.ArgumentParser) -> None:
    how = convert.add_argument_group("execution options")
    add_workers(how)
    how.add_argument("--start-method", metavar="METHOD", help="fork, forkserver or spawn")
    how.add_argument("--io", metavar="HOW", help="how to write: direct, buffered or auto (default)")
    how.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    how.add_argument("--overwrite", action="store_true", help="replace OUT when the new file is complete")
    how.add_argument("--resume", action="store_true", help="continue an interrupted conversion")
    how.add_argument("--strict", action="store_true", help="stop at the first image that cannot be packed")
    how.add_argument("--quiet", action="store_true", help="print no plan and no progress")


def run(arguments: argparse.Namespace) -> int:
    """Convert the source and print the report; return the exit status."""
    from h5pack.pack.conversion import Conversion

    verbose = not arguments.quiet and not arguments.json
    with Conversion(arguments.source, arguments.out, progress=verbose, **_keywords(arguments)) as conversion:
        report = conversion.existing_report()
        if report is None:
            plan = conversion.plan()
            if arguments.dry_run or verbose:
                _print_plan(conversion, plan, arguments)
            if arguments.dry_run:
                return 0
            report = conversion.run()
        if arguments.json:
            print(json.dumps(asdict(report), indent=1))
        elif verbose:
            print(replace(report, path=arguments.out).to_text())
    return 0


def _print_plan(conversion: Any, plan: Any, arguments: argparse.Namespace) -> None:
    seconds = conversion.estimate_seconds()
    if arguments.json:
        print(json.dumps({**plan.to_json(), "estimated_seconds": round(seconds, 3)}, indent=1))
    elif not arguments.quiet:
        print(plan.to_text())
        workers = counted(conversion.num_workers, "worker")
        print(f"time     about {max(1, round(seconds))} s on {workers}", flush=True)


def _keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given arguments as keywords of `h5pack.convert`."""
    from h5pack.pack.options import ConvertOptions

    values = {field.name: getattr(arguments, field.name) for field in fields(ConvertOptions)}
    values["chunk_rows"] = _chunk_rows(arguments.chunk_rows)
    return {name: value for name, value in values.items() if value is not None}


def _chunk_rows(text: str | None) -> int | None:
    if text is None or text == "auto":
        return None
    if not text.isdigit():
        fragment = f"chunk_rows={text!r}"
        raise OptionsError(f"{fragment} is neither a whole number nor auto", parameters=(fragment,))
    return int(text)
