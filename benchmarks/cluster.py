"""How does a conversion on a Dask cluster compare with one on one machine, and how far does it scale?

Run ``python -m benchmarks.cluster``; it makes its own images. Each repeat converts them, in turn, with worker processes
here and with Dask workers here that were started as commands, and compares the files. Then it measures what a task of
usual size costs the coordinator (the process that converts) and the scheduler, in CPU time, with tasks that do nothing,
and how much memory the coordinator needs for each image. Two things follow from these figures, not from a cluster:

- a simulation of 1 to 64 machines: workers that take the measured time for an image, one scheduler and one coordinator
  that take the measured time for a task. Storage is not simulated: it is assumed to be as fast as all workers together;
- tasks, messages, bytes and memory for 100 million images.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import about, benchmark_parser, scratch_folder, spread, write_result
from h5pack.benchmark.ceilings import interleaved
from h5pack.benchmark.synthetic import make_folder
from h5pack.cluster.dask_client import open_dask_executor
from h5pack.images.decode import PixelOptions
from h5pack.pack import survey as surveys
from h5pack.pack.journal import RowRecord, RowResults
from h5pack.pack.options import ConvertOptions
from h5pack.pack.plan import make_plan
from h5pack.pack.writer import TASK_BYTES, Images, RowGroup, WriteJob, WriteTask
from h5pack.sources.catalog import Catalog, NameTable, one_split
from h5pack.sources.reader import FileReader
from h5pack.system.processes import run

HEIGHT, WIDTH = 218, 178
WORKERS = (1, 2)
MACHINES, CORES = (1, 2, 4, 8, 16, 32, 64), 16
PAPER_IMAGES = 100_000_000
# Of Dask's protocol: update-graph, compute-task, task-finished, key-in-memory, gather and get-data with their replies,
# client-releases-keys, free-keys.
MESSAGES_PER_TASK = 10
_ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def dask_cluster(scratch: Path, workers: int) -> Iterator[tuple[Any, int]]:
    """A client of a scheduler with workers, all of them commands, and the scheduler's process id."""
    import distributed

    file = scratch / f"scheduler-{workers}.json"
    common = ["--scheduler-file", str(file), "--dashboard-address", "127.0.0.1:0"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "DASK_TEMPORARY_DIRECTORY": str(scratch)}
    processes: list[subprocess.Popen[bytes]] = []

    def start(kind: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *common, *arguments]
        settings = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        processes.append(subprocess.Popen(command, env=environment, cwd=scratch, **settings))  # type: ignore[call-overload]

    try:
        start("scheduler", "--port", "0", "--host", "127.0.0.1")
        while not file.exists():
            time.sleep(0.05)
        start("worker", "--nworkers", str(workers), "--nthreads", "1")
        with distributed.Client(scheduler_file=str(file)) as client:
            client.wait_for_workers(workers)
            yield client, processes[0].pid
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.unlink(missing_ok=True)


