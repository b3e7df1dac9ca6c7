"""Starting and stopping the workers of a DataLoader between measurements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from h5pack.data.samplers import ChunkBatchSampler


class PausableSampler(ChunkBatchSampler):
    """A sampler whose epochs are empty while `paused` is true."""

    paused = False

    def __iter__(self) -> Iterator[list[int]]:
        return iter(()) if self.paused else super().__iter__()


def start_workers(loader: Any) -> None:
    """Start the persistent workers of a DataLoader with a `PausableSampler`, without reading; ignore other loaders."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, PausableSampler):
        sampler.paused = True
        for _ in range(2):  # A second epoch begins once all workers have answered.
            list(loader)
        sampler.paused = False


def stop_workers(loader: Any) -> None:
    """Stop the persistent workers of a DataLoader, which starts others for its next epoch; ignore other loaders."""
    if getattr(loader, "_iterator", None) is not None:
        # Private API: DataLoader._iterator._shutdown_workers. Torch has no public way to end persistent workers.
        with contextlib.suppress(AttributeError):
            loader._iterator._shutdown_workers()
        loader._iterator = None
