"""Fixtures of the bench's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from h5pack.benchmark.sample import scratch_folder
from tests.benchmark.files import SIZE, write_cut_chunks
from tests.makers import class_folders


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images in two classes."""
    return class_folders(tmp_path_factory.mktemp("source") / "photos", {"a": 20, "b": 20}, SIZE)


@pytest.fixture(scope="package")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HDF5 file whose chunks cut the images."""
    return write_cut_chunks(tmp_path_factory.mktemp("source") / "cut.h5")


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    with scratch_folder(tmp_path) as made:
        yield made
