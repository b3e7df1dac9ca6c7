"""The recommendation follows the measurements, and states its doubts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from h5pack.benchmark.cases import BenchCase, FileVariant, Measurement
from h5pack.benchmark.recommend import Recommendation, Workload, choose, finalists, pick_cache_state
from tests.benchmark.test_cases import ROW_BYTES, variant

GIB = 2**30
WORKLOAD = Workload(
    source="./celeb A",
    options={},
    num_images=20_000,
    row_bytes=ROW_BYTES,
    sample_rows=4_000,
    row_shape=(100, 100, 10),
    default_chunk_rows=40,
    memory_bytes=16 * GIB,
    batch_size=256,
    window=16,
    num_threads=2,
    cpus=2,
    copy_speed=100_000.0,
)
VARIANTS: Sequence[FileVariant] = [variant(2), variant(32), variant(128), variant(None)]
INPUT = variant(100, is_input=True)


def measured(label: str, *speeds: float, **changes: object) -> Measurement:
    return Measurement(replace(BenchCase(label, "window", "direct", "hot", 256, 16, 2), **changes), speeds)  # type: ignore[arg-type]


def chosen_from(
    variants: Sequence[FileVariant],
    measurements: Sequence[Measurement],
    run_off: Sequence[Measurement] = (),
    workload: Workload = WORKLOAD,
) -> Recommendation:
    chosen = choose(variants, measurements, run_off, workload)
    assert chosen is not None
    return chosen


def test_the_fastest_variant_wins_if_clearly_faster() -> None:
    found = [measured("2 rows", 10, 11, 12), measured("32 rows", 20, 21, 22), measured("128 rows", 50, 51, 52)]
    chosen = chosen_from(VARIANTS, found)
    assert (chosen.variant, chosen.chunk_rows, chosen.images_per_s) == ("128 rows", 128, 51)
    assert chosen.ties == ("128 rows",)
    assert chosen.doubts == ()
    assert chosen.command == "h5pack convert './celeb A' packed.h5 --chunk-rows 128"


def test_among_ties_the_variant_nearest_to_the_default_wins() -> None:
    found = [measured("2 rows", 98, 99, 100), measured("32 rows", 97, 98, 99), measured("128 rows", 100, 101, 102)]
    chosen = chosen_from(VARIANTS, found)
    assert chosen.variant == "32 rows"
    assert set(chosen.ties) == {"2 rows", "32 rows", "128 rows"}


def test_rows_without_chunks_are_never_recommended() -> None:
    found = [measured("32 rows", 50, 51, 52), measured("contiguous", 90, 91, 92)]
    assert chosen_from(VARIANTS, found).variant == "32 rows"
    assert finalists(VARIANTS, found, WORKLOAD, "hot") == [found[0].case]


def test_a_run_off_with_enough_repeats_replaces_the_sweep() -> None:
    sweep = [measured("2 rows", 60), measured("32 rows", 100, 101, 102), measured("128 rows", 30, 31, 32)]
    run_off = [measured("2 rows", 95, 96, 97), measured("32 rows", 50, 51, 62)]
    chosen = chosen_from(VARIANTS, sweep, run_off)
    assert (chosen.variant, chosen.ties, chosen.images_per_s) == ("2 rows", ("2 rows",), 96)


def test_too_few_repeats_of_the_run_off_are_pooled_with_the_sweep() -> None:
    sweep = [measured("2 rows", 60), measured("32 rows", 100), measured("128 rows", 30, 31, 32)]
    run_off = [measured("2 rows", 50, 62), measured("32 rows", 90, 91)]
    chosen = chosen_from(VARIANTS, sweep, run_off)
    assert (chosen.variant, chosen.ties, chosen.images_per_s) == ("32 rows", ("32 rows",), 91)


@pytest.mark.parametrize(
    ("num_images", "caches", "expected"),
    [
        (20_000, ("hot", "cold"), "hot"),
        (20_000_000, ("hot", "cold"), "cold"),
        (20_000_000, ("hot",), "hot"),
        (20_000, ("cold",), "cold"),
    ],
)
def test_memory_decides_which_cache_state_counts(num_images: int, caches: tuple[str, ...], expected: str) -> None:
    found = [measured("32 rows", 10, 11, 12, cache=cache) for cache in caches]
    workload = replace(WORKLOAD, num_images=num_images)
    assert pick_cache_state(workload, found)[0] == expected
    assert chosen_from(VARIANTS, found, (), workload).judged_by == expected


@pytest.mark.parametrize(
    ("speeds", "sample_rows"), [((50.0, 51.0), 4_000), ((20.0, 50.0, 90.0), 4_000), ((50.0, 51.0, 52.0), 100)]
)
def test_few_repeats_wide_spread_or_small_samples_are_doubts(speeds: tuple[float, ...], sample_rows: int) -> None:
    found = [measured("32 rows", *speeds), measured("2 rows", 1, 2, 3)]
    assert len(chosen_from(VARIANTS, found, (), replace(WORKLOAD, sample_rows=sample_rows)).doubts) == 1
    assert chosen_from(VARIANTS, [measured("32 rows", 50, 51, 52), found[1]]).doubts == ()


def test_a_single_variant_is_a_doubt_and_a_single_finalist_is_not() -> None:
    sweep = [measured("2 rows", 10, 11, 12), measured("32 rows", 99, 100, 101)]
    assert chosen_from(VARIANTS, sweep, sweep[1:]).doubts == ()
    assert len(chosen_from(VARIANTS, sweep[1:]).doubts) == 1


def test_without_measurements_there_is_no_recommendation() -> None:
    assert choose(VARIANTS, [], (), WORKLOAD) is None
    assert choose(VARIANTS, [measured("32 rows")], (), WORKLOAD) is None
    assert choose(VARIANTS, [measured("32 rows", 5.0, order="full")], (), WORKLOAD) is None


def test_an_input_file_as_fast_as_the_others_is_kept() -> None:
    found = [measured("as it is", 97, 98, 99), measured("32 rows", 99, 100, 101)]
    chosen = chosen_from([INPUT, *VARIANTS], found)
    assert not chosen.convert
    assert (chosen.command, chosen.gain, chosen.chunk_cache) == ("", None, None)
    assert repr(INPUT.path) in chosen.code


def test_the_gain_over_the_input_file_is_stated() -> None:
    found = [
        measured("as it is", 10, 11, 12),
        measured("32 rows", 99, 100, 101),
        measured("as it is", 4.0, 5.0, 6.0, order="single", engine="default", batch_size=1, num_threads=1),
    ]
    chosen = chosen_from([INPUT, *VARIANTS], found)
    assert chosen.convert
    assert chosen.gain == 20.0
    assert any("9.1 x slower" in reason for reason in chosen.reasons)


def test_the_input_file_is_compared_at_the_settings_of_the_sweep() -> None:
    found = [
        measured("as it is", 50, 51, 52),
        measured("as it is", 10, 11, 12, batch_size=8),
        measured("as it is", 20, 21, 22, num_threads=1),
        measured("32 rows", 99, 100, 101),
    ]
    assert any("51 images/s" in reason for reason in chosen_from([INPUT, *VARIANTS], found).reasons)


def test_the_fewest_threads_and_workers_that_are_as_fast_are_recommended() -> None:
    found = [measured("32 rows", 99, 100, 101), measured("2 rows", 1, 2, 3)]
    run_off = [
        measured("32 rows", 99, 100, 101),
        measured("32 rows", 97, 98, 99, num_threads=1),
        measured("32 rows", 60, 61, 62, num_threads=1, num_workers=1),
        measured("32 rows", 80, 81, 82, num_threads=1, num_workers=2),
        measured("32 rows", 81, 82, 83, num_threads=1, num_workers=4),
    ]
    chosen = chosen_from(VARIANTS, found, run_off)
    assert (chosen.num_threads, chosen.num_workers) == (1, 2)
    assert "batch_size=256, window=16, num_threads=1" in chosen.code


def test_the_speed_is_that_of_the_recommended_threads() -> None:
    found = [measured("32 rows", 99, 100, 101), measured("2 rows", 1, 2, 3)]
    run_off = [measured("32 rows", 99, 100, 101), measured("32 rows", 180, 190, 200, num_threads=8)]
    chosen = chosen_from(VARIANTS, found, run_off)
    assert (chosen.num_threads, chosen.images_per_s) == (8, 190)


def test_workers_that_were_not_measured_are_one_per_cpu() -> None:
    assert chosen_from(VARIANTS, [measured("32 rows", 9, 9, 9)]).num_workers == 2


@pytest.mark.parametrize(("speed", "window"), [(102, 16), (202, 64)])
def test_another_window_is_recommended_only_if_clearly_faster(speed: float, window: int) -> None:
    found = [measured("32 rows", 99, 100, 101), measured("32 rows", speed, speed, speed, window=64)]
    assert chosen_from(VARIANTS, found).window == window


def test_the_chunk_cache_is_planned_for_all_images() -> None:
    cache = chosen_from(VARIANTS, [measured("32 rows", 9, 9, 9)]).chunk_cache
    assert cache is not None
    assert (cache.nbytes, cache.nslots) == (0, 625)
    gzip = replace(variant(32, "gzip"), label="32 rows gzip")
    chosen = chosen_from([gzip], [measured("32 rows gzip", 9, 9, 9)])
    assert chosen.chunk_cache is not None
    assert chosen.chunk_cache.nbytes == 16 * 32 * ROW_BYTES
    assert chosen.command.endswith("--chunk-rows 32 --compression gzip")


def test_the_command_has_the_options_that_made_the_rows() -> None:
    options = {"size": (64, 48), "images": "x", "labels": "labels", "layout": "nchw", "mode": "gray",
               "source_kind": "hdf5"}  # fmt: skip
    workload = replace(WORKLOAD, options=options, source="")
    command = chosen_from(VARIANTS, [measured("32 rows", 9, 9, 9)], (), workload).command
    expected = "--chunk-rows 32 --size 64x48 --images x --layout nchw --mode gray --source hdf5"
    assert command == f"h5pack convert IMAGES packed.h5 {expected}"


def test_the_code_names_the_datasets_of_a_kept_file() -> None:
    kept = replace(INPUT, images="grp/pics", labels="y")
    chosen = chosen_from([kept], [measured("as it is", 97, 98, 99)])
    assert "images='grp/pics', labels='y'" in chosen.code
