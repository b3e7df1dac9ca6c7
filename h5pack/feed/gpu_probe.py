"""What NVIDIA's driver tells about the GPU that torch trains on.

NVML counts cards by their place on the bus, torch by `CUDA_VISIBLE_DEVICES` and by speed. So a card is found by its
UUID, which both know.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from h5pack.feed.gpu_status import GpuStatus

BUDGET_SECONDS = 0.05
"""A sample that has taken this long asks nothing more."""
_STRIKES = 3
"""A question that took all of that alone so many times in a row is not asked again. Once may be a busy CPU's fault."""

_TEMPERATURE_GPU = 0
_REASONS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
}
"""Bits of NVML's clocks event reasons (nvml.h). Bit 0, which is left out, says that the GPU is idle."""

_log = logging.getLogger("h5pack")


@dataclass(frozen=True)
class GpuIdentity:
    """By what NVML can find a GPU of torch's.

    Attributes
    ----------
    uuids : tuple of str
        With their prefix "GPU-" or "MIG-"; the beginning of one is enough.
    ordinal : int or None
        Its number among all GPUs of the machine, as CUDA counts them.
    """

    uuids: tuple[str, ...]
    ordinal: int | None = None

    @classmethod
    def of(cls, device: torch.device, environment: Any = os.environ) -> GpuIdentity:
        """Of a CUDA device; `environment` is tests' own."""
        index = torch.cuda.current_device() if device.index is None else device.index
        uuids = []
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        ordinal: int | None = index
        if visible is not None:
            names = [name.strip() for name in visible.split(",")]
            name = names[index] if index < len(names) else ""
            ordinal = int(name) if name.isdigit() else None
            if name.startswith(("GPU-", "MIG-")):
                uuids.append(name)
        known = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if known is not None:
            bare = str(known).removeprefix("GPU-").removeprefix("MIG-")
            uuids += [f"MIG-{bare}", f"GPU-{bare}"]
        return cls(tuple(uuids), ordinal)


class GpuProbe:
    """Asks NVML about one GPU; cheap, since handles are kept and what is not supported is asked once.

    Parameters
    ----------
    identity : GpuIdentity
    """

    def __init__(self, identity: GpuIdentity) -> None:
        self._nvml: Any = None
        self._card: Any = None
        self._part: Any = None
        self._name: str | None = None
        self._hopeless: set[str] = set()
        self._strikes: dict[str, int] = {}
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._find(identity)
        except Exception as error:
            # Whatever is amiss with a driver or its package, training goes on without its figures.
            self._card = self._part = None
            _log.info("nothing is known about the GPU: %s (pip install nvidia-ml-py)", error)

    @property
    def found(self) -> bool:
        """Whether there is anything to ask."""
        return self._card is not None

    def sample(self) -> GpuStatus | None:
        """Look at the GPU now; None where it cannot be looked at."""
        if not self.found:
            return None
        deadline = time.perf_counter() + BUDGET_SECONDS
        nvml, card, part = self._nvml, self._card, self._part
        memory = rates = None
        if part is not None:
            memory = self._ask("memory", deadline, lambda: nvml.nvmlDeviceGetMemoryInfo(part))
            rates = self._ask("utilisation", deadline, lambda: nvml.nvmlDeviceGetUtilizationRates(part))
        reasons = self._ask("throttling", deadline, lambda: self._reasons(card))
        heat = self._ask("temperature", deadline, lambda: nvml.nvmlDeviceGetTemperature(card, _TEMPERATURE_GPU))
        power = self._ask("power", deadline, lambda: nvml.nvmlDeviceGetPowerUsage(card))
        return GpuStatus(
            self._name,
            None if rates is None else float(rates.gpu),
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
            None if heat is None else float(heat),
            None if power is None else power / 1000,
            None if reasons is None else tuple(name for bit, name in _REASONS.items() if reasons & bit),
        )

    def _ask(self, what: str, deadline: float, question: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        if what in self._hopeless or begun >= deadline:
            return None
        try:
            return question()
        except Exception as error:
            if _never(error):
                self._hopeless.add(what)
            return None
        finally:
            seconds = time.perf_counter() - begun
            self._strikes[what] = self._strikes.get(what, 0) + 1 if seconds > BUDGET_SECONDS else 0
            if self._strikes[what] == _STRIKES:
                self._hopeless.add(what)
                _log.info("the GPU's %s took %.0f ms to find out; it is not asked for again", what, seconds * 1000)

    def _reasons(self, card: Any) -> int:
        # Renamed with driver 535; an older package knows one name, a newer one will know the other.
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            question = getattr(self._nvml, name, None)
            if question is not None:
                try:
                    return int(question(card))
                except Exception as error:
                    if not _never(error) or name.endswith("ThrottleReasons"):
                        raise
        raise LookupError("this package has no name for it")

    def _find(self, identity: GpuIdentity) -> None:
        nvml = self._nvml
        cards = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        names = [_text(nvml.nvmlDeviceGetUUID(card)) for card in cards]
        parts = {number: list(self._instances(card)) for number, card in enumerate(cards)}
        for uuid in identity.uuids:
            instances = [(n, part) for n, found in parts.items() for name, part in found if name.startswith(uuid)]
            if len(instances) == 1:
                return self._take(cards[instances[0][0]], instances[0][1])
            matching = [number for number, name in enumerate(names) if name.startswith(uuid)]
            if len(matching) == 1:
                return self._take(cards[matching[0]], self._whole(cards[matching[0]], parts[matching[0]]))
        number = identity.ordinal
        # CUDA counts the fastest first, so the same number is the same card only where that cannot differ.
        kinds = {_text(nvml.nvmlDeviceGetName(card)) for card in cards}
        ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(kinds) == 1
        if not identity.uuids and ordered and number is not None and number < len(cards):
            return self._take(cards[number], self._whole(cards[number], parts[number]))
        raise LookupError(f"none of the {len(cards)} GPUs that NVML lists is {identity}")

    def _take(self, card: Any, part: Any) -> None:
        self._card, self._part = card, part
        self._name = _text(self._nvml.nvmlDeviceGetName(card))

    def _whole(self, card: Any, instances: list[tuple[str, Any]]) -> Any:
        """The card itself; where it is shared out, the only instance, or None, as nobody says which is ours."""
        if not self._is_shared_out(card):
            return card
        return instances[0][1] if len(instances) == 1 else None

    def _is_shared_out(self, card: Any) -> bool:
        try:
            return bool(self._nvml.nvmlDeviceGetMigMode(card)[0])
        except Exception:
            # Cards, drivers and packages that know no MIG say so by an error.
            return False

    def _instances(self, card: Any) -> Iterator[tuple[str, Any]]:
        """UUID and handle of each MIG instance."""
        if not self._is_shared_out(card):
            return
        nvml = self._nvml
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number)
                yield _text(nvml.nvmlDeviceGetUUID(part)), part
            except nvml.NVMLError:
                # A place without an instance.
                continue


def _never(error: Exception) -> bool:
    """Whether asking again is of no use: the GPU or the driver cannot tell it."""
    kind = type(error).__name__
    return kind.endswith(("NotSupported", "NoPermission", "FunctionNotFound", "InvalidArgument")) or isinstance(
        error, (AttributeError, LookupError)
    )


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
