"""FeedMonitor: true numbers, true warnings, and unchanged batches."""

from __future__ import annotations

import gc
import itertools
import json
import pickle
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset

import h5pack
from h5pack.device.batch import batch_size_and_bytes
from h5pack.device.echo import EchoLoader
from h5pack.device.feed import DeviceFeed
from h5pack.device.loader_wrapper import base_datasets, layers_of
from h5pack.errors import LoaderError, OptionsError, StateError
from h5pack.monitor import monitor as monitor_module
from h5pack.monitor.bottleneck import Encoding, Evidence
from h5pack.monitor.monitor import FeedMonitor, interval_evidence, stall_text
from h5pack.monitor.probes import GpuStatus
from h5pack.monitor.report import FeedReport
from tests.data import packs
from tests.device.feeds import Numbers, prefetching_feed
from tests.monitor.fake_clock import FakeClock, SlowLoader, run

BATCH = 8


@pytest.mark.parametrize(("produce", "consume"), [(0.01, 0.03), (0.0, 0.02), (0.02, 0.0)])
def test_the_stall_fraction_of_known_times(clock: FakeClock, produce: float, consume: float) -> None:
    monitor = FeedMonitor(SlowLoader(clock, produce, 200), warn_stall=None)
    run(monitor, clock, consume)
    report = monitor.report()
    assert report.stall_fraction == pytest.approx(produce / (produce + consume), abs=1e-6)
    assert report.wait_seconds == report.stall_seconds == pytest.approx(200 * produce)
    assert report.seconds == pytest.approx(200 * (produce + consume))
    assert (report.batches, report.images) == (200, 800)
    assert report.images_per_s == pytest.approx(800 / report.seconds)
    assert report.bytes_per_s == pytest.approx(200 * (4 * 12 + 4 * 8) / report.seconds)
    assert report.interval.interval is None


