"""The command line: parse, call, print. No logic, and nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from h5pack.commands import bench, convert, doctor, export, info, preview, verify
from h5pack.errors import H5PackError, OptionsError
from h5pack.version import __version__

_EPILOG = """\
h5pack convert ./celebA out.h5            pack a folder of images
h5pack convert theirs.h5 out.h5           pack the images of any HDF5 file anew
h5pack info out.h5                        what a file holds, and what its chunks cost
h5pack verify out.h5                      check every row
h5pack preview out.h5 sheet.png           some images of every class
h5pack export out.h5 ./images             back to an image folder
h5pack bench ./celebA                     which chunks and settings are fastest here
h5pack doctor out.h5                      which stage of feeding a training step is slow
"""


class _Terminated(KeyboardInterrupt):
    """SIGTERM, handled as Ctrl-C is: stop the workers, keep what is written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; None: the process's own.

    Returns
    -------
    int
        0; 1 for an error or a damaged pack; 2 for misuse; 130 and 143 for SIGINT and SIGTERM.
    """
    parser = _parser()
    arguments = parser.parse_args(_joined(sys.argv[1:] if argv is None else argv))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names are bytes; one that is no text must not stop a conversion.
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except OptionsError as error:
        if arguments.debug:
            raise
        print(f"h5pack: {error}", file=sys.stderr)
        return 2
    except H5PackError as error:
        if arguments.debug:
            raise
        print(f"h5pack: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"h5pack: {_interrupted(arguments)}", file=sys.stderr)
        return 143 if isinstance(error, _Terminated) else 130
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain once more when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # Whatever h5pack did not foresee: still one line, unless it is asked for more.
        if arguments.debug:
            raise
        print(f"h5pack: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        return 1


def _joined(argv: Sequence[str]) -> list[str]:
    """The arguments, with a value range tied to its option: one like -1:1 would be taken for an option itself."""
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1] == "--value-range":
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _terminate(number: int, frame: Any) -> None:
    raise _Terminated


def _interrupted(arguments: argparse.Namespace) -> str:
    out = getattr(arguments, "out", None)
    if out is not None and os.path.exists(f"{out}.partial"):
        return f"interrupted; {out}.partial is kept: run the same command with --resume to continue"
    return "interrupted; nothing was written"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="h5pack",
        description="Pack an image folder once into ordinary chunked HDF5, then feed a GPU from it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"h5pack {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object for programs")
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (convert, info, verify, preview, export, bench, doctor):
        command.add(commands, common)
    return parser


if __name__ == "__main__":
    sys.exit(main())
