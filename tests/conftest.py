"""Fixtures of all tests."""

from __future__ import annotations

import multiprocessing

import pytest

# A worker of a fork server would import torch anew, for seconds.
multiprocessing.set_forkserver_preload(["torch", "h5pack.feed.dataset"])


@pytest.fixture(autouse=True)
def _fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files made by the tests, in this process or in others, differ in nothing but their content."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
