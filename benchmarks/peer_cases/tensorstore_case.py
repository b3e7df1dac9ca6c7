"""tensorstore, zarr version 3."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from benchmarks.peer_cases.base import Batch, Case, ImageFolder, Opened, Reading

_SHARD_BYTES = 64 * 1024 * 1024
_AHEAD = 2


def _spec(path: Path) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}


class _OpenedTensorStore:
    def __init__(self, out: Path, reading: Reading) -> None:
        context = tensorstore.Context({"data_copy_concurrency": {"limit": reading.workers}})
        self.images = tensorstore.open(_spec(out / "images"), read=True, context=context).result()
        self.labels = tensorstore.open(_spec(out / "labels"), read=True, context=context).result().read().result()
        self.batch, self.random = reading.batch, np.random.default_rng(reading.seed)

    def epoch(self) -> Generator[Batch, None, None]:
        """Its next epoch; reads are asked for two batches ahead."""
        order = self.random.permutation(len(self.labels))
        asked: deque[tuple[Any, Any]] = deque()
        for start in range(0, len(order), self.batch):
            rows = order[start : start + self.batch]
            asked.append((self.images[rows].read(), self.labels[rows]))
            if len(asked) > _AHEAD:
                future, labels = asked.popleft()
                yield future.result(), labels
        for future, labels in asked:
            yield future.result(), labels

    def close(self) -> None:
        """Let go of the arrays."""
        del self.images


class TensorStoreCase(Case):
    """A sharded array of images, and one of labels."""

    settings = (
        "zarr3, a chunk an image in shards of 64 MB (sharding_indexed), uncompressed; a batch by one array of indices, "
        "two more batches asked for ahead (read() gives a future)."
    )
    packages = ("tensorstore", "numpy")
    parallel = "threads"

    def convert(self, source: ImageFolder, out: Path, workers: int) -> int:
        """Whole shards are written; 2 processes decode for it."""
        shape = source.shape
        rows = max(1, _SHARD_BYTES // int(np.prod(shape)))
        codecs = [
            {
                "name": "sharding_indexed",
                "configuration": {"chunk_shape": [1, *shape], "codecs": [{"name": "bytes"}]},
            }
        ]
        metadata = {
            "shape": [len(source), *shape],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [rows, *shape]}},
            "codecs": codecs,
        }
        images = tensorstore.open({**_spec(out / "images"), "metadata": metadata}, create=True).result()
        pending: list[Any] = []
        done, write = 0, None
        for block, _ in source.decoded(workers):
            pending.extend(block)
            while len(pending) >= rows:
                write = _write(images, done, pending[:rows], write)
                done, pending = done + rows, pending[rows:]
        if pending:
            write = _write(images, done, pending, write)
        if write is not None:
            write.result()
        labels = {"shape": [len(source)], "data_type": "int64"}
        store = tensorstore.open({**_spec(out / "labels"), "metadata": labels}, create=True).result()
        store[...] = source.labels
        return workers

    def open(self, out: Path, reading: Reading) -> Opened:
        """The arrays."""
        return _OpenedTensorStore(out, reading)


def _write(images: Any, start: int, rows: list[Any], before: Any) -> Any:
    if before is not None:
        before.result()
    return images[start : start + len(rows)].write(np.stack(rows))


CASES = {"tensorstore": TensorStoreCase()}
