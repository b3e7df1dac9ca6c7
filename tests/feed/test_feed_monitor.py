"""FeedMonitor: true figures, true warnings, and batches that are left alone."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import re
import sys
import time
import types
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset

import h5pack
from h5pack.errors import OptionsError, StateError
from h5pack.feed import cpu_time, feed_monitor, feed_watch, monitored_iterator
from h5pack.feed.cpu_time import CpuTime
from h5pack.feed.device_feed import DeviceFeed
from h5pack.feed.device_wait import DeviceWait
from h5pack.feed.echo_loader import EchoLoader
from h5pack.feed.feed_monitor import FeedMonitor
from h5pack.feed.feed_report import FeedReport
from h5pack.feed.gpu_status import GpuStatus
from h5pack.feed.loader_layers import base_datasets, layers_of, measure
from h5pack.feed.stall_cause import Evidence, likely_cause
from tests.feed import packs

BATCH = 8


@pytest.fixture(autouse=True)
def not_yet_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_watch, "_warned", set())


class FakeClock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    for module in (feed_monitor, feed_watch, monitored_iterator):
        monkeypatch.setattr(module, "time", fake)
    return fake


class SlowLoader:
    """Gives batches, each of which takes some seconds of a clock."""

    def __init__(self, clock: FakeClock, seconds: float, batches: int) -> None:
        self.clock, self.seconds, self.batches = clock, seconds, batches

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for number in range(self.batches):
            self.clock.now += self.seconds
            yield [torch.full((4, 2, 2, 3), number, dtype=torch.uint8), torch.arange(4)]


def run(monitor: FeedMonitor, clock: FakeClock, seconds: float) -> None:
    for _ in monitor:
        clock.now += seconds


@pytest.mark.parametrize(("produce", "consume"), [(0.01, 0.03), (0.03, 0.01), (0.0, 0.02), (0.02, 0.0)])
def test_the_stall_of_known_times(clock: FakeClock, produce: float, consume: float) -> None:
    monitor = FeedMonitor(SlowLoader(clock, produce, 200), warn_stall=None)
    run(monitor, clock, consume)
    report = monitor.report()
    assert report.stall_fraction == pytest.approx(produce / (produce + consume), abs=1e-6)
    assert report.wait_seconds == report.stall_seconds == pytest.approx(200 * produce)
    assert report.seconds == pytest.approx(200 * (produce + consume))
    assert (report.batches, report.images) == (200, 800)
    assert report.images_per_s == pytest.approx(800 / report.seconds)
    assert report.bytes_per_s == pytest.approx(200 * (4 * 12 + 4 * 8) / report.seconds)
    assert report.interval is not None
    assert report.interval.interval is None


def test_the_stall_by_the_real_clock() -> None:
    spent = {"producer": 0.0, "consumer": 0.0}

    def spend(seconds: float, who: str) -> None:
        begun = time.perf_counter()
        time.sleep(seconds)
        spent[who] += time.perf_counter() - begun

    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(40):
                spend(0.006, "producer")
                yield torch.zeros(2, 3)

    monitor = FeedMonitor(Loader(), warn_stall=None, every=0.1)
    for _ in monitor:
        spend(0.012, "consumer")
    # Sleeps are longer on a busy machine, on both sides; what they took is what must be found.
    expected = spent["producer"] / sum(spent.values())
    assert monitor.report().stall_fraction == pytest.approx(expected, abs=0.05)
    assert 0.1 < expected < 0.6


def test_intervals_are_disjoint_and_complete(clock: FakeClock, tmp_path: Path) -> None:
    path = tmp_path / "feed.jsonl"
    monitor = FeedMonitor(SlowLoader(clock, 0.25, 33), warn_stall=None, every=2.0, json_lines=path, name="t")
    run(monitor, clock, 0.5)
    run(monitor, clock, 0.5)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for epoch in (0, 1):
        of_epoch = [record for record in records if record["epoch"] == epoch]
        intervals = [record for record in of_epoch if record["over"] == "interval"]
        (whole,) = [record for record in of_epoch if record["over"] == "epoch"]
        assert of_epoch[-1] is whole
        assert len(intervals) > 5
        for key in ("batches", "images", "seconds", "stall_seconds", "wait_seconds"):
            assert sum(record[key] for record in intervals) == pytest.approx(whole[key]), key
        assert whole["batches"] == 33
        assert all(record["seconds"] >= 2.0 for record in intervals[:-1])
        assert all(record["stall_fraction"] == pytest.approx(1 / 3) for record in intervals[:-1])
    assert list(records[0]) == KEYS


KEYS = [
    *("name", "over", "time", "epoch", "batches", "images", "seconds", "wait_seconds", "stall_seconds"),
    *("stall_fraction", "images_per_s", "bytes_per_s", "queue_depth", "cpu_percent", "children_cpu_percent"),
    *("freshness", "gpu_name", "gpu_utilisation_percent", "gpu_memory_used_bytes", "gpu_memory_total_bytes"),
    *("gpu_temperature_celsius", "gpu_power_watts", "gpu_throttle_reasons"),
]
"""Other programs go by these."""


class FakeEvent:
    """A CUDA event of a device whose clock is moved by hand."""

    def __init__(self) -> None:
        self.at: float | None = None

    def record(self, stream: Any) -> None:
        self.at = None
        stream.append(self)

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.at is not None
        assert end_event.at is not None
        return (end_event.at - self.at) * 1000


def test_the_wait_of_a_stream() -> None:
    stream: list[FakeEvent] = []
    made: list[FakeEvent] = []

    def make() -> FakeEvent:
        made.append(FakeEvent())
        return made[-1]

    wait = DeviceWait(make, lambda: stream)
    wait.begin()
    wait.end(0.5)
    # The device has come to neither; until then the process's waiting counts.
    assert wait.seconds == 0.5
    stream[0].at = 10.0
    assert wait.seconds == 0.5
    stream[1].at = 10.2
    assert wait.seconds == pytest.approx(0.2)
    # A wait that queued work hid is none.
    wait.begin()
    wait.end(0.7)
    stream[2].at = stream[3].at = 11.0
    assert wait.seconds == pytest.approx(0.2)
    assert len(made) == 2
    for _ in range(5):
        wait.begin()
        wait.end(0.0)
        stream[-2].at, stream[-1].at = 1.0, 1.1
        assert wait.seconds > 0.2
    assert wait.seconds == pytest.approx(0.7)
    # Events are used again.
    assert len(made) == 2


def test_a_deliberately_slow_loader_is_named(clock: FakeClock) -> None:
    with pytest.warns(
        UserWarning, match=r"the step waited 75 % of the last 1\.2 s for SlowLoader: a SlowLoader"
    ) as seen:
        run(FeedMonitor(SlowLoader(clock, 0.3, 12)), clock, 0.1)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    # Once in a process.
    run(FeedMonitor(SlowLoader(clock, 0.3, 12)), clock, 0.1)
    with pytest.warns(UserWarning, match="h5pack val: the step waited"):
        run(FeedMonitor(SlowLoader(clock, 0.3, 12), name="val"), clock, 0.1)


def test_when_there_is_no_warning(clock: FakeClock) -> None:
    # Not the first interval; not below the limit; not where nobody wants it.
    run(FeedMonitor(SlowLoader(clock, 0.3, 3)), clock, 0.1)
    run(FeedMonitor(SlowLoader(clock, 0.009, 100)), clock, 0.1)
    run(FeedMonitor(SlowLoader(clock, 0.3, 12), warn_stall=0.8), clock, 0.1)
    run(FeedMonitor(SlowLoader(clock, 0.3, 12), warn_stall=None), clock, 0.1)
    monitor = FeedMonitor(SlowLoader(clock, 0.3, 12), warn_once=False)
    for _ in range(2):
        with pytest.warns(UserWarning, match="SlowLoader"):
            run(monitor, clock, 0.1)


def test_a_warning_as_an_error_loses_no_batch(clock: FakeClock) -> None:
    iterator = iter(FeedMonitor(SlowLoader(clock, 0.6, 6)))
    numbers = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while True:
            try:
                numbers.append(int(next(iterator)[0][0, 0, 0, 0]))
            except UserWarning:
                numbers.append(-1)
            except StopIteration:
                break
    assert numbers == [0, 1, 2, 3, -1, 4, 5]


@pytest.fixture
def dataset(tmp_path: Path) -> h5pack.H5Dataset:
    return h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5", 40))


def report_of(**settings: Any) -> FeedReport:
    values: dict[str, Any] = {"wait_seconds": 0.5, "stall_seconds": 0.5, "stall_fraction": 0.5, **settings}
    return FeedReport("t", 0, 5, 40, 1.0, images_per_s=40.0, bytes_per_s=1.0, **values)


def cause(loader: Any, transform: float | None = None, cpus: int = 8, **settings: Any) -> str:
    return likely_cause(Evidence(layers_of(loader), report_of(**settings), transform, cpus))


def test_causes_of_a_dataloader(dataset: h5pack.H5Dataset, tmp_path: Path) -> None:
    assert "num_workers=0" in cause(DataLoader(dataset, BATCH))
    assert "H5Loader" in cause(DataLoader(dataset, BATCH))
    workers = DataLoader(dataset, BATCH, num_workers=2)
    busy = cause(workers, children_cpu_percent=190.0)
    assert "2 workers are bound by decoding and transforms (CPU 190 % of 200 %)" in busy
    assert "more workers" in busy
    assert "more workers" not in cause(workers, children_cpu_percent=190.0, cpus=2)
    assert "wait themselves (CPU 30 % of 200 %)" in cause(workers, children_cpu_percent=30.0)
    assert "do not keep up" in cause(workers)
    assert "2 workers" in cause(DeviceFeed(workers, "cpu"), children_cpu_percent=190.0)
    packed = h5pack.H5Dataset(packs.labelled(tmp_path / "z.h5", 40, compression="gzip"))
    for loader in (
        DataLoader(packed, BATCH, sampler=RandomSampler(packed), num_workers=2),
        DataLoader(packed, batch_sampler=h5pack.ChunkBatchSampler(packed, BATCH, shuffle="full"), num_workers=2),
        DataLoader(Subset(packed, range(20)), BATCH, shuffle=True, num_workers=2),
    ):
        assert "z.h5: 'images' is compressed" in cause(loader, children_cpu_percent=190.0)
    windows = DataLoader(packed, batch_sampler=h5pack.ChunkBatchSampler(packed, BATCH), num_workers=2)
    assert "bound by decoding" in cause(windows, children_cpu_percent=190.0)


def test_causes_of_an_h5loader(dataset: h5pack.H5Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = h5pack.H5Loader(dataset, BATCH, threads=2)
    assert "f.h5 comes more slowly from its disk" in cause(loader, cpu_percent=20.0)
    assert "2 threads and the step use all of the CPU" in cause(loader, cpu_percent=180.0)
    assert "more threads" in cause(loader, cpu_percent=180.0)
    packed = h5pack.H5Dataset(packs.labelled(tmp_path / "z.h5", 40, compression="gzip"))
    assert "shuffle='window'" in cause(h5pack.H5Loader(packed, BATCH, shuffle="full"))
    assert "compressed" not in cause(h5pack.H5Loader(packed, BATCH))
    external = packs.write(tmp_path / "l.h5", compression="lzf", images=packs.values(40))
    through = h5pack.H5Dataset(external)
    index = through.engine.indexes["images"]
    if index.reason is None:
        # Whatever can be read directly by now; the reason is what counts.
        through.engine.indexes["images"] = type(index)(**{**vars(index), "reason": "its filter is unknown"})
    found = cause(h5pack.H5Loader(through, BATCH))
    assert "through the HDF5 library" in found
    assert "h5pack convert" in found


def test_causes_of_wrappers(dataset: h5pack.H5Dataset) -> None:
    loader = h5pack.H5Loader(dataset, BATCH)
    assert "its transform takes 80 %" in cause(loader, transform=0.4)
    assert "transform takes" not in cause(loader, transform=0.2)
    assert "copy to the device" in cause(loader, wait_seconds=0.01)
    assert base_datasets([DataLoader(Subset(Subset(dataset, range(9)), range(5)))]) == [dataset]
    assert base_datasets([DataLoader(h5pack.ConcatPack([dataset, dataset]))]) == [dataset, dataset]


def test_the_progress_line(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    run(FeedMonitor(SlowLoader(clock, 0.125, 18), warn_stall=None, progress=True), clock, 0.125)
    shown = capsys.readouterr().err
    assert re.search(r"train 0: 4 batches .*16 images/s, stall 50 %, GPU not available", shown)
    assert "train 0: 18 batches" in shown


class FakeWriter:
    """As much of a SummaryWriter as is used."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def flush(self) -> None:
        pass


