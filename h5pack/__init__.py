"""Pack an image folder once into ordinary chunked HDF5, then feed a GPU from it.

All public functions and classes are imported on first use, so that ``import h5pack`` takes only milliseconds::

    import h5pack

    h5pack.convert("./celebA", "out.h5")
    dataset = h5pack.H5Dataset("out.h5", split="train")

Some functions return types that ``h5pack`` does not export, such as ``BenchReport``. These types are documented
together with the functions. Import them from the modules that define them.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from h5pack.version import __version__ as __version__

if sys.platform == "win32":
    raise ImportError("h5pack does not run on Windows; install it in the Windows Subsystem for Linux (WSL)")

if TYPE_CHECKING:
    from h5pack.benchmark.bench import bench as bench
    from h5pack.combine.append import append as append
    from h5pack.combine.convert import convert as convert
    from h5pack.combine.join import join as join
    from h5pack.combine.subset import subset as subset
    from h5pack.data.concat import ConcatPack as ConcatPack
    from h5pack.data.dataset import H5Dataset as H5Dataset
    from h5pack.data.loader import H5Loader as H5Loader
    from h5pack.data.mixture import MixtureSampler as MixtureSampler
    from h5pack.data.samplers import ChunkBatchSampler as ChunkBatchSampler
    from h5pack.data.samplers import ChunkSampler as ChunkSampler
    from h5pack.device.echo import EchoLoader as EchoLoader
    from h5pack.device.feed import DeviceFeed as DeviceFeed
    from h5pack.device.normalize import Normalize as Normalize
    from h5pack.device.transforms import Views as Views
    from h5pack.doctor.diagnose import diagnose as diagnose
    from h5pack.errors import DamagedRowsError as DamagedRowsError
    from h5pack.errors import H5PackError as H5PackError
    from h5pack.errors import IncompletePackError as IncompletePackError
    from h5pack.errors import LoaderError as LoaderError
    from h5pack.errors import NoImagesError as NoImagesError
    from h5pack.errors import NoSpaceError as NoSpaceError
    from h5pack.errors import OptionsError as OptionsError
    from h5pack.errors import OutputBusyError as OutputBusyError
    from h5pack.errors import OutputExistsError as OutputExistsError
    from h5pack.errors import PackChangedError as PackChangedError
    from h5pack.errors import PackFormatError as PackFormatError
    from h5pack.errors import ReadError as ReadError
    from h5pack.errors import RejectedImageError as RejectedImageError
    from h5pack.errors import ResumeError as ResumeError
    from h5pack.errors import SizesDifferError as SizesDifferError
    from h5pack.errors import SourceError as SourceError
    from h5pack.errors import StateError as StateError
    from h5pack.errors import WorkerError as WorkerError
    from h5pack.exporter.exporter import export as export
    from h5pack.images.crops import CenterCrop as CenterCrop
    from h5pack.images.crops import RandomCrop as RandomCrop
    from h5pack.images.crops import RandomResizedCrop as RandomResizedCrop
    from h5pack.images.crops import Resize as Resize
    from h5pack.inspect.info import info as info
    from h5pack.inspect.preview import preview as preview
    from h5pack.inspect.verify import verify as verify
    from h5pack.monitor.monitor import FeedMonitor as FeedMonitor

_NAMES_OF_MODULES = {
    "h5pack.benchmark.bench": "bench",
    "h5pack.combine.append": "append",
    "h5pack.combine.convert": "convert",
    "h5pack.combine.join": "join",
    "h5pack.combine.subset": "subset",
    "h5pack.data.concat": "ConcatPack",
    "h5pack.data.dataset": "H5Dataset",
    "h5pack.data.loader": "H5Loader",
    "h5pack.data.mixture": "MixtureSampler",
    "h5pack.data.samplers": "ChunkBatchSampler ChunkSampler",
    "h5pack.images.crops": "CenterCrop RandomCrop RandomResizedCrop Resize",
    "h5pack.device.echo": "EchoLoader",
    "h5pack.device.feed": "DeviceFeed",
    "h5pack.device.normalize": "Normalize",
    "h5pack.device.transforms": "Views",
    "h5pack.doctor.diagnose": "diagnose",
    "h5pack.errors": "DamagedRowsError H5PackError IncompletePackError LoaderError NoImagesError NoSpaceError "
    "OptionsError OutputBusyError OutputExistsError PackChangedError PackFormatError ReadError RejectedImageError "
    "ResumeError SizesDifferError SourceError StateError WorkerError",
    "h5pack.exporter.exporter": "export",
    "h5pack.inspect.info": "info",
    "h5pack.inspect.preview": "preview",
    "h5pack.inspect.verify": "verify",
    "h5pack.monitor.monitor": "FeedMonitor",
    "h5pack.version": "__version__",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF_MODULES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'h5pack' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
