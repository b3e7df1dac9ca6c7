"""Whole diagnoses of small files: known bottlenecks on a machine whose time is made up, and what may go wrong."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import h5pack
from h5pack.doctor import diagnose as module
from h5pack.doctor import target as target_module
from h5pack.doctor.diagnose import Diagnosis
from h5pack.doctor.measure import Repeat, StageRun
from h5pack.doctor.report import DoctorReport
from h5pack.doctor.target import Target
from h5pack.errors import OptionsError, SizesDifferError, WorkerError
from h5pack.monitor.advice import Remedy
from h5pack.monitor.bottleneck import INTERRUPTED, Bottleneck, Outcome, Stage
from tests.data.packs import threads_end
from tests.doctor import users
from tests.doctor.conftest import Machine
from tests.doctor.test_target import settings
from tests.read.encoded_files import jpegs, write_encoded

ROWS = 200
pytestmark = pytest.mark.usefixtures("hasty")


@pytest.fixture(autouse=True)
def _no_threads_are_left() -> Iterator[None]:
    yield
    assert threads_end()


def diagnose(path: Path, **changes: Any) -> DoctorReport:
    usual: dict[str, Any] = {"batch_size": 10, "window": 1, "model": users.cheap, "seconds": 60.0, "device": "cpu"}
    return h5pack.diagnose(path, **{**usual, **changes})


def test_the_error_for_encoded_images_of_several_sizes_names_no_parameters_of_loaders(tmp_path: Path) -> None:
    path = write_encoded(tmp_path / "x.h5", [*jpegs(9), *jpegs(9, (30, 50))])
    with pytest.raises(SizesDifferError) as caught:
        diagnose(path)
    assert (caught.value.path, caught.value.dataset, caught.value.parameters) == (str(path), "images", ())
    with h5py.File(path, "a") as file:
        file["encoded"], file["other"] = file["images"], np.zeros((18, 8, 8, 3), np.uint8)
    with pytest.raises(SizesDifferError, match=r"--images encoded .*--keep jpeg"):
        diagnose(path, images="encoded")


def medians(report: DoctorReport) -> dict[str, float]:
    """Of the stages that were measured."""
    return {one.stage.value: one.rates.median for one in report.stages if one.rates is not None}


def remedies(report: DoctorReport) -> list[Remedy]:
    return [one.remedy for one in report.advice if one.moves]


def step_of(spend: Callable[[float], None], seconds: float) -> Callable[[], Any]:
    """A factory of a step that takes some time of a machine for each image."""
    return lambda: lambda images, labels: spend(len(images) * seconds)


def test_slow_storage_is_named(path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = type(h5pack.H5Dataset(path).engine)
    read = engine.read

    def slow(self: Any, name: str, *arguments: Any) -> Any:
        if name == "images":
            machine.wait(0.1)
        return read(self, name, *arguments)

    monkeypatch.setattr(engine, "read", slow)
    report = diagnose(path, num_workers=0)
    assert report.verdict.bottlenecks == (Bottleneck.STORAGE,)
    assert report.verdict.outcome is Outcome.LIMITED
    assert report.evidence.read_busy_fraction == pytest.approx(0.0, abs=0.1)
    assert report.evidence.stall_fraction > 0.9
    assert Remedy.FASTER_DISK in remedies(report)
    # 0.1 s for each chunk of ten rows.
    assert medians(report)["storage_hot"] == pytest.approx(10 / 0.1, rel=0.1)


@pytest.mark.parametrize("waits", [True, False])
def test_a_slow_transform_is_named(path: Path, machine: Machine, waits: bool) -> None:
    spend = machine.wait if waits else machine.work

    def transform(image: Any) -> torch.Tensor:
        spend(0.01)
        return torch.from_numpy(np.array(image))

    report = diagnose(path, num_workers=0, transform=transform)
    assert report.verdict.bottlenecks == (Bottleneck.TRANSFORM,)
    assert report.verdict.outcome is Outcome.LIMITED
    assert Remedy.CHEAPER_TRANSFORM in remedies(report)
    assert (Remedy.TRANSFORM_WAITS in remedies(report)) == waits
    assert medians(report)["transform"] == pytest.approx(1 / 0.01, rel=0.1)


@pytest.mark.parametrize("cpus", [1, 4])
def test_a_slow_step_and_too_many_threads_are_named(
    path: Path, machine: Machine, cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "available_cpus", lambda: cpus)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    report = diagnose(path, num_threads=4, model=step_of(machine.work, 0.01))
    assert (report.verdict.outcome, report.verdict.bottlenecks) == (Outcome.FED, (Bottleneck.STEP,))
    assert medians(report)["step"] == pytest.approx(1 / 0.01, rel=0.1)
    last = Remedy.USE_GPU if torch.cuda.is_available() else Remedy.LESS_ARITHMETIC
    assert remedies(report) == [*([Remedy.LOWER_PARALLELISM] if cpus == 1 else []), last]


def test_every_stage_is_measured_or_has_a_reason(path: Path, machine: Machine) -> None:
    shown: list[str] = []
    report = diagnose(path, num_threads=2, seconds=2.0, on_progress=shown.append)
    assert [one.stage for one in report.stages] == list(Stage)
    for one in report.stages:
        assert (one.rates is None) == (one.reason is not None), one
        if one.rates is not None:
            assert one.rates.low <= one.rates.median <= one.rates.high
            assert (one.rates.repeats < 3) == one.late
            assert not one.late or one.stage in (Stage.COLD, Stage.COLD_STORED)
            assert one.images > 0
    assert set(medians(report)) - {"storage_cold", "storage_cold_stored_order"} == {
        "storage_hot", "loader", "normalize", "step", "everything"
    }  # fmt: skip
    assert 0 < report.seconds <= 2.0
    assert not any("load average" in text for text in report.unknown)
    assert f"{Stage.EVERYTHING.words}, repeat 1" in shown
    found = report.to_json()
    assert set(found) == {
        "path", "split", "images", "rows", "hot_rows", "device", "step", "labels", "normalize", "stages", "bottleneck",
        "faults", "asked_batch_size", "image_dataset", "label_dataset", "fed", "verdict",
        "first_epoch", "advice", "notes", "facts", "unknown", "failures",
        "interrupted", "enough_seconds", "seconds", "machine",
    }  # fmt: skip
    assert (found["labels"], found["rows"], found["images"]) == (True, ROWS, "16x12x3 uint8")
    assert (found["facts"]["num_threads"], found["interrupted"]) == (2, False)
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("budget", [0.001, 0.01])
def test_a_budget_that_is_too_small_says_which_is_enough(path: Path, machine: Machine, budget: float) -> None:
    """The smaller budget is over before any stage was tried."""
    seconds, messages = [budget], []
    while len(seconds) < 10:
        try:
            report = diagnose(
                path, seconds=seconds[-1], num_workers=0, batch_size=256, model=step_of(machine.work, 0.01)
            )
            break
        except OptionsError as error:
            (given, parameter, _) = error.parameters
            assert given == f"seconds={seconds[-1]:g}"
            messages.append(str(error))
            seconds.append(float(parameter.removeprefix("seconds=")))
    assert len(seconds) == 2
    # They name the size that is measured, not the one that was asked for.
    assert all(f" {ROWS // 4} " in message and "256" not in message for message in messages)
    assert seconds == sorted(seconds)
    assert report.verdict is not None


_COUNT_MODULES = """
import sys, time
from h5pack.doctor.diagnose import Diagnosis, DiagnoseSettings
clock, counts = time.perf_counter, []
time.perf_counter = lambda: counts.append(len(sys.modules)) or clock()
with Diagnosis(DiagnoseSettings(path=sys.argv[1])) as diagnosis:
    diagnosis.target.load_sample()
    diagnosis.target.make_step()
    print(len(sys.modules) - counts[0])
