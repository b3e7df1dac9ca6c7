"""What the peers' comparison runs in a process of its own: ``python -m benchmarks.peer_worker JOB.json REPORT.json``.

A job names a case and what to do with it: convert, try, check or read; or it asks for the memory copy. What it found
goes into the report; a peer that is missing is a report, too. Below are the check that an epoch gives every image once,
the files of a case in the page cache, and the private memory of a session of processes.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peer_cases.base import Case, ImageFolder, Opened, Reading, chosen, decode
from h5pack.benchmark.ceilings import touch
from h5pack.system.files import cached_pages, make_hot
from h5pack.system.libc import libc_function

_LABELS = 256


def as_array(values: Any) -> npt.NDArray[Any]:
    """An array over the memory of an array or a tensor."""
    array: npt.NDArray[Any] = values.numpy() if hasattr(values, "numpy") else np.asarray(values)
    return array


def marks(images: npt.NDArray[np.uint8], labels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """One number for each image: the sum of its pixels, times 256, plus its label.

    It is the same for channels first and last. Labels are below 256.
    """
    sums = images.reshape(len(images), -1).sum(axis=1, dtype=np.int64)
    found: npt.NDArray[np.int64] = sums * _LABELS + labels.astype(np.int64)
    return found


def truth(source: ImageFolder, workers: int) -> npt.NDArray[np.int64]:
    """The marks of a folder's images, decoded by Pillow, int64 (N,) in the folder's order."""
    with ProcessPoolExecutor(workers) as pool:
        sums = list(pool.map(_pixel_sum, source.paths, chunksize=64))
    return np.array(sums, np.int64) * _LABELS + source.labels


def checksum(found: npt.NDArray[np.int64]) -> int:
    """The sum of all pixels, whatever the order of the images."""
    return int((found // _LABELS).sum())


def fault(found: npt.NDArray[np.int64], expected: npt.NDArray[np.int64]) -> str | None:
    """What is wrong with an epoch's marks, in any order; None if every image came exactly once."""
    wanted, got = Counter(expected.tolist()), Counter(found.tolist())
    if wanted == got:
        return None
    return (
        f"{len(found):,} images came for {len(expected):,}: {(wanted - got).total():,} of them are missing, and "
        f"{(got - wanted).total():,} came twice or are none of them"
    )


def _pixel_sum(path: Path) -> int:
    return int(decode(path).sum(dtype=np.int64))


_MADV_DONTNEED = 4
_TRIES = 4


