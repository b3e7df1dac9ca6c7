"""`h5pack bench` on the command line."""

from __future__ import annotations

import argparse
import json
from typing import Any

from h5pack.commands.arguments import comma_parts


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    bench = commands.add_parser(
        "bench",
        parents=[common],
        help="which chunks, order and settings are fastest on this machine",
        description="Pack a sample of a folder of images, or of an HDF5 file, in several ways, and measure how fast "
        "each is read. Everything temporary is removed in the end.",
    )
    bench.set_defaults(run=run)
    bench.add_argument(
        "source", nargs="?", metavar="SOURCE", help="a folder of images, a manifest or an HDF5 file (default: pictures)"
    )
    bench.add_argument("--seconds", type=float, default=60.0, metavar="S", help="for all of it (default 60)")

    what = bench.add_argument_group("what to compare")
    what.add_argument("--chunk-rows", metavar="A,B", help="chunk sizes in rows")
    what.add_argument("--chunk-bytes", metavar="A,B", help="chunk sizes in bytes (default: 64KiB to 16MiB)")
    what.add_argument("--no-contiguous", action="store_true", help="leave out rows without chunks")
    what.add_argument("--orders", metavar="A,B", help="of sequential, window, full and single (default: all)")
    what.add_argument("--engines", metavar="A,B", help="of direct, tuned and default (default: all)")
    what.add_argument("--cache", metavar="A,B", help="page cache: of hot and cold (default: both)")
    what.add_argument("--compression", metavar="A,B", help="as for convert (default: none)")
    what.add_argument("--batch-size", metavar="A,B", help="rows a batch (default 256)")
    what.add_argument("--window", metavar="A,B", help="chunks that are shuffled together (default 16)")
    what.add_argument("--threads", metavar="A,B", help="reading threads of H5Loader")
    what.add_argument("--workers", metavar="A,B", help="worker processes of a DataLoader")

    sample = bench.add_argument_group("the sample")
    sample.add_argument("--rows", type=int, metavar="N", help="rows (default: by time, memory and disk; up to 512 MiB)")
    sample.add_argument("--size", metavar="HxW", help="height and width of every row; one number: a square")
    sample.add_argument("--source", dest="kind", metavar="KIND", help="what SOURCE is, as for convert")
    sample.add_argument("--images", metavar="NAME", help="the dataset of images of an HDF5 file (default: look)")
    sample.add_argument("--labels", metavar="NAME", help="the dataset of labels of an HDF5 file (default: look)")
    sample.add_argument("--scratch", metavar="DIR", help="for temporary packs (default: the working directory)")
    sample.add_argument("--seed", type=int, default=0, metavar="N", help="of the orders (default 0)")

    out = bench.add_argument_group("what to write")
    out.add_argument("--plot", metavar="FILE", help="draw the result (PNG, SVG or PDF)")
    out.add_argument("--report", metavar="FILE", help="write an HTML page with the result and its pictures")
    out.add_argument("--save", metavar="FILE", help="keep the recommendation as TOML, for H5Loader(profile=...)")
    out.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Bench as the arguments say; the exit status."""
    from h5pack.bench.bench import Bench
    from h5pack.bench.report_text import bench_text

    options, settings = _options(arguments), _settings(arguments)
    _require_outputs(arguments)
    bench = Bench(arguments.source, settings, options, progress=not arguments.quiet and not arguments.json)
    try:
        report = bench.run()
    except BaseException:
        # Ctrl-C or an error: what was measured until then is true.
        if bench.report is not None and bench.report.measurements:
            print(json.dumps(bench.report.to_json(), indent=1) if arguments.json else bench_text(bench.report))
        raise
    print(json.dumps(report.to_json(), indent=1) if arguments.json else bench_text(report), flush=True)
    _write(arguments, report)
    return 0


def _options(arguments: argparse.Namespace) -> Any:
    from h5pack.pack.options import ConvertOptions

    return ConvertOptions(source=arguments.kind)


def _settings(arguments: argparse.Namespace) -> Any:
    from h5pack.bench.settings import CACHES, ENGINES, ORDERS, BenchSettings
    from h5pack.pack.options import parse_bytes, parse_size

    return BenchSettings(
        seconds=arguments.seconds,
        chunk_rows=_numbers("--chunk-rows", arguments.chunk_rows),
        chunk_bytes=tuple(parse_bytes(text) for text in comma_parts(arguments.chunk_bytes)),
        contiguous=not arguments.no_contiguous,
        orders=comma_parts(arguments.orders) or ORDERS,
        engines=comma_parts(arguments.engines) or ENGINES,
        caches=comma_parts(arguments.cache) or CACHES,
        compressions=comma_parts(arguments.compression) or ("none",),
        batch_sizes=_numbers("--batch-size", arguments.batch_size) or (256,),
        windows=_numbers("--window", arguments.window) or (16,),
        threads=_numbers("--threads", arguments.threads),
        workers=_numbers("--workers", arguments.workers),
        rows=arguments.rows,
        size=None if arguments.size is None else parse_size(arguments.size),
        images=arguments.images,
        labels=arguments.labels,
        scratch=arguments.scratch,
        seed=arguments.seed,
    )


def _numbers(option: str, value: str | None) -> tuple[int, ...]:
    from h5pack.errors import OptionsError

    numbers = comma_parts(value)
    for number in numbers:
        if not number.isdecimal():
            raise OptionsError(f"{option} {number!r} is no whole number; give one, or several with commas")
    return tuple(int(number) for number in numbers)


def _require_outputs(arguments: argparse.Namespace) -> None:
    """Refuse what could not be written before anything is measured."""
    import os

    from h5pack.bench.figure import require_matplotlib, require_plottable
    from h5pack.errors import OptionsError

    for path in (arguments.plot, arguments.report, arguments.save):
        if path is None:
            continue
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            raise OptionsError(f"{path}: its folder is not there; make it, or name another")
        if os.path.isdir(path) or not os.access(folder, os.W_OK):
            raise OptionsError(f"{path}: a folder, or in one that cannot be written; name another file")
    if arguments.plot is not None:
        require_plottable(arguments.plot)
    if arguments.report is not None:
        require_matplotlib()


def _write(arguments: argparse.Namespace, report: Any) -> None:
    from h5pack.bench.figure import draw_bench
    from h5pack.bench.html_report import write_html
    from h5pack.bench.saved import save_profile
    from h5pack.errors import H5PackError

    failed: H5PackError | None = None
    for path, write in ((arguments.plot, draw_bench), (arguments.report, write_html), (arguments.save, save_profile)):
        if path is None:
            continue
        try:
            write(report, path)
        except H5PackError as error:
            # The others are worth having.
            failed = failed or error
            continue
        if not arguments.json:
            print(f"wrote    {path}")
    if failed is not None:
        raise failed
