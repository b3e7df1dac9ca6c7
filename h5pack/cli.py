"""The command line: parse, call, print. No logic, and nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from h5pack.errors import H5PackError, OptionsError
from h5pack.version import __version__

_EPILOG = """\
h5pack convert ./celebA out.h5            pack a folder of images
h5pack convert theirs.h5 out.h5           pack the images of any HDF5 file anew
h5pack info out.h5                        what a file holds, and what its chunks cost
h5pack verify out.h5                      check every row
"""


class _Terminated(KeyboardInterrupt):
    """SIGTERM, handled as Ctrl-C is: stop the workers, keep what is written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; None: the process's own.

    Returns
    -------
    int
        0; 1 for an error or a damaged pack; 2 for misuse; 130 and 143 for SIGINT and SIGTERM.
    """
    parser = _parser()
    arguments = parser.parse_args(_joined(sys.argv[1:] if argv is None else argv))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names are bytes; one that is no text must not stop a conversion.
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except OptionsError as error:
        if arguments.debug:
            raise
        print(f"h5pack: {error}", file=sys.stderr)
        return 2
    except H5PackError as error:
        if arguments.debug:
            raise
        print(f"h5pack: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"h5pack: {_interrupted(arguments)}", file=sys.stderr)
        return 143 if isinstance(error, _Terminated) else 130
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain once more when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # Whatever h5pack did not foresee: still one line, unless it is asked for more.
        if arguments.debug:
            raise
        print(f"h5pack: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        return 1


def _joined(argv: Sequence[str]) -> list[str]:
    """The arguments, with a value range tied to its option: one like -1:1 would be taken for an option itself."""
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1] == "--value-range":
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _terminate(number: int, frame: Any) -> None:
    raise _Terminated


def _interrupted(arguments: argparse.Namespace) -> str:
    out = getattr(arguments, "out", None)
    if out is not None and os.path.exists(f"{out}.partial"):
        return f"interrupted; {out}.partial is kept: run the same command with --resume to continue"
    return "interrupted; nothing was written"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="h5pack",
        description="Pack an image folder once into ordinary chunked HDF5, then feed a GPU from it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"h5pack {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object for programs")
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_convert(commands, common)
    _add_info(commands, common)
    _add_verify(commands, common)
    return parser


def _add_convert(commands: Any, common: argparse.ArgumentParser) -> None:
    convert = commands.add_parser(
        "convert",
        parents=[common],
        help="pack a folder of images, or another HDF5 file, into an HDF5 file",
        description="Pack a folder of images, or the images of another HDF5 file, into an HDF5 file. Nothing appears "
        "under OUT before it is whole.",
    )
    convert.set_defaults(run=_convert)
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
    hdf5.add_argument("--images", metavar="NAME", help="the dataset of images, numbers or encoded ones (default: look)")
    labels = hdf5.add_mutually_exclusive_group()
    labels.add_argument("--labels", metavar="NAME", help="the dataset of labels (default: look)")
    labels.add_argument("--no-labels", action="store_const", const="", dest="labels", help="take no labels")
    hdf5.add_argument("--fields", metavar="A,B", help="further datasets with a row an image")
    hdf5.add_argument("--channel-axis", metavar="WHERE", help="of a row: last, first or none (default: look)")
    hdf5.add_argument("--value-range", metavar="LOW:HIGH", help="values that become 0 and 255 (default of floats 0:1)")


def _add_info(commands: Any, common: argparse.ArgumentParser) -> None:
    info = commands.add_parser(
        "info",
        parents=[common],
        help="what an HDF5 file holds, how it is stored, what that costs",
        description="Describe any HDF5 file: datasets, chunks, filters, overhead, cache advice, faults and their cure.",
    )
    info.set_defaults(run=_info)
    info.add_argument("file", metavar="FILE")
    info.add_argument("--stats", action="store_true", help="class counts and channel statistics")


def _add_verify(commands: Any, common: argparse.ArgumentParser) -> None:
    verify = commands.add_parser(
        "verify",
        parents=[common],
        help="check a pack's structure and every row's checksum",
        description="Check a pack's structure and every row's checksum; exit status 1 if anything is damaged.",
    )
    verify.set_defaults(run=_verify)
    verify.add_argument("file", metavar="FILE")
    verify.add_argument("--workers", type=int, metavar="N", help="processes (default: the CPUs this process may use)")


def _convert(arguments: argparse.Namespace) -> int:
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
                workers = f"{conversion.workers} worker" + "s" * (conversion.workers > 1)
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
    from h5pack.pack.options import ConvertOptions, parse_bytes, parse_range, parse_size

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
        label_columns=_listed(arguments.label_columns),
        split_column=arguments.split_column,
        field_columns=_listed(arguments.field_columns),
        images=arguments.images,
        labels=arguments.labels,
        fields=_listed(arguments.fields),
        channel_axis=arguments.channel_axis,
        value_range=None if arguments.value_range is None else parse_range(arguments.value_range),
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
    )


def _listed(value: str | None) -> tuple[str, ...]:
    return () if value is None else tuple(part.strip() for part in value.split(",") if part.strip())


def _json(report: Any) -> str:
    from dataclasses import asdict

    return json.dumps(asdict(report), indent=1)


def _info(arguments: argparse.Namespace) -> int:
    from h5pack.tools.info import info
    from h5pack.tools.report import info_text

    report = info(arguments.file, stats=arguments.stats)
    print(json.dumps(report.to_json(), indent=1) if arguments.json else info_text(report))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from h5pack.tools.report import verify_text
    from h5pack.tools.verify import verify

    report = verify(arguments.file, workers=arguments.workers, progress=not arguments.json)
    print(json.dumps(report.to_json(), indent=1) if arguments.json else verify_text(report))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
