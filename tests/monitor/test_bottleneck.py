"""Verdicts on made-up numbers, so that each is known to be right."""

from __future__ import annotations

from typing import Any

import pytest

from h5pack.monitor.bottleneck import Bottleneck, Encoding, Evidence, Outcome, Rates, judge, rate_text
from tests.monitor.figures import evidence, rates


def names(figures: dict[str, Any], **known: Any) -> tuple[str, ...]:
    return tuple(one.value for one in judge(evidence(figures, **known)).bottlenecks)


WAITS = {"read_busy_fraction": 0.05}
TOO_LARGE = {"fits_cache": False}
ENCODED = {"encoding": Encoding.CHUNKS}
SLOW = {"storage_hot": 900, "loader": 850, "everything": 840}
ON_CPU = {"on_gpu": False}


@pytest.mark.parametrize(
    ("known", "figures", "named"),
    [
        # The loader reads as fast as storage lets it, and storage waits, decodes, or is memory.
        (WAITS, SLOW, ("storage",)),
        (ENCODED, SLOW, ("decoding",)),
        ({"library_reason": "its layout is compact"}, SLOW, ("decoding",)),
        ({}, SLOW, ("loader",)),
        # Compressed, and yet the disk is what is waited for.
        ({**WAITS, **ENCODED}, SLOW, ("storage",)),
        # Storage is quick, the loader is not.
        (WAITS, {"storage_hot": 9_000, "loader": 850, "everything": 840}, ("loader",)),
        # The loader reaches 60 % of what storage gives.
        (WAITS, {"storage_hot": 1_400, "loader": 850, "everything": 840}, ("storage", "loader")),
        (WAITS, {**SLOW, "storage_hot": None}, ("loader",)),
        # The transform, alone and beside a slow loader.
        ({}, {"transform": 700, "everything": 690}, ("transform",)),
        ({}, {"loader": 950, "storage_hot": 4_000, "transform": 900, "everything": 880}, ("loader",)),
        ({}, {"loader": 990, "storage_hot": 4_000, "transform": 620, "everything": 600}, ("loader", "transform")),
        ({}, {"loader": None, "transform": 850, "everything": 840}, ("transform",)),
        ({}, {"copy": 1_000, "everything": 980}, ("copy",)),
        ({}, {"copy": 1_000, "loader": 1_020, "storage_hot": 4_000, "everything": 950}, ("loader", "copy")),
        ({}, {"normalize": 900, "everything": 880}, ("normalize",)),
        ({}, {"normalize": None, "loader": 4_000, "everything": 2_600}, ("step",)),
        # One after the other on a CPU: 1 / (1/3000 + 1/900) = 692.
        (ON_CPU, {"copy": None, "normalize": 900, "everything": 680}, ("normalize",)),
        (ON_CPU, {"copy": None, "normalize": 3_100, "everything": 1_500}, ("normalize", "step")),
        # Cold in every epoch, as memory cannot hold the file.
        (TOO_LARGE, {"storage_cold": 700, "everything": 690}, ("storage",)),
        (TOO_LARGE, {"storage_cold": 700, "transform": 720, "everything": 690}, ("storage", "transform")),
        (TOO_LARGE, {"storage_cold": 9_000, "transform": 720, "everything": 690}, ("transform",)),
    ],
)
def test_the_slowest_part_of_the_slowest_lane_is_named(
    known: dict[str, Any], figures: dict[str, float | None], named: tuple[str, ...]
) -> None:
    verdict = judge(evidence(figures, **known))
    assert tuple(one.value for one in verdict.bottlenecks) == named
    assert (verdict.outcome, verdict.fed, verdict.certain) == (Outcome.LIMITED, False, True)


def test_stages_that_repeats_do_not_separate_are_named_together() -> None:
    figures = {"copy": 1_000, "everything": 800}
    assert names({**figures, "step": 1_250}) == ("copy",)
    assert names({**figures, "step": Rates(1_250, 990, 1_300, 5)}) == ("copy", "step")
    # One odd repeat does not make twice the speed the same.
    assert names({**figures, "step": Rates(2_500, 990, 2_600, 5)}) == ("copy",)


IN_TURN = {"copy": None, "normalize": 90_000, "everything": 2_100}
ALONE = {"copy": None, "normalize": 9_000, "loader": 4_000}
SHORT = {"copy": 1_000, "everything": 400}