def test_an_error_of_on_report_does_not_keep_the_loader_open(tmp_path: Path) -> None:
    def fail(report: FeedReport) -> None:
        raise ValueError("of the user")

    loader = h5pack.H5Loader(h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5")), BATCH)
    monitor = FeedMonitor(loader, warn_stall=None, interval_seconds=100, on_report=fail, json_lines=tmp_path / "lines")
    iterator = iter(monitor)
    next(iterator)
    with pytest.raises(ValueError, match="of the user"):
        iterator.close()  # type: ignore[attr-defined]
    assert [json.loads(line)["over"] for line in (tmp_path / "lines").read_text().splitlines()] == ["interval", "epoch"]
    assert packs.threads_end(), packs.loader_threads()
    iterator.close()  # type: ignore[attr-defined]


def test_intervals_are_disjoint_and_complete(clock: FakeClock) -> None:
    reports: list[FeedReport] = []
    monitor = FeedMonitor(SlowLoader(clock, 0.25, 33), warn_stall=None, interval_seconds=2.0, on_report=reports.append)
    run(monitor, clock, 0.5)
    run(monitor, clock, 0.5)
    for epoch in (0, 1):
        *intervals, whole = [report for report in reports if report.epoch == epoch]
        assert [report.over for report in (*intervals, whole)] == [*["interval"] * len(intervals), "epoch"]
        assert len(intervals) > 5
        for key in ("batches", "images", "seconds", "stall_seconds", "wait_seconds"):
            assert sum(getattr(report, key) for report in intervals) == pytest.approx(getattr(whole, key)), key
        assert whole.batches == 33
        assert all(report.seconds >= 2.0 for report in intervals[:-1])
        assert all(report.stall_fraction == pytest.approx(1 / 3) for report in intervals[:-1])


@pytest.mark.parametrize("batches", [2, 9])
def test_a_monitor_makes_no_reference_cycle(batches: int) -> None:
    """A DataLoader in a reference cycle dies slowly: it waits 5 seconds for each worker."""
    loader = Numbers(3)
    dying = weakref.ref(loader)
    monitor = FeedMonitor(loader, warn_stall=None)
    gc.disable()
    try:
        for _ in itertools.islice(monitor, batches):
            pass
        assert monitor.report().batches == min(3, batches)
        del monitor, loader
        assert dying() is None
    finally:
        gc.enable()


def test_an_iteration_in_a_reference_cycle_is_reported_when_it_is_freed() -> None:
    reports: list[FeedReport] = []
    monitor = FeedMonitor(Numbers(3), warn_stall=None, on_report=reports.append)
    cycle: list[Any] = [monitor, iter(monitor)]
    next(cycle[1])
    cycle.append(cycle)
    del monitor, cycle
    gc.collect()
    assert [(report.over, report.batches) for report in reports] == [("interval", 1), ("epoch", 1)]


def test_an_iteration_that_two_threads_end_is_reported_once() -> None:
    class Closing(Numbers):
        @property
        def queue_depth(self) -> int:
            """Close the iterator while its last report is made, as another thread may."""
            others.pop().close() if others else None
            return 0

    others: list[Any] = []
    reports: list[FeedReport] = []
    iterator: Any = iter(FeedMonitor(Closing(3), warn_stall=None, on_report=reports.append))
    next(iterator)
    others += [iterator]
    iterator.close()
    assert not others
    assert [(report.over, report.batches) for report in reports] == [("interval", 1), ("epoch", 1)]


def test_a_length_may_be_unknown() -> None:
    class Endless(Numbers):
        def __len__(self) -> int:
            raise NotImplementedError

    monitor = FeedMonitor(Endless(3), warn_stall=None)
    assert [sum(1 for _ in monitor) for _ in range(2)] == [3, 3]
    assert monitor.report().step == 6


def test_requests_after_the_end_are_not_reported(clock: FakeClock) -> None:
    reports: list[FeedReport] = []
    iterator = iter(FeedMonitor(SlowLoader(clock, 0.25, 3), warn_stall=None, on_report=reports.append))
    assert len(list(iterator)) == 3
    clock.now += 10
    assert next(iterator, None) is None
    assert [report.over for report in reports] == ["interval", "epoch"]


def test_an_iteration_is_reported_before_the_next_begins(clock: FakeClock) -> None:
    reports: list[FeedReport] = []
    monitor = FeedMonitor(SlowLoader(clock, 0.125, 9), warn_stall=None, on_report=reports.append)
    iterator = None
    for _ in range(2):
        # The iterator of the first epoch is freed after this one was made.
        iterator = iter(monitor)
        assert sum(next(iterator)[1].sum() for _ in range(4)) == 24
    del iterator
    found = [(report.over, report.epoch, report.step, report.batches) for report in reports]
    assert found == [("interval", 0, 4, 4), ("epoch", 0, 4, 4), ("interval", 1, 8, 4), ("epoch", 1, 8, 4)]


def test_a_slow_loader_is_named_once_in_a_process(clock: FakeClock) -> None:
    with pytest.warns(UserWarning, match="SlowLoader") as seen:
        run(FeedMonitor(SlowLoader(clock, 0.3, 12)), clock, 0.1)
    (text,) = (str(warning.message) for warning in seen)
    assert all(part in text for part in ("train", "75 %", "1.2 s"))
    run(FeedMonitor(SlowLoader(clock, 0.3, 12)), clock, 0.1)
    with pytest.warns(UserWarning, match="val"):
        run(FeedMonitor(SlowLoader(clock, 0.3, 12), name="val"), clock, 0.1)
    monitor = FeedMonitor(SlowLoader(clock, 0.3, 12), warn_once=False)
    for _ in range(2):
        with pytest.warns(UserWarning, match="SlowLoader"):
            run(monitor, clock, 0.1)


# In the first interval, below the limit, or without one.
@pytest.mark.parametrize(
    ("seconds", "batches", "limit"), [(0.3, 3, 0.1), (0.009, 100, 0.1), (0.3, 12, 0.8), (0.3, 12, None)]
)
def test_a_loader_that_is_fast_enough_gives_no_warning(
    clock: FakeClock, seconds: float, batches: int, limit: float | None
) -> None:
    run(FeedMonitor(SlowLoader(clock, seconds, batches), warn_stall=limit), clock, 0.1)


def test_a_warning_as_an_error_loses_no_batch(clock: FakeClock) -> None:
    iterator, numbers = iter(FeedMonitor(SlowLoader(clock, 0.6, 6))), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(7):
            try:
                numbers.append(int(next(iterator)[0][0, 0, 0, 0]))
            except UserWarning:
                numbers.append(-1)
    assert numbers == [0, 1, 2, 3, -1, 4, 5]
    assert next(iterator, None) is None


def test_a_report_has_the_numbers_of_loaders_and_gpus(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(SlowLoader):
        queue_depth = 3
        shown = fresh = 0

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                self.shown += 1
                self.fresh += self.shown % 2
                yield batch

    queries: list[float] = []

    class Probe:
        def sample(self) -> GpuStatus:
            queries.append(clock.now)
            return GpuStatus(name="card", utilization_percent=93.0)

    monitor = FeedMonitor(Counting(clock, 0.125, 32), warn_stall=None)
    monkeypatch.setattr(monitor, "_probe", Probe())
    for _ in monitor:
        clock.now += 0.125
        report = monitor.report()
    assert (report.queue_depth, report.freshness) == (3, 0.5)
    # Once an interval, however often a report is requested.
    assert len(queries) <= 10
    assert min(later - earlier for earlier, later in itertools.pairwise(queries)) >= 1.0
    assert monitor.report().to_json()["gpu_utilization_percent"] == 93.0


def test_batches_are_unchanged_and_not_kept() -> None:
    batches = [torch.zeros(3), (torch.zeros(2, 3), 4), {"a": torch.zeros(5, 2)}, "text", None]
    assert all(got is given for got, given in zip(FeedMonitor(batches), batches, strict=True))
    assert batch_size_and_bytes({"step": torch.zeros(()), "x": torch.zeros(3, 2), "y": [torch.zeros(3)]}) == (3, 40)
    assert batch_size_and_bytes(np.zeros((6, 2), np.uint8)) == (6, 12)
    monitor = FeedMonitor(["text"])
    assert list(monitor) == ["text"]
    report = monitor.report()
    assert (report.batches, report.images, report.images_per_s, report.bytes_per_s) == (1, None, None, None)
    # H5Loader would not use the memory of a batch again before the next batch if it was kept.
    iterator = iter(FeedMonitor(torch.zeros(number) for number in range(1, 4)))
    kept = weakref.ref(next(iterator))
    assert kept() is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_batches_of_sparse_and_nested_tensors_are_counted() -> None:
    batches = [torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])]
    monitor = FeedMonitor(batches, warn_stall=None)
    assert all(got is given for got, given in zip(monitor, batches, strict=True))
    assert monitor.report().images == 5
    assert [batch_size_and_bytes(batch) for batch in batches] == [(3, 0), (2, 20)]


