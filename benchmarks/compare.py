"""Is this checkout as fast as another one? Reading and converting, in turns in one run.

Run ``python -m benchmarks.compare --against CHECKOUT``, the folder of the other version of h5pack. Each repeat of each
measurement runs in a process of its own, first with one version, then with the other, in alternating order, on the same
files, which this version makes. The result has the ratio of the speeds (this version over the other) within each
repeat, and their median: 1.00 is as fast.

- read: H5Loader on a pack in the page cache, the fastest epoch but the first of ``--seconds``, on 1 and 2 threads;
- convert: a folder of JPEGs to a pack, seconds of the whole call, the import not counted.

Both versions of the names of options are understood (``threads`` and ``num_threads``, ``ConvertOptions`` and keywords).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import (
    RowSource,
    about,
    benchmark_parser,
    make_pack,
    ratios,
    scratch_folder,
    spread,
    write_result,
)
from h5pack.benchmark.synthetic import make_folder
from h5pack.system.machine import available_cpus

ROOT = Path(__file__).parent.parent

# Runs with either version on the path, so it uses nothing of this one. Prints rows or images a second.
_READ = """
import inspect, json, sys, time, h5pack, torch
job = json.loads(sys.argv[1])
torch.set_num_threads(1)
names = inspect.signature(h5pack.H5Loader).parameters
threads = "num_threads" if "num_threads" in names else "threads"
dataset = h5pack.H5Dataset(job["pack"])
loader = h5pack.H5Loader(dataset, job["batch"], **{threads: job["threads"]})
speeds = []
start = time.perf_counter()
while len(speeds) < 4 or time.perf_counter() - start < job["seconds"]:
    begin, rows = time.perf_counter(), 0
    for images, labels in loader:
        images.numpy().reshape(-1)[::4096].sum()
        rows += len(images)
    speeds.append(rows / (time.perf_counter() - begin))
print(max(speeds[1:]))
"""
_CONVERT = """
import json, sys, time, h5pack
job = json.loads(sys.argv[1])
# Imports are not a part of the conversion.
h5pack.convert
options = dict(overwrite=True)
if hasattr(h5pack, "ConvertOptions"):
    arguments = (h5pack.ConvertOptions(workers=job["workers"], **options),)
    options = {}
else:
    arguments, options = (), dict(options, num_workers=job["workers"])
begin = time.perf_counter()
report = h5pack.convert(job["folder"], job["out"], *arguments, **options)
print(report.images / (time.perf_counter() - begin))
"""


def run(checkout: Path, code: str, job: dict[str, Any]) -> float:
    """The speed that a process prints which has a checkout's h5pack."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", code, json.dumps(job)]
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.split()[-1])


def compare(here: Path, against: Path, code: str, job: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Speeds of both checkouts in alternating order, and the ratio within each repeat."""
    checkouts = {"this": here, "other": against}
    speeds: dict[str, list[float]] = {name: [] for name in checkouts}
    for repeat in range(repeats):
        for name in checkouts if repeat % 2 == 0 else reversed(checkouts):
            speeds[name].append(run(checkouts[name], code, job))
    return {
        "this_per_s": spread(speeds["this"]),
        "other_per_s": spread(speeds["other"]),
        "ratio": ratios(speeds["this"], speeds["other"]),
        "ratio_of_medians": round(statistics.median(speeds["this"]) / statistics.median(speeds["other"]), 4),
    }


def jobs_of(scratch: Path, arguments: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    """The code and the job of every measurement, whose files are made here."""
    jobs: dict[str, tuple[str, dict[str, Any]]] = {}
    for size, (rows, height, width, batch) in {
        "116 KB": (arguments.large, 218, 178, 256),
        "3 KB": (arguments.small, 32, 32, 512),
    }.items():
        pack = make_pack(RowSource(rows, height, width), scratch / f"{height}.h5")
        for threads in (1, 2):
            job = {"pack": str(pack), "batch": min(batch, rows // 2), "threads": threads, "seconds": arguments.seconds}
            jobs[f"read {size}, {threads} threads"] = (_READ, job)
    if arguments.images:
        folder = scratch / "images"
        make_folder(folder, arguments.images, workers=arguments.workers)
        job = {"folder": str(folder), "out": str(scratch / "out.h5"), "workers": arguments.workers}
        jobs[f"convert, {arguments.workers} workers"] = (_CONVERT, job)
    return jobs


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = benchmark_parser("compare", __doc__)
    parser.add_argument("--against", type=Path, required=True, metavar="CHECKOUT", help="the other version")
    parser.add_argument("--large", type=int, default=8_000, help="rows of 116 KB (218x178)")
    parser.add_argument("--small", type=int, default=100_000, help="rows of 3 KB (32x32)")
    parser.add_argument("--images", type=int, default=4_000, help="JPEGs to convert; 0: none")
    parser.add_argument("--workers", type=int, default=available_cpus(), help="processes that convert")
    parser.add_argument("--seconds", type=float, default=2.0, help="of reading, in each repeat")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args(argv)
    if not (arguments.against / "h5pack" / "__init__.py").is_file():
        parser.error(f"{arguments.against}: no checkout of h5pack")
    with scratch_folder(arguments.scratch) as scratch:
        found = {}
        for name, (code, job) in jobs_of(scratch, arguments).items():
            found[name] = compare(ROOT, arguments.against.resolve(), code, job, arguments.repeats)
            ratio = found[name]["ratio"]
            print(f"{name}: {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})", flush=True)
        result = {
            **about("compare", arguments, "large small images seconds repeats", scratch, " --against CHECKOUT"),
            "measurements": found,
        }
    write_result(arguments.json, result)
    return result


if __name__ == "__main__":
    main()
