"""Reading chunks and nothing else, and the loaders that are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import h5pack
from h5pack.doctor.measure import ChunkReader, busy_fraction
from h5pack.doctor.target import HostLoaders, touch_batch
from tests.data.packs import ROWS, converted, labelled, threads_end, values, write
from tests.doctor import users
from tests.doctor.conftest import Machine
from tests.doctor.test_target import settings


@pytest.fixture
def dataset(tmp_path: Path) -> h5pack.H5Dataset:
    return h5pack.H5Dataset(labelled(tmp_path / "x.h5"))


def test_every_row_is_read_once_a_round(dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    read = dataset.engine.read

    def recorded(name: str, rows: object, out: object = None) -> object:
        found = read(name, rows, out)
        seen.extend(np.asarray(rows).tolist())
        assert np.array_equal(found, values()[rows])
        return found

    monkeypatch.setattr(dataset.engine, "read", recorded)
    reader = ChunkReader(dataset)
    assert reader.block_rows == 10
    assert reader.warm(60.0, 0) == ROWS
    assert sorted(seen) == list(range(ROWS))
    seen.clear()
    found = reader.run(0.0, 3, ROWS)
    # Each thread reads at least one block.
    assert found.images == len(seen) == 30
    assert sorted(seen) == list(range(30))
    seen.clear()
    reader.run(0.0, 1, ROWS, begin=0.999)
    assert seen == [100, 101, 102]


def test_a_split_may_begin_within_a_chunk(tmp_path: Path) -> None:
    dataset = h5pack.H5Dataset(converted(tmp_path), split="test")
    assert (dataset.first_row, len(dataset), dataset.group_rows) == (33, 12, 7)
    assert list(ChunkReader(dataset)._blocks(0, 12)) == [(0, 2), (2, 9), (9, 12)]


def test_warming_stops_after_the_time_and_the_minimum_of_rows(dataset: h5pack.H5Dataset) -> None:
    assert [ChunkReader(dataset).warm(0.0, rows) for rows in (0, 35)] == [10, 40]


def test_the_busy_fraction_is_0_of_reads_that_wait_and_1_of_reads_that_compute(
    dataset: h5pack.H5Dataset, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = ChunkReader(dataset)
    read = dataset.engine.read
    for spend, fraction in ((machine.wait, 0.0), (machine.work, 1.0)):

        def slow(*arguments: Any, spend: Callable[[float], None] = spend) -> Any:
            spend(0.05)
            return read(*arguments)

        monkeypatch.setattr(dataset.engine, "read", slow)
        found = reader.run(1.0, 1, ROWS)
        # A chunk of 10 rows every 50 ms.
        assert found.rate == pytest.approx(10 / 0.05, rel=0.1)
        assert reader.busy_fraction == pytest.approx(fraction, abs=0.1)
        assert busy_fraction(lambda spend=spend: spend(0.2), 0.5) == pytest.approx(fraction, abs=0.1)


def test_encoded_chunks_are_read_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "z.h5", chunks=50, compression="gzip", images=values())
    assert ChunkReader(h5pack.H5Dataset(path)).block_rows == 50


Make = Callable[..., HostLoaders]


@pytest.fixture
def make(dataset: h5pack.H5Dataset) -> Iterator[Make]:
    made: list[HostLoaders] = []

    def make(transform: Callable[..., Any] | None = None, **changes: Any) -> HostLoaders:
        made.append(HostLoaders(dataset, settings(dataset.path, transform=transform, **changes), pin_memory=False))
        return made[-1]

    yield make
    for one in made:
        one.close()


def labels_of(loader: Any) -> list[int]:
    return sorted(label for _, labels in loader for label in labels.tolist())


def test_an_h5loader_yields_all_rows_or_the_first(make: Make) -> None:
    loaders = make(users.to_float, num_threads=3)
    loader = loaders.make()
    assert isinstance(loader, h5pack.H5Loader)
    assert next(iter(loader))[0].dtype == torch.uint8
    assert next(iter(loaders.make(transform=True)))[0].dtype == torch.float32
    assert (loaders.parallel, loader.num_threads, loader.resident) == (3, 3, False)
    assert labels_of(loader) == list(range(ROWS))
    assert labels_of(loaders.make(40)) == list(range(40))
    loaders.close()
    assert threads_end()


def test_a_dataloader_yields_the_same(make: Make) -> None:
    loaders = make(users.of_one_image, num_workers=1)
    assert loaders.parallel == 1
    plain, transformed = loaders.make(40), loaders.make(40, transform=True)
    assert labels_of(plain) == list(range(40))
    images, labels = next(iter(transformed))
    assert torch.equal(images, torch.from_numpy(values()[labels]).permute(0, 3, 1, 2).float() / 255)
    prefetched, ready = loaders.prefetch_of(plain)
    assert (prefetched, ready()) == (2, 0)
    workers = [*plain._iterator._workers, *transformed._iterator._workers]
    loaders.close()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()


def test_ready_images_are_counted_in_an_h5loader(make: Make) -> None:
    loaders = make(num_threads=1)
    loader = loaders.make()
    prefetched, ready = loaders.prefetch_of(loader)
    assert (prefetched, ready()) == (2 * loader.plan.max_group_batches + 2, 0)
    iterator = iter(loader)
    next(iterator)
    assert ready() % 16 == 0


def test_batches_of_any_kind_are_touched() -> None:
    images = torch.zeros(4, 3, 8, 8)
    assert touch_batch([images, torch.zeros(4)]) == 4
    assert touch_batch(images.to(memory_format=torch.channels_last)) == 4
    assert touch_batch(torch.zeros(0, 3)) == 0
    assert touch_batch("nothing") == 0
