"""Fixtures of all tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files made by the tests, in this process or in others, differ in nothing but their content."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
