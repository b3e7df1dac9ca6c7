"""The commands `h5pack convert`, `append`, `join` and `subset`: their arguments and their output."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

from h5pack.commands.arguments import add_hdf5, add_workers, comma_names, option_text
from h5pack.errors import OptionsError, OutputExistsError
from h5pack.system.parameters import invalid, output_file
from h5pack.system.text import counted


def add(commands: Any) -> None:
    """Add these commands and their arguments to the parser."""
    _add_convert(commands)
    _add_append(commands)
    _add_join(commands)
    _add_subset(commands)


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="pack the images of a folder, an archive or any HDF5 file into a new HDF5 file",
        description="Pack the images of a folder, an archive, a manifest or any HDF5 file into a new HDF5 file. OUT "
        "appears only when the file is complete.",
    )
    convert.set_defaults(run=_run_convert)
    convert.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder or archive of images, WebDataset or MDS shards, Parquet files, a manifest (CSV, TSV, JSONL), "
        "COCO annotations, or any HDF5 file",
    )
    convert.add_argument("out", type=output_file, metavar="OUT", help="the HDF5 file to create")
    _add_source(convert)
    _add_layout(convert)
    _add_execution(convert)


def _add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how to read a source."""
    what = parser.add_argument_group("what to pack")
    what.add_argument(
        "--source", dest="source_kind", metavar="KIND",
        help="kind of SOURCE: flat, classes, splits, pairs, celeba, manifest, coco, hdf5, webdataset, parquet or mds "
        "(default: detected)",
    )  # fmt: skip
    what.add_argument(
        "--include", action="append", default=[], metavar="GLOB",
        help="pack only files whose path matches GLOB; repeatable",
    )  # fmt: skip
    what.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB",
        help="do not pack files whose path matches GLOB; repeatable",
    )  # fmt: skip
    what.add_argument("--limit", type=int, metavar="N", help="pack at most N images, evenly spaced in SOURCE")
    what.add_argument(
        "--val", type=float, metavar="FRACTION",
        help="move FRACTION (such as 0.1) of the training images of each class to a split named val",
    )  # fmt: skip
    what.add_argument(
        "--val-groups", metavar="FIELD", help="with --val: keep images with equal values in this field in one split"
    )
    what.add_argument(
        "--root", metavar="DIR",
        help="folder to which paths in a manifest or in COCO are relative (default for a manifest: its folder)",
    )  # fmt: skip
    _add_columns(what)

    hdf5 = parser.add_argument_group("HDF5 sources")
    add_hdf5(hdf5)
    hdf5.add_argument(
        "--fields", type=comma_names, metavar="A,B", help="also pack these datasets, which have one row per image"
    )


def _add_columns(what: Any) -> None:
    what.add_argument("--path-column", metavar="NAME", help="the column that holds the images or their paths")
    what.add_argument(
        "--label-columns", type=comma_names, metavar="A,B",
        help="the column of labels, or several columns of integers (0 to 255) that become a label table",
    )  # fmt: skip
    what.add_argument("--split-column", metavar="NAME", help="the column that names each image's split")
    what.add_argument(
        "--field-columns", type=comma_names, metavar="A,B",
        help="columns of numbers, or of lists of numbers, to store as fields",
    )  # fmt: skip
    what.add_argument("--mask-columns", type=comma_names, metavar="A,B", help="columns of paths of masks")
    what.add_argument("--image-columns", type=comma_names, metavar="A,B", help="columns of paths of further images")
    what.add_argument("--text-columns", type=comma_names, metavar="A,B", help="columns of text to store as fields")
    what.add_argument("--box-columns", type=comma_names, metavar="A,B", help="columns that hold lists of boxes")
    what.add_argument(
        "--keypoint-columns", type=comma_names, metavar="A,B",
        help="columns that hold lists of points: x and y, or x, y and visibility",
    )  # fmt: skip
    what.add_argument(
        "--box-format", metavar="FORMAT", help="numbers of a box: xyxy (default), xywh or cxcywh; stored as xyxy"
    )


