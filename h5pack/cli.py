"""The command line: parse the arguments, run the command, and print errors as one line.

The commands import heavy modules such as torch only when they need them, so that ``h5pack --help`` is fast.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import glob
import io
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from h5pack.commands import bench, convert, doctor, inspect
from h5pack.commands.arguments import option_text
from h5pack.errors import H5PackError, OptionsError
from h5pack.system.text import printable
from h5pack.version import __version__

_EPILOG = """\
h5pack convert ./celebA out.h5            pack a folder of images
h5pack convert other.h5 out.h5            repack the images of any HDF5 file
h5pack append out.h5 ./more               add new images to a pack
h5pack join a.h5 b.h5 both.h5             join several packs into one
h5pack subset out.h5 small.h5 --sample 99 copy some rows of a pack to a new pack
h5pack info out.h5                        show what a file contains and how it is stored
h5pack verify out.h5                      check every row
h5pack preview out.h5 sheet.png           draw some images of each class
h5pack export out.h5 ./images             write the images to files
h5pack bench ./celebA                     measure which chunk size and settings are fastest
h5pack doctor out.h5                      find the slowest stage of feeding a training step
"""


_OTHER_WAYS = {
    ("convert", "--split"): " (to convert one split, give its folder as SOURCE, or use --include 'train/*')",
}
"""Hints that replace "did you mean" in the error message; the key is a command and an option that it does not have."""


_REPEAT_SECONDS = 0.4
_LOCK_MODULES = ("threading", "multiprocessing.synchronize")
_MAX_POSTPONED = 100


class _Parser(argparse.ArgumentParser):
    """A parser that prints each error in one line, and suggests a valid option in place of a mistyped one.

    It rejects abbreviated options, because options added later could make an abbreviation ambiguous.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments, and exit with status 2 if some are invalid."""
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command: _Parser = arguments.parser
            # Private API: argparse has no public list of a parser's options.
            known = [option for action in command._actions for option in action.option_strings]
            name = unknown[0].partition("=")[0]
            hint = _OTHER_WAYS.get((command.prog.rpartition(" ")[2], name)) or _option_hint(name, known)
            command.error(f"unrecognized arguments: {shlex.join(unknown)}{hint}")
        return arguments

    def error(self, message: str) -> NoReturn:
        """Print a message, and exit with status 2."""
        self.exit(2, f"{self.prog}: {printable(message)}; see {self.prog} --help\n")


def _option_hint(name: str, known: Sequence[str]) -> str:
    """Return a hint for the unrecognized argument `name`: a known option that starts with `name` or is similar to it.

    If `name` itself is a known option, it was given before the command. The hint is empty if no option is similar.
    """
    if not name:
        return ""
    if name in known:
        return f"; give {name} after the command"
    found = [one for one in known if one.startswith(name)] or difflib.get_close_matches(name, known, 1, 0.7)
    return f" (did you mean {found[0]}?)" if found else ""


class _Interrupted(KeyboardInterrupt):
    """Raised on SIGINT.

    After a plain KeyboardInterrupt that passes through ``exec``, as in a dataclass decorator, ``python -m h5pack`` ends
    by SIGINT instead of the exit status, even if the exception was caught.
    """


class _Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, which is handled like Ctrl-C: workers are stopped, and output that can be resumed is kept."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run h5pack with the arguments `argv`, by default ``sys.argv[1:]``, and return the exit status.

    The status is 0 for success, 1 for an error or damage, 2 for invalid arguments, 130 after SIGINT, 143 after SIGTERM.
    For ``--help``, ``--version`` and arguments that the parser rejects, raise SystemExit. With ``--debug``, raise the
    exception of a command that fails.
    """
    _open_standard_streams()
    parser = _parser()
    arguments = parser.parse_args(_joined(sys.argv[1:] if argv is None else argv))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Printing a file name that is not UTF-8 must not make a conversion fail.
            stream.reconfigure(errors="backslashreplace")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop = _SignalHandler()
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    unraisable_hook = sys.unraisablehook
    sys.unraisablehook = partial(stop.resend, unraisable_hook)
    try:
        try:
            code: int = arguments.run(arguments)
        except Exception:
            # The error is a consequence of a signal if Python dropped the exception that the handler raised (after a
            # SIGTERM to the whole process group, a worker has died), or wrapped it (Python 3.11 in a class statement).
            if stop.exception is not None:
                raise stop.exception from None
            raise
        sys.stdout.flush()
        return code
    except H5PackError as error:
        if arguments.debug:
            raise
        # Escape line breaks and terminal control sequences, which names of files and classes may contain.
        print(f"h5pack: {printable(option_text(str(error), error.parameters, arguments.parser))}", file=sys.stderr)
        return 2 if isinstance(error, OptionsError) else 1
    except KeyboardInterrupt as error:
        print(f"h5pack: {printable(_interrupted(arguments))}", file=sys.stderr)
        return 143 if isinstance(error, _Terminated) else 130
    except BrokenPipeError:
        # The program that reads standard output has closed it.
        _discard_output()
        return 1
    except Exception as error:
        # Most other errors are bugs in h5pack or a library. Print only one line unless --debug is given.
        if arguments.debug:
            raise
        print(f"h5pack: {printable(_unexpected(error))}", file=sys.stderr)
        return 1
    finally:
        stop.close()
        sys.unraisablehook = unraisable_hook
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _open_standard_streams() -> None:
    """Open /dev/null for closed standard streams, so that the next file to be opened does not get their output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _discard_output() -> None:
    """Redirect standard output to /dev/null. Otherwise, Python would fail again when it flushes the stream at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unexpected(error: Exception) -> str:
    """Return the message about an error that is not an H5PackError."""
    if isinstance(error, OSError) and error.filename is None:
        try:
            os.getcwd()
        except OSError as failed:
            return f"the working directory cannot be used ({failed.strerror}); change to another folder, then run again"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        try:
            print(flush=True)
        except OSError:
            _discard_output()
            return f"standard output cannot be written ({error.strerror}); redirect it to another file"
    return f"{type(error).__name__}: {error} (run again with --debug for the traceback)"


