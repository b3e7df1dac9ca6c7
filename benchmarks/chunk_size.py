"""Which chunk size is best on this machine? ``h5pack bench`` on generated images, its result kept beside the others.

Run ``python -m benchmarks.chunk_size``. `benchmarks.read --again` measures what it found once more.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, write_result
from h5pack.bench.bench import Bench
from h5pack.bench.report_text import bench_text
from h5pack.bench.settings import BenchSettings
from h5pack.machine import available_cpus
from h5pack.tools.synth import make_folder


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, help="a folder of images (default: generated ones)")
    parser.add_argument("--count", type=int, default=20_000, help="images to generate, of 178x218")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--chunk-rows", type=lambda text: tuple(map(int, text.split(","))), default=())
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--scratch", type=Path, help="a folder for the files (default: a temporary one)")
    parser.add_argument("--json", type=Path, default=RESULTS / "chunk_size.json")
    arguments = parser.parse_args(argv)
    scratch = Path(tempfile.mkdtemp(prefix="h5pack-bench-", dir=arguments.scratch))
    try:
        folder = arguments.images
        if folder is None:
            folder = scratch / "images"
            make_folder(folder, arguments.count, workers=available_cpus())
        settings = BenchSettings(
            seconds=arguments.seconds,
            chunk_rows=arguments.chunk_rows,
            batch_sizes=(arguments.batch_size,),
            scratch=str(scratch),
        )
        report = Bench(folder, settings).run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if arguments.images is None:
        # The folder's name was a temporary one.
        report.subject = "generated images"
    what = f"--count {arguments.count}" if arguments.images is None else f"--images {arguments.images.name}"
    result = report.to_json() | {"command": f"python -m benchmarks.chunk_size {what} --seconds {arguments.seconds:g}"}
    text = json.dumps(result).replace(str(folder), "images")
    result = json.loads(text)
    print(bench_text(report))
    write_result(arguments.json, result)
    return result


if __name__ == "__main__":
    main()
