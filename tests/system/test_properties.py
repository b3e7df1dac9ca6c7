"""Properties that are computed once, without a lock."""

from __future__ import annotations

import threading

from h5pack.system.properties import cached_property
from tests.read.files import in_child


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
    computed = in_child(lambda: Slow(free).value == 5)
    waiting.may_end.set()
    thread.join()
    assert computed
