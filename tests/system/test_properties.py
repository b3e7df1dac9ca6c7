"""Properties that are computed once, without a lock."""

from __future__ import annotations

import os
import signal
import threading

from h5pack.system.properties import cached_property


class Slow:
    """An object whose value takes as long to compute as a test wants."""

    def __init__(self, may_end: threading.Event) -> None:
        self.begun, self.may_end, self.computed = threading.Event(), may_end, 0

    @cached_property
    def value(self) -> int:
        """The value."""
        self.computed += 1
        self.begun.set()
        assert self.may_end.wait(60)
        return 5


def test_a_value_is_computed_once() -> None:
    may_end = threading.Event()
    may_end.set()
    one, other = Slow(may_end), Slow(may_end)
    assert (one.value, one.value, other.value) == (5, 5, 5)
    assert (one.computed, other.computed) == (1, 1)
    assert Slow.value.__doc__ == "The value."


def test_a_process_that_is_forked_while_a_value_is_computed_can_compute_it() -> None:
    waiting, free = Slow(threading.Event()), threading.Event()
    free.set()
    thread = threading.Thread(target=lambda: waiting.value)
    thread.start()
    assert waiting.begun.wait(60)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        os._exit(Slow(free).value)
    status = os.waitpid(child, 0)[1]
    waiting.may_end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 5
