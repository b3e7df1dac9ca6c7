"""The command `h5pack bench`: its arguments and its output."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from h5pack.commands.arguments import add_options, is_verbose, keywords, option_text, print_report
from h5pack.errors import OptionsError
from h5pack.system.parameters import invalid
from h5pack.system.text import print_text, printable

_OF_SPEED = (
    "contiguous", "chunk_rows", "chunk_bytes", "orders", "engines", "caches", "compression", "num_threads",
    "num_workers", "seconds", "rows", "num_images", "size", "source_kind", "scratch", "plot",
)  # fmt: skip
"""Arguments that are only used to measure speed, so not with ``--mixing``."""


def add(commands: Any) -> None:
    """Add this command and its arguments to the parser."""
    bench = commands.add_parser(
        "bench",
        help="measure which chunk size and settings are fastest on this machine",
        description="Pack a sample of the images of SOURCE with several chunk sizes, measure how fast the packed files "
        "are read, and recommend a chunk size. Temporary files are removed.",
    )
    bench.set_defaults(run=run)
    bench.add_argument(
        "source", nargs="?", metavar="SOURCE", help="any source of 'h5pack convert' (default: generated images)"
    )
    add_options(bench, {"--seconds S": "time for the whole benchmark (default 60)"})
    what = bench.add_argument_group("what to compare")
    what.add_argument(
        "--no-contiguous", action="store_false", dest="contiguous",
        help="do not measure a contiguous (unchunked) copy of the sample",
    )  # fmt: skip
    add_options(what, {
        "--chunk-rows A,B": "chunk sizes in rows (default: the sizes of --chunk-bytes)",
        "--chunk-bytes A,B": "chunk sizes in bytes (default: 64KiB to 16MiB, and the chunk size of 'h5pack convert')",
        "--orders A,B": "orders of reading: sequential, window, full or single (one row per call); all if omitted",
        "--engines A,B": "readers: direct (H5Loader), tuned (HDF5 library with a tuned chunk cache) or default (plain "
        "h5py); all if omitted",
        "--cache A,B": "page-cache states: hot (file in the page cache) or cold (not in it); both if omitted",
        "--compression A,B": "compression methods, see 'h5pack convert' (default: none)",
        "--batch-size A,B": "rows per batch (default 256). With several values, the first compares variants. It is "
        "reduced to a quarter of the sample's rows if it is larger",
        "--window A,B": "numbers of chunks that are shuffled together (default 16)",
        "--threads A,B": "numbers of H5Loader threads (default: powers of 2 and the CPU count, up to 16)",
        "--workers A,B": "numbers of DataLoader workers (default: as for --threads)",
    })  # fmt: skip
    add_options(bench.add_argument_group("the sample"), {
        "--rows N": "number of rows of the sample (default: as many as time, memory and disk allow, up to 512 MiB)",
        "--num-images N": "number of images in the dataset that the recommendation is for (default: the images of "
        "SOURCE; without SOURCE, a large dataset)",
        "--size HxW": "height and width of every packed image, or one number for a square (default: 224 if sizes "
        "differ)",
        "--source KIND": "kind of SOURCE, see 'h5pack convert' (default: detected)",
        "--images NAME": "dataset of images in an HDF5 file (default: detected)",
        "--labels NAME": "dataset of labels in an HDF5 file (default: detected)",
        "--scratch DIR": "folder for temporary files (default: the working directory if writable)",
        "--seed N": "random seed of shuffled reading (default 0)",
    })  # fmt: skip
    add_options(bench.add_argument_group("how well the window shuffle mixes rows"), {
        "--mixing": "measure how well the window shuffle mixes the labels of SOURCE (must be an HDF5 file), instead of "
        "measuring speed; with --window A,B, compare both windows and say whether A is large enough",
        "--split NAME": "with --mixing: use only the rows of this split",
        "--epochs N": "with --mixing: number of epochs to sample (default 8)",
    })  # fmt: skip
    add_options(bench.add_argument_group("output"), {
        "--full": "print the full report, with all reasons, tables and notes",
        "--plot FILE": "also draw the result (.png, .svg or .pdf; needs matplotlib)",
        "--quiet": "show no progress bar",
    })  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark and print its report; return the exit status."""
    for name in _OF_SPEED if arguments.mixing else ("split", "epochs"):
        if getattr(arguments, name) != arguments.parser.get_default(name):
            problem = "is not used with mixing=True; leave out one of them"
            if not arguments.mixing:
                problem = f"is only used with mixing=True; add mixing=True, or leave out {name}"
            raise OptionsError(f"{name} {problem}", parameters=(name, "mixing=True"))
    if arguments.mixing:
        _print_mixing(_mixing(arguments), arguments)
        return 0
    begun = time.monotonic()
    from h5pack.benchmark.bench import BenchRun, make_settings
    from h5pack.benchmark.plots import check_plot_file, draw_bench

    if arguments.plot is not None:
        check_plot_file(arguments.plot)
    bench = BenchRun(
        arguments.source,
        make_settings(**_settings(arguments)),
        progress=is_verbose(arguments),
        elapsed=time.monotonic() - begun,
    )
    try:
        report = bench.run()
    except BaseException:
        # After Ctrl-C or an error, print the results so far, which remain valid.
        if bench.report is not None and bench.report.measurements:
            print_report(bench.report, arguments, full=arguments.full)
        raise
    print_report(report, arguments, full=arguments.full)
    if arguments.plot is not None:
        draw_bench(report, arguments.plot)
        if not arguments.json:
            print(printable(f"wrote {arguments.plot}"))
    return 0


def _print_mixing(report: Any, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_report(report, arguments)
        return
    # The first value of --window is the window to judge; the others are the windows to compare it with.
    text = report.to_text().replace("windows=SIZES", f"--window {report.window},SIZES")
    print_text(option_text(text, (f"epochs={report.epochs}",), arguments.parser))


def _mixing(arguments: argparse.Namespace) -> Any:
    from h5pack.benchmark.mixing import mixing_report
    from h5pack.data.dataset import H5Dataset
    from h5pack.order.window import DEFAULT_WINDOW
    from h5pack.sources.hdf5_catalog import detect_names

    if arguments.source is None:
        raise OptionsError("mixing needs SOURCE; give an HDF5 file", parameters=("mixing",))
    images, labels = detect_names(arguments.source, arguments.images or "images", arguments.labels or "labels")
    dataset = H5Dataset(arguments.source, arguments.split, images=images, labels=labels)
    window, *others = _numbers("window", arguments.window) or (DEFAULT_WINDOW,)
    (batch_size, *_) = _numbers("batch_size", arguments.batch_size) or (256,)
    given = keywords(arguments, mixing_report)
    return mixing_report(dataset, **{**given, "batch_size": batch_size, "window": window, "windows": others or None})


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    from h5pack.benchmark.cases import BenchSettings
    from h5pack.pack.options import parse_bytes

    found = keywords(arguments, BenchSettings)
    for name in found.keys() & {"chunk_rows", "batch_size", "window", "num_threads", "num_workers"}:
        found[name] = _numbers(name, found[name])
    if "chunk_bytes" in found:
        found["chunk_bytes"] = tuple(map(parse_bytes, found["chunk_bytes"]))
    return found


def _numbers(name: str, values: Sequence[str] | None) -> tuple[int, ...]:
    for value in values or ():
        if not value.isdecimal():
            raise invalid(name, value, "give whole numbers separated by commas")
    return tuple(map(int, values or ()))
