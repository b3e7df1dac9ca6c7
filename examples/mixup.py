"""MixUp and CutMix of whole batches on the device: ``python examples/mixup.py PACK [mixup|cutmix]``."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from epochs import train_epochs
from networks import Network
from torch.nn import functional as F

import h5pack
from h5pack.data.draws import BatchKey
from h5pack.device.transforms import uniform

BATCH, EPOCHS = 64, 5


class MixUp:
    """Blend each image, and its label, with the previous one of the batch (Zhang et al. 2018, arXiv:1710.09412).

    Parameters
    ----------
    classes : int
        The labels become probabilities of these classes: float32, (N, classes).
    alpha : float
        The share of an image is drawn from Beta(alpha, alpha), separately for each sample.
    seed : int
    """

    keyed = True  # Called with a BatchKey,
    whole_batch = True  # and with the batch instead of its images.

    def __init__(self, classes: int, alpha: float = 0.2, seed: int = 0):
        self.classes, self.seed = classes, seed
        self.quantiles = beta_quantiles(alpha)

    def __call__(self, batch: Any, key: BatchKey) -> Any:
        images, labels = floats(batch), batch.labels
        share = self.shares(uniform(key, self.seed, 1)[:, 0])
        images = torch.lerp(images.roll(1, 0), images, share.reshape(-1, 1, 1, 1).to(images.dtype))
        return batch._replace(images=images, labels=self.soft(labels, share))

    def shares(self, draws: torch.Tensor) -> torch.Tensor:
        """Turn uniform random numbers into shares, both float32, (N,)."""
        self.quantiles = self.quantiles.to(draws.device)
        return self.quantiles[(draws * len(self.quantiles)).long()]

    def soft(self, labels: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of the classes for images with this share of their own: float32, (N, classes)."""
        known = F.one_hot(labels, self.classes).float()
        return torch.lerp(known.roll(1, 0), known, share[:, None])


class CutMix(MixUp):
    """Replace a box of each image with that of the previous image (Yun et al. 2019, arXiv:1905.04899)."""

    def __call__(self, batch: Any, key: BatchKey) -> Any:
        images, labels = floats(batch), batch.labels
        height, width = images.shape[2:]
        draws = uniform(key, self.seed, 3)
        side = (1 - self.shares(draws[:, 0])).sqrt()
        rows = inside(draws[:, 1], side, height)
        columns = inside(draws[:, 2], side, width)
        box = rows[:, :, None] & columns[:, None, :]
        share = 1 - box.float().mean((1, 2))
        images = torch.where(box[:, None], images.roll(1, 0), images)
        return batch._replace(images=images, labels=self.soft(labels, share))


def floats(batch: Any) -> torch.Tensor:
    """Return the images of a batch, (N, C, H, W). Those of a loader are uint8, mostly with the channels last."""
    if not batch.images.is_floating_point():
        raise TypeError(f"the images are {batch.images.dtype}; put Normalize before this transform")
    return batch.images


def inside(center: torch.Tensor, side: torch.Tensor, length: int) -> torch.Tensor:
    """Return which of `length` pixels are inside of a box, whose center and side are fractions: bool, (N, length)."""
    pixels = (torch.arange(length, device=side.device) + 0.5) / length
    return (pixels - center[:, None]).abs() < side[:, None] / 2


def beta_quantiles(alpha: float, steps: int = 4096) -> torch.Tensor:
    """Return the quantiles of Beta(alpha, alpha) at the middles of equal steps: float32, (steps,)."""
    # With t = x ** alpha, the density of the lower half is proportional to (1 - x) ** (alpha - 1), which is smooth.
    t = np.linspace(0, 0.5**alpha, 20_001)
    density = (1 - t ** (1 / alpha)) ** (alpha - 1)
    below = np.append(0, np.cumsum(density[1:] + density[:-1]))
    middles = (np.arange(steps // 2) + 0.5) / (steps // 2)
    lower = np.interp(middles, below / below[-1], t) ** (1 / alpha)
    return torch.from_numpy(np.append(lower, 1 - lower[::-1])).float()


def train(path: str, kind: str = "mixup", epochs: int = EPOCHS) -> list[float]:
    """Train a small network on a pack; return the mean loss of each epoch."""
    torch.manual_seed(0)
    dataset = h5pack.H5Dataset(path, with_rows=True)
    classes = len(dataset.classes or ())
    mix: Any = {"mixup": MixUp(classes), "cutmix": CutMix(classes, alpha=1.0)}[kind]
    normalize = h5pack.Normalize.from_dataset(dataset, flip=0.5, crop=2)
    feed = h5pack.DeviceFeed(h5pack.H5Loader(dataset, BATCH), transform=[normalize, mix])
    network = Network("cnn", len(normalize.mean), classes, small=True).to(feed.device)
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    return train_epochs(feed, optimizer, lambda batch: F.cross_entropy(network(batch[0]), batch[1]), epochs)


if __name__ == "__main__":
    train(*sys.argv[1:3])