def _add_layout(convert: argparse.ArgumentParser) -> None:
    rows = convert.add_argument_group("rows")
    rows.add_argument(
        "--size", metavar="HxW", help="height and width of every packed image, or one number for a square"
    )
    rows.add_argument("--fit", metavar="HOW", help="how to resize images to --size: crop (default), pad or stretch")
    rows.add_argument("--resample", metavar="FILTER", help="Pillow filter for resizing (default bicubic)")
    rows.add_argument(
        "--draft", action="store_true", help="decode JPEGs at a reduced size, which is faster but changes the pixels"
    )
    rows.add_argument("--mode", metavar="MODE", help="channels of packed images: rgb (default) or gray")
    rows.add_argument("--layout", metavar="LAYOUT", help="order of axes: nhwc (default, channels last) or nchw")
    rows.add_argument(
        "--keep", metavar="FORMAT",
        help="jpeg: store the bytes of JPEG files, of any size, instead of pixels; encode other images as JPEG once",
    )  # fmt: skip
    rows.add_argument(
        "--max-side", type=int, metavar="N", help="with --keep, shrink images whose longer side exceeds N pixels"
    )
    rows.add_argument(
        "--quality", type=int, metavar="Q",
        help="with --keep, JPEG quality of images that are encoded, 1 to 100 (default 90)",
    )  # fmt: skip
    rows.add_argument(
        "--max-pixels", type=int, metavar="N", help="reject images of more than N pixels as decompression bombs"
    )

    file = convert.add_argument_group("file layout")
    _add_order(file)
    file.add_argument("--chunk-rows", metavar="N", help="number of rows per chunk, or auto (default)")
    file.add_argument("--chunk-bytes", metavar="SIZE", help="maximum size of a chunk, such as 4MiB")
    file.add_argument(
        "--compression", metavar="METHOD",
        help="compression method: none (default), gzip[:1-9], zstd[:1-22] or bitshuffle-lz4",
    )  # fmt: skip
    file.add_argument(
        "--shard-bytes", metavar="SIZE",
        help="write files of at most SIZE, such as 50GiB, named OUT-00000.h5 and so on, and OUT as a virtual file over "
        "them",
    )  # fmt: skip
    file.add_argument("--compat", action="store_true", help="write a file that HDF5 1.8 can read")


def _add_order(group: Any) -> None:
    """Add the options that determine the order of the rows."""
    group.add_argument(
        "--order", metavar="ORDER", help="order of the rows: shuffled (default), or sorted (the order of the source)"
    )
    group.add_argument("--seed", type=int, metavar="N", help="seed of the shuffled order and of --val (default 0)")


def _add_execution(convert: argparse.ArgumentParser) -> None:
    how = convert.add_argument_group("execution options")
    _add_processes(how)
    how.add_argument("--io", metavar="HOW", help="how to write OUT: direct (O_DIRECT), buffered or auto (default)")
    how.add_argument(
        "--cluster", metavar="ADDRESS",
        help="run on the workers of a Dask cluster: the address of its scheduler, its scheduler file, or local:N "
        "to start N workers on this machine",
    )  # fmt: skip
    how.add_argument(
        "--part", metavar="K/N",
        help="write only part K of N (one process of an array job); after all parts, run with --finish",
    )  # fmt: skip
    how.add_argument("--finish", action="store_true", help="complete OUT when all parts are written")
    how.add_argument("--dry-run", action="store_true", help="print the plan, but write nothing")
    how.add_argument("--overwrite", action="store_true", help="replace OUT when the new file is complete")
    how.add_argument("--resume", action="store_true", help="continue an interrupted conversion")
    how.add_argument("--quiet", action="store_true", help="print no plan, no progress and no summary")


