"""How fast are rows read, beside the same rows copied at random places in memory?

Run ``python -m benchmarks.read``; it makes its own files. Every case reads shuffled batches, and the consumer touches
every page of each. The cases take turns, so a drift of the machine's speed affects all equally; a ratio is taken within
each turn.

- the ceiling: ``np.take`` of random rows out of memory into batches that are used again, on 1 and 2 threads;
- H5Loader: as it comes, through h5py, and on chunks made by other tools (see below);
- np.memmap: fancy indexing in this process, and a DataLoader with 2 workers;
- h5py: the usual dataset that reads one index, in a DataLoader with 2 workers; on a pack, on the well-known recipe's
  chunks, which cut images, and on the chunks that h5py guesses;
- H5Dataset in a DataLoader with 2 workers, collated by torch and by the dataset.

Systems reclaim memory that is idle for a while, a file's pages as well as a process's. So before each run all files are
read again unless all of their pages are in the page cache, and a case within this process runs twice, of which the
second run counts. Cold runs drop the file from the page cache first, and check that.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import h5pack
from benchmarks.common import (
    WORKERS,
    OneIndex,
    Reader,
    RowSource,
    about,
    benchmark_parser,
    consume,
    data_loader,
    loader_cases,
    make_flat,
    make_foreign,
    make_pack,
    ratios,
    reader,
    repeat_in_turns,
    scratch_folder,
    spread,
    subset_of,
    write_result,
)
from benchmarks.tables import cold_table, hot_table
from h5pack.benchmark.ceilings import MemoryCopy, interleaved, sequential, touch
from h5pack.system.files import drop_cache


class Mapped(Dataset[Any]):
    """Rows of a flat file by np.memmap."""

    def __init__(self, path: Path, rows: int, size: int) -> None:
        self.path, self.rows, self.size, self.map = path, rows, size, None

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        if self.map is None:
            self.map = np.memmap(self.path, np.uint8, "r", shape=(self.rows, self.size))
        return torch.from_numpy(np.array(self.map[index])), index % 10


def fancy(path: Path, rows: int, size: int, batch: int, turn: int) -> float:
    """Rows a second of fancy indexing a map, in this process; each batch is new memory."""
    mapped = np.memmap(path, np.uint8, "r", shape=(rows, size))
    order = np.random.default_rng(turn).permutation(rows)
    return consume(
        torch.from_numpy(mapped[order[start : start + batch]]) for start in range(0, rows - batch + 1, batch)
    )


def worker_cases(pack: Path, flat: Path, source: RowSource, foreign: dict[str, Path], batch: int) -> dict[str, Reader]:
    """What is read by a DataLoader's workers; the slow ones only a part of an epoch."""
    rows, size = source.rows, source.size
    dataset = h5pack.H5Dataset(pack)
    sampler = h5pack.ChunkBatchSampler(dataset, batch, drop_last=True)
    loaders: dict[str, DataLoader[Any]] = {
        "np.memmap, DataLoader": data_loader(subset_of(Mapped(flat, rows, size), rows, 20_000), batch),
        "one index by h5py, DataLoader": data_loader(subset_of(OneIndex(pack, rows), rows, 20_000), batch),
        "H5Dataset, DataLoader": data_loader(dataset, batch, batch_sampler=sampler),
        "H5Dataset with collate, DataLoader": data_loader(
            dataset, batch, batch_sampler=sampler, collate_fn=dataset.collate
        ),
    }
    for label, path in foreign.items():
        with h5py.File(path) as file:
            count = len(file["images"])
        small = min(batch, 32)
        slow = subset_of(OneIndex(path, count), count, 8 * small)
        loaders[f"one index by h5py, {label}, DataLoader"] = data_loader(slow, small)
    return {f"{label} | {WORKERS}": reader(loader) for label, loader in loaders.items()}


def hot(source: RowSource, scratch: Path, pack: Path, batches: tuple[int, int], repeats: int) -> list[dict[str, Any]]:
    """All cases with the file in the page cache; the first batch size is the one that everything is measured with."""
    flat = make_flat(pack, scratch / "flat.bin")
    few = min(source.rows, 2_000)
    foreign = {}
    if source.height > 100:
        foreign["chunks of the recipe"] = make_foreign(source, scratch / "recipe.h5", (min(100, few), 3, 217, 178), few)
    foreign["guessed chunks"] = make_foreign(source, scratch / "guessed.h5", True, few)
    found = []
    for batch in batches:
        copying = MemoryCopy(source.rows, source.size, batch)
        cases: dict[str, Reader] = {f"memory copy | {threads}": partial(copying, threads) for threads in (1, 2)}
        cases |= loader_cases(pack, batch, drop_last=True)
        if batch == batches[0]:
            for label, path in foreign.items():
                loader = h5pack.H5Loader(h5pack.H5Dataset(path), batch, num_threads=2)
                cases[f"H5Loader, {label} | 2"] = reader(loader)
            cases["np.memmap, fancy index | 1"] = partial(fancy, flat, source.rows, source.size, batch)
            cases |= worker_cases(pack, flat, source, foreign, batch)
        files = [pack, flat, *foreign.values()]
        speeds = repeat_in_turns(cases, repeats, files, lambda case: not case.endswith(f"DataLoader | {WORKERS}"))
        found += [_described(case, batch, speeds) for case in cases]
        del copying, cases
    for path in (flat, *foreign.values()):
        path.unlink()
    return found