def h5loader(dataset: h5pack.H5Dataset) -> Any:
    return h5pack.H5Loader(dataset, BATCH, seed=3)


def device_feed(dataset: h5pack.H5Dataset) -> Any:
    return DeviceFeed(h5loader(dataset), "cpu")


def sampler(dataset: h5pack.H5Dataset) -> Any:
    return DataLoader(dataset, batch_sampler=h5pack.ChunkBatchSampler(dataset, BATCH, seed=3), num_workers=0)


def labels_of(batches: Any, count: int | None = None) -> list[list[int]]:
    return [batch[1].tolist() for batch in itertools.islice(batches, count)]


@pytest.mark.parametrize("make", [h5loader, device_feed, sampler])
def test_resume_at_every_batch(dataset: h5pack.H5Dataset, make: Any) -> None:
    plain = FeedMonitor(make(dataset), warn_stall=None)
    assert (len(plain), plain.dataset) == (5, dataset)
    expected = [labels_of(plain), labels_of(plain)]
    assert expected[0] != expected[1]
    for stop in range(6):
        monitor = FeedMonitor(make(dataset), warn_stall=None)
        iterator = iter(monitor)
        assert labels_of(iterator, stop) == expected[0][:stop]
        if stop == 5:
            assert next(iterator, None) is None
        state = json.loads(json.dumps(monitor.state_dict()))
        resumed = FeedMonitor(make(dataset), warn_stall=None)
        resumed.load_state_dict(state)
        assert labels_of(resumed) == (expected[0][stop:] or expected[1])
        assert resumed.epoch == (1 if stop == 5 else 0)
        if stop < 5:
            assert labels_of(resumed) == expected[1]
        resumed.set_epoch(0)
        assert labels_of(resumed) == expected[0]
    # The state is the loader's own, with or without a monitor.
    h5loader(dataset).load_state_dict(FeedMonitor(h5loader(dataset)).state_dict())


