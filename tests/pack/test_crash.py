"""Conversions that are killed, interrupted or run out of disk space end, after a resume, in the same bytes."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import h5pack
from h5pack import cli
from h5pack.errors import H5PackError, NoSpaceError, ResumeError
from h5pack.images.decode import Decoder
from h5pack.pack.file_structure import FileStructure, PackTables, write_structure
from h5pack.pack.journal import RowRecord
from tests.crashing import (
    changes_in_child,
    convert_in_child,
    convert_until,
    distinct_steps,
    effective_steps,
    files_of,
    gone,
    kill_while_held,
    leftovers,
    lose_pages,
    require_resumes,
    wait_for,
)
from tests.makers import flat_folder, quick, save, truncate


@pytest.fixture(scope="module", params=["shuffled", "sorted"])
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(source: Path, order: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of an uninterrupted conversion."""
    out = tmp_path_factory.mktemp("whole") / "o.h5"
    h5pack.convert(source, out, **options(order))
    return out.read_bytes()


def options(order: str, **settings: Any) -> dict[str, Any]:
    return quick(order=order, chunk_rows=8, **settings)


def test_killed_at_every_step(source: Path, order: str, whole: bytes, tmp_path: Path) -> None:
    """From what SIGKILL leaves in every kind of call that changes a file, in every phase; orders take turns."""
    steps = partial(distinct_steps, first=order == "shuffled")
    assert require_resumes(source, tmp_path / "o.h5", options(order), steps) == whole
    assert leftovers(tmp_path) == {"o.h5", "o.h5.rejects.csv"}


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_rows_that_a_failed_fsync_lost_are_written_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    """After a failed fsync, the page cache has the rows, the disk does not, and the next fsync succeeds."""
    keywords = options("shuffled", compression=compression)
    h5pack.convert(source, tmp_path / "whole.h5", **keywords)
    out = tmp_path / "o.h5"
    changes = convert_in_child(source, out, keywords, kill_at=None)
    # The name of the output is on the disk before the journal is removed.
    assert changes[changes.index("replace o.h5.partial") + 1] == f"fsync {tmp_path.name}"
    sync, drop = os.fsync, os.posix_fadvise
    for number in range(changes.count("fsync o.h5.partial")):
        out.unlink()
        calls, lost = [], False

        def failing(descriptor: int, number: int = number, calls: list[str] = calls) -> None:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith("o.h5.partial"):
                calls.append("fsync")
                if len(calls) == number + 1:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(descriptor)

        def dropping(descriptor: int, *arguments: int) -> None:
            nonlocal lost
            lost = True
            lose_pages(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
            drop(descriptor, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            with pytest.raises(H5PackError) as caught:
                h5pack.convert(source, out, **keywords)
        assert caught.value.path == f"{out}.partial"
        with monkeypatch.context() as patch:
            patch.setattr("h5pack.system.files.os.posix_fadvise", dropping)
            patch.setattr("h5pack.pack.conversion.drop_partial_pages", lambda *arguments: None)
            h5pack.convert(source, out, **keywords, resume=True)
        assert lost
        assert out.read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_killed_again_while_resuming(source: Path, order: str, whole: bytes, tmp_path: Path) -> None:
    out, rounds = tmp_path / "o.h5", 0
    while not out.exists():
        convert_in_child(source, out, options(order, resume=True), kill_at=5 + 3 * rounds)
        rounds += 1
    h5pack.convert(source, out, **options(order, resume=True))
    assert 5 < rounds < 50
    assert out.read_bytes() == whole


@pytest.mark.parametrize("images", [0, 11])
def test_killed_while_workers_write(source: Path, order: str, whole: bytes, tmp_path: Path, images: int) -> None:
    out = tmp_path / "o.h5"
    kill_while_held(source, out, options(order), (Decoder, "decode"), images)
    report = h5pack.convert(source, out, **options(order, resume=True, num_workers=2))
    assert (report.resumed_rows > 0) == (images > 0)
    assert out.read_bytes() == whole


SOURCE_CHANGES: dict[str, Callable[[Path], object]] = {
    "rejected, then repaired": lambda root: save(root / "00003.png", 3),
    "cut short, then repaired": lambda root: save(root / "00004.jpg", 4),
    "accepted, then cut short": lambda root: truncate(root / "00005.png"),
    "accepted, then no image": lambda root: (root / "00006.jpg").write_bytes(b"no image"),
    "of another size": lambda root: save(root / "00006.jpg", 6, (30, 40)),
    "accepted, then removed": lambda root: (root / "00006.jpg").unlink(),
    "renamed": lambda root: (root / "00006.jpg").rename(root / "00006b.jpg"),
    "rejected, then removed": lambda root: (root / "00003.png").unlink(),
    "added": lambda root: save(root / "new.jpg", 7),
}


@pytest.mark.parametrize("keep", [None, "jpeg"])
def test_a_source_that_changed_after_a_kill_is_refused(tmp_path: Path, keep: str | None) -> None:
    """While images are encoded, and while rows are written."""
    source, out = flat_folder(tmp_path / "in", 16), tmp_path / "o.h5"
    for number in (1, 3, 5, 9):
        (source / f"{number:05d}.jpg").unlink()
        save(source / f"{number:05d}.png", number)
    (source / "00003.png").write_bytes(b"")
    truncate(source / "00004.jpg", 0.9)
    shutil.copytree(source, tmp_path / "before")
    settings = quick(keep=keep, size=None if keep else 16, chunk_rows=None if keep else 2)
    changes = convert_in_child(source, out, settings, kill_at=None)
    whole = out.read_bytes()
    for log in ("encoded-", "rows.log") if keep else ("rows.log",):
        step = next(step for step, change in enumerate(changes) if change.startswith("write") and log in change)
        for name, alter in SOURCE_CHANGES.items():
            changes[step].leave_files(files_of(out))
            alter(source)
            with pytest.raises(ResumeError):
                pytest.fail(f"{name}: {h5pack.convert(source, out, **settings, resume=True)}")
            shutil.rmtree(source)
            shutil.copytree(tmp_path / "before", source)
        h5pack.convert(source, out, **settings, resume=True)
        assert out.read_bytes() == whole


def test_workers_and_ways_of_writing_give_the_same_file(source: Path, order: str, whole: bytes, tmp_path: Path) -> None:
    spawned = {"io": "direct", "num_workers": 3, "start_method": "spawn"}
    for settings in ({"num_workers": 4}, {"io": "direct"}, {"io": "buffered"}, *([spawned] * (order == "sorted"))):
        h5pack.convert(source, tmp_path / "o.h5", **options(order, overwrite=True, **settings))
        assert (tmp_path / "o.h5").read_bytes() == whole, settings


HELD = """
import os, signal, sys
from h5pack import cli
from h5pack.pack import file_structure, writer
owner, name, calls = eval(sys.argv[1])
call, done = getattr(owner, name), 0
def holding(*arguments):
    global done
    if done == calls:
        open(f"held {os.getpid()}", "w").close()
        while "go" not in os.listdir("."):
            signal.sigtimedwait([], 0.02)
    done += 1
    return call(*arguments)
setattr(owner, name, holding)
sys.exit(cli.main(sys.argv[2:]))
"""
DECODING = "(writer, 'crc32', 12)"
STORING = "(file_structure, 'store_chunk', 0)"


def held_command(
    tmp_path: Path, *launcher: str, call: str = DECODING, compression: str = "none"
) -> tuple[subprocess.Popen[str], list[int], list[str]]:
    """Convert by the command line with 2 workers; what makes this call waits in it until there is a file ``go``.

    Return the process, those that wait (the workers, or the process itself while it stores chunks), and the arguments.
    """
    source = flat_folder(tmp_path / "in", 60, (60, 50))
    arguments = ["convert", str(source), str(tmp_path / "o.h5"), "--workers", "2", "--chunk-rows", "8"]
    arguments += ["--compression", compression]
    command = [*launcher, sys.executable, "-c", HELD, call, *arguments, "--start-method", "fork"]
    folder = tmp_path / "cwd"
    folder.mkdir()
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True, cwd=folder)
    count = 2 if call == DECODING else 1
    wait_for(lambda: len(leftovers(folder)) == count or process.poll() is not None)
    waiting = [int(name.split()[1]) for name in leftovers(folder)]
    assert len(waiting) == count
    return process, waiting, arguments


def require_resumed_bytes(tmp_path: Path, arguments: list[str], compression: str = "none") -> None:
    assert leftovers(tmp_path) == {"in", "cwd", "o.h5.partial", "o.h5.partial.journal"}
    assert cli.main([*arguments, "--resume", "--quiet"]) == 0
    h5pack.convert(tmp_path / "in", tmp_path / "whole.h5", **quick(chunk_rows=8, compression=compression))
    assert (tmp_path / "o.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


@pytest.mark.parametrize(
    ("number", "call", "compression"),
    [(signal.SIGINT, DECODING, "none"), (signal.SIGTERM, DECODING, "none"), (signal.SIGINT, STORING, "zstd")],
)
def test_after_a_signal_the_conversion_is_resumed(tmp_path: Path, number: int, call: str, compression: str) -> None:
    process, waiting, arguments = held_command(tmp_path, call=call, compression=compression)
    assert (tmp_path / "o.h5.partial.compressed").exists() == (call == STORING)
    # As a terminal does: to the whole group at once.
    os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 128 + number, errors
    last = errors.splitlines()[-1]
    assert (f"{tmp_path}/o.h5.partial" in last, "--resume" in last, "Traceback" in errors) == (True, True, False), (
        errors
    )
    assert all(gone(each) for each in waiting)
    require_resumed_bytes(tmp_path, arguments, compression)


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_a_signal_that_is_ignored_from_the_start_stays_ignored(tmp_path: Path, name: str) -> None:
    """A shell without job control starts background commands with SIGINT ignored."""
    process, _, _ = held_command(tmp_path, "sh", "-c", f"trap '' {name}; exec \"$@\"", "sh")
    os.killpg(process.pid, signal.Signals[f"SIG{name}"])
    (tmp_path / "cwd" / "go").touch()
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert h5pack.verify(tmp_path / "o.h5").ok


def test_a_killed_worker_is_reported_and_the_conversion_resumes(tmp_path: Path) -> None:
    process, workers, arguments = held_command(tmp_path)
    os.kill(workers[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=90)
    assert (process.returncode, "Traceback" in errors) == (1, False)
    assert errors.splitlines()[-1].startswith("h5pack: a worker process died")
    require_resumed_bytes(tmp_path, arguments)


def test_a_disk_that_is_too_small_is_an_error_before_anything_is_written(small_disk: Path, tmp_path: Path) -> None:
    source, out = flat_folder(tmp_path / "in", 400, (60, 60)), small_disk / "o.h5"
    with pytest.raises(NoSpaceError) as caught:
        h5pack.convert(source, out, **quick())
    assert (caught.value.path, caught.value.parameters) == (str(out), ("resume=True",))
    assert leftovers(small_disk) == set()
    with pytest.raises(NoSpaceError) as caught:
        h5pack.convert(source, small_disk / "p.h5", part="1/2", **quick())
    assert caught.value.parameters == ()  # A part always continues; resume=True would be refused.
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    assert h5pack.convert(source, out, **quick(resume=True)).images == 400


@pytest.mark.parametrize("when", ["workers write", "tables are written"])
def test_a_disk_that_fills_up_later(small_disk: Path, tmp_path: Path, when: str) -> None:
    """Space is checked; then another process takes it."""
    source, out = flat_folder(tmp_path / "in", 330, (60, 60)), small_disk / "o.h5"
    settings = {"num_workers": 2, "start_method": "fork", "chunk_rows": 9}

    def fill(keep: int) -> None:
        (small_disk / "hog").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - keep))

    def full(path: Path, structure: FileStructure, rows: int, tables: PackTables | None, planned: int) -> object:
        fill(8192)
        return write_structure(path, structure, rows, tables, planned)

    with pytest.MonkeyPatch.context() as patch:
        if when == "workers write":
            patch.setattr("h5pack.pack.output.Output.require_space", lambda *_, **__: fill(1_500_000))
        else:
            patch.setattr("h5pack.pack.finish.write_structure", full)
        with pytest.raises(NoSpaceError):
            h5pack.convert(source, out, **quick(**settings))
    assert not out.exists()
    (small_disk / "hog").unlink()
    report = h5pack.convert(source, out, **quick(resume=True, **settings))
    assert 0 < report.resumed_rows <= report.images == 330
    h5pack.convert(source, tmp_path / "whole.h5", **quick(chunk_rows=9))
    assert out.read_bytes() == (tmp_path / "whole.h5").read_bytes()


@pytest.mark.parametrize("way", ["direct", "buffered"])
def test_a_limit_on_file_sizes_can_be_raised(source: Path, order: str, whole: bytes, tmp_path: Path, way: str) -> None:
    out, keywords = tmp_path / "o.h5", options(order, io=way)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, before[1]))
    try:
        with pytest.raises(NoSpaceError) as caught:
            h5pack.convert(source, out, **keywords)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.path == f"{out}.partial"
    assert caught.value.parameters == ("resume=True",)
    assert "ulimit -f" in str(caught.value)
    assert not (tmp_path / "o.h5.partial.structure").exists()
    h5pack.convert(source, out, **keywords, resume=True)
    assert out.read_bytes() == whole


