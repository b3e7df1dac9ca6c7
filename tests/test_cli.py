"""The command line: exit codes, one line an error, what a person and a program read."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import h5py
import pytest

import h5pack
from h5pack import cli, errors
from h5pack.commands.arguments import option_text
from tests.makers import class_folders, flat_folder, save, truncate


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, and under "" that of the program."""
    program = cli._parser()
    (commands,) = (action for action in program._actions if isinstance(action, argparse._SubParsersAction))
    return {"": program, **commands.choices}


COMMANDS = parsers().keys() - {""}


def test_convert_prints_its_plan_and_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = class_folders(tmp_path / "in", {"a": 6, "b": 5}, (60, 50))
    (source / "a" / "notes.txt").write_text("")
    (source / "a" / "empty.jpg").write_bytes(b"")
    truncate(source / "b" / "00001.jpg")
    code, out, _ = run(capsys, "convert", source, tmp_path / "o.h5", "--workers", 1)
    assert code == 0
    plan = dict(line.split(None, 1) for line in out.splitlines())
    assert plan["images"] == "11 of 60x50 rgb, nhwc, shuffled"
    assert plan["labels"] == "2 classes"
    assert plan["splits"] == "all 11"
    assert plan["ignored"] == "1 .txt files"
    assert plan["time"].startswith("about 1 s on 1 worker")
    assert plan["done"].startswith(f"{tmp_path}/o.h5: 10 images, ")
    assert plan["rejects"].startswith("2, listed with reasons in")
    code, out, err = run(capsys, "convert", source, tmp_path / "q.h5", "--workers", 1, "--quiet")
    assert (code, out, err) == (0, "", "")


def test_the_table_of_rejects_of_a_linked_output_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.h5").symlink_to("real/o.h5")
    run(capsys, "convert", flat_folder(tmp_path / "in", 1), tmp_path / "real" / "o.h5", "--quiet", "--workers", 1)
    save(tmp_path / "more" / "good.jpg")
    truncate(save(tmp_path / "more" / "bad.jpg"))
    for arguments in (
        ("append", tmp_path / "link.h5", tmp_path / "more"),
        ("convert", tmp_path / "more", tmp_path / "link.h5", "--overwrite"),
    ):
        code, out, _ = run(capsys, *arguments, "--workers", 1)
        assert (code, Path(out.split()[-1]).read_text().count("bad.jpg")) == (0, 1)


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = class_folders(tmp_path / "in", {"a": 6, "b": 5})
    code, out, _ = run(capsys, "convert", source, tmp_path / "o.h5", "--dry-run", "--json", "--workers", 1)
    assert code == 0
    plan = json.loads(out)
    assert plan["shape"] == [11, 20, 14, 3]
    assert plan["classes"] == ["a", "b"]
    assert plan["estimated_seconds"] >= 0
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    # Files in the way are reported, but do not prevent it, and stay as they are.
    for name in ("o.h5", "o.h5.partial"):
        (tmp_path / name).write_bytes(b"kept")
        code, out, err = run(capsys, "convert", source, tmp_path / "o.h5", "--dry-run", "--json", "--workers", 1)
        assert (code, json.loads(out)["shape"]) == (0, [11, 20, 14, 3])
        assert "--overwrite" in err
        assert (tmp_path / name).read_bytes() == b"kept"
        (tmp_path / name).unlink()
    (tmp_path / "o.h5").mkdir()
    assert run(capsys, "convert", source, tmp_path / "o.h5", "--dry-run", "--workers", 1)[0] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "o.h5"]


