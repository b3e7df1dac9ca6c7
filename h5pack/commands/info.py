"""The command `h5pack info`: its arguments and its output."""

from __future__ import annotations

import argparse
from typing import Any

from h5pack.commands.arguments import print_report


def add(commands: Any) -> None:
    """Add this command and its arguments to the parser."""
    info = commands.add_parser(
        "info",
        help="show what an HDF5 file contains and how it is stored",
        description="Describe any HDF5 file: its datasets, chunks, filters and storage overhead, the recommended chunk "
        "cache, and properties that slow down reading, with a command that fixes them.",
    )
    info.set_defaults(run=run)
    info.add_argument("file", metavar="FILE")
    info.add_argument("--stats", action="store_true", help="also report class counts and channel statistics")


def run(arguments: argparse.Namespace) -> int:
    """Print the description of a file; return the exit status."""
    from h5pack.inspect.info import info

    print_report(info(arguments.file, stats=arguments.stats), arguments)
    return 0
