"""The training loop of the short examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def train_epochs(
    feed: Iterable[Any], optimizer: torch.optim.Optimizer, loss_of: Callable[[Any], torch.Tensor], epochs: int
) -> list[float]:
    """Train, print the mean loss of each epoch, and return these means. `loss_of` is called with each batch."""
    means = []
    for epoch in range(epochs):
        losses = []
        for batch in feed:
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        means.append(torch.stack(losses).mean().item())
        print(f"epoch {epoch}: loss {means[-1]:.4f}")
    return means
