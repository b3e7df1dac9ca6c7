"""The commands `h5pack append`, `h5pack join` and `h5pack subset`: their arguments and their output."""

from __future__ import annotations

import argparse
from typing import Any

from h5pack.commands.arguments import comma_parts, output_file
from h5pack.commands.convert import add_order, add_processes, add_source, given_options, print_result


def add(commands: Any) -> None:
    """Add these commands and their arguments to the parser."""
    _add_append(commands)
    _add_join(commands)
    _add_subset(commands)


def _add_append(commands: Any) -> None:
    append = commands.add_parser(
        "append",
        help="add new images to a pack",
        description="Add the images of SOURCE to PACK, packed with the options that PACK was made with. PACK is "
        "replaced when the new file is complete; if anything fails, PACK is unchanged.",
    )
    append.set_defaults(run=run_append)
    append.add_argument("out", type=output_file, metavar="PACK", help="the pack to add images to")
    append.add_argument("source", metavar="SOURCE", help="new images: any source of h5pack convert")
    append.add_argument(
        "--split", metavar="NAME", help="put all new images into this split (default: the splits of SOURCE)"
    )
    append.add_argument(
        "--only-new", action="store_true", help="leave out images whose names are in PACK already, instead of failing"
    )
    add_source(append)
    add_order(append.add_argument_group("order of the new rows"))
    add_processes(_add_run_options(append, "discard an interrupted append"))


def _add_join(commands: Any) -> None:
    join = commands.add_parser(
        "join",
        help="make one pack of several",
        description="Make one pack of the rows of several packs, or with --virtual a small file that refers to them.",
    )
    join.set_defaults(run=run_join)
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
    subset.set_defaults(run=run_subset)
    subset.add_argument("pack", metavar="PACK")
    subset.add_argument("out", type=output_file, metavar="OUT", help="the file to create")
    subset.add_argument(
        "--split", dest="splits", action="append", default=[], metavar="NAME", help="take this split; repeatable"
    )
    subset.add_argument(
        "--classes", type=comma_parts, default=(), metavar="A,B", help="take these classes, numbered in this order"
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


def run_append(arguments: argparse.Namespace) -> int:
    """Append images; return the exit status."""
    from h5pack.combine.append import append

    keywords = {**given_options(arguments), **_run_keywords(arguments)}
    report = append(arguments.out, arguments.source, split=arguments.split, only_new=arguments.only_new, **keywords)
    print_result(report, arguments)
    return 0


def run_join(arguments: argparse.Namespace) -> int:
    """Join packs; return the exit status."""
    from h5pack.combine.join import join

    report = join(arguments.packs, arguments.out, virtual=arguments.virtual, **_run_keywords(arguments))
    print_result(report, arguments)
    return 0


def run_subset(arguments: argparse.Namespace) -> int:
    """Make a subset; return the exit status."""
    from h5pack.combine.subset import subset

    names = ("splits", "classes", "rows", "sample", "seed")
    keywords = {name: getattr(arguments, name) for name in names}
    print_result(subset(arguments.pack, arguments.out, **keywords, **_run_keywords(arguments)), arguments)
    return 0


def _run_keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    progress = not arguments.quiet and not arguments.json
    return {"overwrite": arguments.overwrite, "resume": arguments.resume, "progress": progress}
