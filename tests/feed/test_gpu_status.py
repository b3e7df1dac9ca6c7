"""What is known of a GPU, by a driver's library that is made up here."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from h5pack.feed import gpu_probe
from h5pack.feed.gpu_probe import GpuIdentity, GpuProbe
from h5pack.feed.gpu_status import GpuStatus


class NVMLError(Exception):
    """As pynvml's."""


class NVMLErrorNotSupported(NVMLError):
    """As pynvml's."""


class NVMLErrorTimeout(NVMLError):
    """As pynvml's."""


class FakeCard:
    """A card, or an instance of one."""

    def __init__(self, uuid: str, name: str | bytes = "Card", instances: list[FakeCard] | None = None) -> None:
        self.uuid, self.name, self.instances = uuid, name, instances
        self.answers: dict[str, Any] = {
            "memory": types.SimpleNamespace(used=3 * 2**30, total=80 * 2**30),
            "utilisation": types.SimpleNamespace(gpu=87, memory=40),
            "temperature": 61,
            "power": 312_500,
            "reasons": 0x1 | 0x4 | 0x20,
        }
        self.asked: list[str] = []

    def answer(self, what: str) -> Any:
        self.asked.append(what)
        value = self.answers[what]
        if isinstance(value, Exception):
            raise value
        return value() if callable(value) else value


class FakeNvml(types.ModuleType):
    """As much of pynvml as is used."""

    NVMLError = NVMLError

    def __init__(self, cards: list[FakeCard]) -> None:
        super().__init__("pynvml")
        self.cards = cards
        self.handles = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        self.handles += 1
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str | bytes:
        return card.uuid.encode() if isinstance(card.name, bytes) else card.uuid

    def nvmlDeviceGetName(self, card: FakeCard) -> str | bytes:
        return card.name

    def nvmlDeviceGetMigMode(self, card: FakeCard) -> list[int]:
        if card.instances is None:
            raise NVMLErrorNotSupported
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: FakeCard) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: FakeCard, index: int) -> FakeCard:
        if card.instances is None or index >= len(card.instances):
            raise NVMLError
        return card.instances[index]

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> Any:
        return card.answer("memory")

    def nvmlDeviceGetUtilizationRates(self, card: FakeCard) -> Any:
        return card.answer("utilisation")

    def nvmlDeviceGetTemperature(self, card: FakeCard, sensor: int) -> Any:
        assert sensor == 0
        return card.answer("temperature")

    def nvmlDeviceGetPowerUsage(self, card: FakeCard) -> Any:
        return card.answer("power")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: FakeCard) -> Any:
        return card.answer("reasons")


Install = Callable[..., FakeNvml]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def make(*cards: FakeCard) -> FakeNvml:
        module = FakeNvml(list(cards))
        monkeypatch.setitem(sys.modules, "pynvml", module)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        # A busy machine may take any time for a made-up answer.
        monkeypatch.setattr(gpu_probe, "BUDGET_SECONDS", 60.0)
        return module

    return make


def sample(*uuids: str, ordinal: int | None = None) -> GpuStatus:
    status = GpuProbe(GpuIdentity(uuids, ordinal)).sample()
    assert status is not None
    return status


@pytest.mark.parametrize("name", ["H100", b"H100"])
def test_all_that_a_card_tells(install: Install, name: str | bytes) -> None:
    install(FakeCard("GPU-a", "other"), FakeCard("GPU-b", name))
    status = sample("MIG-b", "GPU-b")
    assert status == GpuStatus("H100", 87.0, 3 * 2**30, 80 * 2**30, 61.0, 312.5, ("power cap", "software thermal"))
    assert str(status) == (
        "H100: utilisation 87 %, memory 3.0 of 80.0 GiB, temperature 61 °C, power 312 W, "
        "throttled: power cap, software thermal"
    )


def test_what_is_not_told_is_none_and_asked_once(install: Install) -> None:
    card = FakeCard("GPU-a")
    card.answers |= {"utilisation": NVMLErrorNotSupported(), "power": NVMLErrorTimeout(), "reasons": 0x1}
    module = install(card)
    probe = GpuProbe(GpuIdentity(("GPU-a",)))
    for _ in range(3):
        status = probe.sample()
        assert status is not None
        assert (status.utilisation_percent, status.power_watts) == (None, None)
        assert status.throttle_reasons == ()
        assert "utilisation not available" in str(status)
        assert "power not available" in str(status)
        assert "0 W" not in str(status)
    # Not supported is for ever; a timeout may pass.
    assert card.asked.count("utilisation") == 1
    assert card.asked.count("power") == 3
    card.answers["power"] = 50_000
    after = probe.sample()
    assert after is not None
    assert after.power_watts == 50
    assert module.handles == 1


