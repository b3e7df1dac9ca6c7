"""Helpers for launching Triton kernels: check whether Triton works here, and recognize errors if it does not."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime import errors as runtime_errors

FUSION = True
"""Allow fused multiply-add, even if the environment variable TRITON_DEFAULT_FP_FUSION is 0. This saves instructions,
and the results are bit-identical either way."""
_COMPILE_ERRORS = (
    CompilationError,
    runtime_errors.OutOfResources,
    getattr(runtime_errors, "PTXASError", CompilationError),  # Triton 3.2 or newer.
)


class UnusableError(Exception):
    """Triton cannot compile a kernel, or cannot load it on this device."""


def interpreted() -> bool:
    """Return whether Triton runs kernels in its interpreter, which accepts CPU tensors."""
    return not isinstance(_empty_kernel, triton.runtime.JITFunction)


@functools.cache
def load(device: torch.device) -> None:
    """Compile an empty kernel and load it on a device; raise UnusableError if that fails.

    This needs what all kernels need: a C compiler, ptxas, and a driver that can load the output of ptxas.
    """
    if interpreted():
        return
    try:
        with torch.cuda.device(device):
            # Private API: Triton loads a kernel when this attribute is first read, and has no public function for it.
            _ = _empty_kernel.warmup(0, grid=(1,)).run
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        # If an earlier kernel caused the error, and not the loading, `synchronize` raises it here.
        torch.cuda.synchronize(device)
        raise UnusableError(str(error)) from error


def run(device: torch.device, function: Any, *args: Any) -> Any:
    """Call a function that launches kernels on a device, and return its result.

    Raise UnusableError if a kernel cannot be compiled, or if `load` fails.
    """
    load(device)
    try:
        # Triton launches kernels on the current device.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return function(*args)
    except _COMPILE_ERRORS as error:
        raise UnusableError(str(error)) from error


@triton.jit
def _empty_kernel(number):  # type: ignore[no-untyped-def]
    pass
