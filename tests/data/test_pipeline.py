"""The threads that fill batches: never at a standstill, never silent about an error, gone when they should be."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import h5pack
from h5pack.data.buffers import BatchMemory, BufferPool
from h5pack.data.chunk_groups import ROWS
from h5pack.data.pipeline import Pipeline
from h5pack.data.resident import ResidentRows
from h5pack.data.selection import select_draws
from h5pack.errors import DamagedRowsError, LoaderError
from h5pack.order.window import OrderPlan
from tests.data import packs
from tests.data.packs import threads_end
from tests.stacks import watched

PATIENCE = 30.0

Finish = Callable[[int, BatchMemory], Any]


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    with watched():
        yield


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows a task, so that the small files of these tests make many."""
    monkeypatch.setattr("h5pack.data.chunk_groups.TASK_BYTES", 4 * 576)


@pytest.fixture
def dataset(tmp_path: Path) -> h5pack.H5Dataset:
    return h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5"))


def contents(_: int, memory: BatchMemory) -> dict[str, Any]:
    """What is in a full memory."""
    return {name: array.copy() for name, array in memory.arrays.items()}


def begin(
    dataset: h5pack.H5Dataset,
    plan: OrderPlan,
    threads: int = 2,
    credits: int | None = None,
    first: int = 0,
    finish: Finish = contents,
    **resident: Any,
) -> Pipeline:
    """An epoch with as few credits as there may be."""
    indexes = dataset.engine.indexes
    parts = [(name, indexes[name].row_shape, indexes[name].native_dtype) for name in dataset.names]
    pool = BufferPool([*parts, (ROWS, (), np.dtype("i8"))], plan.batch_size, pinned=False, keep=2)
    least = plan.max_group_batches + 1 if credits is None else credits
    return Pipeline(dataset, plan, 1, first, pool, num_threads=threads, credits=least, finish=finish, **resident)


def consumed(pipeline: Pipeline, first: int, end: int) -> Iterator[Any]:
    """Batches in order, and a credit for each, as the loader does it."""
    ready: dict[int, Any] = {}
    for following in range(first, end):
        while following not in ready:
            number, batch = pipeline.fetch()
            assert number not in ready
            ready[number] = batch
        yield ready.pop(following)
        pipeline.return_credit()
    assert not ready