def _joined(argv: Sequence[str]) -> list[str]:
    """Join --value-range and its value with "=", because argparse would treat a value such as -1:1 as an option."""
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1] == "--value-range":
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


class _SignalHandler:
    """Raises `_Interrupted` on SIGINT, and `_Terminated` on SIGTERM. Then ignores signals for `_REPEAT_SECONDS`.

    Programs that forward a signal often send it twice: to the process and to its process group. A second exception
    would interrupt the cleanup after the first one: `h5pack join` has hung because a lock of `concurrent.futures` was
    never released.

    For the same reason, a signal is sent again later if it comes while a method of the standard library acquires or
    releases a lock for a ``with`` statement. An exception would leave the lock locked, and Python would wait for it at
    exit. If the method is still running after about a second, it waits for a lock, and is interrupted.

    A process that was just forked inherits this handler, and has it until `_start_worker` replaces it. There, SIGINT is
    ignored and SIGTERM ends the process, as with the later handlers: an exception would print a traceback.
    """

    def __init__(self) -> None:
        self.exception: type[KeyboardInterrupt] | None = None  # the one that was raised last
        self._process = os.getpid()
        self._last_time = -math.inf
        self._postponed = 0  # number of times in succession
        self._timer: threading.Timer | None = None  # sends a signal again

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            if number == signal.SIGTERM:
                os._exit(143)
            return
        if time.monotonic() - self._last_time <= _REPEAT_SECONDS:
            return
        if _is_at_lock(frame) and self._postponed < _MAX_POSTPONED:
            self._postponed += 1
            self._send(number, 0.01)
            return
        self._postponed, self._last_time = 0, time.monotonic()
        self.exception = _Terminated if number == signal.SIGTERM else _Interrupted
        raise self.exception

    def resend(self, previous_hook: Callable[[Any], object], unraisable: Any) -> None:
        """Send SIGINT or SIGTERM again if Python dropped the exception that this handler raised.

        Python drops exceptions that are raised in ``__del__``, in weakref callbacks and while it forks, and calls this
        hook. If the dropped exception is not from this handler, call `previous_hook`.
        """
        error = unraisable.exc_value
        if not isinstance(error, KeyboardInterrupt):
            previous_hook(unraisable)
            return
        number = signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT
        # Wait, because Python also drops an exception that is raised while this hook runs. Wait for more than
        # `_REPEAT_SECONDS`, because the handler ignores a second signal during that time.
        self._send(number, _REPEAT_SECONDS + 0.1)

    def _send(self, number: int, seconds: float) -> None:
        self._timer = threading.Timer(seconds, signal.pthread_kill, [threading.main_thread().ident, number])
        self._timer.start()

    def close(self) -> None:
        """Ignore signals and do not send them again, because the command has ended and its handlers are replaced."""
        self._last_time = math.inf
        if self._timer is not None:
            self._timer.cancel()


def _is_at_lock(frame: FrameType | None) -> bool:
    """Return whether `frame` or one of its callers acquires or releases a lock for a ``with`` statement.

    A signal that is sent again may come before the handler, which starts a timer, has returned to such a caller.
    """
    while frame is not None:
        if frame.f_code.co_name in ("__enter__", "__exit__") and frame.f_globals.get("__name__") in _LOCK_MODULES:
            return True
        frame = frame.f_back
    return False


def _interrupted(arguments: argparse.Namespace) -> str:
    """Return the message after SIGINT or SIGTERM. If there is unfinished output, the message says how to continue."""
    given = getattr(arguments, "out", getattr(arguments, "folder", None))
    if given is None:
        return "interrupted"
    out = Path(given)
    # `append` first packs the new images into OUT.new or, if OUT is a virtual file, into a further shard.
    endings = (".partial", ".partial.shards", ".partial.survey", ".new", ".new.partial", ".new.partial.survey")
    shards = f"{glob.escape(out.stem)}-{'[0-9]' * 5}{glob.escape(out.suffix)}.partial*"
    for kept in (*(f"{out}{ending}" for ending in endings), *map(str, sorted(out.parent.glob(shards)))):
        if os.path.exists(kept):
            in_parts = getattr(arguments, "part", None) or getattr(arguments, "finish", False)
            again = "again" if in_parts else "with --resume"
            return f"interrupted; {kept} is kept: run the same command {again} to continue"
    return "interrupted"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="h5pack",
        description="Pack an image folder once into ordinary chunked HDF5, then feed a GPU from it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"h5pack {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for module in (convert, inspect, bench, doctor):
        module.add(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        command.add_argument("--debug", action="store_true", help="if an error occurs, print its traceback")
    return parser


if __name__ == "__main__":
    sys.exit(main())
