"""A sweep gives every case its share of the time, and says why a case has no repeats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from h5pack.benchmark import sweep
from h5pack.benchmark.cases import BenchCase, FileVariant, Measurement
from h5pack.benchmark.ceilings import PageState
from h5pack.benchmark.readers import ReadTiming
from h5pack.benchmark.sample import ScratchFolder
from h5pack.benchmark.sweep import Sweep
from tests.benchmark.files import SIZE, StepClock, sample_of
from tests.makers import class_folders

Faked = tuple[StepClock, list[str], dict[str, float]]
"""A clock, what readers were asked for, and seconds by order."""
WINDOW = BenchCase("4 rows", "window", "direct", "hot", 8, 2, 1)


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[FileVariant]]:
    folder = class_folders(tmp_path_factory.mktemp("source") / "photos", {"a": 60, "b": 60}, SIZE)
    with ScratchFolder(folder.parent) as scratch:
        yield sample_of(folder, scratch, chunk_rows=(4,), contiguous=False).variants


def measure(
    variants: list[FileVariant], cases: list[BenchCase], seconds: float, clock: StepClock, **options: Any
) -> list[Measurement]:
    found: list[Measurement] = []
    Sweep(variants, 0, lambda passed: None, clock).measure(cases, seconds, found, **options)
    return found


class FakeReader:
    """Takes the seconds that its order has, on the fake clock."""

    def __init__(self, clock: StepClock, case: BenchCase, log: list[str], seconds: dict[str, float]) -> None:
        self.clock, self.log, self.seconds = clock, log, seconds.get(case.order, 0.05)

    def run(self, seconds: float, *, once: bool = False) -> ReadTiming:
        self.log.append("load" if once else "run")
        self.clock.advance(self.seconds)
        return ReadTiming(100, self.seconds, None)

    def close(self) -> None:
        pass


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Faked:
    clock, log, seconds = StepClock(), list[str](), dict[str, float]()
    monkeypatch.setattr(sweep, "open_reader", lambda case, *_: FakeReader(clock, case, log, seconds))
    return clock, log, seconds


def test_a_slow_case_gets_fewer_repeats_and_every_case_one(variants: list[FileVariant], faked: Faked) -> None:
    clock, _, seconds = faked
    seconds["full"] = 0.4
    cases = [BenchCase("4 rows", order, "direct", "hot", 8, 2, 1) for order in ("full", "sequential", "window")]
    counts = {one.case.order: len(one.speeds) for one in measure(variants, cases, 3.05, clock)}
    # The window shuffle has four sixths of the time, the others one; a repeat takes twice its reader's seconds.
    assert counts == {"full": 1, "sequential": 5, "window": 17}
    assert clock.now <= 3.05


def test_cases_whose_turn_does_not_come_say_so(variants: list[FileVariant], faked: Faked) -> None:
    found = measure(variants, [WINDOW], 0.0, faked[0])
    assert found[0].speeds == ()
    assert found[0].reason is not None


@pytest.mark.parametrize(("kept", "loads"), [(None, 1), ("its pages stay", 0)])
@pytest.mark.parametrize("reload", [False, True])
def test_a_run_off_loads_files_again_before_each_repeat(
    variants: list[FileVariant],
    faked: Faked,
    monkeypatch: pytest.MonkeyPatch,
    kept: str | None,
    loads: int,
    reload: bool,
) -> None:
    clock, log, _ = faked

    def drop(self: PageState) -> str | None:
        log.append("drop")
        return kept

    monkeypatch.setattr(PageState, "drop", drop)
    (found,) = measure(variants, [WINDOW], 1.0, clock, reload_each_repeat=reload)
    turn = ["drop", *["load"] * loads, "run", "run"] if reload else ["run", "run"]
    assert len(found.speeds) > 1
    assert log == turn * len(found.speeds)


def test_files_that_are_slow_to_load_are_loaded_once(
    variants: list[FileVariant], faked: Faked, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, log, _ = faked

    def drop(self: PageState) -> None:
        log.append("drop")
        clock.advance(0.6)

    monkeypatch.setattr(PageState, "drop", drop)
    (found,) = measure(variants, [WINDOW], 1.6, clock, reload_each_repeat=True)
    assert log.count("drop") == 1
    assert len(found.speeds) > 1


def test_repeats_run_forwards_and_backwards(variants: list[FileVariant], monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = StepClock(), list[str]()

    def note(case: BenchCase, *_: object) -> FakeReader:
        order.append(case.order)
        return FakeReader(clock, case, [], {})

    monkeypatch.setattr(sweep, "open_reader", note)
    cases = [BenchCase("4 rows", name, "tuned", "hot", 8, 2, 1) for name in ("window", "full")]
    measure(variants, cases, 1.0, clock)
    assert order[:6] == ["window", "full", "full", "window", "window", "full"]


def test_pages_that_stay_leave_cold_cases_unmeasured(
    variants: list[FileVariant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageState, "drop", lambda self: "they stay")
    cold = BenchCase("4 rows", "window", "direct", "cold", 8, 2, 1)
    found = measure(variants, [cold, WINDOW], 1.0, StepClock(step=0.05))
    assert found[0].speeds == ()
    assert found[0].reason is not None
    assert found[1].speeds


def test_a_dead_worker_is_the_reason_of_its_case(variants: list[FileVariant], monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error.")

    monkeypatch.setattr(sweep, "open_reader", die)
    (found,) = measure(variants, [WINDOW], 1.0, StepClock(step=0.05))
    assert found.reason == "DataLoader worker (pid 7) is killed by signal: Bus error."


def test_direct_reads_request_each_byte_once(variants: list[FileVariant]) -> None:
    (found,) = measure(variants, [WINDOW], 1.0, StepClock(step=0.05))
    # The labels' few bytes come on top.
    assert found.amplification == pytest.approx(1.0, abs=0.01)
    assert found.hit_rate == pytest.approx(0.75)


def test_cold_cases_read_the_disk_though_libraries_cache_chunks(tmp_path: Path) -> None:
    """A compressed file that fits into every cache of HDF5 and h5pack."""
    path = tmp_path / "small.h5"
    with h5py.File(path, "w") as file:
        values = np.random.default_rng(0).integers(0, 256, (100, 32, 32, 3), np.uint8)
        file.create_dataset("images", data=values, chunks=(10, 32, 32, 3), compression="gzip")
    with ScratchFolder(tmp_path) as scratch:
        variants = sample_of(path, scratch, chunk_rows=(10,), contiguous=False).variants
        cases = [
            BenchCase("as it is", order, engine, "cold", 1 if order == "single" else 10, 2, 1)
            for order in ("window", "full", "single")
            for engine in ("direct", "tuned", "default")
        ]
        found = measure(variants, cases, 3.0, StepClock(step=0.05))
    stays = {one.reason for one in found}
    assert len(stays) == 1, stays
    for one in found:
        assert one.reason is not None or (one.amplification or 0) > 0.9, one.case