@pytest.mark.parametrize("option", ["--resume", "--finish", "--overwrite"])
def test_a_dry_run_leaves_leftovers(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    arguments = ("convert", flat_folder(tmp_path / "in", 5), tmp_path / "o.h5", "--workers", 1)
    assert run(capsys, *arguments, "--quiet")[0] == 0
    for name in ("shards", "journal", "parts"):
        (tmp_path / f"o.h5.partial.{name}").mkdir()
    (tmp_path / "o.h5.partial.owner").write_text("{}")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert run(capsys, *arguments, option, "--dry-run")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_dry_run_adds_no_results_to_an_array_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("convert", flat_folder(tmp_path / "in", 5), tmp_path / "o.h5", "--workers", 1)
    assert run(capsys, *arguments, "--part", "1/2", "--quiet")[0] == 0
    shared = tmp_path / "o.h5.partial.parts"
    for path in shared.glob("*/*"):
        path.unlink()
    assert run(capsys, *arguments, "--finish", "--dry-run")[0] == 0
    assert not any(shared.glob("*/*"))
    assert run(capsys, *arguments, "--finish", "--dry-run", "--size", 9)[0] == 1  # other options than the part's


def test_json_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = flat_folder(tmp_path / "in", 5)
    code, out, _ = run(capsys, "convert", source, tmp_path / "o.h5", "--json", "--workers", 1)
    assert code == 0
    assert json.loads(out)["images"] == 5
    texts = [run(capsys, "info", tmp_path / "o.h5", *options)[1] for options in ((), ("--full",))]
    assert ["rdcc_nslots=" in text for text in texts] == [False, True]
    assert len(texts[0].splitlines()) < len(texts[1].splitlines())
    code, out, _ = run(capsys, "info", tmp_path / "o.h5", "--json", "--stats")
    assert code == 0
    assert json.loads(out)["pack"]["complete"] is True
    assert json.loads(out)["pack"]["options"]["order"] == "shuffled"
    code, out, _ = run(capsys, "verify", tmp_path / "o.h5", "--json")
    assert code == 0
    assert json.loads(out)["ok"] is True


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["convert", "{missing}", "{out}"], 1, "no such file or folder"),
        (["convert", "{in}", "{out}", "--size", "12by3"], 2, "--size 12by3"),
        (["convert", "{in}", "{out}", "--fit", "squash"], 2, "--fit squash"),
        (["convert", "{in}", "{out}", "--chunk-rows", "\u00b2"], 2, "--chunk-rows"),
        (["convert", "{in}", "{out}", "--chunk-bytes", "4 parsecs"], 2, "--chunk-bytes '4 parsecs'"),
        (["convert", "{in}", "{out}"], 1, "give --size 9x9 or another size"),
        (["info", "{missing}"], 1, "no such file"),
        (["info", "{in}"], 1, "a folder, not an HDF5 file"),
        (["verify", "{text}"], 1, "not an HDF5 file"),
        (["verify", "{text}", "--workers", "-3"], 2, "--workers -3 is invalid"),
        (["convert", "s3://bucket/in", "{out}"], 2, "s3://bucket/in: is a URL"),
        (["convert", "{in}", "s3://bucket/o.h5"], 2, "s3://bucket/o.h5: is a URL"),
        (["info", "https://host/o.h5"], 2, "https://host/o.h5: is a URL"),
        (["convert", "{in}", "{out}/"], 2, "names a folder"),
        (["info", "a\nb\x1b[31m\u202e.h5"], 1, r"a\nb\x1b[31m\u202e.h5: no such file"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    save(tmp_path / "in" / "a.jpg", 1)
    save(tmp_path / "in" / "b.jpg", 1, (9, 9))
    (tmp_path / "text").write_text("not HDF5")
    names = {name: tmp_path / name for name in ("missing", "in", "text")}
    found, out, err = run(capsys, *[argument.format(**names, out=tmp_path / "o.h5") for argument in arguments])
    assert found == code
    assert message in out + err
    assert (out + err).count("\n") == 1
    assert not (tmp_path / "o.h5").exists()


@pytest.mark.parametrize("json", [False, True])
@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_missing_file_is_an_error_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, json: bool
) -> None:
    count = sum(2 if one.nargs == "+" else 1 for one in parsers()[command]._actions if not one.option_strings)
    code, out, err = run(capsys, command, *(tmp_path / f"{n}.png" for n in range(count)), *["--json"] * json)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert not any(tmp_path.iterdir())


