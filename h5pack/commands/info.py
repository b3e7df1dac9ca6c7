"""`h5pack info` on the command line."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    info = commands.add_parser(
        "info",
        parents=[common],
        help="what an HDF5 file holds, how it is stored, what that costs",
        description="Describe any HDF5 file: datasets, chunks, filters, overhead, cache advice, faults and their cure.",
    )
    info.set_defaults(run=run)
    info.add_argument("file", metavar="FILE")
    info.add_argument("--stats", action="store_true", help="class counts and channel statistics")


def run(arguments: argparse.Namespace) -> int:
    """Describe a file; the exit status."""
    from h5pack.tools.info import info
    from h5pack.tools.report import info_text

    report = info(arguments.file, stats=arguments.stats)
    print(json.dumps(report.to_json(), indent=1) if arguments.json else info_text(report))
    return 0
