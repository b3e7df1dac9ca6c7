"""Named time ranges for profilers: for torch's profiler, and on CUDA also for Nsight Systems."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# Private API: torch has no public function that reports whether a profiler is running. Without this
# check, each range would cost about 6 us even when no profiler is running.
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function


class ProfilerRanges:
    """A sequence of named time ranges, of which at most one is open at a time.

    Parameters
    ----------
    enabled : bool or None
        True: always record ranges for torch's profiler. None: record them only while a profiler is running. False:
        record nothing, neither for torch's profiler nor for Nsight.
    nvtx : bool
        Whether to mark the ranges for Nsight, too. This is done even if Nsight is not running, because there is no way
        to find that out.
    """

    def __init__(self, enabled: bool | None = None, nvtx: bool = False) -> None:
        self._enabled = enabled
        self._nvtx = nvtx and enabled is not False
        self._record: record_function | None = None
        self._handle: Any = None

    def begin(self, name: str) -> None:
        """End the current range, if any, and begin one with this name."""
        self.end()
        if self._enabled or (self._enabled is None and _profiler_enabled()):
            self._record = record_function(name)
            self._record.__enter__()  # type: ignore[no-untyped-call]
        if self._nvtx:
            # Do not use range_push and range_pop, which would have to nest properly with the training step's ranges.
            self._handle = torch.cuda.nvtx.range_start(name)

    def end(self) -> None:
        """End the current range, if any."""
        record, self._record = self._record, None
        if record is not None:
            record.__exit__(None, None, None)
        handle, self._handle = self._handle, None
        if handle is not None:
            torch.cuda.nvtx.range_end(handle)


@contextlib.contextmanager
def profiler_range(name: str) -> Iterator[None]:
    """A context manager. Profilers show its block as the range ``"h5pack: {name}"``."""
    # Without CUDA, the NVTX library may be missing, and calling it would raise an error.
    ranges = ProfilerRanges(nvtx=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    ranges.begin(f"h5pack: {name}")
    try:
        yield
    finally:
        ranges.end()