def test_control_characters_in_names_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;x\x07\r\n\u202e\x9b"
    class_folders(tmp_path / "in" / f"train{evil}", {f"a{evil}": 6, f"b{evil}": 6})
    (tmp_path / "in" / f"train{evil}" / f"a{evil}" / f"{evil}.jpg").write_bytes(b"")
    pack, one, codes = tmp_path / f"o{evil}.h5", ("--workers", 1), []
    options = (*one, "--source", "splits", "--overwrite")

    def check(*arguments: Any) -> None:
        code, out, err = run(capsys, *arguments)
        codes.append(code)
        assert all(line.isprintable() for line in (out + err).split("\n")), arguments
        escaped = r"\x1b]0;x\x07\r\n\u202e\x9b"
        assert 0 < (out + err).count(escaped) == (out + err).count(r"]0;x"), arguments

    check("convert", tmp_path / "in", pack, *options)
    check("convert", tmp_path / "in", pack, *options, "--dry-run")
    check("append", pack, tmp_path / "in", *one, "--only-new")
    check("subset", pack, pack.with_name(f"s{evil}.h5"))
    check("join", pack, pack, pack.with_name(f"j{evil}.h5"))
    check("verify", pack)
    check("export", pack, tmp_path / f"all{evil}", *one)
    with h5py.File(pack, "r+") as file:
        file["images"][0] ^= 1
        file[f"x{evil}"] = [1]
    check("info", pack, "--stats", "--full")
    check("verify", pack)
    check("preview", pack, tmp_path / f"p{evil}.png")
    check("export", pack, tmp_path / f"out{evil}", *one)
    assert codes == [*[0] * 8, 1, 1, 1]


def test_misuse_and_abbreviated_options_exit_with_2() -> None:
    for arguments in (
        [],
        ["convert"],
        ["pack", "x"],
        ["convert", "a", "b", "--limit", "few"],
        ["convert", "a", "b", "--dry"],
        ["convert", "a", "b", "--label-columns", ","],
        ["subset", "a", "b", "--classes", ""],
        ["export", "a", "b", "--fields", " "],
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["convert", "a", "b", "--sise", "32"], "--size"),
        (["convert", "a", "b", "--splitcolumn", "set"], "--split-column"),
        (["convert", "a", "b", "--split", "train"], None),  # Another way is named instead.
        (["convert", "a", "b", "--overwrit"], "--overwrite"),
        (["info", "a", "--jsno"], "--json"),
        (["info", "a", "--zzzz"], None),
        (["info", "a", "--version"], None),
        (["--json", "info", "a"], None),  # Its place is wrong.
        (["info", "a", ""], None),
    ],
)
def test_a_mistyped_option_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], arguments: list[str], nearest: str | None
) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), f"did you mean {nearest or ''}" in err) == ("", 1, nearest is not None)


def test_debug_raises_the_error(tmp_path: Path) -> None:
    with pytest.raises(errors.PackFormatError):
        cli.main(["info", str(tmp_path / "none"), "--debug"])


def test_an_unexpected_error_is_one_line_unless_debug_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("unexpected")

    monkeypatch.setattr("h5pack.inspect.info.info", broken)
    code, _, err = run(capsys, "info", tmp_path / "x")
    assert code == 1
    assert err == "h5pack: ZeroDivisionError: unexpected (run again with --debug for the traceback)\n"


def test_the_error_on_windows_recommends_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="WSL"):
        runpy.run_path(h5pack.__file__)


@pytest.mark.parametrize("command", ["verify a.h5", "convert a b.h5", "append a.h5 b", "preview a.h5 b.png"])
def test_a_working_directory_that_was_removed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert cli.main(command.split()) == 1
    err = capsys.readouterr().err
    assert err.startswith("h5pack: the working directory ")
    assert "Error" not in err


def test_a_closed_pipe_gives_no_traceback(tmp_path: Path) -> None:
    source = flat_folder(tmp_path / "in", 3)
    command = f"{sys.executable} -m h5pack convert {source} {tmp_path}/o.h5 --dry-run | true"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("redirection", [">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_change_nothing(tmp_path: Path, redirection: str) -> None:
    source, out = flat_folder(tmp_path / "in", 3), tmp_path / "o.h5"
    command = f"{sys.executable} -m h5pack convert {source} {out} --workers 2 {redirection}"
    assert subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    assert h5pack.verify(out).ok


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_output_is_named(tmp_path: Path, unbuffered: str) -> None:
    source = flat_folder(tmp_path / "in", 3)
    command = f"{sys.executable} -m h5pack convert {source} {tmp_path}/o.h5 --dry-run >/dev/full"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 1
    assert result.stderr.startswith("h5pack: standard output ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("message", "parameters", "expected"),
    [
        ("give overwrite=True or resume=True", ("overwrite=True", "resume=True"), "give --overwrite or --resume"),
        ("give size=224", ("size=224",), "give --size 224"),
        ("size is 0; so is sizes", ("size is",), "size is 0; so is sizes"),
        ("give labels=''", ("labels=''",), "give --no-labels"),
        ("mode='' is invalid", ("mode=''",), "--mode '' is invalid"),
        ("chunk_rows and chunk_bytes", ("chunk_rows", "chunk_bytes"), "--chunk-rows and --chunk-bytes"),
        ("give source_kind='flat'", ("source_kind='flat'",), "give --source flat"),
        ("source='' is invalid", ("source=''",), "SOURCE '' is invalid"),
        ("name='' is invalid", ("name=''",), "name='' is invalid"),
        ("nothing=1 here", ("nothing=1",), "nothing=1 here"),
        ("another command with again=True", ("again=True",), "another command with --again"),
        ("not packed: 'labels'; give labels", ("labels",), "not packed: 'labels'; give --labels"),
        ("exclude what is excluded", ("exclude",), "--exclude what is excluded"),
        ("/x/root/a.csv, root.csv: give root.", ("root",), "/x/root/a.csv, root.csv: give --root."),
    ],
)
def test_parameters_in_messages_become_options(message: str, parameters: tuple[str, ...], expected: str) -> None:
    parser = cli._parser().parse_args(["convert", "in", "out"]).parser
    assert option_text(message, parameters, parser) == expected


def test_an_empty_folder_is_called_by_its_name_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "a.h5", ""]) == 2
    assert "h5pack: DIR '' " in capsys.readouterr().err


