"""Fixtures of this folder."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

import h5pack
from tests.data import packs
from tests.data.packs import loader_threads, threads_end
from tests.stacks import watched


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """Fail a test that hangs, or after which a thread of a loader runs."""
    with watched():
        yield
    # Collecting costs more than most tests, so do it only if a thread may belong to an iterator in a reference cycle.
    if loader_threads():
        gc.collect()
    assert threads_end(), loader_threads()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton compile again whatever is in its cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.fixture
def dataset(tmp_path: Path) -> h5pack.H5Dataset:
    """103 rows in chunks of 10; labels are row numbers."""
    return h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5"), with_rows=True)
