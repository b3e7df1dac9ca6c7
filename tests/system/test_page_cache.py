"""Pages in the page cache are counted, loaded and dropped."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from h5pack.system.page_cache import cached_pages, drop_cache, make_hot


def test_a_file_is_loaded_and_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(2 * mmap.PAGESIZE + 1))
    make_hot(path)
    assert cached_pages(path) == 3
    # Some file systems, such as tmpfs, keep the pages.
    assert drop_cache(path) in (0, 3)
    make_hot(path)
    monkeypatch.delattr(os, "posix_fadvise")
    assert drop_cache(path) == 3
