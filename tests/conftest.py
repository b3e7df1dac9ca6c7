"""Fixtures of all tests."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from typing import Any

import hypothesis
import pytest

from tests import stacks

# Set before torch is imported, here and in child processes: the threads of a process would wait for each other by
# spinning, and the processes of a parallel run keep the CPUs busy already.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Child processes would compile each module that they import, for half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Each worker of a fork server would otherwise import torch again, for seconds, and each command of a page of the docs
# what converts.
multiprocessing.set_forkserver_preload(
    ["torch", "h5pack.data.dataset", "h5pack.commands.convert", "h5pack.combine.convert"]
)

# On a loaded machine any example may take long. The examples are the same in every run, so that a change cannot fail
# because of an example that has nothing to do with it. With --hypothesis-profile=search, each run draws other examples.
_SLOW_MACHINE = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("h5pack", _SLOW_MACHINE, derandomize=True)
hypothesis.settings.register_profile("search", _SLOW_MACHINE, print_blob=True)
hypothesis.settings.load_profile("h5pack")


def pytest_configure() -> None:
    """Let SIGINT interrupt the tests' processes, also where it is ignored.

    A shell without job control starts background commands with SIGINT ignored, and a process that is started with it
    ignored keeps ignoring it. After this, children find the default disposition, as they do under a terminal.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # While modules are imported and tests are collected, nothing becomes garbage.
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what lives as long as the process, all modules and tests, out of each collection of garbage."""
    gc.freeze()
    gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """After pytest's faulthandler plugin has set its file, and before pytest-xdist starts the workers."""
    config = session.config
    stacks.begin(is_worker=hasattr(config, "workerinput"), is_controller=config.pluginmanager.hasplugin("dsession"))


def pytest_unconfigure() -> None:
    stacks.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that contain a set, whose order differs from process to process of a parallel run."""
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        sets = [value for value in values if isinstance(value, (set, frozenset)) and len(value) > 1]
        if any(str(value) in item.nodeid for value in sets):
            raise pytest.UsageError(f"{item.nodeid}: the name contains a set")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of pytest-xdist has ended."""
    if error is not None:
        stacks.note_dead_worker(node)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for text in stacks.report():
        terminalreporter.section("a worker died")
        terminalreporter.write_line(text)


@pytest.fixture(autouse=True)
def fast_files_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush no file, because a kill loses nothing that was written; fork workers, although pytest-xdist has threads.

    Tests that need the real functions call ``monkeypatch.undo()``.
    """
    monkeypatch.setattr(os, "fsync", os.fstat)
    monkeypatch.setattr("h5pack.system.processes.choose_start_method", lambda: "fork")
