"""Verdicts on figures that are made up, so that each is known to be right."""

from __future__ import annotations

from typing import Any

import pytest

from h5pack.doctor.judgement import judge, rate_text
from h5pack.doctor.stage import Rates, Stage
from tests.doctor.figures import facts, rates, stages


def bottleneck(facts_: dict[str, Any] | None = None, **medians: float | None) -> tuple[str, ...]:
    return judge(stages(**medians), facts(**(facts_ or {}))).bottleneck


def test_a_loop_as_fast_as_its_step_is_fed() -> None:
    verdict = judge(stages(), facts(stall=0.02))
    assert verdict.bottleneck == ("step",)
    assert verdict.fed is True
    assert verdict.sure
    assert verdict.text.startswith("All is well, the step is fed")
    assert "3,000 images/s" in verdict.text
    assert "could give 36,000" in verdict.text
    assert verdict.first_epoch is None


def test_a_loader_that_is_hardly_faster_than_the_step_is_mentioned() -> None:
    verdict = judge(stages(loader=3_600, storage_hot=4_000), facts())
    assert verdict.fed
    assert "little to spare (3,600 images/s)" in verdict.text


WAITS = {"reading_share": 0.05}
YOURS = {"transformed": True}
TOO_LARGE = {"fits_cache": False}
ENCODED = {"encoding": "compressed chunks are decoded"}
SLOW = {"storage_hot": 900, "loader": 850, "everything": 840}


@pytest.mark.parametrize(
    ("known", "figures", "named"),
    [
        # The loader reads as fast as storage lets it, and storage waits, decodes, or is memory.
        (WAITS, SLOW, ("storage",)),
        (ENCODED, SLOW, ("decoding",)),
        ({"library": "its layout is compact"}, SLOW, ("decoding",)),
        ({}, SLOW, ("loader",)),
        # Compressed, and yet the disk is what is waited for.
        ({**WAITS, **ENCODED}, SLOW, ("storage",)),
        # Storage is quick, the loader is not.
        (WAITS, {"storage_hot": 9_000, "loader": 850, "everything": 840}, ("loader",)),
        # Between: the loader gets 60 % of what storage gives.
        (WAITS, {"storage_hot": 1_400, "loader": 850, "everything": 840}, ("storage", "loader")),
        # The transform, alone and beside a slow loader.
        (YOURS, {"transform": 700, "everything": 690}, ("transform",)),
        (YOURS, {"loader": 950, "storage_hot": 4_000, "transform": 900, "everything": 880}, ("loader",)),
        (YOURS, {"loader": 990, "storage_hot": 4_000, "transform": 620, "everything": 600}, ("loader", "transform")),
        ({}, {"copy": 1_000, "everything": 980}, ("copy",)),
        ({}, {"copy": 1_000, "loader": 1_020, "storage_hot": 4_000, "everything": 950}, ("loader", "copy")),
        ({}, {"normalize": 900, "everything": 880}, ("normalize",)),
        # One after the other on a CPU: 1 / (1/3000 + 1/900) = 692.
        ({"on_gpu": False}, {"copy": None, "normalize": 900, "everything": 680}, ("normalize",)),
        ({"on_gpu": False}, {"copy": None, "normalize": 3_100, "everything": 1_500}, ("normalize", "step")),
        # Cold in every epoch, as memory cannot hold the file.
        (TOO_LARGE, {"storage_cold": 700, "everything": 690}, ("storage",)),
        ({**TOO_LARGE, **YOURS}, {"storage_cold": 7e2, "transform": 720, "everything": 690}, ("storage", "transform")),
        ({**TOO_LARGE, **YOURS}, {"storage_cold": 9_000, "transform": 720, "everything": 690}, ("transform",)),
    ],
)  # fmt: skip
def test_the_slowest_part_of_the_slowest_lane_is_named(
    known: dict[str, Any], figures: dict[str, float | None], named: tuple[str, ...]
) -> None:
    verdict = judge(stages(**figures), facts(**known))
    assert verdict.bottleneck == named
    assert verdict.fed is False
    assert verdict.sure
    assert ("one of" in verdict.text) == (len(named) > 1)


def test_a_step_that_hardly_waits_is_fed_though_it_is_slower_than_alone() -> None:
    found = stages(copy=None, normalize=90_000, everything=2_100)
    assert judge(found, facts(on_gpu=False, stall=0.2)).fed is False
    verdict = judge(found, facts(on_gpu=False, stall=0.04))
    assert (verdict.bottleneck, verdict.fed, verdict.sure) == (("step",), True, True)
    assert "gets 2,100 images/s with everything, where it waits 4 % of the time" in verdict.text
    assert judge(stages(copy=1_000, everything=980), facts(stall=0.04)).fed is False


def test_what_repeats_do_not_tell_apart_is_named_together() -> None:
    found = stages(copy=1_000, step=1_250, everything=800)
    assert judge(found, facts()).bottleneck == ("copy",)
    found["step"] = Stage("step", Rates(1_250, 990, 1_300, 5))
    assert judge(found, facts()).bottleneck == ("copy", "step")
    # One odd repeat does not make twice the speed the same.
    found["step"] = Stage("step", Rates(2_500, 990, 2_600, 5))
    assert judge(found, facts()).bottleneck == ("copy",)


