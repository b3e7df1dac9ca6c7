"""How well does the window shuffle mix labels, against a full shuffle and the stored order?

Run ``python -m benchmarks.mixing``; it makes its own packs: the same images in the default shuffled order, and sorted
by class. `h5pack.mixing_report` then compares window sizes on each. Nothing is timed, so the figures are the same on
every machine.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import h5pack
from benchmarks.common import RESULTS, write_result
from benchmarks.row_files import RowSource
from h5pack.feed.order import DEFAULT_WINDOW
from h5pack.measure.machine_facts import machine_facts

ORDERS = ("shuffled", "sorted")


class ClassSource(RowSource):
    """A map-style dataset of images in class order, equally many of each class."""

    classes = 10

    def __getitem__(self, row: int) -> tuple[npt.NDArray[np.uint8], int]:
        image, _ = super().__getitem__(row)
        return image, row * self.classes // self.rows


def measure(source: ClassSource, scratch: Path, order: str, chunk_rows: int, batch: int, epochs: int) -> dict[str, Any]:
    """The report about one pack."""
    pack = scratch / f"{order}.h5"
    h5pack.convert(source, pack, h5pack.ConvertOptions(order=order, chunk_rows=chunk_rows, workers=1))
    report = h5pack.mixing_report(h5pack.H5Dataset(pack), batch, window=DEFAULT_WINDOW, epochs=epochs)
    print(f"{order} pack\n{report}\n")
    pack.unlink()
    return report.to_json()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000, help="images of 32x32, in 10 classes")
    parser.add_argument("--chunk-rows", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--scratch", type=Path, help="a folder for the packs (default: a temporary one)")
    parser.add_argument("--json", type=Path, default=RESULTS / "mixing.json")
    arguments = parser.parse_args(argv)
    source = ClassSource(arguments.rows, 32, 32)
    scratch = Path(tempfile.mkdtemp(prefix="h5pack-bench-", dir=arguments.scratch))
    try:
        result = {
            "benchmark": "mixing",
            "command": f"python -m benchmarks.mixing --rows {arguments.rows} --chunk-rows {arguments.chunk_rows} "
            f"--batch {arguments.batch} --epochs {arguments.epochs}",
            "machine": machine_facts(scratch),
            "classes": source.classes,
            "default_window": DEFAULT_WINDOW,
            "packs": {
                order: measure(source, scratch, order, arguments.chunk_rows, arguments.batch, arguments.epochs)
                for order in ORDERS
            },
        }
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    write_result(arguments.json, result)
    return result


if __name__ == "__main__":
    main()
