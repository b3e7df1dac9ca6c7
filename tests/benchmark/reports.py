"""Reports made by hand, with realistic speeds."""

from __future__ import annotations

import dataclasses
from typing import Any

from h5pack.benchmark.cases import CACHES, ENGINES, ORDERS, BenchCase, Ceiling, FileVariant, Measurement
from h5pack.benchmark.recommend import Recommendation
from h5pack.benchmark.report import BenchReport
from h5pack.format.plans import CachePlan

ROW_BYTES = 116_412
MACHINE = {
    "processor": "AMD EPYC 7763 64-Core Processor", "cpus": 2, "memory_gb": 8.2, "virtual": True, "file_system": "ext4",
    "kernel": "6.1.0-18-cloud-amd64", "python": "3.11.9", "packages": {"h5pack": "0.1.0", "isal": None},
}  # fmt: skip
SPEEDS = {"sequential": 80e3, "window": 77e3, "full": 62e3, "single": 20e3}
ENGINE_SHARES = {"direct": 1.0, "tuned": 0.4, "default": 0.2}


def packed(rows: int, compression: str = "none") -> FileVariant:
    """Chunks of this many rows."""
    label = f"{rows:,} row" + "s" * (rows != 1) + ("" if compression == "none" else f" {compression}")
    return FileVariant(
        label=label, path=f"/scratch/{rows}.h5", images="images", labels="labels", rows=4096, chunk_rows=rows,
        chunk_bytes=rows * ROW_BYTES, row_bytes=ROW_BYTES, compression=compression, stored_bytes=4096 * ROW_BYTES,
        overhead=1.0 if compression == "none" else 0.81,
    )  # fmt: skip


def contiguous() -> FileVariant:
    """Rows without chunks."""
    return dataclasses.replace(packed(1), label="contiguous", chunk_rows=None, chunk_bytes=None)


def as_it_is() -> FileVariant:
    """An input file whose chunks cut the images."""
    return dataclasses.replace(packed(100), label="as it is", path="/data/celeba.h5", overhead=1.99, is_input=True)


def measured(
    variant: FileVariant, order: str, engine: str, cache: str, speed: float | None = None, **changes: Any
) -> Measurement:
    """Three repeats of a case of the sweep, or of one with other settings."""
    threads = 1 if order == "single" or engine == "default" else 2
    case = BenchCase(variant.label, order, engine, cache, 1 if order == "single" else 256, 16, threads)
    if speed is None:
        speed = SPEEDS[order] * ENGINE_SHARES[engine] * (1.0 if cache == "hot" else 0.2) + (variant.chunk_rows or 0)
    amplification = 1.0 if engine == "direct" else None
    case, speeds = dataclasses.replace(case, **changes), (1.04 * speed, speed, 0.97 * speed)
    return Measurement(case, speeds, amplification, 0.5, turns=(0, 1, 2))


def failed(variant: FileVariant, order: str, engine: str, cache: str, reason: str = "pages stay") -> Measurement:
    """A case that could not be measured."""
    return Measurement(measured(variant, order, engine, cache, 1.0).case, reason=reason)


def decisive(variants: list[FileVariant]) -> list[Measurement]:
    """The cases by which variants are compared."""
    return [measured(variant, "window", "direct", "hot") for variant in variants]


def sweep(variants: list[FileVariant], caches: tuple[str, ...] = CACHES) -> list[Measurement]:
    """All cases that compare variants."""
    return [
        measured(variant, order, engine, cache)
        for cache in caches
        for variant in variants
        for engine in ENGINES
        if engine != "tuned" or variant.chunk_rows is not None
        for order in ORDERS
    ]


def recommended(variant: FileVariant, images_per_s: float = 76_210.0, **changes: Any) -> Recommendation:
    """A recommendation of chunks."""
    cache = CachePlan(0, 114, 1.0, "unfiltered: without a cache, only the selected rows are read")
    found = Recommendation(
        variant=variant.label, convert=True, chunk_rows=variant.chunk_rows, compression=variant.compression,
        batch_size=256, window=16, num_threads=2, num_workers=2, chunk_cache=cache, judged_by="hot",
        images_per_s=images_per_s, ties=("9 rows", variant.label, "144 rows"),
        reasons=tuple(f"Reason {number}, {'which is long, ' * 10}." for number in range(8)),
        command=f"h5pack convert /data/celebA packed.h5 --chunk-rows {variant.chunk_rows}",
        code="dataset = h5pack.H5Dataset('packed.h5')\nloader = h5pack.H5Loader(dataset, batch_size=256)",
    )  # fmt: skip
    return dataclasses.replace(found, **changes)


def empty() -> BenchReport:
    """A report of a bench that was stopped before it measured anything."""
    images = 202_599
    machine = dict(MACHINE)
    return BenchReport(
        "/data/celebA", "folder", images, (218, 178, 3), ROW_BYTES, 0, 60.0, machine, source_images=images
    )


def folder_report() -> BenchReport:
    """The report of a folder."""
    variants = [*map(packed, (1, 2, 9, 36, 144)), contiguous()]
    best = variants[3]
    again = [
        *(measured(one, "window", "direct", "hot", 70e3 + (one.chunk_bytes or 0) / 1e3) for one in variants[1:5]),
        measured(best, "window", "direct", "hot", 51e3, num_threads=1),
        measured(best, "window", "direct", "hot", 33e3, num_threads=1, num_workers=2),
    ]
    ceilings = [
        Ceiling("memory copy", 1, "hot", (58e3, 57e3)),
        Ceiling("memory copy", 2, "hot", (83e3, 82e3)),
        Ceiling("sequential read", 1, "cold", (23e3, 20e3)),
    ]
    notes = ["The images differ in size, and none was asked for: size=224 was used."]
    return dataclasses.replace(
        empty(), sample_rows=4096, variants=variants, ceilings=ceilings, measurements=sweep(variants), run_off=again,
        notes=notes, recommendation=recommended(best), seconds={"packing": 5.1, "run-off": 11.0, "all": 58.9},
        pack_images_per_s=4212.0, complete=True,
    )  # fmt: skip


def file_report() -> BenchReport:
    """The report of an HDF5 file that is better converted."""
    report = folder_report()
    report.source, report.kind = "/data/celeba.h5", "file"
    report.variants = [as_it_is(), *report.variants]
    report.measurements = sweep(report.variants)
    report.faults = ("chunks (100, 3, 217, 178) split every image of 218 rows",)
    report.fix = "h5pack convert /data/celeba.h5 packed.h5 --chunk-rows 36"
    return report
