"""How fast is `h5pack convert`, beside as many processes that only open, read and decode the same files?

Run ``python -m benchmarks.convert``; it makes its own images. Each repeat times, in turn:

- the ceiling: worker processes that open, read and decode every file, and keep nothing;
- convert: from listing the folder to the last write (the survey of all headers included), and the finishing (tables,
  fsync, rename) beside it.

Then the peak memory of conversions of a quarter and of all of the images.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

import h5pack
from benchmarks.common import about, benchmark_parser, ratios, scratch_folder, spread, write_result
from benchmarks.tables import convert_table
from h5pack.benchmark.ceilings import interleaved
from h5pack.benchmark.synthetic import make_folder
from h5pack.system.machine import available_cpus

DECODERS = ("pillow", "simplejpeg")


def read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def decode_all(paths: Sequence[str], decoder: str) -> None:
    if decoder == "pillow":
        for path in paths:
            Image.open(io.BytesIO(read(path))).load()
        return
    import simplejpeg

    for path in paths:
        simplejpeg.decode_jpeg(read(path), "RGB")


def ceiling(paths: Sequence[str], decoder: str, workers: int) -> float:
    """Seconds in which `workers` processes decode everything."""
    context = multiprocessing.get_context("fork")
    begin = time.perf_counter()
    processes = [
        context.Process(target=decode_all, args=(paths[worker::workers], decoder)) for worker in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return time.perf_counter() - begin


def convert(folder: Path, out: Path, decoder: str, workers: int, how: str) -> dict[str, float]:
    """Seconds of each stage of one conversion."""
    simplejpeg = sys.modules.get("simplejpeg")
    if decoder == "pillow":
        # As where the package is not installed.
        sys.modules["simplejpeg"] = None  # type: ignore[assignment]
    try:
        return h5pack.convert(folder, out, num_workers=workers, io=how, overwrite=True).seconds
    finally:
        if simplejpeg is not None:
            sys.modules["simplejpeg"] = simplejpeg
        else:
            sys.modules.pop("simplejpeg", None)


def peak_memory(folder: Path, out: Path, limit: int, workers: int) -> dict[str, float]:
    """Peak resident MB of the converting process, and of its largest worker."""
    code = (
        "import sys, json, resource, h5pack\n"
        f"h5pack.convert({str(folder)!r}, {str(out)!r}, "
        f"num_workers={workers}, limit={limit}, overwrite=True)\n"
        "peak = lambda who: resource.getrusage(who).ru_maxrss / 1024\n"
        "print(json.dumps([peak(resource.RUSAGE_SELF), peak(resource.RUSAGE_CHILDREN)]))\n"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    parent, worker = json.loads(output)
    return {"images": limit, "parent_mb": round(parent, 1), "largest_worker_mb": round(worker, 1)}


def measure(folder: Path, scratch: Path, repeats: int, workers: int) -> dict[str, Any]:
    """Ceilings and conversions in turn; medians, spread, and the ratio within each repeat."""
    paths = sorted(str(path) for path in folder.rglob("*.jpg"))
    out = scratch / "out.h5"
    cases = [f"{decoder} {how}" for decoder in DECODERS for how in ("auto", "buffered")]
    times: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    ceilings: dict[str, list[float]] = {case: [] for case in cases}
    for decoder in DECODERS:
        ceiling(paths, decoder, workers)  # The files are in the page cache from here on.
    for case in interleaved(cases, repeats):
        decoder, how = case.split()
        ceilings[case].append(ceiling(paths, decoder, workers))
        times[case].append(convert(folder, out, decoder, workers, how))
        print(f"{case}: ceiling {ceilings[case][-1]:.2f} s, {times[case][-1]}", flush=True)
    results = {}
    for case in cases:
        to_last_write = [seconds["survey"] + seconds["write"] for seconds in times[case]]
        stages = {name: [seconds[name] for seconds in times[case]] for name in ("survey", "write", "finish")}
        results[case] = {
            "ceiling_images_per_s": spread([len(paths) / seconds for seconds in ceilings[case]]),
            "convert_images_per_s": spread([len(paths) / seconds for seconds in to_last_write]),
            **{f"{name}_seconds": spread(seconds) for name, seconds in stages.items()},
            "ratio_to_last_write": ratios(ceilings[case], to_last_write),
            "ratio_of_writing_alone": ratios(ceilings[case], stages["write"]),
        }
    bytes_read = sum(os.path.getsize(path) for path in paths)
    return {
        "images": len(paths),
        "source_bytes": bytes_read,
        "file_bytes": out.stat().st_size,
        "workers": workers,
        "cases": results,
        "memory": [peak_memory(folder, out, limit, workers) for limit in (max(1, len(paths) // 4), len(paths))],
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = benchmark_parser("convert", __doc__)
    parser.add_argument("--count", type=int, default=20_000, help="images to make, 218x178")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workers", type=int, default=available_cpus())
    arguments = parser.parse_args(argv)
    with scratch_folder(arguments.scratch) as scratch:
        folder = scratch / "images"
        make_folder(folder, arguments.count, workers=arguments.workers)
        result = {
            **about("convert", arguments, "count repeats", scratch),
            **measure(folder, scratch, arguments.repeats, arguments.workers),
        }
    write_result(arguments.json, result)
    print(convert_table(result))
    return result


if __name__ == "__main__":
    main()
