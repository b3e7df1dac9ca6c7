"""Input files of the bench's tests, and samples of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5pack.benchmark.cases import BenchSettings
from h5pack.benchmark.sample import BenchInput, BenchSample, find_input, make_sample
from tests.monitor.fake_clock import FakeClock

SIZE = (64, 48)
ROW_BYTES = 64 * 48 * 3


def write_cut_chunks(path: Path) -> Path:
    """200 rows, channels first, whose chunks are one line short, as in a well-known recipe."""
    values = np.random.default_rng(0).integers(0, 256, (200, 3, *SIZE), np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=values, chunks=(50, 3, SIZE[0] - 1, SIZE[1]))
        file["labels"] = np.arange(200) % 10
    return path


def input_of(path: Path) -> BenchInput:
    """The input of a bench of a file or folder."""
    return find_input(path, path.parent, BenchSettings())


def sample_of(path: Path, scratch: Path, **settings: Any) -> BenchSample:
    """A sample without time limit."""
    return make_sample(input_of(path), BenchSettings(**settings), scratch, FakeClock(), BenchSettings.seconds)
