"""The recommendation follows the measurements, and states its reasons."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import h5pack
from h5pack.benchmark.cases import MIN_TURNS, NO_TIME, BenchCase, CaseRepeats, FileVariant, Measurement, ceiling_threads
from h5pack.benchmark.loader_settings import Workload, deciding_caches
from h5pack.benchmark.recommend import Findings, Recommendation, choose, finalists, missing
from tests.benchmark.files import input_of
from tests.benchmark.test_cases import ROW_BYTES, variant
from tests.makers import hdf5_file

WORKLOAD = Workload(
    source="./celeb A", options={}, num_images=20_000, row_bytes=ROW_BYTES, sample_rows=4_000, row_shape=(100, 100, 10),
    default_chunk_rows=40, memory_bytes=16 * 2**30, asked_batch_size=256, batch_size=256, window=16, num_threads=2,
    cpus=2,
)  # fmt: skip
VARIANTS: Sequence[FileVariant] = [variant(2), variant(32), variant(128), variant(None)]
INPUT = variant(100, is_input=True)


def measured(label: str, *speeds: float, **changes: object) -> Measurement:
    """Repeats of a case, one in each of the first turns."""
    case = replace(BenchCase(label, "window", "direct", "hot", 256, 16, 2), **changes)  # type: ignore[arg-type]
    return Measurement(case, speeds, turns=tuple(range(len(speeds))))


def findings(
    variants: Sequence[FileVariant], found: Sequence[Measurement], run_off: Sequence[Measurement] = (), **changes: Any
) -> Findings:
    """Results for the page cache; `changes` are fields of the workload."""
    return Findings(variants, found, run_off, replace(WORKLOAD, **changes), "hot")


def chosen_from(variants: Sequence[FileVariant], *found: Measurement, **changes: Any) -> Recommendation:
    """The recommendation after a sweep with these results; `changes` are fields of the workload, or `run_off`.

    Three turns are made five, the least that are enough, by repeating the first two, which keeps all medians.
    """
    run_off = [_five_turns(one) for one in changes.pop("run_off", ())]
    return choose(findings(variants, [_five_turns(one) for one in found], run_off, **changes))


def _five_turns(one: Measurement) -> Measurement:
    if one.turns != (0, 1, 2):
        return one
    speeds, ceilings = (values + values[:2] for values in (one.speeds, one.ceilings))
    return replace(one, speeds=speeds, ceilings=ceilings, turns=tuple(range(5)))


Speeds = dict[str, tuple[float, ...]]


@pytest.mark.parametrize(
    ("sweep", "run_off", "variant", "ties", "speed"),
    [
        ({"2 rows": (10, 11, 12), "128 rows": (50, 51, 52)}, {}, "128 rows", {"128 rows"}, 51),
        # Without differences the variant nearest to the default wins.
        ({"2 rows": (98, 99, 100), "32 rows": (97, 98, 99), "128 rows": (100, 101, 102)}, {}, "32 rows",
         {"2 rows", "32 rows", "128 rows"}, 98),
        # Of those that are faster than the default, the nearest to it that none of them is faster than.
        ({"2 rows": (98, 99, 100), "32 rows": (67, 68, 69), "128 rows": (100, 101, 102)}, {}, "128 rows",
         {"2 rows", "128 rows"}, 101),
        # A case that is faster in every turn wins, however much the turns differ; in most of them is not enough.
        ({"2 rows": (10, 11, 12), "32 rows": (40, 60, 90), "128 rows": (80, 100, 130)}, {}, "128 rows",
         {"128 rows"}, 100),
        ({"2 rows": (10, 11, 12), "32 rows": (40, 60, 90), "128 rows": (80, 62, 130)}, {}, "32 rows",
         {"32 rows"}, 60),
        # A noisy variant is not recommended because another one is faster than the default.
        ({"2 rows": (70, 71, 72), "32 rows": (60, 61, 62), "128 rows": (20, 64, 65)}, {}, "2 rows",
         {"2 rows"}, 71),
        # A variant that is faster in every turn, but by less than the ratio varies, may be so by chance.
        ({"2 rows": (10, 11, 12), "32 rows": (50, 60, 70), "128 rows": (60, 66, 120)}, {}, "32 rows",
         {"32 rows"}, 60),
        ({"2 rows": (10, 11, 12), "32 rows": (50, 60, 70), "128 rows": (110, 85, 99)}, {}, "128 rows",
         {"128 rows"}, 99),
        # Without the default and any near to it, one that another was faster than in every turn is not recommended.
        ({"2 rows": (85, 56, 99), "128 rows": (50, 55, 51)}, {}, "2 rows", {"2 rows"}, 85),
        ({"2 rows": (85, 56, 50), "128 rows": (50, 55, 51)}, {}, "128 rows", {"2 rows", "128 rows"}, 51),
        # One that is not faster than the default does not win by being faster than one that is.
        ({"2 rows": (70, 70, 70, 70, 70, 90), "32 rows": (50, 50, 50, 50, 50, 99), "128 rows": (60, 60, 60, 60, 60)},
         {}, "128 rows", {"128 rows"}, 60),
        # Rows without chunks are never recommended.
        ({"32 rows": (50, 51, 52), "contiguous": (90, 91, 92)}, {}, "32 rows", {"32 rows"}, 51),
        # A run-off with enough repeats replaces the sweep; too few repeats are pooled with those of the sweep.
        ({"2 rows": (60,), "32 rows": (100, 101, 102), "128 rows": (30, 31, 32)},
         {"2 rows": (95, 96, 97), "32 rows": (50, 51, 62)}, "2 rows", {"2 rows"}, 96),
        ({"2 rows": (60,), "32 rows": (100,), "128 rows": (30, 31, 32)}, {"2 rows": (50, 62), "32 rows": (90, 91)},
         "32 rows", {"32 rows"}, 91),
    ],
    ids=["fastest", "ties", "nearest", "drift", "noise", "outlier", "chance", "clear",
         "left out", "left out, tied", "chain", "contiguous", "run-off",
         "pooled"],
)  # fmt: skip
def test_the_recommended_variant(sweep: Speeds, run_off: Speeds, variant: str, ties: set[str], speed: float) -> None:
    found, again = ([measured(label, *speeds) for label, speeds in part.items()] for part in (sweep, run_off))
    chosen = chosen_from(VARIANTS, *found, run_off=again)
    assert (chosen.variant, set(chosen.ties), chosen.images_per_s) == (variant, ties, speed)
    assert chosen.command == f"h5pack convert './celeb A' packed.h5 --chunk-rows {variant.split()[0]}"


def test_only_repeats_of_one_turn_are_compared() -> None:
    one, other = (replace(measured("", *speeds), turns=turns) for speeds, turns in (
        ((100, 50, 90, 80), (3, 4, 5, 9)), ((9, 80, 40, 75, 60), (1, 3, 4, 5, 9))
    ))  # fmt: skip
    assert one.ratios(other) == (1.2, 1.25, 1.25, 80 / 60)
    assert (one.is_faster(other), other.is_faster(one)) == (True, False)
    # Five percent, and three turns, are the least.
    assert not one.is_faster(replace(other, speeds=(9, 96, 40, 75, 60)))
    assert not replace(one, turns=(3, 4, 7, 8)).is_faster(other)
    # Without the turns, as in a result of an earlier version, only what is much slower is slower.
    assert not replace(one, turns=()).is_faster(replace(other, turns=()))
    assert one.is_faster(measured("", 29.0))


def test_few_turns_are_enough_if_they_are_alike() -> None:
    for speeds, faster in (
        ((150, 160, 170), True),  # 1.5 to 1.7: clear, and alike.
        ((150, 160), False),  # Too few turns.
        ((150, 200, 250), False),  # 1.5 to 2.5: these vary too much for three turns,
        ((150, 200, 250, 160, 170), True),  # but not for five.
        ((115, 116, 117), False),  # 1.15 to 1.17: three such turns may be chance,
        ((115, 116, 117, 116, 117), True),  # five are not.
        ((115, 150, 117, 116, 117), False),
    ):
        one, other = measured("", *speeds), measured("", *[100] * len(speeds))
        assert (one.is_faster(other, MIN_TURNS), other.is_faster(one, MIN_TURNS)) == (faster, False)


def test_every_variant_called_slower_is_slower_in_the_same_turns() -> None:
    found = [measured("2 rows", 40, 90, 50), measured("32 rows", 50, 110, 62), measured("128 rows", 70, 60, 50)]
    chosen = chosen_from(VARIANTS, *found)
    # 2 rows have a higher median than 128 rows, but are compared with 32 rows alone.
    assert (chosen.variant, set(chosen.ties)) == ("32 rows", {"32 rows", "128 rows"})
    equal, slower = chosen.reasons[:2]
    assert ("128 rows 0.81 (0.55 to 1.40)" in equal, "2 rows 0.81 (0.80 to 0.82)" in slower) == (True, True)


def test_the_finalists_are_the_fastest_variants_with_chunks_and_the_input_file() -> None:
    speeds = {"2 rows": 20, "32 rows": 50, "128 rows": 60, "contiguous": 90}
    found = [measured(label, speed) for label, speed in speeds.items()]
    assert finalists(findings(VARIANTS, found)) == [found[2].case, found[1].case]
    slow = measured(INPUT.label, 1)
    assert finalists(findings([INPUT, *VARIANTS], [slow, *found])) == [found[2].case, found[1].case, slow.case]


@pytest.mark.parametrize(
    ("num_images", "caches", "expected"),
    [(20_000, ("hot", "cold"), ["hot", "cold"]), (20_000_000, ("hot", "cold"), ["cold", "hot"]),
     (20_000_000, ("hot",), ["hot"]), (20_000, ("cold",), ["cold"])],
)  # fmt: skip
def test_memory_decides_which_cache_state_counts(num_images: int, caches: tuple[str, ...], expected: str) -> None:
    assert deciding_caches(replace(WORKLOAD, num_images=num_images), caches) == expected


def lacking(*found: Measurement, run_off: Sequence[Measurement] = (), not_packed: Sequence[str] = ()) -> list[str]:
    variants = VARIANTS if len(found) > 1 else [VARIANTS[1]]
    return missing(findings(variants, found, run_off), not_packed)


def test_every_variant_that_may_win_needs_three_repeats() -> None:
    slow, fast, other = measured("2 rows", 9), measured("32 rows", 99, 100, 101), measured("128 rows", 80, 81, 82)
    assert lacking(slow, fast, other) == []
    assert lacking(measured("2 rows", 90, 95), fast, other) == ["2 rows: only 2 of 3 repeats were measured"]
    # Repeats of the sweep and of the run-off count together.
    assert lacking(measured("2 rows", 90, 95), fast, other, run_off=[measured("2 rows", 91)]) == []
    assert lacking(measured("2 rows"), fast, other) == ["2 rows: only 0 of 3 repeats were measured"]
    # Images of several sizes make no batch, so no time would help.
    failed = replace(measured("2 rows"), reason="images differ in size")
    assert lacking(failed, fast, other) == []
    assert lacking(replace(failed, reason=NO_TIME), fast, other) == ["2 rows: only 0 of 3 repeats were measured"]


def test_a_sample_that_fits_into_caches_decides_nothing() -> None:
    found = [measured("2 rows", 1, 2, 3), measured("32 rows", 7, 8, 9), measured("128 rows", 50, 51, 52)]
    chosen = chosen_from(VARIANTS, *found, sample_rows=100)
    assert (chosen.variant, chosen.compared, chosen.ties) == ("32 rows", False, ("2 rows", "32 rows", "128 rows"))
    # Only the durations of epochs, and the state of the page cache: nothing that chance may decide.
    assert len(chosen.reasons) == 2
    assert all(part in chosen.reasons[0] for part in ("2 rows 10000.0 s", "128 rows 392.2 s"))
    threads = [replace(measured("32 rows", 90, 91, 92, num_threads=1)), measured("32 rows", 7, 8, 9)]
    assert chosen_from(VARIANTS, *found, run_off=threads, sample_rows=100).num_threads == 2
    chosen = chosen_from(VARIANTS, *found)
    assert (chosen.variant, chosen.compared) == ("128 rows", True)


def test_without_another_variant_those_not_packed_or_not_asked_for_are_missing() -> None:
    assert lacking(measured("32 rows", 9, 9, 9)) == []
    assert lacking(measured("32 rows", 9, 9, 9), not_packed=["9 rows", "2 rows"]) == [
        "variants that were not packed: 9 rows, 2 rows"
    ]
    assert "orders='window'" in lacking(measured("32 rows", 9, 9, 9, order="full"))[0]
    failed = replace(measured("32 rows"), reason="images differ in size")
    assert "orders='window'" not in lacking(failed)[0]


def test_without_measurements_there_is_no_recommendation() -> None:
    for found in ([], [measured("32 rows")], [measured("32 rows", 5.0, order="full")]):
        assert choose(findings(VARIANTS, found)) is None
        assert missing(findings(VARIANTS, found))


def test_an_input_file_as_fast_as_the_others_is_kept() -> None:
    kept = replace(INPUT, images="grp/pics", labels="y")
    found = [measured("as it is", 97, 98, 99), measured("32 rows", 99, 100, 101)]
    chosen = chosen_from([kept, *VARIANTS], *found)
    assert (chosen.convert, chosen.command, chosen.gain, chosen.chunk_cache) == (False, "", None, None)
    assert f"{INPUT.path!r}, images='grp/pics', labels='y'" in chosen.code


@pytest.mark.parametrize("images", [10, 20_000])
@pytest.mark.parametrize(("speed", "kept"), [(10, False), (100, False), (105, False), (130, True)])
def test_an_input_file_to_decode_is_kept_only_if_it_is_faster(images: int, speed: float, kept: bool) -> None:
    found = [measured(INPUT.label, *[speed] * 3), measured("32 rows", 98, 99, 100)]
    chosen = chosen_from([INPUT, *VARIANTS], *found, num_images=images, decodes_input=True)
    assert chosen.convert != (kept and images > 10)
    plain = chosen_from([INPUT, *VARIANTS], *found, num_images=images)
    assert plain.convert == (speed == 10)


@pytest.mark.parametrize(
    ("plain", "gain", "epochs"),
    [
        ((4.0, 5.0, 6.0), 20.0, "1818.2 s (1666.7 to 2000.0)"),  # 20,000 images by H5Loader, at 11 images/s
        ((124.0, 125.0, 126.0), 0.8, "160.0 s (158.7 to 161.3)"),  # by plain h5py, which may be faster
    ],
)
def test_the_gain_over_the_input_file_is_stated(plain: tuple[float, ...], gain: float, epochs: str) -> None:
    chosen = chosen_from(
        [INPUT, *VARIANTS],
        measured("as it is", 10, 11, 12),
        measured("as it is", 50, 51, 52, num_threads=1),
        measured("32 rows", 99, 100, 101),
        measured("as it is", *plain, order="single", engine="default", batch_size=1, num_threads=1),
    )
    assert (chosen.convert, chosen.gain) == (True, gain)
    assert any(f"{epochs} an epoch instead of 200.0 s" in reason for reason in chosen.reasons)


def settings_of(*run_off: Measurement, **changes: Any) -> Recommendation:
    """The recommendation if one variant won, and other settings were tried with it."""
    found = [measured("32 rows", 99, 100, 101), measured("2 rows", 1, 2, 3)]
    return chosen_from(VARIANTS, *found, run_off=[found[0], *run_off], **changes)


@pytest.mark.parametrize(
    ("speeds", "picked", "speed"),
    [
        # Slower, as fast, faster in most repeats, clearly faster, clearly faster with too few repeats.
        ((50, 51, 52), (2, 16), 100), ((102, 103, 104), (2, 16), 100), ((90, 120, 130), (2, 16), 100),
        ((120, 121, 122), None, 121), ((120, 121), (2, 16), 100),
    ],
)  # fmt: skip
@pytest.mark.parametrize("settings", [{"num_threads": 1}, {"window": 64}])
def test_other_settings_are_recommended_only_if_clearly_faster(
    settings: dict[str, int], speeds: tuple[float, ...], picked: tuple[int, int] | None, speed: float
) -> None:
    chosen = settings_of(measured("32 rows", *speeds, **settings))
    expected = picked or (settings.get("num_threads", 2), settings.get("window", 16))
    assert (chosen.num_threads, chosen.window) == expected
    # The figure is that of these settings.
    assert (chosen.images_per_s, chosen.images_per_s_range[1] >= speed) == (speed, True)
    assert f"batch_size=256, window={expected[1]}, num_threads={expected[0]}" in chosen.code


@pytest.mark.parametrize(
    ("options", "noted"), [({"fields": "a,b"}, True), ({"fields": "a,b", "labels": "y"}, False), ({}, False)]
)
def test_a_command_without_labels_is_noted(options: dict[str, str], noted: bool) -> None:
    assert bool(settings_of(options=options).label_note) == noted


@pytest.mark.parametrize(("images", "compared"), [(4, False), (6, True)])
def test_variants_are_not_compared_if_epochs_of_all_images_are_short(images: int, compared: bool) -> None:
    # The recommended variant reads 100 images/s.
    chosen = settings_of(num_images=images, row_bytes=2**26)
    assert (chosen.compared, chosen.variant) == (compared, "32 rows")


@pytest.mark.parametrize(("speed", "text"), [(200, "save 10.0 ms an epoch"), (90, "none is faster")])
def test_short_epochs_are_listed_with_what_the_fastest_saves(speed: float, text: str) -> None:
    found = [measured("32 rows", 100, 100, 100), measured("128 rows", speed, speed, speed)]
    chosen = chosen_from(VARIANTS, *found, num_images=2, default_chunk_rows=32)
    assert (chosen.compared, chosen.hardly_matters, chosen.variant) == (False, True, "32 rows")
    assert sum(text in reason for reason in chosen.reasons) == 1
    # Of a small sample of many images it is unknown what a size would save.
    chosen = chosen_from(VARIANTS, *found, num_images=500, sample_rows=200, row_bytes=10, default_chunk_rows=32)
    assert (chosen.compared, chosen.hardly_matters) == (False, False)
    assert not any("may save" in reason for reason in chosen.reasons)


def test_generated_images_stand_for_sets_of_any_size() -> None:
    found = [measured("32 rows", 9_900, 9_900, 9_900), measured("2 rows", 100, 100, 100)]
    for any_size, compared in ((False, False), (True, True)):
        chosen = chosen_from(VARIANTS, *found, any_size=any_size, num_images=300, default_chunk_rows=32)
        assert (chosen.compared, chosen.is_default, "--chunk-rows" in chosen.command) == (compared, True, False)


@pytest.mark.parametrize(
    ("speeds", "convert"), [((900, 950, 1_000), True), ((101, 150, 190), False), ((90, 99, 102), False)]
)
def test_a_file_whose_epochs_are_short_is_converted_if_that_is_faster(speeds: tuple[float, ...], convert: bool) -> None:
    found = [measured(INPUT.label, 98, 99, 100), measured("32 rows", *speeds), measured("2 rows", 2_000, 2_000, 2_000)]
    chosen = chosen_from([INPUT, *VARIANTS], *found, num_images=4, default_chunk_rows=32)
    assert (chosen.compared, chosen.convert) == (False, convert)
    assert chosen.variant == ("32 rows" if convert else INPUT.label)


@pytest.mark.parametrize(("speed", "variant"), [(114, "32 rows"), (115, "128 rows"), (130, "128 rows")])
def test_a_size_that_is_little_faster_than_the_default_is_not_recommended(speed: float, variant: str) -> None:
    found = [measured("32 rows", 100, 100, 100), measured("128 rows", speed, speed, speed)]
    chosen = chosen_from(VARIANTS, *found, default_chunk_rows=32)
    assert chosen.variant == variant
    assert any("15 %" in reason for reason in chosen.reasons) == (variant == "32 rows")
    # A file is converted for less.
    chosen = chosen_from([INPUT, *VARIANTS], *found, measured(INPUT.label, 90, 90, 90), default_chunk_rows=32)
    assert (chosen.convert, chosen.variant) == (True, variant)


def test_only_unclear_differences_are_called_so() -> None:
    slower, equal = measured("32 rows", 50, 51, 52, num_threads=1), measured("32 rows", 97, 99, 102, num_threads=3)
    (text,) = (reason for reason in settings_of(slower, equal, cpus=4).reasons if "num_threads=1 gives" in reason)
    assert text.endswith("the difference from num_threads=3 is not clear.")


@pytest.mark.parametrize("speed", [80, 200])
def test_a_setting_is_compared_with_cases_that_differ_in_it_alone(speed: int) -> None:
    fewer, window = measured("32 rows", 50, 50, 50, num_threads=1), measured("32 rows", speed, speed, speed, window=4)
    chosen = settings_of(fewer, window)
    reasons = [one.split("; ") for one in chosen.reasons if " for H5Loader" in one]
    found = [(first.split()[0], *re.findall(r"(\w+=\d+) gives ([\d.]+)", others)) for first, others in reasons]
    assert found == [
        ("num_threads=2", ("num_threads=1", "0.50")),
        ("window=4", ("window=16", "0.50")) if speed == 200 else ("window=16", ("window=4", "0.80")),
    ]


def test_more_threads_than_cpus_are_never_recommended() -> None:
    faster = [measured("32 rows", 120 * n, 121 * n, 122 * n, num_threads=n) for n in (3, 8)]
    assert settings_of(*faster).num_threads == 2
    for found, few_cpus, unclear in (
        (faster, True, False),
        ([measured("32 rows", 80, 110, 120, num_threads=8)], True, False),
        ([measured("32 rows", 103, 103, 103, num_threads=1)], False, True),
    ):
        (reason,) = (one for one in settings_of(*found).reasons if one.startswith("num_threads=2 for H5Loader"))
        assert ("too few CPUs" in reason, "not clear" in reason) == (few_cpus, unclear)
    assert settings_of(*faster, cpus=4).num_threads == 3


def test_one_worker_for_each_cpu_unless_another_number_is_clearly_faster() -> None:
    alone = partial(measured, "32 rows", num_threads=1)
    assert settings_of().num_workers == 2
    assert settings_of(alone(60, 61, 62, num_workers=1), alone(59, 60, 80, num_workers=2)).num_workers == 2
    assert settings_of(alone(60, 61, 62, num_workers=1), alone(30, 31, 32, num_workers=2)).num_workers == 1
    # Other numbers only were asked for; or there was no time for one per CPU.
    assert settings_of(alone(60, 61, 62, num_workers=1), alone(70, 71, 72, num_workers=4)).num_workers == 4
    assert any("the only number measured" in one for one in settings_of(alone(60, 61, 62, num_workers=4)).reasons)
    assert settings_of(alone(60, 61, 62, num_workers=1), alone(90, num_workers=2)).num_workers == 2
    assert settings_of(alone(60, 61, 62, num_workers=1), alone(num_workers=2)).num_workers == 1  # one per CPU failed


@pytest.mark.parametrize(
    ("cache", "num_threads", "cpus", "expected"),
    [("hot", 1, 2, 2), ("hot", 2, 2, 2), ("hot", 2, 8, 3), ("hot", 1, 1, 1), ("cold", 2, 8, 2)],
)
def test_the_ceiling_has_the_threads_that_copy(cache: str, num_threads: int, cpus: int, expected: int) -> None:
    assert ceiling_threads(measured("", cache=cache, num_threads=num_threads).case, cpus) == expected


def test_the_ratio_to_the_ceiling_is_that_of_the_repeats_beside_it() -> None:
    found = replace(measured("32 rows", 80, 100, 120), ceilings=(100.0, 200.0, 100.0))
    chosen = chosen_from(VARIANTS, found, measured("2 rows", 1, 2, 3))
    assert (chosen.of_ceiling, chosen.ceiling_threads) == ((0.8, 0.5, 1.2), 2)
    assert chosen_from(VARIANTS, measured("32 rows", 1, 1, 1), measured("2 rows", 1, 2, 3)).of_ceiling is None
    # Repeats of which some have no ceiling have no ratio.
    assert found.with_repeats_of(found).of_ceiling == 2 * found.of_ceiling
    assert found.with_repeats_of(measured("32 rows", 9)).of_ceiling == ()


@pytest.mark.parametrize("seed", range(30))
def test_the_default_is_recommended_unless_another_one_is_faster_in_five_turns(seed: int) -> None:
    random = Random(seed)

    def some(label: str, **changes: object) -> Measurement:
        median, noise = random.choice((50, 70, 100)), random.choice((0.01, 0.1, 0.5))
        speeds = [median * random.uniform(1 - noise, 1 + noise) for _ in range(random.choice((2, 4, 5, 8)))]
        ceilings = tuple(speed * random.uniform(0.7, 2.0) for speed in speeds)
        return replace(measured(label, *speeds, **changes), ceilings=ceilings)

    found = [some(one.label) for one in VARIANTS]
    run_off = [some(one.label) for one in VARIANTS if random.random() < 0.5]
    run_off += [some(one.label, num_threads=count) for one in VARIANTS for count in (1, 4, 16)]
    chosen = chosen_from(VARIANTS, *found, run_off=run_off)
    compared = {one.case.variant: one for one in found if one.case.variant != "contiguous"}
    again = {one.case: one for one in run_off}
    repeats = {label: CaseRepeats.of(one, again.get(one.case)) for label, one in compared.items()}
    pooled = {label: one.every for label, one in repeats.items()}
    compared = {label: one.stated for label, one in repeats.items()}

    def is_faster(one: str, other: str) -> bool:
        of = pooled if len(compared[one].ratios(compared[other])) < 5 else compared
        return of[one].is_faster(of[other], min_turns=5)

    faster = {label for label in compared if is_faster(label, "32 rows")}
    assert chosen.variant in (faster or {"32 rows"})
    assert not any(is_faster(label, chosen.variant) for label in faster)
    assert set(chosen.ties) >= {chosen.variant}
    assert chosen.num_threads <= WORKLOAD.cpus
    figures = [
        one for one in (*compared.values(), *run_off)
        if (one.case.variant, one.case.num_threads) == (chosen.variant, chosen.num_threads)
    ]  # fmt: skip
    assert chosen.images_per_s in {round(one.median, 1) for one in figures}


def test_the_chunk_cache_is_planned_for_all_images() -> None:
    cache = chosen_from(VARIANTS, measured("32 rows", 9, 9, 9)).chunk_cache
    assert (cache.nbytes, cache.nslots) == (0, 625)
    gzip = replace(variant(32, "gzip"), label="32 rows gzip")
    chosen = chosen_from([gzip], measured("32 rows gzip", 9, 9, 9))
    assert chosen.chunk_cache.nbytes == 16 * 32 * ROW_BYTES
    assert chosen.command.endswith("--chunk-rows 32 --compression gzip")


def test_the_default_chunks_need_no_option_and_training_reads_its_split() -> None:
    found = [measured("2 rows", 98, 99, 100), measured("32 rows", 97, 98, 99)]
    chosen = chosen_from(VARIANTS, *found, default_chunk_rows=32, split="train")
    assert (chosen.variant, chosen.is_default) == ("32 rows", True)
    assert chosen.command == "h5pack convert './celeb A' packed.h5"
    assert "H5Dataset('packed.h5', split='train')" in chosen.code
    assert chosen_from(VARIANTS, *found).is_default is False
    # Compressed chunks of that size are not the default.
    gzip = replace(variant(32, "gzip"), label="32 rows gzip")
    assert chosen_from([gzip], measured("32 rows gzip", 9, 9, 9), default_chunk_rows=32).is_default is False


def test_a_batch_size_that_the_sample_is_too_small_for_is_the_first_reason() -> None:
    chosen = chosen_from(VARIANTS, measured("32 rows", 9, 9, 9), asked_batch_size=1_024)
    assert all(part in chosen.reasons[0] for part in ("batch_size=256", "4,000 rows"))
    assert chosen.batch_size == 1_024
    assert "batch_size=1024" in chosen.code
    # All images together are too few, too.
    chosen = chosen_from(VARIANTS, measured("32 rows", 9, 9, 9), asked_batch_size=1_024, num_images=4_000)
    assert all(part in chosen.reasons[0] for part in ("batch_size=1000", "1024", "4,000 images"))
    assert all(part in chosen.reasons[1] for part in ("batch_size=256", "4,000 rows"))
    assert chosen.batch_size == 1_000
    assert "batch_size=1000" in chosen.code


def test_a_variant_that_was_slower_in_every_turn_is_said_to_be_probably_slower() -> None:
    """Also if repeats differ too much to compare variants: of the other one it was only once slower."""
    usual, below = measured("32 rows", 100, 100, 100, 100), measured("2 rows", 30, 99, 40, 99)
    found = [usual, below, measured("128 rows", 30, 150, 90, 60)]
    chosen = chosen_from(VARIANTS, *found)
    assert (chosen.variant, chosen.busy) == ("32 rows", True)
    (text,) = [reason for reason in chosen.reasons if "2 rows 0." in reason]
    assert text.startswith("Probably slower")
    assert sum("128 rows 0.75" in reason for reason in chosen.reasons) == 1


@pytest.mark.parametrize(
    ("turns", "above", "busy"),
    [(4, 0, True), (5, 0, False), (9, 1, False), (9, 2, True), (20, 5, False), (20, 6, True)],
)
def test_enough_turns_decide_even_if_speeds_vary(turns: int, above: int, busy: bool) -> None:
    """In some turns the other size is twice as fast, in one half as fast. All turns count, the outer ones, too."""
    speeds = (200.0,) * above + (114.0,) * (turns - above - 1) + (50.0,)
    found = [measured("32 rows", *(100.0,) * turns), measured("2 rows", *speeds)]
    chosen = chosen_from(VARIANTS, *found, default_chunk_rows=32)
    assert (chosen.variant, chosen.is_default, chosen.busy, chosen.unsure) == ("32 rows", True, busy, False)
    # If ratios hardly differ, the machine is not busy, but few turns cannot exclude a size that is worth it.
    found[1] = measured("2 rows", *(110.0,) * (turns - 1), 120.0)
    chosen = chosen_from(VARIANTS, *found, default_chunk_rows=32)
    assert (chosen.variant, chosen.busy, chosen.unsure) == ("32 rows", False, turns < 9)


@pytest.mark.parametrize(
    ("turns", "slower", "faster"), [(6, 0, False), (7, 0, True), (9, 1, False), (20, 4, True), (20, 5, False)]
)
def test_enough_turns_find_a_faster_size_even_if_speeds_vary(turns: int, slower: int, faster: bool) -> None:
    """In some turns the other size is slower, in the others faster by 20 or 60 %. All turns count."""
    ratios = (90.0,) * slower + (120.0, 160.0) * turns
    found = [measured("32 rows", *(100.0,) * turns), measured("128 rows", *ratios[:turns])]
    chosen = chosen_from(VARIANTS, *found, default_chunk_rows=32)
    assert chosen.variant == ("128 rows" if faster else "32 rows")


def test_reasons_say_in_how_many_turns_a_size_was_slower_if_the_ranges_do_not() -> None:
    usual, below = measured("32 rows", *(100.0,) * 20), (130.0,) * 4 + (50.0, 60.0) * 8
    (text,) = [one for one in chosen_from(VARIANTS, usual, measured("2 rows", *below)).reasons if "2 rows 0." in one]
    assert "0.60 (0.50 to 1.30), by over 5 % in 16 of 20 turns" in text
    (text,) = [one for one in chosen_from(VARIANTS, usual, measured("2 rows", *(50.0,) * 20)).reasons if "0.50" in one]
    assert " of 20 turns" not in text


def test_a_busy_answer_says_whether_another_size_is_faster_in_the_median() -> None:
    usual = measured("32 rows", 100, 100, 100, 100)
    for median, faster in ((110, False), (120, True)):
        chosen = chosen_from(VARIANTS, usual, measured("2 rows", 50, median, median, 250), default_chunk_rows=32)
        (text,) = [one for one in chosen.reasons if "2 rows 1." in one]
        assert (chosen.variant, chosen.busy, chosen.best_in_median) == ("32 rows", True, not faster)
        assert ("none is 15 % faster in the median" not in text) == faster


def test_the_speed_of_a_first_epoch_that_decodes_is_a_reason() -> None:
    for speeds, text in (((1_234.0,), "1,234 images/s."), ((99.0, 1_234.0, 2_000.0), "1,234 images/s (99 to 2,000).")):
        chosen = chosen_from(VARIANTS, measured("32 rows", 9, 9, 9), first_epoch=speeds)
        assert sum(text in reason for reason in chosen.reasons) == 1
    assert not any("1,234" in reason for reason in chosen_from(VARIANTS, measured("32 rows", 9, 9, 9)).reasons)


def test_a_sample_that_is_read_in_milliseconds_is_too_small() -> None:
    for speed, compared in ((790_000, True), (810_000, False)):
        found = [measured("32 rows", *[3 * speed] * 3), measured("128 rows", *[speed] * 3)]
        chosen = chosen_from(VARIANTS, *found, default_chunk_rows=128, num_images=10**6)
        assert chosen.compared == compared
        assert chosen.variant == ("32 rows" if compared else "128 rows")


def test_of_ten_turns_the_lowest_and_the_highest_ratio_do_not_count() -> None:
    usual, faster = measured("32 rows", *[10] * 10), [15] * 8
    for speeds, found in (([9, *faster, 40], True), ([9, 9, *faster], False), ([9, *faster], False)):
        assert measured("128 rows", *speeds).is_faster(usual) is found
    assert measured("128 rows", *[9, *faster, 40]).ratios(usual) == (1.5,) * 8


def test_the_code_for_the_input_file_reads_its_fields() -> None:
    given: dict[str, Any] = {"options": {"fields": "a/b,c,text"}, "fields": ("a/b", "c")}
    code = chosen_from([INPUT, *VARIANTS], measured(INPUT.label, 9, 9, 9), **given).code
    assert "fields=['a/b', 'c']" in code
    assert "fields" not in chosen_from(VARIANTS, measured("32 rows", 9, 9, 9), **given).code


def test_the_command_has_the_options_that_made_the_rows() -> None:
    options = {"size": (64, 48), "images": "x", "labels": "labels", "layout": "nchw", "mode": "gray",
               "source_kind": "hdf5"}  # fmt: skip
    command = chosen_from(VARIANTS, measured("32 rows", 9, 9, 9), options=options, source="MY_IMAGES").command
    expected = "--size 64x48 --images x --labels labels --layout nchw --mode gray --source hdf5 --chunk-rows 32"
    assert command == f"h5pack convert MY_IMAGES packed.h5 {expected}"


def test_the_code_for_an_input_file_whose_labels_are_texts_reads_it(tmp_path: Path) -> None:
    path = hdf5_file(tmp_path / "named.h5", images=np.zeros((40, 8, 8, 3), np.uint8), labels=["cat", "dog"] * 20)
    file = input_of(path).variant
    found: dict[str, Any] = {"h5pack": h5pack}
    exec(chosen_from([file], measured(file.label, 9, 9, 9)).code, found)
    assert sum(len(batch.images) for batch in found["loader"]) == 40
