"""Fixtures of the monitor's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import h5pack
from h5pack.monitor import monitor
from tests.data import packs
from tests.monitor.fake_clock import FakeClock


@pytest.fixture(autouse=True)
def not_yet_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_warned", set())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(monitor, "time", fake)
    return fake


@pytest.fixture
def dataset(tmp_path: Path) -> h5pack.H5Dataset:
    return h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5", 40))
