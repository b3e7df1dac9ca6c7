"""The commands that write packs: their arguments and their output."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from h5pack.commands.arguments import PROCESSES, add_hdf5, add_options, add_splits, is_verbose, keywords, option_text
from h5pack.errors import OptionsError, OutputExistsError
from h5pack.format.schema import COMPRESSION_METHODS
from h5pack.system.parameters import invalid, output_file
from h5pack.system.text import counted, print_text, printable

_ORDER = {
    "--order ORDER": "order of the rows: shuffled (default), or sorted (the order of the source)",
    "--seed N": "seed of the shuffled order and of --val (default 0)",
}
_METHODS = [f"{name}[:1-{one.max_level}]" if one.max_level else name for name, one in COMPRESSION_METHODS.items()]
_PROCESSES = {**PROCESSES, "--strict": "stop at the first image that cannot be packed"}


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
    add_options(convert.add_argument_group("execution options"), {
        **_PROCESSES,
        "--io HOW": "how to write OUT: direct (O_DIRECT), buffered or auto (default)",
        "--cluster ADDRESS": "run on the workers of a Dask cluster: the address of its scheduler, its scheduler file, "
        "or local:N to start N workers on this machine",
        "--part K/N": "write only part K of N (one process of an array job); after all parts, run with --finish",
        "--finish": "complete OUT when all parts are written",
        "--dry-run": "print the plan, but write nothing",
        "--overwrite": "replace OUT when the new file is complete; discard an unfinished conversion",
        "--resume": "continue an interrupted conversion",
        "--quiet": "print no plan, no progress and no summary",
    })  # fmt: skip


def _add_source(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to pack")
    add_options(what, {
        "--source KIND": "kind of SOURCE: flat, classes, splits, pairs, celeba, manifest, coco, hdf5, webdataset, "
        "parquet or mds (default: detected)",
    })  # fmt: skip
    add_options(what, {
        "--include GLOB": "pack only files whose name, or path as the pack stores it, matches GLOB; repeatable",
        "--exclude GLOB": "do not pack files whose name, or path as the pack stores it, matches GLOB; repeatable",
    }, action="append")  # fmt: skip
    add_options(what, {
        "--limit N": "pack at most N images, evenly spaced in SOURCE",
        "--val FRACTION": "move FRACTION (such as 0.1) of the training images of each class to a split named val",
        "--val-groups FIELD": "with --val: keep images with equal values in this field in one split",
        "--root DIR": "folder to which paths in a manifest or in COCO are relative (default for a manifest: its "
        "folder)",
        "--path-column NAME": "the column that holds the images or their paths",
        "--label-columns A,B": "the column of labels, or several columns of integers (0 to 255) that become a label "
        "table",
        "--split-column NAME": "the column that names each image's split",
        "--field-columns A,B": "columns of numbers, or of lists of numbers, to store as fields",
        "--mask-columns A,B": "columns of paths of masks, to store as fields",
        "--image-columns A,B": "columns of paths of further images, to store as fields",
        "--text-columns A,B": "columns of texts, or of lists of texts, to store as fields",
        "--box-columns A,B": "columns that hold lists of boxes",
        "--keypoint-columns A,B": "columns that hold lists of points: x and y, or x, y and visibility",
        "--box-format FORMAT": "numbers of a box: xyxy (default), xywh or cxcywh; stored as xyxy",
    })  # fmt: skip
    hdf5 = parser.add_argument_group("HDF5 sources")
    add_hdf5(hdf5)
    add_options(hdf5, {"--fields A,B": "also pack these datasets, which have one row per image"})


def _add_layout(convert: argparse.ArgumentParser) -> None:
    add_options(convert.add_argument_group("rows"), {
        "--size HxW": "height and width of every packed image, or one number for a square",
        "--fit HOW": "how to resize images to --size: crop (default), pad or stretch",
        "--resample FILTER": "Pillow filter for resizing (default bicubic)",
        "--draft": "decode JPEGs at a reduced size, which is faster but changes the pixels",
        "--mode MODE": "channels of packed images: rgb (default) or gray",
        "--layout LAYOUT": "order of axes: nhwc (default, channels last) or nchw",
        "--keep FORMAT": "jpeg: store JPEG files instead of pixels; the images may differ in size; images of other "
        "formats are encoded as JPEG",
        "--max-side N": "with --keep, shrink images whose longer side exceeds N pixels",
        "--quality Q": "with --keep, JPEG quality of images that are encoded, 1 to 100 (default 90)",
        "--max-pixels N": "reject images of more than N pixels as decompression bombs",
    })  # fmt: skip
    file = convert.add_argument_group("file layout")
    add_options(file, _ORDER)
    file.add_argument("--chunk-rows", metavar="N", help="number of rows per chunk, or auto (default)")
    add_options(file, {
        "--chunk-bytes SIZE": "maximum size of a chunk, such as 4MiB",
        "--compression METHOD": f"compression method: none (default), {', '.join(_METHODS)}",
        "--shard-bytes SIZE": "write files of at most SIZE, such as 50GiB (for OUT train.h5: train-00000.h5 and so "
        "on), and OUT as a virtual file over them",
        "--compat": "write a file that HDF5 1.8 can read",
    })  # fmt: skip


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
    add_options(append, {
        "--split NAME": "put all new images into this split (default: the splits of SOURCE)",
        "--only-new": "leave out images whose names are in PACK already, instead of failing",
    })  # fmt: skip
    _add_source(append)
    add_options(append.add_argument_group("order of the new rows"), _ORDER)
    add_options(_add_run_options(append, "discard an interrupted append"), _PROCESSES)


def _add_join(commands: Any) -> None:
    join = commands.add_parser(
        "join",
        help="make one pack of several",
        description="Make one pack of the rows of several packs. With --virtual, make a small file that refers to the "
        "packs instead of copying their rows.",
    )
    join.set_defaults(run=_run_join)
    join.add_argument("packs", metavar="PACK", nargs="+", help="at least two packs with images of the same kind")
    join.add_argument("out", type=output_file, metavar="OUT", help="the file to create")
    add_options(
        join, {"--virtual": "write HDF5 virtual datasets over the packs, which must stay in place relative to OUT"}
    )
    _add_run_options(join, "replace OUT when the new file is complete")


def _add_subset(commands: Any) -> None:
    subset = commands.add_parser(
        "subset",
        help="make a pack of some rows of another pack",
        description="Make a pack of some rows of another pack, in the same order. A row is taken if each of --split, "
        "--classes and --rows that is given selects it.",
    )
    subset.set_defaults(run=_run_subset)
    subset.add_argument("pack", metavar="PACK")
    subset.add_argument("out", type=output_file, metavar="OUT", help="the file to create")
    add_splits(subset, "take this split")
    add_options(subset, {
        "--classes A,B": "take these classes, numbered in this order",
        "--rows RANGES": "take these rows, such as 0:1000,5000:6000,7123 (the end is not included)",
        "--sample N": "take at most N of the rows, drawn at random",
        "--seed N": "seed of --sample (default 0)",
    })  # fmt: skip
    _add_run_options(subset, "replace OUT when the new file is complete")


def _add_run_options(parser: argparse.ArgumentParser, overwrite: str) -> Any:
    group = parser.add_argument_group("execution options")
    add_options(group, {
        "--overwrite": overwrite,
        "--resume": "continue an interrupted run with the same arguments",
        "--quiet": "print no progress and no summary",
    })  # fmt: skip
    return group


def _run_convert(arguments: argparse.Namespace) -> int:
    from h5pack.cluster.dask_client import open_client
    from h5pack.combine.convert import ShardedConversion
    from h5pack.pack.options import ConvertOptions

    verbose = is_verbose(arguments)
    options = keywords(arguments, ConvertOptions)
    options["chunk_rows"] = _chunk_rows(arguments.chunk_rows)
    _refuse_combinations(arguments)
    with contextlib.ExitStack() as stack:
        if arguments.cluster is not None:
            options["client"] = stack.enter_context(open_client(arguments.cluster))
        opened = partial(ShardedConversion, arguments.source, arguments.out, progress=verbose)
        try:
            conversion = stack.enter_context(opened(**options))
        except OutputExistsError as error:
            if not arguments.dry_run:
                raise
            conversion = stack.enter_context(opened(**{**options, "overwrite": True, "resume": False}))
            message = option_text(str(error), error.parameters, arguments.parser)
            print(printable(f"h5pack: {message}"), file=sys.stderr)
        show = partial(_print_plan, conversion, arguments)
        report = conversion.existing_report() if arguments.dry_run else None
        if arguments.dry_run and report is None:
            show(conversion.plan())
            return 0
        prints_plan = verbose and not arguments.part and not arguments.finish
        _print_result(report or conversion.run(show if prints_plan else None), arguments)
    return 0


def _print_result(report: Any, arguments: argparse.Namespace) -> None:
    """Print the report of a command that wrote `arguments.out`: as JSON with ``--json``, else as text.

    With ``--quiet``, print no text.
    """
    if arguments.json:
        print(json.dumps(asdict(report), indent=1))
    elif not arguments.quiet:
        print_text(replace(report, path=arguments.out).to_text())


def _refuse_combinations(arguments: argparse.Namespace) -> None:
    for name, others in (("cluster", ("num_workers", "start_method", "part")), ("part", ("dry_run",))):
        given = [other for other in others if getattr(arguments, other)]
        if getattr(arguments, name) and given:
            problem = f"{name} and {given[0]} cannot be combined; leave out one of them"
            raise OptionsError(problem, parameters=(name, given[0]))


def _print_plan(conversion: Any, arguments: argparse.Namespace, plan: Any) -> None:
    seconds = conversion.estimate_seconds()
    if arguments.json:
        print(json.dumps({**plan.to_json(), "estimated_seconds": round(seconds, 3)}, indent=1))
    elif not arguments.quiet:
        print_text(plan.to_text(lambda note: option_text(note.text, note.parameters, arguments.parser)))
        workers = counted(conversion.num_workers, "worker")
        print(f"time     about {max(1, round(seconds))} s on {workers}", flush=True)


def _chunk_rows(text: str | None) -> int | None:
    if text is None or text == "auto":
        return None
    if not text.isdecimal():
        raise invalid("chunk_rows", text, "give a positive whole number or auto")
    return int(text)


def _run_append(arguments: argparse.Namespace) -> int:
    from h5pack.combine.append import append
    from h5pack.pack.options import ConvertOptions

    options = {**keywords(arguments, ConvertOptions), **keywords(arguments, append)}
    _print_result(append(arguments.out, progress=is_verbose(arguments), **options), arguments)
    return 0


def _run_join(arguments: argparse.Namespace) -> int:
    from h5pack.combine.join import join

    _print_result(join(progress=is_verbose(arguments), **keywords(arguments, join)), arguments)
    return 0


def _run_subset(arguments: argparse.Namespace) -> int:
    from h5pack.combine.subset import subset

    _print_result(subset(progress=is_verbose(arguments), **keywords(arguments, subset)), arguments)
    return 0
