"""Fixtures of the doctor's tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import h5pack
from h5pack.doctor import diagnose, measure, target
from h5pack.doctor.device_stages import DeviceStages
from h5pack.monitor import monitor
from h5pack.monitor.bottleneck import MIN_REPEATS
from h5pack.monitor.probes import CpuTime
from tests.data.packs import labeled
from tests.monitor.fake_clock import FakeClock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return labeled(tmp_path / "x.h5", 200)


@pytest.fixture
def dataset(tmp_path: Path) -> h5pack.H5Dataset:
    return h5pack.H5Dataset(labeled(tmp_path / "x.h5"))


class Machine(FakeClock):
    """A clock, and the CPU time of a machine on which only `work` and `wait` take time."""

    def __init__(self) -> None:
        super().__init__(tick=1e-3)
        self.busy = 0.0

    def work(self, seconds: float) -> None:
        """The CPU computes."""
        self.now += seconds
        self.busy += seconds

    def wait(self, seconds: float) -> None:
        """The CPU is idle."""
        self.now += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Measurements independent of this machine's speed and load.

    What runs in several threads must take no time of it: a DataLoader without workers runs in the main thread.
    """
    fake = Machine()
    for module in (diagnose, measure, monitor, target):
        monkeypatch.setattr(module, "time", fake)
    begin = DeviceStages.__init__

    def begin_slowly(self: DeviceStages, *arguments: Any) -> None:
        """Normalizing a batch takes time, or else it would be called a million times in a few seconds."""
        begin(self, *arguments)
        normalize = self._normalize
        if normalize is not None:
            self._normalize = lambda images: fake.work(0.001) or normalize(images)

    monkeypatch.setattr(DeviceStages, "__init__", begin_slowly)
    monkeypatch.setattr(measure, "_ready_seconds", lambda: fake.busy)
    monkeypatch.setattr(CpuTime, "now", lambda *_: CpuTime(fake.busy, 0.0))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.0, 0.0))
    return fake


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every repeat takes its minimum, whatever the budget: for tests that are not about numbers."""
    monkeypatch.setattr(measure, "next_seconds", lambda left, run, others: run.min_seconds)
    monkeypatch.setattr(measure, "repeats_within", lambda runs, seconds: MIN_REPEATS)
