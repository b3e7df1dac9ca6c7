"""Every reader reads the rows of its case; a sweep gives every case its share of the time, or says why it cannot."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from h5pack.benchmark import sweep
from h5pack.benchmark.cases import BenchCase, FileVariant, Measurement
from h5pack.benchmark.ceilings import Ceilings, PageState
from h5pack.benchmark.sample import scratch_folder
from h5pack.benchmark.sweep import LibraryReader, ReadTiming, SharedDatasets, Sweep, open_reader
from tests.benchmark.files import ROW_BYTES, SIZE, input_of, sample_of
from tests.crashing import gone
from tests.makers import class_folders
from tests.monitor.fake_clock import FakeClock


def case_of(
    label: str, order: str, engine: str = "direct", cache: str = "hot", workers: int | None = None
) -> BenchCase:
    return BenchCase(label, order, engine, cache, 1 if order == "single" else 10, 2, 1, workers)


WINDOW = case_of("4 rows", "window")


@pytest.fixture(scope="module")
def whole(cut: Path) -> FileVariant:
    """The input file as it is."""
    return input_of(cut).variant


@pytest.mark.parametrize("engine", ["direct", "tuned", "default"])
@pytest.mark.parametrize("order", ["sequential", "window", "full", "single"])
def test_an_epoch_has_every_row(whole: FileVariant, order: str, engine: str) -> None:
    reader = open_reader(case_of("as it is", order, engine), whole, 0, SharedDatasets())
    timing = reader.run(math.inf, once=True)
    reader.close()
    assert timing.rows == 200
    assert timing.seconds > 0
    assert timing.bytes_per_row >= 0.9 * ROW_BYTES


def test_small_rows_that_the_loader_holds_in_memory_are_counted(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "small.h5", "w") as file:
        file["images"] = np.random.default_rng(0).integers(0, 256, (300, 16, 16), np.uint8)
    variant = input_of(tmp_path / "small.h5").variant
    reader = open_reader(case_of("as it is", "window"), variant, 0, SharedDatasets())
    assert [reader.run(math.inf, once=True).rows for _ in range(3)] == [300] * 3
    reader.close()


def test_workers_read_every_row_and_end_when_closed(whole: FileVariant) -> None:
    reader = open_reader(case_of("as it is", "window", workers=2), whole, 0, SharedDatasets())
    assert reader.run(1e-6).rows == 200
    workers = [worker.pid for worker in reader._loader._iterator._workers]
    reader.close()
    assert len(workers) == 2
    assert all(map(gone, workers))


@pytest.mark.parametrize("engine", ["default", "tuned"])
@pytest.mark.parametrize(
    ("order", "rows", "counts"), [("full", [5, 199, 0], [1, 1, 1]), ("sequential", [*range(40, 60)], [20])]
)
def test_rows_by_h5py_are_those_of_the_file(
    cut: Path, whole: FileVariant, engine: str, order: str, rows: list[int], counts: list[int]
) -> None:
    with h5py.File(cut) as file:
        expected = file["images"][()]
    reader = LibraryReader(SharedDatasets().dataset(whole), case_of("as it is", order, engine), whole, 0)
    assert np.array_equal(reader.read_row(7), expected[7])
    parts = [(count, pixels.copy().reshape(-1, *pixels.shape[-3:])) for count, pixels in reader.read_batch(rows)]
    reader.close()
    assert [count for count, _ in parts] == counts
    assert np.array_equal(np.concatenate([pixels for _, pixels in parts]), expected[rows])


def test_a_part_of_a_larger_file_is_read(cut: Path, scratch: Path) -> None:
    first = sample_of(cut, scratch, rows=60, chunk_rows=(8,), contiguous=False).variants[0]
    reader = open_reader(case_of("as it is", "full"), first, 0, SharedDatasets())
    assert reader.run(math.inf, once=True).rows == 100
    reader.close()


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[FileVariant]]:
    folder = class_folders(tmp_path_factory.mktemp("source") / "photos", {"a": 60, "b": 60}, SIZE)
    with scratch_folder(folder.parent) as scratch:
        yield sample_of(folder, scratch, chunk_rows=(4,), contiguous=False).variants


def measure(
    variants: list[FileVariant], cases: list[BenchCase], seconds: float, clock: FakeClock, **options: Any
) -> list[Measurement]:
    found: list[Measurement] = []
    Sweep(variants, 0, lambda: None, clock).measure(cases, seconds, found, **options)
    return found


class Faked:
    """Readers and page caches that take the seconds in `seconds` on a fake clock, and log what they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.log = FakeClock(), list[str]()
        self.kept: str | None = None  # Why pages stay in the cache.
        self.seconds = {"full": 0.05, "sequential": 0.05, "window": 0.05, "drop": 0.0}
        monkeypatch.setattr(sweep, "open_reader", self.open)
        monkeypatch.setattr(PageState, "drop", self.drop)

    def open(self, case: BenchCase, *_: object) -> FakeReader:
        return FakeReader(self, case.order)

    def drop(self) -> str | None:
        self.log.append("drop")
        self.clock.now += self.seconds["drop"]
        return self.kept