def patiently(work: Callable[[], Any]) -> Any:
    """What `work` gives, unless it stands still."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert found, "at a standstill, or an error in the thread"
    return found[0]


def plans(dataset: h5pack.H5Dataset) -> Iterator[OrderPlan]:
    """Orders of all kinds."""
    chosen = np.random.default_rng(0).integers(0, packs.ROWS, 60)
    for shuffle, (streams, lanes), batch_size, window in itertools.product(
        ("window", "full", "chunk", False), ((1, 1), (3, 1), (2, 2), (6, 2), (4, 4), (12, 3)), (12, 36), (1, 3, 50)
    ):
        if window != 3 and shuffle != "window":
            continue
        for trim, rows in ((False, None), (True, None), (False, chosen)):
            yield OrderPlan(
                select_draws(dataset, rows)[1],
                batch_size,
                shuffle=shuffle,
                seed=5,
                window=window,
                trim=trim,
                drop_last=trim,
                rank=0,
                num_replicas=1,
                streams=streams,
                lanes=lanes,
            )


@pytest.mark.parametrize(
    ("way", "threads"), list(itertools.product(["read", "small in memory", "load", "loaded"], [1, 4]))
)
def test_the_fewest_credits_are_enough(dataset: h5pack.H5Dataset, way: str, threads: int) -> None:
    data = packs.values()
    # One thread takes every second plan, and four threads the others.
    for plan in itertools.islice(plans(dataset), threads % 2, None, 2):
        kept: dict[str, ResidentRows] = {}
        if way == "small in memory":
            kept = {"small": ResidentRows(dataset, plan.rows.unique_rows(), ["labels"])}
            kept["small"].load_all()
        elif way != "read":
            kept = {"resident": ResidentRows(dataset, plan.rows.unique_rows())}
        if way == "loaded":
            kept["resident"].load_all()
        pipeline = begin(dataset, plan, threads, **kept)
        batches = patiently(lambda pipeline=pipeline, plan=plan: list(consumed(pipeline, 0, plan.num_batches)))
        expected: list[list[int]] = [[-1] * plan.batch_rows(batch) for batch in range(plan.num_batches)]
        for group in plan.chunk_groups(1):
            dealt = np.empty_like(group.rows)
            dealt[group.positions] = group.rows
            at = 0
            for batch, slot, count in group.spans:
                expected[batch][slot : slot + count] = dealt[at : at + count].tolist()
                at += count
        assert [batch[ROWS].tolist() for batch in batches] == expected
        for batch in batches:
            assert np.array_equal(batch["images"], data[batch[ROWS]])
            assert np.array_equal(batch["labels"], batch[ROWS])
    assert threads_end()


@pytest.mark.parametrize("resident", [False, True])
def test_an_epoch_goes_on_from_any_batch(dataset: h5pack.H5Dataset, resident: bool) -> None:
    for plan in itertools.islice(plans(dataset), 0, None, 7):
        whole = patiently(lambda plan=plan: list(consumed(begin(dataset, plan), 0, plan.num_batches)))
        for first in range(plan.num_batches):
            kept = {"resident": ResidentRows(dataset, plan.rows.unique_rows())} if resident else {}
            pipeline = begin(dataset, plan, first=first, **kept)
            rest = patiently(
                lambda pipeline=pipeline, first=first, plan=plan: list(consumed(pipeline, first, plan.num_batches))
            )
            assert [batch[ROWS].tolist() for batch in rest] == [batch[ROWS].tolist() for batch in whole[first:]]
    assert threads_end()


def test_no_more_batches_are_open_than_there_are_credits(dataset: h5pack.H5Dataset) -> None:
    plan = OrderPlan(select_draws(dataset)[1], 4, shuffle="window", seed=0, window=2)
    finished: list[int] = []

    def finish(batch: int, memory: BatchMemory) -> int:
        finished.append(batch)
        return batch

    pipeline = begin(dataset, plan, threads=4, finish=finish)
    batches = consumed(pipeline, 0, plan.num_batches)
    for fetched in range(plan.num_batches):
        assert next(batches) == fetched
        time.sleep(0.002)
        # The credit of the batch in hand was not given back yet.
        assert len(finished) <= fetched + plan.max_group_batches + 1
    assert sorted(finished) == list(range(plan.num_batches))
    pipeline.stop()
    pipeline.join(5)
    assert threads_end()


def raises_at(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, until it is called for the time number `count`."""
    calls = itertools.count(1)

    def guarded(*args: Any, **settings: Any) -> Any:
        if next(calls) == count:
            raise ZeroDivisionError("on purpose")
        return function(*args, **settings)

    return guarded


