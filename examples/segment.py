"""Segmentation with masks that move with their images: ``python examples/segment.py FILE``.

FILE is an HDF5 file with the datasets "images", uint8 (N, H, W, 3), and "masks", uint8 (N, H, W): the class of each
pixel. If FILE does not exist, it is made: discs of random places and colors on noise.
"""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
import torch
from epochs import train_epochs
from torch import nn
from torch.nn import functional as F

import h5pack

BATCH, EPOCHS, CLASSES = 16, 5, 2


def draw_discs(path: Path, count: int = 256, size: int = 32) -> None:
    """Write a file of images and masks: class 1 is the disc."""
    random = np.random.default_rng(0)
    images = random.integers(0, 128, (count, size, size, 3), np.uint8)
    y, x = np.mgrid[:size, :size] + 0.5
    centres, radii = random.uniform(0.25 * size, 0.75 * size, (2, count, 1, 1)), size * random.uniform(0.1, 0.25, count)
    masks = (y - centres[0]) ** 2 + (x - centres[1]) ** 2 < radii[:, None, None] ** 2
    images[masks] += random.integers(32, 128, (count, 3), np.uint8)[np.nonzero(masks)[0]]
    with h5py.File(path, "w") as file:
        file["images"], file["masks"] = images, masks.astype(np.uint8)


def train(path: Path, epochs: int = EPOCHS) -> list[float]:
    """Train a small network; return the mean loss of each epoch."""
    torch.manual_seed(0)
    dataset = h5pack.H5Dataset(path, labels=None, fields=["masks"], with_rows=True)
    # The masks are flipped and cropped by the same random numbers as the images. Outside of an image they are 0.
    normalize = h5pack.Normalize(flip=0.5, crop=4, fields={"masks": "mask"})
    feed = h5pack.DeviceFeed(h5pack.H5Loader(dataset, BATCH), transform=normalize)
    network = nn.Sequential(nn.Conv2d(3, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, CLASSES, 5, padding=2))
    network = network.to(feed.device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    return train_epochs(
        feed, optimizer, lambda batch: F.cross_entropy(network(batch.images), batch.masks.long()), epochs
    )


if __name__ == "__main__":
    file = Path(sys.argv[1])
    if not file.exists():
        draw_discs(file)
    train(file)