"""


def test_the_budget_does_not_include_the_imports_of_torch(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _COUNT_MODULES, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100


def test_a_busy_machine_is_mentioned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "getloadavg", lambda: (1_000.0, 0.0, 0.0))
    report = diagnose(path, transform=users.to_float)
    assert "normalize" not in medians(report)
    assert report.evidence.loaded_float
    assert any("load average 1000.0" in text for text in report.unknown)


class Failing(nn.Module):
    """Fails after some calls: at the first, in a trial, or in a repeat."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = iter(range(calls))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if next(self.calls, None) is None:
            raise RuntimeError("out of luck")
        return images.flatten(1)[:, :1]


MODEL, TRANSFORM = {"step", "everything"}, {"transform", "everything"}
BOTH = {"transform": users.failing_transform, "model": users.failing_factory}


@pytest.mark.parametrize(
    ("changes", "failures", "missing"),
    [
        ({"model": users.failing_step}, ["8x3x16x12 float32 on cpu"], MODEL),
        *(({"model": partial(Failing, calls)}, ["out of luck"], MODEL) for calls in (0, 1, 3, 6, 8)),
        ({"transform": users.failing_transform}, ["no such color"], TRANSFORM),
        (BOTH, ["no such color", "weights.pt is not there"], MODEL | TRANSFORM),
    ],
)
def test_a_failure_of_the_user_s_functions_leaves_the_other_stages(
    path: Path, changes: dict[str, Any], failures: list[str], missing: set[str]
) -> None:
    report = diagnose(path, **changes)
    assert all(word in line for word, line in zip(failures, report.failures[: len(failures)], strict=True))
    assert "\n" not in "".join(report.failures)
    measured = {"storage_hot", "loader", "normalize", "step", "everything"}
    assert set(medians(report)) & (measured | missing) == measured - missing
    assert report.verdict.outcome is Outcome.NOT_MEASURED