class FakeReader:
    def __init__(self, faked: Faked, order: str) -> None:
        self.faked, self.order = faked, order

    def run(self, seconds: float, *, once: bool = False) -> ReadTiming:
        self.faked.log.append("load" if once else self.order)
        self.faked.clock.now += self.faked.seconds[self.order]
        return ReadTiming(100, self.faked.seconds[self.order], None)

    def close(self) -> None:
        pass


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Faked:
    return Faked(monkeypatch)


def test_a_slow_case_gets_fewer_repeats_and_every_case_one(variants: list[FileVariant], faked: Faked) -> None:
    faked.seconds["full"] = 0.4
    cases = [case_of("4 rows", order) for order in ("full", "sequential", "window")]
    counts = {one.case.order: len(one.speeds) for one in measure(variants, cases, 3.05, faked.clock)}
    # The window shuffle has four sixths of the time, the others one; a repeat takes twice its reader's seconds.
    assert counts == {"full": 1, "sequential": 5, "window": 17}
    assert faked.clock.now <= 103.05


def test_cases_that_decide_get_three_repeats_late_but_not_too_late(variants: list[FileVariant], faked: Faked) -> None:
    faked.seconds["full"] = 0.4
    cases = [case_of("4 rows", order) for order in ("full", "window")]
    counts = {one.case.order: len(one.speeds) for one in measure(variants, cases, 1.0, faked.clock, end=110.0)}
    # A repeat runs its reader twice.
    assert counts["full"] == 3
    assert counts["window"] >= 3
    begun = faked.clock.now
    (late,) = measure(variants, cases[:1], 1.0, faked.clock, end=begun + 1.9)
    assert (len(late.speeds), faked.clock.now <= begun + 1.9) == (2, True)


