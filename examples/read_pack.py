"""Read a pack through a shuffled DataLoader, and say what came out: ``python examples/read_pack.py FILE``."""

import sys
import time

import torch
from torch.utils.data import DataLoader

import h5pack


def main() -> None:
    dataset = h5pack.H5Dataset(sys.argv[1])
    print(dataset)
    loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2)
    begin, images_seen, labels_seen = time.perf_counter(), 0, set()
    for batch in loader:
        images, labels = batch if isinstance(batch, list) else (batch, None)
        images_seen += len(images)
        if labels is not None and labels.ndim == 1:
            labels_seen.update(labels.tolist())
    seconds = time.perf_counter() - begin
    print(f"last batch {tuple(images.shape)} {images.dtype}, mean {images.to(torch.float32).mean() / 255:.3f}")
    if dataset.classes:
        print(f"labels of {len(labels_seen)} of {len(dataset.classes)} classes: {', '.join(dataset.classes[:8])}")
    print(f"{images_seen:,} images in {seconds:.2f} s, starting 2 workers included")


if __name__ == "__main__":
    main()
