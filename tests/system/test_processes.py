"""Where tasks run, and that workers never outlive their parent."""

from __future__ import annotations

import errno
import functools
import io
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from multiprocessing.synchronize import SemLock
from pathlib import Path
from pickle import PicklingError
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import h5pack
from h5pack.errors import WorkerError
from h5pack.system.processes import SerialExecutor, _may_need_main, choose_start_method, open_executor, run, shared
from tests.crashing import children_of, gone, wait_for
from tests.makers import flat_folder


def times_shared(number: int) -> int:
    return number * shared()


def process_of(number: int) -> int:
    return os.getpid()


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail_at_three(path: str) -> str:
    Path(path).touch()
    if path.endswith("3"):
        raise ValueError("three")
    if int(Path(path).name) > 3:
        signal.pause()
    return path


def unpicklable(number: int) -> object:
    return lambda: number


class NamedTask(int):
    def __str__(self) -> str:
        return f"task {int(self)}"


@pytest.mark.parametrize(("workers", "method"), [(1, None), (2, "fork"), (2, "forkserver"), (2, "spawn")])
def test_every_task_runs_once_and_sees_the_shared_object(workers: int, method: str | None) -> None:
    with open_executor(workers, method, 10) as executor:
        assert list(run(executor, times_shared, [], 4)) == []
        results = list(run(executor, times_shared, range(50), 4))
        processes = set(run(executor, process_of, range(8), 8))
    assert sorted(results) == [number * 10 for number in range(50)]
    assert 1 <= len(processes) <= workers
    assert (os.getpid() in processes) == (workers == 1)
    assert shared() is None


def test_shared_objects_of_nested_executors() -> None:
    with open_executor(1, None, "outer"):
        with open_executor(1, None, "inner"):
            assert shared() == "inner"
        assert shared() == "outer"
    assert shared() is None
    with pytest.raises(KeyError), open_executor(1, None, "failing"):
        raise KeyError
    assert shared() is None


@pytest.mark.parametrize("workers", [1, 2])
def test_tasks_are_made_only_when_there_is_room(workers: int) -> None:
    received: list[int] = []
    under_way = []

    def tasks() -> Iterator[int]:
        for number in range(200):
            under_way.append(number + 1 - len(received))
            yield number

    with open_executor(workers, "fork", 1) as executor:
        for number in run(executor, times_shared, tasks(), 6):
            received.append(number)
    assert len(received) == 200
    assert 4 <= max(under_way) <= 6 + 6, "six under way, and at most as many finished together"