@pytest.mark.parametrize(
    ("figures", "known", "outcome", "named", "fed", "certain", "slower"),
    [
        ({}, {"stall_fraction": 0.02}, Outcome.FED, ("step",), True, True, False),
        # A step that hardly waits is fed, although it is slower than alone.
        (IN_TURN, {**ON_CPU, "stall_fraction": 0.2}, Outcome.LIMITED, ("step",), False, False, True),
        (IN_TURN, {**ON_CPU, "stall_fraction": 0.04}, Outcome.FED, ("step",), True, True, False),
        # The loop is faster than the loader, which is part of it.
        ({"loader": 800, "storage_hot": 4_000, "everything": 1_600}, {}, Outcome.CONTRADICTION, (), None, False, False),
        # The loop is as fast as the step, and yet the step waits.
        ({}, {"stall_fraction": 0.7}, Outcome.CONTRADICTION, (), None, False, False),
        # The step is the slowest, and yet it waits; the copy is, and yet the step hardly waits for it.
        ({"everything": 1_000}, {"stall_fraction": 0.8}, Outcome.CONTRADICTION, (), None, False, False),
        ({**SHORT, "everything": 900}, {"stall_fraction": 0.01}, Outcome.CONTRADICTION, (), None, False, False),
        # The loop does not support the verdict, unless the step waits for the slow copy.
        (SHORT, {"stall_fraction": 0.4}, Outcome.LIMITED, ("copy",), False, False, True),
        (SHORT, {}, Outcome.LIMITED, ("copy",), False, False, True),
        (SHORT, {"stall_fraction": 0.9}, Outcome.LIMITED, ("copy",), False, True, True),
        ({**ALONE, "everything": 900}, ON_CPU, Outcome.LIMITED, ("step",), False, False, True),
        # Without a loop, a fraction of its time means nothing.
        ({**SHORT, "everything": None}, {"stall_fraction": 0.01}, Outcome.LIMITED, ("copy",), None, False, False),
        # Without a step only the feed is known, and without a loader nothing.
        ({**SLOW, "step": None, "everything": None}, WAITS, Outcome.NO_STEP, (), None, False, False),
        ({"loader": None}, {}, Outcome.NO_LOADER, (), None, False, False),
        ({"transform": None}, {}, Outcome.NO_LOADER, (), None, False, False),
    ],
)
def test_a_verdict_is_certain_only_if_the_loop_agrees_with_the_stages(
    figures: dict[str, Any], known: dict[str, Any], outcome: Outcome, named: tuple[str, ...], fed: bool | None,
    certain: bool, slower: bool,
) -> None:  # fmt: skip
    verdict = judge(evidence(figures, **known))
    assert tuple(one.value for one in verdict.bottlenecks) == named
    assert (verdict.outcome, verdict.fed, verdict.certain, verdict.slower) == (outcome, fed, certain, slower)
    feed = figures.get("loader", 36_000)
    assert verdict.feed == (None if outcome is Outcome.NO_LOADER else rates(feed))


def test_the_first_epoch_may_be_slower_than_the_others() -> None:
    verdict = judge(evidence({"storage_cold": 500}))
    assert verdict.fed
    assert verdict.first_epoch == rates(500)
    assert judge(evidence({"storage_cold": 30_000})).first_epoch is None
    # As slow as the loop is anyway.
    assert judge(evidence({"storage_cold": 2_800})).first_epoch is None
    # Every epoch is like the first.
    assert judge(evidence({"storage_cold": 500, "everything": 490}, fits_cache=False)).first_epoch is None


THREADS = {"num_threads": 2, "cpus": 8}
WORKERS = {"num_workers": 2, "cpus": 8}


@pytest.mark.parametrize(
    ("known", "named"),
    [
        ({**THREADS, "transform_wait_fraction": 0.8}, Bottleneck.TRANSFORM),
        ({**THREADS, "transform_wait_fraction": 0.4, "cpus_used": 1.8}, Bottleneck.LOADER),
        # The device waits, and the process does not.
        ({**THREADS, "wait_fraction": 0.02}, Bottleneck.COPY),
        ({"cpus": 8}, Bottleneck.LOADER),
        ({"cpus": 8, "num_workers": 0, "cpus_used": 0.1, **ENCODED}, Bottleneck.LOADER),
        ({**THREADS, "library_reason": "its filter is unknown", "cpus_used": 0.1}, Bottleneck.DECODING),
        ({**WORKERS, **ENCODED, "full_shuffle": True, "cpus_used": 0.1}, Bottleneck.DECODING),
        ({**WORKERS, "full_shuffle": True, "cpus_used": 0.1}, Bottleneck.STORAGE),
        # 80 % of the CPUs that two threads or workers can use.
        ({**THREADS, "cpus_used": 1.59}, Bottleneck.STORAGE),
        ({**THREADS, "cpus_used": 1.61}, Bottleneck.LOADER),
        ({**THREADS, "cpus_used": 0.9, "cpus": 1}, Bottleneck.LOADER),
        ({**WORKERS, **ENCODED, "cpus_used": 1.61}, Bottleneck.DECODING),
        ({**THREADS, "cpus_used": None}, Bottleneck.STORAGE),
        ({**WORKERS, "cpus_used": None}, Bottleneck.LOADER),
    ],
)
def test_counters_of_a_training_loop_name_one_bottleneck(known: dict[str, Any], named: Bottleneck) -> None:
    verdict = judge(Evidence(**{"wait_fraction": 1.0, **known}))
    assert (verdict.outcome, verdict.bottlenecks, verdict.fed) == (Outcome.LIMITED, (named,), False)


def test_rates_of_repeats() -> None:
    texts = [rate_text(value) for value in (0.123456, 9.876, 54.6, 123.4, 12_345.6)]
    assert texts == ["0.123", "9.88", "54.6", "123", "12,346"]
    assert Rates.of([3.0, 1.0, 2.0]) == Rates(2.0, 1.0, 3.0, 3)
    assert rates(100).overlaps(rates(103))
    assert not rates(100).overlaps(rates(105))
