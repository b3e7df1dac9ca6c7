"""Exports that are killed, interrupted or starved anywhere end, after a resume, in the same files."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import h5pack
from h5pack.errors import NoSpaceError, OutputBusyError, OutputExistsError, WorkerError
from h5pack.exporter import image_files
from h5pack.exporter.exporter import export
from tests.crashing import changes_in_child, children_of, effective_steps, gone, small_file_system, wait_for
from tests.exporter.folders import tree
from tests.makers import flat_folder, quick, split_folders


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


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_every_step(pack: Path, tmp_path: Path, overwrite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From what SIGKILL leaves at, or in the middle of, every call that changes a file, from the first to the last."""
    out = tmp_path / "out"
    before = {}
    if overwrite:
        export(pack, tmp_path / "old", **quick(format="jpeg"))
        before = tree(tmp_path / "old")
        shutil.copytree(tmp_path / "old", out)

    def fail(*_: object) -> None:
        raise RuntimeError

    work = lambda: export(pack, out, **quick(overwrite=overwrite))  # noqa: E731
    changes = changes_in_child(work, kill_at=None, watched=tmp_path / "out*")
    steps = effective_steps(changes)
    whole = tree(out)
    assert len(whole) == 6 + 6
    assert len(steps) >= 8
    resumed = set()
    # Another beginning changes nothing in the middle.
    for step in [*steps[:2], *(step for step in steps if step >= len(changes) - 30)] if overwrite else steps:
        changes[step].leave_files(tmp_path / "out*")
        if out.exists():
            # Nothing half-done under the final name.
            assert tree(out) in (before, whole), f"killed at step {step}"
        if before and not out.exists():
            # Starting over keeps the earlier export until the new one is complete.
            with monkeypatch.context() as context:
                context.setattr("h5pack.exporter.exporter.export_rows", fail)
                with pytest.raises(RuntimeError):
                    export(pack, out, **quick(overwrite=True))
            assert tree(out) == before
        if before and out.exists() and tree(out) == before:
            # An earlier export is never replaced without being asked to.
            with pytest.raises(OutputExistsError):
                export(pack, out, **quick(resume=True))
        report = export(pack, out, **quick(resume=True, overwrite=overwrite))
        resumed.add(report.resumed_files)
        assert tree(out) == whole, f"killed at step {step}"
        assert {path.name for path in tmp_path.glob("out*")} == {"out"}
    assert len(resumed) > (1 if overwrite else 4)


def test_killed_with_workers(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(large, tmp_path / "whole", **quick())
    out = tmp_path / "out"
    write = image_files._write_file

    def count() -> int:
        return len([*tmp_path.glob("out.partial/*.png")])

    def write_or_wait(path: str, data: bytes) -> None:
        # The workers wait here until their parent is killed.
        while count() > 10:
            signal.pause()
        write(path, data)

    monkeypatch.setattr(image_files, "_write_file", write_or_wait)
    options = {"num_workers": 2, "start_method": "fork", "resume": True}
    process = multiprocessing.get_context("fork").Process(target=export, args=(large, out), kwargs=options)
    process.start()
    wait_for(lambda: count() > 10)
    workers = children_of(process.pid or 0)
    process.kill()
    process.join()
    assert all(gone(worker) for worker in workers)
    assert not out.exists()
    monkeypatch.setattr(image_files, "_write_file", write)
    report = export(large, out, **quick(resume=True))
    assert 0 < report.resumed_files < 60
    assert tree(out) == tree(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "whole"}


def test_a_worker_that_dies(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("h5pack.exporter.image_files._write_file", lambda *_: os.kill(os.getpid(), 9))
        with pytest.raises(WorkerError):
            export(large, tmp_path / "out", **quick(num_workers=2, start_method="fork"))
    assert export(large, tmp_path / "out", **quick(resume=True)).files == 60


def test_a_locked_output_is_busy(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.system.files._LOCK_WAIT_SECONDS", 0.1)
    with (tmp_path / "out.partial.lock").open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        for options in (quick(), quick(resume=True), quick(overwrite=True)):
            with pytest.raises(OutputBusyError):
                export(pack, tmp_path / "out", **options)
    assert export(pack, tmp_path / "out", **quick()).files == 6
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 320 KiB."""
    with small_file_system(tmp_path / "small", "320k") as mount:
        yield mount


def test_a_full_disk_and_a_mount_point(small_disk: Path, large: Path, tmp_path: Path) -> None:
    out = small_disk / "out"
    with pytest.raises(h5pack.SourceError):
        export(large, small_disk, **quick())
    with pytest.raises(NoSpaceError):
        export(large, out, num_workers=2, start_method="fork")
    assert not out.exists()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    report = export(large, out, **quick(resume=True))
    assert 0 < report.resumed_files < 60
    export(large, tmp_path / "whole", **quick())
    assert tree(out) == tree(tmp_path / "whole")
