"""The recommendation follows the measurements, and states its doubts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from h5pack.benchmark.cases import BenchCase, FileVariant, Measurement
from h5pack.benchmark.recommend import Recommendation, Workload, choose, finalists
from tests.benchmark.test_cases import ROW_BYTES, variant

WORKLOAD = Workload(
    source="./celeb A", options={}, num_images=20_000, row_bytes=ROW_BYTES, sample_rows=4_000, row_shape=(100, 100, 10),
    default_chunk_rows=40, memory_bytes=16 * 2**30, batch_size=256, window=16, num_threads=2, cpus=2,
    copy_speed=100_000.0,
)  # fmt: skip
VARIANTS: Sequence[FileVariant] = [variant(2), variant(32), variant(128), variant(None)]
INPUT = variant(100, is_input=True)


def measured(label: str, *speeds: float, **changes: object) -> Measurement:
    return Measurement(replace(BenchCase(label, "window", "direct", "hot", 256, 16, 2), **changes), speeds)  # type: ignore[arg-type]


def chosen_from(variants: Sequence[FileVariant], *found: Measurement, **changes: Any) -> Recommendation:
    """The recommendation after a sweep with these results; `changes` are fields of the workload, or `run_off`."""
    run_off = changes.pop("run_off", ())
    chosen = choose(variants, found, run_off, replace(WORKLOAD, **changes))
    assert chosen is not None
    return chosen


Speeds = dict[str, tuple[float, ...]]


@pytest.mark.parametrize(
    ("sweep", "run_off", "variant", "ties", "speed"),
    [
        ({"2 rows": (10, 11, 12), "128 rows": (50, 51, 52)}, {}, "128 rows", {"128 rows"}, 51),
        # Among ties the variant nearest to the default wins.
        ({"2 rows": (98, 99, 100), "32 rows": (97, 98, 99), "128 rows": (100, 101, 102)}, {}, "32 rows",
         {"2 rows", "32 rows", "128 rows"}, 98),
        # Rows without chunks are never recommended.
        ({"32 rows": (50, 51, 52), "contiguous": (90, 91, 92)}, {}, "32 rows", {"32 rows"}, 51),
        # A run-off with enough repeats replaces the sweep; too few repeats are pooled with those of the sweep.
        ({"2 rows": (60,), "32 rows": (100, 101, 102), "128 rows": (30, 31, 32)},
         {"2 rows": (95, 96, 97), "32 rows": (50, 51, 62)}, "2 rows", {"2 rows"}, 96),
        ({"2 rows": (60,), "32 rows": (100,), "128 rows": (30, 31, 32)}, {"2 rows": (50, 62), "32 rows": (90, 91)},
         "32 rows", {"32 rows"}, 91),
    ],
    ids=["fastest", "ties", "contiguous", "run-off", "pooled"],
)  # fmt: skip
def test_the_recommended_variant(sweep: Speeds, run_off: Speeds, variant: str, ties: set[str], speed: float) -> None:
    found, again = ([measured(label, *speeds) for label, speeds in part.items()] for part in (sweep, run_off))
    chosen = chosen_from(VARIANTS, *found, run_off=again)
    assert (chosen.variant, set(chosen.ties), chosen.images_per_s) == (variant, ties, speed)
    assert chosen.command == f"h5pack convert './celeb A' packed.h5 --chunk-rows {variant.split()[0]}"


def test_the_finalists_are_the_fastest_variants_with_chunks() -> None:
    speeds = {"2 rows": 20, "32 rows": 50, "128 rows": 60, "contiguous": 90}
    found = [measured(label, speed) for label, speed in speeds.items()]
    assert finalists(VARIANTS, found, WORKLOAD, "hot") == [found[2].case, found[1].case]


@pytest.mark.parametrize(
    ("num_images", "caches", "expected"),
    [(20_000, ("hot", "cold"), "hot"), (20_000_000, ("hot", "cold"), "cold"), (20_000_000, ("hot",), "hot"),
     (20_000, ("cold",), "cold")],
)  # fmt: skip
def test_memory_decides_which_cache_state_counts(num_images: int, caches: tuple[str, ...], expected: str) -> None:
    found = [measured("32 rows", 10, 11, 12, cache=cache) for cache in caches]
    assert chosen_from(VARIANTS, *found, num_images=num_images).judged_by == expected


@pytest.mark.parametrize(
    ("speeds", "sample_rows"), [((50.0, 51.0), 4_000), ((20.0, 50.0, 90.0), 4_000), ((50.0, 51.0, 52.0), 100)]
)
def test_few_repeats_wide_spread_or_small_samples_are_doubts(speeds: tuple[float, ...], sample_rows: int) -> None:
    slow = measured("2 rows", 1, 2, 3)
    assert len(chosen_from(VARIANTS, measured("32 rows", *speeds), slow, sample_rows=sample_rows).doubts) == 1
    assert chosen_from(VARIANTS, measured("32 rows", 50, 51, 52), slow).doubts == ()


def test_a_single_variant_is_a_doubt_and_a_single_finalist_is_not() -> None:
    sweep = [measured("2 rows", 10, 11, 12), measured("32 rows", 99, 100, 101)]
    assert chosen_from(VARIANTS, *sweep, run_off=sweep[1:]).doubts == ()
    assert len(chosen_from(VARIANTS, sweep[1]).doubts) == 1


def test_without_measurements_there_is_no_recommendation() -> None:
    for found in ([], [measured("32 rows")], [measured("32 rows", 5.0, order="full")]):
        assert choose(VARIANTS, found, (), WORKLOAD) is None


def test_an_input_file_as_fast_as_the_others_is_kept() -> None:
    kept = replace(INPUT, images="grp/pics", labels="y")
    found = [measured("as it is", 97, 98, 99), measured("32 rows", 99, 100, 101)]
    chosen = chosen_from([kept, *VARIANTS], *found)
    assert (chosen.convert, chosen.command, chosen.gain, chosen.chunk_cache) == (False, "", None, None)
    assert f"{INPUT.path!r}, images='grp/pics', labels='y'" in chosen.code


def test_the_gain_over_the_input_file_is_stated() -> None:
    chosen = chosen_from(
        [INPUT, *VARIANTS],
        measured("as it is", 10, 11, 12),
        measured("as it is", 50, 51, 52, num_threads=1),
        measured("32 rows", 99, 100, 101),
        measured("as it is", 4.0, 5.0, 6.0, order="single", engine="default", batch_size=1, num_threads=1),
    )
    assert (chosen.convert, chosen.gain) == (True, 20.0)
    assert any("9.1 x slower" in reason for reason in chosen.reasons)


def test_the_fewest_threads_and_workers_that_are_as_fast_are_recommended() -> None:
    found = [measured("32 rows", 99, 100, 101), measured("2 rows", 1, 2, 3)]
    run_off = [
        measured("32 rows", 99, 100, 101),
        measured("32 rows", 97, 98, 99, num_threads=1),
        measured("32 rows", 60, 61, 62, num_threads=1, num_workers=1),
        measured("32 rows", 80, 81, 82, num_threads=1, num_workers=2),
        measured("32 rows", 81, 82, 83, num_threads=1, num_workers=4),
    ]
    chosen = chosen_from(VARIANTS, *found, run_off=run_off)
    assert (chosen.num_threads, chosen.num_workers, chosen.images_per_s) == (1, 2, 98)
    # Workers that were not measured are one per CPU.
    assert chosen_from(VARIANTS, *found).num_workers == 2
    assert "batch_size=256, window=16, num_threads=1" in chosen.code


@pytest.mark.parametrize(("speed", "window"), [(102, 16), (202, 64)])
def test_another_window_is_recommended_only_if_clearly_faster(speed: float, window: int) -> None:
    found = [measured("32 rows", 99, 100, 101), measured("32 rows", speed, speed, speed, window=64)]
    assert chosen_from(VARIANTS, *found).window == window


def test_the_chunk_cache_is_planned_for_all_images() -> None:
    cache = chosen_from(VARIANTS, measured("32 rows", 9, 9, 9)).chunk_cache
    assert cache is not None
    assert (cache.nbytes, cache.nslots) == (0, 625)
    gzip = replace(variant(32, "gzip"), label="32 rows gzip")
    chosen = chosen_from([gzip], measured("32 rows gzip", 9, 9, 9))
    assert chosen.chunk_cache is not None
    assert chosen.chunk_cache.nbytes == 16 * 32 * ROW_BYTES
    assert chosen.command.endswith("--chunk-rows 32 --compression gzip")


def test_the_command_has_the_options_that_made_the_rows() -> None:
    options = {"size": (64, 48), "images": "x", "labels": "labels", "layout": "nchw", "mode": "gray",
               "source_kind": "hdf5"}  # fmt: skip
    command = chosen_from(VARIANTS, measured("32 rows", 9, 9, 9), options=options, source="").command
    expected = "--chunk-rows 32 --size 64x48 --images x --layout nchw --mode gray --source hdf5"
    assert command == f"h5pack convert IMAGES packed.h5 {expected}"
