"""Progress bars, and the time that each stage of a command takes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

from h5pack.system.parameters import flags


def progress_bar(total: float | None, **settings: Any) -> Any:
    """Return ``tqdm(total=total, **settings)``, but without the thread that tqdm starts by default.

    A process that is forked while that thread runs could inherit a lock that is never released. If the process has no
    standard error, as in a daemon, nothing is shown.
    """
    tqdm.monitor_interval = 0
    if sys.stderr is None and "file" not in settings:
        settings["disable"] = True
    return tqdm(total=total, **settings)


class Stages:
    """Measures how long each stage of a command takes, in `seconds`; shows progress bars if `progress` is true."""

    def __init__(self, progress: bool) -> None:
        (self._progress,) = flags(progress=progress)
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str, count: int, unit: str = " images") -> Iterator[Callable[[int], object]]:
        """Measure one stage; yield a function to be called with the number of units done since its last call."""
        begin = time.perf_counter()
        if self._progress:
            with progress_bar(count, desc=name, unit=unit, disable=None, smoothing=0.1, leave=False) as bar:
                yield bar.update
        else:
            yield lambda done: None
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
