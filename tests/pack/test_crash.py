"""Conversions that are killed, interrupted or starved anywhere end, after a resume, in the same bytes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import h5pack
from h5pack.errors import NoSpaceError
from h5pack.pack.file_structure import FileStructure, PackTables, write_structure
from h5pack.pack.journal import RowRecord
from tests.crashing import children_of, convert_in_child, gone, leftovers, small_file_system, wait_for
from tests.makers import flat_folder, quick, split_folders, truncate

KILLS_IN_TIME = 40


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three splits, of which 1 % of the images are cut short, and one file that is no image."""
    counts = {"train": {"x": 150, "y": 140}, "val": {"x": 40, "y": 35}, "test": {"x": 20, "y": 15}}
    root = split_folders(tmp_path_factory.mktemp("source"), counts, (60, 50))
    for name in ("train/x/00003.jpg", "train/y/00071.jpg", "val/y/00034.jpg", "test/x/00000.jpg"):
        truncate(root / name)
    (root / "train" / "x" / "none.jpg").write_bytes(b"no image")
    return root


@pytest.fixture(scope="module", params=["shuffled", "sorted"])
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(source: Path, order: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of an uninterrupted conversion."""
    out = tmp_path_factory.mktemp("whole") / "o.h5"
    before = os.environ.get("SOURCE_DATE_EPOCH")
    os.environ["SOURCE_DATE_EPOCH"] = "1700000000"
    h5pack.convert(source, out, **options(order))
    if before is None:
        del os.environ["SOURCE_DATE_EPOCH"]
    return out.read_bytes()


def options(order: str, **settings: Any) -> dict[str, Any]:
    return quick(order=order, chunk_rows=23, **settings)


def test_killed_at_every_step(source: Path, order: str, whole: bytes, tmp_path: Path) -> None:
    """SIGKILL at, or in the middle of, every call that changes a file, first to last; orders take turns."""
    steps = convert_in_child(source, tmp_path / "count.h5", options(order), kill_at=None)
    assert steps > 60
    out = tmp_path / "o.h5"
    for step in range(int(order == "shuffled"), steps, 2):
        convert_in_child(source, out, options(order), kill_at=step)
        if out.exists():
            # Only cleaning up was left.
            assert out.read_bytes() == whole
        report = h5pack.convert(source, out, **options(order, resume=True))
        assert report.images == 396
        assert out.read_bytes() == whole, f"killed at step {step} of {steps}"
        assert leftovers(tmp_path) == {"count.h5", "count.h5.rejects.csv", "o.h5", "o.h5.rejects.csv"}
        out.unlink()
        (tmp_path / "o.h5.rejects.csv").unlink()


def test_killed_again_while_resuming(source: Path, order: str, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "o.h5"
    steps = convert_in_child(source, tmp_path / "count.h5", options(order), kill_at=None)
    rounds = 0
    while not out.exists():
        convert_in_child(source, out, options(order, resume=True), kill_at=min(steps - 1, 5 + 3 * rounds))
        rounds += 1
        assert rounds < steps
    h5pack.convert(source, out, **options(order, resume=True))
    assert rounds > 5
    assert out.read_bytes() == whole


def test_killed_at_40_moments_with_workers(source: Path, order: str, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "o.h5"
    command = [sys.executable, "-m", "h5pack", "convert", str(source), str(out), "--quiet"]
    command += ["--order", order, "--chunk-rows", "23", "--workers", "2"]
    seconds = 60.0
    for _ in range(3):
        out.unlink(missing_ok=True)
        begin = time.perf_counter()
        subprocess.run(command, check=True)
        seconds = min(seconds, time.perf_counter() - begin)
    assert out.read_bytes() == whole
    killed = 0
    # The interpreter starts in the first part of the time, where there is nothing to lose.
    for moment in range(int(order == "shuffled"), KILLS_IN_TIME, 2):
        out.unlink(missing_ok=True)
        begin = time.perf_counter()
        process = subprocess.Popen(command)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds * (0.25 + 0.8 * moment / KILLS_IN_TIME))
            # The machine may have become faster.
            seconds = min(seconds, time.perf_counter() - begin)
        children = children_of(process.pid)
        process.kill()
        process.wait()
        killed += not out.exists()
        subprocess.run([*command, "--resume"], check=True)
        assert out.read_bytes() == whole
        assert all(gone(child) for child in children)
    assert killed >= KILLS_IN_TIME // 4


def test_the_file_does_not_depend_on_workers_or_ways_of_writing(
    source: Path, order: str, whole: bytes, tmp_path: Path
) -> None:
    for number, settings in enumerate(
        [
            {"num_workers": 4},
            {"io": "direct"},
            {"io": "buffered"},
            {"io": "direct", "num_workers": 3, "start_method": "spawn"},
        ]
    ):
        out = tmp_path / f"{number}.h5"
        h5pack.convert(source, out, **options(order, **settings))
        assert out.read_bytes() == whole, settings


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_all_processes_and_says_how_to_continue(tmp_path: Path, number: int, code: int) -> None:
    source = flat_folder(tmp_path / "in", 1500, (60, 50))
    out = tmp_path / "o.h5"
    command = [sys.executable, "-m", "h5pack", "convert", str(source), str(out), "--workers", "2", "--chunk-rows", "8"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any(path.stat().st_size for path in (tmp_path / "o.h5.partial.journal").glob("rows-*.log")))
    children = children_of(process.pid)
    assert len(children) >= 2
    # As a terminal does: to the whole group at once.
    os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == code
    assert errors.strip().splitlines()[-1] == (
        f"h5pack: interrupted; {out}.partial is kept: run the same command with --resume to continue"
    )
    assert "Traceback" not in errors
    assert all(gone(child) for child in children)
    assert not out.exists()
    subprocess.run([*command, "--resume", "--quiet"], check=True)
    h5pack.convert(source, tmp_path / "whole.h5", **quick(chunk_rows=8))
    assert out.read_bytes() == (tmp_path / "whole.h5").read_bytes()


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_a_signal_that_is_ignored_from_the_start_stays_ignored(tmp_path: Path, name: str) -> None:
    """A shell without job control starts background commands with SIGINT ignored."""
    source = flat_folder(tmp_path / "in", 400, (60, 50))
    out = tmp_path / "o.h5"
    command = [sys.executable, "-m", "h5pack", "convert", str(source), str(out), "--workers", "2", "--chunk-rows", "8"]
    ignoring = ["sh", "-c", f"trap '' {name}; exec \"$@\"", "sh", *command]
    process = subprocess.Popen(ignoring, start_new_session=True, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any(path.stat().st_size for path in (tmp_path / "o.h5.partial.journal").glob("rows-*.log")))
    os.killpg(process.pid, signal.Signals[f"SIG{name}"])
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert h5pack.verify(out).ok


def test_a_killed_worker_is_reported_and_the_conversion_resumes(tmp_path: Path) -> None:
    source = flat_folder(tmp_path / "in", 1500, (60, 50))
    out = tmp_path / "o.h5"
    command = [sys.executable, "-m", "h5pack", "convert", str(source), str(out), "--workers", "2", "--chunk-rows", "8"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any(path.stat().st_size for path in (tmp_path / "o.h5.partial.journal").glob("rows-*.log")))
    os.kill(children_of(process.pid)[-1], signal.SIGKILL)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "h5pack: a worker process died" in errors
    assert "Traceback" not in errors
    report = h5pack.convert(source, out, **quick(chunk_rows=8, resume=True))
    assert report.resumed_rows > 0
    h5pack.convert(source, tmp_path / "whole.h5", **quick(chunk_rows=8))
    assert out.read_bytes() == (tmp_path / "whole.h5").read_bytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with small_file_system(tmp_path / "small", "4m") as mount:
        yield mount


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(small_disk: Path, tmp_path: Path) -> None:
    source = flat_folder(tmp_path / "in", 500, (60, 60))
    command = [sys.executable, "-m", "h5pack", "convert", str(source), str(small_disk / "o.h5")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.strip().count("\n") == 0
    assert "bytes more" in result.stderr
    assert list(small_disk.iterdir()) == []
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    subprocess.run([*command, "--resume", "--quiet"], check=True)
    assert h5pack.verify(small_disk / "o.h5").ok


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_fills_up_meanwhile(small_disk: Path, tmp_path: Path, workers: int) -> None:
    source = flat_folder(tmp_path / "in", 330, (60, 60))
    out = small_disk / "o.h5"

    def hog(*_: object) -> None:
        (small_disk / "hog").write_bytes(bytes(int(os.statvfs(small_disk).f_bavail * 4096) - 1_500_000))

    settings = {"num_workers": workers, "start_method": "fork", "chunk_rows": 9}
    with pytest.MonkeyPatch.context() as patch:
        # Space is checked; then another process takes it.
        patch.setattr("h5pack.pack.output.Output.require_space", hog)
        with pytest.raises(NoSpaceError):
            h5pack.convert(source, out, **quick(**settings))
    assert not out.exists()
    (small_disk / "hog").unlink()
    report = h5pack.convert(source, out, **quick(resume=True, **settings))
    assert report.resumed_rows > 0
    h5pack.convert(source, tmp_path / "whole.h5", **quick(chunk_rows=9))
    assert out.read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_a_disk_that_fills_up_before_the_tables_are_written(small_disk: Path, tmp_path: Path) -> None:
    source = flat_folder(tmp_path / "in", 100, (60, 60))
    out = small_disk / "o.h5"

    def full(path: Path, structure: FileStructure, rows: int, tables: PackTables | None) -> object:
        if tables is not None:
            free = os.statvfs(small_disk).f_bavail * 4096
            (small_disk / "hog").write_bytes(bytes(free - 8192))
        return write_structure(path, structure, rows, tables)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("h5pack.pack.finish.write_structure", full)
        with pytest.raises(NoSpaceError):
            h5pack.convert(source, out, **quick(chunk_rows=9))
    assert not out.exists()
    (small_disk / "hog").unlink()
    assert h5pack.convert(source, out, **quick(chunk_rows=9, resume=True)).images == 100
    h5pack.convert(source, tmp_path / "whole.h5", **quick(chunk_rows=9))
    assert out.read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_a_lost_page_after_the_rows_moved_is_decoded_again(
    source: Path, order: str, whole: bytes, tmp_path: Path
) -> None:
    """A power cut while rows close up: the journal knows more than the disk, and a moved row's origin is gone."""
    out = tmp_path / "o.h5"

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("h5pack.pack.finish.complete", cut)
        with pytest.raises(KeyboardInterrupt):
            h5pack.convert(source, out, **options(order))
    partial = tmp_path / "o.h5.partial"
    data = bytearray(partial.read_bytes())
    for start in range(70_000, len(data) - 5000, 300_000):
        data[start : start + 4096] = bytes(4096)
    partial.write_bytes(data)
    h5pack.convert(source, out, **options(order, resume=True))
    assert out.read_bytes() == whole


def test_the_killing_harness_can_fail(tmp_path: Path) -> None:
    """A resume that does not look at the file would be found out."""
    source = flat_folder(tmp_path / "in", 40)
    out = tmp_path / "o.h5"
    steps = convert_in_child(source, tmp_path / "whole.h5", quick(chunk_rows=4), kill_at=None)
    differs = False
    for step in range(0, steps, 3):
        convert_in_child(source, out, quick(chunk_rows=4), kill_at=step)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("h5pack.pack.conversion.Conversion._wrong_rows", lambda *_: [])
            patch.setattr("h5pack.pack.journal.Journal.records", lambda self: iter(forged()))
            try:
                h5pack.convert(source, out, **quick(chunk_rows=4, resume=True))
                differs |= out.read_bytes() != (tmp_path / "whole.h5").read_bytes()
            except h5pack.H5PackError:
                differs = True
        for path in tmp_path.glob("o.h5*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert differs


def forged() -> list[RowRecord]:
    """Records of rows that were never written."""
    nothing = np.zeros(0, np.int64)
    return [
        RowRecord(
            np.arange(40), np.ones(40, np.bool_), np.zeros(40, np.uint32), nothing, np.zeros((0, 2, 3), np.uint64)
        ),
    ]
