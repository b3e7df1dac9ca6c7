"""CPU time, waits of a CUDA stream, and GPU status from a made-up driver library."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from h5pack.monitor import probes
from h5pack.monitor.probes import CpuTime, DeviceWait, GpuProbe, GpuStatus


def burn(seconds: float) -> None:
    begun = time.process_time()
    while time.process_time() - begun < seconds:
        pass


def burn_and_wait(pipe: Connection) -> None:
    burn(0.1)
    pipe.send("burnt")
    pipe.recv()


def test_cpu_time_of_this_process_and_of_running_and_ended_children() -> None:
    before = CpuTime.now()
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=burn_and_wait, args=(there,))
    child.start()
    assert here.recv() == "burnt"
    running = CpuTime.now().since(before)
    here.send("end")
    child.join()
    used = CpuTime.now().since(before)
    # The kernel counts in ticks of 10 ms.
    assert running.children >= 0.08
    assert used.children >= 0.08
    burn(0.05)
    assert CpuTime.now().since(before).own - used.own >= 0.05
    assert used.total == used.own + used.children


def test_cpu_time_on_systems_that_list_no_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Earlier tests may have left persistent workers.
    monkeypatch.setattr(probes.multiprocessing, "active_children", list)
    monkeypatch.setattr(probes, "_PROC", tmp_path)
    ended = os.times()
    assert CpuTime.now().children >= ended.children_user + ended.children_system
    monkeypatch.setattr(probes.multiprocessing, "active_children", lambda: ["one"])
    assert CpuTime.now().total is None


class FakeEvent:
    """A CUDA event of a device whose clock is moved by hand."""

    def __init__(self) -> None:
        self.at: float | None = None

    def record(self, stream: Any) -> None:
        self.at = None
        stream.append(self)

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, end_event: FakeEvent) -> float:
        return (end_event.at - self.at) * 1000


def test_waits_of_a_stream_count_once_the_device_has_reached_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: list[FakeEvent] = []
    made = itertools.count()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: (next(made), FakeEvent())[1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    wait = DeviceWait(torch.device("cuda", 0))
    wait.begin()
    wait.end(0.5)
    # The device has reached neither; until then the process's waiting counts.
    assert wait.seconds == 0.5
    stream[0].at = 10.0
    assert wait.seconds == 0.5
    stream[1].at = 10.2
    assert wait.seconds == pytest.approx(0.2)
    # A wait that queued work hid does not count.
    wait.begin()
    wait.end(0.7)
    stream[2].at = stream[3].at = 11.0
    assert wait.seconds == pytest.approx(0.2)
    for _ in range(5):
        wait.begin()
        wait.end(0.0)
        stream[-2].at, stream[-1].at = 1.0, 1.1
        assert wait.seconds > 0.2
    assert wait.seconds == pytest.approx(0.7)
    # The two events were reused.
    assert next(made) == 2


def test_waits_are_counted_while_another_thread_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    event = types.SimpleNamespace(record=lambda _: None, query=lambda: True, elapsed_time=lambda _: 1000.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    wait, interval = DeviceWait(torch.device("cuda", 0)), sys.getswitchinterval()
    ended = threading.Event()

    def read() -> float:
        while not ended.is_set():
            _ = wait.seconds
        return wait.seconds

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as executor:
            reading = executor.submit(read)
            for _ in range(3_000):
                wait.begin()
                wait.end(0.0)
            ended.set()
            assert reading.result() == 3_000
    finally:
        ended.set()
        sys.setswitchinterval(interval)


class FakeNvml(types.ModuleType):
    """The part of pynvml that is used. A card is its UUID."""

    def __init__(self, *uuids: str) -> None:
        super().__init__("pynvml")
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetCount = lambda: len(uuids)
        self.nvmlDeviceGetHandleByIndex = uuids.__getitem__
        self.nvmlDeviceGetHandleByUUID = {uuid: uuid for uuid in uuids}.__getitem__
        self.nvmlDeviceGetName = lambda card: f"name of {card}"
        self.nvmlDeviceGetMemoryInfo = lambda card: types.SimpleNamespace(used=3 * 2**30, total=80 * 2**30)
        self.nvmlDeviceGetUtilizationRates = lambda card: types.SimpleNamespace(gpu=87, memory=40)


Install = Callable[..., FakeNvml]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def make(*uuids: str, own: str | None = "a") -> FakeNvml:
        module = FakeNvml(*uuids)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=own))
        return module

    return make


def sample() -> GpuStatus | None:
    return GpuProbe(torch.device("cuda")).sample()


@pytest.mark.parametrize(
    ("uuids", "own", "found"), [("ba", "a", "a"), ("bc", "a", None), ("b", None, "b"), ("bc", None, None)]
)
def test_a_card_is_found_by_its_uuid_or_because_it_is_the_only_one(
    install: Install, uuids: str, own: str | None, found: str | None
) -> None:
    install(*(f"GPU-{uuid}" for uuid in uuids), own=own)
    expected = GpuStatus(f"name of GPU-{found}", 87.0, 3 * 2**30, 80 * 2**30)
    assert sample() == (None if found is None else expected)


def fail(*_: Any) -> None:
    raise RuntimeError("not supported")


def test_failures_of_the_driver_leave_their_numbers_out(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    module = install("GPU-a")
    module.nvmlDeviceGetUtilizationRates = fail
    assert sample() == GpuStatus("name of GPU-a", None, 3 * 2**30, 80 * 2**30)
    module.nvmlInit = fail
    assert sample() is None
    install()
    assert sample() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert sample() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_real_card() -> None:
    pytest.importorskip("pynvml")
    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device)
    if "MIG" in name:
        pytest.skip("NVML lists no MIG instances among its cards")
    status = GpuProbe(device).sample()
    assert status.name == name
    total = torch.cuda.mem_get_info(device)[1]
    assert abs(status.memory_total_bytes - total) < 0.1 * total