def convert(folder: Path, out: Path, *options: str) -> dict[str, Any]:
    """The report of a conversion in a process of its own."""
    command = [sys.executable, "-m", "h5pack", "convert", str(folder), str(out), "--overwrite", "--io", "buffered"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run([*command, "--json", *options], env=environment, check=True, stdout=subprocess.PIPE)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def measure_conversions(folder: Path, scratch: Path, repeats: int) -> dict[str, Any]:
    """Images/s of whole conversions, without starting processes, and whether the files are equal."""
    files = set()
    with contextlib.ExitStack() as stack:
        cases = {f"local, {number} workers": ("--workers", str(number)) for number in WORKERS}
        for number in WORKERS:
            client, _ = stack.enter_context(dask_cluster(scratch, number))
            cases[f"Dask, {number} workers"] = ("--cluster", client.scheduler.address)
        speeds: dict[str, list[float]] = {name: [] for name in cases}
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for name in interleaved(list(cases), repeats):
            report = convert(folder, scratch / "o.h5", *cases[name])
            files.add(digest(scratch / "o.h5"))
            speeds[name].append(report["images"] / sum(report["seconds"].values()))
            seconds[name].append(report["seconds"]["write"] / report["images"] * report["num_workers"])
    (scratch / "o.h5").unlink()
    return {
        "images_per_s": {name: spread(found) for name, found in speeds.items()},
        "worker_us_per_image": {name: spread([1e6 * one for one in found]) for name, found in seconds.items()},
        "identical": len(files) == 1,
    }


def make_task(number: int, rows: int) -> WriteTask:
    """A task like those of a conversion of many images with paths of usual length."""
    pixels = PixelOptions(HEIGHT, WIDTH)
    first = number * rows
    indices = np.arange(first, first + rows)
    names = [f"train/n{index % 1000:08d}/n{index % 1000:08d}_{index:09d}.JPEG" for index in indices.tolist()]
    groups = []
    for start in range(0, rows, 32):
        some, part = indices[start : start + 32], names[start : start + 32]
        offsets = some * (HEIGHT * WIDTH * 3)
        images = Images(some.tolist(), part, [1] * len(part), [])
        groups.append(RowGroup(some, offsets, images, set(), [], [], []))
    job = WriteJob("/data/out.h5.partial", "/data/out.h5.partial.journal", pixels, "auto", 1, durable=True)
    return WriteTask(job, groups)


def write_nothing(task: WriteTask) -> list[RowRecord]:
    """The results of writing a task's rows."""
    return [
        RowRecord(
            group.rows, np.ones(len(group.rows), np.bool_), np.zeros(len(group.rows), np.uint32),
            np.zeros(0, np.int64), np.zeros((0, 2, 3), np.uint64),
        )
        for group in task.groups
    ]  # fmt: skip


def measure_tasks(scratch: Path, tasks: int) -> dict[str, Any]:
    """CPU time of the coordinator and of the scheduler, and bytes, for each task."""
    import psutil

    # Workers import the function from here, where this module is the main program, too.
    from benchmarks.cluster import write_nothing

    rows = TASK_BYTES // (HEIGHT * WIDTH * 3)
    results = RowResults(tasks * rows, 3)

    def used() -> tuple[float, float, float]:
        return sum(psutil.Process(scheduler).cpu_times()[:2]), time.process_time(), time.perf_counter()

    with (
        dask_cluster(scratch, 2) as (client, scheduler),
        open_dask_executor(client, None, None, scratch / "o.h5.partial") as executor,
    ):
        # What happens once, such as imports.
        list(run(executor, write_nothing, (make_task(number, rows) for number in range(4)), 4))
        before = used()
        for records in run(executor, write_nothing, (make_task(n, rows) for n in range(tasks)), 4):
            for record in records:
                results.add(record)
        after = used()
    assert results.settled.all()
    task = make_task(0, rows)
    scheduled, coordinated, elapsed = ((end - begin) / tasks for begin, end in zip(before, after, strict=True))
    return {
        "tasks": tasks,
        "rows_per_task": rows,
        "scheduler_ms": round(1e3 * scheduled, 3),
        "coordinator_ms": round(1e3 * coordinated, 3),
        "elapsed_ms": round(1e3 * elapsed, 3),
        "task_bytes": len(pickle.dumps((write_nothing, task))),
        "result_bytes": len(pickle.dumps(write_nothing(task))),
        "journal_bytes": sum(12 + len(record.encode()) for record in write_nothing(task)),
    }


def measure_memory(images: int) -> dict[str, Any]:
    """Bytes of the coordinator's memory for each image: catalog, survey, plan and results of rows."""
    tracemalloc.start()
    names = NameTable.of(f"train/n{index % 1000:08d}/n{index % 1000:08d}_{index:09d}.JPEG" for index in range(images))
    split_names, split_ids = one_split(images)
    labels = np.arange(images) % 1000
    classes = tuple(map(str, range(1000)))
    catalog = Catalog("classes", FileReader("/data"), names, split_names, split_ids, labels, classes)
    survey = surveys.Survey(
        np.full(images, HEIGHT, np.int32), np.full(images, WIDTH, np.int32), np.ones(images, np.uint8),
        np.zeros(images, np.uint64), {}, kept_bytes=np.zeros(images, np.int64), orientations=np.ones(images, np.uint8),
    )  # fmt: skip
    plan = make_plan("/data", catalog, survey, ConvertOptions())
    results = RowResults(plan.rows, 3)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    # The table of names in the order of rows, when all rows are written, takes most.
    plan.catalog.names.take(plan.row_order.origins)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(results.packed) == images
    return {
        "images": images,
        "bytes_per_image": round(kept / images, 1),
        "peak_bytes_per_image": round(peak / images, 1),
    }


def simulate(
    workers: int, task_seconds: float, scheduler_seconds: float, coordinator_seconds: float, tasks: int
) -> dict[str, float]:
    """Tasks/s of workers that a scheduler and a coordinator serve one task at a time, and how busy these two are.

    As in a conversion, 2 tasks a worker are in flight, and 8 more. A worker takes 80 to 120% of `task_seconds`.
    """
    draws = random.Random(0)
    free = [0.0] * workers
    scheduler = coordinator = 0.0
    in_flight: list[float] = []  # when results reach the coordinator
    finished, submitted = 0, 0
    while finished < tasks:
        arrived = heapq.heappop(in_flight) if len(in_flight) >= 2 * workers + 8 or submitted == tasks else 0.0
        finished += arrived > 0
        # Half of the coordinator's time for a task is before it, half after it; the scheduler's likewise.
        coordinator = max(coordinator, arrived) + coordinator_seconds
        if submitted < tasks:
            scheduler = max(scheduler, coordinator) + scheduler_seconds
            begin = max(scheduler, heapq.heappop(free))
            end = begin + task_seconds * draws.uniform(0.8, 1.2)
            heapq.heappush(free, end)
            heapq.heappush(in_flight, end)
            submitted += 1
    seconds = max(coordinator, *free)
    return {
        "tasks_per_s": tasks / seconds,
        "scheduler_busy": tasks * scheduler_seconds / seconds,
        "coordinator_busy": tasks * coordinator_seconds / seconds,
    }


def scale(image_seconds: float, task: dict[str, Any], tasks_per_worker: int) -> list[dict[str, Any]]:
    """The simulation for each number of machines."""
    rows, found = task["rows_per_task"], []
    for machines in MACHINES:
        workers = machines * CORES
        result = simulate(
            workers, rows * image_seconds, task["scheduler_ms"] / 1e3, task["coordinator_ms"] / 1e3,
            tasks_per_worker * workers,
        )  # fmt: skip
        speed = result["tasks_per_s"] * rows
        found.append(
            {
                "machines": machines,
                "workers": workers,
                "images_per_s": round(speed),
                "of_ideal": round(speed * image_seconds / workers, 3),
                "scheduler_busy": round(result["scheduler_busy"], 3),
                "coordinator_busy": round(result["coordinator_busy"], 3),
            }
        )
    return found


def on_paper(task: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    """What a conversion of 100 million images asks of the coordinator and the scheduler."""
    writes = -(-PAPER_IMAGES // task["rows_per_task"])
    tasks = writes + surveys._MAX_TASKS
    return {
        "images": PAPER_IMAGES,
        "write_tasks": writes,
        "survey_tasks": surveys._MAX_TASKS,
        "messages": MESSAGES_PER_TASK * tasks,
        "gigabytes_sent": round(writes * (task["task_bytes"] + task["result_bytes"]) / 1e9, 1),
        "journal_gigabytes": round(writes * task["journal_bytes"] / 1e9, 2),
        "coordinator_cpu_hours": round(tasks * task["coordinator_ms"] / 3.6e6, 2),
        "scheduler_cpu_hours": round(tasks * task["scheduler_ms"] / 3.6e6, 2),
        "coordinator_gigabytes": round(PAPER_IMAGES * memory["bytes_per_image"] / 1e9, 1),
        "coordinator_peak_gigabytes": round(PAPER_IMAGES * memory["peak_bytes_per_image"] / 1e9, 1),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = benchmark_parser("cluster", __doc__)
    parser.add_argument("--count", type=int, default=4_000, help="images to make, 218x178")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=500, help="tasks whose cost is measured")
    parser.add_argument("--rows", type=int, default=1_000_000, help="images whose memory is measured")
    parser.add_argument("--simulated", type=int, default=40, help="simulated tasks for each worker")
    arguments = parser.parse_args(argv)
    with scratch_folder(arguments.scratch) as scratch:
        make_folder(scratch / "images", arguments.count, workers=2)
        found = measure_conversions(scratch / "images", scratch, arguments.repeats)
        task, memory = measure_tasks(scratch, arguments.tasks), measure_memory(arguments.rows)
        image_seconds = found["worker_us_per_image"]["local, 1 workers"]["median"] / 1e6
        result = {
            **about("cluster", arguments, "count repeats", scratch, " --scratch /dev/shm"),
            "images": arguments.count,
            **found,
            "task": task,
            "memory": memory,
            "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
            "simulation": scale(image_seconds, task, arguments.simulated),
            "paper": on_paper(task, memory),
        }
    write_result(arguments.json, result)
    return result


if __name__ == "__main__":
    main()
