"""Fixtures of the feeding tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import h5pack
from tests.data import packs
from tests.stacks import watched


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    """No standstill, and no loader thread after the test."""
    with watched():
        yield
    assert packs.threads_end(), packs.loader_threads()


@pytest.fixture(params=packs.WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each of `packs.WAYS`; files that were just written are in the page cache."""
    with packs.rows_by(request.param):
        yield request.param


@pytest.fixture
def dataset(tmp_path: Path) -> h5pack.H5Dataset:
    """Images, and labels that are their rows' numbers."""
    return h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5"))
