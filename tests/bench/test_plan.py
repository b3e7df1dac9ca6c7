"""The most important cells come first, whole levels at a time, and what is left out is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from h5pack.bench.cell import Cell, Stored
from h5pack.bench.plan import is_hopeless, least_of, least_seconds, plan_cells
from h5pack.bench.settings import BenchSettings
from h5pack.errors import OptionsError

ROW_BYTES = 100_000


def stored(rows: int | None, compression: str = "none", *, own: bool = False) -> Stored:
    label = "as it is" if own else "contiguous" if rows is None else f"{rows} rows"
    size = None if rows is None else rows * ROW_BYTES
    return Stored(label, f"/{label}.h5", "images", "labels", 4_000, rows, size, ROW_BYTES, compression, 0, 1.0, own)


FILES = [stored(2), stored(32), stored(None)]


def cost(cells: tuple[Cell, ...]) -> float:
    return sum(map(least_of, cells))


def test_with_time_enough_everything_is_measured_once() -> None:
    plan = plan_cells(FILES, BenchSettings(), 256, 2, 1e6)
    assert plan.left_out == ()
    cells = [*plan.hot, *plan.cold]
    assert len(set(cells)) == len(cells)
    chunked = {(order, engine, cache) for order in ("sequential", "window", "full", "single")
               for engine in ("direct", "tuned", "default") for cache in ("hot", "cold")}  # fmt: skip
    for one in FILES:
        found = {(cell.order, cell.engine, cell.cache) for cell in cells if cell.stored == one.label}
        # Without chunks there is no chunk cache to tune.
        assert found == (chunked if one.chunk_rows else {item for item in chunked if item[1] != "tuned"})
    assert {cell.batch for cell in cells if cell.order == "single"} == {1}
    assert {cell.threads for cell in cells if cell.engine == "default"} == {1}


@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.5, 5.0, 10.0, 20.0])
def test_what_decides_comes_first_and_the_time_is_kept(seconds: float) -> None:
    plan = plan_cells(FILES, BenchSettings(), 256, 2, seconds)
    taken = {*plan.hot, *plan.cold}
    assert {cell.stored for cell in plan.hot if (cell.order, cell.engine) == ("window", "direct")} == {
        one.label for one in FILES
    }
    first = tuple(cell for cell in plan.hot if (cell.order, cell.engine) == ("window", "direct"))
    assert cost((*plan.hot, *plan.cold)) <= max(seconds, cost(first))
    everything = plan_cells(FILES, BenchSettings(), 256, 2, 1e6)
    assert taken | set(plan.left_out) == {*everything.hot, *everything.cold}
    assert not taken & set(plan.left_out)
    # A level is whole: an order and engine is there for all files, or for none.
    for cell in plan.left_out:
        same = [
            other
            for other in taken
            if (other.order, other.engine, other.cache) == (cell.order, cell.engine, cell.cache)
        ]
        assert same == []


def test_variants_are_of_the_direct_window_shuffle_alone() -> None:
    settings = BenchSettings(batch_sizes=(64, 256), threads=(1, 2, 4), workers=(0, 3), windows=(16, 4), caches=("hot",))
    plan = plan_cells([stored(32)], settings, 64, 2, 1e6)
    varied = [cell for cell in plan.hot if (cell.order, cell.engine) == ("window", "direct")]
    assert {(cell.batch, cell.window, cell.threads, cell.workers) for cell in varied} == {
        (64, 16, 2, None), (256, 16, 2, None), (64, 4, 2, None), (64, 16, 1, None), (64, 16, 4, None), (64, 16, 1, 0),
        (64, 16, 1, 3),
    }  # fmt: skip
    assert len(varied) == 7
    plan = plan_cells([stored(32)], replace(settings, orders=("full",)), 64, 2, 1e6)
    assert {cell.order for cell in plan.hot} == {"full"}


def test_a_full_shuffle_that_decodes_gigabytes_a_batch_is_left_out() -> None:
    slow = stored(1_000, "gzip")
    assert is_hopeless(replace(slow, chunk_bytes=2**29), 256)
    assert not is_hopeless(stored(1_000), 256)
    assert not is_hopeless(stored(2, "gzip"), 256)
    plan = plan_cells([replace(slow, chunk_bytes=2**29)], BenchSettings(), 256, 2, 1e6)
    assert {cell.order for cell in (*plan.hot, *plan.cold)} == {"sequential", "window", "single"}


def test_more_to_compare_needs_more_time() -> None:
    settings = BenchSettings()
    few, many = (least_seconds(files, settings, 256, 2) for files in (FILES, [*FILES, *FILES]))
    assert many == pytest.approx(2 * few)
    more = replace(settings, workers=(1, 2, 4))
    assert least_seconds(FILES, more, 256, 2) == pytest.approx(4 * few)
    # Without the order that decides, another one is the least.
    assert least_seconds(FILES, replace(settings, orders=("full",)), 256, 2) > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seconds": 0}, "seconds is 0"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"orders": ("random",)}, "orders random: give some of sequential"),
        ({"engines": ()}, "engines (none)"),
        ({"caches": ("warm",)}, "caches warm"),
        ({"threads": (0,)}, "threads has 0"),
        ({"workers": (-1,)}, "workers has -1"),
        ({"chunk_rows": (0,)}, "no size of a chunk"),
        ({"rows": 0}, "no size of a chunk or sample"),
        ({"compressions": ("zip",)}, "zip"),
        ({"batch_sizes": ()}, "batch_sizes is empty"),
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(OptionsError) as caught:
        BenchSettings(**wrong)  # type: ignore[arg-type]
    assert message in str(caught.value)