def _add_processes(group: Any) -> None:
    """Add the options for worker processes, and ``--strict``."""
    add_workers(group)
    group.add_argument("--start-method", metavar="METHOD", help="how to start processes: fork, forkserver or spawn")
    group.add_argument("--strict", action="store_true", help="stop at the first image that cannot be packed")


def _add_append(commands: Any) -> None:
    append = commands.add_parser(
        "append",
        help="add new images to a pack",
        description="Add the images of SOURCE to PACK, packed with the options that PACK was made with. PACK is "
        "replaced when the new file is complete; if anything fails, PACK is unchanged.",
    )
    append.set_defaults(run=_run_append)
    append.add_argument("out", type=output_file, metavar="PACK", help="the pack to add images to")
    append.add_argument("source", metavar="SOURCE", help="new images: any source of h5pack convert")
    append.add_argument(
        "--split", metavar="NAME", help="put all new images into this split (default: the splits of SOURCE)"
    )
    append.add_argument(
        "--only-new", action="store_true", help="leave out images whose names are in PACK already, instead of failing"
    )
    _add_source(append)
    _add_order(append.add_argument_group("order of the new rows"))
    _add_processes(_add_run_options(append, "discard an interrupted append"))


def _add_join(commands: Any) -> None:
    join = commands.add_parser(
        "join",
        help="make one pack of several",
        description="Make one pack of the rows of several packs, or with --virtual a small file that refers to them.",
    )
    join.set_defaults(run=_run_join)
    join.add_argument("packs", metavar="PACK", nargs="+", help="at least two packs with images of the same kind")
    join.add_argument("out", type=output_file, metavar="OUT", help="the file to create")
    join.add_argument(
        "--virtual", action="store_true", help="write HDF5 virtual datasets over the packs, which must stay in place"
    )
    _add_run_options(join, "replace OUT when the new file is complete")


def _add_subset(commands: Any) -> None:
    subset = commands.add_parser(
        "subset",
        help="make a pack of some rows of another",
        description="Make a pack of some rows of another, in the same order. A row is taken if all of --split, "
        "--classes and --rows allow it.",
    )
    subset.set_defaults(run=_run_subset)
    subset.add_argument("pack", metavar="PACK")
    subset.add_argument("out", type=output_file, metavar="OUT", help="the file to create")
    subset.add_argument(
        "--split", dest="splits", action="append", default=[], metavar="NAME", help="take this split; repeatable"
    )
    subset.add_argument(
        "--classes", type=comma_names, default=(), metavar="A,B", help="take these classes, numbered in this order"
    )
    subset.add_argument(
        "--rows", metavar="RANGES", help="take these rows, such as 0:1000,5000:6000,7123 (the end is not included)"
    )
    subset.add_argument("--sample", type=int, metavar="N", help="take at most N of the rows, drawn at random")
    subset.add_argument("--seed", type=int, default=0, metavar="N", help="seed of --sample (default 0)")
    _add_run_options(subset, "replace OUT when the new file is complete")


def _add_run_options(parser: argparse.ArgumentParser, overwrite: str) -> Any:
    group = parser.add_argument_group("execution options")
    group.add_argument("--overwrite", action="store_true", help=overwrite)
    group.add_argument("--resume", action="store_true", help="continue an interrupted run with the same arguments")
    group.add_argument("--quiet", action="store_true", help="print no progress and no summary")
    return group


