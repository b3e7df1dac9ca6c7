"""A report for programs and for people, and its figure."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image

from h5pack.doctor.report import DoctorReport, TargetSummary, draw_stages
from h5pack.errors import OptionsError
from h5pack.monitor.advice import advise
from h5pack.monitor.bottleneck import MAX_STALL, Bottleneck, Evidence, Rates, Stage, StageResult, judge
from tests.monitor.figures import evidence
from tests.monitor.test_bottleneck import random_evidence

TARGET = TargetSummary(
    "/data/photos.h5", "train", "224x224x3 uint8", 1_281_167, 90_000, "cuda:0 (a GPU)", "built in", True, "Normalize"
)


def report_of(found: Evidence) -> DoctorReport:
    verdict = judge(found)
    results = tuple(found.stages.get(stage, StageResult(stage, reason="it is not there")) for stage in Stage)
    advice = tuple(advise(verdict, found))
    return DoctorReport(TARGET, found, results, verdict, advice, ("the weather",), (), 45, 29.9, {"cpus": 8})


def report(**figures: Any) -> DoctorReport:
    """Of a loader that is too slow for its step."""
    usual = {"storage_hot": 900, "loader": 850, "everything": 840, "storage_cold": 300, **figures}
    return report_of(evidence(usual, {"loader": 3.9}, stall_fraction=0.72, pinned=False))


def test_the_text_begins_with_the_verdict_and_what_to_do() -> None:
    text = report().to_text()
    verdict, advice, head, table, first_epoch, others, unknown = text.split("\n\n")
    assert verdict.replace("\n", " ") == report().verdict_text
    for part in ("The loader limits", "72 %", "850 images/s", "3,000 images/s", "3.57 times"):
        assert part in verdict.replace("\n", " ")
    assert [line[:2] for line in advice.splitlines() if line[0].isdigit()] == ["1.", "2."]
    assert head.splitlines() == [
        "/data/photos.h5: split train, 1,281,167 images of 224x224x3 uint8",
        "fed by H5Loader with 4 threads in batches of 256; 8 CPUs; device cuda:0 (a GPU)",
        "step: built in; normalize: Normalize",
    ]
    lines = table.splitlines()
    rows = {stage: line for stage in Stage for line in lines if line.startswith(f"{stage.words}  ")}
    assert list(rows) == list(Stage)
    for part in ("850", "833 - 867", " 3.9  "):
        assert part in rows[Stage.LOADER]
    assert "72 %" in rows[Stage.EVERYTHING]
    assert rows[Stage.COLD_STORED].endswith("it is not there")
    # Longer is faster.
    sizes = [rows[stage].count("#") for stage in (Stage.NORMALIZE, Stage.STEP, Stage.LOADER)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
    assert "300 images/s" in first_epoch
    assert "num_threads=8" in others
    assert "- the weather" in unknown
    assert max(map(len, text.splitlines())) <= 120
    assert report().parameters == ("seconds=45", "num_threads=8", "pin_memory=True", "num_threads")
    assert all(parameter in text for parameter in report().parameters[1:])


@pytest.mark.parametrize(
    "figures", [{}, {"loader": 0.02, "storage_hot": 0.03, "everything": 0.019, "storage_cold": None}]
)
def test_rates_of_any_size_are_drawn(figures: dict[str, Any]) -> None:
    text = replace(report(**figures), target=replace(TARGET, split=None, labels=False)).to_text()
    assert "#" in text
    assert "nan" not in text
    assert ": all rows, " in text
    assert ", without labels; " in text


def interrupted() -> DoctorReport:
    """Interrupted at once."""
    empty = tuple(StageResult(stage, reason="late") for stage in Stage)
    return replace(report(), evidence=None, verdict=None, advice=(), stages=empty)


def test_an_interrupted_report_has_no_verdict() -> None:
    found = interrupted()
    assert "Interrupted" in found.to_text()
    assert found.to_text().count("not measured") == len(Stage)
    assert (found.to_json()["interrupted"], found.to_json()["verdict"]) == (True, None)


def test_stages_in_json() -> None:
    found = report_of(evidence({"storage_hot": None}, {"loader": 1.23456})).to_json()
    stages = {stage["key"]: stage for stage in found["stages"]}
    assert stages["loader"] == {
        "key": "loader", "name": "loader only", "images_per_s": 36_000, "min": 35_280, "max": 36_720, "repeats": 5,
        "images": 0, "cpus_used": 1.235, "not_measured": None, "note": None,
    }  # fmt: skip
    assert (stages["storage_hot"]["images_per_s"], stages["storage_hot"]["not_measured"]) == (None, "there is none")


ON_CPU = {"on_gpu": False, "gpus": 0}
SLOW = {"storage_hot": 900, "loader": 850, "everything": 840}


@pytest.mark.parametrize(
    ("figures", "known", "parts"),
    [
        ({}, {"stall_fraction": 0.02}, ["The step limits", "2 % of the time", "gain at most 2 %"]),
        ({}, {"stall_fraction": 0.02, "stall_range": (0.011, 0.034)}, ["2 % (1 to 3) of the time"]),
        ({"copy": None, "everything": 1_500, "normalize": 5_000},
         {**ON_CPU, "stall_fraction": 0.04, "normalize_fraction": 0.36},
         ["4 %", "normalizing takes 36 %", "the step itself 60 %", "gain at most 4 %"]),
        ({"copy": None, "everything": 1_500, "normalize": 5_000},
         {**ON_CPU, "stall_fraction": 0.04, "step_threads": 2, "one_thread_ratio": 7.7},
         ["2 threads", "with one, the training is 7.7 times as fast", "gain at most 4 %"]),
        ({"copy": None, "everything": 1_000, "normalize": 9_000}, {**ON_CPU, "stall_fraction": 0.04},
         ["2.2 times as fast as in the loop"]),
        (SLOW, {"read_busy_fraction": 0.05}, ["Storage limits", "900 images/s", "95 % of the time", "3.57 times"]),
        ({"storage_cold": 700, "everything": 690}, {"fits_cache": False}, ["cold", "700 images/s", "memory"]),
        (SLOW, {"library_reason": "its layout is compact"}, ["Decoding limits", "HDF5 library"]),
        ({"transform": 700, "everything": 690}, {}, ["The transform on the host limits", "700 images/s", "77 %"]),
        ({"copy": 1_000, "loader": 1_020, "storage_hot": 4_000, "everything": 950}, {}, ["The loader or the copy"]),
        ({"everything": 1_000}, {"stall_fraction": 0.8}, ["waits 80 %", "3,000 images/s", "36,000", "3 times"]),
        ({"loader": None}, {}, ["'loader only'", "(there is none)"]),
        ({"step": None, "everything": None}, {}, ["'step alone'", "(there is none)", "36,000 images/s"]),
        ({}, {"stall_fraction": 0.3, "stall_range": (0.02, 0.6)}, ["too noisy", "from 2 to 60 %"]),
        ({"loader": 800, "everything": 1_600}, {}, ["too noisy", "800 images/s", "1,600 images/s"]),
        # Even without a verdict, the slower one of the loader and the step is named.
        ({"loader": 800, "step": 3_000, "everything": 1_600}, {}, ["the loader was slower in every repeat"]),
        ({"loader": 9_000, "step": 800, "everything": 1_600}, {}, ["the step was slower in every repeat"]),
    ],
)  # fmt: skip
def test_the_verdict_in_words(figures: dict[str, Any], known: dict[str, Any], parts: list[str]) -> None:
    text = report_of(evidence(figures, {"everything": 1.98}, **known)).verdict_text
    for part in parts:
        assert part in text
    assert "  " not in text
    assert "None" not in text


def test_a_share_of_normalizing_that_contradicts_its_speed_is_not_stated() -> None:
    known = {**ON_CPU, "stall_fraction": 0.04, "normalize_fraction": 0.36}
    for speed, stated in ((5_000, True), (50_000, False), (None, False), (Rates(5_000, 900, 9_000, 5), False)):
        text = report_of(evidence({"copy": None, "everything": 1_500, "normalize": speed}, **known)).verdict_text
        assert ("36 %" in text) is stated
        assert "gain at most 4 %" in text
        assert ("'normalize' (900 to 9,000 images/s)" in text) is isinstance(speed, Rates)


@pytest.mark.parametrize("seed", range(100))
def test_normalizing_is_named_on_a_cpu_only_with_its_share(seed: int) -> None:
    draw = Random(seed)
    figures = {"copy": None, "everything": 1_000, "normalize": draw.uniform(900, 9_000)}
    share = draw.uniform(0.0, 0.9)
    made = report_of(evidence(figures, **{**ON_CPU, "stall_fraction": 0.04, "normalize_fraction": share}))
    if Bottleneck.NORMALIZE in made.verdict.bottlenecks:
        assert f"{100 * share:.0f} %" in made.verdict_text


def test_a_lowered_batch_size_is_explained() -> None:
    found = report()
    assert not any("only" in line for line in found.head())
    few = replace(found, target=replace(TARGET, rows=200, asked_batch_size=1_000))
    assert "256 (reduced, because there are only 200 images)" in few.head()[1]


def test_the_speed_with_one_thread_is_given_if_it_is_known() -> None:
    for ratio in (None, 0.83, 1.52):
        known = evidence({}, **{**ON_CPU, "stall_fraction": 0.02, "step_threads": 2, "one_thread_ratio": ratio})
        assert sum(f" {ratio} times as fast" in line for line in report_of(known).head()) == (ratio is not None)


def test_fewer_threads_are_advised_only_for_a_step_in_several_on_the_cpu() -> None:
    late = {Stage.EVERYTHING: StageResult(Stage.EVERYTHING, None, "late", late=True)}
    for known, advised in (({**ON_CPU, "step_threads": 2}, True), ({**ON_CPU, "step_threads": 1}, False),
                           ({"on_gpu": True, "step_threads": 2}, False)):  # fmt: skip
        for stages, more in (({}, {"stall_fraction": 0.3, "stall_range": (0.02, 0.6)}), (late, {})):
            found = evidence(**known, **more)
            text = report_of(replace(found, stages={**found.stages, **stages})).verdict_text
            assert ("set_num_threads" in text) is advised


@pytest.mark.parametrize("rates_of_loop", [Rates(900, 900, 900, 1), None])
def test_too_little_time_is_said_first_with_enough(rates_of_loop: Rates | None) -> None:
    found = evidence()
    late = StageResult(Stage.EVERYTHING, rates_of_loop, None if rates_of_loop else "late", late=True)
    first = report_of(replace(found, stages={**found.stages, Stage.EVERYTHING: late})).to_text().partition("\n\n")[0]
    assert "seconds=45" in first
    assert "'everything together'" in first
    assert "limits the training: '" in first


@pytest.mark.parametrize("seed", range(100))
def test_whatever_was_measured_the_statement_comes_first_and_has_a_share_of_waiting_that_fits(seed: int) -> None:
    found = random_evidence(Random(seed))
    made = report_of(found)
    first = made.to_text().partition("\n\n")[0].replace("\n", " ")
    assert first == " ".join(made.verdict_text.split())
    waits = [int(number) for number in re.findall(r"waits(?: for data)? (\d+) %", first)]
    if made.verdict.fed is not None:
        assert waits == [round(100 * found.stall_fraction)]
        assert (found.stall_fraction <= MAX_STALL) == made.verdict.fed
    else:
        assert waits == []


def test_every_stage_has_a_bar_and_the_bottleneck_a_color(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    found = report()
    draw_stages(found, tmp_path / "a.png")
    axes = figures[0].axes[0]
    medians = [one.rates.median for one in found.stages if one.rates is not None]
    assert [label.get_text() for label in axes.get_yticklabels()] == [one.stage.words for one in found.stages]
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert ends == pytest.approx(medians)
    color = axes.patches[ends.index(850)].get_facecolor()
    assert [end for end, bar in zip(ends, axes.patches, strict=True) if bar.get_facecolor() == color] == [850]
    words = [text.get_text() for text in axes.texts]
    assert "850   bottleneck" in words
    assert sum("it is not there" in word for word in words) == len(found.stages) - len(medians)
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size[0] > 800
    draw_stages(interrupted(), tmp_path / "a.svg")
    assert len(figures[1].axes[0].patches) == 0
    with pytest.raises(OptionsError):
        draw_stages(found, tmp_path / "a.jpg")
