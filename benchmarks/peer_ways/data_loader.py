"""A torch DataLoader as an opened way."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.peer_ways.way import Batch, Reading


class OpenedLoader:
    """Goes through a DataLoader, or what is used like one, an epoch at a time.

    Parameters
    ----------
    loader : iterable
        Gives batches as (images, labels) or as a dict of "image" and "label".
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def epoch(self) -> Generator[Batch, None, None]:
        """Its next epoch."""
        for batch in self.loader:
            yield (batch["image"], batch["label"]) if isinstance(batch, dict) else (batch[0], batch[1])

    def close(self) -> None:
        """Let go of it; workers that stay end with its iterator."""
        self.loader = None


def shuffling(dataset: Dataset[Any], reading: Reading) -> OpenedLoader:
    """What torch's documentation has for a map-style dataset: shuffle=True, workers, here ones that stay.

    Workers that stay save their start in every epoch, as the documentation of persistent_workers says.
    """
    return OpenedLoader(
        DataLoader(
            dataset,
            reading.batch,
            shuffle=True,
            num_workers=reading.workers,
            persistent_workers=True,
            generator=torch.Generator().manual_seed(reading.seed),
        )
    )
