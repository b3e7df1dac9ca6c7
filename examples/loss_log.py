"""The log of the training example: losses and accuracies as JSON lines."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class LossLog:
    """Write a line for each step and each validation.

    Losses stay on the device until several can be fetched at once, because each fetch synchronizes with the GPU.

    Parameters
    ----------
    path : Path or None
        None: write nothing, as on all ranks but the first.
    every : int
        Steps whose losses are fetched together.
    state : dict or None
        What `state_dict` returned for the checkpoint. What was logged later is removed, because its steps are repeated.
    """

    def __init__(self, path: Path | None, every: int, state: dict[str, Any] | None):
        self.path, self.every = path, every
        self.waiting: list[tuple[dict[str, int], torch.Tensor]] = []
        state = state or {"bytes": 0, "sum": 0.0, "count": 0}
        self.sum, self.count = state["sum"], state["count"]
        if path is not None:
            path.touch()
            os.truncate(path, min(state["bytes"], path.stat().st_size))

    def loss(self, line: dict[str, int], loss: torch.Tensor) -> None:
        """Record the loss of a step on this rank."""
        self.waiting.append((line, loss))
        if len(self.waiting) >= self.every:
            self.flush()

    def flush(self) -> None:
        """Write the losses, averaged over the ranks, which call it together."""
        if self.waiting:
            means = torch.stack([loss for _, loss in self.waiting])
            if dist.is_initialized():
                dist.all_reduce(means)
                means /= dist.get_world_size()
            found = means.tolist()
            self.write(*({**line, "loss": loss} for (line, _), loss in zip(self.waiting, found, strict=True)))
            self.sum, self.count = sum(found, self.sum), self.count + len(found)
            self.waiting.clear()

    def end_epoch(self) -> float:
        """Return the mean loss of the steps since the last epoch, also of those before a checkpoint."""
        self.flush()
        mean = self.sum / self.count if self.count else math.nan
        self.sum, self.count = 0.0, 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Flush; return the file's length in bytes, and the sum and the number of this epoch's losses so far."""
        self.flush()
        size = 0 if self.path is None else self.path.stat().st_size
        return {"bytes": size, "sum": self.sum, "count": self.count}

    def write(self, *lines: dict[str, Any]) -> None:
        """Append lines to the file."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
