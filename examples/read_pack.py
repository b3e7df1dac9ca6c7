"""Read a pack through H5Loader, then through a DataLoader: ``python examples/read_pack.py FILE``."""

import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

import h5pack

BATCH, WORKERS = 64, 2


def read(name: str, dataset: h5pack.H5Dataset, batches: Iterable[Any]) -> None:
    """Read one epoch, and print its speed and its last batch."""
    begin, count, labels_seen = time.perf_counter(), 0, set()
    for batch in batches:
        images, labels = batch if isinstance(batch, list) else (batch, None)
        count += len(images)
        if labels is not None and labels.ndim == 1:
            labels_seen.update(labels.tolist())
    seconds = time.perf_counter() - begin
    print(f"{name}: {count:,} images in {seconds:.2f} s, {count / seconds:,.0f} images/s")
    print(f"  last batch {tuple(images.shape)} {images.dtype}, mean {images.to(torch.float32).mean() / 255:.3f}")
    if dataset.classes:
        print(f"  labels of {len(labels_seen)} of {len(dataset.classes)} classes: {', '.join(dataset.classes[:8])}")


def main() -> None:
    dataset = h5pack.H5Dataset(sys.argv[1])
    print(dataset)
    print("one epoch each, start-up included; the first may read from the disk, the second from memory")
    read("H5Loader", dataset, h5pack.H5Loader(dataset, BATCH))
    sampler = h5pack.ChunkBatchSampler(dataset, BATCH)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate, num_workers=WORKERS)
    read(f"DataLoader with {WORKERS} workers", dataset, loader)


if __name__ == "__main__":
    main()