def test_the_newer_name_of_throttle_reasons(install: Install) -> None:
    card = FakeCard("GPU-a")
    module = install(card)
    module.nvmlDeviceGetCurrentClocksEventReasons = lambda card: 0x8  # type: ignore[attr-defined]
    assert sample("GPU-a").throttle_reasons == ("hardware slowdown",)

    def unknown(card: FakeCard) -> int:
        raise NVMLErrorNotSupported

    module.nvmlDeviceGetCurrentClocksEventReasons = unknown  # type: ignore[attr-defined]
    assert sample("GPU-a").throttle_reasons == ("power cap", "software thermal")


def test_an_instance_of_a_shared_card(install: Install) -> None:
    parts = [FakeCard("MIG-x"), FakeCard("MIG-y")]
    for number, part in enumerate(parts):
        part.answers |= {
            "memory": types.SimpleNamespace(used=number, total=10),
            "utilisation": NVMLErrorNotSupported(),
        }
    install(FakeCard("GPU-a", "A100", parts))
    status = sample("MIG-y", "GPU-y")
    assert (status.memory_used_bytes, status.memory_total_bytes) == (1, 10)
    assert status.utilisation_percent is None
    assert (status.name, status.temperature_celsius) == ("A100", 61.0)
    # By the card's own UUID nobody knows which of the two it is, so nothing is said of its memory.
    status = sample("GPU-a")
    assert (status.memory_used_bytes, status.memory_total_bytes, status.utilisation_percent) == (None, None, None)
    assert "memory not available" in str(status)
    parts.pop()
    assert sample("GPU-a").memory_used_bytes == 0


def test_by_number_only_where_numbers_agree(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(FakeCard("GPU-a", "fast"), FakeCard("GPU-b", "slow"))
    assert GpuProbe(GpuIdentity((), 1)).sample() is None
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert sample(ordinal=1).name == "slow"
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    module.cards[0].name = "slow"
    assert sample(ordinal=1).name == "slow"
    assert GpuProbe(GpuIdentity((), 2)).sample() is None
    assert GpuProbe(GpuIdentity(("GPU-c",), 0)).sample() is None
    # The beginning of two UUIDs is none of them.
    assert GpuProbe(GpuIdentity(("GPU-",), None)).sample() is None


@pytest.mark.parametrize(
    ("visible", "index", "uuids", "ordinal"),
    [
        (None, 1, ("MIG-u1", "GPU-u1"), 1),
        ("3,5", 1, ("MIG-u1", "GPU-u1"), 5),
        ("GPU-ab,GPU-cd", 1, ("GPU-cd", "MIG-u1", "GPU-u1"), None),
        ("MIG-ab", 0, ("MIG-ab", "MIG-u0", "GPU-u0"), None),
    ],
)
def test_who_a_device_is(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, uuids: tuple[str, ...], ordinal: int | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=f"u{index}"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: index)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert GpuIdentity.of(torch.device("cuda", index), environment) == GpuIdentity(uuids, ordinal)
    assert GpuIdentity.of(torch.device("cuda"), environment) == GpuIdentity(uuids, ordinal)


def test_no_package_no_library_no_gpu(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuProbe(GpuIdentity(("GPU-a",))).sample() is None
    module = install()

    def missing() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    assert GpuProbe(GpuIdentity(("GPU-a",))).sample() is None
    monkeypatch.setattr(module, "nvmlInit", missing)
    assert GpuProbe(GpuIdentity(("GPU-a",), 0)).sample() is None


def test_a_slow_answer(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCard("GPU-a")
    install(card)
    clock = FakeClock()
    monkeypatch.setattr(gpu_probe, "time", clock)
    monkeypatch.setattr(gpu_probe, "BUDGET_SECONDS", 0.05)

    def slow() -> int:
        clock.now += 0.06
        return 0x4

    card.answers["reasons"] = slow
    probe = GpuProbe(GpuIdentity(("GPU-a",)))
    for _ in range(3):
        status = probe.sample()
        assert status is not None
        # It was told at last; the rest of the sample is left out.
        assert (status.throttle_reasons, status.memory_used_bytes, status.power_watts) == (
            ("power cap",),
            3 * 2**30,
            None,
        )
    status = probe.sample()
    assert status is not None
    assert (status.throttle_reasons, status.power_watts) == (None, 312.5)
    assert card.asked.count("reasons") == 3


class FakeClock:
    """As much of `time` as is used."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_real_card() -> None:
    pytest.importorskip("pynvml")
    device = torch.device("cuda", 0)
    status = GpuProbe(GpuIdentity.of(device)).sample()
    assert status is not None
    assert status.name is not None
    assert torch.cuda.get_device_name(device).split(" MIG")[0] in status.name
    if status.memory_total_bytes is not None:
        total = torch.cuda.mem_get_info(device)[1]
        assert abs(status.memory_total_bytes - total) < 0.1 * total
