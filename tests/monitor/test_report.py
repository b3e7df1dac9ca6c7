"""Reports in JSON and text, and where they go."""

from __future__ import annotations

import errno
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from h5pack.errors import OptionsError
from h5pack.monitor.monitor import FeedMonitor
from h5pack.monitor.probes import GpuStatus
from h5pack.monitor.report import FeedReport
from tests.monitor.fake_clock import FakeClock, SlowLoader, run

KEYS = [
    *("name", "over", "time", "epoch", "step", "batches", "images", "seconds", "wait_seconds", "stall_seconds"),
    *("stall_fraction", "images_per_s", "bytes_per_s", "queue_depth", "cpu_percent", "children_cpu_percent"),
    *("freshness", "gpu_name", "gpu_utilization_percent", "gpu_memory_used_bytes", "gpu_memory_total_bytes"),
]
"""Other programs depend on these."""


def test_a_report_in_json_and_text() -> None:
    numbers = {"step": 50, "batches": 40, "seconds": 10.0, "stall_fraction": 0.1, "images_per_s": 32.0}
    more = {"bytes_per_s": 1e6, "freshness": 0.5, "gpu": GpuStatus("card", 93.0)}
    report = FeedReport(name="t", over="epoch", time=100.0, **numbers, **more)
    found = report.to_json()
    assert list(found) == KEYS
    assert (found["step"], found["gpu_name"], found["gpu_memory_used_bytes"]) == (50, "card", None)
    for part in ("t: ", "40 batches", "10.0 s", "32 images/s", "stall 10 %", "GPU use 93 %", "fresh 50 %", "1 MB/s"):
        assert part in report.to_text() == str(report)


def test_json_lines_have_an_object_for_each_interval_and_epoch(clock: FakeClock, tmp_path: Path) -> None:
    path = tmp_path / "feed.jsonl"
    monitor = FeedMonitor(SlowLoader(clock, 0.25, 9), warn_stall=None, interval_seconds=2.0, json_lines=path, name="é")
    run(monitor, clock, 0.5)
    run(monitor, clock, 0.5)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    overs = [(record["epoch"], record["over"]) for record in records]
    assert overs == [(epoch, over) for epoch in (0, 1) for over in (*["interval"] * 3, "epoch")]
    assert list(records[0]) == KEYS
    assert (records[0]["name"], records[-1]["batches"]) == ("é", 9)


def test_a_full_disk_ends_the_lines_and_not_the_training(
    clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    monitor = FeedMonitor(SlowLoader(clock, 0.5, 12), warn_stall=None, json_lines=folder / "feed.jsonl")
    (folder / "feed.jsonl").unlink()
    folder.rmdir()
    run(monitor, clock, 0.5)
    assert monitor.report().batches == 12
    assert caplog.text.count("no more lines are written") == 1


def test_the_progress_line(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    run(FeedMonitor(SlowLoader(clock, 0.125, 18), warn_stall=None, progress=True), clock, 0.125)
    shown = capsys.readouterr().err
    assert re.search(r"train 0: 4 batches .*16 images/s, stall 50 %, GPU use not available", shown)
    assert "train 0: 18 batches" in shown


def test_a_full_disk_ends_the_scalars_and_not_the_training(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    writer = Mock(**{"add_scalar.side_effect": OSError(errno.ENOSPC, "full")})
    monitor = FeedMonitor(SlowLoader(clock, 0.5, 12), warn_stall=None, tensorboard=writer)
    run(monitor, clock, 0.5)
    assert monitor.report().batches == 12
    assert writer.add_scalar.call_count == len(caplog.records) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"json_lines": "a\0b"}, {"tensorboard": "a\0b"}, {"tensorboard": "/dev/null"}, {"tensorboard": "/dev/null/x"},
        {"json_lines": ""}, {"tensorboard": ""}, {"name": Path("x")}, {"name": None},
    ],
)  # fmt: skip
def test_outputs_that_cannot_be_written_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(OptionsError) as caught:
        FeedMonitor([], **changes)
    assert [name.partition("=")[0] for name in caught.value.parameters] == [*changes]


def test_any_text_may_be_the_name(clock: FakeClock, tmp_path: Path) -> None:
    path, writer = tmp_path / "feed.jsonl", Mock()
    loader = SlowLoader(clock, 0.25, 9)
    run(FeedMonitor(loader, warn_stall=None, json_lines=path, tensorboard=writer, name="a\udcff\n"), clock, 0.5)
    assert {json.loads(line)["name"] for line in path.read_text(encoding="utf-8").splitlines()} == {"a\udcff\n"}
    tags = [call.args[0].encode() for call in writer.add_scalar.call_args_list]
    assert all(tag.startswith(b"feed/a\\udcff\n/") for tag in tags)


def test_tensorboard_scalars(clock: FakeClock) -> None:
    writer = Mock()
    monitor = FeedMonitor(SlowLoader(clock, 0.25, 8), warn_stall=None, tensorboard=writer)
    run(monitor, clock, 0.25)
    run(monitor, clock, 0.25)
    scalars = [call.args for call in writer.add_scalar.call_args_list]
    stalls = [(value, step) for tag, value, step in scalars if tag == "feed/train/stall_fraction"]
    assert stalls == [(pytest.approx(0.5), step) for step in (2, 4, 6, 8, 10, 12, 14, 16)]
    # What is not available is no scalar.
    assert not any("gpu" in tag or "freshness" in tag for tag, _, _ in scalars)


def test_a_tensorboard_folder_gets_a_writer_that_close_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(OptionsError) as caught:
        FeedMonitor([], tensorboard=tmp_path)
    assert caught.value.parameters == ("tensorboard",)
    module = Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with FeedMonitor([], tensorboard=tmp_path) as monitor:
        pickle.loads(pickle.dumps(monitor))
        module.SummaryWriter.assert_called_once_with(str(tmp_path))
        assert not module.SummaryWriter().close.called
    assert module.SummaryWriter().close.called
