"""Every reader reads the rows of its case."""

from __future__ import annotations

import math
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from h5pack.benchmark.cases import BenchCase, FileVariant
from h5pack.benchmark.readers import LibraryReader, SharedDatasets, open_reader
from h5pack.benchmark.sample import ScratchFolder
from tests.benchmark.files import ROW_BYTES, input_of, sample_of, write_cut_chunks


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cut_chunks(tmp_path_factory.mktemp("source") / "cut.h5")


@pytest.fixture(scope="module")
def variant(cut: Path) -> FileVariant:
    found = input_of(cut).variant
    assert found is not None
    return found


@pytest.mark.parametrize("engine", ["direct", "tuned", "default"])
@pytest.mark.parametrize("order", ["sequential", "window", "full", "single"])
def test_an_epoch_has_every_row(variant: FileVariant, order: str, engine: str) -> None:
    case = BenchCase("as it is", order, engine, "hot", 1 if order == "single" else 16, 2, 1)
    reader = open_reader(case, variant, 0, SharedDatasets())
    timing = reader.run(math.inf, once=True)
    reader.close()
    assert timing.rows == 200
    assert timing.seconds > 0
    assert timing.bytes_per_row is not None
    assert timing.bytes_per_row >= 0.9 * ROW_BYTES


def test_workers_read_every_row_and_end_when_closed(variant: FileVariant) -> None:
    reader = open_reader(BenchCase("as it is", "window", "direct", "hot", 16, 2, 1, 2), variant, 0, SharedDatasets())
    assert reader.run(1e-6).rows == 200
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = len(children.read_text().split())
    reader.close()
    assert len(children.read_text().split()) == before - 2


@pytest.mark.parametrize("engine", ["default", "tuned"])
def test_rows_by_h5py_are_those_of_the_file(cut: Path, variant: FileVariant, engine: str) -> None:
    with h5py.File(cut) as file:
        expected = file["images"][()]
    for order, rows, counts in (("full", [5, 199, 0], [1, 1, 1]), ("sequential", range(40, 60), [20])):
        case = BenchCase("as it is", order, engine, "hot", 16, 2, 1)
        reader = LibraryReader(SharedDatasets().dataset(variant), case, variant, 0)
        assert np.array_equal(reader.read_row(7), expected[7])
        parts = [(count, pixels.copy().reshape(-1, *pixels.shape[-3:])) for count, pixels in reader.read_batch(rows)]
        assert [count for count, _ in parts] == counts
        assert np.array_equal(np.concatenate([pixels for _, pixels in parts]), expected[rows])
        reader.close()


def test_a_part_of_a_larger_file_is_read(cut: Path, tmp_path: Path) -> None:
    with ScratchFolder(tmp_path) as scratch:
        first = sample_of(cut, scratch, rows=60, chunk_rows=(8,), contiguous=False).variants[0]
        reader = open_reader(BenchCase("as it is", "full", "direct", "hot", 16, 2, 1), first, 0, SharedDatasets())
        assert reader.run(math.inf, once=True).rows == 100
        reader.close()
