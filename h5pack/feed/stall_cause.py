"""Why a step waits for its batches, most likely, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from h5pack.feed.cpu_time import BUSY
from h5pack.feed.feed_report import FeedReport
from h5pack.feed.loader import H5Loader
from h5pack.feed.loader_layers import base_datasets, samplers_of
from h5pack.machine import available_cpus


@dataclass(frozen=True)
class Evidence:
    """What is known of a stall.

    Attributes
    ----------
    layers : list
        The loader, and those inside of it.
    report : FeedReport
        Of the interval.
    transform_seconds : float or None
        Of `report.wait_seconds`, those that a transform took in the step's own thread.
    cpus : int
        That this process may use.
    """

    layers: list[Any]
    report: FeedReport
    transform_seconds: float | None = None
    cpus: int = 1

    @classmethod
    def of(cls, layers: list[Any], report: FeedReport, transform_seconds: float | None = None) -> Evidence:
        """With the CPUs of this machine."""
        return cls(layers, report, transform_seconds, available_cpus())


def likely_cause(evidence: Evidence) -> str:
    """The likeliest cause and its cure, as one line without a full stop."""
    report, loader = evidence.report, evidence.layers[-1]
    if evidence.transform_seconds is not None and evidence.transform_seconds > 0.5 * report.wait_seconds:
        part = 100 * min(1.0, evidence.transform_seconds / max(report.wait_seconds, 1e-9))
        return (
            f"its transform takes {part:.0f} % of that time; have it run on a GPU (DeviceFeed(loader, 'cuda', "
            "transform=...)), or make it cheaper"
        )
    if report.wait_seconds < 0.5 * report.stall_seconds:
        return (
            "the copy to the device, or the transform there, takes longer than the step; copy uint8 from pinned memory "
            "(pin_memory=True), and make floats on the device (DeviceFeed(..., transform=Normalize(...)))"
        )
    if isinstance(loader, DataLoader) and loader.num_workers == 0:
        return (
            "a DataLoader with num_workers=0 reads and decodes while the step waits; give it num_workers, or take "
            "H5Loader instead"
        )
    slow = _slow_file(loader, base_datasets(evidence.layers))
    if slow is not None:
        return slow
    if isinstance(loader, DataLoader):
        return _of_workers(loader, evidence)
    if isinstance(loader, H5Loader):
        return _of_threads(loader, evidence)
    return (
        f"a {type(loader).__name__} gives batches more slowly than the step takes them; have it read ahead by workers "
        "of a DataLoader, or pack its images (h5pack convert) and take H5Loader"
    )


def _slow_file(loader: Any, datasets: list[Any]) -> str | None:
    """What is slow about the files, and the order in which they are read."""
    full = any(_is_full(order) for order in (loader, *samplers_of(loader)))
    for dataset in datasets:
        indexes = getattr(getattr(dataset, "engine", None), "indexes", {})
        for name in getattr(dataset, "names", ()):
            index = indexes.get(name)
            if index is None:
                continue
            if index.reason is not None:
                return (
                    f"{dataset.path}: {name!r} is read through the HDF5 library, which is slow ({index.reason}); "
                    "'h5pack convert' makes a file that is read directly"
                )
            if full and index.codec is not None:
                return (
                    f"{dataset.path}: {name!r} is compressed, and rows in an order without regard to chunks have each "
                    "chunk decoded many times; shuffle by windows of chunks (H5Loader or ChunkBatchSampler with "
                    "shuffle='window')"
                )
    return None


def _is_full(order: Any) -> bool:
    """Whether rows come one by one from anywhere."""
    return isinstance(order, RandomSampler) or getattr(getattr(order, "plan", None), "shuffle", "") == "full"


def _of_workers(loader: DataLoader[Any], evidence: Evidence) -> str:
    used, workers = evidence.report.children_cpu_percent, loader.num_workers
    if used is None:
        return f"its {workers} workers do not keep up; give it more, or take H5Loader"
    most = 100 * min(workers, evidence.cpus)
    if used < BUSY * most:
        return (
            f"its {workers} workers wait themselves (CPU {used:.0f} % of {most} %), for the disk or for batches to be "
            "handed over; give it more workers or a faster disk, or take H5Loader, which hands nothing over"
        )
    more = "give it more workers, or " if evidence.cpus > workers else ""
    return (
        f"its {workers} workers are bound by decoding and transforms (CPU {used:.0f} % of {most} %); {more}decode once "
        "(h5pack convert), take H5Loader, and transform whole batches on the device (DeviceFeed)"
    )


def _of_threads(loader: H5Loader, evidence: Evidence) -> str:
    used = evidence.report.cpu_percent
    most = 100 * min(loader.threads, evidence.cpus)
    if used is None or used < BUSY * most:
        return (
            f"{base_datasets([loader])[0].path} comes more slowly from its disk than the step takes it (CPU "
            f"{'not available' if used is None else f'{used:.0f} % of {most} %'}); put it on a faster disk, keep it in "
            "memory (resident='host'), or store less (h5pack convert --size, --compress)"
        )
    more = "give it more threads, or " if evidence.cpus > loader.threads else ""
    return (
        f"its {loader.threads} threads and the step use all of the CPU (CPU {used:.0f} % of {most} %); {more}move "
        "transform= to the device (DeviceFeed), and convert without compression"
    )
