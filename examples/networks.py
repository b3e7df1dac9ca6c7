"""The networks of the training examples: a small CNN and two ResNets, for images (N, C, H, W) of any size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

MODELS = {"cnn": (), "resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "sync": nn.SyncBatchNorm,  # The statistics of all ranks together; GPUs only.
    "group": lambda channels: nn.GroupNorm(8, channels),  # Independent of the batch, so of the number of ranks.
}


class Block(nn.Module):
    """A residual block: two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1."""

    def __init__(self, before: int, width: int, stride: int, bottleneck: bool, norm: Callable[[int], nn.Module]):
        super().__init__()
        after = 4 * width if bottleneck else width
        narrow = [(before, width, 1, 1), (width, width, 3, stride), (width, after, 1, 1)]
        shapes = narrow if bottleneck else [(before, width, 3, stride), (width, width, 3, 1)]
        self.body = nn.Sequential(*(convolution(*shape, norm) for shape in shapes))
        del self.body[-1][-1]  # The last ReLU follows the sum.
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else convolution(before, after, 1, stride, norm)[:2]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(images) + self.shortcut(images))


def convolution(before: int, after: int, size: int, stride: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """A convolution, a normalization and a ReLU."""
    return nn.Sequential(nn.Conv2d(before, after, size, stride, size // 2, bias=False), norm(after), nn.ReLU())


class Network(nn.Module):
    """A stem, stages of which most halve the image, and a linear head.

    Parameters
    ----------
    model, norm : str
        Keys of `MODELS` and `NORMS`.
    channels, classes : int
    small : bool
        For images of about 32 pixels: do not reduce them to a quarter before the first stage.
    dropout : float
        Share of the features that the head drops in training.
    recompute : bool
        Recompute activations for the gradient: less memory, a third more work. Batch normalization then counts each
        batch twice in its running statistics.
    """

    def __init__(
        self,
        model: str,
        channels: int,
        classes: int,
        *,
        small: bool,
        norm: str = "batch",
        dropout: float = 0.0,
        recompute: bool = False,
    ):
        super().__init__()
        normal, bottleneck = NORMS[norm], model == "resnet50"
        width = 32 if model == "cnn" else 64
        self.stem = convolution(channels, width, 3, 1, normal) if small else convolution(channels, width, 7, 2, normal)
        if not small:
            self.stem.append(nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList()
        if model == "cnn":
            for width in (64, 128, 256):
                self.stages.append(convolution(width // 2, width, 3, 2, normal))
        for stage, depth in enumerate(MODELS[model]):
            blocks = []
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(Block(width, 64 << stage, stride, bottleneck, normal))
                width = (64 << stage) * (4 if bottleneck else 1)
            self.stages.append(nn.Sequential(*blocks))
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, classes))
        self.recompute = recompute

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of the classes, (N, classes), of images (N, C, H, W)."""
        images = self.stem(images)
        for stage in self.stages:
            again = self.recompute and torch.is_grad_enabled()
            images = checkpoint(stage, images, use_reentrant=False) if again else stage(images)
        return self.head(images.mean((2, 3)))
