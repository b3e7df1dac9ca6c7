"""The benchmark of the device runs, tiny, and says on which device; its timing is right by a clock that tests set."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import h5pack
from benchmarks import device, device_timing, device_training, tables
from benchmarks.device_timing import HostTimer, Turn, copies_beyond_cache, enough_calls, settle, turns
from examples.networks import Network
from h5pack.device.normalize import Normalize
from tests.device.feeds import needs_gpu
from tests.makers import run_benchmark

CPU = torch.device("cpu")
SMALL = partial(Network, "cnn", 3, device_training.CLASSES, small=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory, and no time to warm up."""
    monkeypatch.setattr(device_timing.settle, "__kwdefaults__", {**settle.__kwdefaults__, "min_seconds": 1e-4})
    monkeypatch.setattr(device.copy_bandwidth, "__defaults__", (1 << 20,))
    monkeypatch.setattr(device, "cache_bytes_of", lambda _: 1 << 16)


@pytest.mark.usefixtures("quick")
def test_it_runs_without_a_gpu(tmp_path: Path) -> None:
    result = run_benchmark(tmp_path, device, "--device cpu --batch 4 --size 16 --repeats 2")
    assert result["device"] == "cpu"
    # Nothing is said about a GPU where there is none.
    assert not {"training", "feed", "pinned_copy_gb_per_s"} & result.keys()
    cases = result["normalize"]["cases"]
    found = [(case["precision"], case["augmentation"]) for case in cases]
    assert found == list(itertools.product(("float32", "bfloat16"), device.augmentations(16)))
    for case in cases:
        # A float32 image is 16 x 16 x 3 values of 1 + 4 bytes; rates are rounded to 4 digits behind the point.
        value_bytes = 5 if case["precision"] == "float32" else 3
        expected = case["images_per_s"]["median"] * 16 * 16 * 3 * value_bytes / 1e9
        assert case["gb_per_s"]["median"] == pytest.approx(expected, abs=1e-3)
        assert case["microseconds"]["min"] * case["images_per_s"]["max"] == pytest.approx(4e6, rel=1e-3)
        assert case["of_copy"]["repeats"] == case["pass_microseconds"]["repeats"] == 2
        assert (case["draw_microseconds"] is None) == (case["augmentation"] == "plain")
    assert result["pass_through"]["added_microseconds"]["repeats"] == 2
    assert tables.normalize_table(result).count("| flip and crop |") == 2


@needs_gpu
@pytest.mark.usefixtures("quick")
def test_it_runs_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "NETWORKS", {"cnn": SMALL})
    result = run_benchmark(tmp_path, device, "--batch 8 --size 32 --repeats 2 --images 40 --steps 10 --workers 0")
    assert result["device"] == torch.cuda.get_device_name()
    for case in result["normalize"]["cases"]:
        assert case["of_copy"]["median"] > 0
        assert case["launch_microseconds"]["median"] > 0
    assert result["feed"]["images_per_s"]["min"] > 0
    assert result["training"]["validations"]["growth_mb"] == 0
    assert result["training"]["replayed_steps"]["growth_mb"] == 0
    assert result["training"]["losses"]["largest_difference"] == 0
    assert tables.training_table(result).count("| cnn |") == 3


