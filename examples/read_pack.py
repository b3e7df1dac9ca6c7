"""Read a pack through H5Loader, then through a DataLoader: ``python examples/read_pack.py FILE``."""

import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

import h5pack
from h5pack.errors import SizesDifferError

CROP = h5pack.RandomResizedCrop(224)
BATCH, WORKERS = 64, 2
EPOCHS, SECONDS = 6, 5.0  # at most; two epochs are read even if they take longer


def read(name: str, dataset: h5pack.H5Dataset, batches: Iterable[Any]) -> None:
    """Read some epochs, and print the median speed of all but the first one, and the last batch."""
    times: list[float] = []
    while len(times) < 2 or (len(times) < EPOCHS and sum(times) < SECONDS):
        begin, count, labels_seen = time.perf_counter(), 0, set()
        for batch in batches:
            count += len(batch.images)
            if "labels" in batch._fields and batch.labels.ndim == 1:
                labels_seen.update(batch.labels.tolist())
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[1:])
    print(f"{name}: {count:,} images in {1000 * seconds:,.1f} ms, {count / seconds:,.0f} images/s")
    mean = batch.images.to(torch.float32).mean() / 255
    print(f"  last batch {tuple(batch.images.shape)} {batch.images.dtype}, mean {mean:.3f}")
    if dataset.classes:
        print(f"  labels of {len(labels_seen)} of {len(dataset.classes)} classes: {', '.join(dataset.classes[:8])}")


def read_both_ways(dataset: h5pack.H5Dataset) -> None:
    """Read epochs through an H5Loader, then through a DataLoader."""
    print(dataset)
    print("an epoch of each after the first, in which the file comes into memory and workers start")
    with h5pack.H5Loader(dataset, BATCH) as loader:
        read("H5Loader", dataset, loader)
    sampler = h5pack.ChunkBatchSampler(dataset, BATCH)
    settings = {"num_workers": WORKERS, "persistent_workers": True}
    read(f"DataLoader with {WORKERS} workers", dataset, DataLoader(dataset, batch_sampler=sampler, **settings))


def main() -> None:
    try:
        read_both_ways(h5pack.H5Dataset(sys.argv[1]))
    except SizesDifferError:
        print(f"the images, kept as files, differ in size: reading {CROP} of each")
        read_both_ways(h5pack.H5Dataset(sys.argv[1], decode=CROP))


if __name__ == "__main__":
    main()