def test_an_interruption_keeps_what_was_measured(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repeat = StageRun.repeat

    def interrupted(run: StageRun, seconds: float) -> None:
        if run.stage is Stage.NORMALIZE:
            raise KeyboardInterrupt
        repeat(run, seconds)

    monkeypatch.setattr(StageRun, "repeat", interrupted)
    with Diagnosis(settings(path)) as diagnosis:
        with pytest.raises(KeyboardInterrupt):
            diagnosis.run()
        report = diagnosis.report()
    found = {one.stage: one for one in report.stages}
    assert found[Stage.LOADER].rates.repeats == 1
    assert found[Stage.EVERYTHING].reason == INTERRUPTED
    assert report.to_json()["interrupted"] is True


def run_with_drops(path: Path, monkeypatch: pytest.MonkeyPatch, drop: Callable[[], Any], **changes: Any) -> Any:
    """A diagnosis that has run, in which `drop` stands in for dropping the file from the page cache."""
    with Diagnosis(settings(path, **changes)) as diagnosis:
        monkeypatch.setattr(diagnosis.target._pages, "drop", drop)
        diagnosis.run()
    return diagnosis


def test_a_file_that_memory_cannot_hold_is_cold_in_every_epoch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "available_memory", lambda: 1_000)
    diagnosis = run_with_drops(path, monkeypatch, lambda: None)
    assert diagnosis._runs[Stage.EVERYTHING].prepare is not None
    assert {"storage_cold", "everything"} <= set(medians(diagnosis.report()))
    assert diagnosis.report().evidence.fits_cache is False
    found = medians(diagnose(path, **BOTH))
    assert "loader" in found
    assert found.keys().isdisjoint(MODEL | TRANSFORM)


