"""Fixtures of the doctor's tests."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from h5pack.doctor import examination
from h5pack.doctor.pacing import REPEATS, Need


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure each stage as briefly as makes sense, whatever the budget: for tests that are not about figures."""

    def least(needs: Mapping[str, Need], seconds: float, repeats: int) -> dict[str, float]:
        return {key: need.least_seconds for key, need in needs.items()}

    monkeypatch.setattr(examination, "allot", least)
    monkeypatch.setattr(examination, "repeats_within", lambda needs, seconds: REPEATS)
    monkeypatch.setattr(examination, "_TRIAL_PART", 0.0)
