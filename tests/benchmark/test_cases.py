"""The settings are checked, and the most important cases come first, whole levels at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from h5pack.benchmark.cases import (
    CACHES,
    ENGINES,
    ORDERS,
    BenchCase,
    BenchSettings,
    FileVariant,
    all_cases,
    enough_seconds,
    exceeds_decode_budget,
    min_bench_seconds,
    min_seconds,
    plan_cases,
)
from h5pack.errors import OptionsError
from tests.benchmark.reports import packed

ROW_BYTES = 100_000


def variant(rows: int | None, compression: str = "none", **changes: Any) -> FileVariant:
    """A file with this chunk size, or without chunks."""
    label = "as it is" if changes.get("is_input") else "contiguous" if rows is None else f"{rows} rows"
    sizes = {"rows": 4_000, "chunk_rows": rows, "chunk_bytes": None if rows is None else rows * ROW_BYTES}
    found = replace(packed(1, compression), label=label, path=f"/{label}.h5", row_bytes=ROW_BYTES, **sizes)
    return replace(found, **changes)


VARIANTS = [variant(2), variant(32), variant(None)]


def every(variants: list[FileVariant] = VARIANTS, **settings: Any) -> list[BenchCase]:
    return all_cases(variants, BenchSettings(**settings), settings.get("batch_size", (256,))[0], 2)


def planned(seconds: float = 1e6, variants: list[FileVariant] = VARIANTS, **settings: Any) -> list[BenchCase]:
    return plan_cases(every(variants, **settings), seconds)


def kinds(cases: Iterable[BenchCase]) -> set[tuple[str, str, str]]:
    return {(case.order, case.engine, case.cache) for case in cases}


def test_with_time_enough_everything_is_measured_once() -> None:
    cases = planned()
    assert len(set(cases)) == len(cases)
    chunked = {(order, engine, cache) for order in ORDERS for engine in ENGINES for cache in CACHES}
    for one in VARIANTS:
        # Without chunks there is no chunk cache to tune.
        expected = chunked if one.chunk_rows else {kind for kind in chunked if kind[1] != "tuned"}
        assert kinds(case for case in cases if case.variant == one.label) == expected
    assert {case.batch_size for case in cases if case.order == "single"} == {1}
    assert {case.num_threads for case in cases if case.engine == "default"} == {1}


@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.5, 5.0, 10.0, 20.0])
def test_what_decides_comes_first_and_the_time_is_kept(seconds: float) -> None:
    taken = plan_cases(every(), seconds)
    first = taken[: len(VARIANTS)]
    if seconds >= 2.5:
        assert kinds(first) == {("window", "direct", "hot")}
        assert {case.variant for case in first} == {one.label for one in VARIANTS}
    assert sum(map(min_seconds, taken)) <= seconds
    # A level is whole: a kind is there for all files, or for none.
    assert set(taken) <= set(planned())
    assert not kinds(taken) & kinds(set(planned()) - set(taken))


def test_other_settings_are_tried_in_the_direct_window_shuffle_alone() -> None:
    settings = {"batch_size": (64, 256), "num_threads": (1, 2, 4), "num_workers": (0, 3), "window": (16, 4)}
    cases = planned(variants=[variant(32)], caches=("hot",), **settings)
    varied = [case for case in cases if (case.order, case.engine) == ("window", "direct")]
    assert sorted(repr((case.batch_size, case.window, case.num_threads, case.num_workers)) for case in varied) == [
        "(256, 16, 2, None)", "(64, 16, 1, 0)", "(64, 16, 1, 3)", "(64, 16, 1, None)", "(64, 16, 2, None)",
        "(64, 16, 4, None)", "(64, 4, 2, None)",
    ]  # fmt: skip
    assert {case.order for case in planned(variants=[variant(32)], orders=("full",), **settings)} == {"full"}
    # A small sample reduces the first batch size to the second.
    reduced = all_cases(VARIANTS, BenchSettings(**settings), 256, 2)
    assert len(set(reduced)) == len(reduced)


def test_a_full_shuffle_that_decodes_gigabytes_a_batch_is_left_out() -> None:
    slow = variant(1_000, "gzip", chunk_bytes=2**29)
    assert [exceeds_decode_budget(one, 256) for one in (slow, variant(1_000), variant(2, "gzip"))] == [
        True, False, False,
    ]  # fmt: skip
    assert {case.order for case in planned(variants=[slow])} == {"sequential", "window", "single"}


def test_more_to_compare_needs_more_time() -> None:
    few = min_bench_seconds(every())
    assert min_bench_seconds(every(2 * VARIANTS)) == pytest.approx(2 * few)
    assert min_bench_seconds(every(orders=("full",))) == pytest.approx(few / 4, rel=0.3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seconds", 0), ("seconds", float("nan")), ("orders", ("random",)), ("engines", ()), ("caches", ("warm",)),
        ("num_threads", (0,)), ("num_workers", (-1,)), ("chunk_rows", (0,)), ("rows", 0), ("batch_size", ()),
        ("compression", ("zip",)), ("seed", -1), ("seed", None), ("rows", True), ("rows", (2,)),
        ("num_images", (2, 1)),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(OptionsError) as caught:
        BenchSettings(**{name: value})
    assert caught.value.parameters[0].split("=")[0] == name


def test_numbers_of_numpy_become_those_of_python() -> None:
    numbers: dict[str, Any] = {"seconds": np.float64(9), "batch_size": (np.int64(8),), "rows": np.uint8(9)}
    found = BenchSettings(**numbers, chunk_rows=(np.int32(2),))  # type: ignore[arg-type]
    assert (type(found.seconds), BenchSettings(seconds=9).seconds) == (float, 9)
    assert {type(value) for value in (found.rows, *found.batch_size, *found.chunk_rows)} == {int}


def test_the_seconds_that_are_called_enough_leave_time_for_all_cases() -> None:
    cases = [BenchCase("2 rows", order, "tuned", "cold", 256, 16, 2) for order in ORDERS] * 50  # 200 of 0.2 s
    assert enough_seconds(60, 20, cases) in (150, 151)  # 1.25 x 40 s instead of 20.
    assert enough_seconds(60, -1, cases) in (111, 112)
    assert sorted(map(repr, plan_cases(cases, 20 * 150 / 60))) == sorted(map(repr, cases))
