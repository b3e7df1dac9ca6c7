"""The ceiling of reading from memory: rows copied from random places."""

from __future__ import annotations

import threading
import time

import numpy as np

from h5pack.feed.buffers import anonymous
from h5pack.measure.consuming import touch


class MemoryCopy:
    """``np.take`` of random rows into batches whose memory is used again.

    Parameters
    ----------
    rows, size : int
        Rows to copy from, and bytes a row.
    batch : int
        Rows a batch, at most `rows`.
    threads : int
        The most threads that will copy.
    """

    def __init__(self, rows: int, size: int, batch: int, threads: int = 2) -> None:
        self.rows, self.batch = rows, batch
        self.source = np.frombuffer(anonymous(rows * size), np.uint8)[: rows * size].reshape(rows, size)
        self.source[...] = np.arange(size, dtype=np.uint32).astype(np.uint8)
        self.buffers = []
        for _ in range(3 * threads):
            buffer = np.frombuffer(anonymous(batch * size), np.uint8)[: batch * size].reshape(batch, size)
            buffer[...] = 1
            self.buffers.append(buffer)

    def __call__(self, threads: int, turn: int) -> float:
        """Rows a second of an epoch of whole batches; `turn` seeds its order."""
        order = np.random.default_rng(turn).permutation(self.rows)
        batches = self.rows // self.batch

        def work(thread: int) -> None:
            for number in range(thread, batches, threads):
                # Each thread has its own three.
                out = self.buffers[thread * 3 + number // threads % 3]
                rows = order[number * self.batch : (number + 1) * self.batch]
                np.take(self.source, rows, axis=0, out=out, mode="clip")
                touch(out)

        begin = time.perf_counter()
        workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return batches * self.batch / (time.perf_counter() - begin)
