"""The settings are checked, and the most important cases come first, whole levels at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from h5pack.benchmark.cases import (
    BenchCase,
    BenchSettings,
    FileVariant,
    exceeds_decode_budget,
    min_bench_seconds,
    min_seconds,
    plan_cases,
)
from h5pack.errors import OptionsError
from tests.benchmark.reports import packed

ROW_BYTES = 100_000


def variant(rows: int | None, compression: str = "none", *, is_input: bool = False) -> FileVariant:
    label = "as it is" if is_input else "contiguous" if rows is None else f"{rows} rows"
    sizes = {"rows": 4_000, "chunk_rows": rows, "chunk_bytes": None if rows is None else rows * ROW_BYTES}
    return replace(
        packed(1, compression), label=label, path=f"/{label}.h5", row_bytes=ROW_BYTES, is_input=is_input, **sizes
    )


VARIANTS = [variant(2), variant(32), variant(None)]


def cost(cases: tuple[BenchCase, ...]) -> float:
    return sum(map(min_seconds, cases))


def test_with_time_enough_everything_is_measured_once() -> None:
    plan = plan_cases(VARIANTS, BenchSettings(), 256, 2, 1e6)
    assert plan.left_out == ()
    cases = [*plan.hot, *plan.cold]
    assert len(set(cases)) == len(cases)
    chunked = {(order, engine, cache) for order in ("sequential", "window", "full", "single")
               for engine in ("direct", "tuned", "default") for cache in ("hot", "cold")}  # fmt: skip
    for one in VARIANTS:
        found = {(case.order, case.engine, case.cache) for case in cases if case.variant == one.label}
        # Without chunks there is no chunk cache to tune.
        assert found == (chunked if one.chunk_rows else {item for item in chunked if item[1] != "tuned"})
    assert {case.batch_size for case in cases if case.order == "single"} == {1}
    assert {case.num_threads for case in cases if case.engine == "default"} == {1}


@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.5, 5.0, 10.0, 20.0])
def test_what_decides_comes_first_and_the_time_is_kept(seconds: float) -> None:
    plan = plan_cases(VARIANTS, BenchSettings(), 256, 2, seconds)
    taken = {*plan.hot, *plan.cold}
    first = tuple(case for case in plan.hot if (case.order, case.engine) == ("window", "direct"))
    assert {case.variant for case in first} == {one.label for one in VARIANTS}
    assert cost((*plan.hot, *plan.cold)) <= max(seconds, cost(first))
    everything = plan_cases(VARIANTS, BenchSettings(), 256, 2, 1e6)
    assert taken | set(plan.left_out) == {*everything.hot, *everything.cold}
    assert not taken & set(plan.left_out)
    # A level is whole: an order and engine is there for all files, or for none.
    kinds, kinds_left_out = (
        {(case.order, case.engine, case.cache) for case in cases} for cases in (taken, plan.left_out)
    )
    assert not kinds & kinds_left_out


def test_variants_are_of_the_direct_window_shuffle_alone() -> None:
    settings = BenchSettings(
        batch_size=(64, 256), num_threads=(1, 2, 4), num_workers=(0, 3), window=(16, 4), caches=("hot",)
    )
    plan = plan_cases([variant(32)], settings, 64, 2, 1e6)
    varied = [case for case in plan.hot if (case.order, case.engine) == ("window", "direct")]
    assert {(case.batch_size, case.window, case.num_threads, case.num_workers) for case in varied} == {
        (64, 16, 2, None), (256, 16, 2, None), (64, 4, 2, None), (64, 16, 1, None), (64, 16, 4, None), (64, 16, 1, 0),
        (64, 16, 1, 3),
    }  # fmt: skip
    assert len(varied) == 7
    plan = plan_cases([variant(32)], replace(settings, orders=("full",)), 64, 2, 1e6)
    assert {case.order for case in plan.hot} == {"full"}


def test_a_full_shuffle_that_decodes_gigabytes_a_batch_is_left_out() -> None:
    slow = variant(1_000, "gzip")
    assert exceeds_decode_budget(replace(slow, chunk_bytes=2**29), 256)
    assert not exceeds_decode_budget(variant(1_000), 256)
    assert not exceeds_decode_budget(variant(2, "gzip"), 256)
    plan = plan_cases([replace(slow, chunk_bytes=2**29)], BenchSettings(), 256, 2, 1e6)
    assert {case.order for case in (*plan.hot, *plan.cold)} == {"sequential", "window", "single"}


def test_more_to_compare_needs_more_time() -> None:
    settings = BenchSettings()
    few, many = (min_bench_seconds(files, settings, 256, 2) for files in (VARIANTS, [*VARIANTS, *VARIANTS]))
    assert many == pytest.approx(2 * few)
    more = replace(settings, num_workers=(1, 2, 4))
    assert min_bench_seconds(VARIANTS, more, 256, 2) == pytest.approx(4 * few)
    # Without the order that decides, another one is the least.
    assert min_bench_seconds(VARIANTS, replace(settings, orders=("full",)), 256, 2) > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seconds", 0), ("seconds", float("nan")), ("orders", ("random",)), ("engines", ()), ("caches", ("warm",)),
        ("num_threads", (0,)), ("num_workers", (-1,)), ("chunk_rows", (0,)), ("rows", 0), ("batch_size", ()),
        ("compression", ("zip",)),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(OptionsError) as caught:
        BenchSettings(**{name: value})  # type: ignore[arg-type]
    assert caught.value.parameters[0].startswith(f"{name}=")
