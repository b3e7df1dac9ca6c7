"""Everything at once, in one process: loaders abandoned, garbage collected, workers forked, threads reading."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import h5pack
from tests.data import packs
from tests.data.packs import threads_end
from tests.forking import output_of

ROWS, SHAPE, ROUNDS, LOADERS = 1_000, (32, 32, 3), 4, 6
SECONDS = 300
"""After this many seconds it counts as a deadlock."""


class Storm:
    """Uses a file in all ways at once, and looks at every pixel."""

    def __init__(self, path: Path) -> None:
        self.data = packs.values(ROWS, SHAPE)
        self.dataset = h5pack.H5Dataset(path)
        self.random = random.Random(5)
        self.left: list[Any] = []
        self.seen = 0

    def look(self, batch: Any) -> None:
        """Compare a batch with what was written."""
        images, labels = batch
        assert np.array_equal(images.numpy(), self.data[labels.numpy()])
        self.seen += len(labels)

    def loader(self) -> h5pack.H5Loader:
        """One of some kind."""
        choose = self.random.choice
        lanes = choose([1, 1, 2])
        order = {"shuffle": choose(["window", "window", "full", "chunk", False]), "window": choose([1, 3])}
        order |= {"streams": lanes * choose([1, 2, 4]), "lanes": lanes, "seed": self.random.randrange(99)}
        memory = {"num_threads": choose([1, 2, 4]), "memory_bytes": 25_000_000}
        return h5pack.H5Loader(self.dataset, choose([32, 64, 128]), **order, **memory)

    def break_off(self) -> None:
        """Open a loader, and leave it somewhere, somehow."""
        loader = self.loader()
        batches: Any = iter(loader)
        for _ in range(self.random.randrange(len(loader))):
            self.look(next(batches))
        how = self.random.choice(["forget", "close", "close the iterator", "cycle", "keep", "run out", "twice"])
        if how == "close":
            loader.close()
        elif how == "close the iterator":
            batches.close()
        elif how == "cycle":
            cycle: list[Any] = [loader, batches]
            cycle.append(cycle)
        elif how == "keep":
            self.left.append(batches)
            if len(self.left) > 2:
                self.left.pop(self.random.randrange(3))
        elif how in ("run out", "twice"):
            for batch in batches if how == "run out" else list(loader):
                self.look(batch)

    def workers(self) -> None:
        """Read an epoch in forked workers of a DataLoader."""
        sampler = h5pack.ChunkBatchSampler(self.dataset, 100, window=2)
        settings = {"num_workers": 2, "multiprocessing_context": "fork"}
        for batch in DataLoader(self.dataset, batch_sampler=sampler, collate_fn=self.dataset.collate, **settings):
            self.look(batch)

    def round(self) -> None:
        """Some loaders, with everything else beside them."""
        over = threading.Event()

        def collect() -> None:
            while not over.wait(random.random() * 0.1):
                gc.collect()

        def read() -> None:
            numbers = np.random.default_rng()
            while not over.wait(0.001):
                rows = numbers.integers(0, ROWS, 50)
                images, labels = self.dataset.collate(self.dataset.__getitems__(rows))
                assert np.array_equal(images.numpy(), self.data[rows])
                assert labels.tolist() == rows.tolist()

        errors: list[BaseException] = []

        def guarded(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        beside = [threading.Thread(target=guarded, args=(work,)) for work in (collect, read, read)]
        for thread in beside:
            thread.start()
        try:
            for number in range(LOADERS):
                self.break_off()
                if number == 4:
                    self.workers()
                if self.random.random() < 0.3:
                    gc.collect()
        finally:
            over.set()
            for thread in beside:
                thread.join()
        assert not errors, errors
        self.left.clear()
        gc.collect()
        assert threads_end()


def usage() -> tuple[int, float]:
    """Return how many descriptors this process has, and its memory in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def storm(path: str) -> None:
    """All rounds; the first two warm up."""
    warnings.simplefilter("error")
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    torch.set_num_threads(1)
    # Each of many collections would otherwise look at all of torch's modules.
    gc.freeze()
    made = Storm(Path(path))
    measured = []
    for _ in range(ROUNDS):
        made.round()
        measured.append(usage())
    assert made.seen > 8 * ROWS
    (open_before, before), (open_after, after) = measured[1], measured[-1]
    assert open_after <= open_before, measured
    assert after - before < 30, measured
    made.dataset.close()


def test_a_storm_leaves_no_wrong_pixel_and_nothing_behind(tmp_path: Path) -> None:
    path = packs.write(tmp_path / "f.h5", 50, images=packs.values(ROWS, SHAPE), labels=np.arange(ROWS))
    assert output_of(storm, str(path)) == ""
