"""The loaders that are measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import h5pack
from h5pack.doctor.feeding import Feeding, look_at
from h5pack.doctor.options import DoctorOptions
from h5pack.feed.loader import H5Loader
from tests.doctor import users
from tests.feed.packs import ROWS, labelled, threads_end, values


@pytest.fixture
def feeding(tmp_path: Path) -> Any:
    path = labelled(tmp_path / "x.h5")
    made: list[Feeding] = []

    def make(transform: Callable[..., Any] | None = None, **options: Any) -> Feeding:
        found = DoctorOptions(path, batch_size=16, window=2, **options)
        made.append(Feeding(found, h5pack.H5Dataset(path), transform, False))
        return made[-1]

    yield make
    for one in made:
        one.close()


def rows_of(loader: Any) -> list[int]:
    return sorted(label for _, labels in loader for label in labels.tolist())


def test_h5loader_gives_all_rows_or_the_first(feeding: Any) -> None:
    made = feeding(threads=3)
    loader = made.make()
    assert isinstance(loader, H5Loader)
    assert (made.parallel, loader.threads, loader.resident) == (3, 3, False)
    assert rows_of(loader) == list(range(ROWS))
    assert rows_of(made.make(40)) == list(range(40))
    assert made.make(parallel=5).threads == 5
    made.close()
    assert threads_end()


def test_a_dataloader_gives_the_same(feeding: Any) -> None:
    made = feeding(users.of_one_image, workers=1)
    assert made.parallel == 1
    plain, transformed = made.make(40), made.make(40, transform=True)
    assert rows_of(plain) == list(range(40))
    images, labels = next(iter(transformed))
    assert images.dtype == torch.float32
    assert images.shape == (16, 3, 16, 12)
    assert torch.equal(images, torch.from_numpy(values()[labels]).permute(0, 3, 1, 2).float() / 255)
    assert made.lead(plain) == 2
    workers = [*plain._iterator._workers, *transformed._iterator._workers]
    made.close()
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()


def test_the_transform_is_called_where_it_is_asked_for(feeding: Any) -> None:
    made = feeding(users.to_float, threads=1)
    assert next(iter(made.make()))[0].dtype == torch.uint8
    assert next(iter(made.make(transform=True)))[0].dtype == torch.float32


def test_what_waits_ready_is_counted(feeding: Any) -> None:
    made = feeding(threads=1)
    loader = made.make()
    assert made.lead(loader) == 2 * loader.plan.span + 2
    waiting = made.waiting(loader)
    assert waiting() == 0
    iterator = iter(loader)
    next(iterator)
    assert waiting() % 16 == 0
    assert feeding(workers=0).waiting(None)() == 0


def test_looking_at_batches_of_any_kind() -> None:
    images = torch.zeros(4, 3, 8, 8)
    assert look_at([images, torch.zeros(4)]) == 4
    assert look_at(images.to(memory_format=torch.channels_last)) == 4
    assert look_at(images.bfloat16()) == 4
    assert look_at(torch.zeros(0, 3)) == 0
    assert look_at("nothing") == 0
