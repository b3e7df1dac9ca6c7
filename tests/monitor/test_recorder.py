"""What a recorder measures: waits of a CUDA stream, and the evidence of an interval."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, RandomSampler, Subset

import h5pack
from h5pack.device.feed import DeviceFeed
from h5pack.device.loader_wrapper import base_datasets, layers_of
from h5pack.monitor import recorder
from h5pack.monitor.bottleneck import Encoding, Evidence
from h5pack.monitor.recorder import DeviceWait, interval_evidence, stall_text
from h5pack.monitor.report import FeedReport
from tests.data import packs

BATCH = 8


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
        return (end_event.at - self.at) * 1000


def test_waits_of_a_stream_count_once_the_device_has_reached_them() -> None:
    stream: list[FakeEvent] = []
    made: list[FakeEvent] = []

    def make() -> FakeEvent:
        made.append(FakeEvent())
        return made[-1]

    wait = DeviceWait(make, lambda: stream)
    wait.begin()
    wait.end(0.5)
    # The device has reached neither; until then the process's waiting counts.
    assert wait.seconds == 0.5
    stream[0].at = 10.0
    assert wait.seconds == 0.5
    stream[1].at = 10.2
    assert wait.seconds == pytest.approx(0.2)
    # A wait that queued work hid does not count.
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
    # Events are reused.
    assert len(made) == 2


def evidence(loader: Any, transform: float | None = None, **settings: Any) -> Evidence:
    """Of an interval in which the step waited half a second of one."""
    return interval_evidence(layers_of(loader), report(**settings), transform)


def report(**settings: Any) -> FeedReport:
    values: dict[str, Any] = {"wait_seconds": 0.5, "stall_seconds": 0.5, "stall_fraction": 0.5, **settings}
    return FeedReport("t", "interval", 0.0, 0, 5, 5, 40, 1.0, images_per_s=40.0, bytes_per_s=1.0, **values)


def compressed(tmp_path: Path, **settings: Any) -> h5pack.H5Dataset:
    return h5pack.H5Dataset(packs.labelled(tmp_path / "z.h5", 40, compression="gzip"), **settings)


def test_evidence_of_a_dataloader(dataset: h5pack.H5Dataset) -> None:
    found = evidence(DataLoader(dataset, BATCH, num_workers=2), children_cpu_percent=190.0, cpu_percent=250.0)
    assert (found.num_workers, found.num_threads, found.cpus_used) == (2, None, 1.9)
    assert (found.encoding, found.library_reason, found.full_shuffle) == (None, None, False)
    assert evidence(DeviceFeed(DataLoader(dataset, BATCH), "cpu")).num_workers == 0
    assert evidence([dataset]).num_workers is None


def test_evidence_of_an_h5loader(dataset: h5pack.H5Dataset) -> None:
    found = evidence(h5pack.H5Loader(dataset, BATCH, num_threads=2), cpu_percent=180.0, children_cpu_percent=20.0)
    assert (found.num_workers, found.num_threads, found.cpus_used) == (None, 2, 1.8)
    assert found.wait_fraction == 1.0
    assert found.transform_wait_fraction is None
    found = evidence(h5pack.H5Loader(dataset, BATCH), transform=0.4, wait_seconds=0.5, stall_seconds=1.0)
    assert (found.wait_fraction, found.transform_wait_fraction) == (0.5, 0.8)


def test_a_full_shuffle_is_seen_in_samplers_and_loaders(tmp_path: Path) -> None:
    packed = compressed(tmp_path)
    for loader in (
        DataLoader(packed, BATCH, sampler=RandomSampler(packed)),
        DataLoader(packed, batch_sampler=h5pack.ChunkBatchSampler(packed, BATCH, shuffle="full")),
        DataLoader(Subset(packed, range(20)), BATCH, shuffle=True),
        h5pack.H5Loader(packed, BATCH, shuffle="full"),
    ):
        assert evidence(loader).full_shuffle
        assert evidence(loader).encoding is Encoding.CHUNKS
    for loader in (
        DataLoader(packed, batch_sampler=h5pack.ChunkBatchSampler(packed, BATCH)),
        h5pack.H5Loader(packed, BATCH),
    ):
        assert not evidence(loader).full_shuffle


def test_rows_that_the_hdf5_library_reads_have_a_reason(dataset: h5pack.H5Dataset) -> None:
    index = dataset.engine.indexes["images"]
    dataset.engine.indexes["images"] = replace(index, library_reason="its filter is unknown")
    found = evidence(h5pack.H5Loader(dataset, BATCH)).library_reason
    assert found == f"{dataset.path}: its filter is unknown"


def test_datasets_below_subsets_and_concatenations_are_found(dataset: h5pack.H5Dataset) -> None:
    assert base_datasets(Subset(Subset(dataset, range(9)), range(5))) == [dataset]
    assert base_datasets(h5pack.ConcatPack([dataset, dataset])) == [dataset, dataset]


def test_a_warning_has_the_stall_the_loader_the_bottleneck_and_the_first_advice(
    dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "available_cpus", lambda: 8)
    layers = layers_of(DeviceFeed(DataLoader(dataset, BATCH, num_workers=2), "cpu"))
    text = stall_text(layers, report(children_cpu_percent=190.0))
    assert all(part in text for part in ("50 %", "1.0 s", "DataLoader", "the loader", "num_workers to 8"))
