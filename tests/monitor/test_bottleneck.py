"""Verdicts on made-up numbers, so that each is known to be right."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from h5pack.monitor.bottleneck import (
    FEED,
    MAX_STALL,
    Bottleneck,
    Encoding,
    Evidence,
    Outcome,
    Rates,
    Stage,
    StageResult,
    judge,
    rate_text,
)
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
        # Cold in every epoch, as memory cannot hold the file.
        (TOO_LARGE, {"storage_cold": 700, "everything": 690}, ("storage",)),
        (TOO_LARGE, {"storage_cold": 700, "transform": 720, "everything": 690}, ("storage", "transform")),
        (TOO_LARGE, {"storage_cold": 9_000, "transform": 720, "everything": 690}, ("transform",)),
    ],
)
def test_what_the_step_waits_for_is_named(
    known: dict[str, Any], figures: dict[str, float | None], named: tuple[str, ...]
) -> None:
    verdict = judge(evidence(figures, **known))
    assert tuple(one.value for one in verdict.bottlenecks) == named
    assert (verdict.outcome, verdict.fed) == (Outcome.LIMITED, False)


def test_stages_that_repeats_do_not_separate_are_named_together() -> None:
    figures = {"copy": 1_000, "storage_hot": 4_000, "everything": 800}
    assert names({**figures, "loader": 1_250}) == ("copy",)
    assert names({**figures, "loader": Rates(1_250, 990, 1_300, 5)}) == ("loader", "copy")
    # One odd repeat does not make twice the speed the same.
    assert names({**figures, "loader": Rates(2_500, 990, 2_600, 5)}) == ("copy",)
    # Nor is a transform named alone if the loader without it was as slow in some repeats.
    slow = {"storage_hot": 4_000, "transform": 400, "everything": 390}
    assert names({**slow, "loader": 900}) == ("transform",)
    assert names({**slow, "loader": Rates(900, 350, 950, 5)}) == ("loader", "transform")


ALONE = {"copy": None, "normalize": 9_000}
SHORT = {"copy": 1_000, "everything": 400}


@pytest.mark.parametrize(
    ("figures", "known", "outcome", "named", "stage"),
    [
        ({}, {"stall_fraction": 0.02}, Outcome.FED, ("step",), None),
        ({"normalize": 2_500, "everything": 2_400}, {"stall_fraction": 0.02}, Outcome.FED, ("normalize",), None),
        # A step on the CPU is slower than alone, because it shares the CPUs with its loader. If the loop and the
        # measurements alone differ, both parts are named, but not if they contradict each other.
        ({**ALONE, "everything": 900}, {**ON_CPU, "stall_fraction": 0.04, "normalize_fraction": 0.3}, Outcome.FED,
         ("step",), None),
        ({**ALONE, "everything": 900}, {**ON_CPU, "stall_fraction": 0.04, "normalize_fraction": 0.7}, Outcome.FED,
         ("step",), None),
        ({**ALONE, "everything": 900}, {**ON_CPU, "stall_fraction": 0.04, "normalize_fraction": 0.47}, Outcome.FED,
         ("normalize", "step"), None),
        # Much slower than alone without waiting: what takes the CPUs is not the loader's speed.
        ({**ALONE, "everything": 20}, {**ON_CPU, "stall_fraction": 0.0, "normalize_fraction": 0.3}, Outcome.SLOWED,
         (), None),
        # It waits, though nothing is slow enough to wait for.
        ({**ALONE, "everything": 900}, {**ON_CPU, "stall_fraction": 0.4}, Outcome.CONTENTION, (), None),
        (SHORT, {"stall_fraction": 0.4}, Outcome.LIMITED, ("copy",), None),
        (SHORT, {"stall_fraction": 0.01}, Outcome.FED, ("step",), None),
        # Some repeats wait, others do not. Around the threshold, small differences mean little.
        (SHORT, {"stall_fraction": 0.3, "stall_range": (0.05, 0.6)}, Outcome.NOISY, (), None),
        ({}, {"stall_fraction": 0.02, "stall_range": (0.0, 0.25)}, Outcome.NOISY, (), None),
        (SHORT, {"stall_fraction": 0.12, "stall_range": (0.08, 0.15)}, Outcome.LIMITED, ("copy",), None),
        ({}, {"stall_fraction": 0.09, "stall_range": (0.08, 0.15)}, Outcome.FED, ("step",), None),
        (SHORT, {"stall_fraction": 0.4, "stall_range": (0.2, 0.6)}, Outcome.LIMITED, ("copy",), None),
        # The loop is faster than what it contains.
        ({"loader": 800, "storage_hot": 4_000, "everything": 1_600}, {}, Outcome.NOISY, (), Stage.LOADER),
        ({"step": 800, "everything": 1_600}, {"stall_fraction": 0.4}, Outcome.NOISY, (), Stage.STEP),
        ({**ALONE, "normalize": 600, "everything": 900}, {**ON_CPU, "stall_fraction": 0.0}, Outcome.NOISY, (),
         Stage.NORMALIZE),
        ({"storage_cold": 500, "everything": 900}, TOO_LARGE, Outcome.NOISY, (), Stage.COLD),
        # Without one of these, nothing is known.
        ({**SHORT, "everything": None}, {"stall_fraction": 0.01}, Outcome.NOT_MEASURED, (), Stage.EVERYTHING),
        ({**SLOW, "step": None, "everything": None}, WAITS, Outcome.NOT_MEASURED, (), Stage.STEP),
        ({"loader": None}, {}, Outcome.NOT_MEASURED, (), Stage.LOADER),
        ({"transform": None}, {}, Outcome.NOT_MEASURED, (), Stage.TRANSFORM),
    ],
)  # fmt: skip
def test_the_loop_says_whether_the_step_waits(
    figures: dict[str, Any], known: dict[str, Any], outcome: Outcome, named: tuple[str, ...], stage: Stage | None
) -> None:
    verdict = judge(evidence(figures, **known))
    assert tuple(one.value for one in verdict.bottlenecks) == named
    assert (verdict.outcome, verdict.stage) == (outcome, stage)
    fed = {Outcome.FED: True, Outcome.SLOWED: True, Outcome.LIMITED: False, Outcome.CONTENTION: False}
    assert verdict.fed == fed.get(outcome)


@pytest.mark.parametrize("stage", [Stage.LOADER, Stage.COPY, Stage.NORMALIZE, Stage.STEP, Stage.EVERYTHING])
def test_too_few_repeats_decide_nothing(stage: Stage) -> None:
    found = evidence()
    for rates_of_stage in (found.stages[stage].rates, None):
        late = {**found.stages, stage: StageResult(stage, rates_of_stage, late=True)}
        verdict = judge(replace(found, stages=late))
        assert (verdict.outcome, verdict.stage, verdict.bottlenecks) == (Outcome.TOO_LITTLE, stage, ())
    # Of the others, fewer repeats are enough.
    late = {**found.stages, Stage.HOT: StageResult(Stage.HOT, late=True)}
    assert judge(replace(found, stages=late)).outcome is Outcome.FED


def random_evidence(random: Random) -> Evidence:
    """Measurements of any speeds, on a machine of any noise."""
    noise = random.choice((1.02, 1.3, 3.0))

    def some() -> Rates:
        median = 10 ** random.uniform(2, 5)
        return Rates(median, median / random.uniform(1, noise), median * random.uniform(1, noise), 5)

    on_gpu, transform = random.random() < 0.5, random.random() < 0.5
    left_out = {stage for stage in Stage if random.random() < 0.1}
    left_out |= set() if on_gpu else {Stage.COPY}
    found = {stage: StageResult(stage, some()) for stage in Stage if stage not in left_out}
    stalls = sorted(random.choice((random.uniform(0, 0.2), random.random())) for _ in range(3))
    return Evidence(
        cpus=random.choice((1, 2, 8)),
        machine_cpus=random.choice((2, 8)),
        **{random.choice(("num_threads", "num_workers")): random.choice((1, 2, 4, 32))},
        on_gpu=on_gpu,
        gpus=1 if on_gpu else random.choice((0, 1)),
        pinned=random.choice((True, False)),
        batch_rows=random.choice((8, 256)),
        stored_row_bytes=3_072,
        loaded_row_bytes=random.choice((3_072, 12_288)),
        loaded_float=random.random() < 0.5,
        encoding=random.choice((None, *Encoding)),
        fits_cache=random.random() < 0.8,
        has_transform=transform,
        read_busy_fraction=random.random(),
        transform_busy_fraction=random.random(),
        half_batch_ratio=random.choice((None, 0.5, 0.9)),
        one_thread_ratio=random.choice((None, 0.6, 2.5)),
        stall_fraction=stalls[1],
        stall_range=(stalls[0], stalls[2]),
        normalize_fraction=None if on_gpu else random.uniform(0, 1 - stalls[1]),
        stages=found,
    )


def test_whatever_was_measured_the_verdict_agrees_with_the_numbers() -> None:
    for seed in range(300):
        require_agreement(random_evidence(Random(seed)))


def require_agreement(known: Evidence) -> None:
    """The verdict on some evidence agrees with its numbers."""
    verdict, stall = judge(known), known.stall_fraction
    low, high = known.stall_range
    parts = {stage: known.rates(stage) for stage in (known.feed_stage, Stage.STEP, Stage.EVERYTHING)}
    if verdict.outcome is Outcome.NOT_MEASURED:
        assert parts[verdict.stage] is None
        return
    together = parts[Stage.EVERYTHING].median
    if verdict.outcome is Outcome.NOISY:
        # Noise is claimed only if it is there.
        wide, wrong = high - low > 0.1, verdict.stage and known.rates(verdict.stage).median < together
        unsteady = parts[Stage.EVERYTHING].high > 5 * parts[Stage.EVERYTHING].low
        assert wide or wrong or unsteady
        return
    assert together <= 1.25 * parts[Stage.STEP].median
    assert high <= MAX_STALL or together <= 1.25 * parts[known.feed_stage].median
    assert (stall <= MAX_STALL) == (verdict.outcome in (Outcome.FED, Outcome.SLOWED))
    assert 1 <= verdict.gain <= 1 / (1 - stall) + 1e-9
    assert verdict.gain * together <= max(together, parts[Stage.STEP].median) * (1 + 1e-9)
    assert not (low <= MAX_STALL < high and high - low > 0.1)
    names = set(verdict.bottlenecks)
    assert names <= ({Bottleneck.NORMALIZE, Bottleneck.STEP} if verdict.fed else {*FEED, Bottleneck.COPY})
    assert bool(names) == (verdict.outcome not in (Outcome.CONTENTION, Outcome.SLOWED))
    if verdict.outcome is Outcome.CONTENTION:
        assert parts[known.feed_stage].low > parts[Stage.STEP].high or known.rates(Stage.NORMALIZE) is not None
    assert (Bottleneck.TRANSFORM not in names) or known.has_transform
    assert (Bottleneck.COPY not in names) or known.on_gpu


@pytest.mark.parametrize("most", [0.1, 0.12])
def test_a_loop_whose_repeats_differ_a_lot_decides_nothing_if_one_of_them_waited(most: float) -> None:
    found = evidence({}, stall_fraction=0.06, stall_range=(0.05, most))
    for low, steady in ((500, True), (300, False)):
        loop = StageResult(Stage.EVERYTHING, Rates(1_000, low, 2_000, 5))
        outcome = Outcome.FED if steady or most <= 0.1 else Outcome.NOISY
        assert judge(replace(found, stages={**found.stages, Stage.EVERYTHING: loop})).outcome is outcome


def test_a_loader_that_was_slower_alone_does_not_matter_to_a_step_that_never_waits() -> None:
    for most, outcome in ((0.1, Outcome.FED), (0.12, Outcome.NOISY)):
        found = evidence({"loader": 800, "everything": 1_600}, stall_fraction=0.06, stall_range=(0.05, most))
        assert judge(found).outcome is outcome


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
        ({**THREADS, "wait_fraction": 0.02, "transform_wait_fraction": 0.8}, Bottleneck.COPY),
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


def test_a_loop_that_is_slower_than_its_stages_alone_says_by_how_much() -> None:
    known = {"stall_fraction": 0.04, "normalize_fraction": 0.3}
    # Normalizing 9,000 images/s and then stepping 3,000 are 2,250 together.
    verdict = judge(evidence({**ALONE, "everything": 1_125}, **ON_CPU, **known))
    assert (verdict.outcome, verdict.slowdown) == (Outcome.FED, pytest.approx(2.0))
    assert judge(evidence(stall_fraction=0.04)).slowdown == 1.0


@pytest.mark.parametrize("stall", [0.0, 0.4, 0.9])
def test_the_share_of_normalizing_is_compared_without_the_time_spent_waiting(stall: float) -> None:
    alone = 3_000 / (9_000 + 3_000)  # normalizing takes a quarter of both
    for factor in (0.3, 1.0, 3.0):
        known = {"stall_fraction": stall, "normalize_fraction": factor * alone * (1 - stall)}
        assert evidence({**ALONE, "everything": 1_000}, **ON_CPU, **known).normalize_agrees == (factor == 1.0)
