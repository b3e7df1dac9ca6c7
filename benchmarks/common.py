"""What the benchmarks share: options, files of random rows, usual datasets, interleaved timing, and results."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import h5pack
from h5pack.benchmark.ceilings import interleaved, touch
from h5pack.benchmark.sweep import through_library
from h5pack.system.files import make_hot
from h5pack.system.machine import machine_facts

RESULTS = Path(__file__).parent / "results"
WORKERS = 2
_BLOCK = 64

Reader = Callable[[int], float]
"""Reads once; takes the number of the repeat, returns rows a second."""


def consume(batches: Iterable[Any]) -> float:
    """Iterate over batches, touch all pages of their images, and return rows/s."""
    begin, rows = time.perf_counter(), 0
    for batch in batches:
        images = batch[0] if isinstance(batch, (list, tuple)) else batch
        touch(images.numpy())
        rows += len(images)
    return rows / (time.perf_counter() - begin)


def reader(batches: Iterable[Any]) -> Reader:
    """A reader of all batches, warmed up by an epoch."""
    consume(batches)
    return lambda repeat: consume(batches)


def loader_cases(path: Path, batch: int, *, decodes_again: bool = False, **settings: Any) -> dict[str, Reader]:
    """H5Loader's cases of reading a file; with `decodes_again`, no decoded chunks are kept for the next epoch."""
    cases = {}
    for label, dataset in (
        ("H5Loader", h5pack.H5Dataset(path)),
        ("H5Loader through h5py", through_library(h5pack.H5Dataset(path))),
    ):
        if decodes_again:
            dataset.engine.chunks.cache.capacity = 0
        for threads in (1, 2):
            loader = h5pack.H5Loader(dataset, batch, num_threads=threads, **settings)
            cases[f"{label} | {threads}"] = reader(loader)
    return cases


def benchmark_parser(name: str, doc: str) -> argparse.ArgumentParser:
    """A parser of a benchmark's options, with those that all have; `doc` describes the benchmark."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, help="a folder for the files (default: a temporary one)")
    result = "the result (default: in benchmarks/results)"
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json", help=result)
    return parser


def about(name: str, arguments: argparse.Namespace, options: str, scratch: Path, first: str = "") -> dict[str, Any]:
    """The first entries of a result: the benchmark, its command with the named options, and the machine.

    `first` are further arguments of the command, such as " FOLDER".
    """
    given = (f" --{option} {getattr(arguments, option.replace('-', '_'))}" for option in options.split())
    command = f"python -m benchmarks.{name}{first}{''.join(given)}"
    return {"benchmark": name, "command": command, "machine": machine_facts(scratch)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum of the values, rounded to 4 decimals, and the number of values."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {**{name: round(value, 4) for name, value in found.items()}, "repeats": len(values)}


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result, and print where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


@contextmanager
def scratch_folder(parent: Path | None) -> Iterator[Path]:
    """A temporary folder, removed in the end."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="h5pack-bench-", dir=parent)).absolute()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def repeat_in_turns(
    readers: Mapping[str, Reader], repeats: int, files: Sequence[Path], run_twice: Callable[[str], bool] | None = None
) -> dict[str, list[float]]:
    """Speeds of all readers in interleaved repeats, with the files in the page cache.

    The system reclaims memory that was idle for a while, so readers that `run_twice` names count the second time.
    """
    speeds: dict[str, list[float]] = {name: [] for name in readers}
    for name in interleaved(list(readers), repeats):
        for path in files:
            make_hot(path)
        repeat = len(speeds[name])
        if run_twice is not None and run_twice(name):
            readers[name](repeat)
        speeds[name].append(readers[name](repeat))
    return speeds


def ratios(speeds: Sequence[float], ceilings: Sequence[float]) -> dict[str, float]:
    """Spread of the ratios within each repeat."""
    return spread([speed / ceiling for speed, ceiling in zip(speeds, ceilings, strict=True)])


@dataclass(frozen=True)
class RowSource:
    """A map-style dataset of images that differ, and cost nothing to make."""

    rows: int
    height: int
    width: int

    def image(self, row: int) -> npt.NDArray[np.uint8]:
        """Image number `row`, uint8 (H, W, 3)."""
        image = np.resize(np.random.default_rng(row % _BLOCK).integers(0, 256, 4096, np.uint8), self.size)
        image[:8] = np.frombuffer(np.int64(row).tobytes(), np.uint8)
        return image.reshape(self.height, self.width, 3)

    @property
    def size(self) -> int:
        """Bytes an image."""
        return self.height * self.width * 3

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[npt.NDArray[np.uint8], int]:
        if row >= self.rows:
            raise IndexError(row)
        return self.image(row), row % 10


def make_pack(source: RowSource, path: Path) -> Path:
    """A pack of all rows with the default chunks."""
    h5pack.convert(source, path, num_workers=1, overwrite=True)
    return path


def make_flat(pack: Path, path: Path) -> Path:
    """The rows of a pack as raw bytes, for np.memmap."""
    with h5py.File(pack) as file, path.open("wb") as flat:
        images = file["images"]
        for start in range(0, len(images), images.chunks[0]):
            flat.write(images[start : start + images.chunks[0]].tobytes())
    return path


def make_foreign(source: RowSource, path: Path, chunks: Any, rows: int) -> Path:
    """The first rows, channels first, with other chunks: True lets h5py guess."""
    with h5py.File(path, "w") as file:
        shape = (rows, 3, source.height, source.width)
        images = file.create_dataset("images", shape, np.uint8, chunks=chunks)
        for block in itertools.count():
            numbers = range(block * 100, min(rows, block * 100 + 100))
            if not numbers:
                break
            images[numbers.start : numbers.stop] = np.stack([source.image(row).transpose(2, 0, 1) for row in numbers])
        file["labels"] = np.arange(rows) % 10
    return path


class OneIndex(Dataset[Any]):
    """What most people write: open the file on first use, read one index."""

    def __init__(self, path: Path, rows: int) -> None:
        self.path, self.rows, self.file = path, rows, None

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        return torch.from_numpy(self.file["images"][index]), int(self.file["labels"][index])


def data_loader(dataset: Dataset[Any], batch: int, **settings: Any) -> DataLoader[Any]:
    """A DataLoader with workers that stay."""
    if "batch_sampler" not in settings:
        settings |= {"batch_size": batch, "shuffle": True, "drop_last": True}
    return DataLoader(dataset, num_workers=WORKERS, persistent_workers=True, **settings)


def subset_of(dataset: Dataset[Any], rows: int, max_rows: int) -> Dataset[Any]:
    """At most `max_rows` random rows: workers that are left early would disturb the next reader."""
    if rows <= max_rows:
        return dataset
    return Subset(dataset, np.random.default_rng(0).choice(rows, max_rows, replace=False).tolist())