@pytest.mark.parametrize("kind", [errors.OutputExistsError, errors.NoSpaceError, errors.DamagedRowsError])
def test_errors_carry_data_between_processes(kind: type[errors.H5PackError]) -> None:
    error = kind("a message", path=Path("a.h5"), dataset="images", rows=[3, 4], parameters=("size",))
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.path, copied.dataset) == ("a message", "a.h5", "images")
    assert (copied.rows, copied.parameters) == ((3, 4), ("size",))


class Referent:
    """Something that can be referred to weakly."""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_weakref_callback_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    dropped = []

    def work(*_: object, **__: object) -> None:
        thing = Referent()
        reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), number))
        del thing
        dropped.append(reference)
        threading.Event().wait(60)

    monkeypatch.setattr("h5pack.inspect.info.info", work)
    assert run(capsys, "info", "x")[0] == code
    assert len(dropped) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_prints_no_traceback_of_a_worker_that_was_just_forked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    codes = []

    def work(*_: object, **__: object) -> None:
        # multiprocessing prints the exception before it calls the initializer of a pool.
        worker = multiprocessing.get_context("fork").Process(target=signal.raise_signal, args=(number,))
        worker.start()
        worker.join()
        codes.append(worker.exitcode)
        raise errors.WorkerError("a worker process died")

    monkeypatch.setattr("h5pack.inspect.info.info", work)
    assert cli.main(["info", "x"]) == 1
    assert codes == [code]
    assert len(capfd.readouterr().err.splitlines()) == 1


class _SlowlyStartedTimer(threading.Timer):
    """A timer whose first instance calls its function before `start` returns, as on a busy machine."""

    started = False

    def start(self) -> None:
        super().start()
        if not _SlowlyStartedTimer.started:
            _SlowlyStartedTimer.started = True
            self.join()


@pytest.mark.parametrize("timer", [threading.Timer, _SlowlyStartedTimer])
def test_a_signal_while_a_lock_is_acquired_does_not_leave_it_locked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], timer: type[threading.Timer]
) -> None:
    monkeypatch.setattr(threading, "Timer", timer)
    monkeypatch.setattr(_SlowlyStartedTimer, "started", False)
    steps: list[str] = []
    # The signal comes while `Condition.__enter__` runs, which has acquired the lock.
    enter, leave = partial(signal.raise_signal, signal.SIGTERM), lambda *_: steps.append("released")
    lock: Any = SimpleNamespace(acquire=None, release=None, locked=None, __enter__=enter, __exit__=leave)

    def work(*_: object, **__: object) -> None:
        with threading.Condition(lock):
            steps.append("acquired")
        time.sleep(60)

    monkeypatch.setattr("h5pack.inspect.info.info", work)
    assert run(capsys, "info", "x")[0] == 143
    assert steps == ["acquired", "released"]


def test_a_signal_while_a_lock_is_never_acquired_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    locked = threading.Lock()
    locked.acquire()

    later = threading.Timer(0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGTERM])

    def wait(*_: object, **__: object) -> None:
        later.start()
        with threading.Condition(locked):
            raise AssertionError

    monkeypatch.setattr("h5pack.inspect.info.info", wait)
    assert run(capsys, "info", "x")[0] == 143


