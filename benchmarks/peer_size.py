"""The comparison of all ways on images of one size: prepared one after another, then measured in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_check import checksum, truth
from benchmarks.peer_files import PeerFiles
from benchmarks.peer_process import PeerProcess
from benchmarks.peer_ways.image_folder import ImageFolder
from benchmarks.peer_ways.listing import Listed
from h5pack.measure.repeats import interleaved, spread
from h5pack.measure.sequential_read import sequential

BATCH = 256
WORKERS = 2
_COPY, _SEQUENTIAL = "memory copy", "sequential read"


@dataclass(frozen=True)
class Comparison:
    """What is compared, and where.

    Attributes
    ----------
    process : PeerProcess
    scratch : Path
    repeats : int
    seconds : float
        Epochs of slow ways are cut short after this; hot ones are timed for half of it at least.
    """

    process: PeerProcess
    scratch: Path
    repeats: int
    seconds: float


class SizeComparison:
    """All ways on images of one size.

    Parameters
    ----------
    comparison : Comparison
    folder : Path
        The JPEGs.
    ways : sequence of Listed
    """

    def __init__(self, comparison: Comparison, folder: Path, ways: Sequence[Listed]) -> None:
        self.comparison, self.folder, self.ways = comparison, folder, ways
        self.source = ImageFolder(folder)
        self.row_bytes = int(np.prod(self.source.shape))
        expected = truth(self.source, WORKERS)
        self.truth = folder.with_suffix(".npy")
        np.save(self.truth, expected)
        self.checksum = checksum(expected)
        self.workers = dict.fromkeys((listed.key for listed in ways), WORKERS)
        self.stores: dict[str, dict[str, Any]] = {}

    def _out(self, listed: Listed) -> Path:
        return self.folder.with_name(f"{self.folder.name}-{listed.store}")

    def _job(self, listed: Listed, task: str, **more: Any) -> dict[str, Any]:
        return {
            "task": task,
            "way": listed.key,
            "folder": str(self.folder),
            "out": str(self._out(listed)),
            "truth": str(self.truth),
            "batch": min(BATCH, len(self.source) // 2),
            "workers": self.workers[listed.key],
            "seed": 0,
            "seconds": self.comparison.seconds,
            **more,
        }

    def prepare(self, listed: Listed) -> dict[str, Any]:
        """Convert, choose the number of workers, compare two epochs and watch their memory.

        Returns
        -------
        dict
            What the result has of a way; with "skipped" where it cannot be measured.
        """
        found: dict[str, Any] = {"way": listed.name, "key": listed.key, "ours": listed.ours, "skipped": None}
        run = self.comparison.process.run
        if listed.store not in self.stores:
            converted = run(self._job(listed, "convert"))
            if not _failed(converted):
                converted["bytes"] = PeerFiles(self._out(listed)).disk_bytes()
            self.stores[listed.store] = converted
        converted = self.stores[listed.store]
        if reason := _failed(converted):
            return {**found, "skipped": f"convert: {reason}" if "error" in converted else reason}
        tried = {}
        for workers in converted["tried"]:
            report = run(self._job(listed, "try", workers=workers))
            if not _failed(report):
                tried[workers] = report["images_per_s"]
        if tried:
            self.workers[listed.key] = max(tried, key=lambda workers: tried[workers])
        checked = run(self._job(listed, "check"), watch=True)
        if reason := _failed(checked):
            return {**found, "skipped": f"check: {reason}"}
        found |= {
            "settings": checked["settings"],
            "packages": checked["packages"],
            "parallel": checked["parallel"],
            "workers_tried": {str(workers): round(speed, 1) for workers, speed in tried.items()} or None,
            "verified": checked["verified"],
            "verified_reason": checked["reason"],
            "epochs_checked": checked["epochs"],
            "checksum": checked["checksum"],
            "peak_memory_mb": round((checked["peak"] - checked["baseline"]) / 1e6, 1),
            "file_mb": round(converted["bytes"] / 1e6, 1),
            "convert": self._conversion(converted),
        }
        return found

    def _conversion(self, converted: dict[str, Any]) -> dict[str, Any] | None:
        if not converted["workers"]:
            return None
        return {
            "images_per_s": round(len(self.source) / converted["seconds"], 1),
            "seconds": round(converted["seconds"], 3),
            "seconds_before_fsync": round(converted["seconds_before_fsync"], 3),
            "workers": converted["workers"],
        }

    def visit(self, listed: Listed) -> dict[str, Any]:
        """A cold epoch and hot ones in a fresh process."""
        pages = PeerFiles(self._out(listed)).drop()
        return self.comparison.process.run(self._job(listed, "read", pages_found_in_cache=pages))

    def ceilings(self) -> dict[str, float]:
        """Images a second that no way can pass: copying rows in memory, reading a cold file."""
        job = {"task": "copy", "rows": len(self.source), "row_bytes": self.row_bytes, "batch": BATCH}
        job |= {"threads": [1, WORKERS], "seconds": self.comparison.seconds}
        report = self.comparison.process.run(job)
        if reason := _failed(report):
            raise RuntimeError(f"the memory copy, which every ratio needs, was not measured: {reason}")
        speeds = {f"{_COPY} {threads}": float(speed) for threads, speed in report["images_per_s"].items()}
        path = self.folder.with_name(f"{self.folder.name}-rows") / "rows.raw"
        if not path.exists():
            path.parent.mkdir()
            with path.open("wb") as raw:
                for row in range(len(self.source)):
                    raw.write(np.full(self.row_bytes, row % 251, np.uint8).data)
            PeerFiles(path.parent).flush()
        PeerFiles(path.parent).drop()
        return {**speeds, _SEQUENTIAL: sequential(path) / self.row_bytes}

    def result(self) -> dict[str, Any]:
        """Everything about images of this size."""
        found = {}
        for listed in self.ways:
            found[listed.key] = self.prepare(listed)
            print(f"{self.row_bytes:,} bytes a row: {listed.name}: {_said(found[listed.key])}", flush=True)
        running = {listed.key: listed for listed in self.ways if not found[listed.key]["skipped"]}
        ceilings: list[dict[str, float]] = []
        visits: dict[str, list[dict[str, Any]]] = {key: [] for key in running}
        for name in interleaved(["ceilings", *running], self.comparison.repeats):
            if name == "ceilings":
                ceilings.append(self.ceilings())
                print(
                    f"  {', '.join(f'{key}: {speed:,.0f} images/s' for key, speed in ceilings[-1].items())}", flush=True
                )
            elif not found[name]["skipped"]:
                report = self.visit(running[name])
                if reason := _failed(report):
                    found[name]["skipped"] = f"read: {reason}"
                else:
                    visits[name].append(report)
                print(f"  {running[name].name}: {_seen(report)}", flush=True)
        for key, reports in visits.items():
            if not found[key]["skipped"]:
                found[key] |= _measured(reports, [turn[f"{_COPY} {WORKERS}"] for turn in ceilings])
        return {
            "rows": len(self.source),
            "row_bytes": self.row_bytes,
            "source_mb": round(PeerFiles(self.folder).disk_bytes() / 1e6, 1),
            "raw_mb": round(len(self.source) * self.row_bytes / 1e6, 1),
            "checksum": self.checksum,
            "ceilings": {name: spread([turn[name] for turn in ceilings]) for name in ceilings[0]},
            "ways": list(found.values()),
        }


def _failed(report: dict[str, Any]) -> str | None:
    """Why a process gave nothing."""
    return f"not installed: {report['missing']}" if "missing" in report else report.get("error")


def _measured(reports: list[dict[str, Any]], copies: list[float]) -> dict[str, Any]:
    """Medians and spreads of the visits to one way; `copies` are the memory copy's speeds in the same turns."""
    hot = [report["hot"]["images_per_s"] for report in reports]
    first = [report["import_seconds"] + report["first_batch_seconds"] for report in reports]
    return {
        "hot_images_per_s": spread(hot),
        "hot_of_memory_copy": spread([speed / copy for speed, copy in zip(hot, copies, strict=True)]),
        "hot_batches": min(report["hot"]["batches"] for report in reports),
        "hot_whole_epochs": all(report["hot"]["whole_epochs"] for report in reports),
        "cold_images_per_s": spread([report["cold"]["images_per_s"] for report in reports]),
        "cold_batches": min(report["cold"]["batches"] for report in reports),
        "cold_whole_epoch": all(report["cold"]["whole_epoch"] for report in reports),
        "cold_pages_found_in_cache": max(report["cold"]["pages_found_in_cache"] for report in reports),
        "pages": reports[0]["cold"]["pages"],
        "first_batch_seconds": spread(first),
        "import_seconds": spread([report["import_seconds"] for report in reports]),
    }


def _said(found: dict[str, Any]) -> str:
    if found["skipped"]:
        return f"skipped, {found['skipped']}"
    converted = found["convert"]
    speed = f"converted at {converted['images_per_s']:,.0f} images/s, " if converted else ""
    right = "each image once" if found["verified"] else f"WRONG: {found['verified_reason']}"
    return f"{speed}{right}, {found['peak_memory_mb']:,.0f} MB"


def _seen(report: dict[str, Any]) -> str:
    if reason := _failed(report):
        return reason
    hot, cold = report["hot"]["images_per_s"], report["cold"]["images_per_s"]
    first = report["import_seconds"] + report["first_batch_seconds"]
    return f"hot {hot:,.0f}, cold {cold:,.0f} images/s, first batch {first:.2f} s"