def test_around_an_echo_loader(dataset: h5pack.H5Dataset) -> None:
    monitor = FeedMonitor(DeviceFeed(EchoLoader(h5loader(dataset), 2), "cpu"), warn_stall=None)
    for _ in range(2):
        shown = labels_of(monitor)
        assert shown[::2] == shown[1::2]
        assert (monitor.report().batches, monitor.report().freshness) == (10, 0.5)
    inner = FeedMonitor(h5loader(dataset), warn_stall=None)
    assert len(list(EchoLoader(inner, 2))) == 10
    assert inner.report().batches == 5


@pytest.mark.parametrize("make", [h5loader, device_feed, sampler, lambda dataset: EchoLoader(h5loader(dataset), 3)])
def test_steps_of_a_resumed_epoch_continue_those_before(dataset: h5pack.H5Dataset, make: Any) -> None:
    whole, resumed = (FeedMonitor(make(dataset), warn_stall=None) for _ in range(2))
    list(whole)
    iterator = iter(whole)
    labels_of(iterator, 3)
    resumed.load_state_dict(whole.state_dict())
    labels_of(iterator, 1)
    labels_of(resumed, 1)
    assert resumed.report().step == whole.report().step == len(whole) + 4


def test_a_loader_without_state_or_dataset() -> None:
    monitor = FeedMonitor([torch.zeros(2)])
    report = monitor.report()
    assert (report.batches, report.images_per_s, report.epoch) == (0, None, None)
    with pytest.raises(StateError):
        monitor.state_dict()
    assert not hasattr(monitor, "dataset")
    assert len([*monitor, *monitor]) == 2
    assert monitor.epoch == 1


def test_an_iteration_that_could_not_begin_adds_no_steps() -> None:
    begins = iter((True, False, True))

    class Loader:
        def __iter__(self) -> Any:
            if not next(begins):
                raise OSError("out of memory")
            return iter([torch.zeros(2)] * 3)

    monitor = FeedMonitor(Loader())
    list(monitor)
    with pytest.raises(OSError, match="out of memory"):
        iter(monitor)
    list(monitor)
    assert (monitor.report().step, monitor.report().epoch) == (6, 1)


def test_the_clock_of_an_iteration_that_was_left_stands_still(clock: FakeClock) -> None:
    reports: list[FeedReport] = []
    monitor = FeedMonitor(SlowLoader(clock, 0.1, 50), warn_stall=None, on_report=reports.append)
    for _ in zip(range(3), monitor, strict=False):
        clock.now += 0.1
    report = monitor.report()
    clock.now += 100
    assert monitor.report() == report == reports[-1]
    assert report.over == "epoch"


def test_an_error_of_the_loader_ends_the_iteration() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield torch.zeros(2)
        raise KeyError("in the loader")

    monitor = FeedMonitor(broken(), warn_stall=None)
    iterator = iter(monitor)
    next(iterator)
    with pytest.raises(KeyError):
        next(iterator)
    assert monitor.report().batches == 1
    with pytest.raises(LoaderError):
        next(iterator)


