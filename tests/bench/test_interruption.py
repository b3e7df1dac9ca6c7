"""A signal that Python swallows is raised again at the next look."""

from __future__ import annotations

import os
import signal
import threading
import weakref

import pytest

from h5pack.bench.interruption import Interruption


class Thing:
    """Something that can be referred to weakly."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_swallowed_ctrl_c_is_raised_at_the_next_look(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        interruption.check()
        thing = Thing()
        reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
        # The callback's exception goes nowhere.
        del thing
        assert reference() is None
        with pytest.raises(KeyboardInterrupt):
            interruption.check()
        # Raised once.
        interruption.check()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ordinary_one_comes_at_once() -> None:
    with Interruption(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_another_thread_leaves_the_handlers_alone() -> None:
    found = []

    def look() -> None:
        with Interruption() as interruption:
            found.append(signal.getsignal(signal.SIGINT))
            interruption.check()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
