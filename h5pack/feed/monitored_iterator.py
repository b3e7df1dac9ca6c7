"""One iteration of a monitored loader."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from h5pack.feed.device_wait import DeviceWait
from h5pack.feed.feed_watch import FeedWatch
from h5pack.feed.stage_labels import StageLabels
from h5pack.feed.upstream import Position, Pulling


class MonitoredIterator(Iterator[Any]):
    """Gives a loader's batches as they are, and measures how long each was waited for.

    Parameters
    ----------
    pulling : Pulling
        The loader's iteration.
    position : Position
        Is told what was handed out.
    finish : callable
        Is told when the end was reached.
    watch : FeedWatch
    labels : StageLabels
    device_wait : DeviceWait or None
    """

    def __init__(
        self,
        pulling: Pulling,
        position: Position,
        finish: Callable[[Position], None],
        watch: FeedWatch,
        labels: StageLabels,
        device_wait: DeviceWait | None,
    ) -> None:
        self._pulling, self._position, self._finish = pulling, position, finish
        self._watch, self._labels, self._device_wait = watch, labels, device_wait

    def __next__(self) -> Any:
        watch, device_wait = self._watch, self._device_wait
        self._labels.end()
        if time.perf_counter() >= watch.due:
            # Before the batch is asked for, so that a warning that is made an error loses none.
            watch.tick()
        self._labels.begin("h5pack: wait")
        if device_wait is not None:
            device_wait.begin()
        before = time.perf_counter()
        try:
            batch = self._pulling.pull().batch
        except BaseException as error:
            watch.waited(time.perf_counter() - before)
            self._labels.end()
            watch.finish()
            if isinstance(error, StopIteration):
                self._finish(self._position)
            raise
        seconds = time.perf_counter() - before
        if device_wait is not None:
            device_wait.end(seconds)
        watch.count(batch, seconds)
        self._position.handed += 1
        self._labels.begin("h5pack: step")
        return batch

    def close(self) -> None:
        """End the iteration early; the loader's iterator is closed, too, where it can be."""
        self._labels.end()
        self._watch.finish()
        self._pulling.close()

    def __del__(self) -> None:
        # Who leaves the loop only drops the iterator. The loader's own looks after itself.
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self._labels.end()
                self._watch.finish()