def test_profilers_see_waits_and_steps_and_may_begin_and_stop_within_a_step(clock: FakeClock) -> None:
    iterator = iter(FeedMonitor(SlowLoader(clock, 0.0, 4), warn_stall=None))
    silent = FeedMonitor(SlowLoader(clock, 0.0, 3), warn_stall=None, profiler_ranges=False)
    next(iterator)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for batch in itertools.islice(iterator, 2):
            batch[0] + 1
        assert len(list(silent)) == 3
    assert len(list(iterator)) == 1
    counts = {event.key: event.count for event in profile.key_averages()}
    # Earlier versions of PyTorch leave out the step that has not ended.
    assert (counts["h5pack: wait"], counts["h5pack: step"]) in ((2, 2), (2, 1))


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        *(("interval_seconds", value) for value in (0, "1", float("nan"))),
        *(("warn_stall", value) for value in (1.5, float("nan"), True)),
        ("json_lines", "/nowhere/at/all.jsonl"),
        ("json_lines", 5),
        ("tensorboard", 5),
        ("on_report", 5),
    ],
)
def test_values_that_make_no_sense_are_refused(parameter: str, value: Any) -> None:
    with pytest.raises(OptionsError) as caught:
        FeedMonitor([], **{parameter: value})
    assert [name.partition("=")[0] for name in caught.value.parameters] == [parameter]
    with pytest.raises(OptionsError):
        FeedMonitor([], device="nothing")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu() -> None:
    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(20):
                time.sleep(0.02)
                yield torch.zeros(64, 3)

    monitor = FeedMonitor(DeviceFeed(Loader(), "cuda"), warn_stall=None, interval_seconds=0.1)
    matrix = torch.rand(2048, 2048, device="cuda")
    for batch in monitor:
        assert batch.is_cuda
        (matrix @ matrix).sum().item()
    report = monitor.report()
    assert report.stall_fraction > 0.4
    assert report.gpu is None or report.gpu.name is not None


@pytest.mark.parametrize("inside", [True, False], ids=["inside the feed", "around the feed"])
def test_a_feed_around_a_monitor_does_not_count_the_step(monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    """The feed's thread requests the batches: what the device does meanwhile is the step."""
    requests: list[str] = []

    class Wait:
        seconds = 0.0

        def begin(self) -> None:
            requests.append(threading.current_thread().name)

        def end(self, host_seconds: float) -> None:
            self.seconds += 1.0

    monkeypatch.setattr(monitor_module, "_device_of", lambda layers: torch.device("cuda", 0))
    monkeypatch.setattr(monitor_module, "DeviceWait", lambda device: Wait())
    settings: dict[str, Any] = {"warn_stall": None, "profiler_ranges": False}
    monitor = FeedMonitor(Numbers(5) if inside else prefetching_feed(Numbers(5)), **settings)
    assert len(list(prefetching_feed(monitor) if inside else monitor)) == 5
    assert requests == ([] if inside else ["MainThread"] * 6)
    # The device's seconds are limited to the duration of the epoch.
    report = monitor.report()
    assert (report.stall_seconds == report.seconds) is (not inside)


def test_workers_are_children() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(64, 3)), 4, num_workers=1, multiprocessing_context="fork")
    monitor = FeedMonitor(loader, warn_stall=None)
    assert len(list(monitor)) == 16
    assert monitor.report().cpu_percent > monitor.report().children_cpu_percent


def test_a_monitor_that_was_used_can_be_pickled(tmp_path: Path) -> None:
    with FeedMonitor([torch.zeros(2)] * 3, json_lines=tmp_path / "f.jsonl", interval_seconds=1e-9) as monitor:
        next(iter(monitor))
    again = pickle.loads(pickle.dumps(monitor))
    assert len(list(again)) == 3
    assert again.report().batches == 3


def evidence(loader: Any, transform: float | None = None, **settings: Any) -> Evidence:
    """Of an interval in which the step waited half a second of one."""
    return interval_evidence(layers_of(loader), report(**settings), transform)


