"""Fixtures of the tests of conversions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crashing import small_file_system
from tests.makers import split_folders, truncate


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two splits of 76 images that can be packed; three are cut short, so that rows move, and one file is no image."""
    counts = {"train": {"x": 30, "y": 20}, "val": {"x": 15, "y": 14}}
    root = split_folders(tmp_path_factory.mktemp("source"), counts, (60, 50))
    for name in ("train/x/00003.jpg", "train/y/00019.jpg", "val/y/00003.jpg"):
        truncate(root / name)
    (root / "train" / "x" / "none.jpg").write_bytes(b"no image")
    return root


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with small_file_system(tmp_path / "small", "4m") as mount:
        yield mount
