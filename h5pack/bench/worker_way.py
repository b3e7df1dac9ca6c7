"""Batches by a DataLoader with worker processes."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data import DataLoader

from h5pack.bench.cell import Cell, Stored
from h5pack.bench.ways import Timing, first_rows
from h5pack.feed.dataset import H5Dataset
from h5pack.feed.samplers import ChunkBatchSampler
from h5pack.measure.consuming import touch


class WorkerWay:
    """H5Dataset with `ChunkBatchSampler` and ``collate_fn=dataset.collate``.

    Parameters
    ----------
    dataset : H5Dataset
    cell : Cell
        Its `workers` read; 0: the calling process.
    stored : Stored
    seed : int
    """

    def __init__(self, dataset: H5Dataset, cell: Cell, stored: Stored, seed: int) -> None:
        sampler = ChunkBatchSampler(
            dataset, cell.batch, window=cell.window, seed=seed, rows=first_rows(dataset, stored)
        )
        self._dataset = dataset
        self._loader: Any = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=cell.workers or 0,
            collate_fn=dataset.collate,
            persistent_workers=bool(cell.workers),
        )

    def run(self, seconds: float, *, once: bool = False) -> Timing:
        """Whole epochs until the time is up: workers that are left early would go on beside the next way."""
        begin, rows = time.perf_counter(), 0
        while True:
            for batch in self._loader:
                images = batch[0] if isinstance(batch, list) else batch
                touch(images.numpy())
                rows += len(images)
            elapsed = time.perf_counter() - begin
            if once or elapsed >= seconds:
                return Timing(rows, elapsed, None)

    def close(self) -> None:
        """End the workers."""
        # They end with the iterator that the DataLoader keeps for the next epoch.
        self._loader._iterator = None
        self._dataset.close()