def _run_convert(arguments: argparse.Namespace) -> int:
    from h5pack.cluster.dask_client import open_client
    from h5pack.combine.convert import open_conversion

    verbose = not arguments.quiet and not arguments.json
    keywords = _keywords(arguments)
    _refuse_combinations(arguments)
    with contextlib.ExitStack() as stack:
        if arguments.cluster is not None:
            keywords["client"] = stack.enter_context(open_client(arguments.cluster))
        opened = partial(open_conversion, arguments.source, arguments.out, progress=verbose)
        try:
            conversion = stack.enter_context(opened(**keywords))
        except OutputExistsError as error:
            if not arguments.dry_run:
                raise
            conversion = stack.enter_context(opened(**{**keywords, "overwrite": True, "resume": False}))
            print(f"h5pack: {option_text(str(error), error.parameters, arguments.parser)}", file=sys.stderr)
        report = conversion.existing_report()
        if report is None:
            plan = conversion.plan(resumable=not arguments.dry_run)
            if arguments.dry_run or (verbose and not arguments.part and not arguments.finish):
                _print_plan(conversion, plan, arguments)
            if arguments.dry_run:
                return 0
            report = conversion.run()
        _print_result(report, arguments)
    return 0


def _print_result(report: Any, arguments: argparse.Namespace) -> None:
    """Print the report of a command that wrote `arguments.out`: as JSON with ``--json``, nothing with ``--quiet``."""
    if arguments.json:
        print(json.dumps(asdict(report), indent=1))
    elif not arguments.quiet:
        print(replace(report, path=arguments.out).to_text())


def _refuse_combinations(arguments: argparse.Namespace) -> None:
    """Raise OptionsError for options that cannot be combined with ``--cluster`` or ``--part``."""
    for name, others in (("cluster", ("num_workers", "start_method", "part")), ("part", ("dry_run",))):
        given = [other for other in others if getattr(arguments, other)]
        if getattr(arguments, name) and given:
            problem = f"{name} and {given[0]} cannot be combined; leave out one of them"
            raise OptionsError(problem, parameters=(name, given[0]))


def _print_plan(conversion: Any, plan: Any, arguments: argparse.Namespace) -> None:
    seconds = conversion.estimate_seconds()
    if arguments.json:
        print(json.dumps({**plan.to_json(), "estimated_seconds": round(seconds, 3)}, indent=1))
    elif not arguments.quiet:
        print(plan.to_text(lambda note: option_text(note.text, note.parameters, arguments.parser)))
        workers = counted(conversion.num_workers, "worker")
        print(f"time     about {max(1, round(seconds))} s on {workers}", flush=True)


def _keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given arguments as keywords of `h5pack.convert`."""
    values = {**_given_options(arguments), "chunk_rows": _chunk_rows(arguments.chunk_rows)}
    return {name: value for name, value in values.items() if value is not None}


def _given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given arguments that are fields of `ConvertOptions`, by field name."""
    from h5pack.pack.options import ConvertOptions

    found = {field.name: getattr(arguments, field.name, None) for field in fields(ConvertOptions)}
    return {name: value for name, value in found.items() if value is not None}


def _chunk_rows(text: str | None) -> int | None:
    if text is None or text == "auto":
        return None
    if not text.isdigit():
        raise invalid("chunk_rows", text, " is invalid; give a whole number or auto")
    return int(text)


def _run_append(arguments: argparse.Namespace) -> int:
    from h5pack.combine.append import append

    keywords = {**_given_options(arguments), **_run_keywords(arguments)}
    report = append(arguments.out, arguments.source, split=arguments.split, only_new=arguments.only_new, **keywords)
    _print_result(report, arguments)
    return 0


def _run_join(arguments: argparse.Namespace) -> int:
    from h5pack.combine.join import join

    keywords = _run_keywords(arguments)
    _print_result(join(arguments.packs, arguments.out, virtual=arguments.virtual, **keywords), arguments)
    return 0


def _run_subset(arguments: argparse.Namespace) -> int:
    from h5pack.combine.subset import subset

    names = ("splits", "classes", "rows", "sample", "seed")
    keywords = {**{name: getattr(arguments, name) for name in names}, **_run_keywords(arguments)}
    _print_result(subset(arguments.pack, arguments.out, **keywords), arguments)
    return 0


def _run_keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    progress = not arguments.quiet and not arguments.json
    return {"overwrite": arguments.overwrite, "resume": arguments.resume, "progress": progress}
