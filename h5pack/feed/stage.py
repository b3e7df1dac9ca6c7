"""Names of the stages of feeding, as profilers show them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._C._autograd import _profiler_enabled


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Label a block ``"h5pack: name"``: for torch's profiler where one runs, and for Nsight once CUDA is in use.

    Parameters
    ----------
    name : str
        ``"read"``, ``"copy"`` or ``"transform"``.
    """
    label = f"h5pack: {name}"
    # Without CUDA there may be no NVTX, and pushing a range raises.
    marked = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if marked:
        torch.cuda.nvtx.range_push(label)  # type: ignore[no-untyped-call]
    try:
        # A label that nobody sees costs some 10 microseconds; to ask whether somebody does, a hundredth of it.
        if _profiler_enabled():
            with torch.profiler.record_function(label):
                yield
        else:
            yield
    finally:
        if marked:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