def test_tensorboard_scalars(clock: FakeClock) -> None:
    writer = FakeWriter()
    monitor = FeedMonitor(SlowLoader(clock, 0.25, 8), warn_stall=None, tensorboard=writer)
    run(monitor, clock, 0.25)
    run(monitor, clock, 0.25)
    stalls = [(value, step) for tag, value, step in writer.scalars if tag == "feed/train/stall_fraction"]
    assert [step for _, step in stalls] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert all(value == pytest.approx(0.5) for value, _ in stalls)
    # What is not available is no scalar.
    assert not any("gpu" in tag or "freshness" in tag for tag, _, _ in writer.scalars)


def test_tensorboard_folder(clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(OptionsError, match="pip install tensorboard"):
        FeedMonitor([], tensorboard=tmp_path)
    made: list[str] = []
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda folder: made.append(folder) or FakeWriter()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    FeedMonitor([], tensorboard=tmp_path)
    assert made == [str(tmp_path)]


def test_figures_that_loaders_and_gpus_tell(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Telling(SlowLoader):
        queue_depth = 3
        shown = fresh = 0

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                self.shown += 1
                self.fresh += self.shown % 2
                yield batch

    looks: list[float] = []

    def look(self: FeedMonitor) -> GpuStatus:
        looks.append(clock.now)
        return GpuStatus(name="card", utilisation_percent=93.0)

    monkeypatch.setattr(FeedMonitor, "_look", look)
    monitor = FeedMonitor(Telling(clock, 0.125, 32), warn_stall=None)
    for _ in monitor:
        clock.now += 0.125
        report = monitor.report()
    assert (report.queue_depth, report.freshness) == (3, 0.5)
    assert report.gpu is not None
    assert "GPU 93 %" in str(report)
    assert "fresh 50 %" in str(report)
    # Once an interval, however often reports are asked for.
    assert len(looks) <= 10
    assert min(later - earlier for earlier, later in itertools.pairwise(looks)) >= 1.0
    assert monitor.report().record("epoch")["gpu_utilisation_percent"] == 93.0
    assert monitor.report().record("epoch")["gpu_power_watts"] is None


def test_cpu_time_of_this_process_and_children() -> None:
    before = CpuTime.now()
    child = multiprocessing.get_context("fork").Process(target=_burn, args=(0.3,))
    child.start()
    deadline = time.monotonic() + 30
    # While it runs, and after it has ended.
    while (running := CpuTime.now().since(before).children or 0.0) < 0.1 and time.monotonic() < deadline:
        time.sleep(0.02)
    child.join()
    used = CpuTime.now().since(before)
    assert running >= 0.1
    assert used.children is not None
    assert 0.25 < used.children < 0.6
    _burn(0.1)
    assert CpuTime.now().since(before).own - used.own > 0.08
    assert used.total == used.own + used.children


def _burn(seconds: float) -> None:
    begun = time.process_time()
    while time.process_time() - begun < seconds:
        pass


def test_cpu_time_on_other_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Earlier tests may have left workers that stay.
    monkeypatch.setattr(cpu_time.multiprocessing, "active_children", list)
    assert CpuTime.now(tmp_path).children is not None
    monkeypatch.setattr(cpu_time.multiprocessing, "active_children", lambda: ["one"])
    assert CpuTime.now(tmp_path).total is None
    # A kernel that lists no children: each process says whose it is.
    own = os.getpid()
    for number, parent, ticks in ((own, 1, 900), (7, own, 10), (8, 7, 20), (9, 1, 40)):
        (tmp_path / str(number)).mkdir()
        fields = ["S", parent, *[0] * 9, ticks, ticks, 0, 0, 0]
        (tmp_path / str(number) / "stat").write_text(f"{number} (a) b) {' '.join(map(str, fields))}")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").write_text("")
    ended = os.times()
    seconds = ended.children_user + ended.children_system
    assert CpuTime.now(tmp_path).children == pytest.approx(seconds + 60 / os.sysconf("SC_CLK_TCK"))


def test_batches_are_the_loaders_own(dataset: h5pack.H5Dataset) -> None:
    for batches in ([torch.zeros(3), (torch.zeros(2, 3), 4), {"a": torch.zeros(5, 2)}, "text", None], []):
        assert all(got is given for got, given in zip(FeedMonitor(batches), batches, strict=True))
    assert measure({"step": torch.zeros(()), "x": torch.zeros(3, 2), "y": [torch.zeros(3)]}) == (3, 40)
    assert measure(np.zeros((6, 2), np.uint8)) == (6, 12)
    assert measure("text") == (None, 0)
    monitor = FeedMonitor(["text"])
    assert list(monitor) == ["text"]
    report = monitor.report()
    assert (report.batches, report.images, report.images_per_s, report.bytes_per_s) == (1, None, None, None)
    assert "not available" in report.line()


def test_nobody_else_holds_a_batch() -> None:
    iterator = iter(FeedMonitor(torch.zeros(number) for number in range(1, 4)))
    kept = weakref.ref(next(iterator))
    # H5Loader would not use its memory again before the next batch.
    assert kept() is None
    batch = next(iterator)
    assert batch.shape == (2,)


def loaders(kind: str, dataset: h5pack.H5Dataset) -> Any:
    if kind == "h5loader":
        return h5pack.H5Loader(dataset, BATCH, seed=3)
    if kind == "device feed":
        return DeviceFeed(h5pack.H5Loader(dataset, BATCH, seed=3), "cpu")
    return DataLoader(dataset, batch_sampler=h5pack.ChunkBatchSampler(dataset, BATCH, seed=3), num_workers=0)


def labels_of(batches: Any, most: int | None = None) -> list[list[int]]:
    return [batch[1].tolist() for batch in itertools.islice(batches, most)]


@pytest.mark.parametrize("kind", ["h5loader", "device feed", "sampler"])
def test_resume_at_every_batch(dataset: h5pack.H5Dataset, kind: str) -> None:
    plain = FeedMonitor(loaders(kind, dataset), warn_stall=None)
    assert len(plain) == 5
    assert plain.dataset is dataset
    expected = [labels_of(plain), labels_of(plain)]
    assert expected[0] != expected[1]
    for stop in range(6):
        monitor = FeedMonitor(loaders(kind, dataset), warn_stall=None)
        iterator = iter(monitor)
        assert labels_of(iterator, stop) == expected[0][:stop]
        if stop == 5:
            assert next(iterator, None) is None
        state = json.loads(json.dumps(monitor.state_dict()))
        resumed = FeedMonitor(loaders(kind, dataset), warn_stall=None)
        resumed.load_state_dict(state)
        following = expected[0][stop:] or expected[1]
        assert labels_of(resumed) == following
        assert resumed.epoch == (1 if stop == 5 else 0)
        if stop < 5:
            assert labels_of(resumed) == expected[1]
        resumed.set_epoch(0)
        assert labels_of(resumed) == expected[0]
    # The state is the loader's own: with or without a monitor.
    bare = loaders("h5loader", dataset)
    bare.load_state_dict(FeedMonitor(loaders("h5loader", dataset)).state_dict())


def test_around_an_echo_loader(dataset: h5pack.H5Dataset) -> None:
    echo = EchoLoader(h5pack.H5Loader(dataset, BATCH, seed=3), 2)
    monitor = FeedMonitor(DeviceFeed(echo, "cpu"), warn_stall=None)
    for _ in range(2):
        shown = labels_of(monitor)
        assert shown[::2] == shown[1::2]
        assert (monitor.report().batches, monitor.report().freshness) == (10, 0.5)
    inner = FeedMonitor(h5pack.H5Loader(dataset, BATCH, seed=3), warn_stall=None)
    assert len(list(EchoLoader(inner, 2))) == 10
    assert inner.report().batches == 5


def test_no_state() -> None:
    monitor = FeedMonitor([torch.zeros(2)])
    with pytest.raises(StateError, match="list keeps no state"):
        monitor.state_dict()
    with pytest.raises(AttributeError, match="has no dataset"):
        _ = monitor.dataset
    assert not hasattr(monitor, "dataset")
    list(monitor)
    list(monitor)
    assert monitor.epoch == 1


def test_leaving_early_and_errors(clock: FakeClock, tmp_path: Path) -> None:
    path = tmp_path / "feed.jsonl"
    monitor = FeedMonitor(SlowLoader(clock, 0.1, 50), warn_stall=None, json_lines=path)
    for _ in zip(range(3), monitor, strict=False):
        clock.now += 0.1
    report = monitor.report()
    clock.now += 100
    # The clock of an iteration that was left stands still.
    assert monitor.report() == report
    assert json.loads(path.read_text().splitlines()[-1])["over"] == "epoch"

    def broken() -> Iterator[torch.Tensor]:
        yield torch.zeros(2)
        raise KeyError("in the loader")

    monitor = FeedMonitor(broken(), warn_stall=None)
    iterator = iter(monitor)
    next(iterator)
    with pytest.raises(KeyError, match="in the loader"):
        next(iterator)
    assert monitor.report().batches == 1
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_full_disk_stops_the_lines_only(clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    monitor = FeedMonitor(SlowLoader(clock, 0.5, 12), warn_stall=None, json_lines=folder / "feed.jsonl")
    (folder / "feed.jsonl").unlink()
    folder.rmdir()
    run(monitor, clock, 0.5)
    assert monitor.report().batches == 12
    assert caplog.text.count("no more lines are written") == 1


def test_profilers_see_the_stages(clock: FakeClock) -> None:
    monitor = FeedMonitor(SlowLoader(clock, 0.0, 3), warn_stall=None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for batch in monitor:
            batch[0] + 1
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["h5pack: step"] == 3
    # The last asks in vain.
    assert counts["h5pack: wait"] == 4
    monitor = FeedMonitor(SlowLoader(clock, 0.0, 3), warn_stall=None, labels=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in itertools.islice(monitor, 2):
            torch.zeros(1) + 1
    assert not any("h5pack" in event.key for event in profile.key_averages())


def test_a_profiler_that_stops_amid_a_step(clock: FakeClock) -> None:
    iterator = iter(FeedMonitor(SlowLoader(clock, 0.0, 4), warn_stall=None))
    next(iterator)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        next(iterator)
    assert len(list(iterator)) == 2


def test_it_costs_little() -> None:
    batch = [torch.zeros(8, 4, 4, 3, dtype=torch.uint8), torch.zeros(8)]

    def seconds(loader: Any) -> float:
        begun = time.process_time()
        for _ in loader:
            pass
        return time.process_time() - begun

    batches = [batch] * 5_000
    # CPU time of the best of several: others use the machine, too. Measured: 3.5 microseconds.
    costs = [seconds(FeedMonitor(batches, warn_stall=None)) - seconds(batches) for _ in range(7)]
    assert min(costs) / 5_000 < 10e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every is 0; give the seconds between reports"),
        ({"every": "1"}, "every is '1'"),
        ({"every": float("nan")}, "every is nan"),
        ({"warn_stall": 1.5}, "warn_stall is 1.5; give a fraction"),
        ({"warn_stall": float("nan")}, "warn_stall is nan"),
        ({"device": "nothing"}, "device 'nothing' is none"),
        ({"json_lines": "/nowhere/at/all.jsonl"}, "json_lines: .*name a file that can be written"),
        ({"tensorboard": 5}, "tensorboard is a int; give a SummaryWriter"),
        ({"loader": 5}, "a int cannot be iterated"),
    ],
)
def test_bad_options(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        FeedMonitor(settings.pop("loader", []), **settings)


def test_before_the_first_batch() -> None:
    report = FeedMonitor([]).report()
    assert (report.batches, report.images_per_s, report.epoch) == (0, None, None)
    monitor = FeedMonitor([])
    assert list(monitor) == []
    assert monitor.report().batches == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu() -> None:
    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(20):
                time.sleep(0.02)
                yield torch.zeros(64, 3)

    monitor = FeedMonitor(DeviceFeed(Loader(), "cuda"), warn_stall=None, every=0.1)
    matrix = torch.rand(2048, 2048, device="cuda")
    for batch in monitor:
        assert batch.is_cuda
        (matrix @ matrix).sum().item()
    report = monitor.report()
    assert report.stall_fraction > 0.4
    assert report.gpu is None or report.gpu.name is not None


def test_workers_are_children() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(64, 3)), 4, num_workers=1, multiprocessing_context="fork")
    monitor = FeedMonitor(loader, warn_stall=None)
    assert len(list(monitor)) == 16
    report = monitor.report()
    assert report.cpu_percent is not None
    assert report.children_cpu_percent is not None
    assert report.cpu_percent > report.children_cpu_percent


def test_a_monitor_that_was_used_can_be_pickled(tmp_path: Path) -> None:
    monitor = FeedMonitor([torch.zeros(2)] * 3, json_lines=tmp_path / "f.jsonl", every=1e-9)
    next(iter(monitor))
    again = pickle.loads(pickle.dumps(monitor))
    assert len(list(again)) == 3
    assert again.report().batches == 3


def test_steps_of_a_resumed_epoch_follow_those_before(tmp_path: Path) -> None:
    dataset = h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5"))
    loader = h5pack.H5Loader(dataset, 8)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    loader.close()

    class Writer:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def add_scalar(self, key: str, value: float, step: int) -> None:
            self.steps.append(step)

        def flush(self) -> None: ...

    writer = Writer()
    monitor = FeedMonitor(loader, every=1e-9, tensorboard=writer, warn_stall=None)
    monitor.load_state_dict(state)
    assert len(list(monitor)) == len(loader) - 5
    assert sorted(set(writer.steps))[0] >= 5
    assert max(writer.steps) <= len(loader)
