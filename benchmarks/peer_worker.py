"""What the comparison runs in a process of its own: ``python -m benchmarks.peer_worker JOB.json REPORT.json``.

A job names a way and what to do with it: convert, try, check or read; or it asks for the memory copy. What it found
goes into the report; a peer that is missing is a report, too.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_check import as_array, checksum, fault, marks
from benchmarks.peer_files import PeerFiles
from benchmarks.peer_memory import private_bytes
from benchmarks.peer_ways.image_folder import ImageFolder
from benchmarks.peer_ways.listing import chosen
from benchmarks.peer_ways.way import Opened, Reading, Way
from h5pack.measure.consuming import touch

_CHECKED_EPOCHS = 2
_MOST_CHECK_SECONDS = 20
_FEWEST_BATCHES = 8


@dataclass(frozen=True)
class Timed:
    """An epoch, or its beginning.

    Attributes
    ----------
    rows, batches : int
        That came.
    seconds : float
        To after the last one was looked at.
    first_seconds : float
        To after the first one was.
    whole : bool
        It was not cut short.
    """

    rows: int
    batches: int
    seconds: float
    first_seconds: float
    whole: bool


def timed(opened: Opened, most_seconds: float | None = None, begin: float | None = None) -> Timed:
    """Go through an epoch, looking at every page of each batch.

    Parameters
    ----------
    opened : Opened
    most_seconds : float, optional
        Leave it after so long, though not before 8 batches: workers hold some that are not counted.
    begin : float, optional
        When the clock was started; None: now.
    """
    begin = time.perf_counter() if begin is None else begin
    rows = batches = 0
    first, whole = 0.0, True
    iterator = opened.epoch()
    for images, labels in iterator:
        touch(as_array(images))
        assert len(as_array(labels)) == len(images)
        rows, batches = rows + len(images), batches + 1
        seconds = time.perf_counter() - begin
        first = first or seconds
        if most_seconds is not None and seconds > most_seconds and batches >= _FEWEST_BATCHES:
            whole = False
            break
    end = time.perf_counter()
    iterator.close()
    return Timed(rows, batches, end - begin, first, whole)


def convert(way: Way, job: dict[str, Any]) -> dict[str, Any]:
    """Convert, and have the result on the disk."""
    out = Path(job["out"])
    out.mkdir(parents=True)
    source = ImageFolder(Path(job["folder"]))
    begin = time.perf_counter()
    workers = way.convert(source, out, job["workers"])
    own = time.perf_counter() - begin
    PeerFiles(out).flush()
    flushed = time.perf_counter() - begin
    return {"seconds": flushed, "seconds_before_fsync": own, "workers": workers}


def attempt(way: Way, job: dict[str, Any]) -> dict[str, Any]:
    """How fast one number of workers is, in the second epoch."""
    PeerFiles(Path(job["out"])).heat()
    opened = way.open(Path(job["out"]), _reading(job))
    most = job["seconds"] if way.may_be_cut else None
    timed(opened, most)
    found = timed(opened, most)
    opened.close()
    return {"images_per_s": found.rows / found.seconds}


def check(way: Way, job: dict[str, Any]) -> dict[str, Any]:
    """Whether each epoch gives every image once, with its label, in an order of its own."""
    expected = np.load(job["truth"])
    opened = way.open(Path(job["out"]), _reading(job))
    orders, faults = [], []
    begin = time.perf_counter()
    for epoch in range(_CHECKED_EPOCHS):
        # A way this slow keeps nothing from one epoch to the next that could go wrong.
        if time.perf_counter() - begin > _MOST_CHECK_SECONDS:
            break
        parts = [marks(as_array(images), as_array(labels)) for images, labels in opened.epoch()]
        orders.append(np.concatenate(parts))
        if wrong := fault(orders[-1], expected):
            faults.append(f"epoch {epoch + 1}: {wrong}")
    if np.array_equal(orders[-1], orders[0] if len(orders) > 1 else expected):
        faults.append("the order does not change")
    opened.close()
    return {
        "verified": not faults,
        "reason": "; ".join(faults) or None,
        "epochs": len(orders),
        "checksum": checksum(orders[-1]),
    }


def read(way: Way, job: dict[str, Any]) -> dict[str, Any]:
    """A first epoch of cold files, from the opening on, then hot epochs."""
    out, pages = Path(job["out"]), job["pages_found_in_cache"]
    most = job["seconds"] if way.may_be_cut else None
    files = PeerFiles(out)
    begin = time.perf_counter()
    opened = way.open(out, _reading(job))
    cold = timed(opened, most, begin)
    first = cold.first_seconds
    if way.compiles:
        files.unmap()
        pages = files.drop()
        cold = timed(opened, most)
    files.heat()
    # A system takes memory away that was idle; the second epoch counts.
    timed(opened, most)
    hot = [timed(opened, most)]
    while sum(part.seconds for part in hot) < job["seconds"] / 2:
        hot.append(timed(opened, most))
    opened.close()
    return {
        "first_batch_seconds": first,
        "cold": {
            "images_per_s": cold.rows / cold.seconds,
            "batches": cold.batches,
            "whole_epoch": cold.whole,
            "pages_found_in_cache": pages,
            "pages": files.pages(),
        },
        "hot": {
            "images_per_s": sum(part.rows for part in hot) / sum(part.seconds for part in hot),
            "batches": sum(part.batches for part in hot),
            "whole_epochs": all(part.whole for part in hot),
        },
    }


def memory_copy(job: dict[str, Any]) -> dict[str, Any]:
    """The ceiling, images a second, on each number of threads."""
    from h5pack.measure.memory_copy import MemoryCopy

    copying = MemoryCopy(job["rows"], job["row_bytes"], min(job["batch"], job["rows"]))
    found = {}
    for threads in job["threads"]:
        copying(threads, 0)
        speeds: list[float] = []
        begin = time.perf_counter()
        while time.perf_counter() - begin < job["seconds"] / 2 or not speeds:
            speeds.append(copying(threads, len(speeds) + 1))
        found[str(threads)] = statistics.median(speeds)
    return {"images_per_s": found}


_TASKS: dict[str, Callable[[Way, dict[str, Any]], dict[str, Any]]] = {
    "convert": convert,
    "try": attempt,
    "check": check,
    "read": read,
}


def versions() -> dict[str, Any]:
    """Python, and every package that is installed beside it."""
    found = {item.metadata["Name"].lower(): item.version for item in distributions()}
    return {"python": platform.python_version(), "packages": dict(sorted(found.items()))}


def _reading(job: dict[str, Any]) -> Reading:
    return Reading(job["batch"], job["workers"], job["seed"])


def report_of(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job; a peer that is not there is reported as missing."""
    if job["task"] == "copy":
        return memory_copy(job)
    if job["task"] == "versions":
        return versions()
    (listed,) = chosen(job["way"])
    if job["task"] != "convert":
        # Before the clock and the memory start: every user of a loader has it.
        import torch

        torch.set_num_threads(1)
    baseline = private_bytes([os.getpid()])
    begin = time.perf_counter()
    try:
        way = listed.load()
    except (ImportError, OSError) as error:
        return {"missing": f"{type(error).__name__}: {error}".splitlines()[0]}
    imported = time.perf_counter() - begin
    about = {
        "settings": way.settings,
        "packages": list(way.packages),
        "tried": way.tried,
        "parallel": way.describe(job["workers"]),
    }
    return {**about, "import_seconds": imported, "baseline": baseline, **_TASKS[job["task"]](way, job)}


def main() -> None:
    """Do the job, write the report."""
    job = json.loads(Path(sys.argv[1]).read_text())
    try:
        report = report_of(job)
    except Exception as error:
        traceback.print_exc()
        report = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
