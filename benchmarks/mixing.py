"""How well does the window shuffle mix labels, against a full shuffle and the stored order?

Run ``python -m benchmarks.mixing``; it makes its own packs: the same images in the default shuffled order, and sorted
by class. The report of ``h5pack bench --mixing`` compares windows on each. Nothing is timed, so the figures are the
same on every machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import h5pack
from benchmarks.common import RowSource, about, benchmark_parser, scratch_folder, write_result
from h5pack.benchmark.mixing import mixing_report
from h5pack.order.window import DEFAULT_WINDOW

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
    h5pack.convert(source, pack, order=order, chunk_rows=chunk_rows, num_workers=1)
    report = mixing_report(h5pack.H5Dataset(pack), batch, window=DEFAULT_WINDOW, epochs=epochs)
    print(f"{order} pack\n{report.to_text()}\n")
    pack.unlink()
    return report.to_json()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = benchmark_parser("mixing", __doc__)
    parser.add_argument("--rows", type=int, default=50_000, help="images of 32x32, in 10 classes")
    parser.add_argument("--chunk-rows", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args(argv)
    source = ClassSource(arguments.rows, 32, 32)
    with scratch_folder(arguments.scratch) as scratch:
        result = {
            **about("mixing", arguments, "rows chunk-rows batch epochs", scratch),
            "classes": source.classes,
            "default_window": DEFAULT_WINDOW,
            "packs": {
                order: measure(source, scratch, order, arguments.chunk_rows, arguments.batch, arguments.epochs)
                for order in ORDERS
            },
        }
    write_result(arguments.json, result)
    return result


if __name__ == "__main__":
    main()
