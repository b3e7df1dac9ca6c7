"""Temporary folders go, those of dead runs too, and those of running ones stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from h5pack.bench.scratch import Scratch
from h5pack.errors import NoSpaceError, OptionsError


def test_it_is_gone_afterwards_even_behind_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with Scratch(tmp_path) as scratch:
            (scratch.path / "folder").mkdir()
            (scratch.path / "folder" / "file").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_goes_and_what_a_running_one_needs_stays(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom h5pack.bench.scratch import Scratch\n"
        f"with Scratch({os.fspath(tmp_path)!r}) as scratch:\n"
        "    (scratch.path / 'pack.h5').write_text('x')\n"
        "    print(scratch.path, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = [Path(run.stdout.readline().strip()) for run in runs if run.stdout is not None]
    assert all(folder.is_dir() for folder in folders)
    runs[0].send_signal(signal.SIGKILL)
    runs[0].communicate()
    assert folders[0].is_dir(), "nothing could clean up behind SIGKILL"
    with Scratch(tmp_path):
        assert not folders[0].exists()
        assert (folders[1] / "pack.h5").exists()
    runs[1].communicate()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"nowhere: no temporary files can be made there .*; give --scratch"):
        Scratch(tmp_path / "nowhere")


def test_too_little_space(tmp_path: Path) -> None:
    with Scratch(tmp_path) as scratch:
        scratch.require(1)
        with pytest.raises(NoSpaceError, match=r"temporary packs need 1,000,000,000,000,000,000 bytes"):
            scratch.require(10**18)
