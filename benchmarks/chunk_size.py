"""Which chunk size is best on this machine, and does the recommendation hold when it is measured again?

Run ``python -m benchmarks.chunk_size``: `h5pack.bench` on generated images, and its result beside the others; then once
more, only with a cold page cache, in the result as ``"cold"``.
``python -m benchmarks.chunk_size --again RESULT --images FOLDER`` packs the folder with each chunk size of that result
again, and reads all of them side by side in whole epochs, with the recommended settings.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import h5pack
from benchmarks.common import RESULTS, benchmark_parser, consume, scratch_folder, spread, write_result
from h5pack.benchmark.ceilings import interleaved
from h5pack.benchmark.synthetic import make_folder
from h5pack.system.files import drop_cache
from h5pack.system.machine import available_cpus, machine_facts

_EPOCHS = 5
"""Of a file that was loaded once."""


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The report of a bench, and of one with a cold page cache."""
    # Absolute, because its name is replaced in the whole result.
    folder = (arguments.images or scratch / "images").absolute()
    if arguments.images is None:
        make_folder(folder, arguments.count, workers=available_cpus())
    settings = {name: getattr(arguments, name) for name in ("seconds", "chunk_rows", "batch_size")}
    reports = [
        h5pack.bench(folder, scratch=scratch, **settings, **more)
        for more in ({}, {"caches": "cold", "orders": "window", "engines": "direct", "num_workers": 0})
    ]
    for report in reports:
        if arguments.images is None:
            # The folder's name was a temporary one.
            report.source = "generated images"
        print(report.to_text(full=True))
    what = f"--count {arguments.count}" if arguments.images is None else f"--images {folder.name}"
    command = f"python -m benchmarks.chunk_size {what} --seconds {arguments.seconds:g}"
    result = reports[0].to_json() | {"command": command, "cold": reports[1].to_json()}
    found: dict[str, Any] = json.loads(json.dumps(result).replace(str(folder), "images"))
    return found


def measure_again(bench: Path, folder: Path, scratch: Path, repeats: int) -> dict[str, Any]:
    """Pack a folder with each chunk size of a bench of it, and read each as its recommendation says.

    `bench` is what ``h5pack bench --json`` or this script wrote.
    """
    found = json.loads(bench.read_text())
    chosen = found["recommendation"]
    if chosen is None or not chosen["convert"]:
        raise SystemExit(f"{bench}: it recommends no conversion; there is nothing to measure again")
    machine = machine_facts(scratch)
    # The bench may have given images of several sizes one.
    size = tuple(found["row_shape"][:2]) if "--size" in chosen["command"] else None
    loaders, paths = {}, {}
    for variant in found["variants"]:
        if variant["chunk_rows"] is None or variant["is_input"]:
            continue
        label, compression = variant["label"], variant["compression"]
        paths[label] = scratch / f"{variant['chunk_rows']}-{compression}.h5".replace(":", "-")
        h5pack.convert(
            folder,
            paths[label],
            limit=found["sample_rows"],
            chunk_rows=variant["chunk_rows"],
            compression=compression,
            size=size,
        )
        loaders[label] = h5pack.H5Loader(
            h5pack.H5Dataset(paths[label]),
            chosen["batch_size"],
            window=chosen["window"],
            num_threads=chosen["num_threads"],
        )
    cold = chosen["judged_by"] == "cold"
    speeds: dict[str, list[float]] = {label: [] for label in loaders}
    for label in interleaved(list(loaders), repeats):
        # The layout of cached pages makes all epochs faster or slower by up to a fifth until the file is loaded again,
        # so it is loaded before each repeat, as in training: by an epoch.
        consume(loaders[label])
        loaders[label].dataset.close()  # The system keeps pages that are mapped.
        if drop_cache(paths[label]) and cold:
            raise SystemExit(f"{paths[label]}: its pages stay in the page cache, so cold reads cannot be measured")
        if not cold:
            consume(loaders[label])
        speeds[label].append(statistics.median(consume(loaders[label]) for _ in range(1 if cold else _EPOCHS)))
    medians = {label: spread(values)["median"] for label, values in speeds.items()}
    result = {
        "benchmark": "chunk_size_again",
        "command": f"python -m benchmarks.chunk_size --again RESULT --images FOLDER --repeats {repeats}",
        "machine": machine,
        "recommended": chosen["variant"],
        "settings": {name: chosen[name] for name in ("batch_size", "window", "num_threads", "judged_by")},
        "images_per_s": {label: spread(values) for label, values in speeds.items()},
        "of_best": round(medians[chosen["variant"]] / max(medians.values()), 4),
    }
    for label, median in medians.items():
        print(f"{'>' if label == chosen['variant'] else ' '} {label}: {median:,.0f} images/s")
    print(f"{chosen['variant']}, as recommended: {result['of_best']:.2f} of the best")
    return result


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = benchmark_parser("chunk_size", __doc__)
    parser.set_defaults(json=None)  # The name depends on --again.
    parser.add_argument("--images", type=Path, help="a folder of images (default: generated ones)")
    parser.add_argument("--count", type=int, default=20_000, help="images to generate, of 218x178")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--chunk-rows", type=lambda text: tuple(map(int, text.split(","))), default=())
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--again", type=Path, metavar="RESULT", help="measure what this result compares again")
    parser.add_argument("--repeats", type=int, default=5, help="with --again")
    arguments = parser.parse_args(argv)
    if arguments.again is not None and arguments.images is None:
        parser.error("--again needs --images: the folder that the result is about")
    with scratch_folder(arguments.scratch) as scratch:
        if arguments.again is not None:
            result = measure_again(arguments.again, arguments.images, scratch, arguments.repeats)
        else:
            result = measure(arguments, scratch)
    write_result(arguments.json or RESULTS / f"{result['benchmark']}.json", result)
    return result


if __name__ == "__main__":
    main()
