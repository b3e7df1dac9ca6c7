"""The threads that fill batches: never at a standstill, never silent about an error, gone when they should be."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import h5pack
from h5pack.data import chunk_groups
from h5pack.data.buffers import BatchMemory, BufferPool
from h5pack.data.chunk_groups import ROWS, GroupReader
from h5pack.data.decoding import NO_KEY
from h5pack.data.gather import CachedRows, HeldRows
from h5pack.data.pipeline import EpochGroups, Pipeline
from h5pack.data.selection import select_draws
from h5pack.errors import DamagedRowsError
from h5pack.order.window import OrderPlan
from h5pack.read.mapping import MappedDataset
from tests.data import packs
from tests.data.packs import PATIENCE, in_time, threads_end


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch: pytest.MonkeyPatch, no_thread_stays: None) -> None:
    """Four rows a task, so that the small files of these tests make many."""
    monkeypatch.setattr("h5pack.data.chunk_groups.TASK_BYTES", 4 * 576)


def plan_of(dataset: h5pack.H5Dataset, window: int = 2, batch_size: int = 6) -> OrderPlan:
    return OrderPlan(select_draws(dataset)[1], batch_size, shuffle="window", seed=0, window=window)


def contents(_: int, memory: BatchMemory) -> dict[str, Any]:
    """What is in a full memory."""
    return {name: array.copy() for name, array in memory.arrays.items()}


def begin(dataset: h5pack.H5Dataset, plan: OrderPlan, threads: int = 2, first: int = 0, **settings: Any) -> Pipeline:
    """An epoch with as few credits as there may be. Two batches are copied together, if they are cached."""
    indexes = dataset.engine.indexes
    fields = [(name, indexes[name].row_shape, indexes[name].native_dtype) for name in dataset.names]
    fields.append((ROWS, (), np.dtype("i8")))
    pool = BufferPool(fields, plan.batch_size, pinned=False, keep=2)
    pool.blocks = BufferPool(fields, 2 * plan.batch_size, pinned=False, keep=2)
    usual: dict[str, Any] = {"num_threads": threads, "credits": plan.max_group_batches + 1, "finish": contents}
    usual |= {"block_rows": pool.blocks.batch_rows, "cpus": 2, "can_help": True, "max_gathered": 2, "idle": None}
    usual["owner"] = dataset  # which outlives the pipeline
    settings = {**usual, **settings}
    reader = GroupReader(dataset, pool.fields, settings.pop("held", {}), lambda *_: NO_KEY, keep=False)
    return Pipeline(reader, plan, EpochGroups(plan, 576).of(1, first), first, pool, **settings)


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


def epoch_of(dataset: h5pack.H5Dataset, plan: OrderPlan, first: int = 0, **settings: Any) -> list[dict[str, Any]]:
    """The batches of an epoch from number `first` on."""
    pipeline = begin(dataset, plan, first=first, **settings)
    return in_time(lambda: list(consumed(pipeline, first, plan.num_batches)))


def plans(dataset: h5pack.H5Dataset) -> Iterator[OrderPlan]:
    """Orders of all kinds."""
    chosen = np.random.default_rng(0).integers(0, packs.ROWS, 60)
    streams_and_lanes = ((1, 1), (3, 1), (2, 2), (6, 2), (4, 4), (12, 3))
    shuffles = [*itertools.product(["window"], (1, 3, 50)), ("full", 3), ("chunk", 3), (False, 3)]
    for (shuffle, window), (streams, lanes), batch_size in itertools.product(shuffles, streams_and_lanes, (12, 36)):
        settings: dict[str, Any] = {"shuffle": shuffle, "seed": 5, "window": window, "streams": streams, "lanes": lanes}
        for cut, rows in ((False, None), (True, None), (False, chosen)):
            yield OrderPlan(select_draws(dataset, rows)[1], batch_size, **settings, trim=cut, drop_last=cut)


TURNS = ["mapped", "read", "mapped read", "read read mapped"]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("turns", TURNS)
def test_the_fewest_credits_are_enough(
    dataset: h5pack.H5Dataset, turns: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for an epoch that goes on from any batch, and for groups that are mapped and read in turn."""
    data, ready, ways = packs.values(), MappedDataset.ready, itertools.cycle(turns.split())
    monkeypatch.setattr(MappedDataset, "ready", lambda *runs: next(ways) == "mapped" and ready(*runs))
    # Numbers of threads and kinds of groups take turns with the plans.
    first_plan = 2 * TURNS.index(turns) + threads % 2
    for number, plan in enumerate(itertools.islice(plans(dataset), first_plan, None, 8)):
        held = {"labels": HeldRows(dataset, "labels", plan.rows.unique_rows())} if number // 2 % 2 else {}
        expected: list[list[int]] = [[-1] * plan.batch_rows(batch) for batch in range(plan.num_batches)]
        for group in plan.chunk_groups(1):
            dealt = np.empty_like(group.rows)
            dealt[group.positions] = group.rows
            at = 0
            for batch, slot, count in group.spans:
                expected[batch][slot : slot + count] = dealt[at : at + count].tolist()
                at += count
        for first in (number % max(plan.num_batches, 1), 0):
            # All of two batches, one batch, or a part of one.
            rows = (2 * plan.batch_size, plan.batch_size, 5)[number // 4 % 3]
            settings: dict[str, Any] = {"block_rows": rows, "cpus": 1 + number % 3, "can_help": number % 5 > 0}
            batches = epoch_of(dataset, plan, first, threads=threads, held=held, **settings)
            assert [batch[ROWS].tolist() for batch in batches] == expected[first:]
            for batch in batches:
                assert np.array_equal(batch["images"], data[batch[ROWS]])
                assert np.array_equal(batch["labels"], batch[ROWS])


def test_no_more_batches_are_open_than_there_are_credits(dataset: h5pack.H5Dataset, way: str) -> None:
    plan, finished = plan_of(dataset, batch_size=4), []
    pipeline = begin(dataset, plan, threads=4, finish=lambda batch, memory: finished.append(batch) or batch)
    batches = consumed(pipeline, 0, plan.num_batches)
    for fetched in range(plan.num_batches):
        assert next(batches) == fetched
        time.sleep(0.002)
        # The credit of the batch in hand was not given back yet.
        assert len(finished) <= fetched + plan.max_group_batches + 1
    assert sorted(finished) == list(range(plan.num_batches))
    pipeline.stop()


def raises_at(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, until it is called for the time number `count`."""
    calls = itertools.count(1)

    def guarded(*args: Any, **settings: Any) -> Any:
        if next(calls) == count:
            raise ZeroDivisionError("on purpose")
        return function(*args, **settings)

    return guarded


@pytest.mark.parametrize(("threads", "count"), [(1, 1), (3, 5), (1, 9)])
@pytest.mark.parametrize(
    ("way", "where"),
    [
        *(("read", where) for where in ("execute", "plan_scatter", "read", "prefetch", "finish", "allocate")),
        *(("mapped", where) for where in ("ready", "count_copied", "gather", "finish", "allocate")),
    ],
    indirect=["way"],
)
def test_an_error_reaches_the_consumer_and_ends_all_threads(
    dataset: h5pack.H5Dataset, way: str, where: str, count: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, settings = plan_of(dataset, window=1), {}
    owners: dict[str, Any] = {"allocate": BufferPool, "ready": MappedDataset, "gather": CachedRows}
    owners["plan_scatter"] = chunk_groups
    if where == "finish":
        settings["finish"] = raises_at(count, contents)
    else:
        owner = owners.get(where, dataset.engine)
        monkeypatch.setattr(owner, where, raises_at(count, getattr(owner, where)))
    pipeline = begin(dataset, plan, threads, **settings)
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: list(consumed(pipeline, 0, plan.num_batches)))


def test_an_error_in_the_very_last_batch_arrives(dataset: h5pack.H5Dataset, way: str) -> None:
    plan = plan_of(dataset)
    last = plan.num_batches - 1

    def finish(batch: int, memory: BatchMemory) -> int:
        if batch == last:
            # The other threads have nothing left to do, and end meanwhile.
            time.sleep(0.1)
            raise DamagedRowsError("late")
        return batch

    batches = consumed(begin(dataset, plan, 3, finish=finish), 0, last + 1)
    assert list(itertools.islice(batches, last)) == list(range(last))
    with pytest.raises(DamagedRowsError, match="late"):
        next(batches)


@pytest.mark.parametrize("held", [False, True])
def test_a_stop_takes_no_lock(dataset: h5pack.H5Dataset, way: str, held: bool) -> None:
    """It may come from the garbage collector, in a thread that holds the lock itself."""
    pipeline = begin(dataset, plan_of(dataset))
    cycle: Any = type("Cycle", (), {})()
    cycle.cycle = cycle
    weakref.finalize(cycle, pipeline.stop)
    del cycle

    def collect() -> None:
        with pipeline._lock if held else threading.Lock():
            gc.collect()

    in_time(collect)
    assert threads_end()


def test_a_join_from_one_of_its_own_threads_does_not_wait(dataset: h5pack.H5Dataset) -> None:
    begun: list[Pipeline] = []
    there = threading.Event()

    def finish(batch: int, memory: BatchMemory) -> int:
        there.wait(PATIENCE)
        with begun[0]._lock:
            begun[0].stop()
            begun[0].join()
        return batch

    begun.append(begin(dataset, plan_of(dataset), 3, finish=finish))
    there.set()


def test_the_next_epoch_begins_with_what_was_planned_before(
    dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, begun, groups_of = plan_of(dataset), [], OrderPlan.chunk_groups
    monkeypatch.setattr(OrderPlan, "chunk_groups", lambda *call: begun.append(call[1]) or groups_of(*call))
    groups = EpochGroups(plan, 576)
    for epoch, first, computed in ((3, 0, [3, 4]), (4, 0, [5]), (5, 2, [5, 6]), (2, 0, [2, 3]), (3, 0, [4])):
        found = [group.rows.tolist() for group in groups.of(epoch, first)]
        assert begun == computed
        begun.clear()
        assert found == [group.rows.tolist() for group in EpochGroups(plan, 576).of(epoch, first)]
        begun.clear()
