"""Ten million rows: what opening a large file and its first batch cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

import h5pack

ROWS = 10_000_000
SHAPE = (32, 32, 3)
CHUNK_ROWS = 1_365
BATCH = 512
PROBE = """
import json, sys, time
import numpy as np, torch, h5pack
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
h5pack.H5Loader
before, start = peak(), time.process_time()
dataset = h5pack.H5Dataset(sys.argv[1], with_rows=True)
loader = h5pack.H5Loader(dataset, 512, shuffle=sys.argv[2], resident="no", memory_bytes=int(sys.argv[3]))
batches = iter(loader)
images, labels, rows = next(batches)
first = time.process_time() - start
for _ in range(20):
    found = next(batches)
batches.close()
marks = images.view(512, -1)[:, :8].contiguous().view(torch.int64)[:, 0]
print(json.dumps({"first": first, "peak": peak() - before, "bytes": loader.memory_bytes,
                  "rows": rows.tolist(), "marks": marks.tolist(), "labels": labels.tolist()}))
"""


@pytest.fixture
def large(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file of 30 GB, of which next to nothing is on the disk."""
    path = tmp_path / "f.h5"
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_chunk((CHUNK_ROWS, *SHAPE))
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    flat = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    flat.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    flat.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    try:
        with h5py.File(path, "w", libver=("v110", "v110")) as file:
            space = h5py.h5s.create_simple((ROWS, *SHAPE))
            h5py.h5d.create(file.id, b"images", h5py.h5t.STD_U8LE, space, create)
            kind = h5py.h5t.py_create(np.dtype(request.param))
            h5py.h5d.create(file.id, b"labels", kind, h5py.h5s.create_simple((ROWS,)), flat)
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
    wanted = next(iter(sampler))
    index, labels = dataset.engine.indexes["images"], dataset.engine.indexes["labels"]
    descriptor = os.open(large, os.O_RDWR)
    for row in wanted:
        chunk, place = divmod(row, CHUNK_ROWS)
        os.pwrite(descriptor, np.int64(row).tobytes(), int(index.addresses[chunk]) + place * index.row_bytes)
        offset = int(labels.addresses[0]) + row * labels.row_bytes
        os.pwrite(descriptor, np.array(row % 100, labels.dtype).tobytes(), offset)
    os.close(descriptor)
    memory = 400_000_000
    command = [sys.executable, "-c", PROBE, str(large), shuffle, str(memory)]
    root = Path(__file__).parents[2]
    process = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    found = json.loads(process.stdout)
    assert found["rows"] == found["marks"] == wanted
    assert found["labels"] == [row % 100 for row in wanted]
    assert found["first"] < 10, "CPU seconds, below 1 if nothing is computed for each row of the file"
    assert found["peak"] <= 300 + found["bytes"] / 2**20
    assert found["bytes"] <= memory
    assert len(dataset) // BATCH <= len(sampler)
