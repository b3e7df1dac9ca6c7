"""LMDB."""

from __future__ import annotations

import struct
from collections.abc import Generator
from pathlib import Path

import lmdb
import numpy as np

from benchmarks.peer_cases.base import Batch, Case, ImageFolder, Opened, Reading

_KEY = struct.Struct(">Q")
_LABEL_BYTES = 8


class _OpenedLMDB:
    def __init__(self, out: Path, reading: Reading) -> None:
        self.environment = lmdb.open(str(out / "images"), readonly=True, lock=False)
        with self.environment.begin() as transaction:
            self.rows = transaction.stat()["entries"] - 1
            self.shape = tuple(np.frombuffer(transaction.get(b"shape"), np.int64))
        self.batch, self.random = reading.batch, np.random.default_rng(reading.seed)

    def epoch(self) -> Generator[Batch, None, None]:
        """Its next epoch."""
        order = self.random.permutation(self.rows)
        size = int(np.prod(self.shape))
        with self.environment.begin(buffers=True) as transaction:
            for start in range(0, self.rows, self.batch):
                rows = order[start : start + self.batch]
                images, labels = np.empty((len(rows), size), np.uint8), np.empty(len(rows), np.int64)
                for place, row in enumerate(rows.tolist()):
                    value = np.frombuffer(transaction.get(_KEY.pack(row)), np.uint8)
                    images[place] = value[_LABEL_BYTES:]
                    labels[place] = value[:_LABEL_BYTES].view(np.int64)[0]
                yield images.reshape(-1, *self.shape), labels

    def close(self) -> None:
        """Close the environment, which unmaps it."""
        self.environment.close()


class LMDBCase(Case):
    """A key a row; the value is the label and the pixels."""

    settings = (
        "readonly, lock=False and buffers=True; readahead as it comes, since its documentation advises against it only "
        "for databases larger than memory (without it a cold epoch took ten times as long); a batch is gathered in "
        "this process."
    )
    packages = ("lmdb", "numpy")
    parallel = "nothing"

    def convert(self, source: ImageFolder, out: Path, workers: int) -> int:
        """One writer, appending in order; 2 processes decode for it."""
        row = 0
        with lmdb.open(str(out / "images"), map_size=1 << 40, sync=False) as environment:
            for images, labels in source.decoded(workers):
                with environment.begin(write=True) as transaction:
                    for image, label in zip(images, labels, strict=True):
                        transaction.put(_KEY.pack(row), label.tobytes() + image.tobytes(), append=True)
                        row += 1
            with environment.begin(write=True) as transaction:
                transaction.put(b"shape", np.array(source.shape, np.int64).tobytes())
        return workers

    def open(self, out: Path, reading: Reading) -> Opened:
        """The environment, mapped."""
        return _OpenedLMDB(out, reading)


CASES = {"lmdb": LMDBCase()}