def test_the_step_of_a_cpu_shares_it() -> None:
    figures = {"copy": None, "normalize": 20_000, "everything": 2_300}
    verdict = judge(stages(**figures), facts(on_gpu=False, stall=0.2))
    assert verdict.bottleneck == ("step",)
    assert verdict.fed is False
    assert verdict.sure


def test_figures_that_contradict_each_other_give_no_verdict() -> None:
    verdict = judge(stages(loader=800, storage_hot=4_000, everything=1_600), facts())
    assert verdict.bottleneck == ()
    assert not verdict.sure
    assert verdict.text.startswith("No verdict")
    assert "more --seconds" in verdict.text
    waits = judge(stages(), facts(stall=0.7))
    assert (waits.bottleneck, waits.fed, waits.sure) == ((), None, False)
    assert "waited 70 % of the time" in waits.text
    # But a loop at the step's own speed is fed, whatever the loader did alone.
    assert judge(stages(loader=2_000, storage_hot=4_000), facts()).fed


@pytest.mark.parametrize(
    ("figures", "known", "words"),
    [
        ({"everything": 1_000}, {"stall": 0.8}, "the step waits 80 % of the time"),
        ({"copy": 1_000, "everything": 900}, {"stall": 0.01}, "waits only 1 %"),
        ({"copy": 1_000, "everything": 400}, {"stall": 0.4, "load": 0.3}, "they wait for each other"),
        ({"copy": 1_000, "everything": 400}, {"stall": 0.4, "load": 9.0}, "other processes use the CPUs"),
        ({"copy": 1_000, "everything": None}, {}, "everything together was not measured (there is none)"),
    ],
)
def test_a_verdict_that_the_loop_does_not_bear_out_says_so(
    figures: dict[str, float | None], known: dict[str, Any], words: str
) -> None:
    verdict = judge(stages(**figures), facts(**known))
    assert not verdict.sure
    assert words in verdict.text
    assert "not certain" in verdict.text


def test_a_step_that_waits_bears_out_a_slow_feed() -> None:
    found = stages(copy=1_000, everything=400)
    verdict = judge(found, facts(stall=0.9))
    assert verdict.sure
    assert verdict.text.endswith(
        "Together they are slower than alone, as they wait for each other (Python's GIL, memory, "
        "synchronisation), or the machine's speed changed."
    )
    assert not judge(found, facts(stall=None)).sure


def test_too_few_cpus_for_all_are_the_reason_that_is_given() -> None:
    found = stages(used={"everything": 1.98}, copy=None, normalize=9_000, loader=4_000, everything=900)
    verdict = judge(found, facts(on_gpu=False, cpus=2, stall=0.4))
    assert "they share 2 CPUs" in verdict.text
    assert verdict.bottleneck == ("step",)
    assert not verdict.sure


def test_without_a_step_only_the_feed_is_spoken_of() -> None:
    verdict = judge(stages(step=None, everything=None, storage_hot=900, loader=850), facts(**WAITS))
    assert verdict.bottleneck == ()
    assert verdict.fed is None
    assert "the step was not measured (there is none)" in verdict.text
    assert "850 images/s" in verdict.text
    assert "storage" in verdict.text


def test_without_a_loader_there_is_no_verdict() -> None:
    assert "the loader was not measured (there is none)" in judge(stages(loader=None), facts()).text
    transformed = judge(stages(transform=None), facts(transformed=True))
    assert transformed.bottleneck == ()
    assert not transformed.sure
    assert judge({}, facts()).text == "No verdict: the loader was not measured (the measurement was interrupted)."


def test_the_first_epoch_may_be_slower_than_the_others() -> None:
    verdict = judge(stages(storage_cold=500), facts())
    assert verdict.fed
    assert verdict.first_epoch is not None
    assert "500 images/s" in verdict.first_epoch
    assert judge(stages(storage_cold=30_000), facts()).first_epoch is None
    # As slow as the loop is anyway.
    assert judge(stages(storage_cold=2_800), facts()).first_epoch is None
    # Every epoch is like the first.
    assert judge(stages(storage_cold=500, everything=490), facts(fits_cache=False)).first_epoch is None


def test_without_hot_storage_the_loader_is_not_taken_apart() -> None:
    assert bottleneck(WAITS, storage_hot=None, loader=850, everything=840) == ("loader",)
    assert bottleneck({"transformed": True}, loader=None, transform=850, everything=840) == ("transform",)
    assert bottleneck(normalize=None, loader=4_000, everything=2_000) == ("step",)


def test_rates_have_the_digits_that_mean_something() -> None:
    assert [rate_text(value) for value in (0.123456, 9.876, 54.6, 123.4, 12_345.6)] == [
        "0.123", "9.88", "54.6", "123", "12,346",
    ]  # fmt: skip


def test_rates_of_repeats() -> None:
    assert Rates.of([3.0, 1.0, 2.0]) == Rates(2.0, 1.0, 3.0, 3)
    assert rates(100).meets(rates(103))
    assert not rates(100).meets(rates(105))
    assert Stage("loader").name == "loader only"
    assert Stage("loader", rates(10), cpus_used=1.23456, images=5).to_json() == {
        "key": "loader", "name": "loader only", "images_per_s": 10, "min": 9.8, "max": 10.2, "repeats": 5, "images": 5,
        "cpus_used": 1.235, "not_measured": None, "note": None,
    }  # fmt: skip
