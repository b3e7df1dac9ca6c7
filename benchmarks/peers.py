"""How does h5pack compare with its peers? The same images, the same work, in one run.

Run ``python -m benchmarks.peers``; it makes its own images. The peers live best in a virtual environment of their own:
``scripts/install-peers`` makes one, and ``--python .venv-peers/bin/python`` uses it. A peer that is missing there is
left out, with the reason.

Every case, h5pack's and the peers', gets the same JPEG folder and gives shuffled batches of 256 raw images, uint8, with
labels, on 2 threads or worker processes; how each is used, and why so, is in ``benchmarks/peer_cases/`` and in the
result. Before anything is timed, two epochs of each, one if it takes over 20 s, are compared with the images as Pillow
decodes them: each image exactly once, with its label, shuffled. The consumer looks at every page of each batch.

Each measurement has a process of its own. The cases take turns, forwards and backwards:

- first batch: of a newly opened dataset, its files dropped from the page cache (mincore says whether pages stay); torch
  is imported, the peer's own import counts;
- cold: the whole of that epoch, timed from the opening to the last batch, without the import. FFCV compiles at its
  first batch: its cold epoch is the second one, the files dropped again;
- hot: the files are read into the page cache, and epochs are timed after one that is not;
- peak memory, once: anonymous and shared memory of the process and its children during the two compared epochs, less
  what the interpreter has with torch; pages of mapped files are the page cache's and not counted;
- conversion, once: from the JPEG folder until all is on the disk (fsync); 2 processes decode, all with one decoder.

Epochs of the slow cases are cut short after ``--seconds``; the result says how many batches were read. WebDataset,
MosaicML Streaming and LitData leave the number of workers to their users: 2 and none are tried, the faster is taken.
The ceilings, in the same turns: np.take of random rows into batches that are used again, and a sequential read.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import about, benchmark_parser, ratios, spread, write_result
from benchmarks.peer_cases.base import LISTING, ImageFolder, Listed, chosen
from benchmarks.peer_worker import MemoryWatch, PeerFiles, checksum, truth
from h5pack.benchmark.ceilings import interleaved, sequential
from h5pack.benchmark.synthetic import make_folder

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class PeerProcess:
    """Starts jobs of `benchmarks.peer_worker`, one after another."""

    python: str  # The interpreter; h5pack must be importable there.
    folder: Path  # For jobs, reports and the peers' own temporary files.
    max_seconds: float = 600  # A job that takes longer is ended.

    def run(self, job: dict[str, Any], watch: bool = False) -> dict[str, Any]:
        """Do a job in a fresh process; return the report, with "error" if the process failed or took too long.

        With `watch`, the report has the job's "peak" memory in bytes.
        """
        job_path, report_path, log_path = (self.folder / name for name in ("job.json", "report.json", "log.txt"))
        report_path.unlink(missing_ok=True)
        job_path.write_text(json.dumps(job))
        # Peers leave temporary files behind, some in the home folder: here they go with the rest.
        environment = {
            **os.environ,
            "TMPDIR": str(self.folder),
            "HOME": str(self.folder),
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
        }
        # Installed packages are compiled. Have this checkout compiled, too, or its first batch would wait for that.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [self.python, "-m", "benchmarks.peer_worker", str(job_path), str(report_path)]
        with log_path.open("wb") as log:
            # A session of its own: all its processes can be found, and ended, whatever their parents are.
            try:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:
                return {"error": f"cannot be started: {error.strerror}"}
            peak = None
            try:
                if watch:
                    with MemoryWatch(process.pid) as memory:
                        process.wait(self.max_seconds)
                    peak = memory.peak
                else:
                    process.wait(self.max_seconds)
            except subprocess.TimeoutExpired:
                return {"error": f"took more than {self.max_seconds:.0f} s"}
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if not report_path.exists():
            return {"error": f"ended with {process.returncode}: {_last_line(log_path)}"}
        report: dict[str, Any] = json.loads(report_path.read_text())
        return report if peak is None else {**report, "peak": peak}


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


BATCH = 256
WORKERS = 2
_COPY, _SEQUENTIAL = "memory copy", "sequential read"


class SizeComparison:
    """All cases on the JPEGs in a folder, which have one size.

    Epochs of slow cases are cut short after `seconds`; hot ones are timed for half of it at least.
    """

    def __init__(
        self, process: PeerProcess, folder: Path, cases: Sequence[Listed], repeats: int, seconds: float
    ) -> None:
        self.process, self.folder, self.cases, self.repeats, self.seconds = process, folder, cases, repeats, seconds
        self.source = ImageFolder(folder)
        self.row_bytes = int(np.prod(self.source.shape))
        expected = truth(self.source, WORKERS)
        self.truth = folder.with_suffix(".npy")
        np.save(self.truth, expected)
        self.checksum = checksum(expected)
        self.workers = dict.fromkeys((listed.key for listed in cases), WORKERS)
        self.stores: dict[str, dict[str, Any]] = {}

    def _out(self, listed: Listed) -> Path:
        return self.folder.with_name(f"{self.folder.name}-{listed.store}")

    def _job(self, listed: Listed, task: str, **more: Any) -> dict[str, Any]:
        return {
            "task": task,
            "case": listed.key,
            "folder": str(self.folder),
            "out": str(self._out(listed)),
            "truth": str(self.truth),
            "batch": min(BATCH, len(self.source) // 2),
            "workers": self.workers[listed.key],
            "seed": 0,
            "seconds": self.seconds,
            **more,
        }

    def prepare(self, listed: Listed) -> dict[str, Any]:
        """Convert, choose the number of workers, compare two epochs and watch their memory.

        Return what the result has of a case; "skipped" is the reason if it cannot be measured.
        """
        found: dict[str, Any] = {"case": listed.name, "key": listed.key, "ours": listed.ours, "skipped": None}
        run = self.process.run
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
        return self.process.run(self._job(listed, "read", pages_found_in_cache=pages))

    def ceilings(self) -> dict[str, float]:
        """Images a second that no case can pass: copying rows in memory, reading a cold file."""
        job = {"task": "copy", "rows": len(self.source), "row_bytes": self.row_bytes, "batch": BATCH}
        job |= {"threads": [1, WORKERS], "seconds": self.seconds}
        report = self.process.run(job)
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
        for listed in self.cases:
            found[listed.key] = self.prepare(listed)
            print(f"{self.row_bytes:,} bytes a row: {listed.name}: {_said(found[listed.key])}", flush=True)
        running = {listed.key: listed for listed in self.cases if not found[listed.key]["skipped"]}
        ceilings: list[dict[str, float]] = []
        visits: dict[str, list[dict[str, Any]]] = {key: [] for key in running}
        for name in interleaved(["ceilings", *running], self.repeats):
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
            "cases": list(found.values()),
        }


def _failed(report: dict[str, Any]) -> str | None:
    """Why a process gave nothing."""
    return f"not installed: {report['missing']}" if "missing" in report else report.get("error")


def _measured(reports: list[dict[str, Any]], copies: list[float]) -> dict[str, Any]:
    """Medians and spreads of the visits to one case; `copies` are the memory copy's speeds in the same turns."""
    hot = [report["hot"]["images_per_s"] for report in reports]
    first = [report["import_seconds"] + report["first_batch_seconds"] for report in reports]
    return {
        "hot_images_per_s": spread(hot),
        "hot_of_memory_copy": ratios(hot, copies),
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


_SIZES = {"116 KB": (218, 178), "3 KB": (32, 32)}


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("peers", __doc__)
    parser.add_argument("--count", type=int, default=8_000, help="images of 218x178, 116 KB a row; 0: none")
    parser.add_argument("--small", type=int, default=40_000, help="images of 32x32, 3 KB a row; 0: none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="epochs of slow cases are cut short after this")
    parser.add_argument("--only", help=f"these cases, by commas: {', '.join(listed.key for listed in LISTING)}")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the peers, and h5pack")
    arguments = parser.parse_args(argv)
    try:
        arguments.cases = chosen(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _space_needed(arguments: argparse.Namespace) -> int:
    """Bytes on the disk for the larger of the sizes, whose files go before the next ones come."""
    raw = max(
        count * height * width * 3
        for (height, width), count in zip(_SIZES.values(), (arguments.count, arguments.small), strict=True)
    )
    # Every store, the one that is twice as large, and the rows for the sequential read.
    return int(raw) * (len({listed.store for listed in arguments.cases}) + 2)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    arguments = _arguments(argv)
    scratch = Path(tempfile.mkdtemp(prefix="h5pack-bench-", dir=arguments.scratch))
    needed, free = _space_needed(arguments), shutil.disk_usage(scratch).free
    if free < needed:
        scratch.rmdir()
        raise SystemExit(
            f"{scratch.parent}: {free / 1e9:.1f} GB are free and {needed / 1e9:.1f} GB are needed; give --scratch a "
            "folder with more, or a smaller --count"
        )
    # Sockets of the peers' workers lie in their temporary folder, and such a path may have 108 bytes only.
    temporary = Path(tempfile.mkdtemp(prefix="h5pack-"))
    try:
        process = PeerProcess(arguments.python, temporary)
        there = process.run({"task": "versions"})
        if "error" in there:
            raise SystemExit(f"{arguments.python}: {there['error']}")
        sizes = {}
        for (name, size), count in zip(_SIZES.items(), (arguments.count, arguments.small), strict=True):
            if count:
                folder = scratch / name.replace(" ", "")
                make_folder(folder, count, size, workers=WORKERS)
                comparison = SizeComparison(process, folder, arguments.cases, arguments.repeats, arguments.seconds)
                sizes[name] = comparison.result()
                for path in scratch.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        # Paths are the user's own and left out.
        only = f" --only {arguments.only}" if arguments.only else ""
        python = "" if arguments.python == sys.executable else " --python .venv-peers/bin/python"
        result = about("peers", arguments, "count small repeats seconds", scratch, only + python)
        packages = {name: there["packages"].get(name) for name in result["machine"]["packages"]}
        result["machine"] |= {"python": there["python"], "packages": packages}
        result |= {
            "packages": there["packages"],
            "batch": BATCH,
            "workers": WORKERS,
            "sizes": sizes,
        }
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)
    write_result(arguments.json, result)
    return result


if __name__ == "__main__":
    # A run that is ended leaves no files and no process behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
