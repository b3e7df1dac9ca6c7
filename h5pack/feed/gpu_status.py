"""How busy, full, warm and fast a GPU is: what its driver tells, and nothing that it does not."""

from __future__ import annotations

from dataclasses import dataclass

NOT_AVAILABLE = "not available"


@dataclass(frozen=True)
class GpuStatus:
    """One look at a GPU. None: not available.

    A GPU that is shared out in MIG instances tells the memory of the instance, and temperature, power and throttling of
    the whole card; it does not tell an instance's utilisation.

    Attributes
    ----------
    name : str or None
    utilisation_percent : float or None
        Part of the driver's last sampling period (about 0.2 s to 1 s) in which at least one kernel ran, 0 to 100. A GPU
        that is utilised by 100 % may still be used badly.
    memory_used_bytes, memory_total_bytes : int or None
        By all processes, and in all.
    temperature_celsius : float or None
    power_watts : float or None
    throttle_reasons : tuple of str or None
        Why the clocks are lower than they could be; empty: for no reason. Being idle is none.
    """

    name: str | None = None
    utilisation_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    throttle_reasons: tuple[str, ...] | None = None

    def __str__(self) -> str:
        used, total = self.memory_used_bytes, self.memory_total_bytes
        memory = NOT_AVAILABLE if used is None or total is None else f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB"
        reasons = NOT_AVAILABLE if self.throttle_reasons is None else ", ".join(self.throttle_reasons) or "no"
        return (
            f"{self.name or 'GPU'}: utilisation {_number(self.utilisation_percent, ' %')}, memory {memory}, "
            f"temperature {_number(self.temperature_celsius, ' °C')}, power {_number(self.power_watts, ' W')}, "
            f"throttled: {reasons}"
        )


def _number(value: float | None, unit: str) -> str:
    return NOT_AVAILABLE if value is None else f"{value:.0f}{unit}"
