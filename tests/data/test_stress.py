"""Everything at once, in one process: loaders abandoned, garbage collected, workers forked, threads reading."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import subprocess
import sys
import threading
import time
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

ROWS = 1_000
SHAPE = (32, 32, 3)
ROUNDS, LOADERS = 4, 6
SECONDS = 300
"""After this many seconds it counts as a deadlock."""


class Storm:
    """Uses a file in all ways at once, and looks at every pixel."""

    def __init__(self, path: Path) -> None:
        self.data = packs.values(ROWS, SHAPE)
        self.dataset = h5pack.H5Dataset(path)
        self.random = random.Random(5)
        self.left: list[Any] = []
        self.errors: list[BaseException] = []
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
        return h5pack.H5Loader(
            self.dataset,
            choose([32, 64, 128]),
            shuffle=choose(["window", "window", "full", "chunk", False]),
            window=choose([1, 3]),
            seed=self.random.randrange(99),
            streams=lanes * choose([1, 2, 4]),
            lanes=lanes,
            num_threads=choose([1, 2, 4]),
            resident=choose(["no", "auto", "host"]),
            memory_bytes=25_000_000,
        )

    def break_off(self) -> None:
        """Open a loader, and leave it somewhere, somehow."""
        loader = self.loader()
        batches = iter(loader)
        for _ in range(self.random.randrange(len(loader))):
            self.look(next(batches))
        how = self.random.choice(["forget", "close", "close the iterator", "cycle", "keep", "run out", "twice"])
        if how == "close":
            loader.close()
        elif how == "close the iterator":
            batches.close()  # type: ignore[attr-defined]
        elif how == "cycle":
            cycle: list[Any] = [loader, batches]
            cycle.append(cycle)
        elif how == "keep":
            self.left.append(batches)
            if len(self.left) > 2:
                self.left.pop(self.random.randrange(3))
        elif how == "run out":
            for batch in batches:
                self.look(batch)
        elif how == "twice":
            for batch in list(loader):
                self.look(batch)

    def workers(self) -> None:
        """Read an epoch in forked workers of a DataLoader."""
        sampler = h5pack.ChunkBatchSampler(self.dataset, 100, window=2)
        settings = {"num_workers": 2, "multiprocessing_context": "fork"}
        for batch in DataLoader(self.dataset, batch_sampler=sampler, collate_fn=self.dataset.collate, **settings):
            self.look(batch)

    def in_threads(self, *works: Callable[[], None]) -> list[threading.Thread]:
        """Start threads whose errors are not lost."""

        def guarded(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

        threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        return threads

    def round(self) -> None:
        """Some loaders, with everything else beside them."""
        over = threading.Event()

        def collect() -> None:
            while not over.wait(random.random() * 0.1):
                gc.collect()

        def read() -> None:
            numbers = np.random.default_rng()
            while not over.is_set():
                rows = numbers.integers(0, ROWS, 50)
                images, labels = self.dataset.collate(self.dataset.__getitems__(rows))
                assert np.array_equal(images.numpy(), self.data[rows])
                assert labels.tolist() == rows.tolist()
                time.sleep(0.001)

        beside = self.in_threads(collect, read, read)
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
        self.left.clear()
        gc.collect()
        assert not self.errors, self.errors
        assert threads_end()


def descriptors() -> int:
    """How many are open in this process."""
    return len(os.listdir("/proc/self/fd"))


def resident_mb() -> float:
    """Memory of this process, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def storm(path: str) -> None:
    """All rounds; the first two warm up."""
    warnings.simplefilter("error")
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    torch.set_num_threads(1)
    made = Storm(Path(path))
    measured = []
    for _ in range(ROUNDS):
        made.round()
        measured.append((descriptors(), resident_mb()))
    assert made.seen > 8 * ROWS
    print(measured)
    (open_before, before), (open_after, after) = measured[1], measured[-1]
    assert open_after <= open_before, measured
    assert after - before < 30, measured
    made.dataset.close()


def test_a_storm_leaves_no_wrong_pixel_and_nothing_behind(tmp_path: Path) -> None:
    path = packs.write(tmp_path / "f.h5", 50, images=packs.values(ROWS, SHAPE), labels=np.arange(ROWS))
    code = f"from tests.data.test_stress import storm; storm({str(path)!r})"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=SECONDS + 30, check=False)
    print(process.stdout)
    assert (process.returncode, process.stderr) == (0, "")
