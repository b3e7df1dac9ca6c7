"""Whole examinations of small files: three that are known to be ill, and much that can be amiss."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from h5pack.doctor.diagnosis import Diagnosis
from h5pack.doctor.examination import Examination, diagnose
from h5pack.doctor.options import DoctorOptions
from h5pack.doctor.patient import Patient
from h5pack.doctor.stage import NAMES
from h5pack.doctor.stage_run import StageRun
from h5pack.errors import OptionsError, PackFormatError, SizesDifferError
from h5pack.read import storage
from tests.doctor import users
from tests.feed.packs import converted, labelled, threads_end, values, write

ROWS = 203


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return labelled(tmp_path / "x.h5", ROWS)


@pytest.fixture(autouse=True)
def _no_threads_are_left() -> Iterator[None]:
    yield
    assert threads_end()


def user(name: str) -> str:
    return f"{users.__name__}:{name}"


def options(path: Path, **changes: Any) -> DoctorOptions:
    usual = {"batch_size": 16, "window": 2, "threads": 2, "model": user("cheap"), "seconds": 60.0}
    return DoctorOptions(path, **{**usual, **changes})


def medians(diagnosis: Diagnosis) -> dict[str, float | None]:
    return {stage.key: None if stage.rates is None else stage.rates.median for stage in diagnosis.stages}


@pytest.mark.usefixtures("steady")
def test_slow_storage_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = storage.preadv

    def slow(*arguments: int) -> int:
        time.sleep(0.002)
        return real(*arguments)

    monkeypatch.setattr(storage, "preadv", slow)
    diagnosis = diagnose(options(path))
    assert diagnosis.verdict is not None
    assert "storage" in diagnosis.verdict.bottleneck
    assert not {"step", "transform", "normalize", "decoding"} & set(diagnosis.verdict.bottleneck)
    assert diagnosis.verdict.fed is False
    assert diagnosis.facts is not None
    assert diagnosis.facts.reading_share is not None
    assert diagnosis.facts.reading_share < 0.5
    assert diagnosis.facts.stall is not None
    assert diagnosis.facts.stall > 0.5
    assert any("faster disk" in text for text in diagnosis.advice.moves)
    # Two threads, 2 ms for each chunk of ten rows.
    found = medians(diagnosis)
    assert found["storage_hot"] is not None
    assert found["storage_hot"] < 2 * 10 / 0.002
    assert diagnosis.failures == ()


@pytest.mark.usefixtures("steady")
def test_a_slow_transform_is_named(path: Path) -> None:
    diagnosis = diagnose(options(path, threads=1, transform=user("slow_transform")))
    assert diagnosis.verdict is not None
    assert diagnosis.verdict.bottleneck == ("transform",)
    assert diagnosis.verdict.fed is False
    assert diagnosis.advice.moves[0].startswith("The transform on the host")
    assert any("waits more than it computes" in text for text in diagnosis.advice.moves)
    found = medians(diagnosis)
    assert found["transform"] is not None
    # One thread, 10 ms for each batch of 16.
    assert found["transform"] <= 1.1 * 16 / 0.01
    assert found["loader"] is not None
    assert found["loader"] > 2 * found["transform"]


@pytest.mark.usefixtures("steady")
def test_a_slow_step_is_named(path: Path) -> None:
    diagnosis = diagnose(options(path, model=user("slow_step")))
    assert diagnosis.verdict is not None
    assert diagnosis.verdict.bottleneck == ("step",)
    assert diagnosis.verdict.fed is True
    assert diagnosis.verdict.text.startswith("All is well")
    found = medians(diagnosis)
    assert found["step"] is not None
    assert found["step"] <= 16 / 0.02
    assert diagnosis.subject.step == f"{user('slow_step')}, a Sleeper of 0 parameters"


def test_every_stage_is_measured_or_has_a_reason(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.0, 0.0))
    begun = time.perf_counter()
    diagnosis = diagnose(options(path, seconds=1.5), said.append)
    assert [stage.key for stage in diagnosis.stages] == list(NAMES)
    for stage in diagnosis.stages:
        assert (stage.rates is None) == (stage.reason is not None), stage
        if stage.rates is not None:
            assert stage.rates.low <= stage.rates.median <= stage.rates.high
            assert stage.rates.repeats >= 3
            assert stage.images > 0
    found = {stage.key: stage.reason for stage in diagnosis.stages}
    assert found["transform"] == "no --transform is given"
    assert found["copy"] in ("there is no GPU", "the step runs on the CPU", None)
    for key in ("storage_hot", "loader", "normalize", "step", "everything"):
        assert found[key] is None
    assert any("host synchronisation" in text for text in diagnosis.unknown) == (diagnosis.facts.on_gpu is False)  # type: ignore[union-attr]
    assert diagnosis.seconds == pytest.approx(1.5, abs=1.5)
    assert diagnosis.seconds <= time.perf_counter() - begun
    assert "reading the first rows" in said
    assert "everything together, repeat 1" in said
    assert diagnosis.subject.labels
    assert (diagnosis.subject.rows, diagnosis.subject.images) == (ROWS, "16x12x3 uint8")
    assert not any("load average" in text for text in diagnosis.unknown)
    programs = diagnosis.to_json()
    assert set(programs) == {
        "path", "split", "images", "rows", "hot_rows", "device", "step", "labels", "normalize", "stages", "bottleneck",
        "fed", "sure", "verdict", "first_epoch", "advice", "notes", "trial", "facts", "unknown", "failures",
        "interrupted", "seconds", "machine",
    }  # fmt: skip
    assert programs["facts"]["threads"] == 2
    assert programs["interrupted"] is False
    assert [stage["key"] for stage in programs["stages"]] == list(NAMES)
    assert json.loads(json.dumps(programs)) == programs


@pytest.mark.usefixtures("hasty")
def test_float_batches_are_found(path: Path) -> None:
    diagnosis = diagnose(options(path, transform=user("to_float"), device="cpu"))
    assert diagnosis.facts is not None
    assert diagnosis.facts.handed_float
    assert diagnosis.facts.handed_bytes == 4 * diagnosis.facts.row_bytes == 4 * 576
    assert any("4.0 times what is stored" in text for text in (*diagnosis.advice.moves, *diagnosis.advice.notes))
    found = {stage.key: stage.reason for stage in diagnosis.stages}
    assert found["normalize"] == "the images are float32 already"
    assert diagnosis.verdict is not None
    assert "normalize" not in diagnosis.verdict.bottleneck


MODEL, TRANSFORM = {"step", "everything"}, {"transform", "everything"}


@pytest.mark.parametrize(
    ("changes", "failure", "missing"),
    [
        (
            {"model": user("failing_factory")},
            "--model tests.doctor.users:failing_factory failed (FileNotFoundError: weights.pt is not there)",
            MODEL,
        ),
        ({"model": "no_such_module:f"}, "--model no_such_module:f: 'no_such_module' cannot be imported", MODEL),
        ({"model": user("failing_step")}, "failed on a batch of 16x3x16x12 float32 on cpu (RuntimeError: mat1", MODEL),
        ({"model": user("Once")}, "step alone: RuntimeError: out of luck", MODEL),
        ({"transform": user("failing_transform")}, "failed on a batch (ValueError: no such colour)", TRANSFORM),
        ({"transform": "json:nothing"}, "--transform json:nothing: 'json' has no 'nothing'", TRANSFORM),
    ],
)
@pytest.mark.usefixtures("hasty")
def test_what_fails_of_the_user_s_leaves_the_rest(
    path: Path, changes: dict[str, Any], failure: str, missing: set[str]
) -> None:
    diagnosis = diagnose(options(path, device="cpu", **changes))
    assert failure in diagnosis.failures[0]
    assert "\n" not in "".join(diagnosis.failures)
    found = medians(diagnosis)
    measured = {"storage_hot", "loader", "normalize", "step", "everything"} - missing
    assert {key for key in found if found[key] is not None} >= measured
    assert {key for key in missing if found[key] is not None} == set()
    assert diagnosis.verdict is not None
    assert diagnosis.verdict.bottleneck == ()
    assert "No verdict" in diagnosis.verdict.text


@pytest.mark.usefixtures("hasty")
def test_an_interruption_keeps_what_was_measured(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repeat = StageRun.repeat

    def interrupted(run: StageRun, seconds: float) -> None:
        if run.key == "normalize":
            raise KeyboardInterrupt
        repeat(run, seconds)

    monkeypatch.setattr(StageRun, "repeat", interrupted)
    examination = Examination(options(path))
    with pytest.raises(KeyboardInterrupt):
        examination.run()
    diagnosis = examination.diagnosis()
    examination.close()
    found = {stage.key: stage for stage in diagnosis.stages}
    assert found["loader"].rates is not None
    assert found["loader"].rates.repeats == 1
    assert found["everything"].reason == "it was interrupted before"
    assert diagnosis.verdict is None
    assert diagnosis.to_json()["interrupted"] is True


def test_a_budget_that_is_too_small_says_what_would_do(path: Path) -> None:
    with pytest.raises(OptionsError, match=r"seconds is 0.01, too little .*; give --seconds [\d.]+ or ") as caught:
        diagnose(options(path, seconds=0.01))
    assert "\n" not in str(caught.value)
    with pytest.raises(OptionsError, match=r"seconds is 0\.3, too little") as caught:
        diagnose(options(path, seconds=0.3, model=user("slow_step")))
    suggested = float(str(caught.value).split("--seconds ")[1].split()[0])
    assert 0.3 < suggested < 5
    # A machine that others use may be slower by now.
    assert diagnose(options(path, seconds=1.5 * suggested, model=user("slow_step"))).verdict is not None


def test_files_that_cannot_be_examined(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no HDF5")
    write(tmp_path / "none.h5", labels=np.arange(3))
    write(tmp_path / "empty.h5", chunks=None, images=np.zeros((0, 4, 4, 3), np.uint8))
    for name, message in (
        ("missing.h5", "no such file"),
        ("text", "not an HDF5 file"),
        ("none.h5", "images"),
        ("empty.h5", "'images' has no rows; there is nothing to measure"),
    ):
        with pytest.raises(PackFormatError, match=message):
            diagnose(options(tmp_path / name))
    path = converted(tmp_path)
    with pytest.raises(PackFormatError, match="no split 'val'"):
        diagnose(options(path, split="val"))
    with pytest.raises(PackFormatError, match="colours"):
        diagnose(options(path, labels="colours"))


def test_devices_that_cannot_be_measured(path: Path) -> None:
    for changes, message in (
        ({"device": "meta"}, "device 'meta' cannot be measured; give 'cpu' or 'cuda'"),
        ({"device": "gpu"}, "device 'gpu' is none"),
        ({"device": "cpu", "pin": True}, "leave --pin out"),
    ):
        with pytest.raises(OptionsError, match=message):
            diagnose(options(path, **changes))


@pytest.mark.usefixtures("hasty")
def test_one_row_and_no_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "one.h5", chunks=1, images=values(1))
    diagnosis = diagnose(options(path, batch_size=256, model=None, device="cpu"))
    assert diagnosis.failures == ()
    assert diagnosis.facts is not None
    assert (diagnosis.facts.batch_rows, diagnosis.facts.epoch_batches) == (1, 1)
    assert not diagnosis.subject.labels
    assert diagnosis.subject.step.startswith("built in, a small network of")
    assert medians(diagnosis)["everything"] is not None


@pytest.mark.usefixtures("hasty")
def test_a_batch_larger_than_the_rows(tmp_path: Path) -> None:
    diagnosis = diagnose(options(converted(tmp_path), split="test", batch_size=1_000))
    assert diagnosis.facts is not None
    assert diagnosis.facts.batch_rows == 12
    assert diagnosis.subject.normalize == "Normalize, by the statistics of the file"


def encoded(path: Path, sizes: list[tuple[int, int]]) -> Path:
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("images", (len(sizes),), h5py.vlen_dtype(np.uint8))
        for number, size in enumerate(sizes):
            name = path.with_name("row.png")
            Image.fromarray(np.full((*size, 3), number, np.uint8)).save(name)
            rows[number] = np.frombuffer(name.read_bytes(), np.uint8)
    return path


@pytest.mark.usefixtures("hasty")
def test_encoded_images(tmp_path: Path) -> None:
    diagnosis = diagnose(options(encoded(tmp_path / "x.h5", [(9, 7)] * 40)))
    assert diagnosis.facts is not None
    assert diagnosis.facts.encoding == "encoded images are decoded"
    assert diagnosis.facts.library is None
    assert diagnosis.subject.images == "9x7x3 uint8"
    with pytest.raises(SizesDifferError) as caught:
        diagnose(options(encoded(tmp_path / "y.h5", [(9, 7)] * 20 + [(5, 5)] * 20)))
    assert "\n" not in str(caught.value)


def test_files_that_are_read_in_other_ways(tmp_path: Path) -> None:
    compressed = Patient(options(write(tmp_path / "z.h5", compression="gzip", images=values())))
    pieces = Patient(options(write(tmp_path / "p.h5", chunks=(10, 8, 12, 3), images=values())))
    floats = Patient(options(write(tmp_path / "f.h5", images=values(dtype="f4"))))
    found = []
    for patient in (compressed, pieces, floats):
        patient.warm(0.0)
        patient.take_sample()
        found.append(patient.facts({}))
        patient.close()
    assert [facts.encoding for facts in found] == [
        "compressed chunks are decoded", "images cut by chunks are put together", None,
    ]  # fmt: skip
    assert (found[2].stored_float, found[2].handed_float) == (True, True)
    assert compressed.fits_cache


@pytest.mark.usefixtures("hasty")
def test_a_file_that_memory_cannot_hold_is_cold_in_every_epoch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.doctor.patient.available_memory", lambda: 1_000)
    examination = Examination(options(path))
    patient = examination._patient
    assert not patient.fits_cache
    monkeypatch.setattr(patient._pages, "drop", lambda: None)
    examination.run()
    examination.close()
    assert examination._runs["everything"].prepare is not None
    assert examination._runs["storage_cold"].slices
    assert examination.diagnosis().facts is not None
    assert examination.diagnosis().facts.fits_cache is False  # type: ignore[union-attr]


@pytest.mark.usefixtures("hasty")
def test_hot_stages_are_hot(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examination = Examination(options(path, transform=user("slow_transform"), threads=1))
    patient, said, repeat = examination._patient, [], StageRun.repeat
    warm = patient.warm
    monkeypatch.setattr(patient, "warm", lambda seconds: (said.append("warm"), warm(seconds)))
    monkeypatch.setattr(patient._pages, "drop", lambda: said.append("cold"))
    monkeypatch.setattr(StageRun, "repeat", lambda run, seconds: (said.append(run.key), repeat(run, seconds)))
    examination.run()
    examination.close()
    assert examination.diagnosis().trial is not None
    state = ""
    for what in said:
        if what in ("warm", "cold"):
            state = what
        elif what in ("storage_hot", "loader", "transform", "everything"):
            assert state == "warm", said
    assert {"cold", "warm", "storage_cold", "storage_hot", "everything"} <= set(said)


@pytest.mark.usefixtures("hasty")
def test_pages_that_stay_leave_the_cold_stages_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examination = Examination(options(path))
    dropped = iter([None, None, None])
    monkeypatch.setattr(examination._patient._pages, "drop", lambda: next(dropped, "it stays"))
    examination.run()
    examination.close()
    reasons = {stage.key: stage.reason for stage in examination.diagnosis().stages}
    assert reasons["storage_cold"] == reasons["storage_cold_stored_order"] == "it stays"
    assert examination.diagnosis().failures == ()
    assert examination.diagnosis().verdict is not None


@pytest.mark.usefixtures("hasty")
def test_a_dataloader_s_workers_feed(path: Path) -> None:
    diagnosis = diagnose(options(path, threads=None, workers=1, transform=user("of_one_image"), device="cpu"))
    assert diagnosis.facts is not None
    assert diagnosis.facts.feeder == "a DataLoader with 1 worker"
    assert diagnosis.facts.handed_float
    assert diagnosis.facts.transform_share is not None
    assert medians(diagnosis)["transform"] is not None
    assert diagnosis.failures == ()


def test_the_threads_of_one_cpu(path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        patient = Patient(options(path, threads=None))
        patient.warm(0.0)
        patient.take_sample()
        facts = patient.facts({})
        patient.close()
    finally:
        os.sched_setaffinity(0, allowed)
    assert (facts.cpus, facts.threads) == (1, 1)


@pytest.mark.usefixtures("hasty")
def test_a_trial_is_made_where_it_may_tell(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = diagnose(options(path, threads=1, transform=user("slow_transform")))
    trial = diagnosis.trial
    assert trial is not None
    assert (trial.stage, trial.parallel) == ("transform", 4)
    assert trial.before.repeats == trial.after.repeats == 3
    # One thread takes 10 ms for each batch of 16.
    assert trial.before.median <= 1.1 * 16 / 0.01
    assert any(f"measured: {trial.gain:.2f} times" in text for text in diagnosis.advice.moves)


@pytest.mark.usefixtures("hasty")
def test_a_machine_that_others_use(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1_000.0, 0.0, 0.0))
    assert any("load average 1000.0" in text for text in diagnose(options(path)).unknown)
