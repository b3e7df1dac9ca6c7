"""Reading chunks and nothing else."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import h5pack
from h5pack.doctor.storage_stages import ChunkReading, ready_share
from h5pack.errors import ReadError
from h5pack.read import storage
from tests.feed.packs import ROWS, converted, labelled, values, write


def test_every_row_is_read_once_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = h5pack.H5Dataset(labelled(tmp_path / "x.h5"))
    seen: list[int] = []
    read = dataset.engine.read
    lock = threading.Lock()

    def recorded(name: str, rows: object, out: object = None) -> object:
        found = read(name, rows, out)  # type: ignore[arg-type]
        with lock:
            seen.extend(np.asarray(rows).tolist())
        assert np.array_equal(found, values()[rows])  # type: ignore[index]
        return found

    monkeypatch.setattr(dataset.engine, "read", recorded)
    reading = ChunkReading(dataset)
    assert reading.block_rows == 10
    assert reading.warm(60.0, 0) == ROWS
    assert sorted(seen) == list(range(ROWS))
    seen.clear()
    found = reading.run(0.0, 3, ROWS)
    # Each thread reads a block at least.
    assert found.images == len(seen) == 30
    assert sorted(seen) == list(range(30))
    seen.clear()
    reading.run(0.0, 1, ROWS, begin=0.999)
    assert seen == [100, 101, 102]


def test_a_split_begins_within_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = h5pack.H5Dataset(converted(tmp_path), split="test")
    assert (dataset.first_row, len(dataset), dataset.unit_rows) == (33, 12, 7)
    assert list(ChunkReading(dataset)._blocks(0, 12)) == [(0, 2), (2, 9), (9, 12)]


def test_warming_stops_when_it_may(tmp_path: Path) -> None:
    reading = ChunkReading(h5pack.H5Dataset(labelled(tmp_path / "x.h5")))
    assert reading.warm(0.0, 0) == 10
    assert reading.warm(0.0, 35) == 40


def test_a_thread_that_waits_is_told_from_one_that_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = ChunkReading(h5pack.H5Dataset(labelled(tmp_path / "x.h5")))
    real = storage.preadv

    def slow(*arguments: int) -> int:
        time.sleep(0.005)
        return real(*arguments)

    monkeypatch.setattr(storage, "preadv", slow)
    found = reading.run(0.1, 2, ROWS)
    assert reading.share is not None
    assert reading.share < 0.3
    # At most a chunk of 10 rows every 5 ms in each thread.
    assert found.rate < 2 * 10 / 0.005
    monkeypatch.setattr(storage, "preadv", real)
    reading.run(0.1, 1, ROWS)
    assert reading.share > 0.5


def test_shares_of_calls() -> None:
    def burn() -> None:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass

    assert ready_share(lambda: time.sleep(0.02), 0.05) < 0.3
    assert ready_share(burn, 0.05) > 0.7


def test_encoded_chunks_are_read_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "z.h5", chunks=50, compression="gzip", images=values())
    assert ChunkReading(h5pack.H5Dataset(path)).block_rows == 50
    path = write(tmp_path / "c.h5", chunks=None, images=values())
    assert ChunkReading(h5pack.H5Dataset(path)).run(0.0, 1, ROWS).images == ROWS


def test_an_error_of_a_thread_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = h5pack.H5Dataset(labelled(tmp_path / "x.h5"))

    def fail(*arguments: object) -> None:
        raise ReadError("row 3 cannot be read")

    monkeypatch.setattr(dataset.engine, "read", fail)
    with pytest.raises(ReadError, match="row 3"):
        ChunkReading(dataset).run(0.0, 2, ROWS)