class PeerFiles:
    """All files in a folder that hold something, following links."""

    def __init__(self, folder: Path) -> None:
        found = (Path(root) / name for root, _, names in os.walk(folder, followlinks=True) for name in names)
        self.paths = [path for path in found if path.stat().st_size]

    def disk_bytes(self) -> int:
        """What they take on the disk, in whole blocks."""
        return sum(path.stat().st_blocks * 512 for path in self.paths)

    def flush(self) -> None:
        """Have them on the disk."""
        for path in self.paths:
            self._with_descriptor(path, os.fsync)

    def drop(self) -> int:
        """Have the system forget their pages; returns how many are there still, by mincore (0: all are cold).

        Files must have been flushed: dirty pages stay. Pages that a process maps stay, too; see `unmap`.
        """
        left = 0
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(0.1)
            for path in self.paths:
                self._with_descriptor(path, lambda file: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED))
            left = sum(cached_pages(path) for path in self.paths)
            if not left:
                break
        return left

    def heat(self) -> None:
        """Have all their pages in the page cache."""
        for path in self.paths:
            make_hot(path)

    def unmap(self) -> None:
        """Take their pages out of this process's read-only maps, so that they can be dropped; the next access faults.

        The maps stay valid. FFCV, for one, never closes its map.
        """
        names = {str(path.resolve()) for path in self.paths}
        madvise = libc_function("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        assert madvise is not None
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] in names and "w" not in fields[1]:
                start, stop = (int(address, 16) for address in fields[0].split("-"))
                madvise(start, stop - start, _MADV_DONTNEED)

    def pages(self) -> int:
        """How many pages they fill."""
        return sum(-(-path.stat().st_size // mmap.PAGESIZE) for path in self.paths)

    @staticmethod
    def _with_descriptor(path: Path, act: object) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            act(descriptor)  # type: ignore[operator]
        finally:
            os.close(descriptor)


_INTERVAL_SECONDS = 0.02


def private_bytes(pids: Iterable[int]) -> int:
    """Anonymous and shared memory of processes, each page counted once between them.

    It is ``Pss_Anon`` and ``Pss_Shmem`` of ``/proc/PID/smaps_rollup``. Pages of mapped files are left out: they are the
    page cache's, and are dropped when another process needs the memory. ``Rss`` would count them, and shared batches
    once for each process.
    """
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # It ended meanwhile.
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) * 1024
    return total


def session(leader: int) -> list[int]:
    """The processes of a session, even if their parent has exited."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader:
                found.append(int(name))
    return found


class MemoryWatch:
    """Watches the private memory of the session of process `leader` in a thread; `peak` is its maximum in bytes."""

    def __init__(self, leader: int) -> None:
        self.leader, self.peak = leader, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            self.peak = max(self.peak, private_bytes(session(self.leader)))


_CHECKED_EPOCHS = 2
_MAX_CHECK_SECONDS = 20
_MIN_BATCHES = 8


@dataclass(frozen=True)
class Timed:
    """An epoch, or its beginning."""

    rows: int
    batches: int
    seconds: float  # Until the last batch was consumed.
    first_seconds: float  # Until the first batch was consumed.
    whole: bool  # It was not cut short.


def timed(opened: Opened, max_seconds: float | None = None, begin: float | None = None) -> Timed:
    """Go through an epoch, looking at every page of each batch. The clock was started at `begin` (default: now).

    Leave it after `max_seconds`, though not before 8 batches: workers hold some that are not counted.
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
        if max_seconds is not None and seconds > max_seconds and batches >= _MIN_BATCHES:
            whole = False
            break
    end = time.perf_counter()
    iterator.close()
    return Timed(rows, batches, end - begin, first, whole)


def convert(case: Case, job: dict[str, Any]) -> dict[str, Any]:
    """Convert, and have the result on the disk."""
    out = Path(job["out"])
    out.mkdir(parents=True)
    source = ImageFolder(Path(job["folder"]))
    begin = time.perf_counter()
    workers = case.convert(source, out, job["workers"])
    own = time.perf_counter() - begin
    PeerFiles(out).flush()
    flushed = time.perf_counter() - begin
    return {"seconds": flushed, "seconds_before_fsync": own, "workers": workers}


def attempt(case: Case, job: dict[str, Any]) -> dict[str, Any]:
    """How fast one number of workers is, in the second epoch."""
    PeerFiles(Path(job["out"])).heat()
    opened = case.open(Path(job["out"]), _reading(job))
    max_seconds = job["seconds"] if case.may_be_cut else None
    timed(opened, max_seconds)
    found = timed(opened, max_seconds)
    opened.close()
    return {"images_per_s": found.rows / found.seconds}


def check(case: Case, job: dict[str, Any]) -> dict[str, Any]:
    """Whether each epoch gives every image once, with its label, in an order of its own."""
    expected = np.load(job["truth"])
    opened = case.open(Path(job["out"]), _reading(job))
    orders, faults = [], []
    begin = time.perf_counter()
    for epoch in range(_CHECKED_EPOCHS):
        # A case this slow keeps nothing from one epoch to the next that could go wrong.
        if time.perf_counter() - begin > _MAX_CHECK_SECONDS:
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


def read(case: Case, job: dict[str, Any]) -> dict[str, Any]:
    """A first epoch of cold files, from the opening on, then hot epochs."""
    out, pages = Path(job["out"]), job["pages_found_in_cache"]
    max_seconds = job["seconds"] if case.may_be_cut else None
    files = PeerFiles(out)
    begin = time.perf_counter()
    opened = case.open(out, _reading(job))
    cold = timed(opened, max_seconds, begin)
    first = cold.first_seconds
    if case.compiles:
        files.unmap()
        pages = files.drop()
        cold = timed(opened, max_seconds)
    files.heat()
    # A system takes memory away that was idle; the second epoch counts.
    timed(opened, max_seconds)
    hot = [timed(opened, max_seconds)]
    while sum(part.seconds for part in hot) < job["seconds"] / 2:
        hot.append(timed(opened, max_seconds))
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
    from h5pack.benchmark.ceilings import MemoryCopy

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


_TASKS: dict[str, Callable[[Case, dict[str, Any]], dict[str, Any]]] = {
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
    (listed,) = chosen(job["case"])
    if job["task"] != "convert":
        # Before the clock and the memory start: every user of a loader has it.
        import torch

        torch.set_num_threads(1)
    baseline = private_bytes([os.getpid()])
    begin = time.perf_counter()
    try:
        case = listed.load()
    except (ImportError, OSError) as error:
        return {"missing": f"{type(error).__name__}: {error}".splitlines()[0]}
    imported = time.perf_counter() - begin
    about = {
        "settings": case.settings,
        "packages": list(case.packages),
        "tried": case.tried,
        "parallel": case.describe(job["workers"]),
    }
    return {**about, "import_seconds": imported, "baseline": baseline, **_TASKS[job["task"]](case, job)}


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