@pytest.mark.parametrize(("threads", "count"), [(1, 1), (3, 5), (1, 9)])
@pytest.mark.parametrize("where", ["execute", "plan", "read", "prefetch", "load", "gather", "finish", "allocate"])
def test_an_error_reaches_the_consumer_and_ends_all_threads(
    dataset: h5pack.H5Dataset, where: str, count: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = OrderPlan(select_draws(dataset)[1], 6, shuffle="window", seed=0, window=1)
    kept: dict[str, Any] = {}
    finish: Finish = contents
    if where in ("execute", "plan", "read", "prefetch"):
        monkeypatch.setattr(dataset.engine, where, raises_at(count, getattr(dataset.engine, where)))
    elif where in ("load", "gather"):
        kept = {"resident": ResidentRows(dataset, plan.rows.unique_rows())}
        monkeypatch.setattr(kept["resident"], where, raises_at(count, getattr(kept["resident"], where)))
    elif where == "allocate":
        monkeypatch.setattr(BufferPool, where, raises_at(count, BufferPool.allocate))
    else:
        finish = raises_at(count, contents)
    pipeline = begin(dataset, plan, threads, finish=finish, **kept)

    def work() -> str:
        try:
            list(consumed(pipeline, 0, plan.num_batches))
        except ZeroDivisionError as error:
            return str(error)
        return "nothing was raised"

    assert patiently(work) == "on purpose"
    assert threads_end()


@pytest.mark.parametrize("resident", [False, True])
def test_an_error_in_the_very_last_batch_arrives(dataset: h5pack.H5Dataset, resident: bool) -> None:
    plan = OrderPlan(select_draws(dataset)[1], 6, shuffle="window", seed=0, window=2)

    def finish(batch: int, memory: BatchMemory) -> int:
        if batch == plan.num_batches - 1:
            # The other threads have nothing left to do, and end meanwhile.
            time.sleep(0.1)
            raise DamagedRowsError("late")
        return batch

    kept = {"resident": ResidentRows(dataset, plan.rows.unique_rows())} if resident else {}
    pipeline = begin(dataset, plan, 3, finish=finish, **kept)
    batches = consumed(pipeline, 0, plan.num_batches)
    assert [next(batches) for _ in range(plan.num_batches - 1)] == list(range(plan.num_batches - 1))
    with pytest.raises(DamagedRowsError, match="late"):
        next(batches)
    assert threads_end()


def test_a_stop_takes_no_lock(dataset: h5pack.H5Dataset) -> None:
    """It may come from the garbage collector, in a thread that holds the lock itself."""
    plan = OrderPlan(select_draws(dataset)[1], 6, shuffle="window", seed=0, window=2)
    for held in (False, True):
        pipeline = begin(dataset, plan)

        class Cycle:
            def __init__(self) -> None:
                self.myself = self

        forgotten = Cycle()
        weakref.finalize(forgotten, pipeline.stop)
        weakref.finalize(forgotten, pipeline.return_credit)
        del forgotten

        def collect(pipeline: Pipeline = pipeline, held: bool = held) -> bool:
            if held:
                with pipeline._lock:
                    gc.collect()
            else:
                gc.collect()
            return True

        assert patiently(collect)
        assert threads_end()


@pytest.mark.parametrize("fetched", [0, 1, 5])
def test_a_stopped_pipeline_leaves_nothing_behind(dataset: h5pack.H5Dataset, fetched: int) -> None:
    plan = OrderPlan(select_draws(dataset)[1], 6, shuffle="window", seed=0, window=3)
    gc.collect()
    gc.disable()
    try:
        for resident in (False, True):
            kept = {"resident": ResidentRows(dataset, plan.rows.unique_rows())} if resident else {}
            pipeline = begin(dataset, plan, 3, **kept)
            batches = consumed(pipeline, 0, plan.num_batches)
            for _ in range(fetched):
                next(batches)
            watch = weakref.ref(pipeline)
            pipeline.stop()
            pipeline.join()
            assert threads_end()
            del batches, pipeline, kept
            assert watch() is None, "its memory waits for the garbage collector"
    finally:
        gc.enable()


def test_a_stop_wakes_whoever_waits_for_a_batch(dataset: h5pack.H5Dataset) -> None:
    plan = OrderPlan(select_draws(dataset)[1], 6, shuffle="window", seed=0, window=2)
    hold = threading.Event()

    def finish(batch: int, memory: BatchMemory) -> int:
        hold.wait(PATIENCE)
        return batch

    pipeline = begin(dataset, plan, finish=finish)
    timer = threading.Timer(0.1, pipeline.stop)
    timer.start()
    with pytest.raises(LoaderError, match="closed"):
        pipeline.fetch()
    hold.set()
    timer.join()
    assert threads_end()


def test_a_join_from_one_of_its_own_threads_does_not_wait(dataset: h5pack.H5Dataset) -> None:
    plan = OrderPlan(select_draws(dataset)[1], 6, shuffle="window", seed=0, window=2)
    begun: list[Pipeline] = []
    there = threading.Event()

    def finish(batch: int, memory: BatchMemory) -> int:
        there.wait(PATIENCE)
        with begun[0]._lock:
            begun[0].stop()
            begun[0].join()
        return batch

    begun.append(begin(dataset, plan, 3, finish=finish))
    there.set()
    assert threads_end(5.0)
