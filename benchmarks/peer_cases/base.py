"""What all cases of the comparison share: the source folder, the interface, a DataLoader, and the list of cases."""

from __future__ import annotations

import importlib
import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

_BLOCK = 64


def decode(path: Path) -> npt.NDArray[np.uint8]:
    """An image by Pillow, uint8 (H, W, 3)."""
    with Image.open(path) as opened:
        return np.array(opened.convert("RGB"))


def decode_quickly(path: Path) -> npt.NDArray[np.uint8]:
    """An image by simplejpeg, or by Pillow where that is missing: the same pixels, uint8 (H, W, 3).

    h5pack decodes so. With a slower decoder of their own the peers' conversions would measure decoders, not formats.
    """
    try:
        from simplejpeg import decode_jpeg
    except ImportError:
        return decode(path)
    image: npt.NDArray[np.uint8] = decode_jpeg(path.read_bytes(), colorspace="RGB")
    return image


class ImageFolder:
    """Images in class folders; a map-style dataset of decoded images and labels, as FFCV's writer wants one.

    All images are JPEGs of one size. A label is the place of the class's name among the sorted names.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        found = [(path, label) for label, name in enumerate(classes) for path in sorted(name.glob("*.jpg"))]
        self.paths = [path for path, _ in found]
        self.labels = np.array([label for _, label in found], np.int64)
        self.shape = decode(self.paths[0]).shape

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        return decode_quickly(self.paths[index]), int(self.labels[index])

    def decoded(self, workers: int) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
        """All images in order, decoded by `workers` processes, for writers that have no workers of their own.

        Yield up to 64 images, uint8 (n, H, W, 3), and their labels, int64 (n,).
        """
        blocks = [range(start, min(len(self), start + _BLOCK)) for start in range(0, len(self), _BLOCK)]
        with multiprocessing.Pool(workers) as pool:
            decoded = pool.imap(_decode_all, [[self.paths[index] for index in block] for block in blocks])
            for block, images in zip(blocks, decoded, strict=True):
                yield images, self.labels[block.start : block.stop]


def _decode_all(paths: list[Path]) -> npt.NDArray[np.uint8]:
    return np.stack([decode_quickly(path) for path in paths])


Batch = tuple[Any, Any]


@dataclass(frozen=True)
class Reading:
    """How every case reads."""

    batch: int  # Images a batch; the last one of an epoch may be smaller.
    workers: int  # Threads, or worker processes where it has those; 0: in this process.
    seed: int  # Of the order, where it takes one.


class Opened(Protocol):
    """A dataset that is open."""

    def epoch(self) -> Generator[Batch, None, None]:
        """The batches of the next epoch: images uint8 (n, H, W, 3) or (n, 3, H, W), labels (n,); arrays or tensors.

        A batch is consumed before the next one is requested. The caller may stop early and close the iterator.
        """

    def close(self) -> None:
        """Stop its threads and processes."""


class Case(ABC):
    """A format of images, and a loader that reads them back as shuffled batches."""

    settings: str  # How it is used, and why so: one line for the result file.
    packages: tuple[str, ...]  # The distributions whose versions the result names.
    # Numbers of workers of which the fastest is taken, where its documentation leaves the number open.
    tried: tuple[int, ...] = ()
    # It compiles at the first batch of each opening; a cold epoch is then the second one, after another drop.
    compiles = False
    # An epoch may be left early without harm to the next one: a DataLoader's may. Others go on reading what was left,
    # or do not keep rows of which they saw a part only.
    may_be_cut = False
    # What "workers" are to it: threads, processes, or nothing: it reads in the calling thread.
    parallel = "processes"

    @abstractmethod
    def convert(self, source: ImageFolder, out: Path, workers: int) -> int:
        """Store all images and labels in the folder `out`; returns how many processes or threads decoded."""

    def describe(self, workers: int) -> str:
        """How many threads or processes read, in words."""
        if self.parallel == "nothing" or not workers:
            return "1 thread"
        return f"{workers} {self.parallel}"

    @abstractmethod
    def open(self, out: Path, reading: Reading) -> Opened:
        """Open what `convert` stored."""


class OpenedLoader:
    """Goes through a DataLoader, or what is used like one, an epoch at a time.

    Batches are (images, labels), or dicts of "image" and "label".
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def epoch(self) -> Generator[Batch, None, None]:
        """Its next epoch."""
        for batch in self.loader:
            yield (batch["image"], batch["label"]) if isinstance(batch, dict) else (batch[0], batch[1])

    def close(self) -> None:
        """Let go of it; workers that stay end with its iterator."""
        self.loader = None


def shuffling(dataset: Dataset[Any], reading: Reading) -> OpenedLoader:
    """What torch's documentation has for a map-style dataset: shuffle=True, workers, here ones that stay.

    Workers that stay save their start in every epoch, as the documentation of persistent_workers says.
    """
    return OpenedLoader(
        DataLoader(
            dataset,
            reading.batch,
            shuffle=True,
            num_workers=reading.workers,
            persistent_workers=True,
            generator=torch.Generator().manual_seed(reading.seed),
        )
    )


@dataclass(frozen=True)
class Listed:
    """A case's place in the comparison."""

    key: str  # What ``--only`` calls it.
    name: str  # What tables and plots call it.
    module: str  # The module of `benchmarks.peer_cases` that has it; importing that imports the peer.
    store: str  # The folder of what it converts to. Cases of one store share it, and the first one converts.
    ours: bool = False  # h5pack's.

    def load(self) -> Case:
        """The case itself. Raises ImportError if the peer is not installed, or does not load."""
        case: Case = importlib.import_module(f"benchmarks.peer_cases.{self.module}").CASES[self.key]
        return case


LISTING = (
    Listed("h5loader", "H5Loader", "h5pack_case", "pack", ours=True),
    Listed("h5dataset", "H5Dataset + DataLoader", "h5pack_case", "pack", ours=True),
    Listed("ffcv", "FFCV", "ffcv_case", "ffcv"),
    Listed("webdataset", "WebDataset", "webdataset_case", "webdataset"),
    Listed("mosaic", "MosaicML Streaming", "mosaic_case", "mosaic"),
    Listed("litdata", "LitData", "litdata_case", "litdata"),
    Listed("lmdb", "LMDB", "lmdb_case", "lmdb"),
    Listed("dali", "DALI on the CPU", "dali_case", "dali"),
    Listed("tensorstore", "tensorstore (zarr3)", "tensorstore_case", "tensorstore"),
    Listed("memmap", "np.memmap", "memmap_case", "memmap"),
    Listed("h5py", "h5py (whole-image chunks)", "h5py_case", "h5py"),
    Listed("h5py-auto", "h5py (guessed chunks)", "h5py_case", "h5py-auto"),
    Listed("h5py-recipe", "h5py (chunks that cut images)", "h5py_case", "h5py-recipe"),
    Listed("jpeg", "JPEG folder + Pillow", "jpeg_case", "jpeg"),
)


def chosen(keys: str | None) -> tuple[Listed, ...]:
    """The cases that ``--only`` names, in the order of the listing; all without it. ValueError for other names."""
    if keys is None:
        return LISTING
    wanted = [key.strip() for key in keys.split(",") if key.strip()]
    known = [listed.key for listed in LISTING]
    if unknown := sorted(set(wanted) - set(known)):
        raise ValueError(f"--only: no case is called {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(listed for listed in LISTING if listed.key in wanted)
