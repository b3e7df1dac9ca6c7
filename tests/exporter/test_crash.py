"""Exports that are killed, interrupted or starved anywhere end, after a resume, in the same files."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import h5pack
from h5pack.errors import NoSpaceError, OutputBusyError, OutputExistsError, WorkerError
from h5pack.exporter.exporter import export
from tests.crashing import children_of, gone, run_in_child, small_file_system, wait_for
from tests.makers import flat_folder, quick, split_folders

Tree = dict[str, bytes]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    source = split_folders(folder / "in", {"train": {"x": 3, "y": 2}, "val": {"x": 1}})
    h5pack.convert(source, folder / "a.h5", **quick(chunk_rows=2))
    return folder / "a.h5"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    h5pack.convert(flat_folder(folder / "in", 60, (60, 60)), folder / "a.h5", **quick(chunk_rows=3))
    return folder / "a.h5"


def one(**keywords: Any) -> dict[str, Any]:
    return {"num_workers": 1, **keywords}


def tree(folder: Path) -> Tree:
    """All that a folder holds."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else b"a folder" for name, path in found.items()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_every_step(pack: Path, tmp_path: Path, overwrite: bool) -> None:
    """SIGKILL at, or in the middle of, every call that changes a file, from the first to the last."""
    out = tmp_path / "out"
    before = {}
    if overwrite:
        export(pack, tmp_path / "old", **one(format="jpeg"))
        before = tree(tmp_path / "old")

    def begin() -> None:
        for path in tmp_path.glob("out*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if overwrite:
            shutil.copytree(tmp_path / "old", out)

    begin()
    steps = export_in_child(pack, out, one(overwrite=overwrite), kill_at=None)
    whole = tree(out)
    assert len(whole) == 6 + 6
    assert steps > 10
    resumed = set()
    # Another beginning changes nothing in the middle.
    for step in [0, 1, 2, 3, *range(steps - 18, steps)] if overwrite else range(steps):
        begin()
        export_in_child(pack, out, one(overwrite=overwrite), kill_at=step)
        if out.exists():
            # Nothing half-done under the final name.
            assert tree(out) in (before, whole), f"killed at step {step} of {steps}"
        if before and out.exists() and tree(out) == before:
            # An earlier export is never replaced without being asked to.
            with pytest.raises(OutputExistsError):
                export(pack, out, **one(resume=True))
        report = export(pack, out, **one(resume=True, overwrite=overwrite))
        resumed.add(report.resumed_files)
        assert tree(out) == whole, f"killed at step {step} of {steps}"
        assert {path.name for path in tmp_path.glob("out*")} == {"out"}
    assert len(resumed) > (1 if overwrite else 4)


def test_the_killing_harness_can_fail(pack: Path, tmp_path: Path) -> None:
    """A resume that kept every file that exists would be noticed."""
    steps = export_in_child(pack, tmp_path / "whole", one(), kill_at=None)
    differs = False
    for step in range(0, steps, 3):
        out = tmp_path / str(step)
        export_in_child(pack, out, one(), kill_at=step)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("h5pack.exporter.image_files._shows", lambda *_: True)
            export(pack, out, **one(resume=True))
        differs |= tree(out) != tree(tmp_path / "whole")
    assert differs


def test_killed_for_real_with_workers(large: Path, tmp_path: Path) -> None:
    export(large, tmp_path / "whole", **one())
    out = tmp_path / "out"
    code = (
        "import sys, time, h5pack.exporter.image_files as files\n"
        "from h5pack.exporter.exporter import export\n"
        "write = files._write_file\n"
        # So that there is time to kill it in the middle.
        "files._write_file = lambda *given: (time.sleep(0.02), write(*given))\n"
        "if __name__ == '__main__':\n"
        "    export(sys.argv[1], sys.argv[2], num_workers=2, resume=True)\n"
    )
    for count in (10, 25):
        process = subprocess.Popen([sys.executable, "-c", code, str(large), str(out)])
        wait_for(lambda count=count: len([*(tmp_path / "out.partial").glob("*.png")]) > count)  # type: ignore[misc]
        workers = children_of(process.pid)
        process.kill()
        process.wait()
        assert all(gone(worker) for worker in workers)
    assert not out.exists()
    report = export(large, out, **one(num_workers=2, resume=True))
    assert 0 < report.resumed_files < 60
    assert tree(out) == tree(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "whole"}


def test_a_worker_that_dies(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("h5pack.exporter.image_files._write_file", lambda *_: os.kill(os.getpid(), 9))
        with pytest.raises(WorkerError):
            export(large, tmp_path / "out", **one(num_workers=2, start_method="fork"))
    assert export(large, tmp_path / "out", **one(resume=True)).files == 60


def test_two_at_once(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.system.files._LOCK_WAIT_SECONDS", 0.1)
    with (tmp_path / "out.partial.lock").open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        for options in (one(), one(resume=True), one(overwrite=True)):
            with pytest.raises(OutputBusyError):
                export(pack, tmp_path / "out", **options)
    assert export(pack, tmp_path / "out", **one()).files == 6
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 320 KiB."""
    with small_file_system(tmp_path / "small", "320k") as mount:
        yield mount


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk(small_disk: Path, large: Path, tmp_path: Path, workers: int) -> None:
    out = small_disk / "out"
    with pytest.raises(NoSpaceError):
        export(large, out, **one(num_workers=workers, start_method="fork"))
    assert not out.exists()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    report = export(large, out, **one(num_workers=workers, resume=True))
    assert 0 < report.resumed_files < 60
    export(large, tmp_path / "whole", **one())
    assert tree(out) == tree(tmp_path / "whole")


def test_a_mount_point_is_no_output(small_disk: Path, pack: Path) -> None:
    with pytest.raises(h5pack.SourceError):
        export(pack, small_disk, **one())


def export_in_child(pack: Path, out: Path, keywords: dict[str, Any], kill_at: int | None) -> int:
    """Export in a forked child that dies by SIGKILL at its `kill_at`-th change to a file; gives how many it made."""
    return run_in_child(lambda: export(pack, out, **keywords), kill_at)
