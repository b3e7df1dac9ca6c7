"""The package of MosaicML Streaming, with something in torchvision's place where torchvision does not load.

Streaming takes a base class and a function of torchvision for its ready-made vision sets, which are not used here.
torchvision's wheel of the package index does not load beside a torch without CUDA; one that loads is left alone.
"""

from __future__ import annotations

import sys
from types import ModuleType

# These look for torchvision, too, and must not find what stands in for it.
import transformers.feature_extraction_utils
import transformers.tokenization_utils_base  # noqa: F401

_NAMES = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    modules = {name: ModuleType(name) for name in _NAMES}
    modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
    sys.modules.update(modules)

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import merge_index  # noqa: E402

__all__ = ["MDSWriter", "StreamingDataLoader", "StreamingDataset", "merge_index"]
