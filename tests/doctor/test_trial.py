"""Which number of threads is tried, and what counts as help."""

from __future__ import annotations

from typing import Any

import pytest

from h5pack.doctor.judgement import judge
from h5pack.doctor.stage import Rates
from h5pack.doctor.trial import PlannedTrial, Trial, plan_trial
from tests.doctor.figures import facts, rates, stages

SLOW = {"storage_hot": 900, "loader": 850, "everything": 840}


@pytest.mark.parametrize(
    ("known", "figures", "planned"),
    [
        ({}, {}, None),
        # Who waits may be more than there are CPUs.
        ({"reading_share": 0.1}, SLOW, PlannedTrial("loader", 16)),
        ({"reading_share": 0.1, "threads": 30}, SLOW, PlannedTrial("loader", 32)),
        ({"reading_share": 0.1, "threads": 40}, SLOW, None),
        ({"reading_share": 0.1}, {**SLOW, "storage_cold": 400}, PlannedTrial("storage_cold", 16)),
        ({}, {"storage_cold": 400}, PlannedTrial("storage_cold", 16)),
        ({"fits_cache": False}, {"storage_cold": 400, "everything": 390}, PlannedTrial("storage_cold", 16)),
        # Who computes wants the CPUs that there are.
        ({}, SLOW, PlannedTrial("loader", 8)),
        ({"threads": 12}, SLOW, PlannedTrial("loader", 8)),
        ({"threads": 8}, SLOW, None),
        ({"encoding": "encoded images are decoded", "threads": 1}, SLOW, PlannedTrial("loader", 8)),
        ({"transformed": True}, {"transform": 700, "everything": 690}, PlannedTrial("transform", 8)),
        (
            {"transformed": True, "transform_share": 0.1, "threads": 8},
            {"transform": 700, "everything": 690},
            PlannedTrial("transform", 32),
        ),
        ({}, {"copy": 700, "everything": 690}, None),
    ],
)
def test_what_is_tried(known: dict[str, Any], figures: dict[str, float], planned: PlannedTrial | None) -> None:
    found, evidence = stages(**figures), facts(**known)
    assert plan_trial(judge(found, evidence), found, evidence) == planned


def test_a_gain_must_stand_out_of_the_repeats() -> None:
    assert Trial("loader", 8, rates(1_000), rates(1_800)).helps
    assert Trial("loader", 8, rates(1_000), rates(1_800)).gain == pytest.approx(1.8)
    assert not Trial("loader", 8, rates(1_000), rates(1_100)).helps
    assert not Trial("loader", 8, rates(1_000), Rates(1_800, 900, 2_000, 3)).helps


def test_what_programs_get() -> None:
    assert Trial("loader", 8, rates(1_000), rates(1_800)).to_json() == {
        "stage": "loader", "name": "loader only", "parallel": 8, "images_per_s": 1_800, "min": 1_764, "max": 1_836,
        "before": {"images_per_s": 1_000, "min": 980, "max": 1_020},
    }  # fmt: skip
