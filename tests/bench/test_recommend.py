"""The recommendation follows the figures, and says where they do not suffice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from h5pack.bench.cell import Cell, Measurement, Stored
from h5pack.bench.recommend import Question, choose, contenders, decisive
from h5pack.pack.options import ConvertOptions
from tests.bench.test_plan import ROW_BYTES, stored

GIB = 2**30
QUESTION = Question(
    source="./celeb A",
    options=ConvertOptions(),
    images=20_000,
    row_bytes=ROW_BYTES,
    sample_rows=4_000,
    row_shape=(100, 100, 10),
    default_rows=40,
    memory=16 * GIB,
    batch=256,
    window=16,
    threads=2,
    cpus=2,
    copy=100_000.0,
)


def measured(
    form: str, *speeds: float, order: str = "window", engine: str = "direct", cache: str = "hot", **other: int
) -> Measurement:
    cell = Cell(form, order, engine, cache, other.get("batch", 256), other.get("window", 16), other.get("threads", 2),
                other.get("workers"))  # fmt: skip
    return Measurement(cell, speeds)


FILES: Sequence[Stored] = [stored(2), stored(32), stored(128), stored(None)]


def test_the_fastest_wins_where_it_is_clearly_so() -> None:
    found = [measured("2 rows", 10, 11, 12), measured("32 rows", 20, 21, 22), measured("128 rows", 50, 51, 52)]
    chosen = choose(FILES, found, (), QUESTION)
    assert chosen is not None
    assert (chosen.stored, chosen.chunk_rows, chosen.images_per_s) == ("128 rows", 128, 51)
    assert chosen.alike == ("128 rows",)
    assert chosen.sure
    assert "--chunk-rows 128" in chosen.command
    assert "'./celeb A'" in chosen.command
    assert "0.00 of a memory copy" in chosen.reasons[0]


def test_of_those_alike_the_one_nearest_to_a_plain_conversion_is_taken() -> None:
    found = [measured("2 rows", 98, 99, 100), measured("32 rows", 97, 98, 99), measured("128 rows", 100, 101, 102)]
    chosen = choose(FILES, found, (), QUESTION)
    assert chosen is not None
    assert chosen.stored == "32 rows"
    assert set(chosen.alike) == {"2 rows", "32 rows", "128 rows"}


def test_rows_without_chunks_are_never_recommended() -> None:
    found = [measured("32 rows", 50, 51, 52), measured("contiguous", 90, 91, 92)]
    chosen = choose(FILES, found, (), QUESTION)
    assert chosen is not None
    assert chosen.stored == "32 rows"
    assert contenders(FILES, found, QUESTION, "hot") == [found[0].cell]


def test_a_run_off_with_enough_repeats_decides_alone() -> None:
    sweep = [measured("2 rows", 60), measured("32 rows", 100, 101, 102), measured("128 rows", 30, 31, 32)]
    trials = [measured("2 rows", 95, 96, 97), measured("32 rows", 50, 51, 62)]
    chosen = choose(FILES, sweep, trials, QUESTION)
    assert chosen is not None
    assert chosen.stored == "2 rows"
    assert chosen.alike == ("2 rows",)
    assert chosen.images_per_s == 96
    assert "the median of 3 runs from 95 to 97" in chosen.reasons[0]
    assert "The slowest of the run-off, 32 rows, gives 51" in chosen.reasons[0]


def test_what_lost_by_less_than_runs_differ_is_named() -> None:
    trials = [measured("2 rows", 80, 90, 99), measured("32 rows", 98, 101, 102), measured("128 rows", 60, 80, 97)]
    chosen = choose(FILES, trials, trials, QUESTION)
    assert chosen is not None
    assert chosen.alike == ("32 rows",)
    assert "Slower, but by less than runs differ: 2 rows with 90." in chosen.reasons[0]


def test_repeats_of_the_sweep_count_where_the_run_off_had_no_time() -> None:
    sweep = [measured("2 rows", 60), measured("32 rows", 100), measured("128 rows", 30, 31, 32)]
    trials = [measured("2 rows", 50, 62), measured("32 rows", 90, 91)]
    chosen = choose(FILES, sweep, trials, QUESTION)
    assert chosen is not None
    assert chosen.stored == "32 rows"
    assert chosen.alike == ("32 rows",)
    assert chosen.images_per_s == 91
    assert "the median of 3 runs from 90 to 100" in chosen.reasons[0]
    assert "The slowest of the run-off, 2 rows, gives 60" in chosen.reasons[0]


@pytest.mark.parametrize(
    ("images", "caches", "expected"),
    [
        (20_000, ("hot", "cold"), "hot"),
        (20_000_000, ("hot", "cold"), "cold"),
        (20_000_000, ("hot",), "hot"),
        (20_000, ("cold",), "cold"),
    ],
)
def test_memory_tells_whether_warm_or_cold_reads_decide(images: int, caches: tuple[str, ...], expected: str) -> None:
    found = [measured("32 rows", 10, 11, 12, cache=cache) for cache in caches]
    cache, why = decisive(replace(QUESTION, images=images), found)
    assert cache == expected
    assert why.startswith(f"Judged with the page cache {'warm' if expected == 'hot' else 'cold'}")
    if (images, caches) == (20_000_000, ("hot",)):
        assert "cold reads were not measured" in why


@pytest.mark.parametrize(
    ("speeds", "rows", "doubt"),
    [
        ((50.0, 51.0), 4_000, "2 times only"),
        ((20.0, 50.0, 90.0), 4_000, "differ by more than 40 %"),
        ((50.0, 51.0, 52.0), 100, "100 rows only"),
    ],
)
def test_it_is_not_sure_where_little_was_measured(speeds: tuple[float, ...], rows: int, doubt: str) -> None:
    found = [measured("32 rows", *speeds), measured("2 rows", 1, 2, 3)]
    chosen = choose(FILES, found, (), replace(QUESTION, sample_rows=rows))
    assert chosen is not None
    assert not chosen.sure
    assert any(reason.startswith("Not sure: ") and doubt in reason for reason in chosen.reasons)


def test_a_single_survivor_of_the_sweep_was_compared() -> None:
    sweep = [measured("2 rows", 10, 11, 12), measured("32 rows", 99, 100, 101)]
    chosen = choose(FILES, sweep, [measured("32 rows", 99, 100, 101)], QUESTION)
    assert chosen is not None
    assert chosen.sure
    alone = choose(FILES, sweep[1:], [measured("32 rows", 99, 100, 101)], QUESTION)
    assert alone is not None
    assert any("nothing to compare it with" in reason for reason in alone.reasons)


def test_nothing_measured_nothing_recommended() -> None:
    assert choose(FILES, [], [], QUESTION) is None
    failed = Measurement(measured("32 rows").cell, reason="no")
    assert choose(FILES, [failed], [], QUESTION) is None
    assert choose(FILES, [measured("contiguous", 1, 2, 3)], [], QUESTION) is None


def test_a_file_that_is_as_good_is_kept() -> None:
    own = replace(stored(100, own=True), path="/data/theirs.h5")
    found = [measured("as it is", 97, 98, 99), measured("32 rows", 99, 100, 101)]
    chosen = choose([own, *FILES], found, (), QUESTION)
    assert chosen is not None
    assert not chosen.convert
    assert chosen.command == ""
    assert "'/data/theirs.h5'" in chosen.code
    assert chosen.gain is None


def test_what_a_foreign_file_loses_is_said() -> None:
    own = stored(100, own=True)
    found = [
        measured("as it is", 10, 11, 12),
        measured("32 rows", 99, 100, 101),
        Measurement(Cell("as it is", "single", "default", "hot", 1, 16, 1), (4.0, 5.0, 6.0)),
    ]
    chosen = choose([own, *FILES], found, (), QUESTION)
    assert chosen is not None
    assert chosen.convert
    assert chosen.gain == 20.0
    assert any("gives H5Loader 11 images/s, 9.1 times less" in reason for reason in chosen.reasons)
    assert any("gives 5 images/s of it, 20.0 times less" in reason for reason in chosen.reasons)


def test_the_fewest_threads_and_workers_that_are_as_fast() -> None:
    found = [measured("32 rows", 99, 100, 101, threads=2), measured("2 rows", 1, 2, 3)]
    trials = [
        measured("32 rows", 99, 100, 101),
        measured("32 rows", 97, 98, 99, threads=1),
        measured("32 rows", 60, 61, 62, threads=1, workers=1),
        measured("32 rows", 80, 81, 82, threads=1, workers=2),
        measured("32 rows", 81, 82, 83, threads=1, workers=4),
    ]
    chosen = choose(FILES, found, trials, QUESTION)
    assert chosen is not None
    assert (chosen.threads, chosen.workers) == (1, 2)
    assert "num_workers=2" in chosen.code
    assert "threads=1" in chosen.code


def test_the_figure_is_that_of_the_recommended_threads() -> None:
    found = [measured("32 rows", 99, 100, 101, threads=2), measured("2 rows", 1, 2, 3)]
    trials = [measured("32 rows", 99, 100, 101), measured("32 rows", 180, 190, 200, threads=8)]
    chosen = choose(FILES, found, trials, QUESTION)
    assert chosen is not None
    assert (chosen.threads, chosen.images_per_s) == (8, 190)


def test_a_file_is_compared_with_the_settings_of_the_sweep() -> None:
    own = stored(100, own=True)
    found = [
        measured("as it is", 50, 51, 52),
        measured("as it is", 10, 11, 12, batch=8),
        measured("as it is", 20, 21, 22, threads=1),
        measured("32 rows", 99, 100, 101),
    ]
    chosen = choose([own, *FILES], found, (), QUESTION)
    assert chosen is not None
    assert any("gives H5Loader 51 images/s" in reason for reason in chosen.reasons)


def test_the_code_names_the_datasets_of_a_file_that_is_kept() -> None:
    own = replace(stored(100, own=True), images="grp/pics", labels="y")
    chosen = choose([own], [measured("as it is", 97, 98, 99)], (), QUESTION)
    assert chosen is not None
    assert "images='grp/pics', labels='y'" in chosen.code


def test_workers_that_were_not_measured_are_said_to_be_a_guess() -> None:
    chosen = choose(FILES, [measured("32 rows", 9, 9, 9)], (), QUESTION)
    assert chosen is not None
    assert chosen.workers == 2
    assert any("not measured" in reason for reason in chosen.reasons)


def test_another_window_is_taken_only_if_it_is_clearly_faster() -> None:
    found = [measured("32 rows", 99, 100, 101), measured("32 rows", 100, 102, 103, window=64)]
    chosen = choose(FILES, found, (), QUESTION)
    assert chosen is not None
    assert chosen.window == 16
    found = [measured("32 rows", 49, 50, 51), measured("32 rows", 100, 102, 103, window=64)]
    chosen = choose(FILES, found, (), QUESTION)
    assert chosen is not None
    assert chosen.window == 64


def test_the_cache_plan_is_that_of_the_recommended_chunks() -> None:
    chosen = choose(FILES, [measured("32 rows", 9, 9, 9)], (), QUESTION)
    assert chosen is not None
    assert chosen.cache is not None
    assert (chosen.cache.nbytes, chosen.cache.nslots) == (0, 625), "those of all images, not of the sample"
    gzip = replace(stored(32, "gzip"), label="32 rows gzip")
    chosen = choose([gzip], [measured("32 rows gzip", 9, 9, 9)], (), QUESTION)
    assert chosen is not None
    assert chosen.cache is not None
    assert chosen.cache.nbytes == 16 * 32 * ROW_BYTES
    assert "--compression gzip" in chosen.command


def test_the_command_keeps_what_the_rows_were_made_with() -> None:
    options = ConvertOptions(size=(64, 48), layout="nchw", mode="gray", images="x")
    chosen = choose(FILES, [measured("32 rows", 9, 9, 9)], (), replace(QUESTION, options=options, source=""))
    assert chosen is not None
    expected = "h5pack convert IMAGES packed.h5 --chunk-rows 32 --size 64x48 --images x --layout nchw --mode gray"
    assert chosen.command == expected
