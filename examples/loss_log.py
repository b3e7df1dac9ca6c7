"""The log of the training example: losses and accuracies as JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class LossLog:
    """Write a line for each step and each validation.

    Losses stay on the device until several can be fetched at once, because each fetch synchronises with the GPU.

    Parameters
    ----------
    path : Path or None
        None: write nothing, as on all ranks but the first.
    every : int
        Steps whose losses are fetched together.
    begin : int
        Bytes of the file to keep: what was logged before the checkpoint. Later steps are repeated.
    """

    def __init__(self, path: Path | None, every: int, begin: int):
        self.path, self.every = path, every
        self.waiting: list[tuple[dict[str, int], torch.Tensor]] = []
        self.losses: list[float] = []
        if path is not None:
            path.touch()
            os.truncate(path, min(begin, path.stat().st_size))

    def loss(self, line: dict[str, int], loss: torch.Tensor) -> None:
        """Record the loss of a step on this rank."""
        self.waiting.append((line, loss))
        if len(self.waiting) >= self.every:
            self.flush()

    def flush(self) -> int:
        """Write the losses, averaged over the ranks, which call it together; returns the file's length in bytes."""
        if self.waiting:
            means = torch.stack([loss for _, loss in self.waiting])
            if dist.is_initialized():
                dist.all_reduce(means)
                means /= dist.get_world_size()
            found = means.tolist()
            self.write(*({**line, "loss": loss} for (line, _), loss in zip(self.waiting, found, strict=True)))
            self.losses += found
            self.waiting.clear()
        return 0 if self.path is None else self.path.stat().st_size

    def write(self, *lines: dict[str, Any]) -> None:
        """Append lines to the file."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