def test_a_ceiling_is_measured_beside_each_repeat(variants: list[FileVariant], monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings, asked = Ceilings([], 8, 1, 4, 2), list[BenchCase]()
    monkeypatch.setattr(ceilings, "measure", lambda case: (asked.append(case), float(len(asked)))[1])
    single = case_of("4 rows", "single")
    found, other = measure(variants, [WINDOW, single], 1.0, FakeClock(tick=0.05), ceilings=ceilings)
    # Only of H5Loader, which is compared with it.
    assert asked == len(found.speeds) * [WINDOW]
    assert (found.ceilings, other.ceilings) == (tuple(range(1, len(asked) + 1)), ())
    assert len(found.of_ceiling) == len(found.speeds) > 0


def test_the_ceiling_of_a_cold_read_is_measured_with_the_file_closed(
    variants: list[FileVariant], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop(path: Path) -> int:
        """Pages of an open file may be mapped, so that they stay."""
        return sum(os.path.samefile(path, f"/proc/self/fd/{number}") for number in open_files())

    def open_files() -> list[str]:
        return [number for number in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{number}")]

    monkeypatch.setattr("h5pack.benchmark.ceilings.drop_cache", drop)
    ceilings = Ceilings(variants, 8, ROW_BYTES, 4, 1)
    (found,) = measure(variants, [replace(WINDOW, cache="cold")], 1.0, FakeClock(tick=0.05), ceilings=ceilings)
    assert len(found.of_ceiling) == len(found.speeds) > 1


def test_repeats_run_forwards_and_backwards(variants: list[FileVariant], faked: Faked) -> None:
    measure(variants, [case_of("4 rows", name, "tuned") for name in ("window", "full")], 1.0, faked.clock)
    # A repeat runs its reader twice.
    assert faked.log[:12:2] == ["window", "full", "full", "window", "window", "full"]


@pytest.mark.parametrize(("kept", "loads"), [(None, 1), ("its pages stay", 0)])
@pytest.mark.parametrize("reload", [False, True])
def test_a_run_off_loads_files_again_before_each_repeat(
    variants: list[FileVariant], faked: Faked, kept: str | None, loads: int, reload: bool
) -> None:
    faked.kept = kept
    (found,) = measure(variants, [WINDOW], 1.0, faked.clock, reload_each_repeat=reload)
    turn = [*(["drop", *["load"] * loads] if reload else []), "window", "window"]
    assert len(found.speeds) > 1
    assert faked.log == turn * len(found.speeds)


def test_files_that_are_slow_to_load_are_loaded_once(variants: list[FileVariant], faked: Faked) -> None:
    faked.seconds["drop"] = 0.6
    (found,) = measure(variants, [WINDOW], 1.6, faked.clock, reload_each_repeat=True)
    assert faked.log.count("drop") == 1
    assert len(found.speeds) > 1


def test_unmeasured_cases_say_why(variants: list[FileVariant], faked: Faked, monkeypatch: pytest.MonkeyPatch) -> None:
    (late,) = measure(variants, [WINDOW], 0.0, faked.clock)
    assert late.reason is not None
    faked.kept = "they stay"
    cold, hot = measure(variants, [case_of("4 rows", "window", cache="cold"), WINDOW], 1.0, faked.clock)
    assert cold.reason is not None
    assert (late.speeds, cold.speeds) == ((), ())
    assert hot.speeds

    def die(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error.")

    monkeypatch.setattr(sweep, "open_reader", die)
    (dead,) = measure(variants, [WINDOW], 1.0, faked.clock)
    assert dead.reason == "DataLoader worker (pid 7) is killed by signal: Bus error."


def test_direct_reads_request_each_byte_once(variants: list[FileVariant]) -> None:
    (found,) = measure(variants, [BenchCase("4 rows", "window", "direct", "hot", 8, 2, 1)], 1.0, FakeClock(tick=0.05))
    # The labels' few bytes come on top.
    assert found.amplification == pytest.approx(1.0, abs=0.01)
    assert found.hit_rate == pytest.approx(0.75)


def write_compressed(path: Path, shape: tuple[int, ...], chunk_rows: int) -> Path:
    """Random images, compressed with gzip."""
    with h5py.File(path, "w") as file:
        values = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        file.create_dataset("images", data=values, chunks=(chunk_rows, *shape[1:]), compression="gzip")
    return path


def test_cold_cases_read_the_disk_though_libraries_cache_chunks(tmp_path: Path, scratch: Path) -> None:
    """A compressed file that fits into every cache of HDF5 and h5pack."""
    path = write_compressed(tmp_path / "small.h5", (100, 32, 32, 3), 10)
    variants = sample_of(path, scratch, chunk_rows=(10,), contiguous=False).variants
    kinds = [(order, engine) for order in ("window", "full", "single") for engine in ("direct", "tuned", "default")]
    cases = [case_of("as it is", *kind, "cold") for kind in kinds]
    found = measure(variants, cases, 3.0, FakeClock(tick=0.05))
    assert len({one.reason for one in found}) == 1
    for one in found:
        assert one.reason is not None or (one.amplification or 0) > 0.9, one.case


def test_hot_cases_read_decoded_chunks_from_memory_as_later_epochs_do(tmp_path: Path, scratch: Path) -> None:
    path = write_compressed(tmp_path / "small.h5", (1_000, 64, 64, 3), 1)
    variants = sample_of(path, scratch, chunk_rows=(10,), contiguous=False, rows=1_000).variants
    (found,) = measure(variants, [case_of("as it is", "window", "direct", "hot")], 0.1, FakeClock(tick=0.05))
    assert found.speeds
    assert found.amplification == 0


@pytest.mark.parametrize(("times", "once"), [(1, True), (10, True), (100, False)])
def test_chunks_stay_in_memory_only_if_those_of_all_images_would(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, times: int, once: bool
) -> None:
    monkeypatch.setattr("h5pack.benchmark.sweep.DECODED_BYTES", 16 * 100 * 64 * 64 * 3)
    path = write_compressed(tmp_path / "part.h5", (100, 64, 64, 3), 10)
    settings = {"chunk_rows": (10,), "contiguous": False, "rows": 100, "compression": ("gzip",)}
    for variant in sample_of(path, scratch, **settings).variants:
        reader = open_reader(case_of(variant.label, "window"), variant, 0, SharedDatasets(times * 100))
        assert reader.decodes_once == once, variant.label
        reader.close()
