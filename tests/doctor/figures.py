"""Stages and facts that the tests make up."""

from __future__ import annotations

from typing import Any

from h5pack.doctor.facts import Facts
from h5pack.doctor.stage import COPY, EVERYTHING, HOT, LOADER, NORMALIZE, STEP, TRANSFORM, Rates, Stage

USUAL = {HOT: 40_000, LOADER: 36_000, COPY: 60_000, NORMALIZE: 200_000, STEP: 3_000, EVERYTHING: 2_950}
"""A GPU that is fed well: images/s."""


def rates(median: float, spread: float = 0.02) -> Rates:
    """Repeats around a median."""
    return Rates(median, median * (1 - spread), median * (1 + spread), 5)


def stages(spread: float = 0.02, used: dict[str, float] | None = None, **medians: float | None) -> dict[str, Stage]:
    """The usual stages, some with other images/s; None: not measured."""
    wanted = {**USUAL, **medians}
    return {
        key: Stage(key, reason="there is none")
        if median is None
        else Stage(key, rates(median, spread), cpus_used=(used or {}).get(key))
        for key, median in wanted.items()
    }


def facts(**changes: Any) -> Facts:
    """Of 4 threads on 8 CPUs that feed a GPU with images of 150,528 bytes."""
    usual: dict[str, Any] = {
        "cpus": 8,
        "machine_cpus": 16,
        "workers": None,
        "threads": 4,
        "on_gpu": True,
        "batch_rows": 256,
        "epoch_batches": 400,
        "row_bytes": 150_528,
        "handed_bytes": 150_528,
        "pinned": True,
        "reading_share": 0.97,
        "gpus": 1,
    }
    return Facts(**{**usual, "transformed": TRANSFORM in changes, **changes})
