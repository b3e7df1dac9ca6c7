"""Memory for large buffers."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from h5pack.system.memory import huge_page_memory


@pytest.mark.parametrize("size", [0, 1, 4096, 3_000_000])
def test_memory_is_zeroed_page_aligned_and_of_the_size_asked_for(size: int) -> None:
    array = np.frombuffer(huge_page_memory(size), np.uint8)
    assert len(array) == max(1, size)
    assert array.ctypes.data % mmap.PAGESIZE == 0
    assert not array.any()


def test_a_kernel_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    assert len(huge_page_memory(8192)) == 8192
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert len(huge_page_memory(8192)) == 8192
