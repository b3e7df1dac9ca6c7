"""Ten million rows, and a billion: what opening a large file and its first batches cost."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import h5pack
from tests.forking import output_of

ROWS, SHAPE, CHUNK_ROWS, BATCH = 10_000_000, (32, 32, 3), 1_365, 512
MEMORY = 400_000_000


def peak() -> int:
    """The largest memory of this process, without that of its parent, which ru_maxrss would have."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def read_batches(path: Path, shuffle: str) -> None:
    """Print the first batch of a loader, and what 21 batches cost."""
    before, start = peak(), time.process_time()
    dataset = h5pack.H5Dataset(path, with_rows=True)
    loader = h5pack.H5Loader(dataset, BATCH, shuffle=shuffle, memory_bytes=MEMORY)
    batches = iter(loader)
    images, labels, rows = next(batches)
    seconds = time.process_time() - start
    for _ in range(20):
        next(batches)
    batches.close()
    marks = images.view(BATCH, -1)[:, :8].contiguous().view(torch.int64)[:, 0]
    found = {"seconds": seconds, "peak": peak() - before, "bytes": loader.memory_bytes}
    print(json.dumps(found | {"rows": rows.tolist(), "marks": marks.tolist(), "labels": labels.tolist()}))


def draw_batches(*paths: Path) -> None:
    """Print the peaks of memory and the longest time of the first batches of samplers."""
    before, slowest, peaks = peak(), 0.0, []
    for path in paths:
        for shuffle, streams in itertools.product(("window", "full", "chunk", False), (1, 8)):
            start = time.process_time()
            dataset = h5pack.H5Dataset(path)
            batch = next(iter(h5pack.ChunkBatchSampler(dataset, 256, shuffle=shuffle, streams=streams)))
            rows = list(itertools.islice(h5pack.ChunkSampler(dataset, shuffle=shuffle, streams=streams), 256))
            slowest = max(slowest, time.process_time() - start)
            for indices in (batch, rows):
                assert len(dataset) == 10**9
                assert len(set(indices)) == 256
                assert max(indices) < 10**9
                assert dataset.collate(dataset.__getitems__(indices)).images.shape == (256, 16)
            del dataset
        peaks.append(peak() - before)
    print(json.dumps({"seconds": slowest, "peaks": peaks}))


def printed(function: Callable[..., None], seconds: float, *arguments: Any) -> dict[str, Any]:
    """What a process of its own prints, whose first batch may take this many CPU seconds."""
    found: dict[str, Any] = json.loads(output_of(function, *arguments))
    assert found["seconds"] < seconds, "below 1 if nothing is computed for each row"
    return found


@pytest.fixture
def large(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file of 30 GB, of which next to nothing is on the disk."""
    path = tmp_path / "f.h5"
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    try:
        with h5py.File(path, "w", libver=("v110", "v110")) as file:
            file.create_dataset("labels", (ROWS,), request.param, dcpl=create)
            file.create_dataset("images", (ROWS, *SHAPE), "u1", chunks=(CHUNK_ROWS, *SHAPE), dcpl=create)
        status = path.stat()
    except OSError as error:
        pytest.skip(f"no file of 30 GB here ({error})")
    if status.st_blocks * 512 > status.st_size // 100:
        path.unlink()
        pytest.skip("no sparse files here")
    yield path
    path.unlink()


@pytest.mark.parametrize(("large", "shuffle"), [("i8", "window"), ("u1", "full")], indirect=["large"])
def test_ten_million_rows(large: Path, shuffle: str) -> None:
    dataset = h5pack.H5Dataset(large, with_rows=True)
    assert (len(dataset), dataset.group_rows) == (ROWS, CHUNK_ROWS)
    sampler = h5pack.ChunkBatchSampler(dataset, BATCH, shuffle=shuffle)
    assert len(dataset) // BATCH <= len(sampler)
    wanted = next(iter(sampler))
    index, labels = dataset.engine.indexes["images"], dataset.engine.indexes["labels"]
    with large.open("r+b", buffering=0) as file:
        for row in wanted:
            chunk, place = divmod(row, CHUNK_ROWS)
            os.pwrite(file.fileno(), np.int64(row).tobytes(), int(index.addresses[chunk]) + place * index.row_bytes)
            offset = int(labels.addresses[0]) + row * labels.row_bytes
            os.pwrite(file.fileno(), np.array(row % 100, labels.dtype).tobytes(), offset)
    found = printed(read_batches, 10, large, shuffle)
    assert found["rows"] == found["marks"] == wanted
    assert found["labels"] == [row % 100 for row in wanted]
    assert found["bytes"] <= MEMORY
    assert found["peak"] <= 300 * 2**20 + found["bytes"]


def test_the_first_batch_of_a_billion_rows_takes_little_time_and_memory(tmp_path: Path) -> None:
    paths = tmp_path / "contiguous", tmp_path / "chunked"
    for path, chunks in zip(paths, (None, (512, 16)), strict=True):
        with h5py.File(path, "w") as file:
            file.create_dataset("images", (10**9, 16), "u1", chunks=chunks)
    contiguous, chunked = printed(draw_batches, 5, *paths)["peaks"]
    assert contiguous < 100_000_000
    # The index of two million chunks: 135 MB measured, 70 bytes a chunk. A number for each row would take 8 GB.
    assert chunked < 200_000_000
