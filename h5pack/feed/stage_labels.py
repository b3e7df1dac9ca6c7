"""Names for stretches of time, which profilers show: torch's profiler, and Nsight under CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function


class StageLabels:
    """Names one stretch of time after the other.

    A label for torch's profiler costs about 10 microseconds even where none runs, so it is asked for first, which costs
    0.1.

    Parameters
    ----------
    always : bool or None
        True: label whether or not a profiler runs; False: never; None: where one runs.
    nvtx : bool
        Name them for Nsight, too; nobody can tell whether that listens.
    """

    def __init__(self, always: bool | None = None, nvtx: bool = False) -> None:
        self._always = always
        self._nvtx = nvtx and always is not False
        self._record: record_function | None = None
        self._range: Any = None

    def begin(self, name: str) -> None:
        """End the last stretch, and begin one."""
        self.end()
        if self._always or (self._always is None and _profiler_enabled()):
            self._record = record_function(name)
            self._record.__enter__()  # type: ignore[no-untyped-call]
        if self._nvtx:
            # Not a range of the stack: a step may push and pop its own across batches.
            self._range = torch.cuda.nvtx.range_start(name)

    def end(self) -> None:
        """End the last stretch, if there is one."""
        record, self._record = self._record, None
        if record is not None:
            record.__exit__(None, None, None)
        label, self._range = self._range, None
        if label is not None:
            torch.cuda.nvtx.range_end(label)
