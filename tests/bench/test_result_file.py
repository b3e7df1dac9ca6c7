"""Files that are there whole, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from h5pack.bench.result_file import write_result
from h5pack.errors import OptionsError


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    for data in (b"one", b"other"):
        write_result(str(path), data)
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["a.toml"]


def test_what_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OptionsError, match=r"a\.toml: No space left on device; name a file that can be written"):
        write_result(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.toml"]
