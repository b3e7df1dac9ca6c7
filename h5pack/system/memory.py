"""Allocation of memory for large buffers."""

from __future__ import annotations

import contextlib
import mmap


def huge_page_memory(size: int) -> mmap.mmap:
    """Allocate `size` bytes (at least 1) of zeroed, page-aligned private memory, on huge pages if the system has them.

    Huge pages cause fewer page faults when memory is first used, are faster to copy, and leave fewer pages to pin for a
    direct write.
    """
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    memory = mmap.mmap(-1, max(size, 1), flags=flags) if flags else mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Kernels without transparent huge pages reject this advice.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
