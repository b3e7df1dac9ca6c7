"""Stages while they are measured."""

from __future__ import annotations

import time

import pytest

from h5pack.doctor.pacing import Slice
from h5pack.doctor.stage_run import StageRun


def test_repeats_become_rates() -> None:
    slices = iter([Slice(10, 1.0, 0.5, passed=12), Slice(30, 1.0, 1.5, passed=30), Slice(20, 1.0, 1.0, passed=20)])
    run = StageRun("loader", lambda seconds: next(slices), note="all of it")
    for _ in range(3):
        run.repeat(1.0)
    stage = run.stage()
    assert stage.rates is not None
    assert (stage.rates.median, stage.rates.low, stage.rates.high, stage.rates.repeats) == (20, 10, 30, 3)
    assert (stage.images, stage.note, stage.cpus_used) == (62, "all of it", 1.0)


def test_cpu_time_is_unknown_where_one_repeat_does_not_know_it() -> None:
    slices = iter([Slice(10, 1.0, 0.5), Slice(30, 1.0, None)])
    run = StageRun("loader", lambda seconds: next(slices))
    run.repeat(1.0)
    run.repeat(1.0)
    assert run.stage().cpus_used is None


def test_what_has_no_figures_has_a_reason() -> None:
    run = StageRun("loader", lambda seconds: Slice(0, 1.0))
    assert run.stage().reason == "it was interrupted before"
    run.repeat(1.0)
    assert run.stage().reason == "no images came through"
    assert run.stage().rates is None


def test_a_first_look_prepares_and_warms() -> None:
    calls: list[str] = []

    def run(seconds: float) -> Slice:
        calls.append(f"run {seconds:g}")
        return Slice(5, 0.25)

    def prepare() -> None:
        calls.append("prepare")
        time.sleep(0.001)

    found = StageRun("everything", run, prepare, warm=1, batches=2)
    need = found.first_look()
    assert calls == ["prepare", "run 0", "prepare", "run 0"]
    assert (need.batch_seconds, need.weight, need.batches) == (0.25, 2.0, 2)
    assert found.slices == []
    calls.clear()
    found.repeat(2.0)
    assert calls == ["prepare", "run 2"]
    # What lies beside the slice counts, too.
    slow = StageRun("loader", lambda seconds: Slice(5, 0.0), lambda: time.sleep(0.02))
    assert slow.first_look().beside_seconds == pytest.approx(0.02, abs=0.019)
