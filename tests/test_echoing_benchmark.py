"""The benchmark of echoing runs, tiny, and its loader is as slow as it says."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import h5pack
from benchmarks import echoing, tables
from h5pack.device.echo import EchoLoader
from tests.data import packs
from tests.makers import run_benchmark
from tests.monitor.fake_clock import FakeClock


def test_echoing_benchmark(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    few = "--count 80 --batch 8 --target 0.5 --seeds 2 --max-epochs 2 --slowdown 2"
    result = run_benchmark(tmp_path, echoing, few)
    assert torch.get_num_threads() == threads
    assert (result["train_images"], result["test_images"], result["classes"], result["batches"]) == (80, 40, 4, 10)
    arms = [(arm["factor"], arm["slowed"]) for arm in result["arms"]]
    assert arms == [(1, False), (1, True), (2, True), (3, True), ("auto", True)]
    for arm in result["arms"]:
        assert len(arm["runs"]) == arm["seconds"]["repeats"] == 2
        for one in arm["runs"]:
            assert one["epochs"] <= 2
            assert one["reached"] or one["epochs"] == 2
            assert 0 <= one["waiting"] < 1
            if arm["factor"] != "auto":
                # The last batch may have been shown once when the target was reached.
                assert arm["factor"] - 0.7 < one["showings"] <= arm["factor"]
                assert one["seconds"] > one["epochs"] * 10 * 2 * result["step_seconds"] * 0.95 or not arm["slowed"]
    table = tables.echoing_table(result)
    assert table.count("\n") == 6
    assert "| auto, 2x slower than the step |" in table


class FakeTime(FakeClock):
    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_paced_loader_works_two_batches_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr(echoing, "time", clock)
    dataset = h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5"))
    paced = echoing.PacedLoader(h5pack.H5Loader(dataset, 10), 0.05)
    batches = iter(paced)
    waits = []
    for number in range(6):
        if number == 3:
            clock.sleep(0.3)
        begin = clock.now
        next(batches)
        waits.append(clock.now - begin)
    # The fourth and the fifth were made in the meantime.
    assert waits == pytest.approx([0.05, 0.05, 0.05, 0, 0, 0.05])
    clock.sleep(0.2)
    paced.pause(0.2)
    begin = clock.now
    next(batches)
    assert clock.now - begin == pytest.approx(0.05)
    assert len(list(itertools.islice(EchoLoader(paced, 2), 4))) == 4
