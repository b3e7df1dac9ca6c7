"""Ctrl-C that is not lost: one that comes inside a weak reference's callback is swallowed there by Python."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """Notes SIGINT and SIGTERM, whose handlers go on as before; a context manager.

    Outside the main thread, where no signals come, it does nothing.
    """

    def __init__(self) -> None:
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._noted: int | None = None

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def check(self) -> None:
        """Raise what the handler raises, if a signal came and that was swallowed.

        Raises
        ------
        KeyboardInterrupt
            Or whatever the handler raises.
        """
        number, self._noted = self._noted, None
        if number is not None and number in self._before:
            self._before[number](number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number
        self._before[number](number, frame)
