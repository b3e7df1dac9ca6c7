"""Stages are timed, and progress bars start no thread."""

from __future__ import annotations

import io
import sys
import threading

import pytest
from tqdm import tqdm

from h5pack.system import progress
from h5pack.system.progress import Stages, progress_bar
from tests.monitor.fake_clock import FakeClock


def test_bars_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 10)
    threads, stream = threading.active_count(), io.StringIO()
    with progress_bar(4, file=stream, desc="reading", unit=" rows") as bar:
        assert threading.active_count() == threads
        bar.update(3)
        bar.refresh()
    assert "reading" in stream.getvalue()
    assert "3/4" in stream.getvalue()


def test_bars_show_nothing_without_a_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    for disable in (None, False):
        with progress_bar(4, desc="reading", disable=disable) as bar:
            bar.set_postfix_str("fast", refresh=False)
            bar.update(3)
            bar.refresh()
    with Stages(True)("survey", 5) as advance:
        advance(5)


@pytest.mark.parametrize("show", [False, True])
def test_stages_of_one_name_are_added_up(show: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.time, "perf_counter", FakeClock(tick=2.0))
    stages = Stages(show)
    for name in ("survey", "write", "write"):
        with stages(name, 5) as advance:
            advance(5)
    assert stages.seconds == {"survey": 2.0, "write": 4.0}