def test_a_worker_that_dies_is_named_by_its_task() -> None:
    with pytest.raises(WorkerError, match=r"near .*task \d"), open_executor(2, "fork", None) as executor:
        list(run(executor, die_at_three, map(NamedTask, range(1_000)), 4))


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        (f"{SemLock.__module__}.{SemLock.__name__}.__init__", FileNotFoundError(errno.ENOENT, "no /dev/shm")),
        ("os.pipe", OSError(errno.EMFILE, "too many open files")),
        ("os.fork", BlockingIOError(errno.EAGAIN, "too many processes")),
    ],
)
@pytest.mark.parametrize("isolated", [False, True])
def test_workers_that_cannot_be_started_are_one_error(
    failing: str, error: OSError, isolated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children_of(os.getpid())
    monkeypatch.setattr(failing, Mock(side_effect=error))
    with pytest.raises(WorkerError) as caught, open_executor(2, "fork", None, isolated=isolated) as executor:
        list(run(executor, process_of, range(3), 2))
    monkeypatch.undo()
    assert error.strerror in str(caught.value)
    assert ("num_workers=1" in str(caught.value)) == (not isolated)
    assert set(children_of(os.getpid())) <= set(before)


def test_a_working_directory_that_was_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    with pytest.raises(WorkerError, match="working directory"), open_executor(2, "spawn", None):
        pass


def pool_worker_error(_: int) -> str:
    try:
        with open_executor(2, None, None):
            return ""
    except WorkerError as error:
        return str(error)


def test_a_worker_of_a_pool_may_start_no_workers() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert "daemonic" in pool.map(pool_worker_error, [0])[0]


def test_an_exception_stops_tasks_that_would_never_end(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}") for number in range(100)]
    with pytest.raises(ValueError, match="three"), open_executor(2, "fork", None) as executor:
        list(run(executor, fail_at_three, paths, 50))
    assert len(list(tmp_path.iterdir())) < 15


def test_a_consumer_that_stops_leaves_no_process() -> None:
    before = children_of(os.getpid())
    with pytest.raises(KeyboardInterrupt), open_executor(2, "fork", None) as executor:
        list(map(Mock(side_effect=KeyboardInterrupt), run(executor, process_of, range(1_000), 4)))
    assert set(children_of(os.getpid())) - set(before) == set()


def test_a_result_that_cannot_be_pickled_is_an_error_not_a_wait() -> None:
    with pytest.raises((AttributeError, PicklingError)), open_executor(2, "fork", None) as executor:
        list(run(executor, unpicklable, range(3), 2))


def test_the_serial_executor_keeps_an_exception_for_its_future() -> None:
    assert isinstance(SerialExecutor().submit(int, "x").exception(), ValueError)
    with pytest.raises(KeyboardInterrupt):
        SerialExecutor().submit(Mock(side_effect=KeyboardInterrupt))


def test_fork_is_chosen_only_on_linux_and_if_there_is_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    for platform, threads in (("linux", 1), ("linux", 2), ("darwin", 1)):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(threading, "active_count", lambda threads=threads: threads)
        chosen.append(choose_start_method())
    assert chosen == ["fork", "forkserver", "forkserver"]


class Held:
    """An object with one attribute."""

    def __init__(self, value: Any) -> None:
        self.value = value


class FailsToUnpickle:
    def __reduce__(self) -> Any:
        return int, ("not a\nnumber",)


def test_what_cannot_be_pickled_is_named_before_a_process_starts() -> None:
    held = Held(Held([threading.Lock()]))
    with (
        pytest.raises(WorkerError, match=r"^value\.value .*TypeError: .*lock") as caught,
        open_executor(2, "spawn", held),
    ):
        raise AssertionError
    assert caught.value.parameters == ("num_workers=1",)
    with open_executor(1, "spawn", held) as executor:
        assert list(run(executor, process_of, range(2), 2)) == [os.getpid()] * 2
    held.value = held
    held.function = lambda: 0
    with pytest.raises(WorkerError), open_executor(2, "spawn", held):
        raise AssertionError


def test_what_cannot_be_unpickled_is_an_error_with_the_reason() -> None:
    held = Held(FailsToUnpickle())
    with pytest.raises(WorkerError, match=r"ValueError: .*not a") as caught, open_executor(2, "spawn", held):
        pass
    assert caught.value.parameters == ("num_workers=1",)
    assert "\n" not in str(caught.value)


def test_forked_workers_do_not_share_the_position_of_an_open_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    with path.open("rb") as file, path.open() as lines, zipfile.ZipFile(path) as archive:
        calls = [functools.partial(len, file), lambda: file, file.read, Held]
        for shared_object in (file, [Held({"a": lines})], Held(archive), *calls[:-1]):
            with (
                pytest.raises(WorkerError, match=re.escape(str(path))) as caught,
                open_executor(2, "fork", shared_object),
            ):
                pass
            assert caught.value.parameters == ("num_workers=1",)
            with open_executor(1, "fork", shared_object):
                pass
        # A global counts only if a function names it.
        globals()["_FILE"] = file
        with (tmp_path / "log").open("w") as log:
            for allowed in (calls[-1], process_of, io.BytesIO(b"x"), log, sys.stderr, logging.getLogger(), pytest):
                with open_executor(2, "fork", Held(allowed)) as executor:
                    assert len(list(run(executor, process_of, [1], 1))) == 1
    del globals()["_FILE"]
    with open_executor(2, "fork", Held(file)):
        pass


_HELD: Any = None


class HeldByClass:
    """A class that can hold a file."""

    file: Any = None


class NamesAGlobal(HeldByClass):
    """A class with a method in which a nested function refers to a global."""

    def read(self) -> Any:
        return [_HELD.read(1) for _ in range(1)]


class NamesAnAttribute:
    """A class with an attribute that has the name of a global."""

    _HELD = 3

    def read(self) -> int:
        return self._HELD


@pytest.mark.parametrize("place", ["class", "global", "function"])
def test_files_held_by_classes_and_globals_are_found(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.touch()
    with path.open("rb") as file:
        if place == "class":
            monkeypatch.setattr(HeldByClass, "file", file)
        elif place == "global":
            monkeypatch.setitem(globals(), "_HELD", file)
        else:
            monkeypatch.setattr(process_of, "file", file, raising=False)
        shared_object = process_of if place == "function" else NamesAGlobal()
        with pytest.raises(WorkerError, match=re.escape(str(path))), open_executor(2, "fork", shared_object):
            pass
        with open_executor(2, "fork", NamesAnAttribute()):
            pass


def descendants(process: int) -> list[int]:
    children = children_of(process)
    return [*children, *(other for child in children for other in descendants(child))]


def ignores_sigint(process: int) -> bool:
    """Whether it has SIGINT in its mask of ignored signals."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return bool(mask >> (signal.SIGINT - 1) & 1)


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
PARENT = """
import sys, time
from h5pack.system.processes import open_executor, run

def work(number):
    end = time.monotonic() + 60
    while number % 2 and time.monotonic() < end:
        pass
    if number >= 3:
        time.sleep(60)
    return number

if __name__ == "__main__":
    with open_executor(3, sys.argv[1], work) as executor:
        for number in run(executor, work, [0, 2, 0, 3, 4, 6], 6):
            if number == 2:
                print("ready", flush=True)
"""


@pytest.mark.parametrize(("method", "busy"), [("fork", True), ("forkserver", True), ("spawn", False)])
def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path, method: str, busy: bool) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT if busy else PARENT.replace("[0, 2, 0, 3, 4, 6]", "[0, 2, 0, 4, 4, 4]"))
    parent = subprocess.Popen([sys.executable, str(script), method], stdout=subprocess.PIPE, env=ENVIRONMENT)
    try:
        assert parent.stdout.readline() == b"ready\n"
        wait_for(lambda: len(descendants(parent.pid)) >= 3)
        workers = descendants(parent.pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert all(map(gone, workers))


def test_ctrl_c_reaches_the_parent_alone(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole group; the workers leave it to their parent."""
    script = tmp_path / "parent.py"
    # One worker is in a task, two wait for theirs.
    script.write_text(PARENT.replace("[0, 2, 0, 3, 4, 6]", "[0, 2, 4]"))
    command = [sys.executable, str(script), "fork"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    parent = subprocess.Popen(command, **pipes, env=ENVIRONMENT, start_new_session=True)
    assert parent.stdout.readline() == b"ready\n"
    workers = children_of(parent.pid)
    assert len(workers) == 3
    # One that has done nothing yet may not have started.
    wait_for(lambda: all(map(ignores_sigint, workers)))
    os.killpg(parent.pid, signal.SIGINT)
    _, errors = parent.communicate(timeout=90)
    assert errors.count(b"Traceback") == 1
    assert errors.rstrip().endswith(b"KeyboardInterrupt")
    assert all(map(gone, workers))


def test_stopping_amid_large_results_does_not_hang(tmp_path: Path) -> None:
    """A worker that is killed while it sends leaves half a result in the pipe."""
    script = tmp_path / "stop.py"
    script.write_text(
        "from h5pack.system import processes\n"
        "def large(size):\n"
        "    return bytes(size)\n"
        "if __name__ == '__main__':\n"
        "    for _ in range(4):\n"
        "        try:\n"
        "            with processes.open_executor(2, 'fork', None) as executor:\n"
        "                for _ in processes.run(executor, large, [20_000_000] * 40, 4, ordered=True):\n"
        "                    raise KeyError('stop')\n"
        "        except KeyError:\n"
        "            pass\n"
    )
    subprocess.run([sys.executable, str(script)], check=True, timeout=300)


PROGRAM = """
import sys, threading
from h5pack.errors import WorkerError
from h5pack.system.processes import open_executor, run

class Source:
    pass

def start():
    try:
        with open_executor(2, sys.argv[1], Source()) as executor:
            print(sum(run(executor, abs, [-1, -2], 2)))
    except WorkerError as error:
        print(*error.parameters)

"""
REFUSED, STARTED = b"num_workers=1\n", b"3\n"


@pytest.mark.parametrize(
    ("way", "method", "call", "output"),
    [
        ("script", "spawn", "start()", REFUSED),
        ("script", "forkserver", "thread = threading.Thread(target=start); thread.start(); thread.join()", REFUSED),
        ("script", "forkserver", "if __name__ == '__main__': start()", STARTED),
        # Not a guard, but this is seen only when a worker starts.
        ("script", "spawn", "if sys.argv: start()", REFUSED),
        ("stdin", "forkserver", "if __name__ == '__main__': start()", REFUSED),
        ("notebook", "spawn", "start()", REFUSED),
    ],
)
def test_a_class_of_the_main_program_is_used_in_workers_or_refused(
    tmp_path: Path, way: str, method: str, call: str, output: bytes
) -> None:
    program = PROGRAM + call
    (tmp_path / "script.py").write_text(program)
    # The program of -c has no file, as that of a notebook.
    first = {"script": [str(tmp_path / "script.py")], "stdin": ["-"], "notebook": ["-c", program]}[way]
    done = subprocess.run(
        [sys.executable, *first, method], input=program.encode(), env=ENVIRONMENT, capture_output=True, check=True
    )
    assert done.stdout == output
    assert (b"Traceback" in done.stderr) == ("sys.argv:" in call)


@pytest.mark.parametrize(("method", "kind"), [("spawn", "pack"), ("forkserver", "folder")])
def test_a_script_needs_no_guard_unless_workers_need_its_classes(tmp_path: Path, method: str, kind: str) -> None:
    """Other sources do not need the script, so that workers never run it again."""
    source, script = flat_folder(tmp_path / "photos", 9), tmp_path / "script.py"
    if kind == "pack":
        h5pack.convert(source, tmp_path / "a.h5", num_workers=1)
        source = tmp_path / "a.h5"
    script.write_text(
        "import sys, h5pack\n"
        "print('runs')\n"
        "print(h5pack.convert(*sys.argv[2:], num_workers=2, start_method=sys.argv[1]).images)\n"
        "print(sys.modules['__main__'].__file__ == sys.argv[0])\n"
    )
    command = [sys.executable, str(script), method, str(source), str(tmp_path / "b.h5")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=True, timeout=300)
    assert (done.stdout, done.stderr) == (b"runs\n9\nTrue\n", b"")


def test_what_may_need_the_main_script() -> None:
    values = [None, {"a": (1, "b")}, Path("x"), functools.partial(len, "x"), np.zeros(3), threading.Lock()]
    assert not any(map(_may_need_main, values))
    assert not _may_need_main(values)
    for users in (Held(1), Held, process_of, [{"a": functools.partial(process_of)}], np.array([Held(1)], object)):
        assert _may_need_main(users)


def wait_long(mark: str) -> None:
    time.sleep(30)
    Path(mark).touch()


def test_a_signal_that_does_not_wake_the_main_thread_is_handled_soon(tmp_path: Path) -> None:
    """One that another thread receives, or that arrives just before the main thread begins to wait."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def work() -> None:
        with open_executor(2, "fork", None) as executor:
            threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
            list(run(executor, wait_long, [str(tmp_path / name) for name in "ab"], 2))

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.signal(signal.SIGINT, before)
    assert os.listdir(tmp_path) == [], "the tasks did not end"
