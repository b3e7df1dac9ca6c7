"""The command `h5pack info`: its arguments and its output."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add this command and its arguments to the parser."""
    info = commands.add_parser(
        "info",
        parents=[common],
        help="what an HDF5 file holds, how it is stored, what that costs",
        description="Describe any HDF5 file: datasets, chunks, filters, overhead, cache advice, faults and fixes.",
    )
    info.set_defaults(run=run, parser=info)
    info.add_argument("file", metavar="FILE")
    info.add_argument("--stats", action="store_true", help="class counts and channel statistics")


def run(arguments: argparse.Namespace) -> int:
    """Print the description of a file; return the exit status."""
    from h5pack.inspect.info import info

    report = info(arguments.file, stats=arguments.stats)
    print(json.dumps(report.to_json(), indent=1) if arguments.json else report.to_text())
    return 0
