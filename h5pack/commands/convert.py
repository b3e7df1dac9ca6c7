"""`h5pack convert` on the command line."""

from __future__ import annotations

import argparse
import json
from typing import Any

from h5pack.commands.arguments import add_hdf5, comma_parts, hdf5_options
from h5pack.errors import OptionsError
from h5pack.wording import counted


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    convert = commands.add_parser(
        "convert",
        parents=[common],
        help="pack a folder of images, or another HDF5 file, into an HDF5 file",
        description="Pack a folder of images, or the images of another HDF5 file, into an HDF5 file. Nothing appears "
        "under OUT before it is whole.",
    )
    convert.set_defaults(run=run)
    convert.add_argument(
        "source", metavar="SOURCE", help="a folder of images, a CSV or TSV manifest, or an HDF5 file of anybody's"
    )
    convert.add_argument("out", metavar="OUT", help="the HDF5 file to make")

    what = convert.add_argument_group("what to pack")
    what.add_argument("--source", dest="kind", metavar="KIND", help="flat, classes, splits, celeba, manifest or hdf5")
    what.add_argument("--include", action="append", default=[], metavar="GLOB", help="only matching paths; repeatable")
    what.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="no matching paths; repeatable")
    what.add_argument("--limit", type=int, metavar="N", help="at most N images, evenly spaced")
    what.add_argument("--root", metavar="DIR", help="where a manifest's relative paths start")
    what.add_argument("--path-column", metavar="NAME", help="a manifest's column of paths")
    what.add_argument("--label-columns", metavar="A,B", help="a manifest's label column, or columns of a table")
    what.add_argument("--split-column", metavar="NAME", help="a manifest's column of splits")
    what.add_argument("--field-columns", metavar="A,B", help="a manifest's columns of numbers to store beside")

    _add_hdf5(convert)

    rows = convert.add_argument_group("how a row looks")
    rows.add_argument("--size", metavar="HxW", help="height and width of every row; one number: a square")
    rows.add_argument("--fit", default="crop", metavar="HOW", help="crop (default), pad or stretch to --size")
    rows.add_argument("--resample", default="bicubic", metavar="FILTER", help="Pillow's filter (default bicubic)")
    rows.add_argument("--draft", action="store_true", help="decode JPEGs at reduced size: faster, other pixels")
    rows.add_argument("--mode", default="rgb", metavar="MODE", help="rgb (default) or gray")
    rows.add_argument("--layout", default="nhwc", metavar="LAYOUT", help="nhwc (default) or nchw")
    rows.add_argument("--max-pixels", type=int, metavar="N", help="reject larger images as decompression bombs")

    file = convert.add_argument_group("how the file is laid out")
    file.add_argument("--order", default="shuffled", metavar="ORDER", help="shuffled (default) or sorted")
    file.add_argument("--seed", type=int, default=0, metavar="N", help="of the shuffled order (default 0)")
    file.add_argument("--chunk-rows", default="auto", metavar="N", help="rows a chunk, or auto (default)")
    file.add_argument("--chunk-bytes", metavar="SIZE", help="bytes a chunk, such as 4MiB")
    file.add_argument(
        "--compression",
        default="none",
        metavar="METHOD",
        help="none (default), gzip[:1-9], zstd[:1-22] or bitshuffle-lz4",
    )
    file.add_argument("--compat", action="store_true", help="write for readers of HDF5 1.8")

    how = convert.add_argument_group("how to go about it")
    how.add_argument("--workers", type=int, metavar="N", help="processes (default: the CPUs this process may use)")
    how.add_argument("--start-method", metavar="METHOD", help="fork, forkserver or spawn")
    how.add_argument("--io", default="auto", metavar="HOW", help="direct, buffered or auto (default)")
    how.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    how.add_argument("--overwrite", action="store_true", help="replace OUT when the new file is whole")
    how.add_argument("--resume", action="store_true", help="continue an interrupted conversion")
    how.add_argument("--strict", action="store_true", help="stop at the first image that cannot be packed")
    how.add_argument("--quiet", action="store_true", help="no plan, no progress")


def _add_hdf5(convert: argparse.ArgumentParser) -> None:
    hdf5 = convert.add_argument_group("what of an HDF5 file")
    add_hdf5(hdf5)
    hdf5.add_argument("--fields", metavar="A,B", help="further datasets with a row an image")


def run(arguments: argparse.Namespace) -> int:
    """Convert as the arguments say; the exit status."""
    from h5pack.pack.converter import Conversion
    from h5pack.pack.plan import human_bytes

    talk = not arguments.quiet and not arguments.json
    with Conversion(arguments.source, arguments.out, _options(arguments), progress=talk) as conversion:
        finished = conversion.finished_before()
        if finished is not None:
            if arguments.json or talk:
                print(_json(finished) if arguments.json else f"{finished.path}: already complete")
            return 0
        plan = conversion.plan()
        if arguments.dry_run or talk:
            seconds = conversion.estimate_seconds()
            if arguments.json:
                print(json.dumps({**plan.to_json(), "estimated_seconds": round(seconds, 3)}, indent=1))
            elif talk:
                print(plan.describe())
                workers = counted(conversion.workers, "worker")
                print(f"time     about {max(1, round(seconds))} s on {workers}", flush=True)
        if arguments.dry_run:
            return 0
        report = conversion.run()
        if arguments.json:
            print(_json(report))
        elif talk:
            total = sum(report.seconds.values())
            speed = report.images / total if total else 0.0
            print(
                f"done     {arguments.out}: {report.images:,} images, {human_bytes(report.bytes)}, {total:.1f} s "
                f"({speed:,.0f} images/s)"
            )
            if report.rejects:
                print(f"rejects  {report.rejects:,}, listed with reasons in {arguments.out}.rejects.csv")
    return 0


def _options(arguments: argparse.Namespace) -> Any:
    from h5pack.pack.options import ConvertOptions, parse_bytes, parse_size

    rows = arguments.chunk_rows
    if rows != "auto" and not rows.isdigit():
        raise OptionsError(f"--chunk-rows {rows!r} is neither a number nor auto")
    return ConvertOptions(
        source=arguments.kind,
        include=tuple(arguments.include),
        exclude=tuple(arguments.exclude),
        limit=arguments.limit,
        root=arguments.root,
        path_column=arguments.path_column,
        label_columns=comma_parts(arguments.label_columns),
        split_column=arguments.split_column,
        field_columns=comma_parts(arguments.field_columns),
        fields=comma_parts(arguments.fields),
        size=None if arguments.size is None else parse_size(arguments.size),
        fit=arguments.fit,
        resample=arguments.resample,
        draft=arguments.draft,
        mode=arguments.mode,
        layout=arguments.layout,
        order=arguments.order,
        seed=arguments.seed,
        chunk_rows=None if rows == "auto" else int(rows),
        chunk_bytes=None if arguments.chunk_bytes is None else parse_bytes(arguments.chunk_bytes),
        max_pixels=ConvertOptions.max_pixels if arguments.max_pixels is None else arguments.max_pixels,
        compression=arguments.compression,
        compat=arguments.compat,
        strict=arguments.strict,
        workers=arguments.workers,
        start_method=arguments.start_method,
        io=arguments.io,
        overwrite=arguments.overwrite,
        resume=arguments.resume,
        **hdf5_options(arguments),
    )


def _json(report: Any) -> str:
    from dataclasses import asdict

    return json.dumps(asdict(report), indent=1)
