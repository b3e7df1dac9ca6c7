"""Evidence that the tests make up."""

from __future__ import annotations

from typing import Any

from h5pack.monitor.bottleneck import Evidence, Rates, Stage, StageResult

USUAL = {"storage_hot": 40_000, "loader": 36_000, "copy": 60_000, "normalize": 200_000, "step": 3_000}
"""A GPU that is fed well: images/s of the stages, and 2,950 of everything together."""


def rates(median: float, spread: float = 0.02) -> Rates:
    """Repeats around a median."""
    return Rates(median, median * (1 - spread), median * (1 + spread), 5)


def stages(used: dict[str, float] | None = None, **medians: float | Rates | None) -> dict[Stage, StageResult]:
    """The usual stages, some with other images/s; None: not measured."""
    results = {}
    for key, median in {**USUAL, "everything": 2_950, **medians}.items():
        known = median if isinstance(median, Rates) or median is None else rates(median)
        reason = "there is none" if known is None else None
        results[Stage(key)] = StageResult(Stage(key), known, reason, cpus_used=(used or {}).get(key))
    return results


def evidence(figures: dict[str, Any] | None = None, used: dict[str, float] | None = None, **changes: Any) -> Evidence:
    """An H5Loader with 4 threads on 8 CPUs that feeds a GPU with images of 150,528 bytes."""
    usual: dict[str, Any] = {
        "cpus": 8,
        "machine_cpus": 16,
        "num_threads": None if "num_workers" in changes else 4,
        "on_gpu": True,
        "batch_rows": 256,
        "stored_row_bytes": 150_528,
        "loaded_row_bytes": 150_528,
        "pinned": True,
        "read_busy_fraction": 0.97,
        "has_transform": "transform" in (figures or {}),
        "stages": stages(used, **(figures or {})),
    }
    everything, step = (usual["stages"][stage].rates for stage in (Stage.EVERYTHING, Stage.STEP))
    if everything is not None and step is not None:
        # The step waits for the rest of the time.
        usual["stall_fraction"] = max(0.0, 1 - everything.median / step.median)
    return Evidence(**{**usual, **changes})