class Clock:
    """A time that passes only in calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.made: list[Any] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: Any, seconds: Iterator[float]) -> Callable[[], None]:
        def work() -> None:
            self.made.append(name)
            self.now += next(seconds)

        return work


def test_a_run_makes_its_calls_in_turns_and_takes_their_time() -> None:
    clock = Clock()
    calls = [clock.call(name, itertools.repeat(seconds)) for name, seconds in (("a", 0.25), ("b", 0.5))]
    timer = HostTimer(clock)
    timer.min_calls = 3
    once = timer.prepare(enough_calls(calls, timer))
    clock.made.clear()
    assert once() == 1.5
    assert clock.made == ["a", "b", "a", "b"]


def test_inputs_and_results_exceed_the_cache() -> None:
    # 115.6 MB a call, and a cache of 60 MB: 4 x 60 MB are more than 2 calls.
    assert copies_beyond_cache(115_605_504, 60 << 20) == 3
    assert copies_beyond_cache(1 << 10, 1 << 20) == 4096
    assert copies_beyond_cache(1 << 30, 1 << 20) == 2


def test_work_settles_after_the_clock_has_risen() -> None:
    # Slow at first; then five times within 3 %, and at least 0.3 s of work in all.
    rising = iter([0.2, 0.15, 0.12, 0.1, 0.101, 0.1, 0.102, 0.1, 0.1])
    assert settle(lambda: next(rising)) == 8
    assert settle(lambda: 0.01) == 30
    # What never settles ends after ten times as much work.
    noisy = itertools.cycle([0.1, 0.2])
    assert settle(lambda: next(noisy)) == 20


def test_a_run_is_measured_between_two_of_its_baseline() -> None:
    clock = Clock()
    # The clock of the device falls while it is measured: each call takes longer than the one before.
    slower = (0.1 + 0.001 * n for n in itertools.count())
    timer = HostTimer(clock)
    case, baseline = (timer.prepare([clock.call(name, slower)]) for name in ("case", "baseline"))
    found = turns(case, baseline, 3)
    assert clock.made[-9:] == ["baseline", "case", "baseline"] * 3
    # Both do the same, and the drift cancels out.
    assert [turn.of_baseline for turn in found] == pytest.approx([1.0] * 3)
    assert found[0].drift == pytest.approx(0.002 / found[0].before)
    assert Turn(0.5, 0.3, 0.5).of_baseline == pytest.approx(0.8)


@pytest.mark.usefixtures("quick")
def test_each_call_has_an_image_of_its_own_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cache_bytes_of", lambda _: 3 * 2 * 8 * 8 * 3)
    given: list[int] = []

    class Recording(Normalize):
        def __call__(self, images: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
            given.append(images.data_ptr())
            return super().__call__(images, *arguments, **options)

    clock = Clock()
    timer = HostTimer(clock)
    # Each reading of the clock is 1 second after the one before, so that each run takes a second.
    monkeypatch.setattr(timer, "_clock", lambda: setattr(clock, "now", clock.now + 1) or clock.now)
    case = device.normalize_case(CPU, timer, Recording(dtype=torch.bfloat16), (2, 8, 8, 3), 2)
    # 4 times the cache, which is as large as a call: 4 calls of 3 x 2 x 8 x 8 x 3 bytes, in turns.
    assert len(set(given)) == 4
    assert given[:8] == given[:4] * 2
    assert case["images_per_s"]["median"] == 4 * 2
    assert case["microseconds"]["median"] == case["pass_microseconds"]["median"] == 0.25e6
    assert (case["of_copy"]["median"], case["largest_drift_of_copy"], case["draw_microseconds"]) == (1, 0, None)


@pytest.mark.usefixtures("quick")
def test_a_feed_without_a_step_is_compared_with_copies() -> None:
    figures = device.feed_figures(CPU, 2, 8, 2, batches=6)
    assert figures["batches"] == 6
    assert figures["images_per_s"]["max"] * figures["microseconds"]["min"] == pytest.approx(2e6, rel=1e-3)
    assert 0 < figures["of_pinned_copy"]["min"] <= figures["of_pinned_copy"]["max"]
    assert device.pinned_copy(CPU, 2, 1 << 16)["min"] > 0


def test_training_from_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_training, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(h5pack, "convert", partial(h5pack.convert, num_workers=1))
    figures = device_training.training_figures(CPU, tmp_path, 40, 16, 4, 2, 0, {"a": SMALL, "b": SMALL})
    assert list(figures["networks"]) == ["a", "b"]
    cases = figures["networks"]["b"]
    assert list(cases) == ["one batch", "pack", "jpeg folder"]
    assert len(list((tmp_path / "jpeg").glob("*/*.jpg"))) == 40
    assert cases["one batch"]["stall_fraction"] == 0
    for case in cases.values():
        # Both are rounded.
        rounding = 0.051 * case["seconds"] + 0.00051 * case["images_per_s"]
        assert case["seconds"] * case["images_per_s"] == pytest.approx(2 * 4, abs=rounding)
        slower = 1 - cases["one batch"]["seconds"] / case["seconds"]
        assert case["stall_fraction"] == pytest.approx(max(0, slower), abs=1e-3)
        assert case["cpu_seconds"] > 0
        assert case["gpu"] == {"period_seconds": 0.2, "percent": [], "mean_percent": None}
    assert (figures["replayed_steps"]["count"], figures["validations"]["count"]) == (20, 2)
    assert figures["losses"]["steps"] == 2
    assert figures["losses"]["largest_difference"] == 0
    assert 0 < figures["losses"]["last_loss"] < 10


def test_growing_memory_is_reported() -> None:
    batches = [(torch.zeros(2), torch.zeros(2))] * 3
    used = itertools.count(start=8_000_000, step=1_000_000)
    steps: list[Any] = []
    growing = device_training.replay_figures(batches, lambda *batch: steps.append(batch), 40, lambda: next(used))
    # 20 readings, of which the first two are those of a memory that is being allocated.
    assert len(steps) == 40
    assert growing["reserved_mb"] == [8.0 + n for n in range(20)]
    assert growing["growth_mb"] == 17.0
    feeds: list[Any] = []

    def make_feed() -> Any:
        feeds.append(h5pack.DeviceFeed(batches, "cpu"))
        return feeds[-1]

    flat = device_training.validation_figures(make_feed, 5, lambda: 7_000_000)
    assert (len(feeds), flat["growth_mb"], flat["reserved_mb"]) == (5, 0.0, [7.0] * 5)