def test_pages_lost_after_rows_moved_are_decoded_again(source: Path, order: str, whole: bytes, tmp_path: Path) -> None:
    """A power cut while rows close up: the journal knows more than the disk, and a moved row's origin is gone."""
    out = tmp_path / "o.h5"
    convert_until("h5pack.pack.finish.complete", source, out, options(order))
    lose_pages(tmp_path / "o.h5.partial")
    h5pack.convert(source, out, **options(order, resume=True))
    assert out.read_bytes() == whole


def test_the_killing_harness_can_fail(tmp_path: Path) -> None:
    """A resume that does not look at the file would be found out."""
    source, out = flat_folder(tmp_path / "in", 40), tmp_path / "o.h5"
    changes = convert_in_child(source, tmp_path / "whole.h5", quick(chunk_rows=4), kill_at=None)
    nothing, no_sums = np.zeros(0, np.int64), np.zeros((0, 2, 3), np.uint64)
    forged = RowRecord(np.arange(40), np.ones(40, np.bool_), np.zeros(40, np.uint32), nothing, no_sums)
    differs = False
    for step in range(0, len(changes), 6):
        convert_in_child(source, out, quick(chunk_rows=4), kill_at=step)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("h5pack.pack.conversion.Conversion._wrong_rows", lambda *_: [])
            patch.setattr("h5pack.pack.journal.Journal.records", lambda _: iter([forged]))
            try:
                h5pack.convert(source, out, **quick(chunk_rows=4, resume=True))
                differs |= out.read_bytes() != (tmp_path / "whole.h5").read_bytes()
            except h5pack.H5PackError:
                differs = True
        if differs:
            return
        for path in tmp_path.glob("o.h5*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    raise AssertionError("no step was found out")


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_kill_leaves_the_files_that_were_noted(tmp_path: Path, compression: str) -> None:
    """So tests that resume at every step need not kill a process at each."""
    # One image, because the order in which threads write several differs from run to run.
    source, folder = flat_folder(tmp_path / "in", 1), tmp_path / "out"
    settings = quick(compression=compression)
    folder.mkdir()

    def left() -> dict[str, bytes | None]:
        """The contents of all files; names of journals of rows are drawn."""
        paths = {re.sub("rows-.*", "rows", os.fspath(path)): path for path in folder.rglob("*")}
        return {name: None if path.is_dir() else path.read_bytes() for name, path in paths.items()}

    changes = convert_in_child(source, folder / "o.h5", settings, kill_at=None)
    # The order in which files are removed depends on their names.
    steps = [step for step, change in enumerate(changes) if not change.startswith("unlink")]
    assert {changes[step].split()[0] for step in steps} >= {"pwrite", "write", "replace", "rmdir", "create"}
    for step in steps[::5]:
        changes[step].leave_files(folder / "*")
        noted = left()
        shutil.rmtree(folder)
        folder.mkdir()
        convert_in_child(source, folder / "o.h5", settings, kill_at=step)
        assert left() == noted, changes[step]


def test_one_of_the_steps_that_leave_the_same_files_is_chosen(tmp_path: Path) -> None:
    def work() -> None:
        descriptor = os.open(tmp_path / "a", os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, b"ab")
        os.fsync(descriptor)
        os.fsync(descriptor)
        os.replace(tmp_path / "a", tmp_path / "b")
        (tmp_path / "a").unlink(missing_ok=True)
        (tmp_path / "c").touch()
        (tmp_path / "b").unlink()

    changes = changes_in_child(work, None, tmp_path / "*")
    assert changes == ["write a", "fsync a", "fsync a", "replace a", "unlink a", "unlink b"]
    assert effective_steps(changes) == [0, 3, 4, 5]
    assert distinct_steps(changes, first=True) == distinct_steps(changes, first=False) == [0, 3, 4, 5]
    assert effective_steps(changes_in_child(work, None)) == [0, 1, 2, 3, 4, 5]
