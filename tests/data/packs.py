"""Small HDF5 files for the feeding tests, what they hold, and what it should look like when it was fed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import h5pack
from h5pack.data.dataset import H5Dataset
from h5pack.data.iteration import IDLE
from h5pack.read.mapping import MappedDataset
from h5pack.system.files import make_hot
from tests.makers import quick, split_folders

PATIENCE = 30.0
ROWS = 103
SHAPE = (16, 12, 3)
"""A row of 576 bytes: large enough to be scattered."""


WAYS = ("mapped", "read")
"""How an `H5Loader` gets rows that are stored as they are: from a mapping of the file, or by reading it."""


ORDERS: dict[str, dict[str, Any]] = {
    "window": {},
    "full": {"shuffle": "full"},
    "chunk": {"shuffle": "chunk"},
    "stored": {"shuffle": False},
    "drop_last": {"drop_last": True},
    "streams": {"streams": 4},
    "streams and lanes": {"streams": 12, "lanes": 2},
    "full, lanes": {"shuffle": "full", "streams": 3, "lanes": 3},
    "a rank": {"rank": 1, "num_replicas": 2, "streams": 4},
    "a rank, drop_last": {"rank": 2, "num_replicas": 3, "drop_last": True},
    "rows": {"indices": [5, 99, 3, 60, 60, 61, 7, -1, 20, 21, 22, 23, 24, 77, 5]},
}
"""Options of loaders and samplers that choose an order."""

WEIGHTS = np.random.default_rng(1).exponential(size=ROWS)
"""Weights of rows: some are 0, chunks have nothing but 0, and one weighs much."""
WEIGHTS[::7] = 0
WEIGHTS[30:50] = 0
WEIGHTS[77] = 15


@contextlib.contextmanager
def rows_by(way: str, *paths: Path) -> Iterator[None]:
    """Let rows be copied from mappings of these files, where that is possible; or let all rows be read."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "read":
            for method in ("ready", "load"):
                patch.setattr(MappedDataset, method, lambda *_: False)
        for path in paths:
            make_hot(path)
        yield


def values(rows: int = ROWS, shape: tuple[int, ...] = SHAPE, dtype: str = "u1") -> npt.NDArray[Any]:
    """Rows of which no two are equal."""
    random = np.random.default_rng(rows)
    if np.dtype(dtype).kind == "f":
        return random.normal(size=(rows, *shape)).astype(dtype)
    return random.integers(0, 120, (rows, *shape)).astype(dtype)


def write(
    path: Path, chunks: int | tuple[int, ...] | None = 10, compression: str | None = None, **datasets: npt.NDArray[Any]
) -> Path:
    """An HDF5 file; `images` in chunks of whole rows, or as `chunks` says, everything else contiguous."""
    with h5py.File(path, "w") as file:
        for name, data in datasets.items():
            if name != "images" or chunks is None:
                file[name] = data
                continue
            shape = (chunks, *data.shape[1:]) if isinstance(chunks, int) else chunks
            file.create_dataset(name, data=data, chunks=shape, compression=compression)
    return path


def labeled(path: Path, rows: int = ROWS, **settings: Any) -> Path:
    """A file of images, and of labels that are their rows' numbers."""
    return write(path, images=values(rows), labels=np.arange(rows), **settings)


def converted(folder: Path, **settings: Any) -> Path:
    """A pack with checksums, of 33 images to train with and 12 to test with, in chunks of 7."""
    source = split_folders(folder / "in", {"train": {"x": 15, "y": 18}, "test": {"x": 5, "y": 7}})
    h5pack.convert(source, folder / "o.h5", **quick(chunk_rows=7, **settings))
    make_hot(folder / "o.h5")  # It may have been written past the page cache.
    return folder / "o.h5"


def flip(path: Path, row: int, name: str = "images") -> None:
    """Change one byte of a row, and nothing else of the file."""
    index = H5Dataset(path, fields=[name] if name.startswith("fields/") else []).engine.indexes[name]
    chunk, place = divmod(row, index.chunk_rows)
    offset = int(index.addresses[chunk]) + place * index.row_bytes + index.row_bytes // 2
    descriptor = os.open(path, os.O_RDWR)
    os.pwrite(descriptor, bytes([os.pread(descriptor, 1, offset)[0] ^ 1]), offset)
    os.close(descriptor)


def base_of(dataset: Any) -> H5Dataset:
    """The dataset under any number of subsets."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def reference(dataset: Any, epochs: int, batch_size: int, **order: Any) -> list[list[Any]]:
    """The batches of each epoch, as torch's DataLoader makes them in this process."""
    sampler = h5pack.ChunkBatchSampler(dataset, batch_size, **order)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=base_of(dataset).collate)
    return [list(loader) for _ in range(epochs)]


def same(batch: Any, other: Any) -> bool:
    """Whether two batches are equal: their tensors, and those tensors' dtypes."""
    if isinstance(batch, torch.Tensor) or isinstance(other, torch.Tensor):
        batch, other = [batch], [other]
    return len(batch) == len(other) and all(
        one.dtype == two.dtype and torch.equal(one, two) for one, two in zip(batch, other, strict=True)
    )


def all_same(batches: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two epochs are equal, batch by batch."""
    return len(batches) == len(others) and all(map(same, batches, others))


def require_values(batches: Iterable[Any], values: npt.NDArray[Any]) -> None:
    """Require that batches have every row once, and its values; their labels are the rows' numbers."""
    seen = []
    for images, labels in batches:
        assert np.array_equal(images.numpy(), values[labels.numpy()])
        seen += labels.tolist()
    assert sorted(seen) == list(range(len(values)))


def in_time(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises in a thread; a TimeoutError if it stands still."""
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found.result(PATIENCE)


def loader_threads() -> list[str]:
    """Names of the loader threads of this process."""
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("h5pack-") and thread.name != IDLE
    ]


def threads_end(seconds: float = 20.0) -> bool:
    """Whether no loader thread is left, soon."""
    end = time.monotonic() + seconds
    while loader_threads() and time.monotonic() < end:
        time.sleep(0.005)
    return not loader_threads()
