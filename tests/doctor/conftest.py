"""Fixtures of the doctor's tests."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from h5pack.doctor import examination
from h5pack.doctor.pacing import REPEATS, Need


def measure_for(monkeypatch: pytest.MonkeyPatch, times: float, seconds: float) -> None:
    """Have each repeat take so many times its least, and so long at least, whatever the budget is.

    A machine that is busy with other tests then takes longer, and refuses nothing.
    """

    def allot(needs: Mapping[str, Need], budget: float, repeats: int) -> dict[str, float]:
        return {key: max(times * need.least_seconds, seconds) for key, need in needs.items()}

    monkeypatch.setattr(examination, "allot", allot)
    monkeypatch.setattr(examination, "repeats_within", lambda needs, seconds: REPEATS)
    monkeypatch.setattr(examination, "_TRIAL_PART", 0.0)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are not about figures."""
    measure_for(monkeypatch, 1.0, 0.0)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are."""
    measure_for(monkeypatch, 3.0, 0.04)
