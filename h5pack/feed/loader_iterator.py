"""One epoch's batches, in order."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from h5pack.errors import LoaderError
from h5pack.feed.pipeline import Pipeline
from h5pack.feed.progress import Progress, Run


class LoaderIterator(Iterator[Any]):
    """Gives an epoch's batches. Threads end with the epoch, and when the iterator is closed or forgotten.

    Parameters
    ----------
    progress : Progress
        Says where it begins, and is told what was handed out.
    end : int
        Batches of the epoch.
    start : callable
        Starts reading.
    """

    def __init__(self, progress: Progress, end: int, start: Callable[[Run], Pipeline]) -> None:
        self._progress = progress
        self._run = run = progress.begin()
        self._following, self._end = run.begun, end
        self._ready: dict[int, Any] = {}
        self._broken = ""
        self._pipeline: Pipeline | None = None
        if self._following < self._end:
            self._pipeline = start(run)
            # The threads know the pipeline only, so a forgotten iterator dies, and its threads with it.
            self._forgotten = weakref.finalize(self, self._pipeline.stop)
            self._forgotten.atexit = False

    def __len__(self) -> int:
        """Batches left."""
        return self._end - self._following

    @property
    def waiting(self) -> int:
        """Batches that are full, and wait to be asked for."""
        return len(self._ready) + (0 if self._pipeline is None else self._pipeline.waiting)

    def __next__(self) -> Any:
        pipeline = self._pipeline
        if self._broken:
            raise LoaderError(f"this iterator {self._broken} its epoch's end; begin a new one with iter(loader)")
        if pipeline is None:
            self._progress.finish(self._run)
            raise StopIteration
        if pipeline.process != os.getpid():
            raise LoaderError(
                "this iterator belongs to the process that was forked, whose threads did not come along; begin a new "
                "one here with iter(loader)"
            )
        try:
            while self._following not in self._ready:
                number, batch = pipeline.fetch()
                self._ready[number] = batch
                del batch
            found = self._ready.pop(self._following)
            self._following += 1
            pipeline.return_credit()
            if self._following == self._end:
                self._let_go()
            self._run.count += 1
            return found
        except BaseException:
            # Whatever it was, and Ctrl-C may come at any line: half-done bookkeeping must not go on.
            self._broken = "failed before"
            self._let_go()
            raise

    def close(self) -> None:
        """Stop reading; wait until the threads have ended."""
        if self._pipeline is not None:
            self._broken = "was closed before"
        self._let_go()

    def _let_go(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        self._ready.clear()
        if pipeline is not None:
            # It knows the pipeline, whose memory would live as long as this.
            self._forgotten.detach()
            if pipeline.process == os.getpid():
                pipeline.stop()
                pipeline.join()
