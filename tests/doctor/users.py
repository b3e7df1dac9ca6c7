"""What users give to a doctor: transforms, models, steps; named in tests as ``tests.doctor.users:NAME``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def cheap() -> Callable[[torch.Tensor, Any], Any]:
    """A step that costs next to nothing."""
    return lambda images, labels: images.sum()


def slow_step() -> nn.Module:
    """A model whose forward pass takes 20 ms, and which does not train."""
    return Sleeper()


class Sleeper(nn.Module):
    """Takes 20 ms a batch."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return images.flatten(1)[:, :1]


def slow_transform(images: torch.Tensor) -> torch.Tensor:
    """Takes 10 ms a batch."""
    time.sleep(0.01)
    return images


def to_float(images: torch.Tensor) -> torch.Tensor:
    """What many do on the host."""
    return images.permute(0, 3, 1, 2).float() / 255


def of_one_image(image: Any) -> torch.Tensor:
    """As torchvision's transforms: an array (H, W, C) to a tensor (C, H, W)."""
    return torch.from_numpy(image).permute(2, 0, 1).float() / 255


def failing_transform(images: torch.Tensor) -> torch.Tensor:
    """Fails."""
    raise ValueError("no such colour\nand a second line")


def failing_factory() -> nn.Module:
    """Fails."""
    raise FileNotFoundError("weights.pt is not there")


def failing_step() -> nn.Module:
    """A model for images of another size."""
    return nn.Sequential(nn.Flatten(), nn.Linear(7, 2))


class Once(nn.Module):
    """Fails, but not at first."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 4:
            raise RuntimeError("out of luck")
        return images.flatten(1)[:, :1]


def interrupting_step() -> Callable[[torch.Tensor, Any], None]:
    """Ctrl-C is pressed in the fourth step."""
    calls: list[int] = []

    def step(images: torch.Tensor, labels: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    return step
