"""MosaicML Streaming, with stand-ins for torchvision where torchvision does not load.

Streaming takes a base class and a function of torchvision for its ready-made vision sets, which are not used here.
torchvision's wheel of the package index does not load beside a torch without CUDA; one that loads is left alone.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from types import ModuleType

# These look for torchvision, too, and must not find what stands in for it.
import transformers.feature_extraction_utils
import transformers.tokenization_utils_base  # noqa: F401

from benchmarks.peer_cases.base import Case, ImageFolder, Opened, OpenedLoader, Reading

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


def _write_part(source: ImageFolder, part: Path, rows: range) -> None:
    height, width, channels = source.shape
    columns = {"image": f"ndarray:uint8:{height},{width},{channels}", "label": "int"}
    with MDSWriter(out=str(part), columns=columns) as writer:
        for row in rows:
            image, label = source[row]
            writer.write({"image": image, "label": label})


class MosaicCase(Case):
    """MDS shards of arrays."""

    settings = (
        "MDS, columns ndarray:uint8:H,W,3 and int, no compression; StreamingDataset(shuffle=True, batch_size=256) with "
        "its default py1e shuffle, in a StreamingDataLoader."
    )
    packages = ("mosaicml-streaming", "torch")
    tried = (2, 0)

    def convert(self, source: ImageFolder, out: Path, workers: int) -> int:
        """A process for each part, then merge_index, as its guide to parallel conversion has it."""
        cuts = [len(source) * worker // workers for worker in range(workers + 1)]
        jobs = [(source, out / f"{part:05d}", range(cuts[part], cuts[part + 1])) for part in range(workers)]
        with multiprocessing.Pool(workers) as pool:
            pool.starmap(_write_part, jobs)
        merge_index(str(out), keep_local=True)
        return workers

    def open(self, out: Path, reading: Reading) -> Opened:
        """The dataset where it lies: nothing is copied to a cache."""
        dataset = StreamingDataset(
            local=str(out), shuffle=True, batch_size=reading.batch, shuffle_seed=9176 + reading.seed
        )
        return OpenedLoader(
            StreamingDataLoader(
                dataset, batch_size=reading.batch, num_workers=reading.workers, persistent_workers=reading.workers > 0
            )
        )


CASES = {"mosaic": MosaicCase()}
