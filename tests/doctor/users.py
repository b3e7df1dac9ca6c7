"""Transforms, models and steps of users; named in tests as ``tests.doctor.users:NAME``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn


def cheap() -> Callable[[torch.Tensor, Any], Any]:
    return lambda images, labels: images.sum()


def of_a_batch(images: torch.Tensor) -> torch.Tensor:
    return images


def to_float(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 3, 1, 2).float() / 255


def of_one_image(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def forgetful_transform(images: torch.Tensor) -> None:
    """A transform without a return statement."""
    images.float()


def failing_transform(images: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such color\nand a second line")


def failing_factory() -> nn.Module:
    raise FileNotFoundError("weights.pt is not there")


def failing_step() -> nn.Module:
    """A model for images of another size."""
    return nn.Sequential(nn.Flatten(), nn.Linear(7, 2))


def interrupting_step() -> Callable[[torch.Tensor, Any], None]:
    """Ctrl-C is pressed in the fourth step."""
    calls = itertools.count(1)

    def step(images: torch.Tensor, labels: Any) -> None:
        if next(calls) == 4:
            raise KeyboardInterrupt

    return step
