"""Contrastive learning from two views of each image (SimCLR): ``python examples/two_views.py PACK``.

Chen et al. 2020, arXiv:2002.05709. Two views of an image shall be nearer to each other than to views of other images.
"""

from __future__ import annotations

import sys

import torch
from epochs import train_epochs
from networks import Network
from torch.nn import functional as F

import h5pack
from h5pack.device.augment import ColorJitter

BATCH, EPOCHS, FEATURES, TEMPERATURE = 64, 5, 64, 0.5


def contrastive_loss(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the loss NT-Xent of the features of two views, (N, F) each."""
    features = F.normalize(torch.cat([first, second]), dim=1)
    likeness = features @ features.T / TEMPERATURE
    likeness.fill_diagonal_(-torch.inf)
    # Row i of the first view belongs to row i of the second, and the other way round.
    return F.cross_entropy(likeness, torch.arange(len(features), device=features.device).roll(len(first)))


def train(path: str, epochs: int = EPOCHS) -> list[float]:
    """Train a small network on a pack without its labels; return the mean loss of each epoch."""
    torch.manual_seed(0)
    dataset = h5pack.H5Dataset(path, labels=None, with_rows=True)
    size = dataset[0].image.shape[:2]
    crop, color = h5pack.RandomResizedCrop(size, scale=(0.3, 1)), ColorJitter(0.4, 0.4, 0.4, 0.1, grayscale=0.2)
    augment = h5pack.Normalize.from_dataset(dataset, flip=0.5, crop=crop, color=color)
    # The same transform for both views: each view has random numbers of its own.
    views = h5pack.Views(augment, augment)
    loader = h5pack.H5Loader(dataset, min(BATCH, len(dataset)), drop_last=True)
    feed = h5pack.DeviceFeed(loader, transform=views)
    network = Network("cnn", len(augment.mean), FEATURES, small=True).to(feed.device)
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    return train_epochs(feed, optimizer, lambda batch: contrastive_loss(*map(network, batch[0])), epochs)


if __name__ == "__main__":
    train(sys.argv[1])
