"""Segmentation from a folder of images and one of masks: ``python examples/segment.py FOLDER``.

FOLDER has the folders "images" and "masks" with files of the same names; masks have the classes 0 and 1. It is packed
into FOLDER.h5 first. If FOLDER does not exist, it is made: discs of random places and colors on noise, whose masks are
palette PNGs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from epochs import train_epochs
from PIL import Image
from torch import nn
from torch.nn import functional as F

import h5pack

BATCH, EPOCHS, SIZE, CROP, CLASSES = 16, 6, 40, 32, 2
PADDING = 255  # the class of pixels outside of an image; see docs/masks.md


def draw_discs(folder: Path, count: int = 256) -> None:
    """Write images and masks: class 1 is the disc."""
    random = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    y, x = np.mgrid[:60, :80] + 0.5
    for number in range(count):
        image = random.integers(0, 128, (60, 80, 3), np.uint8)
        center, radius = random.uniform((20, 20), (40, 60)), random.uniform(6, 15)
        disc = (y - center[0]) ** 2 + (x - center[1]) ** 2 < radius**2
        image[disc] += random.integers(32, 128, 3, np.uint8)
        Image.fromarray(image).save(folder / "images" / f"{number:04d}.jpg")
        mask = Image.fromarray(disc.astype(np.uint8))
        mask.putpalette([0, 0, 0, 255, 128, 0])
        mask.save(folder / "masks" / f"{number:04d}.png")


def train(folder: Path, epochs: int = EPOCHS) -> list[float]:
    """Pack the folder and train a small network; return the mean loss of each epoch."""
    torch.manual_seed(0)
    pack = folder.with_name(f"{folder.name}.h5")
    h5pack.convert(folder, pack, source_kind="pairs", size=SIZE, overwrite=True)
    dataset = h5pack.H5Dataset(pack, fields=["masks"], with_rows=True)
    # The masks are flipped and cropped by the same random numbers as the images.
    normalize = h5pack.Normalize(
        flip=0.5,
        crop=h5pack.RandomResizedCrop(CROP, scale=(0.5, 1)),
        mean=dataset.mean,
        std=dataset.std,
        fields={"masks": "mask"},
    )
    feed = h5pack.DeviceFeed(h5pack.H5Loader(dataset, BATCH), transform=normalize)
    network = nn.Sequential(nn.Conv2d(3, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, CLASSES, 5, padding=2))
    network = network.to(feed.device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    return train_epochs(
        feed,
        optimizer,
        lambda batch: F.cross_entropy(network(batch.images), batch.masks.long(), ignore_index=PADDING),
        epochs,
    )


if __name__ == "__main__":
    discs = Path(sys.argv[1])
    if not discs.exists():
        draw_discs(discs)
    train(discs)
