"""A diagnosis as a person reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from h5pack.doctor.advice import Advice, advise
from h5pack.doctor.diagnosis import Diagnosis, Subject
from h5pack.doctor.judgement import judge
from h5pack.doctor.stage import NAMES, Stage
from h5pack.doctor.text import diagnosis_text
from tests.doctor.figures import facts, stages

SUBJECT = Subject(
    "/data/photos.h5", "train", "224x224x3 uint8", 1_281_167, 90_000, "cuda:0 (a GPU)", "built in", True, "Normalize"
)


def diagnosis(**figures: Any) -> Diagnosis:
    """Of a loader that is too slow for its step."""
    usual = {"storage_hot": 900, "loader": 850, "everything": 840, "storage_cold": 300, **figures}
    found, known = stages(used={"loader": 3.9}, **usual), facts(stall=0.72, pinned=False)
    ordered = tuple(found.get(key, Stage(key, reason="it is not there")) for key in NAMES)
    verdict = judge(found, known)
    advice = advise(verdict, found, known)
    return Diagnosis(SUBJECT, known, ordered, verdict, advice, None, ("the weather",), (), 29.9, {"cpus": 8})


def test_a_waterfall_a_verdict_and_advice() -> None:
    lines = diagnosis_text(diagnosis()).splitlines()
    assert lines[:4] == [
        "/data/photos.h5: split train, 1,281,167 images of 224x224x3 uint8",
        "fed by H5Loader with 4 threads in batches of 256; 8 CPUs; device cuda:0 (a GPU)",
        "step: built in; normalize: Normalize",
        "",
    ]
    rows = {name: line for name in NAMES.values() for line in lines if line.startswith(f"{name}  ")}
    assert list(rows) == list(NAMES.values())
    assert "850" in rows["loader only"]
    assert "833 - 867" in rows["loader only"]
    assert " 3.9  " in rows["loader only"]
    assert rows["everything together"].endswith("the step waits 72 % of the time")
    assert rows["storage cold, stored order"].endswith("not measured: it is not there")
    # Longer is faster.
    assert rows["normalize"].count("#") > rows["step alone"].count("#") > rows["loader only"].count("#")
    text = "\n".join(lines)
    assert "The bottleneck is the loader" in text
    assert "The first epoch" in text
    assert text.index("What would make it faster") < text.index("1. Unpinned memory") < text.index("\n2. ")
    assert "- the weather" in text
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    "figures", [{}, {"loader": 0.02, "storage_hot": 0.03, "everything": 0.019, "storage_cold": None}]
)
def test_rates_of_any_size_are_drawn(figures: dict[str, Any]) -> None:
    text = diagnosis_text(diagnosis(**figures))
    assert "#" in text
    assert "nan" not in text


def test_an_interrupted_one() -> None:
    empty = tuple(Stage(key, reason="it was interrupted before") for key in NAMES)
    found = replace(diagnosis(), facts=None, verdict=None, advice=Advice((), ()), stages=empty)
    text = diagnosis_text(found)
    assert "It was interrupted, so there is no verdict" in text
    assert text.count("not measured") == len(NAMES)


def test_without_labels_or_split() -> None:
    found = replace(diagnosis(), subject=replace(SUBJECT, split=None, labels=False))
    lines = diagnosis_text(found).splitlines()
    assert ": all rows, " in lines[0]
    assert "step: built in, without labels; " in lines[2]