def _described(case: str, batch: int, speeds: dict[str, list[float]]) -> dict[str, Any]:
    label, _, threads = case.partition(" | ")
    ceiling = speeds[f"memory copy | {threads}"]
    return {
        "case": label,
        "threads": int(threads),
        "batch": batch,
        "images_per_s": spread(speeds[case]),
        "of_memory_copy": ratios(speeds[case], ceiling),
    }


def cold_loader(path: Path, batch: int, size: int, threads: int) -> tuple[float, float]:
    """Bytes a second of a first epoch, with a new dataset and loader; and the read amplification."""
    begin = time.perf_counter()
    dataset = h5pack.H5Dataset(path)
    loader = h5pack.H5Loader(dataset, batch, num_threads=threads)
    rows = 0
    for batch_ in loader:
        touch(batch_[0].numpy())
        rows += len(batch_[0])
    seconds = time.perf_counter() - begin
    loader.close()
    return rows * size / seconds, dataset.stats().amplification


def cold(source: RowSource, pack: Path, batch: int, repeats: int) -> dict[str, Any]:
    """First epochs from the disk, beside sequential reads of the same file; thrice as often as asked.

    One cold read of one file took between 0.7 and 1.5 times the median of many.
    """
    amplification: list[float] = []

    def load(threads: int) -> float:
        speed, amplified = cold_loader(pack, batch, source.size, threads)
        amplification.append(amplified)
        return speed

    cases: dict[str, Callable[[], float]] = {
        "sequential read": partial(sequential, pack),
        "sequential read past the page cache": partial(sequential, pack, os.O_DIRECT),
        "H5Loader | 1": partial(load, 1),
        "H5Loader | 2": partial(load, 2),
    }
    speeds: dict[str, list[float]] = {case: [] for case in cases}
    cached = 0
    for case in interleaved(list(cases), 3 * repeats):
        cached += drop_cache(pack)
        speeds[case].append(cases[case]() / 1e6)
    sequential_speeds = speeds["sequential read"]
    return {
        "pages_found_in_cache": cached,
        "amplification": spread(amplification),
        "cases": [
            {
                "case": case,
                "mb_per_s": spread(found),
                "of_sequential": ratios(found, sequential_speeds),
            }
            for case, found in speeds.items()
        ],
    }


def epoch_counts(pack: Path, batch: int) -> dict[str, Any]:
    """What one epoch reads: chunks visited, amplification."""
    dataset = h5pack.H5Dataset(pack)
    for _ in h5pack.H5Loader(dataset, batch):
        pass
    stats = dataset.stats()
    index = dataset.engine.indexes["images"]
    return {
        "rows": stats.rows,
        "chunks": len(index.addresses),
        "chunk_misses": stats.chunk_misses,
        "amplification": round(stats.amplification, 6),
    }


def measure(source: RowSource, scratch: Path, batches: tuple[int, int], repeats: int) -> dict[str, Any]:
    """Everything about rows of one size."""
    pack = make_pack(source, scratch / "pack.h5")
    result = {
        "rows": source.rows,
        "row_bytes": source.size,
        "cold": cold(source, pack, batches[0], repeats),
        "hot": hot(source, scratch, pack, batches, repeats),
        "epoch": epoch_counts(pack, batches[0]),
    }
    pack.unlink()
    return result


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = benchmark_parser("read", __doc__)
    parser.add_argument("--large", type=int, default=20_000, help="rows of 116 KB (218x178)")
    parser.add_argument("--small", type=int, default=200_000, help="rows of 3 KB (32x32)")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    torch.set_num_threads(1)
    with scratch_folder(arguments.scratch) as scratch:
        sizes = {
            "116 KB": (RowSource(arguments.large, 218, 178), (256, 512)),
            "3 KB": (RowSource(arguments.small, 32, 32), (512, 256)),
        }
        # With few rows, as in a test, an epoch still has two batches.
        sizes = {
            name: (source, (min(one, source.rows // 2), min(other, source.rows // 3)))
            for name, (source, (one, other)) in sizes.items()
        }
        result = {
            **about("read", arguments, "large small repeats", scratch),
            "sizes": {
                name: measure(source, scratch, batches, arguments.repeats) for name, (source, batches) in sizes.items()
            },
        }
    write_result(arguments.json, result)
    print(hot_table(result), cold_table(result), sep="\n\n")
    return result


if __name__ == "__main__":
    main()