def test_hot_stages_are_hot(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    warm, repeat = Target.warm, StageRun.repeat
    monkeypatch.setattr(Target, "warm", lambda self, seconds: (said.append("warm"), warm(self, seconds)))
    monkeypatch.setattr(StageRun, "repeat", lambda run, seconds: (said.append(run.stage.value), repeat(run, seconds)))
    run_with_drops(path, monkeypatch, lambda: said.append("cold"), transform=users.of_a_batch, num_threads=1)
    state = ""
    for what in said:
        if what in ("warm", "cold"):
            state = what
        elif what in ("storage_hot", "loader", "transform", "everything"):
            assert state == "warm", said
    assert {"cold", "warm", "storage_cold", "storage_hot", "everything"} <= set(said)


def test_pages_that_stay_in_the_cache_leave_the_cold_stages_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = iter([None, None, None])
    report = run_with_drops(path, monkeypatch, lambda: next(dropped, "it stays")).report()
    reasons = {one.stage: one.reason for one in report.stages}
    assert reasons[Stage.COLD] == reasons[Stage.COLD_STORED] == "it stays"
    assert report.failures == ()
    assert report.verdict is not None


def test_no_workers_map_the_file_when_it_is_dropped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    report = run_with_drops(path, monkeypatch, lambda: alive.append(len(active_children())), num_workers=2).report()
    assert len(alive) > 2
    assert not any(alive)
    assert {"storage_cold", "storage_cold_stored_order"} <= set(medians(report))
    assert next(one for one in report.stages if one.stage is Stage.COLD).images


@pytest.mark.parametrize("memory", [1_000, 1 << 40])
def test_the_file_is_closed_when_it_is_dropped(path: Path, monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """A mapping, which is made only while the file is open, would keep its pages in the page cache."""
    monkeypatch.setattr(target_module, "available_memory", lambda: memory)
    opened: list[list[str]] = []

    def drop(_: Path) -> int:
        links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        opened.append([link for link in links if link == os.path.realpath(path)])
        return 0

    monkeypatch.setattr("h5pack.benchmark.ceilings.drop_cache", drop)
    report = diagnose(path, num_workers=0, transform=users.of_one_image)
    assert {"transform", "storage_cold", "storage_cold_stored_order"} <= set(medians(report))
    assert len(opened) > 2
    assert not any(opened)


@pytest.mark.parametrize("memory", [1_000, 1 << 40])
def test_the_loop_is_run_with_one_thread(path: Path, monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """The result is a number if it is certain, else it is listed as unknown."""
    monkeypatch.setattr(target_module, "available_memory", lambda: memory)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    with Diagnosis(settings(path)) as diagnosis:
        diagnosis.run()
        for ratios, found in (
            ([1.1, 1.4, 1.5], 1.4), ([0.9, 1.4, 1.5], None), ([0.5, 0.6, 1.2], 0.6), ([0.5, 0.6, 1.3], None)
        ):  # fmt: skip
            for run, rates in zip(diagnosis._loops, ([100.0] * 3, [100 * ratio for ratio in ratios]), strict=True):
                assert len(run.repeats) >= 3
                run.repeats[:] = [Repeat(100, 100 / rate) for rate in rates]
            diagnosis._unknown.clear()
            diagnosis._collect_evidence(diagnosis._small_measurements())
            report = diagnosis.report()
            assert report.evidence.one_thread_ratio == found
            assert any("PyTorch's 7 threads" in text for text in report.unknown) == (found is None)
            assert any(one.remedy is Remedy.ONE_STEP_THREAD for one in report.advice) == (found == 1.4)


def test_workers_that_cannot_start_are_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As where /dev/shm cannot be written.
    monkeypatch.setattr(DataLoader, "__iter__", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    with pytest.raises(WorkerError):
        diagnose(path, num_workers=1)


def test_a_dataloader_s_workers_are_measured(path: Path) -> None:
    report = diagnose(path, num_workers=1, transform=users.of_one_image)
    assert "transform" in medians(report)
    assert report.evidence.transform_busy_fraction is not None
    assert report.failures == ()
