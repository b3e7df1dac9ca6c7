"""Pack an image folder once into ordinary chunked HDF5, then feed a GPU from it.

Everything public is imported on first use, so that ``import h5pack`` costs milliseconds::

    import h5pack

    h5pack.convert("./celebA", "out.h5")
    dataset = h5pack.H5Dataset("out.h5", split="train")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from h5pack.version import __version__

if TYPE_CHECKING:
    from h5pack.errors import (
        DamagedRowsError,
        H5PackError,
        IncompletePackError,
        LoaderError,
        NoImagesError,
        NoSpaceError,
        OptionsError,
        OutputBusyError,
        OutputExistsError,
        PackChangedError,
        PackFormatError,
        ReadError,
        RejectedImageError,
        ResumeError,
        SizesDifferError,
        SourceError,
        StateError,
        WorkerError,
    )
    from h5pack.feed.batch_key import BatchKey
    from h5pack.feed.concat_pack import ConcatPack
    from h5pack.feed.dataset import H5Dataset
    from h5pack.feed.device_feed import DeviceFeed
    from h5pack.feed.echo_loader import EchoLoader
    from h5pack.feed.feed_monitor import FeedMonitor
    from h5pack.feed.feed_report import FeedReport
    from h5pack.feed.gpu_status import GpuStatus
    from h5pack.feed.loader import H5Loader
    from h5pack.feed.mixing import MixingReport, mixing_report
    from h5pack.feed.mixture import MixtureSampler
    from h5pack.feed.normalize import Normalize
    from h5pack.feed.profile import LoaderProfile
    from h5pack.feed.samplers import ChunkBatchSampler, ChunkSampler
    from h5pack.layout import CachePlan, ChunkPlan, plan_cache, plan_chunks
    from h5pack.pack.converter import Conversion, ConvertReport, convert
    from h5pack.pack.options import ConvertOptions
    from h5pack.read.stats import ReadStats
    from h5pack.tools.export_options import ExportOptions
    from h5pack.tools.export_report import ExportReport
    from h5pack.tools.exporter import export
    from h5pack.tools.info import FileReport, info
    from h5pack.tools.preview import PreviewOptions, preview
    from h5pack.tools.preview_report import PreviewReport
    from h5pack.tools.verify import VerifyReport, verify

_HOMES = {
    "BatchKey": "h5pack.feed.batch_key",
    "CachePlan": "h5pack.layout",
    "ChunkBatchSampler": "h5pack.feed.samplers",
    "ChunkPlan": "h5pack.layout",
    "ChunkSampler": "h5pack.feed.samplers",
    "ConcatPack": "h5pack.feed.concat_pack",
    "Conversion": "h5pack.pack.converter",
    "ConvertOptions": "h5pack.pack.options",
    "ConvertReport": "h5pack.pack.converter",
    "DamagedRowsError": "h5pack.errors",
    "DeviceFeed": "h5pack.feed.device_feed",
    "EchoLoader": "h5pack.feed.echo_loader",
    "ExportOptions": "h5pack.tools.export_options",
    "ExportReport": "h5pack.tools.export_report",
    "FeedMonitor": "h5pack.feed.feed_monitor",
    "FeedReport": "h5pack.feed.feed_report",
    "FileReport": "h5pack.tools.info",
    "GpuStatus": "h5pack.feed.gpu_status",
    "H5Dataset": "h5pack.feed.dataset",
    "H5Loader": "h5pack.feed.loader",
    "H5PackError": "h5pack.errors",
    "IncompletePackError": "h5pack.errors",
    "LoaderError": "h5pack.errors",
    "LoaderProfile": "h5pack.feed.profile",
    "MixingReport": "h5pack.feed.mixing",
    "MixtureSampler": "h5pack.feed.mixture",
    "NoImagesError": "h5pack.errors",
    "NoSpaceError": "h5pack.errors",
    "Normalize": "h5pack.feed.normalize",
    "OptionsError": "h5pack.errors",
    "OutputBusyError": "h5pack.errors",
    "OutputExistsError": "h5pack.errors",
    "PackChangedError": "h5pack.errors",
    "PackFormatError": "h5pack.errors",
    "PreviewOptions": "h5pack.tools.preview",
    "PreviewReport": "h5pack.tools.preview_report",
    "ReadError": "h5pack.errors",
    "ReadStats": "h5pack.read.stats",
    "RejectedImageError": "h5pack.errors",
    "ResumeError": "h5pack.errors",
    "SizesDifferError": "h5pack.errors",
    "SourceError": "h5pack.errors",
    "StateError": "h5pack.errors",
    "VerifyReport": "h5pack.tools.verify",
    "WorkerError": "h5pack.errors",
    "convert": "h5pack.pack.converter",
    "export": "h5pack.tools.exporter",
    "info": "h5pack.tools.info",
    "mixing_report": "h5pack.feed.mixing",
    "plan_cache": "h5pack.layout",
    "plan_chunks": "h5pack.layout",
    "preview": "h5pack.tools.preview",
    "verify": "h5pack.tools.verify",
}

__all__ = [
    "BatchKey",
    "CachePlan",
    "ChunkBatchSampler",
    "ChunkPlan",
    "ChunkSampler",
    "ConcatPack",
    "Conversion",
    "ConvertOptions",
    "ConvertReport",
    "DamagedRowsError",
    "DeviceFeed",
    "EchoLoader",
    "ExportOptions",
    "ExportReport",
    "FeedMonitor",
    "FeedReport",
    "FileReport",
    "GpuStatus",
    "H5Dataset",
    "H5Loader",
    "H5PackError",
    "IncompletePackError",
    "LoaderError",
    "LoaderProfile",
    "MixingReport",
    "MixtureSampler",
    "NoImagesError",
    "NoSpaceError",
    "Normalize",
    "OptionsError",
    "OutputBusyError",
    "OutputExistsError",
    "PackChangedError",
    "PackFormatError",
    "PreviewOptions",
    "PreviewReport",
    "ReadError",
    "ReadStats",
    "RejectedImageError",
    "ResumeError",
    "SizesDifferError",
    "SourceError",
    "StateError",
    "VerifyReport",
    "WorkerError",
    "__version__",
    "convert",
    "export",
    "info",
    "mixing_report",
    "plan_cache",
    "plan_chunks",
    "preview",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'h5pack' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