def report(**settings: Any) -> FeedReport:
    values: dict[str, Any] = {"wait_seconds": 0.5, "stall_seconds": 0.5, "stall_fraction": 0.5, **settings}
    return FeedReport(name="t", over="interval", time=0.0, seconds=1.0, **values)


def test_evidence_of_a_loader(dataset: h5pack.H5Dataset) -> None:
    used = {"cpu_percent": 250.0, "children_cpu_percent": 190.0}
    found = evidence(DataLoader(dataset, BATCH, num_workers=2), **used)
    assert (found.num_workers, found.num_threads, found.cpus_used) == (2, None, 1.9)
    assert (found.encoding, found.library_reason, found.full_shuffle) == (None, None, False)
    assert evidence(DeviceFeed(DataLoader(dataset, BATCH), "cpu")).num_workers == 0
    assert evidence([dataset]).num_workers is None
    for below, found_below in (
        (Subset(Subset(dataset, range(9)), range(5)), [dataset]),
        (h5pack.ConcatPack([dataset, dataset]), [dataset, dataset]),
    ):
        assert base_datasets(below) == found_below
    found = evidence(h5pack.H5Loader(dataset, BATCH, num_threads=2), **used)
    assert (found.num_workers, found.num_threads, found.cpus_used) == (None, 2, 2.5)
    assert (found.wait_fraction, found.transform_wait_fraction) == (1.0, None)
    found = evidence(h5pack.H5Loader(dataset, BATCH), transform=0.4, wait_seconds=0.5, stall_seconds=1.0)
    assert (found.wait_fraction, found.transform_wait_fraction) == (0.5, 0.8)
    # Rows that the HDF5 library reads have a reason.
    index = dataset.engine.indexes["images"]
    dataset.engine.indexes["images"] = replace(index, library_reason="its filter is unknown")
    found = evidence(h5pack.H5Loader(dataset, BATCH))
    assert found.library_reason == f"{dataset.path}: its filter is unknown"


def test_other_datasets_may_have_any_attributes() -> None:
    rows: Any = TensorDataset(torch.zeros(8, 2))
    rows.names, rows.engine = lambda: ["cat"], "fast"
    assert evidence(DataLoader(rows, 4)).encoding is None


def test_a_full_shuffle_is_seen_in_samplers_and_loaders(tmp_path: Path) -> None:
    packed = h5pack.H5Dataset(packs.labeled(tmp_path / "z.h5", 40, compression="gzip"))
    both = h5pack.ConcatPack([packed, packed])
    for loader, full in (
        (DataLoader(packed, BATCH, sampler=RandomSampler(packed)), True),
        (DataLoader(packed, batch_sampler=h5pack.ChunkBatchSampler(packed, BATCH, shuffle="full")), True),
        (DataLoader(both, batch_sampler=h5pack.MixtureSampler(both, BATCH, shuffle="full")), True),
        (DataLoader(Subset(packed, range(20)), BATCH, shuffle=True), True),
        (h5pack.H5Loader(packed, BATCH, shuffle="full"), True),
        (DataLoader(packed, batch_sampler=h5pack.ChunkBatchSampler(packed, BATCH)), False),
        (h5pack.H5Loader(packed, BATCH), False),
    ):
        found = evidence(loader)
        kept = isinstance(loader, h5pack.H5Loader)  # Its decoded chunks fit into memory.
        assert (found.full_shuffle, found.encoding) == (full, None if kept else Encoding.CHUNKS), loader


def test_a_warning_has_the_stall_the_loader_the_bottleneck_and_the_first_advice(
    dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("h5pack.monitor.monitor.available_cpus", lambda: 8)
    layers = layers_of(DeviceFeed(DataLoader(dataset, BATCH, num_workers=2), "cpu"))
    text = stall_text(layers, report(children_cpu_percent=190.0))
    assert all(part in text for part in ("50 %", "1.0 s", "DataLoader", "the loader", "num_workers to 8"))
