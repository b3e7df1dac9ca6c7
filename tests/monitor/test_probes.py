"""CPU time, and what is known of a GPU through a made-up driver library."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from h5pack.monitor import probes
from h5pack.monitor.probes import CpuTime, GpuProbe, GpuStatus
from tests.monitor.fake_clock import FakeClock


def test_cpu_time_of_this_process_and_children() -> None:
    before = CpuTime.now()
    child = multiprocessing.get_context("fork").Process(target=_burn, args=(0.3,))
    child.start()
    deadline = time.monotonic() + 30
    # While it runs, and after it has ended.
    while (running := CpuTime.now().since(before).children or 0.0) < 0.1 and time.monotonic() < deadline:
        time.sleep(0.02)
    child.join()
    used = CpuTime.now().since(before)
    assert running >= 0.1
    assert used.children is not None
    assert used.children >= 0.3
    _burn(0.1)
    assert CpuTime.now().since(before).own - used.own >= 0.1
    assert used.total == used.own + used.children


def _burn(seconds: float) -> None:
    begun = time.process_time()
    while time.process_time() - begun < seconds:
        pass


def test_cpu_time_on_other_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Earlier tests may have left persistent workers.
    monkeypatch.setattr(probes.multiprocessing, "active_children", list)
    assert CpuTime.now(tmp_path).children is not None
    monkeypatch.setattr(probes.multiprocessing, "active_children", lambda: ["one"])
    assert CpuTime.now(tmp_path).total is None
    # A kernel that lists no children: each process names its parent.
    own = os.getpid()
    for number, parent, ticks in ((own, 1, 900), (7, own, 10), (8, 7, 20), (9, 1, 40)):
        (tmp_path / str(number)).mkdir()
        fields = ["S", parent, *[0] * 9, ticks, ticks, 0, 0, 0]
        (tmp_path / str(number) / "stat").write_text(f"{number} (a) b) {' '.join(map(str, fields))}")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").write_text("")
    ended = os.times()
    seconds = ended.children_user + ended.children_system
    assert CpuTime.now(tmp_path).children == pytest.approx(seconds + 60 / os.sysconf("SC_CLK_TCK"))


class FakeCard:
    """A card of a made-up driver."""

    def __init__(self, uuid: str, name: str | bytes = "Card") -> None:
        self.uuid, self.name = uuid, name
        self.answers: dict[str, Any] = {
            "memory": types.SimpleNamespace(used=3 * 2**30, total=80 * 2**30),
            "utilisation": types.SimpleNamespace(gpu=87, memory=40),
        }
        self.queries: list[str] = []

    def answer(self, what: str) -> Any:
        self.queries.append(what)
        value = self.answers[what]
        if isinstance(value, Exception):
            raise value
        return value() if callable(value) else value


class FakeNvml(types.ModuleType):
    """The part of pynvml that is used."""

    def __init__(self, cards: list[FakeCard]) -> None:
        super().__init__("pynvml")
        self.cards = cards

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str | bytes:
        return card.uuid.encode() if isinstance(card.name, bytes) else card.uuid

    def nvmlDeviceGetName(self, card: FakeCard) -> str | bytes:
        return card.name

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> Any:
        return card.answer("memory")

    def nvmlDeviceGetUtilizationRates(self, card: FakeCard) -> Any:
        return card.answer("utilisation")


Install = Callable[..., FakeNvml]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def make(*cards: FakeCard, uuid: str | None = "a") -> FakeNvml:
        module = FakeNvml(list(cards))
        monkeypatch.setitem(sys.modules, "pynvml", module)
        for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=uuid))
        # A busy machine may take any time for a made-up answer.
        monkeypatch.setattr(probes, "BUDGET_SECONDS", 60.0)
        return module

    return make


def sample(number: int = 0) -> GpuStatus | None:
    return GpuProbe(torch.device("cuda", number)).sample()


@pytest.mark.parametrize("name", ["H100", b"H100"])
def test_a_card_is_found_by_its_uuid(install: Install, name: str | bytes) -> None:
    install(FakeCard("GPU-b", "other"), FakeCard("GPU-a", name))
    expected = GpuStatus("H100", 87.0, 3 * 2**30, 80 * 2**30)
    assert sample() == GpuProbe(torch.device("cuda")).sample() == expected


def test_a_card_is_found_by_the_uuid_of_the_environment(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(FakeCard("GPU-ab", "first"), FakeCard("GPU-cd", "second"), uuid=None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c, GPU-a")
    found = sample(1)
    assert found is not None
    assert found.name == "first"
    # The beginning of two UUIDs names neither.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-")
    assert sample() is None


def test_a_card_is_found_by_its_number_if_numbers_agree(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(FakeCard("GPU-b", "fast"), FakeCard("GPU-c", "slow"), uuid=None)
    assert sample(1) is None
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert (found := sample(1)) is not None
    assert found.name == "slow"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert (found := sample(0)) is not None
    assert found.name == "slow"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    module.cards[0].name = "slow"
    assert sample(1) is not None
    assert sample(2) is None


def test_an_unknown_uuid_is_no_other_card(install: Install) -> None:
    install(FakeCard("GPU-b"), uuid="a")
    assert sample() is None


def test_a_query_that_fails_is_none_and_given_up_after_three_times(install: Install) -> None:
    card = FakeCard("GPU-a")
    install(card)
    utilisation, card.answers["utilisation"] = card.answers["utilisation"], RuntimeError("not supported")
    probe = GpuProbe(torch.device("cuda", 0))
    for _ in range(2):
        assert probe.sample() == GpuStatus("Card", None, 3 * 2**30, 80 * 2**30)
    card.answers["utilisation"] = utilisation
    assert (found := probe.sample()) is not None
    assert found.utilisation_percent == 87.0
    card.answers["utilisation"] = RuntimeError("not supported")
    for _ in range(5):
        probe.sample()
    assert card.queries.count("utilisation") == 3 + 3
    assert card.queries.count("memory") == 8


def test_a_slow_query_is_given_up_after_three_times(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCard("GPU-a")
    install(card)
    clock = FakeClock()
    monkeypatch.setattr(probes, "time", clock)
    monkeypatch.setattr(probes, "BUDGET_SECONDS", 0.05)
    memory = card.answers["memory"]

    def slow() -> Any:
        clock.now += 0.06
        return memory

    card.answers["memory"] = slow
    probe = GpuProbe(torch.device("cuda", 0))
    found = [probe.sample() for _ in range(4)]
    assert [None if one is None else one.memory_total_bytes for one in found] == [80 * 2**30] * 3 + [None]
    assert card.queries.count("memory") == 3


def test_without_package_library_or_gpu_nothing_is_known(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    module = install()
    assert sample() is None

    def missing() -> None:
        raise RuntimeError("NVML Shared Library Not Found")

    monkeypatch.setattr(module, "nvmlInit", missing)
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
    assert status is not None
    assert status.name == name
    assert status.memory_total_bytes is not None
    total = torch.cuda.mem_get_info(device)[1]
    assert abs(status.memory_total_bytes - total) < 0.1 * total