def test_a_wrapped_signal_is_not_reported_as_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt as error:
            raise RuntimeError("Error calling __set_name__") from error  # as class statements of Python 3.11 do

    monkeypatch.setattr("h5pack.inspect.info.info", work)
    assert run(capsys, "info", "x")[0] == 143


@pytest.mark.parametrize("fails", [True, False])
def test_a_dropped_signal_is_not_reported_as_the_error_that_it_caused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    # A worker that dies of a SIGTERM to the whole process group makes the command fail before the signal is sent again.
    def work(*_: object, **__: object) -> None:
        thing = Referent()
        reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
        del thing
        assert reference() is None
        if fails:
            raise errors.WorkerError("a worker process died")
        raise SystemExit(0)

    later = []
    before = signal.signal(signal.SIGTERM, lambda number, _: later.append(number))
    try:
        monkeypatch.setattr("h5pack.inspect.info.info", work)
        if fails:
            assert run(capsys, "info", "x")[0] == 143
        else:
            with pytest.raises(SystemExit):
                run(capsys, "info", "x")
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not later


def test_a_signal_in_exec_ends_a_module_with_the_exit_status(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text("""
import signal, sys
from unittest.mock import patch
from h5pack import cli

def work(*_, **__):
    exec("signal.raise_signal(signal.SIGINT)")

with patch("h5pack.inspect.info.info", work):
    sys.exit(cli.main(["info", "x"]))
""")
    paths = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[1])))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-m", "command"], env=environment, capture_output=True)
    assert done.returncode == 130, done.stderr


@pytest.mark.parametrize("at_lock", [False, True])
def test_a_signal_while_handlers_are_restored_is_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at_lock: bool
) -> None:
    before, timer = signal.getsignal(signal.SIGTERM), Mock()
    restore = signal.signal
    lock: Any = SimpleNamespace(acquire=None, release=None, locked=None, __exit__=lambda *_: None)
    lock.__enter__ = partial(signal.raise_signal, signal.SIGTERM)

    def signaled(number: Any, handler: Any) -> Any:
        if handler is before:
            threading.Condition(lock).__enter__() if at_lock else lock.__enter__()
        return restore(number, handler)

    monkeypatch.setattr("h5pack.inspect.info.info", Mock(side_effect=errors.H5PackError("an error")))
    monkeypatch.setattr(signal, "signal", signaled)
    monkeypatch.setattr(threading, "Timer", timer)
    assert run(capsys, "info", "x")[0] == 1
    assert signal.getsignal(signal.SIGTERM) is before
    assert not timer.called, "the signal would be sent to the restored handler"


@pytest.mark.parametrize(("first", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_soon_after_another_does_not_interrupt_the_cleanup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], first: int, code: int, second: int
) -> None:
    clock, steps = [0.0], []
    monkeypatch.setattr("h5pack.cli.time.monotonic", lambda: clock[0])

    def work(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(first)
        finally:
            signal.raise_signal(second)
            steps.append("cleaned up")
            clock[0] += 1
            signal.raise_signal(first)
            steps.append("not stopped later")

    monkeypatch.setattr("h5pack.inspect.info.info", work)
    before = signal.getsignal(signal.SIGINT)
    assert run(capsys, "info", "x")[0] == code
    assert steps == ["cleaned up"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("ending", "options", "resumes"),
    [
        (".partial", {}, True),
        (".partial.survey", {}, True),
        (".new.partial", {}, True),
        (".partial.shards", {}, True),
        ("o-00003.h5.partial", {}, True),
        ("o-00003.h5.partial.survey", {}, True),
        (".partial", {"part": "2/3"}, False),
        (".partial", {"finish": True}, False),
    ],
)
def test_an_interruption_names_the_unfinished_file_and_an_option_that_continues_it(
    tmp_path: Path, ending: str, options: dict[str, object], resumes: bool
) -> None:
    out = tmp_path / "o.h5"
    kept = tmp_path / ending if ending[0] == "o" else Path(f"{out}{ending}")
    kept.write_bytes(b"x")
    text = cli._interrupted(argparse.Namespace(out=str(out), **options))
    assert f"{kept} " in text
    assert ("--resume" in text) == resumes


def test_a_file_of_another_conversion_is_not_named(tmp_path: Path) -> None:
    (tmp_path / "o-train.h5.partial").write_bytes(b"x")
    assert cli._interrupted(argparse.Namespace(out=str(tmp_path / "o.h5"))) == "interrupted"
